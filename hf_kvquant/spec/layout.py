"""`KVLayout`: how one layer's keys and values lie in memory, as one object that ops, kernels and storages share.

It names both formats, the dense windows and where a token's row is. Which bytes a row has is in `codes.py`. The planes
of keys and of values are then known: nothing is inferred from their shapes. Ops take a layout as the integers of
`KVLayout.packed`. `LAYOUT_FIELDS` says what they mean; `Layout` in csrc/format.h has the same fields, and the two are
compared when the extension loads.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from .codes import STORAGE_IDS
from .formats import BLOCK_SIZE, GRANULARITY_IDS, KVFormat
from .planes import Planes

# Batch, key-value heads, head_dim of keys and of values.
Shape = tuple[int, int, int, int]
# Where the token at position t is: in row t, or in row t mod capacity, so that new tokens overwrite old ones.
Rows = Literal["linear", "ring"]

# The integer for a clip ratio of 1. Python's floats above 2^-10 become integers without rounding.
CLIP_ONE = 2**62

ROWS: tuple[Rows, ...] = get_args(Rows)  # their numbers are their places
_FORMAT_FIELDS = ("storage", "granularity", "group_size", "symmetric", "clip_ratio")
LAYOUT_FIELDS = (
    *(f"{side}.{field}" for side in ("key", "value") for field in _FORMAT_FIELDS),
    "sink_length",
    "residual_length",
    "rows",
)


@dataclasses.dataclass(frozen=True)
class KVLayout:
    """The layout of one layer's cache.

    Attributes:
        key: Format of the keys.
        value: Format of the values.
        sink_length: How many of the first tokens that are not padding stay dense. 0 for a ring, whose first tokens
            leave it like all others.
        residual_length: How many of the newest tokens stay dense.
        rows: `"linear"`, or `"ring"` for the newest tokens only. A ring's capacity is a multiple of `BLOCK_SIZE`.

    Raises:
        ValueError: The combination has no meaning; the message names the argument.
    """

    key: KVFormat
    value: KVFormat
    sink_length: int = 0
    residual_length: int = 0
    rows: Rows = "linear"

    def __post_init__(self) -> None:
        if self.value.granularity == "channel":
            raise ValueError(
                "KVLayout: `value` must not have granularity 'channel', got it. Only keys have outlier channels."
            )
        for name in ("sink_length", "residual_length"):
            if getattr(self, name) < 0:
                raise ValueError(f"KVLayout: `{name}` must not be negative, got {getattr(self, name)}.")
        if self.rows not in ROWS:
            raise ValueError(f"KVLayout: `rows` must be one of {list(ROWS)}, got {self.rows!r}.")
        if self.is_ring and self.sink_length:
            raise ValueError(
                f"KVLayout: `sink_length` must be 0 for a ring, got {self.sink_length}. The first tokens leave it."
            )

    @property
    def formats(self) -> tuple[KVFormat, KVFormat]:
        """The formats of keys and of values."""
        return self.key, self.value

    @property
    def is_ring(self) -> bool:
        """Whether new tokens overwrite old ones."""
        return self.rows == "ring"

    @property
    def windows(self) -> dict[str, int]:
        """The dense windows, as keyword arguments of functions that handle tails."""
        return {"sink_length": self.sink_length, "residual_length": self.residual_length}

    @property
    def token_alignment(self) -> int:
        """The number of tokens that capacities are multiples of."""
        return BLOCK_SIZE if self.is_ring else max(each.token_alignment for each in self.formats)

    @property
    def has_tail(self) -> bool:
        """Whether some tokens are dense now and get codes later."""
        return any(each.tail_rows(**self.windows) > 0 for each in self.formats)

    @property
    def packed(self) -> list[int]:
        """The layout as the integers that ops take, in the order of `LAYOUT_FIELDS`."""
        sides = [number for each in self.formats for number in _pack(each)]
        return [*sides, self.sink_length, self.residual_length, ROWS.index(self.rows)]

    @classmethod
    def of_packed(cls, numbers: Sequence[int]) -> KVLayout:
        """The layout that `packed` gave these integers for.

        Raises:
            ValueError: There is none.
        """
        return _unpacked(tuple(numbers))

    def allocate(
        self, shape: Shape, capacity: int, *, dtype: torch.dtype, device: torch.device, slack: int = 0
    ) -> tuple[Planes, Planes]:
        """New planes of keys and of values for `capacity` tokens, zeroed. See `KVFormat.allocate`."""
        batch, num_kv_heads, *head_dims = shape
        options: dict[str, Any] = {"dtype": dtype, "device": device, "slack": slack, **self.windows}
        key, value = (
            each.allocate(batch, num_kv_heads, head_dim, capacity, **options)
            for each, head_dim in zip(self.formats, head_dims, strict=True)
        )
        return key, value

    def planes(self, key: Sequence[Tensor], value: Sequence[Tensor]) -> tuple[Planes, Planes]:
        """Undo `Planes.tensors` on both sides.

        Raises:
            ValueError: A side has more or fewer planes.
        """
        sides = []
        for name, kv_format, tensors in zip(("key", "value"), self.formats, (key, value), strict=True):
            names = kv_format.plane_names(**self.windows)
            if len(tensors) != len(names):
                raise ValueError(
                    f"`{name}_planes` must be {len(names)} tensors ({', '.join(names)}) for {kv_format.describe()}, "
                    f"got {len(tensors)}. Planes are made by KVLayout.allocate."
                )
            named = dict(zip(names, tensors, strict=True))
            sides.append(Planes(named["codes"], named.get("scale"), named.get("zero"), named.get("tail")))
        return sides[0], sides[1]

    def bytes_per_token(self, shape: Shape, dtype: torch.dtype) -> int:
        """Bytes of one token's key and value in all heads of one layer. See `KVFormat.bytes_per_token`."""
        _, num_kv_heads, *head_dims = shape
        return sum(
            each.bytes_per_token(num_kv_heads, dim, dtype) for each, dim in zip(self.formats, head_dims, strict=True)
        )

    def tail_bytes(self, shape: Shape, dtype: torch.dtype) -> int:
        """Bytes of both tails of one sequence in one layer. See `KVFormat.tail_bytes`."""
        _, num_kv_heads, *head_dims = shape
        return sum(
            each.tail_bytes(num_kv_heads, dim, dtype, **self.windows)
            for each, dim in zip(self.formats, head_dims, strict=True)
        )

    def num_coded(self, side: int, length: int) -> int:
        """How many of `length` tokens have codes: all, or with blocks those in blocks that have left the window."""
        kv_format = self.formats[side]
        return length if kv_format.block_size is None else kv_format.tail_begin(length, self.residual_length)

    def coded(self, sides: tuple[Planes, Planes], length: int) -> tuple[Planes, Planes]:
        """The rows of planes that hold the codes of `length` tokens."""
        key, value = (
            planes.narrow(min(self.num_coded(side, length), planes.codes.shape[2]), self.formats[side].block_size)
            for side, planes in enumerate(sides)
        )
        return key, value


def _pack(kv_format: KVFormat) -> list[int]:
    size, clip_ratio = kv_format.group_size or 0, int(kv_format.clip_ratio * CLIP_ONE)
    return [kv_format.storage_id, GRANULARITY_IDS[kv_format.granularity], size, int(kv_format.symmetric), clip_ratio]


@functools.lru_cache(maxsize=256)
def _unpacked(numbers: tuple[int, ...]) -> KVLayout:
    try:
        fields = dict(zip(LAYOUT_FIELDS, numbers, strict=True))
        key, value = (_format_of(*(fields[f"{side}.{field}"] for field in _FORMAT_FIELDS)) for side in ("key", "value"))
        rows = dict(enumerate(ROWS))[fields["rows"]]
        return KVLayout(key, value, fields["sink_length"], fields["residual_length"], rows)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"`layout` must be what KVLayout.packed gives, got {list(numbers)} ({error}).") from error


def _format_of(storage_id: int, granularity_id: int, group_size: int, symmetric: int, clip_ratio: int) -> KVFormat:
    granularity = {number: name for name, number in GRANULARITY_IDS.items()}[granularity_id]
    return KVFormat(
        {number: name for name, number in STORAGE_IDS.items()}[storage_id],
        granularity,
        group_size or None,
        {0: False, 1: True}[symmetric],
        BLOCK_SIZE if granularity == "channel" else None,
        clip_ratio / CLIP_ONE,
    )
