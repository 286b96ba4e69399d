"""Takes tokens back: crops, and steps that ended early."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..spec import reference
from .buffers import resize
from .lengths import plus

if TYPE_CHECKING:
    from .layer_store import LayerStore


def check_crop(store: LayerStore, num_tokens: int) -> None:
    """Refuse a crop that cannot be served.

    Raises:
        RuntimeError: See `Ring.check_crop`.
    """
    if store.is_allocated:
        store.rows.check_crop(store.name, num_tokens, store.length, store.capacity)


def crop(store: LayerStore, num_tokens: int) -> None:
    """Forget the newest `num_tokens` tokens of every sequence, at most all of them.

    Tokens that had codes and move into the dense window of newest tokens enter it dequantised. A ring also forgets the
    past that it recorded.

    Raises:
        RuntimeError: See `check_crop`.
    """
    if store.is_allocated and (num_tokens > 0 or store.window):
        check_crop(store, num_tokens)
        _take_back(store, num_tokens)


def _take_back(store: LayerStore, num_tokens: int) -> None:
    """Crop, without the check."""
    store.flush()
    before, after = store.length, max(0, store.length - num_tokens)
    if num_tokens > 0:
        count = store.count()
        if not store.layout.has_tail:
            pass
        elif isinstance(count, int):
            _reopen(store, count, num_tokens, slice(None))
        else:
            for b, length in enumerate(count):
                _reopen(store, length, num_tokens, slice(b, b + 1))
        store.place(plus(count, -num_tokens))
    store.rows.note_crop(before, after)
    store.residency.note_cropped(store)
    resize(store, store.rows.capacity_after_crop(store.capacity))


def _reopen(store: LayerStore, length: int, num_tokens: int, sequences: slice) -> None:
    """Put tokens that a crop returns to the dense window back in the tail, of sequences that have `length` tokens."""
    for planes, kv_format, transform in zip(
        store.planes, store.layout.formats, (store.key_transform, None), strict=True
    ):
        reference.reopen(
            planes.map(lambda plane: plane[sequences]),
            kv_format,
            length,
            max(0, length - num_tokens),
            key_transform=transform,
            num_written=store.rows.num_written(length, store.capacity),
            **store.layout.windows,
        )


def check_undo(store: LayerStore, num_tokens: int) -> None:
    """Refuse to undo a step of `num_tokens` tokens that has overwritten other tokens.

    Raises:
        RuntimeError: It has.
    """
    if store.writer.pending is None:
        store.rows.check_undo(store.name, num_tokens, store.length, store.capacity)


def rounds(store: LayerStore, num_tokens: int) -> bool:
    """Whether undoing a step of `num_tokens` leaves some tokens dequantised that were dense before that step."""
    layout = store.layout
    if not layout.has_tail or store.writer.pending is not None:
        return False
    length, residual_length = store.length, layout.residual_length
    begins = [
        (kv_format.tail_begin(length - num_tokens, residual_length), kv_format.tail_begin(length, residual_length))
        for kv_format in layout.formats
        if kv_format.tail_rows(**layout.windows) > 0
    ]
    return any(before < min(after, length - num_tokens) for before, after in begins)


def undo(store: LayerStore, num_tokens: int) -> None:
    """Forget the tokens of a step that ended early. If they are still pending, the planes need no change."""
    if store.writer.pending is None:
        _take_back(store, num_tokens)
    else:
        store.writer.pending = None
        store.place(plus(store.count(), -num_tokens))
        store.rows.forget_chunk(is_empty=store.is_empty)
