"""Models that drop their cache at a length: there they switch to other RoPE factors, which change all earlier keys.

Phi-3 and its relatives do so in `prepare_inputs_for_generation`, with plain RoPE and with an empty cache, too, and go
on over a cache that the model makes for itself. Here the call keeps its cache: it is emptied if it holds tokens, and
filled again from the whole text, so that keys get the new factors.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor

from ..cache.kvquant_cache import KVQuantCache
from ..models.rope import recomputes
from ..upstream.releases import CACHE

_METHOD = "prepare_inputs_for_generation"


def patch(model: Any) -> None:
    """Let a model that switches RoPE factors keep our caches. `unpatch` undoes it; other models stay as they are."""
    if recomputes(model):
        # A partial of a module-level function survives pickle and deepcopy with the model.
        setattr(model, _METHOD, functools.partial(_prepare_inputs, model))


def unpatch(model: Any) -> None:
    """Undo `patch`."""
    method = model.__dict__.get(_METHOD)
    if isinstance(method, functools.partial) and method.func is _prepare_inputs:
        del model.__dict__[_METHOD]


def _prepare_inputs(
    model: Any, input_ids: Tensor, *, inputs_embeds: Tensor | None = None, **kwargs: Any
) -> dict[str, Any]:
    """Replaces `prepare_inputs_for_generation`; same arguments and results, but that a cache of ours stays.

    `generate` takes embeddings only from models whose method names them.
    """
    prepare, cache = getattr(type(model), _METHOD), kwargs.get(CACHE)
    if inputs_embeds is not None:
        kwargs["inputs_embeds"] = inputs_embeds
    inputs: dict[str, Any] = prepare(model, input_ids, **kwargs)
    if not isinstance(cache, KVQuantCache) or inputs.get(CACHE) is not None:
        return inputs
    if not all(storage.is_empty for storage in cache.storages):
        _check_whole(model, input_ids, kwargs.get("attention_mask"))
        cache.reset()
        # Phi-4-multimodal would still cut its inputs to the newest token.
        inputs = prepare(model, input_ids, **{**kwargs, CACHE: None, "next_sequence_length": None})
    return {**inputs, CACHE: cache}


def _check_whole(model: Any, input_ids: Tensor, mask: Tensor | None) -> None:
    """Refuse to compute keys again from a part of the text: a prompt in chunks, after tokens of an earlier call."""
    if mask is not None and mask.shape[-1] != input_ids.shape[1]:
        raise NotImplementedError(
            f"generate: `prefill_chunk_size` must be None for {type(model).__name__} over a cache with tokens, got a "
            f"chunk of {input_ids.shape[1]} of {mask.shape[-1]} tokens: the model switches its RoPE factors here, and "
            "all keys have to be computed again. Leave it out."
        )
