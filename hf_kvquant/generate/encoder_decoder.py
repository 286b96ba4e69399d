"""The caches of encoder-decoders: ours for the decoder's self-attention, transformers' own for cross-attention.

Self-attention adds keys and values with every token, so a `KVQuantCache` holds them. Cross-attention's keys and values
are computed once, from the encoder's states, and models read them as plain tensors of the layer, without `update`. They
stay in the cache that transformers makes for the model, and are not quantised.
"""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Callable, Mapping
from typing import Any

from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache, EncoderDecoderCache

from ..cache.kvquant_cache import KVQuantCache
from ..upstream.releases import CACHE, MAKES_MASKS_FIRST

logger = logging.getLogger(__name__)

# Under these names `generate` passes an encoder's states on to a decoder.
_ENCODER_STATES = ("encoder_outputs", "encoder_hidden_states")


class KVQuantEncoderDecoderCache(EncoderDecoderCache):
    """An `EncoderDecoderCache` over a `KVQuantCache` that can be cropped, as assisted decoding needs.

    transformers' own class can be cropped only over a `DynamicCache`, which ours is not.
    """

    def check_dynamic_cache(self, method: str) -> None:
        """Refuse what the cache of cross-attention cannot do. A crop does not change that cache.

        Raises:
            TypeError: That cache is static.
        """
        if method != "crop" and not isinstance(self.cross_attention_cache, DynamicCache):
            super().check_dynamic_cache(method)


def decoder_cache(cache: object) -> KVQuantCache | None:
    """Our cache, alone or within an `EncoderDecoderCache`, if there is one."""
    inner = cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache
    return inner if isinstance(inner, KVQuantCache) else None


def check_cross_attention(model: PreTrainedModel, given: object, model_kwargs: Mapping[str, Any]) -> None:
    """Refuse to mix keys of cross-attention with keys of the decoder.

    A model writes both kinds into any cache that is not an `EncoderDecoderCache`, one after the other. `given` is the
    cache that the user passed.

    Raises:
        ValueError: A decoder that attends to an encoder's states was given a `KVQuantCache` alone.
    """
    if isinstance(given, EncoderDecoderCache):
        return
    if model.config.is_encoder_decoder or has_encoder_states(model_kwargs):
        raise ValueError(
            f"generate: `{CACHE}` must be an EncoderDecoderCache for {type(model).__name__}, got "
            f"{type(given).__name__}: keys of cross-attention would be taken for the decoder's own. Pass "
            "EncoderDecoderCache(KVQuantCache(...), DynamicCache(config=model.config)), or nothing."
        )


def has_encoder_states(model_kwargs: Mapping[str, Any]) -> bool:
    """Whether a decoder that is a model by itself is given an encoder's states to attend to."""
    return any(model_kwargs.get(states) is not None for states in _ENCODER_STATES)


def compile_with_masks_only(model: PreTrainedModel, generation_config: Any, model_kwargs: Mapping[str, Any]) -> None:
    """Keep `generate` from compiling a step that would have to make our mask, which cannot be traced.

    From 5.18 on, transformers makes the masks of static caches before the step. Earlier versions do so only if the
    decoder has a padding mask.
    """
    if MAKES_MASKS_FIRST or model_kwargs.get("decoder_attention_mask") is not None:
        return
    generating: Any = model
    if generating._valid_auto_compile_criteria(model_kwargs, generation_config):
        leave_uncompiled(
            model,
            generation_config,
            "without a decoder_attention_mask by this version of transformers",
            "Install transformers 5.18 or later, or pass a mask of ones.",
        )


def leave_uncompiled(model: PreTrainedModel, generation_config: Any, when: str, remedy: str) -> None:
    """Keep `generate` from compiling a call that transformers cannot compile. Logged once per model class and reason.

    `when` says which calls these are, and why; `remedy` what the user can do.
    """
    generation_config.disable_compile = True
    _log_uncompiled(type(model).__name__, when, remedy)


@functools.cache
def _log_uncompiled(name: str, when: str, remedy: str) -> None:
    logger.warning("generate: %s is not compiled %s. Correct, slower. %s", name, when, remedy)


def croppable(given: object) -> KVQuantEncoderDecoderCache | None:
    """An `EncoderDecoderCache` over ours as one that can be cropped, over the same caches; `None` for other caches."""
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
    """Our cache together with the cross-attention cache of this call, `None` if transformers would not make a pair.

    `prepare` makes what transformers would have used: T5Gemma's cross-attention does not slide, while its decoder does.
    """
    generation_config, model_kwargs = copy.copy(generation_config), dict(model_kwargs)
    # A static one has the length of the encoder's states and fixed addresses, as compiled steps need.
    generation_config.cache_implementation = "static" if own.is_compileable else None
    generation_config.cache_config = None
    prepare(generation_config, model_kwargs)
    made = model_kwargs.get(CACHE)
    if not isinstance(made, EncoderDecoderCache):
        return None
    return KVQuantEncoderDecoderCache(own, made.cross_attention_cache)
