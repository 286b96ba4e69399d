"""Continuous batching: what a server makes of a fixed memory, with our pages and with transformers' own.

    PYTHONPATH=evals/stand_in python evals/bench_batching.py --cache-gb 24 --output evals/results/batching.json
    PYTHONPATH=evals/stand_in python evals/bench_batching.py --total-gb 24 48 --weights bf16 humming \
        --systems flash int4 --workloads W1 W2 --output evals/results/batching_weights.json
    PYTHONPATH=evals/stand_in python evals/bench_batching.py --workloads H1 H64 --systems flash int4 \
        --output evals/results/batching_host.json

Many requests share a GPU. How many run at once is limited by the memory for keys and values, and with them the tokens a
second: a decode step costs hardly more for many requests than for few. So all systems get the same bytes of cache.

Method:
- Random weights and prompts, greedy, no end token, through transformers' `ContinuousBatchingManager`. All requests
  arrive at once. Output lengths differ where the workload says so: equal ones run in waves, which flatters a small
  cache.
- A few requests run first and are not timed. They compile, capture graphs and fill allocators.
- Prefix sharing is on, as it is by default.
- The peak is what PyTorch had reserved, CUDA graphs included. It shows whether a total was kept.
- Tokens held and requests that run are counted at each step. A step is mixed if it has prompts. The time to the first
  token counts from the moment that a request was added, so it contains the queue.
- With asynchronous batching, the host prepares a step while the GPU computes the one before it. The time that it does
  not wait for the GPU is counted over steps that are not mixed. H1 and H64, which differ in the tokens held alone, show
  how it depends on them.

`transformers` is the unpatched model with sdpa, which everybody has. `flash` is the unpatched model with the package
flash-attn, or with the stand-in for it that the command above puts in its place: there transformers captures and
prepares decode steps as ours are. `none` has pages in the model's dtype and our kernels; the others are presets.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import itertools
import json
import math
import statistics
import time
from collections.abc import Iterator
from typing import Any

import torch
from bench_generate import DTYPE, attempt, load
from generate_cases import MODELS
from generate_systems import clean_up
from results_files import SHARED, add_run_options, earlier_results, parse_run, write_results
from rich.console import Console
from rich.table import Table
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching.requests import GenerationOutput
from transformers.generation.continuous_batching.utils import WorkloadHints
from weight_methods import BF16, METHODS, arm_of, bytes_of, quantize

from hf_kvquant import PRESETS, KVQuantConfig, patched
from hf_kvquant.cache.support import formats_of
from hf_kvquant.models.latent import head_dims_of, latent_sizes
from hf_kvquant.spec.layout import KVLayout
from hf_kvquant_evals.provenance import card, gpu_card

# Unpatched, by attention implementation.
UNPATCHED = {"transformers": "sdpa", "flash": "flash_attention_2"}
HALVES = "-float16-states"  # behind a preset's name
SYSTEMS = [*UNPATCHED, *PRESETS, *(preset + HALVES for preset in ("int8", "int4"))]
DEFAULT_SYSTEMS = [*UNPATCHED, "int8", "int4"]
PAGE_SIZE = 256  # by default
# What results must share with those that they are added to. Commits may differ: each row names its own.
RESUMED = (*(key for key in SHARED if key not in ("commit", "is_dirty")), "page_size")
WARM_UP_REQUESTS, WARM_UP_TOKENS = 4, 8
# Of memory in all, what is kept for activations of 8,192 tokens, logits and CUDA graphs.
WORKING_GB = 2.5


@dataclasses.dataclass(frozen=True)
class Workload:
    """Requests that arrive together.

    Attributes:
        requests: How many.
        prompt: Tokens of each prompt.
        new: The fewest and the most new tokens; the numbers between are equally frequent.
        is_shared: Whether all prompts are the same but for their last tokens.
    """

    requests: int
    prompt: int
    new: tuple[int, int]
    is_shared: bool = False

    def prompts(self, vocab_size: int) -> list[list[int]]:
        """The same in every run."""
        draw = torch.Generator().manual_seed(0)
        first = torch.randint(5, vocab_size, (self.prompt,), generator=draw)
        prompts = []
        for _ in range(self.requests):
            own = torch.randint(5, vocab_size, (self.prompt,), generator=draw)
            num_shared = self.prompt - min(16, self.prompt) if self.is_shared else 0
            prompts.append(torch.cat([first[:num_shared], own[num_shared:]]).tolist())
        return prompts

    def new_tokens(self) -> list[int]:
        """Of each request; the same in every run."""
        fewest, most = self.new
        draw = torch.Generator().manual_seed(1)
        found: list[int] = torch.randint(fewest, most + 1, (self.requests,), generator=draw).tolist()
        return found


WORKLOADS = {
    "W1": Workload(512, 1024, (128, 896)),
    "W2": Workload(1024, 1024, (4096, 4096)),
    "W3": Workload(64, 16384, (512, 512)),
    "W4": Workload(256, 16384, (512, 512), is_shared=True),
    "H1": Workload(64, 1024, (512, 512), is_shared=True),
    "H64": Workload(64, 65536, (512, 512), is_shared=True),
}
HOST_WORKLOADS = "H1", "H64"  # only if they are named


# --- measuring --------------------------------------------------------------------------------------------------------


class Watch:
    """Notes what each step of a manager contains, and how long the host works on it.

    Attributes:
        held: Tokens, by step.
        running: Requests, by step.
        is_mixed: Whether a step has prompts.
        host_s: Seconds that the host spent on a step without prompts. Empty unless batching is asynchronous.
    """

    def __init__(self, processor: Any) -> None:
        self.held: list[int] = []
        self.running: list[int] = []
        self.is_mixed: list[bool] = []
        self.host_s: list[float] = []
        self._scheduler, self._io = processor.scheduler, processor.inputs_and_outputs
        self._schedule, self._update = self._scheduler.schedule_batch, self._io.prepare_batch_update
        self._since: float | None = None
        self._scheduler.schedule_batch = self._noted
        if processor.use_async_batching:
            self._io.prepare_batch_update = self._waited

    def _noted(self, *arguments: Any, **options: Any) -> Any:
        scheduled = self._schedule(*arguments, **options)
        if scheduled[0]:
            self.held.append(sum(state.current_len() for state in self._scheduler.active_requests.values()))
            self.running.append(len(scheduled[0]))
            self.is_mixed.append(any(each.query_length > 1 for each in scheduled[0]))
        return scheduled

    def _waited(self) -> Any:
        if self._since is not None and not self.is_mixed[-1]:
            self.host_s.append(time.perf_counter() - self._since)
        updated = self._update()
        self._since = time.perf_counter()
        return updated

    def clear(self) -> None:
        """Forget the steps so far."""
        self._since = None
        for notes in (self.held, self.running, self.is_mixed, self.host_s):
            notes.clear()


def left_for_cache(model: Any, total_gb: float) -> int:
    """Bytes of cache that a total leaves beside the weights.

    Raises:
        MemoryError: It leaves none.
    """
    left = int((total_gb - WORKING_GB) * 1e9) - bytes_of(model)
    if left <= 0:
        raise MemoryError(
            f"{total_gb:g} GB hold no cache beside {bytes_of(model) / 1e9:.1f} GB of weights and {WORKING_GB:g} GB of "
            "activations"
        )
    return left


def config_of(system: str) -> KVQuantConfig:
    """The config of a patched system."""
    preset = system.removesuffix(HALVES)
    return KVQuantConfig.from_preset(preset, state_dtype=None if preset == system else "float16")


def bytes_per_token(model: Any, system: str) -> int:
    """Bytes of one token's keys and values in all layers."""
    text_config, num_bytes = model.config.get_text_config(), 0
    config = config_of("none" if system in UNPATCHED else system)
    for index, formats in formats_of(text_config, config).items():
        layer = text_config.per_layer_config[index]
        heads = 1 if latent_sizes(layer) else layer.num_key_value_heads
        layout = KVLayout(formats.key, formats.value)
        num_bytes += layout.bytes_per_token((1, heads, *head_dims_of(layer)), model.dtype)
    return num_bytes


@contextlib.contextmanager
def running(model: Any, workload: Workload, num_blocks: int | None, page_size: int) -> Iterator[Any]:
    """A manager that serves requests, with all that it had to set up done."""
    _, most = workload.new
    manager = model.init_continuous_batching(
        generation_config=GenerationConfig(eos_token_id=-1, pad_token_id=0, do_sample=False, max_new_tokens=most),
        continuous_batching_config=ContinuousBatchingConfig(
            page_size=page_size, num_blocks=num_blocks, auto_switch_to_flash=False
        ),
        workload_hints=WorkloadHints(workload.prompt, most, workload.requests),
    )
    manager.warmup()
    manager.start()
    try:
        yield manager
    finally:
        manager.stop(block=True, hard_stop=True)
        manager.destroy()


def serve(manager: Any, prompts: list[list[int]], new_tokens: list[int], limit_s: float) -> list[GenerationOutput]:
    """Add all requests, and wait for their results.

    Raises:
        RuntimeError: A request failed, or the manager ended.
        TimeoutError: It took longer than `limit_s` seconds.
    """
    deadline = time.perf_counter() + limit_s
    for prompt, num_new in zip(prompts, new_tokens, strict=True):
        manager.add_request(prompt, max_new_tokens=num_new, record_timestamps=True, eos_token_id=-1)
    outputs: list[GenerationOutput] = []
    while len(outputs) < len(prompts):
        if time.perf_counter() > deadline:
            raise TimeoutError(f"{len(outputs)} of {len(prompts)} requests were answered in {limit_s:g} s")
        output = manager.get_result(timeout=1)
        if output is not None and output.error is not None:
            raise RuntimeError(f"a request failed: {output.error}")
        if output is not None and output.is_finished():
            outputs.append(output)
        elif output is None and not manager.is_running():
            raise RuntimeError("the manager ended before all requests were served")
    return outputs


@contextlib.contextmanager
def prepared(model: Any, system: str) -> Iterator[None]:
    """The model as a system has it."""
    if system not in UNPATCHED:
        with patched(model, config_of(system)):
            yield
        return
    before = model.config._attn_implementation
    model.set_attn_implementation(UNPATCHED[system])
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def measure(
    model: Any,
    system: str,
    workload: Workload,
    cache_gb: float | None,
    total_gb: float | None,
    limit_s: float,
    page_size: int = PAGE_SIZE,
) -> dict[str, Any]:
    """The row of one system.

    Args:
        model: The model, with its weights as they are to be.
        system: A name of `SYSTEMS`.
        workload: Its requests.
        cache_gb: Memory for the cache; `None` for all that is left.
        total_gb: Memory for weights, cache and activations together, in place of `cache_gb`.
        limit_s: Seconds that the requests may take, and those that warm up likewise.
        page_size: Tokens of a page.
    """
    of_token = bytes_per_token(model, system)
    cache_bytes = None if cache_gb is None else int(cache_gb * 1e9)
    if total_gb is not None:
        cache_bytes = left_for_cache(model, total_gb)
    is_gpu = model.device.type == "cuda"
    if is_gpu:
        torch.cuda.reset_peak_memory_stats()
    num_blocks = None if cache_bytes is None else max(1, cache_bytes // (of_token * page_size))
    prompts, new_tokens = workload.prompts(model.config.vocab_size), workload.new_tokens()
    created = time.perf_counter()
    with prepared(model, system), running(model, workload, num_blocks, page_size) as manager:
        watch = Watch(manager.batch_processor)
        warm_up = [prompt[::-1] for prompt in prompts[:WARM_UP_REQUESTS]]  # shares no prefix
        serve(manager, warm_up, [WARM_UP_TOKENS] * len(warm_up), limit_s)
        watch.clear()
        start = time.perf_counter()
        outputs = serve(manager, prompts, new_tokens, limit_s)
        seconds = time.perf_counter() - start
        room = manager.batch_processor.cache.num_blocks * page_size
        settings = manager.continuous_batching_config
        peak_bytes = torch.cuda.max_memory_reserved() if is_gpu else None
    first = [output.timestamps[0] - output.created_time for output in outputs]
    later = [b - a for output in outputs for a, b in zip(output.timestamps, output.timestamps[1:], strict=False)]
    return {
        "system": system,
        "start_s": start - created,
        "seconds": seconds,
        "output_tokens_per_s": sum(new_tokens) / seconds,
        "requests_per_s": workload.requests / seconds,
        "bytes_per_token": of_token,
        "weight_bytes": bytes_of(model),
        "peak_bytes": peak_bytes,
        "captures_decode_steps": settings.use_cuda_graph[1] and settings.max_blocks_per_request > 0,
        "is_asynchronous": settings.use_async_batching,
        "room_tokens": room,
        "most_held_tokens": max(watch.held),
        "mean_running": statistics.mean(watch.running),
        "steps": len(watch.running),
        "mixed_share": statistics.mean(watch.is_mixed),
        "first_token_s": percentiles(first),
        "next_token_s": percentiles(later),
        "host_s": percentiles(watch.host_s) if watch.host_s else None,
    }


def percentiles(seconds: list[float]) -> dict[str, float]:
    """Median and 99th percentile."""
    ordered = sorted(seconds)
    return {"median": statistics.median(ordered), "p99": ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)]}


# --- output -----------------------------------------------------------------------------------------------------------


def workload_table(found: dict[str, Any]) -> Table:
    """The table of one workload, a row per system."""
    new = "{} to {}".format(*found["new"]) if found["new"][0] < found["new"][1] else found["new"][0]
    kind = "one shared prefix" if found["is_shared"] else "unique"
    memory = "all memory" if found["cache_gb"] is None else f"{found['cache_gb']} GB of cache"
    if found.get("total_gb") is not None:
        memory = f"{found['total_gb']} GB in all"
    title = (
        f"{found['workload']}: {found['requests']} requests, {found['prompt']:,} tokens ({kind}), {new} new, {memory}"
    )
    table = Table(title=title, title_justify="left")
    table.add_column("", justify="left")
    columns = ("tokens/s", "requests/s", "held", "of room", "running", "mixed", "first s", "p99", "next ms", "p99")
    for column in (*columns, "host ms", "peak GB"):
        table.add_column(column, justify="right")
    for row in found["rows"]:
        first, later, peak = row["first_token_s"], row["next_token_s"], row.get("peak_bytes")
        host = row.get("host_s")
        table.add_row(
            " + ".join(arm_of(row)),
            f"{row['output_tokens_per_s']:.0f}",
            f"{row['requests_per_s']:.2f}",
            f"{row['most_held_tokens']:,}",
            f"{row['most_held_tokens'] / row['room_tokens']:.0%}",
            f"{row['mean_running']:.1f}",
            f"{row['mixed_share']:.0%}",
            *(f"{first[key]:.2f}" for key in ("median", "p99")),
            *(f"{later[key] * 1e3:.1f}" for key in ("median", "p99")),
            "" if host is None else f"{host['median'] * 1e3:.2f}",
            "" if peak is None else f"{peak / 1e9:.1f}",
        )
    return table


def parse(words: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-3-8b", help=f"random weights: {', '.join(MODELS)}; or a checkpoint")
    default = [name for name in WORKLOADS if name not in HOST_WORKLOADS]
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=default)
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=DEFAULT_SYSTEMS)
    told = "bytes of cache, in GB, one or several (default: all memory that is left)"
    parser.add_argument("--cache-gb", type=float, nargs="+", metavar="GB", help=told)
    told = "bytes in all, weights included, in GB, one or several, in place of --cache-gb"
    parser.add_argument("--total-gb", type=float, nargs="+", metavar="GB", help=told)
    told = f"of linear layers: {', '.join(METHODS)} (default: {BF16})"
    parser.add_argument("--weights", nargs="+", choices=METHODS, default=[BF16], metavar="METHOD", help=told)
    parser.add_argument("--share", type=float, default=1.0, help="of the requests of each workload (default: all)")
    told = "that the requests of a system may take; a slower one is listed as failed (default: no limit)"
    parser.add_argument("--limit-s", type=float, default=math.inf, metavar="SECONDS", help=told)
    told = "tokens of a page (default: %(default)s)"
    parser.add_argument("--page-size", type=int, default=PAGE_SIZE, metavar="TOKENS", help=told)
    kept = "what --output holds if it is of this machine and model"
    add_run_options(parser, after="every system", resumed=kept)
    arguments = parse_run(parser, words)
    if arguments.cache_gb and arguments.total_gb:
        parser.error("--total-gb takes the place of --cache-gb, got both")
    for option, sizes in (("--cache-gb", arguments.cache_gb), ("--total-gb", arguments.total_gb)):
        for size in sizes or ():
            if size <= 0:
                parser.error(f"{option} must be positive, got {size}")
    if not arguments.limit_s > 0:
        parser.error(f"--limit-s must be positive, got {arguments.limit_s}")
    if not 0 < arguments.share <= 1:
        parser.error(f"--share must be above 0 and at most 1, got {arguments.share}")
    return arguments


def workload_of(
    results: dict[str, Any], name: str, share: float, cache_gb: float | None, total_gb: float | None
) -> tuple[Workload, dict[str, Any]]:
    """A workload, and its part of the results: that of an earlier run if there is one, else a new one."""
    workload = WORKLOADS[name]
    workload = dataclasses.replace(workload, requests=max(1, round(workload.requests * share)))
    described = {"workload": name, **dataclasses.asdict(workload), "new": list(workload.new), "cache_gb": cache_gb}
    described["total_gb"] = total_gb
    for found in results["workloads"]:
        if all(found.get(key) == value for key, value in described.items()):
            return workload, found
    results["workloads"].append({**described, "rows": [], "failures": []})
    return workload, results["workloads"][-1]


def main() -> None:
    """Measure every workload. Print tables, and the results as one line of JSON."""
    arguments = parse()
    torch.manual_seed(0)
    console = Console(width=160)
    results: dict[str, Any] = {
        **card(),
        **(gpu_card() if arguments.device.type == "cuda" else {}),
        "model": arguments.model,
        "dtype": str(DTYPE).removeprefix("torch."),
        "page_size": arguments.page_size,
    }
    earlier = earlier_results(results, arguments, RESUMED)
    results["workloads"] = earlier.get("workloads", [])
    for weights in arguments.weights:
        model = load(arguments.model, arguments.device)
        quantize(model, weights)
        clean_up()  # of the weights that were replaced, which would count as memory in use
        run(model, weights, arguments, results, console)
        del model
    for found in results["workloads"]:
        console.print(workload_table(found))
    print(json.dumps(results))


def run(model: Any, weights: str, arguments: argparse.Namespace, results: dict[str, Any], console: Console) -> None:
    """Add what is missing in the results of one kind of weights, and write them after every system."""
    cache_sizes, totals = arguments.cache_gb or [None], arguments.total_gb or [None]
    for name, size, total in itertools.product(arguments.workloads, cache_sizes, totals):
        workload, found = workload_of(results, name, arguments.share, size, total)
        done = {arm_of(row) for row in [*found["rows"], *found["failures"]]}
        for system in [each for each in arguments.systems if (weights, each) not in done]:
            options = size, total, arguments.limit_s, arguments.page_size
            row, reason = attempt(functools.partial(measure, model, system, workload, *options))
            if row is not None:
                versions = {"packages": METHODS[weights].versions, "commit": results["commit"], "date": results["date"]}
                found["rows"].append({"weights": weights, **row, **versions})
                told = f"{row['output_tokens_per_s']:.0f} tokens/s, {row['seconds']:.0f} s after {row['start_s']:.0f} s"
            else:
                found["failures"].append({"weights": weights, "system": system, "reason": reason})
                told = str(reason)
            console.print(f"{name}, {weights} + {system}: {told}", highlight=False, markup=False)
            write_results(results, arguments.output)


if __name__ == "__main__":
    main()
