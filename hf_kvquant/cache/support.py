"""Which models and layers a cache serves, and the messages for the others."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from .. import ops
from ..config import KVQuantConfig, LayerFormats
from ..models.latent import head_dims_of, latent_sizes, picks_tokens
from ..models.layers import has_gated_delta_rule, layers_of, named_types, shared_layers
from ..models.text_config import text_config_of
from ..presets import latent_formats
from ..spec.layout import KVLayout

# Layers that keep transformers' own cache layers: they do not grow with the sequence, or hold no keys and values.
# Sliding windows are among them only where `quantized_layers` leaves them out.
_LEFT_TO_TRANSFORMERS = (
    "sliding_attention",
    "chunked_attention",
    "conv",
    "linear_attention",
    "cross_attention",
    "hybrid_sliding",
    "dummy",
    "moe",
    "mlp",
)


# Layers without keys and values. Models with no other layers are refused.
RECURRENT = frozenset(("conv", "linear_attention"))


# Layers whose keys and values are quantised whatever the config says ...
_FULL_ATTENTION = ("full_attention", "hybrid")


# ... those with a window, which the config may leave out ...
WITH_WINDOW = ("sliding_attention", "hybrid_sliding")


# ... and those among them that also have a state, which transformers keeps.
WITH_STATE = frozenset(("hybrid", "hybrid_sliding"))


# Layers that have no state.
STATELESS = frozenset(("dummy", "moe", "mlp"))


OTHER_MODEL = "Was it made for another model? KVQuantCache(model.config, ...) makes one for this."


# Models that select keys by computing with the mask themselves. They cannot use our masks.
_PICK_KEYS = ("doge", "minimax_m3_vl", "minimax_m3_vl_text")


def check_layers(where: str, argument: str, num_layers: int, expected: int) -> None:
    """Refuse a cache that was made for a model with another number of layers.

    Args:
        where: Begins the message.
        argument: Name of the argument that holds the cache.
        num_layers: Of the cache.
        expected: Of the model's own caches. See `count_layers`.

    Raises:
        ValueError: They differ.
    """
    if num_layers != expected:
        raise ValueError(
            f"{where}: `{argument}` must have {expected} layers like the model's own cache, got a cache with "
            f"{num_layers}. {OTHER_MODEL}"
        )


def quantized_layers(layer_types: Sequence[str], quant_config: KVQuantConfig) -> list[int]:
    """Indices of the layers that a cache quantises.

    Args:
        layer_types: As `layers_of` returns them.
        quant_config: What the user asks for.
    """
    kinds = (*_FULL_ATTENTION, *WITH_WINDOW) if quant_config.sliding else _FULL_ATTENTION
    return [index for index, layer_type in enumerate(layer_types) if layer_type in kinds]


def formats_of(text_config: PreTrainedConfig, quant_config: KVQuantConfig) -> dict[int, LayerFormats]:
    """The formats of each layer that a cache quantises: of keys and values, or of latents and rope parts.

    Args:
        text_config: Of the decoder.
        quant_config: What the user asks for.

    Raises:
        ValueError: A layer keeps latents, which cannot have such formats.
    """
    layer_types, _ = layers_of(text_config)
    configs = text_config.per_layer_config
    found = {}
    for index in quantized_layers(layer_types, quant_config):
        formats = quant_config.formats(index)
        is_known = index < len(configs)
        found[index] = kept_formats("KVQuantCache", formats, configs[index]) if is_known else formats
    return found


def why_general(formats: LayerFormats, device: torch.device, head_dims: tuple[int, ...], dtype: torch.dtype) -> str:
    """Why only the general CUDA kernel serves a layer, which is several times slower than the others.

    Args:
        formats: Of keys and values, not of latents.
        device: Of the codes.
        head_dims: Of keys and values; empty if unknown.
        dtype: The model's.

    Returns:
        "wanted X, got Y"; empty where a faster kernel serves, or none.
    """
    is_asked = formats.is_quantized and device.type == "cuda" and len(head_dims) == 2
    if not is_asked or ops.why_reference(device, *head_dims) is not None:
        return ""
    return ops.why_general(device, layout_of(formats), (head_dims[0], head_dims[1]), dtype)


def why_no_latent_kernel(
    formats: LayerFormats, device: torch.device, head_dims: tuple[int, ...], dtype: torch.dtype
) -> str | None:
    """Why no compiled kernel attends to the latents of a layer, `None` if one does. Arguments as in `why_general`.

    Empty where a format is not to blame: there are no kernels for the device, or none that fit it.
    """
    layout, (rank, num_rope) = layout_of(formats), head_dims
    is_served = ops.has_kernels(device.type) and ops.serves_latent(device, layout, rank, num_rope)
    why = ""
    if device.type == "cuda" and ops.has_kernels("cuda"):
        why = ops.why_no_latent_kernel(layout, (rank, num_rope), dtype)
    return None if is_served and not why else why


def layout_of(formats: LayerFormats) -> KVLayout:
    """The layout of a layer's buffers, apart from what its sliding window changes."""
    return KVLayout(formats.key, formats.value, formats.sink_length, formats.residual_length)


def kept_formats(where: str, formats: LayerFormats, layer_config: PreTrainedConfig) -> LayerFormats:
    """What formats mean in a layer: as they are, or of latents and rope parts where it keeps these.

    Raises:
        ValueError: Latents cannot have such formats. `where` begins the message.
    """
    sizes = latent_sizes(layer_config)
    return formats if sizes is None else latent_formats(where, formats, sizes[0])


def other_caches(model: PreTrainedModel, config: KVQuantConfig | None = None) -> dict[int, str]:
    """The layers whose cache is left to transformers, each with the reason; without a config, as few as possible."""
    text_config = text_config_of(model)
    layer_types, _ = layers_of(text_config)
    quantized = quantized_layers(layer_types, config or KVQuantConfig())
    unquantized = [index for index in range(len(layer_types)) if index not in quantized]
    return {index: _why_not_quantized(text_config, index) for index in unquantized}


def _why_not_quantized(text_config: PreTrainedConfig, index: int) -> str:
    """Why a layer has no quantised cache of its own, as a clause."""
    name, reads = named_types(text_config)[index], shared_layers(text_config).get(index)
    if reads is not None:
        return f"it reads the cache of layer {reads}"
    if layers_of(text_config)[0][index] in STATELESS:
        return f"it has no cache ({name})"
    return f"its cache ({name}) is not quantised"


def check_model(text_config: PreTrainedConfig, layer_types: list[str], quant_config: KVQuantConfig) -> None:
    """Refuse a model or a config that cannot be served, before anything is built.

    Args:
        text_config: Of the decoder.
        layer_types: As `layers_of` returns them.
        quant_config: What the user asks for.

    Raises:
        NotImplementedError: The model's cache is neither keys and values per head nor latents, or an option does not
            work for it.
        ValueError: The config names layers that do not exist, or a format that head_dim does not fit.
    """
    layer_configs, found = text_config.per_layer_config, set(layer_types)
    unknown = sorted(found - {*_FULL_ATTENTION, *_LEFT_TO_TRANSFORMERS})
    unserved = {
        "selects the keys that it attends to, which attention over codes does not support": (
            text_config.model_type in _PICK_KEYS or any(map(picks_tokens, layer_configs))
        ),
        f"has layers of type {unknown}, whose caches are not keys and values per head": bool(unknown),
        "attends to the cache of another model in every layer, and has none of its own": found == {"dummy"},
        f"has only layers of type {sorted(found)}, which keep a state of fixed size and no keys and values": (
            found <= RECURRENT | STATELESS
        ),
    }
    for why, is_unserved in unserved.items():
        if is_unserved:
            raise NotImplementedError(f"KVQuantCache: {text_config.model_type} {why}. Leave the model unpatched.")
    if quant_config.static and "cross_attention" in layer_types:
        raise NotImplementedError(
            f"KVQuantCache: `static` must be False for {text_config.model_type}, got True: some of its layers attend "
            "to pictures, whose length is not known in advance. Leave out static, max_cache_len and capture."
        )
    if quant_config.state_dtype is not None and not (found & RECURRENT and has_gated_delta_rule(text_config)):
        raise NotImplementedError(
            f"KVQuantCache: `state_dtype` must be None for {text_config.model_type}, got {quant_config.state_dtype!r}: "
            "it has no layers with a gated delta rule, and what other states lose by it is not known. Leave it out."
        )
    quantized = quantized_layers(layer_types, quant_config)
    # CUDA graphs can capture these layers and ours, whose state is all on the device and stays there (`states.py`).
    capturable = {layer_types[index] for index in quantized} | STATELESS | RECURRENT
    uncapturable = sorted(set(layer_types) - capturable)
    if quant_config.capture and uncapturable:
        raise NotImplementedError(
            f"KVQuantCache: `capture` must be False for {text_config.model_type}, got True: its layers of type "
            f"{uncapturable} keep keys and values outside our buffers, and count them on the host. Pass static=True "
            "instead, and generate compiles."
        )
    beyond = [index for index in quant_config.layers if index >= len(layer_types)]
    if beyond:
        raise ValueError(
            f"KVQuantCache: `layers` must name layers below {len(layer_types)}, the model's number of layers, "
            f"got {beyond}."
        )
    for index in quant_config.layers:
        if index not in quantized:
            raise ValueError(
                f"KVQuantCache: `layers` must name layers whose cache is quantised, which are {quantized}, got "
                f"{index}: {_why_not_quantized(text_config, index)}. Leave it out."
            )
    # In transformers 5.17, layers at the end that share the keys and values of others have no cache layer at all.
    layer_formats = formats_of(text_config, quant_config)
    for index, layer_config in zip(range(len(layer_types)), layer_configs, strict=False):
        if index in quantized:
            formats = layer_formats[index]
            for side, head_dim in zip((formats.key, formats.value), head_dims_of(layer_config), strict=False):
                side.num_groups(head_dim)
