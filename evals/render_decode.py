"""What the pages say about decode attention of one layer on a GPU, from results of `bench_decode.py`."""

from __future__ import annotations

from typing import Any

from decode_cases import PROMPT, thousands
from parts import Part

from hf_kvquant.common.tables import markdown_table as table

# What is shown of `decode.json`. Names are those of decode_cases.py.
GPU_CASES = ["64x8k", "512x8k-1head", "32x4k-32heads", "128x16k", "64x16k-ragged", "16x8k", "1x128k", "1x8k", "1x1k"]
GPU_PRESETS = ["int8", "int4"]
PEER_CASES = ["64x8k", "512x8k-1head", "1x128k", "1x8k"]


def shown_cases(gpu: dict[str, Any], names: list[str]) -> list[dict[str, Any]]:
    """The named cases that were measured, in the order of the names."""
    cases = {case["case"]: case for case in gpu["cases"]}
    return [cases[name] for name in names if name in cases]


def describe_case(case: dict[str, Any]) -> str:
    """`64 x 8k`, or `64 x 1 to 16k` for ragged lengths."""
    return f"{case['shape']['batch']} x {describe_context(case)}"


def describe_context(case: dict[str, Any]) -> str:
    """`8k`, or `1 to 16k`."""
    context = f"{case['shape']['context'] // 1024}k"
    return f"1 to {context}" if case["shape"]["is_ragged"] else context


def describe_heads(case: dict[str, Any]) -> str:
    """`32/8`: query heads over key-value heads."""
    return f"{case['shape']['num_q_heads']}/{case['shape']['num_kv_heads']}"


def microseconds(number: float) -> str:
    """A time with one decimal, or none from 100 on."""
    return f"{number:.0f}" if number >= 100 else f"{number:.1f}"


def gpu_table(gpu: dict[str, Any]) -> str:
    """Times, ratios to the best bf16 kernel, and shares of the read bandwidth."""
    headings = ["batch x context", "heads", "best bf16, µs"]
    headings += [text for preset in GPU_PRESETS for text in (f"`{preset}`, µs", "against bf16", "of bandwidth")]
    lines = []
    for case in shown_cases(gpu, GPU_CASES):
        rows = {row["preset"]: row for row in case["rows"]}
        best = case["best_bf16"]
        cells = [describe_case(case), describe_heads(case), "-" if best is None else microseconds(best["median_us"])]
        for preset in GPU_PRESETS:
            row = rows.get(preset)
            if row is None:
                cells += ["-"] * 3
                continue
            ratio = "-" if row["speedup"] is None else f"{row['speedup']:.2f}x"
            cells += [microseconds(row["median_us"]), ratio, f"{row['share']:.0%}"]
        lines.append(cells)
    return table(headings, lines, num_text=2)


def gpu_caption(gpu: dict[str, Any]) -> str:
    """What was measured, on what and when."""
    return (
        f"One decode step of one layer on an {gpu['gpu']}, head_dim 128, {gpu['query_dtype']} queries. Heads are query "
        "heads over key-value heads. Ours includes appending the new token, and rotating and centring keys where the "
        "preset does so; the other kernels only attend. The best bf16 kernel is the fastest of PyTorch's and "
        "FlashInfer's, each at its best setting. The bandwidth is that of a plain kernel reading as many bytes in the "
        "same run. "
        f"Times are medians of {gpu['replays']} replays of a CUDA graph, after a short rest; its calls rotate over "
        f"buffers four times the L2 cache. Driver {gpu['driver']}, CUDA {gpu['cuda']}, {gpu['date'][:10]}, "
        "`evals/results/decode.json`."
    )


def peer_table(gpu: dict[str, Any]) -> str:
    """The time of every kernel that was measured, in microseconds: ours, then the others."""
    cases = shown_cases(gpu, PEER_CASES)
    ours = list(dict.fromkeys(row["preset"] for case in cases for row in case["rows"]))
    others = list(dict.fromkeys(row["peer"] for case in cases for row in case["peers"]))
    names = [(f"hf_kvquant `{name}`", "preset", "rows", name) for name in ours]
    # A peer's name begins with the type of its keys and values.
    names += [(f"{name.partition(' ')[2]}, {name.partition(' ')[0]}", "peer", "peers", name) for name in others]
    headings = ["kernel, µs", *(f"{describe_case(case)}, {describe_heads(case)}" for case in cases)]
    rows = []
    for label, key, kind, name in names:
        times = [next((row["median_us"] for row in case[kind] if row[key] == name), None) for case in cases]
        rows.append([label, *("-" if time is None else microseconds(time) for time in times)])
    return table(headings, rows)


def peer_caption(gpu: dict[str, Any]) -> str:
    """The versions of the other kernels."""
    versions = [f"{name.removesuffix('-python')} {number}" for name, number in gpu["peer_versions"].items() if number]
    return f"Measured in the same run as the table above. Other kernels: {', '.join(versions)}. A dash: not measured."


def short_sentence(gpu: dict[str, Any]) -> str:
    """What a step costs when there is little to read."""
    cases = shown_cases(gpu, ["1x1k", "1x8k"])
    times = [row["median_us"] for case in cases for row in case["rows"]]
    shortest = cases[0]
    return (
        f"One short sequence gains little: between 1,000 and 8,000 tokens, attention takes {min(times):.0f} to "
        f"{max(times):.0f} µs in every format. At 1,000 tokens the best bf16 kernel takes "
        f"{shortest['best_bf16']['median_us']:.1f} µs and `int4` {_time(shortest, 'int4'):.1f} µs. Batches of very "
        "unequal lengths use less of the bandwidth."
    )


def _time(case: dict[str, Any], preset: str) -> float:
    time: float = next(row["median_us"] for row in case["rows"] if row["preset"] == preset)
    return time


def head_dim_sentence(gpu: dict[str, Any]) -> str:
    """The share of the bandwidth that kernels reach when head_dim is not a power of two."""
    (case,) = shown_cases(gpu, ["64x8k-dim96"])
    rows = {row["preset"]: row for row in case["rows"]}
    shares = [row["share"] for row in rows.values()]
    return (
        f"A head_dim of 96 reaches {min(shares):.0%} to {max(shares):.0%} of the read bandwidth (`int8` is "
        f"{rows['int8']['speedup']:.1f} times as fast as bf16). Other head_dims that are not 64, 128 or 256 take the "
        "same path."
    )


# --- fewer bits, batches of unequal lengths, whole prompts ------------------------------------------------------------

# Ways to deal a batch to the GPU, by their keys in a row; the first is the row itself.
_WAYS = {"": "cut alike", "planned": "dealt by a plan", "pages": "pages, dealt by a plan"}


def few_bits_table(results: dict[str, Any]) -> str:
    """Per preset: the time of each case and the share of the bandwidth."""
    cases = results["cases"]
    lines: dict[str, list[str]] = {}
    for case in cases:
        for row in case["rows"]:
            cells = lines.setdefault(row["preset"], [f"`{row['preset']}`"])
            cells.append(f"{row['median_us']:.0f} ({row['share']:.0%})")
    headings = ["preset", *(f"{_name(case)}, µs" for case in cases)]
    return table(headings, list(lines.values()))


def few_bits_caption(results: dict[str, Any]) -> str:
    """What was measured."""
    return (
        "One decode step of one layer, as in the table above, and in brackets its share of "
        f"the read bandwidth. {_origin(results)}, `evals/results/decode_few_bits.json`."
    )


def uneven_table(results: dict[str, Any]) -> str:
    """Per range of lengths and preset: the share of the bandwidth each way."""
    lines = []
    for case in results["cases"]:
        for row in case["rows"]:
            shares = (row[way]["share"] if way else row["share"] for way in _WAYS)
            lines.append([_name(case), f"`{row['preset']}`", *(f"{share:.0%}" for share in shares)])
    return table(["sequences x tokens", "preset", *_WAYS.values()], lines, num_text=2)


def uneven_caption(results: dict[str, Any]) -> str:
    """What was measured."""
    return (
        "Share of the read bandwidth in a decode step over sequences whose lengths are spread evenly over a range. The "
        f"plan is made once a step and not counted. {_origin(results)}, `evals/results/decode_uneven.json`."
    )


def pages_table(results: dict[str, Any]) -> str:
    """Per preset: the time of each case with equal lengths, side by side in rows and in pages."""
    cases = [case for case in results["cases"] if not case["shape"]["is_ragged"]]
    lines: dict[str, list[str]] = {}
    for case in cases:
        for row in case["rows"]:
            plain, pages = row["median_us"], row["pages"]["median_us"]
            cells = lines.setdefault(row["preset"], [f"`{row['preset']}`"])
            cells += [f"{plain:.0f}", f"{pages:.0f}", f"{pages / plain - 1:+.1%}"]
    headings = ["preset"]
    for case in cases:
        headings += [f"{_name(case)}, µs", "in pages", "longer"]
    return table(headings, list(lines.values()))


def pages_caption(results: dict[str, Any]) -> str:
    """What was measured, and how near batches of unequal lengths come to the bandwidth."""
    uneven = next(case for case in results["cases"] if case["shape"]["is_ragged"])
    shares = (f"`{row['preset']}` reaches {row['pages']['share']:.0%}" for row in uneven["rows"])
    date = uneven.get("date", results["date"])[:10]  # of its own run, if it has one
    return (
        "One decode step of one layer with 32 query and 8 key-value heads of 128, over sequences of equal length. "
        f"With lengths spread evenly over a range ({_name(uneven)}), in pages {', '.join(shares)} of the read "
        f"bandwidth ({date}). {_origin(results)}, `evals/results/decode_pages.json`."
    )


def prompt_table(results: dict[str, Any]) -> str:
    """Per preset: the time of quantising a prompt and of the way back, and their shares of a copy's bandwidth."""
    lines = [
        [f"`{row['preset']}`", *(f"{each['median_us']:.0f} ({each['share']:.0%})" for each in (row, row["dense"]))]
        for row in results["prompt"]
    ]
    return table(["preset", "quantise, µs", "dequantise, µs"], lines)


def prompt_caption(results: dict[str, Any]) -> str:
    """What was measured."""
    batch, num_kv_heads, head_dim, tokens = PROMPT
    return (
        f"Keys and values of one layer, {batch} x {thousands(tokens)} tokens with {num_kv_heads} heads of {head_dim}, "
        "and in brackets the share of the bandwidth of a copy. Codes are dequantised only for attention that no "
        f"kernel serves. {_origin(results)}, `evals/results/dequantize.json`."
    )


def _name(case: dict[str, Any]) -> str:
    """`64 x 8k`, or `64 x 1 to 16k`."""
    batch, context = case["case"].split("x")
    return f"{batch} x {context.replace('-', ' to ')}"


def _origin(results: dict[str, Any]) -> str:
    return f"{results['gpu']}, torch {results['torch']}, {results['date'][:10]}"


PARTS = (
    Part("decode", ("decode",), (gpu_table, gpu_caption)),
    Part("kernels", ("decode",), (peer_table, peer_caption)),
    Part("short", ("decode",), (short_sentence,)),
    Part("head-dim", ("decode",), (head_dim_sentence,)),
    Part("few-bits", ("decode_few_bits",), (few_bits_table, few_bits_caption)),
    Part("uneven", ("decode_uneven",), (uneven_table, uneven_caption)),
    Part("pages", ("decode_pages",), (pages_table, pages_caption)),
    Part("prompt", ("dequantize",), (prompt_table, prompt_caption)),
)
