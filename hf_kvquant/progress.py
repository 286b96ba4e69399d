"""What is shown of long work while it goes on: a bar in terminals and notebooks, elsewhere a line every 30 seconds.

Bars are tqdm's, as transformers uses it, so they follow its switch: `transformers.utils.logging.disable_progress_bar()`
turns them off, lines as well.
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
# Without a number of steps, what is done and for how long is all there is to say.
_LINE = {True: "{desc}: {percentage:.0f} %, {elapsed} so far, {remaining} left", False: "{desc}, {elapsed} so far"}


class Tell(Protocol):
    """What long work calls with the steps that it has done, and with what it does next, in words."""

    def __call__(self, done: int = 0, /, doing: str | None = None) -> None: ...


class _Lines:
    """A file for tqdm that makes a line on stderr of each state of a bar."""

    def write(self, text: str) -> None:
        if text.strip():
            print(text.strip(), file=sys.stderr, flush=True)

    def flush(self) -> None:
        """Nothing is kept back."""


@contextlib.contextmanager
def show_progress(what: str, total: int | None = None, *, unit: str = "it", is_shown: bool = True) -> Iterator[Tell]:
    """Show on stderr how far some work is.

    Args:
        what: Is done; opens every line.
        total: Steps; `None` where nobody knows.
        unit: Of a step.
        is_shown: Whether to show anything.

    Yields:
        What the work calls now and then: with the steps done since the last call, and with what it does next. It does
        both more often than every 30 seconds, if it can.
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
    """Hide transformers' own progress bars for the length of a `with` block."""
    was_enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            logging.enable_progress_bar()
