"""Spends a budget of bytes on layers: one choice for each, with the smallest sum of costs.

This is the multiple-choice knapsack problem. Sizes are whole bytes of a token, so dynamic programming solves it
exactly: layer by layer, for every budget up to the given one. It knows nothing of formats; `check.py` has their sizes
and costs. There is no budget of time: how long a pre-flight takes follows from the text that `divergence.py` reads.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

# Stands for a cost that is infinite, so that such choices are still taken where nothing else fits.
RUIN = 1e6


def cheapest(layers: Sequence[Sequence[tuple[int, float]]], budget: int) -> list[int] | None:
    """The place of each layer's choice, so that sizes add up to at most `budget` and costs to the least.

    Time and memory grow with the number of layers times the budget, divided by the common divisor of all sizes.

    Args:
        layers: Per layer, its choices as (size, cost).
        budget: The most that all sizes may add up to.

    Returns:
        Places in `layers`, or `None` if even the smallest choices do not fit. Of equal costs, the smaller size is
        taken.
    """
    if sum(min(size for size, _ in choices) for choices in layers) > budget:
        return None
    unit = math.gcd(*(size for choices in layers for size, _ in choices)) or 1
    total = min(budget, sum(max(size for size, _ in choices) for choices in layers)) // unit
    # The least cost of the layers so far, by the most units that they may take; infinite if they need more.
    least = torch.zeros(total + 1, dtype=torch.float64)
    taken = []
    for choices in layers:
        best = torch.full_like(least, math.inf)
        place_of = torch.zeros(total + 1, dtype=torch.int16)
        for place, (size, cost) in sorted(enumerate(choices), key=lambda each: each[1]):
            units = size // unit
            if units > total:
                break
            cost_of = least[: total + 1 - units] + min(cost, RUIN)
            is_better = cost_of < best[units:]
            best[units:][is_better] = cost_of[is_better]
            place_of[units:][is_better] = place
        least = best
        taken.append(place_of)
    places = []
    left = total
    for choices, place_of in zip(reversed(layers), reversed(taken), strict=True):
        places.append(int(place_of[left]))
        left -= choices[places[-1]][0] // unit
    return places[::-1]
