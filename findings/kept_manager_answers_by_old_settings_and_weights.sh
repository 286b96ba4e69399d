#!/usr/bin/env bash
# transformers 5.24.0: `generate_batch(..., persistent_manager=True)` keeps its manager for the next call. The next call
# then ignores its own generation config, and after `load_state_dict` it reads keys and values that the weights before
# have made, for prompts that share pages with an earlier one. Nothing is logged. Call
# `destroy_cached_continuous_batching_manager()` in between: "alone" below are calls that do.
#
# Source: generation/continuous_batching/continuous_api.py, `init_continuous_batching` returns
# `_cached_continuous_batching_manager` before it looks at its arguments; pages are found by hashes of tokens alone.
#
# Seen: torch 2.13.0, transformers 5.24.0, CPU:
#     suppress_tokens=[63]: kept manager [63, 68, 58, 13, 85, 18], alone [87, 45, 48, 23, 44, 85]
#     after load_state_dict: kept manager [88, 10, 90, 5, 33, 31], alone [93, 52, 78, 70, 45, 45]
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.24.0
"$folder/venv/bin/pip" install --quiet psutil==7.1.3
cat >"$folder/run.py" <<'PYTHON'
import logging

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, LlamaConfig, LlamaForCausalLM

logging.disable(logging.CRITICAL)
torch.manual_seed(0)
sizes = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, max_position_embeddings=2048)).eval()
prompt = torch.randint(3, 96, (600,)).tolist()
batching = ContinuousBatchingConfig(num_blocks=64, max_batch_tokens=1024)


def kept(**settings):
    config = GenerationConfig(max_new_tokens=6, do_sample=False, eos_token_id=-1, pad_token_id=0, **settings)
    outputs = model.generate_batch([prompt], config, batching, progress_bar=False, persistent_manager=True)
    return next(iter(outputs.values())).generated_tokens


def alone(**settings):
    model.destroy_cached_continuous_batching_manager()
    found = kept(**settings)
    model.destroy_cached_continuous_batching_manager()
    return found


first = kept()
suppressed = first[0]
stale, own = kept(suppress_tokens=[suppressed]), alone(suppress_tokens=[suppressed])
print(f"suppress_tokens=[{suppressed}]: kept manager {stale}, alone {own}")
assert stale == first and suppressed not in own

kept()
torch.manual_seed(1)
model.load_state_dict({name: x + 0.2 * torch.randn_like(x) for name, x in model.state_dict().items()})
stale, own = kept(), alone()
print(f"after load_state_dict: kept manager {stale}, alone {own}")
assert stale != own
PYTHON
"$folder/venv/bin/python" "$folder/run.py"
