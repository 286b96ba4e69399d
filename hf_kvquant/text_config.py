"""Which config of a model speaks of the layers that have a cache.

It stands alone so that `patching.py` and the transforms, of which either needs the other, can both ask.
"""

from __future__ import annotations

from transformers import PreTrainedConfig, PreTrainedModel


def text_config_of(model: PreTrainedModel) -> PreTrainedConfig:
    """The config of the text model: of a model that sees pictures too, or of an encoder-decoder's decoder."""
    config: PreTrainedConfig = model.config.get_text_config(decoder=True)
    return config
