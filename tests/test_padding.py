"""Padding that ends elsewhere than when a cache got its first tokens.

The first tokens that stay dense are counted from where padding ends. A user may give a prompt a mask of four dimensions
or none, and masks of the padding afterwards, or the other way round.
"""

from __future__ import annotations

from typing import Any

import compare
import models
import pytest
import tolerances
import torch
from models import ReferenceCache, greedy, left_padded, logits
from torch import Tensor

from hf_kvquant import KVQuantCache, key_transforms, patched
from hf_kvquant.cache.kvquant_cache import KVQuantLayer
from hf_kvquant.storage import padding
from hf_kvquant.upstream.releases import cache_of, with_cache

LENGTH = 12
PADS = torch.tensor([0, 5, 2])
STATIC = {"max_cache_len": 240}
PRESETS = ("int8", "k8v4", "int4", {"key": "int8", "value": "int8", "sink_length": 4, "residual_length": 8})


def padded_mask(tokens: int) -> Tensor:
    return (torch.arange(tokens) >= PADS[:, None]).long()


def of_four_dimensions(mask: Tensor) -> Tensor:
    tokens = mask.shape[1]
    causal = torch.ones(tokens, tokens, dtype=torch.bool).tril()
    return (causal & mask[:, None].bool() | torch.eye(tokens, dtype=torch.bool))[:, None]


def run(model: Any, cache: Any, first: Tensor | None, shows_later: bool, q_len: int, steps: int = 6) -> Tensor:
    """Logits of the steps behind a prompt with the mask `first`; then without a mask, or with one of the padding."""
    torch.manual_seed(3)
    tokens, found = torch.randint(3, 90, (3, LENGTH + steps * q_len)), []
    with torch.no_grad():
        for begin in (0, *range(LENGTH, tokens.shape[1], q_len)):
            end = begin + q_len if begin else LENGTH
            mask = (None if shows_later else padded_mask(end)) if begin else first
            position = (torch.arange(begin, end) - PADS[:, None]).clamp(min=0)
            # Only GPT-2 and its relatives look positions up in a table.
            given = {} if model.config.model_type == "bloom" else {"position_ids": position}
            found.append(
                model(input_ids=tokens[:, begin:end], attention_mask=mask, **given, **with_cache(cache)).logits
            )
    return torch.cat(found[1:], 1)


FIRST = {"four dimensions": of_four_dimensions(padded_mask(LENGTH)), "none": None, "padding": padded_mask(LENGTH)}


@pytest.mark.parametrize("q_len", [1, 3])
@pytest.mark.parametrize("kind", ["growing", "static"])
@pytest.mark.parametrize("preset", PRESETS, ids=str)
@pytest.mark.parametrize("first", ["four dimensions", "none"])
def test_padding_that_only_later_masks_show(first: str, preset: Any, kind: str, q_len: int) -> None:
    model = models.llama()
    prompt = FIRST[first]
    # What is dense is counted from where these masks say that padding ends.
    expected = run(model, ReferenceCache(model.config, preset, mask=padded_mask(LENGTH)), prompt, False, q_len)
    with patched(model, preset):
        cache = KVQuantCache(model.config, preset, **(STATIC if kind == "static" else {}))
        output = run(model, cache, prompt, False, q_len)
    compare.assert_close(output, expected, tolerances.model_bound(expected, expected, torch.float32), "logits")


@pytest.mark.parametrize("kind", ["growing", "static"])
@pytest.mark.parametrize("preset", ["int8", "k8v4", "int4"])
def test_padding_that_later_forwards_show(preset: str, kind: str) -> None:
    model = models.llama()
    prompt = FIRST["padding"]
    expected = run(model, ReferenceCache(model.config, preset), prompt, True, 1)
    with patched(model, preset):
        output = run(model, KVQuantCache(model.config, preset, **(STATIC if kind == "static" else {})), prompt, True, 1)
    compare.assert_close(output, expected, tolerances.model_bound(expected, expected, torch.float32), "logits")


def test_padding_that_only_later_masks_show_where_attention_is_not_registered() -> None:
    model = models.build("bloom", hidden_size=4 * models.HEAD_DIM)
    expected = run(model, ReferenceCache(model.config, "int4", mask=padded_mask(LENGTH)), None, False, 1)
    with patched(model, "int4"):
        output = run(model, KVQuantCache(model.config, "int4"), None, False, 1)
    compare.assert_close(output, expected, tolerances.model_bound(expected, expected, torch.float32), "logits")


# What goes into the codes of the first layer is the same in both runs, to the last bit.
LAST_DENSE: list[dict[str, Any]] = [{"preset": preset, "layers": {1: "none"}} for preset in ("int8", "k8v4", "int4")]


@pytest.mark.parametrize(
    "options", [{}, {"num_beams": 3, "num_return_sequences": 2}, {"prefill_chunk_size": 10}, {"given": True}], ids=str
)
@pytest.mark.parametrize("static", [False, True], ids=["growing", "static"])
@pytest.mark.parametrize("config", LAST_DENSE, ids=["int8", "k8v4", "int4"])
def test_padding_of_a_prompt_where_masks_are_not_ours(config: dict[str, Any], static: bool, options: Any) -> None:
    """XGLM has the attention implementation that it was loaded with, and so makes the masks of that one."""
    model = models.family("xglm")
    inputs = left_padded(batch=2, tokens=60, pads=(12, 0))
    options = {**options, "disable_compile": True}
    is_given = options.pop("given", False)
    transforms = key_transforms(model, config)  # its keys have a bias
    simulated = ReferenceCache(model.config, config, mask=inputs["attention_mask"], key_transforms=transforms)
    expected = greedy(model, inputs, 30, **with_cache(simulated), **options)
    with patched(model, {**config, "static": static}):
        cache = KVQuantCache(model.config, config, **(STATIC if static else {}))
        output = greedy(model, inputs, 30, **(with_cache(cache) if is_given else {}), **options)
    compare.assert_same(output.sequences, expected.sequences, "tokens")
    bound = tolerances.model_bound(logits(expected), logits(expected), torch.float32)
    compare.assert_close(logits(output), logits(expected), bound, "logits")
    assert cache_of(output).notes.told is None, "the next prompt has other padding"


def test_tokens_that_a_model_puts_before_the_text_are_no_padding() -> None:
    """CPM-Ant makes its masks itself, and what `generate` gets is of the text alone."""
    model = models.build("cpmant", dim_head=32, dim_ff=64, prompt_length=4, prompt_types=4, segment_types=4)
    inputs = left_padded(batch=2, tokens=9, pads=(3, 0))
    with patched(model, "int4"):
        output = greedy(model, inputs)
    assert cache_of(output).get_seq_length() == 4 + 9 + 5
    assert all(storage.starts is None for storage in cache_of(output).storages)


def filled(preset: Any, tokens: int, starts: Tensor | None) -> Any:
    """The storage of a layer with random tokens behind padding."""
    cache = KVQuantCache(models.llama().config, preset)
    layer = cache.layers[0]
    assert isinstance(layer, KVQuantLayer)
    cache.notes.starts = starts
    torch.manual_seed(4)
    layer.update(torch.randn(3, 2, tokens, models.HEAD_DIM), torch.randn(3, 2, tokens, models.HEAD_DIM))
    return layer.storage


@pytest.mark.parametrize("tokens", [14, 40, 300])
@pytest.mark.parametrize("preset", PRESETS, ids=str)
def test_what_is_seen_stays_as_it_was(preset: Any, tokens: int) -> None:
    starts = PADS.int()
    storage = filled(preset, tokens, None)
    before = storage.dequantize()
    padding.follow([storage], starts)
    for old, new in zip(before, storage.dequantize(), strict=True):
        for b, first in enumerate(PADS.tolist()):
            compare.assert_same(new[b, :, first:], old[b, :, first:], "tokens behind the padding")
    assert storage.starts is not None and torch.equal(storage.starts, starts)


def test_padding_that_has_codes_may_be_shown() -> None:
    """The first tokens of before become codes; all others stay as they were."""
    storage = filled("int8", 40, PADS.int())
    before = storage.dequantize()
    padding.follow([storage], None)
    for old, new in zip(before, storage.dequantize(), strict=True):
        changed = (old != new).any(-1).any(1)
        for b, first in enumerate(PADS.tolist()):
            others = torch.arange(40)
            others = others[(others < max(first, 4)) | (others >= first + 4)]
            assert not changed[b, others].any()
            assert ((old[b] - new[b]).norm(dim=-1) <= 0.01 * old[b].norm(dim=-1)).all()


def test_padding_without_codes_must_stay_hidden() -> None:
    storage = filled("int4", 300, PADS.int())
    before = storage.dequantize()
    with pytest.raises(
        ValueError, match=r"`attention_mask` must go on hiding .* \[0, 5, 2\] tokens by sequence, got \[0, 0, 0\]"
    ):
        padding.follow([storage], None)
    for old, new in zip(before, storage.dequantize(), strict=True):
        compare.assert_same(new, old, "tokens")
    padding.follow([storage], (PADS + 1).int())


def test_padding_that_goes_on_in_the_next_chunk_moves_nothing() -> None:
    storage = filled("int4", 4, torch.tensor([0, 4, 2], dtype=torch.int32))
    assert storage.starts is not None
    padding.follow([storage], torch.tensor([0, 9, 2], dtype=torch.int32))
    assert storage.starts.tolist() == [0, 4, 2]  # attention passes the new ones
