"""Detect and undo a forward that ended early, by an exception or Ctrl-C, before the next forward begins.

In a forward the layers take the same tokens, one layer after the other. A forward that ends half-way leaves layers of
different lengths, and a model that continued from there would produce wrong tokens. A cache is not told when a forward
ends. But when a layer is called a second time, another forward has begun, and by then every layer must have had its
turn. This file records the turns, on the host and without reading tensors. `storage/rewind.py` takes tokens back
bit for bit; `cache.py` and `generate/hook.py` decide when a cache undoes a step by itself.

A step is whole once each layer has its tokens, even if the rest of the forward fails. Compiled steps are not watched
(see `KVQuantCache`). Where the user compiles a forward over a growing cache, torch compiles the first layers and runs
the others as they are (after `torch._dynamo.config.recompile_limit`), so of such a step only a part would be seen.
Replayed steps are always whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ..storage import rewind
from ..storage.layer_store import LayerStore
from ..upstream.releases import CACHE

_UPDATE = "update"


class Steps:
    """Which layers of a cache have had their turn in its newest step.

    Args:
        storages: Of the layers of this package, by layer index.
        bystanders: Layers that take no part in most steps, such as those that attend to pictures.

    Attributes:
        due: The `storages` that take part in every step and have not had their turn in this one. A layer that is due
            takes its tokens without `enter`, which would find nothing else: whoever gives them sets `newest`, and
            removes the layer here afterwards.
        newest: The layer that was called last.
        is_unwatched: Whether a part of a step was compiled. Nothing is refused then.
    """

    def __init__(self, storages: Mapping[int, LayerStore], bystanders: Iterable[int] = ()) -> None:
        self._storages = storages
        self._bystanders = frozenset(bystanders)
        self.forget()

    def forget(self) -> None:
        """Start over; all layers now have the same length."""
        self._members: set[int] = set()  # layers that take part in every step ...
        self.due: set[int] = set()
        self._waiting: set[int] = set()  # the members among transformers' layers that have not had their turn
        self._seen: set[tuple[int, str]] = set()  # (layer, kind of change) pairs of this step
        self.newest = -1
        self.is_unwatched = False
        self._is_first = True  # whether this is the first step since `forget`
        self._base = 0  # tokens that our layers held before this step

    def enter(self, layer: int, what: str = _UPDATE, *, is_once: bool = True) -> None:
        """Call before a layer changes its tokens or its state, and `leave` afterwards; see `due` for an exception.

        Args:
            layer: Its index.
            what: The kind of change.
            is_once: Whether a layer does this at most once a step. If not, repeated calls in a row are one step.

        Raises:
            RuntimeError: This begins a new step after one that ended early. Nothing has changed.
        """
        key = layer, what
        is_repeated = key in self._seen and (is_once or layer != self.newest)
        if not self._members or (is_repeated and not (what == _UPDATE and layer in self.due)):
            self._begin()
        if layer not in self._members and layer not in self._bystanders:
            self._join(layer)
        self._seen.add(key)
        self.newest = layer

    def leave(self, layer: int) -> None:
        """A layer has had its turn."""
        self.due.discard(layer)
        self._waiting.discard(layer)

    def _begin(self) -> None:
        if self._is_cut():
            taken = sum(storage.length != self._base for storage in self._ours())
            changed = self._changed_elsewhere()
            raise RuntimeError(
                f"KVQuantCache: `{CACHE}` must hold whole steps, got one that ended early: {taken} of "
                f"{len(self._ours())} layers have taken its tokens, after the {self._base} held before. "
                + (_RESET if changed else "Call crop(0) on the cache to undo it, or reset the cache.")
            )
        if not self._members:
            self._members = {layer for layer, storage in self._storages.items() if not storage.is_empty}
        else:
            self._is_first = False
        self.due = self._members & self._storages.keys()
        self._waiting = self._members - self.due
        self._seen = {(layer, _UPDATE) for layer in self.due}  # seen again once they are no longer due
        self._base = next((storage.length for storage in self._ours()), 0)

    def _join(self, layer: int) -> None:
        if not (self._is_first or self.is_unwatched):
            raise RuntimeError(
                f"KVQuantCache: `{CACHE}` must get its first tokens in all layers at once, got those of "
                f"layer {layer} when other layers held {self._base}: the first step ended early. {_RESET}"
            )
        self._members.add(layer)

    def _ours(self) -> list[LayerStore]:
        return [storage for layer, storage in self._storages.items() if layer in self._members]

    def _changed_elsewhere(self) -> list[int]:
        """Layers whose state the newest step has or may have changed, where transformers keeps that state."""
        return sorted({layer for layer, what in self._seen if what != _UPDATE or layer not in self._storages})

    def _is_cut(self) -> bool:
        # It is not enough that layers are waiting: if the first layer refused the tokens, nothing has changed.
        is_open = bool(self.due or self._waiting) and not self.is_unwatched
        return is_open and (
            bool(self._changed_elsewhere()) or any(storage.length != self._base for storage in self._ours())
        )

    def undo(self, *, may_round: bool = False) -> int:
        """Forget the tokens of the newest step if it ended early, in all layers or in none.

        Args:
            may_round: Whether tokens that were dense before the step may come back dequantised.

        Returns:
            How many tokens the step had; 0 if it was whole.

        Raises:
            RuntimeError: The step cannot be undone.
        """
        undone = 0
        if self._is_cut():
            changed = self._changed_elsewhere()
            if changed:
                raise RuntimeError(
                    f"KVQuantCache: `{CACHE}` must hold whole steps, got one that ended early after layers "
                    f"{changed}, whose state transformers keeps and which cannot be undone. {_RESET}"
                )
            taken = [(storage, storage.length - self._base) for storage in self._ours()]
            taken = [(storage, tokens) for storage, tokens in taken if tokens]
            for storage, tokens in taken:
                rewind.check_undo(storage, tokens)
                if not may_round and rewind.rounds(storage, tokens):
                    raise RuntimeError(
                        f"KVQuantCache: `{CACHE}` must hold whole steps, got one that ended early after "
                        f"{storage.name}, where tokens that were dense before now have only their codes. Reset the "
                        "cache and feed it the text again, or call crop(0) on it to go on with dequantised values."
                    )
            for storage, tokens in taken:
                rewind.undo(storage, tokens)
                undone = tokens
        self.due.clear()
        self._waiting.clear()
        return undone


_RESET = "Reset the cache and feed it the text again."
