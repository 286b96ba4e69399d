"""That prompts of `hf-kvquant eval long` ask what they say, and hide it where they say."""

from __future__ import annotations

import models
import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from hf_kvquant.common.errors import UsageError
from hf_kvquant_evals.long_context.prompts import TESTS, Prompt, Writer

FILLER = " ".join(f"Sentence {number} says nothing." for number in range(40))


def ids_of(prompt: Prompt) -> torch.Tensor:
    return torch.cat((prompt.context, prompt.question, prompt.answer))


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return models.tokenizer()


@pytest.mark.parametrize("test", TESTS)
@pytest.mark.parametrize("filler", [None, FILLER], ids=["made_up", "file"])
@pytest.mark.parametrize("length", [256, 777])
def test_lengths_are_exact_and_needles_where_they_should_be(
    tokenizer: PreTrainedTokenizerFast, test: str, filler: str | None, length: int
) -> None:
    writer = Writer(tokenizer, filler)
    for depth in (0, 30, 50, 100):
        prompts = [writer.prompt(test, length, depth, sample) for sample in range(3)]
        for prompt in prompts:
            assert ids_of(prompt).shape == (length,)
            answer = tokenizer.decode(prompt.answer).strip()
            needle = tokenizer.decode(prompt.context[list(prompt.needle)])
            assert answer.isdigit() and answer in needle
            assert tokenizer.decode(prompt.context).count(needle) == 1
            # A sentence or pair is not torn apart: the longest one has some 90 characters, half of it to either side.
            room = len(prompt.context) - len(prompt.needle)
            assert abs(prompt.needle.start - depth / 100 * room) <= (0 if depth in (0, 100) else 50)
        assert len({(len(prompt.context), len(prompt.question)) for prompt in prompts}) == 1
        assert len({tuple(ids_of(prompt).tolist()) for prompt in prompts}) == len(prompts)


def test_the_number_that_is_asked_for_is_the_subjects(tokenizer: PreTrainedTokenizerFast) -> None:
    prompt = Writer(tokenizer).prompt("recall", 777, 50, 0)
    text, question, answer = map(tokenizer.decode, (prompt.context, prompt.question, prompt.answer))
    subject = question.split("What is the number of the ")[1].split("?")[0]
    assert f"The number of the {subject} is{answer}." in text
    assert text.count(f" {subject} ") == 1 and text.count("The number of the") > 10


def test_seeds_repeat(tokenizer: PreTrainedTokenizerFast) -> None:
    prompts = [ids_of(Writer(tokenizer, seed=seed).prompt("needle", 300, 50, 1)) for seed in (3, 3, 4)]
    assert prompts[0].equal(prompts[1]) and not prompts[0].equal(prompts[2])


def test_a_text_begins_as_the_tokenizer_says() -> None:
    plain = models.tokenizer(bos_token="~")
    template = models.tokenizer(bos_token="~")
    template.backend_tokenizer.post_processor = TemplateProcessing("~ $A", special_tokens=[("~", plain.bos_token_id)])
    prompts = [Writer(tokenizer).prompt("needle", 300, 0, 0) for tokenizer in (plain, template)]
    assert prompts[1].context[0] == template.bos_token_id != prompts[0].context[0]
    assert len(ids_of(prompts[1])) == 300 and prompts[1].needle.start == prompts[0].needle.start + 1


@pytest.mark.parametrize("test", TESTS)
def test_chat_templates_wrap_prompts(test: str) -> None:
    tokenizer = models.tokenizer()
    plain = Writer(tokenizer).prompt(test, 300, 50, 1)
    tokenizer.chat_template = models.CHAT_TEMPLATE
    prompt = Writer(tokenizer, is_chat=True).prompt(test, 300, 50, 1)
    assert ids_of(prompt).shape == (300,)
    context, question, answer = map(tokenizer.decode, (prompt.context, prompt.question, prompt.answer))
    said, lead = tokenizer.decode(plain.question).split("? ")
    assert context.startswith("<user>") and question == f"{said}?</><assistant>{lead}"
    assert answer == tokenizer.decode(plain.answer)
    assert answer.strip() in tokenizer.decode(prompt.context[list(prompt.needle)])


@pytest.mark.parametrize(
    "template, message",
    [
        (
            None,
            "`--chat-template` needs a tokenizer with a chat template for a user's message, got none. Leave it",
        ),
        (
            "{{ raise_exception('no user') }}",
            "a chat template for a user's message, got no user. Leave it out, or name a chat model.",
        ),
        ("{{ messages[0].content | upper }}", "that contains the user's message once, got it 0 times. Leave it out."),
    ],
)
def test_chat_templates_that_cannot_be_used(template: str | None, message: str) -> None:
    tokenizer = models.tokenizer()
    tokenizer.chat_template = template
    with pytest.raises(UsageError, match=message):
        Writer(tokenizer, is_chat=True)


@pytest.mark.parametrize(
    "filler, length, message",
    [
        (None, 20, r"`--lengths` must be at least 112 for the test needle with this tokenizer, got 20\."),
        ("Too short.", 300, r"`--filler-file` must hold at least 188 tokens for these lengths, got 11\. Give a longer"),
    ],
)
def test_prompts_that_cannot_be_written(
    tokenizer: PreTrainedTokenizerFast, filler: str | None, length: int, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        Writer(tokenizer, filler).prompt("needle", length, 50, 0)
