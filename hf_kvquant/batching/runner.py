"""`Runner`: says before each forward which requests attend together, and captures decode steps as CUDA graphs.

In a decode step each request has one new token. Then one group holds all requests, and what it needs is in tensors of
transformers that stay where they are: the graph reads a new page table and new lengths at each replay. Other steps have
prompts. The host splits these into groups, and they are not captured.
"""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching.cache_allocators import FULL_ATTENTION
from transformers.generation.continuous_batching.initialization import resolve_using_hints
from transformers.generation.continuous_batching.input_outputs import ContinuousBatchingAsyncIOs
from transformers.generation.continuous_batching.model_runner import ModelRunner
from transformers.generation.continuous_batching.requests import FutureRequestState, RequestState
from transformers.generation.continuous_batching.utils import (
    WorkloadHints,
    memory_pool_context,
    pad_to_interval,
    stream_context,
)

from ..graphs.capture import capturing, no_collection
from ..graphs.fusion import fused
from ..graphs.state_chunks import Sequences
from ..models.rope import has_position_table
from ..models.text_config import context_of
from .batch import Group, Request, groups_of, past_of
from .grammars import Grammars
from .paged_cache import PagedCache
from .sampling import choose, sampling_of

logger = logging.getLogger(__name__)

# Of a model whose config does not say how many it has.
DEFAULT_POSITIONS = 2**17
# Numbers of tokens with prompts, and of requests without, that steps are padded to multiples of.
TOKEN_INTERVAL = 256
REQUEST_INTERVAL = 64
SCORES = "_hf_kvquant_scores"  # of a captured step: the attribute that has its logits


def settle_graphs(batching: ContinuousBatchingConfig, device: torch.device, *, can_capture: bool = True) -> None:
    """Decide which steps are captured and whether the host prepares a step while the one before it runs.

    transformers would decide by its own attention functions. On GPUs, decode steps are captured unless the user says
    otherwise, and where they are, batching is asynchronous, since the host would be slower than the graph.

    Args:
        batching: Changed in place.
        device: Of the model.
        can_capture: Whether the model's weights are divided among processes, if at all, in a way that graphs serve.
    """
    _, is_wanted = batching.cuda_graph_booleans
    is_captured = device.type == "cuda" and can_capture and (batching.use_cuda_graph is None or is_wanted)
    batching.use_cuda_graph = False, is_captured
    if batching.use_async_batching is None:
        batching.use_async_batching = is_captured


def max_blocks_of(
    model: PreTrainedModel, batching: ContinuousBatchingConfig, workload_hints: WorkloadHints | None
) -> int:
    """Pages of the longest request that a captured step has room for; 0 if no steps are captured.

    What the user sets, or else what the longest announced request needs, or else what the model has positions for. At
    least two if the model has positions for two, since transformers warms up with requests of a page and a token.
    """
    if not any(batching.cuda_graph_booleans):
        return 0
    hinted = copy.copy(batching)
    resolve_using_hints(hinted, workload_hints)
    pages_of_model = -(-(context_of(model) or DEFAULT_POSITIONS) // batching.page_size)
    wanted = pages_of_model if hinted.max_blocks_per_request is None else hinted.max_blocks_per_request
    return max(wanted, min(2, pages_of_model)) if wanted else 0


def inputs_of(inputs: Any) -> list[Any]:
    """All `ContinuousBatchingIOs` of a processor: on host and device for each of two steps, or a single one."""
    if not isinstance(inputs, ContinuousBatchingAsyncIOs):
        return [inputs]
    return [each for pair in inputs.io_pairs for each in (pair.host_io, pair.device_io)]


class _Borrowed:
    """The memory of a tensor of a captured step, which every replay writes, without a claim to it.

    Graphs share a memory pool. A tensor that is kept would take its memory from all others: gigabytes for the logits of
    all sizes of steps. It may be read until the next replay, on the same stream.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._device = tensor.device
        self.__cuda_array_interface__ = tensor.__cuda_array_interface__

    def tensor(self) -> Tensor:
        """A tensor of this memory."""
        return torch.as_tensor(self, device=self._device)


class Runner(ModelRunner):
    """A `ModelRunner` over pages of codes.

    Attributes:
        grammars: For requests whose answers must match one; `None` where nobody asks for that.
    """

    cache: PagedCache
    grammars: Grammars | None = None

    @property
    def max_requests(self) -> int:
        """Of a step."""
        most: Any = self.cb_config.max_requests_per_batch  # optional for users, set when there is a runner
        return int(most)

    def maybe_pad_inputs(self, num_q_tokens: int, max_kv_read: int, use_decode_fast_path: bool) -> tuple[int, int]:
        """Pad the requests of steps that are captured, and the tokens of others.

        transformers would pad the requests of all steps, and compute logits for the padding. Tokens are padded so that
        few sizes occur, because `fused` tries its kernels on each. From some 128 requests on, steps are limited by
        arithmetic, no longer by reading weights. So more are padded to multiples of 64, not to powers of two as
        transformers pads them: 3 % more tokens a second in workload W1 of `evals/bench_batching.py` (H200).
        """
        self.pad_inputs = use_decode_fast_path and self.use_cuda_graph_decode
        if self.pad_inputs and num_q_tokens > 2 * REQUEST_INTERVAL:
            return pad_to_interval(num_q_tokens, REQUEST_INTERVAL, self.max_requests), 0
        if self.use_cuda_graph_decode and not use_decode_fast_path:
            return pad_to_interval(num_q_tokens, TOKEN_INTERVAL, self.cache.max_batch_tokens), max_kv_read
        padded: tuple[int, int] = super().maybe_pad_inputs(num_q_tokens, max_kv_read, use_decode_fast_path)
        return padded

    def run_one_warmup(self, model: Any, num_q_tokens: int, max_kv_read: int | None) -> float:
        """See `ModelRunner`. It stays within a table of positions: behind it, a GPU ends the process (5.24).

        A decode step has the position behind a page. Where there is none, its first steps capture graphs.
        """
        most = context_of(model)
        if most is not None and has_position_table(model):
            if max_kv_read is None:
                if self.cb_config.page_size >= most:
                    return 0.0
            else:
                num_q_tokens = min(num_q_tokens, most)
                max_kv_read = min(max_kv_read, most - num_q_tokens)
        seconds: float = super().run_one_warmup(model, num_q_tokens, max_kv_read)
        return seconds

    @torch.no_grad()
    def warmup(self, model: nn.Module) -> None:
        """See `ModelRunner`. Also captures what `maybe_pad_inputs` makes between powers of two."""
        super().warmup(model)
        if not self.use_cuda_graph_decode or self.cache.max_decode_fast_path_length <= 0:
            return
        io: Any = self.inputs_and_outputs
        is_paired = isinstance(io, ContinuousBatchingAsyncIOs)
        for _ in range(2 if is_paired else 1):
            for num_requests in range(3 * REQUEST_INTERVAL, self.max_requests, REQUEST_INTERVAL):
                self.run_one_warmup(model=model, num_q_tokens=num_requests, max_kv_read=None)
            if is_paired:
                io.swap_io_pairs()
        self.cache.reset()

    def _states(self) -> list[FutureRequestState]:
        """The requests of the step that comes next, in the order of their tokens."""
        io: Any = self.inputs_and_outputs
        if isinstance(io, ContinuousBatchingAsyncIOs):
            io = io.io_pairs[io.current_pair].host_io
        states: list[FutureRequestState] = io.requests_in_batch
        return states

    def _get_forward_fn(self, use_block_table: bool) -> tuple[Callable[..., None], bool]:
        """The forward, and whether it is captured.

        A prompt of one token is not: its token has nothing to attend to. Nor is the first part of a long text with RoPE
        factors of its own, if that part is one token.
        """
        forward, is_captured = super()._get_forward_fn(use_block_table)
        states, rope = self._states(), self.cache.rope
        is_plain = all(past_of(state) > 0 for state in states) and (rope is None or rope.is_told_by_positions(states))
        return forward, is_captured and is_plain

    def _capture_graph(self, forward_fn: Callable[..., None], compute_stream: Any, *args: Any) -> None:
        """See `ModelRunner`. If a step cannot be captured, it and all later ones run as they are.

        Some models wait for the device in a step, such as mixtures of experts in float32 (torch 2.11). A step runs once
        before it is captured, so its result is there.
        """
        with stream_context(compute_stream), memory_pool_context(self.mem_pool):
            forward_fn(*args)
        graph = torch.cuda.CUDAGraph()
        try:
            with no_collection(), capturing(graph, self.graph_pool_id, compute_stream):
                forward_fn(*args)
        except Exception as error:
            self.use_cuda_graph_decode = False
            self.cb_config.use_cuda_graph = False, False
            name, reason = type(args[0]).__name__, error.__context__ or error
            logger.warning("continuous batching captures no step of %s. Correct, slower. Reason: %s", name, reason)
        else:
            setattr(graph, SCORES, self._captured.tensor())
            self.inputs_and_outputs.set_graph(graph)

    def forget_graphs(self) -> None:
        """Free all captured steps. The next step of each size is captured anew."""
        for each in inputs_of(self.inputs_and_outputs):
            each.graphs = type(each.graphs)()

    def compute_batch(self, model: nn.Module, batch_data: dict[str, Any]) -> None:
        """See `ModelRunner`. Its stream waits for the inputs that the host has written on another one.

        Without asynchronous batching, transformers writes them on the current stream, and nothing else waits for it
        (5.23): the last ones, which are the lengths, came too late now and then.
        """
        io: Any = self.inputs_and_outputs
        tails, snapshots = self.cache.tails, self.cache.snapshots
        if tails is not None and tails.sinks is not None:
            tails.sinks.stream = io.compute_stream
        if snapshots is not None:
            snapshots.stream = io.compute_stream
        if io.compute_stream is not None and not isinstance(io, ContinuousBatchingAsyncIOs):
            io.compute_stream.wait_stream(torch.cuda.current_stream(io.compute_stream.device))
        graph = self._graph_to_follow()
        super().compute_batch(model, batch_data)
        if graph is not None:
            with stream_context(io.compute_stream):
                choose(getattr(graph, SCORES), io.output_ids[0], self._choosing(), self.grammars)
        if snapshots is not None:  # before the next step moves states on, which may be launched before this one is over
            for each in self._states():
                snapshots.take(each.state.request_id, each.state.position_offset)

    def _graph_to_follow(self) -> Any:
        """The captured step that comes next if some of its requests choose their tokens after it; else `None`."""
        io: Any = self.inputs_and_outputs
        if not any(sampling_of(each.state) is not None for each in self._states()):
            return None
        _, is_captured = self._get_forward_fn(io.use_block_table)
        return io.get_graph() if is_captured else None

    def _choosing(self) -> list[RequestState]:
        return [each.state for each in self._states() if each.has_new_token]

    def _sample(self, scores: Tensor, output_ids: Tensor) -> None:
        """See `ModelRunner`. Requests that sample choose after it: in a captured step, after each replay."""
        super()._sample(scores, output_ids)
        if scores.is_cuda and torch.cuda.is_current_stream_capturing():
            self._captured = _Borrowed(scores[0])
        else:
            choose(scores[0], output_ids[0], self._choosing(), self.grammars)

    def _forward_process_and_sample(
        self,
        model: nn.Module,
        batch_data: dict[str, Any],
        carry_over_ids: Tensor,
        prev_output_ids: Tensor,
        output_ids: Tensor,
    ) -> None:
        table, states = batch_data["block_table"], self._states()
        if not any(each.query_length for each in states):
            return  # prompts of one token that are to be forked, which models do not take
        if table is not None and all(past_of(state) > 0 for state in states):
            lengths = batch_data["cu_seq_lens_k"][FULL_ATTENTION].diff()
            groups, self.cache.sequences = [self._decode_group(table, lengths)], None
        else:
            requests = [self._request_of(each) for each in states if each.query_length]
            groups = groups_of(requests, torch.device(self.cache.device))
            self.cache.sequences = self._sequences_of(requests)
        if self.cache.rope is not None:
            self.cache.rope.prepare(states, torch.device(self.cache.device))
        self.cache.groups = [self.cache.planned(group) for group in groups]
        with fused(model) if self.use_cuda_graph_decode else contextlib.nullcontext():
            super()._forward_process_and_sample(model, batch_data, carry_over_ids, prev_output_ids, output_ids)

    def _decode_group(self, table: Tensor, lengths: Tensor) -> Group:
        """All requests of a decode step, from transformers' block table. It is on the device, and so a graph reads it.

        Args:
            table: `[allocators, requests, columns]` int32, with -1 for padding.
            lengths: `[requests]` int32: tokens held, the new ones included.
        """
        read = write = None
        states = self.cache.states
        if states is not None:
            slots = table[states.index, :, 0].long()
            is_padding = slots < 0
            read = slots.masked_fill(is_padding, states.read_trash_slot)
            write = slots.masked_fill(is_padding, states.write_trash_slot)
        pages = table[self.cache.allocator.index]
        return Group(slice(0, len(lengths)), 1, pages, lengths, has_past=True, read_slots=read, write_slots=write)

    def _sequences_of(self, requests: Sequence[Request]) -> Sequences | None:
        """The requests of a step with prompts, for layers with a state: single tokens have better functions."""
        states = self.cache.states
        if states is None or all(request.q_len == 1 for request in requests):
            return None
        write = [request.slot for request in requests if request.slot is not None]
        pairs = zip(write, requests, strict=True)
        read = [slot if request.past else states.read_trash_slot for slot, request in pairs]
        return Sequences.of([request.q_len for request in requests], read, write, torch.device(self.cache.device))

    def _request_of(self, each: FutureRequestState) -> Request:
        name, states = each.state.request_id, self.cache.states
        slot = None if states is None else states.slot_of(name)
        return Request(past_of(each), each.query_length, self.cache.allocator.pages_of(name), slot)
