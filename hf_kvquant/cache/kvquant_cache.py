"""`KVQuantCache`: the transformers `Cache` contract over one `LayerStore` a layer.

A cache is a list of layers. Full-attention layers become `KVQuantLayer`s here, sliding-window layers become rings
(`rows.py`), and layers that also have a recurrent state become hybrid layers. Other layers (chunked or
linear attention) keep transformers' own classes. Layers that keep latents (MLA) are full-attention layers whose key is
the latent and whose value is the rope part, each with one head (`models/latent.py`).

For the first chunk, `update` returns the tensors it was given, so prefill runs as usual and the first token is exact.
After that, `update` returns handles (`handle.py`), and `attention/registry.py` computes attention from their codes.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
from collections import Counter
from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache, QuantizedCache

from ..config import DEFAULT_PRESET, KVQuantConfig, LayerFormats
from ..models.layers import layers_of, num_readers
from ..models.text_config import decoder_config
from ..spec.key_transform import KeyTransform
from ..storage import padding, rewind
from ..storage.layer_store import LayerStore
from ..storage.lengths import LengthGroup, Lengths
from ..storage.offloading import Offloader
from ..storage.pool import BufferPool
from ..upstream.contracts import check_release
from .file import load_cache, save_cache
from .handle import MaskNotes
from .layers import KVQuantLayer, new_layer, transformers_layer
from .states import tensors_of
from .steps import Steps
from .support import OTHER_MODEL, check_model, formats_of

_Cache = TypeVar("_Cache", bound="KVQuantCache")

logger = logging.getLogger(__name__)


class KVQuantCache(QuantizedCache):
    """A key-value cache that stores quantised keys and values and attends to them without dequantising whole tensors.

    Pass it as `cache` to a patched model (`hf_kvquant.patch`); before transformers 5.24, as `past_key_values`. It also
    works on a model that is not patched: attention then runs on dequantised tensors, which is correct but slower, and
    is logged once.

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
        >>> model.generate(**inputs, cache=cache)
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
        check_release("KVQuantCache")
        quant_config = KVQuantConfig.resolve(preset_or_config)
        if max_cache_len is None:
            max_cache_len = quant_config.max_cache_len
        _check_arguments(config, quant_config, max_cache_len, key_transforms)
        text_config = decoder_config(config)
        layer_types, layer_kwargs = layers_of(text_config)
        check_model(text_config, layer_types, dataclasses.replace(quant_config, max_cache_len=max_cache_len))
        quantized = formats_of(text_config, quant_config)
        foreign = [index for index in key_transforms or () if index not in quantized]
        if foreign:
            raise ValueError(
                f"KVQuantCache: `key_transforms` must name layers whose cache is quantised, which are {[*quantized]}, "
                f"got {foreign}. Was it made for another model?"
            )
        self.quant_config = quant_config
        self.is_static = max_cache_len is not None
        self.has_transforms = key_transforms is not None
        self.num_layers = len(layer_types)  # `layers` may grow: Dory adds copies for the loops over its layers
        self.notes = MaskNotes(self.num_layers)
        transforms = _own_transforms(quantized) if key_transforms is None else key_transforms
        options: dict[str, Any] = {"max_cache_len": max_cache_len, "lengths": Lengths(pool), "pool": pool}
        offloader = Offloader() if quant_config.offloading else None
        readers = num_readers(text_config)
        layers: list[Any] = []
        for index, (layer_type, kwargs) in enumerate(zip(layer_types, layer_kwargs, strict=True)):
            options |= {"name": f"layer {index}", "key_transform": transforms.get(index)}
            if index not in quantized:
                layers.append(transformers_layer(layer_type, kwargs, options, quant_config.torch_state_dtype))
                continue
            layer = new_layer(layer_type, kwargs, quantized[index], self.notes, offloader, options)
            layer.storage.has_chunks = readers[index] == 1
            layers.append(layer)
        if not quantized:
            _log_nothing_to_quantize(tuple(sorted(set(layer_types))))
        Cache.__init__(self, layers=layers)
        self.notes.padded = [storage for storage in self.storages if padding.counts_from_start(storage)]
        self._steps = Steps(
            {index: layers[index].storage for index in quantized},
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
                f"got {layer_idx}. {OTHER_MODEL}"
            )
        layer: Any = self.layers[layer_idx]
        if torch.compiler.is_compiling():
            if not self.quant_config.static:
                self._steps.is_unwatched = True
            result: tuple[Any, Any] = layer.update(key_states, value_states, *args, **kwargs)
            return result
        steps = self._steps
        is_due = layer_idx in steps.due
        if is_due:
            steps.newest = layer_idx
        else:
            steps.enter(layer_idx)
        result = layer.update(key_states, value_states, *args, **kwargs)
        if is_due:
            steps.due.discard(layer_idx)
        else:
            steps.leave(layer_idx)
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

        With dense windows and keys by channel, tokens may return that had become codes, and are rounded. After
        `activate_past_recording`, this needs a crop of more than 64 tokens.

        Raises:
            RuntimeError: A layer's sliding window would have to show tokens again that are already overwritten (see
                `activate_past_recording`), a layer has a recurrent state, which would keep the tokens, or a step that
                ended early cannot be undone.
            ValueError: `tokens_to_remove` is positive.
        """
        tokens_to_remove = int(tokens_to_remove)  # transformers may give a tensor; each layer would wait for the device
        if tokens_to_remove <= 0:
            tokens_to_remove = min(0, tokens_to_remove + self._steps.undo(may_round=True))
        for storage in self.storages:
            rewind.check_crop(storage, -tokens_to_remove)
        if tokens_to_remove < 0:
            self._check_no_recurrence(tokens_to_remove)
        super().crop(tokens_to_remove)

    def _check_no_recurrence(self, tokens_to_remove: int) -> None:
        """Refuse to remove tokens that are part of a recurrent state: transformers would leave them in it."""
        if all(storage.is_empty for storage in self.storages):
            return
        for index, layer in enumerate(self.layers):
            if any(state is not None for state in getattr(layer, "recurrent_states", {}).values()):
                raise RuntimeError(
                    f"KVQuantCache: `tokens_to_remove` must be 0 where layers have recurrent states, as layer {index} "
                    f"has, got {tokens_to_remove}: earlier states are not kept. Copy the cache before you add tokens "
                    "that you may remove, or reset it and feed it the text again."
                )

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these sequences of the batch: by number, also from the end, or by a mask over all of them.

        Raises:
            IndexError: There is no such sequence, or the mask has another length. On a CPU, nothing has changed then.
        """
        batch = next((storage.batch for storage in self.storages if storage.is_allocated), None)
        if batch is not None:
            given = torch.as_tensor(indices)
            try:
                indices = torch.arange(batch, device=given.device)[given]
            except IndexError as error:
                raise IndexError(
                    f"KVQuantCache: `indices` must name sequences of a batch of {batch}, got {given.tolist()}. Pass "
                    f"numbers from {-batch} to {batch - 1}, or a mask of {batch} values."
                ) from error
        super().batch_select_indices(indices)
        if batch is not None:
            self.notes.offsets.select(indices, batch)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Give each row the tokens of another one. See `Cache`."""
        super().reorder_cache(beam_idx)  # type: ignore[arg-type]
        self.notes.offsets.select(beam_idx, beam_idx.shape[0])

    def reset(self) -> None:
        """Forget all tokens."""
        super().reset()  # type: ignore[no-untyped-call]
        self.notes.forget()
        self._steps.forget()

    def save(self, path: str | os.PathLike[str], model: PreTrainedModel, *, overwrite: bool = False) -> None:
        """Save the cache to a file. A cache that `load` reads from it continues bit for bit like this one.

        The file has about `num_bytes_held` bytes. Protect it like the text itself, which can be recovered from it. It
        is written under a temporary name and then moved, so `path` is never half written.

        Tokens that are kept for a crop (`activate_past_recording`) are left out, since they may be ones that were
        removed. A crop of the loaded cache is then like one that was not announced.

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
                layer.storage.tally.outer = tally.setdefault(index, Counter())

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
            storage.pending = None
        self._steps.forget()

    def _length_groups(self) -> set[LengthGroup]:
        return {storage.length_group for storage in self.storages if storage.length_group is not None}

    @property
    def storages(self) -> list[LayerStore]:
        """The storages of the quantised layers."""
        return [layer.storage for layer in self.layers if isinstance(layer, KVQuantLayer)]

    @property
    def num_tokens(self) -> int:
        """Tokens that quantised layers hold, padding included; the most, if a step has ended early."""
        return max((storage.length for storage in self.storages), default=0)

    @property
    def states(self) -> list[Tensor]:
        """The states of fixed size that layers keep, in a fixed order."""
        return [state for layer in self.layers for state in tensors_of(layer)]

    @property
    def pairs_dequantized(self) -> int:
        """(Query, token) pairs of fallbacks so far, summed over the layers of this package, padding included.

        Only counted in growing caches: a static one does not know its length without waiting for the device.
        """
        return sum(storage.tally.pairs_dequantized for storage in self.storages)

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


def _check_arguments(
    config: object, quant_config: KVQuantConfig, max_cache_len: int | None, key_transforms: object
) -> None:
    """Refuse arguments of `KVQuantCache` that fit no model."""
    if not isinstance(config, PreTrainedConfig):
        raise TypeError(
            f"KVQuantCache: `config` must be the config of a model, got {type(config).__name__}. Pass model.config."
        )
    if key_transforms is not None and not isinstance(key_transforms, Mapping):
        raise TypeError(
            "KVQuantCache: `key_transforms` must map layer indices to KeyTransforms, got "
            f"{type(key_transforms).__name__}. hf_kvquant.key_transforms returns those of a model."
        )
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


def _own_transforms(formats: Mapping[int, LayerFormats]) -> dict[int, KeyTransform]:
    """The transforms that formats determine without the model: rotation only."""
    return {index: KeyTransform(is_rotated=True) for index, each in formats.items() if "rotate" in each.transforms}


@functools.cache
def _log_nothing_to_quantize(layer_types: tuple[str, ...]) -> None:
    logger.warning(
        "KVQuantCache: nothing is quantised: this config quantises none of the model's layer types, %s.",
        list(layer_types),
    )
