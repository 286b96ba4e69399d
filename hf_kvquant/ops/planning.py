"""`split_plan`: deals sequences of unequal lengths to the thread blocks of the attention kernel.

Without a plan, all sequences are cut into equally many parts, and thread blocks take them in the order of the batch.
Then a GPU waits for one long sequence, or for the long ones that happen to come last. A plan cuts long sequences only,
and puts long parts first, so that short ones fill the gaps at the end. One plan serves all layers of a step. (Where
very many parts follow each other, the kernel may take long and short ones in turns: see plan.cpp.)
"""

from __future__ import annotations

import torch
from torch import Tensor

from .._ops import ops as torch_ops

# A share of fewer tokens takes longer to combine than it saves.
MIN_TOKENS = 256
# How much of a batch must be padding for a step over contiguous planes to get a plan. The kernel's own cut knows only
# the capacity, but suits a batch of nearly equal sequences. 1 turns plans off, except over pages.
MIN_PADDING = 0.125
MAX_SLOTS = 2**15 - 1
# Thread blocks of the attention kernel that run on a multiprocessor at once; see planned_cut in csrc/cuda/plan/cut.cpp,
# which tells from the number of slots how many these are.
CTAS_PER_MULTIPROCESSOR = 2
# The same of the smallest, for batches of so many sequences, times heads, for each multiprocessor. With fewer, hardly
# more than one follows another, and the longest ones come to an end alone: 64 sequences of 1k to 16k tokens took 1.2 to
# 1.6 times as long, 128 of 0.5k to 2k 0.84 to 0.97 times (H200, 8 heads, 2026-12).
SMALL_CTAS_PER_MULTIPROCESSOR, MANY_PER_MULTIPROCESSOR = 4, 7


def num_slots_of(device: torch.device, num_kv_heads: int, num_sequences: int) -> int:
    """Shares that fill a GPU, for each key-value head: the argument of `split_plan`."""
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    are_many = num_sequences * num_kv_heads >= MANY_PER_MULTIPROCESSOR * multiprocessors
    ctas = SMALL_CTAS_PER_MULTIPROCESSOR if are_many else CTAS_PER_MULTIPROCESSOR
    return ctas * multiprocessors // num_kv_heads


def is_uneven(starts: Tensor, num_tokens: int | Tensor) -> bool:
    """Whether sequences that end at the same token begin so far apart that a plan is worth it. Waits for the device.

    Args:
        starts: `[batch]` integers: first position of each sequence.
        num_tokens: Where they end.
    """
    first = starts.min()
    return bool((starts - first).sum() > MIN_PADDING * len(starts) * (num_tokens - first))


def split_plan(lengths: Tensor, num_slots: int, starts: Tensor | None = None) -> Tensor:
    """Cut sequences into shares, by their part of all tokens. Nothing here waits for the device.

    Args:
        lengths: `[batch]` int32: tokens of each sequence, padding included.
        num_slots: The most shares that are made of sequences that are cut.
        starts: `[batch]` int32 on the same device: first position that is not padding, which is left out; `None` for
            0. Negative numbers count as 0. With other starts than in `decode`, a plan is only less even.

    Returns:
        `[batch + num_slots, 4]` int32, one row for each thread block of a head: the sequence, or -1 for none; its
        length, padding included; which share of it, plus 2^16 times how many shares it has; and, if it is cut, the
        place of its first share among all of these. Long shares come first.

    Raises:
        ValueError: An argument does not fit; the message names it.
    """
    plan: Tensor = torch_ops.split_plan(lengths, starts, num_slots, MIN_TOKENS)
    return plan


def split_plan_reference(lengths: Tensor, starts: Tensor | None, num_slots: int, min_tokens: int) -> Tensor:
    """The op without a kernel."""
    if lengths.ndim != 1 or lengths.dtype != torch.int32 or not lengths.is_contiguous() or len(lengths) == 0:
        raise ValueError(
            "split_plan: `lengths` must be [batch] torch.int32 and contiguous, and not empty, got "
            f"{list(lengths.shape)} {lengths.dtype}."
        )
    if starts is not None:
        _check_starts(starts, lengths)
    if not 0 <= num_slots <= MAX_SLOTS:
        raise ValueError(f"split_plan: `num_slots` must be between 0 and {MAX_SLOTS}, got {num_slots}.")
    if min_tokens <= 0:
        raise ValueError(f"split_plan: `min_tokens` must be positive, got {min_tokens}.")
    held = lengths.clamp(min=0).long()
    if starts is not None:
        held = (held - starts.clamp(min=0)).clamp(min=0)
    shares = held * num_slots // held.sum().clamp(min=1)
    shares = shares.minimum(held // min_tokens).clamp(min=1)
    order = (-(-held // shares)).argsort(descending=True, stable=True)
    shares = shares[order]
    ends = shares.cumsum(0)
    slots = torch.where(shares > 1, shares, 0)
    index = torch.arange(len(lengths) + num_slots, device=lengths.device)
    row = torch.searchsorted(ends, index, right=True)
    is_used, row = row < len(lengths), row.clamp(max=len(lengths) - 1)
    sequence = order[row]
    columns = (
        torch.where(is_used, sequence, -1),
        torch.where(is_used, lengths[sequence], 0),
        torch.where(is_used, index - (ends - shares)[row] + (shares[row] << 16), 0),
        torch.where(is_used, (slots.cumsum(0) - slots)[row], 0),
    )
    return torch.stack(columns, dim=1).int()


def _check_starts(starts: Tensor, lengths: Tensor) -> None:
    if starts.device != lengths.device:
        raise ValueError(
            f"split_plan: `starts` must be on the device of `lengths`, {lengths.device}, got {starts.device}. "
            "Move it there."
        )
    if starts.shape != lengths.shape or starts.dtype != torch.int32 or not starts.is_contiguous():
        raise ValueError(
            f"split_plan: `starts` must be {list(lengths.shape)} torch.int32 and contiguous like `lengths`, got "
            f"{list(starts.shape)} {starts.dtype}."
        )
