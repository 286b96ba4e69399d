"""Calls of `generate` that transformers would compile and cannot: they run as they are, and the log says so once.

Which calls these are is decided where it is found out, in `patching.py` and `encoder_decoder.py`.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

from transformers import PreTrainedModel

logger = logging.getLogger(__name__)


def leave_uncompiled(model: PreTrainedModel, generation_config: Any, when: str, remedy: str) -> None:
    """Keep `generate` from compiling.

    Args:
        model: The generating model.
        generation_config: Of this call; `disable_compile` is set.
        when: Of which calls that is true, and why; for the log.
        remedy: What to do about it.
    """
    generation_config.disable_compile = True
    _log(type(model).__name__, when, remedy)


@functools.cache
def _log(name: str, when: str, remedy: str) -> None:
    logger.warning("generate: %s is not compiled %s. Correct, slower. %s", name, when, remedy)
