"""Generates the answers of tasks through continuous batching: each ends at its own stop sequence, and others take over.

A manager knows tokens that end a text, but not strings. So every new token comes back at once, and a request whose text
has a stop sequence is cancelled.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_kvquant.batching.sampling import greedy_config
from hf_kvquant.config import KVQuantConfig

from .pages import PAGE_SIZE, Pages

POLL_S = 1.0
# Tokens before a stop sequence that are decoded with it, since a token may have parts of two characters.
MARGIN = 2
# Tokens of a forward.
LEAST_TOKENS = 1024
# Of the memory, the share that is given out, since that of a cancelled request may be in use for one more step.
PAGES_SHARE = 0.8


@dataclasses.dataclass(frozen=True)
class Prompt:
    """What is continued.

    Attributes:
        tokens: Of the context.
        max_new_tokens: At most this many are written.
        until: Strings that end the text.
    """

    tokens: list[int]
    max_new_tokens: int
    until: Sequence[str]

    @property
    def num_pages(self) -> int:
        """Pages that it needs in the end."""
        return -(-(len(self.tokens) + self.max_new_tokens) // PAGE_SIZE)


def generate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    config: KVQuantConfig,
    prompts: Sequence[Prompt],
    num_pages: int,
    tell: Any,
) -> tuple[list[list[int]], int]:
    """The new tokens of every prompt, the most likely ones, and the (query, token) pairs that were read from codes.

    Args:
        model: Patched with `config`.
        tokenizer: Of the model.
        config: Of its cache.
        prompts: At least one.
        num_pages: Of 128 tokens, for all requests that run. Raised if the longest prompt needs more.
        tell: Called with the prompts just done.

    Raises:
        ImportError, NotImplementedError, ValueError: Pages do not serve the model or the config.
        Exception: What ended the manager.
    """
    generation_config = greedy_config(model.generation_config)
    generation_config.max_length = None
    options = {
        "num_pages": max(num_pages, *(prompt.num_pages for prompt in prompts)) + 1,
        "num_tails": 1,
        "max_batch_tokens": max(LEAST_TOKENS, 2 * max(len(prompt.tokens) for prompt in prompts)),
        "allow_block_sharing": False,  # a shared prefix would be read as codes
    }
    pages = Pages(model, config, generation_config, **options)
    run = _Run(pages.manager, tokenizer, options["max_batch_tokens"])
    try:
        pages.manager.start()
        written = run.all(prompts, tell)
    finally:
        pages.close()
    return written, pages.take_pairs()


class _Run:
    """Gives prompts to a manager while there is room for all that they need.

    So no prompt is cut into parts, of which the later ones would read codes, and none starts again for lack of pages.
    """

    def __init__(self, manager: Any, tokenizer: PreTrainedTokenizerBase, max_tokens: int) -> None:
        self._manager, self._tokenizer, self._max_tokens = manager, tokenizer, max_tokens
        self._running: dict[str, int] = {}  # to the index of the prompt
        self._unread: set[str] = set()  # of these, those without a first token

    def all(self, prompts: Sequence[Prompt], tell: Any) -> list[list[int]]:
        """The new tokens of every prompt."""
        written: list[list[int]] = [[] for _ in prompts]
        lookback = [self._lookback(prompt) for prompt in prompts]
        waiting = 0
        while waiting < len(prompts) or self._running:
            while waiting < len(prompts) and self._fits(prompts, waiting):
                prompt = prompts[waiting]
                name = self._manager.add_request(prompt.tokens, max_new_tokens=prompt.max_new_tokens, streaming=True)
                if name is None:
                    raise _failure(self._manager, "it takes no more requests")
                self._running[name] = waiting
                self._unread.add(name)
                waiting += 1
            output = self._manager.get_result(timeout=POLL_S)
            if output is None and not self._manager.is_running():
                raise _failure(self._manager, "it ended")
            if output is None or output.request_id not in self._running:  # cancelled meanwhile
                continue
            if output.error is not None:
                raise _failure(self._manager, output.error)
            self._unread.discard(output.request_id)
            index = self._running[output.request_id]
            written[index] = list(output.generated_tokens)
            if self._is_over(output, prompts[index].until, lookback[index]):
                del self._running[output.request_id]
                tell(1)
        return written

    def _fits(self, prompts: Sequence[Prompt], index: int) -> bool:
        """Whether a prompt can be added now."""
        if not self._running:
            return True
        running = [prompts[each] for each in self._running.values()]
        unread = sum(len(prompts[self._running[name]].tokens) for name in self._unread)
        cache, needed = self._manager.batch_processor.cache, [*running, prompts[index]]
        sectors = cache.sectors_for(sum(prompt.num_pages for prompt in needed), len(needed))
        return (
            sectors <= cache.num_sectors * PAGES_SHARE
            and unread + len(prompts[index].tokens) + len(running) <= self._max_tokens
        )

    def _lookback(self, prompt: Prompt) -> int:
        """The newest tokens that may have a stop sequence in them, of which the last token is a part."""
        lengths = (len(self._tokenizer.encode(stop, add_special_tokens=False)) for stop in prompt.until)
        return max(lengths, default=0) + MARGIN

    def _is_over(self, output: Any, until: Sequence[str], lookback: int) -> bool:
        """Whether a text has ended. If a stop sequence ends it, the request is cancelled."""
        if output.is_finished():
            return True
        text = self._tokenizer.decode(output.generated_tokens[-lookback:])
        if any(stop in text for stop in until if stop):
            self._manager.cancel_request(output.request_id)
            return True
        return False


def _failure(manager: Any, error: str) -> BaseException:
    manager.stop(hard_stop=True)
    found: BaseException | None = manager.background_thread_status.fatal_error
    return found or RuntimeError(f"generate_until: the manager must answer all requests, got an error: {error}")
