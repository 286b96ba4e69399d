r"""`generate` end to end: milliseconds a decode step, prefill and memory, of our caches and of transformers'.

    python evals/bench_generate.py --model llama-3-8b --output evals/results/generate.json

Physics: a step reads the weights and the cache once. Their bytes over the read bandwidth, measured in the same run, are
the roofline, shown with each figure. No loop reaches it, because the model's other kernels and the host take time too.
The floor shows how much: the same model, batch and loop with transformers' static compiled cache at hardly any context.
A step should cost its floor plus the time to read the cache.

Method:
- Random prompts, no end token, greedy. A system is warmed up, and compiles, on a short prompt with the same batch and
  capacity. Then the whole prompt is fed, and a streamer notes when each token arrives on the host.
- `ms a step` is the time between an early and the last token of one call, per step, so prefill, compilation and set-up
  do not count. The time of the first token is the prefill's.
- Because of the streamer, transformers' loop copies each token to the host, for which it waits anyway. Every system
  pays this, the floor too.
- If the whole prompt does not fit into memory, it is prefilled in chunks, and the row gives their size.
- A system that fails is listed with the reason and without a number; so is one of ours that attends to dequantised
  tensors. A system that ends the process has to be left out: on an H200, torch 2.11 ends in a segmentation fault when
  transformers' static cache gets 64x8k in chunks. So that case is measured after the others, by `--cases 64x8k
  --systems int8-static,int4-static,int4-capture --resume`.

Cases named `turn`, `chunked` or `assisted` are scenarios: a chat's next turn, a long prompt in chunks, and assisted
decoding, which `generate_scenarios.py` describes and measures. They run only if they are named:

    python evals/bench_generate.py --cases turn,assisted --systems dynamic,static,int8,int4,int8-capture,int4-capture \
        --output evals/results/scenarios.json

`generate_systems.py` has the systems. `generate_cases.py` has models, cases and goals, and computes the largest context
and batch that fit from the memory that a case took.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from bench_cpu_decode import read_gbps
from generate_cases import (
    DEFAULT_CASES,
    FLOOR_CONTEXT,
    MODELS,
    SCENARIOS,
    Case,
    Goal,
    Scenario,
    check_goals,
    largest,
    parse_case,
    roofline_ms,
)
from generate_scenarios import measure_scenario, predictable, scenario_table
from generate_systems import (
    SYSTEMS,
    WARM_UP_CONTEXT,
    Clock,
    bytes_per_token,
    call,
    check_served,
    clean_up,
)
from goals import verdict
from results_files import SHARED, add_run_options, earlier_results, parse_run, write_results
from rich.console import Console
from rich.table import Table
from torch._dynamo.utils import counters
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
from weight_methods import bytes_of

from hf_kvquant import ops
from hf_kvquant.upstream.releases import cache_of
from hf_kvquant_evals.provenance import card, describe_error, gpu_card, gpu_state

DTYPE = torch.bfloat16
FLOOR = "static"
DEFAULT_SYSTEMS = ["static", "int8-static", "int4-static", "int4-capture"]
# If the whole prompt does not fit into memory, it is prefilled in this many chunks.
CHUNKS = 8
# Timed calls: two, or one if the first took longer than this.
CALLS, LONG_SECONDS = 2, 10.0


# --- measuring --------------------------------------------------------------------------------------------------------


def measure(model: Any, name: str, case: Case, num_new: int) -> dict[str, Any]:
    """Measure one system at one case. If memory runs out, try again with the prompt in chunks.

    Returns:
        The figures of its row that need no other row.

    Raises:
        Exception: Whatever the system fails with.
    """
    try:
        return _measure(model, name, case, num_new, chunk=None)
    except torch.OutOfMemoryError:
        if case.context < CHUNKS:
            raise
    clean_up()  # not in the handler: the exception keeps the failed call's tensors alive
    return _measure(model, name, case, num_new, chunk=case.context // CHUNKS)


def _measure(model: Any, name: str, case: Case, num_new: int, chunk: int | None) -> dict[str, Any]:
    first, tokens = num_new // 4, case.context + num_new
    # Without chunks, only the decode step compiles, which does not depend on the prompt.
    warm_up = case if chunk is not None else Case(case.batch, min(case.context, WARM_UP_CONTEXT))
    counters.clear()
    clocks: list[Clock] = []
    with SYSTEMS[name](model, tokens) as arguments:
        chunked = {} if chunk is None else {"prefill_chunk_size": chunk}
        start = time.perf_counter()
        _, result = call(model, warm_up, first, {"return_dict_in_generate": True, **chunked, **arguments()})
        check_served(cache_of(result))
        token_bytes = bytes_per_token(cache_of(result))
        del result  # frees the cache, or lets the next call reuse its buffers
        call(model, warm_up, first, {**chunked, **arguments()})
        start_s = time.perf_counter() - start
        while len(clocks) < CALLS and (not clocks or clocks[0].times[-1] < LONG_SECONDS):
            clocks.append(call(model, case, num_new, {**chunked, **arguments()})[0])
    prefill_peak, decode_peak = clocks[-1].peaks
    cache_bytes = None if token_bytes is None else case.batch * tokens * token_bytes
    return {
        "system": name,
        **step_figures(clocks, first, case.batch),
        "prefill_ms": 1e3 * clocks[-1].times[0],
        "prefill_chunk": chunk,
        "start_s": start_s,
        "calls": len(clocks),
        "bytes_per_token": token_bytes,
        "cache_bytes": cache_bytes,
        "prefill_peak_bytes": prefill_peak,
        "decode_peak_bytes": decode_peak,
        "graphs": counters["stats"]["unique_graphs"],
        "graph_breaks": sum(counters["graph_break"].values()),
        "cudagraph_skips": counters["inductor"]["cudagraph_skips"],
        "largest": largest(
            case,
            total_bytes=total_bytes(model.device),
            peak_bytes=None if prefill_peak is None or decode_peak is None else max(prefill_peak, decode_peak),
            cache_bytes=cache_bytes,
            tokens=tokens,
        ),
    }


def step_figures(clocks: list[Clock], first: int, batch: int) -> dict[str, float]:
    """The time of a decode step, from the `first` new token on: of whole calls, and the spread of single steps."""
    steps = sorted(
        later - earlier
        for clock in clocks
        for earlier, later in zip(clock.times[first - 1 :], clock.times[first:], strict=False)
    )
    step_ms = 1e3 * statistics.median(
        (clock.times[-1] - clock.times[first - 1]) / (len(clock.times) - first) for clock in clocks
    )
    return {
        "step_ms": step_ms,
        "p10_ms": 1e3 * steps[len(steps) // 10],
        "p90_ms": 1e3 * steps[len(steps) * 9 // 10],
        "tokens_per_s": 1e3 * batch / step_ms,
    }


def total_bytes(device: torch.device) -> int | None:
    """Memory of a GPU; `None` for a CPU."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None


def attempt(run: Callable[[], dict[str, Any]]) -> tuple[dict[str, Any] | None, str | None]:
    """The row that `run` measures, or the reason why there is none."""
    row, reason = None, None
    try:
        row = run()
    except Exception as error:  # a system of another package may fail in any way, and must not end the run
        reason = describe_error(error)
    clean_up()
    return row, reason


def add_rows(found: dict[str, Any], systems: list[str], run: Callable[[str], dict[str, Any]]) -> dict[str, Any]:
    """`found` with the row of every system that `run` measures, or the reason why there is none."""
    for name in systems:
        row, reason = attempt(functools.partial(run, name))
        if row is not None:
            found["rows"].append(row)
        else:
            found["failures"].append({"system": name, "reason": reason})
    return found


def run_case(
    model: Any,
    case: Case,
    arguments: argparse.Namespace,
    floors: dict[int, tuple[dict[str, Any] | None, str | None]],
) -> dict[str, Any]:
    """A case as a results file shows it, without rooflines. `floors`, by batch, are filled in as they are needed."""
    num_new = arguments.new_tokens
    if case.batch not in floors and arguments.no_floor:
        floors[case.batch] = None, None
    if case.batch not in floors:
        floors[case.batch] = attempt(lambda: measure(model, FLOOR, Case(case.batch, FLOOR_CONTEXT), num_new))
    floor, reason = floors[case.batch]
    failures = [] if reason is None else [{"system": "floor", "reason": reason}]
    found = {"case": case.name, **dataclasses.asdict(case), "floor": floor, "rows": [], "failures": failures}
    return add_rows(found, arguments.systems, lambda name: measure(model, name, case, num_new))


def run_scenario(model: Any, scenario: Scenario, systems: list[str], assistant: Any) -> dict[str, Any]:
    """A scenario as a results file shows it."""
    found = {"scenario": scenario.name, **dataclasses.asdict(scenario), "rows": [], "failures": []}
    return add_rows(found, systems, lambda name: measure_scenario(model, name, scenario, assistant))


def add_roofline(row: dict[str, Any], weight_bytes: int, bandwidth: float) -> None:
    """Add the roofline to a row, and the share of it that the row reaches."""
    row["roofline_ms"] = roofline_ms(weight_bytes, row["cache_bytes"], bandwidth)
    row["share"] = None if row["roofline_ms"] is None else row["roofline_ms"] / row["step_ms"]


# --- the model --------------------------------------------------------------------------------------------------------


def load(name: str, device: torch.device) -> Any:
    """A model of `MODELS` with random weights, or a checkpoint. It generates greedily and without an end token."""
    if name in MODELS:
        model_type, sizes = MODELS[name]
        with device:
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **sizes), dtype=DTYPE)
    else:
        model = AutoModelForCausalLM.from_pretrained(name, dtype=DTYPE).to(device)
    model.generation_config = GenerationConfig(pad_token_id=0)
    return model.eval()


def weight_bytes(model: Any) -> int:
    """Bytes of weights that a step reads: all, except an embedding that is not tied to the output."""
    embedding, output = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    total = bytes_of(model)
    return total if output is embedding else total - embedding.nbytes


def bandwidth_of(device: torch.device) -> float:
    """GB/s of a plain read of memory."""
    if device.type == "cpu":
        return read_gbps()
    from gpu_timing import MAX_READ_BYTES, ReadBandwidth

    gbps = ReadBandwidth(replays=20).gbps(MAX_READ_BYTES)
    clean_up()
    return gbps


# --- output -----------------------------------------------------------------------------------------------------------


def _number(value: float | None, digits: int, unit: float = 1.0) -> str:
    return "" if value is None else f"{value / unit:.{digits}f}"


def case_table(case: dict[str, Any]) -> Table:
    """The table of one case: the floor, then the systems."""
    table = Table(title=f"{case['case']}: batch {case['batch']}, {case['context']:,} tokens", title_justify="left")
    columns = ("", "ms a step", "10 %", "90 %", "tokens/s", "roofline ms", "of it", "over floor", "prefill ms")
    columns += ("chunk", "cache GB", "peak GB", "largest context", "largest batch", "start s", "graphs")
    for column in columns:
        table.add_column(column, justify="left" if column == "" else "right")
    floor = case["floor"]
    for row in [*([] if floor is None else [{**floor, "system": f"floor ({FLOOR})"}]), *case["rows"]]:
        fits = row["largest"] or {}
        peak = row["prefill_peak_bytes"]
        table.add_row(
            row["system"],
            *(f"{row[key]:.2f}" for key in ("step_ms", "p10_ms", "p90_ms")),
            f"{row['tokens_per_s']:.0f}",
            _number(row["roofline_ms"], 2),
            "" if row["share"] is None else f"{row['share']:.0%}",
            "" if floor is None else f"{row['step_ms'] - floor['step_ms']:+.2f}",
            f"{row['prefill_ms']:.0f}",
            str(row["prefill_chunk"] or ""),
            _number(row["cache_bytes"], 2, 1e9),
            _number(None if peak is None else max(peak, row["decode_peak_bytes"]), 1, 1e9),
            str(fits.get("context", "")),
            str(fits.get("batch", "")),
            f"{row['start_s']:.1f}",
            f"{row['graphs']}, {row['graph_breaks']} breaks, {row['cudagraph_skips']} skips" if row["graphs"] else "",
        )
    return table


def goals_table(results: dict[str, Any]) -> Table:
    """The table of goals, one row per case: the floor, and for each system whether its goals were reached."""
    checks = results["checks"]
    systems = list(dict.fromkeys(check["system"] for check in checks))
    table = Table(title="goals", title_justify="left")
    for column in ("batch x context", "floor, ms", *systems):
        table.add_column(column)
    for case in dict.fromkeys(check["case"] for check in checks):
        found = next((each for each in results["cases"] if each["case"] == case), None)
        floor = None if found is None or found["floor"] is None else found["floor"]["step_ms"]
        cells = ["\n".join(map(_goal, (c for c in checks if (c["case"], c["system"]) == (case, s)))) for s in systems]
        table.add_row(case, _number(floor, 2), *cells)
    return table


def _goal(check: dict[str, Any]) -> str:
    goal = Goal(**{field.name: check[field.name] for field in dataclasses.fields(Goal)})
    if check["reached"] is None:
        return f"{goal.describe()}: {verdict(None)}"
    return f"{check['measured']:.2f}, {goal.describe()} ({check['limit']:.2f}): {verdict(check['reached'])}"


def parse(words: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line. An unknown case or system ends the program with a list of the known ones."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    models = ", ".join(MODELS)
    parser.add_argument(
        "--model", default="llama-3-8b", help=f"random weights: {models}; or a checkpoint (default: %(default)s)"
    )
    cases = ",".join(case.name for case in DEFAULT_CASES)
    scenarios = f"or scenarios: {', '.join(SCENARIOS)}, also with sizes such as {SCENARIOS['turn'].name}"
    known = f"batch x context, {scenarios} (default: {cases})"
    parser.add_argument("--cases", type=_cases, default=DEFAULT_CASES, help=known)
    systems = f"all, or some of {', '.join(SYSTEMS)} (default: {','.join(DEFAULT_SYSTEMS)})"
    parser.add_argument("--systems", type=_systems, default=DEFAULT_SYSTEMS, help=systems)
    parser.add_argument("--no-floor", action="store_true", help="do not measure the floor, which compiles")
    kept = "the cases in --output if they are of this commit, machine and model"
    add_run_options(parser, after="every case", resumed=kept, new_tokens=64)
    arguments = parse_run(parser, words)
    if arguments.model not in MODELS and any(case.name.startswith("assisted") for case in arguments.cases):
        parser.error(f"assisted changes weights, so --model must be one of {models}, got {arguments.model}")
    return arguments


def _cases(words: str) -> list[Case | Scenario]:
    try:
        return [parse_case(word) for word in words.split(",")]
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _systems(words: str) -> list[str]:
    names = list(SYSTEMS) if words == "all" else words.split(",")
    unknown = [name for name in names if name not in SYSTEMS]
    if unknown:
        raise argparse.ArgumentTypeError(f"unknown systems {unknown}; there are {', '.join(SYSTEMS)}")
    return names


def begun(where: str, arguments: argparse.Namespace, console: Console) -> tuple[Any, dict[str, Any]]:
    """The model, and what is known before anything is timed, which is printed.

    Raises:
        SystemExit: The kernels for the device are missing.
    """
    device: torch.device = arguments.device
    if not ops.has_kernels(device.type):
        raise SystemExit(f"{where}: there are no {device.type} kernels. docs/install.md says how to install them.")
    torch.manual_seed(0)
    bandwidth = bandwidth_of(device)
    model = load(arguments.model, device)
    is_gpu = device.type == "cuda"
    results: dict[str, Any] = {
        **card(),
        **(gpu_card() if is_gpu else {}),
        "model": arguments.model,
        "dtype": str(DTYPE).removeprefix("torch."),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "weight_bytes_read": weight_bytes(model),
        "read_gbps": bandwidth,
        "new_tokens": arguments.new_tokens,
        "state_before": gpu_state() if is_gpu else None,
    }
    for key, value in results.items():
        console.print(f"{key:>18}  {value}", highlight=False, markup=False)
    return model, results


def main() -> None:
    """Measure every case. Print card, tables, and the results as one line of JSON."""
    arguments = parse()
    started = time.perf_counter()
    console = Console(width=200)
    model, results = begun("bench_generate", arguments, console)
    bandwidth = results["read_gbps"]
    earlier = earlier_results(results, arguments, (*SHARED, "new_tokens"))
    cases, scenarios = earlier.get("cases", []), earlier.get("scenarios", [])
    done = {case["case"] for case in cases} | {scenario["scenario"] for scenario in scenarios}
    results |= {"cases": cases, "scenarios": scenarios, "checks": [], "state_after": None}

    def save() -> None:
        results["checks"] = check_goals(results)
        results["wall_s"] = time.perf_counter() - started
        write_results(results, arguments.output)

    floors: dict[int, tuple[dict[str, Any] | None, str | None]] = {}
    assistant = None
    for shape in arguments.cases:
        if shape.name in done:
            continue
        if isinstance(shape, Scenario):
            if shape.kind == "assisted" and assistant is None:
                assistant = predictable(model)
            found = run_scenario(model, shape, arguments.systems, assistant)
            results["scenarios"].append(found)
            table = scenario_table(found)
        else:
            found = run_case(model, shape, arguments, floors)
            for row in [*found["rows"], *([] if found["floor"] is None else [found["floor"]])]:
                add_roofline(row, results["weight_bytes_read"], bandwidth)
            results["cases"].append(found | {"read_gbps": bandwidth})
            table = case_table(found)
        console.print(table)
        for failure in found["failures"]:
            console.print(f"{failure['system']}: {failure['reason']}", highlight=False, markup=False)
        save()
    results["state_after"] = gpu_state() if arguments.device.type == "cuda" else None
    save()
    if results["checks"]:
        console.print(goals_table(results))
    console.print(f"{results['wall_s']:.0f} s", highlight=False)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
