"""`OpenRequests`: every request from its arrival until its client has an answer or has gone.

transformers keeps a callback for each request and forgets it when the request ends by itself. It delivers nothing to a
request that is cancelled, and nothing to one that it drops while its thread ends. So this registry, and not
transformers', decides who gets what: each request ends exactly once, with one outcome.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import time
import uuid
from collections.abc import Callable
from typing import Any

from transformers.generation.continuous_batching.continuous_api import OutputRouter
from transformers.generation.continuous_batching.requests import GenerationOutput, RequestStatus

from .metrics import Metrics

SHUT_DOWN = "the server shut down before the answer was complete"


@dataclasses.dataclass
class OpenRequest:
    """One request whose client waits.

    Attributes:
        request_id: Unique in this process.
        arrived: When, in seconds of `time.perf_counter`.
        status: HTTP status of the answer once it has begun, or of the error that is to be sent.
        is_admitted: Whether it may wait or run.
        is_submitted: Whether the scheduler has had it.
        is_streamed: Whether its client gets each token.
        sampling: How its tokens are chosen, as further arguments of the manager's `add_request`.
        num_tokens: Generated so far.
        on_output: Takes what is generated, on the event loop; `None` before there is anybody to take it.
        outcome: How it ended, of `metrics.OUTCOMES`; `None` while it is open.
        error: Why it did not finish.
    """

    request_id: str
    arrived: float
    status: int = 0
    is_admitted: bool = False
    is_submitted: bool = False
    is_streamed: bool = False
    sampling: dict[str, Any] = dataclasses.field(default_factory=dict)
    num_tokens: int = 0
    on_output: Callable[[GenerationOutput], None] | None = None
    outcome: str | None = None
    error: str | None = None


class OpenRequests:
    """The open requests of a server. All methods but `note` run on the event loop.

    Args:
        metrics: Where outcomes and tokens are counted.

    Attributes:
        by_id: The open requests.
        cancel: Takes a request from the scheduler; set by the generation.
        loop: The event loop, from the first request on.
        is_stopping: Whether the server takes no more requests.
    """

    def __init__(self, metrics: Metrics) -> None:
        self.metrics = metrics
        self.by_id: dict[str, OpenRequest] = {}
        self.cancel: Callable[[str], None] = lambda request_id: None
        self.loop: asyncio.AbstractEventLoop | None = None
        self.is_stopping = False

    def accept(self) -> OpenRequest:
        """A new request. Its name is ours: two clients may send the same `x-request-id`, and would share an answer."""
        self.loop = asyncio.get_running_loop()
        request = OpenRequest(uuid.uuid4().hex, time.perf_counter())
        self.by_id[request.request_id] = request
        return request

    def num_unanswered(self) -> int:
        """Requests that wait or run."""
        return sum(request.is_admitted and request.outcome is None for request in list(self.by_id.values()))

    def submit(self, request_id: str, num_prompt_tokens: int, is_streamed: bool) -> None:
        """Note that a request goes to the scheduler."""
        request = self.by_id[request_id]
        request.is_submitted, request.is_streamed = True, is_streamed
        self.metrics.prompt_tokens.inc(num_prompt_tokens)

    def note(self, output: GenerationOutput) -> bool:
        """Count new tokens, in the generation thread. Returns whether the output is to be passed on."""
        request = self.by_id.get(output.request_id)
        if request is None:
            if not output.is_finished():
                # Its client has gone, and the cancellation was taken from the queue before the request itself.
                self.cancel(output.request_id)
            return False
        num_new = len(output.generated_tokens) - request.num_tokens
        if num_new > 0:
            if request.num_tokens == 0:
                self.metrics.first_token.observe(time.perf_counter() - request.arrived)
            request.num_tokens += num_new
            self.metrics.output_tokens.inc(num_new)
            self.metrics.rate.add(num_new)
        return request.is_streamed or output.is_finished()

    def pass_on(self, outputs: list[GenerationOutput]) -> None:
        """Give outputs to those who wait for them, unless they have ended otherwise."""
        for output in outputs:
            request = self.by_id.get(output.request_id)
            if request is None or request.outcome is not None:
                continue
            if output.is_finished():
                self._end(request, "finished" if output.error is None else "failed", output.error)
            self._tell(request, output)

    def end_all(self, outcome: str, error: str, status: int) -> None:
        """End what was submitted and is open, and say why to each client."""
        for request in list(self.by_id.values()):
            if request.is_submitted and request.outcome is None:
                request.status = status
                self._end(request, outcome, error)
                self.cancel(request.request_id)
                self._tell(request, GenerationOutput(request.request_id, error=error, status=RequestStatus.FAILED))

    def close(self, request: OpenRequest) -> None:
        """Forget a request whose answer is sent, or whose client has gone."""
        self.by_id.pop(request.request_id, None)
        if request.outcome is not None:
            return
        if request.is_submitted:
            self.cancel(request.request_id)
        self._end(request, "rejected" if request.status >= 400 and not request.is_submitted else "cancelled")

    def _tell(self, request: OpenRequest, output: GenerationOutput) -> None:
        if output.error is not None and request.is_streamed:
            # transformers puts it between quotation marks without escaping it.
            output = dataclasses.replace(output, error=json.dumps(output.error)[1:-1])
        if request.on_output is not None:
            request.on_output(output)

    def _end(self, request: OpenRequest, outcome: str, error: str | None = None) -> None:
        request.outcome, request.error = outcome, error
        self.metrics.outcomes[outcome].inc()


class Router(OutputRouter):
    """Takes what the generation thread makes to the open requests, on the event loop.

    transformers registers the callback of a stream after the request itself. An output in between, perhaps the last
    one, would go to a queue that nobody reads. Here callbacks are looked up on the event loop, which is later.
    """

    def __init__(self, requests: OpenRequests) -> None:
        super().__init__()
        self._requests = requests

    def deliver(self, output: GenerationOutput) -> None:
        """See `OutputRouter`."""
        self.deliver_batch([output])

    def deliver_batch(self, outputs: list[GenerationOutput]) -> None:
        """See `OutputRouter`."""
        passed = [output for output in outputs if self._requests.note(output)]
        loop = self._requests.loop
        if passed and loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(self._requests.pass_on, passed)
