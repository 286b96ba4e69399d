"""Quantised key-value caches for Hugging Face Transformers, with compiled kernels that attend to the codes directly.

    import hf_kvquant
    hf_kvquant.patch(model, "int4")     # from now on model.generate keeps keys and values as codes
    model.generate(**inputs)

`import hf_kvquant` alone imports nothing. The first use of one of its names imports torch and transformers, so that
`hf-kvquant --help` need not wait for them. It also registers an attention and a mask implementation with transformers
and defines ops in torch; it changes no existing entry. A model that was patched, or a cache, loads from a pickle in any
process, since the pickle names the modules that it needs. Only who passes our implementation to transformers or calls
`torch.ops.hf_kvquant` without any of these names must import one first: `from hf_kvquant import patch`.
"""

from __future__ import annotations

import importlib
import sys
import types
from typing import TYPE_CHECKING, Any

from .common.version import __version__

if TYPE_CHECKING:
    from .cache.kvquant_cache import KVQuantCache
    from .calibration.smoothing import load_smoothing, smooth_attention, unsmooth
    from .calibration.smoothing_file import SmoothingResult
    from .calibration.value_rotation import rotate_values, unrotate_values
    from .common.errors import PreflightError
    from .config import PRESETS, KVQuantConfig, LayerFormats
    from .patching import disable, enable, patch, patched, unpatch
    from .preflight.check import run_preflight
    from .preflight.result import Preflight
    from .report import LayerReport, Report, report
    from .spec.formats import KVFormat
    from .spec.key_transform import KeyTransform
    from .transforms.of_model import key_transforms

__all__ = [
    "PRESETS",
    "KVFormat",
    "KVQuantCache",
    "KVQuantConfig",
    "KeyTransform",
    "LayerFormats",
    "LayerReport",
    "Preflight",
    "PreflightError",
    "Report",
    "SmoothingResult",
    "__version__",
    "disable",
    "enable",
    "key_transforms",
    "load_smoothing",
    "patch",
    "patched",
    "report",
    "rotate_values",
    "run_preflight",
    "smooth_attention",
    "unpatch",
    "unrotate_values",
    "unsmooth",
]

# The module of each name, as the imports above say it to type checkers.
_MODULES = {
    "PRESETS": "config",
    "KVFormat": "spec.formats",
    "KVQuantCache": "cache.kvquant_cache",
    "KVQuantConfig": "config",
    "KeyTransform": "spec.key_transform",
    "LayerFormats": "config",
    "LayerReport": "report",
    "Preflight": "preflight.result",
    "PreflightError": "common.errors",
    "Report": "report",
    "SmoothingResult": "calibration.smoothing_file",
    "disable": "patching",
    "enable": "patching",
    "key_transforms": "transforms.of_model",
    "load_smoothing": "calibration.smoothing",
    "patch": "patching",
    "patched": "patching",
    "report": "report",
    "rotate_values": "calibration.value_rotation",
    "run_preflight": "preflight.check",
    "smooth_attention": "calibration.smoothing",
    "unpatch": "patching",
    "unrotate_values": "calibration.value_rotation",
    "unsmooth": "calibration.smoothing",
}


def __getattr__(name: str) -> Any:
    """Import a name when it is first used, and keep it."""
    if name not in _MODULES:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    try:
        # Whichever name comes first, all is registered, as if everything had been imported at once.
        importlib.import_module(".patching", __name__)
        value = getattr(importlib.import_module(f".{_MODULES[name]}", __name__), name)
    except ImportError as error:
        from .upstream.releases import explained

        raise explained(error) from error
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})


class _Package(types.ModuleType):
    """This package, in which `report` is the function also once the module of that name has been imported.

    Python binds every module that it imports to its name in the package.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in _MODULES or not isinstance(value, types.ModuleType):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
