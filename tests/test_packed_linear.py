"""Linear layers with tile-packed int4 weights in captured steps. On a CPU, a plain product stands in for the kernel."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import compare
import models
import pytest
import torch
from test_capture import Recorded
from test_fusion import ALL, Ops, step
from torch import Tensor, nn

from hf_kvquant import patched
from hf_kvquant.graphs import capture
from hf_kvquant.graphs.fusion import fused

CUDA_ONLY = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
GROUP = 128
# torchao pads inputs to a multiple of this.
CHANNELS = 1024
SIZES = {"hidden_size": CHANNELS, "intermediate_size": CHANNELS, "num_attention_heads": 8, "head_dim": 128}
LINEAR = 7  # layers with weights in a layer of the model
TILE_PACKED = {"group_size": GROUP, "int4_packing_format": "tile_packed_to_4d"}


def product(x: Tensor, codes: Tensor, group_size: int, scale_and_zero: Tensor) -> Tensor:
    """A product as `_weight_int4pack_mm` computes it, with codes in an order of its own: `[outputs, inputs]`."""
    nibbles = torch.stack([codes.flatten() >> 4 * i & 15 for i in range(8)], -1)
    scale, zero = scale_and_zero.transpose(0, 1).repeat_interleave(group_size, 1).unbind(-1)
    return x @ ((nibbles.view(scale.shape) - 8).to(x.dtype) * scale + zero).T


@pytest.fixture
def kernel() -> Iterator[None]:
    """PyTorch has the operator for GPUs alone."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("_weight_int4pack_mm", product, "CPU")
    yield
    library._destroy()


def packed(outputs: int, inputs: int) -> Any:
    """A weight of random codes."""
    weight_class = pytest.importorskip("torchao.quantization").Int4TilePackedTo4dTensor
    draw = torch.Generator().manual_seed(outputs)
    codes = torch.randint(-(2**31), 2**31, (outputs // 8, inputs // 128, 32, 4), generator=draw).int()
    scale_and_zero = torch.randn(inputs // GROUP, outputs, 2, generator=draw).bfloat16() / 100
    return weight_class(codes, scale_and_zero, [1, GROUP], torch.Size((outputs, inputs)))


def built() -> Any:
    model = models.build("llama", torch.bfloat16, **SIZES)
    for module in model.model.modules():
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(packed(*module.weight.shape), requires_grad=False)
    return model


def calls(model: Any) -> tuple[Tensor, Ops]:
    with Ops() as mode:
        return step(model), mode


def test_the_copy_of_the_input_goes(kernel: None) -> None:
    model = built()
    before, plain = calls(model)
    assert plain.counts["aten.constant_pad_nd"] == plain.counts["aten._weight_int4pack_mm"] == 2 * LINEAR
    with fused(model):
        step(model)
    with fused(model):
        after, mode = calls(model)
    compare.assert_same(after, before, "logits")
    assert mode.counts["aten.constant_pad_nd"] == 0 and mode.counts["aten._weight_int4pack_mm"] == 2 * LINEAR
    # The kernels between the linear layers do not depend on these.
    assert mode.fused() == ALL
    compare.assert_same(step(model), before, "afterwards")


def test_what_is_left_to_torchao(kernel: None) -> None:
    """Factors of activations, and biases."""
    model = built()
    layer = model.model.layers[0]
    layer.mlp.up_proj.weight.act_pre_scale = torch.full((CHANNELS,), 2.0).bfloat16()
    layer.mlp.down_proj.bias = nn.Parameter(torch.ones(CHANNELS).bfloat16())
    before = step(model)
    with fused(model):
        step(model)
    with fused(model):
        after, mode = calls(model)
    compare.assert_same(after, before, "logits")
    assert mode.counts["aten.constant_pad_nd"] == 2


def check_captured(model: Any) -> None:
    """Captured steps give the tokens of others."""
    outputs = []
    for way in ({"static": True}, {"capture": True}):
        options = {"output_logits": False, "disable_compile": "static" in way}
        with patched(model, {"preset": "int4", "max_cache_len": 64, **way}):
            outputs.append(models.greedy(model, models.left_padded(), 20, **options).sequences)
    expected, found = outputs
    compare.assert_same(found, expected.cpu(), "tokens")


def test_captured_steps(kernel: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(capture.RUNNERS, "cpu", Recorded)
    before = Recorded.made
    check_captured(built())
    assert Recorded.made > before


@CUDA_ONLY
def test_captured_steps_of_a_gpu() -> None:
    quantization = pytest.importorskip("torchao.quantization")
    model = models.build("llama", torch.bfloat16, **SIZES).to("cuda")
    quantization.quantize_(model.model, quantization.Int4WeightOnlyConfig(**TILE_PACKED))
    check_captured(model)


@CUDA_ONLY
@pytest.mark.parametrize("rows", [1, 8])
def test_the_kernel_itself(rows: int) -> None:
    quantization = pytest.importorskip("torchao.quantization")
    model = nn.Sequential(nn.Linear(CHANNELS, 512, bias=False)).to("cuda", torch.bfloat16)
    quantization.quantize_(model, quantization.Int4WeightOnlyConfig(**TILE_PACKED))
    x = torch.randn(rows, 1, CHANNELS, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        before = model(x)
        with fused(model):
            model(x)
            with Ops() as mode:
                after = model(x)
    compare.assert_same(after, before.cpu(), "output")
    assert set(mode.counts) <= {"aten._weight_int4pack_mm", "aten.view", "aten._unsafe_view", "aten.reshape"}
