"""Programs that tests start, each in a process of its own.

A fresh interpreter takes nine seconds of a core to import torch and transformers. So programs are forked from a process
that has imported both (`multiprocessing`'s fork server), and find them there. All else is as in a fresh interpreter:
arguments, environment, working directory, signals, exit code. What imports do is for `test_import.py` to say, and
`test_serve_ranks.py` starts the command as users do.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import runpy
import shutil
import signal
import socket
import sys
import tempfile
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from waiting import PATIENCE, until

ROOT = Path(__file__).resolve().parents[1]
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    [
        "hf_kvquant.cli",
        "accelerate",
        "torch.distributed.fsdp",
        "transformers.generation.continuous_batching",
        "transformers.models.llama.modeling_llama",
    ]
)


class Program:
    """A program that runs, as if started by `python *arguments`.

    Args:
        *arguments: A file or `-m` and a module, and what stands behind it.
        where: Its working directory.
        variables: Of its environment, beside those of this process.
    """

    def __init__(self, *arguments: str, where: Path = ROOT, variables: Mapping[str, str] | None = None) -> None:
        folder = tempfile.mkdtemp()
        weakref.finalize(self, shutil.rmtree, folder)
        self._out, self._err = (Path(folder, name) for name in ("out", "err"))
        self._out.touch(), self._err.touch()
        variables = {**os.environ, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", **(variables or {})}
        target = arguments, str(where), variables, str(self._out), str(self._err)
        self.process = FORKS.Process(target=_become, args=target, daemon=True)
        self.process.start()

    @property
    def out(self) -> str:
        """What it has written to stdout so far."""
        return self._out.read_text(encoding="utf-8")

    @property
    def err(self) -> str:
        """What it has written to stderr so far."""
        return self._err.read_text(encoding="utf-8")

    def says(self, text: str) -> str:
        """Wait for a text on stdout. Returns all that is there."""
        until(lambda: text in self.out or not self.process.is_alive())
        assert text in self.out, self.err
        return self.out

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal."""
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def end(self) -> int:
        """Wait for its end. Returns the exit code, or less than 0 if a signal ended it."""
        self.process.join(PATIENCE)
        assert self.process.exitcode is not None, f"it did not end in {PATIENCE} s: {self.err}"
        return self.process.exitcode


@contextlib.contextmanager
def started(*programs: Program) -> Iterator[None]:
    """Kill those programs at the end of a `with` block that still run."""
    try:
        yield
    finally:
        for program in programs:
            program.process.kill()
            program.process.join()


def finish(*programs: Program) -> list[tuple[str, str]]:
    """Stdout and stderr of programs that must end well. They may wait for each other: all end when one fails."""
    with started(*programs):
        codes = until(lambda: _codes(programs))
        failed = [program.err for program, code in zip(programs, codes, strict=True) if code]
        assert not failed, failed[0]
        return [(program.out, program.err) for program in programs]


def _codes(programs: tuple[Program, ...]) -> list[int | None] | None:
    codes = [program.process.exitcode for program in programs]
    return codes if any(codes) or None not in codes else None


def ranks(count: int, *arguments: str, **options: Any) -> list[Program]:
    """A program in several processes that share its work, which find the environment that launchers make."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(count)}
    return [
        Program(*arguments, variables={**where, "RANK": str(rank), "LOCAL_RANK": str(rank)}, **options)
        for rank in range(count)
    ]


def _become(arguments: tuple[str, ...], where: str, variables: dict[str, str], out: str, err: str) -> None:
    for number, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND), number)
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(where)
    name, *rest = arguments
    if name == "-m":
        sys.argv = rest
        sys.path.insert(0, where)
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(arguments)
        sys.path.insert(0, str(Path(name).parent))
        runpy.run_path(name, run_name="__main__")
