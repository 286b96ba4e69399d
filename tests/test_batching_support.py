"""What continuous batching refuses, and says: before a manager is made, with the model as it was."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from transformers import CompileConfig, GenerationConfig, WatermarkingConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from hf_kvquant import patched
from hf_kvquant.batching import support
from hf_kvquant.batching.support import WHERE
from hf_kvquant.models import probing
from hf_kvquant.state import patch_of
from hf_kvquant.upstream.releases import DO_MODELS_UPDATE_PAGES, HAS_PAGES

ROOT = Path(__file__).resolve().parents[1]
needs_pages = pytest.mark.skipif(not HAS_PAGES, reason="transformers' paged cache has another design")


def check_refused(
    model: Any, preset: Any, message: str, error: type[Exception] = NotImplementedError, **options: Any
) -> None:
    """It is refused with this message, and the model goes on as before."""
    with patched(model, preset):
        before = model.config._attn_implementation
        with pytest.raises(error, match=re.escape(message)):
            model.generate_batch([[5, 6]], continuous_batching_config=ContinuousBatchingConfig(**options))
        assert model.config._attn_implementation == before
        assert not hasattr(model, "_cached_continuous_batching_manager")


def test_another_version_of_transformers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support, "HAS_PAGES", False)
    monkeypatch.setattr(support, "VERSION", "5.17.0")
    check_refused(
        models.llama(),
        "int8",
        f"{WHERE}: `transformers` must be 5.23 or newer for continuous batching of a patched model, got 5.17.0.",
    )


@needs_pages
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("llama4_text", "Llama4ForCausalLM has layers of type ['chunked_attention'], which keep no pages."),
        ("bloom", "BloomForCausalLM does not have the attention implementation that patch sets: it computes attention"),
        ("jetmoe", "every layer of JetMoeForCausalLM must call the attention of transformers' registry once"),
        ("diffllama", "every layer of DiffLlamaForCausalLM must call the attention of transformers' registry once"),
    ],
)
def test_models_that_pages_do_not_serve_are_refused(name: str, message: str) -> None:
    check_refused(models.family(name), "int8", message)


@needs_pages
def test_families_that_are_served() -> None:
    """Those that the tests on a GPU run. The docs say how many there are."""
    served = []
    for name in models.FAMILIES:
        with patched(model := models.family(name), "int8"), contextlib.suppress(NotImplementedError):
            model.init_continuous_batching(continuous_batching_config=ContinuousBatchingConfig()).destroy()
            served.append(name)
    assert served == models.BATCHED
    if DO_MODELS_UPDATE_PAGES:  # older releases serve fewer
        page = (ROOT / "docs" / "batching.md").read_text(encoding="utf-8")
        assert f"\n{len(served)} of the model families" in page


@needs_pages
def test_windows_that_are_not_quantised_are_refused() -> None:
    message = "Gemma2ForCausalLM is patched with sliding=False, but all layers share pages of codes. Patch it without."
    check_refused(models.family("gemma2"), {"preset": "int8", "sliding": False}, message)


@needs_pages
def test_encoder_decoders_are_refused() -> None:
    message = "BartForConditionalGeneration is an encoder-decoder, which transformers does not batch continuously."
    check_refused(models.bart(), "int8", message)


@needs_pages
def test_another_attention_than_that_of_the_patch_is_refused() -> None:
    with patched(models.build("llama"), "int8") as model:
        model.set_attn_implementation("eager")
        with pytest.raises(NotImplementedError, match="or another has been set since"):
            model.init_continuous_batching()


@needs_pages
def test_models_that_pass_nothing_on_are_refused() -> None:
    model = models.build("llama")
    forward = model.forward

    def of_few(input_ids: Any = None, attention_mask: Any = None, use_cache: Any = None) -> Any:
        return forward(input_ids, attention_mask, use_cache=use_cache)

    model.forward = of_few
    check_refused(model, "int8", "LlamaForCausalLM takes no further arguments that it passes on to attention")


@needs_pages
def test_layers_without_keys_of_their_own_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support, "states_of_a_token", lambda model: {0: (torch.zeros(1), torch.zeros(1))})
    check_refused(models.llama(), "int8", "every layer of LlamaForCausalLM must have keys and values of its own, got 1")


@needs_pages
def test_a_model_that_drops_caches_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probing, "CHECKPOINTING_DROPS_CACHES", True)
    model = models.build("llama")
    models.checkpoint_gradients(model)
    model.train()
    message = "`model` must keep its cache, got a LlamaForCausalLM in training mode with gradient checkpointing, which"
    check_refused(model, "int8", f"init_continuous_batching: {message}", ValueError)


@needs_pages
def test_other_devices_are_refused() -> None:
    model = models.build("llama").to("meta")
    check_refused(model, "int8", "LlamaForCausalLM has weights that are not in memory, and continuous batching")


@needs_pages
@pytest.mark.parametrize(
    ("config", "options", "message", "error"),
    [
        (
            {"preset": "int4-token", "sink_length": 999},
            {"page_size": 384, "num_blocks": 2},
            "since the dense tokens of a request take as much memory as",
            ValueError,
        ),
        (
            {"preset": "int4-token", "layers": {1: {"residual_length": 800}}},
            {"num_blocks": 4},
            "of them, got 4. Set a larger one, or a larger `page_size`.",
            ValueError,
        ),
        (
            {"key": {"storage": "int8", "granularity": "tensor"}},
            {},
            "PageLayout: `key` must not have granularity 'tensor'",
            ValueError,
        ),
        ("int8", {"page_size": 100}, "`num_tokens` must be a positive multiple of 128, got 100. Set", ValueError),
        ("int8", {"page_size": None}, "`num_tokens` must be a positive multiple of 128, got None. Set", ValueError),
        ("int8", {"page_size": "256"}, "`num_tokens` must be a positive multiple of 128, got '256'. Set", ValueError),
        ("int8", {"scheduler_type": "lifo"}, "`scheduler_type` must be one of ['fifo', 'prefill_first']", ValueError),
        (
            {"preset": "int8", "offloading": True},
            {},
            "LlamaForCausalLM is patched with `offloading`, which is for the cache of one call of generate. Set",
            NotImplementedError,
        ),
        ("int8", {"use_async_batching": True}, "`use_cuda_graph` must be False on a cpu, got", NotImplementedError),
        ("int8", {"use_cuda_graph": True}, "`use_async_batching` and `use_cuda_graph` must be", NotImplementedError),
        (
            "int8",
            {"default_compile_level": 1},
            "must be left out over pages of codes, got one of them. Steps",
            NotImplementedError,
        ),
        (
            "int8",
            {"varlen_compile_config": CompileConfig()},
            "must be left out over pages of codes, got one of them. Steps",
            NotImplementedError,
        ),
        (
            "int8",
            {"decode_compile_config": CompileConfig()},
            "must be left out over pages of codes, got one of them. Steps",
            NotImplementedError,
        ),
    ],
)
def test_settings_that_pages_do_not_serve_are_refused(
    config: Any, options: dict[str, Any], message: str, error: type[Exception]
) -> None:
    check_refused(models.llama(), config, message, error, **options)


@needs_pages
@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
@pytest.mark.parametrize("space", [0.5, None])
def test_memory_for_requests_that_wait_needs_a_gpu(space: float | None) -> None:
    message = f"{WHERE}: `cpu_offload_space` must be 0 on a machine without a GPU, got {space}: requests would wait"
    check_refused(models.llama(), "int8", message, cpu_offload_space=space)


HOLD = "`generation_config` must only have settings that hold under continuous batching, got "


def never(*_: Any) -> None:
    raise AssertionError("the model runs")


def check_setting_refused(model: Any, config: GenerationConfig | None, message: str) -> None:
    """It is refused before the model runs."""
    hook = model.register_forward_pre_hook(never)
    try:
        with patched(model, "int8"), pytest.raises(NotImplementedError, match=re.escape(f"{WHERE}: {HOLD}{message}")):
            model.generate_batch([[5, 6]], config, ContinuousBatchingConfig(num_blocks=2))
    finally:
        hook.remove()


@needs_pages
@pytest.mark.parametrize(
    "options",
    [
        {"stop_strings": "a"},
        {"max_time": 0.0},
        {"num_beams": 3},
        {"num_beam_groups": 2},
        {"diversity_penalty": 0.5},
        {"penalty_alpha": 0.5},
        {"dola_layers": "low"},
        {"constraints": [1]},
        {"force_words_ids": [[1]]},
        {"min_length": 1},
        {"min_new_tokens": 1},
        {"repetition_penalty": 1.8},
        {"encoder_repetition_penalty": 1.8},
        {"no_repeat_ngram_size": 2},
        {"encoder_no_repeat_ngram_size": 2},
        {"bad_words_ids": [[9]]},
        {"sequence_bias": [[[9], 10.0], [[9, 8], 10.0]]},
        {"forced_bos_token_id": 0},
        {"forced_eos_token_id": 0},
        {"exponential_decay_length_penalty": (2, 1.5)},
        {"begin_suppress_tokens": [9]},
        {"guidance_scale": 2.0},
        {"token_healing": True},
        {"watermarking_config": WatermarkingConfig()},
        {"assistant_ensemble_weight": 0.5},
        {"output_scores": True},
        {"output_logits": True},
        {"output_attentions": True},
        {"output_hidden_states": True},
        {"added_by_a_later_release": 1},
    ],
    ids=lambda options: next(iter(options)),
)
def test_settings_that_batching_would_drop_are_refused(options: dict[str, Any]) -> None:
    (name,) = options
    config = GenerationConfig(max_new_tokens=3, eos_token_id=2, **options, return_dict_in_generate=True)
    check_setting_refused(models.llama(), config, f"{name}=")


@needs_pages
def test_settings_that_nobody_has_judged_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """One setting after the other, with a value that no setting has as its default."""
    from hf_kvquant.batching import settings

    lists = settings._HOLD | settings._OF_GENERATE
    names = {name for name in vars(GenerationConfig()) if not name.startswith("_")}
    assert {"stop_strings", "num_beams"} <= names - lists and "max_new_tokens" in lists
    model = models.llama()
    for name in names - {"sequence_bias"}:
        config = GenerationConfig(eos_token_id=2)
        setattr(config, name, 0.123)
        with contextlib.nullcontext() if name in lists else pytest.raises(NotImplementedError, match=f"{name}=0.123"):
            settings.check_settings(model, config)


@needs_pages
def test_all_refused_settings_are_named_at_once() -> None:
    config = GenerationConfig(num_beams=3, stop_strings=["a"], temperature=0.5, bad_words_ids=[[9]] * 100)
    shown = "stop_strings=['a'], num_beams=3, bad_words_ids=[[9], [9], [9], [9], [9], [9], ...]"
    check_setting_refused(models.llama(), config, f"{shown}. Leave out what is named, or use generate.")


@needs_pages
def test_a_setting_that_the_model_brings_is_said_to_be_its_own() -> None:
    model = models.build("llama")
    model.generation_config.no_repeat_ngram_size = 3
    model.generation_config.num_beams = 2
    own = "use generate. The model's own generation config (generation_config.json) sets"
    both = f"num_beams=2, no_repeat_ngram_size=3. Leave out what is named, or {own} num_beams, no_repeat_ngram_size."
    both += " To do without, set that to None in model.generation_config."
    check_setting_refused(model, None, both)
    check_setting_refused(model, GenerationConfig(max_new_tokens=3), both)  # generate would use them, too
    config = GenerationConfig(num_beams=3)
    check_setting_refused(
        model, config, f"num_beams=3, no_repeat_ngram_size=3. Leave out what is named, or {own} no_repeat_ngram_size."
    )


@needs_pages
def test_a_repetition_penalty_that_the_model_brings_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    """Many chat models have one. If the caller asks for another, it is refused."""
    model = models.build("llama")
    model.generation_config.repetition_penalty = 1.0625
    batching = ContinuousBatchingConfig(num_blocks=2, max_batch_tokens=64)
    with patched(model, "int8"):
        (output,) = model.generate_batch([[5, 6]], None, batching, max_new_tokens=2).values()
    assert len(output.generated_tokens) == 2
    told = [record.getMessage() for record in caplog.records if record.name.startswith("hf_kvquant")]
    what = "what the model's own generation config sets: repetition_penalty=1.0625."
    assert f"{WHERE}: continuous batching leaves out {what}" in told
    check_setting_refused(
        model, GenerationConfig(repetition_penalty=1.5), "repetition_penalty=1.5. Leave out what is named"
    )


@needs_pages
@pytest.mark.parametrize("kind", ["defaults", "of a checkpoint"])
def test_settings_that_change_nothing_pass(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """transformers' defaults, spelt out; and what checkpoints bring, with names that mean nothing to generate."""
    model, defaults = models.build("llama"), GenerationConfig._get_default_generation_params()
    brought: dict[str, Any] = {"min_new_tokens": 0, "guidance_scale": 1.0, "chat_format": "chatml", "use_cache": False}
    brought |= {"transformers_version": "4.40.0", "disable_compile": True, "early_stopping": True}
    for name, value in (defaults if kind == "defaults" else brought).items():
        setattr(model.generation_config, name, value)
    with patched(model, "int8"):
        outputs = model.generate_batch(
            [[5, 6]],
            continuous_batching_config=ContinuousBatchingConfig(num_blocks=2, max_batch_tokens=64),
            max_new_tokens=3,
        )
    assert [len(each.generated_tokens) for each in outputs.values()] == [3]
    assert WHERE not in caplog.text


@needs_pages
def test_settings_of_generate_alone_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    config = GenerationConfig(max_new_tokens=2, cache_implementation="static", prompt_lookup_num_tokens=7)
    with patched(models.llama(), "int8") as model:
        for _ in range(2):
            model.generate_batch([[5, 6]], config, ContinuousBatchingConfig(num_blocks=2, max_batch_tokens=64))
    (told,) = (record.getMessage() for record in caplog.records if record.name.startswith("hf_kvquant"))
    assert told == (
        f"{WHERE}: continuous batching leaves out settings that are for generate alone: cache_implementation='static', "
        "prompt_lookup_num_tokens=7."
    )


@needs_pages
@pytest.mark.parametrize(
    "cache_config",
    [{"backend": "hf_kvquant", "preset": "int4-token"}, {"preset": "int4-token"}, {"backend": "quanto", "nbits": 4}],
    ids=str,
)
def test_a_cache_of_another_kind_than_the_pages_is_refused(cache_config: dict[str, Any]) -> None:
    message = f"{WHERE}: `cache_config` must be left out, or be the config that the model is patched with, since the"
    ids = torch.tensor([[5, 6]])
    with patched(models.llama(), "int8") as model:
        with pytest.raises(ValueError, match=re.escape(message)) as raised:
            model.generate(ids, cache_implementation="paged", cache_config=cache_config, max_new_tokens=2)
        assert f"got {cache_config!r}. Patch the model with the one that you want." in str(raised.value)
        assert str(patch_of(model).config.to_dict()) in str(raised.value)
        model.generate(ids, max_new_tokens=2)  # as it was


@needs_pages
def test_padding_is_refused() -> None:
    """transformers passes it on as text (5.24)."""
    ids, batching = torch.tensor([[0, 5, 6], [7, 8, 9]]), ContinuousBatchingConfig(num_blocks=2, max_batch_tokens=64)
    options: dict[str, Any] = {"cache_implementation": "paged", "continuous_batching_config": batching}
    with patched(models.llama(), "int8") as model:
        message = "generate_batch: `attention_mask` must be left out or all ones, got one that hides tokens"
        with pytest.raises(NotImplementedError, match=re.escape(message)):
            model.generate(ids, attention_mask=(ids != 0).long(), max_new_tokens=2, **options)
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=2, **options)
    assert out.shape == (1, 2, 5)


@needs_pages
def test_the_cache_of_the_pages_may_be_named(caplog: pytest.LogCaptureFixture) -> None:
    cache_config = {"backend": "hf_kvquant", "preset": "int8"}
    batching = ContinuousBatchingConfig(num_blocks=2, max_batch_tokens=64)
    with patched(models.llama(), "int8") as model:
        options: dict[str, Any] = {"cache_config": cache_config, "continuous_batching_config": batching}
        out = model.generate(torch.tensor([[5, 6]]), cache_implementation="paged", max_new_tokens=2, **options)
        config = GenerationConfig(max_new_tokens=2, cache_implementation="quantized", cache_config=cache_config)
        model.generate_batch([[5, 6]], config, batching)
    assert out.shape == (1, 1, 4) and WHERE not in caplog.text


@needs_pages
def test_models_on_several_devices_are_refused() -> None:
    model = models.build("llama")
    model.lm_head.to("meta")
    check_refused(model, "int8", "LlamaForCausalLM is spread over several devices, and all pages are on one.")


@needs_pages
def test_capturing_steps_with_prompts_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with patched(models.build("llama"), "int8") as model:
        monkeypatch.setattr(type(model), "device", torch.device("cuda"))
        config = patch_of(model).config
        message = f"{WHERE}: `use_cuda_graph` must be False for steps with prompts, got (True, True). Only decode steps"
        with pytest.raises(NotImplementedError, match=re.escape(message)):
            support.check_served(model, config, ContinuousBatchingConfig(use_cuda_graph=(True, True)))


@needs_pages
def test_capturing_steps_that_gather_weights_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with patched(models.build("llama"), "int8") as model:
        monkeypatch.setattr(type(model), "device", torch.device("cuda"))
        monkeypatch.setattr(support, "why_not_captured", lambda model: "its weights are divided among processes")
        config = patch_of(model).config
        support.check_served(model, config, ContinuousBatchingConfig())
        message = f"{WHERE}: `use_cuda_graph` must be False for this {type(model).__name__}, got True: its weights are"
        with pytest.raises(NotImplementedError, match=re.escape(message)):
            support.check_served(model, config, ContinuousBatchingConfig(use_cuda_graph=True))


@needs_pages
def test_compiling_by_the_config_of_the_model_is_refused() -> None:
    model = models.build("llama")
    model.config.compile_config = CompileConfig()
    check_refused(model, "int8", "`compile_config` of the model's config, must be left out over pages of codes")


@needs_pages
def test_memory_of_unknown_size_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support, "is_psutil_available", lambda: False)
    message = f"{WHERE}: `num_blocks` and `max_batch_tokens` must be given without psutil, got none"
    check_refused(models.llama(), "int8", message, ImportError, num_blocks=4)


@needs_pages
def test_sizes_that_are_given_need_no_psutil(monkeypatch: pytest.MonkeyPatch) -> None:
    from hf_kvquant.batching import memory

    def unknown() -> Any:
        return torch.device("cpu"), 0, 0, 0

    for module in (support, memory):
        monkeypatch.setattr(module, "is_psutil_available", lambda: False)
    monkeypatch.setattr("transformers.generation.continuous_batching.cache.get_device_and_memory_breakdown", unknown)
    with patched(models.llama(), "int8") as model:
        manager = model.init_continuous_batching(
            continuous_batching_config=ContinuousBatchingConfig(num_blocks=3, max_batch_tokens=64)
        )
        manager.warmup()
        assert manager.batch_processor.cache.num_blocks == 3
        manager.destroy()
