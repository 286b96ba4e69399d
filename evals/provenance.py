"""Where a number comes from: what every results file says about code, machine, model and data.

The scripts beside this file put `card` into their results; what they measure is theirs. Nothing here names a path of
the machine: files appear by name and hash, folders relative to the repository.
"""

from __future__ import annotations

import datetime
import hashlib
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import transformers

import hf_kvquant
from hf_kvquant import ops

ROOT = Path(__file__).resolve().parents[1]


def card() -> dict[str, Any]:
    """Command, commit, date, versions and processor of this run. What cannot be found out is `None`."""
    module = ops.extension()
    status = _git("status", "--porcelain", "--untracked-files=no")
    return {
        "command": command(),
        "commit": _git("rev-parse", "HEAD"),
        "is_dirty": None if status is None else bool(status),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "hf_kvquant": hf_kvquant.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "cpu": cpu_name(),
        "threads": torch.get_num_threads(),
        "cpu_kernels": None if isinstance(module, ImportError) else module.cpu_capability(),
    }


def command() -> str:
    """The command line of this process, files outside the repository by their names."""
    return " ".join(["python", *(place(Path(word)) if "/" in word else word for word in sys.argv)])


def place(path: Path) -> str:
    """A path relative to the repository, or the name alone of what lies outside."""
    path = path.resolve()
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else path.name


def sha256(path: Path) -> str:
    """The SHA-256 of a file, hexadecimal."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def cpu_name() -> str | None:
    """The processor's name as Linux gives it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), None)


def _git(*arguments: str) -> str | None:
    try:
        result = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return result.stdout.strip()
