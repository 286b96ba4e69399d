"""Attention of a chunk: of more new tokens than a decode step or a draft has.

A chunk attends to the tokens before it as they are stored, and to its own tokens as the model makes them; only then is
it quantised. So its tokens have the same errors as in a prompt of one piece, whose tokens attend to raw keys and
values. The tokens nearest to a query get most of its attention, so this is worth more than a better format: in chunks
of 256, the divergence of `int4` falls to a fifth (docs/presets.md).

Every query of a chunk sees every token before it. So the op for those is told that all queries are heads of a single
token, the last one before the chunk. ALiBi then counts distances from there. What is missing is the same for all tokens
that a query sees, so it is added to their log-sum-exp, by which both parts are merged. `operands.py` puts the parts
together. A kernel for Hopper does all of this at once (csrc/cuda/sm90/chunk/): on an H200 the two parts take 1.04 to
1.26 times as long (torch 2.11, 2026-11).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ..spec.formats import KVFormat
from ..spec.layout import KVLayout
from ..spec.planes import Planes

# A step of more new tokens is a chunk. Assisted decoding proposes fewer, and what it accepts has to be what single
# steps would have made: these see each token as it is stored.
MAX_DRAFTED = 32
# Kernels number the query rows of a key-value head, times query heads, in 32 bits.
_MAX_ROWS = 32768
# Of tokens as the model makes them.
RAW = KVLayout(KVFormat("none"), KVFormat("none"))


def largest_step(layout: KVLayout, sliding_window: int = 0) -> int:
    """The most new tokens that see each other as they are stored. More are a chunk.

    There are no chunks where nothing is quantised, nor where a sliding window hides some of the tokens before a chunk
    from its last queries.
    """
    has_chunks = any(each.is_quantized for each in layout.formats) and not sliding_window and not layout.is_ring
    return MAX_DRAFTED if has_chunks else sys.maxsize


def as_heads(query: Tensor, num_kv_heads: int) -> Iterator[Tensor]:
    """Queries `[batch, num_q_heads, q_len, head_dim]` as heads of one token, `[batch, heads, 1, head_dim]`.

    In as many parts as kernels need. A part has a head for each query head and token, tokens innermost.
    """
    batch, num_q_heads, _, head_dim = query.shape
    for part in query.split(max(1, _MAX_ROWS * num_kv_heads // num_q_heads), dim=2):
        yield part.reshape(batch, -1, 1, head_dim)


def as_tokens(parts: Sequence[tuple[Tensor, Tensor]], num_q_heads: int) -> tuple[Tensor, Tensor]:
    """The outputs and log-sum-exps of the parts of `as_heads`, shaped as for the whole query."""
    outs = [out.view(len(out), num_q_heads, -1, out.shape[-1]) for out, _ in parts]
    sums = [lse.view(len(lse), num_q_heads, -1) for _, lse in parts]
    return torch.cat(outs, dim=2).transpose(1, 2), torch.cat(sums, dim=2)


def add_distance(lse: Tensor, alibi_slopes: Tensor) -> Tensor:
    """Log-sum-exps of tokens before a chunk, `[batch, num_q_heads, q_len]`, with distances from each query."""
    distance = torch.arange(1, lse.shape[2] + 1, device=lse.device)
    return lse - alibi_slopes.float().unsqueeze(1) * distance


def raw_planes(key: Tensor, value: Tensor) -> tuple[Planes, Planes]:
    """Planes of layout `RAW` that hold keys and values, `[batch, num_kv_heads, q_len, head_dim]`, copied."""
    room = -key.shape[2] % RAW.token_alignment
    padded_key, padded_value = (Planes(F.pad(x, (0, 0, 0, room)), None, None) for x in (key, value))
    return padded_key, padded_value


def flash_attention(query: Tensor, key: Tensor, value: Tensor, softmax_scale: float) -> tuple[Tensor, Tensor] | None:
    """Causal attention by PyTorch's flash attention, which reads keys and values where they are; `None` if it can't.

    Returns:
        As `Operands.decode`.
    """
    head_dim = query.shape[3]
    is_served = (
        query.is_cuda
        and query.dtype == key.dtype == value.dtype
        and query.dtype in (torch.float16, torch.bfloat16)
        and value.shape[3] == head_dim
        and head_dim % 8 == 0
        and head_dim <= 256
        and _has_flash_attention(query.device.index)
    )
    if not is_served:
        return None
    # The function behind scaled_dot_product_attention, which does not return the log-sum-exp.
    attend = torch.ops.aten._scaled_dot_product_flash_attention
    out, lse = attend(query, key, value, 0.0, True, scale=softmax_scale)[:2]
    return out.transpose(1, 2).contiguous(), lse


def causal_attention(query: Tensor, key: Tensor, value: Tensor, softmax_scale: float) -> tuple[Tensor, Tensor]:
    """Causal attention of tokens to themselves, by PyTorch on CPUs and NVIDIA GPUs. It forms no matrix of scores.

    Args:
        query, key: `[batch, num_heads, q_len, head_dim]`.
        value: `[batch, num_heads, q_len, value head_dim]`.
        softmax_scale: Multiplies query · key.

    Returns:
        As `Operands.decode`.
    """
    # The functions behind scaled_dot_product_attention, which does not return the log-sum-exp.
    aten, (q_len, width) = torch.ops.aten, (query.shape[2], value.shape[3])
    if query.is_cuda:
        attend = aten._scaled_dot_product_efficient_attention
        out, lse, *_ = attend(query, key, value, None, True, 0.0, True, scale=softmax_scale)
    else:  # it takes values that are as wide as keys
        widest = max(width, query.shape[3])
        padded = (F.pad(x, (0, widest - x.shape[3])) for x in (query, key, value))
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(*padded, 0.0, True, scale=softmax_scale)
    return out[..., :width].transpose(1, 2), lse[..., :q_len]


# The compiler cannot trace this check. It may take the result for a constant, since the GPU stays the same.
@torch.compiler.assume_constant_result
def _has_flash_attention(index: int) -> bool:
    """Whether a GPU and the build of PyTorch have flash attention."""
    return torch.backends.cuda.is_flash_attention_available() and torch.cuda.get_device_capability(index) >= (8, 0)
