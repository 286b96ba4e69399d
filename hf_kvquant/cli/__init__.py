"""The command `hf-kvquant`: `parsers/` has the options of each sub-command, and the file of its name here runs it.

What parses and checks options imports neither torch nor transformers, so that `--help` and the line about a mistake do
not wait for them. `arguments.py` has options and checks that commands share, `loading.py` what needs a model,
`threads.py` how many threads compute. `eval` is in the package `hf_kvquant_evals` (`evals/` of the repository).

A mistake in the arguments ends with one line on stderr and exit code 2; a refused preset, or a measurement that fails
its own checks, with exit code 1; an interruption with 130. A bug ends with a traceback.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from ..common import interrupts
from ..common.errors import Interrupted, RefusedResult, UsageError, named
from ..common.version import __version__
from . import messages, threads
from .arguments import Parser, check_counts
from .parsers import COMMANDS


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with these arguments, by default the process's. Returns the exit code."""
    return run(parser().parse_args(argv))


def run(args: argparse.Namespace) -> int:
    """Run the command that `args.load` imports, and print in a line why it ended early. Returns the exit code."""
    try:
        with named(args.command), messages.held():
            check_counts(args, "threads")
            threads.shorten_waits()
            work = args.load(args)
            threads.set_number(args.threads)
            with interrupts.raised():
                work(args)
    except BaseException as error:
        interrupt = interrupts.behind(error)
        if interrupt is not None:
            return interrupts.tell(str(interrupt) if isinstance(interrupt, Interrupted) else "")
        if isinstance(error, UsageError):
            print(f"hf-kvquant: error: {error}", file=sys.stderr)
            return 2
        if isinstance(error, ImportError):
            # Releases of transformers that were not tested may lack what a command imports.
            from ..upstream.releases import explained

            if explained(error) is not error:
                print(f"hf-kvquant: error: {explained(error)}", file=sys.stderr)
                return 2
        if isinstance(error, RefusedResult):
            print(f"hf-kvquant: refused: {error}", file=sys.stderr)
            return 1
        raise
    return 0


def parser() -> argparse.ArgumentParser:
    """The command's arguments."""
    root = Parser(
        prog="hf-kvquant", description="Generate text with a quantised key-value cache, and see what it costs."
    )
    root.add_argument("--version", action="version", version=f"hf-kvquant {__version__}")
    commands = root.add_subparsers(required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.add_parser(commands)
    return root
