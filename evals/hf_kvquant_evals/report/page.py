"""Writes a report into the folder of its records: a page in Markdown and as one self-contained HTML file.

Records of `eval perplexity` and `eval tasks` are read as they stand in their files, so the same files always make the
same page. What is missing in the records is left out, and the page says so. The words of the page are in the templates
`report.md.jinja` and `report.html.jinja`.
"""

from __future__ import annotations

import base64
import dataclasses
import functools
import re
import statistics
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader
from markdown_it import MarkdownIt

from hf_kvquant.common.errors import UsageError
from hf_kvquant.common.naming import model_name
from hf_kvquant.common.output import written
from hf_kvquant.common.tables import markdown_table, or_dash, scientific
from hf_kvquant.preflight.check import GOAL, LIMIT
from hf_kvquant.presets import UNQUANTIZED

from ..choices import CONTEXT
from ..choices import OUTLIERS as OUTLIERS
from ..choices import PLAIN as PLAIN
from ..choices import TASKS as TASKS
from ..perplexity.perplexity_results import is_measured, passed, rows_of, windows_of
from ..records import Record, read_record
from ..tasks.data import AVERAGED
from ..tasks.task_results import HEADINGS, LEGEND, Average, Part, averages, by_task_and_preset, cells
from . import plots

FILES = {PLAIN: "perplexity.json", OUTLIERS: "perplexity_outliers.json", TASKS: "tasks.json"}
PAGE, HTML = "report.md", "report.html"
# How panels and headings name the evaluations of a text.
TITLES = {PLAIN: "as it is", OUTLIERS: "with injected outliers"}

# What one panel of a picture shows.
Numbers = dict[str, Any]


def of_texts(records: Mapping[str, Record]) -> dict[str, Record]:
    """The records of `eval perplexity` that have measured something, by title."""
    return {TITLES[kind]: records[kind] for kind in TITLES if kind in records and is_measured(records[kind])}


def spelled_average(average: Average | None) -> str:
    """`38.1`, or `37.9 (-0.6 to +0.2)` with the interval of the change, in points."""
    if average is None:
        return "-"
    value = f"{100 * average.value:.1f}"
    if average.change_interval is None:
        return value
    low, high = average.change_interval
    return f"{value} ({100 * low:+.1f} to {100 * high:+.1f})"


def with_standard_error(text: str, error: float | None, form: Callable[[float], str]) -> str:
    """A number with its standard error, if that is known."""
    return text if error is None else f"{text} ± {form(error)}"


def megabytes(record: Record, name: str, context: int) -> float:
    """Memory of the cache of one text of so many tokens, dense windows included."""
    row = rows_of(record)[1][name]
    config = record["settings"]["presets"][name]
    dense = config["sink_length"] + config["residual_length"]
    unquantized = rows_of(record)[1][UNQUANTIZED]["bytes_per_token"]
    return float(row["bytes_per_token"] * context + unquantized * min(dense, context)) / 1e6


def judged(row: Mapping[str, Any]) -> str:
    """What the limits of the pre-flight say of a preset, if two standard errors leave no doubt."""
    kld, error = row["kld"], 2 * (row["kld_standard_error"] or 0.0)
    for limit, said in ((GOAL, "good"), (LIMIT, "tolerable")):
        if kld <= limit:
            return said if kld + error <= limit else f"{said}, or just not"
    return "too much" if kld - error > LIMIT else "too much, or just not"


def verdict(record: Record, context: int) -> str:
    """Which preset to take, in two sentences."""
    rows = {name: row for name, row in rows_of(record)[1].items() if name != UNQUANTIZED}
    whole = megabytes(record, UNQUANTIZED, context)

    def told(name: str, limit: float) -> str:
        size = megabytes(record, name, context)
        return (
            f"`{name}` is the smallest preset that stays below {limit:g} nats per token ({spelled_kld(rows[name])}). "
            f"At {context:,} tokens, its cache takes {size:,.4g} MB instead of {whole:,.4g} ({size / whole:.0%})."
        )

    def smallest(limit: float) -> str | None:
        below = [name for name, row in rows.items() if row["kld"] + 2 * (row["kld_standard_error"] or 0.0) <= limit]
        return min(below, key=lambda name: (megabytes(record, name, context), rows[name]["kld"]), default=None)

    good, tolerable = smallest(GOAL), smallest(LIMIT)
    if tolerable is None:
        return f"No preset stays below {LIMIT:g} nats per token for certain. Calibrate the model, or measure more text."
    if good is None or good == tolerable:
        return told(tolerable, LIMIT if good is None else GOAL)
    return f"{told(good, GOAL)} {told(tolerable, LIMIT)}"


def spelled_kld(row: Mapping[str, Any]) -> str:
    """The mean divergence of a preset with its standard error."""
    return with_standard_error(scientific(max(row["kld"], 0.0)), row["kld_standard_error"] or None, scientific)


def gate_sentence(record: Record) -> str:
    """The largest distance between two ways of feeding the text, beside the limit that it was compared with."""
    found = [
        (distance / each["bound"], distance, each["bound"], what, name)
        for name, each in (record["parts"].get("gate") or {}).items()
        if each["bound"]
        for what, distance in each["between"].items()
    ]
    if not found:
        return ""
    _, distance, bound, what, name = max(found)
    values = f"{scientific(distance)} nats per token; the limit is {scientific(bound)}"
    return f" They differ most for `{name}`, {what}: {values}."


def left_out(record: Record) -> str:
    """What a limit of time left out of a record, and how to get it, in a sentence; else nothing."""
    part = record["parts"].get("left_out") or {}
    what = [re.sub(r"^\w+, (window)", r"\1", each) for each in part.get("what", ())]
    if not what:
        return ""
    some = what if len(what) <= 4 else [*what[:2], "…", what[-1]]
    minutes = max(1, round(part["minutes"]))
    return (
        f"Left out for lack of time: {', '.join(some)}. They take about {minutes} minutes more: run the same command "
        "with more `--minutes`."
    )


def quality_table(record: Record, averages: Mapping[str, Average], context: int) -> str:
    """The table of `eval perplexity`, one row per preset. Headings have the limits of the values below them."""
    headings = [
        "preset",
        "bits per value",
        f"MB at {context:,} tokens",
        f"KL, nats per token (limits: {GOAL:g}, {LIMIT:g})",
    ]
    headings += ["verdict", "median", "99 %", "same next token", "perplexity", "change"]
    headings += ["zero-shot average, %"] if averages else []
    rows = []
    for name, row in rows_of(record)[1].items():
        median, p99 = (scientific(max(row[key], 0.0)) for key in ("kld_median", "kld_p99"))
        size = f"{megabytes(record, name, context):,.4g}"
        says = "-" if name == UNQUANTIZED else judged(row)
        cells_of_row = [f"`{name}`", f"{row['bits_per_value']:.4g}", size, spelled_kld(row), says, median, p99]
        change = f"{row['perplexity_change']:+.2%}"
        if not change.strip("+-0.%"):
            change = "0.00%"  # without a sign
        errors = [row.get(f"{key}_standard_error") or None for key in ("agreement", "perplexity_change")]
        same = with_standard_error(f"{row['agreement']:.1%}", errors[0], "{:.1%}".format)
        change = with_standard_error(change, errors[1], "{:.2%}".format)
        cells_of_row += [same, or_dash(row["perplexity"], ".2f"), change]
        rows.append(cells_of_row + ([spelled_average(averages.get(name))] if averages else []))
    return markdown_table(headings, rows)


def task_tables(parts: Mapping[tuple[str, str], Part]) -> dict[str, str]:
    """A table for each task that was run."""
    tables = {}
    for task in dict.fromkeys(task for task, _ in parts):
        by_preset = {preset: part for (name, preset), part in parts.items() if name == task}
        reference = by_preset.get(UNQUANTIZED)
        rows = [[f"`{preset}`", *cells(preset, part, reference)[1:]] for preset, part in by_preset.items()]
        tables[task] = markdown_table(["preset", *HEADINGS], rows)
    return tables


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


TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).parent), trim_blocks=True, keep_trailing_newline=True, autoescape=False
)
TEMPLATES.globals |= {"AVERAGED": AVERAGED, "FILES": FILES, "LEGEND": LEGEND, "TITLES": TITLES}
TEMPLATES.globals |= {"is_measured": is_measured, "passed": passed, "quality_table": quality_table, "rows_of": rows_of}
TEMPLATES.globals |= {
    "gate_sentence": gate_sentence,
    "left_out": left_out,
    "verdict": verdict,
    "windows_of": windows_of,
}
TEMPLATES.globals |= {"GOAL": GOAL, "LIMIT": LIMIT}


def page(records: Mapping[str, Record], pictures: Sequence[str], *, context: int, asked: Collection[str]) -> str:
    """The page, in Markdown, with the pictures of these names. At least one record of `eval perplexity` has a summary.

    Memory is that at `context` tokens. Of the kinds of records that were `asked` for, the page says which are missing.
    """
    parts = by_task_and_preset(records[TASKS]["parts"]) if TASKS in records else {}
    return TEMPLATES.get_template(f"{PAGE}.jinja").render(
        records=records,
        texts=of_texts(records),
        pictures=pictures,
        context=context,
        asked=asked,
        task_tables=task_tables(parts),
        averages=averages(parts),
    )


def as_html(markdown: str, folder: Path) -> str:
    """The Markdown page as HTML, with its pictures, all SVG, from a folder. The first line is the title."""
    parser = MarkdownIt("commonmark", {"html": False}).enable("table")
    tokens = parser.parse(markdown)
    for token in tokens:
        for child in token.children or ():
            if child.type == "image":
                picture = base64.b64encode((folder / str(child.attrs["src"])).read_bytes()).decode("ascii")
                child.attrs["src"] = f"data:image/svg+xml;base64,{picture}"
    title = markdown.partition("\n")[0].removeprefix("# ")
    return TEMPLATES.get_template(f"{HTML}.jinja").render(
        title=title, body=parser.renderer.render(tokens, parser.options, {})
    )


def read(model: str, folder: Path) -> dict[str, dict[str, Any]]:
    """The records of a model in a folder, by kind."""
    try:
        records = {kind: read_record(folder / name) for kind, name in FILES.items() if (folder / name).exists()}
    except ValueError as error:
        raise UsageError(f"`--output` must hold nothing but records under these names. {error}") from error
    name = model_name(model)
    for kind, record in records.items():
        found = record["settings"].get("model")
        if found != name:
            raise UsageError(
                f"`--output` must hold records of {name}, got {FILES[kind]} of {found}. Name another folder."
            )
    return records


def render(model: str, folder: Path, *, context: int = CONTEXT, asked: Collection[str] = ()) -> list[str]:
    """Make the page and its pictures from the records in a folder, see `page`. Returns the names of the pictures."""
    records = read(model, folder)
    texts = of_texts(records)
    if not texts:
        found = ", ".join(FILES[kind] for kind in records) or "none"
        raise UsageError(
            f"`--output` must hold a {FILES[PLAIN]} or {FILES[OUTLIERS]} with results, got {folder} "
            f"with records: {found}. Run without --render first."
        )
    try:
        with tempfile.TemporaryDirectory(prefix=".", dir=folder) as name:
            drafts = Path(name)
            drawn = []
            for file, picture in PICTURES.items():
                if panels := picture.panels(texts):
                    picture.draw(drafts / file, panels)
                    drawn.append(file)
            text = page(records, drawn, context=context, asked=asked)
            (drafts / PAGE).write_text(text, encoding="utf-8")
            (drafts / HTML).write_text(as_html(text, drafts), encoding="utf-8")
            for each in (*drawn, PAGE, HTML):
                with written(folder / each) as path:
                    (drafts / each).replace(path)
    except OSError as error:
        raise UsageError(
            f"`--output` must have room for the page, got {folder}: {error}. Make room, then run the same "
            "command again."
        ) from error
    return drawn
