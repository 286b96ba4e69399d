"""The command `hf-kvquant env`, which has only the options of every command."""

from __future__ import annotations

import argparse
from typing import Any

from ..arguments import Run, add_command


def add_parser(commands: Any) -> None:
    """Add `env` to the commands, the sub-parsers of argparse."""
    add_command(commands, "env", load, help="show versions, kernels and devices, and what is missing", has_model=False)


def load(args: argparse.Namespace) -> Run:
    """Import what runs the command."""
    from ..env import run

    return run
