"""What decode attention promises about precision, memory, order and streams, with the CUDA kernels in mind.

`test_ops.py` compares the ops with `reference.py` over all formats; here are the shapes at which a kernel that splits
sequences, copies ahead and combines in the same launch could go wrong. Whatever can run on a CPU engine does, over
smaller shapes: that checks the tests, too. `make sanitize` repeats the tests marked so under NVIDIA's tools.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import KINDS, Case, clone, filled, make_transform, merged, name_of, poisoned, queries, tokens
from checks import pair, run_append, run_decode, to
from compare import assert_close, assert_same, assert_same_planes
from tolerances import bias_bound, precision_bounds, root_mean_square, weight_rounding_bound
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from hf_kvquant import KeyTransform, ops
from hf_kvquant.config import PRESETS
from hf_kvquant.spec import reference
from hf_kvquant.spec.formats import KVFormat
from hf_kvquant.spec.layout import KVLayout
from hf_kvquant.spec.planes import Planes

HAS_GPU = torch.cuda.is_available()
CUDA_ONLY = pytest.mark.skipif(not HAS_GPU, reason="needs a GPU")
QUANTIZED = [name for name in PRESETS if name != "none"]
LOW_PRECISION = (torch.bfloat16, torch.float16)
KERNEL_DIMS = (128, 64, 80, 96, 256)
GROUPS = (1, 2, 4, 5, 8, 12, 16)

# Every way in which a kernel has to read codes: storage types, symmetry, and who shares a scale.
VARIANTS = [
    pair(KVFormat("none")),
    pair(KVFormat("int8")),
    pair(KVFormat("int8", symmetric=False)),
    pair(KVFormat("int4", symmetric=False, clip_ratio=0.9)),
    pair(KVFormat("int4")),
    pair(KVFormat("int4", "group", 32, symmetric=False)),
    pair(KVFormat("int4", "group", 16)),
    pair(KVFormat("fp8")),
    (KVFormat("int8"), KVFormat("int4", symmetric=False)),
    (KVFormat("fp8", "tensor"), KVFormat("int8", "token")),
    (KVFormat("int4", "token", symmetric=False), KVFormat("int8", "group", 16)),
    (KVFormat("int4", "tensor", symmetric=False), KVFormat("fp8", "token")),
]
variants = pytest.mark.parametrize("formats", VARIANTS, ids=lambda formats: "+".join(map(name_of, formats)))


def new_counters(device: str | torch.device) -> Tensor:
    return torch.zeros(ops.NUM_COUNTERS, dtype=torch.int32, device=device)


def attend(
    case: Case,
    planes: tuple[Planes, Planes] | list[Planes],
    query: Tensor,
    *,
    new: tuple[Tensor, Tensor] | None = None,
    lengths: Tensor | None = None,
    counters: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """`ops.decode` of a case whose tensors are on the device already."""
    lengths = case.lengths_tensor().to(query.device) if lengths is None else lengths
    options.setdefault("softmax_scale", case.head_dim**-0.5)
    if case.starts is not None:
        options.setdefault("starts", case.starts_tensor().to(query.device))  # type: ignore[union-attr]
    return ops.decode(query, new, planes[0], planes[1], lengths, case.layout, counters=counters, **options)


def fitting(formats: tuple[KVFormat, KVFormat], head_dim: int) -> tuple[KVFormat, KVFormat]:
    """The formats, in groups of 40 where their groups do not divide the head."""
    key, value = (
        dataclasses.replace(kv_format, group_size=40) if head_dim % (kv_format.group_size or 8) else kv_format
        for kv_format in formats
    )
    return key, value


def capacity_for(length: int, formats: tuple[KVFormat, KVFormat]) -> int:
    """More than `length`, in whole tiles and blocks of both formats."""
    alignment = max(kv_format.token_alignment for kv_format in formats)
    return (-(-length // alignment) + 1) * alignment


# --- precision --------------------------------------------------------------------------------------------------------


def flat(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
    """Every token weighs about the same, and rounding errors of the weights have nothing to hide behind."""
    return query * 0.05, key, value


def peaked(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
    """Each query looks for one token, another for every head, and finds it 20 to 40 above the others."""
    num_q_per_kv, capacity = query.shape[1] // key.shape[1], key.shape[2]
    keys = key.repeat_interleave(num_q_per_kv, dim=1)
    target = torch.arange(query.shape[1], device=key.device).view(1, -1, 1, 1) * 61 % max(1, capacity - 64)
    return keys.take_along_dim(target, dim=2).expand_as(query) * 3, key, value


def offset(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
    """Values between 20 and 40, channel by channel: where the weights do not add up, the mean moves."""
    center = 20 + 20 * torch.rand(1, value.shape[1], 1, value.shape[3], device=value.device)
    return query * 0.05, key, value + center


def outliers(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
    """A few channels are much larger than the rest."""
    query[..., 1] *= 8
    key[..., key.shape[-1] // 3] *= 6
    value[..., value.shape[-1] // 2] *= 6
    return query, key, value


def unequal(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
    """Large queries, small keys, tiny values: scales near and below the smallest normal float16."""
    return query * 64, key / 64, value / 1024


def spread(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
    """Values of all sizes that float16 has, token by token: weights must leave room for their scales."""
    size = 10 ** (8 * torch.rand(*value.shape[:3], 1, device=value.device) - 4)
    return query, key, (value * size).clamp(-30000, 30000)


DISTRIBUTIONS = [flat, peaked, offset, outliers, unequal, spread]


def drawn(case: Case, device: str, distribution: Callable[..., tuple[Tensor, ...]]) -> list[Tensor]:
    """Query, and keys and values for the whole capacity."""
    shape = case.batch, case.num_kv_heads, case.capacity
    query = torch.randn(case.batch, case.num_q_heads, case.q_len, case.head_dim, device=device)
    key, value = (torch.randn(*shape, head_dim, device=device) for head_dim in case.head_dims())
    return [x.to(case.dtype) for x in distribution(query, key, value)]


def dense(case: Case, planes: tuple[Planes, Planes]) -> list[Tensor]:
    """Dequantised keys and values, float32, zero where nothing is held."""
    lengths = case.lengths_tensor().to(planes[0].codes.device)
    tensors = [
        reference.dequantize(made, kv_format, lengths=lengths)
        for made, kv_format in zip(planes, case.formats, strict=True)
    ]
    is_beyond = torch.arange(case.capacity, device=lengths.device) >= lengths.view(-1, 1, 1)
    return [x.masked_fill(is_beyond.unsqueeze(-1), 0.0) for x in tensors]


def exact_attention(case: Case, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """One token of each sequence over dense keys and values, float64: `[batch, 1, num_q_heads, head_dim]`."""
    column = torch.arange(case.capacity, device=query.device)
    is_beyond = column >= case.lengths_tensor().to(query.device).view(-1, 1, 1, 1)
    grouped = query.double().view(case.batch, case.num_kv_heads, case.num_q_per_kv, -1)
    scores = (grouped @ key.double().mT * case.head_dim**-0.5).masked_fill(is_beyond, -torch.inf)
    weights = scores.softmax(-1).nan_to_num(0)  # nothing held: 0 / 0
    return (weights @ value.double()).view(case.batch, 1, case.num_q_heads, -1)


def torch_attention(case: Case, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """What PyTorch's kernels make of the same keys and values in the working dtype."""
    key, value = key.to(case.dtype), value.to(case.dtype)
    mask = None
    if len(set(case.lengths)) == 1:
        key, value = key[:, :, : case.lengths[0]], value[:, :, : case.lengths[0]]
    else:
        column = torch.arange(case.capacity, device=query.device)
        mask = column < case.lengths_tensor().to(query.device).view(-1, 1, 1, 1)
    out = scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)
    return out.nan_to_num(0).transpose(1, 2)


def check_precision(
    case: Case, device: str, distribution: Callable[..., tuple[Tensor, ...]], num_splits: int = 0
) -> tuple[Tensor, Tensor]:
    """Compare with float64 over the same codes; our output and the exact one."""
    query, *sides = drawn(case, device, distribution)
    planes = filled(case, 0, sides[0]), filled(case, 1, sides[1])
    out, _ = attend(case, planes, query, counters=new_counters(device), num_splits=num_splits)
    key, value = dense(case, planes)
    exact = exact_attention(case, query, key, value)
    worst, typical = precision_bounds(exact, torch_attention(case, query, key, value), case.dtype)
    what = f"{case}, {distribution.__name__}, {num_splits} splits"
    assert_close(out, exact.float().cpu(), worst, what)
    error = root_mean_square(out.double() - exact)
    assert error <= typical, f"{what}: root mean square of errors {error:.3e}, bound {typical:.3e}"
    return out, exact


LENGTHS = (1, 2, 31, 32, 33, 63, 64, 65, 127, 257, 1000, 1024)
LONG_LENGTHS = (4097, 8192, 32768, 131072)


@pytest.mark.parametrize("dtype", LOW_PRECISION, ids=name_of)
@pytest.mark.parametrize("preset", QUANTIZED)
def test_precision_is_that_of_torch(engine: str, preset: str, dtype: torch.dtype) -> None:
    """Every length with a head_dim, a group and a distribution; preset and dtype shift which. A GPU takes them all."""
    shift = QUANTIZED.index(preset) + 2 * LOW_PRECISION.index(dtype)
    for i, length in enumerate(LENGTHS):
        head_dim, num_q_per_kv = KERNEL_DIMS[(i + shift) % 5], GROUPS[(i + 3 * shift) % 7]
        # Short sequences in numbers: over a handful of logits, one kernel's worst error is not comparable to another's.
        # Nor over a handful of long ones where a few tokens have all the weight, as with outliers: of 2 sequences, or
        # 16, the ratio of the two kernels' errors goes up to 5, of 64 and of 256 it is 1.2 and hardly moves.
        num_sequences = max(64 if engine == "cuda" else 2, min(24, 256 // length))
        lengths, formats = (length,) * num_sequences, fitting(PRESETS[preset], head_dim)
        capacity = capacity_for(length, formats)
        case = Case(formats, head_dim, dtype, num_q_per_kv, 1, lengths, capacity=capacity)
        chosen = DISTRIBUTIONS if engine == "cuda" else [DISTRIBUTIONS[(i // 6 + i + shift) % 6]]
        for distribution in chosen:
            check_precision(case, engine, distribution)


@CUDA_ONLY
@pytest.mark.parametrize("dtype", LOW_PRECISION, ids=name_of)
@pytest.mark.parametrize("preset", QUANTIZED)
def test_precision_of_long_sequences(preset: str, dtype: torch.dtype) -> None:
    shift = QUANTIZED.index(preset) + LOW_PRECISION.index(dtype)
    for i, length in enumerate(LONG_LENGTHS):
        head_dim, num_q_per_kv = (128, 64, 128, 256)[(i + shift) % 4], (4, 8, 1)[(i + shift) % 3]
        formats = fitting(PRESETS[preset], head_dim)
        capacity = capacity_for(length, formats)
        case = Case(formats, head_dim, dtype, num_q_per_kv, 1, (length,), capacity=capacity)
        for distribution in DISTRIBUTIONS:
            check_precision(case, "cuda", distribution)


@pytest.mark.parametrize("preset", QUANTIZED)
def test_bias_does_not_grow_with_the_length(engine: str, preset: str) -> None:
    """Also where a single thread block adds up everything."""
    dtype = torch.bfloat16
    for length in (64, 1024, *((16384, 131072) if engine == "cuda" else ())):
        for num_splits in (0, 1):
            capacity = capacity_for(length, PRESETS[preset])
            case = Case(PRESETS[preset], 128, dtype, 4, 1, (length,), capacity=capacity, num_kv_heads=8)
            out, exact = check_precision(case, engine, offset, num_splits)
            bias, bound = float((out.double() - exact).mean()), bias_bound(exact, dtype)
            assert abs(bias) <= bound, f"{case}, {num_splits} splits: the mean is off by {bias:.3e}, bound {bound:.3e}"


# --- memory -----------------------------------------------------------------------------------------------------------


def with_outside(case: Case, side: int, x: Tensor, kind: str) -> Planes:
    """Planes holding `x`, and something else wherever nothing is held."""
    inside = filled(case, side, x)
    outside = clone(inside, str(x.device))
    if kind == "zeros":
        for plane in outside.tensors():
            plane.zero_()
    elif kind == "garbage":
        if not case.formats[side].is_quantized:
            outside.codes.fill_(torch.inf)
        else:
            outside.codes.fill_(0x7F)  # NaN in e4m3
            for plane in outside.tensors()[1:]:
                plane.fill_(60000)
    return merged(case, inside, outside)


@variants
def test_what_is_not_held_does_not_matter(engine: str, formats: tuple[KVFormat, KVFormat]) -> None:
    """Bitwise, whether it is zero, NaN or large numbers, behind the end and in the padding."""
    shapes = [(1, 1, (1, 31, 33), (0, 7, 33)), (4, 3, (3, 64, 127), (2, 63, 16)), (8, 1, (65, 96, 128), None)]
    for i, (num_q_per_kv, q_len, lengths, starts) in enumerate(shapes):
        head_dim = KERNEL_DIMS[i] if i != 2 else 96
        case = Case(formats, head_dim, torch.bfloat16, num_q_per_kv, q_len, lengths, starts, capacity=192)
        query, key, value = drawn(case, engine, outliers)
        results = []
        for kind in ("zeros", "poison", "garbage"):
            planes = with_outside(case, 0, key, kind), with_outside(case, 1, value, kind)
            results.append([x.cpu() for x in attend(case, planes, query)])
        for out, lse in results[1:]:
            assert_same(out, results[0][0], f"{case}, out")
            assert_same(lse, results[0][1], f"{case}, lse")
        assert results[0][0].isfinite().all()


def embedded(planes: Planes, device: str) -> tuple[Planes, Planes]:
    """The same planes as views of poisoned ones twice as large along every axis, and those."""

    def inside(plane: Tensor, fill: Callable[[Tensor], Tensor], tokens_axis: int) -> tuple[Tensor, Tensor]:
        large = fill(torch.empty([2 * size for size in plane.shape], dtype=plane.dtype, device=device))
        view = large[::2, plane.shape[1] :]
        for axis in (2, 3):
            view = view.narrow(axis, 64 if axis == tokens_axis and plane.shape[axis] > 1 else 0, plane.shape[axis])
        view.copy_(plane)
        # An axis that one scale serves has size 1, and a view of a larger one would have a stride.
        return view, large

    def poison(x: Tensor) -> Tensor:
        return x.random_(0, 256) if x.dtype == torch.uint8 else x.fill_(torch.nan)

    pairs = [None if x is None else inside(x, poison, 2 + (i > 0)) for i, x in enumerate(sides_of(planes))]
    views, large = zip(*[(None, None) if made is None else made for made in pairs], strict=True)
    return Planes(*views), Planes(*large)


def sides_of(planes: Planes) -> tuple[Tensor, Tensor | None, Tensor | None]:
    return planes.codes, planes.scale, planes.zero


@variants
def test_planes_and_queries_of_any_strides(engine: str, formats: tuple[KVFormat, KVFormat]) -> None:
    """Bitwise what contiguous ones give; what surrounds the views stays as it was."""
    for head_dim, q_len in ((64, 1), (128, 3)):
        case = Case(formats, head_dim, torch.bfloat16, 4, q_len, (q_len, 37, 64), capacity=64)
        planes = [clone(filled(case, side), engine) for side in (0, 1)]
        views, large = zip(*[embedded(made, engine) for made in planes], strict=True)
        before = [clone(made) for made in large]
        new = tuple(to(engine, tokens(case, q_len, head_dim), tokens(case, q_len, head_dim)))
        wide = torch.randn(3, q_len, 2 * case.num_q_heads, head_dim, device=engine).to(case.dtype)
        query = wide[:, :, 1::2].transpose(1, 2)
        out, lse = attend(case, list(views), query, new=new)
        expected, expected_lse = attend(case, planes, query.contiguous(), new=tuple(x.contiguous() for x in new))
        assert_same(out, expected.cpu(), f"{case}, out")
        assert_same(lse, expected_lse.cpu(), f"{case}, lse")
        for view, made, whole, old in zip(views, planes, large, before, strict=True):
            assert_same_planes(view, clone(made), f"{case}, views")
            for plane in view.tensors():
                plane.zero_()
            for plane, then in zip(whole.tensors(), old.tensors(), strict=True):
                is_outside = plane.cpu() != 0 if plane.dtype == torch.uint8 else plane.cpu().isnan()
                assert_same(plane.cpu()[is_outside], then[is_outside], f"{case}, around the views")


def stretch(planes: Planes, start: int, stop: int) -> Planes:
    """Some tokens of planes whose scales are not shared between tokens."""
    scale, zero = (None if plane is None else plane[..., start:stop] for plane in (planes.scale, planes.zero))
    return Planes(planes.codes[:, :, start:stop], scale, zero)


@CUDA_ONLY
@pytest.mark.slow
def test_planes_beyond_two_gigabytes() -> None:
    """Codes of 4.4 and 2.2 GB. A few tokens all over the cache carry half of the weight; a wrong offset misses them."""
    capacity, heads, head_dim, dtype = 64 * 67_500, 8, 128, torch.bfloat16
    key_format, value_format = PRESETS["k8v4"]
    planes = []
    for kv_format in (key_format, value_format):
        made = kv_format.allocate(1, heads, head_dim, capacity, dtype=dtype, device=torch.device("cuda"))
        made.codes.random_(0, 256)
        assert made.scale is not None
        made.scale.uniform_(0.005, 0.015)
        if made.zero is not None:
            made.zero.uniform_(-1, 1)
        planes.append(made)
    assert all(made.codes.numel() > 2**31 for made in planes)
    targets = torch.linspace(0, capacity - 2, 17, device="cuda").long()
    sign = torch.randint(0, 2, (head_dim,), device="cuda") * 2 - 1
    planes[0].codes[:, :, targets] = (128 + 127 * sign).to(torch.uint8)
    planes[0].scale[..., targets] = 0.02
    query = (0.45 * sign).expand(1, 4 * heads, 1, head_dim).to(dtype)
    key, value = torch.randn(2, 1, heads, 1, head_dim, device="cuda").to(dtype)
    new = key, value
    lengths = torch.tensor([capacity], dtype=torch.int32, device="cuda")
    counters = new_counters("cuda")
    out, lse = ops.decode(
        query,
        new,
        planes[0],
        planes[1],
        lengths,
        KVLayout(key_format, value_format),
        softmax_scale=0.088,
        counters=counters,
    )
    assert not counters.any()
    for x, made, kv_format in zip(new, planes, (key_format, value_format), strict=True):
        written = reference.quantize(x, kv_format)
        assert_same(made.codes[:, :, -1:], written.codes.cpu(), "codes of the last token")
        for plane, expected in ((made.scale, written.scale), (made.zero, written.zero)):
            if plane is not None and expected is not None:
                assert_same(plane[..., -1:], expected.cpu(), "scale or zero of the last token")
    total = torch.zeros(heads, 4, 1, dtype=torch.float64, device="cuda")
    weighted = torch.zeros(heads, 4, head_dim, dtype=torch.float64, device="cuda")
    grouped, max_value = query.double().view(heads, 4, head_dim), 0.0
    for start in range(0, capacity, 500_000):
        key, value = (
            reference.dequantize(stretch(made, start, start + 500_000), kv_format)[0]
            for made, kv_format in zip(planes, (key_format, value_format), strict=True)
        )
        weights = (0.088 * grouped @ key.double().mT).exp()
        total += weights.sum(-1, keepdim=True)
        weighted += weights @ value.double()
        max_value = max(max_value, float(value.abs().max()))
    exact = (weighted / total).view(1, 1, 4 * heads, head_dim)
    assert_close(out, exact.float().cpu(), weight_rounding_bound(exact, dtype, max_value), "out")
    # The sum has rounded weights, each off by half an ulp at most.
    assert_close(lse, total.log().float().view(1, 4 * heads, 1).cpu(), torch.finfo(dtype).eps, "lse")


# --- order, runs and streams ------------------------------------------------------------------------------------------


@variants
@pytest.mark.sanitize
def test_five_runs_give_equal_bits(engine: str, formats: tuple[KVFormat, KVFormat]) -> None:
    """With counters and without, on another stream, at the plan's splits and at given ones; counters return to zero."""
    case = Case(formats, 128, torch.bfloat16, 4, 1, (700, 33, 0, 512), capacity=768)
    planes, query = [clone(filled(case, side), engine) for side in (0, 1)], queries(case).to(engine)
    counters = new_counters(engine)
    for num_splits in (0, 1, 5, 16):
        expected, expected_lse = (x.cpu() for x in attend(case, planes, query, num_splits=num_splits))
        for run in range(5):
            shared = counters if run % 2 else None
            if engine == "cuda" and run >= 3:
                stream = torch.cuda.Stream()
                stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(stream):
                    out, lse = attend(case, planes, query, num_splits=num_splits, counters=shared)
                torch.cuda.current_stream().wait_stream(stream)
            else:
                out, lse = attend(case, planes, query, num_splits=num_splits, counters=shared)
            assert_same(out, expected, f"{case}, {num_splits} splits, run {run}")
            assert_same(lse, expected_lse, f"{case}, {num_splits} splits, run {run}")
            assert not counters.any(), f"{case}, {num_splits} splits, run {run}: counters are left behind"


@variants
def test_fixed_splits_make_a_sequence_independent_of_its_batch(engine: str, formats: tuple[KVFormat, KVFormat]) -> None:
    lengths = (500, 33, 1, 0, 1024, 64)
    for num_splits, q_len in ((1, 1), (2, 1), (7, 1), (3, 4)):
        case = Case(formats, 64, torch.bfloat16, 4, q_len, lengths, capacity=1024)
        planes, query = [clone(filled(case, side), engine) for side in (0, 1)], queries(case).to(engine)
        out, lse = attend(case, planes, query, num_splits=num_splits)
        for rows in ([0], [1], [4], [2, 4, 0], [5, 3]):
            some = [Planes(*(None if x is None else x[rows] for x in sides_of(made))) for made in planes]
            fewer = Case(formats, 64, case.dtype, 4, q_len, tuple(lengths[row] for row in rows), capacity=1024)
            ours, our_lse = attend(fewer, some, query[rows], num_splits=num_splits)
            assert_same(ours, out[rows].cpu(), f"{fewer}, {num_splits} splits, rows {rows}")
            assert_same(our_lse, lse[rows].cpu(), f"{fewer}, {num_splits} splits, rows {rows}")


@CUDA_ONLY
@variants
def test_nor_do_large_batches_change_it(formats: tuple[KVFormat, KVFormat]) -> None:
    """Over thousands of tokens, where the plan would have blocks of other warps for many heads than for a few."""
    lengths = (4000, 4096, 1, 3333) * 40
    case = Case(formats, 128, torch.bfloat16, 4, 1, lengths, capacity=4096)
    one = Case(formats, 128, case.dtype, 4, 1, lengths[:4], capacity=4096)
    few, query = [clone(filled(one, side), "cuda") for side in (0, 1)], queries(one).to("cuda")
    planes = [Planes(*(None if x is None else x.repeat(40, 1, 1, 1) for x in sides_of(made))) for made in few]
    for num_splits in (1, 2, 7):
        out, lse = attend(case, planes, query.repeat(40, 1, 1, 1), num_splits=num_splits)
        alone, alone_lse = attend(one, few, query, num_splits=num_splits)
        assert_same(out[-4:], alone.cpu(), f"{one}, {num_splits} splits")
        assert_same(lse[-4:], alone_lse.cpu(), f"{one}, {num_splits} splits")


@CUDA_ONLY
@variants
def test_a_graph_is_replayed_with_any_lengths(formats: tuple[KVFormat, KVFormat]) -> None:
    """Captured once; lengths grow, shrink, differ and vanish, and every replay appends too."""
    case = Case(formats, 128, torch.bfloat16, 4, 1, (640, 640, 640), capacity=640)
    ours = [filled(case, side, tokens(case, 640, 128).cuda()) for side in (0, 1)]
    eager = [clone(made, "cuda") for made in ours]
    query, key, value = (x.cuda() for x in (queries(case), tokens(case, 1, 128), tokens(case, 1, 128)))
    lengths, counters = case.lengths_tensor().cuda(), new_counters("cuda")

    def step(planes: list[Planes], counters: Tensor | None) -> tuple[Tensor, Tensor]:
        return attend(case, planes, query, new=(key, value), lengths=lengths, counters=counters)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step([clone(made, "cuda") for made in ours], counters)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = step(ours, counters)
    for now in ((640, 1, 33), (2, 640, 64), (0, 0, 0), (65, 0, 639), (1, 1, 1), (640, 640, 640)):
        lengths.copy_(torch.tensor(now, dtype=torch.int32))
        for x in (query, key, value):
            x.normal_()
        graph.replay()
        expected, expected_lse = step(eager, None)
        assert_same(out, expected.cpu(), f"{case} at {now}")
        assert_same(lse, expected_lse.cpu(), f"{case} at {now}")
        for side in (0, 1):
            assert_same_planes(ours[side], clone(eager[side]), f"{case} at {now}")
        assert not counters.any(), f"{case} at {now}: counters are left behind"


@CUDA_ONLY
@pytest.mark.sanitize
def test_two_streams_with_counters_of_their_own() -> None:
    calls = []
    for formats, lengths in ((PRESETS["int8"], (900, 40)), (PRESETS["int4-token"], (1024,))):
        case = Case(formats, 128, torch.bfloat16, 4, 1, lengths, capacity=1024)
        planes, query = [clone(filled(case, side), "cuda") for side in (0, 1)], queries(case).cuda()
        expected = attend(case, planes, query, lengths=case.lengths_tensor().cuda())[0].cpu()
        calls.append((case, planes, query, case.lengths_tensor().cuda(), new_counters("cuda"), expected))
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    results: list[list[Tensor]] = [[], []]
    for _ in range(20):
        for i, (case, planes, query, lengths_tensor, counters, _) in enumerate(calls):
            with torch.cuda.stream(streams[i]):
                results[i].append(attend(case, planes, query, lengths=lengths_tensor, counters=counters)[0])
    torch.cuda.synchronize()
    for (case, _, _, _, counters, expected), outs in zip(calls, results, strict=True):
        for out in outs:
            assert_same(out, expected, f"{case}, two streams")
        assert not counters.any()


# --- lengths and batches ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", QUANTIZED)
def test_very_unequal_lengths(engine: str, preset: str) -> None:
    long = 20000 if engine == "cuda" else 1500
    capacity = capacity_for(long, PRESETS[preset])
    for lengths in ((10, long, 10, 10), (long, 0, 0, 0, 1, 10, 10, 10, 10), (0, 0, long // 2, long)):
        case = Case(PRESETS[preset], 64, torch.bfloat16, 4, 1, lengths, capacity=capacity, num_kv_heads=1)
        out, _ = check_precision(case, engine, flat)
        assert not any(out[b].any() for b, length in enumerate(lengths) if length == 0)


@pytest.mark.parametrize("batch", [1, 2, 3, 65, *([132, 133, 512, 513] if HAS_GPU else [])])
@pytest.mark.parametrize("preset", ["int8", "int4-g32"])
def test_every_batch(engine: str, preset: str, batch: int) -> None:
    for num_q_per_kv in (1, 8):
        lengths = tuple((7 * b + batch) % 129 for b in range(batch))
        case = Case(PRESETS[preset], 64, torch.float16, num_q_per_kv, 1, lengths, num_kv_heads=1)
        check_precision(case, engine, flat)


# --- masks and several queries ----------------------------------------------------------------------------------------


def extras_for(case: Case, name: str) -> dict[str, Any]:
    every: dict[str, Any] = {
        "softcap": 6.0,
        "sinks": torch.linspace(-2, 5, case.num_q_heads),
        "alibi_slopes": torch.linspace(0.005, 0.3, case.num_q_heads),
    }
    return every if name == "all" else {name: every[name]} if name in every else {}


@pytest.mark.parametrize("formats", VARIANTS[1:8:2] + VARIANTS[8:10], ids=lambda value: "+".join(map(name_of, value)))
def test_several_queries_see_up_to_themselves(engine: str, formats: tuple[KVFormat, KVFormat]) -> None:
    """Every chunk of 2 to 33 tokens and some longer ones, each format with a fifth of them."""
    index = VARIANTS.index(formats)
    chunks = [*range(2, 34), 64, 100, 257]
    for i, q_len in enumerate(chunks):
        if i % 6 != index % 6 and not (engine == "cuda" and q_len < 10):
            continue
        head_dim, num_q_per_kv = KERNEL_DIMS[i % 5], GROUPS[i % 7] if q_len < 40 else 1 + i % 2
        name = ("none", "softcap", "sinks", "alibi_slopes", "all")[i % 5]
        lengths = (q_len, q_len + 37, 320)
        starts = (0, min(q_len, 30), 65) if i % 2 else None
        fitted = fitting(formats, head_dim)
        case = Case(fitted, head_dim, torch.bfloat16, num_q_per_kv, q_len, lengths, starts, 1, capacity=320)
        run_decode(engine, case, sliding_window=(0, 40)[i % 3 == 0], **extras_for(case, name))


@pytest.mark.full(
    when=lambda dtype, engine: dtype == torch.float16 and engine != "cuda",
    reason="only GPUs have these tiles; a CPU makes float32 of both dtypes first",
)
@pytest.mark.parametrize("formats", VARIANTS[1:8:2] + VARIANTS[8:10], ids=lambda value: "+".join(map(name_of, value)))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rows_that_fill_two_to_four_column_tiles(
    engine: str, formats: tuple[KVFormat, KVFormat], dtype: torch.dtype
) -> None:
    """17 to 64 query rows of a key-value head with 128 channels, as proposals of an assistant have them."""
    shapes = [(4, 5), (8, 3), (1, 17), (4, 6), (16, 2), (4, 8), (7, 5), (4, 16)]
    for i, (num_q_per_kv, q_len) in enumerate(shapes):
        name = ("none", "softcap", "sinks", "alibi_slopes", "all")[i % 5]
        lengths, starts = (q_len, q_len + 37, 700), (0, min(q_len, 30), 65) if i % 2 else None
        case = Case(fitting(formats, 128), 128, dtype, num_q_per_kv, q_len, lengths, starts, 1, capacity=768)
        options = {"sliding_window": (0, 40)[i % 3 == 0], "num_splits": (0, 1, 3)[i % 3]}
        run_decode(engine, case, **options, **extras_for(case, name))


# A window of w at position p starts at p + 1 - w: with lengths next to 128 these fall on, before and behind
# the borders of tiles.
WINDOWS = (1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 96, 200)


@pytest.mark.parametrize("q_len", [1, 2, 3, 17])
@pytest.mark.parametrize("formats", VARIANTS[1:9:2], ids=lambda value: "+".join(map(name_of, value)))
def test_windows_start_anywhere_in_a_tile(engine: str, formats: tuple[KVFormat, KVFormat], q_len: int) -> None:
    for i, window in enumerate(WINDOWS):
        lengths = (128, 129, 127, 144, q_len)
        starts = (None, (0, 64, 100, 16, 0), (127, 15, 33, 130, 1))[i % 3]
        case = Case(formats, 64, torch.bfloat16, 4, q_len, lengths, starts, 1, capacity=192)
        name = ("none", "softcap", "sinks", "alibi_slopes", "all")[i % 5]
        run_decode(engine, case, sliding_window=window, num_splits=(0, 1, 3)[i % 3], **extras_for(case, name))


# --- append in the same launch ----------------------------------------------------------------------------------------

APPENDING = [*VARIANTS, pair(KVFormat("int8", "token", symmetric=False)), pair(KVFormat("int4", "tensor"))]
appending = pytest.mark.parametrize("formats", APPENDING, ids=lambda formats: "+".join(map(name_of, formats)))


def check_fused(
    case: Case,
    planes: list[Planes],
    new: list[Tensor],
    query: Tensor,
    key_transform: KeyTransform | None = None,
    **options: Any,
) -> list[Planes]:
    """One call and two give the same planes and the same output, bitwise; the planes after one call."""
    device, lengths = str(query.device), case.lengths_tensor().to(query.device)
    fused, apart = ([clone(made, device) for made in planes] for _ in range(2))
    options["key_transform"] = transform = None if key_transform is None else key_transform.to(device)
    out, lse = attend(case, fused, query, new=(new[0], new[1]), counters=new_counters(device), **options)
    ops.append(new[0], new[1], apart[0], apart[1], lengths, case.layout, transform)
    expected, expected_lse = attend(case, apart, query, **options)
    for side in (0, 1):
        assert_same_planes(fused[side], clone(apart[side]), f"{case}, fused")
    assert_same(out, expected.cpu(), f"{case}, out, fused")
    assert_same(lse, expected_lse.cpu(), f"{case}, lse, fused")
    return fused


@appending
def test_appending_in_the_same_call_changes_nothing(engine: str, formats: tuple[KVFormat, KVFormat]) -> None:
    for i, q_len in enumerate((1, 2, 3, 4, 5, 6, 7, 8, 9, 40)):
        head_dim = KERNEL_DIMS[i % 5]
        lengths = (q_len, 63 + q_len, 128, 127)
        dtype = (torch.bfloat16, torch.float16, torch.float32)[i % 3]
        fitted = fitting(formats, head_dim)
        case = Case(fitted, head_dim, dtype, GROUPS[i % 7], q_len, lengths, num_kv_heads=1 + i % 3)
        planes = [filled(case, side) for side in (0, 1)]
        new = to(engine, *(tokens(case, q_len, head_dim) for _ in range(2)))
        check_fused(case, planes, new, queries(case).to(engine), num_splits=(0, 1, 3)[i % 3])


@appending
@pytest.mark.sanitize
def test_new_keys_are_transformed_in_the_same_call(engine: str, formats: tuple[KVFormat, KVFormat]) -> None:
    for i, (head_dim, kind) in enumerate(itertools.product(KERNEL_DIMS, KINDS)):
        q_len = (1, 1, 3)[i % 3]
        case = Case(
            fitting(formats, head_dim),
            head_dim,
            (torch.bfloat16, torch.float16, torch.float32)[i // 2 % 3],
            GROUPS[i % 7],
            q_len,
            (q_len, 63 + q_len, 128),
        )
        transform = make_transform(kind, head_dim)
        planes, new = [filled(case, side) for side in (0, 1)], [tokens(case, q_len, head_dim) for _ in range(2)]
        num_splits = (0, 1, 3)[i % 3]
        fused = check_fused(case, planes, to(engine, *new), queries(case).to(engine), transform, num_splits=num_splits)
        for side in (0, 1):
            reference.append(
                new[side], planes[side], case.formats[side], case.lengths_tensor(), None if side else transform
            )
            assert_same_planes(fused[side], planes[side], f"{case}, {kind}, side {side}")


@appending
@pytest.mark.sanitize
def test_new_tokens_of_one_call_may_fall_to_several_splits(engine: str, formats: tuple[KVFormat, KVFormat]) -> None:
    """Blocks take turns at 64, 128 or 256 tokens: new ones on both sides of such a place, and behind the last that a
    padded row sees."""
    for q_len, num_splits in ((1, 2), (2, 2), (3, 7), (4, 3)):
        lengths = (128 + q_len - 1, 256 + 1, 512 + q_len - 1, 700)
        starts = (0, 256 + 1, 512, 700)  # rows without a visible token, or with new ones only
        case = Case(formats, 64, torch.bfloat16, 2, q_len, lengths, starts, capacity=704)
        planes = [filled(case, side) for side in (0, 1)]
        new = to(engine, *(tokens(case, q_len, 64) for _ in range(2)))
        check_fused(case, planes, new, queries(case).to(engine), num_splits=num_splits)


@appending
def test_bad_new_tokens_stay_where_they_are(engine: str, formats: tuple[KVFormat, KVFormat]) -> None:
    """NaN and infinity in one head of one side: the same planes and output as in two calls, and as the reference's."""
    for side, bad in itertools.product((0, 1), (torch.nan, -torch.inf)):
        case = Case(formats, 64, torch.float32, 2, 2, (70, 2, 33))
        planes, new = [filled(case, each) for each in (0, 1)], [tokens(case, 2, 64) for _ in range(2)]
        new[side][1, 1, 0, 5] = bad
        fused = check_fused(case, planes, to(engine, *new), queries(case).to(engine))
        for x, made, ours, kv_format in zip(new, planes, fused, formats, strict=True):
            reference.append(x, made, kv_format, case.lengths_tensor())
            assert_same_planes(ours, made, f"{case}, side {side}, {bad}")


@CUDA_ONLY
@appending
@pytest.mark.sanitize
def test_what_has_no_room_is_left_out(formats: tuple[KVFormat, KVFormat]) -> None:
    """Lengths beyond the capacity and below the number of new tokens: a GPU does not check, and writes nowhere else.

    A sequence without some of its tokens has NaN for a result.
    """
    for q_len in (1, 5):
        case = Case(formats, 64, torch.bfloat16, 2, q_len, (128, q_len, 128, 128))
        planes = [clone(filled(case, side), "cuda") for side in (0, 1)]
        for made in planes:  # a frozen scale of random tokens; the rest does not matter here
            for plane in made.tensors()[1:]:
                plane.copy_(plane.nan_to_num(0.05))
        lengths = torch.tensor([128, q_len, 130, q_len - 1], dtype=torch.int32, device="cuda")
        new = tuple(to("cuda", tokens(case, q_len, 64), tokens(case, q_len, 64)))
        query = queries(case).cuda()
        results = []
        for is_fused in (True, False):
            views, large = zip(*[embedded(made, "cuda") for made in planes], strict=True)
            if is_fused:
                result = attend(case, list(views), query, new=new, lengths=lengths, counters=new_counters("cuda"))
            else:
                ops.append(*new, *views, lengths, case.layout)
                result = attend(case, list(views), query, lengths=lengths)
            results.append((result, [clone(view) for view in views]))
            for view, whole in zip(views, large, strict=True):
                for part, plane in zip(view.tensors()[1:], whole.tensors()[1:], strict=True):
                    part.fill_(torch.nan)
                    assert plane.isnan().all(), f"{case}: scales were written outside of the planes"
            is_lost = result[0].isnan().flatten(1).any(1).tolist()
            assert is_lost == [False, False, True, False], f"{case}: whose tokens are missing"
            assert result[0][2].isnan().all() and result[1][2].isnan().all()
        (fused, fused_planes), (apart, apart_planes) = results
        for ours, theirs in zip((*fused,), (*apart,), strict=True):
            assert_same(ours, theirs.cpu(), f"{case}, no room")
        for side in (0, 1):
            assert_same_planes(fused_planes[side], apart_planes[side], f"{case}, no room")
            before, after = planes[side].codes.cpu(), fused_planes[side].codes
            assert_same(after[0, :, : 128 - q_len], before[0, :, : 128 - q_len], f"{case}, older tokens")
            assert_same(after[1, :, q_len:], before[1, :, q_len:], f"{case}, behind the end")


# --- every variant, small ---------------------------------------------------------------------------------------------


@variants
@pytest.mark.parametrize("dtype", LOW_PRECISION, ids=name_of)
@pytest.mark.sanitize
def test_every_variant(engine: str, formats: tuple[KVFormat, KVFormat], dtype: torch.dtype) -> None:
    """Head dims, groups, chunks and splits, each combined with something of the others; float32 now and then."""
    shapes = [(1, 1, 0), (4, 1, 3), (8, 1, 1), (16, 1, 0), (5, 1, 2), (2, 3, 0), (4, 9, 3), (1, 40, 0)]
    for i, (num_q_per_kv, q_len, num_splits) in enumerate(shapes):
        if engine == "cpu" and i % 2 == (dtype == torch.float16):
            continue  # these kernels come in fewer variants
        head_dim = KERNEL_DIMS[(i + 2 * (dtype == torch.float16)) % 5]
        lengths = (q_len, 64 + q_len, 192 - i)
        used = torch.float32 if i == 3 + 2 * (dtype == torch.float16) else dtype
        case = Case(fitting(formats, head_dim), head_dim, used, num_q_per_kv, q_len, lengths, capacity=192)
        name = ("none", "none", "all", "none", "sinks", "softcap", "none", "alibi_slopes")[i]
        run_decode(engine, case, num_splits=num_splits, sliding_window=(0, 70)[i == 4], **extras_for(case, name))
        if i % 3 == 0:
            planes = [filled(case, side) for side in (0, 1)]
            new = to(engine, *(tokens(case, q_len, head_dim) for _ in range(2)))
            check_fused(case, planes, new, queries(case).to(engine), num_splits=num_splits)


@pytest.mark.sanitize
def test_prompts_of_every_format(engine: str) -> None:
    for i, formats in enumerate(APPENDING):
        head_dim = KERNEL_DIMS[i % 5]
        case = Case(fitting(formats, head_dim), head_dim, torch.bfloat16, q_len=70, lengths=(70, 128))
        run_append(engine, case, *(tokens(case, 70, case.head_dim) for _ in range(2)))


def test_poison_is_poison() -> None:
    """The planes of these tests really do hold what no result may depend on."""
    for formats in VARIANTS:
        for kv_format in formats:
            planes = poisoned(kv_format, 1, 2, 64, 64, torch.bfloat16)
            if not (kv_format.storage == "none" or kv_format.granularity == "tensor"):
                assert planes.scale is not None and planes.scale.isnan().all()
            assert reference.dequantize(planes, kv_format).isnan().all()
