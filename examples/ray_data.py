"""Answers a file of prompts with Ray Data, on one machine or many: JSON lines in, JSON lines out, in the same order.

    python examples/ray_data.py --output answers.jsonl                              # two models here, on a CPU
    python examples/ray_data.py MODEL --prompts prompts.jsonl --output answers.jsonl --replicas 8 --gpus 1

A line is `{"prompt": "..."}`, with `max_new_tokens` if it wants another number. It comes back with its `answer`, and a
line that cannot be answered with an `error`. Ray Data gives lines to a pool of actors and computes those of an actor
that died again. Each actor has a model and batches all of its lines continuously. Answers are greedy.
"""

import argparse
import asyncio
import json
import math
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import ray
from ray.data import ActorPoolStrategy, DataContext
from torch import set_num_threads
from transformers import AutoModelForCausalLM, AutoTokenizer, ContinuousBatchingConfig, GenerationConfig

import hf_kvquant

ROOT = Path(__file__).resolve().parents[1]


def parser() -> argparse.ArgumentParser:
    """The command line."""
    arguments = argparse.ArgumentParser(description="Answer a file of prompts.")
    reference = str(ROOT / "evals" / "reference_model")
    arguments.add_argument("model", nargs="?", default=reference, help="a folder that all machines have, or a hub id")
    arguments.add_argument("--prompts", type=Path, help="JSON lines (default: three of our own)")
    arguments.add_argument("--output", type=Path, required=True, help="JSON lines")
    arguments.add_argument("--preset", default="int8", help="a preset of hf_kvquant (default: %(default)s)")
    arguments.add_argument("--dtype", default="auto", help="of the weights (default: %(default)s)")
    arguments.add_argument("--replicas", type=int, default=2, help="models (default: %(default)s)")
    arguments.add_argument("--gpus", type=int, choices=[0, 1], default=0, help="GPUs of a model (default: 0, a CPU)")
    arguments.add_argument("--cpus", type=int, default=1, help="cores of a model")
    arguments.add_argument("--num-blocks", type=int, help="pages of 256 tokens (default: all that fit; 64 on a CPU)")
    arguments.add_argument("--max-memory", type=float, help="share of a GPU's free memory for pages")
    arguments.add_argument("--max-new-tokens", type=int, default=16, help="of lines that do not say")
    arguments.add_argument(
        "--batch-size", type=int, default=64, help="lines of a block; an actor has up to four blocks"
    )
    return arguments


class Answerer:
    """An actor of the pool: a model, and a manager that is running."""

    def __init__(self, settings: argparse.Namespace) -> None:
        set_num_threads(settings.cpus)
        self.settings, self.tokenizer = settings, AutoTokenizer.from_pretrained(settings.model)
        device = "cuda" if settings.gpus else "cpu"
        model = AutoModelForCausalLM.from_pretrained(settings.model, dtype=settings.dtype, device_map=device)
        hf_kvquant.patch(model, settings.preset)
        num_blocks = settings.num_blocks or (None if settings.gpus else 64)
        batching = ContinuousBatchingConfig(num_blocks=num_blocks, max_memory_percent=settings.max_memory)
        generation = GenerationConfig(do_sample=False, eos_token_id=model.generation_config.eos_token_id)
        self.manager = model.init_continuous_batching(generation, batching)
        self.manager.warmup()
        room = self.manager.batch_processor.cache.room
        self.room = min(room, model.config.get_text_config().max_position_embeddings)
        self.manager.start()

    async def __call__(self, batch: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """Yield the answered lines of a batch. Ray Data calls this for several batches at once."""
        yield {"text": await asyncio.gather(*(self.answered(line) for line in batch["text"]))}

    async def answered(self, line: str) -> str:
        """A line with its answer, or with the reason why there is none."""
        try:
            tokens, max_new = self.request(line)
        except ValueError as error:
            return json.dumps({"line": line, "error": str(error)})
        answer = self.tokenizer.decode(await self.generated(tokens, max_new), skip_special_tokens=True)
        return json.dumps({**json.loads(line), "answer": answer})

    def request(self, line: str) -> tuple[list[int], int]:
        """The tokens of a line, and how many more it wants.

        Raises:
            ValueError: It is no JSON, or not of a request.
        """
        fields = json.loads(line)
        if not isinstance(fields, dict) or not isinstance(fields.get("prompt"), str):
            raise ValueError("a line must be an object with a `prompt`")
        tokens, max_new = self.tokenizer(fields["prompt"]).input_ids, fields.get("max_new_tokens")
        max_new = self.settings.max_new_tokens if max_new is None else max_new
        if not isinstance(max_new, int) or max_new < 1:
            raise ValueError(f"`max_new_tokens` must be a positive integer, got {max_new!r}")
        if not tokens or len(tokens) + max_new > self.room:
            raise ValueError(f"a request must have 1 to {self.room} tokens, got {len(tokens)} and {max_new} new ones")
        return tokens, max_new

    async def generated(self, tokens: list[int], max_new: int) -> list[int]:
        """What the model generates. Raises an error, which ends the job, if the manager has ended."""
        name, outputs = uuid.uuid4().hex, asyncio.Queue[Any]()
        self.manager.register_result_handler(name, outputs.put_nowait)
        self.manager.add_request(tokens, name, max_new)
        while True:
            try:
                output = await asyncio.wait_for(outputs.get(), timeout=1)
            except asyncio.TimeoutError:
                if self.manager.is_running():
                    continue
                raise RuntimeError(
                    f"the manager has ended: {self.manager.background_thread_status.fatal_error!r}"
                ) from None
            if output.error is not None:
                raise RuntimeError(f"a request failed: {output.error}")
            return list(output.generated_tokens)

    def __del__(self) -> None:
        if hasattr(self, "manager"):
            self.manager.stop(block=False, hard_stop=True)


def prompts_of(file: Path | None) -> list[str]:
    """The lines of a file that are not blank; without a file, those of our own prompts."""
    if file is not None:
        return [line for line in file.read_text(encoding="utf-8").split("\n") if line.strip()]
    texts = [each.read_text(encoding="utf-8") for each in sorted((ROOT / "evals" / "demo_prompts").glob("*.txt"))]
    return [json.dumps({"prompt": text.strip()}) for text in texts]


def answers(settings: argparse.Namespace) -> ray.data.Dataset:
    """The answered lines, in a column `text`. They are computed when they are read."""
    DataContext.get_current().execution_options.preserve_order = True
    lines = prompts_of(settings.prompts)
    # An actor takes a block at a time, and begins others before it is done with the first.
    num_blocks = math.ceil(len(lines) / settings.batch_size)
    return ray.data.from_items([{"text": line} for line in lines], override_num_blocks=num_blocks).map_batches(
        Answerer,
        fn_constructor_args=(settings,),
        batch_size=None,
        compute=ActorPoolStrategy(size=settings.replicas, max_concurrent_calls_per_actor=4),
        num_cpus=settings.cpus,
        num_gpus=settings.gpus,
    )


def main() -> None:
    """Run the job."""
    settings = parser().parse_args()
    part = settings.output.with_name(settings.output.name + ".part")
    with part.open("w", encoding="utf-8") as file:
        file.writelines(row["text"] + "\n" for row in answers(settings).iter_rows())
    part.replace(settings.output)  # only when all lines are there
    print(f"{settings.output}: {len(settings.output.read_text(encoding='utf-8').splitlines())} lines")
    ray.shutdown()


if __name__ == "__main__":
    main()
