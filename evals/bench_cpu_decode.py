"""Decode attention on the CPU: every preset against PyTorch's attention over the unquantised cache, cold caches.

    python evals/bench_cpu_decode.py --output evals/results/cpu_decode.json

Physics: a decode step reads every key and value once and computes little with each, so memory sets the limit:
`bytes per token · tokens / read bandwidth`. Fewer bits help only as far as the kernel keeps up with memory. So each
time is shown with its GB/s and its share of the read bandwidth: that of a plain sum over 512 MB, the best measured
between the cases of the same run. At short lengths little is read, and the fixed costs of a call show instead.

Method:
- Batch 1, one new token; the last cases are chunks of many. Ours is the whole op, including append of new tokens and
  combine of splits, with keys and queries transformed as the preset says, with centres and smoothing factors.
- PyTorch's is `scaled_dot_product_attention` alone, without the append to its cache, in float32 and bfloat16, each with
  `enable_gqa` and with the heads of a group as rows of one head (what transformers does, minus its copies). Every time
  is compared with the fastest of the four. Chunks have a causal mask, as in transformers.
- Contenders take turns within one run. Each turn uses another of several buffer sets, which together are far larger
  than the last-level cache. A time is the median of the turns, with the 10th and 90th percentiles.
- Results are checked in the same run against float64 attention over what `reference.py` dequantises; a wrong one ends
  it.

In the results, `rows` are the presets at the first shape with bfloat16 queries; `cases` holds everything.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import time
from collections.abc import Callable
from typing import Any

import torch
from decode_cases import layout_of, random_transform
from results_files import add_run_options, write_results
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from hf_kvquant import PRESETS, KeyTransform, KVQuantConfig, ops
from hf_kvquant.spec import reference
from hf_kvquant.spec.layout import KVLayout
from hf_kvquant.spec.planes import Planes
from hf_kvquant_evals.provenance import card

# The least size of all buffer sets of a contender together: three times the last-level cache of our processors.
COLD_BYTES = 96e6
MIN_SETS = 4
READ_BYTES = 512 * 2**20
WARM_UPS = 3
# New tokens of a chunk whose results are checked. A float64 reference of all of them would take minutes.
CHECKED_TOKENS = 16


@dataclasses.dataclass(frozen=True)
class Shape:
    """One step of one layer, batch 1. Of `length` tokens, the last `num_new` are new."""

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    length: int
    num_new: int = 1

    def describe(self) -> str:
        """The shape in words, for the table."""
        chunk = "" if self.num_new == 1 else f", {self.num_new} of them new"
        return f"{self.num_q_heads}/{self.num_kv_heads} heads of {self.head_dim}, {self.length} tokens{chunk}"

    def mask(self) -> Tensor | None:
        """Which tokens each new one sees, `[num_new, length]`; `None` if it is all."""
        everything = torch.ones(self.num_new, self.length, dtype=torch.bool)
        return None if self.num_new == 1 else everything.tril(self.length - self.num_new)


# The first is the one shown on the pages.
SHAPES = [
    Shape(32, 8, 128, 16384),
    Shape(32, 8, 128, 4096),
    Shape(32, 8, 128, 1024),
    Shape(32, 8, 64, 16384),
    Shape(32, 32, 128, 4096),
    *(Shape(32, 8, 128, length, num_new) for length in (8192, 32768) for num_new in (16, 128, 1024)),
]


@dataclasses.dataclass(frozen=True)
class Contender:
    """Something to time: `run(i)` uses buffer set `i` of `num_sets`. Each set holds `num_bytes` of keys and values."""

    name: str
    run: Callable[[int], object]
    num_sets: int
    num_bytes: float


def sets_needed(num_bytes: float) -> int:
    """How many buffer sets keep a contender's data out of the processor's caches."""
    return max(MIN_SETS, math.ceil(COLD_BYTES / num_bytes))


def read_gbps() -> float:
    """GB/s of a sum over 512 MB, the best of ten. Every share of bandwidth is relative to it."""
    data = torch.ones(READ_BYTES // 4)
    times = []
    for _ in range(10):
        start = time.perf_counter()
        data.sum()
        times.append(time.perf_counter() - start)
    return READ_BYTES / min(times) / 1e9


def torch_contenders(shape: Shape, dtype: torch.dtype) -> list[Contender]:
    """PyTorch's attention over dense keys and values, in each form that a caller can choose."""
    kv_heads, head_dim = shape.num_kv_heads, shape.head_dim
    num_bytes = 2 * kv_heads * shape.length * head_dim * dtype.itemsize
    num_sets = sets_needed(num_bytes)
    caches = [torch.randn(2, 1, kv_heads, shape.length, head_dim).to(dtype) for _ in range(num_sets)]
    query = torch.randn(1, shape.num_q_heads, shape.num_new, head_dim).to(dtype)
    packed = query.view(1, kv_heads, -1, head_dim)
    mask = shape.mask()
    packed_mask = None if mask is None else mask.repeat(shape.num_q_heads // kv_heads, 1)

    def run_gqa(i: int) -> Tensor:
        key, value = caches[i]
        return scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)

    def run_packed(i: int) -> Tensor:
        key, value = caches[i]
        return scaled_dot_product_attention(packed, key, value, attn_mask=packed_mask)

    name = str(dtype).removeprefix("torch.")
    return [
        Contender(f"torch {name} gqa", run_gqa, num_sets, num_bytes),
        Contender(f"torch {name} packed", run_packed, num_sets, num_bytes),
    ]


def our_contender(shape: Shape, preset: str, dtype: torch.dtype) -> tuple[Contender, float]:
    """The op with a preset, and its largest error relative to the largest value of the output.

    Raises:
        SystemExit: The result is not that of the reference.
    """
    layout = layout_of(preset)
    kv_heads, head_dim, length = shape.num_kv_heads, shape.head_dim, shape.length
    if layout.key.block_size is not None:
        length -= layout.key.block_size // 2  # like most steps; at a whole block, every run would quantise a block
    transform = random_transform(KVQuantConfig.from_preset(preset).transforms, kv_heads, head_dim)
    rows = 1, kv_heads, head_dim, head_dim
    capacity = math.ceil(length / layout.token_alignment) * layout.token_alignment
    lengths = torch.tensor([length], dtype=torch.int32)
    first = layout.allocate(rows, capacity, dtype=dtype, device=torch.device("cpu"))
    keys, values = (torch.randn(1, kv_heads, length, head_dim).to(dtype) for _ in range(2))
    ops.append(keys, values, *first, lengths, layout, transform)
    num_bytes = length * layout.bytes_per_token(rows, dtype)
    num_bytes += layout.tail_bytes(rows, dtype) // 2
    num_sets = sets_needed(num_bytes)
    planes = [first, *([side.map(torch.clone) for side in first] for _ in range(num_sets - 1))]
    query = torch.randn(1, shape.num_q_heads, shape.num_new, head_dim).to(dtype)
    new = keys[:, :, -shape.num_new :], values[:, :, -shape.num_new :]

    def run(i: int) -> Tensor:
        return ops.decode(
            query, new, *planes[i], lengths, layout, softmax_scale=head_dim**-0.5, key_transform=transform
        )[0]

    error = check(run(0), query, first, layout, lengths, transform, f"{shape.describe()}, {preset}, {dtype}")
    return Contender(preset, run, num_sets, num_bytes), error


def check(
    out: Tensor,
    query: Tensor,
    planes: tuple[Planes, Planes],
    layout: KVLayout,
    lengths: Tensor,
    transform: KeyTransform,
    what: str,
) -> float:
    """The error of `out` relative to its largest value, for a few of the new tokens.

    Raises:
        SystemExit: It exceeds twice PyTorch's own error on the same values plus a rounding.
    """
    num_new, length = query.shape[2], int(lengths[0])
    tokens = torch.linspace(0, num_new - 1, min(num_new, CHECKED_TOKENS)).long()
    query, out = query[:, :, tokens], out[:, tokens]
    key, value = (
        reference.dequantize(side, kv_format, lengths=lengths, **layout.windows, key_transform=undone)
        for side, kv_format, undone in zip(planes, layout.formats, (transform, None), strict=True)
    )
    mask = torch.arange(length) <= (length - num_new + tokens)[:, None]

    def attend(dtype: torch.dtype) -> Tensor:
        held = (x[:, :, :length].to(dtype) for x in (key, value))
        attended = scaled_dot_product_attention(query.to(dtype), *held, attn_mask=mask, enable_gqa=True)
        return attended.transpose(1, 2).double()

    expected, plain = attend(torch.float64), attend(query.dtype)
    largest = float(expected.abs().max())
    error = float((out.double() - expected).abs().max()) / largest
    bound = 2 * float((plain - expected).abs().max()) / largest + torch.finfo(query.dtype).eps
    if not error <= bound:
        raise SystemExit(f"bench_cpu_decode: {what}: relative error {error:.2e} exceeds its bound {bound:.2e}.")
    return error


def time_in_turns(contenders: list[Contender], turns: int) -> dict[str, list[float]]:
    """Seconds of every turn of every contender, sorted."""
    times: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    warm_ups = min(WARM_UPS, turns)
    for turn in range(warm_ups + turns):
        for contender in contenders:
            start = time.perf_counter()
            contender.run(turn % contender.num_sets)
            if turn >= warm_ups:
                times[contender.name].append(time.perf_counter() - start)
    return {name: sorted(seconds) for name, seconds in times.items()}


def best_forms(contenders: list[Contender], turns: int) -> list[Contender]:
    """Per dtype, the form of PyTorch's attention that is faster on this machine. The other would only take time."""
    best: dict[str, tuple[float, Contender]] = {}
    for contender in contenders:
        seconds = time_in_turns([contender], turns)[contender.name][turns // 2]
        dtype = contender.name.split()[1]
        if dtype not in best or seconds < best[dtype][0]:
            best[dtype] = (seconds, contender)
    return [contender for _, contender in best.values()]


def measure(shape: Shape, dtype: torch.dtype, turns: int) -> dict[str, Any]:
    """Measure one case: PyTorch's attention in both dtypes, and every preset with queries in `dtype`."""
    turns = max(1, turns // shape.num_new)  # chunks take long, and their times vary less
    kinds = (torch.float32, torch.bfloat16)
    dense = best_forms([c for kind in kinds for c in torch_contenders(shape, kind)], min(5, turns))
    ours = {preset: our_contender(shape, preset, dtype) for preset in PRESETS}
    contenders = [*dense, *(contender for contender, _ in ours.values())]
    times = time_in_turns(contenders, turns)
    medians = {name: seconds[len(seconds) // 2] for name, seconds in times.items()}
    baseline = min((contender.name for contender in dense), key=medians.__getitem__)
    rows = []
    for contender in contenders:
        seconds, median = times[contender.name], medians[contender.name]
        rows.append(
            {
                "preset": contender.name,
                "median_us": median * 1e6,
                "p10_us": seconds[len(seconds) // 10] * 1e6,
                "p90_us": seconds[len(seconds) * 9 // 10] * 1e6,
                "bytes": contender.num_bytes,
                "gbps": contender.num_bytes / median / 1e9,
                "speedup": medians[baseline] / median,
                "relative_error": ours[contender.name][1] if contender.name in ours else None,
            }
        )
    return {
        "shape": {"batch": 1, **dataclasses.asdict(shape)},
        "query_dtype": str(dtype).removeprefix("torch."),
        "baseline": baseline,
        "rows": rows,
    }


def show(console: Console, case: dict[str, Any]) -> None:
    """Print one case as a table."""
    shape = Shape(**{key: value for key, value in case["shape"].items() if key != "batch"})
    table = Table(title=f"{shape.describe()}, {case['query_dtype']} queries", title_justify="left")
    for column in ("", "us", "10 %", "90 %", "MB", "GB/s", "of read", f"times {case['baseline']}", "error"):
        table.add_column(column, justify="left" if column == "" else "right")
    for row in case["rows"]:
        error = row["relative_error"]
        table.add_row(
            row["preset"],
            *(f"{row[key]:.0f}" for key in ("median_us", "p10_us", "p90_us")),
            f"{row['bytes'] / 1e6:.1f}",
            f"{row['gbps']:.1f}",
            f"{row['share_of_read_bandwidth']:.0%}",
            f"{row['speedup']:.2f}",
            "" if error is None else f"{error:.1e}",
        )
    console.print(table)


def main() -> None:
    """Measure every case. Print card, tables, and the results as one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_run_options(parser, after="all cases", device=False)
    parser.add_argument("--threads", type=int, help="threads of PyTorch and of the kernels (default: PyTorch's choice)")
    parser.add_argument("--turns", type=int, default=50, help="timed runs of each contender (default: %(default)s)")
    parser.add_argument(
        "--cases", type=int, default=len(SHAPES), help="how many of the shapes, from the first (default: all)"
    )
    arguments = parser.parse_args()
    for name in ("threads", "turns", "cases"):
        count = getattr(arguments, name)
        if count is not None and count < 1:
            parser.error(f"--{name} must be at least 1, got {count}")
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    if not ops.has_kernels("cpu"):
        raise SystemExit("bench_cpu_decode: there are no compiled kernels. Install: pip install --no-build-isolation .")
    torch.manual_seed(0)
    console = Console(width=120)
    cases = []
    bandwidth = read_gbps()
    for shape in SHAPES[: arguments.cases]:
        for dtype in (torch.bfloat16, torch.float32):
            cases.append(measure(shape, dtype, arguments.turns))
            bandwidth = max(bandwidth, read_gbps())
    results: dict[str, Any] = {**card(), "read_gbps": bandwidth, "turns": arguments.turns}
    for key, value in results.items():
        console.print(f"{key:>14}  {value}", highlight=False, markup=False)
    for case in cases:
        for row in case["rows"]:
            row["share_of_read_bandwidth"] = row["gbps"] / bandwidth
        show(console, case)
    results["shape"] = cases[0]["shape"]
    results["query_dtype"] = cases[0]["query_dtype"]
    results["rows"] = [row for row in cases[0]["rows"] if row["preset"] in PRESETS]
    results["cases"] = cases
    write_results(results, arguments.output)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
