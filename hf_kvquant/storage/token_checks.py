"""Refuses tokens that a layer cannot take, before anything is changed."""

from __future__ import annotations

import torch
from torch import Tensor

from ..config import LayerFormats
from ..spec.key_transform import KeyTransform
from .buffers import Buffers

SERVED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def check_served(
    name: str, formats: LayerFormats, key_transform: KeyTransform | None, key: Tensor, value: Tensor
) -> None:
    """Refuse the first tokens of a layer if it cannot hold such.

    Args:
        name: Of the layer, for the message.
        formats: Of keys and of values.
        key_transform: Of the layer.
        key, value: The tokens.

    Raises:
        TypeError: The dtype is not supported.
        ValueError: A shape or device is not supported.
    """
    for side, x, kv_format in (("key", key, formats.key), ("value", value, formats.value)):
        if x.ndim != 4:
            raise ValueError(
                f"{name}: `{side}` must be [batch, num_kv_heads, tokens, head_dim], got shape {list(x.shape)}."
            )
        if x.dtype not in SERVED_DTYPES:
            raise TypeError(
                f"{name}: `{side}` must be float32, bfloat16 or float16, got {x.dtype}. "
                "Load the model in one of these dtypes."
            )
        kv_format.num_groups(x.shape[-1])
    if key.shape[:3] != value.shape[:3] or key.dtype != value.dtype or key.device != value.device:
        raise ValueError(
            f"{name}: `value` must have the batch, heads, tokens, dtype and device of `key` "
            f"({list(key.shape[:3])}, {key.dtype}, {key.device}), "
            f"got {list(value.shape[:3])}, {value.dtype}, {value.device}."
        )
    if key_transform is not None:
        key_transform.check_fits(name, key.shape[1], key.shape[3])


def fits(buffers: Buffers, key: Tensor, value: Tensor) -> bool:
    """Whether tokens match those held. Runs in every layer and step, so it only compares; `refuse` explains."""
    (batch, num_kv_heads, key_dim, value_dim), dtype, device = buffers.shape, buffers.dtype, buffers.device
    shape = key.shape
    return (
        len(shape) == 4
        and shape == (batch, num_kv_heads, shape[2], key_dim)
        and value.shape == (batch, num_kv_heads, shape[2], value_dim)
        and key.dtype == dtype
        and value.dtype == dtype
        and key.device == device
        and value.device == device
    )


def refuse(name: str, buffers: Buffers, key: Tensor, value: Tensor) -> None:
    """Raise for the first thing that `fits` found wrong.

    Raises:
        ValueError: A shape, dtype or device differs.
    """
    batch, num_kv_heads, *head_dims = buffers.shape
    for side, x, head_dim in (("key", key, head_dims[0]), ("value", value, head_dims[1])):
        if x.ndim != 4 or (x.shape[0], x.shape[1], x.shape[3]) != (batch, num_kv_heads, head_dim):
            raise ValueError(
                f"{name}: `{side}` must have batch {batch}, {num_kv_heads} key-value heads and head_dim "
                f"{head_dim} like the cache, got shape {list(x.shape)}. Start a new cache for another batch or "
                "model, or use reset, batch_select_indices or batch_repeat_interleave."
            )
        if x.dtype != buffers.dtype or x.device != buffers.device:
            raise ValueError(
                f"{name}: `{side}` must be {buffers.dtype} on {buffers.device} like the cache, "
                f"got {x.dtype} on {x.device}. Start a new cache after moving or casting the model."
            )
    if key.shape[2] != value.shape[2]:
        raise ValueError(f"{name}: `value` must have {key.shape[2]} tokens like `key`, got {value.shape[2]}.")


def checked_transform(name: str, key_transform: KeyTransform | None) -> KeyTransform | None:
    """A key transform for a layer of this name; `None` for the identity, so that ops skip it.

    Raises:
        TypeError: It is not a KeyTransform.
    """
    if key_transform is not None and not isinstance(key_transform, KeyTransform):
        raise TypeError(
            f"{name}: `key_transform` must be a KeyTransform or None, got {type(key_transform).__name__}. "
            "hf_kvquant.key_transforms returns those of a model."
        )
    return None if key_transform is None or key_transform.is_identity else key_transform
