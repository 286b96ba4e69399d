"""The summary on the README and on `docs/index.md`: memory, quality and speed of some presets."""

from __future__ import annotations

import render_batching
import render_real
import render_weights
from parts import Part, Results, Row, Table, Text, at
from pictures import SUMMARY_PRESETS
from render_decode import shown_cases
from render_quality import bare_note, found, speedups

# Presets whose speed on GPUs was measured before they had dense tokens.
MEASURED_BARE = ("int8",)


def gpu_case(files: Results) -> Row:
    """The case of decode attention that it shows."""
    (case,) = shown_cases(files["decode"], ["64x8k"])
    return case


def rows(files: Results) -> list[Row]:
    """A row of each preset, with its size and speeds."""
    sizes, quality = files["fidelity"]["presets"], render_real.measured_presets(files)
    on_gpu, on_cpu = speedups(gpu_case(files)), speedups(files["cpu_decode"])
    return [
        {
            **quality[name],
            "preset": name,
            "size": sizes[name]["bytes_per_token"] / sizes["none"]["bytes_per_token"],
            "gpu": found(on_gpu, name),
            "cpu": found(on_cpu, name),
        }
        for name in SUMMARY_PRESETS
    ]


summary_table = Table(
    rows,
    {
        "preset": "`{preset}`",
        "cache size": "{size:.0%}",
        "perplexity change": "{perplexity_change:change}",
        "same next token": "{agreement:.1%}",
        "GPU attention": "{gpu:.1f}x",
        "CPU attention": "{cpu:.1f}x",
    },
)
end_to_end = Text(
    "End to end, with a Llama-3-8B-sized model and 8 sequences of 16k tokens on an {generate.gpu:short}, a step of "
    "`generate` takes {ours.step_ms:.1f} ms with `int4` and {theirs.step_ms:.1f} ms with transformers' static cache "
    "({theirs.step_ms/ours.step_ms:.1f}x). The cache takes {ours.cache_bytes:giga.1f} GB instead of "
    "{theirs.cache_bytes:giga.1f} GB.",
    ours=lambda files: at("generate.cases.8x16k.rows.int4-capture", files),
    theirs=lambda files: at("generate.cases.8x16k.rows.static", files),
)


def gains(files: Results) -> str:
    """What a step, batching and weights gain."""
    more = {"batching": render_batching.gain_sentence, "weights": render_weights.gain_sentence}
    return " ".join([end_to_end(files), *(told(files[name]) for name, told in more.items() if name in files)])


summary_caption = Text(
    f"Cache size: against 16 bits. Quality: {render_real.MODEL} on WikiText-2, behind prompts of "
    "{real_generate.n0:,} tokens. GPU attention: one decode step against the fastest bf16 kernel of PyTorch and "
    "FlashInfer ({decode.gpu:short}, {case.shape.batch} sequences of {case.context} tokens). CPU attention: against "
    "PyTorch on {cpu_decode.threads} threads of {article} {cpu_decode.cpu} ({cpu_decode.shape.length:,} tokens); a "
    "dash: not measured.{bare}",
    case=gpu_case,
    article=lambda files: "an" if files["cpu_decode"]["cpu"][0] in "AEIOU" else "a",
    bare=lambda files: bare_note("GPU attention", speedups(gpu_case(files)), SUMMARY_PRESETS, MEASURED_BARE),
)
PARTS = (
    Part(
        "summary",
        ("fidelity", "real_generate", "real_windows", "cpu_decode", "decode", "generate"),
        (summary_table, gains, summary_caption),
        optional=("batching", "weights"),
    ),
)
