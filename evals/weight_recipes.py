"""Quantised weights and activations, simulated: linear layers compute with the numbers that codes stand for.

They are for quality alone. Embeddings and the output layer stay as they are, as in the papers.

- `W8A8`: weights int8, one scale per output channel; activations int8, one scale per token, both symmetric
  (SmoothQuant, Xiao et al., ICML 2023, without its smoothing of activations).
- `W4A16`: weights uint4 in groups of 128 inputs, with a zero point (round to nearest, the baseline of AWQ, Lin et al.,
  MLSys 2024).
- `W4A8`: QServe's progressive groups (Lin et al., MLSys 2025, section 4.1): weights are int8 with one scale per output
  channel and magnitudes up to 119; these become uint4 in groups of 128 with integer scales and zero points, so that
  products are computed in int8. Activations as above.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

GROUP_SIZE = 128
PROTECTED_RANGE = 119.0  # of QServe's int8 weights: what is made of their groups stays within int8
_TINY = 1e-8  # for rows of zeros


def int8_rows(x: Tensor, most: float = 127.0) -> tuple[Tensor, Tensor]:
    """Symmetric codes of each row, as floats, and scales `[..., 1]`."""
    scale = x.abs().amax(-1, keepdim=True).clamp(min=_TINY) / most
    return (x / scale).round().clamp(-most, most), scale


def int8_weight(weight: Tensor) -> Tensor:
    """`[outputs, inputs]`, one scale per output."""
    codes, scale = int8_rows(weight)
    return codes * scale


def groups_of(weight: Tensor) -> Tensor:
    """`[outputs, groups, inputs of a group]`. Inputs that no group size divides are one group."""
    size = GROUP_SIZE if weight.shape[1] % GROUP_SIZE == 0 else weight.shape[1]
    return weight.view(weight.shape[0], -1, size)


def uint4_groups(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Codes `[outputs, groups, inputs of a group]`, as floats, with scales and zero points `[outputs, groups, 1]`."""
    groups = groups_of(weight)
    low, high = groups.amin(-1, keepdim=True).clamp(max=0), groups.amax(-1, keepdim=True).clamp(min=0)
    scale = ((high - low) / 15).clamp(min=_TINY)
    zero = (-low / scale).round()
    return ((groups / scale).round() + zero).clamp(0, 15), scale, zero


def uint4_weight(weight: Tensor) -> Tensor:
    """Groups of inputs with a scale and a zero point each."""
    codes, scale, zero = uint4_groups(weight)
    return ((codes - zero) * scale).view_as(weight)


def progressive_weight(weight: Tensor) -> Tensor:
    """QServe's two levels."""
    wide, outer = int8_rows(weight, PROTECTED_RANGE)
    groups = groups_of(wide)
    low, high = groups.amin(-1, keepdim=True).clamp(max=0), groups.amax(-1, keepdim=True).clamp(min=0)
    scale = ((high - low) / 15).round().clamp(min=1)
    zero = (-low / scale).round().clamp(0, 15)
    codes = ((groups / scale).round() + zero).clamp(0, 15)
    return ((codes - zero) * scale).view_as(weight) * outer


class Int8Activations:
    """The forward of a linear layer whose inputs are int8, one scale per token."""

    def __init__(self, linear: nn.Linear) -> None:
        self._linear = linear

    def __call__(self, x: Tensor) -> Tensor:
        """See `nn.Linear`."""
        codes, scale = int8_rows(x.float())
        return functional.linear((codes * scale).to(x.dtype), self._linear.weight, self._linear.bias)


# By name: what becomes of weights, and whether activations are int8.
WEIGHTS: dict[str, tuple[Callable[[Tensor], Tensor] | None, bool]] = {
    "W16A16": (None, False),
    "W8A8": (int8_weight, True),
    "W4A16": (uint4_weight, False),
    "W4A8": (progressive_weight, True),
}


@torch.no_grad()
def quantize_weights(model: Any, name: str) -> None:
    """Replace the weights of all linear layers but the output layer, in place, and note int8 activations."""
    function, has_int8_activations = WEIGHTS[name]
    output = model.get_output_embeddings()
    for module in model.modules():
        if not isinstance(module, nn.Linear) or module is output:
            continue
        if function is not None:
            module.weight.copy_(function(module.weight.float()))
        if has_int8_activations:
            module.forward = Int8Activations(module)  # type: ignore[method-assign]
