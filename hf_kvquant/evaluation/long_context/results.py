"""The results of `eval long`: what is kept of each test at one length and depth, the summary, and the tables."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console

from ...common.tables import or_dash, print_table, with_error
from ..measuring.fidelity import UNQUANTIZED
from ..measuring.pairs import DEQUANTIZED, Pairs
from ..paired import mean_and_error
from ..records import RunRecord
from .prompts import NUM_ANSWERS

# Presets are scored only where the unquantised cache gets this share of answers right. A test that the model fails
# anyway says nothing about the cache, and right answers by chance would make a preset look better than it is.
MIN_ACCURACY = 0.9
SUMMARY = "summary"  # the part of a record with all presets


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scores(Pairs):
    """The scores of some prompts under one config."""

    correct: list[bool]  # whether greedy decoding gives the answer
    log_likelihood: list[float]  # of the whole answer, given context and question, in nats


@dataclasses.dataclass(frozen=True)
class Cell:
    """One test at one length and depth."""

    test: str
    length: int
    depth: float

    @property
    def part(self) -> str:
        """Name of its part in a record."""
        return f"{self.test}/{self.length}/{self.depth:g}"


def joined(parts: Sequence[Scores]) -> dict[str, Any]:
    """The batches of one cell, joined into a part of a record."""
    return {
        **{name: [each for part in parts for each in getattr(part, name)] for name in ("correct", "log_likelihood")},
        **{name: sum(part.counts[name] for part in parts) for name in parts[0].counts},
    }


def summarize(record: RunRecord, cells: Sequence[Cell], presets: Mapping[str, Any]) -> dict[str, Any]:
    """Per preset: accuracy over the scored cells, and the mean change of the log-likelihood over all cells."""
    results = [record.get(cell.part) for cell in cells]
    scored = [result for result in results if is_scored(result)]
    summary = {}
    for name in presets:
        change, error = mean_and_error([change for result in results for change in changes_of(result, name)])
        correct = [value for result in scored for value in result[name]["correct"]]
        summary[name] = {
            "num_cells": len(cells),
            "num_scored": len(scored),
            "accuracy": statistics.fmean(correct) if correct else None,
            "log_likelihood_change": change,
            "standard_error": error,
            "pairs_dequantized": sum(result[name].get("pairs_dequantized", 0) for result in results),
        }
    return summary


def is_scored(result: Mapping[str, Any]) -> bool:
    """Whether the unquantised cache gets `MIN_ACCURACY` of a cell right, so that presets are scored there."""
    return accuracy_of(result, UNQUANTIZED) >= MIN_ACCURACY


def accuracy_of(result: Mapping[str, Any], preset: str) -> float:
    """The share of a cell's answers that are right."""
    return statistics.fmean(result[preset]["correct"])


def changes_of(result: Mapping[str, Any], preset: str) -> list[float]:
    """By how much a preset changes the log-likelihood of the answer, per prompt, in nats."""
    exact, other = (result[name]["log_likelihood"] for name in (UNQUANTIZED, preset))
    return [after - before for before, after in zip(exact, other, strict=True)]


def show(console: Console, record: RunRecord, cells: Sequence[Cell], *, title: str) -> None:
    """Print a table per test and preset, a summary of all presets, and notes on what they mean."""
    summary = record.get(SUMMARY) or {}
    depths, lengths, tests = (
        dict.fromkeys(getattr(cell, name) for cell in cells) for name in ("depth", "length", "test")
    )
    for test in tests:
        for name in summary:
            rows = [
                [f"{length:,}", *(cell_text(record.get(Cell(test, length, depth).part), name) for depth in depths)]
                for length in lengths
            ]
            print_table(console, ["tokens", *(f"{depth:g} %" for depth in depths)], rows, title=f"{test}, {name}")
    print_table(
        console,
        ("preset", "cells scored", "right", "log-likelihood, nats/answer"),
        [
            (
                name,
                f"{row['num_scored']} of {row['num_cells']}",
                or_dash(row["accuracy"], ".1%"),
                with_error(row["log_likelihood_change"], row["standard_error"], "+.4f"),
            )
            for name, row in summary.items()
        ],
        title=title,
        notes=_notes(summary),
    )


def cell_text(result: Mapping[str, Any], preset: str) -> str:
    """Accuracy of a preset in a cell, and on a second line the log-likelihood of the answer or its change."""
    accuracy = f"{accuracy_of(result, preset):.0%}"
    if preset == UNQUANTIZED:
        log_likelihood = statistics.fmean(result[preset]["log_likelihood"])
        return f"{accuracy if is_scored(result) else f'{accuracy}, cannot'}\n{log_likelihood:.2f}"
    change = statistics.fmean(changes_of(result, preset))
    return f"{accuracy if is_scored(result) else 'cannot'}\n{change:+.3f}"


def _notes(summary: Mapping[str, Any]) -> list[str]:
    notes = [
        f"Rows: tokens of the prompt; columns: depth of the number. Right: answers whose every token is the most "
        f"likely one, in cells where '{UNQUANTIZED}' gets {MIN_ACCURACY:.0%} right; cannot: the model itself fails "
        f"there. Below: log-likelihood of the right answer under '{UNQUANTIZED}', nats (a guess: "
        f"{-math.log(NUM_ANSWERS):.1f}), and how presets change it on the same prompts, ± one standard error. "
        "Questions and answers read codes, which was checked by counting."
    ]
    if any(row["pairs_dequantized"] for row in summary.values()):
        notes.append(DEQUANTIZED)
    if not any(row["num_scored"] for row in summary.values()):
        notes.append("The model itself fails in every cell, so only the log-likelihoods compare presets.")
    return notes
