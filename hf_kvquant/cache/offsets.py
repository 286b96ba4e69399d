"""How far the positions of a text with pictures are from the numbers of its tokens, by how much of it a cache holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

# By module of the model, `[rows, 1]`. Rows of a cache that come from one row of a prompt share its offset.
Offsets = Mapping[str, Tensor]


class TextOffsets:
    """What a model has found in the text that a cache holds, after each call that has added to it.

    Attributes:
        num_tokens: Held after the newest of these calls.
    """

    def __init__(self, turns: Sequence[tuple[int, Offsets]] = ()) -> None:
        self._turns = [*turns]
        self.num_tokens = turns[-1][0] if turns else 0

    def add(self, num_tokens: int, offsets: Offsets) -> None:
        """Note what holds from here on, after a call that has added tokens."""
        self._turns.append((num_tokens, offsets))
        self.num_tokens = num_tokens

    def at(self, num_tokens: int) -> Offsets:
        """What holds behind so many tokens; empty if others have added some, who know better.

        After a crop, that is what was found up to there: a picture that was removed counts no longer.
        """
        if num_tokens == 0:
            self._turns, self.num_tokens = [], 0
        if not self._turns or num_tokens > self.num_tokens:
            return {}
        kept = [turn for turn in self._turns if turn[0] <= num_tokens] or [(num_tokens, self._turns[0][1])]
        self._turns, self.num_tokens = kept, num_tokens
        return kept[-1][1]

    def select(self, rows: Tensor, batch: int) -> None:
        """Keep these rows of a cache of `batch` rows."""
        self._turns = [
            (
                num_tokens,
                {name: x.repeat_interleave(batch // x.shape[0], 0)[rows.to(x.device)] for name, x in offsets.items()},
            )
            for num_tokens, offsets in self._turns
        ]

    def facts(self) -> list[Any]:
        """This as JSON."""
        return [[n, {name: x.tolist() for name, x in offsets.items()}] for n, offsets in self._turns]

    @classmethod
    def of_facts(cls, facts: Any) -> TextOffsets:
        """The opposite of `facts`."""
        return cls([(int(n), {name: torch.tensor(rows) for name, rows in offsets.items()}) for n, offsets in facts])
