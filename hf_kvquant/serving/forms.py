"""The forms of OpenAI's answers: of chats and of completions, in one piece and in chunks."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Sequence
from typing import Any, ClassVar

from transformers.cli.serving.utils import ReasoningText

from .pieces import Logprob, Piece
from .tools import ToolCall

LEAST_LOGPROB = -9999.0


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

    def chunks(self, piece: Piece, usage: Usage | None = None) -> str:
        """A piece of one of the answers, as events: one for each of its texts, and one for its end."""
        texts = [*piece.texts, ""] if piece.reason is not None or not piece.texts else piece.texts
        chunks = []
        for number, text in enumerate(texts, 1):
            logprobs = piece.logprobs if number == 1 else None
            reason = piece.reason if number == len(texts) else None
            chunks.append(self.chunk([self._choice(piece.index, self.delta(text), logprobs, reason)], usage))
        return "".join(chunks)

    def gather(self, whole: Piece, piece: Piece) -> None:
        """Continue one of the answers, which is told in one piece, with what has come."""
        whole.add(piece)

    def choice(self, piece: Piece) -> dict[str, Any]:
        """One of the answers, in one piece."""
        return self._choice(piece.index, self.content(piece.texts), piece.logprobs, piece.reason)

    def chunk(self, choices: list[dict[str, Any]], usage: Usage | None = None) -> str:
        """A piece of a stream, as an event."""
        more = {} if usage is None else {"usage": usage.to_dict()}
        return event({**self._head(self.kinds[1]), "choices": choices, **more})

    def opening(self, num_choices: int) -> str:
        """The first chunks of a stream, before there is any text."""
        return ""

    def closing(self, usage: Usage | None) -> str:
        """The last chunks of a stream, with the numbers of tokens if the client wants them."""
        return ("" if usage is None else self.chunk([], usage)) + END

    def failure(self, status: int, message: str) -> str:
        """The last chunk of a stream that failed."""
        return event(error_body(status, message))

    def content(self, texts: Sequence[str | ToolCall]) -> dict[str, Any]:
        """The text of an answer in one piece."""
        raise NotImplementedError

    def delta(self, text: str | ToolCall) -> dict[str, Any]:
        """New text of an answer, or a call."""
        raise NotImplementedError

    def logprobs(self, found: Sequence[Logprob]) -> dict[str, Any]:
        """Logarithms of probabilities."""
        raise NotImplementedError

    def _choice(
        self, index: int, content: dict[str, Any], found: Sequence[Logprob] | None, reason: str | None
    ) -> dict[str, Any]:
        logprobs = None if found is None else self.logprobs(found)
        return {"index": index, **content, "logprobs": logprobs, "finish_reason": reason}

    def _head(self, kind: str) -> dict[str, Any]:
        name = f"{self.prefix}-{self.request_id}"
        return {"id": name, "object": kind, "created": self.created, "model": self.model}


class ChatForm(Form):
    """Of `/v1/chat/completions`. What a model thinks aloud is `reasoning_content`, which OpenAI does not have."""

    prefix = "chatcmpl"
    kinds = "chat.completion", "chat.completion.chunk"

    def opening(self, num_choices: int) -> str:
        """See `Form`."""
        delta = {"delta": {"role": "assistant", "content": ""}}
        return "".join(self.chunk([self._choice(index, delta, None, None)]) for index in range(num_choices))

    def content(self, texts: Sequence[str | ToolCall]) -> dict[str, Any]:
        """See `Form`."""
        thoughts = "".join(text for text in texts if isinstance(text, ReasoningText))
        content = "".join(text for text in texts if isinstance(text, str) and not isinstance(text, ReasoningText))
        calls = [each.to_dict() for each in texts if isinstance(each, ToolCall)]
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if thoughts or calls:  # the lines between the parts belong to none
            message["content"] = content.strip()
        if thoughts:
            message["reasoning_content"] = thoughts.strip()
        if calls:
            message |= {"content": message["content"] or None, "tool_calls": calls}
        return {"message": message}

    def delta(self, text: str | ToolCall) -> dict[str, Any]:
        """See `Form`."""
        if isinstance(text, ToolCall):
            return {"delta": {"tool_calls": [{"index": text.index, **text.to_dict()}]}}
        name = "reasoning_content" if isinstance(text, ReasoningText) else "content"
        return {"delta": {name: text} if text else {}}

    def logprobs(self, found: Sequence[Logprob]) -> dict[str, Any]:
        """See `Form`."""
        return {"content": token_logprobs(found), "refusal": None}


class CompletionForm(Form):
    """Of `/v1/completions`."""

    prefix = "cmpl"
    kinds = "text_completion", "text_completion"

    def content(self, texts: Sequence[str | ToolCall]) -> dict[str, Any]:
        """See `Form`."""
        return {"text": "".join(map(str, texts))}

    def delta(self, text: str | ToolCall) -> dict[str, Any]:
        """See `Form`."""
        return {"text": text}

    def logprobs(self, found: Sequence[Logprob]) -> dict[str, Any]:
        """See `Form`. Tokens that look alike count as one."""
        return {
            "tokens": [each.text for each in found],
            "token_logprobs": [_finite(each.logprob) for each in found],
            "top_logprobs": [
                None
                if each.logprob is None
                else {text: _finite(value) for text, value in [*each.top[::-1], (each.text, each.logprob)]}
                for each in found
            ],
            "text_offset": [each.begin for each in found],
        }


def token_logprobs(found: Sequence[Logprob]) -> list[dict[str, Any]]:
    """Logarithms of probabilities, as chats spell them."""
    return [
        {**_token(each.text, each.logprob), "top_logprobs": [_token(*other) for other in each.top]} for each in found
    ]


def _token(text: str, logprob: float | None) -> dict[str, Any]:
    """A token of a chat. One that is no whole character has no text of its own, and its bytes are not known."""
    is_whole = "\N{REPLACEMENT CHARACTER}" not in text
    return {"token": text, "logprob": _finite(logprob), "bytes": list(text.encode()) if is_whole else None}


def _finite(logprob: float | None) -> float | None:
    """JSON has no infinity. OpenAI's API writes -9999 for it."""
    return None if logprob is None else max(logprob, LEAST_LOGPROB)


def event(data: Any) -> str:
    """A server-sent event."""
    return f"data: {json.dumps(data, ensure_ascii=False, separators=(',', ':'))}\n\n"


END = "data: [DONE]\n\n"


def error_body(status: int, message: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """An error as OpenAI's API spells it."""
    kind = "invalid_request_error" if status < 500 and status != 429 else "server_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
