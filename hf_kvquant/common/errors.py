"""The ways in which a command ends without results, and suggestions for error messages.

The user sees each of these errors as one line, without a traceback.
"""

from __future__ import annotations

import contextlib
import difflib
import sys
from collections.abc import Iterable, Iterator

# Messages of PyTorch's CPU allocator, and of CUDA calls and cuBLAS, which allocate outside PyTorch's GPU allocator.
_OUT_OF_MEMORY = ("can't allocate memory", "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED")


class CommandError(Exception):
    """An error of a command. Its text begins with the name of the command once `named` has seen it."""

    command = ""

    def __str__(self) -> str:
        return f"{self.command}: {super().__str__()}" if self.command else super().__str__()


class UsageError(CommandError):
    """A mistake in the user's input."""


class RefusedResult(CommandError):
    """A negative result: a preset that the model does not tolerate, or a measurement that fails its own checks."""


class Interrupted(KeyboardInterrupt):
    """An interruption. Its text says what has been kept of the run."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception means that memory ran out, on a GPU or CPU. Some such errors are plain `RuntimeError`s."""
    if isinstance(error, MemoryError):
        return True
    torch = sys.modules.get("torch")  # whose errors exist once it is imported; `--help` reads this file, too
    if torch is not None and isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _OUT_OF_MEMORY)


@contextlib.contextmanager
def named(command: str) -> Iterator[None]:
    """Let errors in a `with` block begin with the name of the command, unless an inner block has named another."""
    try:
        yield
    except CommandError as error:
        error.command = error.command or command
        raise


def did_you_mean(value: object, choices: Iterable[str]) -> str:
    """` Did you mean 'x'?` with the choice nearest to `value`, ignoring case.

    Empty if no choice is near or `value` is not a string.
    """
    if not isinstance(value, str):
        return ""
    spelled = {choice.casefold(): choice for choice in choices}
    near = difflib.get_close_matches(value.casefold(), spelled, n=1)
    return f" Did you mean '{spelled[near[0]]}'?" if near else ""
