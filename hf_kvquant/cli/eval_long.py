"""`hf-kvquant eval long`: its options."""

from __future__ import annotations

import argparse
import math
import re
from typing import Any

from rich.console import Console

from ..common.errors import did_you_mean
from ..evaluation.errors import UsageError
from ..evaluation.long_context.measure import Options, measure
from ..evaluation.long_context.prompts import TESTS
from ..evaluation.long_context.results import MIN_ACCURACY, SUMMARY, Cell, show
from ..evaluation.measuring.fidelity import UNQUANTIZED
from ..evaluation.preparation import read_text
from .arguments import (
    COMPARED_PRESETS,
    add_command,
    add_placement,
    add_preparation,
    add_presets,
    compared_configs,
    load_subject,
    options_of,
)


def add_parser(commands: Any) -> None:
    """Add `long` to the evaluations, the sub-parsers of argparse."""
    parser = add_command(
        commands,
        "long",
        run,
        help="find things in long contexts",
        description="Hide numbers in long contexts and ask for them, under each preset: a pass key in sentences that "
        "repeat themselves (passkey), a sentence in text that does not (needle), one of a list of keys (recall). "
        f"Accuracy counts only where the unquantised cache finds {MIN_ACCURACY:.0%} of the numbers; the log-likelihood "
        "of the right answer is compared everywhere.",
    )
    add = parser.add_argument
    add_presets(parser, COMPARED_PRESETS, f"; '{UNQUANTIZED}' is always there")
    add("--tests", default=",".join(TESTS), metavar="LIST", help=f"some of {', '.join(TESTS)} (default: all)")
    add(
        "--lengths",
        default="1k,4k",
        metavar="LIST",
        help="tokens of context, question and answer; 1k is 1024 (default: 1k,4k)",
    )
    add(
        "--depths",
        default="0,25,50,75,100",
        metavar="LIST",
        help="hidden at these percentages of the context (default: 0,25,50,75,100)",
    )
    add("--samples", type=int, default=10, metavar="N", help="prompts per cell (default: 10)")
    add("--seed", type=int, default=0, metavar="N", help="seed of all prompts (default: 0)")
    add("--batch-size", type=int, default=8, metavar="N", help="prompts at a time (default: 8)")
    add("--filler-file", metavar="FILE", help="text for needle and recall (default: sentences from a few words)")
    add("--chat-template", action="store_true", help="wrap prompts with the tokenizer's chat template, for chat models")
    add("--output", metavar="FILE", help="write results as JSON after each cell; run again to resume")
    add_preparation(parser)
    add_placement(parser)


def run(args: argparse.Namespace) -> None:
    """Run `hf-kvquant eval long`. Raises what `measure` raises."""
    configs = compared_configs(args, "samples", "batch_size")
    cells = checked_cells(args)
    filler = None if args.filler_file is None else read_text("--filler-file", args.filler_file)
    options = options_of(args, Options)
    subject = load_subject(args, configs)
    record = measure(subject, cells, filler, options, args.output)
    title = f"{args.model}, {subject.settings['dtype']} on {subject.model.device}"
    show(Console(highlight=False), record, cells, record.get(SUMMARY) or {}, title=title)


def checked_cells(args: argparse.Namespace) -> list[Cell]:
    """All combinations of `--tests`, `--lengths` and `--depths`."""
    tests = _words(args.tests, "tests")
    for test in tests:
        if test not in TESTS:
            raise UsageError(f"`--tests` must be of {', '.join(TESTS)}, got '{test}'.{did_you_mean(test, TESTS)}")
    lengths = [_length(word) for word in _words(args.lengths, "lengths")]
    depths = [_depth(word) for word in _words(args.depths, "depths")]
    return list(dict.fromkeys(Cell(test, length, depth) for test in tests for length in lengths for depth in depths))


def _words(text: str, name: str) -> list[str]:
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words:
        raise UsageError(f"`--{name}` must name something, got '{text}'. Separate words by commas.")
    return words


def _length(word: str) -> int:
    match = re.fullmatch(r"([1-9]\d*)(k?)", word.lower())
    if match is None:
        raise UsageError(f"`--lengths` must be numbers of tokens such as 512 or 4k, got '{word}'.")
    return int(match[1]) * (1024 if match[2] else 1)


def _depth(word: str) -> float:
    try:
        depth = float(word)
    except ValueError:
        depth = math.nan
    if not 0 <= depth <= 100:
        raise UsageError(f"`--depths` must be percentages from 0 to 100, got '{word}'.")
    return depth
