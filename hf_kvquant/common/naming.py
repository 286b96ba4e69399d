"""How records name what a run used: folders relative to the repository, files by their hash. No path of the machine."""

from __future__ import annotations

import hashlib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]  # the repository, or the folder of the installed package


def place(path: Path) -> str:
    """A path relative to the repository; only its name if it lies outside."""
    path = path.resolve()
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else path.name


def model_name(name: str) -> str:
    """The name of a model in a record: `place` of a folder, or the hub id."""
    path = Path(name).expanduser()
    return place(path) if path.is_dir() else name


def sha256(content: Path | bytes) -> str:
    """The SHA-256 of a file or of bytes, hexadecimal."""
    return hashlib.sha256(content if isinstance(content, bytes) else content.read_bytes()).hexdigest()
