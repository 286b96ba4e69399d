"""`Reader`: tells the thoughts, the text and the calls of an answer apart, while it comes.

transformers' parser does the work, by a description of the model's responses. It says what a region has become when the
region ends; what was meant as a call and is none stays text here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transformers.cli.serving.utils import ReasoningText
from transformers.utils.chat_parsing import ResponseParser
from transformers.utils.chat_template_utils import _REASONING_FIELDS

from .tools import ToolCall, Tools, calls_of

CALLS = "tool_calls"


class Reader:
    """Reads one answer.

    Args:
        template: transformers' description of responses.
        prefix: The prompt as text; empty if the answer begins with nothing of it.
        tools: What may be called, if anything.

    Attributes:
        num_calls: Calls so far.
        thoughts_end: What ends the thoughts with which the prompt has begun the answer; `None` if it has not.
    """

    def __init__(self, template: Mapping[str, Any], prefix: str, tools: Tools | None = None) -> None:
        given: Any = None if tools is None else tools.given
        self._fields = template["fields"]
        self._parser = ResponseParser(dict(template), prefix=prefix, tools=given)
        self._is_parallel = tools is None or tools.is_parallel
        self._body = ""  # of the call that is being written
        self.num_calls = 0
        opened = None
        for each in self._parser.initial_events:
            opened = {"region_open": each["field"], "region_close": None}.get(each["type"], opened)
        close = self._fields[opened].get("close") if opened in _REASONING_FIELDS else None
        self.thoughts_end: str | None = close[0] if isinstance(close, list) else close

    @property
    def is_over(self) -> bool:
        """Whether the answer has all calls that it may have."""
        return self.num_calls > 0 and not self._is_parallel

    def feed(self, text: str) -> list[str | ToolCall]:
        """What is new in an answer that goes on with a text."""
        return self._said(self._parser.feed(text))

    def finish(self) -> list[str | ToolCall]:
        """What is new now that the answer has ended."""
        try:
            return self._said(self._parser.finalize()[1])
        except (ValueError, RuntimeError):
            return []  # it ends within a structured part

    def _said(self, events: Sequence[Mapping[str, Any]]) -> list[str | ToolCall]:
        found: list[str | ToolCall] = []
        for event in events:
            kind, field = event["type"], event["field"]
            if self.is_over:
                break
            if field == CALLS:
                found += self._called(kind, event)
            elif kind == "region_chunk" and not event["dirty"] and event["text"]:
                if field in _REASONING_FIELDS:
                    found.append(ReasoningText(event["text"]))
                elif field == "content":
                    found.append(event["text"])
        return found

    def _called(self, kind: str, event: Mapping[str, Any]) -> list[str | ToolCall]:
        if kind == "region_open":
            self._body = ""
        elif kind == "region_chunk":
            self._body += event["text"]
        else:
            calls = calls_of(event["value"], self.num_calls)
            if calls is None:
                around = [self._fields[CALLS].get(name, "") for name in ("open", "close")]
                opening, closing = (each if isinstance(each, str) else "" for each in around)
                return [f"{opening}{self._body}{closing}"]
            calls = calls if self._is_parallel else calls[:1]
            self.num_calls += len(calls)
            return [*calls]
        return []
