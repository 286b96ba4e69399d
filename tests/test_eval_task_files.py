"""That names and data of zero-shot tasks are looked at before a model is loaded, and mistakes told by file and line."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest

from hf_kvquant.common.errors import UsageError
from hf_kvquant_evals.tasks import data as task_files


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "`--data` must hold copa.jsonl for task copa, got"),
        ("", "copa.jsonl must hold items, one JSON object a line, got an empty file"),
        ("\n\n", "got an empty file"),
        ("{", "copa.jsonl, line 1, must be a JSON object with query, choices, gold, got no JSON"),
        ("[]", "got a list"),
        ('{"query": "a", "choices": ["b", "c"]}', "got no 'gold'"),
        ('{"query": "a", "choices": "bc", "gold": 0}', "got 'choices' of type str"),
        ('{"query": "", "choices": ["b"], "gold": 0}', "got an empty 'query'"),
        ('{"query": "a", "choices": ["b", ""], "gold": 0}', "got an option that is no text"),
        ('{"query": "a", "choices": ["b", "c"], "gold": 2}', "got 'gold' 2 with 2 options"),
        (
            '{"query": "a", "choices": ["b", "c"], "gold": 1}\n{"query": "a", "choices": ["b"], "gold": true}',
            "copa.jsonl, line 2, must be a JSON object with query, choices, gold, got 'gold' of type bool",
        ),
    ],
)
def test_data_that_cannot_be_read(tmp_path: Path, content: str | None, message: str) -> None:
    (tmp_path / "boolq.jsonl").write_text('{"query": "a", "choices": ["b", "c"], "gold": 1}\n', encoding="utf-8")
    if content is not None:
        (tmp_path / "copa.jsonl").write_text(content, encoding="utf-8")
    with pytest.raises(UsageError) as caught:
        task_files.check_data(["boolq", "copa"], str(tmp_path))
    assert message in str(caught.value)


@pytest.mark.parametrize(("line", "message"), [('{"text": "a"}', "with page, got no 'page'"), ('{"page": "a"}', None)])
def test_pages_are_looked_at(tmp_path: Path, line: str, message: str | None) -> None:
    (tmp_path / "wikitext.jsonl").write_text(line + "\n", encoding="utf-8")
    with pytest.raises(UsageError, match=message) if message else contextlib.nullcontext():
        task_files.check_data(["wikitext"], str(tmp_path))


def test_a_data_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"`--data` must be a folder with JSON lines, got .*: no such folder"):
        task_files.check_data(["copa"], str(tmp_path / "nowhere"))


def test_by_default_all_files_that_are_there_are_read(tmp_path: Path) -> None:
    assert task_files.checked_names(None, str(tmp_path)) == task_files.offline_names()
    for name in ("wikitext", "boolq"):
        (tmp_path / f"{name}.jsonl").touch()
    assert task_files.checked_names(None, str(tmp_path)) == ["boolq", "wikitext"]


def test_names_of_lm_eval_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task_files, "lm_eval_names", lambda: ["piqa", "openbookqa"])
    assert task_files.checked_names(["piqa,openbookqa", "piqa"], None) == ["piqa", "openbookqa"]
    with pytest.raises(UsageError, match=r"must name a task of lm-eval, got 'openbook_qa'. Did you mean 'openbookqa'"):
        task_files.checked_names(["openbook_qa"], None)


def test_without_a_network_lm_evals_own_data_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Manager:
        def load(self, specs: Any) -> Any:
            raise ConnectionError("no route to host")

    monkeypatch.setattr(task_files, "_manager", lambda **_: Manager())
    with pytest.raises(UsageError, match=r"--tasks` piqa must have its data .* got ConnectionError: no route"):
        task_files.load_tasks(["piqa"], None)
