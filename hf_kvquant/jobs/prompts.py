"""Tokens of a job's prompt, checked against the model and the cache before the job is given to a manager."""

from __future__ import annotations

import dataclasses

from transformers import PreTrainedTokenizerBase

from .lines import BadLine, Job


@dataclasses.dataclass(frozen=True)
class Request:
    """A job that can be answered.

    Attributes:
        job: What was asked.
        tokens: Of the prompt.
        max_new_tokens: At most this many are written.
    """

    job: Job
    tokens: list[int]
    max_new_tokens: int


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


def request_of(job: Job, tokenizer: PreTrainedTokenizerBase, limits: Limits, max_new_tokens: int) -> Request:
    """The request of a job. `max_new_tokens` is for jobs that do not say.

    Raises:
        BadLine: The job cannot be answered.
    """
    if job.problem is not None:
        raise BadLine(job.problem)
    tokens = _text_tokens(job.prompt, tokenizer) if isinstance(job.prompt, str) else _chat_tokens(job, tokenizer)
    if not tokens:
        raise BadLine("the prompt must have a token, got none")
    new = max_new_tokens if job.max_new_tokens is None else job.max_new_tokens
    limits.check(len(tokens), new)
    return Request(job, tokens, new)


def _text_tokens(prompt: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    try:
        prompt.encode()
    except UnicodeEncodeError as error:  # half of a surrogate pair, which JSON can spell
        raise BadLine(f"`prompt` must be Unicode text, got {error.reason}") from error
    return list(tokenizer(prompt).input_ids)


def _chat_tokens(job: Job, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    if tokenizer.chat_template is None:
        raise BadLine("`messages` must come with a chat template, and the model's tokenizer has none. Use `prompt`")
    from jinja2 import TemplateError  # optional, and transformers says so if it is missing

    assert not isinstance(job.prompt, str)
    try:
        text = tokenizer.apply_chat_template(job.prompt, add_generation_prompt=True, tokenize=False)
        assert isinstance(text, str)
        text.encode()
    except TemplateError as error:
        raise BadLine(f"`messages` must fit the model's chat template, got: {error}") from error
    except UnicodeEncodeError as error:
        raise BadLine(f"`messages` must be Unicode text, got {error.reason}") from error
    return list(tokenizer(text, add_special_tokens=False).input_ids)
