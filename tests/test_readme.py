"""That numbers on the README and on the pages of `docs/` are those of results files, and what the README must have.

That code blocks run and links lead somewhere is in `test_docs.py`.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from drawn import described

import hf_kvquant
from hf_kvquant import PRESETS
from hf_kvquant_evals.tasks.data import AVERAGED

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def renderer() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patches:
        patches.syspath_prepend(str(ROOT / "evals"))  # as for a script there
        yield importlib.import_module("render_readme")


def test_parts_are_those_of_the_results(renderer: ModuleType) -> None:
    """Every page is what rendering makes of it, and every part stands on some page."""
    results = renderer.load_all()
    texts = renderer.parts(results)
    pages = {page: page.read_text(encoding="utf-8") for page in renderer.PAGES}
    for page, text in pages.items():
        assert renderer.rendered(text, texts) == text, f"{page.name}: run: python evals/render_readme.py"
    shown = [found[2] for text in pages.values() for found in renderer.MARKED.finditer(text)]
    assert set(shown) == set(texts) and len(texts) == len(renderer.PARTS)


def test_pictures_are_those_of_the_results(renderer: ModuleType) -> None:
    results = renderer.load_all()
    for picture in renderer.PICTURES:
        assert described(renderer.RESULTS / f"{picture.name}.svg") == picture.plotted(picture.of(results))
    drawn = {path.stem for path in renderer.RESULTS.glob("*.svg")}
    assert {picture.name for picture in renderer.PICTURES} == drawn


def test_rendering_fills_what_is_between_markers(renderer: ModuleType) -> None:
    page = "a\n<!-- begin: x -->\nold\n<!-- end -->\nb\n<!-- begin: y -->\n<!-- end -->\n"
    shown = renderer.rendered(page, {"x": "new", "y": "| 1 |", "z": "elsewhere"})
    assert shown == ("a\n<!-- begin: x -->\n\nnew\n\n<!-- end -->\nb\n<!-- begin: y -->\n\n| 1 |\n\n<!-- end -->\n")
    with pytest.raises(KeyError):
        renderer.rendered(page, {"x": "new"})


def test_templates_are_filled_with_results(renderer: ModuleType) -> None:
    made = importlib.import_module("parts")
    row = {"cpu": "C", "gpu": None, "ours": {"ms": 2.0}, "theirs": {"ms": 5.0}, "date": "2026-11-29 10:00 UTC"}
    told = "{gpu|cpu}, {theirs.ms/ours.ms:.1f}x, {ours.ms:milli.0f}, {date:day}"
    assert made.filled(told, row) == "C, 2.5x, 2000, 2026-11-29"
    assert made.Text("{cpu}", "{more}", more=lambda results: results["ours"]["ms"])(row) == "C 2.0"
    # What is missing is a dash in a table, and an error in a text.
    for absent in ("{gpu}", "{others.ms}", "{ours.us:.1f} ms", "{others.ms/ours.ms:.1f}x"):
        assert made.shown(absent, row) == "-"
        with pytest.raises(KeyError):
            made.Text(absent)(row)
    with pytest.raises(KeyError):
        made.shown(lambda found: found["others"], row)


def test_tables_of_rows_and_of_groups(renderer: ModuleType) -> None:
    made = importlib.import_module("parts")
    rows = [{"case": "1x2k", "rows": [{"preset": "int8", "us": 1.0}, {"preset": "int4", "us": None}]}]
    rows.append({"case": "8x16k", "rows": [{"preset": "int4", "us": 3.0}]})
    columns = [("case", "{case:x}"), ("µs", "{us:.1f}"), ("µs", made.of("more", "{us}"))]
    table = made.Table(lambda results: made.flat(results, "cases", "rows"), columns)
    lines = [
        "| case | µs | µs |",
        "|---|--:|--:|",
        "| 1 x 2k | 1.0 | - |",
        "| 1 x 2k | - | - |",
        "| 8 x 16k | 3.0 | - |",
    ]
    assert table({"cases": rows}).splitlines() == lines
    pivot = made.Pivot(table.rows, {"preset": "`{preset}`"}, {"{case}, µs": "{us:.1f}", "n": lambda row: "1"})
    assert pivot({"cases": rows}).splitlines() == [
        "| preset | 1x2k, µs | n | 8x16k, µs | n |",
        "|---|--:|--:|--:|--:|",
        "| `int8` | 1.0 | 1 | - | - |",
        "| `int4` | - | 1 | 3.0 | 1 |",
    ]


def test_a_result_that_changes_changes_the_pages(renderer: ModuleType) -> None:
    results = renderer.load_all()
    before = renderer.parts(results)
    for name in ("fidelity", "real_generate"):
        results[name]["presets"]["int4-token"]["perplexity_change"] = 1.0
    after = renderer.parts(results)
    assert {name for name in before if before[name] != after[name]} == {"summary", "quality", "real", "windows"}
    assert "+100.00%" in after["summary"]


def test_a_larger_model_has_tables_once_it_is_measured(renderer: ModuleType) -> None:
    """The reference model's results stand in for it: no numbers are shown without results, all recipes with them."""
    names = ("recipes-larger", "ablation-larger")
    larger = ("recipes_larger", "ablation_larger", "ablation_larger_outliers")
    results = {name: found for name, found in renderer.load_all().items() if name not in larger}
    before = renderer.parts(results)
    assert [before[name] for name in names] == ["Not measured yet."] * 2
    plain = results["recipes"]["runs"]["plain"]
    of_tasks = {
        "num_items": 5,
        "accuracy": 0.6,
        "reference_accuracy": 0.5,
        "change": 0.1,
        "change_standard_error": 0.02,
    }
    of_tasks |= {"log_likelihood_change": -0.25, "standard_error": 0.125}
    of_tasks |= {"same": 0.75, "read_from_codes": 0.375}
    rows = {name: {**row, "tasks": of_tasks} for name, row in plain["recipes"].items()}
    tasks = {**plain, "recipes": rows, "tasks": ["piqa"], "task_context": 512}
    codes = {**tasks, "recipes": {"int8:0+0": rows["int8:0+0"]}}
    runs = {**results["recipes"]["runs"], "long": plain, "tasks": tasks, "tasks-codes": codes}
    stand_ins = {"runs": runs}, results["ablation"], results["ablation_outliers"]
    measured = dict(zip(larger, stand_ins, strict=True))
    after = renderer.parts({**results, **measured})
    assert {name for name in before if before[name] != after[name]} == set(names)
    for recipe in results["recipes"]["runs"]["plain"]["recipes"]:
        # Quality, its texts, longer ones, and tasks.
        assert after["recipes-larger"].count(f"| `{recipe}` |") == 4
    cells = "38% | 60.0% | +10.0 ± 2.0 | -0.250 ± 0.125 | 75.0%"
    assert f"| `int8:0+0` | 8.12 | {cells} | -0.250 ± 0.125 | 75.0% |" in after["recipes-larger"]
    assert f"| `int4-token` | 4.25 | {cells} | - | - |" in after["recipes-larger"]
    assert "answers 50.0% correctly" in after["recipes-larger"]
    assert after["ablation-larger"].splitlines()[:-1] == before["ablation"].splitlines()[:-1]
    plotted = renderer.render_recipes.plotted
    assert len(plotted({**results, **measured})) == 2 * len(plotted(results))


def test_readme_table(renderer: ModuleType) -> None:
    """Some presets, each with the numbers of three files."""
    results = renderer.load_all()
    lines = renderer.render_summary.summary_table(results).splitlines()
    rows = {row[0]: row[1:] for row in ([cell.strip() for cell in line.split("|")[1:-1]] for line in lines[2:])}
    assert set(rows) <= {f"`{name}`" for name in PRESETS} and len(rows) == len(renderer.pictures.SUMMARY_PRESETS)
    row = next(row for row in results["cpu_decode"]["rows"] if row["preset"] == "int8")
    assert rows["`int8`"][-1] == f"{row['speedup']:.1f}x"


def test_what_was_measured_without_dense_tokens_is_marked(renderer: ModuleType) -> None:
    measured, names = {"int8": 1.0, "k8v4:0+0": 2.0}, ["int8", "k8v4", "int4"]
    found, bare_note = renderer.render_quality.found, renderer.render_quality.bare_note
    assert [found(measured, name) for name in names] == [1.0, 2.0, None]
    assert bare_note("Speed", measured, names) == " Speed of `k8v4`: without dense tokens."
    measured["k8v4"] = 3.0
    assert found(measured, "k8v4") == 3.0 and bare_note("Speed", measured, names) == ""


def test_readme_is_read_in_a_few_minutes() -> None:
    assert len(README.split()) <= 900


def test_quality_table(renderer: ModuleType) -> None:
    """Each preset's row has the numbers of all three files; an answer that changes, changes the average."""
    results = renderer.load_all()
    files = {name: results[name] for name in ("fidelity", "tasks", "cpu_decode")}
    quality_table, tasks = renderer.render_quality.quality_table, files["tasks"]
    before = quality_table(files)
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in before.splitlines()]
    assert rows[0][6] == "zero-shot average, %" and [row[0] for row in rows[2:]] == [f"`{name}`" for name in PRESETS]
    right = [tasks["parts"][f"{task}/none"]["items"]["acc"] for task in AVERAGED]
    assert rows[2][6] == f"{100 * sum(sum(items) / len(items) for items in right) / len(right):.1f}"
    assert all(re.fullmatch(r"\d+\.\d \([+-]\d+\.\d to [+-]\d+\.\d\)", row[6]) for row in rows[3:])
    items = tasks["parts"][f"{AVERAGED[0]}/int4"]["items"]
    items["acc"] = [1 - value for value in items["acc"]]
    assert quality_table(files) != before


def test_needle_table(renderer: ModuleType) -> None:
    """Numbers count where the unquantised cache finds them, by length; log-likelihoods everywhere."""

    def part(whole: list[bool], int4: list[bool]) -> dict[str, Any]:
        return {"none": {"correct": whole}, "int4": {"correct": int4}}

    found, half = [True] * 4, [True, False] * 2
    summary = {"num_cells": 3, "num_scored": 2, "accuracy": 1.0, "log_likelihood_change": 0.0, "standard_error": 0.0}
    int4 = {**summary, "accuracy": 0.75, "log_likelihood_change": -0.5, "standard_error": 0.125}
    parts = {
        "passkey/1024/0": part(found, half),
        "needle/1024/0": part(found, found),
        "needle/2048/50": part(half, found),
        "summary": {"none": summary, "int4": int4},
    }
    # Of eight items, two are lost: a variance of 2 - 4 / 8 over 64.
    error = 100 * 1.5**0.5 / 8
    assert renderer.render_real.needle_table({"parts": parts}).splitlines()[2:] == [
        "| `none` | 100% | - | 100.0% | +0.0 ± 0.0 | +0.000 ± 0.000 |",
        f"| `int4` | 75% | - | 75.0% | -25.0 ± {error:.1f} | -0.500 ± 0.125 |",
    ]


def gpu_results() -> dict[str, Any]:
    """What `bench_decode.py` writes, as far as the README shows it, with made-up numbers."""

    def case(name: str, batch: int, context: int, best_us: float | None, is_ragged: bool = False) -> dict[str, Any]:
        shape = {"batch": batch, "num_q_heads": 32, "num_kv_heads": 8, "head_dim": 128, "context": context}
        peers = [
            {"peer": "bf16 torch cuDNN", "median_us": best_us},
            {"peer": "int4 FBGEMM, 1 group", "median_us": 560.0},
        ]
        return {
            "case": name,
            "shape": {**shape, "is_ragged": is_ragged},
            "rows": [
                {"preset": "int8", "median_us": 254.4, "bytes": 1090e6, "share": 0.964, "speedup": 1.941},
                {"preset": "int4", "median_us": 9.87, "bytes": 570e6, "share": 0.925, "speedup": None},
            ],
            "peers": [] if best_us is None else peers,
            "best_bf16": None if best_us is None else {"peer": "bf16 torch cuDNN", "median_us": best_us},
        }

    return {
        "gpu": "Some GPU",
        "driver": "1.2",
        "cuda": "13.0",
        "date": "2026-11-20 10:00 UTC",
        "query_dtype": "bfloat16",
        "replays": 40,
        "peer_versions": {"torch": "2.11.0", "flashinfer-python": "0.7.2", "fbgemm-gpu-genai": None},
        "checks": [{"reached": True}, {"reached": False}, {"reached": None}],
        "cases": [
            case("64x8k", 64, 8192, 495.0),
            case("1x8k", 1, 8192, None),
            case("64x16k-ragged", 64, 16384, 480.0, is_ragged=True),
        ],
    }


def test_gpu_tables(renderer: ModuleType) -> None:
    gpu = gpu_results()
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in renderer.render_decode.gpu_table(gpu).splitlines()
    ]
    assert rows[2] == ["64 x 8k", "32/8", "495", "254", "1.94x", "96%", "9.9", "-", "92%"]
    assert rows[3][:3] == ["64 x 1 to 16k", "32/8", "480"] and rows[4][:3] == ["1 x 8k", "32/8", "-"]
    assert {len(row) for row in rows} == {9}
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in renderer.render_decode.peer_table(gpu).splitlines()
    ]
    assert rows[0] == ["kernel, µs", "64 x 8k, 32/8", "1 x 8k, 32/8"]
    assert rows[2:] == [
        ["hf_kvquant `int8`", "254", "254"],
        ["hf_kvquant `int4`", "9.9", "9.9"],
        ["torch cuDNN, bf16", "495", "-"],
        ["FBGEMM, 1 group, int4", "560", "-"],
    ]
    caption = renderer.render_decode.gpu_caption(gpu)
    assert "Some GPU" in caption and "Driver 1.2, CUDA 13.0, 2026-11-20" in caption
    assert "torch 2.11.0, flashinfer 0.7.2." in renderer.render_decode.peer_caption(gpu)


def generate_results() -> dict[str, Any]:
    """A results file of bench_generate.py, of which one case lacks transformers' cache."""

    def row(system: str, step_ms: float, cache_bytes: int, start_s: float) -> dict[str, Any]:
        speeds = {"step_ms": step_ms, "tokens_per_s": 8000 / step_ms, "start_s": start_s}
        return {"system": system, **speeds, "cache_bytes": cache_bytes}

    ours = [
        row("int8-static", 8.0, 8_000_000_000, 20.0),
        row("int4-static", 7.0, 4_000_000_000, 21.4),
        row("int4-capture", 5.0, 4_000_000_000, 0.4),
        row("int4-token-capture", 4.0, 4_000_000_000, 0.4),
    ]
    floor = {"step_ms": 6.0}
    return {
        "parameters": 8.03e9,
        "dtype": "bfloat16",
        "torch": "2.11.0",
        "transformers": "5.17.0",
        "gpu": "Another GPU",
        "date": "2026-11-22 10:00 UTC",
        "cases": [
            {"case": "8x16k", "floor": floor, "rows": [row("static", 45.0, 17_000_000_000, 25.0), *ours]},
            {"case": "64x8k", "floor": floor, "rows": ours[1:]},
        ],
    }


def test_generate_table(renderer: ModuleType) -> None:
    results = generate_results()
    lines = renderer.render_generate.step_table(results).splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    assert {len(row) for row in rows} == {9}
    speeds = ["45.00 (178)", "8.00 (1,000)", "7.00 (1,143)", "5.00 (1,600)", "4.00 (2,000)"]
    assert rows[2] == ["8 x 16k", "6.00", *speeds, "9.0x", "17.00, 8.00, 4.00"]
    assert rows[3] == ["64 x 8k", "6.00", "-", "-", *speeds[2:], "-", "-, -, 4.00"]
    caption = renderer.render_generate.caption(results)
    assert "takes 21 to 21 s" in caption and "0.4 to 0.4 s with capture" in caption and "8.0 billion" in caption
    del results["cases"][1]  # which lacks transformers' cache
    told = renderer.render_summary.end_to_end({"generate": results})
    assert "on an Another GPU, a step of `generate` takes 5.0 ms with `int4` and 45.0 ms with" in told
    assert told.endswith("(9.0x). The cache takes 4.0 GB instead of 17.0 GB.")


def scenario_results() -> dict[str, Any]:
    """A results file of bench_generate.py with scenarios only."""

    def first(system: str, seconds: float, peak_bytes: int) -> dict[str, Any]:
        return {"system": system, "first_token_s": seconds, "peak_bytes": peak_bytes}

    def speed(tokens_per_s: float, **more: Any) -> dict[str, Any]:
        return {"tokens_per_s": tokens_per_s, "accepted": 2.44, "equal": True, "is_captured": False, **more}

    slow = {"system": "dynamic", "plain": speed(40.0), "assistant": speed(90.4), "lookup": None}
    slow["failures"] = {"lookup": "TypeError: no lookup"}
    fast = {
        "system": "int4-capture",
        "plain": speed(150.0),
        "assistant": speed(300.0, is_captured=True, equal=False, equal_tokens=7),
        "lookup": speed(250.0),
    }
    refusal = {"system": "static", "reason": "ValueError: not with static caches."}
    turns = [first("static", 0.08, 1), first("int4-capture", 0.0512, 1)]
    prompts = [first("int4-capture", 14.31, 33_000_000_000)]
    return {
        **{key: generate_results()[key] for key in ("dtype", "torch", "transformers", "gpu", "date")},
        "scenarios": [
            {"kind": "turn", "context": 32768, "size": 512, "rows": turns, "failures": []},
            {"kind": "chunked", "context": 131008, "size": 2048, "rows": prompts, "failures": []},
            {"kind": "assisted", "context": 32768, "size": 128, "rows": [slow, fast], "failures": [refusal]},
        ],
    }


def test_scenario_table(renderer: ModuleType) -> None:
    results = scenario_results()
    lines = renderer.render_generate.scenario_table(results).splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    assert {len(row) for row in rows} == {7}
    assert rows[2:] == [
        ["transformers, dynamic", "-", "-", "-", "40", "90 (2.4)", "-"],
        ["transformers, static", "80", "-", "-", "-", "-", "-"],
        ["`int4`, captured", "51", "14.3", "33.0", "150", "300 (2.4, same for 7 tokens)", "250 (2.4, not captured)"],
    ]
    caption = renderer.render_generate.scenario_caption(results)
    assert "512 new tokens behind 32,768 in the cache" in caption and "131,008 tokens in chunks of 2,048" in caption
    reasons = "transformers, static: ValueError: not with static caches; transformers, dynamic: TypeError: no lookup"
    assert f"A dash: not measured ({reasons})." in caption


def chunk_results() -> dict[str, Any]:
    """A results file of bench_chunks.py with one case."""
    us = {"flash": 1511.4, "cudnn": 799.0, "fa3": 850.0, "int8": 1145.0, "int4": 710.0, "fp8": 1200.0}
    speedup = {"int8": 0.698, "int4": 1.125, "fp8": 0.666}
    case = {"batch": 1, "length": 32768, "num_new": 256, "us": us, "speedup": speedup}
    card = {"gpu": "Some GPU", "torch": "2.11.0", "date": "2026-11-24 10:00 UTC", "head_dim": 128}
    return {**card, "peer_versions": {"flashinfer-python": "0.7.2"}, "cases": [case]}


def test_chunk_table(renderer: ModuleType) -> None:
    lines = renderer.render_chunks.chunk_table(chunk_results()).splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    peers = ["flash, bf16, µs", "cuDNN, bf16, µs", "FlashInfer FA3, bf16, µs"]
    assert rows[0][1:6] == [*peers, "`int8`, µs", "`int4`, µs"]
    assert rows[2:] == [["1 x 32k + 256", "1,511", "799", "850", "1,145", "710", "0.70x", "1.12x"]]
    assert "Some GPU, torch 2.11.0, flashinfer 0.7.2, 2026-11-24" in renderer.render_chunks.caption(chunk_results())
    results = chunk_results()
    results["cases"][0]["num_new"], results["peer_versions"] = 1024, {"fa3-fwd": "0.0.3"}
    assert len(renderer.render_chunks.chunk_table(results).splitlines()) == 2  # the other run has these
    assert "| 1 x 32k + 1,024 | 1,511 |" in renderer.render_chunks.long_table(results)
    assert "fa3-fwd 0.0.3" in renderer.render_chunks.long_caption(results)


def test_chunk_pages_sentence(renderer: ModuleType) -> None:
    results = chunk_results()
    us = {"none": 100.0, "int8": 100.0, "int4": 100.0}
    cases = {1: (900.0, 900.0, 900.0), 4: (110.0, 80.0, 117.0), 32: (108.0, 99.0, 101.0), 1024: (109.0, 100.0, 105.0)}
    results["cases"] = [
        {"num_new": num_new, "us": us, "pages_us": dict(zip(us, pages, strict=True))}
        for num_new, pages in cases.items()
    ]
    sentence = renderer.render_chunks.pages_sentence(results)
    assert "changes by -1% to +5% from 32 new tokens on, and by -20% to +17% with fewer." in sentence
    assert "With `none` it changes by +8% to +10%." in sentence
    assert "Some GPU, torch 2.11.0, 2026-11-24" in sentence


def test_host_sentence(renderer: ModuleType) -> None:
    def found(prompt: int, host_s: float, step_s: float) -> dict[str, Any]:
        times = {"host_s": {"median": host_s}, "next_token_s": {"median": step_s}}
        rows = [{"system": "flash", **times}, {"system": "int4-token", **times}]
        return {"requests": 64, "prompt": prompt, "rows": rows}

    results = {**batching_results(), "workloads": [found(65536, 0.0026, 0.0293), found(1024, 0.0021, 0.0066)]}
    sentence = renderer.render_batching.host_sentence(results)
    assert (
        "With 64 requests of 1,024 tokens each, that takes 2.1 ms of 6.6 ms; of 65,536 tokens each, 2.6 ms of"
        in sentence
    )
    assert "of 29.3 ms (`int4-token`, " in sentence and results["gpu"] in sentence


def batching_results() -> dict[str, Any]:
    """A results file of bench_batching.py with one workload that both systems end, and one that only ours does."""

    def row(system: str, speed: float, held: int, first: float) -> dict[str, Any]:
        figures = {"output_tokens_per_s": speed, "most_held_tokens": held, "first_token_s": {"median": first}}
        return {"system": system, **figures}

    theirs, ours = row("flash", 4616.3, 156892, 22.26), row("int4-token", 8127.0, 562337, 9.1)
    unique = {"requests": 512, "prompt": 1024, "new": [128, 896], "is_shared": False, "cache_gb": 24.0}
    shared = {"requests": 256, "prompt": 16384, "new": [512, 512], "is_shared": True, "cache_gb": None}
    card = {key: generate_results()[key] for key in ("torch", "transformers", "gpu", "date")}
    few = {
        **unique,
        "requests": 51,
        "rows": [row("transformers", 229.3, 58915, 2.16), row("int8", 3000.4, 58966, 1.28)],
    }
    workloads = [{**shared, "workload": "W4", "rows": [ours, theirs]}, {**few, "workload": "W1"}]
    return {**card, "workloads": [*workloads, {**unique, "workload": "W1", "rows": [theirs, ours]}]}


def test_batching_table(renderer: ModuleType) -> None:
    results = batching_results()
    lines = renderer.render_batching.throughput_table(results).splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    assert {len(row) for row in rows} == {9}
    assert rows[2] == [
        "512", "1,024", "128 to 896", "24 GB", "4,616", "8,127", "1.8x", "157k, 562k", "22.3, 9.1",
    ]  # fmt: skip
    assert rows[3][:4] == ["256", "16,384, shared", "512", "all memory"] and len(rows) == 4
    assert results["gpu"] in renderer.render_batching.caption(results)
    assert results["gpu"] in renderer.render_batching.memory_caption(results)
    assert "writes 1.8 to 1.8 times the tokens a second" in renderer.render_batching.gain_sentence(results)
    lines = renderer.render_batching.systems_table(results).splitlines()
    assert [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if "---" not in line] == [
        ["tokens/s", "24 GB, 512 requests", "24 GB, 51 requests"],
        ["transformers, sdpa", "-", "229"],
        ["transformers, FlashAttention-2", "4,616", "-"],
        ["`int4-token`", "8,127", "-"],
        ["`int8`", "-", "3,000"],
    ]


def test_batching_picture(renderer: ModuleType, tmp_path: Path) -> None:
    """One workload is shown, with as many requests, whatever order its memories were measured in."""
    results = batching_results()
    shared, _, unique = results["workloads"]
    sizes = {"flash": 131072, "int4-token": 34816, "int8": 67584}

    def found(memory: float, speeds: dict[str, float], **changed: Any) -> dict[str, Any]:
        rows = [
            {"system": name, "output_tokens_per_s": speed, "bytes_per_token": sizes[name]}
            | {"room_tokens": memory * 1e9 / sizes[name]}
            for name, speed in speeds.items()
        ]
        return {**unique, "workload": "W1", "rows": rows, **changed}

    results["workloads"] = [
        found(100.0, {"flash": 5000.0}),
        found(24.0, {"int4-token": 8000.0, "flash": 4600.0}),
        found(24.0, {"int4-token": 9.0}, requests=26),
        {**shared, "workload": "W4"},
    ]
    numbers = renderer.render_batching.plotted(results)
    assert numbers["throughput"] == {
        "flash": [[pytest.approx(24.0), 4600.0], [pytest.approx(100.0), 5000.0]],
        "int4-token": [[pytest.approx(24.0), 8000.0]],
    }
    assert (numbers["requests"], numbers["prompt"], numbers["new"]) == (512, 1024, [128, 896])
    pytest.importorskip("matplotlib")
    renderer.render_batching.draw(numbers, tmp_path / "batching.svg")
    drawn = (tmp_path / "batching.svg").read_text(encoding="utf-8")
    assert "24 GB of int4-token serve 1.6 times what 100 GB of bf16 do" in drawn


def test_parts_of_results_that_may_be_missing(
    renderer: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """They are made if their file exists, and say that they are not measured if it does not."""
    names = {"chunks", "scenarios", "batching"}
    for name in renderer.load_all().keys() - names:
        (tmp_path / f"{name}.json").write_text((renderer.RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    monkeypatch.setattr(renderer, "RESULTS", tmp_path)
    before = renderer.parts(renderer.load_all())
    (tmp_path / "chunks.json").write_text(json.dumps(chunk_results()), encoding="utf-8")
    (tmp_path / "scenarios.json").write_text(json.dumps(scenario_results()), encoding="utf-8")
    (tmp_path / "batching.json").write_text(json.dumps(batching_results()), encoding="utf-8")
    after = renderer.parts(renderer.load_all())
    assert {name for name in before if before[name] == "Not measured yet."} >= names
    assert {name for name in before if before[name] != after[name]} == {*names, "summary"}
    assert "In continuous batching" in after["summary"] and "In continuous batching" not in before["summary"]
    assert "1 x 32k + 256" in after["chunks"] and "`evals/results/chunks.json`" in after["chunks"]
    assert "transformers, static" in after["scenarios"] and "`evals/results/scenarios.json`" in after["scenarios"]


def test_gpu_picture_shows_the_results(renderer: ModuleType) -> None:
    numbers = renderer.pictures.plotted_decode(gpu_results())
    assert numbers["time"] == {"int8": [[8192, 254.4]], "int4": [[8192, 9.87]]}
    assert numbers["share"] == {"int8": [[1090.0, 0.964]] * 2, "int4": [[570.0, 0.925]] * 2}


def test_picture_of_steps_has_numbers_at_its_axes(
    renderer: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """And no arm looks like another that may lie on it."""
    figure = pytest.importorskip("matplotlib.figure")
    seen: list[list[tuple[int, int]]] = []
    save = figure.Figure.savefig

    def spied(self: Any, *args: Any, **options: Any) -> None:
        seen.append([(len(axes.get_xticks()), len(axes.get_yticks())) for axes in self.axes])
        save(self, *args, **options)

    monkeypatch.setattr(figure.Figure, "savefig", spied)
    numbers = renderer.render_itl.plotted(renderer.load_all()["itl"])
    renderer.render_itl.draw(numbers, tmp_path / "itl.svg")
    assert len(seen[0]) == len(numbers["steps"]) and min(min(ticks) for ticks in seen[0]) >= 3
    drawn = renderer.render_itl.DRAWN
    assert len({(look["color"], look["marker"], look.get("linestyle")) for look in drawn.values()}) == len(drawn)
    assert drawn["int4-token"]["markerfacecolor"] == "none" and list(drawn)[-1] == "int4-token"


def test_generate_picture_shows_the_results(renderer: ModuleType) -> None:
    found = renderer.pictures.plotted_generate(generate_results())
    ours = {"int4-static": 7.0, "int4-capture": 5.0}
    assert found["steps"] == {
        "8x16k": {"static": 45.0, "int8-static": 8.0, **ours},
        "64x8k": {"static": None, "int8-static": None, **ours},
    }


def test_results_are_those_of_the_model_that_ships(renderer: ModuleType) -> None:
    weights = (ROOT / "evals" / "reference_model" / "model.safetensors").read_bytes()
    for recorded in (renderer.load("fidelity"), renderer.load("tasks")["settings"]):
        found = recorded["weights_sha256"]["model.safetensors"]
        assert found == hashlib.sha256(weights).hexdigest(), "run: make quality"


def test_every_preset_is_in_every_table(renderer: ModuleType) -> None:
    page = (ROOT / "docs" / "presets.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([a-z0-9-]+)` \|", page, flags=re.MULTILINE)
    measured = renderer.load("fidelity")["presets"]
    real = renderer.render_real.measured_presets(renderer.load_all())
    with_windows = [name.partition(":")[0] for name in (*renderer.render_real.WITH_WINDOWS, "quanto-4")]
    # When to take it, what it stores, and what was measured on both models; the unquantised one is not in all.
    assert sorted(rows) == sorted([*PRESETS, *PRESETS, *measured, *real.keys() - {"none"}, *with_windows])


@pytest.mark.parametrize("path", sorted((ROOT / "evals" / "results").glob("*.json")), ids=lambda path: path.name)
def test_results_name_no_machine_path(path: Path) -> None:
    for word in strings(json.loads(path.read_text(encoding="utf-8"))):
        assert not any(part.startswith("/") for part in word.split()), word


def strings(value: Any) -> list[str]:
    """Every string in a parsed JSON file."""
    if isinstance(value, dict):
        return [word for key, item in value.items() for word in [key, *strings(item)]]
    if isinstance(value, list):
        return [word for item in value for word in strings(item)]
    return [value] if isinstance(value, str) else []


def test_commands_of_the_first_screen_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    first_screen = "\n".join(README.splitlines()[:45])
    for target in ("demo", "test"):
        assert f"make {target}" in first_screen and re.search(rf"^{target}:", makefile, flags=re.MULTILINE)
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


def test_every_preset_is_measured() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    averaged, presets = (re.search(rf"^QUALITY_{name} := (.*)$", makefile, re.M) for name in ("AVERAGED", "PRESETS"))
    assert averaged is not None and averaged[1].split() == list(AVERAGED)
    assert presets is not None and presets[1].split() == [name for name in PRESETS if name != "none"]


def test_changelog_has_this_version() -> None:
    versions = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert versions[0] == hf_kvquant.__version__


def test_citation_has_this_version() -> None:
    found = re.findall(r"^version: (\S+)$", (ROOT / "CITATION.cff").read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert found == [hf_kvquant.__version__]


def test_demo_prompts_are_there() -> None:
    prompts = sorted((ROOT / "evals" / "demo_prompts").glob("*.txt"))
    assert prompts and all(prompt.read_text(encoding="utf-8").strip() for prompt in prompts)
