"""How the next token of each request is chosen: by its own settings, in a batch with others that have none.

transformers decides once for a manager whether it samples, and has per-request versions of three settings. A manager
here is greedy, and so are its captured steps. A request with a `Sampling` gets another token afterwards, from the same
logits, on the same stream: the host never waits for it, and nobody else's token changes.

A token is drawn by one number from 0 to 1, which depends on the request's seed and on the token's position alone. So a
request draws the same numbers in any company. transformers would draw all rows of a batch from one generator.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from .grammars import Grammars, Progress
from .settings import marked_complete, tell_left_out

KEY = "sampling"  # of a `Sampling`, among the arguments of the manager's `add_request`
# Of a generation config, what says how tokens are drawn.
SETTINGS = ("temperature", "top_p", "top_k", "min_p")
_NOT_SERVED = ("typical_p", "epsilon_cutoff", "eta_cutoff", "top_h")
_LEAST_TEMPERATURE = 1e-30  # float32 has no smaller ones by which everything can be divided
# Logits in work at once, which take some 40 bytes each.
_MAX_ELEMENTS = 2**24


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How the tokens of a request are chosen, unless simply the most likely ones are.

    Attributes:
        temperature: Divides logits; 0 takes the most likely token.
        top_p: Share of the probability that the most likely tokens must have together; the others are left out.
        top_k: How many tokens are left; 0 for all.
        min_p: Tokens with less than this share of the largest probability are left out.
        presence_penalty: Subtracted from logits of tokens that were generated before.
        frequency_penalty: Likewise, once for each time.
        repetition_penalty: As in generate: divides positive logits of tokens of prompt and answer, multiplies others.
        logit_bias: Added to logits, by token.
        seed: What the draws depend on.
        choice: Likewise: which answer to the same prompt this is.
        num_logprobs: Most likely tokens that are reported with each token; `None` for no report.
        grammar: What the answer must match, see `Grammars`; `None` for nothing.
        forced: What the sequence begins with: at these positions nothing is chosen. So tokens of a prompt get reports.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = dataclasses.field(default_factory=dict)
    seed: int = 0
    choice: int = 0
    num_logprobs: int | None = None
    grammar: str | None = None
    forced: tuple[int, ...] = ()

    @property
    def is_truncated(self) -> bool:
        """Whether unlikely tokens are left out by their rank."""
        return self.temperature > 0 and (self.top_p < 1 or self.top_k > 0)

    @property
    def is_penalized(self) -> bool:
        """Whether logits depend on the tokens before."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1)

    def draw(self, position: int) -> float:
        """A number from 0 to below 1 for the token at a position of the sequence."""
        digest = hashlib.blake2b(f"{self.seed} {self.choice} {position}".encode(), digest_size=8).digest()
        return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


@dataclasses.dataclass(frozen=True)
class TokenLogprobs:
    """Natural logarithms of probabilities that the model gives, before any setting.

    Attributes:
        logprob: Of the token that was chosen.
        top: The most likely tokens and theirs, the first one first.
    """

    logprob: float
    top: list[tuple[int, float]]


def greedy_config(config: GenerationConfig) -> GenerationConfig:
    """A model's generation config, for a manager whose requests bring their own `Sampling`.

    Warns of sampling settings of the model's config that a `Sampling` lacks.
    """
    config = copy.deepcopy(config)
    left_out = {name: value for name in _NOT_SERVED if (value := getattr(config, name, None))}
    if left_out:
        shown = ", ".join(f"{name}={value}" for name, value in left_out.items())
        tell_left_out("what the model's own generation config sets for sampling", shown)
    config.do_sample, config.num_return_sequences = False, 1
    for name in (*SETTINGS, *_NOT_SERVED):
        setattr(config, name, None)
    return marked_complete(config)  # None switches a setting off


def sampling_of(state: Any) -> Sampling | None:
    """How a request of transformers' scheduler chooses its tokens; `None` if it takes the most likely ones."""
    found: Sampling | None = state.logit_processor_kwargs.get(KEY)
    return found


def choose(scores: Tensor, output_ids: Tensor, states: Sequence[Any], grammars: Grammars | None = None) -> None:
    """Choose the tokens of all requests that have a `Sampling`. Waits for the device only if one has a grammar.

    Args:
        scores: `[rows, vocab_size]` float32, read only. The first rows belong to `states`.
        output_ids: `[at least rows]` int32: the most likely tokens. The requests' entries are overwritten.
        states: Of the requests with a new token, in their order.
        grammars: Must be there if a request has a grammar.
    """
    rows = [row for row, state in enumerate(states) if sampling_of(state) is not None]
    step = max(1, _MAX_ELEMENTS // scores.shape[1])
    for begin in range(0, len(rows), step):
        part = rows[begin : begin + step]
        index = _sent(part, torch.int64, scores.device)
        output_ids[index] = _chosen(scores[index], [states[row] for row in part], grammars).to(output_ids.dtype)


def reports(states: Iterator[Any]) -> list[TokenLogprobs | None] | None:
    """The reports of the step that is taken next, of each request with a new token. Its results are on the host.

    Returns:
        `None` if no request wants one.
    """
    found = [state.__dict__.get("logprobs_due") for state in states]
    if not any(found):
        return None
    return [due.popleft().report() if due else None for due in found]


@dataclasses.dataclass(frozen=True)
class _Due:
    """A report of one request that is on its way to the host: row `row` of tensors of a step."""

    row: int
    chosen: Tensor  # [rows, 1] float32
    top: Tensor  # [rows, most] float32
    top_ids: Tensor  # [rows, most] int64
    num_top: int

    def report(self) -> TokenLogprobs:
        ids, values = self.top_ids[self.row].tolist(), self.top[self.row].tolist()
        top = list(zip(ids, values, strict=True))[: self.num_top]
        return TokenLogprobs(self.chosen[self.row].item(), top)


def _chosen(scores: Tensor, states: Sequence[Any], grammars: Grammars | None) -> Tensor:
    """The tokens of some requests, `[rows]` int64. `scores` is `[rows, vocab_size]`, and is not changed."""
    samplings = [each for state in states if (each := sampling_of(state)) is not None]
    logits = _penalized(scores, states, samplings)
    bound = [row for row, each in enumerate(samplings) if each.grammar is not None]
    if bound:
        logits = _masked(logits, bound, states, samplings, grammars)
    tokens = logits.argmax(-1)
    for is_truncated in (False, True):  # one by one: what a number draws depends on the order of tokens
        rows = [row for row, each in enumerate(samplings) if each.temperature > 0 and each.is_truncated == is_truncated]
        if rows:
            index = _sent(rows, torch.int64, scores.device)
            draws = [samplings[row].draw(states[row].position_offset) for row in rows]
            tokens[index] = _drawn(logits[index], [samplings[row] for row in rows], draws, is_truncated)
    _force(tokens, states, samplings)
    for row, (state, each) in enumerate(zip(states, samplings, strict=True)):
        if each.is_penalized:
            state.token_counts.index_add_(0, tokens[row : row + 1], state.token_counts.new_ones(1))
    if bound:
        chosen = _received(tokens)
        event = torch.cuda.current_stream(tokens.device).record_event() if tokens.is_cuda else None
        for row in bound:
            states[row].progress.note(chosen, row, event)
    _send_reports(scores, tokens, states, samplings)
    return tokens


def _force(tokens: Tensor, states: Sequence[Any], samplings: Sequence[Sampling]) -> None:
    """Put the tokens that are forced in place of those that were chosen."""
    places = [state.position_offset for state in states]
    forced = [(row, each.forced[places[row]]) for row, each in enumerate(samplings) if places[row] < len(each.forced)]
    if forced:
        rows, values = _sent(forced, torch.int64, tokens.device).T
        tokens[rows] = values


def _masked(
    logits: Tensor, rows: Sequence[int], states: Sequence[Any], samplings: Sequence[Sampling], grammars: Grammars | None
) -> Tensor:
    """Logits of the tokens that grammars allow. A request whose grammar cannot go on ends, with an error."""
    assert grammars is not None
    found: list[Progress] = []
    for row in rows:
        state, grammar = states[row], samplings[row].grammar
        if not hasattr(state, "progress"):  # in its first step, also after it had to start again
            state.progress = grammars.begin(grammar or "", _parts(state)[1])
        found.append(state.progress)
    logits = grammars.masked(logits, _sent(rows, torch.int64, logits.device), found)
    for row, each in zip(rows, found, strict=True):
        states[row].error = each.error
    return logits


def _penalized(scores: Tensor, states: Sequence[Any], samplings: Sequence[Sampling]) -> Tensor:
    """Logits after penalties and biases."""
    rows = [row for row, each in enumerate(samplings) if each.is_penalized]
    if rows:
        for row in rows:
            _count(states[row], samplings[row], scores)
        index = _sent(rows, torch.int64, scores.device)
        names = ("presence_penalty", "frequency_penalty", "repetition_penalty")
        values = [[getattr(samplings[row], name) for name in names] for row in rows]
        presence, frequency, repetition = _sent(values, torch.float32, scores.device).T.unsqueeze(-1)
        counts = torch.stack([states[row].token_counts for row in rows])  # [rows, vocab_size]
        is_written = counts > 0
        is_seen = is_written | torch.stack([states[row].is_in_prompt for row in rows])
        logits = scores[index]
        repeated = torch.where(logits < 0, logits * repetition, logits / repetition)
        logits = torch.where(is_seen, repeated, logits) - presence * is_written - frequency * counts
        scores = scores.index_copy(0, index, logits)
    biases = [(row, *pair) for row, each in enumerate(samplings) for pair in each.logit_bias.items()]
    if biases:
        where = _sent([each[:2] for each in biases], torch.int64, scores.device)
        values_of = _sent([each[2] for each in biases], torch.float32, scores.device)
        scores = scores.index_put((where[:, 0], where[:, 1]), values_of, accumulate=True)
    return scores


def _count(state: Any, sampling: Sampling, scores: Tensor) -> None:
    """Count the tokens of a request in its first step, also after it had to start again with what it had written."""
    if hasattr(state, "token_counts"):
        return
    prompt, written = _parts(state)
    size, device = scores.shape[1], scores.device
    ids = _sent(written, torch.int64, device)
    state.token_counts = torch.zeros(size, dtype=torch.int32, device=device).index_add_(
        0, ids, torch.ones_like(ids, dtype=torch.int32)
    )
    seen = prompt if sampling.repetition_penalty != 1 else []
    state.is_in_prompt = torch.zeros(size, dtype=torch.bool, device=device).index_fill_(
        0, _sent(seen, torch.int64, device), True
    )


def _parts(state: Any) -> tuple[list[int], list[int]]:
    """What a request began with: its prompt, and what it had written before it had to start again."""
    num_prompt = state._true_initial_tokens or len(state.initial_tokens)
    return state.initial_tokens[:num_prompt], state.initial_tokens[num_prompt:]


def _drawn(logits: Tensor, samplings: Sequence[Sampling], draws: Sequence[float], is_truncated: bool) -> Tensor:
    """The tokens that numbers draw, `[rows]` int64. `is_truncated` holds for all rows."""
    values = [
        (each.temperature, each.top_p, each.top_k or logits.shape[1], each.min_p, draw)
        for each, draw in zip(samplings, draws, strict=True)
    ]
    temperature, top_p, top_k, min_p, draw = _sent(values, torch.float64, logits.device).T.unsqueeze(-1)
    # Finite for each temperature: the largest logit is 0, and its share is not lost.
    scaled = (logits - logits.amax(-1, keepdim=True)) / temperature.float().clamp(min=_LEAST_TEMPERATURE)
    order = None
    if is_truncated:
        # Equal logits stay in the order of their tokens.
        scaled, order = scaled.sort(dim=-1, descending=True, stable=True)
    mass = scaled.softmax(-1)
    if order is not None:
        ranks = torch.arange(mass.shape[1], device=mass.device)
        mass = mass.masked_fill(ranks >= top_k, 0)
        # The last token that is left is the one with which the share is reached.
        before = mass.cumsum(-1, dtype=torch.float64) - mass
        mass = mass.masked_fill(before >= top_p * mass.sum(-1, keepdim=True), 0)
    mass = mass.masked_fill(mass < min_p * mass.amax(-1, keepdim=True), 0)
    # In float32, the tail of a large vocabulary would be lost.
    reached = mass.cumsum(-1, dtype=torch.float64)
    place = torch.searchsorted(reached, draw * reached[:, -1:], right=True)
    place = place.clamp(max=mass.shape[1] - 1)
    return (place if order is None else order.gather(-1, place)).squeeze(-1)


def _send_reports(scores: Tensor, tokens: Tensor, states: Sequence[Any], samplings: Sequence[Sampling]) -> None:
    """Start to send the logarithms of probabilities to the host, for those who want them."""
    rows = [row for row, each in enumerate(samplings) if each.num_logprobs is not None]
    if not rows:
        return
    index = _sent(rows, torch.int64, scores.device)
    logprobs = scores[index].log_softmax(-1)
    most = max(samplings[row].num_logprobs or 0 for row in rows)
    top, top_ids = logprobs.topk(min(most, scores.shape[1]), -1)
    chosen = _received(logprobs.gather(-1, tokens[index].unsqueeze(-1)))
    top, top_ids = _received(top), _received(top_ids)
    for place, row in enumerate(rows):
        due = states[row].__dict__.setdefault("logprobs_due", deque())
        due.append(_Due(place, chosen, top, top_ids, samplings[row].num_logprobs or 0))


def _sent(values: Sequence[Any], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor on the device, which the host does not wait for."""
    tensor = torch.tensor(values, dtype=dtype)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def _received(tensor: Tensor) -> Tensor:
    """A copy on the host, which is there when the step has ended."""
    if tensor.device.type != "cuda":
        return tensor
    return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)
