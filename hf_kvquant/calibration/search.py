"""Finds the centre and the smoothing factors of each layer's keys that quantise best.

A candidate is an exponent alpha, for factors `max|key|^alpha`, or `"energy"`, for factors that give keys and queries
equal energy. Factors are rounded to powers of two and shared by tied channels. Statistics of keys and queries on
calibration text give the factors of each candidate. Its error is how far the layer's attention output changes when keys
go through the cache's whole transform and the real storage format (`reference.py`), relative to the output over
unquantised keys. The reconstruction error of keys would mislead, since queries weight the channels. Padding is excluded
from both.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..attention.observation import Observation
from ..common.progress import Tell
from ..spec import reference
from ..spec.formats import KVFormat
from ..spec.key_transform import KeyTransform
from .folding import Folding, exact_exponents
from .smoothing_file import LayerSmoothing
from .targets import Target
from .text import ERROR_TOKENS, Windows, run_windows, some

Candidate = float | Literal["energy"]
WHERE = "smooth_attention"  # opens messages
CANDIDATES: tuple[Candidate, ...] = (0.0, 0.25, 0.5, 0.75, 1.0, "energy")
# Factors beyond 2^±8 are useless: keys whose channels differ by more would lose as much in bfloat16.
MAX_EXPONENT = 8
# A layer is smoothed only if its error falls by at least this share; less is noise of the calibration text.
MIN_GAIN = 0.05


@dataclasses.dataclass
class KeyStatistics:
    """Statistics of one layer on calibration text. All tensors are `[num_kv_heads, head_dim]` float32 on the CPU."""

    minimum: Tensor  # smallest value of each channel of the keys, after RoPE
    maximum: Tensor  # largest value of each channel of the keys
    mean: Tensor  # mean of the keys
    mean_square: Tensor  # mean square of the keys
    query_mean_square: Tensor  # mean square of the queries that share the key-value head

    def largest(self, center: Tensor | None) -> Tensor:
        """The largest `|key - center|` of each channel."""
        c = torch.zeros_like(self.mean) if center is None else center.to(self.mean)
        return torch.maximum(self.maximum - c, c - self.minimum)

    def energy(self, center: Tensor | None) -> Tensor:
        """The mean of `(key - center)²` of each channel."""
        if center is None:
            return self.mean_square
        c = center.to(self.mean)
        return (self.mean_square - 2 * c * self.mean + c.square()).clamp(min=0)


def collect(
    model: PreTrainedModel, windows: Windows, layers: Iterable[int], advance: Callable[[int], Any] = lambda tokens: None
) -> dict[int, KeyStatistics]:
    """Collect statistics of the keys and queries of some layers. See `run_windows` for the arguments."""
    seen: dict[int, list[tuple[Tensor, ...]]] = defaultdict(list)

    def look(observation: Observation, is_real: Tensor) -> None:
        key = observation.key.transpose(1, 2)[is_real].float()  # [real tokens, num_kv_heads, head_dim]
        query = observation.query.transpose(1, 2)[is_real].float().unflatten(1, (key.shape[1], -1))
        sums = key.double().sum(0), key.double().square().sum(0), query.double().square().mean(2).sum(0)
        seen[observation.layer_idx].append((key.amin(0), key.amax(0), *sums, torch.tensor(len(key), device="cpu")))

    run_windows(model, windows, set(layers), look, advance)
    found = {}
    for index, batches in sorted(seen.items()):
        minimum, maximum, *sums, count = (torch.stack(each).cpu() for each in zip(*batches, strict=True))
        mean, mean_square, query_mean_square = ((sum(each) / count.sum()).float() for each in sums)
        found[index] = KeyStatistics(minimum.amin(0), maximum.amax(0), mean, mean_square, query_mean_square)
    return found


def checked_candidates(candidates: Sequence[Candidate]) -> list[Candidate]:
    """The user's candidates without duplicates, after 0.0, which changes nothing."""
    for choice in candidates:
        is_alpha = isinstance(choice, int | float) and not isinstance(choice, bool) and 0 <= choice <= 2
        if choice != "energy" and not is_alpha:
            raise ValueError(
                f"{WHERE}: `candidates` must be exponents from 0 to 2 or 'energy', got {choice!r}. "
                f"Common ones are {list(CANDIDATES)}."
            )
    return list(dict.fromkeys([0.0, *(choice if choice == "energy" else float(choice) for choice in candidates)]))


def exponents_of(statistics: KeyStatistics, ties: Tensor, choice: Candidate, center: Tensor | None) -> Tensor:
    """Base-2 logarithms of one candidate's factors, `[num_kv_heads, head_dim]` int64.

    `ties` has the same shape: channels with the same number get the same factor. The centre, if there is one, is
    subtracted from keys before they are divided.
    """

    def over_ties(values: Tensor, how: Literal["amax", "sum"]) -> Tensor:
        flat, start = ties.flatten(), torch.zeros(ties.numel(), dtype=torch.float64, device="cpu")
        return start.scatter_reduce(0, flat, values.flatten().double(), how)[ties]

    if choice == "energy":
        # Equal energy of keys and queries in each channel minimises the product of their total energies.
        ratio = over_ties(statistics.energy(center), "sum") / over_ties(statistics.query_mean_square, "sum")
        logs = ratio.log2() / 4
    else:
        logs = float(choice) * over_ties(statistics.largest(center), "amax").log2()
    # A channel that is zero in all keys or all queries gets factor 1.
    is_dead = ~logs.isfinite()
    logs = logs.masked_fill(is_dead, 0.0)
    # A factor common to a whole head does not change the error, so remove it: the mean over each cluster of tied heads.
    cluster = (ties // ties.shape[1]).amin(1)
    for number in cluster.unique():
        inside = (cluster == number)[:, None] & ~is_dead
        logs[inside] -= logs[inside].mean()
    return logs.masked_fill(is_dead, 0.0).round().clamp(-MAX_EXPONENT, MAX_EXPONENT).long()


def pick(errors: Sequence[float]) -> int:
    """The index of the choice with the smallest error, or 0 (change nothing) if it gains less than `MIN_GAIN`."""
    best = min(range(len(errors)), key=errors.__getitem__)
    return best if errors[best] <= (1 - MIN_GAIN) * errors[0] else 0


def through_codes(key: Tensor, key_format: KVFormat, transform: KeyTransform, is_padding: Tensor) -> Tensor:
    """Keys as a cache gives them back: `[batch, num_kv_heads, tokens, head_dim]` float32, like `key`.

    Keys behind the last whole block of channel scales stay as they are.
    """
    num_coded = key.shape[2] // (key_format.block_size or 1) * (key_format.block_size or 1)
    coded = reference.transform_key(key[:, :, :num_coded], transform)
    stored = reference.quantize(coded, key_format, is_padding=is_padding[:, :num_coded])
    read = reference.dequantize(stored, key_format, key_transform=transform)
    return torch.cat((read, key[:, :, num_coded:]), dim=2)


@dataclasses.dataclass(frozen=True)
class Search:
    """Finds the centres and factors of some layers, by index. The model is left unchanged."""

    model: PreTrainedModel
    windows: Windows
    targets: Mapping[int, Target]
    tell: Tell

    def run(self, choices: Sequence[Candidate], input_ids: Tensor) -> dict[int, LayerSmoothing]:
        """Find them; 0.0 is the first of `choices`.

        On `input_ids`, attention must stay the same to the bit with the factors folded in.

        Raises:
            NotImplementedError, RuntimeError: No factors can be folded.
            ValueError: Keys are not finite, or no window holds a block of keys.
        """
        longest = max(ids.shape[1] for ids, _ in self.windows)
        needed = max(target.key_format.block_size or 1 for target in self.targets.values())
        if longest < needed:
            raise ValueError(
                f"{WHERE}: `window` and the texts must have at least {needed} tokens for keys whose channels share a "
                f"scale over so many, got windows of {longest}. Take longer ones."
            )
        self.tell(doing="statistics of keys and queries")
        statistics = self._statistics()
        bad = [index for index, seen in statistics.items() if not seen.mean_square.isfinite().all()]
        if bad:
            raise ValueError(
                f"{WHERE}: `model` must have finite keys on the texts, got infinities or NaN in layer {bad[0]}. "
                "Check the checkpoint, or load it in bfloat16 or float32."
            )
        self.tell(doing="errors of candidates")
        layers = self._choose(statistics, choices)
        self.tell(doing="check of logits")
        return self._settle(layers, input_ids)

    def _statistics(self) -> dict[int, KeyStatistics]:
        return collect(self.model, self.windows, self.targets, self.tell)

    def _errors(
        self, transforms: Mapping[int, Sequence[KeyTransform]], advance: Callable[[int], Any] = lambda tokens: None
    ) -> dict[int, list[float]]:
        """The relative error of each layer's attention output under each choice of transform, with only keys quantised.

        It is `sqrt(squared error / squared output)`, both sums over about `ERROR_TOKENS` tokens. Equal transforms are
        measured once. No factors may be folded into the weights yet.
        """
        errors = {index: [0.0] * len(choices) for index, choices in transforms.items()}
        sizes = dict.fromkeys(transforms, 0.0)
        # Per layer and choice, the first choice that is equal to it.
        first = {
            index: [next(number for number, other in enumerate(choices) if choice.equals(other)) for choice in choices]
            for index, choices in transforms.items()
        }

        def look(observation: Observation, is_real: Tensor) -> Tensor | None:
            index, key_format = observation.layer_idx, self.targets[observation.layer_idx].key_format
            query, key, value = (x.float() for x in (observation.query, observation.key, observation.value))
            output = observation.attend(query, key, value)
            exact = output[is_real]
            sizes[index] += float(exact.double().square().sum())
            key = key * is_real[:, None, :, None]  # padding must not widen a scale that several tokens share
            for number in set(first[index]):
                transform = transforms[index][number].to(key.device)
                read = through_codes(key, key_format, transform, ~is_real)
                out = observation.attend(query, read, value)[is_real]
                errors[index][number] += float((out - exact).double().square().sum())

            # The model attends to the same; in another dtype it rounds in another way.
            return output if output.dtype == observation.query.dtype else None

        run_windows(self.model, some(self.windows, ERROR_TOKENS), transforms, look, advance)
        return {
            index: [(errors[index][number] / size) ** 0.5 if size else 0.0 for number in first[index]]
            for index, size in sizes.items()
        }

    def _choose(
        self, statistics: Mapping[int, KeyStatistics], choices: Sequence[Candidate]
    ) -> dict[int, LayerSmoothing]:
        """Choose the best of the candidates in each layer, after shrinking factors that would round weights.

        A layer whose error would grow stays as it was before calibration.
        """
        exponents: dict[int, list[Tensor]] = {}
        tried: dict[int, list[KeyTransform]] = {}
        is_limited: dict[int, bool] = {}
        for index, target in self.targets.items():
            seen, layout = statistics[index], target.layout
            center = seen.mean if target.has_center else target.before.center
            tested = choices if target.has_factors else [0.0] * len(choices)
            wanted = exponents[index] = [exponents_of(seen, target.ties, choice, center) for choice in tested]
            if layout is not None:
                exponents[index] = [exact_exponents(self.model, layout, each) for each in wanted]
            is_limited[index] = not all(map(torch.equal, exponents[index], wanted))
            tried[index] = [target.before, *(target.transform(center, each) for each in exponents[index])]
        chosen = {}
        for index, (error_before, *errors) in self._errors(tried, self.tell).items():
            target, number = self.targets[index], pick(errors)
            transform, error = tried[index][1 + number], errors[number]
            if error > error_before:
                number, transform, error = 0, target.before, error_before
            is_smoothed = bool(exponents[index][number].any())
            chosen[index] = LayerSmoothing(
                layer_idx=index,
                name=target.keys.name,
                placement=target.placement,
                choice=str(choices[number]) if is_smoothed else "0.0",
                factor=torch.exp2(exponents[index][number].float()),
                center=transform.center if target.has_center else None,
                errors={str(name): error for name, error in zip(choices, errors, strict=True)},
                error_before=error_before,
                error_after=error,
                is_limited=is_limited[index],
            )
        return chosen

    def _settle(self, chosen: dict[int, LayerSmoothing], input_ids: Tensor) -> dict[int, LayerSmoothing]:
        """Reduce exponents until no layer's attention changes a bit. See `Folding.settle`."""
        layouts = {index: target.layout for index, target in self.targets.items() if target.layout is not None}
        if not layouts:
            return chosen
        before = {index: chosen[index].exponents for index in layouts}
        after = Folding(self.model, layouts).settle(before, input_ids, WHERE)
        cut = {index: [0 * x, x] for index, x in after.items() if not torch.equal(x, before[index])}
        tried = {
            index: [self.targets[index].transform(chosen[index].center, exponents) for exponents in choices]
            for index, choices in cut.items()
        }
        settled = dict(chosen)
        for index, errors in (self._errors(tried) if cut else {}).items():
            number = pick(errors)
            exponents = cut[index][number]
            settled[index] = dataclasses.replace(
                chosen[index],
                choice=chosen[index].choice if exponents.any() else "0.0",
                factor=torch.exp2(exponents.float()),
                error_after=errors[number],
                is_limited=True,
            )
        if cut and not any(settled[index].is_smoothed for index in layouts):
            raise NotImplementedError(
                f"{WHERE}: `model` must have room for other factors in its dtype, got float16, in which every factor "
                "worth folding would round some key or query. Load it in float32, or use mode='online'."
            )
        return settled
