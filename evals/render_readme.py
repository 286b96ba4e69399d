"""Renders the tables and pictures of the README and of `docs/`, from `evals/results/` alone.

    python evals/render_readme.py

A page marks the place of a part with `<!-- begin: NAME -->` and `<!-- end -->`; `parts` has the text for each name. A
test renders every page again and compares, so every number on a page comes from a results file. A picture is compared
by the numbers in its description, since its bytes depend on the version of matplotlib (`pip install matplotlib`, needed
only for drawing). `pictures.py` draws, `render_generate.py` has the tables of `generate`, `render_chunks.py` that of
many new tokens, `render_batching.py` that of many requests, with its picture, `render_parallel.py` that of several
GPUs, `render_families.py` that of model families, `render_itl.py` that of steps by the tokens held, with its picture,
`render_latent.py` that of latents, `render_states.py` that of states, `render_real.py` those of a real model,
`render_recipes.py` those of published recipes, `render_ablation.py` and `render_weights.py` those of quantised weights.
The other scripts of this folder and `hf_kvquant_evals/` measure.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import pictures
import render_ablation
import render_batching
import render_chunks
import render_families
import render_generate
import render_itl
import render_latent
import render_parallel
import render_real
import render_recipes
import render_shares
import render_states
import render_weights

from hf_kvquant.common.tables import markdown_table as table
from hf_kvquant.common.tables import scientific
from hf_kvquant_evals.recipes.picture import draw as draw_recipes
from hf_kvquant_evals.report.page import spelled_average
from hf_kvquant_evals.tasks.data import AVERAGED
from hf_kvquant_evals.tasks.results import averages, by_task_and_preset

Found = TypeVar("Found")
ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "evals" / "results"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PICTURE = RESULTS / "presets.svg"
GPU_PICTURE = RESULTS / "decode.svg"
GENERATE_PICTURE = RESULTS / "generate.svg"
RECIPES_PICTURE = RESULTS / "recipes.svg"
# Where there are results:
ITL_PICTURE = RESULTS / "itl.svg"
BATCHING_PICTURE = RESULTS / "batching.svg"
MARKED = re.compile(r"(<!-- begin: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)
# The results files that parts are made from.
FILES = ("fidelity", "tasks", "cpu_decode", "decode", "generate", "families", "recipes", "recipes_real")
FILES += ("real_generate", "real_generate_calibrated", "real_chunks", "real_windows", "real_long", "real_position")
FILES += ("real_bits",)
# Parts of the same names are made from these where they exist.
OPTIONAL_FILES = ("chunks", "scenarios", "batching", "parallel", "ablation", "ablation_outliers")
OPTIONAL_FILES += (
    "decode_few_bits",
    "decode_pages",
    "decode_uneven",
    "dequantize",
    "weights",
    "batching_weights",
    "batching_host",
    "chunks_pages",
    "itl",
    "latent",
    *render_latent.GENERATE,
    *render_latent.QUALITY,
    *render_states.FILES,
    "batching_latent",
)
# Of a model whose weights are too large for the repository. Its parts say so until there are results.
LARGER_FILES = ("recipes_larger", "ablation_larger", "ablation_larger_outliers")
NOT_MEASURED = "Not measured yet."
ITL_IMAGE = (
    "![Line charts: the time of a decode step against the tokens held, for one sequence and for several. All lines "
    "rise; the fewer bits a cache has, the flatter its line.](../evals/results/itl.svg)"
)
BATCHING_IMAGE = (
    "![Line chart: output tokens a second against the bytes of the cache, with a line each for bf16 and for "
    "presets.](../evals/results/batching.svg)"
)
# What is shown of `decode.json`. Names are those of decode_cases.py.
GPU_CASES = ["64x8k", "512x8k-1head", "32x4k-32heads", "128x16k", "64x16k-ragged", "16x8k", "1x128k", "1x8k", "1x1k"]
GPU_PRESETS = ["int8", "int4"]
PEER_CASES = ["64x8k", "512x8k-1head", "1x128k", "1x8k"]
# The summary, on the README and on docs/index.md: the case of each results file it shows.
SUMMARY_GPU_CASE, SUMMARY_GENERATE_CASE = "64x8k", "8x16k"
# Behind the name of a preset that was measured without its dense tokens.
NOTHING_DENSE = ":0+0"


def load(name: str) -> dict[str, Any]:
    """One results file, by its name without the suffix."""
    results: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return results


def load_all() -> dict[str, dict[str, Any]]:
    """All results files, by name."""
    present = [name for name in (*OPTIONAL_FILES, *LARGER_FILES) if (RESULTS / f"{name}.json").exists()]
    return {name: load(name) for name in [*FILES, *present]}


# --- pages ------------------------------------------------------------------------------------------------------------


def parts(results: Mapping[str, dict[str, Any]]) -> dict[str, str]:
    """The Markdown of every part that a page may ask for, by name."""
    fidelity, tasks, cpu, decode = (results[name] for name in ("fidelity", "tasks", "cpu_decode", "decode"))
    generate, families = results["generate"], results["families"]
    paragraphs = {
        "summary": [
            summary_table(results, cpu, decode),
            end_to_end_sentence(generate),
            summary_caption(results["real_generate"], cpu, decode),
        ],
        "quality": [quality_table(fidelity, tasks, cpu), caption(fidelity, tasks, cpu)],
        "real": [render_real.preset_table(results), render_real.caption(results)],
        "windows": [render_real.windows_table(results), render_real.windows_caption(results)],
        "bits": [render_real.bits_table(results["real_bits"]), render_real.bits_caption(results["real_bits"])],
        "positions": [render_real.position_table(results), render_real.position_caption(results)],
        "recipes-real": [
            render_real.recipe_table(results["recipes_real"]),
            render_real.recipe_caption(results["recipes_real"]),
        ],
        "generate": [render_generate.step_table(generate), render_generate.caption(generate)],
        "decode": [gpu_table(decode), gpu_caption(decode)],
        "kernels": [peer_table(decode), peer_caption(decode)],
        "short": [short_sentence(decode)],
        "head-dim": [head_dim_sentence(decode)],
        "offloading": [offloading_sentence(fidelity)],
        "families": [render_families.families_table(families), render_families.caption(families)],
    }
    recipes = results["recipes"]
    paragraphs |= {
        "recipes": [render_recipes.quality_table(recipes), render_recipes.quality_caption(recipes)],
        "recipes-codes": [render_recipes.codes_table(recipes)],
        "recipes-hard": [render_recipes.hard_table(recipes), render_recipes.hard_caption(recipes)],
        "recipes-needles": [render_recipes.needle_table(recipes)],
        "recipes-drift": [render_recipes.drift_table(recipes), render_recipes.drift_caption(recipes)],
        "recipes-tasks": [
            render_recipes.task_table(recipes),
            render_recipes.task_caption(recipes, "The reference model"),
        ],
    }
    not_yet = "recipes-larger", "ablation-larger", "itl", "latent", "latent-generate", "batching-latent"
    not_yet += "latent-quality", "states-generate"
    paragraphs |= {name: [NOT_MEASURED] for name in not_yet}
    if "recipes_larger" in results:
        paragraphs["recipes-larger"] = render_recipes.larger(results["recipes_larger"], recipes)
    if "itl" in results:
        itl = results["itl"]
        paragraphs["itl"] = [ITL_IMAGE, render_itl.slope_table(itl), render_itl.caption(itl)]
    if "chunks" in results:
        paragraphs["chunks"] = [render_chunks.chunk_table(results["chunks"]), render_chunks.caption(results["chunks"])]
    if "batching" in results:
        batching = results["batching"]
        tables = render_batching.throughput_table(batching), render_batching.systems_table(batching)
        paragraphs["batching"] = [BATCHING_IMAGE, *tables, render_batching.caption(batching)]
        paragraphs["summary"][1] += f" {render_batching.gain_sentence(batching)}"
    if "batching_host" in results:
        paragraphs["batching-host"] = [render_batching.host_sentence(results["batching_host"])]
    if "chunks_pages" in results:
        paragraphs["chunks-pages"] = [render_chunks.pages_sentence(results["chunks_pages"])]
    for part, name in (("ablation", "ablation"), ("ablation-larger", "ablation_larger")):
        if name in results:
            ablation = results[name], results[f"{name}_outliers"]
            paragraphs[part] = [render_ablation.cost_table(*ablation), render_ablation.caption(*ablation, name)]
    for part, name, rows, caption_of in (
        ("few-bits", "decode_few_bits", render_shares.few_bits_table, render_shares.few_bits_caption),
        ("uneven", "decode_uneven", render_shares.uneven_table, render_shares.uneven_caption),
        ("pages", "decode_pages", render_shares.pages_table, render_shares.pages_caption),
        ("prompt", "dequantize", render_shares.prompt_table, render_shares.prompt_caption),
    ):
        if name in results:
            paragraphs[part] = [rows(results[name]), caption_of(results[name])]
    if "weights" in results:
        weights = results["weights"]
        paragraphs["weights"] = [render_weights.step_table(weights), render_weights.caption(weights)]
        paragraphs["weights-kernels"] = [render_weights.rate_table(weights)]
        paragraphs["summary"][1] += f" {render_weights.gain_sentence(weights)}"
    if "batching_weights" in results:
        batching = results["batching_weights"]
        paragraphs["batching-weights"] = [
            render_weights.throughput_table(batching),
            render_weights.throughput_caption(batching),
        ]
    if "parallel" in results:
        parallel = results["parallel"]
        paragraphs["parallel"] = [render_parallel.step_table(parallel), render_parallel.caption(parallel)]
    if "latent" in results:
        latent = results["latent"]
        paragraphs["latent"] = [render_latent.step_table(latent), render_latent.caption(latent)]
    if "batching_latent" in results:
        paragraphs["batching-latent"] = [render_latent.batching_sentence(results["batching_latent"])]
    of_latents = [results[name] for name in render_latent.GENERATE if name in results]
    if of_latents:
        tables = render_latent.generate_table(of_latents), render_latent.generate_caption(of_latents)
        paragraphs["latent-generate"] = [*tables]
    if all(name in results for name in render_latent.QUALITY):
        paragraphs["latent-quality"] = [render_latent.quality_table(results), render_latent.quality_caption(results)]
    if any(name in results for name in render_states.FILES):
        paragraphs["states-generate"] = [render_states.step_table(results), render_states.caption(results)]
    if "scenarios" in results:
        scenarios = results["scenarios"]
        paragraphs["scenarios"] = [
            render_generate.scenario_table(scenarios),
            render_generate.scenario_caption(scenarios),
        ]
    return {name: "\n\n".join(each) for name, each in paragraphs.items()}


def plotted_recipes(results: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """What the picture of recipes shows."""
    return render_recipes.plotted(results["recipes"], results.get("recipes_larger"))


def rendered(page: str, texts: Mapping[str, str]) -> str:
    """A page with the text between its markers rendered again."""
    return MARKED.sub(lambda found: f"{found[1]}\n{texts[found[2]]}\n\n{found[3]}", page)


# --- the summary ------------------------------------------------------------------------------------------------------


def summary_table(results: Mapping[str, dict[str, Any]], cpu: dict[str, Any], decode: dict[str, Any]) -> str:
    """Memory, quality and speed of some presets."""
    sizes, quality = results["fidelity"]["presets"], render_real.measured_presets(results)
    (case,) = shown_cases(decode, [SUMMARY_GPU_CASE])
    on_gpu = {row["preset"]: row["speedup"] for row in case["rows"]}
    on_cpu, unquantised = speedups(cpu), sizes["none"]["bytes_per_token"]
    rows = []
    for preset in pictures.SUMMARY_PRESETS:
        row, size = quality[preset], sizes[preset]["bytes_per_token"]
        cells = [f"`{preset}`", f"{size / unquantised:.0%}", render_real.change(row["perplexity_change"])]
        rows.append([*cells, f"{row['agreement']:.1%}", times(found(on_gpu, preset)), times(found(on_cpu, preset))])
    return table(
        ["preset", "cache size", "perplexity change", "same next token", "GPU attention", "CPU attention"], rows
    )


def end_to_end_sentence(generate: dict[str, Any]) -> str:
    """One case of `generate`: time of a step and size of the cache."""
    batch, context = SUMMARY_GENERATE_CASE.split("x")
    steps, ratio, cache = render_generate.compared(generate, SUMMARY_GENERATE_CASE)
    return (
        f"End to end, with a Llama-3-8B-sized model and {batch} sequences of {context} tokens on an "
        f"{generate['gpu'].removeprefix('NVIDIA ')}, a step of `generate` takes {steps[1]:.1f} ms with `int4` and "
        f"{steps[0]:.1f} ms with transformers' static cache ({ratio:.1f}x). The cache takes {cache[1]:.1f} GB instead "
        f"of {cache[0]:.1f} GB."
    )


def summary_caption(real: dict[str, Any], cpu: dict[str, Any], decode: dict[str, Any]) -> str:
    """What each column of the summary compares."""
    (case,) = shown_cases(decode, [SUMMARY_GPU_CASE])
    return (
        f"Cache size: against 16 bits. Quality: {render_real.MODEL} on WikiText-2, behind prompts of "
        f"{real['n0']:,} tokens. GPU attention: one decode step against the fastest bf16 kernel of PyTorch and "
        f"FlashInfer ({decode['gpu'].removeprefix('NVIDIA ')}, {case['shape']['batch']} sequences of "
        f"{describe_context(case)} tokens). CPU attention: against PyTorch on {cpu['threads']} threads "
        f"of {_article(cpu['cpu'])} ({cpu['shape']['length']:,} tokens); a dash: not measured."
        f"{bare_note('Attention', [row['preset'] for row in case['rows']], pictures.SUMMARY_PRESETS)}"
    )


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


def _article(name: str) -> str:
    return f"{'an' if name[0] in 'AEIOU' else 'a'} {name}"


# --- quality ----------------------------------------------------------------------------------------------------------

MODEL = "15.5-million-parameter reference model"


def speedups(cpu: dict[str, Any]) -> dict[str, float]:
    """By preset, how many times as fast it is as the faster of PyTorch's fp32 and bf16 attention."""
    return {row["preset"]: row["speedup"] for row in cpu["rows"]}


def quality_table(fidelity: dict[str, Any], tasks: dict[str, Any], cpu: dict[str, Any]) -> str:
    """Every preset: bits, perplexity, divergence, agreement, zero-shot accuracy, speed on a CPU."""
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


def caption(fidelity: dict[str, Any], tasks: dict[str, Any], cpu: dict[str, Any]) -> str:
    """What was measured, on what and when."""
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


# --- GPUs -------------------------------------------------------------------------------------------------------------


def shown_cases(gpu: dict[str, Any], names: list[str]) -> list[dict[str, Any]]:
    """The named cases that were measured, in the order of the names."""
    cases = {case["case"]: case for case in gpu["cases"]}
    return [cases[name] for name in names if name in cases]


def describe_case(case: dict[str, Any]) -> str:
    """`64 x 8k`, or `64 x 1 to 16k` for ragged lengths."""
    return f"{case['shape']['batch']} x {describe_context(case)}"


def describe_context(case: dict[str, Any]) -> str:
    """`8k`, or `1 to 16k`."""
    context = f"{case['shape']['context'] // 1024}k"
    return f"1 to {context}" if case["shape"]["is_ragged"] else context


def describe_heads(case: dict[str, Any]) -> str:
    """`32/8`: query heads over key-value heads."""
    return f"{case['shape']['num_q_heads']}/{case['shape']['num_kv_heads']}"


def microseconds(number: float) -> str:
    """A time with one decimal, or none from 100 on."""
    return f"{number:.0f}" if number >= 100 else f"{number:.1f}"


def gpu_table(gpu: dict[str, Any]) -> str:
    """Times, ratios to the best bf16 kernel, and shares of the read bandwidth."""
    headings = ["batch x context", "heads", "best bf16, µs"]
    headings += [text for preset in GPU_PRESETS for text in (f"`{preset}`, µs", "against bf16", "of bandwidth")]
    lines = []
    for case in shown_cases(gpu, GPU_CASES):
        rows = {row["preset"]: row for row in case["rows"]}
        best = case["best_bf16"]
        cells = [describe_case(case), describe_heads(case), "-" if best is None else microseconds(best["median_us"])]
        for preset in GPU_PRESETS:
            row = rows.get(preset)
            if row is None:
                cells += ["-"] * 3
                continue
            ratio = "-" if row["speedup"] is None else f"{row['speedup']:.2f}x"
            cells += [microseconds(row["median_us"]), ratio, f"{row['share']:.0%}"]
        lines.append(cells)
    return table(headings, lines, num_text=2)


def gpu_caption(gpu: dict[str, Any]) -> str:
    """What was measured, on what and when."""
    return (
        f"One decode step of one layer on an {gpu['gpu']}, head_dim 128, {gpu['query_dtype']} queries. Heads are query "
        "heads over key-value heads. Ours includes appending the new token, and rotating and centring keys where the "
        "preset does so; the other kernels only attend. The best bf16 kernel is the fastest of PyTorch's and "
        "FlashInfer's, each at its best setting. The bandwidth is that of a plain kernel reading as many bytes in the "
        "same run. "
        f"Times are medians of {gpu['replays']} replays of a CUDA graph, after a short rest; its calls rotate over "
        f"buffers four times the L2 cache. Driver {gpu['driver']}, CUDA {gpu['cuda']}, {gpu['date'][:10]}, "
        "`evals/results/decode.json`."
    )


def peer_table(gpu: dict[str, Any]) -> str:
    """The time of every kernel that was measured, in microseconds: ours, then the others."""
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


def peer_caption(gpu: dict[str, Any]) -> str:
    """The versions of the other kernels."""
    versions = [f"{name.removesuffix('-python')} {number}" for name, number in gpu["peer_versions"].items() if number]
    return f"Measured in the same run as the table above. Other kernels: {', '.join(versions)}. A dash: not measured."


def short_sentence(gpu: dict[str, Any]) -> str:
    """What a step costs when there is little to read."""
    cases = shown_cases(gpu, ["1x1k", "1x8k"])
    times = [row["median_us"] for case in cases for row in case["rows"]]
    shortest = cases[0]
    return (
        f"One short sequence gains little: between 1,000 and 8,000 tokens, attention takes {min(times):.0f} to "
        f"{max(times):.0f} µs in every format. At 1,000 tokens the best bf16 kernel takes "
        f"{shortest['best_bf16']['median_us']:.1f} µs and `int4` {_time(shortest, 'int4'):.1f} µs. Batches of very "
        "unequal lengths use less of the bandwidth."
    )


def _time(case: dict[str, Any], preset: str) -> float:
    time: float = next(row["median_us"] for row in case["rows"] if row["preset"] == preset)
    return time


def head_dim_sentence(gpu: dict[str, Any]) -> str:
    """The share of the bandwidth that kernels reach when head_dim is not a power of two."""
    (case,) = shown_cases(gpu, ["64x8k-dim96"])
    rows = {row["preset"]: row for row in case["rows"]}
    shares = [row["share"] for row in rows.values()]
    return (
        f"A head_dim of 96 reaches {min(shares):.0%} to {max(shares):.0%} of the read bandwidth (`int8` is "
        f"{rows['int8']['speedup']:.1f} times as fast as bf16). Other head_dims that are not 64, 128 or 256 take the "
        "same path."
    )


# ----------------------------------------------------------------------------------------------------------------------


def main() -> None:
    """Write the pictures and the pages."""
    results = load_all()
    pictures.draw_presets(pictures.plotted_presets(results), PICTURE)
    pictures.draw_decode(pictures.plotted_decode(results["decode"]), GPU_PICTURE)
    pictures.draw_generate(pictures.plotted_generate(results["generate"]), GENERATE_PICTURE)
    draw_recipes(RECIPES_PICTURE, plotted_recipes(results))
    if "itl" in results:
        render_itl.draw(render_itl.plotted(results["itl"]), ITL_PICTURE)
    if "batching" in results:
        render_batching.draw(render_batching.plotted(results["batching"]), BATCHING_PICTURE)
    texts = parts(results)
    for page in PAGES:
        page.write_text(rendered(page.read_text(encoding="utf-8"), texts), encoding="utf-8")


if __name__ == "__main__":
    main()
