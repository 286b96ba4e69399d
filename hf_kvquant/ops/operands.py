"""What the package calls: `Operands`, the ops over one layer's planes, and `append` and `decode` for single calls.

`Operands` chooses between kernel and reference. `handle.py` and `attention/` decide which layer calls it, and when.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
from torch import Tensor

from .._ops import ops as torch_ops
from ..spec import reference
from ..spec.key_transform import KeyTransform
from ..spec.layout import KVLayout
from ..spec.planes import Planes
from . import chunks, kernels
from .schemas import DTYPES, dequantize_reference


class Operands:
    """The arguments of `append` and `decode` that stay the same from step to step, unpacked once per layer.

    Args:
        key_planes: Of one layer, as `layout.allocate` makes them.
        value_planes: The same for values.
        layout: Of the planes. In a ring, new tokens overwrite those that have left the `sliding_window` of `decode`.
        key_transform: Applied to new keys, as it was to the stored ones; on the same device. The op transforms the
            query.
    """

    def __init__(
        self,
        key_planes: Planes,
        value_planes: Planes,
        layout: KVLayout,
        key_transform: KeyTransform | None = None,
    ) -> None:
        self.layout = layout
        self._reference = layout, (key_planes, value_planes), key_transform
        self._planes = key_planes.tensors(), value_planes.tensors()
        transform = KeyTransform() if key_transform is None else key_transform
        self._kinds = transform.center, transform.smoothing, transform.is_rotated, layout.packed
        codes = key_planes.codes
        kernels.check_storages(codes.device, layout.key.storage, layout.value.storage)
        head_dims = layout.key.head_dim_of(codes), layout.value.head_dim_of(value_planes.codes)
        serves = kernels.has_kernel(codes.device, *head_dims)
        self._serves_latent = kernels.serves_latent(codes.device, layout, *head_dims)
        # Whether the kernel for few query rows serves, which alone takes a split plan; others ignore it.
        is_mixed = layout.key.is_quantized != layout.value.is_quantized
        self.takes_split_plan = serves and codes.device.type == "cuda" and not is_mixed and not layout.is_ring
        # Overloads: looking up a name in every call would take 2 of 17 us on a CPU.
        appends = serves or self._serves_latent
        self._append = (torch_ops.append if appends else torch_ops.append_reference).default
        self._dequantize = torch_ops.dequantize.default if serves and codes.device.type == "cuda" else None
        # Which chunks the op serves that attends to them in one kernel: it needs Hopper's tensor cores.
        self._serves_chunk = torch_ops.serves_chunk.default if serves and codes.device.type == "cuda" else None
        self._decode = (torch_ops.decode if serves else torch_ops.decode_reference).default

    def serves_latent(self, dtype: torch.dtype) -> bool:
        """Whether `attend_latent` runs a kernel for queries of this dtype.

        GPU kernels take 16-bit queries, of the dtype of rope parts where these are dense.
        """
        if not self._serves_latent or self._planes[0][0].device.type == "cpu":
            return self._serves_latent
        return dtype != torch.float32 and (self.layout.value.is_quantized or self._planes[1][0].dtype == dtype)

    def append(
        self,
        key: Tensor,
        value: Tensor,
        lengths: Tensor,
        starts: Tensor | None = None,
        page_table: Tensor | None = None,
    ) -> None:
        """Quantise new tokens into the planes, as `reference.append` defines it.

        Args:
            key: `[batch, num_kv_heads, q_len, head_dim]`, fp32, bf16 or fp16. Read only.
            value: The same; its head_dim may differ.
            lengths: `[batch]` int32 on the same device: tokens held, including the new ones, which are written at
                `lengths - q_len … lengths - 1`.
            starts: `[batch]` int32 on the same device: first position that is not padding. Granularity `channel` leaves
                padding out of its scales, and the first `sink_length` tokens are counted from here.
            page_table: `[batch, pages of a sequence]` int32 on the same device, if the first axis of the planes counts
                pages: token t is in row t mod P of page `page_table[b, t // P]`, P being the rows of a page. With
                granularity `channel` or dense windows, two columns come first: the slot of the sequence's tails, an
                index into the first axis of tail planes, and the first token that these may have (`reference.Tails`).
                Rows may have gaps between them. Pages that hold no token may have any number. On a CPU other numbers
                are refused; on a GPU, where the host does not know them, they mean page 0 or slot 0.
        """
        self._append(key, value, *self._planes, lengths, starts, *self._kinds, page_table)

    def decode(
        self,
        query: Tensor,
        new: tuple[Tensor, Tensor] | None,
        lengths: Tensor,
        *,
        softmax_scale: float,
        counters: Tensor | None = None,
        starts: Tensor | None = None,
        sinks: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
        softcap: float = 0.0,
        sliding_window: int = 0,
        num_splits: int = 0,
        page_table: Tensor | None = None,
        split_plan: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Append new tokens if there are any, then attend to everything stored: see `reference.decode_attention`.

        Kernels dequantise codes tile by tile: they never build a `[length, head_dim]` tensor and never synchronise with
        the host. The reference does both.

        Args:
            query: `[batch, num_q_heads, q_len, head_dim]`, fp32, bf16 or fp16. Read only.
            new: The key and value of these tokens, appended first; `None` if they have been appended already.
            lengths: `[batch]` int32: tokens held, including the query's. A CPU refuses more than the capacity. On a
                GPU, where the host does not know the lengths, the results of that sequence are NaN instead.
            softmax_scale: Multiplies query · key.
            counters: `[NUM_COUNTERS]` int32 on the same device, all zero: scratch of the CUDA kernel, which sets it to
                zero again. Calls that may run at the same time, on two streams, must not share it. With `None`, the
                CUDA kernel clears its own, which takes one more launch. Other devices need none.
            starts: `[batch]` int32: first position that is not padding; for new tokens too, as in `append`.
            sinks: `[num_q_heads]`: logits that join the softmax without a value.
            alibi_slopes: `[num_q_heads]`.
            softcap: 0 for none.
            sliding_window: Positions visible to a query, itself included; 0 for all. In a ring, from 1 to
                `capacity + 1 - q_len`, so that the new tokens do not overwrite what the first query sees.
            num_splits: How many parts a sequence is cut into, at most; 0 lets the kernel choose. With a fixed number, a
                sequence gives bitwise the same output in every batch, all other arguments being equal. Kernels use
                fewer parts if the capacity is too small for this number, and at most 127 or 255 for a ring on a GPU;
                neither depends on the batch or its lengths. The reference does not cut sequences.
            page_table: As in `append`. A sequence's capacity is what its pages hold.
            split_plan: Of the function of that name, for these lengths; not for a ring. It says how the CUDA kernel for
                few query rows cuts sequences; others ignore it.

        Returns:
            out: `[batch, q_len, num_q_heads, value head_dim]`, dtype of `query`, new memory. Zero where nothing is
                attended.
            lse: `[batch, num_q_heads, q_len]` float32, natural log. `-inf` where nothing is attended.

        Raises:
            ValueError: A shape or dtype does not fit; the message names the argument. From torch 2.15 on, which
                turns every C++ exception into one, a RuntimeError.
            RuntimeError: `query` requires gradients, which kernels do not compute; or, on a GPU, `num_splits` needs
                more thread blocks than a grid can hold.
        """
        if query.requires_grad:
            _check_no_gradients(query)
        key, value = (None, None) if new is None else new
        result: tuple[Tensor, Tensor] = self._decode(
            query,
            key,
            value,
            *self._planes,
            lengths,
            counters,
            starts,
            None if sinks is None else sinks.float(),
            None if alibi_slopes is None else alibi_slopes.float(),
            softmax_scale,
            softcap,
            sliding_window,
            num_splits,
            *self._kinds,
            page_table,
            split_plan,
        )
        return result

    def attend_chunk(
        self,
        query: Tensor,
        new: tuple[Tensor, Tensor],
        lengths: Tensor,
        *,
        starts: Tensor | None = None,
        sinks: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
        page_table: Tensor | None = None,
        **options: Any,
    ) -> tuple[Tensor, Tensor]:
        """Attend to what is stored and to the tokens of a chunk as the model makes them. See `chunks.py`.

        Args:
            query, lengths, starts, sinks, alibi_slopes, page_table: As in `decode`.
            new: The chunk's keys and values. They are counted in `lengths`, and must be appended afterwards.
            **options: `softmax_scale`, `softcap` and `counters`, as in `decode`.

        Returns:
            As `decode`.

        Raises:
            RuntimeError: `query` requires gradients.
        """
        _check_no_gradients(query)
        # A compiled graph cannot depend on what the op answers.
        serves = None if torch.compiler.is_compiling() else self._serves_chunk
        if serves is not None and serves(query, *new, *self._planes, lengths, self.layout.packed, page_table):
            sinks, alibi_slopes = (None if x is None else x.float() for x in (sinks, alibi_slopes))
            result: tuple[Tensor, Tensor] = torch_ops.attend_chunk.default(
                query,
                *new,
                *self._planes,
                lengths,
                starts,
                sinks,
                alibi_slopes,
                options["softmax_scale"],
                options.get("softcap", 0.0),
                *self._kinds,
                page_table,
            )
            return result
        num_q_heads, past = query.shape[1], lengths - query.shape[2]
        held = {"starts": starts, "page_table": page_table, **options}
        parts = []
        for heads in chunks.as_heads(query, new[0].shape[1]):
            if alibi_slopes is not None:
                held["alibi_slopes"] = alibi_slopes.repeat_interleave(heads.shape[1] // num_q_heads)
            parts.append(self.decode(heads, None, past, **held))
        before, lse = chunks.as_tokens(parts, num_q_heads)
        if alibi_slopes is not None:
            lse = chunks.add_distance(lse, alibi_slopes)
        is_plain = starts is None and sinks is None and alibi_slopes is None and not options.get("softcap")
        own = chunks.flash_attention(query, *new, options["softmax_scale"]) if is_plain else None
        if own is None:
            raw = Operands(*chunks.raw_planes(*new), chunks.RAW)
            own_starts = None if starts is None else (starts - past).clamp(min=0).to(torch.int32)
            options |= {"starts": own_starts, "sinks": sinks, "alibi_slopes": alibi_slopes}
            own = raw.decode(query, None, torch.full_like(lengths, query.shape[2]), **options)
        return reference.merge_attention(*own, before, lse)

    def attend_latent(
        self,
        query: Tensor,
        lengths: Tensor,
        *,
        softmax_scale: float,
        starts: Tensor | None = None,
        num_splits: int = 0,
        page_table: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Attend to latents (MLA): the key planes hold latents, which are values, too, and the value planes rope parts.

        Query i sees the tokens up to its own, as in `decode`. A score is `softmax_scale · query · (latent, rope part)`;
        what is added up are latents. The transform may only rotate; queries and results are in the model's basis.

        Args:
            query: `[batch, num_q_heads, q_len, latent + rope channels]`, fp32, bf16 or fp16: absorbed.
            lengths: `[batch]` int32: tokens held, including the query's.
            softmax_scale: Multiplies query · key.
            starts: `[batch]` int32: first position that is not padding; `None` for 0.
            num_splits: As in `decode`.
            page_table: As in `append`.

        Returns:
            out: `[batch, q_len, num_q_heads, latent channels]`, dtype of the query.
            lse: `[batch, num_q_heads, q_len]` float32.

        Raises:
            RuntimeError: `query` requires gradients.
            ValueError: The layout has channel scales, or an argument does not fit; the message names it.
        """
        _check_no_gradients(query)
        *_, is_rotated, layout = self._kinds
        op = torch_ops.attend_latent if self.serves_latent(query.dtype) else torch_ops.attend_latent_reference
        result: tuple[Tensor, Tensor] = op.default(
            query, *self._planes, lengths, starts, softmax_scale, num_splits, is_rotated, layout, page_table
        )
        return result

    def attend_before(
        self, query: Tensor, lengths: Tensor, *, softmax_scale: float, page_table: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """`attend_latent` of a chunk to the tokens before it, of which each query sees all.

        Args:
            query: As there.
            lengths: `[batch]` int32: tokens held before the chunk.
            softmax_scale, page_table: As there.

        Returns:
            As there.
        """
        options: dict[str, Any] = {"softmax_scale": softmax_scale, "page_table": page_table}
        parts = [self.attend_latent(heads, lengths, **options) for heads in chunks.as_heads(query, 1)]
        return chunks.as_tokens(parts, query.shape[1])

    def dequantize(
        self,
        lengths: Tensor,
        starts: Tensor | None,
        *,
        begin: int,
        num_tokens: int,
        dtype: torch.dtype,
        num_seen: int = 0,
        keeps_transform: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Dense keys and values, by default in the model's basis: see `reference.dequantize_tokens`.

        Returns:
            `[batch, num_kv_heads, num_tokens, head_dim]` each.
        """
        if self._dequantize is not None and not keeps_transform:
            number = DTYPES.index(dtype)
            result: tuple[Tensor, Tensor] = self._dequantize(
                *self._planes, lengths, starts, begin, num_tokens, num_seen, number, *self._kinds
            )
            return result
        options: dict[str, Any] = {"begin": begin, "num_tokens": num_tokens, "dtype": dtype, "num_seen": num_seen}
        options["keeps_transform"] = keeps_transform
        return dequantize_reference(*self._reference, lengths=lengths, starts=starts, **options)


def _check_no_gradients(query: Tensor) -> None:
    """Refuse queries whose gradients kernels would lose.

    Raises:
        RuntimeError: `query` requires gradients.
    """
    if query.requires_grad and torch.is_grad_enabled():
        raise RuntimeError(
            "attention: `query` must not require gradients over a quantised cache, got one that does: kernels "
            "compute none, so those of the model's weights would be wrong. Call the model under torch.no_grad(), "
            "or train it with use_cache=False."
        )


def new_counters(device: torch.device) -> Tensor | None:
    """Scratch of the CUDA kernel, `None` on other devices. See `Operands.decode`."""
    return torch.zeros(kernels.NUM_COUNTERS, dtype=torch.int32, device=device) if device.type == "cuda" else None


@functools.cache
def why_general(device: torch.device, layout: KVLayout, head_dims: tuple[int, int], dtype: torch.dtype) -> str:
    """Why only the general CUDA kernel serves single tokens over a layout: the op, over planes made for the question.

    Args:
        device: Of the codes: a GPU for which there are kernels. On a CPU, the answer is that of any GPU.
        layout: Of the codes.
        head_dims: Of keys and of values.
        dtype: Of the query.

    Returns:
        The first requirement of the faster kernels that is not met, as `"wanted X, got Y"`; empty if one serves.
    """
    layout = dataclasses.replace(layout, rows="linear")  # kernels serve rings like other planes
    query, planes, held = _example(device, layout, head_dims, head_dims[0], dtype)
    rest = (None, None, None, None, 1.0, 0.0, 0, 0, None, None, False, layout.packed)
    why: str = torch_ops.why_general.default(query, None, None, *planes, held, *rest)
    return why


@functools.cache
def why_no_latent_kernel(layout: KVLayout, head_dims: tuple[int, int], dtype: torch.dtype) -> str:
    """Why no CUDA kernel attends to latents in a layout: see `why_general`. `head_dims`: of latents and rope parts."""
    # The same on any device, so nothing is allocated on a GPU for the question.
    query, planes, held = _example(torch.device("cpu"), layout, head_dims, sum(head_dims), dtype)
    why: str = torch_ops.why_no_latent_kernel.default(query, *planes, held, None, 1.0, 0, False, layout.packed)
    return why


def _example(
    device: torch.device, layout: KVLayout, head_dims: tuple[int, int], num_channels: int, dtype: torch.dtype
) -> tuple[Tensor, tuple[list[Tensor], list[Tensor]], Tensor]:
    """A query of one token and head, planes that hold one, and their lengths."""
    made = layout.allocate((1, 1, *head_dims), layout.token_alignment, dtype=dtype, device=device)
    query = torch.zeros(1, 1, 1, num_channels, dtype=dtype, device=device)
    held = torch.ones(1, dtype=torch.int32, device=device)
    return query, (made[0].tensors(), made[1].tensors()), held


def append(
    key: Tensor,
    value: Tensor,
    key_planes: Planes,
    value_planes: Planes,
    lengths: Tensor,
    layout: KVLayout,
    key_transform: KeyTransform | None = None,
    starts: Tensor | None = None,
    page_table: Tensor | None = None,
) -> None:
    """`Operands.append` for a single call."""
    Operands(key_planes, value_planes, layout, key_transform).append(key, value, lengths, starts, page_table)


def decode(
    query: Tensor,
    new: tuple[Tensor, Tensor] | None,
    key_planes: Planes,
    value_planes: Planes,
    lengths: Tensor,
    layout: KVLayout,
    *,
    key_transform: KeyTransform | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """`Operands.decode` for a single call; `options` are its keyword arguments."""
    return Operands(key_planes, value_planes, layout, key_transform).decode(query, new, lengths, **options)
