"""`KVLayout`: its integers, the planes that follow from it, and what it refuses."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from cases import make_formats

from hf_kvquant.config import PRESETS
from hf_kvquant.spec.formats import KVFormat
from hf_kvquant.spec.layout import LAYOUT_FIELDS, KVLayout

INT4, BLOCKS = KVFormat("int4", symmetric=False), PRESETS["int4-channel"][0]
SHAPE = (1, 2, 64, 32)
LAYOUTS = [
    KVLayout(key, value, *windows, rows)  # type: ignore[arg-type]
    for key, value in zip([*make_formats(), BLOCKS], reversed([*make_formats(), INT4]), strict=True)
    for windows, rows in itertools.product(((0, 0), (0, 9), (3, 0), (3, 130)), ("linear", "ring"))
    if rows == "linear" or windows[0] == 0
]


def test_integers_say_all() -> None:
    assert len({tuple(layout.packed) for layout in LAYOUTS}) == len(set(LAYOUTS)) == len(LAYOUTS)
    for layout in LAYOUTS:
        assert len(layout.packed) == len(LAYOUT_FIELDS)
        assert KVLayout.of_packed(layout.packed) == layout


def test_planes_are_lists_and_back() -> None:
    for layout in LAYOUTS:
        sides = layout.allocate((2, 2, 64, 64), 128, dtype=torch.float16, device=torch.device("cpu"))
        again = layout.planes(*(planes.tensors() for planes in sides))
        for side, other, kv_format, head_dim in zip(sides, again, layout.formats, (64, 64), strict=True):
            assert vars(side) == vars(other)
            assert kv_format.head_dim_of(side.codes) == head_dim
            names = kv_format.plane_names(**layout.windows)
            assert [name for name in ("codes", "scale", "zero", "tail") if getattr(side, name) is not None] == names
        with pytest.raises(ValueError, match=r"^`value_planes` must be .* \(codes.*\) for .*, got 5\. Planes"):
            layout.planes(sides[0].tensors(), [sides[1].codes] * 5)


def test_bytes_are_those_of_both_sides() -> None:
    layout = KVLayout(BLOCKS, INT4, 4, 10)
    sides = layout.allocate(SHAPE, 256, dtype=torch.bfloat16, device=torch.device("cpu"))
    tails = sum(side.tail.nbytes for side in sides if side.tail is not None)
    assert layout.tail_bytes(SHAPE, torch.bfloat16) == tails
    assert layout.bytes_per_token(SHAPE, torch.bfloat16) * 256 == sum(side.num_bytes for side in sides) - tails


def test_capacities_and_tails() -> None:
    int8 = KVFormat("int8")
    assert KVLayout(int8, int8).token_alignment == 64
    assert KVLayout(BLOCKS, int8).token_alignment == KVLayout(int8, int8, rows="ring").token_alignment == 128
    assert KVLayout(BLOCKS, int8).has_tail and KVLayout(int8, int8, 1).has_tail
    assert not KVLayout(int8, int8).has_tail and not KVLayout(KVFormat("none"), KVFormat("none"), 4, 4).has_tail


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"value": BLOCKS}, "KVLayout: `value` must not have granularity 'channel', got it."),
        ({"sink_length": -1}, "KVLayout: `sink_length` must not be negative, got -1."),
        ({"residual_length": -2}, "KVLayout: `residual_length` must not be negative, got -2."),
        ({"rows": "square"}, "KVLayout: `rows` must be one of ['linear', 'ring'], got 'square'."),
        ({"rows": "ring", "sink_length": 2}, "KVLayout: `sink_length` must be 0 for a ring, got 2."),
    ],
)
def test_what_has_no_meaning_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as refused:
        KVLayout(**{"key": INT4, "value": INT4, **fields})
    assert str(refused.value).startswith(message)
