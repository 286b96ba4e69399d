"""`patch`, `unpatch`, `patched`, `enable` and `disable`: how a model comes to use our cache and our attention.

A patched model has our attention implementation in its config, which passes everything but our handles on to the one it
had before. It also has four instance methods: `_prepare_cache_for_generation`, which makes our cache in `generate`;
`generate`, which looks whether that cache was used; `generate_batch`, which takes settings as arguments; and
`init_continuous_batching`, which makes its manager. With `capture=True`, `generate` decodes in our loop, and
`get_compiled_call` is one more, from which transformers' loops get the function that runs their steps. Models that drop
their caches at a length have `prepare_inputs_for_generation` of ours. If a model's `generate` calls the `generate` of a
part, the part gets these methods, too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import inspect
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from transformers import GenerationMixin, PreTrainedModel

from .attention import latent
from .attention import unregistered as own_attention
from .attention.registry import (
    implementation_name,
    is_ours,
    is_upstream,
    joins_masks,
    not_upstream,
    previous_of,
    set_attention,
)
from .batching import hook as batching
from .cache.support import check_model, formats_of, why_general
from .config import DEFAULT_PRESET, KVQuantConfig, register_preflight
from .generate import switching, watch
from .generate.hook import HOOK, asks_for_us, check_folded, prepare_cache
from .graphs.capture import Forward, check_capturable, check_graphs
from .graphs.decode_loop import generate
from .models import rounding
from .models.latent import check_latent, head_dims_of, keeps_latents, latent_sizes
from .models.layers import keeps_cache, layer_devices, layers_of
from .models.parts import generating_parts, stand_ins
from .models.sharding import check_heads
from .models.text_config import check_is_model, text_config_of
from .presets import FEW_BITS
from .spec.codes import INTEGER_BITS
from .state import Patch, keep, noted_models, notes_on, patch_of
from .upstream.contracts import check_release
from .upstream.releases import CACHE

logger = logging.getLogger(__name__)

_GENERATE, _COMPILED = "generate", "get_compiled_call"
Model = TypeVar("Model", bound=PreTrainedModel)


def patch(
    model: Model,
    preset_or_config: str | KVQuantConfig | Mapping[str, Any] = DEFAULT_PRESET,
    *,
    checkpoint_rounding: bool = True,
    **options: Any,
) -> Model:
    """Make `model.generate` keep keys and values as codes and attend to them directly.

    So does continuous batching (`generate_batch`); models that it does not serve raise an error there. A cache that the
    user passes, `use_cache=False`, any other `cache_implementation` of transformers and assistant models work as
    before. If a model's `generate` calls the `generate` of a part, the part is patched, too. Patching again replaces
    the config.
    A forward without `generate` and without a cache of ours works as in the unpatched model: it has no codes to read.

    With `static=True` the model keeps the buffers of a call until `unpatch`, so that the next call reuses them and the
    compiled steps. Steps captured with `capture=True` are kept, too. If weights, modules, hooks or adapters change, the
    next call captures new ones.

    On a GPU, the log says once why the general kernel serves a layer if the faster ones do not.

    With keys of 4 bits or fewer, a look at some weights tells whether the model needs calibration first. If so, the log
    says it in one line.

    Args:
        model: A transformers model with a decoder. In an encoder-decoder, the self-attention cache is quantised.
        preset_or_config: A preset's name, a dictionary or a `KVQuantConfig`.
        checkpoint_rounding: Whether a checkpoint of compressed-tensors with a `kv_cache_scheme` goes on rounding keys
            and values to its own scales before they are quantised. `False` leaves that out until `unpatch`, and also
            the rounding of queries if the checkpoint has it.
        **options: With a preset's name, those of `KVQuantConfig.from_preset`, such as `residual_length`.

    Returns:
        The same model.

    Raises:
        NotImplementedError: The model's cache cannot be quantised, or its decode step cannot be captured. The model is
            unchanged. `capture=True` needs a machine with a GPU; the model may be moved to the GPU after `patch`.
        TypeError, ValueError: The config is invalid or does not fit the model.

    Example:
        >>> hf_kvquant.patch(model, "int4")
        >>> model.generate(**inputs, max_new_tokens=100)
        >>> hf_kvquant.patch(model, "int4", capture=True)  # decode steps as CUDA graphs
    """
    config = KVQuantConfig.resolve(preset_or_config, **options)
    check_patchable(model, config)
    if config.capture:
        check_release("patch", "graphs")
        check_graphs(model)
    is_new = patch_of(model) is None
    previous = _previous_attention(model)
    parts = [(part, _previous_attention(part)) for part in stand_ins(model).values()]
    _route_attention(model, previous)
    if config.capture and not is_ours(text_config_of(model)._attn_implementation):
        if is_new:
            _unroute_attention(model, previous)
        raise NotImplementedError(
            f"patch: `capture` must be False for {type(model).__name__}, got True: it computes attention by itself, "
            "outside transformers' registry. Pass static=True instead, and generate compiles."
        )
    old = patch_of(model)
    unrounded = () if checkpoint_rounding else (*(() if old is None else old.unrounded), *rounding.rounded(model))
    made = Patch(config, previous, unrounded)
    _install(model, made)
    for part, previous in parts:
        told = notes_on(model)  # of the layers that both have
        notes_on(part).is_told, notes_on(part).keeps_attention = told.is_told, told.keeps_attention
        _route_attention(part, previous)
        _install(part, dataclasses.replace(made, previous_attention=previous, unrounded=()))
    _tell_general(model, config)
    formats = (config, *config.layers.values())
    # Uneven latents (MLA) lose much in codes of any integer type.
    most_bits = max(INTEGER_BITS.values()) if keeps_latents(text_config_of(model)) else FEW_BITS
    if any(each.key.is_quantized and each.key.bits <= most_bits for each in formats):
        _preflight("hint").tell(model, config)
    return model


def _tell_general(model: PreTrainedModel, config: KVQuantConfig) -> None:
    """Log why the general CUDA kernel serves layers, one line per reason."""
    text_config, layers = text_config_of(model), dict[str, list[int]]()
    devices, layer_configs = layer_devices(model), text_config.per_layer_config
    for index, formats in formats_of(text_config, config).items():
        if index < len(layer_configs) and latent_sizes(layer_configs[index]) is None:
            reason = why_general(formats, devices[index], head_dims_of(layer_configs[index]), model.dtype)
            layers.setdefault(reason, []).append(index)
    for reason, indices in layers.items():
        if reason:
            _log_general(type(model).__name__, ", ".join(map(str, indices)), reason)


@functools.cache
def _log_general(name: str, layers: str, reason: str) -> None:
    logger.warning(
        "patch: the general CUDA kernel serves layers %s of %s: correct, several times slower (%s).",
        layers,
        name,
        reason,
    )


def _preflight(module: str) -> Any:
    """A module of the pre-flight. It is above this file and imports it, so it is looked up when it is needed."""
    return importlib.import_module(f".preflight.{module}", __package__)


register_preflight(lambda *args, **options: _preflight("check").run_preflight(*args, where="for_model", **options))


def _install(model: PreTrainedModel, patch: Patch | None) -> None:
    """Give a model the methods that its patch asks for, and remove what an earlier one left. `None` asks for none."""
    batching.close(model)
    before, after = (() if each is None else each.unrounded for each in (patch_of(model), patch))
    if before != after:
        rounding.switch(model, before, is_on=True)
        rounding.switch(model, after, is_on=False)
        notes_on(model).balancing = None  # found in other keys
    for name in (HOOK, *batching.HOOKS, _GENERATE, _COMPILED):
        model.__dict__.pop(name, None)
    notes_on(model).drop_buffers()
    notes_on(model).bias_centers = None  # weights may have been loaded since
    notes_on(model).why_unquantized, notes_on(model).chose_other = None, False
    keep(model, patch=patch)
    if patch is None:
        return
    # Partials of module-level functions survive pickle and deepcopy with the model; bound methods would not.
    check = check_capturable if patch.config.capture else None
    hook: Any = functools.partial(prepare_cache, model, check_capturable=check)
    hook.__func__ = getattr(type(model), HOOK, None)  # Kyutai's speech-to-text binds it to its audio codec
    setattr(model, HOOK, hook)
    for name, function in batching.HOOKS.items():
        setattr(model, name, functools.partial(function, model))
    if hasattr(type(model), _GENERATE):
        decode = generate if patch.config.capture else None
        setattr(model, _GENERATE, functools.partial(watch.generate, model, decode=decode))
    if patch.config.capture:
        setattr(model, _COMPILED, functools.partial(Forward, model))


def unpatch(model: Model) -> Model:
    """Undo `patch`, and return the model with the attention implementation and the methods it had.

    Raises:
        TypeError: `model` is not a transformers model.
        ValueError: The model is not patched.
    """
    check_is_model(model, "unpatch")
    if patch_of(model) is None:
        raise ValueError(
            f"unpatch: `model` must be patched, got an unpatched {type(model).__name__}. There is nothing to undo."
        )
    _unpatch(model)
    return model


def _unpatch(model: PreTrainedModel) -> None:
    for each in (model, *stand_ins(model).values()):
        patch = patch_of(each)
        if patch is not None:
            _install(each, None)
            _unroute_attention(each, patch.previous_attention)


@contextlib.contextmanager
def patched(
    model: Model,
    preset_or_config: str | KVQuantConfig | Mapping[str, Any] = DEFAULT_PRESET,
    *,
    checkpoint_rounding: bool | None = None,
    **options: Any,
) -> Iterator[Model]:
    """`patch` within a `with` block. Afterwards the model is as it was before, patched or not.

    By default, `checkpoint_rounding` is as the model was patched before, or else `True`.
    """
    check_is_model(model, "patched")
    models: list[PreTrainedModel] = [model, *stand_ins(model).values()]
    before = [patch_of(each) for each in models]
    if checkpoint_rounding is None:
        checkpoint_rounding = before[0] is None or not before[0].unrounded
    patch(model, preset_or_config, checkpoint_rounding=checkpoint_rounding, **options)
    try:
        yield model
    finally:
        _unpatch(model)
        for each, patch_before in zip(models, before, strict=True):
            if patch_before is not None:
                _route_attention(each, patch_before.previous_attention)
                _install(each, patch_before)


def enable() -> None:
    """Make `cache_implementation="quantized", cache_config={"backend": "hf_kvquant"}` work on every model.

    For servers and code that never calls `patch`. A model gets our attention implementation on the first call that asks
    for our backend, and keeps it; calls with other caches work as before. Without `enable`, such a call raises an error
    in transformers unless the model is patched: transformers does not know our backend.
    """
    check_release("enable")
    if getattr(GenerationMixin, HOOK) is not _hook_for_all:
        global _original_hook
        _original_hook = getattr(GenerationMixin, HOOK)
        setattr(GenerationMixin, HOOK, _hook_for_all)


def disable() -> None:
    """Undo `enable`. Does nothing if it was not called."""
    if getattr(GenerationMixin, HOOK) is _hook_for_all:
        setattr(GenerationMixin, HOOK, _original_hook)
        for model in noted_models():
            if patch_of(model) is None:
                notes_on(model).drop_buffers()
                if isinstance(model, PreTrainedModel) and is_ours(text_config_of(model)._attn_implementation):
                    _unroute_attention(model, _previous_attention(model))


_original_hook: Callable[..., Any] = getattr(GenerationMixin, HOOK)


def _hook_for_all(
    self: PreTrainedModel, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **options: Any
) -> Any:
    if asks_for_us(generation_config):
        previous = text_config_of(self)._attn_implementation
        if not is_ours(previous):
            _route_attention(self, previous)
    return prepare_cache(self, generation_config, model_kwargs, *args, fall_through=_original_hook, **options)


def check_patchable(model: PreTrainedModel, config: KVQuantConfig) -> None:
    """Refuse a model that `patch` cannot serve, with the errors of `patch`."""
    check_is_model(model, "patch")
    check_release("patch")
    check_folded(model, "patch")
    if model.config.is_encoder_decoder and config.capture:
        raise NotImplementedError(
            f"patch: `capture` must be False for {type(model).__name__}, got True: it is an encoder-decoder, whose "
            "cross-attention reads tensors that are new in every call. Pass static=True instead, and generate compiles."
        )
    _check_generate(model, config)
    text_config = text_config_of(model)
    layer_types, _ = layers_of(text_config)
    check_model(text_config, layer_types, config)
    if keeps_latents(text_config):
        check_latent(model, "patch")
    if not keeps_cache(model):
        raise NotImplementedError(
            f"patch: {type(model).__name__} does not keep its state in a cache of transformers, so there are no keys "
            "and values to quantise. Leave the model unpatched."
        )
    check_heads(model, "patch")
    if config.static:
        own_attention.check_static(model, "patch")


def _check_generate(model: PreTrainedModel, config: KVQuantConfig) -> None:
    """Refuse a model whose `generate` would never use a cache of ours."""
    name, parts = type(model).__name__, generating_parts(model)
    if stand_ins(model):
        if config.capture:
            part = next(iter(stand_ins(model)))
            raise NotImplementedError(
                f"patch: `capture` must be False for {name}, got True: its generate is that of its part {part}. Patch "
                f"model.{part} with it."
            )
        return
    is_fed = CACHE in inspect.signature(type(model).forward).parameters
    if hasattr(type(model), _GENERATE) and not (isinstance(model, GenerationMixin) and (is_fed or not parts)):
        kept = [f"model.{part}" for part, module in parts.items() if keeps_cache(module)]
        remedy = f"Patch its parts that generate: {', '.join(kept)}." if kept else "Leave the model unpatched."
        raise NotImplementedError(
            f"patch: {name} generates in a way of its own, which would use no cache of hf_kvquant. {remedy}"
        )


def _previous_attention(model: PreTrainedModel) -> str:
    """The attention implementation of a model before it was patched, itself or a part with the same config."""
    name: str = text_config_of(model)._attn_implementation
    if patch_of(model) is None and not is_ours(name):
        return name
    known = (patch_of(each) for each in (model, *stand_ins(model).values()))
    found = next((patch.previous_attention for patch in known if patch is not None), name)
    return previous_of(found) if is_ours(found) else found  # a call under `enable` has left ours


def _unroute_attention(model: PreTrainedModel, previous: str) -> None:
    """Undo `_route_attention`."""
    own_attention.unpatch(model)
    latent.unpatch(model)
    switching.unpatch(model)
    set_attention(model, previous)


def _route_attention(model: PreTrainedModel, previous: str) -> None:
    """Set our attention over `previous`. Models outside transformers' registry get ours by hand, or fall back."""
    name = implementation_name(previous)
    if own_attention.patch(model):
        return
    switching.patch(model)
    set_attention(model, name)
    latent.patch(model, is_ours)
    reason = why_dense(model)
    if reason is not None and not notes_on(model).is_told:
        notes_on(model).is_told = True
        logger.warning("patch: %s, so it attends to dequantised tensors. Correct, slower.", reason)


def why_dense(model: PreTrainedModel) -> str | None:
    """Why a patched model always attends to dequantised tensors, or `None` if it does not."""
    if own_attention.is_patched(model):
        return None
    if is_ours(text_config_of(model)._attn_implementation):
        patch = patch_of(model)
        prev = "eager" if patch is None else patch.previous_attention
        return None if is_upstream(prev) else not_upstream(prev)
    name = type(model).__name__
    if joins_masks(model):
        return f"{name} joins the masks of its own and the encoder's tokens"
    if patch_of(model) is not None and not notes_on(model).keeps_attention and model._can_set_attn_implementation():
        set_to = text_config_of(model)._attn_implementation
        return f"its attention was set to {set_to!r} after it was patched; patch it again"
    return f"{name} computes attention by itself, outside transformers' registry"
