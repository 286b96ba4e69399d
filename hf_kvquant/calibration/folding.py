"""Folds smoothing factors into a model's weights, and proves that no bit of attention or of the logits changes.

Keys are divided by a factor per key-value head and channel. The queries that share the head are multiplied by it, so
every product of query and key stays the same. Factors that are powers of two change no bit of any product as long as
no value leaves the range of its dtype. Three checks see to that, each before the next: `exact_exponents` shrinks
factors that would round a weight, `Folding.settle` those that would change a layer's attention (float16 has few
exponents), and `Folding.fold` rolls everything back if the logits change. So every wrong conclusion about where keys
come from is caught here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..attention.observation import Observation, observed
from ..models.adapters import without_adapters
from ..models.probing import evaluating, forward
from .layout import LayerLayout
from .origins import Scalable
from .text import CHECK_TOKENS


def scale_keys(model: PreTrainedModel, layout: LayerLayout, factor: Tensor) -> None:
    """Divide one layer's keys by a factor and multiply its queries by it, through the weights.

    `factor` is `[num_kv_heads, head_dim]` float32, positive, and equal where `layout.ties` is.
    """
    for part in _parts(model, layout, factor):
        part.rows[part.features] = part.scaled()


def exact_exponents(model: PreTrainedModel, layout: LayerLayout, exponents: Tensor) -> Tensor:
    """Shrink exponents of factors, equal where `layout.ties` is, until the weights can be scaled without rounding."""
    while exponents.any():
        is_bad = torch.zeros_like(exponents, dtype=torch.bool)
        for part in _parts(model, layout, torch.exp2(exponents.float())):
            rounds = torch.isin(part.scalable.index, part.features[part.rounds()].cpu())  # [heads, head_dim]
            is_bad |= rounds.view(len(exponents), -1, rounds.shape[1]).any(1)
        if not is_bad.any():
            break
        is_bad = torch.isin(layout.ties, layout.ties[is_bad])  # channels that are tied to a bad one
        exponents = torch.where(is_bad, exponents - exponents.sign(), exponents)
    return exponents


_UNSUPPORTED = (
    "The weights are as they were. How this model makes keys is not supported: leave it as it is, or use mode='online'."
)


class Folding:
    """Scales some layers of a model, by index, and scales them back.

    `originals` are copies on the CPU, by name, of the weights that scaling and scaling back may round.
    """

    def __init__(
        self, model: PreTrainedModel, layouts: Mapping[int, LayerLayout], originals: Mapping[str, Tensor] | None = None
    ) -> None:
        self.model, self.layouts = model, layouts
        sides = (side for layout in layouts.values() for side in (layout.key, layout.query))
        names = [f"{side.name}.weight" for side in sides if side.rule == "gain_plus_one"]
        if originals is None:
            originals = {name: self._parameter(name).detach().cpu().clone() for name in names}
        self.originals = originals

    def scale(self, factors: Mapping[int, Tensor]) -> None:
        """`scale_keys` for these layers."""
        for index, factor in factors.items():
            scale_keys(self.model, self.layouts[index], factor)

    def undo(self, factors: Mapping[int, Tensor]) -> None:
        """Undo `scale`, bit for bit."""
        self.scale({index: 1 / factor for index, factor in factors.items()})
        with torch.no_grad():
            for name, original in self.originals.items():
                self._parameter(name).copy_(original)

    def _parameter(self, name: str) -> Tensor:
        owner, _, last = name.rpartition(".")
        return without_adapters(self.model.get_submodule(owner)).get_parameter(last)

    def settle(self, exponents: Mapping[int, Tensor], input_ids: Tensor, where: str) -> dict[int, Tensor]:
        """Reduce exponents until no layer's attention changes a bit. The model is scaled and scaled back in each trial.

        float16 has few exponents: keys and queries that become subnormal lose bits, and RoPE loses more. If a layer
        changes in float16, its exponents are reduced until it does not. In other dtypes a change is a `RuntimeError`.
        """
        settled = dict(exponents)
        outputs: dict[int, Tensor] = {}
        changed: set[int] = set()

        def compare(observation: Observation) -> Tensor:
            index, out = observation.layer_idx, observation.attended()
            if not torch.equal(out, outputs.setdefault(index, out)):
                changed.add(index)
            return outputs[index]  # so that later layers are compared on the same input

        with observed(self.model, compare):
            forward(self.model, input_ids, only_last=True)
        while True:
            changed.clear()
            factors = {index: torch.exp2(settled[index].float()) for index in self.layouts}
            try:
                self.scale(factors)
                with observed(self.model, compare):
                    forward(self.model, input_ids, only_last=True)
            finally:
                self.undo(factors)
            if not changed:
                return settled
            if self.model.dtype != torch.float16 or not changed <= {index for index, x in settled.items() if x.any()}:
                first = min(changed)
                raise RuntimeError(
                    f"{where}: factors must leave attention as it is, got another output in layer {first} "
                    f"({self.layouts[first].name if first in self.layouts else 'not scaled'}). {_UNSUPPORTED}"
                )
            for index in changed:
                limit = int(settled[index].abs().max()) - 1
                settled[index] = settled[index].clamp(-limit, limit)

    def fold(self, factors: Mapping[int, Tensor], input_ids: Tensor, where: str) -> None:
        """Scale by powers of two; undo it and raise unless all logits on `input_ids` stay the same to the bit."""
        before = check_logits(self.model, input_ids)
        self.scale(factors)
        try:
            after = check_logits(self.model, input_ids)
            if not torch.equal(before, after):
                difference = float((after.float() - before.float()).abs().max())
                raise RuntimeError(
                    f"{where}: factors must leave the logits as they are, got a difference of {difference:.1e}. "
                    f"{_UNSUPPORTED}"
                )
        except BaseException:  # the logits changed, memory ran out, or the user interrupted
            self.undo(factors)
            raise


def check_logits(model: PreTrainedModel, input_ids: Tensor) -> Tensor:
    """Logits of the last tokens of each row, from the model's own attention. Runs row by row to save memory."""
    with evaluating(model), torch.no_grad():
        return torch.cat([forward(model, row[None])[:, -CHECK_TOKENS:] for row in input_ids])


@dataclasses.dataclass(frozen=True)
class _Part:
    """The part of a parameter that a factor scales."""

    scalable: Scalable
    rows: Tensor  # a view of the whole parameter, `[features, ...]`
    offset: int  # what the module adds to the parameter before use
    features: Tensor  # `[scaled]` int64: the features whose factor is not 1
    factors: Tensor  # `[scaled, 1]` float32: what their effect is multiplied by

    def scaled(self) -> Tensor:
        scaled = self._wide(self.rows[self.features]) * self.factors
        return (scaled - self.offset if self.offset else scaled).to(self.rows.dtype)

    def rounds(self) -> Tensor:
        """Whether scaling rounds a number of each feature, `[scaled]` bool."""
        before, after = self._wide(self.rows[self.features]), self._wide(self.scaled())
        # Check the way back, too: a product that became subnormal has lost bits.
        return ((after != before * self.factors) | (after / self.factors != before)).any(1)

    def _wide(self, rows: Tensor) -> Tensor:
        wide = rows.to(torch.promote_types(rows.dtype, torch.float32))
        return wide + self.offset if self.offset else wide  # adding 0 would turn -0.0 into 0.0


def _parts(model: PreTrainedModel, layout: LayerLayout, factor: Tensor) -> Iterator[_Part]:
    """What dividing keys and multiplying queries scales. Query heads take the factor of their key-value head."""
    of_queries = factor.repeat_interleave(layout.num_q_per_kv, 0)
    for scalable, multiplier in ((layout.key, 1 / factor), (layout.query, of_queries)):
        features, factors = scalable.per_feature(multiplier)
        is_scaled = factors != 1
        # Adapters that came after folding are left alone when it is undone.
        module = without_adapters(model.get_submodule(scalable.name))
        for name, parameter in module.named_parameters(recurse=False):
            is_matrix = name == "weight" and scalable.rule in ("rows", "columns")
            rows = scalable.by_feature(parameter) if is_matrix else parameter.detach().view(-1, 1)
            offset = int(name == "weight" and scalable.rule == "gain_plus_one")
            device = rows.device
            yield _Part(scalable, rows, offset, features[is_scaled].to(device), factors[is_scaled, None].to(device))
