"""The tokens of a layer as dense tensors, for attention that no kernel serves and for inspection."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..spec.reference import transform_key

if TYPE_CHECKING:
    from .layer_store import LayerStore


def dequantize(store: LayerStore, *, keeps_transform: bool = False) -> tuple[Tensor, Tensor]:
    """Dense keys and values of a layer. See `LayerStore.dequantize` and `dense_step`."""
    store.flush()
    store.residency.arrive(store)
    shown, offset, lengths = store.num_shown, store.offset, store.lengths
    is_cut = store.is_static or store.is_ring or store.is_ragged
    if not (store.is_quantized or store.is_offloaded or is_cut or store.key_transform):
        key, value = (planes.codes[:, :, offset : offset + shown] for planes in store.planes)
        return key, value
    assert store.dtype is not None
    made = store.unrolled
    if made is None:
        num_seen = store.rows.num_seen if store.is_ring and store.is_static else 0
        options = {"begin": offset, "num_tokens": shown, "num_seen": num_seen, "dtype": store.dtype}
        return store.writer.dequantize(lengths, store.starts, keeps_transform=keeps_transform, **options)
    # The host does not know where temporary buffers begin: all of their tokens, then those that are shown.
    room = made.planes[0].codes.shape[2]
    position = torch.arange(offset, offset + shown, device=store.device)
    row = (position - made.begin).clamp(min=0, max=room - 1)
    is_hidden = (position >= lengths.unsqueeze(1)) | (position < lengths.unsqueeze(1) - store.rows.num_seen)
    key, value = (
        x.index_select(2, row).masked_fill(is_hidden[:, None, :, None], 0.0)
        for x in made.operands.dequantize(
            made.lengths, made.starts(store.starts), begin=0, num_tokens=room, dtype=store.dtype
        )
    )
    return key, value


def dense_step(store: LayerStore, *, keeps_transform: bool = False) -> tuple[Tensor, Tensor]:
    """Dense keys and values for the newest tokens of a layer. See `LayerStore.dense_step`."""
    pending = store.writer.pending
    if pending is None or pending[0].shape[2] <= store.largest_step(store.window or store.masked_window):
        return dequantize(store, keeps_transform=keeps_transform)
    assert store.dtype is not None
    store.residency.arrive(store)
    q_len, offset = pending[0].shape[2], store.offset
    past = store.lengths - q_len
    options = {"begin": offset, "num_tokens": store.num_shown, "dtype": store.dtype}
    sides = store.writer.dequantize(past, store.starts, keeps_transform=keeps_transform, **options)
    if keeps_transform and store.key_transform is not None:
        pending = transform_key(pending[0], store.key_transform).to(store.dtype), pending[1]
    row = past.long().unsqueeze(1) - offset + torch.arange(q_len, device=store.device)
    for side, own in zip(sides, pending, strict=True):
        side.scatter_(2, row[:, None, :, None].expand_as(own), own)
    store.flush()
    return sides
