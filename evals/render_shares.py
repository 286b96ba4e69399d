"""Tables of `bench_decode.py` for the pages: presets below four bits, batches of unequal lengths, whole prompts.

`render_readme.py` puts them into the pages.
"""

from __future__ import annotations

from typing import Any

from decode_cases import PROMPT, thousands

from hf_kvquant.common.tables import markdown_table as table

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
