"""What the config of a text model says, wherever a model keeps it."""

from __future__ import annotations

from typing import Any

import models
import pytest
import torch
from transformers import PreTrainedConfig, SwinConfig

from hf_kvquant import KVQuantCache
from hf_kvquant.models.text_config import context_of, head_dim_of, positions_of, text_config_of


@pytest.mark.parametrize("given, expected", [(128, 128), (1, 1), (0, None), (-1, None), (None, None), ("long", None)])
def test_the_context_is_a_number_of_positions_or_unknown(
    given: Any, expected: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = models.llama()
    assert text_config_of(model) is model.config
    monkeypatch.setitem(model.config.__dict__, "max_position_embeddings", given)
    assert context_of(model) == expected
    assert positions_of(model, 1000) == (expected or 1000) and positions_of(model, 1) == 1


def test_models_that_name_their_positions_in_another_way() -> None:
    model = models.family("gpt2")
    assert "max_position_embeddings" not in model.config.to_dict() and context_of(model) == 128


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"hidden_size": 64, "num_attention_heads": 4}, 16),
        ({"hidden_size": 64, "num_attention_heads": 4, "head_dim": 32}, 32),
        ({"hidden_size": 64, "num_attention_heads": 4, "head_dim": None}, 16),
        ({"hidden_size": 64, "num_attention_heads": 4, "head_dim": [8, 16]}, None),
        ({"hidden_size": 64, "num_attention_heads": [4, 8]}, None),
        ({"hidden_size": [64, 128], "num_attention_heads": 4}, None),
        ({"hidden_size": 64, "num_attention_heads": 0}, None),
        ({"hidden_size": 64}, None),
        ({"num_attention_heads": 4}, None),
        ({}, None),
    ],
    ids=str,
)
def test_head_dim_is_a_number_or_unknown(given: dict[str, Any], expected: int | None) -> None:
    assert head_dim_of(PreTrainedConfig(**given)) == expected


def test_tensors_decide_where_the_heads_of_a_config_are_a_list() -> None:
    """As in Swin, whose stages differ. A `head_dim` without kernels is refused when it is seen."""
    cache = KVQuantCache(SwinConfig(), "int8")
    key = torch.randn(1, 3, 2, 32)
    cache.update(key, key, 0)
    assert cache.storages[0].shape[2] == 32
    with pytest.raises(ValueError, match=r"`head_dim` must be a positive multiple of 8, got 42\."):
        cache.update(key.new_zeros(1, 3, 2, 42), key.new_zeros(1, 3, 2, 42), 1)
