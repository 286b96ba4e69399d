"""The tables of decode steps over latents: of one layer on a CPU, and of whole models on a GPU.

`bench_latent.py` and `bench_generate.py` measure, and `render_readme.py` puts the tables into their page.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from parts import Part

from hf_kvquant.common.tables import markdown_table

# Results files of `bench_generate.py`, by the names of their shapes.
GENERATE = {
    "generate_deepseek_v2_lite": "DeepSeek-V2-Lite",
    "generate_glm_4_7_flash": "GLM-4.7-Flash",
    "generate_minicpm3_4b": "MiniCPM3-4B",
}
# Results files of `fidelity.py`, by what was done to the channels of latents.
QUALITY = {"latent_twin": "as trained", "latent_twin_stretched": "uneven", "latent_twin_smoothed": "uneven, smoothed"}
QUALITY_PRESETS = {"int8": "`int8`", "fp8": "`fp8`", "int4": "`int4`", "int4-untransformed": "`int4`, not rotated"}


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


def generate_table(results: Mapping[str, dict[str, Any]]) -> str:
    """Per shape and case: a step of transformers, and of captured presets, with the memory that decoding takes."""
    lines = []
    for name, shown in GENERATE.items():
        for case in results[name]["cases"] if name in results else ():
            rows = {row["system"]: row for row in case["rows"]}
            plain = min((rows[name] for name in ("dynamic", "dynamic-no-cudnn")), key=lambda row: row["step_ms"])
            cells = [shown, f"{case['batch']} x {case['context']:,}", f"{plain['step_ms']:.1f}"]
            for preset in ("int8", "int4"):
                row = rows[f"{preset}-capture"]
                cells.append(f"{row['step_ms']:.1f} ({plain['step_ms'] / row['step_ms']:.1f})")
            cells += [
                f"{rows[system]['cache_bytes'] / 1e9:.2f}"
                for system in (plain["system"], "int8-capture", "int4-capture")
            ]
            lines.append(cells)
    titles = ["shape of", "sequences x tokens", "transformers, ms", "`int8`, ms", "`int4`, ms"]
    return markdown_table([*titles, "cache, GB", "`int8`, GB", "`int4`, GB"], lines)


def generate_caption(results: Mapping[str, dict[str, Any]]) -> str:
    """What was run, and on what."""
    newest = max(results.values(), key=lambda each: str(each["date"]))
    files = ", ".join(f"`evals/results/{name}.json`" for name in results)
    return (
        "A step of `generate`, random weights in bfloat16, in brackets how many times as fast; our steps are captured. "
        f"transformers {newest['transformers']} with its own cache; the faster one of two is shown: with cuDNN's "
        "attention, which makes a plan for each new number of tokens, and without. Steps read the experts, too. "
        f"{newest['gpu']}, torch {newest['torch']}, {newest['date'][:10]} ({files})."
    )


def quality_table(results: Mapping[str, dict[str, Any]]) -> str:
    """Divergence of presets from the unquantised cache: a model's, with uneven channels, and these evened out."""
    columns = [results[name]["presets"] for name in QUALITY]
    lines = []
    for preset, shown in QUALITY_PRESETS.items():
        found = [f"{column[preset]['kld']:.2g}" for column in columns]
        lines.append([shown, *found, f"{columns[0][preset]['agreement']:.1%}"])
    return markdown_table(["preset", *QUALITY.values(), "same next token, as trained"], lines)


def quality_caption(results: Mapping[str, dict[str, Any]]) -> str:
    """What was measured."""
    first = results[next(iter(QUALITY))]
    files = ", ".join(f"`evals/results/{name}.json`" for name in QUALITY)
    return (
        "KL divergence from the cache without codes, nats a token. The model is a twin of the reference model with "
        "latents of 256 channels and rope parts of 32, trained on 22 million tokens "
        "([reference model](../evals/reference_model/README.md)). It reads "
        f"{first['scored_tokens']:,} tokens of WikiText-2 behind {first['n0']} in chunks of {first['chunk']}. "
        "*Uneven*: channels multiplied by log-normal factors, and `kv_b_proj` divided by them; *smoothed*: after "
        f"`smooth_attention` ({files})."
    )


def batching_sentence(results: dict[str, Any]) -> str:
    """How many tokens a second a workload of continuous batching makes, and what a token takes."""
    ((found,), (row,)) = results["workloads"], results["workloads"][0]["rows"]
    fewest, most = found["new"]
    return (
        f"With the shape of DeepSeek-V2-Lite, random weights and {found['cache_gb']:g} GB of cache, "
        f"{found['requests']} requests of {found['prompt']:,} tokens with {fewest} to {most} new ones make "
        f"{row['output_tokens_per_s']:,.0f} new tokens a second (`{row['system']}`, {row['bytes_per_token']:,} bytes a "
        f"token, {results['gpu']}, {results['date'][:10]}, `evals/results/batching_latent.json`)."
    )


PARTS = (
    Part("latent", ("latent",), (step_table, caption)),
    Part("latent-generate", (), (generate_table, generate_caption), optional=(*GENERATE,)),
    Part("latent-quality", (*QUALITY,), (quality_table, quality_caption)),
    Part("batching-latent", ("batching_latent",), (batching_sentence,)),
)
