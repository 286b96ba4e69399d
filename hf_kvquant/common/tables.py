"""Tables of results, which commands show in a terminal and reports give as plain text."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text


def table_of(
    headings: Sequence[str],
    rows: Iterable[tuple[Sequence[str], str | None]],
    *,
    title: str | None = None,
    left: Collection[str] = (),
) -> Table:
    """A table of rows, each with its style. Columns are aligned to the right, except those in `left`."""
    table = Table(title=title, title_justify="left", title_style="bold")
    for heading in headings:
        table.add_column(heading, justify="left" if heading in left else "right", overflow="fold")
    for row, style in rows:
        table.add_row(*map(Text, row), style=style)  # `Text`, since strings are parsed as markup
    return table


def plain(table: Table) -> list[str]:
    """The lines of a table as plain text, without a title or frame, at any width."""
    table.title, table.box, table.pad_edge = None, None, False
    console = Console(width=10_000, color_system=None, force_terminal=False, force_jupyter=False)
    with console.capture() as captured:
        console.print(table)
    return [line.rstrip() for line in captured.get().splitlines()]
