"""`TailLayout`: how the tails of one request, in all layers, lie in one slot. Only this file knows its bytes.

A tail holds what a layer keeps dense: with dense windows the first and the newest tokens, and with granularity channel
the block of keys that waits for its codes. Its size does not depend on the length of the request. So a request has one
slot for the tails of all layers, besides its pages: for each layer `[num_kv_heads, rows, head_dim]` keys, then values,
where there are such. Each begins at a multiple of `PART_ALIGNMENT`.

Slots are the same run of bytes again and again in one tensor. Planes of tails are views of it whose first axis counts
slots. A row of a page table begins with the number of its slot: see `reference.Tails`. Which row of a tail a token has
is in `formats.py`, and which tokens a query reads there in `reference.py` (`window_begin`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from torch import Tensor

from .pages import PageLayout, PagePart, aligned


@dataclasses.dataclass(frozen=True)
class TailLayout:
    """The slot of one request.

    Attributes:
        parts: Tails of keys and of values, by index of the layer. Layers without tails are left out.
        sink_lengths: Rows of each tail that come first and hold sinks, by index of the layer.
    """

    parts: Mapping[int, tuple[PagePart, ...]]
    sink_lengths: Mapping[int, int]

    @classmethod
    def of(cls, pages: Mapping[int, PageLayout]) -> TailLayout | None:
        """The layout for layers with these pages, by index; `None` if none of them has a tail."""
        begin, parts = 0, {}
        for index, page in pages.items():
            found = []
            for side, (kv_format, head_dim) in enumerate(zip(page.layout.formats, page.head_dims, strict=True)):
                shapes = kv_format.plane_shapes(1, page.num_kv_heads, head_dim, page.num_tokens, **page.layout.windows)
                if "tail" in shapes:
                    found.append(PagePart(side, "tail", begin, shapes["tail"][1:], page.dtype))
                    begin = aligned(found[-1].end)
            if found:
                parts[index] = tuple(found)
        return cls(parts, {index: pages[index].layout.sink_length for index in parts}) if parts else None

    @property
    def num_bytes(self) -> int:
        """Bytes of the tails of one request: a multiple of `PART_ALIGNMENT`."""
        return aligned(max(part.end for parts in self.parts.values() for part in parts))

    @property
    def sink_ranges(self) -> list[tuple[int, int]]:
        """The bytes of a slot that hold sinks: of each layer, tail and head."""
        ranges = []
        for index, parts in self.parts.items():
            sinks = self.sink_lengths[index]
            for part in parts:
                heads, rows, head_dim = part.shape
                row_bytes = head_dim * part.dtype.itemsize
                begins = (part.begin + head * rows * row_bytes for head in range(heads) if sinks)
                ranges += [(begin, begin + sinks * row_bytes) for begin in begins]
        return ranges

    def planes(self, memory: Tensor, stride: int) -> dict[int, tuple[Tensor | None, Tensor | None]]:
        """The tails of keys and of values over all slots, as views `[slots, *shape]`, by index of the layer.

        Args:
            memory: See `Part.over`.
            stride: Bytes of a slot, a multiple of `PART_ALIGNMENT`.
        """
        assert stride >= self.num_bytes
        found = {}
        for index, parts in self.parts.items():
            sides = {part.side: part.over(memory, 0, stride, memory.numel() // stride) for part in parts}
            found[index] = sides.get(0), sides.get(1)
        return found
