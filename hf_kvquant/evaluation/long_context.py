"""`hf-kvquant eval long`: can a model still find something in a long text when its cache is quantised?

This file decides which prompts are asked, and when results are refused. `prompts.py` writes the prompts,
`long_scores.py` asks the model, and `long_results.py` keeps and prints the results.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from transformers import PreTrainedModel

from ..common.errors import did_you_mean
from ..common.progress import show_progress
from ..config import KVQuantConfig
from ..models.text_config import context_of
from . import preparation
from .arguments import (
    Refused,
    UsageError,
    add_placement,
    add_presets,
    check_counts,
    fitting_configs,
    load_placed,
    read_text,
)
from .counter import check_pairs
from .endings import early_end
from .generation import UNQUANTIZED
from .long_results import MIN_ACCURACY, Cell, joined, show, summarize
from .long_scores import Scores, score
from .prompts import TESTS, Prompt, PromptError, Writer
from .records import RunRecord, check_record, open_record

WHERE = "eval long"
DEFAULT_PRESETS = (UNQUANTIZED, "int8", "int4")
SUMMARY = "summary"


def add_parser(commands: Any) -> None:
    """Add `long` to the evaluations, the sub-parsers of argparse."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "long",
        help="find things in long contexts",
        description="Hide numbers in long contexts and ask for them, under each preset: a pass key in sentences that "
        "repeat themselves (passkey), a sentence in text that does not (needle), one of a list of keys (recall). "
        f"Accuracy counts only where the unquantised cache finds {MIN_ACCURACY:.0%} of the numbers; the log-likelihood "
        "of the right answer is compared everywhere.",
    )
    parser.add_argument("model", metavar="MODEL", help="a folder or a hub id")
    add_presets(parser, DEFAULT_PRESETS, f"; '{UNQUANTIZED}' is always there")
    parser.add_argument(
        "--tests", default=",".join(TESTS), metavar="LIST", help=f"some of {', '.join(TESTS)} (default: all)"
    )
    parser.add_argument(
        "--lengths",
        default="1k,4k",
        metavar="LIST",
        help="tokens of context, question and answer; 1k is 1024 (default: 1k,4k)",
    )
    parser.add_argument(
        "--depths",
        default="0,25,50,75,100",
        metavar="LIST",
        help="hidden at these percentages of the context (default: 0,25,50,75,100)",
    )
    parser.add_argument("--samples", type=int, default=10, metavar="N", help="prompts per cell (default: 10)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of all prompts (default: 0)")
    parser.add_argument("--batch-size", type=int, default=8, metavar="N", help="prompts at a time (default: 8)")
    parser.add_argument(
        "--filler-file", metavar="FILE", help="text for needle and recall (default: sentences from a few words)"
    )
    parser.add_argument(
        "--chat-template", action="store_true", help="wrap prompts with the tokenizer's chat template, for chat models"
    )
    parser.add_argument("--output", metavar="FILE", help="write results as JSON after each cell; run again to resume")
    preparation.add_options(parser)
    add_placement(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Run `hf-kvquant eval long`.

    Raises:
        Interrupted: Ctrl-C; the message says what was kept.
        Refused: A number was not computed from codes, or a log-likelihood is not finite.
        UsageError: An argument is invalid, does not fit the model or the record, or needs too much memory.
    """
    configs = preparation.compared_configs(args, WHERE)
    check_record(args.output, WHERE)
    cells = checked_cells(args)
    filler = checked_filler(args.filler_file)
    model, tokenizer = load_placed(args, WHERE)
    configs = fitting_configs(model, args, configs, WHERE)
    check_context(model, args.model, cells)
    try:
        writer = Writer(tokenizer, filler, seed=args.seed, is_chat=args.chat_template)
    except PromptError as error:
        raise UsageError(f"{WHERE}: {error}") from error
    for cell in cells:
        written(writer, cell, 0)
    prepared = preparation.prepare(model, tokenizer, args, WHERE)
    settings = {
        "evaluation": "long",
        **prepared,
        "presets": {name: config.to_dict() for name, config in configs.items()},
        "samples": args.samples,
        "seed": args.seed,
        "chat_template": None if not args.chat_template else digest(str(tokenizer.chat_template)),
        "filler": None if filler is None else digest(filler),
    }
    record = open_record(args.output, settings, WHERE)
    summary = measure(model, writer, cells, configs, record, num_samples=args.samples, batch_size=args.batch_size)
    show(Console(highlight=False), record, cells, summary, title=f"{args.model}, {settings['dtype']} on {model.device}")


def measure(
    model: PreTrainedModel,
    writer: Writer,
    cells: Sequence[Cell],
    configs: Mapping[str, KVQuantConfig],
    record: RunRecord,
    *,
    num_samples: int,
    batch_size: int,
) -> dict[str, Any]:
    """Fill the record with the cells that it does not have yet and with a summary of all; return the summary."""
    missing = [cell for cell in cells if record.get(cell.part) is None]
    ending = early_end(record, WHERE, lower="--batch-size", value=batch_size, more=", or ask for shorter --lengths")
    num_tokens = num_samples * sum(cell.length for cell in missing)
    with ending as ongoing, show_progress(WHERE, num_tokens, unit="token") as tell:
        for number, cell in enumerate(missing, len(cells) - len(missing) + 1):
            what = f"{cell.test} {cell.length:,} at {cell.depth:g} %"
            ongoing.part = f"cell {number} of {len(cells)} ({what})"
            tell(doing=what)
            parts = []
            for start in range(0, num_samples, batch_size):
                samples = range(start, min(start + batch_size, num_samples))
                prompts = [written(writer, cell, sample) for sample in samples]
                parts.append(checked_scores(model, prompts, configs))
                tell(len(prompts) * cell.length)
            record.put(cell.part, {name: joined([part[name] for part in parts]) for name in configs})
        ongoing.part = "the summary"
        summary = summarize(record, cells, configs)
        record.put(SUMMARY, summary)
    return summary


def written(writer: Writer, cell: Cell, sample: int) -> Prompt:
    """One prompt of a cell.

    Raises:
        UsageError: It cannot be written with these arguments.
    """
    try:
        return writer.prompt(cell.test, cell.length, cell.depth, sample)
    except PromptError as error:
        raise UsageError(f"{WHERE}: {error}") from error


def checked_scores(
    model: PreTrainedModel, prompts: Sequence[Prompt], configs: Mapping[str, KVQuantConfig]
) -> dict[str, Scores]:
    """`score`, with its results checked.

    Raises:
        Refused: A number was not computed from codes, or a log-likelihood is not finite.
    """
    results = score(model, prompts, configs)
    for name, scores in results.items():
        check_pairs(f"{WHERE}: preset {name}", scores)
        if not all(map(math.isfinite, scores.log_likelihood)):
            raise Refused(
                f"{WHERE}: preset {name} must give finite log-likelihoods, got {scores.log_likelihood}. "
                "Use --dtype float32 or bfloat16."
            )
    return results


# --- arguments --------------------------------------------------------------------------------------------------------


def checked_cells(args: argparse.Namespace) -> list[Cell]:
    """All combinations of `--tests`, `--lengths` and `--depths`."""
    check_counts(args, ("samples", "batch_size"), WHERE)
    tests = _words(args.tests, "tests")
    for test in tests:
        if test not in TESTS:
            raise UsageError(
                f"{WHERE}: `--tests` must be of {', '.join(TESTS)}, got '{test}'.{did_you_mean(test, TESTS)}"
            )
    lengths = [_length(word) for word in _words(args.lengths, "lengths")]
    depths = [_depth(word) for word in _words(args.depths, "depths")]
    return list(dict.fromkeys(Cell(test, length, depth) for test in tests for length in lengths for depth in depths))


def checked_filler(name: str | None) -> str | None:
    """The text of `--filler-file`."""
    if name is None:
        return None
    text = read_text(name, f"{WHERE}: `--filler-file`")
    if not text.strip():
        raise UsageError(
            f"{WHERE}: `--filler-file` {name} must hold text, got nothing but white space. Name another file."
        )
    return text


def _words(text: str, option: str) -> list[str]:
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words:
        raise UsageError(f"{WHERE}: `--{option}` must name something, got '{text}'. Separate words by commas.")
    return words


def _length(word: str) -> int:
    match = re.fullmatch(r"([1-9]\d*)(k?)", word.lower())
    if match is None:
        raise UsageError(f"{WHERE}: `--lengths` must be numbers of tokens such as 512 or 4k, got '{word}'.")
    return int(match[1]) * (1024 if match[2] else 1)


def _depth(word: str) -> float:
    try:
        depth = float(word)
    except ValueError:
        depth = math.nan
    if not 0 <= depth <= 100:
        raise UsageError(f"{WHERE}: `--depths` must be percentages from 0 to 100, got '{word}'.")
    return depth


def check_context(model: PreTrainedModel, name: str, cells: Sequence[Cell]) -> None:
    """Refuse lengths beyond the positions of the model."""
    context = context_of(model)
    longest = max(cell.length for cell in cells)
    if context is not None and longest > context:
        raise UsageError(
            f"{WHERE}: `--lengths` must be at most {context:,}, the positions of {name}, got {longest:,}. "
            "Leave longer ones out."
        )


def digest(text: str) -> str:
    """The SHA-256 of a text, hexadecimal."""
    return hashlib.sha256(text.encode()).hexdigest()
