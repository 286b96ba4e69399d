"""What a saved cache belongs to: one model, of which it keeps a description and a hash."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import torch
from transformers import PreTrainedModel

from ..config import KVQuantConfig
from ..models.hashes import quoted, weights_hash
from ..models.layers import layer_devices
from ..models.sharding import rank_of
from ..models.text_config import check_is_model, text_config_of

# Text config settings that keys and values do not depend on. They may differ between machines, versions and tokenizers.
_VOLATILE = frozenset(
    (
        "architectures",
        "bos_token_id",
        "chunk_size_feed_forward",
        "dtype",
        "eos_token_id",
        "id2label",
        "initializer_range",
        "label2id",
        "output_attentions",
        "output_hidden_states",
        "pad_token_id",
        "problem_type",
        "return_dict",
        "transformers_version",
        "use_cache",
    )
)


def check_model(where: str, model: PreTrainedModel) -> None:
    check_is_model(model, where, "Pass the model that the cache belongs to.")
    if model.config.is_encoder_decoder:
        raise NotImplementedError(
            f"{where}: `model` must be decoder-only, got {type(model).__name__}, an encoder-decoder, which also needs "
            "the encoder's keys and values. Pickle the whole EncoderDecoderCache."
        )
    _, num_ranks = rank_of(model)
    if num_ranks > 1:
        raise NotImplementedError(
            f"{where}: `model` must be whole in this process, got one that is sharded over {num_ranks} ranks, each "
            "with some of the heads. Load it on one rank, or keep the text."
        )


def identity(model: PreTrainedModel) -> dict[str, Any]:
    """What identifies a model."""
    weights = weights_hash(model)  # first: compressed-tensors changes the config when it unpacks the weights
    settings = {
        name: value
        for name, value in text_config_of(model).to_dict().items()
        if name not in _VOLATILE and not name.startswith("_")
    }
    return {
        "config": json.loads(json.dumps(settings, default=str)),  # as `load` reads it
        "dtype": str(model.dtype).removeprefix("torch."),
        "weights_sha256": weights,
    }


def check_meant(
    where: str,
    name: str,
    model: PreTrainedModel,
    saved_by: tuple[Any, Any, Any],
    config: KVQuantConfig,
    wanted: KVQuantConfig | None,
) -> None:
    """Refuse a file of another model or config. `offloading` may differ, since it does not change codes."""
    if wanted is not None and config != dataclasses.replace(wanted, offloading=config.offloading):
        raise ValueError(
            f"{where}: `preset_or_config` must be what {name} was saved with, {config}, got {wanted}. "
            "Leave it out to take the file as it is."
        )
    own = identity(model)
    settings, dtype, weights = saved_by
    # Only compare settings that both know: other versions of transformers have more or fewer.
    differing = [
        f"{key} is {own['config'][key]!r}, not {quoted(repr(value))}"
        for key, value in settings
        if key in own["config"] and own["config"][key] != value
    ]
    if own["dtype"] != dtype:
        differing.append(f"dtype is {own['dtype']}, not {quoted(dtype)}")
    if not differing and own["weights_sha256"] != weights:
        differing.append("its weights differ (fine-tuned, adapted, calibrated or quantised since?)")
    if differing:
        raise ValueError(
            f"{where}: `model` must be the one that {name} was saved with, got a {type(model).__name__}: "
            f"{'; '.join(differing)}. Load that model, or fill a new cache from the text."
        )


def places_of(where: str, model: PreTrainedModel, device: torch.device | str | None) -> dict[int, torch.device]:
    """The device of each layer's cache: `device` if given, else where the layer's weights are.

    Raises:
        ValueError: It is `meta`, as for a model whose weights are loaded when they are needed.
    """
    places = layer_devices(model)
    if device is not None:
        places = dict.fromkeys(places, torch.device(device))
    if any(place.type == "meta" for place in places.values()):
        raise ValueError(
            f"{where}: `device` must be one with memory, got {'no device' if device is None else device} for a model "
            "whose weights are on the meta device. Pass the device that the model computes on."
        )
    return places
