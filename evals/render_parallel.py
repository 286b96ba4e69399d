"""What the pages say about several GPUs, from `evals/results/parallel.json` alone.

`bench_parallel.py` measures, and `render_readme.py` puts this into the pages.
"""

from __future__ import annotations

from typing import Any

from parts import Part

from hf_kvquant.common.tables import markdown_table as table

# By the names of generate_systems.py.
NAMES = {"dynamic": "bf16, eager", "int4-token": "`int4-token`, eager", "int4-token-capture": "`int4-token`, captured"}


def step_table(results: dict[str, Any]) -> str:
    """Per case: milliseconds of a step on one GPU and on all."""
    count = results["num_ranks"]
    lines = []
    for found in results["cases"]:
        ones = {row["system"]: row["step_ms"] for row in found["one"]["rows"]}
        for row in found["ranks"]["rows"]:
            one = ones[row["system"]]
            numbers = [f"{one:.1f}", f"{row['step_ms']:.1f}", f"{row['step_ms'] / one:.2f}"]
            lines.append([found["case"], NAMES[row["system"]], *numbers])
    return table(["batch x context", "cache and step", "one GPU, ms", f"{count} GPUs, ms", "of one GPU"], lines)


def caption(results: dict[str, Any]) -> str:
    """What was measured, on what and when."""
    return (
        "Time of a decode step of a model with the shape of Llama-3-8B. In eager steps the host is the limit, so their "
        f"times depend on the CPU. {results['num_ranks']} x {results['gpu']}, torch {results['torch']}, transformers "
        f"{results['transformers']}, {results['date'][:10]}, `evals/results/parallel.json`."
    )


PARTS = (Part("parallel", ("parallel",), (step_table, caption)),)
