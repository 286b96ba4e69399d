"""The Ray examples on a cluster of this machine: two replicas of the reference model, one of which dies under load.

Workers are processes, slow to start, so all tests share one cluster and one application. A replica calls itself by its
host and process id (`system_fingerprint`), so a test knows which process answers, and which to kill.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import socket
import sys
import warnings
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from waiting import PATIENCE, until

from hf_kvquant import patched
from hf_kvquant.upstream.releases import HAS_PAGES

os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # keeps Ray on 127.0.0.1, as on those; read by its import
ray = pytest.importorskip("ray", reason="Ray is pinned for Python 3.11 and later")
if not HAS_PAGES:
    pytest.skip("transformers' paged cache has another design", allow_module_level=True)

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "examples"))

with warnings.catch_warnings():  # Ray's models use options of Field that pydantic has deprecated
    warnings.filterwarnings("ignore", "Using extra keyword arguments on `Field`", DeprecationWarning)
    import aiohttp
    import psutil
    import ray_data
    import ray_serve
    from ray import cloudpickle, serve
    from ray.serve._private import api, client

pytestmark = [
    # Ray leaves sockets, files and processes to its own shutdown.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
PRESET = "int8"
# Another replica goes on behind some tokens of an answer, and so attends to them in full precision. Each of these
# answers is the same wherever it is cut; the two best logits are never nearer than 0.05.
PROMPTS = [
    "The village is located in the",
    "The river",
    "The song was written by",
    "The company was",
    "The building was constructed",
]
NEW_TOKENS = 40
# On a busy machine Ray must not give up, or kill and start again, what lives and works.
VARIABLES = {
    "RAY_agent_register_timeout_ms": 1000 * PATIENCE,
    "RAY_gcs_server_port_wait_time_s": PATIENCE,
    "RAY_health_check_timeout_ms": 1000 * PATIENCE,
    "RAY_worker_register_timeout_seconds": PATIENCE,
    "RAY_worker_niceness": 0,  # at its 15, workers come last on a busy machine
    "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": PATIENCE,
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": PATIENCE,
    "RAY_memory_monitor_refresh_ms": 0,  # else it kills workers when others have taken the memory
}


def settings(example: Any, *words: str) -> argparse.Namespace:
    return example.parser().parse_args(["--preset", PRESET, "--dtype", "float32", *words])


@pytest.fixture(scope="module")
def model() -> Any:
    """The reference model, patched in each test that asks for it."""
    return AutoModelForCausalLM.from_pretrained(ray_serve.REFERENCE_MODEL, dtype=torch.float32)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(ray_serve.REFERENCE_MODEL)


@pytest.fixture(scope="module")
def expected(model: Any, tokenizer: Any) -> dict[str, list[int]]:
    """What `generate` answers to the prompts."""
    with patched(model, PRESET):
        return {prompt: generated(model, tokenizer(prompt).input_ids, NEW_TOKENS) for prompt in PROMPTS}


def generated(model: Any, tokens: list[int], new: int) -> list[int]:
    inputs = torch.tensor([tokens])
    output = model.generate(inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=new, do_sample=False)
    return output[0, len(tokens) :].tolist()  # type: ignore[no-any-return]


def ray_lives() -> bool:
    """Whether the processes do that start all others, and start them again."""
    living = {each.name() for each in psutil.Process().children() if each.status() != psutil.STATUS_ZOMBIE}
    return {"gcs_server", "raylet"} <= living


def poll(what: Callable[[], Any]) -> Any:
    """What a call returns once it is true."""
    return until(what, ray_lives, every=0.5)


def num_requests(manager: Any) -> int:
    scheduler = manager.batch_processor.scheduler
    return len(scheduler.active_requests) + len(scheduler.waiting_requests) + manager.input_queue.qsize()


# --- one replica, without a cluster -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def engine() -> Iterator[ray_serve.Engine]:
    engine = ray_serve.Engine(settings(ray_serve))
    yield engine
    engine.manager.stop(hard_stop=True)


async def all_of(pieces: AsyncIterator[dict[str, Any]]) -> tuple[list[int], list[str | None]]:
    found = [piece async for piece in pieces]
    return [token for piece in found for token in piece["tokens"]], [piece["finish_reason"] for piece in found]


def test_a_replica_batches_its_requests(
    engine: ray_serve.Engine, tokenizer: Any, expected: dict[str, list[int]]
) -> None:
    """Each gets what `generate` gives it, in far fewer steps than there are tokens."""

    async def run() -> list[Any]:
        calls = (
            all_of(engine.complete(tokenizer(prompt).input_ids, NEW_TOKENS, is_streamed))
            for prompt in PROMPTS
            for is_streamed in (True, False)
        )
        return await asyncio.gather(*calls)

    before = engine.manager.current_batch
    answers = asyncio.run(run())
    assert [tokens for tokens, _ in answers] == [expected[prompt] for prompt in PROMPTS for _ in range(2)]
    assert engine.manager.current_batch - before < 2 * NEW_TOKENS
    for (_, streamed), (_, whole) in zip(answers[::2], answers[1::2], strict=True):
        assert len(streamed) > 5 and streamed[-1] == "length" and not any(streamed[:-1]) and whole == ["length"]


def test_a_replica_cancels_what_nobody_listens_to(engine: ray_serve.Engine) -> None:
    async def run() -> None:
        pieces = engine.complete([5, 6, 7], 1000, True)
        await anext(pieces)
        await pieces.aclose()
        waiting = asyncio.create_task(all_of(engine.complete([5, 6, 7], 1000, False)))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        while num_requests(engine.manager):
            await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(run(), PATIENCE))


@pytest.mark.parametrize("tokens", [[], [5] * 2000])
def test_a_replica_refuses_what_does_not_fit(engine: ray_serve.Engine, tokens: list[int]) -> None:
    with pytest.raises(ValueError, match=f"must have 1 to 2048 tokens, got {len(tokens)} and 100 new ones."):
        asyncio.run(all_of(engine.complete(tokens, 100, True)))


def test_a_replica_whose_manager_died_is_not_healthy() -> None:
    """Requests that it had fail, and so do those that come later."""
    engine = ray_serve.Engine(settings(ray_serve))

    async def run() -> None:
        await engine.check_health()
        pieces = engine.complete([5, 6, 7], 1000, True)
        await anext(pieces)
        engine.manager.input_queue.put("no request")
        with pytest.raises(RuntimeError, match="a request failed: 'str' object has no attribute"):
            await all_of(pieces)
        with pytest.raises(ConnectionRefusedError, match="the manager has ended: AttributeError"):
            await all_of(engine.complete([5, 6, 7], 10, True))
        with pytest.raises(RuntimeError, match="the manager has ended: AttributeError"):
            await engine.check_health()

    asyncio.run(run())


# --- the cluster ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Ray with more CPUs than there are, for processes that mostly wait."""
    cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import it
    paths = [str(ROOT), str(ROOT / "examples"), *filter(None, [os.environ.get("PYTHONPATH")])]
    variables = {"PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    variables |= {name: str(value) for name, value in VARIABLES.items()}
    # Ray would start a worker per CPU at once, which cannot be used, because it lacks these variables.
    own = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_prestart_worker_first_driver": "0"}
    previous = {name: os.environ.get(name) for name in (*own, *variables)}
    os.environ |= own | {name: variables[name] for name in VARIABLES}
    others = set(psutil.Process().children())  # of tests that ran before
    ray.init(
        address="local",
        num_cpus=8,
        num_gpus=0,
        include_dashboard=False,
        object_store_memory=2**27,
        log_to_driver=False,
        runtime_env={"env_vars": variables},
    )
    yield
    ray.shutdown()
    until(lambda: not set(psutil.Process().children()) - others, every=0.1)
    for name, value in previous.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value


# --- a job ------------------------------------------------------------------------------------------------------------


class Dies(ray_data.Answerer):  # type: ignore[misc]
    """An actor that is killed as it begins the line that says so, the first time."""

    async def answered(self, line: str) -> str:
        if "dies" in line and not (marker := Path(json.loads(line)["dies"])).exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return await super().answered(line)


def test_a_job_answers_each_line_once_and_in_order(
    cluster: None,
    model: Any,
    tokenizer: Any,
    expected: dict[str, list[int]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Though an actor dies, and some lines are bad. Before the applications, whose processes are never quite idle."""
    warnings.filterwarnings("ignore", category=DeprecationWarning, module="ray.data")  # it copies all of its options
    monkeypatch.setattr(ray_data, "Answerer", Dies)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    requests: list[Any] = [{"prompt": prompt, "id": index} for index, prompt in enumerate(PROMPTS * 3)]
    requests[7]["dies"] = str(tmp_path / "died")
    bad = [
        "{",
        "[1]",
        '{"prompt": 3}',
        '{"prompt": "a", "max_new_tokens": 0}',
        '{"prompt": "a", "max_new_tokens": 9999}',
    ]
    lines = [json.dumps(request) for request in requests]
    lines[3:3], lines[12:12] = bad[:2], bad[2:]
    (tmp_path / "prompts.jsonl").write_text("\n\n".join(lines) + "\n", encoding="utf-8")
    words = ["--prompts", str(tmp_path / "prompts.jsonl"), "--output", str(tmp_path / "answers.jsonl")]
    words += ["--preset", PRESET, "--dtype", "float32", "--batch-size", "2", "--max-new-tokens", str(NEW_TOKENS)]
    monkeypatch.setattr(sys, "argv", ["ray_data.py", *words])
    ray_data.main()
    assert (tmp_path / "died").exists() and not (tmp_path / "answers.jsonl.part").exists()
    found = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text(encoding="utf-8").splitlines()]
    texts = {prompt: tokenizer.decode(expected[prompt], skip_special_tokens=True) for prompt in PROMPTS}
    good = [each for each in found if "error" not in each]
    assert good == [{**request, "answer": texts[request["prompt"]]} for request in requests]
    assert [(lines.index(each["line"]), each["line"]) for each in found if "error" in each] == [
        (index, line) for index, line in enumerate(lines) if line in bad
    ]
    assert [index for index, each in enumerate(found) if "error" in each] == [3, 4, 12, 13, 14]
    assert "an object with a `prompt`" in found[4]["error"] and "1 to 2048 tokens" in found[14]["error"]


# --- applications -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def applications(cluster: None) -> Iterator[tuple[str, serve.handle.DeploymentHandle]]:
    """Where two replicas are, and one whose model is shared by two processes, which is asked for directly."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    ours, shared = settings(ray_serve), settings(ray_serve, "--replicas", "1", "--ranks", "2")
    front = ray_serve.Frontend.bind(ours, ray_serve.replicas(ours, Probed))
    targets = [
        serve.RunTarget(front),
        serve.RunTarget(ray_serve.replicas(shared), name="shared", route_prefix=None),
    ]
    with pytest.MonkeyPatch.context() as patch:
        for module in (api, client):  # a minute for the proxy, which no variable changes
            patch.setattr(module, "HTTP_PROXY_TIMEOUT", PATIENCE)
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        # Both at once, and without threads: one that is in Ray while Ray is shut down ends the whole process.
        _, handle = serve.run_many(targets, wait_for_applications_running=False)

    def all_run() -> bool:
        applications = serve.status().applications.values()
        for each in (each for application in applications for each in application.deployments.values()):
            assert "failed to start" not in each.message, each.message  # Serve would try twenty times
        return all(application.status == "RUNNING" for application in applications)

    poll(all_run)
    yield f"http://127.0.0.1:{port}/v1/chat/completions", handle
    serve.shutdown()


@pytest.fixture
def url(applications: tuple[str, Any]) -> str:
    return applications[0]


def body(prompt: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": prompt}], "max_tokens": NEW_TOKENS, **fields}


async def whole(session: aiohttp.ClientSession, url: str, prompt: str, **fields: Any) -> tuple[str, list[str]]:
    """An answer at once: its text, and who gave it."""
    async with session.post(url, json=body(prompt, **fields)) as response:
        assert response.status == 200, await response.text()
        found = await response.json()
    return found["choices"][0]["message"]["content"], [found["system_fingerprint"]]


async def streamed(
    session: aiohttp.ClientSession, url: str, prompt: str, seen: list[str] | None = None
) -> tuple[str, list[str]]:
    """An answer in events: its text, and who gave each piece. `seen` gets the latter as they come."""
    seen, text, last = [] if seen is None else seen, "", ""
    async with session.post(url, json=body(prompt, stream=True)) as response:
        assert response.status == 200 and response.content_type == "text/event-stream"
        async for line in response.content:
            if last := line.decode().removeprefix("data: ").strip() or last:
                if line.strip() and last != "[DONE]":
                    chunk = json.loads(last)
                    assert "error" not in chunk, chunk
                    text += chunk["choices"][0]["delta"]["content"]
                    seen.append(chunk["system_fingerprint"])
    assert last == "[DONE]"
    return text, seen


def session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(PATIENCE))


async def many(url: str, repeats: int) -> dict[str, list[tuple[str, list[str]]]]:
    """All prompts at once, several times, whole and streamed: the answers to each."""
    async with session() as client:
        keys = [prompt for prompt in PROMPTS for _ in range(repeats)]
        calls = [(whole, streamed)[index % 2](client, url, prompt) for index, prompt in enumerate(keys)]
        answers = await asyncio.gather(*calls)
    return {prompt: answers[i * repeats : (i + 1) * repeats] for i, prompt in enumerate(PROMPTS)}


def replicas_of(found: dict[str, list[tuple[str, list[str]]]]) -> set[str]:
    return {name for answers in found.values() for _, names in answers for name in names}


def check_texts(found: dict[str, list[tuple[str, list[str]]]], tokenizer: Any, expected: dict[str, list[int]]) -> None:
    for prompt, answers in found.items():
        text = tokenizer.decode(expected[prompt], skip_special_tokens=True)
        assert [answer for answer, _ in answers] == [text] * len(answers)


def both_answer(url: str, without: str = "") -> set[str]:
    """The two replicas, once requests reach both."""

    async def answers() -> list[tuple[str, list[str]]]:
        async with session() as client:
            return await asyncio.gather(*(whole(client, url, "The river", max_tokens=1) for _ in range(8)))

    def ask() -> set[str] | None:
        names = {name for _, names in asyncio.run(answers()) for name in names}
        return names if len(names) == 2 and without not in names else None

    found: set[str] = poll(ask)
    return found


def process_of(replica: str) -> int:
    return int(replica.rpartition("-")[2])


def test_requests_are_spread_and_answered_as_by_generate(
    url: str, tokenizer: Any, expected: dict[str, list[int]]
) -> None:
    found = asyncio.run(many(url, 4))
    check_texts(found, tokenizer, expected)
    assert len(replicas_of(found)) == 2


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"max_tokens": 5000}, 400),
        ({"max_tokens": 5000, "stream": True}, 400),
        ({"temperature": 1}, 422),
        ({"n": 2}, 422),
    ],
)
def test_what_cannot_be_served_is_refused(url: str, fields: dict[str, Any], status: int) -> None:
    async def run() -> tuple[int, str]:
        async with session() as client, client.post(url, json=body("The river", **fields)) as response:
            return response.status, await response.text()

    found, text = asyncio.run(run())
    assert found == status
    assert status == 422 or "must have 1 to 2048 tokens" in text


class Probed(ray_serve.Engine):  # type: ignore[misc]
    """A replica that a test can look into."""

    async def probe(self, what: Callable[[Any], Any]) -> Any:
        return what(self.manager)


def on_managers(what: Callable[[Any], Any]) -> list[Any]:
    """What a function returns for the manager of each replica."""
    handle = serve.get_deployment_handle("Probed", "default")
    return list(handle.broadcast("probe", what).results(timeout_s=PATIENCE))


def test_a_client_that_vanishes_has_its_request_cancelled(url: str) -> None:
    """One in the middle of a stream, and one that waits for its whole answer."""

    async def run() -> None:
        async with session() as client:
            stream = await client.post(url, json=body("The river", max_tokens=1900, stream=True))
            await stream.content.readline()
            waiting = asyncio.create_task(client.post(url, json=body("The river", max_tokens=1900)))
            while sum(await asyncio.to_thread(on_managers, num_requests)) < 2:
                await asyncio.sleep(0.05)
            stream.close()
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)

    asyncio.run(asyncio.wait_for(run(), PATIENCE))
    poll(lambda: sum(on_managers(num_requests)) == 0)


def test_a_replica_that_is_killed_under_load_loses_no_answer(
    url: str, tokenizer: Any, expected: dict[str, list[int]]
) -> None:
    """Its streams go on with the other one, and Ray starts another."""
    killed = ""

    async def run() -> dict[str, list[tuple[str, list[str]]]]:
        nonlocal killed
        async with session() as client:
            seen: list[str] = []
            first = asyncio.create_task(streamed(client, url, PROMPTS[0], seen))
            rest = asyncio.create_task(many(url, 6))
            while len(seen) < 3:
                await asyncio.sleep(0.01)
            killed = seen[0]
            os.kill(process_of(killed), signal.SIGKILL)
            found = await rest
            found[PROMPTS[0]].append(await first)
        return found

    found = asyncio.run(asyncio.wait_for(run(), PATIENCE))
    check_texts(found, tokenizer, expected)
    moved = found[PROMPTS[0]][-1][1]
    assert moved[0] == killed and len(set(moved)) == 2, "the stream ended before its replica was killed"
    assert killed not in both_answer(url, without=killed)


def test_a_replica_whose_manager_died_is_replaced(url: str, tokenizer: Any, expected: dict[str, list[int]]) -> None:
    """Meanwhile, all are answered."""
    before = both_answer(url)
    broken = sorted(before)[0]

    def breaks(manager: Any) -> None:
        if os.getpid() == process_of(broken):
            manager.input_queue.put("no request")

    on_managers(breaks)
    check_texts(asyncio.run(many(url, 4)), tokenizer, expected)
    assert len(both_answer(url, without=broken) - before) == 1


# --- a model that several processes share -----------------------------------------------------------------------------


def test_two_processes_share_a_model(
    applications: tuple[str, Any], tokenizer: Any, expected: dict[str, list[int]]
) -> None:
    """By tensor parallelism, here on a CPU."""

    async def run() -> list[Any]:
        calls = applications[1].options(stream=True).complete
        prompts = (tokenizer(prompt).input_ids for prompt in PROMPTS)
        return await asyncio.gather(*(all_of(calls.remote(prompt, NEW_TOKENS, True)) for prompt in prompts))

    answers = asyncio.run(asyncio.wait_for(run(), PATIENCE))
    assert [tokens for tokens, _ in answers] == [expected[prompt] for prompt in PROMPTS]
