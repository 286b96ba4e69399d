#!/usr/bin/env bash
# transformers 5.24.0: a model's own methods for adapters (`add_adapter`, `load_adapter`, `set_adapter`, ...) ask for peft
# 0.22.0. When 5.24.0 came out, 0.21.2 was the newest peft, so no installed version satisfied them, and every call raises a
# ValueError. transformers 5.23.0 accepts 0.21.2, and peft's own `get_peft_model` works with both.
#
# Source: integrations/peft.py (`MIN_PEFT_VERSION`).
#
# Seen: torch 2.13.0, peft 0.21.2:
#     5.23.0 add_adapter: works
#     5.23.0 get_peft_model: works
#     5.24.0 add_adapter: ValueError: The version of PEFT you are using is not compatible, please use a version >= 0.22.0
#     5.24.0 get_peft_model: works
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.23.0
"$folder/venv/bin/pip" install --quiet peft==0.21.2 transformers==5.23.0
cat >"$folder/run.py" <<'PYTHON'
import transformers
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

sizes = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
calls = {
    "add_adapter": lambda model, config: model.add_adapter(config),
    "get_peft_model": lambda model, config: get_peft_model(model, config),
}
for name, call in calls.items():
    try:
        call(LlamaForCausalLM(LlamaConfig(**sizes)), LoraConfig(target_modules=["q_proj"]))
        print(f"{transformers.__version__} {name}: works")
    except ValueError as error:
        print(f"{transformers.__version__} {name}: ValueError: {error}")
PYTHON
for version in 5.23.0 5.24.0; do
    "$folder/venv/bin/pip" install --quiet transformers=="$version"
    "$folder/venv/bin/python" "$folder/run.py" 2>/dev/null
done | tee "$folder/seen"
diff "$folder/seen" - <<'SEEN'
5.23.0 add_adapter: works
5.23.0 get_peft_model: works
5.24.0 add_adapter: ValueError: The version of PEFT you are using is not compatible, please use a version >= 0.22.0
5.24.0 get_peft_model: works
SEEN
echo "as described"
