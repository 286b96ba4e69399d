"""Encoder-decoders: codes for the decoder's self-attention, transformers' own cache for cross-attention.

As in `test_generate.py`, preset `none` must give the very logits of the unpatched model, and every other path is
compared with the unpatched model over a `ReferenceCache`.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
import logging
import pickle
import re
from collections.abc import Callable, Iterator
from typing import Any

import compare
import models
import pytest
import tolerances
import torch
import transformers
from models import BOS, HEAD_DIM, PAD, VOCAB_SIZE, RecordingCache, ReferenceCache, forced, greedy, logits
from torch import Tensor
from torch._dynamo.utils import counters
from transformers.cache_utils import DynamicCache, EncoderDecoderCache, StaticCache
from transformers.generation.configuration_utils import CompileConfig

import hf_kvquant
from hf_kvquant import KVQuantCache, patch, patched, report, unpatch
from hf_kvquant.attention.registry import is_ours
from hf_kvquant.generate import encoder_decoder
from hf_kvquant.generate.encoder_decoder import KVQuantEncoderDecoderCache, croppable, decoder_cache
from hf_kvquant.models.probing import keys_of_a_token
from hf_kvquant.models.text_config import text_config_of
from hf_kvquant.upstream.releases import CACHE, MAKES_MASKS_FIRST, cache_of, with_cache

WIDTH = 2 * HEAD_DIM
# The names of BART's config, which most of its relatives share. Encoder and decoder differ in their number of layers.
BART = {
    "vocab_size": VOCAB_SIZE,
    "d_model": WIDTH,
    "encoder_layers": 1,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 64,
    "pad_token_id": PAD,
    "bos_token_id": BOS,
    "eos_token_id": VOCAB_SIZE - 1,
    "decoder_start_token_id": BOS,
    "forced_eos_token_id": None,
    "forced_bos_token_id": None,
}
LED = {"max_encoder_position_embeddings": 64, "max_decoder_position_embeddings": 64, "attention_window": 4}
WHISPER = {"max_source_positions": 20, "max_target_positions": 64, "num_mel_bins": 8, "tie_word_embeddings": False}
T5 = {
    "vocab_size": VOCAB_SIZE,
    "d_model": WIDTH,
    "d_kv": HEAD_DIM,
    "d_ff": 48,
    "num_layers": 2,
    "num_heads": 2,
    "pad_token_id": PAD,
    "decoder_start_token_id": BOS,
}
SMALL = {**models.COMMON, "hidden_size": WIDTH, "num_attention_heads": 2}


@dataclasses.dataclass(frozen=True)
class Family:
    """How to build one tiny encoder-decoder.

    Attributes:
        model: Of transformers.
        config: Its config's class, or what makes a config.
        options: Of the config.
        is_served: Whether the kernel serves the decoder; otherwise it falls back.
    """

    model: str
    config: Any
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    is_served: bool = True


def t5gemma_config() -> Any:
    """Both halves have a sliding layer."""
    half = {**SMALL, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}
    half = {**half, "num_key_value_heads": 1, "query_pre_attn_scalar": HEAD_DIM}
    halves = [transformers.T5GemmaModuleConfig(**half) for _ in range(2)]
    return transformers.T5GemmaConfig(encoder=halves[0], decoder=halves[1], vocab_size=VOCAB_SIZE)


def bert_to_bert_config() -> Any:
    sizes = {name: value for name, value in SMALL.items() if name not in ("head_dim", "num_key_value_heads")}
    halves = [transformers.BertConfig(**sizes) for _ in range(2)]
    return transformers.EncoderDecoderConfig.from_encoder_decoder_configs(*halves, pad_token_id=PAD)


FAMILIES = {
    "bart": Family("BartForConditionalGeneration", "BartConfig", BART),
    "mbart": Family("MBartForConditionalGeneration", "MBartConfig", BART),
    "marian": Family("MarianMTModel", "MarianConfig", BART),
    "pegasus": Family("PegasusForConditionalGeneration", "PegasusConfig", BART),
    "m2m_100": Family("M2M100ForConditionalGeneration", "M2M100Config", BART),
    "whisper": Family("WhisperForConditionalGeneration", "WhisperConfig", {**BART, **WHISPER}),
    "whisper_encoder": Family(
        "WhisperForConditionalGeneration", "WhisperConfig", {**BART, **WHISPER, "encoder_layers": 3}
    ),
    "t5gemma": Family("T5GemmaForConditionalGeneration", t5gemma_config),
    "bert_to_bert": Family("EncoderDecoderModel", bert_to_bert_config),
    # A bias is added to the scores.
    "t5": Family("T5ForConditionalGeneration", "T5Config", T5, is_served=False),
    # Attention outside transformers' registry.
    "led": Family("LEDForConditionalGeneration", "LEDConfig", {**BART, **LED}, is_served=False),
}
# Codes alone: decoders write few tokens, which would all be dense.
INT8, K8V4 = ({"preset": preset, "sink_length": 0, "residual_length": 0} for preset in ("int8", "k8v4"))
QUANTIZED = {"int8": INT8, "k8v4": K8V4, **{preset: preset for preset in ("int4-token", "int4-channel", "fp8")}}


def build(name: str) -> Any:
    """A model with random weights whose generations have the length that they were asked for."""
    torch.manual_seed(1234)
    family = FAMILIES[name]
    make = getattr(transformers, family.config) if isinstance(family.config, str) else family.config
    options = {key: value for key, value in family.options.items() if name[:7] != "whisper" or key[:10] != "max_positi"}
    model = models.randomized(getattr(transformers, family.model)(make(**options))).eval()
    settings = {"eos_token_id": None, "pad_token_id": PAD, "bos_token_id": BOS, "decoder_start_token_id": BOS}
    for key, value in {**settings, "forced_decoder_ids": None, "max_length": 30}.items():
        setattr(model.generation_config, key, value)
    if name.startswith("whisper"):
        # Those behind it are timestamps, by which a random model would never come to the end of the sound.
        model.generation_config.no_timestamps_token_id = VOCAB_SIZE - 1
        model.generation_config.alignment_heads = [[0, 0], [1, 1]]
        model.generation_config.suppress_tokens = model.generation_config.begin_suppress_tokens = None
    return model


@functools.cache
def family(name: str) -> Any:
    """The model of a family. Shared by tests, so whoever patches it unpatches it."""
    return build(name)


def inputs_of(model: Any) -> dict[str, Tensor]:
    """What an encoder reads: tokens with right padding, or sound."""
    generator = torch.Generator().manual_seed(7)
    if model.main_input_name == "input_features":
        return {"input_features": torch.randn((3, 8, 40), generator=generator)}
    mask = torch.arange(8) < torch.tensor([5, 8, 3])[:, None]
    ids = torch.randint(3, VOCAB_SIZE - 1, (3, 8), generator=generator)
    return {"input_ids": ids.masked_fill(~mask, PAD), "attention_mask": mask.long()}


def beside(model: Any, own: Any) -> EncoderDecoderCache:
    """A cache of the decoder with one for cross-attention beside it, as somebody makes them by hand."""
    return EncoderDecoderCache(own, DynamicCache())


def simulated(model: Any, config: Any, **options: Any) -> EncoderDecoderCache:
    transforms = hf_kvquant.key_transforms(model, config)
    return beside(model, ReferenceCache(model.config, config, key_transforms=transforms, **options))


def check_equal(output: Any, expected: Any) -> None:
    compare.assert_same(output.sequences, expected.sequences, "tokens")
    bound = tolerances.model_bound(logits(expected), logits(expected), torch.float32)
    compare.assert_close(logits(output), logits(expected), bound, "logits")


def fallbacks(cache: KVQuantCache) -> int:
    return sum(sum(storage.tally.fallbacks.values()) for storage in cache.storages)


# --- families ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAMILIES)
def test_none_gives_the_very_logits_of_an_unpatched_model(name: str) -> None:
    model = family(name)
    expected = greedy(model, inputs_of(model))
    with patched(model, "none"):
        output = greedy(model, inputs_of(model))
    compare.assert_same(output.sequences, expected.sequences, "tokens")
    compare.assert_same(logits(output), logits(expected), "logits")


@pytest.mark.full(
    when=lambda name, preset: preset != "int4-token" and name not in ("bart", "whisper", "t5gemma", "t5"),
    reason="how a family makes keys and how a preset stores them meet in the cache alone",
)
@pytest.mark.parametrize("preset", QUANTIZED.values(), ids=QUANTIZED)
@pytest.mark.parametrize("name", FAMILIES)
def test_presets_attend_to_what_the_reference_decodes(name: str, preset: Any, device: str) -> None:
    model, inputs = models.on(device, family(name)), inputs_of(family(name))
    cache = RecordingCache(model.config, preset)
    with patched(model, preset):
        output = greedy(model, inputs, **with_cache(beside(model, cache)))
    assert len(cache.storages) == 2
    assert (fallbacks(cache) == 0) == FAMILIES[name].is_served
    transforms = hf_kvquant.key_transforms(model, preset)
    assert {s.name for s in cache.storages if s.key_transform} == {f"layer {index}" for index in transforms}
    replayed = ReferenceCache(model.config, preset, cache.recorded, key_transforms=transforms)
    tokens = forced(output.sequences)
    expected = greedy(model, inputs, **with_cache(beside(model, replayed)), prefix_allowed_tokens_fn=tokens)
    check_equal(output, expected)
    dense = logits(greedy(model, inputs))
    bound = tolerances.model_bound(logits(expected), logits(expected), torch.float32)
    compare.assert_close(logits(expected)[:, 0], dense[:, 0], bound, "the first token is that of full precision")
    assert float((logits(expected)[:, 1] - dense[:, 1]).abs().max()) > 10 * bound, "quantisation does not show"


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "led"])
def test_static_caches(name: str) -> None:
    model = family(name)
    expected = greedy(model, inputs_of(model))
    with patched(model, {"preset": "none", "static": True}):
        check_equal(greedy(model, inputs_of(model)), expected)


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in ("led", "whisper", "whisper_encoder")])
def test_padding_of_a_decoders_prompt(name: str, static: bool) -> None:
    """transformers makes the mask for a static cache by the attention of the config, which all layers must have."""
    model = family(name)
    expected = greedy(model, inputs_of(model), **PROMPT)
    with patched(model, {"preset": "none", "static": static}):
        check_equal(greedy(model, inputs_of(model), **PROMPT), expected)


def test_both_halves_of_an_encoder_decoder_have_our_attention() -> None:
    """Where they share a config, and where each has a copy."""
    for name in ("bart", "t5"):
        with patched(family(name), "int8") as model:
            assert is_ours(model.get_encoder().config._attn_implementation)
            assert is_ours(model.get_decoder().config._attn_implementation)


def test_encoders_and_cross_attention_attend_as_before() -> None:
    """They get raw tensors, and the decoder's rotation and centres never reach them."""
    model = family("bart")
    with patched(model, "int4-token"):
        output = greedy(model, inputs_of(model), output_hidden_states=True)
    dense = greedy(model, inputs_of(model), output_hidden_states=True)
    compare.assert_same(output.encoder_hidden_states[-1], dense.encoder_hidden_states[-1], "the encoder's states")
    cross = cache_of(output).cross_attention_cache
    assert type(cross) is DynamicCache
    expected = cache_of(dense).cross_attention_cache
    compare.assert_same(cross.layers[0].keys, expected.layers[0].keys, "keys of cross-attention")


def test_centres_are_the_biases_of_the_decoders_self_attention() -> None:
    model = build("bart")
    for module in model.modules():
        if hasattr(module, "k_proj"):
            module.k_proj.bias.data.fill_(100.0)
    biases = [layer.self_attn.k_proj.bias for layer in model.model.decoder.layers]
    for index, bias in enumerate(biases):
        bias.data.copy_(torch.arange(WIDTH) + index + 1.0)
    transforms = hf_kvquant.key_transforms(model, "int8")
    assert list(transforms) == [0, 1]
    for transform, bias in zip(transforms.values(), biases, strict=True):
        compare.assert_same(transform.center, bias.view(2, HEAD_DIM).detach(), "centres")


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "t5gemma"])  # wants an encoder; has no biases
def test_one_token_gives_one_key_of_the_decoder(name: str) -> None:
    """Where centres and numbers of heads are looked up."""
    keys = keys_of_a_token(family(name))
    assert list(keys) == [0, 1]
    assert {tuple(key.shape) for key in keys.values()} <= {(1, heads, 1, HEAD_DIM) for heads in (1, 2)}


# --- what generate can do ---------------------------------------------------------------------------------------------

# As in `test_generate.py`: what is quantised is the same in both runs to the last bit.
CONFIGS: dict[str, Any] = {
    "none": "none",
    "first_layer": {"preset": "int4-token", "layers": {1: "none"}},
    "last_layer": {"preset": "none", "layers": {1: INT8}},
    "static": {"preset": "int4-token", "layers": {1: "none"}, "static": True},
}
MASK = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1], [0, 1, 1, 1, 1]])
# The second sequence begins with the token that `generate` would otherwise put in front of all.
PROMPT = {
    "decoder_input_ids": torch.tensor([[PAD, PAD, BOS, 7, 8], [BOS, 9, 10, 11, 12], [PAD, BOS, 13, 14, 15]]),
    "decoder_attention_mask": MASK,
}
FEATURES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampling": {"do_sample": True, "top_k": 30, "temperature": 1.5},
    "samples": {"do_sample": True, "num_return_sequences": 2},
    "beams": {"num_beams": 3, "num_return_sequences": 2, "length_penalty": 0.5},
    "forced_tokens": {"forced_bos_token_id": 7, "forced_eos_token_id": 9},
    "prompt": {"decoder_input_ids": PROMPT["decoder_input_ids"][1:2].repeat(3, 1)},
    "left_padding": PROMPT,
}


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("config", CONFIGS)
def test_generate_features(config: str, feature: str) -> None:
    model, options = family("bart"), FEATURES[feature]
    torch.manual_seed(5)
    reference = simulated(model, CONFIGS[config], mask=options.get("decoder_attention_mask"))
    expected = greedy(model, inputs_of(model), **with_cache(reference), **options)
    torch.manual_seed(5)
    with patched(model, CONFIGS[config]):
        output = greedy(model, inputs_of(model), **options)
    check_equal(output, expected)
    assert type(cache_of(output)) is KVQuantEncoderDecoderCache
    assert fallbacks(cache_of(output).self_attention_cache) == 0


@pytest.mark.parametrize("config", CONFIGS)
def test_a_right_padded_prompt_falls_back(config: str) -> None:
    model = family("bart")
    prompt = {
        "decoder_input_ids": PROMPT["decoder_input_ids"][1:2].repeat(3, 1),
        "decoder_attention_mask": MASK.flip(1),
    }
    expected = greedy(model, inputs_of(model), **with_cache(simulated(model, CONFIGS[config])), **prompt)
    with patched(model, CONFIGS[config]):
        output = greedy(model, inputs_of(model), **prompt)
    check_equal(output, expected)
    assert (fallbacks(cache_of(output).self_attention_cache) > 0) == (config != "none")


@pytest.mark.parametrize("how", ["lookup", "main", "both", "by_hand"])
@pytest.mark.parametrize("config", CONFIGS)
def test_assisted_decoding_changes_no_token(config: str, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, spelled = family("bart"), CONFIGS[config]
    # The first proposals are read with the prompt, and see it unquantised. In this text no token is as near to another
    # as that moves them.
    inputs = {"input_ids": inputs_of(model)["input_ids"][2:]}
    # Nearly the same model: some of its proposals are accepted, others are cropped.
    assistant = build("bart")
    with torch.no_grad():
        assistant.lm_head.weight.add_(torch.randn_like(assistant.lm_head.weight) * 0.1)
    assistant.generation_config.update(
        num_assistant_tokens=3, num_assistant_tokens_schedule="constant", assistant_confidence_threshold=0.0
    )
    options: dict[str, Any] = {"prompt_lookup_num_tokens": 3} if how == "lookup" else {"assistant_model": assistant}
    if how == "by_hand":
        length = 40 if config == "static" else None
        options[CACHE] = beside(model, KVQuantCache(model.config, spelled, max_cache_len=length))
    if how == "both":
        patch(assistant, spelled)
    crops: list[int] = []
    inner = EncoderDecoderCache.crop

    def crop(self: EncoderDecoderCache, tokens: int) -> None:  # transformers asks for its name
        crops.append(tokens)
        inner(self, tokens)

    monkeypatch.setattr(EncoderDecoderCache, "crop", crop)
    expected = greedy(model, inputs, 12, **with_cache(simulated(model, spelled)))
    with patched(model, spelled):
        output = greedy(model, inputs, 12, **options)
    compare.assert_same(output.sequences, expected.sequences, "tokens")
    assert crops, "nothing was proposed"


@pytest.mark.parametrize("config", CONFIGS)
def test_a_second_turn_continues_on_the_returned_cache(config: str) -> None:
    model, inputs, spelled = family("bart"), inputs_of(family("bart")), CONFIGS[config]
    if config == "static":
        spelled = {**spelled, "max_cache_len": 60}
    new = torch.randint(3, 90, (3, 4))

    def chat(cache: Any) -> Any:
        first = greedy(model, inputs, 4, **with_cache(cache), **PROMPT)
        ids = torch.cat((first.sequences, new), 1)
        mask = torch.cat((MASK, torch.ones((3, ids.shape[1] - MASK.shape[1]), dtype=torch.long)), 1)
        prompt = {"decoder_input_ids": ids, "decoder_attention_mask": mask}
        return greedy(model, inputs, 4, **with_cache(cache_of(first)), **prompt)

    expected = chat(simulated(model, spelled, mask=MASK))
    with patched(model, spelled):
        output = chat(None)
    check_equal(output, expected)
    assert fallbacks(cache_of(output).self_attention_cache) == 0


def test_a_second_turn_needs_the_decoders_mask() -> None:
    """Without it, transformers feeds the whole text behind the tokens that the cache holds."""
    model, inputs = family("bart"), inputs_of(family("bart"))
    with patched(model, "int8"):
        first = greedy(model, inputs, 4)
        held = cache_of(first).self_attention_cache.get_seq_length()
        text = {"decoder_input_ids": torch.cat((first.sequences, first.sequences[:, 1:]), 1)}
        with pytest.raises(ValueError, match=f"`decoder_attention_mask` must be given with .* model the {held} "):
            greedy(model, inputs, 4, **with_cache(cache_of(first)), **text)
    assert cache_of(first).self_attention_cache.get_seq_length() == held


@pytest.fixture
def enabled() -> Iterator[None]:
    hf_kvquant.enable()
    yield
    hf_kvquant.disable()


@pytest.mark.parametrize("through", ["patch", "enable"])
def test_the_flag(through: str, request: pytest.FixtureRequest) -> None:
    model = build("bart")
    expected = greedy(model, inputs_of(model), **with_cache(simulated(model, CONFIGS["first_layer"])))
    if through == "enable":
        request.getfixturevalue("enabled")
    else:
        patch(model, "none")
    flag = {"backend": "hf_kvquant", **CONFIGS["first_layer"]}
    output = greedy(model, inputs_of(model), cache_implementation="quantized", cache_config=flag)
    check_equal(output, expected)
    assert fallbacks(cache_of(output).self_attention_cache) == 0
    assert type(cache_of(greedy(model, inputs_of(model), cache_implementation="dynamic"))) is EncoderDecoderCache


def test_a_report_is_of_the_decoder() -> None:
    for name, reasons in (("bart", set()), ("t5", {"a position bias is added to the scores"})):
        model = build(name)
        patch(model, "int8")
        output = greedy(model, inputs_of(model))
        for found in (report(model), report(model, cache_of(output))):
            assert [layer.formats for layer in found.layers] == ["int8", "int8"]
            assert {reason for layer in found.layers for reason in layer.fallbacks} == reasons


def test_unpatch_restores_the_model() -> None:
    for name in ("bart", "t5", "t5gemma", "bert_to_bert"):
        model = build(name)
        configs = {module.config._attn_implementation for module in model.modules() if hasattr(module, "config")}
        before = set(model.__dict__)
        unpatch(patch(model, "int8"))
        after = {module.config._attn_implementation for module in model.modules() if hasattr(module, "config")}
        assert configs == after and set(model.__dict__) == before
        with patched(model, "int8"):
            if name in ("t5gemma", "bert_to_bert"):
                assert not is_ours(model.config.encoder._attn_implementation)
            twin = pickle.loads(pickle.dumps(copy.deepcopy(model)))
        assert type(cache_of(greedy(twin, inputs_of(twin)))) is KVQuantEncoderDecoderCache


# --- the pair of caches -----------------------------------------------------------------------------------------------


def filled(config: Any = "int4-token", **options: Any) -> KVQuantEncoderDecoderCache:
    model = family("bart")
    with patched(model, config):
        cache: Any = cache_of(greedy(model, inputs_of(model), **options))
    return copy.deepcopy(cache)


def test_a_crop_leaves_cross_attention_alone() -> None:
    cache = filled()
    length, encoded = cache.get_seq_length(), cache.cross_attention_cache.get_seq_length()
    cache.crop(-2)
    assert cache.get_seq_length() == length - 2 and cache.cross_attention_cache.get_seq_length() == encoded == 8


def test_sequences_are_selected_and_repeated_in_both() -> None:
    cache = filled()
    cache.batch_select_indices(torch.tensor([2, 0]))
    cache.batch_repeat_interleave(2)
    own, cross = cache.self_attention_cache, cache.cross_attention_cache
    assert own.storages[0].batch == cross.layers[0].keys.shape[0] == 4
    cache.reset()
    assert cache.get_seq_length() == 0 and not any(cache.is_updated.values())


def test_what_a_static_cache_of_cross_attention_cannot_do_is_refused() -> None:
    cache = filled({"preset": "int4-token", "static": True})
    assert type(cache.cross_attention_cache) is StaticCache and cache.cross_attention_cache.get_max_length() == 8
    with pytest.raises(TypeError, match="`batch_select_indices` is only defined for dynamic cache"):
        cache.batch_select_indices(torch.tensor([0]))
    cache.crop(-1)


def test_a_pair_made_by_hand_sees_what_generate_does_with_it() -> None:
    model = family("bart")
    given = beside(model, KVQuantCache(model.config, "int8"))
    with patched(model, "int8"):
        output = greedy(model, inputs_of(model), **with_cache(given))
    assert given.get_seq_length() == cache_of(output).get_seq_length() == 6
    assert given.is_updated is cache_of(output).is_updated and given.is_updated[1]
    assert croppable(cache_of(output)) is cache_of(output)


# --- compiled steps ---------------------------------------------------------------------------------------------------


@pytest.fixture
def compiled() -> Iterator[dict[str, Any]]:
    """Options that make `generate` compile on a CPU too; any recompilation is an error."""
    torch._dynamo.reset()
    counters.clear()
    config = CompileConfig(backend="aot_eager", mode=None, fullgraph=True, dynamic=False)
    config._compile_all_devices = True
    with torch._dynamo.config.patch(error_on_recompile=True):
        yield {"compile_config": config}
    torch._dynamo.reset()


@pytest.mark.parametrize("name", ["bart", "whisper", "t5"])
def test_generate_compiles_one_graph(name: str, compiled: dict[str, Any]) -> None:
    model = build(name)
    prompt = {}
    if not MAKES_MASKS_FIRST:
        if name == "whisper":
            pytest.skip("transformers 5.17 compiles no decoder without a mask, and Whisper's takes none")
        mask = torch.ones((3, 2), dtype=torch.long)
        prompt = {"decoder_input_ids": torch.full_like(mask, BOS), "decoder_attention_mask": mask}
    with patched(model, {"preset": "int4-token", "static": True}):
        expected = greedy(model, inputs_of(model), **prompt)
        for _ in range(2):
            check_equal(greedy(model, inputs_of(model), **prompt, **compiled), expected)
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"], dict(counters)


def test_without_a_mask_old_versions_of_transformers_do_not_compile(
    compiled: dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = build("bart")
    monkeypatch.setattr(encoder_decoder, "MAKES_MASKS_FIRST", False)
    encoder_decoder._log_uncompiled.cache_clear()
    with patched(model, {"preset": "int4-token", "static": True}), caplog.at_level(logging.WARNING, "hf_kvquant"):
        expected = greedy(model, inputs_of(model))
        for _ in range(2):
            check_equal(greedy(model, inputs_of(model), **compiled), expected)
    assert not counters["stats"]["unique_graphs"]
    assert [record.message for record in caplog.records if record.name == "hf_kvquant.generate.encoder_decoder"] == [
        "generate: BartForConditionalGeneration is not compiled without a decoder_attention_mask by this version of "
        "transformers. Correct, slower. Install transformers 5.18 or later, or pass a mask of ones."
    ]


# --- Whisper ----------------------------------------------------------------------------------------------------------

LONG = torch.randn((2, 8, 100), generator=torch.Generator().manual_seed(3))
WHISPER_CALLS: dict[str, dict[str, Any]] = {
    "short": {"input_features": LONG[..., :40]},
    "timestamps": {"input_features": LONG[..., :40], "return_timestamps": True},
    "beams": {"input_features": LONG[..., :40], "num_beams": 3},
    "prompt": {"input_features": LONG[..., :40], "prompt_ids": torch.tensor([3, 7, 8, 9])},
    # Several segments, each with a cache of its own, some of them sampled again; sequences end one by one.
    "long": {
        "input_features": LONG,
        "attention_mask": torch.arange(100).lt(torch.tensor([[100], [70]])).long(),
        "return_timestamps": True,
        "temperature": (0.0, 0.4),
        "compression_ratio_threshold": 1.35,
        "condition_on_prev_tokens": True,
    },
}


@pytest.mark.full(
    when=lambda call, config: call not in ("short", "long") and config in ("none", "last_layer"),
    reason="a call makes its caches in one place, whatever they hold",
)
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("call", WHISPER_CALLS)
def test_whispers_own_generate(call: str, config: str, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = dict(WHISPER_CALLS[call])
    model, segments = build("whisper"), itertools.count()
    model.generation_config.prev_sot_token_id = 3
    if "return_timestamps" in arguments:
        # With tied weights the model repeats a token, so that each segment is as long as the first.
        model.proj_out.weight = model.model.decoder.embed_tokens.weight
        model.generation_config.no_timestamps_token_id = 60

    def count(progress: Tensor) -> None:
        assert next(segments) < 40, "the sound never ends"

    def tokens() -> Tensor:
        torch.manual_seed(3)
        return model.generate(**arguments, monitor_progress=count)

    def prepare(model: Any, generation_config: Any, model_kwargs: dict[str, Any], *args: Any) -> None:
        model_kwargs[CACHE] = simulated(model, CONFIGS[config])

    with monkeypatch.context() as context:
        context.setattr(type(model), "_prepare_cache_for_generation", prepare)
        expected = tokens()
    with patched(model, CONFIGS[config]):
        compare.assert_same(tokens(), expected, "tokens")


def test_whisper_returns_a_cache_of_transformers() -> None:
    """It cuts the cache into sequences, and makes a dense one of them."""
    model = family("whisper")
    with patched(model, "int8"):
        cache = cache_of(greedy(model, inputs_of(model)))
    assert type(cache) is EncoderDecoderCache and type(cache.self_attention_cache) is DynamicCache


def test_whisper_decodes_from_codes_after_token_timestamps() -> None:
    model = build("whisper")
    features = inputs_of(model)["input_features"]
    with patched(model, "int8"):
        expected = model.generate(features)
        with pytest.raises(NotImplementedError, match="generate: `output_attentions` must be False with a quantised"):
            model.generate(features, return_token_timestamps=True)
        times = model.generate(features, return_token_timestamps=True, cache_implementation="dynamic")
        assert "token_timestamps" in times
        caches: list[Any] = []
        model.register_forward_hook(lambda *_: caches.append(cache_of(_[-1])))
        compare.assert_same(model.generate(features), expected, "tokens")
        assert fallbacks(caches[-1].self_attention_cache) == 0


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_a_static_cache_for_attention_outside_the_registry_is_refused() -> None:
    message = (
        "patch: `static` must be False for LEDForConditionalGeneration, got True: it computes attention by itself, "
        "outside transformers' registry, over the whole capacity of a static cache. Leave static and max_cache_len out."
    )
    model = family("led")
    with pytest.raises(NotImplementedError, match=re.escape(message)):
        patch(model, {"preset": "int8", "static": True})
    flag = {"backend": "hf_kvquant", "preset": "int8", "max_cache_len": 64}
    with patched(model, "int8"), pytest.raises(NotImplementedError, match="generate: `static` must be False for LED"):
        greedy(model, inputs_of(model), cache_implementation="quantized", cache_config=flag)


def alone(model: Any) -> dict[str, Any]:
    return {CACHE: KVQuantCache(model.config, "int8")}


def pair(model: Any, **options: Any) -> dict[str, Any]:
    config = {"preset": "int8", **options}
    return {CACHE: beside(model, KVQuantCache(model.config, config))}


CALLS: dict[str, tuple[Callable[[Any], dict[str, Any]], type[Exception], str]] = {
    "prefill_chunk_size": (
        lambda model: {"prefill_chunk_size": 4},
        NotImplementedError,
        "generate: `prefill_chunk_size` must be None for BartForConditionalGeneration, got 4: transformers would cut "
        "the encoder's mask to the chunk. Leave it out.",
    ),
    "output_attentions": (
        lambda model: {"output_attentions": True},
        NotImplementedError,
        "generate: `output_attentions` must be False with a quantised cache, got True: attention weights are never "
        "formed. Use hf_kvquant.unpatch, or another cache_implementation.",
    ),
    "cache_alone": (
        alone,
        ValueError,
        f"generate: `{CACHE}` must be an EncoderDecoderCache for BartForConditionalGeneration, got "
        "KVQuantCache: keys of cross-attention would be taken for the decoder's own. Pass "
        "EncoderDecoderCache(KVQuantCache(...), DynamicCache(config=model.config)), or nothing.",
    ),
    "no_cache": (
        lambda model: {**pair(model), "use_cache": False},
        ValueError,
        "generate: `use_cache` must be True with a KVQuantCache, got False: every step would add the whole sequence to "
        "the cache again. Pass use_cache=True (generation_config may say otherwise), or no cache.",
    ),
    "capture": (
        lambda model: pair(model, capture=True, max_cache_len=64),
        ValueError,
        "generate: `capture` must be False unless the model is patched with it, got True. "
        "Call hf_kvquant.patch with capture=True in the config.",
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_refused_call_leaves_the_model_generating(name: str) -> None:
    make, error, message = CALLS[name]
    model = build("bart")
    with patched(model, "int8"):
        expected = greedy(model, inputs_of(model))
        with pytest.raises(error, match=re.escape(message)):
            greedy(model, inputs_of(model), **make(model))
        compare.assert_same(logits(greedy(model, inputs_of(model))), logits(expected), "logits")


def test_a_model_without_a_pair_of_caches_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("bart")
    monkeypatch.setattr(type(model), "_prepare_cache_for_generation", lambda *args: None)
    message = (
        "generate: BartForConditionalGeneration does not keep a cache of its decoder alone, so it cannot be quantised. "
        "Drop cache_config, or unpatch the model."
    )
    with patched(model, "int8"), pytest.raises(NotImplementedError, match=re.escape(message)):
        greedy(model, inputs_of(model))


def test_a_decoder_with_an_encoders_states_gets_a_pair() -> None:
    """Without one, it would write keys of cross-attention among its own."""
    torch.manual_seed(1234)
    config = transformers.GPT2Config(
        vocab_size=VOCAB_SIZE, n_embd=WIDTH, n_layer=2, n_head=2, n_positions=64, add_cross_attention=True,
        bos_token_id=BOS, eos_token_id=None, pad_token_id=PAD,
    )  # fmt: skip
    model = models.randomized(transformers.GPT2LMHeadModel(config)).eval()
    inputs = {**models.left_padded(), "encoder_hidden_states": torch.randn(3, 5, WIDTH)}
    expected = greedy(model, inputs, **with_cache(EncoderDecoderCache(DynamicCache(), DynamicCache())))
    with patched(model, "none"):
        for given in (None, beside(model, KVQuantCache(model.config, "none"))):
            output = greedy(model, inputs, **with_cache(given))
            assert isinstance(cache_of(output).self_attention_cache, KVQuantCache)
            compare.assert_same(logits(output), logits(expected), "logits")
        message = (
            f"generate: `{CACHE}` must be an EncoderDecoderCache for GPT2LMHeadModel, got KVQuantCache: keys of "
            "cross-attention would be taken for the decoder's own. Pass EncoderDecoderCache(KVQuantCache(...), "
            "DynamicCache(config=model.config)), or nothing."
        )
        with pytest.raises(ValueError, match=re.escape(message)):
            greedy(model, inputs, **with_cache(KVQuantCache(model.config, "none")))
    message = (
        "generate: `static` must be False for GPT2LMHeadModel with an encoder's states, got True: their number is not "
        "known in advance. Leave out static, max_cache_len and capture."
    )
    with patched(model, {"preset": "int8", "static": True}), pytest.raises(NotImplementedError) as raised:
        greedy(model, inputs)
    assert str(raised.value) == message


# Models whose decoder has other numbers of layers and heads than the encoder that its config also describes.
UNEVEN = {**BART, "encoder_layers": 3, "encoder_attention_heads": 4}
_ENDLESS = {"eos_token_id": None, "pad_token_id": PAD, "decoder_start_token_id": BOS}


def t5_of_two() -> Any:
    """As ByT5."""
    config = transformers.T5Config(**{**T5, **_ENDLESS, "num_layers": 4, "num_decoder_layers": 2})
    return transformers.T5ForConditionalGeneration(config)


def prophetnet(model: str) -> Any:
    sizes = {"vocab_size": VOCAB_SIZE, "hidden_size": WIDTH, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48}
    heads = {"num_encoder_attention_heads": 4, "num_decoder_attention_heads": 2}
    layers = {"num_encoder_layers": 3, "num_decoder_layers": 2, "max_position_embeddings": 64}
    return getattr(transformers, model)(transformers.ProphetNetConfig(**sizes, **heads, **layers, **_ENDLESS))


def donut() -> Any:
    """A decoder of mBART's beside an encoder of another family."""
    vision = {"hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    vit = transformers.ViTConfig(**vision, image_size=16, patch_size=8)
    half = transformers.MBartConfig(**{**UNEVEN, **_ENDLESS}, is_decoder=True, add_cross_attention=True)
    config = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(vit, half, **_ENDLESS)
    return transformers.VisionEncoderDecoderModel(config)


DECODERS_OF_TWO: dict[str, Callable[[], Any]] = {
    "t5": t5_of_two,
    "bart": lambda: transformers.BartForCausalLM(transformers.BartConfig(**{**UNEVEN, **_ENDLESS})),
    # As distil-whisper, which assists Whisper by its decoder alone.
    "whisper": lambda: transformers.WhisperForCausalLM(
        transformers.WhisperConfig(**{**UNEVEN, **WHISPER, **_ENDLESS, "max_position_embeddings": None})
    ),
    "prophetnet": functools.partial(prophetnet, "ProphetNetForConditionalGeneration"),
    "prophetnet alone": functools.partial(prophetnet, "ProphetNetForCausalLM"),
    "donut": donut,
}


@pytest.mark.parametrize("name", DECODERS_OF_TWO)
def test_a_cache_has_the_layers_and_heads_of_the_decoder(name: str) -> None:
    torch.manual_seed(1234)
    model = models.randomized(DECODERS_OF_TWO[name]()).eval()
    for key, value in {**_ENDLESS, "forced_eos_token_id": None}.items():
        setattr(model.generation_config, key, value)
    pixels = {"pixel_values": torch.randn(3, 3, 16, 16, generator=torch.Generator().manual_seed(0))}
    inputs = pixels if name == "donut" else models.left_padded()
    described, expected = model.config.to_dict(), greedy(model, inputs)
    with patched(model, "none"):
        output = greedy(model, inputs)
    compare.assert_same(logits(output), logits(expected), "logits")
    with patched(model, "int4-token"):
        output = greedy(model, inputs)
        cache = decoder_cache(cache_of(output))
        assert cache is not None and len(report(model).layers) == len(cache.layers) == 2
        assert all(storage.length == cache.get_seq_length() > 0 for storage in cache.storages)
        assert text_config_of(model).num_attention_heads == cache.storages[0].shape[1]
        assert name != "donut" or not is_ours(model.encoder.config._attn_implementation)
    assert model.config.to_dict() == described, "the model's own config stays"
    compare.assert_same(logits(greedy(model, inputs)), logits(expected), "logits")


def t5gemma2() -> Any:
    """Its decoder attends to its own and the encoder's tokens at once, by a mask joined of both."""
    half = {**SMALL, "num_key_value_heads": 1, "layer_types": ["sliding_attention", "full_attention"]}
    half |= {"sliding_window": 6, "query_pre_attn_scalar": HEAD_DIM}
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    encoder = {"text_config": half, "vision_config": {**vision, "image_size": 16, "patch_size": 8}}
    config = transformers.T5Gemma2Config(encoder=encoder, decoder=half, image_token_index=VOCAB_SIZE - 1, **_ENDLESS)
    model = models.randomized(transformers.T5Gemma2ForConditionalGeneration(config)).eval()
    model.generation_config.update(**_ENDLESS)
    return model


def test_a_decoder_that_joins_its_masks_attends_to_dequantised_tensors(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(1234)
    model = t5gemma2()
    expected = greedy(model, inputs_of(model))
    with patched(model, "none"):
        compare.assert_same(logits(greedy(model, inputs_of(model))), logits(expected), "logits")
    caplog.clear()
    cache = RecordingCache(model.config, INT8)
    with patched(model, INT8):
        output = greedy(model, inputs_of(model), **with_cache(beside(model, cache)))
        reason = "T5Gemma2ForConditionalGeneration joins the masks of its own and the encoder's tokens"
        assert [layer.reason for layer in report(model).layers] == [reason] * 2
    replayed = ReferenceCache(model.config, INT8, cache.recorded, key_transforms=hf_kvquant.key_transforms(model, INT8))
    forcing = forced(output.sequences)
    check_equal(
        output, greedy(model, inputs_of(model), **with_cache(beside(model, replayed)), prefix_allowed_tokens_fn=forcing)
    )
    message = (
        "patch: `static` must be False for T5Gemma2ForConditionalGeneration, got True: it joins the masks of its own "
        "and the encoder's tokens, of which static caches get one alone. Leave static and max_cache_len out."
    )
    with pytest.raises(NotImplementedError, match=re.escape(message)):
        patch(model, {"preset": "int8", "static": True})


def test_half_of_a_pair_is_not_saved(tmp_path: Any) -> None:
    message = (
        "KVQuantCache.save: `model` must be decoder-only, got BartForConditionalGeneration, an encoder-decoder, "
        "which also needs the encoder's keys and values. Pickle the whole EncoderDecoderCache."
    )
    model, cache = family("bart"), filled()
    with pytest.raises(NotImplementedError, match=re.escape(message)):
        cache.self_attention_cache.save(tmp_path / "cache.safetensors", model)
    twin = pickle.loads(pickle.dumps(cache))
    assert twin.get_seq_length() == cache.get_seq_length() and twin.is_updated == cache.is_updated
