"""Forwards and attributes of module instances that are replaced for a while, and what tells modules apart."""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterator
from typing import Any

from torch import nn


@contextlib.contextmanager
def replaced(module: nn.Module, **attributes: Any) -> Iterator[None]:
    """Attributes of one module instance, such as its forward or a parameter, are these while the block runs."""
    before = {name: own for name, own in vars(module).items() if name in attributes}
    module.__dict__.update(attributes)
    try:
        yield
    finally:
        for name in attributes:
            del module.__dict__[name]
        module.__dict__.update(before)


def is_plain(module: nn.Module) -> bool:
    """Whether calling a module only calls the forward of its class."""
    return "forward" not in vars(module) and only_calls_forward(module)


def only_calls_forward(module: nn.Module) -> bool:
    """Whether calling a module only calls its forward."""
    return not module._forward_hooks and not module._forward_pre_hooks and module._compiled_call_impl is None


def identity(module: nn.Module, *ignored: str) -> Hashable:
    """A key that differs between modules that compute different functions, without the attributes of these names."""
    simple = (bool, int, float, str, type(None))
    attributes = {name: value for name, value in vars(module).items() if not name.startswith("_")}
    for name in ("forward", *ignored):
        attributes.pop(name, None)
    values = (value if isinstance(value, simple) else id(value) for value in attributes.values())
    return type(module), tuple(attributes), tuple(values)
