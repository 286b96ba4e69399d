"""Which formats a model's cache bears: a check before the first token, which picks them or refuses them.

A preset that costs one model nothing can ruin another, without a word. So a model is looked at twice. Its weights show
what makes keys hard to quantise (`transforms/signals.py`). And some text is fed through real caches, a chunk at a time,
with one layer quantised and the others not: how far that moves the next-token distribution is what the format does to
the layer. What is measured decides; where nothing was measured, the signals of the weights do. Without a config the
cheapest preset is picked for every layer; a config that is given is taken as it is or refused, with the signal, its
limit and the remedy. Large evaluations on text of one's own are `evals/fidelity.py`'s business.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from ._errors import did_you_mean
from .cache import KVQuantCache
from .config import PRESETS, KVQuantConfig, LayerFormats
from .patching import _check_patchable, _text_config, patched
from .transforms.calibration import MIN_TOKENS, read_windows
from .transforms.centering import _evaluating
from .transforms.key_transform import KeyTransform
from .transforms.observation import forward
from .transforms.of_model import key_transforms
from .transforms.signals import SHAPES, Finding, KeySignals, read_signals, reason_of

logger = logging.getLogger(__name__)

WHERE = "for_model"

# What is picked from, the smallest first.
LADDER = ("int4", "int4-channel", "k8v4", "int8", "none")

# KL divergences in nats a token, all layers quantised; one layer may have a fifth of each. Measured on the reference
# model (7 layers, 1024 tokens of WikiText-2), all layers and the worst one. Good enough to be picked: int4 .031, .0060;
# with an injected key bias of norm 100 .038, .0092. Worse than a larger format, but no ruin: int4 with injected
# outliers (3 pairs a head, times 10) and no factors .096, .020. Ruined: int4 without transforms under these outliers
# .60, .16; under the bias 2.9, 1.05, without its centre but rotated .25, .050; under a bias of norm 20 .18, .038.
# A divergence of .11 costs 11 % of perplexity, .27 costs 28 %.
GOAL = 0.05
LIMIT = 0.15
LAYER_SHARE = 0.2

# The text: windows by tokens, of which the first one fills the cache and the others read codes, a chunk at a time. On
# the reference model the sum over layers, int4: .0286; two windows of 512 tokens .0289, one of 2048 .0279; other parts
# of the text .0296 to .0330; texts that the model sampled, five times, .0297 to .0426. Random tokens .0655: these will
# not do. Chunks of 32 or 255 change nothing. In bfloat16, where a code that changes makes later layers round otherwise,
# no layer is seen below some 4e-4.
NUM_WINDOWS = 4
WINDOW = 256
CHUNK = 64
# Keys with a scale for every channel are read as codes from the first full block on; so much longer, in blocks, a
# window has to be to show what that does.
BLOCK_MARGIN = 0.5


class PreflightError(ValueError):
    """A cache that would corrupt what the model writes, or a layer that cannot be judged.

    Attributes:
        layer_idx: The layer; `None` for all together.
        signal: What was found, such as `"KL divergence"` or `"key bias"`.
        value: Its value. `None` where nothing could be measured.
        limit: What it may be.
        remedy: What to do instead.
    """

    def __init__(self, message: str, finding: Finding, remedy: str) -> None:
        super().__init__(message)
        self.layer_idx = finding.layer_idx
        self.signal = finding.signal
        self.value = finding.value
        self.limit = finding.limit
        self.remedy = remedy


@dataclasses.dataclass(frozen=True)
class LayerCheck:
    """One layer of a pre-flight.

    Attributes:
        layer_idx: The layer.
        formats: In which it would be kept.
        signals: What its weights tell.
        kld: Mean KL divergence in nats a token with this layer alone quantised; `None` where it was not measured.
        tried: Names of the other formats that were measured, with their divergence.
        findings: Signals of the weights beyond their limits, for these formats.
        unmeasured: Why there is no divergence, where one was asked for.
    """

    layer_idx: int
    formats: LayerFormats
    signals: KeySignals
    kld: float | None
    tried: tuple[tuple[str, float], ...]
    findings: tuple[Finding, ...]
    unmeasured: str

    @property
    def name(self) -> str:
        """Of the formats: a preset's, where they are one."""
        return name_of(self.formats)

    def remarks(self) -> str:
        """What is worth saying of the layer, in a line."""
        remarks = [finding.detail for finding in self.findings if finding.signal not in SHAPES]
        remarks += [f"{name}: {kld:.1e}" for name, kld in self.tried]
        remarks += [f"{signal} unknown" for signal in self.signals.unknown]
        return "; ".join(remarks)


@dataclasses.dataclass(frozen=True)
class Preflight:
    """What `run_preflight` found out.

    Attributes:
        config: That was picked, or given.
        layers: Those whose cache would be quantised, in order.
        left_out: Those whose cache is not ours, and why.
        kld: Mean KL divergence in nats a token of the whole config; `None` where it was not measured.
        num_tokens: Over which divergences were measured.
        source: Of this text.
        unmeasured: Why nothing was measured; empty where it was.
        problems: Reasons to refuse the config, the worst first.
        remedies: Per layer with such a reason, formats that were found good enough.
    """

    config: KVQuantConfig
    layers: tuple[LayerCheck, ...]
    left_out: Mapping[int, str]
    kld: float | None
    num_tokens: int
    source: str
    unmeasured: str
    problems: tuple[Finding, ...]
    remedies: Mapping[int, LayerFormats]

    @property
    def is_safe(self) -> bool:
        """Whether the config was found to do no harm."""
        return not self.problems

    def approved(self, *, force: bool = False) -> KVQuantConfig:
        """The config.

        Args:
            force: Whether to hand it out whatever was found, with a warning in the log.

        Raises:
            PreflightError: It does harm, or a layer cannot be judged.
        """
        if not self.problems:
            return self.config
        error = self._error()
        if not force:
            raise error
        logger.warning("%s Handed out all the same, as `force` says.", error)
        return self.config

    def _error(self) -> PreflightError:
        worst = self.problems[0]
        layer = next((layer for layer in self.layers if layer.layer_idx == worst.layer_idx), None)
        of_what = "all layers together" if layer is None else f"layer {layer.layer_idx}"
        kept = "this config" if layer is None else layer.name
        if worst.value is None:
            expected = f"`model` must be judged in {of_what} before {kept} is used, got no verdict: {worst.detail}"
        elif worst.signal == KLD:
            expected = (
                f"`preset_or_config` must keep the KL divergence of {of_what} within {worst.limit:g} nats a token, "
                f"got {worst.value:.3g} with {kept}"
            )
            causes = [] if layer is None else [x.detail for x in layer.findings if x.signal not in SHAPES]
            if causes:
                expected += f" ({'; '.join(causes)})"
        else:
            expected = f"`preset_or_config` must fit the weights of {of_what}, got {kept} and {worst.detail}"
        remedy = ". Or take ".join(filter(None, (worst.remedy, self._found_good())))
        message = f"{WHERE}: {expected}. {remedy}. force=True hands it out all the same."
        return PreflightError(message, worst, remedy)

    def _found_good(self) -> str:
        """The remedies in words, such as `layers={0: 'int8'}`; empty where there are none."""
        names = {index: name_of(formats) for index, formats in sorted(self.remedies.items())}
        if not names:
            return ""
        if len(names) == len(self.layers) and len(set(names.values())) == 1:
            return f"'{names[min(names)]}', which was found good enough"
        layers = ", ".join(f"{index}: '{name}'" for index, name in names.items())
        return f"what was found good enough, layers={{{layers}}}"

    def spelled(self) -> str:
        """The config as one would type it: a preset's name, or a dictionary."""
        preset = name_of(LayerFormats(self.config.key, self.config.value, self.config.transforms))
        layers = {index: name_of(formats) for index, formats in self.config.layers.items()}
        short: dict[str, Any] = {"preset": preset, **({"layers": layers} if layers else {})}
        if not {preset, *layers.values()} <= set(PRESETS) or KVQuantConfig.from_dict(short) != self.config:
            return repr(self.config.to_dict())
        return repr(short if layers else preset)

    def report(self) -> str:
        """A table for people."""
        width = max([len(layer.name) for layer in self.layers] + [len("formats")])
        lines = [f"layer  {'formats':<{width}}  key bias  channels  KL, nats/token  remarks"]
        for layer in self.layers:
            bias, channels, kld = cells(layer)
            remarks = layer.remarks()
            line = f"{layer.layer_idx:>5}  {layer.name:<{width}}  {bias:>8}  {channels:>8}  {kld:>14}  {remarks}"
            lines.append(line.rstrip())
        lines += [f"{index:>5}  left out: {reason}" for index, reason in self.left_out.items()]
        return "\n".join([*lines, *self.notes()])

    def notes(self) -> list[str]:
        """What stands below the table."""
        shapes = {(layer.signals.head_dim, layer.signals.num_q_per_kv) for layer in self.layers}
        notes = [
            f"head_dim {'unknown' if head_dim is None else head_dim}, "
            f"{'an unknown number of' if ratio is None else ratio} query heads per key-value head."
            for head_dim, ratio in sorted(shapes, key=str)
        ]
        if self.kld is not None:
            notes.append(
                f"All layers together: {self.kld:.2e} nats a token, over {self.num_tokens:,} tokens of {self.source}."
            )
        elif self.unmeasured:
            notes.append(f"Divergences were not measured: {self.unmeasured}")
        shape_findings = {x.detail for layer in self.layers for x in layer.findings if x.signal in SHAPES}
        notes += [f"{detail[0].upper()}{detail[1:]}." for detail in sorted(shape_findings)]
        unknown = {reason for layer in self.layers for reason in layer.signals.unknown.values()}
        return notes + [f"Unknown: {reason}" for reason in sorted(unknown)]


KLD = "KL divergence"
UNKNOWN = "unknown"


def cells(layer: LayerCheck) -> tuple[str, str, str]:
    """Key bias, channels and divergence of a layer, as tables show them. `?` where unknown."""
    bias, channels = layer.signals.bias_ratio(None), layer.signals.channel_ratio
    return (
        "?" if bias is None else f"{bias:.2f}",
        "?" if channels is None else f"{channels:.1f}",
        "-" if layer.kld is None else f"{layer.kld:.1e}",
    )


def name_of(formats: LayerFormats) -> str:
    """The preset of a layer's formats, with its transforms where these are others; else a description."""
    for name, sides in PRESETS.items():
        if (formats.key, formats.value) == sides:
            if formats == LayerFormats(*sides):
                return name
            return f"{name} ({'+'.join(formats.transforms) or 'no transforms'})"
    return formats.describe()


def run_preflight(
    model: PreTrainedModel,
    preset_or_config: str | KVQuantConfig | Mapping[str, Any] | None = None,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    texts: Iterable[str] | None = None,
    presets: Sequence[str] = LADDER,
    max_kld: float = GOAL,
    measure: bool = True,
    progress: bool = True,
) -> Preflight:
    """Find out which formats a model's cache bears, or whether it bears the ones that are asked for.

    Divergences are measured on `texts`. Without any, on text that the model writes itself: sampled, always the same,
    from its first token on. That takes some 250 decode steps, and layers cost about what they cost on real text, or up
    to 1.4 times as much (reference model), while on random tokens they cost twice as much. Give texts where the model is
    slow, or is not made to write by itself.

    Args:
        model: A decoder-only model, patched or not, calibrated or not. It is only run, and left as it was.
        preset_or_config: What to check: a preset's name, a dictionary or a `KVQuantConfig`. `None` picks a preset for
            every layer.
        tokenizer: The model's, for `texts`.
        texts: Text like that which the model will read, 1,024 tokens or more.
        presets: What to pick from, the preferred one first. Where a config is given, remedies are looked for here.
        max_kld: Nats a token that all layers together may cost when formats are picked; a layer may cost a fifth.
            Refused are, in any case, three times `GOAL`.
        measure: Whether to run the model on text. Otherwise the weights alone decide, by coarse limits.
        progress: Whether to say on stderr what is being measured, where that is a terminal.

    Returns:
        The config and the findings; `approved()` refuses what does harm.

    Raises:
        NotImplementedError: The model cannot be patched.
        TypeError, ValueError: An argument has no meaning or does not fit the model.
    """
    config = None if preset_or_config is None else KVQuantConfig.resolve(preset_or_config)
    rungs = _checked(presets, max_kld, tokenizer, texts)
    _check_patchable(model, KVQuantConfig.from_preset("none") if config is None else config)
    with _status(progress) as say, torch.no_grad(), _evaluating(model), patched(model, "none"):
        say("weights")
        signals, left_out = read_signals(model, where=WHERE)
        meter: _Meter | None = None
        unmeasured = source = ""
        if measure and signals:
            try:
                ids, source = _text(model, tokenizer, texts, say)
                meter = _Meter(model, ids)
            except _CannotMeasure as error:
                unmeasured = str(error)
        check = _Check(model, signals, meter, unmeasured, say)
        chosen = _pick(check, rungs, max_kld) if config is None else config
        layers = tuple(check.layer(index, chosen.formats(index)) for index in signals)
        kld = check.whole(chosen)
        problems = _problems(layers, kld, is_given=config is not None)
        remedies = {} if config is None else _remedies(check, rungs, chosen, problems, max_kld)
    return Preflight(
        config=chosen,
        layers=layers,
        left_out=left_out,
        kld=kld,
        num_tokens=0 if meter is None else meter.num_scored,
        source=source,
        unmeasured=unmeasured if measure else "measure=False leaves that out.",
        problems=tuple(problems),
        remedies=remedies,
    )


Rungs = Sequence[tuple[str, KVQuantConfig]]


def _checked(
    presets: Sequence[str],
    max_kld: float,
    tokenizer: PreTrainedTokenizerBase | None,
    texts: Iterable[str] | None,
) -> Rungs:
    """The presets to pick from, as configs, after a look at the other arguments."""
    if isinstance(presets, str) or not presets:
        raise ValueError(f"{WHERE}: `presets` must be a list of names, got {presets!r}. The default is {list(LADDER)}.")
    for name in presets:
        if name not in PRESETS:
            raise ValueError(
                f"{WHERE}: `presets` must be names out of {list(PRESETS)}, got {name!r}.{did_you_mean(name, PRESETS)}"
            )
    if not max_kld > 0:
        raise ValueError(f"{WHERE}: `max_kld` must be positive, got {max_kld}. The default is {GOAL} nats a token.")
    if (tokenizer is None) != (texts is None):
        given, missing = ("texts", "tokenizer") if tokenizer is None else ("tokenizer", "texts")
        raise ValueError(
            f"{WHERE}: `{missing}` must come with `{given}`, got None. Give both, or neither: the model then writes "
            "the text itself."
        )
    return [(name, KVQuantConfig.from_preset(name)) for name in presets]


# --- the text ---------------------------------------------------------------------------------------------------------


class _CannotMeasure(Exception):
    """Why a model cannot be measured. Never leaves this module."""


def _text(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    texts: Iterable[str] | None,
    say: Callable[[str], Any],
) -> tuple[Tensor, str]:
    """Token ids to measure on, `[windows, tokens]` int64 on the CPU, and what they are."""
    if tokenizer is None or texts is None:
        say("writing a text")
        return _own_text(model), "text that the model wrote"
    num_tokens = max(NUM_WINDOWS * WINDOW, MIN_TOKENS)
    batches = read_windows(model, tokenizer, texts, num_tokens=num_tokens, window=WINDOW, batch_size=1, where=WHERE)
    windows = [ids[0] for ids, _ in batches]
    longest = max(map(len, windows))
    kept = [window for window in windows if 2 * len(window) >= longest]
    shortest = min(map(len, kept))
    return torch.stack([window[:shortest] for window in kept]), "the texts"


def _own_text(model: PreTrainedModel) -> Tensor:
    """Text that the model samples from what begins a text, never ending it."""
    text_config = _text_config(model)
    ends = _ids(text_config, "eos_token_id") + _ids(getattr(model, "generation_config", None), "eos_token_id")
    first = (_ids(text_config, "bos_token_id") + ends + [0])[0] % text_config.vocab_size
    never = ends + _ids(text_config, "pad_token_id")
    generator = torch.Generator().manual_seed(0)
    cache = DynamicCache(config=text_config)
    ids = [torch.full((NUM_WINDOWS, 1), first)]
    for _ in range(_window(model) - 1):
        logits = _logits(model, ids[-1], cache)[:, -1].float().cpu()
        logits[:, [token for token in never if token < logits.shape[1]]] = -math.inf
        # The largest of logits plus Gumbel noise is a draw from their softmax.
        noise = torch.empty_like(logits).exponential_(generator=generator).log_()
        ids.append((logits - noise).argmax(1, keepdim=True))
    return torch.cat(ids, 1)


def _ids(config: Any, name: str) -> list[int]:
    """Token ids from what a config may hold under a name: nothing, one or several."""
    given = getattr(config, name, None)
    return [given] if isinstance(given, int) else [int(each) for each in given or ()]


def _window(model: PreTrainedModel) -> int:
    context = getattr(_text_config(model), "max_position_embeddings", None)
    return min(context, WINDOW) if isinstance(context, int) and context > 1 else WINDOW


def _logits(model: PreTrainedModel, input_ids: Tensor, cache: Cache) -> Tensor:
    """Logits of a chunk, `[windows, tokens, vocab_size]`.

    Raises:
        _CannotMeasure: The model cannot be run on tokens, or its logits are no numbers.
    """
    try:
        logits = forward(model, input_ids, cache=cache)
    except Exception as error:
        # Weights on no device, inputs other than tokens, no memory left: a model that cannot be judged, whatever the
        # reason, and that is what the caller says.
        raise _CannotMeasure(f"the model could not be run ({reason_of(error)})") from error
    if logits.is_meta:
        raise _CannotMeasure("its weights are on no device (meta). Load them first.")
    return logits


# --- measuring --------------------------------------------------------------------------------------------------------


class _Meter:
    """Feeds one text to caches of a model, and compares with a cache of ours that quantises nothing.

    Against that one, and not one of transformers: layers before the quantised one are the same to the bit then, and
    what is measured in 16 bits is the format and not the noise of sums in another order.

    Args:
        model: Patched.
        ids: `[windows, tokens]` int64.
    """

    def __init__(self, model: PreTrainedModel, ids: Tensor) -> None:
        self.model = model
        self.chunks = [
            ids[:, start:stop] for start, stop in itertools.pairwise([0, *range(1, ids.shape[1], CHUNK), ids.shape[1]])
        ]
        self.num_scored = ids[:, 1:].numel()
        self.longest = ids.shape[1]
        self.reference = list(self._run(KVQuantConfig.from_preset("none")))
        if any(bool(logits.float().log_softmax(-1).isnan().any()) for logits in self.reference):
            raise _CannotMeasure("its logits are not finite. Check the checkpoint, or load it in bfloat16 or float32.")

    def kld(self, config: KVQuantConfig) -> float:
        """Mean KL divergence in nats a token; infinite where the logits are no numbers.

        Raises:
            _CannotMeasure: The model cannot be run so.
        """
        total = 0.0
        for reference, logits in zip(self.reference, self._run(config), strict=True):
            # Padding of the vocabulary may have logits of minus infinity, which take no part.
            exact, other = (x.float().log_softmax(-1).clamp(min=-1e4) for x in (reference, logits))
            total += float(F.kl_div(other, exact, log_target=True, reduction="sum"))
        return total / self.num_scored if math.isfinite(total) else math.inf

    def reads_codes(self, formats: LayerFormats) -> bool:
        """Whether the text is long enough for keys to be read as codes, or as long as the model's context."""
        block_size = formats.key.block_size
        if block_size is None or self.longest >= (1 + BLOCK_MARGIN) * block_size:
            return True
        return _window(self.model) < (1 + BLOCK_MARGIN) * block_size

    def _run(self, config: KVQuantConfig) -> Iterator[Tensor]:
        """Logits of all chunks but the first, which fills the cache."""
        cache = KVQuantCache(self.model.config, config, key_transforms=key_transforms(self.model, config))
        for number, chunk in enumerate(self.chunks):
            logits = _logits(self.model, chunk, cache)
            if number > 0:
                yield logits


class _Check:
    """What is known of each layer in each format; nothing is measured twice.

    Args:
        model: Patched.
        signals: Of its layers.
        meter: What measures; `None` where nothing is measured.
        unmeasured: Why not, if it was asked for.
        say: Told what is being measured.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        signals: Mapping[int, KeySignals],
        meter: _Meter | None,
        unmeasured: str,
        say: Callable[[str], Any],
    ) -> None:
        self.model, self.signals, self.meter, self.say = model, signals, meter, say
        self.unmeasured = unmeasured
        self.known: dict[int, dict[LayerFormats, float | str]] = {index: {} for index in signals}

    def kld(self, index: int, formats: LayerFormats) -> float | str:
        """The divergence with this layer alone quantised, or why there is none."""
        known = self.known[index]
        if formats not in known:
            self.say(f"layer {index}, {name_of(formats)}")
            known[formats] = self._measured([formats], _alone(index, formats))
        return known[formats]

    def whole(self, config: KVQuantConfig) -> float | None:
        """The divergence of a config; `None` where there is none."""
        self.say("all layers")
        growing = dataclasses.replace(config, static=False, max_cache_len=None)
        kld = self._measured([config.formats(index) for index in self.signals], growing)
        return kld if isinstance(kld, float) else None

    def _measured(self, quantized: Sequence[LayerFormats], config: KVQuantConfig) -> float | str:
        if self.meter is None:
            return self.unmeasured
        if not any(formats.key.is_quantized or formats.value.is_quantized for formats in quantized):
            return 0.0
        if not all(map(self.meter.reads_codes, quantized)):
            return f"the texts are in pieces of {self.meter.longest} tokens, too few to fill a block of keys"
        try:
            return self.meter.kld(config)
        except _CannotMeasure as error:
            return str(error)

    def transform(self, index: int, formats: LayerFormats) -> KeyTransform | None:
        """What the layer's keys would go through."""
        return key_transforms(self.model, _alone(index, formats)).get(index)

    def findings(self, index: int, formats: LayerFormats) -> list[Finding]:
        """What its weights say against the formats."""
        return self.signals[index].findings(formats, self.transform(index, formats))

    def is_good(self, index: int, formats: LayerFormats, goal: float) -> bool:
        """Whether a layer may be kept so: by its divergence, or by its weights where nothing is measured."""
        if self.meter is None:
            return not self.findings(index, formats)
        kld = self.kld(index, formats)
        return isinstance(kld, float) and kld <= goal

    def layer(self, index: int, formats: LayerFormats) -> LayerCheck:
        """The result of a layer."""
        kld = self.kld(index, formats)
        tried = [(name_of(other), value) for other, value in self.known[index].items() if other != formats]
        return LayerCheck(
            layer_idx=index,
            formats=formats,
            signals=self.signals[index],
            kld=kld if isinstance(kld, float) else None,
            tried=tuple((name, value) for name, value in tried if isinstance(value, float)),
            findings=tuple(self.findings(index, formats)),
            unmeasured=kld if isinstance(kld, str) else "",
        )


def _alone(index: int, formats: LayerFormats) -> KVQuantConfig:
    """A config that quantises one layer."""
    return KVQuantConfig.from_preset("none", layers={index: formats})


# --- deciding ---------------------------------------------------------------------------------------------------------


def _pick(check: _Check, rungs: Rungs, max_kld: float) -> KVQuantConfig:
    """The first of the presets that is good enough, layer by layer and then together; the last one where none is."""
    usable = {index: _usable(rungs, signals) for index, signals in check.signals.items()}
    goal = LAYER_SHARE * max_kld
    places = {
        index: next((i for i, formats in enumerate(choices) if check.is_good(index, formats, goal)), len(choices) - 1)
        for index, choices in usable.items()
    }
    while True:
        config = _config_of({index: usable[index][place] for index, place in places.items()}, rungs)
        kld = check.whole(config)
        movable = [index for index, place in places.items() if place + 1 < len(usable[index])]
        if kld is None or kld <= max_kld or not movable:
            return config
        # What layers cost adds up, so those that cost most move on.
        costs = {index: check.kld(index, usable[index][places[index]]) for index in movable}
        movable.sort(key=lambda index: -cost if isinstance(cost := costs[index], float) else 0.0)
        for index in movable[: max(1, len(places) // 4)]:
            places[index] += 1


def _config_of(layers: Mapping[int, LayerFormats], rungs: Rungs) -> KVQuantConfig:
    """A config with these layers, the formats of most of them standing for all."""
    if not layers:
        return rungs[0][1]
    [(most, _)] = Counter(layers.values()).most_common(1)
    others = {index: formats for index, formats in layers.items() if formats != most}
    return KVQuantConfig(key=most.key, value=most.value, transforms=most.transforms, layers=others)


def _usable(rungs: Rungs, signals: KeySignals) -> list[LayerFormats]:
    """The formats of the presets that a layer's head_dim divides into.

    Raises:
        ValueError: There are none.
    """
    found, reason = [], ""
    for _, config in rungs:
        formats = config.formats(signals.layer_idx)
        try:
            if signals.head_dim is not None:
                formats.key.num_groups(signals.head_dim)
                formats.value.num_groups(signals.head_dim)
            found.append(formats)
        except ValueError as error:
            reason = str(error)
    if not found:
        raise ValueError(
            f"{WHERE}: `presets` must hold one that fits layer {signals.layer_idx}, got "
            f"{[name for name, _ in rungs]}: {reason} Add 'none'."
        )
    return found


def _problems(layers: Sequence[LayerCheck], kld: float | None, *, is_given: bool) -> list[Finding]:
    """Reasons to refuse, the worst first: divergences, signals of what was not measured, layers that stay unknown.

    Args:
        layers: Of the check.
        kld: Of all of them together.
        is_given: Whether the config was, and not picked.
    """
    default = "Let presets be picked: KVQuantConfig.for_model(model)" if is_given else "End `presets` with 'none'"
    found: list[Finding] = []
    for layer in layers:
        index, limit = layer.layer_idx, LAYER_SHARE * LIMIT
        if not layer.formats.key.is_quantized and not layer.formats.value.is_quantized:
            continue
        if layer.kld is not None:
            if layer.kld > limit:
                remedies = [finding.remedy for finding in layer.findings if finding.signal not in SHAPES and is_given]
                remedy = next(iter(remedies), default)
                found.append(Finding(index, KLD, layer.kld, limit, f"{layer.kld:.3g}", remedy, True))
            continue
        found += [finding for finding in layer.findings if finding.is_harmful]
        unknown = [f"{signal} unknown: {reason}" for signal, reason in layer.signals.unknown.items()]
        reasons = [layer.unmeasured] if layer.unmeasured else unknown
        if reasons:
            remedy = "Load weights, or give `tokenizer` and `texts`, so that it can be measured"
            found.append(Finding(index, UNKNOWN, None, None, "; ".join(reasons).rstrip("."), remedy, True))
    if kld is not None and kld > LIMIT:
        found.append(Finding(None, KLD, kld, LIMIT, f"{kld:.3g}", default, True))
    return sorted(found, key=lambda finding: (finding.layer_idx is None, finding.value is None, -(finding.value or 0)))


def _remedies(
    check: _Check, rungs: Rungs, config: KVQuantConfig, problems: Iterable[Finding], max_kld: float
) -> dict[int, LayerFormats]:
    """For the layers with problems, the first formats that are good enough: with the usual transforms, or a preset."""
    remedies = {}
    named = {finding.layer_idx for finding in problems}
    goal = LAYER_SHARE * max_kld
    for index in check.signals:
        asked = config.formats(index)
        # Where all layers together are the problem, every one that costs too much is part of it.
        if index not in named and not (None in named and not check.is_good(index, asked, goal)):
            continue
        choices = [LayerFormats(asked.key, asked.value), *_usable(rungs, check.signals[index])]
        for formats in choices:
            if formats != asked and check.is_good(index, formats, goal):
                remedies[index] = formats
                break
    return remedies


@contextlib.contextmanager
def _status(is_shown: bool) -> Iterator[Callable[[str], Any]]:
    """A line on stderr about what is being done, gone when it is done."""
    console = Console(stderr=True)
    if not (is_shown and console.is_terminal):
        yield lambda text: None
        return
    with console.status("checking") as status:
        yield lambda text: status.update(f"checking: {text}")
