"""The benchmark of steps over latents, with tiny shapes on the CPU, and what the page says about its results."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

EVALS = Path(__file__).resolve().parents[1] / "evals"
TINY = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 64,
    "q_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 24,
}


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """`bench_latent.py` with one tiny shape."""
    monkeypatch.syspath_prepend(str(EVALS))
    bench = importlib.import_module("bench_latent")
    monkeypatch.setattr(bench, "SHAPES", {"tiny": ("minicpm3", TINY)})
    monkeypatch.setattr(bench, "CONTEXTS", {"cpu": (70, 200)})
    return bench


def test_results_and_what_the_page_says(bench: ModuleType, tmp_path: Path) -> None:
    bench.main(["--device", "cpu", "--output", str(tmp_path / "latent.json")])
    results: dict[str, Any] = json.loads((tmp_path / "latent.json").read_text(encoding="utf-8"))
    assert [case["context"] for case in results["cases"]] == [70, 200]
    for case in results["cases"]:
        rows = {row["system"]: row for row in case["rows"]}
        assert list(rows) == ["transformers", "none", "int8", "int4"]
        assert rows["transformers"]["speedup"] == 1
        # 64 and 16 channels: float32; 8 bits with a scale, and float32; 4 bits with a scale and a zero, and 8.
        assert [row["bytes_per_token"] for row in rows.values()] == [None, 320, 130, 54]
        assert all(row["p10_ms"] <= row["median_ms"] <= row["p90_ms"] for row in rows.values())
    render = importlib.import_module("render_latent")
    for case in results["cases"]:
        for row, time in zip(case["rows"], (2.0, 1.0, 0.5, 0.4), strict=True):
            row |= {"median_ms": time, "speedup": 2.0 / time}
    header, _, *lines = render.step_table(results).splitlines()
    assert header == "| shape of | tokens held | transformers, ms | `none` | `int8` | `int4` |"
    assert lines == ["| tiny | 70 | 2.0 | 2.0 | 4.0 | 5.0 |", "| tiny | 200 | 2.0 | 2.0 | 4.0 | 5.0 |"]
    assert f"{torch.get_num_threads()} threads (`evals/results/latent.json`)" in render.caption(results)


def test_steps_of_generate() -> None:
    """Beside the faster one of transformers' two."""
    render = importlib.import_module("render_latent")
    times = {"dynamic": 40.0, "dynamic-no-cudnn": 60.0, "int8-capture": 8.0, "int4-capture": 10.0}
    rows = [{"system": name, "step_ms": ms, "cache_bytes": 1e8 * ms} for name, ms in times.items()]
    card = {"transformers": "5.24.0", "gpu": "a GPU", "torch": "2.11.0", "date": "2026-11-29 05:00 UTC"}
    results = {"generate_glm_4_7_flash": {**card, "cases": [{"batch": 8, "context": 16384, "rows": rows}]}}
    *_, line = render.generate_table(results).splitlines()
    assert line == "| GLM-4.7-Flash | 8 x 16,384 | 40.0 | 8.0 (5.0) | 10.0 (4.0) | 4.00 | 0.80 | 1.00 |"
    assert "a GPU, torch 2.11.0, 2026-11-29 (`evals/results/generate_glm_4_7_flash.json`)" in render.generate_caption(
        results
    )


def test_batching() -> None:
    render = importlib.import_module("render_latent")
    row = {"system": "int8", "bytes_per_token": 15660, "output_tokens_per_s": 3182.6}
    found = {"cache_gb": 24.0, "requests": 128, "prompt": 1024, "new": [128, 896], "rows": [row]}
    told = render.batching_sentence({"workloads": [found], "gpu": "a GPU", "date": "2026-11-29 05:00 UTC"})
    assert (
        "128 requests of 1,024 tokens with 128 to 896 new ones make 3,183 new tokens a second (`int8`, 15,660" in told
    )


def test_a_difference_ends_the_run(bench: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    step = bench.step

    def off(model: Any, system: str, *arguments: Any) -> Any:
        seconds, logits = step(model, system, *arguments)
        return seconds, logits * 1.01 if system == "none" else logits

    monkeypatch.setattr(bench, "step", off)
    with pytest.raises(SystemExit, match=r"tiny: none differs from transformers by 1\.0e-02 of the largest logit"):
        bench.main(["--device", "cpu"])
