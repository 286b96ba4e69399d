"""How many tokens the storages of one cache hold: one tensor for all of them on a device, advanced once a step.

In a forward the layers take the same tokens one after the other. If each counted them on the device, a step would
launch a kernel per layer for nothing. So storages share a tensor: the first that takes the tokens of a step advances
it, which leaves the others behind until their turn comes, when they catch up without a launch. The host keeps book of
who is where, so that a storage that is out of step (a layer that is never called, one that was cropped alone) still
gets its own length, at the price of a launch.

A compiled step advances the device's copy and nothing that the host could be asked for: the book it finds and the book
it leaves are equal, so that nothing in it makes the compiler look again. This file knows neither codes nor layers.
How many pairs of query and token so many tokens make, which all that count attention agree on, is here too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .pool import BufferPool

# Where a storage stands that is behind the tensor by an amount the host does not know in tokens: by the step that is
# being taken, or by more than that, so that nobody can tell any more.
_ONE_STEP_BEHIND = -1
_LOST = -2


class LengthGroup:
    """The lengths of storages that are on one device and have one batch.

    Args:
        length: Tokens that its first member holds.
        tensor: `[batch]` int32, overwritten and kept.
    """

    def __init__(self, length: int, tensor: Tensor) -> None:
        # [batch] int32: tokens held per sequence by every member that is level with it, pending tokens included.
        self.tensor = tensor.fill_(length)
        self._value: int | None = length  # the same on the host; None after a compiled step
        self._newest = 0  # tokens of the newest step
        # Of each member: None while it is level with the tensor, else the tokens it holds, or one of the two above.
        self._behind: list[int | None] = []
        self._free: list[int] = []  # names of members that have left

    @property
    def num_members(self) -> int:
        """Storages that have joined and not left."""
        return len(self._behind) - len(self._free)

    def join(self, length: int) -> int:
        """Add a member that holds `length` tokens. Returns what it is called by the other methods."""
        if not self._free:
            self._free.append(len(self._behind))
            self._behind.append(_LOST)
        member = self._free.pop()
        self._behind[member] = None if length == self._known() else length
        return member

    def leave(self, member: int) -> None:
        """Forget a member."""
        self._behind[member] = _LOST
        self._free.append(member)

    def length(self, member: int) -> int:
        """Tokens that a member holds. Waits for the device after a compiled step.

        Raises:
            RuntimeError: Nobody knows.
        """
        behind = self._behind[member]
        if behind is None:
            return self._known()
        if behind == _ONE_STEP_BEHIND:
            return self._known() - self._newest
        self._check_found(behind)
        return behind

    def tensor_of(self, member: int) -> Tensor:
        """`[batch]` int32: tokens that a member holds. The shared tensor wherever that is level with it.

        Raises:
            RuntimeError: Nobody knows.
        """
        behind = self._behind[member]
        if behind is None:
            return self.tensor
        if behind == _ONE_STEP_BEHIND:
            return self.tensor - self._newest
        self._check_found(behind)
        return torch.full_like(self.tensor, behind)

    def advance(self, member: int, tokens: int) -> None:
        """A member takes new tokens: the first of a step advances the tensor, the others catch up with it.

        Raises:
            RuntimeError: The step is compiled, and the member did not start from where the others did.
        """
        behind = self._behind[member]
        if behind is None:
            self._leave_behind(member)
            self.tensor.add_(tokens)
            self._value = None if torch.compiler.is_compiling() else self._known() + tokens
            self._newest = tokens
        elif behind == _ONE_STEP_BEHIND and tokens == self._newest:
            self._behind[member] = None
        elif torch.compiler.is_compiling():
            raise RuntimeError(
                "lengths: a compiled step must find all layers of a cache at one length, got a layer that was left out "
                "of steps before. Reset the cache, or run this step eagerly."
            )
        else:
            self.place(member, self.length(member) + tokens)
            self._newest = tokens

    def check_level(self) -> None:
        """Refuse a captured step: for a member that is not level with the tensor, it would hold numbers of its own.

        Raises:
            ValueError: A member is not.
        """
        if sum(behind is None for behind in self._behind) != self.num_members:
            raise ValueError(
                "lengths: a captured step must find all layers of a cache at one length, got layers of different "
                "lengths. Reset the cache, or crop all of its layers alike."
            )

    def note_replayed(self, tokens: int) -> None:
        """Count what a replayed CUDA graph has added to the tensor, for members that are all level with it."""
        self._value = self._known() + tokens
        self._newest = tokens

    def ask_device(self) -> None:
        """Forget what the host knows of members that are all level: only the device can tell."""
        self._value = None

    def forget_capture(self, length: int) -> None:
        """Undo what a capture that failed half-way counted; all members were level, and the tensor is as it was.

        Args:
            length: What it holds.
        """
        self._value = length
        self._behind = [behind if behind == _LOST else None for behind in self._behind]

    def place(self, member: int, length: int) -> None:
        """Set a member's length, not in a compiled step."""
        if length != self._value:
            self._leave_behind(member)
            self.tensor.fill_(length)
            self._value = length
            self._behind = [None if behind == length else behind for behind in self._behind]
        self._behind[member] = None

    def _leave_behind(self, member: int) -> None:
        """Note where the others are before the tensor changes."""
        is_compiling = torch.compiler.is_compiling()
        for other, behind in enumerate(self._behind):
            if other == member:
                continue
            if is_compiling and behind is not None:
                self._behind[other] = _LOST if behind == _ONE_STEP_BEHIND else behind
            elif is_compiling:
                self._behind[other] = _ONE_STEP_BEHIND
            elif behind is None or behind == _ONE_STEP_BEHIND:
                self._behind[other] = self.length(other)

    def _known(self) -> int:
        """What the tensor holds. Waits for the device after a compiled step."""
        if self._value is None:
            self._value = int(self.tensor[0].item())
        return self._value

    @staticmethod
    def _check_found(behind: int) -> None:
        if behind == _LOST:
            raise RuntimeError(
                "lengths: a layer must have been called in every compiled step of its cache, got one that was left "
                "out, so that nobody knows its length. Reset the cache."
            )


class Lengths:
    """The length groups of one cache: one for each device and batch that its storages have.

    Args:
        pool: Where tensors come from and go to; `None` makes new ones.
    """

    def __init__(self, pool: BufferPool | None = None) -> None:
        self._pool = pool
        self._groups: dict[tuple[torch.device, int], LengthGroup] = {}

    def join(self, length: int, batch: int, device: torch.device) -> tuple[LengthGroup, int]:
        """The group for a storage, and what it is called there.

        Args:
            length: Tokens that the storage holds.
            batch: Its sequences.
            device: Where it is.
        """
        if torch.compiler.is_compiling():
            # Whoever allocates in a compiled step counts alone: it could not tell others that it has come.
            alone = LengthGroup(length, _new_tensor(batch, device))
            return alone, alone.join(length)
        group = self._groups.get((device, batch))
        if group is None or group.num_members == 0:
            group = self._groups[device, batch] = self._new_group(length, batch, device)
        return group, group.join(length)

    def _new_group(self, length: int, batch: int, device: torch.device) -> LengthGroup:
        if self._pool is None:
            return LengthGroup(length, _new_tensor(batch, device))
        use = "lengths", device, batch
        tensor = self._pool.take(use, None)
        group = LengthGroup(length, _new_tensor(batch, device) if tensor is None else tensor)
        self._pool.expect(group, use, None, group.tensor)
        return group

    def __getstate__(self) -> dict[str, Any]:
        """For pickle and deepcopy: copies have tensors of their own."""
        return {**self.__dict__, "_pool": None}


def _new_tensor(batch: int, device: torch.device) -> Tensor:
    return torch.empty((batch,), dtype=torch.int32, device=device)


def causal_pairs(tokens: int, first_chunk: int, window: int = 0) -> int:
    """(Query, token) pairs that one layer serves from codes for a text fed in chunks, however large they are.

    Args:
        tokens: Of the text.
        first_chunk: Tokens of the first chunk.
        window: Positions visible to a query; 0 for all.
    """

    def pairs(tokens: int) -> int:
        clipped = min(tokens, window) if window else tokens
        return clipped * (clipped + 1) // 2 + (tokens - clipped) * window

    return pairs(tokens) - pairs(first_chunk)
