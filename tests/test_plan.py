"""Which CUDA kernel a plan chooses. The plans are host code, so that they run here without a GPU."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ["csrc/requirements.cpp", *(f"csrc/cuda/plan/{name}.cpp" for name in ("choose", "cut", "plan"))]


def headers() -> Path | None:
    """Where a CUDA toolkit has its headers."""
    nvcc = shutil.which("nvcc")
    homes = [os.environ.get("CUDA_HOME"), nvcc and Path(nvcc).resolve().parents[1], "/usr/local/cuda"]
    found = (Path(home) / "include" for home in homes if home)
    return next((folder for folder in found if (folder / "cuda_runtime_api.h").is_file()), None)


def test_each_kernel_of_the_table_is_chosen(tmp_path: Path) -> None:
    """A row is chosen in one file and found in another: both must mean the same one."""
    compiler, folder = shutil.which("g++"), headers()
    if compiler is None or folder is None:
        pytest.skip("needs g++ and the headers of a CUDA toolkit")
    probe = tmp_path / "probe"
    sources = [str(ROOT / name) for name in (*SOURCES, "tests/plan_probe.cpp")]
    options = ["-std=c++17", "-O0", f"-I{ROOT / 'csrc'}", f"-I{folder}", "-o", str(probe)]
    subprocess.run([compiler, *options, *sources], check=True)
    lines = subprocess.run([probe], check=True, capture_output=True, text=True).stdout.splitlines()
    assert len(lines) >= 9 * 3 * 2
    for line in lines:
        row, head_dim, is_paged, *chosen = (int(number) for number in line.split())
        assert chosen == [row, head_dim, is_paged], line
