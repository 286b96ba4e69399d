"""Asks a question about a long document on a small GPU: prefill in chunks, with the cache offloaded to CPU memory.

    python examples/long_document.py MODEL --document report.txt --question "What was decided?"

Prefill in chunks needs memory for the activations of one chunk only. With `int4`, the codes take about a quarter of an
unquantised cache. On a GPU they are also offloaded to CPU memory, except those of two layers, so the document can be as
long as CPU memory and patience allow. On a CPU, the codes stay in place.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_kvquant

REFERENCE_MODEL = Path(__file__).resolve().parents[1] / "evals" / "reference_model"


def parser() -> argparse.ArgumentParser:
    """The command line."""
    arguments = argparse.ArgumentParser(description="Ask about a long document.")
    arguments.add_argument("model", nargs="?", default=str(REFERENCE_MODEL), help="a folder or a hub id")
    arguments.add_argument("--document", type=Path, default=REFERENCE_MODEL / "README.md", help="a text file")
    arguments.add_argument("--question", default="In summary, the model", help="added after the document")
    arguments.add_argument("--preset", default="int4", help="a preset of hf_kvquant (default: %(default)s)")
    arguments.add_argument("--chunk", type=int, default=512, help="tokens of a chunk (default: %(default)s)")
    arguments.add_argument("--max-new-tokens", type=int, default=24)
    return arguments


def main() -> None:
    """Read the document and answer."""
    arguments = parser().parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    model = AutoModelForCausalLM.from_pretrained(arguments.model, device_map=device)
    hf_kvquant.patch(model, arguments.preset, offloading=device == "cuda")

    question = tokenizer("\n\n" + arguments.question, add_special_tokens=False, return_tensors="pt").input_ids
    document = tokenizer(arguments.document.read_text(encoding="utf-8"), return_tensors="pt", verbose=False).input_ids
    context = getattr(model.config.get_text_config(), "max_position_embeddings", document.shape[1] + 2**20)
    room = context - question.shape[1] - arguments.max_new_tokens
    ids = torch.cat((document[:, :room], question), dim=1).to(device)
    print(
        f"reading {ids.shape[1]:,} of {document.shape[1] + question.shape[1]:,} tokens in chunks of {arguments.chunk}"
    )

    start = time.perf_counter()
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=arguments.max_new_tokens,
        prefill_chunk_size=arguments.chunk,
        do_sample=False,
        return_dict_in_generate=True,
    )
    seconds = time.perf_counter() - start
    print(tokenizer.decode(output.sequences[0, ids.shape[1] :], skip_special_tokens=True).strip())
    held, tokens = output.cache.num_bytes_held, output.cache.get_seq_length()
    print(f"{seconds:.1f} s; cache: {tokens:,} tokens in {held:,} bytes, {arguments.preset} on {device}")
    print(hf_kvquant.report(model))


if __name__ == "__main__":
    main()
