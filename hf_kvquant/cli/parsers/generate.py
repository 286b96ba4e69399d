"""The options of `hf-kvquant generate`."""

from __future__ import annotations

import argparse
from typing import Any

from ...presets import UNQUANTIZED
from .. import arguments


def add_parser(commands: Any) -> None:
    """Add `generate` to the commands, the sub-parsers of argparse."""
    parser = arguments.add_command(
        commands,
        "generate",
        load,
        help="continue prompts under one or more presets",
        description="Continue prompts under each preset, streaming the text, and print a table. If the unquantised "
        f"cache ('{UNQUANTIZED}') is among the presets, the text that it wrote is fed token by token through each "
        "preset's own cache (teacher forcing), to compare them.",
    )
    add = parser.add_argument
    add("--prompt", action="append", default=[], metavar="TEXT", help="text to continue; repeatable")
    add("--prompt-file", action="append", default=[], metavar="FILE", help="a file that holds one prompt; repeatable")
    arguments.add_presets(parser, arguments.COMPARED_PRESETS)
    add("--max-new-tokens", type=int, default=128, metavar="N", help="per prompt (default: 128)")
    arguments.add_placement(parser)
    add("--sample", action="store_true", help="sample instead of taking the most likely token")
    add("--temperature", type=float, metavar="X", help="with --sample (default: 1)")
    add("--top-p", type=float, metavar="X", help="with --sample (default: 1)")
    add("--repetition-penalty", type=float, metavar="X", help="above 1 makes repeated tokens less likely (default: 1)")
    add("--seed", type=int, metavar="N", help="with --sample, set before each text (default: 0)")
    add("--offloading", action="store_true", help="on a GPU: keep codes in CPU memory, except those of two layers")
    add("--no-stream", action="store_true", help="print only the table, not the text")


def load(args: argparse.Namespace) -> arguments.Run:
    """Import what runs the command."""
    arguments.checked_configs(args)
    from ..generate import run

    return run
