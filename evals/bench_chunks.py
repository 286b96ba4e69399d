"""Attention of many new tokens over a cache on a GPU: every preset against PyTorch's attention in bf16.

    python evals/bench_chunks.py --output evals/results/chunks.json

This is what chunks of a prompt, a chat's next turn and checks of proposed tokens cost in a layer. Ours attends to codes
that are in the cache already; to append them takes microseconds. The peers attend to unquantised keys and values:

- `flash`: PyTorch's FlashAttention-2, which takes fewer key than query heads, causal at the end.
- `cudnn`: the same without a causal mask, since PyTorch's cuDNN attention cannot align one with the last token. It
  computes a little more than it would have to.

Each result is checked against the reference on a few rows. Times are medians of calls back to back.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from bench_decode import random_planes
from decode_cases import DEVICE, DTYPE, Shape
from rich.console import Console
from rich.table import Table
from torch import Tensor

from hf_kvquant import PRESETS, ops
from hf_kvquant.evaluation.provenance import card, gpu_card
from hf_kvquant.spec import reference
from hf_kvquant.spec.layout import KVLayout

DEFAULT_PRESETS = ["int8", "int4", "int4-g32", "int4-channel", "k8v4", "fp8"]
# Sequences, tokens held, and new ones among them.
CASES = [
    *((1, 32768, num_new) for num_new in (1, 4, 8, 16, 32, 64, 256, 1024, 4096)),
    *((8, 8192, num_new) for num_new in (16, 64, 256, 4096)),
    (1, 8192, 1024),
]
NUM_Q_HEADS, NUM_KV_HEADS = 32, 8
CHECKED_ROWS = 16  # of the newest tokens of the last sequence


def median_us(run: Callable[[], object], calls: int) -> float:
    """The median time of a call."""
    for _ in range(3):
        run()
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(calls)]
    for start, end in events:
        start.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return sorted(start.elapsed_time(end) * 1e3 for start, end in events)[calls // 2]


def peers(query: Tensor, key: Tensor, value: Tensor) -> dict[str, Callable[[], object]]:
    """PyTorch's attention of `[batch, heads, tokens, head_dim]`, by name."""
    aten = torch.ops.aten
    return {
        "flash": lambda: aten._scaled_dot_product_flash_attention(
            query, key, value, 0.0, True, return_debug_mask=False
        ),
        "cudnn": lambda: aten._scaled_dot_product_cudnn_attention(query, key, value, None, True, 0.0, False, False),
    }


def check(out: Tensor, query: Tensor, planes: tuple[Any, Any], layout: KVLayout, length: int) -> float:
    """The largest error of the newest rows of the last sequence, relative to their largest value."""
    rows = min(CHECKED_ROWS, query.shape[2])
    held = torch.tensor([length], dtype=torch.int32, device=DEVICE)
    key, value = (
        reference.dequantize(made.map(lambda plane: plane[-1:]), kv_format, lengths=held)
        for made, kv_format in zip(planes, (layout.key, layout.value), strict=True)
    )
    expected, _ = reference.decode_attention(
        query[-1:, :, -rows:].float(), key, value, held, softmax_scale=query.shape[-1] ** -0.5
    )
    error = (out[-1:, -rows:].float() - expected).abs().max() / expected.abs().max()
    return float(error.item())


def measure(batch: int, length: int, num_new: int, presets: list[str], head_dim: int, calls: int) -> dict[str, Any]:
    """All times of one case, in microseconds.

    Raises:
        SystemExit: A result is not that of the reference.
    """
    shape = Shape(batch, NUM_Q_HEADS, NUM_KV_HEADS, head_dim, length)
    query = torch.randn(batch, NUM_Q_HEADS, num_new, head_dim, dtype=DTYPE, device=DEVICE)
    key, value = torch.randn(2, batch, NUM_KV_HEADS, length, head_dim, dtype=DTYPE, device=DEVICE)
    times = {name: median_us(run, calls) for name, run in peers(query, key, value).items()}
    del key, value
    lengths = torch.full((batch,), length, dtype=torch.int32, device=DEVICE)
    counters = torch.zeros(ops.NUM_COUNTERS, dtype=torch.int32, device=DEVICE)
    for preset in presets:
        layout = KVLayout(*PRESETS[preset])
        planes = random_planes(shape, layout.key), random_planes(shape, layout.value)

        def run(layout: KVLayout = layout, planes: tuple[Any, Any] = planes) -> Tensor:
            options = {"softmax_scale": head_dim**-0.5, "counters": counters}
            return ops.decode(query, None, *planes, lengths, layout, **options)[0]

        error = check(run(), query, planes, layout, length)
        if not error <= 2e-2:
            raise SystemExit(f"bench_chunks: {batch} x {length} + {num_new}, {preset}: relative error {error:.2e}.")
        times[preset] = median_us(run, calls)
    return {"batch": batch, "length": length, "num_new": num_new, "us": times}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--presets", nargs="+", choices=sorted(PRESETS), default=DEFAULT_PRESETS)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--calls", type=int, default=11, help="timed calls, of which the median counts")
    parser.add_argument("--output", type=Path, help="write the results here, as JSON")
    arguments = parser.parse_args()
    if not ops.has_kernels("cuda"):
        raise SystemExit("bench_chunks: needs a GPU and an extension built with CUDA.")
    results = {**card(), **gpu_card(), "head_dim": arguments.head_dim, "cases": []}
    table = Table("new tokens", "flash", "cudnn", *arguments.presets, title="microseconds a layer")
    for batch, length, num_new in CASES:
        row = measure(batch, length, num_new, arguments.presets, arguments.head_dim, arguments.calls)
        results["cases"].append(row)
        table.add_row(f"{batch} x {length} + {num_new}", *(f"{time:.0f}" for time in row["us"].values()))
    Console(width=120).print(table)
    if arguments.output is not None:
        arguments.output.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
