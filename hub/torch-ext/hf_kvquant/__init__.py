"""Attention over quantised key-value caches, and appending to them: the ops of hf_kvquant, without transformers.

The cache of one layer is a `Planes` for its keys and a `Planes` for its values, both allocated by a `KVLayout`.
`Operands` takes both and has the two calls of a step, `append` and `decode`. The functions `append` and `decode` are
for single calls.
"""

from .ops import NUM_COUNTERS, Operands, append, decode, has_kernels, kernel_name
from .spec.formats import KVFormat
from .spec.key_transform import KeyTransform
from .spec.layout import KVLayout
from .spec.planes import Planes

__all__ = [
    "NUM_COUNTERS",
    "KVFormat",
    "KVLayout",
    "KeyTransform",
    "Operands",
    "Planes",
    "append",
    "decode",
    "has_kernels",
    "kernel_name",
]
