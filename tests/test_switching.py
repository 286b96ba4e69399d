"""Models that drop their cache where they switch RoPE factors: Phi-3 and its relatives keep ours, and fill it again."""

from __future__ import annotations

import re
from typing import Any

import compare
import models
import pytest
import torch
import transformers
from models import greedy, left_padded, logits
from torch import Tensor

from hf_kvquant import KVQuantCache, disable, enable, patch, patched, report, unpatch
from hf_kvquant.upstream.releases import cache_of, with_cache

SWITCH = 16  # the tokens up to which the short factors hold
ROPES: dict[str, dict[str, Any]] = {
    "plain": {"rope_type": "default", "rope_theta": 10000.0},
    "longrope": {
        "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 8, "long_factor": [4.0] * 8,
        "short_mscale": 1.0, "long_mscale": 1.1, "original_max_position_embeddings": SWITCH,
    },
}  # fmt: skip
NEW_TOKENS = 12


def build(model_type: str, rope: str = "longrope") -> Any:
    torch.manual_seed(1234)
    factors = {key: value for key, value in ROPES[rope].items() if model_type == "phimoe" or "mscale" not in key}
    options: dict[str, Any] = {
        **models.COMMON, "original_max_position_embeddings": SWITCH, "rope_parameters": factors, "hidden_size": 64,
        "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48, "num_hidden_layers": 2,
    }  # fmt: skip
    options.pop("head_dim", None)
    if model_type == "phi4_multimodal":
        small = {"hidden_size": 64, "intermediate_size": 48, "num_attention_heads": 2}
        options["vision_config"] = {
            **small,
            "num_hidden_layers": 1,
            "image_size": 28,
            "patch_size": 14,
            "crop_size": 28,
        }
        options["audio_config"] = {**small, "num_blocks": 1, "ext_pw_out_channel": 64, "nemo_conv_channels": 16}
        config = transformers.Phi4MultimodalConfig(**options)
        model: Any = transformers.Phi4MultimodalForCausalLM(config)
    else:
        config = transformers.AutoConfig.for_model(model_type, **options)
        model = transformers.AutoModelForCausalLM.from_config(config)
    model.generation_config.update(eos_token_id=None, pad_token_id=models.PAD)
    return models.randomized(model).eval()


def prompt(tokens: int) -> dict[str, Tensor]:
    return left_padded(batch=2, tokens=tokens)


@pytest.mark.parametrize("tokens", [9, 25], ids=["switches", "long"])
@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("model_type", ["phi3", "phimoe", "phi4_multimodal"])
def test_the_cache_holds_all_tokens_on_both_sides_of_the_switch(model_type: str, rope: str, tokens: int) -> None:
    model = build(model_type, rope)
    # What they mean: without a cache, all keys have the factors of the newest length.
    expected = greedy(model, prompt(tokens), NEW_TOKENS, use_cache=False)
    for config in ("none", "int8", {"preset": "none", "static": True}):
        with patched(model, config):
            output = greedy(model, prompt(tokens), NEW_TOKENS, disable_compile=True)
            assert report(model).is_served or config != "int8"
        cache = cache_of(output)
        assert isinstance(cache, KVQuantCache) and int(cache.get_seq_length()) == tokens + NEW_TOKENS - 1
        if config == "int8":
            compare.assert_same(output.logits[0], expected.logits[0], "logits that see no codes")
        else:
            compare.assert_same(output.sequences, expected.sequences, "sequences")
            torch.testing.assert_close(logits(output), logits(expected), rtol=1e-4, atol=1e-4)
    assert "prepare_inputs_for_generation" not in model.__dict__


@pytest.mark.parametrize("options", [{"num_beams": 2}, {"prompt_lookup_num_tokens": 3}], ids=str)
def test_beams_and_proposals(options: dict[str, Any]) -> None:
    model, inputs = build("phi3", "plain"), {name: value[1:] for name, value in prompt(9).items()}  # not padded
    beams = {name: value for name, value in options.items() if name == "num_beams"}
    expected = greedy(model, inputs, NEW_TOKENS, use_cache=False, **beams)
    with patched(model, "none"):
        output = greedy(model, inputs, NEW_TOKENS, **options)
    compare.assert_same(output.sequences, expected.sequences, "sequences")
    assert isinstance(cache_of(output), KVQuantCache) and cache_of(output).get_seq_length() > SWITCH


def test_a_cache_that_the_user_passes() -> None:
    model = build("phi3")
    expected = greedy(model, prompt(25), NEW_TOKENS)
    patch(model, "int8")
    cache = KVQuantCache(model.config, "none")
    output = greedy(model, prompt(25), NEW_TOKENS, **with_cache(cache))
    assert cache_of(output) is cache and cache.get_seq_length() == 25 + NEW_TOKENS - 1
    compare.assert_same(logits(output), logits(expected), "logits")
    unpatch(model)


@pytest.mark.parametrize("with_ids", [True, False], ids=["and ids", "alone"])
def test_embeddings_in_place_of_tokens(with_ids: bool) -> None:
    model = build("phi3")
    ids = prompt(9)
    inputs = {"inputs_embeds": model.get_input_embeddings()(ids["input_ids"]), "attention_mask": ids["attention_mask"]}
    inputs |= {"input_ids": ids["input_ids"]} if with_ids else {}
    expected = greedy(model, inputs)  # ends before the switch
    with patched(model, "none"):
        output = greedy(model, inputs)
    assert isinstance(cache_of(output), KVQuantCache)
    compare.assert_same(output.sequences, expected.sequences, "sequences")
    compare.assert_same(logits(output), logits(expected), "logits")


def test_the_flag_on_a_model_that_is_not_patched() -> None:
    model = build("phi3")
    enable()
    try:
        flag = {"cache_implementation": "quantized", "cache_config": {"backend": "hf_kvquant", "preset": "int8"}}
        cache = cache_of(greedy(model, prompt(25), NEW_TOKENS, **flag))
    finally:
        disable()
    assert isinstance(cache, KVQuantCache) and cache.get_seq_length() == 25 + NEW_TOKENS - 1


def test_another_cache_is_dropped_as_before() -> None:
    model = build("phi3")
    expected = greedy(model, prompt(9), NEW_TOKENS)
    with patched(model, "int8"):
        output = greedy(model, prompt(9), NEW_TOKENS, cache_implementation="dynamic")
    compare.assert_same(logits(output), logits(expected), "logits")


def test_a_chunk_is_not_taken_for_the_whole_text() -> None:
    model = build("phi3")
    patch(model, "int8")
    cache = KVQuantCache(model.config, "int8")
    ids = prompt(60)["input_ids"]
    with torch.no_grad():
        model(input_ids=ids[:, :5], **with_cache(cache))
    message = (
        "generate: `prefill_chunk_size` must be None for Phi3ForCausalLM over a cache with tokens, got a chunk of 20 "
        "of 25 tokens: the model switches its RoPE factors here, and all keys have to be computed again. Leave it out."
    )
    with pytest.raises(NotImplementedError, match=re.escape(message)):
        model.prepare_inputs_for_generation(ids[:, 5:25], attention_mask=torch.ones(2, 25), **with_cache(cache))
    assert cache.get_seq_length() == 5
