"""The ranks of tensor parallelism, which torchrun starts: the first one answers clients, the others compute with it."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist

from .generation import Generation

POLL_SECONDS = 0.25


@dataclasses.dataclass(frozen=True)
class Ranks:
    """Which of how many ranks this process is.

    Attributes:
        rank: From 0 on.
        count: 1 without torchrun.
        device: Of this rank.
    """

    rank: int
    count: int
    device: torch.device

    @property
    def answers(self) -> bool:
        """Whether clients talk to this one."""
        return self.rank == 0


@contextlib.contextmanager
def joined(device: torch.device) -> Iterator[Ranks]:
    """The ranks that were started together. Each takes a GPU of its own, or the CPU."""
    count = int(os.environ.get("WORLD_SIZE", "1"))
    if count == 1:
        yield Ranks(0, 1, device)
        return
    is_cuda = device.type == "cuda"
    if is_cuda:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    # One stream at a time computes, in a graph or not, and NCCL is slower where it has to expect both at once.
    os.environ.setdefault("NCCL_GRAPH_MIXING_SUPPORT", "0")
    dist.init_process_group("nccl" if is_cuda else "gloo")
    try:
        yield Ranks(dist.get_rank(), count, device)
    finally:
        dist.destroy_process_group()


def follow(generation: Generation) -> None:
    """Compute with the first rank until it stops. It alone hears signals, which torchrun sends to all."""
    for sig in (signal.SIGINT, signal.SIGTERM):
        signal.signal(sig, signal.SIG_IGN)
    try:
        while generation.manager.is_running():
            time.sleep(POLL_SECONDS)
    finally:
        generation.stop()
