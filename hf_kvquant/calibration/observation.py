"""Watches a model's attention: which module attends, with which queries, keys and values, and how to attend again.

Smoothing learns all it needs about a model here, by running it and looking at what reaches attention after RoPE. Models
whose attention goes through transformers' registry are watched there, under a name that is registered only while they
are watched. The others (Falcon) are watched where they call PyTorch's `scaled_dot_product_attention`. The observers,
such as `layout.py` and `calibration.py`, decide what to do with it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import AttentionMaskInterface, Cache, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..attention.registry import call_previous, set_attention
from ..models.probing import evaluating
from ..models.text_config import text_config_of

NAME = "hf_kvquant-observed"


@dataclasses.dataclass(frozen=True)
class Observation:
    """One layer's attention, about to be computed.

    Attributes:
        layer_idx: The layer, as caches count them.
        module: The attention module.
        query: `[batch, num_q_heads, tokens, head_dim]`, after RoPE.
        key: `[batch, num_kv_heads, tokens, head_dim]`, after RoPE.
        value: `[batch, num_kv_heads, tokens, value head_dim]`.
        attend: The layer's own attention (mask, scaling, cap and sinks included) on tensors shaped like these three, in
            any floating dtype that all of them share. Returns `[batch, tokens, num_q_heads, value head_dim]`.
    """

    layer_idx: int
    module: nn.Module
    query: Tensor
    key: Tensor
    value: Tensor
    attend: Callable[[Tensor, Tensor, Tensor], Tensor]


# Called before each attention. It may return a replacement for attention's output, shaped as by `attend`, or `None`.
Observer = Callable[[Observation], Tensor | None]


@contextlib.contextmanager
def observed(model: PreTrainedModel, observer: Observer) -> Iterator[None]:
    """Call `observer` for every attention of the text model while the block runs, then restore the model.

    Inside the block the model is in evaluation mode, without gradients. It attends through PyTorch's
    `scaled_dot_product_attention`, or eagerly if it does not support that.
    """
    text_config = text_config_of(model)
    before = text_config._attn_implementation
    prev = "sdpa" if model._supports_sdpa else "eager"
    ALL_ATTENTION_FUNCTIONS[NAME] = functools.partial(_attention, prev=prev, observer=observer)
    # transformers makes masks only for globally registered implementations, not for those of one registry object.
    AttentionMaskInterface.register(NAME, ALL_MASK_ATTENTION_FUNCTIONS[prev])
    try:
        with evaluating(model), torch.no_grad(), contextlib.ExitStack() as stack:
            if model._can_set_attn_implementation():
                set_attention(model, NAME)
            else:
                stack.enter_context(_SdpaCalls(model, observer))
            yield
    finally:
        if text_config._attn_implementation != before:
            set_attention(model, before)
        del ALL_ATTENTION_FUNCTIONS[NAME], AttentionMaskInterface._global_mapping[NAME]


def forward(model: PreTrainedModel, input_ids: Tensor, *, cache: Cache | None = None, **kwargs: Tensor) -> Tensor:
    """Run a forward and return its logits.

    Args:
        model: Only run.
        input_ids: `[batch, tokens]` int64, on any device.
        cache: Filled in place; `None` for a forward without a cache.
        **kwargs: `attention_mask` or `position_ids`, shaped like `input_ids`. By default, positions follow the mask, as
            in `generate`. Models that take no positions get none.

    Returns:
        `[batch, tokens, vocab_size]`, dtype of the model.
    """
    mask = kwargs.get("attention_mask")
    if mask is not None:
        kwargs.setdefault("position_ids", (mask.cumsum(1) - 1).clamp(min=0))
    if "position_ids" not in inspect.signature(model.forward).parameters:
        kwargs.pop("position_ids", None)
    # Offloaded weights are on the meta device; the hooks that load them also move the inputs.
    device = torch.device("cpu") if model.device.type == "meta" else model.device
    placed = {name: value.to(device) for name, value in kwargs.items()}
    # Compiled code does not see hooks and was compiled for other shapes.
    with torch.compiler.set_stance("force_eager"):
        logits: Tensor = model(
            input_ids=input_ids.to(device), past_key_values=cache, use_cache=cache is not None, **placed
        ).logits
    return logits


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    prev: str,
    observer: Observer,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention with the signature of `transformers.AttentionInterface`."""

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        mask = _in_dtype(attention_mask, query.dtype)
        return call_previous(prev, module, query, key, value, mask, **_in_dtype_of(kwargs, query.dtype))[0]

    out = observer(Observation(_layer_idx(module), module, query, key, value, attend))
    return attend(query, key, value) if out is None else out, None


def _in_dtype(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return mask.to(dtype) if mask is not None and mask.is_floating_point() else mask


def _in_dtype_of(kwargs: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """Attention's keyword arguments, with the sinks of gpt-oss in this dtype."""
    sinks = kwargs.get("s_aux")
    return kwargs if sinks is None else {**kwargs, "s_aux": sinks.to(dtype)}


def _layer_idx(module: nn.Module) -> int:
    index = getattr(module, "layer_idx", None)
    return index if isinstance(index, int) else -1


class _SdpaCalls(TorchFunctionMode):
    """Intercepts calls of `scaled_dot_product_attention`. Hooks tell which layer's module makes each call."""

    def __init__(self, model: PreTrainedModel, observer: Observer) -> None:
        super().__init__()
        self.observer = observer
        self.active: list[nn.Module] = []
        self.modules = [module for module in model.modules() if _layer_idx(module) >= 0]
        self.hooks: list[Any] = []

    def __enter__(self) -> Any:
        for module in self.modules:
            self.hooks.append(module.register_forward_pre_hook(lambda module, args: self.active.append(module)))
            self.hooks.append(module.register_forward_hook(lambda module, args, output: self._leave()))
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *args: Any) -> None:
        for hook in self.hooks:
            hook.remove()
        super().__exit__(*args)  # type: ignore[no-untyped-call]

    def _leave(self) -> None:
        self.active.pop()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not F.scaled_dot_product_attention or not self.active:
            return func(*args, **kwargs)
        named = dict(zip(("query", "key", "value", "attn_mask"), args, strict=False)) | kwargs
        query, key, value = (named.pop(name) for name in ("query", "key", "value"))
        mask = named.pop("attn_mask", None)

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            out: Tensor = func(query, key, value, attn_mask=_in_dtype(mask, query.dtype), **named)
            return out.transpose(1, 2)

        module = self.active[-1]
        out = self.observer(Observation(_layer_idx(module), module, query, key, value, attend))
        return (attend(query, key, value) if out is None else out).transpose(1, 2)
