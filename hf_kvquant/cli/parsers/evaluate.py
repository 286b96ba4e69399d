"""`hf-kvquant eval` belongs to `hf_kvquant_evals`, in `evals/`, which has its options and runs it.

Nothing here imports that package: it is looked up by name, so that this one also works without it.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
from typing import Any

from ...common.errors import UsageError
from .. import arguments

PACKAGE = "hf_kvquant_evals"
HELP = "measure what presets cost in quality"


def add_parser(commands: Any) -> None:
    """Add `eval` to the commands, the sub-parsers of argparse, with the evaluations of the package if it is there."""
    if importlib.util.find_spec(PACKAGE) is None:
        parser = arguments.add_command(commands, "eval", load, help=HELP, has_model=False)
        parser.add_argument("words", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    else:
        importlib.import_module(f"{PACKAGE}.cli.parsers").add_evaluations(commands.add_parser("eval", help=HELP))


def load(args: argparse.Namespace) -> arguments.Run:
    """Say what to do, where the package is missing."""
    raise UsageError(
        f"the package {PACKAGE} must be there, got none. Install hf-kvquant again, or, in a checkout that is not "
        "installed, add its folder evals to PYTHONPATH."
    )
