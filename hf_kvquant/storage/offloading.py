"""Keep codes in CPU memory, and on the GPU only while attention reads them: `offloading=True` in a config.

Codes, scales and zeros, which grow with the sequence, are moved. The rest (dense windows, frozen scales, transforms,
lengths) stays on the GPU. The codes of a token never change, so in each step a layer's codes are copied to the GPU
once, and only the new token's codes back. With int4 that is a quarter of what transformers' own offloading moves.

When a layer's turn comes, the layers before it are sent to CPU memory, and the next layer is fetched on a separate
stream, while this one attends. So at most two layers of a cache are on a device at a time. Everything that touches a
layer's planes takes a turn: attention, but also a reorder, a crop that needs codes, a save, a copy.

Order on the GPU: sending runs on the attention stream, after the layer's tokens are written and before its memory is
given back to that stream. Fetching first waits for the attention stream, and so for everything that still reads the
target memory and for the CPU copies it reads. Attention waits for the fetch. The host never waits.

CPU copies are pinned and have the token axis first. So any range of tokens is one contiguous piece, which is needed for
copies that overlap with kernels; the planes' own layout is restored on the GPU. `formats.py` decides the layout of a
plane, `layer_store.py` when tokens are written, `cache.py` which layers are offloaded.
"""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..spec.formats import KVFormat
from ..spec.planes import Planes
from .buffers import Buffers, Sides, makes_lasting_tensors
from .residency import Owned

# Devices that layers can be offloaded from. Tests add others.
HOMES = frozenset(("cuda",))

# The planes of keys and of values that are moved, by name.
Slot = tuple[dict[str, Tensor], dict[str, Tensor]]


def check_home(where: str, device: torch.device) -> None:
    """Refuse a device that codes cannot be offloaded from.

    Args:
        where: Begins the message.
        device: Of a layer.

    Raises:
        ValueError: The device is not a GPU.
    """
    if device.type not in HOMES:
        raise ValueError(
            f"{where}: `offloading` must be False for a layer on {device}, got True: only codes on a GPU can be "
            "offloaded to CPU memory. Leave offloading out, or move the model to a GPU."
        )


class Offloader:
    """Decides which layers of one cache are on their device.

    Pickles and copies are empty; the copied layers join them. Between turns an offloader keeps the memory that layers
    are fetched into: two slots for each kind of layer on a device.
    """

    def __init__(self) -> None:
        # Weak references, so that a cache and its memory are freed as soon as the user drops it.
        self._members: list[weakref.ref[Offloaded]] = []
        self._residents: weakref.WeakSet[Offloaded] = weakref.WeakSet()
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._free: dict[Hashable, list[Slot]] = {}

    def __reduce__(self) -> tuple[type[Offloader], tuple[()]]:
        return type(self), ()

    def join(self, layer: Offloaded) -> int:
        """Add a layer after those that have joined. Returns its place in the order."""
        self._members.append(weakref.ref(layer))
        return len(self._members) - 1

    @torch.compiler.disable(reason="codes that are offloaded come and go")
    def take_turn(self, layer: Offloaded, device: torch.device) -> None:
        """Bring a layer to its device, start fetching the next one, and send away all others."""
        following = self._after(layer, device)
        for other in list(self._residents):
            if other is not layer and other is not following and other.device == device:
                other.send()
        layer.fetch()
        layer.receive()
        if following is not None:
            following.fetch()

    def _after(self, layer: Offloaded, device: torch.device) -> Offloaded | None:
        """The next layer on the same device; `None` during the first chunk, while later layers have no buffers."""
        for member in (*self._members[layer.place + 1 :], *self._members[: layer.place]):
            other = member()
            if other is not None:
                if other.buffers is None:
                    return None
                if other.device == device:
                    return other
        return None

    def note(self, layer: Offloaded, *, is_resident: bool) -> None:
        """Record whether a layer is on its device."""
        (self._residents.add if is_resident else self._residents.discard)(layer)

    def stream(self, device: torch.device) -> torch.cuda.Stream | None:
        """The stream that fetches layers; `None` on devices without streams."""
        if device.type != "cuda":
            return None
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return self._streams[device]

    @makes_lasting_tensors
    def take_slot(self, kind: Hashable, like: Slot, device: torch.device) -> Slot:
        """Memory for tensors of these shapes and dtypes: a free slot of this kind, or a new one."""
        if self._free.get(kind):
            return self._free[kind].pop()
        # Layers have grown or changed: free the slots that fit none of them any more.
        members = [member() for member in self._members]
        kinds = {member.kind() for member in members if member is not None and member.buffers is not None}
        self._free = {each: slots for each, slots in self._free.items() if each in kinds}
        stream = self.stream(device)
        slot = tuple(
            {name: torch.zeros(plane.shape, dtype=plane.dtype, device=device) for name, plane in side.items()}
            for side in like
        )
        for side in slot:
            for plane in side.values():
                if stream is not None:
                    # Allocated on the attention stream. If it is freed during a fetch, its memory is not reused yet.
                    plane.record_stream(stream)
        return slot[0], slot[1]

    def leave_slot(self, kind: Hashable, slot: Slot) -> None:
        """Return a slot, for the next layer of this kind."""
        self._free.setdefault(kind, []).append(slot)


class Offloaded(Owned):
    """Buffers of a growing cache that an `Offloader` sends to CPU memory and fetches.

    Args:
        offloader: Shared by the layers of one cache.
    """

    is_offloaded = True

    def __init__(self, offloader: Offloader) -> None:
        super().__init__()
        self._offloader = offloader
        self._write: weakref.WeakMethod[Callable[[], int]] | None = None  # see `rejoin`
        self.place = -1  # in the order of the layers; set by `rejoin`
        self._copies: Sides | None = None  # in CPU memory, tokens first, made when first sent
        self._num_copied = [0, 0]  # tokens of keys and of values that the copies hold
        self.is_away = False  # then the planes of `buffers` have the CPU copies in them
        self._is_coming = False  # being fetched, not yet waited for
        self._arrival: torch.cuda.Event | None = None
        self._slot: Slot | None = None  # the slot it is in; None: away, or in its own memory

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_write": None}

    @property
    def device(self) -> torch.device:
        """Of the buffers when they are not away. There must be some."""
        return self._held().device

    def _held(self) -> Buffers:
        assert self.buffers is not None
        return self.buffers

    def arrive(self) -> Buffers:
        """Takes a turn."""
        if self.is_away or self._is_coming:
            self._offloader.take_turn(self, self.device)
        return self._held()

    def hold(self, buffers: Buffers | None) -> None:
        """CPU copies of the old planes are dropped."""
        if buffers is not None:
            # First, because moving other layers may run out of memory and raise.
            self._offloader.take_turn(self, (self.buffers or buffers).device)
        super().hold(buffers)
        self._copies = self._slot = self._arrival = None
        self.is_away = self._is_coming = False
        self._offloader.note(self, is_resident=buffers is not None)

    def note_cropped(self, length: int) -> None:
        """Their copies do not count any more."""
        if self.buffers is not None:
            kept = [self.buffers.layout.num_coded(side, length) for side in (0, 1)]
            self._num_copied = [min(counts) for counts in zip(self._num_copied, kept, strict=True)]

    # --- to CPU memory and back ---------------------------------------------------------------------------------------

    def send(self) -> None:
        """Copy to CPU memory what its copies lack, and free the planes on the device."""
        write = None if self._write is None else self._write()
        assert write is not None  # the layer holds its residency
        length, buffers = write(), self._held()
        layout = buffers.layout
        if self._copies is None:
            self._copies = _copied(buffers.planes, layout.formats, is_pinned=buffers.device.type == "cuda")
            self._num_copied = [0, 0]
        kind = self.kind()
        for side, kv_format in enumerate(layout.formats):
            begin, end = self._num_copied[side], layout.num_coded(side, length)
            for old, new in _rows(buffers.planes[side], self._copies[side], kv_format, begin, end):
                new.copy_(old.contiguous(), non_blocking=True)
            self._num_copied[side] = end
        # Only now: if memory for a copy ran out above, the planes are still in place.
        self.buffers, self.operands = dataclasses.replace(buffers, planes=self._copies), None
        if self._slot is not None:
            self._offloader.leave_slot(kind, self._slot)
        self._slot = self._arrival = None
        self.is_away, self._is_coming = True, False
        self._offloader.note(self, is_resident=False)

    def fetch(self) -> None:
        """Start copying the planes to the device, if they are away. `receive` waits for them."""
        if not self.is_away:
            return
        assert self._copies is not None
        buffers, device = self._held(), self.device
        slot = self._offloader.take_slot(self.kind(), self._travelling(), device)
        stream = self._offloader.stream(device)
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream(device))
        key, value = (dataclasses.replace(copies, **room) for copies, room in zip(self._copies, slot, strict=True))
        with contextlib.nullcontext() if stream is None else torch.cuda.stream(stream):
            _copy_tokens(self._copies, (key, value), buffers.layout.formats, self._num_copied, device)
        self.buffers = dataclasses.replace(buffers, planes=(key, value))
        self._slot = slot
        self._arrival = None if stream is None else stream.record_event()
        self.is_away, self._is_coming = False, True
        self._offloader.note(self, is_resident=True)

    def receive(self) -> None:
        """Make the current stream wait for planes that are being fetched."""
        if not self._is_coming:
            return
        if self._arrival is not None:
            torch.cuda.current_stream(self.device).wait_event(self._arrival)
        self._arrival, self._is_coming = None, False
        self.operands = self._held().operands()

    def _travelling(self) -> Slot:
        buffers = self._held()
        key, value = (
            {name: getattr(planes, name) for name in planes.token_axes(kv_format.block_size)}
            for planes, kv_format in zip(buffers.planes, buffers.layout.formats, strict=True)
        )
        return key, value

    def kind(self) -> Hashable:
        """Device, shapes and dtypes of the planes that are moved. Layers of one kind can use the same slots."""
        sides = [tuple((name, plane.shape, plane.dtype) for name, plane in side.items()) for side in self._travelling()]
        return self.device, *sides

    # --- copies of the layer ------------------------------------------------------------------------------------------

    def leave(self) -> None:
        """Send the planes to CPU memory and wait for them."""
        if self.buffers is not None and not self.is_away:
            self.send()
        if self.buffers is not None and self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def rejoin(self, write: Callable[[], int]) -> None:
        """The offloader of a copy is empty: its layers join again, in their order."""
        self._write = weakref.WeakMethod(write)
        self.place = self._offloader.join(self)
        if self._copies is not None and self.device.type == "cuda":
            # Pinned memory is no longer pinned after a copy or a pickle.
            buffers, copies = self._held(), self._copies
            formats = buffers.layout.formats
            self._copies = _copied(copies, formats, is_pinned=True)
            self.buffers = dataclasses.replace(buffers, planes=self._copies)
            _copy_tokens(copies, self._copies, formats, self._num_copied)


def check_not_captured(name: str, key: Tensor) -> None:
    """Refuse offloaded codes in a step that is captured.

    Raises:
        RuntimeError: The step is being captured.
    """
    if key.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"{name}: `offloading` must be False in a step that is captured, got True: offloaded "
            "codes change addresses, which a graph cannot follow. Run the step uncaptured, or leave offloading out."
        )


@makes_lasting_tensors
def _copied(sides: Sides, formats: tuple[KVFormat, KVFormat], *, is_pinned: bool) -> Sides:
    """The planes with empty CPU tensors, tokens first, in place of those that are moved."""

    def copied(planes: Planes, kv_format: KVFormat) -> Planes:
        room = {}
        for name, axis in planes.token_axes(kv_format.block_size).items():
            plane = getattr(planes, name)
            shape = plane.movedim(axis, 0).shape
            room[name] = torch.empty(shape, dtype=plane.dtype, device="cpu", pin_memory=is_pinned).movedim(0, axis)
        return dataclasses.replace(planes, **room)

    return copied(sides[0], formats[0]), copied(sides[1], formats[1])


def _copy_tokens(
    source: Sides,
    target: Sides,
    formats: tuple[KVFormat, KVFormat],
    num_tokens: Sequence[int],
    device: torch.device | str = "cpu",
) -> None:
    """Copy the first tokens of both sides to planes on a device."""
    for planes, copies, kv_format, end in zip(source, target, formats, num_tokens, strict=True):
        for old, new in _rows(planes, copies, kv_format, 0, end):
            new.copy_(old.to(device, non_blocking=True))


def _rows(source: Planes, target: Planes, kv_format: KVFormat, begin: int, end: int) -> list[tuple[Tensor, Tensor]]:
    """Views of tokens `begin … end - 1` in each plane that is moved, tokens first. `begin` starts a block."""
    if begin == end:
        return []
    size = kv_format.block_size
    pairs = source.narrow(end, size, begin), target.narrow(end, size, begin)
    rows = []
    for name, axis in source.token_axes(size).items():
        old, new = (getattr(planes, name).movedim(axis, 0) for planes in pairs)
        # Bytes four at a time where rows allow it: the kernel that reorders axes takes as long for an element of one.
        has_words = old.dtype == torch.uint8 and old.shape[-1] % 4 == 0
        rows.append((old.view(torch.int32), new.view(torch.int32)) if has_words else (old, new))
    return rows
