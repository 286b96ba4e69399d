"""A server under load, and when things go wrong: everybody gets an answer, and every page comes back.

The tests take seconds. A longer run: `pytest --all tests/test_serve_load.py -k 20000`.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import gc
import json
import random
import socket
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx2
import models
import openai
import psutil
import pytest

from hf_kvquant.upstream.releases import HAS_PAGES

if not HAS_PAGES:
    pytest.skip("transformers' paged cache has another design", allow_module_level=True)

from servers import Running, held, serving
from waiting import PATIENCE, until

COMPLETION = "/v1/completions"
LONG = 4000  # tokens of an answer that nobody waits for


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny model whose tokens are characters."""
    return models.save_llama(tmp_path_factory.mktemp("model"), 4096, chat_template=models.CHAT_TEMPLATE)


@pytest.fixture
def running(folder: str) -> Iterator[Running]:
    with serving(folder, num_blocks=32) as running:
        yield running


@contextlib.asynccontextmanager
async def clients(running: Running) -> Any:
    """One HTTP client of any number of connections."""
    limits = httpx2.Limits(max_connections=None)
    async with httpx2.AsyncClient(base_url=running.url, timeout=PATIENCE, limits=limits) as client:
        yield client


async def complete(client: httpx2.AsyncClient, prompt: str, max_tokens: int, stream: bool = False) -> Any:
    """Status and tokens of an answer."""
    body: dict[str, Any] = {"prompt": prompt, "max_tokens": max_tokens, "stream": stream}
    if stream:
        body["stream_options"] = {"include_usage": True}
    response = await client.post(COMPLETION, json=body)
    if stream and response.status_code == 200:
        *_, usage, end = response.text.strip().split("\n\n")
        assert end == "data: [DONE]" and '"error"' not in response.text
        return 200, json.loads(usage.removeprefix("data: "))["usage"]["completion_tokens"]
    found = response.json()
    return response.status_code, found.get("usage", {}).get("completion_tokens")


async def vanish(running: Running, prompt: str, stream: bool) -> None:
    """Ask for a long answer, and leave: from a stream after its first piece, else while the answer is awaited."""
    before = set(running.app.requests.by_id)
    async with clients(running) as client:
        body = {"prompt": prompt, "max_tokens": LONG, "stream": stream}
        if stream:
            async with client.stream("POST", COMPLETION, json=body) as response:
                async for _ in response.aiter_bytes():
                    return
        else:
            asking = asyncio.ensure_future(client.post(COMPLETION, json=body))
            while not set(running.app.requests.by_id) - before:
                await asyncio.sleep(0.01)
            asking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asking


# --- load -------------------------------------------------------------------------------------------------------------


def test_200_clients_at_once(folder: str) -> None:
    """Pages for a few of them at a time: others wait, starve and start again."""
    with serving(folder, num_blocks=24) as running:

        async def all_of_them() -> list[Any]:
            async with clients(running) as client:
                prompts = [f"client {index} " * (index % 20 + 1) for index in range(200)]
                jobs = [complete(client, prompt, 8, stream=index % 2 == 0) for index, prompt in enumerate(prompts)]
                return await asyncio.gather(*jobs)

        assert asyncio.run(all_of_them()) == [(200, 8)] * 200
        until(running.is_idle)
        assert running.outcomes() == {"finished": 200, "cancelled": 0, "failed": 0, "rejected": 0}
        assert running.metrics()["output_tokens_total"] == 1600


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "in one piece"])
def test_clients_that_vanish(running: Running, stream: bool) -> None:
    """Their requests are cancelled, and those of others go on."""

    async def some_stay() -> Any:
        async with clients(running) as client:
            staying = asyncio.ensure_future(complete(client, "stays", 60))
            for index in range(8):
                await vanish(running, f"leaves {index}", stream)
            return await staying

    assert asyncio.run(some_stay()) == (200, 60)
    until(running.is_idle)
    assert running.outcomes() == {"finished": 1, "cancelled": 8, "failed": 0, "rejected": 0}
    assert running.metrics()["cache_pages_used"] == 0


def test_a_client_that_vanishes_while_it_waits(running: Running) -> None:
    with running.http.stream("POST", COMPLETION, json={"prompt": "a", "max_tokens": LONG, "stream": True}) as first:
        pieces = first.iter_bytes()
        next(pieces)
        with held(running):
            asyncio.run(vanish(running, "waits", stream=False))
            until(lambda: running.outcomes()["cancelled"] == 1)
        until(lambda: running.generation.num_waiting() == 0)
    until(running.is_idle)


def test_a_client_that_leaves_before_its_body_is_complete(running: Running) -> None:
    with socket.create_connection(("127.0.0.1", int(running.url.rpartition(":")[2]))) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        until(lambda: len(running.app.requests.by_id) == 1)
    until(running.is_idle)
    assert running.outcomes()["cancelled"] == 1


def test_a_full_queue(folder: str) -> None:
    with serving(folder, max_waiting=2, max_requests_per_batch=1) as running:

        async def six() -> list[httpx2.Response]:
            body = {"prompt": "a", "max_tokens": 2}
            async with clients(running) as client:
                with held(running):
                    jobs = [asyncio.ensure_future(client.post(COMPLETION, json=body))]
                    while running.generation.num_running() == 0:
                        await asyncio.sleep(0.01)
                    jobs += [asyncio.ensure_future(client.post(COMPLETION, json=body)) for _ in range(5)]
                    while sum(job.done() for job in jobs) < 3:
                        await asyncio.sleep(0.01)
                return await asyncio.gather(*jobs)

        answers = asyncio.run(six())
        assert Counter(answer.status_code for answer in answers) == {200: 3, 429: 3}
        (refused, *_) = (answer for answer in answers if answer.status_code == 429)
        assert refused.headers["retry-after"] == "1"
        assert refused.json()["error"]["message"] == "2 requests wait, and 2 may. Try again later."
        until(running.is_idle)
        assert running.outcomes() == {"finished": 3, "cancelled": 0, "failed": 0, "rejected": 3}


def test_prompts_that_do_not_fit_do_no_harm(folder: str) -> None:
    """transformers' generation thread would end."""
    with serving(folder, num_blocks=2) as running:
        for prompt, max_tokens in (("x" * 3000, 1), ("x" * 256, 1), ("x" * 200, 57), ("", 1)):
            assert running.complete(prompt=prompt, max_tokens=max_tokens).status_code == 400
        assert running.complete(prompt="x" * 200, max_tokens=56).json()["usage"]["completion_tokens"] == 56
        assert running.complete(prompt="x" * 255).json()["usage"]["completion_tokens"] == 1
        assert running.http.get("/health").status_code == 200


def test_long_requests_that_starve_each_other(folder: str) -> None:
    """Each fits alone, and two do not."""
    with serving(folder, num_blocks=4) as running:

        async def six() -> list[Any]:
            async with clients(running) as client:
                return await asyncio.gather(*(complete(client, str(index) * 250, 100) for index in range(6)))

        assert asyncio.run(six()) == [(200, 100)] * 6


# --- the generation thread --------------------------------------------------------------------------------------------


class Broken(RuntimeError):
    pass


def test_an_error_in_the_generation_thread_reaches_everybody(running: Running) -> None:
    """Those whose requests run and wait, streamed or not, and all who come later."""
    body: dict[str, Any] = {"prompt": "a", "max_tokens": LONG}
    with running.openai() as client, concurrent.futures.ThreadPoolExecutor(1) as pool:
        stream = client.completions.create(model=running.model_name, stream=True, **body)
        next(stream)
        with held(running) as gate:
            waiting = pool.submit(running.complete, **body)
            until(lambda: running.generation.num_running() + running.generation.num_waiting() == 2)
            gate.error = Broken('no "more"\nsteps')
        with pytest.raises(openai.APIError) as told:
            list(stream)
        assert told.value.message == 'no "more"\nsteps'
        assert waiting.result().status_code == 503
    until(running.is_idle)
    later = running.complete(prompt="a")
    assert later.status_code == 503 and "the generation thread has ended: no" in later.json()["error"]["message"]
    health = running.http.get("/health")
    assert (health.status_code, health.json()["status"]) == (503, "unhealthy")
    assert running.outcomes() == {"finished": 0, "cancelled": 0, "failed": 2, "rejected": 1}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_ends_without_a_word(running: Running) -> None:
    """transformers records `Exception`s only. Without somebody who looks, clients would wait for ever."""
    with running.openai() as client:
        stream = client.completions.create(model=running.model_name, prompt="a", max_tokens=LONG, stream=True)
        next(stream)
        with held(running) as gate:
            gate.error = SystemExit()
        with pytest.raises(openai.APIError) as told:
            list(stream)
        assert "the generation thread has ended" in told.value.message
    assert running.http.get("/health").status_code == 503
    running.processor.fail_all_requests(Broken())  # what the thread would have done, for the check for leaks


def test_a_request_that_the_manager_drops_is_answered(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """While its thread ends, transformers drops requests with a line in the log."""
    status = running.generation.manager.background_thread_status
    monkeypatch.setattr(type(status), "can_accept_new_requests", lambda self: "stopping")
    for stream in (True, False):
        assert running.complete(prompt="a", stream=stream).status_code == 503


# --- memory -----------------------------------------------------------------------------------------------------------


async def with_fields(client: httpx2.AsyncClient, prompt: str, draw: random.Random) -> int:
    """Ask with some of the fields that change an answer. Returns the status."""
    fields: dict[str, Any] = {
        "n": 2,
        "stop": ["a", "b c"],
        "temperature": 1.2,
        "top_p": 0.9,
        "seed": draw.randint(0, 9),
        "logprobs": 3,
        "frequency_penalty": 0.5,
        "repetition_penalty": 1.1,
        "logit_bias": {"5": 2},
        "stream": True,
        "prompt": [prompt, prompt[:50], [5, 6, 7]],
    }
    chosen = {name: fields[name] for name in draw.sample(sorted(fields), 4)}
    response = await client.post(COMPLETION, json={"prompt": prompt, "max_tokens": draw.randint(1, 6), **chosen})
    assert '"error"' not in response.text, response.text
    return response.status_code


def mixed_load(running: Running, requests: int, seed: int) -> None:
    """Requests of all kinds, 32 at a time: streams, answers in one piece, mistakes, and clients that vanish."""
    draw = random.Random(seed)

    async def one(client: httpx2.AsyncClient) -> None:
        kind, prompt = draw.random(), "".join(draw.choices("abcdef ", k=draw.randint(1, 300)))
        if kind < 0.05:
            assert (await complete(client, "x" * 3000, 2000))[0] == 400
        elif kind < 0.1:
            await vanish(running, prompt, stream=True)
        elif kind < 0.3:
            assert await with_fields(client, prompt, draw) == 200
        else:
            length = draw.randint(1, 6)
            assert await complete(client, prompt, length, stream=kind < 0.5) == (200, length)

    async def all_of_them() -> None:
        places = asyncio.Semaphore(32)

        async def in_turn(client: httpx2.AsyncClient) -> None:
            async with places:
                await one(client)

        async with clients(running) as client:
            await asyncio.gather(*(in_turn(client) for _ in range(requests)))

    asyncio.run(all_of_them())
    until(running.is_idle)


def resident() -> int:
    """MiB of this process, garbage collected."""
    gc.collect()
    return psutil.Process().memory_info().rss // 2**20


def soak(folder: str, requests: int) -> None:
    """Memory at request 500 and at the end must not differ by more than 16 MiB.

    The heap breathes by a few MiB with the lengths of a batch. A request that stayed, with its tokens, callback and
    answer, takes more than 20 kB: 30 MiB over 1,500 requests.
    """
    with serving(folder, num_blocks=32) as running:
        taken = []
        for seed in range(requests // 500):
            mixed_load(running, 500, seed)
            taken.append(resident())
        assert sum(running.outcomes().values()) == requests
        assert running.outcomes()["failed"] == 0
        assert not running.generation.manager.output_router.result_handlers
        assert running.generation.manager.output_router.output_queue.empty()
    print(f"{requests} requests: MiB after each 500: {taken}")
    assert taken[-1] - taken[0] <= 16, taken


def test_memory_stays_flat_over_2000_requests(folder: str) -> None:
    soak(folder, 2_000)


@pytest.mark.slow
@pytest.mark.full(when=lambda: True, reason="minutes: the same as the test before, ten times as long")
def test_memory_stays_flat_over_20000_requests(folder: str) -> None:
    soak(folder, 20_000)
