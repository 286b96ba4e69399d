"""Counts what attention read from the codes of a layer, and the steps that read dequantised tensors instead.

Also here: `causal_pairs`, so that everything that counts attended pairs counts them alike.
"""

from __future__ import annotations

import functools
import logging
from collections import Counter

logger = logging.getLogger(__name__)


class Tally:
    """The counts of one layer.

    Attributes:
        fallbacks: By reason, how many steps attended to dequantised tensors.
        outer: Counted in, too, for a caller that outlives the layer.
        pairs_dequantized: (query, token) pairs of those steps, padding included; growing caches only.
        pairs_read: Pairs of the steps that were served from codes; `None` if they are not counted.
    """

    def __init__(self) -> None:
        self.fallbacks: Counter[str] = Counter()
        self.outer: Counter[str] | None = None
        self.pairs_dequantized = 0
        self.pairs_read: int | None = None

    def note_fallback(self, reason: str, num_pairs: int) -> None:
        """Count a step that attends to dequantised tensors, over `num_pairs` pairs, and log each reason once."""
        self.fallbacks[reason] += 1
        self.pairs_dequantized += num_pairs
        if self.outer is not None:
            self.outer[reason] += 1
        _log_fallback(reason)


@functools.cache
def _log_fallback(reason: str) -> None:
    logger.warning("attention runs on dequantised tensors: %s. Correct, slower.", reason)


def causal_pairs(tokens: int, first_chunk: int, window: int = 0) -> int:
    """(Query, token) pairs that one layer serves from codes for a text fed in chunks, whatever their size.

    Args:
        tokens: Of the text.
        first_chunk: Tokens of the first chunk, which is not served from codes.
        window: Positions visible to a query; 0 for all.
    """

    def pairs(tokens: int) -> int:
        clipped = min(tokens, window) if window else tokens
        return clipped * (clipped + 1) // 2 + (tokens - clipped) * window

    return pairs(tokens) - pairs(first_chunk)
