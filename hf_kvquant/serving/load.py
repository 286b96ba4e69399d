"""Asks any OpenAI-compatible server many things at once, and notes when each piece of each answer comes.

Answers are streamed. What a client sees is measured here, network and its own work included: it reads the lines of a
stream itself, since a client that makes objects of them is slower than a fast server. Token counts are the server's.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import openai

from ..common.errors import ServerFailed

# Common English words: most vocabularies have each of them as a token.
WORDS = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work government number night point home water room mother "
    "area money story fact month lot right study book eye job word business issue side kind head house service friend "
    "father power hour game line end member law car city name team minute idea body back parent face level office door"
).split()
PERCENTILES = (50, 90, 99)


@dataclasses.dataclass(frozen=True)
class Ask:
    """What is asked of a server.

    Attributes:
        url: Of its API, up to `/v1`.
        model: By the name that the server uses.
        is_chat: Whether to ask for chat completions instead of completions.
        max_tokens: Of an answer.
        api_key: For the server.
        timeout: Seconds that an answer may take.
    """

    url: str
    model: str
    is_chat: bool
    max_tokens: int
    api_key: str
    timeout: float


@dataclasses.dataclass
class Answer:
    """What a client has seen of an answer.

    Attributes:
        began: When it was asked for, in seconds of `time.perf_counter`.
        pieces: When pieces with text came, likewise.
        ended: When it was complete, likewise.
        num_prompt, num_new: Tokens, by the server's count; `num_new` counts pieces if the server gives no count.
        error: Why there is no complete answer.
    """

    began: float
    pieces: list[float] = dataclasses.field(default_factory=list)
    ended: float = math.nan
    num_prompt: int = 0
    num_new: int = 0
    error: str | None = None


def prompts_of(count: int, num_words: int, seed: int) -> list[str]:
    """Prompts of random words. They begin differently, so that a server cannot share the beginning of one."""
    draw = random.Random(seed)
    return [" ".join(draw.choices(WORDS, k=num_words)) for _ in range(count)]


async def models_of(url: str, api_key: str, timeout: float) -> list[str]:
    """The models that a server names.

    Raises:
        ServerFailed: It names none.
    """
    async with client_of(url, api_key, timeout) as client:
        try:
            names = [each.id for each in (await client.models.list()).data]
        except openai.OpenAIError as error:
            raise ServerFailed(told(error)) from error
        except (AttributeError, TypeError, ValueError) as error:  # it answers with something else
            raise ServerFailed(f"{url}/models does not list models") from error
    if not names:
        raise ServerFailed("it serves no model")
    return names


async def run(
    ask: Ask, prompts: Sequence[str], concurrency: int, tell: Callable[[int], None] = lambda done: None
) -> list[Answer]:
    """Ask for an answer to each prompt, `concurrency` at a time.

    Args:
        ask: See there.
        prompts: In this order.
        concurrency: Answers that are awaited at any moment, while prompts are left.
        tell: Called with 1 after each answer.

    Returns:
        Answers in the order of prompts, failed ones among them.
    """
    answers: list[Answer | None] = [None] * len(prompts)
    left = iter(enumerate(prompts))

    async def one_after_the_other(client: openai.AsyncOpenAI) -> None:
        for index, prompt in left:
            answers[index] = await answer_to(client, ask, prompt)
            tell(1)

    async with client_of(ask.url, ask.api_key, ask.timeout) as client:
        await asyncio.gather(*(one_after_the_other(client) for _ in range(min(concurrency, len(prompts)))))
    return [answer for answer in answers if answer is not None]


def client_of(url: str, api_key: str, timeout: float) -> openai.AsyncOpenAI:
    """A client that does not try again. It has up to 1,000 connections."""
    return openai.AsyncOpenAI(base_url=url, api_key=api_key, timeout=timeout, max_retries=0)


async def answer_to(client: openai.AsyncOpenAI, ask: Ask, prompt: str) -> Answer:
    """Ask for one answer, and note when its pieces come."""
    common: dict[str, Any] = {
        "model": ask.model,
        "max_tokens": ask.max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    answer = Answer(time.perf_counter())
    try:
        if ask.is_chat:
            messages: Any = [{"role": "user", "content": prompt}]
            asking: Any = client.chat.completions.with_streaming_response.create(messages=messages, **common)
        else:
            asking = client.completions.with_streaming_response.create(prompt=prompt, **common)
        async with asking as response:
            async for line in response.iter_lines():
                if line.startswith("data:"):
                    _note(answer, line[5:].strip())
    except openai.OpenAIError as error:
        answer.error = told(error)
    except Exception as error:  # a connection that breaks in the middle, or something else than JSON
        answer.error = f"{type(error).__name__}: {error}"
    answer.ended = time.perf_counter()
    if answer.error is None and not (answer.num_new or answer.pieces):
        answer.error = "the stream had no text and no `usage`"
    answer.num_new = answer.num_new or len(answer.pieces)
    return answer


def _note(answer: Answer, data: str) -> None:
    """Read an event of a stream."""
    if data == "[DONE]":
        return
    now, chunk = time.perf_counter(), json.loads(data)
    if chunk.get("error"):
        error = chunk["error"]
        answer.error = str(error.get("message", error) if isinstance(error, dict) else error)
    for choice in chunk.get("choices") or []:
        delta = choice.get("delta") or choice
        if any(delta.get(name) for name in ("content", "text", "reasoning_content", "reasoning", "tool_calls")):
            answer.pieces.append(now)
    usage = chunk.get("usage")
    if usage:
        answer.num_prompt, answer.num_new = usage.get("prompt_tokens") or 0, usage.get("completion_tokens") or 0


def told(error: openai.OpenAIError) -> str:
    """What an error of the client says, in a line."""
    body = getattr(error, "body", None)
    message = (body.get("message") if isinstance(body, dict) else None) or error
    cause = f" ({error.__cause__})" if error.__cause__ is not None and str(error.__cause__) else ""
    return f"{message}".strip().rstrip(".") + cause


# --- numbers ----------------------------------------------------------------------------------------------------------


def results_of(answers: Sequence[Answer]) -> dict[str, Any]:
    """Numbers of a run. What is unknown is `None`.

    Latencies are in seconds: `first_token` of each answer, `inter_token` between one piece of text and the next,
    `per_output_token` as the mean of each answer after its first token, and `request` for all of it.
    """
    good = [answer for answer in answers if answer.error is None]
    seconds = max((each.ended for each in answers), default=0.0) - min((each.began for each in answers), default=0.0)
    num_prompt, num_new = (sum(getattr(each, name) for each in good) for name in ("num_prompt", "num_new"))
    gaps = [later - before for each in good for before, later in zip(each.pieces, each.pieces[1:], strict=False)]
    long = [each for each in good if each.pieces and each.num_new > 1]
    means = [(each.pieces[-1] - each.pieces[0]) / (each.num_new - 1) for each in long]
    return {
        "finished": len(good),
        "failed": len(answers) - len(good),
        "seconds": seconds,
        "prompt_tokens": num_prompt,
        "output_tokens": num_new,
        "requests_per_second": len(good) / seconds if seconds else None,
        "output_tokens_per_second": num_new / seconds if seconds else None,
        "total_tokens_per_second": (num_prompt + num_new) / seconds if seconds else None,
        "latency_s": {
            "first_token": summary([each.pieces[0] - each.began for each in good if each.pieces]),
            "inter_token": summary(gaps),
            "per_output_token": summary(means),
            "request": summary([each.ended - each.began for each in good]),
        },
    }


def summary(values: Sequence[float]) -> dict[str, float | None]:
    """Mean, percentiles and the largest of some values."""
    if not values:
        return dict.fromkeys(("mean", *(f"p{percent}" for percent in PERCENTILES), "max"))
    ranked = sorted(values)
    found = {f"p{percent}": percentile(ranked, percent) for percent in PERCENTILES}
    return {"mean": sum(ranked) / len(ranked), **found, "max": ranked[-1]}


def percentile(ranked: Sequence[float], percent: float) -> float:
    """A percentile of sorted values, interpolated linearly between two of them."""
    place = (len(ranked) - 1) * percent / 100
    below = math.floor(place)
    above = min(below + 1, len(ranked) - 1)
    return ranked[below] + (ranked[above] - ranked[below]) * (place - below)
