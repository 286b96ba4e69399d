"""What the pages say about attention of many new tokens on a GPU, from `evals/results/chunks.json` alone.

`bench_chunks.py` measures, and `render_readme.py` puts this into the pages.
"""

from __future__ import annotations

from typing import Any

from decode_cases import thousands

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


def pages_table(results: dict[str, Any]) -> str:
    """Per case: microseconds of each preset in pages, and how much longer that is than side by side."""
    names = list(results["cases"][0]["us"])
    headings = ["batch x context + new tokens"]
    for name in names:
        headings += [f"`{name}`, µs", "in pages", "longer"]
    lines = []
    for case in results["cases"]:
        cells = [case_name(case)]
        for name in names:
            plain, pages = case["us"][name], case["pages_us"][name]
            cells += [f"{plain:,.0f}", f"{pages:,.0f}", f"{pages / plain - 1:+.1%}"]
        lines.append(cells)
    return table(headings, lines)


def pages_caption(results: dict[str, Any]) -> str:
    """What was measured, on what and when."""
    return (
        "Attention of one layer with 32 query and 8 key-value heads of "
        f"{results['head_dim']}, for many new tokens at once. {results['gpu']}, torch {results['torch']}, "
        f"{results['date'][:10]}, `evals/results/chunks_pages.json`."
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
