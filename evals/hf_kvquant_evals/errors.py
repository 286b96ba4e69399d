"""The ways in which a measurement ends without results, besides those of all commands (`common/errors.py`)."""

from __future__ import annotations

from hf_kvquant.common.errors import RefusedResult


class NothingRead(RefusedResult):
    """The numbers would not be those of the quantised cache."""


class OutOfMemory(MemoryError):
    """Memory ran out under the config `name`."""

    def __init__(self, name: str) -> None:
        super().__init__(f"compare: memory must suffice for {name}, got too little. Use a shorter text.")
        self.name = name
