"""What a run has measured so far: one JSON file, written after every part and resumed by a second run.

A record holds the card of the run (`provenance.py`), its settings, and its parts: results by name. The evaluation
decides what a part is. A file is resumed only if its settings, code and machine are those of the new run.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch

from hf_kvquant.common.errors import Interrupted, UsageError, is_out_of_memory
from hf_kvquant.common.output import why_unwritable, written
from hf_kvquant.common.progress import Tell, show_progress

from .errors import CannotKeep, OutOfMemory
from .provenance import card, gpu_card

# Entries of the card that may differ between the runs that fill one record.
_FREE = ("command", "date", "threads")
_REMEDY = "Name another file, or remove this one."

# The content of a record's file: card, settings and parts.
Record = Mapping[str, Any]


class RunRecord:
    """One run's results. `open` makes or resumes one."""

    def __init__(self, path: Path | None, content: dict[str, Any]) -> None:
        self._path = path
        self._content = content

    @classmethod
    def open(cls, path: Path | None, settings: Mapping[str, Any]) -> RunRecord:
        """Begin a record, or resume the one that the file holds. Without a path, everything is kept in memory.

        `settings` are everything that the results depend on, JSON-serialisable. `ValueError` if the file is not a
        record, or comes from other settings, other code or another machine, or cannot be written.
        """
        where = {**card(), **(gpu_card() if torch.cuda.is_available() else {})}
        content = {"card": where, "settings": _plain(settings), "parts": {}}
        if path is None:
            return cls(None, content)
        found = why_unwritable(path)
        if found is not None:
            raise ValueError(f"RunRecord: `path` must be a file's in a folder that is there, got {path}: {found}.")
        if not path.exists():
            return cls(path, content)
        earlier = read_record(path)
        for kind, free in (("settings", ()), ("card", _FREE)):
            for name in (name for name in {**content[kind], **earlier[kind]} if name not in free):
                values = [each[kind].get(name) for each in (earlier, content)]
                if values[0] != values[1]:
                    texts = map(json.dumps, values)
                    was, now = (text if len(text) <= 80 else text[:77] + "..." for text in texts)
                    raise ValueError(
                        f"RunRecord: `path` must be new or hold results of the same {kind}, got {path}: `{name}` was "
                        f"{was} and is {now}. {_REMEDY}"
                    )
        return cls(path, earlier)

    def get(self, part: str) -> dict[str, Any] | None:
        """A part's result; `None` if it has none yet."""
        found: dict[str, Any] | None = self._content["parts"].get(part)
        return found

    def put(self, part: str, result: Mapping[str, Any]) -> None:
        """Keep a part's result, and write the file. If that raises `CannotKeep`, the file holds what it held before."""
        self._content["parts"][part] = _plain(result)
        if self._path is not None:
            try:
                # One entry per line, and each list of numbers on one line.
                text = json.dumps(self._content, indent=1, allow_nan=False)
                text = re.sub(r"\[\n[^\[\]{}\"]*\]", lambda match: re.sub(r"\s+", " ", match[0]), text) + "\n"
                with written(self._path) as path:
                    path.write_text(text, encoding="utf-8")
            except OSError as error:
                raise CannotKeep(error.strerror or str(error)) from error

    def fill(self, part: str, measure: Callable[[], Mapping[str, Any]]) -> None:
        """Measure a part and keep its result, unless there is one already."""
        if self.get(part) is None:
            self.put(part, measure())

    def to_dict(self) -> dict[str, Any]:
        """Card, settings and parts."""
        return self._content

    def kept(self) -> str:
        """What was kept of a run that ends early, and how to resume it, in a sentence."""
        if self._path is None:
            return "Nothing is kept: add --output FILE to keep what was measured."
        if not self._content["parts"]:
            return "Nothing was measured yet."
        return f"What was measured is in {self._path}: run the same command again to resume."


def open_record(output: str | None, settings: Mapping[str, Any]) -> RunRecord:
    """Make or resume the record of `--output`."""
    try:
        return RunRecord.open(None if output is None else Path(output).expanduser(), settings)
    except ValueError as error:
        raise UsageError(f"`--output` cannot be used. {error}") from error


def read_record(path: Path) -> dict[str, Any]:
    """Card, settings and parts of a file. Raises `ValueError` if it is not a record."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"RunRecord: `path` must hold JSON, got {path}: {error}. {_REMEDY}") from error
    if not isinstance(content, dict) or not all(
        isinstance(content.get(kind), dict) for kind in ("card", "settings", "parts")
    ):
        raise ValueError(f"RunRecord: `path` must hold card, settings and parts, got {path}, which does not. {_REMEDY}")
    return content


@contextlib.contextmanager
def measuring(
    record: RunRecord,
    where: str,
    total: int,
    *,
    unit: str = "step",
    lower: str,
    value: int,
    more: str = "",
    is_shown: bool = True,
) -> Iterator[Tell]:
    """Show the progress of a run, as `show_progress` does. If it ends early, say in one line where, and what was kept.

    `lower` is the option that takes the most memory, `value` its value, and `more` what else lowers the memory, which
    starts with a comma.
    """
    part = "the first steps"
    try:
        with show_progress(where, total, unit=unit, is_shown=is_shown) as show:

            def tell(done: int = 0, /, doing: str | None = None) -> None:
                nonlocal part
                part = doing or part
                show(done, doing)

            yield tell
    except KeyboardInterrupt as error:
        raise Interrupted(f"{where} ended in {part}. {record.kept()}") from error
    except CannotKeep as error:
        raise UsageError(
            f"`--output` must be a file that can be written, got {error} in {part}. Make room, then run the same "
            "command again: it resumes what was written before."
        ) from error
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        under = f" under {error.name}" if isinstance(error, OutOfMemory) else ""
        raise UsageError(
            f"`{lower}` must fit into memory, got {value}, too much for {part}{under}. Lower it{more}. {record.kept()}"
        ) from error


def _plain(value: Any) -> Any:
    """A value as JSON returns it. Infinity and NaN become `None`, which stands for unknown."""

    def refuse(value: Any) -> NoReturn:
        raise TypeError(f"RunRecord: results must be JSON-serialisable, got {type(value).__name__}.")

    return json.loads(json.dumps(value, default=refuse), parse_constant=lambda name: None)
