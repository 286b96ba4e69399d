"""Which models and settings continuous batching serves, the messages for the others, and the pages of a model."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator, Sequence

import torch
from transformers import PreTrainedModel
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.utils.import_utils import is_psutil_available

from ..attention.latent import why_expanded
from ..attention.registry import is_ours, is_upstream, not_upstream
from ..cache.support import formats_of
from ..config import KVQuantConfig
from ..models.latent import keeps_latents, latent_attentions
from ..models.layers import layers_of
from ..models.probing import states_of_a_token, why_without_cache
from ..models.sharding import why_not_captured
from ..models.text_config import text_config_of
from ..spec.layout import KVLayout
from ..spec.pages import PageLayout
from ..state import patch_of
from ..upstream.contracts import check_release
from ..upstream.releases import (
    DO_MODELS_UPDATE_PAGES,
    HAS_PAGES,
    HAS_STATES,
    MODELS_UPDATE_PAGES_SINCE,
    PAGES_SINCE,
    STATES_SINCE,
    VERSION,
)

WHERE = "init_continuous_batching"
# What to do with a model that is not served: in Python, and with a command.
INSTEAD = "Use generate, or unpatch the model."
_INSTEAD_OF_COMMAND = "Use hf-kvquant generate."

# Layers with a sliding window keep all of their tokens. Rings in pages of their own would need fewer, but transformers
# takes the pages of all kinds of layers from sectors of the least common multiple of their bytes.
_PAGED = frozenset(("full_attention", "sliding_attention"))

# Their modules keep a state for each sequence in the cache, alone or beside keys and values.
STATE_TYPES = frozenset(("linear_attention", "conv", "hybrid"))
_WITHOUT_KEYS = frozenset(("linear_attention", "conv"))
_WITHOUT_CACHE = frozenset(("moe", "mlp"))

# The index of a layer, and the shapes of the keys and values that its attention is called with.
Call = tuple[int, torch.Size, torch.Size]


def check_version() -> None:
    """Refuse a transformers whose paged cache has another design.

    Raises:
        NotImplementedError: It is too old, or newer than those tested and changed.
    """
    if not HAS_PAGES:
        raise NotImplementedError(
            f"{WHERE}: `transformers` must be {PAGES_SINCE} or newer for continuous batching of a patched model, got "
            f"{VERSION}. Upgrade it, or unpatch the model."
        )
    check_release(WHERE, "batching")


def for_command(error: Exception) -> str:
    """What an error says, to somebody who has no model to unpatch."""
    return str(error).replace(INSTEAD, _INSTEAD_OF_COMMAND)


def check_served(model: PreTrainedModel, config: KVQuantConfig, batching: ContinuousBatchingConfig) -> None:
    """Refuse what pages of codes do not serve, before anything is changed.

    Args:
        model: Patched.
        config: What it was patched with.
        batching: As the user passes it.

    Raises:
        ImportError: The memory cannot be sized, because psutil is missing.
        NotImplementedError, ValueError: The model or a setting is not supported; the message says which.
    """
    why_not = why_without_cache(model)
    if why_not is not None:
        raise ValueError(f"{WHERE}: `model` must keep its cache, got a {type(model).__name__} {why_not}")
    for why in _reasons(model, config):
        raise NotImplementedError(f"{WHERE}: {type(model).__name__} {why} {INSTEAD}")
    if model.device.type != "cuda" and (batching.use_async_batching or any(batching.cuda_graph_booleans)):
        raise NotImplementedError(
            f"{WHERE}: `use_async_batching` and `use_cuda_graph` must be False on a {model.device.type}, got True. "
            "They are for GPUs: leave them out."
        )
    if batching.cpu_offload_space != 0:
        try:
            torch.empty(0, pin_memory=True)
        except RuntimeError as error:
            raise NotImplementedError(
                f"{WHERE}: `cpu_offload_space` must be 0 on a machine without a GPU, got {batching.cpu_offload_space}: "
                "requests would wait in pinned memory, which needs one. Leave it out; requests that starve start again."
            ) from error
    why_not = why_not_captured(model) if any(batching.cuda_graph_booleans) else None
    if why_not is not None:
        raise NotImplementedError(
            f"{WHERE}: `use_cuda_graph` must be False for this {type(model).__name__}, got True: {why_not}. "
            "Leave it out."
        )
    if isinstance(batching.use_cuda_graph, tuple | list) and batching.use_cuda_graph[0]:
        raise NotImplementedError(
            f"{WHERE}: `use_cuda_graph` must be False for steps with prompts, got {tuple(batching.use_cuda_graph)}. "
            "Only decode steps are captured: set it to True, or leave it out."
        )
    of_steps = batching.varlen_compile_config, batching.decode_compile_config, batching.default_compile_level
    if any(of_steps) or getattr(text_config_of(model), "compile_config", None):
        raise NotImplementedError(
            f"{WHERE}: `varlen_compile_config`, `decode_compile_config` and `default_compile_level`, and "
            "`compile_config` of the model's config, must be left out over pages of codes, got one of them. Steps are "
            "not compiled yet."
        )
    if not is_psutil_available() and (batching.num_blocks is None or batching.max_batch_tokens is None):
        raise ImportError(
            f"{WHERE}: `num_blocks` and `max_batch_tokens` must be given without psutil, got none: the free memory is "
            "unknown. Install psutil, or give both in the ContinuousBatchingConfig."
        )


def _reasons(model: PreTrainedModel, config: KVQuantConfig) -> Iterator[str]:
    """Why a model is not served: the ends of sentences that its name begins."""
    if model.config.is_encoder_decoder:
        yield "is an encoder-decoder, which transformers does not batch continuously."
    if not is_ours(text_config_of(model)._attn_implementation):
        yield (
            "does not have the attention implementation that patch sets: it computes attention by itself, outside "
            "transformers' registry, or another has been set since."
        )
    patch = patch_of(model)
    if patch is not None and not is_upstream(patch.previous_attention):
        yield f"attends by a function of its own: {not_upstream(patch.previous_attention)}."
    parameters = inspect.signature(model.forward).parameters.values()
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        yield "takes no further arguments that it passes on to attention, and pages come with these."
    if keeps_latents(text_config_of(model)):
        if not DO_MODELS_UPDATE_PAGES:
            yield (
                f"keeps latents (MLA), whose pages need transformers {MODELS_UPDATE_PAGES_SINCE} or newer, got "
                f"{VERSION}."
            )
    found = set(_types_of(model))
    if "sliding_attention" in found and not config.sliding:
        yield "is patched with sliding=False, but all layers share pages of codes. Patch it without."
    if found & STATE_TYPES and not HAS_STATES:
        yield (
            f"has layers of type {sorted(found & STATE_TYPES)}, whose states need transformers {STATES_SINCE} or "
            f"newer, got {VERSION}."
        )
    if found - _PAGED - STATE_TYPES:
        yield f"has layers of type {sorted(found - _PAGED - STATE_TYPES)}, which keep no pages."
    if model.device.type not in ("cpu", "cuda"):
        where = "has weights that are not in memory" if model.device.type == "meta" else f"is on {model.device}"
        yield f"{where}, and continuous batching over codes runs on CPUs and NVIDIA GPUs only."
    if len({parameter.device for parameter in model.parameters()}) > 1:
        yield "is spread over several devices, and all pages are on one."
    if config.offloading:
        yield (
            "is patched with `offloading`, which is for the cache of one call of generate. Set `cpu_offload_space` of "
            "the ContinuousBatchingConfig instead, and patch without it."
        )


def _types_of(model: PreTrainedModel) -> list[str]:
    """The types of the layers that have a cache, except feed-forward layers that count as layers."""
    text_config = text_config_of(model)
    names = getattr(text_config, "layer_types", None) or ()
    types, _ = layers_of(text_config)
    named = itertools.zip_longest(types, names[: len(types)])
    return [found for found, name in named if not (found == "dummy" and name in _WITHOUT_CACHE)]


def check_latents(model: PreTrainedModel) -> None:
    """Refuse latents that must be expanded in every step; make weights that are quantised numbers.

    Some libraries decompress weights in the first forward, so this must come behind one.

    Raises:
        NotImplementedError: A layer's latents must be expanded.
    """
    for module in latent_attentions(model):
        why_not = why_expanded(module, None)
        if why_not is not None:
            raise NotImplementedError(
                f"{WHERE}: {type(model).__name__} keeps latents (MLA) that pages cannot serve: {why_not}. {INSTEAD}"
            )


def pages_of(
    model: PreTrainedModel,
    config: KVQuantConfig,
    batching: ContinuousBatchingConfig,
    calls: Sequence[Call],
) -> dict[int, PageLayout]:
    """The page of every layer with keys and values. Sends one token through the model to see what its caches keep.

    Args:
        model: As in `check_served`.
        config: Likewise.
        batching: Likewise.
        calls: Of attention, which a forward of one token makes.

    Raises:
        NotImplementedError: A layer has no keys and values of its own, or attends to others.
        ValueError: A layer's format cannot be paged, or `page_size` does not fit; `PageLayout` says so.
    """
    states = states_of_a_token(model)
    num_layers = sum(each not in _WITHOUT_KEYS for each in _types_of(model))
    if len(states) != num_layers:
        raise NotImplementedError(
            f"{WHERE}: every layer of {type(model).__name__} must have keys and values of its own, got "
            f"{len(states)} of {num_layers}. {INSTEAD}"
        )
    if sorted(calls) != [(index, key.shape, value.shape) for index, (key, value) in states.items()]:
        raise NotImplementedError(
            f"{WHERE}: every layer of {type(model).__name__} must call the attention of transformers' registry once, "
            f"with the cache and with its keys and values as they are cached, got other calls. {INSTEAD}"
        )
    pages, formats_by_layer = {}, formats_of(text_config_of(model), config)
    for index, (key, value) in states.items():
        formats, head_dims = formats_by_layer[index], (key.shape[3], value.shape[3])
        layout = KVLayout(formats.key, formats.value, formats.sink_length, formats.residual_length)
        pages[index] = PageLayout(layout, key.shape[1], head_dims, key.dtype, batching.page_size)
    return pages
