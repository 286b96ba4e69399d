"""Fields of requests that change what comes back, names and keys. The page lists every field, as the code serves it."""

from __future__ import annotations

import concurrent.futures
import functools
import json
import math
import re
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_type_hints

import models
import openai
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from openai.types import Completion, chat, completion_create_params
from openai.types.chat import completion_create_params as chat_create_params
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders
from tokenizers.models import BPE
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from hf_kvquant.upstream.releases import HAS_PAGES

if not HAS_PAGES:
    pytest.skip("transformers' paged cache has another design", allow_module_level=True)

from servers import NAME, Running, serving
from waiting import until

from hf_kvquant.batching.grammars import Grammars
from hf_kvquant.batching.sampling import TokenLogprobs
from hf_kvquant.common.errors import RefusedRequest
from hf_kvquant.serving import chats, writing
from hf_kvquant.serving.fields import BOTH, CHAT, COMPLETION, FIELDS
from hf_kvquant.serving.forms import ChatForm
from hf_kvquant.serving.pieces import Logprob, Piece
from hf_kvquant.serving.reading import Reader
from hf_kvquant.serving.writing import StopStrings, Writer

ROOT = Path(__file__).resolve().parents[1]
PROMPTS = ["The village", "abc", "x"]
LENGTH = 16
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "abc"}]},
    COMPLETION: {"prompt": "abc"},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny model whose tokens are characters."""
    return models.save_llama(tmp_path_factory.mktemp("model"), 4096, chat_template=models.CHAT_TEMPLATE)


def text_of(running: Running, prompt: Any, **options: Any) -> str:
    found = running.complete(prompt=prompt, max_tokens=LENGTH, **options)
    assert found.status_code == 200, found.text
    return str(found.json()["choices"][0]["text"])


def events_of(running: Running, path: str = COMPLETION, **body: Any) -> list[Any]:
    """The data of all events of a stream but the last, which says that it was."""
    response = running.http.post(path, json={"stream": True, **body})
    assert response.status_code == 200, response.text
    *events, end = response.text.strip().split("\n\n")
    assert end == "data: [DONE]"
    return [json.loads(event.removeprefix("data: ")) for event in events]


# --- stop -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "in one piece"])
def test_a_stop_string_ends_an_answer(running: Running, stream: bool) -> None:
    """It lies across tokens. Of several, the first that comes counts, and the request gives its pages back."""
    whole = text_of(running, PROMPTS[0])
    stop = whole[9:13]
    before = running.metrics()["output_tokens_total"]
    body = {"prompt": PROMPTS[0], "max_tokens": 4000, "stop": ["not in it", stop]}
    if stream:
        *events, usage = events_of(running, **body, stream_options={"include_usage": True})
        text = "".join(event["choices"][0]["text"] for event in events)
        reason, num_new = events[-1]["choices"][0]["finish_reason"], usage["usage"]["completion_tokens"]
    else:
        found = running.complete(**body).json()
        text, reason = found["choices"][0]["text"], found["choices"][0]["finish_reason"]
        num_new = found["usage"]["completion_tokens"]
    begin = whole.index(stop)
    assert (text, reason) == (whole[:begin], "stop")
    assert num_new == begin + len(stop)
    until(running.is_idle)
    assert running.metrics()["output_tokens_total"] - before < 1000


def test_an_answer_that_has_stopped_takes_no_more_steps(running: Running) -> None:
    """Though another answer of its request goes on."""
    stop = text_of(running, PROMPTS[0])[9:13]
    long = {"prompt": PROMPTS[1], "max_tokens": 300}
    assert stop not in running.complete(**long).json()["choices"][0]["text"]
    before = running.metrics()["output_tokens_total"]
    found = running.complete(**{**long, "prompt": PROMPTS[:2]}, stop=stop).json()
    assert [choice["finish_reason"] for choice in found["choices"]] == ["stop", "length"]
    assert running.metrics()["output_tokens_total"] - before < 400


def test_a_stop_string_in_a_chat(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": PROMPTS[0]}]
    options: Any = {"model": NAME, "messages": messages, "max_completion_tokens": LENGTH}
    whole = client.chat.completions.create(**options).choices[0].message.content
    assert whole is not None and len(whole) == LENGTH
    found = client.chat.completions.create(**options, stop=whole[5:8]).choices[0]
    assert (found.message.content, found.finish_reason) == (whole[: whole.index(whole[5:8])], "stop")


def test_what_only_begins_a_stop_string_is_sent_at_the_end(running: Running) -> None:
    whole = text_of(running, PROMPTS[0])
    stop = whole[-3:] + "!"
    assert text_of(running, PROMPTS[0], stop=stop) == whole
    events = events_of(running, prompt=PROMPTS[0], max_tokens=LENGTH, stop=stop)
    assert "".join(event["choices"][0]["text"] for event in events) == whole
    assert events[-1]["choices"][0]["finish_reason"] == "length"


@given(st.lists(st.text("ab", max_size=3), max_size=12), st.text("ab", min_size=1, max_size=4))
def test_no_part_of_a_stop_string_is_passed_on(pieces: list[str], stop: str) -> None:
    finder, passed, text = StopStrings([stop]), "", "".join(pieces)
    for piece in pieces:
        passed += finder.passed(piece)
        assert text.partition(stop)[0].startswith(passed)
    assert passed + finder.rest() == text.partition(stop)[0]
    assert finder.is_found == (stop in text)


# --- thoughts ---------------------------------------------------------------------------------------------------------

THINKING: dict[str, Any] = {
    "defaults": {"role": "assistant"},
    "start_anchor": "assistant: ",
    "fields": {
        "reasoning_content": {"open": "<think>", "close": "</think>", "content": "text"},
        "tool_calls": {"open": "<call>", "close": "</call>", "content": "json", "repeats": True},
        "content": {"close": "<end>", "content": "text"},
    },
}


def written(texts: list[str]) -> dict[str, Any]:
    message: dict[str, Any] = ChatForm("id", NAME).choice(Piece(0, texts, None, "stop"))["message"]
    return {name: value for name, value in message.items() if name in ("content", "reasoning_content")}


@pytest.mark.parametrize(
    "text, stop, message",
    [
        ("<think>so\n</think>\n\nit is", (), {"content": "it is", "reasoning_content": "so"}),
        ("<think>so</think>it is", ("t i",), {"content": "i", "reasoning_content": "so"}),
        ("<think>so", (), {"content": "", "reasoning_content": "so"}),
        (" it is", (), {"content": " it is"}),
    ],
)
def test_thoughts_are_told_from_the_answer(folder: str, text: str, stop: tuple[str, ...], message: Any) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    writer = Writer(tokenizer, stop, Reader(THINKING, "assistant: "))
    texts = writer.write(tokenizer(text, add_special_tokens=False).input_ids)
    assert written(texts + writer.finish()) == message


def test_an_answer_that_begins_with_thoughts(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """The template of chats has opened them: here, by its word for the assistant."""
    body = {**BODIES[CHAT], "max_tokens": LENGTH}
    text = running.http.post(CHAT, json=body).json()["choices"][0]["message"]["content"]
    thoughts = {**THINKING["fields"]["reasoning_content"], "open": "<assistant>"}
    template = {**THINKING, "start_anchor": "<user>", "fields": {**THINKING["fields"], "reasoning_content": thoughts}}
    monkeypatch.setattr(chats, "get_response_template", lambda *args: template)
    found = running.http.post(CHAT, json=body).json()["choices"][0]["message"]
    assert (found["content"], found["reasoning_content"]) == ("", text.strip())
    deltas = [event["choices"][0]["delta"] for event in events_of(running, CHAT, **body)]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == text
    assert all(not delta.get("content") for delta in deltas)


OPENED, OF_QWEN, TEXT = "<think>\n", "<|im_start|>assistant\n", "so</think>it is"
THOUGHTS = {"content": "it is", "reasoning_content": "so"}
MENTION = " a <think> tag"


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "gemma4"])
@pytest.mark.parametrize("asked", ["Hi", "<think>", "What does <think> mean? And <tool_call>?"])
@pytest.mark.parametrize(
    ("opening", "message"),
    [
        (f"<assistant>{OPENED}", THOUGHTS),
        (f"{OF_QWEN}{OPENED}", THOUGHTS),
        (f"<|turn>model\n{OPENED}", THOUGHTS),
        (f"<assistant>{OPENED}\n</think>\n\n", {"content": TEXT}),
        ("<assistant>", {"content": TEXT}),
        (OF_QWEN, {"content": TEXT}),
        ("", {"content": TEXT}),
    ],
)
def test_thoughts_that_the_chat_template_opens(
    folder: str, model_type: str, asked: str, opening: str, message: dict[str, str]
) -> None:
    """Whatever the type of the model, and whatever a user writes."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}" + opening
    model: Any = SimpleNamespace(config=SimpleNamespace(model_type=model_type))
    found = chats.Chats(model, tokenizer, Grammars(tokenizer, len(tokenizer), []))
    prompt = found.tokens_of({"messages": [{"role": "user", "content": asked}]}, None)
    reader = found.reader(prompt, None)
    writer = Writer(tokenizer, reader=reader)
    assert written([*writer.write(tokenizer(TEXT, add_special_tokens=False).input_ids), *writer.finish()]) == message
    begun = None if reader is None else reader.thoughts_end
    assert begun == ("</think>" if message is THOUGHTS else None)


@pytest.mark.parametrize("has_thoughts", [True, False])
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<think>so</think>it is", THOUGHTS),
        ("\n<think>so</think>it is", THOUGHTS),
        (f"<think>so</think>it is{MENTION}", THOUGHTS | {"content": f"it is{MENTION}"}),
        ("it is <think>so</think>", None),
        ("so</think>it is", None),
    ],
)
def test_thoughts_that_an_answer_begins_with(
    folder: str, text: str, message: dict[str, str] | None, has_thoughts: bool
) -> None:
    """Where the chat template has the tag, even if nothing is known of the model's type."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = "{% for m in messages %}{{ m.content.split('<think>')[-1] }}{% endfor %}"
    if not has_thoughts:
        tokenizer.chat_template, message = "{% for m in messages %}{{ m.content }}{% endfor %}", None
    model: Any = SimpleNamespace(config=SimpleNamespace(model_type="llama"))
    found = chats.Chats(model, tokenizer, Grammars(tokenizer, len(tokenizer), []))
    reader = found.reader(found.tokens_of({"messages": [{"role": "user", "content": "Hi"}]}, None), None)
    writer = Writer(tokenizer, reader=reader)
    ids = tokenizer(text, add_special_tokens=False).input_ids
    pieces = [piece for token in ids for piece in writer.write([token])]
    assert written([*pieces, *writer.finish()]) == (message or {"content": text})


def test_no_special_token_is_written_for_the_sake_of_thoughts(folder: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"pad_token": "<|pad|>"})
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}<think>\n"
    model: Any = SimpleNamespace(config=SimpleNamespace(model_type="llama"))
    found = chats.Chats(model, tokenizer, Grammars(tokenizer, len(tokenizer), []))
    prompt = found.tokens_of({"messages": [{"role": "user", "content": "Hi"}]}, None)
    writer = Writer(tokenizer, reader=found.reader(prompt, None))
    ids = tokenizer(TEXT + MENTION, add_special_tokens=False).input_ids
    pieces = [piece for token in [*ids, tokenizer.pad_token_id] for piece in writer.write([token])]
    assert written([*pieces, *writer.finish()]) == THOUGHTS | {"content": f"it is{MENTION}"}


@pytest.mark.parametrize(
    ("template", "more", "written"),
    [
        ("{{ reasoning_effort }}", {"reasoning_effort": "low"}, "low"),
        ("{{ reasoning_effort }}", {"reasoning_effort": "none"}, "none"),
        ("{{ enable_thinking }}", {"reasoning_effort": "none"}, "False"),
        ("{{ enable_thinking }}", {"reasoning_effort": "none", "chat_template_kwargs": {"more": 1}}, "False"),
        (
            "{{ enable_thinking }}",
            {"reasoning_effort": "low"},
            '`reasoning_effort` must be "none" or left out, since the model\'s chat template can only switch thoughts '
            "off, got 'low'.",
        ),
        (
            "{{ messages }}",
            {"reasoning_effort": "low"},
            "`reasoning_effort` must be left out, since the model's chat template has no variable for it.",
        ),
        (
            "{{ reasoning_effort }}",
            {"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "high"}},
            "`reasoning_effort` and `reasoning_effort` of `chat_template_kwargs` must agree, got two values. Leave one "
            "out.",
        ),
    ],
)
def test_how_long_a_model_thinks(folder: str, template: str, more: dict[str, Any], written: str) -> None:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = template
    found = chats.Chats(model, tokenizer, Grammars(tokenizer, len(tokenizer), []))
    body = {**BODIES[CHAT], **more}
    if written.startswith("`"):
        with pytest.raises(RefusedRequest) as told:
            found.tokens_of(body, None)
        assert (told.value.message, told.value.param) == (written, "reasoning_effort")
    else:
        assert tokenizer.decode(found.tokens_of(body, None)) == written


def test_what_looks_like_a_call_of_a_tool_stays_text(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    body = {**BODIES[CHAT], "max_tokens": LENGTH}
    text = running.http.post(CHAT, json=body).json()["choices"][0]["message"]["content"]
    calls = {**THINKING["fields"]["tool_calls"], "open": text[3]}
    template = {**THINKING, "fields": {**THINKING["fields"], "tool_calls": calls}}
    monkeypatch.setattr(chats, "get_response_template", lambda *args: template)
    assert running.http.post(CHAT, json=body).json()["choices"][0]["message"]["content"] == text


# --- several answers --------------------------------------------------------------------------------------------------


def test_several_prompts_and_several_answers_to_each(running: Running) -> None:
    """Usage counts each prompt once."""
    alone = [text_of(running, prompt) for prompt in PROMPTS]
    found = running.complete(prompt=PROMPTS, n=2, max_tokens=LENGTH).json()
    assert [choice["index"] for choice in found["choices"]] == list(range(6))
    assert [choice["text"] for choice in found["choices"]] == [alone[index // 2] for index in range(6)]
    assert found["usage"]["completion_tokens"] == 6 * LENGTH
    assert found["usage"]["prompt_tokens"] == sum(
        running.complete(prompt=prompt, max_tokens=1).json()["usage"]["prompt_tokens"] for prompt in PROMPTS
    )
    streamed = [""] * 6
    for event in events_of(running, prompt=PROMPTS, n=2, max_tokens=LENGTH):
        for choice in event["choices"]:
            streamed[choice["index"]] += choice["text"]
    assert streamed == [alone[index // 2] for index in range(6)]


def test_token_ids(running: Running, folder: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = [tokenizer(prompt).input_ids for prompt in PROMPTS]
    alone = [text_of(running, prompt) for prompt in PROMPTS]
    assert text_of(running, ids[0]) == alone[0]
    found = running.complete(prompt=ids, max_tokens=LENGTH, echo=True).json()
    assert [choice["text"] for choice in found["choices"]] == [
        tokenizer.decode(each) + text for each, text in zip(ids, alone, strict=True)
    ]


def test_an_echo(running: Running) -> None:
    whole = text_of(running, PROMPTS[0])
    assert text_of(running, PROMPTS[0], echo=True) == PROMPTS[0] + whole
    events = events_of(running, prompt=PROMPTS[0], max_tokens=LENGTH, echo=True)
    assert "".join(event["choices"][0]["text"] for event in events) == PROMPTS[0] + whole


def test_answers_of_a_client_that_leaves_are_cancelled(running: Running) -> None:
    before = running.outcomes()
    body = {"prompt": PROMPTS, "n": 3, "max_tokens": 4000, "stream": True}
    with running.http.stream("POST", COMPLETION, json=body) as response:
        next(response.iter_bytes())
        until(lambda: running.generation.num_running() == 9)
    until(running.is_idle)
    assert running.outcomes() == {**before, "cancelled": before["cancelled"] + 1}


# --- streams ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", BOTH)
def test_usage_comes_when_it_is_asked_for(running: Running, path: str) -> None:
    """In a chunk of its own, without choices."""
    body: dict[str, Any] = (
        {"prompt": "abc"} if path == COMPLETION else {"messages": [{"role": "user", "content": "abc"}]}
    )
    body["max_tokens"] = 3
    assert all("usage" not in event for event in events_of(running, path, **body))
    *events, last = events_of(running, path, **body, stream_options={"include_usage": True})
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 3
    assert events[-1]["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("path", BOTH)
def test_all_pieces_have_the_form_of_openai(running: Running, path: str) -> None:
    """One id, model and time; nothing that OpenAI's own types refuse."""
    body: dict[str, Any] = (
        {"prompt": "abc"} if path == COMPLETION else {"messages": [{"role": "user", "content": "abc"}]}
    )
    body |= {"max_tokens": 5, "n": 2}
    whole = running.http.post(path, json=body).json()
    events = events_of(running, path, **body, stream_options={"include_usage": True})
    is_chat = path == CHAT
    (chat.ChatCompletion if is_chat else Completion).model_validate(whole, strict=True)
    assert whole["model"] == NAME and abs(whole["created"] - time.time()) < 600
    assert {(event["id"], event["model"], event["created"]) for event in events} == {
        (events[0]["id"], NAME, events[0]["created"])
    }
    if is_chat:
        for event in events:
            chat.ChatCompletionChunk.model_validate(event, strict=True)
        assert [event["choices"][0]["delta"] for event in events[:2]] == [{"role": "assistant", "content": ""}] * 2


@pytest.mark.parametrize("path", BOTH)
def test_usage_comes_with_each_piece(running: Running, path: str) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    *events, last = events_of(running, path, **BODIES[path], n=2, max_tokens=3, stream_options=options)
    counts = [event["usage"]["completion_tokens"] for event in events if "usage" in event]
    assert counts == sorted(counts) and counts[-1] == last["usage"]["completion_tokens"] == 6 and len(set(counts)) > 2
    assert last["choices"] == [] and events[-1]["usage"] == last["usage"]


@pytest.mark.parametrize("path", BOTH)
def test_end_tokens_that_end_no_answer(tmp_path: Path, path: str) -> None:
    end = models.VOCAB_SIZE - 2
    model = models.build("llama", max_position_embeddings=512)
    model.generation_config.eos_token_id = end
    more = {"eos_token": "~", "model_max_length": 512, "chat_template": models.CHAT_TEMPLATE}
    body = {**BODIES[path], "max_tokens": LENGTH, "logit_bias": {str(end): 100}}
    with serving(models.save(model, tmp_path, **more), num_blocks=4) as running:
        for ignores, num_new, reason in ((False, 1, "stop"), (True, LENGTH, "length")):
            found = running.http.post(path, json={**body, "ignore_eos": ignores}).json()
            assert (found["usage"]["completion_tokens"], found["choices"][0]["finish_reason"]) == (num_new, reason)
        refused = running.http.post(path, json={**body, "ignore_eos": True, "structured_outputs": {"regex": "a"}})
        expected = "`ignore_eos` must be left out where an answer must match something, got both: it ends by itself."
        assert (refused.status_code, refused.json()["error"]["message"]) == (400, expected)


# --- how tokens are chosen --------------------------------------------------------------------------------------------

HOT = {"temperature": 1.5, "max_tokens": LENGTH}


def test_a_seed_gives_the_same_answer_in_any_company(running: Running) -> None:
    """Alone, among others, in a stream, and as one of several answers."""
    seeds = range(8)
    alone = [running.complete(prompt="abc", seed=seed, **HOT).json()["choices"][0]["text"] for seed in seeds]
    assert len(set(alone)) == len(alone)

    def ask(seed: int | None) -> str:
        more = {} if seed is None else {"seed": seed, "temperature": 1.5}
        return text_of(running, "abc", **more)

    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        together = list(pool.map(ask, [*seeds, *[None] * 8]))
    assert together[:8] == alone and len(set(together[8:])) == 1
    several = running.complete(prompt="abc", seed=0, n=3, **HOT).json()["choices"]
    again = running.complete(prompt="abc", seed=0, n=3, **HOT).json()["choices"]
    assert several == again and several[0]["text"] == alone[0]
    assert len({choice["text"] for choice in several}) == 3


def test_without_a_seed_answers_differ(running: Running) -> None:
    answers = {running.complete(prompt="abc", **HOT).json()["choices"][0]["text"] for _ in range(3)}
    assert len(answers) == 3


def test_a_seed_holds_when_pages_run_out(folder: str) -> None:
    """Requests start again with what they have written, and draw and count on from there."""
    options = {"temperature": 1.5, "frequency_penalty": 1.0, "max_tokens": 100}
    prompts = [str(index) * 250 for index in range(6)]

    def ask(running: Running, index: int) -> str:
        found = running.complete(prompt=prompts[index], seed=index, **options).json()
        return str(found["choices"][0]["text"])

    with serving(folder, "none", num_blocks=4) as running, concurrent.futures.ThreadPoolExecutor(6) as pool:
        alone = [ask(running, index) for index in range(6)]
        assert list(pool.map(lambda index: ask(running, index), range(6))) == alone


def test_penalties_and_biases(running: Running, folder: str) -> None:
    token = AutoTokenizer.from_pretrained(folder)("q", add_special_tokens=False).input_ids[0]
    assert text_of(running, "abc", logit_bias={str(token): 100}) == "q" * LENGTH
    for name in ("presence_penalty", "frequency_penalty"):
        assert text_of(running, "abc", logit_bias={str(token): 100}, **{name: 0}) == "q" * LENGTH
    other = text_of(running, "abc", frequency_penalty=2, logit_bias={str(token): 4})
    assert other.count("q") < LENGTH
    assert text_of(running, "abc", repetition_penalty=100) != text_of(running, "abc")


def test_log_probabilities_of_a_completion(client: openai.OpenAI, running: Running) -> None:
    """A greedy token is the most likely one, and streams have the same numbers."""
    options: Any = {"model": NAME, "prompt": "abc", "max_tokens": LENGTH, "logprobs": 3}
    found = client.completions.create(**options).choices[0]
    logprobs = found.logprobs
    assert logprobs is not None and logprobs.tokens is not None and logprobs.token_logprobs is not None
    assert "".join(logprobs.tokens) == found.text == text_of(running, "abc")
    assert logprobs.text_offset == list(range(LENGTH))
    assert logprobs.top_logprobs is not None
    for token, value, top in zip(logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True):
        assert len(top) == 3 and top[token] == value == max(top.values()) < 0
    pieces = [chunk.choices[0].logprobs for chunk in client.completions.create(**options, stream=True)]
    streamed = [value for piece in pieces if piece is not None for value in piece.token_logprobs or ()]
    assert streamed == pytest.approx(logprobs.token_logprobs, abs=1e-4)


def test_log_probabilities_of_a_prompt(running: Running, folder: str) -> None:
    """Those of a dense model, but for what the cache stores. The answer goes on as without them."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    options: dict[str, Any] = {"max_tokens": LENGTH, "echo": True, "logprobs": 2}
    for prompts in (PROMPTS, [tokenizer(prompt).input_ids for prompt in PROMPTS]):
        found = running.complete(prompt=prompts, n=2, **options).json()
        for index, choice in enumerate(found["choices"]):
            prompt = PROMPTS[index // 2]
            ids, told = tokenizer(prompt).input_ids, choice["logprobs"]
            with torch.no_grad():
                expected = model(torch.tensor([ids])).logits[0].float().log_softmax(-1)
            assert choice["text"] == tokenizer.decode(ids) + text_of(running, prompt)
            assert "".join(told["tokens"]) == choice["text"] and len(told["tokens"]) == len(ids) + LENGTH
            assert told["text_offset"] == [*range(len(choice["text"]))]
            assert told["token_logprobs"][0] is told["top_logprobs"][0] is None
            scores = [expected[place, token].item() for place, token in enumerate(ids[1:])]
            assert told["token_logprobs"][1 : len(ids)] == pytest.approx(scores, abs=0.1)
            for place, top in enumerate(told["top_logprobs"][1 : len(ids)]):
                assert max(top.values()) == pytest.approx(expected[place].max().item(), abs=0.1)
    assert found["usage"]["completion_tokens"] == 6 * LENGTH
    assert found["usage"]["prompt_tokens"] == sum(len(tokenizer(prompt).input_ids) for prompt in PROMPTS)


def test_log_probabilities_of_a_prompt_in_a_stream(running: Running) -> None:
    options: dict[str, Any] = {"prompt": PROMPTS[0], "max_tokens": LENGTH, "echo": True, "logprobs": 0}
    whole = running.complete(**options).json()["choices"][0]
    events = [event["choices"][0] for event in events_of(running, **options)]
    assert "".join(event["text"] for event in events) == whole["text"]
    told = [value for event in events if event["logprobs"] for value in event["logprobs"]["token_logprobs"]]
    assert told[0] is None and told[1:] == pytest.approx(whole["logprobs"]["token_logprobs"][1:], abs=1e-4)


def test_stop_strings_are_not_looked_for_in_a_prompt(running: Running) -> None:
    whole = text_of(running, PROMPTS[0])
    options: dict[str, Any] = {"prompt": PROMPTS[0], "max_tokens": LENGTH, "echo": True, "logprobs": 0}
    found = running.complete(**options, stop=[PROMPTS[0][2:5], whole[4:6]]).json()["choices"][0]
    assert found["text"] == PROMPTS[0] + whole[: whole.index(whole[4:6])] and found["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("name", "value"), [("frequency_penalty", 0.5), ("repetition_penalty", 2), ("structured_outputs", {"regex": "a"})]
)
def test_what_does_not_go_with_log_probabilities_of_a_prompt(running: Running, name: str, value: Any) -> None:
    found = running.complete(prompt="abc", echo=True, logprobs=1, **{name: value})
    expected = f"`{name}` must be left out where `logprobs` come with `echo`, got {value}."
    assert (found.status_code, found.json()["error"]["message"]) == (400, expected)


def test_a_prompt_whose_tokens_would_end_it(tmp_path: Path) -> None:
    """One at the beginning, such as the one that many models begin with, ends nothing."""
    model = models.build("llama", max_position_embeddings=512)
    end = model.generation_config.eos_token_id = models.VOCAB_SIZE - 2
    folder = models.save(model, tmp_path, eos_token="~", model_max_length=512)
    with serving(folder, num_blocks=4) as running:
        options: dict[str, Any] = {"max_tokens": 1, "echo": True, "logprobs": 1}
        assert len(running.complete(prompt=[end, 5, 6], **options).json()["choices"][0]["logprobs"]["tokens"]) == 4
        found = running.complete(prompt=[5, end], **options)
        expected = "`prompt` must have no end token but at its beginning where `logprobs` come with `echo`, got "
        assert (found.status_code, found.json()["error"]["message"]) == (400, f"{expected}{end}.")


def test_log_probabilities_of_a_chat(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "abc"}]
    options: Any = {"model": NAME, "messages": messages, "max_tokens": LENGTH, "logprobs": True}
    found = client.chat.completions.create(**options, top_logprobs=2).choices[0]
    assert found.logprobs is not None and found.logprobs.content is not None
    assert "".join(each.token for each in found.logprobs.content) == found.message.content
    for each in found.logprobs.content:
        assert each.bytes == list(each.token.encode())
        assert len(each.top_logprobs) == 2 and each.top_logprobs[0].logprob == each.logprob
    plain = client.chat.completions.create(**options).choices[0].logprobs
    assert plain is not None and plain.content is not None and plain.content[0].top_logprobs == []
    assert found.message.content is not None
    stop = found.message.content[4:7]
    events = client.chat.completions.create(**options, stop=stop, stream=True)
    streamed = [each for event in events if (found_ := event.choices[0].logprobs) for each in found_.content or ()]
    assert "".join(each.token for each in streamed) == found.message.content.partition(stop)[0]


def test_a_token_that_is_no_whole_character_has_no_bytes() -> None:
    piece = Piece(0, [""], [Logprob("\N{REPLACEMENT CHARACTER}", -math.inf, [], 0)], "length")
    (content,) = ChatForm("id", NAME).choice(piece)["logprobs"]["content"]
    assert (content["bytes"], content["logprob"]) == (None, -9999.0)


# --- names and keys ---------------------------------------------------------------------------------------------------


def sentence_piece() -> PreTrainedTokenizerFast:
    """A tokenizer of Llama 2's form: a space belongs to the word behind it, and text leaves out the first one."""
    words = ["\u2581The", "\u2581river", "\u2581is", "\u2581", *"Theriv"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    vocab = {token: index for index, token in enumerate(dict.fromkeys(tokens))}
    inner = RawTokenizer(BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    inner.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def passed_on(tokens: list[str], **options: Any) -> list[str]:
    """What a `Writer` passes on for each of these tokens, and at the end."""
    tokenizer = sentence_piece()
    for name in ("before", "prompt"):
        options[name] = tokenizer.convert_tokens_to_ids(options.get(name, []))
    writer = Writer(tokenizer, **options)
    pieces = [writer.write([token]) for token in tokenizer.convert_tokens_to_ids(tokens)]
    return ["".join(map(str, piece)) for piece in [*pieces, writer.finish()]]


def test_the_text_behind_a_prompt_begins_with_its_space() -> None:
    assert passed_on(["\u2581is", "\u2581The"], before=["<s>", "\u2581The", "\u2581river"]) == [" is", " The", ""]
    assert passed_on(["\u2581is", "\u2581The"]) == ["is", " The", ""]  # as an answer of a chat


def test_the_end_of_a_prompt_begins_with_a_whole_character() -> None:
    tokenizer = sentence_piece()

    def end(text: list[str]) -> list[str]:
        return tokenizer.convert_ids_to_tokens(writing.end_of(tokenizer, tokenizer.convert_tokens_to_ids(text)))

    character = ["<0xE9>", "<0xBE>", "<0x98>"]
    assert end(["\u2581The", *3 * character]) == 2 * character
    assert end(["\u2581The", *character]) == ["\u2581The", *character]
    assert end(["\u2581The", *2 * character, *character[:2]]) == []
    assert end([]) == []


def test_bytes_that_are_no_text_fail_no_answer() -> None:
    """The tokenizer takes back the line that it had already told."""
    assert passed_on(["<0x0A>", "<0xE2>", "\u2581is", "i"]) == ["\n", "", "\N{REPLACEMENT CHARACTER} is", "i", ""]
    assert passed_on(["<0x0A>", "<0xE2>"]) == ["\n", "", "\N{REPLACEMENT CHARACTER}"]
    assert passed_on(["\u2581is", "<0xC3>", "<0xA9>"]) == ["is", "", "\u00e9", ""]


def test_the_beginning_that_the_tokenizer_adds_takes_no_place_in_an_echo() -> None:
    tokenizer = sentence_piece()
    prompt = tokenizer.convert_tokens_to_ids(["<s>", "\u2581The", "\u2581river"])
    told = functools.partial(writing.text_of, tokenizer)
    for echo, begins in (("The river", [0, 0, 3, 9]), ("<s> The river", [0, 3, 7, 13])):
        writer = Writer(tokenizer, (), None, told, prompt, echo, prompt)
        found = [TokenLogprobs(-1.0, [])] * 3
        writer.write([*prompt[1:], *tokenizer.convert_tokens_to_ids(["\u2581is"])], found)
        writer.finish()
        assert [each.begin for each in writer.taken_logprobs() or []] == begins


def test_the_model_has_one_name(client: openai.OpenAI, running: Running) -> None:
    (listed,) = client.models.list().data
    assert client.models.retrieve(NAME) == listed
    assert (listed.id, listed.object, listed.owned_by) == (NAME, "model", "local")
    assert abs(listed.created - time.time()) < 3600
    assert client.completions.create(model=NAME, prompt="a", max_tokens=1).model == NAME


def test_another_model_is_not_found(client: openai.OpenAI, folder: str) -> None:
    """Nor is this one by the name of its folder."""
    with pytest.raises(openai.NotFoundError, match=f"`model` must be '{NAME}' or left out, got ") as told:
        client.completions.create(model=folder, prompt="a")
    assert (told.value.code, told.value.param, told.value.type) == ("model_not_found", "model", "invalid_request_error")
    with pytest.raises(openai.NotFoundError, match=f"there is no model 'gpt', only '{NAME}'.") as told:
        client.models.retrieve("gpt")
    assert told.value.code == "model_not_found"


def test_a_key(folder: str) -> None:
    with serving(folder, num_blocks=2, api_key="schlüssel") as running:
        for path in ("/v1/models", "/v1/models/x", "/metrics", "/nowhere"):
            for headers in ({}, {"authorization": "Bearer schlussel"}, {"authorization": "schlussel"}):
                refused = running.http.get(path, headers=headers)
                assert refused.status_code == 401, path
                assert refused.headers["www-authenticate"] == "Bearer"
                assert refused.json()["error"]["code"] == "invalid_api_key"
        refused = running.complete(prompt="a")
        assert refused.json()["error"]["message"].startswith("the API key must be that of this server, got another")
        assert running.http.get("/health").status_code == 200
        headers = [(b"authorization", "Bearer schlüssel".encode())]
        assert running.http.get("/v1/models", headers=headers).status_code == 200


def test_a_chat_template_of_the_command(folder: str) -> None:
    """Also one that refuses some chats."""
    template = (
        "{% if messages | length == 1 and messages[0].content == 'Hello' %}{{ raise_exception('no') }}{% endif %}abc"
    )
    with serving(folder, num_blocks=2, chat_template=template) as running:
        messages = [{"role": "user", "content": "something else"}]
        answer = running.http.post(CHAT, json={"messages": messages, "max_tokens": LENGTH}).json()
        assert answer["choices"][0]["message"]["content"] == text_of(running, "abc")
        refused = running.http.post(CHAT, json={"messages": [{"role": "user", "content": "Hello"}]})
        assert refused.status_code == 400
        assert refused.json()["error"]["message"] == "`messages` must fit the model's chat template, got: no."


# --- the page ---------------------------------------------------------------------------------------------------------


def rows_of_the_page() -> dict[str, list[str]]:
    page = (ROOT / "docs" / "serve.md").read_text(encoding="utf-8")
    section = page.split("\n## Fields\n")[1].split("\n## ")[0]
    found = {}
    for line in re.findall(r"^\| `.*$", section, re.MULTILINE):
        cells = [cell.strip() for cell in line.strip("| ").split(" | ")]
        for name in re.findall(r"`(\w+)`", cells[0]):
            found[name] = cells[1:]
    return found


def test_the_page_lists_every_field() -> None:
    """With its routes and the values that it may have; those that are not served say so."""
    rows, routes = rows_of_the_page(), {BOTH: "both", (CHAT,): "chat", (COMPLETION,): "completions"}
    assert rows.keys() == FIELDS.keys()
    for name, field in FIELDS.items():
        where, expected, effect = rows[name]
        assert where == routes[field.routes], name
        assert expected.replace("`", "") == field.expected.replace("`", ""), name
        assert (effect == "-") == (not field.is_served), name


def test_every_field_of_openai_is_known() -> None:
    known = {
        CHAT: get_type_hints(chat_create_params.CompletionCreateParamsStreaming),
        COMPLETION: get_type_hints(completion_create_params.CompletionCreateParamsStreaming),
    }
    for route, names in known.items():
        assert [name for name in names if name not in FIELDS or route not in FIELDS[name].routes] == []


@pytest.mark.parametrize("name", [name for name, field in FIELDS.items() if not field.is_served])
def test_what_is_not_served_is_refused_by_name(running: Running, name: str) -> None:
    field = FIELDS[name]
    for path in field.routes:
        response = running.http.post(path, json={**BODIES[path], name: {"some": "value"}, "max_tokens": 1})
        if field.expected == "anything":
            assert response.status_code == 200
        else:
            told = f"`{name}` must be {field.expected}, since it is not served, got {{'some': 'value'}}."
            assert response.status_code == 400
            assert (response.json()["error"]["message"], response.json()["error"]["param"]) == (told, name)
