"""`Buffers`: what one layer has allocated, as one value. Other sizes, sequences and devices are other values.

Knows no layer. Which tokens there are, and where, is told by arguments.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

from .. import ops
from ..spec import reference
from ..spec.key_transform import KeyTransform
from ..spec.layout import KVLayout, Shape
from ..spec.planes import Planes

# Of keys and of values.
Sides = tuple[Planes, Planes]

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def makes_lasting_tensors(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Run a function outside inference mode, for one whose new tensors later calls write to.

    A tensor made in inference mode cannot be written outside of it, and buffers outlive the call that makes them. In a
    compiled step the mode stays as it is: the compiler traces no question about it.
    """

    @functools.wraps(function)
    def run(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        if torch.compiler.is_compiling() or not torch.is_inference_mode_enabled():
            return function(*args, **kwargs)
        with torch.inference_mode(False), torch.no_grad():
            return function(*args, **kwargs)

    return run


def lasting(tensor: Tensor) -> Tensor:
    """The tensor, or a copy of one that was made in inference mode, such as by `copy.deepcopy` there."""
    return makes_lasting_tensors(torch.clone)(tensor) if tensor.is_inference() else tensor


@dataclasses.dataclass(frozen=True)
class Buffers:
    """The tensors of one layer, and what describes them.

    Attributes:
        shape: Batch, key-value heads, head_dim of keys and of values.
        dtype: The model's.
        device: Of the planes. While they are offloaded, the one that they come back to.
        layout: Of the planes.
        capacity: Rows: tokens that there is room for. Kept here, since compiled steps would guard the shape of a plane.
        planes: Of keys and of values.
        key_transform: Applied to keys before they are quantised; `None` for the identity.
        counters: Scratch of the CUDA kernel, zero between calls; `None` elsewhere. See `ops.Operands.decode`. Not
            shared: two streams may work on two layers at once.
    """

    shape: Shape
    dtype: torch.dtype
    device: torch.device
    layout: KVLayout
    capacity: int
    planes: Sides
    key_transform: KeyTransform | None
    counters: Tensor | None

    @property
    def batch(self) -> int:
        """Sequences."""
        return self.shape[0]

    def operands(self) -> ops.Operands:
        """The ops over the planes."""
        return ops.Operands(*self.planes, self.layout, self.key_transform)

    def selected(self, index: Tensor, capacity: int) -> Buffers:
        """The sequences `index` (`[new batch]` int64), cut to a capacity that holds their tokens. Copies."""
        key, value = (
            side.narrow(capacity, kv_format.block_size).map(lambda tensor: tensor.index_select(0, index))
            for side, kv_format in zip(self.planes, self.layout.formats, strict=True)
        )
        shape = index.numel(), *self.shape[1:]
        return dataclasses.replace(self, shape=shape, capacity=capacity, planes=(key, value))

    def reorder(self, index: Tensor) -> None:
        """Rewrite the planes in place with the sequences `index`, one per sequence: addresses do not change."""
        for side in self.planes:
            for tensor in side.tensors():
                tensor.copy_(tensor.index_select(0, index))

    def moved(self, device: torch.device) -> Buffers:
        """Copies on another device."""
        key, value = (side.map(lambda tensor: moved(tensor, device)) for side in self.planes)
        return dataclasses.replace(
            self,
            device=device,
            planes=(key, value),
            key_transform=None if self.key_transform is None else self.key_transform.to(device),
            counters=ops.new_counters(device),
        )

    def lasting(self) -> Buffers:
        """The same buffers, with copies of planes that were made in inference mode."""
        key, value = (side.map(lasting) for side in self.planes)
        return dataclasses.replace(self, planes=(key, value))

    def resized(self, capacity: int, length: int, origin: Tensor | None) -> Buffers:
        """Copies of another capacity.

        Args:
            capacity: Rows.
            length: Tokens held.
            origin: As `Linear.origin` gives it.
        """

        def resized(side: int) -> Planes:
            old, kv_format = self.planes[side], self.layout.formats[side]
            if origin is not None:
                return old.rows(origin, kv_format.block_size)
            head_dim = self.shape[2 + side]
            grown = kv_format.allocate(*self.shape[:2], head_dim, capacity, dtype=self.dtype, device=self.device)
            grown = dataclasses.replace(grown, tail=old.tail)
            new, before = (each.narrow(length, kv_format.block_size).tensors() for each in (grown, old))
            for new_plane, old_plane in zip(new, before, strict=True):
                new_plane.copy_(old_plane)
            return grown

        return dataclasses.replace(self, capacity=capacity, planes=(resized(0), resized(1)))

    def copied_tail(
        self, side: int, length: int, lengths: Tensor, starts: Tensor | None, slack: int = 0
    ) -> Tensor | None:
        """A copy of a side's tail, with rows for other slack; `None` if there is none. Dense windows only: else zero.

        Args:
            side: 0 for keys, 1 for values.
            length: Tokens of the longest sequence, all of them written.
            lengths: `[batch]` int32: tokens of each sequence.
            starts: `[batch]` int32: first position that is not padding; `None` for 0.
            slack: As in `KVFormat.tail_rows`.
        """
        planes, kv_format, windows = self.planes[side], self.layout.formats[side], self.layout.windows
        tail = planes.tail
        if tail is None:
            return None
        copied = tail.new_zeros((*tail.shape[:2], kv_format.tail_rows(**windows, slack=slack), tail.shape[3]))
        position = torch.arange(length, device=self.device).expand(self.batch, -1)
        (is_dense, row), (_, target) = (
            reference.dense_tokens(
                dataclasses.replace(planes, tail=each),
                kv_format,
                lengths,
                starts,
                **windows,
                position=position,
                tail_from=None,
            )
            for each in (tail, copied)
        )
        sequence, token = is_dense.nonzero(as_tuple=True)
        copied[sequence, :, target[sequence, token]] = tail[sequence, :, row[sequence, token]]
        return copied

    def with_slack(self, slack: int, length: int, lengths: Tensor, starts: Tensor | None) -> Buffers:
        """The same planes with tails that have other slack. Arguments as in `copied_tail`."""
        key, value = (
            dataclasses.replace(planes, tail=self.copied_tail(side, length, lengths, starts, slack))
            for side, planes in enumerate(self.planes)
        )
        return dataclasses.replace(self, planes=(key, value))

    def freeze_scales(self, key: Tensor, value: Tensor) -> None:
        """Granularity `tensor`: fix the scale from these tokens, the first of each sequence."""
        transforms = self.key_transform, None
        for x, planes, kv_format, transform in zip(
            (key, value), self.planes, self.layout.formats, transforms, strict=True
        ):
            if kv_format.granularity == "tensor" and planes.scale is not None:
                if transform is not None:
                    x = reference.transform_key(x, transform)
                scale, zero = reference.compute_scale(x, kv_format)
                planes.scale.copy_(scale)
                if planes.zero is not None and zero is not None:
                    planes.zero.copy_(zero)


def allocate(
    layout: KVLayout,
    shape: Shape,
    capacity: int,
    key_transform: KeyTransform | None,
    *,
    dtype: torch.dtype,
    device: torch.device,
    slack: int,
) -> Buffers:
    """New buffers.

    Args:
        layout: Of the planes.
        shape: Batch, key-value heads, head_dim of keys and of values.
        capacity: Rows.
        key_transform: Of the keys; moved to the device.
        dtype: The model's.
        device: With its index, since devices of tokens are compared.
        slack: Tokens that tails keep behind the dense windows.
    """
    planes = layout.allocate(shape, capacity, dtype=dtype, device=device, slack=slack)
    transform = None if key_transform is None else key_transform.to(device)
    return Buffers(shape, dtype, device, layout, capacity, planes, transform, ops.new_counters(device))


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor on another device. The host waits only for copies to the CPU."""
    # Kernels that read a copy to the GPU are queued behind it; reads by the CPU would not wait for a copy.
    return tensor.to(device, non_blocking=device.type != "cpu")
