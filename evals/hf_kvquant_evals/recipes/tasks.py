"""Zero-shot tasks under recipes: prompts, items and metrics are those of `eval tasks`.

Items are shorter than the dense windows of several recipes, so a text stands before each of them. A part of the record
is a task under all recipes and the unquantised cache. lm-eval is imported inside functions: it is optional and slow to
import.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console
from torch import Tensor
from transformers import DynamicCache

from hf_kvquant.common.errors import UsageError
from hf_kvquant.models.text_config import context_of
from hf_kvquant.presets import UNQUANTIZED

from ..errors import CannotScore
from ..paired import average_and_error
from ..preparation import Subject
from ..records import RunRecord, measuring
from ..tasks.data import load_tasks
from ..tasks.task_results import ACCURACIES, run
from ..tasks.task_run import check_tokenizer, hashes_of, is_done
from .interface import Recipe, Storage
from .recipe_cache import Quantizers, plain_cache, recipe_cache

# What tasks ask of a model. Generated texts and whole texts have no continuation that reads a context.
OUTPUT_TYPES = ("multiple_choice", "loglikelihood")
PART = "task "


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The options of `hf-kvquant eval recipes` with these names."""

    tasks: Sequence[str] = ()
    data: str | None = None
    limit: int | None = None
    task_context: int = 512
    batch_size: int = 8

    def settings(self) -> dict[str, Any]:
        """What a record says of the tasks. Empty without tasks, as in records that are older than they."""
        if not self.tasks:
            return {}
        import lm_eval

        kept = {"tasks": list(self.tasks), "limit": self.limit, "task_context": self.task_context}
        return {**kept, "is_offline": self.data is not None, "lm_eval": lm_eval.__version__}


def load(subject: Subject, ids: Tensor, options: Options) -> dict[str, Any]:
    """lm-eval's task objects by name. Refuses tasks that cannot be scored here, and a context that does not fit.

    `ids` is the text that is measured, `[tokens]` int64.
    """
    if not options.tasks:
        return {}
    check_tokenizer(subject)
    most = min(len(ids), (context_of(subject.model) or math.inf) - 1)
    if options.task_context > most:
        raise UsageError(
            f"`--task-context` must be at most {most}, got {options.task_context}: there are {len(ids)} tokens of text "
            f"to measure, and {context_of(subject.model)} positions of {subject.name}. Name a smaller number."
        )
    tasks = load_tasks(options.tasks, options.data)
    for name, task in tasks.items():
        if task.OUTPUT_TYPE not in OUTPUT_TYPES:
            raise UsageError(
                f"`--tasks` must name tasks that compare log-likelihoods, got {name}, which asks for "
                f"{task.OUTPUT_TYPE}. Leave it out, or run it with 'hf-kvquant eval tasks'."
            )
        if not set(ACCURACIES) & task.aggregation().keys():
            raise UsageError(
                f"`--tasks` must name tasks with one of the metrics {', '.join(ACCURACIES)}, got {name} with "
                f"{', '.join(task.aggregation())}. Leave it out."
            )
    return tasks


def undone(record: RunRecord, tasks: Mapping[str, Any], data: str | None, output: str | None) -> dict[str, str | None]:
    """The tasks that a record does not have yet, and the SHA-256 of their data. Refuses a record of other data."""
    hashes = hashes_of(tasks, data)
    return {name: each for name, each in hashes.items() if not is_done(record.get(PART + name), each, name, output)}


def fill(
    record: RunRecord,
    where: str,
    subject: Subject,
    ids: Tensor,
    tasks: Mapping[str, Any],
    missing: Mapping[str, str | None],
    recipes: Mapping[str, Recipe],
    quantizers: Mapping[str, Quantizers],
    options: Options,
) -> None:
    """Measure the tasks that are missing (`undone`). `ids` is the text before their items, `[tokens]` int64."""
    if not missing:
        return
    from .lm_eval_model import RecipesLM

    model = subject.model
    caches: dict[str, Callable[[], DynamicCache]] = {UNQUANTIZED: functools.partial(plain_cache, model)}
    for name, recipe in recipes.items():
        caches[name] = functools.partial(recipe_cache, model, recipe, quantizers[name])
    console = Console(highlight=False, stderr=True)
    size = options.batch_size
    with measuring(record, where, len(missing), lower="--batch-size", value=size, is_shown=False) as tell:
        tell(doing="the text before the items of tasks")
        lm = RecipesLM(model, subject.tokenizer, ids[: options.task_context], caches, size)
        for number, (name, data_sha256) in enumerate(missing.items(), 1):
            tell(doing=f"task {name}")
            console.print(f"{number} of {len(missing)}: {name}, under {len(caches)} caches")
            try:
                part = of_task(lm, name, tasks[name], list(caches), options.limit)
            except CannotScore as error:
                raise UsageError(
                    f"`--tasks` {name} does not fit {subject.name} behind --task-context {options.task_context}. "
                    f"{error}"
                ) from error
            record.put(PART + name, {**part, "data_sha256": data_sha256})


def of_task(lm: Any, name: str, task: Any, caches: Iterable[str], limit: int | None) -> dict[str, Any]:
    """Run a task under each of a `RecipesLM`'s caches. Returns a part of a record."""
    started = time.monotonic()
    found = {}
    lm.forget()
    for lm.name in caches:
        found[lm.name] = run(lm, name, task, limit)
    chunks = [[*lengths, rows] for lengths, rows in lm.chunks.items()]
    return {"recipes": found, "chunks": chunks, "seconds": round(time.monotonic() - started, 1)}


def summarize(parts: Sequence[Mapping[str, Any]], name: str, recipe: Recipe) -> dict[str, Any]:
    """Accuracy, and the changes from the unquantised cache on the same items. All are means over tasks."""
    pairs = [(part["recipes"][name]["items"], part["recipes"][UNQUANTIZED]["items"]) for part in parts]

    def by_item(key: Callable[[Mapping[str, Any]], str], compare: Callable[[Any, Any], float]) -> list[list[float]]:
        return [list(map(compare, new[key(new)], old[key(old)])) for new, old in pairs]

    def accuracy(items: Mapping[str, Any]) -> str:
        return next(metric for metric in ACCURACIES if metric in items)

    change, change_error = average_and_error(by_item(accuracy, operator.sub))
    # Items with several right answers have none.
    gold = "gold_log_likelihood"
    golds = [list(map(operator.sub, new[gold], old[gold])) for new, old in pairs if gold in new]
    log_likelihood, error = average_and_error(golds) if golds else (None, None)
    return {
        "num_items": sum(len(new[accuracy(new)]) for new, _ in pairs),
        "accuracy": average_and_error(by_item(accuracy, lambda new, old: new))[0],
        "reference_accuracy": average_and_error(by_item(accuracy, lambda new, old: old))[0],
        "change": change,
        "change_standard_error": change_error,
        "log_likelihood_change": log_likelihood,
        "standard_error": error,
        "same": average_and_error(by_item(lambda items: "answer", operator.eq))[0],
        "read_from_codes": read_from_codes(recipe, [chunk for part in parts for chunk in part["chunks"]]),
    }


def read_from_codes(recipe: Recipe, chunks: Iterable[Sequence[int]]) -> float:
    """The share of (query, token) pairs that read a code, over keys and values.

    `chunks` has the tokens in a cache, those of the chunk that reads it, and how many there are of these.
    """
    coded = total = 0
    for held, tokens, rows in chunks:
        lengths = range(held + 1, held + tokens + 1)  # what each query sees
        total += rows * 2 * sum(lengths)
        coded += rows * sum(_coded(side, lengths) for side in (recipe.key, recipe.value))
    return coded / total if total else 0.0


def _coded(side: Storage, lengths: range) -> int:
    """The codes that the queries of a chunk read. All see the cache as it is once the whole chunk has come."""
    end = side.coded_end(lengths.stop - 1)
    return sum(max(0, min(end, length) - side.sink) for length in lengths)
