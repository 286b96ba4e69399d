"""Structured output: answers that match a grammar, alone and in any company, and the errors of those that cannot."""

from __future__ import annotations

import concurrent.futures
import json
import re
from pathlib import Path
from typing import Any

import models
import openai
import pytest
import torch
from pydantic import BaseModel
from transformers import AutoTokenizer

from hf_kvquant.upstream.releases import HAS_PAGES

if not HAS_PAGES:
    pytest.skip("transformers' paged cache has another design", allow_module_level=True)
pytest.importorskip("llguidance", reason="pinned for Python 3.11 and later")

from servers import NAME, Running, serving

from hf_kvquant.batching import grammars as batching_grammars
from hf_kvquant.batching.grammars import Grammars
from hf_kvquant.common.errors import BadGrammar, NoGrammars
from hf_kvquant.serving import chats
from hf_kvquant.serving.fields import CHAT, COMPLETION
from hf_kvquant.serving.structured import schema_grammar, written

END = "~"
MESSAGES: Any = [{"role": "user", "content": "abc"}]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"enum": ["Ada", "Bo"]}, "age": {"type": "integer", "minimum": 0, "maximum": 150}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
FORMAT: dict[str, Any] = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}


class Person(BaseModel):
    """As a client has it."""

    name: str
    age: int


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny model whose tokens are characters. It has an end token, which it does not write by itself."""
    path = tmp_path_factory.mktemp("model")
    model = models.build("llama", max_position_embeddings=4096)
    model.generation_config.eos_token_id = models.VOCAB_SIZE - 2
    options: dict[str, Any] = {"model_max_length": 4096, "chat_template": models.CHAT_TEMPLATE}
    return models.save(model, path, eos_token=END, **options)


def told(running: Running, path: str = CHAT, **fields: Any) -> tuple[str, str]:
    """The message and the field of a refusal."""
    body = {"messages": MESSAGES} if path == CHAT else {"prompt": "abc"}
    response = running.http.post(path, json={**body, **fields})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    return error["message"], error["param"]


def text_of(running: Running, prompt: str = "abc", **fields: Any) -> str:
    response = running.complete(prompt=prompt, **{"max_tokens": 200, **fields})
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["text"])


# --- answers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0, 1.5])
@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "in one piece"])
def test_an_answer_fits_its_schema(client: openai.OpenAI, stream: bool, temperature: float) -> None:
    """It ends by itself, however long it may be."""
    options: Any = {"model": NAME, "messages": MESSAGES, "max_tokens": 1000, "temperature": temperature, "seed": 3}
    options |= {"response_format": FORMAT, "n": 3}
    if stream:
        texts, reasons = [""] * 3, [""] * 3
        for chunk in client.chat.completions.create(**options, stream=True):
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
                reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    else:
        choices = client.chat.completions.create(**options).choices
        texts, reasons = [str(each.message.content) for each in choices], [each.finish_reason for each in choices]
    for text in texts:
        found = json.loads(text)
        assert found.keys() == {"name", "age"} and found["name"] in ("Ada", "Bo") and 0 <= found["age"] <= 150
    assert reasons == ["stop"] * 3
    assert (len(set(texts)) == 1) == (temperature == 0)


def test_the_client_parses_an_answer(client: openai.OpenAI) -> None:
    """With the schema that it makes of a class."""
    found = client.chat.completions.parse(model=NAME, messages=MESSAGES, response_format=Person, temperature=1, seed=1)
    assert isinstance(found.choices[0].message.parsed, Person)


def test_any_object(client: openai.OpenAI) -> None:
    """White space has a bound, so a model that says nothing else gets on."""
    options: Any = {"model": NAME, "messages": MESSAGES, "response_format": {"type": "json_object"}}
    found = client.chat.completions.create(**options, max_tokens=2000, logit_bias={"94": 0}).choices[0]
    assert found.message.content is not None and found.message.content.startswith("{")
    blank = client.chat.completions.create(**options, max_tokens=300, logit_bias={"0": 100}).choices[0]
    assert blank.message.content is not None and "  " in blank.message.content
    assert not re.search(r"\A[{]\s{33}", blank.message.content)


@pytest.mark.parametrize(
    "structure, pattern",
    [
        ({"regex": "[a-c]{2,5}x/y"}, "[a-c]{2,5}x/y"),
        ({"choice": ["yes", 'n"o\\']}, r'yes|n"o\\'),
        ({"grammar": 'start: "<" WORD ">"\nWORD: /[a-z]{1,4}/'}, "<[a-z]{1,4}>"),
        ({"grammar": 'root ::= "a" [0-9] "b"'}, "a[0-9]b"),
        ({"json": {"type": "boolean"}}, "true|false"),
        ({"json": json.dumps({"enum": [1, 2]}), "regex": None}, "1|2"),
    ],
    ids=["regex", "choice", "Lark", "GBNF", "schema", "schema as text"],
)
def test_structured_outputs(running: Running, structure: dict[str, Any], pattern: str) -> None:
    """On both routes."""
    for seed in range(3):
        fields: dict[str, Any] = {"structured_outputs": structure, "temperature": 2, "seed": seed}
        assert re.fullmatch(pattern, text_of(running, **fields))
    body = {"messages": MESSAGES, "structured_outputs": structure, "max_tokens": 100}
    message = running.http.post(CHAT, json=body).json()["choices"][0]["message"]
    assert re.fullmatch(pattern, message["content"])


def test_structured_and_free_requests_share_steps(running: Running) -> None:
    """None changes another, and free ones take no notice."""
    kinds: list[dict[str, Any]] = [
        {},
        {"structured_outputs": {"regex": "[0-9]{30}"}},
        {"temperature": 1.5, "seed": 5},
        {"structured_outputs": {"json": SCHEMA}, "temperature": 1.5, "seed": 6},
        {"structured_outputs": {"regex": "(ab|cd){20}"}, "presence_penalty": 1.0},
    ]
    alone = [text_of(running, **{"max_tokens": 30, **kind}) for kind in kinds]
    assert re.fullmatch("[0-9]{30}", alone[1])
    with concurrent.futures.ThreadPoolExecutor(20) as pool:
        together = list(pool.map(lambda kind: text_of(running, **{"max_tokens": 30, **kind}), kinds * 4))
    assert together == alone * 4


def test_a_stop_string_and_a_length_end_an_answer_earlier(running: Running) -> None:
    structure = {"structured_outputs": {"grammar": 'start: "abcdef"'}}
    found = running.complete(prompt="x", stop="de", **structure).json()["choices"][0]
    assert (found["text"], found["finish_reason"]) == ("abc", "stop")
    found = running.complete(prompt="x", max_tokens=2, **structure).json()["choices"][0]
    assert (found["text"], found["finish_reason"]) == ("ab", "length")


def test_log_probabilities_are_those_of_the_model(running: Running) -> None:
    """A token that the grammar forces keeps what the model thinks of it."""
    fields: dict[str, Any] = {"structured_outputs": {"choice": ["zq"]}, "logprobs": 1, "max_tokens": 5}
    found = running.complete(prompt="abc", **fields).json()["choices"][0]["logprobs"]
    assert found["tokens"][:2] == ["z", "q"] and found["token_logprobs"][0] < -0.5


def test_a_bias_does_not_count_more_than_a_grammar(running: Running) -> None:
    assert text_of(running, structured_outputs={"choice": ["ab"]}, logit_bias={"60": 100}) == "ab"


def test_a_grammar_holds_when_pages_run_out(folder: str) -> None:
    """Requests start again with what they have written, and go on in their grammars."""
    structure = {"structured_outputs": {"regex": "(0123456789){28}"}}
    with serving(folder, "none", num_blocks=4) as few:
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            found = list(pool.map(lambda _: text_of(few, max_tokens=300, **structure), range(4)))
    assert found == ["0123456789" * 28] * 4


def test_thoughts_come_before_what_a_grammar_asks_for(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the chat template has begun them: here, by its word for the assistant."""
    template = {
        "start_anchor": "<user>",
        "fields": {
            "reasoning_content": {"open": "<assistant>", "close": "e", "content": "text"},
            "content": {"close": END, "content": "text"},
        },
    }
    monkeypatch.setattr(chats, "get_response_template", lambda *args: template)
    body = {"messages": MESSAGES, "response_format": FORMAT, "max_tokens": 1000, "logit_bias": {str(ord("e") - 32): 9}}
    message = running.http.post(CHAT, json=body).json()["choices"][0]["message"]
    assert json.loads(message["content"]).keys() == {"name", "age"}


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "schema, reason",
    [
        ({"type": "foo"}, "Invalid type: foo"),
        ({"type": "array", "uniqueItems": True}, 'Unimplemented keys: ["uniqueItems"]'),
        ({"type": "string", "pattern": "("}, "regex parse error: ( ^ error: unclosed group"),
        ({"x-guidance": 5}, "invalid type: integer `5`"),
    ],
)
def test_a_schema_that_cannot_be_compiled(running: Running, schema: dict[str, Any], reason: str) -> None:
    before = running.metrics()["prompt_tokens_total"]
    bad = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    message, param = told(running, response_format=bad)
    start = "`response_format` must be a grammar that can be compiled, got one that cannot: "
    assert message.startswith(start + reason) and param == "response_format"
    assert running.metrics()["prompt_tokens_total"] == before


@pytest.mark.parametrize(
    "structure, reason",
    [
        ({"regex": "("}, 'at 2(8): invalid regex "(" (in regex): regex parse error: ( ^ error: unclosed group'),
        ({"grammar": "start: nothing"}, 'at 1(8): unknown name: "nothing"'),
        ({"grammar": "a sentence"}, "Expected ::= at line 1"),
        ({"choice": ["é"]}, "no text matches it"),
        ({"grammar": "start: " + "(" * 20000}, "1(37): lark grammar too deeply nest"),
    ],
    ids=["regex", "Lark", "neither", "nothing", "deep"],
)
def test_a_grammar_that_cannot_be_compiled(running: Running, structure: dict[str, Any], reason: str) -> None:
    message, param = told(running, COMPLETION, structured_outputs=structure)
    start = "`structured_outputs` must be a grammar that can be compiled, got one that cannot: "
    assert message.startswith(start + reason) and param == "structured_outputs" and len(message) < 300


@pytest.mark.parametrize(
    "structure",
    [{"regex": "\ud800"}, {"choice": ["\ud800"]}, {"grammar": "start: \ud800"}, {"json": {"const": "\ud800"}}],
    ids=lambda structure: next(iter(structure)),
)
def test_halves_of_characters(running: Running, structure: dict[str, Any]) -> None:
    """JSON can spell half of a surrogate pair."""
    body = json.dumps({"prompt": "abc", "structured_outputs": structure})
    response = running.http.post(COMPLETION, content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400, response.text
    assert "`structured_outputs` must be a grammar that can be compiled, got" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    "value",
    [
        5,
        {},
        {"type": "xml"},
        {"type": "text", "more": 1},
        {"type": "json_schema"},
        {"type": "json_schema", "json_schema": {"name": "x"}},
        {"type": "json_schema", "json_schema": {"name": "", "schema": {}}},
        {"type": "json_schema", "json_schema": {"name": "x", "schema": [], "strict": True}},
        {"type": "json_schema", "json_schema": {"name": "x", "schema": {}, "strict": "yes"}},
        {"type": "json_schema", "json_schema": {"name": "x", "schema": {}, "other": 1}},
    ],
    ids=str,
)
def test_formats_that_are_none(running: Running, value: Any) -> None:
    message, param = told(running, response_format=value)
    assert message.startswith('`response_format` must be an object with the `type` "text", "json_object", or ')
    assert param == "response_format"


@pytest.mark.parametrize(
    "value",
    [
        "a",
        {},
        {"regex": "a", "choice": ["b"]},
        {"structural_tag": "x"},
    ],
    ids=str,
)
def test_structures_that_are_none(running: Running, value: Any) -> None:
    message, param = told(running, structured_outputs=value)
    expected = "an object with one of `json`, `json_object`, `regex`, `choice`, `grammar`"
    assert message == f"`structured_outputs` must be {expected}, got {value!r}."
    assert param == "structured_outputs"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"choice": []}, "a list of 1 to 1024 texts that are not empty under `choice`, got []"),
        ({"choice": [1]}, "a list of 1 to 1024 texts that are not empty under `choice`, got [1]"),
        ({"choice": [""]}, "a list of 1 to 1024 texts that are not empty under `choice`, got ['']"),
        ({"json": "5"}, "a JSON schema, an object or its text under `json`, got '5'"),
        ({"json": "{", "regex": None}, "a JSON schema, an object or its text under `json`, got '{'"),
        ({"json_object": False}, "true under `json_object`, got False"),
        ({"regex": ""}, "a text that is not empty under `regex`, got ''"),
        ({"grammar": 5}, "a text that is not empty under `grammar`, got 5"),
    ],
    ids=str,
)
def test_structures_that_say_nothing(running: Running, value: Any, expected: str) -> None:
    message, param = told(running, structured_outputs=value)
    assert (message, param) == (f"`structured_outputs` must have {expected}.", "structured_outputs")


def test_two_fields_for_one_grammar(running: Running) -> None:
    message, param = told(running, response_format=FORMAT, structured_outputs={"regex": "a"})
    assert message == "`structured_outputs` must be left out with `response_format`, got both."
    assert param == "structured_outputs"
    text = {"type": "text"}
    body = {"messages": MESSAGES, "response_format": text, "structured_outputs": {"regex": "a"}}
    assert running.http.post(CHAT, json=body).json()["choices"][0]["message"]["content"] == "a"


def test_without_the_package(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batching_grammars.importlib.util, "find_spec", lambda name: None)
    message, _ = told(running, response_format=FORMAT)
    reason = "needs the package llguidance, got none. Install it: pip install 'hf-kvquant[structured]'."
    assert message == f"`response_format` {reason}"


def test_without_an_end_token(tmp_path: Path) -> None:
    folder = models.save_llama(tmp_path, 512, chat_template=models.CHAT_TEMPLATE)
    with serving(folder, num_blocks=4) as running:
        message, _ = told(running, response_format=FORMAT)
    reason = "needs an end token, and the model's generation config has no `eos_token_id`."
    assert message == f"`response_format` {reason}"


def test_an_answer_whose_grammar_becomes_too_hard(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends with an error, and others go on."""
    begin = Grammars.begin

    def broken(self: Grammars, grammar: str, tokens: list[int]) -> Any:
        progress = begin(self, grammar, tokens)
        progress.matcher.consume_token(1)
        return progress

    monkeypatch.setattr(Grammars, "begin", broken)
    response = running.complete(prompt="abc", structured_outputs={"regex": "x+"})
    assert response.status_code == 500
    message = response.json()["error"]["message"]
    assert message.startswith("the grammar of the answer must stay simple enough to be followed, got: Parser Error")
    monkeypatch.undo()
    assert len(text_of(running, max_tokens=5)) == 5


# --- grammars ---------------------------------------------------------------------------------------------------------


def test_other_tokenizers_are_refused() -> None:
    class Slow:
        def __len__(self) -> int:
            return 5

    with pytest.raises(NoGrammars, match="needs a tokenizer that llguidance can read: Only fast tokenizers are supp"):
        Grammars(Slow(), 5, [1]).prepare()


def test_logits_of_padding_are_not_allowed(folder: str) -> None:
    """A model may have more logits than its tokenizer has tokens, and fewer."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for width in (90, 128, 200):
        found = Grammars(tokenizer, min(width, 128), [94])
        text = written({"lark_grammar": 'start: "A"'})
        found.compile(text)
        logits = found.masked(torch.zeros(2, width), torch.tensor([1]), [found.begin(text, [])])
        assert logits[0].isfinite().all() and logits[1].isfinite().nonzero().tolist() == [[ord("A") - 32]]


def test_special_tokens_are_written_by_their_ids(folder: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert Grammars(tokenizer, 96, [94]).spelled('a"b') == '"a\\"b"'
    tokenizer.add_tokens(["<call>", "</think>"])
    found = Grammars(tokenizer, 98, [94])
    assert found.spelled("<call>x</think>") == '<[96]> "x" <[97]>'
    for end in ("</think>", "done"):
        grammar = written(schema_grammar(SCHEMA), thoughts_end=found.spelled(end))
        found.compile(grammar)
        text = f'so {{"a" <b{end}\n{{"name": "Bo", "age": 7}}'
        ids = tokenizer(text, add_special_tokens=False).input_ids
        assert found.begin(grammar, ids).matcher.is_accepting()


def test_a_grammar_that_only_refers_to_itself(folder: str) -> None:
    found = Grammars(AutoTokenizer.from_pretrained(folder), 96, [94])
    with pytest.raises(BadGrammar):
        found.compile(written({"lark_grammar": "start: start"}))
