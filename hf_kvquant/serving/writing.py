"""`Writer`: the text of an answer while its tokens come, up to a stop string.

A stop string may lie across tokens, so text that may turn out to be the beginning of one is held back. A chat model
may think aloud first, and it may call tools: a `Reader` splits that from the answer. It reads what is written up to the
stop string.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from tokenizers.decoders import DecodeStream
from transformers.generation.continuous_batching.requests import GenerationOutput

from ..batching.sampling import TokenLogprobs
from ..common.errors import UnreadableAnswer
from .pieces import Logprob, Piece
from .reading import Reader
from .tools import ToolCall


class StopStrings:
    """Finds the first of several texts in a text that comes in pieces.

    Args:
        stops: None of them empty.

    Attributes:
        is_found: Whether one has come.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops, self._held = stops, ""
        self.is_found = False

    def passed(self, text: str) -> str:
        """What is certain not to be part of a stop string, after this piece. After one, nothing is."""
        if self.is_found:
            return ""
        text = self._held + text
        begins = [begin for stop in self._stops if (begin := text.find(stop)) >= 0]
        if begins:
            self.is_found, self._held = True, ""
            return text[: min(begins)]
        num_held = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]

    def rest(self) -> str:
        """What is held back at the end."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Characters at the end of a text that begin a stop string."""
    longest = min(len(text), len(stop) - 1)
    return next((length for length in range(longest, 0, -1) if text.endswith(stop[:length])), 0)


def text_of(tokenizer: Any, token: int) -> str:
    """The text of one token. Some tokenizers leave out a space at the beginning, so another token goes before."""
    before = tokenizer("a", add_special_tokens=False)["input_ids"]
    return text_after(tokenizer, before, [token], skips_special=False)


# Tokens of a prompt that say how the text behind it begins, and how many of them may be the end of a character.
_NUM_BEFORE, _MOST_CUT = 8, 3
_NO_TEXT = "\N{REPLACEMENT CHARACTER}"


def end_of(tokenizer: Any, prompt: Sequence[int]) -> list[int]:
    """The last tokens of a prompt, which say how the text behind it begins; none if it ends within a character."""
    tokens = list(prompt[-_NUM_BEFORE:])
    for cut in range(_MOST_CUT + 1):
        if not tokenizer.decode(tokens[cut:]).startswith(_NO_TEXT):
            tokens = tokens[cut:]
            break
    return [] if tokenizer.decode(tokens).endswith(_NO_TEXT) else tokens


def text_after(tokenizer: Any, before: Sequence[int], tokens: Sequence[int], *, skips_special: bool = True) -> str:
    """The text of tokens that come after others. Many tokenizers leave out the space at the beginning of a text."""
    whole, begun = (
        str(tokenizer.decode(ids, skip_special_tokens=skips_special)) for ids in ([*before, *tokens], list(before))
    )
    return whole[len(begun) :]


class TextStream:
    """The text of tokens while they come.

    Args:
        tokenizer: A fast one of transformers.
        skips_special: Whether special tokens have no text.
        before: Tokens before the first one, which are text by themselves: see `end_of`.
    """

    def __init__(self, tokenizer: Any, skips_special: bool, before: Sequence[int] = ()) -> None:
        self._tokenizer, self._skips_special = tokenizer, skips_special
        self._before = list(before)  # of the last text, or before the first one
        self._pending: list[int] = []
        self._stream = self._begun()

    def step(self, token: int) -> str:
        """The text that is certain now."""
        self._pending.append(token)
        try:
            text: str = self._stream.step(self._tokenizer._tokenizer, token) or ""
        except Exception:  # of bytes behind a byte that has been passed on, and that together are no text (Llama 2)
            text = self._text()
        else:
            if text:
                self._before, self._pending = self._pending, []
            return text
        self._before, self._pending = [token], []
        self._stream = self._begun()
        return text

    def rest(self) -> str:
        """The text of a character that has not become whole."""
        text, self._pending = self._text(), []
        return text

    def _begun(self) -> DecodeStream:
        return DecodeStream(self._before, skip_special_tokens=self._skips_special)

    def _text(self) -> str:
        return text_after(self._tokenizer, self._before, self._pending, skips_special=self._skips_special)


class Writer:
    """Turns the tokens of one answer into text.

    Args:
        tokenizer: A fast one of transformers.
        stop: Texts that end the answer, and are not part of it.
        reader: Tells the parts of the answer apart; `None` for plain text.
        text_of: The text of one token, if tokens come with logarithms of probabilities.
        prompt: Tokens of the prompt, if all but the first come before those of the answer, to be told with theirs.
        echo: The text of the prompt, likewise.
        before: The last tokens of the prompt, if the answer goes on with its text.
    """

    def __init__(
        self,
        tokenizer: Any,
        stop: Sequence[str] = (),
        reader: Reader | None = None,
        text_of: Callable[[int], str] | None = None,
        prompt: Sequence[int] = (),
        echo: str = "",
        before: Sequence[int] = (),
    ) -> None:
        self._reader = reader
        self._stream = TextStream(tokenizer, reader is None or reader.skips_special, before)
        self._stops = StopStrings(stop)
        self._tokens: list[int] = []
        self._num_decoded = self._num_passed = 0  # characters
        # Of tokens whose text may still be part of a stop string, which is not part of the answer.
        self._logprobs: list[Logprob] = []
        self._text_of = text_of
        self._prompt, self._num_echoed = list(prompt), len(echo)  # tokens, and characters
        self._num_scored = 0  # tokens of the prompt
        self._begins: list[int] = []  # theirs in the echo
        if prompt:
            # A text has no special tokens, such as the one that the tokenizer puts before it.
            stream, num_characters = TextStream(tokenizer, echo != tokenizer.decode(list(prompt))), 0
            for token in prompt:
                self._begins.append(min(num_characters, len(echo)))
                num_characters += len(stream.step(token))
            self._score(None)

    @property
    def is_stopped(self) -> bool:
        """Whether a stop string has come, or the last call that there may be."""
        return self._stops.is_found or (self._reader is not None and self._reader.is_over)

    @property
    def has_called(self) -> bool:
        """Whether the answer has a call."""
        return self._reader is not None and self._reader.num_calls > 0

    @property
    def num_tokens(self) -> int:
        """Tokens that were written."""
        return len(self._tokens)

    def write(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs] = ()) -> list[str | ToolCall]:
        """New text and calls. Thoughts are `ReasoningText` of transformers.

        Tokens after the one that completes a stop string are left out.

        Args:
            tokens: New ones.
            logprobs: Theirs, if there are any.
        """
        text = ""
        for index, token in enumerate(tokens):
            if self.is_stopped:
                break
            if self._num_scored < len(self._prompt):
                self._score(logprobs[index])
                continue
            self._tokens.append(token)
            if self._text_of is not None:
                self._logprobs.append(self._told(token, logprobs[index], self._num_echoed + self._num_decoded))
            decoded = self._stream.step(token)
            self._num_decoded += len(decoded)
            text += self._stops.passed(decoded)
        return self._parsed(text)

    def finish(self) -> list[str | ToolCall]:
        """What was held back: a character without its last bytes, and what might have become a stop string."""
        text = ""
        if not self.is_stopped:
            text = self._stops.passed(self._stream.rest()) + self._stops.rest()
        pieces = self._parsed(text)
        if not self.is_stopped:
            self._num_passed += 1  # past the tokens at the end that have no text, such as the end token
        if self._reader is not None:
            pieces += self._reader.finish()
        return pieces

    def piece(self, index: int, output: GenerationOutput, end_tokens: Collection[int]) -> Piece:
        """What is new of an answer, by all of it so far. It has a reason if it ends the answer.

        Args:
            index: Of the answer, among its request's answers.
            output: All tokens so far.
            end_tokens: Any of them ends the answer.

        Raises:
            UnreadableAnswer: See there.
        """
        begin, tokens = self.num_tokens + max(self._num_scored - 1, 0), output.generated_tokens
        logprobs: Any = output.logprobs  # what `batching.sampling.reports` makes of a token, not a number
        tells_tokens = self._text_of is not None and self._reader is not None
        ends = range(begin + 1, len(tokens) + 1) if tells_tokens else [len(tokens)]
        whole, steps = Piece(index, []), []
        try:
            for end in ends:
                texts = self.write(tokens[begin:end], logprobs[begin:end])
                steps.append(Piece(index, texts, self.taken_logprobs() if texts else None))
                begin = end
            if self.is_stopped or output.is_finished():
                is_complete = self.is_stopped or tokens[-1] in end_tokens
                texts = self.finish()
                reason = "tool_calls" if self.has_called and is_complete else "stop" if is_complete else "length"
                steps.append(Piece(index, texts, self.taken_logprobs(), reason))
        except Exception as error:
            raise UnreadableAnswer(error) from error
        for step in steps:
            whole.add(step)
        whole.num_tokens, whole.steps = self.num_tokens, steps
        return whole

    def taken_logprobs(self) -> list[Logprob] | None:
        """Logprobs of tokens whose text has been passed on since the last time; `None` if there are none to come."""
        if self._text_of is None:
            return None
        end = self._num_echoed + self._num_passed
        taken = [each for each in self._logprobs if each.begin < end]
        self._logprobs = self._logprobs[len(taken) :]
        return taken

    def _score(self, found: TokenLogprobs | None) -> None:
        """Note the next token of the prompt, and the logarithm of its probability if it comes after another."""
        token = self._prompt[self._num_scored]
        self._logprobs.append(self._told(token, found, self._begins[self._num_scored]))
        self._num_scored += 1

    def _told(self, token: int, found: TokenLogprobs | None, begin: int) -> Logprob:
        assert self._text_of is not None
        top = [] if found is None else [(self._text_of(each), value) for each, value in found.top]
        return Logprob(self._text_of(token), None if found is None else found.logprob, top, begin)

    def _parsed(self, text: str) -> list[str | ToolCall]:
        self._num_passed += len(text)
        if self._reader is None:
            return [text] if text else []
        return self._reader.feed(text) if text else []
