"""Tools: what a model may call, the forms in which models write calls, and the grammars of these.

A chat template tells the model how to write a call. `FORMATS` is the one table of the forms that are known, each by a
part of the template's text. A form has transformers' description of a response (`transformers.utils.chat_parsing`),
which reads the calls, and a grammar, which makes the model write one. A tokenizer's own description
(`response_template`) comes first.
"""

from __future__ import annotations

import dataclasses
import json
import re
import secrets
import string
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .structured import schema_grammar

MAX_TOOLS = 128
MAX_CALLS = 32  # of an answer that must call
# Of a message. What else it has is refused, unless it is empty, so that an answer can be sent back as it came.
MESSAGE = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content")
ROLES = ("system", "developer", "user", "assistant", "tool")
_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
# Templates of Mistral's models take no other ids.
_ID_LENGTH, _ID_ALPHABET = 9, string.ascii_letters + string.digits
_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclasses.dataclass(frozen=True)
class ToolCall:
    """A call that a model has written.

    Attributes:
        name: Of the function.
        arguments: A JSON object, as text.
        index: Among the calls of its answer.
        call_id: Of this call.
    """

    name: str
    arguments: str
    index: int
    call_id: str = dataclasses.field(
        default_factory=lambda: "".join(secrets.choice(_ID_ALPHABET) for _ in range(_ID_LENGTH))
    )

    def to_dict(self) -> dict[str, Any]:
        """As OpenAI's API spells it."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.call_id, "type": "function", "function": function}


@dataclasses.dataclass(frozen=True)
class ToolFormat:
    """How a model writes its calls.

    Attributes:
        marks: Texts that a chat template of this form has, all of them.
        field: `tool_calls` of transformers' description of a response.
        calls: The Lark of calls; `None` if there is none. It gets the functions' names, each with the grammar of its
            call, what spells a text in Lark, and the largest number of calls.
        key: What the arguments are called in a call; `None` if a call's grammar is just the grammar of its arguments.
        begin: With what each call begins; `None` if that may begin a text, too.
        rest: The Lark of calls after the `begin` of the first one, for models to which that is no token; `None` if
            there is none. It gets what `calls` gets.
        text: Where `begin` is `None`, the Lark of texts that are no calls; `None` if there is none.
    """

    marks: tuple[str, ...]
    field: Mapping[str, Any]
    calls: Callable[[Mapping[str, str], Callable[[str], str], int], str] | None = None
    key: str | None = "arguments"
    begin: str | None = None
    rest: Callable[[Mapping[str, str], Callable[[str], str], int], str] | None = None
    text: str | None = None


_LINE = r'"\n"'  # in Lark


def _joined(separator: str, most: int) -> str:
    """The Lark of up to `most` calls."""
    return f"call ({separator} call){{0,{most - 1}}}" if most > 1 else "call"


def _tagged(functions: Mapping[str, str], spelled: Callable[[str], str], most: int) -> str:
    return f"{_joined(_LINE, most)}\ncall: {spelled('<tool_call>')} {_tagged_body(functions, spelled)}"


def _tagged_rest(functions: Mapping[str, str], spelled: Callable[[str], str], most: int) -> str:
    body = _tagged_body(functions, spelled)
    if most == 1:
        return body
    return f"body ({_LINE} call){{0,{most - 1}}}\ncall: {spelled('<tool_call>')} body\nbody: {body}"


def _tagged_body(functions: Mapping[str, str], spelled: Callable[[str], str]) -> str:
    return f"{_LINE} ({' | '.join(functions.values())}) {_LINE} {spelled('</tool_call>')}"


def _bare(functions: Mapping[str, str], spelled: Callable[[str], str], most: int) -> str:
    return " | ".join(functions.values())


def _listed(functions: Mapping[str, str], spelled: Callable[[str], str], most: int) -> str:
    calls = _joined('", "', most)
    return f'{spelled("[TOOL_CALLS]")} "[" {calls} "]"\ncall: {" | ".join(functions.values())}'


def _named(functions: Mapping[str, str], spelled: Callable[[str], str], most: int) -> str:
    calls = (f"{spelled(f'[TOOL_CALLS]{name}[ARGS]')} {arguments}" for name, arguments in functions.items())
    return f"call{{1,{most}}}\ncall: {' | '.join(calls)}"


# A region that is no JSON is told by its value: see `calls_of`.
_JSON: dict[str, Any] = {"repeats": True, "content": "json", "content_args": {"allow_non_json": True}}
_CALL = {"type": "function", "function": "{content}"}
_NAMED_CALL = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
FORMATS: dict[str, ToolFormat] = {
    "Qwen 3 Coder": ToolFormat(
        ("<tool_call>", "<function=", "<parameter="),
        {
            "open_pattern": r"\s*<tool_call>\s*<function=(?P<name>[^>\n]+)>",
            "close_pattern": r"</function>\s*</tool_call>",
            "repeats": True,
            "content": "xml-inline",
            "content_args": {"tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>"},
            "transform": _NAMED_CALL,
        },
    ),
    "Hermes": ToolFormat(
        ("<tool_call>",),
        {**_JSON, "open_pattern": r"\s*<tool_call>", "close": "</tool_call>", "transform": _CALL},
        _tagged,
        begin="<tool_call>",
        rest=_tagged_rest,
    ),
    "Mistral with names": ToolFormat(
        ("[TOOL_CALLS]", "[ARGS]"),
        {
            **_JSON,
            "open_pattern": r"\s*\[TOOL_CALLS\](?P<name>[^\[]+)\[ARGS\]",
            "close_pattern": r"(?=\[TOOL_CALLS\])|</s>",
            "transform": _NAMED_CALL,
        },
        _named,
        None,
        "[TOOL_CALLS]",
    ),
    "Mistral": ToolFormat(
        ("[TOOL_CALLS]",),
        {**_JSON, "open_pattern": r"\s*\[TOOL_CALLS\]", "close": "</s>", "transform": _CALL},
        _listed,
        begin="[TOOL_CALLS]",
    ),
    "Llama 3": ToolFormat(
        ('"parameters"', "<|start_header_id|>"),
        {
            **_JSON,
            "open_pattern": r"\A\s*(?:<\|python_tag\|>)?(?=\s*\{)",
            "close": ["<|eom_id|>", "<|eot_id|>"],
            "transform": _CALL,
        },
        _bare,
        "parameters",
        text=r"/[ \n\r\t]*[^{ \n\r\t](.|\n)*/",
    ),
}


def format_of(template: str) -> ToolFormat | None:
    """The form of calls that a chat template asks for; `None` if it is not known."""
    return next((each for each in FORMATS.values() if all(mark in template for mark in each.marks)), None)


@dataclasses.dataclass(frozen=True)
class Tools:
    """What a request says about tools.

    Attributes:
        given: The tools, as the client has sent them.
        functions: Those that may be called, by name.
        must_call: Whether the answer has to be a call.
        is_parallel: Whether it may be several.
    """

    given: list[dict[str, Any]]
    functions: Mapping[str, Mapping[str, Any]]
    must_call: bool
    is_parallel: bool

    @property
    def is_strict(self) -> bool:
        """Whether arguments have to fit the schemas."""
        return any(each.get("strict") for each in self.functions.values())

    def grammars(self, found: ToolFormat, spelled: Callable[[str], str]) -> list[dict[str, Any]]:
        """The grammars of an answer that calls, in the JSON of llguidance.

        Args:
            found: The form of calls, which has a grammar.
            spelled: See `Grammars.spelled`.
        """
        assert found.calls is not None
        return self._grammars(found, found.calls, spelled)

    def grammars_of_choice(
        self, found: ToolFormat, spelled: Callable[[str], str], thoughts: str
    ) -> list[dict[str, Any]] | None:
        """The grammars of an answer that calls or says something; `None` if there are none.

        A token with which calls begin is no text. Where they begin with characters, a text goes on until these come.

        Args:
            found: See `grammars`.
            spelled: Likewise.
            thoughts: The Lark of what may come first.
        """
        begin = None if found.begin is None else spelled(found.begin)
        calls, rules = found.calls, "TEXT? @calls\nTEXT: /(.|\\n)+/"
        if found.begin is None or begin is None:
            rules = f"@calls\nTEXT: {found.text}" if found.text else ""
        elif not begin.startswith("<["):
            calls = found.rest
            text = f"/(.|\\n)+/ & ~/(.|\\n)*{re.escape(found.begin)}(.|\\n)*/"
            rules = f"begun @calls\nbegun[suffix={begin}]: /(.|\\n)*/\nTEXT: {text}"
        if calls is None or not rules:
            return None
        first, *functions = self._grammars(found, calls, spelled)
        choice = f"start: {thoughts}TEXT | {thoughts}{rules}"
        return [{"lark_grammar": choice}, {**first, "name": "calls"}, *functions]

    def _grammars(
        self, found: ToolFormat, lark: Callable[..., str], spelled: Callable[[str], str]
    ) -> list[dict[str, Any]]:
        names = {name: f"function{index}" for index, name in enumerate(self.functions)}
        most = MAX_CALLS if self.is_parallel else 1
        calls = lark({name: f"@{grammar}" for name, grammar in names.items()}, spelled, most)
        schemas = {names[name]: _schema(name, each, found.key) for name, each in self.functions.items()}
        singles = [{"name": name, **schema_grammar(each)} for name, each in schemas.items()]
        return [{"lark_grammar": f"start: {calls}"}, *singles]


def is_tools(value: Any) -> bool:
    """Whether a value of `tools` is a list of functions."""
    return isinstance(value, list) and len(value) <= MAX_TOOLS and all(map(is_tool, value))


def is_tool(value: Any) -> bool:
    """Whether an entry of `tools` is a function. `null` stands for leaving a key out."""
    function = value.get("function") if isinstance(value, dict) else None
    if not isinstance(function, dict) or value.get("type") != "function" or _given(value) != {"type", "function"}:
        return False
    known = {"name": str, "description": str, "parameters": dict, "strict": bool}
    is_right = all(name in known and isinstance(function[name], known[name]) for name in _given(function))
    return is_right and bool(_NAME.fullmatch(function.get("name") or ""))


def wrong_tools(value: list[dict[str, Any]]) -> str | None:
    """What `tools` of the right form must have besides: arguments are objects, so schemas have to be of these."""
    for function in (tool["function"] for tool in value):
        kind = (function.get("parameters") or {}).get("type", "object")
        if kind != "object":
            return f'have `parameters` of the `type` "object", got {kind!r} in {function["name"]!r}'
    return None


def is_choice(value: Any) -> bool:
    """Whether a value of `tool_choice` is one of OpenAI's, without `allowed_tools`."""
    if isinstance(value, dict):
        function = value.get("function")
        is_named = isinstance(function, dict) and isinstance(function.get("name"), str)
        return value.keys() == {"type", "function"} and value["type"] == "function" and is_named
    return value in ("none", "auto", "required")


def is_call(value: Any) -> bool:
    """Whether an entry of `tool_calls` of a message is a call of a function."""
    function = value.get("function") if isinstance(value, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        return False
    return isinstance(function.get("arguments"), str) and _object(function["arguments"]) is not None


def tools_of(given: Mapping[str, Any]) -> Tools | None:
    """What the fields of a body say about tools, all of which are checked; `None` if the model may not call any.

    Raises:
        KeyError: `tool_choice` names another function.
    """
    choice, tools = given.get("tool_choice", "auto"), given.get("tools")
    if not tools or choice == "none":
        return None
    functions = {each["function"]["name"]: each["function"] for each in tools}
    if isinstance(choice, dict):
        name = choice["function"]["name"]
        functions = {name: functions[name]}
    is_parallel = given.get("parallel_tool_calls", True) and not isinstance(choice, dict)
    return Tools(tools, functions, choice != "auto", is_parallel)


def calls_of(value: Any, num_before: int) -> list[ToolCall] | None:
    """The calls that transformers' parser has read; `None` if the model has written something else.

    Args:
        value: Of the parser.
        num_before: Calls of the same answer.
    """
    calls: list[ToolCall] = []
    entries = value if isinstance(value, list) else [value]
    functions = [each.get("function") if isinstance(each, dict) else None for each in entries]
    if len(functions) == 1 and isinstance(functions[0], list):  # of a form that lists them
        functions = functions[0]
    for function in functions:
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            return None
        arguments = function.get("arguments", function.get("parameters", {}))
        if isinstance(arguments, str):
            arguments = _object(arguments)
        if not isinstance(arguments, dict):
            return None
        calls.append(ToolCall(function["name"], json.dumps(arguments, ensure_ascii=False), num_before + len(calls)))
    return calls


def for_template(messages: Sequence[Mapping[str, Any]], template: str) -> list[dict[str, Any]]:
    """Messages as a chat template reads them: content is text, and the arguments of calls are objects.

    transformers' server has this, too. It drops the content of a message that has calls, and the name of a tool.
    `developer` is OpenAI's newer name of `system`. Templates that do not know it leave such messages out, refuse them,
    or write a name that the model has not seen.
    """
    found = []
    for message in messages:
        read = {name: message[name] for name in MESSAGE if message.get(name) is not None}
        if message["role"] == "developer" and "developer" not in template:
            read["role"] = "system"
        content = message.get("content") or ""
        read["content"] = content if isinstance(content, str) else " ".join(part["text"] for part in content)
        if message.get("tool_calls"):
            read["tool_calls"] = [
                {**call, "function": {**call["function"], "arguments": _object(call["function"]["arguments"])}}
                for call in message["tool_calls"]
            ]
        found.append(read)
    return found


def _given(value: Mapping[str, Any]) -> set[str]:
    """The keys that are not left out."""
    return {name for name, each in value.items() if each is not None}


def _schema(name: str, function: Mapping[str, Any], key: str | None) -> dict[str, Any]:
    """The schema of one call. Definitions go to its top, where references look for them."""
    schema = dict(function.get("parameters") or _NO_PARAMETERS)
    if key is not None:
        definitions = {each: schema.pop(each) for each in ("$defs", "definitions") if each in schema}
        properties = {"name": {"const": name}, key: schema}
        schema = {"type": "object", "properties": properties, "required": list(properties), **definitions}
        schema["additionalProperties"] = False
    # Without `strict`, what llguidance does not know of a schema need not hold.
    return schema if function.get("strict") else {**schema, "x-guidance": {"lenient": True}}


def _object(text: str) -> dict[str, Any] | None:
    """A JSON object; `None` if the text is none."""
    try:
        found = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
