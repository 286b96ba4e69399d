"""Assisted decoding that replays captured forwards: the tokens of uncaptured decoding, graphs found again."""

from __future__ import annotations

import logging
from typing import Any

import compare
import models
import pytest
import torch
from models import PAD
from test_capture import Recorded, Recorder, runners  # noqa: F401
from torch import Tensor

from hf_kvquant import KVQuantCache, patched
from hf_kvquant.generate import hook
from hf_kvquant.graphs import assisted, capture
from hf_kvquant.state import Captures, notes_on, patch_of
from hf_kvquant.upstream.releases import cache_of, with_cache

INT8 = {"preset": "int8"}
NEW_TOKENS = 40  # so many that some numbers of proposals come three times, and are replayed
PROMPT = [5, 9, 5, 9, 5, 9, 7, 5, 9]
CPU_ONLY = pytest.mark.skipif(torch.cuda.is_available(), reason="counts what takes the place of graphs")


@pytest.fixture(autouse=True)
def _logs_say_everything_again() -> None:
    assisted._log_uncaptured.cache_clear()
    capture._log_proposals_uncaptured.cache_clear()
    hook._log_growing.cache_clear()


@pytest.fixture
def model(device: str) -> Any:
    return models.on(device, models.build("llama"))


@pytest.fixture
def assistant(device: str) -> Any:
    """Nearly the same model: some of its proposals are accepted, others are cropped."""
    assistant = models.on(device, models.build("llama"))
    with torch.no_grad():
        noise = torch.randn(assistant.lm_head.weight.shape, generator=torch.Generator().manual_seed(3)) * 0.1
        assistant.lm_head.weight.add_(noise.to(assistant.lm_head.weight))
    assistant.generation_config.update(
        num_assistant_tokens=4, num_assistant_tokens_schedule="heuristic", assistant_confidence_threshold=0.0
    )
    return assistant


def generated(model: Any, prompt: list[int] = PROMPT, **options: Any) -> Any:
    torch.manual_seed(5)
    ids = torch.tensor([prompt], device=model.device)
    defaults = {"attention_mask": torch.ones_like(ids), "max_new_tokens": NEW_TOKENS, "do_sample": False}
    return model.generate(ids, **{**defaults, "pad_token_id": PAD, **options})


def uncaptured(model: Any, config: dict[str, Any], **options: Any) -> Any:
    with patched(model, config):
        return generated(model, **options)


def captured(model: Any, config: dict[str, Any], **options: Any) -> Any:
    with patched(model, {**config, "capture": True}):
        return generated(model, **options)


def check_replayed(model: Any) -> None:
    assert model.device.type == "cuda" or Recorded.runs > Recorded.made > 0


def crops_of(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The crops of all caches from now on."""
    crops: list[int] = []
    crop = KVQuantCache.crop
    monkeypatch.setattr(KVQuantCache, "crop", lambda self, tokens: (crops.append(int(tokens)), crop(self, tokens))[1])
    return crops


@pytest.mark.parametrize(
    "preset, residual_length",
    [
        ("none", 0),
        ("int8", 0),
        ("int8", 12),
        ("int4-token", 0),
        ("fp8", 0),
        ("int4-channel", 0),
        ("int4", 28),
        ("k8v4", 4),
    ],
)
def test_prompt_lookup(model: Any, preset: str, residual_length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    config = {"preset": preset, "residual_length": residual_length}
    plain = uncaptured(model, config)
    expected = uncaptured(model, config, prompt_lookup_num_tokens=3)
    crops = crops_of(monkeypatch)
    actual = captured(model, config, prompt_lookup_num_tokens=3)
    compare.assert_same(actual, expected.cpu(), "tokens of growing caches")
    compare.assert_same(actual, plain.cpu(), "tokens without proposals")
    assert min(crops) < 0
    check_replayed(model)


@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe", "phi3", "cohere", "diffllama"])
def test_families(family: str, device: str) -> None:
    """Biases that are centred, experts, models that prepare their inputs or look at keys themselves."""
    options = dict(models.FAMILIES[family].options)
    model = models.on(device, models.build(models.FAMILIES[family].model_type, **options))
    expected = uncaptured(model, INT8, prompt_lookup_num_tokens=3)
    compare.assert_same(captured(model, INT8, prompt_lookup_num_tokens=3), expected.cpu(), "tokens")


# Growing and static caches are cut differently on a GPU, so they round differently; with the coarser codes of int4,
# this can change tokens where a model accepts whatever it proposes itself.
@pytest.mark.parametrize(
    "preset, helper",
    [(preset, helper) for preset in ("int8", "int4-token") for helper in ("unpatched", "patched", "captured")]
    + [("int8", "itself")],
)
def test_assistants(model: Any, assistant: Any, preset: str, helper: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = {"preset": preset}
    if helper == "itself":
        # The first forward checks 20 proposals together with the prompt, and so attends to them unquantised: tokens may
        # differ from those without an assistant.
        expected = uncaptured(model, config, assistant_model=model)
        actual = captured(model, config, assistant_model=model)
    elif helper == "unpatched":
        expected = uncaptured(model, config)
        actual = captured(model, config, assistant_model=assistant)
    else:
        expected = uncaptured(model, config)
        with patched(assistant, {**config, "capture": helper == "captured"}):
            crops = crops_of(monkeypatch)
            actual = captured(model, config, assistant_model=assistant)
            assert min(crops) < 0 and len(set(crops)) > 1
            own = notes_on(assistant)
            assert bool(len(own.captures) + len(own.chunk_captures)) == (helper == "captured")
            assert own.assisted is None
    compare.assert_same(actual, expected.cpu(), "tokens")
    check_replayed(model)
    assert notes_on(model).assisted is None


@pytest.mark.parametrize("hidden", [(0, 1), (3,)], ids=["left_pad", "hole"])
@pytest.mark.parametrize("helper", ["lookup", "assistant"])
def test_padding(model: Any, assistant: Any, helper: str, hidden: tuple[int, ...]) -> None:
    mask = torch.ones((1, len(PROMPT)), dtype=torch.int64, device=model.device)
    mask[0, list(hidden)] = 0
    expected = uncaptured(model, INT8, attention_mask=mask)
    options = {"prompt_lookup_num_tokens": 3} if helper == "lookup" else {"assistant_model": assistant}
    with patched(assistant, {**INT8, "capture": True}):
        actual = captured(model, INT8, attention_mask=mask, **options)
    compare.assert_same(actual, expected.cpu(), "tokens")
    check_replayed(model)


@pytest.mark.parametrize("is_captured", [False, True], ids=["growing", "captured"])
def test_assistants_see_padding_tokens_that_the_mask_shows(model: Any, assistant: Any, is_captured: bool) -> None:
    """They must not hide them, as transformers does if it gives an assistant no mask: attention would fall back."""
    prompt = [*PROMPT[:4], PAD, *PROMPT[4:]]
    expected = uncaptured(model, INT8, prompt=prompt)
    config = {**INT8, "capture": is_captured}
    with patched(model, config), patched(assistant, config):
        actual = generated(model, prompt, assistant_model=assistant)
        fallbacks = patch_of(assistant).fallbacks
        assert fallbacks and not any(fallbacks.values())
    compare.assert_same(actual, expected.cpu(), "tokens")


@CPU_ONLY
def test_graphs_are_found_again(model: Any, assistant: Any) -> None:
    with patched(model, {**INT8, "capture": True}), patched(assistant, {**INT8, "capture": True}):
        assistant.generation_config.num_assistant_tokens_schedule = "constant"
        first = generated(model, assistant_model=assistant)
        made = Recorded.made
        compare.assert_same(generated(model, assistant_model=assistant), first.cpu(), "tokens of the second call")
        assert Recorded.made == made
        for each in (model, assistant):
            notes = notes_on(each)
            assert len(notes.captures) <= Captures.LIMIT and len(notes.chunk_captures) <= 5


def test_forwards_that_wait_for_the_device(
    model: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They run uncaptured, and are refused without proposals."""
    expected = uncaptured(model, INT8)
    embedding = model.model.embed_tokens  # before any token is appended, since what takes a graph's place runs
    forward = embedding.forward

    def waiting(tokens: Tensor) -> Tensor:
        if tokens.shape[1] <= 5:
            tokens.sum().item()
        return forward(tokens)

    monkeypatch.setattr(embedding, "forward", waiting)
    compare.assert_same(captured(model, INT8, prompt_lookup_num_tokens=3), expected.cpu(), "tokens")
    assert [record.message for record in caplog.records] == [
        "generate captures no forward of LlamaForCausalLM over proposals, since one failed. Correct, slower."
    ]
    with pytest.raises(RuntimeError, match="its decode step cannot be captured as a CUDA graph"):
        captured(model, INT8)


@CPU_ONLY
def test_long_chunks_run_uncaptured(model: Any) -> None:
    prompt = list(range(3, 50)) * 2
    options = {"prompt": prompt, "prompt_lookup_num_tokens": 40}
    compare.assert_same(captured(model, INT8, **options), uncaptured(model, INT8, prompt=prompt).cpu(), "tokens")
    with patched(model, {**INT8, "capture": True}):
        generated(model, **options)
        assert not any(
            step.inputs["input_ids"].shape[1] > 32 for step in notes_on(model).chunk_captures._steps.values()
        )


def test_streamers(model: Any) -> None:
    streamers = [Recorder(), Recorder()]
    uncaptured(model, INT8, prompt_lookup_num_tokens=3, streamer=streamers[0])
    captured(model, INT8, prompt_lookup_num_tokens=3, streamer=streamers[1])
    assert streamers[0].items == streamers[1].items and streamers[0].items[-1] == "end"


def test_a_returned_cache_continues(model: Any) -> None:
    options = {"prompt_lookup_num_tokens": 3, "return_dict_in_generate": True}
    turns = []
    for config in (INT8, {**INT8, "capture": True}):
        with patched(model, config):
            first = generated(model, **options)
            cache = cache_of(first)
            lengths = [storage.length for storage in cache.storages]
            assert lengths == [first.sequences.shape[1] - 1] * 2 == [int(each.lengths[0]) for each in cache.storages]
            prompt = [*first.sequences[0].tolist(), 4, 5, 9]
            turns.append(generated(model, prompt, **with_cache(cache), **options))
            assert cache_of(turns[-1]) is cache and cache.is_static == ("capture" in config)
    compare.assert_same(turns[1].sequences, turns[0].sequences.cpu(), "tokens of the second turn")
    for actual, expected in zip(*(cache_of(turn).storages for turn in reversed(turns)), strict=True):
        assert actual.length == expected.length
        for x, y, side in zip(actual.dequantize(), expected.dequantize(), ("keys", "values"), strict=True):
            # Attention may round differently in the two caches, and the next layer's codes then differ by one.
            bound = float(y.abs().max()) / 127
            compare.assert_close(x[:, :, : actual.length], y.cpu(), bound, side)


@pytest.mark.parametrize("step", range(1, 8))
def test_an_end_within_proposals(model: Any, assistant: Any, step: int) -> None:
    tokens = uncaptured(model, INT8)[0, len(PROMPT) :]
    options = {"eos_token_id": int(tokens[step]), "assistant_model": assistant}
    expected = uncaptured(model, INT8, eos_token_id=options["eos_token_id"])
    compare.assert_same(captured(model, INT8, **options), expected.cpu(), "tokens")


@pytest.mark.parametrize("max_new_tokens", range(1, 9))
@pytest.mark.parametrize("lookup", [2, 25])
def test_the_longest_length_within_proposals(model: Any, lookup: int, max_new_tokens: int) -> None:
    """Proposals of prompt lookup go beyond it, here also beyond a cache whose length is not rounded up."""
    prompt = PROMPT * 27 + PROMPT[: 13 - max_new_tokens]  # 256 tokens with the new ones
    expected = uncaptured(model, INT8, prompt=prompt, max_new_tokens=max_new_tokens)
    actual = captured(model, INT8, prompt=prompt, prompt_lookup_num_tokens=lookup, max_new_tokens=max_new_tokens)
    compare.assert_same(actual, expected.cpu(), "tokens")


@pytest.mark.parametrize("helper", ["lookup", "assistant"])
def test_sampling_draws_the_same_numbers(model: Any, assistant: Any, helper: str) -> None:
    assistant.generation_config.num_assistant_tokens_schedule = "constant"
    options = {"prompt_lookup_num_tokens": 3} if helper == "lookup" else {"assistant_model": assistant}
    options |= {"do_sample": True, "temperature": 0.7}
    with patched(assistant, INT8):
        expected = uncaptured(model, INT8, **options)
    with patched(assistant, {**INT8, "capture": True}):
        actual = captured(model, INT8, **options)
    compare.assert_same(actual, expected.cpu(), "tokens")
    check_replayed(model)


def uncaptured_log(reason: str) -> str:
    return f"generate does not capture this assisted decoding: {reason}. Correct, slower."


def test_sliding_windows_grow(device: str, caplog: pytest.LogCaptureFixture) -> None:
    options = {**models.FAMILIES["mistral"].options, "max_position_embeddings": 512, "sliding_window": 6}
    model = models.on(device, models.build("mistral", **options))
    expected = uncaptured(model, INT8)
    with caplog.at_level(logging.WARNING, "hf_kvquant"):
        actual = captured(model, INT8, prompt_lookup_num_tokens=3, return_dict_in_generate=True)
    compare.assert_same(actual.sequences, expected.cpu(), "tokens")
    assert not cache_of(actual).is_static
    said = [record.message for record in caplog.records if record.name == assisted.__name__]
    assert said == [uncaptured_log("MistralForCausalLM has layers other than full attention")]


def test_early_exit_grows(model: Any, caplog: pytest.LogCaptureFixture) -> None:
    actual = captured(model, INT8, assistant_early_exit=1)
    compare.assert_same(actual, uncaptured(model, INT8).cpu(), "tokens")
    # Other loggers say some things once in a process, so whether they do here depends on the tests before.
    said = [record.message for record in caplog.records if record.name == assisted.__name__]
    assert said == [uncaptured_log("the model assists itself by its first layers")]


def test_a_length_that_proposals_exceed(model: Any, caplog: pytest.LogCaptureFixture) -> None:
    config = {**INT8, "max_cache_len": len(PROMPT) + NEW_TOKENS}
    actual = captured(model, config, prompt_lookup_num_tokens=7)
    compare.assert_same(actual, uncaptured(model, INT8).cpu(), "tokens")
    assert "`max_cache_len` must be at least 55" in caplog.text and "got 49" in caplog.text


def test_assistants_that_do_not_fit_are_refused(model: Any) -> None:
    other = models.on(model.device, models.build("llama", vocab_size=50))
    messages = []
    for config in (INT8, {**INT8, "capture": True}):
        with patched(model, config), pytest.raises(ValueError) as raised:
            generated(model, assistant_model=other)
        messages.append(str(raised.value))
    assert messages[0] == messages[1]


def test_a_failure_leaves_whole_steps(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    config = {**INT8, "capture": True}
    expected = uncaptured(model, INT8)
    cache = KVQuantCache(model.config, config, max_cache_len=64)
    with patched(model, config):

        class Stop(Recorder):
            def put(self, value: Tensor) -> None:
                super().put(value)
                if len(self.items) == 4:
                    raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            generated(model, prompt_lookup_num_tokens=3, **with_cache(cache), streamer=Stop())
        assert notes_on(model).assisted is None
        held = {storage.length for storage in cache.storages}
        assert held == {int(storage.lengths[0]) for storage in cache.storages} and len(held) == 1
        cache.reset()
        again = generated(model, prompt_lookup_num_tokens=3, **with_cache(cache))
    compare.assert_same(again, expected.cpu(), "tokens")


def test_disable_compile_captures_nothing(model: Any) -> None:
    output = captured(model, INT8, prompt_lookup_num_tokens=3, disable_compile=True, return_dict_in_generate=True)
    assert not Recorded.runs and not cache_of(output).is_static
