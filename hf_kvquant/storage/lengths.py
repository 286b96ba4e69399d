"""How many tokens the storages of one cache hold: one tensor for all storages on a device, advanced once a step.

In a forward the layers take the same tokens one after the other. If each counted them on the device, every layer would
launch a kernel per step for nothing. So storages share a tensor. The first storage that takes the tokens of a step
advances it; the others are then behind, and catch up without a launch when their turn comes. The host records which
storage is level with the tensor. A storage that is not (a layer that is never called, or was cropped alone) still gets
its own length, at the cost of a launch.

A compiled step advances only the length on the device. The host's record is the same before and after the step, so
nothing in it triggers a recompilation. This file knows neither codes nor layers.

Every sequence has a length of its own. In a batch of one `generate` they are all alike, so the host then keeps a single
number.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .buffers import lasting, makes_lasting_tensors
from .pool import BufferPool

# Marks for a storage that is behind the tensor in a compiled step, where the host does not know lengths: behind by the
# step being taken, or by more, in which case its length is lost.
_ONE_STEP_BEHIND = -1
_LOST = -2

# Tokens of every sequence: a single number if all are equally long.
Count = int | tuple[int, ...]


def plus(count: Count, tokens: int) -> Count:
    """A count with more tokens for every sequence, or with `-tokens` fewer, down to none."""
    if isinstance(count, int):
        return max(0, count + tokens)
    return count_of([max(0, each + tokens) for each in count])


def count_of(numbers: Sequence[int]) -> Count:
    """A count from the numbers of the sequences."""
    return numbers[0] if len(set(numbers)) == 1 else tuple(numbers)


def _fill(tensor: Tensor, count: Count) -> Tensor:
    """Set `[batch]` int32 to a count, in place."""
    return tensor.fill_(count) if isinstance(count, int) else tensor.copy_(torch.tensor(count, dtype=torch.int32))


class LengthGroup:
    """The lengths of storages that are on the same device and have the same batch size.

    Args:
        length: Tokens that the first member holds, of every sequence.
        tensor: `[batch]` int32. Overwritten; becomes the shared tensor.
    """

    def __init__(self, length: Count, tensor: Tensor) -> None:
        # [batch] int32: tokens held per sequence by every member that is level with it, pending tokens included.
        self.tensor = _fill(tensor, length)
        self._value: Count | None = length  # the same on the host; None after a compiled step
        self._is_ragged = isinstance(length, tuple)  # whether the tensor's numbers differ
        self._newest = 0  # tokens of the newest step
        # By member: None while it is level with the tensor, else the tokens it holds or one of the two marks above.
        self._behind: list[Count | None] = []
        # Split plans made from the present numbers of the tensor (`dealing.py`), by number of key-value heads.
        self._plans: dict[int, Tensor] = {}
        self._free: list[int] = []  # numbers of members that have left

    def __getstate__(self) -> dict[str, Any]:
        """For pickle and deepcopy: plans are left out, and made again when needed."""
        return {**self.__dict__, "_plans": {}}

    @property
    def num_members(self) -> int:
        """Members now in the group."""
        return len(self._behind) - len(self._free)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """After pickle and deepcopy, perhaps in inference mode, which later steps need not be in."""
        self.__dict__.update(state)
        self.tensor = lasting(self.tensor)

    def join(self, length: Count) -> int:
        """Add a member that holds `length` tokens. Returns its number, which the other methods take."""
        if not self._free:
            self._free.append(len(self._behind))
            self._behind.append(_LOST)
        member = self._free.pop()
        self._behind[member] = None if length == self._known() else length
        return member

    def leave(self, member: int) -> None:
        """Remove a member."""
        self._behind[member] = _LOST
        self._free.append(member)

    def length(self, member: int) -> int:
        """Tokens of the longest sequence that a member holds. Waits for the device after a compiled step.

        Raises:
            RuntimeError: The length is lost.
        """
        behind = self._behind[member]
        count = self._value if behind is None else behind
        if not isinstance(count, int) or count < 0:  # else without a call, since every layer asks in every step
            count = self.count(member)
        return count if isinstance(count, int) else max(count)

    def count(self, member: int) -> Count:
        """Tokens of every sequence that a member holds. See `length`."""
        behind = self._behind[member]
        if behind is None:
            return self._known()
        if behind == _ONE_STEP_BEHIND:
            return plus(self._known(), -self._newest)
        self._check_found(behind)
        return behind

    def is_ragged(self, member: int) -> bool:
        """Whether a member's sequences have different lengths. Does not wait for the device."""
        behind = self._behind[member]
        return isinstance(behind, tuple) or (behind in (None, _ONE_STEP_BEHIND) and self._is_ragged)

    def tensor_of(self, member: int) -> Tensor:
        """`[batch]` int32: tokens that a member holds. The shared tensor itself if the member is level with it.

        Raises:
            RuntimeError: The length is lost.
        """
        behind = self._behind[member]
        if behind is None:
            return self.tensor
        if behind == _ONE_STEP_BEHIND:
            return self.tensor - self._newest
        self._check_found(behind)
        return _fill(torch.empty_like(self.tensor), behind)

    def plans_of(self, member: int) -> dict[int, Tensor]:
        """Split plans that members level with this one have made of their lengths, to look up and to add to."""
        return self._plans if self._behind[member] is None else {}

    def advance(self, member: int, tokens: int) -> None:
        """Count new tokens of a member: the first member of a step advances the tensor, the others catch up with it.

        Raises:
            RuntimeError: The step is compiled, and the member had another length than the others before it.
        """
        behind = self._behind[member]
        if behind is None:
            self._leave_behind(member)
            self.tensor.add_(tokens)
            self._plans = {}
            self._value = None if torch.compiler.is_compiling() else plus(self._known(), tokens)
            self._newest = tokens
        elif behind == _ONE_STEP_BEHIND and tokens == self._newest:
            self._behind[member] = None
        elif torch.compiler.is_compiling():
            raise RuntimeError(
                "lengths: a compiled step must find all layers of a cache at one length, got a layer that was left out "
                "of earlier steps. Reset the cache, or run this step eagerly."
            )
        elif isinstance(behind, int) and behind >= 0 and behind + tokens == self._value:
            self._behind[member] = None  # as `place` would find, with fewer calls
        else:
            self.place(member, plus(self.count(member), tokens))

    def check_level(self) -> None:
        """Refuse to capture a step while a member is not level with the tensor: the graph would contain its length.

        Raises:
            ValueError: A member is not level.
        """
        if sum(behind is None for behind in self._behind) != self.num_members:
            raise ValueError(
                "lengths: a captured step must find all layers of a cache at one length, got layers of different "
                "lengths. Reset the cache, or crop all of its layers alike."
            )

    def note_replayed(self, tokens: int) -> None:
        """Count on the host what a replayed CUDA graph has added to the tensor. All members must be level with it."""
        self._value = plus(self._known(), tokens)
        self._newest = tokens
        self._plans = {}

    def ask_device(self) -> None:
        """Read the length from the device when next needed. All members must be level with the tensor."""
        self._value = None
        self._plans = {}

    def forget_capture(self, length: int) -> None:
        """Undo what a failed capture counted on the host. Before it, all members were level; the tensor is unchanged.

        Args:
            length: Tokens that the tensor holds.
        """
        self._value = length
        self._plans = {}
        self._behind = [behind if behind == _LOST else None for behind in self._behind]

    def place(self, member: int, length: Count) -> None:
        """Set a member's length, of every sequence. Not for compiled steps."""
        if length != self._value:
            self._leave_behind(member)
            _fill(self.tensor, length)
            self._plans = {}
            self._value, self._is_ragged = length, isinstance(length, tuple)
            self._behind = [None if behind == length else behind for behind in self._behind]
        self._behind[member] = None

    def _leave_behind(self, member: int) -> None:
        """Record the lengths of all other members before the tensor changes."""
        level: Count = _ONE_STEP_BEHIND
        late: Count = _LOST
        if not torch.compiler.is_compiling():
            level = self._known()
            late = plus(level, -self._newest)
        self._behind = [
            level if behind is None else late if behind == _ONE_STEP_BEHIND else behind for behind in self._behind
        ]
        self._behind[member] = None

    def _known(self) -> Count:
        """The tensor's value on the host. Waits for the device after a compiled step."""
        if self._value is None:
            self._value = count_of(self.tensor.tolist())
        return self._value

    @staticmethod
    def _check_found(behind: Count) -> None:
        if behind == _LOST:
            raise RuntimeError(
                "lengths: a layer must have been called in every compiled step of its cache, got one that was left "
                "out, so its length is unknown. Reset the cache."
            )


class Lengths:
    """The length groups of one cache: one for each device and batch size of its storages.

    Args:
        pool: Provides the tensors and gets them back; `None` allocates new ones.
    """

    def __init__(self, pool: BufferPool | None = None) -> None:
        self._pool = pool
        self._groups: dict[tuple[torch.device, int], LengthGroup] = {}

    def join(self, length: Count, batch: int, device: torch.device) -> tuple[LengthGroup, int]:
        """Add a storage to the group for its batch size and device. Returns the group and the storage's number there.

        Args:
            length: Tokens that the storage holds.
            batch: Its batch size.
            device: Its device.
        """
        if torch.compiler.is_compiling():
            # A storage allocated in a compiled step counts alone: the host's record cannot change there.
            alone = LengthGroup(length, _new_tensor(batch, device))
            return alone, alone.join(length)
        group = self._groups.get((device, batch))
        if group is None or group.num_members == 0:
            group = self._groups[device, batch] = self._new_group(length, batch, device)
        return group, group.join(length)

    def _new_group(self, length: Count, batch: int, device: torch.device) -> LengthGroup:
        if self._pool is None:
            return LengthGroup(length, _new_tensor(batch, device))
        use = "lengths", device, batch
        tensor = self._pool.take(use, None)
        group = LengthGroup(length, _new_tensor(batch, device) if tensor is None else tensor)
        self._pool.expect(group, use, None, group.tensor)
        return group

    def __getstate__(self) -> dict[str, Any]:
        """For pickle and deepcopy: copies have their own tensors and no pool."""
        return {**self.__dict__, "_pool": None}


class Membership:
    """The part that one storage takes in the lengths of its cache.

    Args:
        lengths: Of the cache.

    Attributes:
        group: That it is in; `None` while it has no buffers.
        member: Its number there.
    """

    def __init__(self, lengths: Lengths) -> None:
        self._lengths = lengths
        self.group: LengthGroup | None = None
        self.member = 0

    def join(self, length: Count, batch: int, device: torch.device) -> None:
        """Leave the present group and join the one for a batch size and device. See `Lengths.join`."""
        self.leave()
        self.group, self.member = self._lengths.join(length, batch, device)

    def leave(self) -> None:
        """Leave the present group, if there is one."""
        if self.group is not None:
            self.group.leave(self.member)
        self.group = None


@makes_lasting_tensors
def _new_tensor(batch: int, device: torch.device) -> Tensor:
    return torch.empty((batch,), dtype=torch.int32, device=device)
