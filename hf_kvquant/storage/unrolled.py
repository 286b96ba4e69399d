"""Attention to a chunk that is too long for the ring of its layer.

The tokens of such a chunk overwrite some that its first query sees. So before it is written, the past that its queries
see is copied, in order, into temporary buffers, and the chunk is appended there too. Attention reads these buffers.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from .. import ops
from ..spec.formats import BLOCK_SIZE
from ..spec.key_transform import KeyTransform
from ..spec.layout import KVLayout
from ..spec.planes import Planes
from .rows import whole_blocks


@dataclasses.dataclass(frozen=True)
class Unrolled:
    """The temporary buffers of one chunk.

    Attributes:
        planes: Of keys and of values, with the tokens from position `begin` on.
        operands: Of these planes.
        begin: 0-d int64, a multiple of `BLOCK_SIZE`: position of the first token.
        lengths: `[batch]` int32: tokens from there on, including the chunk's.
    """

    planes: tuple[Planes, Planes]
    operands: ops.Operands
    begin: Tensor
    lengths: Tensor

    def starts(self, starts: Tensor | None) -> Tensor | None:
        """First positions that are not padding, counted from `begin`."""
        return None if starts is None else (starts - self.begin).clamp(min=0).to(torch.int32)

    def attend(self, query: Tensor, starts: Tensor | None, **options: Any) -> tuple[Tensor, Tensor]:
        """See `ops.Operands.decode`."""
        return self.operands.decode(query, None, self.lengths, starts=self.starts(starts), **options)

    def dequantize(
        self, lengths: Tensor, starts: Tensor | None, *, begin: int, num_tokens: int, num_seen: int, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Dense keys and values, `[batch, num_kv_heads, num_tokens, head_dim]` each.

        Args:
            lengths: `[batch]` int32: tokens held per sequence, counted from its beginning.
            starts: `[batch]` int32: first position that is not padding; `None` for 0.
            begin: Position of the first token that is shown.
            num_tokens: How many are shown.
            num_seen: The result is zero for all but this many of the newest tokens.
            dtype: Of the result.
        """
        # The host does not know where these buffers begin: all of their tokens, then those that are shown.
        room = self.planes[0].codes.shape[2]
        position = torch.arange(begin, begin + num_tokens, device=lengths.device)
        row = (position - self.begin).clamp(min=0, max=room - 1)
        is_hidden = (position >= lengths.unsqueeze(1)) | (position < lengths.unsqueeze(1) - num_seen)
        options: dict[str, Any] = {"begin": 0, "num_tokens": room, "dtype": dtype}
        key, value = (
            x.index_select(2, row).masked_fill(is_hidden[:, None, :, None], 0.0)
            for x in self.operands.dequantize(self.lengths, self.starts(starts), **options)
        )
        return key, value


def unroll(
    ring: tuple[Planes, Planes],
    layout: KVLayout,
    key_transform: KeyTransform | None,
    new: tuple[Tensor, Tensor],
    lengths: Tensor,
    starts: Tensor | None,
) -> Unrolled:
    """Copy the newest tokens of a ring in order into temporary buffers, and append a chunk to them.

    Args:
        ring: Planes of keys and of values, without the chunk.
        layout: Of the ring.
        key_transform: Of the ring.
        new: Keys and values of the chunk.
        lengths: `[batch]` int32: tokens held per sequence, including the chunk's.
        starts: `[batch]` int32: first position that is not padding; `None` for 0.
    """
    q_len, capacity, device = new[0].shape[2], ring[0].codes.shape[2], lengths.device
    begin = (lengths[0].long() - q_len - capacity).clamp(min=0) // BLOCK_SIZE * BLOCK_SIZE
    row = torch.arange(capacity + whole_blocks(BLOCK_SIZE + q_len), device=device)
    source = (begin + row) % capacity  # rows after the past are overwritten by the chunk or beyond lengths

    def unrolled(planes: Planes, block_size: int | None) -> Planes:
        tail = planes.tail
        if tail is not None:
            tail = tail.index_select(2, (begin + torch.arange(tail.shape[2], device=device)) % tail.shape[2])
        return dataclasses.replace(planes.rows(source, block_size), tail=tail)

    planes = unrolled(ring[0], layout.key.block_size), unrolled(ring[1], layout.value.block_size)
    operands = ops.Operands(*planes, dataclasses.replace(layout, rows="linear"), key_transform)
    made = Unrolled(planes, operands, begin, (lengths - begin).to(torch.int32))
    operands.append(*new, made.lengths, made.starts(starts))
    return made
