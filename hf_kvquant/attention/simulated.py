"""Simulated attention for models that compute attention themselves: dense, with a mask that includes ALiBi and windows.

Like the kernels, it sums in float32 and does not round biases. It does so in the first chunk as well, which a real
cache leaves to the model. Falcon with ALiBi rounds biases to bfloat16 there, so its first chunk of several tokens
differs slightly from the cache's.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..cache.cache import KVQuantCache
from ..storage.layer_store import LayerStore


class SimulatingLayer(abc.ABC):
    """A cache layer that decides itself what each query of a text sees."""

    storage: LayerStore  # quantises its keys and values

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
    """Attention of one layer over one whole text or several.

    Args:
        cache: A simulated cache, which the keys and values are written to.
        index: Index of a quantised `SimulatingLayer` in it.
        is_visible: `[batch or 1, tokens, tokens]` bool: whether a query sees a key, without the sliding window.
        query: `[batch, num_q_heads, tokens, head_dim]`.
        key, value: `[batch, num_kv_heads, tokens, head_dim]`.
        softmax_scale, alibi_slopes, sliding_window: As for `Operands.decode`.

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
