"""Who owns the buffers of a layer: the layer itself, or the pool of its model. `offloading.py` has a third way.

A residency makes and holds the buffers; the layer reaches them through it alone. It knows no layer, only a name.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable
from typing import Any

import torch

from .. import ops
from ..config import LayerFormats
from ..spec.key_transform import KeyTransform
from ..spec.layout import KVLayout, Shape
from .buffers import Buffers, allocate
from .pool import BufferPool


class Owned:
    """Buffers that belong to the layer and stay where they are.

    Attributes:
        is_offloaded: Whether buffers come and go: then `arrive` comes before any use of the planes.
        buffers: `None` before there are any.
        operands: The ops over them; `None` while the planes are not on the device.
    """

    is_offloaded = False

    def __init__(self) -> None:
        self.buffers: Buffers | None = None
        self.operands: ops.Operands | None = None

    def __getstate__(self) -> dict[str, Any]:
        """For pickle and deepcopy: the copy gets its operands anew, since kernels may differ where it is loaded."""
        return {**self.__dict__, "operands": None}

    def allocate(
        self, layout: KVLayout, shape: Shape, capacity: int, key_transform: KeyTransform | None, **options: Any
    ) -> Buffers:
        """Make buffers, which the layer then gives to `hold`. See `buffers.allocate`."""
        return allocate(layout, shape, capacity, key_transform, **options)

    def hold(self, buffers: Buffers | None) -> None:
        """Use these buffers from now on."""
        self.buffers = buffers
        self.operands = None if buffers is None else buffers.operands()

    def arrive(self) -> Buffers:
        """The buffers, with their planes on the device. There must be some."""
        assert self.buffers is not None
        return self.buffers

    def let_go(self) -> None:
        """Keep the buffers for the layer alone: it is about to replace or drop some of them."""

    def note_cropped(self, length: int) -> None:
        """Note that tokens were removed, whose rows others will take, and `length` are left."""

    @property
    def num_bytes(self) -> int:
        """Bytes allocated for planes, wherever they are."""
        return 0 if self.buffers is None else sum(planes.num_bytes for planes in self.buffers.planes)

    def leave(self) -> None:
        """Get ready to be copied or pickled along with the layer."""

    def rejoin(self, write: Callable[[], int]) -> None:
        """Start in a new layer or a copy of one.

        Args:
            write: A method of the layer: writes its pending tokens, and returns how many it holds.
        """


@dataclasses.dataclass(frozen=True)
class BufferKind:
    """Everything that a layer's buffers depend on. Two layers of equal kind can use each other's buffers.

    Attributes:
        formats: Of keys and values.
        shape: Batch, key-value heads, head_dim of keys and of values.
        max_cache_len: Tokens that the buffers hold.
        slack: Of the tails.
        dtype: The model's.
        device: Of the buffers.
        transform: Whether keys are centred, smoothed, rotated.
    """

    formats: LayerFormats
    shape: Shape
    max_cache_len: int
    slack: int
    dtype: torch.dtype
    device: torch.device
    transform: tuple[bool, bool, bool]


class Pooled(Owned):
    """Buffers of a static cache, lent by a pool, which gets them back when the layer is garbage-collected.

    Args:
        pool: Of the model.
        name: Of the layer.
        formats: Of its keys and values.
        max_cache_len: Tokens that it holds.
    """

    def __init__(self, pool: BufferPool, name: str, formats: LayerFormats, max_cache_len: int) -> None:
        super().__init__()
        self._pool: BufferPool | None = pool
        self._name, self._formats, self._max_cache_len = name, formats, max_cache_len
        self._loan: weakref.finalize[..., Any] | None = None  # returns the buffers to the pool in the end

    def allocate(
        self, layout: KVLayout, shape: Shape, capacity: int, key_transform: KeyTransform | None, **options: Any
    ) -> Buffers:
        """Take free buffers from the pool, or make new ones.

        Old contents need no clearing: as after a reset, they lie beyond the length.
        """
        if self._pool is None or torch.compiler.is_compiling():
            return super().allocate(layout, shape, capacity, key_transform, **options)
        parts = (False,) * 3
        if key_transform is not None:
            parts = key_transform.center is not None, key_transform.smoothing is not None, key_transform.is_rotated
        slack, dtype, device = options["slack"], options["dtype"], options["device"]
        kind = BufferKind(self._formats, shape, self._max_cache_len, slack, dtype, device, parts)
        buffers: Buffers | None = self._pool.take(self._name, kind)
        if buffers is None:
            # The next cache overwrites these tensors with its own numbers, so they must not belong to a model.
            own = None if key_transform is None else key_transform.clone(device)
            buffers = super().allocate(layout, shape, capacity, own, **options)
        elif buffers.key_transform is not None and key_transform is not None:
            buffers.key_transform.copy_(key_transform)
        self._loan = self._pool.expect(self, self._name, kind, buffers)
        return buffers

    def let_go(self) -> None:
        if self._loan is not None:
            self._loan.detach()
            self._loan = None

    def __getstate__(self) -> dict[str, Any]:
        """Copies have buffers of their own and no pool."""
        return {**super().__getstate__(), "_pool": None, "_loan": None}
