"""Models whose `generate` is not the one that `patch` hooks: a part's, or one that asks for no cache."""

from __future__ import annotations

import copy
import functools
import logging
import pickle
import re
import threading
import types
from collections.abc import Callable
from typing import Any

import compare
import models
import pytest
import torch
import transformers
from models import greedy, left_padded, logits
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.cache_utils import DynamicCache, EncoderDecoderCache
from transformers.models.clvp import ClvpConfig, ClvpModelForConditionalGeneration

from hf_kvquant import KVQuantCache, KVQuantConfig, patch, patched, report, unpatch
from hf_kvquant.generate import watch
from hf_kvquant.generate.hook import HOOK
from hf_kvquant.models.parts import generating_parts, stand_ins
from hf_kvquant.state import patch_of
from hf_kvquant.upstream.releases import cache_of, with_cache

TEXT = {"vocab_size": 96, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None, "max_position_embeddings": 64}
SMALL = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
VISION = {**SMALL, "num_hidden_layers": 1, "image_size": 16, "patch_size": 8}
PICTURE = {"pixel_values": torch.randn(1, 3, 16, 16, generator=torch.Generator().manual_seed(0))}
IMAGE, QUERIES = 90, 4
IDS = torch.tensor([[*[IMAGE] * QUERIES, *range(5, 20)]])
SETTINGS = {"do_sample": False, "max_new_tokens": 5, "output_logits": True, "return_dict_in_generate": True}


def randomized(model: Any) -> Any:
    return models.randomized(model).eval()


def blip2() -> tuple[Any, dict[str, Any]]:
    torch.manual_seed(0)
    config = transformers.Blip2Config(
        vision_config=VISION,
        qformer_config={**SMALL, "vocab_size": 50, "encoder_hidden_size": 64},
        text_config={**TEXT, **SMALL, "model_type": "llama", "eos_token_id": 95},
        num_query_tokens=QUERIES,
        image_token_index=IMAGE,
    )
    model = randomized(transformers.Blip2ForConditionalGeneration(config))
    return model, {**PICTURE, "input_ids": IDS, "attention_mask": torch.ones_like(IDS)}


def kosmos2() -> tuple[Any, dict[str, Any]]:
    torch.manual_seed(0)
    text = {**TEXT, "embed_dim": 64, "layers": 2, "ffn_dim": 64, "attention_heads": 2, "eos_token_id": 95}
    config = transformers.Kosmos2Config(text_config=text, vision_config=VISION, latent_query_num=QUERIES)
    model = randomized(transformers.Kosmos2ForConditionalGeneration(config))
    is_image = (IDS == IMAGE).long()
    return model, {
        **PICTURE, "input_ids": IDS, "attention_mask": torch.ones_like(IDS), "image_embeds_position_mask": is_image,
    }  # fmt: skip


def blip() -> tuple[Any, dict[str, Any]]:
    """Its decoder attends to the picture, and not through transformers' registry."""
    torch.manual_seed(0)
    text = {**TEXT, **SMALL, "encoder_hidden_size": 64, "eos_token_id": 95, "sep_token_id": 95}
    config = transformers.BlipConfig(vision_config=VISION, text_config=text)
    return randomized(transformers.BlipForConditionalGeneration(config)), {**PICTURE, "input_ids": IDS[:, QUERIES:]}


def musicgen() -> tuple[Any, dict[str, Any]]:
    """Its `generate` is a loop of its own, which makes no cache."""
    torch.manual_seed(0)
    codes = {"num_codebooks": 2, "vocab_size": 64, "pad_token_id": 63, "bos_token_id": 63}
    config = transformers.MusicgenConfig(
        text_encoder={"model_type": "t5", "vocab_size": 96, "d_model": 64, "d_kv": 16, "d_ff": 32, "num_layers": 1},
        audio_encoder={"model_type": "encodec", "num_filters": 4, "codebook_size": 64, "hidden_size": 16},
        decoder={**SMALL, **codes, "ffn_dim": 32, "max_position_embeddings": 64},
    )
    model = randomized(transformers.MusicgenForConditionalGeneration(config))
    model.generation_config.update(decoder_start_token_id=63, pad_token_id=63, bos_token_id=63, guidance_scale=1.0)
    return model, {"input_ids": IDS[:, QUERIES:], "attention_mask": torch.ones_like(IDS[:, QUERIES:])}


def csm() -> tuple[Any, dict[str, Any]]:
    """Beside its own `generate`, it calls that of a decoder of audio codes for every token."""
    torch.manual_seed(0)
    sizes = {**SMALL, "num_key_value_heads": 1, "head_dim": 32, "vocab_size": 40, "num_codebooks": 3}
    config = transformers.CsmConfig(
        **sizes, text_vocab_size=96, depth_decoder_config={**sizes, "backbone_hidden_size": 64},
        pad_token_id=1, bos_token_id=2, eos_token_id=None, audio_token_id=94, audio_eos_token_id=95,
    )  # fmt: skip
    return randomized(transformers.CsmForConditionalGeneration(config)), {"input_ids": IDS[:, QUERIES:]}


def clvp() -> Any:
    encoder = {**SMALL, "vocab_size": 300, "projection_dim": 32}
    speech = {**SMALL, "vocab_size": 96, "bos_token_id": 1, "eos_token_id": 2, "num_mel_attn_blocks": 1}
    return ClvpModelForConditionalGeneration(
        ClvpConfig(text_config=encoder, speech_config=encoder, decoder_config=speech)
    )


def own_cache(cache: Any) -> Any:
    return cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache


BY_A_PART: dict[str, tuple[Callable[[], tuple[Any, dict[str, Any]]], str]] = {
    "blip2": (blip2, "language_model"),
    "kosmos2": (kosmos2, "text_model"),
    "blip": (blip, "text_decoder"),
}


# --- the part generates -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BY_A_PART)
def test_a_part_that_generates_is_patched_with_the_model(name: str) -> None:
    make, part = BY_A_PART[name]
    model, inputs = make()
    generating = model.get_submodule(part)
    before = set(generating.__dict__)
    call = functools.partial(model.generate, **SETTINGS)
    assert list(stand_ins(model)) == [part]
    expected = call(**copy.deepcopy(inputs))
    for preset in ("none", "int8"):
        patch(model, preset)
        output = model.generate(**copy.deepcopy(inputs), **SETTINGS)
        cache = own_cache(cache_of(output))
        assert isinstance(cache, KVQuantCache) and cache.quant_config == KVQuantConfig.from_preset(preset)
        if preset == "none":
            compare.assert_same(logits(output), logits(expected), "logits")
        result = report(model)
        assert [layer.formats for layer in result.layers] == [preset] * 2
        assert not result.unused and not result.unpatched_parts
    if name == "blip":
        assert not result.is_served
        assert sum(result.layers[0].fallbacks.values()) == SETTINGS["max_new_tokens"] - 1, (
            "the part's steps are counted"
        )
    unpatch(model)
    assert patch_of(generating) is None and set(generating.__dict__) == before
    output = model.generate(**copy.deepcopy(inputs), **SETTINGS)
    assert not isinstance(own_cache(cache_of(output)), KVQuantCache)
    compare.assert_same(logits(output), logits(expected), "logits")


def test_patched_leaves_a_part_as_it_was() -> None:
    model, inputs = blip2()
    attention = model.config.text_config._attn_implementation
    with patched(model.language_model, "int8"):
        with patched(model, "int4-token"):
            assert cache_of(model.generate(**inputs, **SETTINGS)).quant_config == KVQuantConfig.from_preset(
                "int4-token"
            )
        assert patch_of(model) is None
        assert cache_of(model.generate(**inputs, **SETTINGS)).quant_config == KVQuantConfig.from_preset("int8")
    assert patch_of(model.language_model) is None
    assert model.config.text_config._attn_implementation == attention
    patch(model.language_model, "int8")
    unpatch(patch(model, "int4-token"))
    assert model.config.text_config._attn_implementation == attention


def test_a_copy_generates_over_codes_too() -> None:
    model, inputs = blip2()
    patch(model, "int8")
    expected = model.generate(**inputs, **SETTINGS)
    twin = copy.deepcopy(model)
    unpatch(model)
    output = twin.generate(**inputs, **SETTINGS)
    assert isinstance(cache_of(output), KVQuantCache)
    compare.assert_same(logits(output), logits(expected), "logits")


def test_parts_are_not_looked_for_behind_transformers_own_generate() -> None:
    config = transformers.VisionEncoderDecoderConfig(
        encoder={**VISION, "model_type": "vit"},
        decoder={**TEXT, **SMALL, "model_type": "bert", "is_decoder": True, "add_cross_attention": True},
    )
    assert not generating_parts(transformers.VisionEncoderDecoderModel(config))
    assert not generating_parts(models.llama()) and not generating_parts(models.llama().model)


def test_a_model_that_leaves_generating_to_a_part_is_not_captured() -> None:
    model, _ = blip2()
    message = (
        "patch: `capture` must be False for Blip2ForConditionalGeneration, got True: its generate is that of its part "
        "language_model. Patch model.language_model with it."
    )
    with pytest.raises(NotImplementedError, match=re.escape(message)):
        patch(model, {"preset": "int8", "capture": True})
    assert patch_of(model) is None


# --- other parts ------------------------------------------------------------------------------------------------------


def test_a_part_with_other_layers_has_to_be_patched_itself() -> None:
    model = clvp()
    message = (
        "patch: ClvpModelForConditionalGeneration generates in a way of its own, which would use no cache of "
        "hf_kvquant. Patch its parts that generate: model.speech_decoder_model."
    )
    with pytest.raises(NotImplementedError, match=re.escape(message)):
        patch(model, "int8")
    assert patch_of(model) is None
    patch(model.speech_decoder_model, "int8")


def test_a_part_with_a_cache_of_its_own_is_reported() -> None:
    model, inputs = csm()
    settings = {**SETTINGS, "depth_decoder_do_sample": False}
    expected = model.generate(**inputs, **settings)
    with patched(model, "none"):
        output = model.generate(**inputs, **settings)
        result = report(model)
        assert result.unpatched_parts == ("depth_decoder",) and not result.unused
        assert "depth_decoder generates over a cache of its own, unquantised." in str(result)
        with patched(model.depth_decoder, "none"):
            assert not report(model).unpatched_parts
    assert isinstance(cache_of(output), KVQuantCache)
    compare.assert_same(output.sequences, expected.sequences, "sequences")


def test_a_model_that_generates_without_transformers_is_refused() -> None:
    sizes = {"vocab_size": 96, "hidden_size": 32, "encoder_layers": 1, "decoder_layers": 1}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    model = transformers.SpeechT5ForTextToSpeech(transformers.SpeechT5Config(**sizes, **heads))
    message = (
        "patch: SpeechT5ForTextToSpeech generates in a way of its own, which would use no cache of hf_kvquant. Leave "
        "the model unpatched."
    )
    with pytest.raises(NotImplementedError, match=re.escape(message)):
        patch(model, "int8")


# --- calls that use no cache of ours ----------------------------------------------------------------------------------


def test_a_generate_that_asks_for_no_cache_is_noticed(caplog: pytest.LogCaptureFixture) -> None:
    watch._log_unquantized.cache_clear()
    model, inputs = musicgen()
    options = {"do_sample": False, "max_new_tokens": 6}
    expected = model.generate(**inputs, **options)
    patch(model, "int8")
    assert report(model).layers[0].formats == "int8" and not report(model).unused, "nobody can know"
    for _ in range(2):
        compare.assert_same(model.generate(**inputs, **options), expected, "codes")
    message = (
        "generate: MusicgenForConditionalGeneration has used no cache of hf_kvquant, so nothing was quantised: its "
        "generate asks for no cache. Leave the model unpatched, or patch the part of it that generates."
    )
    assert [record.message for record in caplog.records if record.name == watch.__name__] == [message]
    result = report(model)
    assert result.unused == "the last call of generate used no cache of hf_kvquant: its generate asks for no cache"
    assert [(layer.formats, layer.reason) for layer in result.layers] == [(None, result.unused)] * 2
    assert not result.is_served and result.unused in str(result)
    patch(model, "int8")
    assert not report(model).unused, "patching again starts anew"


def test_a_cache_that_a_model_drops_is_noticed(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch._log_unquantized.cache_clear()
    model = models.build("llama")
    prepare = type(model).prepare_inputs_for_generation

    def dropping(self: Any, *args: Any, **kwargs: Any) -> Any:
        inputs = prepare(self, *args, **kwargs)
        return {name: value for name, value in inputs.items() if not isinstance(value, KVQuantCache)}

    with monkeypatch.context() as patches:
        patches.setattr(type(model), "prepare_inputs_for_generation", dropping)
        patch(model, "int8")
        greedy(model, left_padded())
        message = (
            "generate: LlamaForCausalLM has used no cache of hf_kvquant, so nothing was quantised: it has dropped its "
            "cache."
        )
        assert message in caplog.text and report(model).unused.endswith("it has dropped its cache")
    greedy(model, left_padded())
    assert not report(model).unused, "of the last call"


@pytest.mark.parametrize(
    "options",
    [{"use_cache": False}, {"cache_implementation": "dynamic"}, {"num_beams": 2}, {"own": DynamicCache}],
    ids=str,
)
def test_calls_that_choose_their_cache_are_left_alone(
    options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    model = models.build("llama")
    patch(model, "int8")
    own = options.pop("own", None)
    given = {} if own is None else with_cache(own())
    with caplog.at_level(logging.WARNING):
        greedy(model, left_padded(), **options, **given)
        result, chose_other = report(model), "num_beams" not in options
        greedy(model, left_padded())
    assert not caplog.records and not result.unused
    assert result.chose_other == chose_other == ("asked for another cache, or for none" in str(result))
    assert not report(model).chose_other, "of the last call"


def test_calls_in_other_threads_are_calls_of_their_own(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call without a cache begins after one with a cache, before that has its cache, and ends after it."""
    watch._log_unquantized.cache_clear()
    model = models.build("llama")
    patch(model, "int8")
    begun, ended = threading.Event(), threading.Event()

    class Waiting(LogitsProcessor):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            begun.set()
            assert ended.wait(60)
            return scores

    other = threading.Thread(
        target=greedy,
        args=(model, left_padded()),
        kwargs={"use_cache": False, "logits_processor": LogitsProcessorList([Waiting()])},
    )
    prepare = model._prepare_special_tokens

    def preparing(*args: Any, **kwargs: Any) -> Any:
        if other.ident is None:
            other.start()
            assert begun.wait(60)
        return prepare(*args, **kwargs)

    monkeypatch.setattr(model, "_prepare_special_tokens", preparing)
    with caplog.at_level(logging.WARNING):
        greedy(model, left_padded())
        result = report(model)
        ended.set()
        other.join()
    assert not caplog.records and not result.unused and not result.chose_other
    assert report(model).chose_other, "of the last call"


def test_calls_within_a_call_are_calls_of_their_own(caplog: pytest.LogCaptureFixture) -> None:
    watch._log_unquantized.cache_clear()
    model = models.build("llama")
    patch(model, "int8")

    class Asking(LogitsProcessor):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            model.generate(input_ids, max_new_tokens=1, use_cache=False)
            return scores

    with caplog.at_level(logging.WARNING):
        greedy(model, left_padded(), logits_processor=LogitsProcessorList([Asking()]))
    assert not caplog.records and not report(model).unused and not report(model).chose_other


@pytest.mark.parametrize(
    "setting, why",
    [
        (
            {"use_cache": False},
            "model.generation_config has use_cache=False (set it to True, or pass use_cache=False if you mean it)",
        ),
        (
            {"cache_implementation": "dynamic"},
            "model.generation_config has cache_implementation='dynamic' (set it to None, or pass cache_implementation "
            "if you mean it)",
        ),
    ],
    ids=str,
)
def test_settings_that_come_with_a_checkpoint_are_no_choice(
    setting: dict[str, Any], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    watch._log_unquantized.cache_clear()
    model = models.build("llama")
    model.generation_config.update(**setting)
    patch(model, "int8")
    assert report(model).unused == f"generate uses no cache of hf_kvquant: {why}" and not report(model).is_served
    assert {layer.formats for layer in report(model).layers} == {None}
    greedy(model, left_padded(), **setting)
    greedy(model, left_padded(), generation_config=transformers.GenerationConfig(**setting))
    ours = [record.message for record in caplog.records if record.name == watch.__name__]
    assert not ours and report(model).chose_other, "the call asks for it, too"
    greedy(model, left_padded())
    assert f"so nothing was quantised: {why}. Leave the model" in caplog.text and report(model).unused.endswith(why)
    model.generation_config.update(**dict.fromkeys(setting))
    greedy(model, left_padded())
    assert not report(model).unused


def test_a_generate_that_passes_another_cache_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = models.build("llama")
    generate = type(model).generate
    monkeypatch.setattr(
        type(model), "generate", lambda *args, **kwargs: generate(*args, **kwargs, **with_cache(DynamicCache()))
    )
    patch(model, "int8")
    greedy(model, left_padded())
    assert report(model).unused.endswith("its generate passes another cache")


def test_a_part_that_borrows_the_hook_gets_that_of_transformers() -> None:
    """As Kyutai's speech-to-text lends it to its audio codec, which makes the codec's cache."""
    model, borrower = models.build("llama"), models.build("llama")
    patch(model, "int4-token")
    for each in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        setattr(borrower, HOOK, types.MethodType(getattr(each, HOOK).__func__, borrower))
        assert type(cache_of(greedy(borrower, left_padded()))) is DynamicCache
        assert isinstance(cache_of(greedy(each, left_padded())), KVQuantCache)
