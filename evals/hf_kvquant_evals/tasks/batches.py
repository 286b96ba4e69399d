"""Groups the rows of a task into batches, as large as allowed, without padding that would change a score.

Shorter contexts are padded on the left, shorter continuations on the right.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from torch import Tensor

from hf_kvquant.config import LayerFormats


class Row(NamedTuple):
    """The tokens that one row of a batch is fed: the context, and the continuation without its last token."""

    context: tuple[int, ...]
    fed: tuple[int, ...]

    @property
    def first_chunk(self) -> int:
        """Tokens that fill the cache before anything reads it."""
        return max(1, len(self.context) - 1)

    @property
    def lengths(self) -> tuple[int, int]:
        """Tokens of both parts. Rows of equal lengths need no padding."""
        return len(self.context), len(self.fed)


class Score(NamedTuple):
    """Of the continuation of a row. Log-probabilities are float32, on the CPU."""

    log_probs: Tensor  # `[fed]`, of its tokens without the last
    is_greedy: bool  # whether each of these tokens is the most likely one
    last: Tensor  # `[vocab_size]`, for the last token


def max_padded_length(formats: Sequence[LayerFormats]) -> float:
    """The most tokens per row, padding included, that a padded batch may hold before padding changes scores.

    None with granularity `tensor`, where padding shares the scale of the whole sequence, or with `residual_length`,
    where it takes the place of the newest tokens of a shorter row. Keys of granularity `channel` stay dense until a
    block is full. With other formats, infinitely many.
    """
    sides = [side for layer in formats for side in (layer.key, layer.value)]
    if any(layer.residual_length > 0 for layer in formats) or any(side.granularity == "tensor" for side in sides):
        return 0
    return min((side.block_size - 1 for side in sides if side.block_size is not None), default=math.inf)


def batches(rows: Iterable[Row], batch_size: int, max_padded: float) -> Iterator[list[Row]]:
    """Yield the rows of each batch: longest contexts first, so that memory runs out early if it does at all.

    Rows that are too long for padding (`max_padded_length`) come before all others, with rows of the same lengths. The
    batches do not depend on the order of the rows.
    """
    ordered = sorted(rows, key=lambda row: (-len(row.context), row.context, -len(row.fed), row.fed))
    by_lengths = sorted(ordered, key=lambda row: row.lengths, reverse=True)  # stable: ties keep the order above
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
    """Whether rows can share a batch. Its cache holds as many tokens as the longest context and the longest rest."""
    contexts, fed = zip(*(row.lengths for row in rows), strict=True)
    return len({row.lengths for row in rows}) == 1 or max(contexts) + max(fed) <= max_padded
