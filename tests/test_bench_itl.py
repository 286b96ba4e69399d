"""The benchmark of steps by the tokens held, over a tiny model on the CPU, and what the page says about its results."""

from __future__ import annotations

import importlib
import io
import itertools
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from test_capture import Recorded

from hf_kvquant import PRESETS, KVQuantCache, ops
from hf_kvquant.graphs import capture
from hf_kvquant.graphs.decode_loop import STEPS_AHEAD, _Loop

EVALS = Path(__file__).resolve().parents[1] / "evals"
CURVES = st.dictionaries(st.integers(0, 30), st.integers(0, 20), min_size=1, max_size=5)


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """`bench_itl.py`, where memory reads 10 GB/s and a CPU captures steps."""
    monkeypatch.syspath_prepend(str(EVALS))
    bench = importlib.import_module("bench_itl")
    monkeypatch.setattr(importlib.import_module("bench_generate"), "bandwidth_of", lambda device: 10.0)
    monkeypatch.setitem(capture.RUNNERS, "cpu", Recorded)
    monkeypatch.setattr(capture, "check_graphs", lambda model: None)
    return bench


def run(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], path: Path, *words: str
) -> tuple[dict[str, Any], str]:
    """The results of a run and what it printed; the JSON line and the file hold the same."""
    options = ["--model", "tiny", "--device", "cpu", "--new-tokens", "8", "--output", str(path), "--resume"]
    monkeypatch.setattr(sys, "argv", ["bench_itl.py", *options, *words])
    bench.main()
    printed = capsys.readouterr().out
    results: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    assert json.loads(printed.splitlines()[-1]) == results
    return results, printed


def test_results(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path, measure = tmp_path / "itl.json", bench.measure

    def small(model: Any, arm: str, case: Any, num_new: int) -> Any:
        if (arm, case.name) == ("dynamic", "2x40"):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return measure(model, arm, case, num_new)

    monkeypatch.setattr(bench, "measure", small)
    cases = ("--cases", "1x20", "1x40", "1x60", "2x20", "2x40")
    first, _ = run(bench, monkeypatch, capsys, path, *cases, "--arms", "int4-token", "none")
    results, printed = run(
        bench, monkeypatch, capsys, path, *cases, "--arms", "dynamic", "int4-token", "none", "static"
    )
    assert results["rows"][:10] == first["rows"] and len(results["commands"]) == 2
    rows = {(row["arm"], row["case"]): row for row in results["rows"]}
    assert len(rows) == len(results["rows"]) == 10 + 4 + 4
    for (arm, _), row in rows.items():
        # Six steps are timed, of which the last fills the context. Two layers, keys and values, two heads of 32.
        assert row["tokens"] == row["context"] - 3
        assert row["cache_bytes"] == row["batch"] * row["context"] * (8 * (16 + 4) if arm == "int4-token" else 512)
        assert row["roofline_ms"] == pytest.approx((results["weight_bytes_read"] + row["cache_bytes"]) / 10e6)
        assert 0 < row["p10_ms"] <= row["p90_ms"]
    assert results["failures"] == [
        {
            "arm": "dynamic",
            "case": "2x40",
            "reason": "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
        },
        {"arm": "static", "case": "1x40", "reason": bench.SKIPPED},
    ]
    assert "dynamic, 2x40: OutOfMemoryError" in printed and Recorded.made
    lines = {(line["arm"], line["batch"]): line for line in results["lines"]}
    assert set(lines) == set(itertools.product(("dynamic", "int4-token", "none", "static"), (1, 2)))
    assert lines["dynamic", 2]["us_per_1k"] is None and lines["static", 1]["points"] == 2
    again, _ = run(bench, monkeypatch, capsys, path, *cases, "--arms", "dynamic")
    assert again["rows"] == results["rows"] and len(again["failures"]) == 2


def test_steps_run_ahead_as_in_a_cache_that_generate_makes(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Also with dense windows, where the host would wait for every step of a cache of the user's."""
    ahead: list[int] = []
    run_steps = _Loop._run_steps

    def noted(self: _Loop, report: Any, steps_ahead: int) -> Any:
        ahead.append(steps_ahead)
        return run_steps(self, report, steps_ahead)

    monkeypatch.setattr(_Loop, "_run_steps", noted)
    run(bench, monkeypatch, capsys, tmp_path / "itl.json", "--cases", "1x200", "--arms", "int2")
    assert ahead == [0, STEPS_AHEAD]  # the call that captures returns its cache
    assert not hasattr(KVQuantCache, "_is_user_defined")


def test_every_preset_is_an_arm(bench: ModuleType) -> None:
    assert set(bench.BF16_ARMS) - {"none"} == {"dynamic", "dynamic-no-cudnn", "static"}
    assert set(PRESETS) | set(bench.BF16_ARMS) == set(bench.ARMS)
    assert bench.parse([]).arms == list(bench.ARMS) and bench.parse([]).new_tokens == 32


def test_the_compiled_cache_is_measured_at_two_contexts(bench: ModuleType) -> None:
    cases = bench.parse([]).cases
    kept = [case.name for case in cases if not bench.is_left_out("static", case, cases)]
    assert kept == ["1x1k", "1x32k", "8x1k", "8x16k"]
    assert not any(bench.is_left_out("int4-token", case, cases) for case in cases)
    long = [bench.Case(1, 65536), bench.Case(1, 131072)]
    assert [bench.is_left_out("static", case, long) for case in long] == [False, True]


@pytest.mark.parametrize(
    "words, message",
    [
        (["--new-tokens", "4"], "--new-tokens must be at least 8, got 4"),
        (["--cases", "8"], "invalid parse value: '8'"),
        (["--cases", "1x32"], "--cases must hold more tokens than --new-tokens, 32, got 1x32"),
        (["--arms", "int5"], "invalid choice: 'int5'"),
        (["--resume"], "--resume needs --output, the results to resume"),
    ],
)
def test_arguments(bench: ModuleType, words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench.parse(words)
    assert message in capsys.readouterr().err


def test_kernels_are_needed(bench: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["bench_itl.py", "--device", "cpu"])
    monkeypatch.setattr(ops, "has_kernels", lambda device: False)
    with pytest.raises(SystemExit, match=re.escape("bench_itl: there are no cpu kernels. docs/install.md says how")):
        bench.main()


# --- lines ------------------------------------------------------------------------------------------------------------


def test_least_squares(bench: ModuleType) -> None:
    assert bench.fitted([(1.0, 5.0), (2.0, 7.0), (4.0, 11.0)]) == pytest.approx((3.0, 2.0))
    assert bench.fitted([(0.0, 0.0), (1.0, 3.0), (2.0, 0.0)]) == pytest.approx((1.0, 0.0))
    assert bench.fitted([(1.0, 5.0)]) is None


@pytest.fixture(scope="module")
def overtaking() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patches:
        patches.syspath_prepend(str(EVALS))
        yield importlib.import_module("bench_itl")


@given(curves=st.tuples(CURVES, CURVES))
def test_break_even_is_where_curves_cross_last(
    overtaking: ModuleType, curves: tuple[dict[int, int], dict[int, int]]
) -> None:
    """Behind it `points` are lower at every place; a little before it they are not, unless they always were."""
    points, others = (sorted((float(x), float(y)) for x, y in each.items()) for each in curves)
    start = overtaking.overtakes(points, others)
    begin, end = max(points[0][0], others[0][0]), min(points[-1][0], others[-1][0])
    places = sorted({x for x, _ in (*points, *others) if begin <= x <= end})

    def gain(x: float) -> float:
        difference: float = overtaking.interpolated(others, x) - overtaking.interpolated(points, x)
        return difference

    if start is None:
        assert not places or gain(places[-1]) <= 0
        return
    assert begin <= start <= end and gain(places[-1]) > 0
    assert all(gain(x) > 0 for x in places if x > start)
    assert start == places[0] or gain(start) == pytest.approx(0, abs=1e-9)


def row_of(arm: str, batch: int, tokens: float, step_ms: float) -> dict[str, Any]:
    return {"arm": arm, "case": f"{batch}x{tokens:.0f}", "batch": batch, "tokens": tokens, "step_ms": step_ms}


def test_presets_have_to_beat_every_bf16_cache(bench: ModuleType) -> None:
    rows = [
        *(row_of("none", 2, x, 5 + x / 1000) for x in (1000, 4000, 8000)),
        *(row_of("static", 2, x, 6 + x / 1000) for x in (1000, 4000)),
        *(row_of("int8", 2, x, 6 + x / 2000) for x in (1000, 4000, 8000)),  # beats static always, none from 2000 on
        *(row_of("int4-token", 2, x, 4 + x / 4000) for x in (1000, 4000, 8000)),
        *(row_of("fp8", 2, x, 9 + x / 1000) for x in (1000, 4000, 8000)),
    ]
    lines = {line["arm"]: line for line in bench.lines_of(rows)}
    assert {arm: line["break_even"] for arm, line in lines.items()} == {
        "none": None,
        "int8": pytest.approx(2000),
        "int4-token": 1000,
        "fp8": None,
        "static": None,
    }
    # A token in each of two sequences: two tokens held.
    assert lines["int8"]["us_per_1k"] == pytest.approx(250) and lines["int8"]["fixed_ms"] == pytest.approx(6)
    assert bench.lines_of([row_of("int4-token", 1, 1000, 5.0)])[0]["break_even"] is None


# --- the page ---------------------------------------------------------------------------------------------------------


def results_of(bench: ModuleType) -> dict[str, Any]:
    """Results of two batches, where int8 is faster from 2,000 tokens on, int4 always and fp8 never."""
    lines = {"none": (5, 1.0), "static": (6, 1.0), "int8": (6, 0.5), "int4-token": (4, 0.25), "fp8": (9, 1.0)}
    rows = [
        row_of(arm, batch, x, fixed + slope * batch * x / 1000)
        for arm, (fixed, slope) in lines.items()
        for batch, contexts in ((1, (1000, 32000, 65000)), (8, (1000,)))
        for x in contexts
    ]
    failures = [{"arm": "none", "case": case, "reason": "Error: no room. More."} for case in ("8x64k", "8x128k")]
    failures.append({"arm": "static", "case": "1x4k", "reason": bench.SKIPPED})
    card = {"gpu": "NVIDIA G", "torch": "2.11", "transformers": "5.17", "date": "2026-11-26 10:00 UTC"}
    return {"rows": rows, "lines": bench.lines_of(rows), "failures": failures, **card}


def test_page(bench: ModuleType) -> None:
    render = importlib.import_module("render_itl")
    results = results_of(bench)
    assert render.slope_table(results).splitlines() == [
        "| cache | batch 1: µs per 1,000 tokens | ms besides | faster from | 8 x 1000: ms |",
        "|---|--:|--:|--:|--:|",
        "| bf16, captured | 1000.00 | 5.00 |  | 13.00 |",
        "| `int8` | 500.00 | 6.00 | 2,000 | 10.00 |",
        "| `int4-token` | 250.00 | 4.00 | all | 6.00 |",
        "| `fp8` | 1000.00 | 9.00 | - | 17.00 |",
        "| transformers, static | 1000.00 | 6.00 |  | 14.00 |",
    ]
    text = render.caption(results)
    assert "Not measured: bf16, captured at 8 x 64k, 8 x 128k (Error: no room); transformers, static at 1 x 4k" in text
    assert text.endswith(" NVIDIA G, torch 2.11, transformers 5.17, 2026-11-26, `evals/results/itl.json`.")
    assert "Not measured" not in render.caption({**results, "failures": []})
    only = [row for row in results["rows"] if (row["arm"], row["batch"]) != ("int8", 8)]
    assert "| `int8` | 500.00 | 6.00 | 2,000 | - |" in render.slope_table({**results, "rows": only})
    Console(file=io.StringIO()).print(bench.lines_table(results))


def test_picture(bench: ModuleType, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    render = importlib.import_module("render_itl")
    numbers = render.plotted(results_of(bench))
    assert list(numbers["steps"]) == ["1"] and list(numbers["steps"]["1"]) == ["static", "none", "int8", "int4-token"]
    assert numbers["steps"]["1"]["int4-token"][0][0] == 1000 and numbers["gpu"] == "G"
    render.draw(numbers, tmp_path / "itl.svg")
    drawn = (tmp_path / "itl.svg").read_text(encoding="utf-8")
    for text in (
        "1,000 tokens cost a step 250.0 µs with int4",
        "ms a step, one sequence (G)",
        "bf16, captured",
        "16k",
    ):
        assert text in drawn


def test_a_page_without_results_says_so(bench: ModuleType) -> None:
    render = importlib.import_module("render_readme")
    results = {name: each for name, each in render.load_all().items() if name != "itl"}
    assert render.parts(results)["itl"] == "Not measured yet."
    shown = render.parts({**results, "itl": results_of(bench)})["itl"]
    assert shown.startswith("![Line charts: ") and "| `int8` | 500.00 |" in shown and shown.endswith("`.")
