"""`PageLayout`: how the keys and values of some tokens of one layer lie in one page.

Only this file knows its bytes, and which sizes fit. A page of P tokens is one run of bytes,

    K codes | V codes | K scale | K zero | V scale | V zero

and each part is a plane of `KVLayout` without its batch axis: `[num_kv_heads, P, row_bytes]` codes, `[num_kv_heads,
num_groups, P]` scales. Parts begin at multiples of 128 bytes. The pages of a layer are the same run again and again in
one tensor of bytes, so that planes over all pages are views of it, whose first axis counts pages. `page_table` of the
ops says which of them hold a sequence.

What granularity channel and dense windows keep dense is in no page: see `tails.py`.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from .formats import BLOCK_SIZE
from .layout import KVLayout
from .planes import Planes

PART_ALIGNMENT = 128
_ORDER = ((0, "codes"), (1, "codes"), (0, "scale"), (0, "zero"), (1, "scale"), (1, "zero"))


def aligned(num_bytes: int) -> int:
    """The next multiple of `PART_ALIGNMENT`."""
    return -(-num_bytes // PART_ALIGNMENT) * PART_ALIGNMENT


class Part:
    """Numbers that lie somewhere in bytes. Subclasses have the attributes as fields."""

    begin: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def end(self) -> int:
        """Bytes up to its end, without padding."""
        return self.begin + torch.Size(self.shape).numel() * self.dtype.itemsize

    def over(self, memory: Tensor, first: int, stride: int, count: int) -> Tensor:
        """This part of `count` pages or slots that lie one after the other, as a view `[count, *shape]`.

        Args:
            memory: `[bytes]` uint8, contiguous, from the start of its storage.
            first: Bytes before the first of them.
            stride: Bytes from one of them to the next. Like `first`, a multiple of `PART_ALIGNMENT`.
            count: How many there are.
        """
        assert memory.dtype == torch.uint8 and memory.is_contiguous() and memory.storage_offset() == 0
        assert first % PART_ALIGNMENT == 0 and stride % PART_ALIGNMENT == 0
        size = self.dtype.itemsize
        strides = stride // size, *torch.empty(self.shape, device="meta").stride()
        whole = memory[: memory.numel() // size * size].view(self.dtype)
        return whole.as_strided((count, *self.shape), strides, (first + self.begin) // size)


@dataclasses.dataclass(frozen=True)
class PagePart(Part):
    """One plane in a page, or in a slot for tails.

    Attributes:
        side: 0 for keys, 1 for values.
        name: Of the plane, as in `Planes`.
        begin: Bytes of the page or slot before it.
        shape: `[num_kv_heads, …]`: of the plane, without the axis of pages or slots.
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
        if not hasattr(self.num_tokens, "__index__") or self.num_tokens <= 0 or self.num_tokens % BLOCK_SIZE:
            raise ValueError(
                f"PageLayout: `num_tokens` must be a positive multiple of {BLOCK_SIZE}, got {self.num_tokens!r}. "
                "Set `page_size` of the ContinuousBatchingConfig to one, such as 256."
            )
        for name, kv_format, head_dim in zip(("key", "value"), self.layout.formats, self.head_dims, strict=True):
            if kv_format.granularity == "tensor":
                raise ValueError(
                    f"PageLayout: `{name}` must not have granularity 'tensor', got it: sequences share pages, so a "
                    "page cannot have the scale of one of them. Use granularity 'head'."
                )
            kv_format.num_groups(head_dim)

    @property
    def parts(self) -> list[PagePart]:
        """The planes, in the order of their bytes."""
        begin, parts = 0, []
        for side, name in _ORDER:
            kv_format = self.layout.formats[side]
            shapes = kv_format.plane_shapes(1, self.num_kv_heads, self.head_dims[side], self.num_tokens)
            if name in shapes:
                parts.append(PagePart(side, name, begin, shapes[name][1:], kv_format.plane_dtype(name) or self.dtype))
                begin = aligned(parts[-1].end)
        return parts

    @property
    def num_bytes(self) -> int:
        """Bytes of a page: a multiple of `PART_ALIGNMENT`."""
        return aligned(self.parts[-1].end)

    def planes(self, memory: Tensor, begin: int, stride: int) -> tuple[Planes, Planes]:
        """The planes of keys and of values over the pages of a layer, as views, without tails.

        Args:
            memory: See `Part.over`.
            begin: Bytes before the layer's first page.
            stride: Bytes from one of its pages to the next. Like `begin`, a multiple of `PART_ALIGNMENT`.

        Returns:
            Planes whose first axis counts the pages that fit into `memory`.
        """
        assert stride >= self.num_bytes
        num_pages = (memory.numel() - begin - self.num_bytes) // stride + 1
        sides: tuple[dict[str, Tensor], dict[str, Tensor]] = ({}, {})
        for part in self.parts:
            sides[part.side][part.name] = part.over(memory, begin, stride, num_pages)
        key, value = (Planes(side["codes"], side.get("scale"), side.get("zero")) for side in sides)
        return key, value
