"""Layers with a sliding window: as codes over the whole sequence behind a mask, in memory that does not grow.

`models.ReferenceLayer` keeps every token; transformers' `DynamicSlidingWindowLayer` says which of them a mask is for.
"""

from __future__ import annotations

import contextlib
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
from models import FAMILIES, ReferenceCache, check_against_reference, greedy, left_padded, logits
from test_cache import through_pickle
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicSlidingWindowLayer
from transformers.masking_utils import causal_mask_function, sliding_window_causal_mask_function

from hf_kvquant import PRESETS, KVQuantCache, KVQuantConfig, patch, patched
from hf_kvquant.attention.registry import attention_mask
from hf_kvquant.cache.handle import KVHandle, KVLength, MaskNotes
from hf_kvquant.cache.layers import KVQuantRingLayer
from hf_kvquant.spec import reference
from hf_kvquant.storage import saved
from hf_kvquant.storage.layer_store import LayerStore
from hf_kvquant.upstream.releases import cache_of, with_cache

BATCH, KV_HEADS, Q_HEADS, HEAD_DIM = 3, 2, 4, models.HEAD_DIM
PADS = (3, 0, 70)
WINDOWS = (2, 6, 65, 130)
DENSE = {"preset": "int4-token", "residual_length": 9}
DENSE_BLOCKS = {"preset": "int4-channel", "residual_length": 70}
TENSOR = {"key": {"storage": "int8", "granularity": "tensor"}, "value": "fp8"}
INT8 = models.INT8_CODES  # codes alone: a short window is all dense
CONFIGS: dict[str, Any] = {
    **{preset: preset for preset in PRESETS},
    "dense": DENSE,
    "dense_blocks": DENSE_BLOCKS,
    "tensor": TENSOR,
    "int8_codes": INT8,
}
configs = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
RING_WINDOWS = ((2, torch.bfloat16), (6, torch.float32), (65, torch.bfloat16))
each_window_with_some_configs = pytest.mark.full(
    when=lambda window, config: [*dict(RING_WINDOWS)].index(window) != [*CONFIGS.values()].index(config) % 3,
    reason="each takes hundreds of steps; random operations meet every window and config too",
)


def spelled(config: object) -> str:
    """A config, or something beside it, in the id of a test."""
    return "int8" if config is INT8 else str(config)


def config_of(window: int) -> Any:
    return models.build("mistral", num_hidden_layers=1, sliding_window=window).config


MODEL_CONFIGS = {window: config_of(window) for window in WINDOWS}


class Pair:
    """A ring and what it is compared with, which take the same tokens.

    Args:
        window: Positions visible to a query.
        config: Of the ring.
        pads: Left padding of each sequence.
        device: Of the tokens.
        dtype: Of the tokens.
    """

    def __init__(
        self,
        window: int,
        config: Any,
        pads: tuple[int, ...] = (0,) * BATCH,
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.window = window
        self.device = device
        self.dtype = dtype
        self.config = config
        self.cache = KVQuantCache(MODEL_CONFIGS[window], config)
        self.starts = torch.tensor(pads, dtype=torch.int32, device=device)
        self.renew()
        self.generator = torch.Generator().manual_seed(3)

    @property
    def layer(self) -> KVQuantRingLayer:
        (layer,) = self.cache.layers
        assert isinstance(layer, KVQuantRingLayer)
        return layer

    def renew(self) -> None:
        """Empty caches to compare with."""
        mask = (torch.arange(200) >= self.starts.cpu().unsqueeze(1)).long()
        self.expected = ReferenceCache(MODEL_CONFIGS[self.window], self.config, mask=mask)
        self.sizes = DynamicCache(config=MODEL_CONFIGS[self.window])  # of transformers: what it returns, and masks

    def all(self) -> tuple[Any, ...]:
        return self.cache, self.expected, self.sizes

    def drawn(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator).to(self.device, self.dtype)

    def give(self, tokens: int, attends: bool = True) -> None:
        """Take tokens, and attend to them where they do not come first."""
        batch = self.starts.shape[0]
        key, value = self.drawn(2, batch, KV_HEADS, tokens, HEAD_DIM)
        size, offset = self.cache.get_mask_sizes(tokens, 0)
        assert (size, offset) == self.sizes.get_mask_sizes(tokens, 0)
        self.cache.notes.starts = self.starts
        handles, (raw_key, raw_value), dense = (each.update(key, value, 0) for each in self.all())
        assert int(self.cache.get_seq_length()) == self.sizes.get_seq_length() == self.expected.get_seq_length()
        if handles[0] is raw_key or not isinstance(handles[0], KVHandle):
            compare.assert_same(handles[0], key, "the first chunk")
            return
        assert handles[0].shape == (batch, KV_HEADS, size, HEAD_DIM)
        storage = handles[0].step.storage
        if not attends:
            return
        query = self.drawn(batch, Q_HEADS, tokens, HEAD_DIM)
        options: dict[str, Any] = {"softmax_scale": 0.3, "starts": self.starts}
        length = raw_key.shape[2]
        out, _ = storage.attend(query, **options)
        expected = self.attended(query, options)
        # Where the dtype is narrow, the reference has rounded what codes stand for to it.
        bound = 1e-4 if self.dtype == torch.float32 else 0.02 * float(expected.abs().max())
        compare.assert_close(out.float(), expected.float(), bound, f"attention at {length} tokens")
        for ours, full, name in zip(handles, (raw_key, raw_value), ("keys", "values"), strict=True):
            is_shown = torch.arange(offset, length, device=self.device) >= self.starts.unsqueeze(1)
            ours, full = (x.masked_fill(~is_shown[:, None, :, None], 0) for x in (ours.dense(), full[:, :, offset:]))
            compare.assert_same(ours, full, f"{name} at {length} tokens")
        if storage.formats.key.storage == storage.formats.value.storage == "none":
            # Older versions of transformers return more than their masks are for while they record the past.
            compare.assert_same(handles[0].dense(), dense[0][:, :, -size:], "keys of transformers")

    def attended(self, query: Tensor, options: dict[str, Any]) -> Tensor:
        """Attention by the reference, to what each query sees."""
        layer, (batch, _, q_len, _) = self.expected.layers[0], query.shape
        begins = [[layer.window_begin(side, q_len - 1 - i) for side in (0, 1)] for i in range(q_len)]
        firsts = [i for i in range(q_len) if i == 0 or begins[i] != begins[i - 1]]
        parts = []
        for first, end in zip(firsts, [*firsts[1:], q_len], strict=True):
            seen = (layer.seen(side, q_len - end) for side in (0, 1))
            length = layer.get_seq_length() - (q_len - end)
            lengths = torch.full((batch,), length, dtype=torch.int32, device=self.device)
            parts.append(
                reference.decode_attention(
                    query[:, :, first:end], *seen, lengths, sliding_window=self.window, **options
                )[0]
            )
        return torch.cat(parts, dim=1)

    def crop(self, tokens: int) -> None:
        for each in self.all():
            each.crop(-tokens)

    def select(self, index: Tensor) -> None:
        for each in self.all():
            each.batch_select_indices(index)
        self.starts = self.starts[index]
        layer = self.expected.layers[0]
        layer.mask = layer.mask[index]

    def check_bounded(self) -> None:
        storage = self.layer.storage
        assert storage.capacity <= storage.rows.full_capacity, "memory grows"


# --- codes ------------------------------------------------------------------------------------------------------------


@each_window_with_some_configs
@configs
@pytest.mark.parametrize("window, dtype", RING_WINDOWS, ids=str)
def test_a_ring_is_the_whole_sequence_behind_a_mask(window: int, dtype: torch.dtype, config: Any, device: str) -> None:
    pair = Pair(window, config, PADS, device, dtype)
    for tokens in (80, 1, 1, 7, *[1] * 130, 40, *[1] * 70, 150, 1):
        pair.give(tokens, attends=tokens > 1 or pair.sizes.get_seq_length() % 11 == 0)
        pair.layer.storage.flush()
    pair.check_bounded()
    assert pair.layer.storage.length > pair.layer.storage.capacity


@pytest.mark.parametrize("first", [1, 5, 6, 7, 127, 128, 129, 400])
@pytest.mark.parametrize("config", [INT8, "int4-channel", DENSE, TENSOR], ids=spelled)
def test_first_chunks(first: int, config: Any) -> None:
    pair = Pair(6, config)
    pair.give(first)
    pair.check_bounded()
    for tokens in (1, 1, 9):
        pair.give(tokens)


@pytest.mark.parametrize("config", ["none", "int4-token", "int4-channel", DENSE_BLOCKS], ids=str)
@pytest.mark.parametrize("window", [6, 130])
def test_memory_is_that_of_the_window(window: int, config: Any) -> None:
    pair = Pair(window, config)
    pair.give(500)
    limit = pair.layer.storage.rows.full_capacity
    assert limit <= window + 2 * 128 + 1
    for tokens in [1] * 400 + [200, 1]:
        pair.give(tokens, attends=False)
        if tokens == 1:
            pair.check_bounded()
    storage = pair.layer.storage
    sides = (storage.formats.key, storage.formats.value)
    per_token = sum(side.bytes_per_token(KV_HEADS, HEAD_DIM, torch.float32) for side in sides)
    tails = sum(
        side.tail_bytes(KV_HEADS, HEAD_DIM, torch.float32, residual_length=storage.formats.residual_length)
        for side in sides
    )
    assert pair.cache.num_bytes <= BATCH * (limit * per_token + tails)
    assert pair.cache.num_bytes_held <= pair.cache.num_bytes
    assert pair.cache.bytes_per_token == 0, "one more token takes no more"


def test_a_window_of_one_token() -> None:
    """Where transformers' own layer keeps everything: a token sees itself, whatever is held."""
    cache = KVQuantCache(config_of(1), INT8)
    for tokens in (5, 1, 3, 1):
        assert cache.get_mask_sizes(tokens, 0) == (tokens, int(cache.get_seq_length()))
        key, value = torch.randn(2, 1, KV_HEADS, tokens, HEAD_DIM)
        handle, _ = cache.update(key, value, 0)
    assert handle.shape[2] == 1 and cache.storages[0].capacity <= 64
    out, _ = handle.step.storage.attend(torch.randn(1, Q_HEADS, 1, HEAD_DIM), softmax_scale=1.0)
    seen = handle.step.dense("test")[1].repeat_interleave(Q_HEADS // KV_HEADS, 1).transpose(1, 2)
    compare.assert_close(out, seen, 1e-5, "attention to itself")


@times(40)
@given(data=st.data())
def test_random_operations(data: st.DataObject) -> None:
    window = data.draw(st.sampled_from(WINDOWS), "window")
    config = data.draw(st.sampled_from([config for config in CONFIGS.values() if config is not TENSOR]), "config")
    pads = data.draw(st.sampled_from([PADS, (0, 0, 0), (1, 2, 150)]), "pads")
    pair = Pair(window, config, pads)
    # Only what has been recorded can be cropped; a full cache of transformers would crop more, and go wrong.
    recorded: int | None = None
    kinds = ["give"] * 6 + ["select", "repeat", "reorder", "copy", "move", "reset", "record", "crop"]
    for _ in range(data.draw(st.integers(3, 14), "steps")):
        kind = data.draw(st.sampled_from(kinds), "kind")
        length, batch = pair.sizes.get_seq_length(), pair.starts.shape[0]
        if kind == "give" or length == 0:
            tokens = data.draw(st.sampled_from([1, 1, 2, 5, 64, 131]), "tokens")
            pair.give(tokens, data.draw(st.booleans(), "attends"))
            recorded = None if recorded is None else recorded + tokens
        elif kind in ("select", "reorder"):
            size = batch if kind == "reorder" else data.draw(st.integers(1, 4), "size")
            pair.select(torch.tensor(data.draw(st.lists(st.integers(0, batch - 1), min_size=size, max_size=size))))
        elif kind == "repeat" and batch < 4:
            for each in pair.all():
                each.batch_repeat_interleave(2)
            pair.starts = pair.starts.repeat_interleave(2)
            pair.expected.layers[0].mask = pair.expected.layers[0].mask.repeat_interleave(2, 0)
        elif kind == "copy":
            pair.cache = data.draw(st.sampled_from([copy.deepcopy, through_pickle]), "copier")(pair.cache)
        elif kind == "move":
            pair.layer.offload()
            pair.layer.prefetch()
        elif kind == "reset":
            pair.cache.reset()
            pair.renew()
            recorded = None
            pair.layer.record_past = False
        elif kind == "record" and recorded is None:
            for each in pair.all():
                each.activate_past_recording()
            recorded = 0
        elif kind == "crop" and recorded:
            tokens = data.draw(st.integers(0, recorded), "cropped")
            if tokens < length:
                pair.crop(tokens)
                recorded = 0
                pair.check_bounded()
    pair.give(1)
    pair.give(2)


# --- models -----------------------------------------------------------------------------------------------------------

SLIDING: dict[str, tuple[str, dict[str, Any]]] = {
    **{
        name: (name, dict(FAMILIES[name].options))
        for name in ("gemma2", "gemma3_text", "gpt_oss", "cohere2", "exaone4", "olmo3", "gemma3n_text", "gemma4_text")
    },
    "mistral": ("mistral", {"sliding_window": 6}),
    "mixtral": ("mixtral", {**FAMILIES["mixtral"].options, "sliding_window": 6}),
    "phi3": ("phi3", {**FAMILIES["phi3"].options, "sliding_window": 6}),
    "starcoder2": ("starcoder2", {**FAMILIES["starcoder2"].options, "sliding_window": 6}),
    "qwen2": ("qwen2", {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}),
    "qwen3": ("qwen3", {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}),
}
LONG = {"max_position_embeddings": 512}
PROMPTS = {"short": left_padded(tokens=4, pads=(1, 0, 2)), "long": left_padded(tokens=30, pads=(3, 0, 27))}


def model_of(name: str, **options: Any) -> Any:
    model_type, own = SLIDING[name]
    return models.build(model_type, **{**own, **options})


@pytest.mark.parametrize("prompt", PROMPTS.values(), ids=PROMPTS)
@pytest.mark.parametrize("family", SLIDING)
def test_none_gives_the_very_logits_of_an_unpatched_model(family: str, prompt: dict[str, Tensor]) -> None:
    model = model_of(family)
    expected = greedy(model, prompt, 20)
    with patched(model, "none"):
        output = greedy(model, prompt, 20)
    assert any(isinstance(layer, KVQuantRingLayer) for layer in cache_of(output).layers)
    compare.assert_same(output.sequences, expected.sequences, "tokens")
    compare.assert_same(logits(output), logits(expected), "logits")


@pytest.mark.full(
    when=lambda family, preset: preset == (INT8, "int4-channel")[[*SLIDING].index(family) % 2],
    reason="how a family makes keys and how a preset stores them meet in the cache alone",
)
@pytest.mark.parametrize(
    "preset, prompt", [(INT8, "short"), ("int4-token", "long"), ("int4-channel", "long")], ids=spelled
)
@pytest.mark.parametrize("family", SLIDING)
def test_presets_attend_to_what_the_reference_decodes(family: str, prompt: str, preset: Any) -> None:
    _, cache = check_against_reference(model_of(family), preset, PROMPTS[prompt], new_tokens=16)
    assert not any(storage.tally.fallbacks for storage in cache.storages)


@pytest.mark.full(
    when=lambda family, config: config == "int4-token" or family == "mistral",
    reason="each takes 260 steps; rings of these families and presets are filled by prompts above",
)
@pytest.mark.parametrize(
    "family, config, new_tokens",
    [
        ("gemma2", INT8, 260),
        ("gpt_oss", "int4-token", 260),
        ("gpt_oss", DENSE, 270),
        ("mistral", "int4-channel", 270),
    ],
    ids=spelled,
)
def test_long_texts_drop_tokens(family: str, config: Any, new_tokens: int) -> None:
    inputs = left_padded(pads=(0, 7, 2))
    _, cache = check_against_reference(model_of(family, **LONG), config, inputs, new_tokens=new_tokens)
    rings = [layer.storage for layer in cache.layers if isinstance(layer, KVQuantRingLayer)]
    assert rings and all(ring.length > ring.capacity for ring in rings)


@pytest.mark.parametrize("config", [INT8, "int4-token", "int4-channel", DENSE], ids=spelled)
def test_half_precision(config: Any, device: str) -> None:
    model = models.on(device, model_of("mistral", dtype=torch.bfloat16))
    exact = copy.deepcopy(model).float()
    _, cache = check_against_reference(model, config, left_padded(tokens=70, pads=(3, 0, 66)), exact)
    assert not any(storage.tally.fallbacks for storage in cache.storages)


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss"])
def test_eager_attention_before_ours(family: str) -> None:
    model = model_of(family, attention="eager")
    expected = greedy(model, PROMPTS["long"], 12)
    with patched(model, "none"):
        compare.assert_same(logits(greedy(model, PROMPTS["long"], 12)), logits(expected), "logits")
    check_against_reference(model, "int4-token", PROMPTS["long"])


FEATURES: dict[str, dict[str, Any]] = {
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "samples": {"do_sample": True, "num_return_sequences": 2, "temperature": 1.5},
    "prefill_chunks": {"prefill_chunk_size": 7},
}


@pytest.mark.parametrize(
    "config", ["none", {"preset": "int4-token", "layers": {1: "none"}}], ids=["none", "int4-token"]
)
@pytest.mark.parametrize("feature", FEATURES)
def test_generate_features(feature: str, config: Any) -> None:
    model, inputs = model_of("gemma3_text"), PROMPTS["long"]
    torch.manual_seed(5)
    simulated = ReferenceCache(model.config, config, mask=inputs["attention_mask"])
    expected = greedy(model, inputs, 14, **with_cache(simulated), **FEATURES[feature])
    torch.manual_seed(5)
    with patched(model, config):
        output = greedy(model, inputs, 14, **FEATURES[feature])
    compare.assert_same(output.sequences, expected.sequences, "tokens")
    bound = tolerances.model_bound(logits(expected), logits(expected), torch.float32)
    compare.assert_close(logits(output), logits(expected), bound, "logits")


@pytest.mark.full(
    when=lambda config, tokens: (config == "none") != (tokens == 4),
    reason="a ring counts the tokens to take back, whatever they are stored as",
)
@pytest.mark.parametrize("tokens", [4, 30])
@pytest.mark.parametrize(
    "config", ["none", {"preset": "int4-token", "layers": {1: "none"}}], ids=["none", "int4-token"]
)
@pytest.mark.parametrize("helper", ["lookup", "assistant", "itself"])
def test_steps_that_are_taken_back(helper: str, config: Any, tokens: int) -> None:
    """What an assistant proposes is cropped again, over and over, past the window."""
    model, inputs = model_of("gemma3_text"), {"input_ids": left_padded(1, tokens, (0,))["input_ids"]}
    assistants = {"assistant": models.llama(), "itself": patch(model_of("gemma3_text"), "none")}
    options = {"prompt_lookup_num_tokens": 3} if helper == "lookup" else {"assistant_model": assistants[helper]}
    cache = ReferenceCache(model.config, config)
    expected = greedy(model, inputs, 24, **with_cache(cache))
    with patched(model, config):
        output = greedy(model, inputs, 24, **options)
        again = greedy(model, inputs, 24, **with_cache(KVQuantCache(model.config, config)), **options)
    compare.assert_same(output.sequences, expected.sequences, "tokens")
    compare.assert_same(again.sequences, expected.sequences, "tokens of a cache that was given")
    rings = [storage for storage in cache_of(output).storages if storage.window]
    assert rings and all(ring.capacity <= ring.rows.full_capacity for ring in rings)


def test_an_assistant_may_have_rings() -> None:
    model, assistant = models.llama(), model_of("mistral")
    inputs = {"input_ids": left_padded(1, 20, (0,))["input_ids"]}
    expected = greedy(model, inputs, 20)
    with patched(assistant, "int8"):
        output = greedy(model, inputs, 20, assistant_model=assistant)
    compare.assert_same(output.sequences, expected.sequences, "tokens")


@pytest.mark.parametrize("config", ["none", INT8, "int4-channel", DENSE], ids=spelled)
def test_a_chat_goes_on_with_its_cache(config: Any, tmp_path: Path) -> None:
    """Also with a copy, and with what a file keeps of it, to the same bits."""
    model, inputs = model_of("gemma2", **LONG), left_padded(tokens=140, pads=(3, 0, 27))
    with patched(model, config):
        first = greedy(model, inputs, 12)
        cache = cache_of(first)
        cache.save(tmp_path / "chat", model)
        caches = [cache, copy.deepcopy(cache), through_pickle(cache), KVQuantCache.load(tmp_path / "chat", model)]
        more = torch.randint(3, 90, (3, 9), generator=torch.Generator().manual_seed(1))
        ids = torch.cat([first.sequences, more], 1)
        mask = torch.cat([inputs["attention_mask"], torch.ones(3, 21, dtype=torch.long)], 1)
        rest = {"input_ids": ids, "attention_mask": mask}
        outputs = [greedy(model, rest, 10, **with_cache(each)) for each in caches]
    for output, name in zip(outputs[1:], ("copy", "pickle", "file"), strict=True):
        compare.assert_same(logits(output), logits(outputs[0]), name)
    if config == "none":
        plain = greedy(model, inputs, 12)
        expected = greedy(model, rest, 10, **with_cache(cache_of(plain)))
        compare.assert_same(logits(outputs[0]), logits(expected), "unpatched")


@pytest.mark.parametrize("config", [INT8, "int4-channel", DENSE_BLOCKS], ids=spelled)
def test_a_recorded_past_is_taken_back_until_a_crop(config: Any) -> None:
    """Beyond what a ring holds otherwise, and no further."""
    pair = Pair(65, config, PADS)
    pair.give(300)
    for each in pair.all():
        each.activate_past_recording()
    for tokens in (250, 1, 160):
        pair.give(tokens)
    storage = pair.layer.storage
    assert storage.capacity >= 64 + 411 > storage.rows.full_capacity
    with pytest.raises(RuntimeError, match="must remove at most the 411 tokens whose past was recorded, got 412"):
        pair.cache.crop(-412)
    pair.crop(411)
    pair.check_bounded()
    for tokens in (1, 70, 1):
        pair.give(tokens)
    pair.crop(72)
    pair.give(1)
    with pytest.raises(RuntimeError, match="must remove at most the 1 tokens whose past was recorded, got 2"):
        pair.cache.crop(-2)


def test_a_file_of_a_recorded_past(tmp_path: Path) -> None:
    model, inputs = model_of("mistral", **LONG), left_padded(tokens=140, pads=(3, 0, 27))
    with patched(model, "int4-channel"), torch.no_grad():
        cache = KVQuantCache(model.config, "int4-channel")
        cache.activate_past_recording()
        greedy(model, inputs, 180, **with_cache(cache))
        ring = cache.storages[0]
        assert ring.capacity > ring.rows.full_capacity
        cache.save(tmp_path / "chat", model)
        loaded = KVQuantCache.load(tmp_path / "chat", model)
        assert loaded.storages[0].capacity == ring.capacity
        rest = torch.randint(3, 90, (3, 5), generator=torch.Generator().manual_seed(1))
        for _ in range(2):
            ours, theirs = (model(rest, **with_cache(each)).logits for each in (cache, loaded))
            compare.assert_same(ours, theirs, "logits")
    assert loaded.storages[0].capacity == ring.rows.full_capacity, "nothing is recorded there"


def test_files_that_lie_about_a_ring_are_refused() -> None:
    ring = LayerStore(KVQuantConfig.from_preset("int8").formats(0), window=6)
    for capacity in (256, 512):
        planes = saved.planned_planes(ring, (1, KV_HEADS, HEAD_DIM, HEAD_DIM), 300, capacity, torch.float32)
        assert [side.codes.shape[2] for side in planes] == [min(300, capacity)] * 2
    for capacity in (64, 128, 257, 320):
        with pytest.raises(ValueError, match=f"cannot hold 300 tokens in buffers for {capacity}"):
            saved.planned_planes(ring, (1, KV_HEADS, HEAD_DIM, HEAD_DIM), 300, capacity, torch.float32)


# --- masks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", ["none", INT8, "int8"], ids=["none", "int8", "int8_windows"])
def test_holes_in_a_mask_take_dense_tensors(config: Any) -> None:
    model, inputs = model_of("gemma2"), left_padded(tokens=20)
    inputs["attention_mask"][0, 12] = inputs["attention_mask"][1, 17] = 0
    # The mask says where the first tokens are, which stay dense.
    simulated = ReferenceCache(model.config, config, mask=inputs["attention_mask"])
    expected = greedy(model, inputs, 12, **with_cache(simulated))
    with patched(model, config):
        output = greedy(model, inputs, 12)
    bound = tolerances.model_bound(logits(expected), logits(expected), torch.float32)
    if config == "none":
        compare.assert_close(logits(output), logits(expected), bound, "logits")
    assert config == "none" or all(storage.tally.fallbacks for storage in cache_of(output).storages)
    if config != "none":  # first layer alone: codes are of equal keys
        bound = tolerances.model_bound(logits(expected)[:, :2], logits(expected)[:, :2], torch.float32)
        compare.assert_close(logits(output)[:, :2], logits(expected)[:, :2], bound, "logits")


@pytest.mark.parametrize("q_len", [1, 4])
def test_models_that_change_keys_get_the_mask_of_their_window(q_len: int) -> None:
    pair = Pair(6, "int8", (3, 0, 5))
    pair.give(20)
    for _ in range(3):
        pair.give(q_len)
    size, offset = pair.cache.get_mask_sizes(q_len, 0)
    ids = torch.zeros(BATCH, pair.sizes.get_seq_length() + q_len)
    padding = torch.arange(ids.shape[1]) >= pair.starts.unsqueeze(1)
    arguments: dict[str, Any] = {
        "batch_size": BATCH,
        "q_length": q_len,
        "q_offset": pair.sizes.get_seq_length(),
        "kv_offset": offset,
        "attention_mask": padding,
        "local_size": 6,
        "device": torch.device("cpu"),
        "mask_function": sliding_window_causal_mask_function(6),
    }
    bounds = attention_mask(kv_length=size, prev="sdpa", **arguments)
    assert bounds.shape == (3, BATCH, 1, 1) and bounds[2].unique().tolist() == [6]
    dense_mask = attention_mask(kv_length=int(size), prev="sdpa", **arguments)
    tokens = torch.randn(2, BATCH, KV_HEADS, q_len, HEAD_DIM)
    handles = pair.cache.update(*tokens, 0)
    models.check_masks_agree(torch.randn(BATCH, Q_HEADS, q_len, HEAD_DIM), handles, bounds, dense_mask)


@pytest.mark.parametrize(
    "options, is_plain",
    [
        ({}, True),
        ({"allow_is_causal_skip": False, "q_length": 1}, True),
        ({"allow_is_causal_skip": False}, False),
        ({"local_size": 5}, False),
        ({"use_vmap": True}, False),
        ({"mask_function": causal_mask_function}, False),
    ],
    ids=["sliding", "one_query", "blocks", "another_window", "vmap", "causal"],
)
def test_masks_that_a_window_alone_cannot_say_are_dense(options: dict[str, Any], is_plain: bool) -> None:
    arguments: dict[str, Any] = {
        "batch_size": BATCH,
        "q_length": 2,
        "q_offset": 20,
        "kv_offset": 15,
        "mask_function": sliding_window_causal_mask_function(6),
        "attention_mask": torch.arange(22) >= torch.tensor([[3], [0], [17]]),
        "local_size": 6,
        "device": torch.device("cpu"),
        **options,
    }
    length = KVLength(7, MaskNotes(), is_first_chunk=False, window=6)
    mask = attention_mask(kv_length=length, prev="sdpa", **arguments)
    if is_plain:
        assert mask[:, :, 0, 0].tolist() == [[3, 0, 17], [20] * 3, [6] * 3]
    else:
        compare.assert_same(mask, attention_mask(kv_length=7, prev="sdpa", **arguments), "mask")


# --- refusals and choices ---------------------------------------------------------------------------------------------


def test_a_crop_wants_its_past_recorded() -> None:
    config = models.family("gemma2").config
    cache = KVQuantCache(config, "int8")

    def give(tokens: int) -> None:
        for index in range(2):
            cache.update(*torch.randn(2, 1, KV_HEADS, tokens, HEAD_DIM), index)

    give(4)
    cache.crop(-1)
    assert cache.get_seq_length() == 3, "the window is not full"
    give(5)
    for remove in (-1, -7):
        message = (
            "layer 0: `crop` must come before the window of 6 tokens is full, got 8 tokens. Call "
            "activate_past_recording on the cache first, so that it keeps what a crop brings back."
        )
        with pytest.raises(RuntimeError, match=re.escape(message)):
            cache.crop(remove)
        assert [int(layer.get_seq_length()) for layer in cache.layers] == [8, 8], "nothing has changed"
    cache.crop(0)
    give(200), give(1)
    cache.activate_past_recording()
    give(3)
    message = "layer 0: `crop` must remove at most the "
    with pytest.raises(RuntimeError, match=message):
        cache.crop(-180)
    assert [int(layer.get_seq_length()) for layer in cache.layers] == [212, 212]
    cache.crop(-3)
    assert [int(layer.get_seq_length()) for layer in cache.layers] == [209, 209]
    with pytest.raises(ValueError, match="must be 0 or negative, got 3"):
        cache.crop(3)
    cache.crop(-209)
    assert cache.get_seq_length() == 0 and cache.get_mask_sizes(3, 0) == (3, 0)


@pytest.mark.parametrize("tokens", [5, 6, 7])
def test_a_crop_is_refused_where_transformers_refuses_it(tokens: int) -> None:
    pair = Pair(6, "int8")
    pair.give(tokens)
    for cache in pair.all()[::2]:
        with contextlib.nullcontext() if tokens < 6 else pytest.raises(RuntimeError, match="activate_past_recording"):
            cache.crop(-1)
    assert pair.cache.get_seq_length() == pair.sizes.get_seq_length() == (tokens if tokens >= 6 else tokens - 1)


def test_what_a_ring_is() -> None:
    cache = KVQuantCache(
        models.family("gemma2").config, {"preset": "int4-token", "sink_length": 4, "residual_length": 8}
    )
    ring, full = cache.layers
    assert repr(ring) == (
        "KVQuantRingLayer(key int4-head-asymmetric-clip0.9375, value int4-head-asymmetric, "
        "first 0 and last 8 tokens dense, rotate, window 6)"
    )
    assert cache.is_sliding == [True, False] and cache.is_croppable and not cache.is_compileable
    assert (ring.get_max_length(), full.get_max_length()) == (6, -1)
    assert ring.storage.formats.sink_length == 0, "the first tokens leave the window like all others"
    assert full.storage.formats.sink_length == 4
    assert ring.keys is None and not ring.is_initialized


def test_windows_may_stay_with_transformers() -> None:
    model, inputs = models.family("gemma2"), left_padded(tokens=12)
    expected = greedy(model, inputs, 12)
    with patched(model, {"preset": "none", "sliding": False}):
        output = greedy(model, inputs, 12)
    assert type(cache_of(output).layers[0]) is DynamicSlidingWindowLayer
    compare.assert_same(logits(output), logits(expected), "logits")
    with patched(model, {"preset": "int4-token", "sliding": False}):
        check = greedy(model, inputs, 12)
    assert len(cache_of(check).storages) == 1


def test_rings_are_not_offloaded() -> None:
    """They do not grow; transformers leaves its own on the GPU too."""
    cache = KVQuantCache(models.family("gemma2").config, {"preset": "int4-token", "offloading": True})
    assert [type(storage) for storage in cache.storages] == [LayerStore, LayerStore]


def test_one_layer_of_another_format() -> None:
    """The first ring's mask is that of all of them."""
    check_against_reference(
        model_of("mistral", num_hidden_layers=3),
        {"preset": "int4-token", "layers": {0: "none", 2: {"preset": "int4-channel", "residual_length": 5}}},
        PROMPTS["long"],
        new_tokens=12,
    )
