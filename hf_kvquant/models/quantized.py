"""Tells modules with quantised weights from those whose weights are plain numbers, whichever library quantised them."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def quantized_tensor(module: nn.Module) -> str | None:
    """A tensor of a module that is not a plain weight or bias, in words; `None` if all are."""
    # Not from `state_dict`: in it, bitsandbytes rounds the weights of a CPU model.
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if tensor.dtype not in FLOATS or type(tensor) not in (nn.Parameter, Tensor):
            return f"{str(tensor.dtype).removeprefix('torch.')} {type(tensor).__name__}"
        # compressed-tensors rounds plain weights and inputs in the forward, by scales in parameters of their own.
        if isinstance(module, (nn.Linear, Conv1D)) and name not in ("weight", "bias"):
            return f"a '{name}' besides its weight"
    return None
