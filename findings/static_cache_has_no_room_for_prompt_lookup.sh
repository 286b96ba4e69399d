#!/usr/bin/env bash
# transformers 5.24.0: assisted decoding accepts static caches, but sizes them for the requested length alone. Proposals
# of prompt lookup are as many as asked for, wherever they start, so near the end of a call they are written behind the
# buffer. `generate` raises an IndexError from `index_copy_` where the same call over the default cache gives tokens.
#
# Source: generation/utils.py (`max_cache_length = generation_config.max_length - 1`) and
# generation/candidate_generator.py (`PromptLookupCandidateGenerator` caps proposals by the prompt, not by what is left).
# Guess before the run: an IndexError, since index_copy_ checks its index. So it was.
#
# Seen: torch 2.13.0, transformers 5.24.0, on a CPU:
#     3 dynamic: 12 new tokens
#     3 static: 12 new tokens
#     10 dynamic: 12 new tokens
#     10 static: IndexError: index_copy_(): index 20 is out of bounds for dimension 2 with size 20
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.24.0
cat >"$folder/run.py" <<'PYTHON'
import torch
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
sizes = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 2}
heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, pad_token_id=0, eos_token_id=None)).eval()
prompt = torch.tensor([[5, 9, 5, 9, 5, 9, 7, 5, 9]])
for proposals in (3, 10):
    for cache in ("dynamic", "static"):
        options = {"prompt_lookup_num_tokens": proposals, "cache_implementation": cache}
        try:
            ids = model.generate(prompt, max_new_tokens=12, do_sample=False, **options)
            print(f"{proposals} {cache}: {ids.shape[1] - prompt.shape[1]} new tokens")
        except IndexError as error:
            print(f"{proposals} {cache}: IndexError: {error}")
PYTHON
"$folder/venv/bin/python" "$folder/run.py" | tee "$folder/seen"
diff "$folder/seen" - <<'SEEN'
3 dynamic: 12 new tokens
3 static: 12 new tokens
10 dynamic: 12 new tokens
10 static: IndexError: index_copy_(): index 20 is out of bounds for dimension 2 with size 20
SEEN
echo "as described"
