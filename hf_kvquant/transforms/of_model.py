"""Which transform each layer's keys go through, from a model and a config: what caches of that model are built with.

A config names transforms; their numbers belong to the model, so that every cache of the model gets the same ones:
centres from its key biases, found at the first need, or centres from data; and smoothing factors that are not folded
into the weights. Whatever these numbers are, attention stays exact, so none of them has to be kept in step with the
weights; they only make codes closer. How centres are found is in `centering.py`, or by calibration (`smoothing.py`).
"""

from __future__ import annotations

import dataclasses
import logging
import weakref
from collections.abc import Mapping
from typing import Any, cast

from torch import Tensor
from transformers import PreTrainedModel

from ..cache import layers_of, quantized_layers
from ..config import KVQuantConfig
from ..text_config import check_is_model, text_config_of
from .centering import bias_centers
from .key_transform import KeyTransform
from .sharding import of_this_rank

logger = logging.getLogger(__name__)

_STATE = "_hf_kvquant_transforms"

# What `bias_centers` found, so that it looks once per model. Not on the model, which is to be as it was when nothing
# was given to it; a copy is looked at anew.
_found: weakref.WeakKeyDictionary[PreTrainedModel, dict[int, Tensor]] = weakref.WeakKeyDictionary()


@dataclasses.dataclass(frozen=True)
class ModelTransforms:
    """What somebody gave to a model, kept on it. All tensors `[num_kv_heads, head_dim]` float32, by layer index.

    Where a model is sharded by tensor parallelism, the heads are all of the model's, or those of this rank.

    Attributes:
        centers: `None` where nobody has given any, so that those of the biases serve.
        smoothing: Factors that caches apply: those that are not folded into the weights.
    """

    centers: dict[int, Tensor] | None = None
    smoothing: dict[int, Tensor] = dataclasses.field(default_factory=dict)


def transforms_of(model: PreTrainedModel) -> ModelTransforms:
    """What is kept on a model. Copies of the model, by `copy` or `pickle`, have it too; `save_pretrained` drops it."""
    return cast(ModelTransforms, model.__dict__.get(_STATE, ModelTransforms()))


def set_centers(model: PreTrainedModel, centers: Mapping[int, Tensor] | None) -> None:
    """Give a model centres, such as those of calibration, for the caches it makes from now on.

    Args:
        model: Keeps them.
        centers: Per layer index `[num_kv_heads, head_dim]` float32. `None` takes them away, and looks at the biases
            anew when centres are wanted next: for whoever has changed the weights.
    """
    _found.pop(model, None)
    kept = None if centers is None else dict(centers)
    _keep(model, dataclasses.replace(transforms_of(model), centers=kept))


def set_smoothing(model: PreTrainedModel, smoothing: Mapping[int, Tensor]) -> None:
    """Give a model smoothing factors that its caches apply, in place of any before.

    Args:
        model: Keeps them.
        smoothing: Per layer index `[num_kv_heads, head_dim]` float32, positive; empty for none. Factors that are
            folded into the weights do not belong here: they would act twice.
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
    """The transforms of a model's keys, for a cache that is built by hand.

    `generate` of a patched model does this by itself. The first call for a config with `"center"` sends one token
    through a model that has biases; so does the first call with given tensors for one under tensor parallelism, whose
    transforms are those of this rank's heads.

    Args:
        model: A decoder that `patch` accepts, patched or not.
        preset_or_config: A preset's name, a dictionary or a `KVQuantConfig`.

    Returns:
        Per layer index; layers whose keys stay as they are are absent.

    Raises:
        TypeError, ValueError: `model` is no model of transformers, the config has no meaning, or a given tensor is for
            other heads than the model's.

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
            # A model may want other inputs than a token. Centres are never needed for a right result, so that is no
            # reason to refuse it; but it is said.
            _found[model] = {}
            logger.warning(
                "key_transforms: %s could not be asked for its key biases, so keys are not centred (%s: %s). Correct, "
                "less close. Give centres with hf_kvquant.transforms.of_model.set_centers.",
                type(model).__name__,
                type(error).__name__,
                error,
            )
    return _found[model]
