"""Stops `generate` from compiling calls that transformers cannot compile. They run in eager mode, logged once.

`hook.py` and `encoder_decoder.py` decide which calls these are.
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
        generation_config: Of this call; its `disable_compile` is set.
        when: Which calls are not compiled, and why, for the log.
        remedy: What the user can do.
    """
    generation_config.disable_compile = True
    _log(type(model).__name__, when, remedy)


@functools.cache
def _log(name: str, when: str, remedy: str) -> None:
    logger.warning("generate: %s is not compiled %s. Correct, slower. %s", name, when, remedy)
