"""A server in a thread of the test's own process, and what tests of it share: clients, metrics, a check for leaks."""

from __future__ import annotations

import asyncio
import contextlib
import re
import threading
from collections.abc import Iterator
from typing import Any

import httpx2
import openai
import torch
from transformers import ContinuousBatchingConfig
from waiting import PATIENCE, until

from hf_kvquant import KVQuantConfig
from hf_kvquant.cli.serve import set_log_level
from hf_kvquant.serving.front import FrontDoor
from hf_kvquant.serving.model import PatchedModels
from hf_kvquant.serving.server import Server, bind, start

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PAGE = 128
NAME = "org/village"  # of the model that the fixture `running` serves


class Running:
    """A server that runs.

    Attributes:
        app: The application.
        url: Where it listens.
        server: uvicorn's.
        thread: Its thread.
    """

    def __init__(self, app: FrontDoor, server: Server, url: str, thread: threading.Thread) -> None:
        self.app, self.server, self.url, self.thread = app, server, url, thread
        self.generation = app.generation
        self.processor = app.generation.processor
        self.http = httpx2.Client(base_url=url, timeout=PATIENCE)

    @property
    def model_name(self) -> str:
        """The model's name."""
        return str(self.http.get("/v1/models").json()["data"][0]["id"])

    def openai(self, **options: Any) -> openai.OpenAI:
        """A client that asks once and does not try again."""
        return openai.OpenAI(
            base_url=f"{self.url}/v1", api_key="none", max_retries=0, **{"timeout": PATIENCE, **options}
        )

    def complete(self, **body: Any) -> httpx2.Response:
        """Ask for a completion."""
        return self.http.post("/v1/completions", json=body)

    def metrics(self) -> dict[str, float]:
        """All samples by name and labels."""
        lines = [line for line in self.http.get("/metrics").text.splitlines() if not line.startswith("#")]
        return {name.removeprefix("hf_kvquant_"): float(value) for name, value in (line.split() for line in lines)}

    def outcomes(self) -> dict[str, int]:
        """How requests ended."""
        counts = {name: value for name, value in self.metrics().items() if name.startswith("requests_total")}
        return {re.findall('"(.*)"', name)[0]: int(value) for name, value in counts.items()}

    def is_idle(self) -> bool:
        """Whether nothing runs, waits or is open."""
        return not (self.generation.num_running() or self.generation.num_waiting() or self.app.requests.by_id)


class Gate:
    """What steps of the generation thread wait for; then they raise `error`, if there is one."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.error: BaseException | None = None


@contextlib.contextmanager
def held(running: Running) -> Iterator[Gate]:
    """Let no step run in a `with` block, so that requests stay where they are."""
    step, gate = running.processor._generation_step, Gate()

    def waiting_step(model: Any) -> None:
        assert gate.opened.wait(PATIENCE)
        if gate.error is not None:
            raise gate.error
        step(model)

    running.processor._generation_step = waiting_step
    try:
        yield gate
    finally:
        if gate.error is None:
            running.processor._generation_step = step
        gate.opened.set()


@contextlib.contextmanager
def serving(
    folder: str,
    preset: str = "int4-token",
    *,
    max_waiting: int = 1024,
    shutdown_timeout: float = 5,
    is_sampled: bool = False,
    api_key: str | None = None,
    served_name: str | None = None,
    chat_template: str | None = None,
    **batching: Any,
) -> Iterator[Running]:
    """Serve a model on a free port. At the end no page may be taken."""
    set_log_level("warning")
    config = KVQuantConfig.from_preset(preset)
    names = {"served_name": served_name, "chat_template": chat_template}
    models = PatchedModels(folder, config, lambda model: None, **names, device=DEVICE, dtype="float32")
    settings = ContinuousBatchingConfig(**{"page_size": PAGE, "num_blocks": 16, "max_batch_tokens": 512, **batching})
    app = start(models, settings, max_waiting=max_waiting, is_sampled=is_sampled, api_key=api_key)
    server = Server(app, shutdown_timeout=shutdown_timeout)
    with bind("127.0.0.1", 0) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])))
        thread.start()
        running = Running(app, server, url, thread)
        try:
            until(lambda: server.started, thread.is_alive)
            yield running
        finally:
            running.http.close()
            server.should_exit = True
            thread.join(PATIENCE)
            assert not thread.is_alive() and not running.generation.manager.is_running()
    check_nothing_leaks(running.processor)


def check_nothing_leaks(processor: Any) -> None:
    """All memory is free, once pages that are kept for later requests are given up."""
    cache = processor.cache
    assert cache.allocator.block_table == {}
    assert not processor.scheduler.active_requests and not processor.scheduler.waiting_requests
    cache.evict_cached_blocks()
    cache.pool.try_to_free_sectors()
    assert cache.pool.num_free_sectors == cache.num_sectors
