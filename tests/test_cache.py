"""`KVQuantCache` against the contract of transformers' caches.

Operations are compared with transformers' own `DynamicCache`, which for quantised presets holds tensors that went
through the specification (`models.ReferenceCache`): equal to the last bit, whatever was done to the batch.
"""

from __future__ import annotations

import copy
import gc
import io
import logging
import operator
import pickle
import re
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import compare
import models
import pytest
import torch
from models import ReferenceCache, ReferenceLayer, greedy, left_padded, logits
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import CONFIG_MAPPING, AutoConfig
from transformers.cache_utils import (
    DYNAMIC_LAYER_TYPE_MAPPING,
    STATIC_LAYER_TYPE_MAPPING,
    Cache,
    DynamicCache,
    DynamicLayer,
    QuantizedCache,
    StaticLayer,
)

import hf_kvquant
from hf_kvquant import PRESETS, KVFormat, KVQuantCache, KVQuantConfig, patched
from hf_kvquant.cache.handle import KVHandle, KVLength
from hf_kvquant.cache.kvquant_cache import _log_nothing_to_quantize
from hf_kvquant.cache.layers import KVQuantLayer
from hf_kvquant.models.layers import count_layers
from hf_kvquant.spec.key_transform import KeyTransform
from hf_kvquant.upstream.releases import CACHE, cache_of, is_since, with_cache

BATCH, KV_HEADS, HEAD_DIM = 3, 2, models.HEAD_DIM
CONFIG = models.llama().config
MAX_CACHE_LEN = 90


def new_tokens(count: int, batch: int = BATCH, heads: int = KV_HEADS, head_dim: int = HEAD_DIM) -> tuple[Tensor, ...]:
    return torch.randn(batch, heads, count, head_dim), torch.randn(batch, heads, count, head_dim)


def give(cache: Cache, chunks: list[list[tuple[Tensor, ...]]]) -> Cache:
    """Update every layer with every chunk."""
    for chunk in chunks:
        for index, (key, value) in enumerate(chunk):
            cache.update(key, value, index)
    return cache


def chunks_of(*counts: int, batch: int = BATCH) -> list[list[tuple[Tensor, ...]]]:
    return [[new_tokens(count, batch) for _ in range(2)] for count in counts]


def make(preset: Any, kind: str) -> KVQuantCache:
    return KVQuantCache(CONFIG, preset, max_cache_len=MAX_CACHE_LEN if kind == "static" else None)


def check_same_tokens(cache: KVQuantCache, expected: Cache, what: str) -> None:
    """The tokens that both hold, layer by layer."""
    for index, (layer, other) in enumerate(zip(cache.layers, expected.layers, strict=True)):
        length = other.get_seq_length()
        assert int(layer.get_seq_length()) == length, f"{what}, layer {index}: length"
        if length:
            key, value = other.keys, other.values
            if isinstance(other, ReferenceLayer):
                key, value = other.seen(0), other.seen(1)
            compare.assert_same(layer.keys[:, :, :length], key, f"{what}, keys of layer {index}")
            compare.assert_same(layer.values[:, :, :length], value, f"{what}, values of layer {index}")


kinds = pytest.mark.parametrize("kind", ["growing", "static"])
WINDOWED = {"preset": "int4-token", "sink_length": 2, "residual_length": 4}
INT8 = models.INT8_CODES  # codes alone
presets = pytest.mark.parametrize("preset", [*PRESETS, WINDOWED], ids=[*PRESETS, "windowed"])

# --- what a cache is --------------------------------------------------------------------------------------------------


@kinds
def test_what_a_cache_is(kind: str) -> None:
    cache = make("int8", kind)
    assert isinstance(cache, QuantizedCache) and isinstance(cache, Cache)
    assert not isinstance(cache, DynamicCache)
    assert len(cache) == 2 and all(type(layer) is KVQuantLayer for layer in cache.layers)
    assert not any(isinstance(layer, (DynamicLayer, StaticLayer)) for layer in cache.layers)
    assert cache.is_compileable == (kind == "static")
    assert cache.is_croppable and not cache.is_initialized
    assert cache.is_sliding == [False, False]
    assert cache.get_max_length() == (MAX_CACHE_LEN if kind == "static" else -1)


def test_a_cache_is_not_moved_by_accelerate() -> None:
    assert not hasattr(make("int8", "growing"), "to"), "send_to_device moves whatever has `to`"


def test_the_layer_types_of_transformers_are_left_alone() -> None:
    assert DYNAMIC_LAYER_TYPE_MAPPING["full_attention"] is DynamicLayer
    assert STATIC_LAYER_TYPE_MAPPING["full_attention"] is StaticLayer
    assert KVQuantLayer not in (*DYNAMIC_LAYER_TYPE_MAPPING.values(), *STATIC_LAYER_TYPE_MAPPING.values())
    assert KVQuantLayer._layer_type is None


@kinds
def test_lengths_and_mask_sizes(kind: str) -> None:
    cache = make("int8", kind)
    assert cache.get_seq_length() == 0
    assert cache.get_mask_sizes(5, 0) == (5, 0), "while empty, the mask is that of the first chunk alone"
    assert cache.get_mask_sizes(5, 0)[0].is_first_chunk
    give(cache, chunks_of(5))
    for length in (5, 6, 7):
        seen = cache.get_seq_length()
        if kind == "static":
            assert isinstance(seen, Tensor) and seen.ndim == 0 and seen.dtype == torch.int32
        else:
            assert type(seen) is int
        assert int(seen) == length
        size, offset = cache.get_mask_sizes(3, 0)
        assert isinstance(size, KVLength) and not size.is_first_chunk
        assert (size, offset) == (MAX_CACHE_LEN if kind == "static" else length + 3, 0)
        give(cache, chunks_of(1))
    assert cache.is_initialized and cache.batch_size == BATCH
    cache.reset()
    assert int(cache.get_seq_length()) == 0 and cache.get_mask_sizes(4, 0) == (4, 0)


@kinds
@presets
def test_the_first_chunk_comes_back_and_handles_follow(preset: str, kind: str) -> None:
    cache = make(preset, kind)
    key, value = new_tokens(7)
    same_key, same_value = cache.update(key, value, 0)
    assert same_key is key and same_value is value
    key, value = new_tokens(2)
    key_handle, value_handle = cache.update(key, value, 0)
    assert isinstance(key_handle, KVHandle) and isinstance(value_handle, KVHandle)
    assert key_handle.step is value_handle.step
    assert list(key_handle.shape) == [BATCH, KV_HEADS, MAX_CACHE_LEN if kind == "static" else 9, HEAD_DIM]


@pytest.mark.parametrize("kind", ["growing", "static"])
def test_a_layer_knows_the_dtype_and_the_device_of_its_keys(kind: str) -> None:
    cache = make("int4-token", kind)
    for name in ("dtype", "device"):
        with pytest.raises(AttributeError, match=f"{name} is known after the first update"):
            getattr(cache.layers[0], name)
    for chunk in (4, 1):
        for index, dtype in enumerate((torch.bfloat16, torch.float16)):
            cache.update(*(each.to(dtype) for each in new_tokens(chunk)), index)
            layer: Any = cache.layers[index]
            for dense in (layer.keys, layer.values):
                assert (layer.dtype, layer.device) == (dtype, torch.device("cpu")) == (dense.dtype, dense.device)
    cache.reset()
    assert hasattr(cache.layers[0], "dtype") == (kind == "static"), "a growing layer has dropped its buffers"


@pytest.mark.parametrize("layer_type", ["full_attention", "sliding_attention"])
def test_keys_are_not_assigned(layer_type: str) -> None:
    config = AutoConfig.for_model("mistral", sliding_window=8, layer_types=[layer_type] * 2, **models.COMMON)
    cache = give(KVQuantCache(config, "int4-token"), chunks_of(6, 1))
    layer: Any = cache.layers[0]
    before = layer.keys.clone()
    with pytest.raises(AttributeError, match=r"^KVQuantLayer: `keys` must not be assigned, got Tensor: the cache "):
        layer.keys = before
    with pytest.raises(AttributeError, match=r"`values` must not be assigned, got Tensor: .* Give a new cache"):
        layer.values = layer.values * 2
    compare.assert_same(layer.keys, before, "keys")


CHANGES: dict[str, Callable[[Any], object]] = {
    "item": lambda keys: keys.__setitem__((slice(None), 0), 0),
    "item of a view": lambda keys: keys[0][0].__setitem__(0, 1),
    "operator": lambda keys: operator.iadd(keys, 1),
    "operator on a slice": lambda keys: operator.imul(keys[:, :, -1], 2),
    "method": lambda keys: keys.zero_(),
    "method of a view": lambda keys: keys.transpose(1, 2).unbind(0)[1].add_(1),
    "function": lambda keys: torch.nn.init.zeros_(keys),
    "out": lambda keys: torch.add(torch.ones_like(keys), 1, out=keys),
}


@pytest.mark.parametrize("change", CHANGES)
def test_keys_are_not_changed_in_place(change: str) -> None:
    """They would stay as they are in the codes."""
    cache = give(KVQuantCache(CONFIG, "int4-token"), chunks_of(6, 1))
    layer: Any = cache.layers[0]
    before = layer.keys.clone()
    for keys in (layer.keys, layer.values):
        with pytest.raises(RuntimeError, match=r"`keys` and `values` must not be changed in place, got \w+: .*clone"):
            CHANGES[change](keys)
    compare.assert_same(layer.keys, before, "keys")


@pytest.mark.parametrize("change", CHANGES)
def test_changes_are_kept_where_nothing_is_quantised(change: str) -> None:
    """As in a cache of transformers. The view is that of the buffers."""
    cache = give(KVQuantCache(CONFIG, "none"), chunks_of(6, 1))
    layer: Any = cache.layers[0]
    before = layer.keys.clone()
    CHANGES[change](layer.keys)
    assert not torch.equal(layer.keys, before)


def test_what_is_made_of_keys_is_a_tensor_like_any_other() -> None:
    cache = give(KVQuantCache(CONFIG, "int4-token"), chunks_of(6, 1))
    layer: Any = cache.layers[0]
    saved = io.BytesIO()
    torch.save(layer.keys, saved)
    saved.seek(0)
    made = [layer.keys * 1, layer.keys.clone(), copy.deepcopy(layer.keys), torch.load(saved, weights_only=True)]
    other = torch.zeros_like(layer.keys)
    other[:] = layer.keys
    for each in (*made, other):
        assert type(each) is Tensor
        compare.assert_same(each, layer.keys, "keys")
        each += 1


def test_overrides_by_layer() -> None:
    cache = KVQuantCache(CONFIG, {"preset": "int4-token", "layers": {"1": {"preset": "none", "value": "fp8"}}})
    assert [layer.storage.formats.describe() for layer in cache.layers] == [
        "key int4-head-asymmetric-clip0.9375, value int4-head-asymmetric",
        "key none, value fp8-head-symmetric",
    ]
    assert repr(cache.layers[0]) == (
        "KVQuantLayer(key int4-head-asymmetric-clip0.9375, value int4-head-asymmetric, rotate)"
    )
    assert cache.quant_config == KVQuantConfig.resolve(cache.quant_config.to_dict())


def test_bytes() -> None:
    cache = KVQuantCache(CONFIG, INT8)
    assert cache.num_bytes == cache.num_bytes_held == cache.bytes_per_token == 0
    give(cache, chunks_of(10))
    per_token = 2 * 2 * KV_HEADS * (HEAD_DIM + 2)  # layers, keys and values, heads, codes and a float16 scale
    assert cache.bytes_per_token == per_token
    assert cache.num_bytes_held == per_token * BATCH * 10
    assert cache.num_bytes == per_token * BATCH * 64, "capacities are multiples of 64 tokens"


# --- memory -----------------------------------------------------------------------------------------------------------


class PeakBytes(TorchDispatchMode):
    """The most bytes that tensors made under it took at once, by memory rather than by view."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._made: list[weakref.ref[Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        outputs = result if isinstance(result, (tuple, list)) else (result,)
        self._made += [weakref.ref(x) for x in outputs if isinstance(x, Tensor)]
        self.peak = max(self.peak, self.alive())
        return result

    def alive(self) -> int:
        tensors = [x for x in (reference() for reference in self._made) if x is not None]
        self._made = [weakref.ref(x) for x in tensors]
        return sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}.values())


@kinds
@presets
def test_raw_tokens_are_not_held(preset: str, kind: str) -> None:
    """Neither a prompt's nor those of a step that was attended to; what is pending has to be, until then."""
    cache = make(preset, kind)
    gc.disable()
    try:
        for count in (20, 1):
            key, value = new_tokens(count)
            watched = [weakref.ref(x) for x in (key, value)]
            result = cache.update(key, value, 0)
            if isinstance(result[0], KVHandle):
                cache.storages[0].attend(torch.randn(BATCH, 4, count, HEAD_DIM), softmax_scale=0.1)
            del key, value, result
            assert [reference() for reference in watched] == [None, None]
    finally:
        gc.enable()


@presets
def test_the_first_buffers_are_those_of_the_prompt(preset: str) -> None:
    cache = make(preset, "growing")
    with PeakBytes() as memory:
        chunk = chunks_of(256)
        given = memory.alive()
        give(cache, chunk)
    assert {storage.capacity for storage in cache.storages} == {256}
    temporary = 2 * BATCH * KV_HEADS * 256 * HEAD_DIM * 4  # keys and values of a layer
    assert memory.peak <= given + cache.num_bytes + temporary


@presets
def test_buffers_grow_one_layer_after_the_other(preset: str) -> None:
    config, num_layers = models.build("llama", num_hidden_layers=12).config, 12
    with PeakBytes() as memory:
        cache = KVQuantCache(config, preset)
        for index in range(num_layers):
            cache.update(*new_tokens(256), index)
        before, memory.peak = cache.num_bytes, 0
        for index in range(num_layers):
            cache.update(*new_tokens(1), index)
    assert cache.num_bytes > before
    pending = num_layers * 2 * BATCH * KV_HEADS * HEAD_DIM * 4
    assert memory.peak <= cache.num_bytes + before / num_layers + pending + 4096, "one layer is there twice at a time"


@pytest.mark.parametrize("chunk_size", [None, 50])
@pytest.mark.parametrize("preset", ["int8", "int4-token", {"preset": "int4-token", "static": True}], ids=str)
def test_a_prefill_takes_less_than_one_that_is_not_quantised(preset: Any, chunk_size: int | None) -> None:
    model = models.build("llama", num_hidden_layers=6, max_position_embeddings=512)
    inputs = {"input_ids": torch.randint(3, 90, (2, 256))}
    one_layer = 2 * 2 * KV_HEADS * 256 * HEAD_DIM * 4
    with PeakBytes() as unquantized:
        greedy(model, inputs, 1, prefill_chunk_size=chunk_size)
    with patched(model, preset), PeakBytes() as memory:
        greedy(model, inputs, 1, prefill_chunk_size=chunk_size)
    assert memory.peak <= unquantized.peak + one_layer


# --- what is done to a cache ------------------------------------------------------------------------------------------

OPERATIONS: dict[str, Callable[[Any], Any]] = {
    "crop_nothing": lambda cache: cache.crop(0),
    "crop_one": lambda cache: cache.crop(-1),
    "crop_some": lambda cache: cache.crop(-5),
    "reorder": lambda cache: cache.reorder_cache(torch.tensor([2, 2, 0])),
    "repeat": lambda cache: cache.batch_repeat_interleave(2),
    "select": lambda cache: cache.batch_select_indices(torch.tensor([2, 0])),
    "select_one_twice": lambda cache: cache.batch_select_indices(torch.tensor([1, 1, 0, 2])),
    "select_by_mask": lambda cache: cache.batch_select_indices(torch.tensor([True, False, True])),
    "select_from_the_end": lambda cache: cache.batch_select_indices(torch.tensor([-1, 0])),
    "select_by_list": lambda cache: cache.batch_select_indices([1, -3]),
}


@kinds
@presets
@pytest.mark.parametrize("operation", OPERATIONS)
def test_operations(operation: str, preset: str, kind: str) -> None:
    """Behind a step whose tokens may still be pending; then more tokens, and a crop into them."""
    cache, expected = make(preset, kind), ReferenceCache(CONFIG, preset)
    chunks = chunks_of(11, 1, 3)
    give(cache, chunks), give(expected, chunks)
    for name in (operation, "crop_one"):
        OPERATIONS[name](cache), OPERATIONS[name](expected)
        check_same_tokens(cache, expected, name)
        more = chunks_of(2, 1, batch=expected.layers[0].keys.shape[0])
        give(cache, more), give(expected, more)
        check_same_tokens(cache, expected, f"more tokens after {name}")
    assert cache.batch_size == expected.layers[0].keys.shape[0]


@kinds
@pytest.mark.parametrize("indices", [[0, 3], [-4], [0, 1, 7], [True, False], [True, False, True, True]], ids=str)
def test_sequences_that_are_not_there_are_refused(indices: list[Any], kind: str) -> None:
    cache, expected, chunks = make("int8", kind), ReferenceCache(CONFIG, "int8"), chunks_of(11, 1)
    give(cache, chunks), give(expected, chunks)
    message = f"KVQuantCache: `indices` must name sequences of a batch of 3, got {indices}. Pass numbers from -3 to 2"
    with pytest.raises(IndexError, match=re.escape(message)):
        cache.batch_select_indices(torch.tensor(indices))
    check_same_tokens(cache, expected, "nothing has changed")


@kinds
@pytest.mark.parametrize("preset", ["none", "int4-token"])
def test_crop_at_every_length(preset: str, kind: str) -> None:
    for length in (1, 2, 63, 64, 65, 66):
        for removed in {1, 2, 63, length - 1, length} & set(range(1, length + 1)):
            cache, expected = make(preset, kind), ReferenceCache(CONFIG, preset)
            chunks = chunks_of(*([length - 1, 1] if length > 1 else [1]))
            give(cache, chunks), give(expected, chunks)
            cache.crop(-removed), expected.crop(-removed)
            assert int(cache.get_seq_length()) == length - removed
            check_same_tokens(cache, expected, f"{removed} of {length}")
            if removed == length:
                assert cache.get_mask_sizes(3, 0) == (3, 0), "an emptied cache takes a first chunk again"


@kinds
def test_crop_removes_at_most_everything(kind: str) -> None:
    cache = give(make("int8", kind), chunks_of(4))
    cache.crop(-9)
    assert int(cache.get_seq_length()) == 0


@kinds
def test_crop_of_nothing(kind: str) -> None:
    cache = make("int8", kind)
    cache.crop(-3)
    cache.crop(0)
    assert not cache.is_initialized and cache.get_seq_length() == 0


def test_a_crop_that_a_later_layer_refuses_leaves_all_layers_alone() -> None:
    config = models.build("qwen2", use_sliding_window=True, sliding_window=6, max_window_layers=1).config
    cache = give(KVQuantCache(config, "int8"), chunks_of(8))
    with pytest.raises(RuntimeError, match="layer 1: `crop` must come before the window of 6 tokens is full"):
        cache.crop(-1)
    assert [int(layer.get_seq_length()) for layer in cache.layers] == [8, 8]


def test_crop_refuses_a_length_to_keep() -> None:
    cache = give(make("int8", "growing"), chunks_of(4))
    message = "KVQuantLayer: `tokens_to_remove` must be 0 or negative, got 3. crop(-n) removes the newest n tokens."
    with pytest.raises(ValueError, match=re.escape(message)):
        cache.crop(3)
    assert cache.get_seq_length() == 4


@pytest.mark.parametrize("operation", ["reorder", "repeat", "select"])
def test_operations_on_an_empty_cache(operation: str) -> None:
    cache = make("int8", "growing")
    OPERATIONS[operation](cache)
    give(cache, chunks_of(4, batch=5))
    assert cache.batch_size == 5


@kinds
@presets
def test_reset(preset: str, kind: str) -> None:
    cache = give(make(preset, kind), chunks_of(70, 1))
    addresses = [plane.data_ptr() for storage in cache.storages for plane in storage.planes[0].tensors()]
    cache.reset()
    assert int(cache.get_seq_length()) == 0
    expected, chunks = ReferenceCache(CONFIG, preset), chunks_of(6, 1)
    give(cache, chunks), give(expected, chunks)
    check_same_tokens(cache, expected, "after a reset")
    if kind == "static":
        assert addresses == [plane.data_ptr() for storage in cache.storages for plane in storage.planes[0].tensors()]


def test_a_growing_cache_takes_another_batch_after_a_reset() -> None:
    cache = give(make("int8", "growing"), chunks_of(4))
    cache.reset()
    give(cache, chunks_of(4, batch=5))
    assert cache.batch_size == 5


@kinds
def test_offload_and_prefetch(kind: str) -> None:
    cache, expected = make("int4-token", kind), ReferenceCache(CONFIG, "int4-token")
    for layer in cache.layers:  # before the first tokens there is nothing to move
        layer.offload()
        layer.prefetch()
    chunks = chunks_of(9, 1)
    give(cache, chunks), give(expected, chunks)
    for layer in cache.layers:
        layer.offload()
        layer.prefetch()
    check_same_tokens(cache, expected, "after coming back")


def test_padding_is_where_the_tokens_of_a_layer_are() -> None:
    """Masks are made on one device, and the layers of a model may be on several."""
    cache = make("int4-channel", "growing")
    cache.notes.starts = torch.tensor([0, 3, 1], dtype=torch.int32)
    for index, device in enumerate(("cpu", "meta")):
        key, value = new_tokens(4)
        cache.update(key.to(device), value.to(device), index)
        starts = cache.storages[index].starts
        assert starts is not None and starts.device.type == device


@kinds
@pytest.mark.parametrize("preset", ["none", "int4-token"])
def test_early_initialization(preset: str, kind: str) -> None:
    cache, expected = make(preset, kind), ReferenceCache(CONFIG, preset)
    cache.early_initialization(BATCH, KV_HEADS, HEAD_DIM, torch.float32, torch.device("cpu"))
    assert cache.is_initialized and cache.batch_size == BATCH and int(cache.get_seq_length()) == 0
    assert cache.get_mask_sizes(4, 0) == (4, 0)
    chunks = chunks_of(4, 1)
    key, value = chunks[0][0]
    assert make(preset, kind).update(key, value, 0)[0] is key
    give(cache, chunks), give(expected, chunks)
    check_same_tokens(cache, expected, "after early initialisation")


def through_pickle(cache: Any) -> Any:
    return pickle.loads(pickle.dumps(cache))


def through_torch_save(cache: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(cache, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@kinds
@presets
@pytest.mark.parametrize("copier", [copy.deepcopy, through_pickle, through_torch_save])
def test_a_copy_in_the_middle_of_a_generation_goes_on_alike(copier: Any, preset: str, kind: str) -> None:
    model, inputs = models.llama(), left_padded()
    cache = make(preset, kind)
    with patched(model, preset):
        half = greedy(model, inputs, 4, **with_cache(cache))
        twin = copier(cache)
        mask = torch.cat([inputs["attention_mask"], torch.ones(3, 4, dtype=torch.long)], 1)
        rest = {"input_ids": half.sequences, "attention_mask": mask}
        expected = greedy(model, rest, 4, **with_cache(cache))
        length = int(twin.get_seq_length())
        output = greedy(model, rest, 4, **with_cache(twin))
    assert length == half.sequences.shape[1] - 1, "the copy does not see what happens to the original"
    compare.assert_same(logits(output), logits(expected), "logits")
    assert len({id(layer.notes) for layer in twin.layers}) == 1, "the layers of a copy share what masks have shown"
    assert twin.layers[0].notes is twin.notes is not cache.notes


@kinds
@pytest.mark.parametrize("preset", ["none", "int8", "int4", WINDOWED], ids=["none", "int8", "int4", "windowed"])
@pytest.mark.parametrize("operation", ["crop_nothing", "crop_some", "reorder", "repeat", "copy", "pickle"])
def test_a_cache_filled_in_inference_mode_goes_on_outside_of_it(operation: str, preset: Any, kind: str) -> None:
    """As transformers' growing caches do, which never write in place. Operations may be in that mode or not."""
    operations = {**OPERATIONS, "copy": copy.deepcopy, "pickle": through_pickle}
    for is_inside in (True, False):
        expected, chunks = ReferenceCache(CONFIG, preset), chunks_of(11, 1, 3)
        give(expected, chunks)
        with torch.inference_mode():
            cache = give(make(preset, kind), copy.deepcopy(chunks))
        with torch.inference_mode(is_inside), torch.no_grad():
            cache = operations[operation](cache) or cache
        if operation in OPERATIONS:
            operations[operation](expected)
        more = chunks_of(40, 1, batch=expected.layers[0].keys.shape[0])
        give(cache, more), give(expected, more)
        check_same_tokens(cache, expected, f"more tokens after {operation}")


def test_a_copy_writes_pending_tokens_first() -> None:
    cache, expected = make("int4-token", "growing"), ReferenceCache(CONFIG, "int4-token")
    chunks = chunks_of(4, 2)
    give(cache, chunks), give(expected, chunks)
    assert cache.storages[0].pending is not None
    check_same_tokens(copy.deepcopy(cache), expected, "copy")


# --- refusals ---------------------------------------------------------------------------------------------------------


def frozen(cache: KVQuantCache) -> list[Tensor]:
    """Everything a cache holds, copied."""
    cache.layers[0].keys  # noqa: B018  writes pending tokens
    cache.layers[1].keys  # noqa: B018
    return [
        plane.clone()
        for storage in cache.storages
        for plane in (*storage.planes[0].tensors(), *storage.planes[1].tensors(), storage.lengths)
    ]


def check_unchanged(cache: KVQuantCache, before: list[Tensor]) -> None:
    for index, (now, then) in enumerate(zip(frozen(cache), before, strict=True)):
        compare.assert_same(now, then, f"tensor {index} of the cache")


def test_a_full_cache_refuses_before_anything_changes() -> None:
    cache = give(KVQuantCache(CONFIG, "int8", max_cache_len=6), chunks_of(4, 1))
    before = frozen(cache)
    message = (
        "layer 0: `max_cache_len` must be at least 7 for these tokens, got 6 (5 held, 2 new). "
        "Build the cache with a larger max_cache_len, or reset it."
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        give(cache, chunks_of(2))
    check_unchanged(cache, before)
    give(cache, chunks_of(1))
    assert int(cache.get_seq_length()) == 6


def test_a_full_cache_in_generate() -> None:
    model = models.llama()
    cache = KVQuantCache(model.config, "int8", max_cache_len=12)
    with patched(model, "int8"), pytest.raises(ValueError, match=r"layer 0: `max_cache_len` must be at least 13"):
        greedy(model, left_padded(), 8, **with_cache(cache))
    assert int(cache.get_seq_length()) == 12
    assert [storage.length for storage in cache.storages] == [12, 12]


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (
            new_tokens(1, batch=2),
            "layer 0: `key` must have batch 3, 2 key-value heads and head_dim 64 like the cache, got shape "
            "[2, 2, 1, 64]. Start a new cache for another batch or model, or use reset, batch_select_indices or "
            "batch_repeat_interleave.",
        ),
        (new_tokens(1, heads=4), "layer 0: `key` must have batch 3, 2 key-value heads and head_dim 64 like the cache"),
        (tuple(x.half() for x in new_tokens(1)), "layer 0: `key` must be torch.float32 on cpu like the cache"),
    ],
    ids=["batch", "heads", "dtype"],
)
def test_misfits_change_nothing(tokens: tuple[Tensor, ...], message: str) -> None:
    cache = give(make("int4-token", "growing"), chunks_of(4))
    before = frozen(cache)
    with pytest.raises(ValueError, match=re.escape(message)):
        cache.update(*tokens, 0)
    check_unchanged(cache, before)


def test_another_batch_in_generate() -> None:
    model = models.llama()
    with patched(model, "int8"):
        cache = cache_of(greedy(model, left_padded()))
        longer = {"input_ids": torch.randint(3, 90, (2, 20))}
        with pytest.raises(ValueError, match="`key` must have batch 3"):
            greedy(model, longer, **with_cache(cache))
    assert cache.get_seq_length() == 14


REFUSALS: dict[str, tuple[Any, Any, dict[str, Any], type[Exception], str]] = {
    "picks_keys": (
        lambda: AutoConfig.for_model("doge"),
        "int8",
        {},
        NotImplementedError,
        "KVQuantCache: doge selects the keys that it attends to, which attention over codes does not support. "
        "Leave the model unpatched.",
    ),
    "parts": (
        lambda: AutoConfig.for_model("blt"),
        "int8",
        {},
        NotImplementedError,
        "KVQuantCache: blt has no `num_hidden_layers` in its config, so the number of cache layers is unknown. "
        "Leave the model unpatched.",
    ),
    "layer_types": (
        lambda: AutoConfig.for_model("deepseek_v4", kv_lora_rank=None),
        "int8",
        {},
        NotImplementedError,
        "KVQuantCache: deepseek_v4 has layers of type ['compressed_sparse_attention', 'heavily_compressed_attention'], "
        "whose caches are not keys and values per head. Leave the model unpatched.",
    ),
    "preset": (
        lambda: CONFIG,
        "int5",
        {},
        ValueError,
        f"KVQuantConfig: `preset` must be one of {list(PRESETS)}, got 'int5'. Did you mean 'int",
    ),
    "key": (
        lambda: CONFIG,
        {"nbit": 4},
        {},
        ValueError,
        "KVQuantConfig: unknown key 'nbit'. Did you mean 'nbits'? Known keys: ",
    ),
    "layers": (
        lambda: CONFIG,
        {"preset": "int8", "layers": {5: "none"}},
        {},
        ValueError,
        "KVQuantCache: `layers` must name layers below 2, the model's number of layers, got [5].",
    ),
    "static_without_a_length": (
        lambda: CONFIG,
        {"preset": "int8", "static": True},
        {},
        ValueError,
        "KVQuantCache: `max_cache_len` must be given for a static cache, got None. "
        "Give the longest sequence in tokens, prompt included.",
    ),
    "head_dim": (
        lambda: models.llama(head_dim=20).config,
        "int8",
        {},
        ValueError,
        "KVFormat: `head_dim` must be a positive multiple of 8, got 20. ",
    ),
    "group_size": (
        lambda: models.llama(head_dim=80).config,
        "int4-g32",
        {},
        ValueError,
        "KVFormat: `group_size` must divide head_dim 80, got 32. Choose a divisor, or granularity 'head'.",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refuses(name: str) -> None:
    config, quant_config, options, error, message = REFUSALS[name]
    with pytest.raises(error, match=re.escape(message)):
        KVQuantCache(config(), quant_config, **options)


@pytest.mark.parametrize("config", [models.llama(), "int4-token", None], ids=["model", "preset", "None"])
def test_a_cache_is_made_from_the_config_of_a_model(config: Any) -> None:
    with pytest.raises(TypeError) as raised:
        KVQuantCache(config, "int4-token")
    name = type(config).__name__
    assert str(raised.value) == f"KVQuantCache: `config` must be the config of a model, got {name}. Pass model.config."


def test_key_transforms_come_by_layer() -> None:
    with pytest.raises(TypeError) as raised:
        KVQuantCache(CONFIG, "int4-token", key_transforms=[None])  # type: ignore[arg-type]
    assert str(raised.value) == (
        "KVQuantCache: `key_transforms` must map layer indices to KeyTransforms, got list. "
        "hf_kvquant.key_transforms returns those of a model."
    )


# --- a cache of another model -----------------------------------------------------------------------------------------


def with_layers(num_layers: int, family: str = "llama") -> Any:
    """A model of so many layers, and of the heads of every other."""
    options = {**models.FAMILIES[family].options, "num_hidden_layers": num_layers, "n_layer": models.LEFT_OUT}
    if "layer_types" in options:
        options["layer_types"] = (options["layer_types"] * num_layers)[:num_layers]
    return models.build(models.FAMILIES[family].model_type, **options)


def call(how: str, model: Any, cache: KVQuantCache) -> None:
    inputs = left_padded()
    with torch.no_grad():
        if how == "generate":
            greedy(model, inputs, **with_cache(cache))
        else:
            model(**inputs, **with_cache(cache))


def other_layers(where: str, expected: int, found: int) -> str:
    return (
        f"{where}: `{CACHE}` must have {expected} layers like the model's own cache, got a cache with {found}. "
        "Was it made for another model? KVQuantCache(model.config, ...) makes one for this."
    )


@pytest.mark.parametrize("num_layers", [1, 3])
@pytest.mark.parametrize("max_cache_len", [None, 32], ids=["growing", "static"])
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gptj"])
@pytest.mark.parametrize("how", ["generate", "forward"])
def test_a_cache_of_other_layers_is_refused_before_the_first(
    how: str, family: str, max_cache_len: int | None, num_layers: int
) -> None:
    model = with_layers(2, family)
    cache = KVQuantCache(with_layers(num_layers, family).config, "int8", max_cache_len=max_cache_len)
    with patched(model, "int8"), pytest.raises(ValueError) as raised:
        call(how, model, cache)
    assert str(raised.value) == other_layers(how, 2, num_layers)
    assert all(storage.is_empty for storage in cache.storages)


@pytest.mark.parametrize("how", ["generate", "forward"])
def test_a_filled_cache_of_other_layers_is_refused(how: str) -> None:
    model, other = with_layers(2), with_layers(3)
    with patched(model, "int8"), patched(other, "int8"):
        cache = KVQuantCache(other.config, "int8")
        call("forward", other, cache)
        with pytest.raises(ValueError, match=re.escape(other_layers(how, 2, 3))):
            call(how, model, cache)
    assert cache.get_seq_length() == left_padded()["input_ids"].shape[1]


def test_without_a_patch_a_layer_too_many_is_refused() -> None:
    model, cache = with_layers(2), KVQuantCache(with_layers(1).config, "int8")
    with pytest.raises(ValueError) as raised:
        call("forward", model, cache)
    assert str(raised.value) == (
        "KVQuantCache: `layer_idx` must be below 1, the layers of this cache, got 1. "
        "Was it made for another model? KVQuantCache(model.config, ...) makes one for this."
    )


def test_layers_that_share_a_cache_are_not_missed() -> None:
    """Gemma 3n's last layers attend to the keys of others, and have no cache layers in old versions of transformers."""
    family = models.FAMILIES["gemma3n_text"]
    model = models.build(family.model_type, **family.options)
    with patched(model, "int8"):
        for how in ("generate", "forward"):
            call(how, model, KVQuantCache(model.config, "int8"))


@pytest.mark.parametrize(
    "model_type", sorted({"minimax_m3_vl_text", "qwen4_exp_text", "unlimited_ocr_text"} & set(CONFIG_MAPPING))
)
def test_models_with_caches_of_their_own(model_type: str) -> None:
    with pytest.raises(NotImplementedError, match="Leave the model unpatched"):
        KVQuantCache(AutoConfig.for_model(model_type))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float8_e4m3fn])
def test_dtypes(dtype: torch.dtype) -> None:
    cache = make("int8", "growing")
    with pytest.raises(TypeError, match=f"layer 0: `key` must be float32, bfloat16 or float16, got {dtype}"):
        cache.update(*(x.to(dtype) for x in new_tokens(1)), 0)
    assert not cache.is_initialized


# --- layers that stay with transformers -------------------------------------------------------------------------------


def test_a_model_whose_layers_are_all_left_out_is_not_quantised(caplog: pytest.LogCaptureFixture) -> None:
    model, inputs = models.build("mistral", sliding_window=4), left_padded()
    expected = greedy(model, inputs)
    _log_nothing_to_quantize.cache_clear()
    with caplog.at_level(logging.WARNING, "hf_kvquant"), patched(model, {"preset": "int4-token", "sliding": False}):
        output = greedy(model, inputs)
    compare.assert_same(logits(output), logits(expected), "logits")
    assert [record.message for record in caplog.records if record.name == "hf_kvquant.cache.kvquant_cache"] == [
        "KVQuantCache: nothing is quantised: this config quantises none of the model's layer types, "
        "['sliding_attention']."
    ]


def test_operations_reach_the_layers_of_transformers() -> None:
    model, inputs = models.family("gemma2"), left_padded()
    with torch.no_grad(), patched(model, "none"):
        config = {"preset": "none", "sliding": False}
        cache, expected = KVQuantCache(model.config, config), DynamicCache(config=model.config)
        for each in (cache, expected):
            model(**inputs, **with_cache(each))
            each.batch_repeat_interleave(2)
            each.reorder_cache(torch.tensor([5, 4, 3, 2, 1, 0]))
            each.batch_select_indices(torch.tensor([0, 3]))
    for layer, other in zip(cache.layers, expected.layers, strict=True):
        compare.assert_same(layer.keys, other.keys, "keys")


@pytest.mark.parametrize("sliding", [True, False])
def test_recording_of_the_past_reaches_sliding_layers(sliding: bool) -> None:
    cache = KVQuantCache(models.family("gemma2").config, {"preset": "int8", "sliding": sliding})
    cache.activate_past_recording()
    assert cache.layers[0].record_past
    assert not hasattr(cache.layers[1], "record_past"), "a full layer needs no record: it can be cropped as it is"


def test_key_transforms_reach_their_layers() -> None:
    halved = KeyTransform(smoothing=torch.full((KV_HEADS, HEAD_DIM), 2.0))
    cache = KVQuantCache(CONFIG, INT8, key_transforms={1: halved})
    assert [storage.key_transform is not None for storage in cache.storages] == [False, True]
    assert repr(cache.layers[0]) == "KVQuantLayer(int8-head-symmetric)"
    assert repr(cache.layers[1]) == "KVQuantLayer(int8-head-symmetric, smooth)"
    model, inputs = models.llama(), left_padded()
    with patched(model, {**INT8, "transforms": []}):
        expected = greedy(model, inputs)
        output = greedy(model, inputs, **with_cache(cache))
    # A symmetric format codes halved keys as the same codes with half the scale.
    compare.assert_same(logits(output), logits(expected), "logits")


@pytest.mark.parametrize(
    ("preset", "is_rotated"), [("none", False), ("fp8", False), ("int8", True), ("int4-g32", True)], ids=str
)
def test_without_a_model_keys_get_what_the_config_can_tell(preset: str, is_rotated: bool) -> None:
    for storage in KVQuantCache(CONFIG, preset).storages:
        assert (storage.key_transform is not None) == is_rotated
        if storage.key_transform is not None:
            assert storage.key_transform.describe() == "rotate"


def test_key_transforms_of_other_layers_are_refused() -> None:
    rotation = KeyTransform(is_rotated=True)
    with pytest.raises(ValueError) as caught:
        KVQuantCache(CONFIG, "int8", key_transforms={0: rotation, 2: rotation})
    assert str(caught.value) == (
        "KVQuantCache: `key_transforms` must name layers whose cache is quantised, which are [0, 1], got [2]. "
        "Was it made for another model?"
    )
    config = models.family("gemma2").config
    with pytest.raises(ValueError, match=r"layers whose cache is quantised, which are \[1\], got \[0\]\."):
        KVQuantCache(config, {"preset": "int8", "sliding": False}, key_transforms={0: rotation})
    assert KVQuantCache(config, "int8", key_transforms={0: rotation}).storages[0].key_transform is not None
    # What a growing cache takes serves a static one.
    KVQuantCache(config, "int8", max_cache_len=64, key_transforms={0: rotation, 1: rotation})


def test_formats_beyond_the_presets() -> None:
    config = KVQuantConfig(key=KVFormat("int8", "token"), value=KVFormat("int4", "group", 16, symmetric=False))
    cache, expected = KVQuantCache(CONFIG, config), ReferenceCache(CONFIG, config)
    chunks = chunks_of(5, 1)
    give(cache, chunks), give(expected, chunks)
    check_same_tokens(cache, expected, "tokens")


@pytest.mark.parametrize(
    ("family", "config", "message"),
    [
        ("gemma3n_text", {"layers": {3: "int8"}}, "[0, 1], got 3: it reads the cache of layer 1."),
        (
            "gemma2",
            {"layers": {0: "int8"}, "sliding": False},
            "[1], got 0: its cache (sliding_attention) is not quantised.",
        ),
        ("qwen3_next", {"layers": {0: "none"}}, "[1], got 0: its cache (linear_attention) is not quantised."),
    ],
    ids=["shared", "sliding", "linear"],
)
def test_settings_for_layers_that_are_not_quantised_are_refused(
    family: str, config: dict[str, Any], message: str
) -> None:
    text_config = models.family(family).config
    if "reads" in message and count_layers(text_config) == 2:
        pytest.skip("this version of transformers has no cache layers for them")
    with pytest.raises(ValueError) as raised:
        KVQuantCache(text_config, {"preset": "int4-token", **config})
    expected = f"KVQuantCache: `layers` must name layers whose cache is quantised, which are {message} Leave it out."
    assert str(raised.value) == expected


@pytest.mark.skipif(not is_since("5.24"), reason="it has no such model")
def test_a_model_without_a_cache_of_its_own_is_refused() -> None:
    """Its layers all attend to the model that it assists."""
    with pytest.raises(NotImplementedError) as raised:
        KVQuantCache(AutoConfig.for_model("gemma4_unified_assistant"), "int4-token")
    assert str(raised.value) == (
        "KVQuantCache: gemma4_unified_text attends to the cache of another model in every layer, and has none of its "
        "own. Leave the model unpatched."
    )


# --- host time --------------------------------------------------------------------------------------------------------


def calls_of_a_step(num_layers: int) -> int:
    """Python calls of the package in an eager decode step."""
    package, calls = Path(hf_kvquant.__file__).parent, 0

    def count(frame: Any, event: str, _: Any) -> None:
        nonlocal calls
        calls += event == "call" and package in Path(frame.f_code.co_filename).parents

    model = models.llama(num_hidden_layers=num_layers)
    with patched(model, "int8"), torch.no_grad():
        cache = KVQuantCache(model.config, "int8")
        model(torch.full((2, 9), 3), **with_cache(cache))
        model(torch.full((2, 1), 3), **with_cache(cache))
        sys.setprofile(count)
        try:
            model(torch.full((2, 1), 3), **with_cache(cache))
        finally:
            sys.setprofile(None)
    return calls


def test_a_step_makes_few_calls_in_each_layer() -> None:
    """Once there were 43, of which two fifths counted tokens."""
    few, many = calls_of_a_step(2), calls_of_a_step(6)
    assert 0 < many - few <= 18 * 4
