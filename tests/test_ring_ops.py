"""`append` and `decode` in planes whose rows are a ring, against the same tokens in planes that have room for all.

What is stored agrees with plain planes bit for bit, and attention keeps within the bound of the other op tests
(`checks.run_decode`); where no visible token lies behind the end of the ring the sums are those of plain planes too.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
import torch
from cases import REFUSED, Case, clone, make_formats, make_transform, poisoned, queries, tokens
from checks import pair, run_decode, to
from compare import assert_same, assert_same_planes
from torch import Tensor

from hf_kvquant import KVFormat, ops
from hf_kvquant.config import PRESETS
from hf_kvquant.spec import reference
from hf_kvquant.spec.key_transform import KeyTransform
from hf_kvquant.spec.layout import KVLayout
from hf_kvquant.spec.planes import Planes

CAPACITY, WINDOW = 128, 90
# New tokens one step after another. 39 is the most that a window of 90 in a ring of 128 leaves room for; those beyond
# are only appended, as a prompt is, and of 300 and 141 only the newest 128 are written.
STEPS = (70, 1, 1, 39, 20, 1, 300, 1, 38, 128, 1, 141, 2)
# Sequences that begin at different places, one of them after many rounds; two begin with padding.
OFFSETS, PADDING = (0, 37, 400), (0, 5, 200)
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])
FORMATS = [*PRESETS.values(), *(pair(kv_format) for kv_format in make_formats() if kv_format.granularity == "tensor")]


def case_of(formats: tuple[KVFormat, KVFormat], residual_length: int = 0, **options: Any) -> Case:
    """What plain planes have room for: all that `STEPS` come to."""
    lengths = options.pop("lengths", OFFSETS)
    capacity = -(-(max(lengths) + sum(STEPS)) // 128) * 128
    starts = tuple(length + pad for length, pad in zip(lengths, PADDING, strict=False))
    return Case(
        formats,
        64,
        options.pop("dtype", torch.float32),
        num_q_per_kv=options.pop("num_q_per_kv", 2),
        lengths=lengths,
        starts=options.pop("starts", starts),
        capacity=capacity,
        residual_length=residual_length,
        **options,
    )


def grown(case: Case, count: int) -> Case:
    """The case after `count` more tokens, which are the queries too."""
    return dataclasses.replace(case, q_len=count, lengths=tuple(length + count for length in case.lengths))


def empty(case: Case, side: int, capacity: int) -> Planes:
    """Poisoned planes; a frozen scale is that of an earlier chunk."""
    kv_format, head_dim = case.formats[side], case.head_dims()[side]
    windows = {"slack": case.slack, **case.windows}
    made = poisoned(kv_format, case.batch, case.num_kv_heads, head_dim, capacity, case.dtype, **windows)
    if kv_format.granularity == "tensor":
        x = torch.randn(case.batch, 1, 4, head_dim, generator=torch.Generator().manual_seed(side))
        made = Planes(made.codes, *reference.compute_scale(x, kv_format), made.tail)
    return made


def in_a_ring(case: Case, side: int, plain: Planes, before: Planes, firsts: tuple[int, ...]) -> Planes:
    """What a ring is to hold: the newest rows of plain planes that were written, all others as `before`."""
    kv_format, expected = case.formats[side], clone(before)
    size = kv_format.block_size or 1
    for b, (first, length) in enumerate(zip(firsts, case.lengths, strict=True)):
        begin, end = first, length
        if size > 1:
            begin, end = (kv_format.tail_begin(count, case.residual_length) for count in (first, length))
        position = torch.arange(max(begin, end - CAPACITY), end)
        row = position % CAPACITY
        expected.codes[b][:, row] = plain.codes[b][:, position]
        for ours, theirs in ((expected.scale, plain.scale), (expected.zero, plain.zero)):
            if ours is None or theirs is None:
                continue
            if kv_format.granularity == "tensor":
                ours[b] = theirs[b]
            elif size == 1:
                ours[b][:, :, row] = theirs[b][:, :, position]
            else:
                ours[b][:, row[::size] // size] = theirs[b][:, position[::size] // size]
    return Planes(expected.codes, expected.scale, expected.zero, plain.tail)


def is_in_one_piece(case: Case) -> bool:
    """Whether all visible tokens of each sequence lie before the end of the ring, or all behind it."""
    return all(
        max(length - case.q_len - WINDOW + 1, start, 0) // CAPACITY == (length - 1) // CAPACITY
        for length, start in zip(case.lengths, case.starts or [0] * case.batch, strict=True)
    )


def walk(engine: str, case: Case, transform: KeyTransform | None = None, **extras: Any) -> None:
    """Appends and attends step by step, on the device in a ring and in the reference in plain planes."""
    firsts, starts = case.lengths, case.starts_tensor()
    plain = empty(case, 0, case.capacity), empty(case, 1, case.capacity)
    before = [empty(case, side, CAPACITY) for side in (0, 1)]
    rings = clone(before[0], engine), clone(before[1], engine)
    on_device = None if transform is None else transform.to(engine)
    operands = ops.Operands(*rings, case.ring, on_device)
    extras = {"softmax_scale": 0.125, "sliding_window": WINDOW, **extras}
    extras_there = {name: x.to(engine) if isinstance(x, Tensor) else x for name, x in extras.items()}
    starts_there = None if starts is None else starts.to(engine)
    for count in STEPS:
        case = grown(case, count)
        lengths, new = case.lengths_tensor(), [tokens(case, count, head_dim) for head_dim in case.head_dims()]
        for side, x in enumerate(new):
            used = None if side else transform
            reference.append(x, plain[side], case.formats[side], lengths, used, starts, **case.windows)
        new_there, query = (new[0].to(engine), new[1].to(engine)), queries(case)
        is_attended = count <= CAPACITY + 1 - WINDOW
        if is_attended:
            out, lse = operands.decode(
                query.to(engine), new_there, lengths.to(engine), starts=starts_there, **extras_there
            )
        else:
            operands.append(*new_there, lengths.to(engine), starts_there)
        for side in (0, 1):
            expected = in_a_ring(case, side, plain[side], before[side], firsts)
            assert_same_planes(rings[side], expected, f"{case}, {'value' if side else 'key'}")
        if not is_attended:
            continue
        options: dict[str, Any] = {"planes": plain, "query": query, "key_transform": transform, **extras}
        again = run_decode(engine, case, ring=rings, **options)
        same = run_decode(engine, case, **options) if engine == "cpu" and is_in_one_piece(case) else again
        for x, others in ((out, (again[0], same[0])), (lse, (again[1], same[1]))):
            assert_same(x, others[0], f"{case}, with new tokens and without")
            assert_same(x, others[1], f"{case}, ring and plain")


@pytest.mark.parametrize("formats", FORMATS, ids=lambda made: "+".join(each.describe() for each in made))
def test_a_ring_holds_and_attends_to_what_plain_planes_do(engine: str, formats: tuple[KVFormat, KVFormat]) -> None:
    walk(engine, case_of(formats))


@pytest.mark.parametrize("residual_length", [1, 70, 128, 200])
@pytest.mark.parametrize("preset", ["int8", "int4-channel", "none"])
def test_with_tokens_that_stay_dense(engine: str, preset: str, residual_length: int) -> None:
    """Of `none` keys, so that one side has a tail and the other has not."""
    formats = (PRESETS["none"][0], PRESETS["int4-token"][1]) if preset == "none" else PRESETS[preset]
    walk(engine, case_of(formats, residual_length))


@pytest.mark.parametrize("kind", ["center+smooth+rotate", "rotate"])
@pytest.mark.parametrize("residual_length", [0, 30])
@pytest.mark.parametrize("preset", ["int4-token", "int4-channel"])
def test_with_transformed_keys(engine: str, preset: str, kind: str, residual_length: int) -> None:
    walk(engine, case_of(PRESETS[preset], residual_length), make_transform(kind, 64))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("preset", ["int8", "int4-token", "int4-channel", "fp8", "none"])
def test_in_16_bits_with_every_extra(engine: str, preset: str, dtype: torch.dtype) -> None:
    case = case_of(PRESETS[preset], dtype=dtype, num_q_per_kv=4)
    extras = {"sinks": torch.randn(8), "alibi_slopes": torch.rand(8) / 16, "softcap": 5.0, "num_splits": 3}
    walk(engine, case, **extras)


@pytest.mark.parametrize("preset", ["int8", "int4-token", "int4-channel"])
def test_in_16_bits_with_many_rows(engine: str, preset: str) -> None:
    """Of 38 and 39 tokens so many that a chunk kernel serves them, here with nothing that changes scores."""
    walk(engine, case_of(PRESETS[preset], dtype=torch.bfloat16, num_q_per_kv=8))


@pytest.mark.parametrize("head_dim", [40, 256])
def test_other_head_dims_without_padding(engine: str, head_dim: int) -> None:
    case = case_of(PRESETS["k8v4"], lengths=(0, 0), starts=None, num_q_per_kv=8)
    walk(engine, dataclasses.replace(case, head_dim=head_dim, value_dim=64))


@pytest.mark.full(
    when=lambda formats, residual_length: residual_length and FORMATS.index(formats) % 3,
    reason="which tokens are dense and what codes stand for meet in one line",
)
@pytest.mark.parametrize(
    ("formats", "residual_length"),
    [(made, length) for made in FORMATS for length in (0, 30) if length == 0 or any(x.is_quantized for x in made)],
    ids=lambda given: given if isinstance(given, int) else "+".join(each.describe() for each in given),
)
def test_the_reference_does_the_same(
    formats: tuple[KVFormat, KVFormat], residual_length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ops.kernels, "has_kernel", lambda *_: False)
    # Sums of float32 over a ring are in another order: not what plain planes give, bit for bit.
    walk("cpu:0", case_of(formats, residual_length))


@pytest.mark.sanitize
@pytest.mark.parametrize("preset", [*PRESETS])
def test_positions_go_on_for_ever(engine: str, preset: str) -> None:
    """The same tokens many rounds later make the same planes and the same output, up to the last position there is."""
    made = []
    for rounds in (4, ops.MAX_RING_LENGTH // 256):
        torch.manual_seed(0)
        first = rounds * 256 - sum(STEPS)
        case = case_of(PRESETS[preset], lengths=(0, 0), starts=None)
        case = dataclasses.replace(case, lengths=(first, first), starts=(first, first + 3))
        rings = [clone(empty(case, side, CAPACITY), engine) for side in (0, 1)]
        operands = ops.Operands(*rings, case.ring)
        for count in STEPS:
            case = grown(case, count)
            new = tuple(tokens(case, count, 64).to(engine) for _ in range(2))
            where = case.lengths_tensor().to(engine), case.starts_tensor().to(engine)  # type: ignore[union-attr]
            operands.append(*new, *where)
            query = torch.randn(2, 4, min(count, 39), 64).to(engine)
            options = {"sliding_window": WINDOW, "starts": where[1], "alibi_slopes": SLOPES.to(engine)}
            made.append(operands.decode(query, None, where[0], softmax_scale=0.125, **options))
        made += [rings]
    half = len(made) // 2
    for early, late in zip(made[: half - 1], made[half:-1], strict=True):
        assert all(x.isfinite().all() for x in early)
        assert_same(late[0], early[0], f"{preset}, out")
        assert_same(late[1], early[1], f"{preset}, lse")
    for early, late in zip(made[half - 1], made[-1], strict=True):
        assert_same_planes(late, clone(early), preset)


@pytest.mark.parametrize("preset", ["int8", "int4-channel", "fp8", "none"])
def test_nothing_behind_the_window_matters(engine: str, preset: str) -> None:
    """Nor anything in rows of tokens that the oldest query does not see, nor newer tokens than a query."""
    case = case_of(PRESETS[preset], lengths=(0, 0), starts=None)
    rings = [clone(empty(case, side, CAPACITY), engine) for side in (0, 1)]
    operands = ops.Operands(*rings, case.ring)
    case = grown(case, 3 * CAPACITY)
    new = [tokens(case, case.q_len, 64) for _ in range(2)]
    for x in new:
        x[:, :, : -WINDOW - 1] = torch.nan  # all but what is visible to the last two tokens
        x[1, :, -1] = torch.nan
    operands.append(*(x.to(engine) for x in new), case.lengths_tensor().to(engine))
    query = torch.randn(2, 4, 2, 64).to(engine)
    out, lse = operands.decode(
        query, None, case.lengths_tensor().to(engine), softmax_scale=0.125, sliding_window=WINDOW
    )
    if PRESETS[preset][0].block_size is None:
        assert out[0].isfinite().all() and out[1, 0].isfinite().all() and lse[0].isfinite().all()
        assert out[1, 1].isnan().all() and lse[1, :, 1].isnan().all() and lse[1, :, 0].isfinite().all()
    else:  # a NaN spoils its channel for a whole block, and here block 1 of keys holds some that is visible
        assert out.isnan().all()


@pytest.mark.parametrize("num_splits", [1, 3, 2**31 - 1])
@pytest.mark.parametrize("preset", ["int8", "int4-channel", "fp8", "none"])
def test_fixed_splits_make_a_sequence_independent_of_its_batch(engine: str, preset: str, num_splits: int) -> None:
    """Also where the kernel takes fewer of them. One sequence begins within its window, two go round the ring."""
    case = case_of(PRESETS[preset], dtype=torch.bfloat16, lengths=(0, 511, 4400), starts=(480, 0, 0))
    case = grown(case, 600)
    new = [tokens(case, 600, 64) for _ in range(2)]
    query = torch.randn(3, 4, 2, 64).to(case.dtype)

    def attend(*rows: int) -> tuple[Tensor, Tensor]:
        lengths, starts = (tuple(of[row] for row in rows) for of in (case.lengths, case.starts or ()))
        ours = dataclasses.replace(case, lengths=lengths, starts=starts)
        planes = (clone(empty(ours, side, 512), engine) for side in (0, 1))
        operands = ops.Operands(*planes, case.ring)
        where = to(engine, ours.lengths_tensor(), ours.starts_tensor())
        operands.append(*to(engine, *(x[list(rows)] for x in new)), *where)
        options: dict[str, Any] = {"softmax_scale": 0.125, "sliding_window": 400, "num_splits": num_splits}
        return operands.decode(query[list(rows)].to(engine), None, where[0], starts=where[1], **options)

    together = attend(0, 1, 2)
    for rows in ((0,), (1,), (2,), (2, 0)):
        for x, expected in zip(attend(*rows), together, strict=True):
            assert_same(x, expected[list(rows)].cpu(), f"{preset}, {num_splits} splits, rows {rows}")


@pytest.mark.parametrize("preset", ["int8", "int4-channel"])
def test_opcheck(device: str, preset: str) -> None:
    case = grown(case_of(PRESETS[preset], 9), 3)
    planes = [clone(empty(case, side, CAPACITY), device) for side in (0, 1)]
    for made in planes:
        for plane in made.tensors():
            plane.zero_()  # what is compared are numbers, not NaN
    operands = ops.Operands(*planes, case.ring)
    key, value, query, lengths, starts = to(
        device, tokens(case, 3, 64), tokens(case, 3, 64), queries(case), case.lengths_tensor(), case.starts_tensor()
    )
    append, decode = torch.ops.hf_kvquant.append.default, torch.ops.hf_kvquant.decode.default
    torch.library.opcheck(append, (key, value, *operands._planes, lengths, starts, *operands._kinds))
    extras = (None, starts, None, None, 0.125, 0.0, WINDOW, 0)
    torch.library.opcheck(decode, (query, key, value, *operands._planes, lengths, *extras, *operands._kinds))


# --- what is refused --------------------------------------------------------------------------------------------------


def test_ops_refuse_a_capacity_without_whole_blocks(device: str) -> None:
    case = case_of(pair(KVFormat("int8")))
    operands = ops.Operands(*(clone(empty(case, side, 192), device) for side in (0, 1)), case.ring)
    x, lengths = torch.randn(3, 2, 1, 64, device=device), torch.ones(3, dtype=torch.int32, device=device)
    message = "`key_planes.codes` must have heads and a capacity that is a positive multiple of 128, got [3, 2, 192"
    with pytest.raises(REFUSED, match=re.escape(f"append: {message}")):
        operands.append(x, x, lengths)
    with pytest.raises(REFUSED, match=re.escape(f"decode: {message}")):
        operands.decode(x, None, lengths, softmax_scale=1.0, sliding_window=4)


def test_a_ring_has_no_first_tokens() -> None:
    with pytest.raises(ValueError, match=r"^KVLayout: `sink_length` must be 0 for a ring, got 2\. The first tokens"):
        KVLayout(*PRESETS["int8"], sink_length=2, rows="ring")


@pytest.mark.parametrize(("window", "q_len", "most"), [(0, 1, 128), (129, 1, 128), (90, 40, 89), (1, 129, 0)])
def test_decode_refuses_a_window_that_the_ring_does_not_hold(device: str, window: int, q_len: int, most: int) -> None:
    case = case_of(PRESETS["int8"], lengths=(0,))
    planes = [clone(empty(case, side, CAPACITY), device) for side in (0, 1)]
    before = [clone(made) for made in planes]
    operands = ops.Operands(*planes, case.ring)
    x, lengths = torch.randn(1, 2, q_len, 64, device=device), torch.full((1,), 200, dtype=torch.int32, device=device)
    message = (
        f"decode: `sliding_window` must be between 1 and {most} in a ring with a capacity of 128 and {q_len} "
        f"query tokens, got {window}. Attend to fewer tokens at a time, or make a larger ring."
    )
    with pytest.raises(REFUSED, match=re.escape(message)):
        operands.decode(x, (x, x), lengths, softmax_scale=1.0, sliding_window=window)
    for made, was in zip(planes, before, strict=True):
        assert_same_planes(made, was, "after an error")


@pytest.mark.parametrize("has_kernels", [True, False], ids=["kernels", "reference"])
def test_numbers_on_the_host_are_checked(has_kernels: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not has_kernels:
        monkeypatch.setattr(ops.kernels, "has_kernel", lambda *_: False)
    case = case_of(PRESETS["int8"], lengths=(0, 0))
    operands = ops.Operands(*(empty(case, side, CAPACITY) for side in (0, 1)), case.ring)
    x, lengths = torch.randn(2, 2, 1, 64), torch.tensor([2**30, 2**30 + 1], dtype=torch.int32)
    message = "`lengths` must be between {} and .*1073741824.*, got .*1073741825"
    with pytest.raises(REFUSED, match="append: " + message.format("(0|the 1 new tokens)")):
        operands.append(x, x, lengths)
    with pytest.raises(REFUSED, match="decode: " + message.format("(0|the 0 new tokens)")):
        operands.decode(x, None, lengths, softmax_scale=1.0, sliding_window=4)
