"""`hf-kvquant eval report`: what it runs and resumes, that records alone make the page, and one line for mistakes."""

from __future__ import annotations

import argparse
import base64
import dataclasses
import importlib.util
import json
import re
import time
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from drawn import described

import hf_kvquant
from hf_kvquant import cli
from hf_kvquant_evals import paired
from hf_kvquant_evals.choices import MINUTES, REPORTED_PRESETS, SHORT_TOKENS, SHORT_WINDOW
from hf_kvquant_evals.cli import evaluate
from hf_kvquant_evals.cli.parsers import LIMIT
from hf_kvquant_evals.perplexity import perplexity_run
from hf_kvquant_evals.report import page
from hf_kvquant_evals.tasks.data import AVERAGED
from hf_kvquant_evals.tasks.task_results import average_lines, averages, by_task_and_preset

needs_matplotlib = pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="matplotlib is optional")
# lm-eval and its dependencies warn of each other.
pytestmark = [pytest.mark.filterwarnings("ignore")]

TEXT = 30 * models.SENTENCE
PRESETS = ["none", "int8", "int4-token"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny model and its tokenizer."""
    return models.save_llama(tmp_path_factory.mktemp("model"), 64)


@pytest.fixture
def text(tmp_path: Path) -> str:
    path = tmp_path / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    return str(path)


def run(capsys: pytest.CaptureFixture[str], folder: str, output: Path, *words: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of the command."""
    code = cli.main(["eval", "report", folder, "--output", str(output), *words])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def short(text: str, *words: str) -> list[str]:
    """Options of a run over texts that takes a few seconds."""
    options = ["--text", text, "--dtype", "float32", "--window", "48", "--tokens", "90", "--full", "--skip", "tasks"]
    return [*options, "--preset", "int8", "--preset", "int4-token", *words]


def records() -> dict[str, dict[str, Any]]:
    """What evaluations leave, as far as a page needs it, with made-up numbers."""
    card = {"command": "hf-kvquant eval report", "date": "2026-11-22 10:00 UTC", "commit": "0123456789abcd"}
    card |= {"is_dirty": True, "cpu": "Some CPU", "threads": 2, "hf_kvquant": "0", "torch": "1", "transformers": "2"}

    def row(bits: float, kld: float) -> dict[str, Any]:
        same = {"kld_standard_error": kld / 10, "kld_median": kld / 2, "kld_p99": 9 * kld, "agreement": 0.9}
        same |= {"agreement_standard_error": 0.02, "perplexity_change_standard_error": 0.003}
        more = {"scored_tokens": 90, "perplexity": 30.0, "perplexity_change": kld, "bytes_per_token": 100 * bits}
        return {
            "bits_per_value": bits,
            "kld": kld,
            "by_position": {"begin": [1, 24], "kld": [kld, 2 * kld]},
            **same,
            **more,
        }

    def of_text(scale: float) -> dict[str, Any]:
        rows = {"none": row(16, 0.0), "int8": row(8.5, 1e-4 * scale), "int4-token": row(4.5, 1e-2 * scale)}
        layers = {str(i): {name: {"kld": rows[name]["kld"] / 2 + i} for name in PRESETS[1:]} for i in range(2)}
        channels = {
            str(i): {"before": [[1.0, 2.0], [9.0 * scale, 2.0]], "after": [[1.0, 2.0], [3.0, 2.0]]} for i in range(2)
        }
        gate = {
            "int8": {"bound": 1e-6, "between": {"chunked and decode": 2e-8}},
            "none": {"bound": None, "between": {}},
        }
        parts = {"layers": layers, "keys": {"layers": channels}, "summary": {"modes": {"chunked": rows}}}
        parts |= {"gate": gate, "chunked 0": {}}
        dense = {"none": 0, "int8": 0, "int4-token": 20}
        settings = {
            "model": "somewhere/model",
            "source": {"text": "text.txt", "convention": "as it is"},
            "window": 48,
            "chunk": 32,
            "device": "cpu",
            "begins": [0, 48],
            "presets": {name: {"sink_length": 0, "residual_length": length} for name, length in dense.items()},
        }
        return {"card": card, "settings": {**settings, "dtype": "float32"}, "parts": parts}

    def of_task(task: str, right: list[int]) -> dict[str, Any]:
        items = {"acc": right, "answer": right, "gold_log_likelihood": [-1.0] * 4}
        scores = {"metrics": {"acc": sum(right) / 4}, "standard_errors": {"acc": 0.1}}
        return {"task": task, "num_items": 4, "items": items, **scores}

    answers = {"none": [1, 1, 0, 0], "int8": [1, 1, 0, 0], "int4-token": [1, 0, 0, 0]}
    parts = {f"{task}/{preset}": of_task(task, right) for task in AVERAGED for preset, right in answers.items()}
    of_tasks = {"card": card, "settings": {"model": "somewhere/model", "limit": 4}, "parts": parts}
    return {page.PLAIN: of_text(1.0), page.OUTLIERS: of_text(3.0), page.TASKS: of_tasks}


def write(output: Path, found: dict[str, dict[str, Any]]) -> Path:
    """Records in their files."""
    output.mkdir(exist_ok=True)
    for kind, record in found.items():
        (output / page.FILES[kind]).write_text(json.dumps(record), encoding="utf-8")
    return output


# --- running ----------------------------------------------------------------------------------------------------------


@needs_matplotlib
def test_a_report_is_run_interrupted_and_resumed(
    folder: str, text: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "out"
    compare = perplexity_run.compare
    calls: list[str] = []

    def counted(model: Any, ids: Any, configs: Any, **kwargs: Any) -> Any:
        calls.append("window" if "none" in configs else "layer")
        if len(calls) == 2:
            raise KeyboardInterrupt
        return compare(model, ids, configs, **kwargs)

    monkeypatch.setattr(perplexity_run, "compare", counted)
    code, _, error = run(capsys, folder, output, *short(text))
    assert code == 130 and "run the same command again to resume" in error
    assert "1 of 2 windows." in (output / page.PAGE).read_text(encoding="utf-8")  # there after the first window
    code, shown, error = run(capsys, folder, output, *short(text))
    assert code == 0, error
    # Two windows of each record, of which the first was known; two layers of each.
    assert calls == ["window", "window", "window", "layer", "layer", "window", "window", "layer", "layer"]
    assert "report.html\n" in shown and "report.md, with quality.svg, positions.svg, layers.svg, keys.svg" in shown
    pages = {path.name: path.read_bytes() for path in output.iterdir()}
    assert str(tmp_path) not in pages[page.PAGE].decode()
    # Known as a whole, it is only rendered, and to the same bytes; and so it is without the model.
    for words in (short(text), ["--render"]):
        code, _, error = run(capsys, folder, output, *words)
        drawn = {path.name: path.read_bytes() for path in output.iterdir()}
        assert code == 0 and len(calls) == 9, error
        assert {name: drawn[name] for name in drawn if not name.endswith(".json")} == {
            name: pages[name] for name in pages if not name.endswith(".json")
        }
    plain, outliers = (json.loads(pages[page.FILES[kind]]) for kind in (page.PLAIN, page.OUTLIERS))
    assert outliers["settings"]["injected_outliers"] == evaluate.OUTLIER_FACTOR
    for record in (plain, outliers):
        assert list(record["parts"]["layers"]) == ["0", "1"] and list(record["parts"]["keys"]["layers"]) == ["0", "1"]
    # Three pairs of channels of every head are so many times as large, and calibration makes them smaller again.
    before, injected = (torch.tensor(each["parts"]["keys"]["layers"]["0"]["before"]) for each in (plain, outliers))
    grown = (injected / before - evaluate.OUTLIER_FACTOR).abs() < 0.1
    assert (grown.sum(1) == 6).all() and ((injected / before)[~grown] - 1).abs().max() < 0.01
    after = torch.tensor(outliers["parts"]["keys"]["layers"]["0"]["after"])
    assert page.ratio(after.flatten().tolist()) < page.ratio(injected.flatten().tolist())


@needs_matplotlib
def test_what_the_evaluations_are_given(monkeypatch: pytest.MonkeyPatch, text: str, tmp_path: Path) -> None:
    """Options reach both evaluations; tasks get all presets and those of the average."""
    given: list[argparse.Namespace] = []
    monkeypatch.setattr(evaluate, "run_perplexity", given.append)
    monkeypatch.setattr(evaluate, "run_tasks", given.append)
    monkeypatch.setattr(page, "render", lambda *args, **options: [])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True)
    words = ["--text", text, "--output", str(tmp_path / "out"), "--dtype", "float32", "--tokens", "500"]
    assert cli.main(["eval", "report", "model", *words]) == 0
    (short,) = given
    assert short.default_presets == REPORTED_PRESETS and short.limits["usual"] == (SHORT_WINDOW, SHORT_TOKENS)
    assert 0 < short.limits["until"] - time.monotonic() <= 60 * MINUTES
    given.clear()
    assert cli.main(["eval", "report", "model", *words, "--full"]) == 0
    plain, outliers, of_tasks = given
    assert plain.limits["until"] is None and "usual" not in plain.limits
    assert (plain.tokens, plain.details, plain.inject_outliers, plain.preset) == (500, True, None, None)
    assert outliers.inject_outliers == 8.0 and Path(outliers.output).name == "perplexity_outliers.json"
    assert (
        of_tasks.tasks == list(AVERAGED)
        and of_tasks.preset is None
        and of_tasks.default_presets == tuple(hf_kvquant.PRESETS)
        and of_tasks.limit == LIMIT
    )
    assert {each.dtype for each in given} == {"float32"} and of_tasks.inject_outliers is None


# --- from records -----------------------------------------------------------------------------------------------------


@needs_matplotlib
def test_page_and_pictures_show_the_records(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    found = records()
    output = write(tmp_path / "out", found)
    code, _, error = run(capsys, "somewhere/model", output, "--render")
    assert code == 0, error
    texts = page.of_texts(found)
    for name, drawing in page.PICTURES.items():
        assert described(output / name) == drawing.panels(texts)
        picture = (output / name).read_text(encoding="utf-8")
        assert "<text" in picture and "with injected outliers" in picture
    plain, outliers = texts.values()
    assert page.quality_numbers(plain) == {"int8": [[8.5, 1e-4]], "int4-token": [[4.5, 1e-2]]}
    assert page.layer_numbers(plain)["int4-token"] == [[0, 0.005], [1, 1.005]]
    keys = page.key_numbers(outliers)
    assert keys["before"] == [1.0, 2.0, 27.0, 2.0] and keys["uneven"]["after"] == [[0, 1.5], [1, 1.5]]
    shown = (output / page.PAGE).read_text(encoding="utf-8")
    # 450 bytes a token, and 20 dense tokens of 1,600.
    row = "| `int4-token` | 4.5 | 14.78 | 1.0·10⁻² ± 1.0·10⁻³ | good | 5.0·10⁻³ | 9.0·10⁻² | 90.0% ± 2.0% | 30.00 |"
    assert f"{row} +1.00% ± 0.30% | 25.0 (" in shown
    assert "| MB at 32,768 tokens | KL, nats per token (limits: 0.05, 0.15) | verdict |" in shown
    assert (
        "**`int4-token` is the smallest preset that stays below 0.05 nats per token (1.0·10⁻² ± 1.0·10⁻³). At 32,768 "
        "tokens, its cache takes 14.78 MB instead of 52.43 (28%).**" in shown
    )
    told = (
        "1 of 2 windows. Every (query, token) pair that had to be read from codes was; the ways of feeding a text agree"
    )
    assert (
        f"{told}. They differ most for `int8`, chunked and decode: 2.0·10⁻⁸ nats per token; the limit is 1.0·10⁻⁶."
        in shown
    )
    assert run(capsys, "somewhere/model", output, "--render", "--context", "4k")[0] == 0
    assert "| MB at 4,096 tokens |" in (output / page.PAGE).read_text(encoding="utf-8")
    assert run(capsys, "somewhere/model", output, "--render", "--context", "1000")[0] == 0
    shown = (output / page.PAGE).read_text(encoding="utf-8")
    assert "| `int4-token` | 4.5 | 0.482 |" in shown
    assert "| `int4-token` | 4 | 25.0 ± 10.0 | - | -25.00 ± 21.65 | 1.00 | 75% | +0.000 |" in shown
    assert "90 tokens of text.txt (as it is) in windows of 48, in chunks of 32 tokens, float32 on Some CPU" in shown
    assert "`tasks.json`: 2026-11-22 10:00 UTC, commit 0123456789, with uncommitted changes." in shown


@needs_matplotlib
def test_what_is_not_there_is_left_out_and_told(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    found = records()
    del found[page.TASKS], found[page.OUTLIERS]["parts"]["summary"], found[page.PLAIN]["parts"]["layers"]
    found[page.PLAIN]["parts"]["keys"] = {"unmeasured": "its weights are packed."}
    output = write(tmp_path / "out", found)
    code, shown, error = run(capsys, "somewhere/model", output, "--render")
    assert code == 0 and "with quality.svg, positions.svg" in shown, error
    text = (output / page.PAGE).read_text(encoding="utf-8")
    assert "with injected outliers\n" not in text and "zero-shot average" not in text and "## Layer" not in text
    begun = "`perplexity_outliers.json`: 2026-11-22 10:00 UTC, commit 0123456789, with uncommitted changes."
    assert f"{begun} Nothing is measured yet." in text and "tasks.json" not in text and "missing" not in text
    assert "Keys were not measured as it is: its weights are packed." in text


@needs_matplotlib
def test_the_page_in_html_needs_nothing_else(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    found = records()
    for record in found.values():
        record["settings"]["model"] = "somewhere/<model>"
    output = write(tmp_path / "out", found)
    assert run(capsys, "somewhere/<model>", output, "--render")[0] == 0
    shown = (output / page.HTML).read_text(encoding="utf-8")
    assert "<title>Quantised caches of somewhere/&lt;model&gt;</title>" in shown and "<model>" not in shown
    assert shown.count("<table>") == 2 + len(AVERAGED) and "http" not in re.sub(r"base64,[^\"]*", "", shown)
    sources = re.findall(r'<img src="([^"]*)"', shown)
    pictured = [base64.b64decode(source.removeprefix("data:image/svg+xml;base64,")) for source in sources]
    assert pictured == [(output / name).read_bytes() for name in page.PICTURES]


@needs_matplotlib
def test_a_killed_run_leaves_the_page_and_the_pictures_whole(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = write(tmp_path / "out", records())
    assert run(capsys, "somewhere/model", output, "--render")[0] == 0
    before = {path.name: path.read_bytes() for path in output.iterdir()}

    def torn(path: Path, *args: Any, **options: Any) -> None:
        path.write_text("<svg", encoding="utf-8")
        raise KeyboardInterrupt

    for name in ("quality.svg", "keys.svg"):
        with monkeypatch.context() as patch:
            patch.setitem(page.PICTURES, name, dataclasses.replace(page.PICTURES[name], plot=torn))
            assert run(capsys, "somewhere/model", output, "--render")[0] == 130
        assert {path.name: path.read_bytes() for path in output.iterdir()} == before


@needs_matplotlib
def test_a_report_that_fails_leaves_no_folder(
    folder: str, text: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    narrow = tmp_path / "narrow"
    models.save_llama(narrow, 64)
    models.build("llama", head_dim=16, max_position_embeddings=64).save_pretrained(narrow)
    output = tmp_path / "out"
    words = [*short(text)[:-4], "--preset", "int4-g32"]
    code, _, error = run(capsys, str(narrow), output, *words)
    assert code == 2 and "`--preset int4-g32` does not fit" in error and not output.exists()
    output.mkdir()
    assert run(capsys, str(narrow), output, *words)[0] == 2 and output.is_dir()
    given: list[argparse.Namespace] = []
    monkeypatch.setattr(evaluate, "run_perplexity", given.append)
    monkeypatch.setattr(page, "render", lambda *args, **options: [])
    assert run(capsys, str(narrow), output, *short(text)[:-4])[0] == 0
    assert given[0].preset is None and "int4-g32" in given[0].default_presets


@needs_matplotlib
def test_what_there_is_no_time_for_is_left_out_and_measured_later(
    folder: str, text: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The checks and two windows are always measured, so that there are error bars."""
    output = tmp_path / "out"
    words = [word for word in short(text) if word not in ("--full", "--skip", "tasks")]
    words[words.index("--tokens") + 1] = "180"
    code, _, error = run(capsys, folder, output, *words, "--minutes", "0.0001")
    assert code == 0, error
    found = json.loads((output / page.FILES[page.PLAIN]).read_text(encoding="utf-8"))["parts"]
    assert len([name for name in found if name.startswith("chunked ")]) == 2
    assert "layers" not in found and "keys" not in found
    assert found["left_out"]["what"][0] == "chunked, window 3 of 4" and found["left_out"]["what"][-1] == "layer 1 alone"
    shown = (output / page.PAGE).read_text(encoding="utf-8")
    assert "2 of 4 windows." in shown and "Left out for lack of time: window 3 of 4, window 4 of 4, …" in shown
    assert " ± " in shown.partition("| `int4-token` |")[2].partition("|")[2]
    assert run(capsys, folder, output, *words)[0] == 0
    found = json.loads((output / page.FILES[page.PLAIN]).read_text(encoding="utf-8"))["parts"]
    assert found["left_out"]["what"] == [] and list(found["layers"]) == ["0", "1"]
    shown = (output / page.PAGE).read_text(encoding="utf-8")
    assert "4 of 4 windows." in shown and "Left out" not in shown


def test_data_needs_all(folder: str, text: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, _, error = run(capsys, folder, tmp_path / "out", "--text", text, "--data", str(tmp_path))
    assert code == 2 and "`--data` must come with --full, got it without. Add --full, or leave it out." in error


@pytest.mark.parametrize(
    ("kld", "error", "said"),
    [
        (0.01, 0.001, "good"),
        (0.049, 0.01, "good, or just not"),
        (0.1, None, "tolerable"),
        (0.14, 0.01, "tolerable, or just not"),
        (0.16, 0.01, "too much, or just not"),
        (0.3, 0.01, "too much"),
    ],
)
def test_presets_are_judged_by_the_limits_of_the_pre_flight(kld: float, error: float | None, said: str) -> None:
    assert page.judged({"kld": kld, "kld_standard_error": error}) == said


def test_the_verdict_names_the_smallest_preset_below_each_limit() -> None:
    record = records()[page.PLAIN]
    rows = record["parts"]["summary"]["modes"]["chunked"]
    rows["int4-token"]["kld"] = 0.1
    assert page.verdict(record, 1000).startswith("`int8` is the smallest preset that stays below 0.05 nats per token (")
    assert " `int4-token` is the smallest preset that stays below 0.15 nats per token (" in page.verdict(record, 1000)
    rows["int4-token"]["kld"] = rows["int8"]["kld"] = 0.15
    assert page.verdict(record, 1000).startswith("No preset stays below 0.15 nats per token for certain.")


def test_averages() -> None:
    parts = by_task_and_preset(records()[page.TASKS]["parts"])
    found = averages(parts)
    assert found["none"].value == 0.5 and found["none"].change is None
    assert found["int8"].change_interval == (0, 0) and found["int4-token"].change == pytest.approx(-0.25)
    changes = {task: [0, -1, 0, 0] for task in AVERAGED}
    assert found["int4-token"].change_interval == paired.bootstrap_average(changes)[1]
    assert page.spelled_average(found["int8"]) == "50.0 (+0.0 to +0.0)" and page.spelled_average(None) == "-"
    assert "average, int8: 50.00% (" in average_lines(parts)[1]
    del parts["piqa", "int4-token"]
    assert list(averages(parts)) == ["none", "int8"]


# --- mistakes ---------------------------------------------------------------------------------------------------------


def test_missing_packages(
    folder: str, text: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for package, message in (
        ("matplotlib", "matplotlib must be installed for pictures, got no such package. Install it: pip install "),
        ("lm_eval", "lm-eval must be installed for zero-shot tasks, got no such package. Install it: pip install "),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(importlib.util, "find_spec", lambda name, package=package: None if name == package else True)
            code, _, error = run(capsys, folder, tmp_path / "out", "--text", text, "--full")
        assert code == 2 and message + "'hf-kvquant[eval]'" in error and not (tmp_path / "out").exists()


@needs_matplotlib
@pytest.mark.parametrize(
    "words, message",
    [
        (["--batch-size", "0"], "eval report: `--batch-size` must be at least 1, got 0."),
        (["--context", "0"], "eval report: `--context` must be at least 1, got 0."),
        (["--minutes", "0"], "eval report: `--minutes` must be above 0, got 0."),
        (["--limit", "0"], "eval report: `--limit` must be at least 1, got 0."),
        (["--preset", "int9"], "eval report: `--preset` must be one of none, int8, "),
        (["--text", "nowhere.txt"], "`--text` must be a text file, got nowhere.txt: No such file or directory."),
        (
            ["--output", "nowhere/out"],
            "`--output` must be a folder or a new one in a folder that is there, got nowhere",
        ),
        (["--output", __file__], "test_eval_report.py: a file. Name another."),
        (["--output", "/proc/out"], "must be a folder or a new one in a folder that is there, got /proc/out: no such"),
        (["--render"], "must hold a perplexity.json or perplexity_outliers.json with results, got "),
    ],
)
def test_argument_errors(
    folder: str, text: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, words: list[str], message: str
) -> None:
    code, _, error = run(capsys, folder, tmp_path / "out", *short(text), *words)
    assert code == 2 and message in error and len(error.splitlines()) == 1 and not (tmp_path / "out").exists()


@needs_matplotlib
def test_folders_of_something_else(folder: str, text: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    output = write(tmp_path / "out", records())
    for words in (["--render"], short(text)):
        code, _, error = run(capsys, folder, output, *words)
        assert code == 2 and "got perplexity.json of somewhere/model. Name another folder." in error
    (output / "perplexity.json").write_text("{}", encoding="utf-8")
    code, _, error = run(capsys, "somewhere/model", output, "--render")
    assert (
        code == 2
        and "`--output` must hold nothing but records under these names. RunRecord: `path` must hold card" in error
    )
    assert not (output / page.PAGE).exists()
