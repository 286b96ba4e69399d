"""Linear layers with torchao's tile-packed int4 weights: by our own kernel, and without copying their input.

For one row, PyTorch's kernel for these weights, `_weight_int4pack_mm`, reads at 10 to 37 % of an H200's bandwidth
(evals/results/weights.json). While a step is captured, `packed_linear` takes its place, which gives the same bits
(csrc/cuda/fused/packed_linear.cu). Where it does not, as where another torch adds in another order, PyTorch's stays.

torchao also pads the input to a multiple of 1024 channels. Where there is nothing to pad, `torch.nn.functional.pad`
still copies: one more kernel for each linear layer of a step, over two hundred in Llama 3 8B. Both of these products do
without. torchao is recognised by name, so that it need not be installed.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from .._ops import ops as torch_ops
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
    # Bound to this weight. The one that is chosen may be bound to the weight of an earlier layer of the same shape.
    chosen: Any = chooser.choose(
        "a linear layer with packed weights",
        (tuple(weight.shape), tuple(weight.qdata.shape), tuple(weight.block_size)),
        (x,),
        lambda x: type(module).forward(module, x),
        {name: functools.partial(product, weight) for name, product in PRODUCTS.items()},
        draws=_bfloat16,
    )
    return None if chosen is None else chosen.func(weight, x)


def _ours(weight: Any, x: Tensor) -> Tensor:
    """`x` times the transposed weight. Raises if the weight is padded, or `x` has another dtype than bfloat16."""
    rows = x.reshape(-1, x.shape[-1])
    out: Tensor = torch_ops.packed_linear(rows, weight.qdata, weight.scale_and_zero, weight.block_size[-1])
    return out.view(*x.shape[:-1], weight.shape[0])


def _of_torch(weight: Any, x: Tensor) -> Tensor:
    """The same by PyTorch's kernel."""
    rows = x.reshape(-1, x.shape[-1])
    product = torch.ops.aten._weight_int4pack_mm.default
    out: Tensor = product(rows, weight.qdata, weight.block_size[-1], weight.scale_and_zero)
    return out.view(*x.shape[:-1], weight.shape[0])


# By what the log calls them, in the order in which they are tried.
OURS, OF_TORCH = "our kernel", "PyTorch's kernel alone"
PRODUCTS = {OURS: _ours, OF_TORCH: _of_torch}


def _bfloat16(x: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Random inputs in the kernel's only dtype: torchao rounds others to it."""
    return (inputs for inputs in random_like(x) if inputs[0].dtype == torch.bfloat16)
