"""That `evals/fidelity.py` measures what it says, on a few tokens, and aborts where a number would mean nothing."""

from __future__ import annotations

import dataclasses
import importlib
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
TEXT = """
 = A heading =

 The village is located in the centre of the city . It was first settled in 1868 , and its population was 2,000 .
 The river rises in the north of the country and flows south for about 300 kilometres before it reaches the sea .

 = Another heading =

 The university was founded in 1868 by a group of local merchants . It is a public research university .
"""


@pytest.fixture
def fidelity(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "evals"))
    return importlib.import_module("fidelity")


def run(
    fidelity: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], folder: Path
) -> dict[str, Any]:
    """The results of a short run; the JSON line and the file hold the same."""
    (folder / "text.raw").write_text(TEXT, encoding="utf-8")
    arguments = ["--data", str(folder / "text.raw"), "--window", "36", "--tokens", "60", "--chunk", "5"]
    arguments += ["--preset", "none", "--preset", "int8", "--preset", "int4", "--output", str(folder / "out.json")]
    monkeypatch.setattr(sys, "argv", [str(ROOT / "evals" / "fidelity.py"), *arguments])
    fidelity.main()
    results: dict[str, Any] = json.loads((folder / "out.json").read_text(encoding="utf-8"))
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == results
    return results


def test_results(
    fidelity: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    results = run(fidelity, monkeypatch, capsys, tmp_path)
    assert results["command"].startswith("python evals/fidelity.py --data text.raw --window 36")
    assert str(tmp_path) not in json.dumps(results)
    # 36 tokens, of which the last is only predicted and the first is the exact first chunk.
    assert results["scored_tokens"] == 2 * 34
    presets = results["presets"]
    for preset, row in presets.items():
        layers = 0 if preset == "none" else 7
        assert row["pairs_read"] == row["pairs_expected"] == 2 * layers * (35 * 36 // 2 - 1)
        assert len(row["windows"]) == 2
        assert row["perplexity"] == pytest.approx(results["reference_perplexity"] * (1 + row["perplexity_change"]))
    assert presets["none"]["kld"] < 1e-6 < presets["int8"]["kld"] < presets["int4"]["kld"]
    assert presets["none"]["bytes_per_token"] == 7168 and presets["none"]["bits_per_value"] == 16


def test_a_wrong_count_aborts(
    fidelity: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def compare(*args: Any, **kwargs: Any) -> Any:
        results = fidelity_compare(*args, **kwargs)
        return {name: dataclasses.replace(result, pairs_read=0) for name, result in results.items()}

    fidelity_compare = fidelity.compare
    monkeypatch.setattr(fidelity, "compare", compare)
    with pytest.raises(SystemExit, match=r"preset int8 must read 4403 .* got 0"):
        run(fidelity, monkeypatch, capsys, tmp_path)


def test_a_dependence_on_the_chunk_aborts(
    fidelity: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def compare(*args: Any, chunk_size: int, **kwargs: Any) -> Any:
        results = fidelity_compare(*args, chunk_size=chunk_size, **kwargs)
        error = 0.0 if chunk_size == 1 else 0.01
        return {name: dataclasses.replace(result, kld=result.kld + error) for name, result in results.items()}

    fidelity_compare = fidelity.compare
    monkeypatch.setattr(fidelity, "compare", compare)
    with pytest.raises(SystemExit, match="preset none must have the same mean KL divergence in chunks of 1 and 32"):
        run(fidelity, monkeypatch, capsys, tmp_path)


def test_windows_follow_the_convention(fidelity: ModuleType, tmp_path: Path) -> None:
    """Rows keep their newline, blank rows become empty, two newlines join them, and the rest is dropped."""

    class Characters:
        def __call__(self, text: str, **kwargs: Any) -> Any:
            self.text = text
            return type("Encoding", (), {"input_ids": torch.arange(len(text))[None]})

    tokenizer = Characters()
    (tmp_path / "text.raw").write_text(" a\n \nb\n", encoding="utf-8")
    windows = fidelity.read_windows(tokenizer, tmp_path / "text.raw", 4)
    assert tokenizer.text == " a\n\n\n\n\nb\n"
    assert windows.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_too_few_tokens_abort(
    fidelity: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "TEXT", "The village is located in the centre of the city .\n")
    with pytest.raises(SystemExit, match=r"`--tokens` must fit the 0 windows of 36 tokens in text.raw, got 60"):
        run(fidelity, monkeypatch, capsys, tmp_path)
