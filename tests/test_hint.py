"""What `patch` says of weights that are hard to store in few bits: one line, once, and nothing of other models."""

from __future__ import annotations

import logging
from typing import Any

import models
import pytest
import torch
from accelerate import cpu_offload
from models import stretch
from test_preflight import biased, build, text, with_gains, with_outliers
from transformers import CsmConfig, CsmForConditionalGeneration, LlamaConfig, LlamaForCausalLM

import hf_kvquant
from hf_kvquant.calibration.origins import Output, rule_of
from hf_kvquant.models.probing import hooked
from hf_kvquant.preflight import hint
from hf_kvquant.preflight.signals import read_signals

PLAIN: dict[str, Any] = {"preset": "int4-token", "transforms": []}
ROTATED: dict[str, Any] = {"preset": "int4-token", "transforms": ["rotate"]}
WHAT_TO_RUN = (
    "Calibrate it with hf_kvquant.smooth_attention(model, tokenizer, texts, preset_or_config) or hf-kvquant calibrate "
    "--preset, or take preset "
    "'int8'. hf_kvquant.run_preflight(model) measures the cost."
)


def said(caplog: pytest.LogCaptureFixture, model: Any, config: Any) -> list[str]:
    """The lines that a patch logs, without a forward of the model."""

    def refuse(*args: Any) -> None:
        raise AssertionError("patch must not run the model")

    caplog.clear()
    with caplog.at_level(logging.INFO, "hf_kvquant"), hooked([(model, refuse)], before=True):
        hf_kvquant.patch(model, config)
    return [record.message for record in caplog.records if record.name == hint.__name__]


@pytest.mark.parametrize(
    "make, config, start",
    [
        (biased, ROTATED, "Qwen2ForCausalLM much quality in 4 bits (layers 0, 1: a key bias of 1"),
        (
            lambda: with_outliers(16.0),
            "int4-token",
            "LlamaForCausalLM much quality in 4 bits (layers 0, 1: projection rows of 1",
        ),
        (with_gains, PLAIN, "Qwen3ForCausalLM much quality in 4 bits (layer 0: norm gains of 50 times the median"),
        (
            with_gains,
            {"preset": "int8", "layers": {0: "int2"}},
            "Qwen3ForCausalLM much quality in 2 bits (layer 0: norm g",
        ),
    ],
    ids=["bias", "outliers", "gains", "one layer"],
)
def test_trouble_is_said_once(make: Any, config: Any, start: str, caplog: pytest.LogCaptureFixture) -> None:
    model = make()
    [line] = said(caplog, model, config)
    assert line.startswith(f"patch: `preset_or_config` may cost {start}") and line.endswith(WHAT_TO_RUN)
    assert "\n" not in line
    assert said(caplog, model, config) == [] == said(caplog, hf_kvquant.unpatch(model), PLAIN)


def test_learned_sinks_are_said(caplog: pytest.LogCaptureFixture) -> None:
    family = models.FAMILIES["gpt_oss"]
    [line] = said(caplog, models.build(family.model_type, **family.options), "int4-token")
    assert "learned attention sinks, next to which errors of keys count more)" in line


@pytest.mark.parametrize("config", ["int8", "int4"])
def test_uneven_latents_are_said_once(config: str, caplog: pytest.LogCaptureFixture) -> None:
    model = models.build("deepseek_v3", **models.FAMILIES["deepseek_v3"].options)
    assert said(caplog, model, config) == []
    stretch(hf_kvquant.unpatch(model), layer=1)
    [line] = said(caplog, model, config)
    assert line.startswith(
        "patch: `preset_or_config` may cost DeepseekV3ForCausalLM much quality (layer 1: latents with uneven channels, "
        "by which rounding errors are up to "
    )
    assert line.endswith(
        "the most in layer 1). hf_kvquant.smooth_attention(model, tokenizer, texts, preset_or_config) evens them out."
    )
    assert said(caplog, hf_kvquant.unpatch(model), config) == []


def test_latents_whose_codes_are_floats_need_no_hint(caplog: pytest.LogCaptureFixture) -> None:
    model = stretch(models.build("deepseek_v3", **models.FAMILIES["deepseek_v3"].options), layer=1)
    assert said(caplog, model, "fp8") == [] == said(caplog, hf_kvquant.unpatch(model), "none")


@pytest.mark.parametrize("config", ["int8", "fp8", "k8v4", "none"])
def test_more_bits_need_no_hint(config: str, caplog: pytest.LogCaptureFixture) -> None:
    assert said(caplog, with_outliers(16.0), config) == []


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "gemma3_text", "phi3", "gpt2", "falcon", "opt", "mistral"])
def test_models_without_trouble_are_left_alone(name: str, caplog: pytest.LogCaptureFixture) -> None:
    family = models.FAMILIES.get(name, models.Family(name))
    for config in ("int4-token", "int4-channel"):
        assert said(caplog, models.build(family.model_type, **family.options), config) == []


def test_calibrated_and_measured_models_are_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    model = with_outliers(16.0)
    result = hf_kvquant.run_preflight(model, "int4-token")
    assert said(caplog, model, {"preset": "int4-token", "max_cache_len": 64}) == [], "its cost is known"
    assert result.cost is not None and len(said(caplog, model, "int4-g32")) == 1
    for mode in ("fold", "online"):
        model = with_outliers(16.0)
        hf_kvquant.smooth_attention(model, models.tokenizer(), [text()], "int4-token", mode=mode, progress=False)
        assert said(caplog, model, "int4-token") == []


def test_a_norm_without_a_bias_is_one_with_gains(caplog: pytest.LogCaptureFixture) -> None:
    """As in Moonshine: PyTorch asks a LayerNorm for the bias that it was made without."""
    model = with_outliers(16.0)
    for layer in model.model.layers:
        norm = layer.input_layernorm = torch.nn.LayerNorm(models.HIDDEN_SIZE, bias=False)
        assert rule_of(Output(norm, (1, models.HIDDEN_SIZE), 0)) == "gain"
    assert len(said(caplog, model, "int4-token")) == 1


@pytest.mark.parametrize("kind", ["meta", "offloaded", "quantised"])
def test_weights_that_cannot_be_read_are_left_out(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    model: Any = with_outliers(16.0)
    if kind == "meta":
        with torch.device("meta"):
            model = LlamaForCausalLM(LlamaConfig(**models.COMMON))
    elif kind == "offloaded":
        cpu_offload(model, torch.device("cpu"))
    else:
        for layer in model.model.layers:
            layer.self_attn.k_proj.weight = torch.nn.Parameter(
                layer.self_attn.k_proj.weight.to(torch.float8_e4m3fn), requires_grad=False
            )
    assert said(caplog, model, "int4-token") == []


@pytest.mark.parametrize("make", [biased, lambda: with_outliers(16.0), with_gains, build], ids=["b", "o", "g", "none"])
def test_signals_are_those_of_the_preflight(make: Any) -> None:
    """Which finds them by running the model."""
    model = make()
    measured, _ = read_signals(model, where="test")
    turn = hint._mean_turn(model)
    for index, layer in enumerate(model.model.layers):
        found, expected = hint._signals(model, layer, layer.self_attn, index, turn), measured[index]
        assert found is not None and found.channel_ratio == pytest.approx(expected.channel_ratio, rel=0.05)
        assert found.channel_source == expected.channel_source and found.head_dim == expected.head_dim
        for center in (None, expected.bias_center):
            ratios = found.bias_ratio(center), expected.bias_ratio(center)
            assert ratios[0] == pytest.approx(ratios[1], rel=0.5, abs=0.02)
        assert found.bias_center is not None and expected.bias_center is not None
        torch.testing.assert_close(found.bias_center, expected.bias_center, rtol=1e-3, atol=1e-2)


def csm() -> Any:
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"vocab_size": 256, "num_codebooks": 4, "head_dim": 16}
    depth = {**sizes, "num_hidden_layers": 4, "backbone_hidden_size": 64}
    tokens = {"pad_token_id": 1, "codebook_pad_token_id": 1, "bos_token_id": 1, "audio_token_id": 1}
    tokens |= {"audio_eos_token_id": 1, "codebook_eos_token_id": 0}
    return CsmForConditionalGeneration(
        CsmConfig(**sizes, **tokens, text_vocab_size=256, num_hidden_layers=2, depth_decoder_config=depth)
    )


def gemma4() -> Any:
    theirs = pytest.importorskip("transformers.models.gemma4", reason="this release has no Gemma 4")
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"vocab_size": 96, "vocab_size_per_layer_input": 96, "hidden_size_per_layer_input": 8}
    sizes |= {"num_hidden_layers": 6, "num_kv_shared_layers": 0, "head_dim": 16, "global_head_dim": 32}
    return theirs.Gemma4ForCausalLM(theirs.Gemma4TextConfig(**sizes))


@pytest.mark.parametrize("make", [csm, gemma4])
def test_layers_unlike_those_of_the_config_are_no_obstacle(make: Any) -> None:
    """A part with more layers than the model, and heads of two widths."""
    hf_kvquant.unpatch(hf_kvquant.patch(make(), "int4-token"))
