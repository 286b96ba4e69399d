"""What became of each layer of a patched model: its format, what serves it, and why it is not a compiled kernel.

Everything here is asked of those who decide: which layers are ours of `layout.py`, whether attention comes through us
of `patching.py`, whether there are kernels of `ops.py`, and of the counters that `handle.py` fills, what a model did in
spite of all that. Before the first tokens, only what a config, weights and devices tell is known; a model that looks
inside its keys shows when it runs. What is installed is `environment.py`'s.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import EncoderDecoderCache

from . import ops
from .attention import NOT_QUANTIZED
from .cache import KVQuantCache, KVQuantLayer, check_layers, layer_devices, layers_of
from .config import KVQuantConfig
from .encoder_decoder import decoder_cache
from .environment import environment
from .handle import LOOKED_INSIDE
from .patching import state_of, why_dense
from .text_config import check_is_model, head_dim_of, text_config_of
from .transforms.layout import other_caches
from .verdict import name_of

WHERE = "report"
TRANSFORMERS = "transformers' own cache"
DENSE = "dequantised tensors"


@dataclasses.dataclass(frozen=True)
class LayerReport:
    """One layer of a model.

    Attributes:
        layer_idx: The layer.
        layer_type: As transformers names it.
        formats: What its keys and values are kept in, by a preset's name where it is one; `None` where the cache of the
            layer is transformers' own.
        device: Where its codes are attended to, as far as that is known.
        kernel: What does that: a compiled kernel, on a CPU with its instruction set; the PyTorch reference; or
            transformers, over dequantised tensors or over a cache of its own.
        reason: Why not a compiled kernel; empty where one serves.
        fallbacks: How many steps attended to dequantised tensors so far, by reason. Compiled steps are not counted.
    """

    layer_idx: int
    layer_type: str
    formats: str | None
    device: str
    kernel: str
    reason: str
    fallbacks: Mapping[str, int]

    @property
    def is_served(self) -> bool:
        """Whether a compiled kernel attends to codes, and no step has done otherwise."""
        return not self.reason and not self.fallbacks


@dataclasses.dataclass(frozen=True)
class Report:
    """What `report` found.

    Attributes:
        model: The name of its class.
        cache: What its caches are: `"growing"`, `"static"`, `"captured"` or `"offloaded"`.
        layers: In order.
        environment: What is installed, as `hf-kvquant env` shows it.
    """

    model: str
    cache: str
    layers: tuple[LayerReport, ...]
    environment: Mapping[str, str]

    @property
    def is_served(self) -> bool:
        """Whether compiled kernels attend to codes in every layer whose cache is ours."""
        return all(layer.is_served for layer in self.layers if layer.formats is not None)

    def to_dict(self) -> dict[str, Any]:
        """A JSON-serialisable form."""
        return {**dataclasses.asdict(self), "is_served": self.is_served}

    def __str__(self) -> str:
        """A table for people, in which layers that are alike share a line."""
        heads = "layers", "formats", "device", "served by", "reason"
        rows = [heads]
        for cells, group in itertools.groupby(self.layers, key=_cells):
            rows.append((_span(list(group)), *cells))
        widths = [max(len(row[column]) for row in rows) for column in range(len(heads))]
        lines = [
            "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
        ]
        return "\n".join([f"{self.model}, {self.cache} cache", *lines])


def report(model: PreTrainedModel, cache: KVQuantCache | EncoderDecoderCache | None = None) -> Report:
    """What serves each layer of a model, and why. Changes and runs nothing.

    Args:
        model: A patched model, before or after it has generated; or any model, with a cache.
        cache: One that was passed to it, or that `generate` returned, of which the report is then; of an
            encoder-decoder, our cache or the `EncoderDecoderCache` that it is in. `None` reports on
            the config that the model was patched with, and on all its calls of `generate` since.

    Raises:
        TypeError: An argument is something else.
        ValueError: The model is not patched and there is no cache, or the cache is for another model.

    Example:
        >>> hf_kvquant.patch(model, "int4")
        >>> print(hf_kvquant.report(model))
    """
    check_is_model(model, WHERE)
    cache = decoder_cache(cache) or cache
    if cache is not None and not isinstance(cache, KVQuantCache):
        raise TypeError(
            f"{WHERE}: `cache` must be a KVQuantCache or None, got {type(cache).__name__}. "
            "Other caches hold no codes: leave it out."
        )
    state = state_of(model)
    if cache is not None:
        config = cache.quant_config
    elif state is not None:
        config = state.config
    else:
        raise ValueError(
            f"{WHERE}: `model` must be patched or come with a cache, got an unpatched {type(model).__name__} alone. "
            "Call patch first."
        )
    layer_types, _ = layers_of(text_config_of(model))
    if cache is not None:
        check_layers(WHERE, "cache", len(cache.layers), len(layer_types))
    others = other_caches(model, config)
    devices = layer_devices(model)
    dense = why_dense(model)
    if dense is not None and state is None:
        dense = LOOKED_INSIDE
    layers = []
    for index, layer_type in enumerate(layer_types):
        if index in others:
            layers.append(LayerReport(index, layer_type, None, str(devices[index]), TRANSFORMERS, others[index], {}))
            continue
        tally: Mapping[str, int] = {} if state is None else state.fallbacks.get(index, {})
        device, head_dims = devices[index], _head_dims(model, index)
        if cache is not None:
            layer = cache.layers[index]
            assert isinstance(layer, KVQuantLayer)
            tally = layer.storage.fallbacks
            if layer.storage.is_allocated:
                device, head_dims = layer.storage.device, (layer.storage.key_head_dim, layer.storage.value_head_dim)
        kernel, reason = _served_by(config, index, device, head_dims, dense)
        name = name_of(config.formats(index))
        layers.append(LayerReport(index, layer_type, name, str(device), kernel, reason, dict(tally)))
    return Report(type(model).__name__, _kind(config, cache), tuple(layers), environment())


def _served_by(
    config: KVQuantConfig, index: int, device: torch.device, head_dims: tuple[int, ...], dense: str | None
) -> tuple[str, str]:
    """What attends to a layer whose cache is ours, and why it is no compiled kernel."""
    if not config.formats(index).is_quantized:
        return "transformers, over keys and values as they are", NOT_QUANTIZED
    if dense is not None:
        return f"transformers, over {DENSE}", dense
    if device.type == "meta":
        return "not known before the first tokens", "weights are not in memory, and come to where they are needed"
    without = ops.why_reference(device, *head_dims)
    reason = "" if without is None else f"no compiled kernels for {without.what} ({without.reason}). {without.remedy}"
    return ops.kernel_name(device, *head_dims), reason


def _head_dims(model: PreTrainedModel, index: int) -> tuple[int, ...]:
    """Channels of a head, as far as the config tells."""
    head_dim = head_dim_of(text_config_of(model).per_layer_config[index])
    return () if head_dim is None else (head_dim,)


def _kind(config: KVQuantConfig, cache: KVQuantCache | None) -> str:
    """What a cache is; one that `generate` made for assisted decoding grows, whatever its model was patched with."""
    if config.capture:
        return "captured"
    is_static = config.static or (cache is not None and any(storage.is_static for storage in cache.storages))
    return "static" if is_static else "offloaded" if config.offloading else "growing"


def _cells(layer: LayerReport) -> tuple[str, str, str, str]:
    """What a line of the table says of a layer."""
    fallbacks = [f"{count} steps on {DENSE}: {reason}" for reason, count in layer.fallbacks.items()]
    reasons = "; ".join([*filter(None, [layer.reason]), *fallbacks])
    return layer.formats or layer.layer_type, layer.device, layer.kernel, reasons


def _span(layers: list[LayerReport]) -> str:
    first, last = layers[0].layer_idx, layers[-1].layer_idx
    return str(first) if first == last else f"{first}-{last}"
