"""What states cost in fewer bits: formats, the script on a tiny model, and the training of a twin with states."""

from __future__ import annotations

import importlib
import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hf_kvquant.upstream.releases import HAS_STATES

if not HAS_STATES:
    pytest.skip("states need transformers 5.24", allow_module_level=True)

EVALS = Path(__file__).resolve().parents[1] / "evals"
SENTENCE = "The quick brown fox jumps over the lazy dog while 23 sailors sing of the sea. "
TINY = {
    "vocab_size": 8192,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}


@pytest.fixture(autouse=True)
def precision() -> Iterator[None]:
    """Training multiplies in TF32, and other tests must not."""
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


@pytest.fixture
def formats(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """`state_formats.py`."""
    monkeypatch.syspath_prepend(str(EVALS))
    return importlib.import_module("state_formats")


@pytest.fixture
def drift(formats: ModuleType) -> ModuleType:
    """`state_drift.py`."""
    return importlib.import_module("state_drift")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tiny checkpoint with random weights, whose next tokens are not all alike, and a text beside it."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3_5_text", **TINY))
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(20)
        for layer in model.model.layers[:3]:
            layer.linear_attn.dt_bias.fill_(-7.0)  # forget slowly
    model.save_pretrained(tmp_path / "model")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(EVALS / "reference_model" / name, tmp_path / "model")
    (tmp_path / "text.txt").write_text(SENTENCE * 40, encoding="utf-8")
    return tmp_path


def words(folder: Path, *more: str) -> list[str]:
    paths = ["--model", str(folder / "model"), "--text", str(folder / "text.txt")]
    return [*paths, "--device", "cpu", "--length", "96", "--sequences", "2", *more]


def by_name(formats: ModuleType) -> dict[str, Any]:
    return {kind.method: kind for kind in formats.FORMATS}


def test_formats_round_as_a_kernel_would(formats: ModuleType) -> None:
    torch.manual_seed(0)
    state = torch.randn(3, 2, 8, 16) * torch.logspace(-3, 2, 16)
    kinds = by_name(formats)
    assert torch.equal(kinds["float32"].rounded(state), state)
    assert torch.equal(kinds["bf16"].rounded(state), state.bfloat16().float())
    assert torch.equal(kinds["fp16"].rounded(state), state.half().float())
    for name, dimension in (("int8-key", -1), ("int8-value", -2)):
        scale = (state.abs().amax(dimension, keepdim=True) / 127).half().float()
        found = kinds[name].rounded(state)
        assert torch.equal(found, (state / scale).round().clamp(-127, 127) * scale)
    found = kinds["int8-key"].rounded(state)
    assert torch.equal(kinds["int8-key-stochastic"].rounded(found), found)  # codes stay what they are
    # Value channels of very different sizes have a scale each; with a scale for a key channel, the small ones are lost.
    small = state[..., :4], {name: kinds[name].rounded(state)[..., :4] for name in ("int8-key", "int8-value")}
    assert not small[1]["int8-key"].any() and (small[1]["int8-value"] - small[0]).abs().max() < 0.01 * small[0].max()
    zeros = torch.zeros(1, 1, 8, 16)
    assert all(torch.equal(kind.rounded(zeros), zeros) for kind in kinds.values())


@pytest.mark.parametrize("name", ["bf16-stochastic", "int8-key-stochastic"])
def test_stochastic_rounding_has_the_right_mean(formats: ModuleType, name: str) -> None:
    torch.manual_seed(0)
    state = torch.randn(8, 16)
    kind = by_name(formats)[name]
    mean = torch.stack([kind.rounded(state) for _ in range(4000)]).double().mean(0)
    unit = torch.maximum(kind.rounded(state) - state, state - kind.rounded(state)).max()
    # The deviation of a mean of 4000 is at most half a unit by the root of 4000; five of them.
    assert (mean - state).abs().max() < 5 * 0.5 * unit * 4000**-0.5


def test_bytes(formats: ModuleType) -> None:
    """A layer of Qwen3.5-27B: 48 heads of 128 x 128."""
    sizes = {name: kind.num_bytes(48, 128, 128) for name, kind in by_name(formats).items()}
    assert sizes["float32"] == 4 * 48 * 128 * 128
    assert sizes["bf16"] == sizes["fp16"] == sizes["float32"] // 2
    assert sizes["fp8-head"] == 48 * (128 * 128 + 2)
    assert sizes["int8-key"] == sizes["int8-value"] == 48 * (128 * 128 + 256)
    assert sizes["int4-key"] == 48 * (128 * 64 + 256)


def test_results(drift: ModuleType, folder: Path) -> None:
    """Of every format and text, and equal to the model's own steps."""
    drift.main(words(folder, "--output", str(folder / "drift.json")))
    results = json.loads((folder / "drift.json").read_text(encoding="utf-8"))
    assert [found["kind"] for found in results["texts"]] == ["text", "greedy", "sampled"]
    assert results["texts"][0]["spans"] == [[0, 6], [6, 12], [12, 24], [24, 48], [48, 96]]
    assert results["texts"][1]["spans"] == [[64, 96]]
    for found in results["texts"]:
        rows = {row["method"]: row for row in found["rows"]}
        assert list(rows)[:2] == ["float32", "float32-again"] and list(rows)[-1] == "model-in-bf16"
        assert len(rows) == len(drift.FORMATS) + 2
        for name in ("float32", "float32-again"):
            assert rows[name]["mean_kld"] == 0 and rows[name]["mean_agreement"] == 1
            assert not any(rows[name]["slow_error"])
        assert 0 < rows["fp16"]["mean_kld"] < rows["bf16"]["mean_kld"] < rows["int4-key"]["mean_kld"]
        assert rows["bf16"]["slow_error"][-1] > rows["fp16"]["slow_error"][-1] > 0
        assert rows["bf16"]["bytes"] * 2 == rows["float32"]["bytes"] == 3 * 2 * 8 * 16 * 4
        assert rows["conv-bf16"]["conv_bytes"] * 2 == rows["float32"]["conv_bytes"] == 3 * 48 * 4 * 4
    plain = {row["method"]: row for row in results["texts"][0]["rows"]}
    # Nothing is rounded in the first half: what is left are sums in another order, of rows further down in the batch.
    for name in ("bf16-every-64", "bf16-after-half"):
        assert max(plain[name]["kld"][:4]) < 1e-12 < plain[name]["kld"][4]

    model, tokenizer = drift.load(str(folder / "model"), "float32", torch.device("cpu"))
    ids = tokenizer(SENTENCE * 40, return_tensors="pt", verbose=False).input_ids[0]
    windows, _ = drift.cut(ids, 2, 96)
    with torch.no_grad():
        loss = model(windows, labels=windows).loss  # in one chunk
    assert plain["float32"]["perplexity"] == pytest.approx(float(loss.exp()), rel=1e-4)


def test_what_the_page_says(drift: ModuleType, folder: Path) -> None:
    """With one results file, and with that of heads that forget slower."""
    files = {}
    for name, more in (("state_drift", ()), ("state_drift_slower", ("--slower", "4", "--texts", "text"))):
        chosen = ("--formats", "bf16", "int8-key", "--output", str(folder / f"{name}.json"), *more)
        drift.main(words(folder, *chosen))
        files[name] = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
    lives = [files[name]["texts"][0]["half_lives"][0][0] for name in files]
    assert lives[1] == pytest.approx(4 * lives[0], rel=0.01)
    part = next(part for part in importlib.import_module("render_states").PARTS if part.name == "states-drift")
    for name, cost in (("bf16", 1.9e-4), ("int8-key", 2.6e-3)):
        row = next(row for row in files["state_drift"]["texts"][0]["rows"] if row["method"] == name)
        row |= {"kld": [cost / 4] * 4 + [cost], "mean_agreement": 0.98765, "perplexity_change": 0.00123}
        row["slow_error"][-1] = 0.0321
    header, _, baseline, half, byte, noise, _, caption = part.text(files).splitlines()
    assert header.split("|")[1:6] == [" states stored as ", " KB ", " at 0 to 6 ", " at 12 to 24 ", " at 48 to 96 "]
    assert header.endswith("| greedy | sampled | 4 times slower |")
    assert baseline.startswith("| float32 | 3 | 0 | 0 | 0 | 100.00% | +0.000% | 0.00% | 0 | 0 |")
    assert half.startswith("| bf16 | 2 | 4.8·10⁻⁵ | 4.8·10⁻⁵ | 1.9·10⁻⁴ | 98.77% | +0.123% | 3.21% |")
    assert byte.startswith("| int8 | 1 |") and noise.startswith("| float32, the model in bf16 | - |")
    assert "0.3 million parameters" in caption and "3 of 4 layers have a gated delta rule with 2 heads" in caption
    assert "reads 192 tokens" in caption and "`evals/results/state_drift_slower.json`" in caption
    alone = part.text({"state_drift": files["state_drift"]})
    assert alone.splitlines()[0].endswith("| greedy | sampled |")


def test_rows_that_should_be_equal(drift: ModuleType, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A difference ends the run before anything is written."""
    forward = drift.Lane.forward

    def off(self: Any, tokens: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = forward(self, tokens)
        found[1:2] += torch.randn_like(found[1:2]) * 1e-3
        return found

    monkeypatch.setattr(drift.Lane, "forward", off)
    output = folder / "drift.json"
    with pytest.raises(SystemExit, match=r"two equal rows differ by .*e-07 nats a token. Nothing was written."):
        drift.main(words(folder, "--texts", "text", "--formats", "bf16", "--output", str(output)))
    assert not output.exists()


def test_a_text_that_is_too_short(drift: ModuleType, folder: Path) -> None:
    with pytest.raises(SystemExit, match=r"`--text` must have 20 windows of 97 tokens, got \d+ tokens. Lower --seq"):
        drift.main(words(folder, "--sequences", "20"))


def test_a_twin_with_states(drift: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A training, and a second one that goes on from it on longer windows."""
    train = importlib.import_module("reference_model.train")
    articles = "<|endoftext|>".join(SENTENCE * 4 * (index % 5 + 1) for index in range(120))
    (tmp_path / "articles.txt").write_text(articles, encoding="utf-8")
    base = ["train.py", "train", "--data", str(tmp_path / "articles.txt"), "--device", "cpu", "--no-compile"]
    base += ["--tokenizer", str(EVALS / "reference_model"), "--steps", "2", "--batch-rows", "2", "--state-heads", "2"]
    base += ["--hidden-size", "32", "--intermediate-size", "32", "--layers", "4", "--query-heads", "2"]
    base += ["--kv-heads", "1", "--head-dim", "16"]
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    for more in (["--out", first, "--context", "32"], ["--out", second, "--init", first, "--context", "64"]):
        monkeypatch.setattr(sys, "argv", [*base, *more])
        train.main()
    model = AutoModelForCausalLM.from_pretrained(second, dtype=torch.float32)
    assert model.config.layer_types == ["linear_attention"] * 3 + ["full_attention"]
    assert model.config.max_position_embeddings == 64
    before = AutoModelForCausalLM.from_pretrained(first, dtype=torch.float32)
    changed = {name for name, weight in model.named_parameters() if not weight.equal(before.get_parameter(name))}
    assert {f"model.layers.0.linear_attn.{name}.weight" for name in ("conv1d", "in_proj_a", "norm")} <= changed
    # How fast heads forget: all of it within a token to half of it within 700.
    torch.manual_seed(0)
    layer = model.model.layers[0].linear_attn
    with torch.no_grad():
        train.init_decays(layer)
    steps = torch.nn.functional.softplus(layer.dt_bias)
    assert steps.min() >= 0.99e-3 and steps.max() <= 0.101
