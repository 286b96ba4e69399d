"""Takes tokens back: crops, and steps that ended early.

A token that a crop returns to a dense window is no longer in the tail if a newer one has taken its row. It then returns
as its codes have left it. Callers that announce their crops (`expect_crops`) get longer tails, whose rows are taken
later: crops of up to `TAIL_SLACK` tokens are exact.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..spec.formats import KVFormat
from ..spec.layout import KVLayout
from .layer_store import LayerStore
from .lengths import plus
from .rows import TAIL_SLACK, Linear


def expect_crops(store: LayerStore) -> None:
    """Keep enough tokens in the tails, from now on, that a crop of up to `TAIL_SLACK` tokens loses nothing."""
    rows, layout = store.rows, store.layout
    if rows.slack == 0 and any(_recent_rows(layout, kv_format) for kv_format in layout.formats):
        store.flush()
        if store.is_allocated:
            counts = _counts(store)
            _note_own(rows, counts, [_own_from(layout, rows, length, max(counts)) for length in counts])
            store.replace_tails(TAIL_SLACK)
        rows.slack = TAIL_SLACK


def check_crop(store: LayerStore, num_tokens: int) -> None:
    """Refuse a crop that cannot be served.

    Raises:
        RuntimeError: See `Ring.check_crop`.
    """
    if store.is_allocated:
        store.rows.check_crop(store.name, num_tokens, store.length, store.capacity)


def crop(store: LayerStore, num_tokens: int) -> None:
    """Forget the newest `num_tokens` tokens of every sequence, at most all of them.

    Tokens that move into the dense window of newest tokens enter it dequantised if they have lost their rows of the
    tail. A ring also forgets the past that it recorded.

    Raises:
        RuntimeError: See `check_crop`.
    """
    if store.is_allocated and (num_tokens > 0 or store.window):
        check_crop(store, num_tokens)
        _take_back(store, num_tokens)


def _take_back(store: LayerStore, num_tokens: int) -> None:
    """Crop, without the check."""
    store.flush()
    rows, before = store.rows, store.length
    after = max(0, before - num_tokens)
    if num_tokens > 0:
        if store.layout.has_tail:
            _reopen(store, num_tokens)
        store.place(plus(store.count(), -num_tokens))
    rows.note_crop(before, after)
    store.residency.note_cropped(after)
    store.resize(rows.capacity_after_crop(store.capacity))


def _counts(store: LayerStore) -> tuple[int, ...]:
    """Tokens of every sequence; a single number if all are equally long."""
    count = store.count()
    return (count,) if isinstance(count, int) else count


def _recent_rows(layout: KVLayout, kv_format: KVFormat, slack: int = 0) -> int:
    """Rows that the tail of a side has for the newest tokens."""
    return kv_format.tail_rows(residual_length=layout.residual_length, slack=slack)


def _own_from(layout: KVLayout, rows: Linear, length: int, longest: int) -> list[int]:
    """Of keys and of values: the first token of a sequence that is sure to have its row of the tail.

    Args:
        layout: Of the layer.
        rows: Of the layer.
        length: Tokens of the sequence, all of them written.
        longest: Of the longest sequence.
    """
    own_from = []
    for kv_format, known in zip(layout.formats, rows.tail_from, strict=True):
        slack = _recent_rows(layout, kv_format, rows.slack) - _recent_rows(layout, kv_format)
        begin = kv_format.tail_begin(length, layout.residual_length + slack)
        own_from.append(max(begin, known - (longest - length)))  # all sequences grow alike
    return own_from


def _lost(layout: KVLayout, rows: Linear, length: int, longest: int, oldest: int, num_tokens: int) -> list[range]:
    """Of keys and of values: the tokens that a crop returns to the dense window but that have lost their rows.

    Args:
        layout, rows, length, longest: As in `_own_from`, before the crop.
        oldest: Position of the oldest token whose codes nothing has overwritten.
        num_tokens: To be removed.
    """
    after, lost = max(0, length - num_tokens), []
    for kv_format, own_from in zip(layout.formats, _own_from(layout, rows, length, longest), strict=True):
        begin, before = (kv_format.tail_begin(each, layout.residual_length) for each in (after, length))
        begin = max(begin, oldest)  # no query sees what the codes of newer tokens have overwritten
        end = min(after, before, own_from) if _recent_rows(layout, kv_format) else begin
        lost.append(range(begin, end))
    return lost


def _lost_of(store: LayerStore, num_tokens: int) -> list[list[range]]:
    """`_lost` of each of `_counts`."""
    layout, rows, counts = store.layout, store.rows, _counts(store)
    longest = max(counts)
    oldest = rows.oldest(longest, store.capacity)
    return [_lost(layout, rows, length, longest, oldest, num_tokens) for length in counts]


def _reopen(store: LayerStore, num_tokens: int) -> None:
    """Put tokens that a crop returns to the dense window back in the tail, dequantised if they have lost their rows."""
    layout, rows, counts, own_from = store.layout, store.rows, _counts(store), []
    for b, (length, lost) in enumerate(zip(counts, _lost_of(store, num_tokens), strict=True)):
        if any(lost):
            _dequantize(store, lost, slice(None) if len(counts) == 1 else slice(b, b + 1))
        starts = [tokens.start for tokens in lost]
        first = _own_from(layout, rows, length, max(counts))
        own_from.append([min(pair) for pair in zip(first, starts, strict=True)])
    _note_own(rows, [max(0, length - num_tokens) for length in counts], own_from)


def _note_own(rows: Linear, counts: Sequence[int], own_from: Sequence[Sequence[int]]) -> None:
    """Store `_own_from` relative to the longest sequence: the maximum over the batch."""
    longest = max(counts)
    key, value = (
        max(first + longest - length if first > 0 else 0 for first, length in zip(of_side, counts, strict=True))
        for of_side in zip(*own_from, strict=True)
    )
    rows.tail_from = key, value


def _dequantize(store: LayerStore, lost: list[range], sequences: slice) -> None:
    """Write tokens of keys and of values, dequantised, into the tail rows that they have lost, in some sequences."""
    buffers = store.residency.arrive()
    begin, end = min(each.start for each in lost if each), max(each.stop for each in lost if each)
    dense, sink_length = store.dequantize_written(begin, end - begin), buffers.layout.sink_length
    for planes, x, tokens in zip(buffers.planes, dense, lost, strict=True):
        if tokens:
            assert planes.tail is not None
            position = torch.arange(tokens.start, tokens.stop, device=buffers.device)
            # The first `sink_length` tokens are read from rows of their own, so this write does no harm for them.
            row = sink_length + position % (planes.tail.shape[2] - sink_length)
            planes.tail[sequences, :, row] = x[sequences, :, tokens.start - begin : tokens.stop - begin]


def check_undo(store: LayerStore, num_tokens: int) -> None:
    """Refuse to undo a step of `num_tokens` tokens that has overwritten other tokens.

    Raises:
        RuntimeError: It has.
    """
    if store.pending is None:
        store.rows.check_undo(store.name, num_tokens, store.length, store.capacity)


def rounds(store: LayerStore, num_tokens: int) -> bool:
    """Whether undoing a step of `num_tokens` leaves some tokens dequantised that were dense before that step."""
    if not store.layout.has_tail or store.pending is not None:
        return False
    return any(any(lost) for lost in _lost_of(store, num_tokens))


def undo(store: LayerStore, num_tokens: int) -> None:
    """Forget the tokens of a step that ended early. If they are still pending, the planes need no change."""
    if store.pending is None:
        _take_back(store, num_tokens)
    else:
        store.pending = None
        store.place(plus(store.count(), -num_tokens))
        store.rows.forget_chunk(is_empty=store.is_empty)
