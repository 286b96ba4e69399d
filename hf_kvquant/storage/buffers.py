"""Makes the buffers of a layer, and puts its contents into others: larger ones, other sequences, another device."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .. import ops
from ..spec import reference
from ..spec.layout import Shape
from ..spec.planes import Planes
from .checks import check_served
from .lengths import count_of

if TYPE_CHECKING:
    from .layer_store import LayerStore


def allocate(store: LayerStore, shape: Shape, dtype: torch.dtype, device: torch.device, capacity: int) -> None:
    """Make the buffers.

    Args:
        store: Without buffers.
        shape: Batch, key-value heads, head_dim of keys and of values.
        dtype: The model's.
        device: Of the buffers.
        capacity: Rows.
    """
    store.residency.let_go()
    store.shape, store.dtype = shape, dtype
    store.device = torch.empty(0, device=device).device  # adds the index, since devices of tokens are compared
    store.residency.allocate(store, capacity)
    store.join(0)
    store.planes_changed()


def allocate_for(store: LayerStore, key: Tensor, value: Tensor) -> None:
    """Make the buffers for tokens like these: `[batch, num_kv_heads, tokens, head_dim]`; `tokens` may be 0.

    Raises:
        TypeError, ValueError: See `check_served`.
    """
    check_served(store, key, value)
    batch, num_kv_heads, tokens, head_dim = key.shape
    wanted = store.max_cache_len
    if wanted is None:
        wanted = store.rows.needed(tokens, 0, is_empty=True)
    shape = batch, num_kv_heads, head_dim, value.shape[-1]
    allocate(store, shape, key.dtype, key.device, store.rows.aligned(wanted))


def select(store: LayerStore, indices: Tensor) -> None:
    """Keep the sequences `indices` (`[new batch]` int64, or a bool mask) of the batch, in that order.

    A static layer whose batch size stays the same is rewritten in place, so its addresses do not change.
    """
    if not store.is_allocated:
        return
    store.flush()
    index = indices.to(store.device)
    if index.dtype == torch.bool:
        index = index.nonzero().flatten()

    def selected(tensor: Tensor) -> Tensor:
        return tensor.index_select(0, index)

    planes, has_same_batch = store.planes, index.numel() == store.batch
    store_starts = None if store.starts is None else selected(store.starts)
    if store.is_static and has_same_batch:
        for side in planes:
            for tensor in side.tensors():
                tensor.copy_(selected(tensor))
    else:
        store.residency.let_go()
        # Copy only what is held: a growing buffer is cut to its length and grows again when needed.
        tokens = store.capacity if store.is_static else min(store.rows.aligned(store.length), store.capacity)
        key, value = (
            side.narrow(tokens, kv_format.block_size).map(selected)
            for side, kv_format in zip(planes, store.layout.formats, strict=True)
        )
        store.residency.replace(store, (key, value))
    store.starts = store_starts
    if store.is_ragged or not has_same_batch:
        count = store.count()
        if isinstance(count, tuple):
            count = count_of([count[b] for b in index.tolist()])
        if has_same_batch:
            store.place(count)
        else:
            store.shape = index.numel(), *store.shape[1:]
            store.join(count)
    if not (store.is_static and has_same_batch):
        store.planes_changed()


def repeat(store: LayerStore, repeats: int) -> None:
    """Repeat every sequence `repeats` times in place: a, a, b, b."""
    if store.is_allocated:
        select(store, torch.arange(store.batch, device=store.device).repeat_interleave(repeats))


def move(store: LayerStore, device: torch.device | str) -> None:
    """Move the buffers to another device."""
    device = torch.empty(0, device=device).device  # adds the index that "cuda" lacks

    def moved(tensor: Tensor) -> Tensor:
        # Kernels that read a copy to the GPU are queued behind it; reads by the CPU would not wait for a copy.
        return tensor.to(device, non_blocking=device.type != "cpu")

    if store.is_allocated and store.device == device:
        return
    store.flush()
    store.starts = None if store.starts is None else moved(store.starts)
    if not store.is_allocated:
        return
    store.residency.let_go()
    key, value = store.planes
    store.residency.replace(store, (key.map(moved), value.map(moved)))
    store.device = device
    store.writer.counters = ops.new_counters(device)
    store.join(store.count())
    if store.key_transform is not None:
        store.key_transform = store.key_transform.to(device)
    store.planes_changed()


def resize(store: LayerStore, capacity: int) -> None:
    """Copy the tokens into buffers of another capacity."""
    if capacity == store.capacity:
        return
    old, length = store.planes, store.length
    origin = store.rows.origin(store.lengths, store.capacity, capacity)

    def resized(side: int) -> Planes:
        kv_format, head_dim = store.layout.formats[side], store.shape[2 + side]
        if origin is not None:
            return old[side].rows(origin, kv_format.block_size)
        assert store.dtype is not None
        grown = kv_format.allocate(*store.shape[:2], head_dim, capacity, dtype=store.dtype, device=store.device)
        grown = dataclasses.replace(grown, tail=old[side].tail)
        new, before = (each.narrow(length, kv_format.block_size).tensors() for each in (grown, old[side]))
        for new_plane, old_plane in zip(new, before, strict=True):
            new_plane.copy_(old_plane)
        return grown

    store.residency.replace(store, (resized(0), resized(1)))
    store.rows.note_resized()
    store.planes_changed()


def copied_tail(store: LayerStore, side: int, slack: int = 0) -> Tensor | None:
    """A copy of a side's tail, with rows for other slack. What is not in a dense window is zero.

    Args:
        store: Without pending tokens.
        side: 0 for keys, 1 for values.
        slack: As in `KVFormat.tail_rows`.
    """
    planes, kv_format, windows = store.planes[side], store.layout.formats[side], store.layout.windows
    tail = planes.tail
    if tail is None:
        return None
    copied = tail.new_zeros((*tail.shape[:2], kv_format.tail_rows(**windows, slack=slack), tail.shape[3]))
    position = torch.arange(store.length, device=store.device).expand(store.batch, -1)
    (is_dense, row), (_, target) = (
        reference.dense_tokens(
            dataclasses.replace(planes, tail=each),
            kv_format,
            store.lengths,
            store.starts,
            **windows,
            position=position,
            tail_from=None,
        )
        for each in (tail, copied)
    )
    sequence, token = is_dense.nonzero(as_tuple=True)
    copied[sequence, :, target[sequence, token]] = tail[sequence, :, row[sequence, token]]
    return copied


def replace_tails(store: LayerStore, slack: int) -> None:
    """Move the dense tokens of a layer into tails with other slack."""
    key, value = (
        dataclasses.replace(planes, tail=copied_tail(store, side, slack)) for side, planes in enumerate(store.planes)
    )
    store.residency.let_go()
    store.residency.replace(store, (key, value))
    store.planes_changed()
