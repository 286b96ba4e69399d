"""`hf-kvquant eval long`: can a model still find things in a long text whose keys and values are codes?

A context is the first chunk of a cache, which is exact by design; so the question goes in as a second chunk, and the
answer token by token, as `generate` decodes it. All of these read codes, which is counted. The right answer is fed
whatever the model would say: up to its first mistake that is what greedy decoding feeds, so that an answer is right
where each of its tokens was the most likely one; and its log-likelihood tells presets apart on models that are never
right. A preset is scored only where the unquantised cache finds nine of ten. What is asked is `prompts.py`'s.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import inspect
import math
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from .._errors import did_you_mean
from ..arguments import (
    DTYPES,
    Refused,
    UsageError,
    add_presets,
    checked_configs,
    checked_device,
    load,
    read_text,
)
from ..cache import KVQuantCache, KVQuantLayer
from ..config import KVQuantConfig
from ..fidelity import PairCounter
from ..generation import UNQUANTIZED
from ..patching import patched
from ..simulation import expected_pairs
from ..transforms.of_model import key_transforms
from . import preparation
from .prompts import NUM_ANSWERS, TESTS, Prompt, PromptError, Writer
from .provenance import place
from .records import RunRecord, early_end, open_record

WHERE = "eval long"
DEFAULT_PRESETS = (UNQUANTIZED, "int8", "int4")
# A preset is scored where the unquantised cache gets this share of answers right. What a model cannot do anyway says
# nothing about its cache, and a preset that is right there by chance would look better than it is.
MIN_ACCURACY = 0.9
SUMMARY = "summary"


@dataclasses.dataclass(frozen=True)
class Scores:
    """What one config makes of some prompts.

    Attributes:
        correct: Per prompt, whether greedy decoding gives the answer.
        log_likelihood: Per prompt, of the whole answer behind the question, nats.
        pairs_read: (Query, token) pairs that were served from codes, or from what stays dense beside them (of
            `int4-channel`, tokens of the unfinished block), summed over layers.
        pairs_expected: What that number is where every quantised layer is read as codes.
    """

    correct: list[bool]
    log_likelihood: list[float]
    pairs_read: int
    pairs_expected: int


@torch.inference_mode()
def score(model: PreTrainedModel, prompts: Sequence[Prompt], configs: Mapping[str, KVQuantConfig]) -> dict[str, Scores]:
    """Ask a model all prompts at once, through one cache per config.

    The contexts are read once: all caches keep the same keys and values of a first chunk, each in its own way.

    Args:
        model: Any model that `patch` accepts, patched or not; left as it was.
        prompts: Of the same shape.
        configs: By name.

    Returns:
        One result per name.
    """
    context, question, answer = (
        torch.stack([getattr(prompt, part) for prompt in prompts]).to(model.device)
        for part in ("context", "question", "answer")
    )
    results = {}
    with patched(model, UNQUANTIZED):
        read = DynamicCache(config=model.config)
        _last_logits(model, context, read)
        for name, config in configs.items():
            cache = KVQuantCache(model.config, config, key_transforms=key_transforms(model, config))
            if all(isinstance(layer, KVQuantLayer) and not layer.is_sliding for layer in cache.layers):
                for index, layer in enumerate(read.layers):
                    assert isinstance(layer, DynamicLayer) and layer.keys is not None and layer.values is not None
                    cache.update(layer.keys, layer.values, index)
            else:  # what other layers keep is not all that they were given
                _last_logits(model, context, cache)
            with PairCounter() as counter:
                correct, log_likelihood = ask(model, question, answer, cache)
            fed = context.shape[1] + question.shape[1] + answer.shape[1] - 1
            results[name] = Scores(
                correct=correct.tolist(),
                log_likelihood=log_likelihood.tolist(),
                pairs_read=counter.pairs,
                pairs_expected=len(prompts) * expected_pairs(cache, fed, context.shape[1]),
            )
    return results


@torch.inference_mode()
def ask(model: PreTrainedModel, question: Tensor, answer: Tensor, cache: Cache) -> tuple[Tensor, Tensor]:
    """Feed a question and its answer to a cache that holds a context.

    Args:
        model: Patched where `cache` is ours.
        question: `[batch, tokens]` int64, one chunk.
        answer: `[batch, tokens]` int64, fed token by token; the last one is only predicted.
        cache: Holds the contexts; advances.

    Returns:
        correct: `[batch]` bool: whether every token of the answer was the most likely one.
        log_likelihood: `[batch]` float32: of the answer, nats.
    """
    correct = torch.ones(len(answer), dtype=torch.bool, device=answer.device)
    log_likelihood = torch.zeros(len(answer), device=answer.device)
    for index, chunk in enumerate((question, *answer[:, :-1].split(1, dim=1))):
        log_probs = _last_logits(model, chunk, cache).float().log_softmax(-1)
        token = answer[:, index]
        correct &= log_probs.argmax(-1) == token
        log_likelihood += log_probs.gather(1, token[:, None])[:, 0]
    return correct, log_likelihood


def _last_logits(model: PreTrainedModel, ids: Tensor, cache: Cache) -> Tensor:
    """Logits behind a chunk, `[batch, vocab_size]`."""
    # Those of a whole context may be larger than its keys and values.
    takes_count = "logits_to_keep" in inspect.signature(model.forward).parameters
    options = {"logits_to_keep": 1} if takes_count else {}
    logits: Tensor = model(input_ids=ids, past_key_values=cache, use_cache=True, **options).logits
    return logits[:, -1]


# --- the command ------------------------------------------------------------------------------------------------------


def add_parser(commands: Any) -> None:
    """Add `long` to the evaluations, the sub-parsers of argparse."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "long",
        help="find things in long contexts",
        description="Hide numbers in long contexts and ask for them, under each preset: a pass key in sentences that "
        "repeat themselves (passkey), a sentence in text that does not (needle), one of a list of keys (recall). "
        f"Presets are scored where the unquantised cache finds {MIN_ACCURACY:.0%}; the log-likelihood of the right "
        "answer is compared everywhere.",
    )
    parser.add_argument("model", metavar="MODEL", help="a folder or a hub id")
    add_presets(parser, DEFAULT_PRESETS, f"; '{UNQUANTIZED}' is always there")
    parser.add_argument(
        "--tests", default=",".join(TESTS), metavar="LIST", help=f"of {', '.join(TESTS)} (default: all)"
    )
    parser.add_argument(
        "--lengths",
        default="1k,4k",
        metavar="LIST",
        help="tokens of context, question and answer; 1k is 1024 (default: 1k,4k)",
    )
    parser.add_argument(
        "--depths", default="0,25,50,75,100", metavar="LIST", help="of the needle, percent (default: 0,25,50,75,100)"
    )
    parser.add_argument("--samples", type=int, default=10, metavar="N", help="prompts of a cell (default: 10)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of all prompts (default: 0)")
    parser.add_argument("--batch-size", type=int, default=8, metavar="N", help="prompts at a time (default: 8)")
    parser.add_argument(
        "--filler-file", metavar="FILE", help="text for needle and recall (default: sentences from a few words)"
    )
    parser.add_argument(
        "--chat-template", action="store_true", help="wrap prompts with the tokenizer's chat template, for chat models"
    )
    parser.add_argument("--output", metavar="FILE", help="JSON, written cell by cell; a second run resumes it")
    preparation.add_options(parser)
    parser.add_argument("--dtype", choices=DTYPES, default="auto", help="of the model (default: the checkpoint's)")
    parser.add_argument("--device", metavar="NAME", help="such as cpu or cuda:0 (default: cuda where there is a GPU)")
    parser.set_defaults(run=run)


@dataclasses.dataclass(frozen=True)
class Cell:
    """One test at one length and depth."""

    test: str
    length: int
    depth: float

    @property
    def part(self) -> str:
        """Its name in a record."""
        return f"{self.test}/{self.length}/{self.depth:g}"


def run(args: argparse.Namespace) -> None:
    """`hf-kvquant eval long`.

    Raises:
        Interrupted: The text says what was kept.
        Refused: A preset was not read as codes.
        UsageError: An argument has no meaning, or does not fit the model, the record or memory.
    """
    configs = checked_configs(args, WHERE, DEFAULT_PRESETS)
    configs = {UNQUANTIZED: KVQuantConfig.from_preset(UNQUANTIZED), **configs}
    cells = checked_cells(args)
    filler = checked_filler(args.filler_file)
    device = checked_device(args.device, WHERE)
    model, tokenizer = load(args.model, args.dtype, device, WHERE)
    check_context(model, args.model, cells)
    try:
        writer = Writer(tokenizer, filler, seed=args.seed, is_chat=args.chat_template)
    except PromptError as error:
        raise UsageError(f"{WHERE}: {error}") from error
    for cell in cells:
        written(writer, cell, 0)
    prepared = preparation.prepare(model, tokenizer, args, WHERE)
    try:
        for config in configs.values():
            with patched(model, config):
                pass
    except (NotImplementedError, TypeError, ValueError) as error:
        raise UsageError(f"{WHERE}: {args.model} cannot be evaluated so. {error}") from error
    path = Path(args.model).expanduser()
    settings = {
        "evaluation": "long",
        "model": place(path) if path.exists() else args.model,
        "weights": fingerprint(model),
        "dtype": str(model.dtype).removeprefix("torch."),
        "presets": {name: config.to_dict() for name, config in configs.items()},
        "samples": args.samples,
        "seed": args.seed,
        "chat_template": None if not args.chat_template else digest(str(tokenizer.chat_template)),
        "filler": None if filler is None else digest(filler),
        **prepared,
    }
    record = open_record(args.output, settings, WHERE)
    measure(model, writer, cells, configs, record, num_samples=args.samples, batch_size=args.batch_size)
    summary = summarize(record, cells, configs)
    record.put(SUMMARY, summary)
    show(Console(highlight=False), record, cells, summary, title=f"{args.model}, {settings['dtype']} on {device}")


def measure(
    model: PreTrainedModel,
    writer: Writer,
    cells: Sequence[Cell],
    configs: Mapping[str, KVQuantConfig],
    record: RunRecord,
    *,
    num_samples: int,
    batch_size: int,
) -> None:
    """Fill the record with all cells that it does not have."""
    missing = [cell for cell in cells if record.get(cell.part) is None]
    console = Console(stderr=True)
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:.0f} %"),
        TimeElapsedColumn(),
        TextColumn("left:"),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    ending = early_end(record, WHERE, lower="--batch-size", value=batch_size, more=", or ask for shorter --lengths")
    with ending as ongoing, progress:
        bar = progress.add_task("", total=num_samples * sum(cell.length for cell in missing))
        for number, cell in enumerate(missing, len(cells) - len(missing) + 1):
            what = f"{cell.test} {cell.length:,} at {cell.depth:g} %"
            ongoing.part = f"cell {number} of {len(cells)} ({what})"
            progress.update(bar, description=what)
            parts = []
            for start in range(0, num_samples, batch_size):
                samples = range(start, min(start + batch_size, num_samples))
                prompts = [written(writer, cell, sample) for sample in samples]
                parts.append(checked_scores(model, prompts, configs))
                progress.advance(bar, len(prompts) * cell.length)
            record.put(cell.part, {name: _joined([part[name] for part in parts]) for name in configs})


def written(writer: Writer, cell: Cell, sample: int) -> Prompt:
    """One prompt of a cell."""
    try:
        return writer.prompt(cell.test, cell.length, cell.depth, sample)
    except PromptError as error:
        raise UsageError(f"{WHERE}: {error}") from error


def checked_scores(
    model: PreTrainedModel, prompts: Sequence[Prompt], configs: Mapping[str, KVQuantConfig]
) -> dict[str, Scores]:
    """`score`, refused where its numbers would mean nothing.

    Raises:
        Refused: Quantised layers were not read as codes, or log-likelihoods are no numbers.
    """
    results = score(model, prompts, configs)
    for name, scores in results.items():
        # Layers that attend to the keys and values of another one read its codes too, so that more may be read.
        if scores.pairs_read < scores.pairs_expected:
            raise Refused(
                f"{WHERE}: preset {name} must read {scores.pairs_expected:,} (query, token) pairs from codes, got "
                f"{scores.pairs_read:,}: the model attends to dequantised tensors, for the reason in the log above, "
                "and the numbers would not be those of the kernels. Use another model."
            )
        if not all(map(math.isfinite, scores.log_likelihood)):
            raise Refused(
                f"{WHERE}: preset {name} must give finite log-likelihoods, got {scores.log_likelihood}. "
                "Use --dtype float32 or bfloat16."
            )
    return results


def _joined(parts: Sequence[Scores]) -> dict[str, Any]:
    """Batches of one cell, as a record holds them."""
    return {
        "correct": [value for part in parts for value in part.correct],
        "log_likelihood": [value for part in parts for value in part.log_likelihood],
        "pairs_read": sum(part.pairs_read for part in parts),
        "pairs_expected": sum(part.pairs_expected for part in parts),
    }


# --- arguments --------------------------------------------------------------------------------------------------------


def checked_cells(args: argparse.Namespace) -> list[Cell]:
    """All combinations of `--tests`, `--lengths` and `--depths`."""
    for option in ("samples", "batch_size"):
        if getattr(args, option) < 1:
            name = option.replace("_", "-")
            raise UsageError(f"{WHERE}: `--{name}` must be at least 1, got {getattr(args, option)}.")
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
    """Refuse lengths that the model was not made for."""
    context = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    longest = max(cell.length for cell in cells)
    if isinstance(context, int) and longest > context:
        raise UsageError(
            f"{WHERE}: `--lengths` must be at most {context:,}, the positions of {name}, got {longest:,}. "
            "Leave longer ones out."
        )


def digest(text: str) -> str:
    """The SHA-256 of a text, hexadecimal."""
    return hashlib.sha256(text.encode()).hexdigest()


def fingerprint(model: PreTrainedModel) -> str:
    """A hash of a sample of every weight: enough to tell checkpoints apart, also those of the same name."""
    found = hashlib.sha256()
    for name, weight in model.state_dict().items():
        flat = weight.detach().flatten()
        sample = flat[:: max(1, flat.numel() // 256)].float().cpu()
        found.update(f"{name} {list(weight.shape)}".encode() + sample.numpy().tobytes())
    return found.hexdigest()


# --- what came of it --------------------------------------------------------------------------------------------------


def summarize(record: RunRecord, cells: Sequence[Cell], presets: Mapping[str, Any]) -> dict[str, Any]:
    """Per preset: accuracy over the cells that the model can do, and the change of the log-likelihood over all."""
    results = [_result(record, cell) for cell in cells]
    scored = [result for result in results if is_scored(result)]
    summary = {}
    for name in presets:
        changes = [change for result in results for change in changes_of(result, name)]
        correct = [value for result in scored for value in result[name]["correct"]]
        summary[name] = {
            "num_cells": len(cells),
            "num_scored": len(scored),
            "accuracy": statistics.fmean(correct) if correct else None,
            "log_likelihood_change": statistics.fmean(changes),
            "standard_error": statistics.stdev(changes) / math.sqrt(len(changes)) if len(changes) > 1 else None,
        }
    return summary


def is_scored(result: Mapping[str, Any]) -> bool:
    """Whether the unquantised cache gets enough of a cell right."""
    return accuracy_of(result, UNQUANTIZED) >= MIN_ACCURACY


def accuracy_of(result: Mapping[str, Any], preset: str) -> float:
    """Share of a cell's answers that are right."""
    return statistics.fmean(result[preset]["correct"])


def changes_of(result: Mapping[str, Any], preset: str) -> list[float]:
    """Per prompt, what a preset adds to the log-likelihood of the answer, nats."""
    exact, other = (result[name]["log_likelihood"] for name in (UNQUANTIZED, preset))
    return [after - before for before, after in zip(exact, other, strict=True)]


def _result(record: RunRecord, cell: Cell) -> dict[str, Any]:
    result = record.get(cell.part)
    assert result is not None
    return result


def show(console: Console, record: RunRecord, cells: Sequence[Cell], summary: Mapping[str, Any], *, title: str) -> None:
    """Print a table per test and preset, and one of all presets."""
    depths = dict.fromkeys(cell.depth for cell in cells)
    lengths = dict.fromkeys(cell.length for cell in cells)
    for test in dict.fromkeys(cell.test for cell in cells):
        for name in summary:
            table = Table(title=f"{test}, {name}", title_justify="left", title_style="bold")
            table.add_column("tokens", justify="right")
            for depth in depths:
                table.add_column(f"{depth:g} %", justify="right")
            for length in lengths:
                results = (_result(record, Cell(test, length, depth)) for depth in depths)
                table.add_row(f"{length:,}", *(_cell(result, name) for result in results))
            console.print(table)
    table = Table(title=title, title_justify="left", title_style="bold")
    table.add_column("preset")
    for heading in ("cells scored", "right", "log-likelihood, nats/answer"):
        table.add_column(heading, justify="right")
    for name, row in summary.items():
        table.add_row(name, f"{row['num_scored']} of {row['num_cells']}", *_summary_cells(row))
    console.print(table)
    for note in _notes(summary):
        console.print(note, style="dim")


def _cell(result: Mapping[str, Any], preset: str) -> str:
    accuracy = f"{accuracy_of(result, preset):.0%}"
    if preset == UNQUANTIZED:
        log_likelihood = statistics.fmean(result[preset]["log_likelihood"])
        return f"{accuracy if is_scored(result) else f'{accuracy}, cannot'}\n{log_likelihood:.2f}"
    change = statistics.fmean(changes_of(result, preset))
    return f"{accuracy if is_scored(result) else 'cannot'}\n{change:+.3f}"


def _summary_cells(row: Mapping[str, Any]) -> Iterator[str]:
    yield "-" if row["accuracy"] is None else f"{row['accuracy']:.1%}"
    error = "" if row["standard_error"] is None else f" ± {row['standard_error']:.4f}"
    yield f"{row['log_likelihood_change']:+.4f}{error}"


def _notes(summary: Mapping[str, Any]) -> Iterator[str]:
    yield (
        f"Rows: tokens of the prompt; columns: depth of what is hidden. Right: each token of the answer is the most "
        f"likely one, in cells where '{UNQUANTIZED}' gets {MIN_ACCURACY:.0%} right; in others the model itself cannot. "
        f"Below: log-likelihood of the right answer under '{UNQUANTIZED}', nats (a guess: "
        f"{-math.log(NUM_ANSWERS):.1f}), and how presets change it on the same prompts, ± one standard error. "
        "Questions and answers read codes, which was counted."
    )
    if not any(row["num_scored"] for row in summary.values()):
        yield "The model can do none of the cells: only the log-likelihoods say something."
