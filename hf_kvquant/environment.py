"""What is installed here, what is missing, and how to get it: the facts behind `hf-kvquant env` and `report`.

`ops/` decides which kernels run on a device; `cli/env.py` prints these facts.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
from types import ModuleType

import torch

from .common.version import __version__
from .ops import kernels
from .upstream.releases import described

# The packages of the extra `eval` in pyproject.toml.
EVALUATION = ("lm-eval", "accelerate", "Jinja2", "markdown-it-py", "matplotlib", "numpy", "PyYAML")


def environment() -> dict[str, str]:
    """One line for each heading: what is installed, or how to get what is missing."""
    module = kernels.extension()
    built_for = "CPUs" if torch.version.cuda is None else f"CUDA {torch.version.cuda}"
    facts = {
        "hf-kvquant": __version__,
        "python": platform.python_version(),
        "torch": f"{torch.__version__}, built for {built_for}",
        "transformers": described(),
        "platform": f"{platform.system()} {platform.machine()}, {torch.get_num_threads()} threads",
    }
    if isinstance(module, ModuleType):
        facts["extension"] = str(module.__file__)
        facts["CPU kernels"] = str(module.cpu_capability())
    else:
        facts["extension"] = (
            f"missing ({module}): the PyTorch reference runs instead. Install a C++ compiler, then {kernels.REINSTALL}"
        )
    if kernels.has_kernels("cuda"):
        assert isinstance(module, ModuleType)
        facts["CUDA kernels"] = f"compute capabilities {module.cuda_archs()}"
    elif torch.version.cuda is None:
        facts["CUDA kernels"] = "none: this torch is built for CPUs only"
    else:
        nvcc = "nvcc is there" if shutil.which("nvcc") else "no nvcc on PATH: install the CUDA toolkit"
        facts["CUDA kernels"] = f"missing ({nvcc}). Then {kernels.REINSTALL}"
    facts |= _gpus()
    compiler = shutil.which(os.environ.get("CXX", "c++").split()[0])
    facts["to build"] = f"C++ compiler {compiler or 'missing'}, nvcc {shutil.which('nvcc') or 'missing'}"
    missing = [name for name in EVALUATION if not _is_installed(name)]
    facts["evaluation"] = f"missing {', '.join(missing)}: pip install 'hf-kvquant[eval]'" if missing else "complete"
    return facts


def _gpus() -> dict[str, str]:
    """A line for every GPU: its name, compute capability and memory, and whether the kernels run on it."""
    if torch.version.cuda is None:
        return {"GPUs": "none: this torch is built for CPUs only"}
    if not torch.cuda.is_available():
        return {"GPUs": f"none found by this torch, built for CUDA {torch.version.cuda}"}
    lines = {}
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        without = kernels.why_reference(torch.device("cuda", index))
        served = "supported" if without is None else f"not supported ({without.reason}). {without.remedy}"
        lines[f"GPU {index}"] = (
            f"{device.name} ({device.major}.{device.minor}), {device.total_memory / 2**30:.0f} GiB: {served}"
        )
    return lines


def _is_installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
