"""Every tolerance of the tests, each with its reason. Codes, scales and plain copies have none: they agree bitwise."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_kvquant.spec import reference
from hf_kvquant.spec.formats import KVFormat
from hf_kvquant.spec.planes import Planes

# Our error may be at most this many times PyTorch's own error in the working dtype: both round the same inputs, but in
# a different order, so neither is systematically the smaller one.
TORCH_FACTOR = 2.0

# Roundings of float32 that no choice of order avoids: those of the logit, the exponential, the weight, its product with
# a value and the division at the end, two ulps each where a library function is involved.
NUM_ROUNDINGS = 8.0


def attention_bound(
    expected: Tensor, torch_out: Tensor, dtype: torch.dtype, max_logit: float, max_value: float
) -> float:
    """The largest error that attention output may have.

    Args:
        expected: The float32 reference.
        torch_out: Plain PyTorch in the working dtype.
        dtype: The working dtype, to which the output is rounded.
        max_logit: Largest finite logit: exp turns its absolute error into the relative error of a weight.
        max_value: Largest finite value.
    """
    own = _largest(torch_out.float() - expected)
    rounding = torch.finfo(dtype).eps * _largest(expected)
    sums = torch.finfo(torch.float32).eps * (NUM_ROUNDINGS + max_logit) * max_value
    return TORCH_FACTOR * own + rounding + sums


def precision_bounds(exact: Tensor, torch_out: Tensor, dtype: torch.dtype) -> tuple[float, float]:
    """The largest error and the largest root mean square of errors that attention in a low precision may have.

    Twice what the best kernel of PyTorch makes of the same numbers, and half an ulp of the output, which a result that
    PyTorch happens to represent exactly must be granted too.

    Args:
        exact: Attention in float64 over the dequantised codes.
        torch_out: `scaled_dot_product_attention` of the dequantised tensors, rounded to the working dtype.
        dtype: The working dtype.
    """
    own, half_ulp = torch_out.double() - exact, torch.finfo(dtype).eps / 2
    return (
        TORCH_FACTOR * _largest(own) + half_ulp * _largest(exact),
        TORCH_FACTOR * root_mean_square(own) + half_ulp * root_mean_square(exact),
    )


# Rounding a weight or an output to nearest errs either way, and over many channels it cancels; truncating does not, and
# is off by a quarter of eps on the average. The mean of a thousand channels' rounding errors is below eps / 64.
BIAS_IN_EPS = 1 / 16


def bias_bound(exact: Tensor, dtype: torch.dtype) -> float:
    """How far the mean over all channels may be off, at any length, where all values have the same sign."""
    return BIAS_IN_EPS * torch.finfo(dtype).eps * float(exact.double().abs().mean())


def weight_rounding_bound(exact: Tensor, dtype: torch.dtype, max_value: float) -> float:
    """The largest error of attention that rounds each weight once to the working dtype, and its output once."""
    return torch.finfo(dtype).eps / 2 * (max_value + _largest(exact))


def root_mean_square(x: Tensor) -> float:
    """In float64."""
    return float(x.double().square().mean().sqrt())


def lse_bound(expected: Tensor, torch_lse: Tensor, max_logit: float) -> float:
    """The largest error that `lse` may have: it is float32 whatever the working dtype, but the query is not."""
    sums = torch.finfo(torch.float32).eps * (NUM_ROUNDINGS + max_logit + _largest(expected))
    return TORCH_FACTOR * _largest(torch_lse - expected) + sums


def max_logit_terms(query: Tensor, key: Tensor, softmax_scale: float) -> float:
    """What to pass as `max_logit` where keys are far from zero: what a logit is summed from, whatever it sums to.

    Kernels take the zero out of the sum, `scale · (query · codes) + zero · sum(query)`: the first part is up to twice
    the largest key times every channel of the query, the second up to once, and they cancel.
    """
    return 3 * softmax_scale * _largest(query.abs().sum(-1)) * _largest(key)


# Rounding of a whole tiny model: a few dozen matrix products and norms, each a sum of up to 256 terms, one after the
# other. Measured: up to 90 ulps of the largest logit over all families and presets (granite, whose attention is sharp).
# What quantisation changes in the logits is never less than 18 times this bound; the tests demand 10 times.
MODEL_ROUNDINGS = 256.0


def model_bound(expected: Tensor, torch_logits: Tensor, dtype: torch.dtype) -> float:
    """The largest error that the logits of a tiny model may have.

    Args:
        expected: Of the model in float32, attending to dequantised keys and values.
        torch_logits: The same in the working dtype; `expected` itself where that is float32.
        dtype: The working dtype.
    """
    rounding = torch.finfo(dtype).eps if dtype != torch.float32 else 0.0
    sums = MODEL_ROUNDINGS * torch.finfo(torch.float32).eps
    return TORCH_FACTOR * _largest(torch_logits - expected) + (rounding + sums) * _largest(expected)


def projection_bound(expected: Tensor, dtype: torch.dtype) -> float:
    """The largest difference between keys (or values) of one layer in two runs of a tiny model, one in `dtype`.

    The layers below have summed in another order, and rounded to `dtype` some ten times, up to two ulps each.
    """
    roundings = MODEL_ROUNDINGS if dtype == torch.float32 else 32.0
    return roundings * torch.finfo(dtype).eps * _largest(expected)


def _largest(x: Tensor) -> float:
    finite = x[x.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0


def quantization_bound(x: Tensor, planes: Planes, kv_format: KVFormat) -> Tensor:
    """The largest error of every element of `dequantize(quantize(x))`, float64, shape of `x`.

    Integers: half a code, plus half a float16 ulp of the zero, which was rounded too. e4m3: half a step of a 3-bit
    mantissa, relative above and absolute below the smallest normal code. A clipped value also loses what lies beyond
    the share of the range that codes span. Both: a scale below 2^-14 is a float16
    subnormal, so it is off by up to 2^-25 and the largest code by `max_code` times that; and a few float32 roundings.
    """
    assert planes.scale is not None
    scale, exact = _spread(planes.scale, x), x.double()
    limit = reference.max_code(kv_format)
    bound = torch.maximum(exact.abs() / 16, scale / 1024) if kv_format.storage == "fp8" else scale / 2
    bound = bound + torch.where(scale < 2.0**-14, limit * 2.0**-25, 0.0)
    magnitude = exact.abs()
    if planes.zero is not None:
        zero = _spread(planes.zero, x)
        magnitude = magnitude + zero.abs()
        _, exponent = torch.frexp(zero)
        bound = bound + torch.clamp(torch.ldexp(torch.ones_like(zero), exponent - 11), min=2.0**-24) / 2
    if kv_format.clip_ratio < 1:
        high, low = (_spread(plane, x) for plane in reference._range(exact, kv_format))
        half, middle = (high - low) / 2, (high + low) / 2
        if kv_format.symmetric:
            half, middle = torch.maximum(high.abs(), low.abs()), torch.zeros_like(middle)
        bound = bound + ((exact - middle).abs() - kv_format.clip_ratio * half).clamp(min=0)
    return bound + 4 * torch.finfo(torch.float32).eps * magnitude


def _spread(plane: Tensor, x: Tensor) -> Tensor:
    """A plane `[batch, heads, groups, tokens]` over the elements that it serves, float64, shape of `x`."""
    batch, heads, tokens, head_dim = x.shape
    groups = plane.shape[2]
    plane = plane.double().expand(batch, heads, groups, tokens)
    return plane.repeat_interleave(head_dim // groups, dim=2).mT
