"""What quantised weights cost, and what a quantised cache adds on top: perplexity and zero-shot accuracy.

    python evals/ablation.py --text wikitext2.test.raw --calibrate calibration.txt --tasks-data zero_shot \\
        --output evals/results/ablation.json

Rows are in the order of QServe's ablation: weights, activations and cache in 16 bits, then in 8, then in 4. The 4-bit
cache has its formats alone, then a rotation of keys, then also SmoothAttention's factors and centres, folded into the
weights before these are quantised. Weights and activations are simulated (`weight_recipes.py`), the cache is ours.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import time
from pathlib import Path
from typing import Any

import torch
from results_files import write_results
from rich.console import Console
from rich.table import Table
from weight_recipes import WEIGHTS, quantize_weights
from zero_shot import accuracies

from hf_kvquant import KVQuantConfig, smooth_attention
from hf_kvquant.cli.loading import load
from hf_kvquant.common.naming import ROOT, model_name, sha256
from hf_kvquant.state import keep
from hf_kvquant_evals.choices import OUTLIER_PAIRS
from hf_kvquant_evals.injection import inject_key_outliers
from hf_kvquant_evals.measuring.fidelity import compare
from hf_kvquant_evals.perplexity.segments import FIRST_CHUNK, cut
from hf_kvquant_evals.provenance import card, gpu_card

# Caches by name: the config, and whether the weights are those that calibration has changed.
CACHES: dict[str, tuple[dict[str, Any], bool]] = {
    "KV16": ({"preset": "none"}, False),
    "KV8": ({"preset": "int8"}, False),
    "KV4, formats alone": ({"preset": "int4-token", "transforms": []}, False),
    "KV4, rotated": ({"preset": "int4-token", "transforms": ["rotate"]}, False),
    "KV4, smoothed and rotated": ({"preset": "int4-token"}, True),
}
# The caches of which accuracy is measured, too: it takes longer.
WITH_TASKS = ("KV16", "KV4, smoothed and rotated")
CHUNK = 128


def perplexities(model: Any, segments: torch.Tensor, caches: dict[str, dict[str, Any]]) -> dict[str, float]:
    """The perplexity under each cache. Tokens after the first chunk are read from codes."""
    configs = {name: KVQuantConfig.resolve(config) for name, config in caches.items()}
    nll, count = dict.fromkeys(configs, 0.0), 0
    for segment in segments:
        (found,) = compare(model, segment[None], configs, first_chunk=FIRST_CHUNK, chunk_size=CHUNK)
        for name, each in found.items():
            nll[name] += float(each.nll.double().sum())
        count += len(each.nll)
    return {name: math.exp(total / count) for name, total in nll.items()}


def rows_of(
    model: Any, tokenizer: Any, segments: torch.Tensor, weights: str, is_calibrated: bool, arguments: argparse.Namespace
) -> list[dict[str, Any]]:
    """The rows of one model."""
    caches = {name: config for name, (config, needs) in CACHES.items() if needs == is_calibrated}
    found = perplexities(model, segments, caches)
    with_tasks = {name: caches[name] for name in caches if name in WITH_TASKS}
    scores: dict[str, dict[str, float]] = {}
    if arguments.tasks_data is not None and with_tasks:
        configs = {name: KVQuantConfig.resolve(config) for name, config in with_tasks.items()}
        scores = accuracies(model, tokenizer, configs, arguments.tasks, arguments.tasks_data, arguments.limit)
    return [
        {"weights": weights, "cache": name, "perplexity": value, "accuracy": scores.get(name)}
        for name, value in found.items()
    ]


def add_costs(rows: list[dict[str, Any]]) -> None:
    """Add what the weights of a row cost, and what its cache adds on top, both as a change of perplexity."""
    unquantized = {row["weights"]: row["perplexity"] for row in rows if row["cache"] == "KV16"}
    for row in rows:
        row["weights_cost"] = unquantized[row["weights"]] / unquantized["W16A16"] - 1
        row["cache_adds"] = row["perplexity"] / unquantized[row["weights"]] - 1


def shown(rows: list[dict[str, Any]]) -> Table:
    """The table of all rows."""
    table = Table(title="perplexity and accuracy", title_justify="left")
    for column in ("weights, activations", "cache", "perplexity", "weights cost", "cache adds", "accuracy"):
        table.add_column(column, justify="left" if column in ("weights, activations", "cache") else "right")
    for row in rows:
        scores = row["accuracy"]
        average = "" if not scores else f"{sum(scores.values()) / len(scores):.1%}"
        costs = f"{row['weights_cost']:+.2%}", f"{row['cache_adds']:+.2%}"
        table.add_row(row["weights"], row["cache"], f"{row['perplexity']:.3f}", *costs, average)
    return table


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default=str(ROOT / "evals/reference_model"), metavar="FOLDER")
    parser.add_argument("--device", default="cpu", metavar="NAME", help="such as cuda (default: cpu)")
    parser.add_argument("--text", required=True, type=Path, metavar="FILE", help="lines, joined by two newlines")
    parser.add_argument("--calibrate", required=True, type=Path, metavar="FILE", help="a text to calibrate on")
    told = (
        "first make 3 RoPE pairs of every key head so many times as large, and the queries there as many times smaller"
    )
    parser.add_argument("--inject-outliers", type=float, metavar="F", help=told)
    parser.add_argument("--tokens", type=int, default=16384, help="that are scored at least")
    parser.add_argument("--tasks-data", metavar="FOLDER", help="of zero-shot items; without it, accuracy is left out")
    parser.add_argument("--tasks", nargs="+", default=["arc_easy", "lambada_openai"])
    parser.add_argument("--limit", type=int, help="items of a task (default: all)")
    parser.add_argument("--output", type=Path, help="write the results here, as JSON")
    return parser.parse_args()


def main() -> None:
    """Measure all rows. Print the table, and the results as one line of JSON."""
    arguments, started, console = parse(), time.perf_counter(), Console(width=140)
    torch.manual_seed(0)
    plain, tokenizer = load(arguments.model, "float32", torch.device(arguments.device))
    if arguments.inject_outliers is not None:
        inject_key_outliers(plain, OUTLIER_PAIRS, arguments.inject_outliers)
    calibrated = copy.deepcopy(plain)
    smooth_attention(calibrated, tokenizer, [arguments.calibrate.read_text(encoding="utf-8")], "int4-token")
    text = "\n\n".join(arguments.text.read_text(encoding="utf-8").splitlines())
    ids = tokenizer(text, return_tensors="pt", verbose=False).input_ids[0].to(plain.device)
    segments = cut(ids, plain, tokens=arguments.tokens)
    rows: list[dict[str, Any]] = []
    for weights in WEIGHTS:
        for model, is_calibrated in ((plain, False), (calibrated, True)):
            quantized = copy.deepcopy(model)
            quantize_weights(quantized, weights)
            keep(quantized, folded=None)  # the factors are in what was rounded, so nothing has to be undone
            rows += rows_of(quantized, tokenizer, segments.ids, weights, is_calibrated, arguments)
            console.print(f"{weights}: {time.perf_counter() - started:.0f} s", highlight=False)
    add_costs(rows)
    results = {
        **card(),
        **(gpu_card() if plain.device.type == "cuda" else {}),
        "model": model_name(arguments.model),
        "data": arguments.text.name,
        "data_sha256": sha256(arguments.text),
        "calibration": arguments.calibrate.name,
        "calibration_sha256": sha256(arguments.calibrate),
        "injected_outliers": arguments.inject_outliers,
        "window": segments.length,
        "scored_tokens": len(segments.begins) * (segments.length - 1 - FIRST_CHUNK),
        "tasks": arguments.tasks if arguments.tasks_data else [],
        "limit": arguments.limit,
        "rows": rows,
        "seconds": round(time.perf_counter() - started),
    }
    console.print(shown(rows))
    write_results(results, arguments.output)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
