"""The results of lm-eval's tasks: what is kept of each task under each preset, the averages, and the tables.

Values are kept per item, so that presets can be compared item by item later.
"""

from __future__ import annotations

import dataclasses
import math
import operator
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from rich import box
from rich.console import Console

from hf_kvquant.common.tables import or_dash, table_of, with_error
from hf_kvquant.presets import UNQUANTIZED

from ..measuring.pairs import DEQUANTIZED
from ..paired import bootstrap_average, mean_and_error, paired_accuracy, ratio_and_error
from .data import AVERAGED

# Metrics of items that are right or wrong. The first that a task has is the one that is compared.
ACCURACIES = ("acc", "exact_match", "acc_norm")
# Metrics of texts that are scored whole, and the unit by which each text is weighted.
_PER_UNIT = {"word_perplexity": "words", "byte_perplexity": "bytes", "bits_per_byte": "bytes"}
# The columns of a table after the preset, and what they mean.
HEADINGS = ("items", "acc, %", "norm, %", "change", "p", "same", "gold")
LEGEND = (
    "Acc: accuracy or exact match, with its standard error; norm: accuracy by log-likelihood per character. Change: "
    "accuracy minus that of the unquantised cache on the same items, in points, with its standard error; p: p-value of "
    "an exact McNemar test. Same: items with the same answer. Gold: mean change of the log-likelihood of the right "
    "answer, or of a whole text, in nats."
)

# One task under one preset, as `evaluate` returns it and a record keeps it.
Part = Mapping[str, Any]


def part_name(task: str, preset: str) -> str:
    """The name of one task under one preset in a results file."""
    return f"{task}/{preset}"


def by_task_and_preset(parts: Mapping[str, Part]) -> dict[tuple[str, str], Part]:
    """The parts of a results file, by task and preset."""
    return {(task, preset): part for name, part in parts.items() for task, _, preset in [name.partition("/")]}


def evaluate(lm: Any, name: str, task: Any, limit: int | None) -> dict[str, Any] | None:
    """Run a task, as `run` does, under the preset that the model has. Returns a part of a record, or `None`."""
    started = time.monotonic()
    found = run(lm, name, task, limit)
    if found is None:
        return None
    return {
        "task": name,
        "preset": lm.quant_config.to_dict(),
        **found,
        "pairs_read": lm.pairs_read,
        "pairs_expected": lm.pairs_expected,
        "pairs_dequantized": lm.pairs_dequantized,
        "seconds": round(time.monotonic() - started, 1),
    }


def run(lm: Any, name: str, task: Any, limit: int | None) -> dict[str, Any] | None:
    """Run one of lm-eval's tasks on a model for lm-eval, on all items or the first `limit`.

    Returns metrics, their standard errors and the values of items; `None` in a process of lm-eval that does not collect
    the results.
    """
    import lm_eval

    # Standard errors are computed here from the items: lm-eval's own bootstrap starts a pool of processes.
    results = lm_eval.evaluate(lm, {"tasks": {name: task}, "groups": {}}, limit=limit, bootstrap_iters=0)
    if results is None:
        return None
    samples = results["samples"][name]
    samples = sorted(
        (sample for sample in samples if sample["filter"] == samples[0]["filter"]), key=lambda sample: sample["doc_id"]
    )
    metrics = {
        key.partition(",")[0]: float(value)
        for key, value in results["results"][name].items()
        if key.endswith(f",{samples[0]['filter']}") and "_stderr" not in key and isinstance(value, (int, float))
    }
    items = item_values(task, samples)
    return {
        "num_items": len(samples),
        "metrics": metrics,
        "standard_errors": {metric: standard_error(metric, value, items) for metric, value in metrics.items()},
        "items": items,
    }


def item_values(task: Any, samples: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """The values kept per item, in lists over items; a task has only some of them.

    Accuracy metrics are 0 or 1. `answer` is the choice taken, whether the continuation is the greedy one (0 or 1), or
    the generated text; `gold_log_likelihood` that of the right choice or of the text, in nats. Texts that are scored
    whole have numbers of `words` and `bytes`.
    """
    items: dict[str, list[Any]] = {
        metric: [int(sample[metric]) for sample in samples] for metric in ACCURACIES if metric in samples[0]["metrics"]
    }
    if task.OUTPUT_TYPE == "multiple_choice":
        scores = [[float(score) for score, _ in sample["filtered_resps"]] for sample in samples]
        items["answer"] = [row.index(max(row)) for row in scores]
        gold = [gold_index(task, sample) for sample in samples]
        if all(index is not None for index in gold):
            items["gold_log_likelihood"] = [
                round(row[index], 6) for row, index in zip(scores, gold, strict=True) if index is not None
            ]
        return items
    found = [sample["filtered_resps"][0] for sample in samples]
    if task.OUTPUT_TYPE == "loglikelihood":
        items["answer"] = [int(is_greedy) for _, is_greedy in found]
        items["gold_log_likelihood"] = [round(float(value), 6) for value, _ in found]
    elif task.OUTPUT_TYPE == "loglikelihood_rolling":
        items["gold_log_likelihood"] = [round(float(value), 6) for value in found]
        for metric, unit in _PER_UNIT.items():
            if metric in samples[0]["metrics"]:
                items[unit] = [int(sample[metric][1]) for sample in samples]
    elif task.OUTPUT_TYPE == "generate_until":
        items["answer"] = list(map(str, found))
    return items


def gold_index(task: Any, sample: Mapping[str, Any]) -> int | None:
    """The index of an item's right choice; `None` if there is not exactly one."""
    doc = sample["doc"]
    gold = task.doc_to_text(doc) if task.multiple_input else sample["target"]
    if isinstance(gold, str):
        choices = task.doc_to_choice(doc)
        return choices.index(gold) if gold in choices else None
    return gold if isinstance(gold, int) else None


def standard_error(metric: str, value: float, items: Mapping[str, Sequence[Any]]) -> float | None:
    """The standard error of an aggregate over items; `None` unless it is a mean, a ratio of sums, or made from one."""
    if metric in items:
        return mean_and_error(items[metric])[1]
    if metric == "perplexity" and "gold_log_likelihood" in items:
        # exp(-mean): the error of the mean, times the slope.
        error = mean_and_error(items["gold_log_likelihood"])[1]
        return None if error is None else value * error
    if metric in _PER_UNIT and _PER_UNIT[metric] in items:
        _, error = ratio_and_error(items["gold_log_likelihood"], items[_PER_UNIT[metric]])
        slope = 1 / math.log(2) if metric == "bits_per_byte" else value
        return None if error is None else slope * error
    return None


@dataclasses.dataclass(frozen=True)
class Average:
    """The zero-shot average of a preset, with 95 % intervals from resampling items within tasks. All from 0 to 1."""

    value: float  # mean accuracy over tasks
    interval: tuple[float, float]
    # Of the change from the unquantised cache on the same items, which itself has none.
    change: float | None = None
    change_interval: tuple[float, float] | None = None


def averages(parts: Mapping[tuple[str, str], Part]) -> dict[str, Average]:
    """The average of each preset that ran all tasks of QServe's average. Empty if the unquantised cache did not."""
    right = {
        preset: {task: parts[task, preset]["items"]["acc"] for task in AVERAGED}
        for preset in dict.fromkeys(preset for _, preset in parts)
        if all((task, preset) in parts for task in AVERAGED)
    }
    found = {}
    for preset, tasks in right.items() if UNQUANTIZED in right else ():
        found[preset] = Average(*bootstrap_average(tasks))
        if preset != UNQUANTIZED:
            changes = {task: np.subtract(items, right[UNQUANTIZED][task]) for task, items in tasks.items()}
            change, interval = bootstrap_average(changes)
            found[preset] = dataclasses.replace(found[preset], change=change, change_interval=interval)
    return found


def average_lines(parts: Mapping[tuple[str, str], Part]) -> list[str]:
    """The averages in words; or, if some of their tasks did not run, a line that names those."""
    missing = [name for name in AVERAGED if name not in {task for task, _ in parts}]
    if missing:
        return [f"No average: it needs {', '.join(AVERAGED)}, and {', '.join(missing)} did not run."]
    lines = []
    for preset, average in averages(parts).items():
        low, high = average.interval
        line = f"average, {preset}: {average.value:.2%} ({low:.2%} to {high:.2%})"
        if average.change is not None and average.change_interval is not None:
            change, low, high = (100 * value for value in (average.change, *average.change_interval))
            line += f", change {change:+.2f} points ({low:+.2f} to {high:+.2f})"
        lines.append(line)
    return [*lines, f"Average: of {', '.join(AVERAGED)}, with 95 % intervals by resampling items within tasks."]


def show(console: Console, parts: Mapping[tuple[str, str], Part], *, title: str) -> None:
    """Print the table of tasks and presets, the averages, and what the columns mean."""
    rows: list[tuple[list[str], str | None]] = []
    others: list[str] = []
    for name in dict.fromkeys(task for task, _ in parts):
        rows += [([], None), ([name], "bold")]
        for preset, part in ((preset, part) for (task, preset), part in parts.items() if task == name):
            rows.append((cells(preset, part, parts.get((name, UNQUANTIZED))), None))
            spoken = [key for key, value in part["metrics"].items() if key not in ACCURACIES and value is not None]
            told = ", ".join(f"{key} {spelled(part['metrics'][key], part['standard_errors'][key])}" for key in spoken)
            others += [f"{name}, {preset}: {told}"] if spoken else []
    column = {"no_wrap": True, "overflow": "ellipsis"}
    headings = ("preset", *HEADINGS)
    console.print(table_of(headings, rows, title=title, left=("preset",), column=column, box=box.SIMPLE, padding=0))
    for line in [*others, *average_lines(parts)]:
        console.print(line, soft_wrap=True)
    if any(part.get("pairs_dequantized") for part in parts.values()):
        console.print(DEQUANTIZED, soft_wrap=True)
    console.print(LEGEND, style="dim")


def cells(preset: str, part: Part, reference: Part | None) -> list[str]:
    """A row of the table: the preset, then one cell for each of `HEADINGS`."""
    items, metrics, errors = part["items"], part["metrics"], part["standard_errors"]
    metric = next((name for name in ACCURACIES if name in items), None)
    row = [preset, str(part["num_items"])]
    for name in (metric, "acc_norm"):
        row.append("-" if name not in metrics else spelled(metrics[name], errors[name], percent=True))
    if reference is None or preset == UNQUANTIZED:
        return [*row, "-", "-", "-", "-"]
    pair = None if metric is None else paired_accuracy(items[metric], reference["items"][metric])
    row.append("-" if pair is None else with_error(100 * pair.difference, 100 * pair.standard_error, "+.2f"))
    row.append("-" if pair is None else f"{pair.p_value:.2f}")

    def by_item(name: str, compare: Callable[[Any, Any], float]) -> float | None:
        pairs = zip(items.get(name, ()), reference["items"].get(name, ()), strict=True)
        compared = [compare(mine, other) for mine, other in pairs]
        return statistics.fmean(compared) if compared else None

    same, change = by_item("answer", operator.eq), by_item("gold_log_likelihood", operator.sub)
    return [*row, or_dash(same, ".0%"), or_dash(change, "+.3f")]


def spelled(value: float, error: float | None, *, percent: bool = False) -> str:
    """A number with its standard error."""
    if percent:
        value, error = 100 * value, None if error is None else 100 * error
    return with_error(value, error, ".1f" if percent or abs(value) >= 100 else ".3f")
