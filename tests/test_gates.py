"""Gates of the gated delta rule by one kernel: what it computes, where it stands in, and where it does not."""

from __future__ import annotations

import copy
import importlib
import logging
import math
from collections.abc import Callable
from typing import Any

import models
import pytest
import torch
import torch.nn.functional as F
from cases import REFUSED
from test_state_steps import CUDA_ONLY, count, step
from torch import Tensor, nn
from transformers import DynamicCache

from hf_kvquant.graphs import gates
from hf_kvquant.graphs.fusion import fused
from hf_kvquant.graphs.gates import Gate, computed, deferred
from hf_kvquant.graphs.state_chunks import DELTA_CHUNKS
from hf_kvquant.graphs.trials import Chooser
from hf_kvquant.spec import state_steps as reference
from hf_kvquant.state import notes_on
from hf_kvquant.upstream.releases import HAS_STATES

if not HAS_STATES:
    pytest.skip("states need transformers 5.24", allow_module_level=True)

OPS = torch.ops.hf_kvquant
# Families, the names of their projections, and what betas are multiplied by.
FAMILIES = [
    ("qwen3_5_text", "in_proj_a in_proj_b", 1.0),
    ("qwen3_5_moe_text", "in_proj_a in_proj_b", 1.0),
    ("olmo_hybrid", "a_proj b_proj", 2.0),
]


def gated_layer(model: Any) -> Any:
    return next(module for module in model.modules() if gates.has_gates(module))


def operands(
    rows: int, heads: int, inputs: int, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> list[Tensor]:
    """Tokens as slices of longer rows, weights whose products are about 1, and what the gates add."""
    x = torch.randn(1, rows, inputs + 64, device=device).to(dtype)[..., :inputs]
    weights = (torch.randn(2, heads, inputs, device=device) / math.sqrt(inputs)).to(dtype)
    rates = torch.empty(heads, device=device).uniform_(0.01, 16).log()
    return [x, *weights, rates, torch.randn(heads, device=device).to(dtype)]


# --- what it computes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("name", "projections", "factor"), FAMILIES)
@torch.no_grad()
def test_gates_are_those_of_transformers(
    name: str, projections: str, factor: float, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = copy.deepcopy(gated_layer(models.family(name))).to(dtype)
    seen: dict[str, Tensor] = {}

    def noted(query: Tensor, key: Tensor, value: Tensor, **kwargs: Any) -> tuple[Tensor, None]:
        seen.update(kwargs)
        return value, None

    monkeypatch.setattr(importlib.import_module(type(layer).__module__), DELTA_CHUNKS, noted)
    x = torch.randn(2, 5, layer.hidden_size, generator=torch.Generator().manual_seed(0)).to(dtype)
    layer(x)
    weights = [getattr(layer, each).weight for each in projections.split()]
    g, beta = reference.delta_gates(x, *weights, layer.A_log, layer.dt_bias, factor)
    assert torch.equal(g, seen["g"]) and torch.equal(beta, seen["beta"])


def error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected).abs().max())


@CUDA_ONLY
@pytest.mark.parametrize("factor", [1.0, 2.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("inputs", [32, 96, 1312, 2560])
@pytest.mark.parametrize("heads", [1, 8, 12, 48])
@pytest.mark.parametrize("rows", [1, 15, 16, 70, 1000])
def test_the_kernel(rows: int, heads: int, inputs: int, dtype: torch.dtype, factor: float) -> None:
    """Against float64, at most twice PyTorch's own error, and a rounding of the largest."""
    torch.manual_seed(0)
    given = operands(rows, heads, inputs, dtype, "cuda")
    given[0][:, -1] *= 100  # beyond what softplus bends
    exact = reference.delta_gates(*(x.double() for x in given), factor)
    own = reference.delta_gates(*given, factor)
    actual = OPS.delta_gates(*given, factor)
    for x, y, z, what in zip(actual, own, exact, ("g", "beta"), strict=True):
        bound = 2 * error(y, z) + 8 * torch.finfo(dtype).eps * float(z.abs().max())
        assert (x.shape, x.dtype) == (y.shape, y.dtype) and error(x, z) <= bound, what
    again = OPS.delta_gates(given[0].contiguous(), *given[1:], factor)
    assert all(map(torch.equal, actual, again))
    few = OPS.delta_gates(given[0][:, rows // 2 : rows // 2 + 1], *given[1:], factor)
    for x, y in zip(few, actual, strict=True):
        assert torch.equal(x[:, 0], y[:, rows // 2]), "a row is independent of the others"


def test_opcheck(device: str) -> None:
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    torch.library.opcheck(OPS.delta_gates.default, (*operands(3, 2, 32, dtype, device), 1.0))


@pytest.mark.parametrize(
    ("index", "change", "message"),
    [
        (0, lambda x: x[0], r"`x` must be \[any, any, any\]"),
        (1, lambda x: x[0], r"`decay_weight` must be \[(any|-1), 32\]"),
        (1, lambda x: x[:, :16], r"`decay_weight` must be \[(any|2), 32\]"),
        (2, lambda x: x[:1], r"`beta_weight` must be \[2, 32\]"),
        (2, lambda x: x.double(), r"`beta_weight` must be .*, got .*[dD]ouble|`beta_weight` must be .*float64"),
        (3, lambda x: x[:1], r"`A_log` must be \[2\]"),
        (4, lambda x: x[:1], r"`dt_bias` must be \[2\]"),
    ],
)
def test_operands_that_do_not_fit(device: str, index: int, change: Any, message: str) -> None:
    given = operands(3, 2, 32, torch.float32 if device == "cpu" else torch.bfloat16, device)
    given[index] = change(given[index])
    with pytest.raises(REFUSED, match=f"delta_gates: {message}"):
        OPS.delta_gates(*given, 1.0)


@CUDA_ONLY
@pytest.mark.parametrize(
    ("index", "change", "message"),
    [
        (0, lambda x: x.float(), "`x` must be float16 or bfloat16, got "),
        (0, lambda x: x[..., :24], "`x` must have a multiple of 32 inputs, got 24. Use the model's own functions."),
        (0, lambda x: x[..., 4:36], "`x` must start at a multiple of 16 bytes, got a view that does not."),
        (1, lambda x: x.t().contiguous().t(), "`decay_weight` must be contiguous"),
    ],
)
def test_what_the_kernel_does_not_take(index: int, change: Any, message: str) -> None:
    given = operands(3, 2, 64, torch.bfloat16, "cuda")
    given[0], given[1:3] = given[0][..., :40], [x[:, :32].contiguous() for x in given[1:3]]
    if index != 0 or "24" in message:
        given[0] = given[0][..., :32]
    given[index] = change(given[index])
    with pytest.raises(REFUSED) as raised:
        OPS.delta_gates(*given, 1.0)
    assert str(raised.value).startswith(f"delta_gates: {message}"), raised.value


# --- where it stands in -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*(name for name, *_ in FAMILIES), "qwen3_next"])
@torch.no_grad()
def test_steps_and_prompts_of_a_model(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same logits up to rounding, and afterwards all is as before. One projection for both gates stays."""
    calls = count(monkeypatch, gates)
    model, ids = models.family(name), torch.arange(1, 25).view(2, 12)
    before = [dict(vars(module)) for module in model.modules()]
    results = []
    for is_fused in (False, True):
        cache = DynamicCache(config=model.config)
        calls.clear()
        for tokens in (ids[:, :8], ids[:, 8:9], ids[:, 9:10]):
            if is_fused:
                with fused(model), fused(model):  # as nested captures would
                    results.append(step(model, cache, tokens))
            else:
                results.append(step(model, cache, tokens))
        assert bool(calls) == (is_fused and name != "qwen3_next")
    for expected, actual in zip(results[:3], results[3:], strict=True):
        torch.testing.assert_close(actual, expected)
    assert [dict(vars(module)) for module in model.modules()] == before
    notes_on(model).fusion = None


class Layer(nn.Module):
    """A layer that makes its gates by a function of its own."""

    def __init__(self, make: Callable[[Any, Any, Any, Any], tuple[Any, Any]]) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(32, 4, bias=False), nn.Linear(32, 4, bias=False)
        self.A_log, self.dt_bias = nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(4))
        self.make = make

    def forward(self, x: Tensor) -> tuple[Any, Any]:
        return self.make(self, self.a(x), self.b(x), self.A_log)


def usual(layer: Any, a: Any, b: Any, a_log: Any) -> tuple[Any, Any]:
    return -a_log.float().exp() * F.softplus(a.float() + layer.dt_bias), b.sigmoid()


def read_before(layer: Any, a: Any, b: Any, a_log: Any) -> tuple[Any, Any]:
    assert a.shape == b.shape == (2, 3, 4) and len(a) == 2 and torch.cat([a, b]).shape == (4, 3, 4)
    return usual(layer, a, b, a_log)


def changed_in_place(layer: Any, a: Any, b: Any, a_log: Any) -> tuple[Any, Any]:
    a.add_(1)
    return usual(layer, a, b, a_log)


def result_changed_in_place(layer: Any, a: Any, b: Any, a_log: Any) -> tuple[Any, Any]:
    g, beta = usual(layer, a, b, a_log)
    g.add_(1)
    return g, beta


SERVED = {
    "usual": usual,
    "in another order": lambda layer, a, b, a_log: (
        F.softplus(layer.dt_bias + a.float()) * a_log.float().exp().neg(),
        torch.sigmoid(b) * 2.0,
    ),
}
OTHERS = {
    "exchanged": lambda layer, a, b, a_log: usual(layer, a, a, a_log),
    "tanh": lambda layer, a, b, a_log: (usual(layer, a, b, a_log)[0], b.tanh()),
    "more": lambda layer, a, b, a_log: (usual(layer, a, b, a_log)[0] + 1, b.sigmoid()),
    "no rate": lambda layer, a, b, a_log: (-F.softplus(a + layer.dt_bias), b.sigmoid()),
    "threshold": lambda layer, a, b, a_log: (
        -a_log.exp() * F.softplus(a + layer.dt_bias, threshold=0.5),
        b.sigmoid(),
    ),
    "both": lambda layer, a, b, a_log: (usual(layer, a + b, b, a_log)[0], b.sigmoid()),
    "parts": lambda layer, a, b, a_log: (usual(layer, a, b, a_log)[0] / 2, b[..., :4].sigmoid() ** 2 - 1),
    "read before": read_before,
    "in place": changed_in_place,
    "result in place": result_changed_in_place,
    "a tensor": lambda layer, a, b, a_log: (torch.zeros(2, 3, 4), b.sigmoid()),
}


@pytest.mark.parametrize("name", [*SERVED, *OTHERS])
@torch.no_grad()
def test_what_a_layer_makes_of_gates(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls = count(monkeypatch, gates)
    caplog.set_level(logging.INFO, "hf_kvquant")
    torch.manual_seed(0)
    layer, x = Layer({**SERVED, **OTHERS}[name]), torch.randn(2, 3, 32)
    expected, before = layer(x), layer.A_log.clone()
    with deferred(layer, lambda: True):
        actual = computed(Chooser(), *layer(x))
    assert type(layer.A_log) is nn.Parameter and torch.equal(layer.A_log, before)
    assert all(type(each) is Tensor for each in actual)
    torch.testing.assert_close(actual, expected)
    # A trial, or not even that: its kernel takes two projections and a rate.
    assert bool(calls) == (name in SERVED or name in ("more", "threshold"))
    logged = "captured steps run gates of " in caplog.text
    assert logged == (name in SERVED)


@torch.no_grad()
def test_every_layer_has_its_own_weights() -> None:
    """Layers of one kind share a trial."""
    chooser, x = Chooser(), torch.randn(2, 3, 32)
    for seed in range(3):
        torch.manual_seed(seed)
        layer = Layer(usual)
        layer.layer_idx = seed
        expected = layer(x)
        with deferred(layer, lambda: True):
            torch.testing.assert_close(computed(chooser, *layer(x)), expected)
    assert len(chooser._choices) == 1


@torch.no_grad()
def test_where_nobody_takes_gates() -> None:
    layer, x = Layer(usual), torch.randn(2, 3, 32)
    expected = layer(x)
    with deferred(layer, lambda: False):
        g, beta = layer(x)
        assert isinstance(g, Gate) and isinstance(layer.a(x), Tensor)  # of `A_log` alone
        assert all(map(torch.equal, computed(Chooser(), g, beta), expected))
    layer.a.register_forward_hook(lambda *_: None)
    assert not gates.has_gates(layer)
    for changed in (nn.Linear(32, 4), nn.Linear(32, 5, bias=False)):
        layer = Layer(usual)
        layer.b = changed
        assert not gates.has_gates(layer)
