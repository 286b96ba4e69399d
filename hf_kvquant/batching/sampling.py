"""How the next token of each request is chosen. Requests that sample share a manager with requests that do not.

transformers decides once for a manager whether it samples, and which settings a request may have: those that the
generation config of the manager changes. So a manager that samples is given each setting that some request may use, and
is told the values of every request. `greedy.py` keeps the other requests greedy.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from typing import Any

from transformers import GenerationConfig

from .settings import marked_complete

SAMPLING = ("temperature", "top_p", "top_k")
# Values that change nothing. There is none for top_k: it is the size of the vocabulary.
NEUTRAL = {"temperature": 1.0, "top_p": 1.0}
# Values by which transformers makes its processors. Every request overrides them.
_PLACEHOLDERS: dict[str, Any] = {"temperature": 0.5, "top_p": 0.5, "top_k": 1}


def sampling_config(config: GenerationConfig, settings: Collection[str] | None) -> GenerationConfig:
    """The generation config of a manager.

    Args:
        config: The model's own.
        settings: Those of `SAMPLING` that requests may use; `None` if none samples.
    """
    config = copy.deepcopy(config)
    config.do_sample, config.num_return_sequences = settings is not None, 1
    for name in SAMPLING:
        setattr(config, name, _PLACEHOLDERS[name] if name in (settings or ()) else None)
    return marked_complete(config)  # None switches a setting off


def sampling_options(
    chosen: Mapping[str, float] | None, settings: Collection[str] | None, vocab_size: int
) -> dict[str, Any]:
    """What `add_request` is told of a request.

    Args:
        chosen: By which it samples; `None` if it takes the most likely tokens.
        settings: As in `sampling_config`.
        vocab_size: Of the model.
    """
    if settings is None:
        return {}
    values = {**NEUTRAL, "top_k": vocab_size, **(chosen or {})}
    options: dict[str, Any] = {name: values[name] for name in settings}
    if "top_k" in options:
        options["top_k"] = min(options["top_k"], vocab_size)
    return {**options, "do_sample": chosen is not None}
