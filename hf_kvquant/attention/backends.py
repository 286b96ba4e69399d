"""Which of PyTorch's kernels compute attention over numbers of tokens that change."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch

_lock = threading.Lock()
_num_inside, _was_enabled = 0, True  # blocks that run, in all threads, and what they restore


@contextlib.contextmanager
def without_cudnn() -> Iterator[None]:
    """A `with` block in which `scaled_dot_product_attention` does not call cuDNN, in any thread.

    PyTorch calls it on Hopper in half precision, and cuDNN makes a plan for each new number of sequences and of tokens.
    A step over a growing cache took 42 ms with it and 7 without (12 layers, bf16, H200, torch 2.11).
    """
    global _num_inside, _was_enabled
    with _lock:
        if _num_inside == 0:
            _was_enabled = torch.backends.cuda.cudnn_sdp_enabled()
            torch.backends.cuda.enable_cudnn_sdp(False)
        _num_inside += 1
    try:
        yield
    finally:
        with _lock:
            _num_inside -= 1
            if _num_inside == 0:
                torch.backends.cuda.enable_cudnn_sdp(_was_enabled)
