"""The tables of `docs/recipes.md`, from `evals/results/recipes.json`, and what its picture shows."""

from __future__ import annotations

from typing import Any

from hf_kvquant.common.tables import markdown_table as table
from hf_kvquant.common.tables import scientific, with_error
from hf_kvquant.evaluation.recipes import picture

PLAIN, OUTLIERS, BIAS, CODES, WINDOWS = "plain", "outliers", "bias", "codes", "windows"
NEEDLES = "needles"
PANELS = {PLAIN: "as published", CODES: "without dense windows"}


def quality_table(results: dict[str, Any]) -> str:
    """Every recipe: its source, its bits, and its distance from the unquantised cache."""
    run = results["runs"][PLAIN]
    headings = ["recipe", "source", f"bits at {run['context'] // 1024}k", "bits read", "KL, nats per token", "99 %"]
    headings += ["99.9 %", "same next token", "perplexity"]
    rows = []
    for name, row in run["recipes"].items():
        cells = [f"`{name}`", row["source"], f"{row['bits']['both']:.2f}", f"{row['bits_read']['both']:.2f}"]
        cells += [scientific(row["kld"]), f"{row['kld_p99']:.2g}", f"{row['kld_p999']:.2g}"]
        rows.append([*cells, f"{row['agreement']:.1%}", f"{row['perplexity_change']:+.2%}"])
    return table(headings, rows, num_text=2)


def quality_caption(results: dict[str, Any]) -> str:
    """What was measured, on what and when."""
    run = results["runs"][PLAIN]
    first = next(iter(run["recipes"].values()))
    return (
        f"The 15.5-million-parameter reference model in {run['dtype']}, {first['scored_tokens']:,} tokens of "
        f"WikiText-2 in windows of {run['window']} (perplexity {first['reference_perplexity']:.2f}), {run['cpu']}, "
        f"{run['date'][:10]}, `evals/results/recipes.json`."
    )


def hard_table(results: dict[str, Any]) -> str:
    """The divergence of every recipe on the model as it is, with outliers, and with biases."""
    runs = [results["runs"][name] for name in (PLAIN, OUTLIERS, BIAS)]
    rows = []
    for name in runs[0]["recipes"]:
        klds = [run["recipes"][name]["kld"] for run in runs]
        rows.append([f"`{name}`", *map(scientific, klds), *(f"{kld / klds[0]:.1f}x" for kld in klds[1:])])
    headings = ["recipe", "KL, plain", "KL, outliers", "KL, biases", "outliers / plain", "biases / plain"]
    return table(headings, rows)


def hard_caption(results: dict[str, Any]) -> str:
    """What was injected."""
    outliers, bias = (results["runs"][name] for name in (OUTLIERS, BIAS))
    first = next(iter(outliers["recipes"].values()))
    return (
        f"Outliers: 3 RoPE pairs of every key head {outliers['injected_outliers']:g} times as large. Biases: a "
        f"constant of norm {bias['injected_bias']:g} added to every key head, in the pair that RoPE turns slowest. "
        f"Nothing was calibrated. {first['scored_tokens']:,} tokens."
    )


def drift_table(results: dict[str, Any]) -> str:
    """How far texts that the model writes with a recipe lead away, by length."""
    rows = results["runs"][PLAIN]["recipes"]
    spans = [f"{span['begin']} to {span['end']}" for span in next(iter(rows.values()))["drift"]]
    lines = []
    for name, row in rows.items():
        last = row["drift"][-1]
        change = f"{last['nll_change']:+.2f} ± {last['nll_change_standard_error']:.2f}"
        lines.append([f"`{name}`", *(scientific(max(0.0, span["kld"])) for span in row["drift"]), change])
    return table(["recipe", *(f"KL, {span}" for span in spans), "NLL at the end"], lines)


def drift_caption(results: dict[str, Any]) -> str:
    """What was written."""
    run = results["runs"][PLAIN]
    return (
        f"{run['drift_prompts']} texts of {run['drift_tokens']:,} tokens behind prompts of 32. NLL: of the last tokens "
        "under the unquantised cache, against its own texts, nats per token, ± one standard error."
    )


def needle_table(results: dict[str, Any]) -> str:
    """How the log-likelihood of hidden numbers changes."""
    rows = []
    for name, row in results["runs"][NEEDLES]["recipes"].items():
        found = row["needles"]
        change = with_error(found["log_likelihood_change"], found["standard_error"], "+.3f")
        rows.append([f"`{name}`", f"{row['bits']['both']:.2f}", change])
    return table(["recipe", "bits at 32k", "log-likelihood, nats per answer"], rows)


def codes_table(results: dict[str, Any]) -> str:
    """Every recipe without windows of dense tokens, and with the same windows: its bits and its divergence."""
    codes, windows = (results["runs"][name]["recipes"] for name in (CODES, WINDOWS))
    rows = []
    for name, row in sorted(codes.items(), key=lambda item: item[1]["bits"]["both"]):
        cells = [f"`{name}`", *(f"{row['bits'][side]:.2f}" for side in ("key", "value"))]
        for each in (row, windows[name]):
            cells += [f"{each['bits_read']['both']:.2f}", scientific(each["kld"])]
        rows.append(cells)
    dense = "4 + 128 dense: "
    headings = ["recipe", "key bits at 32k", "value bits at 32k", "bits read", "KL", f"{dense}bits read", f"{dense}KL"]
    return table(headings, rows)


def plotted(results: dict[str, Any]) -> picture.Numbers:
    """What the picture shows."""
    return {title: picture.panel_of(results["runs"][name]["recipes"]) for name, title in PANELS.items()}
