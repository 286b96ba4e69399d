"""What the pages say about continuous batching on a GPU, and its picture, from what `bench_batching.py` measures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from parts import Part, Picture, Results, Row, Table, Text, at, of, origin, short
from pictures import COLOURS, UNQUANTISED, lines

from hf_kvquant_evals.report.plots import picture

# The systems that are compared, by their names in bench_batching.py.
THEIRS, OURS = "flash", "int4-token"
# What the picture shows, and how: a workload that was measured with several sizes of the cache.
DRAWN_WORKLOAD = "W1"
DRAWN = {THEIRS: ("bf16", COLOURS[UNQUANTISED]), "int8": ("int8", COLOURS["int8"]), OURS: (OURS, COLOURS["int4"])}
IMAGE = (
    "![Line chart: output tokens a second against the bytes of the cache, with a line each for bf16 and for "
    "presets.](../evals/results/batching.svg)"
)
# How tables call the systems that are no presets.
NAMES = {
    "transformers": "transformers, sdpa",
    THEIRS: "transformers, FlashAttention-2",
    "none": "`none`: our pages, bf16",
}


def both(results: Results) -> list[Row]:
    """What both systems served, by workload and memory: the workload, with their rows as `theirs` and `ours`."""
    order = sorted(results["workloads"], key=lambda found: (found["workload"], found["cache_gb"] or float("inf")))
    rows = [{**found, "theirs": at(THEIRS, found["rows"]), "ours": at(OURS, found["rows"])} for found in order]
    return [row for row in rows if row["theirs"] and row["ours"]]


def memory(found: Row) -> str:
    """`24 GB`."""
    return "all memory" if found["cache_gb"] is None else f"{found['cache_gb']:g} GB"


throughput_table = Table(
    both,
    {
        "requests": "{requests}",
        "tokens in": lambda row: f"{row['prompt']:,}" + (", shared" if row["is_shared"] else ""),
        "tokens out": "{new:span}",
        "cache": memory,
        "bf16, tokens/s": "{theirs.output_tokens_per_s:,.0f}",
        "`int4-token`, tokens/s": "{ours.output_tokens_per_s:,.0f}",
        "speed-up": "{ours.output_tokens_per_s/theirs.output_tokens_per_s:.1f}x",
        "tokens held: bf16, `int4-token`": "{theirs.most_held_tokens:kilo,.0f}k, {ours.most_held_tokens:kilo,.0f}k",
        "first token, s: bf16, `int4-token`": "{theirs.first_token_s.median:.1f}, {ours.first_token_s.median:.1f}",
    },
)


gain_sentence = Text(
    f"In continuous batching, `{OURS}` writes {{gains:range.1f}} times the tokens a second of transformers' own pages "
    "of the same size.",
    gains=lambda results: [
        row["ours"]["output_tokens_per_s"] / row["theirs"]["output_tokens_per_s"] for row in both(results)
    ],
)


def compared(results: Results) -> list[Row]:
    """What was measured on one workload, by the size of the cache and the number of requests."""
    found = [each for each in results["workloads"] if each["workload"] == DRAWN_WORKLOAD]
    return sorted(found, key=lambda each: (each["cache_gb"] or float("inf"), -each["requests"]))


def systems(results: Results) -> list[Row]:
    """A row of each system, with what it did in each of `compared`."""
    found = compared(results)
    measured = dict.fromkeys(row["system"] for each in found for row in each["rows"])
    return [
        {"shown": NAMES.get(name, f"`{name}`"), **{str(i): at(name, each["rows"]) for i, each in enumerate(found)}}
        for name in sorted(measured, key=lambda name: [*NAMES, name].index(name))
    ]


systems_table = Table(
    systems,
    lambda results: {
        "tokens/s": "{shown}",
        **{
            f"{memory(found)}, {found['requests']} requests": of(str(i), "{output_tokens_per_s:,.0f}")
            for i, found in enumerate(compared(results))
        },
    },
)


def held(results: Results) -> list[Row]:
    """Our rows with their workloads, the one with the shortest prompts first."""
    rows = [{**found, **row} for found in results["workloads"] for row in found["rows"] if row["system"] == OURS]
    return sorted(rows, key=lambda row: row["prompt"])


host_sentence = Text(
    "The host prepares a decode step while the one before it runs. With {few.requests} requests of {few.prompt:,} "
    "tokens each, that takes {few.host_s.median:milli.1f} ms of {few.next_token_s.median:milli.1f} ms; of "
    "{many.prompt:,} tokens each, {many.host_s.median:milli.1f} ms of {many.next_token_s.median:milli.1f} ms "
    "(`{many.system}`, {gpu}, transformers {transformers}, {date:day}, `evals/results/batching_host.json`).",
    few=lambda results: held(results)[0],
    many=lambda results: held(results)[-1],
)
caption = Text(
    "Greedy answers to requests that arrive at once, by a model with the shape of Llama-3-8B and random weights. bf16 "
    "is transformers' own continuous batching with FlashAttention-2 for prompts, a Triton kernel for decode steps, "
    "CUDA graphs and asynchronous batching. All systems have the same bytes of cache. Tokens held are the most at any "
    "step; shared ones count for each request. The first token waits for the requests before it. Requests of the last "
    "table are as in the first line. A dash: not measured.",
    origin("batching", "torch", "transformers"),
)
memory_caption = Text(
    "The same with all memory, and with fewer requests.", origin("batching_memory", "torch", "transformers")
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
    points = numbers["throughput"]
    most, theirs = points[THEIRS][-1]
    least, ours = next((point for point in points[OURS] if point[1] >= theirs), points[OURS][-1])
    memories = [memory for each in points.values() for memory, _ in each]
    title = f"{least:.0f} GB of {OURS} serve {ours / theirs:.1f} times what {most:.0f} GB of bf16 do"
    with picture(path, numbers, title, height=3.0) as ((axes,),):
        looks = {system: {"marker": "o", "color": color} for system, (_, color) in DRAWN.items()}
        lines(axes, points, looks, **{system: name for system, (name, _) in DRAWN.items()})
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
    Part("batching-memory", ("batching_memory",), (memory_caption, throughput_table, systems_table)),
    Part("batching-host", ("batching_host",), (host_sentence,)),
)
PICTURES = (Picture("batching", ("batching",), plotted, draw),)
