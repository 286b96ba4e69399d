"""What the pages say about continuous batching on a GPU, from `evals/results/batching.json` alone.

`bench_batching.py` measures, and `render_readme.py` puts this into the pages.
"""

from __future__ import annotations

from typing import Any

from hf_kvquant.common.tables import markdown_table as table

# The systems that are compared, by their names in bench_batching.py.
THEIRS, OURS = "flash", "int4"


def throughput_table(results: dict[str, Any]) -> str:
    """Per workload and memory: tokens per second, how many are held, and the wait for the first, of both systems."""
    headings = ["requests", "tokens in", "tokens out", "cache", "bf16, tokens/s", "`int4`, tokens/s", "speed-up"]
    headings += ["tokens held: bf16, `int4`", "first token, s: bf16, `int4`"]
    lines = []
    for found in results["workloads"]:
        rows = {row["system"]: row for row in found["rows"]}
        both = [rows.get(name) for name in (THEIRS, OURS)]
        fewest, most = found["new"]
        prompt = f"{found['prompt']:,}, shared" if found["is_shared"] else f"{found['prompt']:,}"
        memory = "all memory" if found["cache_gb"] is None else f"{found['cache_gb']:g} GB"
        cells = [str(found["requests"]), prompt, f"{fewest:,} to {most:,}" if fewest < most else f"{most:,}", memory]
        cells += ["-" if row is None else f"{row['output_tokens_per_s']:,.0f}" for row in both]
        cells.append(_ratio(both, "output_tokens_per_s"))
        cells.append(", ".join("-" if row is None else f"{row['most_held_tokens'] / 1e3:,.0f}k" for row in both))
        cells.append(", ".join("-" if row is None else f"{row['first_token_s']['median']:.1f}" for row in both))
        lines.append(cells)
    return table(headings, lines)


def _ratio(both: list[dict[str, Any] | None], key: str) -> str:
    theirs, ours = both
    return "-" if theirs is None or ours is None else f"{ours[key] / theirs[key]:.1f}x"


def caption(results: dict[str, Any]) -> str:
    """What was measured, on what and when."""
    return (
        "Greedy answers to requests that arrive at once, by a model with the shape of Llama-3-8B and random weights. "
        "bf16 is transformers' own continuous batching with FlashAttention-2 for prompts, a Triton kernel for decode "
        "steps, CUDA graphs and asynchronous batching. Both systems have the same bytes of cache. Tokens held are the "
        "most at any step; shared ones count for each request. The first token waits for the requests before it. A "
        f"dash: not measured. {results['gpu']}, torch {results['torch']}, transformers {results['transformers']}, "
        f"{results['date'][:10]}, `evals/results/batching.json`."
    )
