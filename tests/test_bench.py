"""`hf-kvquant bench`: numbers of a server, as clients see it."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import models
import pytest

from hf_kvquant import cli
from hf_kvquant.upstream.releases import HAS_PAGES

if not HAS_PAGES:
    pytest.skip("transformers' paged cache has another design", allow_module_level=True)

from servers import NAME, Running, serving

from hf_kvquant.serving import load

FEW = ("--requests", "6", "--concurrency", "3", "--max-tokens", "5")
SHORT = (*FEW, "--prompt-tokens", "99")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return models.save_llama(tmp_path_factory.mktemp("model"), 512, chat_template=models.CHAT_TEMPLATE)


@pytest.mark.parametrize("route", ["completions", "chat"])
def test_it_measures_a_server(running: Running, route: str, capsys: pytest.CaptureFixture[str]) -> None:
    before = running.metrics()
    words = (*FEW, "--route", route, "--prompt-tokens", "100", "--json")
    assert cli.main(["bench", running.url, *words]) == 0
    found = json.loads(capsys.readouterr().out)
    after = running.metrics()
    asked = {name: found[name] for name in ("url", "route", "model", "requests", "concurrency", "max_tokens")}
    assert asked == {
        "url": f"{running.url}/v1",
        "route": route,
        "model": NAME,
        "requests": 6,
        "concurrency": 3,
        "max_tokens": 5,
    }
    assert (found["finished"], found["failed"]) == (6, 0)
    new = after["output_tokens_total"] - before["output_tokens_total"] - 2  # those of the trials
    assert found["output_tokens"] == new > 0
    assert 6 * 90 < found["prompt_tokens"] < 6 * 110, "trials tell how many words make a token"
    assert found["output_tokens_per_second"] == pytest.approx(new / found["seconds"])
    for name, latencies in found["latency_s"].items():
        ranked = [latencies[each] for each in ("p50", "p90", "p99", "max")]
        assert 0 <= ranked[0] and ranked == sorted(ranked) and ranked[-1] <= found["seconds"], name


def test_it_shows_tables(running: Running, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", f"{running.url}/v1/", *SHORT, "--model", NAME]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"{NAME} at {running.url}/v1: 6 of 6 requests in ")
    assert re.search(r"latency, ms +┃ +mean ┃ +p50 ┃ +p90 ┃ +p99 ┃ +max", out)
    assert re.findall(r"│ ([a-z -]+?) +│", out) == ["first token", "inter-token", "per output token", "whole request"]


def test_prompts_of_a_file_and_requests_that_fail(
    running: Running, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("one\n\ntwo\n" + "x" * 600 + "\n", encoding="utf-8")
    assert cli.main(["bench", running.url, *FEW, "--prompts", str(file), "--json"]) == 1
    output = capsys.readouterr()
    found = json.loads(output.out)
    assert (found["finished"], found["failed"], found["prompt_tokens"]) == (4, 2, 12)
    told = "hf-kvquant: refused: bench: 2 of 6 requests failed, the first of them with: the prompt is too long: "
    assert output.err.startswith(told)


def test_a_server_with_a_key(folder: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(folder, num_blocks=8, api_key="secret") as running:
        assert cli.main(["bench", running.url, *SHORT, "--api-key", "wrong"]) == 2
        assert f"got {running.url}/v1: the API key must be that of this server" in capsys.readouterr().err
        assert cli.main(["bench", running.url, *SHORT, "--api-key", "secret"]) == 0
        monkeypatch.setenv("OPENAI_API_KEY", "secret")
        assert cli.main(["bench", running.url, *SHORT]) == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["localhost:1"], "`URL` must begin with http:// or https:// and a host, got 'localhost:1'."),
        (["http://127.0.0.1:1"], "`URL` must be a server that answers OpenAI's API, got http://127.0.0.1:1/v1: "),
        (["http://h", "--requests", "0"], "`--requests` must be at least 1, got 0."),
        (["http://h", "--concurrency", "1001"], "`--concurrency` must be at most 1000, got 1001."),
        (["http://h", "--timeout", "0"], "`--timeout` must be above 0 seconds, got 0.0."),
        (["http://h", "--prompts", "f", "--prompt-tokens", "9"], "`--prompts` and `--prompt-tokens` must not come tog"),
        (["http://127.0.0.1:1", "--prompts", "absent"], "`--prompts` must be a text file, got absent: No such"),
    ],
)
def test_mistakes(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", *words]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"hf-kvquant: error: bench: {message}") and error.count("\n") == 1


def test_without_the_package(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None)
    assert cli.main(["bench", "http://localhost:8000"]) == 2
    assert capsys.readouterr().err == (
        "hf-kvquant: error: bench: openai must be installed to measure a server, got no such package. Install it: pip "
        "install 'hf-kvquant[serve]'.\n"
    )


def test_numbers() -> None:
    answers = [
        load.Answer(0.0, [1.0, 1.5, 3.0], 3.5, 10, 5),
        load.Answer(1.0, [3.0], 4.0, 20, 1),
        load.Answer(1.0, [2.0], 5.0, 20, 1, "it broke"),
        load.Answer(1.0, [], 2.0, 20, 1),  # of a token without text
    ]
    found = load.results_of(answers)
    assert (found["finished"], found["failed"], found["seconds"]) == (3, 1, 5)
    assert (found["prompt_tokens"], found["output_tokens"], found["output_tokens_per_second"]) == (50, 7, 1.4)
    latency: dict[str, Any] = found["latency_s"]
    assert (latency["first_token"]["mean"], latency["first_token"]["max"]) == (1.5, 2)
    assert (latency["inter_token"]["p50"], latency["inter_token"]["p90"]) == (1, pytest.approx(1.4))
    assert latency["per_output_token"]["mean"] == 0.5
    assert latency["request"]["p50"] == 3
    nothing = load.results_of([load.Answer(0.0, [], 1.0, error="it broke")])
    assert set(nothing["latency_s"]["first_token"].values()) == {None} and nothing["output_tokens_per_second"] == 0


def test_streams_of_other_servers() -> None:
    """What differs from ours: no usage, thoughts by another name, an error in the middle."""
    answer = load.Answer(0.0)
    for chunk in (
        {"choices": [{"delta": {"role": "assistant", "content": ""}}]},
        {"choices": [{"delta": {"reasoning": "hm"}}]},
        {"choices": [{"delta": {"content": "yes"}}], "usage": None},
        {"choices": [{"delta": {}, "finish_reason": "stop"}]},
    ):
        load._note(answer, json.dumps(chunk))
    load._note(answer, "[DONE]")
    assert (len(answer.pieces), answer.num_new, answer.error) == (2, 0, None)
    load._note(answer, '{"error": {"message": "out of memory"}}')
    assert answer.error == "out of memory"


def test_prompts_are_seeded_and_differ() -> None:
    prompts = load.prompts_of(50, 20, 3)
    assert prompts == load.prompts_of(50, 20, 3) != load.prompts_of(50, 20, 4)
    assert len({prompt[:30] for prompt in prompts}) == 50 and {len(prompt.split()) for prompt in prompts} == {20}
