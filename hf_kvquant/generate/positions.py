"""How far the positions of a text with pictures are from the numbers of its tokens, kept with the text's cache.

Models with multimodal RoPE, such as Qwen2-VL, find this offset when they read a text, and keep it in a module for the
steps and turns behind it (`rope_deltas`). There the next text replaces it, and no file has it. So a turn over an
earlier cache, or over one from a file, would go on at the positions of another text.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from ..cache.kvquant_cache import KVQuantCache
from ..state import notes_on

_NAME = "rope_deltas"


def keep(model: Any, cache: KVQuantCache) -> None:
    """Note with a cache what its model has found in the text, after a call that has added to it."""
    if cache.num_tokens == cache.notes.offsets.num_tokens:  # a call that has failed may have read another text
        return
    found = {name: getattr(model.get_submodule(name), _NAME) for name in _modules(model)}
    offsets = {name: offset for name, offset in found.items() if isinstance(offset, Tensor)}
    if offsets:
        cache.notes.offsets.add(cache.num_tokens, offsets)


def restore(model: Any, cache: KVQuantCache, options: Mapping[str, Any]) -> None:
    """Give a model what it had found in the text that a cache holds, before a call goes on with it.

    `options` are the arguments of `generate`. Who passes positions knows them.

    Raises:
        NotImplementedError: The call brings more pictures: transformers would give their tokens positions of text.
    """
    offsets, knows_positions = cache.notes.offsets.at(cache.num_tokens), options.get("position_ids") is not None
    if cache.num_tokens == 0 or knows_positions or not _modules(model):
        return
    if any(options.get(name) is not None for name in ("pixel_values", "pixel_values_videos")):
        raise NotImplementedError(
            f"generate: `pixel_values` must be None over a cache with tokens for {type(model).__name__}, got more "
            "pictures: their tokens would get positions of text. Feed the whole chat to a new cache, or pass "
            "position_ids (see the model's get_rope_index)."
        )
    for name, offset in offsets.items():
        setattr(model.get_submodule(name), _NAME, offset.to(model.device))


def _modules(model: nn.Module) -> list[str]:
    """The modules that keep an offset, as most models' do not. Assistants generate once a round, so they are noted."""
    notes = notes_on(model)
    if notes.offset_modules is None:
        notes.offset_modules = [name for name, module in model.named_modules() if _NAME in vars(module)]
    return notes.offset_modules
