"""`Reader`: tells the thoughts, the text and the calls of an answer apart, while it comes.

transformers' parser does the work, by a description of the model's responses. It says what a region has become when the
region ends; what was meant as a call and is none stays text here.
"""

from __future__ import annotations

import re
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
        skips_special: Whether it is to get no special tokens.
    """

    def __init__(
        self, template: Mapping[str, Any], prefix: str, tools: Tools | None = None, *, skips_special: bool = False
    ) -> None:
        given: Any = None if tools is None else tools.given
        self._fields = template["fields"]
        self._parser = ResponseParser(dict(template), prefix=prefix, tools=given)
        self._is_parallel = tools is None or tools.is_parallel
        self._written, self._at = "", 0  # the whole answer, and the end of what has been read of it
        self._body = ""  # of the call that is being written
        self.num_calls, self.skips_special = 0, skips_special
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
        self._written += text
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
                continue
            if kind == "region_chunk" and event["text"]:
                self._at = max(self._at, self._written.find(event["text"], self._at) + len(event["text"]))
                if event["dirty"]:
                    continue
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
            calls, text = calls_of(event["value"], self.num_calls), self._text_of_call()
            if calls is None:
                return [text] if text else []
            calls = calls if self._is_parallel else calls[:1]
            self.num_calls += len(calls)
            return [*calls]
        return []

    def _text_of_call(self) -> str:
        """The call that has just ended as it was written, what opens and closes it included. Moves past it.

        The parser tells the text between only. What ends an answer is no part of it.
        """
        opening = pattern_of(self._fields[CALLS], "open").search(self._written, self._at)
        begin = self._at if opening is None else opening.start()
        end = self._written.find(self._body, begin if opening is None else opening.end()) + len(self._body)
        closing = pattern_of(self._fields[CALLS], "close").match(self._written, end)
        self._at = end if closing is None else closing.end()
        text = self._written[begin : self._at]
        over = pattern_of(self._fields.get("content", {}), "close").search(text)
        return text if over is None else text[: over.start()]


def pattern_of(field: Mapping[str, Any], name: str) -> re.Pattern[str]:
    """What opens or closes the regions of a field of transformers' description, or what comes before an answer.

    Nothing matches if it says nothing.
    """
    given = field.get(name) or []
    texts = [given] if isinstance(given, str) else given
    return re.compile(field.get(f"{name}_pattern") or "|".join(map(re.escape, texts)) or r"(?!)", re.DOTALL)
