"""Op calls that are drawn at random: whole ones, and what is done to one of their arguments.

A call is a dictionary of an op's arguments by name, as the schemas in `ops/` spell them. Every tensor lies within a
larger piece of memory whose rest is known, so that a stray write shows even where no sanitizer looks (`Memory`). What
must come of a call is decided in `test_fuzz_ops.py`.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from cases import DTYPES, Case, make_formats, make_transform, poisoned, queries, tokens
from torch import Tensor

from hf_kvquant import ops
from hf_kvquant.config import PRESETS
from hf_kvquant.spec.formats import BLOCK_SIZE
from hf_kvquant.spec.planes import Planes

Call = dict[str, Any]
SIDES = ("key", "value")
PLANES = ("codes", "scale", "zero", "tail")
CANARY = 0xA5
# In the order of the schemas.
NAMES = {
    name: [argument.name for argument in getattr(torch.ops.hf_kvquant, name).default._schema.arguments]
    for name in ("append", "decode", "rms_norm", "add_rms_norm", "rotary", "silu_mul")
}
INTEGERS = (-(2**63), -(2**31), -1, 0, 1, 2, 3, 5, 64, 128, 1000, 2**31 - 1, 2**31, 2**32 + 1, 2**63 - 1, 2**70)
NUMBERS = (float("nan"), float("inf"), -float("inf"), -1.0, 0.0, 1e-300, 1e-40, 0.5, 1.0, 1.0001, 3e38, 1e39, 1e300)
LENGTHS = (-(2**31), -1, 0, 1, 2, 63, 64, 65, 127, 128, 129, 2**31 - 1)
DTYPES_OF_ANYTHING = (
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float64,
    torch.int8,
    torch.uint8,
    torch.int32,
    torch.int64,
    torch.bool,
    torch.complex64,
    torch.float8_e4m3fn,
)


class Memory:
    """Tensors within larger pieces of memory, and what those held when they were made."""

    def __init__(self, dice: random.Random, is_tight: bool) -> None:
        """`is_tight` leaves no room around, for a sanitizer to see the ends."""
        self.dice, self.is_tight = dice, is_tight
        self.pieces: list[tuple[Tensor, Tensor]] = []

    def place(self, x: Tensor, kind: int | None = None) -> Tensor:
        """A copy of `x` here, in strides that are drawn."""
        kind = self.dice.randrange(4) if kind is None else kind
        margin = 0 if self.is_tight else 64
        shape, steps = list(x.shape), [1] * x.ndim
        if kind == 1 and x.ndim > 2:  # rows farther apart
            axis = self.dice.randrange(x.ndim - 1)
            steps[axis] = 2
        order = list(range(x.ndim))
        if kind == 2 and x.ndim == 4:  # as a fused projection gives them: heads inside tokens
            order = [0, 2, 1, 3]
        sizes = [shape[axis] * steps[axis] for axis in order]
        strides, stride = [0] * x.ndim, 1
        for axis, size in zip(reversed(order), reversed(sizes), strict=True):
            strides[axis] = stride * steps[axis]
            stride *= size
        # Behind the last element nothing is left, so that a sanitizer sees where it is.
        extent = 0 if 0 in shape else 1 + sum((size - 1) * step for size, step in zip(shape, strides, strict=True))
        piece = torch.full(((extent + 2 * margin) * x.element_size(),), CANARY, dtype=torch.uint8).view(x.dtype)
        view = piece[margin:].as_strided(shape, strides, margin)
        view.copy_(x)
        self.pieces.append((piece, piece.view(torch.uint8).clone().view(x.dtype)))
        return view

    def is_as_it_was(self, *written: Tensor) -> bool:
        """Whether nothing has changed but the elements of `written`, which may be any of the tensors made here."""
        for x in written:
            if 0 not in x.shape:
                for piece, before in self.pieces:
                    if piece.untyped_storage().data_ptr() == x.untyped_storage().data_ptr():
                        before.as_strided(x.shape, x.stride(), x.storage_offset()).copy_(x)
        return all(_same_bits(piece, before) for piece, before in self.pieces)


def _same_bits(x: Tensor, y: Tensor) -> bool:
    return torch.equal(x.view(torch.uint8), y.view(torch.uint8))


# --- whole calls ------------------------------------------------------------------------------------------------------


def draw_case(dice: random.Random, is_ring: bool) -> tuple[Case, str]:
    """A small case, and the kind of its key transform, or an empty string. Of a ring, lengths may exceed capacity."""
    head_dim, value_dim = dice.choice((8, 16, 24, 32, 40, 64)), dice.choice((8, 16, 32, 40, 64))
    channel = PRESETS["int4-channel"][0]
    is_channel = dice.random() < 0.2
    key_format = channel if is_channel else dice.choice(make_formats(head_dim))
    value_format = dice.choice(make_formats(value_dim))
    batch, q_len, capacity = (
        dice.randint(1, 3),
        dice.choice((0, 1, 1, 2, 5, 17)),
        128 if is_channel or is_ring else 64 * dice.randint(1, 4),
    )
    most = dice.choice((capacity, 700, 2**30)) if is_ring else capacity
    lengths = tuple(dice.choice((q_len, most, dice.randint(q_len, most))) for _ in range(batch))
    starts = None
    if dice.random() < 0.5:
        starts = tuple(dice.choice((0, length, capacity, 2**31 - 1, dice.randint(0, length))) for length in lengths)
    is_windowed = dice.random() < 0.4 and (key_format.is_quantized or value_format.is_quantized)
    windows = (
        {"sink_length": 0 if is_ring else dice.choice((0, 1, 3)), "residual_length": dice.choice((0, 2, 9, 64))}
        if is_windowed
        else {}
    )
    case = Case(
        (key_format, value_format),
        head_dim,
        dice.choice(DTYPES),
        dice.choice((1, 2, 3)),
        q_len,
        lengths,
        starts,
        num_kv_heads=dice.randint(1, 3),
        value_dim=value_dim,
        capacity=capacity,
        slack=dice.choice((0, 0, 5, 64)),
        **(windows if is_windowed else {}),
    )
    kind = "" if not key_format.is_quantized else dice.choice(("", "", "center", "smooth", "rotate"))
    return case, kind


def draw_planes(case: Case, side: int) -> Planes:
    """Planes that hold random codes, and scales that are finite, everywhere."""
    kv_format, head_dim = case.formats[side], case.head_dims()[side]
    shape = case.batch, case.num_kv_heads, case.capacity, head_dim
    planes = poisoned(kv_format, *shape[:2], head_dim, case.capacity, case.dtype, slack=case.slack, **case.windows)
    x = torch.randn(shape)
    if not kv_format.is_quantized:
        planes.codes.copy_(x)
        return planes
    if kv_format.storage == "fp8":
        planes.codes.copy_(x.to(torch.float8_e4m3fn).view(torch.uint8))
    scale = 0.02 if kv_format.storage == "int8" else 0.3
    planes.scale.uniform_(scale / 2, scale)
    if planes.zero is not None:
        planes.zero.uniform_(-2.0, 0.0)
    if planes.tail is not None:
        planes.tail.normal_()
    return planes


def has_pages(case: Case) -> bool:
    """Whether its rows can be in pages."""
    return not case.layout.has_tail and all(each.granularity != "tensor" for each in case.formats)


def in_pages(planes: Planes, table: Tensor) -> Planes:
    """The same rows in pages, where a page table puts them."""

    def cut(plane: Tensor, axis: int) -> Tensor:
        pages = plane.unflatten(axis, (-1, BLOCK_SIZE)).movedim(axis, 1).flatten(0, 1)
        return pages[table.flatten().argsort()]

    scale, zero = (None if each is None else cut(each, 3) for each in (planes.scale, planes.zero))
    return Planes(cut(planes.codes, 2), scale, zero)


def draw_call(dice: random.Random, memory: Memory, name: str) -> Call:
    """A call of an op that has nothing wrong with it."""
    torch.manual_seed(dice.getrandbits(32))
    if name not in ("append", "decode"):
        return draw_layer_call(dice, memory, name)
    is_ring = dice.random() < 0.25
    case, kind = draw_case(dice, is_ring)
    call: Call = {}
    if name == "decode":
        call["query"] = memory.place(queries(case))
    has_new = name == "append" or dice.random() < 0.5
    for side, head_dim in zip(SIDES, case.head_dims(), strict=True):
        call[side] = memory.place(tokens(case, case.q_len, head_dim)) if has_new else None
    planes = [draw_planes(case, index) for index in range(2)]
    call["page_table"] = None
    if not is_ring and case.capacity % BLOCK_SIZE == 0 and has_pages(case) and dice.random() < 0.3:
        table = torch.randperm(case.batch * case.capacity // BLOCK_SIZE).int().view(case.batch, -1)
        call["page_table"] = memory.place(table, 0)
        planes = [in_pages(each, table) for each in planes]
    for each, side in zip(planes, SIDES, strict=True):
        # Rows of codes and tails, and the channels of blocks, are contiguous; that much is asked of planes.
        call[f"{side}_planes"] = [memory.place(x) for x in each.tensors()]
    call["lengths"] = memory.place(case.lengths_tensor(), 0)
    starts = case.starts_tensor()
    call["starts"] = None if starts is None else memory.place(starts, 0)
    transform = make_transform(kind, case.head_dim, case.num_kv_heads) if kind else None
    kinds = {
        "key_center": None if transform is None or transform.center is None else memory.place(transform.center, 0),
        "key_smoothing": None
        if transform is None or transform.smoothing is None
        else memory.place(transform.smoothing, 0),
        "rotates_key": transform is not None and transform.is_rotated,
        "layout": list((case.ring if is_ring else case.layout).packed),
    }
    if name == "decode":
        per_head = [memory.place(torch.randn(case.num_q_heads), 0) if dice.random() < 0.3 else None for _ in range(2)]
        call |= {
            "counters": None,
            "sinks": per_head[0],
            "alibi_slopes": per_head[1],
            "softmax_scale": case.head_dim**-0.5,
            "softcap": dice.choice((0.0, 0.0, 5.0)),
            "sliding_window": dice.choice((1, 20, 129 - case.q_len) if is_ring else (0, 0, 1, 20, 2**31 - 1)),
            "num_splits": dice.choice((0, 0, 1, 2, 7, 2**31 - 1)),
            "split_plan": None,
        }
        if not is_ring and call["num_splits"] == 0 and dice.random() < 0.5:
            num_slots = dice.choice((0, 2, 40))
            plan = ops.split_plan(case.lengths_tensor(), num_slots, starts, dice.choice((1, 2)) * num_slots)
            call["split_plan"] = memory.place(plan, 0)
    call |= kinds
    return {argument: call[argument] for argument in NAMES[name]}


def draw_layer_call(dice: random.Random, memory: Memory, name: str) -> Call:
    """A call of an op that lies between linear layers."""
    dtype = dice.choice(DTYPES)
    if name == "rotary":
        batch, q_len, head_dim = dice.randint(1, 3), dice.randint(1, 5), dice.choice((2, 8, 64))
        rotary_dim = dice.choice((2, head_dim, head_dim))
        angles = [torch.randn(dice.choice((1, batch)), q_len, rotary_dim).to(dtype)] * 2
        heads = [torch.randn(batch, dice.randint(1, 4), q_len, head_dim).to(dtype) for _ in range(2)]
        return {argument: memory.place(x) for argument, x in zip(NAMES[name], (*heads, *angles), strict=True)}
    shape = *(dice.randint(1, 4) for _ in range(dice.randint(1, 2))), 8 * dice.randint(1, 9)
    call: Call = {}
    for argument in NAMES[name]:
        if argument == "eps":
            call[argument] = 1e-6
        elif argument == "is_zero_centered":
            call[argument] = dice.random() < 0.5
        elif (name, argument) == ("rms_norm", "gate") and dice.random() < 0.5:
            call[argument] = None
        elif argument == "mean":
            call[argument] = None if dice.random() < 0.5 else memory.place(torch.rand(*shape[:-1], 1) + 0.5)
        else:
            x = torch.randn(shape[-1:] if argument == "weight" else shape).to(dtype)
            call[argument] = memory.place(x, 0)
    return call


# --- what is done to an argument --------------------------------------------------------------------------------------


def broken(dice: random.Random, memory: Memory, call: Call) -> str:
    """Change one argument in place; says which, and how."""
    name = dice.choice(list(call))
    value = call[name]
    if isinstance(value, list) and value and dice.random() < 0.9:  # one of them
        each, i = dict(enumerate(value)), dice.randrange(len(value))
        how = change(dice, memory, call, each, i)
        call[name] = list(each.values())
        return f"{name}: {how}"
    return change(dice, memory, call, call, name)


def change(dice: random.Random, memory: Memory, call: Call, values: dict[Any, Any], name: Any) -> str:
    """Change one of `values` in place; says which, and how."""
    value = values[name]
    if isinstance(value, list):
        others = value[:-1], [*value, *value[-1:]], [], None
        values[name] = dice.choice(others)
        return f"{name} of another length"
    if isinstance(value, bool):
        values[name] = not value
        return f"{name} = {values[name]}"
    if isinstance(value, int):
        values[name] = dice.choice(INTEGERS)
        return f"{name} = {values[name]}"
    if isinstance(value, float):
        values[name] = dice.choice(NUMBERS)
        return f"{name} = {values[name]}"
    if value is None:
        others = [x for x in tensors(call) if is_whole(x)]
        values[name] = memory.place(dice.choice(others), 0) if dice.random() < 0.5 else torch.zeros(dice.randint(0, 3))
        return f"{name} given"
    if dice.random() < 0.05:  # one tensor twice
        values[name] = dice.choice(tensors(call))
        return f"{name} = another"
    if not is_whole(value):  # broken already
        return ""
    how = dice.choice(CHANGES)
    changed = how(dice, memory, value)
    if changed is NotImplemented:
        return ""
    values[name] = changed
    return f"{how.__name__}({name})"


def tensors(call: Call) -> list[Tensor]:
    """All tensors of a call, those in lists too."""
    lists = (x if isinstance(x, list) else [x] for x in call.values())
    return [x for each in lists for x in each if isinstance(x, Tensor)]


def is_whole(x: Any) -> bool:
    """Whether there is a tensor with numbers to change."""
    return isinstance(x, Tensor) and (x.layout, x.device.type) == (torch.strided, "cpu")


def left_out(dice: random.Random, memory: Memory, x: Tensor) -> Any:
    return None


def of_another_type(dice: random.Random, memory: Memory, x: Tensor) -> Any:
    return dice.choice((3, "x", 1.5, [1, 2], object()))


def of_another_dtype(dice: random.Random, memory: Memory, x: Tensor) -> Any:
    if x.is_complex():  # changed already, and another cast would warn
        return NotImplemented
    return memory.place(x.to(dice.choice(DTYPES_OF_ANYTHING)), 0)


def transposed(dice: random.Random, memory: Memory, x: Tensor) -> Any:
    return NotImplemented if x.ndim < 2 else x.transpose(*dice.sample(range(x.ndim), 2))


def without_an_axis(dice: random.Random, memory: Memory, x: Tensor) -> Any:
    return NotImplemented if 0 in x.shape or not x.ndim else x.select(dice.randrange(x.ndim), 0)


def with_an_axis(dice: random.Random, memory: Memory, x: Tensor) -> Tensor:
    return x.unsqueeze(dice.randint(0, x.ndim))


def narrowed(dice: random.Random, memory: Memory, x: Tensor) -> Any:
    if not x.ndim:
        return NotImplemented
    axis = dice.randrange(x.ndim)
    return (
        x.narrow(axis, dice.randint(0, x.shape[axis]), 0)
        if dice.random() < 0.5
        else x.narrow(axis, 0, dice.randint(0, x.shape[axis]))
    )


def widened(dice: random.Random, memory: Memory, x: Tensor) -> Any:
    if not x.ndim:
        return NotImplemented
    axis = dice.randrange(x.ndim)
    return memory.place(torch.cat([x, x.narrow(axis, 0, min(dice.choice((1, 8, 64)), x.shape[axis]))], axis), 0)


def expanded(dice: random.Random, memory: Memory, x: Tensor) -> Any:
    """All along an axis the same memory; the shape stays."""
    if not x.ndim or 0 in x.shape:
        return NotImplemented
    axis = dice.randrange(x.ndim)
    return x.narrow(axis, 0, 1).expand(x.shape)


def overlapping(dice: random.Random, memory: Memory, x: Tensor) -> Any:
    """Rows that begin before the last one has ended."""
    axes = [axis for axis in range(x.ndim - 1) if x.shape[axis] > 1]
    if not axes or 0 in x.shape:
        return NotImplemented
    strides = list(x.stride())
    strides[dice.choice(axes)] = dice.choice((1, 2, 4))
    extent = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, strides, strict=True))
    has_room = (x.storage_offset() + extent) * x.element_size() <= x.untyped_storage().nbytes()
    return x.as_strided(x.shape, strides) if has_room else NotImplemented


def stepped(dice: random.Random, memory: Memory, x: Tensor) -> Any:
    """Every other element along an axis: fewer of them, or as many of a larger tensor."""
    if not x.ndim:
        return NotImplemented
    axis = dice.randrange(x.ndim)
    index = [slice(None)] * x.ndim
    index[axis] = slice(None, None, 2)
    return (x.repeat_interleave(2, axis) if dice.random() < 0.5 else x)[tuple(index)]


def on_meta(dice: random.Random, memory: Memory, x: Tensor) -> Tensor:
    return x.to("meta")


def sparse(dice: random.Random, memory: Memory, x: Tensor) -> Any:
    return x.to_sparse() if x.dtype in DTYPES else NotImplemented


def with_gradient(dice: random.Random, memory: Memory, x: Tensor) -> Any:
    return x.detach().requires_grad_() if x.is_floating_point() else NotImplemented


def lazily_negated(dice: random.Random, memory: Memory, x: Tensor) -> Any:
    return torch._neg_view(x) if x.is_floating_point() else NotImplemented


def unaligned(dice: random.Random, memory: Memory, x: Tensor) -> Any:
    """At an address that is no multiple of the size of its elements."""
    if x.element_size() == 1 or 0 in x.shape:
        return NotImplemented
    data = bytearray(x.element_size() - 1) + bytearray(x.contiguous().view(torch.uint8).numpy().tobytes())
    return torch.frombuffer(data, dtype=x.dtype, offset=x.element_size() - 1).view(x.shape)


def with_odd_numbers(dice: random.Random, memory: Memory, x: Tensor) -> Any:
    """NaN, infinities (which no scale is), or for integers what no length is."""
    if 0 in x.shape or x.dtype == torch.uint8:
        return NotImplemented
    odd = (float("nan"), float("inf"), -float("inf")) if x.dtype != torch.float16 else (float("nan"),)
    number = dice.choice(odd if x.is_floating_point() else LENGTHS)
    changed = x.clone()
    changed[tuple(dice.randrange(size) for size in x.shape)] = number
    return memory.place(changed, 0)


CHANGES: list[Callable[[random.Random, Memory, Tensor], Any]] = [
    left_out,
    of_another_type,
    of_another_dtype,
    transposed,
    without_an_axis,
    with_an_axis,
    narrowed,
    widened,
    expanded,
    overlapping,
    stepped,
    on_meta,
    sparse,
    with_gradient,
    lazily_negated,
    unaligned,
    with_odd_numbers,
]
