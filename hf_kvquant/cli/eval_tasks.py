"""`hf-kvquant eval tasks`: its options."""

from __future__ import annotations

import argparse
from typing import Any

from rich.console import Console

from ..evaluation.measuring.fidelity import UNQUANTIZED
from ..evaluation.tasks.data import MODES, described_fields
from ..evaluation.tasks.measure import Options, measure, ready, tell_one_process, this_process_device
from ..evaluation.tasks.results import show
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
    """Add `tasks` to the evaluations, the sub-parsers of argparse."""
    parser = add_command(
        commands,
        "tasks",
        run,
        help="zero-shot accuracy through lm-eval, with log-likelihoods that read the quantised cache",
        description="Zero-shot accuracy through lm-eval. Every preset answers the same items as the unquantised cache "
        f"('{UNQUANTIZED}', always run), so the difference has its own error bar. Without --data, lm-eval's own tasks "
        "run by name and download their data. With it, the package's own task files read JSON lines. Under accelerate "
        "launch (on CPUs: torchrun), items are spread over processes.",
    )
    add = parser.add_argument
    add("--tasks", nargs="+", metavar="NAME", help="tasks to run (default with --data: all that it has files for)")
    add(
        "--data", metavar="DIR", help=f"a folder with NAME.jsonl for every task, JSON objects with {described_fields()}"
    )
    add_presets(parser, COMPARED_PRESETS)
    add(
        "--mode",
        choices=MODES,
        default=MODES[0],
        help="decode: the context without its last token fills the cache, and all later tokens read it through the "
        "kernels; simulated: one forward computes the same without kernels (default: decode)",
    )
    add("--limit", type=int, metavar="N", help="run only the first N items of each task")
    add("--batch-size", type=int, default=8, metavar="N", help="texts per forward (default: 8)")
    add_preparation(parser)
    add_placement(parser, "; float32 avoids the noise of 16-bit sums, which depend on the batch")
    add("--output", metavar="FILE", help="write results as JSON after each task and preset; run again to resume")


def run(args: argparse.Namespace) -> None:
    """Run `hf-kvquant eval tasks`. Raises what `measure` raises."""
    configs = compared_configs(args, "limit", "batch_size")
    names = ready(args.tasks, args.data)
    tell_one_process()
    subject = load_subject(args, configs, default_device=this_process_device())
    parts = measure(subject, names, options_of(args, Options), args.output)
    if parts is not None:
        title = f"{args.model}, {subject.model.dtype} on {subject.model.device}".replace("torch.", "")
        show(Console(highlight=False), parts, title=title)
