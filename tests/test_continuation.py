"""What `hf-kvquant generate` says of presets on a text: the same as the evaluations, which it does without."""

from __future__ import annotations

import logging

import models
import pytest
import torch

from hf_kvquant import KVQuantConfig
from hf_kvquant.cli.continuation import compare
from hf_kvquant_evals.measuring import fidelity

PRESETS = {name: KVQuantConfig.from_preset(name) for name in ("none", "int8", "int4", "int4-token", "k4v2")}


@pytest.mark.parametrize("family", ["llama", "gemma2", "jetmoe"])
@pytest.mark.parametrize("prompt", [1, 20])
def test_it_is_what_the_evaluations_measure(family: str, prompt: int, caplog: pytest.LogCaptureFixture) -> None:
    """To the bit, and a layer that is not served is one whose pairs were not all read from codes."""
    caplog.set_level(logging.ERROR)
    model = models.build(family)
    text = torch.randint(3, models.VOCAB_SIZE, (1, 41))
    found = compare(model, text, prompt, PRESETS)
    (measured,) = fidelity.compare(model, text, PRESETS, first_chunk=prompt)
    assert found.keys() == measured.keys()
    for name, each in measured.items():
        assert found[name].kld.equal(each.kld) and found[name].agrees.equal(each.agrees), name
        assert found[name].is_served == (each.pairs_read == each.pairs_expected), name
    assert found["int8"].is_served == models.FAMILIES[family].is_served
