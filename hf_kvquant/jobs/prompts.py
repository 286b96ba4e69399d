"""Tokens of a job's prompt, checked against the model and the cache before the job is given to a manager."""

from __future__ import annotations

import dataclasses
import functools

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..batching.grammars import Grammars
from ..batching.sampling import Sampling
from ..common.errors import BadLine
from ..models.text_config import text_config_of
from ..upstream.releases import HAS_PAGES
from .lines import Job
from .sampling import Defaults

if HAS_PAGES:
    from ..serving.chats import Chats
    from ..serving.writing import Writer, text_of


@dataclasses.dataclass(frozen=True)
class Request:
    """One answer to a job.

    Attributes:
        job: What was asked.
        tokens: Of the prompt.
        max_new_tokens: At most this many are written.
        sampling: How tokens are chosen; `None` for the most likely ones.
        writer: Makes an answer in OpenAI's form; `None` for a line in our own.
        is_followed: Whether somebody has to see each token as it comes.
        choice: Its number among the answers to the job.
    """

    job: Job
    tokens: list[int]
    max_new_tokens: int
    sampling: Sampling | None = None
    writer: Writer | None = None
    is_followed: bool = False
    choice: int = 0


@dataclasses.dataclass(frozen=True)
class Limits:
    """What a request must fit into.

    Attributes:
        context: Positions of the model; `None` if it does not say.
        cache: Tokens that the pages hold.
    """

    context: int | None
    cache: int

    def check(self, num_tokens: int, max_new_tokens: int) -> None:
        """Refuse a request that is too long.

        Raises:
            BadLine: It does not fit.
        """
        asked = f"{num_tokens} tokens of prompt and {max_new_tokens} new ones"
        if self.context is not None and num_tokens + max_new_tokens > self.context:
            raise BadLine(f"the request must fit the model's {self.context} positions, got {asked}")
        if num_tokens + max_new_tokens > self.cache:
            raise BadLine(f"the request must fit the cache's {self.cache} tokens, got {asked}. See --cb-num-blocks")


class Requests:
    """Makes requests of jobs.

    Args:
        model: That answers.
        tokenizer: Of the model.
        grammars: Likewise.
        limits: Of every request.
        defaults: For jobs that do not say.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        grammars: Grammars,
        limits: Limits,
        defaults: Defaults,
    ) -> None:
        self._tokenizer, self._limits, self._defaults = tokenizer, limits, defaults
        self._vocab_size = text_config_of(model).vocab_size
        self._chats = Chats(model, tokenizer, grammars)
        self._text_of = functools.lru_cache(2**16)(functools.partial(text_of, tokenizer))

    def of(self, job: Job) -> list[Request]:
        """The requests of a job, one for each answer.

        Raises:
            RefusedRequest: The job cannot be answered.
        """
        asked = job.asked
        if asked is None:
            raise BadLine(job.problem or "the line cannot be read")
        if "prompt" in job.body:
            tokens = _text_tokens(job.body["prompt"], self._tokenizer)
        else:
            tokens = self._chats.tokens_of(job.body, asked.tools)
        if not tokens:
            raise BadLine("the prompt must have a token, got none")
        new = asked.max_new_tokens or self._defaults.max_new_tokens
        self._limits.check(len(tokens), new)
        writers: list[Writer | None] = [None] * asked.num_choices
        grammar = None
        if job.is_openai:
            if not self._tokenizer.is_fast:
                raise BadLine("a line in OpenAI's form must have a model with a fast tokenizer. Use `messages` alone")
            readers = [self._chats.reader(tokens, asked.tools) for _ in writers]
            grammar = self._chats.grammar(asked, readers[0])
            shown = None if asked.num_logprobs is None else self._text_of
            writers = [Writer(self._tokenizer, asked.stop, reader, shown) for reader in readers]
        sampling = self._defaults.of(asked, self._vocab_size, grammar)
        return [
            Request(
                job,
                tokens,
                new,
                sampling and dataclasses.replace(sampling, choice=choice),
                writer,
                asked.ends_by_text,
                choice,
            )
            for choice, writer in enumerate(writers)
        ]


def _text_tokens(prompt: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    try:
        prompt.encode()
    except UnicodeEncodeError as error:  # half of a surrogate pair, which JSON can spell
        raise BadLine(f"`prompt` must be Unicode text, got {error.reason}") from error
    return list(tokenizer(prompt).input_ids)
