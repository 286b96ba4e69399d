"""Decides which layers to calibrate, and where their factors go: into the weights, or to the caches.

Caches transform keys after RoPE, so for them weights, RoPE and shared parameters do not matter: the model runs once
with a cache of transformers, and a layer qualifies if its attention reads exactly the keys that the cache keeps.
"""

from __future__ import annotations

import dataclasses
import logging

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..attention.observation import not_observed, observations
from ..cache.support import formats_of, other_caches
from ..config import KVQuantConfig
from ..models.latent import keeps_latents, why_not_plain
from ..models.probing import arbitrary_ids, in_float32, whole_cache
from ..models.quantized import quantized_tensor
from ..models.text_config import text_config_of
from ..spec.formats import KVFormat
from ..spec.key_transform import KeyTransform
from ..transforms.of_model import given_transforms
from .choices import Mode as Mode
from .decoder_check import check_decoder
from .layout import LayerLayout, find_layouts, latent_layouts
from .smoothing_file import Placement

logger = logging.getLogger(__name__)

NUM_TOKENS = 8  # tokens the model is run on


@dataclasses.dataclass(frozen=True)
class LayerKeys:
    name: str  # the attention module's name in the model
    num_kv_heads: int
    head_dim: int


@dataclasses.dataclass(frozen=True)
class Target:
    """A layer to calibrate."""

    keys: LayerKeys
    key_format: KVFormat
    before: KeyTransform  # what caches apply before calibration
    has_center: bool  # whether to calibrate its centre
    has_factors: bool  # whether to calibrate its factors
    layout: LayerLayout | None  # the parameters that factors are folded into, if they are

    @property
    def placement(self) -> Placement:
        """Where its factors will be applied."""
        if not self.has_factors:
            return "none"
        return "caches" if self.layout is None else "weights"

    @property
    def ties(self) -> Tensor:
        """`[num_kv_heads, head_dim]` int64: channels with the same number have to share a factor."""
        if self.layout is not None:
            return self.layout.ties
        return torch.arange(self.keys.num_kv_heads * self.keys.head_dim).view(self.keys.num_kv_heads, -1)

    def transform(self, center: Tensor | None, exponents: Tensor) -> KeyTransform:
        """The key transform with factors `2 ** exponents`, and with this centre if one is to be calibrated."""
        return dataclasses.replace(
            self.before,
            center=center if self.has_center else self.before.center,
            smoothing=torch.exp2(exponents.float()) if exponents.any() else self.before.smoothing,
        )


def find_targets(
    model: PreTrainedModel, config: KVQuantConfig, mode: Mode, *, has_centers: bool, has_factors: bool, where: str
) -> tuple[dict[int, Target], dict[int, str]]:
    """The layers to calibrate, and for each other layer the reason. Refuses a model without any."""
    # First: models that it refuses do not work with mode='online' either.
    check_decoder(model, where, are_latents_served=True)
    if keeps_latents(text_config_of(model)):
        return _latent_targets(model, config, mode, has_factors, where)
    layouts: dict[int, LayerLayout] = {}
    unscalable: dict[int, str] = {}
    named = [config.transforms, *(formats.transforms for formats in config.layers.values())]
    is_smoothing = any("smooth" in transforms for transforms in named)
    if has_factors and is_smoothing and mode != "online":
        try:
            layouts, unscalable = find_layouts(model, where=where)
        except NotImplementedError as error:
            if mode != "auto":
                raise NotImplementedError(f"{error} Or use mode='online', where caches apply the factors.") from error
            logger.warning("%s Factors are applied by caches instead.", error)
    keys, left_out = find_keys(model, where=where)
    left_out |= {index: reason for index, reason in unscalable.items() if index in left_out}
    transforms = given_transforms(model, config)
    targets: dict[int, Target] = {}
    has_refused = False
    for index, found in keys.items():
        formats = config.formats(index)
        if not formats.key.is_quantized:
            left_out[index] = "its keys are not quantised"
            continue
        has_center = has_centers and "center" in formats.transforms
        is_smoothed = has_factors and "smooth" in formats.transforms
        if is_smoothed and mode == "fold" and index not in layouts:
            left_out[index] = unscalable[index]
            has_refused, is_smoothed = True, False
        if not is_smoothed and not has_center:
            left_out.setdefault(index, f"its transforms are {list(formats.transforms)}, which need no calibration")
            continue
        before = transforms.get(index, KeyTransform()).to("cpu")
        layout = layouts.get(index) if is_smoothed else None
        targets[index] = Target(found, formats.key, before, has_center, is_smoothed, layout)
    left_out = dict(sorted(left_out.items()))
    # A user who asks for factors in the weights, and gets none in any layer, should not get only centres.
    has_refused = has_refused and not any(target.layout for target in targets.values())
    if not targets or has_refused:
        reasons = "; ".join(f"layer {index}: {reason}" for index, reason in list(left_out.items())[:3])
        raise NotImplementedError(
            f"{where}: `model` must have a layer whose keys can be calibrated, got {type(model).__name__} with none "
            f"({reasons}). Leave it as it is" + (", or use mode='online'." if has_refused else ".")
        )
    online = [index for index, target in targets.items() if target.placement == "caches"]
    if mode == "auto" and online and layouts:
        logger.warning(
            "%s: factors cannot be folded in layers %s (%s). They are applied by caches instead.",
            where,
            ", ".join(map(str, online)),
            unscalable[online[0]],
        )
    return targets, left_out


def _latent_targets(
    model: PreTrainedModel, config: KVQuantConfig, mode: Mode, has_factors: bool, where: str
) -> tuple[dict[int, Target], dict[int, str]]:
    """`find_targets` of a model that keeps latents (MLA). They have no centres: their norm subtracts none."""
    if mode == "online":
        raise NotImplementedError(
            f"{where}: `mode` must be 'auto' or 'fold' for {type(model).__name__}, got 'online': it keeps latents "
            "(MLA), whose factors caches do not apply."
        )
    formats, keys = formats_of(text_config_of(model), config), find_keys(model, where=where)[0]
    left_out, targets = other_caches(model), dict[int, Target]()
    for index, layout in latent_layouts(model).items():
        projection = model.get_submodule(layout.query.name)
        if index not in formats or not formats[index].is_quantized:
            left_out[index] = "its latents are not quantised"
        elif (why_not := why_not_plain(projection)) is not None:
            left_out[index] = f"its kv_b_proj {why_not}"
        elif quantized_tensor(projection) is not None:
            left_out[index] = "its kv_b_proj is quantised, so nothing can be folded into it"
        elif has_factors:
            before = KeyTransform(is_rotated="rotate" in formats[index].transforms)
            targets[index] = Target(keys[index], formats[index].key, before, False, True, layout)
    if not targets:
        reason = next(iter(left_out.values()), "factors=False leaves nothing to calibrate")
        raise NotImplementedError(
            f"{where}: `model` must have a layer whose latents can be calibrated, got {type(model).__name__} with none "
            f"({reason}). Leave it as it is."
        )
    return targets, dict(sorted(left_out.items()))


def find_keys(model: PreTrainedModel, *, where: str) -> tuple[dict[int, LayerKeys], dict[int, str]]:
    """The layers whose keys a cache can transform, by index, and for each other layer the reason."""
    check_decoder(model, where, are_latents_served=True)
    if keeps_latents(text_config_of(model)):
        layouts = latent_layouts(model).items()
        return {index: LayerKeys(each.name, 1, each.ties.shape[1]) for index, each in layouts}, other_caches(model)
    cache = whole_cache(model)
    with in_float32(model):
        seen = observations(model, arbitrary_ids(model, NUM_TOKENS), cache=cache)
    if not seen:
        raise not_observed(model, where)
    names = {module: name for name, module in model.named_modules()}
    keys: dict[int, LayerKeys] = {}
    left_out = other_caches(model)
    for index, layer in enumerate(cache.layers):
        if index in left_out:
            continue
        kept = getattr(layer, "keys", None)
        if not isinstance(kept, Tensor) or index not in seen:
            left_out[index] = "its attention cannot be watched"
        elif not all(torch.equal(each.key.nan_to_num(), kept.nan_to_num()) for each in seen[index]):
            left_out[index] = "its attention does not use the cached keys unchanged"
        else:
            keys[index] = LayerKeys(names[seen[index][0].module], kept.shape[1], kept.shape[3])
    return keys, left_out
