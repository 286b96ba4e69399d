"""The pool of buffers by itself, and what it is for: caches of `generate` that follow each other share their memory.

That compiled steps are reused with it is tested in `test_compile.py`.
"""

from __future__ import annotations

import copy
import dataclasses
import gc
import pickle
import weakref
from collections.abc import Iterator
from typing import Any

import compare
import models
import pytest
import torch
from models import greedy, left_padded, logits
from transformers.cache_utils import DynamicCache

from hf_kvquant import KVQuantCache, disable, enable, patch, patched, unpatch
from hf_kvquant.state import notes_on
from hf_kvquant.storage import pool
from hf_kvquant.storage.pool import BufferPool
from hf_kvquant.storage.residency import BufferKind
from hf_kvquant.transforms import of_model
from hf_kvquant.upstream.releases import cache_of, with_cache

STATIC = {"preset": "int4-token", "static": True}


class Owner:
    """Something that can die."""


@pytest.fixture(autouse=True)
def no_cycles() -> Iterator[None]:
    """Buffers come back without the help of the collector."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def addresses(cache: KVQuantCache) -> list[int]:
    """Of everything that a decode step reads or writes."""
    tensors = []
    for storage in cache.storages:
        transform = storage.key_transform
        tensors += [*storage.step_tensors(), *(() if transform is None else transform.tensors())]
        tensors += [] if storage.buffers.counters is None else [storage.buffers.counters]
    return [tensor.data_ptr() for tensor in tensors]


# --- the pool ---------------------------------------------------------------------------------------------------------


def test_what_a_dead_owner_had_can_be_taken_once() -> None:
    buffers, idle, owner = torch.zeros(3), BufferPool(), Owner()
    assert idle.take("layer 0", 5) is None
    idle.expect(owner, "layer 0", 5, buffers)
    assert idle.take("layer 0", 5) is None, "the owner lives"
    del owner
    assert list(idle.kinds()) == [5]
    assert idle.take("layer 0", 5) is buffers
    assert idle.take("layer 0", 5) is None and not list(idle.kinds())


def test_what_does_not_fit_is_let_go() -> None:
    idle, owner, buffers = BufferPool(), Owner(), torch.zeros(3)
    watched = weakref.ref(buffers)
    idle.expect(owner, "layer 0", 5, buffers)
    del owner, buffers
    assert watched() is not None
    assert idle.take("layer 0", 6) is None
    assert watched() is None, "there is never room for both"


def test_the_last_to_die_stays() -> None:
    idle, owners = BufferPool(), [Owner(), Owner()]
    for number, owner in enumerate(owners):
        idle.expect(owner, "layer 0", 5, number)
    del owner
    owners.clear()
    assert len(list(idle.kinds())) == 1


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_closed_pool_keeps_nothing(when: str) -> None:
    idle, owner, buffers = BufferPool(), Owner(), torch.zeros(3)
    watched = weakref.ref(buffers)
    idle.expect(owner, "layer 0", 5, buffers)
    del buffers
    if when == "before":
        idle.close()
        del owner
    else:
        del owner
        idle.close()
    assert watched() is None


# --- caches of generate -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", ["int8", "int4-token", "int4-channel", "none"])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_the_next_call_finds_the_same_addresses(family: str, preset: str) -> None:
    model = models.build(family)
    of_model.set_smoothing(model, {0: torch.full((2, models.HEAD_DIM), 2.0)})
    with patched(model, {"preset": preset, "static": True}):
        output = greedy(model, left_padded())
        first, expected = addresses(cache_of(output)), logits(output)
        storages = [weakref.ref(storage) for storage in cache_of(output).storages]
        del output
        assert not any(storage() for storage in storages)
        longer = greedy(model, left_padded(pads=(7, 0, 1), tokens=30), 9)
        assert addresses(cache_of(longer)) == first
        del longer
        again = greedy(model, left_padded())
        assert addresses(cache_of(again)) == first
    compare.assert_same(logits(again), expected, "logits after another call has used the buffers")


def test_transforms_follow_the_model() -> None:
    """Their tensors stay where they are, their numbers are those of the newest call."""
    model = models.build("llama")
    with patched(model, {"preset": "int8", "static": True}):
        places = []
        for factor in (2.0, 3.0):
            factors = torch.full((2, models.HEAD_DIM), factor)
            of_model.set_smoothing(model, {0: factors})
            transform = cache_of(greedy(model, left_padded())).storages[0].key_transform
            assert torch.equal(transform.smoothing, factors)
            assert transform.smoothing.data_ptr() != factors.data_ptr(), "the model's own are not written to"
            places.append(transform.smoothing.data_ptr())
            del transform
    assert places[0] == places[1]


def test_a_cache_that_somebody_keeps_is_left_alone() -> None:
    model = models.build("llama")
    with patched(model, STATIC):
        kept = cache_of(greedy(model, left_padded()))
        before = [layer.keys.clone() for layer in kept.layers]
        other = cache_of(greedy(model, left_padded(pads=(1, 1, 1))))
        assert not set(addresses(other)) & set(addresses(kept))
        for layer, expected in zip(kept.layers, before, strict=True):
            compare.assert_same(layer.keys, expected, "keys of the cache that was kept")


def test_a_layer_that_somebody_keeps_is_left_alone() -> None:
    model = models.build("llama")
    with patched(model, STATIC):
        layer = cache_of(greedy(model, left_padded())).layers[0]
        before, place = layer.keys.clone(), layer.storage.planes[0].codes.data_ptr()
        other = cache_of(greedy(model, left_padded(pads=(1, 1, 1))))
        assert other.storages[0].planes[0].codes.data_ptr() != place
        compare.assert_same(layer.keys, before, "keys of the layer that was kept")


CHANGES = {
    "select": lambda cache: cache.batch_select_indices(torch.tensor([0, 1])),
    "repeat": lambda cache: cache.batch_repeat_interleave(2),
    "release": lambda cache: [storage.release() for storage in cache.storages],
    "move": lambda cache: [storage.move("meta") for storage in cache.storages],
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_cache_that_parts_with_its_buffers_brings_nothing_back(change: str) -> None:
    model = models.build("llama")
    with patched(model, STATIC):
        cache = cache_of(greedy(model, left_padded()))
        codes = weakref.ref(cache.storages[0].planes[0].codes)
        CHANGES[change](cache)
        assert codes() is None
        del cache
        assert not any(isinstance(kind, BufferKind) for kind in notes_on(model).pool.kinds())
        greedy(model, left_padded())


@pytest.mark.parametrize("copier", [copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))])
def test_a_copy_of_a_cache_has_buffers_of_its_own(copier: Any) -> None:
    model = models.build("llama")
    with patched(model, STATIC):
        cache = cache_of(greedy(model, left_padded()))
        twin = copier(cache)
        before, place = [layer.keys.clone() for layer in twin.layers], addresses(twin)
        assert not set(place) & set(addresses(cache))
        del cache
        other = cache_of(greedy(model, left_padded(pads=(2, 2, 2))))
        for layer, expected in zip(twin.layers, before, strict=True):
            compare.assert_same(layer.keys, expected, "keys of the copy")
        del twin
        assert not list(notes_on(model).pool.kinds()), "what was copied belongs to no pool"
        del other


def test_another_batch_or_dtype_has_other_buffers() -> None:
    model = models.build("llama")
    with patched(model, STATIC):
        greedy(model, left_padded())
        alone = cache_of(greedy(model, {name: x[:1] for name, x in left_padded().items()}))
        assert alone.batch_size == 1
        del alone
        model.bfloat16()
        cast = cache_of(greedy(model, left_padded()))
        assert cast.storages[0].dtype == torch.bfloat16 and cast.layers[0].keys.dtype == torch.bfloat16
        del cast
        kinds = [kind for kind in notes_on(model).pool.kinds() if isinstance(kind, BufferKind)]
        assert {kind.dtype for kind in kinds} == {torch.bfloat16}, "those of before the cast are gone"


def test_a_kind_names_all_that_buffers_depend_on() -> None:
    model = models.build("llama")
    with patched(model, STATIC):
        greedy(model, left_padded())
        kind = next(kind for kind in notes_on(model).pool.kinds() if isinstance(kind, BufferKind))
    assert [field.name for field in dataclasses.fields(kind)] == [
        "formats", "shape", "max_cache_len", "slack", "dtype", "device", "transform"
    ]  # fmt: skip
    assert kind.shape == (3, 2, models.HEAD_DIM, models.HEAD_DIM) and kind.max_cache_len == 256
    assert kind.transform == (False, False, True)


def test_announced_crops_have_other_buffers() -> None:
    """Their tails are longer, before the first tokens and after."""
    model = models.build("llama")
    with patched(model, {"preset": "int4-channel", "static": True}):
        pool = notes_on(model).pool
        rows = []
        for is_announced in (False, True, False):
            cache = KVQuantCache(model.config, "int4-channel", max_cache_len=256, pool=pool)
            if is_announced:
                cache.activate_past_recording()
            greedy(model, left_padded(), **with_cache(cache))
            tail = cache.storages[0].planes[0].tail
            assert tail is not None
            rows.append(tail.shape[2])
            del cache, tail
        assert rows == [128, 128 + 64, 128]


def test_growing_caches_and_those_of_transformers_leave_nothing() -> None:
    model = models.build("llama")
    with patched(model, "int4-token"):
        greedy(model, left_padded())
        greedy(model, left_padded(), **with_cache(DynamicCache(config=model.config)))
        greedy(model, left_padded(), **with_cache(KVQuantCache(model.config, "int4-token", max_cache_len=30)))
        assert not list(notes_on(model).pool.kinds())


@pytest.mark.parametrize("undo", ["unpatch", "patch anew", "leave a block"])
def test_what_undoes_a_patch_frees_the_buffers(undo: str) -> None:
    model = models.build("llama")
    patch(model, STATIC if undo != "leave a block" else "int8")
    with patched(model, STATIC) if undo == "leave a block" else patched(models.llama(), "int8"):
        kept = cache_of(greedy(model, left_padded()))
        greedy(model, left_padded())
        old = notes_on(model).pool
        assert list(old.kinds())
        if undo == "patch anew":
            patch(model, STATIC)
        elif undo == "unpatch":
            unpatch(model)
    assert not list(old.kinds())
    del kept
    assert not list(old.kinds()), "what comes back later goes as well"
    assert notes_on(model).pool is not old
    notes_on(model).drop_buffers()


def test_disable_frees_the_buffers_of_models_that_are_not_patched() -> None:
    flag = {"cache_implementation": "quantized", "cache_config": {"backend": "hf_kvquant", **STATIC}}
    plain, ours = models.build("llama"), models.build("llama")
    patch(ours, STATIC)
    enable()
    try:
        greedy(plain, left_padded(), **flag), greedy(ours, left_padded())
        pools = [notes_on(model).pool for model in (plain, ours)]
        assert all(list(each.kinds()) for each in pools)
    finally:
        disable()
    assert [bool(list(each.kinds())) for each in pools] == [False, True]


@pytest.mark.parametrize("copier", [copy.copy, copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_of_a_model_has_a_pool_of_its_own(copier: Any) -> None:
    model = models.build("llama")
    patch(model, STATIC)
    greedy(model, left_padded())
    idle = len(list(notes_on(model).pool.kinds()))
    twin = copier(model)
    assert notes_on(twin).pool is not notes_on(model).pool and not list(notes_on(twin).pool.kinds())
    assert len(list(notes_on(model).pool.kinds())) == idle > 0


def test_a_pool_dies_with_its_model() -> None:
    model = models.build("llama")
    patch(model, STATIC)
    greedy(model, left_padded())
    watched = weakref.ref(notes_on(model).pool)
    del model
    gc.collect()  # a patched model is in a cycle with its hook
    assert watched() is None


def test_the_garbage_of_the_compiler_is_collected(monkeypatch: pytest.MonkeyPatch) -> None:
    collected: list[None] = []
    monkeypatch.setattr("hf_kvquant.storage.pool.gc.collect", lambda: collected.append(None))
    number = 3
    monkeypatch.setattr(pool, "_num_graphs", lambda: number)
    idle = BufferPool()
    idle.reclaim()
    assert not collected
    number = 4
    idle.reclaim(), idle.reclaim()
    assert len(collected) == 1
