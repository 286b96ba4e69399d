"""Which layers of a model have a cache, of which type, and on which device. transformers decides; this file asks it."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel, cache_utils

from ..upstream.releases import CACHE
from .text_config import decoder_config, text_config_of


def layers_of(text_config: PreTrainedConfig) -> tuple[list[str], list[dict[str, Any]]]:
    """The types of a decoder's cache layers, as transformers names them, and the keyword arguments of each.

    transformers treats Mllama's layers that attend to pictures like any other. They hold the pictures' tokens instead
    of the text's, without its padding, and do not grow. Here their type is `cross_attention`.

    Raises:
        NotImplementedError: The config has no number of layers, such as for several models in sequence (BLT).
    """
    if not isinstance(getattr(text_config, "num_hidden_layers", None), int):
        raise NotImplementedError(
            f"KVQuantCache: {text_config.model_type} has no `num_hidden_layers` in its config, so the number of cache "
            "layers is unknown. Leave the model unpatched."
        )
    layer_types, layer_kwargs = cache_utils.get_layer_types_and_kwargs(text_config)
    if isinstance(layer_kwargs, dict):  # transformers 5.17 has one dictionary for all layers
        layer_kwargs = [layer_kwargs] * len(layer_types)
    # Early exit lowers the number of layers for a while, but not the list of their types.
    layer_types = layer_types[: len(layer_kwargs)]
    across = getattr(text_config, "cross_attention_layers", None) or ()
    layer_types = ["cross_attention" if index in across else each for index, each in enumerate(layer_types)]
    return layer_types, layer_kwargs


# What transformers calls the gated delta rule of one token, in PyTorch, in each modeling module that has it (5.24).
GATED_DELTA_RULE = "torch_recurrent_gated_delta_rule"


def has_gated_delta_rule(text_config: PreTrainedConfig) -> bool:
    """Whether the linear attention of a model is a gated delta rule, whose states are a matrix for each head."""
    folder, _, name = type(text_config).__module__.rpartition(".")
    try:
        modeling = importlib.import_module(f"{folder}.{name.replace('configuration_', 'modeling_')}")
    except ImportError:
        return False
    return hasattr(modeling, GATED_DELTA_RULE)


def named_types(text_config: PreTrainedConfig) -> list[str]:
    """As `layers_of`, but with the names in the config of layers without a cache, which transformers calls "dummy"."""
    layer_types, _ = layers_of(text_config)
    names = getattr(text_config, "layer_types", None) or layer_types
    return [name if found == "dummy" else found for found, name in zip(layer_types, names, strict=False)]


def shared_layers(text_config: PreTrainedConfig) -> dict[int, int]:
    """By layer that has no keys and values of its own, the layer whose it reads: the last one before of its type."""
    modes, names = getattr(text_config, "kv_sharing_modes", None) or (), named_types(text_config)
    own = {names[index]: index for index, mode in enumerate(modes) if mode != "reuse"}
    return {index: own[names[index]] for index, mode in enumerate(modes) if mode == "reuse" and names[index] in own}


def num_readers(text_config: PreTrainedConfig) -> list[int]:
    """How many layers attend to the keys and values of each cache layer: the layer itself, and layers that share them.

    The last `num_kv_shared_layers` layers share keys and values with the last layer of their type before them.
    """
    cache_types, _ = layers_of(text_config)
    readers = [1] * len(cache_types)
    num_shared = getattr(text_config, "num_kv_shared_layers", None) or 0
    if num_shared:
        layer_types: list[str] = text_config.layer_types
        own, shared = layer_types[:-num_shared], layer_types[-num_shared:]
        for layer_type in shared:
            readers[max(index for index, each in enumerate(own) if each == layer_type)] += 1
    return readers


def count_layers(config: PreTrainedConfig) -> int:
    """How many layers the caches of a model have, given its own config or its text model's.

    Can be fewer than the model has: layers that share the keys of others may have no cache layer.
    """
    return len(layers_of(decoder_config(config))[0])


def layer_devices(model: PreTrainedModel) -> dict[int, torch.device]:
    """The device on which each layer computes, by layer index; the model's device for layers that are not found."""
    layer_types, _ = layers_of(text_config_of(model))
    found: dict[int, torch.device] = {}
    for module in (model.get_decoder() or model).modules():
        index, parameter = getattr(module, "layer_idx", None), next(module.parameters(), None)
        if isinstance(index, int) and parameter is not None:
            found.setdefault(index, _device_of(module, parameter))
    return {index: found.get(index, model.device) for index in range(len(layer_types))}


def _device_of(module: nn.Module, parameter: nn.Parameter) -> torch.device:
    """The device of the weights, or that to which a hook of accelerate brings them for a step (`cpu_offload`)."""
    for each in module.modules():
        hook = getattr(each, "_hf_hook", None)
        if hook is not None and getattr(hook, "offload", False):
            return torch.device(hook.execution_device)
    return parameter.device


def keeps_cache(model: PreTrainedModel) -> bool:
    """Whether the model works with transformers' default cache; without `generate`, whether it accepts a cache."""
    is_supported: Callable[[], bool] | None = getattr(model, "_supports_default_dynamic_cache", None)
    if is_supported is not None:
        # GPT and transducers have `generate`, and no part of them that is given a cache. It may come among **kwargs.
        return is_supported() and any(_takes_cache(part) for part in model.modules())
    # BERT accepts a cache only as a decoder, which its config tells; other configs have no such attribute.
    is_encoder = getattr(model.config, "is_decoder", None) is False and not model.config.is_encoder_decoder
    return _takes_cache(model) and not is_encoder


def _takes_cache(module: nn.Module) -> bool:
    return isinstance(module, PreTrainedModel) and CACHE in inspect.signature(type(module).forward).parameters
