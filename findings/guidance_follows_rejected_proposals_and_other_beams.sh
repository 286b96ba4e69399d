#!/usr/bin/env bash
# transformers 5.24.0: the logits processor of `guidance_scale` keeps the negative text itself. It adds the newest token
# of every call to it and never takes one back. Assisted decoding calls it for every proposal, in the lookup or
# assistant that makes it and where the model checks it, accepted or not. Beam search moves beams. Neither tells the
# processor. So scores are compared with a negative text that holds proposals, or another beam: greedy tokens with
# prompt lookup are others than without it. Nothing is raised or logged. `use_cache=False` changes nothing, since tokens
# are kept that way, too. A processor that computes the same from the whole text in every call is right in all of these
# cases.
#
# Source: generation/logits_process.py (`UnbatchedClassifierFreeGuidanceLogitsProcessor.get_unconditional_logits`),
# generation/utils.py (`_assisted_decoding`), generation/candidate_generator.py (`self.logits_processor`).
#
# Seen: torch 2.13.0, transformers 5.24.0, CPU, random weights, 4 prompts; no negative prompt:
#     greedy: as without memory in 4 of 4
#     beams: as without memory in 0 of 4
#     beams, use_cache=False: as without memory in 0 of 4
#     prompt lookup: as without memory in 0 of 4
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.24.0
cat >"$folder/run.py" <<'PYTHON'
import torch
from transformers import LlamaConfig, LlamaForCausalLM

sizes = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
tokens = {"bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}

torch.manual_seed(0)
config = LlamaConfig(**sizes, **tokens, num_hidden_layers=2, initializer_range=0.3)
model = LlamaForCausalLM(config).eval()
prompts = [torch.randint(3, 96, (1, 4)).repeat(1, 3) for _ in range(4)]
length = prompts[0].shape[1]
scale = 1.5


def guidance_without_memory(ids, scores):
    scores = scores.log_softmax(-1)
    negative = model(ids[:, length - 1 :], use_cache=False).logits[:, -1].log_softmax(-1)
    return scale * (scores - negative) + negative


calls = {
    "greedy": {},
    "beams": {"num_beams": 3},
    "beams, use_cache=False": {"num_beams": 3, "use_cache": False},
    "prompt lookup": {"prompt_lookup_num_tokens": 3},
}
for name, options in calls.items():
    options = {"max_new_tokens": 12, "do_sample": False, **options}
    right = [model.generate(prompt, logits_processor=[guidance_without_memory], **options) for prompt in prompts]
    seen = [model.generate(prompt, guidance_scale=scale, **options) for prompt in prompts]
    print(f"{name}: as without memory in {sum(map(torch.equal, seen, right))} of {len(prompts)}")
PYTHON
"$folder/venv/bin/python" "$folder/run.py" 2>/dev/null | tee "$folder/seen"
diff "$folder/seen" - <<'SEEN'
greedy: as without memory in 4 of 4
beams: as without memory in 0 of 4
beams, use_cache=False: as without memory in 0 of 4
prompt lookup: as without memory in 0 of 4
SEEN
echo "as described"
