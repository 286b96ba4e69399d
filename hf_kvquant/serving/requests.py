"""`OpenRequests`: every request from its arrival until its client has an answer or has gone.

A request of a client asks for one answer or several, each of which is a request of the scheduler. transformers keeps a
callback for each of those and forgets it when the request ends by itself. It delivers nothing to a request that is
cancelled, and nothing to one that it drops while its thread ends. So this registry, and not transformers', decides who
gets what: each request ends exactly once, with one outcome.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
import uuid
from collections.abc import Callable, Collection, Sequence

from transformers.generation.continuous_batching.continuous_api import OutputRouter
from transformers.generation.continuous_batching.requests import GenerationOutput

from ..common.errors import UnreadableAnswer
from .metrics import Metrics
from .pieces import Piece
from .writing import Writer

SHUT_DOWN = "the server shut down before the answer was complete"


@dataclasses.dataclass
class OpenAnswer:
    """One answer that is being written: one request of the scheduler.

    Attributes:
        answer_id: Unique in this process.
        request: Whose it is.
        index: Among the answers of the request.
        writer: Makes its text.
        end_tokens: Any of them ends it.
        is_followed: Whether somebody has to see each token as it comes.
        num_generated: Tokens that the generation thread has made.
        last_token: When the newest of them was made, in seconds of `time.perf_counter`.
        is_over: Whether it has ended.
    """

    answer_id: str
    request: OpenRequest
    index: int
    writer: Writer
    end_tokens: Collection[int]
    is_followed: bool
    num_generated: int = 0
    last_token: float = 0.0
    is_over: bool = False


@dataclasses.dataclass
class OpenRequest:
    """One request whose client waits.

    Attributes:
        request_id: Unique in this process.
        arrived: When, in seconds of `time.perf_counter`.
        status: HTTP status of the answer once it has begun, or of the error that is to be sent.
        is_admitted: Whether it may wait or run.
        answers: Those that the scheduler has had.
        news: Pieces of them, for whoever sends them to the client; `None` if there will be no more.
        outcome: How it ended, of `metrics.OUTCOMES`; `None` while it is open.
        error: Why it did not finish.
    """

    request_id: str
    arrived: float
    status: int = 0
    is_admitted: bool = False
    answers: list[OpenAnswer] = dataclasses.field(default_factory=list)
    news: asyncio.Queue[Piece | None] = dataclasses.field(default_factory=asyncio.Queue)
    outcome: str | None = None
    error: str | None = None

    @property
    def num_open(self) -> int:
        """Answers that are missing."""
        return sum(not answer.is_over for answer in self.answers) if self.answers else 1


class OpenRequests:
    """The open requests of a server. All methods but `note` run on the event loop.

    Args:
        metrics: Where outcomes and tokens are counted.

    Attributes:
        by_id: The open requests.
        answers: The answers of open requests, by their id.
        cancel: Takes an answer from the scheduler; set by the generation.
        loop: The event loop, from the first request on.
        is_stopping: Whether the server takes no more requests.
    """

    def __init__(self, metrics: Metrics) -> None:
        self.metrics = metrics
        self.by_id: dict[str, OpenRequest] = {}
        self.answers: dict[str, OpenAnswer] = {}
        self.cancel: Callable[[str], None] = lambda answer_id: None
        self.loop: asyncio.AbstractEventLoop | None = None
        self.is_stopping = False

    def accept(self) -> OpenRequest:
        """A new request. Its name is ours: two clients may send the same `x-request-id`, and would share an answer."""
        self.loop = asyncio.get_running_loop()
        request = OpenRequest(uuid.uuid4().hex, time.perf_counter())
        self.by_id[request.request_id] = request
        return request

    def num_unanswered(self) -> int:
        """Answers that wait or run."""
        requests = list(self.by_id.values())
        return sum(request.num_open for request in requests if request.is_admitted and request.outcome is None)

    def open(
        self, request: OpenRequest, writer: Writer, end_tokens: Collection[int], *, is_followed: bool
    ) -> OpenAnswer:
        """A new answer of a request, which goes to the scheduler next."""
        index = len(request.answers)
        answer = OpenAnswer(f"{request.request_id}-{index}", request, index, writer, end_tokens, is_followed)
        request.answers.append(answer)
        self.answers[answer.answer_id] = answer
        return answer

    def note(self, output: GenerationOutput) -> bool:
        """Count new tokens, in the generation thread. Returns whether the output is to be passed on."""
        answer = self.answers.get(output.request_id)
        if answer is None:
            if not output.is_finished():
                # Its client has gone, and the cancellation was taken from the queue before the request itself.
                self.cancel(output.request_id)
            return False
        num_new = len(output.generated_tokens) - answer.num_generated
        if num_new > 0:
            now, arrived, num_later = time.perf_counter(), answer.request.arrived, num_new
            if answer.num_generated == 0:
                self.metrics.queue.add(max(output.lifespan[0] - arrived, 0.0))
                self.metrics.first_token.add(now - arrived)
                answer.last_token, num_later = now, num_new - 1
            if num_later:
                self.metrics.between_tokens.add((now - answer.last_token) / num_later, num_later)
                answer.last_token = now
            answer.num_generated += num_new
            self.metrics.output_tokens.inc(num_new)
            self.metrics.rate.add(num_new)
        return answer.is_followed or output.is_finished()

    def pass_on(self, outputs: Sequence[GenerationOutput]) -> None:
        """Write what is new of answers, unless they have ended otherwise."""
        for output in outputs:
            answer = self.answers.get(output.request_id)
            if answer is None or answer.is_over:
                continue
            if output.error is not None:
                answer.is_over = True
                self._fail(answer.request, "failed", output.error)
                continue
            try:
                self._write(answer, output)
            except UnreadableAnswer as error:
                self._fail(answer.request, "failed", str(error))

    def end_all(self, outcome: str, error: str, status: int) -> None:
        """End what was submitted and is open, and say why to each client."""
        for request in list(self.by_id.values()):
            if request.answers and request.outcome is None:
                request.status = status
                self._fail(request, outcome, error)

    def close(self, request: OpenRequest) -> None:
        """Forget a request whose answer is sent, or whose client has gone."""
        self.by_id.pop(request.request_id, None)
        if request.outcome is None:
            self._cancel_answers(request)
            self._end(request, "rejected" if request.status >= 400 and not request.answers else "cancelled")
        for answer in request.answers:
            self.answers.pop(answer.answer_id, None)

    def _write(self, answer: OpenAnswer, output: GenerationOutput) -> None:
        piece = answer.writer.piece(answer.index, output, answer.end_tokens)
        if piece.reason is not None:
            answer.is_over = True
            if not output.is_finished():
                self.cancel(answer.answer_id)
        elif not piece.texts:
            return
        answer.request.news.put_nowait(piece)
        if answer.request.num_open == 0:
            self.metrics.whole.add(time.perf_counter() - answer.request.arrived)
            self._end(answer.request, "finished")

    def _fail(self, request: OpenRequest, outcome: str, error: str) -> None:
        self._cancel_answers(request)
        self._end(request, outcome, error)

    def _cancel_answers(self, request: OpenRequest) -> None:
        for answer in request.answers:
            if not answer.is_over:
                answer.is_over = True
                self.cancel(answer.answer_id)

    def _end(self, request: OpenRequest, outcome: str, error: str | None = None) -> None:
        request.outcome, request.error = outcome, error
        request.news.put_nowait(None)
        self.metrics.outcomes[outcome].inc()


class Router(OutputRouter):
    """Takes what the generation thread makes to the open requests, on the event loop.

    transformers' server registers the callback of a stream after the request itself. An output in between, perhaps the
    last one, would go to a queue that nobody reads. Here an answer is open before its request is added.
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
