"""`KVFormat`: sizes against a table of literal numbers, shapes of planes, and every refusal with its whole message.

The layout itself (which nibble is which channel, what a code means) is tested in test_reference.py, since quantising
shows it; that kernels read the same layout, in test_ops.py.
"""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from cases import HEAD_DIMS, make_formats, name_of

from hf_kvquant import PRESETS, KVFormat
from hf_kvquant.spec.codes import STORAGE_IDS, pack, unpack
from hf_kvquant.spec.formats import TOKEN_ALIGNMENT
from hf_kvquant.spec.planes import Planes

CPU = torch.device("cpu")
INTEGERS = "int8, int4, int3 and int2"
INT4_G64 = KVFormat("int4", "group", 64, symmetric=False)

# Bytes of one token and one head, keys and values, at head_dim 128; then bits of a value at head_dim 64, 128 and 256,
# the mean of both sides. Worked out by hand: 2 bytes for every scale and every zero.
SIZES = {
    "none": ((256, 256), (16.0, 16.0, 16.0)),
    "int8": ((130, 130), (8.25, 8.125, 8.0625)),
    "k8v4": ((130, 68), (6.375, 6.1875, 6.09375)),
    "int4": ((68, 68), (4.375, 4.25, 4.1875)),
    "int4-channel": ((68, 68), (4.375, 4.25, 4.1875)),
    "int4-token": ((68, 68), (4.5, 4.25, 4.125)),
    "int4-g32": ((80, 80), (5.0, 5.0, 5.0)),
    "k4v2": ((68, 36), (3.5, 3.25, 3.125)),
    "int2": ((36, 36), (2.5, 2.25, 2.125)),
    "fp8": ((130, 130), (8.25, 8.125, 8.0625)),
}


# --- sizes ------------------------------------------------------------------------------------------------------------


def test_every_preset_has_a_size_in_the_table() -> None:
    assert SIZES.keys() == PRESETS.keys()


@pytest.mark.parametrize("preset", SIZES)
def test_bytes_of_presets(preset: str) -> None:
    assert tuple(side.bytes_per_token(1, 128) for side in PRESETS[preset]) == SIZES[preset][0]


@pytest.mark.parametrize("preset", SIZES)
def test_bits_of_presets(preset: str) -> None:
    bits = [sum(side.bits_per_value(head_dim) for side in PRESETS[preset]) / 2 for head_dim in (64, 128, 256)]
    assert tuple(bits) == SIZES[preset][1]


@pytest.mark.parametrize(
    ("kv_format", "num_kv_heads", "expected"),
    [
        (INT4_G64, 1, 72),
        (INT4_G64, 8, 576),
        (KVFormat("int8", "head"), 8, 8 * 130),
        (KVFormat("int8", "head", symmetric=False), 8, 8 * 132),
        (KVFormat("int8", "token"), 8, 8 * 128 + 2),
        (KVFormat("int4", "token", symmetric=False), 8, 8 * 64 + 4),
        (KVFormat("int8", "tensor"), 8, 8 * 128),
        (KVFormat("int4", "tensor", symmetric=False), 8, 8 * 64),
        (KVFormat("fp8", "group", 32), 8, 8 * (128 + 8)),
    ],
    ids=name_of,
)
def test_bytes_by_granularity(kv_format: KVFormat, num_kv_heads: int, expected: int) -> None:
    assert kv_format.bytes_per_token(num_kv_heads, 128) == expected


def test_bytes_of_none_follow_the_dtype() -> None:
    assert KVFormat("none").bytes_per_token(2, 8, torch.float32) == 64
    assert KVFormat("none").bits_per_value(8, dtype=torch.float32) == 32.0


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_allocated_bytes_are_bytes_per_token(head_dim: int) -> None:
    for kv_format in make_formats(head_dim):
        planes = kv_format.allocate(3, 2, head_dim, 64, dtype=torch.float16, device=CPU)
        frozen = 0 if kv_format.granularity != "tensor" else 3 * 2 * (1 if kv_format.symmetric else 2)
        expected = 3 * 64 * kv_format.bytes_per_token(2, head_dim, torch.float16) + frozen
        assert planes.num_bytes == expected, kv_format.describe()


# --- planes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kv_format", "codes", "scale"),
    [
        (KVFormat("int8", "tensor"), (3, 4, 64, 96), (3, 1, 1, 1)),
        (KVFormat("int8", "token"), (3, 4, 64, 96), (3, 1, 1, 64)),
        (KVFormat("int8", "head"), (3, 4, 64, 96), (3, 4, 1, 64)),
        (KVFormat("int8", "group", 32), (3, 4, 64, 96), (3, 4, 3, 64)),
        (KVFormat("int4", "head", symmetric=False), (3, 4, 64, 48), (3, 4, 1, 64)),
        (KVFormat("int4", "group", 8), (3, 4, 64, 48), (3, 4, 12, 64)),
        (KVFormat("fp8", "head"), (3, 4, 64, 96), (3, 4, 1, 64)),
    ],
    ids=name_of,
)
def test_plane_shapes(kv_format: KVFormat, codes: tuple[int, ...], scale: tuple[int, ...]) -> None:
    planes = kv_format.allocate(3, 4, 96, 64, dtype=torch.bfloat16, device=CPU)
    assert planes.codes.shape == codes and planes.codes.dtype == torch.uint8
    assert planes.scale is not None
    assert planes.scale.shape == scale and planes.scale.dtype == torch.float16
    assert (planes.zero is None) == kv_format.symmetric
    if planes.zero is not None:
        assert planes.zero.shape == scale and planes.zero.dtype == torch.float16
        assert planes.zero.data_ptr() != planes.scale.data_ptr()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=name_of)
def test_planes_of_none(dtype: torch.dtype) -> None:
    planes = KVFormat("none").allocate(3, 4, 96, 64, dtype=dtype, device=CPU)
    assert planes.codes.shape == (3, 4, 64, 96) and planes.codes.dtype == dtype
    assert planes.scale is None and planes.zero is None
    assert len(planes.tensors()) == 1


@pytest.mark.parametrize("kv_format", make_formats(), ids=name_of)
def test_new_planes_hold_nothing_that_is_not_finite(kv_format: KVFormat) -> None:
    # A kernel that reads a tile past the length multiplies with what lies there, and 0 times NaN is NaN.
    planes = kv_format.allocate(1, 2, 64, 64, dtype=torch.float32, device=CPU)
    for plane in (planes.scale, planes.zero):
        assert plane is None or (plane == 0).all()
    if kv_format.storage in ("none", "fp8"):
        assert (planes.codes == 0).all()


def test_tensors_are_in_a_fixed_order() -> None:
    planes = INT4_G64.allocate(1, 1, 64, 64, dtype=torch.float32, device=CPU)
    codes, scale, zero = planes.tensors()
    assert codes is planes.codes and scale is planes.scale and zero is planes.zero


@pytest.mark.parametrize("kv_format", make_formats(), ids=name_of)
def test_head_dim_of_codes(kv_format: KVFormat) -> None:
    planes = kv_format.allocate(3, 4, 64, 64, dtype=torch.float32, device=CPU)
    assert kv_format.head_dim_of(planes.codes) == 64


def test_num_groups() -> None:
    assert KVFormat("int8").num_groups(128) == 1
    assert KVFormat("int8", "group", 32).num_groups(128) == 4


def test_capacities_are_whole_tiles() -> None:
    assert TOKEN_ALIGNMENT == 64


# --- dictionaries and names -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kv_format", make_formats(), ids=name_of)
def test_dictionary_round_trip(kv_format: KVFormat) -> None:
    assert KVFormat.from_dict(json.loads(json.dumps(kv_format.to_dict()))) == kv_format


def test_dictionary_of_a_format() -> None:
    assert INT4_G64.to_dict() == {
        "storage": "int4",
        "granularity": "group",
        "group_size": 64,
        "symmetric": False,
        "block_size": None,
        "clip_ratio": 1.0,
    }
    assert KVFormat.from_dict({"storage": "int8"}) == KVFormat("int8", "head", None, True)


def test_names() -> None:
    assert INT4_G64.describe() == "int4-group64-asymmetric"
    assert KVFormat("fp8", "token").describe() == "fp8-token-symmetric"
    assert KVFormat("none").describe() == "none"
    assert KVFormat("int4", clip_ratio=0.9).describe() == "int4-head-symmetric-clip0.9"
    names = [kv_format.describe() for kv_format in make_formats()]
    assert len(set(names)) == len(names)


def test_storage_ids_are_the_ones_compiled_into_kernels() -> None:
    assert STORAGE_IDS == {"none": 0, "int8": 1, "int4": 2, "fp8": 3, "int3": 4, "int2": 5}
    assert [KVFormat(name).storage_id for name in STORAGE_IDS] == list(range(6))  # type: ignore[arg-type]


@pytest.mark.parametrize("bits", range(1, 9))
def test_eight_codes_are_one_number_whose_lowest_byte_comes_first(bits: int) -> None:
    codes = torch.randint(2**bits, (2, 3, 40), dtype=torch.uint8)
    rows = pack(codes, bits)
    assert torch.equal(unpack(rows, bits), codes)
    for row, packed in zip(codes.flatten(0, 1).tolist(), rows.flatten(0, 1).tolist(), strict=True):
        numbers = [sum(code << bits * i for i, code in enumerate(row[c : c + 8])) for c in range(0, len(row), 8)]
        assert bytes(packed) == b"".join(number.to_bytes(bits, "little") for number in numbers)


# --- refusals ---------------------------------------------------------------------------------------------------------

STORAGES = list(STORAGE_IDS)


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        (
            {"storage": "int44"},
            ValueError,
            f"KVFormat: `storage` must be one of {STORAGES}, got 'int44'. Did you mean 'int4'?",
        ),
        ({"storage": 8}, ValueError, f"KVFormat: `storage` must be one of {STORAGES}, got 8."),
        (
            {"storage": "int8", "granularity": "heads"},
            ValueError,
            "KVFormat: `granularity` must be one of ['tensor', 'token', 'head', 'group', 'channel'], got 'heads'. "
            "Did you mean 'head'?",
        ),
        (
            {"storage": "int8", "symmetric": 1},
            TypeError,
            "KVFormat: `symmetric` must be True or False, got 1.",
        ),
        (
            {"storage": "fp8", "symmetric": False},
            ValueError,
            f"KVFormat: `symmetric` must be True for storage 'fp8', got False. Only {INTEGERS} have a zero.",
        ),
        (
            {"storage": "none", "symmetric": False},
            ValueError,
            f"KVFormat: `symmetric` must be True for storage 'none', got False. Only {INTEGERS} have a zero.",
        ),
        (
            {"storage": "none", "granularity": "token"},
            ValueError,
            "KVFormat: `granularity` must be left at 'head' for storage 'none', got 'token'. Nothing is scaled there.",
        ),
        (
            {"storage": "int8", "granularity": "group"},
            ValueError,
            "KVFormat: `group_size` must be given exactly when `granularity` is 'group', got None with 'group'. "
            "Use for example granularity='group', group_size=32.",
        ),
        (
            {"storage": "int8", "group_size": 32},
            ValueError,
            "KVFormat: `group_size` must be given exactly when `granularity` is 'group', got 32 with 'head'. "
            "Use for example granularity='group', group_size=32.",
        ),
        (
            {"storage": "int8", "granularity": "group", "group_size": 32.0},
            TypeError,
            "KVFormat: `group_size` must be an int, got 32.0.",
        ),
        (
            {"storage": "int8", "granularity": "group", "group_size": True},
            TypeError,
            "KVFormat: `group_size` must be an int, got True.",
        ),
        (
            {"storage": "int8", "granularity": "group", "group_size": 12},
            ValueError,
            "KVFormat: `group_size` must be a positive multiple of 8, got 12. Common sizes are 32 and 64.",
        ),
        (
            {"storage": "int8", "granularity": "group", "group_size": 0},
            ValueError,
            "KVFormat: `group_size` must be a positive multiple of 8, got 0. Common sizes are 32 and 64.",
        ),
        (
            {"storage": "int8", "granularity": "group", "group_size": -8},
            ValueError,
            "KVFormat: `group_size` must be a positive multiple of 8, got -8. Common sizes are 32 and 64.",
        ),
        (
            {"storage": "int4", "clip_ratio": True},
            TypeError,
            "KVFormat: `clip_ratio` must be a number, got True.",
        ),
        (
            {"storage": "int4", "clip_ratio": 1.1},
            ValueError,
            "KVFormat: `clip_ratio` must be above 0 and at most 1, got 1.1. "
            "1 spans the whole range; 0.9 to 1 are common.",
        ),
        (
            {"storage": "int4", "clip_ratio": math.nan},
            ValueError,
            "KVFormat: `clip_ratio` must be above 0 and at most 1, got nan. "
            "1 spans the whole range; 0.9 to 1 are common.",
        ),
        (
            {"storage": "fp8", "clip_ratio": 0.9},
            ValueError,
            "KVFormat: `clip_ratio` must be 1 for storage 'fp8', got 0.9. "
            f"Clipping only helps the evenly spaced codes of {INTEGERS}.",
        ),
        (
            {"storage": "int8", "groupsize": 32},
            ValueError,
            "KVFormat: unknown key 'groupsize'. Did you mean 'group_size'? "
            "Known keys: ['storage', 'granularity', 'group_size', 'symmetric', 'block_size', 'clip_ratio'].",
        ),
        (
            {"granularity": "head"},
            ValueError,
            f"KVFormat: `storage` must be one of {STORAGES}, got nothing. Add the key 'storage'.",
        ),
    ],
)
def test_refuses(fields: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error) as caught:
        KVFormat.from_dict(fields)
    assert str(caught.value) == message


@pytest.mark.parametrize("head_dim", [0, -8, 12, 100])
@pytest.mark.parametrize("kv_format", [KVFormat("none"), KVFormat("int4", "token"), INT4_G64], ids=name_of)
def test_refuses_head_dims(kv_format: KVFormat, head_dim: int) -> None:
    with pytest.raises(ValueError) as caught:
        kv_format.allocate(1, 1, head_dim, 64, dtype=torch.float32, device=CPU)
    assert str(caught.value) == (
        f"KVFormat: `head_dim` must be a positive multiple of 8, got {head_dim}. Leave the model unpatched."
    )


def test_refuses_groups_that_do_not_divide() -> None:
    with pytest.raises(ValueError) as caught:
        INT4_G64.num_groups(96)
    assert str(caught.value) == (
        "KVFormat: `group_size` must divide head_dim 96, got 64. Choose a divisor, or granularity 'head'."
    )


def test_formats_and_planes_are_frozen() -> None:
    with pytest.raises(AttributeError):
        INT4_G64.symmetric = True  # type: ignore[misc]
    with pytest.raises(AttributeError):
        Planes(torch.empty(0), None, None).codes = torch.empty(1)  # type: ignore[misc]
    assert len({INT4_G64, KVFormat("int4", "group", 64, symmetric=False)}) == 1
