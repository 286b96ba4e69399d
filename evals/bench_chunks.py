"""Attention of many new tokens over a cache on a GPU: every preset against PyTorch's attention in bf16.

    python evals/bench_chunks.py --output evals/results/chunks.json
    python evals/bench_chunks.py --least-new 1024 --presets none int8 int4 --output evals/results/chunks_long.json
    python evals/bench_chunks.py --pages --presets none int8 int4 int4-channel int4-token int4-g32 k8v4 fp8 \
        --output evals/results/chunks_pages.json

This is what chunks of a prompt, a chat's next turn and checks of proposed tokens cost in a layer. Ours attends to codes
that are in the cache already, and chunks to their own tokens as they are. To append these is not timed. The peers
attend to unquantised keys and values:

- `flash`: PyTorch's FlashAttention-2, which takes fewer key than query heads, causal at the end.
- `cudnn`: the same without a causal mask, since PyTorch's cuDNN attention cannot align one with the last token. It
  computes a little more than it would have to.
- `fa2` and, on Hopper, `fa3`: FlashInfer's kernels of these generations, causal at the end, if the package is
  installed. It compiles them at first use, which takes minutes. Its planning is not timed.
- `fa3-fwd`: FlashAttention-3 of the package of this name, causal at the end, if it is installed.

With `--pages` there are no peers. Each preset is measured twice, over sequences that lie side by side and over pages in
random order, as in continuous batching.

Each result is checked against the reference on a few rows. Calls are timed as in `bench_decode.py`: replays of a CUDA
graph over buffers that are cold in L2, so the host's time does not count. A call that cannot be captured is timed back
to back, and marked. Ratios are to the fastest bf16 kernel, and, for few new tokens, to the same kernel with one.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from collections.abc import Callable
from typing import Any

import torch
from bench_decode import PagedSets, random_planes
from decode_cases import DEVICE, DTYPE, Shape, bytes_held, layout_of
from decode_peers import peer_versions
from gpu_timing import MIN_CALLS, Forms, Timing, sets_needed, time_calls
from render_chunks import COMPARED, case_name
from results_files import add_run_options, parse_run, write_results
from rich.console import Console
from rich.table import Table
from torch import Tensor

from hf_kvquant import PRESETS, ops
from hf_kvquant.spec import reference
from hf_kvquant.spec.layout import KVLayout
from hf_kvquant.spec.planes import Planes
from hf_kvquant_evals.provenance import card, gpu_card, gpu_state

DEFAULT_PRESETS = ["int8", "int4", "int4-channel", "int4-token", "int4-g32", "k8v4", "fp8"]
# Sequences, tokens held, and new ones among them.
CASES = [
    *((1, 32768, num_new) for num_new in (1, 4, 8, 16, 32, 64, 256, 1024, 4096)),
    *((8, 8192, num_new) for num_new in (16, 64, 256, 4096)),
    (1, 8192, 1024),
]
NUM_Q_HEADS, NUM_KV_HEADS = 32, 8
CHECKED_ROWS = 16  # of the newest tokens of the last sequence


# Calls of this many new tokens or more take milliseconds: few of them are enough.
LONG = 1024
REPLAYS, LONG_REPLAYS = 20, 5
FEW = (4, 8, 16)  # new tokens that are compared with one
WORKSPACE_BYTES = 512 * 2**20  # of FlashInfer


def timed(run: Callable[[int], object], num_sets: int, num_new: int) -> Timing:
    """The time of `run(i)`, which works on buffer set `i`."""
    replays, min_calls = (LONG_REPLAYS, 1) if num_new >= LONG else (REPLAYS, MIN_CALLS)
    return time_calls(run, num_sets, replays, can_fall_back=True, min_calls=min_calls)


def peers(query: Tensor, keys: Tensor, values: Tensor) -> Forms:
    """Other attention by name, for a query `[batch, heads, tokens, head_dim]` and sets of such keys and values."""
    aten = torch.ops.aten
    return {
        "flash": lambda i: aten._scaled_dot_product_flash_attention(
            query, keys[i], values[i], 0.0, True, return_debug_mask=False
        ),
        "cudnn": lambda i: aten._scaled_dot_product_cudnn_attention(
            query, keys[i], values[i], None, True, 0.0, False, False
        ),
        **flashinfer_peers(query, keys, values),
        **fa3_peer(query, keys, values),
    }


def flashinfer_peers(query: Tensor, keys: Tensor, values: Tensor) -> Forms:
    """FlashInfer's attention by name, over the same memory with tokens outside of heads; empty without the package."""
    try:
        from flashinfer.prefill import BatchPrefillWithRaggedKVCacheWrapper
    except ImportError:
        return {}
    _, batch, num_kv_heads, length, head_dim = keys.shape
    num_q_heads, num_new = query.shape[1:3]
    rows = query.view(batch * num_new, num_q_heads, head_dim)
    key_rows, value_rows = (x.view(-1, batch * length, num_kv_heads, head_dim) for x in (keys, values))
    starts, kv_starts = (
        torch.arange(batch + 1, dtype=torch.int32, device=DEVICE) * tokens for tokens in (num_new, length)
    )

    def form(backend: str) -> Callable[[int], Tensor]:
        workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=DEVICE)
        wrapper = BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD", backend=backend)
        heads = num_q_heads, num_kv_heads, head_dim
        wrapper.plan(starts, kv_starts, *heads, causal=True, q_data_type=DTYPE, kv_data_type=DTYPE)
        return lambda i: wrapper.run(rows, key_rows[i], value_rows[i])

    is_hopper = torch.cuda.get_device_capability(DEVICE)[0] == 9
    return {backend: form(backend) for backend in (("fa2", "fa3") if is_hopper else ("fa2",))}


def fa3_peer(query: Tensor, keys: Tensor, values: Tensor) -> Forms:
    """FlashAttention-3, likewise; empty without the package."""
    try:
        from fa3_fwd_interface import flash_attn_func
    except ImportError:
        return {}
    _, batch, num_kv_heads, length, head_dim = keys.shape
    rows = query.view(batch, -1, query.shape[1], head_dim)
    key_rows, value_rows = (x.view(-1, batch, length, num_kv_heads, head_dim) for x in (keys, values))
    return {"fa3-fwd": lambda i: flash_attn_func(rows, key_rows[i], value_rows[i], causal=True)}


def check(
    out: Tensor,
    query: Tensor,
    planes: tuple[Planes, Planes],
    layout: KVLayout,
    length: int,
    new: tuple[Tensor, Tensor] | None,
) -> float:
    """The largest error of the newest rows of the last sequence, relative to their largest value."""
    q_len = query.shape[2]
    rows = min(CHECKED_ROWS, q_len)
    num_stored = length if new is None else length - q_len
    stored = torch.tensor([num_stored], dtype=torch.int32, device=DEVICE)

    def attend(some: slice, num_behind: int) -> Tensor:
        key, value = (
            reference.dequantize(
                made.map(lambda plane: plane[-1:]), kv_format, lengths=stored, num_behind=num_behind, **layout.windows
            )
            for made, kv_format in zip(planes, layout.formats, strict=True)
        )
        if new is not None:
            key, value = (
                torch.cat((x[:, :, :num_stored], own[-1:]), 2) for x, own in zip((key, value), new, strict=True)
            )
        seen = torch.tensor([length - num_behind], dtype=torch.int32, device=DEVICE)
        return reference.decode_attention(
            query[-1:, :, some].float(), key, value, seen, softmax_scale=query.shape[-1] ** -0.5
        )[0]

    # Without a chunk, queries have windows of their own.
    has_windows = new is None and layout.has_tail
    parts = [(slice(q_len - rows, q_len), 0)]
    if has_windows:
        parts = [(slice(i, i + 1), q_len - 1 - i) for i in range(q_len - rows, q_len)]
    expected = torch.cat([attend(*part) for part in parts], dim=1)
    error = (out[-1:, -rows:].float() - expected).abs().max() / expected.abs().max()
    return float(error.item())


def time_ours(shape: Shape, query: Tensor, preset: str, *, is_paged: bool) -> Timing:
    """The time of ours for a query `[batch, num_q_heads, tokens, head_dim]`, in pages or side by side.

    More tokens than `ops.largest_step` attend to each other as they are, which are not in the cache yet.

    Raises:
        SystemExit: The result is not that of the reference.
    """
    layout, num_new = layout_of(preset), query.shape[2]
    num_sets = sets_needed(bytes_held(shape, layout))
    lengths = torch.full((shape.batch,), shape.context, dtype=torch.int32, device=DEVICE)
    counters = torch.zeros(ops.NUM_COUNTERS, dtype=torch.int32, device=DEVICE)
    options: dict[str, Any] = {"softmax_scale": shape.head_dim**-0.5, "counters": counters}
    if is_paged:
        paged = PagedSets.random(shape, layout, num_sets)
        sets, checked, options["page_table"] = paged.sets, paged.gathered(), paged.table
    else:
        sets = [random_planes(shape, layout) for _ in range(num_sets)]
        checked = sets[0]

    operands = [ops.Operands(*planes, layout) for planes in sets]
    new = None
    if num_new > ops.largest_step(layout):
        rows = shape.batch, shape.num_kv_heads, num_new, shape.head_dim
        new = torch.randn(rows, dtype=DTYPE, device=DEVICE), torch.randn(rows, dtype=DTYPE, device=DEVICE)

    def run(i: int) -> Tensor:
        if new is None:
            return operands[i].decode(query, None, lengths, **options)[0]
        return operands[i].attend_chunk(query, new, lengths, **options)[0]

    error = check(run(0), query, checked, layout, shape.context, new)
    if not error <= 2e-2:
        where = f"{shape.batch} x {shape.context} + {num_new}, {preset}{', pages' if is_paged else ''}"
        raise SystemExit(f"bench_chunks: {where}: relative error {error:.2e}.")
    return timed(run, num_sets, num_new)


def measure(shape: Shape, num_new: int, presets: list[str], *, is_paged: bool) -> dict[str, Any]:
    """All times of one case, in microseconds: of peers and ours, or of ours side by side and in pages.

    Raises:
        SystemExit: A result is not that of the reference.
    """
    query = torch.randn(shape.batch, shape.num_q_heads, num_new, shape.head_dim, dtype=DTYPE, device=DEVICE)
    timings, in_pages = {} if is_paged else time_peers(shape, query), {}
    for preset in presets:
        timings[preset] = time_ours(shape, query, preset, is_paged=False)
        if is_paged:
            in_pages[preset] = time_ours(shape, query, preset, is_paged=True)
    described = {"batch": shape.batch, "length": shape.context, "num_new": num_new}
    return described | in_us("", timings) | (in_us("pages_", in_pages) if is_paged else {})


def time_peers(shape: Shape, query: Tensor) -> dict[str, Timing]:
    """The times of `peers`."""
    num_sets, rows = sets_needed(bytes_held(shape, layout_of("none"))), (shape.context, shape.head_dim)
    keys, values = torch.randn(2, num_sets, shape.batch, shape.num_kv_heads, *rows, dtype=DTYPE, device=DEVICE)
    return {name: timed(run, num_sets, query.shape[2]) for name, run in peers(query, keys, values).items()}


def in_us(prefix: str, timings: dict[str, Timing]) -> dict[str, Any]:
    """Medians by name, and all that was measured."""
    return {
        f"{prefix}us": {name: timing.median_us for name, timing in timings.items()},
        f"{prefix}timings": {name: dataclasses.asdict(timing) for name, timing in timings.items()},
    }


def add_ratios(cases: list[dict[str, Any]]) -> None:
    """Add how many times as fast a preset is as the fastest bf16 kernel, and what few tokens cost against one."""
    one = {(case["batch"], case["length"]): case["us"] for case in cases if case["num_new"] == 1}
    for case in cases:
        fastest = min(us for name, us in case["us"].items() if name not in PRESETS)
        case["speedup"] = {name: fastest / us for name, us in case["us"].items() if name in PRESETS}
        single = one.get((case["batch"], case["length"])) if case["num_new"] in FEW else None
        case["over_one"] = None if single is None else {name: us / single[name] for name, us in case["us"].items()}


def case_table(results: dict[str, Any]) -> Table:
    """Microseconds of every kernel, and the ratios of some."""
    names = list(results["cases"][0]["us"])
    compared = [name for name in COMPARED if name in names]
    table = Table(title="microseconds a layer; *: not captured", title_justify="left")
    ratios = [f"{name}: times bf16" for name in compared] + [f"{name}: times one" for name in compared]
    for column in ("new tokens", *names, *ratios):
        table.add_column(column, justify="left" if column == "new tokens" else "right")
    for case in results["cases"]:
        cells = [case_name(case)]
        for timing in case["timings"].values():
            cells.append(f"{timing['median_us']:.1f}{'' if timing['is_captured'] else '*'}")
        cells += [f"{case['speedup'][name]:.2f}" for name in compared]
        cells += ["" if case["over_one"] is None else f"{case['over_one'][name]:.2f}" for name in compared]
        table.add_row(*cells)
    return table


def pages_table(results: dict[str, Any]) -> Table:
    """Per case and preset: microseconds in pages, and how much longer than side by side."""
    table = Table(title="microseconds a layer in pages; longer than side by side", title_justify="left")
    table.add_column("new tokens")
    for preset in results["cases"][0]["us"]:
        table.add_column(preset, justify="right")
    for case in results["cases"]:
        longer = {preset: us / case["us"][preset] - 1 for preset, us in case["pages_us"].items()}
        cells = (f"{us:.1f} ({longer[preset]:+.1%})" for preset, us in case["pages_us"].items())
        table.add_row(case_name(case), *cells)
    return table


def main() -> None:
    """Measure every case. Print the table, and the results as one line of JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--presets", nargs="+", choices=sorted(PRESETS), default=DEFAULT_PRESETS)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--least-new", type=int, default=1, help="leave out cases with fewer new tokens")
    parser.add_argument(
        "--pages", action="store_true", help="compare pages with sequences side by side, not with peers"
    )
    add_run_options(parser, after="all cases", device=False)
    arguments = parse_run(parser, None)
    if not ops.has_kernels("cuda"):
        raise SystemExit("bench_chunks: needs a GPU and an extension built with CUDA.")
    started = time.perf_counter()
    torch.manual_seed(0)
    versions = {} if arguments.pages else peer_versions("fa3-fwd")
    results: dict[str, Any] = {**card(), **gpu_card(), "peer_versions": versions}
    results |= {"head_dim": arguments.head_dim, "state_before": gpu_state(), "cases": []}
    for batch, length, num_new in CASES:
        if num_new < arguments.least_new:
            continue
        shape = Shape(batch, NUM_Q_HEADS, NUM_KV_HEADS, arguments.head_dim, length)
        results["cases"].append(measure(shape, num_new, arguments.presets, is_paged=arguments.pages))
        torch.cuda.empty_cache()
    if not arguments.pages:
        add_ratios(results["cases"])
    results |= {"state_after": gpu_state(), "wall_s": time.perf_counter() - started}
    Console(width=160).print(pages_table(results) if arguments.pages else case_table(results))
    write_results(results, arguments.output)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
