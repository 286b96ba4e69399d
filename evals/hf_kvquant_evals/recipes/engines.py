"""Caches that other software ships: transformers' QuantizedCache, llama.cpp's cache types, and vLLM's int4.

`quanto-4` and `quanto-2` are transformers' `QuantizedCache` with its default backend: groups of 64 numbers of a token
between their minimum and maximum. New tokens stay dense until there are 128 of them (`residual_length`), and are seen
dense once more. All tokens get codes again then, which changes next to nothing, and is left out here.

`q8_0` and `q4_0` are llama.cpp's types of these names: blocks of 32 channels with one float16 scale. That of `q4_0` is
the number with the largest magnitude over -8, so that this number is exact. Keys and values are rotated by a Hadamard
matrix before (ggml-org/llama.cpp#21038).

`vllm-int4` is vLLM's `int4_per_token_head` as its pull requests describe it (vllm-project/vllm#40633, #40835): keys and
values rotated likewise, a float32 scale for each token and head, and an integer zero in the lowest four bits of its
mantissa.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import torch
from torch import Tensor

from .arithmetic import half, in_groups, min_max, rotated
from .interface import DENSE_BITS, Layer, Quantize, Recipe, Storage

QUANTO_GROUP, QUANTO_RESIDUAL = 64, 128
BLOCK = 32
ZERO_BITS = 4  # of the mantissa of vLLM's scales


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rounded(Recipe):
    """Groups of channels, or whole heads, that are rounded by themselves, after a rotation or without."""

    group: int | None  # channels; `None`: those of a head
    rounded: Callable[[Tensor], Tensor]  # groups along the last dimension
    is_rotated: bool

    def quantizers(self, layer: Layer) -> tuple[Quantize, Quantize]:
        """The same for keys and values."""
        size = self.group or layer.head_dim
        if layer.head_dim % size:
            raise self.refuse(layer, f"a head_dim that {size} divides", layer.head_dim)

        def quantize(x: Tensor) -> Tensor:
            return in_groups(x, size, self.rounded)

        return (lambda x, start: rotated(x, quantize) if self.is_rotated else quantize(x),) * 2


def q8_0(x: Tensor) -> Tensor:
    """Round blocks to codes from -127 to 127, made with a float32 scale and read with that in float16."""
    scale = x.abs().amax(-1, keepdim=True) / 127
    return (x / scale.clamp(min=torch.finfo(torch.float32).tiny)).round() * half(scale)


def q4_0(x: Tensor) -> Tensor:
    """Round blocks to codes from -8 to 7."""
    scale = x.gather(-1, x.abs().argmax(-1, keepdim=True)) / -8
    codes = torch.where(scale == 0, torch.zeros_like(x), x / scale) + 8.5
    return (codes.floor().clamp(0, 15) - 8) * half(scale)


def vllm_int4(x: Tensor) -> Tensor:
    """Round rows to codes from 0 to 15, whose zero is an integer of as many bits."""
    low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    scale = ((high - low) / 15).clamp(min=torch.finfo(torch.float32).tiny)
    zero = (-low / scale).round().clamp(0, 15)
    codes = ((x / scale).round() + zero).clamp(0, 15)
    kept = (scale.view(torch.int32) >> ZERO_BITS << ZERO_BITS).view(torch.float32)
    return (codes - zero) * kept


def recipe(
    name: str, family: str, source: str, storage: Storage, rounded: Callable[[Tensor], Tensor], *, is_rotated: bool
) -> Rounded:
    """A recipe that treats keys and values alike."""
    group = storage.group if storage.group_bits else None
    return Rounded(
        name=name,
        family=family,
        source=source,
        key=storage,
        value=storage,
        group=group,
        rounded=rounded,
        is_rotated=is_rotated,
    )


def quanto(bits: int) -> Storage:
    """Of transformers' cache."""
    return Storage(code_bits=bits, group_bits=2 * DENSE_BITS, group=QUANTO_GROUP, recent=1, block=QUANTO_RESIDUAL)


def llama_cpp(bits: int) -> Storage:
    """Of llama.cpp's blocks."""
    return Storage(code_bits=bits, group_bits=DENSE_BITS, group=BLOCK)


TRANSFORMERS = "quanto", "transformers, QuantizedCache"
LLAMA_CPP = "llama.cpp", "ggml-org/llama.cpp"
VLLM = "vLLM", "vllm-project/vllm#40835"
RECIPES: list[Recipe] = [
    *(
        recipe(f"quanto-{bits}", *TRANSFORMERS, quanto(bits), functools.partial(min_max, bits=bits), is_rotated=False)
        for bits in (4, 2)
    ),
    recipe("q8_0", *LLAMA_CPP, llama_cpp(8), q8_0, is_rotated=True),
    recipe("q4_0", *LLAMA_CPP, llama_cpp(4), q4_0, is_rotated=True),
    recipe("vllm-int4", *VLLM, Storage(code_bits=4, token_bits=32), vllm_int4, is_rotated=True),
]
