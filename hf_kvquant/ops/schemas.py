"""The ops: their schemas, the reference under their names, and their fakes.

`append` quantises new tokens into planes. `decode` does the same with new tokens, if it is given any, and then attends
to everything stored. `attend_chunk` attends to what is stored and to new tokens as they are; `serves_chunk` says
whether it has a kernel for these. `attend_latent` attends to latents (MLA). `dequantize` returns stored tokens as dense
tensors. `why_general` says why only the general CUDA kernel serves a call of `decode`, and `why_no_latent_kernel` why
none serves one of `attend_latent`; both compute nothing. The schemas are defined here and nowhere else; `csrc/`
registers kernels for them under the CPU and CUDA keys. Where there is no kernel, `reference.py` runs instead: under the
same op names if the build has no kernels for the device type, and as `append_reference` and `decode_reference` if its
kernels do not fit the GPU or the head_dim. `kernels.py` decides that. The planes of a side are one list, in the order
of `Planes.tensors`; the integers of `layout` are `KVLayout.packed`.

`rms_norm`, `add_rms_norm`, `rotary` and `silu_mul` compute what lies between a model's linear layers, in one CUDA
kernel each, rounding exactly like the kernels they replace. Only `fusion.py` calls them. So does `packed_linear`, a
linear layer with torchao's tile-packed int4 weights, which only `packed_linear.py` calls. `conv_step` and `delta_step`
are one token of layers with states (`spec/state_steps.py`), `conv_chunks` and `delta_chunks` many
(`spec/state_chunks.py`). Only the modules of these names in `graphs` call them, and `gates.py` calls `delta_gates`, the
gates of both. `prefetch` loads weights into a GPU's L2 cache before a linear layer needs them. Only `prefetch.py` calls
it. `split_plan` is explained in `planning.py`.

Kernels check everything that could corrupt memory (csrc/args.cpp). The checks here are few: sizes, dtypes and devices
for the reference, so that PyTorch does not broadcast over a mistake, and what the fakes read.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .._ops import add_op_namespace_prefix
from .._ops import ops as torch_ops
from ..spec import reference, state_chunks, state_steps
from ..spec.formats import BLOCK_SIZE, KVFormat
from ..spec.key_transform import KeyTransform
from ..spec.layout import KVLayout
from ..spec.planes import Planes
from .kernels import MAX_RING_LENGTH, NUM_COUNTERS, warn_reference
from .planning import split_plan_reference

_PLANES = "Tensor(a!)[] key_planes, Tensor(b!)[] value_planes"
_KINDS = "Tensor? key_center, Tensor? key_smoothing, bool rotates_key, int[] layout"
_PAGES = "Tensor? page_table=None"
APPEND_SCHEMA = f"append(Tensor key, Tensor value, {_PLANES}, Tensor lengths, Tensor? starts, {_KINDS}, {_PAGES}) -> ()"
DECODE_SCHEMA = (
    f"decode(Tensor query, Tensor? key, Tensor? value, {_PLANES}, Tensor lengths, Tensor(c!)? counters, "
    "Tensor? starts, Tensor? sinks, Tensor? alibi_slopes, float softmax_scale, float softcap, int sliding_window, "
    f"int num_splits, {_KINDS}, {_PAGES}, Tensor? split_plan=None) -> (Tensor out, Tensor lse)"
)
_STORED = "Tensor[] key_planes, Tensor[] value_planes, Tensor lengths"
ATTEND_CHUNK_SCHEMA = (
    f"attend_chunk(Tensor query, Tensor key, Tensor value, {_STORED}, Tensor? starts, Tensor? sinks, "
    f"Tensor? alibi_slopes, float softmax_scale, float softcap, {_KINDS}, {_PAGES}) -> (Tensor out, Tensor lse)"
)
SERVES_CHUNK_SCHEMA = f"serves_chunk(Tensor query, Tensor key, Tensor value, {_STORED}, int[] layout, {_PAGES}) -> bool"
ATTEND_LATENT_SCHEMA = (
    f"attend_latent(Tensor query, {_STORED}, Tensor? starts, float softmax_scale, int num_splits, "
    f"bool rotates_latent, int[] layout, {_PAGES}) -> (Tensor out, Tensor lse)"
)
# The operands of the ops that they ask about, of which they write none.
WHY_GENERAL_SCHEMA = (
    re.sub(r"\(\w!\)", "", DECODE_SCHEMA.partition(" -> ")[0]).replace("decode", "why_general") + " -> str"
)
WHY_NO_LATENT_SCHEMA = (
    ATTEND_LATENT_SCHEMA.partition(" -> ")[0].replace("attend_latent", "why_no_latent_kernel") + " -> str"
)
DEQUANTIZE_SCHEMA = (
    f"dequantize({_STORED}, Tensor? starts, SymInt begin, "
    f"SymInt num_tokens, int num_seen, int dtype, {_KINDS}) -> (Tensor key, Tensor value)"
)
FUSED_SCHEMAS = (
    "rms_norm(Tensor x, Tensor weight, Tensor? mean, float eps, bool is_zero_centered=False, Tensor? gate=None) -> "
    "Tensor",
    "add_rms_norm(Tensor x, Tensor other, Tensor weight, float eps, bool is_zero_centered=False) -> "
    "(Tensor total, Tensor normed)",
    "rotary(Tensor query, Tensor key, Tensor cos, Tensor sin) -> (Tensor query, Tensor key)",
    "silu_mul(Tensor gate, Tensor up) -> Tensor",
    "packed_linear(Tensor x, Tensor codes, Tensor scale_and_zero, int group_size) -> Tensor",
    "conv_step(Tensor x, Tensor(a!) state, Tensor weight, Tensor? bias, bool has_silu, Tensor? read_slots, "
    "Tensor? write_slots) -> Tensor",
    "delta_step(Tensor query, Tensor key, Tensor value, Tensor g, Tensor beta, Tensor state, Tensor(a!) target, "
    "bool normalizes, Tensor? read_slots, Tensor? write_slots) -> Tensor",
    "delta_gates(Tensor x, Tensor decay_weight, Tensor beta_weight, Tensor A_log, Tensor dt_bias, "
    "float beta_factor) -> (Tensor g, Tensor beta)",
    "conv_chunks(Tensor x, Tensor(a!) state, Tensor weight, Tensor? bias, bool has_silu, Tensor begins, "
    "Tensor read_slots, Tensor write_slots) -> Tensor",
    "delta_chunks(Tensor query, Tensor key, Tensor value, Tensor g, Tensor beta, Tensor(a!) state, bool normalizes, "
    "Tensor begins, Tensor read_slots, Tensor write_slots) -> Tensor",
)
PREFETCH_SCHEMA = "prefetch(Tensor weight, int num_bytes) -> ()"
SPLIT_PLAN_SCHEMA = (
    "split_plan(Tensor lengths, Tensor? starts, int num_slots, int most_slots, int min_tokens, int tokens_between) -> "
    "Tensor"
)

_MAX_PLANNED = 65535  # entries of a split plan: an axis of a grid

# The dtypes of a model's tensors, by their number in csrc/format.h.
DTYPES = (torch.float32, torch.float16, torch.bfloat16)

Arguments = Mapping[str, Any]
# What an argument must be: sizes, `None` for any, and dtypes.
Expected = tuple[Tensor, Sequence[int | None], Sequence[torch.dtype]]


# --- the reference under the names of the ops -------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Cache:
    """What `append` and `decode` have in common, unpacked."""

    layout: KVLayout
    planes: tuple[Planes, Planes]
    head_dims: tuple[int, int]
    key_transform: KeyTransform | None
    tail_from: Tensor | None = None

    @property
    def num_tails(self) -> int:
        """The first axis of the tail planes, those of keys if they have one; 0 without tails."""
        return next((len(planes.tail) for planes in self.planes if planes.tail is not None), 0)

    @classmethod
    def of(cls, where: str, arguments: Arguments) -> _Cache:
        try:
            layout = KVLayout.of_packed(arguments["layout"])
            planes = layout.planes(arguments["key_planes"], arguments["value_planes"])
            head_dims = layout.key.head_dim_of(planes[0].codes), layout.value.head_dim_of(planes[1].codes)
            for kv_format, head_dim in zip(layout.formats, head_dims, strict=True):
                kv_format.num_groups(head_dim)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error
        center, smoothing, is_rotated = (arguments[name] for name in ("key_center", "key_smoothing", "rotates_key"))
        transform = None
        if center is not None or smoothing is not None or is_rotated:
            transform = KeyTransform.of_checked(center, smoothing, is_rotated)
        return cls(layout, planes, head_dims, transform)


def _append_reference(arguments: Arguments, cache: _Cache) -> None:
    layout = cache.layout
    for name, planes, kv_format, transform in zip(
        ("key", "value"), cache.planes, layout.formats, (cache.key_transform, None), strict=True
    ):
        reference.append(
            arguments[name],
            planes,
            kv_format,
            arguments["lengths"],
            transform,
            arguments["starts"],
            **layout.windows,
            is_ring=layout.is_ring,
            tail_from=cache.tail_from,
        )


def _runs_of_queries(arguments: Arguments, cache: _Cache) -> Iterator[tuple[slice, int]]:
    """Queries in a row that read the same tokens from the tails, and how many of the call's tokens are behind them."""
    q_len, windows = arguments["query"].shape[2], cache.layout.windows

    def begins(num_behind: int) -> list[Tensor]:
        held = {"lengths": arguments["lengths"], "tail_from": cache.tail_from, "num_behind": num_behind, **windows}
        return [
            reference.window_begin(planes.tail, kv_format, **held)
            for planes, kv_format in zip(cache.planes, cache.layout.formats, strict=True)
            if planes.tail is not None
        ]

    first, known = 0, begins(q_len - 1)
    for i in range(1, q_len if known else 1):
        found = begins(q_len - 1 - i)
        if not all(map(torch.equal, known, found)):
            yield slice(first, i), q_len - i
            first, known = i, found
    yield slice(first, q_len), 0


def _by_runs(
    arguments: Arguments, cache: _Cache, attend: Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]
) -> tuple[Tensor, Tensor]:
    """Attention of all queries. `attend` gets some of them, the lengths up to these, and how many tokens are behind."""
    parts = [
        attend(arguments["query"][:, :, queries], arguments["lengths"] - num_behind, num_behind)
        for queries, num_behind in _runs_of_queries(arguments, cache)
    ]
    outs, sums = zip(*parts, strict=True)
    return torch.cat(outs, dim=1), torch.cat(sums, dim=2)


def _decode_reference(arguments: Arguments, cache: _Cache) -> tuple[Tensor, Tensor]:
    layout, planes, lengths = cache.layout, cache.planes, arguments["lengths"]
    position = reference.ring_positions(lengths, planes[0].codes.shape[2]) if layout.is_ring else None
    held = {"lengths": lengths, "starts": arguments["starts"], "position": position, **layout.windows}
    held["tail_from"] = cache.tail_from
    names = ("starts", "sinks", "alibi_slopes", "softmax_scale", "softcap", "sliding_window")

    def attend(query: Tensor, seen: Tensor, num_behind: int) -> tuple[Tensor, Tensor]:
        key, value = (
            reference.dequantize(side, kv_format, torch.float32, **held, num_behind=num_behind)
            for side, kv_format in zip(planes, layout.formats, strict=True)
        )
        return reference.decode_attention(
            query,
            key,
            value,
            seen,
            **{name: arguments[name] for name in names},
            key_transform=cache.key_transform,
            is_dense=reference.dense_tokens(planes[0], layout.key, **held, num_behind=num_behind)[0],
            key_position=position,
        )

    return _by_runs(arguments, cache, attend)


def _attend_chunk_reference(arguments: Arguments, cache: _Cache) -> tuple[Tensor, Tensor]:
    layout, lengths, q_len = cache.layout, arguments["lengths"], arguments["query"].shape[2]
    past = lengths - q_len
    row = past.long().unsqueeze(1) + torch.arange(q_len, device=past.device)
    held = {"lengths": past, "starts": arguments["starts"], **layout.windows, "tail_from": cache.tail_from}

    def with_own(name: str, planes: Planes, kv_format: KVFormat) -> Tensor:
        stored, own = reference.dequantize(planes, kv_format, torch.float32, **held), arguments[name].float()
        return stored.scatter(2, row[:, None, :, None].expand_as(own), own)

    is_dense, _ = reference.dense_tokens(cache.planes[0], layout.key, **held)
    names = ("starts", "sinks", "alibi_slopes", "softmax_scale", "softcap")
    return reference.decode_attention(
        arguments["query"],
        with_own("key", cache.planes[0], layout.key),
        with_own("value", cache.planes[1], layout.value),
        lengths,
        **{name: arguments[name] for name in names},
        key_transform=cache.key_transform,
        is_dense=is_dense.scatter(1, row, value=True),
    )


def _attend_latent_reference(arguments: Arguments, cache: _Cache) -> tuple[Tensor, Tensor]:
    layout, lengths = cache.layout, arguments["lengths"]
    held = {"lengths": lengths, "starts": arguments["starts"], **layout.windows, "tail_from": cache.tail_from}

    def attend(query: Tensor, seen: Tensor, num_behind: int) -> tuple[Tensor, Tensor]:
        latent, rope = (
            reference.dequantize(
                planes, kv_format, torch.float32, key_transform=transform, **held, num_behind=num_behind
            )
            for planes, kv_format, transform in zip(
                cache.planes, layout.formats, (cache.key_transform, None), strict=True
            )
        )
        return reference.decode_attention(
            query,
            torch.cat((latent, rope), dim=-1),
            latent,
            seen,
            softmax_scale=arguments["softmax_scale"],
            starts=arguments["starts"],
        )

    return _by_runs(arguments, cache, attend)


def dequantize_reference(
    layout: KVLayout, sides: tuple[Planes, Planes], key_transform: KeyTransform | None, **options: Any
) -> tuple[Tensor, Tensor]:
    """Dense keys and values; `options` go to `reference.dequantize_tokens`."""
    options |= {**layout.windows, "is_ring": layout.is_ring}
    key, value = (
        reference.dequantize_tokens(planes, kv_format, **{**options, "key_transform": transform})
        for planes, kv_format, transform in zip(sides, layout.formats, (key_transform, None), strict=True)
    )
    return key, value


def _dequantize(*args: Any) -> tuple[Tensor, Tensor]:
    arguments = _arguments_of("dequantize", args)
    _check_tensors("dequantize", arguments)
    _check_ranks("dequantize", arguments)
    cache = _Cache.of("dequantize", arguments)
    options = {name: arguments[name] for name in ("begin", "num_tokens", "lengths", "starts", "num_seen")}
    options["dtype"] = DTYPES[arguments["dtype"]]
    return dequantize_reference(cache.layout, cache.planes, cache.key_transform, **options)


def _arguments_of(op: str, args: Sequence[object]) -> dict[str, Any]:
    """The arguments of an op, by their names in its schema. torch leaves out a last one that is None by default."""
    names = [argument.name for argument in getattr(torch_ops, op).default._schema.arguments]
    return dict(itertools.zip_longest(names, args))


def _append(*args: Any) -> None:
    arguments = _arguments_of("append", args)
    cache = _checked("append", arguments)
    warn_reference(cache.planes[0].codes.device, *cache.head_dims)
    with torch.no_grad(), _linear(cache, arguments) as linear:  # as the kernels do
        _append_reference(arguments, linear)


def _decode(*args: Any) -> tuple[Tensor, Tensor]:
    arguments = _arguments_of("decode", args)
    cache = _checked("decode", arguments)
    warn_reference(cache.planes[0].codes.device, *cache.head_dims)
    with torch.no_grad(), _linear(cache, arguments) as linear:
        if arguments["key"] is not None:
            _append_reference(arguments, linear)
        return _decode_reference(arguments, linear)


def _attend_chunk(*args: Any) -> tuple[Tensor, Tensor]:
    arguments = _arguments_of("attend_chunk", args)
    cache = _checked("attend_chunk", arguments)
    with torch.no_grad(), _linear(cache, arguments, writes=False) as linear:
        return _attend_chunk_reference(arguments, linear)


def _attend_latent(*args: Any) -> tuple[Tensor, Tensor]:
    arguments = _latent_arguments(args)
    cache = _checked("attend_latent", arguments)
    warn_reference(cache.planes[0].codes.device, *cache.head_dims)
    if cache.layout.key.block_size is not None:
        raise ValueError(
            "attend_latent: `layout` must have no scales for channels of latents, got granularity channel. Use groups."
        )
    with torch.no_grad(), _linear(cache, arguments, writes=False) as linear:
        return _attend_latent_reference(arguments, linear)


def _latent_arguments(args: Sequence[object]) -> dict[str, Any]:
    """The arguments of `attend_latent`, with those that other ops have besides: latents are only ever rotated."""
    arguments = _arguments_of("attend_latent", args)
    absent = dict.fromkeys(("key", "value", "key_center", "key_smoothing"))
    return {**arguments, **absent, "rotates_key": arguments["rotates_latent"]}


def _serves_chunk(*args: Any) -> bool:
    return False


def _why(*args: Any) -> str:
    """Nothing: without an extension, no kernel serves at all."""
    return ""


@contextlib.contextmanager
def _linear(cache: _Cache, arguments: Arguments, *, writes: bool = True) -> Iterator[_Cache]:
    """The cache with the rows of each sequence side by side. Pages then get the new tokens that are written to it."""
    page_table, key = arguments["page_table"], arguments["key"]
    if page_table is None:
        yield cache
        return
    tails, table = reference.split_tails(page_table, cache.layout.has_tail)
    tail_slot, tail_from = (None, None) if tails is None else tails
    block_sizes = [each.block_size for each in cache.layout.formats]
    key_planes, value_planes = planes = [
        reference.gather_pages(side, table, tail_slot, block_size)
        for side, block_size in zip(cache.planes, block_sizes, strict=True)
    ]
    yield dataclasses.replace(cache, planes=(key_planes, value_planes), tail_from=tail_from)
    if writes and key is not None:
        lengths = arguments["lengths"]
        for gathered, side, block_size in zip(planes, cache.planes, block_sizes, strict=True):
            # A block gets its codes when the window has left it.
            num_written = key.shape[2] + (0 if block_size is None else cache.layout.residual_length)
            reference.scatter_pages(gathered, side, table, tail_slot, lengths, num_written, block_size)


# --- checks -----------------------------------------------------------------------------------------------------------


def _checked(where: str, arguments: Arguments) -> _Cache:
    """Refuse tensors that the layout does not describe, and lengths without room, before anything is written.

    Raises:
        ValueError: An argument does not fit; the message names it.
    """
    _check_tensors(where, arguments)
    _check_ranks(where, arguments)
    cache = _Cache.of(where, arguments)
    slots, heads, rows, _ = arguments["key_planes"][0].shape
    alignment = cache.layout.token_alignment if arguments["page_table"] is None else BLOCK_SIZE
    if heads == 0 or rows % alignment:
        expected = f"heads and a capacity that is a multiple of {alignment}"
        raise ValueError(f"{where}: `key_planes.codes` must have {expected}, got {[slots, heads, rows]}.")
    if arguments["page_table"] is not None:
        _check_pages(where, arguments["page_table"], cache, slots, rows)
    if arguments.get("split_plan") is not None:
        _check_split_plan(where, arguments, cache.layout)
    for name, (x, sizes, dtypes) in _expected(where, arguments, cache).items():
        fits = x.ndim == len(sizes) and all(size in (None, found) for size, found in zip(sizes, x.shape, strict=True))
        if not fits or x.dtype not in dtypes:
            what = f"{['any' if size is None else size for size in sizes]} {' or '.join(map(str, dtypes))}"
            raise ValueError(f"{where}: `{name}` must be {what} like the cache, got {list(x.shape)} {x.dtype}.")
    capacity = rows
    if arguments["page_table"] is not None:
        capacity *= reference.split_tails(arguments["page_table"], cache.layout.has_tail)[1].shape[1]
    lengths, most = arguments["lengths"], MAX_RING_LENGTH if cache.layout.is_ring else capacity
    num_new = 0 if arguments["key"] is None else arguments["key"].shape[2]
    # On a GPU the host would have to wait for the numbers.
    if lengths.device.type == "cpu" and not bool(((lengths >= num_new) & (lengths <= most)).all()):
        raise ValueError(
            f"{where}: `lengths` must be between the {num_new} new tokens and {most}, got {lengths.tolist()}. "
            "Make a larger cache (max_cache_len), or crop or reset this one."
        )
    if arguments["page_table"] is not None:
        _check_page_numbers(where, arguments["page_table"], cache, lengths, num_new, slots, rows)
    return cache


def _check_pages(where: str, page_table: Tensor, cache: _Cache, num_pages: int, page_rows: int) -> None:
    layout = cache.layout
    if layout.is_ring or any(each.granularity == "tensor" for each in layout.formats):
        raise ValueError(
            f"{where}: `page_table` must be None for this layout, got a tensor: rings and granularity tensor have no "
            "pages."
        )
    if num_pages * page_rows == 0:
        raise ValueError(f"{where}: `page_table` must be None for planes without rows, got a tensor.")
    if page_table.ndim != 2 or page_table.dtype != torch.int32:
        raise ValueError(
            f"{where}: `page_table` must be [batch, pages] torch.int32, got {list(page_table.shape)} "
            f"{page_table.dtype}."
        )
    if layout.has_tail and page_table.shape[1] < reference.NUM_TAIL_COLUMNS:
        raise ValueError(
            f"{where}: `page_table` must begin with {reference.NUM_TAIL_COLUMNS} columns of tails for this layout, got "
            f"{list(page_table.shape)}."
        )
    if layout.has_tail and cache.num_tails == 0:
        raise ValueError(f"{where}: `page_table` must be None for tail planes without slots, got a tensor.")


def _check_split_plan(where: str, arguments: Arguments, layout: KVLayout) -> None:
    split_plan, batch = arguments["split_plan"], len(arguments["lengths"])
    if layout.is_ring:
        raise ValueError(
            f"{where}: `split_plan` must be None for a ring, got a tensor. Its sequences have equal lengths."
        )
    if arguments["num_splits"] != 0:
        raise ValueError(
            f"{where}: `num_splits` must be 0 with a split plan, got {arguments['num_splits']}. The plan says how "
            "sequences are split."
        )
    if split_plan.ndim != 2 or split_plan.shape[1] != 4 or split_plan.dtype != torch.int32:
        raise ValueError(
            f"{where}: `split_plan` must be [entries, 4] torch.int32, got {list(split_plan.shape)} {split_plan.dtype}. "
            "Make it with ops.split_plan."
        )
    if not batch <= len(split_plan) <= _MAX_PLANNED:
        raise ValueError(
            f"{where}: `split_plan` must have from {batch} to {_MAX_PLANNED} entries, got {len(split_plan)}. Make it "
            "with ops.split_plan."
        )


def _check_page_numbers(
    where: str, page_table: Tensor, cache: _Cache, lengths: Tensor, num_new: int, num_pages: int, page_rows: int
) -> None:
    if lengths.device.type != "cpu":  # the host would have to wait for the numbers
        return
    tails, page_table = reference.split_tails(page_table, cache.layout.has_tail)
    if tails is not None:
        is_bad = (lengths > 0) & ((tails.slot < 0) | (tails.slot >= cache.num_tails))
        if bool(is_bad.any()):
            b = int(is_bad.nonzero()[0])
            raise ValueError(
                f"{where}: `page_table` must begin with a slot from 0 to {cache.num_tails - 1} for the tail, got "
                f"{int(tails.slot[b])} for sequence {b}. Give every sequence a slot of the tail planes."
            )
        most = (lengths - num_new).clamp(min=0)
        is_bad = (lengths > 0) & ((tails.tail_from < 0) | (tails.tail_from > most) | (tails.tail_from % BLOCK_SIZE > 0))
        if bool(is_bad.any()):
            b = int(is_bad.nonzero()[0])
            raise ValueError(
                f"{where}: `page_table` must have a multiple of {BLOCK_SIZE} from 0 to {int(most[b])} as the first "
                f"token that a tail may have, got {int(tails.tail_from[b])} for sequence {b}."
            )
    is_held = torch.arange(page_table.shape[1]) * page_rows < lengths[:, None]
    is_bad = is_held & ((page_table < 0) | (page_table >= num_pages))
    if bool(is_bad.any()):
        b, i = is_bad.nonzero()[0].tolist()
        raise ValueError(
            f"{where}: `page_table` must have a page from 0 to {num_pages - 1} for every token held, got "
            f"{int(page_table[b, i])} for token {i * page_rows} of sequence {b}."
        )


def _expected(where: str, arguments: Arguments, cache: _Cache) -> dict[str, Expected]:
    """What the tensors of a call must be, by name."""
    slots, heads, rows, _ = arguments["key_planes"][0].shape
    batch, num_tails = slots, slots
    if arguments["page_table"] is not None:
        batch, num_tails = arguments["page_table"].shape[0], cache.num_tails
    expected: dict[str, Expected] = {}
    q_len = arguments["query" if "query" in arguments else "key"].shape[2]
    for side, planes, kv_format, head_dim in zip(
        ("key", "value"), cache.planes, cache.layout.formats, cache.head_dims, strict=True
    ):
        shapes = kv_format.plane_shapes(slots, heads, head_dim, rows, **cache.layout.windows)
        if planes.tail is not None and kv_format.serves_tail(planes.tail.shape[2], **cache.layout.windows):
            shapes["tail"] = num_tails, heads, planes.tail.shape[2], head_dim
        new = arguments[side]
        if (new is None) != (arguments["key"] is None):
            raise ValueError(f"{where}: `{side}` must be given exactly where `key` is. Give both or neither.")
        for name, shape in shapes.items():
            dtype = kv_format.plane_dtype(name)
            expected[f"{side}_planes.{name}"] = getattr(planes, name), shape, DTYPES if dtype is None else (dtype,)
        if new is not None:
            tail = planes.tail
            expected[side] = new, (batch, heads, q_len, head_dim), DTYPES if tail is None else (tail.dtype,)
    vectors = {"lengths": batch, "starts": batch}
    if "query" in arguments:
        query = arguments["query"]
        if query.shape[1] == 0 or query.shape[1] % heads:
            raise ValueError(f"{where}: `query` must have a multiple of {heads} heads, got {query.shape[1]}.")
        num_channels = sum(cache.head_dims) if where == "attend_latent" else cache.head_dims[0]
        expected["query"] = query, (batch, None, None, num_channels), DTYPES
        vectors |= {"counters": NUM_COUNTERS, "sinks": query.shape[1], "alibi_slopes": query.shape[1]}
    for name, size in vectors.items():
        dtype = torch.float32 if name in ("sinks", "alibi_slopes") else torch.int32
        if name in arguments:
            expected[name] = arguments[name], (size,), (dtype,)
    for name in ("key_center", "key_smoothing"):
        expected[name] = arguments[name], (heads, cache.head_dims[0]), (torch.float32,)
    return {name: each for name, each in expected.items() if each[0] is not None}


def _tensors(arguments: Arguments) -> Iterator[tuple[str, Tensor]]:
    for name, x in arguments.items():
        if isinstance(x, Tensor):
            yield name, x
        elif isinstance(x, (list, tuple)):
            yield from ((name, each) for each in x if isinstance(each, Tensor))


def _check_tensors(where: str, arguments: Arguments) -> None:
    """All tensors are dense and on one device. If one is on `meta`, torch calls the fake, which computes nothing."""
    first: tuple[str, Tensor] | None = None
    for name, x in _tensors(arguments):
        if x.layout != torch.strided:
            raise ValueError(f"{where}: `{name}` must be a dense tensor, got layout {x.layout}. Call .to_dense().")
        first = (name, x) if first is None else first
        if x.device != first[1].device:
            raise ValueError(
                f"{where}: `{name}` must be on the device of `{first[0]}`, {first[1].device}, got {x.device}. "
                "Move the inputs, or build the cache where the model is."
            )


def _check_ranks(where: str, arguments: Arguments) -> None:
    """What fakes and further checks read the sizes of is there, and has four axes.

    Sizes are not compared here: a compiler would make every comparison a guard of its graph.
    """
    has_new = where not in ("decode", "attend_latent")
    for name, is_optional in (("query", False), ("key", not has_new), ("value", not has_new)):
        x = arguments.get(name)
        if name in arguments and (not is_optional if x is None else x.ndim != 4):
            got = None if x is None else list(x.shape)
            raise ValueError(f"{where}: `{name}` must be [batch, heads, tokens, head_dim], got {got}.")
    for name in ("key_planes", "value_planes"):
        planes = arguments[name]
        if not planes or any(plane is None or plane.ndim != 4 for plane in planes):
            got = [None if plane is None else list(plane.shape) for plane in planes]
            raise ValueError(f"{where}: `{name}` must be tensors of four axes, got {got}.")
    if arguments["lengths"] is None:
        raise ValueError(f"{where}: `lengths` must be a tensor, got None.")


def _prefetch(weight: Tensor, num_bytes: int) -> None:
    """A hint, ignored. Refuses what the kernel refuses."""
    if not weight.is_contiguous():
        raise ValueError("prefetch: `weight` must be contiguous, got strides that are not. Call .contiguous().")
    if not 0 <= num_bytes <= weight.nbytes:
        raise ValueError(
            f"prefetch: `num_bytes` must be between 0 and the {weight.nbytes} bytes of `weight`, got {num_bytes}."
        )


# --- fakes ------------------------------------------------------------------------------------------------------------


def _append_fake(*args: object) -> None:
    _check_tensors("append", _arguments_of("append", args))


def _attention_fake(op: str) -> Callable[..., tuple[Tensor, Tensor]]:
    def fake(*args: object) -> tuple[Tensor, Tensor]:
        arguments = _arguments_of(op, args)
        _check_tensors(op, arguments)
        _check_ranks(op, arguments)
        query = arguments["query"]
        batch, num_q_heads, q_len, _ = query.shape
        value_dim = _Cache.of(op, arguments).head_dims[1]
        out = query.new_empty(batch, q_len, num_q_heads, value_dim)
        return out, query.new_empty((batch, num_q_heads, q_len), dtype=torch.float32)

    return fake


def _attend_latent_fake(*args: object) -> tuple[Tensor, Tensor]:
    arguments = _latent_arguments(args)
    _check_tensors("attend_latent", arguments)
    _check_ranks("attend_latent", arguments)
    query = arguments["query"]
    batch, num_q_heads, q_len, _ = query.shape
    out = query.new_empty(batch, q_len, num_q_heads, _Cache.of("attend_latent", arguments).head_dims[0])
    return out, query.new_empty((batch, num_q_heads, q_len), dtype=torch.float32)


def _dequantize_fake(*args: object) -> tuple[Tensor, Tensor]:
    arguments = _arguments_of("dequantize", args)
    _check_tensors("dequantize", arguments)
    _check_ranks("dequantize", arguments)
    batch, heads, _, _ = arguments["key_planes"][0].shape
    key, value = (
        arguments["lengths"].new_empty((batch, heads, arguments["num_tokens"], dim), dtype=DTYPES[arguments["dtype"]])
        for dim in _Cache.of("dequantize", arguments).head_dims
    )
    return key, value


def _fake_like(op: str, *like: str) -> Callable[..., Any]:
    """The fake of an op whose results have the shapes and dtypes of some of its arguments."""

    def fake(*args: object) -> Any:
        arguments = _arguments_of(op, args)
        _check_tensors(op, arguments)
        results = tuple(torch.empty_like(arguments[name]) for name in like)
        return results if len(results) > 1 else results[0]

    return fake


def _rotary_fake(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> Any:
    if cos.shape[-1] == query.shape[-1]:
        return _fake_like("rotary", "query", "key")(query, key, cos, sin)
    return query.new_empty(query.shape), key.new_empty(key.shape)


def _split_plan_fake(lengths: Tensor, starts: Tensor | None, num_slots: int, most_slots: int, *tokens: int) -> Tensor:
    return lengths.new_empty((len(lengths) + most_slots, 4))


def _packed_linear_fake(x: Tensor, codes: Tensor, scale_and_zero: Tensor, group_size: int) -> Tensor:
    return x.new_empty((len(x), scale_and_zero.shape[1]))


def _delta_fake(query: Tensor, key: Tensor, value: Tensor, *args: object) -> Tensor:
    return query.new_empty(value.shape)


def _gates_fake(x: Tensor, decay_weight: Tensor, *args: object) -> tuple[Tensor, Tensor]:
    shape = *x.shape[:2], len(decay_weight)
    return x.new_empty(shape, dtype=torch.promote_types(x.dtype, torch.float32)), x.new_empty(shape)


def _conv_chunks_fake(x: Tensor, *args: object) -> Tensor:
    return x.new_empty((1, x.shape[2], x.shape[1]))


def _prefetch_fake(weight: Tensor, num_bytes: int) -> None:
    pass


def _resolving(op: str) -> Callable[..., Any]:
    """An op that first resolves lazily negated tensors (such as `z.conj().imag`): kernels read memory as it is.

    torch's own fallback cannot do so for ops that mutate.
    """

    def resolve(*args: Any) -> Any:
        overload, resolved = getattr(torch_ops, op).default, []
        for argument, x in zip(overload._schema.arguments, args, strict=False):  # see _arguments_of
            if any(each.is_neg() for _, each in _tensors({argument.name: x})):
                if argument.is_write:
                    raise ValueError(
                        f"{op.removesuffix('_reference')}: `{argument.name}` must hold its numbers as they are, got a "
                        "view that negates them. Call .resolve_neg()."
                    )
                x = x.resolve_neg()
            resolved.append(x)
        return overload(*resolved)

    return resolve


# --- registration -----------------------------------------------------------------------------------------------------

_library = torch.library.Library(torch_ops.name, "DEF")
for _schema in (
    APPEND_SCHEMA,
    DECODE_SCHEMA,
    ATTEND_CHUNK_SCHEMA,
    SERVES_CHUNK_SCHEMA,
    ATTEND_LATENT_SCHEMA,
    WHY_GENERAL_SCHEMA,
    WHY_NO_LATENT_SCHEMA,
    DEQUANTIZE_SCHEMA,
    *FUSED_SCHEMAS,
    PREFETCH_SCHEMA,
    SPLIT_PLAN_SCHEMA,
):
    _library.define(_schema)
# These are ops, not Python functions, so that the compiler sees a call instead of a data-dependent branch.
for _schema in (APPEND_SCHEMA, DECODE_SCHEMA, ATTEND_LATENT_SCHEMA):
    _library.define(_schema.replace("(", "_reference(", 1), tags=torch.Tag.cudagraph_unsafe)
for _name, _kernel, _fake in (
    ("append", _append, _append_fake),
    ("append_reference", _append, _append_fake),
    ("decode", _decode, _attention_fake("decode")),
    ("decode_reference", _decode, _attention_fake("decode")),
    ("attend_chunk", _attend_chunk, _attention_fake("attend_chunk")),
    ("serves_chunk", _serves_chunk, _serves_chunk),
    ("attend_latent", _attend_latent, _attend_latent_fake),
    ("attend_latent_reference", _attend_latent, _attend_latent_fake),
    ("why_general", _why, _why),
    ("why_no_latent_kernel", _why, _why),
    ("dequantize", _dequantize, _dequantize_fake),
    ("rms_norm", reference.rms_norm, _fake_like("rms_norm", "x")),
    ("add_rms_norm", reference.add_rms_norm, _fake_like("add_rms_norm", "x", "other")),
    ("rotary", reference.rotary, _rotary_fake),
    ("silu_mul", reference.silu_mul, _fake_like("silu_mul", "gate")),
    ("packed_linear", reference.packed_linear, _packed_linear_fake),
    ("conv_step", state_steps.conv_step, _fake_like("conv_step", "x")),
    ("delta_step", state_steps.delta_step, _delta_fake),
    ("delta_gates", state_steps.delta_gates, _gates_fake),
    ("conv_chunks", state_chunks.conv_chunks, _conv_chunks_fake),
    ("delta_chunks", state_chunks.delta_chunks, _delta_fake),
    ("prefetch", _prefetch, _prefetch_fake),
    ("split_plan", split_plan_reference, _split_plan_fake),
):
    _library.impl(_name, _kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(add_op_namespace_prefix(_name), _fake, lib=_library)
    if _name.startswith(("append", "decode")):
        _library.impl(_name, _resolving(_name), "Negative")
