"""`Piece`: what is new of an answer, on its way from `writing.py` to `forms.py`."""

from __future__ import annotations

import dataclasses

from .tools import ToolCall


@dataclasses.dataclass(frozen=True)
class Logprob:
    """One token with the logarithm of its probability.

    Attributes:
        text: Of the token alone.
        logprob: Natural; `None` of the first token of all, which comes after nothing.
        top: The most likely tokens of its place, and theirs.
        begin: Characters of the answer before it.
    """

    text: str
    logprob: float | None
    top: list[tuple[str, float]]
    begin: int


@dataclasses.dataclass
class Piece:
    """What is new of an answer.

    Attributes:
        index: Of the answer, among its request's answers.
        texts: See `Writer.write`.
        logprobs: Of its tokens, if the client wants them.
        reason: Why the answer has ended; `None` if it goes on.
        num_tokens: Of the answer so far.
        steps: The same piece in smaller ones; one for each token where it matters which text a token is of.
    """

    index: int
    texts: list[str | ToolCall]
    logprobs: list[Logprob] | None = None
    reason: str | None = None
    num_tokens: int = 0
    steps: list[Piece] = dataclasses.field(default_factory=list)

    def add(self, later: Piece) -> None:
        """Continue with what came later."""
        self.texts += later.texts
        self.reason = later.reason
        if later.logprobs is not None:
            self.logprobs = (self.logprobs or []) + later.logprobs
