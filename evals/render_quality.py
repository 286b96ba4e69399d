"""What the pages say about the presets on the reference model, from `fidelity.json`, `tasks.json` and `cpu_decode.json`
in `evals/results/`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any, TypeVar

from parts import Part, Results, Row, Table, Text

from hf_kvquant_evals.report.page import spelled_average
from hf_kvquant_evals.tasks.data import AVERAGED
from hf_kvquant_evals.tasks.task_results import averages, by_task_and_preset

Found = TypeVar("Found")
# Behind the name of a preset that was measured without its dense tokens.
NOTHING_DENSE = ":0+0"


def found(measured: Mapping[str, Found], preset: str) -> Found | None:
    """What was measured of a preset; without its dense tokens, if only that was. `bare_note` says so."""
    return measured.get(preset, measured.get(preset + NOTHING_DENSE))


def bare_note(what: str, measured: Collection[str], presets: Iterable[str], known: Collection[str] = ()) -> str:
    """Says which of the presets were measured without their dense tokens: `known`, and where `found` has only that."""
    bare = [
        f"`{name}`" for name in presets if name in known or (name not in measured and name + NOTHING_DENSE in measured)
    ]
    return f" {what} of {' and '.join(bare)}: without dense tokens." if bare else ""


def speedups(cpu: Results) -> dict[str, float]:
    """By preset, how many times as fast it is as the faster of PyTorch's fp32 and bf16 attention."""
    return {row["preset"]: row["speedup"] for row in cpu["rows"]}


def means_of(tasks: Results) -> Mapping[str, Any]:
    """By preset, the average over tasks."""
    return averages(by_task_and_preset(tasks["parts"]))


def rows(files: Results) -> list[Row]:
    """A row of each preset, with its averages over tasks and its speed on a CPU."""
    fidelity, tasks, cpu = files.values()
    means, ratios, presets = means_of(tasks), speedups(cpu), fidelity["presets"]
    return [
        {**row, "preset": name, "whole": presets["none"], "average": found(means, name), "speedup": found(ratios, name)}
        for name, row in presets.items()
    ]


quality_table = Table(
    rows,
    {
        "preset": "`{preset}`",
        "bits per value": "{bits_per_value:.4g}",
        "cache size": "{bytes_per_token/whole.bytes_per_token:.0%}",
        "perplexity": lambda row: (
            f"{row['perplexity']:.2f}" + (f" ({row['perplexity_change']:+.2%})" if row["preset"] != "none" else "")
        ),
        "KL, nats per token": "{kld:scientific}",
        "same next token": "{agreement:.1%}",
        "zero-shot average, %": lambda row: spelled_average(row["average"]),
        "CPU attention": "{speedup:.1f}x",
    },
)


def num_items(files: Results) -> str:
    """Of each task, how many were asked."""
    found = {files["tasks"]["parts"][f"{task}/none"]["num_items"] for task in AVERAGED}
    return " or ".join(f"{number:,}" for number in sorted(found))


caption = Text(
    "**Quality**: the 15.5-million-parameter reference model in {fidelity.dtype}, {fidelity.scored_tokens:,} tokens of "
    "WikiText-2 in windows of {fidelity.window}, compared with the unquantised cache ({fidelity.date:day}, "
    f"`evals/results/fidelity.json`). **Zero-shot average**: accuracy on {', '.join(AVERAGED)}, the first "
    "{num_items} items of each, {tasks.settings.dtype}, with log-likelihoods read from the quantised cache. In "
    "brackets is the 95 % interval of the change on the same items, in points. A model of this size answers near "
    "chance, so its answers change more easily than those of a large one ({tasks.card.date:day}, "
    "`evals/results/tasks.json`). **CPU attention**: one token, batch {shape.batch}, {shape.num_q_heads} query and "
    "{shape.num_kv_heads} key-value heads of {shape.head_dim} channels, {shape.length:,} tokens, {cpu_decode.threads} "
    "threads, relative to the faster of PyTorch's fp32 and bf16 attention over the unquantised cache "
    "({cpu_decode.cpu}, {cpu_decode.date:day}, `evals/results/cpu_decode.json`).{bare}",
    num_items=num_items,
    shape=lambda files: files["cpu_decode"]["shape"],
    bare=lambda files: (
        bare_note("CPU attention", speedups(files["cpu_decode"]), files["fidelity"]["presets"])
        + bare_note("Zero-shot average", means_of(files["tasks"]), files["fidelity"]["presets"])
    ),
)
offloading_sentence = Text(
    "With `int4`, a step transfers {presets.int4.bytes_per_token/presets.none.bytes_per_token:.0%} of the bytes that "
    "transformers' own offloading transfers for an unquantised cache. Only the new token travels back; there, whole "
    "layers do."
)
PARTS = (
    Part("quality", ("fidelity", "tasks", "cpu_decode"), (quality_table, caption)),
    Part("offloading", ("fidelity",), (offloading_sentence,)),
)
