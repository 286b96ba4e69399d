"""Draws quality against true bits: a point for each recipe, in the colour and with the marker of its family."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..records import Record
from ..report.plots import MARKERS, PALETTE, label, picture
from .recipe_tables import rows_of

HEIGHT = 5.0  # inches of a panel
TITLE = "Distance from the unquantised cache, by true bits"

# By panel and family, points from few bits to many: bits read, divergence and name.
Numbers = dict[str, dict[str, list[list[Any]]]]


def numbers_of(records: Mapping[str, Record]) -> Numbers:
    """What the picture shows of finished records, by the title of their panel."""
    return {title: panel_of(rows_of(record)) for title, record in records.items()}


def panel_of(rows: Mapping[str, Mapping[str, Any]]) -> dict[str, list[list[Any]]]:
    """What a panel shows of the rows of a record."""
    families: dict[str, list[list[Any]]] = {}
    for name, row in rows.items():
        if row["kld"] > 0:  # a logarithmic scale shows nothing else
            families.setdefault(row["family"], []).append([row["bits_read"]["both"], row["kld"], name])
    return {family: sorted(points) for family, points in families.items()}


def draw(path: Path, numbers: Numbers) -> None:
    """Draw a panel for each record."""
    families = list(dict.fromkeys(family for panel in numbers.values() for family in panel))
    with picture(path, numbers, TITLE, rows=len(numbers), height=HEIGHT) as panels:
        for (axes,), (heading, panel) in zip(panels, numbers.items(), strict=True):
            for family, points in panel.items():
                place = families.index(family)
                color, marker = PALETTE[place % len(PALETTE)], MARKERS[place // len(PALETTE) % len(MARKERS)]
                bits, klds, names = zip(*points, strict=True)
                axes.plot(bits, klds, color=color, marker=marker, linestyle="None")
                for name, x, y in zip(names, bits, klds, strict=True):
                    label(axes, name, (x, y), color, is_linked=True)
            axes.set(title=f"{heading}: KL divergence, nats per token", xlabel="bits of a value, all included")
            axes.set_yscale("log")
            axes.margins(x=0.05, y=0.08)
            axes.grid(axis="y")
