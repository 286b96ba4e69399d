"""Split plans for the decode steps of padded batches: which steps get one, and that the layers of a step share it.

A plan is made from the lengths on the device, by the first layer of a step that attends, and kept beside these lengths
until they change: by the next step, a crop, a replay, or a layer that counts alone. A captured step makes its plan
anew in every replay, since the kernel that makes it is part of the graph. Compiled steps get none: each layer would
make its own. `ops/planning.py` explains plans and makes them; its `MIN_PADDING` says from when on they are used.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .. import ops

# With fewer sequences for each share that a GPU computes at once, its own cut of all sequences is the better one. On an
# H100 with 8 heads, so with 33 shares, steps of int8 and int4 took 0.94 and 0.89 of the time with a plan for 64
# sequences of up to 16k tokens, 1.05 and 1.16 for 16 of 1k to 8k, and 1.01 and 1.02 for 4 of them (2026-11).
MIN_SEQUENCES_PER_SLOT = 1


def step_plan(
    operands: ops.Operands,
    num_kv_heads: int,
    lengths: Tensor,
    plans: dict[int, Tensor],
    query: Tensor,
    starts: Tensor | None,
    options: Mapping[str, Any],
) -> Tensor | None:
    """The split plan for a step over a layer whose sequences are uneven; `None` if it must not have or use one.

    Args:
        operands: Of the layer.
        num_kv_heads: Of the layer.
        lengths: `[batch]` int32: tokens held, including the step's.
        plans: Made of these lengths already, by number of key-value heads. A new one is added. With the starts of
            another layer, a plan is as correct.
        query: `[batch, num_q_heads, q_len, head_dim]`.
        starts: `[batch]` int32: first position that is not padding; `None` for 0.
        options: Of `LayerStore.attend`. With a window, all long sequences have the same work; a fixed number of splits
            promises the same bits in every batch.
    """
    is_step = query.shape[0] > 1 and query.shape[2] == 1 and starts is not None
    is_served = operands.takes_split_plan and query.dtype != torch.float32
    if not (is_step and is_served) or options.get("sliding_window") or options.get("num_splits"):
        return None
    if torch.compiler.is_compiling():
        return None
    num_slots, most_slots = ops.num_slots_of(lengths.device, num_kv_heads, query.shape[0])
    if query.shape[0] < MIN_SEQUENCES_PER_SLOT * num_slots:
        return None
    if num_kv_heads not in plans:
        plans[num_kv_heads] = ops.split_plan(lengths, num_slots, starts, most_slots)
    return plans[num_kv_heads]
