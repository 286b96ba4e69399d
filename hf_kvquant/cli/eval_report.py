"""`hf-kvquant eval report`: runs the whole suite on one model and writes a page with pictures.

Runs `eval perplexity` on the model as it is and with injected outliers, then `eval tasks`, each as its own command
would, with a record in the output folder that a second run resumes. If no outliers can be injected into the model's
keys, that part is left out. The page is made from the records alone, without a model; `--render` does only that.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from ..config import PRESETS
from ..evaluation.errors import UsageError, named
from ..evaluation.preparation import CannotInject
from ..evaluation.report import page
from ..evaluation.tasks.data import AVERAGED, check_data
from . import eval_perplexity, eval_tasks
from .arguments import add_command, add_placement, add_presets, check_counts, checked_configs, checked_output

# A power of two changes no bit of what the model computes, in any dtype.
OUTLIER_FACTOR = 8.0
# Items of each task. If 8 % of the answers change, as on the reference model under int4, the change of the average over
# five tasks has a standard error of some 0.9 points. Halving it would take four times as long.
LIMIT = 200
SKIPPABLE = (page.OUTLIERS, page.TASKS)


def add_parser(commands: Any) -> None:
    """Add `report` to the evaluations, the sub-parsers of argparse."""
    parser = add_command(
        commands,
        "report",
        run,
        help="the whole suite, as one page with pictures",
        description="Measure divergence and perplexity of all presets, on the model as it is and with injected "
        "outliers, by position in the text and by layer, then zero-shot tasks. Writes a folder with a page in HTML and "
        "in Markdown, pictures and the records. Run the same command again to resume.",
    )
    add = parser.add_argument
    add("--output", required=True, metavar="DIR", help="folder for the page, its pictures and the records")
    add("--render", action="store_true", help="only make page and pictures from the records in DIR; measure nothing")
    add("--skip", action="append", choices=SKIPPABLE, help="leave out an evaluation; repeatable")
    add_presets(parser, PRESETS)
    eval_perplexity.add_source(parser)
    eval_perplexity.add_amount(parser)
    add("--data", metavar="DIR", help="folder with JSON lines of the tasks (default: lm-eval downloads its own)")
    add("--limit", type=int, default=LIMIT, metavar="N", help=f"the first N items of each task (default: {LIMIT})")
    add("--batch-size", type=int, default=8, metavar="N", help="texts per forward of the tasks (default: 8)")
    add_placement(parser)


def run(args: argparse.Namespace) -> None:
    """Run `hf-kvquant eval report`."""
    check_installed("matplotlib", "pictures")
    folder = checked_output(args.output, expected="a folder or a new one in a folder that is there", is_folder=True)
    if not args.render:
        steps = {kind: name for kind, name in page.FILES.items() if kind not in (args.skip or ())}
        check(args, steps)
        page.read(args.model, folder)
        is_new = not folder.exists()
        folder.mkdir(exist_ok=True)
        try:
            measure(args, folder, steps)
        finally:
            if is_new:
                with contextlib.suppress(OSError):  # not empty: keep it
                    folder.rmdir()
    drawn = page.render(args.model, folder)
    shown = f"{folder / page.HTML}\n{folder / page.PAGE}, with {', '.join(drawn)}"
    Console(highlight=False).print(shown, soft_wrap=True)


def measure(args: argparse.Namespace, folder: Path, steps: dict[str, str]) -> None:
    """Run the evaluations, each into its record."""
    console = Console(highlight=False, stderr=True)
    started = time.monotonic()
    for number, (kind, name) in enumerate(steps.items(), 1):
        console.print(f"{number} of {len(steps)}: {name} ({time.monotonic() - started:.0f} s so far)")
        try:
            evaluate(args, kind, folder / name)
        except CannotInject as error:
            # The model was still measured as it is, and the page says what is missing.
            console.print(f"{name} is left out. {error}", soft_wrap=True, markup=False)


def check(args: argparse.Namespace, steps: dict[str, str]) -> None:
    """Refuse mistakes at once that would otherwise stop the run hours later."""
    checked_configs(args)
    check_counts(args, "window", "stride", "tokens", "limit", "batch_size")
    if args.dataset is None:
        with named("eval perplexity"):
            eval_perplexity.source_of(args)
    if page.TASKS not in steps:
        return
    check_installed("lm-eval", "zero-shot tasks", ", or add --skip tasks")
    if args.data is not None:
        with named("eval tasks"):
            check_data(AVERAGED, args.data)


def check_installed(package: str, purpose: str, more: str = "") -> None:
    """Refuse a run that would end for lack of an optional package. `more` says what else the user can do."""
    if importlib.util.find_spec(package.replace("-", "_")) is None:
        raise UsageError(
            f"{package} must be installed for {purpose}, got no such package. Install it: pip install "
            f"'hf-kvquant[eval]'{more}."
        )


def evaluate(args: argparse.Namespace, kind: str, path: Path) -> None:
    """Run one evaluation as its own command would, and keep its results in a record."""
    module, name = (eval_tasks, "tasks") if kind == page.TASKS else (eval_perplexity, "perplexity")
    parser = argparse.ArgumentParser(prog="hf-kvquant eval")
    module.add_parser(parser.add_subparsers())
    options = vars(parser.parse_args([name, args.model]))
    given = {option: value for option, value in vars(args).items() if option in options}
    options |= given | {"run": options["run"], "command": options["command"], "output": str(path)}
    if kind == page.TASKS:
        options.update(tasks=list(AVERAGED))  # whose average the page shows
    else:
        options.update(details=True, inject_outliers=OUTLIER_FACTOR if kind == page.OUTLIERS else None)
    with named(f"eval {name}"):
        module.run(argparse.Namespace(**options))
