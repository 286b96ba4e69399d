"""Files that are nearly a cache: the very same cache, or an error that names the file, before memory is taken.

Bytes, the header of safetensors and the facts are changed at random, also by somebody who knows how to hash; what
single changes must be refused for is in `test_cache_file.py`. `HF_KVQUANT_FUZZ` multiplies how many are tried.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import times
from hypothesis import given
from safetensors.torch import save
from test_cache_file import CONFIGS, contents, leaves, saved, small_model
from test_fuzz_ops import DICE
from torch import Tensor

from hf_kvquant import KVQuantCache
from hf_kvquant.cache import file as cache_file
from hf_kvquant.cache import saved_layer
from hf_kvquant.models.hashes import content_hash
from hf_kvquant.storage.layer_store import LayerStore

NAMES = ["int8", "windows", "int4-channel", "layers"]
# All that a load may ask for here, some times what these caches take.
MEMORY = 2**22
ODD: tuple[Any, ...] = (
    *(
        None,
        True,
        False,
        "",
        "x",
        "int8",
        "F32",
        "U8",
        [],
        [1],
        {},
        {"a": 1},
        0.5,
        1e308,
        -1,
        0,
        1,
        2,
        3,
        8,
        11,
        12,
        13,
    ),
    *(63, 64, 65, 128, 192, 256, 2**20, 2**31 - 64, 2**31 - 1, 2**31, 2**32, 2**53, 2**63 - 1, 2**64, 10**400),
    *([3, 2, 12, 64], [3, 2, 12, -64], [2**62, 4], [0], [[0]], [0, 2**63], "\ud7ff\u0000", "layers.0.key.codes"),
)
# As text, since no Python object is written like this.
ODD_TEXTS = ("NaN", "-Infinity", "1" * 5000, "[" * 200_000, '{"a":' * 50_000, '"\\ud800"', "1e999", "-0", "{", "nul")


@pytest.fixture(scope="module")
def model() -> Any:
    return small_model()


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory, model: Any) -> dict[str, bytes]:
    """Whole files by config."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("whole")
    static = {"preset": "int4-token", "max_cache_len": 200}
    return {
        name: saved(folder / name, CONFIGS.get(name, static), model=model).read_bytes() for name in [*NAMES, "static"]
    }


@pytest.fixture
def load(model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[bytes], dict[str, Tensor] | None]:
    """Loads a file of these bytes. Returns what the cache holds, `None` where the file was refused as it should be."""
    restored: list[LayerStore] = []
    restore = saved_layer.restore

    def counting(storage: LayerStore, *args: Any, **options: Any) -> None:
        restored.append(storage)
        restore(storage, *args, **options)

    monkeypatch.setattr(saved_layer, "restore", counting)
    monkeypatch.setattr(cache_file, "_memory_of", lambda device: MEMORY)

    def load(data: bytes) -> dict[str, Tensor] | None:
        path = tmp_path / "cache"
        path.write_bytes(data)
        restored.clear()
        try:
            cache = KVQuantCache.load(path, model)
        except ValueError as error:
            assert str(error).startswith("KVQuantCache.load: `") and str(path) in str(error), f"not named: {error}"
            assert len(str(error)) < 10_000, "an error that nobody reads"
            assert not restored, f"refused when it was too late: {error}"
            return None
        assert sum(storage.num_bytes for storage in cache.storages) <= MEMORY
        cache.save(tmp_path / "again", model, overwrite=True)
        return contents(tmp_path / "again")[0]

    return load


def test_whole_files_come_back(originals: dict[str, bytes], load: Any, tmp_path: Path) -> None:
    for name, data in originals.items():
        (tmp_path / "whole").write_bytes(data)
        check_same(load(data), contents(tmp_path / "whole")[0], name)


def check_same(found: dict[str, Tensor] | None, expected: dict[str, Tensor], what: str) -> None:
    assert found is not None and found.keys() == expected.keys(), what
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items()), (
        f"{what}: another cache came back"
    )


@times(150)
@given(dice=DICE)
def test_damaged_bytes(originals: dict[str, bytes], load: Any, tmp_path: Path, dice: random.Random) -> None:
    data = bytearray(originals[dice.choice(sorted(originals))])
    (tmp_path / "whole").write_bytes(data)
    expected = contents(tmp_path / "whole")[0]
    header = 8 + int.from_bytes(data[:8], "little")
    for _ in range(dice.choice((1, 1, 2, 5))):
        place = dice.randrange(min(len(data), dice.choice((9, header, 2**30))))
        count = dice.choice((1, 2, 8, 100))
        how = dice.randrange(6)
        if how == 0:
            data[place] ^= 1 << dice.randrange(8)
        elif how == 1:
            del data[place:]
        elif how == 2:
            del data[place : place + count]
        elif how == 3:
            data[place:place] = dice.randbytes(count)
        elif how == 4:
            data[place : place + count] = bytes(count)
        else:
            data[:8] = dice.choice((0, 1, header, len(data), 2**26, 2**31, 2**63, 2**64 - 1)).to_bytes(8, "little")
        if len(data) < 9:
            break
    found = load(bytes(data))
    if found is not None:
        check_same(found, expected, "damaged bytes")


@times(200)
@given(dice=DICE)
def test_edited_headers(originals: dict[str, bytes], load: Any, tmp_path: Path, dice: random.Random) -> None:
    """Of safetensors: types, shapes and places of tensors, names that are there twice or not at all, odd metadata."""
    data = originals[dice.choice(sorted(originals))]
    (tmp_path / "whole").write_bytes(data)
    expected = contents(tmp_path / "whole")[0]
    size = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:size])
    for _ in range(dice.choice((1, 1, 2))):
        header = changed(dice, header)
    text = in_odd_text(dice, json.dumps(header))
    text += " " * dice.choice((0, 0, 1, 7))
    found = load(len(text.encode()).to_bytes(8, "little") + text.encode() + data[size:] + bytes(dice.choice((0, 0, 1))))
    if found is not None:
        check_same(found, expected, f"edited header: {text[:2000]}")


@times(250)
@given(dice=DICE)
def test_edited_facts(originals: dict[str, bytes], load: Any, tmp_path: Path, dice: random.Random) -> None:
    """By somebody who has the hashes right: what is loaded holds what the file holds, and no more memory."""
    (tmp_path / "whole").write_bytes(originals[dice.choice(sorted(originals))])
    tensors, metadata = contents(tmp_path / "whole")
    facts = json.loads(metadata["facts"])
    for _ in range(dice.choice((1, 1, 2, 3))):
        facts = changed(dice, facts)
    text = in_odd_text(dice, json.dumps(facts))
    if dice.random() < 0.2:
        name = dice.choice(sorted(tensors))
        tensors[name] = dice.choice(
            (tensors[name][..., :1].contiguous(), tensors[name].flatten(), torch.zeros(0), torch.zeros(3, 2, 12, 64))
        )
    metadata |= {"facts": text, "facts_sha256": content_hash(text, {}), "sha256": content_hash(text, tensors)}
    found = load(save(tensors, metadata))
    if found is not None:
        check_same(found, tensors, f"edited facts: {text[:2000]}")


def changed(dice: random.Random, node: Any) -> Any:
    """A copy of parsed JSON in which one value is another, or one key is gone, renamed or new."""
    node = copy.deepcopy(node)
    ways = list(leaves(node))
    if not ways:
        return dice.choice(ODD)
    *way, key = dice.choice(ways)
    owner = node
    for step in way:
        owner = owner[step]
    how = dice.randrange(6)
    if how == 0:
        del owner[key]
    elif how == 1 and isinstance(owner, dict):
        owner[dice.choice(("", "x", "layers.0.key.codes", "__metadata__", "x" * 100_000, f"{key} "))] = owner.pop(key)
    elif how == 2 and isinstance(owner, dict):
        owner["x" * dice.choice((1, 1000))] = dice.choice(ODD)
    elif how == 3:
        other = node
        for step in dice.choice(ways):
            other = other[step]
        owner[key] = copy.deepcopy(other)
    else:
        owner[key] = dice.choice(ODD)
    return node


def in_odd_text(dice: random.Random, text: str) -> str:
    """JSON with a key twice, or with what no Python object is written as."""
    if dice.random() < 0.8 or not text.startswith("{") or len(text) < 3:
        return text
    if dice.random() < 0.5:
        begin = text.index(":") + 1
        return text[:begin] + dice.choice(ODD_TEXTS) + "," + text[1:]
    place = dice.randrange(len(text))
    return text[:place] + dice.choice(ODD_TEXTS) + text[place:]
