"""Caches of encoder-decoders: ours for what the decoder has written, transformers' own for what the encoder has said.

A decoder's self-attention grows with every token, so it is kept in a `KVQuantCache`. The keys and values of
cross-attention are computed once, from the encoder's states; models read them past `update`, as plain tensors of the
layer. They stay in the cache that transformers makes for the model, and are not quantised. When `generate` builds
either is decided in `patching.py`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import transformers
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache

from .cache import KVQuantCache
from .uncompiled import leave_uncompiled

_MAKES_MASKS = tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 18)

# Under these names `generate` passes an encoder's states on to a decoder.
_ENCODER_STATES = ("encoder_outputs", "encoder_hidden_states")


class KVQuantEncoderDecoderCache(EncoderDecoderCache):
    """An `EncoderDecoderCache` over a `KVQuantCache` that can be cropped, as assisted decoding does.

    transformers' own class takes only `DynamicCache`s for that, of which ours is none.

    Args:
        self_attention_cache: Of the decoder.
        cross_attention_cache: Of transformers, with the keys and values of the encoder's states.
    """

    def __init__(self, self_attention_cache: KVQuantCache, cross_attention_cache: Cache) -> None:
        super().__init__(self_attention_cache, cross_attention_cache)

    def check_dynamic_cache(self, method: str) -> None:
        """Refuse what the cache of cross-attention cannot do; a crop leaves that one alone.

        Raises:
            TypeError: It is static.
        """
        if method != "crop" and not isinstance(self.cross_attention_cache, DynamicCache):
            super().check_dynamic_cache(method)


def decoder_cache(cache: object) -> KVQuantCache | None:
    """Our cache, alone or within an `EncoderDecoderCache`, if there is one."""
    inner = cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache
    return inner if isinstance(inner, KVQuantCache) else None


def check_cross_attention(model: PreTrainedModel, given: object, model_kwargs: Mapping[str, Any]) -> None:
    """Refuse to mix keys of cross-attention with those of the decoder.

    A model that gets another cache than an `EncoderDecoderCache` writes both kinds into it, one after the other.

    Args:
        model: The generating model.
        given: The cache that somebody passed, `None` where ours is to be made.
        model_kwargs: Of the call of `generate`.

    Raises:
        NotImplementedError: A decoder without its encoder was given an encoder's states.
        ValueError: An encoder-decoder was given a `KVQuantCache` alone.
    """
    if isinstance(given, EncoderDecoderCache):
        return
    name = type(model).__name__
    if model.config.is_encoder_decoder:
        if given is not None:
            raise ValueError(
                f"generate: `past_key_values` must be an EncoderDecoderCache for {name}, got {type(given).__name__}: "
                "keys of cross-attention would be taken for the decoder's own. Pass "
                "EncoderDecoderCache(KVQuantCache(...), DynamicCache(config=model.config)), or nothing."
            )
    elif any(model_kwargs.get(states) is not None for states in _ENCODER_STATES):
        raise NotImplementedError(
            f"generate: {name} was given an encoder's states, and would keep the keys of cross-attention among the "
            "decoder's own. Pass EncoderDecoderCache(KVQuantCache(...), DynamicCache(config=model.config)) as "
            "past_key_values, or unpatch the model."
        )


def check_static(model: PreTrainedModel, where: str) -> None:
    """Refuse a static cache for an encoder-decoder that attends by itself: it would attend to unused capacity too.

    LED and FSMT do, which mask what their caches hold and nothing behind it.

    Raises:
        NotImplementedError: The model is one of them.
    """
    if not model.config.is_encoder_decoder:
        return
    can_set: Callable[[], bool] | None = getattr(model.get_decoder(), "_can_set_attn_implementation", None)
    if can_set is None or not can_set():
        raise NotImplementedError(
            f"{where}: `static` must be False for {type(model).__name__}, got True: it computes attention by itself, "
            "outside transformers' registry, over all that a static cache has room for. Leave static and max_cache_len "
            "out."
        )


def compile_with_masks_only(model: PreTrainedModel, generation_config: Any, model_kwargs: Mapping[str, Any]) -> None:
    """Keep `generate` from compiling a step that would have to make a mask for us, which cannot be traced.

    From 5.18 on, transformers makes the masks of static caches before the step; before, only where the decoder has a
    mask for padding.

    Args:
        model: The generating model.
        generation_config: Of this call; `disable_compile` may be set.
        model_kwargs: Of this call, with an `EncoderDecoderCache` over ours.
    """
    if _MAKES_MASKS or model_kwargs.get("decoder_attention_mask") is not None:
        return
    generating: Any = model
    if generating._valid_auto_compile_criteria(model_kwargs, generation_config):
        leave_uncompiled(
            model,
            generation_config,
            "without a decoder_attention_mask by this version of transformers",
            "Install transformers 5.18 or later, or pass a mask of ones.",
        )


def croppable(given: object) -> KVQuantEncoderDecoderCache | None:
    """A pair over ours as one that can be cropped: the same two caches, so that whoever holds `given` sees both change.

    Args:
        given: What somebody passed as `past_key_values`.

    Returns:
        `None` where `given` is no pair over a cache of ours.
    """
    own = decoder_cache(given)
    if own is None or not isinstance(given, EncoderDecoderCache):
        return None
    if isinstance(given, KVQuantEncoderDecoderCache):
        return given
    cache = KVQuantEncoderDecoderCache(own, given.cross_attention_cache)
    cache.is_updated = given.is_updated
    return cache


def beside_cross_attention(
    own: KVQuantCache,
    prepare: Callable[[Any, dict[str, Any]], Any],
    generation_config: Any,
    model_kwargs: Mapping[str, Any],
) -> KVQuantEncoderDecoderCache | None:
    """Our cache, and for cross-attention the one that transformers would have made for this call.

    Some models have one of their own there (in T5Gemma it does not slide while the decoder's does), so it is not made
    here.

    Args:
        own: Of the decoder's self-attention.
        prepare: Makes what transformers would have used, from a `generation_config` and `model_kwargs`.
        generation_config: Of this call; not changed.
        model_kwargs: Of this call; not changed.

    Returns:
        `None` where transformers makes no `EncoderDecoderCache` for the model.
    """
    generation_config, model_kwargs = copy.copy(generation_config), dict(model_kwargs)
    # A static one is as long as the encoder's states, so that a compiled step finds it in one place.
    generation_config.cache_implementation = "static" if own.is_compileable else None
    generation_config.cache_config = None
    prepare(generation_config, model_kwargs)
    made = model_kwargs.get("past_key_values")
    if not isinstance(made, EncoderDecoderCache):
        return None
    return KVQuantEncoderDecoderCache(own, made.cross_attention_cache)
