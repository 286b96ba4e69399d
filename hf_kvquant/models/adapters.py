"""Adapters in the modules of a model, such as peft's LoRA: which modules have one, and what decides their output.

peft puts a module of its own in place of a linear layer, and the layer into its `base_layer`. Which adapters act is not
in the tensors: it is in attributes of these modules, which `set_adapter`, `disable_adapter` and merging change.
"""

from __future__ import annotations

import marshal
from collections.abc import Hashable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .quantized import quantized_tensor

_SAMPLES = 64  # about how many numbers of a weight to compare
_SIMPLE = (bool, int, float, str, type(None))
_MARSHALLED = frozenset({*_SIMPLE, dict, list, tuple})
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
    """The names whose modules have adapters."""
    return [name for name in names if is_adapter(model.get_submodule(name))]


def weight_sample(model: nn.Module, name: str) -> Tensor:
    """A copy of some numbers of a module's weight, which tell whether it has changed; none if it is quantised."""
    module = without_adapters(model.get_submodule(name))
    if quantized_tensor(module) is not None:
        return torch.empty(0, device="cpu")
    weight: Tensor = module.get_parameter("weight").detach().reshape(-1)
    # An odd stride reaches every row and every column of a matrix whose sides are powers of two.
    return weight[:: weight.numel() // _SAMPLES | 1].clone()


def changed(model: nn.Module, samples: Mapping[str, Tensor]) -> str | None:
    """The first module whose weight differs from its sample.

    Weights that were cast, quantised or offloaded since may be equal.
    """
    found = [(name, old, weight_sample(model, name)) for name, old in samples.items()]
    found = [(name, old, new) for name, old, new in found if old.dtype == new.dtype and not new.is_meta]
    pairs = [(name, old.to(new.device), new) for name, old, new in found if len(old) and len(new)]
    devices = {new.device for _, _, new in pairs}
    # Usually all are equal, and one comparison on each device tells.
    for device in devices:
        of_device = [(old, new) for _, old, new in pairs if new.device == device]
        if not torch.equal(*(torch.cat(side) for side in zip(*of_device, strict=True))):
            return next(name for name, old, new in pairs if not torch.equal(old, new))
    return None


def adapter_settings(model: nn.Module) -> tuple[Hashable, ...]:
    """What decides the output of a model's adapters, besides tensors: which are active or merged, and their scaling."""
    return tuple(_settings(model))


def adapter_state(module: nn.Module) -> Hashable:
    """`adapter_settings` of one such module, fit to be compared in this process only, in a twentieth of the time."""
    values = (value for name, value in vars(module).items() if name[0] != "_" and type(value) in _MARSHALLED)
    return (*(repr(getattr(module, name, None)) for name in _SWITCHES), *map(_marshalled, values))


def _marshalled(value: Any) -> bytes | None:
    try:
        return marshal.dumps(value, 2)  # later versions also tell equal objects from the same one
    except ValueError:  # holds modules or the like
        return None


def has_switches(module: nn.Module) -> bool:
    """Whether a module is an adapter that can be switched off."""
    return "_disable_adapters" in vars(module) or hasattr(type(module), "_disable_adapters")


def _settings(model: nn.Module) -> Iterator[Hashable]:
    for index, module in enumerate(model.modules()):
        own = vars(module)
        if has_switches(module):
            facts = {name: value for name, value in own.items() if name[0] != "_" and _is_simple(value)}
            facts |= {name: getattr(module, name, None) for name in _SWITCHES}
            yield index, tuple((name, repr(value)) for name, value in sorted(facts.items()))


def _is_simple(value: object) -> bool:
    """Whether a value is numbers and names only, so that its `repr` is the same in another process."""
    if isinstance(value, dict):
        return all(map(_is_simple, value.values()))
    return all(map(_is_simple, value)) if isinstance(value, (list, tuple)) else isinstance(value, _SIMPLE)
