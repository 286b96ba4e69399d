#!/usr/bin/env bash
# transformers 5.24.0: with `attn_implementation="paged|eager"`, a forward and `generate` outside of continuous batching are
# not causal: tokens attend to those that come later. No error, no warning. "paged|sdpa" becomes "sdpa" there and is right.
#
# Source: masking_utils.py (`_preprocess_mask_arguments`: no mask function is registered under that name, so models get no
# mask); integrations/eager_paged.py attends without one.
#
# Guess before the run: the paged names might get no mask. So it was, for one of the two.
# Seen: torch 2.13.0, CPU. How much the last token changes the logits of the first one:
#     eager: not at all
#     sdpa: not at all
#     paged|sdpa: not at all
#     paged|eager: by more than 0.1
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0
"$folder/venv/bin/pip" install --quiet transformers==5.24.0
cat >"$folder/run.py" <<'PYTHON'
import torch
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
sizes = {"hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
model = LlamaForCausalLM(LlamaConfig(vocab_size=96, initializer_range=0.3, **sizes)).eval()
ids = torch.randint(0, 96, (1, 8))
changed = ids.clone()
changed[:, -1] = (changed[:, -1] + 1) % 96
found = {}
for name in ("eager", "sdpa", "paged|sdpa", "paged|eager"):
    model.set_attn_implementation(name)
    with torch.no_grad():
        found[name] = float((model(ids).logits[:, 0] - model(changed).logits[:, 0]).abs().max())
    told = "not at all" if found[name] == 0 else f"by {'more' if found[name] > 0.1 else 'less'} than 0.1"
    print(f"{name}: {told}")
assert found.pop("paged|eager") > 0.1 and not any(found.values()), found
PYTHON
"$folder/venv/bin/python" "$folder/run.py"
