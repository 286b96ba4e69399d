#!/usr/bin/env bash
# compressed-tensors 0.20.0 with transformers 5.24.0: a checkpoint with a `kv_cache_scheme` keeps keys and values as they
# are, and its scales are not loaded. With transformers 5.23.0 keys and values are rounded to float8 by these scales.
# Nothing is logged. So quality measured with one release is not that of the other.
#
# Source: compressed_tensors/quantization/lifecycle/initialize.py, `is_cached_attention_module` wants a parameter
# `past_key_value` or `past_key_values` of the attention's forward; transformers 5.24 passes the cache as `cache`.
#
# Seen: torch 2.13.0, compressed-tensors 0.20.0, accelerate 1.15.0, CPU:
#     transformers 5.23.0: 112 distinct keys of 736
#     transformers 5.24.0: 736 distinct keys of 736
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0
"$folder/venv/bin/pip" install --quiet transformers==5.23.0 compressed-tensors==0.20.0 accelerate==1.15.0
cat >"$folder/run.py" <<'PYTHON'
import json
import logging
import sys
import warnings
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

logging.disable(logging.CRITICAL)
warnings.simplefilter("ignore")
torch.manual_seed(0)
sizes = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=False))
scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
quantization = {"quant_method": "compressed-tensors", "format": "dense", "config_groups": {}, "kv_cache_scheme": scheme}
scales = {f"model.layers.{layer}.self_attn.{side}_scale": torch.tensor([0.01]) for layer in range(2) for side in "kv"}
made = Path(sys.argv[1]) / transformers.__version__
made.mkdir()
(made / "config.json").write_text(json.dumps({**model.config.to_dict(), "quantization_config": quantization}))
save_file({**model.state_dict(), **scales}, made / "model.safetensors", metadata={"format": "pt"})

loaded = AutoModelForCausalLM.from_pretrained(made, dtype=torch.float32).eval()
tokens = torch.randint(3, 96, (1, 22))
output = loaded.generate(tokens, max_new_tokens=2, do_sample=False, return_dict_in_generate=True)
cache = getattr(output, "cache", None)
cache = output.past_key_values if cache is None else cache
keys = cache.layers[-1].keys
print(f"transformers {transformers.__version__}: {keys.unique().numel()} distinct keys of {keys.numel()}")
# 256 codes at most, if they are rounded.
assert (keys.unique().numel() <= 256) == (sys.argv[2] == "rounded"), keys.unique().numel()
PYTHON
"$folder/venv/bin/python" "$folder/run.py" "$folder" rounded
"$folder/venv/bin/pip" install --quiet transformers==5.24.0
"$folder/venv/bin/python" "$folder/run.py" "$folder" plain
