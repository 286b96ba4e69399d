"""Layers with a sliding window in static caches: what growing ones compute (`test_rings.py`), in buffers that stay.

Steps of both are compared token by token: codes to the bit, attention within the order of sums.
"""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import compare
import models
import pytest
import tolerances
import torch
from cases import times
from hypothesis import given
from hypothesis import strategies as st
from models import ReferenceCache, check_against_reference, greedy, left_padded, logits
from test_cache import through_pickle
from test_rings import (
    BATCH,
    CONFIGS,
    DENSE,
    DENSE_BLOCKS,
    HEAD_DIM,
    KV_HEADS,
    LONG,
    MODEL_CONFIGS,
    PADS,
    Q_HEADS,
    RING_WINDOWS,
    SLIDING,
    TENSOR,
    WINDOWS,
    configs,
    each_window_with_some_configs,
    model_of,
)
from torch import Tensor
from transformers.cache_utils import StaticSlidingWindowLayer
from transformers.masking_utils import sliding_window_causal_mask_function

from hf_kvquant import KVQuantCache, patched, report
from hf_kvquant.attention.registry import attention_mask
from hf_kvquant.cache.handle import KVHandle, KVLength
from hf_kvquant.cache.saved_layer import _most_held
from hf_kvquant.storage import rewind
from hf_kvquant.storage.layer_store import LayerStore
from hf_kvquant.storage.pool import BufferPool
from hf_kvquant.storage.rows import Ring
from hf_kvquant.upstream.releases import cache_of, with_cache
from hf_kvquant_evals.measuring.pairs import PairCounter, count_pairs, pairs_of

MAX_CACHE_LEN = 1100
# Past the end of every ring, with chunks that a ring is too short for behind others.
# Token by token over the end of a block (128), over where dense windows leave it (137, 198), and over the end of the
# ring (256).
STEPS = (80, 1, 1, 7, *[1] * 55, 40, *[1] * 20, 45, *[1] * 12, 30, *[1] * 6, 260, 1, 300, 2)
PROMPT = left_padded(tokens=250, pads=(3, 0, 200))


class Twins:
    """A static cache and a growing one of one sliding-window layer, which take the same tokens."""

    def __init__(
        self,
        window: int,
        config: Any,
        pads: tuple[int, ...] = (0,) * BATCH,
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
        max_cache_len: int = MAX_CACHE_LEN,
    ) -> None:
        self.static = KVQuantCache(MODEL_CONFIGS[window], config, max_cache_len=max_cache_len)
        self.growing = KVQuantCache(MODEL_CONFIGS[window], config)
        self.starts = torch.tensor(pads, dtype=torch.int32, device=device)
        self.device, self.dtype = device, dtype

    @property
    def storage(self) -> LayerStore:
        (layer,) = self.static.layers
        assert layer.storage.window
        return layer.storage

    def both(self) -> tuple[KVQuantCache, KVQuantCache]:
        return self.static, self.growing

    def give(self, tokens: int, how: str = "attends") -> None:
        """Take tokens; those behind others are attended to, or seen dense before that."""
        batch = self.starts.shape[0]
        key, value = torch.randn(2, batch, KV_HEADS, tokens, HEAD_DIM).to(self.device, self.dtype)
        size, offset = self.growing.get_mask_sizes(tokens, 0)
        shown = int(size)
        handles = []
        for cache in self.both():
            cache.notes.starts = self.starts
            handles.append(cache.update(key, value, 0))
        length = int(self.growing.get_seq_length())
        assert int(self.static.get_seq_length()) == length
        if not isinstance(handles[0][0], KVHandle):
            compare.assert_same(handles[0][0], key, "the first chunk")
            return
        ours, theirs = (pair[0].step.storage for pair in handles)

        def check_dense() -> None:
            is_shown = torch.arange(offset, length, device=self.device) >= self.starts.unsqueeze(1)
            for name, x, y in zip(("keys", "values"), ours.dequantize(), theirs.dequantize(), strict=True):
                assert not x[:, :, length:].any() and not (ours.is_ring and x[:, :, :offset].any())
                x, y = (each.masked_fill(~is_shown[:, None, :, None], 0) for each in (x[:, :, offset:length], y))
                assert y.shape[2] == shown
                compare.assert_same(x, y.cpu(), f"{name} at {length} tokens")

        if how == "dense":
            ours.starts = theirs.starts = self.starts
            check_dense()
        if how in ("attends", "dense", "attends once"):
            query = torch.randn(batch, Q_HEADS, tokens, HEAD_DIM).to(self.device, self.dtype)
            options: dict[str, Any] = {"softmax_scale": 0.3, "starts": self.starts}
            (out, lse), (expected, expected_lse) = (storage.attend(query, **options) for storage in (ours, theirs))
            if how != "attends once":
                again, _ = ours.attend(query, **options)  # as a layer does that shares keys and values
                compare.assert_same(again, out.cpu(), "attention, a second time")
            bound = 1e-4 if self.dtype == torch.float32 else 0.02 * float(expected.abs().max())
            compare.assert_close(out.float(), expected.float().cpu(), bound, f"attention at {length} tokens")
            compare.assert_close(lse, expected_lse.cpu(), 10 * bound, f"lse at {length} tokens")
            check_dense()
        ours.flush(), theirs.flush()


@each_window_with_some_configs
@configs
@pytest.mark.parametrize("window, dtype", RING_WINDOWS, ids=str)
def test_a_static_ring_is_a_growing_one(window: int, dtype: torch.dtype, config: Any, device: str) -> None:
    twins = Twins(window, config, PADS, device, dtype)
    addresses = None
    for index, tokens in enumerate(STEPS):
        how = ("attends", "dense", "flushes")[index % 3] if tokens == 1 else ("dense", "attends")[index % 2]
        twins.give(tokens, how)
        addresses = addresses or twins.storage.addresses()
    assert twins.storage.addresses() == addresses and twins.storage.capacity == 256 and twins.storage.is_ring
    assert twins.storage.num_bytes_held <= twins.storage.num_bytes


@pytest.mark.parametrize("first", [1, 5, 6, 127, 128, 255, 256, 257, 400, 900])
@pytest.mark.parametrize("config", ["int8", "int4-channel", DENSE, DENSE_BLOCKS, TENSOR], ids=str)
def test_first_chunks(first: int, config: Any) -> None:
    twins = Twins(6, config)
    twins.give(first)
    for tokens in (1, 1, 9, 70):
        twins.give(tokens, "dense")


@pytest.mark.parametrize("window", [6, 130])
@pytest.mark.parametrize("config", ["int8", "int4-channel", DENSE], ids=str)
def test_caches_without_room_for_a_ring(config: Any, window: int) -> None:
    twins = Twins(window, config, max_cache_len=200)
    for tokens in (100, 1, 90, *[1] * 9):
        twins.give(tokens)
    assert not twins.storage.is_ring and twins.storage.capacity == 256
    with pytest.raises(ValueError, match="layer 0: `max_cache_len` must be at least 201 for these tokens, got 200"):
        twins.static.update(*torch.randn(2, BATCH, KV_HEADS, 1, HEAD_DIM), 0)


@pytest.mark.parametrize("config", ["int8", "int4-channel", DENSE, DENSE_BLOCKS], ids=str)
def test_operations(config: Any) -> None:
    twins = Twins(65, config, PADS)
    for tokens in (300, 1, 30):
        twins.give(tokens)
    order = torch.tensor([2, 0, 1])
    twice, some = torch.arange(BATCH).repeat_interleave(2), torch.tensor([1, 4, 5])
    for operation, argument, index in (
        ("reorder_cache", order, order),
        ("batch_repeat_interleave", 2, twice),
        ("batch_select_indices", some, some),
    ):
        for cache in twins.both():
            getattr(cache, operation)(argument)
        twins.starts = twins.starts[index]
        twins.give(1)
    for copier in (copy.deepcopy, through_pickle):
        twins.static = copier(twins.static)
        twins.give(2, "dense")
    for cache in twins.both():
        cache.reset()
    assert twins.storage.is_allocated and twins.static.get_seq_length() == 0
    for tokens in (7, 1, 200, 1):
        twins.give(tokens)


@pytest.mark.parametrize("config", ["int8", "int4-channel", DENSE, DENSE_BLOCKS], ids=str)
@pytest.mark.parametrize(
    "held, removed", [(330, 100), (500, 192), (450, 192), (400, 130), (200, 150), (500, 500), (260, 3)]
)
def test_crops(config: Any, held: int, removed: int) -> None:
    """As far as a growing ring whose past was recorded goes."""
    twins = Twins(65, config, PADS)
    twins.give(40)
    for cache in twins.both():
        cache.activate_past_recording()
    for tokens in (held - 40 - 11, *[1] * 11):
        twins.give(tokens, "flushes")
    for cache in twins.both():
        cache.crop(-removed)
    twins.growing.layers[0].record_past = False
    for tokens in (1, 1, 5):
        twins.give(tokens)


class Keeping(Ring):
    """A ring that overwrites nothing, and so takes back what it is asked to."""

    def check_crop(self, *args: Any) -> None:
        pass


@times(30)
@given(data=st.data())
def test_random_operations(data: st.DataObject) -> None:
    window = data.draw(st.sampled_from(WINDOWS), "window")
    config = data.draw(st.sampled_from([config for config in CONFIGS.values() if config is not TENSOR]), "config")
    twins = Twins(window, config, data.draw(st.sampled_from([PADS, (0, 0, 0), (1, 2, 150)]), "pads"))
    twins.growing.storages[0].rows.__class__ = Keeping
    twins.growing.storages[0].rows.full_capacity = 2 * MAX_CACHE_LEN
    for _ in range(data.draw(st.integers(3, 14), "steps")):
        length, batch = int(twins.growing.get_seq_length()), twins.starts.shape[0]
        kind = data.draw(st.sampled_from(["give"] * 6 + ["crop"] * 3 + ["select", "repeat", "copy", "move", "reset"]))
        if kind == "give" or length == 0:
            tokens = data.draw(st.sampled_from([1, 1, 2, 5, 64, 131, 260]), "tokens")
            if length + tokens < MAX_CACHE_LEN - 3:
                twins.give(tokens, data.draw(st.sampled_from(["attends", "dense", "flushes"]), "how"))
        elif kind == "crop":
            removed = data.draw(
                st.integers(0, min(length, twins.storage.rows.longest_chunk(twins.storage.capacity))), "removed"
            )
            try:
                rewind.check_crop(twins.storage, removed)
            except RuntimeError:
                continue
            if removed < length:
                for cache in twins.both():
                    cache.crop(-removed)
        elif kind == "select":
            index = torch.tensor(data.draw(st.lists(st.integers(0, batch - 1), min_size=1, max_size=4), "index"))
            for cache in twins.both():
                cache.batch_select_indices(index)
            twins.starts = twins.starts[index]
        elif kind == "repeat" and batch < 4:
            for cache in twins.both():
                cache.batch_repeat_interleave(2)
            twins.starts = twins.starts.repeat_interleave(2)
        elif kind == "copy":
            twins.static = data.draw(st.sampled_from([copy.deepcopy, through_pickle]), "copier")(twins.static)
        elif kind == "move":
            twins.static.layers[0].offload()
            twins.static.layers[0].prefetch()
        elif kind == "reset":
            for cache in twins.both():
                cache.reset()
    twins.give(1)
    twins.give(2)


def test_crops_that_a_ring_cannot_take_back() -> None:
    twins = Twins(65, "int8")
    twins.give(300)
    message = (
        "layer 0: `crop` must remove at most 192 tokens of a static cache with a window of 65, got 193. Reset the "
        "cache and feed it the text again."
    )
    with pytest.raises(RuntimeError, match=re.escape(message)):
        twins.static.crop(-193)
    with pytest.raises(RuntimeError, match=re.escape(message)):
        rewind.crop(twins.storage, 193)
    assert int(twins.static.get_seq_length()) == 300
    twins.static.crop(-190)
    for cache in (twins.static, copy.deepcopy(twins.static)):
        with pytest.raises(RuntimeError, match="layer 0: `crop` must remove at most 2 tokens of a static cache"):
            cache.crop(-3)
    twins.static.crop(-110)
    assert int(twins.static.get_seq_length()) == 0
    twins.static.update(*torch.randn(2, BATCH, KV_HEADS, 250, HEAD_DIM), 0)
    twins.static.crop(-240)


def test_a_second_crop_knows_what_the_first_one_took_back() -> None:
    twins = Twins(65, "int8")
    twins.give(300)
    twins.static.crop(-190)
    twins.static.crop(-2)
    with pytest.raises(RuntimeError, match="layer 0: `crop` must remove at most 0 tokens of a static cache"):
        twins.static.crop(-1)
    assert int(twins.static.get_seq_length()) == 108


def test_files_that_lie_about_crops_are_refused() -> None:
    ring = Twins(65, "int8", max_cache_len=600).storage
    assert _most_held({"most_held": 600}, ring, 300) == 600
    for most_held in (-1, 601, True, None):
        with pytest.raises(ValueError, match=r"`most_held` is .* of 300 tokens, with room for 600"):
            _most_held({"most_held": most_held}, ring, 300)


def test_files_say_what_was_cropped(tmp_path: Path) -> None:
    model, path = model_of("mistral", **LONG), tmp_path / "cache"
    with patched(model, {"preset": "int8", "max_cache_len": 400}):
        cache = cache_of(greedy(model, PROMPT, 50))
        cache.crop(-90)
        cache.save(path, model)
        loaded = KVQuantCache.load(path, model)
    assert loaded.storages[0].rows.most_held == cache.storages[0].rows.most_held == 299
    for each in (cache, loaded):
        with pytest.raises(RuntimeError, match="must remove at most 161 tokens"):
            each.crop(-162)


def test_pairs_are_counted_as_in_a_growing_cache() -> None:
    twins = Twins(65, "int8")
    for cache in twins.both():
        count_pairs(cache)
    with PairCounter() as counter:
        for tokens in (40, 1, 300, 1, 9):
            twins.give(tokens, "attends once")
    assert pairs_of(twins.static) == pairs_of(twins.growing) == counter.pairs / 2 > 0


def test_what_a_static_ring_is() -> None:
    config = {"preset": "int4-token", "sink_length": 4, "residual_length": 8}
    cache = KVQuantCache(models.family("gemma2").config, config, max_cache_len=600)
    ring, full = cache.layers
    described = (
        "key int4-head-asymmetric-clip0.9375, value int4-head-asymmetric, first 0 and last 8 tokens dense, rotate, "
        "window 6"
    )
    assert repr(ring) == f"KVQuantLayer({described})"
    assert cache.is_sliding == [True, False] and cache.is_compileable
    assert (ring.get_max_length(), full.get_max_length()) == (600, 600)
    assert ring.storage.formats.sink_length == 0 and full.storage.formats.sink_length == 4
    assert cache.get_mask_sizes(3, 0) == (3, 0) and not ring.is_initialized
    for index in range(2):
        cache.update(*torch.randn(2, 1, KV_HEADS, 3, HEAD_DIM), index)
    sizes = [layer.get_mask_sizes(1)[0] for layer in cache.layers]
    assert [(int(size), size.window) for size in sizes if isinstance(size, KVLength)] == [(600, 6), (600, 0)]
    assert ring.storage.lengths is full.storage.lengths, "a step counts once"
    assert (ring.storage.capacity, full.storage.capacity) == (256, 640)


def test_windows_may_stay_with_transformers() -> None:
    cache = KVQuantCache(models.family("gemma2").config, {"preset": "int8", "sliding": False}, max_cache_len=64)
    assert type(cache.layers[0]) is StaticSlidingWindowLayer and len(cache.storages) == 1


def test_buffers_come_back_from_a_pool() -> None:
    pool = BufferPool()
    found = []
    for _ in range(2):
        cache = KVQuantCache(MODEL_CONFIGS[6], "int4-token", max_cache_len=600, pool=pool)
        cache.update(*torch.randn(2, 1, KV_HEADS, 300, HEAD_DIM), 0)
        found.append(cache.storages[0].addresses())
        del cache
    assert found[0] == found[1]


# --- models -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", SLIDING)
def test_none_gives_the_tokens_of_an_unpatched_model(family: str) -> None:
    model = model_of(family, **LONG)
    expected = greedy(model, PROMPT, 12)
    with patched(model, {"preset": "none", "static": True}):
        output = greedy(model, PROMPT, 12)
    assert any(storage.window for storage in cache_of(output).storages)
    compare.assert_same(output.sequences, expected.sequences, "tokens")
    bound = tolerances.model_bound(logits(expected), logits(expected), torch.float32)
    compare.assert_close(logits(output), logits(expected), bound, "logits")


@pytest.mark.parametrize("config", ["int8", "int4-token", "int4-channel", DENSE], ids=str)
@pytest.mark.parametrize("family", ["gemma2", "gemma3_text", "gpt_oss", "mistral", "cohere2", "gemma3n_text"])
def test_presets_attend_to_what_the_reference_decodes(family: str, config: Any) -> None:
    config = {**({"preset": config} if isinstance(config, str) else config), "max_cache_len": 300}
    _, cache = check_against_reference(model_of(family, **LONG), config, PROMPT, new_tokens=14)
    assert not any(storage.tally.fallbacks for storage in cache.storages)
    assert any(storage.is_ring for storage in cache.storages)


@pytest.mark.parametrize("config", ["int8", "int4-channel", DENSE], ids=str)
def test_half_precision(config: Any, device: str) -> None:
    config = {**({"preset": config} if isinstance(config, str) else config), "max_cache_len": 300}
    model = models.on(device, model_of("mistral", dtype=torch.bfloat16, **LONG))
    exact = copy.deepcopy(model).float()
    _, cache = check_against_reference(model, config, PROMPT, exact, new_tokens=14)
    assert not any(storage.tally.fallbacks for storage in cache.storages) and cache.storages[0].is_ring


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss", "mistral"])
def test_growing_and_static_caches_write_the_same(family: str) -> None:
    model = model_of(family, **LONG)
    outputs = []
    for options in ({}, {"static": True}):
        with patched(model, {"preset": "int4-token", **options}):
            outputs.append(greedy(model, PROMPT, 40))
    compare.assert_same(outputs[1].sequences, outputs[0].sequences, "tokens")
    bound = tolerances.model_bound(logits(outputs[0]), logits(outputs[0]), torch.float32)
    compare.assert_close(logits(outputs[1]), logits(outputs[0]), bound, "logits")


FEATURES: dict[str, dict[str, Any]] = {
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "samples": {"do_sample": True, "num_return_sequences": 2, "temperature": 1.5},
    "prefill_chunks": {"prefill_chunk_size": 7},
    "long_prefill_chunks": {"prefill_chunk_size": 120},
}


@pytest.mark.parametrize(
    "config", ["none", {"preset": "int4-token", "layers": {1: "none"}}], ids=["none", "int4-token"]
)
@pytest.mark.parametrize("feature", FEATURES)
def test_generate_features(feature: str, config: Any) -> None:
    model = model_of("gemma3_text", **LONG, sliding_window=140)
    config = {"preset": config} if isinstance(config, str) else config
    inputs = left_padded(tokens=330, pads=(3, 0, 200)) if "chunks" in feature else PROMPT
    torch.manual_seed(5)
    simulated = ReferenceCache(model.config, config, mask=inputs["attention_mask"])
    expected = greedy(model, inputs, 14, **with_cache(simulated), **FEATURES[feature])
    torch.manual_seed(5)
    with patched(model, {**config, "static": True}):
        output = greedy(model, inputs, 14, **FEATURES[feature])
    assert cache_of(output).storages[0].is_ring
    compare.assert_same(output.sequences, expected.sequences, "tokens")
    bound = tolerances.model_bound(logits(expected), logits(expected), torch.float32)
    compare.assert_close(logits(output), logits(expected), bound, "logits")


@pytest.mark.parametrize("config", ["none", "int8", "int4-channel", DENSE], ids=str)
@pytest.mark.parametrize("tokens", [40, 300])
def test_a_chat_goes_on_with_its_cache(config: Any, tokens: int, tmp_path: Path) -> None:
    """Also with a copy, and with what a file keeps of it, to the same bits."""
    model, inputs = model_of("gemma2", **LONG), left_padded(tokens=tokens, pads=(3, 0, 27))
    config = {**({"preset": config} if isinstance(config, str) else config), "max_cache_len": 400}
    with patched(model, config):
        first = greedy(model, inputs, 12)
        cache = cache_of(first)
        cache.save(tmp_path / "chat", model)
        caches = [cache, copy.deepcopy(cache), through_pickle(cache), KVQuantCache.load(tmp_path / "chat", model)]
        assert [type(each.storages[0]) for each in caches] == [LayerStore] * 4
        more = torch.randint(3, 90, (3, 9), generator=torch.Generator().manual_seed(1))
        ids = torch.cat([first.sequences, more], 1)
        mask = torch.cat([inputs["attention_mask"], torch.ones(3, 21, dtype=torch.long)], 1)
        rest = {"input_ids": ids, "attention_mask": mask}
        outputs = [greedy(model, rest, 10, **with_cache(each)) for each in caches]
    for output, name in zip(outputs[1:], ("copy", "pickle", "file"), strict=True):
        compare.assert_same(logits(output), logits(outputs[0]), name)


def test_a_report_says_what_serves_them() -> None:
    with patched(model_of("gemma2"), {"preset": "int4-token", "static": True}) as model:
        found = report(model)
    assert [layer.layer_type for layer in found.layers] == ["sliding_attention", "full_attention"]
    assert all(layer.formats is not None and layer.kernel.startswith("CPU kernel") for layer in found.layers)


# --- masks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", ["none", "int8"])
def test_holes_in_a_mask_take_dense_tensors(preset: str) -> None:
    model = model_of("gemma2", **LONG)
    inputs: dict[str, Tensor] = {name: tensor.clone() for name, tensor in PROMPT.items()}
    inputs["attention_mask"][0, 247] = inputs["attention_mask"][1, 249] = 0
    outputs = []
    for options in ({}, {"static": True}):
        with patched(model, {"preset": preset, **options}):
            outputs.append(greedy(model, inputs, 12))
    bound = tolerances.model_bound(logits(outputs[0]), logits(outputs[0]), torch.float32)
    compare.assert_close(logits(outputs[1]), logits(outputs[0]), bound, "logits")
    assert preset == "none" or all(storage.tally.fallbacks for storage in cache_of(outputs[1]).storages)


@pytest.mark.parametrize("q_len", [1, 4, 200])
def test_models_that_change_keys_get_the_mask_of_their_window(q_len: int) -> None:
    twins = Twins(65, "int8", (3, 0, 5))
    for tokens in (300, q_len, q_len):
        twins.give(tokens)
    size, offset = twins.static.get_mask_sizes(q_len, 0)
    length = int(twins.static.get_seq_length())
    assert (int(size), offset) == (MAX_CACHE_LEN, 0)
    arguments: dict[str, Any] = {
        "batch_size": BATCH,
        "q_length": q_len,
        "q_offset": torch.tensor(length),
        "kv_offset": offset,
        "attention_mask": torch.arange(MAX_CACHE_LEN) >= twins.starts.unsqueeze(1),
        "local_size": 65,
        "device": torch.device("cpu"),
        "mask_function": sliding_window_causal_mask_function(65),
    }
    bounds = attention_mask(kv_length=size, prev="sdpa", **arguments)
    assert bounds.shape == (4, BATCH, 1, 1) and bounds[2].unique().tolist() == [65] and not bounds[3].any()
    arguments["allow_is_causal_skip"] = False
    dense_mask = attention_mask(kv_length=int(size), prev="sdpa", **arguments)
    handles = twins.static.update(*torch.randn(2, BATCH, KV_HEADS, q_len, HEAD_DIM), 0)
    twins.storage.starts = twins.starts
    models.check_masks_agree(torch.randn(BATCH, Q_HEADS, q_len, HEAD_DIM), handles, bounds, dense_mask)
