"""The tables of a real pretrained model: presets on `docs/presets.md`, positions on `docs/long-contexts.md`, budgets on
`docs/calibration.md`, recipes on `docs/recipes.md`.

From `real_*.json` and `recipes_real.json`, which `real_models.sh` makes.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

import render_recipes
from parts import Part

from hf_kvquant import PRESETS
from hf_kvquant.common.tables import markdown_table, scientific
from hf_kvquant.presets import PRESET_WINDOWS, UNQUANTIZED

MODEL = "SmolLM2-135M-Instruct"
# Presets with dense windows, and each without: first and newest tokens follow the name.
WITH_WINDOWS = ("int4-token", "int4-token:4+32", "int4-token:4+124", "int4-channel", "int4", "int4:4+124")
WITH_WINDOWS += ("k8v4:0+0", "k8v4", "int8", "int8:4+0", "int8:4+12")
# Of positions. Parts of a window are a sixteenth of it, so there can be no more.
POSITION_RANGES = 5

Files = Mapping[str, Mapping[str, Any]]


def kld_in(results: Mapping[str, Any], preset: str) -> str:
    """The divergence of a preset in a results file, a dash if it is not there."""
    row = results["presets"].get(preset)
    return "-" if row is None else scientific(row["kld"])


def change(ratio: float) -> str:
    """A change in percent with its sign: `+0.04%`, and never `-0.00%`."""
    return f"{round(ratio, 4) + 0.0:+.2%}"


def measured_presets(files: Files) -> dict[str, Any]:
    """What each preset costs as `generate` reads, with its own dense windows, in the order of `PRESETS`."""
    measured = {**files["real_generate"]["presets"], **files["real_windows"]["presets"]}
    return {name: measured[name] for name in PRESETS if name in measured}


def preset_table(files: Files) -> str:
    """Every preset: its bits, and its distance from the unquantised cache in each way of reading."""
    headings = ["preset", "bits per value", "same next token", "perplexity", "KL, nats per token", "99 %"]
    headings += ["KL, calibrated", "KL, in chunks"]
    rows = []
    for preset, row in measured_presets(files).items():
        if preset == UNQUANTIZED:
            continue
        cells = [f"`{preset}`", f"{row['bits_per_value']:.4g}", f"{row['agreement']:.1%}"]
        cells += [f"{row['perplexity']:.2f} ({change(row['perplexity_change'])})", scientific(row["kld"])]
        cells += [f"{row['kld_p99']:.2g}"]
        names = ("real_generate_calibrated", "real_chunks")
        rows.append([*cells, *(kld_in(files[name], preset) for name in names)])
    return markdown_table(headings, rows)


def reads(results: Mapping[str, Any]) -> str:
    """How `generate` reads, in words."""
    after = results["window"] - 1 - results["n0"]
    return f"{after:,} tokens one by one, behind prompts of {results['n0']:,} tokens"


def where(results: Mapping[str, Any]) -> str:
    """On what it was measured: a GPU by its name, or a CPU."""
    return str(results.get("gpu", "a CPU"))


def caption(files: Files) -> str:
    """What was measured, on what and when."""
    results, chunks, calibrated = (files[f"real_{name}"] for name in ("generate", "chunks", "generate_calibrated"))
    return (
        f"{MODEL} (`evals/real_model/`) in {results['dtype']} on WikiText-2, compared with the unquantised "
        f"cache: {reads(results)} ({results['scored_tokens']:,} tokens, perplexity "
        f"{results['reference_perplexity']:.2f}). Its head_dim is 64, so bits are a little higher than with 128. "
        f"Calibrated: smoothed on other text, on {where(calibrated)}. In chunks: {chunks['chunk']} tokens at a time "
        f"from the first one on, windows of {chunks['window']:,} ({chunks['scored_tokens']:,} tokens, on "
        f"{where(chunks)}). "
        f"{results.get('gpu', results['cpu'])}, {results['date'][:10]}, "
        "`evals/results/real_generate.json` and files beside it."
    )


def dense_tokens(name: str) -> str:
    """First and newest tokens that a preset keeps dense, those of its name or its own: `4 + 28`."""
    preset, _, dense = name.partition(":")
    dense = dense or "+".join(map(str, PRESET_WINDOWS.get(preset, {}).values()))
    return "none" if dense in ("", "0+0") else dense.replace("+", " + ")


def windows_table(files: Files) -> str:
    """How much dense tokens help, and a peer."""
    measured = {**files["real_generate"]["presets"], **files["real_windows"]["presets"]}
    runs = files["recipes_real"]["runs"]
    measured["quanto-4:0+128"] = runs["generate"]["recipes"]["quanto-4"]
    far = {**files["real_long"]["presets"], "quanto-4:0+128": runs["long"]["recipes"]["quanto-4"]}
    rows = []
    for name in (*WITH_WINDOWS, "quanto-4:0+128"):
        row, preset = measured[name], name.partition(":")[0]
        cells = [f"`{preset}`", dense_tokens(name), scientific(row["kld"]), f"{row['kld_p99']:.2g}"]
        cells += [f"{row['agreement']:.1%}", change(row["perplexity_change"])]
        rows.append([*cells, scientific(far[name]["kld"]) if name in far else "-"])
    headings = ["preset", "dense: first + newest", "KL, nats per token", "99 %", "same next token", "perplexity"]
    return markdown_table([*headings, "KL at 8k"], rows)


def windows_caption(files: Files) -> str:
    """What was measured."""
    results, far = files["real_windows"], files["real_long"]
    return (
        f"{MODEL} in {results['dtype']} on WikiText-2: {reads(results)}; last column: behind {far['n0']:,}, on "
        f"{where(far)}. `quanto-4` is transformers' own quantised cache, on other parts of the same text. "
        f"{results.get('gpu', results['cpu'])}, {results['date'][:10]}, `evals/results/real_windows.json` and files "
        "beside it."
    )


def bits_table(results: Mapping[str, Any]) -> str:
    """What `bits=` finds, beside the best preset for all layers within as many bits. The fewest bits come first."""
    rows = {name: row for name, row in results["presets"].items() if name != UNQUANTIZED}
    headings = ["", "bits per value", "KL, nats per token", "99 %", "same next token", "perplexity"]
    lines = []
    for name, row in sorted(rows.items(), key=lambda each: (each[1]["bits_per_value"], each[0])):
        _, is_found, bits = name.partition("bits-")
        error = scientific(row["kld_standard_error"])
        cells = [f"`bits={bits}`" if is_found else f"`{name}` in all layers", f"{row['bits_per_value']:.2f}"]
        cells += [f"{scientific(row['kld'])} ± {error}", f"{row['kld_p99']:.2g}", f"{row['agreement']:.1%}"]
        lines.append([*cells, change(row["perplexity_change"])])
    return markdown_table(headings, lines)


def bits_caption(results: Mapping[str, Any]) -> str:
    """What was measured."""
    return (
        f"{MODEL} (`evals/real_model/`) in {results['dtype']} on WikiText-2: {reads(results)} "
        f"({results['scored_tokens']:,} tokens in {len(results['window_indices'])} windows; ±: standard error over "
        f"windows). Found on `{results['bits_text']['text']}`, another part of that text. "
        f"{results.get('gpu', results['cpu'])}, {results['date'][:10]}, `evals/results/real_bits.json`."
    )


def position_table(files: Files) -> str:
    """The divergence by position, and at the end of the model's context: how it goes on as a context grows."""
    results, far = files["real_position"], files["real_long"]
    length, last = results["window"], results["window"] - 1
    # From the prompt on, each range reaches to twice the position where it begins.
    ends = [length >> shift for shift in reversed(range(POSITION_RANGES))]
    ranges = list(zip([0, *ends], ends, strict=False))
    headings = ["preset", "dense: first + newest"]
    headings += [f"{max(begin, results['n0']):,} to {min(end, last):,}" for begin, end in ranges]
    headings += [f"{far['n0']:,} to {far['window'] - 1:,}"]
    rows = []
    for name, row in results["presets"].items():
        if name == UNQUANTIZED:
            continue
        preset, by_position = name.partition(":")[0], row["by_position"]
        parts = list(zip(by_position["begin"], by_position["kld"], strict=True))
        means = [statistics.fmean(kld for at, kld in parts if begin <= at < end) for begin, end in ranges]
        rows.append([f"`{preset}`", dense_tokens(name), *map(scientific, means), kld_in(far, name)])
    return markdown_table(headings, rows)


def position_caption(files: Files) -> str:
    """What was measured."""
    results, far = files["real_position"], files["real_long"]
    return (
        f"KL divergence in nats per token, by the position of the token. {MODEL} in {results['dtype']} on WikiText-2: "
        f"{results['scored_tokens']:,} tokens one by one, behind a prompt of {results['n0']}; last column: "
        f"{far['scored_tokens']:,} tokens of other parts of the text, behind {far['n0']:,}. "
        f"{results.get('gpu', results['cpu'])}, {results['date'][:10]}, `evals/results/real_position.json` and "
        "`real_long.json`."
    )


def recipe_table(recipes: Mapping[str, Any]) -> str:
    """Every recipe: its bits, and its distance from the unquantised cache, as `generate` reads and from the start."""
    rows = render_recipes.rows_of(recipes, "generate")
    columns: dict[str, render_recipes.Column] = {
        "bits at 32k": render_recipes.bits(),
        "KL, nats per token": render_recipes.kld,
        "99 %": render_recipes.form("kld_p99", ".2g"),
        "same next token": render_recipes.form("agreement", ".1%"),
        "perplexity": render_recipes.form("perplexity_change", "+.2%"),
        "KL, token by token": render_recipes.kld_in(render_recipes.rows_of(recipes, "steps")),
    }
    return render_recipes.table(rows, columns)


def recipe_caption(recipes: Mapping[str, Any]) -> str:
    """What was measured, on what and when."""
    run, steps = recipes["runs"]["generate"], recipes["runs"]["steps"]
    first, other = (render_recipes.first_of(each["recipes"]) for each in (run, steps))
    return (
        f"{MODEL} (`evals/real_model/`) in {run['dtype']} on WikiText-2: "
        f"{run['window'] - 1 - run['first_chunk']:,} tokens one by one, behind prompts of {run['first_chunk']:,} "
        f"({first['scored_tokens']:,} tokens, perplexity {first['reference_perplexity']:.2f}); last column: windows of "
        f"{steps['window']:,} from the first token on ({other['scored_tokens']:,} tokens). Nothing was calibrated; "
        f"recipes that learn from text got other text. {run.get('gpu', run['cpu'])}, {run['date'][:10]}, "
        "`evals/results/recipes_real.json`."
    )


PARTS = (
    Part(
        "real",
        ("real_generate", "real_windows", "real_generate_calibrated", "real_chunks"),
        (preset_table, caption),
    ),
    Part(
        "windows",
        ("real_generate", "real_windows", "real_long", "recipes_real"),
        (windows_table, windows_caption),
    ),
    Part("bits", ("real_bits",), (bits_table, bits_caption)),
    Part("positions", ("real_position", "real_long"), (position_table, position_caption)),
    Part("recipes-real", ("recipes_real",), (recipe_table, recipe_caption)),
)
