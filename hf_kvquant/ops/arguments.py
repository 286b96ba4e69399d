"""The argument checks of `append` and `decode` when the reference runs: csrc/args.cpp in Python.

The compiled ops refuse what they could read or write out of bounds, before they write anything. PyTorch would find some
of these mistakes halfway through and broadcast over the others. This file makes the same checks in the same order and
names the same argument; `tests/test_fuzz_ops.py` compares the two call by call. A few requirements are the kernels'
alone: contiguous rows, aligned addresses, numbers that fit an int.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor

from ..spec.formats import BLOCK_SIZE, STORAGE_IDS, TOKEN_ALIGNMENT

_DENSE = (torch.float32, torch.float16, torch.bfloat16)
_LARGEST = 2**31 - 1
# The most tokens that a ring counts, so that sums of positions fit an int. Mirrored in csrc/format.h.
MAX_RING_LENGTH = 2**30
_NAMES = {number: name for name, number in STORAGE_IDS.items()}
_MADE = "Planes are made by KVFormat.allocate."
_FOR_ANOTHER_BATCH = (
    "Was this cache filled for another batch? Use batch_select_indices, batch_repeat_interleave or reset."
)
_COUNTERS = "Make them with torch.zeros(ops.NUM_COUNTERS, dtype=torch.int32)."

Arguments = Mapping[str, Any]


def check_append(where: str, arguments: Arguments) -> None:
    """Refuse tokens that cannot be appended.

    Args:
        where: The op's name.
        arguments: By their names in its schema.

    Raises:
        ValueError: An argument does not fit; the message names it.
    """
    _check_kinds(where, arguments)
    head_dims = _check_planes(where, arguments)
    _check_ring(where, arguments)
    _check_new_shapes(where, arguments, head_dims)
    _check_lengths(where, arguments)
    _check_tail_dtypes(where, arguments)
    _check_transform(where, arguments, head_dims["key"])
    _check_memory(where, arguments)
    _check_counts(where, arguments, arguments["key"].shape[2])
    _check_factors(where, arguments)


def check_decode(arguments: Arguments, num_counters: int) -> None:
    """Refuse a query that cannot attend, and new tokens that cannot be appended. See `check_append`.

    Args:
        arguments: By their names in the schema.
        num_counters: How many counters there must be, if any are given.
    """
    where = "decode"
    _check_kinds(where, arguments)
    head_dims = _check_planes(where, arguments)
    _check_ring(where, arguments)
    codes, query = arguments["key_codes"], arguments["query"]
    _check_dense(where, "query", query)
    _check_cache(where, "query", "batch", codes.shape[0], query.shape[0], _FOR_ANOTHER_BATCH)
    num_q_heads, num_kv_heads = query.shape[1], codes.shape[1]
    if num_q_heads == 0 or num_q_heads % num_kv_heads != 0:
        problem = f"must have a multiple of {num_kv_heads} heads, the cache's key-value heads, got {num_q_heads}."
        _refuse(where, "query", f"{problem} Was this cache filled by another model?")
    _check_cache(where, "query", "head_dim", head_dims["key"], query.shape[3])
    _check_lengths(where, arguments)
    counters = arguments["counters"]
    if counters is not None and (counters.dtype != torch.int32 or counters.shape != (num_counters,)):
        expected = f"must be {[num_counters]} int32"
        _refuse(where, "counters", f"{expected}, got {list(counters.shape)} {counters.dtype}. {_COUNTERS}")
    for name in ("sinks", "alibi_slopes"):
        x = arguments[name]
        if x is not None and (x.dtype != torch.float32 or x.shape != (num_q_heads,)):
            expected = f"must be {[num_q_heads]} float32, one number per query head"
            _refuse(where, name, f"{expected}, got {list(x.shape)} {x.dtype}.")
    largest, smallest = torch.finfo(torch.float32).max, torch.finfo(torch.float32).tiny
    if not abs(arguments["softmax_scale"]) <= largest:
        _refuse(where, "softmax_scale", f"must be a finite float32 number, got {arguments['softmax_scale']}.")
    if arguments["softcap"] != 0 and not smallest <= arguments["softcap"] <= largest:
        _refuse(where, "softcap", f"must be positive, or 0 for none, got {arguments['softcap']}.")
    for name in ("sliding_window", "num_splits"):
        _check_count(where, name, arguments[name])
    capacity, q_len = codes.shape[2], query.shape[2]
    if arguments["is_ring"] and not 1 <= arguments["sliding_window"] <= capacity + 1 - q_len:
        expected = f"must be between 1 and {capacity + 1 - q_len} where `is_ring` with a capacity of {capacity} and"
        remedy = "Attend to fewer tokens at a time, or make a larger ring."
        _refuse(
            where, "sliding_window", f"{expected} {q_len} query tokens, got {arguments['sliding_window']}. {remedy}"
        )
    _check_transform(where, arguments, head_dims["key"])
    _check_counts(where, arguments, 0)
    _check_factors(where, arguments)
    key, value = arguments["key"], arguments["value"]
    if (key is None) != (value is None):
        expected, got = ("None", "a tensor") if key is None else ("given", "None")
        _refuse(where, "value", f"must be {expected} like `key`, got {got}. Give both or neither.")
    if key is None:
        return
    if key.ndim == 4 and key.shape[2] != query.shape[2]:
        expected = f"must have {query.shape[2]} tokens like the query"
        _refuse(where, "key", f"{expected}, got {key.shape[2]}. Append other tokens beforehand.")
    # The other checks of `check_append` are made above.
    _check_new_shapes(where, arguments, head_dims)
    _check_tail_dtypes(where, arguments)
    _check_memory(where, arguments)
    _check_counts(where, arguments, key.shape[2])


def check_results(arguments: Arguments) -> None:
    """Refuse a `decode` whose result shapes a fake cannot derive. The op itself checks everything else when it runs.

    Sizes are not compared here: a compiler would make every comparison a guard of its graph.

    Raises:
        ValueError: As `check_decode`.
    """
    _check_kinds("decode", arguments)
    _check_codes("decode", "value_codes", arguments["value_codes"])
    _check_dense("decode", "query", arguments["query"])


def check_devices(where: str, arguments: Arguments) -> None:
    """Refuse tensors on several devices. If one is on `meta`, torch calls the op's fake, which computes nothing.

    Raises:
        ValueError: A tensor is on another device than the first one; the message names it.
    """
    first = next((name for name, x in arguments.items() if isinstance(x, Tensor)), "")
    for name, x in arguments.items():
        if isinstance(x, Tensor) and x.device != arguments[first].device:
            expected = f"must be on the device of `{first}`, {arguments[first].device}"
            _refuse(where, name, f"{expected}, got {x.device}. Move the inputs, or build the cache where the model is.")


def check_prefetch(weight: Tensor, num_bytes: int) -> None:
    """Refuse more bytes than a weight has, and weights that are not contiguous.

    Raises:
        ValueError: An argument does not fit; the message names it.
    """
    if not weight.is_contiguous():
        _refuse("prefetch", "weight", "must be contiguous, got strides that are not. Call .contiguous().")
    if not 0 <= num_bytes <= weight.nbytes:
        problem = f"must be between 0 and the {weight.nbytes} bytes of `weight`, got {num_bytes}."
        _refuse("prefetch", "num_bytes", problem)


def without_lazy_negation(where: str, schema: torch.FunctionSchema, args: Iterable[Any]) -> list[Any]:
    """The arguments with lazily negated tensors (such as `z.conj().imag`) resolved: kernels read memory as it is.

    Raises:
        ValueError: A tensor that the op writes is lazily negated.
    """
    resolved = []
    for argument, x in zip(schema.arguments, args, strict=True):
        is_lazy = isinstance(x, Tensor) and x.is_neg()
        if is_lazy and argument.is_write:
            problem = "must hold its numbers as they are, got a view that negates them. Call .resolve_neg()."
            _refuse(where, argument.name, problem)
        resolved.append(x.resolve_neg() if is_lazy else x)
    return resolved


# --- the parts --------------------------------------------------------------------------------------------------------


def _refuse(where: str, name: str, problem: str) -> NoReturn:
    raise ValueError(f"{where}: `{name}` {problem}")


def _check_kinds(where: str, arguments: Arguments) -> None:
    """No required tensor is missing, and all are dense and on one device."""
    for name in (*(("key", "value") if where == "append" else ("query",)), "key_codes", "value_codes", "lengths"):
        if name in arguments and arguments[name] is None:
            _refuse(where, name, "must be a tensor, got None.")
    check_devices(where, arguments)
    for name, x in arguments.items():
        if isinstance(x, Tensor) and x.layout != torch.strided:
            _refuse(where, name, f"must be a dense tensor, got layout {x.layout}. Call .to_dense().")


def _check_cache(
    where: str, name: str, what: str, expected: int, got: int, remedy: str = "Was this cache filled by another model?"
) -> None:
    if expected != got:
        _refuse(where, name, f"must have {what} {expected} like the cache, got {got}. {remedy}")


def _check_new_shapes(where: str, arguments: Arguments, head_dims: Mapping[str, int]) -> None:
    """New tokens fit the planes. `head_dims` are by side."""
    codes, key, value = arguments["key_codes"], arguments["key"], arguments["value"]
    for name in ("key", "value"):
        _check_dense(where, name, arguments[name])
    for name, x in (("key", key), ("value", value)):
        _check_cache(where, name, "batch", codes.shape[0], x.shape[0], _FOR_ANOTHER_BATCH)
        _check_cache(where, name, "num_kv_heads", codes.shape[1], x.shape[1])
        if x.shape[2] != key.shape[2]:
            _refuse(where, name, f"must have {key.shape[2]} tokens like the keys, got {x.shape[2]}.")
        _check_cache(where, name, "head_dim", head_dims[name], x.shape[3])


def _check_tail_dtypes(where: str, arguments: Arguments) -> None:
    for name in ("key", "value"):
        x, tail = arguments[name], arguments[f"{name}_tail"]
        if tail is not None and tail.dtype != x.dtype:
            remedy = "Start a new cache after casting the model."
            _refuse(where, name, f"must be {tail.dtype} like `{name}_tail`, got {x.dtype}. {remedy}")


def _check_count(where: str, name: str, count: int) -> None:
    if not 0 <= count <= _LARGEST:
        _refuse(where, name, f"must be between 0 and {_LARGEST}, got {count}.")


def _check_dense(where: str, name: str, x: Tensor) -> None:
    if x.ndim != 4:
        _refuse(where, name, f"must be [batch, heads, tokens, head_dim], got {list(x.shape)}.")
    if x.dtype not in _DENSE:
        remedy = "Load the model in one of these dtypes."
        _refuse(where, name, f"must be float32, float16 or bfloat16, got {x.dtype}. {remedy}")


def _check_codes(where: str, name: str, codes: Tensor) -> None:
    if codes.ndim != 4:
        _refuse(where, name, f"must be [batch, num_kv_heads, capacity, row], got {list(codes.shape)}. {_MADE}")


def _check_planes(where: str, arguments: Arguments) -> dict[str, int]:
    """The planes of both sides fit. Returns their head_dims."""
    head_dims = {side: _check_side(where, side, arguments) for side in ("key", "value")}
    key_codes, value_codes = arguments["key_codes"], arguments["value_codes"]
    if key_codes.shape[:3] != value_codes.shape[:3]:
        expected = f"must have batch, heads and capacity of the keys, {list(key_codes.shape)}"
        _refuse(where, "value_codes", f"{expected}, got {list(value_codes.shape)}. {_MADE}")
    return head_dims


def _check_ring(where: str, arguments: Arguments) -> None:
    """What rings require in addition."""
    if not arguments["is_ring"]:
        return
    capacity, sink_length = arguments["key_codes"].shape[2], arguments["sink_length"]
    if capacity == 0 or capacity % BLOCK_SIZE != 0:
        expected = f"must have a capacity that is a positive multiple of {BLOCK_SIZE} where `is_ring`"
        _refuse(where, "key_codes", f"{expected}, got {capacity}. {_MADE}")
    if sink_length != 0:
        remedy = "The first tokens slide out of a ring."
        _refuse(where, "sink_length", f"must be 0 where `is_ring`, got {sink_length}. {remedy}")


def _check_side(where: str, side: str, arguments: Arguments) -> int:
    codes, scale, zero = (arguments[f"{side}_{plane}"] for plane in ("codes", "scale", "zero"))
    storage_id, clip_ratio = arguments[f"{side}_storage"], arguments[f"{side}_clip_ratio"]
    if storage_id not in _NAMES:
        _refuse(where, f"{side}_storage", f"must be one of {STORAGE_IDS}, got {storage_id}.")
    storage = _NAMES[storage_id]
    name = f"{side}_codes"
    _check_codes(where, name, codes)
    if codes.dtype not in (_DENSE if storage == "none" else (torch.uint8,)):
        expected = "float32, float16 or bfloat16" if storage == "none" else "uint8"
        _refuse(where, name, f"must be {expected} for storage '{storage}', got {codes.dtype}. {_MADE}")
    _, num_heads, capacity, row = codes.shape
    head_dim: int = row * (2 if storage == "int4" else 1)
    if head_dim == 0 or head_dim % 8 != 0:
        _refuse(where, name, f"must have a head_dim that is a multiple of 8, got {head_dim}. {_MADE}")
    if num_heads == 0:
        _refuse(where, name, f"must have at least one head, got {list(codes.shape)}. {_MADE}")
    if capacity % TOKEN_ALIGNMENT != 0:
        _refuse(where, name, f"must have a capacity that is a multiple of {TOKEN_ALIGNMENT}, got {capacity}. {_MADE}")
    if (scale is None) != (storage == "none"):
        expected, got = ("None", "a tensor") if storage == "none" else ("given", "None")
        _refuse(where, f"{side}_scale", f"must be {expected} for storage '{storage}', got {got}. {_MADE}")
    is_integer = storage in ("int8", "int4")
    if zero is not None and not is_integer:
        _refuse(where, f"{side}_zero", f"must be None for storage '{storage}', got a tensor. {_MADE}")
    if not (clip_ratio == 1 or (is_integer and 0 < clip_ratio < 1)):
        expected = "above 0 and at most 1" if is_integer else "1 where codes are no integers"
        _refuse(where, f"{side}_clip_ratio", f"must be {expected}, got {clip_ratio}. KVFormat.clip_ratio decides it.")
    may_have_blocks = side == "key" and storage == "int4" and zero is not None
    has_blocks = _check_tail(where, side, arguments, head_dim, storage != "none", may_have_blocks)
    if has_blocks and capacity % BLOCK_SIZE != 0:
        expected = f"must have a capacity that is a multiple of {BLOCK_SIZE} where every channel has a scale"
        _refuse(where, name, f"{expected}, got {capacity}. {_MADE}")
    for kind, plane in (("scale", scale), ("zero", zero)):
        if plane is not None:
            _check_scale(where, f"{side}_{kind}", plane, codes, head_dim, has_blocks)
    if scale is not None and zero is not None and zero.shape != scale.shape:
        _refuse(where, f"{side}_zero", f"must be {list(scale.shape)} like the scale, got {list(zero.shape)}. {_MADE}")
    return head_dim


def _check_tail(
    where: str, side: str, arguments: Arguments, head_dim: int, is_quantized: bool, may_have_blocks: bool
) -> bool:
    """Returns whether the tail is that of granularity `channel`."""
    codes, tail = arguments[f"{side}_codes"], arguments[f"{side}_tail"]
    sinks, window = arguments["sink_length"], arguments["residual_length"]
    _check_count(where, "sink_length", sinks)
    _check_count(where, "residual_length", window)
    name, is_wanted = f"{side}_tail", is_quantized and sinks + window > 0
    if tail is None:
        if is_wanted:
            expected = f"must be given for a `sink_length` of {sinks} and a `residual_length` of {window}"
            _refuse(where, name, f"{expected}, got None. {_MADE}")
        return False
    if tail.dtype not in _DENSE:
        _refuse(where, name, f"must be float32, float16 or bfloat16, got {tail.dtype}. {_MADE}")
    has_blocks = may_have_blocks and tail.ndim == 4 and tail.shape[2] > sinks + window
    if not (is_wanted or has_blocks):
        _refuse(where, name, f"must be None without dense windows, got a tensor. {_MADE}")
    ring = (-(-window // BLOCK_SIZE) + 1) * BLOCK_SIZE if has_blocks else window
    expected_shape = [*codes.shape[:2], sinks + ring, head_dim]
    if list(tail.shape) != expected_shape:
        _refuse(where, name, f"must be {expected_shape} like the codes, got {list(tail.shape)}. {_MADE}")
    return has_blocks


def _check_scale(where: str, name: str, plane: Tensor, codes: Tensor, head_dim: int, has_blocks: bool) -> None:
    if plane.dtype != torch.float16:
        _refuse(where, name, f"must be float16, got {plane.dtype}. {_MADE}")
    batch, heads, capacity, _ = codes.shape
    shape = list(plane.shape)
    if has_blocks:
        blocks = [batch, heads, capacity // BLOCK_SIZE, head_dim]
        if shape != blocks:
            _refuse(where, name, f"must be {blocks} where every channel has a scale, got {shape}. {_MADE}")
        return
    if plane.ndim != 4:
        _refuse(where, name, f"must be [batch, heads, groups, tokens], got {shape}. {_MADE}")
    groups, is_frozen, is_shared = shape[2], shape[3] == 1, shape[1] == 1 and heads > 1
    has_heads = is_shared or (shape[1] == heads and not (is_frozen and heads > 1))
    if shape[0] != batch or not has_heads or not (is_frozen or shape[3] == capacity):
        expected_shape = f"[{batch}, {heads} or 1, groups, {capacity}] or [{batch}, 1, 1, 1]"
        _refuse(where, name, f"must be {expected_shape} like the codes, got {shape}. {_MADE}")
    if groups < 1 or head_dim % groups != 0 or head_dim // groups % 8 != 0:
        expected = f"must have a number of groups that cuts head_dim {head_dim} into multiples of 8"
        _refuse(where, name, f"{expected}, got {groups}. {_MADE}")
    if groups > 1 and (is_shared or is_frozen):
        expected = "must have groups only where every head and token has scales of its own"
        _refuse(where, name, f"{expected}, got {shape}. {_MADE}")


def _check_lengths(where: str, arguments: Arguments) -> None:
    for name in ("lengths", "starts"):
        x, expected = arguments[name], [arguments["key_codes"].shape[0]]
        if x is not None and x.dtype != torch.int32:
            _refuse(where, name, f"must be int32, got {x.dtype}. Call .to(torch.int32).")
        if x is not None and list(x.shape) != expected:
            _refuse(where, name, f"must be {expected}, one number per sequence of the cache, got {list(x.shape)}.")


def _check_counts(where: str, arguments: Arguments, num_new: int) -> None:
    """The numbers in lengths and starts, on a CPU only: reading them from a GPU would make the host wait."""
    lengths, starts, is_ring = arguments["lengths"], arguments["starts"], arguments["is_ring"]
    most = MAX_RING_LENGTH if is_ring else arguments["key_codes"].shape[2]
    for name, x, high in (("lengths", lengths, most), ("starts", starts, _LARGEST)):
        low = num_new if name == "lengths" else 0
        for b, number in enumerate(x.tolist() if x is not None and x.device.type == "cpu" else ()):
            if not low <= number <= high:
                room = "the tokens that a ring counts," if is_ring else "the capacity of"
                what = f"between the {low} new tokens and {room} {high}" if name == "lengths" else "at least 0"
                _refuse(where, name, f"must be {what}, got {number} for sequence {b}.")


def _check_factors(where: str, arguments: Arguments) -> None:
    """The numbers of a transform, likewise. `KeyTransform` has checked them, but tensors can be written to later."""
    center, smoothing = arguments["key_center"], arguments["key_smoothing"]
    if center is not None and center.device.type == "cpu" and not bool(center.isfinite().all()):
        _refuse(where, "key_center", "must be finite, got NaN or infinity. Was it taken from broken keys?")
    if smoothing is not None and smoothing.device.type == "cpu":
        if not bool((smoothing.isfinite() & (smoothing > 0)).all()):
            _refuse(where, "key_smoothing", "must be positive and finite, got other numbers. Use 1 for no change.")


def _check_transform(where: str, arguments: Arguments, head_dim: int) -> None:
    center, smoothing, is_rotated = (arguments[name] for name in ("key_center", "key_smoothing", "rotates_key"))
    expected = [arguments["key_codes"].shape[1], head_dim]
    for name, x in (("key_center", center), ("key_smoothing", smoothing)):
        if x is not None and (x.dtype != torch.float32 or list(x.shape) != expected):
            what = f"must be {expected} float32, one number per head and channel of the keys"
            _refuse(where, name, f"{what}, got {list(x.shape)} {x.dtype}. Was it made for another model?")
    tail, rows = arguments["key_tail"], arguments["sink_length"] + arguments["residual_length"]
    has_blocks = tail is not None and tail.shape[2] > rows
    if has_blocks and (center is not None or smoothing is not None or is_rotated):
        names = "`key_center`, `key_smoothing` and `rotates_key`"
        problem = "must be left out where every channel of the keys has a scale, got a transform."
        raise ValueError(f"{where}: {names} {problem} Outlier channels do no harm there.")


def _check_memory(where: str, arguments: Arguments) -> None:
    """No plane that is written overlaps itself or starts at the address of another tensor."""
    written = [f"{side}_{plane}" for side in ("key", "value") for plane in ("codes", "scale", "zero", "tail")]
    for name in written:
        if arguments[name] is not None and _has_overlap(arguments[name]):
            problem = "must have memory of its own for each element, got strides that share it. Call .clone()."
            _refuse(where, name, problem)
    if arguments["key"].numel() == 0 or arguments["key_codes"].numel() == 0:
        return
    others = ("key", "value", "query", "lengths", "starts", "key_center", "key_smoothing")
    owners: dict[int, str] = {}
    for name in (*written, *others):
        x = arguments.get(name)
        owner = name if x is None else owners.setdefault(x.data_ptr(), name)
        if owner != name and owner in written:
            _refuse(where, owner, f"must have memory of its own, got that of `{name}`. Call .clone().")


def _has_overlap(x: Tensor) -> bool:
    """Whether elements share memory. Also true for interleaved strides without overlap that no slicing produces."""
    if 0 in x.shape:
        return False
    extent = 1
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size > 1:
            if stride < extent:
                return True
            extent += (size - 1) * stride
    return False
