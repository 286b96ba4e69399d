"""The specification in plain PyTorch: the values of codes, scales and zeros, and decode attention over them.

Kernels are optimisations of this file. Their codes, scales and zeros agree with it bit for bit, their attention up to
the rounding of float32 sums. All computation is in float32, whatever the dtype of the input. With a = max|x|,
m = min x, M = max x over the values that share a scale, r = the format's clip_ratio, rn = round half to even,
rn16 = rounding to float16:

    symmetric integers     scale = max(rn16(r·a / L), 2^-24)       q = clamp(rn(x / scale), -L, L), stored q + L + 1
    asymmetric integers    scale = max(rn16(r·s / L), 2^-24)       u = clamp(rn((x - zero) / scale), 0, L), stored u
                           zero = rn16(m + (s - r·s) / 2)          with s = M - m
    fp8                    scale = max(rn16(a / 448), 2^-24)       e4m3(clamp(x / scale, -448, 448))

with L = 2^(b-1) - 1 (symmetric) or 2^b - 1 (asymmetric) for integers of b bits: 127 and 7, or 255 and 15. Codes are
computed from the scale and zero *as stored*. A NaN, an infinity, or a scale or zero beyond float16 never becomes a
finite value: scale and zero become NaN and the codes 0. Queries that attend to such a token get NaN; others are not
affected. Bits of codes are in `codes.py`, layouts in `formats.py`, allocation is in `storage/`.

Dense windows: the first `sink_length` tokens that are not padding and the last `residual_length` tokens are kept dense,
in the tail, and attention reads them there. Every query has the window that it would have alone, as far as newer tokens
have left its rows (`window_begin`). Every token gets codes at once, so nothing happens when it leaves the window.
The tail may have room for more of the newest tokens than the window: a crop finds them there. A sequence that took over
the pages of another has in its tail a copy of the sinks, and of the newest tokens only its own, those from `tail_from`
on. It reads all others as codes.

Rings: in planes whose rows are a ring, the token at position t is in row t mod capacity. The rows hold the newest
`capacity` tokens; `ring_positions` says which. All else uses positions in the sequence, which may exceed the capacity.

Granularity `channel`: the values of a channel in a block of tokens share scale and zero. Padding and the first
`sink_length` tokens are left out of both: their codes are 0, and a block with no other tokens has scale 2^-24 and zero
0. A block is quantised from its dense values when its last token leaves the window of the last `residual_length` tokens
(with a window of 0, when that token is appended). Until then all its tokens stay dense. A NaN makes its whole channel
NaN in that block; with a rotation, all channels that are mixed with it.

Keys may be transformed first, each step rounded to float32 (center c and smoothing factors λ of a key-value head):

    key      x = (key - c) · (1 / λ), then rotated        query    λ · query, rotated; logits get query · c added

The rotation is a Hadamard matrix over blocks of the largest power of two n that divides head_dim: butterflies
(a, b) -> (a + b, a - b) of channels 1, then 2, 4, …, n / 2 apart, then one multiplication by float32(1 / sqrt(n)).
Dense tokens are not transformed; they are multiplied with plain queries.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .codes import pack, unpack
from .formats import KVFormat
from .key_transform import KeyTransform
from .planes import Planes

MIN_SCALE = 2.0**-24  # the smallest positive float16: nothing is divided by 0, and zeros dequantise to exact zeros
FP8_MAX = 448.0


def max_code(kv_format: KVFormat) -> float:
    """The L of the formulas above: the largest code magnitude, or for asymmetric formats the largest code."""
    return float(2 ** (kv_format.bits - kv_format.symmetric) - 1) if kv_format.is_integer else FP8_MAX


def code_offset(kv_format: KVFormat) -> int:
    """The offset that is added to a signed code to store it unsigned; 0 for asymmetric formats and fp8."""
    return 2 ** (kv_format.bits - 1) if kv_format.is_integer and kv_format.symmetric else 0


def rotation_block(head_dim: int) -> int:
    """How many channels a rotation mixes: the largest power of two that divides `head_dim`."""
    return head_dim & -head_dim


def rotate(x: Tensor) -> Tensor:
    """Rotate `x` (`[..., head_dim]` float32 or float64). The rotation is its own inverse. New memory."""
    shape, block = x.shape, rotation_block(x.shape[-1])
    stride = 1
    while stride < block:
        a, b = x.reshape(*shape[:-1], shape[-1] // (2 * stride), 2, stride).unbind(-2)
        x = torch.stack((a + b, a - b), dim=-2).reshape(shape)
        stride *= 2
    return x * (1 / math.sqrt(block))


def transform_key(key: Tensor, transform: KeyTransform) -> Tensor:
    """Transform keys, as is done before they are quantised.

    Args:
        key: `[batch, num_kv_heads, tokens, head_dim]`, any floating dtype.
        transform: On the same device.

    Returns:
        The same shape, float32.
    """
    x = key.float()
    if transform.center is not None:
        x = x - transform.center.unsqueeze(1)
    if transform.smoothing is not None:
        x = x * (torch.ones_like(transform.smoothing) / transform.smoothing).unsqueeze(1)
    return rotate(x) if transform.is_rotated else x


def transform_query(query: Tensor, transform: KeyTransform) -> tuple[Tensor, Tensor | None]:
    """Transform queries to match transformed keys.

    Args:
        query: `[batch, num_q_heads, q_len, head_dim]`, any floating dtype. `num_q_heads` is a multiple of the
            transform's heads.
        transform: On the same device.

    Returns:
        query: The same shape, float32.
        constant: `[batch, num_q_heads, q_len]` float32: query · center, to be added to the products with transformed
            keys; the same for all keys. `None` without a center.
    """
    x = query.float()
    constant = None
    if transform.center is not None:
        constant = (x * _per_query_head(transform.center, x)).sum(-1)
    if transform.smoothing is not None:
        x = x * _per_query_head(transform.smoothing, x)
    return (rotate(x) if transform.is_rotated else x), constant


def undo_key_transform(key: Tensor, transform: KeyTransform) -> Tensor:
    """Undo `transform_key`: keys in the model's basis, float32 (`[batch, num_kv_heads, tokens, head_dim]`)."""
    x = key.float()
    if transform.is_rotated:
        x = rotate(x)
    if transform.smoothing is not None:
        x = x * transform.smoothing.unsqueeze(1)
    if transform.center is not None:
        x = x + transform.center.unsqueeze(1)
    return x


def _per_query_head(plane: Tensor, query: Tensor) -> Tensor:
    """Repeat `[num_kv_heads, head_dim]` for the heads of `query`: `[num_q_heads, 1, head_dim]`."""
    return plane.repeat_interleave(query.shape[1] // plane.shape[0], 0).unsqueeze(1)


def compute_scale(x: Tensor, kv_format: KVFormat, is_padding: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """Compute scale and zero of `x`.

    Args:
        x: `[batch, num_kv_heads, tokens, head_dim]`, any floating dtype; whole blocks for granularity `channel`.
        kv_format: A quantised format.
        is_padding: `[batch, tokens]` bool: tokens to leave out, for granularity `channel`.

    Returns:
        scale: `kv_format.scale_shape(...)` with capacity `tokens`, float16; NaN where it cannot be represented.
        zero: Like `scale`, or `None` when symmetric.
    """
    if kv_format.block_size is None:
        high, low = _range(x.float(), kv_format)
    else:
        high, low = _block_range(x.float(), kv_format.block_size, is_padding)
    span = torch.maximum(high.abs(), low.abs()) if kv_format.symmetric else high - low
    # Divide by a tensor: on a GPU, PyTorch multiplies by the reciprocal of a Python number, which rounds differently.
    clipped = span * kv_format.clip_ratio
    scale = (clipped / torch.full_like(span, max_code(kv_format))).to(torch.float16)
    zero = None if kv_format.symmetric else (low + (span - clipped) * 0.5).to(torch.float16)
    finite = scale.isfinite() if zero is None else scale.isfinite() & zero.isfinite()
    scale = torch.where(finite, scale.clamp(min=MIN_SCALE), torch.nan)
    return scale, None if zero is None else torch.where(finite, zero, torch.nan)


def _range(x: Tensor, kv_format: KVFormat) -> tuple[Tensor, Tensor]:
    """Maximum and minimum of the values that share a scale, shaped like scale planes."""
    batch, num_kv_heads, tokens, head_dim = x.shape
    groups = kv_format.num_groups(head_dim)
    x = x.reshape(batch, num_kv_heads, tokens, groups, head_dim // groups)
    shared = {"tensor": (1, 2, 3, 4), "token": (1, 3, 4), "head": (3, 4), "group": (4,)}[kv_format.granularity]
    # [batch, heads, tokens, groups] -> [batch, heads, groups, tokens], shared axes of size 1
    return x.amax(shared, keepdim=True).squeeze(-1).mT, x.amin(shared, keepdim=True).squeeze(-1).mT


def _block_range(x: Tensor, block_size: int, is_padding: Tensor | None) -> tuple[Tensor, Tensor]:
    """The same for granularity `channel`: `[batch, heads, blocks, head_dim]`; 0 for blocks of padding only."""
    highs = lows = x
    if is_padding is not None:
        hidden = is_padding[:, None, :, None]
        highs, lows = x.masked_fill(hidden, -torch.inf), x.masked_fill(hidden, torch.inf)
    high = highs.unflatten(2, (-1, block_size)).amax(3)
    low = lows.unflatten(2, (-1, block_size)).amin(3)
    if is_padding is None:
        return high, low
    is_empty = is_padding.unflatten(1, (-1, block_size)).all(2)[:, None, :, None]
    return high.masked_fill(is_empty, 0.0), low.masked_fill(is_empty, 0.0)


def _per_channel(plane: Tensor, like: Tensor, block_size: int | None) -> Tensor:
    """Broadcast a scale plane to the shape of `like` (`[batch, heads, tokens, head_dim]`), float32."""
    batch, num_kv_heads, tokens, head_dim = like.shape
    if block_size is not None:
        return plane.float().repeat_interleave(block_size, 2)[:, :, :tokens]
    groups = plane.shape[2]
    plane = plane.float().mT.unsqueeze(-1)  # [batch, heads, tokens, groups, 1]
    spread = plane.expand(batch, num_kv_heads, tokens, groups, head_dim // groups)
    return spread.reshape(batch, num_kv_heads, tokens, head_dim)


def quantize(
    x: Tensor,
    kv_format: KVFormat,
    scale: Tensor | None = None,
    zero: Tensor | None = None,
    is_padding: Tensor | None = None,
) -> Planes:
    """Quantise `x`: compute codes, scale and zero.

    Args:
        x: `[batch, num_kv_heads, tokens, head_dim]`, any floating dtype; whole blocks for granularity `channel`.
        kv_format: A quantised format.
        scale: A frozen scale (granularity `tensor`); `None` computes it from `x`. A NaN or infinity in `x` makes the
            returned scale of that sequence NaN, and so all its tokens, since they share the scale.
        zero: The frozen zero that belongs to `scale`.
        is_padding: `[batch, tokens]` bool: tokens to leave out, for granularity `channel`.

    Returns:
        New planes for exactly these tokens: codes `[batch, num_kv_heads, tokens, row_bytes]`, scale and zero as
        `compute_scale` returns them, no tail.
    """
    if scale is None:
        scale, zero = compute_scale(x, kv_format, is_padding)
    else:
        is_bad = ~x.isfinite().flatten(1).all(1).view(-1, 1, 1, 1)
        scale = scale.masked_fill(is_bad, torch.nan)
        zero = None if zero is None else zero.masked_fill(is_bad, torch.nan)
    x = x.float()
    divisor = _per_channel(scale, x, kv_format.block_size)
    is_bad = divisor.isnan()
    if is_padding is not None:
        is_bad = is_bad | is_padding[:, None, :, None]
    if zero is not None:
        x = x - _per_channel(zero, x, kv_format.block_size)
    codes = x / divisor
    limit = max_code(kv_format)
    if kv_format.storage == "fp8":
        codes = codes.clamp(-limit, limit).masked_fill(is_bad, 0.0)
        return Planes(codes.to(torch.float8_e4m3fn).view(torch.uint8), scale, zero)
    codes = codes.round().clamp(-limit if kv_format.symmetric else 0.0, limit) + code_offset(kv_format)
    codes = codes.masked_fill(is_bad, 0.0).to(torch.uint8)
    return Planes(pack(codes, kv_format.bits), scale, zero)


def ring_positions(lengths: Tensor, capacity: int) -> Tensor:
    """Which token is in each row of a ring.

    Args:
        lengths: `[batch]`: tokens taken per sequence, overwritten ones included.
        capacity: Rows.

    Returns:
        `[batch, capacity]` int64: the position of the token in each row; negative for unused rows.
    """
    newest = lengths.long().unsqueeze(1) - 1
    return newest - (newest - torch.arange(capacity, device=lengths.device)) % capacity


def dense_tokens(
    planes: Planes,
    kv_format: KVFormat,
    lengths: Tensor,
    starts: Tensor | None = None,
    sink_length: int = 0,
    residual_length: int = 0,
    position: Tensor | None = None,
    tail_from: Tensor | None = None,
    num_behind: int = 0,
) -> tuple[Tensor, Tensor]:
    """Which tokens a query reads from the tail, and from which row.

    Args:
        planes: With or without a tail.
        kv_format: Their format.
        lengths: `[batch]`: tokens held per sequence.
        starts: `[batch]`: first position that is not padding; `None` means 0.
        sink_length: First tokens that stay dense.
        residual_length: Newest tokens that stay dense.
        position: `[batch, tokens]` int64: positions to look up, negative for no token. By default all positions up to
            the capacity.
        tail_from: `[batch]`: tokens before this position are not in the tail, except sinks; `None` for 0.
        num_behind: How many of the tokens held are behind the query. See `window_begin`.

    Returns:
        is_dense: `[batch, tokens]` bool: whether the query reads the token from the tail. False for padding that has
            left the window.
        row: `[batch, tokens]` int64: its row of the tail; 0 if it is not there.
    """
    if position is None:
        position = torch.arange(planes.codes.shape[2], device=lengths.device).expand(lengths.shape[0], -1)
    if planes.tail is None:
        return torch.zeros_like(position, dtype=torch.bool), torch.zeros_like(position)
    is_sink, row = _tail_rows(planes.tail, position, starts, sink_length)
    windows = sink_length, residual_length
    newest = window_begin(planes.tail, kv_format, lengths, *windows, tail_from, num_behind)
    is_recent = position >= newest.unsqueeze(1)
    is_dense = (is_sink | is_recent) & (position < lengths.unsqueeze(1))
    return is_dense, row.masked_fill(~is_dense, 0)


def window_begin(
    tail: Tensor,
    kv_format: KVFormat,
    lengths: Tensor,
    sink_length: int = 0,
    residual_length: int = 0,
    tail_from: Tensor | None = None,
    num_behind: int = 0,
) -> Tensor:
    """The first of the newest tokens that a query reads from the tail: `[batch]` int64.

    A query sees the window that it would see if it came alone, not the window of the last query of its call: so what
    assisted decoding accepts is what single steps would have made. Rows that newer tokens have taken bound this. A tail
    has rows for it if it was made for crops (`TAIL_SLACK`).

    Args:
        tail: Of a side.
        kv_format: Of that side.
        lengths: See `dense_tokens`, like the next three.
        sink_length: Its rows are not for the newest tokens.
        residual_length: Newest tokens that stay dense.
        tail_from: The first token that the tail may have.
        num_behind: How many of the tokens held are behind the query. The tokens from `lengths - num_behind` on, which
            it does not see, are counted in.
    """
    held = lengths.long()
    begin = kv_format.tail_begin((held - num_behind).clamp(min=0), residual_length)
    if num_behind:
        begin = begin.maximum(_first_kept(tail, kv_format, lengths, sink_length))
    return begin if tail_from is None else begin.maximum(tail_from.long())


def _first_kept(tail: Tensor, kv_format: KVFormat, lengths: Tensor, sink_length: int) -> Tensor:
    """The first of the newest tokens that have rows in a tail: `[batch]` int64."""
    num_kept = tail.shape[2] - sink_length - (kv_format.block_size or 0)
    return kv_format.tail_begin(lengths.long(), num_kept)


def _tail_rows(tail: Tensor, position: Tensor, starts: Tensor | None, sink_length: int) -> tuple[Tensor, Tensor]:
    """Which tokens are among the first `sink_length`, and the row of each token in the tail: `[batch, tokens]`."""
    behind_start = position if starts is None else position - starts.long().unsqueeze(1)
    is_sink = (behind_start >= 0) & (behind_start < sink_length)
    ring = max(1, tail.shape[2] - sink_length)  # 0 where nothing is recent
    return is_sink, torch.where(is_sink, behind_start, sink_length + position % ring)


def dequantize(
    planes: Planes,
    kv_format: KVFormat,
    dtype: torch.dtype = torch.float32,
    lengths: Tensor | None = None,
    starts: Tensor | None = None,
    sink_length: int = 0,
    residual_length: int = 0,
    key_transform: KeyTransform | None = None,
    position: Tensor | None = None,
    tail_from: Tensor | None = None,
    num_behind: int = 0,
    keeps_transform: bool = False,
) -> Tensor:
    """Dequantise: `code · scale + zero` in float32, rounded to `dtype`. Dense tokens are taken from the tail.

    Args:
        planes: Of any number of tokens.
        kv_format: Their format.
        dtype: Of the result.
        lengths: `[batch]` int32: tokens held per sequence, which decide where the tail begins. `None` ignores the tail.
        starts: `[batch]` int32: first position that is not padding, `None` for 0. Decides which tokens are the first.
        sink_length: First tokens that are dense.
        residual_length: Newest tokens that are dense.
        key_transform: The transform of the coded keys, which is undone; `None` undoes nothing.
        position: `[batch, tokens]` int64: position of each row in the sequence. By default the row's index.
        tail_from: See `dense_tokens`.
        num_behind: See `dense_tokens`.
        keeps_transform: Whether `key_transform` is not undone, and dense keys get it, too.

    Returns:
        `[batch, num_kv_heads, tokens, head_dim]`, new memory (the codes themselves for storage type `none`).
    """
    undone = None if keeps_transform else key_transform
    if not kv_format.is_quantized:
        x = planes.codes
        return (x if undone is None else undo_key_transform(x, undone)).to(dtype)
    codes, scale, zero = planes.codes, planes.scale, planes.zero
    assert scale is not None
    if kv_format.storage == "fp8":
        x = codes.view(torch.float8_e4m3fn).float()
    else:
        x = unpack(codes, kv_format.bits).float() - code_offset(kv_format)
    x = x * _per_channel(scale, x, kv_format.block_size)
    if zero is not None:
        x = x + _per_channel(zero, x, kv_format.block_size)
    if undone is not None:
        x = undo_key_transform(x, undone)
    if planes.tail is None or lengths is None:
        return x.to(dtype)
    windows = sink_length, residual_length
    is_dense, row = dense_tokens(planes, kv_format, lengths, starts, *windows, position, tail_from, num_behind)
    tail = planes.tail
    if keeps_transform and key_transform is not None:
        tail = transform_key(tail, key_transform)
    tail = tail.take_along_dim(row[:, None, :, None], 2)
    return torch.where(is_dense[:, None, :, None], tail.to(dtype), x.to(dtype))


def dequantize_tokens(
    planes: Planes,
    kv_format: KVFormat,
    begin: int,
    num_tokens: int,
    dtype: torch.dtype,
    lengths: Tensor,
    starts: Tensor | None = None,
    sink_length: int = 0,
    residual_length: int = 0,
    key_transform: KeyTransform | None = None,
    is_ring: bool = False,
    num_seen: int = 0,
    keeps_transform: bool = False,
) -> Tensor:
    """Dequantise the tokens at positions `begin … begin + num_tokens - 1`; zeros where no token is held.

    Args:
        planes: Of a layer; without a ring they have room for `begin + num_tokens` tokens.
        kv_format: Their format.
        begin: First position.
        num_tokens: Positions.
        dtype: Of the result.
        lengths: See `dequantize`.
        starts: See `dequantize`.
        sink_length: See `dequantize`.
        residual_length: See `dequantize`.
        key_transform: See `dequantize`.
        is_ring: Whether rows are a ring.
        num_seen: How many of the newest tokens count as held; 0 for all that there are rows for.
        keeps_transform: See `dequantize`.

    Returns:
        `[batch, num_kv_heads, num_tokens, head_dim]`, new memory.
    """
    capacity = planes.codes.shape[2]
    dense = functools.partial(
        dequantize,
        kv_format=kv_format,
        dtype=dtype,
        lengths=lengths,
        starts=starts,
        sink_length=sink_length,
        residual_length=residual_length,
        key_transform=key_transform,
        keeps_transform=keeps_transform,
    )
    position = begin + torch.arange(num_tokens, device=lengths.device)
    if is_ring:
        num_seen = num_seen or capacity
        at = None if planes.tail is None else ring_positions(lengths, capacity)
        x = dense(planes, position=at).index_select(2, position % capacity)
    else:
        first = begin - begin % (kv_format.block_size or 1)
        some = planes.narrow(begin + num_tokens, kv_format.block_size, first)
        at = first + torch.arange(some.codes.shape[2], device=lengths.device).expand(lengths.shape[0], -1)
        x = dense(some, position=at)[:, :, begin - first :]
    end = lengths.unsqueeze(1)
    is_absent = position >= end  # [batch, num_tokens]
    if num_seen:
        is_absent = is_absent | (position < end - num_seen)
    return x.masked_fill(is_absent[:, None, :, None], 0.0)


def append(
    x: Tensor,
    planes: Planes,
    kv_format: KVFormat,
    lengths: Tensor,
    key_transform: KeyTransform | None = None,
    starts: Tensor | None = None,
    sink_length: int = 0,
    residual_length: int = 0,
    is_ring: bool = False,
    tail_from: Tensor | None = None,
) -> None:
    """Quantise `x` and write it after the tokens that are stored already.

    Args:
        x: `[batch, num_kv_heads, q_len, head_dim]`: the new tokens of one side.
        planes: Written in place at tokens `lengths - q_len … lengths - 1`. A frozen scale (granularity `tensor`) is
            read, and overwritten only by NaN.
        kv_format: Their format.
        lengths: `[batch]` int32: tokens held per sequence, the new ones included.
        key_transform: The transform of keys before they are quantised.
        starts: `[batch]` int32: first position that is not padding. Used for granularity `channel` and for the first
            `sink_length` tokens.
        sink_length: First tokens that stay dense.
        residual_length: Newest tokens that stay dense.
        is_ring: Whether rows are a ring. If `x` has more tokens than there are rows, only the newest get codes.
        tail_from: See `dense_tokens`. Blocks before it have their codes and keep them.
    """
    if kv_format.granularity == "channel":
        windows = sink_length, residual_length
        _append_in_blocks(x, planes, kv_format, lengths, key_transform, starts, *windows, is_ring, tail_from)
    else:
        newest = x[:, :, -planes.codes.shape[2] :] if is_ring else x
        transformed = newest if key_transform is None else transform_key(newest, key_transform)
        _append_tokens(transformed, planes, kv_format, lengths, is_ring)
    if planes.tail is None:
        return
    q_len = x.shape[2]
    position = (lengths.long() - q_len).unsqueeze(1) + torch.arange(q_len, device=x.device)  # [batch, q_len]
    is_sink, row = _tail_rows(planes.tail, position, starts, sink_length)
    # Beyond what the newest query reads, the tail may have rows for older queries and for a crop.
    is_kept = is_sink | (position >= _first_kept(planes.tail, kv_format, lengths, sink_length).unsqueeze(1))
    for b in range(x.shape[0]):
        planes.tail[b][:, row[b, is_kept[b]]] = x[b][:, is_kept[b]].to(planes.tail.dtype)


def _append_tokens(x: Tensor, planes: Planes, kv_format: KVFormat, lengths: Tensor, is_ring: bool) -> None:
    """Write the codes of `append`, for all granularities except `channel`."""
    q_len = x.shape[2]
    if kv_format.granularity == "tensor":
        new = quantize(x, kv_format, planes.scale, planes.zero)
        for plane, written in ((planes.scale, new.scale), (planes.zero, new.zero)):
            if plane is not None and written is not None:
                plane.copy_(written)
    else:
        new = quantize(x, kv_format) if kv_format.is_quantized else Planes(x.to(planes.codes.dtype), None, None)
    position = (lengths.long() - q_len).unsqueeze(1) + torch.arange(q_len, device=x.device)  # [batch, q_len]
    if is_ring:
        position = position % planes.codes.shape[2]
    rows = position[:, None, :, None]
    planes.codes.scatter_(2, rows.expand_as(new.codes), new.codes)
    if kv_format.granularity != "tensor":
        for plane, written in ((planes.scale, new.scale), (planes.zero, new.zero)):
            if plane is not None and written is not None:
                plane.scatter_(3, position[:, None, None, :].expand_as(written), written)


def _append_in_blocks(
    x: Tensor,
    planes: Planes,
    kv_format: KVFormat,
    lengths: Tensor,
    key_transform: KeyTransform | None,
    starts: Tensor | None,
    sink_length: int,
    residual_length: int,
    is_ring: bool,
    tail_from: Tensor | None,
) -> None:
    """Write the codes of `append` for granularity `channel`, one sequence at a time."""
    size, tail, scale, zero = kv_format.block_size, planes.tail, planes.scale, planes.zero
    assert size is not None and tail is not None and scale is not None and zero is not None
    for b, length in enumerate(lengths.tolist()):
        first = length - x.shape[2]
        # First token of, and one past, the blocks that leave the window with this append.
        least = 0 if tail_from is None else int(tail_from[b])
        begin, end = (max(kv_format.tail_begin(tokens, residual_length), least) for tokens in (first, length))
        capacity = planes.codes.shape[2]
        if is_ring:
            begin = max(begin, end - capacity)
        if begin == end:
            continue
        held = torch.arange(begin, max(begin, min(first, end)), device=x.device)
        ring = tail[b][:, sink_length + held % (tail.shape[2] - sink_length)]
        dense = torch.cat((ring, x[b, :, max(0, begin - first) : max(0, end - first)].to(tail.dtype)), dim=1)
        is_left_out = None
        if starts is not None or sink_length > 0:
            start = 0 if starts is None else starts[b].long()
            is_left_out = (torch.arange(begin, end, device=x.device) < start + sink_length)[None]
        block_keys = dense[None] if key_transform is None else transform_key(dense[None], key_transform)
        new = quantize(block_keys, kv_format, is_padding=is_left_out)
        assert new.scale is not None and new.zero is not None
        row = torch.arange(begin, end, device=x.device) % capacity
        block = row[::size] // size
        planes.codes[b][:, row] = new.codes[0]
        scale[b][:, block] = new.scale[0]
        zero[b][:, block] = new.zero[0]


def decode_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: Tensor,
    *,
    softmax_scale: float,
    starts: Tensor | None = None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    softcap: float = 0.0,
    sliding_window: int = 0,
    key_transform: KeyTransform | None = None,
    is_dense: Tensor | None = None,
    key_position: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of the newest tokens to all stored tokens, on dequantised keys and values.

    Query i of `q_len` is at position `lengths - q_len + i`. It attends to positions j from `starts` up to its own and,
    with a window, only to the last `sliding_window` of these. The logit is `softmax_scale · query · key`, then
    `softcap · tanh(logit / softcap)` when `softcap > 0`, then plus `slope · (j - position)` with ALiBi.

    Args:
        query: `[batch, num_q_heads, q_len, head_dim]`.
        key: `[batch, num_kv_heads, capacity, head_dim]`; query head h uses head `h // num_q_per_kv`.
        value: `[batch, num_kv_heads, capacity, value head_dim]`.
        lengths: `[batch]` int32: tokens held, including the query's.
        softmax_scale: Multiplies query · key.
        starts: `[batch]` int32: first position that is not padding; `None` means 0.
        sinks: `[num_q_heads]` float32: logits that take part in the softmax but have no value (gpt-oss).
        alibi_slopes: `[num_q_heads]` float32.
        softcap: 0 for none.
        sliding_window: Positions visible to a query; 0 for all.
        key_transform: The transform of `key`. Queries are transformed too, so logits are as with plain keys.
        is_dense: `[batch, capacity]` bool: keys that are not transformed.
        key_position: `[batch, capacity]` int64: position of each key and value in the sequence, negative for unused
            rows. By default the row's index.

    Returns:
        out: `[batch, q_len, num_q_heads, value head_dim]`, dtype of `query`; zero where nothing is attended.
        lse: `[batch, num_q_heads, q_len]` float32: natural log of the summed exponentials of the attended logits, the
            sink included; `-inf` where nothing is attended.
    """
    batch, num_q_heads, q_len, head_dim = query.shape
    num_kv_heads, capacity = key.shape[1], key.shape[2]
    x, constant = (query.float(), None) if key_transform is None else transform_query(query, key_transform)

    def products(x: Tensor) -> Tensor:
        grouped = x.reshape(batch, num_kv_heads, num_q_heads // num_kv_heads, q_len, head_dim)
        return (grouped @ key.float().unsqueeze(2).mT).view(batch, num_q_heads, q_len, capacity)

    scores = products(x) if constant is None else products(x) + constant.unsqueeze(-1)
    if key_transform is not None and is_dense is not None:
        scores = torch.where(is_dense[:, None, None, :], products(query.float()), scores)
    scores = softmax_scale * scores
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    rows = torch.arange(capacity, device=query.device) if key_position is None else key_position
    column = rows.view(-1, 1, 1, capacity)
    position = lengths.long().view(-1, 1, 1, 1) - q_len + torch.arange(q_len, device=query.device).view(1, 1, -1, 1)
    if alibi_slopes is not None:
        scores = scores + alibi_slopes.float().view(1, -1, 1, 1) * (column - position)
    is_visible = (column <= position) & (column >= 0)
    if starts is not None:
        is_visible = is_visible & (column >= starts.view(-1, 1, 1, 1))
    if sliding_window > 0:
        is_visible = is_visible & (column > position - sliding_window)
    # Replace masked scores, which may be NaN, instead of adding a mask.
    scores = scores.masked_fill(~is_visible, -torch.inf)
    sink = None if sinks is None else sinks.float().view(1, -1, 1, 1).expand(batch, -1, q_len, 1)
    logits = scores if sink is None else torch.cat((scores, sink), dim=-1)
    lse = logits.logsumexp(-1)
    weights = torch.exp(scores - lse.unsqueeze(-1)).masked_fill(~is_visible, 0.0)
    # 0 · NaN would be NaN. So values that are not finite are left out of the product, and put back as NaN for the
    # queries that see them.
    is_bad = ~value.isfinite()
    clean = value.float().masked_fill(is_bad, 0.0)
    num_rows = num_q_heads // num_kv_heads * q_len
    out = weights.view(batch, num_kv_heads, num_rows, capacity) @ clean
    if is_bad.any():
        seen = is_visible.expand(batch, num_q_heads, q_len, capacity).reshape(batch, num_kv_heads, num_rows, capacity)
        out = out.masked_fill(seen.float() @ is_bad.float() > 0, torch.nan)
    out = out.view(batch, num_q_heads, q_len, value.shape[-1])
    return out.transpose(1, 2).to(query.dtype).contiguous(), lse


def merge_attention(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Attention to the tokens of two parts, from attention to each of them.

    Args:
        out: `[batch, q_len, num_q_heads, value head_dim]`.
        lse: `[batch, num_q_heads, q_len]` float32: natural log of the summed exponentials of the logits.
        other: `out` of the other part.
        other_lse: `lse` of the other part.

    Returns:
        out: Like `out`, in new memory with its strides; zero where nothing is attended in either part.
        lse: Like `lse`.
    """
    # Where nothing is attended, -inf - -inf is NaN.
    weight = (other_lse - lse).sigmoid().nan_to_num(0.0).mT.unsqueeze(-1)
    return torch.lerp(out, other, weight.to(out.dtype)), torch.logaddexp(lse, other_lse)


class Tails(NamedTuple):
    """What a page table says of tails: its first columns, `[batch]` int32 each.

    Attributes:
        slot: The sequence's tail, as an index into the first axis of tail planes. Slots are not pages: there may be
            more of them or fewer.
        tail_from: The first token that this tail may have, besides sinks. 0, or the number of tokens that the sequence
            took over from another one as codes: a multiple of `BLOCK_SIZE`, at most the tokens held before this call.
    """

    slot: Tensor
    tail_from: Tensor


# Columns of a page table before the pages of tokens, if a layout has tails.
NUM_TAIL_COLUMNS = len(Tails._fields)


def split_tails(page_table: Tensor, has_tails: bool) -> tuple[Tails | None, Tensor]:
    """What a page table says of tails, or `None`, and the pages of tokens, `[batch, pages]` int32."""
    if not has_tails:
        return None, page_table
    return Tails(*page_table[:, :NUM_TAIL_COLUMNS].unbind(1)), page_table[:, NUM_TAIL_COLUMNS:]


def gather_pages(
    planes: Planes, page_table: Tensor, tail_slot: Tensor | None = None, block_size: int | None = None
) -> Planes:
    """Copy the pages of every sequence side by side: the planes of `page_table.shape[0]` sequences.

    Args:
        planes: The first axis counts pages, that of a tail slots.
        page_table: `[batch, pages of a sequence]` int32, columns of tails left out: see `split_tails`. Numbers that are
            no page stand for pages without tokens.
        tail_slot: `[batch]` int32: which tail a sequence has; `None` without tails.
        block_size: Of the format; `None` without channel scales.
    """
    page = page_table.clamp(0, len(planes.codes) - 1).long()
    axes = planes.token_axes(block_size)

    def gather(name: str, plane: Tensor | None) -> Tensor | None:
        return None if plane is None else plane[page].movedim(1, axes[name]).flatten(axes[name], axes[name] + 1)

    codes, scale, zero = (gather(name, getattr(planes, name)) for name in ("codes", "scale", "zero"))
    assert codes is not None
    if planes.tail is None or tail_slot is None:
        return Planes(codes, scale, zero)
    return Planes(codes, scale, zero, planes.tail[tail_slot.clamp(0, len(planes.tail) - 1).long()])


def scatter_pages(
    gathered: Planes,
    planes: Planes,
    page_table: Tensor,
    tail_slot: Tensor | None,
    lengths: Tensor,
    num_written: int,
    block_size: int | None,
) -> None:
    """Copy back to `planes` the pages that hold the newest `num_written` of `lengths` tokens, and tails.

    A block of channel scales has its last token in one page with its first. See `gather_pages`.
    """
    num_pages, rows = page_table.shape[1], planes.codes.shape[2]
    begin = torch.arange(num_pages, device=lengths.device) * rows
    is_written = (begin < lengths[:, None]) & (begin + rows > lengths[:, None] - num_written)
    sequence, number = is_written.nonzero(as_tuple=True)
    page, axes = page_table[sequence, number].long(), planes.token_axes(block_size)
    for name, axis in axes.items():
        old, new = getattr(planes, name), getattr(gathered, name)
        old[page] = new.unflatten(axis, (num_pages, old.shape[axis])).movedim(axis, 1)[sequence, number]
    if planes.tail is not None and gathered.tail is not None and tail_slot is not None:
        is_held = lengths > 0
        planes.tail[tail_slot[is_held].long()] = gathered.tail[is_held]


# --- operations between linear layers ---------------------------------------------------------------------------------


def _check_dense(where: str, **tensors: Tensor) -> None:
    """Refuse tensors that are not dense, or differ in dtype or device. PyTorch would promote them or fail later."""
    first, like = next(iter(tensors.items()))
    for name, x in tensors.items():
        if x is None or x.layout != torch.strided or x.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            got = x if x is None else f"{x.dtype} {x.layout}"
            raise ValueError(f"{where}: `{name}` must be a dense float32, float16 or bfloat16 tensor, got {got}.")
        if (x.dtype, x.device) != (like.dtype, like.device):
            raise ValueError(
                f"{where}: `{name}` must be {like.dtype} on {like.device} like `{first}`, got {x.dtype} on {x.device}."
            )


def check_shape(where: str, name: str, x: Tensor, wanted: str, sizes: Sequence[int | None]) -> None:
    """Refuse a tensor of other sizes. `None` stands for any, `wanted` says it in words."""
    if x.ndim != len(sizes) or any(size not in (None, found) for size, found in zip(sizes, x.shape, strict=True)):
        raise ValueError(f"{where}: `{name}` must be {wanted}, got {list(x.shape)}.")


def rms_norm(
    x: Tensor,
    weight: Tensor,
    mean: Tensor | None,
    eps: float,
    is_zero_centered: bool = False,
    gate: Tensor | None = None,
) -> Tensor:
    """RMSNorm with the same roundings as Llama's, or as Gemma's.

    Args:
        x: `[..., channels]`.
        weight: `[channels]`, dtype of `x`.
        mean: `[..., 1]` float32: mean of the squares of each row. `None` computes it, in the order of `torch.mean`.
        eps: Added to the mean.
        is_zero_centered: Whether `1 + weight` multiplies, as Gemma does and Qwen3-Next: only the product is rounded.
        gate: Like `x`; its SiLU multiplies the result, once that is rounded. `None` for nothing.

    Returns:
        Like `x`, new memory.

    Raises:
        ValueError: A shape does not fit.
    """
    _check_dense("rms_norm", x=x, weight=weight, **({} if gate is None else {"gate": gate}))
    rows = [*x.shape[:-1], 1]
    check_shape("rms_norm", "weight", weight, f"{list(x.shape[-1:])} like the channels of `x`", x.shape[-1:] or (None,))
    if mean is not None and (list(mean.shape), mean.dtype, mean.layout) != (rows, torch.float32, torch.strided):
        raise ValueError(
            f"rms_norm: `mean` must be {rows} dense float32, one number for each row, got {list(mean.shape)} "
            f"{mean.dtype} {mean.layout}."
        )
    wide = x.float()
    mean = wide.pow(2).mean(-1, keepdim=True) if mean is None else mean
    normed = wide * torch.rsqrt(mean + eps)
    scaled = (normed * (1.0 + weight.float())).to(x.dtype) if is_zero_centered else weight * normed.to(x.dtype)
    if gate is None:
        return scaled
    check_shape("rms_norm", "gate", gate, f"{list(x.shape)} like `x`", x.shape)
    return (scaled * torch.nn.functional.silu(gate.float())).to(x.dtype)


def add_rms_norm(
    x: Tensor, other: Tensor, weight: Tensor, eps: float, is_zero_centered: bool = False
) -> tuple[Tensor, Tensor]:
    """The sum of two tensors of equal shape, rounded to their dtype, and the RMSNorm of that sum. New memory."""
    _check_dense("add_rms_norm", x=x, other=other)
    check_shape("add_rms_norm", "other", other, f"{list(x.shape)} like `x`", x.shape)
    total = x + other
    return total, rms_norm(total, weight, None, eps, is_zero_centered)


def rotary(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotary embedding that pairs the two halves of each head; each product and sum is rounded to the dtype.

    Args:
        query: `[batch, num_q_heads, q_len, head_dim]`.
        key: `[batch, num_kv_heads, q_len, head_dim]`.
        cos: `[batch or 1, q_len, rotary_dim]`, dtype of `query`: of the first channels of a head. Others stay.
        sin: The same.

    Returns:
        query, key: New memory.

    Raises:
        ValueError: A shape does not fit.
    """
    _check_dense("rotary", query=query, key=key, cos=cos, sin=sin)
    check_shape("rotary", "query", query, "[batch, heads, tokens, head_dim]", (None, None, None, None))
    batch, _, q_len, head_dim = query.shape
    wanted = f"[{batch}, heads, {q_len}, {head_dim}] like `query`"
    check_shape("rotary", "key", key, wanted, (batch, None, q_len, head_dim))
    rotary_dim = cos.shape[-1] if cos.ndim else 0
    if not 0 < rotary_dim <= head_dim or rotary_dim % 2:
        raise ValueError(
            f"rotary: `cos` must have an even number of channels, at most {head_dim}, got {list(cos.shape)}. Use the "
            "model's own function."
        )
    for name, x in (("cos", cos), ("sin", sin)):
        wanted = f"[{batch} or 1, {q_len}, {rotary_dim}] like `query`"
        check_shape("rotary", name, x, wanted, (1 if x.shape[:1] == (1,) else batch, q_len, rotary_dim))

    def turned(x: Tensor) -> Tensor:
        first, rest = x.split((rotary_dim, head_dim - rotary_dim), dim=-1)
        low, high = first.chunk(2, dim=-1)
        first = first * cos.unsqueeze(1) + torch.cat((-high, low), dim=-1) * sin.unsqueeze(1)
        return torch.cat((first, rest), dim=-1) if rest.shape[-1] else first

    return turned(query), turned(key)


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """`silu(gate)`, rounded to the dtype, times `up`, which has the same shape. New memory."""
    _check_dense("silu_mul", gate=gate, up=up)
    check_shape("silu_mul", "up", up, f"{list(gate.shape)} like `gate`", gate.shape)
    return torch.nn.functional.silu(gate) * up


# torchao's tile-packed int4 weights: outputs of a tile, inputs of a slice of it, and inputs that may share a scale.
PACKED_OUTPUTS, PACKED_INPUTS = 8, 128
PACKED_GROUP_SIZES = (32, 64, 128, 256)


def packed_linear(x: Tensor, codes: Tensor, scale_and_zero: Tensor, group_size: int) -> Tensor:
    """A linear layer with int4 weights in PyTorch's tiles for GPUs, up to the order in which products are added.

    A weight is code · scale + zero, rounded to bfloat16, with codes that count from -8. The layout comes from
    `aten::_convert_weight_to_int4pack` with 8 inner tiles; torchao's `Int4TilePackedTo4dTensor` has it.

    Args:
        x: `[rows, inputs]` bfloat16, a multiple of 128 inputs.
        codes: `[outputs / 8, inputs / 128, 32, 4]` int32: 8 outputs and 128 inputs in a tile. Word j of lane 4g + t is
            of output g. Its four bits from bit 16h + 4n on are the code of input 32j + 8n + 2t + h.
        scale_and_zero: `[inputs / group_size, outputs, 2]` bfloat16.
        group_size: Inputs that share a scale and a zero: 32, 64, 128 or 256.

    Returns:
        `[rows, outputs]` bfloat16.

    Raises:
        ValueError: A shape or dtype does not fit.
    """
    check_shape("packed_linear", "x", x, "[rows, inputs]", (None, None))
    inputs = x.shape[1]
    if x.dtype != torch.bfloat16 or inputs == 0 or inputs % PACKED_INPUTS:
        raise ValueError(
            f"packed_linear: `x` must be bfloat16 with a multiple of {PACKED_INPUTS} inputs, got {inputs} {x.dtype}."
        )
    slices = inputs // PACKED_INPUTS
    check_shape("packed_linear", "codes", codes, f"[outputs / 8, {slices}, 32, 4]", (None, slices, 32, 4))
    if group_size not in PACKED_GROUP_SIZES or inputs % group_size:
        raise ValueError(
            f"packed_linear: `group_size` must be 32, 64, 128 or 256 and divide the {inputs} inputs, got {group_size}."
        )
    sizes = (inputs // group_size, len(codes) * PACKED_OUTPUTS, 2)
    check_shape("packed_linear", "scale_and_zero", scale_and_zero, str(list(sizes)), sizes)
    shifts = 4 * torch.arange(8, device=codes.device).view(2, 4)
    # [tile, slice, g, t, j, h, n] to [tile, g, slice, j, n, t, h]
    unpacked = (codes.unflatten(2, (PACKED_OUTPUTS, 4))[..., None, None] >> shifts & 15).permute(0, 2, 1, 4, 6, 3, 5)
    scale, zero = scale_and_zero.transpose(0, 1).repeat_interleave(group_size, 1).double().unbind(-1)
    weight = ((unpacked.reshape(sizes[1], inputs) - 8) * scale + zero).to(torch.bfloat16)
    product: Tensor = x.float() @ weight.float().T
    return product.to(torch.bfloat16)
