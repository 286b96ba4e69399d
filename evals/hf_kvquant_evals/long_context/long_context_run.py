"""Runs `eval long`: asks a model all prompts through quantised caches, keeps how it answers, and shows it.

The context is the first chunk of a cache, which is exact by design. The question follows as a second chunk, and the
answer token by token; both read codes, which is counted. The right answer is always fed. Up to its first mistake,
greedy decoding feeds the same tokens, so an answer is right if each of its tokens was the most likely one. The
log-likelihood of the answer tells presets apart even on models that are never right.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from rich.console import Console
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from hf_kvquant.cache.kvquant_cache import KVQuantCache
from hf_kvquant.cache.layers import KVQuantLayer
from hf_kvquant.common.errors import RefusedResult, UsageError
from hf_kvquant.common.naming import sha256
from hf_kvquant.common.tables import or_dash, print_table, with_error
from hf_kvquant.config import KVQuantConfig
from hf_kvquant.models.probing import forward
from hf_kvquant.models.text_config import context_of
from hf_kvquant.patching import patched
from hf_kvquant.presets import UNQUANTIZED
from hf_kvquant.transforms.of_model import key_transforms
from hf_kvquant.upstream.releases import with_cache

from ..choices import MIN_ACCURACY as MIN_ACCURACY
from ..measuring.pairs import DEQUANTIZED, Pairs, check_pairs, count_pairs, expected_pairs, pairs_of
from ..paired import mean_and_error
from ..preparation import Subject
from ..records import RunRecord, measuring, open_record
from .prompts import NUM_ANSWERS, Prompt, Writer

WHERE = "eval long"
SUMMARY = "summary"  # the part of a record with all presets


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scores(Pairs):
    """The scores of some prompts under one config."""

    correct: list[bool]  # whether greedy decoding gives the answer
    log_likelihood: list[float]  # of the whole answer, given context and question, in nats


@dataclasses.dataclass(frozen=True)
class Cell:
    """One test at one length and depth."""

    test: str
    length: int
    depth: float

    @property
    def part(self) -> str:
        """Name of its part in a record."""
        return f"{self.test}/{self.length}/{self.depth:g}"


def measure(
    subject: Subject,
    cells: Sequence[Cell],
    filler: str | None,
    *,
    output: str | None = None,
    samples: int = 10,
    seed: int = 0,
    batch_size: int = 8,
    chat_template: bool = False,
) -> RunRecord:
    """Ask all prompts of all cells under every preset, and keep the results in the file `output`, or in memory.

    `filler` is the text around what is hidden; `None` for sentences made from a few words. The keyword arguments are
    the options of `hf-kvquant eval long` with these names. The record has a part per cell, and the part `SUMMARY`.
    """
    context = context_of(subject.model)
    longest = max(cell.length for cell in cells)
    if context is not None and longest > context:
        raise UsageError(
            f"`--lengths` must be at most {context:,}, the positions of {subject.name}, got {longest:,}. Leave longer "
            "ones out."
        )
    writer = Writer(subject.tokenizer, filler, seed=seed, is_chat=chat_template)
    for cell in cells:
        writer.prompt(cell.test, cell.length, cell.depth, 0)
    settings = {
        "evaluation": "long",
        **subject.prepare(),
        "presets": {name: config.to_dict() for name, config in subject.configs.items()},
        "samples": samples,
        "seed": seed,
        "chat_template": sha256(str(subject.tokenizer.chat_template).encode()) if chat_template else None,
        "filler": None if filler is None else sha256(filler.encode()),
    }
    record = open_record(output, settings)
    missing = [cell for cell in cells if record.get(cell.part) is None]
    total, more = samples * sum(cell.length for cell in missing), ", or ask for shorter --lengths"
    with measuring(record, WHERE, total, unit="token", lower="--batch-size", value=batch_size, more=more) as tell:
        for number, cell in enumerate(missing, len(cells) - len(missing) + 1):
            tell(doing=f"cell {number} of {len(cells)} ({cell.test} {cell.length:,} at {cell.depth:g} %)")
            parts = []
            for start in range(0, samples, batch_size):
                numbers = range(start, min(start + batch_size, samples))
                prompts = [writer.prompt(cell.test, cell.length, cell.depth, number) for number in numbers]
                parts.append(checked_scores(subject.model, prompts, subject.configs))
                tell(len(prompts) * cell.length)
            record.put(cell.part, {name: joined([part[name] for part in parts]) for name in subject.configs})
        tell(doing="the summary")
        record.put(SUMMARY, summarize(record, cells, subject.configs))
    return record


def checked_scores(
    model: PreTrainedModel, prompts: Sequence[Prompt], configs: Mapping[str, KVQuantConfig]
) -> dict[str, Scores]:
    """`score`, refused if a number was not computed from codes or a log-likelihood is not finite."""
    results = score(model, prompts, configs)
    for name, scores in results.items():
        check_pairs(f"preset {name}", scores)
        if not all(map(math.isfinite, scores.log_likelihood)):
            raise RefusedResult(
                f"preset {name} must give finite log-likelihoods, got {scores.log_likelihood}. Use --dtype float32 or "
                "bfloat16."
            )
    return results


@torch.inference_mode()
def score(model: PreTrainedModel, prompts: Sequence[Prompt], configs: Mapping[str, KVQuantConfig]) -> dict[str, Scores]:
    """Score prompts of one shape in one batch, through one cache per config. The model is not changed.

    The model runs over the contexts once: its keys and values are then written to every cache, each in its own format.
    Models with layers that do not keep everything run over the contexts once per config.
    """
    context, question, answer = (
        torch.stack([getattr(prompt, part) for prompt in prompts]).to(model.device)
        for part in ("context", "question", "answer")
    )
    results = {}
    with patched(model, UNQUANTIZED):
        read = DynamicCache(config=model.config)
        read_context(model, context, read)
        for name, config in configs.items():
            cache = KVQuantCache(model.config, config, key_transforms=key_transforms(model, config))
            if all(
                isinstance(each, KVQuantLayer) and not (each.is_sliding or each.holds_state) for each in cache.layers
            ):
                for index, layer in enumerate(read.layers):
                    assert isinstance(layer, DynamicLayer) and layer.keys is not None and layer.values is not None
                    cache.update(layer.keys, layer.values, index)
            else:  # other layers do not keep all that they were given
                read_context(model, context, cache)
            count_pairs(cache)
            correct, log_likelihood = ask(model, question, answer, cache)
            fed = context.shape[1] + question.shape[1] + answer.shape[1] - 1
            results[name] = Scores(
                correct=correct.tolist(),
                log_likelihood=log_likelihood.tolist(),
                pairs_read=pairs_of(cache),
                pairs_expected=len(prompts) * expected_pairs(model, cache, fed, context.shape[1]),
                pairs_dequantized=cache.pairs_dequantized,
            )
    return results


@torch.inference_mode()
def ask(model: PreTrainedModel, question: Tensor, answer: Tensor, cache: Cache) -> tuple[Tensor, Tensor]:
    """Feed a question, as one chunk, and its answer, token by token, both `[batch, tokens]` int64, to a cache.

    Returns `[batch]` bool, whether every token of the answer was the most likely one; and `[batch]` float32, the
    log-likelihood of the answer, nats. The last token is only predicted.
    """
    correct = torch.ones(len(answer), dtype=torch.bool, device=answer.device)
    log_likelihood = torch.zeros(len(answer), device=answer.device)
    for index, chunk in enumerate((question, *answer[:, :-1].split(1, dim=1))):
        # All logits of the question, although only the last are used. If only those were asked for, layers that share
        # the keys and values of others (Gemma 4) would skip the other queries, and the pairs read could not be checked.
        log_probs = forward(model, chunk, cache=cache)[:, -1].float().log_softmax(-1)
        token = answer[:, index]
        correct &= log_probs.argmax(-1) == token
        log_likelihood += log_probs.gather(1, token[:, None])[:, 0]
    return correct, log_likelihood


def read_context(model: PreTrainedModel, ids: Tensor, cache: Cache) -> None:
    """Fill a cache with contexts."""
    # Only the last logits: those of a whole context can be larger than its keys and values.
    takes_count = "logits_to_keep" in inspect.signature(model.forward).parameters
    options = {"logits_to_keep": 1} if takes_count else {}
    model(input_ids=ids, **with_cache(cache), use_cache=True, **options)


def joined(parts: Sequence[Scores]) -> dict[str, Any]:
    """The batches of one cell, joined into a part of a record."""
    return {
        **{name: [each for part in parts for each in getattr(part, name)] for name in ("correct", "log_likelihood")},
        **{name: sum(part.counts[name] for part in parts) for name in parts[0].counts},
    }


def summarize(record: RunRecord, cells: Sequence[Cell], presets: Mapping[str, Any]) -> dict[str, Any]:
    """Per preset: accuracy over the scored cells, and the mean change of the log-likelihood over all cells."""
    results = [record.to_dict()["parts"][cell.part] for cell in cells]
    scored = [result for result in results if is_scored(result)]
    summary = {}
    for name in presets:
        change, error = mean_and_error([change for result in results for change in changes_of(result, name)])
        correct = [value for result in scored for value in result[name]["correct"]]
        summary[name] = {
            "num_cells": len(cells),
            "num_scored": len(scored),
            "accuracy": statistics.fmean(correct) if correct else None,
            "log_likelihood_change": change,
            "standard_error": error,
            "pairs_dequantized": sum(result[name].get("pairs_dequantized", 0) for result in results),
        }
    return summary


def is_scored(result: Mapping[str, Any]) -> bool:
    """Whether the unquantised cache gets `MIN_ACCURACY` of a cell right, so that presets are scored there."""
    return statistics.fmean(result[UNQUANTIZED]["correct"]) >= MIN_ACCURACY


def changes_of(result: Mapping[str, Any], preset: str) -> list[float]:
    """By how much a preset changes the log-likelihood of the answer, per prompt, in nats."""
    exact, other = (result[name]["log_likelihood"] for name in (UNQUANTIZED, preset))
    return [after - before for before, after in zip(exact, other, strict=True)]


def show(console: Console, record: RunRecord, cells: Sequence[Cell], *, title: str) -> None:
    """Print a table per test and preset, a summary of all presets, and notes on what they mean."""
    parts = record.to_dict()["parts"]
    summary = parts[SUMMARY]
    depths, lengths, tests = (
        dict.fromkeys(getattr(cell, name) for cell in cells) for name in ("depth", "length", "test")
    )
    for test in tests:
        for name in summary:
            rows = [
                [f"{length:,}", *(cell_text(parts[Cell(test, length, depth).part], name) for depth in depths)]
                for length in lengths
            ]
            print_table(console, ["tokens", *(f"{depth:g} %" for depth in depths)], rows, title=f"{test}, {name}")
    rows = [
        [
            name,
            f"{row['num_scored']} of {row['num_cells']}",
            or_dash(row["accuracy"], ".1%"),
            with_error(row["log_likelihood_change"], row["standard_error"], "+.4f"),
        ]
        for name, row in summary.items()
    ]
    notes = [
        f"Rows: tokens of the prompt; columns: depth of the number. Right: answers whose every token is the most "
        f"likely one, in cells where '{UNQUANTIZED}' gets {MIN_ACCURACY:.0%} right; cannot: the model itself fails "
        f"there. Below: log-likelihood of the right answer under '{UNQUANTIZED}', nats (a guess: "
        f"{-math.log(NUM_ANSWERS):.1f}), and how presets change it on the same prompts, ± one standard error. "
        "Questions and answers read codes, which was checked by counting."
    ]
    if any(row["pairs_dequantized"] for row in summary.values()):
        notes.append(DEQUANTIZED)
    if not any(row["num_scored"] for row in summary.values()):
        notes.append("The model itself fails in every cell, so only the log-likelihoods compare presets.")
    headings = ("preset", "cells scored", "right", "log-likelihood, nats/answer")
    print_table(console, headings, rows, title=title, notes=notes)


def cell_text(result: Mapping[str, Any], preset: str) -> str:
    """Accuracy of a preset in a cell, and on a second line the log-likelihood of the answer or its change."""
    accuracy = f"{statistics.fmean(result[preset]['correct']):.0%}"
    if preset == UNQUANTIZED:
        log_likelihood = statistics.fmean(result[preset]["log_likelihood"])
        return f"{accuracy}{'' if is_scored(result) else ', cannot'}\n{log_likelihood:.2f}"
    change = statistics.fmean(changes_of(result, preset))
    return f"{accuracy if is_scored(result) else 'cannot'}\n{change:+.3f}"
