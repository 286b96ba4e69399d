"""Finds the keys and values that a checkpoint rounds by itself, before a cache gets them, and leaves that out.

Checkpoints of compressed-tensors with a `kv_cache_scheme` have a scale for each layer. The package hooks the attention
modules, puts a stand-in in place of their cache, and there rounds keys and values to that scale. Where the checkpoint
also rounds queries, the same switch turns that off.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import nn

_SWITCH = "quantization_enabled"  # of compressed-tensors, on the attention module; missing means True


def rounded(model: nn.Module) -> Mapping[str, str]:
    """The attention modules that round keys and values by scales of the checkpoint, and to what: `"8-bit float"`."""
    found = {}
    for name, module in model.named_modules():
        scheme = getattr(getattr(module, "quantization_scheme", None), "input_activations", None)
        is_hooked = type(getattr(module, "kv_cache", None)).__name__ == "QuantizedKVCache"
        if is_hooked and scheme is not None and getattr(module, _SWITCH, True):
            found[name] = f"{scheme.num_bits}-bit {scheme.type}"
    return found


def switch(model: nn.Module, names: Iterable[str], *, is_on: bool) -> None:
    """Let these attention modules round again, or no longer."""
    for name in names:
        module = model.get_submodule(name)
        if is_on:
            module.__dict__.pop(_SWITCH, None)
        else:
            setattr(module, _SWITCH, False)
