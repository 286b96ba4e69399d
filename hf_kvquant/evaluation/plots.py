"""How pictures of results look and are written: SVG with text as text, the same bytes for the same numbers.

A picture is drawn from plain numbers by panel and label, which it carries in its description, so that a test can
compare it with the results whatever the version of matplotlib. Which numbers those are is decided in `page.py`, for the
README in `evals/render_readme.py`. Presets differ by colour and by marker. matplotlib is optional and imported inside
functions.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from ..arguments import UsageError
from ..config import PRESETS

# Of the README's pictures, and told apart by people who see no red or no green, in this order.
PALETTE = ("#3e6fa3", "#b5432e", "#5b8c3a", "#8a5aa3", "#c98a1b", "#4a9c9c")
MARKERS = ("o", "s", "^", "D", "v", "P")
GRID = "#d8d8d8"
HEIGHT = 3.4  # of a row of panels, inches
WIDTH = 4.75  # of a panel

Points = Sequence[Sequence[float]]


def check_matplotlib(where: str) -> None:
    """Refuse a run that could not draw.

    Raises:
        UsageError: matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError(
            f"{where}: matplotlib must be installed for pictures, got no such package. Install it: pip install "
            "'hf-kvquant[eval]'."
        )


@contextlib.contextmanager
def picture(
    path: Path, numbers: Mapping[str, Any], *, rows: int = 1, columns: int = 1, size: tuple[float, float] | None = None
) -> Iterator[tuple[Any, list[list[Any]]]]:
    """A figure to draw into, written at the end of the `with` block.

    Args:
        path: Of the SVG.
        numbers: What it shows.
        rows: Of panels.
        columns: The same.
        size: Width and height, inches; from the panels where it is not given.

    Yields:
        The figure, and its axes by row and column.
    """
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "hf_kvquant", "font.family": "sans-serif"}):
        figure = Figure(figsize=size or (WIDTH * columns, HEIGHT * rows), layout="constrained")
        axes = figure.subplots(rows, columns, squeeze=False)
        yield figure, [list(row) for row in axes]
        for each in axes.flat:
            each.spines[["top", "right"]].set_visible(False)
            each.set_axisbelow(True)
        figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None, "Description": json.dumps(numbers)})


def described(path: Path) -> dict[str, Any]:
    """The numbers that a picture of ours says it shows."""
    found = ElementTree.parse(path).find(".//{http://purl.org/dc/elements/1.1/}description")
    numbers: dict[str, Any] = json.loads("" if found is None or found.text is None else found.text)
    return numbers


def style_of(label: str, number: int) -> dict[str, Any]:
    """Colour and marker of a line: of a preset always the same ones, else by its number in the picture."""
    known = [name for name in PRESETS if name != "none"]
    place = known.index(label) if label in known else number
    return {"color": PALETTE[place % len(PALETTE)], "marker": MARKERS[place % len(MARKERS)]}


def scatter(path: Path, numbers: Mapping[str, Mapping[str, Sequence[float]]], *, xlabel: str, ylabel: str) -> None:
    """Labelled points, a panel beside the other with the same axes, y logarithmic.

    Args:
        path: Of the SVG.
        numbers: By panel and label, x and y.
        xlabel: With the unit.
        ylabel: The same.
    """
    everything = [point for panel in numbers.values() for point in panel.values()]
    with picture(path, numbers, columns=len(numbers)) as (_, (panels,)):
        for axes, (title, points) in zip(panels, numbers.items(), strict=True):
            for number, (label, (x, y)) in enumerate(points.items()):
                axes.plot([x], [y], linestyle="", **style_of(label, number))
                axes.annotate(label, (x, y), xytext=(7, -3), textcoords="offset points")
            axes.set(title=title, xlabel=xlabel, ylabel=ylabel, yscale="log")
            # Room for labels, which are right of their points.
            axes.set_xlim(min(x for x, _ in everything) - 0.75, max(x for x, _ in everything) + 1.5)
            axes.set_ylim(0.5 * min(y for _, y in everything), 2 * max(y for _, y in everything))
            axes.grid(axis="y", color=GRID)


def lines(path: Path, numbers: Mapping[str, Mapping[str, Points]], *, xlabel: str, ylabel: str) -> None:
    """Lines from left to right, a panel beside the other with the same y, logarithmic, and one legend below.

    Args:
        path: Of the SVG.
        numbers: By panel and label, points.
        xlabel: With the unit.
        ylabel: The same.
    """
    values = [y for panel in numbers.values() for points in panel.values() for _, y in points if y > 0]
    labels = list(dict.fromkeys(label for panel in numbers.values() for label in panel))
    # As many entries in a row of the legend as fit below the panels.
    in_a_row = 3 * len(numbers)
    size = WIDTH * len(numbers), HEIGHT + 0.25 * -(-len(labels) // in_a_row)
    with picture(path, numbers, columns=len(numbers), size=size) as (figure, (panels,)):
        handles: dict[str, Any] = {}
        for axes, (title, panel) in zip(panels, numbers.items(), strict=True):
            for label, points in panel.items():
                style = style_of(label, labels.index(label))
                (handles[label],) = axes.plot(*zip(*points, strict=True), markersize=4, **style)
            axes.set(title=title, xlabel=xlabel, ylabel=ylabel, yscale="log")
            axes.xaxis.get_major_locator().set_params(integer=True)
            if values:
                axes.set_ylim(0.7 * min(values), 1.4 * max(values))
            axes.grid(color=GRID)
        figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=in_a_row, frameon=False)


def keys(path: Path, numbers: Mapping[str, Mapping[str, Any]]) -> None:
    """Channels of one layer before and after, and beside them how uneven every layer is; a row for each panel.

    Args:
        path: Of the SVG.
        numbers: By panel: `layer`, `before` and `after` of its channels, and `uneven`: `before` and `after` as points
            of layer and ratio.
    """
    colors = {"before": PALETTE[1], "after": PALETTE[0]}
    markers = {"before": "s", "after": "o"}
    with picture(path, numbers, rows=len(numbers), columns=2) as (figure, panels):
        handles: dict[str, Any] = {}
        for (channels, layers), (title, panel) in zip(panels, numbers.items(), strict=True):
            for when, color in colors.items():
                edges = [x - 0.5 for x in range(len(panel[when]) + 1)]
                # What was there before is an area, so that what is left of it shows as a line in front.
                look = {"fill": True, "color": color, "alpha": 0.45} if when == "before" else {"color": color}
                handles[when] = channels.stairs(panel[when], edges, **look)
                points = zip(*panel["uneven"][when], strict=True)
                layers.plot(*points, color=color, marker=markers[when], markersize=4)
            channels.set(title=f"{title}: layer {panel['layer']}", ylabel="largest magnitude of keys")
            channels.set(xlabel="channel, head after head", ylim=(0, None))
            channels.grid(axis="y", color=GRID)
            layers.set(title=f"{title}: all layers", ylabel="largest channel over median one")
            layers.set(xlabel="layer", ylim=(0, None))
            layers.xaxis.get_major_locator().set_params(integer=True)
            layers.grid(color=GRID)
        named = {"before": "as the model makes them", "after": "as they are quantised after calibration"}
        figure.legend(
            handles.values(), [named[when] for when in handles], loc="outside lower center", ncols=2, frameon=False
        )
