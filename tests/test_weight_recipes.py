"""The simulated weights of `evals/ablation.py`, against plain restatements, its zero-shot scores, and its table."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import models
import pytest
import torch

from hf_kvquant import KVQuantConfig

EVALS = Path(__file__).resolve().parents[1] / "evals"


@pytest.fixture
def recipes(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(EVALS))
    yield importlib.import_module("weight_recipes")


def test_weights_have_as_many_values_as_codes(recipes: ModuleType) -> None:
    weight = torch.randn(6, 256, generator=torch.Generator().manual_seed(0))
    for function, size, most in ((recipes.int8_weight, 256, 255), (recipes.uint4_weight, 128, 16)):
        found = function(weight).view(6, -1, size)
        assert all(len(group.unique()) <= most for row in found for group in row)
        assert (function(weight) - weight).abs().max() <= weight.abs().max() * (1 / 127 if most == 255 else 1 / 7)


def test_progressive_weights_are_integers_within_int8(recipes: ModuleType) -> None:
    """Level by level: int8 with one scale per row, then uint4 with integer scales and zeros."""
    weight = torch.randn(4, 256, generator=torch.Generator().manual_seed(1))
    found = recipes.progressive_weight(weight)
    for row, own in zip(found, weight, strict=True):
        outer = own.abs().max() / 119
        integers = row / outer
        assert (integers - integers.round()).abs().max() < 1e-3 and integers.abs().max() <= 128
        for group, expected in zip(integers.view(2, 128), (own / outer).round().view(2, 128), strict=True):
            scale = max(1, round(float((expected.max().clamp(min=0) - expected.min().clamp(max=0)) / 15)))
            assert len(group.round().unique()) <= 16
            assert (group - expected).abs().max() <= scale  # half a step, and a zero point that was rounded


@pytest.mark.parametrize("name", ["W16A16", "W8A8", "W4A16", "W4A8"])
def test_linear_layers_compute_with_these(recipes: ModuleType, name: str) -> None:
    model = models.build("llama")
    ids = torch.tensor([[5, 6, 7, 8]])
    before, head = model(ids).logits, model.lm_head.weight.clone()
    recipes.quantize_weights(model, name)
    assert torch.equal(model.lm_head.weight, head)
    layer = model.model.layers[0].mlp.up_proj
    x = torch.randn(1, 3, layer.in_features)
    scale = x.abs().amax(-1, keepdim=True) / 127
    rounded = (x / scale).round() * scale if name.endswith("A8") else x
    torch.testing.assert_close(layer(x), rounded @ layer.weight.T)
    difference = (model(ids).logits - before).abs().max()
    assert (difference == 0) == (name == "W16A16")


def test_the_command(tmp_path: Path, recipes: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every weight with every cache; what weights cost is that of the unquantised cache."""
    ablation = importlib.import_module("ablation")
    text = "The village is located in the north of the country. The river rises in the mountains.\n" * 60
    (tmp_path / "text").write_text(text, encoding="utf-8")
    monkeypatch.setattr(ablation, "cut", lambda ids, model, tokens: _cut(ids))
    options = ["--text", str(tmp_path / "text"), "--calibrate", str(tmp_path / "text"), "--output"]
    monkeypatch.setattr(sys, "argv", ["ablation.py", *options, str(tmp_path / "out.json")])
    ablation.main()
    results = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    rows = results["rows"]
    assert [(row["weights"], row["cache"]) for row in rows] == [
        (weights, cache) for weights in recipes.WEIGHTS for cache in ablation.CACHES
    ]
    first = rows[0]
    assert first["weights_cost"] == first["cache_adds"] == 0 and results["tasks"] == []
    w4a8 = {row["cache"]: row for row in rows if row["weights"] == "W4A8"}
    assert w4a8["KV16"]["cache_adds"] == 0
    assert w4a8["KV8"]["weights_cost"] == w4a8["KV16"]["perplexity"] / first["perplexity"] - 1


def test_zero_shot_scores(tmp_path: Path, recipes: ModuleType) -> None:
    """Sums of log-likelihoods of answers, read through the cache; a single answer must be the greedy one."""
    zero_shot = importlib.import_module("zero_shot")
    model, tokenizer = models.llama(), models.tokenizer()
    config = KVQuantConfig.from_preset("none")
    item = zero_shot.Item("The river rises in", [" the mountains", " the north of the country"], 0)
    with zero_shot.route(model, simulate=False):
        (found, is_greedy), _ = zero_shot.scored(model, tokenizer, config, item)
    ids = tokenizer("The river rises in the mountains", return_tensors="pt").input_ids
    begin = len(tokenizer("The river rises in").input_ids)
    with torch.no_grad():
        log_probs = model(ids).logits[0, begin - 1 : -1].log_softmax(-1)
    expected = log_probs.gather(1, ids[0, begin:, None])
    assert found == pytest.approx(float(expected.sum()), abs=1e-3)
    assert is_greedy == bool((log_probs.argmax(1) == ids[0, begin:]).all())
    line = {"query": "Question: where? ", "choices": ["here", "there"], "gold": 1}
    (tmp_path / "arc_easy.jsonl").write_text(f"{json.dumps(line)}\n\n{json.dumps(line)}\n", encoding="utf-8")
    items = list(zero_shot.items_of("arc_easy", str(tmp_path), 5))
    assert items == [zero_shot.Item("Question: where?\nAnswer:", [" here", " there"], 1)] * 2
    scores = zero_shot.accuracies(model, tokenizer, {"KV16": config}, ["arc_easy"], str(tmp_path), 1)
    assert scores["KV16"]["arc_easy"] in (0, 1)
    with pytest.raises(SystemExit, match="must be contexts with answers, got winogrande"):
        list(zero_shot.items_of("winogrande", str(tmp_path), 1))


def _cut(ids: torch.Tensor) -> object:
    segments = importlib.import_module("hf_kvquant_evals.perplexity.segments")
    return segments.Segments(ids[None, :200], [0], 200)
