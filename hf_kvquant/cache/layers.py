"""The layers of a `KVQuantCache`: transformers' contract of one layer, over one storage.

Layers that have both attention and a state of fixed size, such as in Falcon-H1 and Zamba 2, are one cache layer of type
`hybrid` in transformers. Here keys and values are quantised as in any other layer, and transformers' own class keeps
the state.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers import cache_utils
from transformers.cache_utils import CacheLayerMixin, LinearAttentionAndFullAttentionLayer, LinearAttentionLayer

from ..config import LayerFormats
from ..storage import rewind
from ..storage.layer_store import LayerStore
from ..storage.offloading import Offloader
from ..storage.pool import BufferPool
from ..storage.rows import Ring
from .handle import KVHandle, KVLength, KVStep, MaskNotes
from .shown import shown
from .states import KVQuantStateLayer, PooledStates
from .support import RECURRENT, WITH_STATE, WITH_WINDOW


class KVQuantLayer(CacheLayerMixin):
    """One quantised layer of a `KVQuantCache`. Sliding windows of growing caches have a subclass.

    Args:
        storage: The buffers.
        notes: What the masks of the cache have shown, shared by its layers.
    """

    is_croppable = True
    # Whether the layer also has a state besides keys and values.
    holds_state = False

    def __init__(self, storage: LayerStore, notes: MaskNotes) -> None:
        # Not CacheLayerMixin.__init__: it assigns `keys` and `values`, which are computed on demand here.
        self.storage = storage
        self.notes = notes
        self.home: torch.device | None = None  # the layer's device when it is not offloaded
        # As in transformers' classes. Attributes, since masks ask every layer in every step.
        self.is_sliding = storage.window > 0  # whether a window hides the oldest tokens
        self.is_compileable = storage.is_static  # whether `generate` may compile the decode step

    def __repr__(self) -> str:
        transform, window = self.storage.key_transform, self.storage.window
        described = [self.storage.formats.describe()]
        if transform is not None:
            described.append(transform.describe())
        if window > 0:
            described.append(f"window {window}")
        return f"{type(self).__name__}({', '.join(described)})"

    @property
    def is_initialized(self) -> bool:  # type: ignore[override]
        """Whether buffers exist."""
        return self.storage.is_allocated

    @property
    def batch_size(self) -> int:
        """Sequences held. Raises `AttributeError` before the first tokens, as a layer of transformers does."""
        if not self.storage.is_allocated:
            raise AttributeError("batch_size is known after the first update")
        return self.storage.batch

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of `keys` and `values`, which is the model's. Raises like `batch_size` before the first tokens."""
        if not self.storage.is_allocated:
            raise AttributeError("dtype is known after the first update")
        assert self.storage.dtype is not None
        return self.storage.dtype

    @property
    def device(self) -> torch.device:
        """The device of `keys` and `values`. Raises like `batch_size` before the first tokens."""
        if not self.storage.is_allocated:
            raise AttributeError("device is known after the first update")
        return self.storage.device

    @property
    def keys(self) -> Tensor | None:
        """Dense keys, dequantised at every access; `None` before the first tokens. A ring returns those in its window.

        For inspection: where codes are kept, each access makes a new tensor, and changing it in place raises
        `RuntimeError`. An assignment raises `AttributeError`.
        """
        return self._shown(0)

    @keys.setter
    def keys(self, keys: object) -> None:
        _refuse_assignment("keys", keys)

    @property
    def values(self) -> Tensor | None:
        """Dense values, like `keys`."""
        return self._shown(1)

    @values.setter
    def values(self, values: object) -> None:
        _refuse_assignment("values", values)

    def _shown(self, side: int) -> Tensor | None:
        if not self.storage.is_allocated:
            return None
        return shown(self.storage.dequantize()[side], self.storage.planes[side].codes)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate buffers for tokens like these; the tensors may hold no tokens."""
        self.storage.allocate_for(*_in_one_dtype(key_states, value_states))

    def update(  # type: ignore[override]
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor | KVHandle, Tensor | KVHandle]:
        """Take new tokens.

        Args:
            key_states: `[batch, num_kv_heads, q_len, head_dim]`, after RoPE.
            value_states: The same for values. Under autocast, their dtypes may differ; the wider one is stored.

        Returns:
            For the first chunk, the tensors that were given (made contiguous where nothing is quantised). Afterwards
            two handles that share one step, which includes the new tokens. These are written when attention runs.

        Raises:
            RuntimeError: Tokens after the first chunk require gradients. Nothing has changed then.
            TypeError, ValueError: See `LayerStore.extend`. Nothing has changed then.
        """
        storage = self.storage
        is_first_chunk = storage.is_empty
        if not is_first_chunk and torch.is_grad_enabled():
            _check_no_gradients(storage.name, key_states, value_states)
        if key_states.dtype == value_states.dtype:
            storage.extend(key_states, value_states)
        else:
            storage.extend(*_in_one_dtype(key_states, value_states))
        if is_first_chunk:
            # Later chunks get `starts` from attention. The mask may be on another device, where the first layer is.
            starts = self.notes.starts_of_first(key_states.shape[2])
            storage.starts = None if starts is None else starts.to(storage.device)
            storage.flush()
            if self.notes.has_seen_mask and not torch.compiler.is_compiling():
                self.notes.expect_attention()
            if not storage.formats.is_quantized:
                # Contiguous like the tensors of transformers' own layers, so that products sum in the same order.
                return key_states.contiguous(), value_states.contiguous()
            return key_states, value_states
        # Compiled steps get no plan, and reading the note would make them depend on it.
        step = KVStep(storage, not torch.compiler.is_compiling() and self.notes.is_uneven)
        return KVHandle(step, 0), KVHandle(step, 1)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset for the mask: of the chunk itself while empty, else of all tokens held and the chunk."""
        if self.storage.is_empty:
            if self.notes.has_seen_mask and torch.compiler.is_compiling():
                # The compiler cannot trace an integer with attributes, and none is needed here: transformers has
                # already made the mask of this chunk, found that it needs none, and asks again within the step.
                return query_length, 0
            return KVLength(query_length, self.notes, is_first_chunk=True), 0
        max_cache_len = self.storage.max_cache_len
        length = self.storage.length + query_length if max_cache_len is None else max_cache_len
        if self.notes.has_dense_masks:
            return length, 0
        return KVLength(length, self.notes, is_first_chunk=False, window=self.storage.window), 0

    def get_seq_length(self) -> int | Tensor:  # type: ignore[override]
        """Tokens held: an integer; in a static layer a 0-d int32 tensor, so that no step waits for the device.

        The tensor counts on with the layer, as in transformers.
        """
        if not self.storage.is_static:
            return self.storage.length
        return self.storage.lengths[0] if self.storage.is_allocated else 0

    def get_max_length(self) -> int:
        """Capacity of a static layer, -1 for a growing one."""
        return -1 if self.storage.max_cache_len is None else self.storage.max_cache_len

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the newest `-tokens_to_remove` tokens.

        Raises:
            ValueError: `tokens_to_remove` is positive.
        """
        if tokens_to_remove > 0:
            raise ValueError(
                "KVQuantLayer: `tokens_to_remove` must be 0 or negative, "
                f"got {tokens_to_remove}. crop(-n) removes the newest n tokens."
            )
        rewind.crop(self.storage, -int(tokens_to_remove))  # transformers 5.17 gives a tensor

    def activate_past_recording(self) -> None:
        """Keep tokens that leave a dense window for a while, for callers that crop (such as assisted decoding).

        A crop of up to `TAIL_SLACK` tokens then brings them back as they came, instead of dequantised.
        """
        rewind.expect_crops(self.storage)

    def reset(self) -> None:
        """Forget all tokens. A static layer keeps its buffers and their addresses."""
        if self.storage.is_static:
            self.storage.reset()
        else:
            self.storage.release()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Reorder the batch for beam search."""
        self.storage.select(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these sequences of the batch."""
        self.storage.select(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every sequence `repeats` times in the batch."""
        self.storage.repeat(repeats)

    def offload(self) -> None:
        """Move the codes to CPU memory."""
        if self.storage.is_allocated:
            if self.storage.device.type != "cpu":
                self.home = self.storage.device
            self.storage.move("cpu")

    def prefetch(self) -> None:
        """Move the codes back to the layer's device."""
        if self.home is not None:
            self.storage.move(self.home)


def _refuse_assignment(name: str, given: object) -> NoReturn:
    """Raise an error, as Python does for a property without a setter. `layer.keys *= 2` comes here, too."""
    raise AttributeError(
        f"KVQuantLayer: `{name}` must not be assigned, got {type(given).__name__}: the cache holds codes, and `{name}` "
        "are dequantised from them at every access. Give a new cache the tokens by update()."
    )


def _in_one_dtype(key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values in the wider of their dtypes: RoPE makes keys float32 where autocast makes values bfloat16."""
    dtype = torch.promote_types(key.dtype, value.dtype)
    return key.to(dtype), value.to(dtype)


def _check_no_gradients(name: str, key: Tensor, value: Tensor) -> None:
    """Refuse tokens whose gradients the cache would lose. Not called for the first chunk, which `update` returns.

    Raises:
        RuntimeError: Keys or values require gradients.
    """
    if key.requires_grad or value.requires_grad:
        raise RuntimeError(
            f"{name}: `key_states` and `value_states` after the first chunk must not require gradients, got "
            f"{'keys' if key.requires_grad else 'values'} that do: a quantised cache keeps no autograd graph, "
            "so gradients would be wrong. Call the model under torch.no_grad(), or train it with use_cache=False."
        )


def transformers_layer(
    layer_type: str, kwargs: dict[str, Any], options: Mapping[str, Any], state_dtype: torch.dtype | None
) -> Any:
    """One of transformers' own cache layers, growing or static like ours; where it has a state alone, one of ours.

    Args:
        layer_type: As `layers_of` returns it.
        kwargs: Of transformers' class for this type.
        options: Of `LayerStore`, with the layer's name.
        state_dtype: Of recurrent states; `None`: the model's.
    """
    max_cache_len = options["max_cache_len"]
    if layer_type == "cross_attention":
        layer_type = "full_attention"
    is_static = max_cache_len is not None
    if layer_type in RECURRENT:
        pool = options["pool"] if is_static else None
        return KVQuantStateLayer(options["name"], is_static, pool, state_dtype, **kwargs)
    if not is_static:
        return cache_utils.DYNAMIC_LAYER_TYPE_MAPPING[layer_type](**kwargs)
    return cache_utils.STATIC_LAYER_TYPE_MAPPING[layer_type](max_cache_len=max_cache_len, **kwargs)


class KVQuantRingLayer(KVQuantLayer):
    """One sliding-window layer of a growing `KVQuantCache`, with the mask sizes of `DynamicSlidingWindowLayer`.

    Static caches use a plain `KVQuantLayer` over a `LayerStore`: their masks cover all positions, as in other layers.

    Args:
        storage: The buffers.
        notes: What the masks of the cache have shown, shared by its layers.
    """

    @property
    def _ring(self) -> Ring:
        assert isinstance(self.storage.rows, Ring)
        return self.storage.rows

    @property
    def record_past(self) -> bool:
        """Whether tokens that leave the window are kept until the next crop, so that it can bring them back."""
        return self._ring.kept_from is not None

    @record_past.setter
    def record_past(self, record_past: bool) -> None:
        self._ring.record_past(record_past, self.storage.length)

    def activate_past_recording(self) -> None:
        """Keep tokens that leave the window between crops, and those that leave a dense window for a while."""
        super().activate_past_recording()
        self.record_past = True

    def _shown(self, side: int) -> Tensor | None:
        """The tokens that the next query will see."""
        dense = super()._shown(side)
        return None if dense is None else dense[:, :, max(0, dense.shape[2] - self.storage.window + 1) :]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset for the mask: of the chunk itself while empty, else of the tokens that its queries see."""
        storage = self.storage
        if storage.is_empty:
            return super().get_mask_sizes(query_length)
        num_before = min(storage.length, storage.window - 1)
        length = KVLength(num_before + query_length, self.notes, is_first_chunk=False, window=storage.window)
        return length, storage.length - num_before

    def get_max_length(self) -> int:
        """Size of the window in tokens."""
        return self.storage.window


class KVQuantHybridLayer(KVQuantLayer, PooledStates, LinearAttentionAndFullAttentionLayer):  # type: ignore[misc]
    """A hybrid layer of a `KVQuantCache`, growing or static. Inherits from transformers' class to be recognised as one.

    Args:
        storage: The buffers for keys and values.
        notes: What the masks of the cache have shown, shared by its layers.
        pool: Of the cache, for the state.
        **kwargs: Passed to transformers' class for the state.
    """

    holds_state = True
    # The dtype and device of the state, as in transformers' class, which assigns them.
    dtype: torch.dtype | None = None  # type: ignore[assignment]
    device: torch.device | None = None  # type: ignore[assignment]

    def __init__(self, storage: LayerStore, notes: MaskNotes, pool: BufferPool | None, **kwargs: Any) -> None:
        KVQuantLayer.__init__(self, storage, notes)
        LinearAttentionLayer.__init__(self, **kwargs)
        self.name, self.pool, self.do_states_stay = storage.name, pool, storage.is_static

    @property
    def is_croppable(self) -> bool:  # type: ignore[override]
        """Whether a crop can restore the layer. It cannot once there is a recurrent state."""
        return bool(LinearAttentionLayer.is_croppable.__get__(self))

    def lazy_initialization(self, *args: Tensor, **kwargs: Any) -> None:  # type: ignore[override]
        """Allocate buffers: for keys and values like two given by position, or for a state given by keyword."""
        if args:
            KVQuantLayer.lazy_initialization(self, *args)
        else:
            PooledStates.lazy_initialization(self, **kwargs)

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the newest `-tokens_to_remove` tokens.

        Raises:
            RuntimeError: Past states were not recorded. See `Cache.activate_past_recording`.
            ValueError: `tokens_to_remove` is positive.
        """
        if tokens_to_remove <= 0:
            LinearAttentionLayer.crop(self, tokens_to_remove)
        KVQuantLayer.crop(self, tokens_to_remove)

    def activate_past_recording(self) -> None:
        """Keep past states between crops, and tokens that leave a dense window for a while."""
        KVQuantLayer.activate_past_recording(self)
        LinearAttentionLayer.activate_past_recording(self)

    def reset(self) -> None:
        """Forget all tokens, and the state."""
        LinearAttentionLayer.reset(self)
        KVQuantLayer.reset(self)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Reorder the batch for beam search."""
        PooledStates.reorder_cache(self, beam_idx)
        KVQuantLayer.reorder_cache(self, beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these sequences of the batch."""
        PooledStates.batch_select_indices(self, indices)
        KVQuantLayer.batch_select_indices(self, indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every sequence `repeats` times in the batch."""
        PooledStates.batch_repeat_interleave(self, repeats)
        KVQuantLayer.batch_repeat_interleave(self, repeats)

    def offload(self) -> None:
        """Move codes and state to CPU memory."""
        KVQuantLayer.offload(self)
        LinearAttentionLayer.offload(self)

    def prefetch(self) -> None:
        """Move codes and state back to the layer's device."""
        KVQuantLayer.prefetch(self)
        LinearAttentionLayer.prefetch(self)


class KVQuantHybridRingLayer(KVQuantRingLayer, KVQuantHybridLayer):  # type: ignore[misc]
    """A hybrid layer of a growing `KVQuantCache` whose attention has a sliding window."""


def new_layer(
    layer_type: str,
    kwargs: Mapping[str, Any],
    formats: LayerFormats,
    notes: MaskNotes,
    offloader: Offloader | None,
    options: Mapping[str, Any],
) -> KVQuantLayer:
    """A quantised layer of a type of transformers.

    Args:
        layer_type: As `layers_of` returns it.
        kwargs: Of transformers' class for this type.
        formats: Of keys and values.
        notes: Of the cache.
        offloader: Of the cache. Layers with a sliding window stay on their device, since they do not grow.
        options: Of `LayerStore`.
    """
    if layer_type in WITH_WINDOW:
        storage = LayerStore(formats, window=kwargs["sliding_window"], **options)
    else:
        storage = LayerStore(formats, offloader=offloader, **options)
    is_ring = layer_type in WITH_WINDOW and not storage.is_static
    if layer_type in WITH_STATE:
        hybrid = KVQuantHybridRingLayer if is_ring else KVQuantHybridLayer
        of_state = {name: value for name, value in kwargs.items() if name != "sliding_window"}
        return hybrid(storage, notes, options["pool"], **of_state)
    return KVQuantRingLayer(storage, notes) if is_ring else KVQuantLayer(storage, notes)
