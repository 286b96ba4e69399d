"""Which rows of a task are fed together: as many as a batch may hold, wherever padding changes no score.

Shorter contexts get padding in front of them and shorter continuations behind them. What that does to a score depends
on the formats of the cache, and is decided here; what becomes of a batch, in `lm_eval_model.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from ..config import LayerFormats


class Row(NamedTuple):
    """What one row of a batch is fed: the context, and the continuation but for its last token."""

    context: tuple[int, ...]
    fed: tuple[int, ...]

    @property
    def first_chunk(self) -> int:
        """Tokens that fill the cache before anything reads it."""
        return max(1, len(self.context) - 1)

    @property
    def lengths(self) -> tuple[int, int]:
        """Tokens of both parts: rows in which these are equal need no padding."""
        return len(self.context), len(self.fed)


def max_padded_length(formats: Sequence[LayerFormats]) -> float:
    """Tokens per row, padding included, that a batch with padding may hold: more, and padding has a part in scores.

    Args:
        formats: Of all layers.

    Returns:
        0 where padding always has: it would share the one scale of a sequence (granularity `tensor`), or stand for the
        newest tokens of a shorter row (`residual_length`). Keys that share a scale over a block (granularity `channel`)
        stay as they came until the block is full: one token less than a block. Otherwise infinity.
    """
    sides = [side for layer in formats for side in (layer.key, layer.value)]
    if any(layer.residual_length > 0 for layer in formats) or any(side.granularity == "tensor" for side in sides):
        return 0
    return min((side.block_size - 1 for side in sides if side.block_size is not None), default=math.inf)


def batches(rows: Iterable[Row], batch_size: int, max_padded: float) -> Iterator[list[Row]]:
    """Rows to feed together: longest contexts first, so that memory runs out early, and equal ones side by side.

    Those that are too long for padding come before all others, and are fed with their equals in length alone.

    Args:
        rows: In any order, which makes no difference.
        batch_size: Rows of a batch, at most.
        max_padded: See `max_padded_length`.
    """
    ordered = sorted(rows, key=lambda row: (-len(row.context), row.context, -len(row.fed), row.fed))
    by_lengths = sorted(ordered, key=lambda row: row.lengths, reverse=True)  # ... and as above where these are equal
    too_long = [row for row in by_lengths if sum(row.lengths) > max_padded]
    others = [row for row in ordered if sum(row.lengths) <= max_padded]
    batch: list[Row] = []
    for row in (*too_long, *others):
        if batch and (len(batch) == batch_size or not _fit([*batch, row], max_padded)):
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch


def _fit(rows: Sequence[Row], max_padded: float) -> bool:
    """Whether rows can be fed together. The cache then holds the longest context, and behind it the longest rest."""
    contexts, fed = zip(*(row.lengths for row in rows), strict=True)
    return len({row.lengths for row in rows}) == 1 or max(contexts) + max(fed) <= max_padded
