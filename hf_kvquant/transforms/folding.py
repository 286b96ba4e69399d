"""Scaling a model's keys and queries in place, through its weights, so that attention stays what it was.

Keys are divided by a factor per key-value head and channel, the queries of the head's group are multiplied by it, and
every product of query and key stays the same number. Factors that are powers of two change no bit of any product, as
long as nothing leaves the range of its dtype: `exact_exponents` shrinks those that would. Which parameters make which
channel is in the layout (`layout.py`); which factors are worth folding is decided in `smoothing.py`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from .layout import LayerLayout, Rule, Scalable, by_feature

# Of each weight, so that a model of 300 weights is known again in some hundredths of a second, whatever its size.
SAMPLES = 4096


def query_factor(layout: LayerLayout, factor: Tensor) -> Tensor:
    """The factors of key-value heads (`[num_kv_heads, head_dim]`) for query heads (`[num_q_heads, head_dim]`)."""
    return factor.repeat_interleave(layout.num_q_per_kv, 0)


def scale_keys(model: PreTrainedModel, layout: LayerLayout, factor: Tensor) -> None:
    """Divide one layer's keys by a factor and multiply its queries by it.

    Args:
        model: Its weights are written in place.
        layout: Of the layer.
        factor: `[num_kv_heads, head_dim]` float32, positive, equal where `layout.ties` is.
    """
    for scalable, multiplier in ((layout.key, 1 / factor), (layout.query, query_factor(layout, factor))):
        _scale(model.get_submodule(scalable.name), scalable, multiplier)


def gains_plus_one(model: PreTrainedModel, layouts: Iterable[LayerLayout]) -> dict[str, Tensor]:
    """Copies, on the CPU, of the weights that scaling and scaling back may round, by their names in the model."""
    return {
        f"{scalable.name}.weight": model.get_parameter(f"{scalable.name}.weight").detach().cpu().clone()
        for layout in layouts
        for scalable in (layout.key, layout.query)
        if scalable.rule == "gain_plus_one"
    }


def exact_exponents(model: PreTrainedModel, layout: LayerLayout, exponents: Tensor) -> Tensor:
    """The nearest exponents that the weights can be scaled by without rounding anything.

    Args:
        model: Only read.
        layout: Of the layer.
        exponents: `[num_kv_heads, head_dim]` int64, equal where `layout.ties` is: factors are two to their power.

    Returns:
        Exponents no larger in magnitude, with equal ones where `layout.ties` is.
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
    """The names of all parameters that scaling touches, sorted."""
    modules = {scalable.name for layout in layouts for scalable in (layout.key, layout.query)}
    return sorted(
        f"{name}.{parameter}"
        for name in modules
        for parameter, _ in model.get_submodule(name).named_parameters(recurse=False)
    )


def weights_hash(model: PreTrainedModel) -> str:
    """SHA-256 over a sample of every weight, whatever was injected, folded or calibrated into it included.

    Another checkpoint, training or an adapter are noticed, a change of a few single weights may not be.
    """
    # What `state_dict` has and a module does not own as a tensor is made up by quantised layers. Buffers that are not
    # saved, such as frequencies of a RoPE that grows with the context, change while the model runs.
    owned = {name for name, _ in (*model.named_parameters(remove_duplicate=False), *model.named_buffers())}
    return hash_of(model, sorted(owned.intersection(model.state_dict())), samples=SAMPLES)


def hash_of(model: PreTrainedModel, names: Iterable[str], samples: int | None = None) -> str:
    """SHA-256 of parameters and buffers, floating ones as float32 numbers.

    So a checkpoint has one hash in whatever wider dtype it is loaded. Of what is offloaded, name and shape count alone.

    Args:
        model: Whose they are.
        names: Of the parameters and buffers.
        samples: About how many numbers of each count, spread evenly; `None` for all.

    Raises:
        AttributeError: A name is not one of the model's.
    """
    digest = hashlib.sha256()
    for name in names:
        owner, _, last = name.rpartition(".")
        tensor = getattr(model.get_submodule(owner), last).detach()
        digest.update(f"{name} {tuple(tensor.shape)}\n".encode())
        if not tensor.is_meta:
            if samples is not None:
                # An odd stride meets every row and every column of a matrix whose sides are powers of two.
                tensor = tensor.reshape(-1)[:: tensor.numel() // samples | 1]
            numbers = tensor.float() if tensor.is_floating_point() else tensor
            digest.update(numbers.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _multiplier_of(scalable: Scalable, multiplier: Tensor) -> tuple[Tensor, Tensor]:
    """The features to be scaled (int64, each once) and by what (float32), from a multiplier per head and channel."""
    features, first = torch.unique(scalable.index.flatten(), return_inverse=True)
    factors = torch.empty(len(features)).scatter_(0, first, multiplier.flatten().float())
    is_scaled = factors != 1
    return features[is_scaled], factors[is_scaled]


def _rows(module: nn.Module, rule: Rule) -> Iterator[tuple[Tensor, int]]:
    """Views of a module's parameters with features first, `[features, ...]`, and what is added to each before use."""
    for name, parameter in module.named_parameters(recurse=False):
        if name == "weight" and rule in ("rows", "columns"):
            yield by_feature(parameter, rule), 0
        else:
            yield parameter.detach().view(-1, 1), 1 if name == "weight" and rule == "gain_plus_one" else 0


def _wide(rows: Tensor, offset: int) -> Tensor:
    """Rows as they are multiplied, in float32 or wider."""
    wide = rows.to(torch.promote_types(rows.dtype, torch.float32))
    return wide + offset if offset else wide  # adding 0 would turn -0.0 into 0.0


def _times(rows: Tensor, offset: int, multiplier: Tensor) -> Tensor:
    """Rows that are `multiplier` (`[rows, 1]`) times as large in effect, in their dtype."""
    scaled = _wide(rows, offset) * multiplier
    return (scaled - offset if offset else scaled).to(rows.dtype)


def _scale(module: nn.Module, scalable: Scalable, multiplier: Tensor) -> None:
    features, factors = _multiplier_of(scalable, multiplier)
    for rows, offset in _rows(module, scalable.rule):
        features, factors = features.to(rows.device), factors.to(rows.device)
        rows[features] = _times(rows[features], offset, factors[:, None])


def _rounds(module: nn.Module, scalable: Scalable, multiplier: Tensor) -> Tensor:
    """Which channels a multiplier would round in some parameter: bool, shaped like the multiplier."""
    features, factors = _multiplier_of(scalable, multiplier)
    is_bad = torch.zeros(int(scalable.index.max()) + 1, dtype=torch.bool)
    for rows, offset in _rows(module, scalable.rule):
        features, factors = features.to(rows.device), factors.to(rows.device)
        before = _wide(rows[features], offset)
        after = _wide(_times(rows[features], offset, factors[:, None]), offset)
        # Also backwards: a product that became subnormal has lost bits.
        differs = (after != before * factors[:, None]) | (after / factors[:, None] != before)
        is_bad[features.cpu()] |= differs.any(1).cpu()
    return is_bad[scalable.index]
