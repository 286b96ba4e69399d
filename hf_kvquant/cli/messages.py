"""Messages of packages that transformers imports with any model, whether or not the model needs them.

With torchao installed, every command that loads a model would begin with lines about kernels that torchao could not
load and about its use of torch. They are held back, and shown only if the model is quantised by torchao.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

# The loggers to which torchao's messages go while it is imported: its own, and one of the torch code that it calls.
_LOGGERS = ("torchao", "torch.utils._pytree")


class _Held(logging.Filter):
    """Keeps the records of torchao from being shown."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def filter(self, record: logging.LogRecord) -> bool:
        # torch's message is about a class, of which it names only the last part.
        about = record.args[0] if isinstance(record.args, tuple) and record.args else None
        is_of_torchao = record.name == "torchao" or str(getattr(about, "__module__", "")).startswith("torchao.")
        if is_of_torchao:
            self.records.append(record)
        return not is_of_torchao


_HELD = _Held()


@contextlib.contextmanager
def held() -> Iterator[None]:
    """Hold back what torchao logs when it is imported within a `with` block, unless `tell_if_used` lets it through."""
    for name in _LOGGERS:
        logging.getLogger(name).addFilter(_HELD)
    try:
        yield
    finally:
        _let_through()
        _HELD.records.clear()


def tell_if_used(model: Any) -> None:
    """Show what was held back, and what follows, if torchao has quantised the model."""
    quantization = getattr(model.config, "quantization_config", None)
    if getattr(quantization, "quant_method", None) != "torchao":
        return
    _let_through()
    for record in _HELD.records:
        logging.getLogger(record.name).handle(record)
    _HELD.records.clear()


def _let_through() -> None:
    for name in _LOGGERS:
        logging.getLogger(name).removeFilter(_HELD)
