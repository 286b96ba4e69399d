"""Attention over quantised key-value caches, and appending to them: the ops of hf_kvquant, without transformers.

A cache of one layer is `Planes` for its keys and `Planes` for its values, which a `KVFormat` allocates. `Operands`
takes both and has the two calls of a step: `append` and `decode`. The functions of these names are for a single call.
"""

from .formats import KVFormat, Planes
from .ops import NUM_COUNTERS, Operands, append, decode, has_kernels, kernel_name
from .transforms import KeyTransform

__all__ = [
    "NUM_COUNTERS",
    "KVFormat",
    "KeyTransform",
    "Operands",
    "Planes",
    "append",
    "decode",
    "has_kernels",
    "kernel_name",
]
