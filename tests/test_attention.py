"""The registered attention and mask functions themselves: names, masks, keyword arguments, and what falls back.

Whole models are run in `test_generate.py`; here each decision is looked at alone, over handles of a storage.
"""

from __future__ import annotations

import copy
import functools
import logging
import re
from typing import Any

import compare
import models
import pytest
import tolerances
import torch
from compare import assert_same
from models import greedy, left_padded, logits
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, LlamaConfig
from transformers.cache_utils import DynamicCache
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    causal_mask_function,
    create_causal_mask,
    eager_mask,
    or_masks,
    sdpa_mask,
    sliding_window_causal_mask_function,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama

from hf_kvquant import PRESETS, KVQuantCache, patch, patched, report
from hf_kvquant.attention.registry import attention, attention_mask, implementation_name, is_ours
from hf_kvquant.cache.handle import KVHandle, KVLength, MaskNotes
from hf_kvquant.spec import reference
from hf_kvquant.upstream.releases import CACHE, HAS_PAGES, with_cache

BATCH, Q_HEADS, KV_HEADS, HEAD_DIM, LENGTH = 3, 4, 2, 16, 10
CONFIG = LlamaConfig(
    hidden_size=Q_HEADS * HEAD_DIM, num_attention_heads=Q_HEADS, num_key_value_heads=KV_HEADS, num_hidden_layers=1
)
CONFIG._attn_implementation = "hf_kvquant"
PADS = torch.tensor([3, 0, 8])


def make_module() -> Any:
    return modeling_llama.LlamaAttention(CONFIG, 0).eval()


def make_handles(q_len: int = 1, preset: Any = "int4-token", **options: Any) -> tuple[KVHandle, KVHandle]:
    """Handles over LENGTH tokens, of which the newest `q_len` are pending."""
    cache = KVQuantCache(CONFIG, preset, **options)
    for count in (LENGTH - q_len, q_len):
        key, value = torch.randn(2, BATCH, KV_HEADS, count, HEAD_DIM)
        handles = cache.update(key, value, 0)
    return handles


def make_bounds(pads: Tensor, offset: int) -> Tensor:
    return torch.stack([pads, torch.full_like(pads, offset)]).int().view(2, -1, 1, 1)


def expected_output(query: Tensor, handles: tuple[KVHandle, KVHandle], **options: Any) -> Tensor:
    """What the specification says of the tokens that the handles stand for."""
    key, value = (handle.dense()[:, :, :LENGTH].float() for handle in handles)
    lengths = torch.full((BATCH,), LENGTH, dtype=torch.int32)
    options.setdefault("softmax_scale", HEAD_DIM**-0.5)
    return reference.decode_attention(query, key, value, lengths, **options)[0]


def check(out: Tensor, expected: Tensor, what: str) -> None:
    compare.assert_close(out, expected, tolerances.attention_bound(expected, expected, torch.float32, 8.0, 4.0), what)


# --- names ------------------------------------------------------------------------------------------------------------


def test_both_interfaces_know_our_names() -> None:
    """A name without a mask function would get no mask at all, silently."""
    for name in ("hf_kvquant", "hf_kvquant-eager"):
        assert name in ALL_ATTENTION_FUNCTIONS.valid_keys() and name in ALL_MASK_ATTENTION_FUNCTIONS.valid_keys()


@pytest.mark.parametrize(
    ("previous", "name"),
    [
        ("sdpa", "hf_kvquant"),
        ("eager", "hf_kvquant-eager"),
        ("flash_attention_2", "hf_kvquant-fa2"),
        ("flex_attention", "hf_kvquant-flex_attention"),
    ],
)
def test_names(previous: str, name: str) -> None:
    assert implementation_name(previous) == name == implementation_name(name)
    assert is_ours(name) and not is_ours(previous) and not is_ours(None)
    assert "flash" not in name and "/" not in name, "transformers would load something for such a name"


def test_an_unknown_implementation_is_refused() -> None:
    with pytest.raises(ValueError, match=r"patch: the model's attention implementation must be 'eager' or one of"):
        implementation_name("sdqa")


# --- masks ------------------------------------------------------------------------------------------------------------


def ask(length: int = LENGTH, notes: MaskNotes | None = None, is_first_chunk: bool = False, **options: Any) -> Any:
    """Ask our mask function as transformers does."""
    arguments = {
        "batch_size": BATCH,
        "q_length": 1,
        "q_offset": LENGTH - 1,
        "kv_offset": 0,
        "mask_function": causal_mask_function,
        "attention_mask": None,
        "allow_is_causal_skip": True,
        "dtype": torch.float32,
        "config": CONFIG,
        "use_vmap": False,
        "device": torch.device("cpu"),
    }
    marked = KVLength(length, notes or MaskNotes(), is_first_chunk)
    return attention_mask(kv_length=marked, prev="sdpa", **{**arguments, **options})


def padding_mask() -> Tensor:
    return torch.arange(LENGTH) >= PADS[:, None]


def test_handles_get_bounds() -> None:
    compare.assert_same(ask(attention_mask=padding_mask()), make_bounds(PADS, LENGTH - 1), "bounds")


def test_one_token_without_padding_needs_no_mask() -> None:
    assert ask() is None


@pytest.mark.parametrize(
    "options",
    [{"q_length": 4, "q_offset": 6}, {"q_offset": torch.tensor(9, dtype=torch.int32)}],
    ids=["several_queries", "static"],
)
def test_what_a_dense_tensor_would_not_tell_is_in_the_bounds(options: dict[str, Any]) -> None:
    compare.assert_same(ask(**options), make_bounds(torch.zeros(3), int(options["q_offset"])), "bounds")


def test_a_row_that_is_all_padding() -> None:
    mask = padding_mask()
    mask[1] = False
    assert ask(attention_mask=mask)[0].flatten().tolist() == [3, LENGTH, 8]


def test_a_mask_of_another_cache_is_that_of_the_implementation_before() -> None:
    arguments = {"batch_size": BATCH, "q_length": 1, "q_offset": 9, "attention_mask": padding_mask(), "device": "cpu"}
    for previous, function in (("sdpa", sdpa_mask), ("eager", eager_mask)):
        expected = function(kv_length=LENGTH, **arguments)
        ours = attention_mask(kv_length=LENGTH, prev=previous, **arguments)
        compare.assert_same(ours, expected, previous)


def dense(length: int = LENGTH, **options: Any) -> Tensor:
    arguments = {"batch_size": BATCH, "q_length": 1, "q_offset": LENGTH - 1, "device": torch.device("cpu")}
    return sdpa_mask(kv_length=length, **{**arguments, **options})


@pytest.mark.parametrize(
    "options",
    [
        {"mask_function": sliding_window_causal_mask_function(4), "local_size": 4},
        {"mask_function": or_masks(causal_mask_function, lambda b, h, q, k: k < 2)},
        {"use_vmap": True},
    ],
    ids=["sliding", "combined", "vmap"],
)
def test_masks_that_bounds_cannot_say_are_dense(options: dict[str, Any]) -> None:
    options = {**options, "attention_mask": padding_mask()}
    compare.assert_same(ask(**options), dense(**options), "mask")


def test_the_first_chunk_gets_the_usual_mask() -> None:
    options = {"q_length": LENGTH, "q_offset": 0, "attention_mask": padding_mask()}
    compare.assert_same(ask(is_first_chunk=True, **options), dense(**options), "mask")


def test_holes_are_remembered() -> None:
    notes, mask = MaskNotes(), padding_mask()
    ask(notes=notes, attention_mask=mask)
    assert not notes.has_holes
    mask[0, 5] = False
    compare.assert_same(ask(notes=notes, attention_mask=mask), dense(attention_mask=mask), "mask")
    assert notes.has_holes
    # A later step may not look at the values of a mask on a GPU, and relies on what the first ones showed.
    compare.assert_same(ask(notes=notes, attention_mask=padding_mask()), dense(attention_mask=padding_mask()), "mask")


def test_a_length_stays_marked_on_its_way_through_transformers() -> None:
    cache = KVQuantCache(CONFIG, "int8")
    cache.update(*torch.randn(2, BATCH, KV_HEADS, LENGTH - 1, HEAD_DIM), 0)
    mask = create_causal_mask(
        config=CONFIG,
        inputs_embeds=torch.zeros(BATCH, 1, 8),
        attention_mask=padding_mask().long(),
        **with_cache(cache),
    )
    compare.assert_same(mask, make_bounds(PADS, LENGTH - 1), "bounds")
    again = create_causal_mask(
        config=CONFIG, inputs_embeds=torch.zeros(BATCH, 1, 8), attention_mask=mask, **with_cache(cache)
    )
    assert again is mask, "a mask of four dimensions passes untouched"


# --- attention over handles -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("static", [False, True], ids=["growing", "static"])
@pytest.mark.parametrize("q_len", [1, 4])
@pytest.mark.parametrize("padded", [False, True], ids=["no_pad", "left_pad"])
def test_handles_are_served_from_codes(padded: bool, q_len: int, static: bool) -> None:
    handles = make_handles(q_len, max_cache_len=32 if static else None)
    query = torch.randn(BATCH, Q_HEADS, q_len, HEAD_DIM)
    bounds = make_bounds(PADS, LENGTH - q_len) if padded else None
    out, weights = attention(make_module(), query, *handles, bounds, prev="sdpa", scaling=0.3)
    assert weights is None
    starts = PADS.int() if padded else None
    check(out, expected_output(query, handles, softmax_scale=0.3, starts=starts), "output")
    assert handles[0].step.storage.tally.fallbacks.total() == 1, "only by the look of this test"


@pytest.mark.parametrize(
    ("options", "meaning"),
    [
        ({"scaling": None}, {}),
        ({"scaling": 1.0}, {"softmax_scale": 1.0}),
        ({"softcap": 2.0}, {"softcap": 2.0}),
        ({"softcap": None}, {}),
        ({"sliding_window": 3}, {"sliding_window": 3}),
        ({"s_aux": torch.tensor([0.5, -1.0, 2.0, 0.0])}, {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])}),
        ({"s_aux": torch.ones(4, dtype=torch.bfloat16)}, {"sinks": torch.ones(4)}),
        ({"position_ids": torch.zeros(3, 1), "use_cache": True, "deterministic": False, "is_causal": True}, {}),
        ({"tokenizer": object()}, {}),
        ({"is_causal": False}, {}),  # one query sees everything before it either way
        ({"cu_seq_lens_q": torch.zeros(2), "max_length_k": 7, "output_router_logits": True}, {}),
        ({"something_else": None, "another": False}, {}),
        ({"dropout": 0.5}, {}),  # the module is not in training
    ],
    ids=lambda value: "-".join(value) or "plain",
)
def test_keyword_arguments_that_the_kernel_serves(options: dict[str, Any], meaning: dict[str, Any]) -> None:
    handles, query = make_handles(), torch.randn(BATCH, Q_HEADS, 1, HEAD_DIM)
    out, _ = attention(make_module(), query, *handles, None, prev="eager", **options)
    assert not handles[0].step.storage.tally.fallbacks
    check(out, expected_output(query, handles, **meaning), "output")


def test_a_cap_that_prefill_leaves_out_is_left_out() -> None:
    """Where sdpa is told of a soft cap and does not refuse, it ignores it."""
    handles, query = make_handles(), torch.randn(BATCH, Q_HEADS, 1, HEAD_DIM)
    out, _ = attention(make_module(), query, *handles, None, prev="sdpa", softcap=2.0)
    check(out, expected_output(query, handles), "output")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"something_else": torch.ones(1)}, "the model passes 'something_else' to attention"),
        ({"a_switch": True}, "the model passes 'a_switch' to attention"),
    ],
    ids=["tensor", "switch"],
)
@pytest.mark.parametrize("static", [False, True], ids=["growing", "static"])
def test_unknown_keyword_arguments_fall_back(options: dict[str, Any], reason: str, static: bool) -> None:
    handles, query = make_handles(max_cache_len=32 if static else None), torch.randn(BATCH, Q_HEADS, 1, HEAD_DIM)
    out, _ = attention(make_module(), query, *handles, make_bounds(PADS, LENGTH - 1), prev="sdpa", **options)
    assert handles[0].step.storage.tally.fallbacks == {reason: 1}
    check(out, expected_output(query, handles, starts=PADS.int()), "output")


@pytest.mark.parametrize("q_len", [1, 4])
@pytest.mark.parametrize("padded", [False, True], ids=["no_pad", "left_pad"])
def test_a_position_bias_falls_back(padded: bool, q_len: int) -> None:
    """sdpa adds it, on the dense mask that it would have got."""
    handles, query = make_handles(q_len), torch.randn(BATCH, Q_HEADS, q_len, HEAD_DIM)
    bias = torch.randn(1, Q_HEADS, q_len, LENGTH)
    bounds = make_bounds(PADS if padded else torch.zeros(3), LENGTH - q_len)
    out, _ = attention(make_module(), query, *handles, bounds, prev="sdpa", position_bias=bias)
    storage = handles[0].step.storage
    assert storage.tally.fallbacks == {"a position bias is added to the scores": 1}
    key, value = (x.repeat_interleave(2, 1) for x in storage.dequantize())
    scores = query @ key.mT * HEAD_DIM**-0.5 + bias
    column, position = torch.arange(LENGTH), torch.arange(LENGTH - q_len, LENGTH)[:, None]
    visible = (column <= position) & (column >= bounds[0].view(-1, 1, 1, 1))
    weights = scores.masked_fill(~visible, -torch.inf).softmax(-1).nan_to_num()
    rows = visible.any(-1).expand(BATCH, Q_HEADS, q_len).transpose(1, 2).unsqueeze(-1)
    check(out.where(rows, 0.0), (weights @ value).transpose(1, 2).where(rows, 0.0), "output")


def test_a_mask_of_the_user_falls_back() -> None:
    handles, query = make_handles(), torch.randn(BATCH, Q_HEADS, 1, HEAD_DIM)
    mask = torch.ones(BATCH, 1, 1, LENGTH, dtype=torch.bool)
    mask[..., :3] = False
    out, _ = attention(make_module(), query, *handles, mask, prev="sdpa")
    assert handles[0].step.storage.tally.fallbacks == {"the attention mask is neither causal nor left padding": 1}
    check(out, expected_output(query, handles, starts=torch.full((BATCH,), 3)), "output")


def test_dropout_in_training_falls_back() -> None:
    handles, query = make_handles(), torch.randn(BATCH, Q_HEADS, 1, HEAD_DIM)
    attention(make_module().train(), query, *handles, None, prev="sdpa", dropout=0.1)
    assert handles[0].step.storage.tally.fallbacks == {"attention dropout": 1}


def test_queries_that_see_what_comes_later_fall_back() -> None:
    handles, query = make_handles(3), torch.randn(BATCH, Q_HEADS, 3, HEAD_DIM)
    mask = torch.ones(BATCH, 1, 3, LENGTH, dtype=torch.bool)
    out, _ = attention(make_module(), query, *handles, mask, prev="sdpa", is_causal=False)
    storage = handles[0].step.storage
    assert storage.tally.fallbacks.total() == 1
    key, value = (x.repeat_interleave(2, 1) for x in storage.dequantize())
    weights = (query @ key.mT * HEAD_DIM**-0.5).softmax(-1)
    check(out, (weights @ value).transpose(1, 2), "output")


@pytest.mark.parametrize("name", ["indices", "block_indices"])
def test_attention_of_another_kind_is_refused(name: str) -> None:
    handles, query = make_handles(), torch.randn(BATCH, Q_HEADS, 1, HEAD_DIM)
    message = (
        f"attention: `{name}` must be None over a quantised cache, got a value. The attention of "
        "LlamaAttention is not supported. Leave the model unpatched."
    )
    with pytest.raises(NotImplementedError, match=re.escape(message)):
        attention(make_module(), query, *handles, None, prev="sdpa", **{name: torch.zeros(1)})
    out, _ = attention(make_module(), query, *handles, None, prev="sdpa", **{name: None})
    check(out, expected_output(query, handles), "output, with the argument left empty")


def test_attention_weights_are_refused() -> None:
    handles, query = make_handles(), torch.randn(BATCH, Q_HEADS, 1, HEAD_DIM)
    message = (
        "attention: `output_attentions` must be False over a quantised cache, got True: attention weights are never "
        "formed. Unpatch the model to look at them."
    )
    with pytest.raises(NotImplementedError, match=re.escape(message)):
        attention(make_module(), query, *handles, None, prev="eager", output_attentions=True)


def test_several_layers_may_attend_through_one_pair_of_handles() -> None:
    handles, query = make_handles(2), torch.randn(BATCH, Q_HEADS, 2, HEAD_DIM)
    first, _ = attention(make_module(), query, *handles, None, prev="sdpa")
    second, _ = attention(make_module(), query, *handles, None, prev="sdpa")
    compare.assert_same(first, second, "output")
    assert handles[0].step.storage.length == LENGTH
    check(first, expected_output(query, handles), "output")


# --- the implementation before ours -----------------------------------------------------------------------------------


@pytest.mark.parametrize("previous", ["sdpa", "eager"])
@pytest.mark.parametrize("padded", [False, True], ids=["no_pad", "left_pad"])
@pytest.mark.parametrize("q_len", [1, 4])
@pytest.mark.parametrize("static", [False, True], ids=["growing", "static"])
def test_tensors_that_the_model_made_of_handles(static: bool, q_len: int, padded: bool, previous: str) -> None:
    """A model that changes keys or values passes dense tensors, together with a mask that was made for handles."""
    handles = make_handles(q_len, max_cache_len=32 if static else None)
    query = torch.randn(BATCH, Q_HEADS, q_len, HEAD_DIM)
    bounds = make_bounds(PADS if padded else torch.zeros(3), LENGTH - q_len)
    changed = handles[0] * 2.0, handles[1] * -1.0
    out, _ = attention(make_module(), query, *changed, bounds, prev=previous, scaling=HEAD_DIM**-0.5)
    starts = PADS if padded else torch.zeros(BATCH, dtype=torch.long)
    expected = expected_output(query * 2.0, handles, starts=starts.int()) * -1.0
    position = torch.arange(LENGTH - q_len, LENGTH)
    rows = (position >= starts[:, None])[:, :, None, None]  # a query that is padding itself sees nothing: undefined
    check(out.where(rows, 0.0), expected.where(rows, 0.0), "output")


def test_raw_tensors_go_to_the_implementation_before() -> None:
    query, key, value = (torch.randn(BATCH, heads, 5, HEAD_DIM) for heads in (Q_HEADS, KV_HEADS, KV_HEADS))
    module = make_module()
    for previous, function in (
        ("sdpa", ALL_ATTENTION_FUNCTIONS["sdpa"]),
        ("eager", modeling_llama.eager_attention_forward),
    ):
        ours, _ = attention(module, query, key, value, None, prev=previous, dropout=0.0, scaling=0.3)
        expected, _ = function(module, query, key, value, None, dropout=0.0, scaling=0.3)
        compare.assert_same(ours, expected, previous)


def test_eager_attention_of_a_module_that_has_none() -> None:
    class Attention(nn.Module):
        pass

    x = torch.randn(1, 1, 2, 8)
    message = (
        "attention: Attention has no eager attention function to fall back to. "
        "Load the model with attn_implementation='sdpa'."
    )
    with pytest.raises(NotImplementedError, match=re.escape(message)):
        attention(Attention(), x, x, x, None, prev="eager")


def test_the_implementation_before_is_looked_up_at_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other packages wrap what is registered, after we did."""
    calls = []
    original = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        return original(*args, **kwargs)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "sdpa", wrapped)
    x = torch.randn(1, 4, 2, HEAD_DIM)
    attention(make_module(), x, x, x, None, prev="sdpa")
    assert len(calls) == 1


def test_an_implementation_that_reads_its_name_finds_its_own() -> None:
    """Flash attention picks its kernel by the name in the config, which is ours by now."""
    seen = []

    def by_name(module: Any, query: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        seen.append(
            (module.config._attn_implementation, module.config.hidden_size, module.layer_idx, kwargs["scaling"])
        )
        return query.transpose(1, 2), None

    AttentionInterface.register("by_name", by_name)
    AttentionMaskInterface.register("by_name", sdpa_mask)
    try:
        name = implementation_name("by_name")
        x = torch.randn(1, 4, 2, HEAD_DIM)
        ALL_ATTENTION_FUNCTIONS[name](make_module(), x, x, x, None, scaling=0.5)
    finally:
        for interface in (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS):
            for registered in ("by_name", "hf_kvquant-by_name"):
                type(interface)._global_mapping.pop(registered, None)
    assert name == "hf_kvquant-by_name"
    assert seen == [("by_name", CONFIG.hidden_size, 0, 0.5)]
    assert CONFIG._attn_implementation == "hf_kvquant"


def test_parameters_are_named_as_models_pass_them() -> None:
    """Some call sites pass everything by keyword."""
    x = torch.randn(BATCH, Q_HEADS, 2, HEAD_DIM)
    function = ALL_ATTENTION_FUNCTIONS["hf_kvquant"]
    assert isinstance(function, functools.partial)
    out, _ = function(module=make_module(), query=x, key=x, value=x, attention_mask=None, dropout=0.0, scaling=None)
    assert out.shape == (BATCH, 2, Q_HEADS, HEAD_DIM)


# --- gradients --------------------------------------------------------------------------------------------------------


def gradients(model: Any, ids: Tensor, **options: Any) -> dict[str, Tensor]:
    model.zero_grad()
    model(ids, labels=ids, **options).loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("is_static", [False, True], ids=["growing", "static"])
@pytest.mark.parametrize("preset", PRESETS)
def test_a_first_chunk_is_trained_on(preset: str, is_static: bool) -> None:
    """With `use_cache` left on, or a cache of ours: it gives back the very tensors."""
    model, ids = copy.deepcopy(models.llama()), models.left_padded(pads=(0,))["input_ids"]
    expected = gradients(model, ids, use_cache=False)
    with patched(model, preset):
        cache = KVQuantCache(model.config, preset, max_cache_len=32 if is_static else None)
        for options in ({}, {CACHE: cache}):
            for name, gradient in gradients(model, ids, **options).items():
                compare.assert_same(gradient, expected[name], name)


@pytest.mark.parametrize("trained", ["everything", "v_proj", "q_proj"])
@pytest.mark.parametrize("preset", PRESETS)
def test_chunks_behind_others_have_no_gradients(preset: str, trained: str) -> None:
    model, ids = copy.deepcopy(models.llama()), models.left_padded(pads=(0,))["input_ids"]
    remedy = "Call the model under torch.no_grad(), or train it with use_cache=False."
    side, layer = ("values", 0) if trained == "v_proj" else ("keys", 0)
    if trained != "everything":
        model.requires_grad_(False)
        getattr(model.model.layers[0].self_attn, trained).requires_grad_(True)
    message = (
        f"layer {layer}: `key_states` and `value_states` after the first chunk must not require gradients, got {side} "
        f"that do: a quantised cache keeps no autograd graph, so gradients would be wrong. {remedy}"
    )
    if trained == "q_proj" and preset == "none":  # the layer itself attends to tensors; the next one has lost them
        message = message.replace("layer 0", "layer 1")
    elif trained == "q_proj":
        message = (
            "attention: `query` must not require gradients over a quantised cache, got one that does: kernels "
            f"compute none, so those of the model's weights would be wrong. {remedy}"
        )
    with patched(model, preset):
        cache = KVQuantCache(model.config, preset)
        with torch.no_grad():
            expected = model(ids[:, :5], **with_cache(cache)).logits
        for _ in range(2):
            with pytest.raises(RuntimeError) as raised:
                model(ids[:, 5:], **with_cache(cache))
            assert str(raised.value) == message
            cache.crop(0)
        with torch.no_grad():
            model(ids[:, 5:], **with_cache(cache))
        cache.reset()
        compare.assert_same(model(ids[:, :5], **with_cache(cache)).logits, expected, "a first chunk")


def test_gradients_of_queries_over_keys_as_they_came_are_those_of_transformers() -> None:
    """Queries alone, over keys that are as they came: nothing is lost, and nothing refused."""
    model, ids = copy.deepcopy(models.llama(num_hidden_layers=1)), models.left_padded(pads=(0,))["input_ids"]
    model.requires_grad_(False)
    weight = model.model.layers[0].self_attn.q_proj.weight.requires_grad_(True)
    found = []
    with patched(model, "none"):
        for cache in (DynamicCache(config=model.config), KVQuantCache(model.config, "none")):
            model.zero_grad()
            model(ids[:, :5], **with_cache(cache))
            model(ids[:, 5:], **with_cache(cache), labels=ids[:, 5:]).loss.backward()
            found.append(weight.grad.clone())
    compare.assert_same(found[1], found[0], "gradient")


def test_the_kernel_serves_only_what_transformers_ships(caplog: pytest.LogCaptureFixture) -> None:
    """A function of the user's own computes every step, the first chunk and those over codes."""
    calls = []

    def halved(module: Any, query: Tensor, *args: Any, **kwargs: Any) -> Any:
        calls.append(query.shape[2])
        return ALL_ATTENTION_FUNCTIONS["sdpa"](module, 0.5 * query, *args, **kwargs)

    AttentionInterface.register("halved", halved)
    AttentionMaskInterface.register("halved", sdpa_mask)
    model = models.build("llama")
    try:
        model.set_attn_implementation("halved")
        expected = logits(greedy(model, left_padded()))
        num_calls = len(calls)
        with patched(model, "int8"), caplog.at_level(logging.WARNING, "hf_kvquant"):
            output = greedy(model, left_padded())
            served = {(layer.kernel, layer.reason, *layer.fallbacks) for layer in report(model).layers}
            message = "attends by a function of its own: 'halved' is not the" if HAS_PAGES else "must be 5.23 or newer"
            with pytest.raises(NotImplementedError, match=message):
                model.generate_batch([[5, 6]], continuous_batching_config=ContinuousBatchingConfig(num_blocks=4))
        with patched(model, "none"):
            assert_same(logits(greedy(model, left_padded())), expected, "unquantised")
    finally:
        for interface in (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS):
            for registered in [name for name in interface.valid_keys() if "halved" in name]:
                type(interface)._global_mapping.pop(registered, None)
    reason = "'halved' is not the attention that transformers ships under this name"
    assert served == {("transformers, over dequantised tensors", reason, reason)}
    assert any(reason in record.getMessage() for record in caplog.records)
    assert len(calls) >= 2 * num_calls, "every call went to the user's function"
    assert (logits(output) - expected).abs().max() < 0.2 * expected.std()


def test_attention_without_masks() -> None:
    """transformers passes no mask to an implementation that is registered among attention functions alone."""
    masks = []

    def unmasked(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any) -> Any:
        masks.append(mask)
        return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, mask, **kwargs)

    AttentionInterface.register("unmasked", unmasked)
    model, inputs = models.build("llama"), left_padded()
    try:
        model.set_attn_implementation("unmasked")
        expected = logits(greedy(model, inputs))
        with patched(model, "none"):
            assert_same(logits(greedy(model, inputs)), expected, "unquantised")
        with patched(model, "int8"):
            assert (logits(greedy(model, inputs)) - expected).abs().max() < 0.2 * expected.std()
        assert not any(mask is not None for mask in masks)
        with pytest.raises(NotImplementedError, match="attends by 'unmasked', for which AttentionMaskInterface has no"):
            patch(model, "int8", static=True)
        assert model.config._attn_implementation == "unmasked"
    finally:
        for interface in (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS):
            for registered in [name for name in interface.valid_keys() if "unmasked" in name]:
                type(interface)._global_mapping.pop(registered, None)


def test_dropout_and_scaling_may_come_by_position() -> None:
    """As transformers' own functions take them."""
    x, function = torch.randn(1, 4, 3, HEAD_DIM), ALL_ATTENTION_FUNCTIONS["hf_kvquant"]
    by_name, _ = function(make_module(), x, x, x, None, dropout=0.0, scaling=0.25)
    by_position, _ = function(make_module(), x, x, x, None, 0.0, 0.25)
    assert_same(by_position, by_name, "out")
