"""Modules whose `forward` is another one while a manager has their model."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn


class Wrapper:
    """Lets modules call another function in place of their `forward`, as long as a manager has their model.

    Args:
        modules: Whose `forward` gives way.
        forward: Called as `forward(module, theirs, *args, **kwargs)`, where `theirs` is what a module would call
            otherwise.
    """

    def __init__(self, modules: Iterable[nn.Module], forward: Callable[..., Any]) -> None:
        self._modules, self._forward = list(modules), forward
        self._given: dict[nn.Module, functools.partial[Any]] = {}

    def wrap(self) -> None:
        """Give modules the function. One that was given here before gives way. `unwrap` undoes it exactly.

        A module gets the same object again. With another one it would be another model for `fingerprint`, and a manager
        would forget pages and captured steps whenever it starts.
        """
        for module in self._modules:
            before: Any = module.__dict__.get("forward")
            theirs = before.args[2] if _is_ours(before) else before
            given = self._given.get(module)
            if given is None or given.args[2] is not theirs:
                given = self._given[module] = functools.partial(_call, module, self._forward, theirs)
            module.forward = given


def unwrap(modules: Iterable[nn.Module]) -> None:
    """Undo `Wrapper.wrap`. Modules that have another `forward` keep it."""
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
