"""What a user is told, in one line, of a run that ends before its time.

What was measured by then, and when a file may be gone on with, is `records.py`'s.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

from ..arguments import Interrupted, UsageError
from ..fidelity import OutOfMemory, is_out_of_memory
from .records import CannotKeep, RunRecord


@dataclasses.dataclass
class Ongoing:
    """What is being measured, in words, for whoever has to be told that it was not."""

    part: str = "the first steps"


@contextlib.contextmanager
def early_end(record: RunRecord, where: str, *, lower: str, value: object, more: str = "") -> Iterator[Ongoing]:
    """Tell in a line what is left of a run that is interrupted, or lacks memory or room for its results.

    Args:
        record: Of the run.
        where: Opens the message.
        lower: The option that takes the most memory.
        value: What was given for it.
        more: What else to do, opening with a comma.

    Raises:
        Interrupted: The run is; the text says what was kept.
        UsageError: Memory has run out, or what was measured cannot be written.
    """
    ongoing = Ongoing()
    try:
        yield ongoing
    except KeyboardInterrupt as error:
        raise Interrupted(f"{where} ended in {ongoing.part}. {record.kept()}") from error
    except CannotKeep as error:
        raise UsageError(
            f"{where}: `--output` must be a file that can be written, got {error} in {ongoing.part}. Make room, then "
            "run the same command again: it goes on with what was written before."
        ) from error
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        under = f" under {error.name}" if isinstance(error, OutOfMemory) else ""
        raise UsageError(
            f"{where}: `{lower}` must fit into memory, got {value}, which does not in {ongoing.part}{under}. Lower it"
            f"{more}. {record.kept()}"
        ) from error
