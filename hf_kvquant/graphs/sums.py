"""Sums over the ranks of tensor parallelism in captured steps: one kernel that reads all peers, instead of NCCL.

transformers adds up the output of every row-wise linear layer by `torch.distributed.all_reduce`, twice a layer. In a
decode step these are a few KB, so latency is all that counts: NCCL took 29 us for each of the 65 of Llama-3-8B on two
H200s (2026-11), 1.9 ms of a step of 4.6 ms. While a step runs or is recorded, `summed` replaces that function for this
thread. Small sums go through a buffer that all peers can read over NVLink (PyTorch's symmetric memory): every rank
copies its addend there and adds up those of all ranks, in the order of the ranks, so that all get the same bits. Two
addends give the bits of NCCL; more may be rounded in another order than NCCL's.

All ranks have to choose the same way, or they wait for each other forever. So they agree when the first step runs, on
what each has found out (`_reasons_against`) and on a trial of the kernel, and later choose by what is the same on all.
"""

from __future__ import annotations

import abc
import contextlib
import ctypes
import functools
import logging
import socket
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from transformers import PreTrainedModel

from ..models.sharding import group_of
from ..state import notes_on

logger = logging.getLogger(__name__)

# Every rank reads the addends of all others. Beyond about 1 MiB in all, bandwidth counts and NCCL reads less. This is
# the rule of other engines, not yet measured here; `evals/bench_sums.py` does.
MAX_READ_BYTES = 2**20
MAX_RANKS = 8
_ALIGNMENT = 16  # bytes that the kernel loads at a time
# What PyTorch's kernel adds.
_DTYPES = (torch.bfloat16, torch.float32)
# Of the CUDA driver's `CUdevice_P2PAttribute`. Only NVLink has atomics between GPUs, with which ranks wait for others.
_P2P_ACCESS, _P2P_ATOMICS = 2, 3

# All threads share the function that `summed` replaces, so only one step at a time may replace it.
_lock = threading.RLock()


class Exchange(abc.ABC):
    """Adds up small tensors of all ranks in a buffer that peers can read. Making one is a collective call.

    Args:
        group: The ranks.
        device: Of this rank.
        num_bytes: Of the largest tensor.
    """

    @abc.abstractmethod
    def __init__(self, group: dist.ProcessGroup, device: torch.device, num_bytes: int) -> None: ...

    @abc.abstractmethod
    def sum(self, tensor: Tensor) -> None:
        """Replace a contiguous tensor by its sum over the ranks, added in their order, on the current stream."""

    @classmethod
    @abc.abstractmethod
    def reasons_against(cls, group: dist.ProcessGroup, device: torch.device) -> Iterator[str]:
        """Why these ranks cannot exchange, as this one sees it. All ranks call it together, and run it to the end."""


class OneShot(Exchange):
    """PyTorch's one-shot kernel over symmetric memory.

    It has a variant that copies the addend into the buffer itself. That one signals its peers before all warps of a
    block have written (torch 2.11 to 2.13, `one_shot_all_reduce_kernel`), so a copy of its own comes first here.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, num_bytes: int) -> None:
        from torch.distributed import _symmetric_memory  # private as a module, and the only door to it

        self._group_name = group.group_name
        self._buffer = _symmetric_memory.empty(num_bytes, dtype=torch.uint8, device=device)
        _symmetric_memory.rendezvous(self._buffer, group.group_name)

    def sum(self, tensor: Tensor) -> None:
        """See `Exchange`. The buffer is free again when the kernel ends: it waits until all peers have read."""
        addend = self._buffer[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        addend.copy_(tensor)
        torch.ops.symm_mem.one_shot_all_reduce_out(addend, "sum", self._group_name, tensor)

    @classmethod
    def reasons_against(cls, group: dist.ProcessGroup, device: torch.device) -> Iterator[str]:
        """See `Exchange`."""
        if not hasattr(torch.ops.symm_mem, "one_shot_all_reduce_out"):
            yield f"torch {torch.__version__} has no one-shot sums"
        own = socket.gethostname(), str(torch.cuda.get_device_properties(device).uuid)
        peers: list[Any] = [None] * group.size()
        dist.all_gather_object(peers, own, group=group)
        indices = {str(torch.cuda.get_device_properties(i).uuid): i for i in range(torch.cuda.device_count())}
        for host, uuid in peers:
            if host != own[0]:
                yield f"they run on several machines, {own[0]} and {host}"
            elif uuid not in indices:
                yield "a process does not see the GPUs of the others (CUDA_VISIBLE_DEVICES)"
            elif uuid != own[1] and not _are_linked(device.index or 0, indices[uuid]):
                yield f"GPUs {device.index} and {indices[uuid]} are not linked by NVLink"


# How ranks exchange, by device type.
EXCHANGES: dict[str, type[Exchange]] = {"cuda": OneShot}


def _are_linked(index: int, peer: int) -> bool:
    """Whether a GPU reads another's memory and has atomics there."""
    driver = ctypes.CDLL("libcuda.so.1")
    handles = []
    for each in (index, peer):
        handle = ctypes.c_int()
        if driver.cuDeviceGet(ctypes.byref(handle), each) != 0:
            return False
        handles.append(handle)
    for attribute in (_P2P_ACCESS, _P2P_ATOMICS):
        value = ctypes.c_int()
        if driver.cuDeviceGetP2PAttribute(ctypes.byref(value), attribute, *handles) != 0 or not value.value:
            return False
    return True


class Sums:
    """How captured steps of one model sum over its ranks.

    Args:
        group: The ranks.
        exchange: What small sums go through; `None` leaves all to NCCL.
        most_bytes: Of a small one.
        reason: Why there is no exchange.

    Attributes:
        reason: As given; empty if there is an exchange.
        count: How many sums went through the exchange: were run or recorded, not replayed.
    """

    def __init__(
        self, group: dist.ProcessGroup, exchange: Exchange | None, most_bytes: int = 0, *, reason: str = ""
    ) -> None:
        self.count = 0
        self.reason = reason
        self._group_name = group.group_name
        self._exchange = exchange
        self._most_bytes = most_bytes

    @property
    def is_one_shot(self) -> bool:
        """Whether small sums take one kernel."""
        return self._exchange is not None

    def try_sum(self, tensor: Tensor, op: Any, group: Any, async_op: bool) -> bool:
        """Sum a tensor in place if it is for the exchange. Depends on nothing that differs between ranks."""
        if self._exchange is None or op != dist.ReduceOp.SUM or async_op or type(tensor) is not Tensor:
            return False
        group = dist.group.WORLD if group is None else group
        is_served = (
            group.group_name == self._group_name
            and tensor.dtype in _DTYPES
            and tensor.is_contiguous()
            and 0 < tensor.nbytes <= self._most_bytes
            and tensor.nbytes % _ALIGNMENT == 0
            and tensor.storage_offset() * tensor.element_size() % _ALIGNMENT == 0
            and not tensor.requires_grad
        )
        if is_served:
            self._exchange.sum(tensor)
            self.count += 1
        return is_served


@contextlib.contextmanager
def summed(model: PreTrainedModel) -> Iterator[None]:
    """Sum over the ranks of a sharded model by one kernel where that works, for the duration of a `with` block.

    The first block with a model is a collective call: its ranks agree on how. Other threads keep torch's function.
    """
    sums = _sums_of(model)
    if sums is None or not sums.is_one_shot:
        yield
        return
    with _lock:
        original, thread = dist.all_reduce, threading.get_ident()

        @functools.wraps(original)
        def all_reduce(tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False) -> Any:
            if threading.get_ident() == thread and sums.try_sum(tensor, op, group, async_op):
                return None
            return original(tensor, op, group, async_op)

        dist.all_reduce = all_reduce
        try:
            yield
        finally:
            dist.all_reduce = original


@contextlib.contextmanager
def only_nccl(model: PreTrainedModel) -> Iterator[None]:
    """Leave all sums to NCCL in a `with` block, for comparisons. Steps captured before must not be replayed in it."""
    notes, group = notes_on(model), group_of(model)
    before = notes.sums
    if group is not None:
        notes.sums = Sums(group, None, reason="asked to")
    try:
        yield
    finally:
        notes.sums = before


def _sums_of(model: PreTrainedModel) -> Sums | None:
    """How a model's ranks sum, agreed on if that has not been done; `None` if there is nothing to agree on."""
    notes, device = notes_on(model), model.device
    if notes.sums is None and device.type in EXCHANGES:
        group = group_of(model)
        if group is None or (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
            return None
        notes.sums = _agreed_sums(group, device)
    sums: Sums | None = notes.sums
    return sums


def _agreed_sums(group: dist.ProcessGroup, device: torch.device) -> Sums:
    """What all ranks of a group choose together."""
    if not 1 < group.size() <= MAX_RANKS:
        return _by_nccl(group, f"{group.size()} ranks are not from 2 to {MAX_RANKS}")
    kind = EXCHANGES[device.type]
    reason = _first_reason(group, next(iter(list(kind.reasons_against(group, device))), None))
    if reason is not None:
        return _by_nccl(group, reason)
    most_bytes = MAX_READ_BYTES // (group.size() - 1) // _ALIGNMENT * _ALIGNMENT
    exchange = None
    try:
        # Graphs outside of inference mode write to the buffer, too.
        with torch.inference_mode(False):
            exchange = kind(group, device, most_bytes)
    except RuntimeError as error:
        reason = f"{type(error).__name__}: {error}"
    reason = _first_reason(group, reason)
    if exchange is not None and reason is None:
        reason = _first_reason(group, _why_wrong(exchange, group, device, most_bytes))
    if exchange is None or reason is not None:
        return _by_nccl(group, str(reason))
    logger.info(
        "captured steps sum up to %d KiB over %d ranks in one kernel%s.",
        most_bytes // 1024,
        group.size(),
        "" if group.size() == 2 else ", which may round in another order than NCCL",
    )
    return Sums(group, exchange, most_bytes)


def _first_reason(group: dist.ProcessGroup, own: str | None) -> str | None:
    """The reason of the lowest rank that has one, the same on all ranks."""
    reasons: list[Any] = [None] * group.size()
    dist.all_gather_object(reasons, own, group=group)
    return next((reason for reason in reasons if reason is not None), None)


def _why_wrong(exchange: Exchange, group: dist.ProcessGroup, device: torch.device, most_bytes: int) -> str | None:
    """Compare sums with those of the ranks' addends in their order. Every rank sums equally often, whatever it finds.

    Returns:
        What is wrong, or `None`.
    """
    generator = torch.Generator(device).manual_seed(group.rank())  # leaves the generator used for sampling alone
    found = None
    for dtype in _DTYPES:
        for num_bytes in (_ALIGNMENT, 8192, most_bytes):
            addend = torch.empty(num_bytes // dtype.itemsize, dtype=dtype, device=device).normal_(generator=generator)
            addends = [torch.empty_like(addend) for _ in range(group.size())]
            dist.all_gather(addends, addend, group=group)
            expected = functools.reduce(torch.add, addends)
            try:
                exchange.sum(addend)
            except RuntimeError as error:  # the kernel refuses, on all ranks alike
                return f"{type(error).__name__}: {error}"
            if not torch.equal(addend, expected):
                found = f"a sum of {num_bytes} bytes of {dtype} is wrong"
    return found


def _by_nccl(group: dist.ProcessGroup, reason: str) -> Sums:
    _log_slower_sums(reason)
    return Sums(group, None, reason=reason)


@functools.cache
def _log_slower_sums(reason: str) -> None:
    logger.warning("captured steps sum over the ranks by NCCL: %s. Correct, slower.", reason)
