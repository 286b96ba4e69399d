"""That paths are tried without a trace, and that files are written as a whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from hf_kvquant.common.output import why_unwritable, written


def test_what_can_be_written_is_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("old", encoding="utf-8")
    for path in (tmp_path / "new", tmp_path / "file", tmp_path / ("n" * 200)):
        assert why_unwritable(path) is None
    for path in (tmp_path, tmp_path / "new"):
        assert why_unwritable(path, is_folder=True) is None
    assert why_unwritable(tmp_path / "a" / "b" / "c", is_folder=True, with_parents=True) is None
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_text(encoding="utf-8") == "old"


def test_relative_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("new", ".", "a/b"):
        assert why_unwritable(Path(name), is_folder=True, with_parents=True) is None
    assert why_unwritable(Path("new")) is None and list(tmp_path.iterdir()) == []


def test_what_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.touch()
    os.mkfifo(tmp_path / "pipe")
    absent = tmp_path / "absent"
    assert why_unwritable(tmp_path) == "a folder"
    assert why_unwritable(file, is_folder=True) == "a file"
    assert why_unwritable(tmp_path / "pipe") == "not an ordinary file"
    assert why_unwritable(absent / "x") == f"no folder {absent} to write into"
    assert why_unwritable(absent / "x", is_folder=True) == f"no folder {absent} to write into"
    assert why_unwritable(file / "x") == f"{file} is a file"
    assert why_unwritable(file / "x" / "y", is_folder=True, with_parents=True) == f"{file} is a file"
    assert why_unwritable(tmp_path / ("n" * 250)) == "file name too long"  # with what is written beside it

    def refuse(*args: Any, **options: Any) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(Path, "touch", refuse)
    assert why_unwritable(tmp_path / "x") == "read-only file system"


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is forbidden to root")
def test_a_folder_without_permission(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    assert why_unwritable(tmp_path / "x") == why_unwritable(tmp_path, is_folder=True) == "permission denied"


def test_a_file_is_the_old_or_the_new_one(tmp_path: Path) -> None:
    path, link = tmp_path / "file", tmp_path / "link"
    path.write_text("old", encoding="utf-8")
    link.symlink_to(path)
    with pytest.raises(KeyboardInterrupt), written(path) as beside:
        beside.write_text("ne", encoding="utf-8")
        raise KeyboardInterrupt
    assert path.read_text(encoding="utf-8") == "old"
    with written(link) as beside:
        beside.write_text("new", encoding="utf-8")
        assert path.read_text(encoding="utf-8") == "old"
    assert path.read_text(encoding="utf-8") == "new" and link.is_symlink()
    with pytest.raises(FileExistsError), written(path, overwrite=False) as beside:
        beside.write_text("newer", encoding="utf-8")
    assert path.read_text(encoding="utf-8") == "new"
    assert sorted(each.name for each in tmp_path.iterdir()) == ["file", "link"]
