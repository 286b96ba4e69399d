"""Buffers of static caches that outlive their cache, so that the next `generate` finds them at the same addresses.

A captured step replays what it did to certain addresses. `generate` makes a cache for every call; with new buffers, its
compiled step would be captured anew every time. So a model whose `generate` uses static caches has a pool: what dies
leaves its buffers there, and what is born next takes them if they fit. What is alive shares them with nobody, however
long somebody keeps it. What a buffer is, and when one fits, is decided by those who come here (`storage.py`,
`lengths.py`); this file knows only who has which.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Hashable, Iterator
from typing import Any

from torch import nn

# Beside the models, not on them: copies of a model, by `copy` or `pickle`, are to have buffers of their own.
_pools: weakref.WeakKeyDictionary[nn.Module, BufferPool] = weakref.WeakKeyDictionary()


class BufferPool:
    """Idle buffers, at most one for each use.

    Between calls a model so keeps the buffers of one cache, that of the largest batch and length being no exception:
    what does not fit is let go before new buffers are made, and the last to die is what stays.
    """

    def __init__(self) -> None:
        self._idle: dict[Hashable, tuple[Hashable, Any]] = {}
        self._is_closed = False
        self._num_graphs = _num_graphs()

    def take(self, use: Hashable, kind: Hashable) -> Any:
        """Buffers that are free, or `None`, in which case those of another kind are let go.

        Args:
            use: What they are for, such as a layer.
            kind: Everything that they depend on, from shape to device.
        """
        found = self._idle.pop(use, None)
        return found[1] if found is not None and found[0] == kind else None

    def expect(self, owner: Any, use: Hashable, kind: Hashable, buffers: Any) -> weakref.finalize[..., Any]:
        """Take buffers back when their owner dies.

        Returns:
            To be detached by an owner that parts with its buffers.
        """
        finalizer = weakref.finalize(owner, self._take_back, use, kind, buffers)
        finalizer.atexit = False
        return finalizer

    def reclaim(self) -> None:
        """Get back what only garbage holds on to. To be called before a cache is made.

        The compiler leaves cycles behind that hold the caches of the steps it has traced, and so their buffers, until
        Python looks for cycles: one cache too many in memory, and new addresses just when graphs have been captured.
        """
        if self._num_graphs != _num_graphs():
            gc.collect()
            self._num_graphs = _num_graphs()

    def kinds(self) -> Iterator[Hashable]:
        """The kinds of what is free."""
        return (kind for kind, _ in self._idle.values())

    def close(self) -> None:
        """Let everything go, and what comes back later too."""
        self._is_closed = True
        self._idle.clear()

    def _take_back(self, use: Hashable, kind: Hashable, buffers: Any) -> None:
        if not self._is_closed:
            self._idle[use] = kind, buffers


def _num_graphs() -> int:
    """Graphs that the compiler has made so far. Does not import it, which takes longer than the rest of a start."""
    compiler = sys.modules.get("torch._dynamo.utils")
    return 0 if compiler is None else compiler.counters["stats"]["unique_graphs"]


def pool_of(model: nn.Module) -> BufferPool:
    """The pool of a model, made at the first need."""
    return _pools.setdefault(model, BufferPool())


def drop_pool(model: nn.Module) -> None:
    """Let the idle buffers of a model go."""
    pool = _pools.pop(model, None)
    if pool is not None:
        pool.close()
