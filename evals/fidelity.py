"""The results files of quality: `hf-kvquant eval perplexity` on the reference model, in the form that the README reads.

    python evals/fidelity.py --data wikitext2.test.raw --chunk 128 --output evals/results/fidelity.json

Everything is decided in `hf_kvquant/evaluation/`: windows, gate, counter, aggregates, and most options. `--data` is
`--text` with `--rows`, the convention of papers; `--record` is what `--output` is there; dtype and device have the
defaults that results are compared at. Here a record becomes a results file, whose names are those of
`render_readme.py`: one row per preset with its windows, and weights and tokenizer by their hashes.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from hf_kvquant import cli
from hf_kvquant.arguments import DTYPES
from hf_kvquant.evaluation import perplexity
from hf_kvquant.evaluation.perplexity_results import kld_of, show
from hf_kvquant.evaluation.preparation import OUTLIER_PAIRS
from hf_kvquant.evaluation.provenance import ROOT, sha256


def flattened(record: dict[str, Any], folder: Path) -> dict[str, Any]:
    """A results file.

    Args:
        record: Of a run in one mode.
        folder: Of the model.
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


def run(args: argparse.Namespace) -> None:
    """Measure, print the tables, and write the results file; the last line on stdout holds the same."""
    output, args.output = args.output, args.record
    record = perplexity.measure(args).to_dict()
    results = flattened(record, Path(args.model))
    show(Console(highlight=False), record)
    if output:
        Path(output).parent.mkdir(parents=True, exist_ok=True)
        Path(output).write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(results))


def main() -> int:
    """The exit code, as for `hf-kvquant`."""
    parser = argparse.ArgumentParser(
        description="Compare presets with the unquantised cache on a text file.",
        conflict_handler="resolve",  # some options are other ones here
    )
    perplexity.add_options(parser)
    parser.add_argument("--data", dest="text", required=True, metavar="FILE", help="lines, joined by two newlines")
    parser.add_argument(
        "--model",
        default=str(ROOT / "evals/reference_model"),
        metavar="FOLDER",
        help="of a checkpoint (default: the reference model)",
    )
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of the model (default: float32)")
    parser.add_argument("--device", default="cpu", metavar="NAME", help="such as cpu or cuda:0 (default: cpu)")
    parser.add_argument("--output", metavar="FILE", help="for the results, which stdout ends with too")
    parser.add_argument(
        "--record", metavar="FILE", help="what is measured so far; a second run goes on where one stopped"
    )
    parser.set_defaults(run=run, rows=True, dataset=None, split=None, field=None)
    args = parser.parse_args()
    if args.mode == "all":
        parser.error("--mode must be one that a results file is for, got all. Run each by itself.")
    return cli.run(args)


if __name__ == "__main__":
    sys.exit(main())
