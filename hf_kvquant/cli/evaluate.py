"""`hf-kvquant eval`: the options of its evaluations, the checks before a model is loaded, and what is printed.

`report` runs `perplexity` on the model as it is and with injected outliers, then `tasks`, each as its own command
would, with a record in the output folder that a second run resumes. If no outliers can be injected into the model's
keys, that part is left out. The page is made from the records alone, without a model; `--render` does only that.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import math
import re
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from transformers import PreTrainedModel

from ..common.errors import did_you_mean
from ..config import PRESETS, WINDOWS
from ..evaluation.errors import UsageError, named
from ..evaluation.long_context import measure as long_context
from ..evaluation.long_context.prompts import TESTS
from ..evaluation.measuring.fidelity import UNQUANTIZED
from ..evaluation.perplexity import measure as perplexity
from ..evaluation.perplexity import results as perplexity_results
from ..evaluation.perplexity.segments import TOKENS, WINDOW
from ..evaluation.preparation import CannotInject, read_text
from ..evaluation.records import RunRecord
from ..evaluation.report import page
from ..evaluation.tasks import data
from ..evaluation.tasks import measure as tasks
from ..evaluation.tasks import results as task_results
from . import arguments
from .evaluate_recipes import add_recipes

# Of the report. A power of two changes no bit of what the model computes, in any dtype.
OUTLIER_FACTOR = 8.0
# Items of each task in the report. If 8 % of the answers change, as on the reference model under int4, the change of
# the average over five tasks has a standard error of some 0.9 points. Halving it would take four times as long.
LIMIT = 200


def add_parser(commands: Any) -> None:
    """Add `eval` and its evaluations to the commands, the sub-parsers of argparse."""
    evaluate = commands.add_parser(
        "eval",
        help="measure what presets cost in quality",
        description="Measure what presets cost in quality, against the unquantised cache in the same run.",
    )
    evaluations = evaluate.add_subparsers(required=True, metavar="EVALUATION")
    for add in (add_perplexity, add_tasks, add_long, add_recipes, add_report):
        add(evaluations)


def title_of(args: argparse.Namespace, model: PreTrainedModel) -> str:
    """What a table of results is about: the model as the user named it, its dtype and device."""
    return f"{args.model}, {model.dtype} on {model.device}".replace("torch.", "")


# --- perplexity -------------------------------------------------------------------------------------------------------


def add_perplexity(evaluations: Any) -> None:
    """Add `perplexity` to the evaluations."""
    parser = arguments.add_command(
        evaluations,
        "perplexity",
        run_perplexity,
        help="perplexity and divergence on a text",
        description="Perplexity, KL divergence and next-token agreement of presets on a text, against the unquantised "
        "cache in the same run. The run fails if the modes of feeding a text disagree, or if a number was not computed "
        "from codes.",
    )
    arguments.add_source(parser)
    add_perplexity_options(parser)


def add_amount(parser: argparse.ArgumentParser) -> None:
    """Add the options that say how much of the text is measured."""
    add = parser.add_argument
    add("--window", type=int, metavar="N", help=f"tokens of a window (default: {WINDOW}, or the model's context)")
    add("--stride", type=int, metavar="N", help="tokens from one window to the next (default: the window)")
    add("--tokens", type=int, metavar="N", help=f"score at least N tokens (default: {TOKENS} or all)")


def add_perplexity_options(parser: argparse.ArgumentParser) -> None:
    """Add all options of `perplexity` except the model and the text."""
    add_amount(parser)
    arguments.add_presets(parser, PRESETS, f"; '{UNQUANTIZED}' is always there")
    add = parser.add_argument
    add(
        "--mode",
        choices=(*perplexity.MODES, "all"),
        default="chunked",
        help="how the text is fed. simulated: one forward that computes what chunks would; chunked: chunks through the "
        "cache; decode: token by token; all: every mode that the model supports (default: chunked)",
    )
    add("--chunk", type=int, default=32, metavar="N", help="tokens of a chunk (default: 32)")
    arguments.add_preparation(parser)
    add("--controls", action="store_true", help="also check that an exact cache scores as exact and a broken one fails")
    detailed = "also quantise one layer at a time, and measure the keys channel by channel"
    add("--details", action="store_true", help=detailed)
    arguments.add_placement(parser)
    add("--output", metavar="FILE", help="write results as JSON; run again to resume")


def run_perplexity(args: argparse.Namespace) -> None:
    """Run `hf-kvquant eval perplexity`."""
    perplexity_results.show(Console(highlight=False), measured(args).to_dict())


def measured(args: argparse.Namespace) -> RunRecord:
    """Measure what the arguments of `perplexity` ask for."""
    configs = arguments.compared_configs(args, "chunk", "window", "stride", "tokens")
    source, text = arguments.source_of(args)
    options = arguments.given(args, "output", "mode", "chunk", "window", "stride", "tokens", "controls", "details")
    return perplexity.measure(arguments.load_subject(args, configs), source, text, **options)


# --- tasks ------------------------------------------------------------------------------------------------------------


def add_tasks(evaluations: Any) -> None:
    """Add `tasks` to the evaluations."""
    parser = arguments.add_command(
        evaluations,
        "tasks",
        run_tasks,
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
    arguments.add_preparation(parser)
    arguments.add_placement(parser, "; float32 avoids the noise of 16-bit sums, which depend on the batch")
    add("--output", metavar="FILE", help="write results as JSON after each task and preset; run again to resume")


def run_tasks(args: argparse.Namespace) -> None:
    """Run `hf-kvquant eval tasks`."""
    configs = arguments.compared_configs(args, "limit", "batch_size")
    if args.batching and args.mode != data.MODES[0]:
        raise UsageError(f"`--batching` must come with --mode {data.MODES[0]}, got {args.mode}. Leave one out.")
    names = tasks.ready(args.tasks, args.data)
    tasks.tell_one_process()
    subject = arguments.load_subject(args, configs, default_device=tasks.this_process_device())
    options = arguments.given(args, "output", "data", "mode", "limit", "batch_size", "batching", *WINDOWS)
    parts = tasks.measure(subject, names, **options)
    if parts is not None:
        task_results.show(Console(highlight=False), parts, title=title_of(args, subject.model))


# --- long -------------------------------------------------------------------------------------------------------------


def add_long(evaluations: Any) -> None:
    """Add `long` to the evaluations."""
    parser = arguments.add_command(
        evaluations,
        "long",
        run_long,
        help="find things in long contexts",
        description="Hide numbers in long contexts and ask for them, under each preset: a pass key in sentences that "
        "repeat themselves (passkey), a sentence in text that does not (needle), one of a list of keys (recall). "
        f"Accuracy counts only where the unquantised cache finds {long_context.MIN_ACCURACY:.0%} of the numbers; the "
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
    arguments.add_preparation(parser)
    arguments.add_placement(parser)


def run_long(args: argparse.Namespace) -> None:
    """Run `hf-kvquant eval long`."""
    configs = arguments.compared_configs(args, "samples", "batch_size")
    cells = checked_cells(args)
    filler = None if args.filler_file is None else read_text("--filler-file", args.filler_file)
    subject = arguments.load_subject(args, configs)
    options = arguments.given(args, "output", "samples", "seed", "batch_size", "chat_template")
    record = long_context.measure(subject, cells, filler, **options)
    long_context.show(Console(highlight=False), record, cells, title=title_of(args, subject.model))


def checked_cells(args: argparse.Namespace) -> list[long_context.Cell]:
    """All combinations of `--tests`, `--lengths` and `--depths`."""

    def words(name: str) -> list[str]:
        text = getattr(args, name)
        found = [word.strip() for word in text.split(",") if word.strip()]
        if not found:
            raise UsageError(f"`--{name}` must name something, got '{text}'. Separate words by commas.")
        return found

    for test in words("tests"):
        if test not in TESTS:
            raise UsageError(f"`--tests` must be of {', '.join(TESTS)}, got '{test}'.{did_you_mean(test, TESTS)}")
    lengths, depths = list(map(_length, words("lengths"))), list(map(_depth, words("depths")))
    cells = itertools.product(words("tests"), lengths, depths)
    return list(dict.fromkeys(long_context.Cell(*cell) for cell in cells))


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


# --- report -----------------------------------------------------------------------------------------------------------


def add_report(evaluations: Any) -> None:
    """Add `report` to the evaluations."""
    parser = arguments.add_command(
        evaluations,
        "report",
        run_report,
        help="the whole suite, as one page with pictures",
        description="Measure divergence and perplexity of all presets, on the model as it is and with injected "
        "outliers, by position in the text and by layer, then zero-shot tasks. Writes a folder with a page in HTML and "
        "in Markdown, pictures and the records. Run the same command again to resume.",
    )
    add = parser.add_argument
    add("--output", required=True, metavar="DIR", help="folder for the page, its pictures and the records")
    add("--render", action="store_true", help="only make page and pictures from the records in DIR; measure nothing")
    skippable = (page.OUTLIERS, page.TASKS)
    add("--skip", action="append", choices=skippable, default=[], help="leave out an evaluation; repeatable")
    arguments.add_presets(parser, PRESETS)
    arguments.add_source(parser)
    add_amount(parser)
    add("--data", metavar="DIR", help="folder with JSON lines of the tasks (default: lm-eval downloads its own)")
    add("--limit", type=int, default=LIMIT, metavar="N", help=f"the first N items of each task (default: {LIMIT})")
    add("--batch-size", type=int, default=8, metavar="N", help="texts per forward of the tasks (default: 8)")
    arguments.add_placement(parser)


def run_report(args: argparse.Namespace) -> None:
    """Run `hf-kvquant eval report`."""
    arguments.check_installed("matplotlib", "pictures")
    expected = "a folder or a new one in a folder that is there"
    folder = arguments.checked_output(args.output, expected=expected, is_folder=True)
    if not args.render:
        kinds = [kind for kind in page.FILES if kind not in args.skip]
        # Mistakes that would otherwise stop the run hours later.
        arguments.checked_configs(args)
        arguments.check_counts(args, "window", "stride", "tokens", "limit", "batch_size")
        if args.dataset is None:
            with named("eval perplexity"):
                arguments.source_of(args)
        if page.TASKS in kinds:
            arguments.check_installed("lm-eval", "zero-shot tasks", ", or add --skip tasks")
            if args.data is not None:
                with named("eval tasks"):
                    data.check_data(data.AVERAGED, args.data)
        page.read(args.model, folder)
        is_new = not folder.exists()
        folder.mkdir(exist_ok=True)
        try:
            measure_report(args, folder, kinds)
        finally:
            if is_new:
                with contextlib.suppress(OSError):  # not empty: keep it
                    folder.rmdir()
    drawn = page.render(args.model, folder)
    shown = f"{folder / page.HTML}\n{folder / page.PAGE}, with {', '.join(drawn)}"
    Console(highlight=False).print(shown, soft_wrap=True)


def measure_report(args: argparse.Namespace, folder: Path, kinds: list[str]) -> None:
    """Run each evaluation as its own command would, into its record."""
    console = Console(highlight=False, stderr=True)
    started = time.monotonic()
    for number, kind in enumerate(kinds, 1):
        file = page.FILES[kind]
        console.print(f"{number} of {len(kinds)}: {file} ({time.monotonic() - started:.0f} s so far)")
        name = "perplexity"
        more: dict[str, Any] = {"details": True}
        if kind == page.OUTLIERS:
            more["inject_outliers"] = OUTLIER_FACTOR
        elif kind == page.TASKS:
            name, more = "tasks", {"tasks": list(data.AVERAGED)}  # whose average the page shows
        parser = argparse.ArgumentParser(prog="hf-kvquant")
        add_parser(parser.add_subparsers())
        options = vars(parser.parse_args(["eval", name, args.model]))
        ours = {option: value for option, value in vars(args).items() if option in options}
        kept = {"run": options["run"], "command": options["command"], "output": str(folder / file)}
        try:
            with named(f"eval {name}"):
                options["run"](argparse.Namespace(**{**options, **ours, **more, **kept}))
        except CannotInject as error:
            # The model was still measured as it is, and the page says what is missing.
            console.print(f"{file} is left out. {error}", soft_wrap=True, markup=False)
