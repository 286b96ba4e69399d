"""Watches a model's attention: which module attends, with which queries, keys and values, and how to attend again.

Models whose attention goes through transformers' registry are watched there, under a name that is registered only while
they are watched. The others (Falcon) are watched where they call PyTorch's `scaled_dot_product_attention`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..models.probing import evaluating, forward, hooked
from ..models.text_config import text_config_of
from .registry import call_previous, set_attention

NAME = "hf_kvquant-observed"


@dataclasses.dataclass(frozen=True)
class Observation:
    """One layer's attention, about to be computed."""

    layer_idx: int  # the layer, as caches count them
    module: nn.Module
    query: Tensor  # `[batch, num_q_heads, tokens, head_dim]`, after RoPE
    key: Tensor  # `[batch, num_kv_heads, tokens, head_dim]`, after RoPE
    value: Tensor  # `[batch, num_kv_heads, tokens, value head_dim]`
    # The layer's own attention (mask, scaling, cap and sinks included) on tensors shaped like these three, in any
    # floating dtype that all of them share. Returns `[batch, tokens, num_q_heads, value head_dim]`.
    attend: Callable[[Tensor, Tensor, Tensor], Tensor]

    def attended(self) -> Tensor:
        """What the layer's attention returns if nobody interferes."""
        return self.attend(self.query, self.key, self.value)


# Called before each attention. It may return a replacement for attention's output, shaped as by `attend`, or `None`.
Observer = Callable[[Observation], Tensor | None]


@contextlib.contextmanager
def observed(model: PreTrainedModel, observer: Observer) -> Iterator[None]:
    """Call `observer` for every attention of a layer of the text model while the block runs, then restore the model.

    Attention of modules that name no layer is let through: of Inkling 2, for one, each token also attends to what the
    layers before have made of it.

    Inside the block the model is in evaluation mode, without gradients. It attends through PyTorch's
    `scaled_dot_product_attention`, or eagerly if it does not support that.
    """
    before = text_config_of(model)._attn_implementation
    prev = "sdpa" if model._supports_sdpa else "eager"
    ALL_ATTENTION_FUNCTIONS[NAME] = functools.partial(_attention, prev=prev, observer=observer)
    # transformers makes masks only for implementations that are registered globally, not in one registry object.
    AttentionMaskInterface.register(NAME, ALL_MASK_ATTENTION_FUNCTIONS[prev])
    try:
        with evaluating(model), torch.no_grad(), contextlib.ExitStack() as stack:
            if model._can_set_attn_implementation():
                set_attention(model, NAME)
            else:
                stack.enter_context(_SdpaCalls(model, observer, stack))
            yield
    finally:
        set_attention(model, before)
        del ALL_ATTENTION_FUNCTIONS[NAME], AttentionMaskInterface._global_mapping[NAME]


def observations(model: PreTrainedModel, input_ids: Tensor, **kwargs: Any) -> dict[int, list[Observation]]:
    """What reaches attention in one forward, by layer index. `kwargs` go to `models.probing.forward`."""
    seen: dict[int, list[Observation]] = defaultdict(list)
    with observed(model, lambda observation: seen[observation.layer_idx].append(observation)):
        forward(model, input_ids, only_last=True, **kwargs)
    return seen


def not_observed(model: PreTrainedModel, where: str) -> NotImplementedError:
    """The error for a model whose attention no observer sees."""
    return NotImplementedError(
        f"{where}: `model` must attend through transformers' registry or PyTorch's scaled_dot_product_attention, "
        f"got {type(model).__name__}, whose attention cannot be watched. Leave it as it is."
    )


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
        placed = {**kwargs, "s_aux": _in_dtype(kwargs["s_aux"], query.dtype)} if "s_aux" in kwargs else kwargs
        return call_previous(prev, module, query, key, value, _in_dtype(attention_mask, query.dtype), **placed)[0]

    return _observe(observer, module, query, key, value, attend), None


def _observe(observer: Observer, module: nn.Module, *args: Any) -> Tensor:
    observation = Observation(_layer_idx(module), module, *args)
    out = None if observation.layer_idx < 0 else observer(observation)
    return observation.attended() if out is None else out


def _in_dtype(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """A mask, or the sinks of gpt-oss, in the dtype of the tensors that are attended to. Boolean masks stay."""
    return tensor.to(dtype) if tensor is not None and tensor.is_floating_point() else tensor


def _layer_idx(module: nn.Module) -> int:
    """The layer that a module names, -1 for none."""
    index = getattr(module, "layer_idx", None)
    return index if isinstance(index, int) else -1


class _SdpaCalls(TorchFunctionMode):
    """Passes calls of `scaled_dot_product_attention` to an observer. Hooks tell which layer makes each call."""

    def __init__(self, model: PreTrainedModel, observer: Observer, stack: contextlib.ExitStack) -> None:
        super().__init__()
        self.observer = observer
        self.active: list[nn.Module] = []

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            self.active.pop()

        layers = [module for module in model.modules() if _layer_idx(module) >= 0]
        stack.enter_context(
            hooked(((module, lambda module, args: self.active.append(module)) for module in layers), before=True)
        )
        stack.enter_context(hooked((module, leave) for module in layers))

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

        return _observe(self.observer, self.active[-1], query, key, value, attend).transpose(1, 2)
