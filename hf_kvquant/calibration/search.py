"""Lists the smoothing factors to try for a layer, ranks them by error, and decides when one is worth folding.

A candidate is an exponent alpha, for factors `max|key|^alpha`, or `"energy"`, for factors that give keys and queries
equal energy. Factors are rounded to powers of two and shared by tied channels (`layout.py`). `calibration.py` measures
the error of each candidate; `smoothing.py` decides what to do with the chosen factors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..spec.formats import KVFormat
from ..spec.key_transform import KeyTransform
from .text import KeyStatistics, Windows, output_errors

Candidate = float | Literal["energy"]
CANDIDATES: tuple[Candidate, ...] = (0.0, 0.25, 0.5, 0.75, 1.0, "energy")
# Factors beyond 2^±8 are useless: keys whose channels differ by more would lose as much in bfloat16.
MAX_EXPONENT = 8
# A layer is smoothed only if its error falls by at least this share; less is noise of the calibration text.
MIN_GAIN = 0.05


def checked_candidates(candidates: Sequence[Candidate]) -> list[Candidate]:
    """The user's candidates without duplicates, after 0.0, which changes nothing."""
    for choice in candidates:
        is_alpha = isinstance(choice, int | float) and not isinstance(choice, bool) and 0 <= choice <= 2
        if choice != "energy" and not is_alpha:
            raise ValueError(
                f"smooth_attention: `candidates` must be exponents from 0 to 2 or 'energy', got {choice!r}. "
                f"Common ones are {list(CANDIDATES)}."
            )
    return list(dict.fromkeys([0.0, *(choice if choice == "energy" else float(choice) for choice in candidates)]))


def exponents_of(statistics: KeyStatistics, ties: Tensor, choice: Candidate, center: Tensor | None) -> Tensor:
    """Base-2 logarithms of one candidate's factors.

    Args:
        statistics: The layer's statistics.
        ties: `[num_kv_heads, head_dim]` int64: channels with the same number get the same factor.
        choice: An alpha, or `"energy"`.
        center: Subtracted from keys before they are divided; `None` for nothing.

    Returns:
        `[num_kv_heads, head_dim]` int64.
    """
    head_dim = ties.shape[1]
    cluster = (ties // head_dim).amin(1)
    ties = ties.flatten()

    def over_ties(values: Tensor, how: Literal["amax", "sum"]) -> Tensor:
        start = torch.zeros(ties.numel(), dtype=torch.float64)
        return start.scatter_reduce(0, ties, values.flatten().double(), how)[ties].view_as(values)

    if choice == "energy":
        # Equal energy of keys and queries in each channel minimises the product of their total energies.
        ratio = over_ties(statistics.energy(center), "sum") / over_ties(statistics.query_mean_square, "sum")
        logs = ratio.log2() / 4
    else:
        logs = float(choice) * over_ties(statistics.largest(center), "amax").log2()
    # A channel that is zero in all keys or all queries gets factor 1.
    is_dead = ~logs.isfinite()
    logs = logs.masked_fill(is_dead, 0.0)
    # A factor common to a whole head does not change the error, so remove it: the mean over each cluster of tied heads.
    for number in cluster.unique():
        inside = (cluster == number)[:, None] & ~is_dead
        logs[inside] -= logs[inside].mean()
    return logs.masked_fill(is_dead, 0.0).round().clamp(-MAX_EXPONENT, MAX_EXPONENT).long()


def errors_of(
    model: PreTrainedModel,
    windows: Windows,
    *,
    formats: Mapping[int, KVFormat],
    transforms: Mapping[int, Sequence[KeyTransform]],
    advance: Callable[[int], Any] = lambda tokens: None,
) -> dict[int, list[float]]:
    """The error of each layer under each choice of transform. Equal choices are measured once."""
    distinct: dict[int, list[KeyTransform]] = {}
    numbers: dict[int, list[int]] = {}
    for index, choices in transforms.items():
        distinct[index], numbers[index] = [], []
        for choice in choices:
            same = [number for number, other in enumerate(distinct[index]) if choice.equals(other)]
            numbers[index].append(same[0] if same else len(distinct[index]))
            if not same:
                distinct[index].append(choice)
    measured = output_errors(model, windows, formats, distinct, advance)
    return {index: [measured[index][number] for number in order] for index, order in numbers.items()}


def pick(errors: Sequence[float]) -> int:
    """The index of the choice with the smallest error, or 0 (change nothing) if it gains less than `MIN_GAIN`."""
    best = min(range(len(errors)), key=errors.__getitem__)
    return best if errors[best] <= (1 - MIN_GAIN) * errors[0] else 0
