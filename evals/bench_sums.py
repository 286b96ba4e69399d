"""Sums over GPUs as a decode step needs them: microseconds of each way, by the number of tokens in the step.

    python evals/bench_sums.py --ranks 2 --output sums.json

A row-wise linear layer of a model that is sharded over ranks leaves `[tokens, hidden]` to add up, twice a layer: 8 KB
for one token of Llama-3-8B. Over NVLink (some 400 GB/s) these bytes take nanoseconds, so the figures are latencies:
of kernels that wait for each other, and in NCCL of its protocol and of how its calls become part of a graph.

Method: a CUDA graph of 64 sums in a row, replayed; the slowest rank counts. NCCL reads its settings once in a process,
so every setting gets processes of its own. On a CPU, gloo is timed without a graph, which only tries the script.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, distributed

from hf_kvquant.evaluation.provenance import card, gpu_card
from hf_kvquant.graphs.sums import EXCHANGES, MAX_READ_BYTES

# The settings that NCCL is tried with, by name. Multicast (NVLS) is left as the environment has it.
SETTINGS = {
    "default": {"NCCL_GRAPH_MIXING_SUPPORT": "1"},
    "no mixing": {"NCCL_GRAPH_MIXING_SUPPORT": "0"},
    "no mixing, LL": {"NCCL_GRAPH_MIXING_SUPPORT": "0", "NCCL_PROTO": "LL"},
}
# Symmetric memory does not depend on them, so it is timed only once.
WITH_EXCHANGE = "no mixing"
CALLS, REPLAYS, WARM_UPS = 64, 20, 3


def ways(group: Any, device: torch.device, num_bytes: int, with_exchange: bool) -> Iterator[tuple[str, Any]]:
    """Functions that sum a tensor over the ranks, by name."""
    yield "NCCL" if device.type == "cuda" else "gloo", distributed.all_reduce
    if not with_exchange or device.type not in EXCHANGES:
        return
    kind = EXCHANGES[device.type]
    reasons = list(kind.reasons_against(group, device))
    if reasons:
        print(f"no one-shot sums: {reasons[0]}", flush=True)
        return
    yield "one-shot", kind(group, device, num_bytes).sum
    from torch.distributed import _symmetric_memory

    buffer = _symmetric_memory.empty(num_bytes, dtype=torch.uint8, device=device)
    _symmetric_memory.rendezvous(buffer, group.group_name)

    def in_place(function: Callable[..., Any]) -> Callable[[Tensor], None]:
        """Without the copies of a tensor into the buffer and back: what a layer that writes there would leave."""
        return lambda tensor: function(buffer[: tensor.nbytes].view(tensor.dtype), "sum", group.group_name)

    yield "one-shot, no copy", in_place(torch.ops.symm_mem.one_shot_all_reduce)
    yield "two-shot, no copy", in_place(torch.ops.symm_mem.two_shot_all_reduce_)


def microseconds(function: Callable[[Tensor], Any], tensor: Tensor) -> float:
    """Of one sum on this rank: the median over replays."""
    if tensor.device.type != "cuda":
        start = time.perf_counter()
        for _ in range(CALLS):
            function(tensor)
        return (time.perf_counter() - start) / CALLS * 1e6
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UPS):
            function(tensor)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        for _ in range(CALLS):
            function(tensor)
    times = []
    for index in range(WARM_UPS + REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        if index >= WARM_UPS:
            times.append(start.elapsed_time(end) * 1e3 / CALLS)
    del graph  # NCCL waits for it when the group ends
    return statistics.median(times)


def run_rank(rank: int, num_ranks: int, setting: str, tokens: list[int], hidden: int, folder: str) -> None:
    """What a process does: time all ways under one setting. Rank 0 writes a file of rows."""
    # Names and hosts of ranks are looked up by some of torch, though the file connects them.
    os.environ |= {**SETTINGS[setting], "RANK": str(rank), "WORLD_SIZE": str(num_ranks), "LOCAL_RANK": str(rank)}
    is_cuda = torch.cuda.is_available()
    device = torch.device("cuda", rank) if is_cuda else torch.device("cpu")
    if is_cuda:
        torch.cuda.set_device(device)
    torch.set_num_threads(1)
    where = f"file://{folder}/{setting.replace(' ', '-')}.store"
    distributed.init_process_group("nccl" if is_cuda else "gloo", init_method=where, rank=rank, world_size=num_ranks)
    group = distributed.group.WORLD
    assert group is not None
    rows = []
    for name, function in ways(group, device, max(tokens) * hidden * 2, setting == WITH_EXCHANGE):
        for count in tokens:
            tensor = torch.zeros(count, hidden, dtype=torch.bfloat16, device=device)
            slowest = torch.tensor(microseconds(function, tensor), device=device)
            distributed.all_reduce(slowest, op=distributed.ReduceOp.MAX)
            rows.append({"way": name, "setting": setting, "tokens": count, "us": float(slowest)})
    if rank == 0:
        Path(folder, f"{setting}.json").write_text(json.dumps(rows), encoding="utf-8")
    distributed.destroy_process_group()


def table_of(rows: list[dict[str, Any]], tokens: list[int]) -> Table:
    """Microseconds by way and number of tokens."""
    table = Table(title="microseconds a sum", title_justify="left")
    for column in ("", "setting", *map(str, tokens)):
        table.add_column(column, justify="right" if column.isdigit() else "left")
    for way, setting in dict.fromkeys((row["way"], row["setting"]) for row in rows):
        cells = [f"{row['us']:.1f}" for row in rows if (row["way"], row["setting"]) == (way, setting)]
        table.add_row(way, setting, *cells)
    return table


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--output", type=Path, help="write the results here, as JSON")
    return parser.parse_args()


def main() -> None:
    """Measure all ways under all settings. Prints a table, and the results as one line of JSON."""
    arguments, rows = parse(), []
    with tempfile.TemporaryDirectory() as folder:
        for setting in arguments.settings:
            options = arguments.ranks, setting, arguments.tokens, arguments.hidden, folder
            torch.multiprocessing.spawn(run_rank, options, nprocs=arguments.ranks)
            rows += json.loads(Path(folder, f"{setting}.json").read_text(encoding="utf-8"))
    about = {"num_ranks": arguments.ranks, "hidden": arguments.hidden, "limit_bytes": MAX_READ_BYTES}
    results = {**card(), **(gpu_card() if torch.cuda.is_available() else {}), **about, "rows": rows}
    Console(width=120).print(table_of(rows, arguments.tokens))
    if arguments.output is not None:
        arguments.output.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(results))


if __name__ == "__main__":
    main()
