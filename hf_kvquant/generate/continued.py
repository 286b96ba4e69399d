"""Assisted decoding over a cache that holds tokens already: the first forward reads only those that it lacks.

transformers cuts a prompt to them in its other loops. Its assisted loop gives the model the whole text again (5.17 to
5.24), so the cache would hold the first tokens twice, and the model would find all later ones at wrong positions.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterable
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor

from ..cache.kvquant_cache import KVQuantCache
from ..upstream.releases import CACHE

_METHOD = "prepare_inputs_for_generation"


def read_only_new(model: Any, cache: KVQuantCache, num_tokens: int | None) -> None:
    """Cut the text of the next first forward over a cache to what it lacks. That forward undoes it, or `undo`.

    Args:
        model: Whose assisted loop comes next.
        cache: Of the call. It holds tokens.
        num_tokens: Of the whole text, as far as known.
    """
    with _lock:
        method = model.__dict__.get(_METHOD)
        if not isinstance(method, _Firsts):
            method = model.__dict__[_METHOD] = _Firsts(model)
        method.waiting[cache] = num_tokens


def undo(model: Any, caches: Iterable[KVQuantCache]) -> None:
    """Undo `read_only_new` for the caches of a call that has ended: it may have raised before its first forward."""
    method = model.__dict__.get(_METHOD)
    if isinstance(method, _Firsts):
        method.forget(caches)


_lock = threading.Lock()


class _Firsts:
    """Prepares the inputs of forwards in place of the model's own method, while calls wait for their first one.

    Other calls of the same model may come in between, in other threads or nested: an assistant that is the model
    itself, or its first layers, generates before the model's own first forward. So each cache is waited for by itself.

    Attributes:
        waiting: By cache, the tokens of its whole text, as far as known.
    """

    def __init__(self, model: Any) -> None:
        self._model: Any = model
        self.waiting: WeakKeyDictionary[KVQuantCache, int | None] = WeakKeyDictionary()
        self._own, self._prepare = model.__dict__.get(_METHOD), getattr(model, _METHOD)
        functools.update_wrapper(self, self._prepare)  # generate looks at the signature

    def __call__(self, input_ids: Tensor, next_sequence_length: int | None = None, **kwargs: Any) -> Any:
        cache: Any = kwargs.get(CACHE)
        if cache in self.waiting:
            num_tokens = self.waiting[cache]
            self.forget([cache])
            if kwargs.get("is_first_iteration") and next_sequence_length is None:
                next_sequence_length = _lacking(input_ids, kwargs.get("inputs_embeds"), cache, num_tokens)
        return self._prepare(input_ids, next_sequence_length=next_sequence_length, **kwargs)

    def forget(self, caches: Iterable[Any]) -> None:
        """Wait for these caches no more. If that was all, the model has its own method again."""
        with _lock:
            for cache in caches:
                self.waiting.pop(cache, None)
            if not self.waiting and self._model.__dict__.get(_METHOD) is self:
                del self._model.__dict__[_METHOD]
                if self._own is not None:
                    self._model.__dict__[_METHOD] = self._own


def _lacking(input_ids: Tensor, embeddings: Tensor | None, cache: Any, num_tokens: int | None) -> int:
    """How many of these tokens, the text and what is proposed behind it, a cache lacks.

    Raises:
        NotImplementedError: The text comes as embeddings.
        ValueError: Tokens are missing that the cache holds.
    """
    held: int = cache.num_tokens
    if embeddings is not None:
        raise NotImplementedError(
            f"generate: `inputs_embeds` must be None for assisted decoding over a cache that holds tokens, got "
            f"{list(embeddings.shape)}. Pass input_ids, or leave the assistant or prompt lookup out."
        )
    if num_tokens is not None and input_ids.shape[1] < num_tokens:
        raise ValueError(
            f"generate: `input_ids` must be the whole text for assisted decoding, also the {held} tokens that "
            f"`{CACHE}` holds, got {input_ids.shape[1]} of {num_tokens} tokens."
        )
    return input_ids.shape[1] - held
