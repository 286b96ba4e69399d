"""States of fixed size beside keys and values: they may have fewer bits, and in static caches they stay where they are.

transformers keeps the states of linear attention, Mamba and convolutions, and models change them in place. Beam search
replaces them there, and a new cache has new ones. A captured step knows addresses, so both would leave it reading what
is dead. Here states come from the pool of the model and go back to it, as buffers of keys and values do.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import LinearAttentionLayer

from ..spec.state_steps import stored
from ..storage.buffers import makes_lasting_tensors
from ..storage.pool import BufferPool


class PooledStates(LinearAttentionLayer):
    """The states of a layer. Where they need not stay, as in growing caches, all is as in transformers' class, but that
    states which are made in inference mode may be changed outside of it.

    Attributes:
        name: Of the layer in its cache.
        do_states_stay: Whether the cache is static.
        pool: Of a static cache's buffers, if it has one.
        state_dtype: Of recurrent states; `None`: the model's.
    """

    name = ""
    do_states_stay = False
    pool: BufferPool | None = None
    state_dtype: torch.dtype | None = None

    @makes_lasting_tensors
    def lazy_initialization(
        self,
        conv_states: Tensor | None = None,
        recurrent_states: Tensor | None = None,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
    ) -> None:
        """Take a state of zeros from the pool, or allocate one. See transformers' class for the arguments."""
        LinearAttentionLayer.lazy_initialization(self, conv_states, recurrent_states, state_idx, conv_kernel_size)
        given = {"conv": (conv_states, self.conv_states), "recurrent": (recurrent_states, self.recurrent_states)}
        for kind, (like, states) in given.items():
            new = states[state_idx]
            if self.pool is not None and like is not None and new is not None:
                states[state_idx] = self._pooled(self.pool, (self.name, kind, state_idx), new)

    def update_recurrent_state(self, recurrent_states: Tensor, state_idx: int = 0, **kwargs: Any) -> Tensor:
        """Take new states. See transformers' class."""
        if self.state_dtype is not None:
            recurrent_states = stored(recurrent_states, self.state_dtype)
        state: Tensor = LinearAttentionLayer.update_recurrent_state(self, recurrent_states, state_idx, **kwargs)
        return state

    def __getstate__(self) -> dict[str, Any]:
        """Copies have states of their own and no pool."""
        return {**self.__dict__, "pool": None}

    def _pooled(self, pool: BufferPool, use: Hashable, new: Tensor) -> Tensor:
        kind = (new.shape, new.dtype, new.device)
        state: Tensor | None = pool.take(use, kind)
        state = new if state is None else state.zero_()
        pool.expect(self, use, kind, state)
        return state

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Reorder the batch for beam search."""
        if not self.do_states_stay:
            LinearAttentionLayer.reorder_cache(self, beam_idx)  # type: ignore[arg-type]
            return
        for state in tensors_of(self):
            state.copy_(state.index_select(0, beam_idx.to(state.device)))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these sequences of the batch. transformers' class has no such method."""
        self._map(lambda state: state[indices.to(state.device)])

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every sequence `repeats` times in the batch."""
        self._map(lambda state: state.repeat_interleave(repeats, dim=0))

    @makes_lasting_tensors
    def _map(self, function: Callable[[Tensor], Tensor]) -> None:
        for states in (self.conv_states, self.recurrent_states):
            for index, state in states.items():
                if state is None:
                    continue
                new = function(state)
                if self.do_states_stay and new.shape == state.shape:
                    state.copy_(new)
                else:
                    states[index] = new


class KVQuantStateLayer(PooledStates):
    """A layer of a `KVQuantCache` that has a state alone.

    Args:
        name: As in `PooledStates`.
        do_states_stay: Likewise.
        pool: Likewise.
        state_dtype: Likewise.
        **kwargs: Passed to transformers' class.
    """

    def __init__(
        self,
        name: str,
        do_states_stay: bool,
        pool: BufferPool | None,
        state_dtype: torch.dtype | None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.name, self.do_states_stay, self.pool, self.state_dtype = name, do_states_stay, pool, state_dtype


def tensors_of(layer: object) -> Iterator[Tensor]:
    """The states of a layer of any kind, in a fixed order."""
    if isinstance(layer, LinearAttentionLayer):
        for states in (layer.conv_states, layer.recurrent_states):
            yield from (state for state in states.values() if state is not None)
