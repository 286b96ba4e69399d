"""`Handler`: answers one route. It reads a request, gives its prompts to the generation, and sends what comes back.

transformers has handlers for both routes. They give each request to one request of the scheduler and send all of its
text, so they have no place for several answers, stop strings or a prompt that is echoed.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
from collections.abc import AsyncIterator
from typing import Any

from fastapi import HTTPException
from fastapi.responses import JSONResponse, StreamingResponse

from ..common.errors import RefusedRequest
from .chats import Chats
from .fields import CHAT, COMPLETION, MAX_ANSWERS, Parameters, parameters_of, prompts_of
from .forms import ChatForm, CompletionForm, Form, Usage
from .generation import Generation
from .model import PatchedModels
from .pieces import Piece
from .reading import Reader
from .requests import OpenRequest
from .response_form import ResponseForm
from .responses import by_its_names, chat_of
from .writing import Writer, end_of, text_of


class Handler:
    """Answers one route.

    Args:
        models: With the model loaded.
        generation: Started.
        route: `CHAT` or `COMPLETION`.
    """

    def __init__(self, models: PatchedModels, generation: Generation, route: str) -> None:
        self._models, self._generation, self._route = models, generation, route
        self._chats = Chats(models.model, models.tokenizer, generation.grammars)
        self._text_of = functools.lru_cache(2**16)(functools.partial(text_of, models.tokenizer))

    async def handle_request(self, body: dict[str, Any], request_id: str) -> Any:
        """Answer a request that the front door has let in.

        Raises:
            RefusedRequest: The request is wrong.
            HTTPException: It failed.
        """
        kind: type[Form] = ChatForm if self._route == CHAT else CompletionForm
        return await self._answer(body, kind(request_id, self._models.served_name))

    async def _answer(self, body: dict[str, Any], form: Form) -> Any:
        """Answer a request in a form."""
        request = self._generation.requests.by_id[form.request_id]
        asked = parameters_of(body, self._route, self._models.served_name)
        prompts = self._prompts(body, asked)
        limits = [self._generation.new_tokens(len(prompt), asked.max_new_tokens) for prompt in prompts]
        readers = [self._reader(prompt, asked) for prompt in prompts for _ in range(asked.num_choices)]
        shown = None if asked.num_logprobs is None else self._text_of
        echoes = self._echoes(body, asked)
        is_text = self._route == COMPLETION
        ends = [end_of(self._models.tokenizer, prompt) if is_text else [] for prompt in prompts]
        before = [end for end in ends for _ in range(asked.num_choices)]
        writers = [
            Writer(self._models.tokenizer, asked.stop, reader, shown, before=each)
            for reader, each in zip(readers, before, strict=True)
        ]
        if asked.scores_prompts:
            several = [prompt for prompt in prompts for _ in range(asked.num_choices)]
            writers = [self._scoring_writer(*each, asked) for each in zip(several, echoes, strict=True)]
        is_free = asked.structure_name is None and asked.tools is None
        grammar = None if is_free else await asyncio.to_thread(self._chats.grammar, asked, readers[0])
        sampling = self._generation.sampling_of(asked, grammar)
        for index, writer in enumerate(writers):
            number, choice = divmod(index, asked.num_choices)
            self._generation.submit(
                request,
                prompts[number],
                limits[number],
                writer,
                is_followed=asked.is_streamed or asked.ends_by_text,
                ignores_end=asked.ignores_end,
                is_scored=asked.scores_prompts,
                sampling=sampling and dataclasses.replace(sampling, choice=choice),
            )
        num_prompt = sum(map(len, prompts))
        if asked.is_streamed:
            events = self._events(request, form, echoes, num_prompt, asked)
            return StreamingResponse(events, media_type="text/event-stream")
        return JSONResponse(await self._whole(request, form, echoes, num_prompt))

    def _prompts(self, body: dict[str, Any], asked: Parameters) -> list[list[int]]:
        """The tokens of all prompts."""
        try:
            if self._route == CHAT:
                return [self._chats.tokens_of(body, asked.tools)]
            prompts = prompts_of(body["prompt"])
            if len(prompts) * asked.num_choices > MAX_ANSWERS:
                got = f"{len(prompts)} prompts with `n` of {asked.num_choices}"
                raise RefusedRequest(f"a request must ask for at most {MAX_ANSWERS} answers, got {got}. Split it.")
            return [self._tokens_of(prompt) for prompt in prompts]
        except RefusedRequest:
            raise
        except Exception as error:  # no chat template, roles that it refuses, text that is not Unicode, …
            raise RefusedRequest(f"the request cannot be read: {error or type(error).__name__}") from error

    def _tokens_of(self, prompt: str | list[int]) -> list[int]:
        if isinstance(prompt, str):
            return list(self._models.tokenizer(prompt)["input_ids"])
        self._generation.check_ids(prompt)
        return prompt

    def _reader(self, prompt: list[int], asked: Parameters) -> Reader | None:
        return self._chats.reader(prompt, asked.tools) if self._route == CHAT else None

    def _scoring_writer(self, prompt: list[int], echo: str, asked: Parameters) -> Writer:
        """What makes the text of an answer that comes after the tokens of its prompt."""
        self._generation.check_scored(prompt)
        tokenizer = self._models.tokenizer
        return Writer(tokenizer, asked.stop, None, self._text_of, prompt, echo, end_of(tokenizer, prompt))

    def _echoes(self, body: dict[str, Any], asked: Parameters) -> list[str]:
        """What each answer begins with."""
        if not asked.echoes:
            return []
        prompts = prompts_of(body["prompt"])
        texts = [each if isinstance(each, str) else self._models.tokenizer.decode(each) for each in prompts]
        return [text for text in texts for _ in range(asked.num_choices)]

    async def _whole(self, request: OpenRequest, form: Form, echoes: list[str], num_prompt: int) -> dict[str, Any]:
        whole = [Piece(index, []) for index in range(len(request.answers))]
        for index, echo in enumerate(echoes):
            whole[index].texts.append(echo)
        while (piece := await request.news.get()) is not None:
            form.gather(whole[piece.index], piece)
        if request.error is not None:
            raise HTTPException(self._status(request), request.error)
        return form.whole([form.choice(piece) for piece in whole], Usage(num_prompt, _num_new(request)))

    async def _events(
        self, request: OpenRequest, form: Form, echoes: list[str], num_prompt: int, asked: Parameters
    ) -> AsyncIterator[str]:
        """Server-sent events."""
        begin = [Piece(index, [echo]) for index, echo in enumerate(echoes)]
        yield form.opening(len(request.answers)) + "".join(map(form.chunks, begin))
        counts = [0] * len(request.answers)
        while (piece := await request.news.get()) is not None:
            counts[piece.index] = piece.num_tokens
            yield form.chunks(piece, Usage(num_prompt, sum(counts)) if asked.counts_each else None)
        if request.error is not None:
            yield form.failure(self._status(request), request.error)
            return
        yield form.closing(Usage(num_prompt, _num_new(request)) if asked.includes_usage else None)

    def _status(self, request: OpenRequest) -> int:
        """Of an answer that failed."""
        return request.status if request.status >= 400 else 503 if self._generation.is_ending() else 500


class ResponseHandler(Handler):
    """Answers `/v1/responses`, whose requests are chats in another form.

    Args:
        models: See `Handler`.
        generation: Likewise.
    """

    def __init__(self, models: PatchedModels, generation: Generation) -> None:
        super().__init__(models, generation, CHAT)

    async def handle_request(self, body: dict[str, Any], request_id: str) -> Any:
        """See `Handler`."""
        chat = chat_of(body)
        with by_its_names():
            return await self._answer(chat, ResponseForm(request_id, self._models.served_name, asked=body))


def _num_new(request: OpenRequest) -> int:
    return sum(answer.writer.num_tokens for answer in request.answers)
