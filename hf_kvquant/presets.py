"""The presets, and the formats of one layer: of keys and values, with the transforms of keys and the dense windows.

This file checks what users type for a layer, in code or in a dictionary, and knows no tensors. `formats.py` decides
what a format is in memory. `config.py` holds the settings of a whole cache.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

from .common.errors import did_you_mean
from .spec.codes import INTEGER_BITS, STORAGE_IDS
from .spec.formats import BLOCK_SIZE, KVFormat

_NONE = KVFormat("none")
_INT8 = KVFormat("int8")
_LATENT_GROUP = 128  # channels of a latent that share a scale at 4 bits
# Of rotated keys: puts the 16 codes of 4 bits at the centres of 16 equal parts of the range, instead of the first and
# the last at its ends. No number is off by more than half a step, and steps are 1/16 smaller. On random rows the mean
# squared error falls by 5 % with 64 numbers per scale, 8 % with 128 and 10 % with 256. With 32 it rises by 5 %, because
# the two ends are a larger part of the numbers; so groups of 32 do without. So do channel scales: the tokens at the
# ends of a channel's range are those that others attend to. With 3 and 2 bits, the same rule gave the least or nearly
# the least divergence among ratios from 0.65 to 0.875 and from 0.45 to 0.75 (reference model, 2,048 tokens).
_KEYS = {
    name: KVFormat(name, symmetric=False, clip_ratio=1 - 2.0 ** -INTEGER_BITS[name])
    for name in ("int4", "int3", "int2")
}
# Values have outlier channels in pretrained models, and a clipped one is too small in every token: sums over tokens do
# not average that out, as they do other errors. Divergence that int4 values cause in SmolLM2-135M-Instruct, all of the
# range and 15/16 of it: 0.00031 and 0.0018; int3: 0.0020 and, with 7/8, 0.0072; int2, with 15/16, 7/8 and 3/4: 0.0143,
# 0.0152 and 0.0341 (4 and 128 tokens dense, Wikipedia text that nothing else is measured on). In the reference model,
# without outliers: 0.00015 and 0.00014; 0.00067 and 0.00058; 0.0033, 0.0029 and 0.0025.
_VALUES = {
    "int4": KVFormat("int4", symmetric=False),
    "int3": KVFormat("int3", symmetric=False),
    "int2": KVFormat("int2", symmetric=False, clip_ratio=7 / 8),
}
_INT4_G32 = KVFormat("int4", "group", 32, symmetric=False)
_INT4_CHANNEL = KVFormat("int4", "channel", symmetric=False, block_size=BLOCK_SIZE)
_FP8 = KVFormat("fp8")

# The preset that keeps keys and values as they come. Commands compare the others with it.
UNQUANTIZED = "none"
# Formats of (keys, values). Keys need more bits than values, hence `k8v4` and `k4v2`.
PRESETS: dict[str, tuple[KVFormat, KVFormat]] = {
    "none": (_NONE, _NONE),
    "int8": (_INT8, _INT8),
    "k8v4": (_INT8, _VALUES["int4"]),
    "int4": (_INT4_CHANNEL, _VALUES["int4"]),
    "int4-channel": (_INT4_CHANNEL, _VALUES["int4"]),
    "int4-token": (_KEYS["int4"], _VALUES["int4"]),
    "int4-g32": (_INT4_G32, _INT4_G32),
    "k4v2": (_KEYS["int4"], _VALUES["int2"]),
    "int2": (_KEYS["int2"], _VALUES["int2"]),
    "fp8": (_FP8, _FP8),
}
# Dense tokens that belong to a preset, first and newest. All others attend to the first, and errors of the newest cost
# most: on a real model, 4 + 28 of them cut the divergence of `int4-channel` by four fifths, and of `k8v4` by nine
# tenths; 4 + 12 cut that of `int8` by four fifths (docs/presets.md). GPU kernels read 16 dense tokens at a time. 32
# make a decode step of `k8v4` 2 to 10 % longer (H200, 64 sequences of 8,192 and of 1,024 tokens), 16 one of `int8` 2 %
# (of 8,192). Two bits need more: with none, `int2` diverges fifteen times as much as `int4-token` on the reference
# model (docs/recipes.md).
_FOUR_AND_FEW = {"sink_length": 4, "residual_length": 12}
_FOUR_AND_SOME = {"sink_length": 4, "residual_length": 28}
_FOUR_AND_MANY = {"sink_length": 4, "residual_length": 128}
PRESET_WINDOWS: dict[str, dict[str, int]] = {
    "int8": _FOUR_AND_FEW,
    "k8v4": _FOUR_AND_SOME,
    "int4": _FOUR_AND_SOME,
    "k4v2": _FOUR_AND_MANY,
    "int2": _FOUR_AND_MANY,
}
DEFAULT_PRESET = "int8"
# Keys of this many bits or fewer suffer from biases and outlier channels, which the pre-flight looks for.
FEW_BITS = 4

# The formats of keys and of values for which the user gives only a storage type: every one has such formats.
_DEFAULT_FORMATS: dict[str, dict[str, KVFormat]] = {
    side: {name: {"none": _NONE, "int8": _INT8, "fp8": _FP8, **narrow}[name] for name in STORAGE_IDS}
    for side, narrow in (("key", _KEYS), ("value", _VALUES))
}
_NBITS = {bits: name for name, bits in INTEGER_BITS.items()}

# Transforms of keys before they are quantised, in the order of application: a centre is subtracted (if the model has a
# key bias, or centres were measured on data), channels are divided by smoothing factors (if there are any), and a
# Hadamard rotation spreads each channel over all.
TRANSFORMS = ("center", "smooth", "rotate")
# Dense tokens: the first ones of a sequence, which all others attend to, and the newest.
WINDOWS = ("sink_length", "residual_length")

SIDES = ("preset", "key", "value", "transforms", *WINDOWS)


@dataclasses.dataclass(frozen=True)
class Formats:
    """What a layer has in common with the default for all layers. Attributes and errors: see `LayerFormats`."""

    key: KVFormat
    value: KVFormat
    transforms: tuple[str, ...] = cast(Any, None)
    sink_length: int = 0
    residual_length: int = 0

    def __post_init__(self) -> None:
        where = type(self).__name__
        for name in ("key", "value"):
            side = getattr(self, name)
            if not isinstance(side, KVFormat):
                raise TypeError(
                    f"{where}: `{name}` must be a KVFormat, got {side!r}. "
                    "KVQuantConfig.from_preset takes a preset's name, from_dict names of formats."
                )
        for name in WINDOWS:
            length = getattr(self, name)
            if isinstance(length, bool) or not isinstance(length, int):
                raise TypeError(f"{where}: `{name}` must be a number of tokens, got {length!r}.")
            if length < 0:
                raise ValueError(
                    f"{where}: `{name}` must be 0 or positive, got {length}. 0 keeps no such tokens dense."
                )
            if length and not self._is_quantized:
                raise ValueError(
                    f"{where}: `{name}` must be 0 where neither keys nor values are quantised, got {length}. "
                    "Every token stays dense there: leave it out."
                )
        object.__setattr__(self, "transforms", _canonical_transforms(where, self.transforms, self.key))
        if self.value.granularity == "channel":
            # Scales per token are enough for values, and blocks would keep more tokens dense.
            raise ValueError(
                f"{where}: `value` must not have granularity 'channel', got {self.value.describe()}. "
                "Channel scales are for keys, whose outliers lie in channels; use granularity 'head' or 'group'."
            )

    @property
    def _is_quantized(self) -> bool:
        return self.key.is_quantized or self.value.is_quantized

    def sides_to_dict(self) -> dict[str, Any]:
        """The five settings in a JSON-serialisable form."""
        return {
            "key": self.key.to_dict(),
            "value": self.value.to_dict(),
            "transforms": list(self.transforms),
            **{name: getattr(self, name) for name in WINDOWS},
        }


@dataclasses.dataclass(frozen=True)
class LayerFormats(Formats):
    """The formats of one layer and the transforms of its keys.

    Attributes:
        key: Format of keys.
        value: Format of values.
        transforms: Names from `TRANSFORMS`, in its order. By default they follow from the format of keys: all for
            integers, without the centre where channels have scales, and none for fp8.
        sink_length: How many of the first tokens of a sequence, not counting padding, stay dense.
        residual_length: How many of the newest tokens stay dense.
        is_quantized: Whether keys or values are quantised. Asked in every step, so it is no property.

    Raises:
        TypeError, ValueError: `transforms` has no meaning, or is given for keys that are not quantised; values have
            channel scales; or tokens are to stay dense where nothing is quantised.
    """

    is_quantized: bool = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "is_quantized", self._is_quantized)

    def settings(self) -> dict[str, Any]:
        """The five settings by name."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.init}

    def describe(self) -> str:
        """A short name for reports: one format if both sides are alike, else both, and the dense windows."""
        key, value = self.key.describe(), self.value.describe()
        name = key if key == value else f"key {key}, value {value}"
        if self.sink_length or self.residual_length:
            name += f", first {self.sink_length} and last {self.residual_length} tokens dense"
        return name


def check_keys(where: str, data: Mapping[str, Any], known: Sequence[str], hint: str) -> None:
    """Refuse keys that a dictionary must not have. `hint` ends the message."""
    for key in data:
        if key not in known:
            raise ValueError(f"{where}: unknown key '{key}'.{did_you_mean(key, known)} {hint}")


def preset_formats(preset: str) -> LayerFormats:
    """What a preset makes of a layer."""
    return layer_formats("PRESETS", {"preset": preset}, {})


def windows_of(preset: str | None, key: KVFormat, value: KVFormat) -> dict[str, int]:
    """Dense tokens of a preset, by the names of `WINDOWS`; if none is named and formats are its, of the default one."""
    if preset is None and (key, value) == PRESETS[DEFAULT_PRESET]:
        preset = DEFAULT_PRESET
    return {} if preset is None else PRESET_WINDOWS.get(preset, {})


def latent_formats(where: str, formats: LayerFormats, rank: int) -> LayerFormats:
    """What the formats of a layer mean where it keeps latents (MLA): one for the latent, one for the rope part.

    A latent is what keys and values of all heads are made of, so it has one format. Caches do not centre or smooth it:
    its channels come from a norm, a rotation spreads them, and where they are uneven, `smooth_attention` scales the
    weights. With 4 bits, groups of 128 channels have a scale and a zero each. The rope part is an eighth of the
    channels, and its numbers are larger. It keeps 8 bits next to latents of 4, and the model's dtype next to latents of
    8: with 8 bits for both, the divergence of the twin of the reference model that keeps latents was 0.00062, not
    0.00014.

    Args:
        where: Begins the message.
        formats: As the user asks for them.
        rank: Channels of a latent.

    Returns:
        `key` is the format of latents, `value` the format of rope parts.

    Raises:
        ValueError: Keys and values are to be stored differently, or with fewer than 4 bits.
    """
    key, value = formats.key, formats.value
    if key.storage != value.storage:
        raise ValueError(
            f"{where}: `key` and `value` must have one storage type in a layer that keeps latents (MLA), got "
            f"{key.storage} and {value.storage}: a latent is the key and the value of a token at once. Choose the "
            "preset int8, fp8 or int4."
        )
    if not formats.is_quantized:
        return formats
    if key.bits < INTEGER_BITS["int4"]:
        raise ValueError(
            f"{where}: `key` and `value` must have 4 bits or more in a layer that keeps latents (MLA), got "
            f"{key.storage}, whose quality there is not known. Choose the preset int4."
        )
    if key.storage == "int4":
        is_whole = rank % _LATENT_GROUP == 0
        grouped = KVFormat("int4", "group", _LATENT_GROUP, symmetric=False) if is_whole else _VALUES["int4"]
        key, value = key if key.granularity == "group" else grouped, _INT8
    else:
        value = _NONE
    transforms = tuple(name for name in formats.transforms if name == "rotate")
    return LayerFormats(key, value, transforms, formats.sink_length, formats.residual_length)


def _sides(where: str, data: Mapping[str, Any]) -> tuple[KVFormat, KVFormat]:
    """The formats of keys and values that a dictionary names by `preset`, `key` and `value`."""
    preset = data.get("preset", DEFAULT_PRESET)
    if not isinstance(preset, str) or preset not in PRESETS:
        raise ValueError(
            f"{where}: `preset` must be one of {list(PRESETS)}, got {preset!r}.{did_you_mean(preset, PRESETS)}"
        )
    key, value = PRESETS[preset]
    return _side(where, "key", data.get("key", key)), _side(where, "value", data.get("value", value))


def _side(where: str, name: str, spelled: object) -> KVFormat:
    """The format of one side, from a KVFormat, a storage type's name or a dictionary of KVFormat fields."""
    if isinstance(spelled, KVFormat):
        return spelled
    if isinstance(spelled, Mapping):
        return KVFormat.from_dict(dict(spelled))
    known = _DEFAULT_FORMATS[name]
    if isinstance(spelled, str) and spelled in known:
        return known[spelled]
    raise ValueError(
        f"{where}: `{name}` must be one of {list(known)} or a dictionary of KVFormat fields, "
        f"got {spelled!r}.{did_you_mean(spelled, known)}"
    )


def layer_from(where: str, spelled: object, windows: Mapping[str, int]) -> LayerFormats:
    """A layer's formats, from what `layers` may hold. `windows` are the lengths for layers that name none."""
    if isinstance(spelled, LayerFormats):
        return spelled
    if isinstance(spelled, str):
        spelled = {"preset": spelled}
    if not isinstance(spelled, Mapping):
        raise TypeError(f"{where}: `layers` must hold presets' names or dictionaries, got {type(spelled).__name__}.")
    check_keys(
        where,
        spelled,
        SIDES,
        "A layer takes 'preset', 'key', 'value', 'transforms', 'sink_length' and 'residual_length'.",
    )
    return layer_formats(where, spelled, windows)


def layer_formats(where: str, data: Mapping[str, Any], windows: Mapping[str, int]) -> LayerFormats:
    """Formats from a dictionary with `SIDES`. `windows` do not apply to a layer that quantises nothing.

    Windows in the dictionary take precedence over `windows`, which take precedence over a preset's.
    """
    data = _without_nbits(data)
    key, value = _grouped(*_sides(where, data), data.get("q_group_size"))
    if key.is_quantized or value.is_quantized:
        data = {**windows_of(data.get("preset"), key, value), **windows, **data}
    options = {name: data[name] for name in ("transforms", *WINDOWS) if data.get(name) is not None}
    try:
        return LayerFormats(key, value, **options)
    except (TypeError, ValueError) as error:  # say which part of the dictionary it is about
        raise type(error)(where + str(error).removeprefix("LayerFormats")) from None


def _canonical_transforms(where: str, spelled: Iterable[str] | None, key: KVFormat) -> tuple[str, ...]:
    """Names of transforms in the order of `TRANSFORMS`, each once; `None` gives the defaults of the key format."""
    if spelled is None:
        # Integer codes work best when all channels have the same size, even at 8 bits: on the reference model, rotation
        # alone removes a quarter of the divergence of int8, and seven eighths if keys have outlier channels. fp8 is as
        # precise for small channels as for large ones. The zeros of channels do what a centre does, block by block; but
        # rotation still helps there: it spreads the few tokens that are far out in one channel over all channels.
        # Divergence of SmolLM2-135M-Instruct from channel scales alone and with rotation: 0.0027 and 0.0018 at 2,048
        # tokens, 0.0030 and 0.0018 at 8,192 (4 + 32 tokens dense, Wikipedia text that nothing else is measured on).
        names: Sequence[str] = TRANSFORMS if key.is_integer else ()
        return tuple(name for name in names if key.granularity != "channel" or name != "center")
    if isinstance(spelled, str) or not isinstance(spelled, Iterable):
        raise TypeError(
            f"{where}: `transforms` must be a list of names out of {list(TRANSFORMS)}, got {spelled!r}. "
            "An empty list means none."
        )
    names = list(spelled)
    for name in names:
        if name not in TRANSFORMS:
            raise ValueError(
                f"{where}: `transforms` must hold names out of {list(TRANSFORMS)}, got {name!r}."
                f"{did_you_mean(name, TRANSFORMS)}"
            )
    if names and not key.is_quantized:
        raise ValueError(
            f"{where}: `transforms` must be empty where keys are not quantised, got {names}. "
            "Transforms only reduce quantisation errors: leave them out."
        )
    return tuple(name for name in TRANSFORMS if name in names)


def _without_nbits(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """transformers' spelling `nbits` as the preset of that name; with groups or 3 bits, as formats of both sides."""
    nbits = data.get("nbits")
    if nbits is None:
        return data
    clash = [key for key in ("preset", "key", "value") if key in data]
    if clash:
        raise ValueError(
            f"KVQuantConfig: `nbits` must not be given together with {clash}, got {nbits!r}. Keep one of them."
        )
    if not isinstance(nbits, int) or nbits not in _NBITS:
        raise ValueError(f"KVQuantConfig: `nbits` must be one of {list(_NBITS)}, got {nbits!r}.")
    name = _NBITS[nbits]
    if name in PRESETS and data.get("q_group_size") is None:
        return {**data, "preset": name}
    return {**data, "key": name, "value": name}


def _grouped(key: KVFormat, value: KVFormat, group_size: object) -> tuple[KVFormat, KVFormat]:
    """Both formats with transformers' `q_group_size`."""
    if group_size is None:
        return key, value
    if not (key.is_quantized and value.is_quantized):
        raise ValueError(
            f"KVQuantConfig: `q_group_size` must be left out where keys or values are not quantised, got {group_size}."
        )
    if key.block_size is not None:
        raise ValueError(
            "KVQuantConfig: `q_group_size` must be left out where keys have a scale for every channel, "
            f"got {group_size}. Use preset 'int4-g32' for groups of channels."
        )
    grouped: dict[str, Any] = {"granularity": "group", "group_size": group_size, "clip_ratio": 1.0}
    key, value = (dataclasses.replace(side, **grouped) for side in (key, value))
    return key, value
