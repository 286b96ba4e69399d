"""Small helpers for error messages. What is an error is decided where it is raised."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(value: object, choices: Iterable[str]) -> str:
    """` Did you mean 'x'?` for the nearest of `choices`, or an empty string when nothing is near or no text was given.

    Upper and lower case are alike.
    """
    if not isinstance(value, str):
        return ""
    spelled = {choice.casefold(): choice for choice in choices}
    near = difflib.get_close_matches(value.casefold(), spelled, n=1)
    return f" Did you mean '{spelled[near[0]]}'?" if near else ""
