"""The one line that a user gets when a run ends early: interrupted, out of memory, or unable to write its results.

`records.py` says what was kept and when a file can be resumed.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

from .arguments import Interrupted, UsageError
from .fidelity import OutOfMemory, is_out_of_memory
from .records import CannotKeep, RunRecord


@dataclasses.dataclass
class Ongoing:
    """What a run is measuring right now, in words, for the message that it ended there."""

    part: str = "the first steps"


@contextlib.contextmanager
def early_end(record: RunRecord, where: str, *, lower: str, value: object, more: str = "") -> Iterator[Ongoing]:
    """Turn an interrupt, lack of memory or lack of disk space into one line that says what was kept.

    Args:
        record: The run's record.
        where: Start of the message.
        lower: The option that takes the most memory, and that the user should lower.
        value: Its value.
        more: What else to do; starts with a comma.

    Yields:
        An `Ongoing`, to be told what is being measured.

    Raises:
        Interrupted: Ctrl-C.
        UsageError: Memory ran out, or results could not be written.
    """
    ongoing = Ongoing()
    try:
        yield ongoing
    except KeyboardInterrupt as error:
        raise Interrupted(f"{where} ended in {ongoing.part}. {record.kept()}") from error
    except CannotKeep as error:
        raise UsageError(
            f"{where}: `--output` must be a file that can be written, got {error} in {ongoing.part}. Make room, then "
            "run the same command again: it resumes what was written before."
        ) from error
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        under = f" under {error.name}" if isinstance(error, OutOfMemory) else ""
        raise UsageError(
            f"{where}: `{lower}` must fit into memory, got {value}, too much for {ongoing.part}{under}. Lower it"
            f"{more}. {record.kept()}"
        ) from error
