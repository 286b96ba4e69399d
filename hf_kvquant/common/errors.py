"""All exceptions of this package as one tree, and helpers for error messages.

    KVQuantError
        CommandError
            UsageError
            RefusedResult
        PreflightError (ValueError)
        CannotMeasure
        NotCapturable (RuntimeError)
        UnknownCall (AttributeError)
        BadGrammar (ValueError)
        NoGrammars (ValueError)
        RefusedRequest
            BadLine
        ConfigDoesNotFit
        BadTemplate
        UnreadableAnswer
        ServerFailed
    Interrupted (KeyboardInterrupt)

In parentheses: the built-in exception as which a caller may catch it, too. Functions raise `TypeError`, `ValueError` or
`NotImplementedError` themselves for wrong arguments. Evaluations add to this tree (`hf_kvquant_evals/errors.py`).

`--help` reads this file, so it imports no torch.
"""

from __future__ import annotations

import contextlib
import difflib
import sys
from collections.abc import Iterable, Iterator

# Messages of PyTorch's CPU allocator, and of CUDA calls and cuBLAS, which allocate outside PyTorch's GPU allocator.
_OUT_OF_MEMORY = ("can't allocate memory", "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED")


class KVQuantError(Exception):
    """The root of the tree."""


# --- commands ---------------------------------------------------------------------------------------------------------


class CommandError(KVQuantError):
    """A command ends without results. The user sees one line, without a traceback.

    The text begins with the name of the command once `named` has seen the error.
    """

    command = ""

    def __str__(self) -> str:
        return f"{self.command}: {super().__str__()}" if self.command else super().__str__()


class UsageError(CommandError):
    """A mistake in the user's input."""


class RefusedResult(CommandError):
    """A negative result: a preset that the model does not tolerate, or a measurement that fails its own checks."""


class Interrupted(KeyboardInterrupt):
    """An interruption. Its text says what has been kept of the run.

    Like every interruption it is no `Exception`, so that code that handles errors does not swallow it.
    """


# --- preparing and running a model ------------------------------------------------------------------------------------


class PreflightError(KVQuantError, ValueError):
    """Raised if a cache would corrupt the model's output, or if a layer cannot be checked.

    Attributes:
        layer_idx: The layer; `None` for all layers together.
        signal: The signal's name, such as `"KL divergence"` or `"key bias"`.
        value: Its value; `None` if it is unknown.
        limit: The largest value allowed; `None` if `value` is unknown.
        remedy: What to do instead.
    """

    def __init__(
        self,
        message: str,
        *,
        layer_idx: int | None,
        signal: str,
        value: float | None,
        limit: float | None,
        remedy: str,
    ) -> None:
        super().__init__(message)
        self.layer_idx = layer_idx
        self.signal = signal
        self.value = value
        self.limit = limit
        self.remedy = remedy


class CannotMeasure(KVQuantError):
    """Says why a model cannot be measured. The pre-flight check always catches it."""


class NotCapturable(KVQuantError, RuntimeError):
    """A decode step cannot be recorded as a CUDA graph. The cache is as it was before the step."""


class UnknownCall(KVQuantError, AttributeError):
    """A model asks for something that caches of batches do not have. The message is the end of a sentence."""


class BadGrammar(KVQuantError, ValueError):
    """A grammar that cannot be compiled, or that nothing matches. Its text says why."""


class NoGrammars(KVQuantError, ValueError):
    """There are no grammars for this model, or the package for them is missing. Its text says what to do."""


# --- requests and servers ---------------------------------------------------------------------------------------------


class RefusedRequest(KVQuantError):
    """A mistake of a client of the server.

    Args:
        message: What was expected, what came, and what to do.
        status: Of HTTP.
        param: The field; `None` if it is none.
        code: OpenAI's name of the mistake, where it has one.
    """

    def __init__(self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message, self.status, self.param, self.code = message, status, param, code


class BadLine(RefusedRequest):
    """A line of a batch job that cannot be answered. Its text says why, in a sentence."""

    def __init__(self, why: str) -> None:
        super().__init__(why if why.endswith((".", "?")) else f"{why}.")


class ConfigDoesNotFit(KVQuantError):
    """The config does not fit the model that is to be served."""


class BadTemplate(KVQuantError):
    """The chat template cannot be read."""


class UnreadableAnswer(KVQuantError):
    """The parser of a model's answers has met what it does not expect."""

    def __init__(self, error: Exception) -> None:
        super().__init__(f"the answer cannot be read: {error or type(error).__name__}")


class ServerFailed(KVQuantError):
    """A server that is measured does not answer as OpenAI's API does."""


# --- helpers ----------------------------------------------------------------------------------------------------------


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
