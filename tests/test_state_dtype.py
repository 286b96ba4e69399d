"""Recurrent states that are kept in float16: in `generate`, in batches, and models that have none."""

from __future__ import annotations

import copy
from typing import Any

import models
import pytest
import torch
from models import greedy, left_padded
from test_state_steps import CUDA_ONLY, fuse_batches
from transformers import DynamicCache
from transformers.cache_utils import LinearAttentionLayer

from hf_kvquant import KVQuantCache, KVQuantConfig, patch, patched
from hf_kvquant.cache.states import KVQuantStateLayer
from hf_kvquant.graphs.state_steps import SlotStates
from hf_kvquant.state import notes_on
from hf_kvquant.upstream.releases import HAS_STATES, with_cache

if not HAS_STATES:
    pytest.skip("states need transformers 5.24", allow_module_level=True)

from test_batching import PROMPTS, alone, answers, batched, managed, text
from test_batching_states import long, scarce

from hf_kvquant.batching.batch import Group
from hf_kvquant.batching.states import GroupLayer, StatePart

FAMILIES = ["qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid"]
CONFIG = {"preset": "none", "state_dtype": "float16"}


def recurrent_states(cache: Any) -> list[torch.Tensor]:
    return [layer.recurrent_states[0] for layer in cache.layers if isinstance(layer, LinearAttentionLayer)]


@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_logits_are_those_of_states_that_were_rounded(name: str, device: str) -> None:
    """As if transformers' own cache were rounded after every forward; a chunk of several tokens is one."""
    model, ids = models.on(device, models.family(name)), torch.arange(1, 25, device=device).view(2, 12)
    own, ours = DynamicCache(config=model.config), KVQuantCache(model.config, CONFIG)
    for tokens in (ids[:, :5], ids[:, 5:8], ids[:, 8:9], ids[:, 9:10]):
        expected = model(tokens, **with_cache(own)).logits
        for state in recurrent_states(own):
            state.copy_(state.half())
        with patched(model, CONFIG):
            torch.testing.assert_close(model(tokens, **with_cache(ours)).logits, expected)
    found = recurrent_states(ours)
    assert found and all(state.dtype is torch.float16 for state in found)
    for state, rounded in zip(found, recurrent_states(own), strict=True):
        torch.testing.assert_close(state, rounded.half())


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"prefill_chunk_size": 4}, {"max_cache_len": 64}], ids=str)
@pytest.mark.parametrize("name", FAMILIES[1::2])
def test_static_and_growing_caches_say_the_same(name: str, options: dict[str, Any]) -> None:
    """On a CPU, where `generate` does not compile steps over static caches; captured ones come next."""
    model, inputs = models.family(name), left_padded()
    is_static = {"max_cache_len": options.pop("max_cache_len")} if "max_cache_len" in options else {"static": True}
    with patched(model, CONFIG):
        expected = greedy(model, inputs, 8, **options).sequences
        cache = KVQuantCache(model.config, CONFIG)
        assert torch.equal(greedy(model, inputs, 8, **options, **with_cache(cache)).sequences, expected)
        if "num_beams" not in options:
            again = copy.deepcopy(cache)
            assert [state.dtype for state in recurrent_states(again)] == [torch.float16] * len(recurrent_states(cache))
    with patched(model, {**CONFIG, **is_static}):
        assert torch.equal(greedy(model, inputs, 8, **options).sequences, expected)


@pytest.mark.parametrize("static", [False, True], ids=["growing", "static"])
@pytest.mark.parametrize("state_dtype", [None, "float16"])
def test_states_outlast_inference_mode(state_dtype: str | None, static: bool) -> None:
    """The model keeps them for its next call, which need not be in that mode, and a cache may go on outside of it."""
    model, ids = models.family("qwen3_5_text"), torch.arange(1, 11).view(2, 5)
    config = {"preset": "none", "static": static, "state_dtype": state_dtype}
    with patched(model, config):
        expected = greedy(model, left_padded(), 8).sequences
        for is_inference in (True, False, True):
            with torch.inference_mode(is_inference):
                assert torch.equal(greedy(model, left_padded(), 8).sequences, expected)
        logits = []
        for is_inference in (False, True):
            cache = KVQuantCache(model.config, config, max_cache_len=16 if static else None)
            with torch.inference_mode(is_inference), torch.no_grad():
                model(ids, **with_cache(cache))
            with torch.no_grad():
                logits.append(model(ids[:, :1], **with_cache(cache)).logits)
    assert torch.equal(*logits)


def test_numbers_that_float16_does_not_have() -> None:
    """They become its largest one, wherever a state is stored; what is NaN stays NaN."""
    given = torch.tensor([1e6, -1e6, 65519.0, 1.0, torch.nan, torch.inf])
    largest = torch.finfo(torch.float16).max
    expected = torch.tensor([largest, -largest, largest, 1.0, torch.nan, largest], dtype=torch.float16)
    layer = KVQuantStateLayer("layer 0", False, None, torch.float16)
    slots = SlotStates(torch.zeros(3, 6).half(), torch.tensor([0]), torch.tensor([2]))
    slots.store(given[None])
    group = Group(slice(0, 1), 1, slots.read, slots.read, has_past=True, read_slots=slots.read, write_slots=slots.write)
    plane = torch.zeros(3, 6).half()
    grouped = GroupLayer([(StatePart(False, 0, 0, (6,), torch.float16), plane)], group)
    grouped.update_recurrent_state(given[None])
    grouped.store()
    for found in (layer.update_recurrent_state(given[None])[0], slots.plane[2], plane[2]):
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@CUDA_ONLY
@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"prefill_chunk_size": 4}], ids=str)
@pytest.mark.parametrize("name", FAMILIES)
def test_captured_steps(name: str, options: dict[str, Any]) -> None:
    model, inputs = models.on("cuda", models.family(name)), left_padded()
    with patched(model, CONFIG):
        expected = greedy(model, inputs, 12, **options).sequences
    with patched(model, {**CONFIG, "capture": True}):
        for _ in range(2):
            assert torch.equal(greedy(model, inputs, 12, **options).sequences, expected)


# --- batches ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_fused", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
def test_batches_say_what_generate_says(name: str, is_fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if is_fused:
        fuse_batches(monkeypatch)
    with patched(models.family(name), CONFIG) as model:
        expected = [alone(model, prompt) for prompt in PROMPTS]
        assert batched(model, PROMPTS) == expected
        # Where a prompt is cut, its states are rounded.
        few = [prompt for prompt in PROMPTS if len(prompt) <= 7]
        assert batched(model, few, max_batch_tokens=7) == [expected[PROMPTS.index(prompt)] for prompt in few]
    notes_on(model).fusion = None


def test_slots_hold_half_of_the_bytes() -> None:
    sizes = []
    for config in ("none", CONFIG):
        with patched(models.family("qwen3_next"), config) as model, managed(model) as manager:
            answers(manager, PROMPTS[:1])
            states = manager.batch_processor.cache.states
            parts = [part for parts in states.layout.parts.values() for part in parts if not part.is_conv]
            dtypes = {plane.dtype for planes in states.planes.values() for part, plane in planes if not part.is_conv}
            sizes.append((sum(part.end - part.begin for part in parts), dtypes))
    (whole, _), (half, dtypes) = sizes
    assert whole == 2 * half > 0 and dtypes == {torch.float16}


def test_requests_that_starve_take_their_states_along(monkeypatch: pytest.MonkeyPatch) -> None:
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *args, pin_memory=False, **options: empty(*args, **options))
    prompts = [text(100 + i, seed=i) for i in range(4)]
    with patched(long("qwen3_next"), CONFIG) as model:
        expected = [alone(model, prompt, 12) for prompt in prompts]
        options = {"num_blocks": scarce(model), "max_batch_tokens": 512, "cpu_offload_space": 0.01}
        with managed(model, 12, **options) as manager:
            assert answers(manager, prompts) == expected


@CUDA_ONLY
@pytest.mark.parametrize("use_async_batching", [True, False])
@pytest.mark.parametrize("name", FAMILIES)
def test_batches_on_a_gpu(name: str, use_async_batching: bool) -> None:
    model = models.on("cuda", long(name))
    prompts = [*PROMPTS, text(70, seed=1)]
    with patched(model, CONFIG):
        expected = [alone(model, prompt, 12) for prompt in prompts]
        options = {"num_blocks": 24, "max_batch_tokens": 256, "use_async_batching": use_async_batching}
        with managed(model, 12, **options) as manager:
            assert [answers(manager, prompts) for _ in range(2)] == [expected] * 2


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "lfm2", "bamba", "falcon_h1", "kimi_linear"])
def test_models_without_such_states_are_refused(name: str) -> None:
    model = models.family(name)
    expected = (
        f"KVQuantCache: `state_dtype` must be None for {model.config.model_type}, got 'float16': it has no layers with "
        "a gated delta rule, and what other states lose by it is not known. Leave it out."
    )
    for make in (lambda: patch(model, CONFIG), lambda: KVQuantCache(model.config, CONFIG)):
        with pytest.raises(NotImplementedError) as raised:
            make()
        assert str(raised.value) == expected


@pytest.mark.parametrize("given", ["bfloat16", "float32", torch.float16, 16, True])
def test_other_dtypes_are_refused(given: Any) -> None:
    with pytest.raises(ValueError) as raised:
        KVQuantConfig(state_dtype=given)
    assert str(raised.value) == f"KVQuantConfig: `state_dtype` must be 'float16' or None, got {given!r}."
