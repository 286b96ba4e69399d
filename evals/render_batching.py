"""What the pages say about continuous batching on a GPU, from `evals/results/batching.json` alone.

`bench_batching.py` measures, and `render_readme.py` puts the table and the picture into the pages.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from parts import Part, Picture
from pictures import COLOURS, UNQUANTISED, short

from hf_kvquant.common.tables import markdown_table as table
from hf_kvquant_evals.report.plots import label, picture

# The systems that are compared, by their names in bench_batching.py.
THEIRS, OURS = "flash", "int4-token"
# What the picture shows, and how: a workload that was measured with several sizes of the cache.
DRAWN_WORKLOAD = "W1"
DRAWN = {THEIRS: ("bf16", COLOURS[UNQUANTISED]), "int8": ("int8", COLOURS["int8"]), OURS: (OURS, COLOURS["int4"])}
IMAGE = (
    "![Line chart: output tokens a second against the bytes of the cache, with a line each for bf16 and for "
    "presets.](../evals/results/batching.svg)"
)
# All systems, and the sizes of the cache in GB with which they are compared on that workload; None: all memory.
NAMES = {
    "transformers": "transformers, sdpa",
    THEIRS: "transformers, FlashAttention-2",
    "none": "`none`: our pages, bf16",
}
COMPARED_GB = 24.0, None


def _pairs(results: dict[str, Any]) -> list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]]:
    """What both systems served, by workload and memory: the workload, their row and ours."""
    order = sorted(results["workloads"], key=lambda found: (found["workload"], found["cache_gb"] or float("inf")))
    rows = [(found, {row["system"]: row for row in found["rows"]}) for found in order]
    return [(found, each[THEIRS], each[OURS]) for found, each in rows if {THEIRS, OURS} <= each.keys()]


def _memory(found: dict[str, Any]) -> str:
    return "all memory" if found["cache_gb"] is None else f"{found['cache_gb']:g} GB"


def throughput_table(results: dict[str, Any]) -> str:
    """Per workload and memory: tokens per second, how many are held, and the wait for the first, of both systems."""
    headings = ["requests", "tokens in", "tokens out", "cache", "bf16, tokens/s", "`int4-token`, tokens/s", "speed-up"]
    headings += ["tokens held: bf16, `int4-token`", "first token, s: bf16, `int4-token`"]
    lines = []
    for found, *both in _pairs(results):
        fewest, most = found["new"]
        prompt = f"{found['prompt']:,}, shared" if found["is_shared"] else f"{found['prompt']:,}"
        cells = [str(found["requests"]), prompt, f"{fewest:,} to {most:,}" if fewest < most else f"{most:,}"]
        cells.append(_memory(found))
        speeds = [row["output_tokens_per_s"] for row in both]
        cells += [f"{speed:,.0f}" for speed in speeds] + [f"{speeds[1] / speeds[0]:.1f}x"]
        cells.append(", ".join(f"{row['most_held_tokens'] / 1e3:,.0f}k" for row in both))
        cells.append(", ".join(f"{row['first_token_s']['median']:.1f}" for row in both))
        lines.append(cells)
    return table(headings, lines)


def gain_sentence(results: dict[str, Any]) -> str:
    """The range of speed-ups over all workloads that both systems served."""
    gains = [ours["output_tokens_per_s"] / theirs["output_tokens_per_s"] for _, theirs, ours in _pairs(results)]
    return (
        f"In continuous batching, `{OURS}` writes {min(gains):.1f} to {max(gains):.1f} times the tokens a second of "
        "transformers' own pages of the same size."
    )


def systems_table(results: dict[str, Any]) -> str:
    """Tokens per second on one workload: a row per system, a column per size of the cache and number of requests."""
    measured = [
        found
        for found in results["workloads"]
        if found["workload"] == DRAWN_WORKLOAD and found["cache_gb"] in COMPARED_GB
    ]
    measured.sort(key=lambda found: (COMPARED_GB.index(found["cache_gb"]), -found["requests"]))
    speeds = [{row["system"]: f"{row['output_tokens_per_s']:,.0f}" for row in found["rows"]} for found in measured]
    systems = dict.fromkeys([*NAMES, *(name for each in speeds for name in each)])
    lines = [[NAMES.get(name, f"`{name}`"), *(each.get(name, "-") for each in speeds)] for name in systems]
    return table(["tokens/s", *(f"{_memory(found)}, {found['requests']} requests" for found in measured)], lines)


def host_sentence(results: dict[str, Any]) -> str:
    """How long the host works on a step of ours, and the step takes, with few and with many tokens held."""
    rows = [(found, row) for found in results["workloads"] for row in found["rows"] if row["system"] == OURS]
    (few, short), (many, long) = sorted(rows, key=lambda each: each[0]["prompt"])

    def ms(row: dict[str, Any], name: str) -> str:
        return f"{row[name]['median'] * 1e3:.1f} ms"

    return (
        "The host prepares a decode step while the one before it runs. "
        f"With {few['requests']} requests of {few['prompt']:,} tokens each, that takes {ms(short, 'host_s')} of "
        f"{ms(short, 'next_token_s')}; of {many['prompt']:,} tokens each, {ms(long, 'host_s')} of "
        f"{ms(long, 'next_token_s')} (`{OURS}`, {results['gpu']}, transformers {results['transformers']}, "
        f"{results['date'][:10]}, `evals/results/batching_host.json`)."
    )


def caption(results: dict[str, Any]) -> str:
    """What was measured, on what and when."""
    return (
        "Greedy answers to requests that arrive at once, by a model with the shape of Llama-3-8B and random weights. "
        "bf16 is transformers' own continuous batching with FlashAttention-2 for prompts, a Triton kernel for decode "
        "steps, CUDA graphs and asynchronous batching. All systems have the same bytes of cache. Tokens held are the "
        "most at any step; shared ones count for each request. The first token waits for the requests before it. "
        f"Requests of the last table are as in the first line. A dash: not measured. {results['gpu']}, torch "
        f"{results['torch']}, transformers {results['transformers']}, {results['date'][:10]}, "
        "`evals/results/batching.json`."
    )


# --- the picture ------------------------------------------------------------------------------------------------------


def plotted(results: dict[str, Any]) -> dict[str, Any]:
    """`throughput`: by system, points of GB of cache and tokens a second, from the smallest cache on. `requests`,
    `prompt` and `new` of the workload. `gpu`: its name."""
    measured = [found for found in results["workloads"] if found["workload"] == DRAWN_WORKLOAD]
    whole = max(measured, key=lambda found: found["requests"])
    found = [each for each in measured if each["requests"] == whole["requests"]]
    rows = [row for each in found for row in each["rows"]]
    points = {
        system: sorted(
            [row["room_tokens"] * row["bytes_per_token"] / 1e9, row["output_tokens_per_s"]]
            for row in rows
            if row["system"] == system
        )
        for system in DRAWN
    }
    return {
        "throughput": {system: each for system, each in points.items() if each},
        **{key: whole[key] for key in ("requests", "prompt", "new")},
        "gpu": short(results["gpu"]),
    }


def draw(numbers: dict[str, Any], path: Path) -> None:
    """Draw tokens a second against the bytes of the cache."""
    lines = numbers["throughput"]
    most, theirs = lines[THEIRS][-1]
    least, ours = next((point for point in lines[OURS] if point[1] >= theirs), lines[OURS][-1])
    memories = [memory for points in lines.values() for memory, _ in points]
    title = f"{least:.0f} GB of {OURS} serve {ours / theirs:.1f} times what {most:.0f} GB of bf16 do"
    with picture(path, numbers, title, height=3.0) as ((axes,),):
        for system, points in lines.items():
            name, color = DRAWN[system]
            axes.plot(*zip(*points, strict=True), marker="o", color=color)
            label(axes, name, points[-1], color)
        fewest, largest = numbers["new"]
        what = f"{numbers['requests']} requests, {numbers['prompt']:,} tokens in, {fewest} to {largest} out"
        axes.set(title=f"output tokens a second ({numbers['gpu']}; {what})", xlabel="GB of cache", xscale="log")
        axes.set_xticks(ticks := [4, 8, 16, 32, 64, 128], map(str, ticks))
        axes.set_xlim(0.9 * min(memories), 1.05 * max(memories))
        axes.minorticks_off()
        axes.set_ylim(0, None)
        axes.grid(axis="y")


PARTS = (
    Part("batching", ("batching",), (IMAGE, throughput_table, systems_table, caption)),
    Part("batching-host", ("batching_host",), (host_sentence,)),
)
PICTURES = (Picture("batching", ("batching",), plotted, draw),)
