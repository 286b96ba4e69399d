"""What the pages say about the speed of 4-bit weights, from `weights.json` and `batching_weights.json` alone.

`bench_weights.py` and `bench_batching.py` measure, and `render_readme.py` puts this into the pages.
"""

from __future__ import annotations

import math
from typing import Any

from parts import Part
from weight_methods import BF16, arm_of

from hf_kvquant.common.tables import markdown_table as table

# The caches that are compared, by their names in bench_batching.py.
CACHES = {"flash": "bf16", "int4-token": "`int4-token`"}
# From this many tokens on, a linear layer is limited by arithmetic rather than by reading its weights.
FEW_ROWS = 64


def step_table(results: dict[str, Any]) -> str:
    """Per method and case: milliseconds of a step and of its linear layers, and the share of bf16's step."""
    lines = []
    for found in results["methods"]:
        for row in found["cases"]:
            cells = [_name(found), row["case"].replace("x", " x "), f"{found['weight_bytes'] / 1e9:.1f}"]
            cells += [f"{row['step_ms']:.2f}", f"{row['products_ms']:.2f}"]
            lines.append([*cells, "-" if row["ratio"] is None else f"{row['ratio']:.2f}"])
    headings = ["weights, kernel", "batch x context", "weights, GB", "ms per step", "linear layers, ms", "of bf16"]
    return table(headings, lines, num_text=2)


def _name(found: dict[str, Any]) -> str:
    packages = ", ".join(f"{name} {version}" for name, version in found["packages"].items())
    return f"{found['method']}: {found['kernel']}" + (f" ({packages})" if packages else "")


def gain_sentence(results: dict[str, Any]) -> str:
    """The step of the first case, with bf16 weights and with the fastest kernel for 4-bit weights."""
    methods = {found["method"]: found["cases"][0] for found in results["methods"]}
    before, after = (methods[name]["step_ms"] for name in (BF16, fastest(results)))
    return f"With 4-bit weights and `int4-token`, a step of one sequence takes {after:.1f} ms instead of {before:.1f}."


def rate_table(results: dict[str, Any]) -> str:
    """Per shape of linear layers and number of tokens: the rate of each method, of reading or of arithmetic."""
    methods = results["methods"]
    rates = {
        (row["rows"], row["outputs"], row["inputs"], found["method"]): _rate(row)
        for found in methods
        for row in found["products"]
    }
    lines = []
    for rows, outputs, inputs in sorted({key[:3] for key in rates}):
        cells = [rates.get((rows, outputs, inputs, found["method"]), "-") for found in methods]
        lines.append([f"{outputs} x {inputs}", str(rows), *cells])
    return table(["outputs x inputs", "tokens", *(found["method"] for found in methods)], lines)


def _rate(row: dict[str, Any]) -> str:
    """GB/s of weights while few tokens share them, else TFLOP/s."""
    return f"{row['gbps']:,.0f} GB/s" if row["rows"] < FEW_ROWS else f"{row['tflops']:,.0f} TFLOP/s"


def fastest(results: dict[str, Any]) -> str:
    """The method with 4-bit weights whose steps are fastest, over all cases alike.

    Raises:
        ValueError: None was measured beside bf16.
    """
    means = {
        found["method"]: math.prod(row["ratio"] for row in found["cases"])
        for found in results["methods"]
        if found["method"] != BF16 and None not in [row["ratio"] for row in found["cases"]]
    }
    return min(means, key=lambda name: means[name])


def caption(results: dict[str, Any]) -> str:
    """What was measured, on what and when."""
    found = {each["method"]: each for each in results["methods"]}[fastest(results)]
    reasons = [f"{failure['method']}: {failure['reason'].rstrip('.')}" for failure in results["failures"]]
    missing = f" Not measured: {'; '.join(reasons)}." if reasons else ""
    return (
        "Captured steps of a model with the shape of Llama-3-8B, random weights and an `int4-token` cache. The fastest "
        f"kernel for 4-bit weights is {found['method']} ({found['kernel']}). Weights are in groups of 128; the output "
        "layer and the embedding stay in bf16. Linear layers: the same layers alone, cold in the L2 cache. A plain "
        f"read reaches {results['read_gbps']:,.0f} GB/s.{missing} {results['gpu']}, torch {results['torch']}, "
        f"transformers {results['transformers']}, {results['date'][:10]}, `evals/results/weights.json`."
    )


def throughput_table(results: dict[str, Any]) -> str:
    """Per workload, memory in all and arm: tokens per second, and how many requests ran at once."""
    lines = []
    for found in results["workloads"]:
        rows = {arm_of(row): row for row in found["rows"]}
        base = rows.get((BF16, "flash"))
        fewest, most = found["new"]
        new = f"{fewest:,} to {most:,}" if fewest < most else f"{most:,}"
        workload = f"{found['requests']} of {found['prompt']:,} in, {new} out"
        for (weights, system), row in rows.items():
            rate = row["output_tokens_per_s"]
            cells = [workload, f"{found['total_gb']:g} GB", f"{weights}, {CACHES.get(system, system)}", f"{rate:,.0f}"]
            cells.append("-" if base is None else f"{rate / base['output_tokens_per_s']:.1f}x")
            cells += [f"{row['mean_running']:.0f}", f"{row['room_tokens'] / 1e3:,.0f}k"]
            lines.append([*cells, "-" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 1e9:.1f}"])
    headings = ["requests", "memory in all", "weights, cache", "tokens/s", "of bf16, bf16", "running at once", "room"]
    return table([*headings, "peak, GB"], lines, num_text=3)


def throughput_caption(results: dict[str, Any]) -> str:
    """What was measured, on what and when."""
    return (
        "Greedy answers to requests that arrive at once, through continuous batching, by a model with the shape of "
        "Llama-3-8B and random weights. The memory in all holds weights, cache and activations. The bf16 cache is "
        "transformers' own, with FlashAttention-2 for prompts and a Triton kernel for decode steps. Room: tokens that "
        f"the cache can hold. {results['gpu']}, torch {results['torch']}, transformers {results['transformers']}, "
        f"{results['date'][:10]}, `evals/results/batching_weights.json`."
    )


PARTS = (
    Part("weights", ("weights",), (step_table, caption)),
    Part("weights-kernels", ("weights",), (rate_table,)),
    Part("batching-weights", ("batching_weights",), (throughput_table, throughput_caption)),
)
