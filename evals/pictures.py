"""The pictures of the README and of `docs/`: the numbers that each takes from results files, and how it is drawn.

`render_readme.py` writes them, which needs matplotlib. `hf_kvquant_evals/report/plots.py` decides their common look.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import render_real
from parts import Picture, short, thousands

from hf_kvquant_evals.report.plots import INK, MUTED, PALETTE, label, picture

# What pictures show of decode.json and generate.json, and in which colour. Names are those of decode_cases.py and
# bench_generate.py. The baseline is grey.
UNQUANTISED = "bf16"
COLOURS = {UNQUANTISED: MUTED, "int8": PALETTE[0], "int4": PALETTE[2]}
SPEED_CASE = "64x8k"
# The presets that the README shows, in this order.
SUMMARY_PRESETS = ["int8", "fp8", "k8v4", "int4", "int4-token"]
SYSTEMS = {
    "static": ("transformers static cache", COLOURS[UNQUANTISED]),
    "int8-static": ("int8 compiled", COLOURS["int8"]),
    "int4-static": ("int4 compiled", COLOURS["int4"]),
    "int4-capture": ("int4 captured", COLOURS["int4"]),
}


def bars(axes: Any, values: Sequence[tuple[float, float, str, str]]) -> None:
    """Draw horizontal bars from zero, without an axis: place from the top, length, label at the end, and colour."""
    for place, length, text, color in values:
        axes.barh(place, length, height=0.76, color=color)
        label(axes, text, (length, place), color)
    axes.set_xlim(0, max(length for _, length, _, _ in values))
    axes.margins(y=0.01)
    axes.invert_yaxis()
    axes.tick_params(left=False, bottom=False, labelbottom=False, labelcolor=INK)
    axes.spines[["left", "bottom"]].set_visible(False)


def lines(axes: Any, points: Mapping[str, Sequence[Any]], looks: Mapping[str, Mapping[str, Any]], **names: str) -> None:
    """Draw a line through the points of each name, with the name at its end."""
    for name, each in points.items():
        axes.plot(*zip(*each, strict=True), **looks[name])
        label(axes, names.get(name, name), each[-1], looks[name]["color"])


# --- quality, memory and speed of the presets -------------------------------------------------------------------------


def plotted_presets(results: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """`quality`: by preset of the README's table, relative size of the cache and share of next tokens that are others.
    `speed`: by preset, how many times as fast as bf16. `gpu`: its name."""
    sizes, quality, gpu = results["fidelity"]["presets"], render_real.measured_presets(results), results["decode"]
    whole = sizes["none"]["bytes_per_token"]
    (case,) = (case for case in gpu["cases"] if case["case"] == SPEED_CASE)
    return {
        "quality": {
            UNQUANTISED if name == "none" else name: [sizes[name]["bytes_per_token"] / whole, 1 - row["agreement"]]
            for name, row in quality.items()
            if name in SUMMARY_PRESETS or name == "none"
        },
        "speed": {UNQUANTISED: 1.0, **{row["preset"]: row["speedup"] for row in case["rows"]}},
        "gpu": short(gpu["gpu"]),
    }


def draw_presets(numbers: dict[str, Any], path: Path) -> None:
    """Draw quality against memory, and the speed of each preset."""
    size, speedup = numbers["quality"]["int4"][0], numbers["speed"]["int4"]
    title = f"int4 shrinks the cache to {size:.0%} and attends {speedup:.1f} times as fast"
    colours = {name: COLOURS.get(name, COLOURS["int8"]) for name in (*numbers["quality"], *numbers["speed"])}
    with picture(path, numbers, title, columns=2, height=2.7) as ((quality, speed),):
        for name, (size, change) in numbers["quality"].items():
            quality.plot(100 * size, 100 * change, "o", color=colours[name], zorder=3 if name == "int4" else 2)
            label(quality, name, (100 * size, 100 * change), colours[name])
        quality.set(title="next tokens that change, %", xlabel="size of the cache, % of bf16", xlim=(0, 105))
        quality.margins(y=0.15)
        quality.locator_params(nbins=4)
        quality.grid(axis="y")
        ranked = sorted(numbers["speed"].items(), key=lambda each: -each[1])
        bars(speed, [(i, ratio, f"{ratio:.1f}", colours[name]) for i, (name, ratio) in enumerate(ranked)])
        speed.set_yticks(range(len(ranked)), [name for name, _ in ranked])
        speed.set_title(f"decode attention, times bf16 ({numbers['gpu']})")


# --- one layer's decode attention on a GPU ----------------------------------------------------------------------------


def plotted_decode(gpu: dict[str, Any]) -> dict[str, Any]:
    """Points from left to right: `time` of one sequence by context, and `share` of the read bandwidth by MB. `gpu`: its
    name."""
    time: dict[str, list[list[float]]] = {}
    share: dict[str, list[list[float]]] = {}
    for case in gpu["cases"]:
        shape = case["shape"]
        rows = {row["preset"]: row for row in case["rows"] if row["preset"] in COLOURS}
        if shape["batch"] == 1:
            medians = {name: row["median_us"] for name, row in rows.items()}
            if case["best_bf16"] is not None:
                medians[UNQUANTISED] = case["best_bf16"]["median_us"]
            for name, median in medians.items():
                time.setdefault(name, []).append([shape["context"], median])
        if shape["head_dim"] == 128 and not shape["is_ragged"]:
            for name, row in rows.items():
                share.setdefault(name, []).append([row["bytes"] / 1e6, row["share"]])
    panels = {
        panel: {name: sorted(points) for name, points in lines.items()}
        for panel, lines in (("time", time), ("share", share))
    }
    return {**panels, "gpu": short(gpu["gpu"])}


def draw_decode(numbers: dict[str, Any], path: Path) -> None:
    """Draw time against context, and share of the bandwidth against bytes."""
    (context, unquantised), (_, int4) = (numbers["time"][name][-1] for name in (UNQUANTISED, "int4"))
    title = f"int4 attends {unquantised / int4:.1f} times as fast as bf16 at {thousands(context)} tokens"
    with picture(path, numbers, title, columns=2, height=2.8) as ((time, share),):
        lines(time, numbers["time"], {name: {"marker": "o", "color": color} for name, color in COLOURS.items()})
        ticks = sorted({context for points in numbers["time"].values() for context, _ in points})
        time.set(title="µs a step, one sequence, one layer", xlabel="context, tokens", xscale="log", yscale="log")
        time.set_xticks(ticks, [thousands(tick) for tick in ticks])
        time.yaxis.get_major_locator().set_params(subs=(1, 2, 5))
        time.yaxis.set_major_formatter("{x:g}")
        percent = {name: [(size, 100 * value) for size, value in each] for name, each in numbers["share"].items()}
        dots = {name: {"marker": "o", "linestyle": "", "color": color} for name, color in COLOURS.items()}
        lines(share, percent, dots)
        share.set(
            title=f"% of the read bandwidth ({numbers['gpu']})",
            xlabel="MB to read, any batch",
            xscale="log",
            ylim=(0, 105),
        )
        share.xaxis.set_major_formatter("{x:g}")
        for axes in (time, share):
            axes.minorticks_off()
            axes.grid(axis="y")


# --- generate on a GPU ------------------------------------------------------------------------------------------------


def plotted_generate(results: dict[str, Any]) -> dict[str, Any]:
    """`steps`: by case and system, milliseconds per step, `None` if not measured. `parameters` of the model, `gpu`."""
    found = {case["case"]: {row["system"]: row["step_ms"] for row in case["rows"]} for case in results["cases"]}
    steps = {case: {system: rows.get(system) for system in SYSTEMS} for case, rows in found.items()}
    return {"steps": steps, "parameters": results["parameters"], "gpu": short(results["gpu"])}


def draw_generate(numbers: dict[str, Any], path: Path) -> None:
    """Draw a group of bars for each case."""
    gains = {
        case: static / min(time for system, time in times.items() if system.startswith("int4") and time is not None)
        for case, times in numbers["steps"].items()
        if (static := times["static"]) is not None
    }
    case = max(gains, key=lambda name: gains[name])
    title = f"generate is up to {gains[case]:.1f} times as fast with an int4 cache"
    step = len(SYSTEMS) + 1
    with picture(path, numbers, title, height=4.2) as ((axes,),):
        bars(
            axes,
            [
                (
                    step * group + place,
                    time or 0.0,
                    f"{name}, {'not measured' if time is None else f'{time:.1f} ms'}",
                    colour,
                )
                for group, times in enumerate(numbers["steps"].values())
                for place, (time, (name, colour)) in enumerate(zip(times.values(), SYSTEMS.values(), strict=True))
            ],
        )
        ticks = [step * group + (len(SYSTEMS) - 1) / 2 for group in range(len(numbers["steps"]))]
        axes.set_yticks(ticks, [described_case(name) for name in numbers["steps"]])
        axes.set_title(f"time of a decode step, {numbers['parameters'] / 1e9:.0f} billion parameters, {numbers['gpu']}")


def described_case(name: str) -> str:
    """`8 sequences of 16k tokens`, on two lines."""
    batch, context = name.split("x")
    return f"{batch} sequence{'' if batch == '1' else 's'}\nof {context} tokens"


PICTURES = (
    Picture("presets", ("fidelity", "real_generate", "real_windows", "decode"), plotted_presets, draw_presets),
    Picture("decode", ("decode",), plotted_decode, draw_decode),
    Picture("generate", ("generate",), plotted_generate, draw_generate),
)
