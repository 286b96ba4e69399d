"""KIVI (Liu et al., 2024, arXiv:2402.02750; its code: jy-yuan/KIVI): keys per channel, values per token.

Keys, after RoPE, get codes when 128 of them have gathered (`residual_length`): each channel has a scale and a zero for
every 32 tokens of it. Values get codes one by one as they leave the window of the newest 128: each group of 32 channels
has a scale and a zero. These are the paper's settings, group size 32 and residual length 128.
"""

from __future__ import annotations

import dataclasses

from .arithmetic import in_groups, min_max
from .interface import DENSE_BITS, Layer, Quantize, Recipe, Storage

GROUP, RESIDUAL = 32, 128


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kivi(Recipe):
    """Keys per channel, values per token, both in groups."""

    code_bits: int

    def quantizers(self, layer: Layer) -> tuple[Quantize, Quantize]:
        """Groups of tokens for keys, of channels for values."""
        if layer.head_dim % GROUP:
            raise self.refuse(layer, f"a head_dim that {GROUP} divides", layer.head_dim)
        return (
            lambda x, start: in_groups(x, GROUP, lambda group: min_max(group, self.code_bits), dim=2),
            lambda x, start: in_groups(x, GROUP, lambda group: min_max(group, self.code_bits)),
        )


RECIPES: list[Recipe] = [
    Kivi(
        name=f"kivi-{bits}",
        family="KIVI",
        source="Liu et al., 2024, arXiv:2402.02750",
        key=Storage(code_bits=bits, channel_bits=2 * DENSE_BITS, channel_tokens=GROUP, block=RESIDUAL),
        value=Storage(code_bits=bits, group_bits=2 * DENSE_BITS, group=GROUP, recent=RESIDUAL),
        code_bits=bits,
    )
    for bits in (4, 2)
]
