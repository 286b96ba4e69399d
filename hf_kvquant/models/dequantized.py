"""The weight of a linear layer that is quantised, as numbers, whichever library quantised it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

# The largest difference between what the layer makes of random inputs and what the weight makes of them, relative to
# the latter's norm. Layers that quantise their inputs, too, differ: 8-bit floats with 3 bits of mantissa by 0.027.
MAX_DIFFERENCE = 0.05
_SAMPLES = 8


def dequantized_weight(linear: nn.Module, in_features: int, like: Tensor) -> Tensor | None:
    """The matrix that a linear layer without a bias multiplies its input with.

    It is what the layer makes of a unit matrix. That is exact: a number of each row is 1, the others are 0, and
    libraries that quantise inputs scale each row by its largest number. Layers of transformers' `fp8` blocks scale each
    128 channels, which would divide zeros by zero, so their weights are multiplied by their scales.

    Args:
        linear: Any module that multiplies by a fixed matrix.
        in_features: Channels of its input.
        like: A tensor of the dtype and on the device of its input.

    Returns:
        `[out_features, in_features]` like `like`; `None` if the layer computes something else.
    """
    with torch.inference_mode(False), torch.no_grad():
        weight = _multiplied_blocks(linear, like.dtype)
        if weight is None:
            made = linear(torch.eye(in_features, dtype=like.dtype, device=like.device))
            weight = made.to(like.dtype).t().contiguous()
        sample = torch.randn(_SAMPLES, in_features, generator=torch.Generator().manual_seed(0)).to(like)
        expected, found = linear(sample).float(), (sample @ weight.t()).float()
        difference = torch.linalg.vector_norm(found - expected) / torch.linalg.vector_norm(found)
    # Not a number counts as different.
    return weight if float(difference) <= MAX_DIFFERENCE else None


def _multiplied_blocks(linear: nn.Module, dtype: torch.dtype) -> Tensor | None:
    """A weight of 8-bit floats times its `weight_scale_inv`, for all or for each block, if a layer has these."""
    weight, scale = getattr(linear, "weight", None), getattr(linear, "weight_scale_inv", None)
    if not isinstance(weight, Tensor) or not isinstance(scale, Tensor) or weight.dtype != torch.float8_e4m3fn:
        return None
    numbers, scales = weight.float(), scale.float()
    for dim, size in enumerate(getattr(linear, "block_size", None) or ()):
        scales = scales.repeat_interleave(size, dim).narrow(dim, 0, numbers.shape[dim])  # the last block may be cut off
    return (numbers * scales).to(dtype)
