"""What the pages say about the time of a step by the tokens held, from what `bench_itl.py` measures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from parts import Cell, Part, Picture, Results, Row, Table, Text, not_measured, of, origin, short, thousands
from pictures import COLOURS, UNQUANTISED, lines
from render_generate import SCENARIO_SYSTEMS

from hf_kvquant_evals.report.plots import PALETTE, picture

# The caches of bf16, by their names in bench_itl.py.
NAMES = {name: SCENARIO_SYSTEMS[name] for name in ("dynamic", "dynamic-no-cudnn", "static")}
NAMES["none"] = "bf16, captured"
IMAGE = (
    "![Line charts: the time of a decode step against the tokens held, for one sequence and for several. All lines "
    "rise; the fewer bits a cache has, the flatter its line.](../evals/results/itl.svg)"
)
# What the picture shows, and how. Steps with the dynamic cache take several times as long, whatever the context.
DRAWN = {
    "static": {"color": COLOURS[UNQUANTISED], "linestyle": "--", "marker": "o"},
    "none": {"color": COLOURS[UNQUANTISED], "marker": "o"},
    "int8": {"color": COLOURS["int8"], "marker": "s"},
    # Hollow, so that a preset that is nearly as fast shows behind it.
    "int2": {"color": PALETTE[4], "marker": "D"},
    "int4-token": {"color": COLOURS["int4"], "marker": "o", "markerfacecolor": "none", "markersize": 8},
}


def arms(results: Results) -> list[Row]:
    """A row of each arm, with its lines by batch and its steps by case."""
    names = dict.fromkeys(line["arm"] for line in results["lines"])
    return [
        {
            "shown": NAMES.get(arm, f"`{arm}`"),
            **{f"{line['batch']}": line for line in results["lines"] if line["arm"] == arm},
            **{row["case"]: row for row in results["rows"] if row["arm"] == arm},
        }
        for arm in names
    ]


def faster_from(line: Row) -> str:
    """From which context on a preset is faster than bf16."""
    start = line["break_even"]
    if line["arm"] in NAMES:
        return ""
    if start is None:
        return "-"
    return "all" if start <= line["shortest"] else f"{round(start, -2):,.0f}"


def sloped(results: Results) -> list[int]:
    """The batches of which there are lines. Cases that are the only ones of their batch give none."""
    return sorted({line["batch"] for line in results["lines"] if line["us_per_1k"] is not None})


def columns(results: Results) -> list[tuple[str, Cell]]:
    """Those of lines, then those of single cases."""
    found: list[tuple[str, Cell]] = [("cache", "{shown}")]
    for batch in sloped(results):
        found.append((f"batch {batch}: µs per 1,000 tokens", of(f"{batch}", "{us_per_1k:.2f}")))
        found += [("ms besides", of(f"{batch}", "{fixed_ms:.2f}")), ("faster from", of(f"{batch}", faster_from))]
    single = dict.fromkeys(row["case"] for row in results["rows"] if row["batch"] not in sloped(results))
    return [*found, *((f"{case.replace('x', ' x ')}: ms", of(case, "{step_ms:.2f}")) for case in single)]


def reasons(results: Results) -> list[str]:
    """Why numbers are missing, once for each arm and reason."""
    cases: dict[tuple[str, str], list[str]] = {}
    for failure in results["failures"]:
        reason = failure["reason"].split(". ")[0].rstrip(".")
        cases.setdefault((failure["arm"], reason), []).append(failure["case"].replace("x", " x "))
    return [f"{NAMES.get(arm, arm)} at {', '.join(at)} ({reason})" for (arm, reason), at in cases.items()]


slope_table = Table(arms, columns)
caption = Text(
    "Decode steps of a model with the shape of Llama-3-8B and random bfloat16 weights, over caches filled with random "
    "numbers. Presets and bf16 are captured; transformers' static cache is compiled. µs per 1,000 tokens: the slope of "
    "least squares, per 1,000 tokens of all sequences together; ms besides: where that line begins. Faster from: the "
    "tokens of each sequence from which a step is faster than with every bf16 cache; all: at every measured context; a "
    "dash: not at the longest one where both were measured, or not measured.{missing}",
    origin("itl", "torch", "transformers"),
    missing=lambda results: not_measured(reasons(results)),
)


# --- the picture ------------------------------------------------------------------------------------------------------


def plotted(results: dict[str, Any]) -> dict[str, Any]:
    """`steps`: by batch and arm, points of tokens of each sequence and ms. `slopes`: of batch 1, or the smallest, by
    arm. `gpu`: its name."""
    batches = sloped(results)
    steps = {
        str(batch): {
            arm: points
            for arm in DRAWN
            if (
                points := sorted(
                    [row["tokens"], row["step_ms"]]
                    for row in results["rows"]
                    if (row["arm"], row["batch"]) == (arm, batch)
                )
            )
        }
        for batch in batches
    }
    slopes = {line["arm"]: line["us_per_1k"] for line in results["lines"] if line["batch"] == batches[0]}
    return {"steps": steps, "slopes": slopes, "gpu": short(results["gpu"])}


def draw(numbers: dict[str, Any], path: Path) -> None:
    """Draw the time of a step against the tokens held, a panel for each batch, both on logarithmic scales."""
    slopes = numbers["slopes"]
    plain = min(slopes[arm] for arm in NAMES if slopes.get(arm) is not None)
    title = f"1,000 tokens cost a step {slopes['int4-token']:.1f} µs with int4-token, {plain:.1f} with bf16"
    batches = numbers["steps"]
    with picture(path, numbers, title, columns=len(batches), height=3.0) as (panels,):
        for axes, (batch, arms) in zip(panels, batches.items(), strict=True):
            lines(axes, arms, DRAWN, **NAMES)
            count = "one sequence" if batch == "1" else f"{batch} sequences"
            axes.set(title=f"ms a step, {count} ({numbers['gpu']})", xlabel="tokens of each sequence")
            axes.set(xscale="log", yscale="log")
            held = [tokens for points in arms.values() for tokens, _ in points]
            times = [time for points in arms.values() for _, time in points]
            axes.set_ylim(0.75 * min(times), 1.2 * max(times))
            within = [tokens for tokens in (2**power * 1024 for power in (0, 2, 4, 7)) if tokens <= 1.1 * max(held)]
            axes.set_xticks(within, list(map(thousands, within)))
            shown = [time for time in (5, 10, 20, 50, 100, 200) if min(times) <= time <= 1.2 * max(times)]
            axes.set_yticks(shown, list(map(str, shown)))
            axes.minorticks_off()
            axes.grid(axis="y")


PARTS = (Part("itl", ("itl",), (IMAGE, slope_table, caption)),)
PICTURES = (Picture("itl", ("itl",), plotted, draw),)
