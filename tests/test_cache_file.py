"""That a cache comes back from its file to the bit, and that no other file comes back as anything."""

from __future__ import annotations

import copy
import json
import os
import pickle
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import compare
import models
import pytest
import torch
from cases import some
from models import greedy, left_padded, logits
from programs import Program, finish
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import DynamicCache

from hf_kvquant import PRESETS, KeyTransform, KVQuantCache, KVQuantConfig, patched
from hf_kvquant.cache import file as cache_file
from hf_kvquant.models.hashes import content_hash
from hf_kvquant.storage.saved import held_planes
from hf_kvquant.upstream.releases import CACHE, cache_of, with_cache

TENSOR = {"storage": "int8", "granularity": "tensor"}
CONFIGS: dict[str, Any] = {
    **{preset: preset for preset in PRESETS},
    "windows": {"preset": "int4-token", "sink_length": 2, "residual_length": 4},
    "channel-windows": {"preset": "int4-channel", "sink_length": 3, "residual_length": 9},
    "tensor": {"key": TENSOR, "value": TENSOR},
    "layers": {"preset": "int4-token", "layers": {"1": {"preset": "none", "value": "fp8"}}},
}
Change = Callable[[dict[str, Tensor], dict[str, Any], dict[str, str]], None]


def small_model() -> Any:
    return models.llama(max_position_embeddings=512)


def spelled(config: str, kind: str) -> Any:
    options = CONFIGS[config] if isinstance(CONFIGS[config], dict) else {"preset": config}
    return {**options, "max_cache_len": 200} if kind == "static" else options


def first_turn(model: Any, config: Any, tokens: int = 131) -> Any:
    """What `generate` returned for prompts with left padding; with its last step, 134 tokens are held."""
    with patched(model, config):
        return greedy(model, left_padded(tokens=tokens), 4, disable_compile=True)


def second_turn(model: Any, first: Any, cache: KVQuantCache, config: Any = "int8") -> Any:
    pads = (left_padded(tokens=first.sequences.shape[1] - 4)["attention_mask"] == 0).sum(1)
    more = torch.tensor([[5, 6, 7, 8], [9, 8, 7, 6], [3, 3, 4, 4]], device=first.sequences.device)
    input_ids = torch.cat([first.sequences, more], 1)
    mask = (torch.arange(input_ids.shape[1]) >= pads.unsqueeze(1)).long()
    with patched(model, config):
        inputs = {"input_ids": input_ids, "attention_mask": mask}
        return greedy(model, inputs, 6, **with_cache(cache), disable_compile=True)


def check_same(output: Any, expected: Any) -> None:
    compare.assert_same(output.sequences, expected.sequences, "tokens")
    compare.assert_same(logits(output), logits(expected), "logits")


def planes_of(storage: Any) -> list[Tensor]:
    return [tensor for planes in held_planes(storage) for tensor in planes.tensors()]


def saved(path: Path, config: Any = "int4-token", tokens: int = 9, model: Any = None) -> Path:
    model = small_model() if model is None else model
    cache_of(first_turn(model, config, tokens)).save(path, model)
    return path


def contents(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, dict(file.metadata())


def rewritten(path: Path, change: Change) -> Path:
    """The file with something changed, by somebody who can hash."""
    tensors, metadata = contents(path)
    facts = json.loads(metadata["facts"])
    change(tensors, facts, metadata)
    text = json.dumps(facts)
    hashes = {"facts": text, "facts_sha256": content_hash(text, {}), "sha256": content_hash(text, tensors)}
    save_file(tensors, path, metadata={**metadata, **hashes})
    return path


# --- what is saved comes back -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["growing", "static"])
@pytest.mark.parametrize("config", CONFIGS)
def test_a_loaded_cache_goes_on_to_the_bit(config: str, kind: str, device: str, tmp_path: Path) -> None:
    model, options = models.on(device, small_model()), spelled(config, kind)
    first = first_turn(model, options)
    cache = cache_of(first)
    cache.save(tmp_path / "cache", model)
    loaded = KVQuantCache.load(tmp_path / "cache", model, cache.quant_config)
    assert loaded.quant_config == cache.quant_config and loaded.get_max_length() == cache.get_max_length()
    for storage, other in zip(loaded.storages, cache.storages, strict=True):
        assert (storage.capacity, storage.length, storage.device) == (other.capacity, other.length, other.device)
    assert len(loaded._length_groups()) == 1
    loaded.check_in_step()
    expected = second_turn(model, first, cache, options)
    check_same(second_turn(model, first, loaded, options), expected)
    loaded.save(tmp_path / "cache", model, overwrite=True)
    cache.save(tmp_path / "other", model)
    (tensors, facts), (other_tensors, other_facts) = contents(tmp_path / "cache"), contents(tmp_path / "other")
    assert facts == other_facts and tensors.keys() == other_tensors.keys()
    assert sorted(os.listdir(tmp_path)) == ["cache", "other"]


SCRIPT = """
import sys, torch, test_cache_file as here
from hf_kvquant import KVQuantCache
torch.set_num_threads(1)
model = here.models.family("qwen2")
for name in sys.argv[2:]:
    path = f"{sys.argv[1]}/{name}"
    first = torch.load(f"{path}.first", weights_only=False)
    output = here.second_turn(model, first, KVQuantCache.load(path, model))
    torch.save((output.sequences, output.logits), f"{path}.second")
"""


def test_a_fresh_process_goes_on_to_the_bit(tmp_path: Path) -> None:
    """With keys that are centred, by biases of the model."""
    model = models.family("qwen2")
    names = {"int4-token-growing": "growing", "int8-static": "static", "int4-channel-growing": "growing"}
    for name, kind in names.items():
        first = first_turn(model, spelled(name.rpartition("-")[0], kind), tokens=20)
        cache_of(first).save(tmp_path / name, model)
        cache = cache_of(first)
        setattr(first, CACHE, None)
        torch.save(first, tmp_path / f"{name}.first")
        setattr(first, CACHE, cache)
        expected = second_turn(model, first, cache)
        torch.save((expected.sequences, expected.logits), tmp_path / f"{name}.expected")
        center = cache.storages[0].key_transform.center if "channel" not in name else torch.ones(1)
        assert center is not None and bool((center != 0).any())
    (tmp_path / "script.py").write_text(SCRIPT, encoding="utf-8")
    finish(Program(str(tmp_path / "script.py"), str(tmp_path), *names))
    for name in names:
        (tokens, scores), (other_tokens, other_scores) = (
            torch.load(tmp_path / f"{name}.{end}") for end in ("second", "expected")
        )
        compare.assert_same(tokens, other_tokens, f"tokens, {name}")
        compare.assert_same(torch.stack(scores), torch.stack(other_scores), f"logits, {name}")


def test_transforms_that_were_given_come_back(tmp_path: Path) -> None:
    model = small_model()
    given = {1: KeyTransform(torch.randn(2, 64), torch.rand(2, 64) + 0.5, is_rotated=True)}
    cache = KVQuantCache(model.config, "int4-token", key_transforms=given)
    greedy(model, left_padded(), 4, **with_cache(cache))
    cache.save(tmp_path / "cache", model)
    loaded = KVQuantCache.load(tmp_path / "cache", model)
    assert loaded.storages[0].key_transform is None and loaded.storages[1].key_transform.equals(given[1])
    loaded.reset()
    loaded.adopt({})
    assert loaded.storages[1].key_transform.equals(given[1]), "they belong to the cache, as before"


def test_what_was_cropped_is_not_in_the_file(tmp_path: Path) -> None:
    """Nor does a mask with holes, after which attention falls back, get lost."""
    model = small_model()
    cache = cache_of(first_turn(model, "int4-channel", tokens=20))
    cache.notes.has_holes = True
    cache.crop(-10)
    cache.save(tmp_path / "cache", model)
    tensors, _ = contents(tmp_path / "cache")
    tail = tensors["layers.0.key.tail"]
    assert tail.shape[2] == 128 and bool((tail[:, :, :13] != 0).any(-1).all()) and not bool(tail[:, :, 13:].any())
    assert [tensors[f"layers.0.{name}"].shape[2] for name in ("key.codes", "value.codes")] == [0, 13]
    loaded = KVQuantCache.load(tmp_path / "cache", model)
    assert loaded.notes.has_holes and loaded.notes.has_seen_mask and loaded.get_seq_length() == 13


@pytest.mark.parametrize("config", ["int8", "int4"])
def test_what_is_kept_for_crops_is_not_in_the_file(config: str, tmp_path: Path) -> None:
    """A crop of the loaded cache is one that was not announced."""
    model, inputs, caches = small_model(), left_padded(tokens=40), []
    for is_announced in (False, True):
        cache = KVQuantCache(model.config, config)
        if is_announced:
            cache.activate_past_recording()
        with patched(model, config):
            greedy(model, inputs, 20, **with_cache(cache))
        caches.append(cache)
    unannounced, announced = caches
    announced.save(tmp_path / "cache", model)
    loaded = KVQuantCache.load(tmp_path / "cache", model)
    for cache in (*caches, loaded):
        cache.crop(-10)
    found, same, other = (cache.layers[0] for cache in (loaded, unannounced, announced))
    compare.assert_same(found.keys, same.keys, "keys")
    compare.assert_same(found.values, same.values, "values")
    assert not torch.equal(found.values, other.values), "an announced crop loses nothing"


def test_device(device: str, tmp_path: Path) -> None:
    model = models.on(device, small_model())
    saved(tmp_path / "cache", model=model)
    cache = KVQuantCache.load(tmp_path / "cache", model)
    assert {storage.device for storage in cache.storages} == {model.device}
    cache = KVQuantCache.load(tmp_path / "cache", model, device="cpu")
    assert {str(storage.device) for storage in cache.storages} == {"cpu"}


def test_a_device_without_memory_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path / "cache")
    for model, device in ((small_model(), "meta"), (copy.deepcopy(small_model()).to("meta"), None)):
        with pytest.raises(ValueError, match="`device` must be one with memory, got"):
            KVQuantCache.load(path, model, device=device)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="captures CUDA graphs")
def test_a_captured_cache_goes_on_to_the_bit(tmp_path: Path) -> None:
    model = models.on("cuda", models.llama(torch.bfloat16, max_position_embeddings=512))
    config = {"preset": "int4-token", "capture": True, "max_cache_len": 200}
    with patched(model, config):
        inputs = left_padded()
        first = greedy(model, inputs, 4, output_logits=False)
        cache = cache_of(first)
        cache.save(tmp_path / "cache", model)
        loaded = KVQuantCache.load(tmp_path / "cache", model, config)
        mask = torch.cat([inputs["attention_mask"], torch.ones(3, 4, dtype=torch.long)], 1)
        more = {"input_ids": first.sequences, "attention_mask": mask}
        outputs = [
            greedy(model, more, 6, **with_cache(either), output_logits=False).sequences for either in (cache, loaded)
        ]
    compare.assert_same(*outputs, "tokens")
    for storage, other in zip(loaded.storages, cache.storages, strict=True):
        for plane, other_plane in zip(planes_of(storage), planes_of(other), strict=True):
            compare.assert_same(plane, other_plane, "planes")


def test_nan_comes_back(tmp_path: Path) -> None:
    model = small_model()
    cache = KVQuantCache(model.config, "int8")
    for index in range(2):
        cache.update(*torch.full((2, 1, 2, 3, 64), torch.nan), index)
    cache.save(tmp_path / "cache", model)
    assert bool(KVQuantCache.load(tmp_path / "cache", model).layers[0].keys.isnan().all())


# --- what is not saved ------------------------------------------------------------------------------------------------


def refuses(error: type[Exception], message: str, cache: KVQuantCache, path: Path, model: Any, **options: Any) -> None:
    before = sorted(os.listdir(path.parent))
    with pytest.raises(error, match=message):
        cache.save(path, model, **options)
    assert sorted(os.listdir(path.parent)) == before


def test_caches_that_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, path = small_model(), tmp_path / "cache"
    refuses(ValueError, "must hold tokens, got an empty one", KVQuantCache(model.config), path, model)
    cache = cache_of(first_turn(model, "int8", tokens=9))
    refuses(TypeError, "must be a transformers PreTrainedModel, got LlamaConfig", cache, path, model.config)
    with pytest.raises(TypeError, match=r"save: `path` must be a path, got LlamaForCausalLM\. The model"):
        cache.save(model, path)
    deeper = models.llama(num_hidden_layers=3)
    refuses(ValueError, "the one that the cache was made for, got a LlamaForCausalLM with 3", cache, path, deeper)
    behind = copy.deepcopy(cache)
    behind.layers[1].crop(-1)
    refuses(ValueError, "must be at rest, got one in a step, whose tokens only some", behind, path, model)
    pending = copy.deepcopy(cache)
    for index in range(2):
        pending.update(*torch.zeros(2, 3, 2, 1, 64), index)
    refuses(ValueError, "must be at rest, got one in a step", pending, path, model)
    ahead = copy.deepcopy(cache)
    ahead.storages[0].lengths.add_(1)  # what a graph has counted that the host knows nothing of
    refuses(ValueError, "must be at rest, got one in a step", ahead, path, model)
    full = copy.deepcopy(cache)
    for storage in full.storages:
        storage.rows.max_cache_len = 11
    refuses(ValueError, "must have had room for all tokens, got 12 tokens with room for 11", full, path, model)
    with monkeypatch.context() as context:
        context.setattr(torch.compiler, "is_compiling", lambda: True)
        refuses(RuntimeError, "must be at rest, got one in a step that is being compiled", cache, path, model)
    with monkeypatch.context() as context:
        context.setattr(torch.cuda, "is_initialized", lambda: True)
        context.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        refuses(RuntimeError, "must be at rest, got one in a step that is being compiled", cache, path, model)
    monkeypatch.setattr("hf_kvquant.cache.identity.rank_of", lambda model: (0, 2))
    refuses(NotImplementedError, "must be whole in this process, got one .* over 2 ranks", cache, path, model)


@pytest.mark.parametrize(
    "family, options",
    [("gemma3_text", {"sliding": False}), ("gemma3_text", {"static": True, "sliding": False}), ("jamba", {})],
)
def test_layers_of_transformers_are_refused(family: str, options: dict[str, Any], tmp_path: Path) -> None:
    model = models.family(family)
    with patched(model, {"preset": "int8", **options}):
        cache = cache_of(greedy(model, left_padded(), 2))
    refuses(NotImplementedError, "must have a quantised cache in all layers, got a", cache, tmp_path / "cache", model)


def test_no_file_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, path = small_model(), tmp_path / "cache"
    cache = cache_of(first_turn(model, "int8", tokens=9))
    path.write_text("mine")
    refuses(FileExistsError, f"must be new, got {path}, which exists. Pass overwrite=True", cache, path, model)
    refuses(FileExistsError, "must be new, got .*which exists. Choose another", cache, tmp_path, model, overwrite=True)
    with pytest.raises(FileNotFoundError, match=r"must be in a folder that exists, got .*Create"):
        cache.save(tmp_path / "nowhere" / "cache", model)

    def full(tensors: Any, name: str, metadata: Any) -> None:
        Path(name).write_text("half")
        raise SafetensorError("No space left on device")

    with monkeypatch.context() as context:
        context.setattr(cache_file, "save_file", full)
        refuses(OSError, "must be writable, got .*No space left.*Nothing there", cache, path, model, overwrite=True)
    assert path.read_text() == "mine"

    def somebody_else(tensors: Any, name: str, metadata: Any) -> None:
        Path(name).write_text("ours")
        (tmp_path / "raced").write_text("theirs")

    with monkeypatch.context() as context:
        context.setattr(cache_file, "save_file", somebody_else)
        with pytest.raises(FileExistsError, match="must be new, got"):
            cache.save(tmp_path / "raced", model)
        (tmp_path / "raced").unlink()

        def unlinked(*args: Any) -> None:
            raise PermissionError("no links here")

        context.setattr(os, "link", unlinked)
        with pytest.raises(FileExistsError, match="must be new, got"):
            cache.save(tmp_path / "raced", model)
        assert (tmp_path / "raced").read_text() == "theirs" and sorted(os.listdir(tmp_path)) == ["cache", "raced"]
        context.undo()
        context.setattr(os, "link", unlinked)
        cache.save(tmp_path / "linkless", model)
    (tmp_path / "link").symlink_to(path)
    cache.save(tmp_path / "link", model, overwrite=True)
    assert (tmp_path / "link").is_symlink()
    assert contents(path)[1] == contents(tmp_path / "linkless")[1], "hashes included"


# --- what is not loaded -----------------------------------------------------------------------------------------------


def refused(path: Path, message: str, model: Any = None, error: type[Exception] = ValueError) -> None:
    """Refused by a message that says which file, without buffers."""
    with pytest.raises(error, match=message) as caught:
        KVQuantCache.load(path, small_model() if model is None else model)
    assert str(path) in str(caught.value) and str(caught.value).startswith("KVQuantCache.load: `")


def test_other_files_are_refused(tmp_path: Path) -> None:
    path, expected = tmp_path / "cache", "must be a file written by KVQuantCache.save, got"
    refused(path, f"{expected} .*, which is not there", error=FileNotFoundError)
    refused(tmp_path, f"{expected} .*, which is a folder. Name the file in it.", error=IsADirectoryError)
    for data in (b"", b"{}", pickle.dumps(DynamicCache()), b"\xff" * 100):
        path.write_bytes(data)
        refused(path, expected)
    save_file({"x": torch.zeros(3)}, path)
    refused(path, f"{expected} .*, which holds something else")
    saved(tmp_path / "whole")
    data = (tmp_path / "whole").read_bytes()
    for end in (len(data) - 1, len(data) // 2, 100, 7):
        path.write_bytes(data[:end])
        refused(path, expected)
    with pytest.raises(TypeError, match="must be a transformers PreTrainedModel, got LlamaConfig"):
        KVQuantCache.load(tmp_path / "whole", small_model().config)


def test_another_model_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path / "cache")
    other = "`model` must be the one that .*, got a"
    refused(path, f"{other} LlamaForCausalLM: max_position_embeddings is 128, not 512", models.llama())
    refused(path, f"{other} Qwen2.*model_type is 'qwen2', not 'llama'", models.family("qwen2"))
    model = copy.deepcopy(small_model())
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.weight[3].mul_(2)  # as a factor that is folded in does
    refused(path, f"{other} .*its weights differ", model)
    refused(path, f"{other} .*dtype is float16, not float32", copy.deepcopy(small_model()).half())
    model = copy.deepcopy(small_model())
    model.config.rope_parameters = {**model.config.rope_parameters, "rope_theta": 5e4}
    refused(path, f"{other} .*rope_parameters is .*50000", model)
    model = copy.deepcopy(small_model())
    model.config._name_or_path, model.config.use_cache = "elsewhere", False
    KVQuantCache.load(path, model)


def test_another_config_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path / "cache")
    with pytest.raises(ValueError, match=re.escape(f"`preset_or_config` must be what {path} was saved with")):
        KVQuantCache.load(path, small_model(), "int8")
    with pytest.raises(ValueError, match="unknown key"):
        KVQuantCache.load(path, small_model(), {"nbit": 4})
    assert KVQuantCache.load(path, small_model(), "int4-token").quant_config == KVQuantConfig.from_preset("int4-token")


def of_facts(*keys: str, to: Any) -> Change:
    def change(tensors: dict[str, Tensor], facts: dict[str, Any], metadata: dict[str, str]) -> None:
        for key in keys[:-1]:
            facts = facts[key]
        facts[keys[-1]] = to

    return change


def of_tensor(name: str, to: Callable[[Tensor], Tensor]) -> Change:
    def change(tensors: dict[str, Tensor], facts: dict[str, Any], metadata: dict[str, str]) -> None:
        tensors[name] = to(tensors[name]).contiguous()

    return change


def without_a_plane(tensors: dict[str, Tensor], facts: dict[str, Any], metadata: dict[str, str]) -> None:
    del tensors["layers.1.value.zero"]


def with_one_more(tensors: dict[str, Tensor], facts: dict[str, Any], metadata: dict[str, str]) -> None:
    tensors["layers.2.key.codes"] = torch.zeros(1)


def without_facts(tensors: dict[str, Tensor], facts: dict[str, Any], metadata: dict[str, str]) -> None:
    facts.clear()


CHANGES: dict[str, tuple[Change, str]] = {
    **{
        f"length {length!r}": (of_facts("length", to=length), "`length` is|cannot hold|of shape")
        for length in (0, -1, 11, 13, 65, 2**31, 2**62, 10**30, 12.0, True, None, "12")
    },
    **{f"batch {batch!r}": (of_facts("batch", to=batch), "`batch` is|of shape") for batch in (0, -3, 2, 2**31 - 1, [])},
    "max_cache_len": (of_facts("max_cache_len", to=8), "cannot hold 12 tokens"),
    "huge max_cache_len": (of_facts("max_cache_len", to=2**40), "`max_cache_len` is"),
    "not a flag": (of_facts("has_holes", to=1), "`has_holes` is 1"),
    "no layers": (of_facts("layers", to={}), "it has layers"),
    "a config of nothing": (of_facts("config", to=[]), "`data` must be a dictionary, got \\[\\]"),
    "an unknown format": (of_facts("config", "key", "storage", to="int5"), "`storage` must be one of"),
    "another format": (of_facts("config", "key", "symmetric", to=True), "too many"),
    **{
        f"{name} {to!r}": (of_facts("layers", "0", name, to=to), message)
        for name, to, message in (
            ("capacity", 63, "cannot hold"),
            ("capacity", -64, "`capacity` is"),
            ("num_kv_heads", 1, "of shape"),
            ("key_head_dim", 128, "of shape"),
            ("key_head_dim", 7, "head_dim"),
            ("value_head_dim", 2**31 - 8, "of shape|numel|overflow"),
            ("dtype", "int64", "int64"),
            ("is_rotated", "no", "`is_rotated` is"),
            ("has_center", True, "missing"),
            ("has_starts", False, "too many"),
        )
    },
    "short codes": (of_tensor("layers.0.key.codes", lambda x: x[:, :, :11]), "of shape"),
    "codes of floats": (of_tensor("layers.0.key.codes", torch.Tensor.float), "is F32"),
    "wide scales": (of_tensor("layers.1.value.scale", torch.Tensor.double), "is F64"),
    "negative padding": (of_tensor("layers.0.starts", lambda x: x - 1), "padding of layer 0"),
    "endless padding": (of_tensor("layers.0.starts", lambda x: x + 2**30), "padding of layer 0"),
    "a missing plane": (without_a_plane, "missing"),
    "a foreign plane": (with_one_more, "too many"),
    "no facts": (without_facts, "'config'"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_tampered_files_are_refused(name: str, tmp_path: Path) -> None:
    """By somebody who has the hashes right."""
    change, message = CHANGES[name]
    refused(rewritten(saved(tmp_path / "cache"), change), f"which is damaged \\(.*({message})")


def test_buffers_that_no_memory_holds_are_refused(tmp_path: Path) -> None:
    """Systems that promise more memory than they have would otherwise make them."""
    path = rewritten(saved(tmp_path / "cache"), of_facts("layers", "1", "capacity", to=2**31 - 64))
    refused(path, r"whose buffers take [\d.]+ GB, more than the [\d.]+ GB of cpu\. Load it where it was saved")


def test_messages_do_not_repeat_a_file(tmp_path: Path) -> None:
    path = rewritten(saved(tmp_path / "cache"), of_facts("config", "x" * 100_000, to=1))
    refused(path, "unknown key 'x{900,1000}…\\). Copy it again")


@pytest.mark.parametrize(("name", "to"), [("center", torch.nan), ("smoothing", 0.0)])
def test_tampered_transforms_are_refused(name: str, to: float, tmp_path: Path) -> None:
    model = small_model()
    given = {index: KeyTransform(torch.ones(2, 64), torch.ones(2, 64)) for index in range(2)}
    cache = KVQuantCache(model.config, "int4-token", key_transforms=given)
    greedy(model, left_padded(), 2, **with_cache(cache))
    cache.save(tmp_path / "cache", model)
    refused(rewritten(tmp_path / "cache", of_tensor(f"layers.1.{name}", lambda x: x * to)), f"damaged .*`{name}` must")


def test_versions(tmp_path: Path) -> None:
    def older(tensors: dict[str, Tensor], facts: dict[str, Any], metadata: dict[str, str]) -> None:
        metadata["version"] = "1"

    refused(rewritten(saved(tmp_path / "cache"), older), "of format version 1, this is version 2")


@pytest.mark.parametrize("config", ["int8", "windows"])
def test_damaged_files_are_refused_or_the_same(config: str, tmp_path: Path) -> None:
    """Bytes that are flipped, cut off, left out or put in: the very same cache, or an error that names the file."""
    model, path = small_model(), saved(tmp_path / "cache", CONFIGS[config])
    data = path.read_bytes()
    tensors, _ = contents(path)
    header = 8 + int.from_bytes(data[:8], "little")
    dice, num_refused = random.Random(0), 0
    for trial in range(300):
        place = dice.randrange((8, header, len(data))[trial % 3])
        damaged = bytearray(data)
        if trial % 10 == 9:
            del damaged[place:]
        elif trial % 10 == 8:
            del damaged[place : place + dice.randrange(1, 9)]
        elif trial % 10 == 7:
            damaged[place:place] = dice.randbytes(dice.randrange(1, 9))
        else:
            damaged[place] ^= dice.randrange(1, 256)
        path.write_bytes(damaged)
        try:
            cache = KVQuantCache.load(path, model)
        except (ValueError, OSError) as error:
            assert str(path) in str(error), f"trial {trial}: {error}"
            num_refused += 1
            continue
        cache.save(tmp_path / "again", model, overwrite=True)
        again, _ = contents(tmp_path / "again")
        assert again.keys() == tensors.keys() and all(torch.equal(again[name], tensors[name]) for name in tensors)
    assert num_refused > 250


def leaves(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to every value in parsed JSON, containers included."""
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, item in items:
        yield (*path, key)
        yield from leaves(item, (*path, key))


@pytest.mark.full(
    when=lambda config: config == "int4-channel",
    reason="a thousand loads each; test_fuzz_cache_file.py has this config",
)
@pytest.mark.parametrize("config", ["int4-channel", "windows"])
def test_no_number_that_is_tampered_with_does_harm(config: str, tmp_path: Path) -> None:
    """Each value of the facts in turn becomes something else, hashes are right: an error, or a cache that is whole."""
    model, path = small_model(), saved(tmp_path / "cache", CONFIGS[config])
    tensors, metadata = contents(path)
    facts = json.loads(metadata["facts"])
    ways, num_loaded = [*leaves(facts)], 0
    assert len(ways) > 60
    values = (None, True, False, -1, 0, 1, 2, 8, 2**31 - 1, 2**63, 10**400, 0.5, "", "x", "int8", [], [1], {})
    for turn, way in enumerate(ways):
        for value in some(values, turn):
            changed = copy.deepcopy(facts)
            node = changed
            for key in way[:-1]:
                node = node[key]
            node[way[-1]] = value
            text = json.dumps(changed)
            hashes = {"facts": text, "facts_sha256": content_hash(text, {}), "sha256": content_hash(text, tensors)}
            save_file(tensors, path, metadata={**metadata, **hashes})
            try:
                cache = KVQuantCache.load(path, model)
            except ValueError as error:
                assert str(path) in str(error), f"{way} = {value!r}: {error}"
                continue
            num_loaded += 1
            assert cache.layers[1].keys.shape == (3, 2, 12, 64) and cache.get_seq_length() == 12
    assert num_loaded > 0
