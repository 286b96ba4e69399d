"""One token of layers with states as one kernel each: what it computes, where it stands in, and where it does not."""

from __future__ import annotations

import importlib
import logging
import threading
from typing import Any

import models
import pytest
import torch
from cases import REFUSED
from torch import Tensor
from transformers import DynamicCache

from hf_kvquant import patched
from hf_kvquant.graphs import state_steps
from hf_kvquant.graphs.fusion import fused
from hf_kvquant.graphs.state_steps import CONV, DELTA, REPLACED, SlotStates, takes_slots
from hf_kvquant.graphs.trials import is_close
from hf_kvquant.spec import state_steps as reference
from hf_kvquant.state import notes_on
from hf_kvquant.upstream.releases import HAS_STATES, with_cache

if not HAS_STATES:
    pytest.skip("states need transformers 5.24", allow_module_level=True)

CUDA_ONLY = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
OPS = torch.ops.hf_kvquant
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
STATE_DTYPES = [torch.float32, torch.float16]
# Heads of queries and keys, and of values; channels of a key, and of a value.
SHAPES = [(2, 4, 128, 128), (1, 1, 64, 64), (3, 3, 256, 40), (2, 2, 8, 8), (1, 2, 24, 33), (4, 8, 32, 96)]
# Modules of transformers that have the functions.
MODULES = ["qwen3_next", "qwen3_5", "qwen3_5_moe", "olmo_hybrid"]
# With states in float16, one of them: they have the same rule.
RULES = [*((name, torch.float32) for name in MODULES), ("qwen3_5", torch.float16)]


def theirs(name: str, function: str) -> Any:
    """A function of a model of transformers, in PyTorch, without what chooses a package."""
    found: Any = getattr(importlib.import_module(f"transformers.models.{name}.modeling_{name}"), function)
    return found.__wrapped__


def delta_inputs(
    shape: tuple[int, ...], batch: int = 3, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> list[Tensor]:
    """Query, key and value as slices of one projection, g, beta and the state of a step."""
    k_heads, heads, key_dim, value_dim = shape
    sizes = [k_heads * key_dim, k_heads * key_dim, heads * value_dim]
    rows = torch.randn(batch, 1, sum(sizes), device=device).to(dtype).split(sizes, dim=-1)
    dims = (k_heads, key_dim), (k_heads, key_dim), (heads, value_dim)
    vectors = [row.unflatten(-1, dim) for row, dim in zip(rows, dims, strict=True)]
    g = -torch.randn(batch, 1, heads, device=device).square()
    beta = torch.randn(batch, 1, heads, device=device).sigmoid().to(dtype)
    return [*vectors, g, beta, torch.randn(batch, heads, key_dim, value_dim, device=device)]


def conv_inputs(
    state_len: int = 4, width: int = 4, batch: int = 3, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> list[Tensor]:
    """The new inputs of 72 channels, as a slice of more; their state, and a weight."""
    x = torch.randn(batch, 1, 80, device=device).to(dtype)[..., :72].transpose(1, 2)
    made = torch.randn(batch, 72, state_len, device=device), torch.randn(72, width, device=device)
    return [x, *(each.to(dtype) for each in made)]


# --- what it computes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("normalizes", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("name", "state_dtype"), RULES, ids=str)
def test_the_delta_rule_is_that_of_transformers(
    name: str, shape: tuple[int, ...], normalizes: bool, state_dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    *vectors, state = delta_inputs(shape)
    state = state.to(state_dtype)
    query, key, value, g, beta = vectors
    expected_out, expected = theirs(name, DELTA)(query, key, value, g, beta, state, True, normalizes)
    target = torch.empty_like(state)
    out = reference.delta_step(*vectors, state, target, normalizes, None, None)
    torch.testing.assert_close((out, target), (expected_out, expected.to(state_dtype)))


@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize(("state_len", "width"), [(4, 4), (3, 4), (2, 2), (8, 3), (1, 1)])
@pytest.mark.parametrize("name", [*MODULES, "lfm2", "lfm2_moe"])
def test_the_convolution_is_that_of_transformers(name: str, state_len: int, width: int, activation: str | None) -> None:
    torch.manual_seed(0)
    x, state, weight = conv_inputs(state_len, width)
    for bias in (None, torch.randn(72)):
        ours, expected_state = state.clone(), state.clone()
        expected = theirs(name, CONV)(x, expected_state, weight, bias, activation)
        out = reference.conv_step(x, ours, weight, bias, activation == "silu", None, None)
        torch.testing.assert_close((out, ours), (expected, expected_state))


def test_states_in_slots() -> None:
    """Of seven slots, three are read and three are written, others than these."""
    torch.manual_seed(0)
    read, write = torch.tensor([5, 0, 2]), torch.tensor([5, 6, 1])
    *vectors, state = delta_inputs(SHAPES[0])
    slots = torch.randn(7, *state.shape[1:])
    before, target = slots.clone(), torch.empty_like(state)
    expected = reference.delta_step(*vectors, before[read], target, True, None, None)
    assert torch.equal(reference.delta_step(*vectors, slots, slots, True, read, write), expected)
    assert torch.equal(slots[write], target)
    others = [0, 2, 3, 4]
    assert torch.equal(slots[others], before[others])
    x, _, weight = conv_inputs()
    slots = torch.randn(7, 72, 4)
    before, state = slots.clone(), slots[read]
    expected = reference.conv_step(x, state, weight, None, True, None, None)
    assert torch.equal(reference.conv_step(x, slots, weight, None, True, read, write), expected)
    assert torch.equal(slots[write], state) and torch.equal(slots[others], before[others])


def error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected).abs().max())


def test_states_beyond_float16_become_its_largest_number(device: str) -> None:
    """A state grows by 2 times the values; what is NaN stays NaN."""
    heads, largest = 2, torch.finfo(torch.float16).max
    for dim in (8, 128):
        query = key = torch.zeros(64, 1, heads, dim, device=device)
        key[..., 0] = 1
        value = torch.full_like(key, 3e4)
        value[..., 1] *= -1
        g, beta = (torch.full((64, 1, heads), each, device=device) for each in (0.0, 2.0))
        state = torch.zeros(64, heads, dim, dim, device=device)
        state[:, :, 0, 0], state[:, :, 1, 2] = -5e4, torch.nan
        state, new = state.half(), state.half()
        OPS.delta_step(query, key, value, g, beta, state, new, False, None, None)
        row = torch.full((dim,), 6e4)
        row[:3] = torch.tensor([largest, -6e4, torch.nan])
        assert torch.equal(new[:, :, 0].cpu().nan_to_num(7), row.half().nan_to_num(7).expand(64, heads, dim))
        assert new[:, :, 1, 2].isnan().all() and not new[:, :, 1:, :2].any()


@CUDA_ONLY
@pytest.mark.parametrize("state_dtype", STATE_DTYPES, ids=str)
@pytest.mark.parametrize("normalizes", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("batch", [1, 3, 70])
def test_the_kernel_of_the_delta_rule(
    batch: int, shape: tuple[int, ...], dtype: torch.dtype, normalizes: bool, state_dtype: torch.dtype
) -> None:
    """Against float64, at most twice PyTorch's own error, and a rounding of the largest."""
    torch.manual_seed(0)
    *vectors, state = delta_inputs(shape, batch, dtype, "cuda")
    state = state.to(state_dtype)
    wide = [x.double() for x in (*vectors, state)]
    target = torch.empty_like(wide[-1])
    exact = reference.delta_step(*wide, target, normalizes, None, None), target
    like = torch.empty_like(state)
    own = reference.delta_step(*vectors, state, like, normalizes, None, None), like
    slots = torch.full((2 * batch + 1, *state.shape[1:]), torch.nan, dtype=state_dtype, device="cuda")
    read, write = torch.randperm(2 * batch + 1, device="cuda")[: 2 * batch].view(2, batch)
    slots[read] = state
    untouched = slots.clone()
    new = torch.empty_like(state)
    actual = OPS.delta_step(*vectors, state, new, normalizes, None, None), new
    for x, y, z, what in zip(actual, own, exact, ("out", "state"), strict=True):
        bound = 2 * error(y, z) + 8 * torch.finfo(y.dtype).eps * float(z.abs().max())
        assert x.dtype == y.dtype and error(x, z) <= bound, what
    out = OPS.delta_step(*vectors, slots, slots, normalizes, read, write)
    assert torch.equal(out, actual[0]) and torch.equal(slots[write], new)
    assert torch.equal(OPS.delta_step(*vectors, state, state, normalizes, None, None), out) and torch.equal(state, new)
    kept = torch.ones(len(slots), dtype=torch.bool, device="cuda").index_fill(0, write, False)
    assert torch.equal(slots[kept].nan_to_num(7), untouched[kept].nan_to_num(7))


def shifted(x: Tensor, count: int) -> Tensor:
    """A copy of rows, each with `count` numbers before it that belong to nobody."""
    rows = x.new_zeros(len(x), x[0].numel() + count)[:, count:]
    return rows.unflatten(-1, x.shape[1:]).copy_(x)


@pytest.mark.parametrize("state_dtype", STATE_DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_states_and_vectors_begin_anywhere(
    device: str, count: int, dtype: torch.dtype, state_dtype: torch.dtype
) -> None:
    """Kernels that load many numbers at once need states that begin at 8 or 16 bytes; others serve the rest."""
    torch.manual_seed(0)
    *vectors, state = delta_inputs(SHAPES[0], 70, dtype, device)
    state = state.to(state_dtype)
    expected_state = torch.empty_like(state)
    expected = OPS.delta_step(*vectors, state, expected_state, True, None, None)
    *vectors, state = (shifted(x, count) for x in (*vectors, state))
    target = shifted(torch.zeros_like(state), count)
    for new in (target, state):
        out = OPS.delta_step(*vectors, state, new, True, None, None)
        assert is_close((out, new), (expected, expected_state))
        assert not new.as_strided((70, count), (new.stride(0), 1), 0).any(), "nothing else is written"


@CUDA_ONLY
@pytest.mark.parametrize("state_dtype", STATE_DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES[:2], ids=str)
def test_a_captured_kernel_of_the_delta_rule(shape: tuple[int, ...], state_dtype: torch.dtype) -> None:
    """Slots and vectors are those of the replay."""
    torch.manual_seed(0)
    given = delta_inputs(shape, 3, torch.bfloat16, "cuda")
    vectors, slots, graph = given[:-1], given[-1].to(state_dtype), torch.cuda.CUDAGraph()
    read, write = torch.arange(3, device="cuda").repeat(2, 1)
    OPS.delta_step(*vectors, slots, slots, True, read, write)  # what is done once cannot be captured
    with torch.cuda.graph(graph):
        out = OPS.delta_step(*vectors, slots, slots, True, read, write)
    for order in ([2, 0, 1], [1, -1, 0]):
        for x, new in zip(vectors, delta_inputs(shape, 3, torch.bfloat16, "cuda")[:-1], strict=True):
            x.copy_(new)
        for x in (read, write):
            x.copy_(torch.tensor(order))
        expected_slots = slots.clone()
        expected = OPS.delta_step(*vectors, expected_slots, expected_slots, True, read, write)
        graph.replay()
        assert torch.equal(out, expected) and torch.equal(slots, expected_slots)


@CUDA_ONLY
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("state_len", "width"), [(4, 4), (3, 4), (8, 3), (1, 1)])
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("has_silu", [True, False])
def test_the_kernel_of_the_convolution(
    state_len: int, width: int, dtype: torch.dtype, has_bias: bool, has_silu: bool
) -> None:
    torch.manual_seed(0)
    x, state, weight = conv_inputs(state_len, width, 70, dtype, "cuda")
    bias = torch.randn(72, device="cuda").to(dtype) if has_bias else None
    expected_state, new = state.clone(), state.clone()
    expected = reference.conv_step(x, expected_state, weight, bias, has_silu, None, None)
    actual = OPS.conv_step(x, new, weight, bias, has_silu, None, None)
    assert is_close(actual, expected) and torch.equal(new, expected_state)
    slots = torch.full((141, 72, state_len), torch.nan, dtype=dtype, device="cuda")
    read, write = torch.randperm(141, device="cuda")[:140].view(2, 70)
    slots[read] = state
    assert torch.equal(OPS.conv_step(x, slots, weight, bias, has_silu, read, write), actual)
    assert torch.equal(slots[write], expected_state) and torch.equal(slots[read], state)


@CUDA_ONLY
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("channels", [1, 70, 71, 600])
def test_a_convolution_of_any_layout(channels: int, dtype: torch.dtype) -> None:
    """Inputs side by side or apart, at odd addresses, and states that begin anywhere."""
    torch.manual_seed(0)
    rows = torch.randn(3, 1, 2 * channels + 2, device="cuda").to(dtype)
    numbers = torch.randn(2, 3, 4 * channels + 1, device="cuda").to(dtype)
    states = numbers[0, :, :-1].unflatten(1, (channels, 4)), numbers[1, :, 1:].unflatten(1, (channels, 4))
    weights = torch.randn(channels, 4, device="cuda").to(dtype)
    for x in (rows[..., :channels], rows[..., 1 : channels + 1], rows[..., : 2 * channels : 2]):
        x = x.transpose(1, 2)
        for state in states:
            expected_state, held = state.clone(), state.clone()
            expected = reference.conv_step(x, expected_state, weights, None, True, None, None)
            slots = numbers.new_full((3, 4 * channels + 1), torch.nan)[:, :-1].unflatten(1, (channels, 4))
            for new in (held, slots.copy_(state)):
                assert is_close(OPS.conv_step(x, new, weights, None, True, None, None), expected)
                assert torch.equal(new, expected_state)


@CUDA_ONLY
@pytest.mark.parametrize("state_dtype", STATE_DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_slots_that_do_not_exist_are_zero_and_not_written(shape: tuple[int, ...], state_dtype: torch.dtype) -> None:
    *vectors, state = delta_inputs(shape, 2, device="cuda")
    state = state.to(state_dtype)
    slots, before = state.clone(), state.clone()
    bad = torch.tensor([-1, 2], device="cuda")
    expected = OPS.delta_step(*vectors, torch.zeros_like(state), torch.empty_like(state), True, None, None)
    assert torch.equal(OPS.delta_step(*vectors, slots, slots, True, bad, bad), expected) and torch.equal(slots, before)
    x, state, weight = conv_inputs(batch=2, device="cuda")
    slots, before = state.clone(), state.clone()
    expected = OPS.conv_step(x, torch.zeros_like(state), weight, None, True, None, None)
    assert torch.equal(OPS.conv_step(x, slots, weight, None, True, bad, bad), expected) and torch.equal(slots, before)


def arguments(device: str) -> dict[str, list[Any]]:
    *vectors, state = delta_inputs((1, 2, 8, 8), 2, device=device)
    return {
        "delta_step": [*vectors, state, torch.empty_like(state), True, None, None],
        "conv_step": [*conv_inputs(batch=2, device=device), None, True, None, None],
    }


@pytest.mark.parametrize("name", ["delta_step", "conv_step"])
def test_opcheck(device: str, name: str) -> None:
    torch.library.opcheck(getattr(OPS, name).default, tuple(arguments(device)[name]))


@pytest.mark.parametrize(
    ("name", "index", "change", "message"),
    [
        ("delta_step", 0, lambda x: x[0], "delta_step: `query` must be [any, 1, any, any]"),
        ("delta_step", 1, lambda x: x[:1], "delta_step: `key` must be [2, 1, 1, 8]"),
        ("delta_step", 2, lambda x: x[0], "delta_step: `value` must be [2, 1, any, any]"),
        ("delta_step", 3, lambda x: x[..., :1], "delta_step: `g` must be [2, 1, 2]"),
        ("delta_step", 4, lambda x: x[0], "delta_step: `beta` must be [2, 1, 2]"),
        ("delta_step", 5, lambda x: x[..., :4], "delta_step: `state` must be [any, 2, 8, 8]"),
        ("delta_step", 5, lambda x: x[:1], "delta_step: `target` must have 1 slots like `state`, got 2."),
        ("delta_step", 6, lambda x: x[:, :1], "delta_step: `target` must be [any, 2, 8, 8]"),
        ("conv_step", 0, lambda x: x.repeat(1, 1, 2), "conv_step: `x` must be [any, any, 1]"),
        ("conv_step", 1, lambda x: x[:, :8], "conv_step: `state` must be [any, 72, any]"),
        ("conv_step", 1, lambda x: x[:1], "conv_step: `state` must have 2 sequences like the tokens without slots"),
        ("conv_step", 1, lambda x: x[..., :2].contiguous(), "conv_step: `state` must have from 3 to 8 inputs of each"),
        ("conv_step", 2, lambda x: x[:8], "conv_step: `weight` must be [72, any]"),
    ],
)
def test_shapes_that_do_not_fit(device: str, name: str, index: int, change: Any, message: str) -> None:
    given = arguments(device)[name]
    given[index] = change(given[index])
    with pytest.raises(REFUSED) as raised:
        getattr(OPS, name)(*given)
    # Kernels also name the dtype that is wanted.
    assert str(raised.value).startswith(message.removesuffix("]")), raised.value


@pytest.mark.parametrize("name", ["delta_step", "conv_step"])
def test_slots_that_do_not_fit(device: str, name: str) -> None:
    *given, _, _ = arguments(device)[name]
    slots = torch.zeros(2, dtype=torch.int64, device=device)
    for pair in ((slots, None), (None, slots), (slots[:1], slots), (slots, slots.int())):
        with pytest.raises(REFUSED, match=f"{name}: `(read_slots|write_slots)` "):
            getattr(OPS, name)(*given, *pair)


def test_states_of_other_dtypes_are_refused(device: str) -> None:
    given = arguments(device)["delta_step"]
    given[5] = given[5].bfloat16()
    with pytest.raises(REFUSED, match=r"delta_step: `state` must be .*float32.*, got .*bfloat16."):
        OPS.delta_step(*given)
    given = arguments(device)["delta_step"]
    given[5] = given[5].half()
    expected = r"delta_step: `target` must be (torch\.)?float16 like `state`, got (torch\.)?float32\."
    with pytest.raises(REFUSED, match=expected):
        OPS.delta_step(*given)


def test_heads_that_do_not_fit() -> None:
    given = arguments("cpu")["delta_step"]
    given[2] = given[2][:, :, :1].repeat(1, 1, 3, 1)
    given[0] = given[1] = given[0].repeat(1, 1, 2, 1)
    with pytest.raises(REFUSED, match=r"delta_step: `value` must have a multiple of 2 heads, those of `key`, got 3."):
        OPS.delta_step(*given)


# --- where it stands in -----------------------------------------------------------------------------------------------


def step(model: Any, cache: Any, ids: Tensor) -> Tensor:
    return model(ids, **with_cache(cache)).logits


@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5_text", "olmo_hybrid", "lfm2"])
@torch.no_grad()
def test_a_step_of_a_model(name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """It gives the same logits up to rounding, leaves the states that it should, and afterwards all is as before."""
    calls = count(monkeypatch)
    model, ids = models.family(name), torch.arange(1, 25).view(2, 12)
    namespaces = [vars(importlib.import_module(type(each).__module__)) for each in model.modules()]
    before = [{key: space.get(key) for key in REPLACED} for space in namespaces]
    results = []
    for is_fused in (False, True):
        cache = DynamicCache(config=model.config)
        step(model, cache, ids[:, :8])
        calls.clear()
        with caplog.at_level(logging.INFO, "hf_kvquant"):
            for position in range(8, 12):
                if is_fused:
                    with fused(model):
                        results.append(step(model, cache, ids[:, position : position + 1]))
                else:
                    results.append(step(model, cache, ids[:, position : position + 1]))
        assert bool(calls) == is_fused
    for expected, actual in zip(results[:4], results[4:], strict=True):
        torch.testing.assert_close(actual, expected)
    assert [{key: space.get(key) for key in REPLACED} for space in namespaces] == before
    assert "as one kernel, in another order." in caplog.text
    notes_on(model).fusion = None


def count(monkeypatch: pytest.MonkeyPatch, module: Any = state_steps) -> list[str]:
    """The names of ops that functions of a module call from now on, trials included."""
    calls: list[str] = []

    class Counted:
        def __getattr__(self, name: str) -> Any:
            calls.append(name)
            return getattr(OPS, name)

    monkeypatch.setattr(module, "torch_ops", Counted())
    return calls


def fuse_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let all steps of batches fuse. On a GPU, those of a manager that captures do."""
    from hf_kvquant.batching.runner import Runner

    plain = Runner._forward_process_and_sample

    def with_fusion(self: Any, model: Any, *args: Any) -> None:
        with fused(model):
            plain(self, model, *args)

    monkeypatch.setattr(Runner, "_forward_process_and_sample", with_fusion)


@torch.no_grad()
def test_functions_that_compute_something_else_stay(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = models.family("qwen3_5_text")
    module = importlib.import_module("transformers.models.qwen3_5.modeling_qwen3_5")
    original = getattr(module, DELTA)

    def other(*args: Any, **kwargs: Any) -> Any:
        out, state = original(*args, **kwargs)
        return out * 1.0001, state

    monkeypatch.setattr(module, DELTA, other)
    ids = torch.arange(1, 10).view(1, 9)
    logits = []
    for is_fused in (False, True):
        cache = DynamicCache(config=model.config)
        step(model, cache, ids[:, :8])
        with caplog.at_level(logging.INFO, "hf_kvquant"):
            if is_fused:
                with fused(model):
                    logits.append(step(model, cache, ids[:, 8:]))
            else:
                logits.append(step(model, cache, ids[:, 8:]))
    assert f"captured steps do not run {DELTA} of " in caplog.text and "its results differ." in caplog.text
    torch.testing.assert_close(*logits)
    notes_on(model).fusion = None


@torch.no_grad()
def test_options_and_threads_that_are_not_known_get_the_original() -> None:
    """With states in slots, too: they are gathered for the original, and stored."""
    seen: list[str] = []

    def conv(x: Tensor, state: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        seen.append(CONV)
        state.add_(1)
        return x

    def delta(query: Tensor, key: Tensor, value: Tensor, **kwargs: Any) -> Any:
        seen.append(DELTA)
        return value, kwargs["initial_state"] + 1

    from hf_kvquant.graphs.trials import Chooser

    here, plane, slots = threading.get_ident(), torch.zeros(4, 72, 4), torch.tensor([3, 1])
    x, _, weight = conv_inputs(batch=2)
    for options in ({"activation": "gelu"}, {"activation": None, "cache_seqlens": 1}):
        REPLACED[CONV](Chooser(), conv, here, x, SlotStates(plane, slots, slots), weight, **options)
    REPLACED[CONV](Chooser(), conv, here + 1, x, SlotStates(plane, slots, slots), weight)
    assert plane[:, 0, 0].tolist() == [0, 3, 0, 3]
    *vectors, _ = delta_inputs((1, 2, 8, 8), 2)
    query, key, value, g, beta = vectors
    plane = torch.zeros(4, 2, 8, 8)
    states = SlotStates(plane, slots, slots)
    options = {"g": g, "beta": beta, "initial_state": states, "output_final_state": True}
    changes: list[dict[str, Any]] = [{"scale": 2.0}, {"cu_seqlens": torch.tensor([0, 1])}, {"g": None}]
    for change in changes:
        out, new = REPLACED[DELTA](Chooser(), delta, here, query, key, value, **{**options, **change})
        assert new is states and out is value
    REPLACED[DELTA](Chooser(), delta, here + 1, query, key, value, **options)
    assert plane[:, 0, 0, 0].tolist() == [0, 4, 0, 4]
    assert seen == [CONV] * 3 + [DELTA] * 4


def test_only_the_thread_of_a_step_takes_slots() -> None:
    model = models.family("qwen3_5_text")
    layer = model.model.layers[0].linear_attn
    found = []

    def ask() -> None:
        found.append(takes_slots(layer, REPLACED))

    ask()
    with fused(model):
        ask()
        other = threading.Thread(target=ask)
        other.start()
        other.join()
    ask()
    assert found == [False, True, False, False]
    # Mamba-2 has no such functions.
    mixer = next(each for each in models.family("bamba").modules() if type(each).__name__ == "BambaMixer")
    with fused(models.family("bamba")):
        assert not takes_slots(mixer, REPLACED)


@pytest.mark.parametrize("preset", ["none", "int8"])
@pytest.mark.parametrize("name", ["qwen3_next", "olmo_hybrid", "lfm2"])
def test_batches_leave_states_in_their_slots(name: str, preset: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, captured steps do. Here steps are told to, and every request gets the tokens of `generate`."""
    from test_batching import PROMPTS, alone, batched

    calls = count(monkeypatch)
    fuse_batches(monkeypatch)
    with patched(models.family(name), preset) as model:
        expected = [alone(model, prompt) for prompt in PROMPTS]
        assert batched(model, PROMPTS) == expected
        assert calls
        notes_on(model).fusion = None


@torch.no_grad()
def test_a_trial_has_few_sequences() -> None:
    """However many a step has: PyTorch's version would hold all of their states several times."""
    from hf_kvquant.graphs.trials import Chooser

    original, seen, chooser, here = theirs("qwen3_5", DELTA), [], Chooser(), threading.get_ident()

    def noted(query: Tensor, *args: Any, **kwargs: Any) -> Any:
        seen.append(len(query))
        return original(query, *args, **kwargs)

    for batch in (9, 7):
        query, key, value, g, beta, state = delta_inputs((1, 2, 8, 8), batch)
        slots = SlotStates(state, torch.arange(batch), torch.arange(batch))
        expected, new = original(query, key, value, g, beta, state.clone(), True, True)
        options = {"g": g, "beta": beta, "output_final_state": True, "use_qk_l2norm_in_kernel": True}
        out, _ = REPLACED[DELTA](chooser, noted, here, query, key, value, initial_state=slots, **options)
        torch.testing.assert_close((out, state), (expected, new))
    assert seen and set(seen) == {4}, "the second step has the layout of the first one's trial"
    assert len(seen) == 4
