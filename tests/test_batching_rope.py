"""Continuous batching of models with two sets of RoPE factors, for short texts and for long ones."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from hf_kvquant.upstream.releases import HAS_PAGES

if not HAS_PAGES:
    pytest.skip("needs continuous batching", allow_module_level=True)

import models
import torch
from test_batching import PAGE, alone, answers, generation, managed, next_result, settings
from transformers.generation.continuous_batching.requests import RequestState
from waiting import until

from hf_kvquant import patched
from hf_kvquant.batching import manager as manager_module
from hf_kvquant.batching.paged_cache import PagedCache
from hf_kvquant.batching.rope import RopeByRequest
from hf_kvquant.batching.sampling import KEY, Sampling
from hf_kvquant.models.rope import Switch, recomputes

BORDER = 24
SHORT, LONG = [5, 6, 7, 8], list(range(3, 63))
NEAR = list(range(3, 18))  # becomes long by its answer

# Whose config names the length where `generate` computes all keys again. Others keep the keys of short texts.
RECOMPUTED = ("phi3", "phimoe")


def built(family: str, border: int = BORDER, positions: int = 128) -> Any:
    """A model with factors for texts of up to `border` tokens, and others for longer ones."""
    options = dict(models.FAMILIES[family].options)
    plain: Any = models.build(family, **options)
    num_factors = plain.model.rotary_emb.inv_freq.shape[-1]
    rope = {
        **plain.config.rope_parameters,
        "rope_type": "longrope",
        "short_factor": [1.0] * num_factors,
        "long_factor": [4.0 + channel for channel in range(num_factors)],
        "original_max_position_embeddings": border,
    }
    if family == "phimoe":
        rope |= {"short_mscale": 1.1, "long_mscale": 1.3}
    if family in RECOMPUTED:
        options["original_max_position_embeddings"] = border
    return models.build(family, **{**options, "max_position_embeddings": positions, "rope_parameters": rope})


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("preset", ["none", "int8"])
@pytest.mark.parametrize("family", [*RECOMPUTED, "minicpm3", "llama"])
def test_requests_have_the_factors_of_their_own_length(family: str, preset: str, device: str) -> None:
    """Whatever the others have, in steps with prompts and without, in chunks of prompts, and beyond the border."""
    with patched(models.on(device, built(family)), preset) as model:
        expected = {name: alone(model, prompt, 20) for name, prompt in (("s", SHORT), ("l", LONG), ("n", NEAR))}
        for order in itertools.permutations("sln"):
            prompts = [{"s": SHORT, "l": LONG, "n": NEAR}[name] for name in order]
            for most in (256, 17):
                outputs = model.generate_batch(
                    prompts, continuous_batching_config=settings(max_batch_tokens=most), max_new_tokens=20
                ).values()
                for name, output in zip(order, outputs, strict=True):
                    assert output.error is None and output.generated_tokens == expected[name], (order, most, name)
        assert "forward" not in vars(model.model.rotary_emb)


@pytest.mark.parametrize("family", [*RECOMPUTED, "llama"])
def test_a_part_of_a_long_text_that_is_one_token(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a step looks like one without prompts, whose positions tell. With a table of pages, as on a GPU."""
    monkeypatch.setattr(manager_module, "max_blocks_of", lambda *_: 4)
    with patched(built(family), "none") as model:
        expected = [list(alone(model, prompt, 12)) for prompt in (SHORT, LONG, NEAR)]
        outputs = model.generate_batch(
            [SHORT, LONG, NEAR], continuous_batching_config=settings(max_batch_tokens=2), max_new_tokens=12
        )
    assert [output.generated_tokens for output in outputs.values()] == expected


@pytest.mark.parametrize("family", [*RECOMPUTED, "llama"])
def test_prompts_whose_tokens_are_scored(family: str) -> None:
    """They come in steps of one token, and have the factors of the whole prompt from the first one on."""
    with patched(built(family), "none") as model:
        expected = list(alone(model, LONG, 10))
        with torch.no_grad():
            found = model(torch.tensor([LONG])).logits[0].log_softmax(-1)
        scores = [float(found[at - 1, token]) for at, token in enumerate(LONG) if at]
        with managed(model, 10) as manager:
            sampling = Sampling(num_logprobs=0, forced=tuple(LONG))
            manager.start()
            manager.add_request(LONG[:1], max_new_tokens=len(LONG) + 9, **{KEY: sampling})
            result = next_result(manager)
    assert result.error is None and result.generated_tokens[-10:] == expected
    for told, score in zip(result.logprobs, scores, strict=False):
        assert abs(told.logprob - score) < 1e-4


@pytest.mark.parametrize("kind", ["outgrows its factors", "fills all pages", "is cancelled"])
def test_others_go_on_when_the_last_request_leaves(kind: str) -> None:
    """One has starved meanwhile, and waits until another finishes."""
    text = [token % 90 + 3 for token in range(700)]
    length = 2 * PAGE - 10
    prompts = [text[:length], text[50 : 50 + length]]
    is_rope = kind == "outgrows its factors"
    family, new_tokens = ("phi3", 60) if is_rope else ("llama", 900)
    with patched(built(family, border=2 * PAGE + 20 if is_rope else 2000, positions=2048), "none") as model:
        expected = [list(alone(model, prompt, 60)) for prompt in prompts]
        with managed(model, new_tokens, num_blocks=5, max_batch_tokens=1024) as manager:
            manager.start()
            names = [manager.add_request(prompt, max_new_tokens=new_tokens) for prompt in prompts]
            scheduler = manager.batch_processor.scheduler
            if kind == "is cancelled":
                until(lambda: scheduler.block_new_requests and len(scheduler.active_requests) == 1)
                (active,) = scheduler.active_requests
                manager.cancel_request(active)
                until(lambda: active not in scheduler.active_requests and scheduler.active_requests)
                return
            results = {each.request_id: each for each in (next_result(manager) for _ in names)}
    for name, tokens in zip(names, expected, strict=True):
        assert results[name].generated_tokens[:60] == tokens


def test_a_request_that_begins_again_keeps_its_times() -> None:
    with patched(built("phi3"), "none") as model:
        outputs = model.generate_batch(
            [NEAR], continuous_batching_config=settings(), max_new_tokens=20, record_timestamps=True
        )
    (output,) = outputs.values()
    assert len(output.timestamps) == 20 and output.timestamps == sorted(output.timestamps)
    assert output.created_time < output.timestamps[0]


def test_the_manager_that_starts_gives_the_factors() -> None:
    with patched(built("llama"), "none") as model:
        expected = [list(alone(model, prompt, 12)) for prompt in (SHORT, LONG)]
        first, second = (managed(model, 12) for _ in range(2))
        with first as manager, second:
            assert answers(manager, [SHORT, LONG]) == expected


def test_a_manager_that_was_dropped_leaves_no_factors() -> None:
    """Those of the next forward would stay: positions before the border have short ones."""
    model = built("phi3")
    with patched(model, "none"):
        manager = model.init_continuous_batching(generation(4), settings())
        assert "forward" in vars(model.model.rotary_emb)
        del manager
    assert "forward" not in vars(model.model.rotary_emb)


def test_only_models_that_drop_their_cache_compute_texts_again() -> None:
    """The config of any model may name the length."""
    options = {"original_max_position_embeddings": BORDER}
    assert [recomputes(models.build(family, **options)) for family in ("llama", "phi3")] == [False, True]


@pytest.mark.parametrize(("recomputes", "is_long"), [(True, True), (False, False)])
def test_a_request_that_is_taken_up_again(recomputes: bool, is_long: bool) -> None:
    """Its answer is part of the prompt then. Keys of a short text had the factors of short texts where they stay."""
    rope = RopeByRequest(built("llama"), Switch(BORDER, recomputes))
    state = RequestState("a", initial_tokens=NEAR, max_new_tokens=20)
    state.generated_tokens = list(range(12))
    again = state.create_equivalent_initial_request()
    assert rope.is_long(again) == rope.is_long(state) == is_long
    assert rope.outgrows(state) == recomputes and not rope.outgrows(again)


@pytest.mark.parametrize("family", ["phi3", "llama"])
def test_long_texts_share_no_pages_with_short_ones(family: str) -> None:
    """Where all keys of a long text have its factors, it shares pages with other long ones."""
    text = [token % 90 + 3 for token in range(500)]
    prompts = [text[:200], text[:400], text[:240], text, text[:400], text[:200]]
    with patched(built(family, border=256, positions=1024), "none") as model:
        expected = [list(alone(model, prompt, 8)) for prompt in prompts]
        with managed(model, 8, num_blocks=16) as manager:
            manager.start()
            cache, shared = manager.batch_processor.cache, []
            search = cache.search_prefix_match
            cache.search_prefix_match = lambda *of: (shared.append(search(*of)), shared[-1])[1]
            assert [answers(manager, [prompt])[0] for prompt in prompts] == expected
            assert not cache.allocator._apart
    assert shared == ([0, 0, 128, 384, 384, 128] if family == "phi3" else [0, 0, 128, 0, 0, 128])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="asynchronous batching is for GPUs")
def test_a_text_that_is_computed_again_needs_steps_one_after_the_other() -> None:
    with patched(models.on("cuda", built("phi3")), "int8") as model:
        message = "`use_async_batching` must be False for Phi3ForCausalLM, .* exceeds 24 tokens, got True"
        with pytest.raises(NotImplementedError, match=message):
            model.generate_batch([SHORT], continuous_batching_config=settings(use_async_batching=True))


def test_a_manager_that_starts_keeps_pages_and_captured_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with forwards of modules with states."""
    forgotten: list[str] = []
    monkeypatch.setattr(PagedCache, "forget_pages", lambda _: forgotten.append("pages"))
    with patched(built("phi3"), "int8") as model, managed(model, 4) as manager:
        answers(manager, [[3, 1, 4]])
    assert forgotten == []
