"""`hf-kvquant serve`: what clients get. Each answer is that of `generate`; each mistake has an answer, too."""

from __future__ import annotations

import concurrent.futures
import inspect
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import models
import openai
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_kvquant
from hf_kvquant.upstream.releases import HAS_PAGES, HAS_STATES

if not HAS_PAGES:
    pytest.skip("transformers' paged cache has another design", allow_module_level=True)

from servers import Running, serving
from transformers.cli.serving import model_manager, server, utils
from transformers.generation.continuous_batching import continuous_api, requests, scheduler
from waiting import until

from hf_kvquant.common.errors import ConfigDoesNotFit
from hf_kvquant.serving.metrics import Metrics
from hf_kvquant.serving.model import PatchedModels
from hf_kvquant.serving.requests import OpenRequests
from hf_kvquant.state import patch_of

REFERENCE = Path(__file__).resolve().parents[1] / "evals" / "reference_model"
TEMPLATE = "{% for message in messages %}{{ message.content }} {% endfor %}"
PROMPTS = ["The village is located in the", "The river", "He was born in", "In the summer of", "The river"]
NEW_TOKENS = 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The reference model with a chat template."""
    path = tmp_path_factory.mktemp("model") / "reference"
    shutil.copytree(REFERENCE, path)
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def running(folder: str) -> Iterator[Running]:
    with serving(folder) as running:
        yield running


class Alone:
    """What `generate` answers to one prompt with the same preset."""

    def __init__(self, folder: str, preset: str) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        hf_kvquant.patch(self.model, preset)

    def __call__(self, prompt: str, new_tokens: int = NEW_TOKENS) -> str:
        ids = self.tokenizer(prompt, return_tensors="pt").input_ids
        out = self.model.generate(ids, max_new_tokens=new_tokens, do_sample=False)
        answer: str = self.tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
        return answer

    def chat(self, messages: list[Any]) -> str:
        return self(self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))


@pytest.fixture(scope="module")
def alone(folder: str) -> Alone:
    return Alone(folder, "int4-token")


# --- answers ----------------------------------------------------------------------------------------------------------


def ask(client: openai.OpenAI, prompt: str, stream: bool, is_chat: bool) -> str:
    """The text of one answer."""
    common: dict[str, Any] = {"model": client_model(client), "max_tokens": NEW_TOKENS, "stream": stream}
    if is_chat:
        answer: Any = client.chat.completions.create(messages=[{"role": "user", "content": prompt}], **common)
        if not stream:
            return str(answer.choices[0].message.content)
        return "".join(chunk.choices[0].delta.content or "" for chunk in answer)
    answer = client.completions.create(prompt=prompt, **common)
    if not stream:
        return str(answer.choices[0].text)
    return "".join(chunk.choices[0].text for chunk in answer)


def client_model(client: openai.OpenAI) -> str:
    return client.models.list().data[0].id


@pytest.mark.parametrize("is_chat", [True, False], ids=["chats", "completions"])
def test_each_client_gets_what_generate_gives_it(running: Running, alone: Alone, is_chat: bool) -> None:
    """All are asked at once, streamed and not."""
    cases = [(prompt, stream) for prompt in PROMPTS for stream in (True, False)]
    with running.openai() as client, concurrent.futures.ThreadPoolExecutor(len(cases)) as pool:
        answers = list(pool.map(lambda case: ask(client, *case, is_chat), cases))
    expected = [alone(f"{prompt} " if is_chat else prompt) for prompt, _ in cases]
    assert answers == expected


def test_a_chat_of_two_turns(running: Running, alone: Alone) -> None:
    messages: list[Any] = [{"role": "user", "content": PROMPTS[0]}]
    with running.openai() as client:
        for _ in range(2):
            answer = client.chat.completions.create(
                model=client_model(client), messages=messages, max_tokens=NEW_TOKENS, temperature=0
            )
            assert answer.choices[0].message.content == alone.chat(messages)
            assert answer.choices[0].finish_reason == "length"
            messages += [{"role": "assistant", "content": answer.choices[0].message.content}]
            messages += [{"role": "user", "content": "In the summer"}]


def test_another_preset_answers_as_its_own_generate(folder: str) -> None:
    alone = Alone(folder, "k8v4")
    with serving(folder, "k8v4", page_size=256, num_blocks=4) as running, running.openai() as client:
        assert ask(client, PROMPTS[2], True, False) == alone(PROMPTS[2])


def test_each_request_says_how_it_samples(folder: str, alone: Alone) -> None:
    """All in one batch. A tiny `top_p` leaves one token, at any temperature."""
    greedy: list[dict[str, Any]] = [{}, {"temperature": 0}, {"temperature": 5, "top_p": 1e-6}, {"top_p": 1e-6}]
    sampled: list[dict[str, Any]] = [{"temperature": 5}, {"temperature": 1, "top_p": 0.99}] * 3
    with serving(folder) as running, concurrent.futures.ThreadPoolExecutor(10) as pool:
        bodies = [{"prompt": PROMPTS[0], "max_tokens": NEW_TOKENS, **each} for each in greedy + sampled]
        answers = [
            each.json()["choices"][0]["text"] for each in pool.map(lambda body: running.complete(**body), bodies)
        ]
    assert answers[:4] == [alone(PROMPTS[0])] * 4
    assert len({alone(PROMPTS[0]), *answers[4:]}) == 7


def test_requests_get_the_settings_of_the_model_that_they_leave_out(folder: str, alone: Alone, tmp_path: Path) -> None:
    path = tmp_path / "sampling"
    shutil.copytree(folder, path)
    settings = json.loads((path / "generation_config.json").read_text(encoding="utf-8"))
    settings |= {"do_sample": True, "temperature": 9.0, "top_k": 1}
    (path / "generation_config.json").write_text(json.dumps(settings), encoding="utf-8")
    with serving(str(path), is_sampled=True) as running:
        for more in ({}, {"temperature": 3.0}, {"temperature": 0}):  # one token is left
            answer = running.complete(prompt=PROMPTS[0], max_tokens=NEW_TOKENS, **more)
            assert answer.json()["choices"][0]["text"] == alone(PROMPTS[0])


def test_a_model_that_samples_by_itself_is_greedy_here(folder: str, alone: Alone, tmp_path: Path) -> None:
    path = tmp_path / "sampling"
    shutil.copytree(folder, path)
    settings = json.loads((path / "generation_config.json").read_text(encoding="utf-8"))
    settings |= {"do_sample": True, "temperature": 9.0, "top_k": 0, "top_p": 0.99}
    (path / "generation_config.json").write_text(json.dumps(settings), encoding="utf-8")
    with serving(str(path), num_blocks=4) as running:
        answer = running.complete(prompt=PROMPTS[0], max_tokens=NEW_TOKENS).json()
    assert answer["choices"][0]["text"] == alone(PROMPTS[0])


def test_a_length_that_nobody_named_is_what_fits(running: Running) -> None:
    """2,048 positions leave less than the 1,024 tokens that transformers takes."""
    prompt = " the" * 2040
    usage = running.complete(prompt=prompt).json()["usage"]
    assert usage["prompt_tokens"] == 2040 and usage["completion_tokens"] <= 8


def test_two_requests_of_one_name_do_not_share_an_answer(running: Running) -> None:
    def answer(prompt: str) -> str:
        body = {"prompt": prompt, "max_tokens": NEW_TOKENS}
        found = running.http.post("/v1/completions", json=body, headers={"x-request-id": "mine"}).json()
        return str(found["choices"][0]["text"])

    prompts = [PROMPTS[0], PROMPTS[2]]
    expected = [answer(prompt) for prompt in prompts]
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        assert list(pool.map(answer, prompts)) == expected


def test_a_cancellation_that_came_before_its_request_is_repeated() -> None:
    """The queue of cancellations is emptied after that of requests, but both may be filled in between."""
    cancelled: list[str] = []
    registry = OpenRequests(Metrics())
    registry.cancel = cancelled.append
    going, ended = requests.RequestStatus.DECODING, requests.RequestStatus.FINISHED
    assert not registry.note(requests.GenerationOutput("gone", generated_tokens=[1], status=going))
    assert not registry.note(requests.GenerationOutput("done", generated_tokens=[1], status=ended))
    assert cancelled == ["gone"]


# --- refusals ---------------------------------------------------------------------------------------------------------

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "Hello"}]


@pytest.mark.parametrize(
    "path, body, message",
    [
        (COMPLETION, {}, "`prompt` must be a text, token ids, or a list of these, got None."),
        (COMPLETION, {"prompt": ["a", 1]}, "`prompt` must be a text, token ids, or a list of these, got ['a', 1]."),
        (COMPLETION, {"prompt": []}, "`prompt` must be a text, token ids, or a list of these, got []."),
        (
            COMPLETION,
            {"prompt": [1, 70000]},
            "`prompt` must be token ids below 8192, as many as ",
        ),
        (
            COMPLETION,
            {"prompt": ["a"] * 9, "n": 128},
            "a request must ask for at most 1024 answers, got 9 ",
        ),
        (COMPLETION, {"prompt": ""}, "the prompt must have a token, got none. Write some text."),
        (COMPLETION, {"prompt": "\ud800"}, "the request cannot be read: "),
        (COMPLETION, {"prompt": "a", "max_tokens": 0}, "`max_tokens` must be an integer of at least 1, got 0."),
        (COMPLETION, {"prompt": "a", "max_tokens": "9"}, "`max_tokens` must be an integer of at least 1, got '9'."),
        (
            COMPLETION,
            {"prompt": "The river", "max_tokens": 2047},
            "prompt and `max_tokens` must fit, got 2 and 2047 tokens. This model's maximum context length is 2048 "
            "tokens: 2048 tokens fit into the pages, and the model has 2048 positions. Ask for 2046 or less.",
        ),
        (COMPLETION, {"prompt": " the" * 2048}, "the prompt is too long: it must leave room for an answer, got 2048 "),
        (COMPLETION, {"prompt": "a", "stream": "yes"}, "`stream` must be true or false, got 'yes'."),
        (COMPLETION, {"prompt": "a", "temperature": -1}, "`temperature` must be a number of at least 0, got -1."),
        (COMPLETION, {"prompt": "a", "min_p": 2}, "`min_p` must be a number from 0 to 1, got 2."),
        (COMPLETION, {"prompt": "a", "top_k": -1}, "`top_k` must be an integer of at least 0, got -1."),
        (
            COMPLETION,
            {"prompt": "a", "presence_penalty": 3},
            "`presence_penalty` must be a number from -2 to 2",
        ),
        (COMPLETION, {"prompt": "a", "repetition_penalty": 0}, "`repetition_penalty` must be a number from 0.01 "),
        (COMPLETION, {"prompt": "a", "logit_bias": {"x": 1}}, "`logit_bias` must be up to 1024 token ids with numbers"),
        (COMPLETION, {"prompt": "a", "logit_bias": {"9000": 1}}, "`logit_bias` must be for token ids below 8192, as "),
        (
            COMPLETION,
            {"prompt": "a", "logprobs": True},
            "`logprobs` must be true or false in a chat, an ",
        ),
        (
            CHAT,
            {"messages": HELLO, "logprobs": 1},
            "`logprobs` must be true or false in a chat, ",
        ),
        (CHAT, {"messages": HELLO, "top_logprobs": 1}, "`top_logprobs` must come with `logprobs`, got it alone."),
        (COMPLETION, {"prompt": "a", "top_p": 0}, "`top_p` must be a number above 0 and at most 1, got 0."),
        (COMPLETION, {"prompt": "a", "seed": 2**64}, "`seed` must be an integer of 64 bits"),
        (COMPLETION, {"prompt": "a", "n": 0}, "`n` must be an integer from 1 to 128, got 0."),
        (COMPLETION, {"prompt": "a", "n": True}, "`n` must be an integer from 1 to 128, got True."),
        (
            COMPLETION,
            {"prompt": "a", "nonsense": 1},
            "`nonsense` must be left out, since /v1/completions has ",
        ),
        (CHAT, {}, "`messages` must be a list of messages, got None."),
        (CHAT, {"messages": []}, "`messages` must be a list of messages, got []."),
        (CHAT, {"messages": ["hello"]}, "`messages` must each have a role, got 'hello'."),
        (CHAT, {"messages": [{"role": "user", "content": 3}]}, "`messages` must each have a text, or a list of texts"),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "`messages` must each have a text, or a list of texts",
        ),
        (
            CHAT,
            {"messages": HELLO, "stop": [""]},
            "`stop` must be a text that is not empty, or a list of up to 16 of these, got [''].",
        ),
        (
            CHAT,
            {"messages": HELLO, "echo": True},
            "`echo` must be left out, since /v1/chat/completions has ",
        ),
        (CHAT, {"messages": HELLO, "stream_options": {}}, "`stream_options` must come with `stream`, got it alone."),
        (
            CHAT,
            {"messages": HELLO, "stream_options": 1},
            "`stream_options` must be an object with ",
        ),
        (
            CHAT,
            {"messages": HELLO, "max_tokens": 1, "max_completion_tokens": 2},
            "`max_tokens` and ",
        ),
        (
            CHAT,
            {"messages": [{"role": "assistant", "audio": {"id": "x"}}]},
            "a message must have no `audio`, which is not",
        ),
        (CHAT, {"messages": HELLO, "response_format": {"type": "xml"}}, "`response_format` must be an object"),
        (
            CHAT,
            {"messages": HELLO, "chat_template_kwargs": {"chat_template": "x"}},
            "`chat_template_kwargs` must have no `chat_template`, which the server sets. Leave it out.",
        ),
        *(
            (
                CHAT,
                {"messages": HELLO, "chat_template_kwargs": {"enable_thinking": False, name: 1}},
                f"`chat_template_kwargs` must have no `{name}`, which the server sets. Leave it out.",
            )
            for name in ("messages", "conversation", "tools", "tokenize", "add_generation_prompt", "return_dict")
        ),
        (CHAT, {"messages": HELLO, "chat_template_kwargs": 3}, "`chat_template_kwargs` must be an object, got 3."),
        (
            CHAT,
            {"messages": [{"role": "usr", "content": "x"}]},
            "the `role` of a message must be one of system, developer, user, assistant, tool, got 'usr'.",
        ),
        (
            CHAT,
            {"messages": [*HELLO, {"role": "assistant", "content": None}]},
            "a message of the role assistant must have a `content`, got none. Write some text.",
        ),
        (
            CHAT,
            {"messages": [{"role": "user", "content": "\ud800"}]},
            "`messages` must be Unicode text, got surrogates",
        ),
        (
            CHAT,
            {"messages": HELLO, "tools": [{}]},
            '`tools` must be a list of up to 128 functions, each with the `type` "function", got {}.',
        ),
    ],
)
def test_wrong_requests(running: Running, path: str, body: dict[str, Any], message: str) -> None:
    before = running.outcomes()["rejected"]
    response = running.http.post(path, content=json.dumps(body).encode(), headers={"content-type": "application/json"})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["message"].startswith(message) and error["type"] == "invalid_request_error"
    assert running.outcomes()["rejected"] == before + 1


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'"text"', b"\xff\xfe", b"[" * 100_000, b"null"])
def test_bodies_that_are_no_json_objects(running: Running, content: bytes) -> None:
    response = running.http.post(COMPLETION, content=content, headers={"content-type": "application/json"})
    assert response.status_code == 400 and response.json()["error"]["message"]


def test_a_body_that_is_too_long(running: Running) -> None:
    response = running.complete(prompt="x" * 2**20)
    assert response.status_code == 413
    expected = "the prompt is too long: the body must have at most 1,048,576 bytes. Shorten it."
    assert response.json()["error"]["message"] == expected
    assert response.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize("body", [{"prompt": " the" * 2048}, {"prompt": "a", "max_tokens": 4000}])
def test_clients_recognise_what_is_too_long(running: Running, body: dict[str, Any]) -> None:
    """By the code, or by words of OpenAI's, which LiteLLM, CrewAI and pi look for."""
    error = running.complete(**body).json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert re.search(r"[Tt]his model's maximum context length is \d+ tokens", error["message"])


def test_errors_reach_the_openai_client(running: Running) -> None:
    with running.openai() as client, pytest.raises(openai.BadRequestError, match="Ask for 2046 or less"):
        client.completions.create(model=client_model(client), prompt="The river", max_tokens=4096, stream=True)


def test_a_model_without_a_chat_template() -> None:
    with serving(str(REFERENCE), num_blocks=2) as running:
        response = running.http.post(CHAT, json={"messages": HELLO})
        assert response.status_code == 400 and "must come with a chat template, and" in response.text


@pytest.mark.parametrize("method, path", [("POST", "/reset"), ("POST", "/load_model"), ("GET", "/docs")])
def test_other_routes_are_not_there(running: Running, method: str, path: str) -> None:
    response = running.http.request(method, path, json={})
    assert response.status_code == 404
    assert response.json()["error"]["message"].startswith("the path must be one of /v1/chat/completions, ")


def test_other_methods_are_refused(running: Running) -> None:
    assert running.http.get(COMPLETION).status_code == 405


def test_health(running: Running) -> None:
    assert running.http.get("/health").json() == {"status": "ok"}


# --- models with states -----------------------------------------------------------------------------------------------


@pytest.mark.skipif(not HAS_STATES, reason="states need transformers 5.24")
def test_models_with_states(tmp_path: Path) -> None:
    folder = models.save(models.family("qwen3_next"), tmp_path, eos_token="~")
    own = Alone(folder, "int4-token")
    prompts = ["a", "once,upon", "once,upon,a,time", "b"]  # the id of a space is that of padding
    with serving(folder) as running:
        assert running.generation.size == (
            "1,920 tokens of cache, up to 128 for each request; 16 pages of 128 tokens, in whose memory are states, "
            "too: 0.01 MB for each request, as much as 0.33 pages, and up to 12 requests at once; "
            "the states of up to 6 prefixes are kept while there is memory"
        )
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            jobs = [pool.submit(running.complete, prompt=prompt, max_tokens=8) for prompt in prompts]
            texts = [job.result().json()["choices"][0]["text"] for job in jobs]
        assert texts == [own(prompt, 8) for prompt in prompts]
        until(running.is_idle)
        found = running.metrics()
        assert (found["cache_states_used"], found["cache_states"], found["cache_pages"]) == (0, 12, 16)
        assert found["cache_states_kept"] == 0  # all prompts are shorter than a page


# --- metrics ----------------------------------------------------------------------------------------------------------


def test_metrics_count_what_happened(folder: str) -> None:
    with serving(folder, num_blocks=8) as running:
        assert set(running.outcomes().values()) == {0}
        for stream in (True, False):
            running.complete(prompt="The village is located in the", max_tokens=5, stream=stream)
        running.complete(prompt="")
        until(running.is_idle)
        found = running.metrics()
        assert running.outcomes() == {"finished": 2, "cancelled": 0, "failed": 0, "rejected": 1}
        assert (found["prompt_tokens_total"], found["output_tokens_total"]) == (12, 10)
        assert found["queue_time_seconds_count"] == found["time_to_first_token_seconds_count"] == 2
        assert (found["inter_token_latency_seconds_count"], found["request_latency_seconds_count"]) == (8, 2)
        queue, first, rest, whole = (
            found[f"{name}_seconds_sum"]
            for name in ("queue_time", "time_to_first_token", "inter_token_latency", "request_latency")
        )
        assert 0 < queue <= first and 0 < rest and first + rest <= whole
        assert 0 < found["output_tokens_per_second"] <= 10 / 9
        assert (found["cache_room_tokens"], found["cache_pages"]) == (1024, 8)
        for name in ("requests_running", "requests_waiting", "cache_tokens", "cache_pages_used"):
            assert found[name] == 0, name
        assert found["cache_free_ratio"] == 1


def test_metrics_show_what_runs_and_what_waits(folder: str) -> None:
    with serving(folder, num_blocks=16, max_requests_per_batch=2) as running:
        with concurrent.futures.ThreadPoolExecutor(5) as pool:
            jobs = [pool.submit(running.complete, prompt=prompt, max_tokens=150) for prompt in PROMPTS]
            found: dict[str, float] = {}

            def is_so() -> bool:
                found.update(running.metrics())
                return (found["requests_running"], found["requests_waiting"]) == (2, 3)

            until(is_so)
            assert found["cache_pages_used"] >= 2
            assert found["cache_free_ratio"] <= 1 - 2 / 16
            assert 4 < found["cache_tokens"] <= 2 * 156
            for job in jobs:
                assert job.result().status_code == 200


def test_the_page_lists_every_metric(running: Running) -> None:
    page = (REFERENCE.parents[1] / "docs" / "serve.md").read_text(encoding="utf-8")
    found = {name.partition("{")[0].removesuffix("_sum").removesuffix("_count") for name in running.metrics()}
    named = {name.removeprefix("hf_kvquant_") for name in re.findall(r"`(hf_kvquant_\w+)`", page)}
    assert {name for name in found if not name.endswith(("_bucket", "_created"))} == named


# --- what we rely on --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "owner, names",
    [
        (model_manager.ModelManager, "_load_model load_model_and_processor process_model_name shutdown"),
        (utils.BaseHandler, "get_processor_inputs_from_messages"),
        (continuous_api.OutputRouter, "deliver deliver_batch fail_and_deliver"),
        (
            continuous_api.ContinuousBatchingManager,
            "add_request cancel_request warmup start stop is_running destroy",
        ),
        (continuous_api.BackgroundThreadStatus, "can_accept_new_requests"),
        (requests.RequestState, "current_len to_generation_output"),
    ],
)
def test_transformers_has_the_methods_that_we_rely_on(owner: type, names: str) -> None:
    assert [name for name in names.split() if not hasattr(owner, name)] == []


def test_transformers_has_the_arguments_that_we_rely_on() -> None:
    def parameters(function: Any) -> list[str]:
        return list(inspect.signature(function).parameters)

    assert parameters(server.build_server) == [
        "model_manager",
        "chat_handler",
        "completion_handler",
        "response_handler",
        "transcription_handler",
        "systemone_handler",
        "generation_state",
        "enable_cors",
    ]
    assert {"device", "dtype", "trust_remote_code", "attn_implementation", "continuous_batching", "force_model"} <= set(
        parameters(model_manager.ModelManager)
    )
    assert parameters(utils.get_response_template) == ["processor", "model"]
    assert parameters(utils.response_events_to_chunks) == ["events"]
    assert "request_id" in parameters(continuous_api.ContinuousBatchingManager.add_request)
    assert parameters(requests.GenerationOutput)[0] == "request_id"


def test_transformers_has_the_attributes_that_we_rely_on(running: Running) -> None:
    manager, processor = running.generation.manager, running.processor
    assert isinstance(processor.scheduler, scheduler.Scheduler)
    assert processor.output_router is manager.output_router  # set before the processor is made
    assert processor.input_queue is manager.input_queue
    for name in ("active_requests", "waiting_requests"):
        assert isinstance(getattr(processor.scheduler, name), dict)
    assert manager.background_thread_status.fatal_error is None
    assert {"max_new_tokens", "eos_token_id"} <= {*vars(running.generation.manager.generation_config)}
    assert utils.X_REQUEST_ID == "x-request-id"
    assert issubclass(utils.CBWorkerDeadError, RuntimeError)


def test_the_loader_patches_and_tells_what_does_not_fit(folder: str, tmp_path: Path) -> None:
    seen: list[Any] = []
    config = hf_kvquant.KVQuantConfig.from_preset("int8")
    loaded = PatchedModels(folder, config, seen.append, device="cpu", dtype="float32")
    assert seen == [loaded.model] and patch_of(loaded.model).config == config  # type: ignore[union-attr]
    narrow = models.save(models.build("llama", head_dim=40), tmp_path / "narrow")
    with pytest.raises(ConfigDoesNotFit, match="`group_size` must divide head_dim 40"):
        PatchedModels(narrow, hf_kvquant.KVQuantConfig.from_preset("int4-g32"), seen.append, device="cpu")
