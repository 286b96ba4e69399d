"""The loading of the compiled extension, and which calls its kernels serve.

Where no kernel serves, `reference.py` runs instead, and the log says so once per reason.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import logging
import re
from types import ModuleType

import torch

from ..spec.codes import STORAGE_IDS
from ..spec.formats import BLOCK_SIZE, GRANULARITY_IDS, TOKEN_ALIGNMENT, KVFormat
from ..spec.layout import LAYOUT_FIELDS, ROWS, KVLayout

logger = logging.getLogger(__package__)

# Increment this, here and in csrc/format.h, when a schema or the meaning of an argument changes. A stale build is then
# refused at load instead of reading its arguments in the wrong order.
OPS_VERSION = 24

# The thread blocks of a CUDA decode that share a sequence find the last of them with an atomic counter; that one
# combines their parts. Mirrored in csrc/format.h, like all numbers here.
NUM_COUNTERS = 4096
# The tiles that long chunks read on GPUs of compute capability 9.0, of one layer at a time.
MAX_SCRATCH_BYTES = 2**26
# The CUDA kernels keep a row of a head in registers.
MAX_CUDA_HEAD_DIM = 256
# What the CUDA kernels for latents serve (csrc/cuda/latent): channels; formats of latents and of rope parts, as storage
# type, channels that share a scale, and whether they are symmetric; and the shared memory that they need.
_LATENT_RANKS = (256, 512)
_NONE, _INT8, _FP8 = ("none", None, True), ("int8", None, True), ("fp8", None, True)
_LATENT_FORMATS = ((_INT8, _NONE), (_FP8, _NONE), (("int4", 128, False), _INT8))
_LATENT_SHARED_BYTES = 113 * 1024
# No CUDA kernel reads these: codes that are in two bytes take more instructions than their bytes save.
CPU_STORAGES = frozenset({"int3"})
# The most tokens that a ring counts, so that sums of positions fit an int.
MAX_RING_LENGTH = 2**30

# To be run in a clone. pip reinstalls from a folder even if the version is the same.
REINSTALL = "pip install --no-build-isolation ."


@functools.cache
def extension() -> ModuleType | ImportError:
    """The compiled extension, loaded on the first call, or the error that kept it from loading."""
    try:
        module = importlib.import_module(f"{__package__.rpartition('.')[0]}._C")
    except ImportError as error:
        return error
    expected = {
        "OPS_VERSION": OPS_VERSION,
        "TOKEN_ALIGNMENT": TOKEN_ALIGNMENT,
        "NUM_COUNTERS": NUM_COUNTERS,
        "MAX_CUDA_HEAD_DIM": MAX_CUDA_HEAD_DIM,
        "BLOCK_SIZE": BLOCK_SIZE,
        "MAX_RING_LENGTH": MAX_RING_LENGTH,
        "MAX_SCRATCH_BYTES": MAX_SCRATCH_BYTES,
        "LAYOUT_FIELDS": " ".join(LAYOUT_FIELDS),
        "LAYOUT_VALUES": "; ".join(" ".join(names) for names in (STORAGE_IDS, GRANULARITY_IDS, ROWS)),
    }
    for name, value in expected.items():
        found = getattr(module, name, None)
        if found != value:
            # By now the kernels are registered, so going on would call them with the wrong arguments.
            raise RuntimeError(
                f"ops: the extension must be built from this version of the package ({name} {value}), got {found}. "
                f"Reinstall: {REINSTALL}"
            )
    return module


def has_kernels(device_type: str) -> bool:
    """Whether the extension has kernels for a device type, `"cpu"` or `"cuda"`. See also `serves_gpu`."""
    module = extension()
    return isinstance(module, ModuleType) and bool(getattr(module, f"HAS_{device_type.upper()}", 0))


def covers(archs: str, capability: tuple[int, int]) -> bool:
    """Whether code compiled for these architectures runs on a GPU of this compute capability.

    Args:
        archs: As in `HF_KVQUANT_CUDA_ARCHS`, such as `"80;86;90"`. Machine code runs on GPUs with the same major number
            and the same or a higher minor number. The last architecture is also built as PTX, which every later GPU can
            compile. The suffix `a` stands for features that no other GPU has.
        capability: Major and minor number.
    """
    built = []
    for major, minor, suffix in re.findall(r"(\d+)(\d)([af]?)", archs):
        arch = int(major), int(minor)
        if capability == arch or (suffix != "a" and capability[0] == arch[0] and capability[1] >= arch[1]):
            return True
        built.append((arch, suffix))
    return bool(built) and not built[-1][1] and capability >= built[-1][0]


@functools.cache
def serves_gpu(index: int) -> bool:
    """Whether the compiled kernels run on this GPU of the process. `False` also if there are no CUDA kernels."""
    module = extension()
    if isinstance(module, ImportError) or not has_kernels("cuda"):
        return False
    return covers(module.cuda_archs(), torch.cuda.get_device_capability(index))


def scratch_bytes(device: torch.device) -> int:
    """Bytes that attention of many new tokens takes beside the cache, at most (csrc/cuda/sm90/chunk/scratch.cuh)."""
    if device.type != "cuda" or not has_kernel(device, 1) or torch.cuda.get_device_capability(device) != (9, 0):
        return 0
    return MAX_SCRATCH_BYTES


# The compiler cannot trace this check. It may take the result for a constant, since the GPU stays the same.
@torch.compiler.assume_constant_result
def _serves_gpu(index: int) -> bool:
    return serves_gpu(index)


def has_kernel(device: torch.device, *head_dims: int) -> bool:
    """Whether to call the op itself, not its `_reference`. Always so on devices other than CUDA."""
    if device.type != "cuda":
        return True
    return max(head_dims) <= MAX_CUDA_HEAD_DIM and _serves_gpu(0 if device.index is None else device.index)


def serves_latent(device: torch.device, layout: KVLayout, rank: int, num_rope_channels: int) -> bool:
    """Whether `attend_latent` has a kernel for latents of `rank` channels and their rope parts.

    Kernels for GPUs append latents, too, of more than `MAX_CUDA_HEAD_DIM` channels.
    """
    if device.type != "cuda":
        return device.type == "cpu" and layout.key.block_size is None
    if rank not in _LATENT_RANKS or num_rope_channels > 64 or num_rope_channels % 16 or layout.is_ring:
        return False
    index = 0 if device.index is None else device.index
    if not _serves_gpu(index) or _shared_memory(index) < _LATENT_SHARED_BYTES:
        return False
    return tuple(map(_format_of, layout.formats)) in _LATENT_FORMATS


@torch.compiler.assume_constant_result
def _shared_memory(index: int) -> int:
    properties = torch.cuda.get_device_properties(index)
    return int(properties.shared_memory_per_block_optin)  # type: ignore[attr-defined]


def _format_of(kv_format: KVFormat) -> tuple[str, int | None, bool] | None:
    """A format as in `_LATENT_FORMATS`; `None` without a scale for each token, which those have."""
    if kv_format.granularity in ("tensor", "channel"):
        return None
    return kv_format.storage, kv_format.group_size, kv_format.symmetric


def check_storages(device: torch.device, *storages: str) -> None:
    """Refuse storage types that have no kernels on a device.

    Raises:
        ValueError: A storage type is in `CPU_STORAGES`, and the device is a GPU.
    """
    refused = sorted(CPU_STORAGES.intersection(storages)) if device.type == "cuda" else []
    if refused:
        raise ValueError(
            f"A cache on {device.type} must have storage types with CUDA kernels, got {' and '.join(refused)}. Choose "
            "int4, or run on a CPU."
        )


@dataclasses.dataclass(frozen=True)
class NoKernel:
    """Why the PyTorch reference runs.

    Attributes:
        what: What the compiled kernels do not support: a device, or a head_dim on one.
        reason: Why not.
        remedy: What to do.
    """

    what: str
    reason: str
    remedy: str


def why_reference(device: torch.device, *head_dims: int) -> NoKernel | None:
    """Why calls on a device run the reference, or `None` if they run compiled kernels.

    Args:
        device: Of the codes.
        *head_dims: Of keys and of values; leave them out if they are not known.
    """
    module = extension()
    if isinstance(module, ImportError) or not has_kernels(device.type):
        reason = module if isinstance(module, ImportError) else f"it was built without kernels for {device.type}"
        remedy = f"Install a compiler and reinstall: {REINSTALL}"
        return NoKernel(device.type, str(reason), remedy)
    if device.type != "cuda":
        return None
    if not serves_gpu(device.index):
        major, minor = torch.cuda.get_device_capability(device.index)
        return NoKernel(
            f"{torch.cuda.get_device_name(device.index)}, compute capability {major}.{minor}",
            f"they were built for {module.cuda_archs()}",
            f"Reinstall: HF_KVQUANT_CUDA_ARCHS={major}{minor} {REINSTALL} (8.0 or later)",
        )
    if max(head_dims, default=0) > MAX_CUDA_HEAD_DIM:
        return NoKernel(
            f"head_dim {max(head_dims)} on {device.type}",
            f"they support head_dim up to {MAX_CUDA_HEAD_DIM}",
            "Leave this model unpatched where speed matters more than memory.",
        )
    return None


def kernel_name(device: torch.device, *head_dims: int) -> str:
    """The name of what runs calls on a device, for display. See `why_reference`."""
    module = extension()
    if isinstance(module, ImportError) or why_reference(device, *head_dims) is not None:
        return "PyTorch reference"
    return f"CPU kernel, {module.cpu_capability()}" if device.type == "cpu" else f"{device.type.upper()} kernel"


def warn_reference(device: torch.device, *head_dims: int) -> None:
    """Log why the reference runs, once per reason."""
    without = why_reference(device, *head_dims)
    if without is not None:
        _log_reference(without.what, without.reason, without.remedy)


@functools.cache
def _log_reference(what: str, reason: str, remedy: str) -> None:
    logger.warning(
        "ops: no compiled kernels for %s, the PyTorch reference runs: correct, slower (%s). %s", what, reason, remedy
    )
