"""Free-running drift: how far a model leaves its own way when it reads its own text from a quantised cache.

A text that is given hides errors that feed on themselves: each token is the right one, whatever the cache did before.
Here the model writes the text itself, with a recipe, at temperature 1. The unquantised cache then reads the same text.
Two numbers show by length how far apart the two are: the KL divergence of the next token under the unquantised cache
from that under the recipe, and the negative log-likelihood of the text under the unquantised cache. The second also
rises or falls if the recipe writes texts that are harder or easier to predict.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel

from hf_kvquant.models.probing import forward
from hf_kvquant.preflight.divergence import divergence

from ..measuring.fidelity import surprise
from ..paired import mean_and_error
from .recipe_cache import joint_cache, plain_cache

SCORED_TOGETHER = 64  # tokens that the unquantised cache reads at a time
FIRST_BUCKET = 128  # tokens of the first bucket of lengths; each later one is as long as all before it


@dataclasses.dataclass(frozen=True)
class Drift:
    """The scores of texts that a model wrote. Tensors are on the CPU."""

    ids: Tensor  # `[texts, tokens]` int64: what was written
    # `[texts, tokens]` float32, nats: of the next token under the unquantised cache from that under the recipe.
    kld: Tensor
    nll: Tensor  # `[texts, tokens]` float32, nats: of each token, under the unquantised cache


@torch.inference_mode()
def write(
    model: PreTrainedModel,
    prompts: Tensor,
    tokens: int,
    caches: Sequence[DynamicCache],
    *,
    seed: int = 0,
    on_token: Callable[[], Any] = lambda: None,
) -> list[Drift]:
    """Let a model continue prompts, `[texts, tokens]` int64, with each of some empty caches, and score what it writes.

    All caches write in one batch, from the same random numbers.
    """
    generator = torch.Generator(model.device).manual_seed(seed)
    count, cache = len(caches), joint_cache(caches)
    prompts = prompts.repeat(count, 1)
    reader = _Reader(model, prompts)
    written: list[Tensor] = []
    pending: list[Tensor] = []
    scores: list[tuple[Tensor, Tensor]] = []
    log_probs = _newest(model, prompts, cache)
    for step in range(tokens):
        pending.append(log_probs)
        written.append(_drawn(log_probs, count, generator))
        is_last = step + 1 == tokens
        if is_last or len(pending) == SCORED_TOGETHER:
            scores.append(reader.score(torch.cat(written[-len(pending) :], dim=1), torch.stack(pending, dim=1)))
            pending = []
        if not is_last:
            log_probs = _newest(model, written[-1], cache)
        on_token()
    kld, nll = (torch.cat(each, dim=1) for each in zip(*scores, strict=True))
    found = torch.cat(written, dim=1).cpu(), kld, nll
    return [Drift(*parts) for parts in zip(*(each.chunk(count) for each in found), strict=True)]


def _drawn(log_probs: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """A token for each row, `[rows, 1]` int64. Each of `count` equal parts of the rows gets the same random numbers.

    The same tokens as `torch.multinomial` draws for one part.
    """
    probs = log_probs.exp().unflatten(0, (count, -1))  # [count, texts, vocab_size]
    noise = torch.empty_like(probs[0]).exponential_(generator=generator)
    drawn: Tensor = (probs / noise).argmax(-1)
    return drawn.view(-1, 1)


def _newest(model: PreTrainedModel, ids: Tensor, cache: Cache) -> Tensor:
    """Log-probabilities of the token behind the last one, `[texts, vocab_size]` float32."""
    return forward(model, ids, cache=cache)[:, -1].float().log_softmax(-1)


class _Reader:
    """Reads what was written, through the unquantised cache."""

    def __init__(self, model: PreTrainedModel, prompts: Tensor) -> None:
        self.model = model
        self.cache = plain_cache(model)
        self.newest = _newest(model, prompts, self.cache).unsqueeze(1)

    def score(self, ids: Tensor, log_probs: Tensor) -> tuple[Tensor, Tensor]:
        """Divergence and surprise of the next tokens, `[texts, tokens]` int64, which were drawn from `log_probs`."""
        read = forward(self.model, ids, cache=self.cache).float().log_softmax(-1)
        reference, self.newest = torch.cat([self.newest, read[:, :-1]], dim=1), read[:, -1:]
        return divergence(log_probs, reference), surprise(reference, ids).cpu()


def buckets(tokens: int) -> list[tuple[int, int]]:
    """The lengths to report on: 0 to 128 tokens, to 256, to 512, and so on."""
    edges = [0]
    while edges[-1] < tokens:
        edges.append(min(tokens, max(FIRST_BUCKET, 2 * edges[-1])))
    return list(itertools.pairwise(edges))


def to_part(drift: Drift) -> dict[str, Any]:
    """The part of a record: the means of each text in each bucket of lengths."""
    spans = buckets(drift.kld.shape[1])
    return {
        "spans": spans,
        **{
            name: [getattr(drift, name)[:, begin:end].double().mean(1).tolist() for begin, end in spans]
            for name in ("kld", "nll")
        },
    }


def summarize(part: Mapping[str, Any], baseline: Mapping[str, Any]) -> list[dict[str, Any]]:
    """By bucket, the divergence, and by how much the texts are harder to predict than those of the baseline.

    `nll_change` compares texts that share only their prompts, so its standard error is that of single texts.
    """
    rows = []
    for index, (begin, end) in enumerate(part["spans"]):
        kld, kld_error = mean_and_error(part["kld"][index])
        changes = [after - before for after, before in zip(part["nll"][index], baseline["nll"][index], strict=True)]
        change, error = mean_and_error(changes)
        nll, _ = mean_and_error(part["nll"][index])
        rows.append(
            {
                "begin": begin,
                "end": end,
                "kld": kld,
                "kld_standard_error": kld_error,
                "nll": nll,
                "nll_change": change,
                "nll_change_standard_error": error,
            }
        )
    return rows
