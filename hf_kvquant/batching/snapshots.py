"""`Snapshots`: states at the end of prefixes, so that requests share the pages of equal prefixes in models with states.

Who takes over the pages of a prefix goes on from the states at its end. The request that filled these pages has moved
its states on, so they must have been copied when they were there: after a step that ended at that border of pages.
A copy is a slot like those of requests, from the same memory. It is found by the hash of the last page before it, and
can be found as long as that page is.

A state takes as much memory as thousands of tokens, and a step that ends at a border makes a prompt one chunk more. So
few borders are worth it:

- where a prompt parts from one before it, whose pages it finds, but no states: the third such prompt has use of them;
- the last one of a prompt that takes several steps anyway: its conversation may go on.

Copies have a budget, and the least recently used one goes first. Where memory is short they give way before requests
do, except those that several prompts begin with and whose pages are in use. These go last.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from transformers.generation.continuous_batching.utils import stream_context

from .states import StateAllocator

SHARE = 1 / 8  # of the cache's bytes, which snapshots may take


@dataclasses.dataclass
class Snapshot:
    """The states at a border.

    Attributes:
        slot: Which holds them.
        shared: The hash of the last page before it, if several prompts had that; else `None`.
    """

    slot: int
    shared: int | None


class Snapshots:
    """Keeps the states of prefixes in slots.

    A snapshot belongs to the request that made it until its page can be found by others. It is theirs from then on.

    Args:
        slots: Where they come from.

    Attributes:
        most: How many there may be.
        num_hits: Requests that began with one.
        stream: On which forwards run, and so copies; `None` for the current one.
    """

    def __init__(self, slots: StateAllocator) -> None:
        self._slots, self.most = slots, max(1, int(SHARE * slots.num_blocks))
        self.num_hits = 0
        self.stream: torch.cuda.Stream | None = None
        self._kept: dict[int, Snapshot] = {}  # by hash of the last page, the least recently used one first
        self._made: dict[str, dict[int, Snapshot]] = {}  # of requests, by tokens
        self._borders: dict[str, dict[int, int | None]] = {}  # of requests, by tokens: as `Snapshot.shared`

    def __len__(self) -> int:
        return len(self._kept) + sum(map(len, list(self._made.values())))  # also asked for by other threads

    def num_covered(self, hashes: Sequence[int]) -> int:
        """Pages before the last border with a snapshot.

        Args:
            hashes: Of the pages of a prefix.
        """
        return next((at for at in range(len(hashes), 0, -1) if hashes[at - 1] in self._kept), 0)

    def give(self, page_hash: int, request_id: str) -> bool:
        """Give a request a slot, and copy the snapshot at the end of a page to it. Returns whether there was a slot."""
        slot = self._slots.take()
        if slot is None:
            return False
        snapshot = self._kept[page_hash] = self._kept.pop(page_hash)
        snapshot.shared = page_hash
        self._slots.block_table[request_id] = [slot]
        self._copy(snapshot.slot, slot)
        self.num_hits += 1
        return True

    def wish(self, request_id: str, borders: Mapping[int, int | None]) -> None:
        """Note where a request's steps are to end, in place of what was noted before.

        A border that another request is on its way to is left out: one snapshot of it is enough.

        Args:
            request_id: Whose they are.
            borders: By number of its tokens: the hash of the page that ends there if another prompt had it, or `None`.
        """
        self._borders.pop(request_id, None)
        under_way = {shared for others in self._borders.values() for shared in others.values()}
        under_way |= {made.shared for others in self._made.values() for made in others.values()}
        found = {at: shared for at, shared in borders.items() if shared is None or shared not in under_way}
        if found:
            self._borders[request_id] = found

    def next_border(self, request_id: str, held: int) -> int | None:
        """Where a step of a request must end at the latest that begins with `held` tokens; `None` if anywhere."""
        return min((border for border in self._borders.get(request_id, ()) if border > held), default=None)

    def take(self, request_id: str, held: int) -> None:
        """Copy the states of a request after a step, if it is at one of its borders."""
        borders = self._borders.get(request_id, {})
        if held not in borders:
            return
        slot = self._free_slot()
        if slot is not None:
            self._copy(self._slots.slot_of(request_id), slot)
            self._made.setdefault(request_id, {})[held] = Snapshot(slot, borders[held])
        del borders[held]

    def keep(self, request_id: str, hash_at: Callable[[int], int | None]) -> None:
        """Let others find what a request has made.

        Args:
            request_id: Who made it.
            hash_at: The hash of the page that ends after a number of tokens; `None` if others do not find it yet.
        """
        made = self._made.get(request_id, {})
        for held in list(made):
            page_hash = hash_at(held)
            if page_hash is None:
                continue
            snapshot, before = made.pop(held), self._kept.pop(page_hash, None)
            if before is not None:  # two requests were under way at once
                self._free(snapshot)
                before.shared = page_hash
            self._kept[page_hash] = before or snapshot
        if not made:
            self._made.pop(request_id, None)

    def end(self, request_id: str) -> None:
        """Forget a request, and what it made that nobody can find."""
        self._borders.pop(request_id, None)
        for snapshot in self._made.pop(request_id, {}).values():
            self._free(snapshot)

    def end_all(self) -> None:
        """Forget all requests."""
        for request_id in [*self._borders, *self._made]:
            self.end(request_id)

    def drop_lost(self, pages: Collection[int]) -> bool:
        """Free the snapshots whose pages are gone. Returns whether there was one.

        Args:
            pages: Hashes of those that can be found.
        """
        return self._drop([page_hash for page_hash in self._kept if page_hash not in pages])

    def drop_idle(self, pages: Collection[int]) -> bool:
        """Free those, too, that only one prompt had. Returns whether there was one."""
        return self._drop([each for each, kept in self._kept.items() if each not in pages or kept.shared is None])

    def clear(self) -> bool:
        """Free all, also those that requests are about to make. Returns whether there was one."""
        had_some = len(self) > 0
        self._drop(list(self._kept))
        self.end_all()
        return had_some

    def _drop(self, hashes: Sequence[int]) -> bool:
        for page_hash in hashes:
            self._free(self._kept.pop(page_hash))
        return bool(hashes)

    def _free_slot(self) -> int | None:
        """A slot for one more, perhaps that of the least recently used one."""
        slot = self._slots.take() if len(self) < self.most else None
        if slot is None and self._kept:
            slot = self._kept.pop(next(iter(self._kept))).slot
        return slot

    def _free(self, snapshot: Snapshot) -> None:
        self._slots.pool.free_blocks(self._slots.index, [snapshot.slot])

    def _copy(self, source: int, target: int) -> None:
        """Copy a slot. All that reads and writes slots is in the order of this stream, also if steps overlap."""
        with stream_context(self.stream):
            self._slots.copy_slot(source, target)
