"""`Generation`: transformers' continuous batching for the server, with each request checked before it is scheduled.

What transformers' classes do that made the checks here necessary:

- A request that does not fit into the pages ends the generation thread: "No requests can be scheduled and no requests
  can be offloaded". So does an empty prompt. Both are refused (`new_tokens`).
- `add_request` drops requests while the thread ends, with a line in the log, and their clients would wait for ever.
  `submit` raises. What is dropped later is found by `fail_lost`.
- A thread that ended without an error counts as alive.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
from typing import Any

from transformers import PreTrainedModel
from transformers.cli.serving.utils import CBWorkerDeadError
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from ..batching.grammars import Grammars
from ..batching.manager import Manager
from ..batching.sampling import KEY, SETTINGS, Sampling, greedy_config
from ..common.errors import NoGrammars, RefusedRequest
from ..models.text_config import context_of, text_config_of
from .fields import Parameters
from .metrics import Metrics
from .requests import OpenRequest, OpenRequests, Router
from .writing import Writer

STOP_SECONDS = 30  # for the step that runs when the server ends
# Of an answer whose client does not name a length, if the model's generation config has no larger one.
DEFAULT_TOKENS = 1024


class Generation:
    """A running manager, and what the server asks of it.

    Args:
        batching: Pages and batches.
        requests: The open requests.
        is_sampled: Whether requests that do not say how they sample do so, as the model's generation config says.
    """

    def __init__(self, batching: ContinuousBatchingConfig, requests: OpenRequests, is_sampled: bool = False) -> None:
        self.requests, self._is_sampled = requests, is_sampled
        self._batching = batching
        self._vocab_size = 0
        self._own: Any = None  # the model's generation config
        self.manager: Manager
        self.grammars: Grammars
        self.num_positions: int | None = None

    def start(self, model: PreTrainedModel, tokenizer: Any) -> None:
        """Take the memory, capture graphs on a GPU, and start the thread.

        Args:
            model: Patched.
            tokenizer: Its own, for grammars.

        Raises:
            ImportError, NotImplementedError, ValueError: The model or a setting is not served.
            MemoryError: The pages do not fit.
        """
        model_any: Any = model
        self._own, self._vocab_size = model.generation_config, text_config_of(model).vocab_size
        config = greedy_config(model.generation_config)
        config.use_cache = False
        self.manager = model_any.init_continuous_batching(config, self._batching)
        self.num_positions = context_of(model)
        self.grammars = Grammars(tokenizer, self._vocab_size, self._end_tokens())
        if importlib.util.find_spec("llguidance") is not None:
            with contextlib.suppress(NoGrammars):  # requests that ask for one are told
                self.grammars.prepare()
        self.manager.grammars = self.grammars
        self.manager.output_router = Router(self.requests)
        self.requests.cancel = self.manager.cancel_request
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

    @property
    def size(self) -> str:
        """What the cache has room for, in words."""
        cache = self.processor.cache
        size = f"{self.num_tokens:,} tokens of cache, up to {self.room:,} for each request"
        if cache.states is None:
            return size
        share, num_bytes = cache.pages_of_a_state, cache.states.layout.num_bytes
        most_kept = 0 if cache.snapshots is None else cache.snapshots.most
        return (
            f"{size}; {cache.num_blocks:,} pages of {cache.allocator.tokens_per_page} tokens, in whose memory are "
            f"states, too: {num_bytes / 1e6:,.2f} MB for each request, as much as {share:,.2f} pages, and up to "
            f"{cache.most_requests:,} requests at once; the states of up to {most_kept:,} prefixes are kept while "
            "there is memory"
        )

    def is_alive(self) -> bool:
        """Whether requests are being served."""
        return self.manager.background_thread_status.fatal_error is None and self.manager.is_running()

    def is_cb_alive(self) -> bool:
        """The same, by the name that transformers' server asks for."""
        return self.is_alive()

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
        metrics.gauge("cache_pages", "All pages.", lambda: cache.num_blocks)
        free = "Memory of the cache that no running request holds, for pages or anything else, of all."
        metrics.gauge("cache_free_ratio", free, cache.compute_free_capacity)
        states, most, snapshots = cache.states, cache.most_requests or 0, cache.snapshots
        held: Any = {} if states is None else states.block_table
        metrics.gauge("cache_states_used", "States of running requests, in models that keep some.", lambda: len(held))
        metrics.gauge("cache_states", "Requests that may run at once, in models with states; else 0.", lambda: most)
        metrics.gauge(
            "cache_states_kept",
            "States of prefixes that are kept for later requests, in models with states; else 0.",
            lambda: 0 if snapshots is None else len(snapshots),
        )

    def new_tokens(self, num_prompt: int, wanted: int | None) -> int:
        """How many tokens an answer may have.

        Args:
            num_prompt: Tokens of its prompt.
            wanted: What the client asks for; `None` if it does not say.

        Raises:
            RefusedRequest: Prompt and answer cannot fit.
        """
        if num_prompt == 0:
            raise RefusedRequest("the prompt must have a token, got none. Write some text.")
        left = self.room - num_prompt
        # By these words of OpenAI's, clients recognise that a conversation is too long, and shorten it by themselves.
        limits = f"This model's maximum context length is {self.room} tokens"
        limits += f": {self.num_tokens} tokens fit into the pages"
        if self.num_positions is not None:
            limits += f", and the model has {self.num_positions} positions"
        if left < 1:
            raise RefusedRequest(
                f"the prompt is too long: it must leave room for an answer, got {num_prompt} tokens. {limits}. Shorten "
                "it.",
                code="context_length_exceeded",
            )
        if wanted is None:
            return min(max(self._own.max_new_tokens or 0, DEFAULT_TOKENS), left)
        if wanted > left:
            raise RefusedRequest(
                f"prompt and `max_tokens` must fit, got {num_prompt} and {wanted} tokens. {limits}. Ask for {left} or "
                "less.",
                code="context_length_exceeded",
            )
        return wanted

    def check_ids(self, ids: list[int]) -> None:
        """Refuse token ids that the model does not have.

        Raises:
            RefusedRequest: One is too large.
        """
        largest = max(ids)
        if largest >= self._vocab_size:
            expected = f"token ids below {self._vocab_size}, as many as the model has"
            raise RefusedRequest(f"`prompt` must be {expected}, got {largest}.", param="prompt")

    def check_scored(self, prompt: list[int]) -> None:
        """Refuse a prompt whose tokens cannot have a step each.

        Raises:
            RefusedRequest: One of them would end it.
        """
        ends = set(self._end_tokens()).intersection(prompt[1:])
        if ends:
            expected = "no end token but at its beginning where `logprobs` come with `echo`"
            raise RefusedRequest(f"`prompt` must have {expected}, got {min(ends)}.", param="prompt")

    def submit(
        self,
        request: OpenRequest,
        prompt: list[int],
        new_tokens: int,
        writer: Writer,
        *,
        is_followed: bool,
        ignores_end: bool,
        is_scored: bool,
        sampling: Sampling | None,
    ) -> None:
        """Add an answer of a request.

        Args:
            request: Open.
            prompt: Token ids.
            new_tokens: See the method of this name.
            writer: Makes its text.
            is_followed: See `OpenAnswer`.
            ignores_end: See `Parameters`.
            is_scored: Whether the tokens of the prompt but the first take steps of their own, and come back.
            sampling: How its tokens are chosen; `None` for the most likely ones.

        Raises:
            CBWorkerDeadError: The generation thread takes no requests.
        """
        end_tokens = [] if ignores_end else self._end_tokens()
        answer = self.requests.open(request, writer, end_tokens, is_followed=is_followed)
        self.requests.metrics.prompt_tokens.inc(len(prompt))
        if is_scored and sampling is not None:
            sampling = dataclasses.replace(sampling, forced=tuple(prompt))
            prompt, new_tokens = prompt[:1], new_tokens + len(prompt) - 1
        # Every token comes back, also of what is not streamed, to be counted.
        name = self.manager.add_request(
            prompt,
            answer.answer_id,
            new_tokens,
            streaming=True,
            eos_token_id=end_tokens or -1,  # transformers' spelling of none; `None` would be the model's own
            **({} if sampling is None else {KEY: sampling}),
        )
        if name is None:
            raise CBWorkerDeadError("the generation thread has ended and takes no requests; restart the server")

    def sampling_of(self, asked: Parameters, grammar: str | None) -> Sampling | None:
        """See `Parameters.sampling`: what a request does not say is the model's own."""
        own = {name: value for name in SETTINGS if (value := getattr(self._own, name, None))}
        return asked.sampling(own, is_sampled=self._is_sampled, vocab_size=self._vocab_size, grammar=grammar)

    def _end_tokens(self) -> list[int]:
        ends = self._own.eos_token_id
        return [] if ends is None else [ends] if isinstance(ends, int) else list(ends)

    def stop(self, timeout: float = STOP_SECONDS) -> None:
        """Stop at once: whoever is left gets an error. Does nothing the second time.

        Args:
            timeout: Seconds to wait for the step that runs.
        """
        if self.manager.is_running():
            self.manager.stop(block=True, timeout=timeout, hard_stop=True)
        self.manager.destroy()
