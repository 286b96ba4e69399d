"""Renders the README's tables and pictures from `evals/results/`, and from nothing else.

    python evals/render_readme.py

A test compares what this file makes with what is committed, so a number in the README is always one of a results file;
a picture carries its numbers along for that, since its bytes depend on the version of matplotlib, which only drawing
needs (`pip install matplotlib`). Without `decode.json` and `generate.json` the README says nothing about GPUs. What the
latter's part looks like is decided in `render_generate.py`, the table of models in `render_families.py`, and the
pictures in `pictures.py`; what is measured and how, in the other scripts beside this file and in
`hf_kvquant/evaluation/`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pictures
import render_families
import render_generate

from hf_kvquant.evaluation.page import scientific, spelled_average, table
from hf_kvquant.evaluation.task_files import AVERAGED
from hf_kvquant.evaluation.task_results import averages, by_task_and_preset

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "evals" / "results"
README = ROOT / "README.md"
PICTURE = RESULTS / "presets.svg"
GPU_PICTURE = RESULTS / "decode.svg"
GENERATE_PICTURE = RESULTS / "generate.svg"
BEGIN, END = "<!-- begin: evals/render_readme.py -->\n", "<!-- end -->"
GPU_BEGIN = "<!-- begin: evals/render_readme.py, GPU -->\n"
GENERATE_BEGIN = "<!-- begin: evals/render_readme.py, generate -->\n"
FAMILIES_BEGIN = "<!-- begin: evals/render_readme.py, families -->\n"
REPRODUCE = (
    "The same for a model of your own, from a folder or the hub, as a page with pictures: "
    "`hf-kvquant eval report MODEL --text FILE --output DIR` (`pip install 'hf-kvquant[eval]'`)."
)
# What the README shows of `decode.json`; the names are those of decode_cases.py.
GPU_CASES = ["64x8k", "512x8k-1head", "32x4k-32heads", "128x16k", "64x16k-ragged", "16x8k", "1x128k", "1x8k", "1x1k"]
GPU_PRESETS = ["int8", "int4"]
PEER_CASES = ["64x8k", "512x8k-1head", "1x128k", "1x8k"]


def load(name: str) -> dict[str, Any]:
    """One results file."""
    results: dict[str, Any] = json.loads((RESULTS / name).read_text(encoding="utf-8"))
    return results


def load_all() -> tuple[dict[str, Any], dict[str, Any], dict[str, Any], dict[str, Any] | None, dict[str, Any] | None]:
    """The results files of quality, zero-shot tasks, CPU, GPU and `generate`; `None` where no GPU was measured yet."""
    gpu, generate = (load(name) if (RESULTS / name).exists() else None for name in ("decode.json", "generate.json"))
    return load("fidelity.json"), load("tasks.json"), load("cpu_decode.json"), gpu, generate


def speedups(cpu: dict[str, Any]) -> dict[str, float]:
    """Per preset, how many times as fast as the faster of PyTorch's fp32 and bf16 attention."""
    return {row["preset"]: row["speedup"] for row in cpu["rows"]}


def quality_table(fidelity: dict[str, Any], tasks: dict[str, Any], cpu: dict[str, Any]) -> str:
    """The README's table, with a line that says where its numbers come from."""
    ratios, means = speedups(cpu), averages(by_task_and_preset(tasks["parts"]))
    unquantised = fidelity["presets"]["none"]["bytes_per_token"]
    headings = ["preset", "bits a value", "cache", "perplexity", "KL, nats a token", "same next token"]
    headings += ["zero-shot average, %", "CPU decode, times PyTorch"]
    rows = []
    for preset, row in fidelity["presets"].items():
        ratio = f"{ratios[preset]:.1f}" if preset in ratios else "-"
        change = f" ({row['perplexity_change']:+.2%})" if preset != "none" else ""
        cells = [f"`{preset}`", f"{row['bits_per_value']:.4g}", f"{row['bytes_per_token'] / unquantised:.0%}"]
        cells += [f"{row['perplexity']:.2f}{change}", scientific(row["kld"]), f"{row['agreement']:.1%}"]
        rows.append([*cells, spelled_average(means.get(preset)), ratio])
    return table(headings, rows)


def caption(fidelity: dict[str, Any], tasks: dict[str, Any], cpu: dict[str, Any]) -> str:
    """What was measured, on what, when and by which command."""
    shape, card, settings = cpu["shape"], tasks["card"], tasks["settings"]
    items = {task: tasks["parts"][f"{task}/none"]["num_items"] for task in AVERAGED}
    num_items = " or ".join(f"{number:,}" for number in sorted(set(items.values())))
    return (
        f"Quality: the reference model of this repository (15.5 million parameters, {fidelity['dtype']}), "
        f"{fidelity['scored_tokens']:,} tokens of WikiText-2 in windows of {fidelity['window']}, against the "
        f"unquantised cache; {fidelity['date'][:10]}, `evals/results/fidelity.json`. "
        f"Zero-shot average: accuracy over {', '.join(AVERAGED)}, the first {num_items} items of each, "
        f"{settings['dtype']}, log-likelihoods read from the cache, and the 95 % interval of its change on the same "
        "items, in points; a model of this size is near chance, so that answers change more easily than those of large "
        f"ones; {card['date'][:10]}, `evals/results/tasks.json`. "
        f"CPU decode: attention of one token, batch {shape['batch']}, {shape['num_q_heads']} query and "
        f"{shape['num_kv_heads']} key-value heads of {shape['head_dim']}, {shape['length']:,} tokens, "
        f"{cpu['threads']} threads, times as fast as the faster of PyTorch's fp32 and bf16 attention over the "
        f"unquantised cache; {cpu['cpu']}, {cpu['date'][:10]}, `evals/results/cpu_decode.json`."
    )


# --- the GPU's tables -------------------------------------------------------------------------------------------------


def shown_cases(gpu: dict[str, Any], names: list[str]) -> list[dict[str, Any]]:
    """The cases of these names that were measured, in this order."""
    cases = {case["case"]: case for case in gpu["cases"]}
    return [cases[name] for name in names if name in cases]


def describe_case(case: dict[str, Any]) -> str:
    """`64 x 8k`, or `64 x 1 to 16k` for ragged lengths."""
    shape = case["shape"]
    context = f"{shape['context'] // 1024}k"
    return f"{shape['batch']} x {f'1 to {context}' if shape['is_ragged'] else context}"


def describe_heads(case: dict[str, Any]) -> str:
    """Query heads over key-value heads."""
    return f"{case['shape']['num_q_heads']}/{case['shape']['num_kv_heads']}"


def microseconds(number: float) -> str:
    """Three digits or more."""
    return f"{number:.0f}" if number >= 100 else f"{number:.1f}"


def gpu_table(gpu: dict[str, Any]) -> str:
    """Times, ratios to the best bf16 kernel, and shares of the read bandwidth."""
    columns = " | ".join(f"`{preset}`, µs | times bf16 | of read bandwidth" for preset in GPU_PRESETS)
    lines = [f"| batch x context | heads | best bf16, µs | {columns} |", "|---|---|--:" + "|--:" * 6 + "|"]
    for case in shown_cases(gpu, GPU_CASES):
        rows = {row["preset"]: row for row in case["rows"]}
        best = case["best_bf16"]
        cells = ["-" if best is None else microseconds(best["median_us"])]
        for preset in GPU_PRESETS:
            row = rows.get(preset)
            if row is None:
                cells += ["-"] * 3
                continue
            ratio = "-" if row["speedup"] is None else f"{row['speedup']:.2f}"
            cells += [microseconds(row["median_us"]), ratio, f"{row['share']:.0%}"]
        lines.append(f"| {describe_case(case)} | {describe_heads(case)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def peer_table(gpu: dict[str, Any]) -> str:
    """Every kernel that was measured, in microseconds; ours, then the others."""
    cases = shown_cases(gpu, PEER_CASES)
    ours = list(dict.fromkeys(row["preset"] for case in cases for row in case["rows"]))
    others = list(dict.fromkeys(row["peer"] for case in cases for row in case["peers"]))
    names = [(f"hf_kvquant `{name}`", "preset", "rows", name) for name in ours]
    # A peer's name begins with the type of its keys and values.
    names += [(f"{name.partition(' ')[2]}, {name.partition(' ')[0]}", "peer", "peers", name) for name in others]
    headings = ["kernel, µs", *(f"{describe_case(case)}, {describe_heads(case)}" for case in cases)]
    rows = []
    for label, key, kind, name in names:
        times = [next((row["median_us"] for row in case[kind] if row[key] == name), None) for case in cases]
        rows.append([label, *("-" if time is None else microseconds(time) for time in times)])
    return table(headings, rows)


def gpu_caption(gpu: dict[str, Any]) -> str:
    """What was measured, on what and when."""
    versions = [f"{name.removesuffix('-python')} {number}" for name, number in gpu["peer_versions"].items() if number]
    return (
        f"One decode step of one layer, head_dim 128, {gpu['query_dtype']} queries; ours with the append of the new "
        "token and with keys rotated and centred where the preset says so, the others without. Medians of "
        f"{gpu['replays']} replays of a CUDA graph, after a short rest; its "
        "calls rotate over buffers four times the L2 cache. Best bf16 is the fastest of PyTorch's and FlashInfer's "
        "bf16 kernels, each at its best setting; read bandwidth is that of a plain read kernel over as many bytes, in "
        "the same run. Other "
        f"kernels: {', '.join(versions)}. {gpu['gpu']}, driver {gpu['driver']}, CUDA {gpu['cuda']}, "
        f"{gpu['date'][:10]}, `evals/results/decode.json`."
    )


# --- sentences of the README's prose ----------------------------------------------------------------------------------


def sentences(windows: dict[str, Any], gpu: dict[str, Any] | None) -> list[str]:
    """What the prose between tables takes from results files, word by word but for line breaks.

    Args:
        windows: `fidelity_windows.json`.
        gpu: `decode.json`, if there is one.
    """
    dense, short, long = (scientific(windows["presets"][name]["kld"]) for name in ("int4", "int4:0+32", "int4:0+128"))
    said = [
        f"On the reference model `residual_length=32` lowers the divergence of `int4` from {dense} to {short}, and 128 "
        f"to {long} ({windows['scored_tokens']:,} tokens in windows of {windows['window']}, {windows['chunk']} at a "
        "time; `evals/results/fidelity_windows.json`)"
    ]
    for case in [] if gpu is None else shown_cases(gpu, ["64x8k-dim96"]):
        rows = {row["preset"]: row for row in case["rows"]}
        shares = [row["share"] for row in rows.values()]
        said.append(
            f"A head_dim of 96 gets {100 * min(shares):.0f} to {max(shares):.0%} of the bandwidth (`int8` "
            f"{rows['int8']['speedup']:.1f} times as fast as bf16)"
        )
    return said


# --- the README -------------------------------------------------------------------------------------------------------


def rendered(
    readme: str,
    fidelity: dict[str, Any],
    tasks: dict[str, Any],
    cpu: dict[str, Any],
    gpu: dict[str, Any] | None,
    generate: dict[str, Any] | None,
) -> str:
    """The README with what stands between the markers made anew."""
    place = PICTURE.relative_to(ROOT).as_posix()
    picture_of_presets = f"![Quality and speed of the presets]({place})"
    parts = [picture_of_presets, quality_table(fidelity, tasks, cpu), caption(fidelity, tasks, cpu), REPRODUCE]
    readme = _filled(readme, BEGIN, parts)
    families = load("families.json")
    parts = [render_families.families_table(families), render_families.caption(families)]
    readme = _filled(readme, FAMILIES_BEGIN, parts)
    parts = []
    if generate is not None:
        parts = ["## `generate` on a GPU", render_generate.step_table(generate), render_generate.caption(generate)]
    readme = _filled(readme, GENERATE_BEGIN, parts)
    parts = []
    if gpu is not None:
        place = GPU_PICTURE.relative_to(ROOT).as_posix()
        picture_of_gpu = f"![Time against context and share of the read bandwidth on a GPU]({place})"
        parts = ["## One layer's decode attention on a GPU", picture_of_gpu, gpu_table(gpu), peer_table(gpu)]
        parts.append(gpu_caption(gpu))
    return _filled(readme, GPU_BEGIN, parts)


def _filled(readme: str, begin: str, parts: list[str]) -> str:
    before, rest = readme.split(begin)
    _, after = rest.split(END, maxsplit=1)
    return before + begin + "".join(f"\n{part}\n" for part in parts) + ("\n" if parts else "") + END + after


def main() -> None:
    """Write the pictures and the README."""
    fidelity, tasks, cpu, gpu, generate = load_all()
    if gpu is not None:
        pictures.draw_presets(pictures.plotted_presets(fidelity, gpu), PICTURE)
        pictures.draw_decode(pictures.plotted_decode(gpu), GPU_PICTURE)
    if generate is not None:
        pictures.draw_generate(pictures.plotted_generate(generate), GENERATE_PICTURE)
    README.write_text(
        rendered(README.read_text(encoding="utf-8"), fidelity, tasks, cpu, gpu, generate), encoding="utf-8"
    )


if __name__ == "__main__":
    main()
