"""Layers with a sliding window in static caches: codes in a ring of fixed buffers, which a captured step can replay.

`rings.py` moves tokens down when its buffers are full, which the host decides. Here nothing moves: the token at
position t is in row t mod capacity, and the ops are told so (`is_ring` in `ops.py`). Positions are those of the
sequence, and lengths those of the other layers. A ring has room for `BLOCK_SIZE` tokens more than a window leaves, so
that steps of several tokens find what their first query sees; where a cache has no more room than that anyway, rows
are positions and nothing comes round.

A chunk too long for the ring is written like any other, but attended to in buffers of its own, made for the step: the
tokens that its first query sees, in order, and those of the chunk. Nothing in this file waits for the device.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from . import ops, reference
from .cache import KVQuantLayer
from .config import LayerFormats
from .formats import BLOCK_SIZE, KVFormat, Planes
from .handle import KVLength
from .lengths import Lengths
from .pool import BufferPool
from .storage import LayerStorage
from .transforms import KeyTransform


@dataclasses.dataclass(frozen=True)
class _Unrolled:
    """The step of a long chunk, with its past in order.

    Attributes:
        planes: Of keys and of values: tokens from `begin` on.
        operands: Of these planes.
        begin: 0-d int64, a multiple of `BLOCK_SIZE`: position of the first of them.
        lengths: `[batch]` int32: tokens from there on, those of the chunk included.
    """

    planes: tuple[Planes, Planes]
    operands: ops.Operands
    begin: Tensor
    lengths: Tensor

    def starts(self, starts: Tensor | None) -> Tensor | None:
        """First positions that are not padding, from `begin` on."""
        return None if starts is None else (starts - self.begin).clamp(min=0).to(torch.int32)


class StaticRingStorage(LayerStorage):
    """Keys and values of one layer of a static cache, as far as its window sees them.

    Args:
        formats: Of keys and of values. The first `sink_length` tokens get codes too: they leave the window like all
            others.
        window: Positions visible to a query, itself included.
        max_cache_len: Tokens that the cache takes, whether or not they are all held still.
        name: As in `LayerStorage`.
        key_transform: Likewise.
        lengths: Likewise.
        pool: Likewise.
    """

    def __init__(
        self,
        formats: LayerFormats,
        *,
        window: int,
        max_cache_len: int,
        name: str = "layer",
        key_transform: KeyTransform | None = None,
        lengths: Lengths | None = None,
        pool: BufferPool | None = None,
    ) -> None:
        super().__init__(
            dataclasses.replace(formats, sink_length=0),
            max_cache_len=max_cache_len,
            name=name,
            key_transform=key_transform,
            lengths=lengths,
            pool=pool,
        )
        self.window = window
        self._ring_capacity = -(-(window - 1 + BLOCK_SIZE) // BLOCK_SIZE) * BLOCK_SIZE
        self.is_ring = super()._aligned(max_cache_len) > self._ring_capacity
        self.most_held = 0  # tokens before a crop, which have overwritten others that it does not bring back
        self._q_len = 0  # of the newest chunk, whose first query sees `window - 1` tokens before it
        self._has_long_chunk = False  # whether the newest chunk is attended to apart ...
        self._unrolled: _Unrolled | None = None  # ... and where, once it has been written

    @property
    def longest_chunk(self) -> int:
        """Tokens behind others that one call of the op takes: its first query still finds the window before it."""
        return self._ring_capacity + 1 - self.window

    @property
    def num_bytes_held(self) -> int:
        """Bytes of the tokens held, those that have been overwritten left out. See `LayerStorage.num_bytes_held`."""
        overwritten = max(0, self.length - self.capacity)
        return super().num_bytes_held - self.batch * self.bytes_per_token * overwritten

    def _aligned(self, tokens: int) -> int:
        aligned = super()._aligned(tokens)
        return min(aligned, self._ring_capacity) if self.is_ring else aligned

    def extend(self, key: Tensor, value: Tensor) -> None:
        """Take new tokens. See `LayerStorage.extend`."""
        is_behind_others = not self.is_empty
        super().extend(key, value)
        self._q_len = key.shape[2]
        self._has_long_chunk = self.is_ring and is_behind_others and key.shape[2] > self.longest_chunk
        self._unrolled = None

    def flush(self) -> None:
        """Write pending tokens; a long chunk to where it is attended to as well."""
        if self.pending is not None and self._has_long_chunk:
            self._unrolled = self._unroll(*self.pending)
        super().flush()

    def _unroll(self, key: Tensor, value: Tensor) -> _Unrolled:
        """The newest tokens in order, and behind them those of a chunk that has not been written to the ring yet."""
        q_len, lengths = key.shape[2], self._lengths()
        begin = (lengths[0].long() - q_len - self._ring_capacity).clamp(min=0) // BLOCK_SIZE * BLOCK_SIZE
        capacity = super()._aligned(self._ring_capacity + BLOCK_SIZE + q_len)
        row = torch.arange(capacity, device=self.device)
        source = (begin + row) % self._ring_capacity  # what is behind the past is overwritten, or hidden by lengths

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
        """See `LayerStorage.attend`; the window is that of the cache, which masks are made for."""
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
        """Dense keys and values of all positions up to `max_cache_len`; zero where the newest chunk does not see."""
        if not self.is_ring:
            return super().dequantize()
        self.flush()
        assert self.max_cache_len is not None and self.dtype is not None
        lengths, starts, planes, position = self._lengths(), self.starts, self._planes(), None
        target, end = torch.arange(self.max_cache_len, device=self.device), lengths.unsqueeze(1)
        num_seen = self.window - 1 + self._q_len
        if self._unrolled is not None:
            made = self._unrolled
            lengths, starts, planes = made.lengths, made.starts(starts), made.planes
            row = (target - made.begin).clamp(min=0, max=planes[0].codes.shape[2] - 1)
        else:
            num_seen = min(num_seen, self._ring_capacity)  # of a first chunk, which has been attended to as it came
            row = target % self._ring_capacity
            position = reference.ring_positions(lengths, self._ring_capacity)
        is_seen = (target < end) & (target >= end - num_seen)  # [batch, max_cache_len]
        dense = [
            reference.dequantize(
                side,
                kv_format,
                self.dtype,
                lengths,
                starts,
                key_transform=transform,
                position=position,
                **self._windows(),
            )
            .index_select(2, row)
            .masked_fill(~is_seen[:, None, :, None], 0.0)
            for side, kv_format, transform in zip(planes, self._formats(), (self.key_transform, None), strict=True)
        ]
        return dense[0], dense[1]

    def num_coded(self, kv_format: KVFormat, length: int) -> int:
        """Rows that hold codes."""
        num_coded = super().num_coded(kv_format, length)
        return min(num_coded, self._ring_capacity) if self.is_ring else num_coded

    def check_crop(self, num_tokens: int) -> None:
        """Refuse to forget so many tokens that what the next query sees has been overwritten.

        Raises:
            RuntimeError: It has been.
        """
        written = self._num_written()
        if num_tokens == 0 or num_tokens >= self.length or written is None or written <= self._ring_capacity:
            return
        most = self.longest_chunk - (written - self.length)
        if num_tokens > most:
            raise RuntimeError(
                f"{self.name}: `crop` must remove at most {most} tokens of a static cache with a window of "
                f"{self.window}, got {num_tokens}. Reset the cache and feed it the text again."
            )

    def crop(self, num_tokens: int) -> None:
        """Forget the newest `num_tokens` tokens of every sequence, at most all of them.

        Raises:
            RuntimeError: See `check_crop`.
        """
        if not self.is_allocated or num_tokens == 0:
            return
        self.check_crop(num_tokens)
        self.most_held = max(self.most_held, self.length)
        super().crop(num_tokens)
        if self.is_empty:
            self.most_held = 0
        self._forget_chunk()

    def _num_written(self) -> int | None:
        return max(self.most_held, self.length) if self.is_ring else None

    def reset(self) -> None:
        """Forget all tokens, keep the buffers."""
        super().reset()
        self.most_held = 0
        self._forget_chunk()

    def _forget_chunk(self) -> None:
        self._q_len, self._has_long_chunk, self._unrolled = 0, False, None

    def __getstate__(self) -> dict[str, Any]:
        """See `LayerStorage.__getstate__`; buffers of one step stay behind."""
        return {**super().__getstate__(), "_has_long_chunk": False, "_unrolled": None}


class KVQuantStaticRingLayer(KVQuantLayer):
    """One sliding-window layer of a static `KVQuantCache`; masks are for all positions, as in its other layers.

    Args:
        storage: The buffers.
        notes: What the masks of the cache have shown, shared by its layers.
    """

    is_sliding = True
    storage: StaticRingStorage

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset for the mask: of the chunk itself while empty, else of everything there is room for."""
        length, offset = super().get_mask_sizes(query_length)
        if isinstance(length, KVLength):
            first = length.is_first_chunk
            return KVLength(
                length, self.notes, is_first_chunk=first, window=0 if first else self.storage.window
            ), offset
        return length, offset
