"""Refuses models that keep no keys."""

from __future__ import annotations

from transformers import PreTrainedModel

from ..cache.support import check_model
from ..config import KVQuantConfig
from ..models.latent import keeps_latents
from ..models.layers import keeps_cache, layers_of
from ..models.sharding import check_whole
from ..models.text_config import check_is_model, text_config_of


def check_decoder(model: PreTrainedModel, where: str, *, are_latents_served: bool = False) -> None:
    """Refuse a model that keeps no keys that could be quantised.

    Args:
        model: The model.
        where: Begins the message.
        are_latents_served: Whether layers may keep latents (MLA) instead.

    Raises:
        TypeError: `model` is not a `PreTrainedModel`.
        NotImplementedError: It is no decoder, caches something other than keys, or is sharded over processes.
    """
    check_is_model(model, where)
    if model.config.is_encoder_decoder or not keeps_cache(model):
        raise NotImplementedError(
            f"{where}: `model` must be a decoder that keeps keys and values in a cache of transformers, got "
            f"{type(model).__name__}. Leave it as it is."
        )
    text_config = text_config_of(model)
    check_model(text_config, layers_of(text_config)[0], KVQuantConfig.from_preset("none"))
    if keeps_latents(text_config) and not are_latents_served:
        raise NotImplementedError(
            f"{where}: `model` must keep keys and values per head, got {type(model).__name__}, which keeps latents "
            "(MLA). Caches rotate these by themselves. Leave it as it is."
        )
    check_whole(model, where)
