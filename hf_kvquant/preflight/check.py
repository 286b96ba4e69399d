"""Checks, before the first token, which cache formats a model tolerates, and picks formats or refuses the given ones.

A preset that costs one model nothing can silently ruin another. So the check looks at two things. The weights show
what makes keys hard to quantise (`signals.py`). And some text is fed through real caches, chunk by chunk, with one
layer quantised at a time: the shift of the next-token distribution is the harm that the format does to that layer. The
measurement decides; without one, the signals of the weights do.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..cache.support import kept_formats
from ..calibration.decoder_check import check_decoder
from ..common.errors import CannotMeasure, did_you_mean
from ..common.progress import show_progress
from ..config import PRESETS, KVQuantConfig, LayerFormats
from ..models.probing import evaluating, in_float32
from ..models.text_config import text_config_of
from ..patching import check_patchable, patched
from ..spec.layout import KVLayout, Shape
from ..transforms.of_model import key_transforms
from .budget import cheapest
from .divergence import (
    COMPARED_TIMES,
    NO_COST,
    Cost,
    Estimate,
    Meter,
    alone,
    read_text,
    stored_shapes,
    window_for,
)
from .result import KLD, UNKNOWN, LayerCheck, Preflight, name_of, remember
from .signals import SHAPES, Finding, KeySignals, read_signals

# The presets to pick from, the smallest first. `int4-token` is for texts that are too short for blocks of keys:
# otherwise `int4` takes the same bytes and diverges less, .003 and .039 nats on SmolLM2-135M-Instruct
# (docs/presets.md).
LADDER = ("int4", "int4-token", "k8v4", "int8", "none")
# With a budget: of presets that take the same bytes, the one that diverges least.
BUDGETED = ("int2", "k4v2", "int4", "k8v4", "int8", "none")

# KL divergences in nats per token with all layers quantised; one layer may have a fifth of each. Measured on the
# reference model (7 layers, 1024 tokens of WikiText-2) with `int4-token`, for all layers, then the worst one. Good
# enough to be picked: .031, .0060; with an injected key bias of norm 100 .038, .0092. Worse than a larger format, but
# usable: with injected outliers (3 pairs per head, times 10) and no factors .096, .020. Ruined: without transforms
# under these outliers .60, .16; under the bias 2.9, 1.05, without its centre but rotated .25, .050; with a bias of norm
# 20 .18, .038. A divergence of .11 raises perplexity by 11 %, .27 by 28 %.
GOAL = 0.05
LIMIT = 0.15
LAYER_SHARE = 0.2
# Standard errors. If the divergence of a layer is nearer to a limit, the layer is measured on all of the text. If it is
# as far as `CLEAR` from both after a few tokens, these are enough: a standard error of few tokens is itself uncertain.
DOUBT, CLEAR = 3.0, 6.0

Found = TypeVar("Found")


def run_preflight(
    model: PreTrainedModel,
    preset_or_config: str | KVQuantConfig | Mapping[str, Any] | None = None,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    texts: Iterable[str] | None = None,
    presets: Sequence[str] | None = None,
    max_kld: float = GOAL,
    bits: float | None = None,
    measure: bool = True,
    progress: bool = True,
    where: str = "run_preflight",
) -> Preflight:
    """Find the formats that a model's cache tolerates, or check whether it tolerates the given ones.

    Without texts, divergences are measured on text that the model samples itself, with a fixed seed and no prompt. That
    takes some 500 decode steps: 250 where no format in question is `int4`, and 1,000 with `k4v2` or `int2`, which keep
    more tokens dense. Layers then diverge about as much as on real text, or up to 1.4 times as much (reference model).
    Pass texts if the model is slow, or was not trained to write without a prompt.

    Args:
        model: A decoder-only model, patched or not, calibrated or not. It is only run, and left unchanged. A bfloat16
            model on a CPU without instructions for bfloat16 computes in float32 meanwhile, which takes twice its memory
            (`in_float32`).
        preset_or_config: The formats to check. `None` picks a preset for every layer.
        tokenizer: The model's, for `texts`.
        texts: Text like the model's future input, 1,024 tokens or more.
        presets: Presets to pick from, the preferred one first. If a config is given, remedies come from this list. The
            default is `LADDER`, or `BUDGETED` if `bits` are given.
        max_kld: Largest divergence of all layers together when formats are picked, in nats per token. A single layer
            may have a fifth of it. In any case, configs above three times `GOAL` are refused.
        bits: The most bits per stored number of keys and values, on average over all layers that can be quantised.
            Scales and zeros count. Dense windows do not, because they do not grow with the context. The combination
            within this budget is picked whose divergences, layer by layer, have the smallest sum. Presets are measured
            only in layers where they could be part of it. Then the combination is measured as a whole, and a single
            preset within the budget is picked if it costs less.
        measure: Whether to run the model on text. Otherwise the weights alone decide, by coarse limits.
        progress: Whether to show progress on stderr. transformers' `disable_progress_bar()` also turns it off.
        where: Opens error messages and lines of progress.

    Returns:
        The config and the findings. Call `approved()` to get the config, or an error if it does harm.

    Raises:
        NotImplementedError: The model cannot be patched, has an encoder, or is sharded over processes.
        TypeError, ValueError: An argument is invalid or does not fit the model.
    """
    config = None if preset_or_config is None else KVQuantConfig.resolve(preset_or_config)
    if bits is not None:
        _check_bits(bits, preset_or_config, max_kld, measure, where)
    if presets is None:
        presets = LADDER if bits is None else BUDGETED
    rungs = _checked(presets, max_kld, tokenizer, texts, where)
    check_decoder(model, where, are_latents_served=True)
    check_patchable(model, KVQuantConfig.from_preset("none") if config is None else config)
    with show_progress(where, is_shown=progress) as tell, torch.no_grad(), evaluating(model), patched(model, "none"):
        tell(doing="weights")
        with in_float32(model) as stored_as:
            signals, left_out = read_signals(model, config, where=where)
            check = _Check(
                model, rungs, max_kld, bits, lambda text: tell(doing=text), where, signals, left_out, stored_as
            )
            if measure and signals:
                check.prepare(tokenizer, texts, config)
            result = check.result(config)
    if not measure:
        return dataclasses.replace(result, unmeasured="measure=False skips this.")
    remember(model, result)
    return result


Rungs = Mapping[str, KVQuantConfig]  # the presets to pick from, by name


def _checked(
    presets: Sequence[str],
    max_kld: float,
    tokenizer: PreTrainedTokenizerBase | None,
    texts: Iterable[str] | None,
    where: str,
) -> Rungs:
    if isinstance(presets, str) or not presets:
        raise ValueError(f"{where}: `presets` must be a list of names, got {presets!r}. The default is {list(LADDER)}.")
    for name in presets:
        if name not in PRESETS:
            raise ValueError(
                f"{where}: `presets` must be names out of {list(PRESETS)}, got {name!r}.{did_you_mean(name, PRESETS)}"
            )
    if not max_kld > 0:
        raise ValueError(f"{where}: `max_kld` must be positive, got {max_kld}. The default is {GOAL} nats per token.")
    if (tokenizer is None) != (texts is None):
        given, missing = ("texts", "tokenizer") if tokenizer is None else ("tokenizer", "texts")
        raise ValueError(
            f"{where}: `{missing}` must come with `{given}`, got None. Give both, or neither: the model then writes "
            "the text itself."
        )
    return {name: KVQuantConfig.from_preset(name) for name in presets}


def _check_bits(bits: object, given: object, max_kld: float, measure: bool, where: str) -> None:
    if isinstance(bits, bool) or not isinstance(bits, (int, float)):
        raise TypeError(f"{where}: `bits` must be a number, got {bits!r}. For example bits=4.5.")
    if not 0 < bits < math.inf:
        raise ValueError(
            f"{where}: `bits` must be positive and finite, got {bits}. It is the mean per stored number: bits=4.5."
        )
    if given is not None:
        raise ValueError(
            f"{where}: `bits` must be left out with `preset_or_config`, got {bits} with {given!r}. A config already "
            "sets every layer: give one of the two."
        )
    if not measure:
        raise ValueError(
            f"{where}: `bits` must come with measure=True, got measure=False. Formats are picked by the divergences "
            "that they cause: leave out one."
        )
    if max_kld != GOAL:
        raise ValueError(
            f"{where}: `max_kld` must be left out with `bits`, got {max_kld}. With a budget, the smallest divergence "
            "within it is picked."
        )


@dataclasses.dataclass
class _Check:
    """Collects what is known of each layer in each format, and decides. Nothing is measured twice."""

    model: PreTrainedModel
    rungs: Rungs
    max_kld: float
    budget: float | None  # bits per stored number
    say: Callable[[str], Any]
    where: str
    signals: Mapping[int, KeySignals]
    left_out: Mapping[int, str]
    stored_as: torch.dtype | None  # the dtype of caches, if the model is measured in another one
    meter: Meter | None = None  # measures divergences; `None` where nothing can be measured
    source: str = ""  # what text it measures on
    unmeasured: str = ""  # or why nothing can be measured
    # By layer, the shape and the dtype that the model caches; empty where nothing can be measured.
    stored: Mapping[int, tuple[Shape, torch.dtype]] = dataclasses.field(default_factory=dict)
    known: dict[tuple[int, LayerFormats], Estimate | str] = dataclasses.field(default_factory=dict)
    wholes: list[tuple[KVQuantConfig, Cost | None]] = dataclasses.field(default_factory=list)

    def result(self, given: KVQuantConfig | None) -> Preflight:
        """Check the given config, or pick one, within the budget if there is one."""
        if given is not None:
            config, remedy = given, "Let for_model pick presets: KVQuantConfig.for_model(model)"
        elif self.budget is not None:
            config, remedy = self.picked_within(self.budget), "Allow more bits"
        else:
            config, remedy = self.picked(), "End `presets` with 'none'"
        layers = tuple(self.layer(index, config.formats(index)) for index in self.signals)
        cost = self.whole(config)
        kld = None if cost is None else cost.kld.mean
        problems = _problems(layers, kld, remedy, is_given=given is not None)
        return Preflight(
            where=self.where,
            config=config,
            layers=layers,
            left_out=self.left_out,
            kld=kld,
            cost=cost,
            bits=self.bits(config),
            budget=self.budget,
            num_tokens=0 if self.meter is None else self.meter.num_scored,
            source=self.source,
            unmeasured=self.unmeasured,
            problems=tuple(problems),
            remedies={} if given is None else self.remedies(config, problems),
        )

    def prepare(
        self,
        tokenizer: PreTrainedTokenizerBase | None,
        texts: Iterable[str] | None,
        given: KVQuantConfig | None,
    ) -> None:
        """Read the text, or let the model write one, and feed it to the unquantised cache.

        Raises:
            ValueError: No combination of presets keeps the budget, or the texts cannot be read.
        """
        configs = self.rungs.values() if given is None else [given]
        named = [(index, config.formats(index)) for config in configs for index in self.signals]
        formats = [each for index, each in named if not self._why_unusable(index, each)]
        try:
            self.stored = stored_shapes(self.model)
            if self.budget is not None:
                self._check_budget(self.budget, {index: self._usable(index) for index in self.signals})
            times = 1 if self.budget is None else COMPARED_TIMES
            ids, self.source = read_text(
                self.model, tokenizer, texts, self.say, window=window_for(formats), times=times, where=self.where
            )
            self.say("the unquantised cache")
            self.meter = Meter(self.model, ids)
        except CannotMeasure as error:
            self.unmeasured = str(error)

    def kld(self, index: int, formats: LayerFormats) -> Estimate | str:
        """The divergence with only this layer quantised, or why it was not measured."""
        if (index, formats) not in self.known:
            self.say(f"layer {index}, {name_of(formats)}")
            # With a budget, divergences are compared with each other, so each is measured on the same number of tokens.
            is_enough = functools.partial(self.is_far, errors=CLEAR if self.budget is None else math.inf)
            found = self._measured(lambda meter: meter.kld(index, formats, is_enough), formats, nothing=NO_COST.kld)
            if isinstance(found, Estimate) and not self.is_far(found, DOUBT):
                found = self._measured(lambda meter: meter.cost(alone(index, formats)).kld, formats, nothing=found)
            self.known[index, formats] = found
        return self.known[index, formats]

    def is_far(self, found: Estimate, errors: float) -> bool:
        """Whether the divergence of a layer is at least `errors` standard errors from both limits."""
        limits = [LAYER_SHARE * limit for limit in (self.max_kld, LIMIT)]
        return all(abs(found.mean - limit) >= errors * found.error for limit in limits)

    def whole(self, config: KVQuantConfig) -> Cost | None:
        """What a config costs; `None` if it was not measured."""
        found = [cost for known, cost in self.wholes if known == config]  # configs cannot be keys of dictionaries
        if not found:
            self.say("all layers")
            plain = dataclasses.replace(config, static=False, max_cache_len=None, offloading=False)
            formats = [plain.formats(index) for index in self.signals]
            cost = self._measured(lambda meter: meter.cost(plain), *formats, nothing=NO_COST)
            found = [None if isinstance(cost, str) else cost]
            self.wholes.append((config, found[0]))
        return found[0]

    def _measured(self, measure: Callable[[Meter], Found], *formats: LayerFormats, nothing: Found) -> Found | str:
        """What is measured of formats, or why it is not. Formats that quantise nothing cost `nothing`."""
        if self.meter is None:
            return self.unmeasured
        if not any(each.is_quantized for each in formats):
            return nothing
        if not all(map(self.meter.reads_codes, formats)):
            is_windowed = any(each.sink_length or each.residual_length for each in formats)
            why = "read codes behind the dense tokens" if is_windowed else "fill a block of keys"
            return f"the texts give windows of {self.meter.longest} tokens, too few to {why}"
        try:
            return measure(self.meter)
        except CannotMeasure as error:
            return str(error)

    def findings(self, index: int, formats: LayerFormats) -> list[Finding]:
        """The signals of the layer's weights that speak against the formats."""
        return self.signals[index].findings(formats, key_transforms(self.model, alone(index, formats)).get(index))

    def is_good(self, index: int, formats: LayerFormats) -> bool:
        """Whether formats are good enough for a layer, by its divergence, or by its weights if nothing is measured."""
        if self.meter is None:
            return not self.findings(index, formats)
        kld = self.kld(index, formats)
        return isinstance(kld, Estimate) and kld.mean <= LAYER_SHARE * self.max_kld

    def layer(self, index: int, formats: LayerFormats) -> LayerCheck:
        kld = self.kld(index, formats)
        others = {
            other: value
            for (i, other), value in self.known.items()
            if i == index and other != formats and other.is_quantized
        }
        return LayerCheck(
            layer_idx=index,
            formats=formats,
            signals=self.signals[index],
            kld=kld.mean if isinstance(kld, Estimate) else None,
            error=kld.error if isinstance(kld, Estimate) else None,
            tried=tuple((name_of(other), value.mean) for other, value in others.items() if isinstance(value, Estimate)),
            findings=tuple(self.findings(index, formats)),
            unmeasured=kld if isinstance(kld, str) else "",
        )

    def picked(self) -> KVQuantConfig:
        """The first preset that is good enough, first per layer, then for all layers; the last preset if none is."""
        usable = {index: self._usable(index) for index in self.signals}
        places = {
            index: next((i for i, formats in enumerate(choices) if self.is_good(index, formats)), len(choices) - 1)
            for index, choices in usable.items()
        }
        while True:
            config = self._config_of({index: usable[index][place] for index, place in places.items()})
            cost = self.whole(config)
            movable = [index for index, place in places.items() if place + 1 < len(usable[index])]
            if cost is None or cost.kld.mean <= self.max_kld or not movable:
                return config
            # Divergences add up over layers, so move the quarter with the largest to their next format that costs less.
            movable.sort(key=lambda index: -self.known_cost(index, usable[index][places[index]]))
            for index in movable[: max(1, len(places) // 4)]:
                least = self.known_cost(index, usable[index][places[index]])
                places[index] += 1
                while (
                    places[index] + 1 < len(usable[index])
                    and self.known_cost(index, usable[index][places[index]]) > least
                ):
                    places[index] += 1

    def known_cost(self, index: int, formats: LayerFormats) -> float:
        """The divergence with only this layer quantised; 0 if it is not measured."""
        kld = self.kld(index, formats)
        return kld.mean if isinstance(kld, Estimate) else 0.0

    def picked_within(self, budget: float) -> KVQuantConfig:
        """The presets whose divergences, layer by layer, have the smallest sum within a budget of bits per number.

        Or a single preset for all layers, if it is within the budget and costs less as a whole: divergences only nearly
        add up.
        """
        if not self.signals:
            return self._config_of({})
        assert self.meter is not None
        # What is not measured yet costs nothing, which is the least possible. If all that is picked is measured, then
        # nothing else can have a smaller sum, and nothing else needs to be measured.
        costs = {index: dict.fromkeys(self._usable(index), 0.0) for index in self.signals}
        unknown = {(index, formats) for index, choices in costs.items() for formats in choices}
        while True:
            picked = self._cheapest(costs, budget)
            news = [each for each in picked.items() if each in unknown]
            if not news:
                break
            for index, formats in news:
                unknown.remove((index, formats))
                kld = self.kld(index, formats)
                if isinstance(kld, Estimate):
                    costs[index][formats] = kld.mean
                    continue
                del costs[index][formats]
                if not costs[index]:
                    raise ValueError(
                        f"{self.where}: `bits` must be left out unless layer {index} can be measured, got no "
                        f"divergence: {kld.rstrip('.')}. Pass other `texts`, or name a preset."
                    )
        num_bytes = self._check_budget(budget, costs)
        uniform = [{index: rung.formats(index) for index in costs} for rung in self.rungs.values()]
        candidates = [picked, *(each for each in uniform if self._is_within(num_bytes, each, costs))]
        wholes = [(config, self.whole(config)) for config in map(self._config_of, candidates)]
        # The first of equal ones is what was picked.
        return min(wholes, key=lambda each: math.inf if each[1] is None else each[1].kld.mean)[0]

    def _is_within(
        self, num_bytes: int, formats: Mapping[int, LayerFormats], costs: Mapping[int, Mapping[LayerFormats, float]]
    ) -> bool:
        """Whether formats, one for each layer, are among the choices and take at most `num_bytes` a token."""
        is_known = all(each in costs[index] for index, each in formats.items())
        return is_known and sum(self.size(index, each)[0] for index, each in formats.items()) <= num_bytes

    def _cheapest(self, costs: Mapping[int, Mapping[LayerFormats, float]], budget: float) -> dict[int, LayerFormats]:
        """The formats of each layer that cost the least in all, within a budget of bits per number."""
        num_bytes = self._check_budget(budget, costs)
        table = [
            [(self.size(index, formats)[0], cost) for formats, cost in choices.items()]
            for index, choices in costs.items()
        ]
        places = cheapest(table, num_bytes)
        assert places is not None, "the budget is large enough"
        return {index: list(costs[index])[place] for index, place in zip(costs, places, strict=True)}

    def _check_budget(self, budget: float, choices: Mapping[int, Iterable[LayerFormats]]) -> int:
        """The bytes that a token may take within a budget of bits per number, if these choices can keep it.

        Raises:
            ValueError: They cannot, or the budget is more than the unquantised cache takes.
        """
        smallest = [min(self.size(index, formats) for formats in each) for index, each in choices.items()]
        unquantized = KVQuantConfig.from_preset("none")
        most = _mean_bits(self.size(index, unquantized.formats(index)) for index in choices)
        # A millionth of a byte forgives the rounding of the product.
        num_bytes = math.floor(budget * sum(num_values for _, num_values in smallest) / 8 + 1e-6)
        if num_bytes >= sum(size for size, _ in smallest) and budget <= most:
            return num_bytes
        least = math.ceil(_mean_bits(smallest) * 1e4 - 1e-6) / 1e4
        remedy = "Allow more bits" if budget < most else "Name fewer than the unquantised cache takes"
        raise ValueError(
            f"{self.where}: `bits` must be from {least:g} to {most:g} for this model with `presets` "
            f"{list(self.rungs)}, got {budget:g}. {remedy}."
        )

    def size(self, index: int, formats: LayerFormats) -> tuple[int, int]:
        """Bytes that a token takes in a layer in these formats, scales and zeros included, and how many numbers."""
        shape, dtype = self.stored[index]
        _, num_kv_heads, *head_dims = shape
        kept = self._kept(index, formats)
        num_bytes = KVLayout(kept.key, kept.value).bytes_per_token(shape, self.stored_as or dtype)
        return num_bytes, num_kv_heads * sum(head_dims)

    def bits(self, config: KVQuantConfig) -> float | None:
        """Mean bits of a stored number in the layers that are quantised, or could be; `None` if nothing is measured."""
        if self.meter is None:
            return None
        return _mean_bits(self.size(index, config.formats(index)) for index in self.signals)

    def _config_of(self, layers: Mapping[int, LayerFormats]) -> KVQuantConfig:
        """A config with these layers. The formats of most layers become its defaults."""
        if not layers:
            return next(iter(self.rungs.values()))
        [(most, _)] = Counter(layers.values()).most_common(1)
        others = {index: formats for index, formats in layers.items() if formats != most}
        return KVQuantConfig(**most.settings(), layers=others)

    def _kept(self, index: int, formats: LayerFormats) -> LayerFormats:
        """`kept_formats` of a layer."""
        return kept_formats(self.where, formats, text_config_of(self.model).per_layer_config[index])

    def _why_unusable(self, index: int, formats: LayerFormats) -> str:
        """Why a layer cannot have formats; empty if it can."""
        head_dim = self.signals[index].head_dim
        try:
            kept = self._kept(index, formats)
            if head_dim is not None:
                kept.key.num_groups(head_dim)
                kept.value.num_groups(head_dim)
        except ValueError as error:
            return str(error)
        return ""

    def _usable(self, index: int) -> list[LayerFormats]:
        """The presets' formats that a layer can have, those that mean the same there only once."""
        reasons = {name: self._why_unusable(index, rung.formats(index)) for name, rung in self.rungs.items()}
        found: dict[LayerFormats, LayerFormats] = {}
        for name, rung in self.rungs.items():
            if not reasons[name]:
                found.setdefault(self._kept(index, rung.formats(index)), rung.formats(index))
        if not found:
            raise ValueError(
                f"{self.where}: `presets` must include one that fits layer {index}, got {list(self.rungs)}: "
                f"{[*reasons.values()][-1]} Add 'none'."
            )
        return [*found.values()]

    def remedies(self, config: KVQuantConfig, problems: Iterable[Finding]) -> dict[int, LayerFormats]:
        """Per layer with a problem, the first good enough formats: its own with the usual transforms, or a preset's.

        They are good enough only if they would be accepted: what nothing is known of is no remedy.
        """
        found = {}
        named = {finding.layer_idx for finding in problems}
        for index in self.signals:
            asked = config.formats(index)
            # If all layers together are the problem, it includes every layer that exceeds its share.
            if index in named or (None in named and not self.is_good(index, asked)):
                choices = [LayerFormats(asked.key, asked.value), *self._usable(index)]
                good = (formats for formats in choices if formats != asked and self.is_good(index, formats))
                accepted = (x for x in good if not _problems([self.layer(index, x)], None, "", is_given=True))
                found[index] = next(accepted, None)
        return {index: formats for index, formats in found.items() if formats is not None}


def _mean_bits(sizes: Iterable[tuple[int, int]]) -> float:
    """Mean bits of a number, from each layer's bytes and numbers of a token."""
    num_bytes, num_values = map(sum, zip(*sizes, strict=True))
    return 8 * num_bytes / num_values


def _problems(layers: Sequence[LayerCheck], kld: float | None, default: str, *, is_given: bool) -> list[Finding]:
    """Reasons to refuse, the worst first: divergences, signals of layers that were not measured, and unknown layers.

    `kld` is of all layers together. `default`: the remedy for a divergence if the weights show no other. `is_given`:
    the user gave the config, instead of having it picked.
    """
    found: list[Finding] = []
    for layer in layers:
        index, limit = layer.layer_idx, LAYER_SHARE * LIMIT
        if not layer.formats.is_quantized:
            continue
        if layer.kld is not None:
            if layer.kld > limit:
                remedies = [finding.remedy for finding in layer.findings if finding.signal not in SHAPES and is_given]
                remedy = next(iter(remedies), default)
                found.append(Finding(index, KLD, layer.kld, limit, f"{layer.kld:.3g}", remedy, True))
            continue
        found += [finding for finding in layer.findings if finding.is_harmful]
        # A reason may be a whole error with a remedy of its own. What came is enough here.
        whys = {signal: re.sub(r".*, got (.*?)(\. .*|$)", r"\1", why) for signal, why in layer.signals.unknown.items()}
        unknown = [f"{signal} unknown: {why}" for signal, why in whys.items()]
        reasons = [layer.unmeasured] if layer.unmeasured else unknown
        if reasons:
            measured = "pass `tokenizer` and `texts` to measure it" if layer.unmeasured else "leave out measure=False"
            remedy = f"Load the weights, or {measured}"
            found.append(Finding(index, UNKNOWN, None, None, "; ".join(reasons).rstrip("."), remedy, True))
    if kld is not None and kld > LIMIT:
        found.append(Finding(None, KLD, kld, LIMIT, f"{kld:.3g}", default, True))
    return sorted(found, key=lambda finding: (finding.layer_idx is None, finding.value is None, -(finding.value or 0)))
