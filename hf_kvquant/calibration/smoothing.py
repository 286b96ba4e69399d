"""Calibration: finds centres and smoothing factors of keys on text, applies them to a model, and removes them again.

Keys are divided and queries multiplied by a factor per key-value head and channel. Attention stays the same, while keys
become easier to quantise. Before that a centre, the mean key over calibration text, is subtracted; attention adds it
back. Factors are `max|key|^alpha`, or those that balance the energies of keys and queries. Alpha is searched per layer
by the error of the attention output after everything that a cache will do to keys; 0 (no factors) is always tried.
Factors are rounded to powers of two, so folding them into the weights changes no bit of the logits; `proof.py` verifies
this or rolls everything back. If weights cannot be edited, caches apply the factors (`of_model.py`), as they always do
for centres. `layout.py` and `online.py` find the layers, `search.py` lists and ranks factors, `folding.py` scales
weights, and `smoothing_file.py` holds the results.

Source: SmoothAttention, QServe (arXiv 2405.04532), section 4.2.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..common.errors import did_you_mean
from ..common.progress import Tell, show_progress
from ..config import KVQuantConfig
from ..models.hashes import hash_of
from ..models.text_config import check_is_model
from ..spec.formats import KVFormat
from ..spec.key_transform import KeyTransform
from ..state import ModelTransforms, keep, state_of
from ..transforms.of_model import key_transforms, set_centers, set_smoothing, transforms_of
from .folding import exact_exponents, gains_plus_one, parameters_of, scale_keys
from .layout import LayerLayout, check_decoder, find_layouts
from .online import find_keys, tensors_of
from .proof import check_ids, fold, scale_back, settled_exponents
from .search import CANDIDATES, Candidate, checked_candidates, errors_of, exponents_of, pick
from .smoothing_file import LayerSmoothing, Placement, SmoothingResult
from .text import Windows, collect, read_windows

logger = logging.getLogger(__name__)

CONFIG_KEY = "hf_kvquant_smoothing"  # set in the model's config, so a saved checkpoint is known to be smoothed

Mode = Literal["fold", "online", "auto"]
Measure = Callable[..., dict[int, list[float]]]  # `errors_of` that only needs `transforms` and `advance`


@dataclasses.dataclass(frozen=True)
class _Target:
    """A layer to calibrate.

    Attributes:
        name: The attention module's name in the model.
        ties: `[num_kv_heads, head_dim]` int64: channels with the same number have to share a factor.
        key_format: The format of its keys.
        before: The key transform that caches apply before calibration.
        placement: Where its factors will be applied.
        has_center: Whether to calibrate its centre.
        layout: The parameters that make its keys and queries; `None` unless factors are folded into them.
    """

    name: str
    ties: Tensor
    key_format: KVFormat
    before: KeyTransform
    placement: Placement
    has_center: bool
    layout: LayerLayout | None


@dataclasses.dataclass(frozen=True)
class _Choice:
    """The factors and the transform chosen for a layer."""

    number: int  # index of the candidate
    exponents: Tensor  # [num_kv_heads, head_dim] int64
    transform: KeyTransform  # the layer's future key transform, without factors
    errors: Sequence[float]  # of all candidates
    error_before: float  # before calibration
    error: float  # with these exponents
    is_limited: bool  # whether exponents were reduced to stay within the range of the dtype


@dataclasses.dataclass(frozen=True)
class _State:
    """What calibration stores on a model.

    Attributes:
        result: The result.
        layouts: Layouts of the layers whose weights are scaled.
        before: The transforms that were set on the model before, in units of keys without factors.
    """

    result: SmoothingResult
    layouts: Mapping[int, LayerLayout]
    before: ModelTransforms


def smooth_attention(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: Iterable[str],
    preset_or_config: str | KVQuantConfig | Mapping[str, Any] = "int4",
    *,
    mode: Mode = "fold",
    centers: bool = True,
    factors: bool = True,
    candidates: Sequence[Candidate] = CANDIDATES,
    num_tokens: int = 16384,
    window: int = 2048,
    batch_size: int = 1,
    progress: bool = True,
) -> SmoothingResult:
    """Calibrate the centres and smoothing factors of keys, as the config's transforms ask.

    By default factors are folded into the weights; the logits stay the same to the bit. Centres are kept on the model,
    for the caches that it makes from now on, and in the result.

    Args:
        model: A decoder-only model. Folding writes its weights in place and marks its config, so `save_pretrained`
            writes a plain checkpoint that cannot be smoothed twice.
        tokenizer: The model's.
        texts: Text like the model's future input; 16,000 tokens are plenty.
        preset_or_config: The format of the cache: a preset's name, a dictionary or a `KVQuantConfig`. Layers whose
            transforms do not name `"center"` or `"smooth"` get no centres or no factors.
        mode: Where factors go. `"fold"`: into the weights, which must be in memory and not quantised. `"online"`: to
            the caches, which divide keys and multiply queries on the fly; no weight changes, and RoPE ties no channels.
            `"auto"`: into the weights where possible, else to the caches, with a warning in the log.
        centers: Whether to calibrate centres. If not, the model keeps those it has, from its biases or set by you.
        factors: Whether to calibrate factors.
        candidates: What to try in each layer: exponents alpha of `max|key|^alpha`, and `"energy"`. 0 is always tried.
        num_tokens: About how many tokens of the texts to use, spread over all of them.
        window: Tokens per forward, limited by the model's context. Use at least the length that the model will read:
            keys of slow RoPE pairs drift with the position, so short windows make them look constant.
        batch_size: Windows per forward.
        progress: Whether to show progress on stderr: a bar, or a line every 30 seconds if stderr is not a terminal.
            `transformers.utils.logging.disable_progress_bar()` also turns it off.

    Returns:
        Centres, factors, choices and errors of every layer. `unsmooth(model)` undoes all of it.

    Raises:
        TypeError, ValueError: An argument is invalid, the model is smoothed already, or there is too little text.
        NotImplementedError: The model's keys cannot be calibrated, or not through its weights; the message says why.
        RuntimeError: The logits would change. After any of these errors the model is unchanged.

    Example:
        >>> result = hf_kvquant.smooth_attention(model, tokenizer, texts)
        >>> print(result.report())
        >>> model.save_pretrained("smoothed")
        >>> result.save("smoothed/kvquant_smoothing.safetensors")
    """
    where = "smooth_attention"
    config = KVQuantConfig.resolve(preset_or_config)
    choices = checked_candidates(candidates)
    if mode not in get_args(Mode):
        raise ValueError(
            f"{where}: `mode` must be one of {list(get_args(Mode))}, got {mode!r}.{did_you_mean(mode, get_args(Mode))}"
        )
    if not centers and not factors:
        raise ValueError(f"{where}: `centers` or `factors` must be True, got neither. Nothing else is calibrated.")
    if isinstance(model, PreTrainedModel):
        _refuse_smoothed(model, where)
    targets, left_out = _targets(model, config, mode, has_centers=centers, has_factors=factors, where=where)
    windows = read_windows(
        model, tokenizer, texts, num_tokens=num_tokens, window=window, batch_size=batch_size, where=where
    )
    num_tokens = sum(int(mask.sum()) for _, mask in windows)

    def calibrate(targets: Mapping[int, _Target]) -> SmoothingResult:
        with show_progress(where, 2 * num_tokens, unit="token", is_shown=progress) as tell:
            return _calibrate(model, windows, targets, choices=choices, left_out=left_out, tell=tell, where=where)

    try:
        return calibrate(targets)
    except (NotImplementedError, RuntimeError) as error:
        if mode != "auto" or not any(target.layout for target in targets.values()):
            raise
        logger.warning("%s Factors are applied by caches instead.", error)
    return calibrate({index: _as_online(target) for index, target in targets.items()})


def unsmooth(model: PreTrainedModel) -> PreTrainedModel:
    """Undo `smooth_attention`: restore the weights bit for bit, and remove calibrated centres and factors in caches.

    Args:
        model: Smoothed in this process, or loaded from a smoothed checkpoint and passed to `load_smoothing`.

    Returns:
        The same model. It keeps centres that you set yourself; they are scaled back together with the keys.

    Raises:
        TypeError: `model` is not a `PreTrainedModel`.
        ValueError: The model is not smoothed, its factors are not known, or its weights have changed since.
    """
    check_is_model(model, "unsmooth")
    state = smoothing_of(model)
    if state is None:
        if is_smoothed(model):
            raise ValueError(
                "unsmooth: `model` must have its factors loaded, got a checkpoint that was smoothed earlier. Pass "
                "their file to hf_kvquant.load_smoothing first."
            )
        raise ValueError(
            f"unsmooth: `model` must be smoothed, got a {type(model).__name__} that is not. Call smooth_attention "
            "first."
        )
    folded = state.result.factors_in("weights")
    if folded:
        if hash_of(model, state.result.parameters) != state.result.folded_hash:
            raise ValueError(
                "unsmooth: `model` must have the weights that smoothing left, got others: they were trained, cast or "
                "replaced since. Load the original checkpoint again."
            )
        scale_back(model, state.layouts, folded, state.result.originals)
        assert hash_of(model, state.result.parameters) == state.result.original_hash
        delattr(model.config, CONFIG_KEY)
    # Centres that were set in place of calibrated ones are dropped, too.
    given = state.before.centers if state.result.centers() else _times(transforms_of(model).centers, folded)
    set_centers(model, given)
    set_smoothing(model, state.before.smoothing)
    keep(model, smoothing=None)
    return model


def load_smoothing(model: PreTrainedModel, path: str | os.PathLike[str]) -> SmoothingResult:
    """Apply a saved calibration: set centres, and fold factors unless the checkpoint has them folded in already.

    Args:
        model: The checkpoint that was smoothed, from before or after smoothing.
        path: A file that `SmoothingResult.save` wrote.

    Returns:
        The content of the file.

    Raises:
        TypeError: `model` is not a `PreTrainedModel`.
        ValueError: The file is of another kind, damaged, or belongs to other weights. The model is unchanged.
        NotImplementedError: As for `smooth_attention`.
    """
    where = "load_smoothing"
    result = SmoothingResult.load(path)
    if isinstance(model, PreTrainedModel) and (smoothing_of(model) is not None or transforms_of(model).smoothing):
        raise ValueError(f"{where}: `model` must not have factors yet, got one that has. Call unsmooth first.")
    folded = result.factors_in("weights")
    all_layouts = find_layouts(model, where=where)[0] if folded else {}
    layouts = {index: all_layouts[index] for index in folded if index in all_layouts}
    keys = find_keys(model, where=where)[0] if len(folded) < len(result.layers) or result.centers() else {}
    shapes = {index: (layout.name, *layout.ties.shape) for index, layout in layouts.items()}
    for layer_keys in keys.values():
        if layer_keys.layer_idx not in folded:
            shapes[layer_keys.layer_idx] = (layer_keys.name, layer_keys.num_kv_heads, layer_keys.head_dim)
    foreign = f"{where}: `path` must hold factors of this model, got {os.fspath(path)}, whose "
    remedy = ". Use the file that was written with this checkpoint."
    for layer in result.layers:
        index = layer.layer_idx
        name, *shape = shapes.get(index, ("", 0, 0))
        if name != layer.name:
            raise ValueError(f"{foreign}layer {index} ({layer.name}) the model does not have{remedy}")
        if shape != list(layer.factor.shape):
            raise ValueError(
                f"{foreign}layer {index} has {list(layer.factor.shape)} factors instead of {shape}{remedy}"
            )
        ties = layouts[index].ties.flatten() if index in layouts else torch.arange(layer.factor.numel())
        if not bool((layer.factor.flatten() == layer.factor.flatten()[ties]).all()):
            raise ValueError(f"{foreign}layer {index} has unequal factors on channels that mix{remedy}")
    names = _known_by(model, layouts, [layer.name for layer in result.layers if layer.layer_idx not in folded])
    if names != result.parameters:
        raise ValueError(f"{foreign}factors are for other weights{remedy}")
    found = hash_of(model, names)
    is_folded = found == result.folded_hash
    if not is_folded:
        if found != result.original_hash:
            raise ValueError(
                f"{foreign}hashes before and after folding both differ from that of the model's weights{remedy}"
            )
        _refuse_smoothed(model, where)
        for index, factor in folded.items():
            scale_keys(model, layouts[index], factor)
        if hash_of(model, names) != result.folded_hash:
            scale_back(model, layouts, folded, result.originals)
            raise ValueError(f"{foreign}factors give other weights than they did when they were saved{remedy}")
    _install(model, layouts, result, is_known=is_folded)
    return result


def is_smoothed(model: PreTrainedModel) -> bool:
    """Whether the model was calibrated in this process, or its config says that factors are folded into its weights."""
    return smoothing_of(model) is not None or getattr(model.config, CONFIG_KEY, None) is not None


def smoothing_of(model: PreTrainedModel) -> _State | None:
    """What calibration stored on a model; `None` without calibration, or if its result is not known."""
    state: _State | None = state_of(model).smoothing
    return state


# --- what to calibrate ------------------------------------------------------------------------------------------------


def _targets(
    model: PreTrainedModel, config: KVQuantConfig, mode: Mode, *, has_centers: bool, has_factors: bool, where: str
) -> tuple[dict[int, _Target], dict[int, str]]:
    """The layers to calibrate, and for each other layer the reason.

    Raises:
        TypeError, NotImplementedError: No layer can be calibrated, or factors cannot be folded into any.
    """
    check_decoder(model, where)  # first: models that it refuses do not work with mode='online' either
    layouts: dict[int, LayerLayout] = {}
    unscalable: dict[int, str] = {}
    is_smoothing = has_factors and any(
        "smooth" in transforms
        for transforms in (config.transforms, *(formats.transforms for formats in config.layers.values()))
    )
    if is_smoothing and mode != "online":
        try:
            layouts, unscalable = find_layouts(model, where=where)
        except NotImplementedError as error:
            if mode != "auto":
                raise NotImplementedError(f"{error} Or use mode='online', where caches apply the factors.") from error
            logger.warning("%s Factors are applied by caches instead.", error)
    keys, left_out = find_keys(model, where=where)
    left_out |= {index: reason for index, reason in unscalable.items() if index in left_out}
    transforms = key_transforms(model, config)
    targets: dict[int, _Target] = {}
    has_refused = False
    for index, found in keys.items():
        formats = config.formats(index)
        if not formats.key.is_quantized:
            left_out[index] = "its keys are not quantised"
            continue
        has_center = has_centers and "center" in formats.transforms
        placement: Placement = "none"
        if has_factors and "smooth" in formats.transforms:
            if index in layouts:
                placement = "weights"
            elif mode == "fold":
                left_out[index] = unscalable[index]
                has_refused = True
            else:
                placement = "caches"
        if placement == "none" and not has_center:
            left_out.setdefault(index, f"its transforms are {list(formats.transforms)}, which need no calibration")
            continue
        targets[index] = _Target(
            name=found.name,
            ties=layouts[index].ties if placement == "weights" else _no_ties(found.num_kv_heads, found.head_dim),
            key_format=formats.key,
            before=transforms.get(index, KeyTransform()).to("cpu"),
            placement=placement,
            has_center=has_center,
            layout=layouts[index] if placement == "weights" else None,
        )
    left_out = dict(sorted(left_out.items()))
    # A user who asks for factors in the weights, and gets none in any layer, should not get only centres.
    has_refused = has_refused and not any(target.layout for target in targets.values())
    if not targets or has_refused:
        reasons = "; ".join(f"layer {index}: {reason}" for index, reason in list(left_out.items())[:3])
        raise NotImplementedError(
            f"{where}: `model` must have a layer whose keys can be calibrated, got {type(model).__name__} with none "
            f"({reasons}). Leave it as it is" + (", or use mode='online'." if has_refused else ".")
        )
    online = [index for index, target in targets.items() if target.placement == "caches"]
    if mode == "auto" and online and layouts:
        logger.warning(
            "%s: factors cannot be folded in layers %s (%s). They are applied by caches instead.",
            where,
            ", ".join(map(str, online)),
            unscalable[online[0]],
        )
    return targets, left_out


def _no_ties(num_kv_heads: int, head_dim: int) -> Tensor:
    """`ties` that leave every channel free."""
    return torch.arange(num_kv_heads * head_dim).view(num_kv_heads, head_dim)


def _as_online(target: _Target) -> _Target:
    """The target with its factors, if any, applied by caches."""
    if target.placement != "weights":
        return target
    return dataclasses.replace(target, placement="caches", layout=None, ties=_no_ties(*target.ties.shape))


# --- calibrating ------------------------------------------------------------------------------------------------------


def _calibrate(
    model: PreTrainedModel,
    windows: Windows,
    targets: Mapping[int, _Target],
    *,
    choices: Sequence[Candidate],
    left_out: Mapping[int, str],
    tell: Tell,
    where: str,
) -> SmoothingResult:
    """Find centres and factors of some layers, and apply them to the model."""
    formats = {index: target.key_format for index, target in targets.items()}
    layouts = {index: target.layout for index, target in targets.items() if target.layout is not None}
    measure = functools.partial(errors_of, model, windows, formats=formats)
    num_tokens = sum(int(mask.sum()) for _, mask in windows)
    tell(doing="statistics of keys and queries")
    statistics = collect(model, windows, targets, tell)
    bad = [index for index, seen in statistics.items() if not seen.mean_square.isfinite().all()]
    if bad:
        raise ValueError(
            f"{where}: `model` must have finite keys on the texts, got infinities or NaN in layer {bad[0]}. "
            "Check the checkpoint, or load it in bfloat16 or float32."
        )
    transforms: dict[int, KeyTransform] = {}
    wanted: dict[int, list[Tensor]] = {}
    for index, target in targets.items():
        seen, transform = statistics[index], target.before
        if target.has_center:
            transform = dataclasses.replace(transform, center=seen.mean)
        transforms[index] = transform
        wanted[index] = [
            exponents_of(seen, target.ties, choice, transform.center)
            if target.placement != "none"
            else torch.zeros_like(target.ties)
            for choice in choices
        ]
    tell(doing="errors of candidates")
    chosen = _choose(model, targets, transforms, wanted, measure, tell)
    tell(doing="check of logits")
    input_ids = check_ids(windows, model.dtype)
    chosen = _settle(model, layouts, chosen, measure, input_ids, where)
    result = SmoothingResult(
        layers=tuple(
            LayerSmoothing(
                layer_idx=index,
                name=targets[index].name,
                placement=targets[index].placement,
                choice=str(choices[choice.number]) if choice.exponents.any() else "0.0",
                factor=torch.exp2(choice.exponents.float()),
                center=choice.transform.center if targets[index].has_center else None,
                errors={str(name): error for name, error in zip(choices, choice.errors, strict=True)},
                error_before=choice.error_before,
                error_after=choice.error,
                is_limited=choice.is_limited,
            )
            for index, choice in chosen.items()
        ),
        left_out=left_out,
        key_formats={index: key_format.describe() for index, key_format in formats.items()},
        num_tokens=num_tokens,
        parameters=_known_by(model, layouts, [target.name for target in targets.values() if target.layout is None]),
        original_hash="",
        folded_hash="",
        originals=gains_plus_one(model, layouts.values()),
    )
    original_hash = hash_of(model, result.parameters)
    if layouts:
        fold(model, layouts, result.factors_in("weights"), result.originals, input_ids, where)
    folded_hash = hash_of(model, result.parameters) if layouts else original_hash
    result = dataclasses.replace(result, original_hash=original_hash, folded_hash=folded_hash)
    _install(model, layouts, result)
    return result


def _with_factors(transform: KeyTransform, exponents: Tensor) -> KeyTransform:
    """The transform with factors `2 ** exponents`."""
    return dataclasses.replace(transform, smoothing=torch.exp2(exponents.float())) if exponents.any() else transform


def _choose(
    model: PreTrainedModel,
    targets: Mapping[int, _Target],
    transforms: Mapping[int, KeyTransform],
    wanted: Mapping[int, Sequence[Tensor]],
    measure: Measure,
    advance: Callable[[int], Any],
) -> dict[int, _Choice]:
    """Choose the best of the wanted exponents, after shrinking those that would round weights.

    A layer whose error would grow stays as it was before calibration.
    """
    possible = {
        index: choices
        if (layout := targets[index].layout) is None
        else [exact_exponents(model, layout, exponents) for exponents in choices]
        for index, choices in wanted.items()
    }
    tried = {
        index: [targets[index].before, *(_with_factors(transforms[index], exponents) for exponents in choices)]
        for index, choices in possible.items()
    }
    measured = measure(transforms=tried, advance=advance)
    chosen = {}
    for index, choices in possible.items():
        error_before, *errors = measured[index]
        number, transform = pick(errors), transforms[index]
        error = errors[number]
        if error > error_before:
            number, transform, error = 0, targets[index].before, error_before
        is_limited = not all(map(torch.equal, choices, wanted[index]))
        chosen[index] = _Choice(number, choices[number], transform, errors, error_before, error, is_limited)
    return chosen


def _settle(
    model: PreTrainedModel,
    layouts: Mapping[int, LayerLayout],
    chosen: Mapping[int, _Choice],
    measure: Measure,
    input_ids: Tensor,
    where: str,
) -> dict[int, _Choice]:
    """Reduce exponents until no layer's attention changes a bit. See `proof.settled_exponents`.

    Raises:
        NotImplementedError: In float16, no factors are left in any layer.
        RuntimeError: A layer's attention changes.
    """
    if not layouts:
        return dict(chosen)
    before = {index: chosen[index].exponents for index in layouts}
    after = settled_exponents(model, layouts, before, input_ids, where)
    changed = [index for index in layouts if not torch.equal(after[index], before[index])]
    cut = {index: [torch.zeros_like(after[index]), after[index]] for index in changed}
    tried = {
        index: [_with_factors(chosen[index].transform, exponents) for exponents in choices]
        for index, choices in cut.items()
    }
    errors = measure(transforms=tried) if cut else {}
    settled = dict(chosen)
    for index, choices in cut.items():
        number = pick(errors[index])
        settled[index] = dataclasses.replace(
            chosen[index], exponents=choices[number], error=errors[index][number], is_limited=True
        )
    if cut and not any(settled[index].exponents.any() for index in layouts):
        raise NotImplementedError(
            f"{where}: `model` must have room for other factors in its dtype, got float16, in which every factor worth "
            "folding would round some key or query. Load it in float32, or use mode='online'."
        )
    return settled


# --- what is left on a model ------------------------------------------------------------------------------------------


def _known_by(model: PreTrainedModel, layouts: Mapping[int, LayerLayout], names: Iterable[str]) -> tuple[str, ...]:
    """The tensors that identify a model: weights that are scaled, and all tensors of the named attention modules."""
    return (*parameters_of(layouts.values(), model), *tensors_of(names, model))


def _install(
    model: PreTrainedModel, layouts: Mapping[int, LayerLayout], result: SmoothingResult, *, is_known: bool = False
) -> None:
    """Store on a model what its caches need besides the folded weights.

    Args:
        model: Its weights have the factors folded in.
        layouts: Layouts of the layers that have them.
        result: The result of calibration.
        is_known: Whether the weights were loaded with factors folded in. Centres that were set on the model are then in
            units of smoothed keys.
    """
    folded, centers = result.factors_in("weights"), result.centers()
    before = transforms_of(model)
    if is_known:
        before = dataclasses.replace(before, centers=_times(before.centers, folded))
    keep(model, smoothing=_State(result, layouts, before))
    if folded:
        setattr(model.config, CONFIG_KEY, {"folded_hash": result.folded_hash})
    inverse = {index: 1 / factor for index, factor in folded.items()}
    # Setting no centres makes the next cache find them in the biases again, which are now divided, too.
    set_centers(model, _times({**(before.centers or {}), **centers} if centers else before.centers, inverse))
    online = {index: factor for index, factor in result.factors_in("caches").items() if (factor != 1).any()}
    if online:
        set_smoothing(model, online)


def _times(centers: Mapping[int, Tensor] | None, factors: Mapping[int, Tensor]) -> dict[int, Tensor] | None:
    """Centres, multiplied by the layer's factors if it has any."""
    if centers is None:
        return None
    return {
        index: center * factors[index].to(center.device) if index in factors else center
        for index, center in centers.items()
    }


def _refuse_smoothed(model: PreTrainedModel, where: str) -> None:
    if is_smoothed(model):
        raise ValueError(
            f"{where}: `model` must not be smoothed already, got one that is. Call "
            "unsmooth first, or load the original checkpoint; hf_kvquant.load_smoothing reads factors that were saved."
        )
    if transforms_of(model).smoothing:
        raise ValueError(
            f"{where}: `model` must not be smoothed already, got one with factors that its caches apply. Remove them "
            "with hf_kvquant.transforms.of_model.set_smoothing(model, {}) first."
        )
