"""Captured decode steps: transformers' own tokens, whatever `generate` is asked for, and graphs that are found again.

A CPU has no CUDA graphs, so there `Recorded` takes their place; on a GPU, the same tests replay graphs.
"""

from __future__ import annotations

import copy
import functools
import gc
import inspect
import itertools
import logging
import pickle
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import compare
import models
import pytest
import torch
from models import PAD, greedy, left_padded
from torch import Tensor
from torch.distributed import Work
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GenerationConfig, StoppingCriteria
from transformers.generation.configuration_utils import CompileConfig
from transformers.generation.streamers import BaseStreamer

import hf_kvquant
from hf_kvquant import KVQuantCache, KVQuantConfig, patch, patched, unpatch
from hf_kvquant.cache.states import tensors_of
from hf_kvquant.graphs import capture, decode_loop
from hf_kvquant.graphs.capture import StepRunner
from hf_kvquant.state import Captures, notes_on
from hf_kvquant.upstream.releases import CACHE, cache_of, with_cache

INT4 = {"preset": "int4-token"}
NEW_TOKENS = 9
CUDA_ONLY = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def waited(func: Any, call: Callable[[], Any]) -> Callable[[], Any]:
    """A call, and the end of what other ranks take part in, for which a GPU's stream waits by itself."""

    def complete() -> Any:
        out = call()
        if func.namespace == "_c10d_functional":
            torch.ops._c10d_functional.wait_tensor(out)
        elif func.namespace == "c10d":
            Work.unbox(out[1]).wait()
        return out

    return complete


class Recorded(StepRunner):
    """What a CUDA graph is, on a CPU: the calls into PyTorch, with their tensors, to be made again one by one.

    Whatever a step takes from anywhere else goes stale, and tokens tell. Unlike a graph's, the first calls do run.
    """

    made = 0
    runs = 0

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        Recorded.made += 1

    def run(self, step: Callable[[], Any], cache: KVQuantCache) -> Any:
        Recorded.runs += 1
        return super().run(step, cache)

    def _run_once(self, step: Callable[[], Any]) -> Any:
        return step()

    def _record(self, step: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        calls: list[Any] = []

        class Recording(TorchDispatchMode):
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                if any(issubclass(each, DTensor) for each in types):
                    return NotImplemented  # it calls this again with the tensors of the rank
                if func is torch.ops.aten._local_scalar_dense.default:
                    raise RuntimeError("the host waits for the device")
                out = func(*args, **(kwargs or {}))
                call = functools.partial(func, *args, **(kwargs or {}))
                calls.append((waited(func, call), out))
                return out

        with Recording():
            result = step()
        rounds = itertools.count()

        def replay() -> None:
            for call, out in calls if next(rounds) else ():
                for old, new in zip(pytree.tree_leaves(out), pytree.tree_leaves(call()), strict=True):
                    if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():  # neither a view nor in place
                        old.copy_(new)

        return replay, result


@pytest.fixture(autouse=True)
def runners(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Graphs, or what takes their place, and logs that say everything once more."""
    monkeypatch.setitem(capture.RUNNERS, "cpu", Recorded)
    Recorded.made = Recorded.runs = 0
    capture.log_slower_loop.cache_clear()
    yield


@pytest.fixture
def model(device: str) -> Any:
    """A llama of the test's own."""
    return copy.deepcopy(models.llama()).to(device)


def generated(model: Any, config: dict[str, Any], inputs: dict[str, Tensor] | None = None, **options: Any) -> Any:
    """What `generate` returns under a config: steps in transformers' loop and uncaptured, without `capture=True`."""
    placed = {name: value.to(model.device) for name, value in (inputs or left_padded()).items()}
    defaults = {"max_new_tokens": NEW_TOKENS, "do_sample": False}
    if not config.get("capture"):
        config, defaults = {**config, "static": True}, {**defaults, "disable_compile": True}
    with patched(model, config):
        torch.manual_seed(5)
        return model.generate(**placed, **{**defaults, **options})


def check_same(model: Any, config: dict[str, Any] = INT4, **options: Any) -> Tensor:
    """Compare sequences with and without `capture=True`."""
    expected = generated(model, config, **options)
    compare.assert_same(generated(model, {**config, "capture": True}, **options), expected.cpu(), "sequences")
    return expected


def check_same_caches(actual: KVQuantCache, expected: KVQuantCache) -> None:
    """Of a window, what the next query sees."""
    for storage, other in zip(actual.storages, expected.storages, strict=True):
        assert storage.length == other.length == int(storage.lengths.max()), storage.name
        begin = max(0, storage.length - storage.window + 1) if storage.window else 0
        for x, y, side in zip(storage.dequantize(), other.dequantize(), ("keys", "values"), strict=True):
            compare.assert_same(x[:, :, begin:], y[:, :, begin:].cpu(), f"{storage.name}, {side}")


def slower(reason: str) -> str:
    return f"generate waits for the device after every captured step: {reason}. Correct, slower."


def slower_loop(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.name == "hf_kvquant.graphs.capture"]


# --- the loop ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pads", [(0,), (3, 0, 5)], ids=["plain", "left_pad"])
@pytest.mark.parametrize("preset", ["none", "int8", "int4-channel", "fp8"])
def test_greedy(model: Any, preset: str, pads: tuple[int, ...], caplog: pytest.LogCaptureFixture) -> None:
    check_same(model, {"preset": preset}, inputs=left_padded(pads=pads))
    check_same(model, {"preset": preset, "layers": {0: "int8"}}, inputs=left_padded(batch=1, pads=pads))
    assert not slower_loop(caplog)


# LongCat's experts wait for the device.
CAPTURED_LATENTS = [name for name in models.WITH_LATENTS if name != "longcat_flash"]


@pytest.mark.parametrize(
    "family", ["qwen2", "qwen3_moe", "mistral", "cohere", "gemma2", "diffllama", *CAPTURED_LATENTS]
)
def test_families(family: str, device: str) -> None:
    """Biases that are centred, experts, softcaps, masks by kind of layer, keys that models look at, and latents."""
    options = dict(models.FAMILIES[family].options)
    if "layer_types" in options:
        options["layer_types"] = ["full_attention"] * 2
    check_same(models.on(device, models.build(models.FAMILIES[family].model_type, **options)))


@pytest.mark.parametrize("preset", ["none", "int8", "int4"])
def test_latents(preset: str, device: str) -> None:
    for pads in ((0,), (3, 0, 5)):
        check_same(models.on(device, models.family("minicpm3")), {"preset": preset}, inputs=left_padded(pads=pads))


# Layers with a state alone, or beside keys and values.
STATEFUL = [name for name in models.FAMILIES if name in {*models.STATES, "jamba", "kimi_linear", "bailing_hybrid"}]


@pytest.mark.full(
    when=lambda pads, preset: (pads == (0,)) != (preset == "int8"),
    reason="states know neither how keys are stored nor, in a step of one token, of padding",
)
@pytest.mark.parametrize("pads", [(0,), (3, 0, 5)], ids=["plain", "left_pad"])
@pytest.mark.parametrize("preset", ["int8", "int4"])
@pytest.mark.parametrize("family", STATEFUL)
def test_states(family: str, preset: str, pads: tuple[int, ...], device: str) -> None:
    """Those of another cache must not be read, so there are two calls with other prompts."""
    model = models.on(device, models.family(family))
    check_same(model, {"preset": preset}, inputs=left_padded(pads=pads))
    check_same(model, {"preset": preset}, inputs=left_padded(tokens=12, pads=pads))


@pytest.fixture(params=["qwen3_5_text", "falcon_h1"])
def stateful(request: pytest.FixtureRequest, device: str) -> Any:
    """A model whose layers have a state alone, and one whose layers have it beside keys and values."""
    return models.on(device, copy.deepcopy(models.family(request.param)))


@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 3, "num_return_sequences": 2},
        {"do_sample": True, "num_return_sequences": 3},
        {"prefill_chunk_size": 4},
    ],
    ids=["beams", "samples", "chunks"],
)
def test_ways_to_generate_with_states(stateful: Any, options: dict[str, Any]) -> None:
    for _ in range(2):
        check_same(stateful, **options)


@pytest.mark.parametrize("family", decode_loop._LIMIT_LOGITS)
def test_what_these_types_prepare(family: str) -> None:
    """Two lines and a return: had they more to say, the loop might advance inputs in another way."""
    source = inspect.getsource(type(models.family(family)).prepare_inputs_for_generation).split("\n", 1)[1]
    assert [line.strip() for line in source.strip().splitlines()] == [
        'kwargs["logits_to_keep"] = self.config.num_logits_to_keep',
        "model_inputs = super().prepare_inputs_for_generation(input_ids, **kwargs)",
        "return model_inputs",
    ]


def test_states_come_from_the_pool(stateful: Any) -> None:
    """Else each call would capture its own step."""
    inputs = [left_padded(tokens=tokens) for tokens in (9, 12, 9)]
    expected = [generated(stateful, INT4, each) for each in inputs]
    patch(stateful, {**INT4, "capture": True})
    for each, sequences in zip(inputs, expected, strict=True):
        placed = {name: value.to(stateful.device) for name, value in each.items()}
        output = stateful.generate(**placed, max_new_tokens=NEW_TOKENS, do_sample=False)
        compare.assert_same(output, sequences.cpu(), "sequences")
    assert steps_of(stateful) == 1
    unpatch(stateful)


def test_copies_have_states_of_their_own(stateful: Any) -> None:
    """A pool must not come along: it holds the buffers of the model's next cache."""
    options = {"return_dict_in_generate": True, "max_new_tokens": 4}
    patch(stateful, {**INT4, "capture": True})
    placed = {name: value.to(stateful.device) for name, value in left_padded().items()}
    output = stateful.generate(**placed, do_sample=False, **options)
    cache = cache_of(output)
    copied = copy.deepcopy(cache)
    for layer, other in zip(cache.layers, copied.layers, strict=True):
        states, others = list(tensors_of(layer)), list(tensors_of(other))
        assert getattr(other, "pool", None) is None and len(states) == len(others)
        for state, copied_state in zip(states, others, strict=True):
            compare.assert_same(copied_state, state.cpu(), "state")
            assert state.data_ptr() != copied_state.data_ptr()
    longer = torch.cat([output.sequences, output.sequences[:, -3:]], dim=1)
    mask = torch.cat([placed["attention_mask"], torch.ones_like(longer)], dim=1)[:, : longer.shape[1]]
    ends = [
        stateful.generate(longer, attention_mask=mask, do_sample=False, max_new_tokens=4, **with_cache(each))
        for each in (cache, copied)
    ]
    compare.assert_same(ends[1], ends[0].cpu(), "sequences")
    unpatch(stateful)


def test_no_step_runs_behind_a_state_that_is_kept(stateful: Any) -> None:
    """The text goes on with the cache: tokens behind the stop would be in its states."""
    ended = {"eos_token_id": ends(stateful, (2, 5, 3)), "pad_token_id": PAD, "return_dict_in_generate": True}
    outputs = []
    for config in (INT4, {**INT4, "capture": True}):
        output = generated(stateful, config, max_new_tokens=20, **ended)
        longer = torch.cat([output.sequences, output.sequences[:, -3:]], dim=1)
        mask = torch.cat([left_padded()["attention_mask"].to(longer.device), torch.ones_like(longer)], dim=1)
        inputs = {"input_ids": longer, "attention_mask": mask[:, : longer.shape[1]]}
        outputs.append(generated(stateful, config, inputs, **with_cache(cache_of(output))))
    compare.assert_same(outputs[1], outputs[0].cpu(), "sequences")


@CUDA_ONLY
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("preset", ["int8", "fp8", "int4"])
def test_latents_that_kernels_serve(preset: str, dtype: torch.dtype) -> None:
    sizes = {**models.FAMILIES["minicpm3"].options, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
    check_same(models.build("minicpm3", dtype, None, **sizes).cuda(), {"preset": preset})


@pytest.mark.parametrize("tokens", [8, 252], ids=["short", "round_the_end"])
@pytest.mark.parametrize("family, preset", [("gemma2", "int4-token"), ("gpt_oss", "int4-channel"), ("mistral", "none")])
def test_sliding_windows(family: str, preset: str, tokens: int, device: str) -> None:
    options = {**models.FAMILIES[family].options, "max_position_embeddings": 512, "sliding_window": 6}
    model = models.on(device, models.build(models.FAMILIES[family].model_type, **options))
    inputs = left_padded(tokens=tokens, pads=(3, 0, 5))
    check_same(model, {"preset": preset}, inputs=inputs)
    ending = {"eos_token_id": list(range(3, 20)), "pad_token_id": PAD, "return_dict_in_generate": True}
    config = {"preset": preset, "max_cache_len": 300}
    expected, output = (
        generated(model, {**config, **option}, inputs, max_new_tokens=20, **ending)
        for option in ({}, {"capture": True})
    )
    compare.assert_same(output.sequences, expected.sequences.cpu(), "sequences")
    check_same_caches(cache_of(output), cache_of(expected))
    assert cache_of(output).storages[0].is_ring


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "mistral"])
def test_fused_steps_give_the_same_bits(
    family: str, dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = dict(models.FAMILIES[family].options)
    if "layer_types" in options:
        options["layer_types"] = ["full_attention"] * 2
    model = models.build(family, dtype, **options).to(device)
    check_same(model)
    outputs = {"return_dict_in_generate": True, "output_logits": True}
    expected = generated(model, INT4, **outputs)
    monkeypatch.setattr(model, "_valid_auto_compile_criteria", lambda *args: True)
    actual = generated(model, {**INT4, "capture": True}, **outputs)
    for step, (x, y) in enumerate(zip(actual.logits, expected.logits, strict=True)):
        compare.assert_same(x, y.cpu(), f"{family} {dtype}: logits {step}")


@pytest.mark.parametrize("max_new_tokens", [1, 2, 3])
def test_few_tokens(model: Any, max_new_tokens: int) -> None:
    check_same(model, max_new_tokens=max_new_tokens)
    assert model.device.type == "cuda" or Recorded.runs == max_new_tokens - 1


def test_prompts_in_chunks(model: Any) -> None:
    check_same(model, inputs=left_padded(tokens=16), prefill_chunk_size=5)


def test_prompts_as_embeddings(model: Any, caplog: pytest.LogCaptureFixture) -> None:
    inputs = left_padded(pads=(0,))
    embeddings = model.get_input_embeddings()(inputs["input_ids"].to(model.device)).detach()
    check_same(model, inputs={"inputs_embeds": embeddings, "attention_mask": inputs["attention_mask"]})
    assert slower_loop(caplog) == [slower("the model is fed 'inputs_embeds'")]


def test_a_tokenizer_that_nobody_asks(model: Any, caplog: pytest.LogCaptureFixture) -> None:
    check_same(model, tokenizer=models.tokenizer())
    assert not slower_loop(caplog)


def test_arguments_by_position(model: Any) -> None:
    ids = left_padded(pads=(0,))["input_ids"].to(model.device)
    config = GenerationConfig(do_sample=False, max_new_tokens=NEW_TOKENS, pad_token_id=PAD)
    expected = generated(model, INT4, left_padded(pads=(0,)))
    with patched(model, {**INT4, "capture": True}):
        compare.assert_same(model.generate(ids, config), expected.cpu(), "sequences")
        assert steps_of(model) == 1


def test_several_sequences_a_prompt(model: Any) -> None:
    check_same(model, do_sample=True, num_return_sequences=3)


def ends(model: Any, steps: tuple[int, ...]) -> list[int]:
    """Tokens that end row `i` at step `steps[i]` of greedy decoding, if not before."""
    tokens = generated(model, INT4)[:, -NEW_TOKENS:]
    return sorted({int(tokens[row, step]) for row, step in enumerate(steps)})


@pytest.mark.parametrize("steps", [(0, 0, 0), (1, 1, 1), (2, 5, 3), (4, 8, 6), (3,)], ids=str)
@pytest.mark.parametrize("preset", ["int4-token", "int4-channel"])
def test_rows_that_end_at_different_steps(model: Any, preset: str, steps: tuple[int, ...]) -> None:
    """Steps behind the stop leave no trace in tokens, cache and random numbers."""
    options = {"eos_token_id": ends(model, steps), "pad_token_id": PAD, "return_dict_in_generate": True}
    config = {"preset": preset, "residual_length": 4 if preset == "int4-token" else 0}
    outputs = []
    for capture_option in ({}, {"capture": True}):
        output = generated(model, {**config, **capture_option}, max_new_tokens=20, **options)
        outputs.append(output)
    expected, output = outputs
    assert expected.keys() == output.keys()
    compare.assert_same(output.sequences, expected.sequences.cpu(), "sequences")
    check_same_caches(cache_of(output), cache_of(expected))


def test_nothing_runs_behind_a_stop_that_a_crop_could_not_undo(model: Any) -> None:
    options = {"eos_token_id": ends(model, (2, 5, 3)), "pad_token_id": PAD, "return_dict_in_generate": True}
    runs = {}
    for windows in (0, 4):
        Recorded.runs = 0
        output = generated(model, {**INT4, "residual_length": windows, "capture": True}, **options)
        runs[windows] = Recorded.runs - (output.sequences.shape[1] - left_padded()["input_ids"].shape[1] - 1)
    assert model.device.type == "cuda" or runs == {0: 2, 4: 0}


@pytest.mark.parametrize(
    "sampling",
    [{}, {"temperature": 0.7, "top_k": 5}, {"top_k": 0, "top_p": 0.8}, {"min_p": 0.1}, {"typical_p": 0.9}],
    ids=str,
)
def test_sampling_draws_the_same_numbers(model: Any, sampling: dict[str, Any]) -> None:
    check_same(model, do_sample=True, **sampling)


def test_random_numbers_after_a_stop_are_those_of_transformers(model: Any) -> None:
    options = {"do_sample": True, "eos_token_id": list(range(3, 40)), "pad_token_id": PAD}
    check_same(model, max_new_tokens=30, **options)
    drawn = []
    for config in (INT4, {**INT4, "capture": True}):
        assert generated(model, config, max_new_tokens=30, **options).shape[1] < 30
        drawn.append(torch.rand(4, device=model.device))
    compare.assert_same(drawn[1], drawn[0].cpu(), "the numbers drawn next")


class Recorder(BaseStreamer):
    """Remembers what it was given."""

    def __init__(self) -> None:
        self.items: list[Any] = []

    def put(self, value: Tensor) -> None:
        self.items.append(value.tolist())

    def end(self) -> None:
        self.items.append("end")


@pytest.mark.parametrize("options", [{}, {"repetition_penalty": 1.3}], ids=["own_loop", "loop_of_transformers"])
def test_streamers(model: Any, options: dict[str, Any]) -> None:
    streamers = [Recorder(), Recorder()]
    for streamer, config in zip(streamers, (INT4, {**INT4, "capture": True}), strict=True):
        generated(model, config, streamer=streamer, **options)
    assert streamers[0].items == streamers[1].items and streamers[0].items[-1] == "end"


def test_a_chat_goes_on_with_its_cache(model: Any) -> None:
    inputs = {name: value.to(model.device) for name, value in left_padded(tokens=6).items()}
    replies = {}
    for name in ("capture", "static"):
        config = KVQuantConfig.from_dict({**INT4, "max_cache_len": 64, name: True})
        with patched(model, config):
            options = {"return_dict_in_generate": True, "disable_compile": name == "static", "do_sample": False}
            output = model.generate(**inputs, max_new_tokens=NEW_TOKENS, **options)
            cache, ids = cache_of(output), torch.cat([output.sequences, inputs["input_ids"][:, -3:]], dim=1)
            mask = torch.ones_like(ids)
            mask[:, :6] = inputs["attention_mask"]
            again = model.generate(ids, attention_mask=mask, **with_cache(cache), max_new_tokens=NEW_TOKENS, **options)
            assert cache_of(again) is cache
            replies[name] = again
    compare.assert_same(replies["capture"].sequences, replies["static"].sequences.cpu(), "the second reply")
    check_same_caches(cache_of(replies["capture"]), cache_of(replies["static"]))


def test_a_cache_that_is_too_short_is_filled_and_then_refused(model: Any) -> None:
    messages, lengths = [], []
    for config in ({"static": True}, {"capture": True}):
        cache = KVQuantCache(model.config, {**INT4, **config}, max_cache_len=12)
        with pytest.raises(ValueError) as raised:
            generated(model, {**INT4, **config}, **with_cache(cache), disable_compile="static" in config)
        messages.append(str(raised.value))
        lengths.append([storage.length for storage in cache.storages])
    assert messages[0] == messages[1] and "`max_cache_len` must be at least 13" in messages[0]
    assert lengths == [[12, 12]] * 2


def test_an_end_within_a_cache_that_is_too_short(model: Any) -> None:
    def options(config: dict[str, Any]) -> dict[str, Any]:
        cache = KVQuantCache(model.config, {**INT4, **config}, max_cache_len=12)
        return {CACHE: cache, "eos_token_id": ends(model, (2, 2, 2)), "pad_token_id": PAD}

    expected = generated(model, INT4, **options({}))
    actual = generated(model, {**INT4, "capture": True}, **options({"capture": True}))
    compare.assert_same(actual, expected.cpu(), "sequences")


# --- transformers' loop -----------------------------------------------------------------------------------------------


class StopsAt(StoppingCriteria):
    """Every sequence ends at a length."""

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return torch.full((input_ids.shape[0],), input_ids.shape[1] >= 14, device=input_ids.device)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (
            {"repetition_penalty": 1.3},
            "RepetitionPenaltyLogitsProcessor looks at more than the newest scores",
        ),
        ({"stopping_criteria": [StopsAt()]}, "StopsAt decides on the host"),
        (
            {"tokenizer": models.tokenizer(), "stop_strings": ["a", "K"]},
            "stop strings and token healing need the tokenizer",
        ),
        ({"max_time": 1000.0}, "MaxTimeCriteria decides on the host"),
    ],
    ids=lambda value: None if isinstance(value, str) else "-".join(value),
)
def test_what_the_loop_does_not_serve(
    model: Any, options: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = generated(model, INT4, **options)
    # What lets transformers ask for something compiled; on a GPU it does so by itself.
    monkeypatch.setattr(model, "_valid_auto_compile_criteria", lambda *args: True)
    with caplog.at_level(logging.WARNING, "hf_kvquant"):
        actual = generated(model, {**INT4, "capture": True}, **options)
    compare.assert_same(actual, expected.cpu(), "sequences")
    assert slower_loop(caplog) == [slower(reason)]
    assert model.device.type == "cuda" or (Recorded.made, Recorded.runs) == (1, actual.shape[1] - 9 - 1)


def test_models_that_prepare_their_inputs_themselves(
    device: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = models.on(device, models.build("phi3", **models.FAMILIES["phi3"].options))
    expected = generated(model, INT4)
    monkeypatch.setattr(model, "_valid_auto_compile_criteria", lambda *args: True)
    compare.assert_same(generated(model, {**INT4, "capture": True}), expected.cpu(), "sequences")
    assert slower_loop(caplog) == [slower("Phi3ForCausalLM has its own prepare_inputs_for_generation")]
    assert device == "cuda" or (Recorded.made, Recorded.runs) == (1, NEW_TOKENS - 1)


def test_everything_about_the_steps_can_be_returned(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    options |= {"output_hidden_states": True}
    expected = generated(model, INT4, **options)
    monkeypatch.setattr(model, "_valid_auto_compile_criteria", lambda *args: True)
    output = generated(model, {**INT4, "capture": True}, **options)
    for name in ("sequences", "scores", "logits"):
        for step, (x, y) in enumerate(zip(output[name], expected[name], strict=True)):
            compare.assert_same(x, y.cpu(), f"{name} {step}")
    for step, (states, other) in enumerate(zip(output.hidden_states, expected.hidden_states, strict=True)):
        for x, y in zip(states, other, strict=True):
            compare.assert_same(x, y.cpu(), f"hidden states {step}")
    check_same_caches(cache_of(output), cache_of(expected))


@pytest.mark.parametrize("prefill_chunk_size", [None, 4])
def test_masks_with_holes(model: Any, prefill_chunk_size: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = left_padded()
    inputs["attention_mask"][1, 4] = 0
    options = {"inputs": inputs, "prefill_chunk_size": prefill_chunk_size}
    expected = generated(model, INT4, **options)
    monkeypatch.setattr(model, "_valid_auto_compile_criteria", lambda *args: True)
    compare.assert_same(generated(model, {**INT4, "capture": True}, **options), expected.cpu(), "sequences")


@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 3},
        {"use_cache": False},
        {"disable_compile": True},
        {"cache_implementation": "dynamic"},
        {"cache_implementation": "quantized", "cache_config": {"backend": "hf_kvquant", "preset": "int4-token"}},
    ],
    ids=lambda options: next(iter(options)),
)
def test_what_captures_nothing(model: Any, options: dict[str, Any]) -> None:
    check_same(model, **options)
    assert not Recorded.runs


@contextmanager
def forward_over(model: Any, cache: KVQuantCache) -> Iterator[Callable[[], Any]]:
    """A forward that runs one step at a time behind a prompt of nine tokens."""
    inputs = {name: value.to(model.device) for name, value in left_padded().items()}
    with patched(model, {**INT4, "capture": True}), torch.no_grad():
        model(**inputs, **with_cache(cache), use_cache=True)
        step = model.get_compiled_call(None)
        yield lambda: step(input_ids=inputs["input_ids"][:, :1], **with_cache(cache))


@pytest.mark.parametrize("num_steps", range(4), ids=["as_it_is", "recorded", "replayed", "replayed_again"])
def test_a_forward_checks_for_room(model: Any, num_steps: int) -> None:
    """Before each kind of step; a graph would write behind the end."""
    cache = KVQuantCache(model.config, {**INT4, "capture": True}, max_cache_len=9 + num_steps)
    with forward_over(model, cache) as step:
        for _ in range(num_steps):
            step()
        with pytest.raises(ValueError, match=f"`max_cache_len` must be at least {10 + num_steps}"):
            step()
    assert [storage.length for storage in cache.storages] == [9 + num_steps] * 2


@pytest.mark.parametrize("num_steps", range(3), ids=["as_it_is", "recorded", "replayed"])
def test_a_forward_checks_lengths(model: Any, num_steps: int) -> None:
    cache = KVQuantCache(model.config, {**INT4, "capture": True}, max_cache_len=40)
    with forward_over(model, cache) as step:
        for _ in range(num_steps):
            step()
        cache.layers[1].crop(-1)
        with pytest.raises(ValueError, match="a captured step must find all layers of a cache at one length"):
            step()
    assert [storage.length for storage in cache.storages] == [9 + num_steps, 8 + num_steps]


# --- what is kept -----------------------------------------------------------------------------------------------------


def steps_of(model: Any) -> int:
    return len(notes_on(model).captures)


def test_a_step_serves_later_calls_over_the_same_buffers(model: Any) -> None:
    config = {**INT4, "capture": True}
    expected = generated(model, INT4)
    cache = KVQuantCache(model.config, config, max_cache_len=40)
    patch(model, config)
    for _ in range(3):
        cache.reset()
        output = greedy(model, left_padded(), NEW_TOKENS, **with_cache(cache), output_logits=False)
        compare.assert_same(output.sequences, expected.cpu(), "sequences")
    cache.reset()
    longer = greedy(model, left_padded(tokens=20), 4, **with_cache(cache), output_logits=False).sequences
    assert steps_of(model) == 1
    unpatch(model)
    compare.assert_same(longer, generated(model, INT4, left_padded(tokens=20), max_new_tokens=4).cpu(), "longer prompt")


def test_a_step_serves_later_calls_whose_caches_come_from_the_pool(model: Any) -> None:
    """Somewhat longer prompts too: buffers are larger than what a call needs."""
    inputs = {name: value.to(model.device) for name, value in left_padded().items()}
    # Padded as unequally, since steps over even sequences make no plan.
    longer = {name: value.to(model.device) for name, value in left_padded(tokens=30, pads=(10, 0, 16)).items()}
    expected = [generated(model, INT4, each) for each in (inputs, longer)]
    patch(model, {**INT4, "capture": True})
    for each, sequences in ((inputs, expected[0]), (longer, expected[1]), (inputs, expected[0])):
        output = model.generate(**each, max_new_tokens=NEW_TOKENS, do_sample=False)
        compare.assert_same(output, sequences.cpu(), "sequences")
    assert steps_of(model) == 1


def test_layers_of_different_lengths(model: Any) -> None:
    """A graph would hold the number of tokens of a layer that is behind the others."""
    cache = KVQuantCache(model.config, {**INT4, "capture": True}, max_cache_len=40)
    patch(model, {**INT4, "capture": True})
    output = greedy(model, left_padded(), **with_cache(cache), output_logits=False).sequences
    cache.layers[1].crop(-1)
    message = (
        "lengths: a captured step must find all layers of a cache at one length, got layers of different lengths. "
        "Reset the cache, or crop all of its layers alike."
    )
    lengths = [storage.length for storage in cache.storages]
    with pytest.raises(ValueError) as raised:
        model.generate(output, attention_mask=torch.ones_like(output), **with_cache(cache), max_new_tokens=3)
    assert str(raised.value) == message
    assert [storage.length for storage in cache.storages] == lengths


def test_other_buffers_weights_and_choices_have_steps_of_their_own(model: Any) -> None:
    caches = [KVQuantCache(model.config, {**INT4, "capture": True}, max_cache_len=40) for _ in range(2)]
    patch(model, {**INT4, "capture": True})

    def run(cache: KVQuantCache, **options: Any) -> int:
        cache.reset()
        greedy(model, left_padded(), **with_cache(cache), output_logits=False, **options)
        return steps_of(model)

    counts = [run(cache) for cache in (*caches, *caches)]
    counts.append(run(caches[0], eos_token_id=VOCABULARY_END, pad_token_id=PAD))
    head = model.get_output_embeddings()
    head.weight = torch.nn.Parameter(head.weight.detach().clone())
    counts.append(run(caches[0]))
    assert counts == [1, 2, 2, 2, 3, 4]
    run(caches[1])
    assert steps_of(model) == Captures.LIMIT == 4


def test_cycles_are_not_collected_while_a_step_is_recorded(model: Any) -> None:
    """One may hold another graph, and freeing it would end the recording."""
    graphs, are_alive = [], []
    if model.device.type == "cuda":
        for _ in range(2):
            graphs.append(torch.cuda.CUDAGraph())
            with torch.cuda.graph(graphs[-1]):
                torch.zeros(1, device="cuda")

    def leave_a_cycle(module: Any, args: Any, kwargs: Any) -> None:
        if kwargs["input_ids"].shape[1] == 1:
            cycle = type("Cycle", (), {})()
            cycle.itself, cycle.graph = cycle, graphs.pop() if graphs else None
            reference = weakref.ref(cycle)
            del cycle
            _ = [[] for _ in range(100_000)]  # Python collects after so many new objects
            are_alive.append(reference() is not None)

    patch(model, {**INT4, "capture": True})
    model.register_forward_pre_hook(leave_a_cycle, with_kwargs=True)
    greedy(model, left_padded(), output_logits=False)
    assert are_alive == [False, True] and gc.isenabled()


def test_training_has_steps_of_its_own(model: Any) -> None:
    """Dropout is one of the things that it switches on."""
    cache = KVQuantCache(model.config, {**INT4, "capture": True}, max_cache_len=40)
    patch(model, {**INT4, "capture": True})
    counts = []
    for is_training in (False, True, False):
        model.train(is_training)
        cache.reset()
        greedy(model, left_padded(), **with_cache(cache), output_logits=False)
        counts.append(steps_of(model))
    assert counts == [1, 2, 2]


def test_the_step_that_waits_longest_goes_first() -> None:
    captures, made = Captures(), []
    for key in "abcda" + "eabcd":
        captures.get(key, lambda key=key: made.append(key))
    assert "".join(made) == "abcd" + "e" + "bcd" and len(captures) == Captures.LIMIT


VOCABULARY_END = models.VOCAB_SIZE - 1


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["copy", "pickle"]
)
def test_copies_of_a_model_capture_their_own(model: Any, copied: Callable[[Any], Any]) -> None:
    patch(model, {**INT4, "capture": True})
    expected = greedy(model, left_padded(), output_logits=False).sequences
    twin = copied(model)
    assert (steps_of(model), steps_of(twin)) == (1, 0)
    compare.assert_same(greedy(twin, left_padded(), output_logits=False).sequences, expected.cpu(), "sequences")
    assert (steps_of(model), steps_of(twin)) == (1, 1)


def test_unpatch_leaves_nothing(model: Any) -> None:
    before = dict(model.__dict__)
    patch(model, {**INT4, "capture": True})
    assert {"generate", "get_compiled_call"} <= model.__dict__.keys()
    patch(model, INT4)
    assert "get_compiled_call" not in model.__dict__
    with patched(model, {**INT4, "capture": True}):
        assert "get_compiled_call" in model.__dict__
    assert "get_compiled_call" not in model.__dict__
    unpatch(model)
    assert model.__dict__ == before


def test_a_patched_model_compiles_for_other_caches(model: Any) -> None:
    # Against an unpatched model that is compiled too: while it is traced, transformers' masks choose other kernels.
    plain, config = copy.deepcopy(model), CompileConfig(backend="eager", mode=None)
    patch(model, {**INT4, "capture": True})
    ids = torch.zeros((1, 1), dtype=torch.int64, device=model.device)
    with torch.no_grad():
        logits = [each.get_compiled_call(config)(input_ids=ids).logits for each in (model, plain)]
    compare.assert_same(logits[0], logits[1].cpu(), "logits")
    torch._dynamo.reset()


# --- refusals ---------------------------------------------------------------------------------------------------------


def check_refused(model: Any, error: type[Exception], message: str, **options: Any) -> None:
    """A call of `generate` is refused and the cache it may have been given stays empty."""
    with pytest.raises(error) as raised:
        greedy(model, left_padded(), **options)
    assert str(raised.value) == message


def not_capturable(reason: str) -> str:
    return (
        f"generate: `capture` must be False for this LlamaForCausalLM, got True: {reason}. "
        "Patch it without capture; static=True lets generate compile where that is possible."
    )


def test_a_machine_without_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(capture.RUNNERS, "cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    model = models.build("llama")
    with pytest.raises(NotImplementedError) as raised:
        patch(model, {**INT4, "capture": True})
    assert str(raised.value) == (
        "patch: `capture` must be False on a machine without a GPU, got True: torch.cuda.is_available() is False, and "
        "CUDA graphs need one. Leave capture out; static=True lets generate compile where that is possible."
    )
    assert not hasattr(model, "_hf_kvquant") and model.config._attn_implementation == "sdpa"


def test_a_model_that_is_not_moved_to_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be patched where there is one, since it could be moved until it generates."""
    monkeypatch.delitem(capture.RUNNERS, "cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    model = models.build("llama")
    with patched(model, {**INT4, "capture": True}):
        message = not_capturable("the model is on cpu, and CUDA graphs need a GPU")
        check_refused(model, NotImplementedError, message)
        cache = KVQuantCache(model.config, {**INT4, "capture": True}, max_cache_len=40)
        check_refused(model, NotImplementedError, message, **with_cache(cache))
        assert all(storage.is_empty for storage in cache.storages)


def test_several_devices(model: Any) -> None:
    model.lm_head.to("meta")
    with patched(model, {**INT4, "capture": True}):
        devices = sorted((str(model.device), "meta"))
        reason = f"the model is spread over {devices}, and a graph is captured on one device"
        check_refused(model, NotImplementedError, not_capturable(reason))


def test_weights_that_do_not_stay(model: Any) -> None:
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach()[:0])
    with patched(model, {**INT4, "capture": True}):
        check_refused(model, NotImplementedError, not_capturable("its weights are divided among processes"))


def test_quantised_weights_that_serve_no_graph(model: Any) -> None:
    model.hf_quantizer = type("Quantizer", (), {"is_compileable": False})()
    with patched(model, {**INT4, "capture": True}):
        reason = "transformers says that its quantised weights do not work in a static graph"
        check_refused(model, NotImplementedError, not_capturable(reason))


def test_capture_without_the_patch(model: Any) -> None:
    message = (
        "generate: `capture` must be False unless the model is patched with it, got True. "
        "Call hf_kvquant.patch with capture=True in the config."
    )
    flag = {
        "cache_implementation": "quantized",
        "cache_config": {"backend": "hf_kvquant", "preset": "int4-token", "capture": True},
    }
    cache = KVQuantCache(model.config, {**INT4, "capture": True}, max_cache_len=40)
    with patched(model, INT4):
        check_refused(model, ValueError, message, **flag)
        check_refused(model, ValueError, message, **with_cache(cache))
    hf_kvquant.enable()
    try:
        check_refused(model, ValueError, message, **flag)
    finally:
        hf_kvquant.disable()


def test_capture_and_compilation(model: Any) -> None:
    with patched(model, {**INT4, "capture": True}):
        check_refused(
            model,
            ValueError,
            "generate: `compile_config` must be None with capture=True, got a CompileConfig. Captured steps are not "
            "compiled: leave it out, or patch the model with static=True instead of capture=True.",
            compile_config=CompileConfig(),
        )


def test_the_flag_captures_on_a_model_patched_for_it(model: Any) -> None:
    expected = generated(model, {"preset": "int8"})
    flag = {"backend": "hf_kvquant", "preset": "int8", "capture": True}
    options = {"cache_implementation": "quantized", "cache_config": flag}
    compare.assert_same(generated(model, {**INT4, "capture": True}, **options), expected.cpu(), "sequences")
    assert model.device.type == "cuda" or Recorded.runs == NEW_TOKENS - 1


@pytest.mark.parametrize(
    ("family", "message"),
    [
        (
            "llama4_text",
            "KVQuantCache: `capture` must be False for llama4_text, got True: its layers of type ['chunked_attention'] "
            "keep keys and values outside our buffers, and count them on the host. Pass static=True instead, and "
            "generate compiles.",
        ),
        (
            "gpt_neo",
            "patch: `capture` must be False for GPTNeoForCausalLM, got True: it computes attention by itself, "
            "outside transformers' registry. Pass static=True instead, and generate compiles.",
        ),
    ],
)
def test_models_whose_step_cannot_be_captured(family: str, message: str) -> None:
    model = models.family(family)
    before = dict(model.__dict__)
    with pytest.raises(NotImplementedError) as raised:
        patch(model, {**INT4, "capture": True})
    assert str(raised.value) == message
    assert model.__dict__ == before


def test_a_step_that_waits_for_the_device(model: Any) -> None:
    cache = KVQuantCache(model.config, {**INT4, "capture": True}, max_cache_len=40)
    model.model.layers[1].register_forward_hook(lambda module, args, output: print(output.sum().item()))
    with patched(model, {**INT4, "capture": True}):
        check_refused(
            model,
            RuntimeError,
            "generate: `capture` must be False for this model, got True: its decode step cannot be captured as a CUDA "
            "graph, probably because it waits for the device. Pass static=True instead, and generate compiles.",
            **with_cache(cache),
            output_logits=False,
        )
    # The prompt and the first step, which ran as it was.
    assert [(storage.length, storage.pending) for storage in cache.storages] == [(10, None)] * 2
    if model.device.type == "cuda":
        assert [int(storage.lengths.max()) for storage in cache.storages] == [10, 10]
        assert torch.cuda.current_stream() == torch.cuda.default_stream()
        torch.rand(1, device="cuda")  # still draws numbers
        held = torch.cuda.memory_reserved()
        torch.empty(1 << 28, dtype=torch.uint8, device="cuda")
        torch.cuda.empty_cache()
        assert torch.cuda.memory_reserved() <= held  # still frees memory
        torch.cuda.MemPool()  # would abort the process if a capture seemed to go on


@pytest.mark.parametrize("waits", [True, False])
def test_a_capture_that_fails_is_undone(waits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for torch's captures: one whose step has waited fails at its end, with all of it left open."""
    streams, open_pools, captured = ["outside"], [], []
    stream = SimpleNamespace(device=torch.device("cpu", 0), name="of the capture")

    @contextmanager
    def graph(graph: Any, pool: Any = None, *, stream: Any, capture_error_mode: str) -> Iterator[None]:
        assert capture_error_mode == "thread_local"
        streams.append(stream.name), open_pools.append(pool)
        try:
            yield
        finally:
            if waits and pool is not None:
                raise RuntimeError("operation failed due to a previous error during capture")
            streams.pop(), open_pools.remove(pool), captured.append(graph)

    def end(device: int, pool: Any) -> None:
        if (device, pool) != (0, (0, 7)) or pool not in open_pools:
            raise RuntimeError("not currently recording to mempool_id")
        open_pools.remove(pool)

    released: list[Any] = []
    fakes = {"graph": graph, "current_stream": lambda device: streams[-1], "set_stream": streams.append}
    fakes["CUDAGraph"] = lambda: SimpleNamespace(reset=lambda: None)
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", end, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_releasePool", lambda _, pool: released.append(pool), raising=False)
    failed: Any = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError if waits else ValueError), capture.capturing(failed, (0, 7), stream):  # type: ignore[arg-type]
        raise ValueError
    assert streams[-1] == "outside" and open_pools == []
    assert released == ([(0, 7)] if waits else [])
    assert captured[-1] is not failed  # an empty one, for the sake of random numbers


def generated_again(model: Any, config: dict[str, Any]) -> Tensor:
    """The reply of a cache that is cropped to the prompt but for its last token, which so attends to codes."""
    cache = KVQuantCache(model.config, config, max_cache_len=40)
    generated(model, config, **with_cache(cache))
    cache.crop(8 - cache.storages[0].length)
    return generated(model, config, **with_cache(cache))


@pytest.mark.parametrize("runs", [0, 1, 2], ids=["as_it_is", "recorded", "replayed"])
@pytest.mark.parametrize("is_before", [True, False], ids=["before", "behind"])
def test_steps_that_are_interrupted(
    model: Any, runs: int, is_before: bool, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    """Ctrl-C in each kind of step: the cache holds whole steps, and knows how many."""
    config, runner = {**INT4, "capture": True}, capture.RUNNERS[device]
    expected = generated_again(model, config)
    cache = KVQuantCache(model.config, config, max_cache_len=40)
    name = ("_run_once", "_record", "_record")[runs]
    original = getattr(runner, name)

    def stop() -> None:
        raise KeyboardInterrupt

    def interrupted(self: Any, step: Callable[[], Any]) -> Any:
        if runs < 2:
            if is_before:
                stop()
            original(self, step)
            stop()
        replay, result = original(self, step)
        rounds = itertools.count()

        def replay_once() -> None:
            if next(rounds) == 0:
                return replay()
            if not is_before:
                replay()
            stop()

        return replay_once, result

    monkeypatch.setattr(runner, name, interrupted)
    with pytest.raises(KeyboardInterrupt):
        generated(model, config, **with_cache(cache))
    monkeypatch.undo()
    monkeypatch.setitem(capture.RUNNERS, "cpu", Recorded)
    held = 9 + (2 if runs == 2 else runs) + (not is_before and runs != 1)
    assert [storage.length for storage in cache.storages] == [held] * 2
    if runs != 1 or device == "cuda":  # what takes a graph's place runs while it is recorded
        assert [int(storage.lengths.max()) for storage in cache.storages] == [held] * 2
    with pytest.raises(ValueError, match=rf"call crop\({8 - held}\) on it"):
        generated(model, config, **with_cache(cache))
    cache.crop(8 - held)
    compare.assert_same(generated(model, config, **with_cache(cache)), expected.cpu(), "sequences")


@pytest.mark.parametrize("is_before", [True, False], ids=["before", "behind"])
def test_a_first_step_that_ends_in_the_middle(model: Any, is_before: bool) -> None:
    """It runs layer by layer, and is undone before the next call goes on."""
    config, left = {**INT4, "capture": True}, [1]

    def end(*args: Any) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt

    expected, cache = generated_again(model, config), KVQuantCache(model.config, config, max_cache_len=40)
    module = model.model.layers[1 if is_before else 0].self_attn
    handle = (module.register_forward_pre_hook if is_before else module.register_forward_hook)(end)
    with pytest.raises(KeyboardInterrupt):
        generated(model, config, **with_cache(cache))
    handle.remove()
    assert [storage.length for storage in cache.storages] == [10, 9]
    with pytest.raises(ValueError, match=r"call crop\(-1\) on it"):
        generated(model, config, **with_cache(cache))
    assert [storage.length for storage in cache.storages] == [9, 9]
    cache.crop(-1)
    compare.assert_same(generated(model, config, **with_cache(cache)), expected.cpu(), "sequences")


@CUDA_ONLY
def test_a_step_is_one_graph() -> None:
    """Between replays the host launches nothing but copies of the reports."""
    model = models.on("cuda", models.build("llama"))
    with patched(model, {**INT4, "capture": True, "max_cache_len": 64}):
        cache = KVQuantCache(model.config, {**INT4, "capture": True}, max_cache_len=64)
        launches = []
        for new_tokens in (10, 30):
            for _ in range(2):  # the first one captures
                cache.reset()
                with torch.profiler.profile(acc_events=True) as profile:
                    greedy(model, left_padded(), new_tokens, **with_cache(cache), output_logits=False)
            launches.append(sum(event.count for event in profile.key_averages() if event.key == "cudaLaunchKernel"))
            graphs = sum(event.count for event in profile.key_averages() if event.key == "cudaGraphLaunch")
            assert graphs == new_tokens - 1
    # At most what hands a graph its random numbers.
    assert launches[1] - launches[0] <= 2 * 20
