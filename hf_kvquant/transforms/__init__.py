"""What happens to keys before they are quantised, and to queries so that attention stays what it was.

`KeyTransform` is the object that caches hold and kernels apply. Modules that find its numbers (`centering.py` and
calibration) import transformers and are imported by name, so that `storage.py` and what is below it need not.
"""

from .key_transform import KeyTransform

__all__ = ["KeyTransform"]
