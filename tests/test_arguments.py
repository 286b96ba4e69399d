"""What names of configs mean, and that a model that cannot be loaded is told in a line."""

from __future__ import annotations

import argparse
from typing import Any

import models
import pytest
import torch

from hf_kvquant import KVQuantConfig
from hf_kvquant.cli import arguments, loading
from hf_kvquant.cli.arguments import UNTRANSFORMED, checked_configs, config_of
from hf_kvquant.common.errors import UsageError
from hf_kvquant.spec.formats import KVFormat

NAIVE = KVFormat("int4", symmetric=False, clip_ratio=1.0)


@pytest.mark.parametrize(
    "name, preset, options",
    [
        ("int4", "int4", {}),
        ("int4:4+128", "int4", {"sink_length": 4, "residual_length": 128}),
        ("int4-token-untransformed", "int4-token", {"transforms": [], "key": NAIVE, "value": NAIVE}),
        ("int8-untransformed:0+9", "int8", {"transforms": [], "sink_length": 0, "residual_length": 9}),
        ("none:0+0", "none", {}),
    ],
)
def test_names(name: str, preset: str, options: dict[str, Any]) -> None:
    assert config_of(name) == KVQuantConfig.from_preset(preset, **options)


@pytest.mark.parametrize(
    "name, message",
    [
        ("int9", "`--preset` must be one of none, int8, .*, got 'int9'. Did you mean 'int8'"),
        ("int4-untransfromed", "got 'int4-untransfromed'. Did you mean 'int4-untransformed'"),
        ("int4:4-3", "`--preset` must give windows as FIRST.NEWEST tokens, got '4-3'. Write for example int4:4.128."),
        ("none:4+3", "`--preset none:4.3` is invalid. .*`sink_length` must be 0 where neither"),
        (UNTRANSFORMED, "got '-untransformed'"),
    ],
)
def test_names_that_mean_nothing(name: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        config_of(name)


def test_windows_are_those_of_the_name_or_else_of_the_options() -> None:
    parser = argparse.ArgumentParser()
    arguments.add_presets(parser, ("none", "int4"))
    words = ["--preset", "none", "--preset", "int4", "--preset", "int4:1+2", "--preset", "int4", "--sink-length", "3"]
    configs = checked_configs(parser.parse_args(words))
    assert {name: (config.sink_length, config.residual_length) for name, config in configs.items()} == {
        "none": (0, 0),
        "int4": (3, 28),
        "int4:1+2": (1, 2),
    }
    assert list(checked_configs(parser.parse_args([]))) == ["none", "int4"]
    with pytest.raises(UsageError, match="`--residual-length` must be at least 0, got -1"):
        checked_configs(parser.parse_args(["--residual-length", "-1"]))


def test_a_model_that_does_not_fit_into_memory(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    models.tokenizer().save_pretrained(tmp_path)
    models.build("llama").save_pretrained(tmp_path)

    def from_pretrained(*args: Any, **kwargs: Any) -> Any:
        torch.empty(1 << 60, dtype=torch.int8)  # as PyTorch itself says it

    monkeypatch.setattr(loading.AutoModelForCausalLM, "from_pretrained", from_pretrained)
    with pytest.raises(UsageError, match=r"`MODEL` must fit into the memory of cpu, got .* Use --dtype bfloat16"):
        loading.load(str(tmp_path), "float32", torch.device("cpu"))
