"""What `GET /metrics` tells: counters, gauges and histograms in Prometheus' text format, in a registry of their own.

Counters and histograms are written where something happens. Gauges are read when somebody asks. They read lengths and
copies of dictionaries of the scheduler and the cache, and take none of their locks, so the generation thread never
waits.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

OUTCOMES = ("finished", "cancelled", "failed", "rejected")
# Seconds over which the rate of output tokens is taken.
RATE_WINDOW = 10
# Bounds of the buckets of histograms: of what happens once in an answer, and of what happens with each token.
_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500)
_TOKEN_SECONDS = (0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 5, 10)


class Rate:
    """Events a second over the last `RATE_WINDOW` seconds. One thread adds, others may read."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._counts: deque[tuple[int, int]] = deque(maxlen=RATE_WINDOW)  # second, events in it

    def add(self, count: int) -> None:
        """Note events that happen now."""
        second = int(self._now())
        if self._counts and self._counts[-1][0] == second:
            count += self._counts.pop()[1]
        self._counts.append((second, count))

    def value(self) -> float:
        """Events a second. The present second counts as far as it has passed."""
        now = self._now()
        oldest = int(now) - RATE_WINDOW + 1
        return sum(count for second, count in list(self._counts) if second >= oldest) / (RATE_WINDOW - 1 + now % 1)


class Seconds(Collector):
    """A histogram of durations. One thread adds, others may read.

    The generation thread adds a duration for each token. The library's own histogram locks and looks through all
    buckets each time, which takes several times as long.

    Args:
        name: Of the metric, with its prefix.
        help: What it tells.
        bounds: Upper ones of the buckets, ascending; the last bucket has none.
    """

    def __init__(self, name: str, help: str, bounds: tuple[float, ...] = _SECONDS) -> None:
        self._name, self._help, self._bounds = name, help, bounds
        self._counts, self._sum = [0] * (len(bounds) + 1), 0.0

    def add(self, seconds: float, count: int = 1) -> None:
        """Note a duration, or several that are equal."""
        self._counts[bisect_left(self._bounds, seconds)] += count
        self._sum += seconds * count

    def collect(self) -> Iterable[HistogramMetricFamily]:
        """See `Collector`."""
        names = [*map(floatToGoString, self._bounds), "+Inf"]
        buckets = list(zip(names, accumulate(list(self._counts)), strict=True))
        yield HistogramMetricFamily(self._name, self._help, buckets=buckets, sum_value=self._sum)


class Metrics:
    """All metrics of a server.

    Attributes:
        outcomes: Requests by how they ended: see `OUTCOMES`.
        prompt_tokens, output_tokens: Of all requests that were submitted.
        queue: Seconds from a request's arrival to the first step with it, for each of its answers.
        first_token: Seconds from a request's arrival to the first token, for each of its answers.
        between_tokens: Seconds from a token to the next one of the same answer.
        whole: Seconds from a request's arrival to the end of its last answer, if it finished.
        rate: Output tokens a second.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        requests = self._counter("requests", "Requests by how they ended.", ("outcome",))
        self.outcomes = {outcome: requests.labels(outcome) for outcome in OUTCOMES}
        self.prompt_tokens = self._counter("prompt_tokens", "Tokens of prompts that were submitted.")
        self.output_tokens = self._counter("output_tokens", "Tokens that were generated.")
        self.rate = Rate()
        self.gauge(
            "output_tokens_per_second", f"Tokens generated a second, over {RATE_WINDOW} seconds.", self.rate.value
        )
        arrival = "Seconds from the arrival of a request to"
        self.queue = self._seconds("queue_time", f"{arrival} the first step with an answer.")
        self.first_token = self._seconds("time_to_first_token", f"{arrival} the first token of an answer.")
        self.between_tokens = self._seconds(
            "inter_token_latency", "Seconds from a token to the next one of the answer.", _TOKEN_SECONDS
        )
        self.whole = self._seconds("request_latency", f"{arrival} the end of its last answer, if it finished.")

    def _seconds(self, name: str, help: str, bounds: tuple[float, ...] = _SECONDS) -> Seconds:
        histogram = Seconds(f"hf_kvquant_{name}_seconds", help, bounds)
        self.registry.register(histogram)
        return histogram

    def _counter(self, name: str, help: str, labels: tuple[str, ...] = ()) -> Counter:
        return Counter(f"hf_kvquant_{name}", help, labels, registry=self.registry)

    def gauge(self, name: str, help: str, read: Callable[[], float]) -> None:
        """Add a gauge, which is read whenever somebody asks."""
        Gauge(f"hf_kvquant_{name}", help, registry=self.registry).set_function(read)

    def page(self) -> bytes:
        """All of them as Prometheus reads them."""
        return generate_latest(self.registry)
