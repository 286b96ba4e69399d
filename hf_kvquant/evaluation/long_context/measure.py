"""Runs `eval long`: asks all prompts under every preset, keeps the results, and refuses those that are none."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Mapping, Sequence

from transformers import PreTrainedModel

from ...config import KVQuantConfig
from ...models.text_config import context_of
from ..errors import Refused, UsageError
from ..measuring.pairs import check_pairs
from ..preparation import Subject
from ..records import RunRecord, measuring, open_record
from .prompts import Prompt, Writer
from .results import Cell, joined, summarize
from .scores import Scores, score

WHERE = "eval long"
SUMMARY = "summary"


@dataclasses.dataclass(frozen=True)
class Options:
    """How the model is asked: the options of `hf-kvquant eval long` with these names."""

    samples: int = 10
    seed: int = 0
    batch_size: int = 8
    chat_template: bool = False


def measure(
    subject: Subject, cells: Sequence[Cell], filler: str | None, options: Options, output: str | None = None
) -> RunRecord:
    """Ask all prompts of all cells under every preset, and keep the results in the file `output`, or in memory.

    `filler` is the text around what is hidden; `None` for sentences made from a few words.

    Returns:
        The record: a part per cell, and the part `SUMMARY`.
    """
    context = context_of(subject.model)
    longest = max(cell.length for cell in cells)
    if context is not None and longest > context:
        raise UsageError(
            f"`--lengths` must be at most {context:,}, the positions of {subject.name}, got {longest:,}. Leave longer "
            "ones out."
        )
    writer = Writer(subject.tokenizer, filler, seed=options.seed, is_chat=options.chat_template)
    for cell in cells:
        writer.prompt(cell.test, cell.length, cell.depth, 0)
    settings = {
        "evaluation": "long",
        **subject.settings,
        "presets": {name: config.to_dict() for name, config in subject.configs.items()},
        "samples": options.samples,
        "seed": options.seed,
        "chat_template": digest(str(subject.tokenizer.chat_template)) if options.chat_template else None,
        "filler": None if filler is None else digest(filler),
    }
    record = open_record(output, settings)
    fill(record, subject, writer, cells, options)
    return record


def fill(record: RunRecord, subject: Subject, writer: Writer, cells: Sequence[Cell], options: Options) -> None:
    """Fill the record with the cells that it does not have yet, and with a summary of all."""
    missing = [cell for cell in cells if record.get(cell.part) is None]
    num_tokens = options.samples * sum(cell.length for cell in missing)
    more = ", or ask for shorter --lengths"
    with measuring(
        record, WHERE, num_tokens, unit="token", lower="--batch-size", value=options.batch_size, more=more
    ) as tell:
        for number, cell in enumerate(missing, len(cells) - len(missing) + 1):
            tell(doing=f"cell {number} of {len(cells)} ({cell.test} {cell.length:,} at {cell.depth:g} %)")
            parts = []
            for start in range(0, options.samples, options.batch_size):
                samples = range(start, min(start + options.batch_size, options.samples))
                prompts = [writer.prompt(cell.test, cell.length, cell.depth, sample) for sample in samples]
                parts.append(checked_scores(subject.model, prompts, subject.configs))
                tell(len(prompts) * cell.length)
            record.put(cell.part, {name: joined([part[name] for part in parts]) for name in subject.configs})
        tell(doing="the summary")
        record.put(SUMMARY, summarize(record, cells, subject.configs))


def checked_scores(
    model: PreTrainedModel, prompts: Sequence[Prompt], configs: Mapping[str, KVQuantConfig]
) -> dict[str, Scores]:
    """`score`, refused if a number was not computed from codes or a log-likelihood is not finite."""
    results = score(model, prompts, configs)
    for name, scores in results.items():
        check_pairs(f"preset {name}", scores)
        if not all(map(math.isfinite, scores.log_likelihood)):
            raise Refused(
                f"preset {name} must give finite log-likelihoods, got {scores.log_likelihood}. Use --dtype float32 or "
                "bfloat16."
            )
    return results


def digest(text: str) -> str:
    """The SHA-256 of a text, hexadecimal."""
    return hashlib.sha256(text.encode()).hexdigest()
