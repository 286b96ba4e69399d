"""`KVQuantCache`: the transformers `Cache` contract over `storage.py`.

A cache is a list of layers. Full-attention layers become `KVQuantLayer`s here, those with a sliding window the rings of
`rings.py`, those with a state besides the layers of `hybrids.py`; what transformers keeps in other ways (chunks, linear
attention) stays with transformers' own layer classes, and what cannot be quantised per head (latent caches) is refused.
The first chunk of tokens comes back from `update` as it was given, so that prefill runs as before and the first token
is exact; afterwards `update` returns handles (`handle.py`) that `attention.py` serves from codes.
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

from .config import DEFAULT_PRESET, KVQuantConfig, LayerFormats
from .handle import KVHandle, KVLength, KVStep, MaskNotes
from .lengths import LengthGroup, Lengths
from .offloading import OffloadedStorage, Offloader
from .pool import BufferPool
from .steps import Steps
from .storage import LayerStorage
from .text_config import head_dim_of, text_config_of
from .transforms import KeyTransform

_Cache = TypeVar("_Cache", bound="KVQuantCache")

logger = logging.getLogger(__name__)

# transformers' own cache layers serve these as they are: nothing in them grows with the sequence, or not by keys. Those
# with a sliding window only where `quantized_layers` leaves them out.
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

# Layers without keys and values. Models that have nothing else are not for us.
_RECURRENT = frozenset(("conv", "linear_attention"))

# Layers whose keys and values are quantised whatever the config says, ...
_FULL_ATTENTION = ("full_attention", "hybrid")
# ... and those among them that have a state besides, which transformers keeps.
_WITH_STATE = frozenset(("hybrid",))

# Layers that have no state. A CUDA graph may be captured over them and ours, whose state is all on the device.
STATELESS = frozenset(("dummy", "moe", "mlp"))

_OTHER_MODEL = "Was it made for another model? KVQuantCache(model.config, ...) makes one for this."

# Models that pick the keys to attend to by computing on the mask themselves, where ours means nothing to them.
_PICK_KEYS = ("doge", "minimax_m3_vl", "minimax_m3_vl_text")


class KVQuantLayer(CacheLayerMixin):
    """One layer of a `KVQuantCache`, but for sliding windows of growing ones (`rings.py`).

    Args:
        storage: The buffers.
        notes: What the masks of the cache have shown, shared by its layers.
    """

    is_croppable = True
    # Whether there is more to the layer than keys and values (`hybrids.py`).
    holds_state = False

    def __init__(self, storage: LayerStorage, notes: MaskNotes) -> None:
        # CacheLayerMixin.__init__ would assign `keys` and `values`, which are computed on demand here.
        self.storage = storage
        self.notes = notes
        self.home: torch.device | None = None  # where the layer lives when it is not offloaded

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
        """Allocate buffers for tokens like these, of which there may be none."""
        self.storage.allocate(key_states, value_states)

    def update(  # type: ignore[override]
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor | KVHandle, Tensor | KVHandle]:
        """Take new tokens.

        Args:
            key_states: `[batch, num_kv_heads, q_len, head_dim]`, after RoPE.
            value_states: The same for values.

        Returns:
            The very tensors that were given for the first chunk (contiguous where nothing is quantised); afterwards two
            handles over one step, to which the new tokens belong, and through which they are written when attention
            runs.

        Raises:
            RuntimeError: Gradients are wanted of tokens behind others. Nothing has changed then.
            TypeError, ValueError: See `LayerStorage.extend`. Nothing has changed then.
        """
        storage = self.storage
        is_first_chunk = storage.is_empty
        if not is_first_chunk and torch.is_grad_enabled():
            _check_no_gradients(storage.name, key_states, value_states)
        storage.extend(key_states, value_states)
        if is_first_chunk:
            # Later chunks come with a call that says it. The mask is where the first layer is, not always this one.
            starts = self.notes.starts
            storage.set_starts(None if starts is None else starts.to(storage.device))
            storage.flush()
            if not storage.is_quantized:
                # What transformers' own layers return, so that matrix products are summed in the same order.
                return key_states.contiguous(), value_states.contiguous()
            return key_states, value_states
        step = KVStep(storage)
        return KVHandle(step, 0), KVHandle(step, 1)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset for the mask: of the chunk itself while empty, else of everything held."""
        if self.storage.is_empty:
            if self.notes.has_seen_mask and torch.compiler.is_compiling():
                # The compiler traces no integer with attributes. Nor is one needed here: transformers has made the mask
                # of this chunk before, found that it can do without one, and asks again within the step.
                return query_length, 0
            return KVLength(query_length, self.notes, is_first_chunk=True), 0
        max_cache_len = self.storage.max_cache_len
        length = self.storage.length + query_length if max_cache_len is None else max_cache_len
        if self.notes.has_dense_masks:
            return length, 0
        return KVLength(length, self.notes, is_first_chunk=False, window=self.storage.window), 0

    def get_seq_length(self) -> int | Tensor:  # type: ignore[override]
        """Tokens held: an integer, or a 0-d int32 tensor of a static layer, so that no step waits for the device."""
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
        """Forget all tokens. A static layer keeps its buffers, and so its addresses."""
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
    """A key-value cache that keeps codes and attends to them.

    Pass it as `past_key_values` to a patched model (`hf_kvquant.patch`). On a model that is not patched it works as
    well, through dequantised tensors: correct, slower, said once in the log.

    A full static cache refuses further tokens before anything changes. Only a compiled step cannot do that, since the
    host does not know the length then, and asking for it would stop every step. `generate` sizes its caches so that it
    cannot happen; a loop of your own has to count. On a CPU the op raises when it runs out of buffers, after which the
    cache is of no use until it is reset. On a GPU tokens without room are left out, and the next step that is not
    compiled raises.

    Args:
        config: The model's config (for a multi-modal model, its own or the text model's).
        preset_or_config: A preset's name, a dictionary or a `KVQuantConfig`.
        max_cache_len: Overrides the config's; makes the cache static.
        key_transforms: Per layer index, what keys go through before they are quantised; layers that are absent stay as
            they are. `hf_kvquant.key_transforms(model, preset_or_config)` gives what `generate` of a patched model
            uses. `None` leaves them to the patched model whose `generate` gets the cache while it is empty. Until then,
            and in a forward without `generate`, keys go through what the config alone can tell: rotation, but neither
            centres nor smoothing factors. That is exact too, but less close on models that have either.
        pool: Where the buffers of a static cache come from and go to; `generate` of a patched model has one.

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
                f"{type(key_transforms).__name__}. hf_kvquant.key_transforms makes those of a model."
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
                "caches are offloaded: leave out either."
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
        from .hybrids import KVQuantHybridLayer  # which import this module
        from .rings import KVQuantRingLayer, RingStorage

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
            ValueError: There is no such layer. Patched models are refused before their first layer (`check_layers`).
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

    # States that transformers keeps have no length. The ways to them are watched, of which models go some once a step.

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Whether a layer has a state, or the last of them that may have one."""
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
            if not isinstance(self.layers[layer_idx], KVQuantLayer):  # else its keys and values are to come
                self._steps.leave(layer_idx)

    def undo_step(self) -> None:
        """Undo the newest step if it ended early, so that only some layers have its tokens; `generate` begins so.

        Raises:
            RuntimeError: It cannot be undone to the bit.
        """
        self._steps.undo()

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the newest `-tokens_to_remove` tokens in all layers, or in none.

        Tokens of a step that ended early, which only some layers have, are among them, and go first: `crop(0)` undoes
        such a step, and so does a crop of as many tokens as it had.

        Raises:
            RuntimeError: Tokens that the window of a layer would see again are gone. See `activate_past_recording`. Or
                a step that ended early cannot be undone.
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
        """Write what the cache holds to a file, from which `load` goes on to the same bits.

        The file is as large as `num_bytes_held`, and holds the conversation as plainly as its text does. It is written
        beside its place first, so that there is the whole file or what was there before.

        Args:
            path: Of the file; its folder must exist.
            model: Whose tokens they are: the file will be for this model only.
            overwrite: Whether a file that is there may be replaced.

        Raises:
            FileExistsError: There is something, and `overwrite` is False or it is no file.
            NotImplementedError: The model has layers whose state transformers keeps (chunks, linear attention, sliding
                windows that are not quantised), or is sharded over ranks.
            OSError: The file cannot be written.
            RuntimeError: A step is being compiled or captured.
            TypeError, ValueError: `model` is another one, or the cache is empty or within a step.

        Example:
            >>> cache.save("chat.safetensors", model)
            >>> cache = KVQuantCache.load("chat.safetensors", model)
        """
        from .cache_file import save_cache  # which imports this module

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
        """The cache that `save` wrote: the model goes on as it would have with the one that was saved.

        Bit for bit so where device, processor and versions are the same. Nothing in the file is executed, and every
        number in it is checked before memory is taken. A growing cache grows on, a static one has the room it had.

        Args:
            path: Of the file.
            model: The model that it was saved with, patched or not.
            preset_or_config: What the cache must have been made with; `None` takes what the file says.
            device: Where all of it goes. `None` puts each layer where the model's is.

        Raises:
            FileNotFoundError, IsADirectoryError: There is no such file.
            RuntimeError: Of torch: the buffers do not fit into what is free of the device's memory.
            TypeError, ValueError: It is another kind of file, damaged, of a version that is not known, or of another
                model or config; the message says which.
        """
        from .cache_file import load_cache  # which imports this module

        return load_cache(cls, path, model, preset_or_config, device)

    def adopt(self, key_transforms: Mapping[int, KeyTransform]) -> None:
        """Take the transforms of a model, unless the cache was given its own or holds tokens."""
        if self.has_transforms or not all(storage.is_empty for storage in self.storages):
            return
        for index, layer in enumerate(self.layers):
            if isinstance(layer, KVQuantLayer):
                layer.storage.set_key_transform(key_transforms.get(index))

    def count_fallbacks_in(self, tally: dict[int, Counter[str]]) -> None:
        """Count steps that attend to dequantised tensors for longer than there is this cache: by layer, by reason."""
        for index, layer in enumerate(self.layers):
            if isinstance(layer, KVQuantLayer):
                layer.storage.tally = tally.setdefault(index, Counter())

    def check_in_step(self) -> None:
        """Refuse a captured step over layers of different lengths.

        Raises:
            ValueError: They are.
        """
        for group in self._length_groups():
            group.check_level()

    def note_replayed(self, q_len: int) -> None:
        """Count on the host tokens that a replayed CUDA graph has appended and counted on the device."""
        for group in self._length_groups():
            group.note_replayed(q_len)

    def ask_device(self) -> None:
        """Have the host ask the device how many tokens there are: a replay was interrupted, before or behind it."""
        for group in self._length_groups():
            group.ask_device()

    def forget_capture(self, length: int) -> None:
        """Undo on the host what a capture that failed half-way did there; nothing has run on the device.

        Args:
            length: Tokens held before.
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

        Those of growing caches alone: a static one does not know its length without waiting for the device.
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

        Layers with a sliding window take no more once it is full, and do not count.
        """
        return sum(storage.bytes_per_token for storage in self.storages if storage.is_allocated and not storage.window)


def _check_no_gradients(name: str, key: Tensor, value: Tensor) -> None:
    """Refuse tokens whose gradients would be lost: a cache keeps numbers. A first chunk comes back as it was given.

    Raises:
        RuntimeError: One of them requires gradients.
    """
    if key.requires_grad or value.requires_grad:
        raise RuntimeError(
            f"{name}: `key_states` and `value_states` behind other tokens must not require gradients, got "
            f"{'keys' if key.requires_grad else 'values'} that do: a quantised cache keeps no graph, so those of the "
            "model's weights would be wrong. Call the model under torch.no_grad(), or train it with use_cache=False."
        )


def _own_transforms(config: KVQuantConfig, num_layers: int) -> dict[int, KeyTransform]:
    """What a config says about keys without a model."""
    rotated = [index for index in range(num_layers) if "rotate" in config.formats(index).transforms]
    return {index: KeyTransform(is_rotated=True) for index in rotated}


def layers_of(text_config: PreTrainedConfig) -> tuple[list[str], list[dict[str, Any]]]:
    """The types of a decoder's cache layers, as transformers names them, and what each is built with.

    To transformers, Mllama's layers that attend to pictures are like any other. They hold other tokens, as many as
    there are of the pictures, without the padding of the text and never more: those are `cross_attention` here.

    Raises:
        NotImplementedError: The config is of something without layers of one kind, such as several models behind each
            other (BLT).
    """
    if not isinstance(getattr(text_config, "num_hidden_layers", None), int):
        raise NotImplementedError(
            f"KVQuantCache: {text_config.model_type} has no `num_hidden_layers` in its config, by which a cache has "
            "its layers. Leave the model unpatched."
        )
    layer_types, layer_kwargs = cache_utils.get_layer_types_and_kwargs(text_config)
    if isinstance(layer_kwargs, dict):  # transformers 5.17 has one dictionary for all layers
        layer_kwargs = [layer_kwargs] * len(layer_types)
    # Early exit lowers the number of layers for a while, and leaves their types as they are.
    layer_types = layer_types[: len(layer_kwargs)]
    across = getattr(text_config, "cross_attention_layers", None) or ()
    layer_types = ["cross_attention" if index in across else each for index, each in enumerate(layer_types)]
    return layer_types, layer_kwargs


def count_layers(config: PreTrainedConfig) -> int:
    """How many layers the caches of a model have, by its own config or its text model's.

    Layers that use the keys of others may have none of their own.
    """
    return len(layers_of(config.get_text_config(decoder=True))[0])


def check_layers(where: str, argument: str, num_layers: int, expected: int) -> None:
    """Refuse a cache that was made for a model of other layers.

    Args:
        where: Opens the message.
        argument: What the cache came as.
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
    """Where the weights of each layer are, by index of the layer; where the model's are, if a layer cannot be found."""
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
        layer_types: Of its layers, as transformers names them.
        quant_config: What the user asks for.

    Raises:
        NotImplementedError: The model keeps something else than keys and values per head.
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
            f"KVQuantCache: {model_type} picks the keys that it attends to, which codes cannot serve. "
            "Leave the model unpatched."
        )
    unknown = sorted(set(layer_types) - {*_FULL_ATTENTION, *_LEFT_TO_TRANSFORMERS})
    if unknown:
        raise NotImplementedError(
            f"KVQuantCache: {model_type} has layers of type {unknown}, whose caches are not keys and values per head. "
            "Leave the model unpatched."
        )
    if set(layer_types) <= _RECURRENT | STATELESS:
        raise NotImplementedError(
            f"KVQuantCache: {model_type} has layers of type {sorted(set(layer_types))} alone, which keep a state of "
            "fixed size and no keys and values. Leave the model unpatched."
        )
    if quant_config.static and "cross_attention" in layer_types:
        raise NotImplementedError(
            f"KVQuantCache: `static` must be False for {model_type}, got True: nobody knows how long pictures are, "
            "which some of its layers attend to. Leave out static, max_cache_len and capture."
        )
    quantized = quantized_layers(layer_types, quant_config)
    ours = {layer_types[index] for index in quantized} - _WITH_STATE
    uncapturable = sorted(set(layer_types) - ours - STATELESS)
    if quant_config.capture and uncapturable:
        raise NotImplementedError(
            f"KVQuantCache: `capture` must be False for {model_type}, got True: its layers of type {uncapturable} keep "
            "their state outside our buffers, some of it on the host. Pass static=True instead: generate compiles."
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
    """A cache layer of transformers' own, growing or static like ours."""
    if layer_type == "cross_attention":
        layer_type = "full_attention"
    if max_cache_len is None:
        return cache_utils.DYNAMIC_LAYER_TYPE_MAPPING[layer_type](**kwargs)
    return cache_utils.STATIC_LAYER_TYPE_MAPPING[layer_type](max_cache_len=max_cache_len, **kwargs)


@functools.cache
def _log_nothing_to_quantize(layer_types: tuple[str, ...]) -> None:
    logger.warning(
        "KVQuantCache: no layer of the model has a cache that is quantised (its layers are %s).", list(layer_types)
    )
