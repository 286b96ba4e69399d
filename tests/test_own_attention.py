"""Models that compute attention by themselves: what their overridden forwards serve, and what they leave alone.

That every family decodes from codes, and gives the very logits of an unpatched model where nothing is quantised, is
tested with all others in `test_generate.py`.
"""

from __future__ import annotations

import copy
import logging
import pickle
from typing import Any

import compare
import models
import pytest
import tolerances
import torch
from models import FAMILIES, ReferenceCache, greedy, left_padded, logits
from test_generate import check_against_reference
from torch import Tensor

import hf_kvquant
from hf_kvquant import KVQuantCache, patched
from hf_kvquant.attention import unregistered as own_attention
from hf_kvquant.upstream.releases import cache_of, is_since, with_cache

# These use transformers' registry since 5.24, and are served like other models.
REGISTERED = ("gptj", "codegen") if is_since("5.24") else ()
OWN = ["gptj", "codegen", "gpt_neo", "bloom", "falcon", "falcon_alibi", "falcon_new", "mpt"]
# The keys of the first layer depend on the tokens alone, so that they are the same in two runs to the last bit.
FIRST_LAYER = {"preset": "int4-token", "layers": {1: "none"}}


def build(family: str, **options: Any) -> Any:
    return models.build(FAMILIES[family].model_type, **{**FAMILIES[family].options, **options})


def overridden(model: Any) -> list[str]:
    return [name for name, module in model.named_modules() if name and "forward" in module.__dict__]


def fallbacks(output: Any) -> int:
    return sum(sum(storage.tally.fallbacks.values()) for storage in cache_of(output).storages)


def check(model: Any, inputs: dict[str, Tensor], **options: Any) -> Any:
    """Tokens and logits of a patched model, with those of an unpatched one over what the specification makes of them.

    Returns:
        What the patched model gave.
    """
    transforms = hf_kvquant.key_transforms(model, FIRST_LAYER)  # of BLOOM, whose keys have a bias
    reference = ReferenceCache(model.config, FIRST_LAYER, mask=inputs["attention_mask"], key_transforms=transforms)
    torch.manual_seed(5)
    expected = greedy(model, inputs, **with_cache(reference), **options)
    torch.manual_seed(5)
    with patched(model, FIRST_LAYER):
        output = greedy(model, inputs, **options)
    compare.assert_same(output.sequences, expected.sequences, "tokens")
    bound = tolerances.model_bound(logits(expected), logits(expected), torch.float32)
    compare.assert_close(logits(output), logits(expected), bound, "logits")
    return output


@pytest.mark.parametrize("family", OWN)
def test_static_caches(family: str) -> None:
    model, inputs, config = models.family(family), left_padded(), {"preset": "int4-token", "static": True}
    reads_2d_masks = family in ("bloom", "falcon_alibi")
    if reads_2d_masks and not hasattr(model, "create_masks_for_generate"):
        with pytest.raises(NotImplementedError) as raised:
            hf_kvquant.patch(model, config)
        message = str(raised.value)
        assert message == (
            f"patch: `static` must be False for {type(model).__name__}, got True: it builds ALiBi from a 2-D mask, "
            "and generate of this version of transformers makes a 4-D one for static caches. Leave static and "
            "max_cache_len out."
        )
        assert hf_kvquant.state.patch_of(model) is None and not overridden(model)
        flag = {"backend": "hf_kvquant", **config}
        with patched(model, "int8"), pytest.raises(NotImplementedError, match=r"^generate: `static` must be False"):
            greedy(model, inputs, cache_implementation="quantized", cache_config=flag)
        return
    with patched(model, "int4-token"):
        expected = greedy(model, inputs)
    with patched(model, config):
        output = greedy(model, inputs)
    compare.assert_same(logits(output), logits(expected), "logits")
    assert cache_of(output).is_compileable and fallbacks(output) == 0


VISION = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
ITSELF = "computes attention by itself, outside transformers' registry, over the whole capacity of a static cache"


@pytest.mark.parametrize(
    ("family", "options", "reason"),
    [
        ("git", {"vision_config": {**VISION, "image_size": 16, "patch_size": 8}}, ITSELF),
        ("prophetnet", {"num_hidden_layers": models.LEFT_OUT, "num_decoder_layers": 2, "decoder_ffn_dim": 48}, ITSELF),
        (
            "cpmant",
            {"dim_head": 32, "dim_ff": 64, "prompt_length": 4, "prompt_types": 4, "segment_types": 4},
            "puts tokens of its own before the prompt, for which generate leaves no room in static caches",
        ),
    ],
    ids=["git", "prophetnet", "cpmant"],
)
def test_models_without_static_caches(family: str, options: dict[str, Any], reason: str) -> None:
    model = models.build(family, **options)
    with pytest.raises(NotImplementedError) as raised:
        hf_kvquant.patch(model, "int8", static=True)
    assert str(raised.value) == (
        f"patch: `static` must be False for {type(model).__name__}, got True: it {reason}. Leave static and "
        "max_cache_len out."
    )
    assert hf_kvquant.state.patch_of(model) is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("family", OWN)
def test_half_precision(family: str, dtype: torch.dtype, device: str) -> None:
    """transformers rounds the bias, too, and Falcon's slopes in any dtype."""
    model = build(family).to(device, dtype)
    exact = copy.deepcopy(model).float()
    _, cache = check_against_reference(model, "int8", left_padded(), exact)
    assert not any(storage.tally.fallbacks for storage in cache.storages)


@pytest.mark.skipif("codegen" in REGISTERED, reason="CodeGen rotates in the model's dtype")
def test_queries_of_codegen_may_be_rotated_in_float32() -> None:
    model = build("codegen").to(torch.bfloat16)
    exact = copy.deepcopy(model).float()
    for block in model.transformer.h:
        block.attn.embed_positions = block.attn.embed_positions.float()
    check_against_reference(model, "int8", left_padded(), exact)


@pytest.mark.parametrize("family", ["falcon", "falcon_alibi"])
def test_eager_falcon(family: str) -> None:
    """Its ALiBi is in the mask, and added again by the module."""
    model = models.build("falcon", attention="eager", **FAMILIES[family].options)
    _, cache = check_against_reference(model, "int8", left_padded())
    assert not any(storage.tally.fallbacks for storage in cache.storages)


@pytest.mark.parametrize("heads", [3, 4])
@pytest.mark.parametrize("family", ["bloom", "falcon_alibi", "mpt"])
def test_slopes_are_those_of_the_model(family: str, heads: int) -> None:
    """For numbers of heads that are no powers of two they are another sequence, and another order in MPT."""
    sizes = {"hidden_size": heads * 64, "num_attention_heads": heads, "num_kv_heads": heads}
    model = build(family, **({"d_model": heads * 64, "n_heads": heads} if family == "mpt" else sizes))
    inputs = left_padded(tokens=40, pads=(11, 0, 30))
    _, cache = check_against_reference(model, "int8", inputs)
    assert not any(storage.tally.fallbacks for storage in cache.storages)


@pytest.mark.parametrize(
    "options",
    [
        {"prefill_chunk_size": 4},
        {"num_beams": 3, "num_return_sequences": 2, "length_penalty": 0.5},
        {"do_sample": True, "num_return_sequences": 2, "top_k": 30, "temperature": 1.5},
    ],
    ids=["chunks", "beams", "samples"],
)
@pytest.mark.parametrize("family", OWN)
def test_generate_features(family: str, options: dict[str, Any]) -> None:
    assert fallbacks(check(models.family(family), left_padded(), **options)) == 0


@pytest.mark.parametrize("family", OWN)
def test_prompt_lookup_crops(family: str) -> None:
    inputs = {"input_ids": torch.tensor([[5, 9, 5, 9, 5, 9, 7, 5, 9]])}
    model = models.family(family)
    transforms = hf_kvquant.key_transforms(model, FIRST_LAYER)
    reference = ReferenceCache(model.config, FIRST_LAYER, key_transforms=transforms)
    expected = greedy(model, inputs, **with_cache(reference))
    with patched(model, FIRST_LAYER):
        output = greedy(model, inputs, prompt_lookup_num_tokens=3)
    compare.assert_same(output.sequences, expected.sequences, "tokens")
    assert fallbacks(output) == 0


def test_blocks_of_keys_leave_padding_out() -> None:
    check_against_reference(models.family("mpt"), "int4-channel", left_padded(tokens=130, pads=(90, 0, 70)))


@pytest.mark.parametrize("family", ["bloom", "falcon_alibi", "gptj", "mpt"])
def test_masks_with_holes_fall_back(family: str) -> None:
    inputs = {name: value.flip(1) for name, value in left_padded().items()}  # right padding, and tokens behind it
    assert fallbacks(check(models.family(family), inputs)) == 5


def test_training_and_attention_weights_fall_back() -> None:
    model, ids = build("gpt_neo"), torch.randint(3, 90, (1, 6))
    with patched(model, "int8"), torch.no_grad():
        cache = KVQuantCache(model.config, "int8")
        model(ids, **with_cache(cache))
        weights = model(ids[:, :1], **with_cache(cache), output_attentions=True).attentions
        assert weights[0].shape == (1, 4, 1, 7)
        model.train()
        model(ids[:, :1], **with_cache(cache))
    assert [sum(storage.tally.fallbacks.values()) for storage in cache.storages] == [2, 2]


@pytest.mark.parametrize("family", OWN)
def test_patch_and_unpatch(family: str) -> None:
    model = build(family)
    for _ in range(2):
        hf_kvquant.patch(model, "int8")
        assert len(overridden(model)) == (0 if family in REGISTERED else 2)
    expected = greedy(model, left_padded())
    twins = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    hf_kvquant.unpatch(model)
    assert not overridden(model)
    for twin in twins:
        modules = dict(twin.named_modules())
        assert all(modules[name].forward.args == (modules[name], 2) for name in overridden(twin))
        output = greedy(twin, left_padded())
        compare.assert_same(logits(output), logits(expected), "logits")
        assert fallbacks(output) == 0
        assert not overridden(hf_kvquant.unpatch(twin))


def test_patching_says_nothing_where_all_is_served(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), patched(build("bloom"), "int8"):
        pass
    assert not caplog.records


def test_a_fallback_is_told_once_for_a_model(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """... by us and by transformers, however often it is patched."""
    model = build("xglm")
    # transformers lets its records through to the root only where the environment says CI; pytest may listen twice.
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    for _ in range(3):
        with caplog.at_level(logging.WARNING, "transformers"), patched(model, "int8"):
            pass
    assert model.config._attn_implementation == "eager"
    records = [record for record in dict.fromkeys(caplog.records) if "XGLMForCausalLM" in record.message]
    assert [record.name.partition(".")[0] for record in records] == ["transformers", "hf_kvquant"]


@pytest.mark.parametrize("case", ["overridden", "another signature", "computes otherwise"])
def test_what_we_do_not_know_falls_back(
    case: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = build("bloom", **({"pretraining_tp": 2, "slow_but_exact": True} if case == "computes otherwise" else {}))
    module = model.transformer.h[0].self_attention
    if case == "overridden":
        module.forward = module.forward
    if case == "another signature":
        kind = type(module)
        inner = kind.forward
        monkeypatch.setattr(kind, "forward", lambda self, *args, **kwargs: inner(self, *args, **kwargs))
    before = dict(module.__dict__)
    with caplog.at_level(logging.WARNING, "hf_kvquant"), patched(model, "int8"):
        assert module.__dict__ == before
        output = greedy(model, left_padded())
    assert module.__dict__ == before
    assert [bool(storage.tally.fallbacks) for storage in cache_of(output).storages] == [
        True,
        case != "overridden",
    ]
    assert any("patch: BloomForCausalLM computes attention by itself" in record.message for record in caplog.records)


def test_a_refused_patch_leaves_modules_alone() -> None:
    model = build("gpt_neo")
    with pytest.raises(NotImplementedError, match="`capture` must be False"):
        hf_kvquant.patch(model, {"preset": "int8", "capture": True})
    assert not overridden(model)
    with patched(model, "int8"):
        with pytest.raises(NotImplementedError, match="`capture` must be False"):
            hf_kvquant.patch(model, {"preset": "int8", "capture": True})
        assert len(overridden(model)) == 2


def test_the_flag_of_generate() -> None:
    model = build("mpt")
    hf_kvquant.enable()
    try:
        flag = {"backend": "hf_kvquant", "preset": "int8"}
        output = greedy(model, left_padded(), cache_implementation="quantized", cache_config=flag)
    finally:
        hf_kvquant.disable()
        own_attention.unpatch(model)
    assert isinstance(cache_of(output), KVQuantCache) and fallbacks(output) == 0
