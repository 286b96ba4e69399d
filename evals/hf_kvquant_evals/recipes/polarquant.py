"""PolarQuant (Han et al., 2025, arXiv:2502.02617): angles instead of channels, after a random rotation.

Each group of 16 channels becomes one radius and 15 angles: pairs of channels become a radius and an angle, pairs of
these radii again, over four levels. After the rotation the angles of each level have a known distribution. They get the
codebook with the least mean squared error for it, of 4 bits on the first level, where angles go round the whole circle,
and of 2 bits on the others. The radius is float16. This is the variant with a codebook made offline; the other one
fits the codebook to each prompt.

Another method of this name (Wu et al., 2025, NeurIPS) quantises RoPE pairs of keys in polar coordinates.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import torch
from torch import Tensor

from .arithmetic import half, lloyd_max, nearest, random_rotation
from .interface import DENSE_BITS, Layer, Quantize, Recipe, Storage

LEVEL_BITS = (4, 2, 2, 2)
GROUP = 2 ** len(LEVEL_BITS)
SEED = 0
STORAGE = Storage(
    code_bits=sum(bits * GROUP // 2**level for level, bits in enumerate(LEVEL_BITS, 1)) / GROUP,
    group_bits=DENSE_BITS,
    group=GROUP,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PolarQuant(Recipe):
    """Four levels of angles and a radius for each group of 16 channels."""

    def quantizers(self, layer: Layer) -> tuple[Quantize, Quantize]:
        """The same for keys and values."""
        if layer.head_dim % GROUP:
            raise self.refuse(layer, f"a head_dim that {GROUP} divides", layer.head_dim)
        return (lambda x, start: quantize(x),) * 2

    def shared_bytes(self, num_kv_heads: int, head_dim: int) -> float:
        """The rotation, in float16; the codebooks are the same for all layers."""
        return head_dim**2 * DENSE_BITS / 8


def quantize(x: Tensor) -> Tensor:
    """Quantise the angles of every group."""
    rotation = random_rotation(x.shape[-1], SEED).to(x.device)
    radius, angles = to_polar((x @ rotation.T).unflatten(-1, (-1, GROUP)))
    coded = [nearest(angle, codebook(level).to(x.device)) for level, angle in enumerate(angles, 1)]
    return from_polar(half(radius), coded).flatten(-2) @ rotation


def to_polar(x: Tensor) -> tuple[Tensor, list[Tensor]]:
    """One radius, `[..., 1]`, and the angles of each level, the first having half as many as there are channels."""
    angles: list[Tensor] = []
    while x.shape[-1] > 1:
        first, second = x[..., ::2], x[..., 1::2]
        # Radii are not negative, so that from the second level on angles lie in the first quarter.
        angles.append(torch.atan2(second, first) % (2 * math.pi) if not angles else torch.atan2(second, first))
        x = torch.hypot(first, second)
    return x, angles


def from_polar(radius: Tensor, angles: list[Tensor]) -> Tensor:
    """The channels, `[..., GROUP]`."""
    for angle in reversed(angles):
        radius = torch.stack((radius * angle.cos(), radius * angle.sin()), dim=-1).flatten(-2)
    return radius


@functools.lru_cache
def codebook(level: int) -> Tensor:
    """The angles of a level, counted from 1, sorted."""
    edge = 2 * math.pi if level == 1 else math.pi / 2
    return lloyd_max(functools.partial(angle_density, level=level), 0.0, edge, LEVEL_BITS[level - 1])


def angle_density(angle: Tensor, level: int) -> Tensor:
    """Of an angle between the radii of `2 ** (level - 1)` normal channels each, up to a factor."""
    return torch.ones_like(angle) if level == 1 else (2 * angle).sin().clamp(min=0) ** (2 ** (level - 1) - 1)


RECIPES: list[Recipe] = [
    PolarQuant(
        name="polarquant",
        family="PolarQuant",
        source="Han et al., 2025, arXiv:2502.02617",
        key=STORAGE,
        value=STORAGE,
    )
]
