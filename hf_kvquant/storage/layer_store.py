"""One layer's buffers: planes of codes, scales and zeros, and how many tokens they hold. Knows nothing of transformers.

A storage is *growing* (buffers grow geometrically) or *static* (buffers for `max_cache_len` tokens at fixed addresses,
so that a captured or compiled step can be replayed). `lengths.py` counts the tokens of all storages of a cache. New
tokens are stored in two steps. `extend` makes room and advances the length; the tokens are then *pending*. `attend`
writes their codes and attends to them in one op, `flush` only writes them. Everything else that reads or moves the
planes flushes first, so each token is appended exactly once.
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

from .. import ops
from ..config import LayerFormats
from ..spec import reference
from ..spec.formats import KVFormat, Planes
from ..spec.key_transform import KeyTransform
from .lengths import LengthGroup, Lengths, causal_pairs
from .pool import BufferPool

logger = logging.getLogger(__name__)

# Buffers grow by half: at most a third of them is unused, and n tokens cost at most 3n token copies in all.
GROWTH = 1.5
SERVED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclasses.dataclass(frozen=True)
class BufferKind:
    """Everything that a layer's buffers depend on. Two layers of equal kind can use each other's buffers.

    Attributes:
        formats: Of keys and values.
        shape: Batch, key-value heads, head_dim of keys and of values.
        max_cache_len: Tokens that the buffers hold.
        dtype: The model's.
        device: Of the buffers.
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
        name: Name of this storage in error messages, such as `layer 3`.
        key_transform: Applied to keys before they are quantised; moved to the device of the keys.
        lengths: Shared by all storages of one cache, which take the same tokens. `None`: this storage counts alone.
        pool: Provides the buffers of a static storage, and gets them back when the storage is garbage-collected. `None`
            allocates new ones.

    Raises:
        TypeError: `key_transform` is not a KeyTransform.
        ValueError: `key_transform` is given although each channel of the keys has its own scale.
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
        self._loan: weakref.finalize[..., Any] | None = None  # returns the buffers to the pool in the end
        self.key_transform = self._checked(key_transform)
        self.key_planes: Planes | None = None
        self.value_planes: Planes | None = None
        # [batch] int32: first position that is not padding; `None` for 0. Must be set before tokens are written, so
        # that padding does not widen the scales of channels. Attention passes it again with every call.
        self.starts: Tensor | None = None
        # Scratch of the CUDA kernel, zero between calls. Not shared: two streams may work on two storages at once.
        self.counters: Tensor | None = None
        self._operands: ops.Operands | None = None  # built from the current planes and transform
        self._shared_lengths = Lengths() if lengths is None else lengths
        self._group: LengthGroup | None = None  # keeps our length once buffers exist ...
        self._member = 0  # ... under this number
        self.is_empty = True
        self.pending: tuple[Tensor, Tensor] | None = None
        self.dtype: torch.dtype | None = None
        self._device: torch.device | None = None  # of the planes; kept here because compiled steps would guard theirs
        self.num_kv_heads = self.key_head_dim = self.value_head_dim = self.batch = 0
        self.window = 0  # positions visible to a query, itself included; 0 for all
        # The window of a model that computes attention itself. The cache then keeps all tokens (GPT-Neo).
        self.masked_window = 0
        self.fallbacks: Counter[str] = Counter()  # reason -> steps that attended to dequantised tensors ...
        self.tally: Counter[str] | None = None  # ... counted here, too, by a caller that outlives this storage
        self.pairs_dequantized = 0  # (query, token) pairs of those steps, padding included; growing storages only
        self.pairs_read: int | None = None  # pairs of the steps that `attend` served; None: not counted (`pairs.py`)

    def _checked(self, key_transform: KeyTransform | None) -> KeyTransform | None:
        if key_transform is not None and not isinstance(key_transform, KeyTransform):
            raise TypeError(
                f"{self.name}: `key_transform` must be a KeyTransform or None, got {type(key_transform).__name__}. "
                "hf_kvquant.key_transforms returns those of a model."
            )
        # The identity is stored as None, so that ops skip the transform.
        if key_transform is None or key_transform.is_identity:
            return None
        if self.formats.key.granularity == "channel":
            raise ValueError(
                f"{self.name}: `key_transform` must be None where every channel of the keys has a scale of its own, "
                f"got {key_transform.describe()}. Outlier channels do no harm there: leave it out."
            )
        return key_transform

    # --- what it holds ------------------------------------------------------------------------------------------------

    @property
    def is_static(self) -> bool:
        """Whether buffers have a fixed capacity."""
        return self.max_cache_len is not None

    @property
    def is_ring(self) -> bool:
        """Whether the rows of the planes are reused, so that new tokens overwrite old ones (see `rings.py`)."""
        return False

    @property
    def is_allocated(self) -> bool:
        """Whether buffers exist."""
        return self._group is not None

    @property
    def capacity(self) -> int:
        """Tokens that the buffers have room for."""
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
        """Position in the sequence of the first token that `dequantize` returns."""
        return 0

    @property
    def length_group(self) -> LengthGroup | None:
        """The group that keeps our length and those of other storages; `None` before buffers exist."""
        return self._group

    @property
    def lengths(self) -> Tensor | None:
        """`length` on the device: `[batch]` int32. Read only: it is usually shared with other storages."""
        return None if self._group is None else self._group.tensor_of(self._member)

    @property
    def room(self) -> int:
        """Tokens that still fit into a static storage. Waits for the device after a compiled static step."""
        assert self.max_cache_len is not None
        return self.max_cache_len - self.length

    @property
    def has_tail(self) -> bool:
        """Whether some tokens are dense now and get codes later. A crop cannot restore their dense values."""
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
        """Bytes of the tokens held, without unused capacity. Tails count in full, however few tokens they hold."""
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
            key: `[batch, num_kv_heads, tokens, head_dim]`; `tokens` may be 0. Only shape, dtype and device are read.
            value: Likewise.

        Raises:
            TypeError: The dtype is not supported.
            ValueError: A shape is not supported.
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
        """Take free buffers from the pool or make new ones; the pool gets them when this storage is garbage-collected.

        Old contents need no clearing: as after a reset, they lie beyond the length.
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
                # The next cache overwrites these tensors with its own numbers, so they must not belong to a model.
                self.key_transform = transform.clone(device)
            self._make_buffers(max_cache_len, device)
            buffers = self.key_planes, self.value_planes, self.counters, self.key_transform
        else:
            self.key_planes, self.value_planes, self.counters, self.key_transform = buffers
            if self.key_transform is not None and transform is not None:
                self.key_transform.copy_(transform)
        self._loan = pool.expect(self, self.name, kind, buffers)

    def _part_with_buffers(self) -> None:
        """Do not return our buffers to the pool: we are about to replace or drop some of them."""
        if self._loan is not None:
            self._loan.detach()
            self._loan = None

    def set_key_transform(self, key_transform: KeyTransform | None) -> None:
        """Replace the key transform. Only possible while the storage is empty.

        Raises:
            TypeError: `key_transform` is not a KeyTransform.
            ValueError: The transform does not fit the keys, or the storage holds tokens.
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
        """Rebuild what steps use, after the planes or the transform have changed.

        Also tell the compiler that static buffers keep their addresses; otherwise it refuses to put a step that mutates
        them into a CUDA graph.
        """
        self._operands = ops.Operands(
            *self._planes(), self._formats(), self.key_transform, is_ring=self.is_ring, **self._windows()
        )
        if self.is_static and not torch.compiler.is_compiling():
            for tensor in self._step_tensors():
                torch._dynamo.mark_static_address(tensor)

    def _step_tensors(self) -> list[Tensor]:
        """Every tensor of this storage that a decode step reads or writes."""
        transform = [] if self.key_transform is None else self.key_transform.tensors()
        return [*self._tensors(), *([] if self.counters is None else [self.counters]), *transform]

    def addresses(self) -> tuple[tuple[int, torch.Size], ...]:
        """Addresses and shapes of the tensors of a step. A captured step can serve any storage with the same."""
        return tuple((tensor.data_ptr(), tensor.shape) for tensor in self._step_tensors())

    def _tensors(self) -> list[Tensor]:
        """The tensors that have a row for every sequence of the batch."""
        key_planes, value_planes = self._planes()
        return [*key_planes.tensors(), *value_planes.tensors(), self._lengths()]

    def _new_planes(self, kv_format: KVFormat, head_dim: int, capacity: int, device: torch.device) -> Planes:
        assert self.dtype is not None
        return kv_format.allocate(
            self.batch, self.num_kv_heads, head_dim, capacity, dtype=self.dtype, device=device, **self._windows()
        )

    def _windows(self) -> dict[str, Any]:
        """The dense windows, as keyword arguments of functions that handle tails."""
        return {"sink_length": self.formats.sink_length, "residual_length": self.formats.residual_length}

    def extend(self, key: Tensor, value: Tensor) -> None:
        """Take new tokens: check them, make room, advance the length and keep them as pending.

        Args:
            key: `[batch, num_kv_heads, q_len, head_dim]`, as the model makes it.
            value: The same for values.

        Raises:
            TypeError, ValueError: The tokens do not fit what is stored, or a static storage is full. Nothing has
                changed then.
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
        """Whether tokens match those held. Runs in every layer and step, so it only compares; `_refuse` explains."""
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
        """Raise for the first thing that `_fits` found wrong."""
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
            ValueError: The tokens do not fit.
        """
        if self.max_cache_len is None or torch.compiler.is_compiling():
            # The host does not know the length in a compiled step, and must not wait for it. See `KVQuantCache`.
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
        """The capacity that a growing storage needs to hold `tokens`: the present one if that is enough."""
        if tokens <= self.capacity:
            return self.capacity
        return self._aligned(tokens if self.is_empty else max(tokens, int(self.capacity * GROWTH)))

    def _resize(self, capacity: int) -> None:
        """Copy the tokens into new buffers of this capacity."""
        key_planes, value_planes = self._planes()
        self._set_planes(
            self._resized(key_planes, self.formats.key, self.key_head_dim, capacity),
            self._resized(value_planes, self.formats.value, self.value_head_dim, capacity),
        )
        self._planes_changed()

    def _set_planes(self, key_planes: Planes | None, value_planes: Planes | None) -> None:
        """Replace the planes of both sides at once, so that running out of memory before leaves both as they were."""
        self.key_planes, self.value_planes = key_planes, value_planes

    def _resized(self, planes: Planes, kv_format: KVFormat, head_dim: int, capacity: int) -> Planes:
        grown = self._new_planes(kv_format, head_dim, capacity, planes.codes.device)
        new, old = (each.narrow(self.length, kv_format.block_size).tensors() for each in (grown, planes))
        for new_plane, old_plane in zip(new, old, strict=True):
            new_plane.copy_(old_plane)
        return grown

    def _aligned(self, tokens: int) -> int:
        """`tokens` rounded up to whole tiles and whole blocks of both sides; at least one."""
        alignment = max(self.formats.key.token_alignment, self.formats.value.token_alignment)
        return max(1, -(-tokens // alignment)) * alignment

    def _freeze_scales(self, key: Tensor, value: Tensor) -> None:
        """Granularity `tensor`: fix the scale from these tokens, the first of each sequence."""
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
        """Set the first position of each sequence that is not padding (`[batch]` int32; `None` for 0)."""
        self.starts = starts

    def forget_pending(self) -> None:
        """Drop pending tokens that came from a failed capture: nothing has run on the device."""
        self.pending = None

    def flush(self) -> None:
        """Write pending tokens into the planes."""
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
            self.starts = starts  # decides which first tokens are dense
        self.pending = None  # only now: a refused query must not lose tokens that `lengths` already counts
        self._note_read(query, options.get("sliding_window", 0))
        return result

    def _note_read(self, query: Tensor, window: int) -> None:
        """Count the (query, token) pairs that `attend` has served, if counting is on."""
        if self.pairs_read is not None and not torch.compiler.is_compiling():
            batch, _, q_len, _ = query.shape
            self.pairs_read += batch * causal_pairs(self.length, self.length - q_len, window)

    def dequantize(self) -> tuple[Tensor, Tensor]:
        """Dense keys and values in the model's dtype and basis.

        Returns:
            `[batch, num_kv_heads, tokens, head_dim]` each. `tokens` is the length in a growing storage and
            `max_cache_len` in a static one, whose length the host does not know; rows beyond the length are zero there.
            Views of the planes where nothing is quantised and the storage grows.
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
            # Rows beyond the length get a probability of 0, but 0 times a NaN left there by a crop would be NaN.
            is_beyond = torch.arange(tokens, device=self.device) >= self._lengths().unsqueeze(1)  # [batch, tokens]
            dense = [x.masked_fill(is_beyond[:, None, :, None], 0.0) for x in dense]
        return dense[0], dense[1]

    def query_offset(self, q_len: int) -> int | Tensor:
        """Position of the first of the newest `q_len` tokens; a 0-d tensor in a static storage."""
        if self.is_static:
            return self._lengths()[0] - q_len
        return self.length - q_len

    def note_fallback(self, reason: str) -> None:
        """Count a step that attends to dequantised tensors, and log each reason once."""
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
        """Leave the present length group and join the one for our batch and device, with `length` tokens."""
        if self._group is not None:
            self._group.leave(self._member)
        self._group, self._member = self._shared_lengths.join(length, self.batch, self.device)

    def _formats(self) -> tuple[KVFormat, KVFormat]:
        return self.formats.key, self.formats.value

    # --- what is saved ------------------------------------------------------------------------------------------------

    def num_coded(self, kv_format: KVFormat, length: int) -> int:
        """How many of `length` tokens have codes: all, or with blocks those in blocks that have left the window."""
        return length if kv_format.block_size is None else kv_format.tail_begin(length, self.formats.residual_length)

    def _coded(self, planes: Planes, kv_format: KVFormat, length: int) -> Planes:
        """The rows of planes that hold codes."""
        return planes.narrow(min(self.num_coded(kv_format, length), planes.codes.shape[2]), kv_format.block_size)

    def held_planes(self) -> tuple[Planes, Planes]:
        """The planes of keys and of values, cut to the tokens held. Views, except for the tail.

        Unused rows of the tail are zeroed: they may hold cropped tokens, or those of a cache that had the buffers
        before, and these must not be disclosed.

        Returns:
            Planes of `num_coded` tokens each (of a ring at most its rows) with the whole tail.
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
        """What `held_planes` of a storage like this one would return, on the device `meta`, which takes no memory.

        Args:
            shape: Batch, key-value heads, head_dim of keys and of values.
            length: Tokens held.
            capacity: As in `self.capacity`.
            dtype: The model's.

        Raises:
            ValueError: No such storage can exist: a format does not fit, or no storage has this capacity.
        """
        if not self._can_hold(length, capacity):
            raise ValueError(f"{self.name} cannot hold {length} tokens in buffers for {capacity}")
        planned = [
            self._coded(planes, kv_format, length)
            for planes, kv_format in zip(self._without_memory(shape, capacity, dtype), self._formats(), strict=True)
        ]
        return planned[0], planned[1]

    def _can_hold(self, length: int, capacity: int) -> bool:
        """Whether a storage like this one can have this capacity and hold `length` tokens in it."""
        expected = self._aligned(capacity if self.max_cache_len is None else self.max_cache_len)
        return capacity == expected and 0 < length <= (self.max_cache_len or capacity)

    def planned_bytes(self, shape: tuple[int, int, int, int], capacity: int, dtype: torch.dtype) -> int:
        """Bytes of the buffers of a storage like this one. See `planned_planes`."""
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
        """Take over the contents of another storage of equal formats, transforms and `max_cache_len`.

        This storage must have no buffers yet. It gets the same capacity too: kernels split a sequence by capacity, and
        another split would sum in another order.

        Args:
            held: The other's `held_planes`, shaped as `planned_planes` says, on any device; copied.
            shape: Batch, key-value heads, head_dim of keys and of values.
            length: Tokens it held.
            capacity: Its `capacity`.
            dtype: The model's.
            device: Where the new buffers go.
            starts: `[batch]` int32: its `starts`, on any device.
        """
        assert not self.is_allocated
        self.batch, self.num_kv_heads, self.key_head_dim, self.value_head_dim = shape
        device = torch.empty(0, device=device).device  # adds the index, because devices of tokens are compared with it
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
        """Refuse a crop that cannot be served. This class holds all tokens, so it serves every crop."""

    def crop(self, num_tokens: int) -> None:
        """Forget the newest `num_tokens` tokens of every sequence, at most all of them.

        Tokens that had codes and move into the dense window of newest tokens enter it dequantised.
        """
        if num_tokens > 0 and self.is_allocated:
            self._take_back(num_tokens)

    def _take_back(self, num_tokens: int) -> None:
        """Crop, without the check."""
        self.flush()
        length = max(0, self.length - num_tokens)
        sides = zip(self._planes(), self._formats(), (self.key_transform, None), strict=True) if self.has_tail else ()
        for planes, kv_format, transform in sides:
            options = {"key_transform": transform, "num_written": self._num_written(), **self._windows()}
            reference.reopen(planes, kv_format, self.length, length, **options)
        self._place(length)

    def check_undo(self, num_tokens: int) -> None:
        """Refuse to undo a step of `num_tokens` tokens that has overwritten other tokens.

        Raises:
            RuntimeError: It has.
        """

    def rounds(self, num_tokens: int) -> bool:
        """Whether undoing a step of `num_tokens` leaves some tokens dequantised that were dense before that step."""
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
        """Forget the tokens of a step that ended early. If they are still pending, the planes need no change."""
        if self.pending is None:
            self._take_back(num_tokens)
        else:
            self.pending = None
            self._place(self.length - num_tokens)

    def _place(self, length: int) -> None:
        self._counted().place(self._member, length)
        self.is_empty = length == 0

    def _num_written(self) -> int | None:
        """See `num_written` of `reference.reopen`."""
        return None

    def reset(self) -> None:
        """Forget all tokens, keep the buffers."""
        self.pending = None
        self.is_empty = True
        self.starts = None
        if self._group is not None:
            self._group.place(self._member, 0)

    def release(self) -> None:
        """Forget all tokens and drop the buffers, so that the next tokens may have another batch, dtype or device."""
        self.reset()
        self._part_with_buffers()
        if self._group is not None:
            self._group.leave(self._member)
        self._set_planes(None, None)
        self.counters = self._group = self._operands = None

    def select(self, indices: Tensor) -> None:
        """Keep the sequences `indices` (`[new batch]` int64, or a bool mask) of the batch, in that order.

        A static storage whose batch size stays the same is rewritten in place, so its addresses do not change.
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
            # Copy only what is held: a growing buffer is cut to its length and grows again when needed.
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
        device = torch.empty(0, device=device).device  # adds the index that "cuda" lacks
        if not self.is_allocated:
            self.starts = None if self.starts is None else self.starts.to(device)
            return
        if self.device == device:
            return
        self.flush()
        self._part_with_buffers()
        key_planes, value_planes = self._planes()

        def moved(tensor: Tensor) -> Tensor:
            # Kernels that read a copy to the GPU are queued behind it; reads by the CPU would not wait for a copy.
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
        """For pickle and deepcopy: write pending tokens; the copy has its own buffers and no pool."""
        self.flush()
        return {**self.__dict__, "_pool": None, "_loan": None, "_operands": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self.is_allocated:
            self._planes_changed()  # the kernels may differ where a pickle is loaded

    def __deepcopy__(self, memo: dict[int, Any]) -> LayerStorage:
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        twin.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return twin


@functools.cache
def _log_fallback(reason: str) -> None:
    logger.warning("attention runs on dequantised tensors: %s. Correct, slower.", reason)


def _new_counters(device: torch.device) -> Tensor | None:
    """See `ops.decode`; only the CUDA kernel needs them."""
    return torch.zeros(ops.NUM_COUNTERS, dtype=torch.int32, device=device) if device.type == "cuda" else None
