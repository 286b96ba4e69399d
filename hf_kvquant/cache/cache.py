"""`KVQuantCache`: the transformers `Cache` contract over `storage.py`.

A cache is a list of layers. Full-attention layers become `KVQuantLayer`s here, sliding-window layers become rings
(`rings.py`), and layers that also have a recurrent state become hybrid layers (`hybrids.py`). Other layers (chunked or
linear attention) keep transformers' own classes. Caches that cannot be quantised per head (latent caches) are refused.

For the first chunk, `update` returns the tensors it was given, so prefill runs as usual and the first token is exact.
After that, `update` returns handles (`handle.py`), and `attention.py` computes attention from their codes.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel, cache_utils
from transformers.cache_utils import Cache, CacheLayerMixin, QuantizedCache

from ..config import DEFAULT_PRESET, KVQuantConfig, LayerFormats
from ..models.text_config import head_dim_of, text_config_of
from ..spec.key_transform import KeyTransform
from ..storage.layer_store import LayerStorage
from ..storage.lengths import LengthGroup, Lengths
from ..storage.offloading import OffloadedStorage, Offloader
from ..storage.pool import BufferPool
from .handle import KVHandle, KVLength, KVStep, MaskNotes
from .steps import Steps

_Cache = TypeVar("_Cache", bound="KVQuantCache")

logger = logging.getLogger(__name__)

# Layers that keep transformers' own cache layers: they do not grow with the sequence, or hold no keys and values.
# Sliding windows are among them only where `quantized_layers` leaves them out.
_LEFT_TO_TRANSFORMERS = (
    "sliding_attention",
    "chunked_attention",
    "conv",
    "linear_attention",
    "cross_attention",
    "hybrid_sliding",
    "dummy",
    "moe",
    "mlp",
)

# Layers without keys and values. Models with no other layers are refused.
_RECURRENT = frozenset(("conv", "linear_attention"))

# Layers whose keys and values are quantised whatever the config says ...
_FULL_ATTENTION = ("full_attention", "hybrid")
# ... and those among them that also have a state, which transformers keeps.
_WITH_STATE = frozenset(("hybrid",))

# Layers that have no state. CUDA graphs can capture these layers and ours, whose state is all on the device.
STATELESS = frozenset(("dummy", "moe", "mlp"))

_OTHER_MODEL = "Was it made for another model? KVQuantCache(model.config, ...) makes one for this."

# Models that select keys by computing with the mask themselves. They cannot use our masks.
_PICK_KEYS = ("doge", "minimax_m3_vl", "minimax_m3_vl_text")


class KVQuantLayer(CacheLayerMixin):
    """One quantised layer of a `KVQuantCache`. Sliding windows of growing caches have a subclass (`rings.py`).

    Args:
        storage: The buffers.
        notes: What the masks of the cache have shown, shared by its layers.
    """

    is_croppable = True
    # Whether the layer also has a state besides keys and values (`hybrids.py`).
    holds_state = False

    def __init__(self, storage: LayerStorage, notes: MaskNotes) -> None:
        # Not CacheLayerMixin.__init__: it assigns `keys` and `values`, which are computed on demand here.
        self.storage = storage
        self.notes = notes
        self.home: torch.device | None = None  # the layer's device when it is not offloaded

    def __repr__(self) -> str:
        transform, window = self.storage.key_transform, self.storage.window
        described = [self.storage.formats.describe()]
        if transform is not None:
            described.append(transform.describe())
        if window > 0:
            described.append(f"window {window}")
        return f"{type(self).__name__}({', '.join(described)})"

    @property
    def is_sliding(self) -> bool:
        """Whether a window hides the oldest tokens."""
        return self.storage.window > 0

    @property
    def is_compileable(self) -> bool:  # type: ignore[override]
        """Whether `generate` may compile the decode step: static storages only."""
        return self.storage.is_static

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
    def keys(self) -> Tensor | None:  # type: ignore[override]
        """Dense keys, dequantised at every access; `None` before the first tokens. For inspection."""
        return self.storage.dequantize()[0] if self.storage.is_allocated else None

    @property
    def values(self) -> Tensor | None:  # type: ignore[override]
        """Dense values, like `keys`."""
        return self.storage.dequantize()[1] if self.storage.is_allocated else None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate buffers for tokens like these; the tensors may hold no tokens."""
        self.storage.allocate(key_states, value_states)

    def update(  # type: ignore[override]
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor | KVHandle, Tensor | KVHandle]:
        """Take new tokens.

        Args:
            key_states: `[batch, num_kv_heads, q_len, head_dim]`, after RoPE.
            value_states: The same for values.

        Returns:
            For the first chunk, the tensors that were given (made contiguous where nothing is quantised). Afterwards
            two handles that share one step, which includes the new tokens. These are written when attention runs.

        Raises:
            RuntimeError: Tokens after the first chunk require gradients. Nothing has changed then.
            TypeError, ValueError: See `LayerStorage.extend`. Nothing has changed then.
        """
        storage = self.storage
        is_first_chunk = storage.is_empty
        if not is_first_chunk and torch.is_grad_enabled():
            _check_no_gradients(storage.name, key_states, value_states)
        storage.extend(key_states, value_states)
        if is_first_chunk:
            # Later chunks get `starts` from attention. The mask may be on another device: that of the first layer.
            starts = self.notes.starts
            storage.set_starts(None if starts is None else starts.to(storage.device))
            storage.flush()
            if not storage.is_quantized:
                # Contiguous like the tensors of transformers' own layers, so that products sum in the same order.
                return key_states.contiguous(), value_states.contiguous()
            return key_states, value_states
        step = KVStep(storage)
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
        """Tokens held: an integer; in a static layer a 0-d int32 tensor, so that no step waits for the device."""
        if not self.storage.is_static:
            return self.storage.length
        return 0 if self.storage.lengths is None else self.storage.lengths[0]

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
        self.storage.crop(-tokens_to_remove)

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


class KVQuantCache(QuantizedCache):
    """A key-value cache that stores quantised keys and values and attends to them without dequantising whole tensors.

    Pass it as `past_key_values` to a patched model (`hf_kvquant.patch`). It also works on a model that is not patched:
    attention then runs on dequantised tensors, which is correct but slower, and is logged once.

    A full static cache refuses further tokens before anything changes. A compiled step cannot: the host does not know
    the length then, and asking the device would stall every step. `generate` sizes its caches so that they cannot
    overflow; your own loop must count. On overflow in a compiled step, the op raises on a CPU, and the cache is
    unusable until it is reset. On a GPU the tokens that do not fit are dropped, and the next step that is not compiled
    raises.

    Args:
        config: The model's config (for a multi-modal model, its own or the text model's).
        preset_or_config: A preset's name, a dictionary or a `KVQuantConfig`.
        max_cache_len: Overrides the config's; makes the cache static.
        key_transforms: By layer index, the transform of keys before they are quantised. Layers that are absent have
            none. `hf_kvquant.key_transforms(model, preset_or_config)` returns those that `generate` of a patched model
            uses. With `None`, a patched model sets them when its `generate` gets the cache while it is empty. Before
            that, and in a forward without `generate`, only what the config alone determines is applied: rotation, but
            neither centres nor smoothing factors. Results are then correct too, but quantisation errors are larger on
            models that have centres or factors.
        pool: Provides the buffers of a static cache and gets them back. `generate` of a patched model passes one.

    Raises:
        NotImplementedError: The model's cache cannot be quantised per head.
        TypeError, ValueError: The config does not fit the model; the message names the argument.

    Example:
        >>> cache = KVQuantCache(model.config, "int4", key_transforms=hf_kvquant.key_transforms(model, "int4"))
        >>> model.generate(**inputs, past_key_values=cache)
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        preset_or_config: str | KVQuantConfig | Mapping[str, Any] = DEFAULT_PRESET,
        *,
        max_cache_len: int | None = None,
        key_transforms: Mapping[int, KeyTransform] | None = None,
        pool: BufferPool | None = None,
    ) -> None:
        if not isinstance(config, PreTrainedConfig):
            raise TypeError(
                f"KVQuantCache: `config` must be the config of a model, got {type(config).__name__}. Pass model.config."
            )
        quant_config = KVQuantConfig.resolve(preset_or_config)
        if key_transforms is not None and not isinstance(key_transforms, Mapping):
            raise TypeError(
                "KVQuantCache: `key_transforms` must map layer indices to KeyTransforms, got "
                f"{type(key_transforms).__name__}. hf_kvquant.key_transforms returns those of a model."
            )
        if max_cache_len is None:
            max_cache_len = quant_config.max_cache_len
        if quant_config.static and max_cache_len is None:
            raise ValueError(
                "KVQuantCache: `max_cache_len` must be given for a static cache, got None. "
                "Give the longest sequence in tokens, prompt included."
            )
        if quant_config.offloading and max_cache_len is not None:
            raise ValueError(
                f"KVQuantCache: `max_cache_len` must be None with offloading=True, got {max_cache_len}. Only growing "
                "caches are offloaded: leave out one of the two."
            )
        text_config = config.get_text_config(decoder=True)
        layer_types, layer_kwargs = layers_of(text_config)
        check_model(text_config, layer_types, dataclasses.replace(quant_config, max_cache_len=max_cache_len))
        self.quant_config = quant_config
        self.has_transforms = key_transforms is not None
        self.notes = MaskNotes(len(layer_types))
        lengths = Lengths(pool)
        transforms = _own_transforms(quant_config, len(layer_types)) if key_transforms is None else key_transforms
        self.is_static = max_cache_len is not None
        quantized = quantized_layers(layer_types, quant_config)
        foreign = [index for index in key_transforms or () if index not in quantized]
        if foreign:
            raise ValueError(
                f"KVQuantCache: `key_transforms` must name layers whose cache is quantised, which are {quantized}, "
                f"got {foreign}. Was it made for another model?"
            )
        from ..storage.rings import KVQuantRingLayer, RingStorage
        from .hybrids import KVQuantHybridLayer  # here, since they import this module

        new_ring = KVQuantRingLayer if max_cache_len is None else KVQuantLayer
        new_storage: Callable[..., LayerStorage] = LayerStorage
        if quant_config.offloading:
            new_storage = functools.partial(OffloadedStorage, offloader=Offloader())

        def new_layer(index: int, layer_type: str, kwargs: dict[str, Any]) -> Any:
            if index not in quantized:
                return _transformers_layer(layer_type, kwargs, max_cache_len)
            formats = quant_config.formats(index)
            options: dict[str, Any] = {
                "max_cache_len": max_cache_len,
                "name": f"layer {index}",
                "key_transform": transforms.get(index),
                "lengths": lengths,
                "pool": pool,
            }
            if layer_type == "full_attention":
                return KVQuantLayer(new_storage(formats, **options), self.notes)
            if layer_type in _WITH_STATE:
                return KVQuantHybridLayer(new_storage(formats, **options), self.notes, **kwargs)
            return new_ring(RingStorage(formats, window=kwargs["sliding_window"], **options), self.notes)

        layers = [new_layer(index, *each) for index, each in enumerate(zip(layer_types, layer_kwargs, strict=True))]
        if not any(isinstance(layer, KVQuantLayer) for layer in layers):
            _log_nothing_to_quantize(tuple(sorted(set(layer_types))))
        Cache.__init__(self, layers=layers)
        self._steps = Steps(
            {index: layer.storage for index, layer in enumerate(layers) if isinstance(layer, KVQuantLayer)},
            bystanders=[index for index, layer_type in enumerate(layer_types) if layer_type == "cross_attention"],
        )

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Any, Any]:
        """Take new tokens in one layer. See `KVQuantLayer.update`.

        Raises:
            RuntimeError: The step before ended early, so that only some layers have its tokens. Nothing has changed.
            ValueError: There is no such layer. A patched model is refused before its first layer (`check_layers`).
        """
        if layer_idx >= len(self.layers):
            raise ValueError(
                f"KVQuantCache: `layer_idx` must be below {len(self.layers)}, the layers of this cache, "
                f"got {layer_idx}. {_OTHER_MODEL}"
            )
        layer: Any = self.layers[layer_idx]
        if torch.compiler.is_compiling():
            result: tuple[Any, Any] = layer.update(key_states, value_states, *args, **kwargs)
            return result
        self._steps.enter(layer_idx)
        result = layer.update(key_states, value_states, *args, **kwargs)
        self._steps.leave(layer_idx)
        return result

    # The states that transformers keeps have no length. So `Steps` watches the methods by which models reach them; a
    # model calls most of these once a step.

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Whether a layer has a state already; without an index, the last layer that can have one."""
        if layer_idx is not None:
            self._watch_state(layer_idx, "has_previous_state", is_once=False)
        return bool(super().has_previous_state(layer_idx, state_idx))

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """The state of a layer's convolution, which models change in place; `None` before the first tokens."""
        self._watch_state(layer_idx, f"get_conv_state {state_idx}")
        return super().get_conv_state(layer_idx, state_idx)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """The recurrent state of a layer, which models change in place; `None` before the first tokens."""
        self._watch_state(layer_idx, f"get_recurrent_state {state_idx}")
        return super().get_recurrent_state(layer_idx, state_idx)

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any) -> Tensor:
        """Give the convolution of a layer new inputs."""
        self._watch_state(layer_idx, f"update_conv_state {state_idx}")
        return super().update_conv_state(conv_states, layer_idx, state_idx, **kwargs)

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> Tensor:
        """Replace the recurrent state of a layer."""
        self._watch_state(layer_idx, f"update_recurrent_state {state_idx}")
        return super().update_recurrent_state(recurrent_states, layer_idx, state_idx, **kwargs)

    def _watch_state(self, layer_idx: int, what: str, *, is_once: bool = True) -> None:
        if not torch.compiler.is_compiling():
            self._steps.enter(layer_idx, what, is_once=is_once)
            if not isinstance(self.layers[layer_idx], KVQuantLayer):  # a hybrid layer still gets its keys and values
                self._steps.leave(layer_idx)

    def undo_step(self) -> None:
        """Undo the newest step if it ended early and only some layers have its tokens. `generate` calls this first.

        Raises:
            RuntimeError: It cannot be undone bit for bit.
        """
        self._steps.undo()

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the newest `-tokens_to_remove` tokens in all layers, or in none.

        If the newest step ended early, only some layers have its tokens. They count as removed, and go first: `crop(0)`
        undoes such a step, and so does a crop of as many tokens as it had.

        Raises:
            RuntimeError: A layer's sliding window would have to show tokens again that are already overwritten (see
                `activate_past_recording`), or a step that ended early cannot be undone.
            ValueError: `tokens_to_remove` is positive.
        """
        if tokens_to_remove <= 0:
            tokens_to_remove = min(0, tokens_to_remove + self._steps.undo(may_round=True))
        for storage in self.storages:
            storage.check_crop(-tokens_to_remove)
        super().crop(tokens_to_remove)

    def reset(self) -> None:
        """Forget all tokens."""
        super().reset()  # type: ignore[no-untyped-call]
        self.notes.forget()
        self._steps.forget()

    def save(self, path: str | os.PathLike[str], model: PreTrainedModel, *, overwrite: bool = False) -> None:
        """Save the cache to a file. A cache that `load` reads from it continues bit for bit like this one.

        The file has about `num_bytes_held` bytes. Protect it like the text itself, which can be recovered from it. It
        is written under a temporary name and then moved, so `path` is never half written.

        Args:
            path: Of the file; its folder must exist.
            model: The model that made the tokens. The file can be loaded for this model only.
            overwrite: Whether to replace an existing file.

        Raises:
            FileExistsError: `path` exists, and `overwrite` is False or `path` is not a file.
            NotImplementedError: The model has layers whose state transformers keeps (chunks, linear attention, sliding
                windows that are not quantised), or is sharded over ranks.
            OSError: The file cannot be written.
            RuntimeError: A step is being compiled or captured.
            TypeError, ValueError: The cache was made for another model, is empty, or is in the middle of a step.

        Example:
            >>> cache.save("chat.safetensors", model)
            >>> cache = KVQuantCache.load("chat.safetensors", model)
        """
        from .file import save_cache  # here, since it imports this module

        save_cache(self, path, model, overwrite=overwrite)

    @classmethod
    def load(
        cls: type[_Cache],
        path: str | os.PathLike[str],
        model: PreTrainedModel,
        preset_or_config: str | KVQuantConfig | Mapping[str, Any] | None = None,
        *,
        device: torch.device | str | None = None,
    ) -> _Cache:
        """Load a cache that `save` wrote. The model continues as it would have with the saved cache.

        The continuation is bit for bit the same where device, processor and versions are the same. Nothing in the file
        is executed, and every number in it is checked before memory is allocated. A growing cache can keep growing; a
        static one has the `max_cache_len` it was saved with.

        Args:
            path: Of the file.
            model: The model that it was saved with, patched or not.
            preset_or_config: The config that the file must have been saved with; `None` accepts any.
            device: Where to put all layers. `None` puts each where the model has that layer.

        Raises:
            FileNotFoundError, IsADirectoryError: There is no such file.
            RuntimeError: Raised by torch when the device has too little free memory for the buffers.
            TypeError, ValueError: The file is of another kind, damaged, of an unknown version, or of another model or
                config; the message says which.
        """
        from .file import load_cache  # here, since it imports this module

        return load_cache(cls, path, model, preset_or_config, device)

    def adopt(self, key_transforms: Mapping[int, KeyTransform]) -> None:
        """Use the transforms of a model, unless the cache was given its own or holds tokens."""
        if self.has_transforms or not all(storage.is_empty for storage in self.storages):
            return
        for index, layer in enumerate(self.layers):
            if isinstance(layer, KVQuantLayer):
                layer.storage.set_key_transform(key_transforms.get(index))

    def count_fallbacks_in(self, tally: dict[int, Counter[str]]) -> None:
        """Count fallbacks in `tally` too, by layer and reason, for a caller that outlives this cache."""
        for index, layer in enumerate(self.layers):
            if isinstance(layer, KVQuantLayer):
                layer.storage.tally = tally.setdefault(index, Counter())

    def check_in_step(self) -> None:
        """Refuse to capture a step while layers have different lengths.

        Raises:
            ValueError: They have.
        """
        for group in self._length_groups():
            group.check_level()

    def note_replayed(self, q_len: int) -> None:
        """Count on the host the tokens that a replayed CUDA graph has appended and counted on the device."""
        for group in self._length_groups():
            group.note_replayed(q_len)

    def ask_device(self) -> None:
        """Read the lengths from the device when next needed: a replay was interrupted, and may have run or not."""
        for group in self._length_groups():
            group.ask_device()

    def forget_capture(self, length: int) -> None:
        """Undo the host's bookkeeping after a capture that failed half-way; nothing has run on the device.

        Args:
            length: Tokens held before the capture.
        """
        for group in self._length_groups():
            group.forget_capture(length)
        for storage in self.storages:
            storage.forget_pending()
        self._steps.forget()

    def _length_groups(self) -> set[LengthGroup]:
        return {storage.length_group for storage in self.storages if storage.length_group is not None}

    @property
    def storages(self) -> list[LayerStorage]:
        """The storages of the quantised layers."""
        return [layer.storage for layer in self.layers if isinstance(layer, KVQuantLayer)]

    @property
    def pairs_dequantized(self) -> int:
        """(Query, token) pairs of fallbacks so far, summed over the layers of this package, padding included.

        Only counted in growing caches: a static one does not know its length without waiting for the device.
        """
        return sum(storage.pairs_dequantized for storage in self.storages)

    @property
    def num_bytes(self) -> int:
        """Bytes allocated by the layers of this package."""
        return sum(storage.num_bytes for storage in self.storages)

    @property
    def num_bytes_held(self) -> int:
        """Bytes of the tokens held, without unused capacity, in the layers of this package."""
        return sum(storage.num_bytes_held for storage in self.storages if storage.is_allocated)

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one more token of one sequence takes in all layers of this package. 0 before the first tokens.

        Layers with a sliding window do not count: they stop growing once the window is full.
        """
        return sum(storage.bytes_per_token for storage in self.storages if storage.is_allocated and not storage.window)


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


def _own_transforms(config: KVQuantConfig, num_layers: int) -> dict[int, KeyTransform]:
    """The transforms that a config determines without the model: rotation only."""
    rotated = [index for index in range(num_layers) if "rotate" in config.formats(index).transforms]
    return {index: KeyTransform(is_rotated=True) for index in rotated}


def layers_of(text_config: PreTrainedConfig) -> tuple[list[str], list[dict[str, Any]]]:
    """The types of a decoder's cache layers, as transformers names them, and the keyword arguments of each.

    transformers treats Mllama's layers that attend to pictures like any other. They hold the pictures' tokens instead
    of the text's, without its padding, and do not grow. Here their type is `cross_attention`.

    Raises:
        NotImplementedError: The config has no number of layers, such as that of several models in sequence (BLT).
    """
    if not isinstance(getattr(text_config, "num_hidden_layers", None), int):
        raise NotImplementedError(
            f"KVQuantCache: {text_config.model_type} has no `num_hidden_layers` in its config, so the number of cache "
            "layers is unknown. Leave the model unpatched."
        )
    layer_types, layer_kwargs = cache_utils.get_layer_types_and_kwargs(text_config)
    if isinstance(layer_kwargs, dict):  # transformers 5.17 has one dictionary for all layers
        layer_kwargs = [layer_kwargs] * len(layer_types)
    # Early exit lowers the number of layers for a while, but not the list of their types.
    layer_types = layer_types[: len(layer_kwargs)]
    across = getattr(text_config, "cross_attention_layers", None) or ()
    layer_types = ["cross_attention" if index in across else each for index, each in enumerate(layer_types)]
    return layer_types, layer_kwargs


def count_layers(config: PreTrainedConfig) -> int:
    """How many layers the caches of a model have, given its own config or its text model's.

    Can be fewer than the model has: layers that share the keys of others may have no cache layer.
    """
    return len(layers_of(config.get_text_config(decoder=True))[0])


def check_layers(where: str, argument: str, num_layers: int, expected: int) -> None:
    """Refuse a cache that was made for a model with another number of layers.

    Args:
        where: Begins the message.
        argument: Name of the argument that holds the cache.
        num_layers: Of the cache.
        expected: Of the model's own caches. See `count_layers`.

    Raises:
        ValueError: They differ.
    """
    if num_layers != expected:
        raise ValueError(
            f"{where}: `{argument}` must have {expected} layers like the model's own cache, got a cache with "
            f"{num_layers}. {_OTHER_MODEL}"
        )


def quantized_layers(layer_types: Sequence[str], quant_config: KVQuantConfig) -> list[int]:
    """Indices of the layers that a cache quantises.

    Args:
        layer_types: As `layers_of` returns them.
        quant_config: What the user asks for.
    """
    kinds = (*_FULL_ATTENTION, "sliding_attention") if quant_config.sliding else _FULL_ATTENTION
    return [index for index, layer_type in enumerate(layer_types) if layer_type in kinds]


def layer_devices(model: PreTrainedModel) -> dict[int, torch.device]:
    """The device of each layer's weights, by layer index; the model's device for layers that are not found."""
    layer_types, _ = layers_of(text_config_of(model))
    found: dict[int, torch.device] = {}
    for module in (model.get_decoder() or model).modules():
        index, parameter = getattr(module, "layer_idx", None), next(module.parameters(), None)
        if isinstance(index, int) and parameter is not None:
            found.setdefault(index, parameter.device)
    return {index: found.get(index, model.device) for index in range(len(layer_types))}


def check_model(text_config: PreTrainedConfig, layer_types: list[str], quant_config: KVQuantConfig) -> None:
    """Refuse a model or a config that cannot be served, before anything is built.

    Args:
        text_config: Of the decoder.
        layer_types: As `layers_of` returns them.
        quant_config: What the user asks for.

    Raises:
        NotImplementedError: The model's cache is not keys and values per head, or an option does not work for it.
        ValueError: The config names layers that do not exist, or a format that head_dim does not fit.
    """
    model_type = text_config.model_type
    layer_configs = text_config.per_layer_config
    if any(getattr(layer_config, "kv_lora_rank", None) is not None for layer_config in layer_configs):
        raise NotImplementedError(
            f"KVQuantCache: {model_type} keeps a latent (MLA) cache, which cannot be quantised per head. "
            "Leave the model unpatched."
        )
    if model_type in _PICK_KEYS:
        raise NotImplementedError(
            f"KVQuantCache: {model_type} selects the keys that it attends to, which attention over codes does not "
            "support. Leave the model unpatched."
        )
    unknown = sorted(set(layer_types) - {*_FULL_ATTENTION, *_LEFT_TO_TRANSFORMERS})
    if unknown:
        raise NotImplementedError(
            f"KVQuantCache: {model_type} has layers of type {unknown}, whose caches are not keys and values per head. "
            "Leave the model unpatched."
        )
    if set(layer_types) <= _RECURRENT | STATELESS:
        raise NotImplementedError(
            f"KVQuantCache: {model_type} has only layers of type {sorted(set(layer_types))}, which keep a state of "
            "fixed size and no keys and values. Leave the model unpatched."
        )
    if quant_config.static and "cross_attention" in layer_types:
        raise NotImplementedError(
            f"KVQuantCache: `static` must be False for {model_type}, got True: some of its layers attend to pictures, "
            "whose length is not known in advance. Leave out static, max_cache_len and capture."
        )
    quantized = quantized_layers(layer_types, quant_config)
    ours = {layer_types[index] for index in quantized} - _WITH_STATE
    uncapturable = sorted(set(layer_types) - ours - STATELESS)
    if quant_config.capture and uncapturable:
        raise NotImplementedError(
            f"KVQuantCache: `capture` must be False for {model_type}, got True: its layers of type {uncapturable} keep "
            "their state outside our buffers, some of it on the host. Pass static=True instead, and generate compiles."
        )
    beyond = [index for index in quant_config.layers if index >= len(layer_types)]
    if beyond:
        raise ValueError(
            f"KVQuantCache: `layers` must name layers below {len(layer_types)}, the model's number of layers, "
            f"got {beyond}."
        )
    # In transformers 5.17, layers at the end that share the keys and values of others have no cache layer at all.
    for index, layer_config in zip(range(len(layer_types)), layer_configs, strict=False):
        head_dim = head_dim_of(layer_config)
        if index in quantized and head_dim is not None:
            formats: LayerFormats = quant_config.formats(index)
            formats.key.num_groups(head_dim)
            formats.value.num_groups(head_dim)


def _transformers_layer(layer_type: str, kwargs: dict[str, Any], max_cache_len: int | None) -> Any:
    """One of transformers' own cache layers, growing or static like ours."""
    if layer_type == "cross_attention":
        layer_type = "full_attention"
    if max_cache_len is None:
        return cache_utils.DYNAMIC_LAYER_TYPE_MAPPING[layer_type](**kwargs)
    return cache_utils.STATIC_LAYER_TYPE_MAPPING[layer_type](max_cache_len=max_cache_len, **kwargs)


@functools.cache
def _log_nothing_to_quantize(layer_types: tuple[str, ...]) -> None:
    logger.warning(
        "KVQuantCache: nothing is quantised: this config quantises none of the model's layer types, %s.",
        list(layer_types),
    )
