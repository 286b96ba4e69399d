"""What `GET /metrics` tells: counters and gauges in Prometheus' text format, in a registry of their own.

Counters are written where something happens. Gauges are read when somebody asks. They read lengths and copies of
dictionaries of the scheduler and the cache, and take none of their locks, so the generation thread never waits.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

OUTCOMES = ("finished", "cancelled", "failed", "rejected")
# Seconds over which the rate of output tokens is taken.
RATE_WINDOW = 10
_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100)


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


class Metrics:
    """All metrics of a server.

    Attributes:
        outcomes: Requests by how they ended: see `OUTCOMES`.
        prompt_tokens, output_tokens: Of all requests that were submitted.
        first_token: Seconds from a request's arrival to its first token.
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
        self.first_token = Histogram(
            "hf_kvquant_time_to_first_token_seconds",
            "Seconds from the arrival of a request to its first token.",
            buckets=_SECONDS,
            registry=self.registry,
        )

    def _counter(self, name: str, help: str, labels: tuple[str, ...] = ()) -> Counter:
        return Counter(f"hf_kvquant_{name}", help, labels, registry=self.registry)

    def gauge(self, name: str, help: str, read: Callable[[], float]) -> None:
        """Add a gauge, which is read whenever somebody asks."""
        Gauge(f"hf_kvquant_{name}", help, registry=self.registry).set_function(read)

    def page(self) -> bytes:
        """All of them as Prometheus reads them."""
        return generate_latest(self.registry)
