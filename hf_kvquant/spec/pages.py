"""`PageLayout`: how the keys and values of some tokens of one layer lie in one page. Only this file knows its bytes.

A page of P tokens is one run of bytes,

    K codes | V codes | K scale | K zero | V scale | V zero

and each part is a plane of `KVLayout` without its batch axis: `[num_kv_heads, P, row_bytes]` codes, `[num_kv_heads,
num_groups, P]` scales. Parts begin at multiples of 128 bytes. The pages of a layer are the same run again and again in
one tensor of bytes, so that planes over all pages are views of it, whose first axis counts pages. `page_table` of the
ops says which of them hold a sequence.

With granularity channel or dense windows, a sequence has one page more, which holds nothing but its tails, from the
first byte on: `[num_kv_heads, rows, head_dim]` dense keys, then values. A page is at least as large as these. With
dense windows, a page must hold enough tokens that their codes are at least as large as the tails, so that no page
wastes memory. A row of `page_table` then begins with two more numbers, that page and `tail_from`: see
`reference.TailPages`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from .formats import BLOCK_SIZE
from .layout import KVLayout
from .planes import Planes

PART_ALIGNMENT = 128
_OF_TOKENS = ((0, "codes"), (1, "codes"), (0, "scale"), (0, "zero"), (1, "scale"), (1, "zero"))
_TAILS = ((0, "tail"), (1, "tail"))


class Part:
    """Numbers that lie somewhere in bytes. Subclasses have the attributes as fields."""

    begin: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def end(self) -> int:
        """Bytes up to its end, without padding."""
        return self.begin + torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclasses.dataclass(frozen=True)
class PagePart(Part):
    """One plane in a page.

    Attributes:
        side: 0 for keys, 1 for values.
        name: Of the plane, as in `Planes`.
        begin: Bytes of the page before it.
        shape: `[num_kv_heads, …]`: of the plane, without the axis of pages.
        dtype: Of its elements.
    """

    side: int
    name: str
    begin: int
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclasses.dataclass(frozen=True)
class PageLayout:
    """The page of one layer.

    Attributes:
        layout: Of the layer's keys and values.
        num_kv_heads: Key-value heads.
        head_dims: Channels of a head of keys, and of values.
        dtype: The model's, in which storage type `none` keeps its values.
        num_tokens: Tokens of a page, P.

    Raises:
        ValueError: Such a layer cannot live in pages, or `num_tokens` does not fit.
    """

    layout: KVLayout
    num_kv_heads: int
    head_dims: tuple[int, int]
    dtype: torch.dtype
    num_tokens: int

    def __post_init__(self) -> None:
        layout = self.layout
        if self.num_tokens <= 0 or self.num_tokens % BLOCK_SIZE:
            raise ValueError(
                f"PageLayout: `num_tokens` must be a positive multiple of {BLOCK_SIZE}, got {self.num_tokens}. "
                "Set `page_size` of the ContinuousBatchingConfig to one, such as 256."
            )
        for name, kv_format, head_dim in zip(("key", "value"), layout.formats, self.head_dims, strict=True):
            if kv_format.granularity == "tensor":
                raise ValueError(
                    f"PageLayout: `{name}` must not have granularity 'tensor', got it: sequences share pages, so a "
                    "page cannot have the scale of one of them. Use granularity 'head'."
                )
            kv_format.num_groups(head_dim)
        if self.layout.has_windows and self._end_of(_TAILS) > self._end_of(_OF_TOKENS):
            raise ValueError(
                f"PageLayout: `num_tokens` must be at least {self.least_tokens} for dense windows of "
                f"{layout.sink_length} and {layout.residual_length} tokens, got {self.num_tokens}: a page must have "
                f"room for them. Set `page_size` of the ContinuousBatchingConfig to {self.least_tokens}."
            )

    @property
    def has_tail(self) -> bool:
        """Whether each sequence has one page more, with its tails."""
        return self.layout.has_tail

    @property
    def least_tokens(self) -> int:
        """Tokens that a page of this layer must have at least, whatever this one has."""
        if not self.layout.has_windows:
            return BLOCK_SIZE
        of_token = self.layout.bytes_per_token((1, self.num_kv_heads, *self.head_dims), self.dtype)
        return -(-self._end_of(_TAILS) // (of_token * BLOCK_SIZE)) * BLOCK_SIZE

    @property
    def parts(self) -> list[PagePart]:
        """The planes of a page with tokens, in the order of their bytes, then the planes of a page with tails."""
        return [*self._parts(_OF_TOKENS), *self._parts(_TAILS)]

    def _parts(self, names: Iterable[tuple[int, str]]) -> Iterator[PagePart]:
        begin = 0
        for side, name in names:
            kv_format = self.layout.formats[side]
            shape = 1, self.num_kv_heads, self.head_dims[side], self.num_tokens
            shapes = kv_format.plane_shapes(*shape, **self.layout.windows)
            if name in shapes:
                part = PagePart(side, name, begin, shapes[name][1:], kv_format.plane_dtype(name) or self.dtype)
                begin = -(-part.end // PART_ALIGNMENT) * PART_ALIGNMENT
                yield part

    def _end_of(self, names: Iterable[tuple[int, str]]) -> int:
        return max((part.end for part in self._parts(names)), default=0)

    @property
    def sink_ranges(self) -> list[tuple[int, int]]:
        """The bytes of a page with tails that hold sinks: of each head of keys, then of values."""
        ranges, sinks = [], self.layout.sink_length
        for part in self._parts(_TAILS):
            heads, rows, head_dim = part.shape
            row_bytes = head_dim * part.dtype.itemsize
            begins = (part.begin + head * rows * row_bytes for head in range(heads) if sinks)
            ranges += [(begin, begin + sinks * row_bytes) for begin in begins]
        return ranges

    @property
    def num_bytes(self) -> int:
        """Bytes of a page: a multiple of `PART_ALIGNMENT`."""
        return -(-max(part.end for part in self.parts) // PART_ALIGNMENT) * PART_ALIGNMENT

    def planes(self, memory: Tensor, begin: int, stride: int) -> tuple[Planes, Planes]:
        """The planes of keys and of values over the pages of a layer, as views.

        Args:
            memory: `[bytes]` uint8, contiguous, from the start of its storage.
            begin: Bytes before the layer's first page.
            stride: Bytes from one of its pages to the next. Like `begin`, a multiple of `PART_ALIGNMENT`.

        Returns:
            Planes whose first axis counts the pages that fit into `memory`.
        """
        assert memory.dtype == torch.uint8 and memory.is_contiguous() and memory.storage_offset() == 0
        assert begin % PART_ALIGNMENT == 0 and stride % PART_ALIGNMENT == 0 and stride >= self.num_bytes
        num_pages = (memory.numel() - begin - self.num_bytes) // stride + 1
        sides: tuple[dict[str, Tensor], dict[str, Tensor]] = ({}, {})
        for part in self.parts:
            size, shape = part.dtype.itemsize, (num_pages, *part.shape)
            strides = stride // size, *torch.empty(part.shape, device="meta").stride()
            whole = memory[: memory.numel() // size * size].view(part.dtype)
            sides[part.side][part.name] = whole.as_strided(shape, strides, (begin + part.begin) // size)
        key, value = (Planes(side["codes"], side.get("scale"), side.get("zero"), side.get("tail")) for side in sides)
        return key, value
