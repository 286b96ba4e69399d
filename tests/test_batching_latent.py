"""Continuous batching of models that keep latents (MLA): codes in pages, and each request as `generate` answers it."""

from __future__ import annotations

from typing import Any

import models
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from hf_kvquant import patched
from hf_kvquant.batching import support
from hf_kvquant.models.latent import channels_at_peak, latent_attentions
from hf_kvquant.upstream.releases import DO_MODELS_UPDATE_PAGES, HAS_PAGES

if not HAS_PAGES:
    pytest.skip("transformers' paged cache has another design", allow_module_level=True)

from test_batching import (
    PAGE,
    PROMPTS,
    alone,
    answers,
    batched,
    check_as_generate,
    check_nothing_leaks,
    generation,
    managed,
    text,
)

from hf_kvquant.batching.memory import PageMemory

hands_over = pytest.mark.skipif(not DO_MODELS_UPDATE_PAGES, reason="attention gets keys and values made of latents")

# Dense windows that prompts outgrow, in pages that hold them.
WINDOWED = {"preset": "int4", "sink_length": 2, "residual_length": 8}
PRESETS: dict[str, Any] = {
    "none": "none",
    "fp8": "fp8",
    "int4": {"preset": "int4", "sink_length": 0, "residual_length": 0},
    "int4-g32": "int4-g32",
    "windowed": WINDOWED,
}


def long(name: str = "minicpm3") -> Any:
    return models.build(
        models.FAMILIES[name].model_type, **{**models.FAMILIES[name].options, "max_position_embeddings": 1024}
    )


@hands_over
@pytest.mark.parametrize("name", models.WITH_LATENTS)
def test_each_request_gets_what_generate_gives_it(name: str) -> None:
    check_as_generate(name)


@hands_over
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("preset", PRESETS)
def test_presets(preset: str, attention: str) -> None:
    model = models.build("minicpm3", attention=attention, **models.FAMILIES["minicpm3"].options)
    with patched(model, PRESETS[preset]):
        assert batched(model, PROMPTS) == [alone(model, prompt) for prompt in PROMPTS]


@hands_over
@pytest.mark.parametrize("preset", ["int8", *PRESETS])
@pytest.mark.parametrize("size", [40, 100])
def test_long_chunks_see_their_own_tokens_as_they_are(size: int, preset: str) -> None:
    """Where latents are not quantised, they see no others."""
    prompts = [text(250), text(3, seed=1)]
    with patched(long(), PRESETS.get(preset, preset)) as model:
        expected = [alone(model, prompt, prefill_chunk_size=size) for prompt in prompts]
        assert [batched(model, [prompt], max_batch_tokens=size)[0] for prompt in prompts] == expected


@hands_over
@pytest.mark.parametrize("preset", ["int8", "windowed"])
def test_requests_share_a_prefix_of_several_pages(preset: str) -> None:
    shared = text(2 * PAGE)
    prompts = [[*shared, *text(20, seed)] for seed in (1, 2)]
    with patched(long(), PRESETS.get(preset, preset)) as model:
        alone_each = [batched(model, [prompt], max_batch_tokens=512)[0] for prompt in prompts]
        with managed(model, max_batch_tokens=512, num_blocks=24) as manager:
            assert answers(manager, prompts[:1]) == alone_each[:1]
            found = manager.batch_processor.cache.allocator.match_prefix_blocks(prompts[1])
            assert len(found) >= 1  # with windows, a block has its codes when it has left the window
            second = answers(manager, prompts[1:])[0]
        assert second == alone(model, prompts[1], prefill_chunk_size=PAGE * len(found))


@hands_over
@pytest.mark.parametrize("preset", ["int8", "windowed"])
def test_forks_go_on_from_the_prompt(preset: str) -> None:
    prompts = [text(PAGE + 40), [9, 6, 7]]
    with patched(long(), PRESETS.get(preset, preset)) as model:
        options = generation(8, num_return_sequences=3, do_sample=True, top_k=1)
        outputs = model.generate_batch(
            prompts,
            options,
            support.ContinuousBatchingConfig(page_size=PAGE, num_blocks=24, max_batch_tokens=512),
            persistent_manager=True,
        )
        check_nothing_leaks(model)
        answered = [output.generated_tokens for output in outputs.values()]
        for at, prompt in enumerate(prompts):
            expected = alone(model, prompt, 8, prefill_chunk_size=len(prompt) - 1)
            assert answered[3 * at : 3 * at + 3] == [expected] * 3


@hands_over
def test_requests_that_starve_start_again() -> None:
    prompts = [text(PAGE - 4 - i, seed=i) for i in range(3)]
    with patched(long(), "none") as model:
        expected = [alone(model, prompt, 12) for prompt in prompts]
        assert batched(model, prompts, 12, num_blocks=4, max_batch_tokens=512) == expected


@hands_over
def test_memory_for_a_new_token_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt makes keys and values for all heads, which are wider than what pages hold."""
    seen: list[PageMemory] = []
    model = models.family("deepseek_v3")
    config = model.config
    n, r, v, rank = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim, config.kv_lora_rank
    assert channels_at_peak(config) == config.num_attention_heads * (3 * n + 3 * r + 2 * v + 2 * rank)
    checked = PageMemory._check_footprint
    monkeypatch.setattr(
        PageMemory, "_check_footprint", lambda self, *sizes: (seen.append(self), checked(self, *sizes))[1]
    )
    with patched(model, "int8"), managed(model):
        pass
    assert seen[0].bytes_per_batch_token >= 4 * channels_at_peak(config)


def adapted(model: Any) -> Any:
    get_peft_model(model, LoraConfig(target_modules=["kv_b_proj"]))
    return model


def hooked(model: Any) -> Any:
    for module in latent_attentions(model):
        module.kv_b_proj.register_forward_hook(lambda *_: None)
    return model


def biased(model: Any) -> Any:
    for module in latent_attentions(model):
        module.kv_b_proj.bias = nn.Parameter(torch.zeros(len(module.kv_b_proj.weight)))
    return model


@hands_over
@pytest.mark.parametrize(
    ("change", "why"),
    [
        (adapted, "kv_b_proj has an adapter, so latents are expanded"),
        (hooked, "kv_b_proj has hooks, so latents are expanded"),
        (biased, "kv_b_proj has a bias, so latents are expanded"),
    ],
)
def test_other_projections_are_refused(change: Any, why: str) -> None:
    model = models.build("deepseek_v3", **models.FAMILIES["deepseek_v3"].options)
    with patched(change(model), "int8"), pytest.raises(NotImplementedError) as raised:
        model.generate_batch([[3, 4, 5]])
    assert str(raised.value) == (
        f"init_continuous_batching: DeepseekV3ForCausalLM keeps latents (MLA) that pages cannot serve: {why}. Use "
        "generate, or unpatch the model."
    )


def test_releases_whose_models_expand_first_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support, "DO_MODELS_UPDATE_PAGES", False)
    monkeypatch.setattr(support, "VERSION", "5.23.0")
    model = models.family("deepseek_v3")
    with patched(model, "int8"), pytest.raises(NotImplementedError) as raised:
        model.generate_batch([[3, 4, 5]])
    assert str(raised.value) == (
        "init_continuous_batching: DeepseekV3ForCausalLM keeps latents (MLA), whose pages need transformers 5.24 or "
        "newer, got 5.23.0. Use generate, or unpatch the model."
    )


# --- on a GPU ---------------------------------------------------------------------------------------------------------

on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="captures CUDA graphs")
OPTIONS = [{}, {"use_async_batching": False}, {"use_cuda_graph": False}]


def wide(rank: int, dtype: torch.dtype) -> Any:
    """A model whose latents kernels serve."""
    sizes = {**models.FAMILIES["minicpm3"].options, "kv_lora_rank": rank, "qk_rope_head_dim": 64}
    return models.on("cuda", models.build("minicpm3", dtype, None, **{**sizes, "max_position_embeddings": 1024}))


@on_a_gpu
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("preset", ["int8", "none", "windowed"])
@pytest.mark.parametrize("name", models.WITH_LATENTS)
def test_captured_and_asynchronous_steps(name: str, preset: str, options: Any) -> None:
    """In float32, over the reference."""
    model = models.on("cuda", long(name))
    prompts = [*PROMPTS, text(PAGE - 4), text(70, seed=1)]
    with patched(model, PRESETS.get(preset, preset)):
        expected = [alone(model, prompt, 12) for prompt in prompts]
        # Room for all: a request that starves may start again, and then sees its own tokens as a prompt does.
        with managed(model, 12, num_blocks=48, max_batch_tokens=256, **options) as manager:
            assert [answers(manager, prompts) for _ in range(2)] == [expected] * 2


@on_a_gpu
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("preset", ["int8", "fp8", "int4", "windowed"])
@pytest.mark.parametrize("rank", [256, 512])
def test_kernels_attend_to_pages(rank: int, preset: str, options: Any) -> None:
    """Captured, asynchronous and plain steps over several pages; bfloat16 rounds, so a near choice may change."""
    model = wide(rank, torch.bfloat16)
    prompts = [text(PAGE - 4), text(2 * PAGE + 70, seed=1), *PROMPTS]
    with patched(model, PRESETS.get(preset, preset)):
        expected = [alone(model, prompt, 12) for prompt in prompts]
        with managed(model, 12, num_blocks=40, max_batch_tokens=600, **options) as manager:
            assert [answers(manager, prompts) for _ in range(2)] == [expected] * 2


@on_a_gpu
@pytest.mark.parametrize("preset", ["int8", "windowed"])
def test_chunks_on_a_gpu(preset: str) -> None:
    """In float32: in 16 bits, rounding in another order changes tokens."""
    prompts = [text(500), text(333, seed=1)]
    model = wide(512, torch.float32)
    with patched(model, PRESETS.get(preset, preset)):
        expected = [alone(model, prompt, prefill_chunk_size=128) for prompt in prompts]
        assert [batched(model, [prompt], max_batch_tokens=128, num_blocks=24)[0] for prompt in prompts] == expected
