"""`Group`: requests of one forward that attend together. The host splits a forward into groups once, for all layers."""

from __future__ import annotations

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers.generation.continuous_batching.requests import FutureRequestState


@dataclasses.dataclass(frozen=True)
class Request:
    """What one request brings to a forward.

    Attributes:
        past: Tokens that the cache holds already.
        q_len: New tokens.
        pages: `[pages]` int32 on the host: numbers of its pages, with room for all of these.
        slot: Number of its slot for states; `None` if no layer has a state.
    """

    past: int
    q_len: int
    pages: Tensor
    slot: int | None = None


@dataclasses.dataclass(frozen=True)
class Group:
    """Requests with equally many new tokens. Either all of them have a past, or none.

    Attributes:
        tokens: Where their tokens are among all tokens of the forward: a slice, or `[requests * q_len]` int64.
        q_len: New tokens of each.
        page_table: `[requests, pages]` int32, -1 where a request has no page.
        lengths: `[requests]` int32: tokens held, the new ones included.
        has_past: Whether tokens from earlier forwards are attended to.
        split_plan: How a GPU deals them to its thread blocks: see `ops.split_plan`; `None` where it decides by itself.
        read_slots: `[requests]` int64: slots from which their states are read; `None` if no layer has a state.
        write_slots: Likewise, to which they are written. Others for padding alone: see `StateAllocator`.
    """

    tokens: slice | Tensor
    q_len: int
    page_table: Tensor
    lengths: Tensor
    has_past: bool
    split_plan: Tensor | None = None
    read_slots: Tensor | None = None
    write_slots: Tensor | None = None

    def take(self, x: Tensor) -> Tensor:
        """Its part of `[1, heads, tokens, head_dim]`, as `[requests, heads, q_len, head_dim]`."""
        taken = x[0].transpose(0, 1)[self.tokens]
        return taken.view(-1, self.q_len, *taken.shape[1:]).transpose(1, 2)


def past_of(request: FutureRequestState) -> int:
    """Tokens that the cache holds of a request before the step that it is prepared for."""
    past: int = request.state.position_offset - request.query_length
    return past


def groups_of(requests: Iterable[Request], device: torch.device) -> list[Group]:
    """Split the requests of a forward, given in the order of their tokens, into groups.

    A request may have no new token: transformers computes a prompt that is forked without its last one.
    """
    members: dict[tuple[int, bool], list[tuple[int, Request]]] = defaultdict(list)
    begin = 0
    for request in requests:
        if request.q_len:
            members[request.q_len, request.past > 0].append((begin, request))
        begin += request.q_len
    return [_group_of(each, device) for each in members.values()]


def _group_of(members: list[tuple[int, Request]], device: torch.device) -> Group:
    begins, requests = zip(*members, strict=True)
    q_len = requests[0].q_len
    page_table = pad_sequence([request.pages for request in requests], batch_first=True, padding_value=-1)
    tokens: slice | Tensor = slice(begins[0], begins[-1] + q_len)
    if any(after - before != q_len for before, after in itertools.pairwise(begins)):
        first = torch.tensor(begins, device=device).unsqueeze(1)
        tokens = (first + torch.arange(q_len, device=device)).flatten()
    slots = None
    if requests[0].slot is not None:
        slots = torch.tensor([request.slot for request in requests], dtype=torch.int64, device=device)
    return Group(
        tokens,
        q_len,
        page_table.to(device),
        torch.tensor([request.past + q_len for request in requests], dtype=torch.int32, device=device),
        requests[0].past > 0,
        read_slots=slots,
        write_slots=slots,
    )
