"""Finds which channels of a head have to share a factor, from how the model itself rotates and shares channels.

A factor per channel commutes with RoPE only if both channels of a rotated pair have the same factor. The pairs may be
half-split, interleaved, in part of the head only, or absent; no table of families says which. Instead, `layout.py`
feeds the model unit vectors and records every channel of the keys and queries, and this module reads those responses.
Channels are also tied if one parameter makes several of them: a norm shared by all heads, or a key that heads share.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

# Responses are read at these positions: RoPE leaves position 0 unrotated and turns every pair at the others.
POSITIONS = (0, 1, 2)


def coupled_channels(response: Tensor) -> Tensor:
    """Which channels RoPE mixes.

    Args:
        response: `[head_dim, heads, tokens, head_dim]`: keys (or queries) per unit vector, head, token and channel. A
            channel that a unit vector does not reach is exactly 0.

    Returns:
        `[heads, head_dim, head_dim]` bool: whether the second channel reaches the first, at any token.
    """
    is_coupled: Tensor = (response != 0).any(2).permute(1, 2, 0)
    return is_coupled


def turn_per_token(response: Tensor) -> Tensor:
    """How far RoPE turns each channel from one token to the next.

    Args:
        response: As for `coupled_channels`, with the second token at position 1.

    Returns:
        `[heads, head_dim]` float32: `|sin|` of the angle; 0 for channels that are not rotated.
    """
    at_one = response[:, :, 1].permute(1, 2, 0).float().abs()  # [heads, channel, unit vector]
    crossed = at_one - torch.diag_embed(at_one.diagonal(dim1=1, dim2=2))
    size = at_one.norm(dim=-1).clamp(min=torch.finfo(torch.float32).tiny)
    turn: Tensor = crossed.amax(-1) / size
    return turn


def tie(num_nodes: int, edges: Tensor, shared: Iterable[Tensor]) -> Tensor:
    """Join nodes that have to be equal into sets (connected components).

    Args:
        num_nodes: Number of nodes.
        edges: `[2, count]` int64: pairs of nodes that have to be equal.
        shared: `[2, count]` int64 each: nodes, and the number of the parameter that scales each. Nodes with the same
            parameter have to be equal.

    Returns:
        `[num_nodes]` int64: the smallest node of each node's set.
    """
    lists = [edges.flip(0), edges]
    for nodes_and_parameters in shared:
        nodes, parameters = nodes_and_parameters
        # A star: join each node to the first node with the same parameter.
        first = torch.full((int(parameters.max()) + 1,), num_nodes, dtype=torch.int64)
        first.scatter_reduce_(0, parameters, nodes, "amin")
        star = torch.stack((nodes, first[parameters]))
        lists += [star, star.flip(0)]
    source, target = torch.cat(lists, dim=1)
    labels = torch.arange(num_nodes)
    while True:
        lower = labels.scatter_reduce(0, target, labels[source], "amin")
        lower = lower[lower]  # a label is a node of the same set, so its label applies as well
        if torch.equal(lower, labels):
            return labels
        labels = lower
