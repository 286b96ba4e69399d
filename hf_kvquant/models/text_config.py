"""Finds the config that describes a model's layers with a cache, and reads context and head_dim from it.

It refuses what is not a model; the callers decide which models are supported. A number that a config does not give is
`None`; the tensors show it later.
"""

from __future__ import annotations

import copy

from transformers import PreTrainedConfig, PreTrainedModel


def check_is_model(
    model: object, where: str, remedy: str = "Pass the model itself, not a pipeline or a wrapper."
) -> None:
    """Refuse anything but a transformers model.

    Args:
        model: What the user passed as `model`.
        where: The function that refuses it, which begins the message.
        remedy: What to pass instead, which ends the message.

    Raises:
        TypeError: It is something else.
    """
    if not isinstance(model, PreTrainedModel):
        if hasattr(model, "get_base_model"):  # peft's PeftModel
            remedy = "Pass model.get_base_model(), which has the adapters in its layers."
        raise TypeError(
            f"{where}: `model` must be a transformers PreTrainedModel, got {type(model).__name__}. {remedy}"
        )


def decoder_part(config: PreTrainedConfig) -> PreTrainedConfig:
    """The config that has the attributes of the layers that write text: a model's own, a part of it, or a copy."""
    found: PreTrainedConfig = config.get_text_config(decoder=True)
    if found.is_encoder_decoder and any(found is part for part in vars(config).values()):  # RAG's generator
        found = found.get_text_config(decoder=True)
    return found


def decoder_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """`decoder_part`, or a copy of it, with the decoder's numbers of layers and heads.

    transformers renames what begins with "decoder", but only in an encoder-decoder: not in a decoder that is a model by
    itself, such as BartForCausalLM. And it leaves T5's and ProphetNet's number of layers to the encoder's.
    """
    found = decoder_part(config)
    names = {"num_hidden_layers": "num_decoder_layers", "num_attention_heads": "num_decoder_attention_heads"}
    for name, theirs in names.items():
        mapped = found.attribute_map.get(name, "")
        if mapped.startswith("encoder_") and not found.is_encoder_decoder:
            theirs = mapped.replace("encoder", "decoder")
        count = count_of(found, theirs)
        if count is not None and count_of(found, name) not in (None, count):
            found = copy.copy(found)
            try:
                setattr(found, name, count)
            except NotImplementedError:  # ProphetNet computes its number of layers
                found.num_encoder_layers -= found.num_hidden_layers - count
    return found


def text_config_of(model: PreTrainedModel) -> PreTrainedConfig:
    """The config of the text model: a part of a multi-modal model's config, or an encoder-decoder's decoder."""
    return decoder_config(model.config)


def context_of(model: PreTrainedModel) -> int | None:
    """The number of positions that a model supports, or `None` if its config does not say."""
    return count_of(text_config_of(model), "max_position_embeddings")


def positions_of(model: PreTrainedModel, most: int) -> int:
    """`most`, or the number of positions that a model supports if that is less."""
    return min(context_of(model) or most, most)


def head_dim_of(config: PreTrainedConfig) -> int | None:
    """Channels of a head according to the config of a layer, or `None`. The tensors decide in the end."""
    head_dim = getattr(config, "head_dim", None)
    if head_dim is not None:
        return head_dim if isinstance(head_dim, int) else None
    hidden_size, num_heads = count_of(config, "hidden_size"), count_of(config, "num_attention_heads")
    return None if hidden_size is None or num_heads is None else hidden_size // num_heads


def count_of(config: PreTrainedConfig, name: str) -> int | None:
    """A count in a config, or `None` if there is none: some vision models have a list here, with one for each stage."""
    count = getattr(config, name, None)
    return count if isinstance(count, int) and count > 0 else None
