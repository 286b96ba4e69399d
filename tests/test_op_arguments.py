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

INT4 = KVFormat("int4", symmetric=False)
OPS = ("append", "append_reference", "decode", "decode_reference")


def call_of(name: str, kv_format: KVFormat = INT4) -> dict[str, Any]:
    """A good call, by argument."""
    append, decode = op_arguments("cpu", kv_format)
    names = [argument.name for argument in overload(name)._schema.arguments]
    return dict(zip(names, append if name.startswith("append") else decode, strict=True))


def overload(name: str) -> Any:
    return getattr(torch.ops.hf_kvquant, name).default


def refused(name: str, call: dict[str, Any], message: str) -> None:
    """By a `ValueError` with this message, before anything is written."""
    before = {key: x.clone() for key, x in call.items() if isinstance(x, Tensor) and x.device.type != "meta"}
    with pytest.raises(REFUSED, match=f"^{name.partition('_')[0]}: {message}"):
        overload(name)(**call)
    for key, x in before.items():
        assert_same(call[key].to_dense(), x.to_dense().cpu(), key)


@pytest.mark.parametrize("argument", ["value", "key_codes", "value_codes", "lengths"])
@pytest.mark.parametrize("name", OPS)
def test_none_is_no_tensor(name: str, argument: str) -> None:
    call = call_of(name)
    call[argument] = None
    expected = (
        "given like `key`, got None" if name.startswith("decode") and argument == "value" else "a tensor, got None"
    )
    refused(name, call, f"`{argument}` must be {expected}")


@pytest.mark.parametrize("argument", ["lengths", "value_scale", "key_smoothing"])
@pytest.mark.parametrize("name", OPS)
def test_tensors_without_numbers_are_refused(name: str, argument: str) -> None:
    """With one of them torch calls the op's fake, which used to return memory as it was, and to append nothing."""
    call = call_of(name)
    call[argument] = call[argument].to("meta")
    refused(name, call, f"`{argument}` must be on the device of `(key|query)`, cpu, got meta\\. Move the inputs")


@pytest.mark.parametrize("head_dim", [0, 12])
@pytest.mark.parametrize("preset, per_byte", [("none", 1), ("int4-channel", 2)])
@pytest.mark.parametrize("name", OPS)
def test_heads_that_are_no_multiple_of_8_are_refused(name: str, preset: str, per_byte: int, head_dim: int) -> None:
    """Here nothing else, such as scales of groups, speaks of them."""
    call = call_of(name, PRESETS[preset][0])
    call["key_codes"] = call["key_codes"][..., : head_dim // per_byte]
    refused(name, call, f"`key_codes` must have a head_dim that is a multiple of 8, got {head_dim}\\.")


@pytest.mark.parametrize("name", ["append_reference", "decode_reference"])
def test_what_only_the_last_step_would_notice_is_refused_at_first(name: str) -> None:
    """Keys used to be written before PyTorch found out about values."""
    for argument, change in (
        ("value", lambda x: x[..., :32]),
        ("value", lambda x: x[:, :1]),
        ("value_scale", lambda x: x[..., :64]),
        ("value_codes", Tensor.long),
        ("lengths", lambda x: x + 200),
        ("lengths", lambda x: x * 0),
    ):
        call = call_of(name, KVFormat("int4", "group", 32, symmetric=False))
        call[argument] = change(call[argument])
        refused(name, call, f"`{argument}` must ")


@pytest.mark.parametrize("argument", ["key", "key_scale", "key_smoothing"])
@pytest.mark.parametrize("name", OPS)
def test_sparse_tensors_are_refused(name: str, argument: str) -> None:
    call = call_of(name)
    call[argument] = call[argument].to_sparse()
    refused(name, call, f"`{argument}` must be a dense tensor, got layout torch.sparse_coo\\. Call")


@pytest.mark.parametrize("name", OPS)
def test_lazily_negated_tensors(name: str) -> None:
    """What is read counts as if it were negated; what is written must not be."""
    call = call_of(name)
    expected = {argument: x.clone() if isinstance(x, Tensor) else x for argument, x in call.items()}
    call["key"], expected["key"] = torch._neg_view(call["key"]), -call["key"]
    results, others = overload(name)(**call), overload(name)(**expected)
    for x, other in zip(results or (), others or (), strict=True):
        assert_same(x, other, name)
    assert_same(call["key_codes"], expected["key_codes"], name)
    call["value_scale"] = torch._neg_view(call["value_scale"])
    with pytest.raises(REFUSED, match=r"`value_scale` must hold its numbers as they are, .*\.resolve_neg\(\)"):
        overload(name)(**call)


def unaligned(x: Tensor) -> Tensor:
    data = bytearray(1) + bytearray(x.contiguous().view(torch.uint8).numpy().tobytes())
    return torch.frombuffer(data, dtype=x.dtype, offset=1).view(x.shape)


@pytest.mark.parametrize("argument", ["key", "key_scale", "lengths", "alibi_slopes", "key_center"])
def test_addresses_that_numbers_do_not_have_are_refused(argument: str) -> None:
    call = call_of("decode")
    call[argument] = unaligned(call[argument])
    size = call[argument].element_size()
    refused("decode", call, f"`{argument}` must start at a multiple of {size} bytes, got a view that does not\\. Call")


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("plane", ["codes", "scale", "zero", "tail"])
@pytest.mark.parametrize("name", OPS)
def test_written_planes_that_share_memory_with_themselves_are_refused(name: str, plane: str, axis: int) -> None:
    """Which token stays would be up to the order of threads."""
    case = Case((PRESETS["int4-channel"][0], INT4), 64, num_q_per_kv=2, lengths=(9, 200), capacity=256)
    call = call_of(name)
    for side, planes in zip(("key", "value"), (filled(case, 0), filled(case, 1)), strict=True):
        call |= {f"{side}_{kind}": getattr(planes, kind) for kind in ("codes", "scale", "zero", "tail")}
    call |= {"key_center": None, "key_smoothing": None, "rotates_key": False}
    x = call[f"key_{plane}"]
    shared = x.narrow(axis, 0, 1).expand(x.shape)
    refused(name, {**call, f"key_{plane}": shared}, f"`key_{plane}` must have memory of its own for each element, got")
    if plane in ("codes", "tail"):
        strides = list(x.stride())
        strides[2] //= 2  # rows that begin in the middle of others
        folded = x.as_strided(x.shape, strides)
        refused(name, {**call, f"key_{plane}": folded}, f"`key_{plane}` must have memory of its own for each element")
    if name.startswith("decode"):
        overload(name)(**{**call, "key": None, "value": None, f"key_{plane}": shared})  # where nothing is written


@pytest.mark.parametrize(("written", "other"), [("value_codes", "key_codes"), ("key_codes", "key")])
@pytest.mark.parametrize("name", OPS)
def test_one_tensor_twice_is_refused(name: str, written: str, other: str) -> None:
    call = call_of(name, KVFormat("none"))
    call |= {"key_center": None, "key_smoothing": None, "rotates_key": False}
    if other == "key":
        call["key"] = call["key_codes"][:, :, :2]
    else:
        call[written] = call[other]
    first, second = (other, written) if other == "key_codes" else (written, other)
    refused(name, call, f"`{first}` must have memory of its own, got that of `{second}`\\. Call")


@pytest.mark.parametrize(
    ("argument", "numbers", "message"),
    [
        ("softmax_scale", (torch.nan, torch.inf, -torch.inf, 1e39), "must be a finite float32 number, got"),
        ("softcap", (torch.nan, torch.inf, 1e300, 1e-300, -1.0), "must be positive, or 0 for none, got"),
    ],
)
@pytest.mark.parametrize("name", ["decode", "decode_reference"])
def test_numbers_that_float32_does_not_have(name: str, argument: str, numbers: tuple[float, ...], message: str) -> None:
    """A cap that rounds to 0 used to be none, one that rounds to infinity made all outputs NaN."""
    for number in numbers:
        refused(name, {**call_of(name), argument: number}, f"`{argument}` {message}")


@pytest.mark.parametrize(
    ("argument", "number", "message"),
    [
        ("key_smoothing", 0.0, "must be positive and finite, got"),
        ("key_smoothing", torch.nan, "must be positive and finite, got"),
        ("key_center", torch.inf, "must be finite, got"),
    ],
)
@pytest.mark.parametrize("name", OPS)
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


@pytest.mark.parametrize("body", [ops._append_reference, ops._decode_reference], ids=lambda body: body.__name__)
def test_the_reference_takes_factors_that_have_been_checked(body: Callable[..., Any]) -> None:
    """A transform made in every call, with the checks of the constructor, would wait for a GPU each time."""
    call = call_of(body.__name__.removeprefix("_"))
    assert call["key_center"] is not None and call["key_smoothing"] is not None
    counts = []
    for factors in ({}, {"key_center": None, "key_smoothing": None}):
        with HostReads() as reads:
            body(**{**call, **factors})
        counts.append(reads.count)
    assert counts[0] == counts[1], "the host looked at the factors"


@pytest.mark.parametrize(
    ("name", "argument"), [("append", "key"), ("append", "value"), ("decode", "query"), ("decode", "value")]
)
def test_another_batch_is_refused_by_the_reference_as_by_kernels(name: str, argument: str) -> None:
    for op in (name, f"{name}_reference"):
        call = call_of(op)
        call[argument] = call[argument][:1]
        refused(op, call, f"`{argument}` must have batch 2 like the cache, got 1\\. {ANOTHER_BATCH}")


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
    arguments = case.lengths_tensor().to(engine), case.formats, None, starts.to(engine)
    ours = [made.map(lambda plane: plane.to(engine)) for made in planes]
    ops.append(key.to(engine), value.to(engine), *ours, *arguments, **case.windows)
    for x, made, kv_format in zip((key, value), expected, formats, strict=True):
        reference.append(x, made, kv_format, case.lengths_tensor(), None, starts, **case.windows)
    assert not ours[0].codes.any() and not expected[0].codes.any(), "all of it is padding"
    out, lse = ops.decode(
        queries(case).to(engine), None, *ours, *arguments[:2], softmax_scale=1.0, starts=arguments[3], **case.windows
    )
    assert not out.any() and bool((lse == -torch.inf).all())


def test_queries_of_other_ranks_are_refused(device: str) -> None:
    for change in (lambda x: x[0], lambda x: x[0, 0, 0], lambda x: x[None]):
        arguments = good_arguments(device)
        arguments["query"] = change(arguments["query"])
        with pytest.raises(REFUSED, match=r"decode: `query` must be \[batch, heads, tokens, head_dim\], got \["):
            ops.decode(**arguments)


@pytest.mark.parametrize(
    ("argument", "change", "message"),
    [
        ("query", lambda x: x[0], r"`query` must be \[batch, heads, tokens, head_dim\], got \[4, 2, 64\]"),
        ("query", lambda x: x[None], r"`query` must be \[batch, heads, tokens, head_dim\], got \[1, 2, 4, 2, 64\]"),
        ("query", lambda x: None, r"`query` must be a tensor, got None"),
        ("value_codes", lambda x: x.flatten()[0], r"`value_codes` must be \[batch, .*row\], got \[\]"),
        ("value_codes", lambda x: None, r"`value_codes` must be a tensor, got None"),
    ],
)
@pytest.mark.parametrize("name", ["decode", "decode_reference"])
def test_fakes_refuse_by_the_same_words(name: str, argument: str, change: Any, message: str) -> None:
    """What their results are made from. A compiler asks the fake first, and shows what that says."""
    call = call_of(name)
    call[argument] = change(call[argument])
    refused(name, call, message)
    compiled = torch.compile(lambda: overload(name)(**call), backend="eager", fullgraph=True, dynamic=False)
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
    expected = {argument: x.clone() if isinstance(x, Tensor) else x for argument, x in call.items()}
    call["key_scale"].requires_grad_()
    overload(name)(**call)
    overload(name)(**expected)
    assert_same(call["key_codes"], expected["key_codes"], name)


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
