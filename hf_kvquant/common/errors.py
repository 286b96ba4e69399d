"""Suggestions for error messages. The caller decides what is an error."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(value: object, choices: Iterable[str]) -> str:
    """` Did you mean 'x'?` with the choice nearest to `value`, ignoring case.

    Empty if no choice is near or `value` is not a string.
    """
    if not isinstance(value, str):
        return ""
    spelled = {choice.casefold(): choice for choice in choices}
    near = difflib.get_close_matches(value.casefold(), spelled, n=1)
    return f" Did you mean '{spelled[near[0]]}'?" if near else ""
