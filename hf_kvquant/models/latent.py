"""Which layers keep latents: Multi-head Latent Attention (MLA), as in DeepSeek-V2 and its kin.

Such a layer caches one row a token for all heads. The *latent*, of `kv_lora_rank` channels, gives every head its key
and its value through the module's `kv_b_proj`. The *rope part*, of `qk_rope_head_dim` channels, is the share of the key
that RoPE turns, the same in all heads. transformers hands both to the cache as the key and the value of a single head,
and makes keys and values of what the cache returns in a method of the module, `expand_kv`.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.nn.utils.parametrize import is_parametrized
from transformers import PreTrainedConfig, PreTrainedModel

from .adapters import is_adapter
from .quantized import quantized_tensor
from .text_config import count_of, head_dim_of

EXPAND = "expand_kv"
# The module that latents come from, a norm with a gain for each channel.
LATENT_NORM = "kv_a_layernorm"
_SIZES = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank")


def latent_sizes(layer_config: PreTrainedConfig) -> tuple[int, int] | None:
    """Channels of a latent and of the rope part of a layer; `None` if the layer keeps keys and values per head."""
    rank = count_of(layer_config, "kv_lora_rank")
    return None if rank is None else (rank, count_of(layer_config, "qk_rope_head_dim") or 0)


def keeps_latents(text_config: PreTrainedConfig) -> bool:
    """Whether layers of a decoder keep latents."""
    return any(latent_sizes(layer_config) is not None for layer_config in text_config.per_layer_config)


def head_dims_of(layer_config: PreTrainedConfig) -> tuple[int, ...]:
    """Channels of what a layer caches as its key and as its value, according to its config; nothing if unknown."""
    head_dim = head_dim_of(layer_config)
    return latent_sizes(layer_config) or (() if head_dim is None else (head_dim, head_dim))


def channels_at_peak(text_config: PreTrainedConfig) -> int:
    """The most numbers that attention of a layer makes of a new token in a batch, over all heads.

    A prompt is expanded: queries and keys, what `kv_b_proj` makes, and values. A chunk behind it has queries and sums
    of latents besides.
    """
    most = 0
    for each in text_config.per_layer_config:
        n, v = count_of(each, "qk_nope_head_dim") or 0, count_of(each, "v_head_dim") or 0
        rank, r = latent_sizes(each) or (0, 0)
        most = max(most, each.num_attention_heads * (2 * (n + r) + (n + v) + v + (2 * rank + r if rank else 0)))
    return most


def picks_tokens(layer_config: PreTrainedConfig) -> bool:
    """Whether a layer keeps latents, and an indexer picks those that it attends to, as in DeepSeek-V3.2."""
    return latent_sizes(layer_config) is not None and count_of(layer_config, "index_topk") is not None


def latent_attentions(model: nn.Module) -> Iterator[Any]:
    """The attention modules of a model that keep latents."""
    return (module for module in model.modules() if hasattr(type(module), EXPAND))


def why_not_plain(projection: nn.Module) -> str | None:
    """Why a `kv_b_proj` does more than multiply by its weight, quantised or not: the end of a sentence."""
    if is_adapter(projection):
        return "has an adapter"
    if is_parametrized(projection):
        return "has a parametrization"
    if getattr(projection, "bias", None) is not None:
        return "has a bias"
    if projection._forward_hooks or projection._forward_pre_hooks or getattr(projection, "_hf_hook", None) is not None:
        return "has hooks"
    if quantized_tensor(projection) is not None:
        return None
    if "forward" in projection.__dict__:
        return "has a forward of its own"
    if type(projection) is not nn.Linear:
        return f"is of the type {type(projection).__module__}.{type(projection).__qualname__}"
    return None


def check_latent(model: PreTrainedModel, where: str) -> None:
    """Refuse a model that keeps latents in a way that attention over latents does not know.

    Raises:
        NotImplementedError: A module lacks what it takes, or has it in another form.
    """
    found = list(latent_attentions(model))
    for module in found:
        missing = [name for name in (*_SIZES, "kv_b_proj") if getattr(module, name, None) is None]
        num_parameters = len(inspect.signature(type(module).expand_kv).parameters)
        if missing or num_parameters != 3:
            has = f"no {' and no '.join(missing)}" if missing else f"an {EXPAND} of {num_parameters - 1} arguments"
            raise _refusal(where, model, f"whose {type(module).__name__} has {has}")
    if not found:
        raise _refusal(where, model, f"which has no module with {EXPAND}")


def _refusal(where: str, model: PreTrainedModel, what: str) -> NotImplementedError:
    return NotImplementedError(
        f"{where}: `model` must keep latents (MLA) as transformers' own models do, got {type(model).__name__}, {what}. "
        "Leave the model unpatched."
    )
