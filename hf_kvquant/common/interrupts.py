"""Ctrl-C in the command: one line on stderr and status 130, whatever the process is doing.

Python raises KeyboardInterrupt wherever the program is at the moment. Inside of an import it may end up anywhere: C++
code that imports modules turns it into another exception or aborts, some packages catch all exceptions and go on half
imported, and outside of the command there is nobody to catch it. So a process that calls `watch` ends at once, in the
signal handler. Only work that has something to keep or to tidy up runs in `raised`, where the first Ctrl-C is raised
and the second one ends the process.

This file imports little, since an interruption before `watch` ends with Python's traceback.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from typing import NoReturn

STATUS = 130  # what a shell says of a program that Ctrl-C has ended
LINE = "hf-kvquant: interrupted."


class _State:
    """What the next SIGINT does."""

    is_raised = False
    is_told = False


_STATE = _State()


def watch() -> None:
    """End this process in one line at SIGINT, from now on."""
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return  # ignored, as in background jobs of a shell script, or somebody else's
    signal.signal(signal.SIGINT, _handle)
    # What is raised in a destructor or in a callback of the garbage collector cannot be passed on. Python would print
    # it and go on with the work.
    sys.unraisablehook = _end_or_print


@contextlib.contextmanager
def raised() -> Iterator[None]:
    """Raise KeyboardInterrupt at the first SIGINT within a `with` block. Without `watch`, that is what Python does."""
    _STATE.is_raised = True
    try:
        yield
    finally:
        _STATE.is_raised = False


def behind(error: BaseException) -> KeyboardInterrupt | None:
    """The interruption that an exception is, or that another one was raised from or during the handling of."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        if isinstance(link, KeyboardInterrupt):
            return link
        seen.add(id(link))
        link = link.__cause__ or link.__context__
    return None


def tell(more: str = "") -> int:
    """Print that the command was interrupted, once, and end without a line at the next SIGINT. Returns the status."""
    is_watched = signal.getsignal(signal.SIGINT) is _handle
    if is_watched:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # for a moment: a second line would come between the two
    print(LINE + (f" {more}" if more else ""), file=sys.stderr, flush=True)
    _STATE.is_told = True
    if is_watched:
        signal.signal(signal.SIGINT, _handle)
    return STATUS


def _handle(number: int, frame: object) -> None:
    if _STATE.is_raised:
        _STATE.is_raised = False
        raise KeyboardInterrupt
    _end()


def _end_or_print(unraisable: sys.UnraisableHookArgs) -> None:
    if isinstance(unraisable.exc_value, KeyboardInterrupt):
        _end()
    sys.__unraisablehook__(unraisable)


def _end() -> NoReturn:
    """End the process without going through what is left of it, which may be half imported."""
    with contextlib.suppress(Exception):  # such as a pipe that nobody reads any more
        sys.stdout.flush()
    if not _STATE.is_told:
        # Not through sys.stderr, in whose lock the signal may have come.
        with contextlib.suppress(OSError):
            os.write(2, f"{LINE}\n".encode())
    os._exit(STATUS)
