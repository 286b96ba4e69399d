"""Tables of results, which commands show in a terminal and reports give as plain text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Console, JustifyMethod
from rich.table import Table
from rich.text import Text


def table_of(
    headings: Mapping[str, JustifyMethod],
    rows: Sequence[Sequence[str]],
    *,
    title: str | None = None,
    styles: Sequence[str | None] | None = None,
) -> Table:
    """A table, with the alignment of each column and, if given, a style for each row."""
    table = Table(title=title, title_justify="left", title_style="bold")
    for heading, justify in headings.items():
        table.add_column(heading, justify=justify, overflow="fold")
    for row, style in zip(rows, styles or [None] * len(rows), strict=True):
        table.add_row(*map(Text, row), style=style)  # `Text`, since strings are parsed as markup
    return table


def plain(table: Table) -> list[str]:
    """The lines of a table as plain text, without a title or frame, at any width."""
    table.title, table.box, table.pad_edge = None, None, False
    console = Console(width=10_000, color_system=None, force_terminal=False, force_jupyter=False)
    with console.capture() as captured:
        console.print(table)
    return [line.rstrip() for line in captured.get().splitlines()]
