"""`/v1/responses`: its fields, and the chat that a request asks for.

transformers' server has this route without memory: nothing is stored, so a client sends the whole conversation. A
request becomes the body of a chat and is answered as one. `FIELDS` decides what is served, like `fields.FIELDS` for the
other routes.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

from ..common.errors import RefusedRequest
from . import fields as chat
from .fields import CHAT, Field, first_wrong, note, without_effect
from .structured import is_format, shown
from .tools import is_choice, is_tool, is_tools, wrong_tools

ROUTE = "/v1/responses"
_PARTS = ("input_text", "output_text", "text")
_LOGPROBS = "message.output_text.logprobs"
# Thoughts come as they are, and nothing else is needed to go on with them.
_INCLUDED = (_LOGPROBS, "reasoning.encrypted_content")
# Keys of items that say nothing to a model.
_NOTES = {"id", "status", "phase", "type"}


def _is_input(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, list) and bool(value) and all(map(_is_item, value)))


def _is_item(item: Any) -> bool:
    if not isinstance(item, dict):
        return False
    kind, more = item.get("type", "message"), {name for name, each in item.items() if each is not None} - _NOTES
    if kind in _PARTS:  # a part of the only message
        return _is_part(item)
    if kind == "message":
        return more == {"role", "content"} and isinstance(item["role"], str) and _is_content(item["content"])
    if kind == "item_reference":
        return more <= {"id"}
    if kind == "reasoning":
        return more <= {"summary", "content", "encrypted_content"} and _is_thoughts(item)
    if kind == "function_call":
        texts = (item.get(name) for name in ("call_id", "name", "arguments"))
        return more == {"call_id", "name", "arguments"} and all(isinstance(text, str) for text in texts)
    if kind == "function_call_output":
        return more == {"call_id", "output"} and isinstance(item["call_id"], str) and _is_content(item["output"])
    return False


def _wrong_input(value: str | list[dict[str, Any]]) -> str | None:
    """What an `input` of the right form must have besides: nothing is stored, so nothing can be referred to."""
    items = [] if isinstance(value, str) else value
    reference = next((item for item in items if item.get("type") == "item_reference"), None)
    if reference is None:
        return None
    told = f"have items as they are, since none are stored, got {shown(reference)}"
    return f"{told}. Many clients send them if `store` is false"


def _is_content(content: Any) -> bool:
    return isinstance(content, str) or (isinstance(content, list) and all(map(_is_part, content)))


def _is_part(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") in _PARTS and isinstance(part.get("text"), str)


def _is_thoughts(item: dict[str, Any]) -> bool:
    parts = item.get("content") or []
    is_right = isinstance(parts, list) and all(isinstance(part, dict) for part in parts)
    return is_right and all(isinstance(part.get("text"), str) for part in parts) and not item.get("encrypted_content")


def _is_text(value: Any) -> bool:
    if not isinstance(value, dict) or not value.keys() <= {"format", "verbosity"} or value.get("verbosity"):
        return False
    return value.get("format") is None or (isinstance(value["format"], dict) and is_format(_format(value["format"])))


def _is_tool(value: Any) -> bool:
    return isinstance(value, dict) and is_tool(_tool(value))


def _is_tools(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_tool, value)) and is_tools(_tools(value))


def _is_included(value: Any) -> bool:
    return isinstance(value, list) and all(each in _INCLUDED for each in value)


def _is_reasoning(value: Any) -> bool:
    if not isinstance(value, dict) or value.get("effort") not in (None, *chat.EFFORTS):
        return False
    known = ("effort", "summary", "generate_summary")
    return all(name in known or each is None for name, each in value.items())


def _is_choice(value: Any) -> bool:
    return is_choice(_choice(value))


def _format(given: dict[str, Any]) -> dict[str, Any]:
    """A `response_format` of chats."""
    if given.get("type") != "json_schema":
        return given
    return {"type": "json_schema", "json_schema": {name: each for name, each in given.items() if name != "type"}}


def _tools(given: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """`tools` of chats. In this route, no `function` wraps what says which tool it is."""
    return [_tool(each) for each in given]


def _tool(given: dict[str, Any]) -> dict[str, Any]:
    function = {name: value for name, value in given.items() if name != "type" and value is not None}
    return {"type": given.get("type"), "function": function}


def _choice(given: Any) -> Any:
    """A `tool_choice` of chats."""
    if not isinstance(given, dict):
        return given
    return {"type": given.get("type"), "function": {name: each for name, each in given.items() if name != "type"}}


_AS_IN_CHATS = (*chat.SETTINGS, "ignore_eos", "chat_template_kwargs")
FIELDS: dict[str, Field] = {
    "input": Field(
        "a text, or a list of messages of texts, calls and their outputs",
        _is_input,
        why_not=_wrong_input,
        culprit=first_wrong(_is_item),
    ),
    "instructions": Field("a text", lambda value: isinstance(value, str)),
    "model": chat.FIELDS["model"],
    "max_output_tokens": chat.FIELDS["max_tokens"],
    "stream": chat.FIELDS["stream"],
    "stream_options": Field(
        "an object with `include_obfuscation`",
        lambda value: isinstance(value, dict) and value.keys() <= {"include_obfuscation"},
        is_served=False,
    ),
    "text": Field('an object with a `format` of the `type` "text", "json_object" or "json_schema"', _is_text),
    "tools": Field(
        'a list of up to 128 functions, each with the `type` "function"', _is_tools, culprit=first_wrong(_is_tool)
    ),
    "tool_choice": Field('"none", "auto", "required", or an object that names a function of `tools`', _is_choice),
    "parallel_tool_calls": chat.FIELDS["parallel_tool_calls"],
    "reasoning": Field("an object with `effort` and `summary`", _is_reasoning),
    "include": Field(f"a list of {' and '.join(json.dumps(each) for each in _INCLUDED)}", _is_included),
    "top_logprobs": chat.FIELDS["top_logprobs"],
    **{name: chat.FIELDS[name] for name in _AS_IN_CHATS},
    # OpenAI's fields for which there is nothing here.
    "access_programs": without_effect(),
    "background": without_effect(False),
    "background_options": without_effect(),
    "context_management": without_effect([]),
    "conversation": without_effect(),
    "image": without_effect(),
    "max_tool_calls": without_effect(),
    "moderation": without_effect(),
    "previous_response_id": Field("left out in favour of all items in `input`", lambda value: False, is_served=False),
    "prompt": without_effect(),
    "service_tier": without_effect("auto", "default"),
    "store": without_effect(False),
    "truncation": without_effect("disabled"),
    # Notes of the client's.
    **dict.fromkeys(
        (
            *("client_metadata", "metadata", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"),
            *("safety_identifier", "user"),
        ),
        note(),
    ),
}


def chat_of(body: dict[str, Any]) -> dict[str, Any]:
    """The body of the chat that a request asks for.

    Raises:
        RefusedRequest: A field is not known or not served, or its value is wrong.
    """
    given = chat.checked(body, FIELDS, ROUTE)
    if "input" not in given:
        raise chat.wrong("input", None, FIELDS["input"])
    why_not = wrong_tools(_tools(given.get("tools", [])))
    if why_not is not None:
        raise RefusedRequest(f"`tools` must {why_not}.", param="tools")
    found = {name: given[name] for name in ("model", "stream", "parallel_tool_calls", *_AS_IN_CHATS) if name in given}
    if _LOGPROBS in given.get("include", []):
        found |= {"logprobs": True, "top_logprobs": given.get("top_logprobs", 0)}
    elif given.get("top_logprobs"):
        message = f"`top_logprobs` must come with {_LOGPROBS!r} in `include`, got it alone. Leave it out."
        raise RefusedRequest(message, param="top_logprobs")
    found["messages"] = _messages(given["input"], given.get("instructions"))
    if "max_output_tokens" in given:
        found["max_tokens"] = given["max_output_tokens"]
    if given.get("stream"):
        found["stream_options"] = {"include_usage": True}
    if (given.get("text") or {}).get("format"):
        found["response_format"] = _format(given["text"]["format"])
    if (given.get("reasoning") or {}).get("effort"):
        found["reasoning_effort"] = given["reasoning"]["effort"]
    if "tools" in given:
        found["tools"] = _tools(given["tools"])
    if "tool_choice" in given:
        found["tool_choice"] = _choice(given["tool_choice"])
    return found


@contextlib.contextmanager
def by_its_names() -> Iterator[None]:
    """Let refusals of a chat in a `with` block name fields as this route does."""
    names = {
        "messages": "input",
        "max_tokens": "max_output_tokens",
        "reasoning_effort": "reasoning",
        "response_format": "text",
    }
    try:
        yield
    except RefusedRequest as error:
        message = error.message.replace(CHAT, ROUTE)
        for theirs, ours in names.items():
            message = message.replace(f"`{theirs}`", f"`{ours}`")
        param = names.get(error.param or "", error.param)
        raise RefusedRequest(message, status=error.status, param=param, code=error.code) from error


def _messages(given: str | list[dict[str, Any]], instructions: str | None) -> list[dict[str, Any]]:
    """Messages of a chat: calls are parts of the message before them, and so are thoughts of the one after them."""
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    elif "role" not in given[0] and given[0].get("type") in _PARTS:
        if not all(each.get("type") in _PARTS for each in given):
            raise RefusedRequest(
                f"`input` must have messages or parts of one, got both: {shown(given)}.", param="input"
            )
        given = [{"role": "user", "content": given}]
    messages: list[dict[str, Any]] = []
    thoughts = ""
    for item in given:
        kind = item.get("type", "message")
        if kind in _PARTS:
            raise RefusedRequest(
                f"`input` must have messages or parts of one, got both: {shown(given)}.", param="input"
            )
        if kind == "reasoning":
            thoughts += "".join(part["text"] for part in item.get("content") or [])
            continue
        if thoughts and (kind == "function_call_output" or item.get("role", "assistant") != "assistant"):
            # Of an answer that ended in them, and not of the next one.
            messages.append({"role": "assistant", "content": "", "reasoning_content": thoughts})
            thoughts = ""
        if kind == "function_call_output":
            messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": _content(item["output"])})
        elif kind == "message":
            messages.append({"role": item["role"], "content": _content(item["content"])})
        else:
            if not messages or messages[-1]["role"] != "assistant" or thoughts:
                messages.append({"role": "assistant", "content": ""})
            function = {"name": item["name"], "arguments": item["arguments"]}
            calls = messages[-1].setdefault("tool_calls", [])
            calls.append({"id": item["call_id"], "type": "function", "function": function})
        if thoughts and messages[-1]["role"] == "assistant":
            messages[-1]["reasoning_content"], thoughts = thoughts, ""
    if not messages:
        raise RefusedRequest("`input` must have a message, got none. Write some text.", param="input")
    if instructions:
        messages.insert(0, {"role": "system", "content": instructions})
    return _with_one_system(messages)


def _with_one_system(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages whose instructions at the beginning are one: many templates take no more."""
    is_told = [message["role"] in ("system", "developer") for message in messages]
    num_first = (*is_told, False).index(False)
    if num_first < 2:
        return messages
    content = "\n\n".join(message["content"] for message in messages[:num_first])
    return [{**messages[num_first - 1], "content": content}, *messages[num_first:]]


def _content(content: str | list[dict[str, Any]]) -> str:
    return content if isinstance(content, str) else " ".join(part["text"] for part in content)
