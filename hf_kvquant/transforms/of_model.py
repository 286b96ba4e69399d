"""Chooses the key transform of each layer from a model and a config. Caches of that model are built with it.

A config names the steps; the model holds their tensors, so all its caches get the same ones. Centres come from the key
biases, found when first needed, or from data. Smoothing factors are those that are not folded into the weights.
Attention is exact with any of these tensors, so they need not follow changes of the weights; they only reduce the
quantisation error. `centering.py` finds centres in the biases, calibration (`smoothing.py`) in text.
"""

from __future__ import annotations

import dataclasses
import logging
import weakref
from collections.abc import Mapping
from typing import Any, cast

from torch import Tensor
from transformers import PreTrainedModel

from ..cache.support import quantized_layers
from ..config import KVQuantConfig
from ..models.layers import layers_of
from ..models.sharding import of_this_rank
from ..models.text_config import check_is_model, text_config_of
from ..spec.key_transform import KeyTransform
from .centering import bias_centers

logger = logging.getLogger(__name__)

_STATE = "_hf_kvquant_transforms"

# Results of `bias_centers`, computed once per model. Not kept on the model, which stays unmodified unless the user sets
# something; a copy of the model is analysed again.
_found: weakref.WeakKeyDictionary[PreTrainedModel, dict[int, Tensor]] = weakref.WeakKeyDictionary()


@dataclasses.dataclass(frozen=True)
class ModelTransforms:
    """Transforms that were set on a model. All tensors are `[num_kv_heads, head_dim]` float32, by layer index.

    With tensor parallelism, the heads are all of the model's, or those of this rank.

    Attributes:
        centers: `None` if none were set; centres of the key biases are used then.
        smoothing: Factors that caches apply, as they are not folded into the weights.
    """

    centers: dict[int, Tensor] | None = None
    smoothing: dict[int, Tensor] = dataclasses.field(default_factory=dict)


def transforms_of(model: PreTrainedModel) -> ModelTransforms:
    """The transforms that were set on a model. `copy` and `pickle` keep them; `save_pretrained` drops them."""
    return cast(ModelTransforms, model.__dict__.get(_STATE, ModelTransforms()))


def set_centers(model: PreTrainedModel, centers: Mapping[int, Tensor] | None) -> None:
    """Set the centres, such as those of calibration, for the caches that a model makes from now on.

    Args:
        model: Keeps the centres.
        centers: Per layer index `[num_kv_heads, head_dim]` float32. `None` removes them; the next cache that needs
            centres finds them in the biases again. Pass `None` after changing the weights.
    """
    _found.pop(model, None)
    kept = None if centers is None else dict(centers)
    _keep(model, dataclasses.replace(transforms_of(model), centers=kept))


def set_smoothing(model: PreTrainedModel, smoothing: Mapping[int, Tensor]) -> None:
    """Set the smoothing factors that a model's caches apply. Replaces any set before.

    Args:
        model: Keeps the factors.
        smoothing: Per layer index `[num_kv_heads, head_dim]` float32, positive; empty for none. Leave out factors that
            are folded into the weights, or they would act twice.
    """
    _keep(model, dataclasses.replace(transforms_of(model), smoothing=dict(smoothing)))


def _keep(model: PreTrainedModel, transforms: ModelTransforms) -> None:
    if transforms.centers is not None or transforms.smoothing:
        setattr(model, _STATE, transforms)
    elif _STATE in model.__dict__:
        delattr(model, _STATE)


def key_transforms(
    model: PreTrainedModel, preset_or_config: str | KVQuantConfig | Mapping[str, Any]
) -> dict[int, KeyTransform]:
    """The key transforms of a model, for a cache that you build yourself.

    `generate` of a patched model calls this itself. It sends one token through the model in two cases: on the first
    call with `"center"` in the config, if the model has biases; and under tensor parallelism, on the first call that
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
    check_is_model(model, "key_transforms")
    config = KVQuantConfig.resolve(preset_or_config)
    layer_types, _ = layers_of(text_config_of(model))
    wanted = {index: config.formats(index).transforms for index in quantized_layers(layer_types, config)}
    named = {name for names in wanted.values() for name in names}
    centers = _centers(model) if "center" in named else {}
    smoothing = of_this_rank(model, transforms_of(model).smoothing, "smoothing") if "smooth" in named else {}
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
        return of_this_rank(model, given, "centers")
    if model not in _found:
        try:
            _found[model] = bias_centers(model)
        except Exception as error:
            # Some models need other inputs than a token. Results are correct without centres, so warn and go on.
            _found[model] = {}
            logger.warning(
                "key_transforms: the key biases of %s could not be read, so keys are not centred (%s: %s). Correct, "
                "less accurate. Set centres with hf_kvquant.transforms.of_model.set_centers.",
                type(model).__name__,
                type(error).__name__,
                error,
            )
    return _found[model]
