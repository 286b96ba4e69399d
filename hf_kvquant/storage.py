"""One layer's buffers: planes of codes, scales and zeros, and how many tokens they hold. Knows nothing of transformers.

A storage is *growing* (buffers grow geometrically) or *static* (buffers of `max_cache_len` tokens at fixed addresses,
so that a captured or compiled step can be replayed). How many tokens it holds is counted in `lengths.py`, for all
storages of a cache together. New tokens come in two strokes: `extend` makes room and advances the length at once, the
codes are written later by the op that also attends to them (`flush`, or `attend` for both in one call). Until then they
are *pending*, and whatever else reads or moves the planes writes them first, so that a token is appended exactly once.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import logging
import weakref
from collections import Counter
from typing import Any

import torch
from torch import Tensor

from . import ops, reference
from .config import LayerFormats
from .formats import KVFormat, Planes
from .lengths import LengthGroup, Lengths, causal_pairs
from .pool import BufferPool
from .transforms import KeyTransform

logger = logging.getLogger(__name__)

# Buffers grow by half: at most a third of them is unused, and n tokens cost at most 3n token copies in all.
GROWTH = 1.5
SERVED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclasses.dataclass(frozen=True)
class BufferKind:
    """What a layer's buffers depend on: those of another layer or cache fit where it is equal.

    Attributes:
        formats: Of keys and values.
        shape: Batch, key-value heads, head_dim of keys and of values.
        max_cache_len: Tokens that the buffers hold.
        dtype: The model's.
        device: Where they are.
        transform: Whether keys are centred, smoothed, rotated.
    """

    formats: LayerFormats
    shape: tuple[int, int, int, int]
    max_cache_len: int
    dtype: torch.dtype
    device: torch.device
    transform: tuple[bool, bool, bool]


class LayerStorage:
    """Keys and values of one layer.

    Args:
        formats: Of keys and of values.
        max_cache_len: Tokens that a static storage holds; `None` makes a growing one.
        name: What error messages call this storage, such as `layer 3`.
        key_transform: What keys go through before they are quantised; moved to the device of the keys.
        lengths: Shared by the storages of one cache, which take the same tokens; `None` counts alone.
        pool: Where the buffers of a static storage come from and, when the storage dies, go to. `None` makes new ones.

    Raises:
        TypeError: `key_transform` is something else.
        ValueError: `key_transform` is for keys that have a scale for every channel.
    """

    def __init__(
        self,
        formats: LayerFormats,
        *,
        max_cache_len: int | None = None,
        name: str = "layer",
        key_transform: KeyTransform | None = None,
        lengths: Lengths | None = None,
        pool: BufferPool | None = None,
    ) -> None:
        self.formats = formats
        self.is_quantized = formats.is_quantized
        self.max_cache_len = max_cache_len
        self.name = name
        self._pool = pool
        self._loan: weakref.finalize[..., Any] | None = None  # in force while the pool expects our buffers back
        self.key_transform = self._checked(key_transform)
        self.key_planes: Planes | None = None
        self.value_planes: Planes | None = None
        # [batch] int32: first position that is not padding; `None` for 0. Set by whoever knows, before tokens are
        # written; padding must not widen the scales of channels. Attention is told again, with every call.
        self.starts: Tensor | None = None
        # Scratch of the CUDA kernel, zero between calls. Ours and nobody else's: two streams that must not write the
        # same planes at the same time must not share it either.
        self.counters: Tensor | None = None
        self._operands: ops.Operands | None = None  # of the planes and the transform that there are
        self._shared_lengths = Lengths() if lengths is None else lengths
        self._group: LengthGroup | None = None  # where our length is kept, once there are buffers ...
        self._member = 0  # ... and what we are called there
        self.is_empty = True
        self.pending: tuple[Tensor, Tensor] | None = None
        self.dtype: torch.dtype | None = None
        self._device: torch.device | None = None  # of the planes; not asked of them, which compiled steps would guard
        self.num_kv_heads = self.key_head_dim = self.value_head_dim = self.batch = 0
        self.window = 0  # positions visible to a query, itself included; 0 for all
        # The same where a model computes attention by itself, and its cache keeps what it no longer sees (GPT-Neo).
        self.masked_window = 0
        self.fallbacks: Counter[str] = Counter()  # reason -> steps that attended to dequantised tensors ...
        self.tally: Counter[str] | None = None  # ... and where they are counted for longer than there is this storage
        self.pairs_dequantized = 0  # (query, token) pairs of such steps, padding included; of growing storages alone
        self.pairs_read: int | None = None  # those of steps that `attend` served, where somebody counts (`pairs.py`)

    def _checked(self, key_transform: KeyTransform | None) -> KeyTransform | None:
        if key_transform is not None and not isinstance(key_transform, KeyTransform):
            raise TypeError(
                f"{self.name}: `key_transform` must be a KeyTransform or None, got {type(key_transform).__name__}. "
                "hf_kvquant.key_transforms makes those of a model."
            )
        # The identity is kept as nothing, which ops serve without a look at the keys.
        if key_transform is None or key_transform.is_identity:
            return None
        if self.formats.key.granularity == "channel":
            raise ValueError(
                f"{self.name}: `key_transform` must be None where every channel of the keys has a scale of its own, "
                f"got {key_transform.describe()}. Outlier channels do no harm there: leave it out."
            )
        return key_transform

    # --- what is there ------------------------------------------------------------------------------------------------

    @property
    def is_static(self) -> bool:
        """Whether buffers have a fixed capacity."""
        return self.max_cache_len is not None

    @property
    def is_ring(self) -> bool:
        """Whether rows of the planes come round again, so that tokens overwrite others (see `rings.py`)."""
        return False

    @property
    def is_allocated(self) -> bool:
        """Whether buffers exist."""
        return self._group is not None

    @property
    def capacity(self) -> int:
        """Tokens there is room for."""
        return 0 if self.key_planes is None else self.key_planes.codes.shape[2]

    @property
    def device(self) -> torch.device:
        """Where the buffers are."""
        assert self._device is not None
        return self._device

    @property
    def length(self) -> int:
        """Tokens taken per sequence, pending ones included. Waits for the device after a compiled static step."""
        return 0 if self._group is None else self._group.length(self._member)

    @property
    def num_visible(self) -> int:
        """Tokens that `dequantize` returns."""
        return self.max_cache_len if self.max_cache_len is not None else self.length

    @property
    def mask_offset(self) -> int:
        """Position of the first of them in the sequence."""
        return 0

    @property
    def length_group(self) -> LengthGroup | None:
        """Where our length is kept, with those of other storages; `None` before there are buffers."""
        return self._group

    @property
    def lengths(self) -> Tensor | None:
        """The same on the device: `[batch]` int32, to be read only. Mostly a tensor that other storages share."""
        return None if self._group is None else self._group.tensor_of(self._member)

    @property
    def room(self) -> int:
        """Tokens that a static storage takes before it is full. Waits for the device after a compiled static step."""
        assert self.max_cache_len is not None
        return self.max_cache_len - self.length

    @property
    def has_tail(self) -> bool:
        """Whether tokens stay dense that later have codes, so that a crop cannot give back what they were."""
        return any(kv_format.tail_rows(**self._windows()) > 0 for kv_format in self._formats())

    @property
    def num_bytes(self) -> int:
        """Bytes allocated for codes, scales and zeros."""
        return sum(planes.num_bytes for planes in (self.key_planes, self.value_planes) if planes is not None)

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one more token of one sequence takes."""
        assert self.dtype is not None
        return sum(
            kv_format.bytes_per_token(self.num_kv_heads, head_dim, self.dtype)
            for kv_format, head_dim in (
                (self.formats.key, self.key_head_dim),
                (self.formats.value, self.value_head_dim),
            )
        )

    @property
    def num_bytes_held(self) -> int:
        """Bytes of the tokens held, without unused capacity; tails, which serve any token, are there as a whole."""
        assert self.dtype is not None
        tail_bytes = sum(
            kv_format.tail_bytes(self.num_kv_heads, head_dim, self.dtype, **self._windows())
            for kv_format, head_dim in (
                (self.formats.key, self.key_head_dim),
                (self.formats.value, self.value_head_dim),
            )
        )
        return self.batch * (self.bytes_per_token * self.length + tail_bytes)

    # --- new tokens ---------------------------------------------------------------------------------------------------

    def allocate(self, key: Tensor, value: Tensor) -> None:
        """Create the buffers for tokens like these.

        Args:
            key: `[batch, num_kv_heads, tokens, head_dim]`; `tokens` may be 0. Shape, dtype and device count.
            value: The same.

        Raises:
            TypeError: The dtype is not served.
            ValueError: A shape is not served.
        """
        self._check_served(key, value)
        self._part_with_buffers()
        self.batch, self.num_kv_heads, tokens, self.key_head_dim = key.shape
        self.value_head_dim = value.shape[-1]
        self.dtype, self._device = key.dtype, key.device
        if self.max_cache_len is not None and self._pool is not None and not torch.compiler.is_compiling():
            self._borrow(self._pool, self.max_cache_len, key.device)
        else:
            self._make_buffers(self._wanted(tokens) if self.max_cache_len is None else self.max_cache_len, key.device)
        self._join(0)
        self._planes_changed()

    def _make_buffers(self, tokens: int, device: torch.device) -> None:
        capacity = self._aligned(tokens)
        if self.key_transform is not None:
            self.key_transform = self.key_transform.to(device)
        self.counters = _new_counters(device)
        self._set_planes(
            self._new_planes(self.formats.key, self.key_head_dim, capacity, device),
            self._new_planes(self.formats.value, self.value_head_dim, capacity, device),
        )

    def _borrow(self, pool: BufferPool, max_cache_len: int, device: torch.device) -> None:
        """Take buffers of a storage that has died, or make some, for the pool to have when we do.

        What they hold needs no clearing: like what a reset leaves behind, it lies beyond the length.
        """
        assert self.dtype is not None
        transform = self.key_transform
        parts = (False,) * 3
        if transform is not None:
            parts = transform.center is not None, transform.smoothing is not None, transform.is_rotated
        shape = self.batch, self.num_kv_heads, self.key_head_dim, self.value_head_dim
        kind = BufferKind(self.formats, shape, max_cache_len, self.dtype, device, parts)
        buffers = pool.take(self.name, kind)
        if buffers is None:
            if transform is not None:
                # The numbers of the next cache are written here, so it cannot be the tensors of a model.
                self.key_transform = transform.clone(device)
            self._make_buffers(max_cache_len, device)
            buffers = self.key_planes, self.value_planes, self.counters, self.key_transform
        else:
            self.key_planes, self.value_planes, self.counters, self.key_transform = buffers
            if self.key_transform is not None and transform is not None:
                self.key_transform.copy_(transform)
        self._loan = pool.expect(self, self.name, kind, buffers)

    def _part_with_buffers(self) -> None:
        """Keep the pool from what is ours no longer, or not all of it."""
        if self._loan is not None:
            self._loan.detach()
            self._loan = None

    def set_key_transform(self, key_transform: KeyTransform | None) -> None:
        """Replace the transform of keys, while there are none.

        Raises:
            TypeError: It is something else.
            ValueError: It is for other keys, or tokens are held, whose keys went through the one before.
        """
        key_transform = self._checked(key_transform)
        if not self.is_empty:
            raise ValueError(
                f"{self.name}: `key_transform` must be set before the first tokens, got {self.length} tokens held. "
                "Reset the cache first."
            )
        if key_transform is not None and self.is_allocated:
            key_transform.check_fits(self.name, self.num_kv_heads, self.key_head_dim)
            key_transform = key_transform.to(self.device)
        self.key_transform = key_transform
        if self.is_allocated:
            self._planes_changed()

    def _check_served(self, key: Tensor, value: Tensor) -> None:
        for name, x, kv_format in (("key", key, self.formats.key), ("value", value, self.formats.value)):
            if x.ndim != 4:
                raise ValueError(
                    f"{self.name}: `{name}` must be [batch, num_kv_heads, tokens, head_dim], got shape {list(x.shape)}."
                )
            if x.dtype not in SERVED_DTYPES:
                raise TypeError(
                    f"{self.name}: `{name}` must be float32, bfloat16 or float16, got {x.dtype}. "
                    "Load the model in one of these dtypes."
                )
            kv_format.num_groups(x.shape[-1])
        if key.shape[:3] != value.shape[:3] or key.dtype != value.dtype or key.device != value.device:
            raise ValueError(
                f"{self.name}: `value` must have the batch, heads, tokens, dtype and device of `key` "
                f"({list(key.shape[:3])}, {key.dtype}, {key.device}), "
                f"got {list(value.shape[:3])}, {value.dtype}, {value.device}."
            )
        if self.key_transform is not None:
            self.key_transform.check_fits(self.name, key.shape[1], key.shape[3])

    def _planes_changed(self) -> None:
        """Spell out what steps will need of the planes and the transform that there are now.

        And tell the compiler that static buffers stay: it would not put a step that mutates others into a CUDA graph.
        """
        self._operands = ops.Operands(
            *self._planes(), self._formats(), self.key_transform, is_ring=self.is_ring, **self._windows()
        )
        if self.is_static and not torch.compiler.is_compiling():
            for tensor in self._step_tensors():
                torch._dynamo.mark_static_address(tensor)

    def _step_tensors(self) -> list[Tensor]:
        """Every tensor of ours that a decode step reads or writes."""
        transform = [] if self.key_transform is None else self.key_transform.tensors()
        return [*self._tensors(), *([] if self.counters is None else [self.counters]), *transform]

    def addresses(self) -> tuple[tuple[int, torch.Size], ...]:
        """Where a step finds its tensors: a captured one serves whatever storage has the same."""
        return tuple((tensor.data_ptr(), tensor.shape) for tensor in self._step_tensors())

    def _tensors(self) -> list[Tensor]:
        """What has a row for every sequence of the batch."""
        key_planes, value_planes = self._planes()
        return [*key_planes.tensors(), *value_planes.tensors(), self._lengths()]

    def _new_planes(self, kv_format: KVFormat, head_dim: int, capacity: int, device: torch.device) -> Planes:
        assert self.dtype is not None
        return kv_format.allocate(
            self.batch, self.num_kv_heads, head_dim, capacity, dtype=self.dtype, device=device, **self._windows()
        )

    def _windows(self) -> dict[str, Any]:
        """The dense windows, as everything that knows tails takes them."""
        return {"sink_length": self.formats.sink_length, "residual_length": self.formats.residual_length}

    def extend(self, key: Tensor, value: Tensor) -> None:
        """Take new tokens: check them, make room, advance the length and keep them as pending.

        Args:
            key: `[batch, num_kv_heads, q_len, head_dim]`, as the model makes it.
            value: The same for values.

        Raises:
            TypeError, ValueError: They do not fit what is stored, or a static storage is full. Nothing has changed.
        """
        if self._group is None:
            self._check_served(key, value)
        elif not self._fits(key, value):
            self._refuse(key, value)
        q_len = key.shape[2]
        self.check_room(q_len)
        if self._group is None:
            self.allocate(key, value)
        if q_len == 0:
            return
        if self.pending is not None:
            self.flush()
        self._make_room(q_len)
        self._counted().advance(self._member, q_len)
        if self.is_empty:
            self._freeze_scales(key, value)
            self.is_empty = False
        self.pending = (key, value)

    def _fits(self, key: Tensor, value: Tensor) -> bool:
        """Whether tokens are like those that are held; the short way, for every layer and step."""
        batch, num_kv_heads, dtype, device = self.batch, self.num_kv_heads, self.dtype, self._device
        shape = key.shape
        return (
            len(shape) == 4
            and shape == (batch, num_kv_heads, shape[2], self.key_head_dim)
            and value.shape == (batch, num_kv_heads, shape[2], self.value_head_dim)
            and key.dtype == dtype
            and value.dtype == dtype
            and key.device == device
            and value.device == device
        )

    def _refuse(self, key: Tensor, value: Tensor) -> None:
        """Say what does not fit."""
        expected = (self.batch, self.num_kv_heads)
        for name, x, head_dim in (("key", key, self.key_head_dim), ("value", value, self.value_head_dim)):
            if x.ndim != 4 or (x.shape[0], x.shape[1], x.shape[3]) != (*expected, head_dim):
                raise ValueError(
                    f"{self.name}: `{name}` must have batch {expected[0]}, {expected[1]} key-value heads and head_dim "
                    f"{head_dim} like the cache, got shape {list(x.shape)}. Start a new cache for another batch or "
                    "model, or use reset, batch_select_indices or batch_repeat_interleave."
                )
            if x.dtype != self.dtype or x.device != self.device:
                raise ValueError(
                    f"{self.name}: `{name}` must be {self.dtype} on {self.device} like the cache, "
                    f"got {x.dtype} on {x.device}. Start a new cache after moving or casting the model."
                )
        if key.shape[2] != value.shape[2]:
            raise ValueError(f"{self.name}: `value` must have {key.shape[2]} tokens like `key`, got {value.shape[2]}.")

    def check_room(self, q_len: int) -> None:
        """Refuse new tokens that a static storage has no room for.

        Raises:
            ValueError: It is full.
        """
        if self.max_cache_len is None or torch.compiler.is_compiling():
            # A compiled step does not know the length, and must not wait for it. See `KVQuantCache`.
            return
        needed = self.length + q_len
        if needed > self.max_cache_len:
            raise ValueError(
                f"{self.name}: `max_cache_len` must be at least {needed} for these tokens, got "
                f"{self.max_cache_len} ({self.length} held, {q_len} new). Build the cache with a larger "
                "max_cache_len, or reset it."
            )

    def _make_room(self, q_len: int) -> None:
        if self.max_cache_len is not None:
            return
        capacity = self._wanted(self.length + q_len)
        if capacity != self.capacity:
            self._resize(capacity)

    def _wanted(self, tokens: int) -> int:
        """The capacity of a growing storage for so many tokens: what there is, or more."""
        if tokens <= self.capacity:
            return self.capacity
        return self._aligned(tokens if self.is_empty else max(tokens, int(self.capacity * GROWTH)))

    def _resize(self, capacity: int) -> None:
        """Go on in other buffers."""
        key_planes, value_planes = self._planes()
        self._set_planes(
            self._resized(key_planes, self.formats.key, self.key_head_dim, capacity),
            self._resized(value_planes, self.formats.value, self.value_head_dim, capacity),
        )
        self._planes_changed()

    def _set_planes(self, key_planes: Planes | None, value_planes: Planes | None) -> None:
        """Have other planes, of both sides at once: memory that runs out before leaves both as they were."""
        self.key_planes, self.value_planes = key_planes, value_planes

    def _resized(self, planes: Planes, kv_format: KVFormat, head_dim: int, capacity: int) -> Planes:
        grown = self._new_planes(kv_format, head_dim, capacity, planes.codes.device)
        new, old = (each.narrow(self.length, kv_format.block_size).tensors() for each in (grown, planes))
        for new_plane, old_plane in zip(new, old, strict=True):
            new_plane.copy_(old_plane)
        return grown

    def _aligned(self, tokens: int) -> int:
        """The capacity for so many tokens: whole tiles, and whole blocks, of both sides."""
        alignment = max(self.formats.key.token_alignment, self.formats.value.token_alignment)
        return max(1, -(-tokens // alignment)) * alignment

    def _freeze_scales(self, key: Tensor, value: Tensor) -> None:
        """Granularity `tensor`: these, the first tokens of a sequence, decide its scale for good."""
        for x, planes, kv_format, transform in (
            (key, self.key_planes, self.formats.key, self.key_transform),
            (value, self.value_planes, self.formats.value, None),
        ):
            if kv_format.granularity == "tensor" and planes is not None and planes.scale is not None:
                if transform is not None:
                    x = reference.transform_key(x, transform)
                scale, zero = reference.compute_scale(x, kv_format)
                planes.scale.copy_(scale)
                if planes.zero is not None and zero is not None:
                    planes.zero.copy_(zero)

    def set_starts(self, starts: Tensor | None) -> None:
        """Note the first position of each sequence that is not padding (`[batch]` int32; `None` for 0)."""
        self.starts = starts

    def forget_pending(self) -> None:
        """Let go of tokens that only a capture that failed half-way has taken: nothing has run on the device."""
        self.pending = None

    def flush(self) -> None:
        """Write pending tokens into the planes, if there are any."""
        if self.pending is None:
            return
        key, value = self.pending
        assert self._operands is not None
        self._operands.append(key, value, self._lengths(), self.starts)
        self.pending = None

    def attend(
        self, query: Tensor, *, softmax_scale: float, starts: Tensor | None = None, **options: Any
    ) -> tuple[Tensor, Tensor]:
        """Write pending tokens and attend to everything stored, in one op. See `ops.Operands.decode`.

        Args:
            query: `[batch, num_q_heads, q_len, head_dim]`, the newest `q_len` tokens, as the model makes it.
            softmax_scale: Multiplies query · key.
            starts: `[batch]` int32: first position that is not padding; `None` for 0.
            **options: `sinks`, `alibi_slopes`, `softcap`, `sliding_window`, `num_splits`.
        """
        assert self._operands is not None
        result = self._operands.decode(
            query,
            self.pending,
            self._lengths(),
            softmax_scale=softmax_scale,
            counters=self.counters,
            starts=starts,
            **options,
        )
        if not torch.compiler.is_compiling():
            self.starts = starts  # what is dense at the beginning goes by it
        self.pending = None  # only now: a query that is refused must not lose tokens that `lengths` counts already
        self._note_read(query, options.get("sliding_window", 0))
        return result

    def _note_read(self, query: Tensor, window: int) -> None:
        """Count what `attend` has served, where somebody wants to know."""
        if self.pairs_read is not None and not torch.compiler.is_compiling():
            batch, _, q_len, _ = query.shape
            self.pairs_read += batch * causal_pairs(self.length, self.length - q_len, window)

    def dequantize(self) -> tuple[Tensor, Tensor]:
        """Dense keys and values in the model's dtype and basis.

        Returns:
            `[batch, num_kv_heads, tokens, head_dim]` each, `tokens` being the length (growing) or the capacity asked
            for (static, whose length the host does not know; what lies beyond it is zero). Views of the planes where
            nothing is quantised and the storage grows.
        """
        self.flush()
        tokens = self.max_cache_len if self.max_cache_len is not None else self.length
        assert self.dtype is not None
        dense = [
            reference.dequantize(
                planes.narrow(tokens, kv_format.block_size),
                kv_format,
                self.dtype,
                self._lengths(),
                self.starts,
                key_transform=transform,
                **self._windows(),
            )
            for planes, kv_format, transform in zip(
                self._planes(), self._formats(), (self.key_transform, None), strict=True
            )
        ]
        if self.is_static:
            # A NaN that was cropped away would still reach whoever multiplies it with a probability of 0.
            is_beyond = torch.arange(tokens, device=self.device) >= self._lengths().unsqueeze(1)  # [batch, tokens]
            dense = [x.masked_fill(is_beyond[:, None, :, None], 0.0) for x in dense]
        return dense[0], dense[1]

    def query_offset(self, q_len: int) -> int | Tensor:
        """Position of the first of the newest `q_len` tokens; a 0-d tensor in a static storage."""
        if self.is_static:
            return self._lengths()[0] - q_len
        return self.length - q_len

    def note_fallback(self, reason: str) -> None:
        """Count a step that attends to dequantised tensors, and say so once in the log."""
        if not torch.compiler.is_compiling():
            self.fallbacks[reason] += 1
            if self.pending is not None and not self.is_static:
                before = self.length - self.pending[0].shape[2]
                self.pairs_dequantized += self.batch * causal_pairs(self.length, before, self.window)
            if self.tally is not None:
                self.tally[reason] += 1
            _log_fallback(reason)

    def _planes(self) -> tuple[Planes, Planes]:
        assert self.key_planes is not None and self.value_planes is not None
        return self.key_planes, self.value_planes

    def _lengths(self) -> Tensor:
        return self._counted().tensor_of(self._member)

    def _counted(self) -> LengthGroup:
        assert self._group is not None
        return self._group

    def _join(self, length: int) -> None:
        """Count `length` tokens with the storages that are where this one is now, and no longer where it was."""
        if self._group is not None:
            self._group.leave(self._member)
        self._group, self._member = self._shared_lengths.join(length, self.batch, self.device)

    def _formats(self) -> tuple[KVFormat, KVFormat]:
        return self.formats.key, self.formats.value

    # --- what is saved ------------------------------------------------------------------------------------------------

    def num_coded(self, kv_format: KVFormat, length: int) -> int:
        """How many of so many tokens have codes: all of them, or those in blocks that have left the window."""
        return length if kv_format.block_size is None else kv_format.tail_begin(length, self.formats.residual_length)

    def _coded(self, planes: Planes, kv_format: KVFormat, length: int) -> Planes:
        """The rows of planes that hold codes."""
        return planes.narrow(min(self.num_coded(kv_format, length), planes.codes.shape[2]), kv_format.block_size)

    def held_planes(self) -> tuple[Planes, Planes]:
        """The planes of keys and of values, cut to the tokens held; views, but for the tail.

        Rows of a tail that stand for no token are zero: what is there belongs to tokens that were cropped, or to
        whoever had the buffers before, and is nobody's business.

        Returns:
            Planes of `num_coded` tokens each, of a ring at most its rows, with the whole tail.
        """
        length, lengths, held = self.length, self._lengths(), []
        for planes, kv_format in zip(self._planes(), self._formats(), strict=True):
            tail = planes.tail
            if tail is not None:
                position = torch.arange(length, device=self.device).expand(self.batch, -1)
                is_dense, row = reference.dense_tokens(
                    planes, kv_format, lengths, self.starts, **self._windows(), position=position
                )
                sequence = torch.arange(self.batch, device=self.device).unsqueeze(1).expand_as(row)
                is_used = torch.zeros((self.batch, tail.shape[2]), dtype=torch.bool, device=self.device)
                is_used[sequence[is_dense], row[is_dense]] = True
                tail = tail.masked_fill(~is_used[:, None, :, None], 0.0)
            held.append(dataclasses.replace(self._coded(planes, kv_format, length), tail=tail))
        return held[0], held[1]

    def planned_planes(
        self, shape: tuple[int, int, int, int], length: int, capacity: int, dtype: torch.dtype
    ) -> tuple[Planes, Planes]:
        """What `held_planes` of a storage like this one would be, without memory (on the device `meta`).

        Args:
            shape: Batch, key-value heads, head_dim of keys and of values.
            length: Tokens held.
            capacity: Tokens there is room for, as `self.capacity` says.
            dtype: The model's.

        Raises:
            ValueError: There is no such storage: a format does not fit, or `capacity` is not one that a storage has.
        """
        if not self._can_hold(length, capacity):
            raise ValueError(f"{self.name} cannot hold {length} tokens in buffers for {capacity}")
        planned = [
            self._coded(planes, kv_format, length)
            for planes, kv_format in zip(self._without_memory(shape, capacity, dtype), self._formats(), strict=True)
        ]
        return planned[0], planned[1]

    def _can_hold(self, length: int, capacity: int) -> bool:
        """Whether buffers for `capacity` are such as a storage like this one has, and hold `length` tokens."""
        expected = self._aligned(capacity if self.max_cache_len is None else self.max_cache_len)
        return capacity == expected and 0 < length <= (self.max_cache_len or capacity)

    def planned_bytes(self, shape: tuple[int, int, int, int], capacity: int, dtype: torch.dtype) -> int:
        """Bytes of the buffers that such a storage has. See `planned_planes`."""
        return sum(planes.num_bytes for planes in self._without_memory(shape, capacity, dtype))

    def _without_memory(self, shape: tuple[int, int, int, int], capacity: int, dtype: torch.dtype) -> list[Planes]:
        batch, num_kv_heads, *head_dims = shape
        meta = torch.device("meta")
        return [
            kv_format.allocate(batch, num_kv_heads, head_dim, capacity, dtype=dtype, device=meta, **self._windows())
            for kv_format, head_dim in zip(self._formats(), head_dims, strict=True)
        ]

    def restore(
        self,
        held: tuple[Planes, Planes],
        *,
        shape: tuple[int, int, int, int],
        length: int,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device,
        starts: Tensor | None,
    ) -> None:
        """Hold what another storage of these formats, transforms and `max_cache_len` held. For one without buffers.

        The capacity is part of it: kernels go by it when they split a sequence, and so sum in another order.

        Args:
            held: Its `held_planes`, shaped as `planned_planes` says, on any device; copied.
            shape: Batch, key-value heads, head_dim of keys and of values.
            length: Tokens it held.
            capacity: Its `capacity`.
            dtype: The model's.
            device: Where to.
            starts: `[batch]` int32: its `starts`, on any device.
        """
        assert not self.is_allocated
        self.batch, self.num_kv_heads, self.key_head_dim, self.value_head_dim = shape
        device = torch.empty(0, device=device).device  # with its index: those of tokens are compared with it
        self.dtype, self._device = dtype, device
        self.starts = None if starts is None else starts.to(device)
        self._make_buffers(capacity, device)
        for planes, kv_format, old in zip(self._planes(), self._formats(), held, strict=True):
            new = self._coded(planes, kv_format, length)
            for new_plane, old_plane in zip(new.tensors(), old.tensors(), strict=True):
                new_plane.copy_(old_plane)
        self._join(length)
        self.is_empty = False
        self._planes_changed()

    # --- what transformers does to caches -----------------------------------------------------------------------------

    def check_crop(self, num_tokens: int) -> None:
        """Refuse a crop that cannot be served; whoever holds all tokens serves every one."""

    def crop(self, num_tokens: int) -> None:
        """Forget the newest `num_tokens` tokens of every sequence, at most all of them.

        Tokens that had codes and now are among the newest, which are kept dense, go on dequantised.
        """
        if num_tokens > 0 and self.is_allocated:
            self._take_back(num_tokens)

    def _take_back(self, num_tokens: int) -> None:
        """What a crop does that is not refused."""
        self.flush()
        length = max(0, self.length - num_tokens)
        sides = zip(self._planes(), self._formats(), (self.key_transform, None), strict=True) if self.has_tail else ()
        for planes, kv_format, transform in sides:
            options = {"key_transform": transform, "num_written": self._num_written(), **self._windows()}
            reference.reopen(planes, kv_format, self.length, length, **options)
        self._place(length)

    def check_undo(self, num_tokens: int) -> None:
        """Refuse to undo a step of so many tokens where others have lost their place to them.

        Raises:
            RuntimeError: They have.
        """

    def rounds(self, num_tokens: int) -> bool:
        """Whether a crop of so many tokens leaves others dequantised that were dense before those came."""
        if not self.has_tail or self.pending is not None:
            return False
        length, residual_length = self.length, self.formats.residual_length
        begins = [
            (kv_format.tail_begin(length - num_tokens, residual_length), kv_format.tail_begin(length, residual_length))
            for kv_format in self._formats()
            if kv_format.tail_rows(**self._windows()) > 0
        ]
        return any(before < min(after, length - num_tokens) for before, after in begins)

    def undo(self, num_tokens: int) -> None:
        """Forget the newest tokens, those of a step that ended early, of which pending ones were never written."""
        if self.pending is None:
            self._take_back(num_tokens)
        else:
            self.pending = None
            self._place(self.length - num_tokens)

    def _place(self, length: int) -> None:
        self._counted().place(self._member, length)
        self.is_empty = length == 0

    def _num_written(self) -> int | None:
        """See `reference.reopen`."""
        return None

    def reset(self) -> None:
        """Forget all tokens, keep the buffers."""
        self.pending = None
        self.is_empty = True
        self.starts = None
        if self._group is not None:
            self._group.place(self._member, 0)

    def release(self) -> None:
        """Forget all tokens and the buffers, so that the next tokens may have another batch, dtype or device."""
        self.reset()
        self._part_with_buffers()
        if self._group is not None:
            self._group.leave(self._member)
        self._set_planes(None, None)
        self.counters = self._group = self._operands = None

    def select(self, indices: Tensor) -> None:
        """Keep the sequences `indices` (`[new batch]`, int64 or bool mask) of the batch, in that order.

        A static storage whose batch does not change is rewritten in place, so that its addresses stay.
        """
        if not self.is_allocated:
            return
        self.flush()
        index = indices.to(self.device)
        if index.dtype == torch.bool:
            index = index.nonzero().flatten()
        if self.is_static and index.numel() == self.batch:
            for planes in self._planes():
                for tensor in planes.tensors():
                    tensor.copy_(tensor.index_select(0, index))
            self.starts = None if self.starts is None else self.starts.index_select(0, index)
            return

        def selected(tensor: Tensor) -> Tensor:
            return tensor.index_select(0, index)

        def selected_planes(planes: Planes, kv_format: KVFormat) -> Planes:
            # Only what is held is worth moving: a growing buffer is cut to its length and grows again when needed.
            tokens = planes.codes.shape[2] if self.is_static else min(self._aligned(self.length), self.capacity)
            return planes.narrow(tokens, kv_format.block_size).map(selected)

        self._part_with_buffers()
        key_planes, value_planes = self._planes()
        starts = None if self.starts is None else selected(self.starts)
        self._set_planes(
            selected_planes(key_planes, self.formats.key), selected_planes(value_planes, self.formats.value)
        )
        self.starts = starts
        if index.numel() != self.batch:
            self.batch = index.numel()
            self._join(self.length)
        self._planes_changed()

    def repeat(self, repeats: int) -> None:
        """Repeat every sequence `repeats` times in place: a, a, b, b."""
        if self.is_allocated:
            self.select(torch.arange(self.batch, device=self.device).repeat_interleave(repeats))

    def move(self, device: torch.device | str) -> None:
        """Move the buffers to another device."""
        device = torch.empty(0, device=device).device  # "cuda" is one of them
        if not self.is_allocated:
            self.starts = None if self.starts is None else self.starts.to(device)
            return
        if self.device == device:
            return
        self.flush()
        self._part_with_buffers()
        key_planes, value_planes = self._planes()

        def moved(tensor: Tensor) -> Tensor:
            # Towards a GPU the copy is ordered with the kernels that read it; nothing orders the CPU's own reads.
            return tensor.to(device, non_blocking=torch.device(device).type != "cpu")

        self._set_planes(key_planes.map(moved), value_planes.map(moved))
        self._device = device
        self.starts = None if self.starts is None else moved(self.starts)
        self.counters = _new_counters(self.device)
        self._join(self.length)
        if self.key_transform is not None:
            self.key_transform = self.key_transform.to(device)
        self._planes_changed()

    def __getstate__(self) -> dict[str, Any]:
        """For pickle and deepcopy: pending tokens are written, and a static copy gets buffers of its own."""
        self.flush()
        return {**self.__dict__, "_pool": None, "_loan": None, "_operands": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self.is_allocated:
            self._planes_changed()  # kernels may be other ones where a pickle is opened

    def __deepcopy__(self, memo: dict[int, Any]) -> LayerStorage:
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        twin.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return twin


@functools.cache
def _log_fallback(reason: str) -> None:
    logger.warning("attention runs on dequantised tensors: %s. Correct, slower.", reason)


def _new_counters(device: torch.device) -> Tensor | None:
    """See `ops.decode`; only the CUDA kernel wants them."""
    return torch.zeros(ops.NUM_COUNTERS, dtype=torch.int32, device=device) if device.type == "cuda" else None
