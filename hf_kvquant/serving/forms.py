"""The forms of OpenAI's answers: of chats and of completions, in one piece and in chunks."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Sequence
from typing import Any, ClassVar

from transformers.cli.serving.utils import ReasoningText


@dataclasses.dataclass(frozen=True)
class Usage:
    """Tokens of all prompts, each counted once, and of all answers."""

    num_prompt: int
    num_new: int

    def to_dict(self) -> dict[str, int]:
        """As in an answer."""
        total = self.num_prompt + self.num_new
        return {"prompt_tokens": self.num_prompt, "completion_tokens": self.num_new, "total_tokens": total}


@dataclasses.dataclass(frozen=True)
class Form:
    """What is the same in all pieces of an answer.

    Attributes:
        request_id: The request's.
        model: The model's name.
        created: Seconds of Unix time.
    """

    request_id: str
    model: str
    created: int = dataclasses.field(default_factory=lambda: int(time.time()))

    prefix: ClassVar[str]
    kinds: ClassVar[tuple[str, str]]  # in one piece, and of a chunk

    def whole(self, choices: list[dict[str, Any]], usage: Usage) -> dict[str, Any]:
        """An answer in one piece."""
        return {**self._head(self.kinds[0]), "choices": choices, "usage": usage.to_dict()}

    def chunk(self, choices: list[dict[str, Any]], usage: Usage | None = None) -> str:
        """A piece of a stream, as an event."""
        more = {} if usage is None else {"usage": usage.to_dict()}
        return event({**self._head(self.kinds[1]), "choices": choices, **more})

    def opening(self, num_choices: int) -> str:
        """The first chunks of a stream, before there is any text."""
        return ""

    def choice(self, index: int, pieces: Sequence[str], reason: str) -> dict[str, Any]:
        """One of the answers."""
        raise NotImplementedError

    def delta(self, index: int, piece: str, reason: str | None = None) -> dict[str, Any]:
        """A piece of one of the answers."""
        raise NotImplementedError

    def _head(self, kind: str) -> dict[str, Any]:
        name = f"{self.prefix}-{self.request_id}"
        return {"id": name, "object": kind, "created": self.created, "model": self.model}


class ChatForm(Form):
    """Of `/v1/chat/completions`. What a model thinks aloud is `reasoning_content`, which OpenAI does not have."""

    prefix = "chatcmpl"
    kinds = "chat.completion", "chat.completion.chunk"

    def opening(self, num_choices: int) -> str:
        """See `Form`."""
        deltas = ({"role": "assistant", "content": ""} for _ in range(num_choices))
        return "".join(self.chunk([_choice(index, None, delta=delta)]) for index, delta in enumerate(deltas))

    def choice(self, index: int, pieces: Sequence[str], reason: str) -> dict[str, Any]:
        """See `Form`."""
        thoughts = "".join(piece for piece in pieces if isinstance(piece, ReasoningText))
        content = "".join(piece for piece in pieces if not isinstance(piece, ReasoningText))
        message = {"role": "assistant", "content": content, "refusal": None}
        return _choice(index, reason, message=message | ({"reasoning_content": thoughts} if thoughts else {}))

    def delta(self, index: int, piece: str, reason: str | None = None) -> dict[str, Any]:
        """See `Form`."""
        name = "reasoning_content" if isinstance(piece, ReasoningText) else "content"
        return _choice(index, reason, delta={name: piece} if piece else {})


class CompletionForm(Form):
    """Of `/v1/completions`."""

    prefix = "cmpl"
    kinds = "text_completion", "text_completion"

    def choice(self, index: int, pieces: Sequence[str], reason: str) -> dict[str, Any]:
        """See `Form`."""
        return _choice(index, reason, text="".join(pieces))

    def delta(self, index: int, piece: str, reason: str | None = None) -> dict[str, Any]:
        """See `Form`."""
        return _choice(index, reason, text=piece)


def _choice(index: int, reason: str | None, **content: Any) -> dict[str, Any]:
    return {"index": index, **content, "logprobs": None, "finish_reason": reason}


def event(data: Any) -> str:
    """A server-sent event."""
    return f"data: {json.dumps(data, ensure_ascii=False, separators=(',', ':'))}\n\n"


END = "data: [DONE]\n\n"


def error_body(status: int, message: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """An error as OpenAI's API spells it."""
    kind = "invalid_request_error" if status < 500 and status != 429 else "server_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
