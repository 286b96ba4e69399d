"""Reuse the buffers of static caches, so that the next `generate` finds them at the same addresses.

A captured step always works on the addresses it was captured with. `generate` makes a new cache for every call; with
new buffers, its compiled step would be captured anew each time. So a model whose `generate` uses static caches has a
pool (`state.py`). A cache that is garbage-collected leaves its buffers there, and the next cache takes them if they
fit. Live caches never share buffers. What a buffer is, and when it fits, is decided by the callers (`residency.py`,
`lengths.py`); this file only records which buffers are free.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Hashable, Iterator
from typing import Any


class BufferPool:
    """Free buffers, at most one set for each use.

    So between calls a model keeps the buffers of one cache, the last one that was garbage-collected, however large.
    Buffers that do not fit a new cache are freed before new ones are allocated.
    """

    def __init__(self) -> None:
        self._idle: dict[Hashable, tuple[Hashable, Any]] = {}
        self._is_closed = False
        self._num_graphs = _num_graphs()

    def take(self, use: Hashable, kind: Hashable) -> Any:
        """Take the free buffers of this use if they are of this kind; else free them and return `None`.

        Args:
            use: What the buffers are for, such as a layer.
            kind: Everything that they depend on, from shape to device.
        """
        found = self._idle.pop(use, None)
        return found[1] if found is not None and found[0] == kind else None

    def expect(self, owner: Any, use: Hashable, kind: Hashable, buffers: Any) -> weakref.finalize[..., Any]:
        """Take buffers back when their owner is garbage-collected.

        Returns:
            A finalizer. An owner that replaces its buffers must detach it.
        """
        finalizer = weakref.finalize(owner, self._take_back, use, kind, buffers)
        finalizer.atexit = False
        return finalizer

    def reclaim(self) -> None:
        """Get buffers back from dead caches that reference cycles still hold. Call it before making a cache.

        The compiler leaves cycles that keep the caches of traced steps alive until Python collects cycles. Without this
        call there would be one cache too many in memory, and new addresses right after graphs have been captured.
        """
        if self._num_graphs != _num_graphs():
            gc.collect()
            self._num_graphs = _num_graphs()

    def kinds(self) -> Iterator[Hashable]:
        """The kinds of the free buffers."""
        return (kind for kind, _ in self._idle.values())

    def close(self) -> None:
        """Free all buffers, and those that come back later too."""
        self._is_closed = True
        self._idle.clear()

    def _take_back(self, use: Hashable, kind: Hashable, buffers: Any) -> None:
        if not self._is_closed:
            self._idle[use] = kind, buffers


def _num_graphs() -> int:
    """Graphs that the compiler has made so far. Does not import the compiler, which would dominate start-up time."""
    compiler = sys.modules.get("torch._dynamo.utils")
    return 0 if compiler is None else compiler.counters["stats"]["unique_graphs"]
