"""Modules whose `forward` is another one while a manager has their model."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn


def wrap(modules: Iterable[nn.Module], forward: Callable[..., Any]) -> None:
    """Let modules call `forward(module, theirs, *args, **kwargs)`, where `theirs` is what they would call otherwise.

    One that was given here before gives way. `unwrap` undoes it exactly.
    """
    for module in modules:
        before: Any = module.__dict__.get("forward")
        module.forward = functools.partial(_call, module, forward, before.args[2] if _is_ours(before) else before)


def unwrap(modules: Iterable[nn.Module]) -> None:
    """Undo `wrap`. Modules that have another `forward` keep it."""
    for module in modules:
        forward: Any = module.__dict__.get("forward")
        if _is_ours(forward):
            before = forward.args[2]
            del module.__dict__["forward"]
            if before is not None:
                module.forward = before


def _is_ours(forward: Any) -> bool:
    return isinstance(forward, functools.partial) and forward.func is _call


def _call(
    module: nn.Module, forward: Callable[..., Any], before: Callable[..., Any] | None, *args: Any, **kwargs: Any
) -> Any:
    """`before`: what a module had in its own dictionary."""
    return forward(module, before or functools.partial(type(module).forward, module), *args, **kwargs)
