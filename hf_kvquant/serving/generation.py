"""`Generation`: transformers' continuous batching for the server, with each request checked before it is scheduled.

What transformers' classes do that made the checks here necessary:

- A request that does not fit into the pages ends the generation thread: "No requests can be scheduled and no requests
  can be offloaded". So does an empty prompt. Both are refused (`_check_room`).
- `add_request` drops requests while the thread ends, with a line in the log, and their clients would wait for ever.
  `Door.add_request` raises. What is dropped later is found by `Generation.fail_lost`.
- `is_alive` asks for a recorded error. A thread that ended without one counts as alive.
- The first request chooses how all are sampled. Here each request does, if the server samples at all.
"""

from __future__ import annotations

import copy
import secrets
from collections.abc import Callable
from typing import Any

from fastapi import HTTPException
from transformers import GenerationConfig, PreTrainedModel
from transformers.cli.serving.utils import CBGenerateManager, CBWorkerDeadError, GenerationState, Modality
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching.requests import GenerationOutput

from ..batching.greedy import MostLikely
from ..batching.manager import Manager
from ..batching.sampling import SAMPLING, sampling_config, sampling_options
from ..models.text_config import context_of, text_config_of
from .metrics import Metrics
from .requests import OpenRequests, Router

STOP_SECONDS = 30  # for the step that runs when the server ends


class AtMost(int):
    """A number of new tokens that the client did not name. It may be lowered to what fits."""


class Door:
    """The manager, as transformers' `CBGenerateManager` uses it: requests go to the registry of open ones first.

    Args:
        manager: Of a patched model, not started.
        requests: The open requests.
    """

    def __init__(self, manager: Manager, requests: OpenRequests) -> None:
        self._manager, self._requests = manager, requests
        manager.output_router = Router(requests)
        requests.cancel = manager.cancel_request

    def __getattr__(self, name: str) -> Any:
        return getattr(self._manager, name)

    def add_request(self, input_ids: list[int], request_id: str, streaming: bool, **options: Any) -> str:
        """See `ContinuousBatchingManager`. Every token comes back, also of what is not streamed, to be counted.

        Raises:
            CBWorkerDeadError: The generation thread takes no requests.
        """
        self._requests.submit(request_id, len(input_ids), streaming)
        options |= self._requests.by_id[request_id].sampling
        if self._manager.add_request(input_ids, request_id=request_id, streaming=True, **options) is None:
            raise CBWorkerDeadError("the generation thread has ended and takes no requests; restart the server")
        return request_id

    def register_result_handler(self, request_id: str, callback: Callable[[GenerationOutput], None]) -> None:
        """See `ContinuousBatchingManager`."""
        self._requests.by_id[request_id].on_output = callback


class Generation(CBGenerateManager):
    """A `CBGenerateManager` that starts before the first request.

    Args:
        batching: Pages and batches.
        requests: The open requests.
        is_sampled: Whether requests may sample. It costs every step a softmax, and `top_p` a sort, of all logits.
    """

    def __init__(self, batching: ContinuousBatchingConfig, requests: OpenRequests, is_sampled: bool = False) -> None:
        super().__init__(batching)
        self.requests, self.is_sampled = requests, is_sampled
        self._batching = batching
        self._settings: frozenset[str] | None = None  # of sampling, that requests may use
        self._vocab_size = 0
        self.manager: Manager
        self.num_positions: int | None = None

    def start(self, model: PreTrainedModel) -> None:
        """Take the memory, capture graphs on a GPU, and start the thread.

        Raises:
            ImportError, NotImplementedError, ValueError: The model or a setting is not served.
            MemoryError: The pages do not fit.
        """
        model_any: Any = model
        self._vocab_size = text_config_of(model).vocab_size
        batching = copy.copy(self._batching)
        if self.is_sampled:
            own = {name for name in SAMPLING if getattr(model.generation_config, name)}
            self._settings = frozenset({"temperature", "top_p", *own})
            # Without a seed, transformers draws one from a generator that starts alike in every process.
            batching.per_request_processors, batching.seed = True, secrets.randbelow(2**32)
        config = sampling_config(model.generation_config, self._settings)
        config.use_cache = False
        self.manager = model_any.init_continuous_batching(config, batching)
        if self.is_sampled:
            MostLikely.install(self.manager)
        self.num_positions = context_of(model)
        door: Any = Door(self.manager, self.requests)
        self._cb = door
        self.manager.warmup()
        self.manager.start()

    @property
    def processor(self) -> Any:
        """The batch processor: its `cache` and its `scheduler`."""
        return self.manager.batch_processor

    @property
    def num_tokens(self) -> int:
        """Room of all pages."""
        room: int = self.processor.cache.room
        return room

    @property
    def room(self) -> int:
        """Tokens that one request can have, prompt included."""
        return min(self.num_tokens, self.num_positions or self.num_tokens)

    def is_alive(self) -> bool:
        """Whether requests are being served."""
        return super().is_alive() and self.manager.is_running()

    def is_ending(self) -> bool:
        """Whether the thread ends or has ended. When it fails, it says so to requests first and records it then."""
        return self.manager.background_thread_status.can_accept_new_requests() is not None

    def fail_lost(self) -> None:
        """If the generation thread has ended, end the requests that it left without an answer."""
        if not self.is_alive():
            error = self.manager.background_thread_status.fatal_error
            self.requests.end_all("failed", f"the generation thread has ended: {error}", 503)

    def num_running(self) -> int:
        """Requests that take part in steps."""
        return len(self.processor.scheduler.active_requests)

    def num_waiting(self) -> int:
        """Requests that wait for their first step."""
        return self.manager.input_queue.qsize() + len(self.processor.scheduler.waiting_requests)

    def watch(self, metrics: Metrics) -> None:
        """Add the gauges of cache and scheduler. They read copies of dictionaries, and lengths."""
        cache, scheduler = self.processor.cache, self.processor.scheduler

        def num_held() -> int:
            return sum(state.current_len() for state in list(scheduler.active_requests.values()))

        def num_used_pages() -> int:
            return len({page for pages in list(cache.allocator.block_table.values()) for page in list(pages)})

        metrics.gauge("requests_running", "Requests that take part in steps.", self.num_running)
        metrics.gauge("requests_waiting", "Requests that wait for their first step.", self.num_waiting)
        metrics.gauge("cache_tokens", "Tokens of running requests in pages; shared ones count for each.", num_held)
        metrics.gauge("cache_room_tokens", "Tokens that all pages have room for.", lambda: self.num_tokens)
        metrics.gauge("cache_pages_used", "Pages of running requests.", num_used_pages)
        metrics.gauge("cache_pages", "All pages.", lambda: cache.num_sectors)

    def generate_streaming(
        self,
        model: Any,
        processor: Any,
        inputs: Any,
        gen_config: GenerationConfig,
        request_id: str,
        *args: Any,
        **options: Any,
    ) -> Any:
        """See `BaseGenerateManager`."""
        self._prepare(request_id, inputs, gen_config)
        return super().generate_streaming(model, processor, inputs, gen_config, request_id, *args, **options)

    async def generate_non_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: GenerationConfig, request_id: str
    ) -> Any:
        """See `BaseGenerateManager`."""
        self._prepare(request_id, inputs, gen_config)
        return await super().generate_non_streaming(model, processor, inputs, gen_config, request_id)

    def _prepare(self, request_id: str, inputs: Any, gen_config: GenerationConfig) -> None:
        """Check a request, and note how its tokens are chosen."""
        self._check_room(len(inputs["input_ids"]), gen_config)
        chosen = None
        if gen_config.do_sample:
            # Left out, it is OpenAI's or the model's own.
            chosen = {name: value for name in SAMPLING if (value := getattr(gen_config, name, None))}
        options = sampling_options(chosen, self._settings, self._vocab_size)
        self.requests.by_id[request_id].sampling = options

    def _check_room(self, num_prompt: int, gen_config: GenerationConfig) -> None:
        """Refuse a prompt or a length that cannot fit, and lower a length that the client did not name."""
        if num_prompt == 0:
            raise HTTPException(400, "the prompt must have a token, got none. Write some text.")
        left, limits = self.room - num_prompt, f"{self.num_tokens} tokens fit into the pages"
        if self.num_positions is not None:
            limits += f", and the model has {self.num_positions} positions"
        if left < 1:
            raise HTTPException(
                400, f"the prompt must leave room for an answer, got {num_prompt} tokens: {limits}. Shorten it."
            )
        wanted = gen_config.max_new_tokens
        if isinstance(wanted, AtMost):
            gen_config.max_new_tokens = min(int(wanted), left)
        elif wanted > left:
            raise HTTPException(
                400,
                f"prompt and `max_tokens` must fit, got {num_prompt} and {wanted} tokens: {limits}. Ask for {left} or "
                "less.",
            )

    def stop(self) -> None:
        """Stop at once: whoever is left gets an error. Does nothing the second time."""
        if self.manager.is_running():
            self.manager.stop(block=True, timeout=STOP_SECONDS, hard_stop=True)
        self.manager.destroy()


class State(GenerationState):
    """A `GenerationState` with one `Generation`, which was started before.

    Args:
        generation: The one.
    """

    def __init__(self, generation: Generation) -> None:
        super().__init__(continuous_batching=True)
        self.generation = self._cb_manager = generation

    def use_continuous_batching(self, model: Any, modality: Modality) -> bool:
        """Always. transformers would fall back to `generate`, which pages do not serve."""
        return True

    def get_manager(self, model_id: str, use_cb: bool = False) -> Generation:
        """The one."""
        return self.generation
