"""Layers that have both attention and a state of fixed size, such as those of Falcon-H1 and Zamba 2.

transformers keeps both in one cache layer of type `hybrid`. Here keys and values are quantised like those of any other
layer, and transformers' own class keeps the state.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from transformers.cache_utils import LinearAttentionAndFullAttentionLayer, LinearAttentionLayer

from ..storage.layer_store import LayerStorage
from .cache import KVQuantLayer
from .handle import MaskNotes


class KVQuantHybridLayer(KVQuantLayer, LinearAttentionAndFullAttentionLayer):  # type: ignore[misc, override]
    """A hybrid layer of a `KVQuantCache`, growing or static. Inherits from transformers' class to be recognised as one.

    Args:
        storage: The buffers for keys and values.
        notes: What the masks of the cache have shown, shared by its layers.
        **kwargs: Passed to transformers' class for the state.
    """

    holds_state = True

    def __init__(self, storage: LayerStorage, notes: MaskNotes, **kwargs: Any) -> None:
        KVQuantLayer.__init__(self, storage, notes)
        LinearAttentionLayer.__init__(self, **kwargs)

    @property
    def is_croppable(self) -> bool:  # type: ignore[override]
        """Whether a crop can restore the layer. It cannot once there is a recurrent state."""
        return bool(LinearAttentionLayer.is_croppable.__get__(self))

    def lazy_initialization(self, *args: Tensor, **kwargs: Any) -> None:  # type: ignore[override]
        """Allocate buffers: for keys and values like two given by position, or for a state given by keyword."""
        if args:
            KVQuantLayer.lazy_initialization(self, *args)
        else:
            LinearAttentionLayer.lazy_initialization(self, **kwargs)

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the newest `-tokens_to_remove` tokens.

        Raises:
            RuntimeError: Past states were not recorded. See `Cache.activate_past_recording`.
            ValueError: `tokens_to_remove` is positive.
        """
        if tokens_to_remove <= 0:
            LinearAttentionLayer.crop(self, tokens_to_remove)
        KVQuantLayer.crop(self, tokens_to_remove)

    def reset(self) -> None:
        """Forget all tokens, and the state."""
        LinearAttentionLayer.reset(self)
        KVQuantLayer.reset(self)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Reorder the batch for beam search."""
        LinearAttentionLayer.reorder_cache(self, beam_idx)  # type: ignore[arg-type]
        KVQuantLayer.reorder_cache(self, beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these sequences of the batch."""
        self._map_states(lambda state: state[indices.to(state.device)])
        KVQuantLayer.batch_select_indices(self, indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every sequence `repeats` times in the batch."""
        self._map_states(lambda state: state.repeat_interleave(repeats, dim=0))
        KVQuantLayer.batch_repeat_interleave(self, repeats)

    def _map_states(self, function: Callable[[Tensor], Tensor]) -> None:
        for states in (self.conv_states, self.recurrent_states):
            for index, state in states.items():
                if state is not None:
                    states[index] = function(state)

    def offload(self) -> None:
        """Move codes and state to CPU memory."""
        KVQuantLayer.offload(self)
        LinearAttentionLayer.offload(self)

    def prefetch(self) -> None:
        """Move codes and state back to the layer's device."""
        KVQuantLayer.prefetch(self)
        LinearAttentionLayer.prefetch(self)
