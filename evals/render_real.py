"""The tables of a real pretrained model: presets on `docs/presets.md`, positions and hidden numbers on
`docs/long-contexts.md`, budgets on `docs/calibration.md`, recipes on `docs/recipes.md`. `real_models.sh` makes the
results.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from parts import Cell, Part, Results, Row, Table, Text, of, origin
from render_quality import bare_note, found
from render_recipes import BITS, DISTANCE, NAME, TASKS, drift_caption, drift_table, first_of, recipes, task_caption

from hf_kvquant import PRESETS
from hf_kvquant.common.tables import scientific, with_error
from hf_kvquant.presets import PRESET_WINDOWS, UNQUANTIZED
from hf_kvquant_evals.long_context.long_context_run import SUMMARY, is_scored
from hf_kvquant_evals.paired import paired_accuracy
from hf_kvquant_evals.recipes.recipe_tables import accuracy_change, log_likelihood_change

MODEL = "SmolLM2-135M-Instruct"
# Presets with dense windows, and each without: first and newest tokens follow the name.
WITH_WINDOWS = ("int4-token", "int4-token:4+32", "int4-token:4+124", "int4-channel", "int4", "int4:4+124")
WITH_WINDOWS += ("k8v4:0+0", "k8v4", "int8:0+0", "int8:4+0", "int8")
# Of positions. Parts of a window are a sixteenth of it, so there can be no more.
POSITION_RANGES = 5


def measured_presets(files: Results) -> dict[str, Row]:
    """What each preset costs as `generate` reads, with its own dense windows, in the order of `PRESETS`."""
    measured = {**files["real_generate"]["presets"], **files["real_windows"]["presets"]}
    return {name: measured[name] for name in PRESETS if name in measured}


def preset_rows(files: Results) -> list[Row]:
    """A row of each preset, with those of the other ways of reading under the names of their files."""
    others = {name: files[name]["presets"] for name in ("real_generate_calibrated", "real_chunks")}
    others["answers"] = files["recipes_real"]["runs"]["tasks"]["recipes"]
    return [
        {**row, "preset": name, **{other: found(measured, name) for other, measured in others.items()}}
        for name, row in measured_presets(files).items()
        if name != UNQUANTIZED
    ]


def reads(name: str = "") -> Callable[[Results], str]:
    """How `generate` reads in a results file, in words."""

    def told(files: Results) -> str:
        results = files[name] if name else files
        after = results["window"] - 1 - results["n0"]
        return f"{after:,} tokens one by one, behind prompts of {results['n0']:,} tokens"

    return told


def where(name: str) -> Callable[[Results], str]:
    """On what a results file was measured: a GPU by its name, or a CPU."""
    return lambda files: files[name].get("gpu", "a CPU")


preset_table = Table(
    preset_rows,
    {
        "preset": "`{preset}`",
        "bits per value": "{bits_per_value:.4g}",
        "same next token": "{agreement:.1%}",
        "perplexity": "{perplexity:.2f} ({perplexity_change:change})",
        "KL, nats per token": "{kld:scientific}",
        "99 %": "{kld_p99:.2g}",
        "KL, calibrated": "{real_generate_calibrated.kld:scientific}",
        "KL, in chunks": "{real_chunks.kld:scientific}",
        "zero-shot, points": of("answers.tasks", accuracy_change),
        "same answers": "{answers.tasks.same:.1%}",
    },
)
caption = Text(
    f"{MODEL} (`evals/real_model/`) in {{real_generate.dtype}} on WikiText-2, compared with the unquantised cache: "
    "{reads} ({real_generate.scored_tokens:,} tokens, perplexity {real_generate.reference_perplexity:.2f}). Its "
    "head_dim is 64, so bits are a little higher than with 128. Calibrated: smoothed on other text, on {calibrated}. "
    "In chunks: {real_chunks.chunk} tokens at a time from the first one on, windows of {real_chunks.window:,} "
    "({real_chunks.scored_tokens:,} tokens, on {chunks}). Zero-shot: the change of accuracy, ± one standard error, of "
    "{answered.tasks.num_items} items behind text (`docs/recipes.md`), on {tasks.gpu|tasks.cpu}.{bare}",
    origin("real_generate", of="real_generate.", more=" and files beside it"),
    reads=reads("real_generate"),
    calibrated=where("real_generate_calibrated"),
    chunks=where("real_chunks"),
    tasks=lambda files: files["recipes_real"]["runs"]["tasks"],
    answered=lambda files: first_of("tasks")(files["recipes_real"]),
    bare=lambda files: bare_note(
        "Zero-shot", files["recipes_real"]["runs"]["tasks"]["recipes"], measured_presets(files)
    ),
)


def dense_tokens(name: str) -> str:
    """First and newest tokens that a preset keeps dense, those of its name or its own: `4 + 28`."""
    preset, _, dense = name.partition(":")
    dense = dense or "+".join(map(str, PRESET_WINDOWS.get(preset, {}).values()))
    return "none" if dense in ("", "0+0") else dense.replace("+", " + ")


def windows_rows(files: Results) -> list[Row]:
    """Presets with dense windows and without, and a peer, each with the divergence behind a long prompt as `far`."""
    peer, runs = "quanto-4:0+128", files["recipes_real"]["runs"]
    measured = {**files["real_generate"]["presets"], **files["real_windows"]["presets"]}
    measured[peer] = runs["generate"]["recipes"]["quanto-4"]
    far = {**files["real_long"]["presets"], peer: runs["long"]["recipes"]["quanto-4"]}
    return [named(name, measured[name], far) for name in (*WITH_WINDOWS, peer)]


def named(name: str, row: Row, far: Results) -> Row:
    """A row with its preset, its dense tokens, and what it is behind a long prompt."""
    return {**row, "preset": name.partition(":")[0], "dense": dense_tokens(name), "far": far.get(name)}


windows_table = Table(
    windows_rows,
    {"preset": "`{preset}`", "dense: first + newest": "{dense}", **DISTANCE, "KL at 8k": "{far.kld:scientific}"},
)
windows_caption = Text(
    f"{MODEL} in {{real_windows.dtype}} on WikiText-2: {{reads}}; last column: behind {{real_long.n0:,}}, on {{far}}, "
    "and on a CPU for `int8` with dense tokens. `quanto-4` is transformers' own quantised cache, on other parts of the "
    "same text.",
    origin("real_windows", of="real_windows.", more=" and files beside it"),
    reads=reads("real_windows"),
    far=where("real_long"),
)


def bits_rows(results: Results) -> list[Row]:
    """What `bits=` finds, beside the best preset for all layers within as many bits. The fewest bits come first."""
    rows = []
    for name, row in results["presets"].items():
        _, is_found, bits = name.partition("bits-")
        rows.append({**row, "name": name, "shown": f"`bits={bits}`" if is_found else f"`{name}` in all layers"})
    rows.sort(key=lambda row: (row["bits_per_value"], row["name"]))
    return [row for row in rows if row["name"] != UNQUANTIZED]


bits_table = Table(
    bits_rows,
    {
        "": "{shown}",
        "bits per value": "{bits_per_value:.2f}",
        **DISTANCE,
        "KL, nats per token": "{kld:scientific} ± {kld_standard_error:scientific}",
    },
)
bits_caption = Text(
    f"{MODEL} (`evals/real_model/`) in {{dtype}} on WikiText-2: {{reads}} ({{scored_tokens:,}} tokens in {{windows}} "
    "windows; ±: standard error over windows). Found on `{bits_text.text}`, another part of that text.",
    origin("real_bits"),
    reads=reads(),
    windows=lambda results: len(results["window_indices"]),
)


def position_rows(files: Results) -> list[Row]:
    """A row of each preset whose divergence was measured by position."""
    presets, far = files["real_position"]["presets"], files["real_long"]["presets"]
    return [named(name, row, far) for name, row in presets.items() if name != UNQUANTIZED]


def position_columns(files: Results) -> dict[str, Cell]:
    """The divergence by position, and at the end of the model's context: how it goes on as a context grows."""
    results = files["real_position"]
    length, last = results["window"], results["window"] - 1
    # From the prompt on, each range reaches to twice the position where it begins.
    ends = [length >> shift for shift in reversed(range(POSITION_RANGES))]

    def mean(begin: int, end: int) -> Cell:
        def cell(parts: Row) -> str:
            found = zip(parts["begin"], parts["kld"], strict=True)
            return scientific(statistics.fmean(kld for at, kld in found if begin <= at < end))

        return of("by_position", cell)

    ranges = {
        f"{max(begin, results['n0']):,} to {min(end, last):,}": mean(begin, end)
        for begin, end in zip([0, *ends], ends, strict=False)
    }
    far = f"{files['real_long']['n0']:,} to {files['real_long']['window'] - 1:,}"
    return {"preset": "`{preset}`", "dense: first + newest": "{dense}", **ranges, far: "{far.kld:scientific}"}


position_table = Table(position_rows, position_columns)
position_caption = Text(
    f"KL divergence in nats per token, by the position of the token. {MODEL} in {{real_position.dtype}} on WikiText-2: "
    "{real_position.scored_tokens:,} tokens one by one, behind a prompt of {real_position.n0}; last column: "
    "{real_long.scored_tokens:,} tokens of other parts of the text, behind {real_long.n0:,}.",
    origin("real_position", of="real_position.", more=" and `real_long.json`"),
)


def needle_rows(results: Results) -> list[Row]:
    """By preset, how many hidden numbers it finds, where the unquantised cache finds them."""
    cells: dict[str, list[Row]] = {name.split("/")[1]: [] for name in results["parts"] if name != SUMMARY}
    for name, part in results["parts"].items():
        if name != SUMMARY and is_scored(part):
            cells[name.split("/")[1]].append(part)

    def right(preset: str, *lengths: str) -> list[float]:
        return [float(each) for length in lengths for part in cells[length] for each in part[preset]["correct"]]

    return [
        {
            **summary,
            "preset": name,
            "right": {length: statistics.fmean(right(name, length)) for length in cells if cells[length]},
            "change": points(right(name, *cells), right(UNQUANTIZED, *cells)),
        }
        for name, summary in results["parts"][SUMMARY].items()
    ]


def points(right: Sequence[float], reference: Sequence[float]) -> str:
    """The change of an accuracy on the same items, in points, with its standard error."""
    pair = paired_accuracy(right, reference)
    return with_error(100 * pair.difference, 100 * pair.standard_error, "+.1f")


def needle_columns(results: Results) -> dict[str, Cell]:
    """How many numbers are found at each length, and in all."""
    lengths = dict.fromkeys(name.split("/")[1] for name in results["parts"] if name != SUMMARY)
    return {
        "preset": "`{preset}`",
        **{f"{int(length):,} tokens": f"{{right.{length}:.0%}}" for length in lengths},
        "all": "{accuracy:.1%}",
        "change, points": "{change}",
        "log-likelihood, nats per answer": log_likelihood_change,
    }


needle_table = Table(needle_rows, needle_columns)
needle_caption = Text(
    f"{MODEL} in {{settings.dtype}}: a pass key in sentences that repeat themselves, and a number in text that does "
    "not, at {depths} % of the prompt, {settings.samples} prompts each. Numbers found where the unquantised cache "
    "finds 90 % ({summary.num_scored} of {summary.num_cells} combinations, {prompts:,} prompts); the log-likelihood of "
    "the right answer in all {summary.num_cells}. ±: one standard error.",
    origin("real_needles", of="card."),
    summary=lambda results: results["parts"][SUMMARY][UNQUANTIZED],
    prompts=lambda results: results["parts"][SUMMARY][UNQUANTIZED]["num_scored"] * results["settings"]["samples"],
    depths=lambda results: ", ".join(dict.fromkeys(name.split("/")[2] for name in results["parts"] if name != SUMMARY)),
)
recipe_table = Table(
    recipes("generate"), {**NAME, **BITS, **DISTANCE, "KL, token by token": "{runs.steps.kld:scientific}"}
)
recipe_caption = Text(
    f"{MODEL} (`evals/real_model/`) in {{runs.generate.dtype}} on WikiText-2: {{after:,}} tokens one by one, behind "
    "prompts of {runs.generate.first_chunk:,} ({first.scored_tokens:,} tokens, perplexity "
    "{first.reference_perplexity:.2f}); last column: windows of {runs.steps.window:,} from the first token on "
    "({other.scored_tokens:,} tokens). Nothing was calibrated; recipes that learn from text got other text.",
    origin("recipes_real", of="runs.generate."),
    after=lambda results: (run := results["runs"]["generate"])["window"] - 1 - run["first_chunk"],
    first=first_of("generate"),
    other=first_of("steps"),
)
ALONE = "piqa"  # the task that was also asked without text before it


def answer_rows(files: Results) -> list[Row]:
    """A row of each recipe that answered tasks; a preset's also with how it answers `ALONE` through the real cache."""
    parts = files["real_tasks"]["parts"]
    right = {name.partition("/")[2]: part["items"]["acc"] for name, part in parts.items() if name.startswith(ALONE)}

    def change(name: str) -> str:
        return points(right[name], right[UNQUANTIZED]) if name in right else "-"

    return [{**row, "alone": change(row["name"])} for row in recipes("tasks")(files["recipes_real"])]


answer_table = Table(answer_rows, {**NAME, **BITS, **TASKS, f"{ALONE} alone, points": "{alone}"})


def answer_caption(files: Results) -> str:
    """What was asked."""
    alone = Text(
        f"{ALONE} alone: {{items:,}} items through the real cache, without text before them; there {ALONE} is "
        "{right:.1%} right with the unquantised cache (`evals/results/real_tasks.json`).",
        items=lambda files: files["real_tasks"]["parts"][f"{ALONE}/{UNQUANTIZED}"]["num_items"],
        right=lambda files: files["real_tasks"]["parts"][f"{ALONE}/{UNQUANTIZED}"]["metrics"]["acc"],
    )
    return f"{task_caption(MODEL)(files['recipes_real'])} {alone(files)}"


REAL = ("real_generate", "real_windows", "real_generate_calibrated", "real_chunks", "recipes_real")
written_caption = drift_caption("drift", f"{MODEL} in {{run.dtype}}: ", origin("recipes_real", of="run."))
PARTS = (
    Part("real", REAL, (preset_table, caption)),
    Part("windows", ("real_generate", "real_windows", "real_long", "recipes_real"), (windows_table, windows_caption)),
    Part("bits", ("real_bits",), (bits_table, bits_caption)),
    Part("positions", ("real_position", "real_long"), (position_table, position_caption)),
    Part("needles", ("real_needles",), (needle_table, needle_caption)),
    Part("recipes-real", ("recipes_real",), (recipe_table, recipe_caption)),
    Part("recipes-real-drift", ("recipes_real",), (drift_table("drift"), written_caption)),
    Part("recipes-real-tasks", ("recipes_real", "real_tasks"), (answer_table, answer_caption)),
)
