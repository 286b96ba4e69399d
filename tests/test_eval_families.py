"""Evaluations of models that compute attention by themselves, whether they can be simulated or not, and of those whose
last layers attend to the keys and values of others.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import json
from pathlib import Path
from typing import Any

import models
import pytest

from hf_kvquant import cli
from hf_kvquant.storage.tally import causal_pairs
from hf_kvquant_evals.measuring.pairs import DEQUANTIZED

needs_matplotlib = pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="matplotlib is optional")
needs_lm_eval = pytest.mark.skipif(importlib.util.find_spec("lm_eval") is None, reason="lm-eval is optional")

WINDOW = 24
INT8 = "int8:0+0"  # codes alone, which chunks and single tokens agree on
SHARING = ["gemma3n_text", "gemma4_text"]
WHY = {
    "xglm": "simulate: XGLMForCausalLM computes attention by itself, outside transformers' registry. Feed it in chunks "
    "instead.",
    "jetmoe": "simulate: the model must leave keys and values to its attention function, but reads them itself. "
    "Feed it in chunks instead.",
}


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Takes a family; makes the folder of its model and tokenizer."""

    @functools.cache
    def folder_of(family: str) -> str:
        return models.save(models.family(family), tmp_path_factory.mktemp(family), model_max_length=128, bos_token="!")

    return folder_of


def run(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    evaluation: str,
    folder: str,
    *more: str,
    output: Path | None = None,
) -> Any:
    """Exit code, results, stdout and stderr of a short run."""
    (tmp_path / "text.txt").write_text(30 * models.SENTENCE, encoding="utf-8")
    output = output or tmp_path / "out.json"
    code = cli.main(["eval", evaluation, folder, "--dtype", "float32", "--output", str(output), *more])
    found = json.loads(output.read_text(encoding="utf-8")) if output.is_file() else None
    captured = capsys.readouterr()
    return code, found, captured.out, captured.err


def task_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A folder with the items of one task: one."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # and afterwards whatever it was
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    item = {"context": "The river rises in the", "continuation": "north"}
    (tmp_path / "lambada_openai.jsonl").write_text(json.dumps(item) + "\n", encoding="utf-8")
    return str(tmp_path)


def of_text(tmp_path: Path, *more: str) -> tuple[str, ...]:
    words = ("--text", str(tmp_path / "text.txt"), "--window", str(WINDOW), "--tokens", "50", "--chunk", "5")
    return (*words, "--preset", INT8, "--preset", "int4-token:2+6", *more)


@pytest.mark.full(
    when=lambda family: family not in ("bloom", "gpt_neo", "gemma4_text"),
    reason="test_simulation.py simulates all of them; ALiBi, a window and shared keys are what evaluations count",
)
@pytest.mark.parametrize("family", ["bloom", "falcon", "falcon_alibi", "gptj", "gpt_neo", "mpt", *SHARING])
def test_perplexity_in_all_modes(
    folder_of: Any, family: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code, found, out, error = run(
        capsys, tmp_path, "perplexity", folder_of(family), *of_text(tmp_path, "--mode", "all")
    )
    assert code == 0 and "simulat" not in error, error
    parts = found["parts"]
    assert list(parts["summary"]["modes"]) == ["simulated", "chunked", "decode"]
    assert parts["summary"]["unsimulated"] is None
    for name, gated in parts["gate"].items():
        assert {"simulated and decode", "simulated and chunked"} <= set(gated["between"]), name
    # Of GPT-Neo, the second layer sees a window, and its cache keeps everything. Of those that share, two layers read
    # what a layer keeps.
    options = models.FAMILIES[family].options
    window = options.get("window_size", 0) or options.get("sliding_window", 0)
    expected = 3 * (causal_pairs(WINDOW - 1, 1) + causal_pairs(WINDOW - 1, 1, window)) * (2 if family in SHARING else 1)
    for rows in parts["summary"]["modes"].values():
        assert rows[INT8]["pairs_read"] == rows[INT8]["pairs_expected"] == expected
        assert rows[INT8]["pairs_dequantized"] == 0 < rows[INT8]["kld"]
    assert "the ways of feeding a text agree." in " ".join(out.split())


@pytest.mark.parametrize("family", ["xglm", "jetmoe"])
def test_perplexity_without_simulation(
    folder_of: Any, family: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = of_text(tmp_path, "--mode", "all", "--details")
    code, found, out, error = run(capsys, tmp_path, "perplexity", folder_of(family), *words)
    assert code == 0, error
    line = f"eval perplexity: chunked and decode are compared with each other only, not with simulated. {WHY[family]}"
    assert error.splitlines().count(line) == 1
    assert len(error.splitlines()) < 8  # nothing is said again for every window
    parts = found["parts"]
    assert list(parts["summary"]["modes"]) == ["chunked", "decode"]
    assert parts["summary"]["unsimulated"] == WHY[family]
    # With a window of the newest tokens, chunks are not the same function as single tokens.
    expected = {"none": ["chunked and decode"], INT8: ["chunked and decode"], "int4-token:2+6": []}
    assert {name: list(gated["between"]) for name, gated in parts["gate"].items()} == expected
    assert list(parts["layers"]) == ["0", "1"]
    for rows in parts["summary"]["modes"].values():
        assert rows["none"]["kld"] < 1e-6 < rows[INT8]["kld"] and rows[INT8]["pairs_read"] == 0
        assert rows[INT8]["pairs_dequantized"] == rows[INT8]["pairs_expected"] == 6 * causal_pairs(WINDOW - 1, 1)
    said = " ".join(out.split())
    assert (
        "codes was, though as dequantised tensors: no kernel serves the model; chunks and single tokens agree" in said
    )


@pytest.mark.parametrize("family", ["xglm", "bloom", "falcon_alibi"])
def test_the_gate_in_16_bits(folder_of: Any, family: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = (*of_text(tmp_path), "--dtype", "bfloat16")
    code, found, _, error = run(capsys, tmp_path, "perplexity", folder_of(family), *words)
    assert code == 0, error
    assert ("simulated and chunked" in found["parts"]["gate"]["int4-token:2+6"]["between"]) == (family != "xglm")


@pytest.mark.parametrize("family", ["xglm", "jetmoe"])
def test_simulation_is_refused(folder_of: Any, family: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = folder_of(family)
    words = of_text(tmp_path, "--mode", "simulated")
    code, found, _, error = run(capsys, tmp_path, "perplexity", folder, *words)
    assert code == 2 and found is None
    message = f"eval perplexity: `--mode` must be chunked, decode or all for {folder}, got simulated. {WHY[family]}"
    assert error.splitlines()[-1].endswith(message)


def test_controls_where_no_kernel_serves(
    folder_of: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hf_kvquant_evals.perplexity.gate.CONTROL_AGREEMENT", 1.01)
    code, found, _, error = run(capsys, tmp_path, "perplexity", folder_of("xglm"), *of_text(tmp_path, "--controls"))
    assert code == 0, error
    assert list(found["parts"]["controls"]["permuted_scales"]) == [INT8, "int4-token:2+6"]


@needs_matplotlib
@pytest.mark.full(when=lambda family: family in SHARING, reason="a report over what test_perplexity_in_all_modes runs")
@pytest.mark.parametrize("family", ["bloom", "xglm", *SHARING])
def test_reports(folder_of: Any, family: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """... are without outliers, which cannot be put into these models' keys."""
    output = tmp_path / "report"
    words = ("--text", str(tmp_path / "text.txt"), "--window", str(WINDOW), "--tokens", "50", "--preset", "int8")
    code, _, _, error = run(
        capsys, tmp_path, "report", folder_of(family), *words, "--skip", "tasks", "--full", output=output
    )
    assert code == 0, error
    assert "perplexity_outliers.json is left out. eval perplexity: nothing can be injected into " in error
    page = (output / "report.md").read_text(encoding="utf-8")
    assert "- `perplexity_outliers.json`: missing." in page
    assert ("no kernel serves the model; chunks and single tokens agree where" in page) == (family == "xglm")
    assert "![Divergence with one layer quantised at a time](layers.svg)" in page


@pytest.mark.parametrize("family", SHARING)
def test_long(folder_of: Any, family: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = ("--tests", "passkey", "--lengths", "112", "--depths", "50", "--samples", "2", "--preset", "int8")
    code, found, _, error = run(capsys, tmp_path, "long", folder_of(family), *words)
    assert code == 0, error
    (part,) = (part["int8"] for name, part in found["parts"].items() if name != "summary")
    assert part["pairs_read"] == part["pairs_expected"] > 0 == part["pairs_dequantized"]


@needs_lm_eval
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "family, mode", [("xglm", "decode"), *itertools.product(("bloom", *SHARING), ("decode", "simulated"))]
)
def test_tasks(
    folder_of: Any,
    family: str,
    mode: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    words = (
        "--data",
        task_data(tmp_path, monkeypatch),
        "--tasks",
        "lambada_openai",
        "--preset",
        "int8",
        "--mode",
        mode,
    )
    code, found, out, error = run(capsys, tmp_path, "tasks", folder_of(family), *words)
    assert code == 0, error
    part = found["parts"]["lambada_openai/int8"]
    assert part["pairs_read"] + part["pairs_dequantized"] == part["pairs_expected"] > 0
    assert (DEQUANTIZED in " ".join(out.split())) == (part["pairs_read"] == 0) == (family == "xglm")


@needs_lm_eval
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", ["xglm", "jetmoe"])
def test_tasks_refuse_a_simulation(
    folder_of: Any, family: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folder_of(family)
    words = ("--data", task_data(tmp_path, monkeypatch), "--tasks", "lambada_openai", "--mode", "simulated")
    code, found, _, error = run(capsys, tmp_path, "tasks", folder, *words)
    assert code == 2 and found is None
    assert f"eval tasks: {folder} cannot be evaluated in this mode. {WHY[family]}" in error
