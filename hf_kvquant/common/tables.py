"""Tables of results, in a terminal, as plain text and in Markdown, and how numbers are spelled in them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from html import escape
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text


def table_of(
    headings: Sequence[str],
    rows: Iterable[tuple[Sequence[str], str | None]],
    *,
    title: str | None = None,
    left: Collection[str] = (),
    column: Mapping[str, Any] | None = None,
    **options: Any,
) -> Table:
    """A table of rows, each with its style; a row without cells begins a section.

    Columns are aligned to the right, except those in `left`. `column` has options of `rich.table.Table.add_column`;
    `options` go to `rich.table.Table`.
    """
    table = Table(title=title, title_justify="left", title_style="bold", **options)
    for heading in headings:
        justify: Any = "left" if heading in left else "right"
        table.add_column(heading, justify=justify, **{"overflow": "fold", **(column or {})})
    for row, style in rows:
        if row:
            table.add_row(*map(Text, row), style=style)  # `Text`, since strings are parsed as markup
        else:
            table.add_section()
    return table


def print_table(
    console: Console,
    headings: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    title: str | None = None,
    notes: Iterable[str] = (),
) -> None:
    """Print a table of presets, and below it, dim, notes on what its columns mean."""
    console.print(table_of(headings, ((row, None) for row in rows), title=title, left=("preset",)))
    for note in notes:
        console.print(note, style="dim")


def plain(table: Table) -> list[str]:
    """The lines of a table as plain text, without a title or frame, at any width."""
    table.title, table.box, table.pad_edge = None, None, False
    console = Console(width=10_000, color_system=None, force_terminal=False, force_jupyter=False)
    with console.capture() as captured:
        console.print(table)
    return [line.rstrip() for line in captured.get().splitlines()]


def html(title: str, table: Table, notes: Iterable[str]) -> str:
    """A table for a notebook, with a title above and notes below it."""
    headings = "".join(f"<th>{escape(str(column.header))}</th>" for column in table.columns)
    rows = zip(*(column.cells for column in table.columns), strict=True)
    body = "".join(f"<tr>{''.join(f'<td>{escape(str(cell))}</td>' for cell in row)}</tr>" for row in rows)
    below = "".join(f"<p>{escape(note)}</p>" for note in notes)
    return f"<p><b>{escape(title)}</b></p><table><thead><tr>{headings}</tr></thead><tbody>{body}</tbody></table>{below}"


def markdown_table(headings: Sequence[str], rows: Sequence[Sequence[str]], *, num_text: int = 1) -> str:
    """A Markdown table. The first `num_text` columns are text, the rest numbers."""
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
