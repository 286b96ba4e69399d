"""Keep codes in CPU memory, and on the GPU only while attention reads them: `offloading=True` in a config.

Codes, scales and zeros, which grow with the sequence, are moved. The rest (dense windows, frozen scales, transforms,
lengths) stays on the GPU. The codes of a token never change, so in each step a layer's codes are copied to the GPU
once, and only those of the new token back. With int4 that is a quarter of what transformers' own offloading moves.

When a layer's turn comes, the layers before it are sent to CPU memory, and the next layer is fetched on a separate
stream, while this one attends. So at most two layers of a cache are on a device at a time. Everything that touches a
layer's planes takes a turn: attention, but also a reorder, a crop that needs codes, a save, a copy.

Order on the GPU: sending runs on the attention stream, after the layer's tokens are written and before its memory is
given back to that stream. Fetching first waits for the attention stream, and so for everything that still reads the
target memory and for the CPU copies it reads. Attention waits for the fetch. The host never waits.

CPU copies are pinned and have the token axis first. So any range of tokens is one contiguous piece, which is needed for
copies that overlap with kernels; the planes' own layout is restored on the GPU. `formats.py` decides the layout of a
plane, `storage.py` when tokens are written, `cache.py` which layers are offloaded.
"""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from ..config import LayerFormats
from ..spec.formats import KVFormat, Planes
from .layer_store import LayerStorage

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

    Pickles and copies are empty; the copied storages join them. Between turns an offloader keeps the memory that layers
    are fetched into: two slots for each kind of layer on a device.
    """

    def __init__(self) -> None:
        # Weak references, so that a cache and its memory are freed as soon as the user drops it.
        self._members: list[weakref.ref[OffloadedStorage]] = []
        self._residents: weakref.WeakSet[OffloadedStorage] = weakref.WeakSet()
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._free: dict[Hashable, list[Slot]] = {}

    def __reduce__(self) -> tuple[type[Offloader], tuple[()]]:
        return type(self), ()

    def join(self, storage: OffloadedStorage) -> int:
        """Add a storage after those that have joined. Returns its place in the order."""
        self._members.append(weakref.ref(storage))
        return len(self._members) - 1

    @torch.compiler.disable(reason="codes that are offloaded come and go")
    def take_turn(self, storage: OffloadedStorage) -> None:
        """Bring a storage to its device, start fetching the next one, and send away all others."""
        device, following = storage.device, self._after(storage)
        for other in list(self._residents):
            if other is not storage and other is not following and other.device == device:
                other.send()
        storage.fetch()
        storage.receive()
        if following is not None:
            following.fetch()

    def _after(self, storage: OffloadedStorage) -> OffloadedStorage | None:
        """The next storage on the same device; `None` during the first chunk, while later layers have no buffers."""
        begin = storage.place + 1
        for member in (*self._members[begin:], *self._members[: storage.place]):
            other = member()
            if other is not None:
                if not other.is_allocated:
                    return None
                if other.device == storage.device:
                    return other
        return None

    def note(self, storage: OffloadedStorage, *, is_resident: bool) -> None:
        """Record whether a storage is on its device."""
        (self._residents.add if is_resident else self._residents.discard)(storage)

    def stream(self, device: torch.device) -> torch.cuda.Stream | None:
        """The stream that fetches layers; `None` on devices without streams."""
        if device.type != "cuda":
            return None
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return self._streams[device]

    def take_slot(self, kind: Hashable, like: Slot, device: torch.device) -> Slot:
        """Memory for tensors of these shapes and dtypes: a free slot of this kind, or a new one."""
        if self._free.get(kind):
            return self._free[kind].pop()
        # Layers have grown or changed: free the slots that fit none of them any more.
        members = [member() for member in self._members]
        kinds = {member.kind() for member in members if member is not None and member.is_allocated}
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


class OffloadedStorage(LayerStorage):
    """A growing storage that an `Offloader` sends to CPU memory and fetches.

    Code of `LayerStorage` always finds the planes on the device: reading the attribute takes a turn first.

    Args:
        formats: Of keys and of values.
        offloader: Shared by the storages of one cache, which join it in the order of the layers.
        **options: Of `LayerStorage`.
    """

    def __init__(self, formats: LayerFormats, *, offloader: Offloader, **options: Any) -> None:
        self._offloader = offloader
        self._sides: list[Planes | None] = [None, None]  # keys, values; while away, with the CPU copies in them
        self._copies: list[Planes] | None = None  # in CPU memory, tokens first, made when first sent
        self._num_copied = [0, 0]  # tokens of keys and of values that the copies hold
        self._is_away = False
        self._is_coming = False  # being fetched, not yet waited for
        self._arrival: torch.cuda.Event | None = None
        self._slot: Slot | None = None  # the slot it is in; None: away, or in its own memory
        self._found_operands: Any = None
        super().__init__(formats, **options)
        assert not self.is_static
        self.place = offloader.join(self)

    # --- attributes of the base class ---------------------------------------------------------------------------------

    @property
    def key_planes(self) -> Planes | None:
        """Planes of keys, on the device."""
        self._be_here()
        return self._sides[0]

    @key_planes.setter
    def key_planes(self, planes: Planes | None) -> None:
        self._sides[0] = planes

    @property
    def value_planes(self) -> Planes | None:
        """Planes of values, on the device."""
        self._be_here()
        return self._sides[1]

    @value_planes.setter
    def value_planes(self, planes: Planes | None) -> None:
        self._sides[1] = planes

    @property
    def _operands(self) -> Any:
        self._be_here()
        return self._found_operands

    @_operands.setter
    def _operands(self, operands: Any) -> None:
        self._found_operands = operands

    @property
    def num_bytes(self) -> int:
        """Bytes allocated for codes, scales and zeros, on the GPU or the CPU. Planes that are on both count once."""
        return sum(planes.num_bytes for planes in self._sides if planes is not None)

    def _be_here(self) -> None:
        if self._is_away or self._is_coming:
            self._offloader.take_turn(self)

    def _set_planes(self, key_planes: Planes | None, value_planes: Planes | None) -> None:
        """Use planes that the base class has made, in their own memory. CPU copies of the old planes are dropped."""
        if key_planes is not None:
            self._offloader.take_turn(self)  # first, because moving other layers may run out of memory and raise
        super()._set_planes(key_planes, value_planes)
        self._copies = self._slot = self._arrival = None
        self._is_away = self._is_coming = False
        self._offloader.note(self, is_resident=key_planes is not None)

    # --- to CPU memory and back ---------------------------------------------------------------------------------------

    def send(self) -> None:
        """Copy to CPU memory what its copies lack, and free the planes on the device."""
        self.flush()
        if self._copies is None:
            is_pinned = self.device.type == "cuda"
            self._copies = [
                _copied(planes, kv_format, is_pinned)
                for planes, kv_format in zip(self._here(), self._formats(), strict=True)
            ]
            self._num_copied = [0, 0]
        kind = self.kind()
        for side, kv_format in enumerate(self._formats()):
            planes, copies = self._here()[side], self._copies[side]
            begin, end = self._num_copied[side], self.num_coded(kv_format, self.length)
            for old, new in _rows(planes, copies, kv_format, begin, end):
                new.copy_(old.contiguous(), non_blocking=True)
            self._num_copied[side] = end
        # Only now: if memory for a copy ran out above, the planes are still in place.
        self._sides = [*self._copies]
        if self._slot is not None:
            self._offloader.leave_slot(kind, self._slot)
        self._slot = self._arrival = self._found_operands = None
        self._is_away, self._is_coming = True, False
        self._offloader.note(self, is_resident=False)

    def fetch(self) -> None:
        """Start copying the planes to the device, if they are away. `receive` waits for them."""
        if not self._is_away:
            return
        assert self._copies is not None
        slot = self._offloader.take_slot(self.kind(), self._travelling(), self.device)
        stream = self._offloader.stream(self.device)
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream(self.device))
        sides = [dataclasses.replace(copies, **room) for copies, room in zip(self._copies, slot, strict=True)]
        with contextlib.nullcontext() if stream is None else torch.cuda.stream(stream):
            for copies, planes, kv_format, end in zip(
                self._copies, sides, self._formats(), self._num_copied, strict=True
            ):
                for old, new in _rows(copies, planes, kv_format, 0, end):
                    new.copy_(old.to(self.device, non_blocking=True))
        self._sides = [*sides]
        self._slot = slot
        self._arrival = None if stream is None else stream.record_event()
        self._is_away, self._is_coming = False, True
        self._offloader.note(self, is_resident=True)

    def receive(self) -> None:
        """Make the current stream wait for planes that are being fetched."""
        if not self._is_coming:
            return
        if self._arrival is not None:
            torch.cuda.current_stream(self.device).wait_event(self._arrival)
        self._arrival, self._is_coming = None, False
        self._planes_changed()

    def _here(self) -> tuple[Planes, Planes]:
        """The planes, wherever they are."""
        key, value = self._sides
        assert key is not None and value is not None
        return key, value

    def _travelling(self) -> Slot:
        key, value = (
            {name: getattr(planes, name) for name in planes.token_axes(kv_format.block_size)}
            for planes, kv_format in zip(self._here(), self._formats(), strict=True)
        )
        return key, value

    def kind(self) -> Hashable:
        """Device, shapes and dtypes of the planes that are moved. Layers of one kind can use the same slots."""
        sides = [tuple((name, plane.shape, plane.dtype) for name, plane in side.items()) for side in self._travelling()]
        return self.device, *sides

    # --- what differs from a storage that stays -----------------------------------------------------------------------

    @torch.compiler.disable(reason="codes that are offloaded come and go")
    def extend(self, key: Tensor, value: Tensor) -> None:
        """See `LayerStorage.extend`.

        Raises:
            RuntimeError: The step is being captured. Nothing has changed.
            TypeError, ValueError: As there, and for keys on a device that codes cannot be offloaded from.
        """
        if key.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"{self.name}: `offloading` must be False in a step that is captured, got True: offloaded "
                "codes change addresses, which a graph cannot follow. Run the step uncaptured, or leave offloading out."
            )
        super().extend(key, value)

    def _check_served(self, key: Tensor, value: Tensor) -> None:
        super()._check_served(key, value)
        check_home(self.name, key.device)

    def dequantize(self) -> tuple[Tensor, Tensor]:
        """See `LayerStorage.dequantize`. Never views, because other layers are fetched into the same memory."""
        key, value = (
            dense if kv_format.is_quantized else dense.clone()
            for dense, kv_format in zip(super().dequantize(), self._formats(), strict=True)
        )
        return key, value

    def held_planes(self) -> tuple[Planes, Planes]:
        """See `LayerStorage.held_planes`. Never views either."""
        key, value = super().held_planes()
        return key.map(torch.clone), value.map(torch.clone)

    def _take_back(self, num_tokens: int) -> None:
        """See `LayerStorage.crop`. Without a tail, nothing is moved."""
        super()._take_back(num_tokens)
        self._forget_copies()

    def reset(self) -> None:
        """See `LayerStorage.reset`."""
        super().reset()
        self._forget_copies()

    def _forget_copies(self) -> None:
        """Count cropped tokens as not copied, since other tokens will take their rows."""
        kept = [self.num_coded(kv_format, self.length) for kv_format in self._formats()]
        self._num_copied = [min(counts) for counts in zip(self._num_copied, kept, strict=True)]

    def __getstate__(self) -> dict[str, Any]:
        """Send the storage to CPU memory and wait for its copies first."""
        if self.is_allocated and not self._is_away:
            self.send()
        if self.is_allocated and self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        state = super().__getstate__()
        del state["_operands"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.place = self._offloader.join(self)
        if self._copies is not None and self.device.type == "cuda":
            # Pinned memory is no longer pinned after a copy or a pickle.
            fresh = [
                _copied(planes, kv_format, is_pinned=True)
                for planes, kv_format in zip(self._copies, self._formats(), strict=True)
            ]
            for copies, planes, kv_format, end in zip(
                self._copies, fresh, self._formats(), self._num_copied, strict=True
            ):
                for old, new in _rows(copies, planes, kv_format, 0, end):
                    new.copy_(old)
            self._copies = fresh
            self._sides = [*fresh]


def _copied(planes: Planes, kv_format: KVFormat, is_pinned: bool) -> Planes:
    """The planes with empty CPU tensors, tokens first, in place of those that are moved."""
    room = {}
    for name, axis in planes.token_axes(kv_format.block_size).items():
        plane = getattr(planes, name)
        shape = plane.movedim(axis, 0).shape
        room[name] = torch.empty(shape, dtype=plane.dtype, device="cpu", pin_memory=is_pinned).movedim(0, axis)
    return dataclasses.replace(planes, **room)


def _rows(source: Planes, target: Planes, kv_format: KVFormat, begin: int, end: int) -> list[tuple[Tensor, Tensor]]:
    """Views of tokens `begin … end - 1` in each plane that is moved, tokens first. `begin` starts a block."""
    if begin == end:
        return []
    size = kv_format.block_size
    pairs = source.narrow(end, size, begin), target.narrow(end, size, begin)
    rows = []
    for name, axis in source.token_axes(size).items():
        old, new = (getattr(planes, name).movedim(axis, 0) for planes in pairs)
        # Four bytes at a time: the kernel that reorders axes takes as long for an element of one byte.
        rows.append((old.view(torch.int32), new.view(torch.int32)) if old.dtype == torch.uint8 else (old, new))
    return rows
