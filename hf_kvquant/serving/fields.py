"""The fields of a request: which are served, with which values, and which are refused by name.

`FIELDS` is the one place that decides. A field without effect is taken at the values that change nothing, and refused
at any other, so that no client gets an answer as if it had not asked. The table in `docs/serve.md` is checked against
it.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import math
import secrets
from collections.abc import Callable, Mapping
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from ..batching.sampling import Sampling
from ..common.errors import RefusedRequest, did_you_mean
from .structured import KINDS, is_format, is_structure, shown, wrong_structure
from .tools import MAX_TOOLS, MESSAGE, ROLES, Tools, is_call, is_choice, is_tool, is_tools, tools_of, wrong_tools

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
BOTH = (CHAT, COMPLETION)
# Of one prompt, and of all prompts of a request.
MAX_CHOICES, MAX_ANSWERS = 128, 1024
MAX_STOPS = 16
MAX_LOGPROBS = 20
MAX_BIASES, MAX_BIAS = 1024, 100
# How long a model may think, as OpenAI's API and models of that kind name it.
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
# What the server itself passes to chat templates. A template of the client's, too, would run on the event loop for as
# long as it likes.
RESERVED = {
    *(
        name
        for function in (PreTrainedTokenizerBase.apply_chat_template, render_jinja_template)
        for name, each in inspect.signature(function).parameters.items()
        if each.kind is not each.VAR_KEYWORD
    ),
    "messages",
} - {"documents"}


@dataclasses.dataclass(frozen=True)
class Field:
    """One field of a body.

    Attributes:
        expected: Values that it may have, in words: what follows "must be". `null` always stands for leaving it out.
        is_right: Whether a value is one of them.
        routes: Where it may occur.
        is_served: Whether it has an effect at some value.
        why_not: Of a value of the right form, what it must be or have besides, in words; `None` if all is right.
        culprit: What is wrong in a value that is not right: the value itself, or a part of it.
    """

    expected: str
    is_right: Callable[[Any], bool]
    routes: tuple[str, ...] = BOTH
    is_served: bool = True
    why_not: Callable[[Any], str | None] = lambda value: None
    culprit: Callable[[Any], Any] = lambda value: value


def without_effect(*neutral: Any, routes: tuple[str, ...] = BOTH) -> Field:
    """A field that is not served: it may have the values that change nothing."""
    values = "".join(f"{json.dumps(value)} or " for value in neutral)
    return Field(f"{values}left out", lambda value: any(_is_same(value, each) for each in neutral), routes, False)


def _elsewhere() -> Field:
    """A field that another one has replaced."""
    return Field("left out in favour of `structured_outputs`", lambda value: False, BOTH, False)


def note(routes: tuple[str, ...] = BOTH) -> Field:
    """A field for the client's own use, which never changes an answer."""
    return Field("anything", lambda value: True, routes, False)


def first_wrong(is_right: Callable[[Any], bool]) -> Callable[[Any], Any]:
    """The `culprit` of a list: its first entry that is not right; the list itself if each one is."""
    return lambda value: (
        next((each for each in value if not is_right(each)), value) if isinstance(value, list) else value
    )


def _is_integer(value: Any, least: float = -math.inf, most: float = math.inf) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def _is_number(value: Any, least: float = -math.inf, most: float = math.inf) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and abs(value) < 2**31 and least <= value <= most


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool)


def _is_stop(value: Any) -> bool:
    texts = value if isinstance(value, list) else [value]
    return len(texts) <= MAX_STOPS and all(isinstance(text, str) and text for text in texts)


def _is_prompt(value: Any) -> bool:
    return isinstance(value, str) or (_is_list(value) and all(_is_integer(each, 0) for each in value))


def _is_prompts(value: Any) -> bool:
    return _is_prompt(value) or (_is_list(value) and all(map(_is_prompt, value)))


def _is_list(value: Any) -> bool:
    return isinstance(value, list) and bool(value)


def _is_options_of_stream(value: Any) -> bool:
    names = {"include_usage", "continuous_usage_stats", "include_obfuscation"}
    return isinstance(value, dict) and value.keys() <= names and all(map(_is_bool, value.values()))


def _wrong_options_of_template(value: dict[str, Any]) -> str | None:
    taken = next((name for name in value if name in RESERVED), None)
    return taken and f"have no `{taken}`, which the server sets. Leave it out"


def _is_biases(value: Any) -> bool:
    is_right = isinstance(value, dict) and len(value) <= MAX_BIASES and all(map(str.isdecimal, value))
    return is_right and all(_is_number(each, -MAX_BIAS, MAX_BIAS) for each in value.values())


_LENGTH = Field("an integer of at least 1", lambda value: _is_integer(value, 1))
_PENALTY = Field("a number from -2 to 2", lambda value: _is_number(value, -2, 2))

FIELDS: dict[str, Field] = {
    "messages": Field("a list of messages", _is_list, (CHAT,)),
    "prompt": Field("a text, token ids, or a list of these", _is_prompts, (COMPLETION,)),
    "model": Field("the name of the model", lambda value: isinstance(value, str)),
    "max_tokens": _LENGTH,
    "max_completion_tokens": _LENGTH,
    "n": Field(f"an integer from 1 to {MAX_CHOICES}", lambda value: _is_integer(value, 1, MAX_CHOICES)),
    "ignore_eos": Field("true or false", _is_bool),
    "stop": Field(f"a text that is not empty, or a list of up to {MAX_STOPS} of these", _is_stop),
    "stream": Field("true or false", _is_bool),
    "stream_options": Field("an object with `include_usage` and `continuous_usage_stats`", _is_options_of_stream),
    "echo": Field("true or false", _is_bool, (COMPLETION,)),
    "temperature": Field("a number of at least 0", lambda value: _is_number(value, 0)),
    "top_p": Field("a number above 0 and at most 1", lambda value: _is_number(value, 0, 1) and value > 0),
    "top_k": Field("an integer of at least 0", lambda value: _is_integer(value, 0, 2**31)),
    "min_p": Field("a number from 0 to 1", lambda value: _is_number(value, 0, 1)),
    "seed": Field("an integer of 64 bits", lambda value: _is_integer(value, -(2**63), 2**63 - 1)),
    "presence_penalty": _PENALTY,
    "frequency_penalty": _PENALTY,
    "repetition_penalty": Field("a number from 0.01 to 100", lambda value: _is_number(value, 0.01, 100)),
    "logit_bias": Field(f"up to {MAX_BIASES} token ids with numbers from -{MAX_BIAS} to {MAX_BIAS}", _is_biases),
    "logprobs": Field(
        f"true or false in a chat, an integer from 0 to {MAX_LOGPROBS} in a completion",
        lambda value: _is_bool(value) or _is_integer(value, 0, MAX_LOGPROBS),
    ),
    "top_logprobs": Field(
        f"an integer from 0 to {MAX_LOGPROBS}", lambda value: _is_integer(value, 0, MAX_LOGPROBS), (CHAT,)
    ),
    "tools": Field(
        f'a list of up to {MAX_TOOLS} functions, each with the `type` "function"',
        is_tools,
        (CHAT,),
        why_not=wrong_tools,
        culprit=first_wrong(is_tool),
    ),
    "tool_choice": Field(
        '"none", "auto", "required", or an object that names a function of `tools`', is_choice, (CHAT,)
    ),
    "parallel_tool_calls": Field("true or false", _is_bool, (CHAT,)),
    "response_format": Field(
        'an object with the `type` "text", "json_object", or "json_schema" with a `json_schema` of `name` and `schema`',
        is_format,
        (CHAT,),
    ),
    "structured_outputs": Field(
        f"an object with one of {', '.join(f'`{kind}`' for kind in KINDS)}", is_structure, why_not=wrong_structure
    ),
    "chat_template_kwargs": Field(
        "an object", lambda value: isinstance(value, dict), (CHAT,), why_not=_wrong_options_of_template
    ),
    "reasoning_effort": Field(
        f"one of {', '.join(json.dumps(each) for each in EFFORTS)}", lambda value: value in EFFORTS, (CHAT,)
    ),
    # OpenAI's fields for which there is nothing here.
    "audio": without_effect(routes=(CHAT,)),
    "best_of": without_effect(1, routes=(COMPLETION,)),
    "function_call": without_effect("none", "auto", routes=(CHAT,)),
    "functions": without_effect([], routes=(CHAT,)),
    "modalities": without_effect(["text"], routes=(CHAT,)),
    "moderation": without_effect(routes=(CHAT,)),
    "prediction": without_effect(routes=(CHAT,)),
    "service_tier": without_effect("auto", "default", routes=(CHAT,)),
    "store": without_effect(False, routes=(CHAT,)),
    "suffix": without_effect("", routes=(COMPLETION,)),
    "verbosity": without_effect(routes=(CHAT,)),
    "web_search_options": without_effect(routes=(CHAT,)),
    # Other servers' names of `structured_outputs`.
    **dict.fromkeys(
        (
            *("grammar", "guided_choice", "guided_grammar", "guided_json", "guided_regex"),
            *("ebnf", "json_schema", "regex"),
        ),
        _elsewhere(),
    ),
    # Notes of the client's.
    "metadata": note((CHAT,)),
    "prompt_cache_key": note((CHAT,)),
    "prompt_cache_options": note((CHAT,)),
    "prompt_cache_retention": note((CHAT,)),
    "safety_identifier": note((CHAT,)),
    "user": note(),
}
# Fields that say how tokens are chosen.
SETTINGS = (
    *("temperature", "top_p", "top_k", "min_p", "seed"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias"),
)
# Fields that say what answers must match.
STRUCTURE = ("response_format", "structured_outputs")


@dataclasses.dataclass(frozen=True)
class Parameters:
    """What a body asks for, besides its prompts.

    Attributes:
        num_choices: Answers to each prompt.
        max_new_tokens: Of each answer; `None` if the client does not say.
        stop: Texts that end an answer.
        is_streamed: Whether the client gets each piece.
        ignores_end: Whether the end tokens of the model end no answer.
        includes_usage: Whether a stream ends with the numbers of tokens.
        counts_each: Whether each piece of a stream comes with the numbers so far.
        echoes: Whether answers begin with their prompts.
        num_logprobs: Most likely tokens that are reported with each token; `None` for no report.
        settings: Fields of `SETTINGS` that the client has sent.
        structure: The fields that say what answers must match, of `STRUCTURE`.
        tools: What the model may call; `None` if nothing.
    """

    num_choices: int
    max_new_tokens: int | None
    stop: tuple[str, ...]
    is_streamed: bool
    ignores_end: bool
    includes_usage: bool
    counts_each: bool
    echoes: bool
    num_logprobs: int | None
    settings: dict[str, Any]
    structure: dict[str, Any]
    tools: Tools | None

    @property
    def structure_name(self) -> str | None:
        """The field that says what answers must match; `None` if they may be any text."""
        return next((name for name, value in self.structure.items() if value != {"type": "text"}), None)

    @property
    def scores_prompts(self) -> bool:
        """Whether tokens of the prompts come with logarithms of probabilities."""
        return self.echoes and self.num_logprobs is not None

    @property
    def has_grammar(self) -> bool:
        """Whether answers must match something."""
        calls = self.tools is not None and (self.tools.must_call or self.tools.is_strict)
        return self.structure_name is not None or calls

    @property
    def ends_by_text(self) -> bool:
        """Whether some text may end an answer before its last token: a stop string, or the only call there may be."""
        return bool(self.stop) or (self.tools is not None and not self.tools.is_parallel)

    def sampling(
        self, own: Mapping[str, Any], *, is_sampled: bool, vocab_size: int, grammar: str | None = None
    ) -> Sampling | None:
        """How tokens are chosen; `None` if they are the most likely ones. Without a seed, it gets one nobody knows.

        Args:
            own: Settings of `batching.sampling.SETTINGS` for what the body does not say.
            is_sampled: Whether a body that says nothing is sampled.
            vocab_size: Logits of the model.
            grammar: What the answer must match, compiled.

        Raises:
            RefusedRequest: A bias is for a token that the model does not have.
        """
        bias = {int(token): float(value) for token, value in self.settings.get("logit_bias", {}).items() if value}
        for token in bias:
            if token >= vocab_size:
                expected = f"for token ids below {vocab_size}, as many as the model has"
                raise RefusedRequest(f"`logit_bias` must be {expected}, got {token}.", param="logit_bias")
        named = {name: value for name, value in self.settings.items() if name != "logit_bias"}
        narrowed = {"top_p": 1, "top_k": 0, "min_p": 0}
        is_named = any(named.get(name, neutral) != neutral for name, neutral in narrowed.items())
        temperature = named.get("temperature", own.get("temperature", 1.0) if is_sampled or is_named else 0.0)
        chosen = {"seed": secrets.randbits(63), **own, **named, "temperature": temperature}
        sampling = Sampling(**chosen, logit_bias=bias, num_logprobs=self.num_logprobs, grammar=grammar)
        is_plain = not (temperature or sampling.is_penalized or bias or grammar) and self.num_logprobs is None
        return None if is_plain else sampling


def parameters_of(body: Mapping[str, Any], route: str, model: str | None) -> Parameters:
    """Check all fields.

    Args:
        body: Of the request.
        route: `CHAT` or `COMPLETION`.
        model: The name by which clients call the model; `None` if any name will do.

    Raises:
        RefusedRequest: A field is not known or not served, or its value is wrong.
    """
    given = checked(body, {name: field for name, field in FIELDS.items() if route in field.routes}, route)
    if model is not None and given.get("model", model) != model:
        message = f"`model` must be {model!r} or left out, got {shown(given['model'])}. See /v1/models."
        raise RefusedRequest(message, status=404, param="model", code="model_not_found")
    if "stream_options" in given and not given.get("stream"):
        raise RefusedRequest(
            "`stream_options` must come with `stream`, got it alone. Leave it out.", param="stream_options"
        )
    lengths = {given[name] for name in ("max_tokens", "max_completion_tokens") if name in given}
    if len(lengths) > 1:
        message = "`max_tokens` and `max_completion_tokens` must agree, got two lengths. Leave one out."
        raise RefusedRequest(message, param="max_tokens")
    if all(name in given for name in STRUCTURE) and given["response_format"]["type"] != "text":
        message = "`structured_outputs` must be left out with `response_format`, got both."
        raise RefusedRequest(message, param="structured_outputs")
    if route == CHAT:
        _check_messages(given.get("messages"))
    elif "prompt" not in given:
        raise _wrong("prompt", None)
    stop, options = given.get("stop", []), given.get("stream_options", {})
    found = Parameters(
        num_choices=given.get("n", 1),
        max_new_tokens=next(iter(lengths), None),
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        is_streamed=given.get("stream", False),
        ignores_end=given.get("ignore_eos", False),
        includes_usage=options.get("include_usage", False),
        counts_each=options.get("continuous_usage_stats", False),
        echoes=given.get("echo", False),
        num_logprobs=_num_logprobs(given, route),
        settings={name: given[name] for name in SETTINGS if name in given},
        structure={name: given[name] for name in STRUCTURE if name in given},
        tools=_tools(given),
    )
    if found.ignores_end and found.has_grammar:
        message = "`ignore_eos` must be left out where an answer must match something, got both: it ends by itself."
        raise RefusedRequest(message, param="ignore_eos")
    if found.scores_prompts:
        _check_alone(given)
    return found


def checked(body: Mapping[str, Any], fields: Mapping[str, Field], route: str) -> dict[str, Any]:
    """The fields of a body that are not left out, each checked by itself.

    Args:
        body: Of a request.
        fields: Of its route.
        route: For messages.

    Raises:
        RefusedRequest: A field is not known or not served, or its value is wrong.
    """
    given = {name: value for name, value in body.items() if value is not None}
    for name, value in given.items():
        field = fields.get(name)
        if field is None:
            message = f"`{name}` must be left out, since {route} has no such field.{did_you_mean(name, fields)}"
            raise RefusedRequest(message, param=name)
        if not field.is_right(value):
            raise wrong(name, value, field)
        why_not = field.why_not(value)
        if why_not is not None:
            raise RefusedRequest(f"`{name}` must {why_not}.", param=name)
    return given


def prompts_of(prompt: Any) -> list[str | list[int]]:
    """The prompts of a `prompt` that was checked: texts or token ids."""
    if isinstance(prompt, str) or isinstance(prompt[0], int):
        return [prompt]
    return list(prompt)


def _num_logprobs(given: dict[str, Any], route: str) -> int | None:
    value = given.get("logprobs", False)
    if value is not False and isinstance(value, bool) != (route == CHAT):
        raise _wrong("logprobs", value)
    if value is False:
        if given.get("top_logprobs"):
            raise RefusedRequest(
                "`top_logprobs` must come with `logprobs`, got it alone. Send true.", param="top_logprobs"
            )
        return None
    return int(given.get("top_logprobs", 0) if route == CHAT else value)


def _check_alone(given: dict[str, Any]) -> None:
    """Refuse what would count the tokens of a prompt as those of an answer."""
    for name in ("presence_penalty", "frequency_penalty", "repetition_penalty", "structured_outputs"):
        if given.get(name, 0) not in (0, 1):
            message = f"`{name}` must be left out where `logprobs` come with `echo`, got {shown(given[name])}."
            raise RefusedRequest(message, param=name)


def _tools(given: dict[str, Any]) -> Tools | None:
    """What may be called."""
    names = [each["function"]["name"] for each in given.get("tools", [])]
    choice = given.get("tool_choice", "auto")
    if len(names) > len(set(names)):
        twice = next(name for name in names if names.count(name) > 1)
        raise RefusedRequest(f"`tools` must have different names, got {twice!r} twice.", param="tools")
    if choice not in ("none", "auto") and not names:
        raise RefusedRequest("`tool_choice` must come with `tools`, got it alone. Leave it out.", param="tool_choice")
    if isinstance(choice, dict) and choice["function"]["name"] not in names:
        message = f"`tool_choice` must name one of {names}, got {shown(choice['function']['name'])}."
        raise RefusedRequest(message, param="tool_choice")
    found = tools_of(given)
    # A `response_format` is of texts, and says nothing of calls.
    if found is not None and "structured_outputs" in given and (found.must_call or found.is_strict):
        message = "`tools` that are strict or must be called must come without a grammar of the answer, got both."
        raise RefusedRequest(message, param="tools")
    return found


def _check_messages(messages: list[Any] | None) -> None:
    """Refuse messages that are not roles and texts."""
    if messages is None:
        raise _wrong("messages", None)
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise RefusedRequest(f"`messages` must each have a role, got {shown(message)}.", param="messages")
        if message["role"] not in ROLES:
            expected = f"must be one of {', '.join(ROLES)}"
            raise RefusedRequest(f"the `role` of a message {expected}, got {shown(message['role'])}.", param="messages")
        if message["role"] == "tool" and not isinstance(message.get("tool_call_id"), str):
            raise RefusedRequest("a message of the role tool must have a `tool_call_id`, got none.", param="messages")
        calls = message.get("tool_calls") or []
        if not isinstance(calls, list) or not all(map(is_call, calls)):
            expected = "calls of functions, each with a name and with a JSON object as its arguments, in text"
            raise RefusedRequest(f"`tool_calls` of a message must be {expected}, got {shown(calls)}.", param="messages")
        for name, value in message.items():
            if name not in MESSAGE and value:
                raise RefusedRequest(f"a message must have no `{name}`, which is not served.", param="messages")
        content = message.get("content")
        if content is None and not calls:
            told = f"a message of the role {message['role']} must have a `content`, got none. Write some text."
            raise RefusedRequest(told, param="messages")
        parts = content if isinstance(content, list) else []
        if not isinstance(content, str | list | None) or not all(map(_is_text, parts)):
            expected = "each have a text, or a list of texts, as content"
            raise RefusedRequest(f"`messages` must {expected}, got {shown(content)}.", param="messages")


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _is_same(value: Any, neutral: Any) -> bool:
    """Equal, where `True` is not 1."""
    return bool(value == neutral) and isinstance(value, bool) == isinstance(neutral, bool)


def _wrong(name: str, got: Any) -> RefusedRequest:
    return wrong(name, got, FIELDS[name])


def wrong(name: str, got: Any, field: Field) -> RefusedRequest:
    """The refusal of a value of a field."""
    expected = field.expected if field.is_served else f"{field.expected}, since it is not served"
    return RefusedRequest(f"`{name}` must be {expected}, got {shown(field.culprit(got))}.", param=name)
