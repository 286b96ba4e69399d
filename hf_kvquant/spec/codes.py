"""The storage types: how many bits a code has, and where these bits are in a row.

A new integer type is a name and its number of bits, here and in csrc/format.h; CONTRIBUTING names the lists that it
joins. All else follows from the bits: the levels (`max_code` and `code_offset` in `reference.py`), the bytes of a row,
and how codes are packed.

Eight consecutive channels of a row take `bits` bytes, for every width: their codes, from the lowest bits up, are one
number whose lowest byte comes first. So no group of channels shares a byte with another, and a row has no padding.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal, get_args

if TYPE_CHECKING:
    from torch import Tensor

StorageType = Literal["none", "int8", "int4", "fp8", "int3", "int2"]

# The numbers of storage types in ops and csrc/format.h.
STORAGE_IDS: dict[StorageType, int] = {name: number for number, name in enumerate(get_args(StorageType))}
# Bits of a code. Storage type `none` has values instead, in the model's dtype.
INTEGER_BITS: dict[StorageType, int] = {"int8": 8, "int4": 4, "int3": 3, "int2": 2}
BITS: dict[StorageType, int] = {**INTEGER_BITS, "fp8": 8}


def pack(codes: Tensor, bits: int) -> Tensor:
    """The rows of codes.

    Args:
        codes: `[..., channels]` uint8, each below `2**bits`. Channels are a multiple of 8.
        bits: Of a code, from 1 to 8.

    Returns:
        `[..., channels * bits / 8]` uint8; `codes` itself for 8 bits.
    """
    if bits == 8:
        return codes
    rows = codes.new_zeros(*codes.shape[:-1], codes.shape[-1] * bits // 8)
    num_codes, num_bytes = _period(bits)
    for i in range(num_codes):
        byte, shift = divmod(i * bits, 8)
        rows[..., byte::num_bytes] |= codes[..., i::num_codes] << shift
        if shift + bits > 8:
            rows[..., byte + 1 :: num_bytes] |= codes[..., i::num_codes] >> (8 - shift)
    return rows


def unpack(rows: Tensor, bits: int) -> Tensor:
    """Undo `pack`."""
    if bits == 8:
        return rows
    codes = rows.new_empty(*rows.shape[:-1], rows.shape[-1] * 8 // bits)
    num_codes, num_bytes = _period(bits)
    for i in range(num_codes):
        byte, shift = divmod(i * bits, 8)
        code = rows[..., byte::num_bytes] >> shift
        if shift + bits > 8:
            code |= rows[..., byte + 1 :: num_bytes] << (8 - shift)
        codes[..., i::num_codes] = code & (2**bits - 1)
    return codes


def _period(bits: int) -> tuple[int, int]:
    """The fewest codes that take whole bytes, and how many bytes."""
    shared = math.gcd(8, bits)
    return 8 // shared, bits // shared
