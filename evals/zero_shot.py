"""Zero-shot accuracy under several caches, of the tasks that `hf-kvquant eval tasks` reads from JSON lines.

Tasks, prompts and scores are those of `hf_kvquant/evaluation/tasks/offline/`, but lm-eval is not needed, whose packages
a machine with a GPU may lack. As in lm-eval, a choice is right if its log-likelihood is the highest of its item, and a
single continuation if each of its tokens is the most likely one. The context without its last token fills the cache,
and the rest reads it, which one forward simulates.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jinja2
import yaml

from hf_kvquant.config import KVQuantConfig
from hf_kvquant.evaluation.measuring.fidelity import Chunks, Stream, route
from hf_kvquant.evaluation.tasks.data import FOLDER, check_data, data_file

CHUNK = 128


class Item(NamedTuple):
    """What is asked, the answers to choose from, and which one is right; one answer alone must be the greedy one."""

    context: str
    answers: list[str]
    gold: int


def items_of(task: str, folder: str, limit: int | None) -> Iterator[Item]:
    """The first items of a task."""
    spec = yaml.safe_load((FOLDER / f"{task}.yaml").read_text(encoding="utf-8"))
    if "{{" not in spec["doc_to_text"]:
        raise SystemExit(f"zero_shot: `tasks` must be contexts with answers, got {task}.")
    context, target = map(jinja2.Template, (spec["doc_to_text"], spec["doc_to_target"]))
    with data_file(task, folder).open(encoding="utf-8") as lines:
        for line in itertools.islice((line for line in lines if line.strip()), limit):
            item = json.loads(line)
            if "doc_to_choice" in spec:
                choices = [f" {choice}" for choice in item[spec["doc_to_choice"]]]
                yield Item(context.render(item), choices, item[spec["doc_to_target"]])
            else:
                yield Item(context.render(item), [target.render(item)], 0)


def accuracies(
    model: Any,
    tokenizer: Any,
    configs: Mapping[str, KVQuantConfig],
    tasks: Sequence[str],
    folder: str,
    limit: int | None = None,
) -> dict[str, dict[str, float]]:
    """Accuracy by cache and task."""
    check_data(tasks, folder)
    found: dict[str, dict[str, float]] = {name: {} for name in configs}
    with route(model, simulate=True):
        for task in tasks:
            items = list(items_of(task, folder, limit))
            for name, config in configs.items():
                found[name][task] = sum(is_right(model, tokenizer, config, item) for item in items) / len(items)
    return found


def is_right(model: Any, tokenizer: Any, config: KVQuantConfig, item: Item) -> bool:
    """Whether a model, inside `route`, answers an item."""
    scores = [score(model, tokenizer, config, item.context, answer) for answer in item.answers]
    if len(scores) == 1:
        return scores[0][1]
    return max(range(len(scores)), key=lambda index: scores[index][0]) == item.gold


def score(model: Any, tokenizer: Any, config: KVQuantConfig, context: str, answer: str) -> tuple[float, bool]:
    """The log-likelihood of an answer, and whether each of its tokens is the most likely one."""
    ids = tokenizer(context + answer, return_tensors="pt").input_ids.to(model.device)
    begin = len(tokenizer(context).input_ids)
    stream = Stream(model, ids[:, :-1], config, Chunks(begin - 1, CHUNK, simulate=True), name="zero_shot")
    log_probs = next(stream)[0, begin - 1 :]  # [tokens of the answer, vocab_size]
    targets = ids[0, begin:]
    return float(log_probs.gather(1, targets[:, None]).sum()), bool((log_probs.argmax(1) == targets).all())
