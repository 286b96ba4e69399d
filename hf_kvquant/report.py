"""Reports each layer of a patched model: its format, what computes its attention, and why no compiled kernel does.

Before the first tokens, only the config, weights and devices are known: a model that reads the keys itself shows only
when it runs.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from rich.table import Table
from transformers import GenerationMixin, PreTrainedModel
from transformers.cache_utils import EncoderDecoderCache

from . import ops
from .attention.registry import NOT_QUANTIZED
from .cache.handle import LOOKED_INSIDE
from .cache.kvquant_cache import KVQuantCache
from .cache.layers import KVQuantLayer
from .cache.support import check_layers, formats_of, other_caches, why_general, why_no_latent_kernel
from .calibration.smoothing import smoothing_of
from .common.tables import html, plain, table_of
from .config import KVQuantConfig, LayerFormats
from .environment import environment
from .generate.encoder_decoder import decoder_cache
from .generate.hook import config_for
from .generate.watch import why_other
from .models.latent import head_dims_of, latent_sizes
from .models.layers import count_layers, layer_devices, named_types, shared_layers
from .models.parts import generating_parts, stand_ins
from .models.rounding import rounded
from .models.text_config import check_is_model, text_config_of
from .patching import why_dense
from .preflight.result import measured, name_of
from .state import Patch, notes_on, patch_of

WHERE = "report"
TRANSFORMERS = "transformers' own cache"
DENSE = "dequantised tensors"


@dataclasses.dataclass(frozen=True)
class LayerReport:
    """The report on one layer.

    Attributes:
        layer_idx: The layer.
        layer_type: The name that transformers gives its type.
        formats: The formats of its keys and values: a preset's name, or a description if they are no preset; `None` if
            the layer's cache is transformers' own.
        device: The device on which attention reads its codes, as far as known.
        kernel: What computes attention: a compiled kernel (on a CPU, with its instruction set); the PyTorch reference;
            or transformers, over dequantised tensors or over its own cache.
        reason: Why no compiled kernel does; empty if one does.
        fallbacks: By reason, how many steps so far attended to dequantised tensors. Compiled steps are not counted.
        reads: The layer whose keys and values this one reads, if it has none of its own. Formats, kernel and reason are
            then taken from that layer, which also counts the fallbacks.
        why_general: Why the kernel is the general one, which serves everything on a GPU and is several times slower
            than the others: what these want, and what they got. Empty if another kernel serves.
    """

    layer_idx: int
    layer_type: str
    formats: str | None
    device: str
    kernel: str
    reason: str
    fallbacks: Mapping[str, int]
    reads: int | None = None
    why_general: str = ""

    @property
    def is_served(self) -> bool:
        """Whether a compiled kernel attends to codes, and no step has fallen back to dequantised tensors."""
        return not self.reason and not self.fallbacks


@dataclasses.dataclass(frozen=True, repr=False)
class Report:
    """The result of `report`.

    Attributes:
        model: The name of the model's class.
        cache: The kind of its caches: `"growing"`, `"static"`, `"captured"` or `"offloaded"`.
        layers: The layers, in order.
        cost: What the config costs in quality, in words, if a pre-flight of this process has measured it on the model,
            and what calibration has gained; empty if neither is known.
        environment: What is installed, as `hf-kvquant env` shows it.
        unused: Why the last call of `generate` used no cache of this package although it should have, or why the next
            one will not: the generation config asks for another cache. Empty if neither holds. The layers are then
            reported as such a call leaves them.
        chose_other: Whether the last call asked for another cache, or for none, which the layers do not describe.
        unpatched_parts: The parts of the model that generate over caches of their own, which are not quantised.
        rounding: What the checkpoint's own scales do to keys and values before the cache gets them; empty for nothing.
        scratch_bytes: That attention of many new tokens takes beside the cache, at most; layers share them.
    """

    model: str
    cache: str
    layers: tuple[LayerReport, ...]
    cost: str
    environment: Mapping[str, str]
    unused: str = ""
    chose_other: bool = False
    unpatched_parts: tuple[str, ...] = ()
    rounding: str = ""
    scratch_bytes: int = 0

    @property
    def is_served(self) -> bool:
        """Whether `LayerReport.is_served` holds for every layer whose cache is ours, and the last call used them."""
        return not self.unused and all(layer.is_served for layer in self.layers if layer.formats is not None)

    def to_dict(self) -> dict[str, Any]:
        """A JSON-serialisable form."""
        return {**dataclasses.asdict(self), "is_served": self.is_served}

    def __str__(self) -> str:
        """A readable table. Consecutive layers with equal entries share a line."""
        return "\n".join([self._title(), *plain(self._table()), *self._notes()])

    def __repr__(self) -> str:
        """One line: which layers are served by a kernel."""
        ours = [layer for layer in self.layers if layer.formats is not None]
        served = sum(layer.is_served for layer in ours)
        return f"<Report: {self._title()}, {served} of {len(ours)} quantised layers served by a kernel>"

    def _repr_html_(self) -> str:
        """The table, for a notebook."""
        return html(self._title(), self._table(), self._notes())

    def _title(self) -> str:
        return f"{self.model}, {self.cache} cache"

    def _table(self) -> Table:
        headings = "layers", "formats", "device", "served by", "reason"
        rows = []
        for cells, group in itertools.groupby(self.layers, key=_cells):
            indices = [str(layer.layer_idx) for layer in group]
            span = indices[0] if len(indices) == 1 else f"{indices[0]}-{indices[-1]}"
            rows.append(((span, *cells), None))
        return table_of(headings, rows, left=headings)

    def _notes(self) -> list[str]:
        """Sentences below the table."""
        parts = [f"{part} generates over a cache of its own, unquantised." for part in self.unpatched_parts]
        if self.chose_other:
            parts.append("The last call of generate asked for another cache, or for none: this is not about it.")
        if self.scratch_bytes:
            megabytes = self.scratch_bytes / 1e6
            parts.append(f"Long prompts and chunks take up to {megabytes:.0f} MB beside the cache, which layers share.")
        return [*parts, *filter(None, [self.rounding, self.cost])]


def report(model: PreTrainedModel, cache: KVQuantCache | EncoderDecoderCache | None = None) -> Report:
    """Report what computes the attention of each layer of a model, and why. Neither changes nor runs the model.

    Args:
        model: A patched model, before or after it has generated; or any model, with a cache.
        cache: One that was passed to the model, or that `generate` returned, also in an `EncoderDecoderCache`. `None`
            reports on the cache that `generate` makes by itself, and on all its calls since the model was patched. Its
            config is the one that the model was patched with, unless the model's generation config asks for another.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: The model is not patched and there is no cache, or the cache is for another model.
        TypeError, ValueError: `generate` refuses the model's generation config.

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
    patch, unused = patch_of(model), ""
    if cache is not None:
        config = cache.quant_config
    elif patch is not None:
        config, unused = _next_cache(model, patch)
    else:
        raise ValueError(
            f"{WHERE}: `model` must be patched or come with a cache, got an unpatched {type(model).__name__} alone. "
            "Call patch first."
        )
    text_config = text_config_of(model)
    if cache is not None:
        check_layers(WHERE, "cache", cache.num_layers, count_layers(text_config))
    others, shared, names = other_caches(model, config), shared_layers(text_config), named_types(text_config)
    if unused:
        others |= dict.fromkeys(range(len(names)), unused)
    devices, quantized = layer_devices(model), formats_of(text_config, config)
    dense = why_dense(model)
    if dense is not None and patch is None:
        dense = LOOKED_INSIDE
    layers: list[LayerReport] = []
    for index, layer_type in enumerate(names):
        device = devices[index]
        if index in shared:
            source = dataclasses.replace(layers[shared[index]], device=str(device), fallbacks={})
            layers.append(dataclasses.replace(source, layer_idx=index, layer_type=layer_type, reads=shared[index]))
            continue
        if index in others:
            layers.append(LayerReport(index, layer_type, None, str(device), TRANSFORMERS, others[index], {}))
            continue
        tally: Mapping[str, int] = {} if patch is None else patch.fallbacks.get(index, {})
        head_dims, dtype = head_dims_of(text_config.per_layer_config[index]), model.dtype
        if cache is not None:
            layer = cache.layers[index]
            assert isinstance(layer, KVQuantLayer)
            tally = layer.storage.tally.fallbacks
            if layer.storage.is_allocated:
                device, head_dims = layer.storage.device, layer.storage.shape[2:]
                dtype = layer.storage.dtype or dtype
        formats = quantized[index]
        kernel, reason = _served_by(formats, device, head_dims, dense)
        name, general = name_of(formats), ""
        if latent_sizes(text_config.per_layer_config[index]) is not None:
            name = name.replace("key", "latent").replace("value", "rope part")
            if dense is None:
                kernel, reason = _served_over_latents(formats, device, head_dims, dtype)
        elif not reason:
            general = why_general(formats, device, head_dims, dtype)
        kernel += ", general" if general else ""
        layers.append(
            LayerReport(index, layer_type, name, str(device), kernel, reason, dict(tally), why_general=general)
        )
    unpatched = [name for name, part in generating_parts(model).items() if patch_of(part) is None]
    return Report(
        model=type(model).__name__,
        cache=_kind(config, cache),
        layers=tuple(layers),
        cost=_cost(model, config),
        environment=environment(),
        unused=unused,
        chose_other=cache is None and notes_on(model).chose_other,
        unpatched_parts=() if patch is None else tuple(unpatched),
        rounding=_rounding(model),
        scratch_bytes=_scratch_bytes(layers),
    )


def _next_cache(model: PreTrainedModel, patch: Patch) -> tuple[KVQuantConfig, str]:
    """The config of the cache that `generate` makes by itself, and why it makes none of ours; empty if it does."""
    generating = next(iter(stand_ins(model).values()), model)
    config: KVQuantConfig | None = patch.config
    prepare: Any = GenerationMixin._prepare_generation_config  # those of some models change the model
    if isinstance(generating, GenerationMixin) and generating.generation_config is not None:
        config = config_for(generating, prepare(generating, None)[0])
    why = notes_on(model).why_unquantized
    if why is not None:
        return config or patch.config, f"the last call of generate used no cache of hf_kvquant: {why}"
    if config is None:
        return patch.config, f"generate uses no cache of hf_kvquant: {why_other(generating)}"
    return config, ""


def _scratch_bytes(layers: Sequence[LayerReport]) -> int:
    """What layers take for tiles of long chunks. The general kernel has none."""
    served = {layer.device for layer in layers if layer.formats and layer.is_served and not layer.why_general}
    return max((ops.scratch_bytes(torch.device(device)) for device in served), default=0)


def _rounding(model: PreTrainedModel) -> str:
    """What the checkpoint's own scales do to keys and values, as a sentence; empty for nothing."""
    kinds, patch = sorted(set(rounded(model).values())), patch_of(model)
    if kinds:
        return (
            f"The checkpoint rounds keys and values to {' and '.join(kinds)} before they are quantised here. "
            "patch(..., checkpoint_rounding=False) leaves that out."
        )
    left_out = patch is not None and patch.unrounded
    return "The checkpoint's own rounding of keys and values is left out." if left_out else ""


def _cost(model: PreTrainedModel, config: KVQuantConfig) -> str:
    """What a config costs a model, as far as it was measured."""
    result, calibration = measured(model, config), smoothing_of(model)
    sentences = [] if result is None else [result.described_cost()]
    if calibration is not None:
        layers = calibration.result.layers
        before = sum(layer.error_before for layer in layers) / len(layers)
        after = sum(layer.error_after for layer in layers) / len(layers)
        sentences.append(f"Calibration: the error of attention is {after:.2%} instead of {before:.2%}, mean of layers.")
    return " ".join(sentences)


def _served_by(
    formats: LayerFormats, device: torch.device, head_dims: tuple[int, ...], dense: str | None
) -> tuple[str, str]:
    """What computes the attention of a layer whose cache is ours, and why it is not a compiled kernel."""
    if not formats.is_quantized:
        return "transformers, over unquantised keys and values", NOT_QUANTIZED
    if dense is not None:
        return f"transformers, over {DENSE}", dense
    if device.type == "meta":
        return "not known before the first tokens", "weights are not in memory, and are loaded when needed"
    without = ops.why_reference(device, *head_dims)
    reason = "" if without is None else f"no compiled kernels for {without.what} ({without.reason}). {without.remedy}"
    return ops.kernel_name(device, *head_dims), reason


def _served_over_latents(
    formats: LayerFormats, device: torch.device, head_dims: tuple[int, ...], dtype: torch.dtype
) -> tuple[str, str]:
    """What computes the attention of a layer that keeps latents, and why it is not a compiled kernel."""
    why = why_no_latent_kernel(formats, device, head_dims, dtype)
    if why is None:
        return ops.kernel_name(device), ""
    reason = f"no compiled kernel attends to latents (MLA) of this format on {device.type}"
    return "PyTorch, absorbed", f"{reason}: {why}" if why else reason


def _kind(config: KVQuantConfig, cache: KVQuantCache | None) -> str:
    """The kind of a cache. Caches that `generate` makes for assisted decoding grow unless their steps are captured."""
    if config.capture:
        return "captured"
    is_static = config.static or (cache is not None and any(storage.is_static for storage in cache.storages))
    return "static" if is_static else "offloaded" if config.offloading else "growing"


def _cells(layer: LayerReport) -> tuple[str, str, str, str]:
    """A layer's cells in the table, without its index."""
    fallbacks = [f"{count} steps on {DENSE}: {reason}" for reason, count in layer.fallbacks.items()]
    reasons = "; ".join([*filter(None, [layer.reason, layer.why_general]), *fallbacks])
    formats = layer.formats or layer.layer_type
    return formats if layer.reads is None else f"reads layer {layer.reads}", layer.device, layer.kernel, reasons
