"""Shows numbers: tables in a terminal and in Markdown, and the spelling of some kinds of numbers in both."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console, RenderableType
from rich.table import Table


def print_table(
    console: Console,
    headings: Sequence[str],
    rows: Iterable[Sequence[RenderableType]],
    *,
    title: str | None = None,
    left: Sequence[str] = ("preset",),
    notes: Iterable[str] = (),
    column: Mapping[str, Any] | None = None,
    **options: Any,
) -> None:
    """Print a table, and below it notes on what its columns mean.

    Args:
        console: Where to print.
        headings: Of the columns.
        rows: One cell for each heading; an empty row ends a section.
        title: Of the table.
        left: Headings of columns with text. All others hold numbers, which are aligned on the right.
        notes: Printed below, dim.
        column: Options of `rich.table.Table.add_column`.
        **options: Of `rich.table.Table`.
    """
    table = Table(title=title, title_justify="left", title_style="bold", **options)
    for heading in headings:
        table.add_column(heading, justify="left" if heading in left else "right", **(column or {}))
    for row in rows:
        if row:
            table.add_row(*row)
        else:
            table.add_section()
    console.print(table)
    for note in notes:
        console.print(note, style="dim")


def markdown_table(headings: Sequence[str], rows: Sequence[Sequence[str]], *, num_text: int = 1) -> str:
    """A Markdown table. The first columns, so many as `num_text`, are text, all others are numbers."""
    rule = "|---" * num_text + "|--:" * (len(headings) - num_text) + "|"
    return "\n".join([f"| {' | '.join(headings)} |", rule, *(f"| {' | '.join(row)} |" for row in rows)])


def scientific(number: float) -> str:
    """A small number as people write it: `1.9·10⁻⁴`."""
    if number == 0:
        return "0"
    mantissa, exponent = f"{number:.1e}".split("e")
    digits = str(int(exponent)).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return f"{mantissa}·10{digits}"


def or_dash(value: float | None, form: str) -> str:
    """A number in the given format; a dash if it is unknown."""
    return "-" if value is None else format(value, form)


def with_error(value: float, error: float | None, form: str) -> str:
    """A number with its standard error, if that is known: `0.123 ± 0.004`."""
    return format(value, form) + ("" if error is None else f" ± {format(error, form.lstrip('+'))}")
