"""Caches whose layers are in CPU memory: the same bits as without, little on the GPU, little over the bus.

Without a GPU, layers come and go between two places of the CPU's memory, which shows that the right tokens travel at
the right time; that copies and kernels wait for each other can only show on a GPU, and does where copies, or what
attends, are slowed down.
"""

from __future__ import annotations

import copy
import pickle
import re
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import compare
import models
import pytest
import torch
from cases import times
from hypothesis import given
from hypothesis import strategies as st
from models import greedy, left_padded, logits
from torch import Tensor

import hf_kvquant
from hf_kvquant import KVQuantCache, KVQuantConfig, patched
from hf_kvquant.cache.handle import KVHandle
from hf_kvquant.spec.formats import KVFormat
from hf_kvquant.spec.planes import Planes
from hf_kvquant.storage import offloading, rewind, saved
from hf_kvquant.storage.layer_store import LayerStore
from hf_kvquant.storage.offloading import Offloaded, Offloader
from hf_kvquant.upstream.releases import cache_of

CUDA_ONLY = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
NUM_LAYERS, BATCH, HEAD_DIM = 5, 3, models.HEAD_DIM
TENSOR = {"storage": "int4", "granularity": "tensor", "symmetric": False}
CONFIGS: dict[str, dict[str, Any]] = {
    **{preset: {"preset": preset} for preset in ("none", "int8", "int4-token", "int4-channel", "fp8")},
    "windows": {"preset": "int4-token", "sink_length": 2, "residual_length": 4},
    "channel-windows": {"preset": "int4-channel", "sink_length": 3, "residual_length": 9},
    "tensor": {"key": TENSOR, "value": {**TENSOR, "storage": "int8"}},
    "one-side": {"preset": "none", "value": "fp8"},
    "layers": {"preset": "int4-token", "layers": {"1": "int8", "3": "none", "4": "int4-channel"}},
}


class Junk(Offloader):
    """Spoils the memory that a layer leaves: what is still read from there shows."""

    def leave_slot(self, kind: Any, slot: Any) -> None:
        for side in slot:
            for plane in side.values():
                plane.fill_(torch.nan if plane.is_floating_point() else 255)
        super().leave_slot(kind, slot)


@pytest.fixture(autouse=True)
def anywhere(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[None]:
    """Layers are offloaded from the CPU, too."""
    monkeypatch.setattr(offloading, "HOMES", frozenset(("cpu", "cuda")))
    monkeypatch.setattr("hf_kvquant.cache.kvquant_cache.Offloader", Junk)
    yield


def small_model(device: str = "cpu") -> Any:
    return models.on(device, models.llama(num_hidden_layers=NUM_LAYERS, max_position_embeddings=512))


def both(config: Any) -> tuple[KVQuantCache, KVQuantCache]:
    """A cache that stays, and one that is offloaded."""
    return tuple(KVQuantCache(small_model().config, {**config, "offloading": away}) for away in (False, True))  # type: ignore[return-value]


def step(cache: KVQuantCache, q_len: int, device: str | None = None, seed: int = 0) -> list[Tensor]:
    """A forward of every layer, as far as a cache sees it: what attention makes of the same queries and new tokens.

    Where no device is named, it is the one of the tokens before, or the CPU.
    """
    generator = torch.Generator().manual_seed(seed)
    batch = cache.storages[0].batch or BATCH
    device = device or (str(cache.storages[0].device) if cache.storages[0].is_allocated else "cpu")
    outs = []
    for index, storage in enumerate(cache.storages):
        key, value = (torch.randn(batch, 2, q_len, HEAD_DIM, generator=generator).to(device) for _ in range(2))
        query = torch.randn(batch, 4, q_len, HEAD_DIM, generator=generator).to(device)
        handle, _ = cache.update(key, value, index)
        if isinstance(handle, KVHandle):
            outs.append(storage.attend(query, softmax_scale=0.2)[0] if storage.formats.is_quantized else handle.dense())
    return outs


def check_same_outs(actual: list[Tensor], expected: list[Tensor], what: str) -> None:
    for index, (out, other) in enumerate(zip(actual, expected, strict=True)):
        compare.assert_same(out, other.cpu(), f"{what}, layer {index}")


def check_same_tokens(actual: KVQuantCache, expected: KVQuantCache, what: str) -> None:
    for storage, other in zip(actual.storages, expected.storages, strict=True):
        assert storage.length == other.length and storage.is_empty == other.is_empty, what
        if other.is_allocated and not other.is_empty:
            for planes, other_planes in zip(saved.held_planes(storage), saved.held_planes(other), strict=True):
                on_cpu = other_planes.map(lambda plane: plane.cpu())
                compare.assert_same_planes(planes, on_cpu, f"{what}, {storage.name}")


def residents(cache: KVQuantCache) -> list[int]:
    return [
        index for index, storage in enumerate(cache.storages) if storage.is_allocated and not storage.residency.is_away
    ]


# --- what comes out ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CONFIGS)
def test_generate_gives_the_same_bits(name: str, device: str) -> None:
    model, outputs = small_model(device), []
    for away in (False, True):
        with patched(model, {**CONFIGS[name], "offloading": away}):
            outputs.append(greedy(model, left_padded(tokens=125), 8))
    expected, output = outputs
    compare.assert_same(output.sequences, expected.sequences.cpu(), "tokens")
    compare.assert_same(logits(output), logits(expected), "logits")
    check_same_tokens(cache_of(output), cache_of(expected), "after generate")


OPTIONS: dict[str, dict[str, Any]] = {
    "beams": {"num_beams": 3},
    "prefill in chunks": {"prefill_chunk_size": 7},
    "prompt lookup": {"prompt_lookup_num_tokens": 3},
    "the flag": {},
}


@pytest.mark.parametrize("way", OPTIONS)
@pytest.mark.parametrize("preset", ["int4-token", "int4-channel"])
def test_generate_in_other_ways(preset: str, way: str, device: str) -> None:
    model, outputs = small_model(device), []
    inputs = left_padded(tokens=12) if "lookup" not in way else left_padded(1, 12, (0,))
    for away in (False, True):
        config = {"preset": preset, "offloading": away}
        flag = {"cache_implementation": "quantized", "cache_config": {"backend": "hf_kvquant", **config}}
        with patched(model, "int8" if way == "the flag" else config):
            outputs.append(greedy(model, inputs, 8, **(flag if way == "the flag" else OPTIONS[way])))
    assert all(storage.is_offloaded for storage in cache_of(outputs[1]).storages)
    compare.assert_same(outputs[1].sequences, outputs[0].sequences.cpu(), "tokens")


@pytest.mark.parametrize("family", ["gemma3n_text", "gemma4_text", "gemma3_text", "gpt_oss", "bloom", "jamba"])
def test_families(family: str, device: str) -> None:
    """Shared keys and values, layers of transformers in between, attention outside the registry."""
    model, outputs = models.on(device, models.family(family)), []
    for away in (False, True):
        with patched(model, {"preset": "int4-token", "offloading": away}):
            outputs.append(greedy(model, left_padded(), 6))
    compare.assert_same(outputs[1].sequences, outputs[0].sequences.cpu(), "tokens")
    compare.assert_same(logits(outputs[1]), logits(outputs[0]), "logits")


def test_layers_that_attend_through_one_step_get_its_keys() -> None:
    """Also after others have come into the memory where they were."""
    cache = both({"preset": "none"})[1]
    step(cache, 9)
    key = torch.randn(BATCH, 2, 1, HEAD_DIM)
    handles = [cache.update(key + index, key, index)[0] for index in range(NUM_LAYERS)]
    first = handles[0].dense().clone()
    for handle in handles[1:]:
        handle.dense()
    compare.assert_same(handles[0].dense(), first, "keys of the first layer")


# --- what is where ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["int4-token", "layers"])
def test_two_layers_are_there_at_a_time(name: str, device: str) -> None:
    cache = both(CONFIGS[name])[1]
    step(cache, 9, device)
    assert residents(cache) == [0, NUM_LAYERS - 1], "the last one, and the first, which is next"
    for index in range(NUM_LAYERS):
        key = torch.randn(BATCH, 2, 1, HEAD_DIM).to(device)
        handle, _ = cache.update(key, key, index)
        assert residents(cache) == sorted((index, (index + 1) % NUM_LAYERS))
        handle.step.dense("a test")
        assert residents(cache) == sorted((index, (index + 1) % NUM_LAYERS))
    for storage in cache.storages:
        if storage.residency.is_away:
            away = [
                plane
                for planes in storage.buffers.planes
                for plane in (planes.codes, planes.scale)
                if plane is not None
            ]
            assert {plane.device.type for plane in away} == {"cpu"}
            assert all(plane.is_pinned() for plane in away) or device == "cpu"
        else:
            assert storage.planes[0].codes.device.type == device


def test_asking_for_numbers_moves_nothing() -> None:
    cache, plain = both(CONFIGS["windows"])[1], both(CONFIGS["windows"])[0]
    step(cache, 9), step(plain, 9)
    before = residents(cache)
    assert (cache.num_bytes, cache.num_bytes_held) == (plain.num_bytes, plain.num_bytes_held)
    assert cache.bytes_per_token == plain.bytes_per_token and cache.get_seq_length() == 9 and repr(cache)
    assert residents(cache) == before


def test_few_layers_stay() -> None:
    cache = KVQuantCache(models.llama().config, {"preset": "int4-token", "offloading": True})
    for q_len in (9, 1, 1):
        step(cache, q_len)
    assert residents(cache) == [0, 1]


def test_memory_is_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two slots serve all layers of one kind; growing, and another batch, leave none of the old size."""
    made = []
    take = Offloader.take_slot

    def counted(self: Offloader, *args: Any) -> Any:
        before = sum(map(len, self._free.values()))
        slot = take(self, *args)
        made.append(not before)
        return slot

    monkeypatch.setattr(Offloader, "take_slot", counted)
    cache = both({"preset": "int4-token"})[1]
    for q_len in (9, *(1,) * 6):
        step(cache, q_len)
    assert sum(made) == 2 and len(made) > 6 * (NUM_LAYERS - 2)
    offloader = cache.storages[0].residency._offloader
    for change in (lambda: step(cache, 70), lambda: cache.batch_repeat_interleave(2)):
        change()
        step(cache, 1), step(cache, 1)
        kinds = {storage.residency.kind() for storage in cache.storages}
        assert len(kinds) == 1 and set(offloader._free) <= kinds and sum(map(len, offloader._free.values())) <= 2


@pytest.mark.parametrize("name", ["int4-token", "none", "int4-channel", "windows"])
def test_what_travels_in_a_step(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every layer once to the GPU, its newest token back."""
    cache = both(CONFIGS[name])[1]
    step(cache, 9), step(cache, 1, seed=1)
    moves: list[tuple[int, int]] = []
    rows = offloading._rows

    def counted(source: Any, target: Any, kv_format: Any, begin: int, end: int) -> Any:
        found = rows(source, target, kv_format, begin, end)
        moves.append((end - begin, sum(old.numel() * old.element_size() for old, _ in found)))
        return found

    monkeypatch.setattr(offloading, "_rows", counted)
    step(cache, 1, seed=2)
    back, there = ([move for move in moves if (move[0] == 1) == is_back] for is_back in (True, False))
    there = [move for move in there if move[0]]
    num_sides = 1 if name == "int4-channel" else 2  # keys are dense there until their block is full
    assert len(back) == len(there) == num_sides * NUM_LAYERS
    # The first layer came before the step, without its tokens; the last one had left none there.
    assert {tokens for tokens, _ in there} <= {10, 11}
    if name != "int4-channel":
        per_token = cache.storages[0].bytes_per_token * BATCH
        assert sum(size for _, size in back) == per_token * NUM_LAYERS
        assert sum(size for _, size in there) == per_token * sum(tokens for tokens, _ in there) // num_sides


def test_memory_goes_with_the_cache() -> None:
    cache = both({"preset": "int4-token"})[1]
    step(cache, 9), step(cache, 1)
    left = [weakref.ref(thing) for thing in (*cache.storages, cache.storages[0].residency._offloader)]
    del cache
    assert not any(thing() for thing in left)


# --- what is done to caches -------------------------------------------------------------------------------------------


def pickled(cache: KVQuantCache) -> KVQuantCache:
    restored = pickle.loads(pickle.dumps(cache))
    assert isinstance(restored, KVQuantCache)
    return restored


def crop(count: int) -> Callable[[KVQuantCache], Any]:
    return lambda cache: cache.crop(-count)


OPERATIONS: dict[str, Callable[[KVQuantCache], Any]] = {
    "one token": lambda cache: step(cache, 1, seed=1),
    "two tokens": lambda cache: step(cache, 2, seed=2),
    "many tokens": lambda cache: step(cache, 130, seed=3),
    "crop 1": crop(1),
    "crop 5": crop(5),
    "crop 140": crop(140),
    "reorder": lambda cache: cache.reorder_cache(torch.arange(cache.batch_size - 1, -1, -1)),
    "select": lambda cache: cache.batch_select_indices(torch.arange(max(1, cache.batch_size - 1))),
    "repeat": lambda cache: cache.batch_repeat_interleave(2) if cache.batch_size < 4 else None,
    "reset": lambda cache: cache.reset(),
    "copy": copy.deepcopy,
    "pickle": pickled,
    "look at a layer": lambda cache: cache.layers[2].keys,
    "touch a layer": lambda cache: cache.storages[3].planes[1],
    "crop one layer": lambda cache: rewind.crop(cache.storages[1], 1),
    "reset one layer": lambda cache: cache.storages[1].reset(),
    "move and back": lambda cache: [(layer.offload(), layer.prefetch()) for layer in cache.layers],
}


@times(25)
@given(
    name=st.sampled_from(sorted(CONFIGS)),
    prompt=st.sampled_from((1, 9, 127, 128, 200)),
    names=st.lists(st.sampled_from(sorted(OPERATIONS)), min_size=1, max_size=8),
)
def test_any_operations_in_any_order(name: str, prompt: int, names: list[str]) -> None:
    plain, away = both(CONFIGS[name])
    step(plain, prompt), step(away, prompt)
    for operation in (*names, "one token"):
        if not plain.storages[0].is_allocated and operation not in ("one token", "many tokens", "copy"):
            continue
        results = [OPERATIONS[operation](cache) for cache in (plain, away)]
        if isinstance(results[0], KVQuantCache):
            plain, away = results
        elif isinstance(results[0], list) and results[0] and isinstance(results[0][0], Tensor):
            check_same_outs(results[1], results[0], operation)
        assert len(residents(away)) <= 2
    check_same_tokens(away, plain, f"after {names}")


@pytest.mark.parametrize("name", CONFIGS)
def test_operations_one_after_the_other(name: str, device: str) -> None:
    plain, away = both(CONFIGS[name])
    step(plain, 150, device), step(away, 150, device)
    for count, operation in enumerate(OPERATIONS):
        results = [OPERATIONS[operation](cache) for cache in (plain, away)]
        if isinstance(results[0], KVQuantCache):
            plain, away = results
        q_len = 140 if plain.get_seq_length() < 10 else 1
        outs = [step(cache, q_len, device, seed=10 + count) for cache in (plain, away)]
        check_same_outs(outs[1], outs[0], f"after {operation}")
        assert len(residents(away)) <= 2
    check_same_tokens(away, plain, "at last")


def test_memory_that_is_short_loses_nothing(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, away = both({"preset": "int4-token"})
    step(plain, 9, device), step(away, 9, device)
    rows, calls = offloading._rows, []

    def failing(*args: Any) -> Any:
        calls.append(args)
        if len(calls) in (2, 4):
            raise torch.OutOfMemoryError("a copy does not fit")
        return rows(*args)

    monkeypatch.setattr(offloading, "_rows", failing)
    for _ in range(2):
        with pytest.raises(torch.OutOfMemoryError):
            away.storages[2].planes[0]
    monkeypatch.setattr(offloading, "_rows", rows)
    check_same_outs(step(away, 1, seed=1), step(plain, 1, seed=1), "a step later")
    check_same_tokens(away, plain, "at last")


def new_tokens(q_len: int, device: str) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(q_len)
    key, value = (torch.randn(BATCH, 2, q_len, HEAD_DIM, generator=generator).to(device) for _ in range(2))
    return key, value


SECOND_SIDE: dict[str, tuple[int, Callable[[LayerStore, str], Any]]] = {  # tokens held before, what is done
    "first tokens": (0, lambda storage, device: storage.extend(*new_tokens(9, device))),
    "growing": (9, lambda storage, device: storage.extend(*new_tokens(130, device))),
    "fewer sequences": (9, lambda storage, device: storage.select(torch.tensor([1]))),
}


@pytest.mark.parametrize("is_away", [False, True])
@pytest.mark.parametrize("name", SECOND_SIDE)
def test_memory_that_runs_out_between_the_sides(
    name: str, is_away: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither side is another one then, nor what steps know of both; the same once more is as if nothing had been."""
    length, change = SECOND_SIDE[name]
    expected, actual = both({"preset": "int4-token"})[0], both({"preset": "int4-token"})[is_away]
    for cache in (expected, actual):
        if length:
            step(cache, length, device)
        for storage in cache.storages[:2]:  # two layers that have to make room
            storage.extend(*new_tokens(9, device))
            storage.flush()
    plain, storage = expected.storages[2], actual.storages[2]
    change(plain, device)
    num_calls = num_refused = fails_at = 0

    def failing(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            nonlocal num_calls
            num_calls += 1
            if num_calls == fails_at:
                raise torch.OutOfMemoryError("no memory is left")
            return function(*args, **options)

        return call

    monkeypatch.setattr(KVFormat, "allocate", failing(KVFormat.allocate))
    monkeypatch.setattr(Planes, "map", failing(Planes.map))
    monkeypatch.setattr(offloading, "_copied", failing(offloading._copied))
    monkeypatch.setattr(Offloader, "take_slot", failing(Offloader.take_slot))
    while num_refused == fails_at < 20:
        num_calls, fails_at = 0, fails_at + 1
        try:
            change(storage, device)
        except torch.OutOfMemoryError:
            num_refused += 1
            assert storage.length == length and (storage.batch == BATCH or not length)
            if length:
                key, value = storage.planes
                assert key.codes.shape == value.codes.shape and key.codes.shape[0] == BATCH
            else:
                assert storage.num_bytes == 0
    fails_at = 0
    assert num_refused >= 2, "of each side"
    plain.flush(), storage.flush()
    query = torch.randn(plain.batch, 4, 1, HEAD_DIM).to(device)
    for out, other in zip(
        storage.attend(query, softmax_scale=0.2), plain.attend(query, softmax_scale=0.2), strict=True
    ):
        compare.assert_same(out, other.cpu(), name)
    check_same_tokens(actual, expected, name)


@pytest.mark.parametrize("row_bytes", [24, 30, 9])
def test_rows_that_are_no_whole_words_are_moved(row_bytes: int) -> None:
    source = Planes(torch.randint(256, (1, 2, 64, row_bytes), dtype=torch.uint8), torch.rand(1, 2, 1, 64).half(), None)
    target = source.map(torch.zeros_like)
    offloading._copy_tokens((source,), (target,), (KVFormat("int8"),), (33,))  # type: ignore[arg-type]
    compare.assert_same(target.codes[:, :, :33], source.codes[:, :, :33], "codes")
    assert not target.codes[:, :, 33:].any()


def test_a_crop_without_a_tail_moves_nothing() -> None:
    cache = both({"preset": "int4-token"})[1]
    step(cache, 9), step(cache, 1)
    before = residents(cache)
    cache.crop(-3)
    assert residents(cache) == before and cache.get_seq_length() == 7


@pytest.mark.parametrize("name", ["int4-token", "channel-windows"])
def test_saved_and_loaded(name: str, device: str, tmp_path: Path) -> None:
    """With or without offloading: where codes are kept is no part of what they are."""
    model, config = small_model(device), CONFIGS[name]
    with patched(model, {**config, "offloading": True}):
        cache = cache_of(greedy(model, left_padded(tokens=131), 4))
    cache.save(tmp_path / "cache", model)
    for away in (False, True):
        wanted = KVQuantConfig.from_dict({**config, "offloading": away})
        loaded = KVQuantCache.load(tmp_path / "cache", model, wanted)
        assert loaded.quant_config == wanted
        assert all(storage.is_offloaded == away for storage in loaded.storages)
        check_same_tokens(loaded, cache, "loaded")
    assert KVQuantCache.load(tmp_path / "cache", model).quant_config.offloading
    assert len(residents(loaded)) <= 2


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_refuses_a_cpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model, cache = small_model(), both({"preset": "int4-token"})[1]
    step(cache, 9)
    cache.save(tmp_path / "cache", model)
    monkeypatch.setattr(offloading, "HOMES", frozenset(("cuda",)))
    message = re.escape(
        ": `offloading` must be False for a layer on cpu, got True: only codes on a GPU can be offloaded to CPU "
        "memory. Leave offloading out, or move the model to a GPU."
    )
    with (
        patched(model, {"preset": "int4-token", "offloading": True}),
        pytest.raises(ValueError, match=f"^layer 0{message}"),
    ):
        greedy(model, left_padded())
    fresh = both({"preset": "int4-token"})[1]
    with pytest.raises(ValueError, match=message):
        step(fresh, 3)
    assert not fresh.storages[0].is_allocated and fresh.get_seq_length() == 0
    with pytest.raises(ValueError, match=rf"^KVQuantCache.load: .*cache{message}"):
        KVQuantCache.load(tmp_path / "cache", model)
    assert KVQuantCache.load(tmp_path / "cache", model, "int4-token").get_seq_length() == 9


@pytest.mark.parametrize("options", [{"static": True}, {"max_cache_len": 64}, {"capture": True}])
def test_refuses_static_caches(options: dict[str, Any]) -> None:
    message = "KVQuantConfig: `offloading` must be False for a static cache, got True: a compiled or captured step"
    with pytest.raises(ValueError, match=message):
        KVQuantConfig.from_preset("int4-token", offloading=True, **options)
    if "max_cache_len" in options:
        message = "KVQuantCache: `max_cache_len` must be None with offloading=True, got 64"
        with pytest.raises(ValueError, match=message):
            KVQuantCache(small_model().config, {"preset": "int4-token", "offloading": True}, **options)


def test_a_compiled_step_leaves_out_what_comes_and_goes() -> None:
    """The compiler breaks its graph there, or says why it will not, if it must not."""
    cache, plain = both({"preset": "int4-token"})[1], both({"preset": "int4-token"})[0]
    step(plain, 9)

    def compiled(key: Tensor, index: int) -> Any:
        return cache.update(key, key, index)[0].shape

    with pytest.raises(torch._dynamo.exc.Unsupported, match="codes that are offloaded come and go"):
        torch.compile(compiled, backend="eager", fullgraph=True)(torch.randn(BATCH, 2, 9, HEAD_DIM), 0)
    assert cache.get_seq_length() == 0
    step(cache, 9)
    check_same_tokens(cache, plain, "after the refusal")


@CUDA_ONLY
def test_refuses_a_captured_step() -> None:
    cache = both({"preset": "int4-token"})[1]
    step(cache, 9, "cuda"), step(cache, 1, "cuda")
    key = torch.randn(BATCH, 2, 1, HEAD_DIM, device="cuda")
    with pytest.raises(RuntimeError, match="layer 0: `offloading` must be False in a step that is captured, got True"):
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            cache.update(key, key, 0)
    assert cache.get_seq_length() == 10


# --- on a GPU ---------------------------------------------------------------------------------------------------------

SLOW = 20_000_000  # cycles: some 10 ms, far beyond what anything here takes


@CUDA_ONLY
@pytest.mark.parametrize("slow", ["copies", "attention", "neither"])
@pytest.mark.parametrize("name", ["int4-token", "int4-channel", "none", "windows"])
def test_copies_and_kernels_wait_for_each_other(name: str, slow: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, away = both(CONFIGS[name])
    fetch, send = Offloaded.fetch, Offloaded.send

    def slow_fetch(self: Offloaded) -> None:
        if self.is_away and slow == "copies":
            stream = self._offloader.stream(self.device)
            assert stream is not None
            with torch.cuda.stream(stream):
                torch.cuda._sleep(SLOW)
        fetch(self)

    def slow_send(self: Offloaded) -> None:
        if slow == "attention":
            torch.cuda._sleep(SLOW)
        send(self)

    monkeypatch.setattr(Offloaded, "fetch", slow_fetch)
    monkeypatch.setattr(Offloaded, "send", slow_send)
    for count, q_len in enumerate((126, 1, 1, 1, 90, 1, 1)):
        expected = step(plain, q_len, "cuda", seed=count)
        # Memory that has just been freed is taken and spoiled at once, by whoever does not wait for those that use it.
        outs = step(away, q_len, "cuda", seed=count)
        junk = [torch.full((1 << 20,), torch.nan, device="cuda") for _ in range(4)]
        del junk
        check_same_outs(outs, expected, f"step {count}")
    check_same_tokens(away, plain, "at last")


@CUDA_ONLY
def test_a_cache_may_die_while_a_layer_comes() -> None:
    plain, away = both({"preset": "int4-token"})
    for cache in (plain, away):
        step(cache, 300, "cuda")
    stream = away.storages[0].residency._offloader.stream(away.storages[0].device)
    assert stream is not None
    step(away, 1, "cuda")
    with torch.cuda.stream(stream):
        torch.cuda._sleep(SLOW)
    store = away.storages[2]
    store.residency.fetch()
    del away, cache, store
    others = [torch.full((1 << 18,), 7, dtype=torch.uint8, device="cuda") for _ in range(64)]
    torch.cuda.synchronize()
    assert all(bool((other == 7).all()) for other in others)


@CUDA_ONLY
def test_memory_of_the_gpu() -> None:
    """With ten layers, what is left on the GPU is less than three of them, at any time but while a layer grows."""
    config = models.llama(num_hidden_layers=10).config
    used = {}
    for away in (False, True):
        cache = KVQuantCache(config, {"preset": "int8", "offloading": away})
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        step(cache, 20_000, "cuda"), step(cache, 1, "cuda")
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        step(cache, 1, "cuda"), step(cache, 1, "cuda")
        torch.cuda.synchronize()
        used[away] = torch.cuda.max_memory_allocated() - before
    assert used[True] < 0.35 * used[False], used


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_layers_on_two_gpus() -> None:
    plain, away = both({"preset": "int4-token"})
    for cache in (plain, away):
        outs = []
        for count, q_len in enumerate((9, 1, 1, 1)):
            torch.manual_seed(count)
            for index, storage in enumerate(cache.storages):
                device = f"cuda:{int(index > 2)}"
                key, query = torch.randn(BATCH, 2, q_len, HEAD_DIM), torch.randn(BATCH, 4, q_len, HEAD_DIM)
                cache.update(key.to(device), key.to(device), index)
                if count:
                    outs.append(storage.attend(query.to(device), softmax_scale=0.2)[0].cpu())
        if cache is plain:
            expected = outs
    check_same_outs(outs, expected, "two GPUs")
    assert len(residents(away)) <= 4


def test_the_option_goes_through_json() -> None:
    config = KVQuantConfig.from_preset("int4-token", offloading=True)
    assert KVQuantConfig.from_dict(config.to_dict()) == config and config.offloading
    with pytest.raises(TypeError, match="`offloading` must be True or False, got 1"):
        KVQuantConfig(offloading=1)  # type: ignore[arg-type]
    assert not hf_kvquant.KVQuantConfig().offloading
