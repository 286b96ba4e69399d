"""The shapes of the GPU benchmark, the bytes that they read, and the goals that its figures are compared with.

Nothing here needs a GPU. `bench_decode.py` measures, `gpu_timing.py` times, `decode_peers.py` has other kernels, and
`render_decode.py` shows some of the cases by their names.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import torch
from goals import is_reached

from hf_kvquant import KeyTransform
from hf_kvquant.presets import preset_formats
from hf_kvquant.spec.formats import BLOCK_SIZE
from hf_kvquant.spec.layout import KVLayout

# The dtype of queries, and of keys and values that are not quantised.
DTYPE = torch.bfloat16
DEVICE = torch.device("cuda")


@dataclasses.dataclass(frozen=True)
class Shape:
    """One step of one layer. With `is_ragged`, lengths are uniform in [`shortest`, `context`]; else all are `context`.

    With `is_padded`, sequences are padded on the left to the longest one.
    """

    batch: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    context: int
    is_ragged: bool = False
    is_padded: bool = False
    shortest: int = 1

    def lengths(self) -> list[int]:
        """Tokens held by each sequence, the newest included, padding left out; the same in every run."""
        if not self.is_ragged:
            return [self.context] * self.batch
        generator = torch.Generator().manual_seed(0)
        drawn: list[int] = torch.randint(self.shortest, self.context + 1, (self.batch,), generator=generator).tolist()
        return drawn

    def padding(self, lengths: list[int]) -> list[int]:
        """Padding of each sequence if so many tokens are held."""
        return [max(lengths) - length if self.is_padded else 0 for length in lengths]

    @property
    def capacity(self) -> int:
        """Tokens that a sequence has room for: whole tiles and blocks of every format."""
        return math.ceil(self.context / BLOCK_SIZE) * BLOCK_SIZE

    def describe(self) -> str:
        """The shape in words, for tables."""
        context = (
            f"{thousands(self.shortest)} to {thousands(self.context)}" if self.is_ragged else thousands(self.context)
        )
        context += ", padded" if self.is_padded else ""
        return f"{self.batch} x {context}, {self.num_q_heads}/{self.num_kv_heads} heads of {self.head_dim}"


def thousands(tokens: int) -> str:
    """`8k` for 8192."""
    return f"{tokens // 1024}k" if tokens % 1024 == 0 else str(tokens)


CASES: dict[str, Shape] = {
    "64x8k": Shape(64, 32, 8, 128, 8192),
    "64x8k-group1": Shape(64, 8, 8, 128, 8192),
    "64x8k-group8": Shape(64, 64, 8, 128, 8192),
    "512x8k-1head": Shape(512, 8, 1, 128, 8192),
    "32x4k-32heads": Shape(32, 32, 32, 128, 4096),
    "128x16k": Shape(128, 32, 8, 128, 16384),
    "16x8k": Shape(16, 32, 8, 128, 8192),
    "8x8k": Shape(8, 32, 8, 128, 8192),
    "1x128k": Shape(1, 32, 8, 128, 131072),
    "1x32k": Shape(1, 32, 8, 128, 32768),
    "1x8k": Shape(1, 32, 8, 128, 8192),
    "1x4k": Shape(1, 32, 8, 128, 4096),
    "1x1k": Shape(1, 32, 8, 128, 1024),
    "64x8k-dim64": Shape(64, 32, 8, 64, 8192),
    "64x8k-dim96": Shape(64, 32, 8, 96, 8192),
    "64x8k-dim256": Shape(64, 32, 8, 256, 8192),
    "64x16k-ragged": Shape(64, 32, 8, 128, 16384, is_ragged=True),
    "64x16k-padded": Shape(64, 32, 8, 128, 16384, is_ragged=True, is_padded=True),  # also measured with a split plan
}
QUICK_CASES = ["64x8k", "1x8k", "1x1k"]
SINGLE_CASES = ["64x8k", "16x8k", "1x8k"]  # where each transform is also timed alone
PAGED_CASES = ["64x8k", "1x128k", "64x16k-ragged"]  # also measured over pages
# A prompt to be quantised: batch, key-value heads, head_dim, tokens.
PROMPT = (8, 8, 128, 8192)


def uneven_cases(batches: Iterable[int], lengths: Iterable[tuple[int, int]]) -> dict[str, Shape]:
    """Padded batches of `64x16k-padded`'s heads with other lengths, each from a shortest to a longest."""
    return {
        f"{batch}x{thousands(shortest)}-{thousands(longest)}": Shape(
            batch, 32, 8, 128, longest, is_ragged=True, is_padded=True, shortest=shortest
        )
        for batch in batches
        for shortest, longest in lengths
    }


def layout_of(preset: str) -> KVLayout:
    """The layout of a preset, with its dense windows."""
    formats = preset_formats(preset)
    return KVLayout(formats.key, formats.value, formats.sink_length, formats.residual_length)


def lengths_held(shape: Shape, layout: KVLayout) -> list[int]:
    """Tokens held by each sequence: the shape's, minus half a block where each channel of a block has a scale.

    A step then reads as many dense keys as the average step, and fills no block, like 127 of 128 steps.
    """
    block_size = layout.key.block_size
    less = 0 if block_size is None or shape.is_ragged else block_size // 2
    return [length - less for length in shape.lengths()]


def bytes_held(shape: Shape, layout: KVLayout) -> int:
    """Bytes of all tokens held: codes, scales, zeros, and what is dense, each token of a side counted once."""
    lengths = lengths_held(shape, layout)
    dense_bytes, num_bytes = shape.num_kv_heads * shape.head_dim * DTYPE.itemsize, 0
    for side in layout.formats:
        coded_bytes = side.bytes_per_token(shape.num_kv_heads, shape.head_dim, DTYPE)
        for length, pads in zip(lengths, shape.padding(lengths), strict=True):
            num_recent = length + pads - side.tail_begin(length + pads, layout.residual_length)
            num_dense = min(length, layout.sink_length + num_recent) if side.is_quantized else length
            num_bytes += num_dense * dense_bytes + (length - num_dense) * coded_bytes
    return num_bytes


def fits(shape: Shape, preset: str) -> bool:
    """Whether a preset's groups divide the head_dim."""
    return all(side.group_size is None or shape.head_dim % side.group_size == 0 for side in layout_of(preset).formats)


def random_transform(
    transforms: tuple[str, ...], num_kv_heads: int, head_dim: int, device: str | torch.device = "cpu"
) -> KeyTransform:
    """The named transforms, with random numbers."""
    shape = num_kv_heads, head_dim
    center = torch.randn(shape, device=device) if "center" in transforms else None
    smoothing = 2.0 ** torch.randint(-2, 3, shape, device=device) if "smooth" in transforms else None
    return KeyTransform(center, smoothing, "rotate" in transforms)


# --- goals ------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Goal:
    """A figure to reach: at least `value`, or at most `value` for `"us"` and `"points"`.

    Attributes:
        unit: `"planned"`, the share of the read bandwidth with a split plan. For plain keys: `"share"` without one,
            `"us"`, or `"times"` as fast as the best of `peers`. Or `"points"`, the percentage points by which one
            transform lowers the share. Or `"dense"`, the share of the copy bandwidth of dequantising.
        case: A name of `CASES`; or `"prompt"`, where `"share"` is of the copy bandwidth, too.
        preset: A name of `PRESETS`.
        value: The threshold.
        peers: How the names of these peers start; only for `"times"`.
    """

    unit: str
    case: str
    preset: str
    value: float
    peers: str = ""

    def describe(self) -> str:
        """The goal in words, for the table."""
        what = {
            "share": f"at least {self.value:.0%} of {'copy' if self.case == 'prompt' else 'read'} bandwidth",
            "planned": f"at least {self.value:.0%} of read bandwidth with a split plan",
            "us": f"at most {self.value:g} us",
            "times": f"at least {self.value:g} times {self.peers}",
            "dense": f"dequantised at {self.value:.0%} of copy bandwidth or more",
            "points": f"a transform takes at most {self.value:g} points of read bandwidth",
        }
        return f"{self.preset} at {self.case}: {what[self.unit]}"


def _goals() -> Iterable[Goal]:
    main = ("int8", "int4-token", "int4-g32")
    shares = {
        ("64x8k", "64x8k-group1", "64x8k-group8", "512x8k-1head", "32x4k-32heads"): (0.96, 0.93, 0.88),
        ("128x16k",): (0.97, 0.95, 0.90),
    }
    for cases, values in shares.items():
        for case in cases:
            yield from (Goal("share", case, preset, value) for preset, value in zip(main, values, strict=True))
    # Both read about 140 MB, since int8 takes twice the bytes of four bits.
    yield Goal("share", "8x8k", "int8", 0.92)
    yield Goal("share", "16x8k", "int4-token", 0.88)
    yield Goal("share", "16x8k", "int4-g32", 0.84)
    latencies = {"1x128k": (69, 40, 47), "1x8k": (9, 7.5, 8), "1x1k": (5, 5, 5)}
    for case, values in latencies.items():
        yield from (Goal("us", case, preset, value) for preset, value in zip(main, values, strict=True))
    yield Goal("times", "64x8k", "int8", 1.9, "bf16")
    yield Goal("times", "64x8k", "int4-token", 3.4, "bf16")
    yield Goal("times", "512x8k-1head", "int4-token", 3.6, "int4 FBGEMM")
    yield Goal("times", "64x8k", "fp8", 1.45, "fp8 FlashInfer wrapper")
    yield from (Goal("share", "prompt", preset, 0.70) for preset in main)
    yield from (Goal("dense", "prompt", preset, 0.80) for preset in main)
    yield from (Goal("planned", "64x16k-padded", *goal) for goal in (("int8", 0.85), ("int4-token", 0.80)))
    yield from (Goal("points", case, preset, 3) for case in SINGLE_CASES for preset in main)


GOALS: list[Goal] = list(_goals())


def check_goals(results: dict[str, Any]) -> list[dict[str, Any]]:
    """Every goal with what was measured and whether it was reached; both `None` if the run did not measure it."""
    checks = []
    for goal in GOALS:
        measured = _measured(results, goal)
        reached = is_reached(measured, goal.value, at_least=goal.unit not in ("us", "points"))
        checks.append({**dataclasses.asdict(goal), "measured": measured, "reached": reached})
    return checks


def _measured(results: dict[str, Any], goal: Goal) -> float | None:
    if goal.case == "prompt":
        rows, peers = results["prompt"], []
    else:
        case = next((case for case in results["cases"] if case["case"] == goal.case), None)
        rows, peers = ([], []) if case is None else (case["rows"], case["peers"])
    row = next((row for row in rows if row["preset"] == goal.preset), None)
    if row is None:
        return None
    if goal.unit in ("planned", "dense"):
        also: dict[str, float] = row.get(goal.unit, {})
        return also.get("share")
    plain: dict[str, float] = row.get("plain", row)
    if goal.unit == "points":
        singles = row.get("single", {}).values()
        return max((100 * (plain["share"] - single["share"]) for single in singles), default=None)
    if goal.unit != "times":
        return plain["median_us" if goal.unit == "us" else "share"]
    times = [peer["median_us"] for peer in peers if peer["peer"].startswith(goal.peers)]
    return min(times) / plain["median_us"] if times else None
