#!/usr/bin/env bash
# transformer-lens 4.3.0 with transformers 5.24.0, which it allows: a bridged model that generates with a cache, as it does
# by default, sees nothing but the newest token in every step. No error, no warning. Without a cache the text is right.
#
# Source: transformer_lens/model_bridge/generalized_components/attention.py looks for `past_key_values` or `layer_past`
# among the arguments of an attention module; transformers calls that argument `cache` since 5.24.
#
# Guess before the run: the bridge's own attention would meet what transformers hands on wrongly, loudly. It is silent.
# Seen: torch 2.13.0, CPU, a small Llama with random weights, 8 new tokens:
#     without a cache: the tokens of transformers: True
#     with a cache: the tokens of transformers: False, those of a model that sees one token: True
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0
"$folder/venv/bin/pip" install --quiet transformer-lens==4.3.0 transformers==5.24.0
cat >"$folder/run.py" <<'PYTHON'
import sys

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformer_lens.model_bridge import TransformerBridge
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

torch.manual_seed(0)
sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
config = LlamaConfig(vocab_size=96, initializer_range=0.3, eos_token_id=None, bos_token_id=1, pad_token_id=0, **sizes)
model = LlamaForCausalLM(config).eval()
words = {f"w{i}": i for i in range(96)}
backend = Tokenizer(models.WordLevel(words, unk_token="w2"))
backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
names = {"bos_token": "w1", "pad_token": "w0", "eos_token": "w3", "unk_token": "w2"}
PreTrainedTokenizerFast(tokenizer_object=backend, **names).save_pretrained(sys.argv[1])
tokenizer = PreTrainedTokenizerFast.from_pretrained(sys.argv[1])  # the bridge loads it from there again

ids, count = torch.tensor([[1, 20, 30, 40, 50]]), 8
with torch.no_grad():
    expected = model.generate(ids, max_new_tokens=count, do_sample=False, eos_token_id=-1)[0, -count:].tolist()
    # The first new token comes from the prompt; each later one from the token before it alone, at its position.
    alone = expected[:1]
    for i in range(1, count):
        position = torch.tensor([[ids.shape[1] + i - 1]])
        alone.append(int(model(torch.tensor([alone[-1:]]), position_ids=position, use_cache=False).logits.argmax()))

bridge = TransformerBridge.boot_transformers(
    "meta-llama/Llama-2-7b-hf", hf_model=model, tokenizer=tokenizer, device="cpu", dtype=torch.float32
)
found = {}
for has_cache in (False, True):
    tokens = bridge.generate(
        ids,
        max_new_tokens=count,
        do_sample=False,
        stop_at_eos=False,
        use_past_kv_cache=has_cache,
        prepend_bos=False,
        verbose=False,
        return_type="tokens",
    )
    found[has_cache] = tokens[0, -count:].tolist()
print(f"without a cache: the tokens of transformers: {found[False] == expected}")
are_same, are_alone = found[True] == expected, found[True] == alone
print(f"with a cache: the tokens of transformers: {are_same}, those of a model that sees one token: {are_alone}")
assert found[False] == expected != found[True] == alone, (expected, alone, found)
PYTHON
"$folder/venv/bin/python" "$folder/run.py" "$folder/tokenizer"
