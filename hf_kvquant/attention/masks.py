"""The mask function that hf_kvquant registers with transformers, and masks for what falls back.

Raw tensors get the mask of `prev`, the attention implementation that the model had before. For handles the mask
function returns bounds: a small 4-D int32 tensor, which transformers passes through unchanged, and whose shape stays
the same. Attention on dequantised tensors gets `prev`'s mask, made from the bounds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeGuard

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    causal_mask_function,
    sliding_window_causal_mask_function,
)

from ..cache.handle import KVLength, MaskNotes
from ..cache.support import check_layers
from ..models.layers import count_layers
from ..ops import is_uneven
from ..storage import padding
from ..upstream.releases import CACHE


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
        # Whether the mask hides a token after one that it shows. Reading it makes the host wait for the device, so a
        # decode step relies on what earlier chunks showed.
        starts = None if attention_mask is None else num_pads(attention_mask)
        if attention_mask is not None and starts is not None and not is_tracing(attention_mask):
            if attention_mask.device.type == "cpu" or not is_decode_step:
                hides_later = attention_mask[:, :-1] & ~attention_mask[:, 1:]
                notes.has_holes = notes.has_holes or bool(hides_later.any())
            if not is_decode_step:
                notes.is_uneven = is_uneven(starts, attention_mask.shape[1])
        if not kv_length.is_first_chunk:
            if not torch.compiler.is_compiling():
                notes.check_attention()
            follow_padding(notes, starts, may_wait=not is_decode_step or kwargs["device"].type == "cpu")
        if kv_length.is_first_chunk or not torch.compiler.is_compiling():
            notes.starts = starts
            notes.has_seen_mask = notes.has_seen_mask or not torch.compiler.is_compiling()
        is_plain = _is_plain(mask_function, kv_length.window, kwargs)
        if is_plain and not kv_length.is_first_chunk and not notes.has_holes and not notes.is_bypassed:
            return _bounds(starts, kv_length.window, kwargs)
    return _mask_of(
        prev, kv_length=int(kv_length), mask_function=mask_function, attention_mask=attention_mask, **kwargs
    )


def _mask_of(prev: str, **kwargs: Any) -> Any:
    """The mask of `prev`; `None` if only its attention function is registered. transformers passes no mask then."""
    return ALL_MASK_ATTENTION_FUNCTIONS[prev](**kwargs) if has_masks(prev) else None


def has_masks(prev: str) -> bool:
    """Whether a mask function is registered for an attention implementation."""
    return prev in ALL_MASK_ATTENTION_FUNCTIONS


def follow_padding(notes: MaskNotes, starts: Tensor | None, *, may_wait: bool) -> None:
    """Let a cache that holds tokens count the first of them from where a new mask says that padding ends.

    Without `may_wait`, only if padding comes for the first time or goes.

    Raises:
        ValueError: See `padding.follow`.
    """
    is_told = bool(notes.padded) and (may_wait or (starts is None) != (notes.padded[0].starts is None))
    if is_told and not torch.compiler.is_compiling() and not (starts is not None and is_tracing(starts)):
        padding.follow(notes.padded, starts)


def _check_model(notes: MaskNotes, config: PreTrainedConfig | None) -> None:
    """Refuse a cache made for other layers. A forward asks for its mask before it runs any layer."""
    if torch.compiler.is_compiling() or config is None or notes.num_layers is None or config is notes.model_config:
        return
    check_layers("forward", CACHE, notes.num_layers, count_layers(config))
    notes.model_config = config


def _is_plain(mask_function: Callable[..., Any], window: int, kwargs: Mapping[str, Any]) -> bool:
    """Whether a mask is causal, with a sliding window or without, and hides nothing else.

    The function of a sliding window is a new object in every call. If a model changes it, `use_vmap` is set. If
    transformers lets the tokens of a picture see each other, the causal mask may not be skipped. That shows later
    tokens to earlier ones, so it makes no difference to a single query, which comes last. In a static cache without a
    window, there are positions behind it.
    """
    if kwargs.get("use_vmap"):
        return False
    is_changed = not kwargs.get("allow_is_causal_skip", True)
    if window == 0:
        is_last = kwargs["q_length"] == 1 and isinstance(kwargs["q_offset"], int)
        return mask_function is causal_mask_function or (is_changed and is_last)
    is_changed = is_changed and kwargs["q_length"] > 1
    return mask_function is not causal_mask_function and kwargs.get("local_size") == window and not is_changed


def _bounds(starts: Tensor | None, window: int, kwargs: Mapping[str, Any]) -> Tensor | None:
    """The bounds for attention over handles, from the arguments of a mask function. See `attention_mask`.

    The kernel knows the offset itself. Models that change keys or values, and so pass dense tensors, need it to mask
    them: with several queries, or with the unused capacity of a static cache.
    """
    is_growing = isinstance(kwargs["q_offset"], int)
    if starts is None and kwargs["q_length"] == 1 and is_growing:
        return None
    num_bounds = 2 if not window else 3 if is_growing else 4
    bounds = torch.zeros((num_bounds, kwargs["batch_size"], 1, 1), dtype=torch.int32, device=kwargs["device"])
    if starts is not None:
        bounds[0] = starts.view(-1, 1, 1)
    bounds[1] = kwargs["q_offset"]
    if window:
        bounds[2] = window
    return bounds


def num_pads(mask: Tensor) -> Tensor:
    """Left-padding tokens of each sequence (`[batch]` int32) in a `[batch, tokens]` bool mask."""
    return (mask.cumsum(-1) == 0).sum(-1, dtype=torch.int32)


def is_tracing(tensor: Tensor) -> bool:
    return torch.compiler.is_compiling() or isinstance(tensor, torch._subclasses.FakeTensor)


def is_bounds(mask: Tensor | None) -> TypeGuard[Tensor]:
    """Whether a mask is one that `attention_mask` makes for handles."""
    return isinstance(mask, Tensor) and mask.dtype == torch.int32 and mask.ndim == 4 and mask.shape[2:] == (1, 1)


def mask_over_changed(prev: str, query: Tensor, kv_length: int, bounds: Tensor) -> Any:
    """The mask that `prev` would have got for the dense keys that a model has made from handles."""
    offset, window = bounds[1, 0, 0, 0], bounds[2, 0, 0, 0] if len(bounds) > 2 else 0
    if len(bounds) != 3:
        return dense_mask(prev, query, kv_length, offset, bounds, window)
    first = int(offset)  # a growing cache: no compiled step waits here
    return dense_mask(prev, query, kv_length, first, bounds, int(window), first + query.shape[2] - kv_length)


def dense_mask(
    prev: str,
    query: Tensor,
    kv_length: int,
    offset: int | Tensor,
    bounds: Tensor | None,
    window: int | Tensor = 0,
    kv_offset: int = 0,
) -> Any:
    """The mask that `prev` would have got for a causal mask with left padding over a dense cache.

    `offset` and `kv_offset` are the positions of the first query and key. `bounds` is as `attention_mask` makes them.
    A query sees `window` positions; 0 is for all, and a tensor is never 0.
    """
    batch, _, q_len, _ = query.shape
    mask = None
    if bounds is not None:
        mask = torch.arange(kv_offset + kv_length, device=query.device) >= bounds[0].view(-1, 1)
    is_sliding = isinstance(window, Tensor) or window > 0
    sliding = {"local_size": window} if is_sliding else {}
    within: Any = sliding_window_causal_mask_function
    return _mask_of(
        prev,
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
