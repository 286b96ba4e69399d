"""Tools: what goes to the chat template, how calls come back, and the errors of those that cannot."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import models
import openai
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_kvquant.upstream.releases import HAS_PAGES

if not HAS_PAGES:
    pytest.skip("transformers' paged cache has another design", allow_module_level=True)

from servers import NAME, Running, serving

from hf_kvquant.batching.grammars import Grammars
from hf_kvquant.common.errors import RefusedRequest
from hf_kvquant.serving.chats import Chats
from hf_kvquant.serving.fields import CHAT, parameters_of
from hf_kvquant.serving.forms import ChatForm
from hf_kvquant.serving.pieces import Piece
from hf_kvquant.serving.reading import CALLS, Reader
from hf_kvquant.serving.structured import written
from hf_kvquant.serving.tools import FORMATS, ToolCall, Tools, for_template, format_of
from hf_kvquant.serving.writing import Writer

END = "~"
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }} Call with <tool_call>.{% endif %}"
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}"
    "{% for call in message.tool_calls or [] %}{{ call.function.arguments | tojson }}{% endfor %}</>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
MESSAGES: Any = [{"role": "user", "content": "abc"}]
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}, "days": {"$ref": "#/$defs/Days"}},
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"Days": {"type": "integer", "minimum": 1, "maximum": 9}},
}
WEATHER: dict[str, Any] = {"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}}
TIME: dict[str, Any] = {"type": "function", "function": {"name": "get_time"}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny model whose tokens are characters, with an end token and a chat template in the form of Hermes."""
    path = tmp_path_factory.mktemp("model")
    model = models.build("llama", max_position_embeddings=4096)
    model.generation_config.eos_token_id = models.VOCAB_SIZE - 2
    return models.save(model, path, eos_token=END, model_max_length=4096, chat_template=TEMPLATE)


def tools_of(*tools: dict[str, Any], **more: Any) -> Tools:
    found = parameters_of({"messages": MESSAGES, "tools": list(tools), **more}, CHAT, NAME).tools
    assert found is not None
    return found


def refusal(**fields: Any) -> tuple[str, str | None]:
    with pytest.raises(RefusedRequest) as told:
        parameters_of({"messages": MESSAGES, **fields}, CHAT, NAME)
    return told.value.message, told.value.param


def told(running: Running, **fields: Any) -> str:
    response = running.http.post(CHAT, json={"messages": MESSAGES, **fields})
    assert response.status_code == 400, response.text
    return str(response.json()["error"]["message"])


# --- calls that the model has to make ---------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "in one piece"])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}], ids=str)
def test_a_call_that_has_to_be_made(client: openai.OpenAI, choice: Any, stream: bool) -> None:
    pytest.importorskip("llguidance", reason="pinned for Python 3.11 and later")
    options: Any = {"model": NAME, "messages": MESSAGES, "tools": [WEATHER], "tool_choice": choice, "max_tokens": 500}
    options |= {"parallel_tool_calls": False, "temperature": 1, "seed": 1}
    if stream:
        chunks = [chunk.choices[0] for chunk in client.chat.completions.create(**options, stream=True)]
        (delta,) = [each for chunk in chunks for each in chunk.delta.tool_calls or []]
        assert delta.index == 0 and delta.type == "function" and "".join(c.delta.content or "" for c in chunks) == ""
        call_id, function, reason = delta.id, delta.function, chunks[-1].finish_reason
    else:
        choice_ = client.chat.completions.create(**options).choices[0]
        assert choice_.message.content is None and choice_.message.tool_calls is not None
        (call,) = choice_.message.tool_calls
        assert call.type == "function"
        call_id, function, reason = call.id, call.function, choice_.finish_reason  # type: ignore[assignment]
    assert function is not None and function.name == "get_weather" and call_id and len(call_id) == 9
    arguments = json.loads(function.arguments or "")
    assert arguments["city"] in ("Oslo", "Rome") and 1 <= arguments["days"] <= 9
    assert reason == "tool_calls"


def test_a_conversation_with_a_tool(client: openai.OpenAI) -> None:
    """An answer is sent back as it came."""
    pytest.importorskip("llguidance", reason="pinned for Python 3.11 and later")
    options: Any = {"model": NAME, "tools": [WEATHER, TIME], "max_tokens": 300}
    first = client.chat.completions.create(messages=MESSAGES, tool_choice="required", **options).choices[0].message
    assert first.tool_calls
    results = [{"role": "tool", "tool_call_id": call.id, "content": "Rain"} for call in first.tool_calls]
    messages: Any = [*MESSAGES, first, *results]
    assert client.chat.completions.create(messages=messages, **{**options, "max_tokens": 5}).choices[0].message.content


STRICT: dict[str, Any] = {**WEATHER, "function": {**WEATHER["function"], "strict": True}}
HERMES_CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo", "days": 3}}\n</tool_call>'
LLAMA_3_CALL = '{"name": "get_weather", "parameters": {"city": "Oslo", "days": 3}}'


@pytest.mark.parametrize(
    ("name", "tokens", "call"),
    [
        ("Hermes", ["<tool_call>", "</tool_call>"], HERMES_CALL),
        ("Hermes", [], HERMES_CALL),
        ("Llama 3", [], LLAMA_3_CALL),
    ],
    ids=["a token begins calls", "a text begins calls", "calls are JSON"],
)
@pytest.mark.parametrize("is_parallel", [True, False])
def test_strict_functions_leave_the_choice_to_the_model(
    name: str, tokens: list[str], call: str, is_parallel: bool
) -> None:
    """Its text goes on as without them, until a call begins."""
    pytest.importorskip("llguidance", reason="pinned for Python 3.11 and later")
    tokenizer = models.tokenizer(eos_token=END)
    tokenizer.add_tokens(tokens)
    grammars = Grammars(tokenizer, len(tokenizer), [models.VOCAB_SIZE - 2])
    tools = tools_of(STRICT, parallel_tool_calls=is_parallel)
    found = tools.grammars_of_choice(FORMATS[name], grammars.spelled, "")
    assert found is not None
    grammar = written(*found)
    grammars.compile(grammar)

    def is_allowed(answer: str) -> bool:
        ids = tokenizer(answer, add_special_tokens=False).input_ids
        matcher = grammars.begin(grammar, []).matcher
        return matcher.try_consume_tokens(ids) == len(ids) and bool(matcher.is_accepting())

    assert is_allowed("so") and is_allowed("a < b, a <tool") and is_allowed(call)
    assert not is_allowed(call.replace("3", "0")) and not is_allowed(call.replace("get_weather", "get_time"))
    assert not is_allowed(call[:-1])
    if name == "Hermes":  # else it is all text, which no `{` begins
        assert is_allowed(f"so {call}") and not is_allowed(f"so {call.replace('3', '0')}")
        assert is_allowed(f"so {call}\n{call}") == is_parallel and not is_allowed(f"{call} so")


def test_strict_functions_need_something_with_which_calls_begin(folder: str) -> None:
    pytest.importorskip("llguidance", reason="pinned for Python 3.11 and later")
    reason = (
        "needs a token with which calls begin if a function is `strict` and none has to be called, and the model has"
    )
    with serving(folder, num_blocks=6, chat_template=TEMPLATE.replace("<tool_call>", "[TOOL_CALLS]")) as running:
        assert told(running, tools=[STRICT]) == f"`tools` {reason} none. Leave `strict` out."


def test_strict_functions_and_a_text(client: openai.OpenAI) -> None:
    pytest.importorskip("llguidance", reason="pinned for Python 3.11 and later")
    choice = client.chat.completions.create(model=NAME, messages=MESSAGES, tools=[STRICT], max_tokens=30).choices[0]
    assert choice.message.content and not choice.message.tool_calls


FORMAT: Any = {
    "type": "json_schema",
    "json_schema": {"name": "Day", "schema": {"type": "object", "properties": {"day": {"enum": ["Monday", "Friday"]}}}},
}
LLAMA_3 = TEMPLATE.replace("<tool_call>", '"parameters" <|start_header_id|>')


def test_a_format_leaves_calls_to_the_model(folder: str) -> None:
    """Agents send both. An answer is JSON of the format or calls, of which one must be."""
    pytest.importorskip("llguidance", reason="pinned for Python 3.11 and later")
    strict = {**WEATHER, "function": {**WEATHER["function"], "strict": True}}
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    grammars = Grammars(tokenizer, len(tokenizer), [models.VOCAB_SIZE - 2])
    chats = Chats(model, tokenizer, grammars)

    def is_allowed(answer: str, **fields: Any) -> bool:
        asked = parameters_of({"messages": MESSAGES, "response_format": FORMAT, **fields}, CHAT, NAME)
        grammar = chats.grammar(asked, None)
        assert grammar is not None
        ids = tokenizer(answer, add_special_tokens=False).input_ids
        matcher = grammars.begin(grammar, []).matcher
        return matcher.try_consume_tokens(ids) == len(ids) and bool(matcher.is_accepting())

    call = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo", "days": 3}}\n</tool_call>'
    for tools in ([WEATHER, TIME], [strict, TIME]):
        assert is_allowed('{"day": "Friday"}', tools=tools) and is_allowed(call, tools=tools)
        assert is_allowed(f"{call}\n{call}", tools=tools) and not is_allowed("Friday", tools=tools)
        assert not is_allowed('{"day": 5}', tools=tools) and not is_allowed(f"so {call}", tools=tools)
        assert not is_allowed(call.replace("Oslo", "Bonn"), tools=tools)
        assert not is_allowed('{"day": "Friday"}', tools=tools, tool_choice="required")
        assert is_allowed(call, tools=tools, tool_choice="required")
        assert not is_allowed(call, tools=tools, tool_choice="none")


def test_a_format_and_a_call_that_has_to_be_made(client: openai.OpenAI) -> None:
    """What instructor sends to `/v1/responses`."""
    pytest.importorskip("llguidance", reason="pinned for Python 3.11 and later")
    function = WEATHER["function"]
    answer = client.responses.create(
        model=NAME,
        input="abc",
        tools=[{"type": "function", **function}],  # type: ignore[list-item]
        tool_choice={"type": "function", "name": function["name"]},
        text={"format": {"type": "json_schema", "name": "Call", "schema": function["parameters"]}},
        max_output_tokens=500,
    )
    (call,) = answer.output
    assert call.type == "function_call" and json.loads(call.arguments)["city"] in ("Oslo", "Rome")


@pytest.mark.parametrize("template", [LLAMA_3, TEMPLATE.replace("<tool_call>", "<tool_call><function=x><parameter=y>")])
def test_a_format_that_calls_may_look_like(folder: str, template: str) -> None:
    """Calls of Llama 3 are JSON, so that an answer with a `name` would be taken for one."""
    pytest.importorskip("llguidance", reason="pinned for Python 3.11 and later")
    with serving(folder, num_blocks=2, chat_template=template) as running:
        reason = "must come without `tools` that the model may call, since calls of this model may look like such an "
        rest = 'answer, or have no grammar. Leave out one of them, or send a `tool_choice` of "none".'
        assert told(running, tools=[TIME], response_format=FORMAT) == f"`response_format` {reason}{rest}"


# --- calls that the model makes by itself -----------------------------------------------------------------------------

ENDS = {"content": {"close": END, "content": "text"}}
CALL = '{"name": "get_weather", "arguments": {"city": "Oslo"}}'
WRITTEN = {
    "Hermes": f"Wait.\n<tool_call>\n{CALL}\n</tool_call>\n<tool_call>\n{CALL}\n</tool_call>~",
    "Mistral": f"Wait.[TOOL_CALLS][{CALL}, {CALL}]</s>",
    "Mistral with names": "Wait." + '[TOOL_CALLS]get_weather[ARGS]{"city": "Oslo"}' * 2 + "</s>",
    "Qwen 3 Coder": "Wait.\n"
    + "<tool_call>\n<function=get_weather>\n<parameter=city>\nOslo\n</parameter>\n</function>\n</tool_call>\n" * 2,
    "Llama 3": CALL.replace("arguments", "parameters") + "<|eot_id|>",
}


def read(name: str, text: str, tools: Tools, size: int = 1) -> tuple[dict[str, Any], list[Any]]:
    reader = Reader({"start_anchor_pattern": r"\A", "fields": {CALLS: FORMATS[name].field, **ENDS}}, "", tools)
    found = [each for begin in range(0, len(text), size) for each in reader.feed(text[begin : begin + size])]
    found += reader.finish()
    return ChatForm("id", NAME).choice(Piece(0, found, None, "stop"))["message"], found


@pytest.mark.parametrize("size", [1, 7, 1000])
@pytest.mark.parametrize("name", FORMATS)
def test_calls_are_read(name: str, size: int) -> None:
    message, found = read(name, WRITTEN[name], tools_of(WEATHER), size)
    num_calls = 1 if name == "Llama 3" else 2
    calls = [each["function"] for each in message["tool_calls"]]
    assert [(each["name"], json.loads(each["arguments"])) for each in calls] == [
        ("get_weather", {"city": "Oslo"})
    ] * num_calls
    assert [each.index for each in found if isinstance(each, ToolCall)] == list(range(num_calls))
    assert message["content"] == (None if name == "Llama 3" else "Wait.")


@pytest.mark.parametrize("name", ["Hermes", "Mistral", "Mistral with names", "Qwen 3 Coder"])
def test_one_call_where_only_one_is_wanted(name: str) -> None:
    message, _ = read(name, WRITTEN[name], tools_of(WEATHER, parallel_tool_calls=False))
    assert len(message["tool_calls"]) == 1


@pytest.mark.parametrize("body", ["\n{oops\n", "[1]", '{"name": 5}', '{"name": "f", "arguments": "x"}', "{"])
def test_what_is_no_call_stays_text(body: str) -> None:
    message, _ = read("Hermes", f"a<tool_call>{body}</tool_call>b", tools_of(WEATHER))
    assert "tool_calls" not in message and message["content"] == f"a<tool_call>{body}</tool_call>b"


@pytest.mark.parametrize("size", [1, 7, 1000])
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("Hermes", "hi <tool_call>\n{"),
        ("Hermes", "hi <tool_call>"),
        ("Hermes", "<tool_call>x~"),
        ("Hermes", "<tool_call>x</tool_call> and <tool_call>y</tool_call>~"),
        ("Mistral", "a [TOOL_CALLS][{"),
        ("Mistral with names", "[TOOL_CALLS]get_weather[ARGS]{oops"),
        ("Llama 3", '{"name": "get_wea~'),
    ],
)
def test_an_answer_that_ends_within_a_call_stays_as_it_was_written(name: str, text: str, size: int) -> None:
    message, _ = read(name, text, tools_of(WEATHER), size)
    assert "tool_calls" not in message and message["content"] == text.removesuffix("~").strip()


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_text_behind_a_call_stays_as_it_was_written(size: int) -> None:
    text = f"Wait.\n<tool_call>\n{CALL}\n</tool_call>\n<tool_call>\n{{"
    message, _ = read("Hermes", text + "~", tools_of(WEATHER), size)
    assert len(message["tool_calls"]) == 1
    assert message["content"] == "Wait.\n<tool_call>\n{"


@pytest.mark.parametrize(
    "written, expected",
    [("Hello.", {"content": "Hello."}), ("<think>\nhm", {"content": "", "reasoning_content": "hm"})],
    ids=["a text", "thoughts that never close"],
)
def test_the_token_that_ends_an_answer_is_no_part_of_it(
    written: str, expected: dict[str, str], folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers describes answers by the model's type; this model ends them by a token that it does not know."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"eos_token": "<END>"})
    chats = Chats.__new__(Chats)
    chats._tokenizer = tokenizer
    chats._model = SimpleNamespace(config=SimpleNamespace(model_type="qwen3"))  # type: ignore[assignment]
    chats._grammars = SimpleNamespace(end_tokens=[tokenizer.eos_token_id])  # type: ignore[assignment]
    writer = Writer(tokenizer, reader=chats.reader([], None))
    tokens = [*tokenizer(written, add_special_tokens=False).input_ids, tokenizer.eos_token_id]
    texts = [*writer.write(tokens), *writer.finish()]
    message = ChatForm("i", "m").choice(Piece(0, texts, None, "stop"))["message"]
    assert {
        name: text.strip() for name, text in message.items() if name in ("content", "reasoning_content")
    } == expected


def test_an_answer_ends_with_its_only_call(folder: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    template = {"start_anchor_pattern": r"\A", "fields": {CALLS: FORMATS["Hermes"].field, **ENDS}}
    writer = Writer(tokenizer, reader=Reader(template, "", tools_of(WEATHER, parallel_tool_calls=False)))
    writer.write(tokenizer(f"<tool_call>{CALL}</tool_call>", add_special_tokens=False).input_ids)
    assert writer.is_stopped and writer.has_called


@pytest.mark.parametrize("name", [name for name, each in FORMATS.items() if each.calls])
def test_the_grammar_of_calls_is_what_is_read(name: str) -> None:
    pytest.importorskip("llguidance", reason="pinned for Python 3.11 and later")
    tokenizer, text = models.tokenizer(eos_token=END), WRITTEN[name].removeprefix("Wait.").strip()
    for end in (END, "</s>", "<|eot_id|>"):
        text = text.removesuffix(end)
    grammars = Grammars(tokenizer, len(tokenizer), [models.VOCAB_SIZE - 2])
    city = {"type": "object", "properties": {"city": {"type": "string"}}}
    tools = tools_of(
        {"type": "function", "function": {"name": "get_weather", "parameters": city}}, TIME, tool_choice="required"
    )
    grammar = written(*tools.grammars(FORMATS[name], grammars.spelled))
    grammars.compile(grammar)
    ids = tokenizer(text, add_special_tokens=False).input_ids
    matcher = grammars.begin(grammar, []).matcher
    assert matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


@pytest.mark.parametrize(
    "template, name",
    [
        ("<tool_call>{x}</tool_call>", "Hermes"),
        ("<tool_call><function=x><parameter=y>", "Qwen 3 Coder"),
        ("[AVAILABLE_TOOLS][TOOL_CALLS]", "Mistral"),
        ("[TOOL_CALLS]f[ARGS]", "Mistral with names"),
        ('<|start_header_id|>{"name": x, "parameters": y}', "Llama 3"),
        ("plain", None),
    ],
)
def test_a_form_is_known_by_its_template(template: str, name: str | None) -> None:
    assert format_of(template) is (FORMATS[name] if name else None)


# --- prompts ----------------------------------------------------------------------------------------------------------


def test_tools_go_to_the_chat_template(running: Running) -> None:
    def num_prompt(**fields: Any) -> int:
        body = {"messages": MESSAGES, "max_tokens": 1, **fields}
        return int(running.http.post(CHAT, json=body).json()["usage"]["prompt_tokens"])

    plain = num_prompt()
    assert num_prompt(tools=[]) == num_prompt(tools=[WEATHER], tool_choice="none") == plain
    assert num_prompt(tools=[WEATHER, TIME]) > num_prompt(tools=[TIME]) > plain


def test_messages_of_a_conversation() -> None:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    messages = [
        {"role": "assistant", "content": "Wait.", "tool_calls": [call], "refusal": None},
        {"role": "tool", "tool_call_id": "a", "name": "f", "content": [{"type": "text", "text": "y"}]},
    ]
    read_call = {**call, "function": {"name": "f", "arguments": {"x": 1}}}
    assert for_template(messages, TEMPLATE) == [
        {"role": "assistant", "content": "Wait.", "tool_calls": [read_call]},
        {"role": "tool", "tool_call_id": "a", "name": "f", "content": "y"},
    ]


def test_a_developer_is_the_system_where_the_template_does_not_know_it(folder: str) -> None:
    """Qwen's templates leave out messages of a role that they do not know."""
    hello: Any = {"role": "user", "content": "Hello"}
    for template, known in (("{% if message.role == 'developer' %}", "developer"), (TEMPLATE, "system")):
        (first, second) = for_template([{"role": "developer", "content": "Be brief."}, hello], template)
        assert (first, second) == ({"role": known, "content": "Be brief."}, hello)
    template = "{% for message in messages if message.role in ('system', 'user') %}{{ message.content }}{% endfor %}"
    with serving(folder, num_blocks=2, chat_template=template) as running:
        body = {"messages": [{"role": "developer", "content": "Be brief."}, hello], "max_tokens": 1}
        assert running.http.post(CHAT, json=body).json()["usage"]["prompt_tokens"] == len("Be brief.Hello")


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "template, reason",
    [
        (models.CHAT_TEMPLATE, "the model's chat template has no place for them."),
        (TEMPLATE.replace("<tool_call>", "!"), "the model's chat template asks for calls in a form that is not known."),
    ],
    ids=["no place", "another form"],
)
def test_a_template_without_tools(folder: str, template: str, reason: str) -> None:
    with serving(folder, num_blocks=2, chat_template=template) as running:
        assert told(running, tools=[WEATHER]) == f"`tools` must be left out, since {reason}"
        if "place" in reason:
            call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
            expected = "`messages` must have no `tool_calls`, since the model's chat template has no place for tools."
            assert told(running, messages=[{"role": "assistant", "tool_calls": [call]}]) == expected


def test_a_form_without_a_grammar(folder: str) -> None:
    pytest.importorskip("llguidance", reason="pinned for Python 3.11 and later")
    template = TEMPLATE.replace("<tool_call>", "<tool_call><function=x><parameter=y>")
    with serving(folder, num_blocks=2, chat_template=template) as running:
        reason = "needs a grammar of the model's calls, and for those of this model there is none."
        assert told(running, tools=[TIME], tool_choice="required") == f"`tool_choice` {reason}"


@pytest.mark.parametrize(
    "tools",
    [
        "x",
        [{}],
        [{"type": "custom", "custom": {"name": "a"}}],
        [{"type": "function", "function": {"name": "a b"}}],
        [{"type": "function", "function": {"name": "a", "more": 1}}],
        [{"type": "function", "function": {"name": "a", "parameters": []}}],
        [TIME] * 129,
    ],
    ids=lambda value: str(value)[:40],
)
def test_tools_that_are_none(tools: Any) -> None:
    message, param = refusal(tools=tools)
    assert message.startswith('`tools` must be a list of up to 128 functions, each with the `type` "function", got ')
    assert param == "tools"
    wrong = {"type": "custom", "custom": {"name": "a"}}
    assert refusal(tools=[TIME, wrong])[0].endswith(f", got {wrong}.")


def test_arguments_that_are_no_object() -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "string"}}}
    expected = "`tools` must have `parameters` of the `type` \"object\", got 'string' in 'f'."
    assert refusal(tools=[TIME, tool]) == (expected, "tools")


@pytest.mark.parametrize("choice", ["any", 5, {"type": "function"}, {"type": "allowed_tools", "allowed_tools": {}}])
def test_choices_that_are_none(choice: Any) -> None:
    expected = '"none", "auto", "required", or an object that names a function of `tools`'
    assert refusal(tools=[TIME], tool_choice=choice) == (
        f"`tool_choice` must be {expected}, got {choice!r}.",
        "tool_choice",
    )


def test_fields_that_do_not_go_together() -> None:
    named = {"type": "function", "function": {"name": "other"}}
    structure = {"regex": "a"}
    assert refusal(tools=[TIME, TIME]) == ("`tools` must have different names, got 'get_time' twice.", "tools")
    alone = "`tool_choice` must come with `tools`, got it alone. Leave it out."
    assert refusal(tool_choice="required") == (alone, "tool_choice")
    assert refusal(tools=[TIME], tool_choice=named) == (
        "`tool_choice` must name one of ['get_time'], got 'other'.",
        "tool_choice",
    )
    both = "`tools` that are strict or must be called must come without a grammar of the answer, got both."
    assert refusal(tools=[TIME], tool_choice="required", structured_outputs=structure) == (both, "tools")
    parameters_of({"messages": MESSAGES, "tools": [], "tool_choice": "auto", "parallel_tool_calls": True}, CHAT, NAME)


@pytest.mark.parametrize(
    "message, told",
    [
        (
            {"role": "tool", "tool_call_id": "a"},
            "a message of the role tool must have a `content`, got none. Write some text.",
        ),
        ({"role": "tool", "content": "x"}, "a message of the role tool must have a `tool_call_id`, got none."),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "["}}]},
            "`tool_calls` of a message must be calls of functions, each with a name and with a JSON object as its "
            "arguments, in text, got [{'function': {'name': 'f', 'arguments': '['}}].",
        ),
    ],
)
def test_messages_that_are_wrong(message: dict[str, Any], told: str) -> None:
    assert refusal(messages=[message]) == (told, "messages")
