"""Calibration: finds centres and smoothing factors of keys on text, applies them to a model, and removes them again.

Keys are divided and queries multiplied by a factor per key-value head and channel. Attention stays the same, while keys
become easier to quantise. Before that a centre, the mean key over calibration text, is subtracted; attention adds it
back. Factors are powers of two, so folding them into the weights changes no bit of the logits. If weights cannot be
edited, caches apply the factors (`of_model.py`), as they always do for centres.

Source: SmoothAttention, QServe (arXiv 2405.04532), section 4.2.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, get_args

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..common.errors import did_you_mean
from ..common.progress import show_progress
from ..config import KVQuantConfig
from ..models.hashes import hash_of
from ..models.latent import keeps_latents
from ..models.quantized import quantized_tensor
from ..models.text_config import check_is_model, text_config_of
from ..state import ModelTransforms, keep, keep_folded, state_of
from ..transforms.of_model import set_centers, set_smoothing, transforms_of
from .choices import CALIBRATED_PRESET
from .folding import Folding
from .latent_search import LatentSearch
from .layout import LayerLayout, find_layouts
from .search import CANDIDATES, WHERE, Candidate, Search, checked_candidates
from .smoothing_file import LayerSmoothing, SmoothingResult
from .targets import Mode, Target, find_keys, find_targets
from .text import ERROR_TOKENS, Windows, check_ids, count_tokens, read_windows, some

logger = logging.getLogger(__name__)

CONFIG_KEY = "hf_kvquant_smoothing"  # set in the model's config, so a saved checkpoint is known to be smoothed


class _Mark(dict[str, str]):
    """The mark that a config gets in this process, which other models may share. Of a checkpoint, it is a plain `dict`.

    Attributes:
        dtypes: Of the tensors that the hash is of, by name.
    """

    def __init__(self, folded_hash: str, dtypes: Mapping[str, torch.dtype]) -> None:
        super().__init__(folded_hash=folded_hash)
        self.dtypes = dtypes


@dataclasses.dataclass(frozen=True)
class _State:
    result: SmoothingResult
    layouts: Mapping[int, LayerLayout]  # of the layers whose weights are scaled
    before: ModelTransforms  # what was set on the model before, in units of keys without factors


def smooth_attention(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: Iterable[str],
    preset_or_config: str | KVQuantConfig | Mapping[str, Any] = CALIBRATED_PRESET,
    *,
    mode: Mode = "auto",
    centers: bool = True,
    factors: bool = True,
    candidates: Sequence[Candidate] = CANDIDATES,
    num_tokens: int = 16384,
    window: int = 2048,
    batch_size: int = 1,
    progress: bool = True,
) -> SmoothingResult:
    """Calibrate the centres and smoothing factors of keys, as the config's transforms ask.

    Factors are folded into the weights where that leaves the logits the same to the bit. Where weights are quantised,
    have adapters or cannot be edited for another reason, caches apply them. Centres are kept on the model, for the
    caches that it makes from now on, and in the result. After an error the model is unchanged.

    Args:
        model: A decoder-only model. Folding writes its weights in place and marks its config, so `save_pretrained`
            writes a plain checkpoint that cannot be smoothed twice. On a CPU without instructions for bfloat16, a
            bfloat16 model computes in float32 while it is watched, which takes twice its memory (`in_float32`).
        tokenizer: The model's.
        texts: Text like the model's future input; 16,000 tokens are plenty.
        preset_or_config: The format of the cache. Layers whose transforms do not name `"center"` or `"smooth"` get no
            centres or no factors.
        mode: Where factors go. `"auto"`: into the weights where possible, else to the caches; the log says why.
            `"fold"`: into the weights, which must be in memory and not quantised, or an error. `"online"`: to the
            caches, which divide keys and multiply queries on the fly; no weight changes, and RoPE ties no channels.
        centers, factors: Whether to calibrate them. Otherwise the model keeps its centres: from biases, or set by you.
        candidates: Exponents alpha of `max|key|^alpha` to try in each layer, and `"energy"`. 0 is always tried.
        num_tokens: About how many tokens of the texts to use, spread over all of them. Candidates are compared on about
            4,096 of them.
        window: Tokens per forward, limited by the model's context. Use at least the length that the model will read:
            keys of slow RoPE pairs drift with the position, so short windows make them look constant.
        batch_size: Windows per forward.
        progress: Whether to show progress on stderr. transformers' `disable_progress_bar()` also turns it off.

    Returns:
        Centres, factors, choices and errors of every layer. `unsmooth(model)` undoes all of it.

    Raises:
        TypeError, ValueError: An argument is invalid, the model is smoothed already, or there is too little text.
        NotImplementedError: The model's keys cannot be calibrated, or not through its weights; the message says why.
        RuntimeError: The logits would change.
    """
    config, choices = KVQuantConfig.resolve(preset_or_config), checked_candidates(candidates)
    _check_request(model, mode, centers, factors)
    targets, left_out = find_targets(model, config, mode, has_centers=centers, has_factors=factors, where=WHERE)
    windows = read_windows(
        model, tokenizer, texts, num_tokens=num_tokens, window=window, batch_size=batch_size, where=WHERE
    )
    try:
        return _calibrate(model, windows, targets, left_out, choices, progress)
    except (NotImplementedError, RuntimeError) as error:
        if mode != "auto" or not any(target.layout for target in targets.values()):
            raise
        logger.warning("%s Factors are applied by caches instead.", error)
    online = {index: dataclasses.replace(target, layout=None) for index, target in targets.items()}
    return _calibrate(model, windows, online, left_out, choices, progress)


def _check_request(model: PreTrainedModel, mode: str, centers: bool, factors: bool) -> None:
    if mode not in get_args(Mode):
        raise ValueError(
            f"{WHERE}: `mode` must be one of {list(get_args(Mode))}, got {mode!r}.{did_you_mean(mode, get_args(Mode))}"
        )
    if not centers and not factors:
        raise ValueError(f"{WHERE}: `centers` or `factors` must be True, got neither. Nothing else is calibrated.")
    if isinstance(model, PreTrainedModel):
        _refuse_smoothed(model, WHERE)


def _calibrate(
    model: PreTrainedModel,
    windows: Windows,
    targets: Mapping[int, Target],
    left_out: Mapping[int, str],
    choices: Sequence[Candidate],
    progress: bool,
) -> SmoothingResult:
    layouts = {index: target.layout for index, target in targets.items() if target.layout is not None}
    input_ids = check_ids(windows, model.dtype)
    num_steps = count_tokens(windows) + count_tokens(some(windows, ERROR_TOKENS))
    with show_progress(WHERE, num_steps, unit="token", is_shown=progress) as tell:
        search = LatentSearch if keeps_latents(text_config_of(model)) else Search
        layers = search(model, windows, targets, tell).run(choices, input_ids)
        parameters = _known_by(model, layouts, layers.values())
        original_hash = hash_of(model, parameters)
        folding = Folding(model, layouts)
        if layouts:
            folding.fold({index: layers[index].factor for index in layouts}, input_ids, WHERE)
    result = SmoothingResult(
        layers=tuple(layers.values()),
        left_out=left_out,
        key_formats={index: target.key_format.describe() for index, target in targets.items()},
        num_tokens=count_tokens(windows),
        parameters=parameters,
        original_hash=original_hash,
        folded_hash=hash_of(model, parameters) if layouts else original_hash,
        originals=folding.originals,
    )
    _install(model, layouts, result)
    return result


def unsmooth(model: PreTrainedModel) -> PreTrainedModel:
    """Undo `smooth_attention`: restore the weights bit for bit, and remove calibrated centres and factors in caches.

    Args:
        model: Smoothed in this process, or loaded from a smoothed checkpoint and passed to `load_smoothing`. It is
            returned, and keeps centres that you set yourself; they are scaled back together with the keys.

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
        result = state.result
        if _is_quantized(model, result.parameters) or hash_of(model, result.parameters) != result.folded_hash:
            raise ValueError(
                "unsmooth: `model` must have the weights that smoothing left, got others: they were trained, cast, "
                "quantised or replaced since. Load the original checkpoint again."
            )
        Folding(model, state.layouts, state.result.originals).undo(folded)
        assert hash_of(model, state.result.parameters) == state.result.original_hash
        if getattr(model.config, CONFIG_KEY, None) == {"folded_hash": state.result.folded_hash}:  # not another model's
            delattr(model.config, CONFIG_KEY)
        keep_folded(model, WHERE, ())
    # Centres that were set in place of calibrated ones are dropped, too.
    given = state.before.centers if state.result.centers() else _times(transforms_of(model).centers, folded)
    set_centers(model, given)
    set_smoothing(model, state.before.smoothing)
    keep(model, smoothing=None)
    return model


def load_smoothing(model: PreTrainedModel, path: str | os.PathLike[str]) -> SmoothingResult:
    """Apply a saved calibration: set centres, and fold factors unless the checkpoint has them folded in already.

    Args:
        model: The checkpoint that was smoothed, from before or after smoothing. If its weights were quantised after
            smoothing, it is known by the mark in its config, and `unsmooth` cannot undo the factors.
        path: A file that `SmoothingResult.save` wrote.

    Returns:
        The content of the file.

    Raises:
        TypeError: `model` is not a `PreTrainedModel`.
        ValueError: The file is of another kind, damaged, or belongs to other weights. The model is unchanged.
        NotImplementedError: As for `smooth_attention`.
    """
    where = "load_smoothing"
    check_is_model(model, where)
    result = SmoothingResult.load(path)
    if smoothing_of(model) is not None or transforms_of(model).smoothing:
        raise ValueError(f"{where}: `model` must not have factors yet, got one that has. Call unsmooth first.")

    def foreign(what: str) -> ValueError:
        return ValueError(
            f"{where}: `path` must hold factors of this model, got {os.fspath(path)}, whose {what}. Use the file that "
            "was written with this checkpoint."
        )

    mark = getattr(model.config, CONFIG_KEY, None)
    is_quantized = type(mark) is dict and _is_quantized(model, result.parameters)
    layouts = _fitting_layouts(model, result, where, foreign, is_quantized=is_quantized)
    if is_quantized:  # after folding: the hash of the weights says nothing
        if mark != {"folded_hash": result.folded_hash}:
            raise foreign("hash after folding differs from that in the model's config")
        _install(model, layouts, result, is_known=True)
        return result
    found = hash_of(model, result.parameters)
    is_folded = found == result.folded_hash
    if not is_folded:
        if found != result.original_hash:
            raise foreign("hashes before and after folding both differ from that of the model's weights")
        _refuse_smoothed(model, where)
        folding, factors = Folding(model, layouts, result.originals), result.factors_in("weights")
        folding.scale(factors)
        if hash_of(model, result.parameters) != result.folded_hash:
            folding.undo(factors)
            raise foreign("factors give other weights than they did when they were saved")
    _install(model, layouts, result, is_known=is_folded)
    return result


def _fitting_layouts(
    model: PreTrainedModel,
    result: SmoothingResult,
    where: str,
    foreign: Callable[[str], ValueError],
    *,
    is_quantized: bool,
) -> dict[int, LayerLayout]:
    """The layouts of layers with folded factors, if the model has all layers of a result, in the same shape.

    None if the weights were quantised after folding, since factors cannot be taken out of them.
    """
    folded = {} if is_quantized else result.factors_in("weights")
    layouts = find_layouts(model, where=where)[0] if folded else {}
    layouts = {index: layouts[index] for index in folded if index in layouts}
    keys = find_keys(model, where=where)[0]
    for layer in result.layers:
        index, factor = layer.layer_idx, layer.factor
        found = keys.get(index)
        if found is None or found.name != layer.name or (index in folded and index not in layouts):
            raise foreign(f"layer {index} ({layer.name}) the model does not have")
        shape = [found.num_kv_heads, found.head_dim]
        if shape != list(factor.shape):
            raise foreign(f"layer {index} has {list(factor.shape)} factors instead of {shape}")
        if index in layouts and not torch.equal(factor, factor.flatten()[layouts[index].ties]):
            raise foreign(f"layer {index} has unequal factors on channels that mix")
    if not is_quantized and result.parameters != _known_by(model, layouts, result.layers):
        raise foreign("factors are for other weights")
    return layouts


def is_smoothed(model: PreTrainedModel) -> bool:
    """Whether the model was calibrated in this process, or its config says that factors are folded into its weights.

    A config that was marked in this process says so of models with the weights that smoothing left, and of those whose
    weights are of another dtype or quantised, which cannot be compared.
    """
    mark = getattr(model.config, CONFIG_KEY, None)
    if smoothing_of(model) is not None or not isinstance(mark, _Mark):
        return smoothing_of(model) is not None or mark is not None
    try:
        is_other = _dtypes_of(model, mark.dtypes) != mark.dtypes or _is_quantized(model, mark.dtypes)
        return is_other or hash_of(model, mark.dtypes) == mark["folded_hash"]
    except AttributeError:
        return True  # a part of the marked model, whose tensors have other names


def smoothing_of(model: PreTrainedModel) -> _State | None:
    """What calibration stored on a model; `None` without calibration, or if its result is not known."""
    state: _State | None = state_of(model).smoothing
    return state


def _is_quantized(model: PreTrainedModel, parameters: Iterable[str]) -> bool:
    """Whether the innermost modules with these weights are quantised."""
    names = {name.rpartition(".")[0] for name in parameters}
    modules = [module for name, module in model.named_modules() if name in names and not [*module.children()]]
    return any(quantized_tensor(module) is not None for module in modules)


def _dtypes_of(model: PreTrainedModel, parameters: Iterable[str]) -> dict[str, torch.dtype]:
    """Dtypes of parameters and buffers. Raises AttributeError if the model lacks one."""
    owners = ((name, *name.rpartition(".")[::2]) for name in parameters)
    return {name: getattr(model.get_submodule(owner), last).dtype for name, owner, last in owners}


def _known_by(
    model: PreTrainedModel, layouts: Mapping[int, LayerLayout], layers: Iterable[LayerSmoothing]
) -> tuple[str, ...]:
    """The tensors that identify a model: weights that are scaled, and all tensors of the other attention modules."""
    names = set()
    for layout in layouts.values():
        for side in (layout.key, layout.query):
            scaled = model.get_submodule(side.name).named_parameters(recurse=False)
            names |= {f"{side.name}.{each}" for each, _ in scaled}
    others = set()
    for layer in layers:
        if layer.layer_idx not in layouts:
            module = model.get_submodule(layer.name)
            others |= {f"{layer.name}.{each}" for each, _ in (*module.named_parameters(), *module.named_buffers())}
    return (*sorted(names), *sorted(others))


def _install(
    model: PreTrainedModel, layouts: Mapping[int, LayerLayout], result: SmoothingResult, *, is_known: bool = False
) -> None:
    """Store on a model what its caches need besides the folded weights.

    `is_known`: the weights were loaded with factors folded in, so centres that were set on the model are in units of
    smoothed keys. Quantised ones come without layouts, and the config keeps the mark of their checkpoint.
    """
    folded, centers = result.factors_in("weights"), result.centers()
    before = transforms_of(model)
    if is_known:
        before = dataclasses.replace(before, centers=_times(before.centers, folded))
    keep(model, smoothing=_State(result, layouts, before))
    if layouts:
        setattr(model.config, CONFIG_KEY, _Mark(result.folded_hash, _dtypes_of(model, result.parameters)))
    if layouts and not is_known:
        # Adapters for a checkpoint that was smoothed before are of that checkpoint, so they fit.
        keep_folded(model, WHERE, (side.name for layout in layouts.values() for side in (layout.key, layout.query)))
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
