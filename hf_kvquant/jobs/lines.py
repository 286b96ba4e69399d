"""What a line of the input asks for. A line is a JSON object of one of two kinds:

    {"prompt": "text"}   or   {"messages": [{"role": "user", "content": "text"}]}
    {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": [...]}}

The first may have an `id` and settings. The second is a line of OpenAI's batch format, whose body the server would
answer likewise: the code that reads it is the server's. A setting that would change the answer and is not supported
makes the line bad: it is never ignored.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ..common.errors import BadLine, RefusedRequest, did_you_mean
from ..serving.fields import CHAT, COMPLETION, FIELDS, Parameters, parameters_of

SAMPLING = ("temperature", "top_p", "top_k")
_OURS = ("id", "prompt", "messages", "max_new_tokens", *SAMPLING)
_LARGEST = 2**31  # of a setting: transformers keeps them in 32 bits


@dataclasses.dataclass(frozen=True)
class Job:
    """One line of the input.

    Attributes:
        line: Its number, from 1.
        id: As the user gave it, any JSON value; `None` if there is none.
        is_openai: Whether its answer has OpenAI's form.
        body: Of a request to the server that asks for the same; empty if something is wrong.
        asked: What the body asks for; `None` likewise.
        problem: Why the line cannot be answered; `None` if nothing is wrong with it.
    """

    line: int
    id: Any = None
    is_openai: bool = False
    body: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    asked: Parameters | None = None
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
    except RefusedRequest as problem:
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
            hint = " Lines in OpenAI's form have it in their body." if name in FIELDS else did_you_mean(name, _OURS)
            raise BadLine(f"there is no setting '{name}'.{hint}")
    if ("prompt" in item) == ("messages" in item):
        found = "both" if "prompt" in item else "neither"
        raise BadLine(f"the line must have either `prompt` or `messages`, got {found}")
    for name in SAMPLING:
        if item.get(name) is not None:
            check_sampling(name, item[name], BadLine)
    settings = {"max_tokens": _count(item, "max_new_tokens"), **{name: item.get(name) for name in SAMPLING}}
    if "prompt" in item:
        body, route = {"prompt": _text(item), **settings}, COMPLETION
    else:
        body, route = {"messages": item["messages"], **settings}, CHAT
    return dataclasses.replace(job, body=body, asked=parameters_of(body, route, None))


def _openai_job(job: Job, item: Mapping[str, Any]) -> Job:
    if not isinstance(job.id, str):
        raise BadLine(f"`custom_id` must be text, got {_type(job.id)}")
    body = item.get("body")
    if not isinstance(body, dict):
        raise BadLine(f"`body` must be a JSON object, got {_type(body)}")
    if item.get("method", "POST") != "POST" or item.get("url", CHAT) != CHAT:
        raise BadLine(f"`method` and `url` must be POST and {CHAT}, got {item.get('method')!r} and {item.get('url')!r}")
    asked = parameters_of(body, CHAT, None)
    for name, is_asked in (("stream", asked.is_streamed), ("ignore_eos", asked.ignores_end)):
        if is_asked:
            raise BadLine(f"`{name}` must be false or left out, got true")
    return dataclasses.replace(job, body=body, asked=asked)


def _text(item: Mapping[str, Any]) -> str:
    prompt = item["prompt"]
    if not isinstance(prompt, str) or not prompt.strip():
        raise BadLine(f"`prompt` must be text, got {'white space' if isinstance(prompt, str) else _type(prompt)}")
    return prompt


def _count(item: Mapping[str, Any], name: str) -> int | None:
    value = item.get(name)
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or not 0 < value < _LARGEST):
        raise BadLine(f"`{name}` must be a number of tokens from 1, got {value!r}")
    return value


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
