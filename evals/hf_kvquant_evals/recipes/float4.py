"""Four-bit floating point with a scale for each block of channels: NVFP4 and MXFP4.

Both store E2M1: 0, 0.5, 1, 1.5, 2, 3, 4, 6 with a sign. MXFP4 (Open Compute Project, Microscaling Formats v1.0, 2023)
gives 32 channels a power of two, that of the largest magnitude over 4, so that larger ones than 6 saturate. NVFP4
(NVIDIA, 2025) gives 16 channels an E4M3 scale, the largest magnitude over 6, and each tensor a float32 factor that
brings the largest of these scales to 448. The factor must be known before the tokens come, so the sample decides it,
and scales beyond it saturate.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from .arithmetic import in_groups
from .interface import Layer, Quantize, Recipe, Storage

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
LARGEST, LARGEST_EXPONENT = 6.0, 2
E4M3_MAX, E4M3_MIN = 448.0, 2.0**-9
MX_GROUP, NV_GROUP = 32, 16
MXFP4 = Storage(code_bits=4, group_bits=8, group=MX_GROUP)
NVFP4 = Storage(code_bits=4, group_bits=8, group=NV_GROUP)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mxfp4(Recipe):
    """Powers of two for 32 channels."""

    def quantizers(self, layer: Layer) -> tuple[Quantize, Quantize]:
        """The same for keys and values."""
        if layer.head_dim % MX_GROUP:
            raise self.refuse(layer, f"a head_dim that {MX_GROUP} divides", layer.head_dim)
        return (lambda x, start: in_groups(x, MX_GROUP, mx_rounded),) * 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Nvfp4(Recipe):
    """E4M3 scales for 16 channels."""

    def quantizers(self, layer: Layer) -> tuple[Quantize, Quantize]:
        """A factor for keys and one for values."""
        if layer.head_dim % NV_GROUP:
            raise self.refuse(layer, f"a head_dim that {NV_GROUP} divides", layer.head_dim)
        sample = layer.learned(self)

        def side(seen: Tensor) -> Quantize:
            factor = float(seen.abs().max()) / (LARGEST * E4M3_MAX)
            return lambda x, start: in_groups(x, NV_GROUP, lambda group: nv_rounded(group, factor))

        return side(sample.key), side(sample.value)

    def shared_bytes(self, num_kv_heads: int, head_dim: int) -> float:
        """Two factors."""
        return 8.0


def mx_rounded(x: Tensor) -> Tensor:
    """Round groups, the last dimension, to E2M1 times a power of two."""
    largest = x.abs().amax(-1, keepdim=True)
    exponent = torch.frexp(largest).exponent - 1 - LARGEST_EXPONENT
    scale = torch.ldexp(torch.ones_like(largest), exponent.clamp(-127, 127))
    return e2m1(x / scale) * scale


def nv_rounded(x: Tensor, factor: float) -> Tensor:
    """Round groups, the last dimension, to E2M1 times an E4M3 scale times the factor of the tensor."""
    wanted = x.abs().amax(-1, keepdim=True) / LARGEST / factor
    # A scale that rounds to 0 would divide by it.
    scale = wanted.clamp(E4M3_MIN, E4M3_MAX).to(torch.float8_e4m3fn).float() * factor
    return e2m1(x / scale) * scale


def e2m1(x: Tensor) -> Tensor:
    """Round to E2M1, ties to the even code; larger magnitudes saturate."""
    magnitude = x.abs().clamp(max=LARGEST)
    # Steps of 0.5 below 2, of 1 below 4, of 2 above. `round` sends ties to even multiples, which are the even codes.
    step = torch.where(magnitude < 2, 0.5, torch.where(magnitude < 4, 1.0, 2.0))
    return (magnitude / step).round() * step * x.sign()


RECIPES: list[Recipe] = [
    Mxfp4(
        name="mxfp4",
        family="MXFP4",
        source="Open Compute Project, Microscaling Formats v1.0, 2023",
        key=MXFP4,
        value=MXFP4,
    ),
    Nvfp4(name="nvfp4", family="NVFP4", source="NVIDIA, 2025", key=NVFP4, value=NVFP4, has_sample=True),
]
