"""The options of `hf-kvquant eval recipes`."""

from __future__ import annotations

import argparse
from typing import Any

from hf_kvquant.cli import arguments

from ..choices import BUDGET_PRESETS, RECIPE_NAMES, SAMPLE_TOKENS, TOKENS, WINDOW
from . import options


def add_recipes(evaluations: Any) -> None:
    """Add `recipes` to the evaluations."""
    parser = arguments.add_command(
        evaluations,
        "recipes",
        load,
        help="published ways of quantising a cache, on equal terms",
        description="Compare published ways of quantising a cache with our presets: true bits, perplexity, KL "
        "divergence and next-token agreement on a text, what happens when the model goes on with its own text, "
        "numbers hidden in long prompts, and zero-shot tasks. Everything is simulated by small references of each "
        "paper, and compared with the unquantised cache in the same run. Recipes that learn from a text get its first "
        f"{SAMPLE_TOKENS:,} tokens, which are not measured.",
    )
    options.add_source(parser)
    add = parser.add_argument
    add("--recipes", metavar="LIST", help=f"some of {', '.join(RECIPE_NAMES)} (default: all)")
    within = f"also the best of {' and '.join(BUDGET_PRESETS)} for each layer within so many bits on average, such as "
    add("--bits", metavar="LIST", help=within + "2.5,2.75; the pre-flight finds it on the text's first tokens")
    dense = "keep the first FIRST and the newest NEWEST tokens dense in all recipes, instead of what each paper does"
    add("--dense", metavar="FIRST+NEWEST", help=dense)
    add("--window", type=int, metavar="N", help=f"tokens of a window (default: {WINDOW}, or the model's context)")
    add("--tokens", type=int, metavar="N", help=f"score at least N tokens (default: {TOKENS} or all)")
    options.add_prompt(parser)
    context = "count bits at this length as well; 1k is 1024 (default: 32768)"
    add("--context", type=options.tokens, default=32768, metavar="N", help=context)
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
    options.add_preparation(parser)
    arguments.add_placement(parser)
    add("--output", metavar="FILE", help="write results as JSON; run again to resume")
    add("--picture", metavar="FILE", help="draw quality against bits, as SVG")


def load(args: argparse.Namespace) -> arguments.Run:
    """Import what runs the evaluation."""
    from .evaluate_recipes import run_recipes

    return run_recipes
