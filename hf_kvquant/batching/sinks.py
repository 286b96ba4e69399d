"""`KeptSinks`: the first tokens of prompts, which requests that take over a prompt's first block need in their tails.

A block is found by its tokens long after the request that filled it has gone, and with it the tail that held the sinks.
So these are copied when the block becomes one that others may take over, and again into the tail of each that does.
Without its sinks a block is not found: the prompt is computed anew.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from transformers.generation.continuous_batching.utils import stream_context

from ..spec.pages import PageLayout

# Sinks may take this share of the cache's bytes. In an 8B model, 4 sinks take 0.5 MB a prompt.
SHARE = 0.01
_WORD = torch.int64


class KeptSinks:
    """Copies of the sinks of first blocks. The oldest one goes when there are too many.

    Args:
        pages: Of all layers, in the order of a block.
        bytes_per_page: From one page of a block to the next.
        blocks: `[blocks, bytes of a block]` uint8: the cache.

    Attributes:
        stream: On which forwards run, and so copies; `None` for the current one.
        most: How many are kept.
    """

    def __init__(self, pages: Iterable[PageLayout], bytes_per_page: int, blocks: Tensor) -> None:
        self.stream: torch.cuda.Stream | None = None
        self._blocks = blocks.view(_WORD)
        ranges = [
            torch.arange(position * bytes_per_page + begin, position * bytes_per_page + end, _WORD.itemsize)
            for position, page in enumerate(pages)
            for begin, end in page.sink_ranges
        ]
        self._words = torch.cat(ranges).div(_WORD.itemsize, rounding_mode="floor").to(blocks.device)
        self.most = max(1, int(SHARE * blocks.nbytes) // (len(self._words) * _WORD.itemsize))
        self._of_block: dict[int, Tensor] = {}

    def keep(self, block: int, tail_block: int) -> None:
        """Copy the sinks of a first block from the tail of the request that has filled it."""
        self._of_block.pop(block, None)
        while len(self._of_block) >= self.most:
            del self._of_block[next(iter(self._of_block))]
        with stream_context(self.stream):
            self._of_block[block] = self._blocks[tail_block].index_select(0, self._words)

    def get(self, block: int) -> Tensor | None:
        """The sinks of a first block, `None` if they are not kept any more."""
        return self._of_block.get(block)

    def give(self, sinks: Tensor, tail_block: int) -> None:
        """Write sinks to the tail of a request."""
        with stream_context(self.stream):
            self._blocks[tail_block].index_copy_(0, self._words, sinks)
