"""The tables of `eval recipes`, in a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich import box
from rich.console import Console

from hf_kvquant.common.tables import or_dash, table_of, with_error

from ..records import Record
from .recipe_run import SUMMARY

# The columns behind the bits: what they show of a row, and its format.
COLUMNS = {
    "KL": ("kld", ".1e"),
    "99 %": ("kld_p99", ".1e"),
    "99.9 %": ("kld_p999", ".1e"),
    "agree": ("agreement", ".1%"),
    "ppl": ("perplexity_change", "+.2%"),
}


def rows_of(record: Record) -> dict[str, dict[str, Any]]:
    """By recipe, the row of a finished record."""
    rows: dict[str, dict[str, Any]] = record["parts"][SUMMARY]["recipes"]
    return rows


def show(console: Console, record: Record) -> None:
    """Print the tables of a finished record, and below each what its columns mean."""
    settings, rows = record["settings"], rows_of(record)
    first = next(iter(rows.values()))
    context = settings["context"]
    title = f"{settings['model']}, {settings['dtype']}"
    headings = ["recipe", "bits", "read", *COLUMNS]
    _print(console, headings, {name: quality_cells(row) for name, row in rows.items()}, title)
    console.print(
        f"{first['scored_tokens']:,} tokens in windows of {settings['window']}, perplexity "
        f"{first['reference_perplexity']:.3f} with the unquantised cache. Bits of a value, with scales, outliers and "
        f"dense tokens: in a cache of {context:,} tokens, and read: averaged over what attention read here. KL: "
        "divergence of the next token under the recipe from that under the unquantised cache, nats, its mean and "
        "percentiles. Agree: the same most likely next token. Ppl: change of perplexity.",
        style="dim",
    )
    if first["drift"] is not None:
        spans = [f"{span['begin']} to {span['end']}" for span in first["drift"]]
        headings = ["recipe", *(f"KL, {span}" for span in spans), "NLL at the end"]
        title = f"{settings['drift_prompts']} texts that the model wrote with each recipe"
        _print(console, headings, {name: drift_cells(row["drift"]) for name, row in rows.items()}, title)
        console.print(
            "KL divergence of the next token under the unquantised cache, which reads the same text, from that under "
            "the recipe, by length. NLL: by how many nats a token the last tokens are harder to predict, by the "
            "unquantised cache, than those that it wrote itself, ± one standard error.",
            style="dim",
        )
    if first["needles"] is not None:
        title = f"{settings['needle_prompts']} numbers hidden in {settings['window']} tokens"
        cells = {name: needle_cells(row["needles"]) for name, row in rows.items()}
        _print(console, ["recipe", "found", "log-likelihood, nats/answer"], cells, title)
        console.print(
            "Found: shown only if the unquantised cache finds 90 %. Log-likelihood of the right answer: change against "
            "the unquantised cache, ± one standard error.",
            style="dim",
        )
    if first.get("tasks") is not None:  # records of older versions have no such key
        title = f"{first['tasks']['num_items']:,} items of {', '.join(settings['tasks'])}"
        headings = ["recipe", "codes", "acc", "change", "log-likelihood, nats/answer", "same"]
        _print(console, headings, {name: task_cells(row["tasks"]) for name, row in rows.items()}, title)
        length = settings["task_context"]
        before = f", with text before each item that fills the cache with {length} tokens" if length else ""
        console.print(
            f"Zero-shot{before}. Means over tasks. Codes: the share of what attention read that was codes. Acc: "
            f"accuracy, {first['tasks']['reference_accuracy']:.1%} with the unquantised cache; its change is in "
            "points. Log-likelihood: its change for the right answer. ±: one standard error. Same: the same answer "
            "as with the unquantised cache.",
            style="dim",
        )


def _print(console: Console, headings: list[str], rows: Mapping[str, list[str]], title: str) -> None:
    cells = (([name, *row], None) for name, row in rows.items())
    options: dict[str, Any] = {"box": box.SIMPLE_HEAD, "pad_edge": False, "collapse_padding": True}
    table = table_of(headings, cells, title=title, left=("recipe",), **options)
    table.columns[0].no_wrap = True  # names stay whole, so that they can be typed again
    console.print(table)


def quality_cells(row: Mapping[str, Any]) -> list[str]:
    """The cells of the first table, behind the name."""
    bits = [f"{row[which]['both']:.2f}" for which in ("bits", "bits_read")]
    return bits + [or_dash(row[key], form) for key, form in COLUMNS.values()]


def drift_cells(drift: list[dict[str, Any]]) -> list[str]:
    """The cells of the second table, behind the name: the divergence by length, and the change of the NLL."""
    error = drift[-1]["nll_change_standard_error"]
    change = f"{drift[-1]['nll_change']:+.2f}" + ("" if error is None else f" ± {error:.2f}")
    return [*(f"{span['kld']:.1e}" for span in drift), change]


def needle_cells(row: Mapping[str, Any]) -> list[str]:
    """The cells of the third table, behind the name."""
    return [or_dash(row["accuracy"], ".0%"), log_likelihood_change(row)]


def task_cells(row: Mapping[str, Any]) -> list[str]:
    """The cells of the fourth table, behind the name."""
    codes, accuracy, same = (f"{row[key]:.1%}" for key in ("read_from_codes", "accuracy", "same"))
    return [codes, accuracy, accuracy_change(row), log_likelihood_change(row), same]


def accuracy_change(row: Mapping[str, Any]) -> str:
    """The change of the accuracy of tasks, in points."""
    error = row["change_standard_error"]
    return with_error(100 * row["change"], None if error is None else 100 * error, "+.1f")


def log_likelihood_change(row: Mapping[str, Any]) -> str:
    """The change of the log-likelihood of right answers; a dash if it is not known which are right."""
    change = row["log_likelihood_change"]
    return "-" if change is None else with_error(change, row["standard_error"], "+.3f")
