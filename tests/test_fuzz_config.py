"""Configs as nobody should type them: an error that names the key, or a config that comes back from its own JSON."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import pytest
import torch
from cases import times
from hypothesis import given
from test_fuzz_ops import DICE

from hf_kvquant import PRESETS, KVFormat, KVQuantConfig
from hf_kvquant.config import LayerFormats

NAMED = re.compile(r"^(KVQuantConfig|KVFormat|LayerFormats)(: layer [^:]*)?: (`[\w\[\]]+` must |unknown key )")
NAN = float("nan")
ODD: tuple[Any, ...] = (
    *(
        None,
        True,
        False,
        0,
        1,
        2,
        3,
        4,
        8,
        32,
        64,
        128,
        -1,
        -8,
        2**31,
        2**63,
        10**400,
        0.0,
        -0.5,
        0.5,
        1.0,
        8.0,
        1e-320,
    ),
    *(
        NAN,
        float("inf"),
        -float("inf"),
        "",
        "x",
        "int8",
        "int4-token",
        "fp8",
        "none",
        "k8v4",
        "int4-channel",
        "head",
        "group",
    ),
    *("rotate", "center", "8", "²", b"int8", "x" * 1000, [], ["rotate"], ["rotate", 3], [[]], (), {}, {"a": 1}),
    *(
        {3: 4},
        {"storage": "int8"},
        {"storage": []},
        {"rotate"},
        object,
        object(),
        torch.zeros(2),
        torch.int8,
        range(2),
        1j,
    ),
    *(KVFormat("int4"), LayerFormats(KVFormat("int8"), KVFormat("none"))),
)
TOP = ["backend", "preset", "key", "value", "transforms", "sink_length", "residual_length", "layers", "static"]
TOP += ["max_cache_len", "capture", "nbits", "q_group_size"]
SIDE = ["storage", "granularity", "group_size", "symmetric", "block_size", "clip_ratio"]
GOOD: dict[str, list[Any]] = {
    "backend": ["hf_kvquant"],
    "preset": list(PRESETS),
    "transforms": [None, [], ["rotate"], ["center", "smooth"]],
    "sink_length": [0, 4],
    "residual_length": [0, 128],
    "static": [True, False],
    "max_cache_len": [None, 100],
    "capture": [True, False],
    "nbits": [4, 8],
    "q_group_size": [32, 64],
    "storage": ["none", "int8", "int4", "fp8"],
    "granularity": ["tensor", "token", "head", "group", "channel"],
    "group_size": [None, 32],
    "symmetric": [True, False],
    "block_size": [None, 128],
    "clip_ratio": [1.0, 0.9],
}


def drawn(dice: random.Random, key: Any) -> Any:
    """A value for a key: as it should be, most of the time."""
    if dice.random() < 0.15:
        return dice.choice(ODD)
    if key in ("key", "value"):
        return dice.choice(["int8", "int4-token", "fp8", "none", drawn_dict(dice, SIDE, ("storage",))])
    if key == "layers":
        return {dice.choice((0, 1, "2", 3, *ODD_KEYS)): drawn_layer(dice) for _ in range(dice.randrange(3))}
    return dice.choice(GOOD.get(key, list(ODD)))


ODD_KEYS = (-1, "-1", "x", "", None, True, 0.5, NAN, "²", "1_0", 10**400, (), b"1")


def drawn_layer(dice: random.Random) -> Any:
    return dice.choice([*PRESETS, drawn_dict(dice, TOP[1:7])])


def drawn_dict(dice: random.Random, keys: list[str], always: tuple[str, ...] = ()) -> dict[Any, Any]:
    chosen: list[Any] = [*always, *dice.sample(keys, dice.randrange(min(4, len(keys)) + 1))]
    if dice.random() < 0.05:
        chosen.append(dice.choice(("nbit", "x" * 1000, "", *ODD_KEYS)))
    return {key: drawn(dice, key) for key in chosen}


@times(1500)
@given(dice=DICE)
def test_random_dictionaries(dice: random.Random) -> None:
    check(dice.choice(ODD) if dice.random() < 0.02 else drawn_dict(dice, TOP))


@pytest.mark.parametrize("key", [*TOP, *SIDE])
def test_every_value_for_every_key(key: str) -> None:
    for value in ODD:
        if key in SIDE:
            check({"key": {"storage": "int8", key: value}})
            check({"value": {"storage": "int4", "granularity": "group", "group_size": 32, key: value}})
        else:
            check({key: value})
            check({"layers": {0: {key: value}}})


def check(spelled: Any) -> None:
    try:
        config = KVQuantConfig.resolve(spelled)
    except (TypeError, ValueError) as error:
        assert NAMED.match(str(error)), f"{spelled!r}: {error}"
        assert len(str(error)) < 5000, "an error that nobody reads"
        return
    again = KVQuantConfig.from_dict(json.loads(json.dumps(config.to_dict(), allow_nan=False)))
    assert again == config, f"{spelled!r}: {config} comes back as {again}"
    for formats in (config.formats(0), config.formats(1)):
        formats.describe()
        for side in (formats.key, formats.value):
            assert side == KVFormat.from_dict(side.to_dict())
