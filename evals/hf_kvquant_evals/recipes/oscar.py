"""OSCAR (Zhou et al., 2026, arXiv:2605.17757; its code: FutureMLS-Lab/OSCAR): rotations learned from attention.

Per layer, keys are rotated into the eigenvectors of the mean covariance of the queries that read them. Values are
rotated into those of their own covariance, in which a token weighs as much as the mean square of its products with
queries. A Hadamard rotation follows. Each token of a head is clipped where 96 % (keys) or 92 % (values) of its
magnitudes lie below, and rounded to 2 bits between minimum and maximum. The first 64 and the newest 256 tokens stay
dense. These are the settings of its code; the scales are float16, as its bits count them.

The paper's last permutation spreads important channels over groups of 128. Here one group is the head, as in the
models of the paper, and the order of channels within a group has no effect.
"""

from __future__ import annotations

import dataclasses

from torch import Tensor, linalg

from hf_kvquant.spec.reference import rotate

from .arithmetic import is_power_of_two, min_max
from .interface import DENSE_BITS, Layer, Quantize, Recipe, Sample, Storage

SINK, RECENT = 64, 256
KEY_CLIP, VALUE_CLIP = 0.96, 0.92


def storage(bits: int) -> Storage:
    """Of keys and of values."""
    return Storage(code_bits=bits, token_bits=2 * DENSE_BITS, sink=SINK, recent=RECENT)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Oscar(Recipe):
    """Rotate by attention's covariances, clip, round to nearest."""

    code_bits: int

    def quantizers(self, layer: Layer) -> tuple[Quantize, Quantize]:
        """One rotation for the keys of a layer, one for its values."""
        if not is_power_of_two(layer.head_dim):
            raise self.refuse(layer, "a head_dim that is a power of two", layer.head_dim)
        rotations = learned_rotations(layer.learned(self), layer.num_kv_heads)

        def side(rotation: Tensor, clip: float) -> Quantize:
            def quantize(x: Tensor, start: int) -> Tensor:
                placed = rotation.to(x.device)
                return min_max(clipped(x @ placed, clip), self.code_bits) @ placed.T

            return quantize

        return side(rotations[0], KEY_CLIP), side(rotations[1], VALUE_CLIP)

    def shared_bytes(self, num_kv_heads: int, head_dim: int) -> float:
        """Two rotations, in float16."""
        return 2 * head_dim**2 * DENSE_BITS / 8


def learned_rotations(sample: Sample, num_kv_heads: int) -> tuple[Tensor, Tensor]:
    """Orthogonal matrices for keys and for values, `[head_dim, head_dim]` float32: `x @ rotation` is quantised."""
    query = sample.query.double().unflatten(0, (num_kv_heads, -1)).flatten(1, 2)
    key, value = sample.key.double(), sample.value.double()
    of_queries = query.mT @ query / query.shape[1]  # [num_kv_heads, head_dim, head_dim]
    weight = (key @ of_queries * key).sum(-1, keepdim=True)
    weight = weight / weight.mean(1, keepdim=True).clamp(min=1e-12)
    of_values = value.mT @ (weight * value) / value.shape[1]
    first, second = (rotate(linalg.eigh(each.mean(0)).eigenvectors.float()) for each in (of_queries, of_values))
    return first, second


def clipped(x: Tensor, share: float) -> Tensor:
    """Clip each row at the magnitude that this share of its values is below."""
    index = min(int(share * x.shape[-1]), x.shape[-1] - 1)
    bound = x.abs().sort(-1).values[..., index : index + 1]
    return x.clamp(-bound, bound)


RECIPES: list[Recipe] = [
    Oscar(
        name="oscar-2",
        family="OSCAR",
        source="Zhou et al., 2026, arXiv:2605.17757",
        key=storage(2),
        value=storage(2),
        code_bits=2,
        has_sample=True,
    )
]
