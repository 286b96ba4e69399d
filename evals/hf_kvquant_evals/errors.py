"""All exceptions of evaluations, as branches of the tree of the package (`hf_kvquant/common/errors.py`).

    KVQuantError
        CommandError
            UsageError
                CannotInject
            RefusedResult
                NothingRead
        CannotScore (ValueError)
        CannotKeep (OSError)
        OutOfMemory (MemoryError)

In parentheses: the built-in exception as which a caller may catch it, too.
"""

from __future__ import annotations

from hf_kvquant.common.errors import KVQuantError, RefusedResult, UsageError


class CannotInject(UsageError):
    """Nothing can be injected: it is unknown how the model computes its keys, or the number asked for is invalid."""


class NothingRead(RefusedResult):
    """The numbers would not be those of the quantised cache."""


class CannotScore(KVQuantError, ValueError):
    """An item of a task does not fit into the model's context."""


class CannotKeep(KVQuantError, OSError):
    """A record's file could not be written."""


class OutOfMemory(KVQuantError, MemoryError):
    """Memory ran out under the config `name`."""

    def __init__(self, name: str) -> None:
        super().__init__(f"compare: memory must suffice for {name}, got too little. Use a shorter text.")
        self.name = name
