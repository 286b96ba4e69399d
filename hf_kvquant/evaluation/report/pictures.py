"""The pictures of a report: the numbers that each takes from finished records, and its title."""

from __future__ import annotations

import dataclasses
import functools
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..measuring.fidelity import UNQUANTIZED
from ..perplexity.results import rows_of
from ..records import Record
from . import plots

# What one panel of a picture shows.
Numbers = dict[str, Any]


def quality_numbers(record: Record) -> Numbers:
    """By preset: bits per cached value, and the mean divergence."""
    return {
        name: [[row["bits_per_value"], row["kld"]]]
        for name, row in rows_of(record)[1].items()
        if name != UNQUANTIZED and row["kld"] > 0
    }


def position_numbers(record: Record) -> Numbers:
    """By preset: where each part of a segment begins, and its mean divergence."""
    return {
        name: [list(point) for point in zip(where["begin"], where["kld"], strict=True)]
        for name, row in rows_of(record)[1].items()
        if name != UNQUANTIZED and (where := row.get("by_position"))
    }


def layer_numbers(record: Record) -> Numbers:
    """By preset: each layer, and the mean divergence when only that layer is quantised."""
    found: Numbers = {}
    for index, by_preset in record["parts"].get("layers", {}).items():
        for name, each in by_preset.items():
            found.setdefault(name, []).append([int(index), each["kld"]])
    return found


def key_numbers(record: Record) -> Numbers:
    """The channels of the layer that calibration evens out most, before and after, and for each layer the ratio of the
    largest to the median channel, before and after."""
    layers = record["parts"].get("keys", {}).get("layers")
    if not layers:
        return {}
    flat = {
        int(index): {when: [value for head in layer[when] for value in head] for when in ("before", "after")}
        for index, layer in layers.items()
    }
    uneven = {when: [[index, ratio(layer[when])] for index, layer in flat.items()] for when in ("before", "after")}
    gains = {index: before - after for (index, before), (_, after) in zip(*uneven.values(), strict=True)}
    shown = max(gains, key=lambda index: gains[index])
    return {"layer": shown, **flat[shown], "uneven": uneven}


def ratio(values: Sequence[float]) -> float:
    """The largest value over the median. The median is zero only where keys are constant."""
    return max(values) / max(statistics.median(values), 1e-12)


def quality_message(numbers: Numbers) -> str:
    """Which presets no other beats in both bits and divergence."""
    points = {name: point for name, (point,) in numbers.items()}
    *others, last = (
        name
        for name, (bits, kld) in sorted(points.items(), key=lambda each: each[1])
        if not any(b <= bits and k <= kld and [b, k] != [bits, kld] for b, k in points.values())
    )
    if not others:
        return f"{last} is smallest and diverges least"
    return f"{', '.join(others)} and {last} diverge least for their size"


def position_message(numbers: Numbers) -> str:
    """Where the preset that diverges most is at its worst."""
    worst = max(numbers, key=lambda name: statistics.fmean(kld for _, kld in numbers[name]))
    begin, _ = max(numbers[worst], key=lambda point: point[1])
    return f"{worst} diverges most in the part from token {begin:,} on"


def layer_message(numbers: Numbers) -> str:
    """Which layer diverges most, and under which preset."""
    _, layer, name = max((kld, layer, name) for name, layers in numbers.items() for layer, kld in layers)
    return f"Layer {layer} is the most sensitive to {name}"


def key_message(numbers: Numbers) -> str:
    """How much calibration evens out the layer that is shown."""
    before, after = (ratio(numbers[when]) for when in ("before", "after"))
    largest = f"layer {numbers['layer']}'s largest key channel"
    return f"Calibration brings {largest} from {before:.1f} to {after:.1f} times the median"


@dataclasses.dataclass(frozen=True)
class Picture:
    """A picture of the page, whose template has the text around it."""

    numbers: Callable[[Record], Numbers]  # of the panel of a record; empty if the record has none
    message: Callable[[Numbers], str]  # the title, from the numbers of the first panel
    plot: Callable[[Path, dict[str, Numbers], str], None]  # takes the SVG, the numbers by panel, and the title

    def panels(self, texts: Mapping[str, Record]) -> dict[str, Numbers]:
        """The panels for which finished records have numbers, by title."""
        return {title: found for title, record in texts.items() if (found := self.numbers(record))}

    def draw(self, path: Path, panels: dict[str, Numbers]) -> None:
        """Draw the picture."""
        self.plot(path, panels, self.message(next(iter(panels.values()))))


def _lines(xlabel: str) -> Callable[[Path, dict[str, Numbers], str], None]:
    return functools.partial(plots.lines, xlabel=xlabel, ylabel="KL divergence, nats per token")


PICTURES = {
    "quality.svg": Picture(quality_numbers, quality_message, _lines("bits per value, scales and zeros included")),
    "positions.svg": Picture(position_numbers, position_message, _lines("position in the window, tokens")),
    "layers.svg": Picture(layer_numbers, layer_message, _lines("layer, the only one quantised")),
    "keys.svg": Picture(key_numbers, key_message, plots.keys),
}


def draw(texts: Mapping[str, Record], folder: Path) -> list[str]:
    """Draw the pictures for which finished records, by the title of a panel, have numbers. Returns their file names."""
    drawn = []
    for name, picture in PICTURES.items():
        if panels := picture.panels(texts):
            picture.draw(folder / name, panels)
            drawn.append(name)
    return drawn
