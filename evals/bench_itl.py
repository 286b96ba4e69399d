"""Inter-token latency: milliseconds of a decode step by the tokens held, for every preset and for bf16 caches.

    python evals/bench_itl.py --output evals/results/itl.json

Physics: a step reads the weights once, which costs the same at every context, and every token held. So its time is
about a line in the tokens held, whose slope is the bytes of a token over the bandwidth that attention reaches. A preset
costs something at any context (it transforms and quantises the new token) and saves in proportion to the context. From
its break-even context on it is faster.

Method:
- Random weights of Llama-3-8B's shape, all layers. The cache is filled with random keys and values instead of a
  prefill. Then `generate` makes new tokens, timed as in `bench_generate.py`. The last of them fills the context, and a
  row counts the tokens held in the middle of the timed steps.
- Arms: every preset, captured (`none` is bf16), and transformers' dynamic and compiled static cache in bf16. The
  dynamic cache is also measured without cuDNN's attention, which PyTorch plans anew in each step. The static cache
  attends to its whole capacity, so it gets that of the context, and compiles anew for each. That takes about 20 s, so
  it is measured only at the shortest context of a batch and at the longest up to 32k.
- The slope is that of least squares, per 1,000 tokens of all sequences together. The break-even context is in tokens of
  each sequence. It is interpolated between the measured contexts: from there on, to the end of what was measured, the
  preset is faster than every bf16 arm.
- What does not fit into memory, or fails, is listed with the reason. With `--resume`, rows that exist are kept.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
import time
from collections.abc import Sequence
from typing import Any

from bench_generate import add_roofline, attempt, begun
from bench_weights import measure_step
from generate_cases import MODELS, Case
from generate_systems import SYSTEMS, System, ours
from results_files import SHARED, add_run_options, earlier_results, parse_run, write_results
from rich.console import Console
from rich.table import Table

from hf_kvquant import PRESETS
from hf_kvquant_evals.provenance import gpu_state

ARMS: dict[str, System] = {
    **{name: SYSTEMS[name] for name in ("dynamic", "dynamic-no-cudnn")},
    **{preset: functools.partial(ours, preset=preset, capture=True) for preset in PRESETS},
    "static": SYSTEMS["static"],  # last, since it takes longest
}
BF16_ARMS = ("dynamic", "dynamic-no-cudnn", "static", "none")
DEFAULT_CASES = "1x1k 1x4k 1x16k 1x32k 1x64k 1x128k 8x1k 8x16k 8x64k".split()
# The most tokens of a context at which the static cache is measured beside the shortest one.
LONGEST_COMPILED = 32 * 1024
SKIPPED = "left out, since each context compiles anew and two give the line"

Point = tuple[float, float]  # tokens, milliseconds


# --- lines ------------------------------------------------------------------------------------------------------------


def fitted(points: Sequence[Point]) -> tuple[float, float] | None:
    """Intercept and slope of least squares; `None` for fewer than two places."""
    mean_x, mean_y = (sum(values) / len(points) for values in zip(*points, strict=True))
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    if spread == 0:
        return None
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / spread
    return mean_y - slope * mean_x, slope


def interpolated(points: Sequence[Point], x: float) -> float:
    """The height at `x` of straight lines between points in order. `x` lies between the first and the last."""
    for (left, low), (right, high) in itertools.pairwise(points):
        if left <= x <= right:
            return low + (high - low) * (x - left) / (right - left)
    return points[0][1]


def overtakes(points: Sequence[Point], others: Sequence[Point]) -> float | None:
    """From which tokens on `points` are below `others`, as far as both reach; `None` if not at the end of that.

    Both are in order. If they are below everywhere, it is where both begin.
    """
    begin, end = max(points[0][0], others[0][0]), min(points[-1][0], others[-1][0])
    places = sorted({x for x, _ in (*points, *others) if begin <= x <= end})
    if not places:
        return None
    gains = [interpolated(others, x) - interpolated(points, x) for x in places]
    if gains[-1] <= 0:
        return None
    last = max((i for i, gain in enumerate(gains) if gain <= 0), default=None)
    if last is None:
        return places[0]
    loss, gain = -gains[last], gains[last + 1]
    return places[last] + (places[last + 1] - places[last]) * loss / (loss + gain)


def lines_of(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """By batch and arm: slope, intercept, and for presets the context from which they are faster than bf16.

    `break_even` is `None` if a preset is never faster than every bf16 arm, or if there is no bf16 arm.
    """
    found = []
    for batch in sorted({row["batch"] for row in rows}):
        curves = {
            arm: sorted((row["tokens"], row["step_ms"]) for row in rows if (row["arm"], row["batch"]) == (arm, batch))
            for arm in ARMS
        }
        curves = {arm: points for arm, points in curves.items() if points}
        others = [points for arm, points in curves.items() if arm in BF16_ARMS]
        for arm, points in curves.items():
            line = fitted(points)
            starts = [] if arm in BF16_ARMS else [overtakes(points, each) for each in others]
            break_even = None if None in starts else max((start for start in starts if start is not None), default=None)
            found.append(
                {
                    "batch": batch,
                    "arm": arm,
                    "points": len(points),
                    "fixed_ms": None if line is None else line[0],
                    # From milliseconds per token of each sequence.
                    "us_per_1k": None if line is None else 1e6 * line[1] / batch,
                    "break_even": break_even,
                    "shortest": points[0][0],
                }
            )
    return found


# --- measuring --------------------------------------------------------------------------------------------------------


def measure(model: Any, arm: str, case: Case, num_new: int) -> dict[str, Any]:
    """One row, without its roofline.

    Raises:
        Exception: Whatever the arm fails with.
    """
    prompt = dataclasses.replace(case, context=case.context - num_new)
    figures = measure_step(model, prompt, num_new, ARMS[arm], calls=1)
    timed = num_new - num_new // 4
    return {"arm": arm, "case": case.name, **dataclasses.asdict(case), "tokens": case.context - timed / 2, **figures}


def is_left_out(arm: str, case: Case, cases: Sequence[Case]) -> bool:
    """Whether the static cache is not measured at a case, because two others of the batch give its line."""
    contexts = sorted(each.context for each in cases if each.batch == case.batch)
    short = [context for context in contexts if context <= LONGEST_COMPILED] or contexts[:1]
    return arm == "static" and case.context not in (short[0], short[-1])


# --- output -----------------------------------------------------------------------------------------------------------


def lines_table(results: dict[str, Any]) -> Table:
    """Slope and break-even context of every arm, and its steps."""
    cases = list(dict.fromkeys(row["case"] for row in results["rows"]))
    steps = {(row["arm"], row["case"]): row for row in results["rows"]}
    table = Table(title="milliseconds of a step, and its line", title_justify="left")
    for column in ("", "batch"):
        table.add_column(column)
    for column in ("us per 1k held", "fixed ms", "break-even", *cases):
        table.add_column(column, justify="right")
    for line in results["lines"]:
        arm, batch = line["arm"], line["batch"]
        of_batch = [steps.get((arm, case)) if case.startswith(f"{batch}x") else None for case in cases]
        table.add_row(
            arm,
            str(batch),
            *("" if line[key] is None else f"{line[key]:.2f}" for key in ("us_per_1k", "fixed_ms")),
            "" if line["break_even"] is None else f"{line['break_even']:,.0f}",
            *("" if row is None else f"{row['step_ms']:.2f}" for row in of_batch),
        )
    return table


def parse(words: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-3-8b", choices=MODELS, help="random weights (default: %(default)s)")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    told = f"batch x tokens held (default: {' '.join(DEFAULT_CASES)})"
    parser.add_argument("--cases", nargs="+", type=Case.parse, default=[*map(Case.parse, DEFAULT_CASES)], help=told)
    kept = "the rows in --output if they are of this commit, machine and model"
    add_run_options(parser, after="every row", resumed=kept, new_tokens=32)
    arguments = parse_run(parser, words)
    for case in arguments.cases:
        if case.context <= arguments.new_tokens:
            parser.error(f"--cases must hold more tokens than --new-tokens, {arguments.new_tokens}, got {case.name}")
    return arguments


def main() -> None:
    """Measure every arm at every case. Print a table, and the results as one line of JSON."""
    arguments = parse()
    started = time.perf_counter()
    console = Console(width=200)
    model, results = begun("bench_itl", arguments, console)
    earlier = earlier_results(results, arguments, (*SHARED, "new_tokens"))
    results["rows"] = earlier.get("rows", [])
    done = {(row["arm"], row["case"]) for row in results["rows"]}
    todo = [(arm, case) for arm in arguments.arms for case in arguments.cases if (arm, case.name) not in done]
    again = {(arm, case.name) for arm, case in todo}
    results["failures"] = [each for each in earlier.get("failures", []) if (each["arm"], each["case"]) not in again]

    def save() -> None:
        results["lines"] = lines_of(results["rows"])
        results["wall_s"] = time.perf_counter() - started
        write_results(results, arguments.output)

    for arm, case in todo:
        row, reason = None, SKIPPED
        if not is_left_out(arm, case, arguments.cases):
            row, reason = attempt(functools.partial(measure, model, arm, case, arguments.new_tokens))
        if row is not None:
            add_roofline(row, results["weight_bytes_read"], results["read_gbps"])
            results["rows"].append(row)
        else:
            results["failures"].append({"arm": arm, "case": case.name, "reason": reason})
        save()
        told = reason if row is None else f"{row['step_ms']:.3f} ms"
        console.print(f"{results['wall_s']:.0f} s: {arm}, {case.name}: {told}", highlight=False, markup=False)
    results["state_after"] = gpu_state() if arguments.device.type == "cuda" else None
    save()
    console.print(lines_table(results))
    print(json.dumps(results))


if __name__ == "__main__":
    main()
