"""Who owns the buffers of a layer: the layer itself, or the pool of its model. `offloading.py` has a third way.

A residency makes the buffers and holds the planes; the layer reaches them through it alone.
"""

from __future__ import annotations

import dataclasses
import weakref
from typing import TYPE_CHECKING, Any

import torch

from .. import ops
from ..config import LayerFormats
from ..spec.layout import Shape
from ..spec.planes import Planes
from .pool import BufferPool

if TYPE_CHECKING:
    from .layer_store import LayerStore

Sides = tuple[Planes, Planes]


class Owned:
    """Buffers that belong to the layer and stay where they are."""

    def __init__(self) -> None:
        self._planes: Sides | None = None

    def planes(self, store: LayerStore) -> Sides | None:
        """The planes of keys and of values, on the device; `None` before there are buffers."""
        return self._planes

    def arrive(self, store: LayerStore) -> None:
        """Make sure that the planes are on the device: the layer is about to use them."""

    def replace(self, store: LayerStore, planes: Sides | None) -> None:
        """Use other planes, which the layer has made in memory of their own."""
        self._planes = planes

    def allocate(self, store: LayerStore, capacity: int) -> None:
        """Make buffers for `capacity` tokens, and bring the key transform to their device."""
        if store.key_transform is not None:
            store.key_transform = store.key_transform.to(store.device)
        store.writer.counters = ops.new_counters(store.device)
        assert store.dtype is not None
        options: dict[str, Any] = {"dtype": store.dtype, "device": store.device, "slack": store.rows.slack}
        self.replace(store, store.layout.allocate(store.shape, capacity, **options))

    def let_go(self) -> None:
        """Keep the buffers for the layer alone: it is about to replace or drop some of them."""

    def note_cropped(self, store: LayerStore) -> None:
        """Note that tokens were removed, whose rows others will take."""

    @property
    def num_bytes(self) -> int:
        """Bytes allocated for planes, wherever they are."""
        return sum(planes.num_bytes for planes in self._planes or ())

    def leave(self, store: LayerStore) -> None:
        """Get ready to be copied or pickled along with the layer."""

    def rejoin(self, store: LayerStore) -> None:
        """Start in a copy of the layer."""


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
    """

    def __init__(self, pool: BufferPool) -> None:
        super().__init__()
        self._pool: BufferPool | None = pool
        self._loan: weakref.finalize[..., Any] | None = None  # returns the buffers to the pool in the end

    def allocate(self, store: LayerStore, capacity: int) -> None:
        """Take free buffers from the pool, or make new ones.

        Old contents need no clearing: as after a reset, they lie beyond the length.
        """
        if self._pool is None or torch.compiler.is_compiling():
            super().allocate(store, capacity)
            return
        assert store.dtype is not None and store.max_cache_len is not None
        transform = store.key_transform
        parts = (False,) * 3
        if transform is not None:
            parts = transform.center is not None, transform.smoothing is not None, transform.is_rotated
        held = store.max_cache_len, store.rows.slack
        kind = BufferKind(store.formats, store.shape, *held, store.dtype, store.device, parts)
        buffers = self._pool.take(store.name, kind)
        if buffers is None:
            if transform is not None:
                # The next cache overwrites these tensors with its own numbers, so they must not belong to a model.
                store.key_transform = transform.clone(store.device)
            super().allocate(store, capacity)
            buffers = self._planes, store.writer.counters, store.key_transform
        else:
            self._planes, store.writer.counters, store.key_transform = buffers
            if store.key_transform is not None and transform is not None:
                store.key_transform.copy_(transform)
        self._loan = self._pool.expect(store, store.name, kind, buffers)

    def let_go(self) -> None:
        if self._loan is not None:
            self._loan.detach()
            self._loan = None

    def __getstate__(self) -> dict[str, Any]:
        """Copies have buffers of their own and no pool."""
        return {**self.__dict__, "_pool": None, "_loan": None}
