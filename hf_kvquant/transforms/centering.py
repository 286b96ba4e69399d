"""Centres of keys: the constant per layer, key-value head and channel that is subtracted before keys are quantised.

Any constant is exact, since attention adds `query · center` back; a good one is what the keys of a head have in common.
It comes from the weights alone, where the model has a key bias: one token is sent through the model with every
projection and norm fed zeros, so that what arrives in the cache is the bias, and with the rotary embedding averaged
over positions, so that it arrives as RoPE leaves it on average. For a pair of channels of frequency ω that is

    center = β · e^{iω(T-1)/2} · sin(ωT/2) / (T · sin(ω/2))         β: the bias of the pair, a complex number

over T positions: near β for slow pairs, near 0 for fast ones. The model's own code does the projecting, splitting,
norming and rotating, so fused projections, partial, interleaved and scaled RoPE need nothing here. A norm behind a
biased projection leaves no constant that the weights could tell: it is fed zeros too, and answers with its own bias.
The other source is calibration text (`smoothing.py`). What layers make of centres is decided in `of_model.py`.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, EncoderDecoderCache

from ..cache import layers_of
from ..text_config import positions_of, text_config_of

# T of the formula above, at most, and no more than a model was made for: pairs that turn about once in so many tokens,
# or more, are left to the rotation. A centre over more positions than a text has fits its first tokens badly (reference
# model, bias of norm 100 in the slowest two pairs, texts of 2048 tokens: int4 diverges 1.20 times as much as without
# the bias with T = 2048, 1.46 times with 4096).
NUM_POSITIONS = 4096


def has_biases(model: nn.Module) -> bool:
    """Whether anything in a model adds a constant that is not zero, so that its keys may have one in common."""
    tensors = itertools.chain(model.named_parameters(), model.named_buffers())
    # What is offloaded cannot be looked at from here.
    return any(name.endswith("bias") and (tensor.is_meta or bool(tensor.any())) for name, tensor in tensors)


# Centres outlive whatever they were first wanted for, and tensors of inference mode could be used in it only.
@torch.inference_mode(False)
@torch.no_grad()
def bias_centers(model: PreTrainedModel, num_positions: int | None = None) -> dict[int, Tensor]:
    """Centres from the weights alone.

    Args:
        model: A decoder with weights; left as it was. One token is sent through it.
        num_positions: Positions that a rotated bias is averaged over; `None` for what the model was made for, at most
            `NUM_POSITIONS`.

    Returns:
        Per layer index `[num_kv_heads, head_dim]` float32, on the layer's device; layers without a key bias are absent.

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
        keys = _keys_of_a_token(model)
    centers = {index: key[0, :, 0].float() for index, key in keys.items()}
    return {index: center for index, center in centers.items() if bool(center.any())}


@torch.no_grad()
def num_kv_heads(model: PreTrainedModel) -> dict[int, int]:
    """Heads of the keys that a forward in this process makes, by layer index. One token is sent through the model."""
    return {index: key.shape[1] for index, key in _keys_of_a_token(model).items()}


def _keys_of_a_token(model: PreTrainedModel) -> dict[int, Tensor]:
    """What arrives in the cache for one token: per layer that keeps all keys `[1, num_kv_heads, 1, head_dim]`."""
    cache = whole_cache(model)
    decoder: Any = model
    given: Cache = cache
    if model.config.is_encoder_decoder:
        # Without an encoder's states, most leave cross-attention out; Moonshine runs it, on what its cache is for.
        decoder, given = model.get_decoder(), EncoderDecoderCache(cache, DynamicCache())
    token = torch.zeros((1, 1), dtype=torch.long, device="cpu" if model.device.type == "meta" else model.device)
    with evaluating(model):
        decoder(input_ids=token, attention_mask=torch.ones_like(token), past_key_values=given, use_cache=True)
    whole = {
        i: layer for i, layer in enumerate(cache.layers) if isinstance(layer, DynamicLayer) and not layer.is_sliding
    }
    return {i: layer.keys for i, layer in whole.items() if layer.keys is not None and layer.keys.numel() > 0}


def whole_cache(model: PreTrainedModel) -> DynamicCache:
    """A cache of transformers that keeps all keys, those that a sliding window has left too; masks hide them."""
    text_config = text_config_of(model)
    cache = DynamicCache(config=text_config)
    for index, layer_type in enumerate(layers_of(text_config)[0]):
        if layer_type == "sliding_attention":
            cache.layers[index] = DynamicLayer()
    return cache


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """The model in evaluation mode and not compiled: compiled code does not see hooks, and it is for other shapes."""
    was_training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        for module in was_training:
            module.training = True


@contextlib.contextmanager
def _probed(model: nn.Module, num_positions: int) -> Iterator[None]:
    """Hooks that leave of a forward pass what does not depend on the input, averaged over positions."""
    handles = []
    try:
        for module in model.modules():
            if _is_rotary(module):
                hook = functools.partial(_average_positions, num_positions=num_positions)
                handles.append(module.register_forward_hook(hook, with_kwargs=True))
            elif not list(module.children()) and list(module.parameters(recurse=False)):
                handles.append(module.register_forward_pre_hook(_feed_zeros, with_kwargs=True))
        yield
    finally:
        for handle in handles:
            handle.remove()


def _is_rotary(module: nn.Module) -> bool:
    return any(name.endswith("inv_freq") for name, _ in module.named_buffers(recurse=False))


def _feed_zeros(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Zeros in place of numbers; token ids and masks stay."""

    def zeroed(arg: Any) -> Any:
        return torch.zeros_like(arg) if isinstance(arg, Tensor) and arg.is_floating_point() else arg

    return tuple(map(zeroed, args)), {name: zeroed(arg) for name, arg in kwargs.items()}


def _average_positions(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any, *, num_positions: int
) -> Any:
    """What a rotary embedding returns for positions 0, 1, …, averaged over them."""

    def spread(arg: Any) -> Any:
        if isinstance(arg, Tensor) and not arg.is_floating_point():
            return torch.arange(num_positions, device=arg.device).expand(*arg.shape[:-1], num_positions)
        return arg

    many = module.forward(*map(spread, args), **{name: spread(arg) for name, arg in kwargs.items()})
    if isinstance(many, Tensor):
        return many.mean(-2, keepdim=True)
    return tuple(part.mean(-2, keepdim=True) for part in many)
