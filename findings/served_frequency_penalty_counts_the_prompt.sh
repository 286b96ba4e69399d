#!/usr/bin/env bash
# transformers 5.24.0: `transformers serve` takes `frequency_penalty` for another setting. Clients mean a number that is
# subtracted from the logit of a token once for each time that the answer has it already, from -2 to 2. The server sets
# `repetition_penalty = 1 + frequency_penalty`. So one occurrence weighs as much as ten, tokens of the prompt are
# penalised like those of the answer, and from -1 down, which is allowed, generation ends with a ValueError.
#
# Source: transformers/cli/serving/completion.py and chat_completion.py, `_build_generation_config`.
#
# Seen: torch 2.13.0, transformers 5.24.0, CPU:
#     frequency_penalty 0.5 becomes repetition_penalty 1.5
#     logits 3.0 become, of a token of the prompt, of one written once, of one written three times: 2.0 2.0 2.0
#     frequency_penalty -1.0: ValueError: `penalty` has to be a strictly positive float, but is 0.0
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0
"$folder/venv/bin/pip" install --quiet transformers==5.24.0 fastapi==0.165.0 uvicorn==0.54.0 openai==3.57.0
cat >"$folder/run.py" <<'PYTHON'
import types

import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM
from transformers.cli.serving.completion import CompletionHandler
from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

handler = object.__new__(CompletionHandler)
handler.generation_state = types.SimpleNamespace(_compile=False)


def config_of(frequency_penalty: float) -> GenerationConfig:
    """What the server makes of a request with this field."""
    return handler._build_generation_config({"frequency_penalty": frequency_penalty, "max_tokens": 2}, GenerationConfig())


config = config_of(0.5)
print(f"frequency_penalty 0.5 becomes repetition_penalty {config.repetition_penalty}")
assert config.repetition_penalty == 1.5

prompt, answer = [4], [5, 6, 6, 6]
scores = torch.full((1, 8), 3.0)
penalised = RepetitionPenaltyLogitsProcessor(config.repetition_penalty)(torch.tensor([prompt + answer]), scores)
found = [round(float(penalised[0, token]), 3) for token in (4, 5, 6)]
print("logits 3.0 become, of a token of the prompt, of one written once, of one written three times:", *found)
assert found == [2.0, 2.0, 2.0]  # as the field is meant: 3.0, 2.5 and 1.5

torch.manual_seed(0)
sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
model = LlamaForCausalLM(LlamaConfig(vocab_size=16, num_key_value_heads=2, **sizes)).eval()
try:
    model.generate(torch.tensor([[3, 4]]), generation_config=config_of(-1.0))
except ValueError as error:
    print(f"frequency_penalty -1.0: ValueError: {error}")
else:
    raise AssertionError("-1.0 is served")
PYTHON
"$folder/venv/bin/python" "$folder/run.py"
