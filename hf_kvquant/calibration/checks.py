"""Refuses models without keys of their own and weights that cannot be edited, before anything is changed."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..cache.support import check_model
from ..config import KVQuantConfig
from ..models.layers import keeps_cache, layers_of
from ..models.sharding import check_whole
from ..models.text_config import check_is_model, text_config_of

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclasses.dataclass(frozen=True)
class Edit:
    """An edit of weights, as error messages name it: the tensors that they make or take, and what it does to them."""

    what: str
    verb: str


SMOOTHING = Edit("keys and queries", "smooth")
ROTATION = Edit("values and attention's output", "rotate")


def check_decoder(model: PreTrainedModel, where: str) -> None:
    """Refuse a model that keeps no keys that could be quantised.

    Raises:
        TypeError: `model` is not a `PreTrainedModel`.
        NotImplementedError: It is no decoder, caches something other than keys, or is sharded over processes.
    """
    check_is_model(
        model, where, "Pass the model itself, not a pipeline or a wrapper; merge adapters first (merge_and_unload)."
    )
    if model.config.is_encoder_decoder or not keeps_cache(model):
        raise NotImplementedError(
            f"{where}: `model` must be a decoder that keeps keys and values in a cache of transformers, got "
            f"{type(model).__name__}. Leave it as it is."
        )
    text_config = text_config_of(model)
    check_model(text_config, layers_of(text_config)[0], KVQuantConfig.from_preset("none"))
    check_whole(model, where)


def check_own_keys(model: PreTrainedModel, where: str) -> None:
    """Refuse offloaded weights, and layers that reuse the keys of other layers."""
    offloaded = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if offloaded:
        raise _not_in_memory(f"{len(offloaded)} offloaded weights, such as {offloaded[0]}", where)
    num_shared = getattr(text_config_of(model), "num_kv_shared_layers", 0)
    if num_shared:
        raise NotImplementedError(
            f"{where}: `model` must have keys of its own in every layer, got {num_shared} layers "
            f"of {type(model).__name__} that attend to those of others. Leave it as it is."
        )


def check_editable(
    module: nn.Module, attention: nn.Module, names: Mapping[nn.Module, str], edit: Edit, where: str
) -> None:
    """Refuse a module inside an attention module unless its weights are plain numbers in memory."""
    for wrapper in attention.modules():
        is_adapter = hasattr(wrapper, "base_layer") or hasattr(wrapper, "lora_A")
        if is_adapter and any(child is module for child in wrapper.modules()):
            raise NotImplementedError(
                f"{where}: `model` must have no adapters on {edit.what}, got {type(wrapper).__name__} at "
                f"{names[wrapper]}. Merge them first (merge_and_unload), or {edit.verb} the base model and train anew."
            )
    if getattr(getattr(module, "_hf_hook", None), "offload", False):
        raise _not_in_memory(f"{names[module]}, which is offloaded", where)
    for tensor in module.state_dict(keep_vars=True).values():
        if isinstance(tensor, Tensor) and (tensor.dtype not in FLOATS or type(tensor) not in (nn.Parameter, Tensor)):
            raise NotImplementedError(
                f"{where}: `model` must have plain weights in float32, bfloat16 or float16 behind {edit.what}, got "
                f"{type(module).__name__} with {str(tensor.dtype).removeprefix('torch.')} {type(tensor).__name__} at "
                f"{names[module]}. {edit.verb.capitalize()} the unquantised model, then quantise its weights."
            )


def check_not_shared(model: PreTrainedModel, names: Iterable[str], edit: Edit, where: str) -> None:
    """Refuse to edit the modules of these names if other modules share their parameters."""
    owners: dict[int, list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owners[parameter.data_ptr()].append(name)
    for name in names:
        for parameter in model.get_submodule(name).parameters(recurse=False):
            shared = owners[parameter.data_ptr()]
            if len(shared) > 1:
                raise NotImplementedError(
                    f"{where}: `model` must not share the weights behind {edit.what}, got one tensor for "
                    f"{' and '.join(sorted(shared))}. Give each a copy of its own first."
                )


def _not_in_memory(found: str, where: str) -> NotImplementedError:
    return NotImplementedError(
        f"{where}: `model` must be in memory, got {found}. Load it without a device_map that offloads, for example on "
        "the CPU."
    )
