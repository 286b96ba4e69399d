"""The caches that `bench_generate.py` compares, and calls of `generate` that note when each token arrives."""

from __future__ import annotations

import contextlib
import functools
import gc
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from generate_cases import Case
from torch import Tensor
from transformers import StaticCache
from transformers.cache_utils import Cache, DynamicLayer, StaticLayer
from transformers.generation.streamers import BaseStreamer

from hf_kvquant import KVQuantCache, patched
from hf_kvquant.attention.backends import without_cudnn
from hf_kvquant.upstream.releases import CACHE

# Tokens of the prompt on which a system is warmed up, and compiles.
WARM_UP_CONTEXT = 64

# --- the systems ------------------------------------------------------------------------------------------------------

# Sets a model up for a capacity in tokens, and yields a function that makes the arguments of each call of `generate`.
System = Callable[[Any, int], contextlib.AbstractContextManager[Callable[[], dict[str, Any]]]]


@contextlib.contextmanager
def transformers_cache(model: Any, capacity: int, **arguments: Any) -> Iterator[Callable[[], dict[str, Any]]]:
    """A cache that `generate` makes itself."""
    yield lambda: arguments


@contextlib.contextmanager
def cache_without_cudnn(model: Any, capacity: int) -> Iterator[Callable[[], dict[str, Any]]]:
    """transformers' growing cache, without the attention of PyTorch that plans anew in each step."""
    with without_cudnn():
        yield dict


@contextlib.contextmanager
def static_cache(model: Any, capacity: int) -> Iterator[Callable[[], dict[str, Any]]]:
    """One static cache for all calls: its addresses stay, so graphs of the compiled step are recorded only once."""
    cache = StaticCache(config=model.config, max_cache_len=capacity)

    def arguments() -> dict[str, Any]:
        cache.reset()
        return {CACHE: cache}

    yield arguments


@contextlib.contextmanager
def ours(model: Any, capacity: int, *, grows: bool = False, **config: Any) -> Iterator[Callable[[], dict[str, Any]]]:
    """A patched model; its cache is static unless it `grows`."""
    with patched(model, config if grows else {**config, "max_cache_len": capacity}):
        yield dict


def _quantized(**config: Any) -> System:
    return functools.partial(transformers_cache, cache_implementation="quantized", cache_config=config)


SYSTEMS: dict[str, System] = {
    "dynamic": transformers_cache,
    "dynamic-no-cudnn": cache_without_cudnn,
    "static": static_cache,
    "quanto-int4": _quantized(backend="quanto", nbits=4, axis_key=0, axis_value=0),
    "hqq-int4": _quantized(backend="hqq", nbits=4, axis_key=1, axis_value=1),
    "int8": functools.partial(ours, preset="int8", grows=True),
    "int4": functools.partial(ours, preset="int4", grows=True),
    "int4-token": functools.partial(ours, preset="int4-token", grows=True),
    "int8-static": functools.partial(ours, preset="int8"),
    "int4-static": functools.partial(ours, preset="int4"),
    "int4-token-static": functools.partial(ours, preset="int4-token"),
    "int8-capture": functools.partial(ours, preset="int8", capture=True),
    "int4-capture": functools.partial(ours, preset="int4", capture=True),
    "int4-token-capture": functools.partial(ours, preset="int4-token", capture=True),
    "k4v2-capture": functools.partial(ours, preset="k4v2", capture=True),
    "int2-capture": functools.partial(ours, preset="int2", capture=True),
}


# --- calls ------------------------------------------------------------------------------------------------------------


class Clock(BaseStreamer):  # type: ignore[misc]
    """Notes when tokens arrive on the host, and the peak of allocated memory up to the first token and after it.

    Attributes:
        times: Seconds from the call to each arrival.
        arrived: Tokens of one sequence in each arrival: one, or several that were proposed and accepted.
        peaks: Bytes up to the first arrival and after it; `None` on a CPU.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.times: list[float] = []
        self.arrived: list[int] = []
        self.peaks: list[int | None] = []
        self._has_prompt = False
        self.start = self.now()

    def now(self) -> float:
        """The time in seconds, after the device has finished its work."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def put(self, value: Tensor) -> None:
        """Take the prompt (`[batch, tokens]`), then new tokens: `[batch]`, or `[1, tokens]` in assisted decoding."""
        if not self._has_prompt:
            self._has_prompt = True
            return
        self.times.append(time.perf_counter() - self.start)
        self.arrived.append(1 if value.ndim == 1 else value.shape[1])
        if len(self.times) == 1:
            self._note_peak()

    def end(self) -> None:
        """Take the end of the text."""
        self._note_peak()

    @property
    def peak_bytes(self) -> int | None:
        """The most memory that was allocated during the call."""
        return max((peak for peak in self.peaks if peak is not None), default=None)

    def _note_peak(self) -> None:
        if self.device.type == "cuda":
            self.peaks.append(torch.cuda.max_memory_allocated())
            torch.cuda.reset_peak_memory_stats()
        else:
            self.peaks.append(None)


def random_prompt(model: Any, case: Case) -> Tensor:
    """Random tokens, `[batch, context]`."""
    return torch.randint(5, model.config.vocab_size, (case.batch, case.context), device=model.device)


def call(model: Any, case: Case, num_new: int, arguments: Mapping[str, Any]) -> tuple[Clock, Any]:
    """Call `generate` once on random tokens. Returns when tokens arrived, and what it returned."""
    return call_on(model, random_prompt(model, case), num_new, arguments)


def call_on(model: Any, prompt: Tensor, num_new: int, arguments: Mapping[str, Any]) -> tuple[Clock, Any]:
    """Call `generate` once on a prompt, `[batch, tokens]`. Returns when tokens arrived, and what it returned."""
    if model.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    clock = Clock(model.device)
    result = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        min_new_tokens=num_new,
        max_new_tokens=num_new,
        do_sample=False,
        streamer=clock,
        **arguments,
    )
    if sum(clock.arrived) != num_new:
        raise RuntimeError(f"{sum(clock.arrived)} tokens arrived instead of {num_new}")
    return clock, result


def bytes_per_token(cache: Cache) -> int | None:
    """Bytes that one token of one sequence takes in all layers; `None` if the cache does not tell."""
    if isinstance(cache, KVQuantCache):
        return cache.bytes_per_token
    if not all(type(layer) in (DynamicLayer, StaticLayer) for layer in cache.layers):
        return None
    sides = [side for layer in cache.layers for side in (layer.keys, layer.values)]
    return sum(side.shape[1] * side.shape[3] * side.element_size() for side in sides)


def check_served(cache: Cache) -> None:
    """Refuse figures of our cache if attention read dequantised tensors."""
    if isinstance(cache, KVQuantCache):
        reasons = sorted({reason for storage in cache.storages for reason in storage.tally.fallbacks})
        if reasons:
            raise RuntimeError(f"attention runs on dequantised tensors: {'; '.join(reasons)}")


def clean_up() -> None:
    """Forget compiled code, its graphs and their memory."""
    torch.compiler.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
