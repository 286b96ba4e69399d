"""One token of layers with states as one kernel each, while a decode step is captured: convolution and delta rule.

In transformers, models of Qwen3-Next's kind call two functions of their module for one token: a causal convolution and
the gated delta rule. PyTorch's versions are some thirty kernels, which pass over every state a dozen times. Those of
flash-linear-attention are quick, but need states side by side. `fused` puts kernels of ours in place of both
(csrc/cuda/fused/state_steps.cu), which read and write states where they lie: in continuous batching, the slots of a
cache. A model then gets a `SlotStates` in place of a state, which these functions alone understand.

Sums have another order than in either version, so results are not the same bits. A trial compares them with what the
model's own function gives, and if they differ by more than rounding can, that function stays.
"""

from __future__ import annotations

import dataclasses
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .._ops import ops as torch_ops
from ..models.layers import GATED_DELTA_RULE
from ..spec.state_steps import stored
from .gates import computed
from .trials import Chooser, Function, is_close

CONV, DELTA = "causal_conv1d_update", GATED_DELTA_RULE
# Options of the gated delta rule that change its result, and that the kernel does not have (fla 0.6).
_OTHER_OPTIONS = frozenset(
    "scale gk gv use_gate_in_kernel A_log dt_bias use_beta_sigmoid_in_kernel allow_neg_eigval state_v_first".split()
)
# A trial has no more sequences than these. PyTorch's versions hold several copies of all states, which may be
# gigabytes, and the number of sequences differs from one step of continuous batching to the next.
_TRIED = 4


@dataclasses.dataclass(frozen=True)
class SlotStates:
    """One state of a batch, where it lies in the slots of a cache.

    Attributes:
        plane: `[slots, …]`: of all slots.
        read: `[batch]` int64: the slots that the batch reads.
        write: Likewise, that it writes.
    """

    plane: Tensor
    read: Tensor
    write: Tensor

    def gathered(self, most: int | None = None) -> Tensor:
        """A copy, `[batch, …]`, or of the first `most` sequences."""
        return self.plane.index_select(0, self.read[:most])

    def store(self, states: Tensor) -> None:
        """Write `[batch, …]` to the slots."""
        self.plane.index_copy_(0, self.write, stored(states, self.plane.dtype))


def takes_slots(module: nn.Module, functions: Mapping[str, Function]) -> bool:
    """Whether a module calls these functions of ours, by name, in this thread's step: they take `SlotStates`."""
    namespace = vars(sys.modules[type(module).__module__])
    return all(
        getattr(namespace.get(name), "func", None) is function and namespace[name].args[2] == threading.get_ident()
        for name, function in functions.items()
    )


def conv_step(
    chooser: Chooser,
    original: Function,
    thread: int,
    hidden_states: Tensor,
    conv_state: Any,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **kwargs: Any,
) -> Any:
    """The replaced `causal_conv1d_update`. Threads other than `thread` get the original.

    Args:
        chooser: Of the model.
        original: What is replaced.
        thread: Whose step this is.
        hidden_states: `[batch, channels, tokens]`.
        conv_state: `[batch, channels, state_len]`, or a `SlotStates` of such. Changed in place.
        weight: `[channels, width]`.
        bias: `[channels]`, if there is one.
        activation: "silu", or `None`.
        **kwargs: Anything else, which only the original knows.
    """
    slots = conv_state if isinstance(conv_state, SlotStates) else None
    plane = conv_state if slots is None else slots.plane
    has_silu, is_known = activation == "silu", activation in (None, "silu") and not kwargs
    if threading.get_ident() == thread and is_known and hidden_states.shape[-1] == 1:

        def ours(x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
            state = state.clone()
            return torch_ops.conv_step(x, state, weight, bias, has_silu, None, None), state

        def theirs(x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
            state = state.clone()
            return original(x, state, weight, bias, activation), state

        few = hidden_states[:_TRIED]
        chosen = chooser.choose(
            CONV,
            (original, has_silu, bias is None),
            (few, plane[:1], weight),
            theirs,
            {"one kernel, in another order": ours},
            inputs=lambda: (few, plane[:_TRIED] if slots is None else slots.gathered(_TRIED)),
            draws=conv_draws,
            is_same=is_close,
        )
        if chosen is not None:
            read, write = (None, None) if slots is None else (slots.read, slots.write)
            return torch_ops.conv_step(hidden_states, plane, weight, bias, has_silu, read, write)
    state = plane if slots is None else slots.gathered()
    out = original(hidden_states, state, weight, bias, activation, **kwargs)
    if slots is not None:
        slots.store(state)
    return out


def delta_step(
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
    """The replaced `torch_recurrent_gated_delta_rule`. Threads other than `thread` get the original.

    Args:
        chooser: Of the model.
        original: What is replaced.
        thread: Whose step this is.
        query: `[batch, tokens, num_k_heads, key_dim]`.
        key: Like `query`.
        value: `[batch, tokens, num_heads, value_dim]`.
        g: `[batch, tokens, num_heads]`: logarithms of decays. May be a `Gate`.
        beta: Like `g`.
        initial_state: `[batch, num_heads, key_dim, value_dim]`, or a `SlotStates` of such.
        output_final_state: Whether the new states are returned.
        use_qk_l2norm_in_kernel: Whether queries and keys are normalised first.
        **kwargs: Others, which may change nothing.

    Returns:
        `[batch, tokens, num_heads, value_dim]`, and the new states. If they came in slots, they are there already.
    """
    slots = initial_state if isinstance(initial_state, SlotStates) else None
    plane = initial_state if slots is None else slots.plane
    is_known = is_known_delta(output_final_state, kwargs) and isinstance(plane, Tensor)
    is_known = is_known and threading.get_ident() == thread and query.shape[1] == 1
    g, beta = computed(chooser, g, beta)
    options = {"output_final_state": output_final_state, "use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel, **kwargs}
    if is_known and g is not None and beta is not None:

        def ours(*args: Tensor) -> tuple[Tensor, Tensor]:
            target = torch.empty_like(args[-1])
            return torch_ops.delta_step(*args, target, use_qk_l2norm_in_kernel, None, None), target

        def theirs(query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> Any:
            out, new = original(query, key, value, g=g, beta=beta, initial_state=state, **options)
            return out, stored(new, state.dtype)

        vectors = query, key, value, g, beta
        few = [each[:_TRIED] for each in vectors]
        chosen = chooser.choose(
            DELTA,
            (original, use_qk_l2norm_in_kernel),
            (*few, plane[:1]),
            theirs,
            {"one kernel, in another order": ours},
            inputs=lambda: (*few, plane[:_TRIED] if slots is None else slots.gathered(_TRIED)),
            draws=delta_draws,
            is_same=is_close,
        )
        if chosen is not None:
            if slots is None:
                return ours(*vectors, plane)
            where = use_qk_l2norm_in_kernel, slots.read, slots.write
            return torch_ops.delta_step(*vectors, plane, plane, *where), slots
    state = initial_state if slots is None else slots.gathered()
    out, new = original(query, key, value, g=g, beta=beta, initial_state=state, **options)
    if slots is None:
        return out, new
    slots.store(new)
    return out, slots


def conv_draws(x: Tensor, state: Tensor) -> Iterator[tuple[Tensor, ...]]:
    generator = torch.Generator(x.device).manual_seed(0)
    for magnitude in (1.0, 1e-3, 100.0):
        yield tuple(torch.empty_like(each).normal_(generator=generator).mul_(magnitude) for each in (x, state))


def is_known_delta(output_final_state: bool, options: Mapping[str, Any]) -> bool:
    """Whether the kernels compute what the gated delta rule does with these options."""
    return output_final_state and options.get("cu_seqlens") is None and not options.keys() & _OTHER_OPTIONS


def delta_draws(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Vectors and states of several magnitudes, with decays and betas as gates give them."""
    generator = torch.Generator(tensors[0].device).manual_seed(0)

    def drawn(like: Tensor) -> Tensor:
        return torch.empty_like(like, requires_grad=False).normal_(generator=generator)

    for magnitude in (1.0, 1e-2, 30.0):
        query, key, value, g, beta, state = map(drawn, tensors)
        yield query, key, value * magnitude, -g.square() * magnitude, beta.sigmoid(), state * magnitude


REPLACED: dict[str, Callable[..., Any]] = {CONV: conv_step, DELTA: delta_step}
