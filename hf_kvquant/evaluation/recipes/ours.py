"""Our presets, by the reference that defines them (`spec/reference.py`), with the model's key transforms."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import Tensor

from ...config import PRESETS, KVQuantConfig
from ...spec import reference
from ...spec.formats import KVFormat
from ...spec.key_transform import KeyTransform
from ...transforms.of_model import key_transforms
from ..measuring.fidelity import UNQUANTIZED
from .interface import DENSE_BITS, Layer, Quantize, Recipe, Storage

SOURCE = "this package: docs/format.md"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Preset(Recipe):
    """A preset, or any config with the same formats in all layers."""

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
        return _by_reference(formats.key, transform), _by_reference(formats.value, None)

    def shared_bytes(self, num_kv_heads: int, head_dim: int) -> float:
        """Of a centre, in float32."""
        return 4.0 * num_kv_heads * head_dim if "center" in self.config.transforms else 0.0


# Formats below four bits that are no presets yet, with dense tokens. Names are as those of presets with windows.
_INT2 = {"storage": "int2", "symmetric": False, "clip_ratio": 0.75}
_INT2_G64 = {**_INT2, "granularity": "group", "group_size": 64}
_CHANNEL = {"storage": "int4", "granularity": "channel", "symmetric": False, "block_size": 128}
FORMATS: dict[str, tuple[Any, Any]] = {
    "int3:4+128": ("int3", "int3"),
    "int2-g64:4+128": (_INT2_G64, _INT2_G64),
    "int4-channel+int2:4+128": (_CHANNEL, "int2"),
}


def preset(name: str) -> Preset:
    """A preset as a recipe."""
    return of_config(name, KVQuantConfig.from_preset(name))


def of_config(name: str, config: KVQuantConfig) -> Preset:
    """A config as a recipe, by any name."""
    key, value = (storage(side, config) for side in (config.key, config.value))
    return Preset(name=name, family="hf_kvquant", source=SOURCE, key=key, value=value, config=config)


def storage(side: KVFormat, config: KVQuantConfig) -> Storage:
    """How a side of a config is stored."""
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
    return dataclasses.replace(stored, sink=config.sink_length, recent=config.residual_length)


def _by_reference(side: KVFormat, transform: KeyTransform | None) -> Quantize:
    def quantize(x: Tensor, start: int) -> Tensor:
        placed = None if transform is None else transform.to(x.device)
        planes = reference.quantize(x if placed is None else reference.transform_key(x, placed), side)
        return reference.dequantize(planes, side, key_transform=placed)

    return quantize


RECIPES: list[Recipe] = [preset(name) for name in PRESETS if name != UNQUANTIZED]
RECIPES += [
    of_config(name, KVQuantConfig.from_dict({"key": key, "value": value, "sink_length": 4, "residual_length": 128}))
    for name, (key, value) in FORMATS.items()
]
