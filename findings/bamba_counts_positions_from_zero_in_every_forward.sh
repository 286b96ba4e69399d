#!/usr/bin/env bash
# transformers 5.24.0: a forward of Bamba over a cache counts its positions from 0 again, unless `position_ids` are
# passed. Other models begin behind what the cache holds. So a loop that feeds Bamba token by token, or a text in two
# pieces, rotates queries and keys by wrong angles, without a word. `generate` passes positions and is right.
#
# Source: transformers/models/bamba/modeling_bamba.py, `BambaModel.forward`: without `position_ids`, they are
# `torch.arange(hidden_states.shape[1])`.
#
# Seen: torch 2.13.0, transformers 5.24.0, CPU (whether logits differ from those of the text in one forward by over 0.1 %):
#     bamba: without positions True, with positions False
#     granitemoehybrid: without positions False, with positions False
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0
"$folder/venv/bin/pip" install --quiet transformers==5.24.0
cat >"$folder/run.py" <<'PYTHON'
import torch
from transformers import AutoConfig, AutoModelForCausalLM

SIZES = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 4}
MODELS = {
    "bamba": {"attn_layer_indices": [1]},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"], "position_embedding_type": "rope"},
}
found = {}
for model_type, options in MODELS.items():
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **SIZES, **options)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, parameter.shape[-1] ** -0.5)
    ids = torch.randint(3, 60, (1, 21))
    with torch.inference_mode():
        whole = model(ids).logits[:, -1]
        for name, positions in (("without", {}), ("with", {"position_ids": torch.tensor([[20]])})):
            cache = model(ids[:, :20], use_cache=True).cache
            last = model(ids[:, 20:], cache=cache, use_cache=True, **positions).logits[:, -1]
            found[model_type, name] = float((last - whole).abs().max() / whole.abs().max()) > 1e-3
    print(f"{model_type}: without positions {found[model_type, 'without']}, with positions {found[model_type, 'with']}")
assert found == {
    ("bamba", "without"): True,
    ("bamba", "with"): False,
    ("granitemoehybrid", "without"): False,
    ("granitemoehybrid", "with"): False,
}
PYTHON
"$folder/venv/bin/python" "$folder/run.py"
