"""The results of `eval perplexity`: what is kept of each window, the aggregates over all windows, and the tables.

`perplexity.py` fills a record with these parts and prints the tables; `page.py`, `pictures.py` and `evals/fidelity.py`
read finished records.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from .counter import check_pairs
from .details import by_position
from .fidelity import Fidelity
from .generation import UNQUANTIZED
from .records import RunRecord
from .windows import WHERE

# Columns of the second table and their formats. A value too large for a float is unknown, shown as a dash.
LIKELIHOODS = {"perplexity": ".3f", "perplexity_change": "+.2%", "perplexity_per_word": ".1f", "rms_delta_p": ".2%"}

# The content of a run's file.
Record = Mapping[str, Any]


def of_window(name: str, result: Fidelity, newest: int | None) -> dict[str, Any]:
    """The part of a record for one window under one preset.

    Args:
        name: The preset.
        result: The comparison.
        newest: How many tokens at the end are scored; `None` for all.

    Raises:
        NothingRead: The pairs read differ from those expected.
    """
    check_pairs(f"{WHERE}: preset {name}", result)
    last = slice(None) if newest is None else slice(-newest, None)
    nll, reference_nll = result.nll.double()[last], result.reference_nll.double()[last]
    return {
        "pairs_read": result.pairs_read,
        "pairs_expected": result.pairs_expected,
        "pairs_dequantized": result.pairs_dequantized,
        "tokens": len(nll),
        "nll": float(nll.sum()),
        "reference_nll": float(reference_nll.sum()),
        "squared_delta_p": float((torch.exp(-nll) - torch.exp(-reference_nll)).square().sum()),
        "agreeing": int(result.agrees[last].sum()),
        # Nine digits tell any two float32 numbers apart. Rounding makes some divergences of zero slightly negative.
        "kld": [float(f"{value:.9g}") for value in result.kld[last].tolist()],
    }


def summarize(
    record: RunRecord, mode: str, sizes: Mapping[str, Mapping[str, Any]], settings: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
    """Aggregates of one mode over all windows: per preset, its sizes, then its scores."""
    parts = [record.get(f"{mode} {begin}") or {} for begin in settings["begins"]]
    rows = {}
    for name, size in sizes.items():
        measured = [part[name] for part in parts]
        klds = [kld_of(window) for window in measured]
        kld, by_window = torch.cat(klds), torch.stack([each.mean() for each in klds])
        total = {key: sum(window[key] for window in measured) for key in measured[0] if key != "kld"}
        nll, reference_nll = total["nll"] / total["tokens"], total["reference_nll"] / total["tokens"]
        rows[name] = {
            **size,
            "scored_tokens": len(kld),
            "kld": float(kld.mean()),
            "kld_standard_error": float(by_window.std() / len(measured) ** 0.5) if len(measured) > 1 else None,
            "kld_median": float(kld.median()),
            "kld_p99": float(kld.quantile(0.99)),
            "kld_max": float(kld.max()),
            "by_position": by_position(klds, settings["window"]),
            "agreement": total["agreeing"] / len(kld),
            "rms_delta_p": (total["squared_delta_p"] / total["tokens"]) ** 0.5,
            "perplexity": _exp(nll),
            "perplexity_per_word": _exp(nll / settings["words_per_token"]),
            "perplexity_change": _exp(nll - reference_nll) - 1,
            "reference_perplexity": _exp(reference_nll),
            "pairs_read": total["pairs_read"],
            "pairs_expected": total["pairs_expected"],
            "pairs_dequantized": total.get("pairs_dequantized", 0),
        }
    return rows


def kld_of(part: Mapping[str, Any]) -> Tensor:
    """Divergences of a window's tokens, `[scored]` float64: exactly the float32 numbers that were measured."""
    return torch.tensor(part["kld"], dtype=torch.float32).double()


def _exp(value: float) -> float:
    """exp; infinity where the result is too large for a float, which a record keeps as unknown."""
    return math.exp(value) if value < 700 else math.inf


def show(console: Console, record: Record) -> None:
    """Print two tables per mode of a finished record, then what their columns mean."""
    settings, summary = record["settings"], record["parts"]["summary"]["modes"]
    for mode, rows in summary.items():
        how = f", chunks of {settings['chunk']}" if mode != "decode" else ""
        table = Table(
            title=f"{settings['model']}, {settings['dtype']}, {mode}{how}", title_justify="left", title_style="bold"
        )
        likelihoods = Table()
        for each, headings in (
            (table, ("bits", "KL, nats/token", "median", "99 %", "max", "agreement")),
            (likelihoods, ("perplexity", "change", "per word", "RMS Δp")),
        ):
            each.add_column("preset")
            for heading in headings:
                each.add_column(heading, justify="right")
        for name, row in rows.items():
            divergences = [f"{row[key]:.1e}" for key in ("kld", "kld_median", "kld_p99", "kld_max")]
            table.add_row(name, f"{row['bits_per_value']:.4g}", *divergences, f"{row['agreement']:.2%}")
            likelihoods.add_row(
                name,
                *("-" if row[key] is None else format(row[key], form) for key, form in LIKELIHOODS.items()),
            )
        console.print(table)
        console.print(likelihoods)
    first = next(iter(summary.values()))[UNQUANTIZED]
    console.print(
        f"{first['scored_tokens']:,} tokens in windows of {settings['window']}. Each window starts with an empty cache "
        "and an exact first token. Bits: per cached value, scales and zeros included. KL, agreement of the most likely "
        "next token and RMS change of the true token's probability: against the unquantised cache in the same run. Per "
        f"word: perplexity per white-space word. {passed(record)}",
        style="dim",
    )


# --- a finished record ------------------------------------------------------------------------------------------------


def is_finished(record: Record) -> bool:
    """Whether all windows of a record of `eval perplexity` were measured."""
    return "summary" in record["parts"]


def passed(record: Record) -> str:
    """The checks that a finished record of `eval perplexity` passed, in a sentence."""
    summary = record["parts"]["summary"]
    text = "Every (query, token) pair that had to be read from codes was"
    if any(row.get("pairs_dequantized") for rows in summary["modes"].values() for row in rows.values()):
        text += ", though as dequantised tensors: no kernel serves the model"
    if summary.get("unsimulated"):
        return f"{text}; chunks and single tokens agree where a preset makes no difference between them."
    return f"{text}; the ways of feeding a text agree."


def rows_of(record: Record) -> tuple[str, dict[str, dict[str, Any]]]:
    """The mode of a finished record of `eval perplexity` (the first of several), and its row per preset."""
    modes: dict[str, dict[str, dict[str, Any]]] = record["parts"]["summary"]["modes"]
    return next(iter(modes.items()))
