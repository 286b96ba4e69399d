"""What the pages say about quantised weights beside the cache, from `evals/results/ablation.json` and its twin with
outliers alone, and from those of a larger model.

`ablation.py` measures, and `render_readme.py` puts this into the pages.
"""

from __future__ import annotations

from parts import Part, Results

from hf_kvquant.common.tables import markdown_table as table


def cost_table(files: Results) -> str:
    """Per weights and cache: perplexity, what each of both costs, and accuracy."""
    results, with_outliers = files.values()
    hard = {(row["weights"], row["cache"]): row for row in with_outliers["rows"]}
    lines = []
    for row in results["rows"]:
        scores, other = row["accuracy"], hard[row["weights"], row["cache"]]
        accuracy = "" if not scores else ", ".join(f"{value:.1%}" for value in scores.values())
        costs = [f"{row['weights_cost']:+.1%}", f"{row['cache_adds']:+.1%}", f"{other['cache_adds']:+.1%}"]
        lines.append([row["weights"], row["cache"], f"{row['perplexity']:.2f}", *costs, accuracy])
    headings = ["weights, activations", "cache", "perplexity", "weights cost", "cache adds", "with outliers"]
    return table([*headings, ", ".join(results["tasks"])], lines)


# Of which model a results file is, by its name.
MODELS = {"ablation": "The reference model", "ablation_larger": "The larger model"}


def caption(files: Results) -> str:
    """What was measured, on what and when."""
    (name, results), (_, with_outliers) = files.items()
    return (
        f"{MODELS[name]}, {results['scored_tokens']:,} tokens of WikiText-2 in windows of {results['window']:,}, "
        f'and {results["limit"]} items of each task. "Weights cost" is their change of perplexity with an unquantised '
        'cache, "cache adds" the change on top of that. "With outliers": the same where 3 RoPE pairs of every key head '
        f"are {with_outliers['injected_outliers']:g} times as large. Weights and activations are simulated. "
        f"{results['date'][:10]}, `evals/results/{name}.json`, `{name}_outliers.json`."
    )


PARTS = tuple(Part(name.replace("_", "-"), (name, f"{name}_outliers"), (cost_table, caption)) for name in MODELS)
