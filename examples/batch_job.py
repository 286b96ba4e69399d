"""Runs many prompts in batches with a static cache, for the best throughput.

    python examples/batch_job.py MODEL --prompts prompts.txt --batch-size 16 --output answers.jsonl

All batches have the same shape: prompts are padded on the left, the last batch is filled up, and `max_cache_len` is
fixed. So every batch reuses the same buffers. On a GPU, the decode step is recorded as a CUDA graph once and replayed
from then on. On a CPU, it runs as it is, since compiling would take longer than a small job.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_kvquant

ROOT = Path(__file__).resolve().parents[1]


def parser() -> argparse.ArgumentParser:
    """The command line."""
    arguments = argparse.ArgumentParser(description="Continue many prompts.")
    arguments.add_argument(
        "model", nargs="?", default=str(ROOT / "evals" / "reference_model"), help="a folder or a hub id"
    )
    arguments.add_argument("--prompts", type=Path, help="a file with one prompt per line (default: three of our own)")
    arguments.add_argument("--output", type=Path, help="JSON lines with prompts and answers (default: print them)")
    arguments.add_argument("--preset", default="int4", help="a preset of hf_kvquant (default: %(default)s)")
    arguments.add_argument("--batch-size", type=int, default=4)
    arguments.add_argument("--max-new-tokens", type=int, default=16)
    return arguments


def prompts_of(file: Path | None) -> list[str]:
    """The lines of a file that are not blank; without a file, those of our own prompts."""
    files = sorted((ROOT / "evals" / "demo_prompts").glob("*.txt")) if file is None else [file]
    return [line for each in files for line in each.read_text(encoding="utf-8").splitlines() if line.strip()]


def main() -> None:
    """Run the job."""
    arguments = parser().parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(arguments.model, padding_side="left")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(arguments.model, device_map=device)
    prompts = prompts_of(arguments.prompts)
    longest = max(len(tokenizer(prompt).input_ids) for prompt in prompts)
    length = longest + arguments.max_new_tokens
    hf_kvquant.patch(model, arguments.preset, max_cache_len=length, capture=device == "cuda")

    answers: list[str] = []
    num_tokens, start = 0, time.perf_counter()
    for first in range(0, len(prompts), arguments.batch_size):
        batch = prompts[first : first + arguments.batch_size]
        filled = batch + batch[-1:] * (arguments.batch_size - len(batch))
        inputs = tokenizer(filled, padding="max_length", max_length=longest, return_tensors="pt").to(device)
        output = model.generate(
            **inputs,
            max_new_tokens=arguments.max_new_tokens,
            do_sample=False,
            disable_compile=device == "cpu",
            pad_token_id=tokenizer.pad_token_id,
        )
        new = output[: len(batch), longest:]
        num_tokens += int((new != tokenizer.pad_token_id).sum())  # not the padding after an end token
        answers += tokenizer.batch_decode(new, skip_special_tokens=True)
    seconds = time.perf_counter() - start

    lines = [json.dumps({"prompt": prompt, "answer": answer}) for prompt, answer in zip(prompts, answers, strict=True)]
    if arguments.output is None:
        print("\n".join(lines))
    else:
        arguments.output.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(
        f"{len(prompts)} prompts, {num_tokens} tokens in {seconds:.1f} s: {num_tokens / seconds:.1f} tokens per second"
    )


if __name__ == "__main__":
    main()
