"""Results files of the evaluations: how they are written, and how an interrupted run goes on in one."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch

# What all runs that wrote one file share: figures are only compared within one commit, machine and model.
SHARED = ("commit", "is_dirty", "hf_kvquant", "torch", "transformers", "cpu", "gpu", "driver", "model", "dtype")
LEAST_NEW_TOKENS = 8


def add_run_options(
    parser: argparse.ArgumentParser,
    *,
    after: str,
    resumed: str | None = None,
    new_tokens: int | None = None,
    device: bool = True,
) -> None:
    """Add `--device`, `--output`, `--resume` and, with a default, `--new-tokens` to a command line.

    Args:
        parser: Of the command line.
        after: After what the results are written, such as "every case".
        resumed: What `--resume` keeps, and under which condition; `None` leaves the option out.
        new_tokens: The default of `--new-tokens`; `None` leaves the option out.
        device: Whether there is a choice of device.
    """
    if device:
        parser.add_argument("--device", type=torch.device, help="(default: cuda if there is a GPU, else cpu)")
    if new_tokens is not None:
        told = "per call; the first quarter is not timed (default: %(default)s)"
        parser.add_argument("--new-tokens", type=int, default=new_tokens, help=told)
    parser.add_argument("--output", type=Path, help=f"also write the JSON here, after {after}")
    if resumed is not None:
        parser.add_argument("--resume", action="store_true", help=f"keep {resumed}")


def parse_run(parser: argparse.ArgumentParser, words: list[str] | None) -> argparse.Namespace:
    """Parse a command line with `add_run_options`, check these options, and choose the device if none is named."""
    arguments = parser.parse_args(words)
    if getattr(arguments, "resume", False) and arguments.output is None:
        parser.error("--resume needs --output, the results to resume")
    if getattr(arguments, "new_tokens", LEAST_NEW_TOKENS) < LEAST_NEW_TOKENS:
        parser.error(f"--new-tokens must be at least {LEAST_NEW_TOKENS}, got {arguments.new_tokens}")
    if getattr(arguments, "device", ...) is None:
        arguments.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return arguments


def earlier_results(
    results: dict[str, Any], arguments: argparse.Namespace, shared: tuple[str, ...] = SHARED
) -> dict[str, Any]:
    """What an earlier run wrote to `--output`; nothing without `--resume` or if there is no file.

    Sets `results["commands"]` to the commands of all runs, this one included; `command` is that of the newest run, as
    on every card.

    Args:
        results: Of this run; those of the earlier one must be equal to it in what `shared` names.
        arguments: With `output` and `resume`.
        shared: Keys of results.

    Raises:
        SystemExit: They are of another commit, machine or model.
    """
    earlier: dict[str, Any] = {}
    if arguments.resume and arguments.output.exists():
        earlier = json.loads(arguments.output.read_text(encoding="utf-8"))
        for key in shared:
            if earlier.get(key) != results.get(key):
                raise SystemExit(
                    f"{Path(sys.argv[0]).stem}: `--resume` must find results of the same {key}, {results.get(key)}, "
                    f"got {earlier.get(key)} in {arguments.output}. Name another --output."
                )
        earlier.setdefault("commands", [earlier["command"]])
    results["commands"] = [*earlier.get("commands", []), results["command"]]
    return earlier


def write_results(results: dict[str, Any], path: Path | None) -> None:
    """Write results as JSON, if there is a path; its folder is made if missing."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
