"""Many tokens of layers that keep a state: what the kernels for it compute, in PyTorch.

The tokens of several sequences lie in one row, one sequence behind the other. `begins`, `[sequences + 1]` int64, has
the first token of each, and where the last one ends: tokens from there on belong to none and give zeros. `read_slots`
and `write_slots` are those of `state_steps.py`, here always given. A slot that is written may be read by no other
sequence.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from .reference import check_shape
from .state_steps import check_conv, check_slots, delta_step, stored


def conv_chunks(
    x: Tensor,
    state: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    has_silu: bool,
    begins: Tensor,
    read_slots: Tensor,
    write_slots: Tensor,
) -> Tensor:
    """A causal convolution along each channel, and its SiLU. States take the newest inputs in.

    Args:
        x: `[1, channels, tokens]`: the inputs.
        state: `[slots, channels, state_len]`: the inputs before, oldest first. Changed in place.
        weight: `[channels, width]`, with `width - 1 <= state_len`. Sums are rounded to its dtype.
        bias: `[channels]`; `None` for none.
        has_silu: Whether SiLU follows.
        begins: See the module.
        read_slots: Likewise.
        write_slots: Likewise.

    Returns:
        `[1, tokens, channels]`, dtype of `x`.

    Raises:
        ValueError: A shape does not fit.
    """
    where = "conv_chunks"
    check_shape(where, "x", x, "[1, any, any]", (1, None, None))
    channels = x.shape[1]
    state_len = check_conv(where, channels, state, weight)
    out = x.new_zeros(1, x.shape[2], channels)
    for tokens, read, write in _sequences(where, begins, read_slots, write_slots):
        seen = torch.cat((state[read : read + 1], x[:, :, tokens].to(state.dtype)), dim=-1)
        state[write] = seen[0, :, -state_len:]
        if tokens.start == tokens.stop:
            continue
        new = F.conv1d(seen.to(weight.dtype), weight.unsqueeze(1), bias, groups=channels)
        new = new[:, :, tokens.start - tokens.stop :]
        out[:, tokens] = (F.silu(new) if has_silu else new).to(x.dtype).transpose(1, 2)
    return out


def delta_chunks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    normalizes: bool,
    begins: Tensor,
    read_slots: Tensor,
    write_slots: Tensor,
) -> Tensor:
    """The gated delta rule: `delta_step` for one token after the other.

    Args:
        query: `[1, tokens, num_k_heads, key_dim]`.
        key: Like `query`.
        value: `[1, tokens, num_heads, value_dim]`.
        g: `[1, tokens, num_heads]`: logarithms of decays.
        beta: Like `g`.
        state: `[slots, num_heads, key_dim, value_dim]` float32 or float16. Changed in place, and rounded to float16
            behind the last token of a sequence alone.
        normalizes: See `delta_step`.
        begins: See the module.
        read_slots: Likewise.
        write_slots: Likewise.

    Returns:
        `[1, tokens, num_heads, value_dim]`, dtype of `query`.

    Raises:
        ValueError: A shape or dtype does not fit.
    """
    where = "delta_chunks"
    vectors = {"query": query, "key": key, "value": value, "g": g, "beta": beta}
    for name, x in vectors.items():
        sizes = (1, query.shape[1] if query.ndim > 1 else None, *[None] * (1 if name in ("g", "beta") else 2))
        check_shape(where, name, x, f"[{', '.join('any' if size is None else str(size) for size in sizes)}]", sizes)
    out = torch.zeros_like(value, dtype=query.dtype, memory_format=torch.contiguous_format)
    for tokens, read, write in _sequences(where, begins, read_slots, write_slots):
        held = state[read : read + 1].to(torch.promote_types(state.dtype, torch.float32), copy=True)
        for i in range(tokens.start, tokens.stop):
            token = {name: x[:, i : i + 1] for name, x in vectors.items()}
            out[:, i : i + 1] = delta_step(
                **token, state=held, target=held, normalizes=normalizes, read_slots=None, write_slots=None
            )
        state[write] = stored(held[0], state.dtype)
    return out


def _sequences(where: str, begins: Tensor, read_slots: Tensor, write_slots: Tensor) -> Iterator[tuple[slice, int, int]]:
    """The tokens of each sequence, the slot that it reads and the one that it writes."""
    if begins.ndim != 1 or begins.dtype != torch.int64 or len(begins) < 2:
        raise ValueError(
            f"{where}: `begins` must be [sequences + 1] torch.int64, got {list(begins.shape)} {begins.dtype}. The "
            "first token of each sequence, and the end of the last."
        )
    check_slots(where, len(begins) - 1, read_slots, write_slots)
    spans = [slice(first, end) for first, end in itertools.pairwise(begins.tolist())]
    yield from zip(spans, read_slots.tolist(), write_slots.tolist(), strict=True)
