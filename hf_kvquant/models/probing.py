"""Runs a model to learn about it, and leaves it unchanged."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, EncoderDecoderCache

from .layers import layers_of
from .text_config import text_config_of


@torch.no_grad()
def num_kv_heads(model: PreTrainedModel) -> dict[int, int]:
    """Per layer index, how many key-value heads this process computes. Sends one token through the model."""
    return {index: key.shape[1] for index, key in keys_of_a_token(model).items()}


def keys_of_a_token(model: PreTrainedModel) -> dict[int, Tensor]:
    """The cached keys of one token, `[1, num_kv_heads, 1, head_dim]` for each layer that keeps all keys."""
    cache = whole_cache(model)
    decoder: Any = model
    given: Cache = cache
    if model.config.is_encoder_decoder:
        # Without encoder states most models skip cross-attention. Moonshine runs it, and needs the cache for it.
        decoder, given = model.get_decoder(), EncoderDecoderCache(cache, DynamicCache())
    token = torch.zeros((1, 1), dtype=torch.long, device="cpu" if model.device.type == "meta" else model.device)
    with evaluating(model):
        decoder(input_ids=token, attention_mask=torch.ones_like(token), past_key_values=given, use_cache=True)
    whole = {
        i: layer for i, layer in enumerate(cache.layers) if isinstance(layer, DynamicLayer) and not layer.is_sliding
    }
    return {i: layer.keys for i, layer in whole.items() if layer.keys is not None and layer.keys.numel() > 0}


def whole_cache(model: PreTrainedModel) -> DynamicCache:
    """A `DynamicCache` that keeps all keys, even those outside a sliding window. Masks hide those."""
    text_config = text_config_of(model)
    cache = DynamicCache(config=text_config)
    for index, layer_type in enumerate(layers_of(text_config)[0]):
        if layer_type == "sliding_attention":
            cache.layers[index] = DynamicLayer()
    return cache


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put the model into evaluation mode, uncompiled: compiled code ignores hooks and was compiled for other shapes."""
    was_training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        for module in was_training:
            module.training = True
