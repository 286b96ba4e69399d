"""How attention classes outside transformers' attention registry compute query, key and value.

A family's function does what its class does around attention, with the names and the rounding of its class. ALiBi:
BLOOM and Falcon count positions from a sequence's first token, MPT from the end of the cache, our op from the query.
The biases differ by a constant in every row, which the softmax ignores as long as the mask has no holes. Slopes are the
model's own, with its rounding. Their products with positions, which BLOOM rounds to the model's dtype and Falcon to
bfloat16, are not rounded here.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..upstream.releases import CACHE

# Takes query, key and value, each `[batch, heads, q_len, head_dim]`, and options of `LayerStore.attend`. Returns
# `[batch, q_len, num_q_heads * head_dim]`.
Attend = Callable[..., Tensor]


@dataclasses.dataclass(frozen=True)
class Family:
    """How one attention class computes."""

    # Takes the module, an `Attend` and the arguments of the class's `forward`. Returns the module's output.
    compute: Callable[..., Any]
    parameters: str  # the names of the class's parameters, in order. A class with others is left alone
    cache: str = "layer_past"  # name of the parameter that holds the cache
    layer_index: str = "layer_idx"  # name of the module's attribute that says which layer it is
    is_hidden: bool = False  # whether True in a boolean mask hides a token, as in MPT. In transformers' own it shows it
    is_served: Callable[[Any], bool] = lambda module: True  # whether a module computes attention as `compute` does


def family_of(module: nn.Module) -> Family | None:
    """The family of an attention module, or `None` if there is none that computes like it."""
    kind = type(module)
    family = FAMILIES.get(kind.__name__)
    if family is None or not kind.__module__.startswith("transformers.models."):
        return None
    has_its_parameters = list(inspect.signature(kind.forward).parameters)[1:] == family.parameters.split()
    return family if has_its_parameters and family.is_served(module) else None


def _alibi_slopes(module: nn.Module, num_heads: int, device: torch.device) -> Tensor:
    """`[num_heads]` float32, from the bias that the module's own file builds for two tokens: 0 and the slope."""
    build = sys.modules[type(module).__module__].build_alibi_tensor
    return (_build_slopes if torch.compiler.is_compiling() else _kept_slopes)(build, num_heads, device)


def _build_slopes(build: Callable[..., Tensor], num_heads: int, device: torch.device) -> Tensor:
    return build(torch.ones((1, 2), dtype=torch.long, device=device), num_heads, torch.float32)[:, 0, 1].contiguous()


@functools.cache
def _kept_slopes(build: Callable[..., Tensor], num_heads: int, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return _build_slopes(build, num_heads, device)


def _bloom(module: Any, attend: Attend, hidden_states: Tensor, residual: Tensor, alibi: Tensor, **_: Any) -> Any:
    query, key, value = module._reshape(module.query_key_value(hidden_states))
    slopes = _alibi_slopes(module, module.num_heads, query.device)
    out = attend(query, key, value, softmax_scale=module.inv_norm_factor, alibi_slopes=slopes)
    return residual + module.dense(out)


def _falcon(
    module: Any,
    attend: Attend,
    hidden_states: Tensor,
    alibi: Tensor | None,
    *,
    position_embeddings: tuple[Tensor, Tensor] | None = None,
    **_: Any,
) -> Any:
    split = module._split_heads(module.query_key_value(hidden_states))
    query, key, value = (x.transpose(1, 2) for x in split)
    slopes = None
    if alibi is None:
        assert position_embeddings is not None
        query, key = sys.modules[type(module).__module__].apply_rotary_pos_emb(query, key, *position_embeddings)
    else:
        # A 4-D bias has already been added to the mask by the model. Without sdpa, the module adds the bias as well.
        times = int(alibi.ndim == 4) + int(module.config._attn_implementation != "sdpa")
        slopes = _alibi_slopes(module, module.num_heads, query.device) * (times * module.inv_norm_factor)
    out = attend(query, key, value, softmax_scale=module.inv_norm_factor, alibi_slopes=slopes)
    return module.dense(out)


def _mpt(module: Any, attend: Attend, hidden_states: Tensor, position_bias: Tensor | None, **_: Any) -> Any:
    fused = module.Wqkv(hidden_states)
    if module.clip_qkv:
        fused = fused.clamp(min=-module.clip_qkv, max=module.clip_qkv)
    query, key, value = (x.unflatten(-1, (module.n_heads, -1)).transpose(1, 2) for x in fused.chunk(3, dim=-1))
    # The last column, for the newest token, is 0; the one before is lower by the slope.
    slopes = None if position_bias is None else position_bias[:, 0, -1] - position_bias[:, 0, -2]
    out = attend(query, key, value, softmax_scale=module.softmax_scale, alibi_slopes=slopes)
    return module.out_proj(out)


# GPT-J and CodeGen use the registry since transformers 5.24. Once no older release is supported, they can go, with what
# follows up to GPT-Neo.
def _gptj(module: Any, attend: Attend, hidden_states: Tensor, *, position_ids: Tensor | None = None, **_: Any) -> Any:
    heads = module.num_attention_heads, module.head_dim
    projections = module.q_proj, module.k_proj, module.v_proj
    query, key, value = (project(hidden_states).unflatten(-1, heads) for project in projections)
    angles = _angles(module, position_ids).to(key.dtype)
    return _rotary_attention(module, attend, query, key, value, angles)


def _codegen(
    module: Any, attend: Attend, hidden_states: Tensor, *, position_ids: Tensor | None = None, **_: Any
) -> Any:
    # Weights are laid out for four devices: query, value and key of the first quarter of the heads, then of the next.
    fused = module.qkv_proj(hidden_states).unflatten(-1, (4, 3, -1))
    query, value, key = (x.flatten(-2).unflatten(-1, (-1, module.head_dim)) for x in fused.unbind(-2))
    # Angles stay in float32, and so does the query.
    return _rotary_attention(module, attend, query, key, value, _angles(module, position_ids))


def _angles(module: Any, position_ids: Tensor | None) -> Tensor:
    """Sines, then cosines, of GPT-J's or CodeGen's positions: `[batch, q_len, channels]` float32."""
    assert position_ids is not None
    angles: Tensor = module.embed_positions.to(position_ids.device)[position_ids]
    return angles


def _rotary_attention(module: Any, attend: Attend, query: Tensor, key: Tensor, value: Tensor, angles: Tensor) -> Any:
    """What GPT-J and CodeGen do with a query, key and value, `[batch, q_len, heads, head_dim]` each."""
    query, key = _rotated(module, query, angles), _rotated(module, key, angles)
    out = attend(query, key.to(value.dtype), value.transpose(1, 2), softmax_scale=1 / module.scale_attn)
    return module.out_proj(out)


def _rotated(module: Any, x: Tensor, angles: Tensor) -> Any:
    """GPT-J's rotary embedding of the first `rotary_dim` channels, or of all, as `[batch, heads, q_len, head_dim]`."""
    sin, cos = angles.chunk(2, dim=-1)
    rotate = sys.modules[type(module).__module__].apply_rotary_pos_emb
    width = x.shape[-1] if module.rotary_dim is None else module.rotary_dim
    return torch.cat((rotate(x[..., :width], sin, cos), x[..., width:]), dim=-1).transpose(1, 2)


def _gpt_neo(module: Any, attend: Attend, hidden_states: Tensor, **_: Any) -> Any:
    heads = module.num_heads, module.head_dim
    query, key, value = (
        project(hidden_states).unflatten(-1, heads).transpose(1, 2)
        for project in (module.q_proj, module.k_proj, module.v_proj)
    )
    window = module.config.window_size if module.attention_type == "local" else 0
    return module.out_proj(attend(query, key, value, softmax_scale=1.0, sliding_window=window))


FAMILIES: dict[str, Family] = {
    "BloomAttention": Family(
        _bloom,
        "hidden_states residual alibi attention_mask layer_past use_cache output_attentions kwargs",
        # With these options the class multiplies by slices of the weights, to round as in training. We do not.
        is_served=lambda module: not (module.pretraining_tp > 1 and module.slow_but_exact),
    ),
    "FalconAttention": Family(
        _falcon,
        "hidden_states alibi attention_mask position_ids layer_past use_cache output_attentions position_embeddings "
        "kwargs",
    ),
    "MptAttention": Family(
        _mpt,
        f"hidden_states position_bias {CACHE} attention_mask kwargs",
        cache=CACHE,
        is_hidden=True,
    ),
    "GPTJAttention": Family(
        _gptj, "hidden_states layer_past attention_mask position_ids use_cache output_attentions kwargs"
    ),
    "CodeGenAttention": Family(
        _codegen, "hidden_states layer_past attention_mask position_ids use_cache output_attentions"
    ),
    "GPTNeoSelfAttention": Family(
        _gpt_neo,
        "hidden_states attention_mask layer_past use_cache output_attentions kwargs",
        layer_index="layer_id",
    ),
}
