#!/usr/bin/env bash
# transformers 5.24.0: `generate` of an encoder-decoder that goes on over the cache which an earlier call returned,
# `generate(decoder_input_ids=whole_text, cache=returned)`, feeds the whole text again, behind the tokens that the cache
# holds. The logits are those of another text; nothing is said. Models without an encoder feed only what the cache lacks.
# With a `decoder_attention_mask` of ones, an encoder-decoder does, too, and is right.
#
# Source: generation/utils.py, `_prefill`: tokens are cut by the length of a mask, and without a decoder's mask that is the
# encoder's, or none.
#
# Seen: torch 2.13.0, CPU, a small BART whose cache holds 5 of 9 tokens:
#     without a mask: 9 tokens fed, right logits: False
#     with a mask: 4 tokens fed, right logits: True
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0
"$folder/venv/bin/pip" install --quiet transformers==5.24.0
cat >"$folder/run.py" <<'PYTHON'
import copy

import torch
from transformers import BartConfig, BartForConditionalGeneration

torch.manual_seed(0)
sizes = {f"{part}_{name}": 2 for part in ("encoder", "decoder") for name in ("layers", "attention_heads")}
config = BartConfig(
    vocab_size=96, d_model=64, encoder_ffn_dim=32, decoder_ffn_dim=32, max_position_embeddings=64, init_std=0.3, **sizes
)
model = BartForConditionalGeneration(config).eval()
model.generation_config.eos_token_id = model.generation_config.forced_eos_token_id = None
inputs = {"input_ids": torch.randint(3, 90, (2, 7)), "attention_mask": torch.ones(2, 7, dtype=torch.long)}
options = {"max_new_tokens": 5, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
first = model.generate(**inputs, **options)
whole = torch.cat([first.sequences, torch.full((2, 3), 7)], dim=1)
with torch.no_grad():
    expected = model(**inputs, decoder_input_ids=whole).logits[:, -1]

fed = []
model.model.decoder.register_forward_pre_hook(
    lambda module, args, kwargs: fed.append(kwargs["input_ids"].shape[1]), with_kwargs=True
)
results = []
for name, mask in (("without", {}), ("with", {"decoder_attention_mask": torch.ones_like(whole)})):
    fed.clear()
    output = model.generate(**inputs, decoder_input_ids=whole, cache=copy.deepcopy(first.cache), **mask, **options)
    is_right = bool(((output.logits[0] - expected).abs() < 1e-4).all())
    print(f"{name} a mask: {fed[0]} tokens fed, right logits: {is_right}")
    results.append((fed[0], is_right))
assert results == [(9, False), (4, True)], results
PYTHON
"$folder/venv/bin/python" "$folder/run.py"
