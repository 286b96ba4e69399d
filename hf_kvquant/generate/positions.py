"""How far the positions of a text with pictures are from the numbers of its tokens, kept with the text's cache.

Models with multimodal RoPE, such as Qwen2.5-VL, find this offset when they read a text, and keep it in a module for
the steps and turns behind it (`rope_deltas`). There the next text replaces it, and no file has it. So a turn over an
earlier cache, or over one from a file, would go on at the positions of another text.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..cache.cache import KVQuantCache

_NAME = "rope_deltas"


def keep(model: Any, cache: KVQuantCache) -> None:
    """Note with a cache what its model has found in the text that it holds."""
    found = {name: vars(module).get(_NAME) for name, module in model.named_modules()}
    cache.notes.rope_deltas = {name: offset for name, offset in found.items() if isinstance(offset, Tensor)}


def restore(model: Any, cache: KVQuantCache) -> None:
    """Give a model what it had found in the text that a cache holds, before it goes on with it."""
    for name, offset in cache.notes.rope_deltas.items():
        setattr(model.get_submodule(name), _NAME, offset.to(model.device))
