"""Numbers that shortcuts of kernels stumble over: append and attention against the reference at the edges of what
formats and dtypes hold.

Kernels make narrower numbers of wider ones (float16 weights, queries as 16-bit integers), scale by powers of two, take
approximate reciprocals, and keep a maximum that lags behind: each is right for well-behaved numbers. Here every format
of the kernels meets others, in a thousand query rows and more, so that what one row in some hundred suffers is seen.
Precision over ordinary numbers is measured in `test_cuda_decode.py`, masks and splits in `test_ops.py`.

Left out, since the reference has no answer either, or its answer is one of evaluation order:

- Scores that overflow float32, and sums of products that do so on the way: inf - inf is NaN in one order only.
- Rows that see nothing but -inf, from infinite queries or from sinks of -inf among them: 0 / 0.
- Values beyond the largest float32 by the number of tokens: kernels divide by the sum of weights once, at the end, so
  that the undivided sum must fit; the reference divides first. Room for it would cost the smallest values.
- Single channels in which queries of 16 bits are much smaller than in others, and keys that much larger: integer
  products keep 16 bits of a query relative to its largest channel, by design, and cannot know the keys.
- Float32 queries and asymmetric int8 keys so small that their scale is the smallest there is: kernels take codes off
  their middle, which is then far from all keys, and the difference of two float32 sums is left.
- Infinite slopes of ALiBi: their product with the distance 0 of the newest token is NaN.
"""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from cases import Case, clone, filled, make_transform, name_of, queries
from checks import pair, run_append, run_decode
from compare import assert_same
from torch import Tensor

from hf_kvquant import KeyTransform, ops
from hf_kvquant.config import PRESETS
from hf_kvquant.spec import reference
from hf_kvquant.spec.formats import KVFormat
from hf_kvquant.spec.planes import Planes

Pair = tuple[KVFormat, KVFormat]

# What kernels on GPUs do not get right, since it would cost time in every step: a test, patterns of its parameters, and
# why. One that passes is news, and fails.
INTEGERS = ("int8-head-symmetric+*", "int4-head-*")
KNOWN_ON_GPUS = (
    (
        "test_queries_near_the_end_of_float32",
        (*INTEGERS, "int2-head-*", "int4-group32*", "int4-channel*", "fp8-head*"),
        "products with codes overflow before scales make them small",
    ),
    (
        "test_attention",
        ("tiny-int4-channel*", "large_queries-int4-channel*"),
        "scales below 2^-9 lose bits of the query in float16",
    ),
    ("test_attention", ("subnormal-*+int[42]-head-asymmetric*",), "zeros are 1e-5 of the smallest scale off"),
    ("test_channels_beside_a_huge_one", INTEGERS, "a query has 16 bits, of its largest channel"),
    (
        "test_bad_tokens_are_for_those_who_see_them",
        ("int4-group32*",),
        "one group without a scale spoils those beside it",
    ),
)


@pytest.fixture(autouse=True)
def known_on_gpus(request: pytest.FixtureRequest) -> None:
    for test, patterns, reason in KNOWN_ON_GPUS:
        names = (f"{test}[[]cuda-{pattern}" for pattern in patterns)
        if any(fnmatch.fnmatchcase(request.node.name, name) for name in names):
            request.applymarker(pytest.mark.xfail(reason=reason, strict=True))


FORMATS: list[Pair] = [
    *PRESETS.values(),
    pair(KVFormat("int8", symmetric=False)),
    pair(KVFormat("int4")),
    pair(KVFormat("int4", "group", 16)),
    (KVFormat("fp8", "tensor"), KVFormat("int8", "token")),
    (KVFormat("int4", "token", symmetric=False), KVFormat("int8", "group", 16)),
    (KVFormat("int4", "tensor", symmetric=False), KVFormat("fp8", "group", 32)),
]


def id_of(value: Pair) -> str:
    return "+".join(map(name_of, value))


formats = pytest.mark.parametrize("formats", FORMATS, ids=id_of)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
# Whole blocks, parts of tiles, and tokens that are not there. Kernels take few rows of a head otherwise than many.
SHAPES: tuple[dict[str, Any], ...] = (
    {"num_q_per_kv": 4, "q_len": 3, "lengths": (136, 129, 33, 3)},
    {"num_q_per_kv": 2, "q_len": 1, "lengths": (136, 128, 64, *range(1, 6))},
    {"num_q_per_kv": 8, "q_len": 1, "lengths": (136, 66, 33, 128)},
    {"num_q_per_kv": 1, "q_len": 1, "lengths": (136, 129, 127, 65, *range(30, 34))},
)

Drawn = tuple[Tensor, Tensor, Tensor]
Numbers = Callable[[Case], Drawn]


def cases_of(engine: str, formats: Pair, index: int) -> Iterator[Case]:
    """Each dtype with a shape and a head dim that kernels have, or one between them; `index` shifts which.

    A GPU takes every dtype with every other shape.
    """
    shift = index + FORMATS.index(formats)
    for i, dtype in enumerate(DTYPES):
        for j, shape in enumerate(SHAPES):
            if (i + j + shift) % 2 == 0 if engine == "cuda" else (i, j) == (shift % 3, shift // 3 % 4):
                capacity = 256 if formats[0].granularity == "channel" else 192
                yield Case(formats, (64, 128, 96)[(i + j + shift // 4) % 3], dtype, capacity=capacity, **shape)


def drawn(case: Case) -> list[Tensor]:
    """Query, keys and values, float32 and normal."""
    shape = case.batch, case.num_kv_heads, case.capacity, case.head_dim
    return [
        torch.randn(case.batch, case.num_q_heads, case.q_len, case.head_dim),
        torch.randn(shape),
        torch.randn(shape),
    ]


def sign_of(x: Tensor) -> Tensor:
    return torch.where(torch.rand_like(x) < 0.5, -1.0, 1.0)


def next_to_powers(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Powers of two and their neighbours of either side, in shape and place of `x`."""
    eps = torch.finfo(dtype).eps
    factor = torch.tensor([1.0, 1 + eps, 1 - eps / 2])[torch.randint(3, x.shape)]
    return sign_of(x) * factor * 2.0 ** torch.randint(-3, 3, x.shape)


def storable(kv_format: KVFormat, dtype: torch.dtype) -> tuple[float, float]:
    """The smallest and the largest number that codes, and a row of float16 numbers, can stand for."""
    most = 64000.0 if dtype == torch.float16 else 2.0**100
    if not kv_format.is_quantized:
        return -most, most
    range_of_codes = reference.max_code(kv_format) * 64000
    if kv_format.symmetric:
        return -min(most, range_of_codes), min(most, range_of_codes)
    return -64000.0, min(most, range_of_codes - 64000)


def powers(case: Case) -> Drawn:
    query, key, value = (next_to_powers(x, case.dtype) for x in drawn(case))
    return query, key, value


def equal_scores(case: Case) -> Drawn:
    """Every token weighs the same: what a weight is rounded by, all are rounded by."""
    query, key, value = drawn(case)
    return query, key[:, :, :1].expand_as(key), value + 3


def zeros(case: Case) -> Drawn:
    """Rows, heads and channels of zeros, of either sign."""
    query, key, value = drawn(case)
    query[:, ::2, 0], key[1::2, 1], value[::2, 0] = 0.0, -0.0, -0.0
    key[:, :, ::3], value[:, :, 1::3], value[..., 7] = 0.0, 0.0, -0.0
    query[:, 1, :, ::2] = -0.0
    return query, key, value


def huge_channel(case: Case) -> Drawn:
    """A channel that decides about scales, and leaves the others hardly any code."""
    query, key, value = drawn(case)
    key[..., 5] *= 1000
    value[..., 9] *= 1000
    return query / 100, key, value


def large_query_channel(case: Case) -> Drawn:
    """One channel in which queries are large and keys small, and another the other way round."""
    query, key, value = drawn(case)
    for channel, ratio in ((5, 4), (case.head_dim // 2, 1 / 4)):
        query[..., channel] *= ratio
        key[..., channel] /= ratio
    return query, key, value


def collapsed(case: Case) -> Drawn:
    """Ranges without an extent: rows of one number, and channels that are the same in all tokens."""
    query, key, value = drawn(case)
    key[:, 0], value[:, 0] = key[:, 0, :, :1], value[:, 0, :, :1]
    key[:, 1], value[:, 1] = key[:, 1, :1], value[:, 1, :1]
    return query, key, value


def tiny(case: Case) -> Drawn:
    """Scales down to the smallest float16, and queries so large that keys count all the same."""
    query, key, value = drawn(case)
    size = 2.0 ** torch.randint(-24, -16, (1, 1, case.capacity, 1))
    return query * (2.0**12 if case.dtype == torch.float16 else 2.0**18), key * size, value * size


def subnormal(case: Case) -> Drawn:
    """The smallest normal numbers of the dtype and some below, where sums of weights are all there is to get right."""
    size = torch.finfo(case.dtype).tiny
    query, key, value = (x.clamp(-2, 2) * size for x in drawn(case))
    return query, key, value


def largest(case: Case) -> Drawn:
    """Keys and values up to the largest that there are codes for; queries that make ordinary logits of them."""
    query, key, value = drawn(case)
    sides = []
    for x, kv_format in zip((key, value), case.formats, strict=True):
        low, high = storable(kv_format, case.dtype)
        sides.append((low + torch.rand_like(x) * (high - low)).to(case.dtype).float())
        sides[-1][:, :, ::5, 3] = high
    _, high = storable(case.formats[0], case.dtype)
    return query * (4 / high), sides[0], sides[1] * 0.5


def large_queries(case: Case) -> Drawn:
    """The same of queries, with tiny keys."""
    query, key, value = drawn(case)
    most = 2.0**15 if case.dtype == torch.float16 else 2.0**100
    return query.clamp(-1, 1) * most, key * 2.0**-15, value


def dominant(case: Case) -> Drawn:
    """For every row another token that has nearly all the weight, and a value that is smaller than all others."""
    query, key, value = drawn(case)
    for b, length in enumerate(case.lengths):
        for h in range(case.num_q_heads):
            place = (61 * h + 17 * b) % max(1, length - case.q_len)
            query[b, h] = 5 * key[b, h // case.num_q_per_kv, place]
            value[b, h // case.num_q_per_kv, place] *= 1e-3
    return query, key, value


def light(case: Case, size: float = 2.0**-14) -> Drawn:
    """A token with most of the weight and no value, and many of 2^-8 of its weight, all with tiny values."""
    query, key, value = drawn(case)
    key, value = key * 0, value[:, :, :1].abs().expand_as(value) * size
    query[..., 0], key[:, :, 0, 0] = 5.55 * case.head_dim**0.5, 1.0
    value[:, :, 0] = 0.0
    return query, key, value


def spread(case: Case) -> Drawn:
    """Tokens of all sizes, so that weights and scales work against each other."""
    query, key, value = drawn(case)
    exponent = 4 * torch.rand(2, *key.shape[:3], 1) - 2
    return query, key * 10 ** (exponent[0] / 2), value * 10 ** (2 * exponent[1])


NUMBERS: list[Callable[[Case], Drawn]] = [
    powers, equal_scores, zeros, huge_channel, large_query_channel, collapsed, tiny, subnormal, largest, large_queries,
    dominant, light, spread,
]  # fmt: skip


def planes_of(case: Case, key: Tensor, value: Tensor, transform: KeyTransform | None = None) -> tuple[Planes, Planes]:
    """What the reference makes of keys and values in the dtype of the case."""
    return filled(case, 0, key.to(case.dtype).float(), transform), filled(case, 1, value.to(case.dtype).float())


@formats
@pytest.mark.parametrize(
    "numbers",
    [pytest.param(numbers, marks=[pytest.mark.sanitize] * (numbers is largest)) for numbers in NUMBERS],
    ids=lambda numbers: numbers.__name__,
)
def test_attention(engine: str, formats: Pair, numbers: Numbers) -> None:
    for case in cases_of(engine, formats, NUMBERS.index(numbers)):
        query, key, value = numbers(case)
        run_decode(engine, case, planes=planes_of(case, key, value), query=query.to(case.dtype))


@formats
def test_queries_near_the_end_of_float32(engine: str, formats: Pair) -> None:
    """Codes are larger than what they stand for: products with them must not overflow where logits do not."""
    for dtype in (torch.bfloat16, torch.float32):
        for shape in SHAPES[::3]:
            case = Case(formats, 64, dtype, capacity=256, **shape)
            query, key, value = drawn(case)
            query = query.clamp(-1, 1) * 1.5 * 2.0**126
            run_decode(engine, case, planes=planes_of(case, key * 2.0**-15, value), query=query.to(dtype))


@formats
def test_channels_beside_a_huge_one(engine: str, formats: Pair) -> None:
    """All count the same, since keys make up for it."""
    for dtype, shape in zip((torch.bfloat16, torch.float16), SHAPES[:2], strict=True):
        case = Case(formats, 64, dtype, capacity=256, **shape)
        query, key, value = drawn(case)
        query[..., 5] *= 1000
        run_decode(engine, case, planes=planes_of(case, key.clone(), value), query=query.to(dtype))
        key[..., 5] /= 1000
        run_decode(engine, case, planes=planes_of(case, key, value), query=query.to(dtype))


@formats
def test_light_tokens_of_tiny_values(engine: str, formats: Pair) -> None:
    """Weights and scales are both small, and must not become nothing together."""
    for case in cases_of(engine, formats, 0):
        query, key, value = light(case, 2.0**-20)
        run_decode(engine, case, planes=planes_of(case, key, value), query=query.to(case.dtype))


@pytest.mark.parametrize("formats", [made for made in FORMATS if made[0].is_quantized], ids=id_of)
def test_attention_to_transformed_keys(engine: str, formats: Pair) -> None:
    """Powers of two behind a transform, where queries are no numbers of 16 bits any more."""
    for i, factor in enumerate((2 - 2.0**-23, 2.0**-40)):
        for case in cases_of(engine, formats, i):
            query, key, value = (next_to_powers(x, case.dtype) for x in drawn(case))
            smoothing = torch.full((case.num_kv_heads, case.head_dim), factor)
            transform = KeyTransform(None, smoothing, is_rotated=i > 0)
            planes = planes_of(case, key, value, transform)
            run_decode(engine, case, planes=planes, query=query.to(case.dtype), key_transform=transform)


# --- what changes scores ----------------------------------------------------------------------------------------------

SCORES: dict[str, Any] = {
    "large scale": {"softmax_scale": 1e3},
    "small scale": {"softmax_scale": 1e-6},
    "tiny scale": {"softmax_scale": 1e-37},
    "negative scale": {"softmax_scale": -3.0},
    "softcap of huge scores": {"softmax_scale": 1e4, "softcap": 20.0},
    "softcap far above": {"softcap": 1e6},
    "small softcap": {"softcap": 1e-3},
    "sinks": (-torch.inf, torch.inf, -1e30, 1e4, 300.0, -300.0, torch.finfo(torch.float32).min, 0.0),
    "slopes": (1e6, 1e3, 100.0, 2.0**-20, 0.0, 1.0, 16.0, 2.0**-149),
}


@formats
@pytest.mark.parametrize("name", SCORES)
def test_scores(engine: str, formats: Pair, name: str) -> None:
    for case in cases_of(engine, formats, list(SCORES).index(name)):
        extras = SCORES[name]
        if isinstance(extras, tuple):
            per_head = torch.tensor(extras).repeat(case.num_q_heads)[-case.num_q_heads :]
            extras = {"sinks" if name == "sinks" else "alibi_slopes": per_head}
        run_decode(engine, case, planes=planes_of(case, *drawn(case)[1:]), **extras)


# --- what is not finite -----------------------------------------------------------------------------------------------


@formats
def test_a_bad_query_is_nobody_elses(engine: str, formats: Pair) -> None:
    """NaN, or infinities that meet keys of both signs, in one row of four.

    On a CPU the others are bitwise the same. A warp of a GPU raises the maxima of its rows together, and so rounds
    otherwise beside a row that has none.
    """
    for case in cases_of(engine, formats, 0):
        planes, query = planes_of(case, *drawn(case)[1:]), queries(case)
        expected, expected_lse = attended(engine, case, query, planes)
        is_bad = torch.arange(query[..., 0].numel()).view(query.shape[:3]) % 4 == 1
        is_bad &= (case.lengths_tensor() > 30).view(-1, 1, 1)  # of few keys, all might have one sign
        is_good = ~is_bad.transpose(1, 2)
        for bad in (torch.nan, torch.inf, -torch.inf):
            spoiled = query.clone()
            spoiled[..., 7] = torch.where(is_bad, bad, query[..., 7])
            out, lse = (x.cpu() for x in run_decode(engine, case, planes=planes, query=spoiled))
            assert not out[~is_good].isfinite().any() and not lse[is_bad].isfinite().any(), f"{case}, {bad}"
            if engine == "cpu":
                assert_same(out[is_good], expected[is_good], f"{case}, rows beside {bad}")
                assert_same(lse[~is_bad], expected_lse[~is_bad], f"{case}, lse beside {bad}")


def attended(engine: str, case: Case, query: Tensor, planes: tuple[Planes, Planes], **extras: Any) -> list[Tensor]:
    """Output and lse of a call, on the CPU."""
    on_device = [clone(made, engine) for made in planes]
    lengths = case.lengths_tensor().to(engine)
    softmax_scale = case.head_dim**-0.5
    results = ops.decode(
        query.to(engine), None, *on_device, lengths, case.layout, softmax_scale=softmax_scale, **extras
    )
    return [x.cpu() for x in results]


@formats
@pytest.mark.sanitize
def test_bad_tokens_are_for_those_who_see_them(engine: str, formats: Pair) -> None:
    """What has no scale in float16: as key or value of the newest token, seen by the last query alone, and of a token
    that has all the weight, where lse must not suffer from the value."""
    for case in cases_of(engine, formats, 1):
        too_large = torch.inf if case.dtype == torch.float16 else 2.0**100  # for any scale, finite in itself
        for side, bad in ((0, torch.nan), (0, too_large), (1, too_large)):
            query, *sides = drawn(case)
            for b, length in enumerate(case.lengths):
                if length == 1:
                    continue  # a score of -inf would be all there is
                sides[side][b, b % 2, length - 1, 3] = bad
                if side == 1:
                    # In few channels, where a sum has few roundings.
                    loved_by = query[b, b % 2 * case.num_q_per_kv, -1, :4]
                    sides[0][b, b % 2, length - 1, :4] = 1000 * loved_by.sign()
            if case.formats[side].granularity == "tensor":
                continue  # a scale that is bad for all tokens
            run_decode(engine, case, planes=planes_of(case, *sides), query=query.to(case.dtype))


@formats
def test_sums_beyond_float16_are_infinite(engine: str, formats: Pair) -> None:
    """Codes stand for more than the largest float16, too: outputs overflow where those of the reference do."""
    for case in cases_of(engine, formats, 2):
        case = dataclasses.replace(case, dtype=torch.float16)
        query, key, value = drawn(case)
        most = 70000 if formats[1].symmetric and formats[1].is_quantized else 65504
        value[..., 5], value[..., 6] = most, -most
        planes = filled(case, 0, key), filled(case, 1, value)
        out, lse = attended(engine, case, query.half(), planes)
        dense = [
            reference.dequantize(made, kv_format, lengths=case.lengths_tensor())
            for made, kv_format in zip(planes, case.formats, strict=True)
        ]
        exact, _ = reference.decode_attention(
            query.half().float(), *dense, case.lengths_tensor(), softmax_scale=case.head_dim**-0.5
        )
        # Around the number from which on float16 is infinite, the rounding of weights decides.
        is_clear = (exact.abs() - 65520).abs() > torch.finfo(torch.float16).eps * 65520
        assert (exact.half().isinf() == out.isinf())[is_clear].all(), f"{case}: overflows"
        assert lse.isfinite().all() and not out.isnan().any(), f"{case}"


# --- append -----------------------------------------------------------------------------------------------------------


def edges(case: Case, kv_format: KVFormat) -> Tensor:
    """Rows of tokens, each of a few numbers out of those at which something ends."""
    info = torch.finfo(case.dtype)
    numbers = [0.0, -0.0, 1.0, info.max, info.min, info.tiny, info.tiny / 4, 2.0**-24, 2.0**-25, 1.5 * 2.0**-25]
    numbers += [65504.0, 65519.0, 65520.0, 65536.0, -65504.0, -65520.0, 2.0**-14, 2.0**-126, 3.0, -7.0, 1e-3]
    if kv_format.is_quantized:
        largest = reference.max_code(kv_format) * 65520.0
        numbers += [largest, largest * (1 - 2.0**-24), largest * (1 - 2.0**-8), largest - 65504, largest * 2]
        numbers += [reference.max_code(kv_format) * 2.0**-24, reference.max_code(kv_format) * 1.5 * 2.0**-24]
    every = torch.tensor(numbers).to(case.dtype)
    shape = case.batch, case.num_kv_heads, case.q_len
    # Of at most three numbers a row, the largest of which is not always the largest there is.
    few = torch.randint(len(numbers), (*shape, 3))
    return every[few.take_along_dim(torch.randint(3, (*shape, case.head_dim)), 3)]


@formats
@dtypes
@pytest.mark.sanitize
def test_append(engine: str, formats: Pair, dtype: torch.dtype) -> None:
    for head_dim, num_tokens in ((64, 130), (128, 5), (96, 40)):
        shape = {"q_len": num_tokens, "lengths": (num_tokens, 128 + num_tokens, 200), "capacity": 384}
        case = Case(formats, head_dim, dtype, **shape)  # type: ignore[arg-type]
        run_append(engine, case, *(edges(case, kv_format) for kv_format in formats))


@formats
def test_append_of_what_attention_meets(engine: str, formats: Pair) -> None:
    for i, numbers in enumerate(NUMBERS):
        dtype = DTYPES[i % 3]
        case = Case(formats, 64, dtype, q_len=128, lengths=(128, 200), capacity=256)
        key, value = (x[:, :, :128].to(dtype).contiguous() for x in numbers(case)[1:])
        run_append(engine, case, key, value)
        if formats[0].is_quantized:
            run_append(engine, case, key, value, make_transform("center+smooth+rotate", 64))
