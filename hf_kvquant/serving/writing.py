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
    return str(tokenizer.decode([*before, token])[len(tokenizer.decode(before)) :])


class Writer:
    """Turns the tokens of one answer into text.

    Args:
        tokenizer: A fast one of transformers.
        stop: Texts that end the answer, and are not part of it.
        reader: Tells the parts of the answer apart; `None` for plain text.
        text_of: The text of one token, if tokens come with logarithms of probabilities.
        prompt: Tokens of the prompt, if all but the first come before those of the answer, to be told with theirs.
        echo: The text of the prompt, likewise.
    """

    def __init__(
        self,
        tokenizer: Any,
        stop: Sequence[str] = (),
        reader: Reader | None = None,
        text_of: Callable[[int], str] | None = None,
        prompt: Sequence[int] = (),
        echo: str = "",
    ) -> None:
        self._tokenizer, self._reader = tokenizer, reader
        # The reader looks for special tokens.
        self._skips_special = reader is None
        self._stream = DecodeStream([], skip_special_tokens=self._skips_special)
        self._stops = StopStrings(stop)
        self._tokens: list[int] = []
        self._num_decoded = self._num_passed = 0  # characters
        # Of tokens whose text may still be part of a stop string, which is not part of the answer.
        self._logprobs: list[Logprob] = []
        self._text_of = text_of
        self._prompt, self._num_echoed = list(prompt), len(echo)  # tokens, and characters
        self._num_scored = 0  # tokens of the prompt
        if prompt:
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
            decoded = self._stream.step(self._tokenizer._tokenizer, token) or ""
            self._num_decoded += len(decoded)
            text += self._stops.passed(decoded)
        return self._parsed(text)

    def finish(self) -> list[str | ToolCall]:
        """What was held back: a character without its last bytes, and what might have become a stop string."""
        text = ""
        if not self.is_stopped:
            whole = self._tokenizer.decode(self._tokens, skip_special_tokens=self._skips_special)
            text = self._stops.passed(whole[self._num_decoded :]) + self._stops.rest()
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
        try:
            texts, reason = self.write(tokens[begin:], logprobs[begin:]), None
            if self.is_stopped or output.is_finished():
                is_complete = self.is_stopped or tokens[-1] in end_tokens
                texts += self.finish()
                reason = "tool_calls" if self.has_called and is_complete else "stop" if is_complete else "length"
        except Exception as error:
            raise UnreadableAnswer(error) from error
        return Piece(index, texts, self.taken_logprobs() if texts or reason else None, reason, self.num_tokens)

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
        last = self._logprobs[-1] if self._logprobs else None
        begin = 0 if last is None else min(last.begin + len(last.text), self._num_echoed)
        self._logprobs.append(self._told(token, found, begin))
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
