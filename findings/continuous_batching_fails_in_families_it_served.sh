#!/usr/bin/env bash
# transformers 5.24.0: in continuous batching the model hands its keys to the paged cache, `cache.update(..., kwargs=kwargs)`,
# where 5.23 left that to the attention function. Two families that 5.23 served give no token any more: GPT-NeoX calls
# `update` without `kwargs`, and OPT asks the paged cache for `get_seq_length`, which it does not have. `generate_batch`
# raises nothing: it returns a result with an error in it, and no tokens.
#
# Source: models/gpt_neox/modeling_gpt_neox.py, models/opt/modeling_opt.py, generation/continuous_batching/cache.py.
#
# Seen: torch 2.13.0 on a CPU:
#     5.23.0 llama: 3 tokens, None
#     5.23.0 gpt_neox: 3 tokens, None
#     5.23.0 opt: 3 tokens, None
#     5.24.0 llama: 3 tokens, None
#     5.24.0 gpt_neox: 0 tokens, PagedAttentionCache.update() missing 1 required positional argument: 'kwargs'
#     5.24.0 opt: 0 tokens, 'PagedAttentionCache' object has no attribute 'get_seq_length'
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 psutil==7.2.2
cat >"$folder/run.py" <<'PYTHON'
import logging

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig

logging.disable(logging.CRITICAL)
SIZES = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 48, "ffn_dim": 48, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "max_position_embeddings": 128, "word_embed_proj_dim": 64, "pad_token_id": 0}
for model_type in ("llama", "gpt_neox", "opt"):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **SIZES, **HEADS)).eval()
    generation = GenerationConfig(max_new_tokens=3, do_sample=False, eos_token_id=-1)
    batching = ContinuousBatchingConfig(num_blocks=8, max_batch_tokens=64, page_size=16)
    (result,) = model.generate_batch([[5, 6, 7]], generation, batching, progress_bar=False).values()
    print(f"{transformers.__version__} {model_type}: {len(result.generated_tokens)} tokens, {result.error}")
PYTHON
for version in 5.23.0 5.24.0; do
    "$folder/venv/bin/pip" install --quiet transformers=="$version"
    "$folder/venv/bin/python" "$folder/run.py"
done | tee "$folder/seen"
diff "$folder/seen" - <<'SEEN'
5.23.0 llama: 3 tokens, None
5.23.0 gpt_neox: 3 tokens, None
5.23.0 opt: 3 tokens, None
5.24.0 llama: 3 tokens, None
5.24.0 gpt_neox: 0 tokens, PagedAttentionCache.update() missing 1 required positional argument: 'kwargs'
5.24.0 opt: 0 tokens, 'PagedAttentionCache' object has no attribute 'get_seq_length'
SEEN
echo "as described"
