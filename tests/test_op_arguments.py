"""What fuzzing (`test_fuzz_ops.py`) has found, call by call: of the compiled ops, and of the reference in their place.

Every call here has one thing wrong, or only odd. What is refused for its shape or dtype is in `test_ops.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import REFUSED, Case, filled, queries, tokens
from compare import assert_close, assert_same
from test_ops import ANOTHER_BATCH, good_arguments, op_arguments
from tolerances import attention_bound, lse_bound
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hf_kvquant import KVFormat, ops
from hf_kvquant.config import PRESETS
from hf_kvquant.spec import reference
from hf_kvquant.spec.codes import STORAGE_IDS

INT4 = KVFormat("int4", symmetric=False)
PLANES = ("codes", "scale", "zero", "tail")
OPS = ("append", "append_reference", "decode", "decode_reference")


def call_of(name: str, kv_format: KVFormat = INT4, like: dict[str, Any] | None = None) -> dict[str, Any]:
    """A good call, by argument; a copy of `like`, if that is given."""
    if like is not None:
        return {argument: copied(x) for argument, x in like.items()}
    append, decode = op_arguments("cpu", kv_format)
    names = [argument.name for argument in overload(name)._schema.arguments]
    return dict(zip(names, append if name.startswith("append") else decode, strict=True))


def copied(x: Any) -> Any:
    if isinstance(x, list):
        return [copied(each) for each in x]
    return x.clone() if isinstance(x, Tensor) else x


def overload(name: str) -> Any:
    return getattr(torch.ops.hf_kvquant, name).default


def refused(name: str, call: dict[str, Any], message: str) -> None:
    """By a `ValueError` with this message, before anything is written."""
    before = {id(x): x.clone() for x in tensors(call) if x.device.type != "meta"}
    with pytest.raises(REFUSED, match=f"^{name.partition('_')[0]}: {message}"):
        overload(name)(**call)
    for x in tensors(call):
        if id(x) in before:
            assert_same(x.to_dense(), before[id(x)].to_dense().cpu(), message)


def tensors(call: dict[str, Any]) -> list[Tensor]:
    lists = (x if isinstance(x, list) else [x] for x in call.values())
    return [x for each in lists for x in each if isinstance(x, Tensor)]


def changed(call: dict[str, Any], argument: str, change: Callable[[Tensor], Any]) -> dict[str, Any]:
    """The call with one tensor changed. `argument` may name a plane, such as `key_planes.scale`."""
    name, _, plane = argument.partition(".")
    if not plane:
        return {**call, name: change(call[name])}
    planes, i = list(call[name]), PLANES.index(plane)
    planes[i] = change(planes[i])
    return {**call, name: planes}


@pytest.mark.parametrize("argument", ["value", "key_planes.codes", "value_planes.scale", "lengths"])
@pytest.mark.parametrize("name", OPS)
def test_none_is_no_tensor(name: str, argument: str) -> None:
    with pytest.raises((*REFUSED, TypeError, RuntimeError), match=f"{argument.partition('.')[0]}|Expected a value of"):
        overload(name)(**changed(call_of(name), argument, lambda x: None))


@pytest.mark.parametrize("argument", ["lengths", "value_planes.scale", "key_smoothing"])
@pytest.mark.parametrize("name", OPS)
def test_tensors_without_numbers_are_refused(name: str, argument: str) -> None:
    """With one of them torch calls the op's fake, which used to return memory as it was, and to append nothing."""
    call = changed(call_of(name), argument, lambda x: x.to("meta"))
    said = argument.partition(".")[0]
    refused(name, call, f"`{said}` must be on the device of `(key|query)`, cpu, got meta\\. Move the inputs")


@pytest.mark.parametrize("head_dim", [0, 12])
@pytest.mark.parametrize("preset, per_byte", [("none", 1), ("int4-channel", 2)])
@pytest.mark.parametrize("name", OPS)
def test_heads_that_are_no_multiple_of_8_are_refused(name: str, preset: str, per_byte: int, head_dim: int) -> None:
    """Here nothing else, such as scales of groups, speaks of them."""
    call = call_of(name, PRESETS[preset][0])
    call = changed(call, "key_planes.codes", lambda x: x[..., : head_dim // per_byte])
    refused(name, call, f".*multiple of 8.*, got {head_dim}\\.")


@pytest.mark.parametrize("name", ["append_reference", "decode_reference"])
def test_what_only_the_last_step_would_notice_is_refused_at_first(name: str) -> None:
    """Keys used to be written before PyTorch found out about values."""
    for argument, change in (
        ("value", lambda x: x[..., :32]),
        ("value", lambda x: x[:, :1]),
        ("value_planes.scale", lambda x: x[..., :64]),
        ("value_planes.codes", Tensor.long),
        ("lengths", lambda x: x + 200),
        ("lengths", lambda x: x * 0),
    ):
        call = call_of(name, KVFormat("int4", "group", 32, symmetric=False))
        refused(name, changed(call, argument, change), f"`{argument}` must ")


@pytest.mark.parametrize("argument", ["key", "key_planes.scale", "key_smoothing"])
@pytest.mark.parametrize("name", OPS)
def test_sparse_tensors_are_refused(name: str, argument: str) -> None:
    call = changed(call_of(name), argument, Tensor.to_sparse)
    said = argument.partition(".")[0]
    refused(name, call, f"`{said}` must be a dense tensor, got layout torch.sparse_coo\\. Call")


@pytest.mark.parametrize(
    "change",
    [
        lambda layout: layout[:-1],
        lambda layout: [*layout, 0],
        lambda layout: [len(STORAGE_IDS), *layout[1:]],
        lambda layout: [*layout[:-3], -1, *layout[-2:]],
        lambda layout: [*layout[:-1], 2],
        lambda layout: [*layout[:3], 2, *layout[4:]],
    ],
)
@pytest.mark.parametrize("name", OPS)
def test_layouts_that_are_none_are_refused(name: str, change: Any) -> None:
    call = call_of(name)
    refused(name, {**call, "layout": change(call["layout"])}, "`layout` must be what KVLayout.packed gives, got \\[")


@pytest.mark.parametrize("name", OPS)
def test_lazily_negated_tensors(name: str) -> None:
    """What is read counts as if it were negated; what is written must not be."""
    call = call_of(name)
    expected = call_of(name, like=call)
    call["key"], expected["key"] = torch._neg_view(call["key"]), -call["key"]
    results, others = overload(name)(**call), overload(name)(**expected)
    for x, other in zip(results or (), others or (), strict=True):
        assert_same(x, other, name)
    assert_same(call["key_planes"][0], expected["key_planes"][0], name)
    with pytest.raises(REFUSED, match=r"`value_planes` must hold its numbers as they are, .*\.resolve_neg\(\)"):
        overload(name)(**changed(call, "value_planes.scale", torch._neg_view))


def unaligned(x: Tensor) -> Tensor:
    data = bytearray(1) + bytearray(x.contiguous().view(torch.uint8).numpy().tobytes())
    return torch.frombuffer(data, dtype=x.dtype, offset=1).view(x.shape)


@pytest.mark.parametrize("argument", ["key", "key_planes.scale", "lengths", "alibi_slopes", "key_center"])
def test_addresses_that_numbers_do_not_have_are_refused(argument: str) -> None:
    call, size = changed(call_of("decode"), argument, unaligned), 2 if "scale" in argument else 4
    refused("decode", call, f"`{argument}` must start at a multiple of {size} bytes, got a view that does not\\. Call")


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("plane", PLANES)
@pytest.mark.parametrize("name", ["append", "decode"])
def test_written_planes_that_share_memory_with_themselves_are_refused(name: str, plane: str, axis: int) -> None:
    """Which token stays would be up to the order of threads."""
    case = Case((PRESETS["int4-channel"][0], INT4), 64, num_q_per_kv=2, lengths=(9, 200), capacity=256)
    call = call_of(name) | {"key_center": None, "key_smoothing": None, "rotates_key": False}
    call |= {"key_planes": filled(case, 0).tensors(), "value_planes": filled(case, 1).tensors()}
    call["layout"] = case.layout.packed
    argument = f"key_planes.{plane}"

    def shared(x: Tensor) -> Tensor:
        return x.narrow(axis, 0, 1).expand(x.shape)

    refused(name, changed(call, argument, shared), f"`{argument}` must have memory of its own for each element, got")
    if plane in ("codes", "tail"):
        # Rows that begin in the middle of others.
        folded = changed(
            call, argument, lambda x: x.as_strided(x.shape, [*x.stride()[:2], x.stride(2) // 2, x.stride(3)])
        )
        refused(name, folded, f"`{argument}` must have memory of its own for each element")
    if name == "decode":  # where nothing is written
        overload(name)(**{**changed(call, argument, shared), "key": None, "value": None})


@pytest.mark.parametrize("other", ["key_planes.codes", "key"])
@pytest.mark.parametrize("name", ["append", "decode"])
def test_one_tensor_twice_is_refused(name: str, other: str) -> None:
    call = call_of(name, KVFormat("none")) | {"key_center": None, "key_smoothing": None, "rotates_key": False}
    if other == "key":
        call["key"] = call["key_planes"][0][:, :, :2]
    else:
        call["value_planes"] = call["key_planes"]
    second = "key" if other == "key" else "value_planes.codes"
    refused(name, call, f"`key_planes.codes` must have memory of its own, got that of `{second}`\\. Call")


@pytest.mark.parametrize(
    ("argument", "numbers", "message"),
    [
        ("softmax_scale", (torch.nan, torch.inf, -torch.inf, 1e39), "must be a finite float32 number, got"),
        ("softcap", (torch.nan, torch.inf, 1e300, 1e-300, -1.0), "must be positive, or 0 for none, got"),
    ],
)
def test_numbers_that_float32_does_not_have(argument: str, numbers: tuple[float, ...], message: str) -> None:
    """A cap that rounds to 0 used to be none, one that rounds to infinity made all outputs NaN."""
    for number in numbers:
        refused("decode", {**call_of("decode"), argument: number}, f"`{argument}` {message}")


@pytest.mark.parametrize(
    ("argument", "number", "message"),
    [
        ("key_smoothing", 0.0, "must be positive and finite, got"),
        ("key_smoothing", torch.nan, "must be positive and finite, got"),
        ("key_center", torch.inf, "must be finite, got"),
    ],
)
@pytest.mark.parametrize("name", ["append", "decode"])
def test_factors_that_somebody_has_written_to(name: str, argument: str, number: float, message: str) -> None:
    """Not looked at on a GPU by kernels, which would have to wait for it."""
    call = call_of(name)
    call[argument][1, 3] = number
    refused(name, call, f"`{argument}` {message}")


class HostReads(TorchDispatchMode):
    """Counts numbers that the host asks a device for."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["append_reference", "decode_reference"])
def test_the_reference_takes_factors_that_have_been_checked(name: str) -> None:
    """A transform made in every call, with the checks of the constructor, would wait for a GPU each time."""
    call, counts = call_of(name), []
    assert call["key_center"] is not None and call["key_smoothing"] is not None
    for factors in ({}, {"key_center": None, "key_smoothing": None}):
        with HostReads() as reads:
            overload(name)(**{**call, **factors})
        counts.append(reads.count)
    assert counts[0] == counts[1], "the host looked at the factors"


@pytest.mark.parametrize(
    ("name", "argument"), [("append", "key"), ("append", "value"), ("decode", "query"), ("decode", "value")]
)
def test_another_batch_is_refused(name: str, argument: str) -> None:
    call = changed(call_of(name), argument, lambda x: x[:1])
    refused(name, call, rf"`{argument}` must have batch 2 like the cache, got 1\. {ANOTHER_BATCH}")
    refused(f"{name}_reference", call, rf"`{argument}` must be \[2, .*\].* like the cache, got \[1, ")


@pytest.mark.parametrize("has_new", [False, True])
def test_more_splits_than_tiles_are_as_many_as_there_are_tiles(engine: str, has_new: bool) -> None:
    """They used to take memory each: an error after appending, or a size that no longer fit a number and a crash."""
    results = []
    for num_splits in (2, 1000, 2**31 - 1) if engine == "cpu" else (2, 1000):
        torch.manual_seed(0)
        arguments = good_arguments(engine)
        arguments["new"] = arguments["new"] if has_new else None
        results.append(ops.decode(**arguments, num_splits=num_splits))
    for out, lse in results[1:]:
        if engine == "cpu":
            assert_same(out, results[0][0], "out")
            assert_same(lse, results[0][1], "lse")
        else:  # tiles are cut where a split ends
            expected, expected_lse = (x.cpu() for x in results[0])
            bound = attention_bound(expected, expected, torch.float32, 60.0, float(expected.abs().max()))
            assert_close(out, expected, bound, "out")
            assert_close(lse, expected_lse, lse_bound(expected_lse, expected_lse, 60.0), "lse")


def test_padding_may_end_where_no_token_can_be(engine: str) -> None:
    """Positions are ints, in kernels and in `starts`, and the end of the sinks behind this padding is none."""
    formats = PRESETS["int4-channel"][0], INT4
    case = Case(formats, 64, q_len=128, lengths=(128,), starts=(2**31 - 1,), sink_length=3, residual_length=0)
    planes, expected = [[filled(Case(formats, 64, lengths=(0,), sink_length=3), side) for side in (0, 1)] for _ in "ab"]
    key, value = tokens(case, 128, 64), tokens(case, 128, 64)
    starts = case.starts_tensor()
    assert starts is not None
    arguments = case.lengths_tensor().to(engine), case.layout, None, starts.to(engine)
    ours = [made.map(lambda plane: plane.to(engine)) for made in planes]
    ops.append(key.to(engine), value.to(engine), *ours, *arguments)
    for x, made, kv_format in zip((key, value), expected, formats, strict=True):
        reference.append(x, made, kv_format, case.lengths_tensor(), None, starts, **case.windows)
    assert not ours[0].codes.any() and not expected[0].codes.any(), "all of it is padding"
    out, lse = ops.decode(queries(case).to(engine), None, *ours, *arguments[:2], softmax_scale=1.0, starts=arguments[3])
    assert not out.any() and bool((lse == -torch.inf).all())


def test_queries_of_other_ranks_are_refused(device: str) -> None:
    for change in (lambda x: x[0], lambda x: x[0, 0, 0], lambda x: x[None]):
        arguments = good_arguments(device)
        arguments["query"] = change(arguments["query"])
        with pytest.raises(REFUSED, match=r"decode: `query` must be \[2, any, any, 64\] of the model's dtype, got \["):
            ops.decode(**arguments)


@pytest.mark.parametrize(
    ("argument", "change", "message"),
    [
        ("query", lambda x: x[0], r"`query` must be \[batch, heads, tokens, head_dim\], got \[4, 2, 64\]"),
        ("query", lambda x: x[None], r"`query` must be \[batch, heads, tokens, head_dim\], got \[1, 2, 4, 2, 64\]"),
        ("query", lambda x: None, r"`query` must be \[batch, heads, tokens, head_dim\], got None"),
        ("value_planes.codes", lambda x: x.flatten()[0], r"`value_planes` must be tensors of four axes, got \[\[\], "),
    ],
)
def test_fakes_refuse_what_they_cannot_read(argument: str, change: Any, message: str) -> None:
    """What their results are made from. A compiler asks the fake first, and shows what that says."""
    call = changed(call_of("decode"), argument, change)
    refused("decode_reference", call, message)
    compiled = torch.compile(lambda: overload("decode")(**call), backend="eager", fullgraph=True, dynamic=False)
    with pytest.raises(torch._dynamo.exc.TorchRuntimeError, match=f"decode: {message}"):
        compiled()


@pytest.mark.parametrize("name", ["append_reference", "decode_reference"])
def test_the_reference_takes_empty_calls(name: str) -> None:
    call = call_of(name)
    for argument in ("query", "key", "value"):
        if argument in call:
            call[argument] = call[argument][:, :, :0]
    result = overload(name)(**call)
    if name == "decode_reference":
        assert [tuple(x.shape) for x in result] == [(2, 0, 4, 64), (2, 4, 0)]


@pytest.mark.parametrize("name", OPS)
def test_planes_that_require_gradients_are_written_all_the_same(name: str) -> None:
    call = call_of(name)
    expected = call_of(name, like=call)
    call["key_planes"][1].requires_grad_()
    overload(name)(**call)
    overload(name)(**expected)
    assert_same(call["key_planes"][0], expected["key_planes"][0], name)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (
            "rms_norm",
            {"weight": torch.ones(16, dtype=torch.float16)},
            "rms_norm: `weight` must be torch.float32 on cpu",
        ),
        ("rms_norm", {"mean": torch.ones(2)}, r"rms_norm: `mean` must be \[2, 1\] dense float32, one .*, got \[2\]"),
        (
            "rms_norm",
            {"x": torch.ones(2, 16, dtype=torch.int32)},
            "rms_norm: `x` must be a dense float32, .*got torch.int32",
        ),
        ("rms_norm", {"x": torch.tensor(1.0), "weight": torch.tensor(1.0)}, r"rms_norm: `weight` must be \[\]"),
        ("rms_norm", {"weight": None}, "rms_norm: `weight` must be a dense float32, .*got None"),
        ("rms_norm", {"weight": torch.ones(16, device="meta")}, "rms_norm: `weight` must be on the device of `x`, cpu"),
        ("add_rms_norm", {"other": torch.ones(2, 16).half()}, "add_rms_norm: `other` must be torch.float32 on cpu"),
        ("rotary", {"cos": torch.ones(1, 3, 8).half()}, "rotary: `cos` must be torch.float32 on cpu like `query`"),
        ("rotary", {"key": torch.ones(1, 2, 3, 8, device="meta")}, "rotary: `key` must be on the device of `query`"),
        ("silu_mul", {"up": torch.ones(2, 16).double()}, "silu_mul: `up` must be a dense float32, .*got torch.float64"),
        ("silu_mul", {"up": torch.ones(2, 16).to_sparse()}, "silu_mul: `up` must be a dense .*got .*sparse_coo"),
    ],
)
def test_what_pytorch_would_promote_or_broadcast_is_refused(name: str, change: dict[str, Any], message: str) -> None:
    """By the reference of ops that lie between linear layers. On `meta` they used to return memory as it was."""
    x, heads, angles = torch.ones(2, 16), torch.ones(1, 2, 3, 8), torch.ones(1, 3, 8)
    calls: dict[str, dict[str, Any]] = {
        "rms_norm": {"x": x, "weight": x[0], "mean": None, "eps": 1e-6},
        "add_rms_norm": {"x": x, "other": x, "weight": x[0], "eps": 1e-6},
        "rotary": {"query": heads, "key": heads, "cos": angles, "sin": angles},
        "silu_mul": {"gate": x, "up": x},
    }
    with pytest.raises(REFUSED, match=message):
        overload(name)(**calls[name] | change)
