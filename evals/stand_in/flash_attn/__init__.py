"""A stand-in for the package flash-attn, with which transformers batches continuously as with the package itself.

    PYTHONPATH=evals/stand_in python evals/bench_batching.py --systems flash

Prompts go to PyTorch's own FlashAttention-2, which has the kernels of that package. Decode steps over pages go to two
Triton kernels here: append and Flash-Decoding. Only what continuous batching calls is here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import paged

__version__ = "2.8.3"


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> Tensor:
    """Attention of sequences that lie one after the other: `[tokens, heads, head_dim]`, fewer heads of keys."""
    limits = cu_seqlens_q.int(), cu_seqlens_k.int(), max_seqlen_q, max_seqlen_k
    options = {"scale": softmax_scale}
    result = torch.ops.aten._flash_attention_forward(q, k, v, *limits, dropout_p, causal, False, **options)
    out: Tensor = result[0]
    return out


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor,
    v: Tensor,
    cache_seqlens: Tensor,
    block_table: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> Tensor:
    """Write one new token of each sequence into its pages, and attend to these.

    Args:
        q: `[batch, 1, num_q_heads, head_dim]`.
        k_cache: `[pages, tokens of a page, num_kv_heads, head_dim]`; `v_cache` likewise.
        k: `[batch, 1, num_kv_heads, head_dim]`; `v` likewise.
        cache_seqlens: `[batch]` int32: tokens held before; -1 for a sequence that is padding.
        block_table: `[batch, pages of a sequence]` int32.
        softmax_scale: Multiplies query · key.
        causal: Makes no difference for one token.
    """
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    return paged.decode(q, k_cache, v_cache, k, v, cache_seqlens, block_table, scale)


def flash_attn_func(*args: Any, **kwargs: Any) -> Tensor:
    """Not needed by continuous batching."""
    raise NotImplementedError("flash_attn: only continuous batching works with the stand-in. Install flash-attn.")
