"""What pages and pictures are made of, as data: a module that renders lists its `Part`s and `Picture`s, and
`render_readme.py` collects them.

A part or picture that needs one results file gets its content; one that needs several gets a mapping of their contents,
by name. Tables and texts are templates (`Table`, `Text`) that are filled with what is in results.
"""

from __future__ import annotations

import dataclasses
import string
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hf_kvquant.common.tables import markdown_table, scientific

Results = Mapping[str, Any]
Row = Mapping[str, Any]
# What a column shows of a row: a template, or a function. Columns may have the same heading, so pairs are fine, too.
Cell = str | Callable[[Any], str]
Columns = Mapping[str, Cell] | Sequence[tuple[str, Cell]]
NOT_MEASURED = "Not measured yet."


@dataclasses.dataclass(frozen=True)
class Made:
    """What is made from results files.

    Attributes:
        name: A part's is that of its markers; a picture's that of its file.
        files: Results files that it needs, by their names without the suffix.
        optional: Those that it also shows where they exist. If it needs no others, it needs one of these.
    """

    name: str
    files: tuple[str, ...]
    optional: tuple[str, ...] = dataclasses.field(default=(), kw_only=True)

    def of(self, results: Results) -> Any:
        """What of all results it is made from; `None` if a file that it needs is missing."""
        present = {name: results[name] for name in (*self.files, *self.optional) if name in results}
        if not present or any(name not in present for name in self.files):
            return None
        return present[self.files[0]] if len(self.files) == 1 and not self.optional else present


@dataclasses.dataclass(frozen=True)
class Part(Made):
    """The Markdown between two markers. Each paragraph is a text, or a function that makes one of the results."""

    paragraphs: tuple[str | Callable[[Any], str], ...]

    def text(self, results: Results) -> str:
        """Its paragraphs."""
        found = self.of(results)
        if found is None:
            return NOT_MEASURED
        return "\n\n".join(each if isinstance(each, str) else each(found) for each in self.paragraphs)


@dataclasses.dataclass(frozen=True)
class Picture(Made):
    """A picture: the numbers that it takes from results, and how it is drawn from them."""

    plotted: Callable[[Any], dict[str, Any]]
    draw: Callable[[dict[str, Any], Path], None]


# --- templates --------------------------------------------------------------------------------------------------------


def short(gpu: str) -> str:
    """`H200`."""
    return gpu.removeprefix("NVIDIA ")


def thousands(tokens: float) -> str:
    """`8k`."""
    return f"{int(tokens) // 1024}k"


def span(ends: Sequence[int]) -> str:
    """`128 to 896`, or one number if both are equal."""
    fewest, most = ends
    return f"{fewest:,} to {most:,}" if fewest < most else f"{most:,}"


# Formats of templates beside Python's own. Others begin with the unit that a number is in, or with `range`: the least
# and the most of a list.
FORMATS: dict[str, Callable[[Any], str]] = {
    "change": lambda ratio: f"{round(ratio, 4) + 0.0:+.2%}",  # with its sign, and never `-0.00%`
    "day": lambda date: date[:10],
    "scientific": scientific,
    "short": short,
    "span": span,
    "us": lambda number: f"{number:.0f}" if number >= 100 else f"{number:.1f}",
    "x": lambda case: case.replace("x", " x ").replace("-", " to "),
}
UNITS = {"giga": 1e9, "kilo": 1e3, "milli": 1e-3}
# What rows of results are named by.
NAMES = ("system", "preset", "case", "method", "kind")


def at(path: str, values: Any) -> Any:
    """What is at a path of nested mappings and lists, `cases.64x8k.rows.int4.share`; `None` if it is missing.

    In a list, a key is the name of a row, or its number. `*` stands for all entries: then it is a list.
    """
    key, _, rest = path.partition(".")
    if key == "*":
        found = [at(rest, each) for each in values]
        return [each for each in found if each is not None] or None
    if not isinstance(values, list):
        value = values.get(key)
    elif key.isdigit():
        value = values[int(key)]
    else:
        value = next((row for row in values if key in map(row.get, NAMES)), None)
    return at(rest, value) if rest and value is not None else value


class _Templates(string.Formatter):
    """Fills templates with what is at paths. A field is a path; several, `gpu|cpu`, of which the first that
    leads somewhere counts; or the quotient of two, `plain.ms/ours.ms`."""

    def get_field(self, field_name: str, args: Any, kwargs: Any) -> tuple[Any, str]:
        for paths in field_name.split("|"):
            values = [at(path, kwargs) for path in paths.split("/")]
            if None not in values:
                return (values[0] if len(values) == 1 else values[0] / values[1]), field_name
        raise KeyError(field_name)

    def format_field(self, value: Any, format_spec: str) -> str:
        if format_spec in FORMATS:
            return FORMATS[format_spec](value)
        if format_spec.startswith("range"):
            return " to ".join(format(end, format_spec.removeprefix("range")) for end in (min(value), max(value)))
        unit = next((unit for unit in UNITS if format_spec.startswith(unit)), None)
        return format(value, format_spec) if unit is None else format(value / UNITS[unit], format_spec[len(unit) :])


_TEMPLATES = _Templates()


def filled(template: str, values: Row) -> str:
    """A template with its fields.

    Raises:
        KeyError: A field is missing or `None`.
    """
    return _TEMPLATES.vformat(template, (), values)


def shown(cell: Cell, row: Row | None) -> str:
    """What a cell shows of a row; a dash if there is no row, or a field of its template is missing."""
    if row is None:
        return "-"
    if not isinstance(cell, str):
        return cell(row)
    try:
        return filled(cell, row)
    except KeyError:
        return "-"


def of(path: str, cell: Cell) -> Cell:
    """A cell that shows what is at a path of a row."""
    return lambda row: shown(cell, at(path, row))


def flat(results: Row, *keys: str) -> list[dict[str, Any]]:
    """What is in nested lists, each with all that the entries have that it is in."""
    rows: list[dict[str, Any]] = [dict(results)]
    for key in keys:
        rows = [{**outer, **row} for outer in rows for row in outer[key]]
    return rows


def rows_of(rows: str | Callable[[Any], Iterable[Row]], results: Any) -> Iterable[Row]:
    """The rows of a table."""
    return flat(results, *rows.split(".")) if isinstance(rows, str) else rows(results)


@dataclasses.dataclass(frozen=True)
class Table:
    """A table of results: its rows, what each column shows of them, and how many columns are text. Rows are made by a
    function, or are those of lists in lists, as in `cases.rows`."""

    rows: str | Callable[[Any], Iterable[Row]]
    columns: Columns | Callable[[Any], Columns]
    num_text: int = 1

    def __call__(self, results: Any) -> str:
        """The Markdown."""
        columns = self.columns(results) if callable(self.columns) else self.columns
        pairs = list(columns.items() if isinstance(columns, Mapping) else columns)
        rows = [[shown(cell, row) for _, cell in pairs] for row in rows_of(self.rows, results)]
        return markdown_table([heading for heading, _ in pairs], rows, num_text=self.num_text)


@dataclasses.dataclass(frozen=True)
class Pivot:
    """A table with a line for each start, which `index` shows, and a group of columns, `cells`, for each value of
    something else. Headings of `cells` are templates, which tell the groups apart. A cell without a row is a dash."""

    rows: str | Callable[[Any], Iterable[Row]]
    index: Mapping[str, Cell]
    cells: Mapping[str, Cell]
    num_text: int = 1

    def __call__(self, results: Any) -> str:
        """The Markdown."""
        groups: dict[tuple[str, ...], None] = {}
        lines: dict[tuple[str, ...], dict[tuple[str, ...], Row]] = {}
        for row in rows_of(self.rows, results):
            group = tuple(filled(heading, row) for heading in self.cells)
            groups[group] = None
            lines.setdefault(tuple(shown(cell, row) for cell in self.index.values()), {})[group] = row
        headings = [*self.index, *(heading for group in groups for heading in group)]
        rows = [
            [*start, *(shown(cell, found.get(group)) for group in groups for cell in self.cells.values())]
            for start, found in lines.items()
        ]
        return markdown_table(headings, rows, num_text=self.num_text)


class Text:
    """A paragraph about results: templates that are joined, and what functions make of the results, by name."""

    def __init__(self, *templates: str, **values: Callable[[Any], Any]) -> None:
        self.template, self.values = " ".join(templates), values

    def __call__(self, results: Results) -> str:
        """The text."""
        return filled(self.template, {**results, **{name: value(results) for name, value in self.values.items()}})


def not_measured(reasons: Sequence[str]) -> str:
    """Says what is missing and why, behind a space; else nothing."""
    return f" Not measured: {'; '.join(reasons)}." if reasons else ""


def origin(file: str, *packages: str, of: str = "", more: str = "") -> str:
    """The template that says on what machine, with which packages and when a results file was measured.

    Args:
        file: Its name without the suffix.
        packages: Those of which results have the version.
        of: The path of its content, with a dot, if results are several files.
        more: What follows the file.
    """
    versions = "".join(f"{name} {{{of}{name}}}, " for name in packages)
    return f"{{{of}gpu|{of}cpu}}, {versions}{{{of}date:day}}, `evals/results/{file}.json`{more}."
