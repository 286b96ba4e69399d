"""The user's settings: `KVQuantConfig` and the presets.

A config sets, for each layer, the format of keys and values, the tokens that stay dense, and the transforms of keys
before they are quantised; and for the cache, whether it grows or is static. It validates what users type and knows no
tensors; `formats.py` decides what a format is in memory. A config round-trips through `to_dict`, `from_dict` and JSON,
so it can be part of a `generation_config.json`.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeGuard, cast

from .common.errors import did_you_mean
from .spec.formats import BLOCK_SIZE, KVFormat

BACKEND = "hf_kvquant"

_NONE = KVFormat("none")
_INT8 = KVFormat("int8")
# Puts the 16 codes at the centres of 16 equal parts of the range, instead of the first and the last at its ends. No
# value is off by more than half a step, and steps are 1/16 smaller. On random rows the mean squared error falls by 5 %
# with 64 values per scale, 8 % with 128 and 10 % with 256. With 32 it rises by 5 %, because the two ends are a larger
# part of the values; so groups of 32 do without. So do channel scales: the tokens at the ends of a channel's range are
# those that others attend to.
_MIDDLES = 15 / 16
_INT4 = KVFormat("int4", symmetric=False, clip_ratio=_MIDDLES)
_INT4_G32 = KVFormat("int4", "group", 32, symmetric=False)
_INT4_CHANNEL = KVFormat("int4", "channel", symmetric=False, block_size=BLOCK_SIZE)
_FP8 = KVFormat("fp8")

# Formats of (keys, values). Keys need more bits than values, hence `k8v4`.
PRESETS: dict[str, tuple[KVFormat, KVFormat]] = {
    "none": (_NONE, _NONE),
    "int8": (_INT8, _INT8),
    "k8v4": (_INT8, _INT4),
    "int4": (_INT4, _INT4),
    "int4-g32": (_INT4_G32, _INT4_G32),
    "int4-channel": (_INT4_CHANNEL, _INT4),
    "fp8": (_FP8, _FP8),
}
DEFAULT_PRESET = "int8"

# The format of a side for which the user gives only a storage type.
_DEFAULT_FORMATS = {"none": _NONE, "int8": _INT8, "int4": _INT4, "fp8": _FP8}
_NBITS = {8: "int8", 4: "int4"}

# Transforms of keys before they are quantised, in the order of application: a centre is subtracted (if the model has a
# key bias, or centres were measured on data), channels are divided by smoothing factors (if there are any), and a
# Hadamard rotation spreads each channel over all.
TRANSFORMS = ("center", "smooth", "rotate")
# The transforms of a config that names none, by the storage type of keys. Integer codes work best when all channels
# have the same size, even at 8 bits: on the reference model, rotation alone removes a quarter of the divergence of
# int8, and seven eighths if keys have outlier channels. fp8 is as precise for small channels as for large ones.
_DEFAULT_TRANSFORMS = {"none": (), "int8": TRANSFORMS, "int4": TRANSFORMS, "fp8": ()}

# Dense tokens: the first ones of a sequence, which all others attend to, and the newest.
WINDOWS = ("sink_length", "residual_length")

_SIDES = ("preset", "key", "value", "transforms", *WINDOWS)
_SWITCHES = ("sliding", "static", "max_cache_len", "capture", "offloading")
_KEYS = ("backend", *_SIDES, "layers", *_SWITCHES, "nbits", "q_group_size")


@dataclasses.dataclass(frozen=True)
class _Formats:
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

    def _to_dict(self) -> dict[str, Any]:
        return {
            "key": self.key.to_dict(),
            "value": self.value.to_dict(),
            "transforms": list(self.transforms),
            **{name: getattr(self, name) for name in WINDOWS},
        }


@dataclasses.dataclass(frozen=True)
class LayerFormats(_Formats):
    """The formats of one layer and the transforms of its keys.

    Attributes:
        key: Format of keys.
        value: Format of values.
        transforms: Names from `TRANSFORMS`, in its order. By default they follow from the storage type of keys: all for
            int8 and int4, none for fp8 and for keys with channel scales.
        sink_length: How many of the first tokens of a sequence, not counting padding, stay dense.
        residual_length: How many of the newest tokens stay dense.

    Raises:
        TypeError, ValueError: `transforms` has no meaning, or is given for keys that are not quantised or have channel
            scales; values have channel scales; or tokens are to stay dense where nothing is quantised.
    """

    @property
    def is_quantized(self) -> bool:
        """Whether keys or values are quantised."""
        return self._is_quantized

    def describe(self) -> str:
        """A short name for reports: one format if both sides are alike, else both, and the dense windows."""
        key, value = self.key.describe(), self.value.describe()
        name = key if key == value else f"key {key}, value {value}"
        if self.sink_length or self.residual_length:
            name += f", first {self.sink_length} and last {self.residual_length} tokens dense"
        return name


@dataclasses.dataclass(frozen=True)
class KVQuantConfig(_Formats):
    """Settings of a model's quantised key-value cache.

    `key`, `value`, `transforms`, `sink_length` and `residual_length` are as in `LayerFormats`. They apply to every layer
    that `layers` does not name.

    Attributes:
        layers: Per-layer overrides, by layer index.
        sliding: Whether layers with sliding windows are quantised like the others, in rings. `sink_length` does not
            apply to them: their first tokens leave the window like all others.
        static: Whether buffers are allocated once for `max_cache_len` tokens, so that the decode step can be compiled.
        max_cache_len: Tokens that a static cache holds; implies `static`. `None` uses what `generate` needs, rounded
            up, or the size of the buffers of an earlier call.
        capture: Whether `generate` of a patched model records the decode step as a CUDA graph without compiling it.
            Ready at once; for one GPU. Implies `static`.
        offloading: Whether the codes of a growing cache are kept in CPU memory. Each GPU holds those of two layers: the
            one that attends and the next one, which is being fetched. See `offloading.py`.

    Raises:
        TypeError, ValueError: A setting is not valid; the message names it, what was expected and what came.
    """

    key: KVFormat = _INT8
    value: KVFormat = _INT8
    layers: Mapping[int, LayerFormats] = dataclasses.field(default_factory=dict)
    sliding: bool = True
    static: bool = False
    max_cache_len: int | None = None
    capture: bool = False
    offloading: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("sliding", "static", "capture", "offloading"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"KVQuantConfig: `{name}` must be True or False, got {getattr(self, name)!r}.")
        if self.max_cache_len is not None:
            if isinstance(self.max_cache_len, bool) or not isinstance(self.max_cache_len, int):
                raise TypeError(f"KVQuantConfig: `max_cache_len` must be an int or None, got {self.max_cache_len!r}.")
            if self.max_cache_len <= 0:
                raise ValueError(
                    f"KVQuantConfig: `max_cache_len` must be positive, got {self.max_cache_len}. "
                    "Give the longest sequence in tokens, prompt included."
                )
        if self.max_cache_len is not None or self.capture:
            object.__setattr__(self, "static", True)
        if self.offloading and self.static:
            raise ValueError(
                "KVQuantConfig: `offloading` must be False for a static cache, got True: a compiled or captured step "
                "needs its buffers on the GPU. Leave out static, max_cache_len and capture, or leave out offloading."
            )
        if not isinstance(self.layers, Mapping):
            raise TypeError(
                f"KVQuantConfig: `layers` must map layer indices to LayerFormats, got {type(self.layers).__name__}."
            )
        for index, formats in self.layers.items():
            if not _is_layer_index(index):
                raise ValueError(f"KVQuantConfig: `layers` must be keyed by layer indices from 0, got {index!r}.")
            if not isinstance(formats, LayerFormats):
                raise TypeError(
                    f"KVQuantConfig: `layers[{index}]` must be LayerFormats, got {formats!r}. "
                    "KVQuantConfig.from_preset and from_dict take presets' names there."
                )
        object.__setattr__(self, "layers", dict(sorted(self.layers.items())))

    def formats(self, layer_idx: int) -> LayerFormats:
        """The formats of one layer."""
        default = LayerFormats(self.key, self.value, self.transforms, self.sink_length, self.residual_length)
        return self.layers.get(layer_idx, default)

    @classmethod
    def from_preset(cls, preset: str, **options: Any) -> KVQuantConfig:
        """Make the config of a preset.

        Args:
            preset: One of `PRESETS`.
            **options: Other keys of `from_dict`, such as `static=True` or `layers={0: "int8"}`.

        Raises:
            ValueError: The preset or an option is unknown.
        """
        return cls.from_dict({"preset": preset, **options})

    @classmethod
    def for_model(
        cls,
        model: Any,
        preset_or_config: str | KVQuantConfig | Mapping[str, Any] | None = None,
        *,
        force: bool = False,
        **options: Any,
    ) -> KVQuantConfig:
        """Choose or check a config for a model before it generates anything.

        The checks are described in `preflight.run_preflight`, which also returns the findings.

        Args:
            model: A decoder-only model of transformers. It is not changed.
            preset_or_config: The config to check, returned unchanged. `None` picks for each layer the smallest preset
                that is good enough.
            force: Whether to return the config even if it corrupts the output, with a warning in the log.
            **options: Of `run_preflight`: `tokenizer`, `texts`, `presets`, `max_kld`, `measure`, `progress`.

        Raises:
            PreflightError: The config corrupts the model's output, or a layer cannot be judged.
            NotImplementedError: The model cannot be patched.
            TypeError, ValueError: An argument has no meaning or does not fit the model.

        Example:
            >>> hf_kvquant.patch(model, KVQuantConfig.for_model(model))
        """
        assert _run_preflight is not None  # the package imports the pre-flight
        approved: KVQuantConfig = _run_preflight(model, preset_or_config, **options).approved(force=force)
        return approved

    @classmethod
    def resolve(cls, preset_or_config: str | KVQuantConfig | Mapping[str, Any]) -> KVQuantConfig:
        """Make a config from a preset's name or a dictionary; a config is returned unchanged."""
        if isinstance(preset_or_config, KVQuantConfig):
            return preset_or_config
        if isinstance(preset_or_config, str):
            return cls.from_preset(preset_or_config)
        if isinstance(preset_or_config, Mapping):
            return cls.from_dict(preset_or_config)
        raise TypeError(
            "KVQuantConfig: `preset_or_config` must be a preset's name, a dictionary or a KVQuantConfig, "
            f"got {type(preset_or_config).__name__}. Presets: {list(PRESETS)}."
        )

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> KVQuantConfig:
        """Make a config from a dictionary, as `to_dict` makes it or as a user types it in `cache_config`.

        Keys, all optional:

        - `preset`: a name from `PRESETS`.
        - `key`, `value`: a storage type's name or a dictionary of `KVFormat` fields; overrides that side of the preset.
        - `transforms`: a list of names; by default they follow from the keys.
        - `sink_length`, `residual_length`: how many of the first and of the newest tokens stay dense; 0 by default.
        - `layers`: from layer index to a preset's name or a dictionary with `preset`, `key`, `value`, `transforms`,
          `sink_length`, `residual_length`. The last two default to those of the other layers if the layer is quantised.
        - `sliding`, `static`, `max_cache_len`, `capture`, `offloading`: as the attributes.
        - `backend`: must be ours; ignored.
        - `nbits` (8 or 4) and `q_group_size` (channels per scale): transformers' spellings, for both sides.

        Raises:
            TypeError: `data` is not a dictionary, or a value is of the wrong type.
            ValueError: A key is unknown (the message suggests the nearest known one) or a value has no meaning.
        """
        if not isinstance(data, Mapping):
            raise TypeError(
                f"KVQuantConfig: `data` must be a dictionary, got {data!r}. "
                "KVQuantConfig.from_preset takes a preset's name."
            )
        _check_keys("KVQuantConfig", data, _KEYS, f"Known keys: {list(_KEYS)}.")
        if data.get("backend", BACKEND) != BACKEND:
            hint = f" Did you mean '{BACKEND}'?" if is_like_backend(data["backend"]) else ""
            raise ValueError(
                f"KVQuantConfig: `backend` must be '{BACKEND}', got {data['backend']!r}."
                f"{hint} Other backends belong to transformers' own QuantizedCache."
            )
        key, value = _apply_aliases(*_sides("KVQuantConfig", data), data)
        formats = _layer_formats("KVQuantConfig", {**data, "key": key, "value": value}, {})
        layers = {} if data.get("layers") is None else data["layers"]
        if not isinstance(layers, Mapping):
            raise TypeError(
                f"KVQuantConfig: `layers` must map layer indices to presets or formats, got {type(layers).__name__}."
            )
        by_index = {_layer_index(index): spelled for index, spelled in layers.items()}
        if len(by_index) < len(layers):
            raise ValueError(
                f"KVQuantConfig: `layers` must name a layer once, got {list(layers)}. Keep one of 0 and '0'."
            )
        windows = {name: getattr(formats, name) for name in WINDOWS}
        return cls(
            **{field.name: getattr(formats, field.name) for field in dataclasses.fields(formats)},
            layers={
                index: _layer_from(f"KVQuantConfig: layer {index}", spelled, windows)
                for index, spelled in by_index.items()
            },
            **{name: data[name] for name in _SWITCHES if name in data},
        )

    def to_dict(self) -> dict[str, Any]:
        """A JSON-serialisable form that `from_dict` turns back into an equal config."""
        return {
            "backend": BACKEND,
            **self._to_dict(),
            "layers": {str(index): formats._to_dict() for index, formats in self.layers.items()},
            **{name: getattr(self, name) for name in _SWITCHES},
        }


# What `KVQuantConfig.for_model` calls. The pre-flight runs models, so it is far above this file and registers itself.
_run_preflight: Callable[..., Any] | None = None


def register_preflight(run: Callable[..., Any]) -> None:
    """Make `KVQuantConfig.for_model` use this function."""
    global _run_preflight
    _run_preflight = run


def is_like_backend(name: object) -> bool:
    """Whether a name is a misspelling of our backend. Edit distance is not used, because "quanto" is close too."""
    return isinstance(name, str) and name != BACKEND and "kvquant" in name.casefold()


def _check_keys(where: str, data: Mapping[str, Any], known: Sequence[str], hint: str) -> None:
    for key in data:
        if key not in known:
            raise ValueError(f"{where}: unknown key '{key}'.{did_you_mean(key, known)} {hint}")


def _sides(where: str, data: Mapping[str, Any]) -> tuple[KVFormat, KVFormat]:
    """The formats of keys and values that a dictionary names by `preset`, `key` and `value`."""
    preset = data.get("preset", DEFAULT_PRESET)
    if not isinstance(preset, str) or preset not in PRESETS:
        raise ValueError(
            f"{where}: `preset` must be one of {list(PRESETS)}, got {preset!r}.{did_you_mean(preset, PRESETS)}"
        )
    key, value = PRESETS[preset]
    return (
        _side(where, "key", data["key"]) if "key" in data else key,
        _side(where, "value", data["value"]) if "value" in data else value,
    )


def _side(where: str, name: str, spelled: object) -> KVFormat:
    """The format of one side, from a KVFormat, a storage type's name or a dictionary of KVFormat fields."""
    if isinstance(spelled, KVFormat):
        return spelled
    if isinstance(spelled, Mapping):
        return KVFormat.from_dict(dict(spelled))
    if isinstance(spelled, str) and spelled in _DEFAULT_FORMATS:
        return _DEFAULT_FORMATS[spelled]
    raise ValueError(
        f"{where}: `{name}` must be one of {list(_DEFAULT_FORMATS)} or a dictionary of KVFormat fields, "
        f"got {spelled!r}.{did_you_mean(spelled, _DEFAULT_FORMATS)}"
    )


def _layer_from(where: str, spelled: object, windows: Mapping[str, int]) -> LayerFormats:
    """A layer's formats, from what `layers` may hold. `windows` are the lengths for layers that name none."""
    if isinstance(spelled, LayerFormats):
        return spelled
    if isinstance(spelled, str):
        spelled = {"preset": spelled}
    if not isinstance(spelled, Mapping):
        raise TypeError(f"{where}: `layers` must hold presets' names or dictionaries, got {type(spelled).__name__}.")
    _check_keys(
        where,
        spelled,
        _SIDES,
        "A layer takes 'preset', 'key', 'value', 'transforms', 'sink_length' and 'residual_length'.",
    )
    return _layer_formats(where, spelled, windows)


def _layer_formats(where: str, data: Mapping[str, Any], windows: Mapping[str, int]) -> LayerFormats:
    """Formats from a dictionary with `_SIDES`. `windows` do not apply to a layer that quantises nothing."""
    key, value = _sides(where, data)
    if key.is_quantized or value.is_quantized:
        data = {**windows, **data}
    options = {name: data[name] for name in ("transforms", *WINDOWS) if data.get(name) is not None}
    try:
        return LayerFormats(key, value, **options)
    except (TypeError, ValueError) as error:  # say which part of the dictionary it is about
        raise type(error)(where + str(error).removeprefix("LayerFormats")) from None


def _canonical_transforms(where: str, spelled: Iterable[str] | None, key: KVFormat) -> tuple[str, ...]:
    """Names of transforms in the order of `TRANSFORMS`, each once; `None` gives the defaults of the key format."""
    has_scaled_channels = key.granularity == "channel"
    if spelled is None:
        return () if has_scaled_channels else _DEFAULT_TRANSFORMS[key.storage]
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
    if names and has_scaled_channels:
        # A channel's zero and scale already act as its centre and factor; rotation would spread its outliers to others.
        raise ValueError(
            f"{where}: `transforms` must be empty where every channel of the keys has a scale of its own, got {names}. "
            "Outlier channels do no harm there: leave them out."
        )
    return tuple(name for name in TRANSFORMS if name in names)


def _is_layer_index(index: object) -> TypeGuard[int]:
    # A bound that no model reaches: numbers with thousands of digits do not round-trip through JSON.
    return isinstance(index, int) and not isinstance(index, bool) and 0 <= index < 10**9


def _layer_index(spelled: object) -> int:
    """A layer index from an integer or, since JSON turns integer keys into strings, a string."""
    if isinstance(spelled, str) and re.fullmatch("[0-9]{1,9}", spelled):
        return int(spelled)
    if not _is_layer_index(spelled):
        raise ValueError(f"KVQuantConfig: `layers` must be keyed by layer indices from 0, got {spelled!r}.")
    return spelled


def _apply_aliases(key: KVFormat, value: KVFormat, data: Mapping[str, Any]) -> tuple[KVFormat, KVFormat]:
    """Apply transformers' spellings, `nbits` and `q_group_size`."""
    nbits = data.get("nbits")
    if nbits is not None:
        clash = [key for key in ("preset", "key", "value") if key in data]
        if clash:
            raise ValueError(
                f"KVQuantConfig: `nbits` must not be given together with {clash}, got {nbits!r}. Keep one of them."
            )
        if not isinstance(nbits, int) or nbits not in _NBITS:
            raise ValueError(f"KVQuantConfig: `nbits` must be one of {list(_NBITS)}, got {nbits!r}.")
        key = value = _DEFAULT_FORMATS[_NBITS[nbits]]
    group_size = data.get("q_group_size")
    if group_size is not None:
        if not (key.is_quantized and value.is_quantized):
            raise ValueError(
                "KVQuantConfig: `q_group_size` must be left out where keys or values are not quantised, "
                f"got {group_size}."
            )
        if key.block_size is not None:
            raise ValueError(
                "KVQuantConfig: `q_group_size` must be left out where keys have a scale for every channel, "
                f"got {group_size}. Use preset 'int4-g32' for groups of channels."
            )
        grouped: dict[str, Any] = {"granularity": "group", "group_size": group_size, "clip_ratio": 1.0}
        key, value = (dataclasses.replace(side, **grouped) for side in (key, value))
    return key, value
