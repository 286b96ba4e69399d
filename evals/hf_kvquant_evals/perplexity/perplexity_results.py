"""The results of `eval perplexity`: what is kept of each segment, the aggregates over all segments, and the tables."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from hf_kvquant.common.tables import or_dash, print_table
from hf_kvquant.presets import UNQUANTIZED

from ..measuring.fidelity import Fidelity
from ..measuring.pairs import check_pairs
from ..records import Record, RunRecord

# Parts of a segment. In a segment of 2048 tokens, each has 128, the tokens of a block, so that effects of blocks show.
NUM_PARTS = 16
# The columns of both tables: what they show of a row, and its format. A value too large for a float is unknown, shown
# as a dash.
DIVERGENCES = {
    "bits": ("bits_per_value", ".4g"),
    "KL, nats/token": ("kld", ".1e"),
    "median": ("kld_median", ".1e"),
    "99 %": ("kld_p99", ".1e"),
    "max": ("kld_max", ".1e"),
    "agreement": ("agreement", ".2%"),
}
LIKELIHOODS = {
    "perplexity": ("perplexity", ".3f"),
    "change": ("perplexity_change", "+.2%"),
    "per word": ("perplexity_per_word", ".1f"),
    "RMS Δp": ("rms_delta_p", ".2%"),
}


def of_segment(name: str, result: Fidelity, newest: int | None) -> dict[str, Any]:
    """The part of a record for one segment under the preset `name`, of whose tokens the `newest` are scored, or all."""
    check_pairs(f"preset {name}", result)
    last = slice(None) if newest is None else slice(-newest, None)
    nll, reference_nll = result.nll.double()[last], result.reference_nll.double()[last]
    return {
        **result.counts,
        "tokens": len(nll),
        "nll": float(nll.sum()),
        "reference_nll": float(reference_nll.sum()),
        "squared_delta_p": float((torch.exp(-nll) - torch.exp(-reference_nll)).square().sum()),
        "agreeing": int(result.agrees[last].sum()),
        # Nine digits tell any two float32 numbers apart. Rounding makes some divergences of zero slightly negative.
        "kld": [float(f"{value:.9g}") for value in result.kld[last].tolist()],
    }


def kld_of(part: Mapping[str, Any]) -> Tensor:
    """Divergences of a segment's tokens, `[scored]` float64: exactly the float32 numbers that were measured."""
    return torch.tensor(part["kld"], dtype=torch.float32).double()


def summarize(
    record: RunRecord, mode: str, sizes: Mapping[str, Mapping[str, Any]], settings: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
    """Aggregates of one mode over the segments measured so far: per preset, its sizes, then its scores.

    Empty if there is none. Standard errors are over segments, `None` if there is one.
    """
    parts = [part for begin in settings["begins"] if (part := record.get(f"{mode} {begin}")) is not None]
    rows: dict[str, dict[str, Any]] = {}
    if not parts:
        return rows
    for name, size in sizes.items():
        measured = [part[name] for part in parts]
        klds = [kld_of(segment) for segment in measured]
        kld, by_segment = torch.cat(klds), torch.stack([each.mean() for each in klds])
        total = {key: sum(segment[key] for segment in measured) for key in measured[0] if key != "kld"}
        changes = [(each["nll"] - each["reference_nll"]) / each["tokens"] for each in measured]
        same = [each["agreeing"] / each["tokens"] for each in measured]
        nll, reference_nll = total["nll"] / total["tokens"], total["reference_nll"] / total["tokens"]
        rows[name] = {
            **size,
            "scored_tokens": len(kld),
            "kld": float(kld.mean()),
            "kld_standard_error": standard_error(by_segment.tolist()),
            "kld_median": float(kld.median()),
            "kld_p99": float(kld.quantile(0.99)),
            "kld_max": float(kld.max()),
            "by_position": by_position(klds, settings["window"]),
            "agreement": total["agreeing"] / len(kld),
            "agreement_standard_error": standard_error(same),
            "rms_delta_p": (total["squared_delta_p"] / total["tokens"]) ** 0.5,
            "perplexity": _exp(nll),
            "perplexity_per_word": _exp(nll / settings["words_per_token"]),
            "perplexity_change": _exp(nll - reference_nll) - 1,
            # Of a small change, that of its logarithm.
            "perplexity_change_standard_error": standard_error(changes),
            "reference_perplexity": _exp(reference_nll),
            "pairs_read": total["pairs_read"],
            "pairs_expected": total["pairs_expected"],
            "pairs_dequantized": total.get("pairs_dequantized", 0),
        }
    return rows


def standard_error(values: Sequence[float]) -> float | None:
    """The standard error of the mean of segments; `None` if there is one."""
    return statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else None


def by_position(klds: Sequence[Tensor], length: int) -> dict[str, list[float]]:
    """The first position of each part of a segment that has scored tokens (`begin`), and its mean divergence (`kld`).

    `klds` has the divergences of each segment's last tokens, `[scored]` float64, without the very last one, which is
    only predicted.
    """
    num_parts = min(NUM_PARTS, length)
    begins = [-(-part * length // num_parts) for part in range(num_parts)]
    positions = torch.cat([torch.arange(length - 1 - len(kld), length - 1) for kld in klds])
    part = torch.bucketize(positions, torch.tensor(begins[1:]), right=True)
    totals = torch.zeros(num_parts, dtype=torch.float64).index_add_(0, part, torch.cat(list(klds)))
    counts = torch.bincount(part, minlength=num_parts)
    kept = [i for i in range(num_parts) if counts[i] > 0]
    return {"begin": [begins[i] for i in kept], "kld": [float(totals[i] / counts[i]) for i in kept]}


def _exp(value: float) -> float:
    """exp; infinity where the result is too large for a float, which a record keeps as unknown."""
    return math.exp(value) if value < 700 else math.inf


def show(console: Console, record: Record) -> None:
    """Print two tables per mode of a finished record, then what their columns mean."""
    settings, summary = record["settings"], record["parts"]["summary"]["modes"]
    for mode, rows in summary.items():
        how = f", chunks of {settings['chunk']}" if mode != "decode" else ""
        title = f"{settings['model']}, {settings['dtype']}, {mode}{how}"
        for columns in (DIVERGENCES, LIKELIHOODS):
            cells = ((name, *(or_dash(row[key], form) for key, form in columns.values())) for name, row in rows.items())
            print_table(console, ("preset", *columns), cells, title=title if columns is DIVERGENCES else None)
    first = next(iter(summary.values()))[UNQUANTIZED]
    console.print(
        f"{first['scored_tokens']:,} tokens in windows of {settings['window']}. Each window starts with an empty cache "
        f"and {exact_tokens(settings)}. Bits: per cached value, scales and zeros included. KL, agreement of the most "
        "likely next token and RMS change of the true token's probability: against the unquantised cache in the same "
        f"run. Per word: perplexity per white-space word. {passed(record)}",
        style="dim",
    )


def exact_tokens(settings: Mapping[str, Any]) -> str:
    """The tokens of each window that read no code, in words."""
    count = settings["first_chunk"]
    return "an exact first token" if count == 1 else f"an exact prompt of {count:,} tokens, which are not scored"


def is_measured(record: Record) -> bool:
    """Whether some segments were measured, so that there is a summary of these."""
    return bool(record["parts"].get("summary", {}).get("modes"))


def windows_of(record: Record) -> tuple[int, int]:
    """How many segments were measured in the mode of `rows_of`, and how many the text has."""
    mode, begins = rows_of(record)[0], record["settings"]["begins"]
    return sum(f"{mode} {begin}" in record["parts"] for begin in begins), len(begins)


def passed(record: Record) -> str:
    """The checks that a finished record passed, in a sentence."""
    summary = record["parts"]["summary"]
    text = "Every (query, token) pair that had to be read from codes was"
    if any(row.get("pairs_dequantized") for rows in summary["modes"].values() for row in rows.values()):
        text += ", though as dequantised tensors: no kernel serves the model"
    if summary.get("unsimulated"):
        return f"{text}; chunks and single tokens agree where a preset makes no difference between them."
    return f"{text}; the ways of feeding a text agree."


def rows_of(record: Record) -> tuple[str, dict[str, dict[str, Any]]]:
    """The mode of a finished record (the first of several), and its row per preset."""
    modes: dict[str, dict[str, dict[str, Any]]] = record["parts"]["summary"]["modes"]
    return next(iter(modes.items()))
