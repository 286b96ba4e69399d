"""The two forms of a line of the output: our own, and OpenAI's batch format for lines that came in it."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

from ..upstream.releases import HAS_PAGES
from .answers import Answer
from .lines import Job

if HAS_PAGES:
    from ..serving.forms import ChatForm, Usage
    from ..serving.writing import end_of, text_after


def answer_line(answers: Sequence[Answer], tokenizer: Any, model: str) -> dict[str, Any]:
    """The line of all answers to a job.

    Args:
        answers: That have ended, without a problem, in their order.
        tokenizer: Of the model.
        model: The model's name.
    """
    answer, writers = answers[0], [each.request.writer for each in answers]
    request, num_new = answer.request, len(answer.tokens)
    job, num_prompt = request.job, len(request.tokens)
    if not job.is_openai:
        before = end_of(tokenizer, request.tokens) if "prompt" in job.body else []
        return {
            "line": job.line,
            "id": job.id,
            "text": text_after(tokenizer, before, answer.tokens),
            "finish_reason": "stop" if answer.is_complete else "length",
            "prompt_tokens": num_prompt,
            "output_tokens": num_new,
        }
    name = uuid.uuid4().hex
    usage = Usage(num_prompt, sum(writer.num_tokens for writer in writers if writer is not None))
    form, pieces = ChatForm(name, model), [each.piece for each in answers]
    body = form.whole([form.choice(piece) for piece in pieces if piece is not None], usage)
    response = {"status_code": 200, "request_id": f"req_{name}", "body": body}
    return {**_openai(job), "response": response, "error": None}


def error_line(job: Job, problem: str) -> dict[str, Any]:
    """The line of a job that cannot be answered."""
    if not job.is_openai:
        return {"line": job.line, "id": job.id, "error": problem}
    return {**_openai(job), "response": None, "error": {"code": "invalid_request_error", "message": problem}}


def _openai(job: Job) -> dict[str, Any]:
    return {"line": job.line, "id": f"batch_req_{uuid.uuid4().hex}", "custom_id": job.id}
