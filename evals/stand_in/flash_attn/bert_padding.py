"""What transformers imports from here, and continuous batching does not call."""

from __future__ import annotations

from . import flash_attn_func as pad_input
from . import flash_attn_func as unpad_input

__all__ = ["pad_input", "unpad_input"]
