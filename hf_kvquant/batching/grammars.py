"""`Grammars`: which tokens may come next in an answer that has to match a grammar. llguidance decides.

llguidance is written in Rust and depends on nothing. It reads JSON schemas, regular expressions and Lark, and computes
a mask in some 50 µs. xgrammar needs triton and a runtime of its own. outlines-core compiles each schema into one
automaton first, and knows no grammars that nest.

A mask depends on the token before, which the host does not know yet when it prepares a step. It waits for that token
after the next forward has been launched, so that the GPU computes meanwhile. Only steps with such a request wait.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import re
import threading
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from ..common.errors import BadGrammar, NoGrammars

# Grammars that are kept compiled.
_MOST_KEPT = 256
# What begins the error of a request whose grammar cannot go on.
FAILED = "the grammar of the answer"


def check_installed() -> None:
    """Refuse to go on without llguidance.

    Raises:
        NoGrammars: It is not installed.
    """
    if importlib.util.find_spec("llguidance") is None:
        raise NoGrammars("needs the package llguidance, got none. Install it: pip install 'hf-kvquant[structured]'")


class Grammars:
    """Compiles the grammars of one model's answers, and keeps them.

    Args:
        tokenizer: Of the model, a fast one.
        vocab_size: Logits of the model.
        end_tokens: Any of them ends an answer.

    Attributes:
        end_tokens: See there.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, end_tokens: Collection[int]) -> None:
        self._tokenizer, self.end_tokens = tokenizer, sorted(end_tokens)
        self._num_tokens = max(vocab_size, len(tokenizer))
        self._lock = threading.Lock()
        self._kept = functools.lru_cache(_MOST_KEPT)(self._compiled)

    def prepare(self) -> None:
        """Read the vocabulary: 1.5 s for 150,000 tokens, in which no other thread of Python runs.

        Raises:
            NoGrammars: The model has no end token or no fast tokenizer, or llguidance is missing.
        """
        with self._lock:
            _ = self._vocabulary

    def compile(self, grammar: str) -> None:
        """Check a grammar, and keep it compiled. Other threads run meanwhile.

        Args:
            grammar: In a form of llguidance: JSON or Lark.

        Raises:
            BadGrammar: It cannot be compiled.
            NoGrammars: See `prepare`.
        """
        self.prepare()
        self._kept(grammar)

    def spelled(self, text: str) -> str:
        """A text in Lark. Tokens such as `<tool_call>` count as no text in llguidance, and are written by their ids.

        Raises:
            NoGrammars: See `prepare`.
        """
        self.prepare()
        added = self._tokenizer.get_added_vocab()
        special = {each: token for each, token in added.items() if self._vocabulary.is_special_token(token)}
        longest_first = "|".join(map(re.escape, sorted(special, key=len, reverse=True)))
        parts = re.split(f"({longest_first})", text) if special else [text]
        return " ".join(
            f"<[{special[part]}]>" if part in special else json.dumps(part, ensure_ascii=False)
            for part in parts
            if part
        )

    def begin(self, grammar: str, written: Sequence[int]) -> Progress:
        """The beginning of an answer that matches a grammar.

        Args:
            grammar: Compiled before, perhaps in another process.
            written: Tokens of the answer so far.
        """
        self.prepare()
        return Progress(self._kept(grammar).deep_copy(), written)

    def masked(self, logits: Tensor, rows: Tensor, found: Sequence[Progress]) -> Tensor:
        """Logits of which those that the grammars do not allow are minus infinity.

        Args:
            logits: `[rows, vocab_size]`, not changed.
            rows: That have a grammar, int64, on the device of the logits.
            found: How far their answers are.
        """
        for each in found:
            each.catch_up()
        num_words = -(-self._num_tokens // 32)
        words = torch.empty(len(found), num_words, dtype=torch.int32, pin_memory=logits.is_cuda)
        matchers = [(each.matcher, place) for place, each in enumerate(found)]
        self._executor.unsafe_compute_mask_ptr(matchers, words.data_ptr(), 4 * num_words, len(found))
        sent = words.to(logits.device, non_blocking=True)
        bits = torch.arange(32, dtype=torch.int32, device=logits.device)
        allowed = ((sent.unsqueeze(-1) >> bits) & 1).flatten(1).bool()
        width = logits.shape[1]
        allowed = torch.nn.functional.pad(allowed[:, :width], (0, max(0, width - allowed.shape[1])))
        return logits.index_copy(0, rows, logits[rows].masked_fill(~allowed, -torch.inf))

    @functools.cached_property
    def _vocabulary(self) -> Any:
        check_installed()
        from llguidance.hf import from_tokenizer  # comes with an extra

        if not self.end_tokens:
            raise NoGrammars("needs an end token, and the model's generation config has no `eos_token_id`")
        try:
            return from_tokenizer(self._tokenizer, self._num_tokens, self.end_tokens)
        except ValueError as error:
            raise NoGrammars(f"needs a tokenizer that llguidance can read: {error}") from error

    @functools.cached_property
    def _executor(self) -> Any:
        from llguidance import LLExecutor

        return LLExecutor(torch.get_num_threads())

    def _compiled(self, grammar: str) -> Any:
        from llguidance import LLMatcher

        matcher = LLMatcher(self._vocabulary, grammar, log_level=0)
        if not matcher.is_error():
            matcher.compute_bitmask()  # finds a grammar that no text of these tokens matches
        if matcher.is_error():
            raise BadGrammar(_reason(matcher.get_error()))
        return matcher


class Progress:
    """How far an answer is in its grammar.

    Args:
        matcher: At the beginning. Nobody else may use it.
        written: Tokens so far.

    Attributes:
        matcher: Has had all tokens up to the last `catch_up`.
    """

    def __init__(self, matcher: Any, written: Sequence[int]) -> None:
        self.matcher = matcher
        self._last: tuple[Tensor, int, torch.cuda.Event | None] | None = None
        matcher.consume_tokens(list(written))

    def note(self, tokens: Tensor, row: int, event: torch.cuda.Event | None) -> None:
        """Note where the next token will be: in a tensor on the host, once the event has happened."""
        self._last = tokens, row, event

    def catch_up(self) -> None:
        """Wait for the token that was noted last, and go past it."""
        if self._last is None:
            return
        tokens, row, event = self._last
        if event is not None:
            event.synchronize()
        self._last = None
        if not self.matcher.is_stopped():  # else an end token, in a step that was prepared before it was known
            self.matcher.consume_token(int(tokens[row]))

    @property
    def error(self) -> str | None:
        """Why the answer cannot go on; `None` if it can. Then only end tokens are allowed."""
        if not self.matcher.is_error():
            return None
        return f"{FAILED} must stay simple enough to be followed, got: {_reason(self.matcher.get_error())}"


def _reason(text: str) -> str:
    """An error of llguidance in one line, without the state of its parser."""
    text = " ".join(text.partition("<state>")[0].split())
    if text.startswith("NoExtension"):
        return "no text matches it"
    return text if len(text) <= 200 else text[:197] + "..."
