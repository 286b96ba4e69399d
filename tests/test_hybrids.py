"""Layers that are attention and a state at once: as transformers' own, with codes for keys and values.

Against the reference they are compared in `test_generate.py`, with all families.
"""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import compare
import models
import pytest
import tolerances
import torch
from models import greedy, left_padded, logits
from test_cache import through_pickle
from transformers import CONFIG_MAPPING
from transformers.cache_utils import DynamicCache

import hf_kvquant
from hf_kvquant import KVQuantCache, patch, patched
from hf_kvquant.attention.observation import observations
from hf_kvquant.cache.layers import KVQuantHybridLayer, KVQuantHybridRingLayer
from hf_kvquant.transforms.balancing import balancing_factors
from hf_kvquant.upstream.releases import cache_of, with_cache
from hf_kvquant_evals.measuring.simulation import simulated_cache, why_not_simulated

FAMILIES = ["falcon_h1", "zamba2"]


@pytest.fixture(params=FAMILIES)
def model(request: pytest.FixtureRequest, device: str) -> Any:
    return models.on(device, models.family(request.param))


def first_of(cache: Any) -> Any:
    """The first hybrid layer."""
    return next(layer for layer in cache.layers if isinstance(layer, KVQuantHybridLayer))


def filled(model: Any, config: Any = "int4-token", **options: Any) -> KVQuantCache:
    cache = KVQuantCache(model.config, config, **options)
    with patched(model, config):
        greedy(model, left_padded(), 4, **with_cache(cache))
    return cache


def states_of(layer: Any) -> list[Any]:
    return [layer.conv_states[0], layer.recurrent_states[0]]


@pytest.mark.parametrize(
    "options",
    [{"prefill_chunk_size": 4}, {"num_beams": 3}, {"use_cache": False}],
    ids=["chunks", "beams", "no_cache"],
)
def test_generation_is_that_of_transformers(model: Any, options: dict[str, Any]) -> None:
    expected = greedy(model, left_padded(), **options)
    with patched(model, "none"):
        output = greedy(model, left_padded(), **options)
    compare.assert_same(output.sequences, expected.sequences.cpu(), "tokens")


def test_static_caches_are_those_of_transformers(model: Any) -> None:
    options = {"disable_compile": True}
    expected = greedy(model, left_padded(), cache_implementation="static", **options)
    with patched(model, {"preset": "none", "static": True}):
        output = greedy(model, left_padded(), **options)
    compare.assert_same(output.sequences, expected.sequences.cpu(), "tokens")
    assert first_of(cache_of(output)).is_compileable


@pytest.mark.parametrize("preset", ["int8", "int4-token", "int4-channel"])
def test_static_caches_give_the_logits_of_growing_ones(model: Any, preset: str) -> None:
    with patched(model, preset):
        expected = logits(greedy(model, left_padded(), disable_compile=True))
    with patched(model, {"preset": preset, "static": True}):
        output = greedy(model, left_padded(), disable_compile=True)
    # A GPU splits a sequence by the capacity of its buffers, and so sums in another order.
    compare.assert_close(logits(output), expected, tolerances.model_bound(expected, expected, torch.float32), "logits")
    assert not any(storage.tally.fallbacks for storage in cache_of(output).storages)


def test_a_chat_goes_on_with_its_cache(model: Any) -> None:
    def both_turns(cache: Any) -> Any:
        first = greedy(model, left_padded(), 4, **with_cache(cache)).sequences
        ids = torch.cat((first, first[:, :3]), dim=1).cpu()
        mask = torch.cat((left_padded()["attention_mask"], torch.ones(3, 7, dtype=torch.int64)), dim=1)
        return greedy(model, {"input_ids": ids, "attention_mask": mask}, 4, **with_cache(cache)).sequences

    expected = both_turns(DynamicCache(config=model.config))
    with patched(model, "none"):
        compare.assert_same(both_turns(KVQuantCache(model.config, "none")), expected.cpu(), "tokens")


def test_a_cache_that_was_reset_serves_again(model: Any) -> None:
    cache = filled(model)
    cache.reset()
    assert cache.get_seq_length() == 0 and not any(first_of(cache).has_previous_state.values())
    with patched(model, "int4-token"):
        expected = greedy(model, left_padded(), 4).sequences
        compare.assert_same(greedy(model, left_padded(), 4, **with_cache(cache)).sequences, expected.cpu(), "tokens")


def test_the_batch_of_states_is_that_of_the_codes(model: Any) -> None:
    layer, order = first_of(filled(model)), torch.tensor([2, 0], device=model.device)
    before, keys = [state.clone() for state in states_of(layer)], layer.keys.clone()
    layer.batch_repeat_interleave(2)
    for state, old in zip(states_of(layer), before, strict=True):
        compare.assert_same(state, old.repeat_interleave(2, dim=0).cpu(), "repeated")
    compare.assert_same(layer.keys, keys.repeat_interleave(2, dim=0).cpu(), "repeated keys")
    layer.batch_select_indices(2 * order)
    for state, old in zip(states_of(layer), before, strict=True):
        compare.assert_same(state, old[order].cpu(), "selected")
    compare.assert_same(layer.keys, keys[order].cpu(), "selected keys")
    layer.reorder_cache(torch.tensor([1, 0], device=model.device))
    for state, old in zip(states_of(layer), before, strict=True):
        compare.assert_same(state, old[order.flip(0)].cpu(), "reordered")
    compare.assert_same(layer.keys, keys[order.flip(0)].cpu(), "reordered keys")
    assert layer.batch_size == 2


@pytest.mark.parametrize("static", [False, True], ids=["growing", "static"])
def test_a_shared_prefix_is_repeated_in_layers_with_a_state_alone(static: bool) -> None:
    """And sequences that are chosen go on, as they would have in the batch that they leave."""
    model, prefix = models.family("qwen3_5_text"), torch.full((1, 7), 5)
    rest = torch.tensor([[7, 8, 9], [30, 4, 6], [11, 40, 3]])
    cache = KVQuantCache(model.config, "int8", **({"max_cache_len": 40} if static else {}))
    with patched(model, "int8"), torch.no_grad():
        expected = model(torch.cat((prefix.expand(3, -1), rest), 1)).logits[:, 7:]
        model(prefix, **with_cache(cache))
        cache.batch_repeat_interleave(3)
        found = [model(rest[:, :2], **with_cache(cache)).logits]
        addresses = [state.data_ptr() for state in cache.states]
        cache.batch_select_indices(torch.tensor([2, 0, -2]))
        assert not static or [state.data_ptr() for state in cache.states] == addresses, "a captured step knows them"
        found.append(model(rest[[2, 0, 1], 2:], **with_cache(cache)).logits[[1, 2, 0]])
    bound = tolerances.model_bound(expected, expected, torch.float32)
    compare.assert_close(torch.cat(found, 1), expected, bound, "logits; all tokens are dense")


def test_copies_go_on_alike(model: Any) -> None:
    cache = filled(model)
    ids = torch.full((3, 1), 7, device=model.device)
    # Thirteen tokens in rows with three, none and five of padding; twelve are held.
    mask = torch.cat((left_padded()["attention_mask"], torch.ones(3, 4, dtype=torch.int64)), dim=1).to(model.device)
    with patched(model, "int4-token"), torch.no_grad():
        expected, *others = (
            model(ids, attention_mask=mask, **with_cache(each)).logits
            for each in (copy.deepcopy(cache), through_pickle(cache), cache)
        )
    for other in others:
        compare.assert_same(other, expected.cpu(), "logits")


def test_moving_takes_the_state_along(model: Any) -> None:
    layer = first_of(filled(model))
    before, keys = [state.clone() for state in states_of(layer)], layer.keys.clone()
    layer.offload()
    assert layer.storage.device.type == "cpu" and all(state.device.type == "cpu" for state in states_of(layer))
    layer.prefetch()
    assert all(state.device == model.device for state in states_of(layer))
    for now, old in zip((*states_of(layer), layer.keys), (*before, keys), strict=True):
        compare.assert_same(now, old.cpu(), "after a journey")


# --- what cannot be ---------------------------------------------------------------------------------------------------


def test_a_state_has_no_past(model: Any) -> None:
    cache = filled(model)
    length = cache.get_seq_length()
    assert not cache.is_croppable
    before = [state.clone() for state in states_of(first_of(cache))]
    for is_recorded in (False, True):  # transformers records past inputs of convolutions, and no recurrent states
        if is_recorded:
            cache.activate_past_recording()
        with pytest.raises(
            RuntimeError, match=r"must be 0 where layers have recurrent states, as layer \d has, got -2"
        ):
            cache.crop(-2)
    for state, old in zip(states_of(first_of(cache)), before, strict=True):
        compare.assert_same(state, old.cpu(), "states")
    with pytest.raises(ValueError, match="`tokens_to_remove` must be 0 or negative, got 2"):
        first_of(cache).crop(2)
    assert cache.get_seq_length() == length


def test_states_are_not_saved(model: Any, tmp_path: Path) -> None:
    with pytest.raises(NotImplementedError, match=r"got a .* with layers of type \['hybrid'"):
        filled(model).save(tmp_path / "cache.safetensors", model)
    assert not list(tmp_path.iterdir())


def test_states_are_not_simulated(model: Any) -> None:
    message = (
        f"simulate: `model` must keep only keys and values in its attention layers, got a {type(model).__name__}, "
        "which also keeps a state there. Feed it in chunks."
    )
    with pytest.raises(NotImplementedError) as raised:
        simulated_cache(model, "int4-token")
    assert str(raised.value) == message == why_not_simulated(model)


# --- keys -------------------------------------------------------------------------------------------------------------


def test_keys_are_calibrated_and_values_rotated() -> None:
    """Falcon-H1 multiplies its keys by a number, which is the projection's as far as factors go."""
    model = copy.deepcopy(models.family("falcon_h1"))
    before = greedy(model, left_padded(), 3)
    result = hf_kvquant.smooth_attention(
        model, models.tokenizer(), ["ab cd ef gh " * 200], "int4-token", window=64, mode="fold"
    )
    assert [layer.layer_idx for layer in result.layers] == [0, 1]
    assert hf_kvquant.rotate_values(model) == (0, 1)
    after = greedy(model, left_padded(), 3)
    compare.assert_same(after.sequences, before.sequences, "tokens")


def test_keys_have_centers_where_they_have_biases() -> None:
    options = {**models.FAMILIES["falcon_h1"].options, "attention_bias": True}
    model = models.build("falcon_h1", **options)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.k_proj.bias.normal_(std=3.0)
    transforms = hf_kvquant.key_transforms(model, "int4-token")
    assert all(transforms[index].center is not None for index in range(2))
    with patched(model, "int8"):
        output = greedy(model, left_padded(), 3)
    assert first_of(cache_of(output)).storage.key_transform.center is not None


# --- with a sliding window --------------------------------------------------------------------------------------------

# By model type: Zaya attends by codes; Inkling 2 adds a bias of positions to the scores, and has a sink for each query.
WINDOWED: dict[str, dict[str, Any]] = {
    "zaya": {"num_experts": 4, "num_experts_per_tok": 1, "moe_intermediate_size": 32},
    "inkling2_text": {
        "swa_head_dim": 16, "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2, "rel_extent": 16, "d_rel": 4, "num_local_experts": 4, "num_experts_per_tok": 2,
        "unpadded_vocab_size": models.VOCAB_SIZE, "n_layers_per_attn_res_block": 2,
    },
}  # fmt: skip
TYPES = ["hybrid_sliding", "hybrid"]
NEW_TOKENS = 12  # beyond the window


@pytest.fixture(params=WINDOWED)
def windowed(request: pytest.FixtureRequest) -> Any:
    if request.param not in CONFIG_MAPPING:
        pytest.skip(f"this version of transformers does not know {request.param}")
    return models.build(
        request.param, head_dim=16, hidden_size=64, sliding_window=6, layer_types=TYPES, **WINDOWED[request.param]
    )


@pytest.mark.parametrize("options", [{}, {"num_beams": 2}, {"prompt_lookup_num_tokens": 3}], ids=str)
def test_windows_with_a_state_are_those_of_transformers(windowed: Any, options: dict[str, Any]) -> None:
    inputs = {name: value[1:2] for name, value in left_padded().items()} if "prompt" in str(options) else left_padded()
    if "prompt" in str(options) and windowed._is_stateful:
        pytest.skip("transformers does not assist it")
    expected = greedy(windowed, inputs, NEW_TOKENS, **options)
    with patched(windowed, "none"):
        output = greedy(windowed, inputs, NEW_TOKENS, **options)
    compare.assert_same(output.sequences, expected.sequences, "tokens")
    assert all(isinstance(layer, KVQuantHybridLayer) for layer in cache_of(output).layers)


def test_windows_with_a_state_are_quantised(windowed: Any) -> None:
    with patched(windowed, "int8"):
        cache = cache_of(greedy(windowed, left_padded(), NEW_TOKENS))
        result = hf_kvquant.report(windowed, cache)
    layers = [layer for layer in cache.layers if layer.is_sliding]
    assert layers and {layer.formats for layer in result.layers} == {"int8"}
    assert result.is_served == (windowed.config.model_type == "zaya")
    assert all(isinstance(layer, KVQuantHybridRingLayer) and layer.get_max_length() == 6 for layer in layers)
    assert all(layer.storage.formats.is_quantized and layer.keys.shape[2] == 5 for layer in layers)
    with patched(windowed, {"preset": "int8", "sliding": False}):
        assert {layer.formats for layer in hf_kvquant.report(windowed).layers} == {"int8", None}


def test_keys_are_looked_at_in_layers_alone(windowed: Any) -> None:
    """In Inkling 2, other modules also use the attention function, of no layer, over as few tokens as it has blocks."""
    seen = observations(windowed, left_padded()["input_ids"])
    assert {index: [len(each.key.shape) for each in found] for index, found in seen.items()} == {0: [4], 1: [4]}
    assert isinstance(balancing_factors(windowed), dict)


def test_static_windows_with_a_state(windowed: Any) -> None:
    config = {"preset": "none", "static": True}
    if windowed.config.model_type == "zaya":
        expected = greedy(windowed, left_padded(), NEW_TOKENS)
        with patched(windowed, config):
            output = greedy(windowed, left_padded(), NEW_TOKENS, disable_compile=True)
        compare.assert_same(output.sequences, expected.sequences, "tokens")
        return
    message = (
        "patch: `static` must be False for Inkling2ForCausalLM, got True: it has sliding windows that the masks of "
        "transformers' generate for static caches leave out. Leave static and max_cache_len out."
    )
    with pytest.raises(NotImplementedError, match=re.escape(message)):
        patch(windowed, config)
