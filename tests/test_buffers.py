"""`Buffers` and who owns them, without a layer: each change is another value, and the old one stays as it was."""

from __future__ import annotations

import dataclasses
import gc

import pytest
import torch
from torch import Tensor

from hf_kvquant.config import KVQuantConfig, LayerFormats
from hf_kvquant.spec.key_transform import KeyTransform
from hf_kvquant.spec.layout import KVLayout
from hf_kvquant.storage.buffers import Buffers, allocate
from hf_kvquant.storage.pool import BufferPool
from hf_kvquant.storage.residency import Owned, Pooled

CPU = torch.device("cpu")
BATCH, HEADS, DIM, CAPACITY, LENGTH = 3, 2, 64, 256, 70
SHAPE = BATCH, HEADS, DIM, DIM
OPTIONS = {"dtype": torch.float32, "device": CPU, "slack": 0}
PRESETS = ["none", "int8", "int4-token", "int4-channel"]


def formats_of(preset: str) -> LayerFormats:
    return KVQuantConfig.resolve(preset).formats(0)


def layout_of(preset: str) -> KVLayout:
    formats = formats_of(preset)
    return KVLayout(formats.key, formats.value, formats.sink_length, formats.residual_length)


def filled(preset: str) -> Buffers:
    """Buffers that hold `LENGTH` tokens of each sequence."""
    buffers = allocate(layout_of(preset), SHAPE, CAPACITY, KeyTransform(is_rotated=True), **OPTIONS)
    key, value = torch.randn(2, BATCH, HEADS, LENGTH, DIM)
    buffers.operands().append(key, value, torch.full((BATCH,), LENGTH, dtype=torch.int32))
    return buffers


def dense(buffers: Buffers) -> tuple[Tensor, Tensor]:
    lengths = torch.full((buffers.batch,), LENGTH, dtype=torch.int32)
    return buffers.operands().dequantize(lengths, None, begin=0, num_tokens=LENGTH, dtype=buffers.dtype)


@pytest.mark.parametrize("preset", PRESETS)
def test_changes_are_other_values(preset: str) -> None:
    buffers = filled(preset)
    expected, index = dense(buffers), torch.tensor([2, 0])
    chosen, larger, moved = (
        buffers.selected(index, 128),
        buffers.resized(512, LENGTH, None),
        buffers.moved(torch.device("meta")),
    )
    for sides, rows in ((dense(chosen), index), (dense(larger), slice(None)), (dense(buffers), slice(None))):
        for side, of_all in zip(sides, expected, strict=True):
            assert torch.equal(side, of_all[rows])
    assert (chosen.shape, chosen.capacity) == ((2, *SHAPE[1:]), 128) and chosen.planes[0].codes.shape[2] == 128
    assert (larger.shape, larger.capacity) == (SHAPE, 512) and larger.planes[0].codes.shape[2] == 512
    assert moved.device.type == moved.planes[1].codes.device.type == "meta"
    with pytest.raises(dataclasses.FrozenInstanceError):
        buffers.capacity = 1  # type: ignore[misc]


@pytest.mark.parametrize("preset", PRESETS)
def test_a_reorder_keeps_addresses(preset: str) -> None:
    buffers = filled(preset)
    expected, index = dense(buffers), torch.tensor([2, 0, 0])
    before = [tensor.data_ptr() for side in buffers.planes for tensor in side.tensors()]
    buffers.reorder(index)
    assert [tensor.data_ptr() for side in buffers.planes for tensor in side.tensors()] == before
    assert all(torch.equal(side, of_all[index]) for side, of_all in zip(dense(buffers), expected, strict=True))


def test_who_owns_buffers_needs_a_name_and_no_layer() -> None:
    pool, transform = BufferPool(), KeyTransform(center=torch.ones(HEADS, DIM))
    arguments = layout_of("int8"), SHAPE, CAPACITY, transform
    lent = Pooled(pool, "layer 3", formats_of("int8"), CAPACITY)
    lent.hold(lent.allocate(*arguments, **OPTIONS))
    first = lent.arrive()
    assert first.key_transform is not None and first.key_transform.center is not transform.center
    del lent
    gc.collect()
    other = Pooled(pool, "layer 4", formats_of("int8"), CAPACITY).allocate(*arguments, **OPTIONS)
    again = Pooled(pool, "layer 3", formats_of("int8"), CAPACITY)
    assert again.allocate(*arguments, **OPTIONS) is first is not other
    own = Owned()
    assert own.num_bytes == 0 and own.operands is None
    own.hold(first)
    assert own.arrive() is first and own.operands is not None
    assert own.num_bytes == sum(planes.num_bytes for planes in first.planes)
