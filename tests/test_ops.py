"""The compiled ops against `reference.py`: codes bitwise, attention within a bound derived from PyTorch's own error.

Every test that calls an op runs once for each implementation of it (the `engine` fixture): all instruction sets of the
CPU kernels, and CUDA where there is a GPU. Memory that must not be read is poisoned with NaN, and whole planes are
compared, so that a stray read or write shows up as a wrong result.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from cases import (
    DTYPES,
    HEAD_DIMS,
    NUM_Q_PER_KV,
    Q_LENS,
    REFUSED,
    Case,
    clone,
    filled,
    is_repeated,
    make_formats,
    name_of,
    queries,
    row_of,
    tokens,
)
from checks import largest, pair, run_append, run_decode, to
from compare import assert_close, assert_same, assert_same_planes
from tolerances import attention_bound
from torch import Tensor

from hf_kvquant import ops
from hf_kvquant.spec import formats, reference
from hf_kvquant.spec.formats import KVFormat
from hf_kvquant.spec.layout import LAYOUT_FIELDS, KVLayout
from hf_kvquant.spec.planes import Planes

SOME_FORMATS = [
    KVFormat("none"),
    KVFormat("int8"),
    KVFormat("int4", symmetric=False),
    KVFormat("int4", "group", 32, symmetric=False),
    KVFormat("int8", "token", symmetric=False),
    KVFormat("fp8"),
    KVFormat("int4", "tensor"),
]
half_of_the_formats = pytest.mark.full(
    when=lambda index, head_dim, engine: engine != "cuda" and is_repeated(index, head_dim),
    reason="whether codes have a zero, the strides of scales and the loops over channels are written independently",
)
CUDA_ONLY = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


# --- append -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("index", range(len(make_formats())))
def test_append_matches_reference(engine: str, index: int, head_dim: int) -> None:
    kv_format = make_formats(head_dim)[index]
    other = make_formats(head_dim)[(index * 5 + 3) % len(make_formats())]
    for i, dtype in enumerate(DTYPES):
        q_len = Q_LENS[(index + head_dim // 8 + i) % len(Q_LENS)]
        case = Case((kv_format, other), head_dim, dtype, q_len=q_len, lengths=(q_len, 64 + q_len, 128))
        run_append(engine, case, tokens(case, q_len, head_dim), tokens(case, q_len, head_dim, scale=30.0))


def zeros(x: Tensor) -> Tensor:
    return torch.zeros_like(x)


def constant(x: Tensor) -> Tensor:
    return torch.full_like(x, 0.3)


def negative_constant(x: Tensor) -> Tensor:
    return torch.full_like(x, -2.5)


def offset_noise(x: Tensor) -> Tensor:
    return x * 0.01 + 100


def outlier(x: Tensor) -> Tensor:
    x[..., 3] = 5000
    return x


def huge(x: Tensor) -> Tensor:
    return x * 3e4


def denormal(x: Tensor) -> Tensor:
    return x * (1e-40 if x.dtype == torch.float32 else 1e-7)


def ties(x: Tensor) -> Tensor:
    """Multiples of half a code, so that every rounding is a tie."""
    x = (torch.randint_like(x, -14, 15) / 2).to(x.dtype)
    x[..., 0] = 7
    return x


def with_inf(x: Tensor) -> Tensor:
    x[0, 1, 0, 2] = torch.inf
    return x


def with_minus_inf(x: Tensor) -> Tensor:
    x[0, 0, -1, -1] = -torch.inf
    return x


def with_nan(x: Tensor) -> Tensor:
    x[1, 0, 1, 5] = torch.nan
    return x


DATA = [zeros, constant, negative_constant, offset_noise, outlier, huge, denormal, ties]
DATA += [with_inf, with_minus_inf, with_nan]


@pytest.mark.parametrize("change", DATA, ids=lambda change: change.__name__)
@pytest.mark.parametrize("kv_format", make_formats(), ids=name_of)
def test_append_keeps_unusual_data_exact(engine: str, kv_format: KVFormat, change: Callable[[Tensor], Tensor]) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        case = Case(pair(kv_format), 64, dtype, q_len=3, lengths=(3, 70))
        run_append(engine, case, change(tokens(case, 3, 64)), change(tokens(case, 3, 64)))


def around_midpoints(kv_format: KVFormat) -> Tensor:
    """Rows `[1, 1, rows, 256]` of float32 whose quotients by their scales are where codes change, or just beside it.

    The scales are every significand that float16 has and every subnormal number. A row's first channel is what its
    scale's last code stands for, its second 0, and the rest are the points halfway between two codes, times the scale,
    with both neighbours.
    """
    scales = torch.cat([torch.arange(1, 0x400), torch.arange(0x3C00, 0x4000)]).to(torch.int16).view(torch.float16)
    scales = scales.float().view(-1, 1)
    if kv_format.storage == "fp8":
        values = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    else:
        values = torch.arange(2**kv_format.bits // (2 if kv_format.symmetric else 1)).float()
    middle = (values[1:] + values[:-1]) / 2 * scales
    beside = [torch.nextafter(middle, torch.tensor(limit)) for limit in (0.0, torch.inf)]
    points = torch.cat([middle, *beside], dim=1)
    points = torch.nn.functional.pad(points, (0, -points.shape[1] % 254)).view(len(scales), -1, 254)
    if kv_format.symmetric:
        points[..., ::2] *= -1
    ends = torch.cat([values[-1] * scales, torch.zeros_like(scales)], dim=1).unsqueeze(1)
    return torch.cat([ends.expand(-1, points.shape[1], -1), points], dim=2).view(1, 1, -1, 256)


@pytest.mark.parametrize("kv_format", [f for f in make_formats() if f.granularity == "head"][1:], ids=name_of)
def test_append_rounds_as_a_division_does(engine: str, kv_format: KVFormat) -> None:
    """A product with an approximate reciprocal, as kernels may use instead, must never land on the other side."""
    x = around_midpoints(kv_format)
    count = x.shape[2]
    case = Case(
        pair(kv_format), 256, torch.float32, q_len=count, lengths=(count,), num_kv_heads=1, capacity=-count // 64 * -64
    )
    run_append(engine, case, x, x)


@pytest.mark.parametrize("kv_format", make_formats(), ids=name_of)
def test_append_takes_any_strides(engine: str, kv_format: KVFormat) -> None:
    case = Case(pair(kv_format), 64, q_len=5, lengths=(5, 61))
    fused = torch.randn(case.batch, case.q_len, case.num_kv_heads, 3, 64)  # as a fused projection gives them
    run_append(engine, case, fused[..., 1, :].transpose(1, 2), fused[..., 2, :].transpose(1, 2))
    run_append(engine, case, torch.randn(2, 2, 64, 5).mT, torch.randn(2, 2, 5, 128)[..., ::2])
    run_append(engine, case, torch.randn(1, 1, 1, 64).expand(2, 2, 5, 64), torch.randn(2, 2, 1, 64).expand(2, 2, 5, 64))


@pytest.mark.parametrize("kv_format", make_formats(), ids=name_of)
def test_append_writes_into_views(engine: str, kv_format: KVFormat) -> None:
    """Planes of every other sequence of a larger cache: each stride is another than that of a new plane."""
    case = Case(pair(kv_format), 64, q_len=2, lengths=(2, 9))
    large = kv_format.allocate(4, 2, 64, 192, dtype=torch.float32, device=torch.device(engine))
    small = kv_format.allocate(2, 2, 64, 128, dtype=torch.float32, device=torch.device("cpu"))
    if kv_format.granularity == "tensor":
        assert large.scale is not None and small.scale is not None
        large.scale.fill_(0.05)
        small.scale.fill_(0.05)

    def view(plane: Tensor | None, axis: int) -> Tensor | None:
        if plane is None:
            return None
        return plane[::2] if plane.shape[axis] == 1 else plane[::2].narrow(axis, 64, 128)

    planes = Planes(large.codes[::2, :, 64:], view(large.scale, 3), view(large.zero, 3))
    x = tokens(case, 2, 64)
    ops.append(x.to(engine), x.to(engine), planes, clone(small, engine), case.lengths_tensor().to(engine), case.layout)
    reference.append(x, small, kv_format, case.lengths_tensor())
    for b, length in enumerate(case.lengths):
        assert_same(planes.codes[b, :, length - 2 : length], small.codes[b, :, length - 2 : length], f"{case}, {b}")
    for plane, expected in ((planes.scale, small.scale), (planes.zero, small.zero)):
        if plane is not None and expected is not None:
            assert_same(plane, expected, f"{case}, scale or zero")


# --- decode -----------------------------------------------------------------------------------------------------------


@half_of_the_formats
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("index", range(len(make_formats())))
def test_decode_matches_reference(engine: str, index: int, head_dim: int) -> None:
    kv_format = make_formats(head_dim)[index]
    for i, dtype in enumerate(DTYPES):
        shape = index + head_dim // 8 + i
        q_len = Q_LENS[shape % len(Q_LENS)]
        num_q_per_kv = NUM_Q_PER_KV[(shape // len(Q_LENS) + i) % len(NUM_Q_PER_KV)]
        lengths = (q_len, 64 + q_len, 127)
        run_decode(engine, Case(pair(kv_format), head_dim, dtype, num_q_per_kv, q_len, lengths))


@pytest.mark.parametrize("num_q_per_kv", [*NUM_Q_PER_KV, 3, 12])
@pytest.mark.parametrize("q_len", Q_LENS)
def test_decode_serves_every_group_and_chunk(engine: str, q_len: int, num_q_per_kv: int) -> None:
    for kv_format in SOME_FORMATS:
        lengths = (q_len, 60 + q_len, 128)
        run_decode(engine, Case(pair(kv_format), 64, torch.bfloat16, num_q_per_kv, q_len, lengths))


@pytest.mark.parametrize("kv_format", SOME_FORMATS, ids=name_of)
def test_decode_serves_every_length(engine: str, kv_format: KVFormat) -> None:
    lengths = tuple(range(129))  # a sequence for each, the empty one included
    run_decode(engine, Case(pair(kv_format), 64, num_q_per_kv=2, lengths=lengths, num_kv_heads=1))


@pytest.mark.parametrize("num_splits", [0, 1, 3, 16])
@pytest.mark.parametrize("kv_format", SOME_FORMATS, ids=name_of)
def test_decode_splits_long_sequences(engine: str, kv_format: KVFormat, num_splits: int) -> None:
    case = Case(pair(kv_format), 128, torch.bfloat16, 4, lengths=(3000, 17), capacity=3072)
    run_decode(engine, case, num_splits=num_splits)


EXTRAS: dict[str, dict[str, Any]] = {
    "window": {"sliding_window": 20},
    "window_of_one": {"sliding_window": 1},
    "softcap": {"softcap": 5.0},
    "sinks": {"sinks": torch.linspace(-3, 6, 8)},
    "alibi": {"alibi_slopes": torch.linspace(0.01, 0.5, 8)},
    "all": {
        "sliding_window": 33,
        "softcap": 8.0,
        "sinks": torch.linspace(-3, 6, 8),
        "alibi_slopes": torch.linspace(0.01, 0.5, 8),
    },
}


@pytest.mark.parametrize("starts", [None, (0, 13, 64)], ids=["no_padding", "left_padding"])
@pytest.mark.parametrize("extras", EXTRAS)
def test_decode_serves_masks_and_extras(engine: str, extras: str, starts: tuple[int, ...] | None) -> None:
    for kv_format in SOME_FORMATS:
        for q_len in (1, 5):
            case = Case(pair(kv_format), 64, torch.float32, 4, q_len, (q_len, 77, 128), starts)
            run_decode(engine, case, **EXTRAS[extras])


def test_decode_outputs_zero_where_nothing_is_attended(engine: str) -> None:
    for kv_format in SOME_FORMATS:
        case = Case(pair(kv_format), 64, q_len=3, lengths=(0, 2, 40), starts=(0, 2, 39))
        out, lse = run_decode(engine, case)
        assert not out[0].any() and not out[1].any() and not out[2, :1].any()
        assert (lse[:2] == -torch.inf).all()
        sinks = torch.tensor([0.5, -1.0])
        out, lse = run_decode(engine, case, sinks=sinks)
        assert not out[0].any()
        assert_same(lse[0], sinks.unsqueeze(1).expand(2, 3), f"{case}: lse of the sink alone")


def test_keys_and_values_may_differ_in_format_and_head_dim(engine: str) -> None:
    every = make_formats()
    for i, kv_format in enumerate(every):
        case = Case((kv_format, every[(i + 7) % len(every)]), 64, torch.float16, 4, 2, (2, 90, 128), value_dim=96)
        run_decode(engine, case)
        case = Case((every[(i + 4) % len(every)], kv_format), 128, torch.bfloat16, 1, 1, (1, 90, 128), value_dim=32)
        run_decode(engine, case)


@pytest.mark.parametrize("kv_format", make_formats(), ids=name_of)
def test_nan_stays_with_those_who_attend_to_it(engine: str, kv_format: KVFormat) -> None:
    for side in (0, 1):
        for bad in (torch.nan, torch.inf):
            case = Case(pair(kv_format), 64, torch.float32, 2, 3, (50, 50, 50))
            x = tokens(case, case.capacity, 64)
            x[0, 0, 10, 5] = bad  # seen by all three queries of head 0, or of all heads where they share the scale
            x[1, 1, 49, 63] = bad  # seen by the last query only
            x[2, 0, 50, 0] = bad  # behind the end
            if kv_format.granularity == "tensor":
                x[2, 0, 50, 0] = 0.0  # one scale serves the sequence: it would be NaN everywhere
            planes = [filled(case, 0), filled(case, 1)]
            planes[side] = filled(case, side, x)
            out, _ = run_decode(engine, case, planes=(planes[0], planes[1]))
            assert not out[0, :, :2].isfinite().all() and not out[1, 2, 2:].isfinite().all()
            assert out[2].isfinite().all()


def test_one_bad_token_is_windowed_out(engine: str) -> None:
    for kv_format in (KVFormat("none"), KVFormat("int8"), KVFormat("fp8"), KVFormat("int4", symmetric=False)):
        case = Case(pair(kv_format), 64, num_q_per_kv=4, lengths=(100,), starts=(6,))
        x = tokens(case, case.capacity, 64)
        x[:, :, :90] = torch.nan
        planes = filled(case, 0, x), filled(case, 1, x)
        assert run_decode(engine, case, planes=planes, sliding_window=10)[0].isfinite().all()


def test_decode_takes_any_strides(engine: str) -> None:
    for kv_format in SOME_FORMATS:
        case = Case(pair(kv_format), 64, torch.float32, 4, 5, (5, 61))
        run_decode(engine, case, query=torch.randn(2, 5, 8, 64).transpose(1, 2))
        run_decode(engine, case, query=torch.randn(2, 8, 64, 5).mT)
        run_decode(engine, case, query=torch.randn(2, 8, 5, 128)[..., ::2])
        run_decode(engine, case, query=torch.randn(1, 1, 1, 64).expand(2, 8, 5, 64))


def test_offsets_beyond_two_gigabytes(engine: str) -> None:
    """The second sequence begins 2.1 GB into the codes; only its last tokens are touched, so little memory is."""
    capacity = 2**23 + 64
    kv_format = KVFormat("int8", "tensor")
    tail = Case(pair(kv_format), 256, torch.float32, 4, 2, (64, 64), (32, 32), num_kv_heads=1)
    small = [clone(filled(tail, side)) for side in (0, 1)]
    planes = []
    for made in small:
        codes = torch.empty(2, 1, capacity, 256, dtype=torch.uint8, device=engine)
        codes[:, :, -64:] = made.codes[:, :, :64].to(engine)
        assert made.scale is not None
        planes.append(Planes(codes, made.scale.to(engine), None))
    query = queries(tail)
    key, value = tokens(tail, 2, 256), tokens(tail, 2, 256)
    lengths = torch.tensor([capacity, capacity], dtype=torch.int32)
    starts = torch.tensor([capacity - 32, capacity - 32], dtype=torch.int32)
    out, _ = ops.decode(
        *to(engine, query),
        (key.to(engine), value.to(engine)),
        *planes,
        lengths.to(engine),
        tail.layout,
        softmax_scale=0.1,
        starts=starts.to(engine),
    )
    for x, made, large in ((key, small[0], planes[0]), (value, small[1], planes[1])):
        reference.append(x, made, kv_format, tail.lengths_tensor())
        assert_same(large.codes[:, :, -64:], made.codes[:, :, :64], "codes at the end")
    expected, _ = reference.decode_attention(
        query,
        *(reference.dequantize(made, kv_format) for made in small),
        tail.lengths_tensor(),
        softmax_scale=0.1,
        starts=tail.starts_tensor(),
    )
    assert_close(out, expected, attention_bound(expected, expected, torch.float32, 60.0, largest(expected)), "out")


# --- append and decode in one call ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kv_format", make_formats(), ids=name_of)
def test_decode_appends_first(engine: str, kv_format: KVFormat) -> None:
    for q_len in (1, 4):
        case = Case(pair(kv_format), 64, torch.bfloat16, 2, q_len, (q_len, 40, 128))
        new = tokens(case, q_len, 64), tokens(case, q_len, 64)
        planes = [filled(case, 0), filled(case, 1)]
        fused = [clone(made, engine) for made in planes]
        query = queries(case)
        arguments = case.lengths_tensor().to(engine), case.layout
        out, lse = ops.decode(query.to(engine), tuple(to(engine, *new)), *fused, *arguments, softmax_scale=0.125)
        for x, made, ours in zip(new, planes, fused, strict=True):
            reference.append(x, made, kv_format, case.lengths_tensor())
            assert_same_planes(ours, made, str(case))
        again, lse_again = run_decode(engine, case, planes=(planes[0], planes[1]), query=query, softmax_scale=0.125)
        assert_same(out, again.cpu(), f"{case}: fused and separate")
        assert_same(lse, lse_again.cpu(), f"{case}: fused and separate")


def test_equal_calls_give_equal_bits(engine: str) -> None:
    """A call twice, and, at a fixed number of splits, a batch and its rows."""
    for kv_format in SOME_FORMATS:
        case = Case(pair(kv_format), 128, torch.bfloat16, 4, 1, (900, 33, 512), capacity=1024)
        planes, query = [filled(case, 0), filled(case, 1)], queries(case)
        out, lse = run_decode(engine, case, planes=(planes[0], planes[1]), query=query, num_splits=4)
        again, _ = run_decode(engine, case, planes=(planes[0], planes[1]), query=query, num_splits=4)
        assert_same(again, out.cpu(), f"{case}: twice")
        for b in range(case.batch):
            row = Case(case.formats, 128, case.dtype, 4, 1, (case.lengths[b],), capacity=1024)
            sides = row_of(planes[0], b), row_of(planes[1], b)
            alone, lse_alone = run_decode(engine, row, planes=sides, query=query[b : b + 1], num_splits=4)
            assert_same(alone[0], out[b].cpu(), f"{row}: alone and in a batch")
            assert_same(lse_alone[0], lse[b].cpu(), f"{row}: alone and in a batch")


def test_threads_share_the_work(engine: str) -> None:
    """With more threads than cores, at batch 1 and in a batch; the result does not depend on how many there are."""
    for kv_format in SOME_FORMATS:
        for lengths in ((1900,), (700, 33, 512)):
            case = Case(pair(kv_format), 128, torch.bfloat16, 4, 2, lengths, capacity=2048)
            planes, query = (filled(case, 0), filled(case, 1)), queries(case)
            alone, _ = run_decode(engine, case, planes=planes, query=query, num_splits=4)
            torch.set_num_threads(3)
            try:
                out, _ = run_decode(engine, case, planes=planes, query=query, num_splits=4)
                run_append(engine, case, tokens(case, 2, 128), tokens(case, 2, 128))
            finally:
                torch.set_num_threads(1)
            assert_same(out, alone.cpu(), f"{case}: one thread and three")


def test_empty_calls_do_nothing(engine: str) -> None:
    kv_format = KVFormat("int4")
    case = Case(pair(kv_format), 64, q_len=0, lengths=(5, 6))
    out, lse = ops.decode(
        queries(case).to(engine),
        None,
        clone(filled(case, 0), engine),
        clone(filled(case, 1), engine),
        case.lengths_tensor().to(engine),
        case.layout,
        softmax_scale=1.0,
    )
    assert out.shape == (2, 0, 2, 64) and lse.shape == (2, 2, 0)


# --- torch's own checks -----------------------------------------------------------------------------------------------


def op_arguments(engine: str, kv_format: KVFormat) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Arguments of `append` and of `decode`, spelled out as the ops take them."""
    has_blocks = kv_format.granularity == "channel"  # for keys only, and without a transform
    formats = (kv_format, KVFormat("int4", symmetric=False)) if has_blocks else pair(kv_format)
    case = Case(formats, 64, torch.float32, 2, 2, (2, 30))
    planes = [clone(filled(case, side), engine) for side in (0, 1)]
    spelled = [made.tensors() for made in planes]
    key, value, query, lengths = to(
        engine, tokens(case, 2, 64), tokens(case, 2, 64), queries(case), case.lengths_tensor()
    )
    starts, slopes = to(engine, torch.zeros(2, dtype=torch.int32), torch.rand(case.num_q_heads))
    counters = torch.zeros(ops.NUM_COUNTERS, dtype=torch.int32, device=engine)
    extras = (counters, starts, None, slopes, 0.125, 0.0, 16, 0)
    center, smoothing = to(engine, torch.randn(2, 64), 0.5 + torch.rand(2, 64))
    kinds = (*((None, None, False) if has_blocks else (center, smoothing, True)), case.layout.packed, None)
    decode = query, key, value, *spelled, lengths, *extras, *kinds, None
    return (key, value, *spelled, lengths, starts, *kinds), decode


@pytest.mark.full(
    when=lambda kv_format: kv_format not in SOME_FORMATS,
    reason="schemas and fakes see shapes: those of a storage type and granularity, whatever its numbers mean",
)
@pytest.mark.parametrize("kv_format", make_formats(), ids=name_of)
def test_opcheck(device: str, kv_format: KVFormat) -> None:
    append, decode = op_arguments(device, kv_format)
    torch.library.opcheck(torch.ops.hf_kvquant.append.default, append)
    torch.library.opcheck(torch.ops.hf_kvquant.decode.default, decode)


class Step(torch.nn.Module):
    """A decode step between two operations that the compiler sees."""

    def forward(self, x: Tensor, key: Planes, value: Planes, lengths: Tensor, layout: KVLayout) -> Tensor:
        x = x * 1.5
        out, _ = ops.decode(x, (x[:, ::2], x[:, 1::2]), key, value, lengths, layout, softmax_scale=0.125)
        return out.flatten(2) + 1


# Torch's own modules warn about each other when the compiler first imports them.
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiles_to_one_graph(device: str, backend: str) -> None:
    chosen = SOME_FORMATS if backend == "aot_eager" else SOME_FORMATS[2:3]
    for kv_format in chosen:
        torch._dynamo.reset()
        counter = torch._dynamo.testing.CompileCounterWithBackend(backend)
        compiled = torch.compile(Step(), fullgraph=True, backend=counter)
        case = Case(pair(kv_format), 64, torch.float32, 2, 1, (39, 46))
        planes = [clone(filled(case, side), device) for side in (0, 1)]
        ours = [clone(made, device) for made in planes]
        for length in (40, 41, 42):
            lengths = torch.tensor([length, length + 7], dtype=torch.int32, device=device)
            x = queries(case).to(device)
            expected = Step()(x, *planes, lengths, case.layout)
            actual = compiled(x, *ours, lengths, case.layout)
            assert_close(actual, expected.cpu(), 1e-6 if backend == "inductor" else 0.0, f"{case}, {backend}")
            for side in (0, 1):
                assert_same_planes(ours[side], clone(planes[side]), f"{case}, {backend}")
        assert counter.frame_count == 1, "recompiled"


@CUDA_ONLY
@pytest.mark.parametrize("kv_format", SOME_FORMATS, ids=name_of)
def test_graph_replay_equals_eager(kv_format: KVFormat) -> None:
    """Captured once on another stream, replayed with other inputs and lengths."""
    case = Case(pair(kv_format), 128, torch.bfloat16, 4, 1, (2048, 2048), capacity=2048)
    planes = [clone(filled(case, side), "cuda") for side in (0, 1)]
    ours = [clone(made, "cuda") for made in planes]
    query, key, value = (x.cuda() for x in (queries(case), tokens(case, 1, 128), tokens(case, 1, 128)))
    lengths = case.lengths_tensor().cuda()

    def step(on: list[Planes]) -> tuple[Tensor, Tensor]:
        return ops.decode(query, (key, value), *on, lengths, case.layout, softmax_scale=0.09)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step([clone(made, "cuda") for made in ours])
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = step(ours)
    for length in (700, 701, 1500, 2048):
        lengths.fill_(length)
        for x in (query, key, value):
            x.normal_()
        graph.replay()
        expected_out, expected_lse = step(planes)
        assert_same(out, expected_out.cpu(), f"{case} at {length}")
        assert_same(lse, expected_lse.cpu(), f"{case} at {length}")
        for side in (0, 1):
            assert_same_planes(ours[side], clone(planes[side]), f"{case} at {length}")


# --- where the reference serves ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("archs", "capability", "is_covered"),
    [
        ("80;86;89;90", (8, 0), True),
        ("80;86;89;90", (8, 7), True),
        ("80;86;89;90", (9, 0), True),
        ("80;86;89;90", (12, 1), True),  # through PTX
        ("80;86;89;90", (7, 5), False),
        ("86", (8, 0), False),
        ("90", (8, 9), False),
        ("100;120", (11, 0), False),
        ("100;120", (10, 3), True),
        ("90;80", (8, 9), True),
        ("80;90a", (9, 0), True),
        ("80;90a", (10, 0), False),
        ("90a", (9, 1), False),
        ("100f", (10, 3), True),
        ("100f", (11, 0), False),
        ("", (9, 0), False),
    ],
)
def test_what_was_built_covers_what_is_there(archs: str, capability: tuple[int, int], is_covered: bool) -> None:
    assert ops.covers(archs, capability) == is_covered


@pytest.fixture
def old_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """GPU 0 is older than what the extension was built for, GPU 1 is not."""
    module = SimpleNamespace(HAS_CPU=1, HAS_CUDA=1, cuda_archs=lambda: "80;90")
    monkeypatch.setattr(ops.kernels, "extension", lambda: module)
    monkeypatch.setattr(ops.kernels, "has_kernels", lambda device_type: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index=0: ((7, 5), (9, 0))[index])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"GPU {index}")
    ops.serves_gpu.cache_clear()
    ops.kernels._log_reference.cache_clear()
    yield
    ops.serves_gpu.cache_clear()
    ops.kernels._log_reference.cache_clear()


@pytest.mark.usefixtures("old_gpu")
def test_a_gpu_without_kernels_is_told_how_to_get_them(caplog: pytest.LogCaptureFixture) -> None:
    old, new = torch.device("cuda:0"), torch.device("cuda:1")
    assert not ops.serves_gpu(0) and ops.serves_gpu(1)
    assert [ops.kernels.has_kernel(*call) for call in ((old, 64), (new, 64), (new, 64, 256), (new, 64, 264))] == [
        False,
        True,
        True,
        False,
    ]
    assert ops.kernels.has_kernel(torch.device("cpu"), 1024)
    with caplog.at_level(logging.WARNING, logger="hf_kvquant"):
        for _ in range(2):
            ops.kernels.warn_reference(old, 64)
            ops.kernels.warn_reference(new, 64, 512)
    assert [record.getMessage() for record in caplog.records] == [
        "ops: no compiled kernels for GPU 0, compute capability 7.5, the PyTorch reference runs: correct, slower "
        "(they were built for 80;90). "
        "Reinstall: HF_KVQUANT_CUDA_ARCHS=75 pip install --no-build-isolation . (8.0 or later)",
        "ops: no compiled kernels for head_dim 512 on cuda, the PyTorch reference runs: correct, slower "
        "(they support head_dim up to 256). Leave this model unpatched where speed matters more than memory.",
    ]


@pytest.mark.usefixtures("old_gpu")
def test_the_compiler_takes_the_choice_for_a_constant() -> None:
    torch._dynamo.reset()
    devices = [torch.device("cuda:0"), torch.device("cuda:1")]

    @torch.compile(fullgraph=True, backend="eager")
    def chosen(x: Tensor, index: int) -> Tensor:
        return x + 1 if ops.kernels.has_kernel(devices[index], x.shape[-1]) else x - 1

    assert [chosen(torch.zeros(2, dim), index)[0, 0] for index, dim in ((0, 64), (1, 64), (1, 512))] == [-1, 1, -1]


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_call_without_a_kernel_goes_to_the_reference(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: append, a fused step and one without new tokens, of a head_dim beyond the kernels'."""
    monkeypatch.setattr(ops.kernels, "has_kernel", lambda device, *head_dims: max(head_dims) <= 64)
    served: list[int] = []
    decode_attention = reference.decode_attention

    def counting(query: Tensor, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        served.append(query.shape[-1])
        return decode_attention(query, *args, **options)

    monkeypatch.setattr(reference, "decode_attention", counting)

    def step(query: Tensor, new: tuple[Tensor, Tensor], planes: list[Planes], lengths: Tensor) -> Tensor:
        ops.append(*new, planes[0], planes[1], lengths - 1, case.layout)
        out, _ = ops.decode(query, new, planes[0], planes[1], lengths, case.layout, softmax_scale=0.1)
        again, _ = ops.decode(query, None, planes[0], planes[1], lengths, case.layout, softmax_scale=0.1)
        return out + again

    for kv_format in SOME_FORMATS:
        for head_dim in (64, 128):
            torch._dynamo.reset()
            run = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=False) if compiled else step
            case = Case(pair(kv_format), head_dim, torch.bfloat16, 2, 1, (2, 40))
            planes = [filled(case, side) for side in (0, 1)]
            expected = [clone(made) for made in planes]
            new = tokens(case, 1, head_dim), tokens(case, 1, head_dim)
            query = queries(case)
            served.clear()
            actual = run(query, new, planes, case.lengths_tensor())
            assert served == [128, 128] * (head_dim == 128)
            for x, made in zip(new, expected, strict=True):
                reference.append(x, made, kv_format, case.lengths_tensor() - 1)
                reference.append(x, made, kv_format, case.lengths_tensor())
            key, value = (reference.dequantize(made, kv_format) for made in expected)
            out, _ = decode_attention(query, key, value, case.lengths_tensor(), softmax_scale=0.1)
            bound = 0.0 if head_dim == 128 else attention_bound(out, out, case.dtype, 60.0, largest(value))
            assert_close(actual / 2, out.float(), bound, f"{case}")
            for side in (0, 1):
                assert_same_planes(planes[side], expected[side], f"{case}")


@CUDA_ONLY
def test_long_heads_on_a_gpu_go_to_the_reference() -> None:
    for kv_format in SOME_FORMATS:
        case = Case(pair(kv_format), 512, torch.bfloat16, 2, 2, (2, 40))
        run_decode("cuda", case)
        run_append("cuda", case, tokens(case, 2, 512), tokens(case, 2, 512))


# --- errors -----------------------------------------------------------------------------------------------------------


def break_dtype(arguments: dict[str, Any]) -> None:
    arguments["query"] = arguments["query"].double()


def break_head_dim(arguments: dict[str, Any]) -> None:
    arguments["query"] = arguments["query"][..., :32]


def break_batch(arguments: dict[str, Any]) -> None:
    arguments["query"] = arguments["query"].repeat(2, 1, 1, 1)


def break_heads(arguments: dict[str, Any]) -> None:
    arguments["query"] = arguments["query"][:, :3]


def break_key_batch(arguments: dict[str, Any]) -> None:
    arguments["new"] = (arguments["new"][0][:1], arguments["new"][1])


def break_lengths_dtype(arguments: dict[str, Any]) -> None:
    arguments["lengths"] = arguments["lengths"].long()


def break_lengths_shape(arguments: dict[str, Any]) -> None:
    arguments["lengths"] = arguments["lengths"][:1]


def break_key_heads(arguments: dict[str, Any]) -> None:
    arguments["new"] = (arguments["new"][0][:, :1], arguments["new"][1])


def break_value_tokens(arguments: dict[str, Any]) -> None:
    arguments["new"] = (arguments["new"][0], arguments["new"][1].repeat(1, 1, 2, 1))


def break_query_tokens(arguments: dict[str, Any]) -> None:
    arguments["query"] = arguments["query"].repeat(1, 1, 2, 1)


def break_codes_dtype(arguments: dict[str, Any]) -> None:
    planes = arguments["key_planes"]
    arguments["key_planes"] = Planes(planes.codes.view(torch.int8), planes.scale, planes.zero)


def break_scale_dtype(arguments: dict[str, Any]) -> None:
    planes = arguments["value_planes"]
    arguments["value_planes"] = Planes(planes.codes, planes.scale.float(), planes.zero)


def break_scale_shape(arguments: dict[str, Any]) -> None:
    planes = arguments["key_planes"]
    arguments["key_planes"] = Planes(planes.codes, planes.scale[..., :64], planes.zero)


def break_scale_missing(arguments: dict[str, Any]) -> None:
    arguments["key_planes"] = Planes(arguments["key_planes"].codes, None, None)


def break_zero_shape(arguments: dict[str, Any]) -> None:
    planes = arguments["key_planes"]
    arguments["key_planes"] = Planes(planes.codes, planes.scale, planes.zero[:, :1])


def break_capacity(arguments: dict[str, Any]) -> None:
    planes = arguments["key_planes"]
    arguments["key_planes"] = Planes(planes.codes[:, :, :100], planes.scale, planes.zero)


def break_sinks(arguments: dict[str, Any]) -> None:
    arguments["sinks"] = torch.zeros(3, device=arguments["query"].device)


def break_starts(arguments: dict[str, Any]) -> None:
    arguments["starts"] = torch.zeros(2, device=arguments["query"].device)


def break_softcap(arguments: dict[str, Any]) -> None:
    arguments["softcap"] = -1.0


def break_window(arguments: dict[str, Any]) -> None:
    arguments["sliding_window"] = -5


def break_counters_dtype(arguments: dict[str, Any]) -> None:
    arguments["counters"] = arguments["counters"].float()


def break_counters_shape(arguments: dict[str, Any]) -> None:
    arguments["counters"] = arguments["counters"][:100]


def break_counters_stride(arguments: dict[str, Any]) -> None:
    arguments["counters"] = arguments["counters"].repeat(2)[::2]


def break_clip_ratio(arguments: dict[str, Any]) -> None:
    key_format = dataclasses.replace(arguments["layout"].key)
    object.__setattr__(key_format, "clip_ratio", 1.5)
    arguments["layout"] = dataclasses.replace(arguments["layout"], key=key_format)


ANOTHER_BATCH = r"Was this cache filled for another batch\? Use batch_select_indices, batch_repeat_interleave or reset"
OF_ANOTHER = r"Was this cache filled by another model\?"
BROKEN = [
    (
        break_clip_ratio,
        r"decode: `layout` must be what KVLayout\.packed gives, got \[2, 2, 0, 0, 6917529027641081856, 2",
    ),
    (break_dtype, r"decode: `query` must be float32, float16 or bfloat16, got Double\. Load"),
    (break_head_dim, rf"decode: `query` must be \[2, any, any, 64\] .*, got \[2, 4, 1, 32\] float32\. {OF_ANOTHER}"),
    (break_batch, rf"decode: `query` must have batch 2 like the cache, got 4\. {ANOTHER_BATCH}"),
    (break_heads, rf"decode: `query` must have a multiple of 2 heads, .*, got 3\. {OF_ANOTHER}"),
    (break_key_batch, rf"decode: `key` must have batch 2 like the cache, got 1\. {ANOTHER_BATCH}"),
    (break_lengths_dtype, r"decode: `lengths` must be \[2\] int32, got \[2\] int64\. One number per sequence"),
    (break_lengths_shape, r"decode: `lengths` must be \[2\] int32, got \[1\] int32\. One number per sequence"),
    (break_key_heads, rf"decode: `key` must be \[2, 2, any, 64\] .*, got \[2, 1, 1, 64\] float32\. {OF_ANOTHER}"),
    (break_value_tokens, r"decode: `value` must be \[2, 2, 1, 64\] .*, got \[2, 2, 2, 64\] float32\."),
    (break_query_tokens, r"decode: `key` must have 2 tokens like the query, got 1\. Append"),
    (break_codes_dtype, r"decode: `key_planes.codes` must be .* uint8, got \[2, 2, 128, 32\] Char\. Planes"),
    (break_scale_dtype, r"decode: `value_planes.scale` must be .* float16, got \[2, 2, 1, 128\] float32\. Planes"),
    (break_scale_shape, r"decode: `key_planes.scale` must be \[2, 2, 1, 128\] float16, got \[2, 2, 1, 64\] float16\. "),
    (break_scale_missing, r"decode: `key_planes` must be 3 tensors for this layout, got 1\. Planes"),
    (break_zero_shape, r"decode: `key_planes.zero` must be \[2, 2, 1, 128\] float16, got \[2, 1, 1, 128\] float16\. "),
    (break_capacity, r"decode: `key_planes.codes` must have .* a capacity that is a multiple of 64, got \[2, 2, 100"),
    (break_sinks, r"decode: `sinks` must be \[4\] float32, got \[3\] float32\. One number per query head"),
    (break_starts, r"decode: `starts` must be \[2\] int32, got \[2\] float32\. One number per sequence"),
    (break_counters_dtype, r"decode: `counters` must be \[4096\] int32, got \[4096\] float32\. Make them with torch"),
    (break_counters_shape, r"decode: `counters` must be \[4096\] int32, got \[100\] int32\. Make"),
    (break_counters_stride, r"decode: `counters` must be contiguous, got strides that are not\. Call"),
    (break_softcap, r"decode: `softcap` must be positive, or 0 for none, got -1\."),
    (break_window, r"decode: `sliding_window` must be between 0 and 2147483647, got -5\."),
]


def good_arguments(device: str) -> dict[str, Any]:
    case = Case(pair(KVFormat("int4", symmetric=False)), 64, torch.float32, 2, 1, (1, 30))
    return {
        "query": queries(case).to(device),
        "new": (tokens(case, 1, 64).to(device), tokens(case, 1, 64).to(device)),
        "key_planes": clone(filled(case, 0), device),
        "value_planes": clone(filled(case, 1), device),
        "lengths": case.lengths_tensor().to(device),
        "layout": case.layout,
        "softmax_scale": 0.125,
        "counters": torch.zeros(ops.NUM_COUNTERS, dtype=torch.int32, device=device),
    }


@pytest.mark.parametrize(("change", "message"), BROKEN, ids=lambda value: getattr(value, "__name__", ""))
def test_bad_arguments_are_named(device: str, change: Callable[[dict[str, Any]], None], message: str) -> None:
    arguments = good_arguments(device)
    change(arguments)
    before = clone(arguments["key_planes"]), clone(arguments["value_planes"])
    with pytest.raises(REFUSED, match=message):
        ops.decode(**arguments)
    assert_same_planes(arguments["key_planes"], before[0], "keys after an error")
    assert_same_planes(arguments["value_planes"], before[1], "values after an error")


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ((1, 129), r"`lengths` must be .*capacity of 128 tokens, got 129 for sequence 1\. Make a larger cache"),
        ((0, 5), r"`lengths` must count the 1 new tokens, got 0 for sequence 0\."),
        ((5, -1), r"`lengths` must .*, got -1 for sequence 1\."),
    ],
)
def test_a_full_cache_is_refused_before_anything_is_written(lengths: tuple[int, int], message: str) -> None:
    """On the CPU only: on a GPU lengths are not read by the host, and what has no room is left out."""
    arguments = good_arguments("cpu")
    arguments["lengths"] = torch.tensor(lengths, dtype=torch.int32)
    before = clone(arguments["key_planes"])
    with pytest.raises(REFUSED, match="decode: " + message):
        ops.decode(**arguments)
    new, planes = arguments["new"], (arguments["key_planes"], arguments["value_planes"])
    with pytest.raises(REFUSED, match="append: " + message):
        ops.append(*new, *planes, arguments["lengths"], arguments["layout"])
    assert_same_planes(arguments["key_planes"], before, "keys after an error")


@CUDA_ONLY
def test_counters_of_another_device_are_refused() -> None:
    arguments = good_arguments("cuda")
    arguments["counters"] = arguments["counters"].cpu()
    with pytest.raises(REFUSED, match=r"decode: `counters` must be on the device of the cache, got another device\."):
        ops.decode(**arguments)


@CUDA_ONLY
def test_codes_that_the_cuda_kernels_cannot_load() -> None:
    arguments = good_arguments("cuda")
    planes = arguments["value_planes"]
    codes = torch.zeros(planes.codes.numel() + 2, dtype=torch.uint8, device="cuda")[2:].view(planes.codes.shape)
    arguments["value_planes"] = Planes(codes, planes.scale, planes.zero)
    with pytest.raises(REFUSED) as raised:
        ops.decode(**arguments)
    assert str(raised.value) == (
        "decode: codes must start at multiples of 4 bytes for the CUDA kernels, got a remainder of 2. "
        "Planes are made by KVFormat.allocate."
    )


@CUDA_ONLY
def test_heads_that_the_cuda_kernels_cannot_hold() -> None:
    """Called by its own name, which the package does only where the kernels serve."""
    case = Case(pair(KVFormat("int8")), 520, torch.bfloat16, 2, 1, (1, 30))
    key_planes, value_planes = (clone(filled(case, side), "cuda") for side in range(2))
    operands = ops.Operands(key_planes, value_planes, case.layout)
    operands._append = torch.ops.hf_kvquant.append.default
    new = tokens(case, 1, 520).to("cuda")
    with pytest.raises(REFUSED) as raised:
        operands.append(new, new, case.lengths_tensor().to("cuda"))
    assert str(raised.value) == (
        "append: `head_dim` must be at most 512 for the CUDA kernels, got 520. Leave this model unpatched, or run it "
        "on the CPU."
    )


@CUDA_ONLY
def test_wide_rows_that_the_cuda_kernels_cannot_append() -> None:
    case = Case(pair(KVFormat("int8", "group", 8)), 264, torch.bfloat16, 2, 1, (1, 30))
    key_planes, value_planes = (clone(filled(case, side), "cuda") for side in range(2))
    operands = ops.Operands(key_planes, value_planes, case.layout)
    operands._append = torch.ops.hf_kvquant.append.default
    new = tokens(case, 1, 264).to("cuda")
    with pytest.raises(REFUSED) as raised:
        operands.append(new, new, case.lengths_tensor().to("cuda"))
    assert str(raised.value) == (
        "append: rows of more than 256 channels must have scales of their own, of 16 channels or more, for the CUDA "
        "kernels, got others. Use granularity 'head' or 'group'."
    )


def test_one_new_tensor_without_the_other_is_refused(device: str) -> None:
    arguments = list(op_arguments(device, KVFormat("int8"))[1])
    arguments[2] = None
    with pytest.raises(REFUSED, match=r"decode: `value` must be given like `key`, got None\. Give both or neither\."):
        torch.ops.hf_kvquant.decode(*arguments)


# --- loading ----------------------------------------------------------------------------------------------------------


def test_the_extension_is_built_from_this_version() -> None:
    module = ops.extension()
    assert not isinstance(module, ImportError), f"not built: {module}"
    assert module.OPS_VERSION == ops.OPS_VERSION
    assert module.TOKEN_ALIGNMENT == formats.TOKEN_ALIGNMENT
    assert module.NUM_COUNTERS == ops.NUM_COUNTERS
    assert module.MAX_CUDA_HEAD_DIM == ops.MAX_CUDA_HEAD_DIM
    assert module.LAYOUT_FIELDS.split() == list(LAYOUT_FIELDS)
    assert ops.has_kernels("cpu")
    assert ops.has_kernels("cuda") == bool(module.HAS_CUDA)


def test_an_unknown_capability_changes_nothing() -> None:
    module = ops.extension()
    assert not isinstance(module, ImportError)
    before = module.cpu_capability()
    assert before in ("portable", "avx2", "avx512")
    assert not module.set_cpu_capability("avx1024")
    assert module.cpu_capability() == before


@pytest.mark.parametrize("storage", sorted(ops.kernels.CPU_STORAGES))
def test_storage_types_without_cuda_kernels_are_refused(storage: str) -> None:
    ops.kernels.check_storages(torch.device("cpu"), storage)
    ops.kernels.check_storages(torch.device("cuda"), "int4", "none")
    with pytest.raises(ValueError, match=f"must have storage types with CUDA kernels, got {storage}. Choose int4"):
        ops.kernels.check_storages(torch.device("cuda"), "int8", storage)
