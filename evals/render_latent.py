"""The tables of decode steps over latents: of one layer on a CPU, and of whole models on a GPU.

`bench_latent.py` and `bench_generate.py` measure.
"""

from __future__ import annotations

from typing import Any

from parts import Part, Results, Row, Table, Text, at, of

# Results files of `bench_generate.py`, by the names of their shapes.
GENERATE = {
    "generate_deepseek_v2_lite": "DeepSeek-V2-Lite",
    "generate_glm_4_7_flash": "GLM-4.7-Flash",
    "generate_minicpm3_4b": "MiniCPM3-4B",
}
# Results files of `fidelity.py`, by what was done to the channels of latents.
QUALITY = {"latent_twin": "as trained", "latent_twin_stretched": "uneven", "latent_twin_smoothed": "uneven, smoothed"}
QUALITY_PRESETS = {"int8": "`int8`", "fp8": "`fp8`", "int4": "`int4`", "int4-untransformed": "`int4`, not rotated"}


def presets_of(results: Results) -> list[str]:
    """The presets that were measured beside transformers."""
    return [row["system"] for row in results["cases"][0]["rows"] if row["system"] != "transformers"]


def device_of(results: Results) -> str:
    """On what one layer was measured."""
    return results["gpu"] if results["device"] == "cuda" else f"{results['cpu']}, {results['threads']} threads"


step_table = Table(
    "cases",
    lambda results: {
        "shape of": "{shape}",
        "tokens held": "{context:,}",
        "transformers, ms": "{rows.transformers.median_ms:.1f}",
        **{f"`{name}`": of(f"rows.{name}", "{speedup:.1f}") for name in presets_of(results)},
    },
)
caption = Text(
    "A decode step of one layer with its projections, random weights, batch 1, {cases.0.dtype}; presets are shown by "
    "how many times as fast they are as transformers {transformers} with its own cache, which expands latents in every "
    "step. {on} (`evals/results/latent.json`).",
    on=device_of,
)


def newest_of(files: Results) -> dict[str, Any]:
    """The newest of several results."""
    return max(files.values(), key=lambda each: str(each["date"]))


def paths_of(files: Results) -> str:
    """Where results are."""
    return ", ".join(f"`evals/results/{name}.json`" for name in files)


def generate_rows(files: Results) -> list[Row]:
    """Each case, with the faster one of transformers' two as `plain`."""
    cases = [{**case, "shape": GENERATE[name]} for name in files for case in files[name]["cases"]]
    dynamic = ("dynamic", "dynamic-no-cudnn")
    return [
        {**case, "plain": min((at(name, case["rows"]) for name in dynamic), key=lambda row: row["step_ms"])}
        for case in cases
    ]


generate_table = Table(
    generate_rows,
    {
        "shape of": "{shape}",
        "sequences x tokens": "{batch} x {context:,}",
        "transformers, ms": "{plain.step_ms:.1f}",
        "`int8`, ms": "{rows.int8-capture.step_ms:.1f} ({plain.step_ms/rows.int8-capture.step_ms:.1f})",
        "`int4`, ms": "{rows.int4-capture.step_ms:.1f} ({plain.step_ms/rows.int4-capture.step_ms:.1f})",
        "cache, GB": "{plain.cache_bytes:giga.2f}",
        "`int8`, GB": "{rows.int8-capture.cache_bytes:giga.2f}",
        "`int4`, GB": "{rows.int4-capture.cache_bytes:giga.2f}",
    },
)
generate_caption = Text(
    "A step of `generate`, random weights in bfloat16, in brackets how many times as fast; our steps are captured. "
    "transformers {newest.transformers} with its own cache; the faster one of two is shown: with cuDNN's attention, "
    "which makes a plan for each new number of tokens, and without. Steps read the experts, too. {newest.gpu}, torch "
    "{newest.torch}, {newest.date:day} ({paths}).",
    newest=newest_of,
    paths=paths_of,
)
quality_table = Table(
    lambda files: [
        {"shown": shown, **{name: files[name]["presets"][preset] for name in QUALITY}}
        for preset, shown in QUALITY_PRESETS.items()
    ],
    {
        "preset": "{shown}",
        **{shown: of(name, "{kld:.2g}") for name, shown in QUALITY.items()},
        "same next token, as trained": "{latent_twin.agreement:.1%}",
    },
)
quality_caption = Text(
    "KL divergence from the cache without codes, nats a token. The model is a twin of the reference model with latents "
    "of 256 channels and rope parts of 32, trained on 22 million tokens "
    "(`evals/reference_model/README.md`). It reads {latent_twin.scored_tokens:,} tokens of WikiText-2 behind "
    "{latent_twin.n0} in chunks of {latent_twin.chunk}. *Uneven*: channels multiplied by log-normal factors, and "
    "`kv_b_proj` divided by them; *smoothed*: after `smooth_attention` ({paths}).",
    paths=paths_of,
)
batching_sentence = Text(
    "With the shape of DeepSeek-V2-Lite, random weights and {workloads.0.cache_gb:g} GB of cache, "
    "{workloads.0.requests} requests of {workloads.0.prompt:,} tokens with {workloads.0.new:span} new ones make "
    "{workloads.0.rows.0.output_tokens_per_s:,.0f} new tokens a second (`{workloads.0.rows.0.system}`, "
    "{workloads.0.rows.0.bytes_per_token:,} bytes a token, {gpu}, {date:day}, `evals/results/batching_latent.json`)."
)
PARTS = (
    Part("latent", ("latent",), (step_table, caption)),
    Part("latent-generate", (), (generate_table, generate_caption), optional=(*GENERATE,)),
    Part("latent-quality", (*QUALITY,), (quality_table, quality_caption)),
    Part("batching-latent", ("batching_latent",), (batching_sentence,)),
)
