"""Runs `eval tasks`. A part of the record is one task under one preset, so an interrupted run loses at most one part.

lm-eval is imported inside functions: it is optional and slow to import.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.console import Console

from hf_kvquant.common.errors import RefusedResult, UsageError
from hf_kvquant.common.naming import sha256

from ..errors import CannotScore, NothingRead
from ..preparation import Subject
from ..records import measuring, open_record
from .data import MODES, check_data, checked_names, data_file, load_tasks
from .pages import check_batched
from .task_results import Part, evaluate, part_name

WHERE = "eval tasks"


def ready(tasks: Sequence[str] | None, data: str | None) -> list[str]:
    """The names of the tasks to run, once everything but the model is known to be there. The arguments are as typed."""
    if data is not None:  # no network for the Hugging Face libraries
        os.environ["HF_HUB_OFFLINE"] = os.environ["HF_DATASETS_OFFLINE"] = "1"
    try:
        import datasets
        import lm_eval  # noqa: F401
    except ImportError as error:
        raise UsageError(
            f"lm-eval must be installed, got: {error}. Install it: pip install 'hf-kvquant[eval]'."
        ) from error
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    datasets.disable_progress_bars()
    names = checked_names(tasks, data)
    if data is not None:
        check_data(names, data)
    return names


def measure(
    subject: Subject,
    names: Sequence[str],
    *,
    output: str | None = None,
    data: str | None = None,
    mode: str = MODES[0],
    limit: int | None = None,
    batch_size: int = 8,
    batching: bool = False,
    **dense: int | None,
) -> dict[tuple[str, str], Part] | None:
    """Run tasks under every preset, and keep the results in the file `output`, or in memory.

    The keyword arguments are the options of `hf-kvquant eval tasks` with these names; `dense` are `WINDOWS`. Returns
    the results by task and preset; `None` in a process that does not collect the results of the others.
    """
    import lm_eval

    from .lm_eval_model import KVQuantLM

    tokenizer, configs = subject.tokenizer, subject.configs
    check_tokenizer(subject)
    weights = sorted(Path(subject.name).expanduser().glob("*.safetensors"))
    # Not tasks and presets: a later run may add some to the file.
    settings = {
        "evaluation": "tasks",
        "lm_eval": lm_eval.__version__,
        "revision": getattr(subject.model.config, "_commit_hash", None),
        "weights_sha256": {path.name: sha256(path) for path in weights},
        **subject.prepare(),
        "mode": mode,
        "limit": limit,
        "is_offline": data is not None,
        **dense,  # they change what every preset means
        **({"batching": True} if batching else {}),  # records of other runs do not have it
    }
    record = open_record(output, settings)
    tasks = load_tasks(names, data)
    hashes = hashes_of(tasks, data)
    try:
        lm = KVQuantLM(subject.model, tokenizer=tokenizer, mode=mode, batch_size=batch_size, batching=batching)
    except NotImplementedError as error:
        raise UsageError(f"{subject.name} cannot be evaluated in this mode. {error}") from error
    if batching:
        check_batching(subject)
    console = Console(highlight=False, quiet=lm.rank != 0, stderr=True)
    total, started = len(tasks) * len(configs), time.monotonic()
    with (
        contextlib.closing(lm),
        measuring(record, WHERE, total, lower="--batch-size", value=batch_size, is_shown=False) as tell,
    ):
        for number, (name, preset) in enumerate(itertools.product(tasks, configs), 1):
            if is_done(record.get(part_name(name, preset)), hashes[name], name, output):
                continue
            tell(doing=f"part {number} of {total} ({name}, {preset})")
            console.print(f"{number} of {total}: {name}, {preset} ({time.monotonic() - started:.0f} s so far)")
            lm.use(configs[preset])
            try:
                result = evaluate(lm, name, tasks[name], limit)
            except NothingRead as error:
                raise RefusedResult(f"{name}, {preset}: {error} {record.kept()}") from error
            except CannotScore as error:
                raise UsageError(f"`--tasks` {name} does not fit {subject.name}. {error}") from error
            if result is not None:
                record.put(part_name(name, preset), {**result, "data_sha256": hashes[name]})
    if lm.rank != 0:
        return None
    found = {key: record.get(part_name(*key)) for key in itertools.product(tasks, configs)}
    return {key: part for key, part in found.items() if part is not None}


def check_tokenizer(subject: Subject) -> None:
    """Refuse a tokenizer that lm-eval cannot use."""
    tokenizer = subject.tokenizer
    if tokenizer.bos_token_id is None and tokenizer.eos_token_id is None:
        raise UsageError(
            "`MODEL` must have a tokenizer with a token that begins or ends a text, for lm-eval, got "
            f"{subject.name} without. Set bos_token or eos_token in its tokenizer_config.json."
        )


def hashes_of(names: Iterable[str], data: str | None) -> dict[str, str | None]:
    """The SHA-256 of the data of each task; `None` for tasks that lm-eval downloads."""
    return {name: None if data is None else sha256(data_file(name, data)) for name in names}


def check_batching(subject: Subject) -> None:
    """Refuse a model or a preset that pages of codes do not serve, with the reason."""
    for preset, config in subject.configs.items():
        try:
            check_batched(subject.model, config)
        except (ImportError, NotImplementedError, ValueError) as error:
            raise UsageError(f"`--batching` must come with what pages serve, got {preset}. {error}") from error


def is_done(part: Part | None, data_sha256: str | None, name: str, output: str | None) -> bool:
    """Whether a record has the part of a task already.

    Raises:
        UsageError: It has, but on other data.
    """
    if part is not None and part["data_sha256"] != data_sha256:
        raise UsageError(
            f"`--output` {output} must hold results on the same data, got other data for {name}. Name another file."
        )
    return part is not None
