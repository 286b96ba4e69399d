"""The tables of models with states: `generate` and continuous batching, from what `bench_generate.py` and
`bench_batching.py` measure, and what states cost in fewer bits (`state_drift.py`).
"""

from __future__ import annotations

from typing import Any

from parts import Part, Results, Row, Table, Text, at
from render_latent import newest_of, paths_of

step_table = Table(
    "cases",
    {
        "sequences x tokens": "{batch} x {context:,}",
        "a step of transformers, ms": "{rows.dynamic-no-cudnn.step_ms:.1f}",
        "`int8`, ms": "{rows.int8-capture.step_ms:.1f}",
        "`int4`, ms": "{rows.int4-capture.step_ms:.1f}",
        "as fast": "{rows.dynamic-no-cudnn.step_ms/rows.int8-capture.step_ms:.1f} times",
        "prompts of transformers, s": "{rows.dynamic-no-cudnn.prefill_ms:kilo.2f}",
        "`int8`, s": "{rows.int8-capture.prefill_ms:kilo.2f}",
        " as fast": "{rows.dynamic-no-cudnn.prefill_ms/rows.int8-capture.prefill_ms:.1f} times",
        "their peak, GB": "{rows.dynamic-no-cudnn.prefill_peak_bytes:giga.1f}",
        " `int8`, GB": "{rows.int8-capture.prefill_peak_bytes:giga.1f}",
    },
)
caption = Text(
    "`generate` with the shape of Qwen3.5-4B, 24 of 32 layers with a state alone, random weights in bfloat16. "
    "transformers {transformers} without flash-linear-attention and without cuDNN's attention, which makes a plan for "
    "each new number of tokens; our steps are captured. *Peak*: of memory while prompts are read, with "
    "{weight_bytes_read:giga.1f} GB of weights. {gpu}, torch {torch}, {date:day} "
    "(`evals/results/generate_qwen3_5_4b.json`)."
)
# The same workloads with states in most layers, and with keys and values in all.
HYBRID, DENSE = "batching_qwen3_5_4b", "batching_qwen3_4b"

batching_table = Table(
    lambda files: [
        {
            **ours,
            "own": at("int8", ours["rows"]),
            "half": at("int8-float16-states", ours["rows"]),
            "dense": at("int8", dense["rows"]),
        }
        for ours, dense in zip(files[HYBRID]["workloads"], files[DENSE]["workloads"], strict=True)
    ],
    {
        "requests": "{requests}",
        "prompts": "{prompt:,}",
        "new tokens": "{new:span}",
        "shared prefix": lambda row: "yes" if row["is_shared"] else "no",
        "Qwen3.5-4B, tokens/s": "{own.output_tokens_per_s:,.0f}",
        "Qwen3-4B, tokens/s": "{dense.output_tokens_per_s:,.0f}",
        "ratio": "{own.output_tokens_per_s/dense.output_tokens_per_s:.2f}",
        "states in float16, tokens/s": "{half.output_tokens_per_s:,.0f}",
        " ratio": "{half.output_tokens_per_s/dense.output_tokens_per_s:.2f}",
        "first token, s": "{own.first_token_s.median:.2f}",
        "of Qwen3-4B, s": "{dense.first_token_s.median:.2f}",
    },
)
batching_caption = Text(
    "Shapes of two models with about the same bytes of weights, random numbers, `{of.workloads.0.rows.0.system}`, "
    "{of.workloads.0.cache_gb:g} GB of cache, pages of {of.page_size}. The first token counts from the moment that all "
    "requests arrive. {of.gpu}, torch {of.torch}, transformers {of.transformers}, {of.date:day} ({paths}).",
    of=lambda files: files[HYBRID],
    paths=paths_of,
)
# Results files of `state_drift.py`: as trained, and with heads that remember longer.
DRIFT, SLOWER = "state_drift", "state_drift_slower"
SHOWN = {
    "float32": "float32",
    "fp16": "fp16",
    "bf16": "bf16",
    "bf16-stochastic": "bf16, rounded stochastically",
    "bf16-every-64": "bf16, every 64th token",
    "int8-key": "int8",
    "int8-value": "int8, scales of value channels",
    "int8-key-stochastic": "int8, rounded stochastically",
    "int8-key-every-64": "int8, every 64th token",
    "fp8-key": "fp8",
    "fp8-head": "fp8, a scale for a head",
    "int4-key": "int4",
    "int4-key-every-64": "int4, every 64th token",
    "conv-bf16": "float32, convolutions bf16",
    "model-in-bf16": "float32, the model in bf16",
}


def drift_rows(files: Results) -> list[Row]:
    """What each format costs on all texts, as trained and with heads that remember longer."""
    texts = {each["kind"]: each["rows"] for each in files[DRIFT]["texts"]}
    if SLOWER in files:
        texts["slower"] = files[SLOWER]["texts"][0]["rows"]
    return [
        {**{kind: at(name, rows) for kind, rows in texts.items() if at(name, rows)}, "shown": shown}
        for name, shown in SHOWN.items()
        if at(name, texts["text"])
    ]


def ends_of(files: Results) -> dict[str, str]:
    """Where the first, the middle and the last bucket of positions lie."""
    spans = files[DRIFT]["texts"][0]["spans"]
    return {name: f"{spans[i][0]:,} to {spans[i][1]:,}" for name, i in (("first", 0), ("middle", 2), ("last", 4))}


def drift_columns(files: Results) -> dict[str, str]:
    """Of the table of drift: divergence by position, then over all positions of other texts."""
    ends = ends_of(files)
    return {
        "states stored as": "{shown}",
        "KB": "{text.bytes:kilo,.0f}",
        f"at {ends['first']}": "{text.kld.0:scientific}",
        f"at {ends['middle']}": "{text.kld.2:scientific}",
        f"at {ends['last']}": "{text.kld.4:scientific}",
        "same next token": "{text.mean_agreement:.2%}",
        "perplexity": "{text.perplexity_change:+.3%}",
        "error of states": "{text.slow_error.4:.2%}",
        **{each["kind"]: f"{{{each['kind']}.mean_kld:scientific}}" for each in files[DRIFT]["texts"][1:]},
        **({f"{files[SLOWER]['slower']:g} times slower": "{slower.kld.4:scientific}"} if SLOWER in files else {}),
    }


def found_of(files: Results) -> dict[str, Any]:
    """What the caption says of the model and of its heads."""
    results = files[DRIFT]
    text = results["texts"][0]
    halves = [*text["slow_half_lives"], *text["fast_half_lives"]]
    return {
        "millions": results["parameters"] / 1e6,
        "states": results["layers"].count("linear_attention"),
        "layers": len(results["layers"]),
        "heads": results["state"][0],
        "sizes": f"{results['state'][1]} x {results['state'][2]}",
        "fewest": min(halves),
        "most": max(halves),
        "least_slow": min(text["slow_half_lives"]),
        "tokens": results["sequences"] * results["length"],
        "last": ends_of(files)["last"],
    }


drift_table = Table(drift_rows, drift_columns)
drift_caption = Text(
    "KL divergence of the next token from that with states in float32, nats a token, by position in the text; then in "
    "text that the model writes itself, *greedy* or *sampled*. States are rounded after every token. Scales are "
    "float16, one for a key channel and head if nothing else is said. *Error of states*: relative, at {of.last}, in "
    "the quarter of the heads that remembers longest (half is left after {of.least_slow:.0f} to {of.most:.0f} tokens; "
    "in all heads, after {of.fewest:.1f} or more).",
    "A twin of the reference model with {of.millions:.1f} million parameters (`evals/reference_model/README.md`): "
    "{of.states} of {of.layers} layers have a gated delta rule with {of.heads} heads of {of.sizes}. It computes in "
    "float32 and reads {of.tokens:,} tokens of WikiText-2, one by one. {newest.gpu|newest.cpu}, torch {newest.torch}, "
    "transformers {newest.transformers}, {newest.date:day} ({paths}).",
    of=found_of,
    newest=newest_of,
    paths=paths_of,
)
PARTS = (
    Part("states-generate", ("generate_qwen3_5_4b",), (step_table, caption)),
    Part("states-batching", (HYBRID, DENSE), (batching_table, batching_caption)),
    Part("states-drift", (DRIFT,), (drift_table, drift_caption), optional=(SLOWER,)),
)
