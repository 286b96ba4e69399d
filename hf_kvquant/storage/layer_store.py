"""One layer's keys and values as codes. Knows nothing of transformers.

A layer is made of four parts: the layout of its planes (`spec/layout.py`), the rows that tokens have in them
(`rows.py`), who owns the buffers (`residency.py`), and the tokens that wait to be written (`writer.py`). `lengths.py`
counts the tokens of all layers of a cache.

A layer is *growing* (its buffers grow geometrically) or *static* (buffers for `max_cache_len` tokens at fixed
addresses, so that a captured or compiled step can be replayed). New tokens are stored in two steps. `extend` makes room
and advances the length; the tokens are then *pending*. `attend` writes their codes and attends to them in one op,
`flush` only writes them. Everything else that reads or moves the planes flushes first, so each token is appended
exactly once.
"""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import torch
from torch import Tensor

from .. import ops
from ..config import LayerFormats
from ..spec.key_transform import KeyTransform
from ..spec.layout import KVLayout, Rows, Shape
from . import dense
from .buffers import allocate_for, resize
from .checks import check_served, checked_transform, fits, refuse
from .dealing import step_plan
from .lengths import Count, LengthGroup, Lengths
from .offloading import Offloaded, Offloader, check_not_captured
from .pool import BufferPool
from .residency import Owned, Pooled, Sides
from .rows import Linear, Ring
from .tally import Tally, note_read
from .unrolled import Unrolled, unroll
from .writer import Writer, freeze_scales


class LayerStore:
    """Keys and values of one layer.

    Args:
        formats: Of keys and of values.
        max_cache_len: Tokens that a static layer holds; `None` makes a growing one.
        window: Positions visible to a query, itself included, of a layer with a sliding window, whose rows are then a
            ring. `sink_length` is ignored there: the first tokens leave the window like all others. 0 for all.
        name: Name of this layer in error messages, such as `layer 3`.
        key_transform: Applied to keys before they are quantised; moved to the device of the keys.
        lengths: Shared by all layers of one cache, which take the same tokens. `None`: this layer counts alone.
        pool: Provides the buffers of a static layer, and gets them back when the layer is garbage-collected. `None`
            allocates new ones.
        offloader: Keeps the codes of a growing layer in CPU memory; shared by the layers of one cache.

    Raises:
        TypeError: `key_transform` is not a KeyTransform.
    """

    def __init__(
        self,
        formats: LayerFormats,
        *,
        max_cache_len: int | None = None,
        window: int = 0,
        name: str = "layer",
        key_transform: KeyTransform | None = None,
        lengths: Lengths | None = None,
        pool: BufferPool | None = None,
        offloader: Offloader | None = None,
    ) -> None:
        if window:
            formats = dataclasses.replace(formats, sink_length=0)
        self.formats = formats
        self.is_quantized = formats.is_quantized
        self.name = name
        self.max_cache_len = max_cache_len
        self.is_static = max_cache_len is not None
        self.window = window
        # Whether many new tokens are a chunk. Not where other layers attend to them, too, once they are written.
        self.has_chunks = True
        self.masked_window = 0  # of a model that computes attention itself; the cache then keeps all tokens (GPT-Neo)
        self.layout = KVLayout(formats.key, formats.value, formats.sink_length, formats.residual_length)
        alignment = self.layout.token_alignment
        self.rows = Ring(window, alignment, max_cache_len) if window else Linear(alignment, max_cache_len)
        self.is_offloaded = offloader is not None
        self.residency = Owned()
        if offloader is not None:
            assert not self.is_static
            self.residency = Offloaded(offloader)
        elif self.is_static and pool is not None:
            self.residency = Pooled(pool)
        self.writer = Writer()
        self.tally = Tally()
        self.key_transform = checked_transform(self, key_transform)
        # [batch] int32: first position that is not padding; `None` for 0. Must be set before tokens are written, so
        # that padding does not widen the scales of channels. Attention passes it again with every call.
        self.starts: Tensor | None = None
        self.unrolled: Unrolled | None = None  # of the newest chunk, if it is too long for a ring and written
        self._shared_lengths = Lengths() if lengths is None else lengths
        self.length_group: LengthGroup | None = None  # keeps our length once buffers exist ...
        self._member = 0  # ... under this number
        self.is_empty = True
        self.shape: Shape = (0, 0, 0, 0)
        self.capacity = 0  # rows of the buffers: tokens that they have room for
        self.dtype: torch.dtype | None = None
        # Of the planes, wherever they are at the moment. Kept here, since compiled steps would guard that of a plane.
        self.device = torch.device("meta")
        self.residency.rejoin(self)

    # --- what it holds ------------------------------------------------------------------------------------------------

    @property
    def batch(self) -> int:
        """Sequences."""
        return self.shape[0]

    @property
    def planes(self) -> Sides:
        """The planes of keys and of values, on the device. There must be buffers."""
        planes = self.residency.planes(self)
        assert planes is not None
        return planes

    @property
    def is_allocated(self) -> bool:
        """Whether buffers exist."""
        return self.length_group is not None

    @property
    def is_ring(self) -> bool:
        """Whether new tokens take the rows of old ones."""
        return self.layout.is_ring

    @property
    def length(self) -> int:
        """Tokens taken, pending ones included, of the longest sequence. Waits for the device after a compiled step."""
        return 0 if self.length_group is None else self.length_group.length(self._member)

    @property
    def lengths(self) -> Tensor:
        """`[batch]` int32: `length` of each sequence on the device. Read only: usually shared with other layers."""
        return self._counted().tensor_of(self._member)

    @property
    def num_shown(self) -> int:
        """Tokens that `dequantize` returns."""
        return self.rows.num_shown(0 if self.is_static else self.length)

    @property
    def offset(self) -> int:
        """Position in the sequence of the first token that `dequantize` returns."""
        return 0 if self.is_static else self.rows.offset(self.length)

    @property
    def num_bytes(self) -> int:
        """Bytes allocated for codes, scales and zeros, on the device or the CPU. Planes that are on both count once."""
        return self.residency.num_bytes

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one more token of one sequence takes."""
        assert self.dtype is not None
        return self.layout.bytes_per_token(self.shape, self.dtype)

    @property
    def num_bytes_held(self) -> int:
        """Bytes of the tokens held, without unused capacity. Tails count in full, however few tokens they hold."""
        assert self.dtype is not None
        tokens = min(self.length, self.capacity)
        return self.batch * (self.bytes_per_token * tokens + self.layout.tail_bytes(self.shape, self.dtype))

    @property
    def room(self) -> int:
        """Tokens that still fit into a static layer. Waits for the device after a compiled static step."""
        assert self.max_cache_len is not None
        return self.max_cache_len - self.length

    def step_tensors(self) -> list[Tensor]:
        """Every tensor that a decode step reads or writes."""
        counters = [] if self.writer.counters is None else [self.writer.counters]
        transform = [] if self.key_transform is None else self.key_transform.tensors()
        planes = [tensor for side in self.planes for tensor in side.tensors()]
        return [*planes, self.lengths, *counters, *transform]

    def addresses(self) -> tuple[tuple[int, torch.Size], ...]:
        """Addresses and shapes of the tensors of a step. A captured step can serve any layer with the same."""
        return tuple((tensor.data_ptr(), tensor.shape) for tensor in self.step_tensors())

    # --- buffers ------------------------------------------------------------------------------------------------------

    def planes_changed(self) -> None:
        """Rebuild what steps use, after the planes or the transform have changed.

        Also tell the compiler that static buffers keep their addresses; otherwise it refuses to put a step that mutates
        them into a CUDA graph.
        """
        planes = self.planes
        self.capacity = planes[0].codes.shape[2]
        rows: Rows = "ring" if self.rows.is_ring(self.capacity) else "linear"
        self.layout = dataclasses.replace(self.layout, rows=rows)
        self.writer.write_to(planes, self.layout, self.key_transform)
        if self.is_static and not torch.compiler.is_compiling():
            for tensor in self.step_tensors():
                torch._dynamo.mark_static_address(tensor)

    def set_key_transform(self, key_transform: KeyTransform | None) -> None:
        """Replace the key transform. Only possible while the layer is empty.

        Raises:
            TypeError: `key_transform` is not a KeyTransform.
            ValueError: The transform does not fit the keys, or the layer holds tokens.
        """
        key_transform = checked_transform(self, key_transform)
        if not self.is_empty:
            raise ValueError(
                f"{self.name}: `key_transform` must be set before the first tokens, got {self.length} tokens held. "
                "Reset the cache first."
            )
        if key_transform is not None and self.is_allocated:
            key_transform.check_fits(self.name, self.shape[1], self.shape[2])
            key_transform = key_transform.to(self.device)
        self.key_transform = key_transform
        if self.is_allocated:
            self.planes_changed()

    # --- new tokens ---------------------------------------------------------------------------------------------------

    def extend(self, key: Tensor, value: Tensor) -> None:
        """Take new tokens: check them, make room, advance the length and keep them as pending.

        Args:
            key: `[batch, num_kv_heads, q_len, head_dim]`, as the model makes it.
            value: The same for values.

        Raises:
            RuntimeError: Codes are offloaded, and the step is being captured. Nothing has changed then.
            TypeError, ValueError: The tokens do not fit what is stored, or a static layer is full. Nothing has changed
                then.
        """
        if self.is_offloaded:
            check_not_captured(self.name, key)
        if self.length_group is None:
            check_served(self, key, value)
        elif not fits(self, key, value):
            refuse(self, key, value)
        q_len = key.shape[2]
        if self.is_static:
            self.check_room(q_len)
        if self.length_group is None:
            allocate_for(self, key, value)
        if q_len == 0:
            return
        is_first, group = self.is_empty, self.length_group
        assert group is not None
        if self.is_offloaded:
            self.residency.arrive(self)  # so that the next layer is fetched while this one computes
        if self.writer.pending is not None:
            self.flush()
        if not self.is_static:
            needed = group.length(self._member) + q_len
            if self.window or needed > self.capacity:
                resize(self, self.rows.needed(needed, self.capacity, is_empty=is_first))
        group.advance(self._member, q_len)
        if is_first:
            if any(kv_format.granularity == "tensor" for kv_format in self.layout.formats):
                freeze_scales(self.planes, self.layout, self.key_transform, (key, value))
            self.is_empty = False
        self.writer.pending = (key, value)
        if self.window:
            self.rows.note_chunk(q_len, self.capacity, is_first=is_first)
            self.unrolled = None

    def check_room(self, q_len: int) -> None:
        """Refuse new tokens that a static layer has no room for.

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

    def flush(self) -> None:
        """Write pending tokens into the planes; those of a chunk too long for a ring also to temporary buffers."""
        pending = self.writer.pending
        if pending is None:
            return
        lengths, starts = self.lengths, self.starts
        if self.rows.is_unrolled:
            self.unrolled = unroll(self.planes, self.layout, self.key_transform, pending, lengths, starts)
        self.residency.arrive(self)
        self.writer.append(lengths, starts)

    def attend(
        self,
        query: Tensor,
        *,
        softmax_scale: float,
        starts: Tensor | None = None,
        is_uneven: bool = False,
        **options: Any,
    ) -> tuple[Tensor, Tensor]:
        """Write pending tokens and attend to everything stored. See `ops.Operands.decode` and `attend_chunk`.

        Args:
            query: `[batch, num_q_heads, q_len, head_dim]`, the newest `q_len` tokens, as the model makes it.
            softmax_scale: Multiplies query · key.
            starts: `[batch]` int32: first position that is not padding; `None` for 0.
            is_uneven: Whether starts differ so much that a GPU should be dealt the sequences by a split plan.
            **options: `sinks`, `alibi_slopes`, `softcap`, `sliding_window`, `num_splits`. A layer with a window uses
                its own, for which masks are made, whatever `sliding_window` is.
        """
        if self.window:
            options["sliding_window"] = self.window
        if self.is_offloaded:
            self.residency.arrive(self)
        if self.rows.is_unrolled:
            self.starts = starts
            self.flush()
            assert self.unrolled is not None
            counters = self.writer.counters
            result = self.unrolled.attend(query, starts, softmax_scale=softmax_scale, counters=counters, **options)
        else:
            assert self.length_group is not None
            lengths = self.length_group.tensor_of(self._member)  # without the two calls of the property
            q_len = query.shape[2]
            options["is_chunk"] = q_len > 1 and q_len > self.largest_step(options.get("sliding_window", 0))
            if is_uneven:
                plans = self.length_group.plans_of(self._member)
                options["split_plan"] = step_plan(self, plans, query, starts, options)
            result = self.writer.attend(query, lengths, starts, softmax_scale=softmax_scale, **options)
            if not torch.compiler.is_compiling():
                self.starts = starts  # decides which first tokens are dense
        if self.tally.pairs_read is not None:
            note_read(self, query.shape[2], options.get("sliding_window", 0))
        return result

    def serves_latent(self, dtype: torch.dtype) -> bool:
        """Whether `attend_latent` runs a kernel for queries of this dtype."""
        return self.writer.serves_latent(dtype)

    def attend_latent(self, query: Tensor, *, softmax_scale: float, starts: Tensor | None = None) -> Tensor:
        """Write pending tokens and attend to everything stored, which are latents. See `ops.Operands.attend_latent`.

        Args:
            query: `[batch, num_q_heads, q_len, latent + rope channels]`, the newest tokens, absorbed. No chunk.
            softmax_scale: Multiplies query · key.
            starts: `[batch]` int32: first position that is not padding; `None` for 0.
        """
        result = self.writer.attend_latent(query, self.lengths, starts, softmax_scale=softmax_scale)
        if not torch.compiler.is_compiling():
            self.starts = starts  # decides which first tokens are dense
        return result

    def largest_step(self, sliding_window: int) -> int:
        """The most new tokens that see each other as they are stored. See `ops.largest_step`.

        Args:
            sliding_window: Positions visible to a query, itself included; 0 for all.
        """
        return ops.largest_step(self.layout, sliding_window) if self.has_chunks else sys.maxsize

    def dequantize(self) -> tuple[Tensor, Tensor]:
        """Dense keys and values in the model's dtype and basis.

        Returns:
            `[batch, num_kv_heads, tokens, head_dim]` each: all tokens of a growing layer, or with a window those that
            queries of the newest chunk see. Of a static layer, whose length the host does not know, all positions up to
            `max_cache_len`; zero where no query of the newest chunk sees them. Views of the planes where nothing is
            quantised and the layer grows and stays on its device.
        """
        return dense.dequantize(self)

    def dense_step(self, *, keeps_transform: bool = False) -> tuple[Tensor, Tensor]:
        """`dequantize` for attention of the newest tokens: those of a chunk as the model made them. See `attend`.

        Args:
            keeps_transform: Whether keys come as the key transform has made them, for queries that get it, too. Not for
                rings.
        """
        return dense.dense_step(self, keeps_transform=keeps_transform)

    def query_offset(self, q_len: int) -> int | Tensor:
        """Position of the first of the newest `q_len` tokens; a 0-d tensor in a static layer."""
        return self.lengths[0] - q_len if self.is_static else self.length - q_len

    # --- lengths ------------------------------------------------------------------------------------------------------

    def _counted(self) -> LengthGroup:
        assert self.length_group is not None
        return self.length_group

    def join(self, length: Count) -> None:
        """Leave the present length group and join the one for our batch and device, with so many tokens."""
        if self.length_group is not None:
            self.length_group.leave(self._member)
        self.length_group, self._member = self._shared_lengths.join(length, self.batch, self.device)

    def count(self) -> Count:
        """Tokens of every sequence. See `length`."""
        return self._counted().count(self._member)

    @property
    def is_ragged(self) -> bool:
        """Whether sequences have different lengths. Does not wait for the device."""
        return self._counted().is_ragged(self._member)

    def place(self, length: Count) -> None:
        """Set the length, of every sequence. The planes must hold so many tokens. A ring has one for all sequences."""
        assert isinstance(length, int) or not self.window
        self._counted().place(self._member, length)
        self.is_empty = length == 0

    def reset(self) -> None:
        """Forget all tokens, keep the buffers."""
        self.writer.pending = self.starts = self.unrolled = None
        self.is_empty = True
        if self.length_group is not None:
            self.place(0)
        self.rows.forget()
        self.residency.note_cropped(self)

    def release(self) -> None:
        """Forget all tokens and drop the buffers, so that the next tokens may have another batch, dtype or device."""
        self.reset()
        self.residency.let_go()
        if self.length_group is not None:
            self.length_group.leave(self._member)
        self.residency.replace(self, None)
        self.writer = Writer()
        self.length_group, self.capacity = None, 0

    def __getstate__(self) -> dict[str, Any]:
        """For pickle and deepcopy: write pending tokens. Temporary buffers are left out, and a copy has its own."""
        self.flush()
        self.residency.leave(self)
        return {**self.__dict__, "unrolled": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.residency.rejoin(self)
        if self.is_allocated and not self.is_offloaded:
            self.planes_changed()
