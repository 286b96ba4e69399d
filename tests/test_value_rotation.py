"""Rotated values: which families, that logits move by roundings only, what a cache holds, undoing, and mistakes.

Models are the tiny ones of `models.py`, whose weights are random; outlier channels are put into values by hand.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import models
import pytest
import tolerances
import torch
from test_smoothing import Adapter, EightBits, OneProjection, assert_weights, snapshot
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.models.llama import modeling_llama

import hf_kvquant
from hf_kvquant import rotate_values, unrotate_values
from hf_kvquant.attention.observation import NAME
from hf_kvquant.calibration import value_rotation
from hf_kvquant.calibration.layout import find_value_layouts
from hf_kvquant.spec import reference
from hf_kvquant.upstream.releases import with_cache
from hf_kvquant_evals.measuring.fidelity import compare

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
IDS = torch.randint(3, models.VOCAB_SIZE, (2, 40), generator=torch.Generator().manual_seed(3))
# What makes the values of each family's last layer, and what takes attention's output.
PROJECTIONS = {
    "llama": ("v_proj", "o_proj"),
    "qwen2": ("v_proj", "o_proj"),
    "qwen3": ("v_proj", "o_proj"),
    "qwen3_moe": ("v_proj", "o_proj"),
    "mistral": ("v_proj", "o_proj"),
    "gemma2": ("v_proj", "o_proj"),
    "gemma3_text": ("v_proj", "o_proj"),
    "phi": ("v_proj", "dense"),
    "phi3": ("qkv_proj", "o_proj"),
    "gpt_neox": ("query_key_value", "dense"),
    "gpt2": ("c_attn", "c_proj"),
    "gpt_bigcode": ("c_attn", "c_proj"),
    "opt": ("v_proj", "out_proj"),
    "glm": ("v_proj", "o_proj"),
    "gpt_oss": ("v_proj", "o_proj"),
    "lfm2": ("v_proj", "out_proj"),
    "falcon": ("query_key_value", "dense"),
    "falcon_new": ("query_key_value", "dense"),
}


def build(name: str = "llama", dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    """A fresh model of a family."""
    family = models.FAMILIES[name]
    return models.build(family.model_type, dtype, **{**family.options, **options})


def logits(model: Any) -> Tensor:
    """Logits of the same tokens."""
    with torch.no_grad():
        result: Tensor = model(IDS).logits
    return result


def cached(model: Any) -> list[tuple[Tensor, Tensor]]:
    """Keys and values by layer, as an unquantised cache has them."""
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(IDS, **with_cache(cache), use_cache=True)
    return [(layer.keys, layer.values) for layer in cache.layers if getattr(layer, "keys", None) is not None]


def assert_untouched(model: Any, weights: dict[str, Tensor]) -> None:
    """The model has these weights, bit for bit, no mark of rotation, and no hook."""
    assert_weights(model, weights)
    assert not value_rotation.is_rotated(model) and value_rotation.CONFIG_KEY not in model.config.to_dict()
    assert all(not module._forward_hooks and not module._forward_pre_hooks for module in model.modules())


def assert_refused(model: Any, error: type[Exception], message: str) -> None:
    """`rotate_values` raises, and leaves the model as it was."""
    hooks = [(module, len(module._forward_hooks)) for module in model.modules()]
    weights = snapshot(model)
    with pytest.raises(error, match=message):
        rotate_values(model)
    for name, value in model.state_dict().items():
        assert value.is_meta or torch.equal(value, weights[name]), name
    assert not value_rotation.is_rotated(model)
    assert [(module, len(module._forward_hooks)) for module in model.modules()] == hooks


# --- what is rotated --------------------------------------------------------------------------------------------------


@pytest.mark.full(
    when=lambda name, dtype: dtype != torch.float32 and name not in ("llama", "phi3", "gpt2", "falcon"),
    reason="what is rounded depends on how projections lie in a weight, not on the family",
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", PROJECTIONS)
def test_logits_move_by_roundings_and_come_back(name: str, dtype: torch.dtype) -> None:
    model = build(name, dtype)
    weights, before, exact = snapshot(model), logits(model), logits(build(name, dtype).float())
    layers = rotate_values(model)
    made, taken = PROJECTIONS[name]
    changed = {key for key, value in model.state_dict().items() if not torch.equal(value, weights[key])}
    assert {key.split(".")[-2] for key in changed} == {made, taken}
    num_layers = len({key.split(made)[0] for key in changed if made in key})
    assert num_layers == len(layers)
    has_bias = f"{made}.bias" in "".join(weights)
    assert sum(key.endswith(f"{made}.bias") for key in changed) == has_bias * num_layers
    assert not any(key.endswith(f"{taken}.bias") for key in changed)
    # Weights are rounded anew in the dtype, which moves logits as much as rounding them the first time did.
    bound = tolerances.model_bound(exact, before.float(), dtype)
    if dtype != torch.float32:
        bound += tolerances.projection_bound(exact, dtype) / 2
    moved = (logits(model).float() - before.float()).abs().amax(-1)
    assert moved.median() < bound, "a router may send single tokens elsewhere"
    assert unrotate_values(model) is model
    assert_untouched(model, weights)


@pytest.mark.parametrize("name", PROJECTIONS)
def test_projections_are_found(name: str) -> None:
    layouts = find_value_layouts(models.family(name), where="test")
    found = layouts[max(layouts)]
    assert (found.value.name.split(".")[-1], found.output.name.split(".")[-1]) == PROJECTIONS[name]
    rules = ("columns", "rows") if name == "gpt2" else ("rows", "columns")
    assert (found.value.rule, found.output.rule) == rules


@pytest.mark.parametrize("name", ["llama", "qwen2", "phi3", "gpt_neox", "gpt2", "falcon"])
@pytest.mark.parametrize("head_dim", [64, 48])
def test_caches_hold_rotated_values(name: str, head_dim: int) -> None:
    own = models.LEFT_OUT if name == "falcon" else head_dim  # Falcon's follows from the others
    model = build(name, head_dim=own, hidden_size=4 * head_dim)
    before = cached(model)
    assert before[0][1].shape[-1] == head_dim
    rotate_values(model)
    for (key, value), (new_key, new_value) in zip(before, cached(model), strict=True):
        expected = reference.rotate(value)
        assert (new_value - expected).abs().max() < tolerances.projection_bound(expected, torch.float32)
        assert (new_key - key).abs().max() < tolerances.projection_bound(key, torch.float32)
    assert torch.equal(before[0][0], cached(model)[0][0]), "keys of the first layer"


@pytest.mark.parametrize("preset", ["int4-token", "int4-channel"])
def test_outlier_channels_of_values_do_less_harm(preset: str) -> None:
    model = build()
    with torch.no_grad():
        for layer in model.model.layers:
            attention, channels = layer.self_attn, torch.tensor([3, 40])
            for head in range(2):
                attention.v_proj.weight[head * models.HEAD_DIM + channels] *= 32
            for head in range(4):
                attention.o_proj.weight[:, head * models.HEAD_DIM + channels] /= 32
    before = compare(model, IDS[:1], {preset: preset})[0][preset].kld.mean()
    rotate_values(model)
    after = compare(model, IDS[:1], {preset: preset})[0][preset].kld.mean()
    assert after < before / 2


def test_the_layers_are_returned_and_others_are_left_alone() -> None:
    model = build("lfm2")
    weights = snapshot(model)
    assert rotate_values(model) == (1,)
    changed = {key.split(".")[2] for key, value in model.state_dict().items() if not torch.equal(value, weights[key])}
    assert changed == {"1"}


def test_the_mode_of_the_model_stays_and_a_patched_one_is_rotated_too() -> None:
    model = build()
    model.train()
    model.model.layers[0].eval()
    hf_kvquant.patch(model, "int4-token")
    rotate_values(model)
    assert model.config._attn_implementation == "hf_kvquant"
    assert model.training and not model.model.layers[0].training
    assert all(parameter.requires_grad for parameter in model.parameters())
    hf_kvquant.unpatch(model)


def test_a_saved_checkpoint_is_plain_and_known(tmp_path: Path) -> None:
    model = build("qwen2")
    rotate_values(model)
    models.save(model, tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(logits(loaded), logits(model))
    with pytest.raises(ValueError, match="`model` must not be rotated already, got one that is"):
        rotate_values(loaded)
    with pytest.raises(ValueError, match="must be rotated in this process, got a checkpoint that was rotated earlier"):
        unrotate_values(loaded)


# --- undoing ----------------------------------------------------------------------------------------------------------


def test_twice_is_refused_and_undoing_needs_a_rotation() -> None:
    model = build()
    with pytest.raises(ValueError, match=r"`model` must be rotated, got a LlamaForCausalLM that is not\. Call rotate_"):
        unrotate_values(model)
    rotate_values(model)
    with pytest.raises(ValueError, match="`model` must not be rotated already, got one that is"):
        rotate_values(model)
    twin = copy.deepcopy(model)
    unrotate_values(twin)
    assert_untouched(twin, snapshot(build()))
    assert value_rotation.is_rotated(model)


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.model.layers[1].self_attn.o_proj.weight.data.mul_(1.01),
        lambda model: model.model.layers[0].self_attn.v_proj.bias.data.add_(1),
        lambda model: model.to(torch.bfloat16),
        lambda model: model.model.layers[1].self_attn.o_proj.to("meta"),
    ],
    ids=["weight", "bias", "dtype", "offloaded"],
)
def test_changed_weights_are_not_undone(change: Callable[[Any], Any]) -> None:
    model = build("qwen2")
    rotate_values(model)
    change(model)
    weights = snapshot(model)
    with pytest.raises(ValueError, match="must have the weights that rotation left, got others: they were trained"):
        unrotate_values(model)
    assert all(value.is_meta or torch.equal(value, weights[name]) for name, value in model.state_dict().items())


def test_what_else_is_in_a_fused_projection_stays() -> None:
    model = build("phi3")
    weights = snapshot(model)
    rotate_values(model)
    fused = model.model.layers[0].self_attn.qkv_proj.weight
    with torch.no_grad():
        fused[:7] *= 2  # queries
    unrotate_values(model)
    expected = weights["model.layers.0.self_attn.qkv_proj.weight"].clone()
    expected[:7] *= 2
    assert torch.equal(fused, expected)


@pytest.mark.parametrize("name", ["llama", "phi3"])
@pytest.mark.parametrize("is_first", [True, False])
def test_smoothing_and_rotation_undo_each_other_in_turn(name: str, is_first: bool) -> None:
    def smooth() -> None:
        text = "The quick brown fox jumps over the lazy dog; 0123456789. " * 10
        hf_kvquant.smooth_attention(model, models.tokenizer(), [text], "int4-token", window=64, candidates=(1.0,))

    model = build(name)
    weights = snapshot(model)
    for step in (rotate_values, lambda model: smooth())[:: 1 if is_first else -1]:
        step(model)
    if name == "phi3" and not is_first:
        with pytest.raises(ValueError, match="must have the weights that smoothing left"):
            hf_kvquant.unsmooth(model)
    for undo in (hf_kvquant.unsmooth, unrotate_values)[:: 1 if is_first else -1]:
        undo(model)
    assert_untouched(model, weights)


# --- the check, and rolling back --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_wrong_layout_is_caught(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    def shifted(*args: Any, **kwargs: Any) -> Any:
        layouts = find_value_layouts(*args, **kwargs)
        layouts[1].output.index[0] = layouts[1].output.index[0].flip(0)  # one head of four
        return layouts

    monkeypatch.setattr(value_rotation, "find_value_layouts", shifted)
    model = build(dtype=dtype)
    message = r"must move the output of model\.layers\.1\.self_attn\.o_proj by no more than .* The weights are as they"
    assert_refused(model, RuntimeError, message)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_that_are_used_elsewhere_are_caught(dtype: torch.dtype) -> None:
    model = build(dtype=dtype)
    layer, seen = model.model.layers[1], []
    layer.self_attn.v_proj.register_forward_hook(lambda module, args, output: seen.append(output))
    layer.mlp.register_forward_hook(lambda module, args, output: output + 8 * seen[-1].relu())
    assert_refused(model, RuntimeError, "a rotation must move the logits by no more than")


class Lying(modeling_llama.LlamaAttention):
    """Attention that clips its values unless it is watched."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.config._attn_implementation == NAME:
            return super().forward(hidden_states, *args, **kwargs)
        hook = self.v_proj.register_forward_hook(lambda module, args, output: output.clamp(-1, 1))
        try:
            return super().forward(hidden_states, *args, **kwargs)
        finally:
            hook.remove()


def test_a_model_that_lies_is_caught() -> None:
    model = build()
    for layer in model.model.layers:
        layer.self_attn.__class__ = Lying
    assert_refused(model, RuntimeError, r"must move the output of model\.layers\.\d\.self_attn\.o_proj by no more than")


@pytest.mark.parametrize("error", [KeyboardInterrupt, torch.OutOfMemoryError])
def test_an_interruption_rolls_back(error: type[BaseException], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*args: Any) -> None:
        raise error

    model = build()
    weights = snapshot(model)
    monkeypatch.setattr(value_rotation, "_refuse_above", interrupt)
    with pytest.raises(error):
        rotate_values(model)
    assert_untouched(model, weights)


def test_numbers_that_are_none_are_caught() -> None:
    model = build()
    with torch.no_grad():
        model.model.layers[0].self_attn.o_proj.weight[0, 0] = torch.nan
    with pytest.raises(RuntimeError, match=r"by no more than .*, got inf"):
        rotate_values(model)


# --- mistakes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, options, message",
    [
        ("qwen3_next", {}, "in layer 1, attention's output is multiplied per channel before .*o_proj takes it, as"),
        ("gemma3n_text", {}, "must have keys of its own in every layer, got 2 layers of Gemma3nForCausalLM"),
        ("gemma3n_text", {"num_kv_shared_layers": 0}, r"values come from .*\.v_norm, which has no weights"),
        ("gemma4_text", {"num_kv_shared_layers": 0}, r"values come from .*\.v_norm, which has no weights"),
        ("olmo", {"clip_qkv": 8.0}, "in layer 0, its values are not a multiple of any module's output"),
        ("jetmoe", {}, "attention's output is not passed to one projection, channel by channel"),
        ("diffllama", {}, "must have an attention module for each layer"),
        ("bloom", {}, "must attend through transformers' registry"),
    ],
)
def test_models_that_cannot_be_rotated(name: str, options: dict[str, Any], message: str) -> None:
    assert_refused(build(name, **options), NotImplementedError, f"^rotate_values: .*{message}")


def test_what_is_no_decoder_is_refused() -> None:
    with pytest.raises(TypeError, match=r"^rotate_values: `model` must be a transformers PreTrainedModel, got Linear"):
        rotate_values(nn.Linear(2, 2))  # type: ignore[arg-type]
    with pytest.raises(
        TypeError, match=r"^unrotate_values: `model` must be a transformers PreTrainedModel, got Linear"
    ):
        unrotate_values(nn.Linear(2, 2))  # type: ignore[arg-type]
    with pytest.raises(NotImplementedError, match="must be a decoder that keeps keys and values in a cache"):
        rotate_values(models.bart())


def test_a_latent_cache_is_refused() -> None:
    model = build()
    model.config.kv_lora_rank, model.config.qk_rope_head_dim = 16, 8
    assert_refused(model, NotImplementedError, r"which keeps latents \(MLA\)")


def test_an_odd_head_dim_is_refused() -> None:
    message = "must have values of an even head_dim, got 15 in layer 0, which no power of two divides"
    assert_refused(build("gpt2", hidden_size=60), ValueError, message)


def test_a_model_without_quantised_layers_is_refused() -> None:
    model = build("llama4_text", layer_types=["chunked_attention"] * 2)
    assert_refused(model, NotImplementedError, "must have a layer whose cache is quantised, got Llama4ForCausalLM")


class Scale(nn.Module):
    """A factor per channel."""

    def __init__(self, num_features: int) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.linspace(0.9, 1.1, num_features))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


class Repeat(nn.Module):
    """The first channels instead of others."""

    def forward(self, x: Tensor) -> Tensor:
        return x[..., :32].repeat(1, 1, 4)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "side, wrap, message",
    [
        ("v_proj", lambda x: nn.Sequential(x, Scale(128)), r"values are multiplied per channel after .*v_proj\.0"),
        (
            "v_proj",
            lambda x: nn.Sequential(x, nn.RMSNorm(128)),
            r"its values come from .*v_proj\.1, a norm",
        ),
        (
            "v_proj",
            lambda x: nn.Sequential(x, Repeat()),
            r"one feature of .*v_proj\.0 makes several channels of values",
        ),
        ("o_proj", lambda x: nn.Sequential(Scale(256), x), r"per channel before .*o_proj\.1 takes it, as by a gate"),
        ("o_proj", lambda x: nn.Sequential(nn.RMSNorm(256), x), r"output goes through .*o_proj\.0 \(RMSNorm\)"),
    ],
)
def test_what_stands_in_between_is_refused(
    side: str, wrap: Callable[[nn.Module], nn.Module], message: str, dtype: torch.dtype
) -> None:
    model = build()
    attention = model.model.layers[1].self_attn
    setattr(attention, side, wrap(getattr(attention, side)))
    assert_refused(model.to(dtype), NotImplementedError, f"in layer 1, .*{message}")


def test_values_from_the_weights_of_keys_are_refused() -> None:
    model = build()
    for layer in model.model.layers:
        layer.self_attn.__class__ = OneProjection
    assert_refused(model, NotImplementedError, "keys or queries come from the same weights as values")


@pytest.mark.parametrize("side", ["v_proj", "o_proj"])
def test_shared_weights_are_refused(side: str) -> None:
    model = build()
    first, second = (getattr(layer.self_attn, side) for layer in model.model.layers)
    second.weight = first.weight
    message = rf"must not share the weights behind values and attention's output, got one tensor for .*\.{side}\.weight"
    assert_refused(model, NotImplementedError, message)


@pytest.mark.parametrize("side", ["v_proj", "o_proj"])
@pytest.mark.parametrize(
    "wrap, message",
    [
        (EightBits, r"behind values and attention's output, got EightBits with int8 Parameter at .*\. Rotate the unqu"),
        (Adapter, r"must have no adapters on values and attention's output, got Adapter at .*\. Merge them first"),
    ],
)
def test_weights_that_cannot_be_edited_are_refused(side: str, wrap: Any, message: str) -> None:
    model = build()
    attention = model.model.layers[1].self_attn
    setattr(attention, side, wrap(getattr(attention, side)))
    assert_refused(model, NotImplementedError, message)


def test_offloaded_weights_are_refused() -> None:
    model = build()
    model.model.layers[1].mlp.to("meta")
    assert_refused(model, NotImplementedError, "must be in memory, got 3 offloaded weights")
