"""Which namespace the ops are in: the one place that says it for Python, as csrc/module.cpp does for C++.

A build for the kernels hub (hub/build.py) has a namespace of its own, so that several of them can be loaded beside this
package; kernel-builder then puts a file with these two names in the place of this one.
"""

from __future__ import annotations

import torch

ops = torch.ops.hf_kvquant


def add_op_namespace_prefix(op_name: str) -> str:
    """The name of an op as torch.library wants it, such as `hf_kvquant::append`."""
    return f"hf_kvquant::{op_name}"
