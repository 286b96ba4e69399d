"""What a line of the input asks for. A line is a JSON object of one of two kinds:

    {"prompt": "text"}   or   {"messages": [{"role": "user", "content": "text"}]}
    {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": [...]}}

The first may have an `id` and settings. The second is a line of OpenAI's batch format, with settings in its body. A
setting that would change the answer and is not supported makes the line bad: it is never ignored.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ..common.errors import did_you_mean

SAMPLING = ("temperature", "top_p", "top_k")
_URL = "/v1/chat/completions"
_OURS = ("id", "prompt", "messages", "max_new_tokens", *SAMPLING)
# Of a body, what is the same for an answer that is neither streamed nor one of several, by its value.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "stream": (False,),
    "logprobs": (False,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "stop": ([],),
    "tools": ([],),
    "response_format": ({"type": "text"},),
}
# Of a body, what does not change the answer.
_NOTES = ("model", "user", "metadata", "store", "safety_identifier", "prompt_cache_key", "service_tier")
_LIMITS = ("max_tokens", "max_completion_tokens")
_LARGEST = 2**31  # of a setting: transformers keeps them in 32 bits


class BadLine(ValueError):
    """A line that cannot be answered. Its text says why, in a sentence."""

    def __init__(self, why: str) -> None:
        super().__init__(why if why.endswith((".", "?")) else f"{why}.")


@dataclasses.dataclass(frozen=True)
class Job:
    """One line of the input.

    Attributes:
        line: Its number, from 1.
        id: As the user gave it, any JSON value; `None` if there is none.
        is_openai: Whether its answer has OpenAI's form.
        prompt: Text or messages.
        max_new_tokens: `None` for the default.
        sampling: The settings of `SAMPLING` that the line has.
        problem: Why the line cannot be answered; `None` if nothing is wrong with it.
    """

    line: int
    id: Any = None
    is_openai: bool = False
    prompt: str | list[dict[str, str]] = ""
    max_new_tokens: int | None = None
    sampling: Mapping[str, float] = dataclasses.field(default_factory=dict)
    problem: str | None = None


def read_jobs(path: Path) -> Iterator[Job]:
    """The jobs of a file, one at a time. Blank lines are left out, and counted."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield parse(number, line)


def parse(number: int, line: bytes) -> Job:
    """The job of a line of JSON. If the line is bad, the job says why."""
    job = Job(number)
    try:
        item = _read(line)
        job = dataclasses.replace(job, id=item.get("id"))
        if "custom_id" in item or "body" in item:
            job = dataclasses.replace(job, id=item.get("custom_id"), is_openai=True)
            return _openai_job(job, item)
        return _own_job(job, item)
    except BadLine as problem:
        return dataclasses.replace(job, problem=str(problem))


def _read(line: bytes) -> dict[str, Any]:
    try:
        item = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise BadLine(f"the line must be JSON, got {error}") from error
    if not isinstance(item, dict):
        raise BadLine(f"the line must be a JSON object, got {_type(item)}")
    return item


def _own_job(job: Job, item: Mapping[str, Any]) -> Job:
    for name in item:
        if name not in _OURS:
            raise BadLine(f"there is no setting '{name}'.{did_you_mean(name, _OURS)}")
    if ("prompt" in item) == ("messages" in item):
        found = "both" if "prompt" in item else "neither"
        raise BadLine(f"the line must have either `prompt` or `messages`, got {found}")
    prompt = _text(item) if "prompt" in item else _messages(item)
    return dataclasses.replace(
        job, prompt=prompt, max_new_tokens=_count(item, "max_new_tokens"), sampling=_sampling(item)
    )


def _openai_job(job: Job, item: Mapping[str, Any]) -> Job:
    if not isinstance(job.id, str):
        raise BadLine(f"`custom_id` must be text, got {_type(job.id)}")
    body = item.get("body")
    if not isinstance(body, dict):
        raise BadLine(f"`body` must be a JSON object, got {_type(body)}")
    if item.get("method", "POST") != "POST" or item.get("url", _URL) != _URL:
        raise BadLine(f"`method` and `url` must be POST and {_URL}, got {item.get('method')!r} and {item.get('url')!r}")
    known = ("messages", *_LIMITS, *SAMPLING, *_NEUTRAL, *_NOTES)
    for name, value in body.items():
        if name not in known and value is not None:
            raise BadLine(f"`body` must have no '{name}', which is not supported.{did_you_mean(name, known)}")
        if name in _NEUTRAL and value is not None and value not in _NEUTRAL[name]:
            raise BadLine(f"`{name}` must be {_NEUTRAL[name][0]!r} or left out, got {value!r}")
    limits = {_count(body, name) for name in _LIMITS if body.get(name) is not None}
    if len(limits) > 1:
        raise BadLine("`max_tokens` and `max_completion_tokens` must agree. Leave one out")
    return dataclasses.replace(
        job, prompt=_messages(body), max_new_tokens=next(iter(limits), None), sampling=_sampling(body)
    )


def _text(item: Mapping[str, Any]) -> str:
    prompt = item["prompt"]
    if not isinstance(prompt, str) or not prompt.strip():
        raise BadLine(f"`prompt` must be text, got {'white space' if isinstance(prompt, str) else _type(prompt)}")
    return prompt


def _messages(item: Mapping[str, Any]) -> list[dict[str, str]]:
    messages = item.get("messages")
    if not isinstance(messages, list) or not messages:
        raise BadLine(f"`messages` must be a list with a message in it, got {_type(messages)}")
    return [_message(message) for message in messages]


def _message(message: Any) -> dict[str, str]:
    """A message of a role and text. The content may also be a list of parts that are text."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise BadLine("a message must be a JSON object with `role` and `content`")
    for name, value in message.items():
        if name not in ("role", "content") and value:
            raise BadLine(f"a message must have `role` and `content` only, got '{name}'")
    content = message.get("content")
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        texts = [part.get("text") for part in content]
        content = "".join(texts) if all(isinstance(text, str) for text in texts) else None
    if not isinstance(content, str):
        raise BadLine(f"the `content` of a message must be text, got {_type(message.get('content'))}")
    return {"role": message["role"], "content": content}


def _count(item: Mapping[str, Any], name: str) -> int | None:
    value = item.get(name)
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or not 0 < value < _LARGEST):
        raise BadLine(f"`{name}` must be a number of tokens from 1, got {value!r}")
    return value


def _sampling(item: Mapping[str, Any]) -> dict[str, float]:
    given = {name: item[name] for name in SAMPLING if item.get(name) is not None}
    for name, value in given.items():
        check_sampling(name, value, BadLine)
    return {name: value if name == "top_k" else float(value) for name, value in given.items()}


def check_sampling(name: str, value: Any, error: Callable[[str], Exception], *, shown: str | None = None) -> None:
    """Raise an error unless a setting of `SAMPLING` may have the value. `shown` is what the user calls it."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < _LARGEST
    expected = {
        "temperature": ("a number from 0", is_number and value >= 0),
        "top_p": ("above 0 and at most 1", is_number and 0 < value <= 1),
        "top_k": ("a number of tokens from 1", is_number and isinstance(value, int) and value >= 1),
    }
    words, is_right = expected[name]
    if not is_right:
        raise error(f"`{shown or name}` must be {words}, got {value!r}")


def _type(value: Any) -> str:
    if value is None:
        return "nothing"
    return {"dict": "an object", "list": "a list", "str": "text"}.get(type(value).__name__, type(value).__name__)
