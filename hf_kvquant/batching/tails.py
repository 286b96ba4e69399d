"""Tails in continuous batching: what layers keep dense of a request lies in one slot of the cache's memory.

`spec/tails.py` says how. Pages hold tokens alone, so their size does not depend on tails. A request that takes over
pages of another one has a slot of its own, without the tokens of these pages, except sinks (`KeptSinks`).
"""

from __future__ import annotations

from torch import Tensor
from transformers.generation.continuous_batching.cache_allocators import CachePool

from ..spec.tails import TailLayout
from .sinks import KeptSinks
from .slots import SlotAllocator

# The allocator's key in a cache, which names its allocators after types of layers. No layer has this type.
TAILS = "tails"


class TailAllocator(SlotAllocator):
    """Gives each request one slot for its tails.

    Args:
        index: Among the allocators of the cache.
        layout: Of a slot.
        bytes_per_slot: A multiple of `PART_ALIGNMENT`, with room for it.
        keeps_sinks: Whether requests share pages, so that sinks are kept for those that take over first blocks.

    Attributes:
        layout: Of a slot.
        sinks: Of first blocks; `None` if nothing is shared or no layer has sinks.
    """

    layer_type = TAILS

    def __init__(self, index: int, layout: TailLayout, bytes_per_slot: int, *, keeps_sinks: bool) -> None:
        super().__init__(index, list(layout.parts), bytes_per_slot)
        self.layout, self._keeps_sinks = layout, keeps_sinks
        self.sinks: KeptSinks | None = None
        self._sinks_of: dict[str, Tensor] = {}  # of requests that are to get a slot

    def register_cache_tensor(
        self, bytes_per_sector: int, non_trash_bytes: int, cache_tensor: Tensor, pool: CachePool
    ) -> None:
        """See `CacheAllocator`."""
        super().register_cache_tensor(bytes_per_sector, non_trash_bytes, cache_tensor, pool)
        ranges = self.layout.sink_ranges
        if self._keeps_sinks and ranges:
            self.sinks = KeptSinks(ranges, self._copy_view)

    def take_over(self, request_id: str, first_block: int) -> None:
        """Write the sinks of a first block to the slot of a request that has taken it over, once it has a slot.

        It may get its pages before its slot or after it.
        """
        sinks = None if self.sinks is None else self.sinks.get(first_block)
        if sinks is not None:
            self._sinks_of[request_id] = sinks
            self._give_sinks(request_id)

    def allocate_cache_to_request(self, request_id: str, past_length: int, query_length: int) -> None:
        """See `SlotAllocator`. A request that has taken over pages gets their sinks."""
        super().allocate_cache_to_request(request_id, past_length, query_length)
        self._give_sinks(request_id)

    def fill_block_table(self, request_id: str, past_length: int, query_length: int, block_table: Tensor) -> None:
        """Write nothing: the row of a request's pages begins with its slot."""

    def _give_sinks(self, request_id: str) -> None:
        if request_id in self._sinks_of and request_id in self.block_table:
            assert self.sinks is not None
            self.sinks.give(self._sinks_of.pop(request_id), self.slot_of(request_id))

    def free_blocks(self, request_id: str, no_cache: bool = False) -> None:
        """See `CacheAllocator`."""
        self._sinks_of.pop(request_id, None)
        super().free_blocks(request_id, no_cache)

    def free_all_requests(self) -> None:
        """See `CacheAllocator`. Those that wait for a slot get none."""
        self._sinks_of.clear()
        super().free_all_requests()
