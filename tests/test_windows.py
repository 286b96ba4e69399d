"""Dense windows: the first and the newest tokens are attended to as they came, from the reference to `generate`.

What they have that codes have not: rows of a ring that tokens take from each other, a beginning that padding moves,
keys that no transform has touched, and a crop that makes codes dense again. The reference is compared with loops here,
kernels with the reference, caches with the plain model of `models.py`. Random histories are in `test_storage.py`.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from typing import Any

import compare
import models
import pytest
import tolerances
import torch
from cases import REFUSED, Case, clone, filled, make_transform, name_of, poisoned, queries, row_of, tokens
from checks import pair, run_append, run_decode
from compare import assert_same, assert_same_planes
from models import ReferenceCache, greedy, left_padded, logits
from torch import Tensor
from transformers.generation.configuration_utils import CompileConfig

from hf_kvquant import KeyTransform, KVFormat, KVQuantCache, KVQuantConfig, ops, patched
from hf_kvquant.config import LayerFormats
from hf_kvquant.spec import reference
from hf_kvquant.spec.formats import BLOCK_SIZE
from hf_kvquant.spec.planes import Planes
from hf_kvquant.storage import rewind
from hf_kvquant.storage.layer_store import LayerStore
from hf_kvquant.upstream.releases import cache_of, with_cache

BLOCKS = KVFormat("int4", "channel", symmetric=False, block_size=BLOCK_SIZE)
INT4 = KVFormat("int4", symmetric=False)
VARIANTS = [
    (BLOCKS, INT4),
    (INT4, INT4),
    pair(KVFormat("int8")),
    pair(KVFormat("int4", "group", 16, symmetric=False)),
    pair(KVFormat("fp8")),
    (KVFormat("none"), KVFormat("int8", symmetric=False)),
    (BLOCKS, KVFormat("none")),
    (KVFormat("fp8", "tensor"), KVFormat("int8", "token")),
]
variants = pytest.mark.parametrize("formats", VARIANTS, ids=lambda formats: "+".join(map(name_of, formats)))
WINDOWS = [(4, 0), (0, 7), (1, 1), (4, 128), (33, 200)]
windows = pytest.mark.parametrize("window", WINDOWS, ids=str)


def spoiled(case: Case, device: str = "cpu") -> list[Planes]:
    """Empty planes in which whatever must not be read is NaN; a frozen scale is given."""
    made = []
    for kv_format, head_dim in zip(case.formats, case.head_dims(), strict=True):
        shape = case.batch, case.num_kv_heads, head_dim, case.capacity
        planes = poisoned(kv_format, *shape, case.dtype, slack=case.slack, **case.windows)
        if kv_format.granularity == "tensor":
            for plane, number in zip((planes.scale, planes.zero), (0.05, -1.0), strict=True):
                if plane is not None:
                    plane.fill_(number)
        made.append(clone(planes, device))
    return made


# --- the reference ----------------------------------------------------------------------------------------------------


def row_by_hand(
    token: int, length: int, start: int, is_block: bool, window: tuple[int, int], slack: int, num_behind: int = 0
) -> int | None:
    """The row of a tail from which a query reads a token, `None` where it does not."""
    sink_length, residual_length = window
    if start <= token < start + sink_length:
        return token - start
    begin, ring = max(0, length - num_behind - residual_length), residual_length + slack if residual_length else 0
    if is_block:
        begin, ring = begin - begin % 128, math.ceil((residual_length + slack) / 32) * 32 + 128
        kept = max(0, length - ring + 128) // 128 * 128
    else:
        kept = length - ring
    return sink_length + token % ring if token >= max(begin, kept) else None


@pytest.mark.parametrize("num_behind", [0, 1, 20, 64, 200])
@pytest.mark.parametrize("slack", [0, 64, 130])
@windows
@pytest.mark.parametrize("kv_format", [BLOCKS, INT4], ids=name_of)
def test_tokens_and_rows(kv_format: KVFormat, window: tuple[int, int], slack: int, num_behind: int) -> None:
    for length, start in itertools.product((0, 1, 4, 7, 128, 129, 255, 256, 300, 511), (0, 3, 250)):
        planes = kv_format.allocate(
            1, 1, 8, 512, dtype=torch.float32, device=torch.device("cpu"), sink_length=window[0],
            residual_length=window[1], slack=slack,
        )  # fmt: skip
        is_dense, row = reference.dense_tokens(
            planes, kv_format, torch.tensor([length]), torch.tensor([start]), *window, num_behind=num_behind
        )
        expected = [
            row_by_hand(token, length, start, kv_format is BLOCKS, window, slack, num_behind) for token in range(length)
        ]
        assert is_dense[0, :length].tolist() == [each is not None for each in expected]
        assert not is_dense[0, length:].any()
        held = [each for each in expected if each is not None]
        assert row[0, is_dense[0]].tolist() == held
        assert len(set(held)) == len(held), "two tokens in one row"


@pytest.mark.parametrize("chunks", [(300,), (1,) * 300, (127, 1, 1, 171), (5, 250, 45)], ids=len)
@pytest.mark.parametrize("kv_format", [BLOCKS, INT4], ids=name_of)
def test_chunks_do_not_matter(kv_format: KVFormat, chunks: tuple[int, ...]) -> None:
    """All ways to the same tokens end in the same planes, and in the same tokens as they came."""
    case = Case((kv_format, INT4), 16, lengths=(300, 300), capacity=384, sink_length=4, residual_length=40)
    x, starts = torch.randn(2, 2, 300, 16), torch.tensor([0, 140], dtype=torch.int32)
    planes, expected = spoiled(case)[0], spoiled(case)[0]
    for made in (planes, expected):
        made.codes.zero_()
    lengths = torch.tensor([300, 300])
    reference.append(x, expected, kv_format, lengths, None, starts, **case.windows)
    length = 0
    for count in chunks:
        length += count
        new = x[:, :, length - count : length]
        reference.append(new, planes, kv_format, torch.tensor([length, length]), None, starts, **case.windows)
    is_dense, row = reference.dense_tokens(planes, kv_format, lengths, starts, **case.windows)
    for made in (planes, expected):  # rows of tokens that have left are no longer anybody's
        assert made.tail is not None
        for b in range(2):
            is_held = torch.zeros(made.tail.shape[2], dtype=torch.bool)
            is_held[row[b, is_dense[b]]] = True
            made.tail[b, :, ~is_held] = 0
    assert_same_planes(planes, expected, str(chunks))
    narrow = planes.narrow(300, kv_format.block_size)
    dense = reference.dequantize(narrow, kv_format, torch.float32, lengths, starts, **case.windows)
    is_dense = is_dense[:, :300]
    for b in range(2):
        assert_same(dense[b][:, is_dense[b]], x[b][:, is_dense[b]], "dense tokens")
        is_seen = torch.arange(300) >= starts[b]
        assert (dense - x)[b][:, is_seen].abs().max() < 0.4


@pytest.mark.parametrize("window", [(4, 28), (0, 5), (3, 128), (0, 0)], ids=str)
@pytest.mark.parametrize("kv_format", [BLOCKS, INT4], ids=name_of)
def test_a_query_reads_what_it_would_read_alone(kv_format: KVFormat, window: tuple[int, int]) -> None:
    """Bit for bit, wherever blocks and windows begin, in a tail that has rows for crops."""
    case = Case(
        (kv_format, INT4), 16, lengths=(0, 0), capacity=640, sink_length=window[0], residual_length=window[1], slack=64
    )
    x, starts = torch.randn(2, 2, 640, 16), torch.tensor([0, 140], dtype=torch.int32)
    alone, together = spoiled(case)[0], spoiled(case)[0]
    length = 0
    for count in (1, 32, 33, 5, 17, 40, 64, 8, 30, 21, 5, 2, 64, 65, 11, 20):
        seen = []
        for held in range(length + 1, length + count + 1):
            lengths = torch.tensor([held, held])
            reference.append(x[:, :, held - 1 : held], alone, kv_format, lengths, None, starts, **case.windows)
            dense = reference.dequantize(alone, kv_format, torch.float32, lengths, starts, **case.windows)
            seen.append(dense[:, :, :held])
        new, length = x[:, :, length : length + count], length + count
        lengths = torch.tensor([length, length])
        reference.append(new, together, kv_format, lengths, None, starts, **case.windows)
        for i, expected in enumerate(seen):
            dense = reference.dequantize(
                together, kv_format, torch.float32, lengths, starts, **case.windows, num_behind=count - 1 - i
            )
            assert_same(dense[:, :, : expected.shape[2]], expected, f"query {i} of {count}, {length} tokens")


def test_sinks_do_not_widen_the_scales_of_channels() -> None:
    x = torch.randn(1, 1, 128, 8)
    x[:, :, 5:9] *= 1000
    case = Case((BLOCKS, INT4), 8, lengths=(128,), num_kv_heads=1, sink_length=4)
    planes, starts = spoiled(case)[0], torch.tensor([5])
    reference.append(x, planes, BLOCKS, torch.tensor([128]), None, starts, sink_length=4)
    assert planes.scale is not None and planes.scale.max() < 1
    assert not planes.codes[:, :, :9].any()
    dense = reference.dequantize(planes, BLOCKS, torch.float32, torch.tensor([128]), starts, sink_length=4)
    assert_same(dense[:, :, 5:9], x[:, :, 5:9], "sinks")


@pytest.mark.parametrize("kind", ["", "center+smooth+rotate"])
def test_attention_matches_float64(kind: str) -> None:
    """Dense tokens as they came and codes token by token, by the formula of softmax with a sink and a cap."""
    case = Case(pair(INT4), 16, torch.float32, 2, 3, (90, 31), (0, 5), capacity=128, sink_length=4, residual_length=10)
    transform = make_transform(kind, 16) if kind else None
    given = [tokens(case, 128, 16) for _ in range(2)]
    planes = [filled(case, side, x, None if side else transform) for side, x in enumerate(given)]
    query, sinks = queries(case), torch.randn(4)
    out, lse = ops.decode(
        query, None, *planes, case.lengths_tensor(), case.layout, softmax_scale=0.3, starts=case.starts_tensor(),
        sinks=sinks, softcap=8.0, key_transform=transform,
    )  # fmt: skip
    coded = given[0] if transform is None else reference.transform_key(given[0], transform)
    decoded = [reference.dequantize(reference.quantize(x, INT4), INT4) for x in (coded, given[1])]
    if transform is not None:
        decoded[0] = reference.undo_key_transform(decoded[0], transform)
    for b, length in enumerate(case.lengths):
        start = case.starts[b] if case.starts else 0
        is_dense = [start <= t < start + 4 or t >= length - 10 for t in range(length)]
        key, value = (
            torch.where(torch.tensor(is_dense)[:, None], x[b, :, :length], y[b, :, :length]).double()
            for x, y in zip(given, decoded, strict=True)
        )
        for head, i in itertools.product(range(4), range(3)):
            end = length - 2 + i
            scores = 0.3 * key[head // 2, start:end] @ query[b, head, i].double()
            every = torch.cat((8 * torch.tanh(scores / 8), sinks[head : head + 1].double()))
            expected = every.softmax(0)[:-1] @ value[head // 2, start:end]
            assert (out[b, i, head].double() - expected).abs().max() < 1e-4
            assert abs(lse[b, head, i].double() - every.logsumexp(0)) < 1e-4


# --- kernels ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slack", [0, 64])
@windows
@variants
def test_append_matches_reference(
    engine: str, formats: tuple[KVFormat, KVFormat], window: tuple[int, int], slack: int
) -> None:
    """A history of chunks, padding of more than a block included; bitwise, everything that is not written too."""
    index = VARIANTS.index(formats) + WINDOWS.index(window)
    head_dim, dtype = (64, 128, 16, 80)[index % 4], (torch.bfloat16, torch.float32, torch.float16)[index % 3]
    case = Case(
        formats, head_dim, dtype, lengths=(0, 0), starts=(0, 140), value_dim=32, capacity=640, sink_length=window[0],
        residual_length=window[1], slack=slack,
    )  # fmt: skip
    has_transform = formats[0].is_quantized
    transform = make_transform("center+smooth+rotate", head_dim) if has_transform else None
    moved = None if transform is None else transform.to(engine)
    planes = spoiled(case)
    ours, starts = [clone(made, engine) for made in planes], case.starts_tensor()
    assert starts is not None
    length = 0
    for count in (1, 126, 1, 1, 127, 33, 300, 7, 44):
        length += count
        lengths = torch.tensor([length, length], dtype=torch.int32)
        new = tokens(case, count, head_dim), tokens(case, count, 32)
        ops.append(*(x.to(engine) for x in new), *ours, lengths.to(engine), case.layout, moved, starts.to(engine))
        for side in (0, 1):
            reference.append(
                new[side], planes[side], formats[side], lengths, None if side else transform, starts, **case.windows
            )
            assert_same_planes(ours[side], planes[side], f"{case}, {length} tokens")


@pytest.mark.parametrize("window", [(0, 16), (3, 40), (0, 0)], ids=str)
@variants
def test_a_tail_keeps_what_a_crop_brings_back(formats: tuple[KVFormat, KVFormat], window: tuple[int, int]) -> None:
    """Also of a chunk that is longer than the window: up to 64 tokens behind it are in their rows."""
    case = Case(formats, 16, capacity=512, sink_length=window[0], residual_length=window[1], slack=64)
    planes = spoiled(case)
    x = [torch.randn(3, 2, 512, 16) for _ in range(2)]
    length = 0
    for count in (140, 1, 1, 60, 5, 200, 1, 30):
        length += count
        lengths = torch.full((3,), length)
        for side, made in enumerate(planes):
            new = x[side][:, :, length - count : length]
            reference.append(new, made, formats[side], lengths, **case.windows)
            if made.tail is None:
                continue
            for removed in range(64 if made.tail.shape[2] > window[0] else 0):
                first = max(window[0], formats[side].tail_begin(length - removed, window[1]))
                position = torch.arange(first, length - removed)
                row = window[0] + position % (made.tail.shape[2] - window[0])
                assert_same(made.tail[:, :, row], x[side][:, :, position], f"{removed} of {length} tokens removed")


@variants
def test_codes_are_those_without_windows(engine: str, formats: tuple[KVFormat, KVFormat]) -> None:
    """But for granularity `channel`, whose blocks have to wait."""
    lengths = torch.tensor([90, 90], dtype=torch.int32)
    made = []
    for window in ({"sink_length": 3, "residual_length": 20}, {}):
        case = Case(formats, 64, lengths=(90, 90), **window)
        planes = spoiled(case, engine)
        for each in planes:
            each.codes.zero_()
        torch.manual_seed(1)
        new = [tokens(case, 90, 64).to(engine) for _ in range(2)]
        ops.append(*new, *planes, lengths.to(engine), case.layout)
        made.append(planes)
    for kv_format, with_windows, without in zip(formats, *made, strict=True):
        if kv_format is not BLOCKS:
            plain = Planes(with_windows.codes, with_windows.scale, with_windows.zero)
            assert_same_planes(plain, clone(without), name_of(kv_format))
            assert (with_windows.tail is None) == (not kv_format.is_quantized)


@windows
@variants
def test_decode_serves_every_length(engine: str, formats: tuple[KVFormat, KVFormat], window: tuple[int, int]) -> None:
    index = VARIANTS.index(formats) + WINDOWS.index(window)
    has_transform = formats[0].is_quantized
    for i, lengths in enumerate(((1, 2, 4), (5, 127, 128), (129, 255, 256), (257, 300, 384))):
        head_dim = (64, 128, 16, 80)[(i + index) % 4]
        dtype = (torch.float32, torch.bfloat16)[(i + index) % 2]
        starts = (None, (0, 3, 100), (0, 130, 7), (129, 0, 380))[(i + index) % 4]
        case = Case(
            formats, head_dim, dtype, (4, 1, 8)[i % 3], 1, lengths, starts, capacity=384, sink_length=window[0],
            residual_length=window[1], slack=(0, 20)[i // 2],
        )  # fmt: skip
        transform = make_transform("center+smooth+rotate", head_dim) if has_transform and i % 2 else None
        run_decode(engine, case, planes=(filled(case, 0, None, transform), filled(case, 1)), key_transform=transform)


@pytest.mark.parametrize(("q_len", "num_q_per_kv"), [(2, 4), (5, 8), (33, 4), (130, 1)])
@variants
def test_decode_serves_chunks_splits_and_masks(
    engine: str, formats: tuple[KVFormat, KVFormat], q_len: int, num_q_per_kv: int
) -> None:
    """Each query has its own window, whatever hides some of its tokens."""
    index = VARIANTS.index(formats)
    case = Case(
        formats, 64, (torch.float32, torch.bfloat16)[index % 2], num_q_per_kv, q_len, (700, 140, 513), (0, 129, 5),
        capacity=768, sink_length=4, residual_length=100, slack=index % 3 * 64,
    )  # fmt: skip
    has_transform = formats[0].is_quantized
    transform = make_transform("center+rotate", 64) if has_transform else None
    planes, heads = (filled(case, 0, None, transform), filled(case, 1)), case.num_q_heads
    every: list[dict[str, Any]] = [
        {},
        {"sliding_window": 61, "softcap": 20.0},
        {"sinks": torch.randn(heads), "alibi_slopes": torch.rand(heads) / 10},
    ]
    for i, extras in enumerate(every):
        run_decode(
            engine, case, planes=planes, key_transform=transform, num_splits=(0, 3, 7)[(i + index) % 3], **extras
        )


@pytest.mark.parametrize("slack", [0, 3, 64])
@pytest.mark.parametrize(
    ("q_len", "num_q_per_kv"), [(2, 1), (3, 4), (4, 2), (2, 8), (5, 4), (11, 4), (32, 1), (32, 2), (20, 8), (32, 8)]
)
@variants
def test_queries_have_windows_of_their_own(
    engine: str, formats: tuple[KVFormat, KVFormat], q_len: int, num_q_per_kv: int, slack: int
) -> None:
    """Also where a block is finished between two queries (413 and 670), and in sequences shorter than the window."""
    index = VARIANTS.index(formats) + slack
    case = Case(
        formats, (64, 128)[index % 2], (torch.bfloat16, torch.float16)[q_len % 2], num_q_per_kv, q_len,
        (413, 40, q_len, 670, 1000), (0, 5, 0, 130, 999), capacity=1024, sink_length=4, residual_length=28, slack=slack,
    )  # fmt: skip
    transform = make_transform("center+rotate", case.head_dim) if formats[0].is_quantized and index % 3 else None
    planes = filled(case, 0, None, transform), filled(case, 1)
    for num_splits, extras in ((0, {}), (3, {"sliding_window": 300})):
        run_decode(engine, case, planes=planes, key_transform=transform, num_splits=num_splits, **extras)


@variants
def test_decode_appends_first(engine: str, formats: tuple[KVFormat, KVFormat]) -> None:
    for length, q_len, slack in ((1, 1, 0), (128, 1, 0), (257, 2, 0), (300, 40, 0), (128, 1, 64), (300, 40, 64)):
        before, case = (
            Case(formats, 64, torch.bfloat16, 2, q_len, (held,) * 2, (0, 9), capacity=384, sink_length=4,
                 residual_length=37, slack=slack)
            for held in (length - q_len, length)
        )  # fmt: skip
        planes = [clone(filled(before, side), engine) for side in (0, 1)]
        apart = [clone(made, engine) for made in planes]
        new = tokens(case, q_len, 64).to(engine), tokens(case, q_len, 64).to(engine)
        query, lengths = queries(case).to(engine), case.lengths_tensor().to(engine)
        starts = torch.tensor([0, 9], dtype=torch.int32, device=engine)
        options: dict[str, Any] = {"softmax_scale": 0.125, "starts": starts, "num_splits": 2}
        out, lse = ops.decode(query, new, planes[0], planes[1], lengths, case.layout, **options)
        ops.append(*new, apart[0], apart[1], lengths, case.layout, starts=starts)
        expected, expected_lse = ops.decode(query, None, apart[0], apart[1], lengths, case.layout, **options)
        assert_same(out, expected.cpu(), "out")
        assert_same(lse, expected_lse.cpu(), "lse")
        for side in (0, 1):
            assert_same_planes(planes[side], clone(apart[side]), "planes")


def test_prompts(engine: str) -> None:
    for i, formats in enumerate(VARIANTS):
        case = Case(
            formats, (64, 40, 128)[i % 3] if i != 3 else 64, torch.bfloat16, q_len=70, lengths=(70, 128), starts=(0, 3),
            sink_length=i % 3 * 5, residual_length=(30, 0, 100)[i % 3],
        )  # fmt: skip
        run_append(engine, case, tokens(case, 70, case.head_dim), tokens(case, 70, case.head_dim))


@variants
def test_rows_may_begin_anywhere(engine: str, formats: tuple[KVFormat, KVFormat]) -> None:
    """Also where they cannot be loaded, or copied to the tail, in words of several bytes."""
    case = Case(formats, 64, torch.bfloat16, lengths=(37, 30), capacity=128, sink_length=4, residual_length=20)
    planes = [clone(made, engine) for made in spoiled(case)]
    again = [clone(made, engine) for made in planes]
    lengths, new = case.lengths_tensor().to(engine), [tokens(case, 30, 64).to(engine) for _ in range(2)]
    shifted = [torch.cat((x[..., :3], x), -1)[..., 3:] for x in new]
    ops.append(*new, *planes, lengths, case.layout)
    ops.append(*shifted, *again, lengths, case.layout)
    for side in (0, 1):
        assert_same_planes(again[side], clone(planes[side]), f"{case}, {'value' if side else 'key'}")


@variants
def test_a_sequence_does_not_depend_on_its_batch(engine: str, formats: tuple[KVFormat, KVFormat]) -> None:
    case = Case(
        formats, 64, torch.bfloat16, 4, 1, (700, 300), capacity=768, sink_length=4, residual_length=130
    )  # fmt: skip
    planes, query = (filled(case, 0), filled(case, 1)), queries(case)
    both, _ = run_decode(engine, case, planes=planes, query=query, num_splits=3)
    for b in (0, 1):
        alone = Case(
            formats, 64, torch.bfloat16, 4, 1, case.lengths[b : b + 1], capacity=768, sink_length=4,
            residual_length=130,
        )  # fmt: skip
        rows = row_of(planes[0], b), row_of(planes[1], b)
        out, _ = run_decode(engine, alone, planes=rows, query=query[b : b + 1], num_splits=3)
        assert_same(out, both[b : b + 1].cpu(), "a row alone")


def test_nan_stays_with_those_who_attend_to_it(engine: str) -> None:
    """In a first token, one of the newest and one between, of keys and of values; seen, and padded away."""
    for side, token in itertools.product((0, 1), (1, 60, 95)):
        case = Case(pair(INT4), 64, torch.float32, 2, 1, (100, 100), (0, token + 1), sink_length=4, residual_length=10)
        x = tokens(case, 128, 64)
        x[:, 1, token, 3] = torch.nan
        planes = [filled(case, each, x if each == side else None) for each in (0, 1)]
        out, _ = run_decode(engine, case, planes=(planes[0], planes[1]))
        assert out.isnan().flatten(2).any(2).flatten().tolist() == [True, False]


def test_opcheck(device: str) -> None:
    for formats in ((BLOCKS, INT4), pair(KVFormat("int8"))):
        case = Case(formats, 64, torch.float32, 2, 2, (130, 30), capacity=256, sink_length=2, residual_length=9)
        spelled = [clone(filled(case, side), device).tensors() for side in (0, 1)]
        key, value, query, lengths = (
            x.to(device) for x in (tokens(case, 2, 64), tokens(case, 2, 64), queries(case), case.lengths_tensor())
        )
        starts = torch.zeros(2, dtype=torch.int32, device=device)
        kinds = (None, None, False, case.layout.packed)
        append, decode = torch.ops.hf_kvquant.append.default, torch.ops.hf_kvquant.decode.default
        torch.library.opcheck(append, (key, value, *spelled, lengths, starts, *kinds))
        extras = (None, starts, None, None, 0.125, 0.0, 0, 0)
        torch.library.opcheck(decode, (query, key, value, *spelled, lengths, *extras, *kinds))


# --- storage ----------------------------------------------------------------------------------------------------------


def stored(
    formats: LayerFormats, counts: list[int], max_cache_len: int | None = None, transform: KeyTransform | None = None
) -> tuple[LayerStore, Tensor, Tensor]:
    """A storage, and all that it was given."""
    storage = LayerStore(formats, max_cache_len=max_cache_len, name="layer 3", key_transform=transform)
    new = [(torch.randn(2, 2, count, 16), torch.randn(2, 2, count, 16)) for count in counts]
    for each in new:
        storage.extend(*each)
    key, value = (torch.cat(parts, dim=2) for parts in zip(*new, strict=True))
    return storage, key, value


@pytest.mark.parametrize("max_cache_len", [None, 310])
@pytest.mark.parametrize("key_format", [INT4, BLOCKS], ids=name_of)
def test_a_crop_makes_codes_dense_again(key_format: KVFormat, max_cache_len: int | None) -> None:
    transform = make_transform("center+smooth+rotate", 16)
    storage, key, value = stored(LayerFormats(key_format, INT4, (), 3, 20), [200, 100], max_cache_len, transform)
    before = [x[:, :, :275].clone() for x in storage.dequantize()]
    for x, given in zip(before, (key, value), strict=True):
        assert_same(x[:, :, :3], given[:, :, :3], "the first tokens")
        assert (x[:, :, 3:] != given[:, :, 3:275]).any()
    rewind.crop(storage, 25)
    after = [x[:, :, :275] for x in storage.dequantize()]
    for x, expected, given in zip(after, before, (key, value), strict=True):
        assert_same(x[:, :, :255], expected[:, :, :255], "codes that stay codes")
        assert_same(x[:, :, 255:280], expected[:, :, 255:280], "what codes have left")
        assert (x[:, :, 255:275] - given[:, :, 255:275]).abs().max() < 1.5
    new = torch.randn(2, 2, 30, 16)
    storage.extend(new, new)
    for x, expected in zip(storage.dequantize(), before, strict=True):
        assert_same(x[:, :, 285:305], new[:, :, 10:], "the newest tokens")
        assert_same(x[:, :, :3], expected[:, :, :3], "the first tokens")


def test_sizes() -> None:
    storage, _, _ = stored(LayerFormats(BLOCKS, INT4, (), 4, 130), [200])
    assert storage.planes[0].tail is not None
    assert storage.planes[1].tail is not None
    assert storage.planes[0].tail.shape == (2, 2, 4 + 160 + 128, 16)
    assert storage.planes[1].tail.shape == (2, 2, 4 + 130, 16)
    tails = 2 * (4 + 160 + 128 + 4 + 130) * 16 * 4
    assert storage.num_bytes_held == 2 * (200 * storage.bytes_per_token + tails)
    assert storage.num_bytes == 2 * (256 * storage.bytes_per_token + tails)
    mixed, _, _ = stored(LayerFormats(KVFormat("none"), INT4, (), 4, 10), [200])
    assert mixed.planes[0].tail is None
    assert mixed.num_bytes_held == 2 * (200 * mixed.bytes_per_token + 2 * 14 * 16 * 4)
    assert INT4.tail_bytes(8, 128, sink_length=4, residual_length=128) == 8 * 132 * 128 * 2
    assert BLOCKS.tail_bytes(8, 128, sink_length=4, residual_length=128) == 8 * 260 * 128 * 2
    assert INT4.tail_bytes(8, 128) == 0 and KVFormat("none").tail_bytes(8, 128, sink_length=4) == 0


# --- caches and models ------------------------------------------------------------------------------------------------


def small_model() -> Any:
    return models.llama(max_position_embeddings=512)


CONFIGS: dict[str, dict[str, Any]] = {
    "int4-token": {"preset": "int4-token", "sink_length": 3, "residual_length": 9, "layers": {1: "none"}},
    "int8": {"preset": "int8", "sink_length": 2, "residual_length": 200},
    "int4-channel": {"preset": "int4-channel", "sink_length": 4, "residual_length": 5, "layers": {1: "none"}},
    "int4-channel, no window": {"preset": "int4-channel", "layers": {1: "none"}},
}


def before_border(config: dict[str, Any], tokens: int) -> int:
    """A length so many tokens before a block of `int4-channel` becomes codes, for windows of a few tokens."""
    return 128 - tokens + min(config.get("residual_length", 0), 9)


@pytest.mark.parametrize("kind", ["growing", "static"])
@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"prefill_chunk_size": 60}], ids=str)
@pytest.mark.parametrize("name", CONFIGS)
def test_generate_matches_a_simulated_cache(name: str, options: dict[str, Any], kind: str) -> None:
    """The padding of one row is longer than the first chunk; in `int4-channel`, a block becomes codes."""
    model = small_model()
    config = {**CONFIGS[name], "static": kind == "static"}
    inputs = left_padded(batch=2, tokens=252, pads=(3, 140))
    simulated = ReferenceCache(model.config, config, mask=inputs["attention_mask"])
    expected = greedy(model, inputs, 12, **with_cache(simulated), **options)
    with patched(model, config):
        output = greedy(model, inputs, 12, **options)
    assert_same(output.sequences, expected.sequences, "tokens")
    bound = tolerances.model_bound(logits(expected), logits(expected), torch.float32)
    compare.assert_close(logits(output), logits(expected), bound, "logits")
    assert not any(storage.tally.fallbacks for storage in cache_of(output).storages)


@pytest.mark.parametrize("name", CONFIGS)
def test_assisted_decoding_crops_into_the_window(name: str) -> None:
    """And across the border of a block."""
    model, config = small_model(), CONFIGS[name]
    inputs = {"input_ids": torch.tensor([[5, 9, 7] * (before_border(config, 2) // 3)])}
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    options = {"prompt_lookup_num_tokens": 4}
    expected = greedy(model, inputs, 9, **with_cache(ReferenceCache(model.config, config)), **options)
    with patched(model, config):
        output = greedy(model, inputs, 9, **options)
    assert_same(output.sequences, expected.sequences, "tokens")


@pytest.mark.full(
    when=lambda name, backend: backend == "eager" or name not in ("int4-token", "int4-channel"),
    reason="aot_eager traces through everything that eager does, and lengths of windows are arguments of an op",
)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_compiled_step(name: str, backend: str) -> None:
    tokens = before_border(CONFIGS[name], 4)
    model, inputs = small_model(), left_padded(batch=2, tokens=tokens, pads=(3, 40))
    compiled = CompileConfig(backend=backend, mode=None, fullgraph=True, dynamic=False)
    compiled._compile_all_devices = True
    torch._dynamo.reset()
    with patched(model, {**CONFIGS[name], "max_cache_len": 160}):
        expected = greedy(model, inputs, 8)
        with torch._dynamo.config.patch(error_on_recompile=True):
            output = greedy(model, inputs, 8, compile_config=compiled)
        again = greedy(model, inputs, 8, compile_config=compiled)
    torch._dynamo.reset()
    for each in (output, again):
        assert_same(each.sequences, expected.sequences, "tokens")
        bound = tolerances.model_bound(logits(expected), logits(expected), torch.float32)
        compare.assert_close(logits(each), logits(expected), bound, "logits")


@pytest.mark.full(
    when=lambda max_cache_len: max_cache_len is None,
    reason="takes 8 s to compile; `generate` compiles over static caches only",
)
@pytest.mark.parametrize("max_cache_len", [None, 32])
def test_a_compiled_prompt_knows_its_padding(max_cache_len: int | None) -> None:
    """The first tokens lie behind it, and a row of theirs must hold the same token at every step."""
    model, inputs = small_model(), left_padded(batch=2, tokens=16, pads=(3, 7))
    config = {"preset": "int4-token", "sink_length": 2, "residual_length": 5, "max_cache_len": max_cache_len}
    mask = inputs["attention_mask"]

    def run(forward: Any) -> Tensor:
        cache = KVQuantCache(model.config, config)
        position = (mask.cumsum(1) - 1).clamp(min=0)
        steps = [forward(**inputs, position_ids=position, **with_cache(cache), use_cache=True).logits[:, -1:]]
        longer = torch.nn.functional.pad(mask, (0, 1), value=1)
        steps.append(
            forward(
                input_ids=steps[0].argmax(-1),
                attention_mask=longer,
                position_ids=position[:, -1:] + 1,
                **with_cache(cache),
                use_cache=True,
            ).logits
        )
        return torch.cat(steps, 1)

    torch._dynamo.reset()
    with patched(model, config), torch.no_grad():
        expected, output = run(model), run(torch.compile(model, backend="aot_eager", dynamic=False))
    torch._dynamo.reset()
    compare.assert_close(output, expected, tolerances.model_bound(expected, expected, torch.float32), "logits")


@pytest.mark.parametrize("name", CONFIGS)
def test_a_fallback_attends_to_the_same_tokens(name: str) -> None:
    """Dequantised tensors, for a model that is not patched, hold dense tokens as well."""
    model, inputs = small_model(), left_padded(batch=2, tokens=130, pads=(0,))
    with patched(model, CONFIGS[name]):
        expected = greedy(model, inputs, 4)
    output = greedy(model, inputs, 4, **with_cache(KVQuantCache(model.config, CONFIGS[name])))
    assert_same(output.sequences, expected.sequences, "tokens")


def test_holes_in_the_mask_fall_back_to_the_same_tokens() -> None:
    """Padding is what lies before the first token that is shown."""
    model, inputs, config = small_model(), left_padded(batch=2, tokens=40, pads=(3, 9)), CONFIGS["int4-token"]
    inputs["attention_mask"][:, 20:24] = 0
    simulated = ReferenceCache(model.config, config, mask=inputs["attention_mask"])
    expected = greedy(model, inputs, 8, **with_cache(simulated))
    with patched(model, config):
        output = greedy(model, inputs, 8)
    assert_same(output.sequences, expected.sequences, "tokens")
    bound = tolerances.model_bound(logits(expected), logits(expected), torch.float32)
    compare.assert_close(logits(output), logits(expected), bound, "logits")
    assert cache_of(output).storages[0].tally.fallbacks


def test_a_window_of_everything_is_exact() -> None:
    """No token is taken from codes: what is left of quantisation is how sums are ordered."""
    model, inputs = small_model(), left_padded(batch=2, tokens=40, pads=(3, 0))
    expected = greedy(model, inputs, 8)
    for preset in ("int4-token", "fp8", "int4-channel"):
        with patched(model, {"preset": preset, "residual_length": 64}):
            output = greedy(model, inputs, 8)
        bound = tolerances.model_bound(logits(expected), logits(expected), torch.float32)
        compare.assert_close(logits(output), logits(expected), bound, preset)


# --- configs and refusals ---------------------------------------------------------------------------------------------


def test_configs_say_how_many_tokens_stay_dense() -> None:
    config = KVQuantConfig.from_preset(
        "int4-token", sink_length=4, residual_length=128, layers={0: "int8", 1: "none", 2: {"sink_length": 0}}
    )
    spelled = {index: (config.formats(index).sink_length, config.formats(index).residual_length) for index in range(4)}
    assert spelled == {0: (4, 128), 1: (0, 0), 2: (0, 128), 3: (4, 128)}
    assert KVQuantConfig.from_dict(config.to_dict()) == config
    assert config.formats(3).describe() == (
        "key int4-head-asymmetric-clip0.9375, value int4-head-asymmetric, first 4 and last 128 tokens dense"
    )
    assert config.formats(1).describe() == "none"
    assert KVQuantConfig.from_dict({"nbits": 4, "residual_length": 128}).residual_length == 128
    assert KVQuantConfig.from_dict({"nbits": 4, "residual_length": None}).residual_length == 0


NOTHING = "must be 0 where neither keys nor values are quantised, got 4. Every token stays dense there: leave it out."


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            lambda: KVQuantConfig.from_preset("int4-token", sink_length=-1),
            ValueError,
            "KVQuantConfig: `sink_length` must be 0 or positive, got -1. 0 keeps no such tokens dense.",
        ),
        (
            lambda: KVQuantConfig(residual_length=2.5),  # type: ignore[arg-type]
            TypeError,
            "KVQuantConfig: `residual_length` must be a number of tokens, got 2.5.",
        ),
        (
            lambda: KVQuantConfig.from_preset("int4-token", residual_length=True),
            TypeError,
            "KVQuantConfig: `residual_length` must be a number of tokens, got True.",
        ),
        (
            lambda: KVQuantConfig.from_preset("none", sink_length=4),
            ValueError,
            f"KVQuantConfig: `sink_length` {NOTHING}",
        ),
        (
            lambda: KVQuantConfig.from_dict({"layers": {1: {"preset": "none", "residual_length": 4}}}),
            ValueError,
            f"KVQuantConfig: layer 1: `residual_length` {NOTHING}",
        ),
        (
            lambda: LayerFormats(KVFormat("none"), KVFormat("none"), (), 4),
            ValueError,
            f"LayerFormats: `sink_length` {NOTHING}",
        ),
        (
            lambda: KVQuantConfig.from_dict({"layers": {1: {"sink_lenght": 4}}}),
            ValueError,
            "KVQuantConfig: layer 1: unknown key 'sink_lenght'. Did you mean 'sink_length'? "
            "A layer takes 'preset', 'key', 'value', 'transforms', 'sink_length' and 'residual_length'.",
        ),
    ],
)
def test_refuses(make: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        make()


def replaced(planes: Planes, **changes: Any) -> Planes:
    return Planes(**{"codes": planes.codes, "scale": planes.scale, "zero": planes.zero, "tail": planes.tail, **changes})


BROKEN: list[tuple[tuple[KVFormat, KVFormat], int, Any, str]] = [
    (
        pair(INT4),
        0,
        lambda planes: replaced(planes, tail=None),
        "`key_planes` must be 4 tensors for this layout, got 3. Planes",
    ),
    (
        pair(KVFormat("int8")),
        1,
        lambda planes: replaced(planes, tail=None),
        "`value_planes` must be 3 tensors for this layout, got 2. Planes",
    ),
    (
        pair(KVFormat("int8")),
        1,
        lambda planes: replaced(planes, tail=planes.tail[:, :, :13]),
        "`value_planes.tail` must be [2, 2, 14, 64] of the model's dtype, got [2, 2, 13, 64] float32. Planes",
    ),
    (
        pair(INT4),
        1,
        lambda planes: replaced(planes, tail=planes.tail.repeat(1, 1, 1, 2)),
        "`value_planes.tail` must be [2, 2, 14, 64] of the model's dtype, got [2, 2, 14, 128] float32. Planes",
    ),
    (
        (BLOCKS, INT4),
        0,
        lambda planes: replaced(planes, tail=planes.tail[:, :, :132]),
        "`key_planes.tail` must be [2, 2, 164, 64] of the model's dtype, got [2, 2, 132, 64] float32. Planes",
    ),
    (
        (BLOCKS, INT4),
        0,
        lambda planes: replaced(planes, tail=planes.tail.repeat(1, 1, 2, 1)),
        "`key_planes.tail` must be [2, 2, 164, 64] of the model's dtype, got [2, 2, 328, 64] float32. Planes",
    ),
    (
        pair(INT4),
        1,
        lambda planes: replaced(planes, tail=planes.tail.mT.contiguous().mT),
        "`value_planes.tail` must have contiguous rows, got stride 14. Call",
    ),
    (
        pair(INT4),
        1,
        lambda planes: replaced(planes, tail=planes.tail.half()),
        "`value` must have the dtype of the tail, got another one. Start",
    ),
    (
        (KVFormat("none"), INT4),
        0,
        lambda planes: replaced(planes, tail=torch.zeros(2, 2, 14, 64)),
        "`key_planes` must be 1 tensors for this layout, got 2. Planes",
    ),
]


@pytest.mark.parametrize(("formats", "side", "change", "message"), BROKEN)
def test_bad_planes_are_named(formats: Any, side: int, change: Any, message: str) -> None:
    case = Case(formats, 64, torch.float32, 2, 1, (130, 30), capacity=256, sink_length=4, residual_length=10)
    planes = [filled(case, 0), filled(case, 1)]
    planes[side] = change(planes[side])
    new = tokens(case, 1, 64), tokens(case, 1, 64)
    with pytest.raises(REFUSED, match=f"^decode: {re.escape(message)}"):
        ops.decode(queries(case), new, planes[0], planes[1], case.lengths_tensor(), case.layout, softmax_scale=1.0)


def test_bad_windows_are_named() -> None:
    case = Case(pair(INT4), 64, torch.float32, 2, 1, (130, 30), capacity=256)
    new, lengths = (tokens(case, 1, 64), tokens(case, 1, 64)), case.lengths_tensor()
    for name in ("sink_length", "residual_length"):
        with pytest.raises(ValueError, match=f"^KVLayout: `{name}` must not be negative, got -1.$"):
            dataclasses.replace(case.layout, **{name: -1})
    first = dataclasses.replace(case, sink_length=4)
    planes = [replaced(filled(first, side), tail=torch.zeros(2, 2, 4 + side, 64)) for side in (0, 1)]
    with pytest.raises(REFUSED, match=r"^append: `value_planes.tail` must be \[2, 2, 4, 64\] .*, got \[2, 2, 5, 64\]"):
        ops.append(*new, *planes, lengths, first.layout)
    spoiled_planes = [replaced(filled(case, side), tail=torch.zeros(2, 2, 14, 64)) for side in (0, 1)]
    with pytest.raises(REFUSED, match=r"^append: `key_planes` must be 3 tensors for this layout, got 4\. Planes"):
        ops.append(*new, spoiled_planes[0], filled(case, 1), lengths, case.layout)
    with pytest.raises(REFUSED, match=r"^append: `value_planes` must be 3 tensors for this layout, got 4\. Planes"):
        ops.append(*new, filled(case, 0), spoiled_planes[1], lengths, case.layout)
    starts = torch.tensor([0, -1], dtype=torch.int32)
    with pytest.raises(REFUSED, match=r"^append: `starts` must not be negative, got -1 for sequence 1.$"):
        ops.append(*new, *(filled(case, side) for side in (0, 1)), lengths, case.layout, starts=starts)
