"""Which fields of a request are refused: those that transformers would ignore, and values that it would fail on.

transformers reads `stop`, `logit_bias` and others into a generation config that continuous batching does not use. A
client would get an answer as if it had not asked. A field without effect is accepted at the value that changes nothing.
"""

from __future__ import annotations

import math
from typing import Any

from fastapi import HTTPException

# Fields that have no effect, with the values at which that is right.
UNUSED: dict[str, tuple[Any, ...]] = {
    "audio": (None,),
    "best_of": (None, 1),
    "echo": (None, False),
    "frequency_penalty": (None, 0),
    "function_call": (None,),
    "functions": (None, []),
    "generation_config": (None,),
    "logit_bias": (None, {}),
    "logprobs": (None, False),
    "modalities": (None, ["text"]),
    "n": (None, 1),
    "prediction": (None,),
    "presence_penalty": (None, 0),
    "response_format": (None, {"type": "text"}),
    "stop": (None, []),
    "tool_choice": (None, "auto"),
    "top_logprobs": (None, 0),
    "web_search_options": (None,),
}
LENGTHS = ("max_completion_tokens", "max_tokens")


def check_fields(body: dict[str, Any], is_sampled: bool) -> None:
    """Refuse what would be ignored.

    Args:
        body: Of the request.
        is_sampled: Whether the server samples.

    Raises:
        HTTPException: 400, with the field's name.
    """
    for name, neutral in UNUSED.items():
        if name in body and not any(_is_same(body[name], value) for value in neutral):
            raise _refused(name, "be left out, since it would have no effect", body[name])
    _check_sampling(body, is_sampled)
    top_p = body.get("top_p")
    if top_p is not None and not (_is_number(top_p) and 0 < top_p <= 1):
        raise _refused("top_p", "be above 0 and at most 1", top_p)
    if not isinstance(body.get("stream"), bool | None):
        raise _refused("stream", "be true or false", body["stream"])
    for name in LENGTHS:
        if body.get(name) is not None and not (_is_integer(body[name]) and body[name] >= 1):
            raise _refused(name, "be an integer of at least 1", body[name])


def _check_sampling(body: dict[str, Any], is_sampled: bool) -> None:
    temperature, seed = body.get("temperature"), body.get("seed")
    if not is_sampled and (temperature not in (None, 0) or isinstance(temperature, bool)):
        why = "be 0 or left out, since this server is greedy (hf-kvquant serve --sample is not)"
        raise _refused("temperature", why, temperature)
    if temperature is not None and not (_is_number(temperature) and temperature >= 0):
        raise _refused("temperature", "be a number of at least 0", temperature)
    if seed is not None and is_sampled:
        raise _refused("seed", "be left out, since requests that are batched draw from one generator", seed)
    if seed is not None and not (_is_integer(seed) and -(2**63) <= seed < 2**63):
        raise _refused("seed", "be an integer of 64 bits", seed)


def check_messages(body: dict[str, Any]) -> None:
    """Refuse messages that are not a list of roles and texts, and a chat template of the client's.

    Raises:
        HTTPException: 400.
    """
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise _refused("messages", "be a list of messages", messages)
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise _refused("messages", "each have a role", message)
        content = message.get("content")
        parts = content if isinstance(content, list) else []
        if not isinstance(content, str | list | None) or not all(map(_is_text, parts)):
            raise _refused("messages", "each have a text, or a list of texts, as content", content)
    options = body.get("chat_template_kwargs", {})
    # A template of the client's would run on the event loop for as long as it likes.
    if not isinstance(options, dict) or "chat_template" in options:
        raise _refused("chat_template_kwargs", "be an object without `chat_template`", options)


def check_prompt(body: dict[str, Any]) -> None:
    """Refuse a prompt that is not one text.

    Raises:
        HTTPException: 400.
    """
    if not isinstance(body.get("prompt"), str):
        raise _refused("prompt", "be a text", body.get("prompt"))


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_same(value: Any, neutral: Any) -> bool:
    """Equal, where `True` is not 1."""
    return bool(value == neutral) and isinstance(value, bool) == isinstance(neutral, bool)


def _refused(name: str, expected: str, got: Any) -> HTTPException:
    text = repr(got)
    return HTTPException(400, f"`{name}` must {expected}, got {text if len(text) <= 60 else text[:57] + '...'}.")
