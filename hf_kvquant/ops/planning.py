"""`split_plan`: deals sequences of unequal lengths to the thread blocks of the attention kernel.

Without a plan, all sequences are cut into equally many parts, and thread blocks take them in the order of the batch.
Then a GPU waits for one long sequence, or for the long ones that happen to come last. A plan cuts long sequences only,
and puts long parts first, so that short ones fill the gaps at the end. One plan serves all layers of a step. (Where
very many parts follow each other, the kernel may take long and short ones in turns: see plan.cpp.)

Sequences are cut for as many shares as run at once, or for twice as many, of which the second half follows the first:
whichever ends earlier, as estimated from the lengths. Twice as many take 0.78 to 0.84 times as long for 36 sequences of
1k to 16k tokens and 0.90 to 1.02 times for 20 of 4k to 5k, but 0.89 to 1.12 times for 36 of 0.5k to 2k. The estimate
was fitted to 84 measurements with 12 to 256 sequences, in which the choice takes 0.96 times the time of the first way
on average, and always the better way would take 0.95 times. In 68 others, of 8 to 60 sequences, it took 0.95 times:
0.73 to 0.85 times for 24 of 0.5k to 32k, and at most 1.05 times. A plan with a choice takes 11 to 21 us instead of 5 to
10, once a step (H200; `int8`, `int4`, `int4-token`, `k8v4`, `fp8`; 2026-12).
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
# The most `num_slots` where `most_slots` are more.
MAX_CHOSEN_SLOTS = 1024
# Thread blocks of the attention kernel that run on a multiprocessor at once.
CTAS_PER_MULTIPROCESSOR = 2
# Batches of so many sequences, times heads, for each multiprocessor get the smallest thread blocks, and slots for so
# many of them: see is_fine_plan in csrc/cuda/plan/cut.cpp, which knows them by the number of slots. With fewer
# sequences, hardly more than one thread block follows another, and the longest ones come to an end alone: 64 sequences
# of 1k to 16k tokens took 1.2 to 1.6 times as long, 128 of 0.5k to 2k 0.84 to 0.97 times (H200, 8 heads, 2026-12).
MANY_PER_MULTIPROCESSOR, SLOTS_OF_MANY = 7, 6
# Tokens that a thread block would compute in the time between the end of the one before it and its own first token, and
# what more shares must save, since more parts are to be summed.
TOKENS_BETWEEN = 768


def num_slots_of(device: torch.device, num_kv_heads: int, num_sequences: int) -> tuple[int, int]:
    """Shares that run on a GPU at once, for each key-value head, and the most: `num_slots`, `most_slots`."""
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    if num_sequences * num_kv_heads >= MANY_PER_MULTIPROCESSOR * multiprocessors:
        num_slots = SLOTS_OF_MANY * multiprocessors // num_kv_heads
        return num_slots, num_slots
    num_slots = CTAS_PER_MULTIPROCESSOR * multiprocessors // num_kv_heads
    # Where sequences fill all slots twice, hardly any is cut.
    has_choice = num_sequences < 2 * num_slots and num_slots <= MAX_CHOSEN_SLOTS
    return num_slots, (2 if has_choice else 1) * num_slots


def is_uneven(starts: Tensor, num_tokens: int | Tensor) -> bool:
    """Whether sequences that end at the same token begin so far apart that a plan is worth it. Waits for the device.

    Args:
        starts: `[batch]` integers: first position of each sequence.
        num_tokens: Where they end.
    """
    first = starts.min()
    return bool((starts - first).sum() > MIN_PADDING * len(starts) * (num_tokens - first))


def split_plan(lengths: Tensor, num_slots: int, starts: Tensor | None = None, most_slots: int | None = None) -> Tensor:
    """Cut sequences into shares, by their part of all tokens. Nothing here waits for the device.

    Args:
        lengths: `[batch]` int32: tokens of each sequence, padding included.
        num_slots: The most shares that are made of sequences that are cut: as many as run at once.
        starts: `[batch]` int32 on the same device: first position that is not padding, which is left out; `None` for
            0. Negative numbers count as 0. With other starts than in `decode`, a plan is only less even.
        most_slots: The most shares where these end earlier; `None` for `num_slots`.

    Returns:
        `[batch + most_slots, 4]` int32, one row for each thread block of a head: the sequence, or -1 for none; its
        length, padding included; which share of it, plus 2^16 times how many shares it has; and, if it is cut, the
        place of its first share among all of these. Long shares come first.

    Raises:
        ValueError: An argument does not fit; the message names it.
    """
    most = num_slots if most_slots is None else most_slots
    plan: Tensor = torch_ops.split_plan(lengths, starts, num_slots, most, MIN_TOKENS, TOKENS_BETWEEN)
    return plan


def split_plan_reference(
    lengths: Tensor, starts: Tensor | None, num_slots: int, most_slots: int, min_tokens: int, tokens_between: int
) -> Tensor:
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
    most = MAX_SLOTS if 0 < num_slots <= MAX_CHOSEN_SLOTS else num_slots
    if not num_slots <= most_slots <= most:
        raise ValueError(
            f"split_plan: `most_slots` must be between {num_slots} and {most} for {num_slots} slots, got {most_slots}."
        )
    if min_tokens <= 0:
        raise ValueError(f"split_plan: `min_tokens` must be positive, got {min_tokens}.")
    if tokens_between < 0:
        raise ValueError(f"split_plan: `tokens_between` must be at least 0, got {tokens_between}.")
    held = lengths.clamp(min=0).long()
    if starts is not None:
        held = (held - starts.clamp(min=0)).clamp(min=0)
    chosen: int | Tensor = num_slots
    if most_slots > num_slots:
        few, many = (
            _estimated_end(held, *_shares(held, slots, most_slots, min_tokens), num_slots, tokens_between)
            for slots in (num_slots, most_slots)
        )
        chosen = torch.where(many + tokens_between < few, most_slots, num_slots)
    shares, order, row, is_used = _shares(held, chosen, most_slots, min_tokens)
    ends, slots = shares.cumsum(0), torch.where(shares > 1, shares, 0)
    index, sequence = torch.arange(len(row), device=row.device), order[row]
    columns = (
        torch.where(is_used, sequence, -1),
        torch.where(is_used, lengths[sequence], 0),
        torch.where(is_used, index - (ends - shares)[row] + (shares[row] << 16), 0),
        torch.where(is_used, (slots.cumsum(0) - slots)[row], 0),
    )
    return torch.stack(columns, dim=1).int()


def _shares(
    held: Tensor, num_slots: int | Tensor, most_slots: int, min_tokens: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Shares by sequence, the longest first; these sequences; and whose share each entry is, and whether it is used."""
    shares = held * num_slots // held.sum().clamp(min=1)
    shares = shares.minimum(held // min_tokens).clamp(min=1)
    order = (-(-held // shares)).argsort(descending=True, stable=True)
    shares = shares[order]
    index = torch.arange(len(held) + most_slots, device=held.device)
    row = torch.searchsorted(shares.cumsum(0), index, right=True)
    return shares, order, row.clamp(max=len(held) - 1), row < len(held)


def _estimated_end(
    held: Tensor, shares: Tensor, order: Tensor, row: Tensor, is_used: Tensor, num_slots: int, tokens_between: int
) -> Tensor:
    """When the last share ends, in tokens of one thread block.

    The first `num_slots` shares start at once. Of these the shortest ends first, and the longest of the others follows
    it, and so on.
    """
    tokens = torch.where(is_used, -(-held[order] // shares)[row], 0)
    tokens = torch.nn.functional.pad(tokens, (0, max(0, 2 * num_slots - len(tokens))))
    first, second = tokens[:num_slots], tokens[num_slots : 2 * num_slots]
    ends = first.flip(0)
    ends = torch.where(second > 0, ends + second + tokens_between, ends)
    return torch.maximum(ends.max(), held.sum() // num_slots)


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
