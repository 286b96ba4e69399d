"""Follows the padding of a layer whose mask changes while it holds tokens.

The first tokens that stay dense are counted from where padding ends. A mask may hide more or less before them than the
one with which they were stored: a prompt with a mask of four dimensions, which no cache sees, and a mask of the padding
afterwards. The dense rows then get other tokens; those that have lost their numbers get what their codes stand for.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..spec import reference
from .layer_store import LayerStore


def counts_from_start(store: LayerStore) -> bool:
    """Whether what a layer holds depends on where padding ends. With a window, the first tokens leave it soon."""
    has_blocks = any(each.granularity == "channel" for each in store.layout.formats)
    return not store.window and (store.layout.sink_length > 0 or has_blocks)


def follow(stores: Sequence[LayerStore], starts: Tensor | None) -> None:
    """Count the first tokens of all layers from `starts`, as new tokens and attention will.

    Waits for the device, unless there is no padding and was none.

    Args:
        stores: The layers of a cache for which `counts_from_start` holds. They have the same tokens and padding.
        starts: `[batch or 1]` int32: first position that is not padding; `None` for 0.

    Raises:
        ValueError: The mask shows padding that keys by channel have no codes of. Nothing has changed then.
    """
    if not stores or stores[0].is_empty or not _is_moved(stores[0], starts):
        return
    held = [store for store in stores if not store.is_empty]
    for store in held:
        _check_shown(store, starts)
    for store in held:
        _move(store, starts)


def _both(store: LayerStore, starts: Tensor | None) -> tuple[Tensor, Tensor]:
    """Where padding ended, and where it ends now: `[batch]` int64 each."""
    old, new = (
        torch.zeros(store.batch, dtype=torch.long, device=store.device)
        if each is None
        else each.to(store.device, torch.long).expand(store.batch)
        for each in (store.starts, starts)
    )
    return old, new


def _is_moved(store: LayerStore, starts: Tensor | None) -> bool:
    """Whether padding ends elsewhere among the tokens that are held."""
    if starts is None and store.starts is None:
        return False
    if starts is not None and starts.shape[0] not in (1, store.batch):
        return False  # another batch is refused when its tokens come
    old, new = _both(store, starts)
    return bool(((old != new) & (torch.minimum(old, new) < store.lengths)).any())


def _check_shown(store: LayerStore, starts: Tensor | None) -> None:
    """Refuse to show padding in blocks of keys that have their codes: it was left out of their scales."""
    old, new = _both(store, starts)
    layout, length = store.layout, store.length
    has_blocks = any(
        each.granularity == "channel" and each.tail_begin(length, layout.residual_length) > 0 for each in layout.formats
    )
    if has_blocks and bool((new < old).any()):
        raise ValueError(
            f"{store.name}: `attention_mask` must go on hiding the padding that it hid before, {old.tolist()} tokens "
            f"by sequence, got {new.tolist()}: with keys by channel, padding has no codes that could be shown. Pass "
            "the mask of all tokens, padding included, with every forward."
        )


def _move(store: LayerStore, starts: Tensor | None) -> None:
    """Write the tokens that are dense from now on into the tails."""
    store.flush()
    buffers, layout = store.residency.arrive(), store.layout
    old, new = _both(store, starts)
    begin = int(torch.minimum(old, new).min())
    end = min(store.length, int(torch.maximum(old, new).max()) + layout.sink_length)
    if layout.sink_length > 0 and begin < end:
        dense = store.dequantize_written(begin, end - begin)
        position = torch.arange(begin, end, device=buffers.device).expand(store.batch, -1)
        for planes, kv_format, x in zip(buffers.planes, layout.formats, dense, strict=True):
            if planes.tail is None:
                continue
            windows = layout.sink_length, layout.residual_length
            is_dense, row = reference.dense_tokens(planes, kv_format, store.lengths, new, *windows, position)
            sequence, token = is_dense.nonzero(as_tuple=True)
            planes.tail[sequence, :, row[sequence, token]] = x[sequence, :, token]
    store.starts = None if starts is None else new.to(torch.int32)
