"""Needles: whether a number that stands far back in a long context is still found under each recipe.

The prompts, and how an answer is scored, are those of `eval long`. The context fills the cache, the question and the
answer read it. Small models find nothing, but the log-likelihood of the right answer still tells recipes apart.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from hf_kvquant.presets import UNQUANTIZED

from ..long_context.long_context_run import MIN_ACCURACY, ask, read_context
from ..long_context.prompts import Prompt, Writer
from ..paired import mean_and_error
from .interface import Recipe
from .recipe_cache import Quantizers, filled, recipe_cache, states_of

TEST = "needle"
DEPTHS = (10, 30, 50, 70)  # percent of the context; each prompt takes the next one


def prompts(writer: Writer, length: int, count: int) -> list[Prompt]:
    """Prompts of `length` tokens, at all depths in turn."""
    return [writer.prompt(TEST, length, DEPTHS[number % len(DEPTHS)], number) for number in range(count)]


@torch.inference_mode()
def score(
    model: PreTrainedModel,
    asked: Sequence[Prompt],
    recipes: Mapping[str, Recipe],
    quantizers: Mapping[str, Quantizers],
    on_prompt: Callable[[], Any] = lambda: None,
) -> dict[str, Any]:
    """Ask prompts under the unquantised cache and under each recipe. Returns a part of a record, by name.

    Of each prompt: whether the answer is right, and the log-likelihood of the right answer, nats.
    """
    found: dict[str, dict[str, list[Any]]] = {
        name: {"correct": [], "log_likelihood": []} for name in (UNQUANTIZED, *recipes)
    }
    for prompt in asked:
        context, question, answer = (
            part.unsqueeze(0).to(model.device) for part in (prompt.context, prompt.question, prompt.answer)
        )
        read = DynamicCache(config=model.config)
        read_context(model, context, read)
        for name in found:
            cache = (
                DynamicCache(config=model.config)
                if name == UNQUANTIZED
                else recipe_cache(model, recipes[name], quantizers[name])
            )
            correct, log_likelihood = ask(model, question, answer, filled(cache, states_of(read)))
            found[name]["correct"] += correct.tolist()
            found[name]["log_likelihood"] += log_likelihood.tolist()
        on_prompt()
    return found


def summarize(part: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Accuracy, `None` if the model itself fails, and the change of the right answer's log-likelihood."""
    exact, other = part[UNQUANTIZED], part[name]
    changes = [after - before for before, after in zip(exact["log_likelihood"], other["log_likelihood"], strict=True)]
    change, error = mean_and_error(changes)
    is_scored = statistics.fmean(exact["correct"]) >= MIN_ACCURACY
    return {
        "accuracy": statistics.fmean(other["correct"]) if is_scored else None,
        "log_likelihood_change": change,
        "standard_error": error,
    }
