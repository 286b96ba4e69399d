"""Runs a model to learn about it, and leaves it unchanged."""

from __future__ import annotations

import contextlib
import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, EncoderDecoderCache

from ..upstream.releases import with_cache
from .layers import layers_of
from .text_config import text_config_of


@torch.no_grad()
def num_kv_heads(model: PreTrainedModel) -> dict[int, int]:
    """Per layer index, how many key-value heads this process computes. Sends one token through the model."""
    return {index: key.shape[1] for index, key in keys_of_a_token(model).items()}


def keys_of_a_token(model: PreTrainedModel) -> dict[int, Tensor]:
    """The cached keys of one token, `[1, num_kv_heads, 1, head_dim]` for each layer that keeps all keys."""
    return {index: key for index, (key, _) in states_of_a_token(model).items()}


@torch.no_grad()
def states_of_a_token(model: PreTrainedModel) -> dict[int, tuple[Tensor, Tensor]]:
    """The cached key and value of one token, `[1, num_kv_heads, 1, head_dim]` each, as in `keys_of_a_token`."""
    cache = whole_cache(model)
    decoder: Any = model
    given: Cache = cache
    if model.config.is_encoder_decoder:
        # Without encoder states most models skip cross-attention. Moonshine runs it, and needs the cache for it.
        decoder, given = model.get_decoder(), EncoderDecoderCache(cache, DynamicCache())
    token = torch.zeros((1, 1), dtype=torch.long, device="cpu" if model.device.type == "meta" else model.device)
    with evaluating(model):
        decoder(input_ids=token, attention_mask=torch.ones_like(token), **with_cache(given), use_cache=True)
    whole = {
        i: layer for i, layer in enumerate(cache.layers) if isinstance(layer, DynamicLayer) and not layer.is_sliding
    }
    return {
        i: (layer.keys, layer.values)
        for i, layer in whole.items()
        if layer.keys is not None and layer.values is not None and layer.keys.numel() > 0
    }


def whole_cache(model: PreTrainedModel) -> DynamicCache:
    """A `DynamicCache` that keeps all keys, even those outside a sliding window. Masks hide those."""
    text_config = text_config_of(model)
    cache = DynamicCache(config=text_config)
    for index, layer_type in enumerate(layers_of(text_config)[0]):
        if layer_type == "sliding_attention":
            cache.layers[index] = DynamicLayer()
    return cache


def forward(model: PreTrainedModel, input_ids: Tensor, *, cache: Cache | None = None, **kwargs: Tensor) -> Tensor:
    """Run a forward and return its logits, `[batch, tokens, vocab_size]` in the dtype of the model.

    Args:
        model: Only run.
        input_ids: `[batch, tokens]` int64, on any device.
        cache: Filled in place; `None` for a forward without a cache.
        **kwargs: `attention_mask` or `position_ids`, shaped like `input_ids`. By default, positions follow the mask, as
            in `generate`. Models that take no positions get none.
    """
    mask = kwargs.get("attention_mask")
    if mask is not None:
        kwargs.setdefault("position_ids", (mask.cumsum(1) - 1).clamp(min=0))
    if "position_ids" not in inspect.signature(model.forward).parameters:
        kwargs.pop("position_ids", None)
    # Offloaded weights are on the meta device; the hooks that load them also move the inputs.
    device = torch.device("cpu") if model.device.type == "meta" else model.device
    placed = {name: value.to(device) for name, value in kwargs.items()}
    # Compiled code does not see hooks and was compiled for other shapes.
    with torch.compiler.set_stance("force_eager"):
        logits: Tensor = model(
            input_ids=input_ids.to(device), **with_cache(cache), use_cache=cache is not None, **placed
        ).logits
    return logits


def chunks_of(input_ids: Tensor, first_chunk: int, chunk_size: int) -> list[Tensor]:
    """Cut texts, `[texts, tokens]`, into a first chunk that fills a cache and chunks that read it."""
    tokens = input_ids.shape[1]
    bounds = [0, *range(first_chunk, tokens, chunk_size), tokens]
    return [input_ids[:, start:stop] for start, stop in itertools.pairwise(bounds)]


def arbitrary_ids(model: PreTrainedModel, tokens: int) -> Tensor:
    """Arbitrary token ids, `[1, tokens]` int64 on the CPU, for a forward whose text does not matter."""
    ids: Tensor = torch.arange(5, 5 + tokens)[None] % text_config_of(model).vocab_size
    return ids


@contextlib.contextmanager
def hooked(hooks: Iterable[tuple[nn.Module, Callable[..., Any]]], *, before: bool = False) -> Iterator[None]:
    """Call functions after the forward of modules, or before it, as PyTorch's forward hooks and forward pre-hooks."""
    with contextlib.ExitStack() as stack:
        for module, hook in hooks:
            stack.enter_context(
                module.register_forward_pre_hook(hook) if before else module.register_forward_hook(hook)
            )
        yield


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
