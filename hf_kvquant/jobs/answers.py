"""Gives requests to a manager of continuous batching, and takes its answers in the order in which they are done."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from transformers import GenerationConfig, PreTrainedModel

from ..batching.support import check_version
from ..upstream.releases import HAS_PAGES
from .prompts import Request

if HAS_PAGES:
    from transformers import ContinuousBatchingConfig

# Requests in a manager at once, for each that it runs. Those that wait take the place of those that are done.
_WAITING_SHARE = 1.25
_POLL_S = 1.0


@contextlib.contextmanager
def managed(
    model: PreTrainedModel, generation_config: GenerationConfig, batching: Mapping[str, Any]
) -> Iterator[tuple[Any, int]]:
    """A running manager of a patched model, and the number of tokens that its pages hold.

    Args:
        model: Patched.
        generation_config: Of all requests.
        batching: Arguments of `ContinuousBatchingConfig`.

    Raises:
        ImportError, NotImplementedError, ValueError: Pages do not serve the model or a setting.
        MemoryError: The pages do not fit.
    """
    check_version()
    init: Any = model.init_continuous_batching
    manager = init(generation_config, ContinuousBatchingConfig(**batching))
    try:
        manager.warmup()
        room = manager.batch_processor.cache.room
        manager.start()
        yield manager, room
    finally:
        if manager.is_running():
            manager.stop(hard_stop=True)
        manager.destroy()


def answered(
    manager: Any, requests: Iterable[Request], options_of: Callable[[Request], Mapping[str, Any]]
) -> Iterator[tuple[Request, list[int]]]:
    """Each request with the tokens that were written for it, the first that is done first.

    Only a bounded number of requests is taken at once.

    Args:
        manager: Running.
        requests: Any number.
        options_of: Further arguments of `add_request` for a request.

    Raises:
        Exception: What ended the manager.
    """
    most = int(manager.continuous_batching_config.max_requests_per_batch * _WAITING_SHARE)
    running: dict[str, Request] = {}
    waiting = iter(requests)
    while True:
        while len(running) < most and (request := next(waiting, None)) is not None:
            name = manager.add_request(request.tokens, max_new_tokens=request.max_new_tokens, **options_of(request))
            if name is None:  # the manager takes no more
                raise _failure(manager, "")
            running[name] = request
        if not running:
            return
        output = manager.get_result(timeout=_POLL_S)
        if output is None:
            if not manager.is_running():
                raise _failure(manager, "")
        elif output.error is not None:
            raise _failure(manager, output.error)
        elif output.is_finished():
            yield running.pop(output.request_id), output.generated_tokens


def _failure(manager: Any, error: str) -> BaseException:
    """What ended a manager. Requests are checked before they are added, so none fails alone."""
    manager.stop(hard_stop=True)
    found: BaseException | None = manager.background_thread_status.fatal_error
    return found or RuntimeError(f"batch: the manager must answer all requests, got an error: {error or 'it ended'}")


def end_tokens(generation_config: GenerationConfig) -> frozenset[int]:
    """The tokens that end an answer."""
    found = generation_config.eos_token_id
    return frozenset([found] if isinstance(found, int) else found or ())
