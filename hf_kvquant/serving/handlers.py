"""transformers' handlers of chats and completions, with requests checked first and failures that have a status."""

from __future__ import annotations

from typing import Any

from fastapi import HTTPException
from transformers import GenerationConfig
from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.completion import CompletionHandler
from transformers.cli.serving.utils import BaseHandler, CBWorkerDeadError

from . import checks
from .generation import AtMost, State
from .model import PatchedModels


class Checked(BaseHandler):
    """What both handlers do besides. transformers answers mistakes of clients with 500, since it meets them late."""

    model_manager: PatchedModels
    generation_state: State

    async def handle_request(self, body: dict[str, Any], request_id: str) -> Any:
        """See the handlers of transformers.

        Raises:
            HTTPException: 400 if the request is wrong, 500 or 503 if it failed.
        """
        generation = self.generation_state.generation
        request = generation.requests.by_id[request_id]
        try:
            return await super().handle_request(body, request_id)  # type: ignore[misc]
        except (HTTPException, CBWorkerDeadError):
            raise
        except Exception as error:
            if not request.is_submitted:  # no chat template, roles that it refuses, text that is not Unicode, …
                raise HTTPException(400, f"the request cannot be read: {error or type(error).__name__}") from error
            if request.error is None:
                raise
            raise HTTPException(request.status or (503 if generation.is_ending() else 500), request.error) from error

    def _validate_request(self, body: dict[str, Any]) -> None:
        super()._validate_request(body)
        checks.check_fields(body, self.generation_state.generation.is_sampled)

    def _resolve_model(self, body: dict[str, Any]) -> Any:
        """See `BaseHandler`. The name that answers bear is accepted, too."""
        name: str = self.model_manager.name
        if body.get("model") == self.model_manager.process_model_name(name):
            body["model"] = name
        return super()._resolve_model(body)

    def _build_generation_config(self, body: dict[str, Any], *args: Any, **options: Any) -> GenerationConfig:
        config: GenerationConfig = super()._build_generation_config(body, *args, **options)
        is_narrowed = body.get("temperature") is None and body.get("top_p") not in (None, 1)
        if self.generation_state.generation.is_sampled and (body.get("temperature") or is_narrowed):
            config.do_sample = True  # transformers takes the values, but only the model's config would sample
        if all(body.get(name) is None for name in checks.LENGTHS):
            config.max_new_tokens = AtMost(config.max_new_tokens)
        return config


class Chats(Checked, ChatCompletionHandler):
    """Answers `/v1/chat/completions`."""

    def _validate_request(self, body: dict[str, Any]) -> None:
        super()._validate_request(body)
        checks.check_messages(body)


class Completions(Checked, CompletionHandler):
    """Answers `/v1/completions`."""

    def _validate_request(self, body: dict[str, Any]) -> None:
        super()._validate_request(body)
        checks.check_prompt(body)
