"""Attention modules of the user's that take their masks from transformers and compute attention by themselves.

Such a module gets handles to codes, which become tensors when it looks at them, and adds the mask to the scores.
"""

from __future__ import annotations

from typing import Any

import compare
import models
import pytest
import tolerances
import torch
from models import ReferenceCache, greedy, left_padded, logits
from torch import Tensor, nn
from transformers.models.gemma2.modeling_gemma2 import Gemma2Attention
from transformers.models.llama.modeling_llama import LlamaAttention, apply_rotary_pos_emb

from hf_kvquant import KVQuantCache, patched
from hf_kvquant.upstream.releases import CACHE, cache_of, with_cache


class OwnAttention(nn.Module):
    """Attention of Llama as research code writes it."""

    def __init__(self, inner: LlamaAttention | Gemma2Attention) -> None:
        super().__init__()
        self.inner = inner

    def forward(
        self, hidden_states: Tensor, position_embeddings: Any, attention_mask: Tensor | None, **kwargs: Any
    ) -> Any:
        inner, (batch, q_len, _) = self.inner, hidden_states.shape
        query, key, value = (
            project(hidden_states).view(batch, q_len, -1, inner.head_dim).transpose(1, 2)
            for project in (inner.q_proj, inner.k_proj, inner.v_proj)
        )
        query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
        if kwargs.get(CACHE) is not None:
            key, value = kwargs[CACHE].update(key, value, inner.layer_idx)
        key, value = (x.repeat_interleave(inner.num_key_value_groups, 1) for x in (key, value))
        scores = query @ key.transpose(2, 3) * inner.scaling
        if attention_mask is not None:
            scores = scores + attention_mask
        return inner.o_proj((scores.softmax(-1) @ value).transpose(1, 2).reshape(batch, q_len, -1)), None


def replaced(family: str, layers: list[int]) -> Any:
    model = models.build(family, attention="eager", **models.FAMILIES[family].options)
    for index in layers:
        layer = model.model.layers[index]
        layer.self_attn = OwnAttention(layer.self_attn)
    return model


@pytest.mark.parametrize("options", [{}, {"prefill_chunk_size": 4}], ids=["whole", "chunks"])
@pytest.mark.parametrize("layers", [[0, 1], [0], [1]], ids=str)
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_masks_are_those_of_an_unpatched_model(family: str, layers: list[int], options: dict[str, Any]) -> None:
    model, inputs = replaced(family, layers), left_padded()
    expected = greedy(model, inputs, **options)
    with patched(model, "none"):
        output = greedy(model, inputs, **options)
    bound = tolerances.model_bound(logits(expected), logits(expected), torch.float32)
    compare.assert_close(logits(output), logits(expected), bound, "logits")
    assert isinstance(cache_of(output), KVQuantCache)


@pytest.mark.parametrize("static", [False, True])
def test_codes_are_read_through_these_masks(static: bool) -> None:
    model, inputs = replaced("llama", [0, 1]), left_padded()
    config = {"preset": "int4-token", "layers": {1: "none"}}
    reference = ReferenceCache(model.config, config, mask=inputs["attention_mask"])
    expected = greedy(model, inputs, **with_cache(reference))
    with patched(model, {**config, "static": static}):
        output = greedy(model, inputs)
        again = greedy(model, inputs)
    bound = tolerances.model_bound(logits(expected), logits(expected), torch.float32)
    compare.assert_close(logits(output), logits(expected), bound, "logits")
    compare.assert_same(logits(again), logits(output), "logits")


def test_a_cache_that_is_filled_by_hand_is_read_by_the_kernel() -> None:
    """Its tokens come to no attention function."""
    model, inputs = models.llama(), left_padded()
    with torch.no_grad(), patched(model, "int8"):
        first = models.greedy(model, inputs, 4)
        dense, cache = cache_of(first).layers, KVQuantCache(model.config, "int8")
        for index, layer in enumerate(dense):
            cache.update(layer.keys, layer.values, index)
        mask = torch.cat([inputs["attention_mask"], torch.ones(3, 4, dtype=torch.long)], 1)
        model(input_ids=first.sequences[:, -1:], attention_mask=mask, **with_cache(cache))
    assert not any(storage.tally.fallbacks for storage in cache.storages)
