"""One layer's buffers: planes of codes, scales and zeros, and how many tokens they hold. Knows nothing of transformers.

A storage is *growing* (buffers grow geometrically, the length is a Python integer mirrored on the device) or *static*
(buffers of `max_cache_len` tokens at fixed addresses, the length on the device only, so that a captured or compiled
step can be replayed). New tokens come in two strokes: `extend` makes room and advances the length at once, the codes
are written later by the op that also attends to them (`write`, or `attend` for both in one call). Until then they are
*pending*, and whatever else reads or moves the planes writes them first, so that a token is appended exactly once.
"""

from __future__ import annotations

import copy
import functools
import logging
from collections import Counter
from typing import Any

import torch
from torch import Tensor

from . import ops, reference
from .config import LayerFormats
from .formats import KVFormat, Planes
from .transforms import KeyTransform

logger = logging.getLogger(__name__)

# Buffers grow by half: at most a third of them is unused, and n tokens cost at most 3n token copies in all.
GROWTH = 1.5
SERVED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class LayerStorage:
    """Keys and values of one layer.

    Args:
        formats: Of keys and of values.
        max_cache_len: Tokens that a static storage holds; `None` makes a growing one.
        name: What error messages call this storage, such as `layer 3`.
        key_transform: What keys go through before they are quantised; moved to the device of the keys.

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
    ) -> None:
        self.formats = formats
        self.max_cache_len = max_cache_len
        self.name = name
        self.key_transform = self._checked(key_transform)
        self.key_planes: Planes | None = None
        self.value_planes: Planes | None = None
        self.lengths: Tensor | None = None  # [batch] int32, on the device of the planes, pending tokens included
        # [batch] int32: first position that is not padding; `None` for 0. Set by whoever knows, before tokens are
        # written; padding must not widen the scales of channels. Attention is told again, with every call.
        self.starts: Tensor | None = None
        # Scratch of the CUDA kernel, zero between calls. Ours and nobody else's: two streams that must not write the
        # same planes at the same time must not share it either.
        self.counters: Tensor | None = None
        # The same on the host. A static storage forgets it when a compiled step advances the device's copy.
        self._length: int | None = 0
        self.is_empty = True
        self.pending: tuple[Tensor, Tensor] | None = None
        self.dtype: torch.dtype | None = None
        self.num_kv_heads = self.key_head_dim = self.value_head_dim = self.batch = 0
        self.fallbacks: Counter[str] = Counter()  # reason -> steps that attended to dequantised tensors

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
    def is_allocated(self) -> bool:
        """Whether buffers exist."""
        return self.lengths is not None

    @property
    def is_quantized(self) -> bool:
        """Whether keys or values are stored as codes."""
        return self.formats.key.is_quantized or self.formats.value.is_quantized

    @property
    def capacity(self) -> int:
        """Tokens there is room for."""
        return 0 if self.key_planes is None else self.key_planes.codes.shape[2]

    @property
    def device(self) -> torch.device:
        """Where the buffers are."""
        assert self.lengths is not None
        return self.lengths.device

    @property
    def length(self) -> int:
        """Tokens held per sequence, pending ones included. Waits for the device after a compiled static step."""
        if self._length is None:
            assert self.lengths is not None
            self._length = int(self.lengths.max().item())
        return self._length

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
        if self.key_transform is not None:
            self.key_transform = self.key_transform.to(key.device)
        self.batch, self.num_kv_heads, tokens, self.key_head_dim = key.shape
        self.value_head_dim = value.shape[-1]
        self.dtype = key.dtype
        capacity = self._aligned(self.max_cache_len if self.max_cache_len is not None else tokens)
        self.key_planes = self._new_planes(self.formats.key, self.key_head_dim, capacity, key.device)
        self.value_planes = self._new_planes(self.formats.value, self.value_head_dim, capacity, key.device)
        self.lengths = torch.zeros(self.batch, dtype=torch.int32, device=key.device)
        self.counters = _new_counters(key.device)
        self._length = 0
        self._pin_addresses()

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
            self._pin_addresses()

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

    def _pin_addresses(self) -> None:
        """Tell the compiler that static buffers stay: it would not put a step that mutates others into a CUDA graph."""
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
        if self.is_allocated:
            self._check_fits(key, value)
        else:
            self._check_served(key, value)
        q_len = key.shape[2]
        self.check_room(q_len)
        if not self.is_allocated:
            self.allocate(key, value)
        if q_len == 0:
            return
        self.flush()
        self._make_room(q_len)
        assert self.lengths is not None
        self._length = None if self.is_static and torch.compiler.is_compiling() else self.length + q_len
        self.lengths.add_(q_len)
        self._freeze_scales(key, value)
        self.pending = (key, value)
        self.is_empty = False

    def _check_fits(self, key: Tensor, value: Tensor) -> None:
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
            return  # a compiled step does not know the length; whoever compiles sizes the cache, and CPU ops check
        needed = self.length + q_len
        if needed > self.max_cache_len:
            raise ValueError(
                f"{self.name}: `max_cache_len` must be at least {needed} for these tokens, got "
                f"{self.max_cache_len} ({self.length} held, {q_len} new). Build the cache with a larger "
                "max_cache_len, or reset it."
            )

    def _make_room(self, q_len: int) -> None:
        if self.is_static or self.length + q_len <= self.capacity:
            return
        needed = self.length + q_len
        capacity = self._aligned(needed if self.is_empty else max(needed, int(self.capacity * GROWTH)))
        # Assigned together, so that memory which runs out in between leaves both sides as they were.
        self.key_planes, self.value_planes = (
            self._grown(self.key_planes, self.formats.key, self.key_head_dim, capacity),
            self._grown(self.value_planes, self.formats.value, self.value_head_dim, capacity),
        )

    def _grown(self, planes: Planes | None, kv_format: KVFormat, head_dim: int, capacity: int) -> Planes:
        assert planes is not None
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
        """Granularity `tensor`: the first tokens of a sequence decide its scale for good."""
        if not self.is_empty:
            return
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

    def note_replayed(self, q_len: int) -> None:
        """Count on the host tokens that a replayed CUDA graph has appended and counted on the device."""
        self._length = self.length + q_len

    def forget_capture(self, length: int) -> None:
        """Undo on the host what a capture that failed half-way did there; nothing has run on the device.

        Args:
            length: Tokens held before.
        """
        self._length = length
        self.pending = None

    def flush(self) -> None:
        """Write pending tokens into the planes, if there are any."""
        if self.pending is None:
            return
        key, value = self.pending
        ops.append(
            key,
            value,
            *self._planes(),
            self._lengths(),
            self._formats(),
            self.key_transform,
            self.starts,
            **self._windows(),
        )
        self.pending = None

    def attend(self, query: Tensor, *, softmax_scale: float, **options: Any) -> tuple[Tensor, Tensor]:
        """Write pending tokens and attend to everything stored, in one op. See `ops.decode` for arguments and results.

        Args:
            query: `[batch, num_q_heads, q_len, head_dim]`, the newest `q_len` tokens, as the model makes it.
            softmax_scale: Multiplies query · key.
            **options: `starts`, `sinks`, `alibi_slopes`, `softcap`, `sliding_window`, `num_splits`.
        """
        result = ops.decode(
            query,
            self.pending,
            *self._planes(),
            self._lengths(),
            self._formats(),
            softmax_scale=softmax_scale,
            counters=self.counters,
            key_transform=self.key_transform,
            sink_length=self.formats.sink_length,
            residual_length=self.formats.residual_length,
            **options,
        )
        if not torch.compiler.is_compiling():
            self.starts = options.get("starts")  # what is dense at the beginning goes by it
        self.pending = None  # only now: a query that is refused must not lose tokens that `lengths` counts already
        return result

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
            _log_fallback(reason)

    def _planes(self) -> tuple[Planes, Planes]:
        assert self.key_planes is not None and self.value_planes is not None
        return self.key_planes, self.value_planes

    def _lengths(self) -> Tensor:
        assert self.lengths is not None
        return self.lengths

    def _formats(self) -> tuple[KVFormat, KVFormat]:
        return self.formats.key, self.formats.value

    # --- what transformers does to caches -----------------------------------------------------------------------------

    def crop(self, num_tokens: int) -> None:
        """Forget the newest `num_tokens` tokens of every sequence, at most all of them.

        Tokens that had codes and now are among the newest, which are kept dense, go on dequantised.
        """
        if num_tokens == 0 or not self.is_allocated:
            return
        self.flush()
        length = max(0, self.length - num_tokens)
        for planes, kv_format, transform in zip(
            self._planes(), self._formats(), (self.key_transform, None), strict=True
        ):
            reference.reopen(planes, kv_format, self.length, length, key_transform=transform, **self._windows())
        self._length = length
        self._lengths().fill_(length)
        self.is_empty = length == 0

    def reset(self) -> None:
        """Forget all tokens, keep the buffers."""
        self.pending = None
        self.is_empty = True
        self._length = 0
        self.starts = None
        if self.lengths is not None:
            self.lengths.zero_()

    def release(self) -> None:
        """Forget all tokens and the buffers, so that the next tokens may have another batch, dtype or device."""
        self.reset()
        self.key_planes = self.value_planes = self.lengths = self.counters = None

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
            for tensor in self._tensors():
                tensor.copy_(tensor.index_select(0, index))
            self.starts = None if self.starts is None else self.starts.index_select(0, index)
            return

        def selected(tensor: Tensor) -> Tensor:
            return tensor.index_select(0, index)

        def selected_planes(planes: Planes, kv_format: KVFormat) -> Planes:
            # Only what is held is worth moving: a growing buffer is cut to its length and grows again when needed.
            tokens = planes.codes.shape[2] if self.is_static else min(self._aligned(self.length), self.capacity)
            return planes.narrow(tokens, kv_format.block_size).map(selected)

        key_planes, value_planes = self._planes()
        self.key_planes = selected_planes(key_planes, self.formats.key)
        self.value_planes = selected_planes(value_planes, self.formats.value)
        self.lengths = selected(self._lengths())
        self.starts = None if self.starts is None else selected(self.starts)
        self.batch = index.numel()
        self._pin_addresses()

    def repeat(self, repeats: int) -> None:
        """Repeat every sequence `repeats` times in place: a, a, b, b."""
        if self.is_allocated:
            self.select(torch.arange(self.batch, device=self.device).repeat_interleave(repeats))

    def move(self, device: torch.device | str) -> None:
        """Move the buffers to another device."""
        if not self.is_allocated or self.device == torch.device(device):
            return
        self.flush()
        key_planes, value_planes = self._planes()

        def moved(tensor: Tensor) -> Tensor:
            # Towards a GPU the copy is ordered with the kernels that read it; nothing orders the CPU's own reads.
            return tensor.to(device, non_blocking=torch.device(device).type != "cpu")

        self.key_planes, self.value_planes = key_planes.map(moved), value_planes.map(moved)
        self.lengths = moved(self._lengths())
        self.starts = None if self.starts is None else moved(self.starts)
        self.counters = _new_counters(self.lengths.device)
        if self.key_transform is not None:
            self.key_transform = self.key_transform.to(device)
        self._pin_addresses()

    def __getstate__(self) -> dict[str, Any]:
        """For pickle and deepcopy: pending tokens are written, and a static copy gets addresses of its own."""
        self.flush()
        return self.__dict__.copy()

    def __deepcopy__(self, memo: dict[int, Any]) -> LayerStorage:
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        twin.__dict__.update(copy.deepcopy(self.__getstate__(), memo))
        return twin


@functools.cache
def _log_fallback(reason: str) -> None:
    logger.warning("attention runs on dequantised tensors: %s. Correct, slower.", reason)


def _new_counters(device: torch.device) -> Tensor | None:
    """See `ops.decode`; only the CUDA kernel wants them."""
    return torch.zeros(ops.NUM_COUNTERS, dtype=torch.int32, device=device) if device.type == "cuda" else None
