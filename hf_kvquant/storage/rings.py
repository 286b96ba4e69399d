"""Sliding-window layers: the codes of their newest tokens are kept in a ring that does not grow with the sequence.

A query sees the last `window` positions, so a layer needs `window - 1` old tokens and those of the step. The token at
position t is in row t mod capacity. The ops know this (`is_ring` in `ops.py`), so nothing is moved, and positions and
lengths are those of the whole sequence. A ring has room for `BLOCK_SIZE` more than `window - 1` tokens, so that in a
step of several tokens the first query still finds its window. Buffers smaller than a ring have one row per position:
growing caches start with them, and some static caches never need more.

A chunk too long for the ring is written like any other. Attention to it runs on temporary buffers, which hold the
tokens that its first query sees and those of the chunk, in order. A ring grows while it records the past for a crop.

The codes that attention reads are bit for bit those that it would read from the whole sequence with the window as its
mask. With a static cache, nothing here waits for the device. `cache.py` decides which layers are rings.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from .. import ops
from ..config import LayerFormats
from ..spec import reference
from ..spec.formats import BLOCK_SIZE, KVFormat, Planes
from .layer_store import LayerStorage


@dataclasses.dataclass(frozen=True)
class _Unrolled:
    """Temporary buffers for a chunk too long for the ring: its past and the chunk, in order.

    Attributes:
        planes: Of keys and of values, with the tokens from position `begin` on.
        operands: Of these planes.
        begin: 0-d int64, a multiple of `BLOCK_SIZE`: position of the first token.
        lengths: `[batch]` int32: tokens from there on, those of the chunk included.
    """

    planes: tuple[Planes, Planes]
    operands: ops.Operands
    begin: Tensor
    lengths: Tensor

    def starts(self, starts: Tensor | None) -> Tensor | None:
        """First positions that are not padding, counted from `begin`."""
        return None if starts is None else (starts - self.begin).clamp(min=0).to(torch.int32)


class RingStorage(LayerStorage):
    """Keys and values of one sliding-window layer.

    Args:
        formats: Of keys and of values. `sink_length` is ignored: the first tokens leave the window like all others.
        window: Positions visible to a query, itself included.
        **options: As in `LayerStorage`.
    """

    def __init__(self, formats: LayerFormats, *, window: int, **options: Any) -> None:
        super().__init__(dataclasses.replace(formats, sink_length=0), **options)
        self.window = window
        self.ring_capacity = _whole_blocks(window - 1 + BLOCK_SIZE)  # unless the past is recorded
        self.most_held = 0  # longest length before a crop; those tokens overwrote others, which a crop cannot restore
        self.kept_from: int | None = None  # first position that a crop may bring back; None: the past is not recorded
        # Tokens of the newest chunk; 0 for a first chunk, whose attention runs on the model's own tensors.
        self._q_len = 0
        self._has_long_chunk = False  # whether attention to the newest chunk runs on temporary buffers ...
        self._unrolled: _Unrolled | None = None  # ... which these are, once it has been written

    @property
    def is_ring(self) -> bool:
        """Whether rows are reused. False in a static storage with a row for every token, and in buffers still small."""
        comes_round = self.max_cache_len is None or self.max_cache_len > self.capacity
        return comes_round and self.capacity >= self.ring_capacity

    @property
    def longest_chunk(self) -> int:
        """The longest later chunk that attention can serve from the ring: its first query still finds its window."""
        return self.capacity + 1 - self.window

    @property
    def num_visible(self) -> int:
        """In a growing cache, the tokens that queries of the newest chunk see. See `LayerStorage.num_visible`."""
        if self.max_cache_len is not None:
            return self.max_cache_len
        return min(self.length, self.window - 1 + self._q_len)

    @property
    def mask_offset(self) -> int:
        """Position of the first of these tokens."""
        return 0 if self.is_static else self.length - self.num_visible

    @property
    def num_bytes_held(self) -> int:
        """Bytes of the tokens held, without overwritten ones. See `LayerStorage.num_bytes_held`."""
        overwritten = max(0, self.length - self.capacity)
        return super().num_bytes_held - self.batch * self.bytes_per_token * overwritten

    def record_past(self, is_recorded: bool) -> None:
        """Whether to keep tokens that leave the window until the next crop, so that it can bring them back."""
        if not is_recorded:
            self.kept_from = None
        elif self.kept_from is None:
            self.kept_from = max(0, self.length - self.window + 1)

    def _aligned(self, tokens: int) -> int:
        # A ring has whole blocks, whatever its format. Only one that records the past grows beyond `ring_capacity`.
        aligned = super()._aligned(tokens)
        if aligned <= self.ring_capacity:
            return aligned
        return self.ring_capacity if self.is_static else _whole_blocks(tokens)

    def _wanted(self, tokens: int) -> int:
        if self.kept_from is None:
            return min(super()._wanted(tokens), self.ring_capacity)
        return super()._wanted(min(tokens, max(self.ring_capacity, tokens - self.kept_from)))

    def _resize(self, capacity: int) -> None:
        super()._resize(capacity)
        self.most_held = 0

    def _resized(self, planes: Planes, kv_format: KVFormat, head_dim: int, capacity: int) -> Planes:
        # Rows whose token is no longer held get the row of another token; no query sees them.
        position = reference.ring_positions(self._lengths()[:1], capacity)[0]
        return planes.rows(position % self.capacity, kv_format.block_size)

    def extend(self, key: Tensor, value: Tensor) -> None:
        """Take new tokens. See `LayerStorage.extend`."""
        is_behind_others = not self.is_empty
        super().extend(key, value)
        self._q_len = key.shape[2] if is_behind_others else 0
        self._has_long_chunk = self.is_ring and self._q_len > self.longest_chunk
        self._unrolled = None

    def flush(self) -> None:
        """Write pending tokens; a long chunk also to its temporary buffers."""
        if self.pending is not None and self._has_long_chunk:
            self._unrolled = self._unroll(*self.pending)
        super().flush()

    def _unroll(self, key: Tensor, value: Tensor) -> _Unrolled:
        """Copy the newest tokens in order into temporary buffers, and append a chunk not yet written to the ring."""
        q_len, lengths = key.shape[2], self._lengths()
        begin = (lengths[0].long() - q_len - self.capacity).clamp(min=0) // BLOCK_SIZE * BLOCK_SIZE
        capacity = self.capacity + _whole_blocks(BLOCK_SIZE + q_len)
        row = torch.arange(capacity, device=self.device)
        source = (begin + row) % self.capacity  # rows after the past are overwritten by the chunk or beyond lengths

        def unrolled(planes: Planes, kv_format: KVFormat) -> Planes:
            tail = planes.tail
            if tail is not None:
                tail = tail.index_select(2, (begin + torch.arange(tail.shape[2], device=self.device)) % tail.shape[2])
            return dataclasses.replace(planes.rows(source, kv_format.block_size), tail=tail)

        planes = unrolled(self._planes()[0], self.formats.key), unrolled(self._planes()[1], self.formats.value)
        operands = ops.Operands(*planes, self._formats(), key_transform=self.key_transform, **self._windows())
        made = _Unrolled(planes, operands, begin, (lengths - begin).to(torch.int32))
        operands.append(key, value, made.lengths, made.starts(self.starts))
        return made

    def attend(
        self, query: Tensor, *, softmax_scale: float, starts: Tensor | None = None, **options: Any
    ) -> tuple[Tensor, Tensor]:
        """See `LayerStorage.attend`. Uses the window of the cache, for which masks are made, not the caller's."""
        options["sliding_window"] = self.window
        if not self._has_long_chunk:
            return super().attend(query, softmax_scale=softmax_scale, starts=starts, **options)
        self.starts = starts
        self.flush()
        made = self._unrolled
        assert made is not None
        result = made.operands.decode(
            query,
            None,
            made.lengths,
            softmax_scale=softmax_scale,
            counters=self.counters,
            starts=made.starts(starts),
            **options,
        )
        self._note_read(query, self.window)
        return result

    def dequantize(self) -> tuple[Tensor, Tensor]:
        """Dense keys and values of the `num_visible` newest tokens (growing cache).

        In a static cache, of all positions up to `max_cache_len`; zero where no query of the newest chunk sees them.
        """
        offset, num_shown = self.mask_offset, self.num_visible
        if not self.is_ring:
            key, value = super().dequantize()
            return key[:, :, offset:], value[:, :, offset:]
        self.flush()
        assert self.dtype is not None
        made, lengths, starts, planes, position = self._unrolled, self._lengths(), self.starts, self._planes(), None
        if made is not None:
            lengths, starts, planes = made.lengths, made.starts(starts), made.planes
        elif self.has_tail:
            position = reference.ring_positions(lengths, self.capacity)
        options = {"lengths": lengths, "starts": starts, "position": position, **self._windows()}
        dense = [
            reference.dequantize(side, kv_format, self.dtype, key_transform=transform, **options)
            for side, kv_format, transform in zip(planes, self._formats(), (self.key_transform, None), strict=True)
        ]
        if made is None and not self.is_static:
            key, value = (x.roll(-self.length, 2)[:, :, self.capacity - num_shown :] for x in dense)
            return key, value
        shown = torch.arange(offset, offset + num_shown, device=self.device)
        row = shown % self.capacity
        if made is not None:
            row = (shown - made.begin).clamp(min=0, max=planes[0].codes.shape[2] - 1)
        dense = [x.index_select(2, row) for x in dense]
        if self.is_static:
            end = self._lengths().unsqueeze(1)
            is_hidden = (shown >= end) | (shown < end - (self.window - 1 + self._q_len))  # [batch, max_cache_len]
            dense = [x.masked_fill(is_hidden[:, None, :, None], 0.0) for x in dense]
        return dense[0], dense[1]

    def _can_hold(self, length: int, capacity: int) -> bool:
        if self.is_static or capacity < self.ring_capacity:
            return super()._can_hold(length, capacity)
        return length > 0 and capacity % BLOCK_SIZE == 0

    def check_crop(self, num_tokens: int) -> None:
        """Refuse a crop after which the next query would see tokens that are already overwritten.

        Raises:
            RuntimeError: It would. In a growing cache with a full window, every crop is refused while the past is not
                recorded, even one that could be served.
        """
        length, window = self.length, self.window
        if num_tokens == 0 or num_tokens >= length:
            return
        if self.is_static:
            most = self._most_to_take_back()
            which = f"{most} tokens of a static cache with a window of {window}"
        elif length < window or self.kept_from == 0:
            return
        elif self.kept_from is None:
            raise RuntimeError(
                f"{self.name}: `crop` must come before the window of {window} tokens is full, got {length} tokens. "
                "Call activate_past_recording on the cache first, so that it keeps what a crop brings back."
            )
        else:
            most = length - (self.kept_from + window - 1)
            which = f"the {most} tokens whose past was recorded"
        if num_tokens > most:
            raise RuntimeError(
                f"{self.name}: `crop` must remove at most {which}, got {num_tokens}. Reset the cache and feed it the "
                "text again."
            )

    def _most_to_take_back(self) -> int:
        """How many of the newest tokens can be removed so that the next query still finds its whole window."""
        written = max(self.most_held, self.length)
        return self.longest_chunk - (written - self.length) if written > self.capacity else self.length

    def check_undo(self, num_tokens: int) -> None:
        """See `LayerStorage.check_undo`. Works without recording: a ring has room for more tokens than a query sees.

        Raises:
            RuntimeError: Tokens that the next query would see have been overwritten.
        """
        if self.pending is None and num_tokens > self._most_to_take_back():
            raise RuntimeError(
                f"{self.name}: a step that ended early must have at most {self._most_to_take_back()} tokens to be "
                f"undone with a window of {self.window}, got {num_tokens}. Reset the cache and feed it the text again."
            )

    def undo(self, num_tokens: int) -> None:
        """See `LayerStorage.undo`."""
        super().undo(num_tokens)
        self._forget_chunk()

    def crop(self, num_tokens: int) -> None:
        """Forget the newest `num_tokens` tokens of every sequence, at most all; then those that no query sees any more.

        Raises:
            RuntimeError: See `check_crop`.
        """
        if self.is_allocated:
            self.check_crop(num_tokens)
            self._take_back(num_tokens)

    def _take_back(self, num_tokens: int) -> None:
        self.flush()
        if num_tokens > 0:
            self.most_held = max(self.most_held, self.length)
            super()._take_back(num_tokens)
            self._forget_chunk()
        if self.kept_from is not None:
            self.kept_from = max(0, self.length - self.window + 1)
        if self.capacity > self.ring_capacity:
            self._resize(self.ring_capacity)

    def _num_written(self) -> int | None:
        return max(self.most_held, self.length) if self.is_ring else None

    def reset(self) -> None:
        """Forget all tokens, keep the buffers."""
        super().reset()
        self.kept_from = None if self.kept_from is None else 0
        self._forget_chunk()

    def _forget_chunk(self) -> None:
        if self.is_empty:
            self.most_held = 0
        self._q_len, self._has_long_chunk, self._unrolled = 0, False, None

    def __getstate__(self) -> dict[str, Any]:
        """See `LayerStorage.__getstate__`; temporary buffers are left out."""
        return {**super().__getstate__(), "_has_long_chunk": False, "_unrolled": None}


def _whole_blocks(tokens: int) -> int:
    return -(-tokens // BLOCK_SIZE) * BLOCK_SIZE
