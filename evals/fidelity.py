"""Runs `hf-kvquant eval perplexity` on the reference model and writes a results file for `render_readme.py`.

    python evals/fidelity.py --data wikitext2.test.raw --chunk 128 --output evals/results/fidelity.json

The numbers stand in the table of the README, and in the table of all presets on `docs/presets.md`. Windows, gate,
counter, aggregates and most options are those of `hf_kvquant_evals/`. `--data` is its `--text` with `--rows`, the
convention of papers; `--record` is its `--output`; dtype and device default to those of the published results. This
script turns a record into a results file: one row per preset with its windows, and hashes of weights and tokenizer.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from results_files import write_results
from rich.console import Console

from hf_kvquant import KVQuantConfig, cli
from hf_kvquant.cli.arguments import DTYPES
from hf_kvquant.cli.loading import load, read_text
from hf_kvquant.common.naming import ROOT, sha256
from hf_kvquant_evals.choices import OUTLIER_PAIRS
from hf_kvquant_evals.cli import evaluate
from hf_kvquant_evals.cli.parsers import add_perplexity_options
from hf_kvquant_evals.perplexity.perplexity_results import kld_of, show


def flattened(record: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The content of a results file.

    Args:
        record: A finished record with one mode.
        folder: The model's folder.
    """
    settings, parts = record["settings"], record["parts"]
    ((mode, rows),) = parts["summary"]["modes"].items()
    outliers, bias = settings["injected_outliers"], settings["injected_bias"]
    first = next(iter(rows.values()))
    return {
        **record["card"],
        "model": settings["model"],
        "weights_sha256": {path.name: sha256(path) for path in sorted(folder.glob("*.safetensors"))},
        "tokenizer_sha256": sha256(folder / "tokenizer.json"),
        "injected_outliers": None if outliers is None else {"pairs_per_head": OUTLIER_PAIRS, "factor": outliers},
        "injected_bias": None if bias is None else {"norm": bias},
        "calibration": settings["calibration"],
        "dtype": settings["dtype"],
        "device": settings["device"],
        "data": settings["source"]["text"],
        "data_sha256": settings["source"]["sha256"],
        "convention": f"{settings['source']['convention']}, whole windows, per token",
        "window": settings["window"],
        "window_indices": [begin // settings["stride"] for begin in settings["begins"]],
        "n0": settings["first_chunk"],
        "mode": mode,
        "chunk": settings["chunk"],
        "scored_tokens": first["scored_tokens"],
        "gate": parts["gate"],
        "reference_perplexity": first["reference_perplexity"],
        "presets": {
            name: {
                **row,
                "windows": [window(parts[f"{mode} {begin}"][name]) for begin in settings["begins"]],
                "config": settings["presets"][name],
            }
            for name, row in rows.items()
        },
        "seconds": parts["summary"]["seconds"],
    }


def window(part: dict[str, Any]) -> dict[str, float]:
    """One window under one preset: means over its tokens."""
    return {
        "kld": float(kld_of(part).mean()),
        "agreement": part["agreeing"] / len(part["kld"]),
        "nll": part["nll"] / part["tokens"],
        "reference_nll": part["reference_nll"] / part["tokens"],
    }


def found_within(budgets: Sequence[float], args: argparse.Namespace) -> dict[str, KVQuantConfig]:
    """What the pre-flight finds within so many bits, on the text of `--bits-text`, as `bits-4.5`."""
    if not budgets:
        return {}
    model, tokenizer = load(args.model, args.dtype, torch.device(args.device))
    texts = [read_text("--bits-text", args.bits_text)]
    return {
        f"bits-{bits:g}": KVQuantConfig.for_model(model, bits=bits, tokenizer=tokenizer, texts=texts, force=True)
        for bits in budgets
    }


def run(args: argparse.Namespace) -> None:
    """Measure, print the tables, and write the results file. The last line on stdout holds the same JSON."""
    output, args.output = args.output, args.record
    record = evaluate.measured(args, found_within(args.bits, args)).to_dict()
    results = flattened(record, Path(args.model))
    if args.bits:
        results["bits_text"] = {"text": Path(args.bits_text).name, "sha256": sha256(Path(args.bits_text))}
    show(Console(highlight=False), record)
    write_results(results, output)
    print(json.dumps(results))


def main() -> int:
    """Parse the command line and run. Returns the exit code, as `hf-kvquant` does."""
    parser = argparse.ArgumentParser(
        description="Compare presets with the unquantised cache on a text file.",
        conflict_handler="resolve",  # some options are redefined here
    )
    add_perplexity_options(parser)
    parser.add_argument("--data", dest="text", required=True, metavar="FILE", help="lines, joined by two newlines")
    parser.add_argument(
        "--model",
        default=str(ROOT / "evals/reference_model"),
        metavar="FOLDER",
        help="folder of a checkpoint (default: the reference model)",
    )
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of the model (default: float32)")
    parser.add_argument("--device", default="cpu", metavar="NAME", help="such as cpu or cuda:0 (default: cpu)")
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="write the results here; stdout also ends with them"
    )
    parser.add_argument(
        "--bits", nargs="+", type=float, default=[], metavar="N", help="also what `for_model(bits=N)` finds"
    )
    parser.add_argument("--bits-text", metavar="FILE", help="the text on which it is found")
    parser.add_argument("--record", metavar="FILE", help="keep what is measured so far; run again to resume")
    parser.set_defaults(
        load=lambda args: run,
        command="eval perplexity",
        rows=True,
        dataset=None,
        split=None,
        field=None,
        threads=None,
        limits={},
    )
    args = parser.parse_args()
    if args.mode == "all":
        parser.error("--mode must be a single mode, got all. Run each by itself.")
    if args.bits and args.bits_text is None:
        parser.error("--bits must come with --bits-text, got it alone. Name a text other than --data.")
    return cli.run(args)


if __name__ == "__main__":
    sys.exit(main())
