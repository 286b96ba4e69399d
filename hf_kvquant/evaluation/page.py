"""What a report says of finished records: a page of Markdown and the numbers of its pictures, and nothing measured.

Records are those of `eval perplexity` and `eval tasks` as they stand in their files, so that the same files always make
the same page. Which records there are is decided in `report.py`, how a picture looks in `plots.py`. What is not in the
records is left out, and the page says so.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..generation import UNQUANTIZED
from . import plots
from .task_files import AVERAGED
from .task_results import HEADINGS, LEGEND, Average, Part, averages, by_task_and_preset, cells

PLAIN, OUTLIERS, TASKS = "plain", "outliers", "tasks"
# How panels and headings name the evaluations of a text.
TITLES = {PLAIN: "as it is", OUTLIERS: "with injected outliers"}

Record = Mapping[str, Any]
Panels = dict[str, dict[str, Any]]

KLD_LABEL = "KL divergence, nats a token"


# --- numbers of records -----------------------------------------------------------------------------------------------


def rows_of(record: Record) -> tuple[str, dict[str, dict[str, Any]]]:
    """The mode of a finished record of `eval perplexity`, the first where there are several, and its row per preset."""
    modes: dict[str, dict[str, dict[str, Any]]] = record["parts"]["summary"]["modes"]
    return next(iter(modes.items()))


def is_finished(record: Record) -> bool:
    """Whether all windows of a record of `eval perplexity` were measured."""
    return "summary" in record["parts"]


def of_texts(records: Mapping[str, Record]) -> dict[str, Record]:
    """By title, the finished records of `eval perplexity`."""
    return {TITLES[kind]: records[kind] for kind in TITLES if kind in records and is_finished(records[kind])}


def quality_numbers(records: Mapping[str, Record]) -> Panels:
    """By panel and preset: bits of a value, and the mean divergence."""
    return {
        title: {
            name: [row["bits_per_value"], row["kld"]]
            for name, row in rows_of(record)[1].items()
            if name != UNQUANTIZED and row["kld"] > 0
        }
        for title, record in of_texts(records).items()
    }


def position_numbers(records: Mapping[str, Record]) -> Panels:
    """By panel and preset: where each part of the window begins, and its mean divergence."""
    found = {
        title: {
            name: [list(point) for point in zip(where["begin"], where["kld"], strict=True)]
            for name, row in rows_of(record)[1].items()
            if name != UNQUANTIZED and (where := row.get("by_position"))
        }
        for title, record in of_texts(records).items()
    }
    return {title: panel for title, panel in found.items() if panel}


def layer_numbers(records: Mapping[str, Record]) -> Panels:
    """By panel and preset: each layer, and the mean divergence with it alone quantised."""
    found: Panels = {}
    for title, record in of_texts(records).items():
        layers = record["parts"].get("layers", {})
        for index, by_preset in layers.items():
            for name, each in by_preset.items():
                found.setdefault(title, {}).setdefault(name, []).append([int(index), each["kld"]])
    return found


def key_numbers(records: Mapping[str, Record]) -> Panels:
    """By panel: the channels of the layer where calibration evens out most, and of each layer its largest channel over
    the median one, before and after."""
    found: Panels = {}
    for title, record in of_texts(records).items():
        layers = record["parts"].get("keys", {}).get("layers")
        if not layers:
            continue
        flat = {
            int(index): {when: [value for head in layer[when] for value in head] for when in ("before", "after")}
            for index, layer in layers.items()
        }
        uneven = {when: [[index, ratio(layer[when])] for index, layer in flat.items()] for when in ("before", "after")}
        gains = {index: before - after for (index, before), (_, after) in zip(*uneven.values(), strict=True)}
        shown = max(gains, key=lambda index: gains[index])
        found[title] = {"layer": shown, **flat[shown], "uneven": uneven}
    return found


def ratio(values: Sequence[float]) -> float:
    """The largest over the median, which is not zero in keys that are more than a constant."""
    return max(values) / max(statistics.median(values), 1e-12)


# --- how they are spelled ---------------------------------------------------------------------------------------------


def scientific(number: float) -> str:
    """A small number as people write it: `1.9·10⁻⁴`."""
    if number == 0:
        return "0"
    mantissa, exponent = f"{number:.1e}".split("e")
    digits = str(int(exponent)).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return f"{mantissa}·10{digits}"


def spelled_average(average: Average | None) -> str:
    """`38.1`, or `37.9 (-0.6 to +0.2)` with the interval of the change, in points."""
    if average is None:
        return "-"
    value = f"{100 * average.value:.1f}"
    if average.change_interval is None:
        return value
    low, high = average.change_interval
    return f"{value} ({100 * low:+.1f} to {100 * high:+.1f})"


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown, whose first column is text and whose others are numbers."""
    rule = "|---" + "|--:" * (len(headings) - 1) + "|"
    return "\n".join([f"| {' | '.join(headings)} |", rule, *(f"| {' | '.join(row)} |" for row in rows)])


# --- the page ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Picture:
    """A picture of the page.

    Attributes:
        numbers: Of records; nothing where they have none.
        draw: Takes the place of the SVG and the numbers.
        heading: Of its section; the section before goes on where there is none.
        alt: What a reader is told who does not see it.
        text: Below it.
    """

    numbers: Callable[[Mapping[str, Record]], Panels]
    draw: Callable[[Path, Panels], None]
    heading: str
    alt: str
    text: str


PICTURES = {
    "quality.svg": Picture(
        quality_numbers,
        functools.partial(plots.scatter, xlabel="bits a value, scales and zeros included", ylabel=KLD_LABEL),
        "",
        "Divergence against bits",
        "Lower and further left is better; the scale is logarithmic.",
    ),
    "positions.svg": Picture(
        position_numbers,
        functools.partial(plots.lines, xlabel="position in the window, tokens", ylabel=KLD_LABEL),
        "Where in a text",
        "Divergence by position in the window",
        "Each point is the mean over a part of the window that begins there. Every window starts with an empty cache, "
        "so further to the right more is read from codes.",
    ),
    "layers.svg": Picture(
        layer_numbers,
        functools.partial(plots.lines, xlabel="layer, the only one quantised", ylabel=KLD_LABEL),
        "Layer by layer",
        "Divergence with one layer quantised at a time",
        'A layer that stands out is the first to be given a larger format: `layers={0: "int8"}` in a config.',
    ),
    "keys.svg": Picture(
        key_numbers,
        plots.keys,
        "Why: the keys",
        "Largest key per channel before and after calibration",
        "The largest magnitude of each channel of the keys, in the layer that calibration evens out most, and how far "
        "the largest channel of every layer is above the median one. A few large channels leave few codes for all "
        "others. Calibration for `int4` subtracts a centre and divides by factors; rotation, which spreads what is "
        "left over a head, comes after it and is not shown. The numbers above are of caches without this calibration, "
        "unless the model came with it.",
    ),
}


def draw(records: Mapping[str, Record], folder: Path) -> list[str]:
    """Draw the pictures for which the records have numbers.

    Returns:
        Names of their files.
    """
    drawn = []
    for name, picture in PICTURES.items():
        numbers = picture.numbers(records)
        if any(numbers.values()):
            picture.draw(folder / name, numbers)
            drawn.append(name)
    return drawn


def page(records: Mapping[str, Record], files: Mapping[str, str], pictures: Sequence[str]) -> str:
    """The page.

    Args:
        records: By kind, as their files hold them; one of a text is finished.
        files: By kind, the names of their files.
        pictures: Names of the files that `draw` has drawn.
    """
    texts = of_texts(records)
    first = next(iter(texts.values()))
    sections = [f"# Quantised caches of {first['settings']['model']}", opening(first)]
    of_tasks = by_task_and_preset(records[TASKS]["parts"]) if TASKS in records else {}
    means = averages(of_tasks)
    for title, record in texts.items():
        sections += [f"## Quality, {title}", quality_table(record, means if title == TITLES[PLAIN] else {})]
    sections.append(columns_text(has_outliers=TITLES[OUTLIERS] in texts, has_averages=bool(means)))
    for name in pictures:
        picture = PICTURES[name]
        sections += [f"## {picture.heading}"] * bool(picture.heading) + [f"![{picture.alt}]({name})", picture.text]
    for title, record in texts.items():
        reason = record["parts"].get("keys", {}).get("unmeasured")
        sections += [f"Keys were not looked at {title}: {reason.rstrip('.')}."] if reason else []
    if TASKS in records:
        sections += ["## Zero-shot tasks", *task_sections(of_tasks, records[TASKS]["settings"]["limit"])]
    sections += ["## How these numbers came about", provenance(records, files)]
    return "\n\n".join(sections) + "\n"


def opening(record: Record) -> str:
    """What was measured, on what."""
    card, settings = record["card"], record["settings"]
    source = settings["source"]
    name = source.get("text") or f"{source.get('dataset')}, {source.get('split')}"
    threads = f"{card['threads']} thread{'s' * (card['threads'] != 1)}"
    machine = card.get("gpu") if settings["device"].startswith("cuda") else f"{card['cpu']}, {threads}"
    mode, rows = rows_of(record)
    how = {"chunked": f"in chunks of {settings['chunk']} tokens", "decode": "token by token"}.get(mode, mode)
    return (
        f"Every preset against the unquantised cache of the same run: {rows[UNQUANTIZED]['scored_tokens']:,} tokens of "
        f"{name} ({source['convention']}) in windows of {settings['window']}, {how}, {settings['dtype']} on {machine}. "
        f"hf_kvquant {card['hf_kvquant']}, torch {card['torch']}, transformers {card['transformers']}."
    )


def quality_table(record: Record, averages: Mapping[str, Average]) -> str:
    """A row per preset."""
    headings = [
        "preset",
        "bits a value",
        "KL, nats a token",
        "median",
        "99 %",
        "same next token",
        "perplexity",
        "change",
    ]
    headings += ["zero-shot average, %"] * bool(averages)
    rows = []
    for name, row in rows_of(record)[1].items():
        error = row["kld_standard_error"]
        cells_of_row = [f"`{name}`", f"{row['bits_per_value']:.4g}"]
        cells_of_row.append(scientific(max(row["kld"], 0.0)) + (f" ± {scientific(error)}" if error else ""))
        cells_of_row += [scientific(max(row[key], 0.0)) for key in ("kld_median", "kld_p99")]
        perplexity = "-" if row["perplexity"] is None else f"{row['perplexity']:.2f}"
        cells_of_row += [f"{row['agreement']:.1%}", perplexity, f"{row['perplexity_change']:+.2%}"]
        rows.append(cells_of_row + [spelled_average(averages.get(name))] * bool(averages))
    return table(headings, rows)


def columns_text(*, has_outliers: bool, has_averages: bool) -> str:
    """What the columns mean."""
    text = (
        "Bits: of a cached value, scales and zeros included. KL: of the next-token distribution from that over the "
        "unquantised cache, with its standard error over windows; median and 99 % of single tokens. Perplexity: per "
        "token."
    )
    if has_outliers:
        text += (
            " Injected outliers make some channels of keys larger and of queries smaller, which changes nothing but "
            "what quantising costs."
        )
    if has_averages:
        text += (
            f" Zero-shot average: accuracy over {', '.join(AVERAGED)}, and the change from the unquantised cache on "
            "the same items with its 95 % interval, in points."
        )
    return text


def task_sections(parts: Mapping[tuple[str, str], Part], limit: int | None) -> list[str]:
    """A table per task, as far as tasks were run, and what its columns mean."""
    sections = []
    for task in dict.fromkeys(task for task, _ in parts):
        by_preset = {preset: part for (name, preset), part in parts.items() if name == task}
        reference = by_preset.get(UNQUANTIZED)
        rows = [[f"`{preset}`", *cells(preset, part, reference)[1:]] for preset, part in by_preset.items()]
        sections += [f"### {task}", table(["preset", *HEADINGS], rows)]
    return [*sections, f"{'All items' if limit is None else f'The first {limit} items'} of each task. {LEGEND}"]


def provenance(records: Mapping[str, Record], files: Mapping[str, str]) -> str:
    """Per record, its file, its command and what it has passed; and what there is no record of."""
    lines = []
    commands = dict.fromkeys(record["card"]["command"] for record in records.values())
    for kind, name in files.items():
        if kind not in records:
            lines.append(f"- `{name}`: not there.")
            continue
        record = records[kind]
        card = record["card"]
        made = [card["date"]]
        if card["commit"]:
            made.append(f"commit {card['commit'][:10]}{', with changes' if card['is_dirty'] else ''}")
        line = f"- `{name}`: {', '.join(made)}."
        if kind != TASKS and not is_finished(record):
            line += " Not finished, and so not shown: run the command again."
        elif kind != TASKS:
            line += " Every (query, token) pair that had to be read from codes was; the ways of feeding a text agree."
        lines.append(line)
    return "\n".join([*lines, *(f"- Command: `{command}`" for command in commands)])
