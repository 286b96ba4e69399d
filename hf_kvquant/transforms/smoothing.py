"""SmoothAttention: outlier channels of keys made small, and the queries that meet them larger, in the model's weights.

Keys are divided and queries multiplied by a factor per key-value head and channel, so that attention stays what it was
while keys become easier to quantise. Factors are `max|key|^alpha` over calibration text, or those that balance the
energies of keys and queries; alpha is searched per layer on the error of the attention output under the real storage
format, 0 (leave the layer alone) included. They are rounded to powers of two, which leaves every bit of the logits as
it was; a forward before and after proves it, or everything is rolled back. Where factors go is found in `layout.py`,
how they are folded is `folding.py`'s, which there are is `search.py`'s; results are kept in `smoothing_file.py`.

Source: SmoothAttention, QServe (arXiv 2405.04532), section 4.2.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..config import KVQuantConfig
from .calibration import KeyStatistics, TransformFactory, Windows, collect, read_windows
from .folding import exact_exponents, gains_plus_one, hash_of, parameters_of, scale_keys
from .layout import LayerLayout, find_layouts
from .observation import Observation, forward, observed
from .search import CANDIDATES, Candidate, checked_candidates, errors_of, exponents_of, pick
from .smoothing_file import LayerSmoothing, SmoothingResult

CONFIG_KEY = "hf_kvquant_smoothing"  # in the model's config, so that a saved checkpoint says that it is smoothed

_STATE = "_hf_kvquant_smoothing"
# The automatic check runs the model on the ends of so many windows. In float16 a rounding shows only now and then.
CHECK_WINDOWS, CHECK_TOKENS, CHECK_TOKENS_FLOAT16 = 4, 64, 1024


Measure = Callable[..., dict[int, list[float]]]  # `errors_of`, but for `exponents` and `advance`


@dataclasses.dataclass(frozen=True)
class _Choice:
    """What is chosen for a layer."""

    number: int  # of the candidate
    exponents: Tensor  # [num_kv_heads, head_dim] int64
    errors: Sequence[float]  # of all candidates
    error: float  # of these exponents
    is_limited: bool  # whether exponents were cut for lack of room


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
    choices = checked_candidates(candidates)
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
        wanted = {
            index: [
                exponents_of(seen, layouts[index], choice, None if center is None else center(seen))
                for choice in choices
            ]
            for index, seen in statistics.items()
        }
        measure = functools.partial(
            errors_of, model, windows, formats=formats, statistics=statistics, transform=transform
        )
        chosen = _choose(model, layouts, wanted, measure, advance)
    check_ids = _check_ids(windows, model.dtype)
    chosen = _settle(model, layouts, chosen, measure, check_ids, where)
    result = SmoothingResult(
        layers=tuple(
            LayerSmoothing(
                layer_idx=index,
                name=layouts[index].name,
                choice=str(choices[choice.number]) if choice.exponents.any() else "0.0",
                factor=torch.exp2(choice.exponents.float()),
                errors={str(name): error for name, error in zip(choices, choice.errors, strict=True)},
                error_before=choice.errors[0],
                error_after=choice.error,
                is_limited=choice.is_limited,
            )
            for index, choice in chosen.items()
        ),
        left_out=left_out,
        key_formats={index: formats[index].describe() for index in layouts},
        num_tokens=num_tokens_used,
        parameters=tuple(parameters_of(layouts.values(), model)),
        original_hash="",
        folded_hash="",
        originals=gains_plus_one(model, layouts.values()),
    )
    return _fold(model, layouts, result, check_ids, where)


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


# --- folding, and the proof -------------------------------------------------------------------------------------------


def _choose(
    model: PreTrainedModel,
    layouts: Mapping[int, LayerLayout],
    wanted: Mapping[int, Sequence[Tensor]],
    measure: Measure,
    advance: Callable[[int], Any],
) -> dict[int, _Choice]:
    """The best of the exponents that are wanted, as far as weights can be scaled by them exactly."""
    possible = {
        index: [exact_exponents(model, layouts[index], exponents) for exponents in choices]
        for index, choices in wanted.items()
    }
    errors = measure(exponents=possible, advance=advance)
    chosen = {}
    for index, choices in possible.items():
        number = pick(errors[index])
        is_limited = not all(map(torch.equal, choices, wanted[index]))
        chosen[index] = _Choice(number, choices[number], errors[index], errors[index][number], is_limited)
    return chosen


def _settle(
    model: PreTrainedModel,
    layouts: Mapping[int, LayerLayout],
    chosen: Mapping[int, _Choice],
    measure: Measure,
    input_ids: Tensor,
    where: str,
) -> dict[int, _Choice]:
    """Choices under which no layer's attention changes a bit. See `_settled_exponents`.

    Raises:
        NotImplementedError: In float16, if nothing is left of any choice.
        RuntimeError: A layer's attention changes.
    """
    before = {index: choice.exponents for index, choice in chosen.items()}
    after = _settled_exponents(model, layouts, before, input_ids, where)
    changed = [index for index in chosen if not torch.equal(after[index], before[index])]
    cut = {index: [torch.zeros_like(after[index]), after[index]] for index in changed}
    errors = measure(exponents=cut) if cut else {}
    settled = dict(chosen)
    for index, exponents in cut.items():
        number = pick(errors[index])
        settled[index] = dataclasses.replace(
            chosen[index], exponents=exponents[number], error=errors[index][number], is_limited=True
        )
    if cut and not any(choice.exponents.any() for choice in settled.values()):
        raise NotImplementedError(
            f"{where}: `model` must have room for other factors in its dtype, got float16, in which every factor worth "
            "folding would round some key or query. Load it in float32."
        )
    return settled


def _check_ids(windows: Windows, dtype: torch.dtype) -> Tensor:
    """Text for the check: the ends of a few windows, `[windows, tokens]` int64."""
    rows = [(ids[row], mask[row]) for ids, mask in windows for row in range(len(ids))]
    longest = sorted(rows, key=lambda row: -int(row[1].sum()))[:CHECK_WINDOWS]
    limit = CHECK_TOKENS_FLOAT16 if dtype == torch.float16 else CHECK_TOKENS
    tokens = min(limit, *(int(mask.sum()) for _, mask in longest))
    return torch.stack([ids[-tokens:] for ids, _ in longest])


def _settled_exponents(
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
    """Logits of the last tokens of each row, as the model computes them itself; row by row, for they are large."""
    in_training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.no_grad():
            return torch.cat([forward(model, row[None])[:, -CHECK_TOKENS:] for row in input_ids])
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
