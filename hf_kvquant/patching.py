"""`patch`, `unpatch`, `patched`, `enable` and `disable`: how a model comes to use our cache and our attention.

A patched model has our attention implementation in its config, which passes everything but our handles on to the one it
had before. It also has an instance method, `_prepare_cache_for_generation`, which builds a `KVQuantCache` where
`generate` would have built a default cache. The choice is made in that hook and not in `generation_config`, where it
would clash with `past_key_values=` and leak into the calls of an assistant model. `enable` installs the same hook for
all models. `encoder_decoder.py` decides which caches an encoder-decoder gets.

With `capture=True` a model has two more methods: `generate`, which decodes in the loop of `decode_loop.py`, and
`get_compiled_call`, from which transformers' loops get the function that runs their steps.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import logging
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from transformers import GenerationMixin, PreTrainedModel
from transformers.generation.configuration_utils import GenerationMode

from .attention import unregistered as own_attention
from .attention.registry import implementation_name, is_ours
from .cache.cache import KVQuantCache
from .cache.support import check_layers, check_model
from .config import BACKEND, DEFAULT_PRESET, KVQuantConfig, is_like_backend
from .generate import encoder_decoder
from .generate.encoder_decoder import (
    beside_cross_attention,
    check_cross_attention,
    compile_with_masks_only,
    croppable,
    decoder_cache,
)
from .generate.uncompiled import leave_uncompiled
from .graphs.capture import Captures, captured_call, check_capturable, check_graphs, is_captured
from .graphs.decode_loop import generate
from .models.layers import count_layers, layers_of
from .models.sharding import check_heads
from .models.text_config import check_is_model, text_config_of
from .storage.pool import BufferPool, drop_pool, pool_of, pooled_models
from .storage.residency import BufferKind
from .transforms.of_model import key_transforms

logger = logging.getLogger(__name__)

_HOOK = "_prepare_cache_for_generation"
_CAPTURE_HOOKS: dict[str, Callable[..., Any]] = {"generate": generate, "get_compiled_call": captured_call}
_STATE = "_hf_kvquant"
# The length of static caches that `generate` sizes itself is a multiple of this, so that calls of similar length share
# buffers and graphs. It costs 128 tokens on average, 1 % of a cache of 16k; powers of two would cost a third.
STATIC_STEP = 256
Model = TypeVar("Model", bound=PreTrainedModel)


@dataclasses.dataclass(frozen=True)
class PatchState:
    """What `patch` left on a model.

    Attributes:
        config: How `generate` caches by default.
        previous_attention: The attention implementation to restore.
        captures: The captured decode steps, if the config asks for them.
        fallbacks: By layer, how many steps of `generate` attended to dequantised tensors, and why.
    """

    config: KVQuantConfig
    previous_attention: str
    captures: Captures = dataclasses.field(default_factory=Captures, compare=False)
    fallbacks: dict[int, Counter[str]] = dataclasses.field(default_factory=dict, compare=False)


def patch(model: Model, preset_or_config: str | KVQuantConfig | Mapping[str, Any] = DEFAULT_PRESET) -> Model:
    """Make `model.generate` keep keys and values as codes and attend to them directly.

    A cache that the user passes, `use_cache=False`, any `cache_implementation` of transformers and assistant models
    work as before. Patching again replaces the config. With `static=True` the model keeps the buffers of a call until
    `unpatch`, so that the next call reuses them and the compiled steps. Steps captured with `capture=True` are kept,
    too. They do not notice later changes to the model: patch again after switching adapters or adding hooks.

    Args:
        model: A transformers model with a decoder. In an encoder-decoder, the self-attention cache is quantised.
        preset_or_config: A preset's name, a dictionary or a `KVQuantConfig`.

    Returns:
        The same model.

    Raises:
        NotImplementedError: The model's cache cannot be quantised, or its decode step cannot be captured. The model is
            unchanged. `capture=True` needs a machine with a GPU; the model may be moved to the GPU after `patch`.
        TypeError, ValueError: The config is invalid or does not fit the model.

    Example:
        >>> hf_kvquant.patch(model, "int4")
        >>> model.generate(**inputs, max_new_tokens=100)
        >>> hf_kvquant.patch(model, {"preset": "int4", "capture": True})  # decode steps as CUDA graphs, on one GPU
    """
    config = KVQuantConfig.resolve(preset_or_config)
    check_patchable(model, config)
    if config.capture:
        check_graphs(model)
    state = state_of(model)
    previous = text_config_of(model)._attn_implementation if state is None else state.previous_attention
    drop_pool(model)
    _route_attention(model, previous)
    if config.capture and not is_ours(text_config_of(model)._attn_implementation):
        if state is None:
            own_attention.unpatch(model)
        raise NotImplementedError(
            f"patch: `capture` must be False for {type(model).__name__}, got True: it computes attention by itself, "
            "outside transformers' registry. Pass static=True instead, and generate compiles."
        )
    _install(model, PatchState(config, previous))
    return model


def _install(model: PreTrainedModel, state: PatchState) -> None:
    """Give a model the methods that its state asks for, and remove our other ones."""
    for name in _CAPTURE_HOOKS:
        model.__dict__.pop(name, None)
    setattr(model, _STATE, state)
    # A partial of a module-level function survives pickle and deepcopy with the model; a bound method would not.
    setattr(model, _HOOK, functools.partial(prepare_cache, model))
    if state.config.capture:
        for name, function in _CAPTURE_HOOKS.items():
            setattr(model, name, functools.partial(function, model, state.captures))


def unpatch(model: Model) -> Model:
    """Undo `patch`.

    Returns:
        The same model, with the attention implementation and the methods it had.

    Raises:
        TypeError: `model` is not a transformers model.
        ValueError: The model is not patched.
    """
    check_is_model(model, "unpatch")
    state = state_of(model)
    if state is None:
        raise ValueError(
            f"unpatch: `model` must be patched, got an unpatched {type(model).__name__}. Call patch first."
        )
    for name in (_HOOK, _STATE, *_CAPTURE_HOOKS):
        model.__dict__.pop(name, None)
    drop_pool(model)
    own_attention.unpatch(model)
    set_attention(model, state.previous_attention)
    return model


@contextlib.contextmanager
def patched(
    model: Model, preset_or_config: str | KVQuantConfig | Mapping[str, Any] = DEFAULT_PRESET
) -> Iterator[Model]:
    """`patch` within a `with` block. Afterwards the model is as it was before, patched or not."""
    check_is_model(model, "patched")
    before = state_of(model)
    patch(model, preset_or_config)
    try:
        yield model
    finally:
        if before is None:
            unpatch(model)
        else:
            _install(model, before)
            drop_pool(model)


def state_of(model: PreTrainedModel) -> PatchState | None:
    """What `patch` left on a model, or `None` if it is not patched."""
    state: PatchState | None = model.__dict__.get(_STATE)
    return state


def enable() -> None:
    """Make `cache_implementation="quantized", cache_config={"backend": "hf_kvquant"}` work on every model.

    For servers and code that never calls `patch`. A model gets our attention implementation on the first call that asks
    for our backend, and keeps it; calls with other caches work as before. Without `enable`, such a call raises an error
    in transformers unless the model is patched: transformers does not know our backend.
    """
    if getattr(GenerationMixin, _HOOK) is not _hook_for_all:
        global _original_hook
        _original_hook = getattr(GenerationMixin, _HOOK)
        setattr(GenerationMixin, _HOOK, _hook_for_all)


def disable() -> None:
    """Undo `enable`. Does nothing if it was not called."""
    if getattr(GenerationMixin, _HOOK) is _hook_for_all:
        setattr(GenerationMixin, _HOOK, _original_hook)
        for model in pooled_models():
            if model.__dict__.get(_STATE) is None:
                drop_pool(model)


_original_hook: Callable[..., Any] = getattr(GenerationMixin, _HOOK)


def _hook_for_all(self: PreTrainedModel, generation_config: Any, model_kwargs: dict[str, Any], *args: Any) -> Any:
    if _asks_for_us(generation_config):
        previous = text_config_of(self)._attn_implementation
        if not is_ours(previous):
            _route_attention(self, previous)
    return prepare_cache(self, generation_config, model_kwargs, *args, fall_through=_original_hook)


def prepare_cache(
    model: PreTrainedModel,
    generation_config: Any,
    model_kwargs: dict[str, Any],
    *args: Any,
    fall_through: Callable[..., Any] | None = None,
) -> Any:
    """Replaces `GenerationMixin._prepare_cache_for_generation`: makes our cache if the call asks for it.

    Args:
        model: The generating model.
        generation_config: Of this call.
        model_kwargs: Of this call; receives `past_key_values`.
        *args: `generation_mode, batch_size, max_cache_length`, as transformers passes them.
        fall_through: What prepares every other cache; `None` means the model class's own method.
    """
    generation_mode, batch, max_cache_length = args
    batch *= max(generation_config.num_beams or 1, generation_config.num_return_sequences or 1)
    if generation_config.is_assistant or generation_mode == GenerationMode.ASSISTED_GENERATION:
        # Proposals go beyond the requested length, and an assistant's `generate` is called many times with one cache.
        max_cache_length = None
    cache = cache_for(model, generation_config, model_kwargs, batch=batch, max_cache_length=max_cache_length)

    def prepare(generation_config: Any, model_kwargs: dict[str, Any]) -> Any:
        return (fall_through or getattr(type(model), _HOOK))(model, generation_config, model_kwargs, *args)

    if cache is None:
        pair = croppable(model_kwargs.get("past_key_values"))
        if pair is not None:
            model_kwargs["past_key_values"] = pair
            compile_with_masks_only(model, generation_config, model_kwargs)
        return prepare(generation_config, model_kwargs)
    state = state_of(model)
    if state is not None:
        cache.count_fallbacks_in(state.fallbacks)
    if model.config.is_encoder_decoder:
        pair = beside_cross_attention(cache, prepare, generation_config, model_kwargs)
        if pair is None:
            raise _no_cache_of_the_decoder(model)
        model_kwargs["past_key_values"] = pair
        compile_with_masks_only(model, generation_config, model_kwargs)
    else:
        model_kwargs["past_key_values"] = cache
    if generation_config.prefill_chunk_size is not None and not is_captured(cache):
        generating: Any = model
        if generating._valid_auto_compile_criteria(model_kwargs, generation_config):
            _allocate_early(model, cache, batch, generation_config)
    if _asks_for_us(generation_config):
        # An assistant model gets this call's copy of the config. It need not be patched, and transformers' own class
        # does not know our options.
        generation_config.cache_implementation = generation_config.cache_config = None
    if generation_config.is_assistant:
        cache.activate_past_recording()  # type: ignore[no-untyped-call]
    return None


def cache_for(
    model: PreTrainedModel,
    generation_config: Any,
    model_kwargs: Mapping[str, Any],
    *,
    batch: int,
    max_cache_length: int | None,
) -> KVQuantCache | None:
    """A new cache for one call of `generate`, or `None` if the call does not ask for ours.

    Args:
        model: The generating model.
        generation_config: Of this call.
        model_kwargs: Of this call.
        batch: Sequences that the cache will hold, beams included.
        max_cache_length: Tokens that a static cache must hold for this call. `None` if unknown; then the cache grows,
            whatever the config says.

    Raises:
        NotImplementedError, TypeError, ValueError: As `KVQuantCache`. `output_attentions`, and a cache together with
            `use_cache=False`, are refused too.
    """
    state = state_of(model)
    given = model_kwargs.get("past_key_values")
    own = decoder_cache(given)
    if isinstance(given, (str, Mapping, KVQuantConfig, type)):
        raise TypeError(
            f"generate: `past_key_values` must be a cache, got {type(given).__name__}. "
            "Pass KVQuantCache(model.config, ...), or patch the model with the config and pass nothing."
        )
    if own is not None and generation_config.use_cache is False:
        raise ValueError(
            "generate: `use_cache` must be True with a KVQuantCache, got False: every step would add the whole "
            "sequence to the cache again. Pass use_cache=True (generation_config may say otherwise), or no cache."
        )
    if own is not None:
        check_layers("generate", "past_key_values", len(own.layers), count_layers(model.config))
        check_cross_attention(model, given, model_kwargs)
        own.undo_step()
        _check_new_tokens(model, own, generation_config, model_kwargs)
        if state is not None:
            own.adopt(key_transforms(model, own.quant_config))
    if is_captured(own):
        _check_capture(model, state, generation_config)
        own.check_in_step()
    if given is not None or generation_config.use_cache is False:
        return None
    if _asks_for_us(generation_config):
        options = {
            key: value for key, value in generation_config.cache_config.items() if key not in ("backend", "config")
        }
        config = KVQuantConfig.from_dict(options) if options or state is None else state.config
    elif state is not None and generation_config.cache_implementation is None:
        config = state.config
    else:
        return None
    if not keeps_cache(model):
        raise _no_cache_of_the_decoder(model)
    check_cross_attention(model, None, model_kwargs)
    if model.config.is_encoder_decoder:
        _keep_attention(model)
        if generation_config.prefill_chunk_size is not None:
            raise NotImplementedError(
                f"generate: `prefill_chunk_size` must be None for {type(model).__name__}, got "
                f"{generation_config.prefill_chunk_size}: transformers would cut the encoder's mask to the chunk. "
                "Leave it out."
            )
    if generation_config.output_attentions:
        raise NotImplementedError(
            "generate: `output_attentions` must be False with a quantised cache, got True: attention weights are never "
            "formed. Use hf_kvquant.unpatch, or another cache_implementation."
        )
    check_heads(model, "generate")
    if generation_config.is_assistant:
        # With early exit a model assists itself, with its first layers only.
        num_layers = len(layers_of(text_config_of(model))[0])
        layers = {index: formats for index, formats in config.layers.items() if index < num_layers}
        config = dataclasses.replace(config, layers=layers)
    transforms = key_transforms(model, config)
    if max_cache_length is None:
        config = dataclasses.replace(config, static=False, max_cache_len=None, capture=False)
        return KVQuantCache(model.config, config, key_transforms=transforms)
    if not config.static:
        return KVQuantCache(model.config, config, key_transforms=transforms)
    _check_static(model, "generate")
    if config.capture:
        _check_capture(model, state, generation_config)
    if config.max_cache_len is not None and config.max_cache_len < max_cache_length:
        raise ValueError(
            f"generate: `max_cache_len` must be at least {max_cache_length} for this prompt and max_new_tokens, "
            f"got {config.max_cache_len}. Raise it in the config, or leave it out and pass static=True."
        )
    pool = pool_of(model)
    pool.reclaim()
    max_cache_len = config.max_cache_len or _static_length(pool, batch, max_cache_length)
    return KVQuantCache(model.config, config, max_cache_len=max_cache_len, key_transforms=transforms, pool=pool)


def _check_new_tokens(
    model: PreTrainedModel, cache: KVQuantCache, generation_config: Any, model_kwargs: Mapping[str, Any]
) -> None:
    """Refuse input without new tokens: transformers would feed the model tokens that the cache holds already.

    A call that was interrupted between steps leaves such a cache.

    Raises:
        ValueError: The cache holds the whole input.
    """
    mask = model_kwargs.get("attention_mask")
    tokens = getattr(generation_config, "_mask_length", None) if mask is None else mask.shape[-1]
    held = max((storage.length for storage in cache.storages), default=0)
    if model.config.is_encoder_decoder or tokens is None or tokens > held or held == 0:
        return
    raise ValueError(
        f"generate: `input_ids` must have tokens after the {held} that `past_key_values` holds, got {tokens} in all, "
        f"padding included. Call crop({tokens - 1 - held}) on the cache to continue from them, or reset it."
    )


def _no_cache_of_the_decoder(model: PreTrainedModel) -> NotImplementedError:
    return NotImplementedError(
        f"generate: {type(model).__name__} does not keep a cache of its decoder alone, so it cannot be quantised. "
        "Drop cache_config, or unpatch the model."
    )


def _keep_attention(model: PreTrainedModel) -> None:
    """Set our attention again on a patched model that has switched to another implementation, over that one.

    Whisper switches to eager attention for good when it is asked for token timestamps.
    """
    current = text_config_of(model)._attn_implementation
    if state_of(model) is not None and not is_ours(current) and model._can_set_attn_implementation():
        set_attention(model, implementation_name(current))


def _static_length(pool: BufferPool, batch: int, needed: int) -> int:
    """The length of a static cache for `needed` tokens: that of idle buffers, if they are long enough.

    Shorter buffers would save memory only after the idle ones were freed, and graphs would be captured again.
    """
    kinds = (kind for kind in pool.kinds() if isinstance(kind, BufferKind))
    idle = max((kind.max_cache_len for kind in kinds if kind.shape[0] == batch), default=0)
    return idle if idle >= needed else -(-needed // STATIC_STEP) * STATIC_STEP


def _allocate_early(model: PreTrainedModel, cache: KVQuantCache, batch: int, generation_config: Any) -> None:
    """Allocate the buffers before a prefill in chunks, which transformers compiles from the first chunk on.

    A compiled step must not allocate them, since they would be in the memory of its graph. If their shape is unknown
    before the first tokens, the call is not compiled.
    """
    shape_of: Callable[[], tuple[Any, Any] | None] | None = getattr(model, "_get_static_cache_init_shape", None)
    shape = None if shape_of is None else shape_of()
    if shape is None:
        leave_uncompiled(
            model,
            generation_config,
            "when its prompt comes in chunks, since its layers are on several devices, or have shapes that are unknown "
            "before the first tokens",
            "Leave prefill_chunk_size out.",
        )
        return
    num_heads, head_dim = shape
    cache.early_initialization(batch, num_heads, head_dim, model.dtype, model.device)


def _check_capture(model: PreTrainedModel, state: PatchState | None, generation_config: Any) -> None:
    """Refuse a cache with `capture=True` if nothing would be captured."""
    if state is None or not state.config.capture:
        raise ValueError(
            "generate: `capture` must be False unless the model is patched with it, got True. "
            "Call hf_kvquant.patch with capture=True in the config."
        )
    if generation_config.compile_config is not None:
        raise ValueError(
            "generate: `compile_config` must be None with capture=True, got a CompileConfig. Captured steps are not "
            "compiled: leave it out, or patch the model with static=True instead of capture=True."
        )
    check_capturable(model)


def _asks_for_us(generation_config: Any) -> bool:
    """Whether a call names our backend.

    Raises:
        TypeError, ValueError: The request is misspelt or incomplete: transformers would ignore it, or fail elsewhere.
    """
    implementation, cache_config = generation_config.cache_implementation, generation_config.cache_config
    if isinstance(cache_config, KVQuantConfig):
        raise TypeError("generate: `cache_config` must be a dictionary, got a KVQuantConfig. Pass its to_dict().")
    if not isinstance(cache_config, Mapping) or implementation not in (None, "quantized"):
        return False
    backend = cache_config.get("backend")
    if backend == BACKEND and implementation is None:
        raise ValueError(
            f"generate: `cache_implementation` must be 'quantized' with the backend '{BACKEND}' in cache_config, got "
            "None. Pass both, or neither for what the model was patched with."
        )
    # No backend of transformers has presets.
    if is_like_backend(backend) or (backend is None and "preset" in cache_config):
        raise ValueError(
            f"generate: `backend` in cache_config must be '{BACKEND}' for a cache of this package, got {backend!r}. "
            f"Did you mean '{BACKEND}'?"
        )
    return bool(backend == BACKEND)


def keeps_cache(model: PreTrainedModel) -> bool:
    """Whether the model works with transformers' default cache; without `generate`, whether it accepts a cache."""
    is_supported: Callable[[], bool] | None = getattr(model, "_supports_default_dynamic_cache", None)
    if is_supported is not None:
        return is_supported()
    # BERT accepts a cache only as a decoder, which its config tells; other configs have no such attribute.
    is_encoder = getattr(model.config, "is_decoder", None) is False and not model.config.is_encoder_decoder
    return "past_key_values" in inspect.signature(type(model).forward).parameters and not is_encoder


def check_patchable(model: PreTrainedModel, config: KVQuantConfig) -> None:
    check_is_model(model, "patch")
    if model.config.is_encoder_decoder and config.capture:
        raise NotImplementedError(
            f"patch: `capture` must be False for {type(model).__name__}, got True: it is an encoder-decoder, whose "
            "cross-attention reads tensors that are new in every call. Pass static=True instead, and generate compiles."
        )
    if not keeps_cache(model):
        raise NotImplementedError(
            f"patch: {type(model).__name__} does not keep its state in a cache of transformers, so there are no keys "
            "and values to quantise. Leave the model unpatched."
        )
    text_config = text_config_of(model)
    layer_types, _ = layers_of(text_config)
    check_model(text_config, layer_types, config)
    check_heads(model, "patch")
    if config.static:
        _check_static(model, "patch")


def _check_static(model: PreTrainedModel, where: str) -> None:
    own_attention.check_static(model, where)
    encoder_decoder.check_static(model, where)


# Models whose fallback has been logged.
_told: weakref.WeakSet[PreTrainedModel] = weakref.WeakSet()


def _route_attention(model: PreTrainedModel, previous: str) -> None:
    """Set our attention over `previous`. Models outside transformers' registry get ours by hand, or fall back."""
    name = implementation_name(previous)
    if own_attention.patch(model):
        return
    set_attention(model, name)
    reason = why_dense(model)
    if reason is not None and model not in _told:
        _told.add(model)
        logger.warning("patch: %s, so it attends to dequantised tensors. Correct, slower.", reason)


def why_dense(model: PreTrainedModel) -> str | None:
    """Why a patched model always attends to dequantised tensors, or `None` if it does not."""
    if is_ours(text_config_of(model)._attn_implementation) or own_attention.is_patched(model):
        return None
    return f"{type(model).__name__} computes attention by itself, outside transformers' registry"


# Models that do not let their attention be set. transformers would warn at every attempt.
_unreachable: weakref.WeakSet[PreTrainedModel] = weakref.WeakSet()


def set_attention(model: PreTrainedModel, name: str) -> None:
    """Set the attention implementation of the text model only."""
    text_config = text_config_of(model)
    if text_config._attn_implementation == name or model in _unreachable:
        return
    for key in model.config.sub_configs:
        if getattr(model.config, key, None) is text_config:
            model.set_attn_implementation({key: name})
            break
    else:
        # The model's own config, or that of an encoder-decoder: one for both halves, of which `text_config` is a copy.
        model.set_attn_implementation(name)
        # T5 gives each half a copy of its config, of the same class, which transformers 5.17 does not update.
        config = model.config
        for part in model.modules():
            if isinstance(part, PreTrainedModel) and part.config is not config and type(part.config) is type(config):
                part.set_attn_implementation(config._attn_implementation)
    if text_config_of(model)._attn_implementation != name:
        _unreachable.add(model)
