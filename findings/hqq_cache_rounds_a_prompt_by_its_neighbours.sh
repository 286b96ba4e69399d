#!/usr/bin/env bash
# transformers 5.24.0 with hqq 0.2.8.post1: a `QuantizedCache` of the backend "hqq" rounds a prompt by numbers of the
# other prompts of its batch. So the same prompt gives other tokens in a batch than alone, and a neighbour with large
# keys makes its keys as coarse as its own. Nothing is raised or logged. The backend "quanto" keeps prompts apart.
#
# Both have the same `axis_key` and `axis_value`, 0 if not given, which mean different things. In quanto, 64 numbers of
# a prompt that follow each other share a scale. In hqq, the whole tensor, with all rows of the batch, is cut into 64
# blocks, and a group has one number of each block. With axis 1, hqq keeps prompts apart, too. The documentation
# recommends that axis for hqq, without this reason; nothing says so when the cache is made.
#
# Source: hqq/core/quantize.py (`W.reshape([group_size, -1])`), optimum/quanto/tensor/grouped.py,
# transformers/cache_utils.py (`HQQQuantizedLayer`, `QuantizedLayer.__init__`).
#
# Guess before the run: a row of a batch comes back as it does alone, since groups lie within a row. In hqq they do not.
# Seen: torch 2.13.0, optimum-quanto 0.2.7, CPU. By how much the keys of a prompt, as the cache gives them back, differ
# from those of the prompt alone (largest), and their error (mean), beside a prompt with keys of ... times the size:
#     quanto: alone 0.0755; x1 0.00, 0.0755; x10 0.00, 0.0755; x1000 0.00, 0.0755
#     hqq: alone 0.0731; x1 0.42, 0.0721; x10 1.94, 0.6571; x1000 199.82, 66.4250
#     hqq, axis 1: alone 0.0737; x1 0.00, 0.0737; x10 0.00, 0.0737; x1000 0.00, 0.0737
# Random weights, prompts of a batch with the same 12 new tokens as alone:
#     unquantised: 8 of 8
#     hqq: 0 of 8
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.24.0 accelerate==1.15.0
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.24.0 hqq==0.2.8.post1 optimum-quanto==0.2.7
cat >"$folder/run.py" <<'PYTHON'
import logging
import warnings
from importlib.metadata import version

import torch
from transformers import LlamaConfig, LlamaForCausalLM, QuantizedCache

logging.disable(logging.CRITICAL)
warnings.simplefilter("ignore")
print(*(f"{name} {version(name)}" for name in ("torch", "transformers", "hqq", "optimum-quanto")))
torch.manual_seed(0)
sizes = {"vocab_size": 96, "hidden_size": 256, "intermediate_size": 64, "num_hidden_layers": 2}
heads = {"num_attention_heads": 4, "num_key_value_heads": 4}
plain = {"max_position_embeddings": 512, "initializer_range": 0.1, "eos_token_id": None, "bos_token_id": None}
config = LlamaConfig(**sizes, **heads, **plain)
model = LlamaForCausalLM(config).eval()
generator = torch.Generator().manual_seed(1)
keys = torch.randn(1, 4, 32, 64, generator=generator)
others = {f"x{size}": size * torch.randn(1, 4, 32, 64, generator=generator) for size in (1, 10, 1000)}


def returned(keys: torch.Tensor, backend: str, **settings: int) -> torch.Tensor:
    """The keys of the first prompt of a batch, as a cache gives them back with the next token."""
    cache = QuantizedCache(backend, config, **settings)
    cache.update(keys, keys, 0)
    token = keys[:, :, :1]
    return cache.update(token, token, 0)[0][:1, :, :-1]


changes = {}
backends = {
    "quanto": ("quanto", {}),
    "hqq": ("hqq", {}),
    "hqq, axis 1": ("hqq", {"axis_key": 1, "axis_value": 1}),
}
for name, (backend, settings) in backends.items():
    alone = returned(keys, backend, **settings)
    shown, changes[name] = [f"alone {(alone - keys).abs().mean():.4f}"], []
    for size, other in others.items():
        beside = returned(torch.cat([keys, other]), backend, **settings)
        changes[name].append(float((beside - alone).abs().max()))
        shown.append(f"{size} {changes[name][-1]:.2f}, {(beside - keys).abs().mean():.4f}")
    print(f"{name}: {'; '.join(shown)}")
assert not any(changes["quanto"]) and not any(changes["hqq, axis 1"]), changes
like, tenfold, large = changes["hqq"]
assert 0.1 < like < 1 < tenfold < 10 and large > 100, changes

prompts = torch.randint(3, 96, (8, 32), generator=generator)


def answers(prompts: torch.Tensor, **settings) -> torch.Tensor:
    plain = {"max_new_tokens": 12, "do_sample": False, "attention_mask": torch.ones_like(prompts)}
    return model.generate(prompts, **plain, **settings)[:, prompts.shape[1] :]


same = {}
quantised = {"cache_implementation": "quantized", "cache_config": {"backend": "hqq"}}
for name, settings in {"unquantised": {}, "hqq": quantised}.items():
    alone = torch.cat([answers(prompt[None], **settings) for prompt in prompts])
    same[name] = int((answers(prompts, **settings) == alone).all(dim=1).sum())
    print(f"{name}: {same[name]} of 8")
assert same["unquantised"] == 8 and same["hqq"] < 8
PYTHON
"$folder/venv/bin/python" "$folder/run.py"
