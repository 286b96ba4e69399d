"""The parts of a model that generate in its place: some models have a `generate` that calls the `generate` of a part.

Such a part makes the caches, so it is the one to patch. Other parts generate over caches of their own layers, such as
the decoder of audio codes beside a text model.
"""

from __future__ import annotations

import contextlib
from typing import Any

from transformers import GenerationMixin, PreTrainedModel

from .text_config import text_config_of


def generating_parts(model: PreTrainedModel) -> dict[str, PreTrainedModel]:
    """The parts that a model's own `generate` may call to generate, by name; none if it is transformers' `generate`."""
    method = getattr(type(model), "generate", None)
    if method is None or method is getattr(GenerationMixin, "generate"):  # noqa: B009
        return {}
    return {
        name: part
        for name, part in model.named_modules()
        if name and isinstance(part, PreTrainedModel) and hasattr(part, "generate")
    }


def stand_ins(model: PreTrainedModel) -> dict[str, PreTrainedModel]:
    """The parts that generate over the layers which the cache of the whole model is for, by name."""
    parts = generating_parts(model)
    if not parts:
        return {}
    config = _described(model)
    return {name: part for name, part in parts.items() if config is not None and _described(part) == config}


def _described(model: PreTrainedModel) -> dict[str, Any] | None:
    """The config of a model's layers, as a dictionary: a part may have a copy. `None` if transformers finds several."""
    with contextlib.suppress(ValueError):
        described: dict[str, Any] = text_config_of(model).to_dict()
        return described
    return None
