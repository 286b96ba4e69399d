"""The captured decode step with 4-bit weights beside the one with bf16 weights, and the matrix products alone.

    python evals/bench_weights.py --output evals/results/weights.json

Physics: a step of a small batch reads each weight once, so a quarter of the bytes should take a quarter of the time.
What does not shrink are the output layer and the embedding, which transformers' loaders leave in bf16, the cache, and
the kernels between the linear layers. The kernels that multiply with codes seldom reach the bandwidth of a plain read.

Method:
- Random weights of Llama-3-8B's shape, made and quantised on the GPU layer by layer. `weight_methods.py` has the
  methods and names their kernels. The cache is `int4-token`, and steps are captured.
- The cache is filled with random keys and values instead of a prefill, which some of these kernels do slowly. Then
  `generate` makes new tokens from one more token of the prompt, timed as in `bench_generate.py`. The roofline is also
  the one there: weights and cache, read once.
- The products alone are those of the model's own linear layers, one shape after the other, in a CUDA graph that runs
  through all layers of a shape, so that weights are not in the L2 cache. They are replaced as in a captured step.
  Larger batches and parts of prompts are measured this way only: their rate is that of the arithmetic.
- A method that is not installed or fails is listed with the reason. A method that ends the process, or leaves the GPU
  in error, has to be measured after the others, with `--resume`.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import json
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from bench_generate import (
    CALLS,
    DTYPE,
    add_roofline,
    attempt,
    bandwidth_of,
    load,
    step_figures,
    weight_bytes,
)
from generate_cases import MODELS, Case
from generate_systems import SYSTEMS, System, bytes_per_token, call, check_served, clean_up
from goals import is_reached
from gpu_timing import time_calls
from results_files import SHARED, add_run_options, earlier_results, parse_run, write_results
from rich.console import Console
from rich.table import Table
from transformers.cache_utils import Cache, DynamicCache
from weight_methods import BF16, METHODS, bytes_of, quantize, shapes_of

from hf_kvquant import KVQuantCache
from hf_kvquant.graphs.fusion import fused
from hf_kvquant.upstream.releases import CACHE, cache_of
from hf_kvquant_evals.provenance import card, gpu_card, gpu_state

SYSTEM = "int4-token-capture"
# The most that a case may take, as a share of its step with bf16 weights.
GOALS = {"1x2k": 0.55, "1x32k": 0.55, "8x16k": 0.7}
REPLAYS = 30
# Tokens of a large batch and of a part of a prompt. A few layers and replays will do, as such calls take long.
MANY_ROWS, MANY_LAYERS, MANY_REPLAYS = (64, 2048), 4, 10


# --- measuring --------------------------------------------------------------------------------------------------------


def measure(name: str, arguments: argparse.Namespace, bandwidth: float) -> dict[str, Any]:
    """One method as a results file shows it, without what needs the bf16 weights.

    Raises:
        Exception: Whatever the method fails with.
    """
    method = METHODS[name]
    model = load(arguments.model, arguments.device)
    start = time.perf_counter()
    shapes = shapes_of(model)
    quantize(model, name)
    clean_up()  # of the weights that were replaced
    found: dict[str, Any] = {
        "method": name,
        "kernel": method.kernel,
        "packages": method.versions,
        "quantize_s": time.perf_counter() - start,
        "weight_bytes": bytes_of(model),
        "weight_bytes_read": weight_bytes(model),
        "products": [],
        "cases": [],
    }
    with method.chosen():
        for rows in sorted({case.batch for case in arguments.cases} | set(MANY_ROWS)):
            found["products"] += products(model, shapes, rows, bandwidth)
        steps = [measure_step(model, case, arguments.new_tokens) for case in arguments.cases]
    for case, step in zip(arguments.cases, steps, strict=True):
        row = {"case": case.name, **dataclasses.asdict(case), **step}
        alone = [each for each in found["products"] if each["rows"] == case.batch]
        row["products_ms"] = sum(each["layers"] * each["median_us"] for each in alone) / 1e3
        add_roofline(row, found["weight_bytes_read"], bandwidth)
        found["cases"].append(row)
    return found


@torch.no_grad()
def products(model: Any, shapes: dict[str, tuple[int, int]], rows: int, bandwidth: float) -> list[dict[str, Any]]:
    """The linear layers alone, by shape: microseconds and bandwidth of one, and how many the model has."""
    by_shape = defaultdict(list)
    for name, shape in shapes.items():
        by_shape[shape].append(model.get_submodule(name))
    found = []
    for (outputs, inputs), layers in by_shape.items():
        x = torch.randn(rows, 1, inputs, dtype=DTYPE, device=model.device)
        num_sets, replays = (MANY_LAYERS, MANY_REPLAYS) if rows in MANY_ROWS else (len(layers), REPLAYS)
        with fused(model):
            timing = time_calls(lambda i, layers=layers, x=x: layers[i](x), min(num_sets, len(layers)), replays)
        num_bytes, us = bytes_of(layers[0]), timing.median_us
        gbps = num_bytes / us / 1e3
        shape = {"outputs": outputs, "inputs": inputs, "rows": rows, "layers": len(layers), "bytes": num_bytes}
        rates = {"gbps": gbps, "share": gbps / bandwidth, "tflops": 2 * rows * outputs * inputs / us / 1e6}
        found.append({**shape, **dataclasses.asdict(timing), **rates})
    return found


def measure_step(
    model: Any, case: Case, num_new: int, system: System = SYSTEMS[SYSTEM], calls: int = CALLS
) -> dict[str, Any]:
    """Time decode steps of one case behind a cache of random numbers."""
    first, tokens, clocks = num_new // 4, case.context + num_new, []
    with system(model, tokens) as arguments:
        options = {"return_dict_in_generate": True, **arguments()}
        cache = cache_of(call(model, Case(case.batch, 1), first, options)[1])  # captures or compiles the step
        for _ in range(calls):
            if type(cache) is DynamicCache:
                cache = DynamicCache(config=model.config)  # its `reset` would keep the tokens
            cache.reset()
            fill(model, cache, case.batch, case.context - 1)
            with made_by_generate():
                clocks.append(call(model, case, num_new, {CACHE: cache})[0])
        check_served(cache)
        cache_bytes = case.batch * tokens * (bytes_per_token(cache) or 0)
    return {**step_figures(clocks, first, case.batch), "cache_bytes": cache_bytes}


@contextlib.contextmanager
def made_by_generate() -> Iterator[None]:
    """Let `generate` take our caches for its own, which end with the call.

    With dense windows, steps that run ahead cannot be undone, so for a cache of the user's the host waits for each.
    """
    never = property(lambda cache: False, lambda cache, is_user_defined: None)
    with mock.patch.object(KVQuantCache, "_is_user_defined", never, create=True):
        yield


@torch.no_grad()
def fill(model: Any, cache: Cache, batch: int, tokens: int) -> None:
    """Append random keys and values to an empty cache."""
    config = model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    shape = (batch, config.num_key_value_heads, tokens, head_dim)
    key, value = torch.randn(2, *shape, dtype=DTYPE, device=model.device)
    for index in range(config.num_hidden_layers):
        cache.update(key, value, index)


# --- ratios and goals -------------------------------------------------------------------------------------------------


def add_ratios(results: dict[str, Any]) -> None:
    """Add to every case its share of the step with bf16 weights, and to the results what the goals make of it."""
    plain = next((found for found in results["methods"] if found["method"] == BF16), None)
    steps = {} if plain is None else {row["case"]: row["step_ms"] for row in plain["cases"]}
    for found in results["methods"]:
        for row in found["cases"]:
            row["ratio"] = row["step_ms"] / steps[row["case"]] if row["case"] in steps else None
    results["checks"] = []
    for case, limit in GOALS.items():
        ratios = {
            found["method"]: row["ratio"]
            for found in results["methods"]
            for row in found["cases"]
            if found["method"] != BF16 and row["case"] == case and row["ratio"] is not None
        }
        fastest = min(ratios, key=lambda name: ratios[name], default=None)
        measured = None if fastest is None else ratios[fastest]
        reached = is_reached(measured, limit)
        results["checks"].append(
            {"case": case, "limit": limit, "fastest": fastest, "measured": measured, "reached": reached}
        )


# --- output -----------------------------------------------------------------------------------------------------------


def steps_table(results: dict[str, Any]) -> Table:
    """Every method's steps."""
    table = Table(title="a captured step", title_justify="left")
    for column in ("", "kernel", "batch x context"):
        table.add_column(column)
    for column in ("ms", "10 %", "90 %", "of bf16", "products, ms", "roofline ms", "of it", "weights GB"):
        table.add_column(column, justify="right")
    for found in results["methods"]:
        for row in found["cases"]:
            table.add_row(
                found["method"],
                found["kernel"],
                row["case"],
                *(f"{row[key]:.3f}" for key in ("step_ms", "p10_ms", "p90_ms")),
                "" if row["ratio"] is None else f"{row['ratio']:.3f}",
                f"{row['products_ms']:.3f}",
                f"{row['roofline_ms']:.3f}",
                f"{row['share']:.0%}",
                f"{found['weight_bytes'] / 1e9:.2f}",
            )
    return table


def products_table(results: dict[str, Any]) -> Table:
    """Every method's products."""
    table = Table(title="linear layers alone", title_justify="left")
    table.add_column("")
    for column in ("outputs", "inputs", "rows", "layers", "us", "10 %", "90 %", "GB/s", "of a read", "TFLOP/s"):
        table.add_column(column, justify="right")
    for found in results["methods"]:
        for row in found["products"]:
            table.add_row(
                found["method"],
                *(str(row[key]) for key in ("outputs", "inputs", "rows", "layers")),
                *(f"{row[key]:.1f}" for key in ("median_us", "p10_us", "p90_us")),
                f"{row['gbps']:.0f}",
                f"{row['share']:.0%}",
                f"{row['tflops']:.1f}",
            )
    return table


def parse(words: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-3-8b", choices=MODELS, help="random weights (default: %(default)s)")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    told = f"batch x context (default: {' '.join(GOALS)})"
    parser.add_argument("--cases", nargs="+", type=Case.parse, default=[*map(Case.parse, GOALS)], help=told)
    kept = "what --output holds if it is of this commit, machine and model"
    add_run_options(parser, after="every method", resumed=kept, new_tokens=64)
    return parse_run(parser, words)


def main() -> None:
    """Measure every method. Print tables, and the results as one line of JSON."""
    arguments = parse()
    started = time.perf_counter()
    torch.manual_seed(0)
    console = Console(width=160)
    is_gpu = arguments.device.type == "cuda"
    bandwidth = bandwidth_of(arguments.device)
    results: dict[str, Any] = {
        **card(),
        **(gpu_card() if is_gpu else {}),
        "model": arguments.model,
        "dtype": str(DTYPE).removeprefix("torch."),
        "system": SYSTEM,
        "new_tokens": arguments.new_tokens,
        "read_gbps": bandwidth,
        "state_before": gpu_state() if is_gpu else None,
    }
    for key, value in results.items():
        console.print(f"{key:>18}  {value}", highlight=False, markup=False)
    earlier = earlier_results(results, arguments, (*SHARED, "new_tokens"))
    results["methods"] = earlier.get("methods", [])
    done = [found["method"] for found in results["methods"]]
    names = [name for name in arguments.methods if name not in done]
    results["failures"] = [each for each in earlier.get("failures", []) if each["method"] not in names]
    for name in names:
        found, reason = attempt(functools.partial(measure, name, arguments, bandwidth))
        if found is not None:
            results["methods"].append(found)
        else:
            results["failures"].append({"method": name, "reason": reason})
        results["wall_s"] = time.perf_counter() - started
        told = ", ".join(f"{row['case']} {row['step_ms']:.3f} ms" for row in found["cases"]) if found else reason
        console.print(f"{results['wall_s']:.0f} s: {name}: {told}", highlight=False, markup=False)
        add_ratios(results)
        write_results(results, arguments.output)
    add_ratios(results)  # also where nothing was missing
    console.print(products_table(results))
    console.print(steps_table(results))
    for check in results["checks"]:
        console.print(json.dumps(check), highlight=False, markup=False)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
