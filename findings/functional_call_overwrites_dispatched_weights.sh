#!/usr/bin/env bash
# compressed-tensors 0.20.0: after `dispatch_model`, `torch.func.functional_call` overwrites the weights of a module for
# good. It should use other parameters for one call. `dispatch_model` puts an offload cache in the place of
# `module._parameters`; assigning to it copies the numbers into the tensor that it holds, so the tensor that
# `functional_call` sets aside to restore is overwritten, too. transformers dispatches models that it loads from
# checkpoints of compressed-tensors. Calling the class's `forward` on a copy of the module with other parameters works.
#
# Source: compressed_tensors/offload/cache/ (`__setitem__`), torch/nn/utils/stateless.py.
#
# Seen: torch 2.13.0, compressed-tensors 0.20.0, transformers 5.24.0:
#     plain: output 0.0, weights before 1.0, after 1.0
#     dispatched, _parameters is a CPUCache: output 0.0, weights before 1.0, after 0.0
#     a copy of the module: output 0.0, weights before 1.0, after 1.0
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.24.0
"$folder/venv/bin/pip" install --quiet compressed-tensors==0.20.0
cat >"$folder/run.py" <<'PYTHON'
import copy

import torch
from compressed_tensors.offload import dispatch_model
from torch import nn

x = torch.randn(2, 4)
zeros = {"weight": torch.zeros(4), "bias": torch.zeros(4)}


def through_copy(norm):
    trial = copy.copy(norm)
    trial._parameters = dict(zeros)
    return type(norm).forward(trial, x)


def through_call(norm):
    return torch.func.functional_call(norm, zeros, (x,))


def shown(what, is_dispatched, run):
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    if is_dispatched:
        dispatch_model(model)
    norm = model[1]
    before = float(norm.weight[0].detach())
    output = float(run(norm).detach().abs().max())
    after = float(norm.weight[0].detach())
    print(f"{what}: output {output}, weights before {before}, after {after}")
    return output, before, after


kind = type(dispatch_model(nn.Sequential(nn.LayerNorm(4)))[0]._parameters).__name__
assert shown("plain", False, through_call) == (0.0, 1.0, 1.0)
assert shown(f"dispatched, _parameters is a {kind}", True, through_call) == (0.0, 1.0, 0.0)
assert shown("a copy of the module", True, through_copy) == (0.0, 1.0, 1.0)
PYTHON
"$folder/venv/bin/python" "$folder/run.py"
