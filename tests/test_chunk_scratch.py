"""Attention of so many query rows that tiles of keys and values are filled once, in a scratch (csrc/cuda/sm90/chunk/).

`test_chunks.py` has fewer rows, whose thread blocks fill tiles themselves. The same calls in pieces of few rows are
served by that kernel, so here both are compared, too.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from cases import Case, clone, filled, make_transform, name_of, queries
from checks import run_decode
from compare import assert_close, assert_same
from test_chunk_steps import own_of
from test_chunks import QUANTIZED, exact_and_torch, extras_for, variants
from test_pages import compared
from tolerances import precision_bounds, root_mean_square
from torch import Tensor

from hf_kvquant import ops
from hf_kvquant.config import PRESETS
from hf_kvquant.spec.formats import KVFormat

MIN_ROWS = 1024  # kMinScratchRows of requirements.h
SCRATCH_BYTES = 2**26  # kMaxScratchBytes

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs compute capability 9.0"
)


def attend(case: Case, query: Tensor, planes: Any, first: int = 0, last: int | None = None, **options: Any) -> Tensor:
    """Attention of query tokens `first ... last - 1` to the tokens up to the last of them."""
    last = case.q_len if last is None else last
    held = case.lengths_tensor().cuda() - (case.q_len - last)
    options = {"softmax_scale": case.head_dim**-0.5, **options}
    return ops.decode(query[:, :, first:last], None, *planes, held, case.layout, **options)[0]


def on_gpu(case: Case) -> tuple[Tensor, list[Any]]:
    """A query, and planes that are made on the GPU."""
    shape = case.batch, case.num_kv_heads, case.capacity, case.head_dim
    sides = [torch.randn(shape, device="cuda").to(case.dtype) for _ in range(2)]
    return queries(case).cuda(), [filled(case, side, sides[side]) for side in (0, 1)]


@pytest.mark.parametrize(("num_sequences", "capacity", "tokens_held"), [(1, 8192, 8192), (3, 16384, 16384)])
def test_the_scratch_is_bounded(num_sequences: int, capacity: int, tokens_held: int) -> None:
    """A call takes memory for its tiles, and no more than is allowed, however many tokens there are."""
    case = Case(PRESETS["int8"], 128, torch.bfloat16, 4, MIN_ROWS // 4, (tokens_held,) * num_sequences, None, 8)
    case = dataclasses.replace(case, capacity=capacity)
    query, planes = on_gpu(case)
    peaks = []
    for first in (0, case.q_len - 128):  # all rows, and as many as the other kernel serves
        attend(case, query, planes, first, num_splits=1)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        attend(case, query, planes, first, num_splits=1)
        peaks.append(torch.cuda.max_memory_allocated() - before)
    needed = min(SCRATCH_BYTES, 2 * 2 * num_sequences * 8 * capacity * 128)
    results = 2 * query.numel() * 2
    assert peaks[1] < needed / 2
    assert needed // 2 < peaks[0] < 1.01 * needed + results


@variants
def test_formats_match_the_reference(formats: tuple[KVFormat, KVFormat]) -> None:
    """Full and partial row tiles, padding, unequal lengths, windows, fixed splits and what changes scores."""
    for i, (q_len, num_q_per_kv) in enumerate([(2048, 1), (517, 4), (1100, 2), (420, 5)]):
        head_dim = 64 if formats[0].group_size or formats[1].group_size else (128, 64, 96)[i % 3]
        lengths, starts = (q_len, q_len + 37, 2176), (0, min(q_len, 130), 65) if i % 2 else None
        dtype = (torch.bfloat16, torch.float16)[i % 2]
        case = Case(formats, head_dim, dtype, num_q_per_kv, q_len, lengths, starts, 1, capacity=2176)
        extras = extras_for(case, ("none", "softcap", "alibi_slopes", "all")[i])
        run_decode("cuda", case, sliding_window=(0, 300, 0, 1000)[i], num_splits=(0, 1, 3, 0)[i], **extras)


@pytest.mark.parametrize("preset", ["int8", "int4-channel", "k8v4", "none"])
def test_wide_and_narrow_heads(preset: str) -> None:
    for head_dim, value_dim in ((256, 256), (192, 128), (128, 64), (64, 32)):
        case = Case(PRESETS[preset], head_dim, torch.bfloat16, 4, 520, (900, 521), None, 1, value_dim, capacity=1024)
        run_decode("cuda", case)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=name_of)
def test_rows_without_codes(dtype: torch.dtype) -> None:
    """Preset `none`: with padding, a window, and numbers of very different sizes, for which bfloat16 has the range."""
    case = Case(PRESETS["none"], 128, dtype, 4, 520, (1000, 700), (3, 200), 1, capacity=1024)
    run_decode("cuda", case)
    run_decode("cuda", case, sliding_window=200, softcap=8.0)
    for key_size, value_size in ((1e-3, 1e-3), (1e2, 1e2), *(((1e-4, 3e30),) if dtype == torch.bfloat16 else ())):
        size = torch.where(torch.arange(1024) % 300 < 200, 1.0, 1e-2).view(1, 1, -1, 1)
        sides = [(torch.randn(2, 1, 1024, 128) * size * each).to(dtype) for each in (key_size, value_size)]
        query = (queries(case).float() / key_size).to(dtype)
        run_decode("cuda", case, planes=(filled(case, 0, sides[0]), filled(case, 1, sides[1])), query=query)


@pytest.mark.parametrize("preset", ["int8", "none"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_maxima_may_rise_late(preset: str, head_dim: int) -> None:
    """Every tile has larger logits than the one before, by a few bits, beyond float16 or beyond float32, or smaller."""
    case = Case(PRESETS[preset], head_dim, torch.bfloat16, 4, 520, (1800, 900), None, 1, capacity=2048)
    for factor in (3.0, 30.0, 300.0, -300.0):
        key = torch.randn(2, 1, 2048, head_dim)
        key[..., 0] = torch.arange(2048) / 100 * factor
        query = queries(case)
        query[..., 0] = 4 * (head_dim / 64) ** 0.5
        run_decode("cuda", case, planes=(filled(case, 0, key.to(case.dtype)), filled(case, 1)), query=query)


@pytest.mark.parametrize("preset", ["int8", "int4-token", "int4-channel", "fp8"])
def test_tokens_that_are_no_codes(preset: str) -> None:
    """First and newest tokens of dense windows, and a chunk's own, are in tiles together with codes."""
    for i, (sink_length, residual_length) in enumerate([(0, 0), (4, 28), (3, 150)]):
        case = Case(PRESETS[preset], 64, torch.bfloat16, 4, 530, (900, 531, 740), (0, 7, 150), 1, capacity=1024)
        case = dataclasses.replace(case, sink_length=sink_length, residual_length=residual_length)
        run_decode("cuda", case, sliding_window=300 if i == 1 else 0)
        transform = make_transform("center+smooth+rotate", 64, 1)
        run_decode("cuda", case, own=own_of(case), key_transform=transform)
        run_decode("cuda", dataclasses.replace(case, starts=None), own=own_of(case))


@pytest.mark.parametrize("name", ["int8", "int4-token", "k8v4", "none"])
def test_pages(name: str) -> None:
    torch.manual_seed(1)
    compared(name, "cuda", 128, [1400, 2100], [200, 1040])
    compared(name, "cuda", 256, [1400, 2100], [200, 1040], {"sliding_window": 300, "num_splits": 0})


@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("preset", ["int8", "int4-token", "int4-g32", "fp8", "none"])
def test_bad_tokens_stay_with_those_who_see_them(preset: str, side: int) -> None:
    """A key or value that is NaN makes the outputs of its own and later tokens NaN, and changes no others."""
    case = Case(PRESETS[preset], 64, torch.bfloat16, 4, 520, (900, 600), None, 1, capacity=1024)
    good = [torch.randn(2, 1, 1024, 64).to(case.dtype) for _ in range(2)]
    bad = [x.clone() for x in good]
    bad[side][0, 0, 390] = torch.nan
    first = 390 - (900 - 520)  # query token
    query = queries(case).cuda()
    expected, out = (attend(case, query, [clone(filled(case, i, x[i]), "cuda") for i in (0, 1)]) for x in (good, bad))
    bound = torch.finfo(case.dtype).eps * float(expected.abs().max())
    assert_close(out[0, :first], expected[0, :first].float().cpu(), bound, f"{case}, before the token")
    assert_same(out[1], expected[1].cpu(), f"{case}, the other sequence")
    assert out[0, first:].isnan().all()


@pytest.mark.parametrize("preset", ["int8", "int4-channel", "k8v4", "none"])
def test_a_sequence_does_not_depend_on_its_batch(preset: str) -> None:
    case = Case(PRESETS[preset], 64, torch.bfloat16, 4, 520, (1000, 700, 521, 1024), None, 1, capacity=1024)
    query, planes = on_gpu(case)

    def some_of(rows: list[int], num_splits: int) -> Tensor:
        part = dataclasses.replace(case, lengths=tuple(case.lengths[b] for b in rows))
        return attend(part, query[rows], [made.map(lambda x: x[rows]) for made in planes], num_splits=num_splits)

    for num_splits in (1, 3):
        whole = some_of([0, 1, 2, 3], num_splits)
        for rows in ([0], [2, 1], [3]):
            assert_same(some_of(rows, num_splits), whole[rows].cpu(), f"{case}, rows {rows}, {num_splits} splits")


# Without the presets whose newest tokens are dense until their block is full: pieces end in the midst of blocks.
@pytest.mark.parametrize("preset", ["none", *(name for name in QUANTIZED if PRESETS[name][0].block_size is None)])
@pytest.mark.parametrize(
    ("heads", "capacity", "lengths"),
    [(6, 32768, (32768, 700)), (2, 16384, (16384, 600, 9000, 16000, 5000)), (1, 140000, (2000,))],
    ids=["slices of heads", "slices of sequences", "too long for the scratch"],
)
def test_slices_agree_with_the_other_kernel(preset: str, heads: int, capacity: int, lengths: tuple[int, ...]) -> None:
    """Calls whose tiles do not fit the scratch at once, and the same rows in pieces that are too few for it."""
    capacity = -(-capacity // 128) * 128
    case = Case(PRESETS[preset], 128, torch.bfloat16, 4, 520, lengths, None, heads, capacity=capacity)
    query, planes = on_gpu(case)
    whole = attend(case, query, planes)
    cuts = (0, 200, 400, 520)
    pieces = [attend(case, query, planes, first, last) for first, last in itertools.pairwise(cuts)]
    # Both round weights to 11 bits and values to 11 bits; sums are in another order.
    expected = torch.cat(pieces, dim=1).float().cpu()
    bound = 4 * torch.finfo(case.dtype).eps * float(expected.abs().max())
    assert_close(whole, expected, bound, str(case))


@pytest.mark.parametrize("preset", ["int8", "int4-channel", "k8v4", "none"])
def test_slices_change_no_bit(preset: str) -> None:
    """Heads whose tiles do not fit the scratch at once, and each of them alone."""
    case = Case(PRESETS[preset], 128, torch.bfloat16, 4, 520, (32768, 700), None, 6, capacity=32768)
    query, planes = on_gpu(case)
    whole = attend(case, query, planes, num_splits=2)
    for h in range(6):
        heads = slice(4 * h, 4 * h + 4)
        alone = attend(
            case, query[:, heads], [made.map(lambda x, h=h: x[:, h : h + 1]) for made in planes], num_splits=2
        )
        assert_same(alone, whole[:, :, heads].cpu(), f"{case}, head {h}")


def test_a_graph_may_hold_slices() -> None:
    """Lengths are read on the device, so a replay serves other ones."""
    case = Case(PRESETS["int8"], 128, torch.bfloat16, 4, 520, (32768, 1000), None, 6, capacity=32768)
    query, planes = on_gpu(case)
    lengths, counters = case.lengths_tensor().cuda(), torch.zeros(ops.NUM_COUNTERS, dtype=torch.int32, device="cuda")

    def call() -> tuple[Tensor, Tensor]:
        return ops.decode(query, None, *planes, lengths, case.layout, softmax_scale=0.1, counters=counters)

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = call()
    for held in ((32000, 900), (520, 700), (9000, 1000)):
        lengths.copy_(torch.tensor(held))
        graph.replay()
        for ours, expected in zip(results, call(), strict=True):
            assert_same(ours, expected.cpu(), f"{case}, {held}")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=name_of)
@pytest.mark.parametrize("preset", ["none", *QUANTIZED])
def test_precision_is_that_of_torch(preset: str, dtype: torch.dtype) -> None:
    """Against float64 over the same codes, at most twice the error of PyTorch's attention over dense tensors."""
    for length, factor in ((1024, 1.0), (8192, 0.05), (4096, 3.0)):
        case = Case(PRESETS[preset], 128, dtype, 4, 600, (length,) * 2, None, 2, capacity=length)
        query, planes = on_gpu(case)
        query = (query * factor).to(dtype)
        out = attend(case, query, planes)
        exact, torch_out = exact_and_torch(case, query, planes)
        worst, typical = precision_bounds(exact, torch_out, dtype)
        assert_close(out, exact.float().cpu(), worst, str(case))
        error = root_mean_square(out.double() - exact)
        assert error <= typical, f"{case}: root mean square of errors {error:.3e}, bound {typical:.3e}"
