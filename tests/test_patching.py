"""`patch`, `unpatch`, `patched`, `enable` and `disable`: what they leave on a model, and that nothing stays behind."""

from __future__ import annotations

import copy
import io
import json
import logging
import pickle
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import compare
import models
import pytest
import tolerances
import torch
import transformers
from models import FAMILIES, ReferenceCache, greedy, left_padded, logits
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    BltConfig,
    BltForCausalLM,
    Gemma3ForConditionalGeneration,
    GenerationMixin,
    LlamaForSequenceClassification,
    PreTrainedModel,
)
from transformers.cache_utils import DynamicCache

import hf_kvquant
from hf_kvquant import PRESETS, KVQuantCache, KVQuantConfig, patch, patched, unpatch
from hf_kvquant.generate import encoder_decoder
from hf_kvquant.state import patch_of
from hf_kvquant.upstream.releases import CACHE, cache_of, with_cache

FLAG = {"cache_implementation": "quantized", "cache_config": {"backend": "hf_kvquant", "preset": "int4-token"}}


def visible_state(model: PreTrainedModel) -> dict[str, Any]:
    """Everything about a model that a patch could leave behind."""
    configs = [module.config for module in model.modules() if hasattr(module, "config")]
    return {
        "attributes": sorted(model.__dict__),
        "configs": [config.to_json_string(use_diff=False) for config in configs],
        "implementations": [config._attn_implementation for config in configs],
        "generation": model.generation_config.to_json_string(),
        "prepare_cache": model._prepare_cache_for_generation,
        "forward": model.forward,
    }


# --- patch and unpatch ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss", "gptj", "qwen3_next"])
def test_unpatch_undoes_patch(family: str) -> None:
    model = models.build(FAMILIES[family].model_type, **FAMILIES[family].options)
    before, expected = visible_state(model), greedy(model, left_padded())
    assert patch(model, "int4-token") is model
    greedy(model, left_padded())
    assert unpatch(model) is model
    assert visible_state(model) == before
    output = greedy(model, left_padded())
    assert type(cache_of(output)) is DynamicCache
    compare.assert_same(logits(output), logits(expected), "logits")


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_the_attention_implementation_comes_back(attention: str) -> None:
    model = models.build("llama", attention=attention)
    patch(model)
    assert model.config._attn_implementation == {"sdpa": "hf_kvquant", "eager": "hf_kvquant-eager"}[attention]
    patch(model, "int4-token")  # over a patched model, what was there before is what was there before
    unpatch(model)
    assert model.config._attn_implementation == attention


def test_patching_twice_replaces_the_config() -> None:
    model = models.build("llama")
    patch(model, "int4-token")
    patch(model, {"preset": "fp8", "layers": {0: "none"}})
    config = KVQuantConfig.from_preset("fp8", layers={0: "none"})
    assert cache_of(greedy(model, left_padded())).quant_config == config
    unpatch(model)
    assert patch_of(model) is None


def test_options_of_a_preset_may_be_arguments() -> None:
    model, config = models.build("llama"), KVQuantConfig.from_preset("int4", residual_length=64)
    with patched(model, "int4", residual_length=64):
        assert cache_of(greedy(model, left_padded())).quant_config == config
    patch(model, "int4", residual_length=64)
    assert cache_of(greedy(model, left_padded())).quant_config == config
    with pytest.raises(ValueError, match=r"'residual_lenght'\. Did you mean 'residual_length'\?"):
        patch(model, "int4", residual_lenght=4)
    assert cache_of(greedy(model, left_padded())).quant_config == config


def test_the_default_preset_is_int8() -> None:
    model = models.build("llama")
    patch(model)
    assert cache_of(greedy(model, left_padded())).quant_config == KVQuantConfig.from_preset("int8")


def test_unpatch_refuses_an_unpatched_model() -> None:
    message = "unpatch: `model` must be patched, got an unpatched LlamaForCausalLM. There is nothing to undo."
    with pytest.raises(ValueError, match=re.escape(message)):
        unpatch(models.llama())


def test_other_models_are_untouched() -> None:
    model, other = models.build("llama"), models.llama()
    before, expected = visible_state(other), greedy(other, left_padded())
    patch(model, "int4-token")
    assert visible_state(other) == before
    output = greedy(other, left_padded())
    assert type(cache_of(output)) is DynamicCache
    compare.assert_same(logits(output), logits(expected), "logits")


def test_a_base_model_without_generate() -> None:
    base = models.build("llama").model
    before = sorted(base.__dict__)
    ids = left_padded()["input_ids"]
    cache = KVQuantCache(base.config, "int8")
    with torch.no_grad(), patched(base, "int8"):
        base(input_ids=ids, **with_cache(cache))
        base(input_ids=ids[:, :1], **with_cache(cache))
    assert not cache.storages[0].tally.fallbacks
    assert sorted(base.__dict__) == before


# --- patched ----------------------------------------------------------------------------------------------------------


def test_patched_restores_after_an_exception() -> None:
    model = models.build("llama")
    before = visible_state(model)
    with pytest.raises(KeyError, match="inside"), patched(model, "int4-token"):
        raise KeyError("inside")
    assert visible_state(model) == before


def test_patched_nests() -> None:
    model = models.build("llama")
    before = visible_state(model)

    def preset_in_use() -> KVQuantConfig:
        return cache_of(greedy(model, left_padded(), 2)).quant_config

    with patched(model, "int4-token") as inner:
        assert inner is model
        with patched(model, "fp8"):
            assert preset_in_use() == KVQuantConfig.from_preset("fp8")
            with patched(model, "none"):
                assert preset_in_use() == KVQuantConfig.from_preset("none")
            assert preset_in_use() == KVQuantConfig.from_preset("fp8")
        assert preset_in_use() == KVQuantConfig.from_preset("int4-token")
    assert visible_state(model) == before


def test_patched_leaves_a_patched_model_patched() -> None:
    model = models.build("llama")
    patch(model, "int4-token")
    with pytest.raises(KeyError), patched(model, "fp8"):
        raise KeyError
    assert cache_of(greedy(model, left_padded(), 2)).quant_config == KVQuantConfig.from_preset("int4-token")


def test_patched_with_a_config_that_is_refused_changes_nothing() -> None:
    model = models.build("llama")
    before = visible_state(model)
    with pytest.raises(ValueError, match="`preset` must be one of"), patched(model, "int5"):
        pass
    assert visible_state(model) == before


# --- copies -----------------------------------------------------------------------------------------------------------


def through_pickle(model: Any) -> Any:
    return pickle.loads(pickle.dumps(model))


def through_torch_save(model: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.parametrize("copier", [copy.deepcopy, through_pickle, through_torch_save])
def test_a_copy_of_a_patched_model_is_patched_by_itself(copier: Any) -> None:
    model = models.build("llama")
    patch(model, "int4-token")
    expected = greedy(model, left_padded())
    twin = copier(model)
    assert twin._prepare_cache_for_generation.args == (twin,), "the hook of the copy belongs to the copy"
    unpatch(model)
    output = greedy(twin, left_padded())
    assert isinstance(cache_of(output), KVQuantCache) and not cache_of(output).storages[0].tally.fallbacks
    compare.assert_same(logits(output), logits(expected), "logits")
    unpatch(twin)
    assert type(cache_of(greedy(twin, left_padded()))) is DynamicCache


def test_nothing_of_ours_is_saved_with_a_model(tmp_path: Path) -> None:
    model = models.build("llama")
    model.save_pretrained(tmp_path / "before")
    patch(model, "int4-token")
    greedy(model, left_padded())
    model.save_pretrained(tmp_path / "patched")
    for file in ("config.json", "generation_config.json"):
        assert (tmp_path / "patched" / file).read_text() == (tmp_path / "before" / file).read_text()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "patched")
    assert loaded.config._attn_implementation == "sdpa"
    assert "kvquant" not in json.dumps(loaded.config.to_dict())
    unpatch(model)
    expected = greedy(model, left_padded())
    compare.assert_same(logits(greedy(loaded.eval(), left_padded())), logits(expected), "logits")


def test_a_state_dict_is_the_same() -> None:
    model = models.build("llama")
    names = list(model.state_dict())
    patch(model, "int4-token")
    assert list(model.state_dict()) == names


# --- enable and disable -----------------------------------------------------------------------------------------------


@pytest.fixture
def enabled() -> Iterator[None]:
    hf_kvquant.enable()
    yield
    hf_kvquant.disable()


def test_the_flag_is_unknown_before_enable() -> None:
    with pytest.raises((ValueError, TypeError), match="backend|preset"):  # noqa: RUF043
        greedy(models.llama(), left_padded(), **copy.deepcopy(FLAG))  # transformers 5.17 takes entries out of it


@pytest.mark.usefixtures("enabled")
def test_enable_makes_the_flag_work_on_every_model() -> None:
    model, other = models.build("llama"), models.llama()
    with patched(other, "int4-token"):
        expected = greedy(other, left_padded())
    for _ in range(2):
        output = greedy(model, left_padded(), **FLAG)
        assert isinstance(cache_of(output), KVQuantCache) and not cache_of(output).storages[0].tally.fallbacks
        compare.assert_same(logits(output), logits(expected), "logits")
    assert patch_of(model) is None
    plain = greedy(model, left_padded())
    assert type(cache_of(plain)) is DynamicCache, "without the flag, nothing is quantised"
    compare.assert_same(logits(plain), logits(greedy(other, left_padded())), "logits")


@pytest.mark.usefixtures("enabled")
def test_enable_without_options_means_the_default_preset() -> None:
    options = {"cache_implementation": "quantized", "cache_config": {"backend": "hf_kvquant"}}
    output = greedy(models.build("llama"), left_padded(), **options)
    assert cache_of(output).quant_config == KVQuantConfig.from_preset("int8")


@pytest.mark.usefixtures("enabled")
def test_enable_leaves_other_backends_to_transformers() -> None:
    with pytest.raises(ValueError, match="nonsense"):
        options = {"cache_implementation": "quantized", "cache_config": {"backend": "nonsense"}}
        greedy(models.build("llama"), left_padded(), **options)


@pytest.mark.usefixtures("enabled")
def test_enable_and_patch_get_along() -> None:
    model = models.build("llama")
    before = visible_state(model)
    with patched(model, "int8"):
        assert cache_of(greedy(model, left_padded())).quant_config == KVQuantConfig.from_preset("int8")
        assert cache_of(greedy(model, left_padded(), **FLAG)).quant_config == KVQuantConfig.from_preset("int4-token")
    assert visible_state(model) == before


def test_patch_after_enable_restores_what_was_before_both() -> None:
    model = models.build("llama")
    hf_kvquant.enable()
    try:
        greedy(model, left_padded(), **FLAG)
        assert model.config._attn_implementation == "hf_kvquant"
        # Patched while it is in force, too.
        assert hf_kvquant.report(patch(model, "int4-token")).is_served
        assert unpatch(model).config._attn_implementation == "sdpa"
        greedy(model, left_padded(), **FLAG)
    finally:
        hf_kvquant.disable()
    assert model.config._attn_implementation == "sdpa"
    patch(model, "int4-token")
    assert hf_kvquant.report(model).is_served
    assert not cache_of(greedy(model, left_padded())).storages[0].tally.fallbacks
    unpatch(model)
    output = greedy(model, left_padded())
    assert type(cache_of(output)) is DynamicCache
    compare.assert_same(logits(output), logits(greedy(models.llama(), left_padded())), "logits")


def test_enable_and_disable_restore_the_method_of_transformers() -> None:
    method = GenerationMixin._prepare_cache_for_generation
    hf_kvquant.disable()  # not in force: nothing happens
    assert GenerationMixin._prepare_cache_for_generation is method
    hf_kvquant.enable()
    hf_kvquant.enable()
    assert GenerationMixin._prepare_cache_for_generation is not method
    hf_kvquant.disable()
    assert GenerationMixin._prepare_cache_for_generation is method


# --- refusals ---------------------------------------------------------------------------------------------------------


REFUSALS: dict[str, tuple[Any, Any, type[Exception], str]] = {
    "encoder_decoder": (
        models.bart,
        {"preset": "int8", "capture": True},
        NotImplementedError,
        "patch: `capture` must be False for BartForConditionalGeneration, got True: it is an encoder-decoder, whose "
        "cross-attention reads tensors that are new in every call. Pass static=True instead, and generate compiles.",
    ),
    "recurrent": (
        lambda: models.build("mamba"),
        "int8",
        NotImplementedError,
        "KVQuantCache: mamba has only layers of type ['linear_attention'], which keep a state of fixed size and no "
        "keys and values. Leave the model unpatched.",
    ),
    "no_cache_of_transformers": (
        lambda: models.build("xlstm", num_heads=2, head_dim=models.LEFT_OUT),
        "int8",
        NotImplementedError,
        "patch: xLSTMForCausalLM does not keep its state in a cache of transformers, so there are no keys and values "
        "to quantise. Leave the model unpatched.",
    ),
    "no_cache_at_all": (
        lambda: models.build("openai-gpt", **models._GPT),
        "int8",
        NotImplementedError,
        "patch: OpenAIGPTLMHeadModel does not keep its state in a cache of transformers, so there are no keys and "
        "values to quantise. Leave the model unpatched.",
    ),
    "preset": (
        models.llama,
        "k8v8",
        ValueError,
        f"KVQuantConfig: `preset` must be one of {list(PRESETS)}, got 'k8v8'. Did you mean 'k8v4'?",
    ),
    "key": (
        models.llama,
        {"preset": "int8", "stattic": True},
        ValueError,
        "KVQuantConfig: unknown key 'stattic'. Did you mean 'static'? Known keys: ",
    ),
    "type": (
        models.llama,
        8,
        TypeError,
        "KVQuantConfig: `preset_or_config` must be a preset's name, a dictionary or a KVQuantConfig, got int. "
        "Presets: ",
    ),
    "layers": (
        models.llama,
        {"layers": {2: "none"}},
        ValueError,
        "KVQuantCache: `layers` must name layers below 2, the model's number of layers, got [2].",
    ),
    "head_dim": (
        lambda: models.llama(head_dim=20),
        "int4-token",
        ValueError,
        "KVFormat: `head_dim` must be a positive multiple of 8, got 20. ",
    ),
    "group_size": (
        lambda: models.llama(head_dim=80),
        "int4-g32",
        ValueError,
        "KVFormat: `group_size` must divide head_dim 80, got 32. Choose a divisor, or granularity 'head'.",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_a_refused_model_is_left_as_it_was(name: str) -> None:
    make, config, error, message = REFUSALS[name]
    model = make()
    before, inputs = visible_state(model), {"input_ids": torch.randint(3, 90, (2, 5))}
    expected = greedy(model, inputs, decoder_start_token_id=1)
    with pytest.raises(error, match=re.escape(message)):
        patch(model, config)
    assert visible_state(model) == before
    compare.assert_same(logits(greedy(model, inputs, decoder_start_token_id=1)), logits(expected), "logits")


ENCODER_SIZES = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}


@pytest.mark.parametrize("model_type", ["vit", "bert", "clip", "siglip_vision_model"])
def test_encoders_alone_are_refused(model_type: str) -> None:
    config = AutoConfig.for_model(model_type, **({} if model_type == "clip" else ENCODER_SIZES))
    with torch.device("meta"):
        model = AutoModel.from_config(config)
    with pytest.raises(NotImplementedError, match=f"^patch: {type(model).__name__} does not keep its state in a cache"):
        patch(model, "int8")


@pytest.mark.parametrize("name", ["ParakeetForTDT", "ParakeetForRNNT", "NemotronAsrStreamingForRNNT"])
def test_transducers_are_refused(name: str) -> None:
    """They have `generate`, and a decoder with a state of fixed size, whose layers some configs count."""
    transducer = getattr(transformers, name, None)
    if transducer is None:
        pytest.skip("this version of transformers does not have it")
    with torch.device("meta"):
        model = transducer(transducer.config_class())
    with pytest.raises(NotImplementedError, match=r"Leave the model unpatched\.$"):
        patch(model, "int8")


def in_chunks(model: Any, ids: torch.Tensor, cache: Any) -> torch.Tensor:
    """What a model returns for the last of three chunks."""
    with torch.no_grad():
        outputs = [model(chunk, **with_cache(cache))[0] for chunk in ids.chunk(3, dim=1)]
    return outputs[-1]


def test_models_without_generate_take_a_cache() -> None:
    """They are what users score or embed text with, a cache passed by hand."""
    whole, ids = models.llama(), left_padded(tokens=12, pads=(0,))["input_ids"]
    scorer = models.randomized(LlamaForSequenceClassification(whole.config)).eval()
    config = {"preset": "int4-token", "layers": {1: "none"}}  # below it, both runs quantise the same numbers
    for model in (whole.model, scorer):
        caches = DynamicCache(config=model.config), ReferenceCache(model.config, config)
        dense, expected = (in_chunks(model, ids, cache) for cache in caches)
        with patched(model, config):
            actual = in_chunks(model, ids, KVQuantCache(model.config, config))
        bound = tolerances.model_bound(expected, expected, torch.float32)
        compare.assert_close(actual, expected, bound, type(model).__name__)
        assert float((expected - dense).abs().max()) > 10 * bound, "quantisation does not show"


def test_several_models_in_one_are_refused() -> None:
    """transformers makes no cache for BLT either, so there is nothing that it could generate."""
    size = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    parts = {f"{part}_config": size for part in ("patcher", "encoder", "decoder", "global")}
    model = BltForCausalLM(BltConfig(**parts, encoder_hash_byte_group_vocab=8))
    before = visible_state(model)
    message = "KVQuantCache: blt has no `num_hidden_layers` in its config, so the number of cache layers is"
    with pytest.raises(NotImplementedError, match=re.escape(message)):
        patch(model, "int8")
    assert visible_state(model) == before


def test_a_pipeline_is_not_a_model() -> None:
    message = (
        "patch: `model` must be a transformers PreTrainedModel, got Linear. "
        "Pass the model itself, not a pipeline or a wrapper."
    )
    with pytest.raises(TypeError, match=re.escape(message)):
        patch(torch.nn.Linear(2, 2), "int8")


@pytest.mark.parametrize("through", ["patch", "flag"])
def test_attention_weights_are_refused_and_the_model_generates_as_before(through: str) -> None:
    model, inputs = models.build("llama", attention="eager"), left_padded()
    message = (
        "generate: `output_attentions` must be False with a quantised cache, got True: attention weights are never "
        "formed. Use hf_kvquant.unpatch, or another cache_implementation."
    )
    with patched(model, "int4-token"):
        expected = greedy(model, inputs)
        options = FLAG if through == "flag" else {}
        with pytest.raises(NotImplementedError, match=re.escape(message)):
            greedy(model, inputs, output_attentions=True, **options)
        compare.assert_same(logits(greedy(model, inputs)), logits(expected), "logits")
        weights = greedy(model, inputs, output_attentions=True, cache_implementation="dynamic").attentions
    assert weights[1][0].shape == (3, 4, 1, 10)


def test_attention_weights_are_refused_before_a_given_cache_takes_tokens() -> None:
    model, inputs = models.llama(), left_padded()
    with patched(model, "int8"):
        cache = KVQuantCache(model.config, "int8")
        with pytest.raises(NotImplementedError, match=r"^generate: `output_attentions` must be False with a quantised"):
            greedy(model, inputs, output_attentions=True, **with_cache(cache))
    assert all(storage.is_empty for storage in cache.storages)


def test_a_bad_flag_is_refused_and_the_model_generates_as_before() -> None:
    model, inputs = models.llama(), left_padded()
    with patched(model, "int4-token"):
        expected = greedy(model, inputs)
        bad = {"cache_implementation": "quantized", "cache_config": {"backend": "hf_kvquant", "presett": "int8"}}
        with pytest.raises(ValueError, match="unknown key 'presett'. Did you mean 'preset'?"):  # noqa: RUF043
            greedy(model, inputs, **bad)
        compare.assert_same(logits(greedy(model, inputs)), logits(expected), "logits")


QUANTIZED = {"cache_implementation": "quantized"}
NEARLY: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    **{
        str(backend): (
            {**QUANTIZED, "cache_config": {**options, "preset": "int4-token"}},
            ValueError,
            "generate: `backend` in cache_config must be 'hf_kvquant' for a cache of this package, got "
            f"{backend!r}. Did you mean 'hf_kvquant'?",
        )
        for backend, options in {
            "hf-kvquant": {"backend": "hf-kvquant"},
            "HF_KVQUANT": {"backend": "HF_KVQUANT"},
            "kvquant": {"backend": "kvquant"},
            None: {},
        }.items()
    },
    "the config alone": (
        {"cache_config": {"backend": "hf_kvquant", "preset": "fp8"}},
        ValueError,
        "generate: `cache_implementation` must be 'quantized' with the backend 'hf_kvquant' in cache_config, got None. "
        "Pass both, or neither for what the model was patched with.",
    ),
    "an object": (
        {**QUANTIZED, "cache_config": KVQuantConfig()},
        TypeError,
        "generate: `cache_config` must be a dictionary, got a KVQuantConfig. Pass its to_dict().",
    ),
    "a preset for a cache": (
        {CACHE: "int4-token"},
        TypeError,
        f"generate: `{CACHE}` must be a cache, got str. "
        "Pass KVQuantCache(model.config, ...), or patch the model with the config and pass nothing.",
    ),
    "a config for a cache": (
        {CACHE: KVQuantConfig()},
        TypeError,
        f"generate: `{CACHE}` must be a cache, got KVQuantConfig. "
        "Pass KVQuantCache(model.config, ...), or patch the model with the config and pass nothing.",
    ),
    "a class for a cache": (
        {CACHE: KVQuantCache},
        TypeError,
        f"generate: `{CACHE}` must be a cache, got type. "
        "Pass KVQuantCache(model.config, ...), or patch the model with the config and pass nothing.",
    ),
}


@pytest.mark.parametrize("through", ["patch", "enable"])
@pytest.mark.parametrize("name", NEARLY)
def test_what_nearly_asks_for_a_quantised_cache(name: str, through: str) -> None:
    options, error, message = NEARLY[name]
    model = models.build("llama")
    before = visible_state(model)
    if through == "patch":
        patch(model, "int4-token")
    else:
        hf_kvquant.enable()
    try:
        with pytest.raises(error) as raised:
            greedy(model, left_padded(), **options)
    finally:
        hf_kvquant.disable()
        if through == "patch":
            unpatch(model)
    assert str(raised.value) == message
    assert visible_state(model) == before


def test_the_dictionary_of_a_config_serves_as_a_flag() -> None:
    model = models.build("llama")
    with patched(model, "int8"):
        flag = {**QUANTIZED, "cache_config": KVQuantConfig.from_preset("int4-token").to_dict()}
        output = greedy(model, left_padded(), **flag)
    assert cache_of(output).quant_config == KVQuantConfig.from_preset("int4-token")


@pytest.mark.parametrize("model", ["gpt2", None, models.llama().config], ids=["str", "None", "config"])
@pytest.mark.parametrize("where", ["patch", "unpatch", "patched", "key_transforms", "unrotate_values"])
def test_what_is_no_model(where: str, model: Any) -> None:
    with pytest.raises(TypeError) as raised:
        if where == "patched":
            with patched(model, "int4-token"):
                pass
        elif where == "key_transforms":
            hf_kvquant.key_transforms(model, "int4-token")
        else:
            getattr(hf_kvquant, where)(model)
    assert str(raised.value) == (
        f"{where}: `model` must be a transformers PreTrainedModel, got {type(model).__name__}. "
        "Pass the model itself, not a pipeline or a wrapper."
    )


def test_a_cache_without_its_use_is_refused() -> None:
    """MPT has `use_cache=False` by default: the whole sequence would go into the cache at every step."""
    model = models.llama()
    cache = KVQuantCache(model.config, "int8")
    message = (
        "generate: `use_cache` must be True with a KVQuantCache, got False: every step would add the whole sequence to "
        "the cache again. Pass use_cache=True (generation_config may say otherwise), or no cache."
    )
    with patched(model, "int8"), pytest.raises(ValueError, match=re.escape(message)):
        greedy(model, left_padded(), **with_cache(cache), use_cache=False)
    assert not cache.is_initialized


def test_a_static_cache_that_is_too_short_for_the_call() -> None:
    model = models.llama()
    message = (
        "generate: `max_cache_len` must be at least 14 for this prompt and max_new_tokens, got 10. "
        "Raise it in the config, or leave it out and pass static=True."
    )
    with patched(model, {"preset": "int8", "max_cache_len": 10}):
        with pytest.raises(ValueError, match=re.escape(message)):
            greedy(model, left_padded())
        assert cache_of(greedy(model, left_padded(), 2)).get_max_length() == 10


# --- static caches and what is said -----------------------------------------------------------------------------------


def test_a_static_cache_is_as_long_as_the_call_needs() -> None:
    model = models.llama()
    with patched(model, {"preset": "int8", "static": True}):
        cache = cache_of(greedy(model, left_padded()))
        beams = cache_of(greedy(model, left_padded(), num_beams=2))
    assert cache.get_max_length() == 256
    assert beams.batch_size == 6, "the batch is that of the first tokens, beams included"


@pytest.mark.parametrize(
    ("needed", "held"), [([1], 256), ([256], 256), ([257], 512), ([300, 20], 512), ([20, 300], 512), ([700, 513], 768)]
)
def test_a_static_cache_is_as_long_as_idle_buffers_or_a_multiple_of_256(needed: list[int], held: int) -> None:
    model = models.build("llama", max_position_embeddings=1024)
    with patched(model, {"preset": "int8", "static": True}):
        for tokens in needed:
            inputs = {"input_ids": torch.randint(3, 90, (1, tokens))}
            cache = cache_of(greedy(model, inputs, 1))
            length = cache.get_max_length()
            del cache
    assert length == held, "the last new token is never an input, so the prompt is all that has to fit"


def test_idle_buffers_of_another_batch_make_no_cache_longer() -> None:
    model = models.build("llama", max_position_embeddings=1024)
    with patched(model, {"preset": "int8", "static": True}):
        greedy(model, {"input_ids": torch.randint(3, 90, (1, 300))}, 1)
        assert cache_of(greedy(model, {"input_ids": torch.randint(3, 90, (2, 20))}, 1)).get_max_length() == 256


@pytest.mark.parametrize("spelled", [{"static": True}, {"max_cache_len": 40}])
def test_static_through_the_flag(spelled: dict[str, Any]) -> None:
    model = models.build("llama")
    flag = {"cache_implementation": "quantized", "cache_config": {"backend": "hf_kvquant", "preset": "int8", **spelled}}
    with patched(model, "int4-token"):
        cache = cache_of(greedy(model, left_padded(), **flag))
        assert cache.is_compileable and cache.get_max_length() == spelled.get("max_cache_len", 256)
        assert not cache_of(greedy(model, left_padded())).is_compileable


@pytest.mark.parametrize("case", ["known", "unknown", "not compiled"])
def test_buffers_are_there_before_a_compiled_prefill_in_chunks(
    case: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """transformers compiles the first chunk, and a compiled step cannot allocate. Here it is told that it did."""
    model, seen = models.build("llama"), []
    if case == "unknown":
        monkeypatch.setattr(model, "_get_static_cache_init_shape", lambda: None, raising=False)

    def is_compiled(kwargs: dict[str, Any], config: Any) -> bool:
        seen.append((kwargs[CACHE].is_initialized, bool(config.disable_compile)))
        return case != "not compiled" and not config.disable_compile

    monkeypatch.setattr(model, "_valid_auto_compile_criteria", is_compiled, raising=False)
    monkeypatch.setattr(type(model), "get_compiled_call", lambda self, config: self.__call__)
    encoder_decoder._log_uncompiled.cache_clear()
    with caplog.at_level(logging.WARNING, "hf_kvquant"), patched(model, {"preset": "int8", "static": True}):
        expected = greedy(model, left_padded())
        seen.clear()
        output = greedy(model, left_padded(), prefill_chunk_size=9)
        compare.assert_same(output.sequences, expected.sequences, "tokens")
    assert seen[0] == (False, False), "asked before there are buffers"
    assert set(seen[1:]) == {(case == "known", case == "unknown")}
    logged = [record.message for record in caplog.records if "not compiled" in record.message]
    assert logged == [
        "generate: LlamaForCausalLM is not compiled when its prompt comes in chunks, since its layers are on "
        "several devices, or have shapes that are unknown before the first tokens. Correct, slower. Leave "
        "prefill_chunk_size out."
    ] * (case == "unknown")


def test_a_model_outside_the_registry_is_said_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    model = models.build("xglm", **models.FAMILIES["xglm"].options)  # one that has not been told of
    with caplog.at_level(logging.WARNING, "hf_kvquant"), patched(model, "int8"):
        pass
    assert [record.message for record in caplog.records if record.name == "hf_kvquant.patching"] == [
        "patch: XGLMForCausalLM computes attention by itself, outside transformers' registry, so it attends to "
        "dequantised tensors. Correct, slower."
    ]


def test_only_the_text_model_of_a_vision_language_model_is_patched() -> None:
    config = AutoConfig.for_model(
        "gemma3",
        text_config={
            **models.COMMON,
            "layer_types": ["sliding_attention", "full_attention"],
            "sliding_window": 6,
        },
        vision_config={
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 28,
            "patch_size": 14,
        },
        mm_tokens_per_image=4,
    )
    model = models.randomized(Gemma3ForConditionalGeneration(config)).eval()
    model.generation_config.eos_token_id = None
    before, inputs = visible_state(model), left_padded()
    expected = greedy(model, inputs)
    with patched(model, "none"):
        assert model.config.text_config._attn_implementation == "hf_kvquant"
        assert model.config.vision_config._attn_implementation == "sdpa"
        output = greedy(model, inputs)
        assert not cache_of(output).storages[0].tally.fallbacks
    assert isinstance(cache_of(output), KVQuantCache)
    compare.assert_same(logits(output), logits(expected), "logits")
    assert visible_state(model) == before
