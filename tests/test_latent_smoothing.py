"""SmoothAttention over latents (MLA): the gains of their norm and the columns that read them are evened out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import models
import pytest
import torch
from models import stretch
from test_smoothing import TEXT, assert_weights, logits, smooth, snapshot
from torch import nn

from hf_kvquant import KVQuantCache, load_smoothing, patched, unsmooth
from hf_kvquant.models.latent import latent_attentions
from hf_kvquant.upstream.releases import with_cache


def build(name: str = "deepseek_v3", dtype: torch.dtype = torch.float32) -> Any:
    family = models.FAMILIES[name]
    return stretch(models.build(family.model_type, dtype, None, **family.options))


def wrong_by(model: Any, preset: str) -> float:
    """How far a cache's codes take logits from those of a cache without codes, over tokens that read them."""
    found = []
    for config in ("none", preset):
        with patched(model, config), torch.no_grad():
            cache = KVQuantCache(model.config, config)
            ids = models.tokenizer()(TEXT[:80], return_tensors="pt").input_ids
            model(ids[:, :60], **with_cache(cache))
            found.append(model(ids[:, 60:], **with_cache(cache)).logits)
    return float((found[0] - found[1]).norm())


@pytest.mark.full(
    when=lambda name, dtype: dtype == torch.bfloat16 and name not in ("minicpm3", "deepseek_v3"),
    reason="factors are folded by one rule into the latents of all families",
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", models.WITH_LATENTS)
def test_no_bit_changes_and_errors_fall(name: str, dtype: torch.dtype) -> None:
    model = build(name, dtype)
    weights, before = snapshot(model), logits(model)
    result = smooth(model, "int4")
    assert torch.equal(logits(model), before)
    assert len(result.layers) == len(list(latent_attentions(model)))
    for layer in result.layers:
        assert layer.placement == "weights" and layer.center is None
        assert layer.error_after < layer.error_before / 2, layer.layer_idx
    unsmooth(model)
    assert_weights(model, weights)


@pytest.mark.parametrize("preset", ["int8", "int4"])
def test_logits_over_codes_are_closer(preset: str) -> None:
    model = build()
    before = wrong_by(model, preset)
    smooth(model, preset)
    assert wrong_by(model, preset) < before / 2


def test_even_channels_stay_as_they_are() -> None:
    model = models.build("deepseek_v3", **models.FAMILIES["deepseek_v3"].options)
    weights = snapshot(model)
    result = smooth(model, "int4")
    assert result.num_smoothed == 0 and not result.centers()
    assert_weights(model, weights)


def test_a_file_gives_the_same_weights(tmp_path: Path) -> None:
    model = build()
    smooth(model, "int4").save(tmp_path / "factors.safetensors")
    other = build()
    load_smoothing(other, tmp_path / "factors.safetensors")
    assert_weights(other, snapshot(model))
    unsmooth(other)
    assert_weights(other, snapshot(build()))


def test_what_cannot_be_calibrated_is_refused() -> None:
    model = build()
    weights = snapshot(model)
    with pytest.raises(NotImplementedError) as raised:
        smooth(model, "int4", mode="online")
    assert str(raised.value) == (
        "smooth_attention: `mode` must be 'auto' or 'fold' for DeepseekV3ForCausalLM, got 'online': it keeps latents "
        "(MLA), whose factors caches do not apply."
    )
    for module in latent_attentions(model):
        projection = nn.Linear(module.kv_lora_rank, module.kv_b_proj.out_features)
        projection.weight = module.kv_b_proj.weight
        module.kv_b_proj = projection
    start = "smooth_attention: `model` must have a layer whose latents can be calibrated, got DeepseekV3ForCausalLM "
    ends = {
        "int4": "its kv_b_proj has a bias",
        "none": "its latents are not quantised",
    }
    for preset, reason in ends.items():
        with pytest.raises(NotImplementedError) as raised:
            smooth(model, preset)
        assert str(raised.value) == f"{start}with none ({reason}). Leave it as it is."
    with pytest.raises(NotImplementedError) as raised:
        smooth(build(), "int4", factors=False)
    assert str(raised.value).endswith("with none (factors=False leaves nothing to calibrate). Leave it as it is.")
    assert_weights(model, weights | {name: value for name, value in snapshot(model).items() if name not in weights})
