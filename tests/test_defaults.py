"""Programs that set torch's default dtype or device to the one they load models in. Ours must not compute in it.

`meta` stands for a device that the model is not on: nothing can be read from it, and it is on every machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import compare
import models
import pytest
import test_smoothing
import torch
from models import greedy, left_padded, logits
from torch import Tensor

from hf_kvquant import key_transforms, patched, rotate_values, run_preflight

DTYPES = [torch.bfloat16, torch.float16, torch.float64]


@pytest.fixture
def default() -> Iterator[Callable[[torch.dtype], None]]:
    """Sets the default dtype until the test ends."""
    yield torch.set_default_dtype
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", [*models.VARIED, "deepseek_v3"])
def test_patched_models(family: str, dtype: torch.dtype, default: Callable[[torch.dtype], None]) -> None:
    found: list[Tensor] = []
    for each in (torch.float32, dtype):
        model, inputs = (
            models.build(models.FAMILIES[family].model_type, **models.FAMILIES[family].options),
            left_padded(),
        )
        default(each)
        with patched(model, "int4"):
            found.append(logits(greedy(model, inputs)))
        default(torch.float32)
    compare.assert_same(found[1], found[0], "logits")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_calibration(family: str, dtype: torch.dtype, default: Callable[[torch.dtype], None]) -> None:
    found: list[dict[str, Any]] = []
    for each in (torch.float32, dtype):
        model = test_smoothing.with_outliers(family)
        default(each)
        test_smoothing.smooth(model)
        rotate_values(model)
        default(torch.float32)
        found.append(model.state_dict())
    for name, weight in found[0].items():
        compare.assert_same(found[1][name], weight, name)


def test_preflight(default: Callable[[torch.dtype], None]) -> None:
    model = models.llama()
    expected = run_preflight(model)
    default(torch.bfloat16)
    assert str(run_preflight(model)) == str(expected)


@pytest.mark.parametrize("family", [*models.VARIED, "gpt2", "deepseek_v3"])
def test_patched_models_elsewhere(family: str) -> None:
    found: list[Tensor] = []
    for device in ("cpu", "meta"):
        model = models.build(models.FAMILIES[family].model_type, **models.FAMILIES[family].options)
        with torch.device(device):
            with patched(model, "int4"):
                key_transforms(model, "int4")  # kept for the calls below
        with patched(model, "int4"):
            found.append(logits(greedy(model, left_padded())))
    compare.assert_same(found[1], found[0], "logits")


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_calibration_elsewhere(family: str) -> None:
    found: list[dict[str, Any]] = []
    for device in ("cpu", "meta"):
        model = test_smoothing.with_outliers(family)
        with torch.device(device):
            test_smoothing.smooth(model)
            rotate_values(model)
        found.append(model.state_dict())
    for name, weight in found[0].items():
        compare.assert_same(found[1][name], weight, name)


def test_preflight_elsewhere() -> None:
    model = models.llama()
    expected = run_preflight(model)
    with torch.device("meta"):
        assert str(run_preflight(model)) == str(expected)
