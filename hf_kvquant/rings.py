"""Layers with a sliding window: their newest tokens as codes, in buffers that do not grow with the sequence.

A query sees the last `window` positions, so a layer needs `window - 1` tokens and those of the step. They stay in the
order in which they came: when the buffers are full, what has left the window is dropped and the rest moved down in one
go, so that a step costs what it costs without a window. With room for `TOKEN_ALIGNMENT` tokens more than a window,
moving adds a few hundredths to what attention reads. Chunks of any length and recorded pasts just grow the buffers.
Static caches, where nothing can be moved, overwrite their oldest tokens instead: `static_rings.py`.

Positions here count from the first token held; `dropped` is how many came before, and a multiple of the block that
shares a scale. What attention computes is, to the bit of every code, what it would be over the whole sequence with the
window as its mask. Which layers are rings is decided in `cache.py`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import Tensor

from .cache import KVQuantLayer
from .config import LayerFormats
from .handle import KVLength
from .lengths import Lengths
from .storage import GROWTH, LayerStorage
from .transforms import KeyTransform


class RingStorage(LayerStorage):
    """Keys and values of one layer, as far as its window sees them; growing up to the window.

    Args:
        formats: Of keys and of values. The first `sink_length` tokens get codes too: they leave the window like all
            others.
        window: Positions visible to a query, itself included.
        name: As in `LayerStorage`.
        key_transform: Likewise.
        lengths: Shared by rings that drop tokens in the same steps: of one window and block size.
    """

    def __init__(
        self,
        formats: LayerFormats,
        *,
        window: int,
        name: str = "layer",
        key_transform: KeyTransform | None = None,
        lengths: Lengths | None = None,
    ) -> None:
        formats = dataclasses.replace(formats, sink_length=0)
        super().__init__(formats, name=name, key_transform=key_transform, lengths=lengths)
        self.window = window
        self.dropped = 0  # tokens that came before the first one held
        self.record_past = False  # whether nothing may be dropped before the next crop
        self._q_len = 0  # of the newest chunk, whose first query sees `window - 1` tokens before it

    @property
    def total_length(self) -> int:
        """Tokens taken per sequence, those dropped included."""
        return self.dropped + self.length

    @property
    def num_visible(self) -> int:
        """Tokens that some query of the newest chunk sees."""
        return min(self.length, self.window - 1 + self._q_len)

    @property
    def mask_offset(self) -> int:
        """Position of the first of them in the sequence."""
        return self.total_length - self.num_visible

    @property
    def max_capacity(self) -> int:
        """Tokens that the buffers are for, unless a chunk is longer or the past is recorded."""
        return self._aligned(self.window - 1 + self._aligned(1))

    @property
    def block_size(self) -> int:
        """Tokens that share a scale, which are dropped together."""
        return self.formats.key.block_size or 1

    def surplus(self, length: int) -> int:
        """How many of so many tokens, the oldest, no later query sees: whole blocks."""
        return max(0, length - max(1, self.window - 1)) // self.block_size * self.block_size

    def extend(self, key: Tensor, value: Tensor) -> None:
        """Take new tokens, of the first chunk those that later queries see. See `LayerStorage.extend`."""
        has_tokens = key.ndim == value.ndim == 4
        surplus = self.surplus(key.shape[2]) if has_tokens and self.is_empty and not self.record_past else 0
        super().extend(key[:, :, surplus:], value[:, :, surplus:] if surplus else value)
        if surplus:
            self._freeze_scales(key, value)  # by all of them, as where there is no window
            self.dropped = surplus
        self._q_len = key.shape[2]

    def _make_room(self, q_len: int) -> None:
        needed = self.length + q_len
        if needed <= (self.capacity if self.record_past else min(self.capacity, self.max_capacity)):
            return
        surplus = 0 if self.record_past else self.surplus(self.length)
        needed -= surplus
        grown = max(needed, int(self.capacity * GROWTH))
        if not self.record_past:
            grown = max(needed, min(grown, self.max_capacity))
        self._drop(surplus, self._aligned(grown))

    def _drop(self, surplus: int, capacity: int) -> None:
        """Forget the oldest `surplus` tokens, whole blocks, and go on in buffers for `capacity`."""
        held = self.length
        moved = []
        head_dims = self.key_head_dim, self.value_head_dim
        for old, kv_format, head_dim in zip(self._planes(), self._formats(), head_dims, strict=True):
            new = self._new_planes(kv_format, head_dim, capacity, self.device)
            size = kv_format.block_size
            targets, sources = new.narrow(held - surplus, size), old.narrow(held, size, surplus)
            for target, source in zip(targets.tensors(), sources.tensors(), strict=True):
                target.copy_(source)
            if new.tail is not None and old.tail is not None:
                # Position t is in row t mod the number of rows, and positions become smaller.
                new.tail.copy_(old.tail.roll(-surplus, 2))
            moved.append(new)
        self._set_planes(*moved)
        if surplus:
            self._counted().place(self._member, held - surplus)
            self.starts = None if self.starts is None else _moved_down(self.starts, surplus)
            self.dropped += surplus
        self._planes_changed()

    def set_starts(self, starts: Tensor | None) -> None:
        """See `LayerStorage.set_starts`."""
        super().set_starts(self._held_starts(starts))

    def _held_starts(self, starts: Tensor | None) -> Tensor | None:
        return starts if starts is None or self.dropped == 0 else _moved_down(starts, self.dropped)

    def attend(
        self, query: Tensor, *, softmax_scale: float, starts: Tensor | None = None, **options: Any
    ) -> tuple[Tensor, Tensor]:
        """See `LayerStorage.attend`; the window is that of the cache, which masks are made for."""
        options["sliding_window"] = self.window
        return super().attend(query, softmax_scale=softmax_scale, starts=self._held_starts(starts), **options)

    def dequantize(self) -> tuple[Tensor, Tensor]:
        """Dense keys and values of the tokens that some query of the newest chunk sees (`num_visible`)."""
        key, value = super().dequantize()
        begin = self.length - self.num_visible
        return key[:, :, begin:], value[:, :, begin:]

    def check_crop(self, num_tokens: int) -> None:
        """Refuse to forget tokens where those before them are gone.

        Raises:
            RuntimeError: They are, or would be for some number of tokens.
        """
        total = self.total_length
        left = total - num_tokens
        if num_tokens == 0 or total < self.window or left <= 0:
            return
        if not self.record_past:
            raise RuntimeError(
                f"{self.name}: `crop` must come before the window of {self.window} tokens is full, got {total} tokens. "
                "Call activate_past_recording on the cache first, so that it keeps what a crop brings back."
            )
        num_kept = self.length - min(left, self.window - 1)
        if num_tokens > num_kept:
            raise RuntimeError(
                f"{self.name}: `crop` must remove at most the {num_kept} tokens whose past was recorded, "
                f"got {num_tokens}. Reset the cache and feed it the text again."
            )

    def crop(self, num_tokens: int) -> None:
        """Forget the newest `num_tokens` tokens of every sequence, at most all of them; then what no query sees.

        Raises:
            RuntimeError: See `check_crop`.
        """
        if not self.is_allocated:
            return
        self.check_crop(num_tokens)
        self.flush()
        self._q_len = 0
        if num_tokens >= self.total_length:
            super().crop(self.length)
            self.dropped = 0
            return
        super().crop(num_tokens)
        if self.capacity > self.max_capacity:
            self._drop(self.surplus(self.length), self.max_capacity)

    def reset(self) -> None:
        """Forget all tokens, keep the buffers."""
        super().reset()
        self.dropped = self._q_len = 0


class KVQuantRingLayer(KVQuantLayer):
    """One sliding-window layer of a `KVQuantCache`, sized for masks as transformers' `DynamicSlidingWindowLayer`.

    Args:
        storage: The buffers.
        notes: What the masks of the cache have shown, shared by its layers.
    """

    is_sliding = True
    storage: RingStorage

    @property
    def record_past(self) -> bool:
        """Whether tokens that leave the window stay until the next crop, which may bring them back."""
        return self.storage.record_past

    @record_past.setter
    def record_past(self, record_past: bool) -> None:
        self.storage.record_past = record_past

    def activate_past_recording(self) -> None:
        """Keep all tokens between crops, for whoever takes steps back."""
        self.record_past = True

    @property
    def keys(self) -> Tensor | None:  # type: ignore[override]
        """Dense keys that a next query sees, dequantised at every access; `None` before the first tokens."""
        return self._newest(super().keys)

    @property
    def values(self) -> Tensor | None:  # type: ignore[override]
        """Dense values, like `keys`."""
        return self._newest(super().values)

    def _newest(self, dense: Tensor | None) -> Tensor | None:
        return None if dense is None else dense[:, :, max(0, dense.shape[2] - self.storage.window + 1) :]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset for the mask: of the chunk itself while empty, else of what its queries see."""
        storage = self.storage
        if storage.is_empty:
            return super().get_mask_sizes(query_length)
        total = storage.total_length
        num_before = min(total, storage.window - 1)
        length = KVLength(num_before + query_length, self.notes, is_first_chunk=False, window=storage.window)
        return length, total - num_before

    def get_seq_length(self) -> int:
        """Tokens taken, those that have left the window included."""
        return self.storage.total_length

    def get_max_length(self) -> int:
        """Tokens of the window."""
        return self.storage.window


def _moved_down(starts: Tensor, num_tokens: int) -> Tensor:
    """First positions that are not padding (`[batch]` int32) once `num_tokens` tokens are gone."""
    return (starts - num_tokens).clamp(min=0)
