"""Draws pictures of results as SVG, with text as text, and the same bytes for the same numbers.

Every picture is as wide as a README shows it, says its message in its title, and labels points, bars and lines directly
instead of in a legend. It has its own background and follows the reader's light or dark theme. Presets differ by colour
and by marker. A picture's description holds the numbers that it shows, so that a test can compare them with the results
under any version of matplotlib, which is optional and imported inside functions.
"""

from __future__ import annotations

import contextlib
import io
import json
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hf_kvquant.config import PRESETS

PAPER, INK, MUTED, GRID = "#ffffff", "#1f2328", "#59636e", "#d1d9e0"
# In this order, colours that colour-blind readers (red or green) can tell apart, dark enough for text on PAPER.
PALETTE = ("#0b5fa5", "#1a7f5a", "#c2410c", "#8a6100", "#b0307a", "#6e4fb0")
# What each colour becomes on a dark page.
ON_DARK = {
    PAPER: "#0d1117",
    INK: "#e6edf3",
    MUTED: "#9198a1",
    GRID: "#3d444d",
    **dict(zip(PALETTE, ("#58a6ff", "#3fb98c", "#ff8a5c", "#e3b341", "#f778ba", "#b39df3"), strict=True)),
}
MARKERS = ("o", "s", "^", "D", "v", "P")
WIDTH = 6.25  # inches, which browsers show as 600 pixels
HEIGHT = 2.4  # inches, of a row of panels
TITLE_COLUMNS = 62  # characters of a title that fit into WIDTH
LOOK = {
    "svg.fonttype": "none",
    "svg.hashsalt": "hf_kvquant",
    "font.family": "sans-serif",
    "font.size": 9,
    "text.color": INK,
    "figure.dpi": 72,
    "figure.facecolor": PAPER,
    "figure.titlesize": 11,
    "figure.titleweight": "bold",
    "axes.axisbelow": True,
    "axes.edgecolor": MUTED,
    "axes.facecolor": "none",
    "axes.labelcolor": MUTED,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlepad": 9,
    "axes.titlesize": "medium",
    "grid.color": GRID,
    "lines.markersize": 4.5,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelsize": "medium",
    "ytick.labelsize": "medium",
}
# Where a label may stand next to its point: offset to the right and up in points (1/72 inch), then horizontal and
# vertical alignment.
Place = tuple[int, int, str, str]
# The best place first.
PLACES: list[Place] = [
    *((7, shift, "left", "center") for shift in (0, -3, -6, -9, -12, -15, 3, 6, 9, 12, 15)),
    (-7, 0, "right", "center"),
    (0, 7, "center", "bottom"),
    (0, -7, "center", "top"),
    *((7, sign * size, "left", "center") for size in range(18, 60, 3) for sign in (-1, 1)),
]

# More of them, for labels with a line to their point.
LINKED = "linked"
FAR_PLACES: list[Place] = [
    (sign * dx, dy, "left" if sign > 0 else "right", "center")
    for dx in (20, 50, 90)
    for size in range(0, 97, 12)
    for dy in (size, -size)
    for sign in (1, -1)
]

Points = Sequence[Sequence[float]]


@contextlib.contextmanager
def picture(
    path: Path, numbers: Mapping[str, Any], title: str, *, rows: int = 1, columns: int = 1, height: float = HEIGHT
) -> Iterator[list[list[Any]]]:
    """Panels to draw into, by row and column. At the end of the `with` block, labels are placed and the SVG is written.

    `numbers` are what the picture shows, JSON-serialisable; the title is a sentence; a row has `height` inches.
    """
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with matplotlib.rc_context(LOOK):
        lines = textwrap.wrap(title, TITLE_COLUMNS, break_on_hyphens=False)
        figure = Figure(figsize=(WIDTH, height * rows + 0.2 * len(lines)), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots(rows, columns, squeeze=False)
        yield [list(row) for row in axes]
        figure.suptitle("\n".join(lines), x=0.01, ha="left")
        place_labels(figure)
        written = io.StringIO()
        description = {"Date": None, "Creator": None, "Description": json.dumps(numbers)}
        figure.savefig(written, format="svg", metadata=description)
    path.write_text(written.getvalue().replace("</style>", f"{dark_rules()}</style>", 1), encoding="utf-8")


def dark_rules() -> str:
    """CSS that replaces every colour on a dark page."""
    rules = (
        f'[style*="{what}: {light}"]{{{what}: {dark} !important}}'
        for light, dark in ON_DARK.items()
        for what in ("fill", "stroke")
    )
    return f"@media (prefers-color-scheme: dark){{{''.join(rules)}}}"


def label(axes: Any, text: str, point: Sequence[float], color: str = INK, *, is_linked: bool = False) -> None:
    """Label a point, given in data coordinates. `place_labels` decides where the label stands.

    One that `is_linked` may stand further away, and then a line leads to its point: for pictures with many points.
    """
    dx, dy, ha, va = PLACES[0]
    found = axes.annotate(text, point, xytext=(dx, dy), textcoords="offset points", ha=ha, va=va, color=color)
    found.set_gid(LINKED if is_linked else None)


def place_labels(figure: Any) -> None:
    """Put every label of `label` where it covers least text, markers, lines and axes: the first best of PLACES."""
    import numpy as np
    from matplotlib.text import Annotation, Text

    figure.draw_without_rendering()  # lays out the panels, with room for labels to their right
    figure.set_layout_engine("none")
    texts = figure.findobj(lambda artist: isinstance(artist, Text) and artist.get_text())
    labels: list[Any] = [text for text in texts if isinstance(text, Annotation)]
    taken = [text.get_window_extent().get_points() for text in texts if not isinstance(text, Annotation)]
    dots = []
    for line in (line for axes in figure.axes for line in (*axes.lines, axes.spines.left, axes.spines.bottom)):
        path = line.get_path() if line.get_linestyle() == "None" else line.get_path().interpolated(30)
        dots.append(line.get_transform().transform(path.vertices))
    drawn = np.concatenate(dots)

    def shared(low: Any, high: Any, others: Any) -> Any:  # the areas that boxes share with others
        return np.clip(np.minimum(high, others[:, 1]) - np.maximum(low, others[:, 0]), 0, None).prod(-1)

    def covered(boxes: Any) -> Any:  # `[places, 2, 2]`: the low and the high corner at each place
        low, high = boxes[:, None, 0], boxes[:, None, 1]
        inside = ((drawn > low - 2) & (drawn < high + 2)).all(-1).sum(1)
        outside = (boxes[:, 1] - boxes[:, 0]).prod(-1) - shared(low, high, figure.bbox.get_points()[None])[:, 0]
        return 10 * inside + shared(low, high, np.stack(taken)).sum(1) + 100 * outside

    def moved(text: Any, place: Place) -> Any:
        dx, dy, ha, va = place
        text.set(position=(dx, dy), ha=ha, va=va)
        return text.get_window_extent().get_points()

    def boxes_of(text: Any, places: Sequence[Place]) -> Any:
        # Laying out a text takes a millisecond, and only alignment changes more than its position.
        alone = {aligned: moved(text, (0, 0, *aligned)) for aligned in {place[2:] for place in places}}
        pixels = figure.dpi / 72
        return np.stack([alone[ha, va] + (dx * pixels, dy * pixels) for dx, dy, ha, va in places])

    # From the top down, so that labels stand in the order of the ends of their lines.
    for text in sorted(labels, key=lambda text: -text.axes.transData.transform(text.xy)[1]):
        is_linked = text.get_gid() == LINKED
        places = PLACES + FAR_PLACES if is_linked else PLACES
        best = places[int(covered(boxes_of(text, places)).argmin())]
        taken.append(moved(text, best))
        if is_linked and (best in FAR_PLACES or abs(best[1]) > 9):
            line = {"arrowstyle": "-", "color": text.get_color(), "linewidth": 0.5, "shrinkA": 0, "shrinkB": 2}
            text.axes.annotate("", text.xy, xytext=best[:2], textcoords="offset points", arrowprops=line)


def style_of(name: str, number: int) -> dict[str, Any]:
    """Colour and marker of a line: fixed for each preset, otherwise by its number in the picture."""
    known = [preset for preset in PRESETS if preset != "none"]
    place = known.index(name) if name in known else number
    return {"color": PALETTE[place % len(PALETTE)], "marker": MARKERS[place % len(MARKERS)]}


def lines(path: Path, numbers: Mapping[str, Mapping[str, Points]], title: str, *, xlabel: str, ylabel: str) -> None:
    """Draw lines or points, by panel and by the label at their right ends, all on the same logarithmic y axis."""
    # A logarithmic scale shows only positive numbers.
    shown = {
        heading: {
            name: above for name, points in panel.items() if (above := [point for point in points if point[1] > 0])
        }
        for heading, panel in numbers.items()
    }
    values = [y for panel in shown.values() for points in panel.values() for _, y in points]
    names = list(dict.fromkeys(name for panel in numbers.values() for name in panel))
    with picture(path, numbers, title, rows=len(numbers)) as panels:
        for (axes,), (heading, panel) in zip(panels, shown.items(), strict=True):
            for name, points in panel.items():
                style = style_of(name, names.index(name))
                axes.plot(*zip(*points, strict=True), **style)
                label(axes, name, points[-1], style["color"])
            axes.set(title=f"{heading}: {ylabel}", xlabel=xlabel, yscale="log")
            axes.xaxis.get_major_locator().set_params(integer=True)
            if values:
                axes.set_ylim(0.5 * min(values), 2 * max(values))
            axes.grid(axis="y")


def keys(path: Path, numbers: Mapping[str, Mapping[str, Any]], title: str) -> None:
    """Draw the channels of one layer before and after calibration, and how uneven every layer is (`key_numbers`)."""
    styles = {"before": {"color": PALETTE[2], "marker": "s"}, "after": {"color": PALETTE[0], "marker": "o"}}
    with picture(path, numbers, title, rows=len(numbers), columns=2) as panels:
        for (channels, layers), (heading, panel) in zip(panels, numbers.items(), strict=True):
            for when, style in styles.items():
                edges = [x - 0.5 for x in range(len(panel[when]) + 1)]
                # `before` is a filled area, so that `after` shows in front of it as a line.
                look = {"fill": True, "alpha": 0.45} if when == "before" else {}
                channels.stairs(panel[when], edges, color=style["color"], **look)
                layers.plot(*zip(*panel["uneven"][when], strict=True), **style)
                label(layers, when, panel["uneven"][when][-1], style["color"])
            channels.set(title=f"{heading}: largest key, layer {panel['layer']}", xlabel="channel, head after head")
            layers.set(title="largest channel over median", xlabel="layer")
            layers.xaxis.get_major_locator().set_params(integer=True)
            for axes in (channels, layers):
                axes.set_ylim(0, None)
                axes.grid(axis="y")
