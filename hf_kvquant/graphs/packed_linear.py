"""Linear layers with torchao's tile-packed int4 weights, without the kernel that copies their input.

torchao pads the input to a multiple of 1024 channels. Where there is nothing to pad, `torch.nn.functional.pad` still
copies: one more kernel for each linear layer of a step, over two hundred in Llama 3 8B. While a step is captured, such
a layer calls PyTorch's matrix product itself. torchao is recognised by name, so that it need not be installed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from .trials import Chooser, random_like

_TILE_PACKED = "Int4TilePackedTo4dTensor"


def is_tile_packed(module: nn.Module) -> bool:
    """Whether a module is a linear layer without a bias whose weight is packed for `_weight_int4pack_mm`."""
    weight = getattr(module, "weight", None) if type(module) is nn.Linear else None
    return (
        weight is not None
        and type(weight).__name__ == _TILE_PACKED
        and module.bias is None
        and weight.act_pre_scale is None
    )


def packed_linear(chooser: Chooser, module: Any, x: Tensor) -> Tensor | None:
    """The output of the layer, or `None` if its own forward has to compute it."""
    weight = module.weight
    chosen = chooser.choose(
        "a linear layer with packed weights",
        (tuple(weight.shape), tuple(weight.qdata.shape), tuple(weight.block_size)),
        (x,),
        lambda x: type(module).forward(module, x),
        {"one kernel": lambda x: _product(weight, x)},
        draws=_bfloat16,
    )
    return None if chosen is None else _product(weight, x)


def _product(weight: Any, x: Tensor) -> Tensor:
    """`x` times the transposed weight. Raises if the weight is padded, or `x` has another dtype than bfloat16."""
    rows = x.reshape(-1, x.shape[-1])
    product = torch.ops.aten._weight_int4pack_mm.default
    out: Tensor = product(rows, weight.qdata, weight.block_size[-1], weight.scale_and_zero)
    return out.view(*x.shape[:-1], weight.shape[0])


def _bfloat16(x: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Random inputs in the kernel's only dtype: torchao rounds others to it."""
    return (inputs for inputs in random_like(x) if inputs[0].dtype == torch.bfloat16)
