"""What the config of a text model says, wherever a model keeps it."""

from __future__ import annotations

from typing import Any

import models
import pytest

from hf_kvquant.text_config import context_of, positions_of, text_config_of


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
