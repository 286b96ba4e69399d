"""`hf-kvquant eval perplexity`: its options."""

from __future__ import annotations

import argparse
from typing import Any

from rich.console import Console

from ..config import PRESETS
from ..evaluation.measuring.fidelity import UNQUANTIZED
from ..evaluation.perplexity.measure import MODES, Options, measure
from ..evaluation.perplexity.results import show
from ..evaluation.perplexity.segments import FIELD, SPLIT, TOKENS, WINDOW, read_source
from ..evaluation.records import RunRecord
from .arguments import (
    add_command,
    add_placement,
    add_preparation,
    add_presets,
    compared_configs,
    load_subject,
    options_of,
)


def add_parser(commands: Any) -> None:
    """Add `perplexity` to the evaluations, the sub-parsers of argparse."""
    parser = add_command(
        commands,
        "perplexity",
        run,
        help="perplexity and divergence on a text",
        description="Perplexity, KL divergence and next-token agreement of presets on a text, against the unquantised "
        "cache in the same run. The run fails if the modes of feeding a text disagree, or if a number was not computed "
        "from codes.",
    )
    add_source(parser)
    add_options(parser)


def add_source(parser: argparse.ArgumentParser) -> None:
    """Add the options that name the text."""
    add = parser.add_argument
    add("--text", metavar="FILE", help="the text to measure, as it is; either this or --dataset")
    add("--rows", action="store_true", help="join the lines of --text by two newlines, as papers do with WikiText")
    add("--dataset", metavar="NAME[:CONFIG]", help="rows of a data set instead, joined by two newlines")
    add("--split", metavar="NAME", help=f"with --dataset (default: {SPLIT})")
    add("--field", metavar="NAME", help=f"field with the text of a row, with --dataset (default: {FIELD})")


def add_amount(parser: argparse.ArgumentParser) -> None:
    """Add the options that say how much of the text is measured."""
    add = parser.add_argument
    add("--window", type=int, metavar="N", help=f"tokens of a window (default: {WINDOW}, or the model's context)")
    add("--stride", type=int, metavar="N", help="tokens from one window to the next (default: the window)")
    add("--tokens", type=int, metavar="N", help=f"score at least N tokens (default: {TOKENS} or all)")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add all options except the model and the text."""
    add_amount(parser)
    add_presets(parser, PRESETS, f"; '{UNQUANTIZED}' is always there")
    add = parser.add_argument
    add(
        "--mode",
        choices=(*MODES, "all"),
        default="chunked",
        help="how the text is fed. simulated: one forward that computes what chunks would; chunked: chunks through the "
        "cache; decode: token by token; all: every mode that the model supports (default: chunked)",
    )
    add("--chunk", type=int, default=32, metavar="N", help="tokens of a chunk (default: 32)")
    add_preparation(parser)
    add("--controls", action="store_true", help="also check that an exact cache scores as exact and a broken one fails")
    add(
        "--details",
        action="store_true",
        help="also quantise one layer at a time, and measure the keys channel by channel",
    )
    add_placement(parser)
    add("--output", metavar="FILE", help="write results as JSON; run again to resume")


def run(args: argparse.Namespace) -> None:
    """Run `hf-kvquant eval perplexity`. Raises what `measure` raises."""
    show(Console(highlight=False), measured(args).to_dict())


def measured(args: argparse.Namespace) -> RunRecord:
    """Measure what the arguments ask for. Raises what `measure` raises."""
    configs = compared_configs(args, "chunk", "window", "stride", "tokens")
    source, text = source_of(args)
    return measure(load_subject(args, configs), source, text, options_of(args, Options), args.output)


def source_of(args: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """`read_source` with the options of `add_source`."""
    return read_source(**{name: getattr(args, name) for name in ("text", "rows", "dataset", "split", "field")})
