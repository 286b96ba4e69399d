#!/usr/bin/env bash
# trl 1.16.0: `GRPOTrainer` with float32 weights and `bf16=True`, which is its default, computes in bfloat16 and trains
# the weights in float32. With `use_transformers_continuous_batching=True` it casts the model itself to bfloat16 before
# it generates, and does not cast it back. From the first step on, the optimizer adds its updates to bfloat16 weights.
# At the default learning rate nearly all are smaller than half a step between two such numbers, so most weights stay
# where the rounding has left them. Nothing is raised or logged; losses and rewards are reported as always. With
# `bf16=False` weights are left alone. (By reading: `fp16=True` leaves float16 weights.)
#
# That is with transformers 5.23.0. With 5.24.0 the first generation fails instead: accelerate converts the outputs of
# the model, among which it takes the paged cache for a tensor, and trl meets completions without tokens.
#
# Source: trl/trainer/grpo_trainer.py (`_generate_single_turn`: `unwrapped_model.to(torch.bfloat16)`); rloo_trainer.py
# has the same lines. accelerate/utils/operations.py (`_is_fp16_bf16_tensor` asks for an attribute `dtype` only).
#
# Guess before the run: weights stay float32, as without continuous batching. They do not.
# Seen: torch 2.13.0, accelerate 1.15.0, CPU, a random float32 model, 3 steps at the default learning rate. "Moved":
# weights that are not what they were at the start, in the dtype that they have at the end.
#     5.23.0, generate: trained in float32, moved 98.2 %
#     5.23.0, continuous batching: trained in bfloat16, moved 1.9 %
#     5.23.0, continuous batching, bf16=False: trained in float32, moved 98.3 %
#     5.24.0, generate: trained in float32, moved 98.2 %
#     5.24.0, continuous batching: IndexError, and before it 'PagedAttentionCache' object has no attribute 'float'
#     5.24.0, continuous batching, bf16=False: trained in float32, moved 98.3 %
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.24.0 accelerate==1.15.0 datasets==5.2.0
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.24.0 trl==1.16.0 psutil==7.2.2
"$folder/venv/bin/pip" install --quiet --no-deps --target "$folder/5.23.0" transformers==5.23.0
cat >"$folder/run.py" <<'PYTHON'
import io
import logging
import sys
import warnings
from contextlib import redirect_stdout

import torch
import transformers
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

logged = io.StringIO()
logging.getLogger("ContinuousBatchingLogger").handlers = [logging.StreamHandler(logged)]
warnings.simplefilter("ignore")
vocabulary = {"<unk>": 0, "</s>": 1, "<pad>": 2, **{f"w{number}": number + 3 for number in range(60)}}
backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
backend.pre_tokenizer = pre_tokenizers.Whitespace()
special = {"unk_token": "<unk>", "eos_token": "</s>", "pad_token": "<pad>"}
tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **special)
prompts = Dataset.from_dict({"prompt": ["w1 w2 w3", "w4 w5", "w7 w9 w11 w1", "w2"]})


def reward(completion_ids, **fields):
    """Odd tokens are good ones."""
    return [float(sum(token % 2 for token in tokens)) for tokens in completion_ids]


def trained(folder: str, batching: bool, **settings) -> tuple[torch.dtype, float]:
    """The dtype of the weights behind 3 steps, and the share of them that has moved."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 63, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, max_position_embeddings=256, eos_token_id=1))
    start = [weight.detach().clone() for weight in model.parameters()]
    pages = {"num_blocks": 64, "max_batch_tokens": 256}
    config = GRPOConfig(
        folder,
        use_cpu=True,
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=8,
        max_steps=3,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_transformers_continuous_batching=batching,
        transformers_continuous_batching_config=pages if batching else None,
        **settings,
    )
    with redirect_stdout(io.StringIO()):
        GRPOTrainer(model, reward, config, train_dataset=prompts, processing_class=tokenizer).train()
    moved = [(weight != old.to(weight.dtype)).flatten() for weight, old in zip(model.parameters(), start)]
    return model.dtype, float(torch.cat(moved).float().mean())


version = transformers.__version__
runs = {
    "generate": {"batching": False},
    "continuous batching": {"batching": True},
    "continuous batching, bf16=False": {"batching": True, "bf16": False},
}
found = {}
for name, settings in runs.items():
    try:
        dtype, share = found[name] = trained(sys.argv[1], **settings)
    except IndexError:
        found[name] = "'PagedAttentionCache' object has no attribute 'float'"
        assert found[name] in logged.getvalue(), logged.getvalue()
        print(f"{version}, {name}: IndexError, and before it {found[name]}")
    else:
        kind = str(dtype).removeprefix("torch.")
        print(f"{version}, {name}: trained in {kind}, moved {100 * share:.1f} %")
for name in ("generate", "continuous batching, bf16=False"):
    dtype, share = found[name]
    assert dtype == torch.float32 and share > 0.9, found
if version == "5.23.0":
    dtype, share = found["continuous batching"]
    assert dtype == torch.bfloat16 and share < 0.1, found
else:
    assert isinstance(found["continuous batching"], str), found
PYTHON
"$folder/venv/bin/pip" list 2>/dev/null | grep -E "^(torch|trl|accelerate) "
for path in "$folder/5.23.0" ""; do
    PYTHONPATH=$path "$folder/venv/bin/python" "$folder/run.py" "$folder/out"
done
