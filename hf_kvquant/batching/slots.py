"""Slots: memory of the cache that each request takes once, whatever its length.

Slots come from the same sectors as pages, through allocators of transformers' own kind. So transformers counts, copies
(for forks), offloads and frees them as it does pages, and memory goes to whichever is needed. A sector is a number of
blocks of pages, and slots of each kind divide it: `sector_of` decides how.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor
from transformers.generation.continuous_batching.cache_allocators import CacheAllocator, CachePool

from ..spec.pages import PART_ALIGNMENT

# A larger sector than needed is worth it if it saves this share of a request's slots. It costs memory elsewhere: of
# each kind there may be a sector in which little is in use. So it has few blocks more.
_WORTH = 0.1
_MOST_MORE = 3


class Sector(NamedTuple):
    """The unit in which memory goes to pages, to tails or to states.

    Attributes:
        num_bytes: Of a sector.
        bytes_per_tail: Of a slot for tails, so many of which divide it; 0 if no layer has one.
        bytes_per_state: Of a slot for states, likewise.
    """

    num_bytes: int
    bytes_per_tail: int
    bytes_per_state: int


def sector_of(bytes_per_block: int, tail: int = 0, state: int = 0) -> Sector:
    """The sector that wastes little memory.

    It has as many blocks of pages as the larger slot needs. With tails it may have some more, because a tail is about
    as large as a block: where two blocks hold one tail, three may hold two. States take many blocks, or a small part of
    one.

    Args:
        bytes_per_block: Of pages, a multiple of `PART_ALIGNMENT`.
        tail: Bytes of the tails of a request; 0 if no layer has one.
        state: Bytes of its states, likewise.
    """
    assert bytes_per_block % PART_ALIGNMENT == 0
    least = max(1, -(-max(tail, state) // bytes_per_block))
    found = _divided(least * bytes_per_block, tail, state)
    for blocks in range(least + 1, least + _MOST_MORE + 1 if tail else 0):
        larger = _divided(blocks * bytes_per_block, tail, state)
        if sum(found[1:]) - sum(larger[1:]) >= _WORTH * (tail + state):
            found = larger
    return found


def _divided(sector: int, *sizes: int) -> Sector:
    """A sector of so many bytes, and how slots of these sizes divide it: in as many as begin at aligned bytes."""
    units = sector // PART_ALIGNMENT
    tail, state = (
        sector // next(n for n in range(sector // size, 0, -1) if units % n == 0) if size else 0 for size in sizes
    )
    return Sector(sector, tail, state)


class SlotAllocator(CacheAllocator):
    """Gives each request one slot, from its first step to its end.

    transformers calls what an allocator gives out a block. Here that is a slot, with a single page. A slot has a
    number, and its bytes stay where they are. Subclasses have a `layer_type`.

    Args:
        index: Among the allocators of the cache.
        layers: Indices of the layers that have a part in a slot.
        bytes_per_slot: A multiple of `PART_ALIGNMENT`.
    """

    supports_block_sharing = False
    supports_block_table = True
    rows_per_token = 1

    def __init__(self, index: int, layers: Sequence[int], bytes_per_slot: int) -> None:
        self._before_cache_tensor_init(
            index=index,
            layer_indices=[0],  # one page in a block, for all layers
            tokens_per_page=1,
            bytes_per_page=bytes_per_slot,
            allow_block_sharing=False,
        )
        self.layer_indices = list(layers)

    def register_cache_tensor(
        self, bytes_per_sector: int, non_trash_bytes: int, cache_tensor: Tensor, pool: CachePool
    ) -> None:
        """See `CacheAllocator`."""
        self._copy_view = cache_tensor.view(-1, self.bytes_per_block)
        self._after_cache_tensor_init(non_trash_bytes, bytes_per_sector, cache_tensor, pool)

    def slot_of(self, request_id: str) -> int:
        """The number of a request's slot."""
        (slot,) = self.block_table[request_id]
        return slot

    def needs_new_blocks(self, request_id: str, past_length: int, query_length: int) -> int:
        """See `CacheAllocator`. A request needs one slot, of whatever length it is."""
        return int(request_id not in self.block_table)

    def allocate_cache_to_request(self, request_id: str, past_length: int, query_length: int) -> None:
        """See `CacheAllocator`. A new slot has what others left in it: a first chunk does not read it."""
        if request_id not in self.block_table:
            self.block_table[request_id] = self.pool.get_free_blocks(self.index, 1)

    def fill_block_table(self, request_id: str, past_length: int, query_length: int, block_table: Tensor) -> None:
        """Write the number of a request's slot to the start of `block_table`, `[columns]` int32."""
        block_table[0] = self.slot_of(request_id)

    def get_seqlen_k(self, past_length: int, query_length: int) -> int:
        """0: nothing here has a length."""
        return 0

    def get_read_indices(self, request_id: str, past_length: int, query_length: int) -> list[int]:
        """None: what is in a slot is found by its number."""
        return []

    def get_write_indices(self, request_id: str, past_length: int, query_length: int) -> list[int]:
        """None, likewise."""
        return []

    def update(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Refused: our attention writes keys and values itself, by the number of the slot where it has one."""
        raise NotImplementedError(
            f"continuous batching: a slot for {self.layer_type} must get no keys and values, got some. Let the "
            "attention that the manager has set write them."
        )

    def get_cache_for_block_table(self, layer_idx: int) -> tuple[Tensor, Tensor]:
        """Refused, too."""
        return self.update()


def add_lengths(inputs: Any, allocators: Sequence[SlotAllocator]) -> None:
    """Give the inputs of steps the lengths that transformers expects of each allocator: zero, and read by nobody.

    Args:
        inputs: A `ContinuousBatchingIOs`. It has lengths for full and sliding attention (5.24).
        allocators: Those that it has none for.
    """
    (some, *_) = inputs.cumulative_seqlens_k.values()
    for each in allocators:
        inputs.cumulative_seqlens_k[each.layer_type] = some.new_zeros(some.shape)
        inputs.total_seqlen_k[each.layer_type] = inputs.max_length_k[each.layer_type] = 0
