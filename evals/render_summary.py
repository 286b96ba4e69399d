"""The summary on the README and on `docs/index.md`: memory, quality and speed of some presets."""

from __future__ import annotations

from typing import Any

import render_batching
import render_generate
import render_real
import render_weights
from parts import Part, Results
from pictures import SUMMARY_PRESETS
from render_decode import describe_context, shown_cases
from render_quality import bare_note, found, speedups, times

from hf_kvquant.common.tables import markdown_table as table

# The case of each results file that it shows.
SUMMARY_GPU_CASE, SUMMARY_GENERATE_CASE = "64x8k", "8x16k"


def summary_table(results: Results) -> str:
    """Memory, quality and speed of some presets."""
    cpu, decode = results["cpu_decode"], results["decode"]
    sizes, quality = results["fidelity"]["presets"], render_real.measured_presets(results)
    (case,) = shown_cases(decode, [SUMMARY_GPU_CASE])
    on_gpu = {row["preset"]: row["speedup"] for row in case["rows"]}
    on_cpu, unquantised = speedups(cpu), sizes["none"]["bytes_per_token"]
    rows = []
    for preset in SUMMARY_PRESETS:
        row, size = quality[preset], sizes[preset]["bytes_per_token"]
        cells = [f"`{preset}`", f"{size / unquantised:.0%}", render_real.change(row["perplexity_change"])]
        rows.append([*cells, f"{row['agreement']:.1%}", times(found(on_gpu, preset)), times(found(on_cpu, preset))])
    return table(
        ["preset", "cache size", "perplexity change", "same next token", "GPU attention", "CPU attention"], rows
    )


def gains(results: Results) -> str:
    """What a step, batching and weights gain."""
    sentences = [end_to_end_sentence(results["generate"])]
    if "batching" in results:
        sentences.append(render_batching.gain_sentence(results["batching"]))
    if "weights" in results:
        sentences.append(render_weights.gain_sentence(results["weights"]))
    return " ".join(sentences)


def end_to_end_sentence(generate: dict[str, Any]) -> str:
    """One case of `generate`: time of a step and size of the cache."""
    batch, context = SUMMARY_GENERATE_CASE.split("x")
    steps, ratio, cache = render_generate.compared(generate, SUMMARY_GENERATE_CASE)
    return (
        f"End to end, with a Llama-3-8B-sized model and {batch} sequences of {context} tokens on an "
        f"{generate['gpu'].removeprefix('NVIDIA ')}, a step of `generate` takes {steps[1]:.1f} ms with `int4` and "
        f"{steps[0]:.1f} ms with transformers' static cache ({ratio:.1f}x). The cache takes {cache[1]:.1f} GB instead "
        f"of {cache[0]:.1f} GB."
    )


def summary_caption(results: Results) -> str:
    """What each column of the summary compares."""
    real, cpu, decode = (results[name] for name in ("real_generate", "cpu_decode", "decode"))
    (case,) = shown_cases(decode, [SUMMARY_GPU_CASE])
    return (
        f"Cache size: against 16 bits. Quality: {render_real.MODEL} on WikiText-2, behind prompts of "
        f"{real['n0']:,} tokens. GPU attention: one decode step against the fastest bf16 kernel of PyTorch and "
        f"FlashInfer ({decode['gpu'].removeprefix('NVIDIA ')}, {case['shape']['batch']} sequences of "
        f"{describe_context(case)} tokens). CPU attention: against PyTorch on {cpu['threads']} threads "
        f"of {_article(cpu['cpu'])} ({cpu['shape']['length']:,} tokens); a dash: not measured."
        f"{bare_note('Attention', [row['preset'] for row in case['rows']], SUMMARY_PRESETS)}"
    )


def _article(name: str) -> str:
    return f"{'an' if name[0] in 'AEIOU' else 'a'} {name}"


PARTS = (
    Part(
        "summary",
        ("fidelity", "real_generate", "real_windows", "cpu_decode", "decode", "generate"),
        (summary_table, gains, summary_caption),
        optional=("batching", "weights"),
    ),
)
