"""Serves replicas of a model with Ray Serve, on one machine or many: OpenAI's chat completions over HTTP.

    python examples/ray_serve.py --prompt "The village is" --prompt "The river"     # two replicas here, on a CPU
    python examples/ray_serve.py MODEL --preset int4 --replicas 8 --gpus 1          # until Ctrl-C
    serve run ray_serve:build model=MODEL replicas=4 gpus=2                         # the same by Ray's own command

A `Frontend` turns messages into tokens and back, and asks a replica of `Engine`, which batches all of its requests
continuously. If a replica fails, the frontend asks another, with the tokens that it already has behind the prompt, so
a stream goes on where it was. Answers are greedy. Several GPUs of a replica share its model by tensor parallelism.
"""

import argparse
import asyncio
import json
import os
import socket
import tempfile
import time
import urllib.request
import uuid
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ray
from fastapi import FastAPI, HTTPException
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, Field
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException, RequestCancelledError
from tokenizers.decoders import DecodeStream
from torch import set_num_threads
from torch.distributed import init_process_group
from transformers import AutoModelForCausalLM, AutoTokenizer, ContinuousBatchingConfig, GenerationConfig
from transformers.distributed import DistributedConfig

import hf_kvquant

REFERENCE_MODEL = Path(__file__).resolve().parents[1] / "evals" / "reference_model"
TRIES = 8  # of a request that fails, without a new token between them
PAUSE = 5  # at most so many seconds between them, and while no replica takes requests


def parser() -> argparse.ArgumentParser:
    """The command line."""
    arguments = argparse.ArgumentParser(description="Serve replicas of a model.")
    arguments.add_argument("model", nargs="?", default=str(REFERENCE_MODEL), help="a folder or a hub id")
    arguments.add_argument("--preset", default="int8", help="a preset of hf_kvquant (default: %(default)s)")
    arguments.add_argument("--dtype", default="auto", help="of the weights (default: %(default)s)")
    arguments.add_argument("--replicas", type=int, default=2)
    arguments.add_argument("--gpus", type=int, default=0, help="GPUs of a replica (default: none, a CPU)")
    arguments.add_argument("--ranks", type=int, help="processes that share a replica's model (default: one a GPU)")
    arguments.add_argument("--cpus", type=int, default=1, help="cores of each process")
    arguments.add_argument("--num-blocks", type=int, help="pages of 256 tokens (default: all that fit; 64 on a CPU)")
    arguments.add_argument("--max-memory", type=float, help="share of a GPU's free memory for pages")
    arguments.add_argument("--max-new-tokens", type=int, default=128, help="of requests that do not say")
    arguments.add_argument("--host", default="127.0.0.1", help="0.0.0.0 for all networks (default: %(default)s)")
    arguments.add_argument("--port", type=int, default=8000)
    arguments.add_argument("--prompt", action="append", help="ask this and end; repeatable (default: serve)")
    return arguments


class Rank:
    """One process of a replica: its model, or its part of it, and a manager that is running."""

    def __init__(self, settings: argparse.Namespace, rank: int, num_ranks: int, address: str) -> None:
        set_num_threads(settings.cpus)
        where: dict[str, Any] = {"device_map": "cuda" if settings.gpus else "cpu"}
        if num_ranks > 1:
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": str(num_ranks)}  # Ray hides other GPUs
            backend = "nccl" if settings.gpus else "gloo"
            init_process_group(backend, init_method=address, rank=rank, world_size=num_ranks)
            where = {"distributed_config": DistributedConfig(tp_plan="auto", tp_size=num_ranks)}
        model = AutoModelForCausalLM.from_pretrained(settings.model, dtype=settings.dtype, **where)
        hf_kvquant.patch(model, settings.preset)
        num_blocks = settings.num_blocks or (None if settings.gpus else 64)
        batching = ContinuousBatchingConfig(num_blocks=num_blocks, max_memory_percent=settings.max_memory)
        generation = GenerationConfig(do_sample=False, eos_token_id=model.generation_config.eos_token_id)
        self.manager = model.init_continuous_batching(generation, batching)
        self.manager.warmup()
        room = self.manager.batch_processor.cache.room
        self.room = min(room, model.config.get_text_config().max_position_embeddings)
        self.manager.start()

    def check(self) -> None:
        """Raise an error if the manager has ended, since it answers nobody any more."""
        if not self.manager.is_running():
            raise RuntimeError(f"the manager has ended: {self.ended_by!r}")

    @property
    def ended_by(self) -> Exception | None:
        """What ended the manager."""
        return self.manager.background_thread_status.fatal_error

    def __del__(self) -> None:
        if hasattr(self, "manager"):
            self.manager.stop(block=False, hard_stop=True)


class Engine(Rank):
    """A replica: the first of its processes. It starts the others, which are in its placement group and end with it."""

    def __init__(self, settings: argparse.Namespace) -> None:
        num_ranks = settings.ranks or max(1, settings.gpus)
        address = f"file://{tempfile.mkdtemp()}/ranks"  # where they find each other
        remote = ray.remote(num_cpus=settings.cpus, num_gpus=settings.gpus / num_ranks)(Rank)
        self.others = [remote.remote(settings, rank, num_ranks, address) for rank in range(1, num_ranks)]
        super().__init__(settings, 0, num_ranks, address)

    async def check_health(self) -> None:
        """Raise an error if a process does not work. Ray asks every second, and replaces a replica that fails."""
        self.check()
        await asyncio.gather(*(other.check.remote() for other in self.others))

    async def complete(self, tokens: list[int], max_new: int, is_streamed: bool) -> AsyncIterator[dict[str, Any]]:
        """Yield new tokens as they come, or all at the end. Whoever stops listening cancels the request.

        Raises:
            ValueError: The request does not fit.
            ConnectionRefusedError: The manager had ended before. Ray is about to replace this replica.
            RuntimeError: The request failed, or the manager has ended meanwhile.
        """
        if not tokens or len(tokens) + max_new > self.room:
            raise ValueError(f"a request must have 1 to {self.room} tokens, got {len(tokens)} and {max_new} new ones.")
        name, outputs, output, sent = uuid.uuid4().hex, asyncio.Queue[Any](), None, 0
        self.manager.register_result_handler(name, outputs.put_nowait)
        try:
            self.manager.add_request(tokens, name, max_new, streaming=is_streamed)
            while output is None or not output.is_finished():
                try:
                    output = await asyncio.wait_for(outputs.get(), timeout=1)
                except asyncio.TimeoutError:
                    if output is None and not self.manager.is_running():  # which fails what it has begun with
                        raise ConnectionRefusedError(f"the manager has ended: {self.ended_by!r}") from None
                    self.check()
                    continue
                while not outputs.empty():  # each has all tokens so far
                    output = outputs.get_nowait()
                if output.error is not None:
                    raise RuntimeError(f"a request failed: {output.error}")
                reason = (
                    None
                    if not output.is_finished()
                    else "length"
                    if len(output.generated_tokens) == max_new
                    else "stop"
                )
                replica = f"{socket.gethostname()}-{os.getpid()}"
                yield {"tokens": output.generated_tokens[sent:], "finish_reason": reason, "replica": replica}
                sent = len(output.generated_tokens)
        finally:
            if output is None or not output.is_finished():
                self.manager.cancel_request(name)
                handlers = self.manager.output_router.result_handlers
                asyncio.get_running_loop().call_later(60, handlers.pop, name, None)  # behind the step under way


class Message(BaseModel, extra="forbid"):
    """A turn of a conversation."""

    role: str
    content: str


class Question(BaseModel, extra="forbid"):
    """The fields of a chat completion that are served. Others are refused."""

    messages: list[Message] = Field(min_length=1)
    model: str = ""
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    temperature: float = Field(0, ge=0, le=0)
    stream: bool = False


api = FastAPI()


@serve.deployment(max_ongoing_requests=10_000, ray_actor_options={"num_cpus": 0})
@serve.ingress(api)
class Frontend:
    """Speaks OpenAI's protocol with clients, and tokens with the engine."""

    def __init__(self, settings: argparse.Namespace, engine: Any) -> None:
        self.settings, self.complete = settings, engine.complete.options(stream=True)
        self.tokenizer = AutoTokenizer.from_pretrained(settings.model)

    @api.post("/v1/chat/completions")
    async def chat(self, question: Question) -> Any:
        """Answer at once, or in server-sent events."""
        max_new = question.max_completion_tokens or question.max_tokens or self.settings.max_new_tokens
        prompt = self.render(question.messages)
        pieces = self.answer(prompt, max_new, question.stream)
        try:
            first = await anext(pieces)
        except ValueError as error:
            raise HTTPException(400, str(getattr(error, "cause", error))) from error
        head = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": self.settings.model}
        if question.stream:
            return StreamingResponse(self.events(head, first, pieces), media_type="text/event-stream")
        message = {"role": "assistant", "content": self.tokenizer.decode(first["tokens"], skip_special_tokens=True)}
        choice = {"index": 0, "message": message, "finish_reason": first["finish_reason"]}
        counts = {"prompt_tokens": len(prompt), "completion_tokens": len(first["tokens"])}
        usage = {**counts, "total_tokens": sum(counts.values())}
        replica = {"system_fingerprint": first["replica"]}
        return {**head, **replica, "object": "chat.completion", "choices": [choice], "usage": usage}

    def render(self, messages: list[Message]) -> list[int]:
        """The tokens of a conversation. Models without a template continue the text."""
        if self.tokenizer.chat_template is None:
            return list(self.tokenizer(" ".join(message.content.strip() for message in messages)).input_ids)
        turns = [message.model_dump() for message in messages]
        text = self.tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
        return list(self.tokenizer(text, add_special_tokens=False).input_ids)

    async def answer(self, prompt: list[int], max_new: int, is_streamed: bool) -> AsyncIterator[dict[str, Any]]:
        """Yield what the engine does. When a replica fails, another goes on behind the tokens that there are.

        A request that fails again and again may be what makes replicas fail, so there is an end to it. One that is only
        refused has done nothing, and waits for Ray to replace the replica: on a busy machine, that takes minutes.
        """
        have: list[int] = []
        failures, pause = 0, 0.05
        while True:
            try:
                async for piece in self.complete.remote(prompt + have, max_new - len(have), is_streamed):
                    have, failures, pause = have + piece["tokens"], 0, 0.05
                    yield piece
                    if piece["finish_reason"] is not None:
                        return
            except (RayError, RayServeException) as error:
                failures += not isinstance(error, ConnectionRefusedError)
                if failures == TRIES or isinstance(error, ValueError | RequestCancelledError):
                    raise
                pause = min(2 * pause, PAUSE)
                await asyncio.sleep(pause)

    async def events(self, head: dict[str, Any], piece: dict[str, Any] | None, pieces: Any) -> AsyncIterator[str]:
        """Yield the chunks of a stream."""
        decoder, tokens, text = DecodeStream(skip_special_tokens=True), [], ""
        while piece is not None:
            tokens += piece["tokens"]
            new = "".join(decoder.step(self.tokenizer.backend_tokenizer, token) or "" for token in piece["tokens"])
            if piece["finish_reason"] is not None:  # with what is no whole character
                new = self.tokenizer.decode(tokens, skip_special_tokens=True)[len(text) :]
            text += new
            choice = {"index": 0, "delta": {"content": new}, "finish_reason": piece["finish_reason"]}
            chunk = {**head, "object": "chat.completion.chunk", "system_fingerprint": piece["replica"]}
            yield f"data: {json.dumps({**chunk, 'choices': [choice]})}\n\n"
            try:
                piece = await anext(pieces, None)
            except (RayError, RayServeException) as error:
                yield f"data: {json.dumps({'error': {'message': str(error)}})}\n\n"
                return
        yield "data: [DONE]\n\n"


def build(options: dict[str, str]) -> serve.Application:
    """The application. Options are those of the command line, such as `{"model": "...", "replicas": "4"}`."""
    words = [f"--{name.replace('_', '-')}={value}" for name, value in options.items() if name != "model"]
    settings = parser().parse_args([*words, options.get("model", str(REFERENCE_MODEL))])
    return Frontend.bind(settings, replicas(settings))


def replicas(settings: argparse.Namespace, engine_class: type[Engine] = Engine) -> serve.Application:
    """The replicas, without a frontend. All processes of one are on the same machine."""
    num_ranks = settings.ranks or max(1, settings.gpus)
    process = {"CPU": settings.cpus, "GPU": settings.gpus / num_ranks}
    return (
        serve.deployment(engine_class)
        .options(
            num_replicas=settings.replicas,
            max_ongoing_requests=256,  # more wait in the frontend
            health_check_period_s=1,
            ray_actor_options={"num_cpus": process["CPU"], "num_gpus": process["GPU"]},
            placement_group_bundles=[process] * num_ranks,
            placement_group_strategy="STRICT_PACK",
        )
        .bind(settings)
    )


def ask(port: int, prompt: str) -> str:
    """The answer to a prompt, over HTTP."""
    body = json.dumps({"messages": [{"role": "user", "content": prompt}]}).encode()
    url, headers = f"http://127.0.0.1:{port}/v1/chat/completions", {"Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(url, body, headers)) as response:
        return str(json.load(response)["choices"][0]["message"]["content"])


def main() -> None:
    """Serve, or ask all prompts at once and end."""
    settings = parser().parse_args()
    serve.start(http_options={"host": settings.host, "port": settings.port})
    serve.run(Frontend.bind(settings, replicas(settings)), blocking=settings.prompt is None)
    with ThreadPoolExecutor() as pool:
        for answer in pool.map(lambda prompt: ask(settings.port, prompt), settings.prompt):
            print(answer.strip())
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main()
