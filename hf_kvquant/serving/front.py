"""`FrontDoor`: what every HTTP request passes before transformers' server sees it.

What transformers' server does that made it necessary:

- It takes any number of requests. Here a full queue answers 429.
- A client that leaves while it waits for an answer in one piece is not noticed, and its request runs to the end. Here
  somebody listens for every client.
- `/reset` and `/load_model` let any client unload the model, and other routes need a model of another kind. They are
  not there.
- It uses the `x-request-id` of a client as the name of its request. Two requests of one name would share an answer.
- It reads bodies of any size.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets

from fastapi.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from transformers.cli.serving.utils import X_REQUEST_ID

from .fields import BOTH
from .forms import error_body
from .generation import Generation
from .responses import ROUTE as RESPONSES

GENERATING = (*BOTH, RESPONSES)
HEALTH, PAGE = "/health", "/"
OPEN = (HEALTH, PAGE)  # to anybody, also where a key is asked for; the page itself asks for the key
ROUTES = (*GENERATING, "/v1/models", "/v1/models/{model}", HEALTH, "/metrics", PAGE)
RETRY_SECONDS = 1
# Bytes of a body for each token that a request may have, and the least limit.
BYTES_PER_TOKEN, MIN_BODY = 64, 2**20


def refusal(status: int, message: str, param: str | None = None, code: str | None = None) -> JSONResponse:
    """An error as OpenAI's API spells it. The client may try again if the server is only busy."""
    more = {429: {"retry-after": str(RETRY_SECONDS)}, 401: {"www-authenticate": "Bearer"}}
    return JSONResponse(error_body(status, message, param, code), status, more.get(status))


class FrontDoor:
    """An ASGI application in front of another.

    Args:
        app: transformers' server.
        generation: Started.
        max_waiting: Requests that may wait for their first step.
        api_key: What clients must have; `None` if they need none.
    """

    def __init__(self, app: ASGIApp, generation: Generation, max_waiting: int, api_key: str | None = None) -> None:
        self._authorization = None if api_key is None else f"Bearer {api_key}".encode()
        self._app, self.generation, self._max_waiting = app, generation, max_waiting
        self.requests = generation.requests
        self._max_body = max(MIN_BODY, BYTES_PER_TOKEN * generation.room)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, or take part in the start and the end of the server."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
        elif not self._is_allowed(scope):
            message = "the API key must be that of this server, got another or none. Send `Authorization: Bearer KEY`."
            await refusal(401, message, code="invalid_api_key")(scope, receive, send)
        elif scope["path"] == HEALTH and self.requests.is_stopping:
            await JSONResponse({"status": "stopping"}, 503)(scope, receive, send)
        elif scope["path"].startswith("/v1/models/") or (scope["path"] in ROUTES and scope["path"] not in GENERATING):
            await self._app(scope, receive, send)
        elif scope["path"] not in ROUTES:
            await refusal(404, f"the path must be one of {', '.join(ROUTES)}.")(scope, receive, send)
        elif scope["method"] != "POST":
            await self._app(scope, receive, send)
        else:
            await self._generate(scope, receive, send)

    def close(self) -> None:
        """Stop generation, if it is still running."""
        self.generation.stop()

    def _is_allowed(self, scope: Scope) -> bool:
        """Whether a client has the key. Browsers ask without it which methods of other sites they may use."""
        if self._authorization is None or scope["path"] in OPEN or scope["method"] == "OPTIONS":
            return True
        given = dict(scope["headers"]).get(b"authorization", b"")
        return secrets.compare_digest(given, self._authorization)

    async def _generate(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = self.requests.accept()
        name = X_REQUEST_ID.encode()
        others = [header for header in scope["headers"] if header[0] != name]
        scope = {**scope, "headers": [*others, (name, request.request_id.encode())]}

        async def noting_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                request.status = message["status"]
            await send(message)

        try:
            body = await self._read(receive)
            if body is None:
                return
            refused = self._refusal(body)
            request.is_admitted = refused is None
            if refused is not None:
                await refused(scope, receive, noting_send)
            else:
                await self._answer(scope, body, receive, noting_send)
        finally:
            self.requests.close(request)

    async def _read(self, receive: Receive) -> bytes | None:
        """The body, or as much of it as shows that it is too long; `None` if the client leaves."""
        body = bytearray()
        while len(body) <= self._max_body:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            body += message.get("body", b"")
            if not message.get("more_body", False):
                break
        return bytes(body)

    def _refusal(self, body: bytes) -> JSONResponse | None:
        if len(body) > self._max_body:
            message = f"the prompt is too long: the body must have at most {self._max_body:,} bytes. Shorten it."
            return refusal(413, message, code="context_length_exceeded")
        if self.requests.is_stopping:
            return refusal(503, "the server is shutting down.")
        if not self.generation.is_alive():
            error = self.generation.manager.background_thread_status.fatal_error
            return refusal(503, f"the generation thread has ended: {error}")
        num_waiting = self.requests.num_unanswered() - self.generation.num_running()
        if num_waiting >= self._max_waiting:
            return refusal(429, f"{num_waiting} requests wait, and {self._max_waiting} may. Try again later.")
        return None

    async def _answer(self, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
        """Let the server answer for as long as the client is there."""
        messages = [{"type": "http.request", "body": body, "more_body": False}]
        has_left = asyncio.Event()

        async def replay() -> Message:
            if messages:
                return messages.pop()
            await has_left.wait()
            return {"type": "http.disconnect"}

        async def leaves() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            has_left.set()

        async def answers() -> None:
            await self._app(scope, replay, send)

        answering, leaving = asyncio.ensure_future(answers()), asyncio.ensure_future(leaves())
        try:
            await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if answering.done():
                answering.result()
        finally:
            for task in (answering, leaving):
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError, Exception):
                    await task
