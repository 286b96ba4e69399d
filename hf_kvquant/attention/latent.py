"""Attention over latents (MLA), absorbed: it reads latents and rope parts, and makes no keys and values of them.

With W_K and W_V for the parts of `kv_b_proj` that make a head's key and value, a score is
`query · (W_K latent) = (W_Kᵀ query) · latent`, and the sum of values is W_V times the sum of latents (DeepSeek-V2,
arXiv 2405.04434, section 2.1.2). So one row a token serves all heads, where transformers expands every token to keys
and values of all heads in every step.

`patch` gives each module an `expand_kv` that lets through what our attention functions know: the handles of our caches,
which `attend_latent` serves, and new tokens of a batch on their way to pages, which `attend_pages` serves. Tensors of
the first chunk or of other caches are expanded by the module's class.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..cache.handle import KVHandle, noted_on
from ..models.dequantized import dequantized_weight
from ..models.fingerprint import fingerprint
from ..models.latent import EXPAND, LATENT_NORM, latent_attentions, why_not_plain
from ..models.quantized import FLOATS
from ..models.sharding import rows_here
from ..ops import Operands, largest_step
from ..ops.chunks import causal_attention
from ..spec import reference
from ..storage.layer_store import LayerStore

_PARAMETERS = {"weight", "bias"}
# By `kv_b_proj` that is more than a weight: what tells that it is as it was, its weight as numbers, or why it has none.
_dequantized: WeakKeyDictionary[nn.Module, tuple[Any, Tensor | None, str | None]] = WeakKeyDictionary()


def patch(model: nn.Module, is_ours: Callable[[str | None], bool]) -> None:
    """Let handles pass through `expand_kv`, wherever a model keeps latents. `is_ours` knows our implementations."""
    for module in latent_attentions(model):
        setattr(module, EXPAND, functools.partial(_pass_handles, module, is_ours))


def unpatch(model: nn.Module) -> None:
    """Undo `patch`."""
    for module in latent_attentions(model):
        module.__dict__.pop(EXPAND, None)
        _dequantized.pop(module.kv_b_proj, None)


def keeps_latent(module: nn.Module) -> bool:
    """Whether the handles that a module passes to attention are of latents and rope parts."""
    return EXPAND in module.__dict__


def _pass_handles(module: Any, is_ours: Callable[[str | None], bool], latent: Any, rope: Any) -> tuple[Any, Any]:
    is_for_us = isinstance(latent, KVHandle) or noted_on(latent)[0] is not None
    if is_for_us and is_ours(module.config._attn_implementation):
        return latent, rope
    return expand(module, latent, rope)


def expand(module: Any, latent: Any, rope: Any) -> tuple[Tensor, Tensor]:
    """Keys `[batch, num_q_heads, tokens, head_dim]` and values of all heads, as the module's class makes them."""
    expanded: tuple[Tensor, Tensor] = type(module).expand_kv(module, latent, rope)
    return expanded


def why_expanded(module: Any, mask: Tensor | None) -> str | None:
    """Why a step has to expand its latents, or `None` if attention can be absorbed."""
    if not _is_plain(module.kv_b_proj):
        reason = _why_not_dequantized(module)
        if reason is not None:
            return f"kv_b_proj {reason}, so latents are expanded"
    if mask is not None and mask.ndim != 4:
        return "the attention mask is neither causal nor left padding"
    return None


def _is_plain(projection: Any) -> bool:
    """What most are: a linear layer without a bias, whose weight is numbers. Each step asks, so it must be fast."""
    if type(projection) is not nn.Linear or projection._forward_hooks or projection._forward_pre_hooks:
        return False
    if projection._buffers or projection._parameters.keys() - _PARAMETERS or projection.bias is not None:
        return False  # as in compressed-tensors, which keeps scales beside codes
    rows = _rows(projection)
    # Tensor parallelism puts a forward around that of the class, which has each rank compute its own rows.
    return rows is not None and (rows is not projection.weight or "forward" not in projection.__dict__)


def _rows(projection: Any) -> Tensor | None:
    """The rows of a weight that this process has; `None` if they are not numbers to be read."""
    weight = getattr(projection, "weight", None)
    return rows_here(weight) if isinstance(weight, Tensor) and weight.dtype in FLOATS else None


def _why_not_dequantized(module: Any) -> str | None:
    """Make the weight of a quantised `kv_b_proj` if there is none, or another one by now. Why there is none, if so."""
    projection = module.kv_b_proj
    if torch.compiler.is_compiling():
        return why_not_plain(projection) or "is quantised, and the step is compiled"
    state = fingerprint(projection, with_writes=True)
    known = _dequantized.get(projection)
    if known is None or known[0] != state:
        weight, reason = None, why_not_plain(projection)
        if reason is None and any(hasattr(each, "placements") for each in projection.parameters()):
            reason = "is divided among processes, and not in rows of numbers"
        if reason is None:
            weight = dequantized_weight(projection, module.kv_lora_rank, getattr(module, LATENT_NORM).weight)
            reason = "is quantised, and no matrix has its results" if weight is None else None
        known = _dequantized[projection] = state, weight, reason
    return known[2]


def largest_absorbed(module: Any) -> int:
    """The most new tokens for which absorbed attention takes fewer multiplications than expanding.

    With n and v channels of a head's key without rope and of its value, r of the rope part and R of the latent, a pair
    of query and token takes 2R + r multiplications a head if absorbed, and n + r + v if expanded, which costs
    R (n + v) a head and token before that.
    """
    n, v, rank = module.qk_nope_head_dim, module.v_head_dim, module.kv_lora_rank
    return int(rank * (n + v) // max(1, 2 * rank - n - v))


def attend_latent(
    module: Any,
    query: Tensor,
    storage: LayerStore,
    starts: Tensor | None,
    make_mask: Callable[[], Tensor | None],
    scaling: float,
    *,
    is_causal: bool,
) -> Tensor:
    """Attention of the newest tokens to all latents of a layer.

    Args:
        module: Of the layer.
        query: `[batch, num_q_heads, q_len, qk_nope_head_dim + qk_rope_head_dim]`, after RoPE.
        storage: Of the layer; its pending tokens are written.
        starts: `[batch]` int32: first position that is not padding; `None` for 0.
        make_mask: Makes `[batch, 1, q_len, tokens]`: bool, True where a query sees a token, or added to the scores;
            `None` shows everything.
        scaling: Multiplies query · key. The module's own, not one derived from the latent's size.
        is_causal: Whether the mask hides later tokens and padding before `starts`, and nothing else.

    Returns:
        `[batch, q_len, num_q_heads, v_head_dim]`.
    """
    q_len, absorbed = query.shape[2], _absorb(module, query)
    if is_causal and storage.serves_latent(query.dtype) and q_len <= storage.largest_step(0):
        out = storage.attend_latent(absorbed, softmax_scale=scaling, starts=starts)
        if storage.formats.is_quantized:
            storage.note_read(q_len, 0)
    else:
        out = _attend_dequantized(absorbed, storage, make_mask(), scaling)
        if storage.formats.is_quantized:
            storage.note_dequantized(q_len)
    return _project(module, out)


def attend_pages(
    module: Any,
    query: Tensor,
    new: tuple[Tensor, Tensor],
    operands: Operands,
    lengths: Tensor,
    page_table: Tensor,
    scaling: float,
) -> Tensor:
    """Append the new tokens of requests with a past, and attend to all latents in their pages.

    A chunk sees its own tokens as the model makes them, as in `ops/chunks.py`: these it attends to expanded.

    Args:
        module: Of the layer.
        query: As in `attend_latent`, a row for each request.
        new: Their latents and rope parts, `[requests, 1, q_len, channels]` each.
        operands: Of the pages of the layer.
        lengths: `[requests]` int32: tokens held, the new ones included.
        page_table: `[requests, pages]` int32.
        scaling: As in `attend_latent`.

    Returns:
        `[requests, q_len, num_q_heads, v_head_dim]`.
    """
    q_len, absorbed = query.shape[2], _absorb(module, query)
    if q_len <= largest_step(operands.layout):
        operands.append(*new, lengths, page_table=page_table)
        out, _ = operands.attend_latent(absorbed, lengths, softmax_scale=scaling, page_table=page_table)
        return _project(module, out)
    before, lse = operands.attend_before(absorbed, lengths - q_len, softmax_scale=scaling, page_table=page_table)
    own = causal_attention(query, *expand(module, *new), scaling)
    out, _ = reference.merge_attention(*own, _project(module, before), lse)
    operands.append(*new, lengths, page_table=page_table)
    return out


def _weights(module: Any, num_heads: int) -> tuple[Tensor, Tensor]:
    """Of a head's key without rope, `[num_heads, qk_nope_head_dim, latent channels]`, and of its value, likewise."""
    n, projection = module.qk_nope_head_dim, module.kv_b_proj
    rows = _rows(projection) if _is_plain(projection) else _dequantized[projection][1]
    assert rows is not None  # see why_expanded
    weight = rows.view(num_heads, n + module.v_head_dim, -1)
    return weight[:, :n], weight[:, n:]


def _absorb(module: Any, query: Tensor) -> Tensor:
    """Queries of latents and rope parts, `[batch, num_q_heads, q_len, latent + rope channels]`."""
    n = module.qk_nope_head_dim
    # Not `@`, which would copy the weights for each sequence of a batch.
    of_latent = torch.einsum("bhqn,hnr->bhqr", query[..., :n], _weights(module, query.shape[1])[0])
    return torch.cat((of_latent, query[..., n:]), dim=-1)


def _project(module: Any, out: Tensor) -> Tensor:
    """Sums of values, `[batch, q_len, num_q_heads, v_head_dim]`, from sums of latents."""
    return torch.einsum("bqhr,hvr->bqhv", out, _weights(module, out.shape[2])[1])


def _attend_dequantized(query: Tensor, storage: LayerStore, mask: Tensor | None, scaling: float) -> Tensor:
    """`Operands.attend_latent` by PyTorch: `[batch, q_len, num_q_heads, latent channels]`."""
    batch, num_heads, q_len, _ = query.shape
    latent, rope = storage.dense_step(keeps_transform=True)
    rank, transform = latent.shape[-1], storage.key_transform
    if transform is not None:  # a rotation
        rotated, _ = reference.transform_query(query[..., :rank], transform)
        query = torch.cat((rotated.to(query.dtype), query[..., rank:]), dim=-1)
    stored = torch.cat((latent, rope), dim=-1)
    if q_len == 1:
        query = query.view(batch, 1, num_heads, -1)  # heads as queries: each token is read once for all
    stored = stored.expand(-1, query.shape[1], -1, -1)
    # Values with the rope part, which is cut off again: PyTorch's fast path on CPUs wants them as wide as keys. It took
    # 1.8 ms instead of 11 for 4,096 tokens of 16 heads and 512 + 64 channels, one thread.
    out = F.scaled_dot_product_attention(query, stored, stored, attn_mask=mask, scale=scaling)[..., :rank]
    out = out.view(batch, num_heads, q_len, rank).transpose(1, 2)
    return out if transform is None else reference.rotate(out.float()).to(out.dtype)
