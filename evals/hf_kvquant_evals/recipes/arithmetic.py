"""The arithmetic that recipes share: rounding of scales, uniform codes, codebooks and rotations.

Bits are counted in `interface.py`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch
from torch import Tensor

from hf_kvquant.spec.reference import MIN_SCALE, rotate

ITERATIONS = 200  # of Lloyd's algorithm, which stops by itself before
MOST_VALUES = 2**18  # from which a codebook is made; of more, evenly spaced ones are taken


def half(x: Tensor) -> Tensor:
    """Numbers as float16 keeps them, in float32."""
    return x.half().float()


def uniform(x: Tensor, low: Tensor, high: Tensor, bits: int) -> Tensor:
    """Round to `2 ** bits` evenly spaced numbers from `low` to `high`, where scale and zero are float16."""
    levels = 2**bits - 1
    scale, zero = half((high - low) / levels).clamp(min=MIN_SCALE), half(low)
    return ((x - zero) / scale).round().clamp(0, levels) * scale + zero


def min_max(x: Tensor, bits: int, dim: int = -1) -> Tensor:
    """`uniform` over the range of the values along one dimension."""
    return uniform(x, x.amin(dim, keepdim=True), x.amax(dim, keepdim=True), bits)


def in_groups(x: Tensor, size: int, quantize: Callable[[Tensor], Tensor], dim: int = -1) -> Tensor:
    """Split one dimension into groups of `size`, quantise over the last dimension, and put them together again."""
    moved = x.movedim(dim, -1)
    coded: Tensor = quantize(moved.unflatten(-1, (-1, size)))
    return coded.flatten(-2).movedim(-1, dim)


def rotated(x: Tensor, quantize: Callable[[Tensor], Tensor]) -> Tensor:
    """Quantise after a Hadamard rotation of the channels of each head, and rotate back."""
    return rotate(quantize(rotate(x)))


def nearest(x: Tensor, codebook: Tensor) -> Tensor:
    """The nearest entries of a codebook, which is sorted."""
    return codebook[torch.bucketize(x.contiguous(), (codebook[1:] + codebook[:-1]) / 2)]


def is_power_of_two(number: int) -> bool:
    """Whether a positive number is a power of two."""
    return number & (number - 1) == 0


@functools.lru_cache
def random_rotation(size: int, seed: int) -> Tensor:
    """A uniformly random orthogonal matrix, the same for the same seed: `[size, size]` float32."""
    generator = torch.Generator().manual_seed(seed)
    q, r = torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64))
    rotation: Tensor = q * r.diagonal().sign()
    return rotation.float()


@functools.lru_cache
def lloyd_max(density: Callable[[Tensor], Tensor], low: float, high: float, bits: int) -> Tensor:
    """The codebook with the least mean squared error for a density on an interval: `[2 ** bits]` float32, sorted."""
    x = torch.linspace(low, high, 40_001, dtype=torch.float64)
    return weighted_means(x, density(x), bits)


def weighted_means(x: Tensor, weight: Tensor, bits: int) -> Tensor:
    """`2 ** bits` numbers near which most of the weight lies (Lloyd's algorithm in one dimension), sorted, float32.

    `x` and its non-negative weights are one-dimensional. It begins at evenly spaced quantiles.
    """
    step = -(-len(x) // MOST_VALUES)
    x, weight = x[::step], weight[::step]
    x, order = x.double().sort()
    weight = weight.double()[order]
    total, moment = (torch.cat([weight.new_zeros(1), each.cumsum(0)]) for each in (weight, weight * x))
    count = 2**bits
    places = torch.linspace(0, 1, 2 * count + 1, dtype=torch.float64)[1::2] * total[-1]
    centers = x[torch.searchsorted(total[1:], places).clamp(max=len(x) - 1)]
    for _ in range(ITERATIONS):
        edges = torch.searchsorted(x, (centers[1:] + centers[:-1]) / 2)
        edges = torch.cat([edges.new_zeros(1), edges, edges.new_full((1,), len(x))])
        mass = total[edges].diff()
        moved = torch.where(mass > 0, moment[edges].diff() / mass.clamp(min=math.ulp(0.0)), centers)
        if torch.equal(moved, centers):
            break
        centers = moved
    return centers.sort().values.float()
