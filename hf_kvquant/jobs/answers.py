"""Gives requests to a manager of continuous batching, and takes its answers in the order in which they are done."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from transformers import GenerationConfig, PreTrainedModel

from ..batching.grammars import FAILED, Grammars
from ..batching.sampling import KEY
from ..batching.support import check_version
from ..common.errors import UnreadableAnswer
from ..upstream.releases import HAS_PAGES
from .prompts import Request

if HAS_PAGES:
    from transformers import ContinuousBatchingConfig

    from ..serving.pieces import Piece

# Requests in a manager at once, for each that it runs. Those that wait take the place of those that are done.
_WAITING_SHARE = 1.25
_POLL_S = 1.0


@dataclasses.dataclass
class Answer:
    """What is written for a request.

    Attributes:
        request: What was asked.
        tokens: All that the model has written.
        is_complete: Whether a token has ended it, and not its length.
        piece: What a client of the server would get, for a line in OpenAI's form.
        problem: Why it cannot go on; `None` if it can.
    """

    request: Request
    tokens: list[int] = dataclasses.field(default_factory=list)
    is_complete: bool = False
    piece: Piece | None = None
    problem: str | None = None

    def note(self, output: Any, ends: Collection[int]) -> bool:
        """Go on with what the manager has written. Returns whether the answer has ended.

        Args:
            output: All of it so far.
            ends: Tokens that end an answer.
        """
        self.tokens, self.problem = output.generated_tokens, output.error
        if self.problem is not None:
            return True
        self.is_complete = bool(self.tokens) and self.tokens[-1] in ends
        if self.request.writer is None:
            return bool(output.is_finished())
        try:
            new = self.request.writer.piece(self.request.choice, output, ends)
        except UnreadableAnswer as error:
            self.problem = str(error)
            return True
        if self.piece is None:
            self.piece = new
        else:
            self.piece.add(new)
        return new.reason is not None


@contextlib.contextmanager
def made(model: PreTrainedModel, generation_config: GenerationConfig, batching: Mapping[str, Any]) -> Iterator[Any]:
    """A manager of a patched model, which has taken no memory yet. It ends with the block.

    Args:
        model: Patched.
        generation_config: Of all requests.
        batching: Arguments of `ContinuousBatchingConfig`.

    Raises:
        ImportError, NotImplementedError, ValueError: Pages do not serve the model or a setting.
    """
    check_version()
    init: Any = model.init_continuous_batching
    manager = init(generation_config, ContinuousBatchingConfig(**batching))
    try:
        yield manager
    finally:
        if manager.is_running():
            manager.stop(hard_stop=True)
        manager.destroy()


def start(manager: Any, grammars: Grammars) -> int:
    """Let a manager take its memory and run. Returns the number of tokens that its pages hold.

    Args:
        manager: Of `made`.
        grammars: Of the model.

    Raises:
        MemoryError: The pages do not fit.
    """
    manager.grammars = grammars
    manager.warmup()
    room: int = manager.batch_processor.cache.room
    manager.start()
    return room


def answered(manager: Any, requests: Iterable[Request], ends: Collection[int]) -> Iterator[Answer]:
    """The answers to all requests, the first that is done first.

    Only a bounded number of requests is taken at once.

    Args:
        manager: Running.
        requests: Any number.
        ends: Tokens that end an answer.

    Raises:
        Exception: What ended the manager.
    """
    most = int(manager.continuous_batching_config.max_requests_per_batch * _WAITING_SHARE)
    running: dict[str, Answer] = {}
    waiting = iter(requests)
    while True:
        while len(running) < most and (request := next(waiting, None)) is not None:
            options = {} if request.sampling is None else {KEY: request.sampling}
            name = manager.add_request(
                request.tokens, max_new_tokens=request.max_new_tokens, streaming=request.is_followed, **options
            )
            if name is None:  # the manager takes no more
                raise _failure(manager, "")
            running[name] = Answer(request)
        if not running:
            return
        output = manager.get_result(timeout=_POLL_S)
        if output is None:
            if not manager.is_running():
                raise _failure(manager, "")
        elif output.error is not None and not output.error.startswith(FAILED):
            raise _failure(manager, output.error)
        elif output.request_id in running and running[output.request_id].note(output, ends):
            if not output.is_finished():
                manager.cancel_request(output.request_id)
            yield running.pop(output.request_id)


def _failure(manager: Any, error: str) -> BaseException:
    """What ended a manager. Requests are checked before they are added, so none fails alone but by its grammar."""
    manager.stop(hard_stop=True)
    found: BaseException | None = manager.background_thread_status.fatal_error
    return found or RuntimeError(f"batch: the manager must answer all requests, got an error: {error or 'it ended'}")


def end_tokens(generation_config: GenerationConfig) -> frozenset[int]:
    """The tokens that end an answer."""
    found = generation_config.eos_token_id
    return frozenset([found] if isinstance(found, int) else found or ())
