"""Rotation of values, folded into the weights: `rotate_values`, undone by `unrotate_values`.

The values of every key-value head are multiplied by the same Hadamard matrix as keys (`reference.rotate`). It spreads
an outlier channel over its head. Attention mixes tokens, never channels, so the rotation passes through it. The columns
of the next projection are multiplied by the same matrix, which is its own inverse, so caches have nothing to do. Unlike
smoothing by powers of two, this rounds each weight once, so logits change by rounding in the model's dtype. A check
rolls everything back if they change by more.

Source: QuaRot (arXiv 2404.00456); SpinQuant (arXiv 2405.16406), whose R2 is learned, unlike ours.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..models.adapters import without_adapters
from ..models.probing import evaluating, forward, hooked
from ..models.quantized import quantized_tensor
from ..models.text_config import check_is_model, positions_of, text_config_of
from ..spec import reference
from ..state import keep, keep_folded, state_of
from .layout import ValueLayout, find_value_layouts
from .text import CHECK_TOKENS

CONFIG_KEY = "hf_kvquant_value_rotation"  # in the model's config, so that a saved checkpoint is not rotated twice

CHECK_ROWS = 2  # texts of random tokens
# How far the output of a layer's attention may move for the same input, as root mean square over root mean square: this
# many eps of the dtype plus, since sums are in float32, this many eps of float32. The weights of both projections,
# values, attention's output and the result are rounded once each, by at most half an eps; the rest covers sums whose
# terms cancel. Reference model: .6 eps in bfloat16, 5 in float32 over 384 terms; longer sums lose more. A wrong
# rotation moves the output by about 1, one wrong head of 64 by .18; the limit is .125 in bfloat16, the coarsest dtype.
ROUNDINGS, SUM_ROUNDINGS = 16.0, 256.0
# How much further the logits may move, as they accumulate the rounding of all layers. Measured on the median token,
# since a router may send some tokens to other experts: up to 2 eps in bfloat16 and 12 in float32, over 48 families.
LOGIT_FACTOR = 4.0


@dataclasses.dataclass(frozen=True)
class _State:
    layouts: Mapping[int, ValueLayout]
    originals: tuple[Tensor, ...]  # the original weights on the CPU, read by `_read` in the order of `_rotatable`


def rotate_values(model: PreTrainedModel) -> tuple[int, ...]:
    """Rotate the values of a model by a Hadamard matrix, through its weights.

    This helps where values have outlier channels, and changes little elsewhere. Caches then store rotated values, and
    `save_pretrained` writes a plain checkpoint. The rotation acts on blocks of the largest power of two that divides
    the head_dim of values. It is computed in float64 and rounded once. It can be combined with `smooth_attention`. If
    projections are fused, undo both in the opposite order: `unsmooth` refuses weights that changed after smoothing.

    Args:
        model: A decoder-only model. In all layers whose caches are quantised, the rows of `v_proj` with its bias and
            the columns of `o_proj` are written in place, whatever these modules are called. The config is marked.
            Caches that were filled before no longer fit the model. The original rows and columns stay on the CPU until
            `unrotate_values`: 1.3 GB for a model like Llama-3-8B.

    Returns:
        Indices of the rotated layers. The caches of other layers are left to transformers.

    Raises:
        TypeError: `model` is not a `PreTrainedModel`.
        ValueError: The model is rotated already, or its values have an odd number of channels.
        NotImplementedError: Its values cannot be rotated through its weights; the message says why.
        RuntimeError: Attention or the logits would change by more than rounding. After any of these errors the model is
            unchanged.

    Example:
        >>> hf_kvquant.rotate_values(model)
        >>> model.save_pretrained("rotated")
    """
    where = "rotate_values"
    if isinstance(model, PreTrainedModel) and is_rotated(model):
        raise ValueError(
            f"{where}: `model` must not be rotated already, got one that is. Call unrotate_values first, or load the "
            "original checkpoint."
        )
    layouts = find_value_layouts(model, where=where)
    for layer_idx, layout in layouts.items():
        head_dim = layout.value.index.shape[1]
        if reference.rotation_block(head_dim) < 2:
            raise ValueError(
                f"{where}: `model` must have values of an even head_dim, got {head_dim} in layer {layer_idx}, which "
                "no power of two divides. Leave it as it is."
            )
    state = _State(layouts, tuple(_read(rows, index).cpu() for rows, index in _rotatable(model, layouts)))
    try:
        with _checked(model, layouts, where):
            for rows, index in _rotatable(model, layouts):
                _write(rows, index, _rotated(_read(rows, index)))
    except BaseException:  # the check failed, memory ran out, or the user interrupted
        _put_back(model, state)
        raise
    keep(model, value_rotation=state)
    keep_folded(model, where, (side.name for layout in layouts.values() for side in (layout.value, layout.output)))
    setattr(model.config, CONFIG_KEY, True)
    return tuple(layouts)


def unrotate_values(model: PreTrainedModel) -> PreTrainedModel:
    """Undo `rotate_values` bit for bit: restore the rows and columns that it rotated, and nothing else.

    Args:
        model: Rotated in this process; it is returned. Caches that were filled before no longer fit it.

    Raises:
        TypeError: `model` is not a `PreTrainedModel`.
        ValueError: The model is not rotated, was rotated in another process, or its weights have changed since.
    """
    where = "unrotate_values"
    check_is_model(model, where)
    state: _State | None = state_of(model).value_rotation
    if state is None:
        if is_rotated(model):
            raise ValueError(
                f"{where}: `model` must be rotated in this process, got a checkpoint that was rotated earlier. "
                "Rotating it back would round; load the original checkpoint."
            )
        raise ValueError(
            f"{where}: `model` must be rotated, got a {type(model).__name__} that is not. Call rotate_values first."
        )
    names = [side.name for layout in state.layouts.values() for side in (layout.value, layout.output)]
    found = next((name for name in names if quantized_tensor(model.get_submodule(name)) is not None), None)
    if found is not None:
        raise ValueError(
            f"{where}: `model` must have the weights that rotation left, got quantised ones at {found}. Load the "
            "original checkpoint again."
        )
    for (rows, index), original in zip(_rotatable(model, state.layouts), state.originals, strict=True):
        is_same = rows.dtype == original.dtype and not rows.is_meta
        if not is_same or not torch.equal(_read(rows, index), _rotated(original.to(rows.device))):
            raise ValueError(
                f"{where}: `model` must have the weights that rotation left, got others: they were trained, cast, "
                "offloaded or replaced since. Load the original checkpoint again."
            )
    _put_back(model, state)
    keep(model, value_rotation=None)
    keep_folded(model, "rotate_values", ())
    delattr(model.config, CONFIG_KEY)
    return model


def is_rotated(model: PreTrainedModel) -> bool:
    """Whether the values of a model are rotated through its weights, according to the model and its config."""
    return state_of(model).value_rotation is not None or bool(getattr(model.config, CONFIG_KEY, False))


def _rotatable(model: PreTrainedModel, layouts: Mapping[int, ValueLayout]) -> Iterator[tuple[Tensor, Tensor]]:
    """The rotated parameters: views `[features, ...]`, each with the feature of each channel, `[heads, head_dim]`."""
    for layout in layouts.values():
        for side in (layout.value, layout.output):
            module: Any = without_adapters(model.get_submodule(side.name))
            yield side.by_feature(module.weight), side.index
            if side is layout.value and module.bias is not None:
                yield module.bias.detach(), side.index


def _read(rows: Tensor, index: Tensor) -> Tensor:
    """The features of each head, channels last: `[heads, ..., head_dim]`, new memory."""
    return rows[index.to(rows.device)].movedim(1, -1)


def _write(rows: Tensor, index: Tensor, channels: Tensor) -> None:
    rows[index.to(rows.device)] = channels.to(rows.device).movedim(-1, 1)


def _rotated(channels: Tensor) -> Tensor:
    return reference.rotate(channels.double()).to(channels.dtype)


def _put_back(model: PreTrainedModel, state: _State) -> None:
    for (rows, index), original in zip(_rotatable(model, state.layouts), state.originals, strict=True):
        _write(rows, index, original)


@contextlib.contextmanager
def _checked(model: PreTrainedModel, layouts: Mapping[int, ValueLayout], where: str) -> Iterator[None]:
    """Refuse a rotation within the block that changes outputs or logits by more than rounding."""
    shape = CHECK_ROWS, positions_of(model, CHECK_TOKENS)
    vocab_size, generator = text_config_of(model).vocab_size, torch.Generator().manual_seed(0)
    input_ids = torch.randint(vocab_size, shape, generator=generator, device="cpu")
    outputs: dict[str, Tensor] = {}  # of the projections after attention, before rotation
    errors: dict[str, float] = {}

    def compare(name: str, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        old = outputs.setdefault(name, output)
        size = old.double().flatten(1).norm(dim=1).clamp(min=torch.finfo().tiny)
        difference = (output.double() - old.double()).flatten(1).norm(dim=1) / size
        errors[name] = float(difference.nan_to_num(torch.inf).amax())
        return old  # so that later layers are compared on the same input

    names = [layout.output.name for layout in layouts.values()]
    hooks = [(model.get_submodule(name), functools.partial(compare, name)) for name in names]
    with hooked(hooks):
        before = _logits(model, input_ids)
    yield
    with hooked(hooks):
        _logits(model, input_ids)
    worst = max(errors, key=errors.__getitem__)
    eps = max(torch.finfo(rows.dtype).eps for rows, _ in _rotatable(model, layouts))
    bound = ROUNDINGS * eps + SUM_ROUNDINGS * torch.finfo(torch.float32).eps
    _refuse_above(bound, errors[worst], f"the output of {worst}", where)
    after = _logits(model, input_ids)
    centered = before - before.mean(-1, keepdim=True)  # softmax ignores a common offset
    moved = ((after - before).norm(dim=-1) / centered.norm(dim=-1)).nan_to_num(torch.inf).median()
    _refuse_above(LOGIT_FACTOR * bound, float(moved), "the logits", where)


@torch.no_grad()
def _logits(model: PreTrainedModel, input_ids: Tensor) -> Tensor:
    with evaluating(model):
        return forward(model, input_ids).double()


def _refuse_above(bound: float, error: float, what: str, where: str) -> None:
    if error > bound:
        raise RuntimeError(
            f"{where}: a rotation must move {what} by no more than {bound:.1e} of their size, got {error:.1e}. The "
            "weights are as they were. How this model uses values is not supported: leave it as it is. If PyTorch "
            "multiplies float32 as TF32, call torch.set_float32_matmul_precision('highest') and try again."
        )
