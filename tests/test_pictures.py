"""Vision-language models over prompts with pictures: what becomes of their masks, positions and cross-attention.

Gemma 3 lets the tokens of a picture see each other, Qwen2-VL gives them positions of their own, LLaVA neither, and
Mllama's cross-attention keeps pictures in cache layers among those of the text. Padding is on the left, pictures behind
it. That only text models are patched is tested in `test_patching.py`.
"""

from __future__ import annotations

import copy
import functools
import re
from pathlib import Path
from typing import Any

import compare
import models
import pytest
import torch
from models import HEAD_DIM, greedy, left_padded, logits
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForImageTextToText
from transformers.cache_utils import DynamicLayer

from hf_kvquant import KVQuantCache, patch, patched, report
from hf_kvquant.cache.layers import KVQuantLayer
from hf_kvquant.cache.offsets import TextOffsets
from hf_kvquant.upstream.releases import cache_of, with_cache

# Of Mllama itself in transformers 5.17.
pytestmark = pytest.mark.filterwarnings("ignore:`hidden_state` is deprecated:FutureWarning")

PICTURE, BEGIN, END = 90, 91, 92  # tokens
SIZE = 28  # pixels

_TEXT = {**models.COMMON, "hidden_size": 4 * HEAD_DIM, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
_VISION = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": SIZE,
    "patch_size": 14,
}
_CONFIGS: dict[str, dict[str, Any]] = {
    "gemma3": {
        "text_config": {
            **models.COMMON,
            "layer_types": ["sliding_attention", "full_attention"],
            "sliding_window": 6,
        },
        "vision_config": _VISION,
        "mm_tokens_per_image": 4,
        "image_token_index": PICTURE,
    },
    "llava": {
        "text_config": {**_TEXT, "model_type": "llama"},
        "vision_config": {**_VISION, "model_type": "clip_vision_model"},
        "image_token_index": PICTURE,
        "vision_feature_layer": -1,
    },
    "qwen2_vl": {
        "text_config": {
            **_TEXT,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [8, 12, 12]},
        },
        "vision_config": {
            "depth": 1,
            "embed_dim": 32,
            "hidden_size": 4 * HEAD_DIM,
            "num_heads": 2,
            "mlp_ratio": 1,
            "patch_size": 4,
        },
        "image_token_id": PICTURE,
        "vision_start_token_id": BEGIN,
        "vision_end_token_id": END,
    },
    "mllama": {
        "text_config": {**_TEXT, "num_hidden_layers": 3, "cross_attention_layers": [1]},
        "vision_config": {
            **_VISION,
            "num_global_layers": 1,
            "attention_heads": 2,
            "max_num_tiles": 1,
            "intermediate_layers_indices": [0],
            "vision_output_dim": 64,
            "supported_aspect_ratios": [[1, 1]],
        },
        "image_token_index": PICTURE,
    },
}


@functools.cache
def model_of(name: str) -> Any:
    torch.manual_seed(1234)
    config = AutoConfig.for_model(name, **_CONFIGS[name])
    model = models.randomized(AutoModelForImageTextToText.from_config(config)).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = models.PAD
    return model


def prompt_of(name: str) -> dict[str, Tensor]:
    """Text and one picture for each of three sequences."""
    generator = torch.Generator().manual_seed(3)

    def pixels(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    text = left_padded(tokens=6, pads=(3, 0, 2))
    text["input_ids"].clamp_(max=PICTURE - 1)
    picture = torch.full((3, 1 if name == "mllama" else 4), PICTURE)
    if name == "qwen2_vl":
        picture = torch.cat([torch.full((3, 1), BEGIN), picture, torch.full((3, 1), END)], 1)
    inputs = {
        key: torch.cat([text[key][:, :4], middle, text[key][:, 4:]], 1)
        for key, middle in (("input_ids", picture), ("attention_mask", torch.ones_like(picture)))
    }
    is_picture = (inputs["input_ids"] == PICTURE).long()
    if name == "mllama":
        inputs["pixel_values"] = pixels(3, 1, 1, 3, SIZE, SIZE)
        inputs["aspect_ratio_ids"] = torch.ones(3, 1, dtype=torch.long)
        inputs["aspect_ratio_mask"] = torch.ones(3, 1, 1, dtype=torch.long)
        inputs["cross_attention_mask"] = (is_picture.cumsum(1) > 0).long()[:, :, None, None]
    elif name == "qwen2_vl":
        inputs["pixel_values"] = pixels(3 * 16, 3 * 2 * 4 * 4)
        inputs["image_grid_thw"] = torch.tensor([[1, 4, 4]] * 3)
        inputs["mm_token_type_ids"] = is_picture
    else:
        inputs["pixel_values"] = pixels(3, 3, SIZE, SIZE)
        if name == "gemma3":
            inputs["token_type_ids"] = is_picture
    return inputs


FEATURES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": {"num_beams": 2, "num_return_sequences": 2},
    "samples": {"do_sample": True, "num_return_sequences": 2},
}


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("name", _CONFIGS)
def test_none_gives_the_very_logits_of_an_unpatched_model(name: str, feature: str) -> None:
    model, inputs = model_of(name), prompt_of(name)
    torch.manual_seed(5)
    expected = greedy(model, inputs, **FEATURES[feature])
    torch.manual_seed(5)
    with patched(model, "none"):
        output = greedy(model, inputs, **FEATURES[feature])
    assert isinstance(cache_of(output), KVQuantCache)
    compare.assert_same(output.sequences, expected.sequences, "tokens")
    compare.assert_same(logits(output), logits(expected), "logits")


@pytest.mark.parametrize("preset", ["int8", "int4-channel"])
@pytest.mark.parametrize("name", _CONFIGS)
def test_presets_attend_to_what_the_reference_decodes(name: str, preset: str) -> None:
    _, cache = models.check_against_reference(model_of(name), preset, prompt_of(name))
    assert not any(storage.tally.fallbacks for storage in cache.storages)


@pytest.mark.parametrize("way", ["at once", "behind another text", "loaded", "selected", "reordered", "cropped"])
def test_a_next_turn_has_the_positions_of_its_own_picture(way: str, tmp_path: Path) -> None:
    """Qwen2-VL keeps what a picture does to positions in the model, where the next text replaces it."""
    model, inputs = model_of("qwen2_vl"), prompt_of("qwen2_vl")
    more = torch.tensor([[7, 8, 9]]).expand(3, -1)
    with patched(model, "int8"):
        cache = KVQuantCache(model.config, "int8")
        first = greedy(model, inputs, **with_cache(cache))
        turn = {"input_ids": torch.cat([first.sequences, more], 1)}
        mask = torch.ones(3, turn["input_ids"].shape[1] - inputs["input_ids"].shape[1], dtype=torch.long)
        turn["attention_mask"] = torch.cat([inputs["attention_mask"], mask], 1)
        expected = greedy(model, turn, **with_cache(copy.deepcopy(cache))).sequences
        offset = model.model.rope_deltas.clone()
        assert (offset != 0).all()
        if way == "loaded":
            cache.save(tmp_path / "turn.safetensors", model)
            model.model.rope_deltas = None
            cache = KVQuantCache.load(tmp_path / "turn.safetensors", model)
        elif way != "at once":
            greedy(model, {"input_ids": torch.tensor([[3, 4, 5]])})
        if way == "cropped":
            cache.crop(-3)
        elif way in ("selected", "reordered"):
            rows = torch.tensor([2, 0] if way == "selected" else [2, 0, 1])
            getattr(cache, "batch_select_indices" if way == "selected" else "reorder_cache")(rows)
            turn, expected, offset = {name: x[rows] for name, x in turn.items()}, expected[rows], offset[rows]
        actual = greedy(model, turn, **with_cache(cache)).sequences
    compare.assert_same(actual, expected, "tokens")
    compare.assert_same(model.model.rope_deltas, offset, "offsets")


def test_offsets_are_those_of_what_a_cache_still_holds() -> None:
    first, second = {"model": torch.tensor([[-3]])}, {"model": torch.tensor([[-7]])}
    offsets = TextOffsets()
    offsets.add(10, first)
    offsets.add(20, second)
    assert offsets.at(25) == {}, "others have added tokens"
    assert offsets.at(20) is second and offsets.at(12) is first and offsets.num_tokens == 12
    assert offsets.at(7) is first, "a crop within the first turn, behind its picture or not"
    assert TextOffsets.of_facts(offsets.facts()).at(7) == first
    assert offsets.at(0) == {} and offsets.num_tokens == 0, "the next text may be as long"


def test_more_pictures_over_a_cache_come_with_their_positions() -> None:
    """Refused without them, and then nothing has changed. Who reads them in a forward sets the offset himself."""
    model, inputs = model_of("qwen2_vl"), prompt_of("qwen2_vl")
    with patched(model, "none"):
        cache = KVQuantCache(model.config, "none")
        first = greedy(model, inputs, **with_cache(cache)).sequences
        more = torch.cat([first, inputs["input_ids"][:, 4:10]], 1)
        mask = torch.cat([inputs["attention_mask"], torch.ones(3, more.shape[1] - 12, dtype=torch.long)], 1)
        pictures = {"pixel_values": inputs["pixel_values"], "image_grid_thw": inputs["image_grid_thw"]}
        with pytest.raises(NotImplementedError, match=r"^generate: `pixel_values` must be None over a cache with"):
            greedy(model, {"input_ids": more, "attention_mask": mask, **pictures}, **with_cache(cache))
        held = cache.get_seq_length()
        assert held == first.shape[1] - 1

        twice = inputs["image_grid_thw"].repeat_interleave(2, 0)
        types = (more == PICTURE).long()
        positions, offset = model.model.get_rope_index(
            more, image_grid_thw=twice, attention_mask=mask, mm_token_type_ids=types
        )
        model.model.rope_deltas = offset
        added = {"attention_mask": mask, "position_ids": positions[..., held:], **pictures}
        with torch.no_grad():
            model(more[:, held:], **added, **with_cache(cache))
        turn = {"input_ids": torch.cat([more, first[:, :3]], 1), "attention_mask": torch.cat([mask, mask[:, -3:]], 1)}
        actual = greedy(model, turn, **with_cache(cache))
    compare.assert_same(model.model.rope_deltas, offset, "offsets")
    pixels = inputs["pixel_values"].view(3, 16, -1).repeat_interleave(2, 0).flatten(0, 1)
    whole = {
        "pixel_values": pixels,
        "image_grid_thw": twice,
        "mm_token_type_ids": (turn["input_ids"] == PICTURE).long(),
    }
    expected = greedy(model, {**turn, **whole})
    compare.assert_close(logits(actual), logits(expected), 1e-3, "logits")


@pytest.mark.parametrize("name", [name for name in _CONFIGS if name != "mllama"])
def test_static_caches(name: str) -> None:
    model, inputs = model_of(name), prompt_of(name)
    outputs = []
    for options in ({}, {"static": True}):
        with patched(model, {"preset": "int4-token", "layers": {1: "none"}, **options}):
            outputs.append(greedy(model, inputs, disable_compile=True))
    compare.assert_same(outputs[1].sequences, outputs[0].sequences, "tokens")
    compare.assert_close(logits(outputs[1]), logits(outputs[0]), 1e-3, "logits")


@pytest.mark.parametrize("name", [name for name in _CONFIGS if name != "mllama"])
def test_masks_of_pictures_are_dense_in_static_caches(name: str) -> None:
    """transformers makes them for every step there, of growing caches for the prompt alone."""
    model, inputs = model_of(name), prompt_of(name)
    with patched(model, {"preset": "int8", "static": True}):
        cache = cache_of(greedy(model, inputs, disable_compile=True))
    full = cache.storages[-1]
    assert bool(full.tally.fallbacks) == (name == "gemma3")


@pytest.mark.parametrize("has_picture", [False, True])
def test_single_steps_of_a_model_that_always_asks_for_the_mask_of_pictures(has_picture: bool) -> None:
    """Gemma 4 does in every step, also without a picture. A single query sees all before it in any case."""
    if "gemma4_unified" not in CONFIG_MAPPING:
        pytest.skip("this release of transformers has no gemma4_unified")
    torch.manual_seed(1234)
    text = {**models.COMMON, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}
    text |= {"num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0, "per_layer_config": {}}
    text |= {"global_head_dim": HEAD_DIM, "num_global_key_value_heads": 2, "use_bidirectional_attention": "vision"}
    config = AutoConfig.for_model("gemma4_unified", text_config=text, tie_word_embeddings=False)
    model = models.randomized(AutoModelForImageTextToText.from_config(config)).eval()
    model.generation_config.update(eos_token_id=None, pad_token_id=models.PAD)
    inputs = left_padded(tokens=9, pads=(3, 0, 2))
    inputs["mm_token_type_ids"] = torch.zeros_like(inputs["input_ids"])
    inputs["mm_token_type_ids"][:, 4:7] = int(has_picture)
    _, cache = models.check_against_reference(model, "int8", inputs)
    assert not any(storage.tally.fallbacks for storage in cache.storages)
    with patched(model, "int8"), torch.no_grad():
        more = {name: inputs[name][:, 3:8] for name in ("input_ids", "mm_token_type_ids")}
        model(**more, **with_cache(cache))
    assert cache.storages[1].tally.fallbacks, "of several queries, the first ones may see tokens behind them"


def test_cross_attention_among_the_layers_stays_with_transformers() -> None:
    """Padding of the text is none of the pictures, whose keys are read as they are at every step."""
    model, inputs = model_of("mllama"), prompt_of("mllama")
    with patched(model, "int4-token"):
        cache = cache_of(greedy(model, inputs))
        assert [layer.layer_type for layer in report(model).layers if layer.formats is None] == ["cross_attention"]
    assert [type(layer) for layer in cache.layers] == [KVQuantLayer, DynamicLayer, KVQuantLayer]
    assert cache.layers[1].keys.shape[2] == 5  # patches of a picture, and one for all of it


@pytest.mark.parametrize("config", [{"static": True}, {"max_cache_len": 64}], ids=["static", "max_cache_len"])
def test_static_caches_are_refused_for_cross_attention_among_the_layers(config: dict[str, Any]) -> None:
    model = model_of("mllama")
    message = re.escape("`static` must be False for mllama_text_model, got True: some of its layers")
    with pytest.raises(NotImplementedError, match=message):
        patch(model, config)
    with pytest.raises(NotImplementedError, match=message):
        KVQuantCache(model.config, "int8", max_cache_len=64)
