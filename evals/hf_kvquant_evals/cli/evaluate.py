"""`hf-kvquant eval`: the checks before a model is loaded, what is measured, and what is printed.

`report` runs `perplexity` on the model as it is; if all is asked for, also with injected outliers, and `tasks`: each as
its own command would, with a record in the output folder that a second run resumes. If no outliers can be injected into
the model's keys, that part is left out. The page is made from the records alone, without a model, for the first time
after the first window; `--render` does only that.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import AutoConfig, PreTrainedModel

from hf_kvquant.cli import arguments, loading
from hf_kvquant.common.errors import UsageError, did_you_mean, named
from hf_kvquant.config import WINDOWS, KVQuantConfig
from hf_kvquant.jobs.processes import tell_one_process, this_process_device
from hf_kvquant.models.probing import has_bfloat16_matmul

from ..choices import MINUTES, SHORT_TOKENS, SHORT_WINDOW, TESTS
from ..errors import CannotInject
from ..long_context import long_context_run as long_context
from ..perplexity import perplexity_results
from ..perplexity import perplexity_run as perplexity
from ..records import RunRecord
from ..report import page
from ..tasks import data, task_results
from ..tasks import task_run as tasks
from . import options
from .loading import load_subject, source_given

# Of the report. A power of two changes no bit of what the model computes, in any dtype.
OUTLIER_FACTOR = 8.0
# Seconds from one page to the next while windows are measured. A page takes some two seconds.
PAGE_SECONDS = 20.0


def title_of(args: argparse.Namespace, model: PreTrainedModel) -> str:
    """What a table of results is about: the model as the user named it, its dtype and device."""
    return f"{args.model}, {model.dtype} on {model.device}".replace("torch.", "")


# --- perplexity -------------------------------------------------------------------------------------------------------


def run_perplexity(args: argparse.Namespace) -> None:
    """Run `hf-kvquant eval perplexity`."""
    perplexity_results.show(Console(highlight=False), measured(args).to_dict())


def measured(args: argparse.Namespace, more: Mapping[str, KVQuantConfig] | None = None) -> RunRecord:
    """Measure what the arguments of `perplexity` ask for, and more configs, by name."""
    configs = options.compared_configs(args, "chunk", "window", "stride", "tokens", "prompt") | dict(more or {})
    source, text = source_given(args)
    chosen = arguments.given(
        args, "output", "mode", "chunk", "window", "stride", "tokens", "prompt", "controls", "details"
    )
    return perplexity.measure(load_subject(args, configs), source, text, **chosen, **args.limits)


# --- tasks ------------------------------------------------------------------------------------------------------------


def run_tasks(args: argparse.Namespace) -> None:
    """Run `hf-kvquant eval tasks`."""
    configs = options.compared_configs(args, "limit", "batch_size")
    if args.batching and args.mode != data.MODES[0]:
        raise UsageError(f"`--batching` must come with --mode {data.MODES[0]}, got {args.mode}. Leave one out.")
    names = tasks.ready(args.tasks, args.data)
    tell_one_process(tasks.WHERE)
    subject = load_subject(args, configs, default_device=this_process_device())
    chosen = arguments.given(args, "output", "data", "mode", "limit", "batch_size", "batching", *WINDOWS)
    parts = tasks.measure(subject, names, **chosen)
    if parts is not None:
        task_results.show(Console(highlight=False), parts, title=title_of(args, subject.model))


# --- long -------------------------------------------------------------------------------------------------------------


def run_long(args: argparse.Namespace) -> None:
    """Run `hf-kvquant eval long`."""
    configs = options.compared_configs(args, "samples", "batch_size")
    cells = checked_cells(args)
    filler = None if args.filler_file is None else loading.read_text("--filler-file", args.filler_file)
    subject = load_subject(args, configs)
    chosen = arguments.given(args, "output", "samples", "seed", "batch_size", "chat_template")
    record = long_context.measure(subject, cells, filler, **chosen)
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
    with contextlib.suppress(argparse.ArgumentTypeError):
        if (length := options.tokens(word)) > 0:
            return length
    raise UsageError(f"`--lengths` must be numbers of tokens such as 512 or 4k, got '{word}'.")


def _depth(word: str) -> float:
    try:
        depth = float(word)
    except ValueError:
        depth = math.nan
    if not 0 <= depth <= 100:
        raise UsageError(f"`--depths` must be percentages from 0 to 100, got '{word}'.")
    return depth


# --- report -----------------------------------------------------------------------------------------------------------


def run_report(args: argparse.Namespace, defaults_of: Callable[[str, str], dict[str, Any]]) -> None:
    """Run `hf-kvquant eval report`. `defaults_of` has the options of the other evaluations, for a model."""
    options.check_installed("matplotlib", "pictures")
    expected = "a folder or a new one in a folder that is there"
    folder = arguments.checked_output(args.output, expected=expected, is_folder=True)
    kinds: list[str] = []
    if not args.render:
        kinds = [kind for kind in page.FILES if kind not in args.skip] if args.full else [page.PLAIN]
        # Mistakes that would otherwise stop the run hours later.
        arguments.checked_configs(args)
        arguments.check_counts(args, "window", "stride", "tokens", "limit", "batch_size")
        if args.dataset is None:
            with named("eval perplexity"):
                source_given(args)
        if page.TASKS in kinds:
            options.check_installed("lm-eval", "zero-shot tasks", ", or add --skip tasks")
            if args.data is not None:
                with named("eval tasks"):
                    data.check_data(data.AVERAGED, args.data)
        page.read(args.model, folder)
        is_new = not folder.exists()
        folder.mkdir(exist_ok=True)
        try:
            measure_report(args, folder, kinds, defaults_of)
        finally:
            if is_new:
                with contextlib.suppress(OSError):  # not empty: keep it
                    folder.rmdir()
    drawn = page.render(args.model, folder, context=args.context, asked=kinds)
    shown = f"{folder / page.HTML}\n{folder / page.PAGE}, with {', '.join(drawn)}"
    Console(highlight=False).print(shown, soft_wrap=True)


def reported_dtype(args: argparse.Namespace) -> str:
    """The dtype of a report: unless the user names one, float32 where bfloat16 takes several times as long."""
    is_slow = loading.checked_device(args.device).type == "cpu" and not has_bfloat16_matmul()
    if args.dtype != "auto" or not is_slow:
        return str(args.dtype)
    with named("eval report"), loading.loading(args.model, torch.device("cpu")):
        config = AutoConfig.from_pretrained(loading.source_of(args.model))
    if config.dtype != torch.bfloat16 or getattr(config, "quantization_config", None) is not None:
        return str(args.dtype)
    told = (
        "eval report: the model is measured in float32, since bfloat16 is slow on this CPU. --dtype bfloat16 keeps it."
    )
    Console(highlight=False, stderr=True).print(told, soft_wrap=True)
    return "float32"


def measure_report(
    args: argparse.Namespace, folder: Path, kinds: list[str], defaults_of: Callable[[str, str], dict[str, Any]]
) -> None:
    """Run each evaluation as its own command would, into its record."""
    console = Console(highlight=False, stderr=True)
    started = drawn = time.monotonic()
    args.dtype = reported_dtype(args)

    def draw() -> None:
        nonlocal drawn
        if not (folder / page.PAGE).exists() or time.monotonic() - drawn > PAGE_SECONDS:
            page.render(args.model, folder, context=args.context, asked=kinds)
            drawn = time.monotonic()

    minutes = args.minutes or (None if args.full else MINUTES)
    limits: dict[str, Any] = {"until": None if minutes is None else started + 60 * minutes, "on_summary": draw}
    limits |= {} if args.full else {"usual": (SHORT_WINDOW, SHORT_TOKENS)}
    for number, kind in enumerate(kinds, 1):
        file = page.FILES[kind]
        console.print(f"{number} of {len(kinds)}: {file} ({time.monotonic() - started:.0f} s so far)")
        name, run = "perplexity", run_perplexity
        more: dict[str, Any] = {"details": True, "limits": limits}
        if kind == page.OUTLIERS:
            more["inject_outliers"] = OUTLIER_FACTOR
        elif kind == page.TASKS:
            name, run = "tasks", run_tasks
            more = {"tasks": list(data.AVERAGED)}  # whose average the page shows
        options = defaults_of(name, args.model)
        ours = {option: value for option, value in vars(args).items() if option in options}
        kept = {"load": options["load"], "command": options["command"], "output": str(folder / file)}
        try:
            with named(f"eval {name}"):
                run(argparse.Namespace(**{**options, **ours, **more, **kept}))
        except CannotInject as error:
            # The model was still measured as it is, and the page says what is missing.
            console.print(f"{file} is left out. {error}", soft_wrap=True, markup=False)
