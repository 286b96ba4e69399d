"""Thousands of op calls, most with something wrong: an error that names the argument, or the reference's result.

Whole calls are drawn first, then broken in up to two places (`fuzz.py`). Whatever comes of a call, nothing is written
but the planes; when it is refused, nothing at all. `make sanitize-cpu` draws `HF_KVQUANT_FUZZ` times as many of them
under the sanitizers, which see the ends of tensors that have nothing around them.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from typing import Any

import fuzz
import pytest
import torch
from cases import engines, times
from checks import largest
from compare import assert_close, assert_same
from fuzz import Call, Memory
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hf_kvquant import ops
from hf_kvquant.spec import reference
from hf_kvquant.spec.formats import Planes

WRITTEN = [f"{side}_{plane}" for side in fuzz.SIDES for plane in fuzz.PLANES]
# As an op and torch's dispatcher call an argument.
NAMED = re.compile(r"`(\w+)`|argument '(\w+)'")
# What kernels ask for and the reference does not.
OF_KERNELS = re.compile("contiguous|must start at a multiple|2147483647")
# What rounding in another order may do to attention: to a logit, relative to the largest one, and to an output. Kernels
# that multiply integers round queries too. A wrong row or a stray read is off by more; `test_ops.py` measures.
ROUNDING = {torch.float32: 2.0**-13, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-7}
# Beyond such logits, rounding decides which token wins.
LARGEST_LOGIT = 1e3

ENGINES = [engine.partition("-")[2] for engine in engines() if engine.startswith("cpu-")]
DICE = st.randoms(use_true_random=False)


@pytest.fixture(autouse=True, scope="module")
def best_kernels() -> Iterator[None]:
    """Every call has an instruction set drawn for it."""
    yield
    ops.extension().set_cpu_capability(None)  # type: ignore[union-attr]


@times(150)
@given(dice=DICE)
@pytest.mark.parametrize("name", ["append", "decode"])
def test_whole_calls_give_what_the_reference_gives(name: str, dice: random.Random) -> None:
    assert run(dice, name, num_broken=0) == "", "refused"


@times(500)
@given(dice=DICE)
@pytest.mark.parametrize("name", ["append", "decode"])
def test_broken_calls_are_refused_by_name_or_harmless(name: str, dice: random.Random) -> None:
    run(dice, name, num_broken=dice.choice((1, 1, 2)))


@times(150)
@given(dice=DICE)
@pytest.mark.parametrize("name", ["rms_norm", "add_rms_norm", "rotary", "silu_mul"])
def test_broken_calls_between_layers_are_refused_by_name(name: str, dice: random.Random) -> None:
    run(dice, name, num_broken=dice.choice((0, 1, 2)))


def run(dice: random.Random, name: str, num_broken: int) -> str:
    """Calls an op once. Returns the error's text, an empty string where there was none."""
    memory = Memory(dice, is_tight=dice.random() < 0.5)
    call = fuzz.draw_call(dice, memory, name)
    what = f"{name}, {[fuzz.broken(dice, memory, call) for _ in range(num_broken)]}"
    before = {argument: plain(value) for argument, value in call.items()}
    engine = dice.choice(ENGINES)
    assert ops.extension().set_cpu_capability(engine)  # type: ignore[union-attr]
    what = f"{what} on {engine}"
    refusal = names = None
    try:
        result = getattr(torch.ops.hf_kvquant, name)(**call)
    except (NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        refusal, names = str(error), named(error, call)
        assert names, f"{what}: names no argument: {error}"
    if refusal is not None and names is not None:
        assert memory.is_as_it_was(), f"{what}: refused, but something was written: {refusal}"
        if name in ("append", "decode"):
            check_reference_refuses(memory, name, call, refusal, names if num_broken == 1 else None, what)
        return refusal
    is_appended = call.get("key") is not None
    written = [call[plane] for plane in WRITTEN if is_appended and isinstance(call.get(plane), Tensor)]
    assert memory.is_as_it_was(*written), f"{what}: something else was written"
    if name in ("append", "decode"):
        expected = getattr(torch.ops.hf_kvquant, f"{name}_reference")(**before)
        for plane in WRITTEN:
            if isinstance(before[plane], Tensor):
                assert_same(call[plane].detach(), before[plane], f"{what}: {plane}")
        if name == "decode":
            check_attention(before, result, expected, what)
    return ""


def plain(value: Any) -> Any:
    """A tensor's numbers in memory of their own, in order."""
    if not fuzz.is_whole(value):
        return value
    return value.detach().resolve_neg().clone(memory_format=torch.contiguous_format)


def named(error: Exception, call: Call) -> set[str]:
    return {found for pair in NAMED.findall(str(error)) for found in pair if found in call}


def check_reference_refuses(
    memory: Memory, name: str, call: Call, refusal: str, names: set[str] | None, what: str
) -> None:
    """The reference refuses the same, but for what only kernels ask for, and writes nothing either.

    Of `names` one must be named, unless they are `None`: of two broken arguments, either may be found first.
    """
    is_of_kernels = OF_KERNELS.search(refusal) is not None
    try:
        getattr(torch.ops.hf_kvquant, f"{name}_reference")(**call)
    except (NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        assert memory.is_as_it_was(), f"{what}: refused by the reference, but something was written: {error}"
        others = named(error, call)
        assert others, f"{what}: the reference names no argument: {error}"
        assert is_of_kernels or names is None or others & names, f"{what}: kernels: {refusal}; reference: {error}"
    else:
        assert is_of_kernels, f"{what}: the reference accepts what kernels refuse: {refusal}"


def check_attention(call: Call, result: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor], what: str) -> None:
    """`call` holds the planes after the call, in order."""
    query, scale = call["query"], abs(call["softmax_scale"])
    key, value = (dequantized(call, side) for side in fuzz.SIDES)
    transform = ops._transform_of(call["key_center"], call["key_smoothing"], call["rotates_key"])
    norms, constant = largest(query.float().norm(dim=-1)), 0.0
    if transform is not None:
        coded, product = reference.transform_query(query, transform)
        norms = max(norms, largest(coded.norm(dim=-1)))
        constant = 0.0 if product is None else largest(product)
    logit = scale * (norms * largest(key.norm(dim=-1)) + constant)
    (out, lse), (expected_out, expected_lse) = result, expected
    assert (out.dtype, lse.dtype) == (query.dtype, torch.float32) and out.shape == expected_out.shape, what
    # A plane in place of a scale may be negative, which no scale is: kernels look for the largest weight times scale.
    scales = (call[f"{side}_scale"] for side in fuzz.SIDES)
    if logit > LARGEST_LOGIT or any(isinstance(each, Tensor) and bool((each < 0).any()) for each in scales):
        return
    bound = ROUNDING[query.dtype] * (2 + logit)
    assert_close(out, expected_out.float(), bound * largest(value), f"{what}: out")
    assert_same(lse == -torch.inf, expected_lse == -torch.inf, f"{what}: rows that attend to nothing")
    assert_close(lse, expected_lse, bound, f"{what}: lse")


def dequantized(call: Call, side: str) -> Tensor:
    planes = Planes(*(call[f"{side}_{plane}"] for plane in fuzz.PLANES))
    windows = call["sink_length"], call["residual_length"]
    head_dim = ops.head_dim_of(planes.codes, call[f"{side}_storage"])
    kv_format = ops.format_of(planes, call[f"{side}_storage"], head_dim, *windows)
    held = call["lengths"], call["starts"], *windows
    position = reference.ring_positions(call["lengths"], planes.codes.shape[2]) if call["is_ring"] else None
    return reference.dequantize(planes, kv_format, torch.float32, *held, position=position)
