"""Our presets, by the reference that defines them (`spec/reference.py`), with the model's key transforms."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_kvquant.config import PRESETS, KVQuantConfig, LayerFormats
from hf_kvquant.models.layers import layers_of
from hf_kvquant.models.text_config import text_config_of
from hf_kvquant.ops.kernels import CPU_STORAGES
from hf_kvquant.ops.operands import Operands
from hf_kvquant.preflight.check import run_preflight
from hf_kvquant.presets import UNQUANTIZED
from hf_kvquant.spec import reference
from hf_kvquant.spec.formats import KVFormat
from hf_kvquant.spec.key_transform import KeyTransform
from hf_kvquant.spec.layout import KVLayout
from hf_kvquant.transforms.of_model import key_transforms

from ..choices import BUDGET_PRESETS
from .interface import DENSE_BITS, Layer, Quantize, Recipe, Storage

SOURCE = "this package: docs/format.md"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Preset(Recipe):
    """A preset, or any config whose layers have the same dense tokens."""

    config: KVQuantConfig

    def quantizers(self, layer: Layer) -> tuple[Quantize, Quantize]:
        """The formats of the layer; keys are transformed before and back after."""
        formats = self.config.formats(layer.index)
        try:
            for side in (formats.key, formats.value):
                side.num_groups(layer.head_dim)
        except ValueError as error:
            raise self.refuse(layer, "a head_dim that the preset serves", layer.head_dim) from error
        transform = key_transforms(layer.model, self.config).get(layer.index)
        return _by_ops(formats.key, transform), _by_ops(formats.value, None)

    def shared_bytes(self, num_kv_heads: int, head_dim: int) -> float:
        """Of a centre, in float32."""
        return 4.0 * num_kv_heads * head_dim if "center" in self.config.transforms else 0.0

    def to_dict(self) -> dict[str, Any]:
        """See `Recipe`. Says which layers have formats of their own."""
        layers = self.config.to_dict()["layers"]
        return super().to_dict() | ({"layers": layers} if layers else {})


# Formats below four bits that are no presets yet, with dense tokens. Names are as those of presets with windows.
_GROUPS = {"storage": "int2", "symmetric": False, "granularity": "group", "group_size": 64}
_CHANNEL = {"storage": "int4", "granularity": "channel", "symmetric": False, "block_size": 128}
FORMATS: dict[str, tuple[Any, Any]] = {
    "int3:4+128": ("int3", "int3"),
    "int2-g64:4+128": ({**_GROUPS, "clip_ratio": 3 / 4}, {**_GROUPS, "clip_ratio": 7 / 8}),
    "int4-channel+int2:4+128": (_CHANNEL, "int2"),
}


def preset(name: str) -> Preset:
    """A preset as a recipe."""
    return of_config(name, KVQuantConfig.from_preset(name))


def of_config(name: str, config: KVQuantConfig, num_layers: int = 1) -> Preset:
    """A config as a recipe, by any name. Bits are the average over the layers."""
    layers = [config.formats(index) for index in range(num_layers)]
    key = _averaged([storage(each.key, each) for each in layers])
    value = _averaged([storage(each.value, each) for each in layers])
    return Preset(name=name, family="hf_kvquant", source=SOURCE, key=key, value=value, config=config)


def of_budget(bits: float, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, text: str) -> Preset:
    """The best of `BUDGET_PRESETS` for each layer within so many bits a number, as the pre-flight finds it on a text.

    Dense tokens do not count in the budget.
    """
    found = run_preflight(
        model, bits=bits, presets=BUDGET_PRESETS, tokenizer=tokenizer, texts=[text], where="eval recipes"
    )
    return of_config(f"bits-{bits:g}", found.config, len(layers_of(text_config_of(model))[0]))


def storage(side: KVFormat, windows: KVQuantConfig | LayerFormats) -> Storage:
    """How a side is stored, with these dense windows."""
    per_scale = DENSE_BITS * (1 if side.symmetric else 2)
    if side.block_size is not None:
        stored = Storage(
            code_bits=side.bits, channel_bits=per_scale, channel_tokens=side.block_size, block=side.block_size
        )
    elif side.group_size is not None:
        stored = Storage(code_bits=side.bits, group_bits=per_scale, group=side.group_size)
    elif side.granularity == "head":
        stored = Storage(code_bits=side.bits, token_bits=per_scale)
    else:
        raise NotImplementedError(
            f"recipes: `config` must have scales for each head, group or channel, got {side.describe()}."
        )
    return dataclasses.replace(stored, sink=windows.sink_length, recent=windows.residual_length)


def _averaged(storages: Sequence[Storage]) -> Storage:
    """What stores as many bits as these on average. They may differ in bits alone."""
    names = ("code_bits", "token_bits", "group_bits", "channel_bits")
    average: dict[str, Any] = {name: statistics.fmean(getattr(each, name) for each in storages) for name in names}
    found = {dataclasses.replace(each, **average) for each in storages}
    if len(found) > 1:
        raise NotImplementedError("recipes: `config` must have the same dense windows and groups in all layers.")
    return found.pop()


def _by_reference(side: KVFormat, transform: KeyTransform | None) -> Quantize:
    def quantize(x: Tensor, start: int) -> Tensor:
        placed = None if transform is None else transform.to(x.device)
        planes = reference.quantize(x if placed is None else reference.transform_key(x, placed), side)
        return reference.dequantize(planes, side, key_transform=placed)

    return quantize


def _by_ops(side: KVFormat, transform: KeyTransform | None) -> Quantize:
    """The same bits by the ops of a cache: two kernels on a GPU, where the reference takes a hundred."""
    by_reference, layout = _by_reference(side, transform), KVLayout(side, PRESETS[UNQUANTIZED][1])

    def quantize(x: Tensor, start: int) -> Tensor:
        # A block gets its codes together, at once for all that are whole here.
        if side.block_size is not None or (x.is_cuda and side.storage in CPU_STORAGES):
            return by_reference(x, start)
        batch, num_kv_heads, tokens, head_dim = x.shape
        capacity = -(-tokens // side.token_alignment) * side.token_alignment
        planes = layout.allocate((batch, num_kv_heads, head_dim, head_dim), capacity, dtype=x.dtype, device=x.device)
        operands = Operands(*planes, layout, None if transform is None else transform.to(x.device))
        lengths = torch.full((batch,), tokens, dtype=torch.int32, device=x.device)
        operands.append(x, x, lengths)
        return operands.dequantize(lengths, None, begin=0, num_tokens=tokens, dtype=x.dtype)[0]

    return quantize


RECIPES: list[Recipe] = [preset(name) for name in PRESETS if name != UNQUANTIZED]
RECIPES += [
    of_config(name, KVQuantConfig.from_dict({"key": key, "value": value, "sink_length": 4, "residual_length": 128}))
    for name, (key, value) in FORMATS.items()
]
