"""Fused kernels of a captured step: the bits of what they stand for, used where that is so, and gone afterwards.

On a CPU the definitions in `reference.py` stand in for the kernels, so that what is recognised, replaced and put back
is tested there too; which bits the kernels give, a GPU has to say.
"""

from __future__ import annotations

import copy
import logging
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import compare
import models
import pytest
import torch
from cases import REFUSED
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.llama import modeling_llama

from hf_kvquant import ops
from hf_kvquant.graphs.fusion import fused
from hf_kvquant.graphs.trials import random_like
from hf_kvquant.spec import reference
from hf_kvquant.state import notes_on
from hf_kvquant.upstream.releases import HAS_STATES

NEEDS_STATES = pytest.mark.skipif(not HAS_STATES, reason="states need transformers 5.24")
CUDA_ONLY = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
HALVES = [torch.bfloat16, torch.float16]
DTYPES = [*HALVES, torch.float32]
FUSED = torch.ops.hf_kvquant


def randn(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cuda", scale: float = 1.0) -> Tensor:
    return (scale * torch.randn(shape, device=device)).to(dtype)


def same_bits(actual: Any, expected: Any, what: str) -> None:
    compare.assert_same(actual, expected.cpu(), what)
    assert torch.equal(actual.signbit(), expected.signbit()), what


# --- the kernels ------------------------------------------------------------------------------------------------------


@CUDA_ONLY
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("channels", [128, 256, 1536, 2048, 2560, 4096, 5120, 7168, 8192, 14336])
@pytest.mark.parametrize("rows", [1, 2, 8, 33, 64, 2048])
def test_rms_norm_sums_rows_as_torch_does(rows: int, channels: int, dtype: torch.dtype) -> None:
    for scale in (1.0, 1e-3, 100.0):
        x, weight = randn(rows, channels, dtype=dtype, scale=scale), randn(channels, dtype=dtype)
        what = f"{rows} rows of {channels} {dtype} around {scale}"
        other = randn(rows, channels, dtype=dtype, scale=scale)
        for is_zero_centered in (False, True):
            for gate in (None, other):
                how = None, 1e-6, is_zero_centered, gate
                same_bits(FUSED.rms_norm(x, weight, *how), reference.rms_norm(x, weight, *how), what)
            total, normed = FUSED.add_rms_norm(x, other, weight, 1e-6, is_zero_centered)
            same_bits(total, x + other, f"the sum, {what}")
            expected = reference.rms_norm(x + other, weight, None, 1e-6, is_zero_centered)
            same_bits(normed, expected, f"of the sum, {what}")


@CUDA_ONLY
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(2, 3, 4, 512), (5, 1, 1, 256), (1, 512), (7, 2048)], ids=str)
def test_rms_norm_of_slices(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Queries beside gates: the first half of each row."""
    x = randn(*shape, dtype=dtype).chunk(2, dim=-1)[0]
    weight = randn(x.shape[-1], dtype=dtype)
    for gate in (None, randn(*x.shape, dtype=dtype)):
        actual = FUSED.rms_norm(x, weight, None, 1e-6, True, gate)
        same_bits(actual, reference.rms_norm(x, weight, None, 1e-6, True, gate), str(shape))
        same_bits(actual, FUSED.rms_norm(x.contiguous(), weight, None, 1e-6, True, gate), str(shape))
    mean = x.float().pow(2).mean(-1, keepdim=True)
    same_bits(FUSED.rms_norm(x, weight, mean, 1e-6), reference.rms_norm(x, weight, mean, 1e-6), str(shape))


@CUDA_ONLY
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 1, 4), (3, 2, 5, 64), (2, 100), (2, 16384)], ids=str)
def test_rms_norm_behind_a_mean(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, weight = randn(*shape, dtype=dtype), randn(shape[-1], dtype=dtype)
    mean = x.float().pow(2).mean(-1, keepdim=True)
    for how in ((False, None), (True, None), (False, randn(*shape, dtype=dtype))):
        expected = reference.rms_norm(x, weight, mean, 1e-5, *how)
        same_bits(FUSED.rms_norm(x, weight, mean, 1e-5, *how), expected, str(shape))


@CUDA_ONLY
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("channels", [64, 100, 128])
@pytest.mark.parametrize("heads", [1, 32])
def test_rms_norm_of_many_short_rows(heads: int, channels: int, dtype: torch.dtype) -> None:
    """The heads of a prompt, of which a warp has several."""
    x = randn(40_001 // heads, heads, 2 * channels, dtype=dtype).chunk(2, dim=-1)[0]
    weight, gate = randn(channels, dtype=dtype), randn(*x.shape, dtype=dtype)
    mean = None if channels == 128 else x.float().pow(2).mean(-1, keepdim=True)
    for how in ((False, None), (True, None), (False, gate)):
        same_bits(FUSED.rms_norm(x, weight, mean, 1e-6, *how), reference.rms_norm(x, weight, mean, 1e-6, *how), "rows")


@CUDA_ONLY
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_heads", [(4, 4), (32, 8), (7, 1)], ids=str)
@pytest.mark.parametrize(
    ("head_dim", "rotary_dim"),
    [(64, 64), (80, 80), (96, 96), (128, 128), (256, 256), (6, 6), (256, 64), (128, 64), (80, 10), (6, 2)],
)
def test_rotary(head_dim: int, rotary_dim: int, num_heads: tuple[int, int], dtype: torch.dtype) -> None:
    """Queries and keys as models have them, tokens before heads, and as views of what a fused projection gives."""
    for batch, q_len, cos_batch in ((1, 1, 1), (3, 1, 3), (3, 1, 1), (2, 5, 2)):
        both = randn(batch, q_len, sum(num_heads), head_dim, dtype=dtype)
        split = both.transpose(1, 2).split(num_heads, dim=1)
        cos, sin = (randn(cos_batch, q_len, rotary_dim, dtype=dtype) for _ in range(2))
        for query, key in (split, tuple(x.transpose(1, 2).contiguous().transpose(1, 2) for x in split)):
            actual, expected = FUSED.rotary(query, key, cos, sin), reference.rotary(query, key, cos, sin)
            for x, y, name in zip(actual, expected, ("query", "key"), strict=True):
                same_bits(x, y, f"{name}, batch {batch}, q_len {q_len}")
                assert x.stride() == y.stride() or 1 in y.shape, "a trial would refuse another layout"


@CUDA_ONLY
@pytest.mark.parametrize("offset", [0, 1, 4])
def test_rotary_of_a_long_prompt(offset: int) -> None:
    """More tokens than an axis of a grid has thread blocks, and rows that do not begin where vectors do."""
    both = randn(1, 70_000, 3, 16, dtype=torch.bfloat16)[..., offset : offset + 8].transpose(1, 2)
    cos, sin = randn(2, 1, 70_000, 8, dtype=torch.bfloat16)
    for query, key in (both.split((2, 1), dim=1), both.split((1, 2), dim=1)):
        for x, y in zip(FUSED.rotary(query, key, cos, sin), reference.rotary(query, key, cos, sin), strict=True):
            same_bits(x, y, "rotary")


@CUDA_ONLY
@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_kernel_at_a_small_size(dtype: torch.dtype) -> None:
    for rows, channels in ((3, 132), (17, 4100), (1, 16384)):
        x, other, weight = (randn(*shape, dtype=dtype) for shape in ((rows, channels), (rows, channels), (channels,)))
        mean = x.float().pow(2).mean(-1, keepdim=True)
        expected = reference.add_rms_norm(x, other, weight, 1e-6)
        for actual, y in zip(FUSED.add_rms_norm(x, other, weight, 1e-6), expected, strict=True):
            same_bits(actual, y, f"{rows} rows of {channels}")
        for given in (None, mean):
            actual = FUSED.rms_norm(x, weight, given, 1e-6)
            same_bits(actual, reference.rms_norm(x, weight, given, 1e-6), f"{rows} rows of {channels}")
        same_bits(FUSED.silu_mul(x, other), reference.silu_mul(x, other), f"{rows} rows of {channels}")
    query, key, cos, sin = (
        randn(*shape, dtype=dtype) for shape in ((2, 3, 2, 10), (2, 1, 2, 10), (1, 2, 10), (2, 2, 10))
    )
    for actual, y in zip(FUSED.rotary(query, key, cos, sin), reference.rotary(query, key, cos, sin), strict=True):
        same_bits(actual, y, "rotary")


@CUDA_ONLY
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_silu_of_every_number(dtype: torch.dtype) -> None:
    gate = torch.arange(-(2**15), 2**15, device="cuda").to(torch.int16).view(dtype)
    for up in (torch.ones_like(gate), randn(2**16, dtype=dtype)):
        compare.assert_same(FUSED.silu_mul(gate, up), reference.silu_mul(gate, up).cpu(), str(dtype))


@CUDA_ONLY
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 1, 14336), (64, 1, 14336), (3, 4)], ids=str)
def test_silu_mul(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    gate, up = randn(*shape, dtype=dtype, scale=5.0), randn(*shape, dtype=dtype)
    same_bits(FUSED.silu_mul(gate, up), reference.silu_mul(gate, up), f"{shape} {dtype}")


def arguments(device: str) -> dict[str, tuple[Any, ...]]:
    """Arguments that fit, op by op."""
    x, weight, mean = randn(2, 1, 256, device=device), randn(256, device=device), randn(2, 1, 1, device=device).abs()
    query, key = randn(2, 4, 1, 8, device=device), randn(2, 2, 1, 8, device=device)
    cos, sin = randn(1, 1, 8, device=device), randn(1, 1, 8, device=device)
    return {
        "rms_norm": (x, weight, mean, 1e-6, True, randn(2, 1, 256, device=device)),
        "add_rms_norm": (x, randn(2, 1, 256, device=device), weight, 1e-6),
        "rotary": (query, key, cos, sin),
        "silu_mul": (randn(2, 1, 8, device=device), randn(2, 1, 8, device=device)),
    }


OPS = ["rms_norm", "add_rms_norm", "rotary", "silu_mul"]


@pytest.mark.parametrize("rotary_dim", [4, 8])
def test_the_layout_of_heads_that_are_turned(rotary_dim: int, device: str) -> None:
    """Of tokens in one row, as in batches: that of PyTorch, and of its fake."""
    query, key = (randn(1, 5, heads, 8, device=device).transpose(1, 2) for heads in (4, 2))
    cos, sin = (randn(1, 5, rotary_dim, device=device) for _ in range(2))
    torch.library.opcheck(FUSED.rotary.default, (query, key, cos, sin))
    for x, y in zip(FUSED.rotary(query, key, cos, sin), reference.rotary(query, key, cos, sin), strict=True):
        assert x.stride() == y.stride()


@pytest.mark.parametrize("name", OPS)
def test_opcheck(device: str, name: str) -> None:
    torch.library.opcheck(getattr(FUSED, name).default, arguments(device)[name])


@CUDA_ONLY
def test_empty_calls_do_nothing() -> None:
    for name, given in arguments("cuda").items():
        empty = [x[:0] if isinstance(x, Tensor) and x.shape[0] == 2 else x for x in given]
        out = getattr(FUSED, name)(*empty)
        for x in out if isinstance(out, tuple) else (out,):
            assert x.shape[0] == 0
    x, cos = randn(1, 0, 4, 8), randn(1, 4, 8)
    assert all(out.shape == x.shape for out in FUSED.rotary(x, x, cos, cos)), "no heads"


def check_refused(device: str, name: str, index: int, change: Callable[[Tensor], Any], message: str) -> None:
    changed = list(arguments(device)[name])
    changed[index] = change(changed[index])
    with pytest.raises(REFUSED) as raised:
        getattr(FUSED, name)(*changed)
    assert str(raised.value) == message


@pytest.mark.parametrize(
    ("name", "index", "change", "message"),
    [
        ("rms_norm", 5, lambda x: x[:1], "rms_norm: `gate` must be [2, 1, 256] like `x`, got [1, 1, 256]."),
        ("rms_norm", 1, lambda x: x[:8], "rms_norm: `weight` must be [256] like the channels of `x`, got [8]."),
        (
            "add_rms_norm",
            1,
            lambda x: x[:1],
            "add_rms_norm: `other` must be [2, 1, 256] like `x`, got [1, 1, 256].",
        ),
        ("rotary", 0, lambda x: x[0], "rotary: `query` must be [batch, heads, tokens, head_dim], got [4, 1, 8]."),
        ("rotary", 1, lambda x: x[:1], "rotary: `key` must be [2, heads, 1, 8] like `query`, got [1, 2, 1, 8]."),
        ("rotary", 2, lambda x: x[0], "rotary: `cos` must be [2 or 1, 1, 8] like `query`, got [1, 8]."),
        ("rotary", 2, lambda x: x[..., :4], "rotary: `sin` must be [2 or 1, 1, 4] like `query`, got [1, 1, 8]."),
        (
            "rotary",
            2,
            lambda x: x[..., :3],
            "rotary: `cos` must have an even number of channels, at most 8, got [1, 1, 3]. Use the model's own "
            "function.",
        ),
        ("rotary", 3, lambda x: x[0], "rotary: `sin` must be [2 or 1, 1, 8] like `query`, got [1, 8]."),
        ("silu_mul", 1, lambda x: x[:1], "silu_mul: `up` must be [2, 1, 8] like `gate`, got [1, 1, 8]."),
    ],
)
def test_shapes_that_do_not_fit(
    device: str, name: str, index: int, change: Callable[[Tensor], Any], message: str
) -> None:
    check_refused(device, name, index, change, message)


@CUDA_ONLY
@pytest.mark.parametrize(
    ("name", "index", "change", "message"),
    [
        (
            "rms_norm",
            0,
            lambda x: x.double(),
            "rms_norm: `x` must be float32, float16 or bfloat16, got Double. Load the model in one of these dtypes.",
        ),
        (
            "rms_norm",
            0,
            lambda x: x[..., :10],
            "rms_norm: `x` must have a multiple of 4 channels, at most 16384, got 10. Use the model's own norm.",
        ),
        (
            "rms_norm",
            0,
            lambda x: x.transpose(0, 2).contiguous().transpose(0, 2),
            "rms_norm: `x` must have contiguous rows, equally far apart by a multiple of 4 numbers, got strides "
            "[1, 2, 2]. Call .contiguous().",
        ),
        (
            "rms_norm",
            0,
            lambda x: torch.cat((x.flatten(), x.flatten()))[1:513].view(x.shape),
            "rms_norm: `x` must start at a multiple of 16 bytes, got a view that does not. Call .clone().",
        ),
        (
            "rms_norm",
            1,
            lambda x: x.half(),
            "rms_norm: `weight` must be Float like `x`, got Half. Cast it.",
        ),
        (
            "rms_norm",
            1,
            lambda x: x.cpu(),
            "rms_norm: `weight` must be on the device of `x`, got another device. Move it there.",
        ),
        (
            "rms_norm",
            2,
            lambda x: x[:1],
            "rms_norm: `mean` must be 2 contiguous float32 numbers on the device of `x`, one for each row, got Float "
            "[1, 1, 1].",
        ),
        (
            "rotary",
            0,
            lambda x: x[..., :7],
            "rotary: `query` must have an even head_dim of at most 1024, got 7. Use the model's own function.",
        ),
        (
            "rotary",
            1,
            lambda x: x.repeat(1, 1, 1, 2)[..., ::2],
            "rotary: `key` must have contiguous channels, got stride 2. Call .contiguous().",
        ),
        (
            "rotary",
            2,
            lambda x: x.repeat(1, 1, 2)[..., ::2],
            "rotary: `cos` must have contiguous channels, got stride 2. Call .contiguous().",
        ),
        ("rotary", 3, lambda x: x.half(), "rotary: `sin` must be Float like `query`, got Half. Cast it."),
        ("add_rms_norm", 1, lambda x: x.half(), "add_rms_norm: `other` must be Float like `x`, got Half. Cast it."),
        ("silu_mul", 1, lambda x: x.half(), "silu_mul: `up` must be Float like `gate`, got Half. Cast it."),
    ],
)
def test_what_the_kernels_refuse(name: str, index: int, change: Callable[[Tensor], Any], message: str) -> None:
    check_refused("cuda", name, index, change, message)


@CUDA_ONLY
def test_rows_that_the_kernels_do_not_sum() -> None:
    with pytest.raises(REFUSED) as raised:
        FUSED.rms_norm(randn(2, 64), randn(64), None, 1e-6)
    assert str(raised.value) == (
        "rms_norm: `x` must have at least 128 channels without `mean`, got 64. Give the mean of the squares."
    )
    with pytest.raises(REFUSED) as raised:
        FUSED.silu_mul(randn(3), randn(3))
    assert str(raised.value) == (
        "silu_mul: `gate` must have a multiple of 4 numbers, got 3. Use the model's own functions."
    )


# --- what is replaced -------------------------------------------------------------------------------------------------


class Ops(TorchDispatchMode):
    """Counts the calls into PyTorch."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[str(func).removesuffix(".default")] += 1
        return func(*args, **(kwargs or {}))

    def fused(self) -> dict[str, int]:
        return {name.split(".")[1]: count for name, count in self.counts.items() if name.startswith("hf_kvquant.")}


def step(model: Any, batch: int = 2) -> Tensor:
    """The logits of one token a sequence."""
    ids = torch.randint(3, models.VOCAB_SIZE, (batch, 1), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        logits: Tensor = model(ids.to(model.device), use_cache=False).logits
    return logits


def fused_step(model: Any) -> tuple[Tensor, dict[str, int]]:
    """The logits of a step whose replacements are known, and the fused ops that it calls."""
    with fused(model):
        step(model)
    with fused(model), Ops() as mode:
        logits = step(model)
    return logits, mode.fused()


def built(family: str, device: str, dtype: torch.dtype = torch.bfloat16) -> Any:
    return models.build(models.FAMILIES[family].model_type, dtype, **models.FAMILIES[family].options).to(device)


# Of two layers: the first norm, those behind residual connections, and the rest.
NORMS = {"rms_norm": 1, "add_rms_norm": 4}
ALL = {**NORMS, "rotary": 2, "silu_mul": 2}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("llama", ALL),
        ("mistral", ALL),
        ("qwen3", {**ALL, "rms_norm": 5}),
        ("phi3", {**NORMS, "rotary": 2}),  # one projection for gate and up
        ("gemma2", {"rms_norm": 5, "add_rms_norm": 4, "rotary": 2}),  # norms multiply by 1 + weight
        ("glm", NORMS),  # half of a head is turned, in pairs
        # One of two layers has a state, and a norm with a gate. A quarter of a head is turned.
        pytest.param("qwen3_5_text", {**ALL, "rms_norm": 4, "rotary": 1, "delta_gates": 1}, marks=NEEDS_STATES),
        ("cohere", {"silu_mul": 2}),
        ("gpt2", {}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_families(family: str, expected: dict[str, int], dtype: torch.dtype, device: str) -> None:
    model = built(family, device, dtype)
    before = step(model)
    logits, calls = fused_step(model)
    has_kernels = device != "cpu"
    if has_kernels and dtype is torch.float32:
        expected = {name: count for name, count in expected.items() if name != "delta_gates"}
    assert calls == expected
    if has_kernels and "delta_gates" in calls:  # its sums have another order
        torch.testing.assert_close(logits, before, rtol=0.05, atol=0.02 * float(before.abs().max()))
    else:
        same_bits(logits, before, family)
    same_bits(step(model), before, "afterwards")


def all_of(model: Any) -> tuple[Any, ...]:
    """What `fused` may change."""
    return modeling_llama.apply_rotary_pos_emb, [dict(vars(module)) for module in model.modules()]


def test_nothing_stays_replaced(device: str) -> None:
    model = built("llama", device)
    before = all_of(model)
    with fused(model):
        assert all_of(model) != before
        with fused(model):  # as nested captures would
            step(model)
        step(model)
    assert all_of(model) == before
    with pytest.raises(ZeroDivisionError), fused(model):
        step(model)
        raise ZeroDivisionError
    assert all_of(model) == before


def test_a_step_that_fails_leaves_nothing(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = built("llama", device)
    before = all_of(model)
    with monkeypatch.context() as patches:
        patches.setattr(modeling_llama, "apply_rotary_pos_emb", lambda *args: 1 / 0)
        patched = all_of(model)
        with pytest.raises(ZeroDivisionError), fused(model):
            step(model)
        assert all_of(model) == patched
    assert all_of(model) == before


def test_other_threads_use_the_model_code_as_it_is() -> None:
    model, other = built("llama", "cpu"), built("llama", "cpu")
    seen: list[dict[str, int]] = []

    def run() -> None:
        with Ops() as mode:
            step(other)
        seen.append(mode.fused())

    with fused(model):
        step(model)
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    assert seen == [{}]


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.name == "hf_kvquant.graphs.trials"]


def test_the_log_says_what_became_of_each(caplog: pytest.LogCaptureFixture) -> None:
    model = built("gemma2", "cpu")
    with caplog.at_level(logging.INFO, "hf_kvquant"):
        fused_step(model)
    of = "of [2, 1, 128]"
    assert lines(caplog) == [
        f"captured steps do not run Gemma2RMSNorm {of} [128] bfloat16 as one kernel: its bits differ.",
        f"captured steps do not run Gemma2RMSNorm {of} [128] bfloat16 as one kernel after torch's mean: "
        "its bits differ.",
        f"captured steps run Gemma2RMSNorm {of} [128] bfloat16 as one kernel with 1 + weight.",
        "captured steps run apply_rotary_pos_emb of [2, 4, 1, 64] [2, 2, 1, 64] [1, 1, 64] [1, 1, 64] bfloat16 as one "
        "kernel.",
        f"captured steps do not run the addition before Gemma2RMSNorm {of} [2, 1, 128] [128] bfloat16 as one kernel "
        "with the norm: its bits differ.",
        f"captured steps run the addition before Gemma2RMSNorm {of} [2, 1, 128] [128] bfloat16 as one kernel with the "
        "norm's 1 + weight.",
        f"captured steps do not run Gemma2MLP {of} bfloat16 as one kernel between its linear layers: its bits differ.",
    ]


# --- what is not ------------------------------------------------------------------------------------------------------


class OffByOne:
    """A fused op that is wrong in the last bit of one number, in float32 alone."""

    def __init__(self, op: Any) -> None:
        self.op = op

    def __call__(self, *args: Any) -> Any:
        out = self.op(*args)
        first = out[0] if isinstance(out, tuple) else out
        if first.dtype == torch.float32:
            first.view(-1)[5] = torch.nextafter(first.view(-1)[5], torch.tensor(torch.inf, device=first.device))
        return out


@pytest.mark.parametrize("name", OPS)
def test_one_bit_is_enough(
    name: str, device: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(FUSED, name, OffByOne(getattr(FUSED, name)))
    model = built("llama", device)
    with caplog.at_level(logging.INFO, "hf_kvquant"):
        logits, calls = fused_step(model)
    assert name not in calls and len(calls) == 3
    same_bits(logits, step(model), name)
    assert any("its bits differ." in line for line in lines(caplog))


def test_what_a_kernel_refuses_stays(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """The kernel may need the mean of short rows."""
    op = FUSED.rms_norm

    def rms_norm(x: Tensor, weight: Tensor, mean: Tensor | None, *how: Any) -> Any:
        if mean is None:
            raise ValueError("rms_norm: `x` must be longer.")
        return op(x, weight, mean, *how)

    rms_norm.default = op.default  # torch looks it up by its name, for modes
    monkeypatch.setattr(FUSED, "rms_norm", rms_norm)
    model = built("llama", "cpu")
    with caplog.at_level(logging.INFO, "hf_kvquant"):
        _, calls = fused_step(model)
    assert calls == ALL
    what = "LlamaRMSNorm of [2, 1, 128] [128] bfloat16 as one kernel"
    assert lines(caplog)[:2] == [
        f"captured steps do not run {what}: ValueError: rms_norm: `x` must be longer.",
        f"captured steps run {what} after torch's mean.",
    ]


class DoubledNorm(modeling_llama.LlamaRMSNorm):
    """Twice the norm."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        return 2 * super().forward(hidden_states)


class TurnedNorm(modeling_llama.LlamaRMSNorm):
    """The norm, sequences in the innermost place of memory."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        return super().forward(hidden_states).transpose(0, -1).contiguous().transpose(0, -1)


class ScaledMLP(modeling_llama.LlamaMLP):
    """A product that is halved."""

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x) * 0.5)


class LeakyMLP(modeling_llama.LlamaMLP):
    """More than the last layer gives."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x


class PickyMLP(modeling_llama.LlamaMLP):
    """Nothing but what its own layers give."""

    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate_proj(x)
        if gate.dtype != x.dtype:
            raise KeyError(gate.dtype)
        return self.down_proj(self.act_fn(gate) * self.up_proj(x))


class ShiftedMLP(modeling_llama.LlamaMLP):
    """Gates of something else."""

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x + 1)) * self.up_proj(x))


def as_class(name: str, other: type[nn.Module]) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        for layer in model.model.layers:
            getattr(layer, name).__class__ = other

    return change


def hooked(path: str) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        for layer in model.model.layers:
            layer.get_submodule(path).register_forward_hook(lambda module, args, output: output * 1)

    return change


def wrapped(path: str) -> Callable[[Any], None]:
    """Modules with their own forwards, as libraries for quantised weights make linear layers."""

    def change(model: Any) -> None:
        for layer in model.model.layers:
            module = layer.get_submodule(path)
            module.forward = module.forward

    return change


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (as_class("input_layernorm", DoubledNorm), {"add_rms_norm": 3, "rotary": 2, "silu_mul": 2}),
        (as_class("input_layernorm", TurnedNorm), {"add_rms_norm": 3, "rotary": 2, "silu_mul": 2}),
        (as_class("mlp", ScaledMLP), {**NORMS, "rotary": 2}),
        (as_class("mlp", LeakyMLP), {**NORMS, "rotary": 2}),
        (as_class("mlp", PickyMLP), {**NORMS, "rotary": 2}),
        (as_class("mlp", ShiftedMLP), {**NORMS, "rotary": 2}),
        (hooked("mlp.act_fn"), {**NORMS, "rotary": 2}),
        (hooked("post_attention_layernorm"), {**ALL, "add_rms_norm": 2}),
        (wrapped("mlp"), {**NORMS, "rotary": 2}),
        (wrapped("mlp.act_fn"), {**NORMS, "rotary": 2}),
        (wrapped("mlp.up_proj"), ALL),
    ],
    ids=[
        *("norm", "turned", "scaled", "leaky", "picky", "shifted", "activation_hook", "norm_hook"),
        *("mlp_forward", "activation_forward", "linear_forward"),
    ],
)
def test_models_of_another_kind(change: Callable[[Any], None], expected: dict[str, int], device: str) -> None:
    model = built("llama", device)
    change(model)
    before = all_of(model)
    logits, calls = fused_step(model)
    assert calls == expected and all_of(model) == before
    same_bits(logits, step(model), "logits")


def test_weights_of_one_do_not_hide_what_a_norm_does(device: str) -> None:
    """Where all weights are one, the order of rounding and multiplying does not show."""

    class Late(modeling_llama.LlamaRMSNorm):
        def forward(self, hidden_states: Tensor) -> Tensor:
            wide = hidden_states.float()
            wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
            return (self.weight.float() * wide).to(hidden_states.dtype)

    model = built("llama", device)
    as_class("input_layernorm", Late)(model)
    assert all(bool((layer.input_layernorm.weight == 1).all()) for layer in model.model.layers)
    assert fused_step(model)[1] == {"add_rms_norm": 3, "rotary": 2, "silu_mul": 2}


def test_norms_differ_in_epsilon(device: str) -> None:
    model = built("llama", device)
    for layer, eps in zip(model.model.layers, (1e-6, 0.5), strict=True):
        layer.input_layernorm.variance_epsilon = eps
    logits, calls = fused_step(model)
    assert calls == ALL
    same_bits(logits, step(model), "logits")


class Sums(nn.Module):
    """A sum and its norm, which does not always get the sum as it was."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(modeling_llama.LlamaRMSNorm(128, eps) for eps in (1e-6, 0.1))

    def forward(self, x: Tensor, which: int, change: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        total = x + x.flip(0)
        return self.norms[which](change(total)), total


@pytest.mark.parametrize(
    ("which", "change"),
    [
        (0, lambda total: total.mul_(2)),
        (0, lambda total: total + total.flip(0)),
        (0, lambda total: total[:1]),
        (1, lambda total: total),
    ],
    ids=["changed", "another", "part", "norm"],
)
def test_a_norm_takes_nothing_but_its_sum(which: int, change: Callable[[Tensor], Tensor], device: str) -> None:
    """A step that goes another way than the one before is as right, and what comes then begins anew."""
    model, x = Sums().to(device), randn(3, 1, 128, device=device)

    def run(which: int, change: Callable[[Tensor], Tensor]) -> dict[str, int]:
        with torch.no_grad():
            expected = model(x, which, change)
            with fused(model), Ops() as mode:
                actual = model(x, which, change)
        for a, e, name in zip(actual, expected, ("norm", "sum"), strict=True):
            same_bits(a, e, name)
        return mode.fused()

    def same(total: Tensor) -> Tensor:
        return total

    run(0, same)
    assert run(0, same) == {"add_rms_norm": 1}
    run(which, change)
    run(0, same)
    assert run(0, same) == {"add_rms_norm": 1}


def test_inference_mode_keeps_additions_apart(device: str) -> None:
    model = built("llama", device)
    before = step(model)
    with torch.inference_mode():
        logits, calls = fused_step(model)
    assert calls == {"rms_norm": 5, "rotary": 2, "silu_mul": 2}
    same_bits(logits, before, "logits")


def test_autograd_and_autocast_go_their_own_way(device: str) -> None:
    model = built("llama", device)
    fused_step(model)
    ids = torch.ones((2, 1), dtype=torch.int64, device=device)
    with fused(model), Ops() as mode:
        model(ids, use_cache=False).logits.sum().backward()
        with torch.no_grad(), torch.autocast(device, torch.float16 if device == "cuda" else torch.bfloat16):
            model(ids, use_cache=False)
    assert not mode.fused()


def test_random_numbers_are_left_alone(device: str) -> None:
    model = built("llama", device)
    torch.manual_seed(3)
    expected = torch.rand(3, device=device)
    torch.manual_seed(3)
    fused_step(model)
    compare.assert_same(torch.rand(3, device=device), expected.cpu(), "the numbers drawn next")


@pytest.mark.parametrize(
    ("shapes", "drawn"),
    [
        ([(1, 2**14, 512), (512,)], [(1, 2**13, 512), (512,)]),
        ([(1, 4, 2**14, 128), (1, 1, 2**14, 128)], [(1, 4, 2**13, 128), (1, 1, 2**13, 128)]),
        ([(1, 2**14, 8, 64), (1, 2**14, 64)], [(1, 2**14, 8, 64), (1, 2**14, 64)]),  # what dimension has the tokens?
        ([(2, 3, 128), (128,)], [(2, 3, 128), (128,)]),
    ],
)
def test_random_tensors_take_little_memory(shapes: list[Any], drawn: list[Any]) -> None:
    for tensors in random_like(*(torch.empty(shape, dtype=torch.bfloat16) for shape in shapes)):
        assert [tuple(tensor.shape) for tensor in tensors] == drawn


def test_what_is_known_of_a_model_ends_with_it() -> None:
    model = built("llama", "cpu")
    fused_step(model)
    twin = copy.deepcopy(model)
    assert notes_on(twin).fusion is None
    fused_step(twin)
    known = [weakref.ref(notes_on(each).fusion) for each in (model, twin)]
    del model, twin
    assert [each() for each in known] == [None, None]


# --- GPUs -------------------------------------------------------------------------------------------------------------


@CUDA_ONLY
def test_a_recording_replaces_nothing_that_it_does_not_know() -> None:
    model = built("llama", "cuda")
    expected = step(model)
    ids = torch.randint(3, models.VOCAB_SIZE, (2, 1), generator=torch.Generator().manual_seed(1)).cuda()
    graph = torch.cuda.CUDAGraph()
    with fused(model), torch.no_grad(), torch.cuda.graph(graph), Ops() as mode:
        logits = model(ids, use_cache=False).logits
    graph.replay()
    assert not mode.fused()
    same_bits(logits, expected, "logits")


@CUDA_ONLY
def test_a_gpu_without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "serves_gpu", lambda index: False)
    assert fused_step(built("llama", "cuda"))[1] == {}
