"""Split plans: every share of every sequence once, long shares first, and no more slots than there are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compare import assert_close
from hypothesis import given
from hypothesis import strategies as st

from hf_kvquant import PRESETS, ops
from hf_kvquant.ops.planning import MIN_TOKENS
from hf_kvquant.spec.layout import KVLayout

CUDA_ONLY = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def plan_of(lengths: list[int], num_slots: int) -> list[list[int]]:
    plan = ops.split_plan(torch.tensor(lengths, dtype=torch.int32), num_slots)
    assert plan.shape == (len(lengths) + num_slots, 4) and plan.dtype == torch.int32 and plan.is_contiguous()
    found = [[b, length, share & 0xFFFF, share >> 16, first] for b, length, share, first in plan.tolist()]
    assert all(entry[1] == lengths[entry[0]] for entry in found if entry[0] >= 0)
    return [[b, share, shares, first] for b, _, share, shares, first in found]


@given(st.lists(st.integers(-1, 200_000), min_size=1, max_size=40), st.integers(0, 64))
def test_plans_are_complete(lengths: list[int], num_slots: int) -> None:
    plan = plan_of(lengths, num_slots)
    used = [entry for entry in plan if entry[0] >= 0]
    assert plan[: len(used)] == used, "unused entries come last"
    shares, slots = {b: n for b, _, n, _ in used}, set()
    assert sorted((b, share) for b, share, _, _ in used) == [(b, i) for b in sorted(shares) for i in range(shares[b])]
    assert len(shares) == len(lengths)
    for b, share, n, first in used:
        if n > 1:
            assert max(lengths[b], 0) // n >= MIN_TOKENS
            slots.add(first + share)
            assert first + n <= num_slots
    assert len(slots) == sum(n for n in shares.values() if n > 1)
    sizes = [-(-max(lengths[b], 0) // n) for b, _, n, _ in used]
    assert sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ([8192] * 64, [1] * 64),  # equal sequences fill a GPU as they are
        ([131072], [33]),
        ([1024] * 63 + [100_000], [1] * 63 + [20]),
        ([300, 0], [1, 1]),  # too short
    ],
)
def test_only_long_sequences_are_cut(lengths: list[int], expected: list[int]) -> None:
    shares = {b: n for b, _, n, _ in plan_of(lengths, 33)}
    assert [shares[b] for b in range(len(lengths))] == expected


def call(plan: torch.Tensor, num_splits: int = 0, has_table: bool = True, is_reference: bool = False) -> None:
    layout = KVLayout(*PRESETS["int8"])
    planes = layout.allocate((2, 2, 64, 64), 128, dtype=torch.float32, device=torch.device("cpu"))
    made = ops.Operands(*planes, layout)
    if is_reference:
        made._decode = torch.ops.hf_kvquant.decode_reference.default
    made.decode(
        torch.randn(2, 4, 1, 64),
        None,
        torch.tensor([100, 128], dtype=torch.int32),
        softmax_scale=0.125,
        num_splits=num_splits,
        page_table=torch.tensor([[1], [0]], dtype=torch.int32) if has_table else None,
        split_plan=plan,
    )


@pytest.mark.parametrize("is_reference", [False, True])
@pytest.mark.parametrize(
    ("plan", "options", "message"),
    [
        ((3, 4), {"has_table": False}, "`split_plan` must be None without a page table, got a tensor"),
        ((3, 4), {"num_splits": 2}, "`num_splits` must be 0 with a split plan, got 2. The plan says how"),
        ((3, 3), {}, "`split_plan` must be .*Make it with ops.split_plan"),
        ((1, 4), {}, "`split_plan` must have from 2 to 65535 entries, got 1. Make it with ops.split_plan"),
        ((70000, 4), {}, "`split_plan` must have from 2 to 65535 entries, got 70000. Make it with"),
    ],
)
def test_plans_that_do_not_fit_are_refused(
    plan: tuple[int, int], options: dict[str, Any], message: str, is_reference: bool
) -> None:
    with pytest.raises(ValueError, match=message):
        call(torch.zeros(plan, dtype=torch.int32), **options, is_reference=is_reference)


def test_a_cpu_needs_no_plan() -> None:
    call(ops.split_plan(torch.tensor([100, 128], dtype=torch.int32), 4))


@pytest.mark.parametrize(
    ("lengths", "num_slots", "message"),
    [
        (
            torch.zeros(0, dtype=torch.int32),
            3,
            "`lengths` must be .* contiguous, and not empty, got",
        ),
        (torch.zeros(3), 3, "`lengths` must be"),
        (torch.zeros(3, 1, dtype=torch.int32), 3, "`lengths` must be"),
        (torch.zeros(6, dtype=torch.int32)[::2], 3, "`lengths` must be"),
        (torch.zeros(3, dtype=torch.int32), -1, "`num_slots` must be between 0 and 32767, got -1"),
        (torch.zeros(3, dtype=torch.int32), 40000, "`num_slots` must be between 0 and 32767, got 40000"),
    ],
)
def test_lengths_that_make_no_plan_are_refused(
    lengths: torch.Tensor, num_slots: int, message: str, device: str
) -> None:
    with pytest.raises(ValueError, match=f"split_plan: {message}"):
        ops.split_plan(lengths.to(device) if lengths.is_contiguous() else lengths.repeat(2).to(device)[::2], num_slots)


@CUDA_ONLY
@pytest.mark.parametrize("batch", [1, 2, 33, 1024, 1025, 3000])
@pytest.mark.parametrize("most", [1, 5000, 200_000])
def test_the_kernel_makes_the_plan_of_the_reference(batch: int, most: int) -> None:
    lengths = torch.randint(-1, most, (batch,), dtype=torch.int32, generator=torch.Generator().manual_seed(batch))
    for num_slots in (0, 33, 300):
        expected = ops.split_plan(lengths, num_slots)
        assert torch.equal(ops.split_plan(lengths.cuda(), num_slots).cpu(), expected)


@CUDA_ONLY
@pytest.mark.parametrize("name", [name for name in PRESETS if name not in ("int4-channel", "none")])
@pytest.mark.parametrize("lengths", [[2000, 5, 128, 0, 700, 1], [1], [4000], [130] * 40])
@pytest.mark.parametrize("is_new", [False, True])
def test_a_plan_changes_no_more_than_roundings(name: str, lengths: list[int], is_new: bool) -> None:
    torch.manual_seed(0)
    device, layout = torch.device("cuda"), KVLayout(*PRESETS[name])
    num_pages = -(-max(lengths) // 256)
    table = torch.randperm(len(lengths) * num_pages, device=device).int().view(len(lengths), num_pages)
    held = torch.tensor(lengths, dtype=torch.int32, device=device)
    where = {"dtype": torch.bfloat16, "device": device}
    planes = layout.allocate((table.numel(), 2, 128, 128), 256, **where)
    key, value = torch.randn(2, len(lengths), 2, max(lengths), 128, **where)
    full = torch.full_like(held, max(lengths))
    ops.append(key, value, *planes, full, layout, page_table=table)
    query, new = torch.randn(len(lengths), 8, 1, 128, **where), tuple(torch.randn(2, len(lengths), 2, 1, 128, **where))
    counters = ops.new_counters(device)
    results = []
    for plan in (None, ops.split_plan(held, 33), ops.split_plan(held, 33)):
        own = planes[0].map(torch.clone), planes[1].map(torch.clone)
        results.append(
            ops.decode(
                query,
                new if is_new else None,
                *own,
                held,
                layout,
                softmax_scale=0.1,
                counters=counters,
                page_table=table,
                split_plan=plan,
            )[0]
        )
        if plan is None:
            written = own
    for mine, theirs in zip(own, written, strict=True):
        for x, y in zip(mine.tensors(), theirs.tensors(), strict=True):
            assert torch.equal(x.view(torch.uint8), y.view(torch.uint8))
    expected = results[0].cpu()
    assert_close(results[1], expected, 4 * torch.finfo(torch.bfloat16).eps * float(expected.abs().max()), "with a plan")
    assert torch.equal(results[1], results[2])
    assert counters is not None and not counters.any()


@CUDA_ONLY
def test_numbers_that_are_no_plan_harm_nobody() -> None:
    layout, device = KVLayout(*PRESETS["int4"]), torch.device("cuda")
    where = {"dtype": torch.bfloat16, "device": device}
    planes = layout.allocate((4, 2, 128, 128), 256, **where)
    table = torch.arange(4, dtype=torch.int32, device=device).view(2, 2)
    held = torch.tensor([300, 500], dtype=torch.int32, device=device)
    for numbers in (torch.randint(-(2**31), 2**31 - 1, (5, 4)), torch.randint(-2, 5, (300, 4)), torch.zeros(5, 4)):
        plan = numbers.to(torch.int32).to(device)
        counters = ops.new_counters(device)
        options = {"softmax_scale": 0.1, "page_table": table, "split_plan": plan, "counters": counters}
        ops.decode(torch.randn(2, 8, 1, 128, **where), None, *planes, held, layout, **options)
        torch.cuda.synchronize()
