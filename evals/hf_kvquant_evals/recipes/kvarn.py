"""KVarN (Muller et al., 2026, arXiv:2606.03458; its code: huawei-csl/KVarN): variances evened out on both axes.

Tiles of 128 tokens of one head are rotated by a Hadamard matrix over the channels. Then the standard deviations of
tokens and channels are divided out in turn, 16 times, as in Sinkhorn's algorithm; the scales of the round with the
least imbalance are kept. The rest is rounded to nearest, keys with a scale and a zero for each channel of the tile,
values for each token. The other axis has one scale.

As in its code, the first 128 tokens stay dense, and so does the tile that is not full yet. `kvarn-k4v2` is the preset
that its authors ship.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from .arithmetic import half, rotated
from .interface import DENSE_BITS, Layer, Quantize, Recipe, Storage

TILE, SINK, ROUNDS = 128, 128, 16
# Bounds of its code, on standard deviations and on logarithms of scales.
DEVIATIONS, LOG_SCALES = (1e-3, 1e3), (-0.3, 10.0)


def storage(bits: int, *, channel_bits: float, token_bits: float) -> Storage:
    """Of one side, whose tiles have `channel_bits` for each channel and `token_bits` for each token."""
    return Storage(
        code_bits=bits,
        channel_bits=channel_bits,
        channel_tokens=TILE,
        token_bits=token_bits,
        sink=SINK,
        block=TILE,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class KVarN(Recipe):
    """Rotate, even out variances, round to nearest."""

    key_bits: int
    value_bits: int

    def quantizers(self, layer: Layer) -> tuple[Quantize, Quantize]:
        """Rows are channels for keys, tokens for values."""

        def key(x: Tensor) -> Tensor:
            tiles = x.unflatten(2, (-1, TILE)).transpose(-1, -2)
            return tile_rounded(tiles, self.key_bits).transpose(-1, -2).flatten(2, 3)

        def value(x: Tensor) -> Tensor:
            return tile_rounded(x.unflatten(2, (-1, TILE)), self.value_bits).flatten(2, 3)

        return lambda x, start: rotated(x, key), lambda x, start: rotated(x, value)


def tile_rounded(tile: Tensor, bits: int) -> Tensor:
    """Quantise tiles, `[..., rows, columns]`, with a scale and a zero for each row and a scale for each column."""
    row, column = evened(tile)
    even = tile / column / row
    low, high = even.amin(-1, keepdim=True), even.amax(-1, keepdim=True)
    levels = 2**bits - 1
    scale = ((high - low) / levels).clamp(min=1e-10)
    codes = ((even - low) / scale).round().clamp(0, levels)
    # Row scales are multiplied into scale and zero, which are stored.
    out: Tensor = (codes * half(scale * row) + half(low * row)) * half(column)
    return out


def evened(tile: Tensor) -> tuple[Tensor, Tensor]:
    """Scales of rows, `[..., rows, 1]`, and of columns, `[..., 1, columns]`, that even out standard deviations."""
    log_row, log_column = torch.zeros_like(tile[..., :1]), torch.zeros_like(tile[..., :1, :])
    current = tile
    least, best = imbalance(tile), (log_row.exp(), log_column.exp())
    for _ in range(ROUNDS):
        log_column = (log_column + current.std(-2, keepdim=True).clamp(*DEVIATIONS).log()).clamp(*LOG_SCALES)
        current = tile / log_column.exp() / log_row.exp()
        log_row = (log_row + current.std(-1, keepdim=True).clamp(*DEVIATIONS).log()).clamp(*LOG_SCALES)
        current = tile / log_column.exp() / log_row.exp()
        found = imbalance(current)
        is_better = found <= least
        least = torch.where(is_better, found, least)
        best = (
            torch.where(is_better, log_row.exp(), best[0]),
            torch.where(is_better, log_column.exp(), best[1]),
        )
    return best


def imbalance(tile: Tensor) -> Tensor:
    """The largest over the smallest standard deviation, of rows plus of columns: `[..., 1, 1]`."""
    parts = []
    for dim in (-1, -2):
        deviation = tile.std(dim, keepdim=True)
        parts.append(deviation.amax((-1, -2), keepdim=True) / deviation.amin((-1, -2), keepdim=True).clamp(min=1e-8))
    return parts[0] + parts[1]


RECIPES: list[Recipe] = [
    KVarN(
        name=f"kvarn-k{key_bits}v{value_bits}",
        family="KVarN",
        source="Muller et al., 2026, arXiv:2606.03458",
        key=storage(key_bits, channel_bits=2 * DENSE_BITS, token_bits=DENSE_BITS),
        value=storage(value_bits, channel_bits=DENSE_BITS, token_bits=2 * DENSE_BITS),
        key_bits=key_bits,
        value_bits=value_bits,
    )
    for key_bits, value_bits in ((4, 4), (4, 2), (2, 2))
]
