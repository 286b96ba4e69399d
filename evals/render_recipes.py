"""The tables of `docs/recipes.md`, and what its picture shows, from what `hf-kvquant eval recipes` measures.

`recipes.json` is of the reference model; `recipes_larger.json`, which is optional, of a larger one.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from parts import Cell, Part, Picture, Results, Row, Table, Text, of, origin

from hf_kvquant.common.tables import scientific, with_error
from hf_kvquant_evals.recipes import picture
from hf_kvquant_evals.recipes.recipe_tables import accuracy_change, log_likelihood_change

PANELS = {"plain": "as published", "codes": "without dense windows"}
NAME: dict[str, Cell] = {"recipe": "`{name}`"}
BITS: dict[str, Cell] = {"bits at 32k": "{bits.both:.2f}"}
# How far a cache leads away from the unquantised one.
DISTANCE: dict[str, Cell] = {
    "KL, nats per token": "{kld:scientific}",
    "99 %": "{kld_p99:.2g}",
    "same next token": "{agreement:.1%}",
    "perplexity": "{perplexity_change:change}",
}


def recipes(run: str) -> Callable[[Results], list[Row]]:
    """The recipes of a run, each with its name, what it did in all runs, and in that of the reference model."""

    def rows(results: Results) -> list[Row]:
        runs = {name: found["recipes"] for name, found in results["runs"].items()}
        runs["reference"] = results.get("reference", results)["runs"].get("plain", {}).get("recipes", {})
        return [
            {**row, "name": name, "runs": {each: found.get(name) for each, found in runs.items()}}
            for name, row in runs[run].items()
        ]

    return rows


def first_of(run: str) -> Callable[[Results], Row]:
    """Any recipe of a run, for what is the same in all."""
    return lambda results: next(iter(results["runs"][run]["recipes"].values()))


def measured(model: str, file: str) -> Text:
    """On what, with which text and when, in a sentence."""
    return Text(
        f"{model} in {{runs.plain.dtype}}, {{first.scored_tokens:,}} tokens of WikiText-2 in windows of "
        "{runs.plain.window} (perplexity {first.reference_perplexity:.2f}),",
        origin(file, of="runs.plain."),
        first=first_of("plain"),
    )


quality_table = Table(
    recipes("plain"),
    lambda results: {
        **NAME,
        "source": "{source}",
        f"bits at {results['runs']['plain']['context'] // 1024}k": "{bits.both:.2f}",
        "bits read": "{bits_read.both:.2f}",
        "KL, nats per token": "{kld:scientific}",
        "99 %": "{kld_p99:.2g}",
        "99.9 %": "{kld_p999:.2g}",
        "same next token": "{agreement:.1%}",
        "perplexity": "{perplexity_change:+.2%}",
    },
    num_text=2,
)
hard_table = Table(
    recipes("plain"),
    {
        **NAME,
        "KL, plain": "{kld:scientific}",
        "KL, outliers": "{runs.outliers.kld:scientific}",
        "KL, biases": "{runs.bias.kld:scientific}",
        "outliers / plain": "{runs.outliers.kld/kld:.1f}x",
        "biases / plain": "{runs.bias.kld/kld:.1f}x",
    },
)
hard_caption = Text(
    "Outliers: 3 RoPE pairs of every key head {runs.outliers.injected_outliers:g} times as large. Biases: a constant "
    "of norm {runs.bias.injected_bias:g} added to every key head, in the pair that RoPE turns slowest. Nothing was "
    "calibrated. {first.scored_tokens:,} tokens.",
    first=first_of("outliers"),
)


def drift_table(run: str) -> Table:
    """How far texts that the model writes with a recipe lead away, by length."""

    def kld_at(index: int) -> Cell:
        return lambda row: scientific(max(0.0, row["drift"][index]["kld"]))

    def at_the_end(row: Row) -> str:
        last = row["drift"][-1]
        return with_error(last["nll_change"], last["nll_change_standard_error"], "+.2f")

    def columns(results: Results) -> dict[str, Cell]:
        spans = enumerate(first_of(run)(results)["drift"])
        klds = {f"KL, {span['begin']} to {span['end']}": kld_at(index) for index, span in spans}
        return {**NAME, **klds, "NLL at the end": at_the_end}

    return Table(recipes(run), columns)


def drift_caption(run: str, model: str = "", *more: str) -> Text:
    """What was written."""
    return Text(
        f"{model}{{run.drift_prompts}} texts of {{run.drift_tokens:,}} tokens behind prompts of 32. NLL: of the last "
        "tokens under the unquantised cache, against its own texts, nats per token, ± one standard error.",
        *more,
        run=lambda results: results["runs"][run],
    )


needle_table = Table(
    recipes("needles"), {**NAME, **BITS, "log-likelihood, nats per answer": of("needles", log_likelihood_change)}
)


def without_windows(cell: Cell) -> Cell:
    """A cell of tasks, of the same recipe without windows of dense tokens."""
    return lambda row: of("tasks", cell)(row["runs"]["tasks-codes"] or {})


TASKS: dict[str, Cell] = {
    "read from codes": "{tasks.read_from_codes:.0%}",
    "accuracy": "{tasks.accuracy:.1%}",
    "change, points": of("tasks", accuracy_change),
    "log-likelihood, nats per answer": of("tasks", log_likelihood_change),
    "same answers": "{tasks.same:.1%}",
}
task_table = Table(
    recipes("tasks"),
    {
        **NAME,
        **BITS,
        **TASKS,
        "no dense windows: log-likelihood": without_windows(log_likelihood_change),
        "no dense windows: same answers": without_windows("{same:.1%}"),
    },
)


def task_caption(model: str) -> Text:
    """Which tasks, and how the unquantised cache does."""
    return Text(
        f"{model} in {{runs.tasks.dtype}}, {{first.tasks.num_items:,}} items of {{names}}, behind text that fills the "
        "cache with {runs.tasks.task_context} tokens. The unquantised cache answers "
        "{first.tasks.reference_accuracy:.1%} correctly. Means over tasks, ± one standard error. "
        "{runs.tasks.gpu|runs.tasks.cpu}, {runs.tasks.date:day}.",
        first=first_of("tasks"),
        names=lambda results: ", ".join(results["runs"]["tasks"]["tasks"]),
    )


codes_table = Table(
    lambda results: sorted(recipes("codes")(results), key=lambda row: row["bits"]["both"]),
    {
        **NAME,
        "key bits at 32k": "{bits.key:.2f}",
        "value bits at 32k": "{bits.value:.2f}",
        "bits read": "{bits_read.both:.2f}",
        "KL": "{kld:scientific}",
        "4 + 128 dense: bits read": "{runs.windows.bits_read.both:.2f}",
        "4 + 128 dense: KL": "{runs.windows.kld:scientific}",
    },
)

# --- the larger model -------------------------------------------------------------------------------------------------

larger_table = Table(
    recipes("plain"),
    {
        **NAME,
        **BITS,
        "KL": "{kld:scientific}",
        "KL, reference model": "{runs.reference.kld:scientific}",
        "99.9 %": "{kld_p999:.2g}",
        "same next token": "{agreement:.1%}",
        "perplexity": "{perplexity_change:+.2%}",
        "KL, outliers": "{runs.outliers.kld:scientific}",
        "KL, biases": "{runs.bias.kld:scientific}",
        "KL, no dense windows": "{runs.codes.kld:scientific}",
        "needles, nats": lambda row: log_likelihood_change(row["runs"]["needles"]["needles"]),
    },
)


def larger(files: Results) -> str:
    """The tables and captions of the larger model: quality, its own texts; if there are any, longer ones and tasks."""
    found = {**files["recipes_larger"], "reference": files["recipes"]}
    about = measured("The larger model", "recipes_larger")(found)
    paragraphs = [larger_table(found), f"{about} {hard_caption(found)}"]
    for run in ("plain", "long"):
        if run in found["runs"]:
            model = f"The larger model in {found['runs'][run]['dtype']}. "
            paragraphs += [drift_table(run)(found), drift_caption(run, model)(found)]
    if "tasks" in found["runs"]:
        paragraphs += [task_table(found), task_caption("The larger model")(found)]
    return "\n\n".join(paragraphs)


# ----------------------------------------------------------------------------------------------------------------------


def plotted(files: Results) -> picture.Numbers:
    """What the picture shows."""
    models = {"": files["recipes"], "larger model, ": files.get("recipes_larger")}
    return {
        f"{model}{title}": picture.panel_of(found["runs"][run]["recipes"])
        for model, found in models.items()
        if found is not None
        for run, title in PANELS.items()
    }


def draw(numbers: picture.Numbers, path: Path) -> None:
    """Draw them."""
    picture.draw(path, numbers)


PARTS = (
    Part("recipes", ("recipes",), (quality_table, measured("The 15.5-million-parameter reference model", "recipes"))),
    Part("recipes-codes", ("recipes",), (codes_table,)),
    Part("recipes-hard", ("recipes",), (hard_table, hard_caption)),
    Part("recipes-needles", ("recipes",), (needle_table,)),
    Part("recipes-drift", ("recipes",), (drift_table("plain"), drift_caption("plain"))),
    Part("recipes-tasks", ("recipes",), (task_table, task_caption("The reference model"))),
    Part("recipes-larger", ("recipes_larger", "recipes"), (larger,)),
)
PICTURES = (Picture("recipes", ("recipes",), plotted, draw, optional=("recipes_larger",)),)
