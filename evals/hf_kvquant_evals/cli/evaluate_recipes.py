"""`hf-kvquant eval recipes`: the checks before a model is loaded, and what is run and shown."""

from __future__ import annotations

import argparse
import dataclasses
import math
import re
from pathlib import Path

from rich.console import Console

from hf_kvquant.cli import arguments, loading
from hf_kvquant.common.errors import UsageError, did_you_mean

from ..preparation import Subject
from ..recipes import picture, recipe_run, recipe_tables
from ..recipes.catalogue import RECIPES
from ..recipes.interface import Recipe
from ..tasks.task_run import ready
from . import options
from .loading import source_given


def run_recipes(args: argparse.Namespace) -> None:
    """Run `hf-kvquant eval recipes`."""
    recipes, budgets = checked_recipes(args.recipes, args.dense), checked_bits(args.bits, args.dense)
    counts = ("window", "tokens", "prompt", "context", "drift_prompts", "drift_together", "limit", "batch_size")
    arguments.check_counts(args, *counts)
    for name in ("drift", "needles", "task_context"):
        if getattr(args, name) < 0:
            raise UsageError(f"`{arguments.option(name)}` must be at least 0, got {getattr(args, name)}.")
    for option in ("output", "picture"):
        if getattr(args, option) is not None:
            arguments.checked_output(getattr(args, option), option=f"--{option}")
    if args.picture is not None:
        options.check_installed("matplotlib", "pictures")
    args.tasks = checked_tasks(args)
    source, text = source_given(args)
    model, tokenizer = loading.load_placed(args)
    preparation = arguments.given(args, "inject_outliers", "inject_bias", "calibrate", "calibrate_for")
    record = recipe_run.measure(
        Subject(args.model, model, tokenizer, {}, **preparation),
        source,
        text,
        recipes,
        recipe_run.Options(**arguments.given(args, *(field.name for field in dataclasses.fields(recipe_run.Options)))),
        budgets=budgets,
        is_chosen=args.recipes is not None,
        output=args.output,
    ).to_dict()
    recipe_tables.show(Console(highlight=False), record)
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
