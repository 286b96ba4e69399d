"""Calibrates a model for 4 bits: checks it, finds centres and factors, saves, loads, and checks again.

    python examples/calibrate.py MODEL --text pages.txt --output calibrated

The pre-flight measures how much quantising changes the next-token distribution (KL divergence in nats), layer by layer,
through real caches. Calibration then finds the centre of each layer's keys, and factors that make outlier channels
smaller, and folds the factors into the weights. Logits stay the same to the bit, and the checkpoint loads like any
other.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_kvquant

REFERENCE_MODEL = Path(__file__).resolve().parents[1] / "evals" / "reference_model"
FACTORS = "kvquant_smoothing.safetensors"  # where `hf-kvquant` looks for them


def parser() -> argparse.ArgumentParser:
    """The command line."""
    arguments = argparse.ArgumentParser(description="Calibrate a model and show how much it helped.")
    arguments.add_argument("model", nargs="?", default=str(REFERENCE_MODEL), help="a folder or a hub id")
    arguments.add_argument(
        "--text", type=Path, default=REFERENCE_MODEL / "README.md", help="text like that the model will read"
    )
    arguments.add_argument("--preset", default="int8", help="a preset of hf_kvquant (default: %(default)s)")
    arguments.add_argument("--output", type=Path, help="a new folder for the model (default: a temporary one)")
    arguments.add_argument(
        "--tokens", type=int, default=16384, help="calibrate on at most so many (default: %(default)s)"
    )
    return arguments


def main() -> None:
    """Check, calibrate, save, load, check."""
    arguments = parser().parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    model = AutoModelForCausalLM.from_pretrained(arguments.model, device_map=device)
    texts = [arguments.text.read_text(encoding="utf-8")]

    before = hf_kvquant.run_preflight(model, arguments.preset, tokenizer=tokenizer, texts=texts)
    print(f"before:\n{before.report()}\n")
    result = hf_kvquant.smooth_attention(model, tokenizer, texts, arguments.preset, num_tokens=arguments.tokens)
    print(f"calibration:\n{result.report()}\n")

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) if arguments.output is None else arguments.output
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        result.save(folder / FACTORS)
        loaded = AutoModelForCausalLM.from_pretrained(folder, device_map=device)
        hf_kvquant.load_smoothing(loaded, folder / FACTORS)
        after = hf_kvquant.run_preflight(loaded, arguments.preset, tokenizer=tokenizer, texts=texts)
    print(f"after:\n{after.report()}\n")

    hf_kvquant.patch(loaded, after.approved())  # raises if the preset would corrupt the model's output
    inputs = tokenizer("The village is located in the", return_tensors="pt").to(device)
    print(tokenizer.decode(loaded.generate(**inputs, max_new_tokens=12, do_sample=False)[0]))


if __name__ == "__main__":
    main()
