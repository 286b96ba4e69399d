"""The extension, under the name that ops.py imports. kernel-builder names it after the namespace of the ops."""

import importlib
import sys

from ._ops import ops

sys.modules[__name__] = importlib.import_module(f"{__package__}.{ops.name}")
