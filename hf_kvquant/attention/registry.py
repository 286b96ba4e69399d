"""The attention function that hf_kvquant registers with transformers: prefill, decode, fallback.

Raw tensors (the first chunk, layers of other caches) go to the attention implementation that the model had before,
called `prev` here. Handles go to the decode kernel. What the kernel does not support goes to `prev` on dequantised
tensors. transformers passes neither layer nor cache to the mask function (`masks.py`), so there is one registered name
per `prev`: `hf_kvquant` over sdpa, `hf_kvquant-eager`, and one for each other implementation.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..cache.handle import ATTENTION, KVHandle, KVStep
from ..models.text_config import decoder_part, text_config_of
from ..state import notes_on
from ..storage.layer_store import LayerStore
from . import latent
from .masks import attention_mask, dense_mask, is_bounds, mask_over_changed

NAME = "hf_kvquant"
NOT_QUANTIZED = "nothing is quantised in this layer"

# What transformers passes to attention functions, apart from tensors: these do not change the result ...
_IGNORED = frozenset(
    (
        "position_ids",
        "use_cache",
        "deterministic",
        "is_causal",
        "layer_idx",
        "logits_to_keep",
        "cache_position",
        "tokenizer",  # `generate` hands the one that stop strings need on to the model (5.24)
    )
)
# ... the kernel supports these ...
_SERVED = frozenset(("sliding_window", "softcap", "s_aux"))
# ... and these are refused: sparse attention picks keys itself.
_REFUSED = frozenset(("indices", "block_indices"))
# Arguments about packed sequences or outputs, which change nothing where there is a cache.
_HARMLESS = ("cu_seq_lens", "max_length", "output_", "return_", "num_items")
_KNOWN = _IGNORED | _SERVED | _REFUSED
_NEVER_REFUSED = _IGNORED | _SERVED


# Decoders that join the mask of their tokens to the encoder's mask, so that it has to be a tensor.
_JOIN_MASKS = ("t5gemma2_decoder",)


def joins_masks(model: PreTrainedModel) -> bool:
    """Whether a model's decoder computes with its masks, so that it keeps the attention implementation that it has."""
    return decoder_part(model.config).model_type in _JOIN_MASKS


def implementation_name(prev: str) -> str:
    """The name of our attention over `prev`, such as `"sdpa"` or `"eager"`, which is registered on the first call.

    Raises:
        ValueError: transformers has no such implementation.
    """
    if is_ours(prev):
        return prev
    if prev != "eager" and prev not in ALL_ATTENTION_FUNCTIONS.valid_keys():
        raise ValueError(
            f"patch: the model's attention implementation must be 'eager' or one of "
            f"{list(ALL_ATTENTION_FUNCTIONS.valid_keys())}, got {prev!r}. Set one with model.set_attn_implementation."
        )
    # A name that contains "flash" would make transformers load flash attention for it.
    name = NAME if prev == "sdpa" else f"{NAME}-{prev.replace('flash_attention_', 'fa')}"
    if name not in ALL_ATTENTION_FUNCTIONS.valid_keys():
        AttentionInterface.register(name, functools.partial(attention, prev=prev))
        AttentionMaskInterface.register(name, functools.partial(attention_mask, prev=prev))
    return name


def is_ours(name: str | None) -> bool:
    """Whether an attention implementation is one that we registered."""
    return name is not None and (name == NAME or name.startswith(f"{NAME}-"))


def previous_of(name: str) -> str:
    """The implementation that one of ours goes over, such as `"sdpa"` for `"hf_kvquant"`."""
    function: Any = ALL_ATTENTION_FUNCTIONS[name]
    previous: str = function.keywords["prev"]
    return previous


def set_attention(model: PreTrainedModel, name: str) -> None:
    """Set the attention implementation of the text model only."""
    text_config = decoder_part(model.config)
    if text_config._attn_implementation == name or notes_on(model).keeps_attention or joins_masks(model):
        return
    for key in model.config.sub_configs:
        if getattr(model.config, key, None) is text_config:
            model.set_attn_implementation({key: name})
            break
    else:
        # The model's own config. An encoder-decoder has one for both halves, and `text_config` is a copy of it.
        model.set_attn_implementation(name)
        # T5 gives each half a copy of its config, of the same class, which transformers 5.17 does not update.
        config = model.config
        for part in model.modules():
            if isinstance(part, PreTrainedModel) and part.config is not config and type(part.config) is type(config):
                part.set_attn_implementation(config._attn_implementation)
    if text_config_of(model)._attn_implementation != name:
        notes_on(model).keeps_attention = True  # transformers would warn at every attempt


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor | KVHandle,
    value: Tensor | KVHandle,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    *,
    prev: str,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention of one layer, called through `transformers.AttentionInterface`.

    Args:
        module: The layer's attention module.
        query: `[batch, num_q_heads, q_len, head_dim]`, after RoPE.
        key, value: `[batch, num_kv_heads, tokens, head_dim]` each, or handles.
        attention_mask: What `masks.attention_mask` returned, or a mask of the user's own.
        dropout: Of the attention weights; only `prev` supports it.
        scaling: Multiplies query · key; `None` means `head_dim ** -0.5`.
        prev: The implementation for everything that is not ours.
        **kwargs: Model-specific.

    Returns:
        `[batch, q_len, num_q_heads, head_dim]`, and `None`; for raw tensors what `prev` returns.

    Raises:
        NotImplementedError: Over a quantised cache, the call asks for attention weights or picks the keys itself.
    """
    if not isinstance(key, KVHandle) or not isinstance(value, KVHandle):
        if not torch.compiler.is_compiling():
            ATTENTION.calls += 1
        if is_bounds(attention_mask):  # the model has changed what `update` gave it
            attention_mask = mask_over_changed(prev, query, key.shape[2], attention_mask)
        return call_previous(
            prev, module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    if not kwargs.keys() <= _NEVER_REFUSED:
        check_request(module, kwargs)
    step, storage = key.step, key.step.storage
    if latent.keeps_latent(module):
        return _over_latents(prev, module, query, step, attention_mask, dropout, scaling, kwargs)
    reason = why_not_kernel(prev, module, query, attention_mask, storage.formats.is_quantized, dropout, kwargs)
    if reason is None:
        out, _ = storage.attend(
            query,
            softmax_scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
            starts=None if attention_mask is None else attention_mask[0].view(-1),
            is_uneven=step.is_uneven,
            **options_of(prev, kwargs),
        )
        return out, None
    _note_starts(storage, attention_mask)
    dense = step.dense(reason)
    mask = _mask_over(prev, query, storage, attention_mask)
    return call_previous(prev, module, query, *dense, mask, dropout=dropout, scaling=scaling, **kwargs)


def _over_latents(
    prev: str,
    module: nn.Module,
    query: Tensor,
    step: KVStep,
    mask: Tensor | None,
    dropout: float,
    scaling: float | None,
    kwargs: dict[str, Any],
) -> tuple[Tensor, Tensor | None]:
    """`attention` over the handles of latents and rope parts: absorbed, or over keys and values made of them."""
    storage, q_len = step.storage, query.shape[2]
    plain = None if is_bounds(mask) else mask
    reason = why_not_kernel(prev, module, query, None, True, dropout, kwargs) or latent.why_expanded(module, plain)
    _note_starts(storage, mask)
    if reason is None and q_len <= latent.largest_absorbed(module):
        softmax_scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        starts = mask[0].view(-1) if is_bounds(mask) else None
        make_mask = functools.partial(_mask_over, "sdpa", query, storage, mask)
        out = latent.attend_latent(module, query, storage, starts, make_mask, softmax_scale, is_causal=plain is None)
        return out, None
    if reason is not None:
        dense = step.dense(reason)
    else:
        dense = storage.dense_step()
        if storage.formats.is_quantized:
            storage.note_dequantized(q_len)
    expanded = latent.expand(module, *dense)
    mask = _mask_over(prev, query, storage, mask)
    return call_previous(prev, module, query, *expanded, mask, dropout=dropout, scaling=scaling, **kwargs)


def _note_starts(storage: LayerStore, mask: Tensor | None) -> None:
    if is_bounds(mask) and not torch.compiler.is_compiling():
        storage.starts = mask[0].view(-1)  # padding may go on after the first chunk


def _mask_over(prev: str, query: Tensor, storage: LayerStore, mask: Tensor | None) -> Any:
    """The mask that `prev` would have got over the dense tokens of a layer."""
    if mask is not None and not is_bounds(mask):
        return mask
    offset = storage.query_offset(query.shape[2])
    return dense_mask(prev, query, storage.num_shown, offset, mask, storage.window, storage.offset)


def options_of(prev: str, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """What a call of attention asks of the op: the options of `ops.Operands.decode` that models pass."""
    return {
        "sinks": kwargs.get("s_aux"),
        # sdpa has no softcap, and older versions of transformers drop it. Decode must do the same as prefill.
        "softcap": 0.0 if prev == "sdpa" else kwargs.get("softcap") or 0.0,
        "sliding_window": kwargs.get("sliding_window") or 0,
    }


def check_request(module: nn.Module, kwargs: Mapping[str, Any]) -> None:
    """Refuse what attention over codes cannot do, whatever computes it."""
    for name in _REFUSED:
        if kwargs.get(name) is not None:
            raise NotImplementedError(
                f"attention: `{name}` must be None over a quantised cache, got a value. The attention of "
                f"{type(module).__name__} is not supported. Leave the model unpatched."
            )
    if kwargs.get("output_attentions"):
        raise NotImplementedError(
            "attention: `output_attentions` must be False over a quantised cache, got True: attention weights are "
            "never formed. Unpatch the model to look at them."
        )


def why_not_kernel(
    prev: str,
    module: nn.Module,
    query: Tensor,
    mask: Tensor | None,
    is_quantized: bool,
    dropout: float,
    kwargs: dict[str, Any],
) -> str | None:
    """Why a layer has to attend to dense tensors, or `None` if the kernel can serve it."""
    if not is_quantized:
        return NOT_QUANTIZED
    if not is_upstream(prev):
        return not_upstream(prev)
    if mask is not None and not is_bounds(mask):
        return "the attention mask is neither causal nor left padding"
    if dropout and module.training:
        return "attention dropout"
    if kwargs.get("is_causal") is False and query.shape[2] > 1:
        return "attention is not causal"
    for name, value in kwargs.items():
        if name not in _KNOWN and value is not None and value is not False:
            if name == "position_bias":
                return "a position bias is added to the scores"
            if not name.startswith(_HARMLESS):
                return f"the model passes '{name}' to attention"
    return None


def is_upstream(prev: str) -> bool:
    """Whether the function of an implementation is transformers' own, so that it computes what the kernel does.

    Users register functions of their own, and packages wrap those that are there, also after a model is patched.
    """
    if prev == "eager":  # in the model's own file
        return True
    function: Any = ALL_ATTENTION_FUNCTIONS[prev]
    while isinstance(function, functools.partial):
        function = function.func
    return str(getattr(function, "__module__", "")).startswith("transformers.")


def not_upstream(prev: str) -> str:
    """Why codes are not attended to directly, where `is_upstream` does not hold."""
    return f"'{prev}' is not the attention that transformers ships under this name"


def call_previous(prev: str, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    """Call the attention implementation `prev`. It is looked up every time, since other packages wrap it."""
    if prev == "eager":
        # Not in the registry: every model file has its own.
        function = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
        if function is None:
            raise NotImplementedError(
                f"attention: {type(module).__name__} has no eager attention function to fall back to. "
                "Load the model with attn_implementation='sdpa'."
            )
    else:
        function = ALL_ATTENTION_FUNCTIONS[prev]
        if prev != "sdpa":
            module = _ModuleView(module, prev)  # type: ignore[assignment]
    out: tuple[Tensor, Tensor | None] = function(module, *args, **kwargs)
    return out


class _ModuleView:
    """A module whose config names `prev`: flash attention picks its kernel by that name, which is ours by now."""

    def __init__(self, target: Any, prev: str) -> None:
        self._target = target
        self._prev = prev

    def __getattr__(self, name: str) -> Any:
        if name == "config":
            return _ModuleView(self._target.config, self._prev)
        if name == "_attn_implementation":
            return self._prev
        return getattr(self._target, name)


implementation_name("sdpa")
implementation_name("eager")
