"""Which config of a model speaks of the layers that have a cache, and what it says of their context and heads.

It stands alone so that `patching.py` and the transforms, of which either needs the other, can both ask. It refuses what
is no model; which models are served is left to those who ask. What a config does not say in numbers is `None` here, and
tensors show it later.
"""

from __future__ import annotations

from transformers import PreTrainedConfig, PreTrainedModel


def check_is_model(model: object, where: str) -> None:
    """Refuse what is no model of transformers.

    Raises:
        TypeError: It is something else.
    """
    if not isinstance(model, PreTrainedModel):
        raise TypeError(
            f"{where}: `model` must be a transformers PreTrainedModel, got {type(model).__name__}. "
            "Pass the model itself, not a pipeline or a wrapper."
        )


def text_config_of(model: PreTrainedModel) -> PreTrainedConfig:
    """The config of the text model: of a model that sees pictures too, or of an encoder-decoder's decoder."""
    config: PreTrainedConfig = model.config.get_text_config(decoder=True)
    return config


def context_of(model: PreTrainedModel) -> int | None:
    """The positions that a model was made for, or `None` where its config names none."""
    return count_of(text_config_of(model), "max_position_embeddings")


def positions_of(model: PreTrainedModel, most: int) -> int:
    """`most` positions, or all that a model was made for where these are fewer."""
    return min(context_of(model) or most, most)


def head_dim_of(config: PreTrainedConfig) -> int | None:
    """Channels of a head as far as the config of a layer tells; tensors decide in the end."""
    head_dim = getattr(config, "head_dim", None)
    if head_dim is not None:
        return head_dim if isinstance(head_dim, int) else None
    hidden_size, num_heads = count_of(config, "hidden_size"), count_of(config, "num_attention_heads")
    return None if hidden_size is None or num_heads is None else hidden_size // num_heads


def count_of(config: PreTrainedConfig, name: str) -> int | None:
    """A number of things, or `None` where a config has none by this name: vision models list one for each stage."""
    count = getattr(config, name, None)
    return count if isinstance(count, int) and count > 0 else None
