"""`hf-kvquant eval recipes`: its options, and the checks before a model is loaded."""

from __future__ import annotations

import argparse
import dataclasses
import math
import re
from pathlib import Path
from typing import Any

from rich.console import Console

from ..common.errors import did_you_mean
from ..evaluation.errors import UsageError
from ..evaluation.perplexity.segments import TOKENS, WINDOW
from ..evaluation.preparation import Subject
from ..evaluation.recipes import measure, picture, results
from ..evaluation.recipes.catalogue import RECIPES
from ..evaluation.recipes.interface import Recipe
from ..evaluation.recipes.ours import BUDGET_PRESETS
from ..evaluation.tasks.measure import ready
from . import arguments


def add_recipes(evaluations: Any) -> None:
    """Add `recipes` to the evaluations."""
    parser = arguments.add_command(
        evaluations,
        "recipes",
        run_recipes,
        help="published ways of quantising a cache, on equal terms",
        description="Compare published ways of quantising a cache with our presets: true bits, perplexity, KL "
        "divergence and next-token agreement on a text, what happens when the model goes on with its own text, "
        "numbers hidden in long prompts, and zero-shot tasks. Everything is simulated by small references of each "
        "paper, and compared with the unquantised cache in the same run. Recipes that learn from a text get its first "
        f"{measure.SAMPLE_TOKENS:,} tokens, which are not measured.",
    )
    arguments.add_source(parser)
    add = parser.add_argument
    add("--recipes", metavar="LIST", help=f"some of {', '.join(RECIPES)} (default: all)")
    within = f"also the best of {' and '.join(BUDGET_PRESETS)} for each layer within so many bits on average, such as "
    add("--bits", metavar="LIST", help=within + "2.5,2.75; the pre-flight finds it on the text's first tokens")
    dense = "keep the first FIRST and the newest NEWEST tokens dense in all recipes, instead of what each paper does"
    add("--dense", metavar="FIRST+NEWEST", help=dense)
    add("--window", type=int, metavar="N", help=f"tokens of a window (default: {WINDOW}, or the model's context)")
    add("--tokens", type=int, metavar="N", help=f"score at least N tokens (default: {TOKENS} or all)")
    add("--context", type=int, default=32768, metavar="N", help="count bits at this length as well (default: 32768)")
    add(
        "--drift",
        type=int,
        default=512,
        metavar="N",
        help="tokens of each text that the model writes (default: 512)",
    )
    add("--drift-prompts", type=int, default=8, metavar="N", help="texts that it writes (default: 8)")
    together = "recipes that write in one batch (default: 1); more are faster on a GPU, and need more memory"
    add("--drift-together", type=int, default=1, metavar="N", help=together)
    add("--needles", type=int, default=8, metavar="N", help="long prompts with a hidden number (default: 8; 0: none)")
    add("--seed", type=int, default=0, metavar="N", help="seed of its texts (default: 0)")
    named = "also run zero-shot tasks of lm-eval that compare log-likelihoods (default: none)"
    add("--tasks", nargs="+", metavar="NAME", help=named)
    add("--data", metavar="DIR", help="JSON lines of the tasks, as for eval tasks (default: lm-eval downloads its own)")
    add("--limit", type=int, metavar="N", help="run only the first N items of each task")
    before = "text before each item fills the cache with N tokens (default: 512; 0: no text)"
    add("--task-context", type=int, default=512, metavar="N", help=before)
    add("--batch-size", type=int, default=8, metavar="N", help="texts per forward of the tasks (default: 8)")
    arguments.add_preparation(parser)
    arguments.add_placement(parser)
    add("--output", metavar="FILE", help="write results as JSON; run again to resume")
    add("--picture", metavar="FILE", help="draw quality against bits, as SVG")


def run_recipes(args: argparse.Namespace) -> None:
    """Run `hf-kvquant eval recipes`."""
    recipes, budgets = checked_recipes(args.recipes, args.dense), checked_bits(args.bits, args.dense)
    counts = ("window", "tokens", "context", "drift_prompts", "drift_together", "limit", "batch_size")
    arguments.check_counts(args, *counts)
    for name in ("drift", "needles", "task_context"):
        if getattr(args, name) < 0:
            raise UsageError(f"`{arguments.option(name)}` must be at least 0, got {getattr(args, name)}.")
    for option in ("output", "picture"):
        if getattr(args, option) is not None:
            arguments.checked_output(getattr(args, option), option=f"--{option}")
    if args.picture is not None:
        arguments.check_installed("matplotlib", "pictures")
    args.tasks = checked_tasks(args)
    source, text = arguments.source_of(args)
    model, tokenizer = arguments.load_placed(args)
    preparation = arguments.given(args, "inject_outliers", "inject_bias", "calibrate", "calibrate_for")
    record = measure.measure(
        Subject(args.model, model, tokenizer, {}, **preparation),
        source,
        text,
        recipes,
        measure.Options(**arguments.given(args, *(field.name for field in dataclasses.fields(measure.Options)))),
        budgets=budgets,
        is_chosen=args.recipes is not None,
        output=args.output,
    ).to_dict()
    results.show(Console(highlight=False), record)
    if args.picture is not None:
        numbers = picture.numbers_of({record["settings"]["model"]: record})
        picture.draw(Path(args.picture).expanduser(), numbers)


def checked_tasks(args: argparse.Namespace) -> list[str]:
    """The names of `--tasks`, once everything that they need is known to be there."""
    if args.tasks is not None:
        return ready(args.tasks, args.data)
    for name in ("data", "limit"):
        if getattr(args, name) is not None:
            raise UsageError(f"`--{name}` must come with --tasks, got {getattr(args, name)} without. Name tasks.")
    return []


def checked_recipes(names: str | None, dense: str | None) -> dict[str, Recipe]:
    """The recipes of `--recipes`, each once and in the order given, with the dense tokens of `--dense`."""
    words = list(RECIPES) if names is None else [word.strip() for word in names.split(",") if word.strip()]
    if not words:
        raise UsageError(f"`--recipes` must name something, got '{names}'. Separate names by commas.")
    for word in words:
        if word not in RECIPES:
            raise UsageError(f"`--recipes` must be of {', '.join(RECIPES)}, got '{word}'.{did_you_mean(word, RECIPES)}")
    chosen = {word: RECIPES[word] for word in words}
    if dense is None:
        return chosen
    found = re.fullmatch(r"(\d+)\+(\d+)", dense)
    if found is None:
        raise UsageError(f"`--dense` must be FIRST+NEWEST tokens, got '{dense}'. Write for example 4+128.")
    sink, recent = map(int, found.groups())
    return {name: recipe.with_dense(sink, recent) for name, recipe in chosen.items()}


def checked_bits(budgets: str | None, dense: str | None) -> list[float]:
    """The budgets of `--bits`, each once and in the order given."""
    if budgets is None:
        return []
    if dense is not None:
        raise UsageError(f"`--bits` must stand without --dense, got --dense {dense}. Its presets bring dense tokens.")
    try:
        found = [float(word) for word in budgets.split(",")]
    except ValueError:
        found = []
    if not found or not all(0 < each < math.inf for each in found):
        raise UsageError(f"`--bits` must be positive numbers, got '{budgets}'. Write for example 2.5,2.75.")
    return list(dict.fromkeys(found))
