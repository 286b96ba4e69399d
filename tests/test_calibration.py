"""Calibration as a whole: centres and factors together, in weights or in caches, and what a file brings back.

Where factors go in each family and that folding them changes no bit is in `test_smoothing.py`; what caches do with
centres and factors, in `test_transforms.py`. Here: which of both a model gets, that nothing acts twice, that a model
whose weights cannot be edited is served by its caches, and that a file gives another process the very same cache.
"""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from accelerate import cpu_offload, disk_offload
from programs import Program, finish
from test_smoothing import (
    FACTOR,
    OTHER,
    Adapter,
    EightBits,
    assert_untouched,
    build,
    logits,
    smooth,
    snapshot,
    with_outliers,
)
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

import hf_kvquant
from hf_kvquant import KVQuantCache, key_transforms, load_smoothing, smooth_attention, unsmooth
from hf_kvquant.calibration import folding, search, smoothing, targets
from hf_kvquant.calibration.layout import find_layouts
from hf_kvquant.calibration.targets import find_keys
from hf_kvquant.transforms import of_model
from hf_kvquant.upstream.releases import with_cache
from hf_kvquant_evals.injection import inject_key_bias, inject_key_outliers
from hf_kvquant_evals.measuring.fidelity import compare


def planes(model: Any, preset: Any = "int4-token") -> list[Tensor]:
    """Everything that a quantised cache of a model holds of a text."""
    cache = KVQuantCache(model.config, preset, key_transforms=key_transforms(model, preset))
    with hf_kvquant.patched(model, preset), torch.no_grad():
        model(models.tokenizer()(OTHER, return_tensors="pt").input_ids, **with_cache(cache))
    return [
        plane[:, :, : storage.length] if number == 0 else plane[..., : storage.length]
        for storage in cache.storages
        for side in storage.planes
        for number, plane in enumerate(side.tensors())
    ]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    """Whether two caches hold the same."""
    return len(one) == len(other) and all(map(torch.equal, one, other))


# What calibration finds in place: without it, outliers would be smoothed by what random tokens show (`balancing.py`).
PLAIN = {"preset": "int4-token", "transforms": ["center", "rotate"]}


def divergence(model: Any, preset: Any = "int4-token") -> float:
    """Mean KL divergence from the unquantised cache."""
    ids = models.tokenizer()(OTHER, return_tensors="pt").input_ids
    return float(compare(model, ids, {"it": preset}, chunk_size=8)[0]["it"].kld.mean())


# --- what is calibrated -----------------------------------------------------------------------------------------------


def test_centres_and_factors_come_in_one_go() -> None:
    model = with_outliers("qwen2")
    before, attributes = divergence(model, PLAIN), set(model.__dict__)
    result = smooth(model)
    assert [layer.placement for layer in result.layers] == ["weights", "weights"]
    centers = of_model.transforms_of(model).centers
    assert centers is not None
    for layer in result.layers:
        assert layer.center is not None and layer.choice != "0.0"
        assert torch.equal(centers[layer.layer_idx], layer.center / layer.factor)
    # Folded factors are nobody else's.
    assert of_model.transforms_of(model).smoothing == {}
    assert {transform.describe() for transform in key_transforms(model, "int4-token").values()} == {"center+rotate"}
    assert divergence(model) < 0.6 * before
    unsmooth(model)
    assert divergence(model, PLAIN) == before
    assert set(model.__dict__) == attributes


def test_either_can_be_left_out() -> None:
    model = with_outliers("qwen2")
    weights = snapshot(model)
    result = smooth(model, factors=False)
    assert [layer.placement for layer in result.layers] == ["none", "none"] and result.factors() == {}
    assert result.centers().keys() == {0, 1} and result.num_smoothed == 0
    assert "No factors were calibrated." in result.report()
    for index, center in result.centers().items():
        assert torch.equal(key_transforms(model, "int4-token")[index].center, center)  # type: ignore[arg-type]
    assert smoothing.CONFIG_KEY not in model.config.to_dict()
    unsmooth(model)
    assert_untouched(model, weights)

    of_bias = {index: transform.center for index, transform in key_transforms(model, "int4-token").items()}
    result = smooth(model, centers=False)
    assert result.centers() == {} and result.num_smoothed == 2
    # The biases are divided, and so are centres, which are those of the biases still.
    for index, transform in key_transforms(model, "int4-token").items():
        torch.testing.assert_close(transform.center, of_bias[index] / result.factors()[index])
    with pytest.raises(ValueError, match="`centers` or `factors` must be True, got neither"):
        smooth(build("llama"), centers=False, factors=False)


def test_layers_get_what_their_transforms_name() -> None:
    config = {"preset": "int4-token", "layers": {0: {"preset": "int4-token", "transforms": ["center"]}}}
    result = smooth(with_outliers("qwen2"), config)
    first, second = result.layers
    assert (first.placement, second.placement) == ("none", "weights")
    assert first.center is not None and second.center is not None
    config = {"preset": "int4-token", "layers": {0: {"preset": "int4-token", "transforms": ["rotate"]}}}
    result = smooth(with_outliers("qwen2"), config)
    assert [layer.layer_idx for layer in result.layers] == [1]
    assert result.left_out == {0: "its transforms are ['rotate'], which need no calibration"}
    # A model whose weights would be refused is none where no factors are asked for.
    model = build("llama")
    model.model.layers[0].self_attn.k_proj = EightBits(model.model.layers[0].self_attn.k_proj)
    result = smooth(model, {"preset": "int4-token", "transforms": ["center", "rotate"]})
    assert [layer.placement for layer in result.layers] == ["none", "none"] and result.centers()


def test_given_centres_are_divided_and_multiplied_with_the_keys() -> None:
    model = with_outliers("llama")
    given = {index: torch.randn(2, models.HEAD_DIM) for index in range(2)}
    of_model.set_centers(model, given)
    plain = planes(model)
    result = smooth(model, centers=False)
    for index, center in of_model.transforms_of(model).centers.items():  # type: ignore[union-attr]
        assert torch.equal(center, given[index] / result.factors()[index])
    later = {index: torch.randn(2, models.HEAD_DIM) for index in range(2)}
    unsmooth(model)
    assert same(planes(model), plain)
    smooth(model, centers=False)
    of_model.set_centers(model, later)
    unsmooth(model)
    for index, center in of_model.transforms_of(model).centers.items():  # type: ignore[union-attr]
        assert torch.equal(center, later[index] * result.factors()[index])


def test_a_centre_that_is_worse_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("qwen2")
    inject_key_bias(model, 100.0)
    of_bias = {index: transform.center for index, transform in key_transforms(model, "int4-token").items()}
    collect = search.collect

    def wrong(*args: Any) -> Any:
        found = collect(*args)
        for seen in found.values():
            seen.mean = seen.mean + 1000.0
        return found

    monkeypatch.setattr(search, "collect", wrong)
    for layer in smooth(model).layers:
        assert layer.choice == "0.0" and layer.error_after == layer.error_before
        torch.testing.assert_close(layer.center, of_bias[layer.layer_idx])


def test_a_large_key_bias_and_outliers_do_no_harm_together() -> None:
    plain = build("llama", attention_bias=True)
    smooth(plain)
    hard = build("llama", attention_bias=True)
    inject_key_bias(hard, 100.0)
    inject_key_outliers(hard, 2, FACTOR)
    assert divergence(hard, PLAIN) > 2 * divergence(plain)
    smooth(hard)
    assert divergence(hard) < 1.3 * divergence(plain)


@pytest.mark.parametrize("mode", ["fold", "online"])
def test_keys_with_channel_scales_are_calibrated(mode: Any) -> None:
    """Rotated ones: their errors are those of whole blocks, and keys behind these stay as they are."""
    model = build("llama", max_position_embeddings=512)
    inject_key_outliers(model, 2, FACTOR)
    plain = {"preset": "int4-channel", "transforms": ["rotate"]}
    texts = [40 * models.SENTENCE]
    ids = models.tokenizer()(texts[0], return_tensors="pt").input_ids[:, :400]

    def diverges(config: Any) -> float:
        return float(compare(model, ids, {"it": config}, chunk_size=100)[0]["it"].kld.mean())

    before = diverges(plain)
    result = smooth_attention(
        model, models.tokenizer(), texts, "int4-channel", mode=mode, num_tokens=1200, window=300, progress=False
    )
    assert result.num_smoothed == 2 and all(layer.error_after < layer.error_before for layer in result.layers)
    assert diverges("int4-channel") < 0.6 * before


def test_channel_scales_need_windows_of_a_block() -> None:
    model = build("llama", max_position_embeddings=512)
    message = (
        "smooth_attention: `window` and the texts must have at least 128 tokens for keys whose channels share a scale "
        "over so many, got windows of 100. Take longer ones."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        smooth_attention(
            model, models.tokenizer(), [40 * models.SENTENCE], "int4-channel", mode="fold", window=100, progress=False
        )


# --- factors that caches apply ----------------------------------------------------------------------------------------


# Codes alone: dense keys are those of the model, which have the factors only where its weights do.
@pytest.mark.parametrize("preset", ["int4-token", models.INT8_CODES], ids=["int4-token", "int8"])
def test_caches_hold_the_same_whoever_applies_the_factors(preset: Any) -> None:
    folded = with_outliers("qwen2")
    result = smooth(folded, preset)
    online = with_outliers("qwen2")
    weights = snapshot(online)
    plain = planes(online, preset)
    of_model.set_centers(online, result.centers())
    of_model.set_smoothing(online, result.factors())
    assert same(planes(online, preset), planes(folded, preset))
    assert not same(planes(online, preset), plain)
    assert_untouched(online, weights)


def test_online_factors_change_no_weight() -> None:
    model = with_outliers()
    weights, before, diverged = snapshot(model), logits(model), divergence(model, PLAIN)
    result = smooth(model, mode="online")
    assert [layer.placement for layer in result.layers] == ["caches", "caches"] and result.num_smoothed == 2
    assert "2 of 2 layers have factors" in result.report()
    assert result.describe_placement() == "Factors are applied by the caches of layers 0, 1."
    assert torch.equal(logits(model), before)
    # Nothing is in the weights, so a saved checkpoint has no mark; but the model knows.
    assert smoothing.CONFIG_KEY not in model.config.to_dict()
    assert smoothing.is_smoothed(model)
    for name, value in model.state_dict().items():
        assert torch.equal(value, weights[name])
    assert {transform.describe() for transform in key_transforms(model, "int4-token").values()} == {
        "center+smooth+rotate"
    }
    assert divergence(model) < 0.6 * diverged
    for wanted in ({}, {"mode": "online"}):
        with pytest.raises(ValueError, match="must not be smoothed already, got one that is"):
            smooth(model, **wanted)
    unsmooth(model)
    assert_untouched(model, weights)
    assert divergence(model, PLAIN) == diverged


def test_online_factors_are_not_tied() -> None:
    model = build("llama")
    inject_key_outliers(model, 2, FACTOR)
    result = smooth(model, mode="online", candidates=(1.0,), centers=False)
    half = models.HEAD_DIM // 2
    assert any(bool((layer.factor[:, :half] != layer.factor[:, half:]).any()) for layer in result.layers)
    assert all(bool((torch.frexp(layer.factor)[0] == 0.5).all()) for layer in result.layers)


def test_factors_given_by_hand_are_not_applied_twice() -> None:
    model = with_outliers()
    of_model.set_smoothing(model, {0: torch.full((2, models.HEAD_DIM), 2.0)})
    with pytest.raises(ValueError, match="got one with factors that its caches apply"):
        smooth(model)


def unfoldable(kind: str) -> Any:
    """A model with outliers, one of whose layers has weights that cannot be edited."""
    model = with_outliers()
    attention = model.model.layers[1].self_attn
    if kind == "quantised":
        attention.k_proj = EightBits(attention.k_proj)
    elif kind == "adapter":
        attention.q_proj = Adapter(attention.q_proj)
    elif kind == "offloaded":
        cpu_offload(model, torch.device("cpu"))
    else:
        attention.k_proj.weight = model.model.layers[0].self_attn.k_proj.weight
    return model


@pytest.mark.parametrize("kind", ["quantised", "adapter", "offloaded", "shared"])
def test_weights_that_cannot_be_edited(kind: str, caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    model = unfoldable(kind)
    before = divergence(model, PLAIN)
    with pytest.raises(NotImplementedError, match=r"Or use mode='online', where caches apply the factors\.$"):
        smooth(model)
    with caplog.at_level(logging.WARNING, "hf_kvquant"):
        result = smooth(model, mode="auto")
    (record,) = caplog.records
    assert record.getMessage().startswith("smooth_attention: `model` must ")
    assert record.getMessage().endswith("Factors are applied by caches instead.")
    assert [layer.placement for layer in result.layers] == ["caches", "caches"] and result.num_smoothed > 0
    assert divergence(model) < 0.8 * before
    result.save(tmp_path / "factors")
    held = planes(model)
    twin = unfoldable(kind)
    load_smoothing(twin, tmp_path / "factors")
    assert same(planes(twin), held)
    unsmooth(model)
    assert divergence(model, PLAIN) == before


@pytest.mark.parametrize(
    "offload",
    [lambda model, folder: cpu_offload(model, torch.device("cpu")), disk_offload],
    ids=["to memory", "to disk"],
)
def test_a_checkpoint_is_known_again_when_it_is_offloaded(offload: Callable[..., Any], tmp_path: Path) -> None:
    model, away, trained = with_outliers(), with_outliers(), with_outliers()
    smooth(model, mode="online").save(tmp_path / "factors")
    load_smoothing(offload(away, tmp_path / "away"), tmp_path / "factors")
    assert same(planes(away), planes(model))
    unsmooth(away)
    smooth(away, mode="online").save(tmp_path / "factors of an offloaded model")
    load_smoothing(with_outliers(), tmp_path / "factors of an offloaded model")
    with torch.no_grad():
        trained.model.layers[1].self_attn.k_proj.weight[0, 0] += 1e-3
    with pytest.raises(ValueError, match="whose hashes before and after folding both differ from that of the model's"):
        load_smoothing(offload(trained, tmp_path / "trained"), tmp_path / "factors")


@pytest.mark.parametrize("name", ["llama4_text", "gemma3n_text", "diffllama", "olmo", "falcon"])
def test_families_whose_keys_cannot_be_scaled(name: str) -> None:
    model = build("olmo", clip_qkv=8.0) if name == "olmo" else copy.deepcopy(models.family(name))
    weights = snapshot(model)
    result = smooth(model, mode="online")
    assert {layer.placement for layer in result.layers} == {"caches"}
    assert all(layer.error_after <= layer.error_before for layer in result.layers)
    planes(model)
    unsmooth(model)
    assert_untouched(model, weights)


@pytest.mark.parametrize("name", ["bloom", "jetmoe"])
def test_families_that_cannot_be_calibrated(name: str) -> None:
    for mode in ("online", "auto"):
        with pytest.raises(NotImplementedError, match=r"^smooth_attention: `model` must .* Leave it as it is\.$"):
            smooth(copy.deepcopy(models.family(name)), mode=mode)


def test_auto_folds_where_it_can(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    with caplog.at_level(logging.WARNING, "hf_kvquant"):
        result = smooth(with_outliers(), mode="auto")
    assert [layer.placement for layer in result.layers] == ["weights", "weights"] and not caplog.records

    def without_the_second(*args: Any, **kwargs: Any) -> Any:
        layouts, left_out = find_layouts(*args, **kwargs)
        del layouts[1]
        return layouts, {**left_out, 1: "keys come from a black box"}

    monkeypatch.setattr(targets, "find_layouts", without_the_second)
    model = with_outliers()
    weights, before = snapshot(model), logits(model)
    with caplog.at_level(logging.WARNING, "hf_kvquant"):
        result = smooth(model, mode="auto")
    assert [layer.placement for layer in result.layers] == ["weights", "caches"] and result.num_smoothed == 2
    assert "Factors are folded into the weights of layer 0 and applied by the caches of layer 1." in result.report()
    assert caplog.messages == [
        "smooth_attention: factors cannot be folded in layers 1 (keys come from a black box). They are applied by "
        "caches instead."
    ]
    assert torch.equal(logits(model), before)
    assert list(of_model.transforms_of(model).smoothing) == [1]
    unsmooth(model)
    assert_untouched(model, weights)


def test_auto_falls_back_where_the_proof_fails(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def different(model: Any, input_ids: Tensor) -> Tensor:
        return torch.randn(3)

    monkeypatch.setattr(folding, "check_logits", different)
    model = with_outliers()
    weights = snapshot(model)
    with caplog.at_level(logging.WARNING, "hf_kvquant"):
        result = smooth(model, mode="auto")
    assert [layer.placement for layer in result.layers] == ["caches", "caches"]
    assert "factors must leave the logits as they are" in caplog.messages[0]
    for name, value in model.state_dict().items():
        assert torch.equal(value, weights[name])


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(ValueError, match=r"`mode` must be one of \['fold', 'online', 'auto'\], got 'onlin'\. Did you"):
        smooth(build("llama"), mode="onlin")


def test_keys_are_those_of_the_cache() -> None:
    keys, left_out = find_keys(models.family("gemma2"), where="test")
    assert list(keys) == [0, 1] and not left_out, "also where a window has passed over some of them"
    keys, left_out = find_keys(models.family("llama4_text"), where="test")
    assert list(keys) == [1] and left_out == {0: "its cache (chunked_attention) is not quantised"}
    keys, _ = find_keys(models.family("gemma2"), where="test")
    assert (keys[1].num_kv_heads, keys[1].head_dim) == (2, models.HEAD_DIM)
    assert keys[1].name == "model.layers.1.self_attn"


# --- files ------------------------------------------------------------------------------------------------------------

READ = """
import sys, torch
from transformers import AutoModelForCausalLM
import hf_kvquant
from test_calibration import logits, planes
for folder in sys.argv[1:]:
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    hf_kvquant.load_smoothing(model, folder + "/factors")
    torch.save((logits(model), planes(model)), folder + "/read")
"""


def test_another_process_gets_the_same_cache(tmp_path: Path) -> None:
    """One process for both modes: it is slow to start."""
    written = {}
    for mode in ("fold", "online"):
        model = written[tmp_path / mode] = with_outliers("qwen2")
        result = smooth(model, mode=mode)
        model.save_pretrained(tmp_path / mode)
        result.save(tmp_path / mode / "factors")
    (tmp_path / "script.py").write_text(READ, encoding="utf-8")
    finish(Program(str(tmp_path / "script.py"), *map(str, written)))
    for folder, model in written.items():
        read_logits, read_planes = torch.load(folder / "read")
        assert torch.equal(read_logits, logits(model)), folder.name
        assert same(read_planes, planes(model)), folder.name


def test_the_original_checkpoint_takes_a_file_too(tmp_path: Path) -> None:
    original = with_outliers("qwen2")
    weights = snapshot(original)
    model = copy.deepcopy(original)
    result = smooth(model)
    result.save(tmp_path / "factors")
    load_smoothing(original, tmp_path / "factors")
    assert same(planes(original), planes(model))
    unsmooth(original)
    assert_untouched(original, weights)


def test_a_folded_checkpoint_without_its_centres_still_has_those_of_its_biases(tmp_path: Path) -> None:
    model = with_outliers("qwen2")
    smooth(model).save(tmp_path / "factors")
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert {transform.describe() for transform in key_transforms(loaded, "int4-token").values()} == {"center+rotate"}
    of_bias = planes(loaded)
    load_smoothing(loaded, tmp_path / "factors")
    assert same(planes(loaded), planes(model)) and not same(planes(loaded), of_bias)


def test_a_file_with_nothing_for_the_weights_is_tied_to_them(tmp_path: Path) -> None:
    model = with_outliers()
    smooth(model, mode="online").save(tmp_path / "factors")
    twin = with_outliers()
    with torch.no_grad():
        twin.model.layers[0].self_attn.k_proj.weight[0, 0] += 1
    weights = snapshot(twin)
    for other in (twin, with_outliers("qwen2"), with_outliers(num_hidden_layers=1)):
        with pytest.raises(ValueError, match=r"must hold factors of this model, got .*factors, whose "):
            load_smoothing(other, tmp_path / "factors")
    assert_untouched(twin, weights)
    loaded = with_outliers()
    load_smoothing(loaded, tmp_path / "factors")
    with pytest.raises(ValueError, match="load_smoothing: `model` must not have factors yet"):
        load_smoothing(loaded, tmp_path / "factors")


@pytest.mark.parametrize("where", ["tensors", "facts"])
def test_a_changed_number_in_a_file_is_noticed(where: str, tmp_path: Path) -> None:
    model = with_outliers()
    path = tmp_path / "factors"
    smooth(model, mode="online").save(path)
    whole = bytearray(path.read_bytes())
    at = len(whole) - 3 if where == "tensors" else whole.index(b"num_tokens") + 14
    whole[at] ^= 1
    path.write_bytes(whole)
    fresh = with_outliers()
    with pytest.raises(
        ValueError, match=r"which is damaged \(its hash is not that of what it holds\)\. Calibrate again"
    ):
        load_smoothing(fresh, path)
    assert of_model.transforms_of(fresh) == of_model.ModelTransforms()


def test_adapters_count_as_weights() -> None:
    model = unfoldable("adapter")
    result = smooth(model, mode="online")
    assert any("lora_A" in name for name in result.parameters)
    with torch.no_grad():
        model.model.layers[1].self_attn.q_proj.lora_A.weight.add_(1)
    unsmooth(model)  # nothing of it is in the weights, so they may change
    assert isinstance(model.model.layers[1].self_attn.q_proj, nn.Module)
