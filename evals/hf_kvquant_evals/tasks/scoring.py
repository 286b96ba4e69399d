"""What the models for lm-eval share: how its requests become rows, and logits become log-likelihoods.

A subclass says which rows a forward takes, and scores them, in one way or in several (`ScoringLM._score`).
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from lm_eval.models.huggingface import HFLM
from torch import Tensor
from transformers import Cache

from hf_kvquant.attention.backends import without_cudnn
from hf_kvquant.common.progress import show_progress
from hf_kvquant.upstream.releases import with_cache

from ..errors import CannotScore
from .batches import Row, Score

# The texts (`None` within a rolling one), then the tokens of context and continuation.
Request = tuple[tuple[str, str] | None, list[int], list[int]]
# The log-likelihood of a continuation, and whether it is the greedy one.
Answer = tuple[float, bool]


# lm-eval is only partly typed.
class ScoringLM(HFLM):  # type: ignore[misc]
    """A causal language model whose log-likelihoods read a cache. The arguments are those of lm-eval's `HFLM`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._takes = frozenset(inspect.signature(type(self.model).forward).parameters)

    def _batches(self, rows: Iterable[Row]) -> Iterator[list[Row]]:
        """The rows of each forward."""
        raise NotImplementedError

    def _score(self, rows: list[Row]) -> list[list[Score]]:
        """Score the rows of a batch, in one way or several. Returns the scores of the rows for each way."""
        raise NotImplementedError

    def _context(self, tokens: Sequence[int], room: int) -> tuple[int, ...]:
        """What stands before a continuation, at most `room` tokens."""
        return tuple(tokens[-room:])

    def _answered(self, requests: Sequence[Request], *, is_quiet: bool) -> Iterator[tuple[int, list[Answer]]]:
        """The index of each request and its answers, one for each way of scoring, as they come."""
        # Continuations that differ only in their last token (such as yes and no) are fed once.
        waiting: dict[Row, list[int]] = {}
        for index, (_, context, continuation) in enumerate(requests):
            if not 0 < len(continuation) <= self.max_length or not context:
                raise CannotScore(
                    f"loglikelihood: a continuation must have from 1 to {self.max_length} tokens and a context, got "
                    f"{len(continuation)} tokens after {len(context)}. Shorten the item, or give max_length."
                )
            room = self.max_length + 1 - len(continuation)
            waiting.setdefault(Row(self._context(context, room), tuple(continuation[:-1])), []).append(index)
        is_shown = not is_quiet and self.rank == 0
        with show_progress("log-likelihoods", len(requests), unit="item", is_shown=is_shown) as tell:
            for rows in self._batches(waiting):
                scored = self._score(rows)
                for row, *scores in zip(rows, *scored, strict=True):
                    for index in waiting[row]:
                        yield index, [_answer(score, requests[index][2][-1]) for score in scores]
                tell(sum(len(waiting[row]) for row in rows))

    def _table(self, rows: Sequence[Sequence[int]]) -> Tensor:
        """Rows, padded with zeros on the right: `[rows, longest]` int64. The copy to the device waits for it."""
        longest = max(map(len, rows))
        filled = [(*row, *(0,) * (longest - len(row))) for row in rows]
        return torch.tensor(filled, dtype=torch.int64, device=self.device)

    def _forward(self, cache: Cache, ids: Tensor, mask: Tensor | None, positions: Tensor, **options: Any) -> Tensor:
        """Logits of one chunk (`ids` and `positions`, `[batch, q_len]` int64), `[batch, q_len, vocab_size]`.

        `mask` is `[batch, old and new tokens]` int64, 0 for left padding; `None` without padding. With the option
        `logits_to_keep`, models that take it return fewer columns. `positions` may have one row for all.
        """
        options["position_ids"] = positions.expand(ids.shape[0], -1)
        precision = self.mixed_precision_dtype
        with without_cudnn(), torch.autocast(self.device.type, precision, enabled=precision is not None):
            output = self.model(
                input_ids=ids,
                attention_mask=mask,
                **with_cache(cache),
                use_cache=True,
                **{name: value for name, value in options.items() if name in self._takes},
            )
        logits: Tensor = output.logits
        return logits

    def _scores(self, pieces: Iterator[Tensor], begins: Sequence[int], rows: Sequence[Row]) -> list[Score]:
        """Reduce logits that come in pieces, `[rows, columns, vocab_size]` with consecutive columns.

        `begins` has the column of each row that predicts the first token of its continuation.
        """
        ends = [begin + len(row.fed) for begin, row in zip(begins, rows, strict=True)]
        # The token that each column predicts, where the row was fed that token. Other columns are not used.
        targets = self._table([(0,) * begin + row.fed + (0,) for begin, row in zip(begins, rows, strict=True)])
        lasts: dict[int, Tensor] = {}
        log_probs, hits = [], []
        start = 0
        for logits in pieces:
            scored = logits.float().log_softmax(-1)
            stop = start + scored.shape[1]
            target = targets[:, start:stop]
            log_probs.append(scored.gather(2, target.unsqueeze(-1)).squeeze(-1))
            hits.append(scored.argmax(-1) == target)
            for index, end in enumerate(ends):
                if start <= end < stop:
                    lasts[index] = scored[index, end - start].clone()
            start = stop
        all_log_probs, all_hits = torch.cat(log_probs, dim=1).cpu(), torch.cat(hits, dim=1).cpu()
        all_lasts = torch.stack([lasts[index] for index in range(len(rows))]).cpu()
        return [
            Score(log_probs[begin:end], bool(hits[begin:end].all()), last)
            for log_probs, hits, last, begin, end in zip(all_log_probs, all_hits, all_lasts, begins, ends, strict=True)
        ]


def _answer(score: Score, last_token: int) -> Answer:
    """The answer for a continuation that ends with a token."""
    log_likelihood = float(score.log_probs.sum() + score.last[last_token])
    return log_likelihood, score.is_greedy and int(score.last.argmax()) == last_token
