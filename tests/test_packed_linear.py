"""Linear layers with tile-packed int4 weights: our kernel, and captured steps.

On a CPU, a plain product stands in for PyTorch's kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import compare
import models
import pytest
import torch
from cases import REFUSED
from test_capture import Recorded
from test_fusion import ALL, Ops, step
from torch import Tensor, nn

from hf_kvquant import patched
from hf_kvquant._ops import ops as torch_ops
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
        with patched(model, {"preset": "int4-token", "max_cache_len": 64, **way}):
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
    assert mode.fused() == {"packed_linear": 1}
    assert set(mode.counts) <= {"hf_kvquant.packed_linear", "aten.view", "aten._unsafe_view", "aten.reshape"}


# --- our kernel -------------------------------------------------------------------------------------------------------


def tiles(codes: Tensor) -> Tensor:
    """Codes `[outputs, inputs]`, 0 to 15, as PyTorch packs them for GPUs, written out one by one."""
    outputs, inputs = codes.shape
    words = torch.zeros(outputs // 8, inputs // 128, 32, 4, dtype=torch.int64)
    for lane in range(32):
        for j in range(4):
            for place, i in enumerate((0, 8, 16, 24, 1, 9, 17, 25)):  # from the lowest four bits on
                column = 32 * j + 2 * (lane % 4) + i
                words[:, :, lane, j] |= (
                    codes.view(-1, 8, inputs // 128, 128)[:, lane // 4, :, column].long() << 4 * place
                )
    return words.to(torch.int32)  # wraps


def draw(outputs: int, inputs: int, group_size: int, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor]:
    """Codes, those in tiles, and scales with zeros."""
    dice = torch.Generator().manual_seed(outputs + inputs)
    codes = torch.randint(0, 16, (outputs, inputs), generator=dice)
    scale_and_zero = torch.randn(inputs // group_size, outputs, 2, generator=dice).bfloat16()
    return codes, tiles(codes).to(device), scale_and_zero.to(device)


@pytest.mark.parametrize("group_size", [32, 64, 128, 256])
def test_the_weights(device: str, group_size: int) -> None:
    """A row with a single 1 gives the weights of an input, exactly."""
    outputs, inputs = 32, 256
    codes, packed, scale_and_zero = draw(outputs, inputs, group_size, device)
    scale, zero = scale_and_zero.cpu().double().transpose(0, 1).repeat_interleave(group_size, 1).unbind(-1)
    expected = ((codes - 8) * scale + zero).bfloat16()
    found = torch_ops.packed_linear(torch.eye(inputs, device=device).bfloat16(), packed, scale_and_zero, group_size)
    compare.assert_same(found, expected.T, "weights")


@CUDA_ONLY
@pytest.mark.sanitize
@pytest.mark.parametrize("group_size", [32, 64, 128, 256])
@pytest.mark.parametrize(("outputs", "inputs"), [(16, 256), (48, 1024), (112, 4352), (1024, 14336)])
def test_bits_of_pytorch(outputs: int, inputs: int, group_size: int) -> None:
    _, packed, scale_and_zero = draw(outputs, inputs, group_size, "cuda")
    for rows in (1, 2, 7, 8, 9, 15, 16, 17, 40):
        for magnitude in (1.0, 1e-3, 100.0):
            x = (torch.randn(rows, inputs, device="cuda") * magnitude).bfloat16()
            expected = torch.ops.aten._weight_int4pack_mm(x, packed, group_size, scale_and_zero)
            found = torch_ops.packed_linear(x, packed, scale_and_zero, group_size)
            compare.assert_same(found, expected.cpu(), f"{rows} rows, {magnitude}")


def test_opcheck(device: str) -> None:
    _, packed, scale_and_zero = draw(16, 128, 32, device)
    for rows in (0, 3):
        x = torch.randn(rows, 128, device=device).bfloat16()
        torch.library.opcheck(torch_ops.packed_linear.default, (x, packed, scale_and_zero, 32))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.ones(128).bfloat16()}, r"`x` must be \[rows, inputs\].*, got \[128\]"),
        ({"x": torch.ones(1, 128)}, "`x` must be .*bfloat16.*, got .*float32"),
        ({"x": torch.ones(1, 64).bfloat16()}, "`x` must be .*multiple of 128 inputs.*, got .*64"),
        ({"codes": torch.zeros(2, 2, 32, 4).int()}, r"`codes` must be \[.*, 1, 32, 4\].*, got \[2, 2, 32, 4\]"),
        ({"group_size": 48}, "`group_size` must be 32, 64, 128 or 256 and divide the 128 inputs, got 48"),
        ({"group_size": 256}, "`group_size` must be 32, 64, 128 or 256 and divide the 128 inputs, got 256"),
        (
            {"scale_and_zero": torch.ones(1, 16, 2).bfloat16()},
            r"`scale_and_zero` must be \[4, 16, 2\].*, got \[1, 16, 2\]",
        ),
    ],
)
def test_what_is_refused(device: str, change: dict[str, Any], message: str) -> None:
    _, packed, scale_and_zero = draw(16, 128, 32, device)
    x = torch.ones(1, 128, device=device).bfloat16()
    call = {"x": x, "codes": packed, "scale_and_zero": scale_and_zero, "group_size": 32} | change
    call = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in call.items()}
    with pytest.raises(REFUSED, match=f"packed_linear: {message}"):
        torch_ops.packed_linear(**call)


@CUDA_ONLY
@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("codes", lambda x: x[:1], r"`codes` must be \[any, 1, 32, 4\], an even number of tiles, int32, got"),
        ("codes", lambda x: x.float(), "`codes` must be .* int32, got .* float32"),
        ("codes", lambda x: x.cpu(), "`codes` must be on the device of `x`, got another device"),
        ("scale_and_zero", lambda x: x.half(), "`scale_and_zero` must be .* bfloat16, got .* float16"),
        ("x", lambda x: x.repeat(1, 2)[:, ::2], "`x` must be contiguous"),
        ("x", lambda x: torch.cat((x[0], x[0]))[1:129][None], "`x` must start at a multiple of 16 bytes"),
    ],
)
def test_what_the_kernel_refuses(name: str, change: Callable[[Tensor], Tensor], message: str) -> None:
    _, packed, scale_and_zero = draw(16, 128, 32, "cuda")
    call: dict[str, Any] = {"x": torch.ones(1, 128, device="cuda").bfloat16(), "codes": packed}
    call |= {"scale_and_zero": scale_and_zero, "group_size": 32}
    with pytest.raises(REFUSED, match=f"packed_linear: {message}"):
        torch_ops.packed_linear(**call | {name: change(call[name])})
