"""Shows the progress of long work: a bar in terminals and notebooks, elsewhere a line every 30 seconds.

Both come from tqdm as transformers wraps it, so `transformers.utils.logging.disable_progress_bar()` turns them off.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any, Protocol

import tqdm.auto
import tqdm.notebook
from transformers.utils import logging

SECONDS = 30.0  # from one line to the next
# The format of a line, by whether the number of steps is known.
_LINE = {True: "{desc}: {percentage:.0f} %, {elapsed} so far, {remaining} left", False: "{desc}, {elapsed} so far"}


class Tell(Protocol):
    """A callback of long work, which passes the steps just done and, in words, what it does next."""

    def __call__(self, done: int = 0, /, doing: str | None = None) -> None: ...


class _Lines:
    """A file for tqdm that prints each state of a bar as a line on stderr."""

    def write(self, text: str) -> None:
        if text.strip():
            print(text.strip(), file=sys.stderr, flush=True)

    def flush(self) -> None:
        """Do nothing: every line is flushed when it is printed."""


@contextlib.contextmanager
def show_progress(what: str, total: int | None = None, *, unit: str = "it", is_shown: bool = True) -> Iterator[Tell]:
    """Show the progress of some work on stderr, in lines that start with its name. `total` steps may be unknown.

    Yields the function that the work calls, if possible more often than every 30 seconds.
    """
    is_drawn = sys.stderr.isatty() or issubclass(tqdm.auto.tqdm, tqdm.notebook.tqdm_notebook)
    form: dict[str, Any] = {} if total is not None else {"bar_format": "{desc} [{elapsed}]"}
    if not is_drawn:
        form = {"file": _Lines(), "bar_format": _LINE[total is not None], "miniters": 0}
        form |= {"mininterval": SECONDS, "delay": SECONDS}
    with logging.tqdm(total=total, desc=what, unit=unit, leave=False, disable=not is_shown, **form) as bar:

        def tell(done: int = 0, /, doing: str | None = None) -> None:
            if doing is not None:
                bar.set_description_str(f"{what}: {doing}", refresh=is_drawn)
            bar.update(done)

        yield tell


@contextlib.contextmanager
def without_bars() -> Iterator[None]:
    """Hide transformers' own progress bars within a `with` block."""
    was_enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            logging.enable_progress_bar()
