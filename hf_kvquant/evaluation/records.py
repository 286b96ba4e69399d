"""What a run has measured so far: one JSON file, written after every part and resumed by a second run.

A record holds the card of the run (`provenance.py`), its settings, and its parts, results by name. What a part is, the
evaluation decides; here is decided when a file may be gone on with: where its settings are equal, and so are the code
and the machine that its parts come from.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ..arguments import UsageError, checked_output
from ..output import why_unwritable, written
from .provenance import card, gpu_card

# What may differ between the runs that fill one record.
_FREE = ("command", "date", "threads")
_REMEDY = "Name another file, or remove this one."


class CannotKeep(OSError):
    """A record's file that cannot be written."""


class RunRecord:
    """One run's results. `open` makes or resumes one.

    Args:
        path: Of the file; `None` keeps everything in memory.
        content: Card, settings and parts.
    """

    def __init__(self, path: Path | None, content: dict[str, Any]) -> None:
        self._path = path
        self._content = content

    @classmethod
    def open(cls, path: Path | None, settings: Mapping[str, Any]) -> RunRecord:
        """Begin a record, or resume the one that the file holds.

        Args:
            path: Of the file, written from the first part on; `None` keeps everything in memory.
            settings: JSON-serialisable: whatever results depend on.

        Raises:
            ValueError: The file is no record, or one of other settings, or of other code or another machine; or it
                cannot be written.
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
        for kind, allowed in (("settings", ()), ("card", _FREE)):
            difference = _difference(earlier[kind], content[kind], allowed)
            if difference is not None:
                raise ValueError(
                    f"RunRecord: `path` must be new or hold results of the same {kind}, got {path}: {difference}. "
                    f"{_REMEDY}"
                )
        return cls(path, earlier)

    def get(self, part: str) -> dict[str, Any] | None:
        """A part's result, `None` where it has none yet."""
        found: dict[str, Any] | None = self._content["parts"].get(part)
        return found

    def put(self, part: str, result: Mapping[str, Any]) -> None:
        """Keep a part's result, and write the file.

        Raises:
            CannotKeep: It cannot be written; what it held before, it holds.
        """
        self._content["parts"][part] = _plain(result)
        if self._path is not None:
            try:
                with written(self._path) as path:
                    path.write_text(_spell(self._content), encoding="utf-8")
            except OSError as error:
                raise CannotKeep(error.strerror or str(error)) from error

    def to_dict(self) -> dict[str, Any]:
        """Card, settings and parts."""
        return self._content

    def kept(self) -> str:
        """Where what was measured is, and how to go on, for a run that ends early."""
        if self._path is None:
            return "Nothing is kept: add --output FILE to keep what was measured."
        if not self._content["parts"]:
            return "Nothing was measured yet."
        return f"What was measured is in {self._path}: run the same command again to go on."


def check_record(output: str | None, where: str) -> None:
    """Refuse an `--output` that cannot be written, before there is anything to write.

    Raises:
        UsageError: It cannot.
    """
    if output is not None:
        checked_output(output, where)


def open_record(output: str | None, settings: Mapping[str, Any], where: str) -> RunRecord:
    """The record of `--output`; `where` opens the message where it cannot be used.

    Raises:
        UsageError: It cannot.
    """
    try:
        return RunRecord.open(None if output is None else Path(output).expanduser(), settings)
    except ValueError as error:
        raise UsageError(f"{where}: `--output` cannot be used. {error}") from error


def read_record(path: Path) -> dict[str, Any]:
    """Card, settings and parts of a file.

    Raises:
        ValueError: The file is no record.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"RunRecord: `path` must hold JSON, got {path}: {error}. {_REMEDY}") from error
    if not isinstance(content, dict) or not all(
        isinstance(content.get(kind), dict) for kind in ("card", "settings", "parts")
    ):
        raise ValueError(f"RunRecord: `path` must hold card, settings and parts, got {path}, which does not. {_REMEDY}")
    return content


def _difference(earlier: Mapping[str, Any], now: Mapping[str, Any], allowed: tuple[str, ...]) -> str | None:
    """The first entry that is not the same, in words."""
    for name in dict.fromkeys([*now, *earlier]):
        if name not in allowed and earlier.get(name) != now.get(name):
            return f"`{name}` was {_short(earlier.get(name))} and is {_short(now.get(name))}"
    return None


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _plain(value: Any) -> Any:
    """A value as JSON gives it back; what is not finite is unknown, and so `None`."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"RunRecord: results must be JSON-serialisable, got {type(value).__name__}.")


def _spell(content: Mapping[str, Any]) -> str:
    """JSON with an entry a line, and lists of numbers in one line each."""
    text = json.dumps(content, indent=1, allow_nan=False)
    return re.sub(r"\[\n[^\[\]{}\"]*\]", lambda match: re.sub(r"\s+", " ", match[0]), text) + "\n"
