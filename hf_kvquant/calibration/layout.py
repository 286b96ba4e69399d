"""Finds where a model's keys and queries come from, and which channels have to share a factor.

A factor per channel commutes with RoPE only if both channels of a rotated pair have the same one. The pairs may be
half-split, interleaved, in part of the head only, or absent. To find them in any family, the model is fed unit vectors
in place of keys and queries, and every channel that comes out is recorded. Channels are also tied if one parameter
makes several of them: a norm shared by all heads, or a key that heads share.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable

import torch
from torch import Tensor
from transformers import PreTrainedModel

from .checks import SMOOTHING, check_not_shared
from .observation import Observation
from .origins import LOUD, Output, Probe, Scalable, Source, differs_by_sample, replaced


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
        unit = features.setdefault(source.output, torch.zeros((batch, source.output.num_features)))
        unit[torch.arange(source.index.shape[1]).expand_as(source.index), source.index] = LOUD
    if chosen:
        with replaced({output.module: output.filled(unit) for output, unit in features.items()}):
            probe.run(look, batch=batch)
    makers = [scalable.name for layout in layouts.values() for scalable in (layout.key, layout.query)]
    check_not_shared(model, makers, SMOOTHING, where)
    return layouts, dict(sorted(left_out.items()))


def _layout(name: str, key: Source, query: Source, observation: Observation) -> LayerLayout | str:
    """The layout of a layer that was fed a unit vector in each sample, or why it cannot be scaled."""
    if differs_by_sample(observation.value[: observation.key.shape[-1]]):
        return "values come from the same weights as keys"
    if key.output == query.output and torch.isin(key.scalable.index, query.scalable.index).any():
        return "one parameter makes keys and queries"
    num_kv_heads, head_dim = key.index.shape
    nodes = torch.arange(num_kv_heads * head_dim).view(num_kv_heads, head_dim)
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
    labels = torch.arange(total)
    while True:
        lower = labels.scatter_reduce(0, target, labels[source], "amin")
        lower = lower[lower]  # a label is a node of the same set, so its label applies as well
        if torch.equal(lower, labels):
            return labels[:num_nodes]
        labels = lower
