"""Keys with a scale for every channel of a block of tokens (`int4-channel`), from the reference to `generate`.

What this format has that others have not: tokens that stay dense until their block is full, and are transformed only
then; scales that padding must not enter; and a crop that opens a block again. The reference is compared with loops in
float64 here, kernels with the reference. Random histories are in `test_storage.py`, `generate` with and without windows
in `test_windows.py`.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import compare
import models
import pytest
import torch
from cases import KINDS, REFUSED, Case, clone, filled, make_transform, name_of, queries, tokens
from checks import run_decode
from compare import assert_same, assert_same_planes
from models import greedy, left_padded
from torch import Tensor

from hf_kvquant import KeyTransform, KVFormat, KVQuantCache, KVQuantConfig, ops, patched
from hf_kvquant.config import LayerFormats
from hf_kvquant.spec import reference
from hf_kvquant.spec.formats import BLOCK_SIZE
from hf_kvquant.spec.planes import Planes
from hf_kvquant.storage import rewind
from hf_kvquant.storage.layer_store import LayerStore
from hf_kvquant.upstream.releases import with_cache

KEY = KVFormat("int4", "channel", symmetric=False, block_size=BLOCK_SIZE, clip_ratio=15 / 16)
VALUE = KVFormat("int4", symmetric=False, clip_ratio=15 / 16)
FORMATS = (KEY, VALUE)
BORDERS = (1, 2, 127, 128, 129, 255, 256, 257, 300)
ALL = KINDS[-1]
CUDA_ONLY = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def spoiled(case: Case, device: str = "cpu") -> tuple[Planes, Planes]:
    """Empty planes in which whatever must not be read is NaN."""
    made = [
        kv_format.allocate(
            case.batch, case.num_kv_heads, head_dim, case.capacity, dtype=case.dtype, device=torch.device("cpu")
        )
        for kv_format, head_dim in zip(case.formats, case.head_dims(), strict=True)
    ]
    for planes in made:
        planes.codes.random_(0, 256)
        for plane in planes.tensors()[1:]:
            plane.fill_(torch.nan)
    return clone(made[0], device), clone(made[1], device)


def transform_of(kind: str | None, head_dim: int) -> KeyTransform | None:
    return None if kind is None else make_transform(kind, head_dim)


def held(case: Case, key: Tensor | None = None, key_transform: KeyTransform | None = None) -> tuple[Planes, Planes]:
    """Planes that hold `lengths` tokens, appended by the reference to what is spoiled."""
    planes = spoiled(case)
    key = tokens(case, max(case.lengths), case.head_dim) if key is None else key
    value = tokens(case, max(case.lengths), case.head_dims()[1])
    for b, length in enumerate(case.lengths):
        rows = [made.map(lambda plane, b=b: plane[b : b + 1]) for made in planes]  # type: ignore[misc]
        lengths = torch.tensor([length], dtype=torch.int32)
        starts = None if case.starts is None else torch.tensor([case.starts[b]], dtype=torch.int32)
        reference.append(key[b : b + 1, :, :length], rows[0], KEY, lengths, key_transform, starts)
        reference.append(value[b : b + 1, :, :length], rows[1], VALUE, lengths)
    return planes


# --- the reference ----------------------------------------------------------------------------------------------------


def block_by_hand(x: Tensor, start: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scale and zero of one channel's block (`[128]`), number by number; `start` tokens are padding."""
    counted = [float(number) for number in x[start:]]
    low, high = (min(counted), max(counted)) if counted else (0.0, 0.0)
    span = torch.tensor(high, dtype=torch.float32) - torch.tensor(low, dtype=torch.float32)
    clipped = span * torch.tensor(KEY.clip_ratio)
    scale = (clipped / torch.tensor(15.0)).half().clamp(min=2.0**-24)
    zero = (torch.tensor(low) + (span - clipped) / 2).half()
    codes = []
    for t, number in enumerate(x):
        code = round(float((number - zero.float()) / scale.float()))  # Python rounds half to even, as torch does
        codes.append(0 if t < start else min(max(code, 0), 15))
    return torch.tensor(codes, dtype=torch.uint8), scale, zero


@pytest.mark.parametrize("start", [0, 1, 100, 127, 128])
def test_a_block_is_quantised_channel_by_channel(start: int) -> None:
    x = torch.randn(1, 2, BLOCK_SIZE, 8) * torch.logspace(-3, 3, 8)
    is_padding = (torch.arange(BLOCK_SIZE) < start)[None]
    planes = reference.quantize(x, KEY, is_padding=is_padding)
    assert planes.scale is not None and planes.zero is not None
    assert planes.scale.shape == planes.zero.shape == (1, 2, 1, 8)
    unpacked = torch.stack((planes.codes & 15, planes.codes >> 4), dim=-1).flatten(-2)
    for head in range(2):
        for c in range(8):
            codes, scale, zero = block_by_hand(x[0, head, :, c], start)
            assert_same(unpacked[0, head, :, c], codes, f"codes of channel {c}")
            assert planes.scale[0, head, 0, c] == scale and planes.zero[0, head, 0, c] == zero
    error = (reference.dequantize(planes, KEY) - x).abs()[:, :, start:]
    # The ends of the range are half a code off, and 15 times what the scale was rounded by.
    half = planes.scale.float() * (0.5 + 15 * 2.0**-11)
    assert (error <= half + planes.zero.float().abs() * 2.0**-11 + 1e-6).all()


@pytest.mark.parametrize("chunks", [(300,), (1,) * 300, (127, 1, 1, 171), (128, 128, 44), (5, 250, 45)], ids=str)
def test_chunks_do_not_matter(chunks: tuple[int, ...]) -> None:
    """Blocks are counted from position 0, so that all ways to the same tokens end in the same planes."""
    x, starts = torch.randn(2, 2, 300, 16), torch.tensor([0, 140], dtype=torch.int32)
    planes = KEY.allocate(2, 2, 16, 384, dtype=x.dtype, device=x.device)
    planes.codes.zero_()
    expected, length = clone(planes), 0
    reference.append(x, expected, KEY, torch.tensor([300, 300]), None, starts)
    for count in chunks:
        length += count
        reference.append(x[:, :, length - count : length], planes, KEY, torch.tensor([length, length]), None, starts)
    # Of the tail, what is held: rows of a block before it are no longer anybody's.
    for made in (planes, expected):
        assert made.tail is not None
        made.tail[:, :, 300 - 256 :] = 0
    assert_same_planes(planes, expected, str(chunks))
    dense = reference.dequantize(planes.narrow(300, KEY.block_size), KEY, lengths=torch.tensor([300, 300]))
    assert_same(dense[:, :, 256:], x[:, :, 256:], "the unfinished block")
    assert (dense[0, :, :256] - x[0, :, :256]).abs().max() < 0.3


def test_attention_matches_float64() -> None:
    """Keys and values as codes and dense tokens stand for them, by the formula of softmax."""
    case = Case(FORMATS, 16, torch.float32, 2, 3, (260, 131), (0, 5), capacity=384)
    planes, query = held(case), queries(case)
    out, lse = ops.decode(
        query, None, *planes, case.lengths_tensor(), case.layout, softmax_scale=0.3, starts=case.starts_tensor()
    )
    for b, length in enumerate(case.lengths):
        closed, start = length // BLOCK_SIZE * BLOCK_SIZE, case.starts[b] if case.starts else 0
        rows = [made.map(lambda plane, b=b: plane[b : b + 1]) for made in planes]  # type: ignore[misc]
        scale, zero, tail = rows[0].scale, rows[0].zero, rows[0].tail
        assert scale is not None and zero is not None and tail is not None
        codes = torch.stack((rows[0].codes & 15, rows[0].codes >> 4), dim=-1).flatten(-2)[0, :, :closed].double()
        spread = [plane[0].double().repeat_interleave(BLOCK_SIZE, 1)[:, :closed] for plane in (scale, zero)]
        key = torch.cat((codes * spread[0] + spread[1], tail[0, :, : length - closed].double()), dim=1)
        value = reference.dequantize(rows[1], VALUE)[0, :, :length].double()
        for head in range(case.num_q_heads):
            for i in range(case.q_len):
                end = length - case.q_len + i + 1
                scores = 0.3 * key[head // 2, start:end] @ query[b, head, i].double()
                expected = scores.softmax(0) @ value[head // 2, start:end]
                assert (out[b, i, head].double() - expected).abs().max() < 1e-5
                assert abs(lse[b, head, i].double() - scores.logsumexp(0)) < 1e-5


def test_a_bad_number_spoils_its_channel_for_the_block() -> None:
    x = torch.randn(1, 1, 2 * BLOCK_SIZE, 8)
    x[0, 0, 3, 2] = torch.nan
    x[0, 0, 140, 5] = torch.inf
    dense = reference.dequantize(reference.quantize(x, KEY), KEY).isnan()
    expected = torch.zeros_like(dense)
    expected[0, 0, :BLOCK_SIZE, 2] = expected[0, 0, BLOCK_SIZE:, 5] = True
    assert_same(dense, expected, "NaN")
    is_padding = (torch.arange(2 * BLOCK_SIZE) < 4)[None]
    planes = reference.quantize(x, KEY, is_padding=is_padding)
    assert planes.scale is not None and planes.scale[0, 0, 0].isfinite().all()


def test_keys_are_transformed_when_they_become_codes() -> None:
    """Codes, scales and zeros are those of transformed keys; the tail has the others as they came."""
    case = Case(FORMATS, 16, lengths=(300,), starts=(5,), capacity=384)
    key, transform = tokens(case, 300, 16), make_transform(ALL, 16)
    planes, _ = held(case, key, transform)
    block = reference.transform_key(key[:, :, :256], transform)
    expected = reference.quantize(block, KEY, is_padding=(torch.arange(256) < 5)[None])
    assert planes.tail is not None
    assert_same_planes(dataclasses.replace(planes.narrow(256, BLOCK_SIZE), tail=None), expected, "codes")
    assert_same(planes.tail[:, :, :44], key[:, :, 256:], "the tail")
    lengths, starts = case.lengths_tensor(), case.starts_tensor()
    dense = reference.dequantize(
        planes.narrow(300, BLOCK_SIZE), KEY, lengths=lengths, starts=starts, key_transform=transform
    )
    undone = reference.undo_key_transform(reference.dequantize(expected, KEY), transform)
    assert_same(dense, torch.cat((undone, key[:, :, 256:]), dim=2), "dequantised")


# --- kernels ----------------------------------------------------------------------------------------------------------


@pytest.mark.sanitize
@pytest.mark.parametrize("kind", [None, ALL])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=name_of)
@pytest.mark.parametrize("head_dim", [128, 64, 8, 40, 96, 256])
def test_append_matches_reference(engine: str, head_dim: int, dtype: torch.dtype, kind: str | None) -> None:
    """A history of chunks that cross the borders of blocks in every way, padding of more than a block included."""
    case = Case(FORMATS, head_dim, dtype, lengths=(0, 0), starts=(0, 140), value_dim=32, capacity=640)
    planes = spoiled(case)
    ours, starts = [clone(made, engine) for made in planes], case.starts_tensor()
    assert starts is not None
    transform, length = transform_of(kind, head_dim), 0
    for count in (1, 126, 1, 1, 127, 33, 300, 7, 44):
        length += count
        lengths = torch.tensor([length, length], dtype=torch.int32)
        key, value = tokens(case, count, head_dim, 10.0), tokens(case, count, 32)
        new = [x.to(engine) for x in (key, value)]
        there = None if transform is None else transform.to(engine)
        ops.append(*new, *ours, lengths.to(engine), case.layout, there, starts=starts.to(engine))
        reference.append(key, planes[0], KEY, lengths, transform, starts)
        reference.append(value, planes[1], VALUE, lengths)
        for side in (0, 1):
            assert_same_planes(ours[side], planes[side], f"{case}, {length} tokens")


@pytest.mark.parametrize("kind", [None, *KINDS])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf, 3e38], ids=str)
def test_append_keeps_unusual_data_exact(engine: str, bad: float, kind: str | None) -> None:
    case = Case(FORMATS, 40, lengths=(256,), starts=(3,), capacity=256)
    key, value = tokens(case, 256, 40), tokens(case, 256, 40)
    key[0, 0, 2, 1] = key[0, 0, 3, 2] = key[0, 1, 255, 39] = bad
    key[0, 0, :, 7], key[0, 0, :, 8], key[0, 0, :, 9] = 0, -3.5, 1e-30
    planes, lengths = spoiled(case), case.lengths_tensor()
    ours, transform = [clone(made, engine) for made in planes], transform_of(kind, 40)
    there, starts = None if transform is None else transform.to(engine), case.starts_tensor()
    assert starts is not None
    new = key.to(engine), value.to(engine)
    ops.append(*new, *ours, lengths.to(engine), case.layout, there, starts=starts.to(engine))
    reference.append(key, planes[0], KEY, lengths, transform, starts)
    assert_same_planes(ours[0], planes[0], str(bad))


@pytest.mark.sanitize
@pytest.mark.parametrize("kind", [None, ALL])
@pytest.mark.parametrize("length", BORDERS)
def test_decode_serves_every_length(engine: str, length: int, kind: str | None) -> None:
    for head_dim, dtype in ((64, torch.float32), (128, torch.bfloat16), (40, torch.float16), (96, torch.bfloat16)):
        case = Case(FORMATS, head_dim, dtype, 4, 1, (length, max(1, length - 1), min(384, length + 30)), capacity=384)
        transform = transform_of(kind, head_dim)
        run_decode(engine, case, planes=held(case, None, transform), key_transform=transform)


@pytest.mark.sanitize
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_q_per_kv", [1, 4, 8, 16])
def test_decode_serves_every_transform(engine: str, num_q_per_kv: int, kind: str) -> None:
    """Tokens of the tail meet the query as it came, those with codes the transformed one."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        case = Case(FORMATS, 128, dtype, num_q_per_kv, 1, (300, 140, 5), (17, 129, 0), capacity=384)
        transform = make_transform(kind, 128)
        run_decode(engine, case, planes=held(case, None, transform), key_transform=transform, softcap=30.0)
        run_decode(engine, case, planes=held(case, None, transform), key_transform=transform)


@pytest.mark.sanitize
@pytest.mark.parametrize("kind", [None, ALL])
@pytest.mark.parametrize(("q_len", "num_q_per_kv"), [(1, 1), (2, 4), (5, 8), (33, 4), (130, 1)])
def test_decode_serves_chunks(engine: str, q_len: int, num_q_per_kv: int, kind: str | None) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        case = Case(FORMATS, 128, dtype, num_q_per_kv, q_len, (300, 140), (17, 129), capacity=384)
        transform = transform_of(kind, 128)
        run_decode(engine, case, planes=held(case, None, transform), key_transform=transform)


@pytest.mark.sanitize
@pytest.mark.parametrize("num_splits", [1, 3, 7])
def test_decode_splits_and_masks(engine: str, num_splits: int) -> None:
    """Splits and windows begin anywhere in a block."""
    case = Case(FORMATS, 64, torch.bfloat16, 2, 2, (700, 511, 513), (0, 100, 5), capacity=768)
    planes = held(case)
    run_decode(engine, case, planes=planes, num_splits=num_splits)
    run_decode(engine, case, planes=planes, num_splits=num_splits, sliding_window=201, softcap=20.0)
    run_decode(engine, case, planes=planes, num_splits=num_splits, sinks=torch.randn(4), alibi_slopes=torch.rand(4))


@CUDA_ONLY
@pytest.mark.parametrize("kind", [None, ALL])
@pytest.mark.parametrize("windows", [{}, {"sink_length": 4, "residual_length": 28}], ids=str)
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
def test_long_sequences_on_a_gpu(head_dim: int, windows: dict[str, int], kind: str | None) -> None:
    """Warps have many steps each. Alone, and in one call with a key that fills a block."""
    transform, lengths, starts = transform_of(kind, head_dim), (4000, 28 + 24 * 128, 2311, 25), (0, 3, 700, 0)
    for q_len in (1, 4):
        where: dict[str, Any] = {"capacity": 4096, **windows}
        case = Case(FORMATS, head_dim, torch.bfloat16, 4, q_len, lengths, starts, **where)
        before = dataclasses.replace(case, lengths=tuple(each - q_len for each in lengths))
        made = filled(before, 0, key_transform=transform), filled(before, 1)
        planes, apart = ([clone(side, "cuda") for side in made] for _ in range(2))
        new = tokens(case, q_len, head_dim).cuda(), tokens(case, q_len, head_dim).cuda()
        query, held_tokens = queries(case), case.lengths_tensor().cuda()
        there = None if transform is None else transform.to("cuda")
        options = {"starts": torch.tensor(starts, dtype=torch.int32, device="cuda"), "key_transform": there}
        ops.append(*new, apart[0], apart[1], held_tokens, case.layout, there, starts=options["starts"])
        for extras in ({}, {"sliding_window": 1001}, {"softcap": 20.0}):
            run_decode(
                "cuda", case, planes=(clone(apart[0]), clone(apart[1])), query=query, num_splits=1,
                key_transform=transform, **extras,
            )  # fmt: skip
        given = {"softmax_scale": 0.125, "num_splits": 1, **options}
        out, _ = ops.decode(query.cuda(), new, planes[0], planes[1], held_tokens, case.layout, **given)
        expected, _ = ops.decode(query.cuda(), None, apart[0], apart[1], held_tokens, case.layout, **given)
        assert_same(out, expected.cpu(), "out")
        for side in (0, 1):
            assert_same_planes(planes[side], clone(apart[side]), "planes")


@pytest.mark.sanitize
def test_nan_stays_with_those_who_attend_to_it(engine: str) -> None:
    case = Case(FORMATS, 64, torch.float32, 2, 1, (200, 200, 200, 200), (0, 128, 0, 151), capacity=256)
    key = tokens(case, 200, 64)
    key[:2, 0, 5, 3] = torch.nan  # a closed block, seen and padded away
    key[2:, 1, 150, 3] = torch.nan  # a token of the tail, likewise
    out, _ = run_decode(engine, case, planes=held(case, key))
    assert out.isnan().flatten(2).any(2).flatten().tolist() == [True, False, True, False]


@pytest.mark.sanitize
@pytest.mark.parametrize("kind", [None, ALL])
@pytest.mark.parametrize("head_dim", [40, 64, 96, 128, 256])
def test_decode_appends_first(engine: str, head_dim: int, kind: str | None) -> None:
    """One call that fills a block, quantises it and attends to it."""
    transform = transform_of(kind, head_dim)
    there = None if transform is None else transform.to(engine)
    for length, q_len in ((128, 1), (129, 1), (130, 5), (257, 2)):
        before = Case(FORMATS, head_dim, torch.bfloat16, 2, q_len, (length - q_len,) * 2, (0, 9), capacity=384)
        planes = [clone(made, engine) for made in held(before, None, transform)]
        apart = [clone(made, engine) for made in planes]
        case = Case(FORMATS, head_dim, torch.bfloat16, 2, q_len, (length,) * 2, (0, 9), capacity=384)
        new = tokens(case, q_len, head_dim).to(engine), tokens(case, q_len, head_dim).to(engine)
        query, lengths = queries(case).to(engine), case.lengths_tensor().to(engine)
        starts = torch.tensor([0, 9], dtype=torch.int32, device=engine)
        options: dict[str, Any] = {"softmax_scale": 0.125, "starts": starts, "num_splits": 2, "key_transform": there}
        out, lse = ops.decode(query, new, planes[0], planes[1], lengths, case.layout, **options)
        ops.append(*new, apart[0], apart[1], lengths, case.layout, there, starts=starts)
        expected, expected_lse = ops.decode(query, None, apart[0], apart[1], lengths, case.layout, **options)
        assert_same(out, expected.cpu(), "out")
        assert_same(lse, expected_lse.cpu(), "lse")
        for side in (0, 1):
            assert_same_planes(planes[side], clone(apart[side]), "planes")


def test_equal_calls_give_equal_bits(engine: str) -> None:
    case = Case(FORMATS, 128, torch.bfloat16, 4, 1, (700, 300), capacity=768)
    planes, query = held(case), queries(case)
    both, _ = run_decode(engine, case, planes=planes, query=query, num_splits=3)
    for b in (0, 1):
        alone = Case(FORMATS, 128, torch.bfloat16, 4, 1, case.lengths[b : b + 1], capacity=768)
        rows = [made.map(lambda plane, b=b: plane[b : b + 1].clone()) for made in planes]  # type: ignore[misc]
        out, _ = run_decode(engine, alone, planes=(rows[0], rows[1]), query=query[b : b + 1], num_splits=3)
        assert_same(out, both[b : b + 1].cpu(), "a row alone")


def test_opcheck(device: str) -> None:
    case = Case(FORMATS, 64, torch.float32, 2, 2, (130, 30), capacity=256)
    key_planes, value_planes = (clone(made, device) for made in held(case))
    spelled = key_planes.tensors(), value_planes.tensors()
    key, value, query, lengths = (
        x.to(device) for x in (tokens(case, 2, 64), tokens(case, 2, 64), queries(case), case.lengths_tensor())
    )
    starts, kinds = torch.zeros(2, dtype=torch.int32, device=device), (None, None, False, case.layout.packed)
    append, decode = torch.ops.hf_kvquant.append.default, torch.ops.hf_kvquant.decode.default
    torch.library.opcheck(append, (key, value, *spelled, lengths, starts, *kinds))
    extras = (None, starts, None, None, 0.125, 0.0, 0, 0)
    torch.library.opcheck(decode, (query, key, value, *spelled, lengths, *extras, *kinds))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_graph_is_replayed_across_borders() -> None:
    """Captured once: tails fill, become codes and begin anew, as lengths say at the time.

    Not for `make sanitize`: nothing can be captured while every tensor gets memory of its own.
    """
    case = Case(FORMATS, 128, torch.bfloat16, 4, 1, (500, 500), capacity=512)
    key, value = (tokens(case, 512, 128).cuda() for _ in range(2))
    ours = [clone(made, "cuda") for made in held(Case(FORMATS, 128, case.dtype, 4, 1, (126, 254), capacity=512))]
    eager = [clone(made) for made in ours]
    lengths, query = torch.zeros(2, dtype=torch.int32, device="cuda"), queries(case).cuda()
    new = [torch.zeros_like(x[:, :, :1]) for x in (key, value)]
    counters = torch.zeros(ops.NUM_COUNTERS, dtype=torch.int32, device="cuda")

    def step() -> Tensor:
        return ops.decode(query, (new[0], new[1]), *ours, lengths, case.layout, softmax_scale=0.09, counters=counters)[
            0
        ]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for count in range(1, 6):
        now = torch.tensor([126 + count, 254 + count], dtype=torch.int32)
        lengths.copy_(now)
        for x, source in zip(new, (key, value), strict=True):
            for b in range(2):
                x[b] = source[b, :, now[b] - 1 : now[b]]
        graph.replay()
        for x, made, kv_format in zip(new, eager, FORMATS, strict=True):
            reference.append(x.cpu(), made, kv_format, now)
        for side in (0, 1):
            assert_same_planes(clone(ours[side]), eager[side], f"{count} tokens on")
        run_decode("cuda", Case(FORMATS, 128, case.dtype, 4, 1, tuple(now.tolist()), capacity=512), planes=eager)
        expected = ops.decode(query.cpu(), None, *eager, now, case.layout, softmax_scale=0.09)[0]
        compare.assert_close(out, expected, 0.02, f"{count} tokens on")


# --- storage ----------------------------------------------------------------------------------------------------------


def stored(counts: list[int], max_cache_len: int | None = None) -> LayerStore:
    storage = LayerStore(LayerFormats(KEY, VALUE), max_cache_len=max_cache_len, name="layer 3")
    for count in counts:
        storage.extend(torch.randn(2, 2, count, 16), torch.randn(2, 2, count, 16))
    return storage


@pytest.mark.parametrize("max_cache_len", [None, 300])
def test_a_crop_opens_a_block_again(max_cache_len: int | None) -> None:
    storage = stored([200, 100], max_cache_len)
    before = storage.dequantize()[0][:, :, :250]
    rewind.crop(storage, 50)  # into the second block, which had codes
    assert_same(storage.dequantize()[0][:, :, :250], before, "what is left")
    assert storage.planes[0].tail is not None
    assert_same(storage.planes[0].tail[:, :, : 250 - 128], before[:, :, 128:], "the tail")
    new = torch.randn(2, 2, 7, 16)
    storage.extend(new, new)
    key = storage.dequantize()[0]
    block = torch.cat((before[:, :, 128:], new[:, :, :6]), dim=2)
    expected = reference.dequantize(reference.quantize(block, KEY), KEY)
    assert_same(key[:, :, 128:256], expected, "the block, quantised again")
    assert_same(key[:, :, 256:257], new[:, :, 6:], "the token behind it")


def test_sizes() -> None:
    storage = stored([200])
    per_token = 2 * (8 + 16 * 4 // 128 + 8 + 4)  # heads, key codes, their scales, value codes, their scales
    tail = 2 * 128 * 16 * 4
    assert storage.capacity == 256 and storage.bytes_per_token == per_token + 1  # a byte of two heads, rounded up
    assert storage.num_bytes_held == 2 * (200 * storage.bytes_per_token + tail)
    assert storage.num_bytes == 2 * (256 * storage.bytes_per_token + tail) - 2 * 256 * 0


def test_padding_does_not_widen_scales() -> None:
    """However the padding gets there: noted beforehand, or with the call that attends."""
    key, value = torch.randn(2, 2, 128, 16), torch.randn(2, 2, 128, 16)
    key[1, :, :40] *= 1000
    starts = torch.tensor([0, 40], dtype=torch.int32)
    noted, told = stored([]), stored([])
    noted.starts = starts
    for storage in (noted, told):
        storage.extend(key, value)
    noted.flush()
    told.attend(torch.randn(2, 4, 128, 16), softmax_scale=0.25, starts=starts)
    for storage in (noted, told):
        assert (storage.dequantize()[0] - key).abs()[1, :, 40:].max() < 0.4
        assert storage.planes[0].scale is not None
        assert storage.planes[0].scale.max() < 1.0
    noted.select(torch.tensor([1, 0, 1]))
    assert noted.starts is not None and noted.starts.tolist() == [40, 0, 40]
    noted.reset()
    assert noted.starts is None


# --- caches and models ------------------------------------------------------------------------------------------------


def small_model() -> Any:
    return models.llama(max_position_embeddings=512)


def test_a_fallback_attends_to_the_same_keys() -> None:
    """Dequantised tensors, for a model that is not patched, hold the tail as well."""
    model, inputs = small_model(), left_padded(batch=2, tokens=130, pads=(0,))
    config = {"preset": "int4-channel", "layers": {1: "none"}}
    with patched(model, config):
        expected = greedy(model, inputs, 4)
    output = greedy(model, inputs, 4, **with_cache(KVQuantCache(model.config, config)))
    assert_same(output.sequences, expected.sequences, "tokens")


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: KVFormat("int4", "channel", symmetric=False),
            "KVFormat: `block_size` must be given exactly when `granularity` is 'channel', got None with 'channel'. "
            "Use granularity='channel', block_size=128.",
        ),
        (
            lambda: KVFormat("int4", block_size=128),
            "KVFormat: `block_size` must be given exactly when `granularity` is 'channel', got 128 with 'head'. "
            "Use granularity='channel', block_size=128.",
        ),
        (
            lambda: KVFormat("int4", "channel", symmetric=False, block_size=64),
            "KVFormat: `block_size` must be 128, got 64.",
        ),
        (
            lambda: KVFormat("int8", "channel", block_size=128),
            "KVFormat: `granularity` must not be 'channel' unless storage is 'int4' and symmetric is False, "
            "got storage 'int8' and symmetric True. Other codes gain nothing.",
        ),
        (
            lambda: LayerFormats(VALUE, KEY),
            "LayerFormats: `value` must not have granularity 'channel', got "
            "int4-channel128-asymmetric-clip0.9375. Channel scales are for keys, whose outliers lie in channels; use "
            "granularity 'head' or 'group'.",
        ),
        (
            lambda: KVQuantConfig(value=KEY),
            "KVQuantConfig: `value` must not have granularity 'channel', got "
            "int4-channel128-asymmetric-clip0.9375. Channel scales are for keys, whose outliers lie in channels; use "
            "granularity 'head' or 'group'.",
        ),
        (
            lambda: KVQuantConfig.from_preset("int4-channel", q_group_size=32),
            "KVQuantConfig: `q_group_size` must be left out where keys have a scale for every channel, got 32. Use "
            "preset 'int4-g32' for groups of channels.",
        ),
    ],
)
def test_refuses(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        make()


def test_a_config_round_trips() -> None:
    config = KVQuantConfig.from_preset("int4-channel", layers={0: "int8"})
    assert KVQuantConfig.from_dict(config.to_dict()) == config and config.transforms == ("smooth", "rotate")
    assert config.key.describe() == "int4-channel128-asymmetric"


def replaced(planes: Planes, **changes: Any) -> Planes:
    return Planes(**{"codes": planes.codes, "scale": planes.scale, "zero": planes.zero, "tail": planes.tail, **changes})


BROKEN: list[tuple[Any, str]] = [
    (
        lambda planes: replaced(planes, tail=planes.tail[:, :, :64]),
        "`key_planes.tail` must be [2, 2, 128, 64] of the model's dtype, got [2, 2, 64, 64] float32. Planes",
    ),
    (
        lambda planes: replaced(planes, tail=planes.tail.double()),
        "`key_planes.tail` must be float32, float16 or bfloat16, got Double. Load",
    ),
    (
        lambda planes: replaced(planes, tail=planes.tail.bfloat16()),
        "`key` must have the dtype of the tail, got another one. Start",
    ),
    (
        lambda planes: replaced(planes, zero=None),
        "`key_planes` must be 4 tensors for this layout, got 3. Planes",
    ),
    (
        lambda planes: replaced(planes, scale=planes.scale[:, :, :1]),
        "`key_planes.scale` must be [2, 2, 2, 64] float16, got [2, 2, 1, 64] float16. Planes",
    ),
    (
        lambda planes: replaced(planes, zero=planes.zero.float()),
        "`key_planes.zero` must be [2, 2, 2, 64] float16, got [2, 2, 2, 64] float32. Planes",
    ),
    (
        lambda planes: replaced(planes, scale=planes.scale.mT.contiguous().mT),
        "`key_planes.scale` must have contiguous rows, got stride 2. Call",
    ),
    (
        lambda planes: replaced(planes, codes=planes.codes[:, :, :192]),
        "`key_planes.codes` must have heads and a capacity that is a multiple of 128, got [2, 2, 192, 32]. Planes",
    ),
]


@pytest.mark.parametrize(("change", "message"), BROKEN)
def test_bad_planes_are_named(change: Any, message: str) -> None:
    case = Case(FORMATS, 64, torch.float32, 2, 1, (130, 30), capacity=256)
    planes = held(case)
    broken = change(planes[0])
    value_planes = planes[1].narrow(broken.codes.shape[2])
    new = tokens(case, 1, 64), tokens(case, 1, 64)
    with pytest.raises(REFUSED, match=f"^decode: {re.escape(message)}"):
        ops.decode(queries(case), new, broken, value_planes, case.lengths_tensor(), case.layout, softmax_scale=1.0)
