"""One layer's keys and values as codes. Knows nothing of transformers.

This file alone knows all parts of a layer; each of them knows values, and no layer:

- `buffers.py`: the tensors, their layout and transform, as one value
- `residency.py`, `offloading.py`: who owns the buffers, and whether they are on the device
- `rows.py`: which rows tokens have in them; `unrolled.py`: chunks that are too long for a ring
- `lengths.py`: counts the tokens of all layers of a cache
- `checks.py`, `dealing.py`, `tally.py`: what is refused, dealt, counted

`rewind.py` and `saved.py` are above: they take tokens back, and say what a file keeps.

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
from ..spec.reference import transform_key
from .buffers import Buffers, Sides, makes_lasting_tensors, moved
from .dealing import step_plan
from .lengths import Count, LengthGroup, Lengths, Membership, count_of
from .offloading import Offloaded, Offloader, check_home, check_not_captured
from .pool import BufferPool
from .residency import Owned, Pooled
from .rows import Linear, Ring
from .tally import Tally, causal_pairs
from .token_checks import check_served, checked_transform, fits, refuse
from .unrolled import Unrolled, unroll


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
        self.name = name
        self.formats = formats
        alignment = _layout_of(formats).token_alignment
        self.rows = Ring(window, alignment, max_cache_len) if window else Linear(alignment, max_cache_len)
        # Whether many new tokens are a chunk. Not where other layers attend to them, too, once they are written.
        self.has_chunks = True
        self.residency = Owned()
        if offloader is not None:
            assert max_cache_len is None
            self.residency = Offloaded(offloader)
        elif max_cache_len is not None and pool is not None:
            self.residency = Pooled(pool, name, formats, max_cache_len)
        self._key_transform = checked_transform(name, key_transform)  # of the next buffers
        self._membership = Membership(Lengths() if lengths is None else lengths)
        self.tally = Tally()
        self.is_empty = True
        # Keys and values that lengths count already and that wait to be quantised; `None` if all tokens are written.
        self.pending: tuple[Tensor, Tensor] | None = None
        # [batch] int32: first position that is not padding; `None` for 0. Must be set before tokens are written, so
        # that padding does not widen the scales of channels. Attention passes it again with every call.
        self.starts: Tensor | None = None
        self.unrolled: Unrolled | None = None  # of the newest chunk, if it is too long for a ring and written
        self.residency.rejoin(self._written)

    # --- what it holds ------------------------------------------------------------------------------------------------

    @property
    def window(self) -> int:
        """Positions visible to a query, itself included; 0 for all."""
        return self.rows.window

    @window.setter
    def window(self, window: int) -> None:
        """For a layer that keeps all tokens, and whose masks hide those outside the window."""
        self.rows.window = window

    @property
    def max_cache_len(self) -> int | None:
        """Tokens that a static layer holds; `None` for a growing one."""
        return self.rows.max_cache_len

    @property
    def is_static(self) -> bool:
        """Whether buffers stay at fixed addresses."""
        return self.rows.max_cache_len is not None

    @property
    def is_offloaded(self) -> bool:
        """Whether codes are in CPU memory between steps."""
        return self.residency.is_offloaded

    @property
    def is_allocated(self) -> bool:
        """Whether buffers exist."""
        return self.residency.buffers is not None

    @property
    def buffers(self) -> Buffers:
        """The buffers, wherever their planes are at the moment. There must be some."""
        assert self.residency.buffers is not None
        return self.residency.buffers

    @property
    def planes(self) -> Sides:
        """The planes of keys and of values, on the device. There must be buffers."""
        return self.residency.arrive().planes

    @property
    def key_transform(self) -> KeyTransform | None:
        """Applied to keys before they are quantised; `None` for the identity."""
        return self.buffers.key_transform if self.is_allocated else self._key_transform

    @property
    def layout(self) -> KVLayout:
        """Of the planes, or of those that are to be."""
        return self.buffers.layout if self.is_allocated else _layout_of(self.formats)

    @property
    def shape(self) -> Shape:
        """Batch, key-value heads, head_dim of keys and of values; zeros without buffers."""
        return self.buffers.shape if self.is_allocated else (0, 0, 0, 0)

    @property
    def batch(self) -> int:
        """Sequences."""
        return self.shape[0]

    @property
    def capacity(self) -> int:
        """Rows of the buffers: tokens that they have room for."""
        return self.buffers.capacity if self.is_allocated else 0

    @property
    def dtype(self) -> torch.dtype | None:
        """The model's; `None` without buffers."""
        return self.buffers.dtype if self.is_allocated else None

    @property
    def device(self) -> torch.device:
        """Of the planes when they are not offloaded; `meta` without buffers."""
        return self.buffers.device if self.is_allocated else torch.device("meta")

    @property
    def is_ring(self) -> bool:
        """Whether new tokens take the rows of old ones."""
        return self.layout.is_ring

    @property
    def length_group(self) -> LengthGroup | None:
        """Keeps the length of this layer and of others, once buffers exist."""
        return self._membership.group

    @property
    def length(self) -> int:
        """Tokens taken, pending ones included, of the longest sequence. Waits for the device after a compiled step."""
        group = self._membership.group
        return 0 if group is None else group.length(self._membership.member)

    @property
    def lengths(self) -> Tensor:
        """`[batch]` int32: `length` of each sequence on the device. Read only: usually shared with other layers."""
        return self._counted().tensor_of(self._membership.member)

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
        return self.layout.bytes_per_token(self.shape, self.buffers.dtype)

    @property
    def num_bytes_held(self) -> int:
        """Bytes of the tokens held, without unused capacity. Tails count in full, however few tokens they hold."""
        tokens = min(self.length, self.capacity)
        tails = self.layout.tail_bytes(self.shape, self.buffers.dtype)
        return self.batch * (self.bytes_per_token * tokens + tails)

    @property
    def room(self) -> int:
        """Tokens that still fit into a static layer. Waits for the device after a compiled static step."""
        assert self.max_cache_len is not None
        return self.max_cache_len - self.length

    def step_tensors(self) -> list[Tensor]:
        """Every tensor that a decode step reads or writes."""
        buffers = self.residency.arrive()
        counters = [] if buffers.counters is None else [buffers.counters]
        transform = [] if buffers.key_transform is None else buffers.key_transform.tensors()
        planes = [tensor for side in buffers.planes for tensor in side.tensors()]
        return [*planes, self.lengths, *counters, *transform]

    def addresses(self) -> tuple[tuple[int, torch.Size], ...]:
        """Addresses and shapes of the tensors of a step. A captured step can serve any layer with the same."""
        return tuple((tensor.data_ptr(), tensor.shape) for tensor in self.step_tensors())

    # --- buffers ------------------------------------------------------------------------------------------------------

    @makes_lasting_tensors
    def allocate(self, shape: Shape, dtype: torch.dtype, device: torch.device, capacity: int) -> None:
        """Make the buffers of a layer that has none.

        Args:
            shape: Batch, key-value heads, head_dim of keys and of values.
            dtype: The model's.
            device: Of the buffers.
            capacity: Rows.
        """
        self.residency.let_go()
        device = _with_index(device)
        options: dict[str, Any] = {"dtype": dtype, "device": device, "slack": self.rows.slack}
        layout = _layout_of(self.formats)
        self._hold(self.residency.allocate(layout, shape, capacity, self._key_transform, **options), 0)

    def allocate_for(self, key: Tensor, value: Tensor) -> None:
        """Make the buffers for tokens like these: `[batch, num_kv_heads, tokens, head_dim]`; `tokens` may be 0.

        Raises:
            TypeError, ValueError: See `check_served`.
        """
        self._check_first(key, value)
        batch, num_kv_heads, tokens, head_dim = key.shape
        wanted = self.rows.max_cache_len
        if wanted is None:
            wanted = self.rows.needed(tokens, 0, is_empty=True)
        shape = batch, num_kv_heads, head_dim, value.shape[-1]
        self.allocate(shape, key.dtype, key.device, self.rows.aligned(wanted))

    def _check_first(self, key: Tensor, value: Tensor) -> None:
        check_served(self.name, self.formats, self._key_transform, key, value)
        if self.is_offloaded:
            check_home(self.name, key.device)

    def _hold(self, buffers: Buffers, count: Count | None = None) -> None:
        """Use these buffers from now on.

        Also tell the compiler that static buffers keep their addresses; otherwise it refuses to put a step that mutates
        them into a CUDA graph.

        Args:
            buffers: Whatever rows their layout names.
            count: Tokens of every sequence, if batch or device are new.
        """
        rows: Rows = "ring" if self.rows.is_ring(buffers.capacity) else "linear"
        layout = dataclasses.replace(buffers.layout, rows=rows)
        self.residency.hold(dataclasses.replace(buffers, layout=layout))
        if count is not None:
            self._membership.join(count, buffers.batch, buffers.device)
        if self.is_static and not torch.compiler.is_compiling():
            for tensor in self.step_tensors():
                torch._dynamo.mark_static_address(tensor)

    @makes_lasting_tensors
    def resize(self, capacity: int) -> None:
        """Copy the tokens into buffers of another capacity."""
        if capacity == self.capacity:
            return
        buffers = self.residency.arrive()
        origin = self.rows.origin(self.lengths, buffers.capacity, capacity)
        self._hold(buffers.resized(capacity, self.length, origin))
        self.rows.note_resized()

    @makes_lasting_tensors
    def select(self, indices: Tensor) -> None:
        """Keep the sequences `indices` (`[new batch]` int64, or a bool mask) of the batch, in that order.

        A static layer whose batch size stays the same is rewritten in place, so its addresses do not change.
        """
        if not self.is_allocated:
            return
        self.flush()
        index = indices.to(self.device)
        if index.dtype == torch.bool:
            index = index.nonzero().flatten()
        buffers = self.residency.arrive()
        has_same_batch = index.numel() == buffers.batch
        starts = None if self.starts is None else self.starts.index_select(0, index)
        is_in_place = self.is_static and has_same_batch
        if is_in_place:
            buffers.reorder(index)
        else:
            self.residency.let_go()
            # Copy only what is held: a growing buffer is cut to its length and grows again when needed.
            is_cut = not self.is_static
            tokens = min(self.rows.aligned(self.length), buffers.capacity) if is_cut else buffers.capacity
            buffers = buffers.selected(index, tokens)
        self.starts = starts
        count = self.count() if self.is_ragged or not has_same_batch else None
        if isinstance(count, tuple):
            count = count_of([count[b] for b in index.tolist()])
        if not is_in_place:
            self._hold(buffers, None if has_same_batch else count)
        if has_same_batch and count is not None:
            self.place(count)

    def repeat(self, repeats: int) -> None:
        """Repeat every sequence `repeats` times in place: a, a, b, b."""
        if self.is_allocated:
            self.select(torch.arange(self.batch, device=self.device).repeat_interleave(repeats))

    @makes_lasting_tensors
    def move(self, device: torch.device | str) -> None:
        """Move the buffers to another device."""
        device = _with_index(device)
        if self.is_allocated and self.device == device:
            return
        self.flush()
        self.starts = None if self.starts is None else moved(self.starts, device)
        if self.is_allocated:
            self.residency.let_go()
            self._hold(self.residency.arrive().moved(device), self.count())

    @makes_lasting_tensors
    def replace_tails(self, slack: int) -> None:
        """Move the dense tokens into tails with other slack. No tokens may be pending."""
        buffers = self.residency.arrive().with_slack(slack, self.length, self.lengths, self.starts)
        self.residency.let_go()
        self._hold(buffers)

    def set_key_transform(self, key_transform: KeyTransform | None) -> None:
        """Replace the key transform. Only possible while the layer is empty.

        Raises:
            TypeError: `key_transform` is not a KeyTransform.
            ValueError: The transform does not fit the keys, or the layer holds tokens.
        """
        key_transform = checked_transform(self.name, key_transform)
        if not self.is_empty:
            raise ValueError(
                f"{self.name}: `key_transform` must be set before the first tokens, got {self.length} tokens held. "
                "Reset the cache first."
            )
        if self.is_allocated:
            if key_transform is not None:
                key_transform.check_fits(self.name, self.shape[1], self.shape[2])
                key_transform = key_transform.to(self.device)
            self._hold(dataclasses.replace(self.residency.arrive(), key_transform=key_transform))
        self._key_transform = key_transform

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
        residency, rows, buffers = self.residency, self.rows, self.residency.buffers
        if residency.is_offloaded:
            check_not_captured(self.name, key)
        if buffers is None:
            self._check_first(key, value)
        elif not fits(buffers, key, value):
            refuse(self.name, buffers, key, value)
        q_len = key.shape[2]
        is_static = rows.max_cache_len is not None
        if is_static:
            self.check_room(q_len)
        if buffers is None:
            self.allocate_for(key, value)
            buffers = self.buffers
        if q_len == 0:
            return
        is_first, membership = self.is_empty, self._membership
        group = membership.group
        assert group is not None
        if residency.is_offloaded:
            residency.arrive()  # so that the next layer is fetched while this one computes
        if self.pending is not None:
            self.flush()
        if not is_static:
            needed = group.length(membership.member) + q_len
            if rows.window or needed > buffers.capacity:
                self.resize(rows.needed(needed, buffers.capacity, is_empty=is_first))
        group.advance(membership.member, q_len)
        if is_first:
            residency.arrive().freeze_scales(key, value)
            self.is_empty = False
        self.pending = (key, value)
        if rows.window:
            rows.note_chunk(q_len, self.capacity, is_first=is_first)
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
        """Write pending tokens into the planes; if a chunk is too long for a ring, also to temporary buffers."""
        if self.pending is None:
            return
        lengths, starts = self.lengths, self.starts
        buffers = self.residency.arrive()
        if self.rows.is_unrolled:
            self.unrolled = unroll(buffers.planes, buffers.layout, buffers.key_transform, self.pending, lengths, starts)
        self._operands().append(*self.pending, lengths, starts)
        self.pending = None

    def _written(self) -> int:
        """`flush`. Returns the tokens held."""
        self.flush()
        return self.length

    def _operands(self) -> ops.Operands:
        assert self.residency.operands is not None
        return self.residency.operands

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
        residency, membership = self.residency, self._membership
        if self.rows.window:
            options["sliding_window"] = self.rows.window
        if residency.is_offloaded:
            residency.arrive()
        buffers, operands, group = residency.buffers, residency.operands, membership.group
        assert buffers is not None and operands is not None and group is not None
        options["softmax_scale"] = softmax_scale
        if self.rows.is_unrolled:
            self.starts = starts
            self.flush()
            assert self.unrolled is not None
            result = self.unrolled.attend(query, starts, counters=buffers.counters, **options)
        else:
            lengths = group.tensor_of(membership.member)
            q_len, pending = query.shape[2], self.pending
            is_chunk = q_len > 1 and q_len > self.largest_step(options.get("sliding_window", 0))
            if is_uneven:
                plans = group.plans_of(membership.member)
                plan = step_plan(operands, buffers.shape[1], lengths, plans, query, starts, options)
                options["split_plan"] = plan
            options |= {"starts": starts, "counters": buffers.counters}
            if is_chunk and pending is not None:
                result = operands.attend_chunk(query, pending, lengths, **options)
                operands.append(*pending, lengths, starts)
            else:
                result = operands.decode(query, pending, lengths, **options)
            self.pending = None  # only now: a refused query must not lose tokens that `lengths` already counts
            if not torch.compiler.is_compiling():
                self.starts = starts  # decides which first tokens are dense
        if self.tally.pairs_read is not None:
            self.note_read(query.shape[2], options.get("sliding_window", 0))
        return result

    def serves_latent(self, dtype: torch.dtype) -> bool:
        """Whether `attend_latent` runs a kernel for queries of this dtype. See `ops.Operands.serves_latent`."""
        operands = self.residency.operands
        return operands is not None and operands.serves_latent(dtype)

    def attend_latent(self, query: Tensor, *, softmax_scale: float, starts: Tensor | None = None) -> Tensor:
        """Write pending tokens and attend to everything stored, which are latents. See `ops.Operands.attend_latent`.

        Args:
            query: `[batch, num_q_heads, q_len, latent + rope channels]`, the newest tokens, absorbed. No chunk.
            softmax_scale: Multiplies query · key.
            starts: `[batch]` int32: first position that is not padding; `None` for 0.
        """
        lengths, operands = self.lengths, self._operands()
        if self.pending is not None:
            operands.append(*self.pending, lengths, starts)
            self.pending = None
        result, _ = operands.attend_latent(query, lengths, starts=starts, softmax_scale=softmax_scale)
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
        return self._dequantized(keeps_transform=False)

    def _dequantized(self, *, keeps_transform: bool) -> tuple[Tensor, Tensor]:
        self.flush()
        buffers, num_tokens, begin = self.residency.arrive(), self.num_shown, self.offset
        is_cut = self.is_static or self.is_ring or self.is_ragged
        if not (self.formats.is_quantized or self.is_offloaded or is_cut or buffers.key_transform):
            key, value = (planes.codes[:, :, begin : begin + num_tokens] for planes in buffers.planes)
            return key, value
        options: dict[str, Any] = {"begin": begin, "num_tokens": num_tokens, "dtype": buffers.dtype}
        if self.unrolled is not None:
            return self.unrolled.dequantize(self.lengths, self.starts, num_seen=self.rows.num_seen, **options)
        options["num_seen"] = self.rows.num_seen if self.is_ring and self.is_static else 0
        return self._operands().dequantize(self.lengths, self.starts, keeps_transform=keeps_transform, **options)

    def dense_step(self, *, keeps_transform: bool = False) -> tuple[Tensor, Tensor]:
        """`dequantize` for attention of the newest tokens; a chunk's own stay as the model made them. See `attend`.

        Args:
            keeps_transform: Whether keys come as the key transform has made them, for queries that get it, too. Not for
                rings.
        """
        pending = self.pending
        if pending is None or pending[0].shape[2] <= self.largest_step(self.window or self.rows.masked_window):
            return self._dequantized(keeps_transform=keeps_transform)
        buffers, q_len, begin = self.residency.arrive(), pending[0].shape[2], self.offset
        past = self.lengths - q_len
        options: dict[str, Any] = {"begin": begin, "num_tokens": self.num_shown, "dtype": buffers.dtype}
        sides = self._operands().dequantize(past, self.starts, keeps_transform=keeps_transform, **options)
        row = past.long().unsqueeze(1) - begin + torch.arange(q_len, device=buffers.device)
        if keeps_transform and buffers.key_transform is not None:
            pending = transform_key(pending[0], buffers.key_transform).to(buffers.dtype), pending[1]
        for side, own in zip(sides, pending, strict=True):
            side.scatter_(2, row[:, None, :, None].expand_as(own), own)
        self.flush()
        return sides

    def dequantize_written(self, begin: int, num_tokens: int) -> tuple[Tensor, Tensor]:
        """Dense keys and values of some positions, from what is written. See `ops.Operands.dequantize`."""
        options: dict[str, Any] = {"begin": begin, "num_tokens": num_tokens, "dtype": self.buffers.dtype}
        return self._operands().dequantize(self.lengths, self.starts, **options)

    # --- what is counted ----------------------------------------------------------------------------------------------

    def note_fallback(self, reason: str) -> None:
        """Count a step that attends to dequantised tensors, and log each reason once."""
        if torch.compiler.is_compiling():
            return
        num_pairs = 0
        if self.pending is not None and not self.is_static:
            q_len = self.pending[0].shape[2]
            num_pairs = self.batch * causal_pairs(self.length, self.length - q_len, self.window)
        self.tally.note_fallback(reason, num_pairs)

    def note_read(self, q_len: int, window: int) -> None:
        """Count a step that was served from codes, if such steps are counted."""
        if self.tally.pairs_read is not None and not torch.compiler.is_compiling():
            self.tally.pairs_read += self.batch * causal_pairs(self.length, self.length - q_len, window)

    def note_dequantized(self, q_len: int) -> None:
        """Count a step over latents that PyTorch attended to, dequantised, as nothing else was to be had, or faster."""
        if not self.is_static and not torch.compiler.is_compiling():
            self.tally.pairs_dequantized += self.batch * causal_pairs(self.length, self.length - q_len)

    def query_offset(self, q_len: int) -> int | Tensor:
        """Position of the first of the newest `q_len` tokens; a 0-d tensor in a static layer."""
        return self.lengths[0] - q_len if self.is_static else self.length - q_len

    # --- lengths ------------------------------------------------------------------------------------------------------

    def _counted(self) -> LengthGroup:
        assert self._membership.group is not None
        return self._membership.group

    def count(self) -> Count:
        """Tokens of every sequence. See `length`."""
        return self._counted().count(self._membership.member)

    @property
    def is_ragged(self) -> bool:
        """Whether sequences have different lengths. Does not wait for the device."""
        return self._counted().is_ragged(self._membership.member)

    def place(self, length: Count) -> None:
        """Set the length of every sequence. The planes must hold this many tokens. A ring has one for all sequences."""
        assert isinstance(length, int) or not self.window
        self._counted().place(self._membership.member, length)
        self.is_empty = length == 0

    def reset(self) -> None:
        """Forget all tokens, keep the buffers."""
        self.pending = self.starts = self.unrolled = None
        self.is_empty = True
        if self.is_allocated:
            self.place(0)
        self.rows.forget()
        self.residency.note_cropped(0)

    def release(self) -> None:
        """Forget all tokens and drop the buffers, so that the next tokens may have another batch, dtype or device."""
        self.reset()
        self.residency.let_go()
        self._membership.leave()
        self.residency.hold(None)

    def __getstate__(self) -> dict[str, Any]:
        """For pickle and deepcopy: write pending tokens. Temporary buffers are left out, and a copy has its own."""
        self.flush()
        self.residency.leave()
        return {**self.__dict__, "unrolled": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.residency.rejoin(self._written)
        if self.residency.buffers is not None and not self.is_offloaded:
            self._hold(self.residency.buffers.lasting())


def _layout_of(formats: LayerFormats) -> KVLayout:
    return KVLayout(formats.key, formats.value, formats.sink_length, formats.residual_length)


def _with_index(device: torch.device | str) -> torch.device:
    """A device with the index that "cuda" lacks, since devices of tokens are compared."""
    return torch.empty(0, device=device).device
