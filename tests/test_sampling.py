"""Tokens that requests of a batch choose: as the processors of transformers would, and independent of each other."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation import logits_process

from hf_kvquant.upstream.releases import HAS_PAGES

if not HAS_PAGES:
    pytest.skip("transformers' paged cache has another design", allow_module_level=True)

from transformers.generation.continuous_batching.requests import RequestState

from hf_kvquant.batching import sampling, settings
from hf_kvquant.batching.sampling import KEY, Sampling, choose, greedy_config, reports

VOCAB = 97


def state_of(chosen: Sampling | None, position: int = 7, prompt: tuple[int, ...] = (1, 2, 3)) -> RequestState:
    """A request of the scheduler whose next token has this position."""
    state = RequestState("name", list(prompt), logit_processor_kwargs={} if chosen is None else {KEY: chosen})
    state.position_offset = position
    return state


def tokens_of(scores: Tensor, states: list[RequestState]) -> list[int]:
    """What all requests choose."""
    output_ids = torch.full((len(states) + 2,), -1, dtype=torch.int32, device=scores.device)
    output_ids[: len(states)] = scores[: len(states)].argmax(-1)
    choose(scores, output_ids, states)
    assert output_ids[len(states) :].tolist() == [-1, -1]
    return output_ids[: len(states)].tolist()


def scores_of(rows: int, device: str, seed: int = 0) -> Tensor:
    """Logits, some of them equal."""
    found = 2 * torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed))
    return found.bfloat16().float().to(device)


# --- draws ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "chosen",
    [
        Sampling(temperature=1.0),
        Sampling(temperature=0.6),
        Sampling(temperature=1.3, top_k=5),
        Sampling(temperature=1.0, top_p=0.7),
        Sampling(temperature=0.9, top_k=20, top_p=0.8, min_p=0.05),
        Sampling(temperature=2.0, min_p=0.2),
        Sampling(temperature=1.0, top_k=1000),
    ],
    ids=lambda each: " ".join(f"{name}={value}" for name, value in vars(each).items() if value),
)
def test_tokens_come_as_often_as_with_transformers(chosen: Sampling, device: str) -> None:
    """Within five standard errors; and none that transformers leaves out."""
    num = 20_000
    scores = scores_of(1, device)
    warped = scores.cpu()
    ids = torch.zeros(1, 1, dtype=torch.int64)
    warped = logits_process.TemperatureLogitsWarper(chosen.temperature)(ids, warped)
    if chosen.top_k:
        warped = logits_process.TopKLogitsWarper(chosen.top_k)(ids, warped)
    if chosen.top_p < 1:
        warped = logits_process.TopPLogitsWarper(chosen.top_p)(ids, warped)
    if chosen.min_p:
        warped = logits_process.MinPLogitsWarper(chosen.min_p)(ids, warped)
    expected = warped[0].softmax(-1).double()
    states = [state_of(chosen, position) for position in range(num)]
    found = torch.tensor(tokens_of(scores.expand(num, -1), states)).bincount(minlength=VOCAB).double()
    is_tied = _is_tied_at_the_border(warped[0], scores.cpu()[0])
    assert found[(expected == 0) & ~is_tied].sum() == 0
    error = (num * expected * (1 - expected)).sqrt()
    far = (found - num * expected).abs() > 5 * error + 1
    assert not (far & ~is_tied).any()


def _is_tied_at_the_border(warped: Tensor, scores: Tensor) -> Tensor:
    """Tokens as likely as the least likely one that is left: transformers leaves all of them, or other ones."""
    left = scores[warped.isfinite()].min()
    return scores == left


def test_equal_tokens_are_left_in_their_order(device: str) -> None:
    scores = torch.zeros(400, VOCAB, device=device)
    states = [state_of(Sampling(temperature=1.0, top_k=3), position) for position in range(400)]
    assert set(tokens_of(scores, states)) == {0, 1, 2}


@pytest.mark.parametrize("temperature", [1e-300, 1e-6, 1e9])
@pytest.mark.parametrize("top_k", [0, 9])
def test_extreme_temperatures(temperature: float, top_k: int, device: str) -> None:
    """A tiny one leaves the most likely token, a huge one makes all of them alike. Some are forbidden."""
    scores = scores_of(1, device)
    best = int(scores.argmax())
    scores[0, (best + 1) % VOCAB :: 2] = -torch.inf
    scores[0, best] = 9.0
    states = [state_of(Sampling(temperature=temperature, top_k=top_k), position) for position in range(300)]
    found = set(tokens_of(scores.expand(300, -1), states))
    assert found == {best} if temperature < 1 else len(found) > 5
    assert all(scores[0, token].isfinite() for token in found)


def test_company_changes_nothing(device: str) -> None:
    """Also company that sorts, that is penalised, that is greedy, and that fills several portions."""
    chosen: list[Sampling | None] = [
        None,
        Sampling(temperature=1.0, seed=3),
        Sampling(temperature=0.5, top_p=0.9, seed=4),
        Sampling(frequency_penalty=1.5),
        Sampling(temperature=1.0, logit_bias={5: 3.0}, seed=5),
    ] * 4
    scores = scores_of(len(chosen), device)
    alone = [tokens_of(scores[row : row + 1], [state_of(each)])[0] for row, each in enumerate(chosen)]
    assert tokens_of(scores, [state_of(each) for each in chosen]) == alone
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling, "_MAX_ELEMENTS", 3 * VOCAB)
        assert tokens_of(scores, [state_of(each) for each in chosen]) == alone


def test_a_draw_depends_on_seed_position_and_choice() -> None:
    first = Sampling(seed=1)
    others = [dataclasses.replace(first, seed=2), dataclasses.replace(first, choice=1)]
    assert first.draw(5) == Sampling(seed=1, temperature=3.0).draw(5)
    assert len({first.draw(5), first.draw(6), *(each.draw(5) for each in others)}) == 4
    draws = torch.tensor([first.draw(position) for position in range(10_000)], dtype=torch.float64)
    assert 0 <= draws.min() and draws.max() < 1 and abs(draws.mean() - 0.5) < 0.02


def test_a_large_vocabulary_keeps_its_tail(device: str) -> None:
    """Sums in float32 would pass over tokens of less than 1e-8."""
    scores = torch.full((1, 200_000), -18.0, device=device)
    scores[0, 0] = 0.0
    states = [state_of(Sampling(temperature=1.0), position) for position in range(3000)]
    found = tokens_of(scores.expand(3000, -1), states)
    share = 199_999 * 2.718281828**-18
    assert 0 < sum(token > 0 for token in found) / 3000 < 4 * share / (1 + share)


# --- penalties and biases ---------------------------------------------------------------------------------------------


def test_penalties_follow_what_was_written(device: str) -> None:
    """Over steps, against the sums written out, and against transformers for the penalty that it has."""
    chosen = Sampling(presence_penalty=0.5, frequency_penalty=0.25, repetition_penalty=1.3)
    scores = scores_of(1, device)
    state, written = state_of(chosen), list[int]()
    for _ in range(12):
        ids = torch.tensor([[1, 2, 3, *written]])
        expected = logits_process.RepetitionPenaltyLogitsProcessor(1.3)(ids, scores.cpu())[0]
        for token in set(written):
            expected[token] -= 0.5 + 0.25 * written.count(token)
        written += tokens_of(scores, [state])
        assert written[-1] == expected.argmax()
    assert len(set(written)) > 3


def test_a_request_that_starts_again_knows_what_it_wrote(device: str) -> None:
    chosen, scores = Sampling(frequency_penalty=2.0, repetition_penalty=1.1), scores_of(1, device)
    state = state_of(chosen)
    for _ in range(5):
        (token,) = tokens_of(scores, [state])
        state.generated_tokens.append(token)
    again = state.create_equivalent_initial_request()
    again.position_offset = state.position_offset
    for _ in range(5):
        assert tokens_of(scores, [again]) == tokens_of(scores, [state])


def test_biases(device: str) -> None:
    scores = scores_of(2, device)
    states = [
        state_of(Sampling(logit_bias={11: 100.0})),
        state_of(Sampling(logit_bias={int(scores[1].argmax()): -100.0})),
    ]
    found = tokens_of(scores, states)
    assert found == [11, int(scores[1].topk(2).indices[1])]


# --- reports ----------------------------------------------------------------------------------------------------------


def test_reports_are_of_the_model(device: str) -> None:
    """Of the token that was chosen, before temperature and biases; for those who want them."""
    scores = scores_of(3, device)
    states = [
        state_of(Sampling(logit_bias={4: 100.0}, num_logprobs=2)),
        state_of(None),
        state_of(Sampling(num_logprobs=0)),
    ]
    tokens_of(scores, states)
    if scores.is_cuda:
        torch.cuda.synchronize()
    found = reports(iter(states))
    assert found is not None and found[1] is None
    logprobs = scores.cpu().log_softmax(-1)
    first, last = found[0], found[2]
    assert first is not None and last is not None
    assert first.logprob == pytest.approx(logprobs[0, 4].item(), abs=1e-5)
    values, ids = logprobs[0].topk(2)
    assert [token for token, _ in first.top] == ids.tolist()
    assert [value for _, value in first.top] == pytest.approx(values.tolist(), abs=1e-5)
    assert last.top == [] and last.logprob == pytest.approx(logprobs[2].max().item(), abs=1e-5)
    assert reports(iter(states)) is None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_host_never_waits() -> None:
    chosen = Sampling(1.0, 0.9, 5, 0.01, 1.0, 1.0, 1.1, {3: 1.0}, num_logprobs=3)
    states = [state_of(chosen), state_of(None), state_of(Sampling(temperature=1.0))]
    scores = scores_of(3, "cuda")
    output_ids = torch.zeros(3, dtype=torch.int32, device="cuda")
    choose(scores, output_ids, states)  # libraries load
    try:
        with warnings.catch_warnings(action="ignore"):  # that the mode is a prototype
            torch.cuda.set_sync_debug_mode("error")
        choose(scores, output_ids, states)
    finally:
        torch.cuda.set_sync_debug_mode("default")


# --- settings of the model --------------------------------------------------------------------------------------------


def test_a_manager_is_greedy_and_says_what_it_leaves_out(caplog: pytest.LogCaptureFixture) -> None:
    settings.tell_left_out.cache_clear()
    own: dict[str, Any] = {"do_sample": True, "temperature": 0.5, "top_k": 3, "typical_p": 0.5}
    config = greedy_config(GenerationConfig(**own))
    assert (config.do_sample, config.temperature, config.top_k, config.typical_p) == (False, None, None, None)
    assert "leaves out what the model's own generation config sets for sampling: typical_p=0.5." in caplog.text
