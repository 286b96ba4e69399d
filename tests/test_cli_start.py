"""The first moments of `hf-kvquant`: what it imports, how it ends at Ctrl-C, and whose messages it shows.

Programs are started with a `sitecustomize` that replaces what is slow and sends the signal at the moment to look at, so
that no test has to hit a moment by time.
"""

from __future__ import annotations

import argparse
import importlib.util
import io
import logging
import os
import signal
import subprocess
import sys
import textwrap
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from transformers.utils.quantization_config import QuantizationMethod

import hf_kvquant
from hf_kvquant import cli
from hf_kvquant.cli import messages, threads
from hf_kvquant.common import interrupts
from hf_kvquant.common.errors import Interrupted, UsageError, is_out_of_memory
from hf_kvquant_evals.choices import RECIPE_NAMES
from hf_kvquant_evals.recipes import catalogue

ROOT = Path(hf_kvquant.__file__).parents[1]
LINE = "hf-kvquant: interrupted.\n"

Command = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def command(tmp_path: Path) -> Command:
    """Starts the command in a process that runs some code first."""

    def start(*words: str, first: str = "") -> subprocess.Popen[str]:
        # Of a pytest in the background of a script, programs inherit that they ignore the signal.
        heeds = "import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
        (tmp_path / "sitecustomize.py").write_text(heeds + textwrap.dedent(first), encoding="utf-8")
        path = os.pathsep.join([str(tmp_path), str(ROOT), str(ROOT / "evals"), os.environ.get("PYTHONPATH", "")])
        return subprocess.Popen(
            [sys.executable, "-m", "hf_kvquant", *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": ""},
            cwd=tmp_path,
        )

    return start


# --- what is imported -------------------------------------------------------------------------------------------------

# Ends the process with a traceback where something heavy is imported.
LIGHT = """
    import sys
    for name in ("torch", "transformers", "numpy", "safetensors", "rich", "tqdm"):
        sys.modules[name] = None
    """


@pytest.mark.parametrize(
    ("words", "status", "shown"),
    [
        ("--help", 0, "usage: hf-kvquant"),
        ("--version", 0, f"hf-kvquant {hf_kvquant.__version__}"),
        ("genrate", 2, "invalid choice: 'genrate'"),
        ("generate --halp", 2, "generate: "),
        ("generate m --prompt", 2, "generate: argument --prompt: expected one argument."),
        ("generate m --preset int9", 2, "generate: `--preset` must be one of none, int8, "),
        ("calibrate m --preset int9", 2, "calibrate: `--preset` must be one of none, int8, "),
        ("calibrate m --bits 4", 2, "calibrate: `--bits` must come with --check, got it alone."),
        ("batch in --output out --preset int9 m", 2, "batch: `--preset` must be one of none, int8, "),
        ("serve m --preset int9", 2, "serve: `--preset` must be one of none, int8, "),
        ("serve m --cb-page-size 100", 2, "serve: `--cb-page-size` must be a multiple of 128 tokens, got 100."),
        ("bench localhost:8000", 2, "bench: `URL` must begin with http:// or https://"),
        ("eval perplexity m --preset int9", 2, "eval perplexity: `--preset` must be one of none, int8, "),
        ("eval report m --output o --preset int9", 2, "eval report: `--preset` must be one of none, int8, "),
        ("eval recipes --help", 0, "turboquant-prod-4"),
    ],
)
def test_help_and_mistakes_need_neither_torch_nor_transformers(
    command: Command, words: str, status: int, shown: str
) -> None:
    process = command(*words.split(), first=LIGHT)
    output, error = process.communicate()
    assert (process.returncode, shown in (error if status else output)) == (status, True), error
    assert error.count("\n") == (1 if status else 0)


def test_every_command_explains_itself_without_torch(command: Command) -> None:
    words = ["generate", "serve", "batch", "bench", "calibrate", "env", "eval"]
    evaluations = ["perplexity", "tasks", "long", "recipes", "report"]
    script = """
        from hf_kvquant import cli
        for words in WORDS:
            try:
                cli.main([*words, "--help"])
            except SystemExit as stopped:
                assert not stopped.code
        """
    every = [[word] for word in words] + [["eval", word] for word in evaluations]
    run = textwrap.dedent(LIGHT) + textwrap.dedent(script).replace("WORDS", repr(every))
    done = subprocess.run([sys.executable, "-c", run], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("usage: hf-kvquant") == len(every) and done.stderr == ""


@pytest.mark.parametrize("words", ["perplexity m --text t", "report", "--help"])
def test_evaluations_that_are_missing(
    words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    if words == "--help":
        with pytest.raises(SystemExit):
            cli.main([words])
        assert "measure what presets cost in quality" in capsys.readouterr().out
    else:
        assert cli.main(["eval", *words.split()]) == 2
        assert capsys.readouterr().err == (
            "hf-kvquant: error: eval: the package hf_kvquant_evals must be there, got none. Install hf-kvquant again, "
            "or, in a checkout that is not installed, add its folder evals to PYTHONPATH.\n"
        )


def test_recipes_are_named_without_importing_them() -> None:
    assert tuple(catalogue._RECIPES) == RECIPE_NAMES == tuple(catalogue.RECIPES)


def test_out_of_memory_is_recognised_before_torch_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    monkeypatch.delitem(sys.modules, "torch")
    assert is_out_of_memory(MemoryError()) and not is_out_of_memory(RuntimeError("nothing"))
    assert is_out_of_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory"))


# --- Ctrl-C -----------------------------------------------------------------------------------------------------------

# What the command imports to run, without what makes it slow: a module in whose place the test puts code.
STUB = """
    import sys, types, os, signal

    def interrupt():
        os.kill(os.getpid(), signal.SIGINT)

    def module(name, **members):
        sys.modules[name] = types.ModuleType(name)
        vars(sys.modules[name]).update(members)

    def instead_of_env(run, has_torch=False):
        if not has_torch:  # which takes seconds to import
            module("torch")
        module("hf_kvquant.cli.env", run=run)

    class Finder:
        def find_spec(self, name, path=None, target=None):
            if name == MOMENT:
                interrupt()

    sys.meta_path.insert(0, Finder())
    """


@pytest.mark.parametrize(
    "moment",
    ["argparse", "hf_kvquant.cli.parsers", "hf_kvquant.cli.parsers.env", "hf_kvquant.cli.env", "torch", "torch.nn"],
)
def test_an_import_that_is_interrupted(command: Command, moment: str) -> None:
    process = command("env", first=STUB.replace("MOMENT", repr(moment)))
    assert process.communicate() == ("", LINE)
    assert process.returncode == 130


def test_an_import_that_hides_an_interruption(command: Command) -> None:
    """As packages do that catch everything, and C++ code that knows only exceptions of its own."""
    # `env` would go on and print.
    hiding = """
    class Hides:
        def find_spec(self, name, path=None, target=None):
            if name == "rich":
                try:
                    interrupt()
                except BaseException:
                    pass

    sys.meta_path.insert(0, Hides())
    """
    process = command("env", first=STUB.replace("MOMENT", "'none'") + hiding)
    assert process.communicate() == ("", LINE)
    assert process.returncode == 130


# Code of `env`'s run, what is shown before the line, and by how many signals it is ended.
WORK = {
    "work": "interrupt()",
    "work that turns it into another error": """
        try:
            interrupt()
        except BaseException as error:
            raise RuntimeError("failed") from error
    """,
    "work that fails while it tidies up": """
        try:
            interrupt()
        finally:
            raise ValueError("cannot tidy up")
    """,
    "a mistake of the user that is only what the interruption has left": """
        from hf_kvquant.common.errors import UsageError
        try:
            interrupt()
        except KeyboardInterrupt:
            raise UsageError("no model")
    """,
    "a destructor, which cannot raise": """
        class Held:
            def __del__(self):
                interrupt()
        held = Held()
        del held
        print("goes on")
    """,
    "code that swallows all exceptions": """
        for _ in range(2):
            try:
                interrupt()
            except BaseException:
                pass
        print("goes on")
    """,
    "tidying up, which the second ends": """
        try:
            interrupt()
        finally:
            interrupt()
    """,
    "the end of the process": """
        import atexit
        atexit.register(interrupt)
    """,
    "the end of the process, again": """
        import atexit
        atexit.register(interrupt)
        interrupt()
    """,
    "the wait for a thread at the end": """
        import threading
        def late():
            threading.main_thread().join()  # which now waits for this thread
            interrupt()
            threading.Event().wait(60)
        threading.Thread(target=late).start()
        interrupt()
    """,
}


@pytest.mark.parametrize("what", WORK)
def test_work_that_is_interrupted(command: Command, what: str) -> None:
    run = f"""
    def run(args):
    {textwrap.indent(textwrap.dedent(WORK[what]), "        ")}
    instead_of_env(run, has_torch={what == "the end of the process"})
    """
    first = textwrap.dedent(STUB.replace("MOMENT", "'none'")) + textwrap.dedent(run)
    process = command("env", first=first)
    assert process.communicate() == ("", LINE), what
    assert process.returncode == 130


def test_work_tidies_up_and_what_was_printed_is_not_lost(command: Command) -> None:
    """A pipe is written in blocks, of which the last one would be, if the second signal ends the process."""
    run = """
    def run(args):
        try:
            interrupt()
        finally:
            print("results")
            interrupt()
    instead_of_env(run)
    """
    process = command("env", first=textwrap.dedent(STUB.replace("MOMENT", "'none'")) + textwrap.dedent(run))
    assert process.communicate() == ("results\n", LINE)


def test_parsing_that_is_interrupted(command: Command) -> None:
    first = """
    import argparse
    argparse.ArgumentParser.parse_args = lambda *args: interrupt()
    """
    process = command("--help", first=textwrap.dedent(STUB.replace("MOMENT", "'none'")) + textwrap.dedent(first))
    assert process.communicate() == ("", LINE)
    assert process.returncode == 130


def test_a_job_that_ignores_interruptions_goes_on(command: Command) -> None:
    """As shell scripts start jobs in the background."""
    first = textwrap.dedent(STUB.replace("MOMENT", "'argparse'")) + "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
    process = command("--version", first=first)
    assert process.communicate() == (f"hf-kvquant {hf_kvquant.__version__}\n", "")
    assert process.returncode == 0


def test_generating_is_interrupted_after_nothing_but_its_text(command: Command, tmp_path: Path) -> None:
    """With everything that is really imported, and all packages that this environment has."""
    folder = tmp_path / "model"
    models.tokenizer(model_max_length=2**20).save_pretrained(folder)
    models.build("llama", max_position_embeddings=2**20).save_pretrained(folder)
    process = command("generate", str(folder), "--prompt", "Once", "--max-new-tokens", "1000000")
    assert process.stdout is not None
    assert process.stdout.readline().startswith("prompt 1 of 1")
    process.send_signal(signal.SIGINT)
    _, error = process.communicate()
    assert (process.returncode, error) == (130, LINE)


def test_within_a_program_an_interruption_is_raised_and_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    """Whoever calls `cli.main` keeps his own signal handler."""

    def interrupted(args: argparse.Namespace) -> None:
        raise Interrupted("Kept: all.") from KeyboardInterrupt()

    handler = signal.getsignal(signal.SIGINT)
    assert cli.run(argparse.Namespace(command="env", threads=None, load=lambda args: interrupted)) == 130
    assert capsys.readouterr().err == "hf-kvquant: interrupted. Kept: all.\n"
    assert signal.getsignal(signal.SIGINT) is handler
    interrupts._STATE.is_told = False


def test_other_errors_are_no_interruption(capsys: pytest.CaptureFixture[str]) -> None:
    def failing(args: argparse.Namespace) -> None:
        raise UsageError("no.") from ValueError("x")

    def broken(args: argparse.Namespace) -> None:
        raise ZeroDivisionError

    assert cli.run(argparse.Namespace(command="env", threads=None, load=lambda args: failing)) == 2
    assert capsys.readouterr().err == "hf-kvquant: error: env: no.\n"
    with pytest.raises(ZeroDivisionError):
        cli.run(argparse.Namespace(command="env", threads=None, load=lambda args: broken))
    error = ValueError()
    error.__cause__ = error  # chains may have loops
    assert interrupts.behind(error) is None


# --- messages of other packages ---------------------------------------------------------------------------------------


class Enumerated:
    """A class of torchao, as torch's message names it."""


Enumerated.__module__ = "torchao.prototype.mx_formats"


@pytest.mark.parametrize("method", [None, "compressed-tensors", QuantizationMethod.TORCHAO])
def test_what_torchao_says_is_shown_only_if_it_is_used(method: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    loggers = [logging.getLogger(name) for name in ("torchao", "torch.utils._pytree")]
    for logger in loggers:
        monkeypatch.setattr(logger, "handlers", [handler])
        monkeypatch.setattr(logger, "propagate", False)
    model: Any = types.SimpleNamespace(config=types.SimpleNamespace())
    if method is not None:
        model.config.quantization_config = types.SimpleNamespace(quant_method=method)
    with messages.held():
        loggers[0].warning("Failed to load %s", "_C.so")
        loggers[1].warning("%s is an Enum", Enumerated)
        loggers[1].warning("%s is an Enum", Path)  # somebody else's
        assert stream.getvalue() == f"{Path} is an Enum\n"
        messages.tell_if_used(model)
        loggers[0].warning("later")
    shown = stream.getvalue().splitlines()[1:]
    assert shown == (["Failed to load _C.so", f"{Enumerated} is an Enum", "later"] if method == "torchao" else [])
    loggers[0].warning("afterwards")
    assert stream.getvalue().splitlines()[-1] == "afterwards"


# --- threads ----------------------------------------------------------------------------------------------------------


def commands_of(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """All commands, those of commands included, by what a user types."""
    choices = [action.choices for action in parser._actions if isinstance(action.choices, dict)]
    if not choices:
        return {parser.prog: parser}
    return {name: found for each in choices[0].values() for name, found in commands_of(each).items()}


def test_every_command_takes_threads() -> None:
    found = commands_of(cli.parser())
    assert {"hf-kvquant env", "hf-kvquant serve", "hf-kvquant eval report"} < found.keys()
    assert [name for name, each in found.items() if "--threads" not in each._option_string_actions] == []


def set_by(monkeypatch: pytest.MonkeyPatch, *options: str, **environment: str) -> list[int]:
    """The numbers of threads that a command sets, and what it has in its environment before it imports torch."""
    numbers: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", numbers.append)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 6)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {*range(8)}, raising=False)
    monkeypatch.setattr(os, "environ", {**environment})
    args = cli.parser().parse_args(["env", *options])
    args.load = lambda args: lambda args: None
    assert cli.run(args) == 0
    return numbers


def test_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's, else that of the environment, else what the process may use, shared by those started together."""
    monkeypatch.setattr(threads, "quota", lambda: 100)
    assert set_by(monkeypatch, "--threads", "3", OMP_NUM_THREADS="2") == [3]
    assert set_by(monkeypatch, OMP_NUM_THREADS="2") == []
    assert set_by(monkeypatch) == [6]
    assert set_by(monkeypatch, LOCAL_WORLD_SIZE="4") == [1]
    monkeypatch.setattr(threads, "quota", lambda: 2)
    assert set_by(monkeypatch) == [2]
    assert set_by(monkeypatch, LOCAL_WORLD_SIZE="4") == [1]


def test_no_threads_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["env", "--threads", "0"]) == 2
    assert capsys.readouterr().err == "hf-kvquant: error: env: `--threads` must be at least 1, got 0.\n"


@pytest.mark.parametrize(
    ("environment", "expected"),
    [({}, threads.SPIN), ({"GOMP_SPINCOUNT": "9"}, "9"), ({"OMP_WAIT_POLICY": "active"}, "None")],
    ids=["by default", "spin count", "policy"],
)
def test_waiting_threads_spin_shortly(command: Command, environment: dict[str, str], expected: str) -> None:
    """OpenMP reads the variable when torch is imported. It keeps what the user has set."""
    told = f"""
        import os, sys
        os.environ.pop("GOMP_SPINCOUNT", None)
        os.environ.update({environment})
        class Torch:
            def find_spec(self, name, *_):
                if name == "torch":
                    os.write(1, str(os.environ.get("GOMP_SPINCOUNT")).encode())
                    os._exit(0)
        sys.meta_path.insert(0, Torch())
        """
    assert command("env", first=told).communicate()[0] == expected


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"cpu.max": "max 100000\n"}, 2**31),
        ({"cpu.max": "150000 100000\n"}, 2),
        ({"cpu/cpu.cfs_quota_us": "400000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 4),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 2**31),
        ({}, 2**31),
    ],
    ids=["no limit", "one and a half", "version 1", "version 1, no limit", "no files"],
)
def test_limit_of_a_container(files: dict[str, str], expected: int, tmp_path: Path) -> None:
    (tmp_path / "cpu").mkdir()
    for name, content in files.items():
        (tmp_path / name).write_text(content, encoding="utf-8")
    assert threads.quota(tmp_path) == expected
