"""Linear layers with 4-bit weights and the kernels that multiply with them, for the benchmarks of speed.

Each method replaces the linear layers of a model that is on a GPU, all but the output layer, as transformers' loaders
do. Weights are in groups of 128 inputs with a bf16 scale, and a zero where the method has zeros. Nothing is calibrated:
these are for speed, `weight_recipes.py` is for quality.

- `hf_kvquant`: torchao's `Int4WeightOnlyConfig` with tiles for GPUs, by this package's kernel, as in captured steps.
- `tinygemm`: the same by `torch.ops.aten._weight_int4pack_mm`, of PyTorch itself.
- `mslk`, `mslk-shuffled`: the same config in its plain and its preshuffled format, with CUTLASS kernels of the package
  mslk (`pip install mslk-cuda`).
- `gemlite`: Triton kernels, which HQQ calls by `prepare_for_inference(model, backend="gemlite")`. Configurations that
  its authors tuned on an H100 are used on every Hopper GPU.
- `humming`: CUDA kernels of the vLLM project that are compiled at their first call (`pip install humming-kernels`).

The first four are what `TorchAoConfig` loads. The other two have no loader in transformers for such weights.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from weight_recipes import GROUP_SIZE, uint4_groups

from hf_kvquant.graphs import packed_linear
from hf_kvquant.models.hashes import plain_tensors


@dataclasses.dataclass(frozen=True)
class Method:
    """What becomes of a linear layer.

    Attributes:
        kernel: Computes the products.
        packages: What must be installed.
        replace: Makes the quantised layer, which may be the layer itself; `None` for a layer that stays.
        product: The one of `packed_linear.PRODUCTS` that captured steps may choose.
    """

    kernel: str
    packages: tuple[str, ...] = ()
    replace: Callable[[nn.Linear], nn.Module] | None = None
    product: str = packed_linear.OURS

    @contextlib.contextmanager
    def chosen(self) -> Iterator[None]:
        """Captured steps choose the `product` of this method, or none."""
        only = {self.product: packed_linear.PRODUCTS[self.product]}
        with mock.patch.dict(packed_linear.PRODUCTS, only, clear=True):
            yield

    @property
    def versions(self) -> dict[str, str | None]:
        """Of the packages; `None` for one that is not installed."""
        return {package: _version(package) for package in self.packages}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _torchao(packing_format: str) -> Callable[[nn.Linear], nn.Module]:
    def replace(linear: nn.Linear) -> nn.Module:
        from torchao.quantization import Int4WeightOnlyConfig, quantize_

        config = Int4WeightOnlyConfig(group_size=GROUP_SIZE, int4_packing_format=packing_format)
        quantize_(linear, config, filter_fn=lambda module, name: module is linear)
        return linear

    return replace


def _gemlite(linear: nn.Linear) -> nn.Module:
    from gemlite import core
    from gemlite.helper import A16W4_HQQ_INT

    if torch.cuda.get_device_capability() == (9, 0) and not core.GEMLITE_TRITON_CONFIG_CACHE:
        core.GemLiteLinear.load_config(str(Path(core.__file__).parent / "configs" / "h100.json"))
    weight = linear.weight
    codes, scale, zero = uint4_groups(weight.float())
    scale, zero = (each.squeeze(-1).to(weight.dtype) for each in (scale, zero))
    helper = A16W4_HQQ_INT(device=weight.device, dtype=weight.dtype)
    quantised: nn.Module = helper.from_weights(codes.flatten(1).to(torch.uint8), scale, zero)
    return quantised


class _Rows(nn.Module):
    """A layer that takes `[rows, inputs]`, for inputs of any shape."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        """See `nn.Linear`."""
        out: Tensor = self.layer(x.reshape(-1, x.shape[-1]))
        return out.view(*x.shape[:-1], out.shape[-1])


def _humming(linear: nn.Linear) -> nn.Module:
    from humming.layer import HummingLayer

    layer = HummingLayer(
        shape_n=linear.out_features,
        shape_k=linear.in_features,
        weight_config={"dtype": "int4", "group_size": GROUP_SIZE},
        torch_dtype=linear.weight.dtype,
    ).to(linear.weight.device)
    layer.load_from_unquantized(linear.weight.detach())
    layer.transform()
    return _Rows(layer)


BF16 = "bf16"
METHODS: dict[str, Method] = {
    BF16: Method("cuBLAS"),
    "hf_kvquant": Method("packed_linear", ("torchao",), _torchao("tile_packed_to_4d")),
    "tinygemm": Method("_weight_int4pack_mm", ("torchao",), _torchao("tile_packed_to_4d"), packed_linear.OF_TORCH),
    "gemlite": Method("GEMV_REVSPLITK, GEMM_SPLITK, GEMM", ("gemlite",), _gemlite),
    "mslk": Method("bf16i4bf16_rowwise", ("torchao", "mslk-cuda"), _torchao("plain")),
    "mslk-shuffled": Method("bf16i4bf16_shuffled", ("torchao", "mslk-cuda"), _torchao("preshuffled")),
    "humming": Method("launch_kernel", ("humming-kernels",), _humming),
}


def shapes_of(model: Any) -> dict[str, tuple[int, int]]:
    """Names of the linear layers that are quantised, all but the output layer, with their outputs and inputs."""
    output = model.get_output_embeddings()
    return {
        name: (module.out_features, module.in_features)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module is not output
    }


@torch.no_grad()
def quantize(model: Any, name: str) -> None:
    """Quantise the linear layers of a model by a method of `METHODS`, one by one, in place.

    Raises:
        ImportError: A package is not installed.
        ValueError: A layer has a bias, which not every method takes.
    """
    replace = METHODS[name].replace
    for layer in shapes_of(model) if replace is not None else ():
        linear = model.get_submodule(layer)
        if linear.bias is not None:
            raise ValueError(f"quantize: `model` must have linear layers without biases, got one in {layer}.")
        model.set_submodule(layer, replace(linear))


def bytes_of(module: nn.Module) -> int:
    """Bytes of a module's parameters, of quantised ones too."""
    return sum(part.nbytes for parameter in module.parameters() for part in plain_tensors(parameter))


def arm_of(row: dict[str, Any]) -> tuple[str, str]:
    """The weights and the system of a row or failure that `bench_batching.py` wrote. Old ones have bf16 weights."""
    return row.get("weights", BF16), row["system"]
