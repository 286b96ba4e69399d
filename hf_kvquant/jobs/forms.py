"""The two forms of a line of the output: our own, and that of OpenAI's batches for lines that came in it."""

from __future__ import annotations

import time
import uuid
from typing import Any

from .lines import Job
from .prompts import Request


def answer_line(request: Request, text: str, num_new: int, is_ended: bool, model: str) -> dict[str, Any]:
    """The line of an answer.

    Args:
        request: What was asked.
        text: The answer.
        num_new: Its tokens.
        is_ended: Whether a token ended it, and not its length.
        model: The model's name.
    """
    reason, num_prompt = "stop" if is_ended else "length", len(request.tokens)
    if not request.job.is_openai:
        return {
            "line": request.job.line,
            "id": request.job.id,
            "text": text,
            "finish_reason": reason,
            "prompt_tokens": num_prompt,
            "output_tokens": num_new,
        }
    name = uuid.uuid4().hex
    body = {
        "id": f"chatcmpl-{name}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model,
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": text},
                "logprobs": None,
                "finish_reason": reason,
            }
        ],
        "usage": {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_new,
            "total_tokens": num_prompt + num_new,
        },
    }
    response = {"status_code": 200, "request_id": f"req_{name}", "body": body}
    return {**_openai(request.job), "response": response, "error": None}


def error_line(job: Job, problem: str) -> dict[str, Any]:
    """The line of a job that cannot be answered."""
    if not job.is_openai:
        return {"line": job.line, "id": job.id, "error": problem}
    return {**_openai(job), "response": None, "error": {"code": "invalid_request_error", "message": problem}}


def _openai(job: Job) -> dict[str, Any]:
    return {"line": job.line, "id": f"batch_req_{uuid.uuid4().hex}", "custom_id": job.id}
