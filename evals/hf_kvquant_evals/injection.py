"""Makes a model's keys harder to quantise, for evaluations: adds outlier channels or large biases through its weights.

Small test models then have keys as hard as those of large models. Outliers are the inverse of smoothing. A bias is
added to the channels that RoPE turns slowest, or not at all. There it is nearly the same for every key, so softmax
nearly ignores it, as in models that learned large biases.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_kvquant.calibration.folding import scale_keys
from hf_kvquant.calibration.layout import find_layouts


def inject_key_outliers(
    model: PreTrainedModel, pairs_per_head: int = 3, factor: float = 10.0, *, seed: int = 0
) -> dict[int, Tensor]:
    """Multiply some channels of every layer's keys by a factor and divide those of queries, through the weights.

    If `factor` is a power of two, logits stay the same to the bit, else nearly. Per key-value head, `pairs_per_head`
    groups of channels are drawn. A group is a RoPE pair, or one channel where nothing is rotated. Heads that share a
    norm get the same groups. Returns each layer's multiplier of key channels, `[num_kv_heads, head_dim]` float32.

    Raises:
        TypeError, NotImplementedError: As for `smooth_attention`.
        ValueError: `factor` is not positive, or a head has fewer than `pairs_per_head` groups.
    """
    if not factor > 0:
        raise ValueError(
            f"inject_key_outliers: `factor` must be positive, got {factor}. Use 10, or 8 to change no bit."
        )
    layouts, _ = find_layouts(model, where="inject_key_outliers")
    generator = torch.Generator().manual_seed(seed)
    injected = {}
    for index, layout in layouts.items():
        multiplier = torch.ones(layout.ties.shape)
        for labels in layout.ties:
            groups = labels.unique()
            if not 0 < pairs_per_head <= len(groups):
                raise ValueError(
                    f"inject_key_outliers: `pairs_per_head` must be from 1 to {len(groups)}, got {pairs_per_head}."
                )
            if (multiplier[torch.isin(layout.ties, groups)] != 1).any():
                continue  # an earlier head shares these channels
            chosen = groups[torch.randperm(len(groups), generator=generator)[:pairs_per_head]]
            multiplier[torch.isin(layout.ties, chosen)] = factor
        scale_keys(model, layout, 1 / multiplier)
        injected[index] = multiplier
    return injected


def inject_key_bias(model: PreTrainedModel, norm: float = 100.0) -> dict[int, Tensor]:
    """Add a constant of this norm to every layer's key heads, in the pair of channels that RoPE turns slowest.

    The logits change a little, since even a slow pair turns. If some channels are not rotated, one of them gets the
    bias instead, and only rounding changes. A projection without a bias gets one, so the model no longer fits the
    config that `save_pretrained` would write. Returns each layer's bias, `[num_kv_heads, head_dim]` float32.

    Raises:
        TypeError, NotImplementedError: As for `smooth_attention`. Also refuses a layer whose keys come out of a norm.
    """
    layouts, _ = find_layouts(model, where="inject_key_bias")
    for layout in layouts.values():
        if layout.key.rule not in ("rows", "columns"):
            raise NotImplementedError(
                f"inject_key_bias: keys must come from a projection, got the norm {layout.key.name} of "
                f"{type(model).__name__}. Use another model."
            )
    generator = torch.Generator().manual_seed(0)
    injected = {}
    for index, layout in layouts.items():
        slowest = layout.ties.gather(1, layout.turn.argmin(1, keepdim=True))
        added = (layout.ties == slowest) * torch.randn(layout.ties.shape, generator=generator)
        injected[index] = norm * nn.functional.normalize(added, dim=1)
        module: Any = model.get_submodule(layout.key.name)
        if module.bias is None:
            num_features = module.weight.shape[0 if layout.key.rule == "rows" else 1]
            zeros = module.weight.new_zeros(num_features)
            module.bias = nn.Parameter(zeros, requires_grad=module.weight.requires_grad)
        features, values = layout.key.per_feature(injected[index])
        with torch.no_grad():
            module.bias[features.to(module.bias.device)] += values.to(module.bias)
    return injected
