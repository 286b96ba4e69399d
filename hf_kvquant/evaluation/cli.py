"""`hf-kvquant eval`: the list of evaluations. Each is a module with its own options.

Every such module has `add_parser(commands)` and `run(args)`, and imports what is heavy or optional inside `run`.
"""

from __future__ import annotations

from typing import Any

from . import long_context, perplexity, report, tasks

# The modules of the evaluations, in the order of the help.
EVALUATIONS: tuple[Any, ...] = (perplexity, tasks, long_context, report)


def add_parser(commands: Any) -> None:
    """Add `eval` to the commands, the sub-parsers of argparse."""
    evaluate = commands.add_parser(
        "eval",
        help="measure what presets cost in quality",
        description="Measure what presets cost in quality, against the unquantised cache in the same run.",
    )
    evaluations = evaluate.add_subparsers(required=True, metavar="EVALUATION")
    for module in EVALUATIONS:
        module.add_parser(evaluations)
