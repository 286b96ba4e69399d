"""Whether figures of benchmarks reach their goals, and how tables say so."""

from __future__ import annotations


def is_reached(measured: float | None, limit: float | None, *, at_least: bool = False) -> bool | None:
    """Whether a figure is at most its limit, or at least; `None` if one of both is unknown."""
    if measured is None or limit is None:
        return None
    return measured >= limit if at_least else measured <= limit


def verdict(reached: bool | None) -> str:
    """What `is_reached` says, in words for a table."""
    if reached is None:
        return "not measured"
    return "reached" if reached else "[bold]missed[/bold]"
