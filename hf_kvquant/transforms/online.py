"""Which layers' keys a cache could transform by itself, and by which tensors such a layer is known again.

A cache needs nothing of the weights, so nothing is asked here of where keys come from, how RoPE turns them or what is
shared: the model is run once with a cache of transformers, and a layer is found where attention reads the very keys
that the cache keeps. What is done with these layers is decided in `smoothing.py`; layers whose weights can be scaled
are found in `layout.py`.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..cache import layers_of
from ..text_config import text_config_of
from .centering import whole_cache
from .layout import check_decoder, other_caches
from .observation import Observation, forward, observed

NUM_TOKENS = 8  # that the model is run on


@dataclasses.dataclass(frozen=True)
class LayerKeys:
    """The keys of one layer.

    Attributes:
        layer_idx: The layer.
        name: Of the attention module, in the model.
        num_kv_heads: Heads of keys.
        head_dim: Channels of a head.
    """

    layer_idx: int
    name: str
    num_kv_heads: int
    head_dim: int


def find_keys(model: PreTrainedModel, *, where: str) -> tuple[dict[int, LayerKeys], dict[int, str]]:
    """Find the layers whose keys a cache may transform. The model is only run.

    Args:
        model: A decoder-only model.
        where: Opens error messages.

    Returns:
        keys: By layer.
        left_out: By layer, why a cache of ours cannot serve it.

    Raises:
        TypeError: `model` is no model of transformers.
        NotImplementedError: It keeps no keys, or its attention cannot be seen.
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
            left_out[index] = "its attention does not read the keys of its cache as they are"
        else:
            keys[index] = LayerKeys(index, names[seen[index][0].module], kept.shape[1], kept.shape[3])
    if not keys and not any(seen.values()):
        raise NotImplementedError(
            f"{where}: `model` must attend through transformers' registry or PyTorch's scaled_dot_product_attention, "
            f"got {type(model).__name__}, whose attention cannot be watched. Leave it as it is."
        )
    return keys, left_out


def _is_same(key: Tensor, kept: Tensor) -> bool:
    """Whether two tensors are equal, NaN for NaN."""
    return key.shape == kept.shape and torch.equal(key.nan_to_num(), kept.nan_to_num())


def tensors_of(names: Iterable[str], model: PreTrainedModel) -> list[str]:
    """The names of all parameters and buffers of some attention modules, sorted."""
    return sorted(
        f"{name}.{tensor_name}"
        for name in set(names)
        for tensors in (model.get_submodule(name).named_parameters(), model.get_submodule(name).named_buffers())
        for tensor_name, _ in tensors
    )
