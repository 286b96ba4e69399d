"""How tests wait for what runs beside them, be it a thread, a server or a program: as long as it lives.

How long that takes says nothing about the package. Beside other work, what starts in five seconds may take minutes. So
whoever waits looks whether the other one still lives, and fails at once if it does not.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import pytest

PATIENCE = 3600  # seconds; only what lives and does nothing takes longer

Found = TypeVar("Found")


def until(condition: Callable[[], Found], is_alive: Callable[[], object] = lambda: True, every: float = 0.01) -> Found:
    """What a call returns once it is true.

    Args:
        condition: Called again and again.
        is_alive: False once the condition will never come true, because what it waits for has ended.
        every: Seconds between calls.
    """
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        still = is_alive()  # asked first: it may end right after it has made the condition true
        if found := condition():
            return found
        if not still:
            pytest.fail("what was waited for has ended")
        time.sleep(every)
    pytest.fail(f"it did not become so in {PATIENCE} s")


def run(command: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
    """A program that must end well, and what it said."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, **options)
    assert done.returncode == 0, done.stderr
    return done


def next_result(manager: Any, name: str | None = None) -> Any:
    """The next output of a continuous batching manager, of any request or of this one."""
    return until(lambda: manager.get_result(name, timeout=1), manager.is_running)
