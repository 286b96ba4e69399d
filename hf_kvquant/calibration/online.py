"""Finds the layers whose keys a cache can transform without editing weights, and the tensors that identify them.

The cache transforms keys after RoPE, so the weights, RoPE and shared parameters do not matter here. The model runs once
with a cache of transformers; a layer qualifies if its attention reads exactly the keys that the cache keeps.
`smoothing.py` decides what to do with these layers. `layout.py` finds layers whose weights can be scaled.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..models.layers import layers_of
from ..models.probing import whole_cache
from ..models.text_config import text_config_of
from .layout import check_decoder, other_caches
from .observation import Observation, forward, observed

NUM_TOKENS = 8  # tokens the model is run on


@dataclasses.dataclass(frozen=True)
class LayerKeys:
    """The keys of one layer.

    Attributes:
        layer_idx: The layer.
        name: The attention module's name in the model.
        num_kv_heads: Number of key-value heads.
        head_dim: Channels of a head.
    """

    layer_idx: int
    name: str
    num_kv_heads: int
    head_dim: int


def find_keys(model: PreTrainedModel, *, where: str) -> tuple[dict[int, LayerKeys], dict[int, str]]:
    """Find the layers whose keys a cache can transform.

    Args:
        model: A decoder-only model. It is only run.
        where: Opens error messages.

    Returns:
        keys: Per layer index, the layer's keys.
        left_out: Per layer index, why our cache cannot transform the layer's keys.

    Raises:
        TypeError: `model` is not a `PreTrainedModel`.
        NotImplementedError: The model keeps no keys, or its attention cannot be watched.
    """
    check_decoder(model, where)
    seen: dict[int, list[Observation]] = defaultdict(list)

    def note(observation: Observation) -> None:
        seen[observation.layer_idx].append(observation)

    cache = whole_cache(model)
    input_ids = torch.arange(5, 5 + NUM_TOKENS)[None] % text_config_of(model).vocab_size
    with observed(model, note):
        forward(model, input_ids, cache=cache)
    names = {module: name for name, module in model.named_modules()}
    keys: dict[int, LayerKeys] = {}
    left_out = other_caches(model)
    for index in range(len(layers_of(text_config_of(model))[0])):
        if index in left_out:
            continue
        kept = getattr(cache.layers[index], "keys", None)
        if not isinstance(kept, Tensor) or not seen[index]:
            left_out[index] = "its attention cannot be watched"
        elif not all(_is_same(observation.key, kept) for observation in seen[index]):
            left_out[index] = "its attention does not use the cached keys unchanged"
        else:
            keys[index] = LayerKeys(index, names[seen[index][0].module], kept.shape[1], kept.shape[3])
    if not keys and not any(seen.values()):
        raise NotImplementedError(
            f"{where}: `model` must attend through transformers' registry or PyTorch's scaled_dot_product_attention, "
            f"got {type(model).__name__}, whose attention cannot be watched. Leave it as it is."
        )
    return keys, left_out


def _is_same(key: Tensor, kept: Tensor) -> bool:
    """Whether two tensors are equal; NaN equals NaN."""
    return key.shape == kept.shape and torch.equal(key.nan_to_num(), kept.nan_to_num())


def tensors_of(names: Iterable[str], model: PreTrainedModel) -> list[str]:
    """The names of all parameters and buffers of some attention modules, sorted."""
    return sorted(
        f"{name}.{tensor_name}"
        for name in set(names)
        for tensors in (model.get_submodule(name).named_parameters(), model.get_submodule(name).named_buffers())
        for tensor_name, _ in tensors
    )
