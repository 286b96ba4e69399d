"""`hf-kvquant eval tasks`: zero-shot accuracy through lm-eval, each preset paired with the unquantised cache.

Here is decided what is run in which order, what of lm-eval's results is kept, and what is said about them; how a
log-likelihood is computed is in `lm_eval_model.py`, which tasks there are in `task_files.py`, what a difference means
in `paired.py`. A part of the results file is one task under one preset, with a value per item, so that an interrupted
run loses one part and everything can be paired later.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from ..arguments import (
    Refused,
    UsageError,
    add_placement,
    add_presets,
    check_counts,
    checked_device,
    load,
)
from ..config import WINDOWS
from ..generation import UNQUANTIZED
from . import preparation
from .progress import early_end
from .provenance import sha256
from .records import open_record

WHERE = "eval tasks"
COMPARED_PRESETS = (UNQUANTIZED, "int8", "int4")
MODES = ("decode", "simulated")
# Metrics of an item that is right or wrong, the first one being what is compared.
_ACCURACIES = ("acc", "exact_match", "acc_norm")


def add_parser(commands: Any) -> None:
    """Add `tasks` to the evaluations, the sub-parsers of argparse."""
    parser = commands.add_parser(
        "tasks",
        help="zero-shot accuracy through lm-eval, with log-likelihoods that read the quantised cache",
        description="Zero-shot accuracy through lm-eval. Every preset answers the same items as the unquantised cache "
        f"('{UNQUANTIZED}', always run), so that the difference has an error of its own. Without --data, lm-eval's own "
        "tasks run by name, and download their data; with it, the task files of the package read JSON lines. Under "
        "accelerate launch (on CPUs: torchrun), items are spread over processes.",
    )
    parser.add_argument("model", metavar="MODEL", help="a folder or a hub id")
    parser.add_argument(
        "--tasks", nargs="+", metavar="NAME", help="with --data, any of its files by name (default: all that there are)"
    )
    parser.add_argument("--data", metavar="DIR", help="a folder with NAME.jsonl for every task")
    add_presets(parser, COMPARED_PRESETS)
    parser.add_argument(
        "--mode",
        choices=MODES,
        default=MODES[0],
        help="decode: the context but for its last token fills the cache, what follows reads it through the kernels; "
        "simulated: one forward does what that would, without kernels (default: decode)",
    )
    parser.add_argument("--limit", type=int, metavar="N", help="the first N items of each task only")
    parser.add_argument("--batch-size", type=int, default=8, metavar="N", help="texts of a forward (default: 8)")
    preparation.add_options(parser)
    add_placement(parser, "; float32 keeps out the noise of 16-bit sums, which depend on the batch")
    parser.add_argument(
        "--output", metavar="FILE", help="JSON, written after each task and preset; a second run goes on with it"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """`hf-kvquant eval tasks`.

    Raises:
        Interrupted: The text says what was kept.
        Refused: Scores were not those of the quantised cache.
        UsageError: An argument has no meaning or does not fit, data are not there, or memory does not suffice.
    """
    configs = preparation.compared_configs(args, WHERE, COMPARED_PRESETS)
    check_counts(args, ("limit", "batch_size"), WHERE)
    import_lm_eval(is_offline=args.data is not None)
    from .task_files import check_data, checked_names, data_file, load_tasks

    names = checked_names(args.tasks, args.data)
    if args.data is not None:
        check_data(names, args.data)
    tell_one_process()
    device = checked_device(args.device or this_process_device(), WHERE)
    model, tokenizer = load(args.model, args.dtype, device, WHERE)
    if tokenizer.bos_token_id is None and tokenizer.eos_token_id is None:
        raise UsageError(
            f"{WHERE}: `MODEL` must have a tokenizer with a token that begins or ends a text, for lm-eval, got "
            f"{args.model} without. Set bos_token or eos_token in its tokenizer_config.json."
        )
    prepared = preparation.prepare(model, tokenizer, configs, args, WHERE)
    record = open_record(args.output, {**settings(args, model), **prepared}, WHERE)
    tasks = load_tasks(names, args.data)
    hashes = {name: None if args.data is None else sha256(data_file(name, args.data)) for name in tasks}

    from .lm_eval_model import CannotScore, KVQuantLM, NothingRead

    try:
        lm = KVQuantLM(model, tokenizer=tokenizer, mode=args.mode, batch_size=args.batch_size)
    except NotImplementedError as error:
        raise UsageError(f"{WHERE}: {args.model} cannot be evaluated so. {error}") from error
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
        show(Console(highlight=False), parts, title=f"{args.model}, {model.dtype} on {device}".replace("torch.", ""))


def import_lm_eval(*, is_offline: bool) -> None:
    """Import lm-eval, without a look at the network where none is needed, and without its chatter.

    Raises:
        UsageError: It is not installed.
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
    """The GPU of this process under `accelerate launch`, `None` where there is nothing to choose."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and torch.cuda.is_available():
        return f"cuda:{os.environ['LOCAL_RANK']}"
    return None


def tell_one_process() -> None:
    """Say so where `accelerate launch` was asked for several processes on CPUs and has started one, for lack of MPI."""
    is_launched = os.environ.get("ACCELERATE_USE_CPU", "").lower() == "true" and "MASTER_ADDR" in os.environ
    if is_launched and "WORLD_SIZE" not in os.environ:
        print(
            f"{WHERE}: accelerate started one process, not several: without MPI it does on CPUs. Results are the same. "
            "To spread items, start it with torchrun --nproc_per_node N -m hf_kvquant.",
            file=sys.stderr,
        )


def settings(args: argparse.Namespace, model: Any) -> dict[str, Any]:
    """What all results depend on beside the model. Tasks and presets may be added to a file, so they are not here."""
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
        # Presets are not among these, but what they mean is.
        **{name: getattr(args, name) for name in WINDOWS},
    }


def part_name(task: str, preset: str) -> str:
    """How a results file calls one task under one preset."""
    return f"{task}/{preset}"


# --- one task under one preset ----------------------------------------------------------------------------------------


def evaluate(lm: Any, name: str, task: Any, limit: int | None) -> dict[str, Any] | None:
    """Run one task.

    Args:
        lm: The model, in the preset it is to be run with.
        name: Of the task.
        task: lm-eval's object.
        limit: Items at most; `None` takes all.

    Returns:
        What a results file says of it: aggregates, counters, and per item what pairs are made of. `None` where another
        process has it.
    """
    import lm_eval

    started = time.monotonic()
    # Standard errors are computed here from the items: lm-eval's own bootstrap starts a pool of processes.
    results = lm_eval.evaluate(lm, {"tasks": {name: task}, "groups": {}}, limit=limit, bootstrap_iters=0)
    if results is None:
        return None
    samples = results["samples"][name]
    samples = sorted(
        (sample for sample in samples if sample["filter"] == samples[0]["filter"]), key=lambda sample: sample["doc_id"]
    )
    metrics = {
        key.partition(",")[0]: float(value)
        for key, value in results["results"][name].items()
        if key.endswith(f",{samples[0]['filter']}") and "_stderr" not in key and isinstance(value, (int, float))
    }
    items = item_values(task, samples)
    errors = {metric: standard_error(metric, value, items) for metric, value in metrics.items()}
    return {
        "task": name,
        "preset": lm.quant_config.to_dict(),
        "num_items": len(samples),
        "metrics": metrics,
        "standard_errors": errors,
        "pairs_read": lm.pairs_read,
        "pairs_expected": lm.pairs_expected,
        "seconds": round(time.monotonic() - started, 1),
        "items": items,
    }


def item_values(task: Any, samples: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """What is kept per item, each a list over items, as far as the task has it.

    Returns:
        One list per accuracy, 0 or 1; `answer`: the choice taken, or whether the text is the greedy one, or what was
        generated; `gold_log_likelihood`: nats, of the right choice or of the text.
    """
    items: dict[str, list[Any]] = {
        metric: [int(sample[metric]) for sample in samples] for metric in _ACCURACIES if metric in samples[0]["metrics"]
    }
    if task.OUTPUT_TYPE == "multiple_choice":
        scores = [[float(score) for score, _ in sample["filtered_resps"]] for sample in samples]
        items["answer"] = [row.index(max(row)) for row in scores]
        gold = [gold_index(task, sample) for sample in samples]
        if all(index is not None for index in gold):
            items["gold_log_likelihood"] = [
                round(row[index], 6) for row, index in zip(scores, gold, strict=True) if index is not None
            ]
    elif task.OUTPUT_TYPE == "loglikelihood":
        items["answer"] = [int(sample["filtered_resps"][0][1]) for sample in samples]
        items["gold_log_likelihood"] = [round(float(sample["filtered_resps"][0][0]), 6) for sample in samples]
    elif task.OUTPUT_TYPE == "generate_until":
        items["answer"] = [str(sample["filtered_resps"][0]) for sample in samples]
    return items


def gold_index(task: Any, sample: Mapping[str, Any]) -> int | None:
    """The right choice of an item, `None` where there are several."""
    doc = sample["doc"]
    gold = task.doc_to_text(doc) if task.multiple_input else sample["target"]
    if isinstance(gold, str):
        choices = task.doc_to_choice(doc)
        return choices.index(gold) if gold in choices else None
    return gold if isinstance(gold, int) else None


def standard_error(metric: str, value: float, items: Mapping[str, Sequence[Any]]) -> float | None:
    """Of an aggregate over items; `None` where it is not a mean over them, nor a function of one."""
    from .paired import mean_and_error

    if metric in items:
        return mean_and_error(items[metric])[1]
    if metric == "perplexity" and "gold_log_likelihood" in items:
        # exp(-mean): the error of the mean, times the slope.
        error = mean_and_error(items["gold_log_likelihood"])[1]
        return None if error is None else value * error
    return None


# --- what is shown ----------------------------------------------------------------------------------------------------


def show(console: Console, parts: Mapping[tuple[str, str], Mapping[str, Any]], *, title: str) -> None:
    """Print the table of tasks and presets, the averages, and what the columns mean.

    Args:
        console: Where to.
        parts: Results by task and preset.
        title: Of the table.
    """
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE, padding=0)
    table.add_column("preset", no_wrap=True)
    for heading in ("items", "acc, %", "norm, %", "change", "p", "same", "gold"):
        table.add_column(heading, justify="right", no_wrap=True)
    others: list[str] = []
    previous = None
    for (name, preset), part in parts.items():
        if previous != name:
            table.add_section()
            table.add_row(f"[bold]{name}[/]")
        previous = name
        table.add_row(*cells(preset, part, parts.get((name, UNQUANTIZED))))
        spoken = {key: value for key, value in part["metrics"].items() if key not in _ACCURACIES and value is not None}
        if spoken:
            told = ", ".join(f"{key} {spelled(value, part['standard_errors'][key])}" for key, value in spoken.items())
            others.append(f"{name}, {preset}: {told}")
    console.print(table)
    for line in [*others, *averages(parts)]:
        console.print(line, soft_wrap=True)
    console.print(
        "Acc: accuracy, or exact match; norm: with log-likelihoods per character. "
        f"Change: accuracy minus that of '{UNQUANTIZED}' on the same items, in points, with its standard error; p: of "
        "an exact McNemar test. Same: items with the same answer. Gold: mean change of the right answer's "
        "log-likelihood, in nats.",
        style="dim",
    )


def cells(preset: str, part: Mapping[str, Any], reference: Mapping[str, Any] | None) -> list[str]:
    """A row of the table, from the preset on."""
    from .paired import mean_and_error, paired_accuracy

    items, metrics, errors = part["items"], part["metrics"], part["standard_errors"]
    metric = next((name for name in _ACCURACIES if name in items), None)
    row = [preset, str(part["num_items"])]
    for name in (metric, "acc_norm"):
        row.append("-" if name not in metrics else spelled(metrics[name], errors[name], percent=True))
    if reference is None or preset == UNQUANTIZED:
        return [*row, "-", "-", "-", "-"]
    pair = None if metric is None else paired_accuracy(items[metric], reference["items"][metric])
    row.append("-" if pair is None else f"{pair.difference * 100:+.2f} ± {pair.standard_error * 100:.2f}")
    row.append("-" if pair is None else f"{pair.p_value:.2f}")
    answers = zip(items.get("answer", ()), reference["items"].get("answer", ()), strict=True)
    same = [mine == other for mine, other in answers]
    row.append(f"{sum(same) / len(same):.0%}" if same else "-")
    golds = zip(items.get("gold_log_likelihood", ()), reference["items"].get("gold_log_likelihood", ()), strict=True)
    changes = [mine - other for mine, other in golds]
    row.append(f"{mean_and_error(changes)[0]:+.3f}" if changes else "-")
    return row


def averages(parts: Mapping[tuple[str, str], Mapping[str, Any]]) -> list[str]:
    """The average over QServe's five tasks per preset, where all of them ran; else why there is none."""
    from .paired import bootstrap_average
    from .task_files import AVERAGED

    names, presets = (dict.fromkeys(key[place] for key in parts) for place in (0, 1))
    missing = [name for name in AVERAGED if name not in names]
    if missing:
        return [f"No average: it is that of {', '.join(AVERAGED)}, and {', '.join(missing)} did not run."]
    lines = []
    for preset in presets:
        right = {name: parts[name, preset]["items"]["acc"] for name in AVERAGED}
        average, low, high = bootstrap_average(right)
        line = f"average, {preset}: {average:.2%} ({low:.2%} to {high:.2%})"
        if preset != UNQUANTIZED:
            changes = {
                name: [mine - other for mine, other in zip(right[name], reference, strict=True)]
                for name in AVERAGED
                for reference in [parts[name, UNQUANTIZED]["items"]["acc"]]
            }
            change, low, high = (100 * value for value in bootstrap_average(changes))
            line += f", change {change:+.2f} points ({low:+.2f} to {high:+.2f})"
        lines.append(line)
    return [*lines, f"Average: of {', '.join(AVERAGED)}, with 95 % intervals by resampling items within tasks."]


def spelled(value: float, error: float | None, *, percent: bool = False) -> str:
    """A number with its standard error."""
    if percent:
        value, error = 100 * value, None if error is None else 100 * error
    digits = 1 if percent or abs(value) >= 100 else 3
    return f"{value:.{digits}f}" + ("" if error is None else f" ± {error:.{digits}f}")
