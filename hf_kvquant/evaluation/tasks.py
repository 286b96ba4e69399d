"""`hf-kvquant eval tasks`: zero-shot accuracy through lm-eval, each preset compared with the unquantised cache.

This file decides what runs in which order. `lm_eval_model.py` computes log-likelihoods, `task_files.py` knows the
tasks, and `task_results.py` keeps and prints results. A part of the results file is one task under one preset, so an
interrupted run loses at most one part.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from ..config import WINDOWS
from . import preparation
from .arguments import (
    Refused,
    UsageError,
    add_placement,
    add_presets,
    check_counts,
    fitting_configs,
    load_placed,
)
from .counter import NothingRead
from .endings import early_end
from .generation import UNQUANTIZED
from .provenance import sha256
from .records import check_record, open_record
from .task_files import check_data, checked_names, data_file, described_fields, load_tasks
from .task_results import evaluate, part_name, show

WHERE = "eval tasks"
COMPARED_PRESETS = (UNQUANTIZED, "int8", "int4")
MODES = ("decode", "simulated")


def add_parser(commands: Any) -> None:
    """Add `tasks` to the evaluations, the sub-parsers of argparse."""
    parser = commands.add_parser(
        "tasks",
        help="zero-shot accuracy through lm-eval, with log-likelihoods that read the quantised cache",
        description="Zero-shot accuracy through lm-eval. Every preset answers the same items as the unquantised cache "
        f"('{UNQUANTIZED}', always run), so the difference has its own error bar. Without --data, lm-eval's own tasks "
        "run by name and download their data. With it, the package's own task files read JSON lines. Under accelerate "
        "launch (on CPUs: torchrun), items are spread over processes.",
    )
    parser.add_argument("model", metavar="MODEL", help="a folder or a hub id")
    parser.add_argument(
        "--tasks", nargs="+", metavar="NAME", help="tasks to run (default with --data: all that it has files for)"
    )
    parser.add_argument(
        "--data", metavar="DIR", help=f"a folder with NAME.jsonl for every task, JSON objects with {described_fields()}"
    )
    add_presets(parser, COMPARED_PRESETS)
    parser.add_argument(
        "--mode",
        choices=MODES,
        default=MODES[0],
        help="decode: the context without its last token fills the cache, and all later tokens read it through the "
        "kernels; simulated: one forward computes the same without kernels (default: decode)",
    )
    parser.add_argument("--limit", type=int, metavar="N", help="run only the first N items of each task")
    parser.add_argument("--batch-size", type=int, default=8, metavar="N", help="texts per forward (default: 8)")
    preparation.add_options(parser)
    add_placement(parser, "; float32 avoids the noise of 16-bit sums, which depend on the batch")
    parser.add_argument(
        "--output", metavar="FILE", help="write results as JSON after each task and preset; run again to resume"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Run `hf-kvquant eval tasks`.

    Raises:
        Interrupted: Ctrl-C; the message says what was kept.
        Refused: Scores were not those of the quantised cache.
        UsageError: An argument is invalid, data are missing, or memory ran out.
    """
    configs = preparation.compared_configs(args, WHERE)
    check_record(args.output, WHERE)
    check_counts(args, ("limit", "batch_size"), WHERE)
    import_lm_eval(is_offline=args.data is not None)
    names = checked_names(args.tasks, args.data)
    if args.data is not None:
        check_data(names, args.data)
    tell_one_process()
    model, tokenizer = load_placed(args, WHERE, default_device=this_process_device())
    configs = fitting_configs(model, args, configs, WHERE)
    if tokenizer.bos_token_id is None and tokenizer.eos_token_id is None:
        raise UsageError(
            f"{WHERE}: `MODEL` must have a tokenizer with a token that begins or ends a text, for lm-eval, got "
            f"{args.model} without. Set bos_token or eos_token in its tokenizer_config.json."
        )
    prepared = preparation.prepare(model, tokenizer, args, WHERE)
    record = open_record(args.output, {**settings(args, model), **prepared}, WHERE)
    tasks = load_tasks(names, args.data)
    hashes = {name: None if args.data is None else sha256(data_file(name, args.data)) for name in tasks}

    from .lm_eval_model import CannotScore, KVQuantLM

    try:
        lm = KVQuantLM(model, tokenizer=tokenizer, mode=args.mode, batch_size=args.batch_size)
    except NotImplementedError as error:
        raise UsageError(f"{WHERE}: {args.model} cannot be evaluated in this mode. {error}") from error
    console = Console(highlight=False, quiet=lm.rank != 0, stderr=True)
    total, started = len(tasks) * len(configs), time.monotonic()
    with early_end(record, WHERE, lower="--batch-size", value=args.batch_size) as ongoing:
        for number, (name, preset) in enumerate(itertools.product(tasks, configs), 1):
            done = record.get(part_name(name, preset))
            if done is not None:
                if done["data_sha256"] != hashes[name]:
                    raise UsageError(
                        f"{WHERE}: `--output` {args.output} must hold results on the same data, got other data for "
                        f"{name}. Name another file."
                    )
                continue
            ongoing.part = f"part {number} of {total} ({name}, {preset})"
            console.print(f"{number} of {total}: {name}, {preset} ({time.monotonic() - started:.0f} s so far)")
            lm.use(configs[preset])
            try:
                result = evaluate(lm, name, tasks[name], args.limit)
            except NothingRead as error:
                raise Refused(f"{WHERE}: {name}, {preset}: {error} {record.kept()}") from error
            except CannotScore as error:
                raise UsageError(f"{WHERE}: `--tasks` {name} does not fit {args.model}. {error}") from error
            if result is not None:
                record.put(part_name(name, preset), {**result, "data_sha256": hashes[name]})
    if lm.rank == 0:
        parts = {
            (name, preset): part
            for name in tasks
            for preset in configs
            if (part := record.get(part_name(name, preset))) is not None
        }
        title = f"{args.model}, {model.dtype} on {model.device}".replace("torch.", "")
        show(Console(highlight=False), parts, title=title)


def import_lm_eval(*, is_offline: bool) -> None:
    """Import lm-eval, with its logs and progress bars silenced.

    Args:
        is_offline: Whether to tell the Hugging Face libraries not to use the network.

    Raises:
        UsageError: lm-eval is not installed.
    """
    if is_offline:
        os.environ["HF_HUB_OFFLINE"] = os.environ["HF_DATASETS_OFFLINE"] = "1"
    try:
        import datasets
        import lm_eval  # noqa: F401
    except ImportError as error:
        raise UsageError(
            f"{WHERE}: lm-eval must be installed, got: {error}. Install it: pip install 'hf-kvquant[eval]'."
        ) from error
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    datasets.disable_progress_bars()


def this_process_device() -> str | None:
    """The GPU of this process under `accelerate launch`; `None` for a single process or without GPUs."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and torch.cuda.is_available():
        return f"cuda:{os.environ['LOCAL_RANK']}"
    return None


def tell_one_process() -> None:
    """Say on stderr that `accelerate launch` was to start several processes on CPUs but, without MPI, started one."""
    is_launched = os.environ.get("ACCELERATE_USE_CPU", "").lower() == "true" and "MASTER_ADDR" in os.environ
    if is_launched and "WORLD_SIZE" not in os.environ:
        print(
            f"{WHERE}: accelerate started one process, not several: on CPUs it needs MPI for that. Results are the "
            "same. To spread items, start it with torchrun --nproc_per_node N -m hf_kvquant.",
            file=sys.stderr,
        )


def settings(args: argparse.Namespace, model: Any) -> dict[str, Any]:
    """What all results depend on besides the model. Not tasks and presets: a later run may add some to the file."""
    import lm_eval

    folder = Path(args.model).expanduser()
    return {
        "evaluation": "tasks",
        "lm_eval": lm_eval.__version__,
        "revision": getattr(model.config, "_commit_hash", None),
        "weights_sha256": {path.name: sha256(path) for path in sorted(folder.glob("*.safetensors"))},
        "mode": args.mode,
        "limit": args.limit,
        "is_offline": args.data is not None,
        # They change what every preset means.
        **{name: getattr(args, name) for name in WINDOWS},
    }
