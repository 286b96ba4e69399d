"""`Chats`: the prompts of chats, how their answers are read, and what these must match."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedModel
from transformers.cli.serving.utils import get_response_template
from transformers.utils.chat_template_utils import _REASONING_FIELDS

from ..batching.grammars import Grammars, check_installed
from ..common.errors import BadGrammar, NoGrammars, RefusedRequest
from .fields import Parameters
from .reading import CALLS, Reader, pattern_of
from .structured import grammar_of, written
from .tools import ToolFormat, Tools, for_template, format_of

_PROBE: dict[str, Any] = {
    "type": "function",
    "function": {"name": "get_time", "description": "Time", "parameters": {"type": "object", "properties": {}}},
}
# Thoughts that begin an answer, whatever is known of the model. A chat template may have opened them: the most tokens
# that this takes, and what a reader finds then.
_THINK, _THINK_END = "<think>", "</think>"
_THOUGHTS: dict[str, Any] = {"open_pattern": rf"\A\s*{_THINK}", "close": _THINK_END, "content": "text"}
_MOST_OPENING, _OPENED = 16, f"{_THINK}\n"


class Chats:
    """What is known of the chats of one model.

    Args:
        model: Whose type says how it responds, if its tokenizer does not.
        tokenizer: Of the model.
        grammars: Of the model.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: Any, grammars: Grammars) -> None:
        self._model, self._tokenizer, self._grammars = model, tokenizer, grammars

    def tokens_of(self, body: Mapping[str, Any], tools: Tools | None) -> list[int]:
        """The prompt of a chat.

        Args:
            body: Of a request, checked.
            tools: What it says about tools.

        Raises:
            RefusedRequest: There is no template, or it does not take the messages or tools.
        """
        messages = body["messages"]
        if self._tokenizer.chat_template is None:
            message = "`messages` must come with a chat template, and the model's tokenizer has none. Use `prompt`."
            raise RefusedRequest(message, param="messages")
        if tools is not None:
            self._check_tools()
        elif any(message.get("tool_calls") for message in messages) and not self._takes_tools:
            raise RefusedRequest(
                "`messages` must have no `tool_calls`, since the model's chat template has no place for tools.",
                param="messages",
            )
        given = None if tools is None else tools.given
        try:
            template = str(self._tokenizer.get_chat_template(tools=given))
            text = self._tokenizer.apply_chat_template(
                for_template(messages, template),
                tools=given,
                add_generation_prompt=True,
                tokenize=False,
                **_variables(body, template),
            )
            text.encode()
        except RefusedRequest:
            raise
        except UnicodeEncodeError as error:  # half of a surrogate pair, which JSON can spell
            raise RefusedRequest(f"`messages` must be Unicode text, got {error.reason}.", param="messages") from error
        except Exception as error:  # a template is a program
            told = str(error).rstrip(".") or type(error).__name__
            raise RefusedRequest(
                f"`messages` must fit the model's chat template, got: {told}.", param="messages"
            ) from error
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def reader(self, prompt: list[int], tools: Tools | None) -> Reader | None:
        """What reads an answer; `None` if it is plain text. Without tools, what looks like a call stays text."""
        own = get_response_template(self._tokenizer, self._model)
        fields: dict[str, Any] = {"content": {"content": "text"}}
        template: dict[str, Any] = {"start_anchor_pattern": r"\A"}
        prefix = ""
        if own is not None:
            fields = {name: field for name, field in own["fields"].items() if name != CALLS}
        if self._begins_thoughts(prompt):
            prefix = _OPENED
            if all(field.get("open") != _THINK for field in fields.values()):
                fields["reasoning_content"] = _THOUGHTS
        elif own is not None:
            text = self._tokenizer.decode(prompt)
            if pattern_of(own, "start_anchor").search(text):  # without it, the parser would read what users wrote
                template, prefix = {**own}, text
        elif self._may_think:
            fields["reasoning_content"] = _THOUGHTS
        if len(fields) == 1 and own is None and tools is None:
            return None
        template["fields"] = {
            name: self._ended(field) if name in {"content", *_REASONING_FIELDS} else field
            for name, field in fields.items()
        }
        if tools is not None:
            template["fields"] = {CALLS: self._calls_field(), **template["fields"]}
        # Calls, and what a type or tokenizer describes, may have special tokens around them.
        is_plain = own is None and tools is None
        return Reader(template, prefix, tools, skips_special=is_plain and not self._are_tags_special)

    def grammar(self, asked: Parameters, reader: Reader | None) -> str | None:
        """What an answer must match, compiled; `None` for nothing. Takes its time.

        Args:
            asked: Checked.
            reader: Of the answer.

        Raises:
            RefusedRequest: It cannot be compiled, or llguidance is missing.
        """
        tools, given = asked.tools, asked.structure_name
        if tools is not None and tools.must_call:
            given = "tool_choice"
        elif given is None and tools is not None and tools.is_strict:
            given = "tools"
        if given is None:
            return None
        try:
            check_installed()
            end = None if reader is None or reader.thoughts_end is None else self._grammars.spelled(reader.thoughts_end)
            if given in asked.structure:
                found = grammar_of(asked.structure.get("response_format"), asked.structure.get("structured_outputs"))
                grammars = [found or {}]
                if given == "response_format" and tools is not None:
                    grammars = self._grammars_of_both(found or {}, tools)
            else:
                assert tools is not None
                grammars = self._grammars_of(tools, given)
            grammar = written(*grammars, thoughts_end=end)
            self._grammars.compile(grammar)
        except (BadGrammar, UnicodeEncodeError) as error:
            message = f"`{given}` must be a grammar that can be compiled, got one that cannot: {error}."
            raise RefusedRequest(message, param=given) from error
        except NoGrammars as error:
            raise RefusedRequest(f"`{given}` {error}.", param=given) from error
        return grammar

    @functools.cached_property
    def _template(self) -> str:
        """The chat template for tools."""
        return str(self._tokenizer.get_chat_template(tools=[_PROBE]))

    @functools.cached_property
    def _format(self) -> ToolFormat | None:
        return format_of(self._template)

    @functools.cached_property
    def _takes_tools(self) -> bool:
        """Whether the chat template writes tools into the prompt."""
        from jinja2 import TemplateError  # optional, and transformers says so if it is missing

        try:
            prompts = [
                self._tokenizer.apply_chat_template(
                    [{"role": "user", "content": "Hello"}], tools=tools, tokenize=False, add_generation_prompt=True
                )
                for tools in (None, [_PROBE])
            ]
        except (TemplateError, ValueError):  # it takes no such chat, or there is none
            return False
        return bool(prompts[0] != prompts[1])

    def _begins_thoughts(self, prompt: list[int]) -> bool:
        """Whether a prompt ends with what opens thoughts, and the chat template has it: users may write that, too."""
        end = self._tokenizer.decode(prompt[-_MOST_OPENING:]).rstrip()
        return self._may_think and end.endswith(_THINK)

    @property
    def _may_think(self) -> bool:
        return _THINK in str(self._tokenizer.chat_template)

    @property
    def _are_tags_special(self) -> bool:
        return not {_THINK, _THINK_END}.isdisjoint(self._tokenizer.all_special_tokens)

    def _check_tools(self) -> None:
        if not self._takes_tools:
            message = "`tools` must be left out, since the model's chat template has no place for them."
            raise RefusedRequest(message, param="tools")
        self._calls_field()

    def _calls_field(self) -> Mapping[str, Any]:
        """How calls are read: as the tokenizer says, else as the chat template shows, else by the model's type."""
        own: Any = getattr(self._tokenizer, "response_template", None) or {}
        of_type: Any = get_response_template(self._tokenizer, self._model) or {}
        shown = None if self._format is None else self._format.field
        field = own.get("fields", {}).get(CALLS) or shown or of_type.get("fields", {}).get(CALLS)
        if field is None:
            message = (
                "`tools` must be left out, since the model's chat template asks for calls in a form that is not known."
            )
            raise RefusedRequest(message, param="tools")
        found: Mapping[str, Any] = field
        return found

    def _ended(self, field: Mapping[str, Any]) -> dict[str, Any]:
        """The description of a text that the tokens close, too, which end an answer of this model.

        transformers describes answers by the model's type, and a fine-tune may end them by another token. Thoughts that
        never close end with the answer.
        """
        ends = [self._tokenizer.decode([token]) for token in self._grammars.end_tokens]
        if (pattern := field.get("close_pattern")) is not None:
            return {**field, "close_pattern": "|".join((pattern, *map(re.escape, ends)))}
        given = field.get("close") or []
        closes = [given] if isinstance(given, str) else list(given)
        closes += [end for end in ends if end not in closes]
        return {**field, "close": closes} if closes else {**field}

    def _grammars_of(self, tools: Tools, given: str) -> list[dict[str, Any]]:
        """Of an answer that calls, or that calls or says something."""
        if self._format is None or self._format.calls is None:
            raise NoGrammars("needs a grammar of the model's calls, and for those of this model there is none")
        if tools.must_call:
            return tools.grammars(self._format, self._grammars.spelled)
        found = tools.grammars_of_choice(self._format, self._grammars.spelled, self._thoughts())
        if found is None:
            raise NoGrammars(
                "needs a token with which calls begin if a function is `strict` and none has to be called, and the "
                "model has none. Leave `strict` out"
            )
        return found

    def _grammars_of_both(self, answer: dict[str, Any], tools: Tools) -> list[dict[str, Any]]:
        """Of an answer that is of a format, or calls: a format is of texts, as in OpenAI's API."""
        if self._format is None or self._format.calls is None or self._format.begin is None:
            raise NoGrammars(
                "must come without `tools` that the model may call, since calls of this model may look like such an "
                'answer, or have no grammar. Leave out one of them, or send a `tool_choice` of "none"'
            )
        calls = tools.grammars(self._format, self._grammars.spelled)
        both = {"lark_grammar": "start: @format | @calls"}
        return [both, {**answer, "name": "format"}, {**calls[0], "name": "calls"}, *calls[1:]]

    def _thoughts(self) -> str:
        """The Lark of thoughts that the model may begin with by itself."""
        own: Any = get_response_template(self._tokenizer, self._model) or {}
        for name in _REASONING_FIELDS:
            field = own.get("fields", {}).get(name, {})
            ends = [field.get(each) for each in ("open", "close")]
            if all(isinstance(each, str) for each in ends):
                first, last = map(self._grammars.spelled, ends)
                return f"({first} /(.|\\n)*/ {last})? "
        return ""


def _variables(body: Mapping[str, Any], template: str) -> dict[str, Any]:
    """What a chat template gets besides messages and tools.

    Args:
        body: Of a request, checked.
        template: Its text.

    Raises:
        RefusedRequest: The template does not know of an effort to think.
    """
    given, effort = body.get("chat_template_kwargs") or {}, body.get("reasoning_effort")
    if effort is None:
        return dict(given)
    name, value = ("reasoning_effort", effort) if "reasoning_effort" in template else ("enable_thinking", False)
    if name not in template:
        message = "`reasoning_effort` must be left out, since the model's chat template has no variable for it."
        raise RefusedRequest(message, param="reasoning_effort")
    if name == "enable_thinking" and effort != "none":
        expected = '"none" or left out, since the model\'s chat template can only switch thoughts off'
        raise RefusedRequest(f"`reasoning_effort` must be {expected}, got {effort!r}.", param="reasoning_effort")
    if given.get(name, value) != value:
        both = f"`reasoning_effort` and `{name}` of `chat_template_kwargs`"
        raise RefusedRequest(f"{both} must agree, got two values. Leave one out.", param="reasoning_effort")
    return {**given, name: value}
