"""The options of `hf-kvquant batch`."""

from __future__ import annotations

import argparse
from typing import Any

from .. import arguments


def add_parser(commands: Any) -> None:
    """Add `batch` to the commands, the sub-parsers of argparse."""
    parser = arguments.add_command(
        commands,
        "batch",
        load,
        help="answer the lines of a file, many at once",
        description="Answer every line of a file of JSON lines through continuous batching. Answers are written as "
        "they are done, so the same command resumes a run that was stopped. Under accelerate launch (on CPUs: "
        "torchrun), lines are spread over processes.",
    )
    add = parser.add_argument
    lines = (
        '{"prompt": "text"} or {"messages": [...]} a line, with id, max_new_tokens, temperature, top_p and top_k if '
    )
    add("input", metavar="IN", help=f"{lines}wanted; or OpenAI's batch format")
    add("--output", required=True, metavar="FILE", help="write an answer a line; run again to resume")
    arguments.add_served_config(parser)
    add("--max-new-tokens", type=int, default=128, metavar="N", help="for lines that do not say (default: 128)")
    add("--sample", action="store_true", help="sample lines that do not say, instead of taking the most likely token")
    for name, kind in (("temperature", float), ("top_p", float), ("top_k", int)):
        shown = "N" if kind is int else "X"
        whose = "of sampled lines that do not say (default: the model's generation config, or none)"
        add(arguments.option(name), type=kind, metavar=shown, help=whose)
    arguments.add_batching(parser)
    arguments.add_placement(parser)


def load(args: argparse.Namespace) -> arguments.Run:
    """Import what runs the command."""
    arguments.served_config(args)
    arguments.checked_batching(args)
    from ..batch import run

    return run
