"""Thousands of op calls, most with something wrong: an error that names the argument, or the reference's result.

Whole calls are drawn first, then broken in up to two places (`fuzz.py`). Whatever comes of a call, nothing is written
but the planes; when it is refused, nothing at all. What kernels refuse for its shapes, dtypes or layout the reference
refuses, too. `make sanitize-cpu` draws `HF_KVQUANT_FUZZ` times as many of them
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
from hf_kvquant.spec.key_transform import KeyTransform
from hf_kvquant.spec.layout import KVLayout

REFUSALS = (NotImplementedError, RuntimeError, TypeError, ValueError)
# As an op and torch's dispatcher call an argument.
NAMED = re.compile(r"`(\w+)[`.]|argument '(\w+)'")
# What only kernels check: how memory lies, and numbers, with which the reference does no harm.
OF_KERNELS = re.compile(
    "contiguous|must start at a multiple|2147483647|memory of its own|`(softmax_scale|softcap|sliding_window|starts)`|"
    "`key_(center|smoothing)` must be (finite|positive)"
)
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
    refusal = None
    try:
        result = getattr(torch.ops.hf_kvquant, name)(**call)
    except REFUSALS as error:
        refusal = str(error)
        assert any(found in call for pair in NAMED.findall(refusal) for found in pair), f"{what}: no name: {error}"
    if refusal is not None:
        assert memory.is_as_it_was(), f"{what}: refused, but something was written: {refusal}"
        if name in ("append", "decode") and not OF_KERNELS.search(refusal):
            with pytest.raises(REFUSALS):
                getattr(torch.ops.hf_kvquant, f"{name}_reference")(**call)
            assert memory.is_as_it_was(), f"{what}: refused by the reference, but something was written"
        return refusal
    planes = [plane for side in fuzz.SIDES for plane in call.get(f"{side}_planes", [])]
    written = planes if call.get("key") is not None else []
    assert memory.is_as_it_was(*written), f"{what}: something else was written"
    if name in ("append", "decode"):
        expected = getattr(torch.ops.hf_kvquant, f"{name}_reference")(**before)
        for ours, theirs in zip(planes, before["key_planes"] + before["value_planes"], strict=True):
            assert_same(ours.detach(), theirs, f"{what}: planes")
        if name == "decode":
            check_attention(before, result, expected, what)
    return ""


def plain(value: Any) -> Any:
    """A tensor's numbers in memory of their own, in order."""
    if isinstance(value, list):
        return [plain(each) for each in value]
    if not fuzz.is_whole(value):
        return value
    return value.detach().resolve_neg().clone(memory_format=torch.contiguous_format)


def check_attention(call: Call, result: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor], what: str) -> None:
    """`call` holds the planes after the call, in order."""
    query, scale = call["query"], abs(call["softmax_scale"])
    layout = KVLayout.of_packed(call["layout"])
    planes = layout.planes(call["key_planes"], call["value_planes"])
    held = {"lengths": call["lengths"], "starts": call["starts"], **layout.windows}
    if layout.is_ring:
        held["position"] = reference.ring_positions(call["lengths"], planes[0].codes.shape[2])
    key, value = (
        reference.dequantize(side, kv_format, torch.float32, **held)
        for side, kv_format in zip(planes, layout.formats, strict=True)
    )
    transform = KeyTransform.of_checked(call["key_center"], call["key_smoothing"], call["rotates_key"])
    norms, constant = largest(query.float().norm(dim=-1)), 0.0
    if not transform.is_identity:
        coded, product = reference.transform_query(query, transform)
        norms = max(norms, largest(coded.norm(dim=-1)))
        constant = 0.0 if product is None else largest(product)
    logit = scale * (norms * largest(key.norm(dim=-1)) + constant)
    (out, lse), (expected_out, expected_lse) = result, expected
    assert (out.dtype, lse.dtype) == (query.dtype, torch.float32) and out.shape == expected_out.shape, what
    # A plane in place of a scale may be negative, which no scale is: kernels look for the largest weight times scale.
    scales = [side.scale for side in planes if side.scale is not None]
    if logit > LARGEST_LOGIT or any(bool((scale < 0).any()) for scale in scales):
        return
    bound = ROUNDING[query.dtype] * (2 + logit)
    assert_close(out, expected_out.float(), bound * largest(value), f"{what}: out")
    assert_same(lse == -torch.inf, expected_lse == -torch.inf, f"{what}: rows that attend to nothing")
    assert_close(lse, expected_lse, bound, f"{what}: lse")
