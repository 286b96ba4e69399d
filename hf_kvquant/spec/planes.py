"""`Planes`: the tensors of one side (keys or values) of one layer. `formats.py` decides their shapes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclasses.dataclass(frozen=True)
class Planes:
    """The tensors of one side. Planes are shared, not copied; `None` where the format has no such plane.

    Attributes:
        codes: `[batch, num_kv_heads, capacity, row_bytes]` uint8, natural channel order, or
            `[batch, num_kv_heads, capacity, head_dim]` in the model's dtype for storage type `none`.
        scale: `[batch, num_kv_heads | 1, num_groups, capacity | 1]` float16; for granularity `channel`
            `[batch, num_kv_heads, capacity / block_size, head_dim]`.
        zero: Like `scale`; `None` when symmetric.
        tail: `[batch, num_kv_heads, sink_length + ring, head_dim]` in the model's dtype: dense tokens. The token at
            position t is in row `sink_length` + t mod ring, except the first `sink_length` tokens. `None` without
            dense windows, except with granularity `channel`, which always has a tail.
    """

    codes: Tensor
    scale: Tensor | None
    zero: Tensor | None
    tail: Tensor | None = None

    def tensors(self) -> list[Tensor]:
        """The planes that exist, in a fixed order."""
        return [plane for plane in (self.codes, self.scale, self.zero, self.tail) if plane is not None]

    def map(self, function: Callable[[Tensor], Tensor]) -> Planes:
        """New planes: `function` applied to every plane that exists."""
        scale, zero, tail = (None if plane is None else function(plane) for plane in (self.scale, self.zero, self.tail))
        return Planes(function(self.codes), scale, zero, tail)

    def narrow(self, end: int, block_size: int | None = None, begin: int = 0) -> Planes:
        """The planes of tokens `begin … end - 1`, as views. A frozen scale and a tail stay whole.

        Args:
            end: One past the last token.
            block_size: Of the format; `None` without channel scales.
            begin: The first token; at the start of a block.
        """

        def cut(plane: Tensor | None) -> Tensor | None:
            if plane is None:
                return None
            if block_size is not None:
                return plane[:, :, begin // block_size : -(-end // block_size)]
            return plane if plane.shape[-1] == 1 else plane[..., begin:end]

        return Planes(self.codes[:, :, begin:end], cut(self.scale), cut(self.zero), self.tail)

    def rows(self, row: Tensor, block_size: int | None = None) -> Planes:
        """The planes of the tokens in some rows, copied. A frozen scale and a tail stay whole and are not copied.

        Args:
            row: `[rows]` int64. With channel scales, whole blocks in order; the last one may be cut short.
            block_size: As in `narrow`.
        """
        axes = self.token_axes(block_size)

        def chosen(name: str, plane: Tensor | None) -> Tensor | None:
            if plane is None or name not in axes:
                return plane
            return plane.index_select(axes[name], row if block_size is None else row[::block_size] // block_size)

        return Planes(
            self.codes.index_select(2, row), chosen("scale", self.scale), chosen("zero", self.zero), self.tail
        )

    def token_axes(self, block_size: int | None = None) -> dict[str, int]:
        """The token axis of every plane that grows with tokens, by name; the block axis with channel scales.

        A frozen scale and a tail do not grow. Call it on whole planes: the scale of a single token looks frozen.

        Args:
            block_size: As in `narrow`.
        """
        axes = {"codes": 2}
        for name, plane in (("scale", self.scale), ("zero", self.zero)):
            if plane is not None and (block_size is not None or plane.shape[-1] > 1):
                axes[name] = 3 if block_size is None else 2
        return axes

    @property
    def num_bytes(self) -> int:
        """Bytes allocated for all planes."""
        return sum(plane.numel() * plane.element_size() for plane in self.tensors())
