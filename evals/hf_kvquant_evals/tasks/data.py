"""The zero-shot tasks: lm-eval's own by name, or some of them from JSON lines, for machines without a network.

The offline tasks are the task files in `offline/`, in lm-eval's own format; the user gives the folder with their data.
Data are checked before a model is loaded, because errors of the `datasets` library name neither the file nor the line.
lm-eval is imported inside functions: it is optional and slow to import.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from hf_kvquant.common.errors import UsageError, did_you_mean

FOLDER = Path(__file__).parent / "offline"
# How log-likelihoods are computed: through the cache, or in one forward that computes the same.
MODES = ("decode", "simulated")
# The tasks of the zero-shot average: QServe's choice (arXiv 2405.04532).
AVERAGED = ("piqa", "arc_easy", "arc_challenge", "hellaswag", "winogrande")

# Keys of a line and their types. `gold` is an index into the list.
_CHOICES: dict[str, type] = {"query": str, "choices": list, "gold": int}
_FIELDS: dict[str, dict[str, type]] = {
    "winogrande": {"context_options": list, "continuation": str, "gold": int},
    "lambada_openai": {"context": str, "continuation": str},
    "wikitext": {"page": str},
}


def offline_names() -> list[str]:
    """Names of the tasks that can be read from JSON lines."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def described_fields() -> str:
    """The fields of a line of JSON for each task, in words."""
    others = (f"{', '.join(fields)} ({name})" for name, fields in _FIELDS.items())
    return f"{', '.join(_CHOICES)}, or {', or '.join(others)}"


def checked_names(names: Sequence[str] | None, data: str | None) -> list[str]:
    """The tasks to run, each once, of names as typed, also several with commas between them.

    `None` takes those of the average; with `data`, the folder of `--data`, all offline tasks that have a file.
    """
    known = offline_names() if data is not None else lm_eval_names()
    # If there is no file at all, all names are kept, and `check_data` reports the missing files.
    default = AVERAGED if data is None else [name for name in known if data_file(name, data).exists()] or known
    wanted = [name for word in names or default for name in word.split(",") if name]
    for name in wanted:
        if name not in known:
            where = "a task file" if data is not None else "a task of lm-eval"
            listed = f" There are {', '.join(known)}." if data is not None else ""
            raise UsageError(f"`--tasks` must name {where}, got '{name}'.{did_you_mean(name, known)}{listed}")
    return list(dict.fromkeys(wanted))


def lm_eval_names() -> list[str]:
    """Names of lm-eval's own tasks, groups of tasks and tags."""
    return list(_manager(with_defaults=True).all_tasks)


def load_tasks(names: Sequence[str], data: str | None) -> dict[str, Any]:
    """lm-eval's task objects by name; a group or tag becomes its tasks. Without `data`, lm-eval downloads its own."""
    specs = list(names) if data is None else [_offline_spec(name, Path(data)) for name in names]
    manager = _manager(with_defaults=data is None)
    tasks: dict[str, Any] = {}
    for name, spec in zip(names, specs, strict=True):
        try:
            tasks.update(manager.load([spec])["tasks"])
        except (OSError, ValueError) as error:  # no network: ConnectionError; unknown data set: another OSError
            reason = " ".join(str(error).split())[:300]
            raise UsageError(
                f"`--tasks` {name} must have its data on this machine or a network to get them from, got "
                f"{type(error).__name__}: {reason}. Give a folder of JSON lines with --data."
            ) from error
    return tasks


def data_file(name: str, data: str) -> Path:
    """The file with the JSON lines of a task."""
    return Path(data).expanduser().resolve() / f"{name}.jsonl"


def check_data(names: Sequence[str], data: str) -> None:
    """Refuse a file that is missing or empty, or a line without the fields of its task."""
    folder = Path(data).expanduser()
    if not folder.is_dir():
        found = "a file" if folder.exists() else "no such folder"
        raise UsageError(f"`--data` must be a folder with JSON lines, got {data}: {found}.")
    for name in names:
        path = data_file(name, data)
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            there = sorted(other.stem for other in folder.glob("*.jsonl"))
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
            raise UsageError(
                f"`--data` must hold {path.name} for task {name}, got {folder}: {reason}. "
                f"It holds data for: {', '.join(there) or 'no task'}."
            ) from error
        if not any(line.strip() for line in lines):
            raise UsageError(f"{path.name} must hold items, one JSON object a line, got an empty file.")
        fields = _FIELDS.get(name, _CHOICES)
        for number, line in enumerate(lines, 1):
            problem = _problem(line, fields)
            if line.strip() and problem:
                raise UsageError(
                    f"{path.name}, line {number}, must be a JSON object with {', '.join(fields)}, got {problem}."
                )


def _problem(line: str, fields: dict[str, type]) -> str | None:
    """What is wrong with a line, in words; `None` if nothing is."""
    try:
        item = json.loads(line)
    except ValueError as error:
        return f"no JSON ({error})"
    if not isinstance(item, dict):
        return f"a {type(item).__name__}"
    for field, kind in fields.items():
        if field not in item:
            return f"no '{field}'"
        if not isinstance(item[field], kind) or isinstance(item[field], bool):
            return f"'{field}' of type {type(item[field]).__name__}"
        if item[field] == "" or item[field] == []:
            return f"an empty '{field}'"
    options = next((item[field] for field, kind in fields.items() if kind is list), None)
    if options is not None and not all(isinstance(option, str) and option for option in options):
        return "an option that is no text"
    if options is not None and not 0 <= item["gold"] < len(options):
        return f"'gold' {item['gold']} with {len(options)} options"
    return None


def _offline_spec(name: str, data: Path) -> dict[str, Any]:
    spec: dict[str, Any] = yaml.safe_load((FOLDER / f"{name}.yaml").read_text(encoding="utf-8"))
    if name == "wikitext":
        from lm_eval.tasks.wikitext import preprocess_wikitext

        spec["doc_to_target"] = preprocess_wikitext.wikitext_detokenizer
        spec["process_results"] = preprocess_wikitext.process_results
    return {**spec, "dataset_kwargs": {"data_files": {"test": str(data_file(name, str(data)))}}}


def _manager(*, with_defaults: bool) -> Any:
    from lm_eval.tasks import TaskManager

    return TaskManager(include_defaults=with_defaults)
