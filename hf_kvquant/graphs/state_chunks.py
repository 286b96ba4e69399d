"""Many tokens of layers with states in one call for all sequences of a step, while functions are replaced.

For prompts, models of Qwen3-Next's kind call two functions of their module: a causal convolution and the gated delta
rule in chunks. PyTorch's versions take sequences of one length and start each from a copy of its state, so a step with
many prompts and decoding requests would call them for each length, with some twenty kernels a chunk. `fused` puts
kernels of ours in place of both (csrc/cuda/fused/state_chunks.cu), which take the tokens of all sequences in one row
and read and write states in the slots of a cache. A model gets a `SequenceStates` in place of a state, and a
`SequenceInputs` in place of a convolution's inputs, which these functions alone understand. Everything else, above all
the projections, then runs once for all tokens. Prompts of `generate`, which are tensors, go through the same kernels.

A trial compares results with those of the model's own function, sequence by sequence. They may differ by what rounding
to the dtype of the vectors explains: fla's version rounds to it between its products, ours only at the end.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from .._ops import ops as torch_ops
from ..spec.state_steps import stored
from .gates import computed
from .state_steps import SlotStates, conv_draws, delta_draws, is_known_delta
from .trials import Chooser, Function, is_close

CONV_CHUNKS, DELTA_CHUNKS = "causal_conv1d_fn", "torch_chunk_gated_delta_rule"
# Options of the convolution that change its result, and that the kernel does not have (causal-conv1d 1.5, fla 0.6).
# Models pass on others, which are not for it.
_OTHER_OPTIONS = frozenset(
    "seq_idx initial_states return_final_states final_states_out residual initial_state output_final_state cu_seqlens "
    "cu_seq_lens_q".split()
)
# Tokens of a trial and its sequences: one has a single token, and one more than a chunk of 64.
_TRIED_TOKENS, _TRIED = 150, 3
# What the kernels take; see csrc/args.cpp.
_DTYPES, _MOST_KEY_DIM, _MOST_TOKENS = (torch.float16, torch.bfloat16), 128, 2**20
# Shared memory that it needs for float16, whose vectors become two numbers each; 8.6 and 8.9 have less.
_BYTES_OF_HALVES = 128 * 1024
_HOW = "one kernel for all sequences"  # in the log


@dataclasses.dataclass(frozen=True)
class Sequences:
    """The sequences of a step, whose tokens lie in one row. Tokens behind the last are padding.

    Attributes:
        ends: On the host: 0, and where each sequence ends.
        begins: The same on the device, `[sequences + 1]` int64.
        read: `[sequences]` int64: the slots from which their states are read, of zeros for sequences without a past.
        write: Likewise, to which they are written.
    """

    ends: Sequence[int]
    begins: Tensor
    read: Tensor
    write: Tensor

    @classmethod
    def of(cls, lengths: Sequence[int], read: Sequence[int], write: Sequence[int], device: torch.device) -> Sequences:
        """From the tokens and slots of each."""
        ends = [0, *itertools.accumulate(lengths)]
        begins, *slots = torch.tensor([ends, [*read, 0], [*write, 0]], dtype=torch.int64, device=device)
        return cls(ends, begins, *(each[:-1] for each in slots))

    @property
    def tokens(self) -> Iterator[slice]:
        """Where the tokens of each are."""
        return (slice(begin, end) for begin, end in itertools.pairwise(self.ends))


@dataclasses.dataclass(frozen=True)
class SequenceStates(SlotStates):
    """One state of all sequences, where it lies in the slots of a cache.

    Attributes:
        sequences: Whose `read` and `write` are those of the states.
    """

    sequences: Sequences

    @classmethod
    def of(cls, plane: Tensor, sequences: Sequences) -> SequenceStates:
        """The states of a plane, `[slots, …]`."""
        return cls(plane, sequences.read, sequences.write, sequences)


@dataclasses.dataclass(frozen=True)
class SequenceInputs:
    """What a convolution takes in, and the state with the inputs before.

    Attributes:
        x: `[1, channels, tokens]`.
        states: Of the convolution.
    """

    x: Tensor
    states: SequenceStates


def serves_chunks(state: Tensor, is_conv: bool, dtype: torch.dtype) -> bool:
    """Whether there is a kernel for a plane of states, `[slots, …]`, and vectors of this dtype."""
    if is_conv or not state.is_cuda:  # PyTorch's version has no limits
        return True
    key_dim, value_dim = state.shape[2:]
    gpu: Any = torch.cuda.get_device_properties(state.device)
    has_room = dtype is not torch.float16 or gpu.shared_memory_per_block_optin >= _BYTES_OF_HALVES
    return dtype in _DTYPES and key_dim % 8 == 0 and key_dim <= _MOST_KEY_DIM and value_dim % 2 == 0 and has_room


def conv_chunks(
    chooser: Chooser,
    original: Function,
    thread: int,
    hidden_states: Any,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **kwargs: Any,
) -> Any:
    """The replaced `causal_conv1d_fn`, for the tokens of a prompt.

    Args:
        chooser: Of the model.
        original: What is replaced.
        thread: Whose step this is.
        hidden_states: `[batch, channels, tokens]`, or a `SequenceInputs`.
        weight: `[channels, width]`.
        bias: `[channels]`, if there is one.
        activation: "silu", or `None`.
        **kwargs: Anything else, which only the original knows.

    Returns:
        `[batch, channels, tokens]`; of a `SequenceInputs`, `[1, channels, tokens]`.
    """
    options: dict[str, Any] = {"weight": weight, "bias": bias, "activation": activation, **kwargs}
    if isinstance(hidden_states, SequenceInputs):
        x, states = hidden_states.x, hidden_states.states
        if _does_conv(chooser, original, thread, x, states, options):
            return _conv_kernel(options, x, states.plane, states.sequences)
        out, new = _conv_by_sequence(original, options, x, states.gathered(), states.sequences)
        states.store(new)
        return out
    if _is_prompt(hidden_states, hidden_states.shape[-1]):
        batch, channels, tokens = hidden_states.shape
        x = _in_a_row(hidden_states.transpose(1, 2)).transpose(1, 2)
        before = hidden_states.new_zeros(batch, channels, max(1, weight.shape[-1] - 1))
        states = _states_of_prompts(before, tokens)
        if _does_conv(chooser, original, thread, x, states, options):
            out = _conv_kernel(options, x, states.plane, states.sequences)
            return out[0].unflatten(1, (batch, tokens)).transpose(0, 1)
    return original(hidden_states, **options)


def _does_conv(
    chooser: Chooser, original: Function, thread: int, x: Tensor, states: SequenceStates, options: dict[str, Any]
) -> bool:
    """Whether the kernel computes what a convolution does with `[1, channels, tokens]`."""
    is_known = options["activation"] in (None, "silu") and not options.keys() & _OTHER_OPTIONS
    if not is_known or threading.get_ident() != thread:
        return False
    few, weight = x[:, :, :_TRIED_TOKENS], options["weight"]
    chosen = chooser.choose(
        CONV_CHUNKS,
        (original, options["activation"], options["bias"] is None),
        (few[0], states.plane[:1], weight),
        functools.partial(_tried, functools.partial(_conv_by_sequence, original, options), 2),
        {_HOW: functools.partial(_tried_in_place, functools.partial(_conv_kernel, options), 2)},
        inputs=lambda: (few, states.gathered(1).repeat(_TRIED, 1, 1)),
        draws=conv_draws,
        is_same=is_close,
    )
    return chosen is not None


def _conv_kernel(options: dict[str, Any], x: Tensor, plane: Tensor, sequences: Sequences) -> Tensor:
    has_silu, where = options["activation"] == "silu", (sequences.begins, sequences.read, sequences.write)
    out: Tensor = torch_ops.conv_chunks(x, plane, options["weight"], options["bias"], has_silu, *where)
    return out.transpose(1, 2)


def _conv_by_sequence(
    original: Function, options: dict[str, Any], x: Tensor, states: Tensor, sequences: Sequences
) -> tuple[Tensor, Tensor]:
    """What a model's own convolution gives for each sequence, and the new states."""
    out, new = torch.zeros_like(x), []
    for tokens, state in zip(sequences.tokens, states, strict=True):
        seen = torch.cat((state.unsqueeze(0), x[:, :, tokens].to(state.dtype)), dim=-1)
        count = tokens.stop - tokens.start
        out[:, :, tokens] = original(seen, **options)[:, :, seen.shape[-1] - count :]
        new.append(seen[:, :, count:])
    return out, torch.cat(new)


def delta_chunks(
    chooser: Chooser,
    original: Function,
    thread: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    initial_state: Any = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **kwargs: Any,
) -> Any:
    """The replaced `torch_chunk_gated_delta_rule`, for the tokens of a prompt.

    Args:
        chooser: Of the model.
        original: What is replaced.
        thread: Whose step this is.
        query: `[batch, tokens, num_k_heads, key_dim]`.
        key: Like `query`.
        value: `[batch, tokens, num_heads, value_dim]`.
        g: `[batch, tokens, num_heads]`: logarithms of decays. May be a `Gate`.
        beta: Like `g`.
        initial_state: `[batch, num_heads, key_dim, value_dim]`, `None` for zeros, or a `SequenceStates`.
        output_final_state: Whether the new states are returned.
        use_qk_l2norm_in_kernel: Whether queries and keys are normalised first.
        **kwargs: Others, which may change nothing.

    Returns:
        `[batch, tokens, num_heads, value_dim]`, and the new states. If they came in slots, they are there already.
    """
    normalizes, vectors = use_qk_l2norm_in_kernel, (query, key, value, *computed(chooser, g, beta))
    *_, g, beta = vectors
    options = {"output_final_state": output_final_state, "use_qk_l2norm_in_kernel": normalizes, **kwargs}
    if isinstance(initial_state, SequenceStates):
        states = initial_state
        if _does_delta(chooser, original, thread, vectors, states, options):
            return _delta_kernel(normalizes, *vectors, states.plane, states.sequences), states
        out, new = _delta_by_sequence(original, options, *vectors, states.gathered(), states.sequences)
        states.store(new)
        return out, states
    if _is_prompt(query, query.shape[1]):
        batch, tokens = query.shape[:2]
        before = value.new_zeros((batch, value.shape[2], query.shape[3], value.shape[3]), dtype=torch.float32)
        if initial_state is not None:
            before.copy_(initial_state)
        states = _states_of_prompts(before, tokens)
        rows = [None if x is None else _in_a_row(x) for x in vectors]
        is_served = serves_chunks(before, False, query.dtype)
        if is_served and _does_delta(chooser, original, thread, rows, states, options):
            out = _delta_kernel(normalizes, *rows, before, states.sequences)
            return out[0].unflatten(0, (batch, tokens)), before
    return original(query, key, value, g=g, beta=beta, initial_state=initial_state, **options)


def _does_delta(
    chooser: Chooser,
    original: Function,
    thread: int,
    vectors: Sequence[Tensor | None],
    states: SequenceStates,
    options: dict[str, Any],
) -> bool:
    """Whether the kernel computes what a function does with query, key, value, g and beta of tokens in one row."""
    few = [x[:, :_TRIED_TOKENS] for x in vectors if x is not None]
    is_known = is_known_delta(options["output_final_state"], options) and len(few) == len(vectors)
    if not is_known or threading.get_ident() != thread:
        return False
    normalizes = options["use_qk_l2norm_in_kernel"]
    chosen = chooser.choose(
        DELTA_CHUNKS,
        (original, normalizes),
        (*(x[0] for x in few), states.plane[:1]),
        functools.partial(_tried, functools.partial(_delta_by_sequence, original, options), 1),
        {_HOW: functools.partial(_tried_in_place, functools.partial(_delta_kernel, normalizes), 1)},
        inputs=lambda: (*few, states.gathered(1).repeat(_TRIED, 1, 1, 1)),
        draws=delta_draws,
        is_same=functools.partial(is_close, least=torch.finfo(few[0].dtype).eps),
    )
    return chosen is not None


def _delta_kernel(normalizes: bool, *inputs: Any) -> Tensor:
    """Of query, key, value, g, beta, the plane of states and the sequences."""
    *vectors, plane, sequences = inputs
    where = sequences.begins, sequences.read, sequences.write
    out: Tensor = torch_ops.delta_chunks(*vectors, plane, normalizes, *where)
    return out


def _delta_by_sequence(original: Function, options: dict[str, Any], *inputs: Any) -> tuple[Tensor, Tensor]:
    """What a model's own function gives for each sequence, and the new states, of inputs as `_delta_kernel`."""
    *vectors, states, sequences = inputs
    out, new = torch.zeros_like(vectors[2], dtype=vectors[0].dtype), states.clone()
    for i, tokens in enumerate(sequences.tokens):
        if tokens.start < tokens.stop:
            query, key, value, g, beta = (x if x is None else x[:, tokens] for x in vectors)
            state = states[i : i + 1]
            out[:, tokens], final = original(query, key, value, g=g, beta=beta, initial_state=state, **options)
            new[i] = stored(final[0], new.dtype)
    return out, new


def _is_prompt(x: Tensor, num_tokens: int) -> bool:
    """Whether a tensor of `[batch, …]` is that of prompts which the kernels take. On a CPU, they would only be slow."""
    return x.is_cuda and 1 < num_tokens <= _MOST_TOKENS // len(x)


def _in_a_row(x: Tensor) -> Tensor:
    """`[batch, tokens, …]` as `[1, batch * tokens, …]`."""
    return x.flatten(0, 1).unsqueeze(0)


def _states_of_prompts(states: Tensor, num_tokens: int) -> SequenceStates:
    """The states `[batch, …]` of prompts with `num_tokens` each."""
    slots = range(len(states))
    return SequenceStates.of(states, Sequences.of([num_tokens] * len(states), slots, slots, states.device))


def _tried(function: Callable[..., Any], axis: int, *inputs: Tensor) -> Any:
    """The results of a function for `_TRIED` sequences: tokens on an axis of the first input, their states last."""
    count = inputs[0].shape[axis]
    slots, short = range(_TRIED), (count - 1) // 4
    return function(*inputs, Sequences.of((1, short, count - 1 - short), slots, slots, inputs[0].device))


def _tried_in_place(function: Callable[..., Tensor], axis: int, *inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Like `_tried`, of a function that changes states in place."""
    *others, states = inputs
    states = states.clone()
    return _tried(function, axis, *others, states), states


REPLACED: dict[str, Callable[..., Any]] = {CONV_CHUNKS: conv_chunks, DELTA_CHUNKS: delta_chunks}
