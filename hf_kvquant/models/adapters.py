"""Adapters in the modules of a model, such as peft's LoRA: which modules have one, and what decides their output.

peft puts a module of its own in place of a linear layer, and the layer into its `base_layer`. Which adapters act is not
in the tensors: it is in attributes of these modules, which `set_adapter`, `disable_adapter` and merging change.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator

from torch import nn

_SIMPLE = (bool, int, float, str, type(None))
# What every adapter has, in its class if not in the instance.
_SWITCHES = ("_active_adapter", "_disable_adapters", "merged_adapters")


def is_adapter(module: nn.Module) -> bool:
    """Whether a module stands in place of another one and may change its output."""
    return any(hasattr(module, name) for name in ("base_layer", "lora_A", "_disable_adapters"))


def without_adapters(module: nn.Module) -> nn.Module:
    """The module in whose place an adapter stands, or the module itself if it is none."""
    while isinstance(inner := getattr(module, "base_layer", None), nn.Module):
        module = inner
    return module


def adapted(model: nn.Module, names: Iterable[str]) -> list[str]:
    """Those of the modules of these names that have adapters."""
    return [name for name in names if is_adapter(model.get_submodule(name))]


def adapter_settings(model: nn.Module) -> tuple[Hashable, ...]:
    """What decides the output of a model's adapters, besides tensors: which are active or merged, and their scaling."""
    return tuple(_settings(model))


def _settings(model: nn.Module) -> Iterator[Hashable]:
    for index, module in enumerate(model.modules()):
        own = vars(module)
        if "_disable_adapters" in own or hasattr(type(module), "_disable_adapters"):
            facts = {name: value for name, value in own.items() if name[0] != "_" and _is_simple(value)}
            facts |= {name: getattr(module, name, None) for name in _SWITCHES}
            yield index, tuple((name, repr(value)) for name, value in sorted(facts.items()))


def _is_simple(value: object) -> bool:
    """Whether a value is numbers and names only, so that its `repr` is the same in another process."""
    if isinstance(value, dict):
        return all(map(_is_simple, value.values()))
    return all(map(_is_simple, value)) if isinstance(value, (list, tuple)) else isinstance(value, _SIMPLE)
