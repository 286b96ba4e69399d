"""Divergence by position and layer by layer, and magnitudes of keys: that they are what their names say."""

from __future__ import annotations

from typing import Any

import models
import pytest
import torch

from hf_kvquant import KVQuantConfig, smooth_attention
from hf_kvquant.calibration.smoothing import CONFIG_KEY
from hf_kvquant.models.hashes import hash_of
from hf_kvquant.models.latent import latent_attentions
from hf_kvquant_evals.injection import inject_key_outliers
from hf_kvquant_evals.perplexity import perplexity_results, perplexity_run
from hf_kvquant_evals.perplexity.segments import Segments
from hf_kvquant_evals.preparation import Subject
from hf_kvquant_evals.records import RunRecord

TEXT = 30 * models.SENTENCE


@pytest.fixture
def model() -> Any:
    """With outliers in its keys."""
    built = models.build("llama")
    inject_key_outliers(built, factor=8.0)
    return built


def tokenizer() -> Any:
    return models.tokenizer(model_max_length=128)


def ids(tokens: int = 64) -> torch.Tensor:
    return tokenizer()(TEXT, return_tensors="pt").input_ids[:, :tokens]


def test_by_position() -> None:
    """A window's last token is only predicted; of one that overlaps, what is new stands at its end."""
    kld = torch.arange(1, 31, dtype=torch.float64)  # positions 1 to 30 of 32
    found = perplexity_results.by_position([kld, torch.full((2,), 100.0, dtype=torch.float64)], 32)
    assert found["begin"] == list(range(0, 32, 2))
    assert found["kld"][:2] == [1.0, 2.5] and found["kld"][-2:] == [(28 + 29 + 100) / 3, (30 + 100) / 2]
    assert perplexity_results.by_position([kld[-2:]], 32) == {"begin": [28, 30], "kld": [29.0, 30.0]}
    assert perplexity_results.by_position([kld[:1]], 3) == {"begin": [1], "kld": [1.0]}


def test_layers_are_measured_alone_and_once(model: Any) -> None:
    record = RunRecord.open(None, {})
    configs = {name: KVQuantConfig.from_preset(name) for name in ("none", "int8", "int4-token")}
    record.put("keys", {})
    known = {"0": {"int8": {"kld": -1.0}}}
    record.put("layers", known)
    subject = Subject("model", model, tokenizer(), configs)
    run = perplexity_run.Run(record, subject, Segments(ids(), [0], 64), 32, can_simulate=True)
    steps = list(run.details(TEXT))
    assert [step.what for step in steps] == ["layer 1 alone"]
    for step in steps:
        step.run(lambda done=0, /, doing=None: None)
    layers = record.get("layers")
    assert layers is not None and layers["0"] == known["0"] and list(layers["1"]) == ["int8", "int4-token"]
    assert (
        0 < layers["1"]["int8"]["kld"] < layers["1"]["int4-token"]["kld"] and layers["1"]["int4-token"]["tokens"] == 62
    )


def test_key_magnitudes_are_those_of_calibration(model: Any) -> None:
    """The model stays as it is; one that is calibrated is seen with its own factors, to the same result."""
    before = hash_of(model, model.state_dict())
    found = perplexity_run.key_magnitudes(model, tokenizer(), TEXT, ids())
    assert hash_of(model, model.state_dict()) == before
    assert found["is_calibrated"] is False and list(found["layers"]) == [0, 1]
    for layer in found["layers"].values():
        assert len(layer["before"]) == 2 and max(map(max, layer["after"])) < max(map(max, layer["before"]))
    smooth_attention(model, tokenizer(), [TEXT], num_tokens=perplexity_run.CALIBRATION_TOKENS, window=64)
    assert perplexity_run.key_magnitudes(model, tokenizer(), TEXT, ids()) == {**found, "is_calibrated": True}


def test_key_magnitudes_of_latents() -> None:
    """The channels that are cached, of one head, and not those of the keys that are made of them."""
    model, seen = models.build("minicpm3", **models.FAMILIES["minicpm3"].options), []
    found = perplexity_run.key_magnitudes(model, tokenizer(), TEXT, ids())
    for module in latent_attentions(model):
        module.kv_a_layernorm.register_forward_hook(lambda module, inputs, output: seen.append(output))
    with torch.no_grad():
        model(ids())
    for latent, layer in zip(seen, found["layers"].values(), strict=True):
        torch.testing.assert_close(torch.tensor(layer["before"]), latent[0].abs().amax(0)[None], rtol=1e-3, atol=0)
        assert len(layer["after"][0]) == model.config.kv_lora_rank


def test_why_there_are_no_key_magnitudes(model: Any) -> None:
    found = perplexity_run.key_magnitudes(model, tokenizer(), TEXT[:40], ids())
    assert found["unmeasured"].startswith("smooth_attention: `texts` must have at least 512 tokens")
    setattr(model.config, CONFIG_KEY, {"version": 1})
    found = perplexity_run.key_magnitudes(model, tokenizer(), TEXT, ids())
    assert found == {"unmeasured": "the checkpoint is calibrated, and its factors did not come with it"}
