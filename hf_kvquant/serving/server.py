"""`Server`: the whole, run by uvicorn. It begins with the model in place and ends in good order.

uvicorn's own end closes the door, lets clients finish, and then cuts them off without a word. Here whoever comes later
is told, and `/health` and `/metrics` answer until the last request has ended. Those that are left get a message. The
end is on time, whatever runs. A second signal of either kind ends the process at once. A signal is not raised again at
the end: the exit code is 0.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn
from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from transformers.cli.serving.server import build_server
from transformers.cli.serving.utils import CBWorkerDeadError
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from ..common.errors import RefusedRequest
from .fields import CHAT, COMPLETION
from .front import PAGE, FrontDoor, refusal
from .generation import Generation
from .handlers import Handler, ResponseHandler
from .metrics import Metrics
from .model import PatchedModels
from .requests import SHUT_DOWN, OpenRequests

# How often somebody looks whether the generation thread has left requests behind.
WATCH_SECONDS = 0.25
# Most seconds at the end for clients to take the last message, and for the step that runs; and the share of all.
GRACE_SECONDS, GRACE_SHARE = 5, 0.2
# The chat page has its own styles and script, and talks to this server alone.
POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
LEAST_SECONDS = 1  # of the whole end, so that there is time for messages


def start(
    models: PatchedModels,
    batching: ContinuousBatchingConfig,
    *,
    max_waiting: int,
    is_sampled: bool = False,
    enable_cors: bool = False,
    api_key: str | None = None,
) -> FrontDoor:
    """Start generation, and make the application that answers.

    Args:
        models: With the model loaded.
        batching: Pages and batches.
        max_waiting: Requests that may wait for their first step.
        is_sampled: Whether requests may sample.
        enable_cors: Whether pages of other sites may ask.
        api_key: What clients must send; `None` if nothing.

    Raises:
        ImportError, MemoryError, NotImplementedError, ValueError: See `Generation.start`.
    """
    metrics = Metrics()
    generation = Generation(batching, OpenRequests(metrics), is_sampled)
    generation.start(models.model, models.tokenizer)
    generation.watch(metrics)
    responses: Any = ResponseHandler(models, generation)
    unserved: Any = None  # their routes end at the front door
    chats: Any = Handler(models, generation, CHAT)
    completions: Any = Handler(models, generation, COMPLETION)
    state: Any = generation  # asked whether it lives
    app = build_server(
        models,
        chats,
        completions,
        response_handler=responses,
        transcription_handler=unserved,
        systemone_handler=unserved,
        generation_state=state,
        enable_cors=enable_cors,
    )

    @app.get("/v1/models/{name:path}")
    def one_model(name: str) -> JSONResponse:
        if name != models.served_name:
            message = f"there is no model {name!r}, only {models.served_name!r}."
            return refusal(404, message, param="model", code="model_not_found")
        return JSONResponse(models.card())

    chat_page = Path(__file__).with_name("chat.html").read_text(encoding="utf-8")

    @app.get(PAGE)
    def chat() -> HTMLResponse:
        return HTMLResponse(chat_page, headers={"content-security-policy": POLICY})

    @app.get("/metrics")
    def page() -> Response:
        return Response(metrics.page(), media_type=CONTENT_TYPE_LATEST)

    @app.exception_handler(HTTPException)
    async def failed(_: Request, error: HTTPException) -> JSONResponse:
        return refusal(error.status_code, str(error.detail))

    @app.exception_handler(RefusedRequest)
    async def refused(_: Request, error: RefusedRequest) -> JSONResponse:
        return refusal(error.status, error.message, error.param, error.code)

    @app.exception_handler(RequestValidationError)
    async def malformed(_: Request, error: RequestValidationError) -> JSONResponse:
        return refusal(400, "; ".join(f"the body must be a JSON object: {each['msg']}" for each in error.errors()))

    @app.exception_handler(CBWorkerDeadError)
    async def dead(_: Request, error: CBWorkerDeadError) -> JSONResponse:
        return refusal(503, str(error))

    return FrontDoor(app, generation, max_waiting, api_key)


def bind(host: str, port: int) -> socket.socket:
    """A socket of this address, which does not listen yet. Port 0 is any free one.

    Raises:
        OSError: The address is taken, or is not one of this machine.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    bound = socket.socket(family, kind, protocol)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError:
        bound.close()
        raise
    return bound


class Server(uvicorn.Server):
    """Serves until a signal.

    Args:
        app: What answers.
        shutdown_timeout: Seconds from a signal to the end, most of which running requests have to finish.
        log_level: Of uvicorn.
    """

    def __init__(self, app: FrontDoor, *, shutdown_timeout: float, log_level: str = "warning") -> None:
        super().__init__(uvicorn.Config(app, log_level=log_level, access_log=False))
        self._requests, self._generation = app.requests, app.generation
        self._shutdown_timeout = max(shutdown_timeout, LEAST_SECONDS)
        self._for_requests = shutdown_timeout - min(GRACE_SECONDS, GRACE_SHARE * shutdown_timeout)
        self._stopped = 0.0  # when, in seconds of `time.monotonic`

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """First let requests finish, then end at once. uvicorn calls it for SIGINT and SIGTERM."""
        if self._requests.is_stopping:
            os._exit(128 + sig)
        self.stop()
        # Neither a long step nor anything else that does not hear of the end may delay it.
        last = threading.Timer(self._shutdown_timeout, os._exit, (0,))
        last.daemon = True
        last.start()
        left = f"{self._requests.num_unanswered()} requests have {self._for_requests:g} seconds"
        print(f"Stopping: {left}. Signal again to end now.", flush=True)

    def stop(self) -> None:
        """Take no more requests, and end once the open ones have ended, or when their time is over."""
        self._stopped = time.monotonic()
        self._requests.is_stopping = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """See `uvicorn.Server`."""
        await super().startup(sockets)
        self._watching = asyncio.ensure_future(self._watch())
        for each in sockets or []:
            host, port = each.getsockname()[:2]
            print(f"Ready on http://{f'[{host}]' if ':' in host else host}:{port}/v1", flush=True)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """See `uvicorn.Server`."""
        if not self._requests.is_stopping:
            self.stop()
        most: Any = self._seconds_left()  # uvicorn's annotation wants whole seconds, and its code takes any
        self.config.timeout_graceful_shutdown = most
        try:
            await super().shutdown(sockets)
        finally:
            self._watching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watching
            await asyncio.to_thread(self._generation.stop, self._seconds_left())

    def _seconds_left(self) -> float:
        return max(self._stopped + self._shutdown_timeout - time.monotonic(), 0.0)

    async def _watch(self) -> None:
        while True:
            self._generation.fail_lost()
            if self._requests.is_stopping:
                self._drain()
            await asyncio.sleep(WATCH_SECONDS)

    def _drain(self) -> None:
        """End requests whose time is over, and then the server."""
        passed = time.monotonic() - self._stopped
        if passed >= self._for_requests:  # again and again: some were accepted before the signal and are submitted now
            self._requests.end_all("cancelled", SHUT_DOWN, 503)
        is_late = passed >= (self._for_requests + self._shutdown_timeout) / 2
        self.should_exit |= is_late or not any(each.is_admitted for each in self._requests.by_id.values())
