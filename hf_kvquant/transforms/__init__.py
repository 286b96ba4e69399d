"""Transforms of keys before quantisation, with matching changes to queries, so that attention stays the same.

`KeyTransform` is the object that caches hold and kernels apply. The modules that compute its tensors (`centering.py`
and calibration) import transformers. Import them by name, so that `storage.py` and the layers below it stay free of it.
"""

from .key_transform import KeyTransform

__all__ = ["KeyTransform"]
