"""TurboQuant (Zandieh et al., 2025, arXiv:2504.19874): a random rotation, then the best codebook for what it makes.

The norm of each token and head is kept. The unit vector is rotated by one random orthogonal matrix, after which every
channel has the same known distribution, and each channel is rounded to the codebook with the least mean squared error
for it (algorithm 1, `turboquant-N`). For keys, algorithm 2 (`turboquant-prod-N`) spends one of the bits on the signs of
a random projection of the residual, and keeps the norm of the residual, which makes products with queries unbiased.

For caches, the paper also spends more bits on some channels, those with outliers. That is left out here.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import torch
from torch import Tensor

from .arithmetic import half, lloyd_max, nearest, random_rotation
from .interface import DENSE_BITS, Layer, Quantize, Recipe, Storage

ROTATION_SEED, PROJECTION_SEED = 0, 1
TINY = 1e-30  # for norms of zero vectors


@dataclasses.dataclass(frozen=True, kw_only=True)
class TurboQuant(Recipe):
    """A codebook after a random rotation, for keys perhaps with the signs of the residual."""

    code_bits: int
    has_signs: bool = False  # whether keys spend one of the bits on signs

    def quantizers(self, layer: Layer) -> tuple[Quantize, Quantize]:
        """The same for keys and values, unless keys have signs."""
        plain = functools.partial(for_squares, bits=self.code_bits)
        key = functools.partial(for_products, bits=self.code_bits) if self.has_signs else plain
        return lambda x, start: key(x), lambda x, start: plain(x)

    def shared_bytes(self, num_kv_heads: int, head_dim: int) -> float:
        """Rotation and projection, in float16; the codebook is the same for all layers."""
        return (2 if self.has_signs else 1) * head_dim**2 * DENSE_BITS / 8


def for_squares(x: Tensor, bits: int) -> Tensor:
    """Algorithm 1: small squared error."""
    norm = half(x.norm(dim=-1, keepdim=True))
    return norm * _unit(x / norm.clamp(min=TINY), bits)


def for_products(x: Tensor, bits: int) -> Tensor:
    """Algorithm 2: unbiased products with other vectors."""
    norm = half(x.norm(dim=-1, keepdim=True))
    unit = x / norm.clamp(min=TINY)
    coarse = _unit(unit, bits - 1)
    residual = unit - coarse
    size = half(residual.norm(dim=-1, keepdim=True))
    projection = random_projection(x.shape[-1]).to(x.device)
    signs = torch.where(residual @ projection.T >= 0, 1.0, -1.0)
    return norm * (coarse + math.sqrt(math.pi / 2) / x.shape[-1] * size * (signs @ projection))


def _unit(unit: Tensor, bits: int) -> Tensor:
    rotation = random_rotation(unit.shape[-1], ROTATION_SEED).to(unit.device)
    return nearest(unit @ rotation.T, codebook(unit.shape[-1], bits).to(unit.device)) @ rotation


@functools.lru_cache
def codebook(head_dim: int, bits: int) -> Tensor:
    """For one channel of a unit vector that is turned at random: `[2 ** bits]` float32, sorted."""
    # Beyond 12 standard deviations there is nothing, and a finer grid within is more exact.
    edge = min(1.0, 12 / math.sqrt(head_dim))
    return lloyd_max(functools.partial(channel_density, head_dim=head_dim), -edge, edge, bits)


def channel_density(x: Tensor, head_dim: int) -> Tensor:
    """Of a channel of a unit vector that is turned at random, up to a factor."""
    return (1 - x.square()).clamp(min=0) ** ((head_dim - 3) / 2)


@functools.lru_cache
def random_projection(size: int) -> Tensor:
    """Independent normal numbers, `[size, size]` float32."""
    return torch.randn(size, size, generator=torch.Generator().manual_seed(PROJECTION_SEED))


RECIPES: list[Recipe] = [
    TurboQuant(
        name=f"turboquant-{'prod-' if has_signs else ''}{bits}",
        family="TurboQuant",
        source="Zandieh et al., 2025, arXiv:2504.19874",
        key=Storage(code_bits=bits, token_bits=(2 if has_signs else 1) * DENSE_BITS),
        value=Storage(code_bits=bits, token_bits=DENSE_BITS),
        code_bits=bits,
        has_signs=has_signs,
    )
    for bits, has_signs in ((4, False), (3, False), (2, False), (4, True), (3, True))
]
