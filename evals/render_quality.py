"""What the pages say about the presets on the reference model, from `fidelity.json`, `tasks.json` and `cpu_decode.json`
in `evals/results/`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any, TypeVar

from parts import Part, Results

from hf_kvquant.common.tables import markdown_table as table
from hf_kvquant.common.tables import scientific
from hf_kvquant_evals.report.page import spelled_average
from hf_kvquant_evals.tasks.data import AVERAGED
from hf_kvquant_evals.tasks.results import averages, by_task_and_preset

Found = TypeVar("Found")
MODEL = "15.5-million-parameter reference model"
# Behind the name of a preset that was measured without its dense tokens.
NOTHING_DENSE = ":0+0"


def found(measured: Mapping[str, Found], preset: str) -> Found | None:
    """What was measured of a preset; without its dense tokens, if only that was. `bare_note` says so."""
    return measured.get(preset, measured.get(preset + NOTHING_DENSE))


def bare_note(what: str, measured: Collection[str], presets: Iterable[str]) -> str:
    """Says of which of the presets `found` has only what was measured without their dense tokens; else nothing."""
    bare = [f"`{name}`" for name in presets if name not in measured and name + NOTHING_DENSE in measured]
    return f" {what} of {' and '.join(bare)}: without dense tokens." if bare else ""


def times(ratio: float | None) -> str:
    """`1.9x`, or a dash."""
    return "-" if ratio is None else f"{ratio:.1f}x"


def speedups(cpu: dict[str, Any]) -> dict[str, float]:
    """By preset, how many times as fast it is as the faster of PyTorch's fp32 and bf16 attention."""
    return {row["preset"]: row["speedup"] for row in cpu["rows"]}


def quality_table(files: Results) -> str:
    """Every preset: bits, perplexity, divergence, agreement, zero-shot accuracy, speed on a CPU."""
    fidelity, tasks, cpu = files.values()
    ratios, means = speedups(cpu), averages(by_task_and_preset(tasks["parts"]))
    unquantised = fidelity["presets"]["none"]["bytes_per_token"]
    headings = ["preset", "bits per value", "cache size", "perplexity", "KL, nats per token", "same next token"]
    headings += ["zero-shot average, %", "CPU attention"]
    rows = []
    for preset, row in fidelity["presets"].items():
        change = f" ({row['perplexity_change']:+.2%})" if preset != "none" else ""
        cells = [f"`{preset}`", f"{row['bits_per_value']:.4g}", f"{row['bytes_per_token'] / unquantised:.0%}"]
        cells += [f"{row['perplexity']:.2f}{change}", scientific(row["kld"]), f"{row['agreement']:.1%}"]
        rows.append([*cells, spelled_average(found(means, preset)), times(found(ratios, preset))])
    return table(headings, rows)


def caption(files: Results) -> str:
    """What was measured, on what and when."""
    fidelity, tasks, cpu = files.values()
    shape, card, settings = cpu["shape"], tasks["card"], tasks["settings"]
    items = {task: tasks["parts"][f"{task}/none"]["num_items"] for task in AVERAGED}
    num_items = " or ".join(f"{number:,}" for number in sorted(set(items.values())))
    return (
        f"**Quality**: the {MODEL} in {fidelity['dtype']}, {fidelity['scored_tokens']:,} tokens of WikiText-2 in "
        f"windows of {fidelity['window']}, compared with the unquantised cache ({fidelity['date'][:10]}, "
        f"`evals/results/fidelity.json`). **Zero-shot average**: accuracy on {', '.join(AVERAGED)}, the first "
        f"{num_items} items of each, {settings['dtype']}, with log-likelihoods read from the quantised cache. In "
        "brackets is the 95 % interval of the change on the same items, in points. A model of this size answers near "
        f"chance, so its answers change more easily than those of a large one ({card['date'][:10]}, "
        f"`evals/results/tasks.json`). **CPU attention**: one token, batch {shape['batch']}, {shape['num_q_heads']} "
        f"query and {shape['num_kv_heads']} key-value heads of {shape['head_dim']} channels, {shape['length']:,} "
        f"tokens, {cpu['threads']} threads, relative to the faster of PyTorch's fp32 and bf16 attention over the "
        f"unquantised cache ({cpu['cpu']}, {cpu['date'][:10]}, `evals/results/cpu_decode.json`)."
        + bare_note("CPU attention", speedups(cpu), fidelity["presets"])
        + bare_note("Zero-shot average", averages(by_task_and_preset(tasks["parts"])), fidelity["presets"])
    )


def offloading_sentence(fidelity: dict[str, Any]) -> str:
    """How many fewer bytes offloading transfers."""
    sizes = {name: row["bytes_per_token"] for name, row in fidelity["presets"].items()}
    return (
        f"With `int4`, a step transfers {sizes['int4'] / sizes['none']:.0%} of the bytes that transformers' own "
        "offloading transfers for an unquantised cache. Only the new token travels back; there, whole layers do."
    )


PARTS = (
    Part("quality", ("fidelity", "tasks", "cpu_decode"), (quality_table, caption)),
    Part("offloading", ("fidelity",), (offloading_sentence,)),
)
