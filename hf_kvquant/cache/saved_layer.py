"""One layer of a saved cache: what its file says about it, its tensors there, and the way back into a storage.

`file.py` decides about the file as a whole. Nothing here trusts a number that it reads: sizes are compared with what a
layer of this model and config can have before memory is allocated.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ..spec.key_transform import KeyTransform
from ..spec.planes import Planes
from ..storage.layer_store import LayerStore
from ..storage.rows import Ring
from ..storage.saved import held_planes, planned_bytes, planned_planes, restore
from ..storage.token_checks import SERVED_DTYPES

_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in SERVED_DTYPES}
_LARGEST = 2**31 - 1  # lengths are int32
_PLANES = ("codes", "scale", "zero", "tail")
_SIZES = ("num_kv_heads", "key_head_dim", "value_head_dim")


def described(index: int, storage: LayerStore) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """What a file says about a layer, and the layer's tensors there, by name."""
    transform = storage.key_transform or KeyTransform()
    found = {"starts": storage.starts, "center": transform.center, "smoothing": transform.smoothing}
    facts = {
        **dict(zip(_SIZES, storage.shape[1:], strict=True)),
        "dtype": str(storage.dtype).removeprefix("torch."),
        "capacity": storage.capacity,
        "is_rotated": transform.is_rotated,
        **({"most_held": storage.rows.most_held} if isinstance(storage.rows, Ring) else {}),
        **{f"has_{name}": tensor is not None for name, tensor in found.items()},
    }
    # Cloned, since layers may share `starts`, and safetensors cannot save tensors that share memory.
    small = [(name, None if tensor is None else tensor.clone()) for name, tensor in found.items()]
    named = [*_named(held_planes(storage)), *small]
    tensors = {f"layers.{index}.{name}": x.detach().cpu().contiguous() for name, x in named if x is not None}
    return facts, tensors


@dataclasses.dataclass(frozen=True)
class SavedLayer:
    """One layer as the file describes it. Its sizes have been checked.

    Attributes:
        prefix: Prefix of the names of its tensors.
        shape: Batch, key-value heads, head_dim of keys and of values.
        length: Tokens taken, including those that a ring no longer holds.
        most_held: Most tokens a ring had before a crop; 0 if it was not cropped.
        capacity: Tokens that the buffers have room for.
        dtype: The model's.
        is_rotated: Whether keys are rotated.
        num_bytes: Of the buffers, unused capacity included.
        expected: The tensors that the file must have for this layer, on the device `meta`.
    """

    prefix: str
    shape: tuple[int, int, int, int]
    length: int
    most_held: int
    capacity: int
    dtype: torch.dtype
    is_rotated: bool
    num_bytes: int
    expected: dict[str, Tensor]

    def prepare(self, storage: LayerStore, tensors: Mapping[str, Tensor]) -> None:
        """Set the transform, and refuse invalid numbers in `starts` and the transform. Allocates no buffers."""
        starts = tensors.get(f"{self.prefix}.starts")
        if starts is not None and not bool(((starts >= 0) & (starts <= self.length)).all()):
            raise ValueError(f"padding of {storage.name} does not end within its {self.length} tokens")
        center, smoothing = (tensors.get(f"{self.prefix}.{name}") for name in ("center", "smoothing"))
        storage.set_key_transform(KeyTransform(center, smoothing, self.is_rotated))

    def fill(self, storage: LayerStore, tensors: Mapping[str, Tensor], device: torch.device) -> None:
        """Allocate the storage's buffers and copy the tensors into them."""
        sides = [
            Planes(**{plane: tensors.get(f"{self.prefix}.{side}.{plane}") for plane in _PLANES})  # type: ignore[arg-type]
            for side in ("key", "value")
        ]
        restore(
            storage,
            (sides[0], sides[1]),
            shape=self.shape,
            length=self.length,
            capacity=self.capacity,
            dtype=self.dtype,
            device=device,
            starts=tensors.get(f"{self.prefix}.starts"),
        )
        if isinstance(storage.rows, Ring):
            storage.rows.most_held = self.most_held


def saved_layers(facts: Mapping[str, Any], storages: Mapping[int, LayerStore]) -> dict[int, SavedLayer]:
    """Check what the file says about each layer.

    Raises:
        KeyError, RuntimeError, TypeError, ValueError: No cache of this config and model can have these sizes.
    """
    if sorted(facts["layers"]) != sorted(map(str, storages)):
        raise ValueError(f"it has layers {list(facts['layers'])}, not {list(storages)}")
    length, batch = number(facts, "length"), number(facts, "batch")
    plans = {}
    for index, storage in storages.items():
        layer = facts["layers"][str(index)]
        sizes = [number(layer, name) for name in _SIZES]
        shape = batch, sizes[0], sizes[1], sizes[2]
        capacity, dtype = number(layer, "capacity"), _DTYPES[layer["dtype"]]
        most_held = _most_held(layer, storage.rows, length) if isinstance(storage.rows, Ring) else 0
        prefix = f"layers.{index}"
        named = dict(_named(planned_planes(storage, shape, length, capacity, dtype)))
        if flag(layer, "has_starts"):
            named["starts"] = torch.empty((batch,), dtype=torch.int32, device="meta")
        for name in ("center", "smoothing"):
            if flag(layer, f"has_{name}"):
                named[name] = torch.empty((shape[1], shape[2]), dtype=torch.float32, device="meta")
        expected = {f"{prefix}.{name}": tensor for name, tensor in named.items() if tensor is not None}
        num_bytes = planned_bytes(storage, shape, capacity, dtype)
        rotated = flag(layer, "is_rotated")
        plans[index] = SavedLayer(prefix, shape, length, most_held, capacity, dtype, rotated, num_bytes, expected)
    return plans


def _most_held(layer: Mapping[str, Any], ring: Ring, total: int) -> int:
    """`most_held` of a ring, checked: the most tokens it had before a crop. It now has `total`."""
    most_held, limit = layer["most_held"], ring.max_cache_len or _LARGEST
    if type(most_held) is not int or not 0 <= most_held <= limit:
        raise ValueError(f"`most_held` is {most_held!r} of {total} tokens, with room for {limit}")
    return most_held


def _named(sides: tuple[Planes, Planes]) -> Iterator[tuple[str, Tensor | None]]:
    """The planes of keys and of values with their names in the file."""
    for side, planes in zip(("key", "value"), sides, strict=True):
        for plane in _PLANES:
            yield f"{side}.{plane}", getattr(planes, plane)


def number(facts: Mapping[str, Any], name: str) -> int:
    number = facts[name]
    if type(number) is not int or not 0 < number <= _LARGEST:
        raise ValueError(f"`{name}` is {number!r}")
    return number


def flag(facts: Mapping[str, Any], name: str) -> bool:
    flag = facts[name]
    if type(flag) is not bool:
        raise ValueError(f"`{name}` is {flag!r}")
    return flag
