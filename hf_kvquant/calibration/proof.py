"""Proves that factors folded into the weights change no bit: of attention layer by layer, then of the logits.

The model runs on a little text before and after folding. If a bit changes, the factors are reduced (float16 has few
exponents), or folding is undone and refused. So every wrong conclusion about where keys come from is caught here.
`folding.py` scales weights, `search.py` decides which factors are worth it, and `smoothing.py` when to fold.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..models.probing import evaluating
from .folding import gains_plus_one, scale_keys
from .layout import LayerLayout
from .observation import Observation, forward, observed
from .text import Windows

# The check runs the model on the last tokens of this many windows: more in float16, where few tokens show a rounding.
CHECK_WINDOWS, CHECK_TOKENS, CHECK_TOKENS_FLOAT16 = 4, 64, 1024


def check_ids(windows: Windows, dtype: torch.dtype) -> Tensor:
    """Text for the check: the last tokens of a few windows, `[windows, tokens]` int64."""
    rows = [(ids[row], mask[row]) for ids, mask in windows for row in range(len(ids))]
    longest = sorted(rows, key=lambda row: -int(row[1].sum()))[:CHECK_WINDOWS]
    limit = CHECK_TOKENS_FLOAT16 if dtype == torch.float16 else CHECK_TOKENS
    tokens = min(limit, *(int(mask.sum()) for _, mask in longest))
    return torch.stack([ids[-tokens:] for ids, _ in longest])


def settled_exponents(
    model: PreTrainedModel,
    layouts: Mapping[int, LayerLayout],
    exponents: Mapping[int, Tensor],
    input_ids: Tensor,
    where: str,
) -> dict[int, Tensor]:
    """Reduce exponents until no layer's attention changes a bit. The model is scaled for each trial, then scaled back.

    float16 has few exponents: keys and queries that become subnormal lose bits, and RoPE loses more. If a layer changes
    in float16, its exponents are reduced until it does not. In other dtypes a change is an error.

    Raises:
        RuntimeError: A layer's attention changes.
    """
    settled = dict(exponents)
    outputs: dict[int, Tensor] = {}

    def record(observation: Observation) -> Tensor:
        out = observation.attend(observation.query, observation.key, observation.value)
        outputs[observation.layer_idx] = out
        return out

    with observed(model, record):
        forward(model, input_ids)
    changed: set[int] = set()

    def compare(observation: Observation) -> Tensor:
        before = outputs[observation.layer_idx]
        out = observation.attend(observation.query, observation.key, observation.value)
        if not torch.equal(out, before):
            changed.add(observation.layer_idx)
        return before  # so that later layers are compared on the same input

    originals = gains_plus_one(model, layouts.values())
    while True:
        changed.clear()
        with _scaled(model, layouts, settled, originals), observed(model, compare):
            forward(model, input_ids)
        if not changed:
            return settled
        if model.dtype != torch.float16 or not changed <= {index for index, x in settled.items() if x.any()}:
            raise RuntimeError(
                f"{where}: factors must leave attention as it is, got another output in layer {min(changed)} "
                f"({layouts[min(changed)].name if min(changed) in layouts else 'not scaled'}). The weights are as they "
                "were. How this model makes keys is not supported: leave it as it is, or use mode='online'."
            )
        for index in changed:
            limit = int(settled[index].abs().max()) - 1
            settled[index] = settled[index].clamp(-limit, limit)


@contextlib.contextmanager
def _scaled(
    model: PreTrainedModel,
    layouts: Mapping[int, LayerLayout],
    exponents: Mapping[int, Tensor],
    originals: Mapping[str, Tensor],
) -> Iterator[None]:
    """Fold factors into the model's weights while the block runs."""
    factors = {index: torch.exp2(exponents[index].float()) for index in layouts}
    try:
        for index, layout in layouts.items():
            scale_keys(model, layout, factors[index])
        yield
    finally:
        for index, layout in layouts.items():
            scale_keys(model, layout, 1 / factors[index])
        _put_back(model, originals)


def fold(
    model: PreTrainedModel,
    layouts: Mapping[int, LayerLayout],
    factors: Mapping[int, Tensor],
    originals: Mapping[str, Tensor],
    input_ids: Tensor,
    where: str,
) -> None:
    """Fold factors into the weights, and roll back unless all logits stay the same to the bit.

    Args:
        model: Written in place.
        layouts: Per layer index, the layout.
        factors: Per layer index, `[num_kv_heads, head_dim]` float32, powers of two.
        originals: Weights that scaling back would round (`gains_plus_one`).
        input_ids: `[rows, tokens]` int64, the text on which logits are compared.
        where: Opens error messages.

    Raises:
        RuntimeError: The logits change.
    """
    before = check_logits(model, input_ids)
    for index, factor in factors.items():
        scale_keys(model, layouts[index], factor)
    try:
        after = check_logits(model, input_ids)
    except BaseException:  # out of memory, or an interrupt by the user
        scale_back(model, layouts, factors, originals)
        raise
    if not torch.equal(before, after):
        scale_back(model, layouts, factors, originals)
        difference = float((after.float() - before.float()).abs().max())
        raise RuntimeError(
            f"{where}: factors must leave the logits as they are, got a difference of {difference:.1e}. The weights "
            "are as they were. How this model makes keys is not supported: leave it as it is, or use mode='online'."
        )


def scale_back(
    model: PreTrainedModel,
    layouts: Mapping[int, LayerLayout],
    factors: Mapping[int, Tensor],
    originals: Mapping[str, Tensor],
) -> None:
    """Undo `fold`, bit for bit."""
    for index, factor in factors.items():
        scale_keys(model, layouts[index], 1 / factor)
    _put_back(model, originals)


def check_logits(model: PreTrainedModel, input_ids: Tensor) -> Tensor:
    """Logits of the last tokens of each row, from the model's own attention. Runs row by row to save memory."""
    with evaluating(model), torch.no_grad():
        return torch.cat([forward(model, row[None])[:, -CHECK_TOKENS:] for row in input_ids])


def _put_back(model: PreTrainedModel, originals: Mapping[str, Tensor]) -> None:
    with torch.no_grad():
        for name, original in originals.items():
            model.get_parameter(name).copy_(original)
