"""Finds the parameters that make a model's keys, queries and values, and those that take attention's output.

Keys and queries can be scaled. A factor per channel commutes with RoPE only if both channels of a rotated pair have the
same one. The pairs may be half-split, interleaved, in part of the head only, or absent. To find them in any family, the
model is fed unit vectors in place of keys and queries, and every channel that comes out is recorded. Channels are also
tied if one parameter makes several of them: a norm shared by all heads, or a key that heads share.

Values and attention's output can be rotated. The output is traced by replacing it and looking at the inputs of the
modules after it. A layer is accepted only if an orthogonal map over the channels of a head passes through: rows of a
projection make values and nothing else, with the same factor for all channels of a head, and columns of one projection
take attention's output unchanged. A norm or a gate in between, or keys made by the same rows, are refused.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ..attention.observation import Observation
from ..models.latent import LATENT_NORM, keeps_latents, latent_attentions
from ..models.probing import hooked, in_float32
from ..models.text_config import text_config_of
from . import origins
from .decoder_check import check_decoder
from .origins import Output, Probe, Scalable, Source, differs_by_sample, one_for_one, random_samples, replaced


@dataclasses.dataclass(frozen=True)
class LayerLayout:
    """Where one layer's keys and queries come from."""

    name: str  # the attention module's name in the model
    key: Scalable
    query: Scalable
    # `[num_kv_heads, head_dim]` int64: channels with the same number have to share a factor. Query heads take the
    # factors of their key-value head.
    ties: Tensor
    # `[num_kv_heads, head_dim]` float32: `|sin|` of the angle by which RoPE turns the channel from one token to the
    # next; 0 for channels that are not rotated.
    turn: Tensor

    @property
    def num_q_per_kv(self) -> int:
        """Query heads that share a key-value head."""
        return len(self.query.index) // len(self.key.index)


def find_layouts(model: PreTrainedModel, *, where: str) -> tuple[dict[int, LayerLayout], dict[int, str]]:
    """Find, by layer index, the parameters that make keys and queries, or why the layer cannot be scaled.

    Raises:
        TypeError, NotImplementedError: As `Probe`, or weights cannot be edited in place.
    """
    check_decoder(model, where, are_latents_served=True)
    if keeps_latents(text_config_of(model)):
        return latent_layouts(model), {}
    with in_float32(model):  # where which number comes out does not depend on rounding
        return _found_layouts(Probe(model, origins.SMOOTHING, where))


def latent_layouts(model: PreTrainedModel) -> dict[int, LayerLayout]:
    """By layer index, the parameters that make latents (MLA), and those that take them as queries take keys.

    A latent comes from a norm, and goes through one projection to keys and values. RoPE does not touch it.
    """
    layouts: dict[int, LayerLayout] = {}
    names = {module: name for name, module in model.named_modules()}
    for module in latent_attentions(model):
        channels = torch.arange(module.kv_lora_rank, device="cpu")[None]
        norm = Scalable(f"{names[module]}.{LATENT_NORM}", "gain", channels)
        projection = Scalable(f"{names[module]}.kv_b_proj", "columns", channels)
        turn = torch.zeros_like(channels, dtype=torch.float32)
        layouts[module.layer_idx] = LayerLayout(names[module], norm, projection, channels, turn)
    return layouts


def _found_layouts(probe: Probe) -> tuple[dict[int, LayerLayout], dict[int, str]]:
    left_out = probe.left_out
    chosen: dict[int, tuple[Source, Source]] = {}
    for index, (key, query) in probe.sources("key", "query").items():
        if isinstance(key, Source) and isinstance(query, Source):
            chosen[index] = key, query
        else:
            sides = {"keys": key, "queries": query}
            left_out[index] = " and ".join(f"{side} {why}" for side, why in sides.items() if isinstance(why, str))
    layouts: dict[int, LayerLayout] = {}

    def look(observation: Observation) -> None:
        index = observation.layer_idx
        if index in chosen:
            layout = _layout(probe.names[observation.module], *chosen[index], observation)
            if isinstance(layout, str):
                left_out[index] = layout
            else:
                layouts[index] = layout

    # Each sample is a unit vector, with all heads at once.
    batch = max((key.index.shape[1] for key, _ in chosen.values()), default=0)
    features: dict[Output, Tensor] = {}
    for source in itertools.chain(*chosen.values()):
        silent = torch.zeros((batch, source.output.num_features), dtype=torch.float32, device="cpu")
        unit = features.setdefault(source.output, silent)
        sample = torch.arange(source.index.shape[1], device="cpu").expand_as(source.index)
        unit[sample, source.index] = origins.LOUD
    if chosen:
        with replaced({output.module: output.filled(unit) for output, unit in features.items()}):
            probe.run(look, batch=batch)
    probe.check_not_shared(side.name for layout in layouts.values() for side in (layout.key, layout.query))
    return layouts, dict(sorted(left_out.items()))


def _layout(name: str, key: Source, query: Source, observation: Observation) -> LayerLayout | str:
    """The layout of a layer that was fed a unit vector in each sample, or why it cannot be scaled."""
    if differs_by_sample(observation.value[: observation.key.shape[-1]]):
        return "values come from the same weights as keys"
    if key.output == query.output and torch.isin(key.scalable.index, query.scalable.index).any():
        return "one parameter makes keys and queries"
    num_kv_heads, head_dim = key.index.shape
    nodes = torch.arange(num_kv_heads * head_dim, device="cpu").view(num_kv_heads, head_dim)
    query_nodes = nodes.repeat_interleave(query.index.shape[0] // num_kv_heads, 0)
    # [unit vector, head, tokens, channel]; a channel that a unit vector does not reach is exactly 0.
    keys, queries = (states[:head_dim].float().cpu() for states in (observation.key, observation.query))
    edges, shared = [], []
    for states, side_nodes, side in ((keys, nodes, key), (queries, query_nodes, query)):
        # A channel is tied to every channel whose unit vector reaches it, at any token.
        source, head, channel = (states != 0).any(2).nonzero(as_tuple=True)
        edges.append(torch.stack((side_nodes[head, channel], side_nodes[head, source])))
        shared.append(torch.stack((side_nodes.flatten(), side.scalable.index.flatten())))
    ties = tie(nodes.numel(), torch.cat(edges, dim=1), shared).view_as(nodes)
    return LayerLayout(name, key.scalable, query.scalable, ties, _turn_per_token(keys))


def _turn_per_token(keys: Tensor) -> Tensor:
    """`LayerLayout.turn`, from keys per unit vector, whose second token is at position 1."""
    at_one = keys[:, :, 1].permute(1, 2, 0).abs()  # [heads, channel, unit vector]
    crossed = at_one - torch.diag_embed(at_one.diagonal(dim1=1, dim2=2))
    turn: Tensor = crossed.amax(-1) / at_one.norm(dim=-1).clamp(min=torch.finfo(torch.float32).tiny)
    return turn


def tie(num_nodes: int, edges: Tensor, shared: Iterable[Tensor]) -> Tensor:
    """Join nodes that have to be equal into sets (connected components): the smallest node of each node's set.

    `edges` are pairs of nodes, `[2, count]` int64. So is each of `shared`: nodes, and the number of the parameter that
    scales each. Nodes with the same parameter have to be equal.
    """
    total = num_nodes
    for nodes_and_parameters in shared:  # a parameter is one more node, joined to those that it scales
        nodes, parameters = nodes_and_parameters
        edges = torch.cat((edges, torch.stack((nodes, total + parameters))), dim=1)
        total += int(parameters.max()) + 1
    source, target = torch.cat((edges, edges.flip(0)), dim=1)
    labels = torch.arange(total, device="cpu")
    while True:
        lower = labels.scatter_reduce(0, target, labels[source], "amin")
        lower = lower[lower]  # a label is a node of the same set, so its label applies as well
        if torch.equal(lower, labels):
            return labels[:num_nodes]
        labels = lower


# --- values -----------------------------------------------------------------------------------------------------------

Refuse = Callable[[str], NotImplementedError]  # the error for a layer that cannot be rotated, from the reason


@dataclasses.dataclass(frozen=True)
class ValueLayout:
    """The two projections of one layer that make values and take attention's output, by rows or columns."""

    value: Scalable  # makes values; each feature makes one channel
    output: Scalable  # takes attention's output


@dataclasses.dataclass
class _Answer:
    """What one layer does with random values and a random output of attention."""

    made: Tensor  # `[samples, features]`: the random output of the projection
    value: Tensor  # `[samples, num_kv_heads, head_dim]`: the values that attention gets from it
    attended: Tensor  # `[samples, num_q_heads, head_dim]`: the random output of attention
    is_key_touched: bool  # whether keys or queries change with the values
    # The modules that run after attention, each with its input for the first token, `[samples, features]`.
    inputs: list[tuple[nn.Module, Tensor]] = dataclasses.field(default_factory=list)


def find_value_layouts(model: PreTrainedModel, *, where: str) -> dict[int, ValueLayout]:
    """Find, by layer index, the value layout of every layer whose cache would be quantised.

    Raises:
        TypeError, NotImplementedError: As `find_layouts`, or a layer does more with values than project them.
    """
    probe = Probe(model, origins.ROTATION, where)
    if not probe.modules:
        raise NotImplementedError(
            f"{where}: `model` must have a layer whose cache is quantised, got {type(model).__name__} without one. "
            "Leave it as it is."
        )

    def refusal(index: int, reason: str) -> NotImplementedError:
        return NotImplementedError(
            f"{where}: `model` must make values by a projection and pass attention's output unchanged to another one, "
            f"got {type(model).__name__}: in layer {index}, {reason}. Leave it as it is."
        )

    chosen: dict[int, Source] = {}
    for index, (source,) in probe.sources("value").items():
        if isinstance(source, str):
            raise refusal(index, f"its values {source}")
        if source.scalable.rule not in ("rows", "columns"):
            raise refusal(index, f"its values come from {source.scalable.name}, a norm")
        chosen[index] = source
    layouts: dict[int, ValueLayout] = {}
    for index, answer in _answers(probe, chosen).items():
        refuse = functools.partial(refusal, index)
        layouts[index] = ValueLayout(_value(chosen[index], answer, refuse), _output(answer, probe, index, refuse))
    probe.check_not_shared(side.name for layout in layouts.values() for side in (layout.value, layout.output))
    return layouts


def _answers(probe: Probe, chosen: Mapping[int, Source]) -> dict[int, _Answer]:
    """Run the model once with random values and attention outputs. No layer passes them on to the next."""
    generator = torch.Generator().manual_seed(1)
    batch = origins.NUM_SAMPLES + origins.NUM_LOUD
    made: dict[int, Tensor] = {}
    answers: dict[int, _Answer] = {}
    for index, source in chosen.items():
        # All other features of a fused projection are 0, in every sample.
        made[index] = torch.zeros((batch, source.output.num_features), dtype=torch.float32, device="cpu")
        used = source.index.unique()
        made[index][:, used] = random_samples((len(used),), generator)

    def attend(observation: Observation) -> Tensor | None:
        index, query, value = observation.layer_idx, observation.query, observation.value
        if index not in chosen:
            return None
        is_key_touched = differs_by_sample(observation.key) or differs_by_sample(query)
        attended = random_samples((query.shape[1], value.shape[-1]), generator).to(query)
        answers[index] = _Answer(made[index], value[:, :, 0], attended, is_key_touched)
        return attended.unsqueeze(1).expand(-1, query.shape[2], -1, -1).contiguous()

    def note(index: int, module: nn.Module, args: Any) -> None:
        if index in answers and args and isinstance(args[0], Tensor) and args[0].ndim == 3 and len(args[0]) == batch:
            answers[index].inputs.append((module, args[0][:, 0]))

    silenced = [(attention, _silence) for attention in probe.modules.values()]
    outputs = {source.output.module: source.output.filled(made[index]) for index, source in chosen.items()}
    with hooked(probe.inner_hooks(note), before=True), hooked(silenced), replaced(outputs):
        probe.run(attend, batch=batch)
    return answers


def _silence(module: nn.Module, args: Any, output: Any) -> Any:
    """A forward hook: attention returns zeros, so that later layers get the same input in every sample."""
    if isinstance(output, tuple):
        return (torch.zeros_like(output[0]), *output[1:])
    return torch.zeros_like(output)


def _value(source: Source, answer: _Answer, refuse: Refuse) -> Scalable:
    name = source.scalable.name
    if answer.is_key_touched:
        raise refuse("keys or queries come from the same weights as values")
    if not _is_in_proportion(answer.made.to(answer.value), answer.value, source.scalable.index):
        raise refuse(f"values are multiplied per channel after {name}")
    index = source.scalable.index.unique(dim=0)  # a head that is repeated before attention (Falcon) counts once
    if index.unique().numel() < index.numel():
        raise refuse(f"one feature of {name} makes several channels of values")
    return dataclasses.replace(source.scalable, index=index)


def _output(answer: _Answer, probe: Probe, layer_idx: int, refuse: Refuse) -> Scalable:
    attended, names = answer.attended, probe.names
    takers: dict[nn.Module, tuple[Tensor, Tensor]] = {}
    for module, features in answer.inputs:
        index = one_for_one(features.float(), attended)
        # Over this many channels a norm is nearly a constant factor, but it makes loud samples as quiet as the others.
        if index is not None and one_for_one(attended.flatten(1), features[:, index.to(features.device)]) is not None:
            takers[module] = index, features
    for module in takers:
        probe.check_editable(layer_idx, module)
    projections = [module for module in takers if isinstance(module, (nn.Linear, Conv1D))]
    if not projections and takers:
        last = list(takers)[-1]  # a container gets its input before the modules in it
        raise refuse(f"attention's output goes through {names[last]} ({type(last).__name__})")
    if len(projections) != 1:
        raise refuse("attention's output is not passed to one projection, channel by channel")
    module = projections[0]
    index, features = takers[module]
    if not _is_in_proportion(features, attended, index):
        raise refuse(f"attention's output is multiplied per channel before {names[module]} takes it, as by a gate")
    return Scalable(names[module], "rows" if isinstance(module, Conv1D) else "columns", index)


def _is_in_proportion(features: Tensor, states: Tensor, index: Tensor) -> bool:
    """Whether all channels of a head are the same multiple of their features. A factor per head commutes with rotation.

    `features` is `[samples, features]`, rounded to the dtype of `states`, `[samples, heads, head_dim]`; `index` says
    which feature each channel is a multiple of.
    """
    source, target = features[:, index.to(features.device)].double(), states.double()
    ratio = (source * target).sum(0) / source.square().sum(0)
    spread = (ratio - ratio[:, :1]).abs().amax()
    # Copies have a ratio of exactly 1. The rounding errors of a product have either sign and average out.
    return bool(spread <= torch.finfo(states.dtype).eps / 2 * ratio.abs().amax())
