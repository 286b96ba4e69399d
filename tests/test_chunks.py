"""Attention of many new tokens at once, for which CUDA kernels have a kernel of their own.

`test_ops.py` and `test_cuda_decode.py` compare the ops with `reference.py` for few tokens; here are as many as a chunk
of a prompt has, and what could go wrong with them: several tiles of rows and of tokens, tiles in which only some rows
see some tokens, maxima that rise late, and numbers that do not fit float16.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from cases import Case, clone, filled, make_transform, name_of, queries
from checks import pair, run_decode
from compare import assert_close, assert_same
from tolerances import precision_bounds, root_mean_square
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from hf_kvquant import ops
from hf_kvquant.config import PRESETS
from hf_kvquant.spec import reference
from hf_kvquant.spec.formats import KVFormat
from hf_kvquant.spec.planes import Planes

CUDA_ONLY = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
QUANTIZED = [name for name in PRESETS if name != "none"]
VARIANTS = [
    *(PRESETS[name] for name in QUANTIZED),
    pair(KVFormat("int8", symmetric=False)),
    pair(KVFormat("int4")),
    pair(KVFormat("int4", "group", 64, symmetric=False)),
    (KVFormat("fp8", "tensor"), KVFormat("int8", "token")),
    (KVFormat("int8", "group", 32), KVFormat("fp8", "group", 64)),
]
variants = pytest.mark.parametrize("formats", VARIANTS, ids=lambda formats: "+".join(map(name_of, formats)))


def extras_for(case: Case, name: str) -> dict[str, Any]:
    """What changes scores or weights."""
    every = {
        "softcap": 6.0,
        "sinks": torch.linspace(-2, 5, case.num_q_heads),
        "alibi_slopes": torch.linspace(0.005, 0.3, case.num_q_heads),
    }
    return every if name == "all" else {name: every[name]} if name in every else {}


def exact_and_torch(case: Case, query: Tensor, planes: Sequence[Planes]) -> tuple[Tensor, Tensor]:
    """Attention to full planes in float64, and PyTorch's attention in the working dtype to the same dense tensors."""
    held, num_q_per_kv = case.lengths_tensor().to(query.device), case.num_q_per_kv
    length = case.lengths[0]
    key, value = (
        reference.dequantize(made, kv_format, lengths=held)[:, :, :length]
        for made, kv_format in zip(planes, case.formats, strict=True)
    )
    sees = torch.ones(case.q_len, length, dtype=torch.bool, device=query.device).tril(length - case.q_len)
    repeated = [x.double().repeat_interleave(num_q_per_kv, dim=1) for x in (key, value)]
    scores = (query.double() @ repeated[0].mT * case.head_dim**-0.5).masked_fill(~sees, -torch.inf)
    exact = (scores.softmax(-1) @ repeated[1]).transpose(1, 2)
    torch_out = scaled_dot_product_attention(
        query, key.to(case.dtype), value.to(case.dtype), attn_mask=sees, enable_gqa=True
    )
    return exact, torch_out.transpose(1, 2)


def cases_of(
    formats: tuple[KVFormat, KVFormat], shapes: Sequence[tuple[int, int]]
) -> Iterator[tuple[Case, dict[str, Any]]]:
    """One case for each number of new tokens and of query heads per key-value head, and what changes its scores."""
    for i, (q_len, num_q_per_kv) in enumerate(shapes):
        head_dim = 64 if formats[0].group_size or formats[1].group_size else (128, 64, 96)[i % 3]
        name = ("none", "softcap", "sinks", "alibi_slopes", "all")[i]
        lengths, starts = (q_len, q_len + 37, 512), (0, min(q_len, 130), 65) if i % 2 else None
        dtype = (torch.bfloat16, torch.float16)[i % 2]
        case = Case(formats, head_dim, dtype, num_q_per_kv, q_len, lengths, starts, 1, capacity=512)
        yield case, extras_for(case, name)


@pytest.mark.sanitize
@variants
def test_chunks_match_the_reference(engine: str, formats: tuple[KVFormat, KVFormat]) -> None:
    """Chunks that fill tiles of rows or not, over several tiles of tokens, with padding and unequal lengths."""
    shapes = [(128, 1), (33, 4), (129, 1), (130, 2), (40, 5)]
    for i, (case, extras) in enumerate(cases_of(formats, shapes)):
        run_decode(engine, case, sliding_window=(0, 40, 300)[i % 3], num_splits=(0, 1, 3)[i % 3], **extras)


@pytest.mark.sanitize
@variants
def test_few_rows(engine: str, formats: tuple[KVFormat, KVFormat]) -> None:
    """Up to 64 rows, of which two groups of threads take tiles of tokens in turn: from one tile to all of a cache."""
    for i, (case, extras) in enumerate(cases_of(formats, [(16, 4), (9, 4), (64, 1)])):
        extras.pop("softcap", None)
        lengths = (case.q_len, 256, 257, 512)
        case = dataclasses.replace(case, lengths=lengths, starts=(0, 200, 130, 65) if i else None)
        run_decode(engine, case, sliding_window=(0, 0, 150)[i], num_splits=(1, 2, 0)[i], **extras)


@pytest.mark.parametrize("preset", ["int8", "int4-token", "int4-channel"])
def test_wide_heads(engine: str, preset: str) -> None:
    case = Case(PRESETS[preset], 256, torch.bfloat16, 2, 64, (300, 64), None, 1, capacity=384)
    run_decode(engine, case)
    case = dataclasses.replace(case, head_dim=192)
    run_decode(engine, case, num_splits=2)


@pytest.mark.parametrize("preset", ["int8", "int4-token", "int4-g32", "int4-channel"])
def test_value_heads_may_be_narrower(engine: str, preset: str) -> None:
    for head_dim, value_dim in ((128, 64), (64, 32), (192, 128)):
        case = Case(PRESETS[preset], head_dim, torch.bfloat16, 4, 40, (300, 64), None, 1, value_dim, capacity=384)
        run_decode(engine, case)


@pytest.mark.parametrize("preset", ["int8", "int4-token", "int4-channel", "fp8"])
def test_dense_windows_and_transforms(engine: str, preset: str) -> None:
    """Tokens of the tail have keys in the model's basis, and are in tiles together with codes."""
    for i, (sink_length, residual_length) in enumerate([(0, 0), (4, 0), (0, 32), (3, 150)]):
        case = Case(PRESETS[preset], 64, torch.bfloat16, 4, 40, (300, 40, 129), (0, 7, 100), 1, capacity=384)
        case = dataclasses.replace(case, sink_length=sink_length, residual_length=residual_length)
        run_decode(engine, case, softcap=8.0 if i == 2 else 0.0)
        transform = make_transform("center+smooth+rotate", 64, 1)
        planes = tuple(filled(case, side, None, transform if side == 0 else None) for side in (0, 1))
        run_decode(engine, case, planes=planes, key_transform=transform)  # type: ignore[arg-type]


def test_maxima_may_rise_late(engine: str) -> None:
    """Every tile of tokens has larger logits than the one before, up to what overflows exp, or far smaller ones."""
    case = Case(PRESETS["int8"], 64, torch.bfloat16, 4, 40, (700, 300), None, 1, capacity=768)
    for factor in (1.0, 30.0, -30.0):
        key = torch.randn(2, 1, 768, 64)
        key[..., 0] = torch.arange(768) / 100 * factor
        query = queries(case)
        query[..., 0] = 4
        planes = filled(case, 0, key.to(case.dtype)), filled(case, 1)
        run_decode(engine, case, planes=planes, query=query)


@pytest.mark.parametrize("preset", QUANTIZED)
def test_sizes_beyond_float16(engine: str, preset: str) -> None:
    """Keys and values of one tile that are thousands of times larger, or smaller, than those of another."""
    case = Case(PRESETS[preset], 64, torch.bfloat16, 4, 40, (500,), None, 1, capacity=512)
    for key_size, value_size in ((1e-4, 1e-4), (1e-2, 3e4), (1e3, 1e-3)):
        size = torch.where(torch.arange(512) < 200, 1.0, 1e-2).view(1, 1, -1, 1)
        sides = [torch.randn(1, 1, 512, 64) * size * each for each in (key_size, value_size)]
        planes = filled(case, 0, sides[0].to(case.dtype)), filled(case, 1, sides[1].to(case.dtype))
        query = (queries(case).float() / key_size).to(case.dtype)
        run_decode(engine, case, planes=planes, query=query)


@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("preset", ["int8", "int4-token", "int4-g32", "fp8"])
def test_bad_tokens_stay_with_those_who_see_them(engine: str, preset: str, side: int) -> None:
    """A key or value that is NaN makes the outputs of its own and later tokens NaN, and changes no others."""
    case = Case(PRESETS[preset], 64, torch.bfloat16, 4, 40, (300, 200), None, 1, capacity=384)
    good = [torch.randn(2, 1, 384, 64).to(case.dtype) for _ in range(2)]
    bad = [x.clone() for x in good]
    bad[side][0, 0, 290] = torch.nan
    query, held = queries(case).to(engine), case.lengths_tensor().to(engine)
    results = [
        ops.decode(
            query,
            None,
            *(clone(filled(case, i, x[i]), engine) for i in (0, 1)),
            held,
            case.layout,
            softmax_scale=0.125,
        )
        for x in (good, bad)
    ]
    (expected, expected_lse), (out, lse) = results
    # What else is in its tile may be scaled otherwise, so the last bits may differ.
    bound = torch.finfo(case.dtype).eps * float(expected.abs().max())
    assert_close(out[0, :30], expected[0, :30].float().cpu(), bound, f"{case}, before the token")
    assert_close(lse[0, :, :30], expected_lse[0, :, :30].cpu(), bound, f"{case}, lse before the token")
    assert_same(out[1], expected[1].cpu(), f"{case}, the other sequence")
    assert out[0, 30:].isnan().all()
    assert lse.isfinite().all() if side == 1 else lse[0, :, 30:].isnan().all()


@variants
def test_a_sequence_does_not_depend_on_its_batch(engine: str, formats: tuple[KVFormat, KVFormat]) -> None:
    lengths = (500, 130, 40, 512)
    case = Case(formats, 64, torch.bfloat16, 4, 40, lengths, None, 1, capacity=512)
    planes, query = [clone(filled(case, side), engine) for side in (0, 1)], queries(case).to(engine)

    def attend(rows: list[int], num_splits: int) -> tuple[Tensor, Tensor]:
        held = case.lengths_tensor()[rows].to(engine)
        # Scales that all sequences share have one row.
        some = [made.map(lambda x: x[rows] if x.shape[0] > 1 else x) for made in planes]
        return ops.decode(query[rows], None, *some, held, case.layout, softmax_scale=0.125, num_splits=num_splits)

    for num_splits in (1, 3):
        out, lse = attend([0, 1, 2, 3], num_splits)
        for rows in ([0], [2, 1], [3]):
            ours, our_lse = attend(rows, num_splits)
            assert_same(ours, out[rows].cpu(), f"{case}, rows {rows}, {num_splits} splits")
            assert_same(our_lse, lse[rows].cpu(), f"{case}, rows {rows}, {num_splits} splits")


@pytest.mark.parametrize("preset", [name for name in QUANTIZED if PRESETS[name][0].block_size is None])
def test_a_prompt_may_be_cut_into_any_chunks(engine: str, preset: str) -> None:
    """Over the same codes, results differ by no more than the rounding of both. (New blocks are dense until full.)"""
    q_len, length = 150, 600
    case = Case(PRESETS[preset], 64, torch.bfloat16, 4, q_len, (length,), None, 1, capacity=640)
    planes, query = [filled(case, side) for side in (0, 1)], queries(case)
    on_device = [clone(made, engine) for made in planes]

    def attend(first: int, last: int) -> Tensor:
        held = torch.tensor([length - q_len + last], dtype=torch.int32, device=engine)
        some = query[:, :, first:last].to(engine)
        return ops.decode(some, None, *on_device, held, case.layout, softmax_scale=64**-0.5)[0]

    exact, torch_out = exact_and_torch(case, query, planes)
    worst, _ = precision_bounds(exact, torch_out, case.dtype)
    whole = attend(0, q_len)
    for cuts in ((0, 32, 150), (0, 1, 5, 140, 150), (0, 75, 150)):
        pieces = [attend(first, last) for first, last in itertools.pairwise(cuts)]
        assert_close(torch.cat(pieces, dim=1), whole.float().cpu(), 2 * worst, f"{case}, cut at {cuts}")


@CUDA_ONLY
@pytest.mark.parametrize("preset", ["int8", "int4-channel"])
def test_a_graph_may_hold_a_chunk(preset: str) -> None:
    """Lengths are read on the device, so a replay serves other ones."""
    case = Case(PRESETS[preset], 128, torch.bfloat16, 4, 64, (1024, 1024), None, 2, capacity=1024)
    planes, query = [clone(filled(case, side), "cuda") for side in (0, 1)], queries(case).cuda()
    lengths, counters = case.lengths_tensor().cuda(), torch.zeros(ops.NUM_COUNTERS, dtype=torch.int32, device="cuda")

    def attend() -> tuple[Tensor, Tensor]:
        return ops.decode(query, None, *planes, lengths, case.layout, softmax_scale=0.1, counters=counters)

    attend()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = attend()
    for held in ((1000, 300), (64, 700), (513, 1024)):
        lengths.copy_(torch.tensor(held))
        graph.replay()
        for ours, expected in zip(results, attend(), strict=True):
            assert_same(ours, expected.cpu(), f"{case}, {held}")


@CUDA_ONLY
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=name_of)
@pytest.mark.parametrize("preset", QUANTIZED)
def test_precision_is_that_of_torch(preset: str, dtype: torch.dtype) -> None:
    """Against float64 over the same codes, at most twice the error of PyTorch's attention over dense tensors."""
    for length, q_len, factor in ((1024, 128, 1.0), (8192, 64, 0.05), (8192, 17, 1.0), (4096, 300, 3.0)):
        case = Case(PRESETS[preset], 128, dtype, 4, q_len, (length,) * 2, None, 2, capacity=length)
        query = (torch.randn(2, 8, q_len, 128, device="cuda") * factor).to(dtype)
        sides = [torch.randn(2, 2, length, 128, device="cuda").to(dtype) for _ in range(2)]
        planes = [filled(case, side, sides[side]) for side in (0, 1)]
        held = case.lengths_tensor().cuda()
        out, _ = ops.decode(query, None, *planes, held, case.layout, softmax_scale=128**-0.5)
        exact, torch_out = exact_and_torch(case, query, planes)
        worst, typical = precision_bounds(exact, torch_out, dtype)
        assert_close(out, exact.float().cpu(), worst, str(case))
        error = root_mean_square(out.double() - exact)
        assert error <= typical, f"{case}: root mean square of errors {error:.3e}, bound {typical:.3e}"
