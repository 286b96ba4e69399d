"""Where a layer's tokens live: how many rows its buffers have, which token is in which row, what a crop can bring back.

`Linear` has a row for every position. `Ring` is for sliding windows: a query sees the last `window` positions, so the
rows of older tokens are used again, and the layer does not grow. The token at position t is in row t mod capacity. The
ops know this (`is_ring`), so nothing is moved, and positions and lengths count the whole sequence. A ring has room for
`BLOCK_SIZE` more than `window - 1` tokens, so that in a step of several tokens the first query still finds its window.
Buffers smaller than a ring have one row per position: growing caches start with them, and some static caches never need
more. A ring grows while it records the past for a crop.

The codes that attention reads from a ring are bit for bit those that it would read from the whole sequence with the
window as its mask. With a static cache, nothing here waits for the device.

Pages of continuous batching are no rows of a layer: all layers share one table of pages for each request, transformers
gives pages out, frees and shares them, and a token's row in its page follows from its position (`ops.Operands.append`).
So `batching` asks its page table, and nothing here. Which row of a tail a dense token has is in `spec/formats.py`.
"""

from __future__ import annotations

from torch import Tensor

from ..spec import reference
from ..spec.formats import BLOCK_SIZE

# Buffers grow by half: at most a third of them is unused, and n tokens cost at most 3n token copies in all.
GROWTH = 1.5
# Tokens that a tail keeps behind the dense windows once crops are announced (`rewind.expect_crops`). Assistants propose
# 20 by default, and prompt lookup 10. A block of keys with channel scales stays whole.
TAIL_SLACK = 64


class Linear:
    """A row for every position.

    Args:
        alignment: Capacities are multiples of this many tokens.
        max_cache_len: Tokens that a static cache holds; `None` if it grows.
    """

    window = 0  # positions visible to a query, itself included; 0 for all
    masked_window = 0  # the same where a model's own masks hide the others, which keep their rows (GPT-Neo)
    is_unrolled = False  # see `Ring`

    def __init__(self, alignment: int, max_cache_len: int | None) -> None:
        self.alignment = alignment
        self.max_cache_len = max_cache_len
        self.slack = 0  # tokens that tails keep behind the dense windows
        # Of keys and of values: after the last crop, the first token that had its row of the tail, in the longest
        # sequence. Its tail also remembers tokens that were cropped: they have taken the rows of older ones.
        self.tail_from = 0, 0

    def is_ring(self, capacity: int) -> bool:
        """Whether rows are used again in buffers of this capacity."""
        return False

    def aligned(self, tokens: int) -> int:
        """`tokens` rounded up to a capacity; at least one tile."""
        return max(1, -(-tokens // self.alignment)) * self.alignment

    def needed(self, tokens: int, capacity: int, *, is_empty: bool) -> int:
        """The capacity that a growing cache needs for `tokens`: the present one if that is enough."""
        if tokens <= capacity:
            return capacity
        return self.aligned(tokens if is_empty else max(tokens, int(capacity * GROWTH)))

    def can_hold(self, length: int, capacity: int) -> bool:
        """Whether buffers can have this capacity and hold `length` tokens."""
        expected = self.aligned(capacity if self.max_cache_len is None else self.max_cache_len)
        return capacity == expected and 0 < length <= (self.max_cache_len or capacity)

    @property
    def num_seen(self) -> int:
        """Tokens that queries of the newest chunk see together; 0 for all."""
        return 0

    def num_shown(self, length: int) -> int:
        """Tokens that a dequantised cache shows."""
        return length if self.max_cache_len is None else self.max_cache_len

    def offset(self, length: int) -> int:
        """Position of the first token that a dequantised cache shows."""
        return 0

    def origin(self, lengths: Tensor, old: int, new: int) -> Tensor | None:
        """When buffers of capacity `old` are replaced: `[new]` int64, the old row of each new row; `None`: the same."""
        return None

    def note_resized(self) -> None:
        """Note that the tokens have moved to other buffers."""

    def note_chunk(self, q_len: int, capacity: int, *, is_first: bool) -> None:
        """Note that a chunk has come."""

    def check_crop(self, name: str, num_tokens: int, length: int, capacity: int) -> None:
        """Refuse a crop that cannot be served.

        Args:
            name: Of the layer, for the message.
            num_tokens: To be removed.
            length: Tokens held.
            capacity: Of the buffers.
        """

    def check_undo(self, name: str, num_tokens: int, length: int, capacity: int) -> None:
        """Refuse to undo a step that has overwritten other tokens. See `check_crop`."""

    def note_crop(self, before: int, length: int) -> None:
        """Note that a crop has left `length` of `before` tokens, all of which were written."""

    def forget_chunk(self, *, is_empty: bool) -> None:
        """Forget the newest chunk; `is_empty` if no tokens are left."""

    def oldest(self, length: int, capacity: int) -> int:
        """Position of the oldest token whose codes nothing has overwritten."""
        return 0

    def capacity_after_crop(self, capacity: int) -> int:
        """The capacity that is kept after a crop."""
        return capacity

    def forget(self) -> None:
        """Forget what was noted: no token is held any more."""
        self.tail_from = 0, 0


class Ring(Linear):
    """Rows that are used again. All sequences have the same length.

    Args:
        window: Positions visible to a query, itself included.
        alignment: See `Linear`.
        max_cache_len: See `Linear`.
    """

    def __init__(self, window: int, alignment: int, max_cache_len: int | None) -> None:
        super().__init__(alignment, max_cache_len)
        self.window = window
        self.full_capacity = whole_blocks(window - 1 + BLOCK_SIZE)  # unless the past is recorded
        self.most_held = 0  # longest length before a crop; those tokens overwrote others, which a crop cannot restore
        self.kept_from: int | None = None  # first position that a crop may bring back; None: the past is not recorded
        # Tokens of the newest chunk; 0 for a first chunk, whose attention runs on the model's own tensors.
        self.q_len = 0
        # Whether that chunk is too long for the ring. It is written like any other, but attention to it runs on
        # temporary buffers (`unrolled.py`): its tokens have overwritten some that its first query sees.
        self.is_unrolled = False

    def is_ring(self, capacity: int) -> bool:
        """False in a static cache with a row for every token, and in buffers that are still small."""
        comes_round = self.max_cache_len is None or self.max_cache_len > capacity
        return comes_round and capacity >= self.full_capacity

    def longest_chunk(self, capacity: int) -> int:
        """The longest later chunk that attention can serve from the ring: its first query still finds its window."""
        return capacity + 1 - self.window

    def record_past(self, is_recorded: bool, length: int) -> None:
        """Whether to keep tokens that leave the window until the next crop, so that it can bring them back."""
        if not is_recorded:
            self.kept_from = None
        elif self.kept_from is None:
            self.kept_from = max(0, length - self.window + 1)

    def aligned(self, tokens: int) -> int:
        """A ring has whole blocks, whatever its format."""
        aligned = super().aligned(tokens)
        if aligned <= self.full_capacity:
            return aligned
        # Only one that records the past grows further.
        return self.full_capacity if self.max_cache_len is not None else whole_blocks(tokens)

    def needed(self, tokens: int, capacity: int, *, is_empty: bool) -> int:
        if self.kept_from is None:
            return min(super().needed(tokens, capacity, is_empty=is_empty), self.full_capacity)
        kept = min(tokens, max(self.full_capacity, tokens - self.kept_from))
        return super().needed(kept, capacity, is_empty=is_empty)

    def can_hold(self, length: int, capacity: int) -> bool:
        if self.max_cache_len is not None or capacity < self.full_capacity:
            return super().can_hold(length, capacity)
        return length > 0 and capacity % BLOCK_SIZE == 0

    @property
    def num_seen(self) -> int:
        return self.window - 1 + self.q_len

    def num_shown(self, length: int) -> int:
        """In a growing cache, the tokens that queries of the newest chunk see."""
        if self.max_cache_len is not None:
            return self.max_cache_len
        return min(length, self.num_seen)

    def offset(self, length: int) -> int:
        return 0 if self.max_cache_len is not None else length - self.num_shown(length)

    def origin(self, lengths: Tensor, old: int, new: int) -> Tensor | None:
        """Rows whose token is no longer held are filled with another token; no query sees them."""
        return reference.ring_positions(lengths[:1], new)[0] % old

    def note_resized(self) -> None:
        """Nothing that a crop had overwritten is there any more."""
        self.most_held = 0

    def note_chunk(self, q_len: int, capacity: int, *, is_first: bool) -> None:
        self.q_len = 0 if is_first else q_len
        self.is_unrolled = self.is_ring(capacity) and self.q_len > self.longest_chunk(capacity)

    def check_crop(self, name: str, num_tokens: int, length: int, capacity: int) -> None:
        """Refuse a crop after which the next query would see tokens that are already overwritten.

        Raises:
            RuntimeError: It would. In a growing cache with a full window, every crop is refused while the past is not
                recorded, even one that could be served.
        """
        window = self.window
        if num_tokens == 0 or num_tokens >= length:
            return
        if self.max_cache_len is not None:
            most = self._most_to_take_back(length, capacity)
            which = f"{most} tokens of a static cache with a window of {window}"
        elif length < window or self.kept_from == 0:
            return
        elif self.kept_from is None:
            raise RuntimeError(
                f"{name}: `crop` must come before the window of {window} tokens is full, got {length} tokens. "
                "Call activate_past_recording on the cache first, so that it keeps what a crop brings back."
            )
        else:
            most = length - (self.kept_from + window - 1)
            which = f"the {most} tokens whose past was recorded"
        if num_tokens > most:
            raise RuntimeError(
                f"{name}: `crop` must remove at most {which}, got {num_tokens}. Reset the cache and feed it the "
                "text again."
            )

    def check_undo(self, name: str, num_tokens: int, length: int, capacity: int) -> None:
        """Works without recording: a ring has room for more tokens than a query sees.

        Raises:
            RuntimeError: Tokens that the next query would see have been overwritten.
        """
        most = self._most_to_take_back(length, capacity)
        if num_tokens > most:
            raise RuntimeError(
                f"{name}: a step that ended early must have at most {most} tokens to be undone with a window of "
                f"{self.window}, got {num_tokens}. Reset the cache and feed it the text again."
            )

    def _most_to_take_back(self, length: int, capacity: int) -> int:
        """How many of the newest tokens can be removed so that the next query still finds its whole window."""
        written = max(self.most_held, length)
        return self.longest_chunk(capacity) - (written - length) if written > capacity else length

    def note_crop(self, before: int, length: int) -> None:
        if length < before:
            self.most_held = max(self.most_held, before)
            self.forget_chunk(is_empty=length == 0)
        if self.kept_from is not None:
            self.kept_from = max(0, length - self.window + 1)

    def oldest(self, length: int, capacity: int) -> int:
        return max(0, max(self.most_held, length) - capacity) if self.is_ring(capacity) else 0

    def capacity_after_crop(self, capacity: int) -> int:
        """The past that was recorded is dropped."""
        return min(capacity, self.full_capacity)

    def forget(self) -> None:
        super().forget()
        self.kept_from = None if self.kept_from is None else 0
        self.forget_chunk(is_empty=True)

    def forget_chunk(self, *, is_empty: bool) -> None:
        if is_empty:
            self.most_held = 0
        self.q_len, self.is_unrolled = 0, False


def whole_blocks(tokens: int) -> int:
    """`tokens` rounded up to whole blocks."""
    return -(-tokens // BLOCK_SIZE) * BLOCK_SIZE
