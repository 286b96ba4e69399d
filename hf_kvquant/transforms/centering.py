"""Centres of keys: the constant per layer, key-value head and channel that is subtracted before keys are quantised.

Any centre is exact, since attention adds `query · center` back. Where the model has a key bias, this file finds the
centre from the weights alone. It sends one token through the model, feeds zeros to every projection and norm, so that
the keys in the cache are the bias, and averages the rotary embedding over positions, so that the bias is rotated as
RoPE does on average. Over T positions, a pair of channels of frequency ω gets

    center = β · e^{iω(T-1)/2} · sin(ωT/2) / (T · sin(ω/2))         β: the bias of the pair, a complex number

which is near β for slow pairs and near 0 for fast ones. The model's own code projects, splits, normalises and rotates,
so fused projections and partial, interleaved or scaled RoPE need no code here. If a norm follows a biased projection,
the weights do not tell the constant: the norm is fed zeros too, so the probe finds the norm's own bias.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..models.probing import keys_of_a_token
from ..models.text_config import positions_of

# Upper limit of T in the formula above; a model's own context may be shorter. Pairs that turn about once or more within
# T tokens are left to the rotation. A centre over more positions than a text has fits its first tokens badly (reference
# model, bias of norm 100 in the slowest two pairs, texts of 2048 tokens: int4 diverges 1.20 times as much as without
# the bias with T = 2048, 1.46 times with 4096).
NUM_POSITIONS = 4096


def has_biases(model: nn.Module) -> bool:
    """Whether a model has any non-zero bias, so that its keys may share a constant."""
    tensors = itertools.chain(model.named_parameters(), model.named_buffers())
    # Offloaded tensors cannot be read here, so they count as non-zero.
    return any(name.endswith("bias") and (tensor.is_meta or bool(tensor.any())) for name, tensor in tensors)


# Inference tensors could only be used in inference mode, and centres outlive the call that first needs them.
@torch.inference_mode(False)
@torch.no_grad()
def bias_centers(model: PreTrainedModel, num_positions: int | None = None) -> dict[int, Tensor]:
    """Centres from the weights alone.

    Args:
        model: A decoder with weights. One token is sent through it.
        num_positions: Positions over which the rotated bias is averaged. `None` for the model's context length, at most
            `NUM_POSITIONS`.

    Returns:
        Per layer index `[num_kv_heads, head_dim]` float32, on the layer's device. Layers without a key bias are absent.

    Raises:
        ValueError: `num_positions` is not positive.
    """
    if num_positions is None:
        num_positions = positions_of(model, NUM_POSITIONS)
    if num_positions < 1:
        raise ValueError(f"bias_centers: `num_positions` must be positive, got {num_positions}.")
    if not has_biases(model):
        return {}
    with _probed(model, num_positions):
        keys = keys_of_a_token(model)
    centers = {index: key[0, :, 0].float() for index, key in keys.items()}
    return {index: center for index, center in centers.items() if bool(center.any())}


@contextlib.contextmanager
def _probed(model: nn.Module, num_positions: int) -> Iterator[None]:
    """Hook the model so that a forward computes only what does not depend on its input, averaged over positions."""
    average = functools.partial(_average_positions, num_positions=num_positions)
    with contextlib.ExitStack() as stack:
        for module in model.modules():
            if any(name.endswith("inv_freq") for name, _ in module.named_buffers(recurse=False)):
                stack.enter_context(module.register_forward_hook(average, with_kwargs=True))
            elif not list(module.children()) and _has_weights(module):
                stack.enter_context(module.register_forward_pre_hook(_feed_zeros, with_kwargs=True))
        yield


def _has_weights(module: nn.Module) -> bool:
    """Whether a module has parameters, or the packed weights of GPTQ and AWQ, which are buffers of integers."""
    packed = (each for each in module.buffers(recurse=False) if each.ndim > 1 and not each.is_floating_point())
    return any(True for _ in itertools.chain(module.parameters(recurse=False), packed))


def _feed_zeros(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A forward pre-hook: replaces floating-point inputs by zeros. Token ids and masks stay."""

    def zeroed(arg: Any) -> Any:
        return torch.zeros_like(arg) if isinstance(arg, Tensor) and arg.is_floating_point() else arg

    return tuple(map(zeroed, args)), {name: zeroed(arg) for name, arg in kwargs.items()}


def _average_positions(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any, *, num_positions: int
) -> Any:
    """A forward hook: the mean of what a rotary embedding returns for positions 0, 1, …, `num_positions` - 1."""

    def spread(arg: Any) -> Any:
        if isinstance(arg, Tensor) and not arg.is_floating_point():
            return torch.arange(num_positions, device=arg.device).expand(*arg.shape[:-1], num_positions)
        return arg

    many = module.forward(*map(spread, args), **{name: spread(arg) for name, arg in kwargs.items()})
    if isinstance(many, Tensor):
        return many.mean(-2, keepdim=True)
    return tuple(part.mean(-2, keepdim=True) for part in many)
