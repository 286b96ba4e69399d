"""The lm-eval model of `eval recipes`: log-likelihoods of continuations under all recipes at once.

The unquantised model reads what stands before a continuation. Its keys and values fill the cache of each recipe. The
last token of the context and the continuation then come as one chunk, which reads that cache. The unquantised cache is
one of the recipes here. All items stand behind the same text, which is read once, and once quantised by each recipe.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from ..tasks.batches import Row, Score, batches
from ..tasks.scoring import Answer, Request, ScoringLM
from .recipe_cache import States, begun, filled, plain_cache, states_of


class RecipesLM(ScoringLM):
    """A causal language model with the cache of each recipe, for lm-eval.

    Args:
        model: Not patched.
        tokenizer: Of the model.
        text: `[tokens]` int64. Each item follows the start of this text, just long enough to fill the cache with
            `tokens` tokens.
        caches: By name, what makes an empty growing cache.
        batch_size: Rows per forward.

    Attributes:
        name: Whose answers lm-eval gets.
        chunks: Rows that were scored, by the tokens in the cache and those of the chunk that reads it.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        text: Tensor,
        caches: Mapping[str, Callable[[], DynamicCache]],
        batch_size: int,
    ) -> None:
        super().__init__(model, backend="causal", tokenizer=tokenizer, batch_size=batch_size)
        self._caches = caches
        self._text: tuple[int, ...] = ()
        self._text_states: States = ()
        if len(text):
            first = tuple(text.tolist())
            self._text_states, _, _ = self._read([first])
            self._text = first
        # Their codes of the text are computed once.
        self._texts = {name: filled(make(), self._text_states) for name, make in caches.items()}
        self.name = next(iter(caches))
        self.forget()

    def forget(self) -> None:
        """Forget the answers, before another task."""
        self.chunks: collections.Counter[tuple[int, int]] = collections.Counter()
        self._requests: Sequence[Request] = []
        self._answers: dict[str, list[Answer]] = {}

    def _loglikelihood_tokens(
        self, requests: Sequence[Request], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[Answer]:
        """The answers of the recipe `name`. Those of all recipes are computed when requests are new."""
        if requests != self._requests:
            self.forget()
            found: dict[str, list[Answer]] = {name: [(0.0, False)] * len(requests) for name in self._caches}
            for index, answers in self._answered(requests, is_quiet=disable_tqdm):
                for each, answer in zip(found.values(), answers, strict=True):
                    each[index] = answer
            self._requests, self._answers = requests, found
        return list(self._answers[self.name])

    def _context(self, tokens: Sequence[int], room: int) -> tuple[int, ...]:
        """See `ScoringLM`. With the text, the cache holds equally many tokens for all items that are not longer."""
        kept = super()._context(tokens, room)
        return self._text[: max(0, min(room, len(self._text) + 1) - len(kept))] + kept

    def _batches(self, rows: Iterable[Row]) -> Iterator[list[Row]]:
        """See `ScoringLM`. Rows of equal lengths: padding would change the blocks and dense windows of some recipes."""
        return batches(rows, self.batch_size, 0)

    @torch.inference_mode()
    def _score(self, rows: list[Row]) -> list[list[Score]]:
        """See `ScoringLM`. Each recipe is a way."""
        first = rows[0].first_chunk
        contexts = list(dict.fromkeys(row.context for row in rows))
        states, last, shared = self._read([context[:first] for context in contexts])
        place = torch.tensor([contexts.index(row.context) for row in rows], device=self.device)
        states, last = [tuple(x[place] for x in each) for each in states], last[place]
        chunk = self._table([(row.context + row.fed)[first:] for row in rows])  # [rows, tokens]
        self.chunks[first, chunk.shape[1]] += len(rows)
        begins = [len(row.context) - first for row in rows]
        found = []
        for name, make in self._caches.items():
            cache = begun(make(), states, self._texts[name], shared)
            # A context and a continuation of one token each leave nothing to feed.
            later = [self._forward(cache, chunk, None, self._positions(first, chunk.shape[1]))] if chunk.numel() else []
            found.append(self._scores(iter([last, *later]), begins, rows))
        return found

    @torch.inference_mode()
    def _read(self, firsts: Sequence[tuple[int, ...]]) -> tuple[States, Tensor, int]:
        """What the unquantised model computes on contexts of equal lengths, and its logits behind them.

        The logits are `[contexts, 1, vocab_size]`. The last result is how many tokens all contexts share with the text.
        These are not read again.
        """
        length = len(firsts[0])
        same = itertools.takewhile(lambda tokens: len(set(tokens)) == 1, zip(self._text, *firsts, strict=False))
        shared = min(sum(1 for _ in same), length - 1)
        text = [tuple(x[:, :, :shared].expand(len(firsts), -1, -1, -1) for x in each) for each in self._text_states]
        cache = filled(plain_cache(self.model), text if shared else ())
        ids = self._table([first[shared:] for first in firsts])
        logits = self._forward(cache, ids, None, self._positions(shared, length - shared), logits_to_keep=1)[:, -1:]
        return states_of(cache), logits, shared

    def _positions(self, begin: int, tokens: int) -> Tensor:
        """Of consecutive tokens, `[1, tokens]` int64."""
        return torch.arange(begin, begin + tokens, device=self.device).unsqueeze(0)
