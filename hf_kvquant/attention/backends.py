"""Which of PyTorch's kernels compute attention over caches that grow."""

from __future__ import annotations

import contextlib

from torch.nn.attention import SDPBackend, sdpa_kernel


def without_cudnn() -> contextlib.AbstractContextManager[None]:
    """A `with` block in which `scaled_dot_product_attention` does not call cuDNN.

    PyTorch calls it on Hopper in half precision, and cuDNN makes a plan for each new number of tokens. A step over a
    growing cache took 42 ms with it and 7 without (12 layers, bf16, H200, torch 2.11).
    """
    context: contextlib.AbstractContextManager[None] = sdpa_kernel(
        [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    )
    return context
