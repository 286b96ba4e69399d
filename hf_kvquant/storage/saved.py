"""The contents of a layer, cut to what is held, as a file keeps them; and a layer made from such contents."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from ..spec.layout import Shape
from .buffers import Sides
from .layer_store import LayerStore

_META = torch.device("meta")


def held_planes(store: LayerStore) -> Sides:
    """The planes of keys and of values, cut to the tokens held. Views, except for the tail and of offloaded layers.

    Tails have no slack, and their unused rows are zeroed: such a row may hold a token that was cropped or left by an
    earlier user of the buffers, and must not be disclosed.

    Returns:
        Planes of `num_coded` tokens each (of a ring at most its rows) with the whole tail.
    """
    store.flush()
    buffers, length, lengths = store.residency.arrive(), store.length, store.lengths
    held = []
    for side, cut in enumerate(buffers.layout.coded(buffers.planes, length)):
        cut = dataclasses.replace(cut, tail=buffers.copied_tail(side, length, lengths, store.starts))
        held.append(cut.map(torch.clone) if store.is_offloaded else cut)
    return held[0], held[1]


def planned_planes(store: LayerStore, shape: Shape, length: int, capacity: int, dtype: torch.dtype) -> Sides:
    """What `held_planes` of a layer like this one would return, on the device `meta`, which takes no memory.

    Args:
        store: Without buffers.
        shape: Batch, key-value heads, head_dim of keys and of values.
        length: Tokens held.
        capacity: As in `store.capacity`.
        dtype: The model's.

    Raises:
        ValueError: No such layer can exist: a format does not fit, or no buffers have this capacity.
    """
    if not store.rows.can_hold(length, capacity):
        raise ValueError(f"{store.name} cannot hold {length} tokens in buffers for {capacity}")
    return store.layout.coded(store.layout.allocate(shape, capacity, dtype=dtype, device=_META), length)


def planned_bytes(store: LayerStore, shape: Shape, capacity: int, dtype: torch.dtype) -> int:
    """Bytes of the buffers of a layer like this one. See `planned_planes`."""
    return sum(planes.num_bytes for planes in store.layout.allocate(shape, capacity, dtype=dtype, device=_META))


def restore(
    store: LayerStore,
    held: Sides,
    *,
    shape: Shape,
    length: int,
    capacity: int,
    dtype: torch.dtype,
    device: torch.device,
    starts: Tensor | None,
) -> None:
    """Take over the contents of another layer of equal formats, transforms and `max_cache_len`.

    The layer gets the same capacity too: kernels split a sequence by capacity, and another split would sum in another
    order.

    Args:
        store: Without buffers.
        held: The other's `held_planes`, shaped as `planned_planes` says, on any device; copied.
        shape: Batch, key-value heads, head_dim of keys and of values.
        length: Tokens it held.
        capacity: Its `capacity`.
        dtype: The model's.
        device: Where the new buffers go.
        starts: `[batch]` int32: its `starts`, on any device.
    """
    store.allocate(shape, dtype, device, capacity)
    buffers = store.buffers
    store.starts = None if starts is None else starts.to(buffers.device)
    for new, old in zip(buffers.layout.coded(buffers.planes, length), held, strict=True):
        for new_plane, old_plane in zip(new.tensors(), old.tensors(), strict=True):
            new_plane.copy_(old_plane)
    store.place(length)
