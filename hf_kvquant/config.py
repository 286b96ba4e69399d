"""The settings of a cache: `KVQuantConfig`.

A config sets the formats of every layer (`presets.py`), and for the cache, whether it grows or is static. It validates
what users type and knows no tensors. It round-trips through `to_dict`, `from_dict` and JSON, so it can be part of a
`generation_config.json`.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeGuard, cast

from .presets import (
    DEFAULT_PRESET,
    PRESETS,
    SIDES,
    TRANSFORMS,
    WINDOWS,
    Formats,
    LayerFormats,
    check_keys,
    layer_formats,
    layer_from,
    windows_of,
)
from .spec.formats import KVFormat

if TYPE_CHECKING:
    import torch

__all__ = ["BACKEND", "DEFAULT_PRESET", "PRESETS", "TRANSFORMS", "WINDOWS", "KVQuantConfig", "LayerFormats"]

BACKEND = "hf_kvquant"

# What recurrent states may be kept in instead of the model's dtype. Fewer bits, and bfloat16, cost more:
# evals/results/state_drift.json.
STATE_DTYPE = "float16"
_SWITCHES = ("sliding", "static", "max_cache_len", "capture", "offloading", "state_dtype")
_KEYS = ("backend", *SIDES, "layers", *_SWITCHES, "nbits", "q_group_size")


@dataclasses.dataclass(frozen=True)
class KVQuantConfig(Formats):
    """Settings of a model's quantised key-value cache.

    `key`, `value`, `transforms`, `sink_length` and `residual_length` are as in `LayerFormats`, for every layer that
    `layers` does not name. The last two are by default those of preset `int8` with its formats, and 0 with others.

    Attributes:
        layers: Per-layer overrides, by layer index.
        sliding: Whether layers with sliding windows are quantised like the others, in rings. `sink_length` does not
            apply to them: their first tokens leave the window like all others.
        static: Whether buffers are allocated once for `max_cache_len` tokens, so that the decode step can be compiled.
        max_cache_len: Tokens that a static cache holds; implies `static`. `None` uses what `generate` needs, rounded
            up, or the size of the buffers of an earlier call.
        capture: Whether `generate` of a patched model records the decode step as a CUDA graph without compiling it.
            Ready at once; on one GPU, or on the ranks of tensor parallelism. Implies `static`.
        offloading: Whether the codes of a growing cache are kept in CPU memory. Each GPU holds the codes of two layers:
            the one that attends and the next one, which is being fetched.
        state_dtype: Dtype in which the recurrent states of gated delta rules are kept between steps: "float16", or
            `None` for the model's, float32. Sums are the model's either way. Only models with such layers (Qwen3.5,
            Qwen3-Next, OLMo Hybrid) take it.

    Raises:
        TypeError, ValueError: A setting is not valid; the message names it, what was expected and what came.
    """

    key: KVFormat = PRESETS[DEFAULT_PRESET][0]
    value: KVFormat = PRESETS[DEFAULT_PRESET][0]
    sink_length: int = cast(Any, None)
    residual_length: int = cast(Any, None)
    layers: Mapping[int, LayerFormats] = dataclasses.field(default_factory=dict)
    sliding: bool = True
    static: bool = False
    max_cache_len: int | None = None
    capture: bool = False
    offloading: bool = False
    state_dtype: str | None = None

    def __post_init__(self) -> None:
        windows = windows_of(None, self.key, self.value)
        for name in WINDOWS:
            if getattr(self, name) is None:
                object.__setattr__(self, name, windows.get(name, 0))
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
        if self.state_dtype not in (None, STATE_DTYPE):
            raise ValueError(f"KVQuantConfig: `state_dtype` must be '{STATE_DTYPE}' or None, got {self.state_dtype!r}.")
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

    @property
    def torch_state_dtype(self) -> torch.dtype | None:
        """`state_dtype` as PyTorch's."""
        import torch

        return None if self.state_dtype is None else torch.float16

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
            **options: Of `run_preflight`: `tokenizer`, `texts`, `presets`, `max_kld`, `bits`, `measure`, `progress`.
                With `bits=4.5`, the best presets that take at most 4.5 bits per stored number are picked.

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
    def resolve(cls, preset_or_config: str | KVQuantConfig | Mapping[str, Any], **options: Any) -> KVQuantConfig:
        """Make a config from a preset's name, with options, or a dictionary; a config is returned unchanged."""
        if options and not isinstance(preset_or_config, str):
            raise TypeError(
                f"KVQuantConfig: options such as `{next(iter(options))}` must come with a preset's name, got "
                f"{type(preset_or_config).__name__}. Put them in there."
            )
        if isinstance(preset_or_config, KVQuantConfig):
            return preset_or_config
        if isinstance(preset_or_config, str):
            return cls.from_preset(preset_or_config, **options)
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
        - `sink_length`, `residual_length`: how many of the first and of the newest tokens stay dense; by default the
          preset's, if it has any; if none is named, those of `int8` with its formats, and 0 with others.
        - `layers`: from layer index to a preset's name or a dictionary with `preset`, `key`, `value`, `transforms`,
          `sink_length`, `residual_length`. If the layer is quantised, the last two default to the values given for all
          layers, else to its preset's.
        - `sliding`, `static`, `max_cache_len`, `capture`, `offloading`, `state_dtype`: as the attributes.
        - `backend`: must be ours; ignored.
        - `nbits` (8, 4, 3 or 2): transformers' spelling of presets `int8`, `int4` and `int2`, or of 3 bits.
        - `q_group_size`: its spelling of channels per scale, for both sides.

        Raises:
            TypeError: `data` is not a dictionary, or a value is of the wrong type.
            ValueError: A key is unknown (the message suggests the nearest known one) or a value has no meaning.
        """
        if not isinstance(data, Mapping):
            raise TypeError(
                f"KVQuantConfig: `data` must be a dictionary, got {data!r}. "
                "KVQuantConfig.from_preset takes a preset's name."
            )
        check_keys("KVQuantConfig", data, _KEYS, f"Known keys: {list(_KEYS)}.")
        if data.get("backend", BACKEND) != BACKEND:
            hint = f" Did you mean '{BACKEND}'?" if is_like_backend(data["backend"]) else ""
            raise ValueError(
                f"KVQuantConfig: `backend` must be '{BACKEND}', got {data['backend']!r}."
                f"{hint} Other backends belong to transformers' own QuantizedCache."
            )
        formats = layer_formats("KVQuantConfig", data, {})
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
        windows = {name: data[name] for name in WINDOWS if data.get(name) is not None}
        return cls(
            **formats.settings(),
            layers={
                index: layer_from(f"KVQuantConfig: layer {index}", spelled, windows)
                for index, spelled in by_index.items()
            },
            **{name: data[name] for name in _SWITCHES if name in data},
        )

    def to_dict(self) -> dict[str, Any]:
        """A JSON-serialisable form that `from_dict` turns back into an equal config."""
        return {
            "backend": BACKEND,
            **self.sides_to_dict(),
            "layers": {str(index): formats.sides_to_dict() for index, formats in self.layers.items()},
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
