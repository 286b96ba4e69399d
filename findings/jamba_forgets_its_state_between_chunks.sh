#!/usr/bin/env bash
# transformers 5.24.0: a layer of Jamba that reads several tokens begins its scan without the state that the tokens
# before have left, also where a cache holds it. So a prompt in chunks (`prefill_chunk_size`) and the next turn of a chat
# are read as if nothing came before them, without a word; attention layers do see what came before. Steps of one token
# are right. The convolution goes on from the cache; the scan does not.
#
# Source: transformers/models/jamba/modeling_jamba.py: the recurrent state of the cache is read for one token only.
#
# Seen: torch 2.13.0, transformers 5.24.0, CPU (whether logits are within 0.1 % of those of the text in one forward):
#     jamba: 10 + 10 tokens False, 19 + 1 tokens True, generate in chunks False
#     falcon_h1: 10 + 10 tokens True, 19 + 1 tokens True, generate in chunks True
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0
"$folder/venv/bin/pip" install --quiet transformers==5.24.0
cat >"$folder/run.py" <<'PYTHON'
import torch
from transformers import AutoConfig, AutoModelForCausalLM

SIZES = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2, "pad_token_id": 0}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "eos_token_id": None}
MAMBA_2 = {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_chunk_size": 8}
MODELS = {
    "jamba": {"attn_layer_offset": 1, "attn_layer_period": 2, "num_experts": 1, "num_experts_per_tok": 1},
    "falcon_h1": {**MAMBA_2, "head_dim": 16},
}
found = {}
for model_type, options in MODELS.items():
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **SIZES, mamba_d_state=4, **options)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, parameter.shape[-1] ** -0.5)
    ids = torch.randint(3, 60, (1, 20))
    with torch.inference_mode():
        whole = model(ids).logits[:, -1]

        def is_near(logits: torch.Tensor) -> bool:
            return float((logits - whole).abs().max() / whole.abs().max()) < 1e-3

        results = []
        for begin in (10, 19):
            cache = model(ids[:, :begin], use_cache=True).cache
            positions = torch.arange(begin, 20).unsqueeze(0)
            results.append(is_near(model(ids[:, begin:], cache=cache, use_cache=True, position_ids=positions).logits[:, -1]))
        output = model.generate(
            ids,
            prefill_chunk_size=5,
            max_new_tokens=1,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
        results.append(is_near(output.logits[0]))
    found[model_type] = results
    print(f"{model_type}: 10 + 10 tokens {results[0]}, 19 + 1 tokens {results[1]}, generate in chunks {results[2]}")
assert found == {"jamba": [False, True, False], "falcon_h1": [True, True, True]}
PYTHON
"$folder/venv/bin/python" "$folder/run.py"
