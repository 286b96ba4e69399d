"""`dequantize`: the dense tokens of any positions, bit for bit those of the reference, in every kind of layer."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from cases import REFUSED, make_formats, name_of
from compare import assert_same
from torch import Tensor

from hf_kvquant import KVFormat, ops
from hf_kvquant.spec import reference
from hf_kvquant.spec.formats import Planes
from hf_kvquant.spec.key_transform import KeyTransform
from hf_kvquant.spec.layout import KVLayout

HEADS, CAPACITY = 3, 256
LENGTHS = (200, 256, 0, 131)
BLOCKS = KVFormat("int4", "channel", symmetric=False, block_size=128)
Sides = tuple[Planes, Planes]


def some_layer(layout: KVLayout, head_dims: tuple[int, int], transform: KeyTransform | None, lengths: Tensor) -> Sides:
    """Planes with random tokens, appended by the reference; what is not written is NaN."""
    batch = lengths.numel()
    sides = layout.allocate((batch, HEADS, *head_dims), CAPACITY, dtype=torch.bfloat16, device=torch.device("cpu"))
    for planes, kv_format, dim, each in zip(sides, layout.formats, head_dims, (transform, None), strict=True):
        for plane in planes.tensors():
            plane.fill_(torch.nan if plane.is_floating_point() else 255)
        for b, length in enumerate(lengths.tolist()):
            own = planes.map(lambda plane, b=b: plane[b : b + 1])  # type: ignore[misc]
            for begin in range(0, length, 100):
                end = min(begin + 100, length)
                x = torch.randn(1, HEADS, end - begin, dim).mul_(3).to(torch.bfloat16)
                if kv_format.granularity == "tensor" and begin == 0:
                    frozen = reference.compute_scale(x if each is None else reference.transform_key(x, each), kv_format)
                    for plane, scale in zip((own.scale, own.zero), frozen, strict=True):
                        if plane is not None and scale is not None:
                            plane.copy_(scale)
                held = torch.tensor([end], dtype=torch.int32)
                reference.append(x, own, kv_format, held, each, **layout.windows, is_ring=layout.is_ring)
    return sides


def transform_of(head_dim: int) -> KeyTransform:
    return KeyTransform(torch.randn(HEADS, head_dim), torch.rand(HEADS, head_dim) + 0.5, True)


def expected(
    sides: Sides,
    layout: KVLayout,
    transform: KeyTransform | None,
    lengths: Tensor,
    begin: int,
    num_tokens: int,
    dtype: torch.dtype,
    num_seen: int,
) -> list[Tensor]:
    """Sequence by sequence, each token where its position says."""
    results = []
    for planes, kv_format, each in zip(sides, layout.formats, (transform, None), strict=True):
        position = reference.ring_positions(lengths, CAPACITY) if layout.is_ring else None
        dense = reference.dequantize(
            planes, kv_format, dtype, lengths, key_transform=each, position=position, **layout.windows
        )
        out = torch.zeros(lengths.numel(), HEADS, num_tokens, dense.shape[3], dtype=dtype)
        for b, length in enumerate(lengths.tolist()):
            first = max(0, length - CAPACITY) if layout.is_ring else 0
            first = max(first, length - num_seen) if num_seen else first
            places = torch.arange(begin, begin + num_tokens)
            is_there = (first <= places) & (places < length)
            out[b, :, is_there] = dense[b, :, places[is_there] % CAPACITY]
        results.append(out)
    return results


def check(device: str, layout: KVLayout, head_dims: tuple[int, int], is_transformed: bool, lengths: Tensor) -> None:
    transform = transform_of(head_dims[0]) if is_transformed else None
    sides = some_layer(layout, head_dims, transform, lengths)
    moved = [planes.map(lambda plane: plane.to(device)) for planes in sides]
    operands = ops.Operands(moved[0], moved[1], layout, None if transform is None else transform.to(device))
    newest = int(lengths.max())
    for begin, num_tokens, num_seen, dtype in (
        (max(0, newest - CAPACITY), CAPACITY, 0, torch.bfloat16),
        (max(0, newest - 77), 77, 50, torch.float32),
        (3 + max(0, newest - CAPACITY), 1, 0, torch.float16),
        (5, 0, 0, torch.bfloat16),
    ):
        options = {"begin": begin, "num_tokens": num_tokens, "num_seen": num_seen, "dtype": dtype}
        found = operands.dequantize(lengths.to(device), None, **options)
        for one, other, side in zip(found, expected(sides, layout, transform, lengths, **options), "kv", strict=True):
            assert one.is_contiguous() or device == "cpu"
            assert_same(one, other, f"{side} of {options}")


@pytest.mark.full(
    when=lambda kv_format, head_dim, is_transformed, device: (
        device == "cpu" and (head_dim > 80 or (kv_format.group_size is None and (head_dim == 80) != is_transformed))
    ),
    reason="there the reference serves, to which one head_dim is like another; kernels for GPUs divide it up",
)
@pytest.mark.parametrize(
    ("kv_format", "head_dim", "is_transformed"),
    [
        (kv_format, head_dim, is_transformed)
        for kv_format in (*make_formats(64), BLOCKS)
        for head_dim in (64, 80, 128, 256)
        for is_transformed in (False, True)
        if head_dim % (kv_format.group_size or 8) == 0 and not (is_transformed and kv_format is BLOCKS)
    ],
    ids=name_of,
)
def test_positions(kv_format: KVFormat, head_dim: int, is_transformed: bool, device: str) -> None:
    value = KVFormat("int4", symmetric=False) if kv_format is BLOCKS else kv_format
    for dense in ((0, 0), (5, 40)):
        layout = KVLayout(kv_format, value, *(dense if kv_format.is_quantized else (0, 0)))
        check(device, layout, (head_dim, 64), is_transformed, torch.tensor(LENGTHS, dtype=torch.int32))


@pytest.mark.parametrize("residual_length", [0, 40])
@pytest.mark.parametrize("kv_format", [KVFormat("int8"), KVFormat("int4", symmetric=False), BLOCKS], ids=name_of)
def test_rings(kv_format: KVFormat, residual_length: int, device: str) -> None:
    value = KVFormat("int4", symmetric=False) if kv_format is BLOCKS else kv_format
    layout = KVLayout(kv_format, value, 0, residual_length, "ring")
    for length in (90, 256, 700):
        check(device, layout, (64, 64), kv_format is not BLOCKS, torch.full((2,), length, dtype=torch.int32))


def test_first_tokens_are_counted_from_where_padding_ends(device: str) -> None:
    layout = KVLayout(KVFormat("int4", symmetric=False), KVFormat("int8"), 4, 0)
    lengths, starts = torch.tensor([100, 90], dtype=torch.int32), torch.tensor([30, 0], dtype=torch.int32)
    sides = layout.allocate((2, HEADS, 64, 64), 128, dtype=torch.float32, device=torch.device("cpu"))
    for planes, kv_format in zip(sides, layout.formats, strict=True):
        x = torch.randn(2, HEADS, 90, 64)
        reference.append(x, planes, kv_format, lengths, None, starts, **layout.windows)
    moved = [planes.map(lambda plane: plane.to(device)) for planes in sides]
    operands = ops.Operands(moved[0], moved[1], layout)
    found = operands.dequantize(lengths.to(device), starts.to(device), begin=0, num_tokens=100, dtype=torch.float32)
    for one, planes, kv_format in zip(found, sides, layout.formats, strict=True):
        dense = reference.dequantize(planes.narrow(100), kv_format, torch.float32, lengths, starts, **layout.windows)
        dense[1, :, 90:] = 0.0
        assert_same(one, dense, "all tokens")


def test_opcheck_and_refusals(device: str) -> None:
    layout = KVLayout(KVFormat("int8"), KVFormat("int4", symmetric=False))
    sides = layout.allocate((2, HEADS, 64, 32), 128, dtype=torch.float32, device=torch.device(device))
    lengths = torch.tensor([100, 90], dtype=torch.int32, device=device)
    op = torch.ops.hf_kvquant.dequantize.default
    call = [*(list(planes.tensors()) for planes in sides), lengths, None, 3, 100, 0, 2, None, None, True, layout.packed]
    torch.library.opcheck(op, call)
    if device == "cuda":
        for place, wrong, message in (
            (4, -1, "dequantize: `begin` must be between 0"),
            (5, 2**31 - 2, "dequantize: `num_tokens` must be between 0"),
            (7, 3, "dequantize: `dtype` must be 0"),
            (2, lengths[:1], "dequantize: `lengths` must be"),
        ):
            with pytest.raises(REFUSED, match=message):
                op(*call[:place], wrong, *call[place + 1 :])


def test_compiled_with_another_number_of_tokens(device: str) -> None:
    """A growing cache shows one more token at every step: no step is compiled again for that."""
    layout = KVLayout(KVFormat("int8"), KVFormat("int8"))
    sides = some_layer(layout, (64, 64), None, torch.tensor(LENGTHS, dtype=torch.int32))
    key, value = (planes.map(lambda plane: plane.to(device)) for planes in sides)
    lengths = torch.tensor(LENGTHS, dtype=torch.int32, device=device)
    op, arguments = torch.ops.hf_kvquant.dequantize.default, (key.tensors(), value.tensors(), lengths, None)
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    step = torch.compile(
        lambda n: op(*arguments, 0, n, 0, 0, None, None, False, layout.packed)[0].sum(), backend=backend, dynamic=True
    )
    for n in (100, 101, 150):
        step(n)
    assert len(graphs) == 1


def test_a_layout_of_its_own(device: str) -> None:
    """Planes that are a view of larger ones."""
    layout = KVLayout(KVFormat("int4", symmetric=False), KVFormat("int8"))
    lengths = torch.tensor(LENGTHS, dtype=torch.int32)
    key, value = some_layer(layout, (64, 64), None, lengths)
    wide = [
        dataclasses.replace(each, codes=torch.cat((each.codes, each.codes), 2)[:, :, :CAPACITY])
        for each in (key, value)
    ]
    moved = [planes.map(lambda plane: plane.to(device)) for planes in wide]
    found = ops.Operands(moved[0], moved[1], layout).dequantize(
        lengths.to(device), None, begin=0, num_tokens=CAPACITY, dtype=torch.float32
    )
    for one, other in zip(
        found, expected((key, value), layout, None, lengths, 0, CAPACITY, torch.float32, 0), strict=True
    ):
        assert_same(one, other, "a view")
