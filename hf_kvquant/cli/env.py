"""`hf-kvquant env`: versions, kernels and devices, and what is missing."""

from __future__ import annotations

import argparse

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..environment import environment


def run(args: argparse.Namespace) -> None:
    """Run `hf-kvquant env`."""
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in environment().items():
        table.add_row(name, Text(value))  # brackets, as in hf-kvquant[eval], are no markup here
    Console(highlight=False).print(table)
