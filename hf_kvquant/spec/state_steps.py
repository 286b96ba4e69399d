"""One token of layers that keep a state instead of keys and values: what the kernels for it compute, in PyTorch.

A state lies in a slot: `[slots, …]` are the states of all. `read_slots` and `write_slots` say which slot each sequence
of a batch reads and writes, `[batch]` int64 each. Without them, sequence b has slot b. Several sequences may write the
same slot only if nobody reads it.

A recurrent state is float32 or float16. Sums are float32 either way. What is beyond the largest float16 becomes that
number, since infinity would make every later token NaN.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .reference import check_shape

NORM_EPS = 1e-6  # of vectors in the gated delta rule
MAX_CONV_WIDTH = 8


def conv_step(
    x: Tensor,
    state: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    has_silu: bool,
    read_slots: Tensor | None,
    write_slots: Tensor | None,
) -> Tensor:
    """One token of a causal convolution along each channel, and its SiLU. The state takes the token in.

    Args:
        x: `[batch, channels, 1]`: the new inputs.
        state: `[slots, channels, state_len]`: the newest inputs, oldest first. Changed in place.
        weight: `[channels, width]`, with `width - 1 <= state_len`. Sums are rounded to its dtype.
        bias: `[channels]`; `None` for none.
        has_silu: Whether SiLU follows.
        read_slots: See the module.
        write_slots: Likewise.

    Returns:
        Like `x`, new memory.

    Raises:
        ValueError: A shape does not fit.
    """
    batch, channels = _sizes("conv_step", "x", x, (None, None, 1))[:2]
    state_len = check_conv("conv_step", channels, state, weight)
    seen = torch.cat((_read("conv_step", state, batch, read_slots, write_slots), x.to(state.dtype)), dim=-1)
    seen = seen.to(weight.dtype)
    _write(state, seen[:, :, -state_len:], write_slots)
    out = F.conv1d(seen, weight.unsqueeze(1), bias, groups=channels)[:, :, -1:]
    return (F.silu(out) if has_silu else out).to(x.dtype).contiguous()


def delta_step(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    target: Tensor,
    normalizes: bool,
    read_slots: Tensor | None,
    write_slots: Tensor | None,
) -> Tensor:
    """One token of the gated delta rule (Yang et al. 2024, arXiv:2412.06464), in float32.

    For each head, with S its matrix: S = exp(g) S, S += k (beta (v - Sᵀk))ᵀ, and Sᵀq / √key_dim is the result. It comes
    from S before S is rounded to the dtype of `target`.

    Args:
        query: `[batch, 1, num_k_heads, key_dim]`.
        key: Like `query`. Each of its heads serves equally many heads of values, in order.
        value: `[batch, 1, num_heads, value_dim]`.
        g: `[batch, 1, num_heads]`: logarithms of decays.
        beta: Like `g`.
        state: `[slots, num_heads, key_dim, value_dim]` float32 or float16.
        target: Like `state`: takes the new states. May be `state` itself.
        normalizes: Whether queries and keys are first divided by the root of their sum of squares, plus `NORM_EPS`.
        read_slots: See the module: of `state`.
        write_slots: Likewise, of `target`.

    Returns:
        `[batch, 1, num_heads, value_dim]`, dtype of `query`.

    Raises:
        ValueError: A shape or dtype does not fit.
    """
    batch, _, k_heads, key_dim = _sizes("delta_step", "query", query, (None, 1, None, None))
    _sizes("delta_step", "key", key, (batch, 1, k_heads, key_dim))
    _, _, heads, value_dim = _sizes("delta_step", "value", value, (batch, 1, None, None))
    if k_heads == 0 or heads % k_heads:
        raise ValueError(f"delta_step: `value` must have a multiple of {k_heads} heads, those of `key`, got {heads}.")
    for name, x in (("g", g), ("beta", beta)):
        _sizes("delta_step", name, x, (batch, 1, heads))
    for name, x in (("state", state), ("target", target)):
        _sizes("delta_step", name, x, (None, heads, key_dim, value_dim))
        if x.dtype not in (torch.float16, torch.float32, torch.float64):
            raise ValueError(f"delta_step: `{name}` must be float32 or float16, got {x.dtype}.")
    if len(target) != len(state):
        raise ValueError(f"delta_step: `target` must have {len(state)} slots like `state`, got {len(target)}.")
    if target.dtype != state.dtype:
        raise ValueError(f"delta_step: `target` must be {state.dtype} like `state`, got {target.dtype}.")
    held = _read("delta_step", state, batch, read_slots, write_slots)
    held = held.to(torch.promote_types(state.dtype, torch.float32))
    wide_query, wide_key = (x[:, 0].to(held.dtype).repeat_interleave(heads // k_heads, 1) for x in (query, key))
    if normalizes:
        wide_query, wide_key = (x * (x.square().sum(-1, True) + NORM_EPS).rsqrt() for x in (wide_query, wide_key))
    held = held * g[:, 0].to(held.dtype).exp()[..., None, None]
    recalled = (held * wide_key.unsqueeze(-1)).sum(-2)
    change = (value[:, 0].to(held.dtype) - recalled) * beta[:, 0].to(held.dtype).unsqueeze(-1)
    held = held + wide_key.unsqueeze(-1) * change.unsqueeze(-2)
    _write(target, held, write_slots)
    out: Tensor = (held * (wide_query / key_dim**0.5).unsqueeze(-1)).sum(-2)
    return out.to(query.dtype).unsqueeze(1)


def delta_gates(
    x: Tensor, decay_weight: Tensor, beta_weight: Tensor, A_log: Tensor, dt_bias: Tensor, beta_factor: float
) -> tuple[Tensor, Tensor]:
    """The gates of the gated delta rule (Yang et al. 2024, arXiv:2412.06464), of any number of tokens.

    Decays are those of Mamba-2 (Dao and Gu 2024, arXiv:2405.21060). Projections are rounded to the dtype of `x`.

    Args:
        x: `[batch, tokens, inputs]`.
        decay_weight: `[heads, inputs]`, dtype of `x`.
        beta_weight: Like `decay_weight`.
        A_log: `[heads]`: logarithms of the rates of decay.
        dt_bias: `[heads]`.
        beta_factor: What betas are multiplied by: 2 in models that allow negative eigenvalues, else 1.

    Returns:
        g: `[batch, tokens, heads]`, float32 at least: -exp(A_log) softplus(x · decay_weight + dt_bias), the logarithms
            of decays.
        beta: `[batch, tokens, heads]`, dtype of `x`: beta_factor · sigmoid(x · beta_weight).

    Raises:
        ValueError: A shape or dtype does not fit.
    """
    inputs = _sizes("delta_gates", "x", x, (None, None, None))[2]
    heads = _sizes("delta_gates", "decay_weight", decay_weight, (None, inputs))[0]
    _sizes("delta_gates", "beta_weight", beta_weight, (heads, inputs))
    for name, numbers in (("A_log", A_log), ("dt_bias", dt_bias)):
        _sizes("delta_gates", name, numbers, (heads,))
    for name, weight in (("decay_weight", decay_weight), ("beta_weight", beta_weight)):
        if weight.dtype != x.dtype:
            raise ValueError(f"delta_gates: `{name}` must be {x.dtype} like `x`, got {weight.dtype}. Cast it.")
    wide = torch.promote_types(x.dtype, torch.float32)
    g = -A_log.to(wide).exp() * F.softplus(F.linear(x, decay_weight).to(wide) + dt_bias)
    return g, F.linear(x, beta_weight).sigmoid() * beta_factor


def check_conv(where: str, channels: int, state: Tensor, weight: Tensor) -> int:
    """The `state_len` of a convolution, whose weight and state must fit its channels."""
    width = _sizes(where, "weight", weight, (channels, None))[1]
    state_len = _sizes(where, "state", state, (None, channels, None))[2]
    if not max(width - 1, 1) <= state_len <= MAX_CONV_WIDTH:
        raise ValueError(
            f"{where}: `state` must have from {max(width - 1, 1)} to {MAX_CONV_WIDTH} inputs of each channel, got "
            f"{list(state.shape)}."
        )
    return state_len


def check_slots(where: str, count: int, read_slots: Tensor, write_slots: Tensor) -> None:
    """Slots must be `[count]` int64."""
    for name, slots in (("read_slots", read_slots), ("write_slots", write_slots)):
        if list(slots.shape) != [count] or slots.dtype != torch.int64:
            raise ValueError(
                f"{where}: `{name}` must be [{count}] torch.int64, got {list(slots.shape)} {slots.dtype}. One slot for "
                "each sequence."
            )


def _sizes(where: str, name: str, x: Tensor, sizes: tuple[int | None, ...]) -> tuple[int, ...]:
    """The sizes of a tensor, which must be these; `None` stands for any."""
    wanted = ", ".join("any" if size is None else str(size) for size in sizes)
    check_shape(where, name, x, f"[{wanted}]", sizes)
    return tuple(x.shape)


def _read(where: str, state: Tensor, batch: int, read_slots: Tensor | None, write_slots: Tensor | None) -> Tensor:
    """The states of a batch, `[batch, …]`."""
    if (read_slots is None) != (write_slots is None):
        raise ValueError(f"{where}: `read_slots` and `write_slots` must both be given or both be None, got one.")
    if read_slots is None or write_slots is None:
        if len(state) != batch:
            raise ValueError(
                f"{where}: `state` must have {batch} sequences like the tokens without slots, got {len(state)}."
            )
        return state
    check_slots(where, batch, read_slots, write_slots)
    return state.index_select(0, read_slots)


def stored(new: Tensor, dtype: torch.dtype) -> Tensor:
    """States as a slot of this dtype holds them."""
    if dtype is torch.float16 and new.dtype is not torch.float16:
        largest = torch.finfo(dtype).max
        new = new.clamp(-largest, largest)  # NaN stays
    return new.to(dtype)


def _write(state: Tensor, new: Tensor, slots: Tensor | None) -> None:
    new = stored(new, state.dtype)
    if slots is None:
        state.copy_(new)
    else:
        state.index_copy_(0, slots, new)
