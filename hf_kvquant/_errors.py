"""Small helpers for error messages. What is an error is decided where it is raised."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(value: object, choices: Iterable[str]) -> str:
    """` Did you mean 'x'?` for the nearest of `choices`, or an empty string when nothing is near."""
    near = difflib.get_close_matches(str(value), list(choices), n=1)
    return f" Did you mean '{near[0]}'?" if near else ""
