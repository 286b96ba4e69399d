"""Writes the prompts of `eval long`, from a seed: text with a hidden number (the needle), a question, and the answer.

Three tests. `passkey` hides a number in sentences that repeat themselves (Mohtashami and Jaggi, 2023), `needle` hides
one in text that does not (Kamradt, 2023), and `recall` is a list of keys and numbers, one of which is asked for.

Pieces are tokenised one by one and their ids joined, so a prompt has exactly the length asked for, with any tokenizer.
All prompts of a test have questions and answers with the same number of tokens (others are drawn again), so prompts of
one length form a batch without padding. For a chat model, the user says context and question, and the assistant's turn
has already begun with the words before the number.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import random
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
import yaml
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from hf_kvquant.common.errors import UsageError

from ..choices import TESTS as TESTS

# The answer is any number of five digits.
NUM_ANSWERS = 90_000
# Draws that settle how many tokens the questions and answers of a test have: the most common numbers among these.
NUM_TRIALS = 64
# Draws after which something must be wrong, since those numbers were the most common among `NUM_TRIALS`.
MAX_DRAWS = 100 * NUM_TRIALS

# What texts are made of, by kind.
WORDS: dict[str, list[str]] = yaml.safe_load(Path(__file__).with_name("words.yaml").read_text(encoding="utf-8"))


@dataclasses.dataclass(frozen=True)
class Prompt:
    """One prompt, in token ids, `[tokens]` int64."""

    context: Tensor  # the text with the needle in it
    question: Tensor  # everything between context and answer
    answer: Tensor  # the right one
    needle: range  # its positions in the context


class _Task(NamedTuple):
    """What is hidden and asked, and the words (`lead`) that come right before the answer, a number."""

    subject: str
    needle: str
    question: str
    lead: str
    answer: str


class Writer:
    """Writes prompts with one tokenizer, equal ones for equal seeds and arguments.

    `filler` is text for `needle`, and for the rest of the length in `recall`; `None` for sentences made from a few
    words. White space in it becomes single spaces. `is_chat` wraps prompts with the tokenizer's chat template.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, filler: str | None = None, *, seed: int = 0, is_chat: bool = False
    ) -> None:
        self.tokenizer = tokenizer
        self.seed = seed
        # Some tokenizers put a space before every text, others only where the text has one.
        twice = 2 * self._encode("x")
        self._space = "" if str(tokenizer.decode(twice)).strip() == "x x" else " "
        with_special = list(tokenizer("x").input_ids)
        bos = tokenizer.bos_token_id
        self._start = [bos] if bos is not None and with_special[:1] == [bos] else []
        self._turn: list[int] | None = None  # ids between the user's message and the answer
        if is_chat:
            self._start, self._turn = map(self._encode, _parts_of_template(tokenizer))
        self._noise = [self._encode(self._space + sentence) for sentence in WORDS["noise"]]
        self._filler: list[list[int]] | None = None
        if filler is not None:
            sentences = re.split(r"(?<=[.!?]) ", " ".join(filler.split()))
            self._filler = [self._encode(self._space + sentence) for sentence in sentences if sentence]
        # The most common numbers of tokens of question and answer, the same for every seed.
        self._shapes = {}
        for test in TESTS:
            rng = random.Random(test)
            shapes = collections.Counter(self._shape(_task(test, rng)) for _ in range(NUM_TRIALS))
            self._shapes[test] = shapes.most_common(1)[0][0]

    def prompt(self, test: str, length: int, depth: float, sample: int) -> Prompt:
        """One prompt, the one with the number `sample` of its kind.

        It has `length` tokens of context, question and answer together. The needle is at the start of a sentence
        nearest to the `depth`, in percent of the context.
        """
        rng = random.Random(f"{self.seed}/{test}/{length}/{depth:g}/{sample}")
        for _ in range(MAX_DRAWS):
            task = _task(test, rng)
            if self._shape(task) == self._shapes[test]:
                break
        else:
            raise AssertionError(f"no {test} of the usual {self._shapes[test]} tokens")
        question, answer = self._asked(task)
        needle = self._encode(self._space + task.needle)
        room = length - len(self._start) - len(needle) - len(question) - len(answer)
        if room < 0:
            raise UsageError(
                f"`--lengths` must be at least {length - room} for the test {test} with this tokenizer, got {length}."
            )
        if test == "recall":
            before, after = self._pairs(task, room, depth, rng)
        elif test == "needle":
            before, after = _split(self._text(room, rng), room, depth)
        else:
            start = rng.randrange(len(self._noise))
            before, after = _split(itertools.islice(itertools.cycle(self._noise), start, None), room, depth)
        position = len(self._start) + len(before)
        return Prompt(
            context=torch.tensor([*self._start, *before, *needle, *after]),
            question=torch.tensor(question),
            answer=torch.tensor(answer),
            needle=range(position, position + len(needle)),
        )

    def _encode(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False).input_ids)

    def _asked(self, task: _Task) -> tuple[list[int], list[int]]:
        """Ids of a question and of its answer, the answer tokenised as it follows the question."""
        opening: list[int] = []
        lead = f"{self._space}{task.question} {task.lead}"
        if self._turn is not None:
            opening = self._encode(self._space + task.question) + self._turn
            lead = task.lead
        question = self._encode(lead)
        return opening + question, self._encode(f"{lead} {task.answer}")[len(question) :]

    def _shape(self, task: _Task) -> tuple[int, int]:
        question, answer = self._asked(task)
        return len(question), len(answer)

    def _pairs(self, task: _Task, room: int, depth: float, rng: random.Random) -> tuple[list[int], list[int]]:
        """What stands before and after the pair that is asked for: other pairs, and filler where no more fit."""
        pairs: list[list[int]] = []
        used = {task.subject}
        left = room
        while True:
            subject = _subject(rng, used)
            pair = self._encode(f"{self._space}The number of the {subject} is {_number(rng)}.")
            if len(pair) > left:
                break
            used.add(subject)
            pairs.append(pair)
            left -= len(pair)
        rest, _ = _split(self._text(left, rng), left, 100)
        index = round(depth / 100 * len(pairs))
        before, after = (list(itertools.chain(*part)) for part in (pairs[:index], pairs[index:]))
        # The filler stands at the far end of the list, so that a depth of 0 is the beginning and one of 100 the end.
        return (rest + before, after) if depth > 50 else (before, after + rest)

    def _text(self, room: int, rng: random.Random) -> Iterator[list[int]]:
        """Sentences of the filler, from a random one on; without a filler, endless made-up ones."""
        if self._filler is None:
            words = [WORDS[kind] for kind in ("subjects", "verbs", "objects", "endings")]
            return iter(lambda: self._encode(f"{self._space}{' '.join(map(rng.choice, words))}."), None)
        num_tokens = sum(map(len, self._filler))
        if num_tokens < room:
            raise UsageError(
                f"`--filler-file` must hold at least {room:,} tokens for these lengths, got {num_tokens:,}. Give a "
                "longer text, or leave it out."
            )
        start = rng.randrange(len(self._filler))
        return iter(self._filler[start:] + self._filler[:start])


def _split(sentences: Iterator[list[int]], room: int, depth: float) -> tuple[list[int], list[int]]:
    """`room` tokens of sentences, split at the start of a sentence nearest to a depth. The first loses its start."""
    ids: list[int] = []
    starts = [0]
    while len(ids) < room:
        ids.extend(next(sentences))
        starts.append(len(ids))
    cut = len(ids) - room
    borders = [0, *(start - cut for start in starts if start > cut)]
    border = min(borders, key=lambda start: abs(start - depth / 100 * room))
    return ids[cut : cut + border], ids[cut + border :]


def _parts_of_template(tokenizer: PreTrainedTokenizerBase) -> tuple[str, str]:
    """What a chat template puts before and after the user's first message, up to where the answer begins."""
    mark = "hf-kvquant-prompt"
    try:
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": mark}], tokenize=False, add_generation_prompt=True
        )
    except Exception as error:  # a template is a program, whose errors are of any type
        reason = " ".join(str(error).split()) if tokenizer.chat_template else "none"
        raise UsageError(
            f"`--chat-template` needs a tokenizer with a chat template for a user's message, got {reason}. Leave it "
            "out, or name a chat model."
        ) from error
    parts = str(text).split(mark)
    if len(parts) != 2:
        raise UsageError(
            "`--chat-template` needs a chat template that contains the user's message once, got it "
            f"{len(parts) - 1} times. Leave it out."
        )
    return parts[0], parts[1]


def _task(test: str, rng: random.Random) -> _Task:
    number = _number(rng)
    if test == "passkey":
        needle = f"The pass key is {number}. Remember it. {number} is the pass key."
        return _Task("", needle, "What is the pass key?", "The pass key is", number)
    subject = rng.choice(WORDS["cities"]) if test == "needle" else _subject(rng)
    what = f"secret number of {subject}" if test == "needle" else f"number of the {subject}"
    return _Task(subject, f"The {what} is {number}.", f"What is the {what}?", f"The {what} is", number)


def _number(rng: random.Random) -> str:
    return str(rng.randrange(NUM_ANSWERS // 9, NUM_ANSWERS // 9 * 10))


def _subject(rng: random.Random, used: Collection[str] = ()) -> str:
    """An adjective and a noun that are not used yet; more adjectives if those pairs seem used up."""
    num_adjectives = 1
    while True:
        for _ in range(NUM_TRIALS):
            subject = " ".join((*rng.sample(WORDS["adjectives"], num_adjectives), rng.choice(WORDS["nouns"])))
            if subject not in used:
                return subject
        num_adjectives += 1
