"""`/v1/responses`: OpenAI's own client reads what comes, and each field works or is refused by name."""

from __future__ import annotations

import concurrent.futures
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_type_hints

import models
import openai
import pytest
from openai.types.responses import Response, response_create_params

from hf_kvquant.upstream.releases import HAS_PAGES

if not HAS_PAGES:
    pytest.skip("transformers' paged cache has another design", allow_module_level=True)

from servers import NAME, Running, held
from transformers import AutoTokenizer
from transformers.cli.serving.utils import ReasoningText
from waiting import until

from hf_kvquant.common.errors import RefusedRequest
from hf_kvquant.serving.fields import CHAT
from hf_kvquant.serving.forms import Usage
from hf_kvquant.serving.pieces import Logprob, Piece
from hf_kvquant.serving.reading import Reader
from hf_kvquant.serving.response_form import ResponseForm
from hf_kvquant.serving.responses import FIELDS, ROUTE, chat_of
from hf_kvquant.serving.structured import shown
from hf_kvquant.serving.tools import ToolCall
from hf_kvquant.serving.writing import Writer

ROOT = Path(__file__).resolve().parents[1]
LENGTH = 12
END = "~"
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }} Call with <tool_call>.{% endif %}"
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}"
    "{% for call in message.tool_calls or [] %}{{ call.function.arguments | tojson }}{% endfor %}</>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
TIME: dict[str, Any] = {"type": "function", "name": "get_time", "parameters": NOTHING}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny model whose tokens are characters, with a chat template in the form of Hermes."""
    path = tmp_path_factory.mktemp("model")
    model = models.build("llama", max_position_embeddings=4096)
    model.generation_config.eos_token_id = models.VOCAB_SIZE - 2
    return models.save(model, path, eos_token=END, model_max_length=4096, chat_template=TEMPLATE)


def chat_answer(running: Running, messages: list[dict[str, Any]], **more: Any) -> str:
    """What a chat with these messages answers."""
    body = {"messages": messages, "max_tokens": LENGTH, **more}
    return str(running.http.post(CHAT, json=body).json()["choices"][0]["message"]["content"])


# --- answers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "in one piece"])
def test_an_answer_is_that_of_the_chat(running: Running, client: openai.OpenAI, stream: bool) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "abc"}]
    expected = chat_answer(running, messages)
    options: Any = {"model": NAME, "input": "abc", "instructions": "Be brief.", "max_output_tokens": LENGTH}
    if stream:
        events: list[Any] = list(client.responses.create(**options, stream=True))
        kinds, found = [event.type for event in events], events[-1].response
        assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == expected
        deltas = kinds.count("response.output_text.delta")
        assert kinds == [
            "response.created",
            "response.in_progress",
            "response.output_item.added",
            "response.content_part.added",
            *["response.output_text.delta"] * deltas,
            "response.output_text.done",
            "response.content_part.done",
            "response.output_item.done",
            "response.incomplete" if found.status == "incomplete" else "response.completed",
        ]
        assert deltas > 1
    else:
        found = client.responses.create(**options)
    assert found.output_text == expected and found.object == "response" and found.model == NAME
    assert found.instructions == "Be brief." and found.max_output_tokens == LENGTH and found.store is False
    assert found.usage is not None and found.usage.output_tokens == LENGTH
    assert found.usage.total_tokens == found.usage.input_tokens + LENGTH
    assert found.status == "incomplete" and found.incomplete_details is not None
    assert found.incomplete_details.reason == "max_output_tokens"


def test_an_answer_that_is_complete(running: Running, client: openai.OpenAI) -> None:
    ends = {"logit_bias": {str(models.VOCAB_SIZE - 2): 100}}
    found = client.responses.create(model=NAME, input="abc", extra_body=ends)
    assert (found.status, found.incomplete_details, found.output_text) == ("completed", None, "")
    (message,) = found.output
    assert message.type == "message" and message.status == "completed"


def test_a_conversation_goes_on_with_what_came(running: Running, client: openai.OpenAI) -> None:
    options: Any = {"model": NAME, "max_output_tokens": LENGTH}
    first = client.responses.create(input=[{"role": "user", "content": "abc"}], **options)
    again: Any = [{"role": "user", "content": "abc"}, *first.output, {"role": "user", "content": "def"}]
    second = client.responses.create(input=again, **options)
    messages = [
        {"role": "user", "content": "abc"},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "def"},
    ]
    assert second.output_text == chat_answer(running, messages)


def test_fields_that_say_how_tokens_are_chosen(running: Running, client: openai.OpenAI) -> None:
    settings = {"temperature": 1.5, "top_p": 0.9, "seed": 3, "top_k": 20, "frequency_penalty": 1.0}
    expected = chat_answer(running, [{"role": "user", "content": "abc"}], **settings)
    named = {name: settings.pop(name) for name in ("temperature", "top_p")}
    found = client.responses.create(
        model=NAME,
        input="abc",
        max_output_tokens=LENGTH,
        **named,
        extra_body=settings,  # type: ignore[arg-type]
    )
    assert found.output_text == expected != chat_answer(running, [{"role": "user", "content": "abc"}])
    assert (found.temperature, found.top_p) == (1.5, 0.9)


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "in one piece"])
def test_calls_of_tools(client: openai.OpenAI, stream: bool) -> None:
    pytest.importorskip("llguidance", reason="pinned for Python 3.11 and later")
    options: Any = {"model": NAME, "tools": [TIME], "max_output_tokens": 400}
    first: Any = {**options, "input": "abc", "tool_choice": {"type": "function", "name": "get_time"}}
    if stream:
        with client.responses.stream(**first) as events:
            found: Any = events.get_final_response()
    else:
        found = client.responses.create(**first)
    (call,) = found.output
    assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "get_time", {})
    assert found.status == "completed"
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "noon"}
    sent = {name: value for name, value in call.to_dict().items() if name != "parsed_arguments"}
    again: Any = [{"role": "user", "content": "abc"}, sent, result]
    assert client.responses.create(input=again, **{**options, "max_output_tokens": 5}).output_text


def test_structured_text(client: openai.OpenAI) -> None:
    pytest.importorskip("llguidance", reason="pinned for Python 3.11 and later")
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
    form: Any = {"format": {"type": "json_schema", "name": "number", "schema": schema, "strict": True}}
    found = client.responses.create(model=NAME, input="abc", text=form, max_output_tokens=200)
    assert json.loads(found.output_text)["n"] in (1, 2)


def test_thoughts_and_calls_are_items_of_their_own() -> None:
    """In one piece as in a stream."""
    pieces = [
        Piece(0, [ReasoningText("\nhm")], [Logprob("hm", -1.0, [], 0)]),
        Piece(0, [ReasoningText(" yes"), "\n\n"], [Logprob("</think>", -1.0, [], 0)]),
        Piece(0, ["It is"], [Logprob("It is", -2.0, [], 0)]),
        Piece(0, [" noon", ToolCall("get_time", "{}", 0, "c1")], None, "tool_calls"),
    ]
    streamed, whole = ResponseForm("r", NAME, 7), ResponseForm("r", NAME, 7)
    events = streamed.opening(1) + "".join(map(streamed.chunks, pieces)) + streamed.closing(Usage(3, 4))
    parts = [event.split("\ndata: ") for event in events.strip().split("\n\nevent: ")]
    bodies = [json.loads(body) for _, body in parts]
    assert [body["sequence_number"] for body in bodies] == [*range(len(bodies))]
    assert [body["type"] for body in bodies] == [name.removeprefix("event: ") for name, _ in parts]
    together = Piece(0, [])
    for piece in pieces:
        whole.gather(together, piece)
    whole.choice(together)
    found = whole.whole([{}], Usage(3, 4))
    assert found == bodies[-1]["response"] and Response.model_validate(found).output_text == "It is noon"
    thoughts, text, call = found["output"]
    assert thoughts["content"] == [{"type": "reasoning_text", "text": "hm yes"}]
    assert [each["token"] for each in text["content"][0]["logprobs"]] == ["It is"]
    assert (text["content"][0]["text"], call["call_id"], found["status"]) == ("It is noon", "c1", "completed")


def test_tokens_belong_to_the_text_that_they_are_of(folder: str) -> None:
    """Also where all of an answer comes at once."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    thoughts_field = {"open": "<think>", "close": "</think>", "content": "text"}
    fields = {"reasoning_content": thoughts_field, "content": {"content": "text"}}
    reader = Reader({"start_anchor_pattern": r"\A", "fields": fields}, "")
    tokens = tokenizer("<think>hm</think>noon", add_special_tokens=False).input_ids
    found = [SimpleNamespace(logprob=-1.0, top=[]) for _ in tokens]
    output: Any = SimpleNamespace(generated_tokens=tokens, logprobs=found, is_finished=lambda: True)
    writer = Writer(tokenizer, reader=reader, text_of=lambda token: str(tokenizer.decode([token])))
    form, whole = ResponseForm("r", NAME, 7), Piece(0, [])
    form.gather(whole, writer.piece(0, output, ()))
    thoughts, text = form.whole([form.choice(whole)], Usage(1, len(tokens)))["output"]
    assert (thoughts["content"][0]["text"], text["content"][0]["text"]) == ("hm", "noon")
    assert "".join(each["token"] for each in text["content"][0]["logprobs"]) == "noon"


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "in one piece"])
def test_a_failure_in_the_middle(running: Running, stream: bool) -> None:
    with held(running), concurrent.futures.ThreadPoolExecutor(1) as pool:
        body = {"input": "abc", "stream": stream, "max_output_tokens": LENGTH}
        asking = pool.submit(running.http.post, ROUTE, json=body)
        until(lambda: bool(running.app.requests.answers))
        assert running.app.requests.loop is not None
        running.app.requests.loop.call_soon_threadsafe(running.app.requests.end_all, "failed", "it broke", 503)
        answer = asking.result()
    until(running.is_idle)
    if not stream:
        assert answer.status_code == 503 and answer.json()["error"]["message"] == "it broke"
        return
    *_, error, failed = [json.loads(each.partition("\ndata: ")[2]) for each in answer.text.strip().split("\n\n")]
    assert (error["type"], error["message"]) == ("error", "it broke")
    assert failed["type"] == "response.failed" and failed["response"]["status"] == "failed"
    assert failed["response"]["error"] == {"code": "server_error", "message": "it broke"}


# --- requests ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("hi", [{"role": "user", "content": "hi"}]),
        (
            [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}],
            [{"role": "user", "content": "a b"}],
        ),
        (
            [
                {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]},
                {"type": "reasoning", "id": "rs", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
                {"type": "function_call", "id": "f", "call_id": "c", "name": "n", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c", "output": "r"},
            ],
            [
                {"role": "user", "content": "a"},
                {
                    "role": "assistant",
                    "content": "",
                    "reasoning_content": "hm",
                    "tool_calls": [{"id": "c", "type": "function", "function": {"name": "n", "arguments": "{}"}}],
                },
                {"role": "tool", "tool_call_id": "c", "content": "r"},
            ],
        ),
        (
            [
                {"role": "user", "content": "a"},
                {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
                {"role": "user", "content": "b"},
                {"role": "assistant", "content": "c"},
            ],
            [
                {"role": "user", "content": "a"},
                {"role": "assistant", "content": "", "reasoning_content": "hm"},
                {"role": "user", "content": "b"},
                {"role": "assistant", "content": "c"},
            ],
        ),
    ],
    ids=["text", "parts", "items", "an answer that ended in its thoughts"],
)
def test_input_becomes_messages(given: Any, expected: list[dict[str, Any]]) -> None:
    assert chat_of({"input": given})["messages"] == expected
    system = {"role": "system", "content": "Be brief."}
    assert chat_of({"input": given, "instructions": "Be brief."})["messages"] == [system, *expected]


def test_null_stands_for_leaving_out() -> None:
    """Clients send back what they have read, with each key of its type."""
    call = {"type": "function_call", "call_id": "c", "name": "n", "arguments": "{}", "id": None, "namespace": None}
    given = [{"role": "user", "content": "a", "phase": None, "more": None}, call]
    tool = {**TIME, "strict": None, "defer_loading": None}
    found = chat_of({"input": given, "tools": [tool]})
    assert found["messages"] == chat_of({"input": [{"role": "user", "content": "a"}, {**call}]})["messages"]
    assert found["tools"] == chat_of({"input": given, "tools": [TIME]})["tools"]


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "in one piece"])
def test_log_probabilities(running: Running, client: openai.OpenAI, stream: bool) -> None:
    """They are those of the chat."""
    body = {"messages": [{"role": "user", "content": "abc"}], "max_tokens": LENGTH, "logprobs": True, "top_logprobs": 2}
    expected = running.http.post(CHAT, json=body).json()["choices"][0]["logprobs"]["content"]
    options: Any = {"model": NAME, "input": "abc", "max_output_tokens": LENGTH, "top_logprobs": 2}
    options["include"] = ["message.output_text.logprobs"]
    if stream:
        events: list[Any] = list(client.responses.create(**options, stream=True))
        deltas = [each.to_dict() for event in events if event.type.endswith("text.delta") for each in event.logprobs]
        assert deltas == expected
        found = events[-1].response
    else:
        found = client.responses.create(**options)
    assert [each.to_dict() for each in found.output[0].content[0].logprobs] == expected
    assert found.top_logprobs == 2
    assert client.responses.create(**{**options, "include": [], "top_logprobs": 0}).output[0].content[0].logprobs == []  # type: ignore[union-attr]


def test_the_token_that_ends_a_text_has_a_log_probability_too(client: openai.OpenAI) -> None:
    ends = {"logit_bias": {str(models.VOCAB_SIZE - 2): 100}}
    include: Any = ["message.output_text.logprobs"]
    (message,) = client.responses.create(model=NAME, input="abc", include=include, extra_body=ends).to_dict()["output"]  # type: ignore[misc]
    assert [each["token"] for each in message["content"][0]["logprobs"]] == [END]


def test_what_codex_sends_besides(running: Running) -> None:
    more = {
        "include": ["reasoning.encrypted_content"],
        "reasoning": {"summary": "auto"},
        "client_metadata": {"session_id": "x"},
        "prompt_cache_key": "x",
        "store": False,
        "parallel_tool_calls": True,
    }
    body = {"input": "abc", "max_output_tokens": LENGTH}
    texts = [running.http.post(ROUTE, json={**body, **each}).json()["output"][0]["content"] for each in ({}, more)]
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("field", "value", "culprit"),
    [
        ("input", [{"role": "user", "content": "a"}, {"type": "computer_call", "id": "b"}], 1),
        ("tools", [TIME, TIME, {"type": "namespace", "name": "agents", "tools": [TIME]}, {"type": "web_search"}], 2),
    ],
)
def test_what_is_wrong_in_a_list_is_shown(field: str, value: list[Any], culprit: int) -> None:
    with pytest.raises(RefusedRequest) as told:
        chat_of({"input": "a", field: value})
    assert told.value.message.endswith(f", got {shown(value[culprit])}.")


def test_an_effort_to_think_is_that_of_a_chat() -> None:
    assert chat_of({"input": "a", "reasoning": {"effort": "low", "summary": None}})["reasoning_effort"] == "low"
    assert "reasoning_effort" not in chat_of({"input": "a", "reasoning": {"effort": None, "summary": "auto"}})


def test_instructions_at_the_beginning_become_one_message() -> None:
    given = [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]
    (first, _) = chat_of({"input": given, "instructions": "c"})["messages"]
    assert first == {"role": "system", "content": "c\n\na"}
    several = [{"role": "developer", "content": "d"}, {"role": "developer", "content": [{"type": "text", "text": "e"}]}]
    one = {"role": "developer", "content": "d\n\ne"}
    assert chat_of({"input": [*several, given[1]]})["messages"] == [one, given[1]]
    assert len(chat_of({"input": [given[1], *several]})["messages"]) == 3
    assert chat_of({"input": several})["messages"] == [one]


INPUT = "`input` must be a text, or a list of messages of texts, calls and their outputs, got "


@pytest.mark.parametrize(
    ("body", "message", "param"),
    [
        ({}, f"{INPUT}None.", "input"),
        ({"input": []}, f"{INPUT}[].", "input"),
        ({"input": [{"type": "input_image", "image_url": "x"}]}, INPUT, "input"),
        (
            {"input": [{"role": "user", "content": "a"}, {"type": "item_reference", "id": "x"}]},
            "`input` must have items as they are, since none are stored, got {'type': 'item_reference', 'id': 'x'}. M",
            "input",
        ),
        (
            {"input": "a", "previous_response_id": "x"},
            "`previous_response_id` must be left out in favour of all items in `input`, since it is not served",
            "previous_response_id",
        ),
        ({"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "x"}]}]}, INPUT, "input"),
        ({"input": [{"role": "usr", "content": "x"}]}, "the `role` of a message must be one of system, d", "input"),
        ({"input": [{"type": "reasoning", "summary": []}]}, "`input` must have a message, got none. Write", "input"),
        (
            {"input": [{"type": "input_text", "text": "x"}, {"role": "user", "content": "x"}]},
            "`input` must have messages or parts of one, got both: ",
            "input",
        ),
        ({"input": "a", "max_output_tokens": 0}, "`max_output_tokens` must be an integer of at least 1", None),
        ({"input": "a", "max_output_tokens": 9999}, "prompt and `max_output_tokens` must fit, got ", None),
        ({"input": "a", "top_logprobs": 3}, "`top_logprobs` must come with 'message.output_text.logprobs' in", None),
        ({"input": "a", "include": ["x"]}, '`include` must be a list of "message.output_text.logprobs" and', None),
        ({"input": "a", "reasoning": {"effort": "low"}}, "`reasoning` must be left out, since the model", "reasoning"),
        ({"input": "a", "reasoning": {"effort": 3}}, "`reasoning` must be an object with `effort` and", "reasoning"),
        ({"input": "a", "max_tokens": 3}, "`max_tokens` must be left out, since /v1/responses has ", None),
        ({"input": "a", "model": "x"}, f"`model` must be '{NAME}' or left out, got 'x'.", "model"),
        ({"input": "a", "tools": [{"type": "web_search"}]}, "`tools` must be a list of up to 128 functions", "tools"),
        ({"input": "a", "tool_choice": "required"}, "`tool_choice` must come with `tools`, got it alone.", None),
        ({"input": "a", "text": {"format": {"type": "xml"}}}, "`text` must be an object with a `format`", "text"),
        ({"input": "a", "text": {"verbosity": "low"}}, "`text` must be an object with a `format`", "text"),
    ],
)
def test_wrong_requests(running: Running, body: dict[str, Any], message: str, param: str | None) -> None:
    found = running.http.post(ROUTE, json=body)
    assert found.status_code == (404 if "model" in body else 400), found.text
    error = found.json()["error"]
    assert error["message"].startswith(message)
    assert param is None or error["param"] == param


@pytest.mark.parametrize("name", [name for name, field in FIELDS.items() if not field.is_served])
def test_what_is_not_served_is_refused_by_name(name: str) -> None:
    body = {"input": "a", name: {"some": "value"}}
    if FIELDS[name].expected == "anything":
        assert chat_of(body)["messages"]
        return
    with pytest.raises(RefusedRequest) as told:
        chat_of(body)
    assert told.value.message == (
        f"`{name}` must be {FIELDS[name].expected}, since it is not served, got {{'some': 'value'}}."
    )


def test_every_field_of_openai_is_known() -> None:
    assert get_type_hints(response_create_params.ResponseCreateParamsStreaming).keys() <= FIELDS.keys()


def test_the_page_lists_every_field() -> None:
    page = (ROOT / "docs" / "serve.md").read_text(encoding="utf-8")
    rows = {}
    for line in re.findall(r"^\| `.*$", page.split("\n## Responses\n")[1].split("\n## ")[0], re.MULTILINE):
        names, expected, effect = (cell.strip() for cell in line.strip("| ").split(" | "))
        rows.update(dict.fromkeys(re.findall(r"`(\w+)`", names), (expected.replace("`", ""), effect)))
    assert rows.keys() == FIELDS.keys()
    for name, field in FIELDS.items():
        assert rows[name][0] == field.expected.replace("`", ""), name
        assert (rows[name][1] == "-") == (not field.is_served), name
