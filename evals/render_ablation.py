"""What the pages say about quantised weights beside the cache, from what `ablation.py` measures, with and without
outliers.
"""

from __future__ import annotations

from parts import Part, Results, Row, Table

# Of which model a results file is, by its name.
MODELS = {"ablation": "The reference model", "ablation_larger": "The larger model"}


def rows(files: Results) -> list[Row]:
    """Each row, with its twin of the model with outliers as `hard`."""
    results, with_outliers = files.values()
    hard = {(row["weights"], row["cache"]): row for row in with_outliers["rows"]}
    return [{**row, "hard": hard[row["weights"], row["cache"]]} for row in results["rows"]]


cost_table = Table(
    rows,
    lambda files: {
        "weights, activations": "{weights}",
        "cache": "{cache}",
        "perplexity": "{perplexity:.2f}",
        "weights cost": "{weights_cost:+.1%}",
        "cache adds": "{cache_adds:+.1%}",
        "with outliers": "{hard.cache_adds:+.1%}",
        ", ".join(next(iter(files.values()))["tasks"]): lambda row: ", ".join(
            f"{value:.1%}" for value in (row["accuracy"] or {}).values()
        ),
    },
)


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
