"""`attend_latent`: the kernel against the reference, which un-rotates and attends to one row for keys and values."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import REFUSED, Case, clone, filled, name_of
from checks import largest, plain_attention
from compare import assert_close, assert_same
from tolerances import attention_bound, lse_bound
from torch import Tensor

from hf_kvquant import KeyTransform, ops
from hf_kvquant._ops import ops as torch_ops
from hf_kvquant.ops import chunks, kernels
from hf_kvquant.spec import reference
from hf_kvquant.spec.formats import KVFormat
from hf_kvquant.spec.layout import KVLayout
from hf_kvquant.spec.planes import Planes

NONE, INT8, FP8 = KVFormat("none"), KVFormat("int8"), KVFormat("fp8")
INT4, GROUPED = KVFormat("int4", symmetric=False), KVFormat("int4", "group", 32, symmetric=False)
FORMATS = [(NONE, NONE), (INT8, INT8), (INT8, NONE), (FP8, NONE), (INT4, INT8), (GROUPED, INT8)]
INT4_OF_128 = KVFormat("int4", "group", 128, symmetric=False)
# What the CUDA kernels serve, of 256 or 512 channels; all else runs the reference.
ON_GPUS = [(INT8, NONE), (FP8, NONE), (INT4_OF_128, INT8)]
ROTATED = KeyTransform(is_rotated=True)
on_gpus = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def latent_case(formats: tuple[KVFormat, KVFormat], rank: int = 96, rope: int = 24, **options: Any) -> Case:
    return Case(formats, rank, num_kv_heads=1, value_dim=rope, **options)


def given(case: Case, num_channels: int) -> Tensor:
    return torch.randn(case.batch, case.num_q_heads, case.q_len, num_channels).to(case.dtype)


def run_latent(
    engine: str,
    case: Case,
    planes: tuple[Planes, Planes] | None = None,
    query: Tensor | None = None,
    transform: KeyTransform | None = None,
    num_splits: int = 0,
) -> tuple[Tensor, Tensor]:
    """Attend to the same planes by the op and by the reference, and compare."""
    rank, rope = case.head_dims()
    planes = planes or (filled(case, 0, None, transform), filled(case, 1))
    query = given(case, rank + rope) if query is None else query
    lengths, starts = case.lengths_tensor(), case.starts_tensor()
    held = {"lengths": lengths, "starts": starts, **case.windows}
    latent, part = (
        reference.dequantize(side, kv_format, key_transform=each, **held)
        for side, kv_format, each in zip(planes, case.formats, (transform, None), strict=True)
    )
    scale = (rank + rope) ** -0.5
    both, options = torch.cat((latent, part), dim=-1), {"softmax_scale": scale, "starts": starts}
    expected, expected_lse = reference.decode_attention(query.float(), both, latent, lengths, **options)
    operands = ops.Operands(*(clone(side, engine) for side in planes), case.layout, transform)
    out, lse = operands.attend_latent(
        query.to(engine),
        lengths.to(engine),
        softmax_scale=scale,
        starts=None if starts is None else starts.to(engine),
        num_splits=num_splits,
    )
    torch_out, torch_lse = plain_attention(case, query, both, latent, **options)
    max_logit = largest(query.float().norm(dim=-1)) * largest(both.norm(dim=-1)) * scale
    bound = attention_bound(expected, torch_out, case.dtype, max_logit, largest(latent.norm(dim=-1)))
    # Kernels for GPUs round a rotated query to float16 numbers, or integers of 15 bits. Weights change by as much as
    # logits, relatively, and the result by up to twice that of the largest value.
    of_query = max_logit * 2.0**-12 if operands.serves_latent(case.dtype) and engine == "cuda" else 0.0
    bound += 2 * of_query * largest(latent)
    assert out.dtype == case.dtype and out.shape == (case.batch, case.q_len, case.num_q_heads, rank)
    assert_close(out, expected, bound, f"{case}, out")
    assert_close(lse, expected_lse, lse_bound(expected_lse, torch_lse, max_logit) + of_query, f"{case}, lse")
    return out, lse


@pytest.mark.parametrize(
    ("formats", "transform"), [*((each, None) for each in FORMATS), *((each, ROTATED) for each in FORMATS[1:])]
)
def test_the_kernel_matches_the_reference(
    engine: str, formats: tuple[KVFormat, KVFormat], transform: KeyTransform | None
) -> None:
    shapes = itertools.cycle([(96, 24), (64, 16), (512, 64), (256, 32), (40, 8)])
    queries = itertools.product((1, 5, 16, 20), (1, 3))
    for (num_heads, q_len), (rank, rope), dtype in zip(
        queries, shapes, itertools.cycle((torch.float32, torch.bfloat16, torch.float16)), strict=False
    ):
        if formats[0].group_size is not None and rank % formats[0].group_size:
            continue
        case = latent_case(
            formats,
            rank,
            rope,
            dtype=dtype,
            num_q_per_kv=num_heads,
            q_len=q_len,
            lengths=(128, 3, 77),
            starts=(0, 1, 9),
        )
        run_latent(engine, case, transform=transform)


@pytest.mark.parametrize("formats", FORMATS[1:], ids=name_of)
@pytest.mark.parametrize("windows", [(4, 0), (0, 28), (4, 28), (3, 90)])
def test_dense_tokens(engine: str, windows: tuple[int, int], formats: tuple[KVFormat, KVFormat]) -> None:
    """Dense latents are in the model's basis, and codes are rotated: their sums meet at the end."""
    sink_length, residual_length = windows
    for lengths, starts in (((200, 5, 131), (7, 0, 64)), ((70, 1, 33), None)):
        case = latent_case(
            formats,
            num_q_per_kv=12,
            q_len=1,
            lengths=lengths,
            starts=starts,
            capacity=256,
            sink_length=sink_length,
            residual_length=residual_length,
        )
        run_latent(engine, case, transform=ROTATED)


@on_gpus
@pytest.mark.parametrize("formats", ON_GPUS, ids=name_of)
@pytest.mark.parametrize("transform", [None, ROTATED], ids=["plain", "rotated"])
@pytest.mark.parametrize(
    ("num_heads", "q_len"), [(1, 1), (16, 1), (20, 1), (20, 2), (32, 1), (40, 1), (64, 1), (128, 1), (16, 5), (5, 70)]
)
def test_the_gpu_kernel(
    formats: tuple[KVFormat, KVFormat], transform: KeyTransform | None, num_heads: int, q_len: int
) -> None:
    for (rank, rope), dtype, windows in zip(
        ((512, 64), (256, 32), (512, 16), (256, 64)),
        itertools.cycle((torch.bfloat16, torch.float16)),
        itertools.cycle(((4, 28), (0, 0))),
        strict=False,
    ):
        case = latent_case(
            formats,
            rank,
            rope,
            dtype=dtype,
            num_q_per_kv=num_heads,
            q_len=q_len,
            lengths=(600, q_len, 257, 400),
            starts=(0, 0, 100, 300) if num_heads % 8 == 0 else None,
            capacity=640,
            sink_length=windows[0],
            residual_length=windows[1],
        )
        for num_splits in (0, 3):
            run_latent("cuda", case, transform=transform, num_splits=num_splits)


@on_gpus
@pytest.mark.parametrize("formats", ON_GPUS, ids=name_of)
def test_memory_may_lie_in_other_ways(formats: tuple[KVFormat, KVFormat]) -> None:
    """Queries that begin between multiples of 16 bytes, and dense tokens in float32, give the same bits."""
    options: dict[str, Any] = {"sink_length": 4, "residual_length": 28, "capacity": 320, "lengths": (300, 17)}
    case = latent_case(formats, 512, 64, dtype=torch.bfloat16, num_q_per_kv=20, q_len=2, **options)
    planes = [clone(side, "cuda") for side in (filled(case, 0, None, ROTATED), filled(case, 1))]
    wide = [dataclasses.replace(side, tail=None if side.tail is None else side.tail.float()) for side in planes]
    query, lengths = given(case, 576).cuda(), case.lengths_tensor().cuda()
    room = torch.zeros(*query.shape[:3], 600, dtype=query.dtype, device="cuda")
    moved = room[..., 1:577].copy_(query)
    expected = ops.Operands(*planes, case.layout, ROTATED).attend_latent(query, lengths, softmax_scale=0.05)
    for held, asked in ((planes, moved), (wide, query)):
        actual = ops.Operands(*held, case.layout, ROTATED).attend_latent(asked, lengths, softmax_scale=0.05)
        for name, one, other in zip(("out", "lse"), actual, expected, strict=True):
            assert_same(one, other, name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_causal_attention(engine: str, dtype: torch.dtype) -> None:
    """Of a chunk to itself, with values that are narrower or wider than keys."""
    if engine == "reference":
        pytest.skip("it is PyTorch's own")
    for q_len, value_dim in ((1, 24), (33, 40), (200, 16), (50, 56)):
        query, key = (torch.randn(2, 3, q_len, 40, dtype=dtype) for _ in range(2))
        value = torch.randn(2, 3, q_len, value_dim, dtype=dtype)
        scores = 0.2 * query.double() @ key.double().mT
        scores = scores.masked_fill(torch.ones(q_len, q_len, dtype=torch.bool).triu(1), -torch.inf)
        expected = (scores.softmax(-1) @ value.double()).transpose(1, 2)
        plain = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=0.2).transpose(1, 2)
        out, lse = chunks.causal_attention(*(x.to(engine) for x in (query, key, value)), 0.2)
        max_logit = 0.2 * largest(query.float().norm(dim=-1)) * largest(key.float().norm(dim=-1))
        bound = attention_bound(expected.float(), plain, dtype, max_logit, largest(value.float().norm(dim=-1)))
        assert out.dtype == dtype and lse.dtype == torch.float32
        assert_close(out, expected.float(), bound, f"out of {q_len}")
        exact = scores.logsumexp(-1).float()
        torch_lse = (0.2 * query @ key.mT).masked_fill(scores == -torch.inf, -torch.inf).float().logsumexp(-1)
        assert_close(lse, exact, lse_bound(exact, torch_lse, max_logit), f"lse of {q_len}")


def test_what_gpu_kernels_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """What they do not take runs in PyTorch: the op would refuse it."""
    monkeypatch.setattr(kernels, "_serves_gpu", lambda index: True)
    monkeypatch.setattr(kernels, "_shared_memory", lambda index: 227 * 1024)
    gpu, lopsided = torch.device("cuda", 0), KVFormat("int8", symmetric=False)

    def serves(latent: KVFormat, rope: KVFormat, rank: int = 512, num_rope: int = 64) -> bool:
        return kernels.serves_latent(gpu, KVLayout(latent, rope), rank, num_rope)

    assert all(serves(*formats, rank, num_rope) for formats in ON_GPUS for rank, num_rope in ((512, 64), (256, 32)))
    others = [*itertools.product((INT8, FP8, INT4_OF_128, NONE), repeat=2), (lopsided, NONE), (INT4_OF_128, lopsided)]
    others += [
        (KVFormat("int4", "group", 128), INT8),
        (GROUPED, INT8),
        (INT4, INT8),
        (KVFormat("int8", "tensor"), NONE),
    ]
    assert not any(serves(*formats) for formats in others if formats not in ON_GPUS)
    assert not any(serves(INT8, NONE, *sizes) for sizes in ((128, 64), (512, 72), (512, 24)))
    monkeypatch.setattr(kernels, "_shared_memory", lambda index: 99 * 1024)
    assert not serves(INT8, NONE)


@on_gpus
def test_gpu_kernels_serve() -> None:
    """What is meant to run a kernel does so: the reference would pass every other test."""
    for (rank, rope), formats in itertools.product(((512, 64), (256, 32)), ON_GPUS):
        case = latent_case(formats, rank, rope, dtype=torch.bfloat16, num_q_per_kv=4)
        planes = [clone(filled(case, side), "cuda") for side in range(2)]
        operands = ops.Operands(*planes, case.layout)
        assert operands.serves_latent(torch.bfloat16) and not operands.serves_latent(torch.float32)
        # Dense rope parts are multiplied as they are.
        assert operands.serves_latent(torch.float16) == formats[1].is_quantized
        with pytest.raises(REFUSED, match=r"attend_latent: .*: wanted a query in float16 or bfloat16, got float32"):
            torch_ops.attend_latent.default(
                given(case, rank + rope).float().cuda(),
                *(side.tensors() for side in planes),
                case.lengths_tensor().cuda(),
                None,
                0.1,
                0,
                False,
                case.layout.packed,
                None,
            )


@on_gpus
@pytest.mark.parametrize("formats", [*ON_GPUS, (GROUPED, INT8), (NONE, NONE)], ids=name_of)
def test_rows_of_512_channels_are_appended_like_the_reference(formats: tuple[KVFormat, KVFormat]) -> None:
    for dtype, q_len, windows in itertools.product(
        (torch.float32, torch.bfloat16), (1, 3, 40), ((0, 0), (4, 28)) if formats[0].is_quantized else ((0, 0),)
    ):
        case = latent_case(
            formats,
            512,
            64,
            dtype=dtype,
            q_len=q_len,
            lengths=(100, q_len, 128),
            starts=(3, 0, 70),
            sink_length=windows[0],
            residual_length=windows[1],
        )
        new = [torch.randn(3, 1, q_len, dim).to(dtype) for dim in (512, 64)]
        new[0][0, :, 0, 5] = torch.nan
        held = case.lengths_tensor(), case.starts_tensor()
        transform = ROTATED if formats[0].is_quantized else None
        expected = [filled(case, side) for side in range(2)]
        made = [clone(side, "cuda") for side in expected]
        operands = ops.Operands(*made, case.layout, transform)
        operands._append = torch_ops.append.default
        operands.append(*(x.cuda() for x in new), *(None if x is None else x.cuda() for x in held))
        ops.Operands(*expected, case.layout, transform).append(*new, *held)
        for found, wanted in zip(made, expected, strict=True):
            for x, y in zip(found.tensors(), wanted.tensors(), strict=True):
                assert_same(x.cpu(), y, f"{case}")


@pytest.mark.parametrize("num_splits", [1, 2, 7])
def test_splits(engine: str, num_splits: int) -> None:
    case = latent_case((INT8, INT8), num_q_per_kv=20, lengths=(512, 1, 300), capacity=512)
    run_latent(engine, case, transform=ROTATED, num_splits=num_splits)


def test_many_rows(engine: str) -> None:
    """More rows than share a tile: 20 heads of 9 tokens."""
    case = latent_case((GROUPED, INT8), num_q_per_kv=20, q_len=9, lengths=(128, 9, 65))
    run_latent(engine, case, transform=ROTATED)


def test_huge_queries(engine: str) -> None:
    """Each part is divided on its own, so that sums of codes do not overflow."""
    case = latent_case((INT8, INT8), num_q_per_kv=4)
    rank, rope = case.head_dims()
    for begin, end in ((0, rank), (rank, rank + rope), (0, rank + rope)):
        query = given(case, rank + rope)
        query[..., begin:end] *= 1e33
        planes = tuple(filled(case, side, torch.randn(3, 1, 128, dim) * 1e-3) for side, dim in enumerate((rank, rope)))
        operands = ops.Operands(*(clone(side, engine) for side in planes), case.layout)
        out, _ = operands.attend_latent(query.to(engine), case.lengths_tensor().to(engine), softmax_scale=0.1)
        assert bool(out.isfinite().all())


@pytest.mark.parametrize("side", [0, 1])
def test_a_huge_query_over_tiny_keys_counts_like_the_other_part(engine: str, side: int) -> None:
    case = latent_case((NONE, NONE), num_q_per_kv=4)
    rank, rope = dims = case.head_dims()
    planes = [filled(case, each, torch.randn(3, 1, 128, dim)) for each, dim in enumerate(dims)]
    planes[side].codes.mul_(1e-33)
    query = given(case, rank + rope)
    query[..., :rank].mul_(1e33 if side == 0 else 1)
    query[..., rank:].mul_(1e33 if side == 1 else 1)
    parts = (query * 1e-33)[..., :rank], (query * 1e-33)[..., rank:]
    lengths, scale = case.lengths_tensor(), 0.1
    plain = [planes[0].codes, planes[1].codes]
    plain[side] = plain[side] * 1e33
    as_if = torch.cat([part * 1e33 if each != side else part for each, part in enumerate(parts)], dim=-1)
    expected, _ = reference.decode_attention(
        as_if, torch.cat(plain, dim=-1), planes[0].codes, lengths, softmax_scale=scale
    )
    operands = ops.Operands(*(clone(each, engine) for each in planes), case.layout)
    out, _ = operands.attend_latent(query.to(engine), lengths.to(engine), softmax_scale=scale)
    assert_close(out, expected, 1e-4 * largest(expected), f"huge queries of part {side}")


def test_what_is_not_finite(engine: str) -> None:
    """A latent that is not finite spoils keys and values of its token, a rope part only the key; padding hides both."""
    case = latent_case((INT8, INT8), num_q_per_kv=3, q_len=2, lengths=(80, 80), starts=(0, 40))
    rank, rope = case.head_dims()
    for side, dim in enumerate((rank, rope)):
        x = torch.randn(2, 1, 128, dim)
        x[:, :, 20] = torch.nan  # seen by the first sequence, padding of the second
        other = torch.randn(2, 1, 128, rope if side == 0 else rank)
        both = (x, other) if side == 0 else (other, x)
        planes = filled(case, 0, both[0]), filled(case, 1, both[1])
        operands = ops.Operands(*(clone(each, engine) for each in planes), case.layout)
        starts = case.starts_tensor()
        assert starts is not None
        out, _ = operands.attend_latent(
            given(case, rank + rope).to(engine),
            case.lengths_tensor().to(engine),
            softmax_scale=0.1,
            starts=starts.to(engine),
        )
        assert bool(out[0].isnan().all()) and bool(out[1].isfinite().all())


def test_a_later_nan_is_hidden_from_earlier_queries(engine: str) -> None:
    case = latent_case((INT8, INT8), num_q_per_kv=20, q_len=2, lengths=(80,))
    rank, rope = case.head_dims()
    x = torch.randn(1, 1, 128, rank)
    x[:, :, 79] = torch.nan
    planes = filled(case, 0, x, ROTATED), filled(case, 1)
    operands = ops.Operands(*(clone(each, engine) for each in planes), case.layout, ROTATED)
    out, _ = operands.attend_latent(
        given(case, rank + rope).to(engine), case.lengths_tensor().to(engine), softmax_scale=0.1
    )
    assert bool(out[:, 0].isfinite().all()) and bool(out[:, 1].isnan().all())


def test_results_do_not_depend_on_the_batch(engine: str) -> None:
    """On GPUs, with a fixed number of splits, and where a kernel serves."""
    sizes: dict[str, Any] = {"num_q_per_kv": 20}
    if engine == "cuda":
        sizes |= {"rank": 512, "rope": 64, "dtype": torch.bfloat16}
    formats = (INT4_OF_128 if engine == "cuda" else INT4), INT8
    case = latent_case(formats, lengths=(128, 64, 77), **sizes)
    rank, rope = case.head_dims()
    planes, query = (filled(case, 0, None, ROTATED), filled(case, 1)), given(case, rank + rope)
    together, _ = run_latent(engine, case, planes, query, ROTATED, num_splits=2)
    for b, length in enumerate(case.lengths):
        alone = latent_case(formats, lengths=(length,), **sizes)
        one = tuple(side.map(lambda plane, b=b: plane[b : b + 1].clone()) for side in planes)  # type: ignore[misc]
        out, _ = run_latent(engine, alone, one, query[b : b + 1], ROTATED, num_splits=2)
        assert_same(out, together[b : b + 1], f"sequence {b}")


def test_pages(engine: str) -> None:
    """Pages anywhere give what rows side by side give."""
    case = latent_case((GROUPED, INT8), num_q_per_kv=20, lengths=(256, 130), capacity=256)
    rank, rope = case.head_dims()
    planes, query = (filled(case, 0, None, ROTATED), filled(case, 1)), given(case, rank + rope)
    expected, _ = run_latent(engine, case, planes, query, ROTATED)
    table = torch.tensor([[3, 0], [1, 2]], dtype=torch.int32)

    def in_pages(plane: Tensor, axis: int) -> Tensor:
        pages = torch.stack(plane.split(128, dim=axis), dim=1).flatten(0, 1)  # sequence by sequence
        return pages[table.flatten().argsort()].contiguous()

    paged = tuple(
        Planes(in_pages(side.codes, 2), in_pages(side.scale, 3), None if side.zero is None else in_pages(side.zero, 3))
        for side in planes
        if side.scale is not None
    )
    operands = ops.Operands(*(clone(side, engine) for side in paged), case.layout, ROTATED)
    out, _ = operands.attend_latent(
        query.to(engine),
        case.lengths_tensor().to(engine),
        softmax_scale=(rank + rope) ** -0.5,
        page_table=table.to(engine),
    )
    assert_same(out, expected, "pages")


def test_the_fake_has_the_shapes_of_the_op() -> None:
    case = latent_case((INT8, INT8), num_q_per_kv=4, q_len=2, lengths=(64, 2, 37))
    planes = [filled(case, side).tensors() for side in range(2)]
    query, rest = given(case, 120), (case.lengths_tensor(), None, 0.1, 0, False, case.layout.packed, None)
    out, lse = torch_ops.attend_latent.default(query, *planes, *rest)
    fake = torch_ops.attend_latent.default(
        query.to("meta"), *([plane.to("meta") for plane in side] for side in planes), rest[0].to("meta"), *rest[1:]
    )
    assert [x.shape for x in fake] == [out.shape, lse.shape] and fake[0].dtype == out.dtype


@pytest.mark.parametrize("which", ["compiled", "reference"])
def test_refusals(which: str) -> None:
    case = latent_case((INT8, INT8), num_q_per_kv=4)
    planes, lengths = [filled(case, side) for side in range(2)], case.lengths_tensor()
    by_channel = latent_case((KVFormat("int4", "channel", symmetric=False, block_size=128), INT8), residual_length=4)
    tails = [filled(by_channel, side) for side in range(2)]
    cases = {
        "`query` must be .*120": (planes, given(case, 96), lengths, case.layout),
        "`lengths` must be .*128": (planes, given(case, 120), lengths + 128, case.layout),
        "`layout` must have no scales for channels of latents, got granularity channel": (
            tails,
            given(by_channel, 120),
            by_channel.lengths_tensor(),
            by_channel.layout,
        ),
    }
    for message, (sides, query, held, layout) in cases.items():
        arguments = [query, *(side.tensors() for side in sides), held, None, 0.1, 0, False, layout.packed, None]
        call = torch_ops.attend_latent.default
        if which == "reference":
            call = ops.schemas._attend_latent
        with pytest.raises(REFUSED, match=f"attend_latent: {message}"):
            call(*arguments)


def test_gradients_are_refused() -> None:
    case = latent_case((INT8, INT8), num_q_per_kv=4)
    operands = ops.Operands(*(filled(case, side) for side in range(2)), case.layout)
    with pytest.raises(RuntimeError, match="attention: `query` must not require gradients over a quantised cache"):
        operands.attend_latent(given(case, 120).requires_grad_(), case.lengths_tensor(), softmax_scale=0.1)
