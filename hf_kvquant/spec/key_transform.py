"""`KeyTransform`: how one layer's keys are transformed before they are quantised, as one object that caches share.

A transform is exact up to rounding: transformed queries and keys give the same scores as plain ones, less
`query · center`, which attention adds back. This file holds and checks the tensors. `reference.py` defines how they
change a key and a query, operation by operation. Centres come from `centering.py` or calibration, smoothing factors
from calibration. `storage/` decides when they are applied.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True, eq=False)
class KeyTransform:
    """The transform of one layer's keys: centre, smooth, rotate, in this order. Each step is optional.

    Attributes:
        center: `[num_kv_heads, head_dim]` float32, subtracted from keys after RoPE.
        smoothing: `[num_kv_heads, head_dim]` float32, positive. Keys are divided by these factors, queries multiplied.
        is_rotated: Whether keys and queries are rotated by a Hadamard matrix, in blocks of the largest power of two
            that divides head_dim.

    Raises:
        TypeError, ValueError: A tensor has the wrong type, shape or values. The message names the argument.
    """

    center: Tensor | None = None
    smoothing: Tensor | None = None
    is_rotated: bool = False

    def __post_init__(self) -> None:
        for name, tensor in (("center", self.center), ("smoothing", self.smoothing)):
            if tensor is None:
                continue
            if not isinstance(tensor, Tensor) or tensor.dtype != torch.float32:
                got = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
                raise TypeError(f"KeyTransform: `{name}` must be a float32 tensor, got {got}. Call .float().")
            if tensor.ndim != 2:
                raise ValueError(
                    f"KeyTransform: `{name}` must be [num_kv_heads, head_dim], got shape {list(tensor.shape)}."
                )
            if not tensor.isfinite().all():
                raise ValueError(
                    f"KeyTransform: `{name}` must be finite, got NaN or infinity. Was it taken from broken keys?"
                )
            object.__setattr__(self, name, tensor.detach().contiguous())
        if self.smoothing is not None and not (self.smoothing > 0).all():
            raise ValueError(
                f"KeyTransform: `smoothing` must be positive, got {float(self.smoothing.min())}. "
                "Use 1 for channels that stay as they are."
            )
        if self.center is not None and self.smoothing is not None and self.center.shape != self.smoothing.shape:
            raise ValueError(
                f"KeyTransform: `smoothing` must be {list(self.center.shape)} like `center`, "
                f"got shape {list(self.smoothing.shape)}."
            )
        if not isinstance(self.is_rotated, bool):
            raise TypeError(f"KeyTransform: `is_rotated` must be True or False, got {self.is_rotated!r}.")

    @classmethod
    def of_checked(cls, center: Tensor | None, smoothing: Tensor | None, is_rotated: bool) -> KeyTransform:
        """Build a transform without the checks, which would read the tensors and so synchronise with the GPU.

        Args:
            center: Taken from a `KeyTransform`, or an argument of an op.
            smoothing: Likewise.
            is_rotated: See the class.
        """
        transform = object.__new__(cls)
        for name, value in (("center", center), ("smoothing", smoothing), ("is_rotated", is_rotated)):
            object.__setattr__(transform, name, value)
        return transform

    @property
    def is_identity(self) -> bool:
        """Whether keys stay unchanged."""
        return self.center is None and self.smoothing is None and not self.is_rotated

    def check_fits(self, where: str, num_kv_heads: int, head_dim: int) -> None:
        """Check that the tensors fit keys of this shape.

        Raises:
            ValueError: A tensor has another number of heads or another head_dim.
        """
        for name, tensor in (("center", self.center), ("smoothing", self.smoothing)):
            if tensor is not None and tensor.shape != (num_kv_heads, head_dim):
                raise ValueError(
                    f"{where}: `key_transform.{name}` must be [{num_kv_heads}, {head_dim}] like the keys, "
                    f"got shape {list(tensor.shape)}. Was it made for another model, or before its heads were sharded?"
                )

    def to(self, device: torch.device | str) -> KeyTransform:
        """The same transform on a device; `self` if it is there already."""
        center, smoothing = (None if x is None else x.to(device) for x in (self.center, self.smoothing))
        if center is self.center and smoothing is self.smoothing:
            return self
        return self.of_checked(center, smoothing, self.is_rotated)

    def clone(self, device: torch.device | str) -> KeyTransform:
        """A copy of the transform on a device, which shares no memory with this one."""
        center, smoothing = (None if x is None else x.to(device, copy=True) for x in (self.center, self.smoothing))
        return self.of_checked(center, smoothing, self.is_rotated)

    def copy_(self, other: KeyTransform) -> None:
        """Copy the tensors of another transform into this one, in place. Both have the same steps and shapes."""
        for mine, theirs in zip(self.tensors(), other.tensors(), strict=True):
            mine.copy_(theirs)

    def equals(self, other: KeyTransform) -> bool:
        """Whether both change a key in the same way. `==` compares identity instead."""
        if self.is_rotated != other.is_rotated:
            return False
        sides = ((self.center, other.center), (self.smoothing, other.smoothing))
        return all(
            mine is theirs or (mine is not None and theirs is not None and torch.equal(mine, theirs))
            for mine, theirs in sides
        )

    def tensors(self) -> list[Tensor]:
        """The tensors that exist."""
        return [tensor for tensor in (self.center, self.smoothing) if tensor is not None]

    def describe(self) -> str:
        """A short name for reports, such as `center+rotate`."""
        parts = (
            ("center", self.center is not None),
            ("smooth", self.smoothing is not None),
            ("rotate", self.is_rotated),
        )
        return "+".join(name for name, is_used in parts if is_used) or "none"
