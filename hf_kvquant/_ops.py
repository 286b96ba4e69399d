"""The namespace of the ops: the one place that names it in Python, as csrc/module.cpp does in C++.

A build for the kernels hub (hub/build.py) has its own namespace, so that several builds can be loaded together with
this package. kernel-builder then replaces this file with one that defines the same two names.
"""

from __future__ import annotations

import torch

ops = torch.ops.hf_kvquant


def add_op_namespace_prefix(op_name: str) -> str:
    """The qualified name of an op for torch.library, such as `hf_kvquant::append`."""
    return f"hf_kvquant::{op_name}"
