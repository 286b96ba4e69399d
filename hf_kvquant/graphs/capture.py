"""The decode step as a CUDA graph of the model's own kernels: what is captured, and when a capture is still valid.

With a static cache transformers compiles the decode step: 13 s for four layers of Llama-3-8B's shape. `capture=True` in
the config skips that. The first call takes 0.7 s longer than the next, for all 32 layers (H200, 2026-11), and the host
launches one graph instead of 1,400 kernels. This file captures the model's forward, which transformers' loops call in
place of the compiled one; `decode_loop.py` the choice of the next token as well, so that the host need not wait. During
recording, small kernels of the model are fused (`fusion.py`) and weights are fetched ahead (`prefetch.py`).

A graph reads and writes fixed addresses. It is kept on the model, under the addresses of all tensors that it uses but
does not own: the weights and the buffers of the cache. If these move, a new graph is captured. So it is if modules,
hooks or adapters change: adapters that are switched, merged or taken away.
"""

from __future__ import annotations

import abc
import contextlib
import functools
import gc
import logging
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any, TypeGuard

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache
from transformers.utils.generic import ModelOutput

from ..cache.kvquant_cache import KVQuantCache
from ..common.errors import NotCapturable
from ..models.fingerprint import fingerprint
from ..models.sharding import why_not_captured
from ..state import MOST_NEW_TOKENS, Captures, notes_on
from ..upstream.releases import CACHE, with_cache
from .fusion import fused
from .prefetch import Prefetch

logger = logging.getLogger(__name__)


def is_captured(cache: object) -> TypeGuard[KVQuantCache]:
    """Whether steps over a cache are to be captured."""
    return isinstance(cache, KVQuantCache) and cache.quant_config.capture


def check_graphs(model: PreTrainedModel) -> None:
    """Refuse to capture on a machine without a GPU. A model that is not on the GPU yet may be moved before it runs."""
    if model.device.type not in RUNNERS and not torch.cuda.is_available():
        raise NotImplementedError(
            "patch: `capture` must be False on a machine without a GPU, got True: torch.cuda.is_available() is False, "
            "and CUDA graphs need one. Leave capture out; static=True lets generate compile where that is possible."
        )


def check_capturable(model: PreTrainedModel) -> None:
    """Refuse to capture if that would fail or, worse, replay a step over weights that have moved."""
    tensors = [*model.parameters(), *model.buffers()]
    devices = sorted({str(tensor.device) for tensor in tensors})
    reason = None
    if len(devices) > 1:
        reason = f"the model is spread over {devices}, and a graph is captured on one device"
    elif model.device.type not in RUNNERS:
        reason = f"the model is on {devices[0]}, and CUDA graphs need a GPU"
    elif not getattr(getattr(model, "hf_quantizer", None), "is_compileable", True):
        reason = "transformers says that its quantised weights do not work in a static graph"
    else:
        reason = why_not_captured(model)
    if reason is not None:
        raise NotImplementedError(
            f"generate: `capture` must be False for this {type(model).__name__}, got True: {reason}. "
            "Patch it without capture; static=True lets generate compile where that is possible."
        )


def key_of(model: PreTrainedModel, cache: KVQuantCache, inputs: Mapping[str, Any]) -> Hashable:
    """Everything that is fixed in a captured step: if any of it changes, another step is captured."""
    return (
        fingerprint(model),
        model.training,
        # A tensor created in inference mode cannot be written outside of it.
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled(model.device.type) and torch.get_autocast_dtype(model.device.type),
        what_steps_use(cache),
        signature_of(inputs),
    )


def what_steps_use(cache: KVQuantCache) -> Hashable:
    """The buffers and the states of a cache, and whether its steps make a split plan."""
    return (
        tuple(storage.addresses() for storage in cache.storages),
        tuple((state.data_ptr(), state.shape, state.dtype) for state in cache.states),
        cache.notes.is_uneven,
    )


def signature_of(value: Any) -> Hashable:
    """What is fixed of a captured forward's inputs: everything but the numbers in tensors, and the cache."""
    if isinstance(value, Tensor):
        return value.shape, value.dtype, value.device
    if isinstance(value, Mapping):
        return tuple((name, signature_of(item)) for name, item in value.items())
    if isinstance(value, Cache):
        return "cache"
    return repr(value)


# --- steps ------------------------------------------------------------------------------------------------------------


class StepRunner(abc.ABC):
    """Runs one function of static tensors many times: as usual the first time, then recorded, then replayed.

    The first run is an ordinary step, so nothing that it writes has to be undone. It lets libraries set up what they
    cannot set up while being recorded.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._has_run = False
        self._replay: Callable[[], None] | None = None
        self._num_tokens = 0  # that a replay appends
        self._result: Any = None

    def run(self, step: Callable[[], Any], cache: KVQuantCache) -> Any:
        """Run a step, which appends tokens to the cache, on the current stream. A recorded one is not called again.

        Returns:
            The result of the step. The next run overwrites its tensors.

        Raises:
            NotCapturable: The step cannot be recorded. The cache is as it was before the step.
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
                cache.note_replayed(self._num_tokens)
            self._replay()
        except BaseException:
            cache.ask_device()  # which has run all of the graph or nothing
            raise
        return self._result

    def _recorded(self, step: Callable[[], Any], cache: KVQuantCache) -> tuple[Callable[[], None], Any]:
        length = cache.storages[0].length
        try:
            with no_collection():
                recorded = self._record(step)
            self._num_tokens = cache.storages[0].length - length
            return recorded
        except BaseException as error:
            cache.forget_capture(length)
            if not isinstance(error, Exception):
                raise
            raise NotCapturable(
                "generate: `capture` must be False for this model, got True: its decode step cannot be captured as a "
                "CUDA graph, probably because it waits for the device. Pass static=True instead, and generate compiles."
            ) from error

    @abc.abstractmethod
    def _run_once(self, step: Callable[[], Any]) -> Any:
        """Run the step as usual, on the stream that will record it."""

    @abc.abstractmethod
    def _record(self, step: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        """Record the step without running it. Returns a function that replays it, and the step's result."""


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """Keep Python from collecting reference cycles. One may hold a CUDA graph, and freeing it would end a recording."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class CudaGraph(StepRunner):
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
        with capturing(graph, torch.cuda.graph_pool_handle(), self._stream), self._prefetch.recorded():
            result = step()
        return graph.replay, result


@contextlib.contextmanager
def capturing(graph: torch.cuda.CUDAGraph, pool: Any, stream: torch.cuda.Stream) -> Iterator[None]:
    """Capture what this thread does. Other threads may go on using the GPU.

    Undoes a capture that fails. If the step has waited for the device, torch 2.11 leaves behind:

    - The stream of the capture is the current one.
    - The allocator takes the capture for unfinished. `torch.cuda.empty_cache` would no longer free anything, and the
      process would abort when it drops a `torch.cuda.MemPool`, as continuous batching has one.
    - The random number generator is in capture mode, where it raises. A capture that succeeds resets it.

    Args:
        graph: New.
        pool: The handle of its memory pool, as in `torch.cuda.graph`.
        stream: To be captured.
    """
    outside = torch.cuda.current_stream(stream.device)
    begin = functools.partial(torch.cuda.graph, stream=stream, capture_error_mode="thread_local")
    try:
        with begin(graph, pool):
            yield
    except BaseException:
        torch.cuda.set_stream(outside)
        graph.reset()
        with contextlib.suppress(RuntimeError):  # the capture has ended, since it failed in another way
            torch._C._cuda_endAllocateToPool(stream.device.index, pool)
            torch._C._cuda_releasePool(stream.device.index, pool)
        with begin(torch.cuda.CUDAGraph()):
            torch.zeros(1, device=stream.device)
        raise


# The runners of captured steps, by device type. Other devices have no graphs.
RUNNERS: dict[str, type[StepRunner]] = {"cuda": CudaGraph}


class CapturedStep(abc.ABC):
    """A forward over static inputs, followed by `_finish`.

    `inputs` go to the model's forward, for a few new tokens. Tensors are copied, and caches left out.
    """

    def __init__(self, inputs: Mapping[str, Any], device: torch.device) -> None:
        without_cache = {name: value for name, value in inputs.items() if not isinstance(value, Cache)}
        self.inputs = map_tensors(torch.clone, without_cache)
        self._runner = RUNNERS[device.type](device)

    def run(self, model: PreTrainedModel, cache: KVQuantCache) -> Any:
        """Append the tokens to the cache. Returns what `_finish` returns, as `StepRunner.run` does."""

        def step() -> Any:
            with fused(model):
                output = model(**self.inputs, **with_cache(cache))
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


# --- the forward ------------------------------------------------------------------------------------------------------


class _CapturedForward(CapturedStep):
    def _finish(self, output: Any, cache: KVQuantCache) -> tuple[type[ModelOutput], dict[str, Any], list[str]]:
        items = {name: item for name, item in output.items() if item is not cache}
        return type(output), items, [name for name in output if name not in items]

    def forward(self, model: PreTrainedModel, cache: KVQuantCache, inputs: Mapping[str, Any]) -> ModelOutput:
        fill(self.inputs, inputs)
        output_type, items, cache_names = self.run(model, cache)
        # Callers may keep the output, and the next replay overwrites it.
        output: ModelOutput = output_type(**map_tensors(torch.clone, items), **dict.fromkeys(cache_names, cache))
        return output


class Forward:
    """Runs the decode steps of one `generate`: transformers' loops call it in place of the compiled model.

    On a model patched with `capture=True`, it is what `get_compiled_call` returns. Other caches than captured ones get
    the compiled model, with `compile_config`.

    Forwards over up to `MOST_NEW_TOKENS` new tokens are captured too if `are_chunks_captured`, one for each number of
    tokens. Prompts that come in chunks are not: each number of tokens would occur once.
    """

    def __init__(self, model: PreTrainedModel, compile_config: Any, *, are_chunks_captured: bool = False) -> None:
        self._model = model
        self._compile_config = compile_config
        self._are_chunks_captured = are_chunks_captured
        self._most_new_tokens = MOST_NEW_TOKENS if are_chunks_captured else 1
        self._kept = Captures(self._most_new_tokens)

    def __call__(self, **inputs: Any) -> Any:
        """Run the forward. See `PreTrainedModel.forward` for arguments and results."""
        cache = inputs.get(CACHE)
        if not is_captured(cache):
            return type(self._model).get_compiled_call(self._model, self._compile_config)(**inputs)
        input_ids = inputs.get("input_ids")
        num_tokens = 0 if input_ids is None else input_ids.shape[1]
        is_served = 1 <= num_tokens <= self._most_new_tokens
        if not is_served or any(storage.is_empty for storage in cache.storages):
            return self._model(**inputs)  # a chunk of the prompt
        for storage in cache.storages:
            storage.check_room(num_tokens)
        # Weights do not move within one call of `generate`, so they are checked only once.
        quick_key = (what_steps_use(cache), signature_of(inputs))
        step: _CapturedForward = self._kept.get(quick_key, lambda: self._captured(num_tokens, cache, inputs))
        try:
            return step.forward(self._model, cache, inputs)
        except NotCapturable:
            if not self._are_chunks_captured:
                raise
            # Experts that wait for the device do not where transformers has optimised the model for decoding, which its
            # assisted loop does since 5.24.
            _log_proposals_uncaptured(type(self._model).__name__)
            self._most_new_tokens = 0
            return self._model(**inputs)

    def _captured(self, num_tokens: int, cache: KVQuantCache, inputs: Mapping[str, Any]) -> Any:
        """The captured forward for these inputs, new or from an earlier call."""
        notes = notes_on(self._model)
        captures = notes.captures if num_tokens == 1 else notes.chunk_captures
        key = ("forward", key_of(self._model, cache, inputs))
        return captures.get(key, lambda: _CapturedForward(inputs, self._model.device))


@functools.cache
def _log_proposals_uncaptured(model: str) -> None:
    logger.warning("generate captures no forward of %s over proposals, since one failed. Correct, slower.", model)


@functools.cache
def log_slower_loop(reason: str) -> None:
    """Log once per reason that transformers' own loop runs the captured step."""
    logger.warning("generate waits for the device after every captured step: %s. Correct, slower.", reason)
