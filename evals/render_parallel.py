"""What the pages say about several GPUs, from what `bench_parallel.py` measures."""

from __future__ import annotations

from parts import Part, Results, Row, Table, Text, at, origin

# By the names of generate_systems.py.
NAMES = {"dynamic": "bf16, eager", "int4-token": "`int4-token`, eager", "int4-token-capture": "`int4-token`, captured"}


def rows(results: Results) -> list[Row]:
    """A row of each case and system: a step on one GPU, and on all."""
    return [
        {**row, "case": case["case"], "one": at(row["system"], case["one"]["rows"])}
        for case in results["cases"]
        for row in case["ranks"]["rows"]
    ]


step_table = Table(
    rows,
    lambda results: {
        "batch x context": "{case}",
        "cache and step": lambda row: NAMES[row["system"]],
        "one GPU, ms": "{one.step_ms:.1f}",
        f"{results['num_ranks']} GPUs, ms": "{step_ms:.1f}",
        "of one GPU": "{step_ms/one.step_ms:.2f}",
    },
)
caption = Text(
    "Time of a decode step of a model with the shape of Llama-3-8B. In eager steps the host is the limit, so their "
    "times depend on the CPU. {num_ranks} x",
    origin("parallel", "torch", "transformers"),
)
PARTS = (Part("parallel", ("parallel",), (step_table, caption)),)
