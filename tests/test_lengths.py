"""`Lengths` against a plain list of integers: whatever its members do, each of them reads its own length.

And what sharing is for: a step of many layers is one launch, in whatever way the layers are called.
"""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from cases import times
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hf_kvquant.config import KVQuantConfig
from hf_kvquant.storage import rewind
from hf_kvquant.storage.layer_store import LayerStore
from hf_kvquant.storage.lengths import LengthGroup, Lengths

CPU = torch.device("cpu")
HEADS, HEAD_DIM, BATCH = 2, 64, 2
FORMATS = KVQuantConfig.resolve("int8").formats(0)


class Launches(TorchDispatchMode):
    """Counts the operations that write lengths, which are what a device would launch kernels for."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in ("add_", "add", "sub", "fill_", "copy_", "full", "full_like", "zeros"):
            self.names.append(name)
        return func(*args, **(kwargs or {}))


def group_of(count: int, length: int = 0) -> LengthGroup:
    group = LengthGroup(length, torch.empty(BATCH, dtype=torch.int32))
    for _ in range(count):
        group.join(length)
    return group


def check(group: LengthGroup, expected: list[int]) -> None:
    for member, length in enumerate(expected):
        assert group.length(member) == length, f"member {member} of {expected}"
        assert group.tensor_of(member).tolist() == [length] * BATCH
        assert group.tensor_of(member).dtype == torch.int32


# --- one group --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", range(3))
def test_a_step_is_one_launch(first: int) -> None:
    group, order = group_of(3), [first, *({0, 1, 2} - {first})]
    tensor = group.tensor
    for tokens in (5, 1, 1):
        with Launches() as launches:
            for member in order:
                group.advance(member, tokens)
                assert group.tensor_of(member) is tensor
        assert launches.names == ["add_"]
    check(group, [7, 7, 7])


def test_others_keep_their_length_while_a_step_is_taken() -> None:
    group = group_of(3, 4)
    group.advance(0, 2)
    check(group, [6, 4, 4])
    group.advance(1, 2)
    check(group, [6, 6, 4])


def test_what_is_done_to_every_layer_is_done_once() -> None:
    group = group_of(3, 9)
    for length in (5, 0, 5):
        with Launches() as launches:
            for member in range(3):
                group.place(member, length)
        assert launches.names == ["fill_"]
        check(group, [length] * 3)


def test_layers_that_are_left_out_keep_their_length() -> None:
    """An early exit: the first layers run ahead, are cropped, and go on with the others."""
    group = group_of(3, 4)
    for _ in range(3):
        group.advance(0, 1)
    check(group, [7, 4, 4])
    group.place(0, 4)
    with Launches() as launches:
        for member in range(3):
            group.advance(member, 3)
    assert launches.names == ["add_"]
    check(group, [7, 7, 7])


def test_a_layer_that_stays_behind_costs_a_launch_and_is_right() -> None:
    group = group_of(2, 4)
    group.advance(0, 3)
    for _ in range(2):
        group.advance(0, 1), group.advance(1, 1)
    check(group, [9, 6])


@times(300)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["advance", "advance", "step", "place", "crop all", "join", "copy"]),
            st.integers(0, 4),
            st.integers(0, 7),
        ),
        max_size=30,
    )
)
def test_random_histories(history: list[tuple[str, int, int]]) -> None:
    group, expected = group_of(3), [0, 0, 0]
    for action, member, tokens in history:
        member %= len(expected)
        if action == "advance":
            group.advance(member, tokens)
            expected[member] += tokens
        elif action == "step":
            for each in range(len(expected)):
                group.advance(each, tokens)
                expected[each] += tokens
        elif action == "place":
            group.place(member, tokens)
            expected[member] = tokens
        elif action == "crop all":
            for each, length in enumerate(expected):
                expected[each] = max(0, length - tokens)
                group.place(each, expected[each])
        elif action == "join":
            assert group.join(tokens) == len(expected)
            expected.append(tokens)
        else:
            group = copy.deepcopy(group) if tokens % 2 else pickle.loads(pickle.dumps(group))
        check(group, expected)


# --- compiled steps ---------------------------------------------------------------------------------------------------


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    with torch._dynamo.config.patch(error_on_recompile=True):
        yield
    torch._dynamo.reset()


def step_of(members: tuple[int, ...]) -> Any:
    """A compiled step: members take tokens in turn, and each says what it counts then."""

    def step(group: LengthGroup, tokens: Tensor) -> list[Tensor]:
        read = []
        for member in members:
            group.advance(member, tokens.shape[0])
            read.append(group.tensor_of(member) + 0)
        return read

    return torch.compile(step, fullgraph=True, backend="eager", dynamic=False)


@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_steps_find_the_book_as_they_leave_it() -> None:
    group, step = group_of(4, 5), step_of((0, 1, 2, 3))
    group.advance(0, 2), group.advance(1, 2), group.advance(2, 2), group.advance(3, 2)
    for length in (8, 9, 10):
        assert [x.tolist() for x in step(group, torch.zeros(1))] == [[length] * BATCH] * 4
    check(group, [10] * 4)
    assert step(group, torch.zeros(1))[0].tolist() == [11, 11]
    for member in range(4):  # an eager step behind it asks the device once
        group.advance(member, 1)
    check(group, [12] * 4)
    assert step(group, torch.zeros(1))[0].tolist() == [13, 13]


@pytest.mark.usefixtures("fresh_compiler")
def test_an_eager_step_of_a_single_layer_behind_a_compiled_one() -> None:
    group = group_of(1, 4)
    step_of((0,))(group, torch.zeros(1))
    group.advance(0, 2)
    check(group, [7])


def test_a_layer_that_meets_the_others_by_other_tokens_moves_no_one_else() -> None:
    group = group_of(3, 4)
    group.place(2, 3)
    group.place(0, 4)
    group.advance(0, 1)
    check(group, [5, 4, 3])
    group.advance(2, 2)
    check(group, [5, 4, 5])


@pytest.mark.usefixtures("fresh_compiler")
def test_layers_that_are_never_called_do_not_matter_to_compiled_steps() -> None:
    group, step = group_of(4, 0), step_of((0, 1))
    group.advance(0, 5), group.advance(1, 5)
    for _ in range(3):
        step(group, torch.zeros(1))
    check(group, [8, 8, 0, 0])


def test_a_layer_that_compiled_steps_left_out_is_refused() -> None:
    group = group_of(3, 4)
    torch._dynamo.reset()
    step_of((0, 1, 2))(group, torch.zeros(1))
    step_of((0, 1))(group, torch.zeros(1))
    assert group.length(2) == 5, "one step behind can still be told"
    step_of((0, 1))(group, torch.zeros(1))
    step_of((0, 1))(group, torch.zeros(1))
    message = "lengths: a layer must have been called in every compiled step of its cache, got one that was left out"
    for look in (lambda: group.length(2), lambda: group.tensor_of(2), lambda: group.advance(2, 1)):
        with pytest.raises(RuntimeError, match=message):
            look()
    group.place(2, 7)
    check(group, [8, 8, 7])
    torch._dynamo.reset()


@pytest.mark.usefixtures("fresh_compiler")
def test_a_layer_that_a_compiled_step_left_out_may_take_other_tokens() -> None:
    group = group_of(3, 4)
    step_of((0, 1))(group, torch.zeros(1))
    group.advance(2, 3)
    check(group, [5, 5, 7])


def test_a_compiled_step_refuses_layers_at_different_lengths() -> None:
    group = group_of(2, 4)
    group.place(1, 3)
    torch._dynamo.reset()
    with pytest.raises(Exception, match="a compiled step must find all layers of a cache at one length"):
        step_of((1, 0))(group, torch.zeros(1))
    torch._dynamo.reset()


# --- groups of a cache ------------------------------------------------------------------------------------------------


def test_devices_and_batches_count_apart() -> None:
    lengths = Lengths()
    (first, _), (second, _), (third, _) = (
        lengths.join(3, batch, device) for batch, device in ((2, CPU), (2, CPU), (3, CPU))
    )
    meta, _ = lengths.join(3, 2, torch.device("meta"))
    assert first is second and len({id(first), id(third), id(meta)}) == 3


def test_a_group_that_all_have_left_is_not_joined() -> None:
    lengths = Lengths()
    group, member = lengths.join(3, 2, CPU)
    group.leave(member)
    assert lengths.join(0, 2, CPU)[0] is not group


def storages_of(count: int, max_cache_len: int | None = None) -> list[LayerStore]:
    lengths = Lengths()
    return [LayerStore(FORMATS, lengths=lengths, max_cache_len=max_cache_len) for _ in range(count)]


def extend(storages: list[LayerStore], count: int, batch: int = BATCH) -> None:
    x = torch.randn(batch, HEADS, count, HEAD_DIM)
    for storage in storages:
        storage.extend(x, x)
        storage.attend(torch.randn(batch, HEADS, count, HEAD_DIM), softmax_scale=0.1)


@pytest.mark.parametrize("max_cache_len", [None, 40])
def test_storages_of_a_cache_share_one_tensor(max_cache_len: int | None) -> None:
    storages = storages_of(3, max_cache_len)
    extend(storages, 5)
    for change in (
        lambda: None,
        lambda: [rewind.crop(storage, 2) for storage in storages],
        lambda: [storage.repeat(2) for storage in storages],
        lambda: [storage.select(torch.tensor([2, 1])) for storage in storages],
        lambda: [storage.reset() for storage in storages],
    ):
        change()
        extend(storages, 2, storages[0].batch)
        assert len({id(storage.lengths) for storage in storages}) == 1
        with Launches() as launches:
            extend(storages, 1, storages[0].batch)
        assert launches.names.count("add_") == 1 and "fill_" not in launches.names
    assert [storage.length for storage in storages] == [3, 3, 3]


@pytest.mark.parametrize("batch", [BATCH, BATCH + 1])
def test_the_book_does_not_grow(batch: int) -> None:
    """Beam search reorders every step; other searches change the batch back and forth."""
    storages = storages_of(3)
    extend(storages, 5)
    for _ in range(4):
        for rows in (torch.arange(batch) % BATCH, torch.arange(BATCH)):
            for storage in storages:
                storage.select(rows)
            extend(storages, 1, len(rows))
    groups = storages[0]._membership._lengths._groups.values()
    assert [len(group._behind) for group in groups] == [3] * len({batch, BATCH})
    assert [storage.length for storage in storages] == [13] * 3


def test_late_tokens_are_written_where_they_belong() -> None:
    """Pending tokens of a layer that nobody attended to, while the others have gone on."""
    storages = storages_of(2)
    extend(storages, 4)
    x = torch.randn(BATCH, HEADS, 1, HEAD_DIM)
    for storage in storages:
        storage.extend(x, x)
    storages[0].extend(x, x)
    assert storages[1].pending is not None and storages[1].length == 5
    expected = copy.deepcopy(storages[0])
    rewind.crop(expected, 1)
    expected_key, _ = expected.dequantize()
    assert torch.equal(storages[1].dequantize()[0][:, :, 4:], expected_key[:, :, 4:])


def test_a_storage_dies_with_its_last_reference() -> None:
    """Buffers are large: they must not wait for the collector of cycles."""
    storages = storages_of(2)
    extend(storages, 4)
    watched = [weakref.ref(storage) for storage in storages]
    gc.disable()
    try:
        del storages
        assert [reference() for reference in watched] == [None, None]
    finally:
        gc.enable()


# --- captured steps ---------------------------------------------------------------------------------------------------


def test_a_replayed_step_counts_for_all_members() -> None:
    group = group_of(3, 5)
    for tokens in (1, 1, 4):
        group.tensor.add_(tokens)  # what the graph does
        group.note_replayed(tokens)
        group.check_level()
    check(group, [11, 11, 11])
    for member in range(3):
        group.advance(member, 2)
    check(group, [13, 13, 13])


@pytest.mark.parametrize("members", [(), (0,), (0, 1)], ids=str)
def test_a_capture_that_fails_counts_for_nobody(members: tuple[int, ...]) -> None:
    group = group_of(4, 5)
    group.leave(3)
    for member in members:
        group.advance(member, 1)
    group.tensor.fill_(5)  # the device has run nothing
    group.forget_capture(5)
    group.check_level()
    check(group, [5, 5, 5])


def test_members_that_are_not_level_cannot_be_captured() -> None:
    group = group_of(3, 5)
    group.place(1, 4)
    with pytest.raises(ValueError) as raised:
        group.check_level()
    assert str(raised.value) == (
        "lengths: a captured step must find all layers of a cache at one length, got layers of different lengths. "
        "Reset the cache, or crop all of its layers alike."
    )
    group.place(0, 4)
    group.place(2, 4)
    group.check_level()
