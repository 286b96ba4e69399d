"""What happens to keys before they are quantised, and to queries so that attention stays what it was.

A key transform is exact but for rounding: `query'(q) · key'(k)` equals `q · k` up to a constant per query, which
softmax ignores. `storage.py` applies it to keys at append and to queries at attention, and undoes it for whoever asks
for dense keys. The transforms themselves (smoothing, centring, rotation) live in modules of this package.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class KeyTransform(Protocol):
    """A map over the channels of one layer's keys. All tensors are `[batch, heads, tokens, head_dim]`."""

    def transform_key(self, key: Tensor) -> Tensor:
        """Keys as they are stored."""

    def transform_query(self, query: Tensor) -> Tensor:
        """Queries that give the same scores with stored keys. `query` has a multiple of the keys' heads."""

    def undo(self, key: Tensor) -> Tensor:
        """Stored keys in the model's own basis."""
