"""`KVQuantConfig`: presets, aliases, round trips (JSON, `GenerationConfig`), and every refusal word by word."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest
from transformers import GenerationConfig

from hf_kvquant import PRESETS, KVFormat, KVQuantConfig, LayerFormats
from hf_kvquant.config import DEFAULT_PRESET, TRANSFORMS
from hf_kvquant.presets import preset_formats
from hf_kvquant.spec.codes import INTEGER_BITS, STORAGE_IDS

INT8 = KVFormat("int8")
# Of keys, and of values, in which clipping does harm.
INT4, INT4_VALUE = KVFormat("int4", symmetric=False, clip_ratio=15 / 16), KVFormat("int4", symmetric=False)
INT2, INT2_VALUE = (KVFormat("int2", symmetric=False, clip_ratio=ratio) for ratio in (3 / 4, 7 / 8))
INT4_G32 = KVFormat("int4", "group", 32, symmetric=False)
INT4_CHANNEL = KVFormat("int4", "channel", symmetric=False, block_size=128)
FP8 = KVFormat("fp8")
NONE = KVFormat("none")

EXAMPLES = {
    **{preset: {"preset": preset} for preset in PRESETS},
    "default": {},
    "aliases": {"backend": "hf_kvquant", "nbits": 4, "q_group_size": 64, "residual_length": 128},
    "sides": {"key": "int8", "value": {"storage": "int4", "granularity": "group", "group_size": 16}},
    "layers": {"preset": "int4-token", "layers": {3: "int8", 0: {"preset": "k8v4", "value": "none"}}},
    "static": {"preset": "fp8", "static": True},
    "transforms": {
        "preset": "int4-token",
        "transforms": [],
        "layers": {2: {"preset": "int8", "transforms": ["rotate"]}},
    },
    "max_cache_len": {"preset": "int4-g32", "max_cache_len": 4096},
}


# --- what is accepted -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("preset", "key", "value", "windows"),
    [
        ("none", NONE, NONE, (0, 0)),
        ("int8", INT8, INT8, (4, 12)),
        ("k8v4", INT8, INT4_VALUE, (4, 28)),
        ("int4", INT4_CHANNEL, INT4_VALUE, (4, 28)),
        ("int4-channel", INT4_CHANNEL, INT4_VALUE, (0, 0)),
        ("int4-token", INT4, INT4_VALUE, (0, 0)),
        ("int4-g32", INT4_G32, INT4_G32, (0, 0)),
        ("k4v2", INT4, INT2_VALUE, (4, 128)),
        ("int2", INT2, INT2_VALUE, (4, 128)),
        ("fp8", FP8, FP8, (0, 0)),
    ],
)
def test_presets(preset: str, key: KVFormat, value: KVFormat, windows: tuple[int, int]) -> None:
    config = KVQuantConfig.from_preset(preset)
    assert (config.key, config.value) == (key, value) == PRESETS[preset]
    formats = LayerFormats(key, value, sink_length=windows[0], residual_length=windows[1])
    assert config.formats(0) == config.formats(99) == formats == preset_formats(preset)
    assert config == KVQuantConfig.resolve(preset) == KVQuantConfig.resolve({"preset": preset})


def test_presets_are_all_tested() -> None:
    fours = ["int4", "int4-channel", "int4-token", "int4-g32"]
    assert list(PRESETS) == ["none", "int8", "k8v4", *fours, "k4v2", "int2", "fp8"]


@pytest.mark.parametrize(
    ("data", "windows"),
    [
        ({"preset": "int2"}, {0: (4, 128), 1: (0, 0), 2: (4, 128), 3: (2, 128)}),
        ({"preset": "int2", "sink_length": 0}, {0: (0, 128), 1: (0, 0), 2: (0, 128), 3: (2, 128)}),
        ({"preset": "int2", "residual_length": 0}, {0: (4, 0), 1: (0, 0), 2: (4, 0), 3: (2, 0)}),
        ({"preset": "int8"}, {0: (4, 12), 1: (0, 0), 2: (4, 128), 3: (2, 128)}),
        ({"preset": "k8v4"}, {0: (4, 28), 1: (0, 0), 2: (4, 128), 3: (2, 128)}),
        ({"preset": "k8v4", "q_group_size": 32}, {0: (4, 28), 1: (0, 0), 2: (4, 128), 3: (2, 128)}),
        ({"preset": "k8v4", "sink_length": 0, "residual_length": 0}, {0: (0, 0), 1: (0, 0), 2: (0, 0), 3: (2, 0)}),
        ({"nbits": 4}, {0: (4, 28), 1: (0, 0), 2: (4, 128), 3: (2, 128)}),
        ({"nbits": 2, "sink_length": 1}, {0: (1, 128), 1: (1, 0), 2: (1, 128), 3: (2, 128)}),
        ({"nbits": 4, "q_group_size": 32}, {0: (0, 0), 1: (0, 0), 2: (4, 128), 3: (2, 128)}),
        ({"preset": "int8", "residual_length": 9}, {0: (4, 9), 1: (0, 9), 2: (4, 9), 3: (2, 9)}),
        ({"preset": "int8", "sink_length": 0, "residual_length": 0}, {0: (0, 0), 1: (0, 0), 2: (0, 0), 3: (2, 0)}),
        ({"preset": "int8", "value": "int4"}, {0: (4, 12), 1: (0, 0), 2: (4, 128), 3: (2, 128)}),
        ({"preset": "int8", "q_group_size": 64}, {0: (4, 12), 1: (0, 0), 2: (4, 128), 3: (2, 128)}),
    ],
)
def test_windows_of_presets(data: dict[str, Any], windows: dict[int, tuple[int, int]]) -> None:
    """What is given for a layer goes before what is given for all, and this before a layer's preset."""
    layers = {1: "int4-token", 2: "k4v2", 3: {"preset": "int2", "sink_length": 2}}
    config = KVQuantConfig.from_dict({**data, "layers": layers})
    formats = {index: config.formats(index) for index in windows}
    assert {i: (each.sink_length, each.residual_length) for i, each in formats.items()} == windows
    assert KVQuantConfig.from_dict(config.to_dict()) == config


def test_the_default_is_the_default_preset() -> None:
    assert KVQuantConfig() == KVQuantConfig.from_dict({}) == KVQuantConfig.from_preset(DEFAULT_PRESET)


@pytest.mark.parametrize(
    ("data", "windows"),
    [
        ({}, (4, 12)),
        ({"nbits": 8}, (4, 12)),
        ({"nbits": None}, (4, 12)),
        ({"key": "int8", "value": INT8}, (4, 12)),
        ({"transforms": []}, (4, 12)),
        ({"sink_length": 0}, (0, 12)),
        ({"residual_length": 0}, (4, 0)),
        ({"value": "int4"}, (0, 0)),
        ({"value": "int4", "residual_length": 9}, (0, 9)),
        ({"nbits": 3}, (0, 0)),
        ({"q_group_size": 64}, (0, 0)),
        ({"key": INT4_CHANNEL, "value": INT4_VALUE}, (0, 0)),  # int4's
        ({"key": "none", "value": "none"}, (0, 0)),
    ],
    ids=str,
)
def test_windows_without_a_preset(data: dict[str, Any], windows: tuple[int, int]) -> None:
    """Those of the default preset belong to its formats: whoever gives others has asked for nothing else."""
    config = KVQuantConfig.from_dict(data)
    assert (config.sink_length, config.residual_length) == windows
    assert KVQuantConfig.from_dict(config.to_dict()) == config
    if "nbits" not in data and "q_group_size" not in data:  # spelled for all layers only
        layer = KVQuantConfig.from_dict({"preset": "fp8", "layers": {1: data}}).formats(1)
        assert (layer.sink_length, layer.residual_length) == windows


@pytest.mark.parametrize(
    ("options", "windows"),
    [
        ({}, (4, 12)),
        ({"key": INT8, "value": INT8}, (4, 12)),
        ({"static": True}, (4, 12)),
        ({"sink_length": 0}, (0, 12)),
        ({"residual_length": 0}, (4, 0)),
        ({"sink_length": 0, "residual_length": 0}, (0, 0)),
        ({"value": INT4_VALUE}, (0, 0)),
        ({"value": INT4_VALUE, "sink_length": 2}, (2, 0)),
        ({"key": INT4_CHANNEL, "value": INT4_VALUE}, (0, 0)),
        ({"key": FP8, "value": FP8}, (0, 0)),
        ({"key": NONE, "value": NONE}, (0, 0)),
    ],
    ids=str,
)
def test_windows_of_a_config_made_by_hand(options: dict[str, Any], windows: tuple[int, int]) -> None:
    config = KVQuantConfig(**options)
    assert (config.sink_length, config.residual_length) == windows
    assert KVQuantConfig.from_dict(config.to_dict()) == config


def test_windows_of_a_layer_made_by_hand() -> None:
    layer = KVQuantConfig(layers={1: LayerFormats(INT8, INT8)}).formats(1)
    assert (layer.sink_length, layer.residual_length) == (0, 0)


@pytest.mark.parametrize(
    ("data", "key", "value"),
    [
        ({"nbits": 8}, INT8, INT8),
        ({"nbits": 4, "sink_length": 0, "residual_length": 0}, INT4_CHANNEL, INT4_VALUE),
        ({"nbits": 3}, *(KVFormat("int3", symmetric=False, clip_ratio=ratio) for ratio in (7 / 8, 1))),
        ({"nbits": None}, INT8, INT8),
        ({"nbits": 4, "q_group_size": 32}, INT4_G32, INT4_G32),
        ({"q_group_size": 64}, KVFormat("int8", "group", 64), KVFormat("int8", "group", 64)),
        ({"preset": "int4-g32", "q_group_size": None}, INT4_G32, INT4_G32),
        (
            {"preset": "int8", "value": "int4", "q_group_size": 32, "sink_length": 0, "residual_length": 0},
            KVFormat("int8", "group", 32),
            INT4_G32,
        ),
        ({"backend": "hf_kvquant"}, INT8, INT8),
        ({"value": "int4"}, INT8, INT4_VALUE),
        ({"preset": "int4-token", "key": "fp8"}, FP8, INT4_VALUE),
        ({"key": FP8, "value": {"storage": "int4"}}, FP8, KVFormat("int4")),
        ({"layers": None}, INT8, INT8),
    ],
    ids=str,
)
def test_spellings(data: dict[str, Any], key: KVFormat, value: KVFormat) -> None:
    assert KVQuantConfig.from_dict(data) == KVQuantConfig(key, value)


def test_layers() -> None:
    config = KVQuantConfig.from_preset("int4-token", layers={"11": "int8", 2: {"value": "fp8"}, 0: {"preset": "none"}})
    assert list(config.layers) == [0, 2, 11]
    assert config.formats(0) == LayerFormats(NONE, NONE)
    assert config.formats(1) == LayerFormats(INT4, INT4_VALUE)
    assert config.formats(2) == LayerFormats(INT8, FP8), "a layer starts from the default preset"
    assert config.formats(11) == LayerFormats(INT8, INT8, sink_length=4, residual_length=12)


def test_layers_may_be_layer_formats() -> None:
    formats = LayerFormats(FP8, INT4)
    assert KVQuantConfig.from_dict({"layers": {1: formats}}).formats(1) is formats


@pytest.mark.parametrize(
    ("data", "transforms"),
    [
        ("none", ()),
        ("int8", TRANSFORMS),
        ("k8v4", TRANSFORMS),
        ("int4-token", TRANSFORMS),
        ("int4-g32", TRANSFORMS),
        ("int4-channel", ("smooth", "rotate")),
        ({"preset": "int4-channel", "key": "int4"}, TRANSFORMS),
        ("fp8", ()),
        ({}, TRANSFORMS),
        ({"nbits": 4}, ("smooth", "rotate")),
        ({"preset": "int4-token", "key": "int8"}, TRANSFORMS),
        ({"preset": "int4-token", "key": "none"}, ()),
        ({"preset": "fp8", "key": "int4"}, TRANSFORMS),
        ({"preset": "int4-token", "transforms": None}, TRANSFORMS),
        ({"preset": "int4-token", "transforms": []}, ()),
        ({"preset": "fp8", "transforms": ("rotate", "center", "rotate")}, ("center", "rotate")),
        ({"nbits": 4, "q_group_size": 32, "transforms": ["smooth"]}, ("smooth",)),
    ],
    ids=str,
)
def test_transforms(data: Any, transforms: tuple[str, ...]) -> None:
    config = KVQuantConfig.resolve(data)
    assert config.transforms == config.formats(0).transforms == transforms
    assert KVQuantConfig.from_dict(config.to_dict()).transforms == transforms


def test_layers_have_transforms_of_their_own() -> None:
    layers = {0: "int8", 1: {"preset": "int4-token", "transforms": ["rotate"]}, 2: LayerFormats(INT4, INT4, ())}
    config = KVQuantConfig.from_preset("int4-token", transforms=["center"], layers=layers)
    assert [config.formats(index).transforms for index in range(4)] == [TRANSFORMS, ("rotate",), (), ("center",)]


def test_max_cache_len_implies_static() -> None:
    assert KVQuantConfig(max_cache_len=128).static
    assert not KVQuantConfig().static
    assert KVQuantConfig(static=True).max_cache_len is None


def test_capture_implies_static() -> None:
    assert KVQuantConfig(capture=True).static
    assert KVQuantConfig.from_dict(KVQuantConfig.from_preset("int4-token", capture=True).to_dict()).capture


def test_resolve_passes_configs_through() -> None:
    config = KVQuantConfig.from_preset("int4-token", static=True)
    assert KVQuantConfig.resolve(config) is config


def test_layer_names() -> None:
    assert LayerFormats(INT8, INT8).describe() == "int8-head-symmetric"
    assert LayerFormats(INT8, INT4).describe() == "key int8-head-symmetric, value int4-head-asymmetric-clip0.9375"


def test_a_config_keeps_its_own_layers() -> None:
    layers = {0: LayerFormats(INT8, INT8)}
    config = KVQuantConfig(layers=layers)
    layers[1] = LayerFormats(NONE, NONE)
    assert list(config.layers) == [0]
    with pytest.raises(AttributeError):
        config.static = True  # type: ignore[misc]


# --- round trips ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", EXAMPLES)
def test_json_round_trip(name: str) -> None:
    config = KVQuantConfig.from_dict(EXAMPLES[name])
    data = config.to_dict()
    assert KVQuantConfig.from_dict(data) == config
    assert KVQuantConfig.from_dict(json.loads(json.dumps(data))) == config
    assert json.loads(json.dumps(data)) == data, "to_dict must hold nothing that JSON changes"


@pytest.mark.parametrize("name", EXAMPLES)
def test_generation_config_round_trip(name: str, tmp_path: pathlib.Path) -> None:
    config = KVQuantConfig.from_dict(EXAMPLES[name])
    saved = GenerationConfig(cache_implementation="quantized", cache_config=config.to_dict())
    saved.save_pretrained(tmp_path)
    loaded = GenerationConfig.from_pretrained(tmp_path)
    assert loaded.cache_implementation == "quantized"
    assert loaded.cache_config["backend"] == "hf_kvquant"
    assert KVQuantConfig.from_dict(loaded.cache_config) == config


def test_dictionary_of_a_config() -> None:
    int8 = {
        "storage": "int8",
        "granularity": "head",
        "group_size": None,
        "symmetric": True,
        "block_size": None,
        "clip_ratio": 1.0,
    }
    assert KVQuantConfig.from_preset("int8", layers={2: "fp8"}, max_cache_len=64).to_dict() == {
        "backend": "hf_kvquant",
        "key": int8,
        "value": int8,
        "transforms": ["center", "smooth", "rotate"],
        "sink_length": 4,
        "residual_length": 12,
        "layers": {
            "2": {
                "key": int8 | {"storage": "fp8"},
                "value": int8 | {"storage": "fp8"},
                "transforms": [],
                "sink_length": 0,
                "residual_length": 0,
            }
        },
        "sliding": True,
        "static": True,
        "max_cache_len": 64,
        "capture": False,
        "offloading": False,
        "state_dtype": None,
    }


# --- refusals ---------------------------------------------------------------------------------------------------------

KNOWN = (
    "['backend', 'preset', 'key', 'value', 'transforms', 'sink_length', 'residual_length', 'layers', 'sliding', "
    "'static', 'max_cache_len', 'capture', 'offloading', 'state_dtype', 'nbits', 'q_group_size']"
)
PRESET_NAMES, STORAGES, NBITS = list(PRESETS), list(STORAGE_IDS), list(INTEGER_BITS.values())


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        (
            {"nbit": 4},
            ValueError,
            f"KVQuantConfig: unknown key 'nbit'. Did you mean 'nbits'? Known keys: {KNOWN}.",
        ),
        (
            {"wholly": 4},
            ValueError,
            f"KVQuantConfig: unknown key 'wholly'. Known keys: {KNOWN}.",
        ),
        (
            {"backend": "quanto"},
            ValueError,
            "KVQuantConfig: `backend` must be 'hf_kvquant', got 'quanto'. "
            "Other backends belong to transformers' own QuantizedCache.",
        ),
        (
            {"backend": "hf-kvquant"},
            ValueError,
            "KVQuantConfig: `backend` must be 'hf_kvquant', got 'hf-kvquant'. Did you mean 'hf_kvquant'? "
            "Other backends belong to transformers' own QuantizedCache.",
        ),
        (
            ["preset"],
            TypeError,
            "KVQuantConfig: `data` must be a dictionary, got ['preset']. KVQuantConfig.from_preset takes a preset's "
            "name.",
        ),
        (
            {"preset": "int4-g3"},
            ValueError,
            f"KVQuantConfig: `preset` must be one of {PRESET_NAMES}, got 'int4-g3'. Did you mean 'int4-g32'?",
        ),
        (
            {"preset": 8},
            ValueError,
            f"KVQuantConfig: `preset` must be one of {PRESET_NAMES}, got 8.",
        ),
        (
            {"key": "fp88"},
            ValueError,
            f"KVQuantConfig: `key` must be one of {STORAGES} or a dictionary of KVFormat fields, got 'fp88'. "
            "Did you mean 'fp8'?",
        ),
        (
            {"value": 4},
            ValueError,
            f"KVQuantConfig: `value` must be one of {STORAGES} or a dictionary of KVFormat fields, got 4.",
        ),
        (
            {"key": {"storage": "int8", "granularity": "group", "group_size": 7}},
            ValueError,
            "KVFormat: `group_size` must be a positive multiple of 8, got 7. Common sizes are 32 and 64.",
        ),
        (
            {"layers": ["int8"]},
            TypeError,
            "KVQuantConfig: `layers` must map layer indices to presets or formats, got list.",
        ),
        (
            {"layers": {0: 8}},
            TypeError,
            "KVQuantConfig: layer 0: `layers` must hold presets' names or dictionaries, got int.",
        ),
        (
            {"layers": {"first": "int8"}},
            ValueError,
            "KVQuantConfig: `layers` must be keyed by layer indices from 0, got 'first'.",
        ),
        (
            {"layers": {-1: "int8"}},
            ValueError,
            "KVQuantConfig: `layers` must be keyed by layer indices from 0, got -1.",
        ),
        (
            {"layers": {"-1": "int8"}},
            ValueError,
            "KVQuantConfig: `layers` must be keyed by layer indices from 0, got '-1'.",
        ),
        (
            {"layers": {"²": "int8"}},  # a digit, but no number
            ValueError,
            "KVQuantConfig: `layers` must be keyed by layer indices from 0, got '²'.",
        ),
        (
            {"layers": {10**9: "int8"}},
            ValueError,
            "KVQuantConfig: `layers` must be keyed by layer indices from 0, got 1000000000.",
        ),
        (
            {"layers": {0: "int8", "0": "int4-token"}},  # the first would be forgotten
            ValueError,
            "KVQuantConfig: `layers` must name a layer once, got [0, '0']. Keep one of 0 and '0'.",
        ),
        (
            {"layers": 0},
            TypeError,
            "KVQuantConfig: `layers` must map layer indices to presets or formats, got int.",
        ),
        (
            {"layers": {True: "int8"}},
            ValueError,
            "KVQuantConfig: `layers` must be keyed by layer indices from 0, got True.",
        ),
        (
            {"layers": {5: "in8"}},
            ValueError,
            f"KVQuantConfig: layer 5: `preset` must be one of {PRESET_NAMES}, got 'in8'. Did you mean 'int8'?",
        ),
        (
            {"transforms": ["rotate", "centre"]},
            ValueError,
            "KVQuantConfig: `transforms` must hold names out of ['center', 'smooth', 'rotate'], got 'centre'. "
            "Did you mean 'center'?",
        ),
        (
            {"transforms": "rotate"},
            TypeError,
            "KVQuantConfig: `transforms` must be a list of names out of ['center', 'smooth', 'rotate'], got 'rotate'. "
            "An empty list means none.",
        ),
        (
            {"preset": "int4-token", "key": "none", "transforms": ["rotate"]},
            ValueError,
            "KVQuantConfig: `transforms` must be empty where keys are not quantised, got ['rotate']. "
            "Transforms only reduce quantisation errors: leave them out.",
        ),
        (
            {"layers": {5: {"transforms": [4]}}},
            ValueError,
            "KVQuantConfig: layer 5: `transforms` must hold names out of ['center', 'smooth', 'rotate'], got 4.",
        ),
        (
            {"layers": {5: {"keys": "int8"}}},
            ValueError,
            "KVQuantConfig: layer 5: unknown key 'keys'. Did you mean 'key'? "
            "A layer takes 'preset', 'key', 'value', 'transforms', 'sink_length' and 'residual_length'.",
        ),
        (
            {"layers": {5: {"value": "int"}}},
            ValueError,
            f"KVQuantConfig: layer 5: `value` must be one of {STORAGES} or a dictionary of KVFormat fields, "
            "got 'int'. Did you mean 'int8'?",
        ),
        (
            {"nbits": [4]},
            ValueError,
            f"KVQuantConfig: `nbits` must be one of {NBITS}, got [4].",
        ),
        (
            {"nbits": 4, "preset": "int8", "value": "int8"},
            ValueError,
            "KVQuantConfig: `nbits` must not be given together with ['preset', 'value'], got 4. Keep one of them.",
        ),
        (
            {"nbits": 5},
            ValueError,
            f"KVQuantConfig: `nbits` must be one of {NBITS}, got 5.",
        ),
        (
            {"preset": "none", "q_group_size": 64},
            ValueError,
            "KVQuantConfig: `q_group_size` must be left out where keys or values are not quantised, got 64.",
        ),
        (
            {"value": "none", "q_group_size": 64},
            ValueError,
            "KVQuantConfig: `q_group_size` must be left out where keys or values are not quantised, got 64.",
        ),
        (
            {"q_group_size": 20},
            ValueError,
            "KVFormat: `group_size` must be a positive multiple of 8, got 20. Common sizes are 32 and 64.",
        ),
        (
            {"static": "yes"},
            TypeError,
            "KVQuantConfig: `static` must be True or False, got 'yes'.",
        ),
        (
            {"capture": 1},
            TypeError,
            "KVQuantConfig: `capture` must be True or False, got 1.",
        ),
        (
            {"max_cache_len": 4096.0},
            TypeError,
            "KVQuantConfig: `max_cache_len` must be an int or None, got 4096.0.",
        ),
        (
            {"max_cache_len": True},
            TypeError,
            "KVQuantConfig: `max_cache_len` must be an int or None, got True.",
        ),
        (
            {"max_cache_len": 0},
            ValueError,
            "KVQuantConfig: `max_cache_len` must be positive, got 0. "
            "Give the longest sequence in tokens, prompt included.",
        ),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_refuses(data: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error) as caught:
        KVQuantConfig.from_dict(data)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        (
            {"key": "int8"},
            TypeError,
            "KVQuantConfig: `key` must be a KVFormat, got 'int8'. KVQuantConfig.from_preset takes a preset's name, "
            "from_dict names of formats.",
        ),
        (
            {"value": None},
            TypeError,
            "KVQuantConfig: `value` must be a KVFormat, got None. KVQuantConfig.from_preset takes a preset's name, "
            "from_dict names of formats.",
        ),
        (
            {"layers": {"0": LayerFormats(INT8, INT8)}},
            ValueError,
            "KVQuantConfig: `layers` must be keyed by layer indices from 0, got '0'.",
        ),
        (
            {"layers": {0: "int8"}},
            TypeError,
            "KVQuantConfig: `layers[0]` must be LayerFormats, got 'int8'. KVQuantConfig.from_preset and from_dict take "
            "presets' names there.",
        ),
        (
            {"layers": [INT8]},
            TypeError,
            "KVQuantConfig: `layers` must map layer indices to LayerFormats, got list.",
        ),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_constructor_refuses(fields: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error) as caught:
        KVQuantConfig(**fields)
    assert str(caught.value) == message


@pytest.mark.parametrize("sides", [("int8", INT8), (INT8, None)], ids=str)
def test_the_formats_of_a_layer_are_formats(sides: Any) -> None:
    name, got = ("key", "'int8'") if sides[0] == "int8" else ("value", "None")
    with pytest.raises(TypeError) as caught:
        LayerFormats(*sides)
    assert str(caught.value) == (
        f"LayerFormats: `{name}` must be a KVFormat, got {got}. KVQuantConfig.from_preset takes a preset's name, "
        "from_dict names of formats."
    )


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("INT4", "int4"),
        ("Int8", "int8"),
        ("int-4", "int4"),
        ("int4_g32", "int4-g32"),
        ("int4-g64", "int4-g32"),
        ("INT4_CHANNEL", "int4-channel"),
        ("k8_v4", "k8v4"),
        ("K8V4", "k8v4"),
        ("FP-8", "fp8"),
        ("None", "none"),
    ],
)
def test_near_misses_of_presets_get_a_suggestion(typed: str, meant: str) -> None:
    for where, refused in (("", lambda: KVQuantConfig.from_preset(typed)), ("layer 0: ", lambda: layer_0(typed))):
        with pytest.raises(ValueError) as caught:
            refused()
        assert str(caught.value) == (
            f"KVQuantConfig: {where}`preset` must be one of {PRESET_NAMES}, got '{typed}'. Did you mean '{meant}'?"
        )


def layer_0(preset: str) -> KVQuantConfig:
    return KVQuantConfig.from_preset("int8", layers={0: preset})


def test_what_is_no_text_gets_no_suggestion() -> None:
    with pytest.raises(ValueError, match=r"got None\.$"):
        KVQuantConfig.from_preset(None)  # type: ignore[arg-type]


def test_resolve_refuses() -> None:
    with pytest.raises(TypeError) as caught:
        KVQuantConfig.resolve(4)  # type: ignore[arg-type]
    assert str(caught.value) == (
        "KVQuantConfig: `preset_or_config` must be a preset's name, a dictionary or a KVQuantConfig, got int. "
        f"Presets: {PRESET_NAMES}."
    )


def test_options_are_those_of_a_preset() -> None:
    expected = KVQuantConfig.from_preset("int4", residual_length=64, static=True)
    assert KVQuantConfig.resolve("int4", residual_length=64, static=True) == expected
    for config, kind in (({"preset": "int4"}, "dict"), (expected, "KVQuantConfig")):
        with pytest.raises(TypeError) as caught:
            KVQuantConfig.resolve(config, residual_length=64)
        assert str(caught.value) == (
            "KVQuantConfig: options such as `residual_length` must come with a preset's name, "
            f"got {kind}. Put them in there."
        )


def test_from_preset_refuses_unknown_options() -> None:
    with pytest.raises(ValueError) as caught:
        KVQuantConfig.from_preset("int4-token", max_cache_length=64)
    assert str(caught.value) == (
        f"KVQuantConfig: unknown key 'max_cache_length'. Did you mean 'max_cache_len'? Known keys: {KNOWN}."
    )
