"""Announced crops (`activate_past_recording`): what is left is what it would be without the tokens that were rejected.

Random histories of all other operations are in `test_storage.py`. Here, crops go as far as they are exact, and beyond.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from compare import assert_close, assert_same
from models import PAD
from torch import Tensor

from hf_kvquant import PRESETS, KVQuantCache, patched
from hf_kvquant.config import LayerFormats
from hf_kvquant.state import MOST_NEW_TOKENS
from hf_kvquant.storage import rewind
from hf_kvquant.storage.layer_store import LayerStore
from hf_kvquant.storage.rows import TAIL_SLACK
from hf_kvquant.upstream.releases import cache_of

ROOM, HEAD_DIM = 1024, 32
LAYOUTS = [
    ("int4-channel", 0, 0),
    ("int4-channel", 4, 200),
    ("int4-token", 4, 16),
    ("int8", 0, 16),
    ("fp8", 4, 1),
    ("int4-g32", 0, 130),
]
layouts = pytest.mark.parametrize("layout", LAYOUTS, ids=str)


def new_store(layout: tuple[str, int, int], is_static: bool) -> LayerStore:
    preset, sink_length, residual_length = layout
    formats = LayerFormats(*PRESETS[preset], sink_length=sink_length, residual_length=residual_length)
    return LayerStore(formats, max_cache_len=ROOM if is_static else None)


def take(store: LayerStore, tokens: Tensor) -> None:
    store.extend(tokens, tokens.flip(-1).contiguous())
    store.flush()


def shown(store: LayerStore) -> list[Tensor]:
    return [x[:, :, : store.length] for x in store.dequantize()]


def dequantized_by(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What crops dequantise from now on."""
    calls: list[Any] = []
    plain = rewind._dequantize
    monkeypatch.setattr(rewind, "_dequantize", lambda *args: (calls.append(args[1]), plain(*args))[1])
    return calls


@pytest.mark.parametrize("is_static", [False, True], ids=["growing", "static"])
@layouts
def test_rejected_tokens_leave_no_trace(
    device: str, layout: tuple[str, int, int], is_static: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, expected = new_store(layout, is_static), new_store(layout, is_static)
    for each in (store, expected):  # sums of attention go by the rows of the tail, so both have as many
        rewind.expect_crops(each)
    text = torch.randn(2, 2, ROOM, HEAD_DIM).to(device)
    numbers, calls = random.Random(1), dequantized_by(monkeypatch)
    for each in (store, expected):
        take(each, text[:, :, :150])
    while (length := store.length) < ROOM - TAIL_SLACK - 1:
        proposed = numbers.choice((1, 5, 5, 20, TAIL_SLACK))
        accepted = numbers.choice((0, proposed // 2, proposed))
        wrong = torch.randn(2, 2, proposed - accepted, HEAD_DIM).to(device)
        own = text[:, :, length : length + accepted + 1]
        take(store, torch.cat([own, wrong], dim=2))
        rewind.crop(store, proposed - accepted)
        take(expected, own)
        for ours, theirs, side in zip(shown(store), shown(expected), ("keys", "values"), strict=True):
            assert_same(ours, theirs.cpu(), f"{side} of {store.length} tokens, {proposed - accepted} rejected")
        if is_static:
            query = torch.randn(2, 4, 1, HEAD_DIM).to(device)
            results = [each.attend(query, softmax_scale=0.2) for each in (store, expected)]
            for ours, theirs in zip(*results, strict=True):
                assert_same(ours, theirs.cpu(), f"attention to {store.length} tokens")
    assert not calls


def test_all_captured_proposals_can_be_rejected() -> None:
    assert TAIL_SLACK >= MOST_NEW_TOKENS


@pytest.mark.parametrize("layout", [("int8", 0, 16), ("int4-channel", 0, 0)], ids=str)
@pytest.mark.parametrize("rejected", [TAIL_SLACK, 200])
def test_rejected_tokens_are_not_brought_back(device: str, rejected: int, layout: tuple[str, int, int]) -> None:
    """A second crop goes back to tokens whose rows the rejected ones have taken, though the cache is short by now."""
    store = new_store(layout, is_static=True)
    rewind.expect_crops(store)
    text = torch.randn(1, 2, 640, HEAD_DIM).to(device)
    take(store, text)
    take(store, 50 + torch.randn(1, 2, rejected, HEAD_DIM).to(device))
    rewind.crop(store, rejected)
    rewind.crop(store, 110 if layout[0] == "int4-channel" else 30)
    bound = float(text.abs().max()) / (7 if layout[0].startswith("int4") else 100)
    for ours, theirs in zip(shown(store), (text, text.flip(-1)), strict=True):
        assert_close(ours, theirs[:, :, : store.length].cpu(), bound, "tokens before the crops")


@layouts
def test_crops_that_nobody_announced_dequantize(layout: tuple[str, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Only where a window gets a token back that has left it; the tail has no more rows than attention reads."""
    store, announced = new_store(layout, is_static=True), new_store(layout, is_static=True)
    rewind.expect_crops(announced)
    text = torch.randn(1, 2, 300, HEAD_DIM)
    for each in (store, announced):
        take(each, text)
    assert announced.num_bytes > store.num_bytes and announced.num_bytes_held == store.num_bytes_held
    calls = dequantized_by(monkeypatch)
    rewind.crop(announced, 50)
    assert not calls
    rewind.crop(store, 50)
    assert calls


@pytest.mark.parametrize("layout", [("int4-channel", 0, 0), ("int4-token", 4, 16)], ids=str)
def test_announced_with_tokens_held(layout: tuple[str, int, int]) -> None:
    """A chat goes on with an assistant: the dense tokens move, and crops are exact from then on."""
    store, expected = new_store(layout, is_static=True), new_store(layout, is_static=True)
    text = torch.randn(1, 2, 400, HEAD_DIM)
    for each in (store, expected):
        take(each, text[:, :, :300])
    before = shown(store)
    rewind.expect_crops(store)
    for ours, theirs in zip(shown(store), before, strict=True):
        assert_same(ours, theirs, "after the move")
    for length in range(300, 380, 8):
        take(store, torch.cat([text[:, :, length : length + 8], torch.randn(1, 2, 40, HEAD_DIM)], dim=2))
        rewind.crop(store, 40)
        take(expected, text[:, :, length : length + 8])
    # What left the window before the announcement may come back as codes, but none of it has.
    for ours, theirs in zip(shown(store), shown(expected), strict=True):
        assert_same(ours, theirs, "after the crops")


@pytest.mark.parametrize(
    "config",
    [{"preset": "int4-channel"}, {"preset": "int4-token", "residual_length": 16, "sink_length": 4}],
    ids=lambda config: config["preset"],
)
def test_prompt_lookup_finds_the_tokens_of_greedy_decoding(device: str, config: dict[str, Any], tmp_path: Path) -> None:
    model = models.on(device, models.build("llama"))
    ids = torch.tensor([[5, 9, 5, 9, 5, 9, 7, 5, 9] * 15], device=device)
    options: dict[str, Any] = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 40, "do_sample": False}
    options |= {"pad_token_id": PAD, "return_dict_in_generate": True}
    with patched(model, config):
        expected = model.generate(ids, **options)
        found = model.generate(ids, prompt_lookup_num_tokens=5, **options)
        assert_same(found.sequences, expected.sequences.cpu(), "tokens")
        cache = cache_of(found)
        assert any(storage.rows.slack for storage in cache.storages)
        cache.save(tmp_path / "cache.safetensors", model)
        loaded = KVQuantCache.load(tmp_path / "cache.safetensors", model)
    for ours, theirs in zip(loaded.storages, cache.storages, strict=True):
        assert not ours.rows.slack
        for x, y in zip(shown(ours), shown(theirs), strict=True):
            assert_same(x, y.cpu(), "of a loaded cache")
