"""Forwards that end early: a cache goes on as if they had not been, to the bit, or says what to do.

A hook of an attention module ends a forward before the layer takes its tokens, or after it has attended to them.
Whatever is done then is compared with a cache that saw whole forwards alone.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import compare
import models
import pytest
import torch
import transformers
from models import FAMILIES, greedy, left_padded
from torch import Tensor
from transformers.cache_utils import DynamicCache

from hf_kvquant import KVQuantCache, patch, patched, unpatch
from hf_kvquant.cache.steps import Steps
from hf_kvquant.generate.encoder_decoder import KVQuantEncoderDecoderCache
from hf_kvquant.spec.formats import BLOCK_SIZE
from hf_kvquant.storage import offloading, rewind
from hf_kvquant.storage.layer_store import LayerStore
from hf_kvquant.upstream.releases import CACHE, with_cache

NUM_LAYERS, PROMPT, WINDOW = 4, 12, 6
IDS = left_padded(tokens=40)["input_ids"].clamp(min=3)
WINDOWED = {"preset": "int4-token", "sink_length": 2, "residual_length": 4}
# Codes alone: texts here are hardly longer than the dense windows, and tokens that leave them do not come back as
# they were.
INT8 = models.INT8_CODES
PRESETS = {
    "none": {"preset": "none"},
    "int8": INT8,
    **{preset: {"preset": preset} for preset in ("int4-token", "int4-channel")},
    "windows": WINDOWED,
}
KINDS = ("growing", "static", "sliding", "static sliding", "offloaded")
# The layer whose hook ends a forward, and whether that is before it has its tokens.
PLACES = [(layer, is_before) for layer in (0, 2, 3) for is_before in (True, False)]

presets = pytest.mark.parametrize("preset", PRESETS)
kinds = pytest.mark.parametrize("kind", KINDS)
places = pytest.mark.parametrize("layer, is_before", PLACES, ids=lambda value: str(value))


class Ended(Exception):
    """What ends a forward."""


@pytest.fixture(autouse=True)
def anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers are offloaded from the CPU, too."""
    monkeypatch.setattr(offloading, "HOMES", frozenset(("cpu", "cuda")))


@functools.cache
def model_of(device: str, is_sliding: bool = False) -> Any:
    if not is_sliding:
        model = models.build("llama", num_hidden_layers=NUM_LAYERS)
    else:
        options = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"] * 2}
        model = models.build("gemma2", **{**FAMILIES["gemma2"].options, **options, "num_hidden_layers": NUM_LAYERS})
    return model.to(device)


@contextlib.contextmanager
def routed(kind: str, preset: str, device: str) -> Iterator[tuple[Any, KVQuantCache]]:
    """A patched model, and an empty cache of a kind."""
    model = model_of(device, "sliding" in kind)
    config = {**PRESETS[preset], "offloading": kind == "offloaded"}
    with patched(model, config):
        yield model, KVQuantCache(model.config, config, max_cache_len=64 if "static" in kind else None)


def forward(model: Any, cache: Any, begin: int, end: int) -> Tensor:
    """The logits of tokens `begin … end - 1`, whose positions the model reads off the cache."""
    with torch.no_grad():
        return model(IDS[:, begin:end].to(model.device), **with_cache(cache)).logits.cpu()


def attention_of(model: Any, layer: int) -> Any:
    return model.model.layers[layer].self_attn


@contextlib.contextmanager
def ending(module: Any, is_before: bool, error: type[BaseException] = Ended, runs: int = 0) -> Iterator[None]:
    """Ends a forward at a module, once it has run so many times."""
    left = [runs]

    def end(*args: Any) -> None:
        if left[0] == 0:
            raise error
        left[0] -= 1

    handle = (module.register_forward_pre_hook if is_before else module.register_forward_hook)(end)
    try:
        with pytest.raises(error):
            yield
    finally:
        handle.remove()


def whole(model: Any, cache: Any, *cuts: int) -> list[Tensor]:
    """The logits of forwards that all end as they should, from cut to cut."""
    return [forward(model, cache, begin, end) for begin, end in itertools.pairwise(cuts)]


def check_level(cache: KVQuantCache, length: int) -> None:
    for storage in cache.storages:
        assert storage.length == length, storage.name
        assert not storage.is_allocated or storage.lengths.tolist() == [length] * len(IDS), storage.name


CUTS = (0, PROMPT, PROMPT + 1, PROMPT + 2, PROMPT + 3, PROMPT + 6)
LAST = 3  # the forward that is ended: tokens CUTS[LAST] … CUTS[LAST + 1] - 1


@functools.cache
def undisturbed(kind: str, preset: str, device: str) -> list[Tensor]:
    with routed(kind, preset, device) as (model, cache):
        return whole(model, cache, *CUTS)


# --- forwards ---------------------------------------------------------------------------------------------------------


@pytest.mark.full(
    when=lambda preset, kind, layer, is_before: (
        ([*PRESETS].index(preset) + KINDS.index(kind) + PLACES.index((layer, is_before))) % 2 == 1
    ),
    reason="every two of preset, kind and place meet in the others",
)
@places
@kinds
@presets
def test_a_forward_behind_one_that_ended_early(
    preset: str, kind: str, layer: int, is_before: bool, device: str
) -> None:
    expected = undisturbed(kind, preset, device)
    taken = layer + (not is_before)
    with routed(kind, preset, device) as (model, cache):
        whole(model, cache, *CUTS[: LAST + 1])
        error = KeyboardInterrupt if layer == 2 else Ended
        with ending(attention_of(model, layer), is_before, error):
            forward(model, cache, *CUTS[LAST : LAST + 2])
        if taken == NUM_LAYERS:  # all of the tokens are there
            check_level(cache, CUTS[LAST + 1])
            compare.assert_same(forward(model, cache, *CUTS[LAST + 1 :]), expected[-1], "the next forward")
            return
        if taken:
            for _ in range(2):  # what is refused changes nothing
                with pytest.raises(RuntimeError) as raised:
                    forward(model, cache, *CUTS[LAST : LAST + 2])
                assert str(raised.value) == (
                    f"KVQuantCache: `{CACHE}` must hold whole steps, got one that ended early: {taken} of "
                    f"{NUM_LAYERS} layers have taken its tokens, after the {CUTS[LAST]} held before. Call crop(0) on "
                    "the cache to undo it, or reset the cache."
                )
            if preset == "windows":
                with pytest.raises(RuntimeError, match="where tokens that were dense before now have only their codes"):
                    cache.undo_step()
                cache.reset()
                whole(model, cache, *CUTS[: LAST + 1])
            cache.crop(0)
        check_level(cache, CUTS[LAST])
        for actual, logits in zip(whole(model, cache, *CUTS[LAST:]), expected[LAST:], strict=True):
            compare.assert_same(actual, logits, "a forward after it")


@kinds
def test_several_forwards_end_early(kind: str, device: str) -> None:
    expected = undisturbed(kind, "int4-token", device)
    with routed(kind, "int4-token", device) as (model, cache):
        whole(model, cache, *CUTS[:3])
        for layer, is_before in (*PLACES[:-1], *PLACES[-2::-1]):
            with ending(attention_of(model, layer), is_before):
                forward(model, cache, *CUTS[2:4])
            cache.crop(0)
            check_level(cache, CUTS[2])
        for actual, logits in zip(whole(model, cache, *CUTS[2:]), expected[2:], strict=True):
            compare.assert_same(actual, logits, "a forward after them")


@pytest.mark.parametrize("place", ["layer", "resize"])
def test_a_layer_that_runs_out_of_memory(place: str, monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """Within `update`, before a layer has its tokens, or while it makes room for them."""
    expected = undisturbed("growing", "int8", device)
    with routed("growing", "int8", device) as (model, cache):
        whole(model, cache, *CUTS[: LAST + 1])
        storage = cache.storages[-1]

        def run_out(*args: Any, **kwargs: Any) -> None:
            raise torch.OutOfMemoryError

        if place == "layer":
            monkeypatch.setattr(storage, "extend", run_out)
        else:
            full = dataclasses.replace(storage.buffers, capacity=storage.length)
            monkeypatch.setattr(storage.residency, "buffers", full)
            monkeypatch.setattr(storage.rows, "needed", run_out)
        with pytest.raises(torch.OutOfMemoryError):
            forward(model, cache, *CUTS[LAST : LAST + 2])
        monkeypatch.undo()
        with pytest.raises(RuntimeError, match=f"3 of {NUM_LAYERS} layers have taken its tokens"):
            forward(model, cache, *CUTS[LAST : LAST + 2])
        cache.crop(0)
        for actual, logits in zip(whole(model, cache, *CUTS[LAST:]), expected[LAST:], strict=True):
            compare.assert_same(actual, logits, "a forward after it")


@pytest.mark.parametrize("layer, is_before", PLACES[1:-1], ids=str)
@kinds
def test_a_first_chunk_that_ended_early(kind: str, layer: int, is_before: bool, device: str) -> None:
    with routed(kind, "int4-token", device) as (model, cache):
        with ending(attention_of(model, layer), is_before):
            forward(model, cache, 0, PROMPT)
        first = layer + (not is_before)
        with pytest.raises(RuntimeError) as raised:
            forward(model, cache, PROMPT, PROMPT + 1)
        assert str(raised.value) == (
            f"KVQuantCache: `{CACHE}` must get its first tokens in all layers at once, got those of layer "
            f"{first} when other layers held {PROMPT}: the first step ended early. Reset the cache and feed it the "
            "text again."
        )
        cache.reset()
        for actual, logits in zip(whole(model, cache, *CUTS), undisturbed(kind, "int4-token", device), strict=True):
            compare.assert_same(actual, logits, "a forward after it")


def test_a_layer_that_refuses_its_tokens_has_not_begun_a_step() -> None:
    with routed("static", "int8", "cpu") as (model, cache):
        whole(model, cache, *CUTS[:3])
        key = torch.zeros(1, 1, 1, models.HEAD_DIM)
        with pytest.raises(ValueError, match="`key` must have batch 3"):
            cache.update(key, key, 0)
        for actual, logits in zip(
            whole(model, cache, *CUTS[2:]), undisturbed("static", "int8", "cpu")[2:], strict=True
        ):
            compare.assert_same(actual, logits, "a forward after it")


# --- what is done to a cache then -------------------------------------------------------------------------------------


@pytest.mark.parametrize("removed, length", [(0, 14), (3, 14), (5, 12), (99, 0)], ids=str)
@pytest.mark.parametrize("kind", ["growing", "static", "offloaded"])
def test_a_crop_counts_the_tokens_that_some_layers_have(kind: str, removed: int, length: int, device: str) -> None:
    expected = undisturbed(kind, "int8", device)
    with routed(kind, "int8", device) as (model, cache):
        whole(model, cache, *CUTS[: LAST + 1])
        with ending(attention_of(model, 2), True):
            forward(model, cache, CUTS[LAST], CUTS[LAST] + 3)
        cache.crop(-removed)
        check_level(cache, length)
        if length == CUTS[LAST]:
            compare.assert_same(forward(model, cache, *CUTS[LAST : LAST + 2]), expected[LAST], "the next forward")


def test_a_crop_gives_back_what_codes_say() -> None:
    """The block of keys that the step closed is not dense any more: a crop goes on all the same, `generate` not."""
    model = models.llama(num_hidden_layers=NUM_LAYERS, max_position_embeddings=512)
    ids = torch.randint(3, models.VOCAB_SIZE, (1, BLOCK_SIZE + 6), generator=torch.Generator().manual_seed(1))
    with patched(model, "int4-channel"), torch.no_grad():
        cache = KVQuantCache(model.config, "int4-channel")
        model(ids[:, : BLOCK_SIZE - 4], **with_cache(cache))
        model(ids[:, BLOCK_SIZE - 4 : BLOCK_SIZE - 1], **with_cache(cache))
        with ending(attention_of(model, 2), True):
            model(ids[:, BLOCK_SIZE - 1 : BLOCK_SIZE], **with_cache(cache))
        with pytest.raises(RuntimeError) as raised:
            model.generate(ids, **with_cache(cache), max_new_tokens=1, do_sample=False)
        assert str(raised.value) == (
            f"KVQuantCache: `{CACHE}` must hold whole steps, got one that ended early after layer 0, where "
            "tokens that were dense before now have only their codes. Reset the cache and feed it the text again, or "
            "call crop(0) on it to go on with dequantised values."
        )
        assert [storage.length for storage in cache.storages] == [BLOCK_SIZE] * 2 + [BLOCK_SIZE - 1] * 2
        cache.crop(0)
        assert [storage.length for storage in cache.storages] == [BLOCK_SIZE - 1] * NUM_LAYERS
        model(ids[:, BLOCK_SIZE - 1 :], **with_cache(cache))


@pytest.mark.parametrize("action", ["save", "copy", "reset"])
def test_other_things_that_are_done_to_a_cache(action: str, tmp_path: Path, device: str) -> None:
    expected = undisturbed("growing", "int4-token", device)
    with routed("growing", "int4-token", device) as (model, cache):
        whole(model, cache, *CUTS[: LAST + 1])
        with ending(attention_of(model, 2), False):
            forward(model, cache, *CUTS[LAST : LAST + 2])
        begin = LAST
        if action == "save":
            with pytest.raises(ValueError, match="`cache` must be at rest, got one in a step"):
                cache.save(tmp_path / "cache.safetensors", model)
            cache.crop(0)
            cache.save(tmp_path / "cache.safetensors", model)
            cache = KVQuantCache.load(tmp_path / "cache.safetensors", model)
            with ending(attention_of(model, 2), False):  # the first forward of a cache that was loaded
                forward(model, cache, *CUTS[LAST : LAST + 2])
            cache.crop(0)
        elif action == "copy":
            cache = copy.deepcopy(cache)
            with pytest.raises(RuntimeError, match="3 of 4 layers have taken its tokens"):
                forward(model, cache, *CUTS[LAST : LAST + 2])
            cache.crop(0)
        else:
            cache.reset()
            begin = 0
        for actual, logits in zip(whole(model, cache, *CUTS[begin:]), expected[begin:], strict=True):
            compare.assert_same(actual, logits, "a forward after it")


# --- generate ---------------------------------------------------------------------------------------------------------


def turn(model: Any, cache: Any, ids: Tensor, **options: Any) -> Tensor:
    """One reply."""
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    return greedy(model, inputs, 5, **with_cache(cache), disable_compile=True, **options).sequences.cpu()


WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "chunks": {"prefill_chunk_size": 4},
    "prompt lookup": {"prompt_lookup_num_tokens": 3},
    "beams": {"num_beams": 3},
}


@pytest.mark.full(
    when=lambda preset, kind, way: ([*PRESETS].index(preset) + KINDS.index(kind) + [*WAYS].index(way)) % 2 == 1,
    reason="every two of preset, kind and way meet in the others",
)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["growing", "static", "sliding", "offloaded"])
@pytest.mark.parametrize("preset", ["none", "int4-token", "int4-channel"])
def test_generate_goes_on_behind_a_prompt_that_ended_early(preset: str, kind: str, way: str, device: str) -> None:
    """The second turn of a chat, three times over."""
    if way == "chunks" and tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 23):
        pytest.skip("older versions of transformers feed all of a text in chunks again, whatever a cache holds")
    options, batch = WAYS[way], 1 if way in ("prompt lookup", "beams") else 3
    with routed(kind, preset, device) as (model, cache):

        def second_turn(cache: KVQuantCache, num_ended: int) -> Tensor:
            ids = IDS[:batch, :PROMPT]
            forward_ids = ids.repeat(options.get("num_beams", 1), 1).to(model.device)
            with torch.no_grad():
                model(forward_ids, **with_cache(cache))
            longer = IDS[:batch, : PROMPT + 9]
            for layer, is_before in ((2, True), (0, False), (3, True))[:num_ended]:
                runs = 1 if way == "chunks" and layer == 3 else 0
                with ending(attention_of(model, layer), is_before, KeyboardInterrupt, runs):
                    turn(model, cache, longer, **options)
            return turn(model, cache, longer, **options)

        length = 64 if kind == "static" else None
        fresh = KVQuantCache(model.config, cache.quant_config, max_cache_len=length)
        compare.assert_same(second_turn(cache, 3), second_turn(fresh, 0), "tokens")


@pytest.mark.parametrize("layer, is_before", PLACES, ids=str)
@pytest.mark.parametrize("kind", ["growing", "static", "sliding"])
def test_generate_says_what_to_crop_behind_a_reply_that_ended_early(
    kind: str, layer: int, is_before: bool, device: str
) -> None:
    """Tokens of the reply are in the cache, but not in the text that it is given again."""
    ids = IDS[:, :PROMPT]
    with routed(kind, "int4-token", device) as (model, cache):
        fresh = KVQuantCache(model.config, "int4-token", max_cache_len=cache.layers[1].storage.max_cache_len)
        expected = turn(model, fresh, ids)
        if kind != "sliding":  # the last token of the prompt attends to codes
            fresh.crop(PROMPT - 1 - fresh.layers[1].storage.length)
            expected = turn(model, fresh, ids)
        with ending(attention_of(model, layer), is_before, runs=3):
            turn(model, cache, ids)
        with pytest.raises(ValueError) as raised:
            turn(model, cache, ids)
        held = PROMPT + 2 + (layer == 3 and not is_before)
        assert str(raised.value) == (
            f"generate: `input_ids` must have tokens after the {held} that `{CACHE}` holds, got {PROMPT} in "
            "all, padding included. Reset the cache, or pass a new one, for another text. If it holds these tokens, "
            f"call crop({PROMPT - 1 - held}) on it to continue from them."
        )
        check_level(cache, held)
        if kind == "sliding":  # a growing window that is full takes nothing back at the user's wish
            cache.reset()
        else:
            cache.crop(PROMPT - 1 - held)
        compare.assert_same(turn(model, cache, ids), expected, "tokens")


def test_a_model_that_is_not_patched_refuses_the_next_forward() -> None:
    model = model_of("cpu")
    cache = KVQuantCache(model.config, "int8")
    whole(model, cache, *CUTS[:3])
    with ending(attention_of(model, 2), True):
        forward(model, cache, *CUTS[2:4])
    with pytest.raises(RuntimeError, match="must hold whole steps, got one that ended early: 2 of 4 layers"):
        turn(model, cache, IDS[:, : PROMPT + 4])


# --- rings ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_cache_len", [None, 1200], ids=["growing", "static"])
def test_a_ring_gives_back_what_it_has_not_overwritten(max_cache_len: int | None) -> None:
    formats = KVQuantCache(model_of("cpu").config, INT8).quant_config.formats(0)
    ring = LayerStore(formats, window=WINDOW, max_cache_len=max_cache_len, name="layer 0")

    def extend(tokens: int) -> None:
        x = torch.randn(3, 2, tokens, models.HEAD_DIM)
        ring.extend(x, x)
        ring.attend(torch.randn(3, 4, tokens, models.HEAD_DIM), softmax_scale=0.1)

    for tokens in (100, 500, 1):
        extend(tokens)
    expected = copy.deepcopy(ring)
    most = ring.rows.longest_chunk(ring.capacity)
    extend(most)
    rewind.check_undo(ring, most)
    rewind.undo(ring, most)
    x, query = torch.randn(3, 2, 1, models.HEAD_DIM), torch.randn(3, 4, 1, models.HEAD_DIM)
    outs = []
    for storage in (ring, expected):
        storage.extend(x, x)
        outs.append(storage.attend(query, softmax_scale=0.1)[0])
    compare.assert_same(*outs, "attention")
    extend(most + 1)
    with pytest.raises(RuntimeError) as raised:
        rewind.check_undo(ring, most + 1)
    assert str(raised.value) == (
        f"layer 0: a step that ended early must have at most {most} tokens to be undone with a window of {WINDOW}, got "
        f"{most + 1}. Reset the cache and feed it the text again."
    )


# --- layers of transformers -------------------------------------------------------------------------------------------

MIXED = {
    "qwen3_next": "linear_attn",
    "lfm2": "conv",
    "jamba": "mamba",
    "bamba": "mamba",
    "zamba2": "mamba",
    "falcon_h1": "mamba",
    "llama4_text": "self_attn",
}


def mixer_of(model: Any, family: str) -> Any:
    """What changes the state of the first layer."""
    return getattr(model.model.layers[0], MIXED[family])


@pytest.mark.parametrize("num_runs", [0, 1], ids=["once", "twice"])
@pytest.mark.parametrize("family", MIXED)
def test_states_that_nobody_can_undo(family: str, num_runs: int) -> None:
    model = models.family(family)
    cuts = (0, PROMPT, PROMPT + 1, PROMPT + 2, PROMPT + 4)
    with patched(model, "int4-token"):
        expected = whole(model, KVQuantCache(model.config, "int4-token"), *cuts)
        cache = KVQuantCache(model.config, "int4-token")
        for actual, logits in zip(whole(model, cache, *cuts[:4]), expected, strict=False):
            compare.assert_same(actual, logits, "a whole forward")
        with ending(mixer_of(model, family), True):  # before anything has changed
            forward(model, cache, *cuts[3:])
        compare.assert_same(forward(model, cache, *cuts[3:]), expected[-1], "the next forward")
        with ending(mixer_of(model, family), False):
            forward(model, cache, *cuts[3:])
        for _ in range(1 + num_runs):
            with pytest.raises(RuntimeError, match=r"must hold whole steps, got one that ended early.*Reset the cache"):
                forward(model, cache, *cuts[3:])
        for action in (cache.undo_step, lambda: cache.crop(0)):
            with pytest.raises(RuntimeError) as raised:
                action()
            assert str(raised.value) == (
                f"KVQuantCache: `{CACHE}` must hold whole steps, got one that ended early after layers [0], "
                "whose state transformers keeps and which cannot be undone. Reset the cache and feed it the text again."
            )
        cache.reset()
        if family != "llama4_text":  # chunks of transformers 5.17 stay as long as they were
            compare.assert_same(forward(model, cache, 0, PROMPT), expected[0], "after a reset")


def test_windows_that_transformers_keeps() -> None:
    """Layers of ours are level: it is one of transformers that has its tokens, or has not."""
    model = model_of("cpu", is_sliding=True)
    config = {"preset": "int4-token", "sliding": False}
    with patched(model, config):
        cache = KVQuantCache(model.config, config)
        whole(model, cache, *CUTS[:3])
        with ending(attention_of(model, 0), False):
            forward(model, cache, *CUTS[2:4])
        with pytest.raises(
            RuntimeError, match=r"0 of 2 layers have taken its tokens, after the 13 held before\. Reset the"
        ):
            forward(model, cache, *CUTS[2:4])


@pytest.mark.parametrize("layer, is_before", [(0, False), (1, True)], ids=str)
def test_encoder_decoders(layer: int, is_before: bool) -> None:
    model = models.bart()
    encoder = model.get_encoder()(IDS[:, :8])

    def decode(cache: Any, *cuts: int) -> list[Tensor]:
        with torch.no_grad():
            return [
                model(encoder_outputs=encoder, decoder_input_ids=IDS[:, begin:end], **with_cache(cache)).logits
                for begin, end in itertools.pairwise(cuts)
            ]

    def pair() -> KVQuantEncoderDecoderCache:
        return KVQuantEncoderDecoderCache(KVQuantCache(model.config, "int4-token"), DynamicCache(config=model.config))

    with patched(model, "int4-token"):
        expected, cache = decode(pair(), 0, 3, 4, 5), pair()
        decode(cache, 0, 3, 4)
        with ending(model.get_decoder().layers[layer].self_attn, is_before):
            decode(cache, 4, 5)
        with pytest.raises(RuntimeError, match="1 of 2 layers have taken its tokens, after the 4 held before"):
            decode(cache, 4, 5)
        cache.crop(0)
        compare.assert_same(decode(cache, 4, 5)[0], expected[-1], "the next forward")


# --- the book ---------------------------------------------------------------------------------------------------------


def test_layers_that_are_never_called_are_not_waited_for() -> None:
    storages = {index: LayerStore(KVQuantCache(model_of("cpu").config).quant_config.formats(0)) for index in range(3)}
    steps = Steps(storages, bystanders=[3])
    for _ in range(3):
        for layer in (0, 1):
            steps.enter(layer)
            steps.leave(layer)
    steps.enter(3)
    assert steps.undo() == 0
    with pytest.raises(RuntimeError, match="must get its first tokens in all layers at once, got those of layer 2"):
        steps.enter(2)


def test_a_cache_that_was_cut_is_captured_again(device: str) -> None:
    if device != "cuda":
        pytest.skip("needs a GPU; see test_capture.py")
    model = copy.deepcopy(model_of(device))
    patch(model, {"preset": "int4-token", "capture": True})
    cache = KVQuantCache(model.config, {"preset": "int4-token", "capture": True}, max_cache_len=64)
    expected = turn(
        model, KVQuantCache(model.config, {"preset": "int4-token", "capture": True}, max_cache_len=64), IDS[:, :9]
    )
    for layer, is_before in PLACES[:-1]:
        with ending(attention_of(model, layer), is_before):
            greedy(model, {"input_ids": IDS[:, :9]}, 5, **with_cache(cache))
        cache.reset()
    compare.assert_same(turn(model, cache, IDS[:, :9]), expected, "tokens")
    unpatch(model)
