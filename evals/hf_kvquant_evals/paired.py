"""Statistics of two runs over the same items, with and without quantisation.

Their difference varies far less than that of two independent samples: only items whose answer changes count.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

NUM_RESAMPLES = 10_000
LEVEL = 0.95  # confidence of intervals


class PairedAccuracy(NamedTuple):
    """How the accuracy of one run differs from that of another on the same items."""

    difference: float
    standard_error: float
    p_value: float  # of the exact McNemar test


def paired_accuracy(correct: Sequence[float], reference: Sequence[float]) -> PairedAccuracy:
    """Compare two runs over the same items, 0 or 1 per item. Raises `ValueError` unless there are as many, and any."""
    num_items = len(reference)
    if num_items == 0 or len(correct) != num_items:
        raise ValueError(
            f"paired_accuracy: `correct` must have as many items as `reference`, at least one, got {len(correct)} and "
            f"{num_items}."
        )
    lost = sum(old > new for new, old in zip(correct, reference, strict=True))
    won = sum(new > old for new, old in zip(correct, reference, strict=True))
    variance = lost + won - (lost - won) ** 2 / num_items
    return PairedAccuracy((won - lost) / num_items, math.sqrt(variance) / num_items, mcnemar(lost, won))


def mcnemar(lost: int, won: int) -> float:
    """Two-sided p-value of the exact McNemar test: how likely `lost + won` tosses of a fair coin are this uneven."""
    changed = lost + won
    # In integers, so that nothing underflows for any number of items.
    tail = sum(math.comb(changed, count) for count in range(min(lost, won) + 1))
    return float(min(1.0, 2 * tail / 2**changed))


def mean_and_error(values: Sequence[float]) -> tuple[float, float | None]:
    """Mean and its standard error; the error is `None` for a single value."""
    array = np.asarray(values, dtype=np.float64)
    error = float(array.std(ddof=1) / math.sqrt(len(array))) if len(array) > 1 else None
    return float(array.mean()), error


def average_and_error(tasks: Sequence[Sequence[float]]) -> tuple[float, float | None]:
    """The mean over tasks of the mean over items, and its standard error.

    The error is `None` if a task has a single item.
    """
    found = [mean_and_error(values) for values in tasks]
    errors = [error for _, error in found if error is not None]
    average = sum(mean for mean, _ in found) / len(found)
    return average, math.hypot(*errors) / len(found) if len(errors) == len(found) else None


def ratio_and_error(values: Sequence[float], sizes: Sequence[float]) -> tuple[float, float | None]:
    """Sum of values over sum of sizes, and its standard error to first order; the error is `None` for a single value.

    Value and size belong to the same item, so the ratio's error is that of the residuals `value - ratio * size`
    (Cochran, Sampling Techniques, chapter 6).
    """
    array, weights = np.asarray(values, dtype=np.float64), np.asarray(sizes, dtype=np.float64)
    count, ratio = len(array), float(array.sum() / weights.sum())
    if count < 2:
        return ratio, None
    residuals = array - ratio * weights
    return ratio, float(math.sqrt(count / (count - 1) * (residuals**2).sum()) / weights.sum())


def bootstrap_average(tasks: Mapping[str, Sequence[float]]) -> tuple[float, tuple[float, float]]:
    """The mean over tasks of the mean over items, with its percentile interval from resampling items within tasks.

    Few distinct values per task are expected: 0 and 1, or differences of these. Raises `ValueError` without any.
    """
    if not tasks or not all(len(values) for values in tasks.values()):
        raise ValueError("bootstrap_average: `tasks` must hold items for at least one task, and for each, got none.")
    generator = np.random.default_rng(0)
    average, resampled = 0.0, np.zeros(NUM_RESAMPLES)
    for values in tasks.values():
        # A mean only depends on how often each value is drawn, so these counts are drawn instead of items.
        levels, counts = np.unique(np.asarray(values, dtype=np.float64), return_counts=True)
        drawn = generator.multinomial(len(values), counts / len(values), size=NUM_RESAMPLES)
        resampled += drawn @ levels / len(values)
        average += float(counts @ levels) / len(values)
    low, high = np.quantile(resampled / len(tasks), [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return average / len(tasks), (float(low), float(high))
