"""The tokens of a layer as dense tensors, for attention that no kernel serves and for inspection."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..spec import reference

if TYPE_CHECKING:
    from .layer_store import LayerStore

Dense = tuple[Tensor, Tensor]


def dequantize(store: LayerStore) -> Dense:
    """Dense keys and values of a layer. See `LayerStore.dequantize`."""
    store.flush()
    key, value = _of_ring(store) if store.is_ring else _of_positions(store)
    if store.is_offloaded:  # where nothing is quantised, clone: other layers are fetched into the same memory
        key = key if store.layout.key.is_quantized else key.clone()
        value = value if store.layout.value.is_quantized else value.clone()
    return key, value


def _of_positions(store: LayerStore) -> Dense:
    shown, offset = store.num_shown, store.offset
    key, value = _decoded(store, end=offset + shown)
    if store.is_static or store.is_ragged:
        # Rows beyond the length get a probability of 0, but 0 times a NaN left there by a crop would be NaN.
        is_beyond = torch.arange(shown, device=store.device) >= store.lengths.unsqueeze(1)  # [batch, tokens]
        key, value = (x.masked_fill(is_beyond[:, None, :, None], 0.0) for x in (key, value))
    return key[:, :, offset:], value[:, :, offset:]


def _decoded(store: LayerStore, *, end: int | None = None) -> Dense:
    """Every row of a layer, or the first ones; of a chunk too long for a ring, those of its temporary buffers."""
    made, lengths, starts, planes, position = store.unrolled, store.lengths, store.starts, store.planes, None
    if made is not None:
        lengths, starts, planes = made.lengths, made.starts(starts), made.planes
    elif store.is_ring and store.layout.has_tail:
        position = reference.ring_positions(lengths, store.capacity)
    assert store.dtype is not None and planes is not None
    key, value = (
        reference.dequantize(
            side if end is None else side.narrow(end, kv_format.block_size),
            kv_format,
            store.dtype,
            lengths,
            starts,
            key_transform=transform,
            position=position,
            **store.layout.windows,
        )
        for side, kv_format, transform in zip(planes, store.layout.formats, (store.key_transform, None), strict=True)
    )
    return key, value


def _of_ring(store: LayerStore) -> Dense:
    made, shown, offset, capacity = store.unrolled, store.num_shown, store.offset, store.capacity
    dense = _decoded(store)
    if made is None and not store.is_static:
        key, value = (x.roll(-store.length, 2)[:, :, capacity - shown :] for x in dense)
        return key, value
    position = torch.arange(offset, offset + shown, device=store.device)
    row = position % capacity
    if made is not None:
        row = (position - made.begin).clamp(min=0, max=made.planes[0].codes.shape[2] - 1)
    key, value = (x.index_select(2, row) for x in dense)
    if store.is_static:
        end = store.lengths.unsqueeze(1)
        is_hidden = (position >= end) | (position < end - store.rows.num_seen)  # [batch, max_cache_len]
        key, value = (x.masked_fill(is_hidden[:, None, :, None], 0.0) for x in (key, value))
    return key, value
