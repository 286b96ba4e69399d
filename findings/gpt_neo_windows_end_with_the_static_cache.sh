#!/usr/bin/env bash
# transformers 5.24.0: GPT-Neo with `cache_implementation="static"`. Layers with local attention give other logits than with
# a growing cache or without one, from the first new token on, without a word. Layers with global attention give the same.
# The window is cut from the end of the cache's capacity, where no tokens are yet, instead of from the newest token.
#
# Source: models/gpt_neo/modeling_gpt_neo.py (`GPTNeoSelfAttention._attn`: `key_length` is the capacity).
#
# Seen: torch 2.13.0, a random model of two layers, windows of 8 tokens, a prompt of 12:
#     global: the same logits in 6 of 6 steps without a cache, in 6 of 6 with a static one
#     local: the same logits in 6 of 6 steps without a cache, in 0 of 6 with a static one
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.24.0
cat >"$folder/run.py" <<'PYTHON'
import torch
from transformers import GPTNeoConfig, GPTNeoForCausalLM

torch.manual_seed(0)
sizes = {"vocab_size": 96, "hidden_size": 64, "num_layers": 2, "num_heads": 2, "max_position_embeddings": 64}
ends = {"bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
ids = torch.randint(3, 90, (1, 12))
options = {"max_new_tokens": 6, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
for kind in ("global", "local"):
    config = GPTNeoConfig(**sizes, **ends, window_size=8, attention_types=[[[kind], 2]], initializer_range=0.2)
    model = GPTNeoForCausalLM(config).eval()

    def logits(**more):
        found = model.generate(ids, attention_mask=torch.ones_like(ids), disable_compile=True, **options, **more)
        return torch.stack(found.logits)[:, 0]

    growing = logits()
    without, static = (
        int(((found - growing).abs().amax(-1) < 1e-3 * growing.std()).sum())
        for found in (logits(use_cache=False), logits(cache_implementation="static"))
    )
    print(f"{kind}: the same logits in {without} of 6 steps without a cache, in {static} of 6 with a static one")
PYTHON
"$folder/venv/bin/python" "$folder/run.py" 2>/dev/null | tee "$folder/seen"
diff "$folder/seen" - <<'SEEN'
global: the same logits in 6 of 6 steps without a cache, in 6 of 6 with a static one
local: the same logits in 6 of 6 steps without a cache, in 0 of 6 with a static one
SEEN
