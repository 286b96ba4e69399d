"""`hf-kvquant eval report`: runs the whole suite on one model and writes a page with pictures.

Runs `eval perplexity` on the model as it is and with injected outliers, then `eval tasks`. Each keeps its own record in
the output folder and resumes it, so an interrupted report can be resumed too. If no outliers can be injected into the
model's keys, that part is left out. This file decides which evaluations run and with which defaults. `page.py` writes
the page from the records alone, without a model; `--render` does only that.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from ..common.output import written
from ..config import PRESETS
from . import page, perplexity, pictures, plots, preparation, tasks, windows
from .arguments import UsageError, add_placement, add_presets, check_counts, checked_configs, checked_output
from .html import page_as_html
from .provenance import model_name
from .records import read_record
from .task_files import AVERAGED, check_data

WHERE = "eval report"
FILES = {page.PLAIN: "perplexity.json", page.OUTLIERS: "perplexity_outliers.json", page.TASKS: "tasks.json"}
PAGE, HTML = "report.md", "report.html"
# A power of two changes no bit of what the model computes, in any dtype.
OUTLIER_FACTOR = 8.0
# Items of each task. If 8 % of the answers change, as on the reference model under int4, the change of the average over
# five tasks has a standard error of some 0.9 points. Halving it would take four times as long.
LIMIT = 200
SKIPPABLE = (page.OUTLIERS, page.TASKS)


def add_parser(commands: Any) -> None:
    """Add `report` to the evaluations, the sub-parsers of argparse."""
    parser = commands.add_parser(
        "report",
        help="the whole suite, as one page with pictures",
        description="Measure divergence and perplexity of all presets, on the model as it is and with injected "
        "outliers, by position in the text and by layer, then zero-shot tasks. Writes a folder with a page in HTML and "
        "in Markdown, pictures and the records. Run the same command again to resume.",
    )
    parser.add_argument("model", metavar="MODEL", help="a folder or a hub id")
    parser.add_argument(
        "--output", required=True, metavar="DIR", help="folder for the page, its pictures and the records"
    )
    parser.add_argument(
        "--render", action="store_true", help="only make page and pictures from the records in DIR; measure nothing"
    )
    parser.add_argument("--skip", action="append", choices=SKIPPABLE, help="leave out an evaluation; repeatable")
    add_presets(parser, PRESETS)
    windows.add_source(parser)
    windows.add_options(parser)
    parser.add_argument(
        "--data", metavar="DIR", help="folder with JSON lines of the tasks (default: lm-eval downloads its own)"
    )
    parser.add_argument(
        "--limit", type=int, default=LIMIT, metavar="N", help=f"the first N items of each task (default: {LIMIT})"
    )
    parser.add_argument(
        "--batch-size", type=int, default=8, metavar="N", help="texts per forward of the tasks (default: 8)"
    )
    add_placement(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Run `hf-kvquant eval report`.

    Raises:
        Interrupted: Ctrl-C; the message says what was kept.
        Refused: An evaluation failed one of its own checks.
        UsageError: An argument is invalid, a package is missing, or the folder holds something else.
    """
    plots.check_matplotlib(WHERE)
    folder = checked_output(
        args.output, WHERE, expected="a folder or a new one in a folder that is there", is_folder=True
    )
    if args.render:
        render(args.model, folder)
        return
    steps = {kind: name for kind, name in FILES.items() if kind not in (args.skip or ())}
    check(args, steps)
    check_same_model(args.model, read(folder))
    is_new = not folder.exists()
    folder.mkdir(exist_ok=True)
    try:
        measure(args, folder, steps)
    finally:
        if is_new:
            with contextlib.suppress(OSError):  # not empty: keep it
                folder.rmdir()
    render(args.model, folder)


def measure(args: argparse.Namespace, folder: Path, steps: dict[str, str]) -> None:
    """Run the evaluations, each into its record."""
    console = Console(highlight=False, stderr=True)
    started = time.monotonic()
    for number, (kind, name) in enumerate(steps.items(), 1):
        console.print(f"{number} of {len(steps)}: {name} ({time.monotonic() - started:.0f} s so far)")
        try:
            evaluate(args, kind, folder / name)
        except preparation.CannotInject as error:
            # The model was still measured as it is, and the page says what is missing.
            console.print(f"{name} is left out. {error}", soft_wrap=True, markup=False)


def check(args: argparse.Namespace, steps: dict[str, str]) -> None:
    """Refuse mistakes at once that would otherwise stop the run hours later.

    Raises:
        UsageError: An argument is invalid, or lm-eval or task files are missing.
    """
    checked_configs(args, WHERE)
    check_counts(args, ("window", "stride", "tokens", "limit", "batch_size"), WHERE)
    if args.dataset is None:
        windows.read_source(args)
    if page.TASKS not in steps:
        return
    if importlib.util.find_spec("lm_eval") is None:
        raise UsageError(
            f"{WHERE}: lm-eval must be installed for zero-shot tasks, got no such package. Install it: pip install "
            "'hf-kvquant[eval]', or add --skip tasks."
        )
    if args.data is not None:
        check_data(AVERAGED, args.data)


def evaluate(args: argparse.Namespace, kind: str, path: Path) -> None:
    """Run one evaluation as its own command would, and keep its results in a record."""
    module, name = (tasks, "tasks") if kind == page.TASKS else (perplexity, "perplexity")
    parser = argparse.ArgumentParser(prog=WHERE)
    module.add_parser(parser.add_subparsers())
    options = vars(parser.parse_args([name, args.model]))
    options.update({option: value for option, value in vars(args).items() if option in options}, output=str(path))
    if kind == page.TASKS:
        options.update(tasks=list(AVERAGED))  # whose average the page shows
    else:
        options.update(details=True, inject_outliers=OUTLIER_FACTOR if kind == page.OUTLIERS else None)
    module.run(argparse.Namespace(**options))


# --- from records alone -----------------------------------------------------------------------------------------------


def read(folder: Path) -> dict[str, dict[str, Any]]:
    """The records in a folder, by kind.

    Raises:
        UsageError: A file is not a record.
    """
    try:
        return {kind: read_record(folder / name) for kind, name in FILES.items() if (folder / name).exists()}
    except ValueError as error:
        raise UsageError(f"{WHERE}: `--output` must hold nothing but records under these names. {error}") from error


def check_same_model(model: str, records: dict[str, dict[str, Any]]) -> None:
    """Refuse a folder with records of another model.

    Raises:
        UsageError: A record is of another model.
    """
    name = model_name(model)
    for kind, record in records.items():
        found = record["settings"].get("model")
        if found != name:
            raise UsageError(
                f"{WHERE}: `--output` must hold records of {name}, got {FILES[kind]} of {found}. Name another folder."
            )


def render(model: str, folder: Path) -> None:
    """Make the page and its pictures from the records in a folder.

    Raises:
        UsageError: No record of `eval perplexity` is finished, or one is of another model.
    """
    records = read(folder)
    check_same_model(model, records)
    texts = page.of_texts(records)
    if not texts:
        found = ", ".join(FILES[kind] for kind in records) or "none"
        raise UsageError(
            f"{WHERE}: `--output` must hold a finished {FILES[page.PLAIN]} or {FILES[page.OUTLIERS]}, got {folder} "
            f"with records: {found}. Run without --render first."
        )
    try:
        with tempfile.TemporaryDirectory(prefix=".", dir=folder) as name:
            drafts = Path(name)
            drawn = pictures.draw(texts, drafts)
            text = page.page(records, FILES, drawn)
            (drafts / PAGE).write_text(text, encoding="utf-8")
            (drafts / HTML).write_text(page_as_html(text, drafts), encoding="utf-8")
            for each in (*drawn, PAGE, HTML):
                with written(folder / each) as path:
                    (drafts / each).replace(path)
    except OSError as error:
        raise UsageError(
            f"{WHERE}: `--output` must have room for the page, got {folder}: {error}. Make room, then run the same "
            "command again."
        ) from error
    Console(highlight=False).print(f"{folder / HTML}\n{folder / PAGE}, with {', '.join(drawn)}", soft_wrap=True)
