#!/usr/bin/env bash
# transformers 5.24.0: two helpers generate with a model that `torch.export` has exported with its static cache. Both go
# on behind the prompt from a wrong place, so their tokens are not those of the model. Nothing is raised or logged. The
# exported program is right: a loop of one's own over it gives the tokens of `generate`.
# - `TorchExportableModuleWithStaticCache.generate` skips a place. The first new token is written behind an empty slot,
#   which all later tokens attend to, and every position from there on is one too high.
# - `TorchExportableModuleForDecoderOnlyLM.generate` reads the last token of the prompt twice. Its answer is the one to
#   a prompt with that token doubled.
# So an export that is checked with these helpers looks broken, or a broken one cannot be told from a sound one.
#
# Source: transformers/integrations/executorch.py. The first appends the new token and then passes
# `len(response_tokens)` as its position; the second feeds `generated_ids[:, -1:]` behind a prompt it has read whole.
#
# Guess before the run: greedy tokens of the helpers are those of `generate`. Neither gives them.
# Seen: torch 2.13.0, CPU, random weights, the tokens behind a prompt of 6:
#     generate: [17, 54, 1, 14, 56, 17, 5, 56]
#     own loop over the exported program: [17, 54, 1, 14, 56, 17, 5, 56]
#     the same loop, one place skipped behind the prompt: [17, 54, 14, 22, 5, 56, 8, 56]
#     WithStaticCache.generate: [17, 54, 14, 22, 5, 56, 8, 56]
#     generate, the last token of the prompt twice: [17, 54, 44, 54, 24, 7, 62, 0]
#     ForDecoderOnlyLM.generate: [17, 54, 44, 54, 24, 7, 62, 0]
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.24.0
cat >"$folder/run.py" <<'PYTHON'
import logging
import types
import warnings
from importlib.metadata import version

import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM
from transformers.integrations import executorch

logging.disable(logging.CRITICAL)
warnings.simplefilter("ignore")
print(*(f"{name} {version(name)}" for name in ("torch", "transformers")))
torch.manual_seed(0)
sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
plain = {"max_position_embeddings": 64, "initializer_range": 0.3, "eos_token_id": None, "bos_token_id": None}
model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, **plain)).eval()
cache = {"batch_size": 1, "max_cache_len": 32}
model.generation_config = GenerationConfig(use_cache=True, cache_implementation="static", cache_config=cache)
prompt = torch.randint(3, 64, (1, 6))
new = 8


def answer(tokens: torch.Tensor) -> list[int]:
    return model.generate(tokens, max_new_tokens=new, do_sample=False)[0, tokens.shape[1] :].tolist()


def loop(program, skipped: int) -> list[int]:
    """Greedy tokens of an exported program, fed one by one; new tokens stand `skipped` places further on."""
    tokens = prompt[0].tolist()
    for place in range(len(tokens) + new - 1):
        behind = place + (skipped if place >= prompt.shape[1] else 0)
        logits = program(input_ids=torch.tensor([[tokens[place]]]), cache_position=torch.tensor([behind]))
        if place >= prompt.shape[1] - 1:
            tokens.append(int(logits[0, -1].argmax()))
    return tokens[prompt.shape[1] :]


class Tokenizer:
    """What the second helper asks of a tokenizer: it takes and gives text."""

    eos_token_id = -1

    def __call__(self, text, return_tensors):
        return types.SimpleNamespace(input_ids=prompt)

    def decode(self, tokens, **settings):
        return tokens.tolist()


found = {"generate": answer(prompt)}
exported = executorch.convert_and_export_with_cache(model)
found["own loop over the exported program"] = loop(exported.module(), skipped=0)
found["the same loop, one place skipped behind the prompt"] = loop(
    executorch.convert_and_export_with_cache(model).module(), skipped=1
)
tokens = executorch.TorchExportableModuleWithStaticCache.generate(
    executorch.convert_and_export_with_cache(model), prompt, new
)
found["WithStaticCache.generate"] = tokens[0, prompt.shape[1] :].tolist()
found["generate, the last token of the prompt twice"] = answer(torch.cat([prompt, prompt[:, -1:]], dim=1))
decoder = executorch.TorchExportableModuleForDecoderOnlyLM(model, batch_size=1, max_cache_len=32)
exported = decoder.export(input_ids=torch.tensor([[1]]), cache_position=torch.tensor([0]))
tokens = decoder.generate(exported, Tokenizer(), "the prompt", max_new_tokens=new)
found["ForDecoderOnlyLM.generate"] = tokens[prompt.shape[1] :]
for name, tokens in found.items():
    print(f"{name}: {tokens}")
right, own, skipped, first, twice, second = found.values()
assert own == right
assert first == skipped != right
assert second == twice != right
PYTHON
"$folder/venv/bin/python" "$folder/run.py"
