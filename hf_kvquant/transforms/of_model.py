"""Chooses the key transform of each layer from a model and a config. Caches of that model are built with it.

A config names the steps; the model holds their tensors. Centres come from the key biases (`centering.py`), found when
first needed, or from calibration text. Smoothing factors come from calibration, unless they are folded into the
weights; without calibration, heads with large outliers get some (`balancing.py`). Attention is exact with any of these
tensors, so they need not follow changes of the weights.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from ..cache.support import formats_of
from ..config import KVQuantConfig
from ..models.probing import num_kv_heads
from ..models.sharding import rank_of
from ..models.text_config import check_is_model, text_config_of
from ..spec.key_transform import KeyTransform
from ..state import ModelTransforms, keep, notes_on, state_of
from .balancing import balancing_factors
from .centering import bias_centers

logger = logging.getLogger(__name__)


def transforms_of(model: PreTrainedModel) -> ModelTransforms:
    """The transforms that were set on a model. `copy` and `pickle` keep them; `save_pretrained` drops them."""
    return state_of(model).transforms or ModelTransforms()


def set_centers(model: PreTrainedModel, centers: Mapping[int, Tensor] | None) -> None:
    """Set the centres, such as from calibration, for the caches that a model makes from now on.

    They are `[num_kv_heads, head_dim]` float32, by layer index. `None` removes them; the next cache that needs centres
    finds them in the biases again. Pass `None` after changing the weights, or patch the model again.
    """
    notes_on(model).bias_centers = None
    kept = None if centers is None else dict(centers)
    _keep(model, dataclasses.replace(transforms_of(model), centers=kept))


def set_smoothing(model: PreTrainedModel, smoothing: Mapping[int, Tensor]) -> None:
    """Set the smoothing factors that a model's caches apply. Replaces any set before.

    They are `[num_kv_heads, head_dim]` float32, positive, by layer index. Leave out factors that are folded into the
    weights, or they would act twice.
    """
    _keep(model, dataclasses.replace(transforms_of(model), smoothing=dict(smoothing)))


def _keep(model: PreTrainedModel, transforms: ModelTransforms) -> None:
    is_empty = transforms.centers is None and not transforms.smoothing
    keep(model, transforms=None if is_empty else transforms)


def key_transforms(
    model: PreTrainedModel, preset_or_config: str | KVQuantConfig | Mapping[str, Any]
) -> dict[int, KeyTransform]:
    """The key transforms of a model, for a cache that you build yourself.

    `generate` of a patched model calls this itself. It sends tokens through the model in three cases: one token on the
    first call with `"center"` in the config, if the model has biases; 256 random tokens on the first call with both
    `"smooth"` and `"rotate"`, unless the model is calibrated; and one under tensor parallelism, on the first call that
    needs tensors that were set on the model. There, the result is for this rank's heads.

    Args:
        model: A decoder that `patch` accepts, patched or not.
        preset_or_config: A preset's name, a dictionary or a `KVQuantConfig`.

    Returns:
        Per layer index, the transform. Layers whose keys stay unchanged are absent.

    Raises:
        TypeError, ValueError: `model` is not a `PreTrainedModel`, the config is invalid, or a tensor that was set on
            the model does not fit its heads.

    Example:
        >>> transforms = hf_kvquant.key_transforms(model, "int4")
        >>> cache = hf_kvquant.KVQuantCache(model.config, "int4", key_transforms=transforms)
    """
    transforms = given_transforms(model, preset_or_config)
    if transforms_of(model).smoothing or state_of(model).smoothing is not None:
        return transforms
    config = KVQuantConfig.resolve(preset_or_config)
    # Without a rotation, outliers stay in their channels.
    wanted = formats_of(text_config_of(model), config)
    is_open = {index for index, each in transforms.items() if each.is_rotated and "smooth" in wanted[index].transforms}
    for index, factors in (_balancing(model) if is_open else {}).items():
        if index in is_open:
            transforms[index] = dataclasses.replace(transforms[index], smoothing=factors)
    return transforms


def given_transforms(
    model: PreTrainedModel, preset_or_config: str | KVQuantConfig | Mapping[str, Any]
) -> dict[int, KeyTransform]:
    """`key_transforms` of what was set on the model and of its biases alone, which calibration starts from."""
    check_is_model(model, "key_transforms")
    config = KVQuantConfig.resolve(preset_or_config)
    wanted = {index: each.transforms for index, each in formats_of(text_config_of(model), config).items()}
    named = {name for names in wanted.values() for name in names}
    centers = _centers(model) if "center" in named else {}
    smoothing = _of_this_rank(model, transforms_of(model).smoothing, "smoothing") if "smooth" in named else {}
    transforms = {
        index: KeyTransform(
            center=centers.get(index) if "center" in names else None,
            smoothing=smoothing.get(index) if "smooth" in names else None,
            is_rotated="rotate" in names,
        )
        for index, names in wanted.items()
    }
    return {index: transform for index, transform in transforms.items() if not transform.is_identity}


def _centers(model: PreTrainedModel) -> dict[int, Tensor]:
    given = transforms_of(model).centers
    if given is not None:
        return _of_this_rank(model, given, "centers")
    notes = notes_on(model)
    if notes.bias_centers is None:
        problem = "the key biases of %s could not be read, so keys are not centred"
        remedy = "Set centres with hf_kvquant.transforms.of_model.set_centers."
        notes.bias_centers = _found_in(model, bias_centers, problem, remedy)
    return notes.bias_centers


def _balancing(model: PreTrainedModel) -> dict[int, Tensor]:
    notes = notes_on(model)
    if notes.balancing is None:
        problem = "the keys of %s could not be looked at, so outlier channels are not smoothed"
        notes.balancing = _found_in(model, balancing_factors, problem, "Calibrate with hf_kvquant.smooth_attention.")
    return notes.balancing


def _found_in(
    model: PreTrainedModel, find: Callable[[PreTrainedModel], dict[int, Tensor]], problem: str, remedy: str
) -> dict[int, Tensor]:
    """What a function finds in a model; nothing, after a warning, in one that needs other inputs than tokens."""
    try:
        return find(model)
    except Exception as error:
        message = f"key_transforms: {problem} (%s: %s). Correct, less accurate. {remedy}"
        logger.warning(message, type(model).__name__, type(error).__name__, error)
        return {}


def _of_this_rank(model: PreTrainedModel, tensors: Mapping[int, Tensor], name: str) -> dict[int, Tensor]:
    """The part of tensors set on a model that belongs to the heads of this rank, as views.

    The tensors may cover all heads, or only this rank's. Comparing their shape with a key's tells which of the two. To
    get this key, the first call on a sharded model sends one token through it, so all ranks have to make that call.
    """
    rank, num_ranks = rank_of(model)
    if num_ranks == 1 or not tensors:
        return dict(tensors)
    notes = notes_on(model)
    if notes.num_kv_heads is None:
        notes.num_kv_heads = num_kv_heads(model)
    parts = {}
    for index, tensor in tensors.items():
        num_heads = notes.num_kv_heads.get(index, tensor.shape[0])
        if tensor.shape[0] not in (num_heads, num_ranks * num_heads):
            raise ValueError(
                f"key_transforms: `{name}` of layer {index} must have {num_heads} heads, like the keys of this rank, "
                f"or {num_ranks * num_heads}, like those of all {num_ranks}, got {tensor.shape[0]}. "
                "Was it made for another model?"
            )
        is_whole = tensor.shape[0] != num_heads
        parts[index] = tensor[rank * num_heads : (rank + 1) * num_heads] if is_whole else tensor
    return parts
