"""States of linear attention and convolutions in continuous batching: one slot of the cache's memory for each request.

Some layers keep a state of fixed size for a sequence instead of keys and values: the last inputs of a convolution, and
a matrix that sums up all tokens. Here the states of all layers of a request lie side by side in one slot. `slots.py`
takes slots, gives them back and lets transformers copy them for forks. The numbers of a captured step are in
transformers' block table, which is on the device. `state_layers.py` decides what reads slots and writes them.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, PreTrainedConfig
from transformers.cache_utils import LinearAttentionCacheLayerMixin, LinearAttentionLayer
from transformers.generation.continuous_batching.cache import ATTN_TYPE_TO_ALLOCATOR
from transformers.generation.continuous_batching.cache_allocators import CachePool

from ..graphs.state_chunks import SequenceInputs, Sequences, SequenceStates
from ..graphs.state_steps import SlotStates
from ..spec.pages import Part, aligned
from ..spec.state_steps import stored
from .batch import Group
from .slots import SlotAllocator

# The allocator's key in a cache, which names its allocators after types of layers.
STATES = "linear_attention"
_CHUNK = 64  # tokens that PyTorch versions of linear attention compute at once


@dataclasses.dataclass(frozen=True)
class StatePart(Part):
    """One state of one layer.

    Attributes:
        is_conv: Whether a convolution has this state; else a recurrence has it.
        state_idx: Its number among the states of this kind.
        begin: Bytes of the slot before it.
        shape: `[…]`, of one sequence.
        dtype: Of its elements.
    """

    is_conv: bool
    state_idx: int
    begin: int
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclasses.dataclass(frozen=True)
class StateLayout:
    """How the states of one request lie in its slot. Only this class knows their bytes.

    Attributes:
        parts: By index of the layer. Each begins at a multiple of `PART_ALIGNMENT`.
    """

    parts: Mapping[int, tuple[StatePart, ...]]

    @classmethod
    def of(
        cls, layers: Mapping[int, LinearAttentionCacheLayerMixin], state_dtype: torch.dtype | None = None
    ) -> StateLayout:
        """The layout for the states that transformers' layers of one sequence hold, by index of the layer.

        Args:
            layers: These.
            state_dtype: Of recurrent states; `None`: as the model makes them.
        """
        begin, parts = 0, {}
        for index, layer in layers.items():
            found = []
            for is_conv, states in ((True, layer.conv_states), (False, layer.recurrent_states)):
                for state_idx, state in states.items():
                    if state is not None:
                        dtype = state.dtype if is_conv or state_dtype is None else state_dtype
                        found.append(StatePart(is_conv, state_idx, begin, tuple(state.shape[1:]), dtype))
                        begin = aligned(found[-1].end)
            parts[index] = tuple(found)
        return cls(parts)

    @property
    def num_bytes(self) -> int:
        """Bytes of the states of one request: a multiple of `PART_ALIGNMENT`."""
        return aligned(max(part.end for parts in self.parts.values() for part in parts))

    @property
    def num_bytes_of_layer(self) -> int:
        """Bytes of the largest states of a layer."""
        return max(sum(part.end - part.begin for part in parts) for parts in self.parts.values())

    @property
    def bytes_of_new_token(self) -> int:
        """Most bytes that a layer takes for one token of a prompt, in float32, besides its projections.

        What is computed of a convolution is held three times. A chunked recurrence of heads with a matrix `[a, b]`
        holds some four vectors of each side, and rows of three matrices among the tokens of a chunk.
        """
        sizes = [0]
        for parts in self.parts.values():
            convs = sum(3 * part.shape[0] for part in parts if part.is_conv)
            heads = sum(part.shape[0] * (4 * sum(part.shape[1:]) + 3 * _CHUNK) for part in parts if not part.is_conv)
            sizes.append(torch.float32.itemsize * (convs + heads))
        return max(sizes)

    def planes(self, memory: Tensor, stride: int) -> dict[int, list[tuple[StatePart, Tensor]]]:
        """Each part over all slots, as a view `[slots, *shape]`, by index of the layer.

        Args:
            memory: See `Part.over`.
            stride: Bytes of a slot, a multiple of `PART_ALIGNMENT`.
        """
        assert stride >= self.num_bytes
        count = memory.numel() // stride
        return {
            index: [(part, part.over(memory, 0, stride, count)) for part in parts]
            for index, parts in self.parts.items()
        }


class StateAllocator(SlotAllocator):
    """Gives each request one slot for its states. `Snapshots` take slots, too.

    Args:
        index: Among the allocators of the cache.
        layout: Of a slot.
        bytes_per_slot: A multiple of `PART_ALIGNMENT`, with room for it.

    Attributes:
        layout: Of a slot.
        planes: See `StateLayout.planes`.
    """

    layer_type = STATES

    def __init__(self, index: int, layout: StateLayout, bytes_per_slot: int) -> None:
        super().__init__(index, list(layout.parts), bytes_per_slot)
        self.layout = layout
        self.planes: dict[int, list[tuple[StatePart, Tensor]]] = {}

    def register_cache_tensor(
        self, bytes_per_sector: int, non_trash_bytes: int, cache_tensor: Tensor, pool: CachePool
    ) -> None:
        """Make the planes of every layer over the cache's bytes."""
        super().register_cache_tensor(bytes_per_sector, non_trash_bytes, cache_tensor, pool)
        self.planes = self.layout.planes(cache_tensor, self.bytes_per_block)

    @property
    def read_trash_slot(self) -> int:
        """The slot that padding reads. Nobody writes it, so it is zero."""
        return 0

    @property
    def write_trash_slot(self) -> int:
        """The slot that padding writes. Nobody reads it."""
        return self.blocks_per_sector

    def take(self) -> int | None:
        """A free slot; `None` if there is no memory for one. Whoever takes it gives it back to the pool."""
        if not self.pool.count_free_blocks(self.index):
            if not self.pool.num_free_sectors:
                return None
            self.pool.allocate_sector(self.index)
        (slot,) = self.pool.get_free_blocks(self.index, 1)
        return int(slot)

    def copy_slot(self, source: int, target: int) -> None:
        """Copy the states of one slot to another. Their numbers do not go to the device, which nothing waits for."""
        self._copy_view[target].copy_(self._copy_view[source])


class _OneLayer(LinearAttentionLayer):
    """The states of one layer, as the layer of a cache of transformers'."""

    def __init__(self, planes: list[tuple[StatePart, Tensor]]) -> None:
        super().__init__(number_of_states=1 + max(part.state_idx for part, _ in planes))

    def as_cache(self, layer_idx: int) -> Cache:
        """A cache that has this layer at its index."""
        return Cache(layers=[self] * (layer_idx + 1))


class GroupLayer(_OneLayer):
    """The states of one layer, for the requests of a group.

    It begins with copies of what their slots hold, or empty if they have no past. `store` writes them back: decode
    steps change states in place, and do not say so.

    Args:
        planes: Of the layer: see `StateLayout.planes`.
        group: Whose slots are read and written.
        are_in_place: Whether the model reads and writes its states in the slots themselves: see `SlotStates`.
    """

    def __init__(self, planes: list[tuple[StatePart, Tensor]], group: Group, are_in_place: bool = False) -> None:
        super().__init__(planes)
        self._planes, self._group, self._are_in_place = planes, group, are_in_place
        if not group.has_past:
            return
        assert group.read_slots is not None and group.write_slots is not None
        for part, plane in planes:
            index, slots = part.state_idx, SlotStates(plane, group.read_slots, group.write_slots)
            state: Any = slots if are_in_place else slots.gathered()
            self.has_previous_state[index] = True
            if part.is_conv:
                self.conv_states[index], self.is_conv_states_initialized[index] = state, True
                self.conv_kernel_size[index] = plane.shape[-1]
            else:
                self.recurrent_states[index], self.is_recurrent_states_initialized[index] = state, True

    def update_recurrent_state(self, recurrent_states: Tensor, state_idx: int = 0, **kwargs: Any) -> Tensor:
        """See `LinearAttentionLayer`. Nothing is copied before `store`."""
        self.recurrent_states[state_idx] = recurrent_states
        self.is_recurrent_states_initialized[state_idx] = True
        return recurrent_states

    def store(self) -> None:
        """Write all states to the slots of the group."""
        if self._are_in_place:
            return
        assert self._group.write_slots is not None
        for part, plane in self._planes:
            state = (self.conv_states if part.is_conv else self.recurrent_states)[part.state_idx]
            assert state is not None
            plane.index_copy_(0, self._group.write_slots, stored(state, plane.dtype))


class SequencesLayer(_OneLayer):
    """The states of one layer in the slots themselves, for sequences in one row. Functions of ours alone take them.

    Args:
        planes: Of the layer: see `StateLayout.planes`.
        sequences: Whose slots are read and written.
    """

    def __init__(self, planes: list[tuple[StatePart, Tensor]], sequences: Sequences) -> None:
        super().__init__(planes)
        for part, plane in planes:
            states: Any = SequenceStates.of(plane, sequences)
            (self.conv_states if part.is_conv else self.recurrent_states)[part.state_idx] = states
            self.has_previous_state[part.state_idx] = True

    def update_conv_state(
        self, conv_states: Tensor, state_idx: int = 0, conv_kernel_size: int | None = None, **kwargs: Any
    ) -> Any:
        """The inputs, with the state that they change when they are computed."""
        states: Any = self.conv_states[state_idx]
        return SequenceInputs(conv_states, states)

    def update_recurrent_state(self, recurrent_states: Any, state_idx: int = 0, **kwargs: Any) -> Any:
        """The states, which are in their slots already."""
        return recurrent_states


@contextlib.contextmanager
def known_types(text_config: PreTrainedConfig) -> Iterator[None]:
    """Let transformers resolve the config of a batch for layers with a state, which it has no allocator for (5.24).

    It looks their types up among its allocators, to see whether steps without prompts may have a block table. Ours may.
    """
    missing = set(getattr(text_config, "layer_types", None) or ()) - ATTN_TYPE_TO_ALLOCATOR.keys()
    ATTN_TYPE_TO_ALLOCATOR.update(dict.fromkeys(missing, StateAllocator))
    try:
        yield
    finally:
        for name in missing:
            del ATTN_TYPE_TO_ALLOCATOR[name]
