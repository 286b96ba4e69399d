"""The output of a job, one line per answer, which a second run continues.

    OUT.jsonl                 the answers in the order in which they were done
    OUT.jsonl.settings.json   what they depend on; a run with other settings is refused
    OUT.jsonl.0-of-2          answers of one process of several, until they are moved to OUT.jsonl

Every line has the number of its line in the input under `line`. A run that was killed may leave half a line at the end
of a file, which is dropped.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from ..common.errors import UsageError
from ..common.output import written

_REMEDY = "Name another file, or remove this one"


@dataclasses.dataclass(frozen=True)
class Done:
    """What an output holds: numbers of lines, those with an error among them."""

    lines: set[int]
    bad: set[int]


@dataclasses.dataclass(frozen=True)
class Output:
    """The files of one job. They are removed again if no line was written.

    Attributes:
        path: Of the answers.
    """

    path: Path

    @property
    def settings_path(self) -> Path:
        """The file with the settings."""
        return self.path.with_name(f"{self.path.name}.settings.json")

    def parts(self) -> list[Path]:
        """The files of processes that were not moved yet."""
        found = self.path.parent.iterdir() if self.path.parent.is_dir() else ()
        return sorted(path for path in found if re.fullmatch(rf"{re.escape(self.path.name)}\.\d+-of-\d+", path.name))

    def part(self, rank: int, count: int) -> Path:
        """The file that one of some processes writes to."""
        return self.path if count == 1 else self.path.with_name(f"{self.path.name}.{rank}-of-{count}")

    def check_owned(self) -> None:
        """Refuse an output that is there and was not written by this command.

        Raises:
            UsageError: There is a file of answers, or none of settings.
        """
        if self.path.exists() and not self.settings_path.exists():
            raise UsageError(
                f"`--output` must be new or come from this command, got {self.path} without "
                f"{self.settings_path.name}. {_REMEDY}."
            )

    @contextlib.contextmanager
    def opened(self, settings: Mapping[str, Any]) -> Iterator[None]:
        """Keep other runs away while this one writes, and bring all answers so far into one file.

        Args:
            settings: Everything that answers depend on, JSON-serialisable.

        Raises:
            UsageError: The file comes from other settings, or another run is writing it.
        """
        self.check_owned()
        if not self.settings_path.exists():
            with written(self.settings_path, overwrite=False) as path:
                path.write_text(json.dumps(settings, indent=1) + "\n", encoding="utf-8")
        with self.settings_path.open(encoding="utf-8") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise UsageError(
                    f"`--output` must not be in use, got {self.path}, which another run is writing. Wait for it."
                ) from error
            self._check_settings(file, settings)
            self.collect()
            try:
                yield
            finally:
                if not self.path.stat().st_size and not self.parts():  # nothing to keep, so nothing to fit
                    self.path.unlink()
                    self.settings_path.unlink()

    def _check_settings(self, file: IO[str], settings: Mapping[str, Any]) -> None:
        try:
            earlier = json.load(file)
        except ValueError:
            earlier = None
        if not isinstance(earlier, dict):
            raise UsageError(f"`--output` must have settings in JSON, got {self.settings_path}. {_REMEDY}.")
        now = json.loads(json.dumps(settings))
        names = [name for name in {**now, **earlier} if now.get(name) != earlier.get(name)]
        if names:
            told = "; ".join(
                f"`{name}` was {_short(earlier.get(name))} and is {_short(now.get(name))}" for name in names
            )
            raise UsageError(
                f"`--output` must come from the same settings, got {self.path}: {told}. {_REMEDY} together with "
                f"{self.settings_path.name}."
            )

    def collect(self) -> None:
        """Move the answers of all processes to the one file. Nothing is lost or doubled if this is interrupted."""
        held = self.done().lines
        with self.path.open("ab") as file:
            for part in self.parts():
                for line, number, _ in _lines(part):
                    if number not in held:
                        held.add(number)
                        file.write(line)
                file.flush()
                os.fsync(file.fileno())
                part.unlink()

    def done(self) -> Done:
        """The lines that are answered, after half a line at the end is dropped.

        Raises:
            UsageError: A line is not one of an output.
        """
        found = Done(set(), set())
        if self.path.exists():
            for _, number, is_bad in _lines(self.path):
                found.lines.add(number)
                if is_bad:
                    found.bad.add(number)
        return found

    @contextlib.contextmanager
    def writing(self, rank: int, count: int) -> Iterator[Writer]:
        """The file of one process, to which answers are appended."""
        with self.part(rank, count).open("ab") as file:
            yield Writer(file)


class Writer:
    """Appends lines to a file. Each is there for others as soon as it is written."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file

    def put(self, line: Mapping[str, Any]) -> None:
        """Append one line of JSON."""
        self._file.write((json.dumps(line, ensure_ascii=False) + "\n").encode("utf-8", "backslashreplace"))
        self._file.flush()


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else text[:37] + "..."


def _lines(path: Path) -> Iterator[tuple[bytes, int, bool]]:
    """The whole lines of a file, the numbers they have, and whether they have an error. Half a line is cut off."""
    begin = 0
    with path.open("r+b") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(0)
        for line in file:
            end = begin + len(line)
            content = _content(line) if line.endswith(b"\n") else None
            if content is None and end < size:
                raise UsageError(
                    f"`--output` must hold lines of this command, got {path} with another at byte {begin}. {_REMEDY}."
                )
            if content is None:
                file.truncate(begin)
                return
            yield line, content["line"], content.get("error") is not None
            begin = end


def _content(line: bytes) -> dict[str, Any] | None:
    """The object of a line of an output; `None` if it is not one."""
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) and isinstance(found.get("line"), int) else None
