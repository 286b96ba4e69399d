"""Times calls on a GPU, by replays of a CUDA graph over rotating buffer sets that are cold in L2.

Everything that `bench_decode.py` and `bench_chunks.py` compare is timed by `time_calls`, including the read kernel,
whose bandwidth shares are relative to. Those scripts and `decode_peers.py` decide what is timed.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

# The least size of all buffer sets of a case together: four times the largest L2 that we measure on (60 MB).
COLD_BYTES = 240e6
MIN_SETS = 4
# The least calls in a graph, so that the launch of the graph itself does not count.
MIN_CALLS = 16
TRIAL_REPLAYS = 5
# Rest before the replays that count. Reading at full speed takes an H200 to its power limit, which lowers clocks over
# tenths of a second. Without a rest, a time would depend on what ran before (the same kernel: 165 or 179 us, 2026-11).
REST_SECONDS = 0.05
# The largest buffer of the read kernel. Beyond this size, bandwidth no longer depends on it.
MAX_READ_BYTES = 4 * 2**30
# Ways to compute the same thing, by name. Each takes the number of a buffer set.
Forms = Mapping[str, Callable[[int], object]]


def sets_needed(num_bytes: float) -> int:
    """How many buffer sets keep a case out of the L2 cache."""
    return max(MIN_SETS, math.ceil(COLD_BYTES / num_bytes))


def calls_needed(num_sets: int, min_calls: int = MIN_CALLS) -> int:
    """How many calls a graph holds; every set is used equally often."""
    return num_sets * math.ceil(min_calls / num_sets)


@dataclasses.dataclass(frozen=True)
class Timing:
    """Microseconds of one call: the median, and the 10th and 90th percentiles over replays."""

    median_us: float
    p10_us: float
    p90_us: float
    num_sets: int
    is_captured: bool


def time_calls(
    run: Callable[[int], object],
    num_sets: int,
    replays: int,
    can_fall_back: bool = False,
    min_calls: int = MIN_CALLS,
) -> Timing:
    """Time `run(i)`, which works on buffer set `i`, by replays of a graph that holds calls on all sets in turn.

    Args:
        run: Launches work on the current stream.
        num_sets: Number of buffer sets.
        replays: Replays of the graph, after a rest of `REST_SECONDS`.
        can_fall_back: Whether to time the same calls back to back, between two events, if they cannot be captured.
        min_calls: The least calls in a graph. Long calls need fewer, since the launch of a graph takes microseconds.
    """
    num_calls = calls_needed(num_sets, min_calls)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for i in range(min(num_sets, 3)):
            run(i)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    outside = torch.cuda.current_stream()
    is_captured = True
    try:
        with torch.cuda.graph(graph):
            for i in range(num_calls):
                run(i % num_sets)
        replay: Callable[[], object] = graph.replay
    except RuntimeError:
        torch.cuda.set_stream(outside)  # a failed capture may leave its own stream as the current one
        if not can_fall_back:
            raise
        torch.cuda.synchronize()
        is_captured = False

        def replay() -> object:
            return [run(i % num_sets) for i in range(num_calls)]

    torch.cuda.synchronize()
    time.sleep(REST_SECONDS)
    for _ in range(2):
        replay()
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(replays)]
    for start, end in events:
        start.record()
        replay()
        end.record()
    torch.cuda.synchronize()
    times = sorted(start.elapsed_time(end) * 1e3 / num_calls for start, end in events)
    return Timing(times[replays // 2], times[replays // 10], times[replays * 9 // 10], num_sets, is_captured)


class ReadBandwidth:
    """GB/s of the read kernel by number of bytes, each measured once."""

    def __init__(self, replays: int) -> None:
        self.replays = replays
        self.measured: dict[int, dict[str, Any]] = {}

    def gbps(self, num_bytes: int) -> float:
        """GB/s for a buffer of `num_bytes`, rounded up to whole blocks."""
        import read_kernel

        unit = 4 * read_kernel.MAX_BLOCK
        num_bytes = min(math.ceil(num_bytes / unit) * unit, MAX_READ_BYTES)
        if num_bytes not in self.measured:
            self.measured[num_bytes] = self._measure(num_bytes)
        result: float = self.measured[num_bytes]["gbps"]
        return result

    def _measure(self, num_bytes: int) -> dict[str, Any]:
        import read_kernel

        num_sms = torch.cuda.get_device_properties(0).multi_processor_count
        num_sets = sets_needed(num_bytes)
        buffers = torch.empty(num_sets, num_bytes // 4, dtype=torch.int32, device="cuda")
        buffers.random_(-(2**31), 2**31)
        sums = torch.zeros(num_bytes // 4 // min(block for block, _, _ in read_kernel.CONFIGS) + 1, device="cuda").int()

        def reader(config: tuple[int, int, int]) -> Callable[[int], None]:
            return lambda i: read_kernel.read(buffers[i], sums, config, num_sms)

        expected = buffers[0].sum(dtype=torch.int32)
        for config in read_kernel.CONFIGS:
            sums.zero_()
            reader(config)(0)
            if not torch.equal(sums.sum(dtype=torch.int32), expected):
                raise SystemExit(f"bench_decode: the read kernel {config} sums {num_bytes} bytes wrongly.")
        forms: Forms = {str(config): reader(config) for config in read_kernel.CONFIGS}
        form, timing = best_of(forms, num_sets, self.replays)
        return {
            "bytes": num_bytes,
            "gbps": num_bytes / timing.median_us / 1e3,
            "median_us": timing.median_us,
            "block, warps, fills": form,
        }


def best_of(forms: Forms, num_sets: int, replays: int, can_fall_back: bool = False) -> tuple[str, Timing]:
    """The fastest of several forms, chosen by a short trial, and its time.

    Raises:
        RuntimeError: No form runs; the cause is the exception of the last one.
    """
    trials: dict[str, float] = {}
    failure: Exception | None = None
    for form, run in forms.items():
        try:
            trials[form] = time_calls(run, num_sets, TRIAL_REPLAYS, can_fall_back).median_us
        except Exception as error:
            if not can_fall_back:
                raise
            failure = error
    if not trials:
        raise RuntimeError(f"no form of {list(forms)} runs") from failure
    best = min(trials, key=lambda form: trials[form])
    return best, time_calls(forms[best], num_sets, replays, can_fall_back)


def figures(timing: Timing, num_bytes: int, bandwidth: ReadBandwidth) -> dict[str, Any]:
    """A time as a results file shows it: with bytes, bandwidth, and share of the read bandwidth."""
    gbps, read_gbps = num_bytes / timing.median_us / 1e3, bandwidth.gbps(num_bytes)
    return {
        **dataclasses.asdict(timing),
        "bytes": num_bytes,
        "gbps": gbps,
        "read_gbps": read_gbps,
        "share": gbps / read_gbps,
    }
