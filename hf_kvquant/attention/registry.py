"""The attention function and the mask function that hf_kvquant registers with transformers: prefill, decode, fallback.

Raw tensors (the first chunk, layers of other caches) go to the attention implementation that the model had before,
called `prev` here, with the mask that it would have got. Handles go to the decode kernel. For them the mask function
returns a 4-D int32 tensor of bounds: transformers passes 4-D masks through unchanged, and its shape stays the same.
What the kernel does not support goes to `prev` on dequantised tensors, with a mask made from the bounds.

transformers passes neither layer nor cache to the mask function, so there is one registered name per `prev`:
`hf_kvquant` over sdpa, `hf_kvquant-eager`, and one for each other implementation.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    causal_mask_function,
    sliding_window_causal_mask_function,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..cache.handle import KVHandle, KVLength, MaskNotes
from ..cache.support import check_layers
from ..models.layers import count_layers

NAME = "hf_kvquant"
NOT_QUANTIZED = "nothing is quantised in this layer"

# What transformers passes to attention functions, apart from tensors: these do not change the result ...
_IGNORED = frozenset(
    ("position_ids", "use_cache", "deterministic", "is_causal", "layer_idx", "logits_to_keep", "cache_position")
)
# ... the kernel supports these ...
_SERVED = frozenset(("sliding_window", "softcap", "s_aux"))
# ... and these are refused: sparse attention picks keys itself, and `sinks` differ from query to query.
_REFUSED = frozenset(("indices", "block_indices", "sinks"))
_KNOWN = _IGNORED | _SERVED | _REFUSED


def implementation_name(prev: str) -> str:
    """The name of our attention over `prev`, which is registered on the first call.

    Args:
        prev: The attention implementation that a model had before, such as `"sdpa"`, `"eager"` or
            `"flash_attention_2"`.

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


# --- masks ------------------------------------------------------------------------------------------------------------


def attention_mask(
    *,
    kv_length: int,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    prev: str,
    **kwargs: Any,
) -> Any:
    """The mask for one kind of layer, called by `transformers.masking_utils`.

    Args:
        kv_length: A `KVLength` if the layers are ours.
        mask_function: Decides whether a query sees a key.
        attention_mask: `[batch, tokens]` bool, False for padding; `None` without padding.
        prev: The implementation for everything else.
        **kwargs: As transformers passes them.

    Returns:
        For plain causal masks over handles the bounds, `[2, batch, 1, 1]` int32: the number of left-padding tokens, and
        the position of the first query. A sliding window adds the window (`[3, batch, 1, 1]`), and in a static cache,
        whose keys cover all positions, a zero as well (`[4, batch, 1, 1]`). `None` if bounds are not needed: one query,
        no padding, a growing cache.
        Otherwise the mask that `prev` needs.
    """
    if isinstance(kv_length, KVLength):
        notes = kv_length.notes
        _check_model(notes, kwargs.get("config"))
        is_decode_step = kwargs["q_length"] == 1 and not kv_length.is_first_chunk
        # Reading the mask makes the host wait for the device, so a decode step relies on what earlier chunks showed.
        if attention_mask is not None and not is_tracing(attention_mask):
            if attention_mask.device.type == "cpu" or not is_decode_step:
                notes.has_holes = notes.has_holes or _has_holes(attention_mask)
        starts = None if attention_mask is None else num_pads(attention_mask)
        if kv_length.is_first_chunk or not torch.compiler.is_compiling():
            notes.starts = starts
            notes.has_seen_mask = notes.has_seen_mask or not torch.compiler.is_compiling()
        is_plain = _is_plain(mask_function, kv_length.window, **kwargs)
        if is_plain and not kv_length.is_first_chunk and not notes.has_holes:
            return _bounds(starts, kv_length.window, **kwargs)
    return _mask_of(prev)(
        kv_length=int(kv_length), mask_function=mask_function, attention_mask=attention_mask, **kwargs
    )


def _check_model(notes: MaskNotes, config: PreTrainedConfig | None) -> None:
    """Refuse a cache made for other layers. A forward asks for its mask before it runs any layer."""
    if torch.compiler.is_compiling() or config is None or notes.num_layers is None or config is notes.model_config:
        return
    check_layers("forward", "past_key_values", notes.num_layers, count_layers(config))
    notes.model_config = config


def _is_plain(
    mask_function: Callable[..., Any],
    window: int,
    *,
    q_length: int,
    use_vmap: bool = False,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    **_: Any,
) -> bool:
    """Whether a mask is causal, with a sliding window or without, and hides nothing else.

    The function of a sliding window is a new object in every call. If a model adds to it, or transformers does for
    images, `use_vmap` is set or the causal mask may not be skipped. The latter makes no difference to a single query.
    """
    if use_vmap:
        return False
    if window == 0:
        return mask_function is causal_mask_function
    return (
        mask_function is not causal_mask_function and local_size == window and (allow_is_causal_skip or q_length == 1)
    )


def _bounds(
    starts: Tensor | None,
    window: int,
    *,
    batch_size: int,
    q_length: int,
    q_offset: int | Tensor,
    device: torch.device,
    **_: Any,
) -> Tensor | None:
    """The bounds for attention over handles, from the arguments of a mask function. See `attention_mask`.

    The kernel knows the offset itself. Models that change keys or values, and so pass dense tensors, need it to mask
    them: with several queries, or with the unused capacity of a static cache.
    """
    is_growing = isinstance(q_offset, int)
    if starts is None and q_length == 1 and is_growing:
        return None
    num_bounds = 2 if not window else 3 if is_growing else 4
    bounds = torch.zeros((num_bounds, batch_size, 1, 1), dtype=torch.int32, device=device)
    if starts is not None:
        bounds[0] = starts.view(-1, 1, 1)
    bounds[1] = q_offset
    if window:
        bounds[2] = window
    return bounds


def num_pads(mask: Tensor) -> Tensor:
    """Left-padding tokens of each sequence (`[batch]` int32) in a `[batch, tokens]` bool mask."""
    return (mask.cumsum(-1) == 0).sum(-1, dtype=torch.int32)


def _has_holes(mask: Tensor) -> bool:
    """Whether a `[batch, tokens]` bool mask hides a token after one that it shows."""
    return bool((mask[:, :-1] & ~mask[:, 1:]).any())


def is_tracing(tensor: Tensor) -> bool:
    return torch.compiler.is_compiling() or isinstance(tensor, torch._subclasses.FakeTensor)


def _mask_of(prev: str) -> Callable[..., Any]:
    mask_function: Callable[..., Any] = ALL_MASK_ATTENTION_FUNCTIONS[prev]
    return mask_function


# --- attention --------------------------------------------------------------------------------------------------------


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor | KVHandle,
    value: Tensor | KVHandle,
    attention_mask: Tensor | None,
    *,
    prev: str,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention of one layer, called through `transformers.AttentionInterface`.

    Args:
        module: The layer's attention module.
        query: `[batch, num_q_heads, q_len, head_dim]`, after RoPE.
        key: `[batch, num_kv_heads, tokens, head_dim]`, or a handle.
        value: The same.
        attention_mask: What `attention_mask` above returned, or a mask of the user's own.
        prev: The implementation for everything that is not ours.
        dropout: Of the attention weights; only `prev` supports it.
        scaling: Multiplies query · key; `None` means `head_dim ** -0.5`.
        **kwargs: Model-specific.

    Returns:
        out: `[batch, q_len, num_q_heads, head_dim]`.
        weights: `None`; for raw tensors what `prev` returns.

    Raises:
        NotImplementedError: Over a quantised cache, the call asks for attention weights, picks the keys itself or
            has a sink for each query.
    """
    if not isinstance(key, KVHandle) or not isinstance(value, KVHandle):
        if is_bounds(attention_mask):  # the model has changed what `update` gave it
            attention_mask = _mask_over_changed(prev, query, key.shape[2], attention_mask)
        return call_previous(
            prev, module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
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
    step, storage = key.step, key.step.storage
    reason = _why_not_kernel(module, query, attention_mask, storage.is_quantized, dropout, kwargs)
    if reason is None:
        out, _ = storage.attend(
            query,
            softmax_scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
            starts=None if attention_mask is None else attention_mask[0].view(-1),
            sinks=kwargs.get("s_aux"),
            # sdpa has no softcap, and older versions of transformers drop it. Decode must do the same as prefill.
            softcap=0.0 if prev == "sdpa" else kwargs.get("softcap") or 0.0,
            sliding_window=kwargs.get("sliding_window") or 0,
        )
        return out, None
    if is_bounds(attention_mask) and not torch.compiler.is_compiling():
        storage.starts = attention_mask[0].view(-1)  # padding may go on after the first chunk
    dense_key, dense_value = step.dense(reason)
    mask = attention_mask
    if mask is None or is_bounds(mask):
        offset = storage.query_offset(query.shape[2])
        mask = _dense_mask(prev, query, dense_key.shape[2], offset, mask, storage.window, storage.offset)
    return call_previous(prev, module, query, dense_key, dense_value, mask, dropout=dropout, scaling=scaling, **kwargs)


def is_bounds(mask: Tensor | None) -> TypeGuard[Tensor]:
    """Whether a mask is one that `attention_mask` makes for handles."""
    return isinstance(mask, Tensor) and mask.dtype == torch.int32 and mask.ndim == 4 and mask.shape[2:] == (1, 1)


def _why_not_kernel(
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
            if not _is_harmless(name):
                return f"the model passes '{name}' to attention"
    return None


def _is_harmless(name: str) -> bool:
    """Whether an argument is about packed sequences or outputs, which change nothing where there is a cache."""
    return name.startswith(("cu_seq_lens", "max_length", "output_", "return_", "num_items"))


def _mask_over_changed(prev: str, query: Tensor, kv_length: int, bounds: Tensor) -> Any:
    """The mask that `prev` would have got for the dense keys that a model has made from handles."""
    if bounds.shape[0] == 2:
        return _dense_mask(prev, query, kv_length, bounds[1, 0, 0, 0], bounds)
    if bounds.shape[0] == 4:
        return _dense_mask(prev, query, kv_length, bounds[1, 0, 0, 0], bounds, bounds[2, 0, 0, 0])
    offset, window = (int(bound) for bound in bounds[1:, 0, 0, 0])  # a growing cache: no compiled step waits here
    return _dense_mask(prev, query, kv_length, offset, bounds, window, offset + query.shape[2] - kv_length)


def _dense_mask(
    prev: str,
    query: Tensor,
    kv_length: int,
    offset: int | Tensor,
    bounds: Tensor | None,
    window: int | Tensor = 0,
    kv_offset: int = 0,
) -> Any:
    """The mask that `prev` would have got for a causal mask with left padding over a dense cache.

    Args:
        prev: The implementation.
        query: `[batch, num_q_heads, q_len, head_dim]`.
        kv_length: Tokens of the keys.
        offset: Position of the first query.
        bounds: See `attention_mask`.
        window: Positions visible to a query; 0 for all. A tensor is never 0.
        kv_offset: Position of the first key.
    """
    batch, _, q_len, _ = query.shape
    mask = None
    if bounds is not None:
        mask = torch.arange(kv_offset + kv_length, device=query.device) >= bounds[0].view(-1, 1)
    is_sliding = isinstance(window, Tensor) or window > 0
    sliding = {"local_size": window} if is_sliding else {}
    within: Any = sliding_window_causal_mask_function
    return _mask_of(prev)(
        batch_size=batch,
        q_length=q_len,
        kv_length=kv_length,
        q_offset=offset,
        kv_offset=kv_offset,
        mask_function=within(window) if is_sliding else causal_mask_function,
        attention_mask=mask,
        allow_is_causal_skip=isinstance(offset, int),
        dtype=query.dtype,
        use_vmap=False,
        device=query.device,
        **sliding,
    )


# --- the implementation before ours -----------------------------------------------------------------------------------


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
