"""That a results file is whole at any moment, is gone on with by an equal run, and by no other."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest

from hf_kvquant.common import naming
from hf_kvquant_evals import provenance, records
from hf_kvquant_evals.records import RunRecord

SETTINGS: dict[str, Any] = {"window": 64, "presets": ("none", "int8"), "stride": None}
REMEDY = "Name another file, or remove this one."


def test_a_second_run_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    first = RunRecord.open(path, SETTINGS)
    assert not path.exists() and first.get("window 0") is None
    first.put("window 0", {"kld": [0.25, 1e-9], "max": math.inf, "counts": {3: 4}})
    second = RunRecord.open(path, SETTINGS)
    assert second.get("window 0") == {"kld": [0.25, 1e-9], "max": None, "counts": {"3": 4}}
    second.put("window 1", {"kld": []})
    content = json.loads(path.read_text(encoding="utf-8"))
    assert content == second.to_dict() and list(content["parts"]) == ["window 0", "window 1"]
    assert content["settings"] == {"window": 64, "presets": ["none", "int8"], "stride": None}
    assert content["card"]["hf_kvquant"] == provenance.__version__
    assert "[ 0.25, 1e-09 ]" in path.read_text(encoding="utf-8")  # one line, however many numbers
    assert list(tmp_path.iterdir()) == [path]


def test_without_a_file(tmp_path: Path) -> None:
    record = RunRecord.open(None, SETTINGS)
    record.put("a", {"b": 1})
    assert record.get("a") == {"b": 1} and not list(tmp_path.iterdir())


def test_an_interrupted_write_leaves_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.json"
    record = RunRecord.open(path, SETTINGS)
    record.put("a", {"b": 1})

    def interrupted(*args: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        record.put("c", {"d": 1})
    assert list(tmp_path.iterdir()) == [path]
    assert RunRecord.open(path, SETTINGS).to_dict()["parts"] == {"a": {"b": 1}}


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "must hold JSON, got {path}: Expecting value: line 1 column 1 (char 0). " + REMEDY),
        ("{}", "must hold card, settings and parts, got {path}, which does not. " + REMEDY),
    ],
)
def test_a_damaged_file_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "run.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError) as error:
        RunRecord.open(path, SETTINGS)
    assert str(error.value) == "RunRecord: `path` " + message.format(path=path)
    assert path.read_text(encoding="utf-8") == text


def test_another_run_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.json"
    RunRecord.open(path, SETTINGS).put("a", {"b": 1})
    with pytest.raises(ValueError) as error:
        RunRecord.open(path, {**SETTINGS, "window": 32})
    assert str(error.value) == (
        f"RunRecord: `path` must be new or hold results of the same settings, got {path}: `window` was 64 and is 32. "
        + REMEDY
    )
    here = records.card()
    monkeypatch.setattr(records, "card", lambda: {**here, "command": "another", "date": "later"})
    RunRecord.open(path, SETTINGS)
    monkeypatch.setattr(records, "card", lambda: {**here, "commit": "another"})
    with pytest.raises(ValueError, match=r'results of the same card, got .*: `commit` was .* and is "another"'):
        RunRecord.open(path, SETTINGS)


def test_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **options: Any) -> None:
        raise PermissionError(13, "Permission denied")

    for path, found in ((tmp_path, "a folder"), (tmp_path / "no" / "x", f"no folder {tmp_path / 'no'} to write into")):
        with pytest.raises(ValueError) as error:
            RunRecord.open(path, SETTINGS)
        assert str(error.value) == (
            f"RunRecord: `path` must be a file's in a folder that is there, got {path}: {found}."
        )
    with monkeypatch.context() as patch:
        patch.setattr(Path, "touch", refuse)
        with pytest.raises(ValueError, match=f"got {tmp_path / 'x'}: permission denied"):
            RunRecord.open(tmp_path / "x", SETTINGS)
    with pytest.raises(TypeError, match="results must be JSON-serialisable, got PosixPath"):
        RunRecord.open(None, {"a": tmp_path})
    assert os.listdir(tmp_path) == []


def test_a_model_has_one_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "model").mkdir()
    assert naming.model_name("~/model") == naming.model_name(str(tmp_path / "model")) == "model"
    assert naming.model_name("somebody/model") == "somebody/model"
