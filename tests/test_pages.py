"""Pages: under any page table, ops give the bits that they give over the rows of each sequence side by side."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import pytest
import tolerances
import torch
from compare import assert_close, assert_same
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hf_kvquant import PRESETS, KeyTransform, ops
from hf_kvquant.spec.formats import BLOCK_SIZE
from hf_kvquant.spec.layout import KVLayout
from hf_kvquant.spec.pages import PageLayout
from hf_kvquant.spec.planes import Planes
from hf_kvquant.spec.reference import append, dense_tokens, dequantize, gather_pages, split_tails
from hf_kvquant.spec.tails import TailLayout

HEADS, HEAD_DIM, GARBAGE = 2, 64, 99
WINDOWS = {"sink_length": 4, "residual_length": 40}
# Presets, some also with dense windows.
LAYOUTS = {name: KVLayout(*formats) for name, formats in PRESETS.items()}
LAYOUTS |= {f"{name}:4+40": KVLayout(*PRESETS[name], **WINDOWS) for name in ("int8", "k4v2", "int2", "int4-channel")}
LAYOUTS |= {"int4-token:4+0": KVLayout(*PRESETS["int4-token"], sink_length=4)}
PAGED = list(LAYOUTS)
REFERENCE = "reference"
CHANNEL = KVLayout(*PRESETS["int4-channel"])


def operands(engine: str, planes: tuple[Planes, Planes], layout: KVLayout, transform: KeyTransform | None) -> Any:
    made = ops.Operands(*planes, layout, transform)
    if REFERENCE in engine:
        made._append = torch.ops.hf_kvquant.append_reference.default
        made._decode = torch.ops.hf_kvquant.decode_reference.default
    return made


def with_gaps(plane: Tensor) -> Tensor:
    """The same plane with memory between its pages that must not be read or written."""
    numel = plane[0].numel()
    memory = torch.full((len(plane), numel + 64), GARBAGE, dtype=plane.dtype, device=plane.device)
    memory[:, :numel] = 0
    return memory[:, :numel].unflatten(1, plane.shape[1:])


def random_table(lengths: list[int], page_rows: int, num_pages: int, num_spare: int, num_slots: int) -> Tensor:
    """A table with pages and slots in random order. Where no token is held, it has numbers that are no page."""
    table = torch.randperm(len(lengths) * num_pages + num_spare)[: len(lengths) * num_pages].view(len(lengths), -1)
    is_held = torch.arange(num_pages) * page_rows < torch.tensor(lengths)[:, None]
    table = torch.where(is_held, table, torch.tensor(-1)).int()
    slots = torch.randperm(num_slots).tolist()
    return with_tails([slots.pop() if length else -1 for length in lengths], table) if num_slots else table


def allocated(
    layout: KVLayout, num_pages: int, num_slots: int, page_rows: int, dtype: torch.dtype, device: torch.device
) -> tuple[Planes, Planes]:
    """Planes of pages, with tails in another number of slots."""
    where: dict[str, Any] = {"dtype": dtype, "device": device}
    pages, slots = (
        layout.allocate((count, HEADS, HEAD_DIM, HEAD_DIM), page_rows, **where) for count in (num_pages, num_slots)
    )
    return joined(pages, [each.tail for each in slots])


def joined(pages: Iterable[Planes], tails: Iterable[Tensor | None]) -> tuple[Planes, Planes]:
    key, value = (dataclasses.replace(side, tail=tail) for side, tail in zip(pages, tails, strict=True))
    return key, value


def with_tails(slots: list[int], pages: Tensor, tail_from: int = 0) -> Tensor:
    """A page table that begins with columns for tails, from pages of tokens, `[batch, pages]` int32."""
    first = torch.tensor(slots, dtype=torch.int32, device=pages.device).unsqueeze(1)
    return torch.cat((first, torch.full_like(first, tail_from), pages), dim=1)


def compared(
    name: str, engine: str, page_rows: int, lengths: list[int], chunks: list[int], options: dict[str, Any] | None = None
) -> None:
    """Append chunks to sequences that end with `lengths` tokens, with pages and without; attend from the second on.

    There are fewer slots for tails than pages, or more.
    """
    device = torch.device("cuda" if engine == "cuda" else "cpu")
    layout, batch = LAYOUTS[name], len(lengths)
    num_pages = -(-max(lengths) // page_rows) + 1
    num_slots = batch + 1 if page_rows == 128 else 3 * batch * num_pages
    table = random_table(lengths, page_rows, num_pages, 3, num_slots if layout.has_tail else 0).to(device)
    shape = HEADS, HEAD_DIM, HEAD_DIM
    # The fastest kernels are for half precision.
    where: dict[str, Any] = {"dtype": torch.bfloat16 if engine == "cuda" else torch.float32, "device": device}
    rows = layout.allocate((batch, *shape), num_pages * page_rows, **where)
    pool = allocated(layout, batch * num_pages + 3, num_slots, page_rows, **where)
    pages = pool[0].map(with_gaps), pool[1].map(with_gaps)
    transform = None
    if layout.key.is_quantized:
        center, smoothing = (
            torch.randn(HEADS, HEAD_DIM, device=device),
            torch.rand(HEADS, HEAD_DIM, device=device) + 0.5,
        )
        transform = KeyTransform(center, smoothing, True)
    over_rows, over_pages = (operands(engine, planes, layout, transform) for planes in (rows, pages))
    left = sum(chunks)
    for q_len in chunks:
        left -= q_len
        held = torch.tensor(lengths, dtype=torch.int32, device=device) - left
        key, value = torch.randn(2, batch, HEADS, q_len, HEAD_DIM, **where)
        if q_len == chunks[0]:
            over_rows.append(key, value, held)
            over_pages.append(key, value, held, page_table=table)
            continue
        query = torch.randn(batch, 2 * HEADS, q_len, HEAD_DIM, **where)
        given_options = {"softmax_scale": 0.125, "num_splits": 3, **(options or {})}
        if q_len > ops.largest_step(layout, given_options.get("sliding_window", 0)):
            expected = over_rows.attend_chunk(query, (key, value), held, **given_options)
            actual = over_pages.attend_chunk(query, (key, value), held, **given_options, page_table=table)
            over_rows.append(key, value, held)
            over_pages.append(key, value, held, page_table=table)
        else:
            expected = over_rows.decode(query, (key, value), held, **given_options)
            actual = over_pages.decode(query, (key, value), held, **given_options, page_table=table)
        # Where attention begins within a tile, it cuts tiles at other tokens, and adds in another order.
        is_cut = "sliding_window" in given_options or any(layout.windows.values())
        roundings = tolerances.NUM_ROUNDINGS if is_cut else 0.0
        for x, y, what in zip(actual, expected, ("out", "lse"), strict=True):
            bound = roundings * torch.finfo(y.dtype).eps * float(y.abs().max())
            assert_close(x, y.cpu(), bound, f"{what} of {q_len} tokens")
    check_written(pages, rows, layout, table, lengths)


def check_written(
    pages: tuple[Planes, Planes], rows: tuple[Planes, Planes], layout: KVLayout, table: Tensor, lengths: list[int]
) -> None:
    """Pages hold what rows hold, and nothing else has changed."""
    tails, table = split_tails(table, layout.has_tail)
    for paged, linear, kv_format in zip(pages, rows, layout.formats, strict=True):
        for plane, expected in zip(paged.tensors(), linear.tensors(), strict=True):
            is_blocked, is_free = kv_format.block_size is not None, torch.ones(len(plane), dtype=torch.bool)
            axis = 2 if plane is paged.codes or is_blocked else 3
            for b, length in enumerate(lengths):
                if plane is paged.tail:
                    assert tails is not None
                    is_free[int(tails.slot[b])] = False
                    # Without windows, the tail of a block has rows that are left over.
                    held = plane.shape[2] if any(layout.windows.values()) else length % BLOCK_SIZE
                    assert_same(
                        plane[int(tails.slot[b]), :, :held], expected[b, :, :held].cpu(), f"tail of sequence {b}"
                    )
                    continue
                for i in range(-(-length // paged.codes.shape[2])):
                    page = int(table[b, i])
                    is_free[page] = False
                    part = expected[b].narrow(axis - 1, i * plane.shape[axis], plane.shape[axis])
                    assert_same(plane[page], part.cpu(), f"page {i} of sequence {b}")
            assert not plane[is_free.to(plane.device)].any(), "a page that no sequence has was written"
            base = plane._base
            assert base is None or bool((base[:, plane[0].numel() :] == GARBAGE).all()), "memory between pages"


@pytest.mark.sanitize
@pytest.mark.parametrize("page_rows", [128, 256])
@pytest.mark.parametrize("name", PAGED)
def test_pages_give_the_bits_of_rows_side_by_side(name: str, page_rows: int, engine: str) -> None:
    torch.manual_seed(0)
    compared(name, engine, page_rows, [400, 326, 620, 257], [60, 1, 2, 1, 70])  # one fills its page


@pytest.mark.parametrize("name", PAGED)
def test_pages_of_the_reference(name: str) -> None:
    compared(name, REFERENCE, 128, [400, 384], [60, 1, 1, 70])  # one fills its page


@pytest.mark.parametrize(
    "options", [{"sliding_window": 70}, {"softcap": 5.0}, {"num_splits": 0}], ids=["window", "softcap", "splits"]
)
def test_options(options: dict[str, Any], engine: str) -> None:
    torch.manual_seed(1)
    compared("int4-token", engine, 128, [230, 613], [40, 20, 1, 80], options)


@given(
    name=st.sampled_from(PAGED),
    page_rows=st.sampled_from([128, 256, 384]),
    lengths=st.lists(st.integers(40, 600), min_size=1, max_size=5),
    chunks=st.lists(st.integers(1, 10), min_size=1, max_size=4),
    seed=st.integers(0, 2**31),
)
def test_any_lengths(name: str, page_rows: int, lengths: list[int], chunks: list[int], seed: int) -> None:
    torch.manual_seed(seed)
    compared(name, "cpu", page_rows, lengths, chunks)


def test_sequences_may_share_pages() -> None:
    """A common prefix is read from the same pages, and is not written."""
    layout, lengths = KVLayout(*PRESETS["int8"]), torch.tensor([258, 258], dtype=torch.int32)
    planes = layout.allocate((4, HEADS, HEAD_DIM, HEAD_DIM), 128, dtype=torch.float32, device=torch.device("cpu"))
    table = torch.tensor([[3, 0, 1], [3, 0, 2]], dtype=torch.int32)
    torch.manual_seed(0)
    prefix = torch.randn(2, 1, HEADS, 256, HEAD_DIM)
    ops.append(*prefix, *planes, torch.tensor([256], dtype=torch.int32), layout, page_table=table[:1])
    before = planes[0].codes[[0, 3]].clone()
    new, query = torch.randn(2, 1, HEADS, 2, HEAD_DIM).expand(2, 2, -1, -1, -1), torch.randn(1, 4, 2, HEAD_DIM)
    out, _ = ops.decode(
        query.expand(2, -1, -1, -1), tuple(new), *planes, lengths, layout, softmax_scale=0.125, page_table=table
    )
    assert_same(out[1], out[0], "sequences with the same tokens")
    assert_same(planes[0].codes[[0, 3]], before, "shared pages")


TAKEN = {
    f"{name}:{sinks}+{window}": KVLayout(*PRESETS[name], sink_length=sinks, residual_length=window)
    for name, sinks, window in (
        ("int8", 0, 40), ("k4v2", 4, 40), ("int4-token", 0, 40), ("int4-channel", 4, 28), ("int4-channel", 0, 0)
    )
}  # fmt: skip


@dataclasses.dataclass
class Taken:
    """A sequence that took over the first 256 tokens of another one, after some chunks.

    Attributes:
        planes: All pages.
        chunks: The query, key and value of each.
        results: The output and `lse` of each.
        plain: The same by plain PyTorch, in the working dtype, over what the reference dequantises.
        max_logit: Of these.
    """

    planes: tuple[Planes, Planes]
    chunks: list[list[Tensor]] = dataclasses.field(default_factory=list)
    results: list[tuple[Tensor, Tensor]] = dataclasses.field(default_factory=list)
    plain: list[tuple[Tensor, Tensor]] = dataclasses.field(default_factory=list)
    max_logit: float = 0.0


SHARED, OWN = 3, [6, 5]  # pages
FIRST_TAIL, TAIL = 8, 7  # slots


def of_pages(planes: Planes) -> list[Tensor]:
    return dataclasses.replace(planes, tail=None).tensors()


def taken_over(engine: str, layout: KVLayout, q_lens: list[int], dtype: torch.dtype) -> Taken:
    torch.manual_seed(0)
    device = torch.device("cuda" if "cuda" in engine else "cpu")
    where: dict[str, Any] = {"dtype": dtype, "device": device}
    transform = KeyTransform(None, torch.rand(HEADS, HEAD_DIM, device=device) + 0.5, True)
    made = Taken(allocated(layout, 7, 9, 256, **where))
    pages = operands(engine, made.planes, layout, transform)
    of_first, of_second = (torch.tensor([[SHARED, *own]], dtype=torch.int32, device=device) for own in ([1], OWN))
    first, length = torch.randn(2, 1, HEADS, 300, HEAD_DIM, **where), 256
    of_first = with_tails([FIRST_TAIL], of_first)
    pages.append(*first, torch.tensor([300], dtype=torch.int32, device=device), page_table=of_first)
    for side in made.planes:
        if side.tail is not None:
            side.tail[TAIL, :, : layout.sink_length] = side.tail[FIRST_TAIL, :, : layout.sink_length]
    shared = [[plane[SHARED].clone() for plane in of_pages(side)] for side in made.planes]
    table = with_tails([TAIL], of_second, tail_from=256)
    for q_len in q_lens:
        query, key, value = chunk = [torch.randn(1, heads, q_len, HEAD_DIM, **where) for heads in (4, HEADS, HEADS)]
        length += q_len
        held = torch.tensor([length], dtype=torch.int32, device=device)
        result = pages.decode(query, (key, value), held, softmax_scale=0.125, page_table=table)
        made.chunks.append(chunk)
        made.results.append(result)
        keys, values = (
            x[:, :, :length].repeat_interleave(2, 1) for x in read(made.planes, layout, table, held, transform, dtype)
        )
        scores = (0.125 * (query @ keys.mT)).masked_fill(
            torch.arange(length, device=device) > torch.arange(length - q_len, length, device=device)[:, None],
            -torch.inf,
        )
        plain = (scores.float().softmax(-1).to(dtype) @ values).transpose(1, 2)
        made.plain.append((plain, scores.float().logsumexp(-1)))
        largest = 0.125 * query.float().norm(dim=-1).max() * keys.float().norm(dim=-1).max()
        made.max_logit = max(made.max_logit, float(largest))
    for side, before in zip(made.planes, shared, strict=True):
        for plane, page in zip(of_pages(side), before, strict=True):
            assert_same(plane[SHARED], page.cpu(), "the shared page")
    return made


def read(
    planes: tuple[Planes, Planes],
    layout: KVLayout,
    table: Tensor,
    held: Tensor,
    transform: KeyTransform | None,
    dtype: torch.dtype,
) -> list[Tensor]:
    """The keys and values that attention reads, dequantised."""
    tails, pages = split_tails(table, layout.has_tail)
    slot, tail_from = (None, None) if tails is None else tails
    options = {"lengths": held, **layout.windows, "tail_from": tail_from, "dtype": dtype}
    return [
        dequantize(gather_pages(side, pages, slot, each.block_size), each, key_transform=of_keys, **options)
        for side, each, of_keys in zip(planes, layout.formats, (transform, None), strict=True)
    ]


@pytest.mark.sanitize
@pytest.mark.parametrize("q_lens", [[1, 1, 2], [3, 70, 1], [30, 90, 1, 1, 8, 150, 1]], ids=str)
@pytest.mark.parametrize("name", TAKEN)
def test_tokens_that_were_taken_over_are_read_as_codes(name: str, q_lens: list[int], engine: str) -> None:
    dtype = torch.bfloat16 if engine == "cuda" else torch.float32
    of_engine = taken_over(engine, TAKEN[name], q_lens, dtype)
    expected = taken_over("cuda reference" if engine == "cuda" else REFERENCE, TAKEN[name], q_lens, dtype)
    max_value = max(float(value.abs().max()) for _, _, value in expected.chunks)
    for (out, lse), (exact_out, exact_lse), (plain_out, plain_lse) in zip(
        of_engine.results, expected.results, expected.plain, strict=True
    ):
        bound = tolerances.attention_bound(exact_out, plain_out, dtype, expected.max_logit, max_value)
        assert_close(out, exact_out.cpu(), bound, f"{name}, out")
        assert_close(
            lse, exact_lse.cpu(), tolerances.lse_bound(exact_lse, plain_lse, expected.max_logit), f"{name}, lse"
        )
    for side, of_reference in zip(of_engine.planes, expected.planes, strict=True):
        for plane, other in zip(of_pages(side), of_pages(of_reference), strict=True):
            assert_same(plane[[SHARED, *OWN]], other[[SHARED, *OWN]].cpu(), "pages")
        if side.tail is not None and of_reference.tail is not None:
            assert_same(side.tail[TAIL], of_reference.tail[TAIL].cpu(), "the tail")


@pytest.mark.parametrize("name", TAKEN)
def test_what_the_reference_reads_of_tokens_that_were_taken_over(name: str) -> None:
    """Codes, except sinks. Own tokens are read as in a sequence that has no others."""
    layout, num_own = TAKEN[name], 130
    made = taken_over(REFERENCE, layout, [50, num_own - 50], torch.float32)
    table = with_tails([TAIL], torch.tensor([[SHARED, *OWN]], dtype=torch.int32), tail_from=256)
    tails, pages = split_tails(table, layout.has_tail)
    assert tails is not None
    alone = layout.allocate((1, HEADS, HEAD_DIM, HEAD_DIM), 256, dtype=torch.float32, device=torch.device("cpu"))
    held, of_own = (torch.tensor([n], dtype=torch.int32) for n in (256 + num_own, num_own))
    sinks, window = layout.sink_length, {"residual_length": layout.residual_length}
    for side, (kv_format, x) in enumerate(
        zip(layout.formats, read(made.planes, layout, table, held, None, torch.float32), strict=True)
    ):
        coded = dequantize(gather_pages(made.planes[side], pages, tails.slot, kv_format.block_size), kv_format)
        assert_same(x[:, :, sinks:256], coded[:, :, sinks:256], "tokens that were taken over")
        tail = made.planes[side].tail
        if tail is not None:
            assert_same(x[0, :, :sinks], tail[FIRST_TAIL, :, :sinks], "sinks")
        new = torch.cat([chunk[1 + side] for chunk in made.chunks], dim=2)
        append(new, alone[side], kv_format, of_own, **window)
        is_dense = dense_tokens(alone[side], kv_format, of_own, **window)[0][0]
        is_coded = ~is_dense & (torch.arange(256) < num_own)
        own, coded = x[:, :, 256:512], coded[:, :, 256:512]
        assert_same(own[:, :, is_dense], new[:, :, is_dense[:num_own]], "own tokens in the window")
        assert_same(own[:, :, is_coded], coded[:, :, is_coded], "own tokens behind it")


def call(engine: str, *, layout: KVLayout | None = None, **changes: Any) -> None:
    layout = KVLayout(*PRESETS["int8"]) if layout is None else layout
    rows, num_slots = changes.pop("page_rows", 128), changes.pop("num_slots", 6)
    key, value = allocated(layout, 4, num_slots, rows, torch.float32, torch.device("cpu"))
    planes = key, value.map(lambda plane: plane[:2] if plane is value.tail else plane)
    if not changes.pop("has_unequal_tails", False):
        planes = key, value
    arguments: dict[str, Any] = {
        "lengths": torch.tensor([100, 200], dtype=torch.int32),
        "page_table": torch.tensor([[0, 1], [2, 3]], dtype=torch.int32),
        **changes,
    }
    new = torch.randn(2, 2, HEADS, 1, HEAD_DIM)
    operands(engine, planes, layout, None).append(new[0], new[1], **arguments)


@pytest.mark.parametrize("kind", ["cpu", REFERENCE])
@pytest.mark.parametrize(
    "changes, message",
    [
        ({"layout": KVLayout(*PRESETS["int8"], rows="ring")}, "`page_table` must be None for this layout"),
        (
            {"layout": LAYOUTS["k4v2:4+40"], "page_table": torch.zeros(2, 0, dtype=torch.int32)},
            "`page_table` must begin with 2 columns of tails for this layout",
        ),
        (
            {"layout": CHANNEL, "page_table": torch.zeros(2, 1, dtype=torch.int32)},
            "`page_table` must begin with 2 columns of tails for this layout",
        ),
        (
            {"layout": CHANNEL, "page_table": torch.tensor([[5, 0, 0, 1], [6, 0, 2, 3]], dtype=torch.int32)},
            "`page_table` must begin with a slot from 0 to 5 for the tail, got 6 for sequence 1. Give every sequence a "
            "slot of the tail planes.",
        ),
        (
            {"layout": LAYOUTS["k4v2:4+40"], "page_table": torch.tensor([[-1, 0, 0, 1], [2, 0, 2, 3]]).int()},
            "`page_table` must begin with a slot from 0 to 5 for the tail, got -1 for sequence 0",
        ),
        (
            {"layout": CHANNEL, "num_slots": 2, "page_table": torch.tensor([[0, 0, 0, 1], [2, 0, 2, 3]]).int()},
            "`page_table` must begin with a slot from 0 to 1 for the tail, got 2 for sequence 1",
        ),
        (
            {"layout": CHANNEL, "num_slots": 0, "page_table": torch.zeros(2, 4, dtype=torch.int32)},
            "`page_table` must be None for tail planes without slots, got a tensor",
        ),
        (
            {"layout": LAYOUTS["k4v2:4+40"], "has_unequal_tails": True, "page_table": torch.zeros(2, 4).int()},
            r"`value_planes(.tail|\[\d\] \(tail\))` must be \[6, 2, 44, 64\]",
        ),
        (
            {"layout": CHANNEL, "page_table": torch.tensor([[3, 0, 0, 1], [1, 64, 2, 3]], dtype=torch.int32)},
            "`page_table` must have a multiple of 128 from 0 to 199 as the first token that a tail may have, got 64 "
            "for sequence 1",
        ),
        (
            {"layout": CHANNEL, "page_table": torch.tensor([[3, 128, 0, 1], [1, 0, 2, 3]], dtype=torch.int32)},
            "from 0 to 99 as the first token that a tail may have, got 128 for sequence 0",
        ),
        ({"page_rows": 0}, "`page_table` must be None for planes without rows"),
        ({"page_rows": 192}, "a capacity that is a multiple of 128"),
        ({"page_table": torch.zeros(2, 2, dtype=torch.int64)}, "`page_table`"),
        ({"page_table": torch.zeros(2, dtype=torch.int32)}, "`page_table`"),
        ({"page_table": torch.zeros(3, 2, dtype=torch.int32)}, "`key`|`lengths`"),
        (
            {"page_table": torch.tensor([[0, 1], [2, -1]], dtype=torch.int32)},
            "`page_table` must have a page from 0 to 3 for every token held, got -1 for token 128 of sequence 1",
        ),
        (
            {"page_table": torch.tensor([[4, 1], [2, 3]], dtype=torch.int32)},
            "`page_table` must have a page from 0 to 3 for every token held, got 4 for token 0 of sequence 0",
        ),
        ({"lengths": torch.tensor([100, 257], dtype=torch.int32)}, "`lengths` must be between"),
    ],
)
def test_refusals(kind: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, RuntimeError), match=message):
        call(kind, **changes)
    call(kind)


def test_frozen_scales_have_no_pages() -> None:
    key, value = PRESETS["int8"]
    frozen = KVLayout(dataclasses.replace(key, granularity="tensor"), value)
    for engine in ("cpu", REFERENCE):
        with pytest.raises((ValueError, RuntimeError), match="rings and granularity tensor have no pages"):
            call(engine, layout=frozen)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="a CPU refuses lengths that do not count the new token")
@pytest.mark.parametrize("name", PAGED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_that_pad_a_captured_step(name: str, dtype: torch.dtype) -> None:
    """A sequence of no token and no page writes nothing, gets zeros, and changes no other."""
    torch.manual_seed(0)
    layout, where = LAYOUTS[name], {"dtype": dtype, "device": torch.device("cuda")}
    pool = allocated(layout, 5, 7, 128, **where)
    query, key, value = (torch.randn(4, heads, 1, HEAD_DIM, **where) for heads in (2 * HEADS, HEADS, HEADS))
    table = torch.tensor([[2, -1], [1, 0], [-1, -1], [-1, -1]], dtype=torch.int32, device="cuda")
    if layout.has_tail:
        table = with_tails([6, 4, -1, -1], table)
    lengths = torch.tensor([1, 129, 0, 0], dtype=torch.int32, device="cuda")
    results = []
    for rows in (2, 4):
        planes = pool[0].map(torch.clone), pool[1].map(torch.clone)
        made = ops.Operands(*planes, layout)
        options = {"softmax_scale": 0.125, "num_splits": 2, "page_table": table[:rows]}
        out, _ = made.decode(query[:rows], (key[:rows], value[:rows]), lengths[:rows], **options)
        results.append((out, [plane.clone() for side in planes for plane in side.tensors()]))
    (alone, held), (padded, held_beside) = results
    assert_same(padded[:2], alone.cpu(), "results")
    assert not padded[2:].any()
    for ours, own in zip(held_beside, held, strict=True):
        assert_same(ours, own.cpu(), "pages")


def attended(pages: ops.Operands, table: Tensor, steps: list[Tensor]) -> list[Tensor]:
    """Append the first step, and attend to all tokens in the others. Steps are queries, keys and values, by head."""
    results, length = [], 0
    for step in steps:
        query, key, value = (x.unsqueeze(0) for x in step.split([2 * HEADS, HEADS, HEADS]))
        length += step.shape[1]
        held = torch.tensor([length], dtype=torch.int32, device=step.device)
        if step is steps[0]:
            pages.append(key, value, held, page_table=table)
        else:
            results.append(pages.decode(query, (key, value), held, softmax_scale=0.125, page_table=table)[0])
    return results


@pytest.mark.skipif(not torch.cuda.is_available(), reason="only a GPU counts pages in 32 bits")
@pytest.mark.slow
def test_pages_of_more_than_64_gigabytes() -> None:
    """Pages far apart, as those of all layers are in a large cache, give the bits of pages side by side.

    These are also the bits of the same kernel: once, another one served such a cache, a hundred times as slowly.
    """
    stride, num_blocks = 2**30, 66
    if torch.cuda.mem_get_info()[0] < (num_blocks + 2) * stride:
        pytest.skip("too little memory is free")
    memory = torch.empty(num_blocks * stride, dtype=torch.uint8, device="cuda")
    near, far = torch.tensor([[[2, 1, 0]], [[num_blocks - 1, 1, num_blocks - 2]]], dtype=torch.int32, device="cuda")
    tables = {False: (near[:, 1:], far[:, 1:])}
    tables[True] = tuple(with_tails([int(each[0, 0])], each[:, 1:]) for each in (near, far))
    for name in PRESETS:
        layout = LAYOUTS[name]
        page = PageLayout(layout, HEADS, (HEAD_DIM, HEAD_DIM), torch.bfloat16, 1024)
        tails = TailLayout.of({0: page})
        memory.view(num_blocks, stride)[far[0].long(), : 2**24] = 0

        def over(memory: Tensor, stride: int, page: PageLayout = page) -> ops.Operands:
            sides, tails = page.planes(memory, 0, stride), TailLayout.of({0: page})
            slots = (None, None) if tails is None else tails.planes(memory, stride)[0]
            return ops.Operands(*joined(sides, slots), page.layout)

        together = max(page.num_bytes, 0 if tails is None else tails.num_bytes)
        assert together <= 2**24
        side_by_side = torch.zeros(3 * together, dtype=torch.uint8, device="cuda")
        for chunks in ([1500, 1, 2], [1100, 64]):
            steps = [torch.randn(4 * HEADS, q_len, HEAD_DIM, dtype=torch.bfloat16, device="cuda") for q_len in chunks]
            results = []
            for table, pages in zip(
                tables[layout.has_tail], (over(side_by_side, together), over(memory, stride)), strict=True
            ):
                results.append(attended(pages, table, steps))
            for expected, actual in zip(*results, strict=True):
                assert_same(actual, expected.cpu(), f"{name}, {chunks}")
    del memory, pages
    torch.cuda.empty_cache()  # for tests in other processes
