"""Layers with a state over a packed batch: their `forward` runs once for each group of requests.

A step of continuous batching has the tokens of all requests in one row, `[1, tokens]`. In transformers' own forward of
such a layer, a convolution and a recurrence would run from one request into the next: fla's kernels take the borders
between sequences, PyTorch's versions do not, and a cache can hand over one state alone (5.24). There is no contract for
more. So while a manager has the model, these modules have a `forward` of ours. It calls theirs for each group, as a
batch `[requests, tokens of each]`: decode steps as `[requests, 1]`, prompts one after the other unless they are equally
long. The cache that theirs gets then is one of transformers' own kind, with the states of these requests: copies, or
the slots themselves where a captured step has functions that take them (`SlotStates`). Where prompts have such
functions, too (`SequenceStates`), theirs runs once, for all tokens in one row.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache

from ..graphs.state_chunks import CONV_CHUNKS, DELTA_CHUNKS, serves_chunks
from ..graphs.state_chunks import REPLACED as CHUNKS
from ..graphs.state_steps import CONV, DELTA, takes_slots
from ..graphs.state_steps import REPLACED as STEPS
from ..upstream.releases import CACHE
from .batch import Group
from .paged_cache import OF_BATCHES, PagedCache
from .states import GroupLayer, SequencesLayer, StateLayout, StatePart

# Methods of transformers' caches that layers with a state call. All of them are told the layer.
OF_STATES = frozenset(
    "get_conv_state update_conv_state get_recurrent_state update_recurrent_state has_previous_state "
    "is_recording_past".split()
)


@dataclasses.dataclass(frozen=True)
class StateLayers:
    """The layers of a model that have a state.

    Attributes:
        layout: Of their states.
        modules: By index of the layer: what reads and writes its states.
        inputs: Of these modules: the hidden states that one of them got for one token, `[1, 1, hidden]`.
        why_not: What is in the way of calling them for each group, as the end of a sentence; `None` if nothing is.
    """

    layout: StateLayout
    modules: Mapping[int, nn.Module]
    inputs: Tensor | None
    why_not: str | None

    def why_not_at(self, indices: Sequence[int]) -> str | None:
        """`why_not`, or that the model asks for the states of other layers than these."""
        if sorted(self.modules) != list(indices):
            return f"asks its cache for the states of layers {sorted(self.modules)}, not of {list(indices)}"
        return self.why_not


class StateProbe:
    """Notes which modules ask a cache for states, while a model is looked at.

    Args:
        cache: Of transformers, empty. The states of one token are left in it.
    """

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self._running: list[tuple[nn.Module, tuple[Any, ...], dict[str, Any]]] = []
        self._modules: dict[int, nn.Module] = {}
        self._inputs: Tensor | None = None
        self._why_not: str | None = None

    @contextlib.contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """A `with` block around a forward of the model."""
        with contextlib.ExitStack() as stack:
            for module in model.modules():
                stack.enter_context(module.register_forward_pre_hook(self._begin, with_kwargs=True))
                stack.enter_context(module.register_forward_hook(self._end))
            yield

    def _begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._running.append((module, args, kwargs))

    def _end(self, module: nn.Module, args: tuple[Any, ...], out: Any) -> None:
        self._running.pop()

    def ask(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the cache, and note who does and for which layer."""
        method = getattr(self._cache, name)
        index = inspect.signature(method).bind(*args, **kwargs).arguments["layer_idx"]
        module, given, named = self._running[-1]
        hidden = given[0] if given else named.get("hidden_states")
        if self._modules.setdefault(index, module) is not module:
            self._why_not = f"asks for the states of layer {index} in several modules"
        elif CACHE not in named or not isinstance(hidden, Tensor) or getattr(module, "layer_idx", None) != index:
            self._why_not = f"calls its {type(module).__name__} without `hidden_states` or `{CACHE}` by name"
        self._inputs = hidden
        return method(*args, **kwargs)

    def note_attention(self) -> None:
        """Note a call of attention. No module that has a state may be running."""
        running = [module for module, _, _ in self._running]
        if any(module is each for each in self._modules.values() for module in running):
            self._why_not = "attends in a module that has a state, too"

    def found(self, state_dtype: torch.dtype | None = None) -> StateLayers:
        """What has been found, with recurrent states of this dtype; `None`: as the model makes them."""
        layers: dict[int, Any] = {index: self._cache.layers[index] for index in sorted(self._modules)}
        return StateLayers(StateLayout.of(layers, state_dtype), self._modules, self._inputs, self._why_not)


@torch.no_grad()
def why_not_grouped(layers: StateLayers) -> str | None:
    """Why modules cannot be called for each group, as the end of a sentence; `None` if they can.

    A prompt comes in chunks, so what they compute for two tokens must depend on every state that they were given.
    """
    assert layers.inputs is not None
    device, width = layers.inputs.device, layers.inputs.shape[-1]
    hidden = torch.arange(2 * width, device=device).sin().to(layers.inputs.dtype).view(1, 2, width)
    slots = torch.zeros(1, dtype=torch.int64, device=device)
    group = Group(slice(0, 2), 2, slots, slots, has_past=True, read_slots=slots, write_slots=slots)
    for index, module in layers.modules.items():
        parts = layers.layout.parts[index]
        outs = []
        for changed in (None, *parts):
            planes = [
                (part, torch.full((1, *part.shape), float(part is changed), dtype=part.dtype, device=device))
                for part in parts
            ]
            outs.append(module(hidden, **{CACHE: GroupLayer(planes, group).as_cache(index)}))
        if any(not isinstance(out, Tensor) or out.shape != hidden.shape for out in outs):
            return f"has a {type(module).__name__} that returns more than hidden states"
        if any(torch.equal(outs[0], out) for out in outs[1:]):
            return f"has a {type(module).__name__} that forgets its state between two chunks of a prompt"
    return None


def forward_of_state(module: Any, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Replaces the `forward` of a module with a state: see `forwards.Wrapper`.

    Args:
        module: Whose it is.
        forward: What it would call otherwise.
        *args: The hidden states, `[1, tokens, hidden]`, if they have no name.
        **kwargs: What else the module takes.

    Returns:
        `[1, tokens, hidden]`. Padding has no effect on anything else.
    """
    cache = kwargs.get(CACHE)
    if not isinstance(cache, PagedCache):
        return forward(*args, **kwargs)
    hidden: Tensor = args[0] if args else kwargs["hidden_states"]
    # What says how the batch is packed is not for a batch of another shape.
    kwargs = {name: value for name, value in kwargs.items() if name not in OF_BATCHES and name != "hidden_states"}
    assert cache.states is not None
    planes = cache.states.planes[module.layer_idx]
    num_tokens, results = hidden.shape[1], []
    if cache.sequences is not None and num_tokens > 1 and _takes_sequences(module, planes, hidden.dtype):
        layer = SequencesLayer(planes, cache.sequences)
        return forward(hidden, **{CACHE: layer.as_cache(module.layer_idx)}, **kwargs)
    functions = {name: STEPS[name] for name in (CONV if part.is_conv else DELTA for part, _ in planes)}
    for group in cache.groups:
        group_layer = GroupLayer(planes, group, group.q_len == 1 and group.has_past and takes_slots(module, functions))
        own = hidden[0, group.tokens].view(-1, group.q_len, hidden.shape[2])
        results.append(forward(own, **{CACHE: group_layer.as_cache(module.layer_idx)}, **kwargs).flatten(0, 1))
        group_layer.store()
    if len(results) == 1 and len(results[0]) == num_tokens:
        return results[0].unsqueeze(0)
    out = torch.zeros_like(hidden[0])
    for group, result in zip(cache.groups, results, strict=True):
        out[group.tokens] = result
    return out.unsqueeze(0)


def _takes_sequences(module: nn.Module, planes: Sequence[tuple[StatePart, Tensor]], dtype: torch.dtype) -> bool:
    """Whether functions of ours compute what a module does with its states, for tokens of this dtype in one row."""
    functions = {name: CHUNKS[name] for name in (CONV_CHUNKS if part.is_conv else DELTA_CHUNKS for part, _ in planes)}
    return takes_slots(module, functions) and all(serves_chunks(plane, part.is_conv, dtype) for part, plane in planes)
