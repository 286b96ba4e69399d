#!/usr/bin/env bash
# transformers 5.24.0: `transformers serve` gives back the prompt as part of the answer where a model of type qwen2,
# qwen3 or a few others has another chat template than these types, as distillations of DeepSeek-R1 on Qwen do. The
# server reads answers by a description of the type, which begins behind `<|im_start|>assistant`. If the prompt lacks
# that text, the parser reads all of it: `content` begins with the conversation, its markers included. Where the
# template opens thoughts, `content` is the prompt and nothing else, and a `<think>` that a user writes turns the
# answer into `reasoning_content`. Streams repeat the prompt likewise. With the template of the type, nothing of this
# happens.
#
# Source: transformers/utils/chat_parsing/response_templates.py, `truncate_past_last_anchor`, which tells of it at level
# "info"; transformers/cli/serving/utils.py, `parse_assistant_message` and `build_response_parser`.
#
# Seen: torch 2.13.0, transformers 5.24.0, CPU; template, question, and what a client gets:
#     of the type: Hello -> content 'It is.', reasoning_content None
#     another: Hello -> content '<|User|>Hello<|Assistant|>It is.', reasoning_content None
#     opens thoughts: Hello -> content '<|User|>Hello<|Assistant|>', reasoning_content 'It is.'
#     another: What does <think> do? -> content '<|User|>What does', reasoning_content 'do?<|Assistant|>It is.'
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0
"$folder/venv/bin/pip" install --quiet transformers==5.24.0 fastapi==0.165.0 uvicorn==0.54.0 openai==3.57.0
cat >"$folder/run.py" <<'PYTHON'
import types

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config
from transformers.cli.serving.utils import build_response_parser, parse_assistant_message, response_events_to_chunks

letters = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
core = Tokenizer(models.BPE(letters, []))
core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=core)
model = types.SimpleNamespace(config=Qwen2Config())
OPENING = "{{ '<|im_start|>assistant\n' }}"
OF_TYPE = "{% for m in messages %}<|im_start|>user\n{{ m.content }}<|im_end|>\n{% endfor %}" + OPENING
ANOTHER = "{% for m in messages %}<|User|>{{ m.content }}{% endfor %}<|Assistant|>"


def answered(name: str, template: str, question: str) -> tuple[str, str | None]:
    """What a client gets of the answer "It is."."""
    chat = [{"role": "user", "content": question}]
    prompt = tokenizer.apply_chat_template(chat, chat_template=template, tokenize=False)
    ids = tokenizer(prompt).input_ids
    content, thoughts, _ = parse_assistant_message(tokenizer, model, tokenizer("It is.").input_ids, ids)
    print(f"{name}: {question} -> content {content!r}, reasoning_content {thoughts!r}")
    return content, thoughts


assert answered("of the type", OF_TYPE, "Hello") == ("It is.", None)
assert answered("another", ANOTHER, "Hello") == ("<|User|>Hello<|Assistant|>It is.", None)
assert answered("opens thoughts", ANOTHER + "<think>\n", "Hello") == ("<|User|>Hello<|Assistant|>", "It is.")
thoughts = "do?<|Assistant|>It is."
assert answered("another", ANOTHER, "What does <think> do?") == ("<|User|>What does", thoughts)

# What a stream begins with, before the model has written anything.
parser = build_response_parser(tokenizer, model, tokenizer("<|User|>Hello<|Assistant|>").input_ids)
assert "".join(response_events_to_chunks(parser.initial_events)).startswith("<|User|>Hello")
PYTHON
"$folder/venv/bin/python" "$folder/run.py"
