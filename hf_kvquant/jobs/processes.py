"""The processes of a job, which `accelerate launch` or torchrun start: each answers its share of the lines."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import os
import sys
from collections.abc import Iterator

import torch
import torch.distributed as dist

# Processes wait for each other at the start and at the end. The shares may take unequally long, even days.
_PATIENCE = datetime.timedelta(days=365)


@dataclasses.dataclass(frozen=True)
class Processes:
    """Which of how many processes this is."""

    rank: int = 0
    count: int = 1

    def wait(self) -> None:
        """Wait until all processes are here."""
        if self.count > 1:
            dist.barrier()

    def total(self, *numbers: int) -> list[int]:
        """Sums over all processes, in all of them."""
        if self.count == 1:
            return list(numbers)
        sums = torch.tensor(numbers, dtype=torch.int64)
        dist.all_reduce(sums)
        found: list[int] = sums.tolist()
        return found

    def is_mine(self, position: int) -> bool:
        """Whether this process answers the line at a position among those that are not answered yet."""
        return position % self.count == self.rank


@contextlib.contextmanager
def joined() -> Iterator[Processes]:
    """The processes that were started together. They say little to each other, so gloo serves GPUs as well."""
    count = int(os.environ.get("WORLD_SIZE", "1"))
    if count == 1:
        yield Processes()
        return
    dist.init_process_group("gloo", timeout=_PATIENCE)
    try:
        yield Processes(dist.get_rank(), count)
    finally:
        dist.destroy_process_group()


def this_process_device() -> str | None:
    """The GPU of this process under `accelerate launch`; `None` for a single process or without GPUs."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and torch.cuda.is_available():
        return f"cuda:{os.environ['LOCAL_RANK']}"
    return None


def tell_one_process(where: str) -> None:
    """Say on stderr that `accelerate launch` was to start several processes on CPUs but, without MPI, started one."""
    is_launched = os.environ.get("ACCELERATE_USE_CPU", "").lower() == "true" and "MASTER_ADDR" in os.environ
    if is_launched and "WORLD_SIZE" not in os.environ:
        print(
            f"{where}: accelerate started one process, not several: on CPUs it needs MPI for that. Results are the "
            "same. To spread the work, start it with torchrun --nproc_per_node N -m hf_kvquant.",
            file=sys.stderr,
        )
