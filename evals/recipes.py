"""Makes the results file of the recipes from records of `hf-kvquant eval recipes`.

    hf-kvquant eval recipes evals/reference_model --text wikitext2.test.raw --rows --dtype float32 \\
        --tokens 12000 --drift 1024 --needles 0 --output plain.json
    ... --tokens 4000 --drift 0 --needles 0 --inject-outliers 8 --output outliers.json
    ... --tokens 4000 --drift 0 --needles 0 --inject-bias 100 --output bias.json
    ... --tokens 4000 --drift 0 --needles 0 --dense 0+0 --output codes.json
    ... --tokens 4000 --drift 0 --needles 0 --dense 4+128 --output windows.json
    ... --tokens 2000 --drift 0 --needles 12 --output needles.json
    python evals/recipes.py plain.json outliers.json bias.json codes.json windows.json needles.json

    ... --tokens 2000 --drift 0 --needles 0 --tasks piqa arc_easy arc_challenge --data zero_shot --limit 200 \\
        --batch-size 32 --bits 2.74 --output tasks.json
    ... the same with --dense 0+0 instead of --bits, and --output tasks-codes.json
    python evals/recipes.py --add tasks.json tasks-codes.json

A record has every token's divergence; a results file has each recipe's row. A run is named after its record's file.
With `--add`, records of other recipes add rows to the runs that there are; these rows name their own commit. Others
become runs of their own.
`render_recipes.py` makes the tables and the picture of `docs/recipes.md` from it.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from results_files import write_results

from hf_kvquant.common.naming import ROOT
from hf_kvquant_evals.recipes.recipe_run import SUMMARY
from hf_kvquant_evals.recipes.recipe_tables import rows_of
from hf_kvquant_evals.records import read_record

OUTPUT = ROOT / "evals" / "results" / "recipes.json"


def flattened(record: dict[str, Any]) -> dict[str, Any]:
    """A run of the results file: the card and the settings of a finished record, and its rows."""
    seconds = record["parts"][SUMMARY]["seconds"]
    return {**record["card"], **record["settings"], "recipes": rows_of(record), "seconds": seconds}


# What may differ between a run and a record that adds to it: the recipes, and when and with which commit it was made.
_OWN = ("recipes", "seconds", "command", "commit", "date", "is_dirty")


def add(run: dict[str, Any], more: dict[str, Any], name: str) -> None:
    """Add the rows of a record to a run of the same settings."""
    for key in run.keys() - set(_OWN):
        if run[key] != more.get(key):
            raise SystemExit(f"recipes: {name} must be of the same {key}, {run[key]}, got {more.get(key)}.")
    own = {key: more[key] for key in ("commit", "date")}
    run["recipes"] |= {recipe: {**row, **own} for recipe, row in more["recipes"].items()}


def main() -> None:
    """Parse the command line and write the results file."""
    parser = argparse.ArgumentParser(description="Make the results file of the recipes from finished records.")
    parser.add_argument("records", nargs="+", type=Path, metavar="RECORD", help="files that eval recipes wrote")
    parser.add_argument("--output", type=Path, default=OUTPUT, metavar="FILE", help="the results file")
    parser.add_argument("--add", action="store_true", help="add to the runs of the results file")
    args = parser.parse_args()
    found = {path.stem: flattened(read_record(path)) for path in args.records}
    runs = json.loads(args.output.read_text(encoding="utf-8"))["runs"] if args.add else found
    for name, run in found.items() if args.add else ():
        if name in runs:
            add(runs[name], run, name)
        else:
            runs[name] = run
    write_results({"runs": runs}, args.output)


if __name__ == "__main__":
    main()
