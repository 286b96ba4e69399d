"""Decode steps of a model on several GPUs by tensor parallelism, against one GPU in the same run.

    torchrun --nproc-per-node 2 evals/bench_parallel.py --output evals/results/parallel.json

Each rank has some heads of every layer. Two sums over the ranks a layer take time that one GPU does not need, and the
host has more to do. Steps are measured as in `bench_generate.py`. Rank 0 runs the whole model first and saves it; then
all ranks load their parts. All ranks must write the same tokens. How many of these one GPU writes is only reported:
sums in another order may swap two tokens that are nearly equally likely.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from typing import Any

import torch
from bench_generate import add_rows, clean_up, load, measure
from generate_cases import MODELS, Case
from generate_systems import SYSTEMS, call
from results_files import add_run_options, parse_run, write_results
from rich.console import Console
from rich.table import Table
from torch import Tensor, distributed
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.distributed import DistributedConfig

from hf_kvquant_evals.provenance import card, gpu_card

DEFAULT_CASES = [Case(1, 2048), Case(8, 16384)]
DEFAULT_SYSTEMS = ["dynamic", "int4-token", "int4-token-capture"]
CHECKED, CHECKED_TOKENS = Case(2, 100), 16


def rows_of(model: Any, case: Case, systems: list[str], num_new: int) -> dict[str, Any]:
    """Figures of the systems that a machine serves. All ranks draw the same prompts."""

    def run(name: str) -> dict[str, Any]:
        torch.manual_seed(0)
        row = measure(model, name, case, num_new)
        return {key: row[key] for key in ("system", "step_ms", "p10_ms", "p90_ms", "prefill_ms")}

    return add_rows({"rows": [], "failures": []}, systems, run)


def tokens_of(model: Any, system: str) -> Tensor:
    """What a system writes to a short prompt, `[batch, tokens]`, on the device of the model."""
    torch.manual_seed(0)
    with SYSTEMS[system](model, CHECKED.context + CHECKED_TOKENS) as arguments:
        _, sequences = call(model, CHECKED, CHECKED_TOKENS, arguments())
    clean_up()
    found: Tensor = sequences[:, CHECKED.context :].contiguous()
    return found


def whole_figures(arguments: argparse.Namespace, device: torch.device, folder: str) -> dict[str, Any]:
    """Figures of the whole model on one device. Saves it."""
    torch.manual_seed(0)
    model = load(arguments.model, device)
    figures = {case.name: rows_of(model, case, arguments.systems, arguments.new_tokens) for case in arguments.cases}
    tokens = {system: tokens_of(model, system).tolist() for system in arguments.systems}
    model.save_pretrained(folder)
    del model
    clean_up()
    return {"figures": figures, "tokens": tokens}


def check_tokens(model: Any, systems: list[str], whole: dict[str, Any]) -> dict[str, float]:
    """The share of tokens that the whole model writes, too, by system.

    Raises:
        SystemExit: Ranks write different tokens.
    """
    shares = {}
    for system in systems:
        own = tokens_of(model, system)
        others = [torch.empty_like(own) for _ in range(distributed.get_world_size())]
        distributed.all_gather(others, own)
        if not all(torch.equal(own, other) for other in others):
            raise SystemExit(f"bench_parallel: {system}: all ranks must write the same tokens, got different ones.")
        shares[system] = float((own.cpu() == torch.tensor(whole["tokens"][system])).float().mean())
    return shares


def case_table(found: dict[str, Any], num_ranks: int) -> Table:
    """Milliseconds of a step on one GPU and on all, and their ratio."""
    table = Table(title=f"{found['case']}: milliseconds a step", title_justify="left")
    for column in ("", "one", f"{num_ranks} ranks", "of one"):
        table.add_column(column, justify="right" if column else "left")
    ones = {row["system"]: row["step_ms"] for row in found["one"]["rows"]}
    for row in found["ranks"]["rows"]:
        one = ones.get(row["system"])
        cells = ["", ""] if one is None else [f"{one:.2f}", f"{row['step_ms'] / one:.2f}"]
        table.add_row(row["system"], cells[0], f"{row['step_ms']:.2f}", cells[1])
    return table


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default="llama-3-8b", choices=MODELS, help="its weights are random")
    parser.add_argument("--cases", nargs="+", type=Case.parse, default=DEFAULT_CASES, metavar="CASE")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=DEFAULT_SYSTEMS)
    add_run_options(parser, after="every case", new_tokens=32, device=False)
    return parse_run(parser, None)


def main() -> None:
    """Measure every case on one device and on all. Rank 0 prints tables, and the results as one line of JSON."""
    arguments, started = parse(), time.perf_counter()
    results: dict[str, Any] = card()  # first of all, since it may refuse
    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    is_cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if is_cuda else torch.device("cpu")
    if is_cuda:
        torch.cuda.set_device(device)
    # Nothing else talks while a graph does, and NCCL is slower where it has to expect that.
    os.environ.setdefault("NCCL_GRAPH_MIXING_SUPPORT", "0")
    distributed.init_process_group("nccl" if is_cuda else "gloo", device_id=device if is_cuda else None)
    with tempfile.TemporaryDirectory() as folder:
        said: list[Any] = [folder, whole_figures(arguments, device, folder) if rank == 0 else None]
        distributed.broadcast_object_list(said)
        given, whole = said
        config = DistributedConfig(tp_plan="auto", tp_size=num_ranks)
        model: Any = AutoModelForCausalLM.from_pretrained(given, dtype="auto", distributed_config=config).eval()
        distributed.barrier()  # the folder is no longer needed
    model.generation_config = GenerationConfig(pad_token_id=0)
    results |= {
        **(gpu_card() if is_cuda else {}),
        "model": arguments.model,
        "num_ranks": num_ranks,
        "same_tokens": check_tokens(model, arguments.systems, whole),
        "cases": [],
    }
    console = Console(width=120)
    for case in arguments.cases:
        on_ranks = rows_of(model, case, arguments.systems, arguments.new_tokens)
        found = {"case": case.name, "one": whole["figures"][case.name], "ranks": on_ranks}
        results["cases"].append(found)
        results["wall_s"] = time.perf_counter() - started
        if rank == 0:
            write_results(results, arguments.output)
            console.print(case_table(found, num_ranks))
            for failure in [*found["one"]["failures"], *found["ranks"]["failures"]]:
                console.print(f"{failure['system']}: {failure['reason']}", highlight=False, markup=False)
    if rank == 0:
        console.print(f"share of tokens that one GPU writes, too: {results['same_tokens']}", highlight=False)
        print(json.dumps(results))
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
