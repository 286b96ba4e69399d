"""Takes tokens back: crops, and steps that ended early.

A token that a crop returns to a dense window is no longer in the tail if a newer one has taken its row. It then returns
as its codes have left it. Callers that announce their crops (`expect_crops`) get longer tails, whose rows are taken
later: crops of up to `TAIL_SLACK` tokens are exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from ..spec.formats import KVFormat
from .buffers import replace_tails, resize
from .lengths import plus
from .rows import TAIL_SLACK

if TYPE_CHECKING:
    from .layer_store import LayerStore


def expect_crops(store: LayerStore) -> None:
    """Keep enough tokens in the tails, from now on, that a crop of up to `TAIL_SLACK` tokens loses nothing."""
    rows = store.rows
    if rows.slack == 0 and any(_recent_rows(store, kv_format) for kv_format in store.layout.formats):
        store.flush()
        if store.is_allocated:
            counts = _counts(store)
            _note_own(store, counts, [_own_from(store, length) for length in counts])
            replace_tails(store, TAIL_SLACK)
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
    before, after = store.length, max(0, store.length - num_tokens)
    if num_tokens > 0:
        if store.layout.has_tail:
            _reopen(store, num_tokens)
        store.place(plus(store.count(), -num_tokens))
    store.rows.note_crop(before, after)
    store.residency.note_cropped(store)
    resize(store, store.rows.capacity_after_crop(store.capacity))


def _counts(store: LayerStore) -> tuple[int, ...]:
    """Tokens of every sequence; a single number if all have as many."""
    count = store.count()
    return (count,) if isinstance(count, int) else count


def _recent_rows(store: LayerStore, kv_format: KVFormat, slack: int = 0) -> int:
    """Rows that the tail of a side has for the newest tokens."""
    return kv_format.tail_rows(residual_length=store.layout.residual_length, slack=slack)


def _own_from(store: LayerStore, length: int) -> list[int]:
    """Of keys and of values: the first token of a sequence that is sure to have its row of the tail.

    Args:
        store: Without pending tokens.
        length: Tokens of the sequence.
    """
    own_from = []
    for kv_format, known in zip(store.layout.formats, store.rows.tail_from, strict=True):
        slack = _recent_rows(store, kv_format, store.rows.slack) - _recent_rows(store, kv_format)
        begin = kv_format.tail_begin(length, store.layout.residual_length + slack)
        own_from.append(max(begin, known - (store.length - length)))  # all sequences grow alike
    return own_from


def _lost(store: LayerStore, length: int, num_tokens: int) -> list[range]:
    """Of keys and of values: the tokens that a crop returns to the dense window but that have lost their rows.

    Args:
        store: Before the crop, without pending tokens.
        length: Tokens of one sequence.
        num_tokens: To be removed.
    """
    after, oldest = max(0, length - num_tokens), store.rows.oldest(store.length, store.capacity)
    lost = []
    for kv_format, own_from in zip(store.layout.formats, _own_from(store, length), strict=True):
        begin, before = (kv_format.tail_begin(each, store.layout.residual_length) for each in (after, length))
        begin = max(begin, oldest)  # no query sees what the codes of newer tokens have overwritten
        end = min(after, before, own_from) if _recent_rows(store, kv_format) else begin
        lost.append(range(begin, end))
    return lost


def _reopen(store: LayerStore, num_tokens: int) -> None:
    """Put tokens that a crop returns to the dense window back in the tail, dequantised if they have lost their rows."""
    counts, own_from = _counts(store), []
    for b, length in enumerate(counts):
        lost = _lost(store, length, num_tokens)
        if any(lost):
            _dequantize(store, lost, slice(None) if len(counts) == 1 else slice(b, b + 1))
        starts = [tokens.start for tokens in lost]
        own_from.append([min(pair) for pair in zip(_own_from(store, length), starts, strict=True)])
    _note_own(store, [max(0, length - num_tokens) for length in counts], own_from)


def _note_own(store: LayerStore, counts: Sequence[int], own_from: Sequence[Sequence[int]]) -> None:
    """Remember what `_own_from` is for sequences of so many tokens, as the most that it is relative to the longest."""
    longest = max(counts)
    key, value = (
        max(first + longest - length if first > 0 else 0 for first, length in zip(of_side, counts, strict=True))
        for of_side in zip(*own_from, strict=True)
    )
    store.rows.tail_from = key, value


def _dequantize(store: LayerStore, lost: list[range], sequences: slice) -> None:
    """Write tokens of keys and of values, dequantised, into the tail rows that they have lost, in some sequences."""
    assert store.dtype is not None
    sides = store.planes
    begin, end = min(each.start for each in lost if each), max(each.stop for each in lost if each)
    options = {"begin": begin, "num_tokens": end - begin, "dtype": store.dtype}
    dense = store.writer.dequantize(store.lengths, store.starts, **options)
    sink_length = store.layout.sink_length
    for planes, x, tokens in zip(sides, dense, lost, strict=True):
        if tokens:
            assert planes.tail is not None
            position = torch.arange(tokens.start, tokens.stop, device=store.device)
            # The first `sink_length` tokens are read from rows of their own, so this write does no harm for them.
            row = sink_length + position % (planes.tail.shape[2] - sink_length)
            planes.tail[sequences, :, row] = x[sequences, :, tokens.start - begin : tokens.stop - begin]


def check_undo(store: LayerStore, num_tokens: int) -> None:
    """Refuse to undo a step of `num_tokens` tokens that has overwritten other tokens.

    Raises:
        RuntimeError: It has.
    """
    if store.writer.pending is None:
        store.rows.check_undo(store.name, num_tokens, store.length, store.capacity)


def rounds(store: LayerStore, num_tokens: int) -> bool:
    """Whether undoing a step of `num_tokens` leaves some tokens dequantised that were dense before that step."""
    if not store.layout.has_tail or store.writer.pending is not None:
        return False
    return any(any(_lost(store, length, num_tokens)) for length in _counts(store))


def undo(store: LayerStore, num_tokens: int) -> None:
    """Forget the tokens of a step that ended early. If they are still pending, the planes need no change."""
    if store.writer.pending is None:
        _take_back(store, num_tokens)
    else:
        store.writer.pending = None
        store.place(plus(store.count(), -num_tokens))
        store.rows.forget_chunk(is_empty=store.is_empty)
