"""Asks a model the prompts of `eval long` through quantised caches, and scores its answers.

The context is the first chunk of a cache, which is exact by design. The question follows as a second chunk, and the
answer token by token, as `generate` decodes it; both read codes, which is counted. The right answer is always fed,
whatever the model would say. Up to its first mistake, greedy decoding feeds the same tokens, so an answer is right if
each of its tokens was the most likely one. The log-likelihood of the answer tells presets apart even on models that are
never right.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from ...cache.cache import KVQuantCache
from ...cache.layers import KVQuantLayer
from ...config import KVQuantConfig
from ...patching import patched
from ...transforms.of_model import key_transforms
from ..measuring.fidelity import UNQUANTIZED
from ..measuring.pairs import Pairs, count_pairs, expected_pairs, pairs_of
from .prompts import Prompt


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scores(Pairs):
    """The scores of some prompts under one config.

    Attributes:
        correct: Per prompt, whether greedy decoding gives the answer.
        log_likelihood: Per prompt, log-likelihood of the whole answer, given context and question, in nats.
    """

    correct: list[bool]
    log_likelihood: list[float]


@torch.inference_mode()
def score(model: PreTrainedModel, prompts: Sequence[Prompt], configs: Mapping[str, KVQuantConfig]) -> dict[str, Scores]:
    """Ask a model all prompts at once, through one cache per config.

    The model runs over the contexts once: its keys and values are then written to every cache, each in its own format.
    Models with layers that do not keep everything run over the contexts once per config.

    Args:
        model: Any model that `patch` accepts, patched or not; left as it was.
        prompts: Prompts of the same shape.
        configs: By name.
    """
    context, question, answer = (
        torch.stack([getattr(prompt, part) for prompt in prompts]).to(model.device)
        for part in ("context", "question", "answer")
    )
    results = {}
    with patched(model, UNQUANTIZED):
        read = DynamicCache(config=model.config)
        _read(model, context, read)
        for name, config in configs.items():
            cache = KVQuantCache(model.config, config, key_transforms=key_transforms(model, config))
            if all(
                isinstance(each, KVQuantLayer) and not (each.is_sliding or each.holds_state) for each in cache.layers
            ):
                for index, layer in enumerate(read.layers):
                    assert isinstance(layer, DynamicLayer) and layer.keys is not None and layer.values is not None
                    cache.update(layer.keys, layer.values, index)
            else:  # other layers do not keep all that they were given
                _read(model, context, cache)
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
    """Feed a question and its answer to a cache that holds a context.

    Args:
        model: Patched if `cache` is ours.
        question: `[batch, tokens]` int64, fed as one chunk.
        answer: `[batch, tokens]` int64, fed token by token; the last one is only predicted.
        cache: Holds the contexts; question and answer are appended to it.

    Returns:
        `[batch]` bool, whether every token of the answer was the most likely one; and `[batch]` float32, the
        log-likelihood of the answer, nats.
    """
    correct = torch.ones(len(answer), dtype=torch.bool, device=answer.device)
    log_likelihood = torch.zeros(len(answer), device=answer.device)
    for index, chunk in enumerate((question, *answer[:, :-1].split(1, dim=1))):
        # All logits of the question, although only the last are used. If only those were asked for, layers that share
        # the keys and values of others (Gemma 4) would skip the other queries, and the pairs read could not be checked.
        logits: Tensor = model(input_ids=chunk, past_key_values=cache, use_cache=True).logits
        log_probs = logits[:, -1].float().log_softmax(-1)
        token = answer[:, index]
        correct &= log_probs.argmax(-1) == token
        log_likelihood += log_probs.gather(1, token[:, None])[:, 0]
    return correct, log_likelihood


def _read(model: PreTrainedModel, ids: Tensor, cache: Cache) -> None:
    """Fill a cache with contexts."""
    # Only the last logits: those of a whole context can be larger than its keys and values.
    takes_count = "logits_to_keep" in inspect.signature(model.forward).parameters
    options = {"logits_to_keep": 1} if takes_count else {}
    model(input_ids=ids, past_key_values=cache, use_cache=True, **options)
