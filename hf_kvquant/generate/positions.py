"""How far the positions of a text with pictures are from the numbers of its tokens, kept with the text's cache.

Models with multimodal RoPE, such as Qwen2-VL, find this offset when they read a text, and keep it in a module for the
steps and turns behind it (`rope_deltas`). There the next text replaces it, and no file has it. So a turn over an
earlier cache, or over one from a file, would go on at the positions of another text.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from ..cache.cache import KVQuantCache

_NAME = "rope_deltas"


def keep(model: nn.Module, cache: KVQuantCache) -> None:
    """Note with a cache what its model has found in the text, after a call that has added to it."""
    held = _held(cache)
    if held == 0 or held == cache.notes.offsets.num_tokens:  # a call that has failed may have read another text
        return
    found = {name: vars(module).get(_NAME) for name, module in model.named_modules()}
    offsets = {name: offset for name, offset in found.items() if isinstance(offset, Tensor)}
    if offsets:
        cache.notes.offsets.add(held, offsets)


def restore(model: Any, cache: KVQuantCache, options: Mapping[str, Any]) -> None:
    """Give a model what it had found in the text that a cache holds, before a call goes on with it.

    `options` are the arguments of `generate`. Who passes positions knows them.

    Raises:
        NotImplementedError: The call brings more pictures: transformers would give their tokens positions of text.
    """
    if _held(cache) == 0 or options.get("position_ids") is not None:
        return
    has_pictures = any(options.get(name) is not None for name in ("pixel_values", "pixel_values_videos"))
    if has_pictures and any(_NAME in vars(module) for module in model.modules()):
        raise NotImplementedError(
            f"generate: `pixel_values` must be None over a cache with tokens for {type(model).__name__}, got more "
            "pictures: their tokens would get positions of text. Feed the whole chat to a new cache, or pass "
            "position_ids (see the model's get_rope_index)."
        )
    for name, offset in cache.notes.offsets.at(_held(cache)).items():
        setattr(model.get_submodule(name), _NAME, offset.to(model.device))


def _held(cache: KVQuantCache) -> int:
    return max((storage.length for storage in cache.storages), default=0)
