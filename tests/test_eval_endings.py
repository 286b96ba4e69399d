"""What a user of any evaluation sees when it ends early: one line that says why, what was kept, and how to go on."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import models
import pytest
import torch
import tqdm.std
from transformers.utils import logging

pytest.importorskip("lm_eval")

from hf_kvquant import PRESETS, cli
from hf_kvquant.cli import loading
from hf_kvquant_evals import preparation, records
from hf_kvquant_evals.errors import CannotKeep
from hf_kvquant_evals.long_context import long_context_run as long_context
from hf_kvquant_evals.perplexity import perplexity_run as perplexity
from hf_kvquant_evals.records import RunRecord
from hf_kvquant_evals.tasks import task_run as tasks

# lm-eval says so of every model that is handed to it, and its dependencies of each other.
pytestmark = [pytest.mark.filterwarnings("ignore")]

CONTEXT = 256
TEXT = 8 * models.SENTENCE


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """One evaluation with three parts or more.

    Attributes:
        words: The command, from its name on; `FOLDER` stands for that of the test.
        module: Where `measure` is.
        measure: What makes a part.
        lower: The option that memory depends on.
    """

    words: str
    module: ModuleType
    measure: str
    lower: str

    def run(self, capsys: pytest.CaptureFixture[str], folder: Path, *more: str) -> tuple[int, str]:
        """Exit code and stderr."""
        words = [word.replace("FOLDER", str(folder)) for word in self.words.split()]
        code = cli.main(["eval", words[0], str(folder / "model"), *words[1:], *more])
        return code, capsys.readouterr().err


EVALUATIONS = {
    "perplexity": Evaluation(
        "perplexity --text FOLDER/text.txt --window 32 --tokens 90 --preset int8 --mode simulated",
        perplexity, "compare", "`--window` must fit into memory, got 32, ",
    ),
    "tasks": Evaluation(
        "tasks --data FOLDER --tasks copa boolq --preset int8",
        tasks, "evaluate", "`--batch-size` must fit into memory, got 8, ",
    ),
    "long": Evaluation(
        "long --lengths 200,256 --depths 50 --samples 1 --tests needle,passkey --preset int8",
        long_context, "score", "`--batch-size` must fit into memory, got 8, ",
    ),
}  # fmt: skip


@pytest.fixture(params=EVALUATIONS)
def evaluation(request: pytest.FixtureRequest) -> Evaluation:
    return EVALUATIONS[request.param]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tiny model, and something to measure it on."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # and afterwards whatever it was
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    models.save_llama(tmp_path / "model", CONTEXT, bos_token="!", eos_token="~")
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    item = json.dumps({"query": "a king", "choices": ["and", "or"], "gold": 1})
    for name in ("copa", "boolq"):
        (tmp_path / f"{name}.jsonl").write_text(item + "\n", encoding="utf-8")
    return tmp_path


def end(evaluation: Evaluation, monkeypatch: pytest.MonkeyPatch, fail: Callable[[], Any], after: int = 1) -> None:
    """Let an evaluation fail once, when it has measured so many parts."""
    measure, calls = getattr(evaluation.module, evaluation.measure), []

    def measured(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == after + 1:
            fail()
        return measure(*args, **kwargs)

    monkeypatch.setattr(evaluation.module, evaluation.measure, measured)


def interrupt() -> None:
    raise KeyboardInterrupt


def fill_cpu() -> None:
    torch.empty(1 << 60, dtype=torch.int8)  # what PyTorch itself raises, a RuntimeError


def fill_gpu() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def last_line(error: str) -> str:
    assert "Traceback" not in error
    return error.splitlines()[-1]


def test_what_is_interrupted_is_told_and_resumed(
    evaluation: Evaluation, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    output = folder / "out.json"
    end(evaluation, monkeypatch, interrupt)
    code, error = evaluation.run(capsys, folder, "--output", str(output))
    assert code == 130
    assert re.fullmatch(
        rf"hf-kvquant: interrupted. eval \w+ ended in .*\d of \d.*\. What was measured is in {output}: run the same "
        "command again to resume.",
        last_line(error),
    )
    kept = json.loads(output.read_text(encoding="utf-8"))["parts"]
    assert kept
    code, error = evaluation.run(capsys, folder, "--output", str(output))
    assert code == 0, error
    parts = json.loads(output.read_text(encoding="utf-8"))["parts"]
    kept.pop("summary", None)  # of perplexity: it is of the windows so far
    assert len(parts) > len(kept) and {name: parts[name] for name in kept} == kept


def test_a_log_shows_how_far_a_run_is(
    evaluation: Evaluation, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By lines, where stderr is no terminal."""
    monkeypatch.setattr(tqdm.std, "time", itertools.count(step=40).__next__)
    logging.enable_progress_bar()
    try:
        code, error = evaluation.run(capsys, folder)
    finally:
        logging.disable_progress_bar()
    assert code == 0
    what = {"perplexity": "eval perplexity: simulated, window ", "tasks": "log-likelihoods: ", "long": "eval long: "}
    lines = [line for line in error.splitlines() if line.startswith(what[evaluation.words.split()[0]])]
    assert lines and all(re.search(r": \d+ %, [\d:]+ so far, [\d:?]+ left$", line) for line in lines)


def test_without_a_file_nothing_is_kept(
    evaluation: Evaluation, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    end(evaluation, monkeypatch, interrupt)
    code, error = evaluation.run(capsys, folder)
    assert code == 130 and last_line(error).endswith("Nothing is kept: add --output FILE to keep what was measured.")


def test_an_interruption_before_anything_is_measured(
    evaluation: Evaluation, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "load_placed", lambda *args, **options: interrupt())
    assert evaluation.run(capsys, folder) == (130, "hf-kvquant: interrupted.\n")


@pytest.mark.parametrize("fail", [fill_cpu, fill_gpu])
def test_memory_that_runs_out(
    evaluation: Evaluation,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    fail: Callable[[], Any],
) -> None:
    output = folder / "out.json"
    end(evaluation, monkeypatch, fail)
    code, error = evaluation.run(capsys, folder, "--output", str(output))
    assert code == 2
    assert evaluation.lower in last_line(error) and "Lower it" in last_line(error)
    assert last_line(error).endswith(f"What was measured is in {output}: run the same command again to resume.")
    assert json.loads(output.read_text(encoding="utf-8"))["parts"]


def test_memory_that_does_not_suffice_to_calibrate(
    evaluation: Evaluation, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preparation, "smooth_attention", lambda *args: fill_cpu())
    code, error = evaluation.run(capsys, folder, "--calibrate", str(folder / "text.txt"))
    assert code == 2 and "`--calibrate` must fit into memory, got" in last_line(error)


@pytest.mark.parametrize(
    "name, words, message",
    [
        ("perplexity", ("--window", "999"), "`--window` must be at least 3 and at most the model's 256 positions"),
        ("long", ("--lengths", "64"), "`--lengths` must be at least "),
        ("long", ("--lengths", "1k"), "`--lengths` must be at most 256, "),
    ],
)
def test_what_does_not_fit_the_model_is_refused_before_it_is_calibrated(
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    words: tuple[str, ...],
    message: str,
) -> None:
    monkeypatch.setattr(preparation, "smooth_attention", lambda *args: pytest.fail("the model is calibrated"))
    code, error = EVALUATIONS[name].run(capsys, folder, *words, "--calibrate", str(folder / "text.txt"))
    assert code == 2 and message in last_line(error)


def test_a_disk_that_is_full(
    evaluation: Evaluation, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def replace(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(records.Path, "replace", replace)
    code, error = evaluation.run(capsys, folder, "--output", str(folder / "out.json"))
    assert code == 2
    assert "`--output` must be a file that can be written, got No space left on device in" in last_line(error)


@pytest.mark.parametrize("path", ["/proc/out.json", "FOLDER", "FOLDER/text.txt/out.json", "FOLDER/no/out.json"])
def test_an_output_that_cannot_be_written_is_told_before_the_model_is_loaded(
    evaluation: Evaluation,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    path: str,
) -> None:
    monkeypatch.setattr(loading, "load_placed", lambda *args, **options: pytest.fail("the model is loaded"))
    before = sorted(folder.rglob("*"))
    code, error = evaluation.run(capsys, folder, "--output", path.replace("FOLDER", str(folder)))
    assert code == 2 and error.count("\n") == 1
    assert ": `--output` must be a file in a folder that is there, got " in error and error.endswith("Name another.\n")
    assert sorted(folder.rglob("*")) == before


@pytest.mark.parametrize(("name", "when"), [("perplexity", "simulated, window 1 of 3"), ("long", "the summary")])
def test_a_disk_that_is_full_in_the_end(
    name: str, when: str, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def put(self: RunRecord, part: str, result: Any) -> None:
        if part == "summary":
            raise CannotKeep("No space left on device")
        original(self, part, result)

    original = RunRecord.put
    monkeypatch.setattr(RunRecord, "put", put)
    code, error = EVALUATIONS[name].run(capsys, folder, "--output", str(folder / "out.json"))
    assert code == 2 and f"got No space left on device in {when}. Make room" in last_line(error)


@pytest.mark.parametrize(
    "content, message",
    [
        (b"", "must hold JSON, got .*: Expecting value"),
        (b"\xff\xfe\x00", "must hold JSON, got .*: 'utf-8' codec can't decode"),
        (b"[1, 2]", "must hold card, settings and parts, got"),
        (b'{"settings": {}}', "must hold card, settings and parts, got"),
        (
            b'{"card": {}, "settings": {"evaluation": "other"}, "parts": {}}',
            'must be new or hold results of the same settings, got .*: `evaluation` was "other" and is "',
        ),
    ],
    ids=["empty", "binary", "list", "foreign", "other"],
)
def test_a_record_that_is_none(
    evaluation: Evaluation, folder: Path, capsys: pytest.CaptureFixture[str], content: bytes, message: str
) -> None:
    output = folder / "out.json"
    output.write_bytes(content)
    code, error = evaluation.run(capsys, folder, "--output", str(output))
    assert code == 2 and error.count("\n") == 1
    assert re.search(f"`--output` cannot be used. RunRecord: `path` {message}", error)
    assert error.endswith("Name another file, or remove this one.\n")
    assert output.read_bytes() == content


@pytest.mark.parametrize(
    "name, words, message",
    [
        (
            None,
            ["--preset", "imt4"],
            "`--preset` must be one of none, int8, .*, got 'imt4'. Did you mean 'int4'?",
        ),
        (
            None,
            ["--preset", "int4-token:4"],
            "`--preset` must give windows as FIRST.NEWEST tokens, got '4'. Write for example int4",
        ),
        (None, ["--residual-length", "-3"], "`--residual-length` must be at least 0, got -3."),
        (None, ["--calibrate", "nowhere.txt"], "`--calibrate` must be a text file, got nowhere.txt: No such file"),
        (None, ["--calibrate", "FOLDER/empty.txt"], "`--calibrate` .*empty.txt must hold text, got nothing but white"),
        (
            None,
            ["--calibrate", "FOLDER/short.txt"],
            "cannot be calibrated. smooth_attention: `texts` must have at least",
        ),
        (
            None,
            ["--output", "nowhere/out.json"],
            "`--output` must be a file in .*, got nowhere/out.json: no folder nowhere",
        ),
        ("perplexity", ["--text", "nowhere.txt"], "`--text` must be a text file, got nowhere.txt: No such file"),
        ("perplexity", ["--text", "FOLDER/empty.txt"], "`--text` .*empty.txt must hold text, got nothing but white"),
        (
            "perplexity",
            ["--text", "FOLDER/short.txt"],
            "the text must fill a window of 32 tokens, got 5. Use --window 5",
        ),
        ("perplexity", ["--text", "FOLDER/one.txt"], "the text must fill a window of 32 tokens, got 1. Use a longer"),
        ("tasks", ["--tasks", "cope"], "`--tasks` must name a task file, got 'cope'. Did you mean 'copa'?"),
        ("tasks", ["--tasks", "piqa"], "`--data` must hold piqa.jsonl for task piqa, got"),
        ("tasks", ["--data", "nowhere"], "`--data` must be a folder with JSON lines, got nowhere: no such folder"),
        ("tasks", ["--data", "FOLDER/empty"], "copa.jsonl must hold items, one JSON object a line, got an empty file"),
        ("long", ["--tests", "nedle"], "`--tests` must be of passkey, needle, recall, got 'nedle'. Did you mean"),
        ("long", ["--filler-file", "nowhere.txt"], "`--filler-file` must be a text file, got nowhere.txt: No such"),
        ("long", ["--filler-file", "FOLDER/empty.txt"], "`--filler-file` .*empty.txt must hold text, got nothing but"),
        (
            "long",
            ["--filler-file", "FOLDER/short.txt"],
            "`--filler-file` must hold at least .* tokens for these lengths",
        ),
    ],
)
def test_what_is_misspelt_or_empty(
    folder: Path, capsys: pytest.CaptureFixture[str], name: str | None, words: list[str], message: str
) -> None:
    (folder / "empty.txt").write_text(" \n", encoding="utf-8")
    (folder / "short.txt").write_text("Hello", encoding="utf-8")
    (folder / "one.txt").write_text("H", encoding="utf-8")
    (folder / "empty").mkdir()
    (folder / "empty" / "copa.jsonl").touch()
    (folder / "empty" / "boolq.jsonl").touch()
    for each in EVALUATIONS if name is None else (name,):
        code, error = EVALUATIONS[each].run(capsys, folder, *(word.replace("FOLDER", str(folder)) for word in words))
        assert code == 2 and error.count("\n") == 1, error
        assert error.startswith(f"hf-kvquant: error: eval {each}: ") and re.search(message, error), error


@pytest.mark.parametrize("head_dim", [16, 40])
def test_defaults_that_do_not_fit_are_left_out(
    evaluation: Evaluation, folder: Path, capsys: pytest.CaptureFixture[str], head_dim: int
) -> None:
    """Nobody typed `int4-g32`, so it is no mistake that groups of 32 do not fit."""
    models.build("llama", max_position_embeddings=CONTEXT, head_dim=head_dim).save_pretrained(folder / "model")
    words = evaluation.words.replace(" --preset int8", "").split()
    output = folder / "out.json"
    command = [words[0], str(folder / "model"), *(word.replace("FOLDER", str(folder)) for word in words[1:])]
    assert cli.main(["eval", *command, "--output", str(output)]) == 0
    error = capsys.readouterr().err
    left_out = [line for line in error.splitlines() if "and is left out" in line]
    if words[0] == "perplexity":
        (line,) = left_out
        assert line.startswith("hf-kvquant: eval perplexity: int4-g32 does not fit ")
        assert f"`group_size` must divide head_dim {head_dim}, got 32" in line
        presets = json.loads(output.read_text(encoding="utf-8"))["settings"]["presets"]
        assert list(presets) == [preset for preset in PRESETS if preset != "int4-g32"]
    else:
        assert not left_out


def test_a_model_that_no_default_fits(
    evaluation: Evaluation, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any) -> None:
        raise NotImplementedError("patch: it keeps a latent cache.")

    monkeypatch.setattr(loading, "patched", refuse)
    words = evaluation.words.replace(" --preset int8", "").split()
    command = [words[0], str(folder / "model"), *(word.replace("FOLDER", str(folder)) for word in words[1:])]
    assert cli.main(["eval", *command]) == 2
    error = last_line(capsys.readouterr().err)
    assert "none of none, int8, " in error and "fits" in error and "--preset" not in error


def test_presets_that_do_not_fit(evaluation: Evaluation, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    models.build("llama", max_position_embeddings=CONTEXT, head_dim=40).save_pretrained(folder / "model")
    code, error = evaluation.run(capsys, folder, "--preset", "int4-g32")
    assert code == 2 and "`--preset int4-g32` does not fit" in last_line(error)


def test_items_that_do_not_fit_the_model(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    item = {"query": "a king", "choices": ["and", "or " * CONTEXT], "gold": 1}
    (folder / "copa.jsonl").write_text(json.dumps(item) + "\n", encoding="utf-8")
    code, error = EVALUATIONS["tasks"].run(capsys, folder)
    assert code == 2
    assert "`--tasks` copa does not fit" in last_line(error) and "must have from 1 to 256 tokens" in last_line(error)


def test_tokenizers_that_lm_eval_cannot_use(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    models.tokenizer(model_max_length=CONTEXT).save_pretrained(folder / "model")
    code, error = EVALUATIONS["tasks"].run(capsys, folder)
    assert code == 2 and "`MODEL` must have a tokenizer with a token that begins or ends a text" in last_line(error)
