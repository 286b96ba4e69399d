"""Split plans: every share of every sequence once, long shares first, and no more slots than there are."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from compare import assert_close
from hypothesis import given
from hypothesis import strategies as st

from hf_kvquant import PRESETS, ops
from hf_kvquant.ops.planning import MIN_TOKENS, TOKENS_BETWEEN
from hf_kvquant.spec.formats import KVFormat
from hf_kvquant.spec.layout import KVLayout, Rows

FROZEN = KVFormat("int8", "tensor")
SLOTS = 33, 600  # of two heads: the first for thread blocks of four warps, the second of two
CUDA_ONLY = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def plan_of(lengths: list[int], num_slots: int, most_slots: int | None = None) -> list[list[int]]:
    plan = ops.split_plan(torch.tensor(lengths, dtype=torch.int32), num_slots, None, most_slots)
    num_entries = len(lengths) + (num_slots if most_slots is None else most_slots)
    assert plan.shape == (num_entries, 4) and plan.dtype == torch.int32 and plan.is_contiguous()
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


@given(
    st.lists(st.tuples(st.integers(-1, 200_000), st.integers(-5, 200_000)), min_size=1, max_size=20),
    st.integers(0, 64),
)
def test_padding_is_left_out(sequences: list[tuple[int, int]], num_slots: int) -> None:
    lengths, starts = map(list, zip(*sequences, strict=True))
    held = [max(0, max(0, length) - max(0, start)) for length, start in sequences]
    shares = [max(1, min(each * num_slots // max(1, sum(held)), each // MIN_TOKENS)) for each in held]
    expected, num_cut = [], 0
    for b in sorted(range(len(held)), key=lambda b: -math.ceil(held[b] / shares[b])):
        expected += [[b, lengths[b], i + (shares[b] << 16), num_cut] for i in range(shares[b])]
        num_cut += shares[b] if shares[b] > 1 else 0
    expected += [[-1, 0, 0, 0]] * (len(lengths) + num_slots - len(expected))
    made = [torch.tensor(numbers, dtype=torch.int32) for numbers in (lengths, starts)]
    assert ops.split_plan(made[0], num_slots, made[1]).tolist() == expected


@given(
    st.lists(st.tuples(st.integers(0, 6000), st.integers(0, 6500)), min_size=1, max_size=12),
    st.integers(0, 64),
    st.sampled_from([16, 32, 64]),
)
def test_shares_have_every_token_once(sequences: list[tuple[int, int]], num_slots: int, step_tokens: int) -> None:
    """As csrc/cuda/attend/schedule.cuh finds them: a share has every n-th round of four steps, from anywhere on."""
    lengths, starts = map(list, zip(*sequences, strict=True))
    made = [torch.tensor(numbers, dtype=torch.int32) for numbers in (lengths, starts)]
    tokens: dict[int, list[int]] = {b: [] for b in range(len(lengths))}
    parts = dict.fromkeys(tokens, 0)
    for b, length, numbers, _ in ops.split_plan(made[0], num_slots, made[1]).tolist():
        if b < 0:
            continue
        begin, share, shares = min(starts[b], length), numbers & 0xFFFF, numbers >> 16
        per_round = 4 * step_tokens
        for first in range(begin // per_round, -(-length // per_round)):
            if first % shares == share:
                tokens[b] += range(max(begin, first * per_round), min(length, (first + 1) * per_round))
        parts[b] += 1
    assert all(sorted(tokens[b]) == list(range(min(starts[b], lengths[b]), lengths[b])) for b in tokens)
    assert all(parts.values()), "each sequence has a share, which writes its result"


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


@given(st.lists(st.integers(-1, 20_000), min_size=1, max_size=80), st.integers(1, 40), st.integers(1, 3))
def test_more_shares_are_made_where_they_end_earlier(lengths: list[int], num_slots: int, times: int) -> None:
    def estimated(plan: list[list[int]]) -> int:
        """A slot takes the next share when it is free, as far as each takes two; see _estimated_end."""
        sizes = [-(-max(lengths[b], 0) // shares) for b, _, shares, _ in plan if b >= 0]
        free = sizes[:num_slots] + [0] * (num_slots - len(sizes))
        ends = [max(free), sum(max(length, 0) for length in lengths) // num_slots]
        for size, before in zip(sizes[num_slots:], reversed(free), strict=False):
            ends.append(before + size + TOKENS_BETWEEN if size else 0)
        return max(ends)

    most_slots = times * num_slots
    few, many = plan_of(lengths, num_slots), plan_of(lengths, most_slots)
    expected = many if estimated(many) + TOKENS_BETWEEN < estimated(few) else few
    unused = [[-1, 0, 0, 0]] * (len(lengths) + most_slots - len(expected))
    assert plan_of(lengths, num_slots, most_slots) == expected + unused


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ([8192] * 20, 3),  # two thirds one after the other end earlier than a whole sequence
        ([8192] * 26, 1),  # two halves do not
        ([8192] * 36, 1),  # with twice the slots, none is long enough to be cut
        ([16000] * 10 + [2000] * 20, 5),  # else 2
        ([12000] * 5 + [4000] * 34, 2),  # short ones follow short ones, and end before the longest
        ([2000] * 20, 1),
    ],
)
def test_shares_in_two_rows(lengths: list[int], expected: int) -> None:
    assert max(n for _, _, n, _ in plan_of(lengths, 33, 66)) == expected


@pytest.mark.parametrize(
    ("num_kv_heads", "num_sequences", "multiprocessors", "expected"),
    [
        (8, 1, 132, (33, 66)),
        (8, 65, 132, (33, 66)),
        (8, 66, 132, (33, 33)),
        (8, 115, 132, (33, 33)),
        (8, 116, 132, (99, 99)),
        (8, 512, 132, (99, 99)),
        (1, 924, 132, (792, 792)),
        (2, 200, 132, (132, 264)),
        (1, 512, 512, (1024, 2048)),
        (1, 513, 513, (1026, 1026)),
    ],
)
def test_slots_suit_the_sequences(
    num_kv_heads: int,
    num_sequences: int,
    multiprocessors: int,
    expected: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu = SimpleNamespace(multi_processor_count=multiprocessors)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    assert ops.num_slots_of(torch.device("cuda"), num_kv_heads, num_sequences) == expected


def call(
    plan: torch.Tensor,
    num_splits: int = 0,
    has_table: bool = True,
    rows: Rows = "linear",
    is_reference: bool = False,
) -> None:
    layout = KVLayout(*PRESETS["int8"], rows=rows)
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
        sliding_window=0 if rows == "linear" else 20,
        page_table=torch.tensor([[1], [0]], dtype=torch.int32) if has_table else None,
        split_plan=plan,
    )


@pytest.mark.parametrize("is_reference", [False, True])
@pytest.mark.parametrize(
    ("plan", "options", "message"),
    [
        ((3, 4), {"has_table": False, "rows": "ring"}, "`split_plan` must be None for a ring, got a tensor. Its"),
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


@pytest.mark.parametrize(
    ("key", "value", "rows", "expected"),
    [
        ("int4-token", "int4-token", "linear", True),
        ("none", "none", "linear", True),
        ("int4-token", "int4-token", "ring", False),
        ("int8", "none", "linear", False),
    ],
)
def test_a_gpu_takes_plans_for_pairs_of_formats(key: str, value: str, rows: Rows, expected: bool, device: str) -> None:
    layout = KVLayout(PRESETS[key][0], PRESETS[value][1], rows=rows)
    planes = layout.allocate((2, 2, 64, 64), 128, dtype=torch.bfloat16, device=torch.device(device))
    assert ops.Operands(*planes, layout).takes_split_plan is (expected and device == "cuda")


def test_a_cpu_needs_no_plan() -> None:
    for has_table in (True, False):
        call(ops.split_plan(torch.tensor([100, 128], dtype=torch.int32), 4), has_table=has_table)


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


@pytest.mark.parametrize(
    ("num_slots", "most_slots", "most"), [(4, 3, 32767), (4, 32768, 32767), (0, 1, 0), (1025, 1026, 1025)]
)
def test_slots_that_make_no_plan_are_refused(num_slots: int, most_slots: int, most: int, device: str) -> None:
    lengths = torch.zeros(3, dtype=torch.int32, device=device)
    message = f"`most_slots` must be between {num_slots} and {most} for {num_slots} slots, got {most_slots}"
    with pytest.raises(ValueError, match=f"split_plan: {message}"):
        ops.split_plan(lengths, num_slots, None, most_slots)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [((0, 1), "`min_tokens` must be positive, got 0"), ((1, -1), "`tokens_between` must be at least 0, got -1")],
)
def test_tokens_that_make_no_plan_are_refused(tokens: tuple[int, int], message: str, device: str) -> None:
    lengths = torch.zeros(3, dtype=torch.int32, device=device)
    with pytest.raises((ValueError, RuntimeError), match=f"split_plan: {message}"):
        torch.ops.hf_kvquant.split_plan(lengths, None, 4, 4, *tokens)


@pytest.mark.parametrize(
    ("starts", "message"),
    [
        (torch.zeros(2, dtype=torch.int32), r"\[3\] torch.int32 and contiguous like `lengths`, got \[2\]"),
        (torch.zeros(3, 1, dtype=torch.int32), r"\[3\] torch.int32 and contiguous like `lengths`, got \[3, 1\]"),
        (torch.zeros(3), r"\[3\] torch.int32 and contiguous like `lengths`, got \[3\] (torch.)?float32"),
        (torch.zeros(6, dtype=torch.int32)[::2], r"\[3\] torch.int32 and contiguous"),
        (torch.zeros(3, dtype=torch.int32, device="meta"), "on the device of `lengths`"),
    ],
)
def test_starts_that_make_no_plan_are_refused(starts: torch.Tensor, message: str, device: str) -> None:
    lengths = torch.zeros(3, dtype=torch.int32, device=device)
    if starts.device.type == "meta":
        if device == "cpu":
            pytest.skip("needs tensors on two devices: a GPU")
        starts = torch.zeros(3, dtype=torch.int32)
    elif starts.is_contiguous():
        starts = starts.to(device)
    else:
        starts = starts.repeat(2).to(device)[::2]
    with pytest.raises(ValueError, match=f"split_plan: `starts` must be {message}"):
        ops.split_plan(lengths, 3, starts)


@CUDA_ONLY
@pytest.mark.parametrize("batch", [1, 2, 33, 1024, 1025, 3000])
@pytest.mark.parametrize("most", [1, 5000, 200_000])
def test_the_kernel_makes_the_plan_of_the_reference(batch: int, most: int) -> None:
    lengths = torch.randint(-1, most, (batch,), dtype=torch.int32, generator=torch.Generator().manual_seed(batch))
    starts = torch.randint(-1, most, (batch,), dtype=torch.int32, generator=torch.Generator().manual_seed(most))
    for num_slots, most_slots in ((0, 0), (33, 33), (33, 66), (300, 300), (300, 600), (1024, 2048)):
        for padding in (None, starts):
            expected = ops.split_plan(lengths, num_slots, padding, most_slots)
            placed = None if padding is None else padding.cuda()
            made = ops.split_plan(lengths.cuda(), num_slots, placed, most_slots)
            assert torch.equal(made.cpu(), expected)


@pytest.mark.sanitize
@CUDA_ONLY
@pytest.mark.parametrize("name", [name for name in PRESETS if PRESETS[name][0].block_size is None])
@pytest.mark.parametrize(
    "lengths",
    [[2000, 5, 128, 0, 700, 1], [1], [4000], [130] * 40, [700, *(1 + 7 * i % 130 for i in range(1500))]],
    ids=lambda lengths: f"{len(lengths)} sequences",
)
@pytest.mark.parametrize("is_new", [False, True])
@pytest.mark.parametrize("num_slots", SLOTS)
def test_a_plan_changes_no_more_than_roundings(name: str, lengths: list[int], is_new: bool, num_slots: int) -> None:
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
    num_slots = num_slots if len(lengths) < 100 else 2000  # so that the longest sequence is cut
    for plan in (None, ops.split_plan(held, num_slots), ops.split_plan(held, num_slots)):
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


def planned(
    layout: KVLayout,
    lengths: list[int],
    starts: list[int] | None,
    *,
    num_q_heads: int,
    head_dim: int,
    is_new: bool,
    num_slots: int = 33,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What a decode over rows side by side gives without a plan and with one, which must repeat and write the same."""
    device, batch, capacity = torch.device("cuda"), len(lengths), -(-max(lengths) // 128) * 128
    where: dict[str, Any] = {"dtype": torch.bfloat16, "device": device}
    held = torch.tensor(lengths, dtype=torch.int32, device=device)
    padding = None if starts is None else torch.tensor(starts, dtype=torch.int32, device=device)
    planes = layout.allocate((batch, 2, head_dim, head_dim), capacity, **where)
    before = held - int(is_new)
    # Sequences end at different tokens, so each is written by itself.
    for b, length in enumerate(before.tolist()):
        key, value = torch.randn(2, 1, 2, max(length, 0), head_dim, **where)
        own = planes[0].map(lambda x, b=b: x[b : b + 1]), planes[1].map(lambda x, b=b: x[b : b + 1])
        ops.append(key, value, *own, before[b : b + 1], layout, starts=None if padding is None else padding[b : b + 1])
    query = torch.randn(batch, num_q_heads, 1, head_dim, **where)
    new = tuple(torch.randn(2, batch, 2, 1, head_dim, **where)) if is_new else None
    counters, results, written = ops.new_counters(device), [], []
    plan = ops.split_plan(held, num_slots, padding)
    for split_plan in (None, plan, plan):
        own = planes[0].map(torch.clone), planes[1].map(torch.clone)
        options = {"softmax_scale": 0.1, "counters": counters, "starts": padding, "split_plan": split_plan}
        results.append(ops.decode(query, new, *own, held, layout, **options)[0])
        written.append([x.view(torch.uint8) for side in own for x in side.tensors()])
    for mine in written[1:]:
        assert all(torch.equal(x, y) for x, y in zip(mine, written[0], strict=True))
    assert torch.equal(results[1], results[2]) and counters is not None and not counters.any()
    return results[0], results[1]


@CUDA_ONLY
@pytest.mark.parametrize("num_slots", SLOTS)
@pytest.mark.parametrize("head_dim", [128, 96, 256])  # rows of 96 channels have gaps
@pytest.mark.parametrize("windows", [{}, {"sink_length": 4, "residual_length": 40}], ids=["codes", "windows"])
@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize(
    ("lengths", "starts"),
    [
        ([4000] * 6, [0, 3990, 2000, 4000, 3500, 128]),  # a padded batch; one sequence is padding alone
        ([4096] * 3, [0, 4090, 3000]),  # the new token fills a block of keys
        ([4136] * 3, [0, 4090, 3000]),  # a block of keys leaves a window of 40 tokens
        ([2000, 5, 128, 1, 700, 1], None),
        ([4000], [3000]),
        ([130] * 40, list(range(40))),
    ],
)
def test_rows_side_by_side_take_a_plan(
    name: str, windows: dict[str, int], head_dim: int, lengths: list[int], starts: list[int] | None, num_slots: int
) -> None:
    layout, options = KVLayout(*PRESETS[name], **windows), {"head_dim": head_dim, "num_slots": num_slots}
    for is_new in (False, True):
        expected, actual = planned(layout, lengths, starts, num_q_heads=8, is_new=is_new, **options)
        bound = 4 * torch.finfo(torch.bfloat16).eps * float(expected.abs().max())
        assert_close(actual, expected.float().cpu(), bound, f"{name}, new token: {is_new}")


@CUDA_ONLY
@pytest.mark.parametrize("name", ["int8", "int4-channel"])
def test_the_numbers_of_a_plan_count(name: str) -> None:
    """With the plan of shorter sequences, these are what is attended to."""
    layout, where = KVLayout(*PRESETS[name]), {"dtype": torch.bfloat16, "device": torch.device("cuda")}
    planes = layout.allocate((3, 2, 128, 128), 4096, **where)
    held, starts = (torch.tensor(each, dtype=torch.int32, device="cuda") for each in ([4000] * 3, [0, 1900, 1000]))
    shorter = held - 1952  # whole blocks of keys
    ops.append(*torch.randn(2, 3, 2, 2048, 128, **where), *planes, shorter, layout, starts=starts)
    query, options = torch.randn(3, 8, 1, 128, **where), {"softmax_scale": 0.1, "starts": starts}
    expected, _ = ops.decode(query, None, *planes, shorter, layout, **options)
    ops.append(*torch.randn(2, 3, 2, 1952, 128, **where), *planes, held, layout, starts=starts)
    whole, _ = ops.decode(query, None, *planes, held, layout, **options)
    options["split_plan"] = ops.split_plan(shorter, 33, starts)
    actual, _ = ops.decode(query, None, *planes, held, layout, **options)
    bound = 4 * torch.finfo(torch.bfloat16).eps * float(expected.abs().max())
    assert_close(actual, expected.float().cpu(), bound, name)
    assert float((whole - expected).abs().max()) > bound


@CUDA_ONLY
def test_one_scale_for_all_tokens() -> None:
    layout, where = KVLayout(FROZEN, FROZEN), {"dtype": torch.bfloat16, "device": torch.device("cuda")}
    planes = layout.allocate((3, 2, 128, 128), 4096, **where)
    for side in planes:
        side.codes.random_(0, 256)
        assert side.scale is not None
        side.scale.fill_(0.01)
    held, starts = (torch.tensor(each, dtype=torch.int32, device="cuda") for each in ([4000] * 3, [0, 3900, 1000]))
    query = torch.randn(3, 8, 1, 128, **where)
    expected, actual = (
        ops.decode(query, None, *planes, held, layout, softmax_scale=0.1, starts=starts, split_plan=plan)[0]
        for plan in (None, ops.split_plan(held, 33, starts))
    )
    bound = 4 * torch.finfo(torch.bfloat16).eps * float(expected.abs().max())
    assert_close(actual, expected.float().cpu(), bound, "frozen scales")


@CUDA_ONLY
@pytest.mark.parametrize("name", ["int8", "int4-token"])
def test_more_query_rows_than_one_thread_block_serves_take_no_plan(name: str) -> None:
    layout = KVLayout(*PRESETS[name])
    options: dict[str, Any] = {"num_q_heads": 64, "head_dim": 128, "is_new": True}
    expected, actual = planned(layout, [4000] * 3, [0, 3990, 2000], **options)
    assert torch.equal(actual, expected)


@CUDA_ONLY
@pytest.mark.parametrize("has_table", [True, False])
def test_numbers_that_are_no_plan_harm_nobody(has_table: bool) -> None:
    layout, device = KVLayout(*PRESETS["int4-token"]), torch.device("cuda")
    where = {"dtype": torch.bfloat16, "device": device}
    planes = layout.allocate((4, 2, 128, 128), 256, **where)
    if not has_table:
        planes = layout.allocate((2, 2, 128, 128), 512, **where)
    table = torch.arange(4, dtype=torch.int32, device=device).view(2, 2)
    held = torch.tensor([300, 500], dtype=torch.int32, device=device)
    for numbers in (torch.randint(-(2**31), 2**31 - 1, (5, 4)), torch.randint(-2, 5, (300, 4)), torch.zeros(5, 4)):
        plan = numbers.to(torch.int32).to(device)
        counters = ops.new_counters(device)
        options = {"softmax_scale": 0.1, "split_plan": plan, "counters": counters}
        options |= {"page_table": table} if has_table else {"starts": held - 200}
        ops.decode(torch.randn(2, 8, 1, 128, **where), None, *planes, held, layout, **options)
        torch.cuda.synchronize()
