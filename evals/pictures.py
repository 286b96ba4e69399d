"""The pictures of the README: the numbers that each takes from a results file, and how they are drawn.

`render_readme.py` writes them, which needs matplotlib. How every picture looks is decided in
`hf_kvquant/evaluation/plots.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from generate_cases import Case

from hf_kvquant.evaluation.plots import GRID, PALETTE, picture


def plotted_presets(fidelity: dict[str, Any], cpu: dict[str, Any]) -> dict[str, dict[str, list[float]]]:
    """The numbers in the picture: per panel and label, what is drawn."""
    return {
        "quality": {
            name: [row["bits_per_value"], row["kld"]] for name, row in fidelity["presets"].items() if name != "none"
        },
        "speed": {
            name: [ratio]
            for name, ratio in {
                "PyTorch, unquantised": 1.0,
                **{row["preset"]: row["speedup"] for row in cpu["rows"]},
            }.items()
        },
    }


def draw_presets(numbers: dict[str, dict[str, list[float]]], path: Path) -> None:
    """Quality and speed side by side."""
    with picture(path, numbers, columns=2, size=(9.5, 3.2)) as (_, ((quality, speed),)):
        for name, (bits, kld) in numbers["quality"].items():
            quality.scatter(bits, kld, color=PALETTE[1])
            quality.annotate(name, (bits, kld), xytext=(7, -3), textcoords="offset points")
        quality.set(title="KL divergence from the unquantised cache", xlim=(3.5, 9.5), yscale="log")
        quality.set(xlabel="bits a value, scales and zeros included", ylabel="nats a token")
        labels = list(numbers["speed"])
        bars = speed.barh(labels, [ratio for (ratio,) in numbers["speed"].values()], color=PALETTE[0])
        speed.bar_label(bars, fmt="%.1f", padding=3)
        speed.set(title="Decode attention on a CPU", xlabel="times as fast as PyTorch", xlim=(0, 4.5))
        speed.invert_yaxis()
        for axes in (quality, speed):
            axes.grid(axis="y" if axes is quality else "x", color=GRID)


def plotted_decode(gpu: dict[str, Any]) -> dict[str, dict[str, list[list[float]]]]:
    """The numbers in the GPU's picture: per panel and label, points from left to right."""
    time: dict[str, list[list[float]]] = {}
    share: dict[str, list[list[float]]] = {}
    for case in gpu["cases"]:
        shape = case["shape"]
        rows = {row["preset"]: row for row in case["rows"]}
        if shape["batch"] == 1:
            medians = {name: row["median_us"] for name, row in rows.items()}
            if case["best_bf16"] is not None:
                medians["best bf16"] = case["best_bf16"]["median_us"]
            for name, median in medians.items():
                time.setdefault(name, []).append([shape["context"], median])
        if shape["head_dim"] == 128 and not shape["is_ragged"]:
            for name, row in rows.items():
                share.setdefault(name, []).append([row["bytes"] / 1e6, row["share"]])
    return {
        panel: {name: sorted(points) for name, points in lines.items()}
        for panel, lines in (("time", time), ("share", share))
    }


def draw_decode(numbers: dict[str, dict[str, list[list[float]]]], path: Path) -> None:
    """Time against context and share of bandwidth against bytes, side by side."""
    names = list(dict.fromkeys([*numbers["time"], *numbers["share"]]))
    colours = {name: "#555555" if name == "best bf16" else PALETTE[i % len(PALETTE)] for i, name in enumerate(names)}
    with picture(path, numbers, columns=2, size=(9.5, 3.6)) as (_, ((time, share),)):
        for name, points in numbers["time"].items():
            style = "--" if name == "best bf16" else "-"
            time.plot(*zip(*points, strict=True), style, marker="o", markersize=4, color=colours[name], label=name)
        ticks = sorted({context for points in numbers["time"].values() for context, _ in points})
        time.set(xscale="log", yscale="log", title="Time of one step, one sequence", xlabel="context", ylabel="µs")
        time.set_xticks(ticks, [f"{int(tick) // 1024}k" for tick in ticks])
        time.minorticks_off()
        time.legend(frameon=False)
        for name, points in numbers["share"].items():
            x, y = zip(*points, strict=True)
            share.scatter(x, [100 * value for value in y], s=18, color=colours[name], label=name)
        share.set(xscale="log", title="Share of the read bandwidth", xlabel="MB of codes, scales and zeros", ylabel="%")
        share.set_ylim(0, 105)
        share.legend(frameon=False, loc="lower right")
        for axes in (time, share):
            axes.grid(color=GRID)


def plotted_generate(results: dict[str, Any]) -> dict[str, dict[str, list[list[float]]]]:
    """The numbers in the picture: per panel, system and batch, points from short to long contexts."""
    panels: dict[str, dict[str, list[list[float]]]] = {"speed": {}, "memory": {}}
    for case in results["cases"]:
        for row in case["rows"]:
            label = f"{row['system']}, batch {case['batch']}"
            panels["speed"].setdefault(label, []).append([case["context"], row["tokens_per_s"]])
            if row["prefill_peak_bytes"] is not None:
                peak = max(row["prefill_peak_bytes"], row["decode_peak_bytes"])
                panels["memory"].setdefault(label, []).append([case["context"], peak / 1e9])
    return {panel: {label: sorted(points) for label, points in lines.items()} for panel, lines in panels.items()}


def draw_generate(numbers: dict[str, dict[str, list[list[float]]]], path: Path) -> None:
    """Tokens a second and memory against context, side by side."""
    # A colour for each system, a marker for each batch.
    systems, batches = (list(dict.fromkeys(label.split(", ")[i] for label in numbers["speed"])) for i in range(2))
    with picture(path, numbers, columns=2, size=(11.5, 3.6)) as (figure, ((speed, memory),)):
        for axes, lines in ((speed, numbers["speed"]), (memory, numbers["memory"])):
            for label, points in lines.items():
                system, batch = label.split(", ")
                colour, marker = PALETTE[systems.index(system) % len(PALETTE)], "os^D"[batches.index(batch) % 4]
                axes.plot(*zip(*points, strict=True), color=colour, marker=marker, markersize=5, label=label)
            ticks = sorted({context for points in lines.values() for context, _ in points})
            axes.set(xscale="log", xlabel="context, tokens")
            axes.set_xticks(ticks, [Case(1, int(tick)).name[2:] for tick in ticks])
            axes.minorticks_off()
            axes.grid(color=GRID)
        speed.set(title="Decoding", ylabel="tokens/s", yscale="log")
        memory.set(title="Peak memory, weights included", ylabel="GB", ylim=(0, None))
        figure.legend(*speed.get_legend_handles_labels(), frameon=False, fontsize="small", loc="outside right center")
