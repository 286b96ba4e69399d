#!/usr/bin/env bash
# transformers 5.24.0: GIT without a picture, in a batch with left padding. From the second new token on, `generate` with
# its cache gives other logits for the padded text than without a cache. The text without padding and the first new token
# are the same. A cache is taken to hold the tokens of a picture, so the mask gets as many ones in front, and what it hides
# moves on by that many tokens.
#
# Source: models/git/modeling_git.py (`GitModel.forward`, where `cache_length > 0`).
#
# Seen: torch 2.13.0, a random model whose pictures have 5 tokens:
#     without padding: the same logits in 6 of 6 steps
#     3 tokens of padding: the same logits in 1 of 6 steps
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.24.0
cat >"$folder/run.py" <<'PYTHON'
import torch
from transformers import GitConfig, GitForCausalLM

torch.manual_seed(0)
vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
sizes = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
ends = {"bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
config = GitConfig(vision_config={**vision, "image_size": 16, "patch_size": 8}, **sizes, **ends, initializer_range=0.2)
model = GitForCausalLM(config).eval()
ids = torch.randint(3, 90, (2, 9))
mask = torch.ones_like(ids)
mask[1, :3] = 0
options = {"max_new_tokens": 6, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
with_cache, without = (
    torch.stack(model.generate(ids, attention_mask=mask, use_cache=use_cache, **options).logits)
    for use_cache in (True, False)
)
for row, name in enumerate(("without padding", "3 tokens of padding")):
    gaps = (with_cache - without)[:, row].abs().amax(-1)
    print(f"{name}: the same logits in {int((gaps < 1e-3 * without.std()).sum())} of {len(gaps)} steps")
PYTHON
"$folder/venv/bin/python" "$folder/run.py" 2>/dev/null | tee "$folder/seen"
diff "$folder/seen" - <<'SEEN'
without padding: the same logits in 6 of 6 steps
3 tokens of padding: the same logits in 1 of 6 steps
SEEN
