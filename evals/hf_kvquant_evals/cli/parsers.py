"""The options of `hf-kvquant eval` and its evaluations."""

from __future__ import annotations

import argparse
import functools
from typing import Any

from hf_kvquant.cli import arguments
from hf_kvquant.common.errors import UsageError
from hf_kvquant.config import PRESETS
from hf_kvquant.presets import UNQUANTIZED

from ..choices import (
    CONTEXT,
    FEEDING_MODES,
    MIN_ACCURACY,
    MINUTES,
    OUTLIERS,
    REPORTED_PRESETS,
    SHORT_TOKENS,
    SHORT_WINDOW,
    TASKS,
    TESTS,
    TOKENS,
    WINDOW,
)
from ..tasks import data
from . import options
from .recipe_parser import add_recipes

# Items of each task in the report. If 8 % of the answers change, as on the reference model under int4, the change of
# the average over five tasks has a standard error of some 0.9 points. Halving it would take four times as long.
LIMIT = 200


def add_evaluations(evaluate: argparse.ArgumentParser) -> None:
    """Add the evaluations to the parser of `eval`."""
    evaluate.description = "Measure what presets cost in quality, against the unquantised cache in the same run."
    evaluations = evaluate.add_subparsers(required=True, metavar="EVALUATION")
    for add in (add_perplexity, add_tasks, add_long, add_recipes, add_report):
        add(evaluations)


# --- perplexity -------------------------------------------------------------------------------------------------------


def add_perplexity(evaluations: Any) -> None:
    """Add `perplexity` to the evaluations."""
    parser = arguments.add_command(
        evaluations,
        "perplexity",
        load_perplexity,
        help="perplexity and divergence on a text",
        description="Perplexity, KL divergence and next-token agreement of presets on a text, against the unquantised "
        "cache in the same run. The run fails if the modes of feeding a text disagree, or if a number was not computed "
        "from codes.",
    )
    options.add_source(parser)
    add_perplexity_options(parser)
    parser.set_defaults(limits={})  # a report sets limits


def add_amount(parser: argparse.ArgumentParser, usual: tuple[int, int] = (WINDOW, TOKENS)) -> None:
    """Add the options that say how much of the text is measured, by default windows and tokens as `usual`."""
    add = parser.add_argument
    add("--window", type=int, metavar="N", help=f"tokens of a window (default: {usual[0]}, or the model's context)")
    add("--stride", type=int, metavar="N", help="tokens from one window to the next (default: the window)")
    add("--tokens", type=int, metavar="N", help=f"score at least N tokens (default: {usual[1]} or all)")


def add_perplexity_options(parser: argparse.ArgumentParser) -> None:
    """Add all options of `perplexity` except the model and the text."""
    add_amount(parser)
    arguments.add_presets(parser, PRESETS, f"; '{UNQUANTIZED}' is always there")
    add = parser.add_argument
    add(
        "--mode",
        choices=(*FEEDING_MODES, "all"),
        default="chunked",
        help="how the text is fed. simulated: one forward that computes what chunks would; chunked: chunks through the "
        "cache; decode: token by token; all: every mode that the model supports (default: chunked)",
    )
    add("--chunk", type=int, default=32, metavar="N", help="tokens of a chunk (default: 32)")
    options.add_prompt(parser)
    options.add_preparation(parser)
    add("--controls", action="store_true", help="also check that an exact cache scores as exact and a broken one fails")
    detailed = "also quantise one layer at a time, and measure the keys channel by channel"
    add("--details", action="store_true", help=detailed)
    arguments.add_placement(parser)
    add("--output", metavar="FILE", help="write results as JSON; run again to resume")


def load_perplexity(args: argparse.Namespace) -> arguments.Run:
    """Import what runs `perplexity`."""
    arguments.checked_configs(args)
    from .evaluate import run_perplexity

    return run_perplexity


# --- tasks ------------------------------------------------------------------------------------------------------------


def add_tasks(evaluations: Any) -> None:
    """Add `tasks` to the evaluations."""
    parser = arguments.add_command(
        evaluations,
        "tasks",
        load_tasks,
        help="zero-shot accuracy through lm-eval, with log-likelihoods that read the quantised cache",
        description="Zero-shot accuracy through lm-eval. Every preset answers the same items as the unquantised cache "
        f"('{UNQUANTIZED}', always run), so the difference has its own error bar. Without --data, lm-eval's own tasks "
        "run by name and download their data. With it, the package's own task files read JSON lines. Under accelerate "
        "launch (on CPUs: torchrun), items are spread over processes.",
    )
    add = parser.add_argument
    add("--tasks", nargs="+", metavar="NAME", help="tasks to run (default with --data: all that it has files for)")
    fields = data.described_fields()
    add("--data", metavar="DIR", help=f"a folder with NAME.jsonl for every task, JSON objects with {fields}")
    arguments.add_presets(parser, arguments.COMPARED_PRESETS)
    add(
        "--mode",
        choices=data.MODES,
        default=data.MODES[0],
        help="decode: the context without its last token fills the cache, and all later tokens read it through the "
        "kernels; simulated: one forward computes the same without kernels (default: decode)",
    )
    add("--limit", type=int, metavar="N", help="run only the first N items of each task")
    add("--batch-size", type=int, default=8, metavar="N", help="texts per forward (default: 8)")
    batching = "feed texts without padding and generate by continuous batching, over pages of codes: the same scores"
    add("--batching", action="store_true", help=f"{batching}, sooner; with it, a text of --batch-size has 128 tokens")
    options.add_preparation(parser)
    arguments.add_placement(parser, "; float32 avoids the noise of 16-bit sums, which depend on the batch")
    add("--output", metavar="FILE", help="write results as JSON after each task and preset; run again to resume")


def load_tasks(args: argparse.Namespace) -> arguments.Run:
    """Import what runs `tasks`."""
    arguments.checked_configs(args)
    from .evaluate import run_tasks

    return run_tasks


# --- long -------------------------------------------------------------------------------------------------------------


def add_long(evaluations: Any) -> None:
    """Add `long` to the evaluations."""
    parser = arguments.add_command(
        evaluations,
        "long",
        load_long,
        help="find things in long contexts",
        description="Hide numbers in long contexts and ask for them, under each preset: a pass key in sentences that "
        "repeat themselves (passkey), a sentence in text that does not (needle), one of a list of keys (recall). "
        f"Accuracy counts only where the unquantised cache finds {MIN_ACCURACY:.0%} of the numbers; the "
        "log-likelihood of the right answer is compared everywhere.",
    )
    add = parser.add_argument
    arguments.add_presets(parser, arguments.COMPARED_PRESETS, f"; '{UNQUANTIZED}' is always there")
    add("--tests", default=",".join(TESTS), metavar="LIST", help=f"some of {', '.join(TESTS)} (default: all)")
    lengths = "tokens of context, question and answer; 1k is 1024 (default: 1k,4k)"
    add("--lengths", default="1k,4k", metavar="LIST", help=lengths)
    depths = "hidden at these percentages of the context (default: 0,25,50,75,100)"
    add("--depths", default="0,25,50,75,100", metavar="LIST", help=depths)
    add("--samples", type=int, default=10, metavar="N", help="prompts per cell (default: 10)")
    add("--seed", type=int, default=0, metavar="N", help="seed of all prompts (default: 0)")
    add("--batch-size", type=int, default=8, metavar="N", help="prompts at a time (default: 8)")
    add("--filler-file", metavar="FILE", help="text for needle and recall (default: sentences from a few words)")
    add("--chat-template", action="store_true", help="wrap prompts with the tokenizer's chat template, for chat models")
    add("--output", metavar="FILE", help="write results as JSON after each cell; run again to resume")
    options.add_preparation(parser)
    arguments.add_placement(parser)


def load_long(args: argparse.Namespace) -> arguments.Run:
    """Import what runs `long`."""
    arguments.checked_configs(args)
    from .evaluate import run_long

    return run_long


# --- report -----------------------------------------------------------------------------------------------------------


def add_report(evaluations: Any) -> None:
    """Add `report` to the evaluations."""
    parser = arguments.add_command(
        evaluations,
        "report",
        load_report,
        help="the whole suite, as one page with pictures",
        description=f"Measure divergence and perplexity of a few presets on short windows, in {MINUTES:g} minutes. "
        "The page is there after the first window. --full measures all presets on windows of "
        f"{WINDOW} tokens, also with injected outliers, and zero-shot tasks, which takes hours on a CPU. Writes a "
        "folder with a page in HTML and in Markdown, pictures and the records. Run the same command again to resume.",
    )
    add = parser.add_argument
    add("--output", required=True, metavar="DIR", help="folder for the page, its pictures and the records")
    add("--render", action="store_true", help="only make page and pictures from the records in DIR; measure nothing")
    add("--full", action="store_true", help="measure everything: all presets, long windows, outliers and tasks")
    limit = f"leave out what would take longer (default: {MINUTES:g}; with --full, no limit)"
    add("--minutes", type=float, metavar="N", help=limit)
    skipped = "with --full, leave out an evaluation; repeatable"
    add("--skip", action="append", choices=(OUTLIERS, TASKS), default=[], help=skipped)
    context = f"tell the memory of a text of N tokens; 1k is 1024 (default: {CONTEXT})"
    add("--context", type=options.tokens, default=CONTEXT, metavar="N", help=context)
    arguments.add_presets(parser, REPORTED_PRESETS, "; with --full, all")
    options.add_source(parser)
    add_amount(parser, (SHORT_WINDOW, SHORT_TOKENS))
    add("--data", metavar="DIR", help="with --full, JSON lines of the tasks (default: lm-eval downloads its own)")
    add("--limit", type=int, default=LIMIT, metavar="N", help=f"the first N items of each task (default: {LIMIT})")
    add("--batch-size", type=int, default=8, metavar="N", help="texts per forward of the tasks (default: 8)")
    arguments.add_placement(parser)


def load_report(args: argparse.Namespace) -> arguments.Run:
    """Import what runs `report`."""
    if args.full and not args.preset:
        args.default_presets = tuple(PRESETS)
    if args.data is not None and not args.full:
        raise UsageError("`--data` must come with --full, got it without. Add --full, or leave it out.")
    if args.minutes is not None and not args.minutes > 0:
        raise UsageError(f"`--minutes` must be above 0, got {args.minutes:g}.")
    arguments.check_counts(args, "context")
    arguments.checked_configs(args)
    from .evaluate import run_report

    return functools.partial(run_report, defaults_of=defaults_of)


def defaults_of(evaluation: str, model: str) -> dict[str, Any]:
    """What the options of an evaluation are if none is given."""
    parser = argparse.ArgumentParser(prog="hf-kvquant eval")
    add_evaluations(parser)
    return vars(parser.parse_args([evaluation, model]))
