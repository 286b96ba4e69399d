#!/usr/bin/env bash
# peft 0.21.2 with transformers 5.24.0: `generate` hands models their cache as `cache`, which was `past_key_values` until
# 5.23.0. peft's prompt learning still looks for the old name and takes every step for the first one:
# - Prompt tuning puts its virtual tokens before each new token again. With 8 of them, a step feeds 9 tokens, and the cache
#   holds 54 where it should hold 22. Nothing is raised or logged, and other tokens are generated than without a cache.
# - Prefix tuning still gives its prefix as `past_key_values`, which the model ignores beside `cache`: what was trained has
#   no effect. The model says so in a FutureWarning about a deprecated name. Without a cache, it does the reverse: prefix
#   and text grow with every step.
# transformers 5.24.0 asks for peft 0.22.0 in its own methods for adapters only; `get_peft_model` does not check.
#
# Source: peft_model.py (`PeftModelForCausalLM.prepare_inputs_for_generation`). Guess before the run: prompt tuning works,
# since peft's model calls the base model's own method first. It does not.
#
# Seen: torch 2.13.0, on a CPU, tokens fed by each forward of 5 new tokens behind 10, with 8 virtual ones:
#     5.23.0 prompt tuning: fed 18 1 1 1 1, the cache holds 22
#     5.23.0 prefix tuning: fed 10 1 1 1 1, the cache holds 22
#     5.24.0 prompt tuning: fed 18 9 9 9 9, the cache holds 54
#     5.24.0 prefix tuning: fed 10 1 1 1 1, the cache holds 14
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0
"$folder/venv/bin/pip" install --quiet peft==0.21.2 transformers==5.23.0
cat >"$folder/run.py" <<'PYTHON'
import warnings

import torch
import transformers
from peft import PrefixTuningConfig, PromptTuningConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

warnings.simplefilter("ignore")
sizes = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
config = LlamaConfig(**sizes, **heads, pad_token_id=0, eos_token_id=None, bos_token_id=1)
for name, kind in {"prompt": PromptTuningConfig, "prefix": PrefixTuningConfig}.items():
    torch.manual_seed(0)
    base = LlamaForCausalLM(config).eval()
    model = get_peft_model(base, kind(task_type="CAUSAL_LM", num_virtual_tokens=8)).eval()
    prompt, fed = torch.randint(3, 90, (1, 10)), []

    def count(_module, _args, inputs):
        given = inputs.get("inputs_embeds")
        fed.append(inputs["input_ids"].shape[1] if given is None else given.shape[1])

    base.model.register_forward_pre_hook(count, with_kwargs=True)
    options = {"max_new_tokens": 5, "do_sample": False, "return_dict_in_generate": True}
    out = model.generate(input_ids=prompt, attention_mask=torch.ones_like(prompt), **options)
    cache = out["cache"] if "cache" in out else out["past_key_values"]
    print(
        f"{transformers.__version__} {name} tuning: fed {' '.join(map(str, fed))}, the cache holds",
        cache.get_seq_length(),
    )
PYTHON
"$folder/venv/bin/python" "$folder/run.py" 2>/dev/null | tee "$folder/seen"
"$folder/venv/bin/pip" install --quiet transformers==5.24.0
"$folder/venv/bin/python" "$folder/run.py" 2>/dev/null | tee -a "$folder/seen"
diff "$folder/seen" - <<'SEEN'
5.23.0 prompt tuning: fed 18 1 1 1 1, the cache holds 22
5.23.0 prefix tuning: fed 10 1 1 1 1, the cache holds 22
5.24.0 prompt tuning: fed 18 9 9 9 9, the cache holds 54
5.24.0 prefix tuning: fed 10 1 1 1 1, the cache holds 14
SEEN
echo "as described"
