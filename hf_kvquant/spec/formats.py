"""The layout of quantised keys or values in memory: what a code is, what shares a scale, how many bytes a token takes.

One `KVFormat` describes one side (keys or values) of one layer. Only this file, `codes.py` and their C++ mirror
`csrc/format.h` know the byte layout; they are compared when the extension loads. Everywhere

    x ≈ code · scale + zero            zero is a real offset, in units of x; symmetric formats and fp8 have none.

A side has three planes: `codes` (uint8; the model's dtype for storage type `none`), `scale` and `zero` (float16, or
`None`). Scale planes have shape `[batch, heads, groups, tokens]`; an axis whose elements share one scale has size 1.
Kernels read a size of 1 as a stride of 0.

With granularity `channel`, groups run along tokens: each channel of a head has one scale per block of tokens. Blocks
are counted from position 0. The scale planes are `[batch, heads, blocks, head_dim]`, so the scales of a block are
contiguous.

A fourth plane, the `tail`, holds dense tokens: attention uses them as they came instead of their codes. With any
granularity these are the first `sink_length` tokens that are not padding, in fixed rows, and the newest ones, in a
ring. Token t is in row `t - start` if it is one of the first, else in row `sink_length + t mod ring`. The ring holds
the last `residual_length` tokens, and more of the newest ones for a crop (`slack` of `tail_rows`). With granularity
`channel`, it also holds the tokens before these in the block where they begin. There a block gets codes when its last
token leaves the window; with other granularities, every token has codes at once. Which of the newest tokens a query
reads from there is in `reference.py` (`window_begin`).

`layout.py` joins the formats of keys and of values with these windows. `reference.py` decides the values of codes;
`storage/` decides who allocates the planes.

torch is imported by the methods that make or describe tensors alone, so that configs and the command's `--help` need
not wait for it.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args

from ..common.errors import did_you_mean
from .codes import BITS, INTEGER_BITS, STORAGE_IDS, StorageType
from .planes import Planes

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    Count = TypeVar("Count", int, Tensor)

Granularity = Literal["tensor", "token", "head", "group", "channel"]

# The numbers of granularities in ops and csrc/format.h.
GRANULARITY_IDS: dict[Granularity, int] = {name: number for number, name in enumerate(get_args(Granularity))}
# As messages spell them, such as `int8 and int4`.
_INTEGERS = " and ".join(", ".join(INTEGER_BITS).rsplit(", ", 1))
SCALE_BYTES = 2  # of a scale or zero, float16
# Capacities are multiples of this, so that a kernel may read whole tiles of tokens.
TOKEN_ALIGNMENT = 64
# Tokens that share the scale of a channel. With channel scales, capacities are multiples of it: all blocks are whole.
BLOCK_SIZE = 128
# Rows of their tails for newest tokens are multiples of this, so that a kernel may read whole tiles there, too.
TAIL_ALIGNMENT = 32


@dataclasses.dataclass(frozen=True)
class KVFormat:
    """How keys or values are stored.

    Attributes:
        storage: What one code is: `"int8"`, `"int4"`, `"int3"`, `"int2"`, `"fp8"`, or `"none"` for numbers as the model
            makes them.
        granularity: What shares one scale: `"tensor"` (all keys, or all values, of a sequence in the layer; frozen at
            the first append), `"token"` (all heads of a token), `"head"` (the channels of one token and head),
            `"group"` (`group_size` consecutive channels of one token and head) or `"channel"` (one channel of a head
            over `block_size` consecutive tokens; for keys only).
        group_size: Channels per scale; given exactly when `granularity` is `"group"`. Must divide head_dim.
        symmetric: Whether there is no zero. fp8 and `none` are always symmetric.
        block_size: Tokens per scale; given exactly when `granularity` is `"channel"`, which requires int4 codes, a
            zero, and blocks of 128.
        clip_ratio: The part of the range of values, around its middle, that integer codes span. Values beyond it get
            the first or the last code. Above 0 and at most 1, the whole range. With few levels, slightly less than 1
            lowers the total error: codes are closer together, and only the rare values at the ends lose.

    Raises:
        TypeError, ValueError: The combination has no meaning; the message names the argument.
    """

    storage: StorageType
    granularity: Granularity = "head"
    group_size: int | None = None
    symmetric: bool = True
    block_size: int | None = None
    clip_ratio: float = 1.0

    def __post_init__(self) -> None:
        _check_choice("storage", self.storage, get_args(StorageType))
        _check_choice("granularity", self.granularity, get_args(Granularity))
        size, ratio = self.group_size, self.clip_ratio
        if not isinstance(self.symmetric, bool):
            raise TypeError(f"KVFormat: `symmetric` must be True or False, got {self.symmetric!r}.")
        if not self.is_integer and not self.symmetric:
            expected = f"be True for storage '{self.storage}', got False"
            raise _refusal("symmetric", expected, f"Only {_INTEGERS} have a zero.")
        if self.storage == "none" and self.granularity != "head":
            expected = f"be left at 'head' for storage 'none', got '{self.granularity}'"
            raise _refusal("granularity", expected, "Nothing is scaled there.")
        if (self.granularity == "group") != (size is not None):
            expected = f"be given exactly when `granularity` is 'group', got {size!r} with '{self.granularity}'"
            raise _refusal("group_size", expected, "Use for example granularity='group', group_size=32.")
        if size is not None and (isinstance(size, bool) or not isinstance(size, int)):
            raise TypeError(f"KVFormat: `group_size` must be an int, got {size!r}.")
        if size is not None and (size < 8 or size % 8 != 0):
            raise _refusal("group_size", f"be a positive multiple of 8, got {size}", "Common sizes are 32 and 64.")
        if (self.granularity == "channel") != (self.block_size is not None):
            expected = f"be given exactly when `granularity` is 'channel', got {self.block_size!r} with "
            remedy = f"Use granularity='channel', block_size={BLOCK_SIZE}."
            raise _refusal("block_size", f"{expected}'{self.granularity}'", remedy)
        if self.block_size is not None:
            if isinstance(self.block_size, bool) or self.block_size != BLOCK_SIZE:
                raise ValueError(f"KVFormat: `block_size` must be {BLOCK_SIZE}, got {self.block_size!r}.")
            if self.storage != "int4" or self.symmetric:
                expected = "not be 'channel' unless storage is 'int4' and symmetric is False, got storage "
                expected += f"'{self.storage}' and symmetric {self.symmetric}"
                raise _refusal("granularity", expected, "Other codes gain nothing.")
        if isinstance(ratio, bool) or not isinstance(ratio, (int, float)):
            raise TypeError(f"KVFormat: `clip_ratio` must be a number, got {ratio!r}.")
        if not 0 < ratio <= 1:
            expected = f"be above 0 and at most 1, got {ratio}"
            raise _refusal("clip_ratio", expected, "1 spans the whole range; 0.9 to 1 are common.")
        if ratio != 1 and not self.is_integer:
            expected = f"be 1 for storage '{self.storage}', got {ratio}"
            raise _refusal("clip_ratio", expected, f"Clipping only helps the evenly spaced codes of {_INTEGERS}.")
        object.__setattr__(self, "clip_ratio", float(ratio))

    @property
    def is_quantized(self) -> bool:
        """Whether codes differ from the values, that is, whether the storage type is not `none`."""
        return self.storage != "none"

    @property
    def is_integer(self) -> bool:
        """Whether codes are integers, whose steps are equal: only these have a zero and can be clipped."""
        return self.storage in INTEGER_BITS

    @property
    def bits(self) -> int:
        """Bits of a code. Not defined for storage type `none`."""
        return BITS[self.storage]

    @property
    def storage_id(self) -> int:
        """The number of the storage type in op arguments."""
        return STORAGE_IDS[self.storage]

    @property
    def token_alignment(self) -> int:
        """The number of tokens that capacities are multiples of."""
        return TOKEN_ALIGNMENT if self.block_size is None else self.block_size

    def num_groups(self, head_dim: int) -> int:
        """Scales per token and head; with granularity `channel` they are shared by a block, see `scale_shape`.

        Raises:
            ValueError: `head_dim` is not a multiple of 8, or the group size does not divide it.
        """
        if head_dim <= 0 or head_dim % 8 != 0:
            raise _refusal("head_dim", f"be a positive multiple of 8, got {head_dim}", "Leave the model unpatched.")
        if self.granularity == "channel":
            return head_dim
        if self.group_size is None:
            return 1
        if head_dim % self.group_size != 0:
            expected = f"divide head_dim {head_dim}, got {self.group_size}"
            raise _refusal("group_size", expected, "Choose a divisor, or granularity 'head'.")
        return head_dim // self.group_size

    def row_bytes(self, head_dim: int) -> int:
        """Bytes of one token's codes in one head. Not defined for storage type `none`, whose dtype is the model's."""
        return head_dim * self.bits // 8

    def head_dim_of(self, codes: Tensor) -> int:
        """Channels of a head, from a codes plane of this format."""
        return codes.shape[-1] * 8 // self.bits if self.is_quantized else codes.shape[-1]

    def scale_shape(self, batch: int, num_kv_heads: int, head_dim: int, capacity: int) -> tuple[int, int, int, int]:
        """Shape of the scale and zero planes: `[batch, heads, groups, tokens]`, axes that share a scale of size 1.

        For granularity `channel` it is `[batch, heads, blocks, head_dim]`; `capacity` is rounded up to whole blocks.
        """
        if self.block_size is not None:
            return (batch, num_kv_heads, -(-capacity // self.block_size), self.num_groups(head_dim))
        if self.granularity == "tensor":
            return (batch, 1, 1, 1)
        if self.granularity == "token":
            return (batch, 1, 1, capacity)
        return (batch, num_kv_heads, self.num_groups(head_dim), capacity)

    def tail_rows(self, sink_length: int = 0, residual_length: int = 0, slack: int = 0) -> int:
        """Rows of the tail; 0 for no tail.

        Args:
            sink_length: First tokens that stay dense.
            residual_length: Newest tokens that stay dense.
            slack: Tokens behind these that a tail also keeps, for a crop. Attention does not read them.
        """
        if not self.is_quantized:
            return 0
        if self.block_size is None:
            return sink_length + residual_length + (slack if residual_length else 0)
        # One block more, because the window may begin within a block. Kernels take `TAIL_ALIGNMENT` tokens at a time.
        recent = -(-(residual_length + slack) // TAIL_ALIGNMENT) * TAIL_ALIGNMENT
        return sink_length + recent + self.block_size

    def serves_tail(self, rows: int, sink_length: int = 0, residual_length: int = 0) -> bool:
        """Whether some slack makes `tail_rows` return `rows`. Other arguments as there."""
        slack = rows - self.tail_rows(sink_length, residual_length)
        return slack >= 0 and rows == self.tail_rows(sink_length, residual_length, slack)

    def plane_names(self, sink_length: int = 0, residual_length: int = 0) -> list[str]:
        """The planes that exist, in the order of `Planes.tensors`. Arguments as in `tail_rows`."""
        has = {
            "codes": True,
            "scale": self.is_quantized,
            "zero": not self.symmetric,
            "tail": self.tail_rows(sink_length, residual_length) > 0,
        }
        return [name for name, exists in has.items() if exists]

    def plane_shapes(
        self,
        batch: int,
        num_kv_heads: int,
        head_dim: int,
        capacity: int,
        sink_length: int = 0,
        residual_length: int = 0,
        slack: int = 0,
    ) -> dict[str, tuple[int, int, int, int]]:
        """The shapes of the planes that exist, by name. See `allocate`."""
        scale = self.scale_shape(batch, num_kv_heads, head_dim, capacity)
        shapes = {
            "codes": (batch, num_kv_heads, capacity, self.row_bytes(head_dim) if self.is_quantized else head_dim),
            "scale": scale,
            "zero": scale,
            "tail": (batch, num_kv_heads, self.tail_rows(sink_length, residual_length, slack), head_dim),
        }
        return {name: shapes[name] for name in self.plane_names(sink_length, residual_length)}

    def plane_dtype(self, name: str) -> torch.dtype | None:
        """The dtype of a plane; `None` for the model's."""
        if name == "tail" or not self.is_quantized:
            return None
        import torch

        return torch.uint8 if name == "codes" else torch.float16

    def tail_begin(self, length: Count, residual_length: int = 0) -> Count:
        """Position of the first of the newest tokens that are in the tail.

        Args:
            length: Tokens held.
            residual_length: As in `tail_rows`.
        """
        begin = length - residual_length
        begin = max(begin, 0) if isinstance(begin, int) else begin.clamp(min=0)
        return begin if self.block_size is None else begin // self.block_size * self.block_size

    def allocate(
        self,
        batch: int,
        num_kv_heads: int,
        head_dim: int,
        capacity: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        sink_length: int = 0,
        residual_length: int = 0,
        slack: int = 0,
    ) -> Planes:
        """New planes for `capacity` tokens.

        All planes are filled with zeros. A kernel that reads a tile beyond the length multiplies what is there by a
        probability of 0, and 0 · NaN would be NaN. Any integer codes would be finite, but copies of whole planes would
        read uninitialised memory, which memory checkers report.

        Args:
            batch: Sequences.
            num_kv_heads: Key-value heads on this device.
            head_dim: Channels of a head.
            capacity: Tokens to make room for.
            dtype: The model's dtype, in which storage type `none` and a tail keep their values.
            device: Of the planes.
            sink_length: As in `tail_rows`.
            residual_length: As in `tail_rows`.
            slack: As in `tail_rows`.

        Raises:
            ValueError: `head_dim` does not fit; see `num_groups`.
        """
        self.num_groups(head_dim)
        assert self.block_size is None or capacity % self.block_size == 0
        import torch

        shapes = self.plane_shapes(batch, num_kv_heads, head_dim, capacity, sink_length, residual_length, slack)
        planes = {
            name: torch.zeros(shape, dtype=self.plane_dtype(name) or dtype, device=device)
            for name, shape in shapes.items()
        }
        return Planes(planes["codes"], planes.get("scale"), planes.get("zero"), planes.get("tail"))

    def bytes_per_token(self, num_kv_heads: int, head_dim: int, dtype: torch.dtype | None = None) -> int:
        """Bytes of one token in all heads of one layer: codes, scales and zeros.

        A frozen scale is not counted. The scales of a block are divided among its tokens, rounded up to whole bytes.
        The tail is not counted, since it does not grow: see `tail_bytes`.

        Args:
            num_kv_heads: Key-value heads.
            head_dim: Channels of a head.
            dtype: The model's dtype, by default one of 16 bits; only matters for storage type `none`.
        """
        if not self.is_quantized:
            return num_kv_heads * head_dim * _itemsize(dtype)
        if self.block_size is not None:
            scales = num_kv_heads * self.num_groups(head_dim) * 2 * SCALE_BYTES
            return num_kv_heads * self.row_bytes(head_dim) + -(-scales // self.block_size)
        _, heads, groups, tokens = self.scale_shape(1, num_kv_heads, head_dim, capacity=2)
        planes = 1 if self.symmetric else 2
        scales = heads * groups * planes * SCALE_BYTES if tokens == 2 else 0
        return num_kv_heads * self.row_bytes(head_dim) + scales

    def tail_bytes(
        self,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype | None = None,
        *,
        sink_length: int = 0,
        residual_length: int = 0,
    ) -> int:
        """Bytes of the tail of one sequence in one layer. They do not depend on its length. See `Planes`."""
        return num_kv_heads * self.tail_rows(sink_length, residual_length) * head_dim * _itemsize(dtype)

    def bits_per_value(self, head_dim: int, num_kv_heads: int = 1, dtype: torch.dtype | None = None) -> float:
        """Bits of one value, scales and zeros included."""
        return self.bytes_per_token(num_kv_heads, head_dim, dtype) * 8 / (num_kv_heads * head_dim)

    def to_dict(self) -> dict[str, Any]:
        """A JSON-serialisable form that `from_dict` accepts."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> KVFormat:
        """Build a format from a dictionary of its fields.

        Raises:
            TypeError, ValueError: A key is unknown, or a value has no meaning.
        """
        known = [field.name for field in dataclasses.fields(cls)]
        for key in data:
            if key not in known:
                raise ValueError(f"KVFormat: unknown key '{key}'.{did_you_mean(key, known)} Known keys: {known}.")
        if "storage" not in data:
            raise _refusal("storage", f"be one of {list(STORAGE_IDS)}, got nothing", "Add the key 'storage'.")
        return cls(**data)

    def describe(self) -> str:
        """A short name for reports and test ids, such as `int4-group32-asymmetric`."""
        if not self.is_quantized:
            return "none"
        size = self.group_size or self.block_size or ""
        clipped = "" if self.clip_ratio == 1 else f"-clip{self.clip_ratio:g}"
        return f"{self.storage}-{self.granularity}{size}-{'symmetric' if self.symmetric else 'asymmetric'}{clipped}"


def _refusal(name: str, expected: str, remedy: str) -> ValueError:
    return ValueError(f"KVFormat: `{name}` must {expected}. {remedy}")


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        hint = did_you_mean(value, choices)
        raise ValueError(f"KVFormat: `{name}` must be one of {list(choices)}, got {value!r}.{hint}")


def _itemsize(dtype: torch.dtype | None) -> int:
    """Bytes of a number of the model, by default of one with 16 bits."""
    return 2 if dtype is None else dtype.itemsize
