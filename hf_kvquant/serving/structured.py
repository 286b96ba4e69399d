"""Structured output: the grammar that an answer must match, from `response_format` or `structured_outputs`.

A grammar is written in the JSON of llguidance, a list of grammars of which the first may name the others. `batching`
compiles it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ..common.errors import BadGrammar

MAX_CHOICES = 1024
# Of `structured_outputs`, each with what it must be.
KINDS = {
    "json": "a JSON schema, an object or its text",
    "json_object": "true",
    "regex": "a text that is not empty",
    "choice": f"a list of 1 to {MAX_CHOICES} texts that are not empty",
    "grammar": "a text that is not empty",
}
# White space between the parts of JSON. Without a bound, a model that has nothing to say writes blank lines for ever.
_WHITE_SPACE = r"[ \n\r\t]{0,32}"


def is_format(value: Any) -> bool:
    """Whether a `response_format` has the form of OpenAI's."""
    if not isinstance(value, dict):
        return False
    kind, more = value.get("type"), value.keys() - {"type"}
    if kind != "json_schema":
        return kind in ("text", "json_object") and not more
    found = value.get("json_schema")
    if more != {"json_schema"} or not isinstance(found, dict):
        return False
    known = {"name": str, "schema": dict, "strict": bool, "description": str}
    is_right = all(name in known and isinstance(each, (known[name], type(None))) for name, each in found.items())
    return is_right and bool(found.get("name")) and found.get("schema") is not None


def is_structure(value: Any) -> bool:
    """Whether a value of `structured_outputs` names one kind of grammar."""
    if not isinstance(value, dict):
        return False
    given = [name for name, each in value.items() if each is not None]
    return len(given) == 1 and given[0] in KINDS


def wrong_structure(value: Mapping[str, Any]) -> str | None:
    """What a value of `structured_outputs` of the right form must have besides; `None` if all is right."""
    kind, found = _given(value)
    if _is_right(kind, found):
        return None
    return f"have {KINDS[kind]} under `{kind}`, got {shown(found)}"


def shown(value: Any) -> str:
    """A value in a message."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _given(structure: Mapping[str, Any]) -> tuple[str, Any]:
    return next((kind, each) for kind, each in structure.items() if each is not None)


def _is_right(kind: str, found: Any) -> bool:
    if kind == "choice":
        is_list = isinstance(found, list) and 0 < len(found) <= MAX_CHOICES
        return is_list and all(isinstance(each, str) and each for each in found)
    if kind == "json":
        return isinstance(found, dict) or (isinstance(found, str) and _is_schema(found))
    return found is True if kind == "json_object" else isinstance(found, str) and bool(found)


def grammar_of(response_format: Mapping[str, Any] | None, structure: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The grammar of an answer; `None` if anything may be said. Needs llguidance.

    Args:
        response_format: As a body has it, checked.
        structure: `structured_outputs`, likewise.

    Raises:
        BadGrammar: It is neither Lark nor GBNF.
    """
    if response_format is not None and response_format["type"] != "text":
        is_any = response_format["type"] == "json_object"
        return schema_grammar({"type": "object"} if is_any else response_format["json_schema"]["schema"])
    if structure is None:
        return None
    kind, found = _given(structure)
    if kind in ("json", "json_object"):
        schema = {"type": "object"} if kind == "json_object" else json.loads(found) if isinstance(found, str) else found
        return schema_grammar(schema)
    if kind == "choice":
        return {"lark_grammar": "start: " + " | ".join(map(quoted, found))}
    if kind == "regex":
        return {"lark_grammar": f"start: REGEX\nREGEX: {_between_slashes(found)}"}
    return {"lark_grammar": _lark(found)}


def schema_grammar(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The grammar of JSON that fits a schema. Objects and lists may have some white space in them."""
    options = schema.get("x-guidance", {})
    if isinstance(options, dict):
        options = {"whitespace_pattern": _WHITE_SPACE, **options}
    return {"json_schema": {**schema, "x-guidance": options}}


def quoted(text: str) -> str:
    """A text, as Lark writes it."""
    return json.dumps(text, ensure_ascii=False)


def written(grammar: Mapping[str, Any], *others: Mapping[str, Any], thoughts_end: str | None = None) -> str:
    """A grammar in the JSON of llguidance.

    Args:
        grammar: One of llguidance's.
        *others: Those that it names.
        thoughts_end: If the model thinks aloud before its answer, what ends that, in Lark; `None` if it does not.
    """
    if thoughts_end is None:
        return json.dumps({"grammars": [grammar, *others]})
    is_text = thoughts_end.startswith('"')
    thoughts = f"thoughts[suffix={thoughts_end}]: /(.|\\n)*/" if is_text else "thoughts: /(.|\\n)*/"
    start = f"start: thoughts {'' if is_text else thoughts_end} /[ \\n]{{0,4}}/ @answer"
    first = {"lark_grammar": f"{start}\n{thoughts}"}
    return json.dumps({"grammars": [first, {**grammar, "name": "answer"}, *others]})


def _is_schema(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def _between_slashes(regex: str) -> str:
    """A regular expression, as Lark writes it."""
    from llguidance import regex_to_lark  # comes with an extra

    return f"/{regex_to_lark(regex)}/"


def _lark(text: str) -> str:
    """A grammar in Lark, also of one in GBNF.

    Raises:
        BadGrammar: It is neither.
    """
    from llguidance.gbnf_to_lark import GbnfToLarkError, any_to_lark

    try:
        found: str = any_to_lark(text)
    except GbnfToLarkError as error:
        raise BadGrammar(str(error)) from error
    return found
