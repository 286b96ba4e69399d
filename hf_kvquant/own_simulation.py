"""Simulated attention in models that compute attention by themselves, outside transformers' attention registry.

What each query finds is decided in `simulation.py`, how query, key and value are made and which options attention takes
in `own_attention.py`. Here is what the registry's attention functions are elsewhere: dense attention with a mask, in
which ALiBi and windows have become part of the mask. It sums in float32 and does not round biases, as kernels do, also
in the first chunk, which a cache leaves to the model: of Falcon with ALiBi, which rounds biases to bfloat16 there, a
first chunk of several tokens is not quite the cache's.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .cache import KVQuantCache
from .storage import LayerStorage


class SimulatingLayer(abc.ABC):
    """A cache layer that says itself what each query of a text finds.

    Attributes:
        storage: Of what is quantised.
    """

    storage: LayerStorage

    @abc.abstractmethod
    def attend(self, query: Tensor, mask: Tensor, attend: Callable[..., tuple[Tensor, Any]]) -> Tensor:
        """See `simulation.SimulatedLayer.attend`."""


def simulate(
    cache: KVQuantCache,
    index: int,
    is_visible: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    softmax_scale: float,
    alibi_slopes: Tensor | None = None,
    sliding_window: int = 0,
) -> Tensor:
    """Attention of one layer over a whole text, or several.

    Args:
        cache: A simulated one.
        index: Of a `SimulatingLayer` that quantises something. It takes keys and values.
        is_visible: `[batch or 1, tokens, tokens]` bool: whether a query sees a key, windows aside.
        query: `[batch, num_q_heads, tokens, head_dim]`.
        key: `[batch, num_kv_heads, tokens, head_dim]`.
        value: The same.
        softmax_scale: Multiplies query · key.
        alibi_slopes: `[num_q_heads]` float32: multiply the distance of a key behind its query.
        sliding_window: Newest tokens that a query sees; 0 for all.

    Returns:
        `[batch, tokens, num_q_heads * head_dim]`, dtype of `value`.
    """
    layer = cache.layers[index]
    assert isinstance(layer, SimulatingLayer)
    cache.update(key, value, index)
    layer.storage.masked_window = sliding_window
    position = torch.arange(query.shape[2], device=query.device)
    distance = position - position.unsqueeze(1)  # [tokens, tokens], of a key from a query
    mask = is_visible.unsqueeze(1)
    if sliding_window:
        mask = mask & (distance > -sliding_window)
    if alibi_slopes is not None:
        bias = alibi_slopes.view(-1, 1, 1) * distance  # [num_q_heads, tokens, tokens]
        mask = torch.where(mask, bias, torch.finfo(bias.dtype).min)

    def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> tuple[Tensor, None]:
        out = F.scaled_dot_product_attention(
            query.float(), key.float(), value.float(), attn_mask=mask, scale=softmax_scale, enable_gqa=True
        )
        return out.transpose(1, 2), None

    return layer.attend(query.to(value.dtype), mask, attend).flatten(2).to(value.dtype)
