"""The extension, under the name that ops/kernels.py imports. kernel-builder gives it the name of the op namespace."""

import importlib
import sys

from ._ops import ops

sys.modules[__name__] = importlib.import_module(f"{__package__}.{ops.name}")
