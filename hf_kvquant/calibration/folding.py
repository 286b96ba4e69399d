"""Scales a model's keys and queries in place, through its weights, without changing attention.

Keys are divided by a factor per key-value head and channel. The queries that share the head are multiplied by it, so
every product of query and key stays the same. Factors that are powers of two change no bit of any product as long as
no value leaves the range of its dtype; `exact_exponents` shrinks factors that would cause this. The layout
(`layout.py`) says which parameters make which channel; `smoothing.py` decides which factors are worth folding.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from .layout import LayerLayout, Rule, Scalable, by_feature


def query_factor(layout: LayerLayout, factor: Tensor) -> Tensor:
    """Repeat factors of key-value heads (`[num_kv_heads, head_dim]`) for query heads (`[num_q_heads, head_dim]`)."""
    return factor.repeat_interleave(layout.num_q_per_kv, 0)


def scale_keys(model: PreTrainedModel, layout: LayerLayout, factor: Tensor) -> None:
    """Divide one layer's keys by a factor and multiply its queries by it.

    Args:
        model: Its weights are written in place.
        layout: The layer's layout.
        factor: `[num_kv_heads, head_dim]` float32, positive, equal where `layout.ties` is.
    """
    for scalable, multiplier in ((layout.key, 1 / factor), (layout.query, query_factor(layout, factor))):
        _scale(model.get_submodule(scalable.name), scalable, multiplier)


def gains_plus_one(model: PreTrainedModel, layouts: Iterable[LayerLayout]) -> dict[str, Tensor]:
    """Copy the weights that scaling and scaling back may round to the CPU. Keys are their names in the model."""
    return {
        f"{scalable.name}.weight": model.get_parameter(f"{scalable.name}.weight").detach().cpu().clone()
        for layout in layouts
        for scalable in (layout.key, layout.query)
        if scalable.rule == "gain_plus_one"
    }


def exact_exponents(model: PreTrainedModel, layout: LayerLayout, exponents: Tensor) -> Tensor:
    """Shrink exponents until the weights can be scaled without rounding.

    Args:
        model: Only read.
        layout: The layer's layout.
        exponents: `[num_kv_heads, head_dim]` int64, equal where `layout.ties` is. The factors are `2 ** exponents`.

    Returns:
        Exponents no larger in magnitude, equal where `layout.ties` is.
    """
    while exponents.any():
        factor = torch.exp2(exponents.float())
        is_bad = torch.zeros_like(exponents, dtype=torch.bool)
        for scalable, multiplier in ((layout.key, 1 / factor), (layout.query, query_factor(layout, factor))):
            rounds = _rounds(model.get_submodule(scalable.name), scalable, multiplier)
            is_bad |= rounds.view(len(exponents), -1, rounds.shape[1]).any(1)
        if not is_bad.any():
            break
        is_bad = torch.isin(layout.ties, layout.ties[is_bad])  # channels that are tied to a bad one
        exponents = torch.where(is_bad, exponents - exponents.sign(), exponents)
    return exponents


def parameters_of(layouts: Iterable[LayerLayout], model: PreTrainedModel) -> list[str]:
    """The names of all parameters that scaling changes, sorted."""
    modules = {scalable.name for layout in layouts for scalable in (layout.key, layout.query)}
    return sorted(
        f"{name}.{parameter}"
        for name in modules
        for parameter, _ in model.get_submodule(name).named_parameters(recurse=False)
    )


def _multiplier_of(scalable: Scalable, multiplier: Tensor) -> tuple[Tensor, Tensor]:
    """Turn a multiplier per head and channel into distinct features (int64) and one factor each (float32)."""
    features, first = torch.unique(scalable.index.flatten(), return_inverse=True)
    factors = torch.empty(len(features)).scatter_(0, first, multiplier.flatten().float())
    is_scaled = factors != 1
    return features[is_scaled], factors[is_scaled]


def _rows(module: nn.Module, rule: Rule) -> Iterator[tuple[Tensor, int]]:
    """Views of a module's parameters, `[features, ...]`, each with the offset that the module adds before use."""
    for name, parameter in module.named_parameters(recurse=False):
        if name == "weight" and rule in ("rows", "columns"):
            yield by_feature(parameter, rule), 0
        else:
            yield parameter.detach().view(-1, 1), 1 if name == "weight" and rule == "gain_plus_one" else 0


def _wide(rows: Tensor, offset: int) -> Tensor:
    """Rows with their offset, in float32 or wider."""
    wide = rows.to(torch.promote_types(rows.dtype, torch.float32))
    return wide + offset if offset else wide  # adding 0 would turn -0.0 into 0.0


def _times(rows: Tensor, offset: int, multiplier: Tensor) -> Tensor:
    """Rows whose effect is `multiplier` (`[rows, 1]`) times as large, in their dtype."""
    scaled = _wide(rows, offset) * multiplier
    return (scaled - offset if offset else scaled).to(rows.dtype)


def _scale(module: nn.Module, scalable: Scalable, multiplier: Tensor) -> None:
    features, factors = _multiplier_of(scalable, multiplier)
    for rows, offset in _rows(module, scalable.rule):
        features, factors = features.to(rows.device), factors.to(rows.device)
        rows[features] = _times(rows[features], offset, factors[:, None])


def _rounds(module: nn.Module, scalable: Scalable, multiplier: Tensor) -> Tensor:
    """Whether scaling would round a parameter of each channel: bool, shaped like the multiplier."""
    features, factors = _multiplier_of(scalable, multiplier)
    is_bad = torch.zeros(int(scalable.index.max()) + 1, dtype=torch.bool)
    for rows, offset in _rows(module, scalable.rule):
        features, factors = features.to(rows.device), factors.to(rows.device)
        before = _wide(rows[features], offset)
        after = _wide(_times(rows[features], offset, factors[:, None]), offset)
        # Check the way back, too: a product that became subnormal has lost bits.
        differs = (after != before * factors[:, None]) | (after / factors[:, None] != before)
        is_bad[features.cpu()] |= differs.any(1).cpu()
    return is_bad[scalable.index]
