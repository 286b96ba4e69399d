"""The table of decode steps of a model with states, from results of `bench_generate.py`.

`render_readme.py` puts it into its page.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from parts import Part

from hf_kvquant.common.tables import markdown_table

# Results files, and what computes the layers with a state in them.
FILES = {"generate_qwen3_5_4b": "PyTorch", "generate_qwen3_5_4b_fla": "flash-linear-attention"}


def step_table(results: Mapping[str, dict[str, Any]]) -> str:
    """Per case: a step of transformers, and of captured presets."""
    lines = []
    for name in FILES:
        for case in results[name]["cases"] if name in results else ():
            rows = {row["system"]: row for row in case["rows"]}
            plain = rows["dynamic"]
            cells = [FILES[name], f"{case['batch']} x {case['context']:,}"]
            cells.append(f"{plain['step_ms']:.1f} ({plain['p10_ms']:.1f} to {plain['p90_ms']:.1f})")
            for preset in ("int8", "int4"):
                step = rows[f"{preset}-capture"]["step_ms"]
                cells.append(f"{step:.1f} ({plain['step_ms'] / step:.1f})")
            lines.append(cells)
    titles = ["states by", "sequences x tokens", "transformers, ms", "`int8`, ms", "`int4`, ms"]
    return markdown_table(titles, lines)


def caption(results: Mapping[str, dict[str, Any]]) -> str:
    """What was run, and on what."""
    newest = max(results.values(), key=lambda each: str(each["date"]))
    files = ", ".join(f"`evals/results/{name}.json`" for name in results)
    return (
        "A step of `generate` with the shape of Qwen3.5-4B, 24 of 32 layers with a state alone, random weights in "
        "bfloat16. Of transformers, the median and the fastest and slowest tenth: its attention is cuDNN's, "
        "which makes a plan for each new number of tokens. Our steps are captured; how many times as fast in brackets. "
        f"transformers {newest['transformers']}, {newest['gpu']}, torch {newest['torch']}, "
        f"{newest['date'][:10]} ({files})."
    )


PARTS = (Part("states-generate", (), (step_table, caption), optional=(*FILES,)),)
