"""Finds where a model's keys and queries come from, and which channels have to share a factor.

`origins.py` finds the parameters that make each channel. A factor per channel commutes with RoPE only if both channels
of a rotated pair have the same factor. The pairs may be half-split, interleaved, in part of the head only, or absent;
no table of families says which. Instead, the model is fed unit vectors in place of keys and queries, and every channel
that comes out is recorded. Channels are also tied if one parameter makes several of them: a norm shared by all heads,
or a key that heads share.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from .checks import Edit, check_not_shared
from .observation import Observation
from .origins import LOUD, Output, Probe, Scalable, Source, differs_by_sample, replaced

SMOOTHING = Edit("keys and queries", "smooth")


@dataclasses.dataclass(frozen=True)
class LayerLayout:
    """Where one layer's keys and queries come from."""

    layer_idx: int
    name: str  # the attention module's name in the model
    key: Scalable  # the parameters that make keys
    query: Scalable  # the parameters that make queries
    # `[num_kv_heads, head_dim]` int64: channels with the same number have to share a factor. Query heads take the
    # factors of their key-value head.
    ties: Tensor
    # `[num_kv_heads, head_dim]` float32: `|sin|` of the angle by which RoPE turns the channel from one token to the
    # next; 0 for channels that are not rotated.
    turn: Tensor

    @property
    def num_q_per_kv(self) -> int:
        """Query heads that share a key-value head."""
        return self.query.index.shape[0] // self.key.index.shape[0]


def find_layouts(model: PreTrainedModel, *, where: str) -> tuple[dict[int, LayerLayout], dict[int, str]]:
    """Find the parameters that make keys and queries in every layer whose cache would be quantised.

    Returns:
        layouts: Per layer index, the layout.
        left_out: Per layer index, why the layer cannot be scaled.

    Raises:
        TypeError: `model` is not a `PreTrainedModel`.
        NotImplementedError: The model keeps no keys, its attention cannot be watched, or its weights cannot be edited
            in place.
    """
    probe = Probe(model, SMOOTHING, where)
    left_out = probe.left_out
    chosen: dict[int, tuple[Source, Source]] = {}
    for index, (key, query) in probe.sources("key", "query").items():
        if isinstance(key, Source) and isinstance(query, Source):
            chosen[index] = key, query
        else:
            sides = {"keys": key, "queries": query}
            left_out[index] = " and ".join(f"{side} {why}" for side, why in sides.items() if isinstance(why, str))
    layouts: dict[int, LayerLayout] = {}
    for index, response in _unit_responses(probe, chosen).items():
        layout = _layout(index, probe.names[probe.modules[index]], *chosen[index], response)
        if isinstance(layout, str):
            left_out[index] = layout
        else:
            layouts[index] = layout
    makers = [scalable.name for layout in layouts.values() for scalable in (layout.key, layout.query)]
    check_not_shared(model, makers, SMOOTHING, where)
    return layouts, dict(sorted(left_out.items()))


@dataclasses.dataclass(frozen=True)
class _Response:
    """What unit vectors in place of a layer's keys and queries give."""

    # `[head_dim, num_kv_heads, tokens, head_dim]` float32 on the CPU: keys per unit vector, head, token and channel. A
    # channel that a unit vector does not reach is exactly 0.
    key: Tensor
    query: Tensor  # the same of queries
    is_value_touched: bool  # whether values change with the unit vector


def _unit_responses(probe: Probe, chosen: Mapping[int, tuple[Source, Source]]) -> dict[int, _Response]:
    """Per layer, what unit vectors give: each sample is one, with all heads at once."""
    if not chosen:
        return {}
    batch = max(key.index.shape[1] for key, _ in chosen.values())
    outputs: dict[nn.Module, Output] = {}
    features: dict[nn.Module, Tensor] = {}
    for source in itertools.chain(*chosen.values()):
        module = source.output.module
        outputs[module] = source.output
        unit = features.setdefault(module, torch.zeros((batch, source.output.num_features)))
        unit[torch.arange(source.index.shape[1]).expand_as(source.index), source.index] = LOUD
    responses: dict[int, _Response] = {}

    def look(observation: Observation) -> None:
        if observation.layer_idx in chosen:
            key, query, value = (
                states[: observation.key.shape[-1]]
                for states in (observation.key, observation.query, observation.value)
            )
            responses[observation.layer_idx] = _Response(
                key.float().cpu(), query.float().cpu(), differs_by_sample(value)
            )

    with replaced({module: output.filled(features[module]) for module, output in outputs.items()}):
        probe.run(look, batch=batch)
    return responses


def _layout(layer_idx: int, name: str, key: Source, query: Source, response: _Response) -> LayerLayout | str:
    """The layout of one layer, or why it cannot be scaled."""
    if response.is_value_touched:
        return "values come from the same weights as keys"
    key_side, query_side = key.scalable, query.scalable
    if key.output.module is query.output.module and torch.isin(key_side.index, query_side.index).any():
        return "one parameter makes keys and queries"
    num_kv_heads, head_dim = key.index.shape
    nodes = torch.arange(num_kv_heads * head_dim).view(num_kv_heads, head_dim)
    query_nodes = nodes.repeat_interleave(query.index.shape[0] // num_kv_heads, 0)
    edges, shared = [], []
    for states, side_nodes, side in ((response.key, nodes, key_side), (response.query, query_nodes, query_side)):
        # A channel is tied to every channel whose unit vector reaches it, at any token.
        source, head, channel = (states != 0).any(2).nonzero(as_tuple=True)
        edges.append(torch.stack((side_nodes[head, channel], side_nodes[head, source])))
        shared.append(torch.stack((side_nodes.flatten(), side.index.flatten())))
    ties = tie(nodes.numel(), torch.cat(edges, dim=1), shared).view_as(nodes)
    return LayerLayout(layer_idx, name, key_side, query_side, ties, turn_per_token(response.key))


def turn_per_token(response: Tensor) -> Tensor:
    """How far RoPE turns each channel from one token to the next: `|sin|` of the angle, `[heads, head_dim]` float32.

    `response` is as in `_Response`, with the second token at position 1. Channels that are not rotated get 0.
    """
    at_one = response[:, :, 1].permute(1, 2, 0).float().abs()  # [heads, channel, unit vector]
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
    labels = torch.arange(total)
    while True:
        lower = labels.scatter_reduce(0, target, labels[source], "amin")
        lower = lower[lower]  # a label is a node of the same set, so its label applies as well
        if torch.equal(lower, labels):
            return labels[:num_nodes]
        labels = lower
