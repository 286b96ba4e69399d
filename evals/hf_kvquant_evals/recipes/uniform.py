"""Evenly spaced codes with a scale and a zero for each token and head: naive, and after a rotation (QuaRot, SAW-INT4).

`naive-N` is the baseline of every paper: round to nearest between the minimum and the maximum.

QuaRot (Ashkboos et al., 2024, arXiv:2404.00456; its code: spcl/QuaRot, `fake_quant`) rotates the channels of every head
of keys, after RoPE, and of values by a Hadamard matrix. The range includes 0, is clipped to 95 %, and the zero is an
integer code. The paper's group size of 128 is the head.

SAW-INT4 (Jia et al., 2026, arXiv:2604.19157; its code: togethercomputer/saw-int4) rotates keys only, in blocks whose
order divides head_dim. The largest order is used here, with which the paper reports the best accuracy.
"""

from __future__ import annotations

import dataclasses
import functools

import torch
from torch import Tensor

from .arithmetic import half, min_max, rotated
from .interface import DENSE_BITS, Layer, Quantize, Recipe, Storage

CLIP = 0.95  # of QuaRot


def per_token(bits: int) -> Storage:
    """Codes with a scale and a zero for each token and head."""
    return Storage(code_bits=bits, token_bits=2 * DENSE_BITS)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Naive(Recipe):
    """Round to nearest."""

    code_bits: int

    def quantizers(self, layer: Layer) -> tuple[Quantize, Quantize]:
        """The same for keys and values."""
        return (lambda x, start: min_max(x, self.code_bits),) * 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuaRot(Recipe):
    """Rotate keys and values, clip, round to nearest."""

    code_bits: int

    def quantizers(self, layer: Layer) -> tuple[Quantize, Quantize]:
        """The same for keys and values."""
        return (lambda x, start: rotated(x, functools.partial(integer_zero, bits=self.code_bits)),) * 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Saw(Recipe):
    """Rotate keys, round to nearest."""

    code_bits: int

    def quantizers(self, layer: Layer) -> tuple[Quantize, Quantize]:
        """Rotated for keys, plain for values."""
        plain = functools.partial(min_max, bits=self.code_bits)
        return lambda x, start: rotated(x, plain), lambda x, start: plain(x)


def integer_zero(x: Tensor, bits: int, clip: float = CLIP) -> Tensor:
    """Round to codes whose zero is an integer, over a clipped range that includes 0."""
    levels = 2**bits - 1
    low, high = x.amin(-1, keepdim=True).clamp(max=0) * clip, x.amax(-1, keepdim=True).clamp(min=0) * clip
    scale = half((high - low) / levels)
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    zero = (-low / scale).round()
    return (((x / scale).round() + zero).clamp(0, levels) - zero) * scale


BITS = (4, 3, 2)
BASELINE = "the baseline of every paper"
QUAROT, SAW = "Ashkboos et al., 2024, arXiv:2404.00456", "Jia et al., 2026, arXiv:2604.19157"
RECIPES: list[Recipe] = [
    *(
        Naive(
            name=f"naive-{bits}",
            family="naive",
            source=BASELINE,
            key=per_token(bits),
            value=per_token(bits),
            code_bits=bits,
        )
        for bits in BITS
    ),
    *(
        QuaRot(
            name=f"quarot-{bits}",
            family="QuaRot",
            source=QUAROT,
            key=per_token(bits),
            value=per_token(bits),
            code_bits=bits,
        )
        for bits in BITS
    ),
    Saw(name="saw-4", family="SAW", source=SAW, key=per_token(4), value=per_token(4), code_bits=4),
]
