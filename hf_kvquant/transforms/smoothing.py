"""SmoothAttention: outlier channels of keys made small, and the queries that meet them larger, in the model's weights.

Keys are divided and queries multiplied by a factor per key-value head and channel, so that attention stays what it was
while keys become easier to quantise. Factors are `max|key|^alpha` over calibration text, or those that balance the
energies of keys and queries; alpha is searched per layer on the error of the attention output under the real storage
format, 0 (leave the layer alone) included. They are rounded to powers of two, which leaves every bit of the logits as
it was; a forward before and after proves it, or everything is rolled back. Where factors go is found in `layout.py`,
how they are folded is `folding.py`'s, what they cost is measured in `calibration.py`, kept in `smoothing_file.py`.

Source: SmoothAttention, QServe (arXiv 2405.04532), section 4.2.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..config import KVQuantConfig
from ..formats import KVFormat
from . import KeyTransform
from .calibration import KeyStatistics, TransformFactory, Windows, collect, output_errors, read_windows
from .folding import exact_exponents, gains_plus_one, hash_of, parameters_of, scale_keys
from .layout import LayerLayout, find_layouts
from .observation import Observation, forward, observed
from .smoothing_file import LayerSmoothing, SmoothingResult

Candidate = float | Literal["energy"]
CANDIDATES: tuple[Candidate, ...] = (0.0, 0.25, 0.5, 0.75, 1.0, "energy")
CONFIG_KEY = "hf_kvquant_smoothing"  # in the model's config, so that a saved checkpoint says that it is smoothed

_STATE = "_hf_kvquant_smoothing"
# Factors beyond 2^±8 have no use: keys whose channels differ more than that would not survive bfloat16 either.
MAX_EXPONENT = 8
# A layer is smoothed only where its error falls by this share: less is noise of the calibration text.
MIN_GAIN = 0.05
# The automatic check runs the model on this much of the calibration text.
CHECK_WINDOWS, CHECK_TOKENS = 4, 64


@dataclasses.dataclass(frozen=True)
class _State:
    """What smoothing left on a model."""

    result: SmoothingResult
    layouts: Mapping[int, LayerLayout]


def smooth_attention(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: Iterable[str],
    preset_or_config: str | KVQuantConfig | Mapping[str, Any] = "int4",
    *,
    candidates: Sequence[Candidate] = CANDIDATES,
    num_tokens: int = 16384,
    window: int = 2048,
    batch_size: int = 1,
    transform: TransformFactory | None = None,
    center: Callable[[KeyStatistics], Tensor | None] | None = None,
    progress: bool = True,
) -> SmoothingResult:
    """Fold smoothing factors into a model's weights. Its logits stay the same to the bit.

    Args:
        model: A decoder-only model with plain weights in memory. Written in place; marked as smoothed, in its config
            too, so that `save_pretrained` writes a plain checkpoint that is not smoothed twice.
        tokenizer: The model's.
        texts: Text like that which the model will read; 16,000 tokens are plenty.
        preset_or_config: How the cache will be kept: a preset's name, a dictionary or a `KVQuantConfig`.
        candidates: What to try in each layer: exponents alpha of `max|key|^alpha`, and `"energy"`. 0 is always tried.
        num_tokens: Tokens of the texts to use at most, spread over all of them.
        window: Tokens of a forward, fewer where the model's context is shorter. Not less than what the model will read,
            if that is known: keys of slow RoPE pairs drift with the position, so short windows make them look constant.
        batch_size: Windows of a forward.
        transform: Makes the transform that keys will go through behind the smoothing, from a layer's statistics and a
            factor that they are divided by; `None` for nothing. The search then sees keys as they will be stored.
        center: The constant (`[num_kv_heads, head_dim]`) that this transform will subtract, before smoothing, from a
            layer's statistics; factors follow what is left of keys.
        progress: Whether to show a progress bar on stderr, where that is a terminal.

    Returns:
        Factors, choices and errors of every layer. `unsmooth(model)` undoes all of it.

    Raises:
        TypeError, ValueError: An argument has no meaning, the model is smoothed already, or the texts do not suffice.
        NotImplementedError: The model's keys cannot be scaled through its weights; the message says why.
        RuntimeError: The logits would change. In every case the model is as it was.

    Example:
        >>> result = hf_kvquant.smooth_attention(model, tokenizer, texts)
        >>> print(result.report())
        >>> model.save_pretrained("smoothed")
        >>> result.save("smoothed/kvquant_smoothing.safetensors")
    """
    where = "smooth_attention"
    config = KVQuantConfig.resolve(preset_or_config)
    choices = _checked_candidates(candidates)
    if isinstance(model, PreTrainedModel):
        _refuse_smoothed(model, where)
    layouts, left_out = find_layouts(model, where=where)
    for index in list(layouts):
        if not config.formats(index).key.is_quantized:
            del layouts[index]
            left_out[index] = "its keys are not quantised"
    if not layouts:
        reasons = "; ".join(f"layer {index}: {reason}" for index, reason in list(left_out.items())[:3])
        raise NotImplementedError(
            f"{where}: `model` must have a layer whose keys can be scaled, got {type(model).__name__} with none "
            f"({reasons}). Leave it as it is."
        )
    windows = read_windows(
        model, tokenizer, texts, num_tokens=num_tokens, window=window, batch_size=batch_size, where=where
    )
    formats = {index: config.formats(index).key for index in layouts}
    num_tokens_used = sum(int(mask.sum()) for _, mask in windows)
    with _progress(progress, 2 * num_tokens_used) as advance:
        statistics = collect(model, windows, layouts, advance)
        bad = [index for index, seen in statistics.items() if not seen.mean_square.isfinite().all()]
        if bad:
            raise ValueError(
                f"{where}: `model` must have finite keys on the texts, got infinities or NaN in layer {bad[0]}. "
                "Check the checkpoint, or load it in bfloat16 or float32."
            )
        exponents: dict[int, list[Tensor]] = {}
        for index, layout in layouts.items():
            middle = None if center is None else center(statistics[index])
            exponents[index] = [
                exact_exponents(model, layout, _exponents(statistics[index], layout, choice, middle))
                for choice in choices
            ]
        errors = _errors(model, windows, formats, exponents, statistics, transform, advance)
    picked = {index: _pick(errors[index]) for index in layouts}
    folded = {index: exponents[index][number] for index, number in picked.items()}
    settled = _settle(model, layouts, folded, _check_ids(windows), where)
    after = {index: errors[index][number] for index, number in picked.items()}
    changed = [index for index in layouts if not torch.equal(settled[index], folded[index])]
    if changed:
        again = _errors(
            model,
            windows,
            {index: formats[index] for index in changed},
            {index: [torch.zeros_like(settled[index]), settled[index]] for index in changed},
            statistics,
            transform,
        )
        for index in changed:
            if _pick(again[index]) == 0:
                settled[index] = torch.zeros_like(settled[index])
            after[index] = again[index][_pick(again[index])]
    if model.dtype == torch.float16 and not any(map(Tensor.any, settled.values())) and any(picked.values()):
        raise NotImplementedError(
            f"{where}: `model` must have room for other factors in its dtype, got float16, in which every factor worth "
            "folding would round some weight, key or query. Load it in float32."
        )
    result = SmoothingResult(
        layers=tuple(
            LayerSmoothing(
                layer_idx=index,
                name=layout.name,
                choice=str(choices[picked[index]]) if settled[index].any() else "0.0",
                factor=torch.exp2(settled[index].float()),
                errors={str(choice): error for choice, error in zip(choices, errors[index], strict=True)},
                error_before=errors[index][0],
                error_after=after[index],
            )
            for index, layout in layouts.items()
        ),
        left_out=left_out,
        key_formats={index: formats[index].describe() for index in layouts},
        num_tokens=num_tokens_used,
        parameters=tuple(parameters_of(layouts.values(), model)),
        original_hash="",
        folded_hash="",
        originals=gains_plus_one(model, layouts.values()),
    )
    return _fold(model, layouts, result, _check_ids(windows), where)


def unsmooth(model: PreTrainedModel) -> PreTrainedModel:
    """Undo `smooth_attention`, bit for bit.

    Args:
        model: Smoothed in this process, or loaded from a smoothed checkpoint and given to `load_smoothing`.

    Returns:
        The same model.

    Raises:
        ValueError: The model is not smoothed, its factors are not known, or its weights have changed since.
    """
    state = state_of(model)
    if state is None:
        if is_smoothed(model):
            raise ValueError(
                "unsmooth: `model` must come with its factors, got a checkpoint that was smoothed earlier. Give their "
                "file to hf_kvquant.load_smoothing first."
            )
        raise ValueError(
            f"unsmooth: `model` must be smoothed, got a {type(model).__name__} that is not. Call smooth_attention "
            "first."
        )
    if hash_of(model, state.result.parameters) != state.result.folded_hash:
        raise ValueError(
            "unsmooth: `model` must have the weights that smoothing left, got others: they were trained, cast or "
            "replaced since. Load the original checkpoint again."
        )
    _scale_back(model, state.layouts, state.result)
    assert hash_of(model, state.result.parameters) == state.result.original_hash
    delattr(model, _STATE)
    delattr(model.config, CONFIG_KEY)
    return model


def load_smoothing(model: PreTrainedModel, path: str | os.PathLike[str]) -> SmoothingResult:
    """Give a model factors that were saved: fold them, or, where the checkpoint is folded already, note them.

    Args:
        model: The checkpoint that was smoothed, before or after.
        path: What `SmoothingResult.save` wrote.

    Returns:
        What the file holds.

    Raises:
        ValueError: The file is no such file, is damaged, or belongs to other weights. The model is as it was.
        NotImplementedError: As for `smooth_attention`.
    """
    where = "load_smoothing"
    result = SmoothingResult.load(path)
    if isinstance(model, PreTrainedModel) and state_of(model) is not None:
        raise ValueError(f"{where}: `model` must not have factors yet, got one that has. Call unsmooth first.")
    layouts, _ = find_layouts(model, where=where)
    layouts = {layer.layer_idx: layouts[layer.layer_idx] for layer in result.layers if layer.layer_idx in layouts}
    foreign = f"{where}: `path` must hold factors of this model, got {os.fspath(path)}, whose "
    remedy = ". Use the file that was written with this checkpoint."
    for layer in result.layers:
        layout = layouts.get(layer.layer_idx)
        if layout is None or layout.name != layer.name:
            raise ValueError(f"{foreign}layer {layer.layer_idx} ({layer.name}) the model does not have{remedy}")
        if layout.key.index.shape != layer.factor.shape:
            raise ValueError(
                f"{foreign}layer {layer.layer_idx} has {list(layer.factor.shape)} factors instead of "
                f"{list(layout.key.index.shape)}{remedy}"
            )
        if not bool((layer.factor.flatten() == layer.factor.flatten()[layout.ties.flatten()]).all()):
            raise ValueError(f"{foreign}layer {layer.layer_idx} has unequal factors on channels that mix{remedy}")
    if tuple(parameters_of(layouts.values(), model)) != result.parameters:
        raise ValueError(f"{foreign}factors are for other weights{remedy}")
    found = hash_of(model, result.parameters)
    if found == result.original_hash:
        _refuse_smoothed(model, where)
        for layer in result.layers:
            scale_keys(model, layouts[layer.layer_idx], layer.factor)
        if hash_of(model, result.parameters) != result.folded_hash:
            _scale_back(model, layouts, result)
            raise ValueError(f"{foreign}factors give other weights than they did when they were saved{remedy}")
    elif found != result.folded_hash:
        raise ValueError(f"{foreign}hashes, before and after folding, are not that of the model's weights{remedy}")
    _mark(model, layouts, result)
    return result


def is_smoothed(model: PreTrainedModel) -> bool:
    """Whether the weights have factors folded in, as far as the model or its config knows."""
    return state_of(model) is not None or getattr(model.config, CONFIG_KEY, None) is not None


def state_of(model: PreTrainedModel) -> _State | None:
    """What smoothing left on a model: the result and the layouts. `None` where it is not smoothed, or not known how."""
    state: _State | None = model.__dict__.get(_STATE)
    return state


# --- choosing factors -------------------------------------------------------------------------------------------------


def _checked_candidates(candidates: Sequence[Candidate]) -> list[Candidate]:
    for choice in candidates:
        is_alpha = isinstance(choice, int | float) and not isinstance(choice, bool) and 0 <= choice <= 2
        if choice != "energy" and not is_alpha:
            raise ValueError(
                f"smooth_attention: `candidates` must be exponents from 0 to 2 or 'energy', got {choice!r}. "
                f"Common ones are {list(CANDIDATES)}."
            )
    return list(dict.fromkeys([0.0, *(choice if choice == "energy" else float(choice) for choice in candidates)]))


def _exponents(statistics: KeyStatistics, layout: LayerLayout, choice: Candidate, center: Tensor | None) -> Tensor:
    """Logarithms to base 2 of one choice's factors: `[num_kv_heads, head_dim]` int64, equal where channels are tied."""
    ties = layout.ties.flatten()

    def over_ties(values: Tensor, how: Literal["amax", "sum"]) -> Tensor:
        start = torch.zeros(ties.numel(), dtype=torch.float64)
        return start.scatter_reduce(0, ties, values.flatten().double(), how)[ties].view_as(values)

    if choice == "energy":
        # The factor that makes key and query equally strong minimises the product of the two.
        ratio = over_ties(statistics.energy(center), "sum") / over_ties(statistics.query_mean_square, "sum")
        logs = ratio.log2() / 4
    else:
        logs = float(choice) * over_ties(statistics.largest(center), "amax").log2()
    # A channel that is never used, in keys or queries, keeps its size.
    is_dead = ~logs.isfinite()
    logs = logs.masked_fill(is_dead, 0.0)
    # A factor common to a head changes nothing. Heads that share channels with others share it with them.
    cluster = (layout.ties // layout.ties.shape[1]).amin(1)
    for number in cluster.unique():
        inside = (cluster == number)[:, None] & ~is_dead
        logs[inside] -= logs[inside].mean()
    return logs.masked_fill(is_dead, 0.0).round().clamp(-MAX_EXPONENT, MAX_EXPONENT).long()


def _errors(
    model: PreTrainedModel,
    windows: Windows,
    formats: Mapping[int, KVFormat],
    exponents: Mapping[int, Sequence[Tensor]],
    statistics: Mapping[int, KeyStatistics],
    transform: TransformFactory | None,
    advance: Callable[[int], Any] = lambda tokens: None,
) -> dict[int, list[float]]:
    """The error of each layer under each choice of exponents; equal choices are measured once."""
    factors: dict[int, list[Tensor]] = {}
    numbers: dict[int, list[int]] = {}
    for index, choices in exponents.items():
        distinct: list[Tensor] = []
        numbers[index] = []
        for choice in choices:
            same = [number for number, other in enumerate(distinct) if torch.equal(choice, other)]
            numbers[index].append(same[0] if same else len(distinct))
            if not same:
                distinct.append(choice)
        factors[index] = [torch.exp2(choice.float()) for choice in distinct]
    transforms: dict[int, list[KeyTransform | None]] = {
        index: [None if transform is None else transform(statistics[index], factor) for factor in choices]
        for index, choices in factors.items()
    }
    measured = output_errors(model, windows, formats, factors, transforms, advance)
    return {index: [measured[index][number] for number in order] for index, order in numbers.items()}


def _pick(errors: Sequence[float]) -> int:
    """The number of the choice with the smallest error; the first one, which changes nothing, unless it pays."""
    best = min(range(len(errors)), key=errors.__getitem__)
    return best if errors[best] <= (1 - MIN_GAIN) * errors[0] else 0


# --- folding, and the proof -------------------------------------------------------------------------------------------


def _check_ids(windows: Windows) -> Tensor:
    """Text for the check: the ends of a few windows, `[windows, tokens]` int64."""
    rows = [(ids[row], mask[row]) for ids, mask in windows for row in range(len(ids))][:CHECK_WINDOWS]
    tokens = min(CHECK_TOKENS, *(int(mask.sum()) for _, mask in rows))
    return torch.stack([ids[-tokens:] for ids, _ in rows])


def _settle(
    model: PreTrainedModel,
    layouts: Mapping[int, LayerLayout],
    exponents: Mapping[int, Tensor],
    input_ids: Tensor,
    where: str,
) -> dict[int, Tensor]:
    """Exponents under which no layer's attention changes a bit. The model is scaled meanwhile, and scaled back.

    float16 has few exponents: a key or query that becomes subnormal loses bits, on the way through RoPE even more. So
    there, exponents of a layer that changes are cut until it does not. In other dtypes a change is an error.

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
        return before  # so that later layers are judged by themselves

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
                "were. This model makes keys in a way that is not understood: leave it as it is."
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
    """The model with factors folded in, for the length of a block."""
    factors = {index: torch.exp2(exponents[index].float()) for index in layouts}
    try:
        for index, layout in layouts.items():
            scale_keys(model, layout, factors[index])
        yield
    finally:
        for index, layout in layouts.items():
            scale_keys(model, layout, 1 / factors[index])
        _put_back(model, originals)


def _fold(
    model: PreTrainedModel,
    layouts: Mapping[int, LayerLayout],
    result: SmoothingResult,
    input_ids: Tensor,
    where: str,
) -> SmoothingResult:
    """Fold a result's factors, and roll back unless all logits stay the same to the bit.

    Raises:
        RuntimeError: They do not.
    """
    original_hash = hash_of(model, result.parameters)
    before = _logits(model, input_ids)
    for layer in result.layers:
        scale_keys(model, layouts[layer.layer_idx], layer.factor)
    after = _logits(model, input_ids)
    if not torch.equal(before, after):
        _scale_back(model, layouts, result)
        difference = float((after.float() - before.float()).abs().max())
        raise RuntimeError(
            f"{where}: factors must leave the logits as they are, got a difference of {difference:.1e}. The weights "
            "are as they were. This model makes keys in a way that is not understood: leave it as it is."
        )
    result = dataclasses.replace(result, original_hash=original_hash, folded_hash=hash_of(model, result.parameters))
    _mark(model, layouts, result)
    return result


def _logits(model: PreTrainedModel, input_ids: Tensor) -> Tensor:
    in_training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.no_grad():
            return forward(model, input_ids)
    finally:
        for module in in_training:
            module.training = True


def _scale_back(model: PreTrainedModel, layouts: Mapping[int, LayerLayout], result: SmoothingResult) -> None:
    for layer in result.layers:
        scale_keys(model, layouts[layer.layer_idx], 1 / layer.factor)
    _put_back(model, result.originals)


def _put_back(model: PreTrainedModel, originals: Mapping[str, Tensor]) -> None:
    with torch.no_grad():
        for name, original in originals.items():
            model.get_parameter(name).copy_(original)


def _mark(model: PreTrainedModel, layouts: Mapping[int, LayerLayout], result: SmoothingResult) -> None:
    setattr(model, _STATE, _State(result, layouts))
    setattr(model.config, CONFIG_KEY, {"folded_hash": result.folded_hash})


def _refuse_smoothed(model: PreTrainedModel, where: str) -> None:
    if is_smoothed(model):
        raise ValueError(
            f"{where}: `model` must not be smoothed already, got one that is (its config has `{CONFIG_KEY}`). Call "
            "unsmooth first, or load the original checkpoint; hf_kvquant.load_smoothing reads factors that were saved."
        )


@contextlib.contextmanager
def _progress(is_shown: bool, total: int) -> Iterator[Callable[[int], Any]]:
    """A progress bar over tokens on stderr, gone when it is done. Yields what to call with each number of tokens."""
    console = Console(stderr=True)
    columns = (
        TextColumn("calibrating"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("tokens"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not (is_shown and console.is_terminal)) as bar:
        task = bar.add_task("", total=total)
        yield lambda tokens: bar.advance(task, tokens)
