"""The benchmark of 4-bit weights, over a tiny model on the CPU, where every product takes 10 us."""

from __future__ import annotations

import importlib
import io
import json
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

import models
import pytest
import torch
from rich.console import Console
from test_capture import Recorded
from torch import nn

from hf_kvquant import KVQuantCache
from hf_kvquant.graphs import capture

EVALS = Path(__file__).resolve().parents[1] / "evals"


@pytest.fixture
def methods(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(EVALS))
    return importlib.import_module("weight_methods")


@pytest.fixture
def bench(methods: ModuleType, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    bench = importlib.import_module("bench_weights")
    timing = importlib.import_module("gpu_timing")

    def time_calls(run: Callable[[int], object], num_sets: int, replays: int) -> Any:
        for i in range(num_sets):
            run(i)
        return timing.Timing(10.0, 9.0, 11.0, num_sets, True)

    def half(linear: nn.Linear) -> nn.Module:
        """A layer of half the bytes, by its parameters."""
        linear.weight = nn.Parameter(linear.weight.to(torch.float8_e4m3fn), requires_grad=False)
        linear.forward = lambda x: nn.functional.linear(x, linear.weight.to(x.dtype))  # type: ignore[method-assign]
        return linear

    def fail(linear: nn.Linear) -> nn.Module:
        raise ImportError("no such package in /somewhere/else.so")

    monkeypatch.setattr(bench, "time_calls", time_calls)
    monkeypatch.setattr(bench, "MANY_ROWS", (64,))
    monkeypatch.setattr(bench, "bandwidth_of", lambda device: 10.0)
    monkeypatch.setitem(capture.RUNNERS, "cpu", Recorded)
    monkeypatch.setattr(capture, "check_graphs", lambda model: None)
    for name, method in {"half": half, "absent": fail}.items():
        monkeypatch.setitem(methods.METHODS, name, methods.Method("float8", ("torch", "no-such-package"), method))
    return bench


def test_results(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "weights.json"
    words = ["--model", "tiny", "--device", "cpu", "--new-tokens", "8", "--cases", "1x20", "2x12"]
    words += ["--output", str(path), "--resume", "--methods", "bf16"]
    monkeypatch.setattr(bench, "GOALS", {"1x20": 1000.0, "2x12": 0.0, "1x2k": 0.5})
    for methods in ([], ["half", "absent"]):
        monkeypatch.setattr(sys, "argv", ["bench_weights.py", *words, *methods])
        bench.main()
    results = json.loads(path.read_text(encoding="utf-8"))
    printed = capsys.readouterr().out
    assert len(results["commands"]) == 2
    assert json.loads(printed.splitlines()[-1]) == results
    plain, half = results["methods"]
    assert (plain["method"], half["method"]) == ("bf16", "half")
    assert half["packages"] == {"torch": version("torch"), "no-such-package": None}
    # Weights of two layers, the last norm, and both embeddings, of which a step reads one.
    linear, norms, output = 2 * (3 * 64 * 128 + 3 * 64 * 96), 5 * 64, 96 * 64
    assert plain["weight_bytes"] == 2 * (linear + norms + 2 * output)
    assert half["weight_bytes_read"] == linear + 2 * (norms + output)
    for found, size in ((plain, 2), (half, 1)):
        of_batch = {rows: [row for row in found["products"] if row["rows"] == rows] for rows in (1, 2, 64)}
        for rows in of_batch.values():
            # Two heads of keys and four of queries, of 32 channels.
            shapes = [(row["outputs"], row["inputs"], row["layers"]) for row in rows]
            assert shapes == [(128, 64, 2), (64, 64, 4), (64, 128, 2), (96, 64, 4), (64, 96, 2)]
            assert rows[0]["bytes"] == size * 128 * 64 and rows[0]["gbps"] == pytest.approx(size * 128 * 64 / 1e4)
            assert rows[0]["tflops"] == pytest.approx(2 * rows[0]["rows"] * 128 * 64 / 1e7)
        assert [row["case"] for row in found["cases"]] == ["1x20", "2x12"]
        for row in found["cases"]:
            assert row["products_ms"] == pytest.approx(14 * 0.01)
            assert row["ratio"] == pytest.approx(row["step_ms"] / plain["cases"][row["batch"] - 1]["step_ms"])
            # Two layers, keys and values, two heads: codes, a scale and a zero.
            assert row["cache_bytes"] == row["batch"] * (row["context"] + 8) * 8 * (16 + 4)
            assert row["roofline_ms"] == pytest.approx((found["weight_bytes_read"] + row["cache_bytes"]) / 10e6)
    assert results["failures"] == [{"method": "absent", "reason": "ImportError: no such package in else.so"}]
    assert [check["reached"] for check in results["checks"]] == [True, False, None]
    assert [check["fastest"] for check in results["checks"]] == ["half", "half", None]
    assert "absent: ImportError: no such package in else.so" in printed and Recorded.made


@pytest.mark.parametrize(
    "words, message",
    [
        (["--new-tokens", "4"], "--new-tokens must be at least 8, got 4"),
        (["--cases", "8"], "invalid parse value: '8'"),
        (["--methods", "int5"], "invalid choice: 'int5'"),
        (["--resume"], "--resume needs --output, the results to resume"),
    ],
)
def test_arguments(bench: ModuleType, words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench.parse(words)
    assert message in capsys.readouterr().err


def test_a_cache_is_filled(bench: ModuleType) -> None:
    model = models.build("llama", torch.bfloat16)
    cache = KVQuantCache(model.config, "int4-token", max_cache_len=32)
    bench.fill(model, cache, 2, 17)
    assert [storage.length for storage in cache.storages] == [17, 17]


def test_ratios_need_bf16_weights(bench: ModuleType) -> None:
    times = dict.fromkeys(("step_ms", "p10_ms", "p90_ms", "roofline_ms", "products_ms"), 2.0)
    rows = [{"case": "1x2k", "batch": 1, "share": 1.0, **times}]
    found = {"method": "gemlite", "kernel": "GEMV", "cases": rows, "products": [], "weight_bytes": 1e9}
    results = {"methods": [found]}
    bench.add_ratios(results)
    assert rows[0]["ratio"] is None and {check["measured"] for check in results["checks"]} == {None}
    Console(file=io.StringIO()).print(bench.steps_table(results))


def of_method(name: str, ratios: tuple[float, float], gbps: dict[int, float]) -> dict[str, Any]:
    cases = [
        {"case": case, "step_ms": 5.3 * ratio, "ratio": ratio, "products_ms": 4.0}
        for case, ratio in zip(("1x2k", "8x16k"), ratios, strict=True)
    ]
    rows = [
        {"outputs": 4096, "inputs": 4096, "rows": tokens, "gbps": rate, "tflops": 99.6} for tokens, rate in gbps.items()
    ]
    packages = {} if name == "bf16" else {"torchao": "0.18.0"}
    return {"method": name, "kernel": "K", "packages": packages, "weight_bytes": 16e9, "cases": cases, "products": rows}


def test_pages(bench: ModuleType) -> None:
    render = importlib.import_module("render_weights")
    plain = of_method("bf16", (1.0, 1.0), {1: 4000.0, 64: 3900.0})
    slow, fast = of_method("slow", (0.5, 0.9), {1: 1000.0}), of_method("fast", (0.6, 0.7), {1: 2000.0, 64: 1234.5})
    card = {"read_gbps": 4300.0, "gpu": "GPU", "torch": "2.11", "transformers": "5.17", "date": "2026-11-26 10:00 UTC"}
    failures = [{"method": "absent", "reason": "ImportError: no such package."}]
    results = {"methods": [plain, slow, fast], "failures": failures, **card}
    lines = render.step_table(results).splitlines()
    assert lines[2] == "| bf16: K | 1 x 2k | 16.0 | 5.30 | 4.00 | 1.00 |"
    assert lines[-1] == "| fast: K (torchao 0.18.0) | 8 x 16k | 16.0 | 3.71 | 4.00 | 0.70 |"
    assert render.rate_table(results).splitlines()[2:] == [
        "| 4096 x 4096 | 1 | 4,000 GB/s | 1,000 GB/s | 2,000 GB/s |",
        "| 4096 x 4096 | 64 | 100 TFLOP/s | - | 100 TFLOP/s |",
    ]
    assert render.fastest(results) == "fast"
    sentence = "With 4-bit weights and `int4-token`, a step of one sequence takes 3.2 ms instead of 5.3."
    assert render.gain_sentence(results) == sentence
    assert "4-bit weights is fast (K)" in render.caption(results)
    assert "Not measured: absent: ImportError: no such package. GPU" in render.caption(results)


def test_page_of_batches(bench: ModuleType) -> None:
    render = importlib.import_module("render_weights")
    arms = [
        ("bf16", "flash", 1000.0, 26.0e9),
        ("tinygemm", "flash", 1500.0, None),
        ("tinygemm", "int4-token", 4000.0, None),
    ]
    rows = [
        {
            "weights": weights,
            "system": system,
            "output_tokens_per_s": rate,
            "mean_running": 20.4,
            "room_tokens": 45_056,
            "peak_bytes": peak,
        }
        for weights, system, rate, peak in arms
    ]
    found = {"requests": 64, "prompt": 1024, "new": [128, 896], "total_gb": 24.0, "rows": rows}
    card = {"gpu": "GPU", "torch": "2.11", "transformers": "5.23", "date": "2026-11-26 10:00 UTC"}
    lines = render.throughput_table({"workloads": [found]}).splitlines()
    start = "| 64 of 1,024 in, 128 to 896 out | 24 GB |"
    assert lines[2] == f"{start} bf16, bf16 | 1,000 | 1.0x | 20 | 45k | 26.0 |"
    assert lines[4] == f"{start} tinygemm, `int4-token` | 4,000 | 4.0x | 20 | 45k | - |"
    assert render.throughput_caption(card).endswith("2026-11-26, `evals/results/batching_weights.json`.")
    del rows[0]
    assert "| tinygemm, bf16 | 1,500 | - |" in render.throughput_table({"workloads": [found]})


def test_biases_are_refused(methods: ModuleType) -> None:
    model = models.build("qwen2")
    with pytest.raises(
        ValueError, match=r"linear layers without biases, got one in model\.layers\.0\.self_attn\.q_proj"
    ):
        methods.quantize(model, "tinygemm")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", ["tinygemm", "mslk", "mslk-shuffled", "gemlite", "humming"])
@pytest.mark.parametrize("rows", [1, 8])
def test_methods_compute_what_they_should(methods: ModuleType, name: str, rows: int) -> None:
    """Products with 4-bit weights are near those with bf16 weights."""
    method = methods.METHODS[name]
    if None in method.versions.values():
        pytest.skip(f"needs {', '.join(method.packages)}")
    linear = nn.Linear(4096, 1024, bias=False).to("cuda", torch.bfloat16)
    x = torch.randn(rows, 1, 4096, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        expected = linear(x).float()
        found = method.replace(linear)(x)
    assert found.shape == expected.shape and found.dtype == torch.bfloat16
    # Steps of a sixteenth of the range are wrong by 7 to 10 % of a uniform weight's size.
    assert (found - expected).norm() < 0.15 * expected.norm()
