"""What the pages say about the speed of 4-bit weights, from what `bench_weights.py` and `bench_batching.py` measure."""

from __future__ import annotations

import math

from parts import Part, Pivot, Results, Row, Table, Text, flat, not_measured, origin
from weight_methods import BF16, arm_of

# The caches that are compared, by their names in bench_batching.py.
CACHES = {"flash": "bf16", "int4-token": "`int4-token`"}
# From this many tokens on, a linear layer is limited by arithmetic rather than by reading its weights.
FEW_ROWS = 64


def kernel_of(row: Row) -> str:
    """`tinygemm: torch`, with the packages that it needs."""
    packages = ", ".join(f"{name} {version}" for name, version in row["packages"].items())
    return f"{row['method']}: {row['kernel']}" + (f" ({packages})" if packages else "")


step_table = Table(
    "methods.cases",
    {
        "weights, kernel": kernel_of,
        "batch x context": "{case:x}",
        "weights, GB": "{weight_bytes:giga.1f}",
        "ms per step": "{step_ms:.2f}",
        "linear layers, ms": "{products_ms:.2f}",
        "of bf16": "{ratio:.2f}",
    },
    num_text=2,
)
rate_table = Pivot(
    lambda results: sorted(
        flat(results, "methods", "products"), key=lambda row: (row["rows"], row["outputs"], row["inputs"])
    ),
    {"outputs x inputs": "{outputs} x {inputs}", "tokens": "{rows}"},
    # GB/s of weights while few tokens share them.
    {"{method}": lambda row: f"{row['gbps']:,.0f} GB/s" if row["rows"] < FEW_ROWS else f"{row['tflops']:,.0f} TFLOP/s"},
)


def gain_sentence(results: Results) -> str:
    """The step of the first case, with bf16 weights and with the fastest kernel for 4-bit weights."""
    methods = {found["method"]: found["cases"][0] for found in results["methods"]}
    before, after = (methods[name]["step_ms"] for name in (BF16, fastest(results)))
    return f"With 4-bit weights and `int4-token`, a step of one sequence takes {after:.1f} ms instead of {before:.1f}."


def fastest(results: Results) -> str:
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


def fastest_kernel(results: Results) -> Row:
    """The entry of `fastest`."""
    return next(found for found in results["methods"] if found["method"] == fastest(results))


caption = Text(
    "Captured steps of a model with the shape of Llama-3-8B, random weights and an `int4-token` cache. The fastest "
    "kernel for 4-bit weights is {fastest.method} ({fastest.kernel}). Weights are in groups of 128; the output layer "
    "and the embedding stay in bf16. Linear layers: the same layers alone, cold in the L2 cache. A plain read reaches "
    "{read_gbps:,.0f} GB/s.{missing}",
    origin("weights", "torch", "transformers"),
    fastest=fastest_kernel,
    missing=lambda results: not_measured(
        [f"{failure['method']}: {failure['reason'].rstrip('.')}" for failure in results["failures"]]
    ),
)


def workload_rows(results: Results) -> list[Row]:
    """Each arm of each workload, with that of bf16 weights and cache as `base`."""
    return [
        {**found, **row, "base": {arm_of(each): each for each in found["rows"]}.get((BF16, "flash"))}
        for found in results["workloads"]
        for row in found["rows"]
    ]


throughput_table = Table(
    workload_rows,
    {
        "requests": "{requests} of {prompt:,} in, {new:span} out",
        "memory in all": "{total_gb:g} GB",
        "weights, cache": lambda row: ", ".join((arm_of(row)[0], CACHES.get(row["system"], row["system"]))),
        "tokens/s": "{output_tokens_per_s:,.0f}",
        "of bf16, bf16": "{output_tokens_per_s/base.output_tokens_per_s:.1f}x",
        "running at once": "{mean_running:.0f}",
        "room": "{room_tokens:kilo,.0f}k",
        "peak, GB": "{peak_bytes:giga.1f}",
    },
    num_text=3,
)
throughput_caption = Text(
    "Greedy answers to requests that arrive at once, through continuous batching, by a model with the shape of "
    "Llama-3-8B and random weights. The memory in all holds weights, cache and activations. The bf16 cache is "
    "transformers' own, with FlashAttention-2 for prompts and a Triton kernel for decode steps. Room: tokens that the "
    "cache can hold.",
    origin("batching_weights", "torch", "transformers"),
)
PARTS = (
    Part("weights", ("weights",), (step_table, caption)),
    Part("weights-kernels", ("weights",), (rate_table,)),
    Part("batching-weights", ("batching_weights",), (throughput_table, throughput_caption)),
)
