"""`ResponseForm`: the form of answers of `/v1/responses`, in one piece and as events.

An answer is a list of items: thoughts, a text, calls. Both forms come from the same events, so they say the same.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from transformers.cli.serving.utils import ReasoningText

from .forms import Form, Usage, token_logprobs
from .pieces import Logprob, Piece
from .tools import ToolCall

_DONE = {"completed": "response.completed", "incomplete": "response.incomplete", "failed": "response.failed"}
# Of a request, as its answer repeats them, and what they are if it leaves them out.
_REPEATED: dict[str, Any] = {
    "instructions": None,
    "max_output_tokens": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "temperature": None,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_logprobs": 0,
    "top_p": None,
}


@dataclasses.dataclass
class _State:
    """What has been told so far.

    Attributes:
        items: Of the answer.
        opened: The type of the last item, if it goes on.
        number: Of the next event.
        reason: Why the answer has ended.
        logprobs: Of the piece that is being told, until they are part of a text.
    """

    items: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    opened: str | None = None
    number: int = 0
    reason: str | None = None
    logprobs: list[dict[str, Any]] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class ResponseForm(Form):
    """Of one answer.

    Attributes:
        asked: The body of the request.
        state: Of the answer.
    """

    asked: dict[str, Any] = dataclasses.field(default_factory=dict)
    state: _State = dataclasses.field(default_factory=_State)

    def opening(self, num_choices: int) -> str:
        """See `Form`."""
        begun = self._response("in_progress")
        return self._event("response.created", response=begun) + self._event("response.in_progress", response=begun)

    def chunks(self, piece: Piece, usage: Usage | None = None) -> str:
        """See `Form`."""
        if piece.steps:
            return "".join(map(self.chunks, piece.steps))
        self.state.logprobs = _logprobs(piece.logprobs or ())
        told = "".join(map(self._told, piece.texts))
        if piece.reason is not None:
            self.state.reason = piece.reason
            if not self.state.items:  # an answer has a text, be it an empty one
                told += self._open("message")
        if self.state.opened == "message":  # the token that ends it has no text
            self._take_logprobs()
        return told if piece.reason is None else told + self._close()

    def gather(self, whole: Piece, piece: Piece) -> None:
        """See `Form`. Items are kept here, since together pieces do not say of which texts their tokens are."""
        self.chunks(piece)

    def choice(self, piece: Piece) -> dict[str, Any]:
        """See `Form`."""
        return {}

    def whole(self, choices: list[dict[str, Any]], usage: Usage) -> dict[str, Any]:
        """See `Form`."""
        return self._response(self._status(), usage)

    def closing(self, usage: Usage | None) -> str:
        """See `Form`."""
        return self._event(_DONE[self._status()], response=self._response(self._status(), usage))

    def failure(self, status: int, message: str) -> str:
        """See `Form`."""
        error = {"code": "server_error", "message": message}
        told = self._event("error", **error, param=None)
        return told + self._event("response.failed", response={**self._response("failed"), "error": error})

    def _status(self) -> str:
        return "incomplete" if self.state.reason == "length" else "completed"

    def _response(self, status: str, usage: Usage | None = None) -> dict[str, Any]:
        given = {name: value for name, value in self.asked.items() if value is not None}
        repeated = {name: given.get(name, default) for name, default in _REPEATED.items()}
        return {
            "id": f"resp_{self.request_id}",
            "object": "response",
            "created_at": self.created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "model": self.model,
            "output": [*self.state.items],
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None, **(given.get("reasoning") or {})},
            "store": False,
            "truncation": "disabled",
            "usage": None if usage is None else _usage(usage),
            **repeated,
        }

    def _told(self, text: str | ToolCall) -> str:
        """Events of what is new."""
        if isinstance(text, ToolCall):
            return self._close() + self._call(text)
        kind = "reasoning" if isinstance(text, ReasoningText) else "message"
        told = ""
        if self.state.opened != kind:
            if self.state.items or kind == "reasoning":  # lines around and between the parts belong to none
                text = text.lstrip()
            if not text:
                return ""
            if self.state.items:
                self._drop_logprobs_before(text)
            told = self._close() + self._open(kind)
        self.state.items[-1]["content"][0]["text"] += text
        more: dict[str, Any] = {} if kind == "reasoning" else {"logprobs": self._take_logprobs()}
        return told + self._of_text(kind, "delta", delta=str(text), **more)

    def _drop_logprobs_before(self, text: str) -> None:
        """Leave out tokens that come before a text, such as those that end the thoughts."""
        logprobs, length = self.state.logprobs, 0
        for number in reversed(range(len(logprobs))):
            length += len(logprobs[number]["token"])
            if length >= len(text):
                self.state.logprobs = logprobs[number:]
                break

    def _take_logprobs(self) -> list[dict[str, Any]]:
        """Make the logarithms of probabilities that are left part of the text that goes on."""
        taken, self.state.logprobs = self.state.logprobs, []
        self.state.items[-1]["content"][0]["logprobs"] += taken
        return taken

    def _open(self, kind: str) -> str:
        prefix: str = "msg"
        more: dict[str, Any] = {"role": "assistant"}
        if kind == "reasoning":
            prefix, more = "rs", {"summary": []}
        number = len(self.state.items)
        name = f"{prefix}_{self.request_id}_{number}"
        item = {"id": name, "type": kind, "status": "in_progress", **more, "content": []}
        self.state.opened = kind
        added = self._event("response.output_item.added", output_index=number, item=item)
        self.state.items.append({**item, "content": [_part(kind, "")]})
        return added + self._of_part("added", _part(kind, ""))

    def _close(self) -> str:
        """End the item that goes on, if there is one."""
        kind, self.state.opened = self.state.opened, None
        if kind is None:
            return ""
        item = self.state.items[-1]
        item["status"] = self._status()
        text = item["content"][0]["text"]
        more: dict[str, Any] = {} if kind == "reasoning" else {"logprobs": item["content"][0]["logprobs"]}
        told = self._of_text(kind, "done", text=text, **more) + self._of_part("done", item["content"][0])
        return told + self._event("response.output_item.done", output_index=len(self.state.items) - 1, item=item)

    def _call(self, call: ToolCall) -> str:
        number = len(self.state.items)
        item = {
            "id": f"fc_{self.request_id}_{number}",
            "type": "function_call",
            "status": "completed",
            "call_id": call.call_id,
            "name": call.name,
            "arguments": call.arguments,
        }
        self.state.items.append(item)
        where = {"item_id": item["id"], "output_index": number}
        arguments = "response.function_call_arguments"
        return "".join(
            (
                self._event(
                    "response.output_item.added",
                    output_index=number,
                    item={**item, "status": "in_progress", "arguments": ""},
                ),
                self._event(f"{arguments}.delta", **where, delta=call.arguments),
                self._event(f"{arguments}.done", **where, name=call.name, arguments=call.arguments),
                self._event("response.output_item.done", output_index=number, item=item),
            )
        )

    def _of_text(self, kind: str, what: str, **more: Any) -> str:
        name = "reasoning_text" if kind == "reasoning" else "output_text"
        return self._event(f"response.{name}.{what}", **self._place(), **more)

    def _of_part(self, what: str, part: dict[str, Any]) -> str:
        return self._event(f"response.content_part.{what}", **self._place(), part=part)

    def _place(self) -> dict[str, Any]:
        number = len(self.state.items) - 1
        return {"item_id": self.state.items[number]["id"], "output_index": number, "content_index": 0}

    def _event(self, kind: str, **data: Any) -> str:
        """A server-sent event with its name."""
        number, self.state.number = self.state.number, self.state.number + 1
        body = json.dumps({"type": kind, "sequence_number": number, **data}, ensure_ascii=False, separators=(",", ":"))
        return f"event: {kind}\ndata: {body}\n\n"


def _part(kind: str, text: str) -> dict[str, Any]:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _logprobs(found: Sequence[Logprob]) -> list[dict[str, Any]]:
    """As in chats. But this route has no place for bytes that are not known."""
    return [
        {**each, "bytes": each["bytes"] or [], "top_logprobs": [{**top, "bytes": top["bytes"] or []} for top in tops]}
        for each in token_logprobs(found)
        for tops in [each["top_logprobs"]]
    ]


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.num_prompt,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": usage.num_new,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.num_prompt + usage.num_new,
    }
