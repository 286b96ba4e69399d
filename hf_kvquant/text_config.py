"""Which config of a model speaks of the layers that have a cache, and what it says of their context.

It stands alone so that `patching.py` and the transforms, of which either needs the other, can both ask.
"""

from __future__ import annotations

from transformers import PreTrainedConfig, PreTrainedModel


def text_config_of(model: PreTrainedModel) -> PreTrainedConfig:
    """The config of the text model: of a model that sees pictures too, or of an encoder-decoder's decoder."""
    config: PreTrainedConfig = model.config.get_text_config(decoder=True)
    return config


def context_of(model: PreTrainedModel) -> int | None:
    """The positions that a model was made for, or `None` where its config names none."""
    context = getattr(text_config_of(model), "max_position_embeddings", None)
    return context if isinstance(context, int) and context > 0 else None


def positions_of(model: PreTrainedModel, most: int) -> int:
    """`most` positions, or all that a model was made for where these are fewer."""
    return min(context_of(model) or most, most)
