"""Attention of a batch of requests over pages of codes, registered with transformers under one name for each `prev`.

`prev` is the attention implementation that the model had before `patch`. As in `generate`, it computes the first chunk
of a prompt, which attends to its own raw keys and values. The name is not registered for masks, so that transformers
makes none.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.generation.continuous_batching.cache import PagedAttentionCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .. import ops
from ..attention import latent
from ..attention.backends import without_cudnn
from ..attention.masks import dense_mask
from ..attention.registry import (
    call_previous,
    check_request,
    implementation_name,
    options_of,
    set_attention,
    why_not_kernel,
)
from ..cache.handle import noted, noted_on
from ..common.errors import UnknownCall
from ..models.layers import layers_of
from ..models.probing import evaluating, whole_cache
from ..models.text_config import text_config_of
from .paged_cache import OF_BATCHES, PagedCache
from .state_layers import OF_STATES, StateLayers, StateProbe, why_not_grouped
from .support import INSTEAD, STATE_TYPES, WHERE, Call


def paged_name(prev: str) -> str:
    """The name of our paged attention over `prev`, such as `"sdpa"`, which is registered on the first call."""
    name = f"{implementation_name(prev)}-pages"
    if name not in ALL_ATTENTION_FUNCTIONS.valid_keys():
        AttentionInterface.register(name, functools.partial(paged_attention, prev=prev))
    return name


class Probe(PagedAttentionCache):
    """Stands for a cache while a model is looked at.

    Args:
        states: Notes who asks for states; `None` if no layer has one.

    Attributes:
        calls: Of every call of attention, the layer's index, and the shapes of keys and values.
        is_counted: Whether the model has asked how many tokens there are.
        states: See above.
    """

    def __init__(self, states: StateProbe | None = None) -> None:
        self.calls: list[Call] = []
        self.is_counted = False
        self.states = states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """See `PagedCache.get_seq_length`."""
        self.is_counted = True
        return 0

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, kwargs: dict[str, Any] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Pass on to our attention, as `PagedCache.update` does."""
        return noted(key_states, self, layer_idx), value_states

    def __getattr__(self, name: str) -> Any:
        """What layers with a state call, which `states` answers."""
        states = self.__dict__.get("states")
        if states is None or name not in OF_STATES:
            raise UnknownCall(f"asks its cache for `{name}`, which caches of batches do not have")
        return functools.partial(states.ask, name)


@torch.no_grad()
def calls_of_a_token(model: Any, prev: str, state_dtype: torch.dtype | None) -> tuple[list[Call], StateLayers | None]:
    """The calls of paged attention that a model would make for one token, and its layers with a state.

    The model is left unchanged. Layers that compute attention elsewhere, do not pass the cache on or change their keys,
    make no calls. `state_dtype` is that of recurrent states, `None` for the model's.

    Raises:
        NotImplementedError: The model counts the tokens of its cache, or steps cannot be packed for its states.
    """
    name = f"{paged_name(prev)}-probe"
    if name not in ALL_ATTENTION_FUNCTIONS.valid_keys():
        AttentionInterface.register(name, functools.partial(_note_shapes, prev=prev))
    types, _ = layers_of(text_config_of(model))
    with_states = [index for index, each in enumerate(types) if each in STATE_TYPES]

    def run(position: int) -> tuple[Probe, Tensor]:
        states = StateProbe(whole_cache(model)) if with_states else None
        probe = Probe(states)
        with contextlib.nullcontext() if states is None else states.watching(model):
            ids = {"input_ids": token, "position_ids": token + position}
            return probe, model(**ids, use_cache=False, cache=probe).logits

    before = text_config_of(model)._attn_implementation
    token = torch.zeros((1, 1), dtype=torch.long, device=model.device)
    set_attention(model, name)
    try:
        with evaluating(model):
            probe, logits = run(0)
            if probe.is_counted:
                _check_positions(model, logits, run(1)[1])
            layers = None if probe.states is None else probe.states.found(state_dtype)
            why_not = None if layers is None else layers.why_not_at(with_states) or why_not_grouped(layers)
    except UnknownCall as error:
        why_not = str(error)
    finally:
        set_attention(model, before)
    if why_not is not None:
        raise NotImplementedError(f"{WHERE}: {type(model).__name__} {why_not}. {INSTEAD}")
    return probe.calls, layers


def _check_positions(model: nn.Module, logits: Tensor, moved: Tensor) -> None:
    """Refuse a model that does not use the positions that it is told, but counts the tokens of its cache.

    Raises:
        NotImplementedError: The logits of a token are the same at another position.
    """
    if torch.equal(logits, moved):
        raise NotImplementedError(
            f"{WHERE}: {type(model).__name__} must take positions from `position_ids`, got a model that counts the "
            f"tokens of its cache, which holds those of all requests. {INSTEAD}"
        )


def _note_shapes(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, *, prev: str, **kwargs: Any
) -> Any:
    noted_cache, layer_idx = noted_on(key)
    probe = kwargs.pop("cache", None) or noted_cache
    if isinstance(probe, Probe):
        probe.calls.append((module.layer_idx if layer_idx is None else layer_idx, key.shape, value.shape))
        if probe.states is not None:
            probe.states.note_attention()
    if layer_idx is not None and latent.keeps_latent(module):
        key, value = latent.expand(module, key, value)
    return call_previous(prev, module, query, key, value, attention_mask, **kwargs)


def paged_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    *,
    prev: str,
    cache: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Write the new tokens of all requests, and attend for each to its own tokens.

    Args:
        module: The layer's attention module.
        query: `[1, num_q_heads, tokens, head_dim]`, after RoPE: the new tokens of one request after the other, then
            padding.
        key, value: `[1, num_kv_heads, tokens, head_dim]` each, or latents and rope parts, with one head.
        attention_mask: `None`.
        dropout: Of the attention weights; must be 0.
        scaling: Multiplies query · key; `None` means `head_dim ** -0.5`.
        prev: The implementation for first chunks.
        cache: A `PagedCache`, told which requests there are, or `None` if `key` has a note of it.
        **kwargs: Model-specific.

    Returns:
        `[1, tokens, num_q_heads, value head_dim]`, zero for padding, and `None`.

    Raises:
        NotImplementedError: The model asks for something that attention over codes does not support.
        RuntimeError: `cache` is not ours: the model was called while a manager has set its attention.
    """
    noted_cache, layer_idx = noted_on(key)
    cache = cache or noted_cache
    if not isinstance(cache, PagedCache):
        raise RuntimeError(
            f"continuous batching: `cache` must be the pages of a manager, got {type(cache).__name__}. Use the "
            "manager, or stop it before calling the model or generate."
        )
    kwargs = {name: value for name, value in kwargs.items() if name not in OF_BATCHES}
    check_request(module, kwargs)
    reason = why_not_kernel(prev, module, query, attention_mask, True, dropout, kwargs)
    keeps_latent = latent.keeps_latent(module)
    if reason is None and keeps_latent:
        reason = latent.why_expanded(module, attention_mask)
    if reason is not None:
        raise NotImplementedError(
            f"continuous batching: {type(module).__name__} cannot attend to pages of codes, since {reason}. {INSTEAD}"
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    layer_idx = module.layer_idx if layer_idx is None else layer_idx
    operands = cache.allocator.operands[layer_idx]
    num_tokens = query.shape[2]
    results = []
    for group in cache.groups:
        own_query, own_key, own_value = group.take(query), group.take(key), group.take(value)
        page_table = cache.allocator.page_table_of(layer_idx, group.page_table)
        held: dict[str, Any] = {"lengths": group.lengths, "page_table": page_table}
        if group.has_past and keeps_latent:
            new = own_key, own_value
            result = latent.attend_pages(module, own_query, new, operands, group.lengths, page_table, scale)
        elif group.has_past:
            options = {"softmax_scale": scale, **options_of(prev, kwargs)}
            options |= {"counters": cache.counters, "split_plan": group.split_plan}
            if group.q_len > 1 and group.q_len > ops.largest_step(operands.layout, options["sliding_window"]):
                result, _ = operands.attend_chunk(own_query, (own_key, own_value), **held, **options)
                operands.append(own_key, own_value, **held)
            else:
                result, _ = operands.decode(own_query, (own_key, own_value), **held, **options)
        else:
            operands.append(own_key, own_value, **held)
            if keeps_latent:
                own_key, own_value = latent.expand(module, own_key, own_value)
            result = _attend_raw(prev, module, own_query, own_key, own_value, scaling=scaling, **kwargs)
        results.append(result.flatten(0, 1))
    if len(results) == 1 and len(results[0]) == num_tokens:
        return results[0].unsqueeze(0), None
    is_padded = sum(map(len, results)) < num_tokens
    out = (query.new_zeros if is_padded else query.new_empty)((num_tokens, *results[0].shape[1:]))
    for group, result in zip(cache.groups, results, strict=True):
        out[group.tokens] = result
    return out.unsqueeze(0), None


def _attend_raw(prev: str, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, **kwargs: Any) -> Tensor:
    """Causal attention of whole prompts to themselves, `[requests, q_len, num_q_heads, head_dim]`, by `prev`.

    Hardly two steps have as many prompts of the same lengths.
    """
    mask = dense_mask(prev, query, query.shape[2], 0, None, window=kwargs.get("sliding_window") or 0)
    with without_cudnn():
        out, _ = call_previous(prev, module, query, key, value, mask, **kwargs)
    return out
