"""What recipes learn about a model: its layers, their RoPE, and what they compute on a text that is not measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from hf_kvquant.attention.observation import not_observed, observations
from hf_kvquant.models.probing import forward, states_of_a_token
from hf_kvquant.models.text_config import text_config_of

from .interface import Layer, Rope, Sample
from .recipe_cache import check_served

SAME_TOKENS = 8  # a token that is repeated this often has the same key everywhere in the first layer, before RoPE
CLOSE = 1e-2  # of the largest channel: undoing RoPE in 16 bits is this exact


def layers_of_model(model: PreTrainedModel, windows: Tensor | None) -> list[Layer]:
    """The layers of a model, with what they compute on some windows of a text, `[windows, tokens]` int64.

    Raises `NotImplementedError` for a model that recipes do not serve.
    """
    check_served(model)
    rope = rope_of(model)
    samples = {} if windows is None else collected(model, windows)
    return [
        Layer(index, key.shape[1], key.shape[3], model, rope, samples.get(index))
        for index, (key, _) in states_of_a_token(model).items()
    ]


@torch.inference_mode()
def rope_of(model: PreTrainedModel) -> Rope | None:
    """How to undo the RoPE of a model, or `None` if it is another or none. Proved on a token that is repeated."""
    rotary = getattr(model.get_decoder() or model, "rotary_emb", None)
    if rotary is None:
        return None
    rope = Rope(rotary)
    cache = DynamicCache(config=text_config_of(model))
    forward(model, torch.full((1, SAME_TOKENS), 5), cache=cache)
    first = cache.layers[0]
    assert isinstance(first, DynamicLayer) and first.keys is not None
    keys = first.keys
    try:
        before = rope.undone(keys.float(), 0)
    except (RuntimeError, TypeError, ValueError):
        return None  # it takes other arguments, or rotates fewer channels
    apart = (before - before[:, :, :1]).abs().max()
    return rope if apart <= CLOSE * before.abs().max() else None


class _RecordingLayer(DynamicLayer):
    """Keeps keys and values in the graph of a forward, for gradients with respect to them."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self.recorded = [x if x.requires_grad else x.detach().requires_grad_() for x in (key_states, value_states)]
        return self.recorded[0], self.recorded[1]


def collected(model: PreTrainedModel, windows: Tensor) -> dict[int, Sample]:
    """What each layer computes on windows of a text, `[windows, tokens]` int64, and the gradients of its loss."""
    parts: dict[int, list[tuple[Tensor, ...]]] = {}
    for ids in windows.split(1):
        seen = observations(model, ids)
        if not seen:
            raise not_observed(model, "recipes")
        for index, gradients in enumerate(_gradients(model, ids)):
            (one,) = seen[index]
            found = (one.query, one.key, one.value, *gradients)
            parts.setdefault(index, []).append(tuple(x[0].float().cpu() for x in found))
    length = windows.shape[1]
    joined = {index: [torch.cat(each, dim=1) for each in zip(*found, strict=True)] for index, found in parts.items()}
    return {index: Sample(length, *found) for index, found in joined.items()}


def _gradients(model: PreTrainedModel, ids: Tensor) -> list[Sequence[Tensor]]:
    """Gradients of the mean loss of a text, `[1, tokens]` int64, with respect to each layer's keys and values."""
    cache = DynamicCache(config=text_config_of(model))
    layers = [_RecordingLayer() for _ in cache.layers]  # type: ignore[no-untyped-call]
    cache.layers = list(layers)
    with torch.enable_grad():
        logits = forward(model, ids, cache=cache)
        loss = F.cross_entropy(logits[0, :-1].float(), ids[0, 1:].to(logits.device))
        wanted = [x for layer in layers for x in layer.recorded]
        found = torch.autograd.grad(loss, wanted)
    return [found[2 * index : 2 * index + 2] for index in range(len(layers))]
