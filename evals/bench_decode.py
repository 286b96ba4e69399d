"""Decode attention on a GPU: every preset against its own memory, bf16 attention and other low-bit kernels.

    python evals/bench_decode.py --peers --output evals/results/decode.json

Physics: as in `bench_cpu_decode.py`, a step reads every key and value once, so bytes over bandwidth is the floor. The
bandwidth is measured in the same run by a plain read kernel (`read_kernel.py`), over a buffer of as many bytes as the
case reads, since small buffers read slower than large ones.

What a split plan gains in padded batches, against none and against pages:

    python evals/bench_decode.py --lengths 1-16384 8192-16384 --batches 64 8 --presets int8 int4

Method:
- One new token per sequence. A CUDA graph holds calls on rotating buffer sets, at least four and together four times
  the L2 cache, so a call finds none of its keys and values there. A time is the median over replays of the graph,
  divided by its calls. The GPU rests before each measurement, because reading alone takes an H200 to its power limit.
- Ours is the whole op, including append of the new token and combine of splits. Each call rewrites the newest slot.
- Keys and queries are transformed as the preset says, with centres, but without smoothing factors, which a model has in
  its weights. The same is measured without transforms, and in some cases with each transform alone, factors in the
  cache included. Goals for the kernel are for plain keys; what a transform may cost is a goal of its own.
- Peers do attention alone. Each peer gets the best of its forms (layout, tensor cores or not, number of splits), and
  its planning is not timed. FlashInfer and FBGEMM are left out if they are not installed.
- Codes are random bytes under scales that give values of order one. The result is checked against `reference.py` on
  the first and the last sequence; a wrong one ends the run.
- Some cases are also measured over pages, which lie in memory in random order, with a split plan, as in continuous
  batching, and padded batches with a split plan. One plan serves all layers of a step, so its time is not that of the
  layer: it is a figure of its own.

`decode_cases.py` has the shapes and the goals that `checks` compares with, `gpu_timing.py` times, `decode_peers.py` has
the peers, and `render_readme.py` puts tables and pictures into the README and the pages of `docs/`.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import math
import time
from typing import Any

import torch
from decode_cases import (
    CASES,
    DEVICE,
    DTYPE,
    PAGED_CASES,
    PROMPT,
    QUICK_CASES,
    SINGLE_CASES,
    Goal,
    Shape,
    bytes_held,
    check_goals,
    fits,
    layout_of,
    lengths_held,
    random_transform,
    thousands,
    uneven_cases,
)
from decode_peers import measure_peers, peer_versions
from goals import verdict
from gpu_timing import ReadBandwidth, Timing, figures, sets_needed, time_calls
from results_files import add_run_options, write_results
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from hf_kvquant import PRESETS, KeyTransform, KVQuantConfig, ops
from hf_kvquant.ops.schemas import dequantize_reference
from hf_kvquant.spec import reference
from hf_kvquant.spec.formats import KVFormat
from hf_kvquant.spec.layout import KVLayout
from hf_kvquant.spec.pages import PageLayout
from hf_kvquant.spec.planes import Planes
from hf_kvquant.spec.tails import TailLayout
from hf_kvquant_evals.provenance import card, describe_error, gpu_card, gpu_state

REPLAYS = 40
PAGE_SIZE = 256  # tokens, as transformers has it by default
QUICK_REPLAYS = 12
DEFAULT_PRESETS = ["int8", "int4", "int4-channel", "int4-token", "int4-g32", "k8v4", "fp8"]
QUICK_PRESETS = ["int8", "int4"]


# --- ours -------------------------------------------------------------------------------------------------------------

# Standard deviations of uniformly drawn codes, or of e4m3 bytes without their highest exponent bit. Dividing by them
# gives values of order one.
_SPREAD = {"int8": 73.6, "int4": 4.6, "int2": 1.1, "fp8": 0.6}


def random_planes(shape: Shape, layout: KVLayout) -> tuple[Planes, Planes]:
    """Planes of keys and of values, with random codes under scales that differ from token to token."""
    rows = shape.batch, shape.num_kv_heads, shape.head_dim, shape.head_dim
    planes = layout.allocate(rows, shape.capacity, dtype=DTYPE, device=DEVICE)
    key, value = map(filled, planes, layout.formats)
    return key, value


def filled(planes: Planes, kv_format: KVFormat) -> Planes:
    """The planes, with the contents that `random_planes` describes."""
    if planes.scale is None:
        planes.codes.normal_()
        return planes
    planes.codes.view(torch.int32).random_(-(2**31), 2**31)
    if kv_format.storage == "fp8":
        planes.codes.bitwise_and_(0xBF)  # no NaN, and all magnitudes below 2
    planes.scale.uniform_(0.5, 1.5).div_(_SPREAD[kv_format.storage])
    if planes.zero is not None:
        torch.mul(planes.scale, -reference.max_code(kv_format) / 2, out=planes.zero)
    if planes.tail is not None:
        planes.tail.normal_()
    return planes


@dataclasses.dataclass(frozen=True)
class PagedSets:
    """Buffer sets of a step over pages.

    Attributes:
        layout: Of keys and values.
        sets: Planes of keys and of values over all pages and slots of a set.
        table: `[batch, columns]` int32, of all sets: pages and slots lie in memory in random order.
    """

    layout: KVLayout
    sets: list[tuple[Planes, Planes]]
    table: Tensor

    @classmethod
    def random(cls, shape: Shape, layout: KVLayout, num_sets: int) -> PagedSets:
        """With the contents that `random_planes` describes."""
        page = PageLayout(layout, shape.num_kv_heads, (shape.head_dim, shape.head_dim), DTYPE, PAGE_SIZE)
        num_pages, tails = -(-shape.capacity // page.num_tokens), TailLayout.of({0: page})

        def memory(num_bytes: int) -> Tensor:
            return torch.zeros(num_bytes, dtype=torch.uint8, device=DEVICE)

        sets = []
        for _ in range(num_sets):
            sides = page.planes(memory(shape.batch * num_pages * page.num_bytes), 0, page.num_bytes)
            slots: tuple[Tensor | None, Tensor | None] = None, None
            if tails is not None:
                slots = tails.planes(memory(shape.batch * tails.num_bytes), tails.num_bytes)[0]
            key, value = (
                filled(dataclasses.replace(planes, tail=tail), kv_format)
                for planes, tail, kv_format in zip(sides, slots, layout.formats, strict=True)
            )
            sets.append((key, value))
        table = torch.randperm(shape.batch * num_pages, device=DEVICE).view(shape.batch, num_pages).int()
        if tails is not None:
            first = torch.randperm(shape.batch, device=DEVICE).int()
            table = torch.cat((first[:, None], torch.zeros_like(first[:, None]), table), dim=1)
        return cls(layout, sets, table)

    def gathered(self) -> tuple[Planes, Planes]:
        """A copy of the first set, side by side as the reference takes it."""
        tails, token_pages = reference.split_tails(self.table, self.layout.has_tail)
        slots = None if tails is None else tails.slot
        key, value = (
            reference.gather_pages(planes, token_pages, slots, kv_format.block_size)
            for planes, kv_format in zip(self.sets[0], self.layout.formats, strict=True)
        )
        return key, value


def check(
    out: Tensor,
    query: Tensor,
    sides: tuple[Planes, Planes],
    layout: KVLayout,
    lengths: list[int],
    padding: list[int],
    transform: KeyTransform,
) -> tuple[float, float]:
    """The error of one sequence relative to its largest value, and its bound: twice PyTorch's own plus a rounding.

    The first and the last sequence are checked; the one nearer to its bound is returned.

    Args:
        out: `[batch, 1, num_q_heads, head_dim]`.
        query: `[batch, num_q_heads, 1, head_dim]`.
        sides: Planes of keys and of values.
        layout: Their layout.
        lengths: Tokens held by each sequence, padding left out.
        padding: Padding before these.
        transform: The key transform. PyTorch gets transformed keys and queries.
    """
    found: list[tuple[float, float]] = []
    softmax_scale = query.shape[-1] ** -0.5
    for i in {0, len(lengths) - 1}:
        total = lengths[i] + padding[i]
        held, end, start = (
            torch.tensor([each], dtype=torch.int32, device=query.device) for each in (lengths[i], total, padding[i])
        )
        dense: dict[str, Any] = {"lengths": end, "starts": start, **layout.windows}
        own_sides = [
            planes.map(lambda plane, i=i: plane[i : i + 1]).narrow(total, kv_format.block_size)  # type: ignore[misc]
            for planes, kv_format in zip(sides, layout.formats, strict=True)
        ]
        key, value = (
            reference.dequantize(planes, kv_format, **dense)[:, :, padding[i] :]
            for planes, kv_format in zip(own_sides, layout.formats, strict=True)
        )
        is_dense, _ = reference.dense_tokens(own_sides[0], layout.key, **dense)
        is_dense = is_dense[:, None, padding[i] : total, None]
        key = torch.where(is_dense, reference.transform_key(key, transform), key)
        row, own = query[i : i + 1], out[i : i + 1].float()
        expected, _ = reference.decode_attention(
            row.float(), key, value, held, softmax_scale=softmax_scale, key_transform=transform
        )
        transformed, _ = reference.transform_query(row, transform)
        plain = scaled_dot_product_attention(
            transformed.to(row.dtype), key.to(row.dtype), value.to(row.dtype), enable_gqa=True
        )
        largest = float(expected.abs().max())
        error = float((own - expected).abs().max()) / largest
        bound = 2 * float((plain.transpose(1, 2).float() - expected).abs().max()) / largest
        bound += torch.finfo(row.dtype).eps
        found.append((error, bound))
    # NaN counts as nearest to the bound.
    return max(found, key=lambda pair: math.inf if math.isnan(pair[0]) else pair[0] / pair[1])


def bounds_of(shape: Shape, tokens: list[int]) -> tuple[Tensor, Tensor | None]:
    """`lengths` and `starts` of the ops."""
    padding = shape.padding(tokens)
    lengths, starts = (torch.tensor(each, dtype=torch.int32, device=DEVICE) for each in (tokens, padding))
    return lengths + starts, starts if shape.is_padded else None


def time_preset(
    shape: Shape, preset: str, wanted: list[tuple[str, ...]], replays: int, split_plan: Tensor | None = None
) -> tuple[list[Timing], float]:
    """Times of the whole op, and its largest error relative to the largest value of the output.

    Args:
        shape: Shape of the step.
        preset: A name of `PRESETS`.
        wanted: Tuples of names of transforms; each tuple is timed.
        replays: Replays of a graph.
        split_plan: See `ops.split_plan`.

    Raises:
        SystemExit: The result is not that of the reference.
    """
    layout = layout_of(preset)
    num_sets = sets_needed(bytes_held(shape, layout))
    tokens = lengths_held(shape, layout)
    lengths, starts = bounds_of(shape, tokens)
    sets = [random_planes(shape, layout) for _ in range(num_sets)]
    counters = torch.zeros(num_sets, ops.NUM_COUNTERS, dtype=torch.int32, device=DEVICE)
    query = torch.randn(shape.batch, shape.num_q_heads, 1, shape.head_dim, dtype=DTYPE, device=DEVICE)
    key, value = torch.randn(2, shape.batch, shape.num_kv_heads, 1, shape.head_dim, dtype=DTYPE, device=DEVICE)
    # Each set has its own transforms, as each layer has: a call finds neither keys nor transforms in the L2 cache.
    transforms = {
        names: [random_transform(names, shape.num_kv_heads, shape.head_dim, DEVICE) for _ in range(num_sets)]
        for names in wanted
    }

    def run(i: int, names: tuple[str, ...]) -> Tensor:
        out, _ = ops.decode(
            query,
            (key, value),
            *sets[i],
            lengths,
            layout,
            softmax_scale=shape.head_dim**-0.5,
            counters=counters[i],
            starts=starts,
            split_plan=split_plan,
            key_transform=transforms[names][i],
        )
        return out

    timings, errors = [], []
    for names in wanted:
        out, padding = run(0, names), shape.padding(tokens)
        error, bound = check(out, query, sets[0], layout, tokens, padding, transforms[names][0])
        if not error <= bound:
            raise SystemExit(
                f"bench_decode: {shape.describe()}, {preset}: relative error {error:.2e} exceeds its bound {bound:.2e}."
            )
        errors.append(error)
        timings.append(time_calls(functools.partial(run, names=names), num_sets, replays))
    return timings, max(errors)


def time_pages(shape: Shape, preset: str, names: tuple[str, ...], replays: int) -> tuple[Timing, Timing, float]:
    """Times of the whole op over pages and of the split plan, and the op's error relative to its largest value.

    Raises:
        SystemExit: The result is not that of the reference.
    """
    layout = layout_of(preset)
    num_sets, tokens = sets_needed(bytes_held(shape, layout)), lengths_held(shape, layout)
    paged = PagedSets.random(shape, layout, num_sets)
    lengths = torch.tensor(tokens, dtype=torch.int32, device=DEVICE)
    num_slots, most_slots = ops.num_slots_of(DEVICE, shape.num_kv_heads, shape.batch)
    plan = ops.split_plan(lengths, num_slots, None, most_slots) if shape.batch > 1 else None
    counters = torch.zeros(num_sets, ops.NUM_COUNTERS, dtype=torch.int32, device=DEVICE)
    query = torch.randn(shape.batch, shape.num_q_heads, 1, shape.head_dim, dtype=DTYPE, device=DEVICE)
    new = torch.randn(2, shape.batch, shape.num_kv_heads, 1, shape.head_dim, dtype=DTYPE, device=DEVICE).unbind()
    transforms = [random_transform(names, shape.num_kv_heads, shape.head_dim, DEVICE) for _ in range(num_sets)]
    where: dict[str, Any] = {"softmax_scale": shape.head_dim**-0.5, "page_table": paged.table, "split_plan": plan}

    def run(i: int) -> Tensor:
        options = {**where, "counters": counters[i], "key_transform": transforms[i]}
        return ops.decode(query, new, *paged.sets[i], lengths, paged.layout, **options)[0]

    out = run(0)
    error, bound = check(out, query, paged.gathered(), layout, tokens, [0] * shape.batch, transforms[0])
    if not error <= bound:
        raise SystemExit(
            f"bench_decode: {shape.describe()}, {preset}, pages: relative error {error:.2e} exceeds its bound "
            f"{bound:.2e}."
        )
    planning = time_calls(lambda _: ops.split_plan(lengths, num_slots, None, most_slots), num_sets, replays)
    return time_calls(run, num_sets, replays), planning, error


def time_planned(shape: Shape, preset: str, names: tuple[str, ...], replays: int) -> tuple[Timing, Timing, float]:
    """Times of the whole op with a split plan and of the plan, and the op's error relative to its largest value.

    Raises:
        SystemExit: The result is not that of the reference.
    """
    layout = layout_of(preset)
    lengths, starts = bounds_of(shape, lengths_held(shape, layout))
    num_slots, most_slots = ops.num_slots_of(DEVICE, shape.num_kv_heads, shape.batch)
    plan = ops.split_plan(lengths, num_slots, starts, most_slots)
    timings, error = time_preset(shape, preset, [names], replays, plan)
    num_sets = sets_needed(bytes_held(shape, layout))
    planning = time_calls(lambda _: ops.split_plan(lengths, num_slots, starts, most_slots), num_sets, replays)
    return timings[0], planning, error


def measure_preset(
    shape: Shape, preset: str, bandwidth: ReadBandwidth, replays: int, *, is_paged: bool
) -> dict[str, Any]:
    """One preset at one shape, compared with the read bandwidth for as many bytes."""
    meant = KVQuantConfig.from_preset(preset).transforms
    singles: list[tuple[str, ...]] = [(name,) for name in meant] if shape in map(CASES.get, SINGLE_CASES) else []
    timings, error = time_preset(shape, preset, [without_factors(meant), *([()] if meant else []), *singles], replays)
    num_bytes = bytes_held(shape, layout_of(preset))
    row, *others = (figures(timing, num_bytes, bandwidth) for timing in timings)
    row = {"preset": preset, **row, "relative_error": error}
    if others:
        row["plain"] = others[0]
        row["single"] = {names[0]: single for names, single in zip(singles, others[1:], strict=True)}
    also = {"pages": time_pages} if is_paged else {}
    also |= {"planned": time_planned} if shape.is_padded else {}
    for name, time_it in also.items():
        timing, planning, error = time_it(shape, preset, without_factors(meant), replays)
        row[name] = {
            **figures(timing, num_bytes, bandwidth),
            "relative_error": error,
            "split_plan_us": planning.median_us,
        }
    return row


def without_factors(transforms: tuple[str, ...]) -> tuple[str, ...]:
    """The transforms that the cache applies when smoothing factors are folded into the weights."""
    return tuple(name for name in transforms if name != "smooth")


def time_prompt(shape: Shape, preset: str, names: tuple[str, ...], num_sets: int, replays: int) -> Timing:
    """Time of quantising whole sequences, with the named transforms applied to keys.

    Raises:
        SystemExit: The codes are not those of the reference.
    """
    layout = layout_of(preset)
    lengths = torch.tensor(shape.lengths(), dtype=torch.int32, device=DEVICE)
    rows = (shape.batch, shape.num_kv_heads, shape.context, shape.head_dim)
    sources = torch.randn(num_sets, 2, *rows, dtype=DTYPE, device=DEVICE)
    targets = [random_planes(shape, layout) for _ in range(num_sets)]

    transform = random_transform(names, shape.num_kv_heads, shape.head_dim, DEVICE)

    def run(i: int) -> None:
        ops.append(sources[i, 0], sources[i, 1], *targets[i], lengths, layout, transform)

    timing = time_calls(run, num_sets, replays)
    expected_sides = reference.transform_key(sources[0, 0, :1], transform), sources[0, 1, :1]
    for side, (source, planes, kv_format) in enumerate(zip(expected_sides, targets[0], layout.formats, strict=True)):
        coded, first = layout.num_coded(side, shape.context), layout.sink_length if kv_format.block_size else 0
        is_left_out = torch.arange(coded, device=DEVICE)[None] < first if first else None
        expected = reference.quantize(source[:, :, :coded], kv_format, is_padding=is_left_out)
        if not torch.equal(planes.codes[:1, :, :coded], expected.codes):
            raise SystemExit(f"bench_decode: prompt, {preset}: the codes are not those of the reference.")
    return timing


def time_dense(shape: Shape, preset: str, names: tuple[str, ...], num_sets: int, replays: int) -> Timing:
    """Time of dequantising whole sequences, with the named transforms taken back from keys.

    Raises:
        SystemExit: A result is not that of the reference.
    """
    layout = layout_of(preset)
    lengths = torch.tensor(shape.lengths(), dtype=torch.int32, device=DEVICE)
    transform = random_transform(names, shape.num_kv_heads, shape.head_dim, DEVICE)
    planes = [random_planes(shape, layout) for _ in range(num_sets)]
    operands = [ops.Operands(*each, layout, transform) for each in planes]
    options: dict[str, Any] = {"begin": 0, "num_tokens": shape.context, "dtype": DTYPE}

    def run(i: int) -> tuple[Tensor, Tensor]:
        return operands[i].dequantize(lengths, None, **options)

    timing = time_calls(run, num_sets, replays)
    expected = dequantize_reference(layout, planes[0], transform, lengths=lengths, starts=None, num_seen=0, **options)
    if not all(map(torch.equal, run(0), expected)):
        raise SystemExit(f"bench_decode: dense, {preset}: the result is not that of the reference.")
    return timing


def measure_prompt(preset: str, replays: int) -> dict[str, Any]:
    """Quantisation of a prompt, and back, compared with a copy that reads and writes as many bytes in total."""
    batch, num_kv_heads, head_dim, tokens = PROMPT
    shape = Shape(batch, num_kv_heads, num_kv_heads, head_dim, tokens)
    num_bytes = bytes_held(shape, layout_of(preset)) + bytes_held(shape, layout_of("none"))
    num_sets = sets_needed(num_bytes)
    names = without_factors(KVQuantConfig.from_preset(preset).transforms)
    timing = time_prompt(shape, preset, names, num_sets, replays)
    plain = time_prompt(shape, preset, (), num_sets, replays) if names else None
    # PyTorch's copy of 170,192,384 bytes, a multiple of 512, took 1.5 times as long as one of 169,975,808, a multiple
    # of 4,096 (H200, 2026-11).
    copied = torch.empty(num_sets, 2, num_bytes // 2 // 4096 * 4096, dtype=torch.uint8, device=DEVICE)
    copied.view(torch.int32).random_(-(2**31), 2**31)
    copy = time_calls(lambda i: copied[i, 0].copy_(copied[i, 1]), num_sets, replays)
    copy_gbps = copied[0].nbytes / copy.median_us / 1e3

    def described(timing: Timing) -> dict[str, Any]:
        gbps = num_bytes / timing.median_us / 1e3
        return {
            **dataclasses.asdict(timing),
            "bytes": num_bytes,
            "gbps": gbps,
            "copy_gbps": copy_gbps,
            "share": gbps / copy_gbps,
        }

    dense = described(time_dense(shape, preset, names, num_sets, replays))
    others = {} if plain is None else {"plain": described(plain)}
    return {"preset": preset, **described(timing), **others, "dense": dense}


# What a row was also measured with: the key of these figures, and how tables call them.
_ALSO = {"plain": "plain keys", "dense": "dequantised", "pages": "pages", "planned": "split plan"}


def with_others(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows, followed by one more for each that was also measured in another way."""
    others = [
        {**row, **row[key], "preset": f"{row['preset']}, {name}"}
        for key, name in _ALSO.items()
        for row in rows
        if key in row
    ]
    return [*rows, *others]


# --- output -----------------------------------------------------------------------------------------------------------


def add_speedups(case: dict[str, Any]) -> None:
    """Add to each row how many times as fast it is as the best bf16 kernel; `None` if no bf16 peer ran."""
    best = min((row for row in case["peers"] if row["peer"].startswith("bf16")), default=None, key=_median)
    case["best_bf16"] = None if best is None else {key: best[key] for key in ("peer", "form", "median_us", "bytes")}
    for row in [*case["rows"], *case["peers"]]:
        for timed in (row, row.get("plain", row)):
            timed["speedup"] = None if best is None else best["median_us"] / timed["median_us"]


def _median(row: dict[str, Any]) -> float:
    median: float = row["median_us"]
    return median


def case_table(case: dict[str, Any]) -> Table:
    """The table of one case: presets, then peers."""
    shape = Shape(**{key: value for key, value in case["shape"].items() if key != "num_tokens"})
    table = Table(title=f"{case['case']}: {shape.describe()}", title_justify="left")
    columns = ("", "us", "10 %", "90 %", "MB", "GB/s", "of read", "times bf16", "error", "form")
    for column in columns:
        table.add_column(column, justify="left" if column in ("", "form") else "right")
    for row in [*with_others(case["rows"]), *case["peers"]]:
        error = row.get("relative_error")
        form = row.get("form", "") + ("" if row["is_captured"] else " (not captured: back to back)")
        table.add_row(
            row.get("preset") or row["peer"],
            *(f"{row[key]:.2f}" for key in ("median_us", "p10_us", "p90_us")),
            f"{row['bytes'] / 1e6:.1f}",
            f"{row['gbps']:.0f}",
            f"{row['share']:.1%}",
            "" if row["speedup"] is None else f"{row['speedup']:.2f}",
            "" if error is None else f"{error:.1e}",
            form,
        )
    for failure in case["failures"]:
        table.add_row(f"[dim]{failure.replace('[', '(')}[/dim]")
    return table


def prompt_table(rows: list[dict[str, Any]]) -> Table:
    """The table of prompt quantisation."""
    batch, num_kv_heads, head_dim, tokens = PROMPT
    table = Table(title=f"prompt: {batch} x {thousands(tokens)}, {num_kv_heads} heads of {head_dim}")
    for column in ("", "us", "MB", "GB/s", "copy GB/s", "of copy"):
        table.add_column(column, justify="left" if column == "" else "right")
    for row in with_others(rows):
        table.add_row(
            row["preset"],
            f"{row['median_us']:.1f}",
            f"{row['bytes'] / 1e6:.1f}",
            f"{row['gbps']:.0f}",
            f"{row['copy_gbps']:.0f}",
            f"{row['share']:.1%}",
        )
    return table


def checks_table(checks: list[dict[str, Any]]) -> Table:
    """The table of goals: reached, missed, or not measured."""
    table = Table(title="goals", title_justify="left")
    for column in ("goal", "measured", ""):
        table.add_column(column, justify="right" if column == "measured" else "left")
    for check_row in checks:
        goal = Goal(**{field.name: check_row[field.name] for field in dataclasses.fields(Goal)})
        measured = check_row["measured"]
        if measured is None:
            table.add_row(goal.describe(), "", verdict(None))
            continue
        text = {
            "share": f"{measured:.1%}",
            "planned": f"{measured:.1%}",
            "dense": f"{measured:.1%}",
            "us": f"{measured:.2f} us",
            "times": f"{measured:.2f} times",
            "points": f"{measured:.1f} points",
        }[goal.unit]
        table.add_row(goal.describe(), text, verdict(check_row["reached"]))
    return table


def parse(words: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line. An unknown case or preset ends the program with a list of the known ones."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_run_options(parser, after="every case", device=False)
    parser.add_argument(
        "--cases", nargs="+", choices=list(CASES), metavar="CASE", help=f"some of {', '.join(CASES)} (default: all)"
    )
    parser.add_argument(
        "--lengths",
        nargs="+",
        type=range_of_lengths,
        metavar="SHORTEST-LONGEST",
        help="instead of cases, measure batches of such prompts, padded, with and without a split plan, and in pages",
    )
    parser.add_argument(
        "--batches", nargs="+", type=int, default=[64], metavar="N", help="of these sizes (default: 64)"
    )
    presets = list(PRESETS)
    known = f"some of {', '.join(presets)} (default: all but none)"
    parser.add_argument("--presets", nargs="+", choices=presets, metavar="PRESET", help=known)
    parser.add_argument("--peers", action="store_true", help="also measure other kernels that are installed")
    parser.add_argument("--quick", action="store_true", help="fewer replays, and fewer cases and presets unless named")
    arguments = parser.parse_args(words)
    if arguments.lengths and arguments.cases:
        parser.error("argument --cases: not allowed with argument --lengths")
    if min(arguments.batches) < 1:
        parser.error(f"argument --batches: must be at least 1, got {min(arguments.batches)}")
    arguments.cases = arguments.cases or (QUICK_CASES if arguments.quick else list(CASES))
    arguments.presets = arguments.presets or (QUICK_PRESETS if arguments.quick else DEFAULT_PRESETS)
    arguments.replays = QUICK_REPLAYS if arguments.quick else REPLAYS
    return arguments


def range_of_lengths(text: str) -> tuple[int, int]:
    """The shortest and the longest length in `1024-16384`."""
    shortest, _, longest = text.partition("-")
    if not (shortest.isdecimal() and longest.isdecimal() and 1 <= int(shortest) <= int(longest)):
        raise argparse.ArgumentTypeError(f"must be two lengths such as 1024-16384, got {text!r}")
    return int(shortest), int(longest)


def main() -> None:
    """Measure every case, first ours and then the peers. Print card, tables, and the results as one line of JSON."""
    arguments = parse()
    if not torch.cuda.is_available():
        raise SystemExit("bench_decode: there is no GPU. On a CPU: python evals/bench_cpu_decode.py")
    if not ops.has_kernels("cuda"):
        raise SystemExit("bench_decode: there are no CUDA kernels. Install: pip install --no-build-isolation .")
    started = time.perf_counter()
    torch.manual_seed(0)
    console = Console(width=150)
    bandwidth = ReadBandwidth(arguments.replays)
    results: dict[str, Any] = {
        **card(),
        **gpu_card(),
        "peer_versions": peer_versions() if arguments.peers else {},
        "replays": arguments.replays,
        "query_dtype": str(DTYPE).removeprefix("torch."),
        "state_before": gpu_state(),
    }
    for key, value in results.items():
        console.print(f"{key:>14}  {value}", highlight=False, markup=False)
    results |= {"read": [], "cases": [], "prompt": [], "checks": []}

    def save() -> None:
        results["read"] = sorted(bandwidth.measured.values(), key=lambda row: row["bytes"])
        results["checks"] = check_goals(results)
        results["wall_s"] = time.perf_counter() - started
        write_results(results, arguments.output)

    cases = {name: CASES[name] for name in arguments.cases}
    if arguments.lengths:
        cases = uneven_cases(arguments.batches, arguments.lengths)
    for name, shape in cases.items():
        is_paged = name in PAGED_CASES or bool(arguments.lengths)
        described = {**dataclasses.asdict(shape), "num_tokens": sum(shape.lengths())}
        case: dict[str, Any] = {"case": name, "shape": described, "rows": [], "peers": [], "failures": []}
        results["cases"].append(case)
        for preset in arguments.presets:
            if not fits(shape, preset):
                continue
            try:
                row = measure_preset(shape, preset, bandwidth, arguments.replays, is_paged=is_paged)
                case["rows"].append(row)
            except RuntimeError as error:
                case["failures"].append(f"{preset}: {describe_error(error)}")
            torch.cuda.empty_cache()
        add_speedups(case)
        console.print(case_table(case))
        save()
    for preset in [] if arguments.lengths else arguments.presets:
        if preset != "none":
            results["prompt"].append(measure_prompt(preset, arguments.replays))
            torch.cuda.empty_cache()
    results["state_loaded"] = gpu_state()
    if results["prompt"]:
        console.print(prompt_table(results["prompt"]))
    save()
    for case in results["cases"] if arguments.peers else []:
        peers, failures = measure_peers(cases[case["case"]], bandwidth, arguments.replays)
        case["peers"] += peers
        case["failures"] += failures
        add_speedups(case)
        console.print(case_table(case))
        save()
    results["state_after"] = gpu_state()
    save()
    if not arguments.lengths:
        console.print(checks_table(results["checks"]))
    console.print(f"{results['wall_s']:.0f} s", highlight=False)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
