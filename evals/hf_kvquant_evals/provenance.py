"""Where a number comes from: what every results file says about code, machine, model and data.

No path of the machine is recorded: files appear by name and hash, folders relative to the repository. A copy of the
tree without its history is told its commit by the variable `HF_KVQUANT_COMMIT`: the commit, then `clean` or `dirty`.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import importlib.util
import os
import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from hf_kvquant import ops
from hf_kvquant.common.naming import ROOT, place
from hf_kvquant.common.version import __version__
from hf_kvquant.upstream.releases import VERSION

COMMIT_VARIABLE = "HF_KVQUANT_COMMIT"


def card() -> dict[str, Any]:
    """Command, commit, date, versions and processor of this run. Unknown entries are `None`."""
    module = ops.extension()
    commit, is_dirty = checkout()
    return {
        "command": command(),
        "commit": commit,
        "is_dirty": is_dirty,
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "hf_kvquant": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": VERSION,
        "cpu": cpu_name(),
        "threads": torch.get_num_threads(),
        "cpu_kernels": None if isinstance(module, ImportError) else module.cpu_capability(),
    }


def gpu_card() -> dict[str, Any]:
    """Name, memory, driver and software of the first GPU. Unknown entries are `None`."""
    properties = torch.cuda.get_device_properties(0)
    return {
        "gpu": properties.name,
        "gpu_gb": round(properties.total_memory / 1e9, 1),
        "multiprocessors": properties.multi_processor_count,
        "l2_mb": round(properties.L2_cache_size / 1e6, 1),
        "driver": _output("nvidia-smi", "--id=0", "--query-gpu=driver_version", "--format=csv,noheader"),
        **_nvidia_smi(max_sm_mhz="clocks.max.sm", max_memory_mhz="clocks.max.mem"),
        "cuda": torch.version.cuda,
        "triton": importlib.metadata.version("triton") if importlib.util.find_spec("triton") else None,
    }


def gpu_state() -> dict[str, float | None]:
    """Clocks, temperature and power of the first GPU right now; `None` for what nvidia-smi does not report."""
    return _nvidia_smi(sm_mhz="clocks.sm", memory_mhz="clocks.mem", celsius="temperature.gpu", watts="power.draw")


def checkout() -> tuple[str | None, bool | None]:
    """The commit of this tree, and whether tracked files differ from it; both `None` outside a checkout."""
    given = os.environ.get(COMMIT_VARIABLE)
    if given is not None:
        match given.split():
            case commit, ("clean" | "dirty") as state:
                return commit, state == "dirty"
        raise ValueError(
            f"environment: `{COMMIT_VARIABLE}` must be a commit and clean or dirty, got {given!r}. Set it to what "
            "'git rev-parse HEAD' prints and one of these words, or unset it."
        )
    git = "git", "-C", str(ROOT)
    top = _output(*git, "rev-parse", "--show-toplevel")
    if top is None or Path(top) != ROOT:
        return None, None  # an installed package, perhaps in an environment inside another repository
    head, status = _output(*git, "rev-parse", "HEAD"), _output(*git, "status", "--porcelain", "--untracked-files=no")
    return head, None if status is None else bool(status)


def command() -> str:
    """The command line of this process. Files outside the repository are reduced to their names."""
    program, *words = sys.argv
    is_ours = Path(program).name == "hf-kvquant" or Path(program).parent.name == "hf_kvquant"
    opening = ["hf-kvquant"] if is_ours else ["python", place(Path(program)) if "/" in program else program]
    return " ".join([*opening, *(place(Path(word)) if "/" in word else word for word in words)])


def describe_error(error: BaseException) -> str:
    """An exception and its cause in one short line without paths."""
    cause = f" ({describe_error(error.__cause__)})" if error.__cause__ is not None else ""
    lines = str(error).strip().splitlines()
    message = re.sub(r"\S*/\S*", lambda match: match[0].rstrip("/").rsplit("/", 1)[-1], lines[0][:200] if lines else "")
    return f"{type(error).__name__}: {message}{cause}"


def cpu_name() -> str | None:
    """The processor's name as Linux gives it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), None)


def _nvidia_smi(**fields: str) -> dict[str, float | None]:
    """The numbers of nvidia-smi for the first GPU in some of its fields, under the names of the arguments."""
    query = ",".join(fields.values())
    line = _output("nvidia-smi", "--id=0", f"--query-gpu={query}", "--format=csv,noheader,nounits")
    words = [""] * len(fields) if line is None else line.split(",")
    numbers = (re.fullmatch(r"\s*(\d+(?:\.\d*)?)\s*", word) for word in words)  # or "[N/A]"
    return {name: float(number[1]) if number else None for name, number in zip(fields, numbers, strict=True)}


def _output(*command: str) -> str | None:
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return result.stdout.strip()
