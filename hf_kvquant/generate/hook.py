"""The cache of a call of `generate`: whether it is ours, and which.

`patch` puts `prepare_cache` in place of a model's own `_prepare_cache_for_generation`, and `enable` does so for all
models. Where `generate` would have built a default cache, it builds a `KVQuantCache`. The choice is made here and not
in `generation_config`, where it would clash with `cache=` and leak into the calls of an assistant model.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.generation.configuration_utils import GenerationMode

from ..attention.masks import num_pads
from ..attention.registry import implementation_name, is_ours, set_attention
from ..attention.unregistered import check_static
from ..cache.kvquant_cache import KVQuantCache
from ..cache.support import check_layers
from ..config import BACKEND, KVQuantConfig, is_like_backend
from ..models.adapters import adapted, changed
from ..models.layers import count_layers, keeps_cache, layers_of
from ..models.probing import why_without_cache
from ..models.sharding import check_heads
from ..models.text_config import text_config_of
from ..state import notes_on, patch_of, state_of
from ..storage.pool import BufferPool
from ..storage.residency import BufferKind
from ..transforms.of_model import key_transforms
from ..upstream.releases import ASSISTS_STATIC_CACHES, CACHE
from . import continued
from .encoder_decoder import (
    KVQuantEncoderDecoderCache,
    beside_cross_attention,
    check_cross_attention,
    compile_with_masks_only,
    croppable,
    decoder_cache,
    has_encoder_states,
    leave_uncompiled,
)
from .watch import note_cache

logger = logging.getLogger(__name__)

HOOK = "_prepare_cache_for_generation"
# The length of static caches that `generate` sizes itself is a multiple of this, so that calls of similar length share
# buffers and graphs. It costs 128 tokens on average, 1 % of a cache of 16k; powers of two would cost a third.
STATIC_STEP = 256


@dataclasses.dataclass(frozen=True)
class _Call:
    model: PreTrainedModel
    options: Any  # its `generation_config`
    inputs: dict[str, Any]  # its `model_kwargs`
    batch: int  # sequences that a cache of this call holds, beams included
    max_length: int | None  # tokens that a static cache must hold; `None` if unknown, then the cache grows
    is_assisted: bool  # whether other tokens are proposed to its model
    is_cropped: bool  # whether transformers' own loop of assisted decoding takes back what was not accepted
    # Refuses a model whose steps cannot be captured; `None` refuses to capture.
    check_capturable: Callable[[PreTrainedModel], None] | None


def prepare_cache(
    model: PreTrainedModel,
    generation_config: Any,
    model_kwargs: dict[str, Any],
    generation_mode: Any,
    batch_size: int,
    max_cache_length: int,
    *,
    fall_through: Callable[..., Any] | None = None,
    check_capturable: Callable[[PreTrainedModel], None] | None = None,
    **options: Any,
) -> Any:
    """Replaces `GenerationMixin._prepare_cache_for_generation`: makes our cache if the call asks for it.

    Arguments are as in that method; `options` are arguments that some models add. `fall_through` prepares every other
    cache; `None` means the model class's own method.

    Raises:
        NotImplementedError, TypeError, ValueError: As `KVQuantCache`. `output_attentions`, a cache together with
            `use_cache=False`, and gradient checkpointing in training mode are refused too.
    """
    batch = batch_size * max(generation_config.num_beams or 1, generation_config.num_return_sequences or 1)
    max_length: int | None = max_cache_length
    is_cropped, is_assisted = False, generation_mode == GenerationMode.ASSISTED_GENERATION
    if generation_config.is_assistant or is_assisted:
        is_cropped = notes_on(model).assisted is None
        max_length = _assisted_length(model, generation_config, max_cache_length)
    call = _Call(model, generation_config, model_kwargs, batch, max_length, is_assisted, is_cropped, check_capturable)

    def prepare(generation_config: Any, model_kwargs: dict[str, Any]) -> Any:
        method = fall_through or getattr(type(model), HOOK)
        return method(model, generation_config, model_kwargs, generation_mode, batch_size, max_cache_length, **options)

    check_folded(model, "generate")
    if generation_config.is_assistant and patch_of(model) is not None:
        _drop_guessed_mask(generation_config, model_kwargs)
    _check_given(call)
    given = model_kwargs.get(CACHE)
    config = None if given is not None else config_for(model, generation_config)
    if config is None:
        note_cache(model, decoder_cache(given))
        pair = croppable(given)
        if pair is not None:
            model_kwargs[CACHE] = pair
            compile_with_masks_only(model, generation_config, model_kwargs)
        return prepare(generation_config, model_kwargs)
    why_not = why_without_cache(model)
    if why_not is not None:
        raise ValueError(f"generate: `model` must keep its cache, got a {type(model).__name__} {why_not}")
    if not model.config.is_encoder_decoder and generation_config.guidance_scale not in (None, 1):
        _log_guidance()
    cache = _new_cache(call, config)
    cache.notes.beams_from = _shared_by_beams(call)
    _tell_padding(call, cache)
    note_cache(model, cache)
    patch = patch_of(model)
    if patch is not None:
        cache.count_fallbacks_in(patch.fallbacks)
    if model.config.is_encoder_decoder:
        pair = beside_cross_attention(cache, prepare, generation_config, model_kwargs)
        if pair is None:
            raise _no_cache_of_the_decoder(model)
        model_kwargs[CACHE] = pair
        compile_with_masks_only(model, generation_config, model_kwargs)
    elif has_encoder_states(model_kwargs):
        if cache.is_static:
            raise NotImplementedError(
                f"generate: `static` must be False for {type(model).__name__} with an encoder's states, got True: "
                "their number is not known in advance. Leave out static, max_cache_len and capture."
            )
        model_kwargs[CACHE] = KVQuantEncoderDecoderCache(cache, DynamicCache())
    else:
        model_kwargs[CACHE] = cache
    if generation_config.prefill_chunk_size is not None and not cache.quant_config.capture:
        _allocate_early(call, cache)
    if asks_for_us(generation_config):
        # An assistant gets this copy of the config. It need not be patched, and transformers knows none of our options.
        generation_config.cache_implementation = generation_config.cache_config = None
    if generation_config.is_assistant:
        cache.activate_past_recording()  # type: ignore[no-untyped-call]
    return None


def _drop_guessed_mask(options: Any, inputs: dict[str, Any]) -> None:
    """Drop the mask of an assistant's call if the model that it assists has dropped one that hides nothing.

    In transformers 5.18 to 5.23 an assistant gets none then, and hides every padding token that it finds in the text,
    although the model sees them. Attention with such holes falls back.
    """
    mask = inputs.get("attention_mask")
    if mask is not None and getattr(options, "_mask_length", None) is not None:
        options._mask_length = mask.shape[-1]  # before, the length of the assisted model's prompt
        inputs["attention_mask"] = None


def _assisted_length(model: PreTrainedModel, generation_config: Any, max_length: int) -> int | None:
    """Tokens that a static cache of assisted decoding must hold; `None` if the cache is to grow.

    Proposals may go beyond the requested length: prompt lookup proposes as many tokens as asked for, wherever it
    starts. An assistant's `generate` is called many times with one cache, each time for the next few tokens. So the
    call that they belong to has noted what is needed if it is captured; else the assistant's cache grows.
    """
    assisted, patch = notes_on(model).assisted, patch_of(model)
    needed: int | None = max_length + (generation_config.prompt_lookup_num_tokens or 0)
    if assisted is None:
        needed = needed if ASSISTS_STATIC_CACHES and not generation_config.is_assistant else None
    elif generation_config.is_assistant:
        needed = assisted.max_length
    else:
        assisted.max_length = needed
    given = None if patch is None else patch.config.max_cache_len
    if needed is not None and given is not None and given < needed:
        _log_growing(needed, given)
        return None
    return needed


@functools.cache
def _log_growing(needed: int, given: int) -> None:
    logger.warning(
        "generate keeps no static cache for this assisted decoding: `max_cache_len` must be at least %d for this "
        "prompt, max_new_tokens and the proposals, got %d. Correct, slower.",
        needed,
        given,
    )


@functools.cache
def _log_guidance() -> None:
    logger.warning(
        "generate keeps a second cache for `guidance_scale`, that of the negative prompt, which transformers makes and "
        "which is not quantised."
    )


def asks_for_us(generation_config: Any) -> bool:
    """Whether a call names our backend. Refuses requests that transformers would ignore, or that fail elsewhere."""
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


def config_for(model: PreTrainedModel, generation_config: Any) -> KVQuantConfig | None:
    """The config of the cache that a generation config asks for, or `None` if it does not ask for one of ours."""
    if generation_config.use_cache is False:
        return None
    patch = patch_of(model)
    if asks_for_us(generation_config):
        given = generation_config.cache_config
        options = {key: value for key, value in given.items() if key not in ("backend", "config")}
        return KVQuantConfig.from_dict(options) if options or patch is None else patch.config
    return None if patch is None or generation_config.cache_implementation is not None else patch.config


def _check_given(call: _Call) -> None:
    """Refuse what cannot be used as the cache of a call, and make a cache of ours ready for the call."""
    model = call.model
    given = call.inputs.get(CACHE)
    if isinstance(given, (str, Mapping, KVQuantConfig, type)):
        raise TypeError(
            f"generate: `{CACHE}` must be a cache, got {type(given).__name__}. "
            "Pass KVQuantCache(model.config, ...), or patch the model with the config and pass nothing."
        )
    own = decoder_cache(given)
    if own is None:
        return
    if call.options.use_cache is False:
        raise ValueError(
            "generate: `use_cache` must be True with a KVQuantCache, got False: every step would add the whole "
            "sequence to the cache again. Pass use_cache=True (generation_config may say otherwise), or no cache."
        )
    if is_ours(text_config_of(model)._attn_implementation):
        _check_no_weights(call)  # now: the second forward would raise when some layers have its tokens
    check_layers("generate", CACHE, own.num_layers, count_layers(model.config))
    check_cross_attention(model, given, call.inputs)
    own.undo_step()
    own.notes.check_no_beams("generate", CACHE, own.num_tokens)
    _check_new_tokens(call, own)
    if patch_of(model) is not None:
        own.adopt(key_transforms(model, own.quant_config))
    if own.quant_config.capture:
        _check_capture(call)
        own.check_in_step()
    _tell_padding(call, own)
    if call.is_assisted and isinstance(given, KVQuantCache) and own.num_tokens > 0:
        continued.read_only_new(model, own, _text_length(call))
    own.notes.beams_from = _shared_by_beams(call)


def _shared_by_beams(call: _Call) -> int | None:
    """Tokens that all beams of a call have in common; `None` if it has one beam."""
    if (call.options.num_beams or 1) == 1:
        return None
    return 0 if call.model.config.is_encoder_decoder else _text_length(call) or 0


def _text_length(call: _Call) -> int | None:
    """Tokens of the text of a call, padding and those that its cache holds included; `None` if unknown."""
    mask = call.inputs.get("attention_mask")
    return getattr(call.options, "_mask_length", None) if mask is None else mask.shape[-1]


def _tell_padding(call: _Call, cache: KVQuantCache) -> None:
    """Tell a cache where the padding of the prompt ends, since some models make their masks without asking us."""
    mask = call.inputs.get("decoder_attention_mask" if call.model.config.is_encoder_decoder else "attention_mask")
    cache.notes.told = None
    if isinstance(mask, Tensor) and mask.ndim == 2 and call.batch % mask.shape[0] == 0:
        starts = num_pads(mask.bool()).repeat_interleave(call.batch // mask.shape[0])
        cache.notes.told = starts, mask.shape[1]


def _check_new_tokens(call: _Call, cache: KVQuantCache) -> None:
    """Refuse input without new tokens: transformers would feed the model tokens that the cache holds already.

    A call that was interrupted between steps leaves such a cache.
    """
    tokens, held = _text_length(call), cache.num_tokens
    if call.model.config.is_encoder_decoder:
        if held > 0 and call.inputs.get("decoder_attention_mask") is None and not call.options.is_assistant:
            raise ValueError(
                f"generate: `decoder_attention_mask` must be given with a cache that holds tokens, got None: without "
                f"it, transformers feeds the model the {held} tokens again that `{CACHE}` holds. Pass ones for all of "
                "decoder_input_ids, which must be the whole text."
            )
        return
    if tokens is None or tokens > held or held == 0:
        return
    raise ValueError(
        f"generate: `input_ids` must have tokens after the {held} that `{CACHE}` holds, got {tokens} in all, "
        "padding included. Reset the cache, or pass a new one, for another text. If it holds these tokens, call "
        f"crop({tokens - 1 - held}) on it to continue from them."
    )


def _new_cache(call: _Call, config: KVQuantConfig) -> KVQuantCache:
    model = call.model
    _check_call(call)
    if call.options.is_assistant:
        # With early exit a model assists itself, with its first layers only.
        num_layers = count_layers(model.config)
        layers = {index: formats for index, formats in config.layers.items() if index < num_layers}
        config = dataclasses.replace(config, layers=layers)
    if call.max_length is None or (call.is_cropped and not _are_crops_exact(model, config)):
        config = dataclasses.replace(config, static=False, max_cache_len=None, capture=False)
    buffers: dict[str, Any] = {}
    if config.static and call.max_length is not None:
        check_static(model, "generate")
        if config.capture:
            _check_capture(call)
        if config.max_cache_len is not None and config.max_cache_len < call.max_length:
            raise ValueError(
                f"generate: `max_cache_len` must be at least {call.max_length} for this prompt and max_new_tokens, "
                f"got {config.max_cache_len}. Raise it in the config, or leave it out and pass static=True."
            )
        pool = notes_on(model).pool
        pool.reclaim()
        length = config.max_cache_len or _static_length(pool, call.batch, call.max_length)
        buffers = {"max_cache_len": length, "pool": pool}
    return KVQuantCache(model.config, config, key_transforms=key_transforms(model, config), **buffers)


def _are_crops_exact(model: PreTrainedModel, config: KVQuantConfig) -> bool:
    """Whether a static cache can take back any number of tokens: not where transformers keeps a window or a state.

    Captured forwards have a loop of their own. Where that does not serve a call, caches grow, as they do for all calls
    before transformers 5.24.
    """
    ours = {"full_attention", *(("sliding_attention",) if config.sliding else ())}
    return not config.capture and set(layers_of(text_config_of(model))[0]) <= ours


_UNDO = {"smooth_attention": "unsmooth", "rotate_values": "unrotate_values"}


def check_folded(model: PreTrainedModel, where: str) -> None:
    """Refuse adapters on, or merged into, weights that were changed after the model was loaded: they do not fit them.

    Raises:
        ValueError: There are some.
    """
    for function, samples in (state_of(model).folded or {}).items():
        found = adapted(model, samples)
        if found:
            raise ValueError(
                f"{where}: `model` must not have adapters on weights that {function} has changed, got one at "
                f"{found[0]}. Call hf_kvquant.{_UNDO[function]}(model) first; smooth_attention then leaves the factors "
                "to the caches. If the adapter was trained after the change, save the model, and load both."
            )
        name = changed(model, samples)
        if name is not None:
            raise ValueError(
                f"{where}: `model` must have the weights that {function} left, got others at {name}. If an adapter was "
                "merged into them, it does not fit: load the model again, and merge first. If they were trained since, "
                "save the model and load that."
            )


def _check_call(call: _Call) -> None:
    """Refuse a model, or options of a call, that our caches do not serve."""
    model = call.model
    if not keeps_cache(model):
        raise _no_cache_of_the_decoder(model)
    if model.config.is_encoder_decoder:
        _keep_attention(model)
        if call.options.prefill_chunk_size is not None:
            raise NotImplementedError(
                f"generate: `prefill_chunk_size` must be None for {type(model).__name__}, got "
                f"{call.options.prefill_chunk_size}: transformers would cut the encoder's mask to the chunk. "
                "Leave it out."
            )
    _check_no_weights(call)
    check_heads(model, "generate")


def _check_no_weights(call: _Call) -> None:
    """Refuse to return attention weights."""
    if call.options.output_attentions:
        raise NotImplementedError(
            "generate: `output_attentions` must be False with a quantised cache, got True: attention weights are never "
            "formed. Use hf_kvquant.unpatch, or another cache_implementation."
        )


def _check_capture(call: _Call) -> None:
    """Refuse a cache with `capture=True` if nothing would be captured."""
    if call.check_capturable is None:
        raise ValueError(
            "generate: `capture` must be False unless the model is patched with it, got True. "
            "Call hf_kvquant.patch with capture=True in the config."
        )
    if call.options.compile_config is not None:
        raise ValueError(
            "generate: `compile_config` must be None with capture=True, got a CompileConfig. Captured steps are not "
            "compiled: leave it out, or patch the model with static=True instead of capture=True."
        )
    call.check_capturable(call.model)


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
    if patch_of(model) is not None and not is_ours(current) and model._can_set_attn_implementation():
        set_attention(model, implementation_name(current))


def _static_length(pool: BufferPool, batch: int, needed: int) -> int:
    """The length of a static cache for `needed` tokens: the length of idle buffers, if that is enough.

    Shorter buffers would save memory only after the idle ones were freed, and graphs would be captured again.
    """
    kinds = (kind for kind in pool.kinds() if isinstance(kind, BufferKind))
    idle = max((kind.max_cache_len for kind in kinds if kind.shape[0] == batch), default=0)
    return idle if idle >= needed else -(-needed // STATIC_STEP) * STATIC_STEP


def _allocate_early(call: _Call, cache: KVQuantCache) -> None:
    """Allocate the buffers before a prefill in chunks, which transformers compiles from the first chunk on.

    A compiled step must not allocate them, since they would be in the memory of its graph. If their shape is unknown
    before the first tokens, the call is not compiled.
    """
    model: Any = call.model
    if not model._valid_auto_compile_criteria(call.inputs, call.options):
        return
    shape: tuple[Any, Any] | None = getattr(model, "_get_static_cache_init_shape", lambda: None)()
    if shape is None:
        leave_uncompiled(
            model,
            call.options,
            "when its prompt comes in chunks, since its layers are on several devices, or have shapes that are unknown "
            "before the first tokens",
            "Leave prefill_chunk_size out.",
        )
    else:
        cache.early_initialization(call.batch, *shape, model.dtype, model.device)
