"""`KeptSinks`: the first tokens of prompts, which requests that take over a prompt's first block need in their tails.

A block is found by its tokens long after the request that filled it has gone, and with it the tail that held the sinks.
So these are copied when the block becomes one that others may take over, and again into the tail of each that does.
Without its sinks a block is not found: the prompt is computed anew.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers.generation.continuous_batching.utils import stream_context

# Sinks may take this share of the cache's bytes. In an 8B model, 4 sinks take 0.5 MB a prompt.
SHARE = 0.01
_WORD = torch.int64


class KeptSinks:
    """Copies of the sinks of first blocks. The oldest one goes when there are too many.

    Args:
        ranges: Bytes of a slot that hold sinks: `TailLayout.sink_ranges`.
        slots: `[slots, bytes of a slot]` uint8: the cache.

    Attributes:
        stream: On which forwards run, and so copies; `None` for the current one.
        most: How many are kept.
    """

    def __init__(self, ranges: Sequence[tuple[int, int]], slots: Tensor) -> None:
        self.stream: torch.cuda.Stream | None = None
        self._slots = slots.view(_WORD)
        words = torch.cat([torch.arange(begin, end, _WORD.itemsize) for begin, end in ranges])
        self._words = words.div(_WORD.itemsize, rounding_mode="floor").to(slots.device)
        self.most = max(1, int(SHARE * slots.nbytes) // (len(self._words) * _WORD.itemsize))
        self._of_block: dict[int, Tensor] = {}

    def keep(self, block: int, slot: int) -> None:
        """Copy the sinks of a first block from the tails of the request that has filled it."""
        self._of_block.pop(block, None)
        while len(self._of_block) >= self.most:
            del self._of_block[next(iter(self._of_block))]
        with stream_context(self.stream):
            self._of_block[block] = self._slots[slot].index_select(0, self._words)

    def get(self, block: int) -> Tensor | None:
        """The sinks of a first block, `None` if they are not kept any more."""
        return self._of_block.get(block)

    def give(self, sinks: Tensor, slot: int) -> None:
        """Write sinks to the tails of a request."""
        with stream_context(self.stream):
            self._slots[slot].index_copy_(0, self._words, sinks)
