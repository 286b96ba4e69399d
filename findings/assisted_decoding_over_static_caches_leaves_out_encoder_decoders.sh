#!/usr/bin/env bash
# transformers 5.24.0: assisted decoding takes static caches, and `StaticCache` can be cropped. An encoder-decoder keeps its
# two caches in an `EncoderDecoderCache`, whose `crop` still asks for dynamic ones, although it crops only one of them. So
# `generate` of BART, T5 or Whisper raises a TypeError after the first proposals, where the cache says `is_croppable`.
#
# Source: cache_utils.py (`EncoderDecoderCache.is_croppable` asks the cache of self-attention, `crop` calls
# `check_dynamic_cache`). Guess before the run, from reading: a TypeError. So it was.
#
# Seen: torch 2.13.0, transformers 5.24.0, on a CPU:
#     dynamic, plain: 8 new tokens
#     dynamic, assisted: 8 new tokens
#     static, plain: 8 new tokens
#     static, assisted: TypeError: `crop` is only defined for dynamic cache
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.24.0
cat >"$folder/run.py" <<'PYTHON'
import torch
from transformers import BartConfig, BartForConditionalGeneration

torch.manual_seed(0)
sizes = {"vocab_size": 96, "d_model": 64, "encoder_layers": 1, "decoder_layers": 2, "encoder_ffn_dim": 48}
heads = {"decoder_ffn_dim": 48, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
tokens = {"pad_token_id": 0, "eos_token_id": None, "forced_eos_token_id": None, "decoder_start_token_id": 1}
config = BartConfig(**sizes, **heads, **tokens, max_position_embeddings=64)
model = BartForConditionalGeneration(config).eval()
prompt = torch.tensor([[5, 9, 5, 9, 5, 9, 7, 5, 9]])
for cache in ("dynamic", "static"):
    for name, options in {"plain": {}, "assisted": {"prompt_lookup_num_tokens": 3}}.items():
        try:
            ids = model.generate(prompt, max_new_tokens=8, do_sample=False, cache_implementation=cache, **options)
            print(f"{cache}, {name}: {ids.shape[1] - 1} new tokens")
        except TypeError as error:
            print(f"{cache}, {name}: TypeError: {str(error).partition(',')[0]}")
PYTHON
"$folder/venv/bin/python" "$folder/run.py" | tee "$folder/seen"
diff "$folder/seen" - <<'SEEN'
dynamic, plain: 8 new tokens
dynamic, assisted: 8 new tokens
static, plain: 8 new tokens
static, assisted: TypeError: `crop` is only defined for dynamic cache
SEEN
echo "as described"
