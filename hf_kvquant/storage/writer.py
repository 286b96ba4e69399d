"""Writes new tokens into a layer's planes, each exactly once, alone or along with the attention that needs them.

Pages of continuous batching, which many requests share, are written by `batching/attention.py` instead.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import ops
from ..spec import reference
from ..spec.key_transform import KeyTransform
from ..spec.layout import KVLayout
from ..spec.planes import Planes


class Writer:
    """Tokens that lengths count already and that wait to be quantised.

    Attributes:
        pending: Their keys and values; `None` if all tokens are written.
        counters: Scratch of the CUDA kernel, zero between calls; `None` elsewhere. See `ops.Operands.decode`. Not
            shared: two streams may work on two layers at once.
    """

    def __init__(self) -> None:
        self.pending: tuple[Tensor, Tensor] | None = None
        self.counters: Tensor | None = None
        self._operands: ops.Operands | None = None

    def __getstate__(self) -> dict[str, Any]:
        """For pickle and deepcopy: the copy gets its operands anew, since kernels may differ where it is loaded."""
        return {**self.__dict__, "_operands": None}

    def write_to(self, planes: tuple[Planes, Planes], layout: KVLayout, key_transform: KeyTransform | None) -> None:
        """Write into these planes from now on."""
        self._operands = ops.Operands(*planes, layout, key_transform)

    def forget_planes(self) -> None:
        """Drop the planes."""
        self._operands = None

    @property
    def takes_split_plan(self) -> bool:
        """Whether `attend` makes use of a split plan. See `ops.Operands.decode`."""
        return self._operands is not None and self._operands.takes_split_plan

    def append(self, lengths: Tensor, starts: Tensor | None) -> None:
        """Write the pending tokens. See `ops.Operands.append`."""
        assert self.pending is not None and self._operands is not None
        self._operands.append(*self.pending, lengths, starts)
        self.pending = None

    def attend(
        self, query: Tensor, lengths: Tensor, starts: Tensor | None, *, is_chunk: bool = False, **options: Any
    ) -> tuple[Tensor, Tensor]:
        """Write the pending tokens and attend to everything stored, in one op. See `ops.Operands.decode`.

        Args:
            query: Of the newest tokens.
            lengths, starts: As in `Operands.decode`.
            is_chunk: Whether pending tokens are attended to as the model made them. See `Operands.attend_chunk`.
            **options: As in `Operands.decode`.
        """
        assert self._operands is not None
        options |= {"starts": starts, "counters": self.counters}
        if is_chunk and self.pending is not None:
            result = self._operands.attend_chunk(query, self.pending, lengths, **options)
            self.append(lengths, starts)
        else:
            result = self._operands.decode(query, self.pending, lengths, **options)
            self.pending = None  # only now: a refused query must not lose tokens that `lengths` already counts
        return result

    def serves_latent(self, dtype: torch.dtype) -> bool:
        """Whether `attend_latent` runs a kernel. See `ops.Operands.serves_latent`."""
        return self._operands is not None and self._operands.serves_latent(dtype)

    def attend_latent(self, query: Tensor, lengths: Tensor, starts: Tensor | None, **options: Any) -> Tensor:
        """Write the pending tokens and attend to the latents stored. See `ops.Operands.attend_latent`."""
        assert self._operands is not None
        if self.pending is not None:
            self.append(lengths, starts)
        return self._operands.attend_latent(query, lengths, starts=starts, **options)[0]

    def dequantize(self, lengths: Tensor, starts: Tensor | None, **options: Any) -> tuple[Tensor, Tensor]:
        """Dense keys and values of what is written. See `ops.Operands.dequantize`."""
        assert self._operands is not None
        return self._operands.dequantize(lengths, starts, **options)


def freeze_scales(
    sides: tuple[Planes, Planes],
    layout: KVLayout,
    key_transform: KeyTransform | None,
    new: tuple[Tensor, Tensor],
) -> None:
    """Granularity `tensor`: fix the scale from these tokens, the first of each sequence."""
    for x, planes, kv_format, transform in zip(new, sides, layout.formats, (key_transform, None), strict=True):
        if kv_format.granularity == "tensor" and planes.scale is not None:
            if transform is not None:
                x = reference.transform_key(x, transform)
            scale, zero = reference.compute_scale(x, kv_format)
            planes.scale.copy_(scale)
            if planes.zero is not None and zero is not None:
                planes.zero.copy_(zero)
