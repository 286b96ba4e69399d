#!/usr/bin/env bash
# lm_eval 0.4.13: `HFLM.loglikelihood` runs the model once for all requests whose tokens are the same up to the last
# one. They may be split into context and continuation at different places: "P(the last three words)" and "P(the last
# word)" of one sentence. The logits that are kept start where the longest continuation starts. Those of a shorter one
# are the last rows, but its score takes the first rows: it is the score of its tokens at a place where they do not
# stand. `is_greedy` takes the last rows and is right, so a continuation that greedy decoding gives can have the score
# of an unlikely one. Nothing is raised or logged. Asked alone, or with `logits_cache=False`, all scores are right.
# Which requests meet depends on what else the tasks of a run ask, since their requests are scored in one call.
#
# Source: lm_eval/models/huggingface.py (`_loglikelihood_tokens`: `torch.gather(logits, 2, cont_toks...)` beside
# `greedy_tokens[:, -cont_toks.shape[1] :]`), lm_eval/models/utils.py (`Collator.get_batched` keeps the longest).
#
# Guess before the run: each request has its own score, whatever is asked beside it. It has not.
# Seen: torch 2.13.0, transformers 5.24.0, CPU, random weights; scores of "the last three words" and "the last word":
#     by hand: -17.0165 -0.6937
#     one by one: -17.0165 -0.6937
#     together: -17.0165 -2.7467
#     together, logits_cache=False: -17.0165 -0.6937
#     the last word is the greedy one: by hand True, together True
#     "together" is the score of that word two places before: True
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.24.0 accelerate==1.15.0 peft==0.21.2
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.24.0 lm_eval==0.4.13
cat >"$folder/run.py" <<'PYTHON'
import logging
import math
from importlib.metadata import version

import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

logging.disable(logging.CRITICAL)
print(*(f"{name} {version(name)}" for name in ("torch", "transformers", "lm_eval")))
words = {word: number for number, word in enumerate("<unk> </s> a b c d e f g h".split())}
backend = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
backend.pre_tokenizer = pre_tokenizers.Whitespace()
special = {"unk_token": "<unk>", "eos_token": "</s>", "pad_token": "</s>"}
tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **special)
torch.manual_seed(0)
sizes = {"vocab_size": 10, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, max_position_embeddings=64, initializer_range=0.5)).eval()


def asked(requests: list[tuple[str, str]], **settings) -> list[tuple[float, bool]]:
    """Scores, and whether the continuation is the greedy one, as the harness gives them."""
    harness = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=4, device="cpu", backend="causal", **settings)
    instances = [Instance("loglikelihood", {}, request, number) for number, request in enumerate(requests)]
    return harness.loglikelihood(instances, disable_tqdm=True)


def shown(scores: list[float]) -> str:
    return " ".join(f"{score:.4f}" for score in scores)


requests = [("a b", " c d e"), ("a b c d", " e")]
tokens = tokenizer("a b c d e", return_tensors="pt").input_ids
with torch.no_grad():
    rows = model(tokens).logits[0].log_softmax(-1)
of_places = [float(rows[place - 1, tokens[0, place]]) for place in range(1, 5)]
by_hand = [sum(of_places[1:]), of_places[3]]
print("by hand:", shown(by_hand))
results = {
    "one by one": [asked([request])[0] for request in requests],
    "together": asked(requests),
    "together, logits_cache=False": asked(requests, logits_cache=False),
}
right = {}
for name, answers in results.items():
    scores = [score for score, _ in answers]
    print(f"{name}: {shown(scores)}")
    right[name] = [math.isclose(score, truth, abs_tol=1e-3) for score, truth in zip(scores, by_hand)]
greedy = bool(rows[3].argmax() == tokens[0, 4])
print(f"the last word is the greedy one: by hand {greedy}, together {results['together'][1][1]}")
elsewhere = math.isclose(results["together"][1][0], float(rows[1, tokens[0, 4]]), abs_tol=1e-3)
print(f'"together" is the score of that word two places before: {elsewhere}')
assert greedy and results["together"][1][1] and elsewhere
expected = {"one by one": [True, True], "together": [True, False], "together, logits_cache=False": [True, True]}
assert right == expected, right
PYTHON
"$folder/venv/bin/python" "$folder/run.py"
