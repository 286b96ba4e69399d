"""Whole steps: a forward that ended early, by an exception or Ctrl-C, is noticed before the next one, and undone.

In a forward each layer takes the same tokens, one layer after the other. A forward that ends half-way leaves layers of
different lengths, and a model that went on from there would give wrong tokens. Nothing tells a cache that a forward has
ended. But a layer that comes a second time says that another one has begun, and by then all layers must have had their
turn. This file keeps book of turns, on the host and without a look at tensors. How tokens are taken back to the bit is
decided in `storage.py` and `rings.py`; when a cache undoes a step by itself, in `cache.py` and `patching.py`.

A step is whole once each layer has its tokens, whatever becomes of the rest of the forward. Compiled steps are not seen
here (see `KVQuantCache`). Replayed ones are always whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from .storage import LayerStorage

_UPDATE = "update"


class Steps:
    """Which layers of a cache have had their turn in its newest step.

    Args:
        storages: Of the layers of this package, by index of the layer.
        bystanders: Layers that take no part in most steps, such as those that attend to pictures.
    """

    def __init__(self, storages: Mapping[int, LayerStorage], bystanders: Iterable[int] = ()) -> None:
        self._storages = storages
        self._bystanders = frozenset(bystanders)
        self.forget()

    def forget(self) -> None:
        """Begin anew, with layers that are level."""
        self._members: set[int] = set()  # layers that take part in every step ...
        self._waiting: set[int] = set()  # ... and those of them that have not had their turn in this one
        self._seen: set[tuple[int, str]] = set()  # what each layer was asked for in this step
        self._newest = -1  # the layer that was asked last
        self._is_first = True  # no layer has come a second time yet
        self._base = 0  # tokens that our layers held before this step

    def enter(self, layer: int, what: str = _UPDATE, *, is_once: bool = True) -> None:
        """A layer is about to change its tokens or its state. `leave` says that it has.

        Args:
            layer: Its index.
            what: Of which kind the change is.
            is_once: Whether a layer does this once a step, so that a second time in a row begins another step.

        Raises:
            RuntimeError: This begins a step behind one that ended early. Nothing has changed.
        """
        key = layer, what
        if not self._members or (key in self._seen and (is_once or layer != self._newest)):
            self._begin()
        if layer not in self._members and layer not in self._bystanders:
            self._join(layer)
        self._seen.add(key)
        self._newest = layer

    def leave(self, layer: int) -> None:
        """A layer has had its turn."""
        self._waiting.discard(layer)

    def _begin(self) -> None:
        if self._is_cut():
            taken = sum(storage.length != self._base for storage in self._ours())
            changed = self._changed_elsewhere()
            raise RuntimeError(
                f"KVQuantCache: `past_key_values` must hold whole steps, got one that ended early: {taken} of "
                f"{len(self._ours())} layers have taken its tokens, behind the {self._base} before. "
                + (_RESET if changed else "Call crop(0) on the cache to undo it, or reset the cache.")
            )
        if not self._members:
            self._members = {layer for layer, storage in self._storages.items() if not storage.is_empty}
        else:
            self._is_first = False
        self._waiting = set(self._members)
        self._seen.clear()
        self._base = next((storage.length for storage in self._ours()), 0)

    def _join(self, layer: int) -> None:
        if not self._is_first:
            raise RuntimeError(
                "KVQuantCache: `past_key_values` must get its first tokens in all layers at once, got those of "
                f"layer {layer} behind {self._base} tokens of others: the first step ended early. {_RESET}"
            )
        self._members.add(layer)

    def _ours(self) -> list[LayerStorage]:
        return [storage for layer, storage in self._storages.items() if layer in self._members]

    def _changed_elsewhere(self) -> list[int]:
        """Layers that the newest step has changed, or may have, in a way that only transformers knows."""
        return sorted({layer for layer, what in self._seen if what != _UPDATE or layer not in self._storages})

    def _is_cut(self) -> bool:
        # A layer that has refused its tokens was asked, too, and all are as they were.
        return bool(self._waiting) and (
            bool(self._changed_elsewhere()) or any(storage.length != self._base for storage in self._ours())
        )

    def undo(self, *, may_round: bool = False) -> int:
        """Forget the tokens of the newest step if it ended early, in all layers or in none.

        Args:
            may_round: Whether tokens that were dense before it may come back as their codes have them.

        Returns:
            How many tokens it had; 0 where it was whole.

        Raises:
            RuntimeError: It cannot be undone.
        """
        undone = 0
        if self._is_cut():
            changed = self._changed_elsewhere()
            if changed:
                raise RuntimeError(
                    "KVQuantCache: `past_key_values` must hold whole steps, got one that ended early behind layers "
                    f"{changed}, whose state transformers keeps and nobody can undo. {_RESET}"
                )
            taken = [(storage, storage.length - self._base) for storage in self._ours()]
            taken = [(storage, tokens) for storage, tokens in taken if tokens]
            for storage, tokens in taken:
                storage.check_undo(tokens)
                if not may_round and storage.rounds(tokens):
                    raise RuntimeError(
                        f"KVQuantCache: `past_key_values` must hold whole steps, got one that ended early behind "
                        f"{storage.name}, where tokens that were dense before have nothing but their codes now. Reset "
                        "the cache and feed it the text again, or call crop(0) on it to go on with what codes say."
                    )
            for storage, tokens in taken:
                storage.undo(tokens)
                undone = tokens
        self._waiting.clear()
        return undone


_RESET = "Reset the cache and feed it the text again."
