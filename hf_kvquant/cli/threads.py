"""How many threads a command computes with on a CPU, and what those do that wait.

GNU's OpenMP, which torch comes with, lets a thread that waits spin for milliseconds. If other processes need the cores,
spinning takes them away from the very threads that are waited for: four `hf-kvquant generate` on two cores took 203
seconds of CPU time, and 46 with the short spin that is set here (2 cores of an AMD EPYC, 2026-11).
"""

from __future__ import annotations

import math
import os
from pathlib import Path

# The steps that OpenMP itself takes where a process has more threads than CPUs.
SPIN = "1000"
_CGROUP = Path("/sys/fs/cgroup")


def shorten_waits() -> None:
    """Let waiting threads spin only shortly, unless the user says how they wait. Call it before torch is imported."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPIN)


def set_number(threads: int | None) -> None:
    """Set how many threads compute.

    Without a number, `OMP_NUM_THREADS` decides, or else torch's default, which counts the cores of the machine. The
    default is cut to the cores that this process may use, and to its share if processes were started together.
    """
    import torch  # by now, the command has imported it

    if threads is None:
        if "OMP_NUM_THREADS" in os.environ:
            return
        most = min(torch.get_num_threads(), len(os.sched_getaffinity(0)), quota())
        threads = max(1, most // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    torch.set_num_threads(threads)


def quota(cgroup: Path = _CGROUP) -> int:
    """The CPUs that a container may use, rounded up; a large number if nothing limits it."""
    for files in (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):  # version 2, version 1
        try:
            limit, period = " ".join((cgroup / file).read_text() for file in files).split()
            if float(limit) > 0:
                return math.ceil(float(limit) / float(period))
        except (OSError, ValueError):  # no such file, or "max"
            continue
    return 2**31
