"""Weights fetched ahead by captured steps: which ones, and that nothing but their time of arrival changes.

That captured tokens are those of uncaptured steps is tested in `test_capture.py`, on a GPU with this in the graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import compare
import models
import pytest
import torch
from torch import Tensor, nn

from hf_kvquant import KVQuantCache, patched
from hf_kvquant.graphs import prefetch
from hf_kvquant.graphs.fusion import fused
from hf_kvquant.graphs.prefetch import Prefetch
from hf_kvquant.models.hashes import plain_tensors
from hf_kvquant.upstream.releases import with_cache

CUDA_ONLY = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
INT4 = {"preset": "int4-token"}


# --- the op -----------------------------------------------------------------------------------------------------------


def test_opcheck(device: str) -> None:
    torch.library.opcheck(torch.ops.hf_kvquant.prefetch.default, (torch.randn(64, 64, device=device), 4096))


@pytest.mark.parametrize("num_bytes", [0, 1, 128, 16384, 16385, 2**19 - 1, 2**19, 3 * 2**20])
def test_weights_stay_as_they_are(num_bytes: int, device: str) -> None:
    weight = torch.randn(3 * 2**20 // 4, device=device)
    before = weight.clone()
    torch.ops.hf_kvquant.prefetch(weight, num_bytes)
    compare.assert_same(weight, before.cpu(), "weight")


@pytest.mark.parametrize(
    ("change", "num_bytes", "message"),
    [
        (
            lambda x: x.T,
            0,
            "prefetch: `weight` must be contiguous, got strides that are not. Call .contiguous().",
        ),
        (
            lambda x: x,
            129,
            "prefetch: `num_bytes` must be between 0 and the 128 bytes of `weight`, got 129.",
        ),
        (
            lambda x: x.half()[1:],
            -1,
            "prefetch: `num_bytes` must be between 0 and the 48 bytes of `weight`, got -1.",
        ),
    ],
)
def test_what_is_refused(change: Callable[[Tensor], Tensor], num_bytes: int, message: str, device: str) -> None:
    with pytest.raises(ValueError) as raised:
        torch.ops.hf_kvquant.prefetch(change(torch.randn(4, 8, device=device)), num_bytes)
    assert str(raised.value) == message


# --- which weights ----------------------------------------------------------------------------------------------------


def noted(model: Any, device: str) -> dict[str, str]:
    """By the linear layer before attention, the one behind it, by their names in the model."""
    found = Prefetch(torch.device(device))
    with torch.no_grad(), patched(model, INT4):
        cache = KVQuantCache(model.config, INT4, max_cache_len=32)
        prompt = torch.arange(5, 10, device=device)[None]
        model(prompt, **with_cache(cache))
        with found.noted(), fused(model):
            model(prompt[:, :1], **with_cache(cache))
    names = {
        part.data_ptr(): name.removesuffix(".weight")
        for name, weight in model.named_parameters()
        for part in plain_tensors(weight)
    }
    return {names[before]: names[behind.data_ptr()] for before, behind in found.behind.items()}


@pytest.mark.parametrize(
    ("family", "before", "behind"),
    [
        ("llama", "self_attn.v_proj", "self_attn.o_proj"),
        ("gemma2", "self_attn.v_proj", "self_attn.o_proj"),
        ("phi3", "self_attn.qkv_proj", "self_attn.o_proj"),
        ("qwen3_moe", "self_attn.v_proj", "self_attn.o_proj"),
    ],
)
def test_weights_behind_attention(family: str, before: str, behind: str, device: str) -> None:
    layers = [f"model.layers.{i}" for i in range(2)]
    model = models.on(device, models.family(family))
    assert noted(model, device) == {f"{layer}.{before}": f"{layer}.{behind}" for layer in layers}


def test_models_without_linear_layers_have_none(device: str) -> None:
    assert noted(models.on(device, models.family("gpt2")), device) == {}


def test_weights_that_are_not_plain_or_not_contiguous(device: str) -> None:
    """A weight of another kind may be computed when it is asked for."""

    class Guarded(nn.Parameter):
        pass

    model = models.on(device, models.build("llama"))
    first, second = (layer.self_attn.o_proj for layer in model.model.layers)
    first.weight = Guarded(first.weight.data, requires_grad=False)
    second.weight = nn.Parameter(second.weight.data.T.contiguous().T, requires_grad=False)
    # The next layer that is plain is the MLP's first.
    assert noted(model, device) == {"model.layers.0.self_attn.v_proj": "model.layers.0.mlp.gate_proj"}


def test_quantised_weights(device: str) -> None:
    """Of a weight that wraps several tensors, the codes."""
    quantization = pytest.importorskip("torchao.quantization")
    model = models.on(device, models.build("llama"))
    quantization.quantize_(model.model, quantization.Int8WeightOnlyConfig())
    layers = [f"model.layers.{i}.self_attn" for i in range(2)]
    assert noted(model, device) == {f"{layer}.v_proj": f"{layer}.o_proj" for layer in layers}
    weight = model.model.layers[0].self_attn.o_proj.weight
    assert prefetch._stored(weight) is weight.qdata


def test_operators_that_multiply_with_weights() -> None:
    """Of which some exist on GPUs alone."""
    x, codes, scales = torch.ones(2, 8), torch.ones(4, 8), torch.ones(4, 1)
    weights = {
        "linear": (x, codes),
        "aten._weight_int4pack_mm.default": (x, codes, 32, scales),
        "gemlite.forward_functional.default": (x, None, [codes, scales], []),
        "humming.launch_kernel.default": (None, x, codes, scales),
    }
    for name, given in weights.items():
        assert prefetch._weight_of(name, given) is codes, name
    assert prefetch._weight_of("aten.mm.default", (x, codes)) is None


# --- the branch -------------------------------------------------------------------------------------------------------


def fetches(model: Any, new_tokens: int) -> int:
    """Launches of the kernel in one call of `generate` whose steps are captured already."""
    cache = KVQuantCache(model.config, {**INT4, "capture": True}, max_cache_len=64)
    for _ in range(2):
        cache.reset()
        with torch.profiler.profile(acc_events=True) as profile:
            models.greedy(model, models.left_padded(), new_tokens, **with_cache(cache), output_logits=False)
    return sum(event.count for event in profile.key_averages() if "prefetch_lines" in event.key)


@CUDA_ONLY
def test_a_captured_step_fetches_a_weight_a_layer() -> None:
    model = models.on("cuda", models.build("llama"))
    with patched(model, {**INT4, "capture": True, "max_cache_len": 64}):
        assert fetches(model, 10) == 9 * 2


@CUDA_ONLY
def test_no_more_than_its_share_of_the_l2_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(torch.ops.hf_kvquant, "prefetch", lambda weight, num_bytes: asked.append(num_bytes))
    monkeypatch.setattr(prefetch, "MAX_PART_OF_L2", 1e-6)
    model = models.on("cuda", models.build("llama"))
    with patched(model, {**INT4, "capture": True, "max_cache_len": 64}):
        fetches(model, 5)
    most = int(torch.cuda.get_device_properties(0).L2_cache_size * 1e-6)
    assert asked == [most, most]
