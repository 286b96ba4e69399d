"""The tables of `docs/recipes.md`, from `evals/results/recipes.json` and `recipes_larger.json`, and what its picture
shows.

The first file is of the reference model. The second is of a larger one, and optional.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from parts import Part, Picture, Results

from hf_kvquant.common.tables import markdown_table, scientific, with_error
from hf_kvquant_evals.recipes import picture
from hf_kvquant_evals.recipes.results import accuracy_change, log_likelihood_change

PLAIN, OUTLIERS, BIAS, CODES, WINDOWS = "plain", "outliers", "bias", "codes", "windows"
NEEDLES, LONG = "needles", "long"
TASKS, TASKS_CODES = "tasks", "tasks-codes"
PANELS = {PLAIN: "as published", CODES: "without dense windows"}

Row = Mapping[str, Any]
Rows = Mapping[str, Row]
# What a column shows of a recipe, by its name and its row.
Column = Callable[[str, Row], str]


def table(rows: Rows, columns: Mapping[str, Column], *, num_text: int = 1) -> str:
    """A line for each recipe, and a column for each heading behind the name."""
    lines = [[f"`{name}`", *(column(name, row) for column in columns.values())] for name, row in rows.items()]
    return markdown_table(["recipe", *columns], lines, num_text=num_text)


def rows_of(results: Mapping[str, Any], run: str) -> Rows:
    """The rows of a run."""
    rows: Rows = results["runs"][run]["recipes"]
    return rows


def first_of(rows: Rows) -> Row:
    """Any row, for what is the same in all of a run."""
    return next(iter(rows.values()))


def bits(which: str = "bits", side: str = "both") -> Column:
    """Bits of a value."""
    return lambda name, row: f"{row[which][side]:.2f}"


def kld_in(rows: Rows) -> Column:
    """The divergence in another run; a dash if the recipe is not in it."""
    return lambda name, row: scientific(rows[name]["kld"]) if name in rows else "-"


def form(key: str, spec: str) -> Column:
    """An entry of the row, in a format."""
    return lambda name, row: format(row[key], spec)


def kld(name: str, row: Row) -> str:
    """The divergence."""
    return scientific(row["kld"])


def quality_table(results: dict[str, Any]) -> str:
    """Every recipe: its source, its bits, and its distance from the unquantised cache."""
    run = results["runs"][PLAIN]
    columns: dict[str, Column] = {
        "source": lambda name, row: str(row["source"]),
        f"bits at {run['context'] // 1024}k": bits(),
        "bits read": bits("bits_read"),
        "KL, nats per token": kld,
        "99 %": form("kld_p99", ".2g"),
        "99.9 %": form("kld_p999", ".2g"),
        "same next token": form("agreement", ".1%"),
        "perplexity": form("perplexity_change", "+.2%"),
    }
    return table(run["recipes"], columns, num_text=2)


def measured(results: dict[str, Any], model: str, file: str) -> str:
    """On what, with which text and when, in a sentence."""
    run = results["runs"][PLAIN]
    first = first_of(run["recipes"])
    return (
        f"{model} in {run['dtype']}, {first['scored_tokens']:,} tokens of WikiText-2 in windows of {run['window']} "
        f"(perplexity {first['reference_perplexity']:.2f}), {run.get('gpu', run['cpu'])}, {run['date'][:10]}, "
        f"`evals/results/{file}`."
    )


def quality_caption(results: dict[str, Any]) -> str:
    """What was measured, on what and when."""
    return measured(results, "The 15.5-million-parameter reference model", "recipes.json")


def hard_table(results: dict[str, Any]) -> str:
    """The divergence of every recipe on the model as it is, with outliers, and with biases."""
    plain, hard = rows_of(results, PLAIN), {name: rows_of(results, name) for name in (OUTLIERS, BIAS)}

    def ratio(rows: Rows) -> Column:
        return lambda name, row: f"{rows[name]['kld'] / row['kld']:.1f}x"

    columns: dict[str, Column] = {
        "KL, plain": kld,
        "KL, outliers": kld_in(hard[OUTLIERS]),
        "KL, biases": kld_in(hard[BIAS]),
        "outliers / plain": ratio(hard[OUTLIERS]),
        "biases / plain": ratio(hard[BIAS]),
    }
    return table(plain, columns)


def hard_caption(results: dict[str, Any]) -> str:
    """What was injected."""
    outliers, bias = (results["runs"][name] for name in (OUTLIERS, BIAS))
    return (
        f"Outliers: 3 RoPE pairs of every key head {outliers['injected_outliers']:g} times as large. Biases: a "
        f"constant of norm {bias['injected_bias']:g} added to every key head, in the pair that RoPE turns slowest. "
        f"Nothing was calibrated. {first_of(outliers['recipes'])['scored_tokens']:,} tokens."
    )


def drift_table(results: dict[str, Any], run: str = PLAIN) -> str:
    """How far texts that the model writes with a recipe lead away, by length."""
    rows = rows_of(results, run)
    spans = [f"KL, {span['begin']} to {span['end']}" for span in first_of(rows)["drift"]]

    def kld_at(index: int) -> Column:
        return lambda name, row: scientific(max(0.0, row["drift"][index]["kld"]))

    def change(name: str, row: Row) -> str:
        last = row["drift"][-1]
        return with_error(last["nll_change"], last["nll_change_standard_error"], "+.2f")

    columns: dict[str, Column] = {span: kld_at(index) for index, span in enumerate(spans)}
    return table(rows, {**columns, "NLL at the end": change})


def drift_caption(results: dict[str, Any], run: str = PLAIN) -> str:
    """What was written."""
    settings = results["runs"][run]
    return (
        f"{settings['drift_prompts']} texts of {settings['drift_tokens']:,} tokens behind prompts of 32. NLL: of the "
        "last tokens under the unquantised cache, against its own texts, nats per token, ± one standard error."
    )


def needle_change(rows: Rows) -> Column:
    """How the log-likelihood of hidden numbers changes."""

    def change(name: str, row: Row) -> str:
        return log_likelihood_change(rows[name]["needles"])

    return change


def needle_table(results: dict[str, Any]) -> str:
    """How the log-likelihood of hidden numbers changes, by recipe."""
    rows = rows_of(results, NEEDLES)
    return table(rows, {"bits at 32k": bits(), "log-likelihood, nats per answer": needle_change(rows)})


def of_tasks(cell: Callable[[Row], str], rows: Rows | None = None) -> Column:
    """What a row says of tasks, or that of the same recipe in another run; a dash if it is not in it."""

    def shown(name: str, row: Row) -> str:
        found = row if rows is None else rows.get(name)
        return "-" if found is None else cell(found["tasks"])

    return shown


def same(row: Row) -> str:
    """The share of items with the same answer."""
    return f"{row['same']:.1%}"


def task_table(results: dict[str, Any]) -> str:
    """Zero-shot tasks under every recipe, as published and without windows of dense tokens."""
    codes = rows_of(results, TASKS_CODES)
    columns: dict[str, Column] = {
        "bits at 32k": bits(),
        "read from codes": of_tasks(lambda row: f"{row['read_from_codes']:.0%}"),
        "accuracy": of_tasks(lambda row: f"{row['accuracy']:.1%}"),
        "change, points": of_tasks(accuracy_change),
        "log-likelihood, nats per answer": of_tasks(log_likelihood_change),
        "same answers": of_tasks(same),
        "no dense windows: log-likelihood": of_tasks(log_likelihood_change, codes),
        "no dense windows: same answers": of_tasks(same, codes),
    }
    return table(rows_of(results, TASKS), columns)


def task_caption(results: dict[str, Any], model: str = "The reference model") -> str:
    """Which tasks, and how the unquantised cache does."""
    run = results["runs"][TASKS]
    first = first_of(run["recipes"])["tasks"]
    return (
        f"{model} in {run['dtype']}, {first['num_items']:,} items of {', '.join(run['tasks'])}, behind text that fills "
        f"the cache with {run['task_context']} tokens. The unquantised cache answers "
        f"{first['reference_accuracy']:.1%} correctly. Means over tasks, ± one standard error. "
        f"{run.get('gpu', run['cpu'])}, {run['date'][:10]}."
    )


def codes_table(results: dict[str, Any]) -> str:
    """Every recipe without windows of dense tokens, and with the same windows: its bits and its divergence."""
    codes, windows = (rows_of(results, name) for name in (CODES, WINDOWS))
    columns: dict[str, Column] = {
        "key bits at 32k": bits(side="key"),
        "value bits at 32k": bits(side="value"),
        "bits read": bits("bits_read"),
        "KL": kld,
        "4 + 128 dense: bits read": lambda name, row: bits("bits_read")(name, windows[name]),
        "4 + 128 dense: KL": kld_in(windows),
    }
    return table(dict(sorted(codes.items(), key=lambda item: item[1]["bits"]["both"])), columns)


# --- the larger model -------------------------------------------------------------------------------------------------


def larger(files: Results) -> str:
    """The tables and captions of the larger model: quality, its own texts; if there are any, longer ones and tasks."""
    found, reference = files["recipes_larger"], files["recipes"]
    injected = hard_caption(found)
    parts = [larger_table(found, reference), f"{measured(found, 'The larger model', 'recipes_larger.json')} {injected}"]
    for run in (PLAIN, LONG):
        if run in found["runs"]:
            caption = f"The larger model in {found['runs'][run]['dtype']}. {drift_caption(found, run)}"
            parts += [drift_table(found, run), caption]
    if TASKS in found["runs"]:
        parts += [task_table(found), task_caption(found, "The larger model")]
    return "\n\n".join(parts)


def larger_table(found: dict[str, Any], reference: dict[str, Any]) -> str:
    """Every recipe on the larger model, beside its divergence on the reference model."""
    hard = {name: kld_in(rows_of(found, name)) for name in (OUTLIERS, BIAS, CODES)}
    columns: dict[str, Column] = {
        "bits at 32k": bits(),
        "KL": kld,
        "KL, reference model": kld_in(rows_of(reference, PLAIN)),
        "99.9 %": form("kld_p999", ".2g"),
        "same next token": form("agreement", ".1%"),
        "perplexity": form("perplexity_change", "+.2%"),
        "KL, outliers": hard[OUTLIERS],
        "KL, biases": hard[BIAS],
        "KL, no dense windows": hard[CODES],
        "needles, nats": needle_change(rows_of(found, NEEDLES)),
    }
    return table(rows_of(found, PLAIN), columns)


# ----------------------------------------------------------------------------------------------------------------------


def plotted(files: Results) -> picture.Numbers:
    """What the picture shows."""
    models = {"": files["recipes"], "larger model, ": files.get("recipes_larger")}
    return {
        f"{model}{title}": picture.panel_of(rows_of(found, run))
        for model, found in models.items()
        if found is not None
        for run, title in PANELS.items()
    }


def draw(numbers: picture.Numbers, path: Path) -> None:
    """Draw them."""
    picture.draw(path, numbers)


PARTS = (
    Part("recipes", ("recipes",), (quality_table, quality_caption)),
    Part("recipes-codes", ("recipes",), (codes_table,)),
    Part("recipes-hard", ("recipes",), (hard_table, hard_caption)),
    Part("recipes-needles", ("recipes",), (needle_table,)),
    Part("recipes-drift", ("recipes",), (drift_table, drift_caption)),
    Part("recipes-tasks", ("recipes",), (task_table, task_caption)),
    Part("recipes-larger", ("recipes_larger", "recipes"), (larger,)),
)
PICTURES = (Picture("recipes", ("recipes",), plotted, draw, optional=("recipes_larger",)),)
