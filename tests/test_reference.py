"""The specification against something even simpler: scalar loops, hand-written codes and a float64 attention.

Everything else is compared with `reference.py`, so it is compared here with arithmetic that shares no line with it:
quantisation with one numpy number at a time, attention with one query at a time in float64.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from cases import clone, make_formats, name_of, poisoned, times
from compare import assert_close, assert_same, assert_same_planes
from hypothesis import given
from hypothesis import strategies as st
from tolerances import attention_bound, lse_bound, quantization_bound
from torch import Tensor

from hf_kvquant.spec import reference
from hf_kvquant.spec.formats import KVFormat
from hf_kvquant.spec.planes import Planes

QUANTIZED = [kv_format for kv_format in make_formats() if kv_format.is_quantized]
GROUP = 32


# --- quantisation, one number at a time -------------------------------------------------------------------------------


def e4m3_values() -> list[float]:
    """What the codes 0 to 126 stand for: 4 bits of exponent with bias 7, 3 of mantissa. 127 is NaN."""
    values = []
    for code in range(127):
        exponent, mantissa = code >> 3, code & 7
        values.append(mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10))
    return values


E4M3 = e4m3_values()


def e4m3_code(x: float) -> int:
    """The nearest code; of two equally near ones the even one."""
    distances = [abs(abs(x) - value) for value in E4M3]
    least = min(distances)
    nearest = [code for code, distance in enumerate(distances) if distance == least]
    return min(nearest, key=lambda code: code & 1) | (0x80 if math.copysign(1.0, x) < 0 else 0)


def scalar_quantize(values: list[np.float32], kv_format: KVFormat) -> tuple[list[int], np.float16, np.float16]:
    """Codes, scale and zero of the values that share one scale, which are finite and not too large for float16."""
    limit = 448 if kv_format.storage == "fp8" else 2**kv_format.bits // (2 if kv_format.symmetric else 1) - 1
    span = np.float32(max(abs(v) for v in values) if kv_format.symmetric else max(values) - min(values))
    clipped = span * np.float32(kv_format.clip_ratio)
    zero = np.float16(0.0 if kv_format.symmetric else min(values) + (span - clipped) / np.float32(2))
    scale = max(np.float16(clipped / np.float32(limit)), np.float16(2.0**-24))
    codes = []
    for value in values:
        ratio = np.float32(np.float32(value - np.float32(zero)) / np.float32(scale))
        if kv_format.storage == "fp8":
            codes.append(e4m3_code(float(min(max(ratio, np.float32(-limit)), np.float32(limit)))))
        elif kv_format.symmetric:
            codes.append(int(min(max(np.rint(ratio), -limit), limit)) + limit + 1)
        else:
            codes.append(int(min(max(np.rint(ratio), 0), limit)))
    return codes, scale, zero


def scalar_decode(code: int, scale: np.float16, zero: np.float16, kv_format: KVFormat) -> np.float32:
    offset = 2**kv_format.bits // 2 if kv_format.symmetric else 0
    number = (-1 if code & 0x80 else 1) * E4M3[code & 0x7F] if kv_format.storage == "fp8" else code - offset
    return np.float32(np.float32(number) * np.float32(scale)) + np.float32(zero)


def unpacked(planes: Planes, kv_format: KVFormat) -> Tensor:
    """One code per element, `[batch, heads, tokens, head_dim]`. Eight are one number whose lowest byte comes first."""
    bits = kv_format.bits
    eight = sum(byte.long() << 8 * i for i, byte in enumerate(planes.codes.unflatten(-1, (-1, bits)).unbind(-1)))
    assert isinstance(eight, Tensor)
    codes = torch.stack([eight >> bits * i & 2**bits - 1 for i in range(8)], dim=-1)
    return codes.flatten(-2).to(torch.uint8)


def sharers(kv_format: KVFormat, x: Tensor) -> list[tuple[tuple[int, int, int, int], list[tuple[int, int, int, int]]]]:
    """For every scale its index in the plane, and the indices of the elements of `x` that it serves."""
    served: dict[tuple[int, int, int, int], list[tuple[int, int, int, int]]] = {}
    for b, h, t, d in np.ndindex(*x.shape):
        index = {
            "tensor": (b, 0, 0, 0),
            "token": (b, 0, 0, t),
            "head": (b, h, 0, t),
            "group": (b, h, d // GROUP, t),
        }[kv_format.granularity]
        served.setdefault(index, []).append((b, h, t, d))
    return list(served.items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=name_of)
@pytest.mark.parametrize("kv_format", QUANTIZED, ids=name_of)
def test_quantize_matches_scalar_loops(kv_format: KVFormat, dtype: torch.dtype) -> None:
    x = (torch.randn(2, 2, 2, 64) * torch.tensor([1e-3, 40.0]).view(1, 1, 2, 1) + 0.7).to(dtype)
    planes = reference.quantize(x, kv_format)
    # Numbers of NumPy, since looking up one of a tensor takes many times as long.
    decoded = reference.dequantize(planes, kv_format).numpy()
    codes, values = unpacked(planes, kv_format).numpy(), x.float().numpy()
    assert planes.scale is not None
    for index, elements in sharers(kv_format, x):
        expected, scale, zero = scalar_quantize([values[e] for e in elements], kv_format)
        assert planes.scale[index].item() == scale
        assert planes.zero is None or planes.zero[index].item() == zero
        for element, code in zip(elements, expected, strict=True):
            assert codes[element] == code
            assert decoded[element] == scalar_decode(code, scale, zero, kv_format)


def test_int4_puts_even_channels_in_the_low_nibble() -> None:
    x = torch.tensor([7.0, -7.0, 0.0, 1.0, -1.0, 3.0, 2.4, 2.6]).view(1, 1, 1, 8)
    planes = reference.quantize(x, KVFormat("int4"))
    assert planes.scale is not None and planes.scale.item() == 1.0
    # stored codes: 15, 1, 8, 9, 7, 11, 10, 11
    assert planes.codes.flatten().tolist() == [0x1F, 0x98, 0xB7, 0xBA]
    assert reference.dequantize(planes, KVFormat("int4")).flatten().tolist() == [7, -7, 0, 1, -1, 3, 2, 3]


def test_int4_asymmetric_by_hand() -> None:
    x = torch.tensor([-2.0, 13.0, 0.0, 1.0, 12.6, 3.0, 2.4, 2.6]).view(1, 1, 1, 8)
    planes = reference.quantize(x, KVFormat("int4", symmetric=False))
    assert planes.scale is not None and planes.scale.item() == 1.0
    assert planes.zero is not None and planes.zero.item() == -2.0
    assert planes.codes.flatten().tolist() == [0xF0, 0x32, 0x5F, 0x54]


def test_clipping_by_hand() -> None:
    x = torch.tensor([-8.0, 8.0, 0.4, 0.6, 7.4, -7.6, 6.9, 3.0]).view(1, 1, 1, 8)
    # 16 codes in the middles of 16 parts of 1: -7.5, -6.5, ..., 7.5
    planes = reference.quantize(x, KVFormat("int4", symmetric=False, clip_ratio=15 / 16))
    assert planes.scale is not None and planes.scale.item() == 1.0
    assert planes.zero is not None and planes.zero.item() == -7.5
    assert unpacked(planes, KVFormat("int4")).flatten().tolist() == [0, 15, 8, 8, 15, 0, 14, 10]
    # symmetric: -7 to 7 stand for themselves, 8 for 7
    planes = reference.quantize(x, KVFormat("int4", clip_ratio=0.875))
    assert planes.scale is not None and planes.scale.item() == 1.0
    assert unpacked(planes, KVFormat("int4")).flatten().tolist() == [1, 15, 8, 9, 15, 1, 15, 11]


@pytest.mark.parametrize("offset", [0.0, 30.0])
def test_codes_in_the_middles_are_nowhere_off_by_more_than_half(offset: float) -> None:
    x = torch.rand(2, 2, 50, 128) + offset
    kv_format = KVFormat("int4", symmetric=False, clip_ratio=15 / 16)
    unclipped = quantization_bound(x, reference.quantize(x, kv_format), KVFormat("int4", symmetric=False))
    decoded = reference.dequantize(reference.quantize(x, kv_format), kv_format)
    # The scale itself is rounded to float16, by 2^-11 of itself, 15 times over at the far end.
    assert ((decoded.double() - x.double()).abs() <= unclipped * (1 + 15 / 2**10)).all()


@pytest.mark.parametrize(
    ("kv_format", "offset", "limit"),
    [
        (KVFormat("int8"), 128, 127),
        (KVFormat("int4"), 8, 7),
        (KVFormat("int8", symmetric=False), 0, 255),
        (KVFormat("int4", symmetric=False), 0, 15),
        (KVFormat("fp8"), 0, 448),
    ],
    ids=name_of,
)
def test_offsets_and_limits(kv_format: KVFormat, offset: int, limit: int) -> None:
    assert reference.code_offset(kv_format) == offset
    assert reference.max_code(kv_format) == limit


@pytest.mark.parametrize(("storage", "offset"), [("int8", 128), ("int4", 8)])
def test_symmetric_codes_are_balanced(storage: str, offset: int) -> None:
    # -128 and -8 have no positive counterpart and are not used, so negating x mirrors the codes.
    kv_format = KVFormat(storage)  # type: ignore[arg-type]
    x = torch.randn(2, 2, 50, 64)
    plus, minus = (unpacked(reference.quantize(y, kv_format), kv_format).int() - offset for y in (x, -x))
    assert_same(plus, -minus, storage)
    assert plus.min() == -(offset - 1) and plus.max() == offset - 1


def test_ties_round_to_even() -> None:
    x = torch.tensor([127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 125.5]).view(1, 1, 1, 8)
    codes = reference.quantize(x, KVFormat("int8")).codes.int() - 128
    assert codes.flatten().tolist() == [127, 0, 2, 2, 0, -2, -2, 126]


def test_codes_come_from_the_scale_as_stored() -> None:
    # With the float32 scale before rounding to float16, some of these codes would be others.
    x = torch.randn(1, 1, 200, 64)
    planes = reference.quantize(x, KVFormat("int8"))
    assert planes.scale is not None
    stored = planes.scale.float().mT
    exact = x.abs().amax(-1, keepdim=True) / 127
    assert_same(planes.codes.float() - 128, (x / stored).round().clamp(-127, 127), "stored scale")
    assert ((x / stored).round() != (x / exact).round()).any()


# --- how far off a decoded value may be -------------------------------------------------------------------------------


def assert_within_bound(x: Tensor, kv_format: KVFormat, what: str) -> None:
    planes = reference.quantize(x, kv_format)
    decoded = reference.dequantize(planes, kv_format)
    assert decoded.isfinite().all(), what
    excess = (decoded.double() - x.double()).abs() / quantization_bound(x, planes, kv_format)
    assert excess.max() <= 1, f"{what}: error {excess.max().item():.4f} times the bound"


@times(100)
@given(
    kv_format=st.sampled_from(QUANTIZED),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    exponent=st.integers(-26, 12),
    offset=st.sampled_from([0.0, 0.0, 1.0, -37.5, 3000.0]),
    seed=st.integers(0, 2**31),
)
def test_error_bound(kv_format: KVFormat, dtype: torch.dtype, exponent: int, offset: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(2, 2, 3, 64, generator=generator) * 2.0**exponent + offset
    assert_within_bound(x.to(dtype), kv_format, kv_format.describe())


@pytest.mark.parametrize("kv_format", QUANTIZED, ids=name_of)
def test_error_bound_of_awkward_data(kv_format: KVFormat) -> None:
    noise = torch.randn(2, 2, 3, 64)
    outlier = noise.clone()
    outlier[..., 5] = 1000.0
    awkward = {
        "zero": torch.zeros_like(noise),
        "constant": torch.full_like(noise, 0.3),
        "negative constant": torch.full_like(noise, -2.5),
        "small noise on a large offset": 100 + noise * 1e-3,
        "one outlier": outlier,
        "denormal float32": noise * 1e-40,
        "denormal float16": (noise * 1e-7).half(),
        "around the smallest scale": noise * 2.0**-24,
        "large": noise * 10000,
        "largest float16": torch.full_like(noise, 65504.0).half() * noise.sign().half(),
    }
    for what, x in awkward.items():
        assert_within_bound(x, kv_format, f"{kv_format.describe()}, {what}")


@pytest.mark.parametrize("kv_format", QUANTIZED, ids=name_of)
def test_zeros_are_exact(kv_format: KVFormat) -> None:
    x = torch.zeros(1, 2, 3, 64)
    planes = reference.quantize(x, kv_format)
    assert planes.scale is not None and (planes.scale == 2.0**-24).all()
    assert (unpacked(planes, kv_format) == reference.code_offset(kv_format)).all()
    assert_same(reference.dequantize(planes, kv_format), x, kv_format.describe())


@pytest.mark.parametrize("storage", ["int8", "int4"])
def test_constants_of_float16_are_exact_when_asymmetric(storage: str) -> None:
    kv_format = KVFormat(storage, symmetric=False)  # type: ignore[arg-type]
    x = torch.tensor([0.1, -3.7, 60000.0, 2.0**-24]).half().view(1, 1, 4, 1).expand(1, 1, 4, 64)
    planes = reference.quantize(x, kv_format)
    assert planes.scale is not None and (planes.scale == 2.0**-24).all()
    assert (planes.codes == 0).all()
    assert_same(reference.dequantize(planes, kv_format, torch.float16), x, storage)


def test_dequantize_rounds_to_the_dtype_asked_for() -> None:
    kv_format = KVFormat("int8")
    planes = reference.quantize(torch.randn(1, 2, 3, 64), kv_format)
    exact = reference.dequantize(planes, kv_format)
    for dtype in (torch.bfloat16, torch.float16):
        assert_same(reference.dequantize(planes, kv_format, dtype), exact.to(dtype), name_of(dtype))


def test_dequantize_of_none_is_the_values() -> None:
    x = torch.randn(1, 2, 3, 64).bfloat16()
    planes = Planes(x, None, None)
    assert reference.dequantize(planes, KVFormat("none"), torch.bfloat16) is x


# --- what is not finite -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf], ids=str)
@pytest.mark.parametrize("kv_format", QUANTIZED, ids=name_of)
def test_bad_values_spoil_what_shares_their_scale_and_nothing_else(kv_format: KVFormat, bad: float) -> None:
    clean = torch.randn(2, 2, 3, 64)
    x = clean.clone()
    x[1, 0, 2, 40] = bad
    spoiled = torch.zeros_like(x, dtype=torch.bool)
    spoiled[
        {
            "tensor": (1,),
            "token": (1, slice(None), 2),
            "head": (1, 0, 2),
            "group": (1, 0, 2, slice(GROUP, 2 * GROUP)),
        }[kv_format.granularity]
    ] = True
    planes, untouched = reference.quantize(x, kv_format), reference.quantize(clean, kv_format)
    expected = reference.dequantize(untouched, kv_format).masked_fill(spoiled, torch.nan)
    assert_same(reference.dequantize(planes, kv_format), expected, kv_format.describe())
    codes = unpacked(untouched, kv_format).masked_fill(spoiled, 0)
    assert_same(unpacked(planes, kv_format), codes, kv_format.describe())


@pytest.mark.parametrize(
    ("kv_format", "largest"),
    [
        (KVFormat("int8"), 65504.0 * 127),
        (KVFormat("int4"), 65504.0 * 7),
        (KVFormat("fp8"), 65504.0 * 448),
        # A span of 255 or 15 scales; the zero stays at 0.
        (KVFormat("int8", symmetric=False), 65504.0 * 255),
        (KVFormat("int4", symmetric=False), 65504.0 * 15),
    ],
    ids=name_of,
)
def test_scales_beyond_float16_become_nan(kv_format: KVFormat, largest: float) -> None:
    x = torch.zeros(1, 1, 2, 64)
    x[0, 0, 0, 3], x[0, 0, 1, 3] = largest, largest * 1.001
    planes = reference.quantize(x, kv_format)
    assert planes.scale is not None
    assert planes.scale.flatten().isnan().tolist() == [False, True]
    assert planes.zero is None or planes.zero.flatten().isnan().tolist() == [False, True]
    assert (planes.codes[0, 0, 1] == 0).all()
    decoded = reference.dequantize(planes, kv_format)
    assert decoded[0, 0, 1].isnan().all()
    assert decoded[0, 0, 0, 3] == largest


@pytest.mark.parametrize("offset", [70000.0, -70000.0])
def test_zeros_beyond_float16_become_nan(offset: float) -> None:
    kv_format = KVFormat("int8", symmetric=False)
    planes = reference.quantize(torch.randn(1, 1, 2, 64) + offset, kv_format)
    assert planes.scale is not None and planes.scale.isnan().all()
    assert planes.zero is not None and planes.zero.isnan().all()


def test_spans_beyond_float32_become_nan() -> None:
    x = torch.zeros(1, 1, 1, 64)
    x[..., 0], x[..., 1] = 3e38, -3e38
    for kv_format in QUANTIZED:
        assert reference.dequantize(reference.quantize(x, kv_format), kv_format).isnan().any(), kv_format.describe()


# --- append -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kv_format", make_formats(), ids=name_of)
def test_append_writes_the_new_tokens_and_nothing_else(kv_format: KVFormat) -> None:
    x = torch.randn(3, 2, 4, 64)
    planes = poisoned(kv_format, 3, 2, 64, 64, torch.float32)
    if kv_format.granularity == "tensor":
        planes = Planes(planes.codes, *reference.compute_scale(torch.randn(3, 2, 9, 64), kv_format))
        written = reference.quantize(x, kv_format, planes.scale, planes.zero)
    else:
        written = reference.quantize(x, kv_format) if kv_format.is_quantized else Planes(x, None, None)
    expected = clone(planes)
    lengths = torch.tensor([4, 17, 64], dtype=torch.int32)
    for b, end in enumerate(lengths.tolist()):
        expected.codes[b, :, end - 4 : end] = written.codes[b]
        if kv_format.granularity != "tensor":
            for plane, new in ((expected.scale, written.scale), (expected.zero, written.zero)):
                if plane is not None and new is not None:
                    plane[b, :, :, end - 4 : end] = new[b]
    reference.append(x, planes, kv_format, lengths)
    assert_same_planes(planes, expected, kv_format.describe())


@pytest.mark.parametrize("bad", [torch.nan, torch.inf], ids=str)
@pytest.mark.parametrize("storage", ["int8", "int4", "fp8"])
def test_bad_values_spoil_a_frozen_scale(storage: str, bad: float) -> None:
    kv_format = KVFormat(storage, "tensor")  # type: ignore[arg-type]
    planes = kv_format.allocate(2, 2, 64, 64, dtype=torch.float32, device=torch.device("cpu"))
    first, second = torch.randn(2, 2, 5, 64), torch.randn(2, 2, 1, 64)
    assert planes.scale is not None
    planes.scale.copy_(reference.compute_scale(first, kv_format)[0])
    reference.append(first, planes, kv_format, torch.tensor([5, 5], dtype=torch.int32))
    scale = planes.scale.clone()
    second[1, 0, 0, 0] = bad
    reference.append(second, planes, kv_format, torch.tensor([6, 6], dtype=torch.int32))
    assert planes.scale[0] == scale[0]
    assert planes.scale[1].isnan().all()
    decoded = reference.dequantize(planes, kv_format)
    assert decoded[0].isfinite().all() and decoded[1].isnan().all()


# --- attention --------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Attention:
    """One call of `decode_attention`, on random numbers."""

    query: Tensor
    key: Tensor
    value: Tensor
    lengths: Tensor
    softmax_scale: float = 0.3
    starts: Tensor | None = None
    sinks: Tensor | None = None
    alibi_slopes: Tensor | None = None
    softcap: float = 0.0
    sliding_window: int = 0

    def run(self) -> tuple[Tensor, Tensor]:
        return reference.decode_attention(
            **{field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        )

    def visible(self, b: int, i: int) -> list[int]:
        """Positions that query i of sequence b attends to."""
        position = int(self.lengths[b]) - self.query.shape[2] + i
        first = 0 if self.starts is None else int(self.starts[b])
        if self.sliding_window:
            first = max(first, position - self.sliding_window + 1)
        return list(range(first, position + 1))

    def expected(self) -> tuple[Tensor, Tensor]:
        """The same in float64, one query at a time."""
        batch, num_q_heads, q_len, _ = self.query.shape
        out = np.zeros((batch, q_len, num_q_heads, self.value.shape[-1]))
        lse = np.full((batch, num_q_heads, q_len), -np.inf)
        for b, h, i in np.ndindex(batch, num_q_heads, q_len):
            g = h // (num_q_heads // self.key.shape[1])
            logits, values = [], []
            for j in self.visible(b, i):
                logit = self.softmax_scale * float(self.query[b, h, i].double() @ self.key[b, g, j].double())
                if self.softcap:
                    logit = self.softcap * math.tanh(logit / self.softcap)
                if self.alibi_slopes is not None:
                    logit += float(self.alibi_slopes[h]) * (j - (int(self.lengths[b]) - q_len + i))
                logits.append(logit)
                values.append(self.value[b, g, j].double().numpy())
            if self.sinks is not None:
                logits.append(float(self.sinks[h]))
            if logits:
                top = max(logits)
                total = sum(math.exp(logit - top) for logit in logits)
                lse[b, h, i] = top + math.log(total)
                for logit, v in zip(logits, values, strict=False):  # the sink has no value
                    out[b, i, h] += math.exp(logit - top) / total * v
        return torch.from_numpy(out).float(), torch.from_numpy(lse).float()

    def check(self, what: str = "attention") -> tuple[Tensor, Tensor]:
        out, lse = self.run()
        expected, expected_lse = self.expected()
        # What the float32 sums of a logit may be off by grows with the sum of magnitudes, whatever it sums to.
        magnitudes = self.softmax_scale * self.query.abs().sum(-1).max() * self.key.nan_to_num().abs().max()
        distance = self.key.shape[2] * (0 if self.alibi_slopes is None else float(self.alibi_slopes.abs().max()))
        max_logit = float(magnitudes) + distance
        max_value = float(self.value.nan_to_num().abs().max())
        bound = attention_bound(expected, expected, torch.float32, max_logit, max_value)
        assert_close(out, expected, bound, f"{what}, out")
        assert_close(lse, expected_lse, lse_bound(expected_lse, expected_lse, max_logit), f"{what}, lse")
        return out, lse


def attention(
    batch: int, num_kv_heads: int, num_q_per_kv: int, q_len: int, lengths: list[int], seed: int = 0, **options: object
) -> Attention:
    """Random numbers for one call; what lies past the length is NaN and must not be seen."""
    generator = torch.Generator().manual_seed(seed)
    capacity = max(8, *lengths) + 3
    key = torch.randn(batch, num_kv_heads, capacity, 16, generator=generator)
    value = torch.randn(batch, num_kv_heads, capacity, 8, generator=generator)
    for b, length in enumerate(lengths):
        key[b, :, length:] = value[b, :, length:] = torch.nan
    query = torch.randn(batch, num_kv_heads * num_q_per_kv, q_len, 16, generator=generator)
    return Attention(query, key, value, torch.tensor(lengths, dtype=torch.int32), **options)  # type: ignore[arg-type]


@times(80)
@given(data=st.data())
def test_attention_matches_float64_loops(data: st.DataObject) -> None:
    batch = data.draw(st.integers(1, 3), "batch")
    num_kv_heads, num_q_per_kv = data.draw(st.sampled_from([(1, 1), (2, 1), (1, 4), (2, 3)]), "heads")
    q_len = data.draw(st.integers(1, 4), "q_len")
    lengths = data.draw(st.lists(st.integers(0, 20), min_size=batch, max_size=batch), "lengths")
    starts = data.draw(st.none() | st.lists(st.integers(0, 22), min_size=batch, max_size=batch), "starts")
    slopes = data.draw(st.none() | st.just(torch.linspace(0.1, 0.9, num_kv_heads * num_q_per_kv)), "alibi")
    sinks = data.draw(st.none() | st.just(torch.linspace(-3.0, 2.0, num_kv_heads * num_q_per_kv)), "sinks")
    attention(
        batch,
        num_kv_heads,
        num_q_per_kv,
        q_len,
        lengths,
        seed=data.draw(st.integers(0, 2**31), "seed"),
        starts=None if starts is None else torch.tensor(starts, dtype=torch.int32),
        alibi_slopes=slopes,
        sinks=sinks,
        softcap=data.draw(st.sampled_from([0.0, 0.5, 5.0]), "softcap"),
        sliding_window=data.draw(st.sampled_from([0, 0, 1, 3, 100]), "window"),
    ).check()


def test_attention_matches_torch() -> None:
    query, key, value = torch.randn(2, 4, 5, 16), torch.randn(2, 2, 30, 16), torch.randn(2, 2, 30, 16)
    call = Attention(query, key, value, torch.tensor([30, 30], dtype=torch.int32), softmax_scale=16**-0.5)
    out, _ = call.check("reference")
    mask = torch.arange(30) <= torch.arange(25, 30).view(-1, 1)
    theirs = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)
    bound = attention_bound(out, call.expected()[0], torch.float32, float(query.abs().max() * 16), 4.0)
    assert_close(theirs.transpose(1, 2), out, bound, "torch")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=name_of)
def test_attention_is_float32_inside(dtype: torch.dtype) -> None:
    call = attention(2, 2, 2, 2, [9, 20])
    call = dataclasses.replace(call, query=call.query.to(dtype))
    exact = dataclasses.replace(call, query=call.query.float()).run()
    out, lse = call.run()
    assert_same(out, exact[0].to(dtype), "out")
    assert_same(lse, exact[1], "lse")


def test_rows_that_see_nothing_are_zero() -> None:
    out, lse = attention(3, 1, 2, 3, [0, 2, 9], starts=torch.tensor([0, 0, 9], dtype=torch.int32)).check()
    sees_nothing = torch.tensor([[True, True, True], [True, False, False], [True, True, True]])
    assert (out[sees_nothing] == 0).all()
    assert (lse.mT[sees_nothing] == -torch.inf).all()
    assert (out[~sees_nothing] != 0).all() and lse.mT[~sees_nothing].isfinite().all()


def test_rows_that_see_nothing_but_a_sink_are_zero() -> None:
    sinks = torch.tensor([1.5, -2.0])
    out, lse = attention(1, 1, 2, 1, [0], sinks=sinks).check()
    assert (out == 0).all()
    assert_same(lse.flatten(), sinks, "lse")


@pytest.mark.parametrize("side", ["key", "value"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf], ids=str)
def test_bad_tokens_spoil_the_rows_that_see_them(side: str, bad: float) -> None:
    # Token 4 of head 1 of sequence 0; queries sit at 3, 4, 5 and 6, and the window is 2.
    call = attention(2, 2, 2, 4, [7, 7], sliding_window=2)
    clean = call.check()
    getattr(call, side)[0, 1, 4] = bad
    out, lse = call.run()
    spoiled = torch.zeros(2, 4, 4, dtype=torch.bool)  # [batch, q_len, heads]
    spoiled[0, 1:3, 2:] = True
    assert_same(out[~spoiled], clean[0][~spoiled], "rows that do not see it")
    assert out[spoiled].isnan().all()
    if side == "value":
        assert_same(lse, clean[1], "lse")
    else:
        assert_same(lse.mT[~spoiled], clean[1].mT[~spoiled], "lse of rows that do not see it")
        assert (~lse.mT[spoiled].isfinite()).all()


def test_bad_values_spoil_their_channels() -> None:
    call = attention(1, 1, 1, 1, [7])
    clean, _ = call.run()
    call.value[0, 0, 2, 3] = torch.nan
    out, _ = call.run()
    assert out[..., 3].isnan().all()
    clean[..., 3] = torch.nan
    assert_same(out, clean, "other channels")


def test_bad_tokens_in_padding_are_not_seen() -> None:
    call = attention(2, 1, 2, 2, [7, 9], starts=torch.tensor([3, 4], dtype=torch.int32))
    clean = call.run()
    call.key[:, :, :3] = call.value[:, :, :3] = torch.nan
    for ours, expected in zip(call.check(), clean, strict=True):
        assert_same(ours, expected, "left padding")


def test_weights_of_large_logits_do_not_overflow() -> None:
    call = attention(1, 1, 1, 1, [12], softmax_scale=100.0)
    out, lse = call.check()
    assert out.isfinite().all() and lse.isfinite().all()
