"""Runs a step of static tensors many times: as usual the first time, then recorded, then replayed.

`CudaGraph` does that for any function. `CapturedStep` is such a function: a forward of the model over static inputs,
and what a subclass does with its output.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from ..cache.cache import KVQuantCache
from .fusion import fused
from .prefetch import Prefetch


class StepRunner(abc.ABC):
    """Runs one function of static tensors on one device many times.

    The first run is an ordinary step, so nothing that it writes has to be undone. It lets libraries set up what they
    cannot set up while being recorded.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._has_run = False
        self._replay: Callable[[], None] | None = None
        self._result: Any = None

    def run(self, step: Callable[[], Any], cache: KVQuantCache) -> Any:
        """Run a step, which appends one token to the cache, on the current stream. A recorded one is not called again.

        Returns:
            The result of the step. The next run overwrites its tensors.

        Raises:
            RuntimeError: The step cannot be recorded. The cache is as it was before the step.
            ValueError: Layers of the cache have different lengths.
        """
        cache.check_in_step()
        if not self._has_run:
            result = self._run_once(step)
            self._has_run = True
            return result
        is_recorded = self._replay is not None
        if self._replay is None:
            self._replay, self._result = self._recorded(step, cache)
        try:
            if is_recorded:
                cache.note_replayed(1)
            self._replay()
        except BaseException:
            cache.ask_device()  # which has run all of the graph or nothing
            raise
        return self._result

    def _recorded(self, step: Callable[[], Any], cache: KVQuantCache) -> tuple[Callable[[], None], Any]:
        length = cache.storages[0].length
        try:
            return self._record(step)
        except BaseException as error:
            cache.forget_capture(length)
            if not isinstance(error, Exception):
                raise
            raise RuntimeError(
                "generate: `capture` must be False for this model, got True: its decode step cannot be captured as a "
                "CUDA graph, probably because it waits for the device. Pass static=True instead, and generate compiles."
            ) from error

    @abc.abstractmethod
    def _run_once(self, step: Callable[[], Any]) -> Any:
        """Run the step as usual, on the stream that will record it."""

    @abc.abstractmethod
    def _record(self, step: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        """Record the step without running it. Returns a function that replays it, and the step's result."""


class CudaGraph(StepRunner):
    """A step as a CUDA graph."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._stream = torch.cuda.Stream(device)  # a capture needs its own
        self._prefetch = Prefetch(device)

    def _run_once(self, step: Callable[[], Any]) -> Any:
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream), self._prefetch.noted():
            result = step()
        current.wait_stream(self._stream)
        return result

    def _record(self, step: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        graph = torch.cuda.CUDAGraph()
        try:
            # Other threads may go on using the GPU: only what this one does is captured.
            with (
                torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"),
                self._prefetch.recorded(),
            ):
                result = step()
        except BaseException:
            # A failed capture leaves the random number generator in capture mode, where it raises; one that succeeds
            # resets it.
            with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=self._stream, capture_error_mode="thread_local"):
                torch.zeros(1, device=self._device)
            raise
        return graph.replay, result


# The runners of captured steps, by device type. Other devices have no graphs.
RUNNERS: dict[str, type[StepRunner]] = {"cuda": CudaGraph}


class CapturedStep(abc.ABC):
    """A forward over static inputs, followed by `_finish`.

    `inputs` are those of the model's forward for one token. Tensors are copied, and caches left out.
    """

    def __init__(self, inputs: Mapping[str, Any], device: torch.device) -> None:
        without_cache = {name: value for name, value in inputs.items() if not isinstance(value, Cache)}
        self.inputs = map_tensors(torch.clone, without_cache)
        self._runner = RUNNERS[device.type](device)

    def run(self, model: PreTrainedModel, cache: KVQuantCache) -> Any:
        """Append a token to the cache. Returns what `_finish` returns, as `StepRunner.run` does."""

        def step() -> Any:
            with fused(model):
                output = model(**self.inputs, past_key_values=cache)
            return self._finish(output, cache)

        return self._runner.run(step, cache)

    @abc.abstractmethod
    def _finish(self, output: Any, cache: KVQuantCache) -> Any:
        """Use the model's output. Recorded together with the forward; must not keep the cache."""


def map_tensors(function: Callable[[Tensor], Any], value: Any) -> Any:
    """`value` with `function` applied to every tensor in its dictionaries, lists and tuples, not in caches."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, Mapping) and not isinstance(value, Cache):
        return {name: map_tensors(function, item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map_tensors(function, item) for item in value)
    return value


def fill(static: Any, value: Any) -> None:
    """Copy the tensors of `value` into static ones of the same signature."""
    if isinstance(static, Tensor):
        static.copy_(value)
    elif isinstance(static, Mapping):
        for name, item in static.items():
            fill(item, value[name])
