"""`generate` on patched models: every family, preset and shape, and everything that `generate` can do with a cache.

Preset `none` must give the very logits of transformers' own cache. Every other path is compared with the unpatched
model over a `ReferenceCache`, that is, over tensors that went through the specification: never with full precision.
"""

from __future__ import annotations

import copy
import functools
import logging
import re
import threading
from inspect import signature
from pathlib import Path
from typing import Any

import compare
import models
import pytest
import tolerances
import torch
from cases import DTYPES
from models import (
    FAMILIES,
    RecordingCache,
    ReferenceCache,
    check_against_reference,
    forced,
    greedy,
    left_padded,
    logits,
)
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import Tensor
from transformers import GenerationConfig, PreTrainedTokenizerFast, pipeline
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache, StaticCache
from transformers.masking_utils import create_chunked_causal_mask

import hf_kvquant
from hf_kvquant import PRESETS, KVQuantCache, KVQuantConfig, patched
from hf_kvquant.cache.layers import KVQuantLayer
from hf_kvquant.generate.hook import _log_guidance
from hf_kvquant.models import probing
from hf_kvquant.models.latent import latent_attentions
from hf_kvquant.spec import reference
from hf_kvquant.storage.tally import _log_fallback
from hf_kvquant.upstream.releases import CHECKPOINTING_DROPS_CACHES, cache_of, with_cache

QUANTIZED = [preset for preset in PRESETS if preset != "none"]
INT8 = models.INT8_CODES  # codes alone


# --- families ---------------------------------------------------------------------------------------------------------


@functools.cache
def unquantized(family: str) -> Any:
    return greedy(models.family(family), left_padded())


@pytest.mark.parametrize("family", FAMILIES)
def test_none_gives_the_very_logits_of_an_unpatched_model(family: str) -> None:
    model, expected = models.family(family), unquantized(family)
    with patched(model, "none"):
        output = greedy(model, left_padded())
    assert isinstance(cache_of(output), KVQuantCache)
    compare.assert_same(output.sequences, expected.sequences, f"{family}, tokens")
    # Attention that is absorbed sums in another order.
    is_absorbed = bool([*latent_attentions(model)])
    bound = tolerances.model_bound(logits(expected), logits(expected), torch.float32) if is_absorbed else 0.0
    compare.assert_close(logits(output), logits(expected), bound, f"{family}, logits")


def is_repeated(family: str, preset: str) -> bool:
    """Of the presets, every family has `int4-token`, and each that is varied a third of the others, in turn."""
    if preset == "int4-token":
        return False
    return family not in models.VARIED or (models.VARIED.index(family) + QUANTIZED.index(preset)) % 3 != 0


@pytest.mark.full(
    when=is_repeated, reason="how a family makes keys and how a preset stores them meet in the cache alone"
)
@pytest.mark.parametrize("preset", QUANTIZED)
@pytest.mark.parametrize("family", FAMILIES)
def test_presets_attend_to_what_the_reference_decodes(family: str, preset: str) -> None:
    # Dense tokens of a preset would hide its codes in prompts this short.
    config = {"preset": preset, "sink_length": 0, "residual_length": 0}
    expected, cache = check_against_reference(models.family(family), config, left_padded())
    fallbacks = sum(sum(storage.tally.fallbacks.values()) for storage in cache.storages)
    assert (fallbacks == 0) == FAMILIES[family].is_served, f"{fallbacks} steps fell back"
    # The comparison above would pass without any quantisation if quantisation did not show in the logits.
    dense = logits(unquantized(family))
    bound = tolerances.model_bound(expected, expected, torch.float32)
    assert float((expected[:, 1] - dense[:, 1]).abs().max()) > 10 * bound
    compare.assert_close(expected[:, 0], dense[:, 0], bound, f"{family}, the first token is that of full precision")


# --- shapes and dtypes ------------------------------------------------------------------------------------------------

HEADS = {"mha": 4, "gqa": 2, "mqa": 1}


@pytest.mark.parametrize("preset", ["int8", "k8v4", "int4-token", "fp8"])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256, 24])
def test_head_dims(head_dim: int, preset: str) -> None:
    config = {"preset": preset, "sink_length": 0, "residual_length": 0}  # the prompt is short
    check_against_reference(models.llama(head_dim=head_dim), config, left_padded())


FEW = ["int8", "int4-token", "fp8"]


@pytest.mark.full(
    when=lambda preset, heads, dtype: (FEW.index(preset) + [*HEADS].index(heads) + DTYPES.index(dtype)) % 3 != 0,
    reason="every two of the three meet in the others",
)
@pytest.mark.parametrize("preset", FEW)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16", "fp16"])
def test_heads_and_dtypes(dtype: torch.dtype, heads: str, preset: str, device: str) -> None:
    model = models.on(device, models.llama(dtype, num_key_value_heads=HEADS[heads]))
    # Weights rounded to dtype, computed with in float32.
    exact = None if dtype == torch.float32 else copy.deepcopy(model).float()
    config = {"preset": preset, "sink_length": 0, "residual_length": 0}  # the prompt is short
    check_against_reference(model, config, left_padded(), exact)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_none_gives_the_very_logits_in_half_precision(dtype: torch.dtype) -> None:
    model = models.llama(dtype)
    expected = greedy(model, left_padded())
    with patched(model, "none"):
        output = greedy(model, left_padded())
    compare.assert_same(logits(output), logits(expected), "logits")


FORMATS = {
    "tensor": {"storage": "int8", "granularity": "tensor"},
    "token": {"storage": "int8", "granularity": "token", "symmetric": False},
    "group": {"storage": "int4", "granularity": "group", "group_size": 16},
}


@pytest.mark.parametrize("value", FORMATS)
@pytest.mark.parametrize("key", FORMATS)
def test_granularities(key: str, value: str) -> None:
    check_against_reference(models.llama(), {"key": FORMATS[key], "value": FORMATS[value]}, left_padded())


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss", "gpt2", "llama"])
def test_eager_attention_before_ours(family: str) -> None:
    options = FAMILIES[family].options
    model = models.build(FAMILIES[family].model_type, attention="eager", **options)
    expected = greedy(model, left_padded())
    with patched(model, "none"):
        compare.assert_same(logits(greedy(model, left_padded())), logits(expected), "logits")
    check_against_reference(model, "int4-token", left_padded())


def test_long_chunks_over_codes() -> None:
    """Chunks of several queries, each over what came before it."""
    inputs = left_padded(batch=2, tokens=40, pads=(11, 0))
    model = models.llama(num_hidden_layers=1)
    output = greedy(model, inputs, prefill_chunk_size=7, **with_cache(ReferenceCache(model.config, "int4-token")))
    with patched(model, "int4-token"):
        ours = greedy(model, inputs, prefill_chunk_size=7)
    bound = tolerances.model_bound(logits(output), logits(output), torch.float32)
    compare.assert_close(logits(ours), logits(output), bound, "logits")


# --- what generate can do ---------------------------------------------------------------------------------------------

# In each, the keys and values that are quantised are the same in both runs to the last bit: those of the first layer
# depend on the tokens alone, and what lies below a quantised second layer is not quantised. Codes alone, since nearly
# all tokens here would be in the dense windows.
CONFIGS: dict[str, Any] = {
    "none": "none",
    "first_layer": {"preset": "int4-token", "layers": {1: "none"}},
    "last_layer": {"preset": "none", "layers": {1: INT8}},
    "static": {"preset": "int4-token", "layers": {1: "none"}, "static": True},
}
# Not where a crop makes codes dense: what comes then is no longer what it would have been.
WINDOWED = {"preset": "int4-token", "sink_length": 2, "residual_length": 3, "layers": {1: "none"}}
FEATURES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampling": {"do_sample": True, "top_k": 30, "temperature": 1.5},
    "samples": {"do_sample": True, "num_return_sequences": 2},
    "beams": {"num_beams": 3, "num_return_sequences": 2, "length_penalty": 0.5},
    "sampled_beams": {"num_beams": 2, "do_sample": True},
    "prefill_chunks": {"prefill_chunk_size": 4},
    "penalty": {"repetition_penalty": 1.3},
}


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("config", [*CONFIGS.values(), WINDOWED], ids=[*CONFIGS, "windowed"])
def test_generate_features(config: Any, feature: str) -> None:
    model, inputs, options = models.llama(), left_padded(), FEATURES[feature]
    torch.manual_seed(5)
    simulated = ReferenceCache(model.config, config, mask=inputs["attention_mask"])
    expected = greedy(model, inputs, **with_cache(simulated), **options)
    torch.manual_seed(5)
    with patched(model, config):
        output = greedy(model, inputs, **options)
    compare.assert_same(output.sequences, expected.sequences, "tokens")
    bound = tolerances.model_bound(logits(expected), logits(expected), torch.float32)
    compare.assert_close(logits(output), logits(expected), bound, "logits")
    assert not any(storage.tally.fallbacks for storage in cache_of(output).storages)


def test_every_beam_keeps_the_keys_of_its_own_tokens() -> None:
    """The logits of the last step, computed again from the chosen tokens without any reordering."""
    model, config = models.llama(), CONFIGS["first_layer"]
    inputs = left_padded()
    with patched(model, config):
        beams = greedy(model, inputs, num_beams=4, num_return_sequences=4, output_scores=True)
        rows = {name: value.repeat_interleave(4, 0) for name, value in inputs.items()}
        again = greedy(model, rows, prefix_allowed_tokens_fn=forced(beams.sequences))
    chosen = beams.sequences[:, -6:]
    log_probabilities = logits(again).log_softmax(-1).gather(-1, chosen.unsqueeze(-1)).squeeze(-1)
    total = log_probabilities.sum(-1) / chosen.shape[1]
    compare.assert_close(beams.sequences_scores, total, 1e-4, "scores of beams")


@pytest.mark.parametrize("config", CONFIGS)
def test_prompt_lookup(config: str) -> None:
    model = models.llama()
    prompt = torch.tensor([[5, 9, 5, 9, 5, 9, 7, 5, 9]])
    expected = greedy(model, {"input_ids": prompt}, **with_cache(ReferenceCache(model.config, CONFIGS[config])))
    with patched(model, CONFIGS[config]):
        output = greedy(model, {"input_ids": prompt}, prompt_lookup_num_tokens=3)
    compare.assert_same(output.sequences, expected.sequences, "tokens")


TEXT = torch.tensor([[5, 9, 5, 9, 5, 9, 7, 5, 9]])


def holding(model: Any, config: Any, num_tokens: int) -> KVQuantCache:
    """A cache that holds the first tokens of `TEXT`."""
    max_cache_len = 64 if KVQuantConfig.resolve(config).static else None
    cache = KVQuantCache(model.config, config, max_cache_len=max_cache_len)
    with torch.no_grad():
        model(TEXT[:, :num_tokens], **with_cache(cache))
    return cache


@pytest.mark.parametrize("is_wrapped", [False, True], ids=["", "wrapped"])
@pytest.mark.parametrize("helper", ["lookup", "assistant"])
@pytest.mark.parametrize("config", CONFIGS)
def test_assisted_decoding_reads_only_what_a_given_cache_lacks(config: str, helper: str, is_wrapped: bool) -> None:
    """Also where the model's own method is replaced on the instance, as for Phi-3, which is there again afterwards."""
    model = models.build("llama")
    assistant = models.build("llama", num_hidden_layers=1)
    options = {"prompt_lookup_num_tokens": 3} if helper == "lookup" else {"assistant_model": assistant}
    with patched(model, CONFIGS[config]):
        expected = greedy(model, {"input_ids": TEXT}, **with_cache(holding(model, CONFIGS[config], 6)))
        if is_wrapped:
            model.prepare_inputs_for_generation = functools.partial(model.prepare_inputs_for_generation)
        own = vars(model).get("prepare_inputs_for_generation")
        cache = holding(model, CONFIGS[config], 6)
        output = greedy(model, {"input_ids": TEXT}, **with_cache(cache), **options)
        assert vars(model).get("prepare_inputs_for_generation") is own
    compare.assert_same(output.sequences, expected.sequences, "tokens")
    assert {storage.length for storage in cache.storages} == {output.sequences.shape[1] - 1}


@pytest.mark.parametrize("way", ["its own assistant", "its first layers", "an assistant calls it", "another thread"])
def test_calls_in_between_leave_it_what_a_given_cache_lacks(way: str) -> None:
    """The model generates something else before the first forward of the call, which is made after the proposals."""
    model, assistant = models.build("llama"), models.build("llama", num_hidden_layers=1)
    options: dict[str, Any] = {"assistant_model": assistant}
    other = {"input_ids": TEXT[:, :4]}

    def generate_more() -> None:
        if way == "another thread":
            thread = threading.Thread(target=greedy, args=(model, other, 2))
            thread.start()
            thread.join()
        else:
            greedy(model, other, 2)

    if way == "its own assistant":
        options = {"assistant_model": model}
    elif way == "its first layers":
        options = {"assistant_early_exit": 1}
    else:
        assistant.register_forward_pre_hook(lambda *_: generate_more())
    with patched(model, "none"):
        expected = greedy(model, {"input_ids": TEXT}, **with_cache(holding(model, "none", 6)))
        cache = holding(model, "none", 6)
        output = greedy(model, {"input_ids": TEXT}, **with_cache(cache), **options)
        assert "prepare_inputs_for_generation" not in vars(model)
    compare.assert_same(output.sequences, expected.sequences, "tokens")
    assert {storage.length for storage in cache.storages} == {output.sequences.shape[1] - 1}


def test_assisted_decoding_over_a_given_cache_takes_the_whole_text() -> None:
    model = models.llama()
    part = {"input_ids": TEXT[:, 6:], "attention_mask": torch.ones_like(TEXT)}
    embeddings = {"inputs_embeds": model.get_input_embeddings()(TEXT)}
    for inputs, error, message in (
        (part, ValueError, "`input_ids` must be the whole text for .* also the 6 .*, got 3 of 9 tokens"),
        (embeddings, NotImplementedError, "`inputs_embeds` must be None for assisted decoding over a cache that holds"),
    ):
        with patched(model, "int8"), pytest.raises(error, match=message):
            greedy(model, inputs, **with_cache(holding(model, "int8", 6)), prompt_lookup_num_tokens=3)
        assert "prepare_inputs_for_generation" not in vars(model)


def test_a_call_that_ends_before_its_first_forward_leaves_the_model_as_it_was() -> None:
    """transformers refuses assisted decoding of several sequences when all else is ready."""
    model, rows = models.llama(), {"input_ids": TEXT.expand(2, -1)}
    with patched(model, "int8"):
        cache = cache_of(greedy(model, {"input_ids": rows["input_ids"][:, :4]}, 2))
        with pytest.raises(ValueError, match="only supported for batch_size = 1"):
            greedy(model, rows, **with_cache(cache), prompt_lookup_num_tokens=3)
    assert "prepare_inputs_for_generation" not in vars(model)


def test_the_second_cache_of_guidance_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    model = models.llama()
    _log_guidance.cache_clear()
    with patched(model, "int8"), caplog.at_level(logging.WARNING, "hf_kvquant"):
        for _ in range(2):
            greedy(model, {"input_ids": TEXT}, guidance_scale=1.5)
        greedy(model, {"input_ids": TEXT}, guidance_scale=1)
    assert [record.message for record in caplog.records].count(
        "generate keeps a second cache for `guidance_scale`, that of the negative prompt, which transformers makes and "
        "which is not quantised."
    ) == 1


def test_a_cache_of_beams_does_not_go_on(tmp_path: Path) -> None:
    """The last step of a search reorders it for beams that are not returned, in transformers, too."""
    model = models.llama()
    with patched(model, "int8"):
        output = greedy(model, {"input_ids": TEXT}, num_beams=3, num_return_sequences=3)
        cache, text = cache_of(output), torch.cat([output.sequences, TEXT.expand(3, -1)], 1)
        message = "must hold the sequences that generate has returned, got the cache of a search with beams"
        with pytest.raises(ValueError, match=f"^generate: `[a-z_]+` {message}"):
            greedy(model, {"input_ids": text}, **with_cache(cache))
        with pytest.raises(ValueError, match=f"^KVQuantCache.save: `cache` {message}"):
            cache.save(tmp_path / "beams.safetensors", model)
        cache.reset()
        again = greedy(model, {"input_ids": text}, **with_cache(cache)).sequences
        compare.assert_same(again, greedy(model, {"input_ids": text}).sequences, "tokens")

        longer, copied = {"input_ids": torch.cat([again, TEXT.expand(3, -1)], 1)}, copy.deepcopy(cache)
        # Before the first step: three sequences are held, for six beams.
        with pytest.raises((RuntimeError, ValueError)):
            greedy(model, longer, num_beams=2, **with_cache(cache))
        expected = greedy(model, longer, **with_cache(copied))
        compare.assert_same(greedy(model, longer, **with_cache(cache)).sequences, expected.sequences, "tokens")


@pytest.mark.parametrize("which", ["main", "both", "assistant"])
@pytest.mark.parametrize("config", CONFIGS)
def test_assisted_decoding_changes_no_token(config: str, which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = models.llama()
    # Nearly the same model: some of its proposals are accepted, others are cropped.
    assistant = models.build("llama")
    with torch.no_grad():
        assistant.lm_head.weight.add_(torch.randn_like(assistant.lm_head.weight) * 0.1)
    assistant.generation_config.update(
        num_assistant_tokens=3, num_assistant_tokens_schedule="constant", assistant_confidence_threshold=0.0
    )
    inputs = left_padded(batch=1, pads=(0,))
    crops: list[int] = []
    monkeypatch.setattr(
        KVQuantCache, "crop", lambda self, tokens: (crops.append(tokens), Cache.crop(self, tokens))[1], raising=False
    )
    default = "none" if which == "assistant" else CONFIGS[config]
    expected = greedy(model, inputs, 12, **with_cache(ReferenceCache(model.config, default)))
    if which != "assistant":
        hf_kvquant.patch(model, CONFIGS[config])
    if which != "main":
        hf_kvquant.patch(assistant, CONFIGS[config])
    try:
        output = greedy(model, inputs, 12, assistant_model=assistant)
    finally:
        if which != "assistant":
            hf_kvquant.unpatch(model)
    compare.assert_same(output.sequences, expected.sequences, "tokens")
    assert min(crops) < 0 and len(set(crops)) > 1, f"proposals must be both accepted and refused, crops {crops}"


@pytest.mark.parametrize("config", ["none", "first_layer"])
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_a_model_may_assist_itself_by_its_first_layers(family: str, config: str) -> None:
    model, inputs = models.family(family), left_padded(batch=1, pads=(0,))
    expected = greedy(model, inputs, 12, **with_cache(ReferenceCache(model.config, CONFIGS[config])))
    with patched(model, CONFIGS[config]):
        output = greedy(model, inputs, 12, assistant_early_exit=1)
    compare.assert_same(output.sequences, expected.sequences, "tokens")
    assert len(cache_of(output).layers) == model.config.num_hidden_layers == 2


# --- one cache, several calls -----------------------------------------------------------------------------------------


def continued(inputs: dict[str, Tensor], output: Any, new: Tensor, new_mask: Tensor | None = None) -> dict[str, Tensor]:
    """The prompt of a second turn: everything so far, then new tokens."""
    generated = output.sequences.shape[1] - inputs["attention_mask"].shape[1]
    ones = torch.ones((new.shape[0], generated), dtype=torch.long)
    mask = [inputs["attention_mask"], ones, torch.ones_like(new) if new_mask is None else new_mask]
    return {"input_ids": torch.cat([output.sequences, new], 1), "attention_mask": torch.cat(mask, 1)}


# Those of a preset behind padding, too, where the first tokens are not those at position 0.
WITH_WINDOWS: dict[str, Any] = {
    **CONFIGS,
    "windowed": WINDOWED,
    "int8_windows": {"preset": "none", "layers": {1: "int8"}},
}


@pytest.mark.parametrize("num_new", [1, 6])
@pytest.mark.parametrize("config", WITH_WINDOWS)
def test_chat_continues_on_the_returned_cache(config: str, num_new: int) -> None:
    model, inputs = models.llama(), left_padded()
    spelled = WITH_WINDOWS[config]
    if config == "static":
        spelled = {**spelled, "max_cache_len": 60}
    new = torch.randint(3, 90, (3, num_new))

    def chat(cache: Any) -> list[Any]:
        first = greedy(model, inputs, 4, **with_cache(cache))
        second_inputs = continued(inputs, first, new)
        second = greedy(model, second_inputs, 4, **with_cache(cache_of(first)))
        third_inputs = continued(second_inputs, second, new)
        return [second, greedy(model, third_inputs, 4, **with_cache(cache_of(second)))]

    expected = chat(ReferenceCache(model.config, spelled, mask=inputs["attention_mask"]))
    with patched(model, spelled):
        turns = chat(None)
    for output, dense in zip(turns, expected, strict=True):
        compare.assert_same(output.sequences, dense.sequences, "tokens")
        bound = tolerances.model_bound(logits(dense), logits(dense), torch.float32)
        compare.assert_close(logits(output), logits(dense), bound, "logits")
        assert not any(storage.tally.fallbacks for storage in cache_of(output).storages)


@pytest.mark.parametrize("config", WITH_WINDOWS)
def test_masks_with_holes_fall_back_to_dense_tensors(config: str) -> None:
    model, inputs = models.llama(), left_padded()
    spelled = WITH_WINDOWS[config]
    if config == "static":
        spelled = {**spelled, "max_cache_len": 60}
    new = torch.randint(3, 90, (3, 4))
    new_mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1], [1, 0, 0, 0]])  # right padding, and tokens behind it

    def chat(cache: Any) -> Any:
        first = greedy(model, inputs, 4, **with_cache(cache))
        return greedy(model, continued(inputs, first, new, new_mask), 4, **with_cache(cache_of(first)))

    expected = chat(ReferenceCache(model.config, spelled, mask=inputs["attention_mask"]))
    with patched(model, spelled):
        output = chat(None)
    compare.assert_same(output.sequences, expected.sequences, "tokens")
    bound = tolerances.model_bound(logits(expected), logits(expected), torch.float32)
    compare.assert_close(logits(output), logits(expected), bound, "logits")
    for storage in cache_of(output).storages:
        assert sum(storage.tally.fallbacks.values()) == (4 if storage.formats.is_quantized else 0)
    cache_of(output).reset()
    with patched(model, spelled):
        fresh = greedy(model, inputs, 4, **with_cache(cache_of(output)))
    for storage in cache_of(fresh).storages:
        assert sum(storage.tally.fallbacks.values()) == (4 if storage.formats.is_quantized else 0), (
            "a reset forgets the holes"
        )


def test_a_right_padded_prompt_falls_back() -> None:
    model, inputs = models.llama(), left_padded()
    inputs = {name: value.flip(1) for name, value in inputs.items()}
    config = CONFIGS["first_layer"]
    expected = greedy(model, inputs, **with_cache(ReferenceCache(model.config, config)))
    with patched(model, config):
        output = greedy(model, inputs)
    compare.assert_same(output.sequences, expected.sequences, "tokens")
    assert sum(cache_of(output).storages[0].tally.fallbacks.values()) == 5


@pytest.mark.parametrize("config", ["none", "first_layer", "last_layer"])
def test_a_shared_prefix_is_repeated(config: str) -> None:
    model = models.llama()
    prefix = torch.randint(3, 90, (1, 7))
    rest = torch.randint(3, 90, (3, 4))
    inputs = {"input_ids": torch.cat([prefix.expand(3, -1), rest], 1)}

    def run(cache: Any) -> Any:
        with torch.no_grad():
            model(input_ids=prefix, **with_cache(cache))
        cache.batch_repeat_interleave(3)
        return greedy(model, inputs, **with_cache(cache))

    expected = run(ReferenceCache(model.config, CONFIGS[config]))
    with patched(model, CONFIGS[config]):
        output = run(KVQuantCache(model.config, CONFIGS[config]))
    compare.assert_same(output.sequences, expected.sequences, "tokens")
    assert not any(storage.tally.fallbacks for storage in cache_of(output).storages)


# --- what is not ours -------------------------------------------------------------------------------------------------


def check_unchanged(output: Any, expected: Any) -> None:
    assert type(cache_of(output)) is type(cache_of(expected))
    compare.assert_same(output.sequences, expected.sequences, "tokens")
    compare.assert_same(logits(output), logits(expected), "logits")


@pytest.mark.parametrize("implementation", ["dynamic", "static"])
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss"])
def test_other_cache_implementations_stay_what_they_are(family: str, implementation: str) -> None:
    model, inputs = models.family(family), left_padded()
    expected = greedy(model, inputs, cache_implementation=implementation)
    with patched(model, "int4-token"):
        check_unchanged(greedy(model, inputs, cache_implementation=implementation), expected)


@pytest.mark.parametrize("make", [DynamicCache, functools.partial(StaticCache, max_cache_len=40)], ids=str)
def test_a_cache_of_the_user_stays_what_it_is(make: Any) -> None:
    model, inputs = models.llama(), left_padded()
    expected = greedy(model, inputs, **with_cache(make(config=model.config)), prefill_chunk_size=5)
    with patched(model, "int4-token"):
        mine = make(config=model.config)
        output = greedy(model, inputs, **with_cache(mine), prefill_chunk_size=5)
    assert cache_of(output) is mine
    check_unchanged(output, expected)


def test_without_a_cache_nothing_changes() -> None:
    model, inputs = models.llama(), left_padded()
    expected = greedy(model, inputs, use_cache=False)
    with patched(model, "int4-token"):
        output = greedy(model, inputs, use_cache=False)
    assert cache_of(output) is None
    check_unchanged(output, expected)


def test_forward_without_a_cache_is_that_of_the_unpatched_model() -> None:
    model, inputs = models.llama(), left_padded()
    expected = model(**inputs, use_cache=False).logits
    with patched(model, "int4-token"):
        compare.assert_same(model(**inputs, use_cache=False).logits.detach(), expected.detach(), "logits")


def test_training_runs_through_a_patched_model() -> None:
    model = models.build("llama")
    ids = left_padded()["input_ids"]
    hf_kvquant.patch(model, "int4-token")
    model.train()
    model(input_ids=ids, labels=ids).loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


# --- the flag ---------------------------------------------------------------------------------------------------------


def flag(**options: Any) -> dict[str, Any]:
    return {"cache_implementation": "quantized", "cache_config": {"backend": "hf_kvquant", **options}}


def test_the_flag_names_another_preset_than_patch_did() -> None:
    model, inputs = models.llama(), left_padded()
    with patched(model, "int4-token"):
        expected = greedy(model, inputs)
    options = flag(preset="int4-token")
    before = copy.deepcopy(options)
    with patched(model, "fp8"):
        for _ in range(2):  # the same dictionary twice: it is not consumed
            output = greedy(model, inputs, **options)
            assert cache_of(output).quant_config == KVQuantConfig.from_preset("int4-token")
            compare.assert_same(logits(output), logits(expected), "logits")
        assert cache_of(greedy(model, inputs)).quant_config == KVQuantConfig.from_preset("fp8")
    assert options == before


def test_the_flag_without_options_means_what_patch_said() -> None:
    model = models.llama()
    with patched(model, "int4-token"):
        output = greedy(model, left_padded(), **flag())
    assert cache_of(output).quant_config == KVQuantConfig.from_preset("int4-token")


def test_the_flag_survives_a_saved_generation_config(tmp_path: Any) -> None:
    model, inputs = models.llama(), left_padded()
    config = KVQuantConfig.from_preset("k8v4", layers={0: "int8"})
    saved = GenerationConfig(cache_implementation="quantized", cache_config=config.to_dict(), max_new_tokens=5)
    saved.save_pretrained(tmp_path)
    loaded = GenerationConfig.from_pretrained(tmp_path)
    with patched(model, "none"):
        output = model.generate(**inputs, generation_config=loaded, return_dict_in_generate=True)
    assert cache_of(output).quant_config == config


def test_the_flag_speaks_the_words_of_transformers() -> None:
    model = models.llama()
    with patched(model, "none"):
        output = greedy(model, left_padded(), **flag(nbits=4, q_group_size=32))
    assert cache_of(output).quant_config == KVQuantConfig.from_preset("int4-g32")


def test_the_flag_with_another_backend_is_left_to_transformers() -> None:
    model = models.llama()
    with patched(model, "int4-token"), pytest.raises(ValueError, match="nonsense"):
        greedy(model, left_padded(), cache_implementation="quantized", cache_config={"backend": "nonsense"})


def test_the_flag_leaves_the_assistant_alone() -> None:
    model, assistant = models.llama(), models.build("llama", num_hidden_layers=1)
    inputs = left_padded(batch=1, pads=(0,))
    with patched(model, "none"):
        expected = greedy(model, inputs, **flag(preset="int8"))
        output = greedy(model, inputs, **flag(preset="int8"), assistant_model=assistant)
    compare.assert_same(output.sequences, expected.sequences, "tokens")


# --- around generate --------------------------------------------------------------------------------------------------


class Tokens:
    """A streamer that keeps what it is given."""

    def __init__(self) -> None:
        self.tokens: list[int] = []

    def put(self, value: Tensor) -> None:
        self.tokens += value.flatten().tolist()

    def end(self) -> None:
        self.tokens.append(-1)


def test_streaming() -> None:
    model, streamer = models.llama(), Tokens()
    with patched(model, "int4-token"):
        output = greedy(model, left_padded(batch=1), streamer=streamer)
    assert streamer.tokens == [*output.sequences[0].tolist(), -1]


@pytest.mark.parametrize("static", [False, True], ids=["growing", "static"])
def test_stop_strings_leave_attention_to_the_kernel(static: bool) -> None:
    """`generate` hands their tokenizer on to the model, and so to attention."""
    model, words = models.llama(), models.tokenizer()
    options = {"stop_strings": ["no such text"], "tokenizer": words}
    with patched(model, {"preset": "int8", "static": static}):
        expected = greedy(model, left_padded())
        output = greedy(model, left_padded(), **options)
        assert not any(layer.fallbacks for layer in hf_kvquant.report(model).layers)
    compare.assert_same(logits(output), logits(expected), "logits")


@pytest.mark.parametrize("static", [False, True], ids=["growing", "static"])
def test_calls_may_be_in_inference_mode_or_not(static: bool) -> None:
    """The model keeps the buffers of static caches for its next call."""
    model = models.llama()
    with patched(model, {"preset": "int8", "static": static}):
        expected = greedy(model, left_padded())
        for is_inference in (True, False, True):
            with torch.inference_mode(is_inference):
                output = greedy(model, left_padded())
            compare.assert_same(logits(output), logits(expected), f"logits, inference mode {is_inference}")
    with patched(model, {"preset": "int8", "static": static}):
        for is_inference in (True, False):
            with torch.inference_mode(is_inference):
                output = greedy(model, left_padded())
            compare.assert_same(logits(output), logits(expected), f"logits, inference mode {is_inference} first")


def test_a_pipeline() -> None:
    model = models.llama()
    words = {f"w{index}": index for index in range(models.VOCAB_SIZE)}
    vocabulary = Tokenizer(WordLevel(words, unk_token="w0"))
    vocabulary.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=vocabulary, pad_token="w0", padding_side="left")
    with patched(model, "int4-token"):
        generator = pipeline("text-generation", model=model, tokenizer=tokenizer)
        options = {"max_new_tokens": 4, "do_sample": False, "return_full_text": False}
        texts = generator(["w5 w6 w7", "w8"], batch_size=2, **options)
        ids = tokenizer(["w5 w6 w7", "w8"], return_tensors="pt", padding=True)
        expected = model.generate(
            input_ids=ids["input_ids"], attention_mask=ids["attention_mask"], max_new_tokens=4, do_sample=False
        )
    assert [row[0]["generated_text"] for row in texts] == tokenizer.batch_decode(expected[:, -4:])


def test_a_mask_of_four_dimensions() -> None:
    """A user's own mask over the second chunk: every token sees the first chunk but its first two tokens."""
    model = models.llama()
    first, second = torch.randint(3, 90, (2, 6)), torch.randint(3, 90, (2, 3))
    visible = torch.ones(2, 1, 3, 9, dtype=torch.bool).tril(6)
    visible[..., :2] = False
    config = CONFIGS["first_layer"]

    def run(cache: Any) -> Tensor:
        with torch.no_grad():
            model(input_ids=first, **with_cache(cache))
            return model(
                input_ids=second, attention_mask=visible, position_ids=torch.arange(6, 9)[None], **with_cache(cache)
            ).logits

    expected = run(ReferenceCache(model.config, config))
    cache = KVQuantCache(model.config, config)
    with patched(model, config):
        ours = run(cache)
    compare.assert_close(ours, expected, tolerances.model_bound(expected, expected, torch.float32), "logits")
    assert sum(cache.storages[0].tally.fallbacks.values()) == 1


def test_logits_to_keep() -> None:
    model, inputs = models.llama(), left_padded()
    cache = KVQuantCache(model.config, "int4-token")
    with torch.no_grad(), patched(model, "int4-token"):
        model(**inputs, **with_cache(cache))
        mask = torch.cat([inputs["attention_mask"], torch.ones(3, 4, dtype=torch.long)], 1)
        again = copy.deepcopy(cache)
        tokens = torch.randint(3, 90, (3, 4))
        last = model(input_ids=tokens, attention_mask=mask, **with_cache(cache), logits_to_keep=1).logits
        every = model(input_ids=tokens, attention_mask=mask, **with_cache(again)).logits
    assert last.shape[1] == 1
    compare.assert_close(last, every[:, -1:], tolerances.model_bound(every, every, torch.float32), "last logits")


def test_a_cache_passed_by_hand_is_the_one_that_patch_makes() -> None:
    model, inputs = models.llama(), left_padded()
    cache = KVQuantCache(model.config, "int4-token")
    with patched(model, "int4-token"):
        expected = greedy(model, inputs)
        output = greedy(model, inputs, **with_cache(cache))
    assert cache_of(output) is cache
    compare.assert_same(logits(output), logits(expected), "logits")


@pytest.mark.parametrize("config", CONFIGS)
def test_a_cache_passed_to_an_unpatched_model_falls_back(config: str, caplog: pytest.LogCaptureFixture) -> None:
    model, inputs = models.llama(), left_padded()
    spelled = CONFIGS[config]
    if config == "static":
        spelled = {**spelled, "max_cache_len": 40}
    expected = greedy(model, inputs, **with_cache(ReferenceCache(model.config, spelled)))
    _log_fallback.cache_clear()
    with caplog.at_level(logging.WARNING, "hf_kvquant"):
        output = greedy(model, inputs, **with_cache(KVQuantCache(model.config, spelled)))
        greedy(model, inputs, **with_cache(KVQuantCache(model.config, spelled)))
    compare.assert_same(output.sequences, expected.sequences, "tokens")
    bound = tolerances.model_bound(logits(expected), logits(expected), torch.float32)
    compare.assert_close(logits(output), logits(expected), bound, "logits")
    lines = [record.message for record in caplog.records if record.name.startswith("hf_kvquant.storage.tally")]
    assert lines == ([] if config == "none" else [
        "attention runs on dequantised tensors: the model or its attention implementation looks at keys and values "
        "itself (is the model patched?). Correct, slower."
    ])  # fmt: skip


@pytest.mark.parametrize("preset", ["none", "int4-token"])
def test_the_decoder_of_an_encoder_decoder(preset: str) -> None:
    """Its own cache may be ours; the one of cross-attention stays with transformers."""
    model = models.bart()
    inputs = {"input_ids": torch.randint(3, 90, (2, 7))}

    def run(own: Any) -> Any:
        cache = EncoderDecoderCache(own, DynamicCache(config=model.config))
        return greedy(model, inputs, **with_cache(cache), decoder_start_token_id=models.BOS)

    expected = run(ReferenceCache(model.config, preset))
    output = run(KVQuantCache(model.config, preset))
    compare.assert_same(output.sequences, expected.sequences, "tokens")
    bound = tolerances.model_bound(logits(expected), logits(expected), torch.float32)
    compare.assert_close(logits(output), logits(expected), bound, "logits")


# --- layers of several kinds ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("static", [False, True], ids=["growing", "static"])
@pytest.mark.parametrize("family", ["gemma2", "gemma3_text", "gpt_oss", "exaone4", "llama4_text"])
def test_layers_that_are_not_full_attention_stay_with_transformers(family: str, static: bool) -> None:
    if (
        static
        and family == "llama4_text"
        and "block_sequence_ids" not in signature(create_chunked_causal_mask).parameters
    ):
        pytest.skip("this version of transformers makes no masks of chunks for static caches")
    model, inputs = models.family(family), left_padded(tokens=12)
    expected = greedy(model, inputs, 12, cache_implementation="static" if static else "dynamic")
    with patched(model, {"preset": "none", "static": static, "sliding": False}):
        output = greedy(model, inputs, 12)
    kinds = [type(layer) for layer in cache_of(output).layers]
    assert kinds == [type(cache_of(expected).layers[0]), KVQuantLayer]
    compare.assert_same(output.sequences, expected.sequences, "tokens")
    bound = tolerances.model_bound(logits(expected), logits(expected), torch.float32)
    compare.assert_close(logits(output), logits(expected), bound, "logits")


@pytest.mark.parametrize("family", ["gemma3n_text", "gemma4_text"])
def test_layers_that_share_keys_and_values_append_once(family: str) -> None:
    model, inputs = models.family(family), left_padded()
    cache = RecordingCache(model.config, "int4-token")
    with patched(model, "int4-token"):
        output = greedy(model, inputs, **with_cache(cache))
    (layer,) = (layer for layer in cache.layers if type(layer) is KVQuantLayer)
    index = cache.layers.index(layer)
    given = [torch.cat(sides, 2) for sides in zip(*cache.recorded[index], strict=True)]
    assert layer.get_seq_length() == output.sequences.shape[1] - 1
    transform, (key, value) = layer.storage.key_transform, given
    assert transform is not None
    formats = (layer.storage.formats.key, layer.storage.formats.value)
    for dense, x, kv_format in zip(
        layer.storage.dequantize(), (reference.transform_key(key, transform), value), formats, strict=True
    ):
        expected = reference.dequantize(reference.quantize(x, kv_format), kv_format)
        if x is not value:
            expected = reference.undo_key_transform(expected, transform)
        compare.assert_same(dense, expected, "what the cache holds")


@pytest.mark.parametrize("drops", [True, False])
def test_a_model_that_drops_caches_is_refused(monkeypatch: pytest.MonkeyPatch, drops: bool) -> None:
    """Before transformers 5.24, a step in training mode with gradient checkpointing does not see the tokens before."""
    if not drops and CHECKPOINTING_DROPS_CACHES:
        pytest.skip("this transformers drops them")
    monkeypatch.setattr(probing, "CHECKPOINTING_DROPS_CACHES", drops)
    model = models.build("llama")
    models.checkpoint_gradients(model)
    with patched(model, "int8"):
        expected = greedy(model, left_padded()).sequences
        model.train()
        if drops:
            message = (
                "generate: `model` must keep its cache, got a LlamaForCausalLM in training mode with gradient "
                "checkpointing, which drops the cache of every forward. Call model.eval() before, and model.train() "
                "afterwards."
            )
            with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
                greedy(model, left_padded())
            models.checkpoint_gradients(model, False)
        compare.assert_same(greedy(model, left_padded()).sequences, expected, "a roll-out in training mode")


@pytest.mark.parametrize("options", [{}, {"static": True}], ids=["growing", "static"])
@pytest.mark.parametrize("preset", ["none", "int8", "int4-channel"])
def test_autocast_makes_keys_and_values_of_two_dtypes(preset: str, options: dict[str, Any]) -> None:
    """Values come in bfloat16, keys in float32 after RoPE, as in trainers with `bf16=True`."""
    model, inputs = models.build("llama", max_position_embeddings=512), left_padded(2, 140, (0, 5))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = greedy(model, inputs)
        with patched(model, {"preset": preset, **options}):
            output = greedy(model, inputs, disable_compile=True)
    cache = cache_of(output)
    assert all(storage.dtype == torch.float32 for storage in cache.storages)
    assert cache.get_seq_length() == 145
    spread = float(models.logits(expected).std())
    bound = spread * {"none": 0.02, "int8": 0.1, "int4-channel": 1.0}[preset]
    compare.assert_close(models.logits(output)[:, :2], models.logits(expected)[:, :2], bound, preset)


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "jamba"])  # which forgets what came before
def test_a_forward_in_pieces_goes_on_behind_the_cache(family: str) -> None:
    """What measures a model feeds it so, without positions: Bamba counts them from 0 each time."""
    model, ids = models.family(family), torch.randint(3, 90, (1, 12))
    cache = DynamicCache(config=model.config)
    with torch.inference_mode():
        whole = probing.forward(model, ids)
        pieces = [probing.forward(model, piece, cache=cache) for piece in ids.split([5, 6, 1], dim=1)]
    compare.assert_close(torch.cat(pieces, 1), whole, 1e-3 * float(whole.abs().max()), f"{family} in pieces")
