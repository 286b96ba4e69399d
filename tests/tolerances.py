"""Every tolerance of the tests, each with its reason. Codes, scales and plain copies have none: they agree bitwise."""

from __future__ import annotations

import torch
from torch import Tensor

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


def lse_bound(expected: Tensor, torch_lse: Tensor, max_logit: float) -> float:
    """The largest error that `lse` may have: it is float32 whatever the working dtype, but the query is not."""
    sums = torch.finfo(torch.float32).eps * (NUM_ROUNDINGS + max_logit + _largest(expected))
    return TORCH_FACTOR * _largest(torch_lse - expected) + sums


def _largest(x: Tensor) -> float:
    finite = x[x.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0
