"""The ops of the package over the compiled extension: the door to csrc.

`schemas.py` defines them, `kernels.py` loads the extension and knows what it serves, `operands.py` is what the rest of
the package calls.
"""

from . import schemas as _schemas  # noqa: F401 (defines the ops, for which the extension has kernels)
from .chunks import MAX_DRAFTED, largest_step
from .kernels import (
    MAX_CUDA_HEAD_DIM,
    MAX_RING_LENGTH,
    MAX_SCRATCH_BYTES,
    NUM_COUNTERS,
    OPS_VERSION,
    REINSTALL,
    NoKernel,
    covers,
    extension,
    has_kernels,
    kernel_name,
    scratch_bytes,
    serves_gpu,
    serves_latent,
    why_reference,
)
from .operands import Operands, append, decode, new_counters, why_general, why_no_latent_kernel
from .planning import is_uneven, num_slots_of, split_plan

__all__ = [
    "MAX_CUDA_HEAD_DIM",
    "MAX_DRAFTED",
    "MAX_RING_LENGTH",
    "MAX_SCRATCH_BYTES",
    "NUM_COUNTERS",
    "OPS_VERSION",
    "REINSTALL",
    "NoKernel",
    "Operands",
    "append",
    "covers",
    "decode",
    "extension",
    "has_kernels",
    "is_uneven",
    "kernel_name",
    "largest_step",
    "new_counters",
    "num_slots_of",
    "scratch_bytes",
    "serves_gpu",
    "serves_latent",
    "split_plan",
    "why_general",
    "why_no_latent_kernel",
    "why_reference",
]

extension()
