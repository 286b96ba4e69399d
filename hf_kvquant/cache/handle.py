"""What a cache passes to attention in place of tensors: handles to stored codes, and marked lengths for masks.

transformers passes what `update` returns unchanged to the attention function, and what `get_mask_sizes` returns
unchanged to the mask function. So `update` returns two `KVHandle`s that share one `KVStep`. `registry.py` recognises
them and attends to the codes. The length is a `KVLength`, which tells the mask function to expect handles. A model that
uses a handle like a tensor instead (a torch function, indexing, a tensor method) gets dequantised tensors. This is
correct but slower; it is counted and logged once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..storage.layer_store import LayerStore
from .offsets import TextOffsets

LOOKED_INSIDE = "the model or its attention implementation looks at keys and values itself (is the model patched?)"


class _Attention(threading.local):
    """How often this thread has called our attention function with tensors, compiled calls left out."""

    calls = 0


ATTENTION = _Attention()


class MaskNotes:
    """What the 2-D attention masks of one cache have shown so far. Shared by all marked lengths of the cache.

    Args:
        num_layers: Layers of the cache; `None` if not needed.

    Attributes:
        num_layers: As given.
        model_config: Config of the model that the cache was last found to fit; `None` before.
        padded: The storages that count tokens from where padding ends.
        starts: `[batch]` int32: left-padding tokens in the newest mask, `None` for no padding. Used for the first
            chunk, which is written before attention passes it. Masks of later chunks do not change it when traced.
        told: `starts` of a whole prompt as `generate` was told them, and how many tokens its mask has, for models that
            do not ask us for their masks; `None` outside a call of `generate`.
        has_holes: Whether a mask hid other tokens than left padding. Kernels only support left padding, so from then on
            masks are dense and attention falls back.
        is_uneven: Whether sequences are padded so unequally that steps are dealt by split plans, in the mask of the
            newest chunk that was no decode step: these must not wait for the device.
        has_seen_mask: Whether a mask was made outside a compiled step, so that the other notes are valid.
        has_dense_masks: Whether the model makes its masks without our mask function (see `unregistered.py`). Lengths
            are then plain integers: a mark has no use, and the compiler could not trace it.
        is_bypassed: Whether a layer has been found that takes its mask from our mask function and computes attention
            without our attention function, such as one that a user has replaced. Masks are then as without us.
        beams_from: How many tokens all beams of the newest call of `generate` share, if it searched with beams: its
            last step leaves the keys of beams that it has not returned. `None` if it did not.
        offsets: Of the positions of a text with pictures. See `generate/positions.py`.
    """

    def __init__(self, num_layers: int | None = None) -> None:
        self.num_layers = num_layers
        self.model_config: object = None
        self.padded: Sequence[LayerStore] = ()
        self.forget()

    def forget(self) -> None:
        """Forget all masks."""
        self.has_holes = self.is_uneven = self.has_seen_mask = self.has_dense_masks = self.is_bypassed = False
        self.beams_from: int | None = None
        self.starts: Tensor | None = None
        self.told: tuple[Tensor, int] | None = None
        self.offsets = TextOffsets()
        self._calls: int | None = None  # `ATTENTION.calls` when a layer took its part of the first chunk

    def check_no_beams(self, where: str, argument: str, num_tokens: int) -> None:
        """Refuse to go on with what a search with beams has left in a cache of so many tokens.

        Raises:
            ValueError: It holds tokens that the newest call has searched with beams.
        """
        if self.beams_from is not None and num_tokens > self.beams_from:
            raise ValueError(
                f"{where}: `{argument}` must hold the sequences that generate has returned, got the cache of a search "
                "with beams, which ends with the keys of other beams. Reset it, or pass a new one, and feed it the "
                "whole text."
            )

    def starts_of_first(self, q_len: int) -> Tensor | None:
        """Where padding ends, for the first chunk, which has `q_len` tokens."""
        if torch.compiler.is_compiling() or self.told is None or self.has_seen_mask or self.has_dense_masks:
            return self.starts
        starts, num_masked = self.told
        # A model that puts tokens of its own before the text, as CPM-Ant does, has more tokens than the mask.
        return starts if q_len <= num_masked else None

    def expect_attention(self) -> None:
        """A layer has taken its part of the first chunk, and gives it to our attention function before the next one."""
        self.check_attention()
        self._calls = ATTENTION.calls

    def check_attention(self) -> None:
        """Find out whether the layer of the newest `expect_attention` has come to our attention function."""
        self.is_bypassed = self.is_bypassed or self._calls == ATTENTION.calls
        self._calls = None


class KVLength(int):
    """A mask length that marks layers whose `update` returns handles, and carries the notes of their cache.

    Attributes:
        notes: Of the cache.
        is_first_chunk: Whether `update` will return plain tensors this time, so that a normal mask is needed.
        window: Positions visible to a query of these layers, itself included; 0 for all.
    """

    notes: MaskNotes
    is_first_chunk: bool
    window: int

    def __new__(cls, length: int, notes: MaskNotes, is_first_chunk: bool, window: int = 0) -> KVLength:
        marked = super().__new__(cls, length)
        marked.notes = notes
        marked.is_first_chunk = is_first_chunk
        marked.window = window
        return marked


class KVStep:
    """One forward of one layer. Shared by the handles of key and value.

    In models that share keys and values, several layers attend through one step. The first of them appends the pending
    tokens.

    Args:
        storage: Of the layer.
        is_uneven: See `LayerStore.attend`.
    """

    def __init__(self, storage: LayerStore, is_uneven: bool = False) -> None:
        self.storage = storage
        self.is_uneven = is_uneven
        self._dense: tuple[Tensor, Tensor] | None = None
        self._pairs = 0

    def dense(self, reason: str) -> tuple[Tensor, Tensor]:
        """Keys and values as attention over codes sees them, computed once per step: dequantised, but for a chunk.

        `reason` is logged and counted where codes exist.
        """
        storage = self.storage
        if self._dense is None:
            before = storage.tally.pairs_dequantized
            if storage.formats.is_quantized:
                storage.note_fallback(reason)
            self._dense, self._pairs = storage.dense_step(), storage.tally.pairs_dequantized - before
        elif reason != LOOKED_INSIDE and not torch.compiler.is_compiling():
            # Another layer attends to the same tensors. A model that looks inside calls this for keys and for values,
            # which counts once.
            storage.tally.pairs_dequantized += self._pairs
        return self._dense


class KVHandle:
    """Keys or values of one layer, opaque outside attention.

    Args:
        step: Shared with the other side's handle.
        side: 0 for keys, 1 for values.
    """

    def __init__(self, step: KVStep, side: int) -> None:
        self.step = step
        self.side = side

    @property
    def shape(self) -> torch.Size:
        """`[batch, num_kv_heads, tokens, head_dim]`, as the dense tensor would have it."""
        storage = self.step.storage
        batch, num_kv_heads, *head_dims = storage.shape
        return torch.Size((batch, num_kv_heads, storage.num_shown, head_dims[self.side]))

    @property
    def dtype(self) -> torch.dtype:
        """The model's dtype."""
        assert self.step.storage.dtype is not None
        return self.step.storage.dtype

    @property
    def device(self) -> torch.device:
        """Device of the codes."""
        return self.step.storage.device

    @property
    def ndim(self) -> int:
        """Number of dimensions, 4."""
        return 4

    def to(self, *args: Any, **kwargs: Any) -> KVHandle | Tensor:
        """The handle itself if dtype and device stay the same, else the dense tensor moved or cast."""
        alike = torch.empty((0, 0, 0, 0), dtype=self.dtype, device=self.device)
        return self if alike.to(*args, **kwargs) is alike else self.dense().to(*args, **kwargs)

    def dense(self) -> Tensor:
        """The dequantised tensor, in the model's dtype and basis."""
        return self.step.dense(LOOKED_INSIDE)[self.side]

    def __repr__(self) -> str:
        return (
            f"KVHandle({'value' if self.side else 'key'}, {list(self.shape)}, {self.step.storage.formats.describe()})"
        )

    __hash__ = object.__hash__

    def __getitem__(self, index: Any) -> Tensor:
        return self.dense()[index]

    def __setitem__(self, index: Any, value: Any) -> None:
        raise TypeError(
            "attention: keys and values of a quantised cache must not be changed in place, got an assignment to items: "
            "the cache holds codes. Change a copy (clone()), and attend to that."
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("step", "side"):  # copy and pickle probe for these before __init__
            raise AttributeError(name)
        return getattr(self.dense(), name)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        return func(*_densified(args), **_densified(kwargs or {}))


def _densified(value: Any) -> Any:
    """`value` with every handle replaced by its dense tensor, in nested lists, tuples and dictionaries."""
    if isinstance(value, KVHandle):
        return value.dense()
    if isinstance(value, Mapping):
        return {key: _densified(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [_densified(item) for item in value]
        return items if isinstance(value, list) else tuple(items)
    return value


def _forward(name: str) -> Callable[..., Any]:
    def operator(self: KVHandle, *args: Any) -> Any:
        return getattr(self.dense(), name)(*_densified(args))

    return operator


# Python looks operators up on the type, not through __getattr__. Without __eq__ and __bool__, it would use defaults.
for _name in ("add", "radd", "sub", "rsub", "mul", "rmul", "matmul", "rmatmul", "truediv", "rtruediv", "pow", "rpow",
              "neg", "abs", "lt", "le", "gt", "ge", "eq", "ne", "len", "bool"):  # fmt: skip
    setattr(KVHandle, f"__{_name}__", _forward(f"__{_name}__"))


# Attention functions are told neither the cache nor whether a model has changed the keys since `update`. A note on the
# tensor itself tells both: whatever is computed from it has none.
_NOTE = "_hf_kvquant_cache"


def noted(key: Tensor, cache: object, layer_idx: int) -> Tensor:
    """Keys with a note of their cache and layer."""
    setattr(key, _NOTE, (cache, layer_idx))
    return key


def noted_on(key: Tensor) -> tuple[Any, int | None]:
    """The cache and the layer that `noted` has left on keys, `None` if there is none."""
    found: tuple[Any, int | None] = getattr(key, _NOTE, (None, None))
    return found
