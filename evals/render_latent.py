"""The table of decode steps over latents, from `evals/results/latent.json` alone.

`bench_latent.py` measures, and `render_readme.py` puts the table into its page.
"""

from __future__ import annotations

from typing import Any

from hf_kvquant.common.tables import markdown_table


def step_table(results: dict[str, Any]) -> str:
    """Per shape and context: milliseconds of transformers' step, and how many times as fast each preset is."""
    lines = []
    for case in results["cases"]:
        rows = {row["system"]: row for row in case["rows"]}
        plain = rows.pop("transformers")
        speedups = [f"{row['speedup']:.1f}" for row in rows.values()]
        lines.append([case["shape"], f"{case['context']:,}", f"{plain['median_ms']:.1f}", *speedups])
    presets = [f"`{row['system']}`" for row in results["cases"][0]["rows"] if row["system"] != "transformers"]
    return markdown_table(["shape of", "tokens held", "transformers, ms", *presets], lines)


def caption(results: dict[str, Any]) -> str:
    """What was run, and on what."""
    device = results["gpu"] if results["device"] == "cuda" else f"{results['cpu']}, {results['threads']} threads"
    return (
        "A decode step of one layer with its projections, random weights, batch 1, "
        f"{results['cases'][0]['dtype']}; presets are shown by how many times as fast they are as transformers "
        f"{results['transformers']} with its own cache, which expands latents in every step. {device} "
        "(`evals/results/latent.json`)."
    )
