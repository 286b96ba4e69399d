"""Smoothing factors from random tokens: which heads get some, what they are worth, and when nobody looks for them."""

from __future__ import annotations

import copy
import logging
from typing import Any

import models
import pytest
import torch
from models import greedy, left_padded, logits

import hf_kvquant
from hf_kvquant import KVQuantCache, key_transforms, patched
from hf_kvquant.models.probing import forward
from hf_kvquant.spec.key_transform import KeyTransform
from hf_kvquant.transforms import of_model
from hf_kvquant.transforms.balancing import balancing_factors
from hf_kvquant.upstream.releases import cache_of
from hf_kvquant_evals.injection import inject_key_outliers

FACTOR = 32.0


def with_outliers(name: str = "llama") -> tuple[Any, dict[int, torch.Tensor]]:
    """A model that computes the same with large key channels, and by how much each channel has grown."""
    model = copy.deepcopy(models.family(name))
    return model, inject_key_outliers(model, 2, FACTOR)


@pytest.mark.parametrize("name", ["llama", "qwen2", "gpt_neox"])
def test_models_without_outliers_get_no_factors(name: str) -> None:
    model = models.family(name)
    assert balancing_factors(model) == {}
    assert all(transform.smoothing is None for transform in key_transforms(model, "int4-token").values())


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_outliers_get_what_they_have_grown_by(name: str) -> None:
    """... within an octave: random tokens measure channels roughly."""
    model, grown = with_outliers(name)
    found = balancing_factors(model)
    assert found.keys() == grown.keys()
    for index, factors in found.items():
        assert factors.shape == grown[index].shape and factors.dtype == torch.float32
        assert torch.equal(factors.log2().round(), factors.log2()), "powers of two"
        relative = (factors / grown[index]).log2()
        assert (relative - relative.median(-1, keepdim=True).values).abs().max() <= 1.0


@pytest.mark.parametrize("preset", ["int8", "int4-token", "int4-channel"])
def test_factors_undo_most_of_what_outliers_cost(preset: str) -> None:
    """A short forward behind a prompt, over codes: the distance to the logits of the unquantised model."""
    model, _ = with_outliers()
    tokens = torch.randint(5, models.VOCAB_SIZE, (2, 300), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        exact = forward(model, tokens)[:, 290:]

    @torch.no_grad()
    def error(transforms: dict[int, KeyTransform]) -> float:
        cache = KVQuantCache(model.config, preset, key_transforms=transforms)
        with patched(model, preset):
            forward(model, tokens[:, :290], cache=cache)
            return float((forward(model, tokens[:, 290:], cache=cache) - exact).square().mean())

    plain = of_model.given_transforms(model, preset)
    assert error(key_transforms(model, preset)) < 0.35 * error(plain)


def test_generate_uses_them_and_logits_without_codes_stay() -> None:
    model, _ = with_outliers()
    with patched(model, "int4-token"):
        cache = cache_of(greedy(model, left_padded()))
    assert [storage.key_transform.describe() for storage in cache.storages] == ["smooth+rotate"] * 2
    exact = greedy(model, left_padded())
    with patched(model, {"preset": "int4-token", "residual_length": 64}):
        dense = greedy(model, left_padded())
    assert torch.equal(dense.sequences, exact.sequences)
    assert torch.allclose(logits(dense), logits(exact), atol=1e-4)


def test_nobody_looks_where_factors_have_no_part(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = with_outliers()
    calls: list[Any] = []
    monkeypatch.setattr(of_model, "balancing_factors", lambda given: calls.append(given) or balancing_factors(given))
    for config in ("fp8", "none", {"preset": "int4-token", "transforms": ["rotate"]}, {"transforms": ["smooth"]}):
        assert all(transform.smoothing is None for transform in key_transforms(model, config).values())
    biased, _ = with_outliers("qwen2")
    found = key_transforms(biased, {"preset": "int4-token", "transforms": ["center", "smooth"]})
    assert {transform.describe() for transform in found.values()} == {"center"}, "outliers stay in their channels"
    assert not calls
    of_model.set_smoothing(model, {0: torch.full((2, models.HEAD_DIM), 2.0)})
    assert [transform.describe() for transform in key_transforms(model, "int4-token").values()] == [
        "smooth+rotate",
        "rotate",
    ]
    assert not calls, "what was set goes first, as a whole"
    of_model.set_smoothing(model, {})
    key_transforms(model, "int4-token"), key_transforms(model, "int8")
    assert len(calls) == 1


def test_calibration_starts_without_them_and_replaces_them() -> None:
    model, _ = with_outliers()
    assert any(transform.smoothing is not None for transform in key_transforms(model, "int4-token").values())
    texts = [40 * models.SENTENCE]
    hf_kvquant.smooth_attention(
        model, models.tokenizer(), texts, "int4-token", num_tokens=512, window=64, progress=False
    )
    assert all(transform.smoothing is None for transform in key_transforms(model, "int4-token").values())


def test_a_model_that_cannot_be_looked_at_is_said_in_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model, _ = with_outliers()

    def refuse(given: Any) -> Any:
        raise TypeError("forward() needs an image")

    monkeypatch.setattr(of_model, "balancing_factors", refuse)
    with caplog.at_level(logging.WARNING, "hf_kvquant"):
        assert all(transform.smoothing is None for transform in key_transforms(model, "int4-token").values())
        key_transforms(model, "int4-token")
    (record,) = caplog.records
    assert record.getMessage() == (
        "key_transforms: the keys of LlamaForCausalLM could not be looked at, so outlier channels are not smoothed "
        "(TypeError: forward() needs an image). Correct, less accurate. Calibrate with hf_kvquant.smooth_attention."
    )


@pytest.mark.parametrize("positions", [3, 4, 5, 6])
def test_contexts_of_few_tokens_have_none(positions: int) -> None:
    assert balancing_factors(models.build("gpt2", n_positions=positions)) == {}


def test_encoder_decoders_have_none() -> None:
    assert balancing_factors(models.bart()) == {}
