"""Writes result files: tests a path before work begins, then writes a file completely or not at all.

The callers word the error for a path that cannot be written (`cli/arguments.py`, `cache/file.py`, and the
records of evaluations).
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path


def why_unwritable(path: Path, *, is_folder: bool = False, with_parents: bool = False) -> str | None:
    """Why a path cannot be written, in words; `None` if it can. Found by creating a file next to it, which is removed.

    `is_folder`: the path is of a folder to write files into, which need not exist yet. `with_parents`: the folders
    above it need not exist either.
    """
    try:
        if path.exists() and path.is_dir() != is_folder:
            return "a file" if is_folder else "a folder"
        if path.exists() and not is_folder and not path.is_file():
            return "not an ordinary file"
        probe = _beside(path / "file" if path.is_dir() else path)
        while with_parents and not probe.parent.exists():
            probe = probe.parent.with_name(probe.name)
        if not probe.parent.is_dir():
            return f"{probe.parent} is a file" if probe.parent.exists() else f"no folder {probe.parent} to write into"
        probe.touch(exist_ok=False)
        probe.unlink()
    except OSError as error:
        return (error.strerror or str(error)).lower()
    return None


@contextlib.contextmanager
def written(path: Path, *, overwrite: bool = True) -> Iterator[Path]:
    """Write a file in one step: readers find the old or the new one, never a part, even if the process is killed.

    Yields the temporary path to write to. It is moved to `path`, of which a link is followed, when the `with` block
    ends, and removed if the block fails.

    Raises:
        FileExistsError: There is a file already, and `overwrite` is False.
        OSError: The file cannot be written. An existing file is unchanged.
    """
    path = Path(os.path.realpath(path))
    beside = _beside(path)
    try:
        yield beside
        with beside.open("rb") as file:
            os.fsync(file.fileno())
        if overwrite:
            beside.replace(path)
        else:
            _move_to_new(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def _beside(path: Path) -> Path:
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}")


def _move_to_new(beside: Path, path: Path) -> None:
    """Move a file to a path, unless another process has taken the path meanwhile."""
    try:
        os.link(beside, path)  # unlike a rename, it never replaces
    except FileExistsError:
        raise
    except OSError:  # a file system without links
        if os.path.lexists(path):
            raise FileExistsError(path) from None
        beside.replace(path)
