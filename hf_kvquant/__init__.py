"""Quantised key-value caches for Hugging Face Transformers, with compiled kernels that attend to the codes directly.

    import hf_kvquant
    hf_kvquant.patch(model, "int4")     # from now on model.generate keeps keys and values as codes
    model.generate(**inputs)

Importing this package registers an attention and a mask implementation with transformers and defines ops in torch. It
changes no existing entry.
"""

from .cache.cache import KVQuantCache
from .calibration.smoothing import load_smoothing, smooth_attention, unsmooth
from .calibration.smoothing_file import SmoothingResult
from .calibration.value_rotation import rotate_values, unrotate_values
from .common.version import __version__
from .config import PRESETS, KVQuantConfig, LayerFormats
from .patching import disable, enable, patch, patched, unpatch
from .preflight.check import run_preflight
from .preflight.verdict import Preflight, PreflightError
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
