"""A chat that keeps its cache between turns and between runs.

    python examples/chat.py MODEL --file chat.safetensors                  # type, and end with an empty line
    python examples/chat.py --prompt "The village is" --prompt "It has"    # two turns, with the reference model

Each turn renders the whole conversation again and compares it with the tokens in the cache. The common beginning is not
computed again; the rest of the cache is cropped. This works with every chat template. Models without a template
continue the text. With `--file`, the cache is saved at the end, with its tokens in a JSON file next to it, and the next
run continues from there.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_kvquant

REFERENCE_MODEL = Path(__file__).resolve().parents[1] / "evals" / "reference_model"


def parser() -> argparse.ArgumentParser:
    """The command line."""
    arguments = argparse.ArgumentParser(description="Chat with a quantised cache.")
    arguments.add_argument("model", nargs="?", default=str(REFERENCE_MODEL), help="a folder or a hub id")
    arguments.add_argument("--preset", default="int8", help="a preset of hf_kvquant (default: %(default)s)")
    arguments.add_argument("--prompt", action="append", help="a turn; repeatable (default: type them)")
    arguments.add_argument("--file", type=Path, help="keep the cache in this file between runs")
    arguments.add_argument("--max-new-tokens", type=int, default=24)
    return arguments


class Chat:
    """A conversation and the cache of its tokens."""

    def __init__(self, model_name: str, preset: str, file: Path | None) -> None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        self.tokenizer = AutoTokenizer.from_pretrained(model_name)
        self.model = hf_kvquant.patch(AutoModelForCausalLM.from_pretrained(model_name, device_map=device), preset)
        self.preset, self.file = preset, file
        self.messages: list[dict[str, str]] = []
        self.held: list[int] = []  # the tokens in the cache
        self.cache = hf_kvquant.KVQuantCache(self.model.config, preset)
        if file is not None and file.exists():
            self.cache = hf_kvquant.KVQuantCache.load(file, self.model, preset)
            kept = json.loads(file.with_suffix(".json").read_text(encoding="utf-8"))
            self.messages, self.held = kept["messages"], kept["held"]

    def say(self, text: str, max_new_tokens: int) -> str:
        """Take a turn. Returns the answer."""
        self.messages.append({"role": "user", "content": text})
        ids = self.render()
        self.rewind(ids)
        print(f"[{len(self.held)} of {len(ids)} tokens are in the cache]")
        inputs = torch.tensor([ids], device=self.model.device)
        output = self.model.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            cache=self.cache,
            max_new_tokens=max_new_tokens,
            do_sample=False,
        )[0].tolist()
        self.held = output[: self.cache.get_seq_length()]  # the newest token enters the cache with the next turn
        answer: str = self.tokenizer.decode(output[len(ids) :], skip_special_tokens=True)
        self.messages.append({"role": "assistant", "content": answer})
        return answer

    def render(self) -> list[int]:
        """The tokens of the conversation, up to where the model continues."""
        if self.tokenizer.chat_template is not None:
            text = self.tokenizer.apply_chat_template(self.messages, add_generation_prompt=True, tokenize=False)
            return list(self.tokenizer(text, add_special_tokens=False).input_ids)
        turns = [message["content"].strip() for message in self.messages]
        return list(self.tokenizer(" ".join(turns)).input_ids)

    def rewind(self, ids: list[int]) -> None:
        """Crop the cache to its common beginning with these tokens. At least one token is left to compute."""
        pairs = zip(self.held, ids[:-1], strict=False)
        common = next((i for i, (held, new) in enumerate(pairs) if held != new), min(len(self.held), len(ids) - 1))
        if common < len(self.held):
            try:
                self.cache.crop(common - len(self.held))
            except RuntimeError:  # a sliding window has dropped the beginning
                self.cache, common = hf_kvquant.KVQuantCache(self.model.config, self.preset), 0
        self.held = self.held[:common]

    def save(self) -> None:
        """Save the cache for the next run, if `--file` was given."""
        if self.file is not None and self.held:
            self.cache.save(self.file, self.model, overwrite=True)
            kept = {"messages": self.messages, "held": self.held}
            self.file.with_suffix(".json").write_text(json.dumps(kept), encoding="utf-8")


def typed() -> Iterator[str]:
    """Turns from the keyboard, up to an empty line or the end of the input."""
    while True:
        try:
            text = input("> ")
        except EOFError:
            return
        if not text.strip():
            return
        yield text


def main() -> None:
    """Chat."""
    arguments = parser().parse_args()
    chat = Chat(arguments.model, arguments.preset, arguments.file)
    turns: Iterable[str] = typed() if arguments.prompt is None else arguments.prompt
    for text in turns:
        if arguments.prompt is not None:
            print(f"> {text}")
        print(chat.say(text, arguments.max_new_tokens).strip())
    chat.save()
    print(f"cache: {len(chat.held)} tokens in {chat.cache.num_bytes_held:,} bytes, {arguments.preset}")


if __name__ == "__main__":
    main()
