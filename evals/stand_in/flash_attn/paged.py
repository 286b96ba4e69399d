"""Decode attention over pages of 16-bit keys and values, in Triton: Flash-Decoding with grouped query heads.

A program takes a part of a sequence's tokens for one key-value head, and all query heads of its group. A second kernel
merges the parts. The number of parts follows from shapes alone, so that a CUDA graph can hold the calls.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 64  # tokens that a program loads at a time; a page is a multiple of it
MIN_ROWS = 16  # of a product on tensor cores
# Programs for each multiprocessor: enough to even out unequal lengths.
PROGRAMS = 8
MAX_PARTS = 64
WARPS, STAGES = 4, 4


@triton.jit
def _append(
    k, v, k_cache, v_cache, lengths, table, width, stride_p, stride_t, stride_h, page_size, head_dim: tl.constexpr
):
    sequence, head, num_heads = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    past = tl.load(lengths + sequence)
    if past >= 0:
        page = tl.load(table + sequence * width + past // page_size).to(tl.int64)
        channel = tl.arange(0, head_dim)
        source = (sequence * num_heads + head) * head_dim + channel
        target = page * stride_p + (past % page_size) * stride_t + head * stride_h + channel
        tl.store(k_cache + target, tl.load(k + source))
        tl.store(v_cache + target, tl.load(v + source))


@triton.jit
def _attend(
    q, k_cache, v_cache, lengths, table, width, stride_p, stride_t, stride_h, page_size, scale, partial, sums,
    group: tl.constexpr, rows: tl.constexpr, head_dim: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    sequence, head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    num_heads, num_parts = tl.num_programs(1), tl.num_programs(2)
    length = tl.load(lengths + sequence) + 1
    tiles = tl.cdiv(tl.cdiv(length, tile), num_parts)
    begin, end = part * tiles * tile, tl.minimum((part + 1) * tiles * tile, length)
    row, channel, token = tl.arange(0, rows), tl.arange(0, head_dim), tl.arange(0, tile)
    unit = sequence * num_heads + head
    at = (unit * group + row[:, None]) * head_dim + channel[None, :]
    query = tl.load(q + at, mask=row[:, None] < group, other=0.0)
    maximum = tl.full((rows,), -float("inf"), tl.float32)
    total = tl.zeros((rows,), tl.float32)
    out = tl.zeros((rows, head_dim), tl.float32)
    for first in range(begin, end, tile):
        page = tl.load(table + sequence * width + first // page_size).to(tl.int64)
        base = page * stride_p + (first % page_size) * stride_t + head * stride_h
        seen = first + token < end
        offsets = base + token[:, None] * stride_t + channel[None, :]
        key = tl.load(k_cache + offsets, mask=seen[:, None], other=0.0)
        value = tl.load(v_cache + offsets, mask=seen[:, None], other=0.0)
        score = tl.dot(query, tl.trans(key)) * (scale * 1.4426950408889634)
        score = tl.where(seen[None, :], score, -float("inf"))
        new = tl.maximum(maximum, tl.max(score, 1))
        weight, kept = tl.exp2(score - new[:, None]), tl.exp2(maximum - new)
        total = total * kept + tl.sum(weight, 1)
        out = out * kept[:, None] + tl.dot(weight.to(value.dtype), value)
        maximum = new
    slot = unit * num_parts + part
    tl.store(partial + (slot * group + row[:, None]) * head_dim + channel[None, :], out, mask=row[:, None] < group)
    tl.store(sums + (slot * group + row) * 2, maximum, mask=row < group)
    tl.store(sums + (slot * group + row) * 2 + 1, total, mask=row < group)


@triton.jit
def _merge(partial, sums, out, group: tl.constexpr, parts: tl.constexpr, num_parts, head_dim: tl.constexpr):
    unit, row = tl.program_id(0), tl.program_id(1)
    part, channel = tl.arange(0, parts), tl.arange(0, head_dim)
    slot = (unit * num_parts + part) * group + row
    maximum = tl.load(sums + slot * 2, mask=part < num_parts, other=-float("inf"))
    total = tl.load(sums + slot * 2 + 1, mask=part < num_parts, other=0.0)
    largest = tl.max(maximum, 0)
    weight = tl.where(maximum == -float("inf"), 0.0, tl.exp2(maximum - largest))
    values = tl.load(partial + slot[:, None] * head_dim + channel[None, :], mask=part[:, None] < num_parts, other=0.0)
    weighted = tl.sum(tl.where(weight[:, None] > 0, values, 0.0) * weight[:, None], 0)
    sum_of_weights = tl.sum(total * weight, 0)
    result = tl.where(sum_of_weights > 0, weighted / sum_of_weights, 0.0)
    tl.store(out + (unit * group + row) * head_dim + channel, result.to(out.dtype.element_ty))


def num_parts_of(batch: int, num_kv_heads: int, tokens: int, multiprocessors: int) -> int:
    """Parts of each sequence."""
    wanted = -(-PROGRAMS * multiprocessors // (batch * num_kv_heads))
    return max(1, min(wanted, MAX_PARTS, tokens // TILE))


def decode(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, lengths: Tensor, table: Tensor, scale: float
) -> Tensor:
    """See `flash_attn_with_kvcache`."""
    batch, _, num_q_heads, head_dim = q.shape
    num_kv_heads, page_size = k.shape[2], k_cache.shape[1]
    assert k_cache.stride() == v_cache.stride() and k_cache.stride(3) == 1 and page_size % TILE == 0
    q, k, v = (x.contiguous() for x in (q, k, v))
    group, strides, width = num_q_heads // num_kv_heads, k_cache.stride()[:3], table.stride(0)
    _append[batch, num_kv_heads](k, v, k_cache, v_cache, lengths, table, width, *strides, page_size, head_dim)
    multiprocessors = torch.cuda.get_device_properties(q.device).multi_processor_count
    parts = num_parts_of(batch, num_kv_heads, table.shape[1] * page_size, multiprocessors)
    slots = batch * num_kv_heads * parts * group
    partial = torch.empty((slots, head_dim), dtype=torch.float32, device=q.device)
    sums = torch.empty((slots, 2), dtype=torch.float32, device=q.device)
    rows = max(MIN_ROWS, triton.next_power_of_2(group))
    _attend[batch, num_kv_heads, parts](
        q, k_cache, v_cache, lengths, table, width, *strides, page_size, scale, partial, sums,
        group, rows, head_dim, TILE, num_warps=WARPS, num_stages=STAGES,
    )  # fmt: skip
    out = torch.empty_like(q)
    _merge[batch * num_kv_heads, group](partial, sums, out, group, triton.next_power_of_2(parts), parts, head_dim)
    return out
