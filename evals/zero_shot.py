"""Zero-shot accuracy under several caches, of the tasks that `hf-kvquant eval tasks` reads from JSON lines.

Tasks, prompts and scores are those of `hf_kvquant_evals/tasks/offline/`, but lm-eval is not needed, whose packages
a machine with a GPU may lack. As in lm-eval, a choice is right if its log-likelihood is the highest of its item, and a
single continuation if each of its tokens is the most likely one. The context without its last token fills the cache,
and the rest is read from it.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jinja2
import torch
import yaml
from torch import nn

from hf_kvquant.config import KVQuantConfig
from hf_kvquant_evals.measuring.fidelity import Chunks, Stream, route
from hf_kvquant_evals.tasks.data import FOLDER, check_data, data_file

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
    with route(model, simulate=False):
        for task in tasks:
            items = list(items_of(task, folder, limit))
            for name, config in configs.items():
                found[name][task] = sum(is_right(model, tokenizer, config, item) for item in items) / len(items)
    return found


def is_right(model: Any, tokenizer: Any, config: KVQuantConfig, item: Item) -> bool:
    """Whether a model, inside `route`, answers an item."""
    scores = scored(model, tokenizer, config, item)
    if len(scores) == 1:
        return scores[0][1]
    return max(range(len(scores)), key=lambda index: scores[index][0]) == item.gold


def scored(model: Any, tokenizer: Any, config: KVQuantConfig, item: Item) -> list[tuple[float, bool]]:
    """Of each answer, the log-likelihood, and whether each of its tokens is the most likely one."""
    rows = [tokenizer(item.context + answer, return_tensors="pt").input_ids[0] for answer in item.answers]
    begin = len(tokenizer(item.context).input_ids)
    # What stands behind an answer has no effect on it.
    ids = nn.utils.rnn.pad_sequence(rows, batch_first=True).to(model.device)
    stream = Stream(model, ids[:, :-1], config, Chunks(begin - 1, CHUNK), name="zero_shot")
    log_probs = torch.cat(list(stream), dim=1)[:, begin - 1 :]  # [answers, longest, vocab_size]
    found = []
    for row, each in zip(rows, log_probs, strict=True):
        targets = row[begin:].to(model.device)
        answer = each[: len(targets)]
        found.append((float(answer.gather(1, targets[:, None]).sum()), bool((answer.argmax(1) == targets).all())))
    return found
