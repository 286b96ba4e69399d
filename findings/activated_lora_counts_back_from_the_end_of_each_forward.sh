#!/usr/bin/env bash
# peft 0.21.2: an activated LoRA (`alora_invocation_tokens`) changes the tokens from its invocation on and leaves those
# before to the base model. `generate` counts these tokens once, in the prompt, and every forward applies the adapter to
# as many tokens at its own end. A forward that ends elsewhere has it on the wrong tokens, and nothing is raised or
# logged:
# - `prefill_chunk_size`: every chunk counts from its own end, so tokens before the invocation are changed, too.
# - `prompt_lookup_num_tokens`: the first forward ends with proposals, which take the count, so the adapter misses the
#   prompt, its invocation included.
# - `use_cache=False`: the text grows and the count does not, so the adapter leaves the invocation behind.
# In a loop of one's own over a cache, a new token has no invocation in its forward, so the adapter is off behind the
# prompt. `generate` is right where the prompt is one forward and each new token another. Beam search is refused with an
# error.
#
# Source: peft/tuners/lora/variants.py (`calculate_alora_offsets`; `ALoraLinearVariant.forward`: `min(int(o), T)`),
# peft/peft_model.py (`generate`).
#
# Seen: torch 2.13.0, transformers 5.24.0, peft 0.21.2, CPU, random weights, a prompt of 17 tokens whose invocation
# begins behind 12. "Right tokens": those of forwards over the whole text that are told the right count. "Keys": those of
# the prompt in the first layer that are not the base model's.
#     generate: the right tokens True, keys that differ 5
#     prefill_chunk_size: the right tokens False, keys that differ 17
#     prompt_lookup_num_tokens: the right tokens False, keys that differ 0
#     use_cache=False: the right tokens False
#     own loop over a cache: the right tokens False, keys that differ 5
#     without the adapter, all options: the same tokens True
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.24.0
"$folder/venv/bin/pip" install --quiet peft==0.21.2 transformers==5.24.0
cat >"$folder/run.py" <<'PYTHON'
import torch
from peft import LoraConfig, get_peft_model
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
sizes = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
config = LlamaConfig(**sizes, initializer_range=0.3, bos_token_id=1, eos_token_id=None, pad_token_id=0)
invocation = [40, 41, 42]
adapter = LoraConfig(
    task_type="CAUSAL_LM",
    target_modules=["q_proj", "k_proj", "v_proj"],
    lora_alpha=32,
    init_lora_weights=False,
    alora_invocation_tokens=invocation,
)
model = get_peft_model(LlamaForCausalLM(config), adapter).eval()
prompt = torch.tensor([[5, 9, 7, 5, 9, 7, 5, 9, 7, 5, 9, 7, *invocation, 5, 9]])
start, new = 12, 8
calls = {
    "generate": {},
    "prefill_chunk_size": {"prefill_chunk_size": 4},
    "prompt_lookup_num_tokens": {"prompt_lookup_num_tokens": 6},
    "use_cache=False": {"use_cache": False},
}


def generate(options):
    ids = model.generate(
        input_ids=prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=new,
        do_sample=False,
        return_dict_in_generate=True,
        **options,
    )
    return ids.sequences, ids.get("cache")


def changed(cache):
    differs = cache.layers[0].keys[..., : prompt.shape[1], :] != base_keys
    return int(differs.any(-1).any(1).sum())


with torch.no_grad():
    with model.disable_adapter():
        texts = [generate(options)[0] for options in calls.values()]
        base = DynamicCache(config=config)
        model.get_base_model()(prompt, cache=base)
    base_keys = base.layers[0].keys
    right = prompt
    for _ in range(new):
        logits = model(right, alora_offsets=[right.shape[1] - start], use_cache=False).logits
        right = torch.cat([right, logits[:, -1:].argmax(-1)], 1)
    for name, options in calls.items():
        text, cache = generate(options)
        keys = "" if cache is None else f", keys that differ {changed(cache)}"
        print(f"{name}: the right tokens {torch.equal(text, right)}{keys}")
    cache, fed, text = DynamicCache(config=config), prompt, prompt
    for _ in range(new):
        fed = model(fed, cache=cache).logits[:, -1:].argmax(-1)
        text = torch.cat([text, fed], 1)
    print(f"own loop over a cache: the right tokens {torch.equal(text, right)}, keys that differ {changed(cache)}")
print(f"without the adapter, all options: the same tokens {all(torch.equal(text, texts[0]) for text in texts)}")
PYTHON
"$folder/venv/bin/python" "$folder/run.py" 2>/dev/null | tee "$folder/seen"
diff "$folder/seen" - <<'SEEN'
generate: the right tokens True, keys that differ 5
prefill_chunk_size: the right tokens False, keys that differ 17
prompt_lookup_num_tokens: the right tokens False, keys that differ 0
use_cache=False: the right tokens False
own loop over a cache: the right tokens False, keys that differ 5
without the adapter, all options: the same tokens True
SEEN
echo "as described"
