"""What the pages say about attention of many new tokens on a GPU, from `evals/results/chunks.json` alone.

`bench_chunks.py` measures, and `render_readme.py` puts this into the pages.
"""

from __future__ import annotations

from typing import Any

from decode_cases import thousands
from parts import Part

from hf_kvquant.common.tables import markdown_table as table

# The columns and their headings, in order, of those that were measured. Names are those of bench_chunks.py.
KERNELS = {
    "flash": "flash, bf16",
    "cudnn": "cuDNN, bf16",
    "fa2": "FlashInfer FA2, bf16",
    "fa3": "FlashInfer FA3, bf16",
    "int8": "`int8`",
    "int4": "`int4`",
}
COMPARED = ("int8", "int4")
# From so many new tokens on, the kernel for chunks attends in each case.
MANY = 32


def chunk_table(results: dict[str, Any]) -> str:
    """Per case: microseconds of each kernel, and how many times as fast ours are as the fastest in bf16."""
    names = [name for name in KERNELS if name in results["cases"][0]["us"]]
    headings = ["batch x context + new tokens", *(f"{KERNELS[name]}, µs" for name in names)]
    headings += [f"{KERNELS[name]} against bf16" for name in COMPARED]
    lines = []
    for case in results["cases"]:
        cells = [case_name(case)]
        cells += [f"{case['us'][name]:,.0f}" for name in names]
        lines.append([*cells, *(f"{case['speedup'][name]:.2f}x" for name in COMPARED)])
    return table(headings, lines)


def case_name(case: dict[str, Any]) -> str:
    """`1 x 32k + 1,024`."""
    return f"{case['batch']} x {thousands(case['length'])} + {case['num_new']:,}"


def pages_sentence(results: dict[str, Any]) -> str:
    """How the time of attention of several new tokens changes in pages, for many and for few, and without codes."""
    longer = [
        (case["num_new"], name, us / case["us"][name] - 1)
        for case in results["cases"]
        for name, us in case["pages_us"].items()
        if case["num_new"] > 1
    ]

    def span(found: list[float]) -> str:
        return f"{min(found):+.0%} to {max(found):+.0%}"

    many = [each for num_new, name, each in longer if num_new >= MANY and name != "none"]
    few = [each for num_new, name, each in longer if num_new < MANY and name != "none"]
    plain = [each for _, name, each in longer if name == "none"]
    return (
        "A chunk of a prompt attends over pages about as fast as over sequences side by side. The time of a layer "
        f"changes by {span(many)} from {MANY} new tokens on, and by {span(few)} with fewer. With `none` it changes by "
        f"{span(plain)}. "
        f"{results['gpu']}, torch {results['torch']}, {results['date'][:10]}, `evals/results/chunks_pages.json`."
    )


def caption(results: dict[str, Any]) -> str:
    """What was measured, on what and when."""
    flashinfer = results["peer_versions"]["flashinfer-python"]
    versions = f"torch {results['torch']}" + (f", flashinfer {flashinfer}" if flashinfer else "")
    return (
        "Many new tokens at once, as in a chunk of a prompt, a chat's next turn or a check of proposed tokens: "
        f"attention of one layer with 32 query and 8 key-value heads of {results['head_dim']}. The context includes "
        "the new tokens. Ours reads codes; the others read bf16 keys and values. cuDNN runs without a causal "
        "mask, which PyTorch cannot align with the last token. Medians of replays of a CUDA graph, cold in L2. "
        f"{results['gpu']}, {versions}, {results['date'][:10]}, `evals/results/chunks.json`."
    )


PARTS = (
    Part("chunks", ("chunks",), (chunk_table, caption)),
    Part("chunks-pages", ("chunks_pages",), (pages_sentence,)),
)
