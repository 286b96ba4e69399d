#!/usr/bin/env bash
# transformers 5.24.0 with flash-linear-attention 0.6.0: models with a gated delta rule (Qwen3.5, Qwen3-Next, OLMo
# Hybrid) take fla's Triton kernels as soon as that package can be imported, whatever device the model is on. So on a
# CPU they raise an error of Triton's, in the first forward; without the package they run. fla says at its import that
# it goes back to the CPU, and transformers names neither the package nor the device.
#
# Source: transformers/integrations/hub_kernels.py: which function is called is decided once, when a model's module is
# imported.
#
# Seen: torch 2.13.0, triton 3.7.1, transformers 5.24.0, flash-linear-attention 0.6.0, CPU:
#     without fla: qwen3_5_text runs, olmo_hybrid runs
#     with fla: qwen3_5_text RuntimeError, olmo_hybrid RuntimeError
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0
"$folder/venv/bin/pip" install --quiet transformers==5.24.0
"$folder/venv/bin/pip" install --quiet --no-deps --target "$folder/fla" triton==3.7.1 einops==0.8.2 fla-core==0.6.0 \
    flash-linear-attention==0.6.0
cat >"$folder/run.py" <<'PYTHON'
import sys

import torch
from transformers import AutoConfig, AutoModelForCausalLM

expected = sys.argv[1]
sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 4, "pad_token_id": 0}
sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2, "eos_token_id": None, "linear_num_key_heads": 2}
sizes |= {"linear_num_value_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16}
found = {}
for model_type in ("qwen3_5_text", "olmo_hybrid"):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **sizes)).eval()
    assert model.device.type == "cpu"
    try:
        with torch.inference_mode():
            model(torch.arange(1, 21).unsqueeze(0))
        found[model_type] = "runs"
    except Exception as error:
        found[model_type] = type(error).__name__
print(", ".join(f"{model_type} {result}" for model_type, result in found.items()))
assert set(found.values()) == {expected}
PYTHON
export CUDA_VISIBLE_DEVICES=
printf 'without fla: '
"$folder/venv/bin/python" "$folder/run.py" runs 2>/dev/null
printf 'with fla: '
PYTHONPATH="$folder/fla" "$folder/venv/bin/python" "$folder/run.py" RuntimeError 2>/dev/null
