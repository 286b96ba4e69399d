"""Holds the results of a pre-flight check and words them: tables, reasons to refuse, the error with its remedy."""

from __future__ import annotations

import dataclasses
import logging
import operator
from collections.abc import Mapping
from typing import Any

from rich.table import Table
from transformers import PreTrainedModel

from ..common.errors import PreflightError
from ..common.tables import html, plain, table_of
from ..config import PRESETS, KVQuantConfig, LayerFormats
from ..presets import preset_formats
from ..state import notes_on, state_of
from .divergence import Cost
from .signals import SHAPES, Finding, KeySignals

logger = logging.getLogger(__name__)

# Signals that do not come from the weights: a measured divergence, or that nothing is known.
KLD = "KL divergence"
UNKNOWN = "unknown"
HEADINGS = ("layer", "formats", "key bias", "channels", "KL, nats/token", "remarks")


@dataclasses.dataclass(frozen=True)
class LayerCheck:
    """The pre-flight result for one layer."""

    layer_idx: int
    formats: LayerFormats
    signals: KeySignals
    # Mean KL divergence in nats per token with only this layer quantised; `None` if it was not measured.
    kld: float | None
    error: float | None  # its standard error over tokens
    tried: tuple[tuple[str, float], ...]  # names of the other formats that were measured, each with its divergence
    findings: tuple[Finding, ...]  # signals of the weights that exceed their limits for these formats
    unmeasured: str  # why the divergence is missing, if it was asked for

    @property
    def name(self) -> str:
        """The name of the formats: the preset's, if they are a preset."""
        return name_of(self.formats)

    def remarks(self) -> str:
        """Remarks on the layer for the last column of the table, on one line."""
        remarks = [finding.detail for finding in self.findings if finding.signal not in SHAPES]
        remarks += [f"{name}: {kld:.1e}" for name, kld in self.tried]
        remarks += [f"{signal} unknown" for signal in self.signals.unknown]
        return "; ".join(remarks)


@dataclasses.dataclass(frozen=True, repr=False)
class Preflight:
    """The result of `run_preflight`.

    Attributes:
        where: Opens the message of an error.
        config: The config that was picked or given.
        layers: The layers whose cache would be quantised, in order.
        left_out: Per layer whose cache is left to transformers, the reason.
        kld: Mean KL divergence in nats per token of the whole config; `None` if it was not measured.
        cost: The same with its standard error, with the share of tokens after which the most likely next token is the
            same, and with the change of the perplexity.
        bits: Mean bits of a stored number of these layers, scales and zeros counted, dense windows not; `None` if
            nothing was measured.
        budget: The most bits that were allowed, if they were.
        num_tokens: Tokens over which divergences were measured.
        source: What text these tokens are from.
        unmeasured: Why nothing was measured; empty if divergences were measured.
        problems: Reasons to refuse the config, the worst first.
        remedies: Per layer with a problem, formats that are good enough.
    """

    where: str
    config: KVQuantConfig
    layers: tuple[LayerCheck, ...]
    left_out: Mapping[int, str]
    kld: float | None
    cost: Cost | None
    bits: float | None
    budget: float | None
    num_tokens: int
    source: str
    unmeasured: str
    problems: tuple[Finding, ...]
    remedies: Mapping[int, LayerFormats]

    @property
    def is_safe(self) -> bool:
        """Whether there is no reason to refuse the config."""
        return not self.problems

    def approved(self, *, force: bool = False) -> KVQuantConfig:
        """The config, if it does no harm.

        Args:
            force: Whether to return it in any case, with a warning in the log.

        Raises:
            PreflightError: The config does harm, or a layer cannot be checked.
        """
        if not self.problems:
            return self.config
        error = self._error()
        if not force:
            raise error
        logger.warning("%s Accepted anyway, since `force` is True.", error)
        return self.config

    def _error(self) -> PreflightError:
        worst = self.problems[0]
        layer = next((layer for layer in self.layers if layer.layer_idx == worst.layer_idx), None)
        of_what = "all layers together" if layer is None else f"layer {layer.layer_idx}"
        kept = "this config" if layer is None else layer.name
        argument = "preset_or_config" if self.budget is None else "bits"
        if worst.value is None:
            expected = f"`model` must be checked in {of_what} before {kept} is used, got no verdict: {worst.detail}"
        elif worst.signal == KLD:
            expected = (
                f"`{argument}` must keep the KL divergence of {of_what} within {worst.limit:g} nats per token, "
                f"got {worst.value:.3g} with {kept}"
            )
            causes = [] if layer is None else [x.detail for x in layer.findings if x.signal not in SHAPES]
            if causes:
                expected += f" ({'; '.join(causes)})"
        else:
            expected = f"`{argument}` must fit the weights of {of_what}, got {kept} and {worst.detail}"
        remedy = ". Or use ".join(filter(None, (worst.remedy, self._found_good())))
        message = f"{self.where}: {expected}. {remedy}. force=True accepts it anyway."
        return PreflightError(
            message,
            layer_idx=worst.layer_idx,
            signal=worst.signal,
            value=worst.value,
            limit=worst.limit,
            remedy=remedy,
        )

    def _found_good(self) -> str:
        """The remedies in words, such as `layers={0: 'int8'}`; empty if there are none."""
        typed = {index: typed_of(formats) for index, formats in sorted(self.remedies.items())}
        if not typed:
            return ""
        if len(typed) == len(self.layers) and all(each == typed[min(typed)] for each in typed.values()):
            return f"{typed[min(typed)]!r}, which is good enough"
        return f"layers={typed}, which is good enough"

    def spelled(self) -> str:
        """The config as a user would write it: a preset's name, or a dictionary."""
        config = self.config
        most = typed_of(
            LayerFormats(config.key, config.value, config.transforms, config.sink_length, config.residual_length)
        )
        layers = {index: typed_of(formats) for index, formats in config.layers.items()}
        typed = {**({"preset": most} if isinstance(most, str) else most), **({"layers": layers} if layers else {})}
        if KVQuantConfig.from_dict(typed) != config:
            typed = config.to_dict()
        return repr(most if typed == {"preset": most} else typed)

    def table(self, title: str | None = None) -> Table:
        """The layers as a table for a terminal. Those with a problem are red."""
        harmful = {finding.layer_idx for finding in self.problems}
        rows = []
        for layer in self.layers:
            style = "red" if layer.layer_idx in harmful else None
            rows.append(((str(layer.layer_idx), layer.name, *cells(layer), layer.remarks()), style))
        return table_of(HEADINGS, rows, title=title, left=("formats", "remarks"))

    def report(self) -> str:
        """A readable table."""
        left_out = [f"{index:>5}  left out: {reason}" for index, reason in self.left_out.items()]
        return "\n".join([*plain(self.table()), *left_out, *self.notes()])

    def __repr__(self) -> str:
        """One line: the config, its cost, and whether it is refused."""
        cost = "not measured" if self.kld is None else f"{self.kld:.2e} nats per token"
        verdict = "safe" if self.is_safe else f"{len(self.problems)} problems"
        return f"<Preflight: {self.spelled()}, {cost}, {verdict}>"

    def _repr_html_(self) -> str:
        """The table of `report`, for a notebook."""
        left_out = [f"{index} left out: {reason}" for index, reason in self.left_out.items()]
        return html(f"Pre-flight: {self.spelled()}", self.table(), [*left_out, *self.notes()])

    def described_cost(self) -> str:
        """What all layers together cost, in a sentence."""
        assert self.cost is not None
        kld = self.cost.kld
        return (
            f"All layers together: {self.cost}, {kld.mean:.2e} ± {kld.error:.0e} nats per token, over "
            f"{self.num_tokens:,} tokens of {self.source}."
        )

    def notes(self) -> list[str]:
        """The notes below the table, one per line."""
        signals = [layer.signals for layer in self.layers]
        shapes = {(each.head_dim, each.num_q_per_kv) for each in signals if not each.is_latent}
        notes = [
            f"head_dim {'unknown' if head_dim is None else head_dim}, "
            f"{'an unknown number of' if ratio is None else ratio} query heads per key-value head."
            for head_dim, ratio in sorted(shapes, key=str)
        ]
        if self.bits is not None:
            allowed = "" if self.budget is None else f", of {self.budget:g} allowed"
            kept = "Latents and rope parts" if any(each.is_latent for each in signals) else "Keys and values"
            notes.append(f"{kept} take {self.bits:.4g} bits per number on average{allowed}.")
        if self.cost is not None:
            notes.append(self.described_cost())
        elif self.unmeasured:
            notes.append(f"Divergences were not measured: {self.unmeasured}")
        shape_findings = {x.detail for layer in self.layers for x in layer.findings if x.signal in SHAPES}
        notes += [f"{detail[0].upper()}{detail[1:]}." for detail in sorted(shape_findings)]
        unknown = {reason for layer in self.layers for reason in layer.signals.unknown.values()}
        return notes + [f"Unknown: {reason}" for reason in sorted(unknown)]


def remember(model: PreTrainedModel, result: Preflight) -> None:
    """Keep what a pre-flight has measured, for `measured`."""
    if result.cost is not None:
        known = notes_on(model).preflights
        known[:] = [(state, each) for state, each in known if _formats(each.config) != _formats(result.config)]
        known.append((_calibration_of(model), result))


def measured(model: PreTrainedModel, config: KVQuantConfig) -> Preflight | None:
    """The newest pre-flight of this process that measured a config on a model, unless the model was calibrated since.

    Where caches keep their codes makes no difference. Weights that were changed by others are not noticed.
    """
    state = _calibration_of(model)
    result: Preflight
    for other, result in notes_on(model).preflights:
        if _formats(result.config) == _formats(config) and all(map(operator.is_, other, state)):
            return result
    return None


def _formats(config: KVQuantConfig) -> KVQuantConfig:
    """What decides the quality of a config."""
    return dataclasses.replace(config, static=False, max_cache_len=None, capture=False, offloading=False)


def _calibration_of(model: PreTrainedModel) -> tuple[Any, ...]:
    state = state_of(model)
    return state.transforms, state.smoothing, state.value_rotation, state.folded


def cells(layer: LayerCheck) -> tuple[str, str, str]:
    """Key bias, channels and divergence of a layer, as tables show them; `?` if unknown, `-` if none."""
    bias, channels = layer.signals.bias_ratio(None), layer.signals.channel_ratio
    missing = "-" if layer.signals.is_latent else "?"
    return (
        missing if bias is None else f"{bias:.2f}",
        missing if channels is None else f"{channels:.1f}",
        "-" if layer.kld is None else f"{layer.kld:.1e} ± {layer.error or 0:.0e}",
    )


def name_of(formats: LayerFormats) -> str:
    """The preset of a layer's formats, with the transforms if they are not the preset's; else a description."""
    for name in PRESETS:
        of_preset = preset_formats(name)
        if formats == of_preset:
            return name
        if _but_transforms(formats) == _but_transforms(of_preset):
            return f"{name} ({'+'.join(formats.transforms) or 'no transforms'})"
    return formats.describe()


def _but_transforms(formats: LayerFormats) -> tuple[Any, ...]:
    return formats.key, formats.value, formats.sink_length, formats.residual_length


def typed_of(formats: LayerFormats) -> str | dict[str, Any]:
    """A layer's formats as a user would write them in a config: a preset's name, or a dictionary."""
    name = name_of(formats)
    return name if name in PRESETS else formats.sides_to_dict()
