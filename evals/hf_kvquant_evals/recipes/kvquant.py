"""KVQuant (Hooper et al., 2024, arXiv:2401.18079; its code: SqueezeAILab/KVQuant): codebooks and a few dense outliers.

Keys are quantised before RoPE: the harness undoes RoPE, and redoes it on what the codes stand for. Each channel of the
keys is shifted and scaled by bounds learned from a text, between which all but 1 % of its values lie. Each token of the
values is shifted and scaled by its own bounds. The rest is rounded to a codebook for the layer (nuq), found on the text
by k-means in which values weigh as much as the square of the loss's gradient (Fisher information).

Outliers stay float16: of each token, over all heads, up to 0.5 % of the values at either end, rounded up. For keys,
only those beyond the bounds are outliers; the authors cap their number in this way for their kernels. Each takes 16
bits more for its place. The first token stays dense. The rescaling of codebooks that the authors add for 2 bits
(Q-Norm) is not here, and so is no recipe of 2 bits.
"""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

from .arithmetic import half, nearest, weighted_means
from .interface import DENSE_BITS, Layer, Quantize, Recipe, Rope, Storage

OUTLIERS = 0.01  # share of values, half of them at either end
PLACE_BITS = 16
SINK = 1
TINY = 1e-12


def outliers_per_end(values: int) -> int:
    """How many of a token's values, over all heads, may be outliers at either end."""
    return math.ceil(OUTLIERS / 2 * values)


def _outlier_bits(values: int) -> float:
    return 2 * outliers_per_end(values) * (DENSE_BITS + PLACE_BITS)


def _outlier_and_bound_bits(values: int) -> float:
    return _outlier_bits(values) + 2 * DENSE_BITS


@dataclasses.dataclass(frozen=True, kw_only=True)
class KVQuant(Recipe):
    """Keys per channel before RoPE, values per token, both with codebooks and outliers."""

    code_bits: int

    def quantizers(self, layer: Layer) -> tuple[Quantize, Quantize]:
        """A codebook for keys and one for values."""
        if layer.rope is None:
            raise self.refuse(layer, "rotary embeddings over halves of all channels", "others")
        return self._of_keys(layer, layer.rope), self._of_values(layer)

    def shared_bytes(self, num_kv_heads: int, head_dim: int) -> float:
        """Bounds of the channels of keys, and two codebooks, in float16."""
        codebooks = 2 * 2.0**self.code_bits
        return (2 * num_kv_heads * head_dim + codebooks) * DENSE_BITS / 8

    def _of_keys(self, layer: Layer, rope: Rope) -> Quantize:
        sample = layer.learned(self)
        key, gradient = (
            before_rope(rope, each.to(layer.model.device), sample.window) for each in (sample.key, sample.key_gradient)
        )
        end = OUTLIERS / 2
        low, high = (half(torch.quantile(key, share, dim=1, keepdim=True)) for share in (end, 1 - end))
        unit = (key - (low + high) / 2) / ((high - low) / 2).clamp(min=TINY)
        is_inside = unit.abs() <= 1
        codes = half(weighted_means(unit[is_inside], gradient[is_inside].square(), self.code_bits))

        def quantize(x: Tensor, start: int) -> Tensor:
            middle, reach = ((low + high) / 2).to(x.device), ((high - low) / 2).clamp(min=TINY).to(x.device)
            before = rope.undone(x, start)
            unit = (before - middle) / reach
            is_outlier = is_extreme(unit) & (unit.abs() > 1)
            coded = nearest(unit, codes.to(x.device)) * reach + middle
            return rope.redone(torch.where(is_outlier, half(before), coded), start)

        return quantize

    def _of_values(self, layer: Layer) -> Quantize:
        sample = layer.learned(self)
        unit, is_outlier, _, _ = per_token(sample.value.unsqueeze(0))
        weight = sample.value_gradient.unsqueeze(0).square()
        codes = half(weighted_means(unit[~is_outlier], weight[~is_outlier], self.code_bits))

        def quantize(x: Tensor, start: int) -> Tensor:
            unit, is_outlier, middle, reach = per_token(x)
            return torch.where(is_outlier, half(x), nearest(unit, codes.to(x.device)) * reach + middle)

        return quantize


def before_rope(rope: Rope, x: Tensor, window: int) -> Tensor:
    """Keys of a sample, or their gradients, before RoPE, on the CPU: `[heads, tokens, head_dim]` on any device."""
    windows = x.unsqueeze(0).split(window, dim=2)
    return torch.cat([rope.undone(each, 0) for each in windows], dim=2)[0].cpu()


def is_extreme(x: Tensor) -> Tensor:
    """Whether a value, `[batch, heads, tokens, head_dim]`, is among the most extreme of its token at either end."""
    flat = x.transpose(1, 2).flatten(2)
    count = outliers_per_end(flat.shape[-1])
    found: Tensor = torch.zeros_like(flat, dtype=torch.bool)
    for is_largest in (True, False):
        found.scatter_(2, flat.topk(count, largest=is_largest).indices, True)
    by_head: Tensor = found.unflatten(2, (x.shape[1], -1))
    return by_head.transpose(1, 2)


def per_token(x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Values of each token, over all heads, scaled to -1 … 1 without its outliers; which are outliers; middle; reach.

    `x` is `[batch, heads, tokens, head_dim]`; middle and reach have size 1 in heads and head_dim, and are float16.
    """
    is_outlier = is_extreme(x)
    low = x.masked_fill(is_outlier, math.inf).amin((1, 3), keepdim=True)
    high = x.masked_fill(is_outlier, -math.inf).amax((1, 3), keepdim=True)
    middle, reach = half((low + high) / 2), half((high - low) / 2).clamp(min=2.0**-24)
    return (x - middle) / reach, is_outlier, middle, reach


RECIPES: list[Recipe] = [
    KVQuant(
        name=f"kvquant-{bits}",
        family="KVQuant",
        source="Hooper et al., 2024, arXiv:2401.18079",
        key=Storage(code_bits=bits, layer_token_bits=_outlier_bits, sink=SINK),
        value=Storage(code_bits=bits, layer_token_bits=_outlier_and_bound_bits, sink=SINK),
        code_bits=bits,
        has_sample=True,
    )
    for bits in (4, 3)
]
