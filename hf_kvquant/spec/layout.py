"""The layout of one layer: what both of its sides have in common."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from .formats import KVFormat, Planes

# Batch, key-value heads, head_dim of keys and of values.
Shape = tuple[int, int, int, int]


@dataclasses.dataclass(frozen=True)
class KVLayout:
    key: KVFormat
    value: KVFormat
    sink_length: int = 0
    residual_length: int = 0
    is_ring: bool = False

    @property
    def formats(self) -> tuple[KVFormat, KVFormat]:
        return self.key, self.value

    @property
    def windows(self) -> dict[str, Any]:
        """The dense windows, as keyword arguments of functions that handle tails."""
        return {"sink_length": self.sink_length, "residual_length": self.residual_length}

    @property
    def token_alignment(self) -> int:
        return max(self.key.token_alignment, self.value.token_alignment)

    @property
    def has_tail(self) -> bool:
        return any(each.tail_rows(**self.windows) > 0 for each in self.formats)

    def allocate(
        self, shape: Shape, capacity: int, *, dtype: torch.dtype, device: torch.device
    ) -> tuple[Planes, Planes]:
        batch, num_kv_heads, *head_dims = shape
        key, value = (
            each.allocate(batch, num_kv_heads, head_dim, capacity, dtype=dtype, device=device, **self.windows)
            for each, head_dim in zip(self.formats, head_dims, strict=True)
        )
        return key, value

    def bytes_per_token(self, shape: Shape, dtype: torch.dtype) -> int:
        _, num_kv_heads, *head_dims = shape
        return sum(
            each.bytes_per_token(num_kv_heads, dim, dtype) for each, dim in zip(self.formats, head_dims, strict=True)
        )

    def tail_bytes(self, shape: Shape, dtype: torch.dtype) -> int:
        _, num_kv_heads, *head_dims = shape
        return sum(
            each.tail_bytes(num_kv_heads, dim, dtype, **self.windows)
            for each, dim in zip(self.formats, head_dims, strict=True)
        )

    def num_coded(self, side: int, length: int) -> int:
        """How many of `length` tokens have codes: all, or with blocks those in blocks that have left the window."""
        kv_format = self.formats[side]
        return length if kv_format.block_size is None else kv_format.tail_begin(length, self.residual_length)

    def coded(self, sides: tuple[Planes, Planes], length: int) -> tuple[Planes, Planes]:
        """The rows of planes that hold the codes of `length` tokens."""
        key, value = (
            planes.narrow(min(self.num_coded(side, length), planes.codes.shape[2]), self.formats[side].block_size)
            for side, planes in enumerate(sides)
        )
        return key, value
