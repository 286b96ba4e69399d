"""That the table of model families on `docs/models.md` is true: each is run as `evals/families.py` does."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from models import FAMILIES
from transformers import CONFIG_MAPPING

ROOT = Path(__file__).resolve().parents[1]
RESULTS = json.loads((ROOT / "evals" / "results" / "families.json").read_text(encoding="utf-8"))
AGAIN = "run: python evals/families.py && python evals/render_readme.py"


@pytest.fixture(scope="module")
def evals() -> Iterator[Any]:
    """Imports a script of `evals/`."""
    with pytest.MonkeyPatch.context() as patches:
        patches.syspath_prepend(str(ROOT / "evals"))
        yield importlib.import_module


def test_every_family_is_in_the_table() -> None:
    assert set(RESULTS["families"]) == set(FAMILIES), AGAIN


@pytest.mark.parametrize("family", FAMILIES)
def test_families_are_served_as_the_table_says(family: str, evals: Any) -> None:
    script: ModuleType = evals("families")
    assert script.how_served(family) == RESULTS["families"][family], AGAIN


@pytest.mark.parametrize("model_type", RESULTS["refused"])
def test_models_are_refused_as_the_table_says(model_type: str, evals: Any) -> None:
    if model_type not in CONFIG_MAPPING:
        pytest.skip(f"this version of transformers does not know {model_type}")
    script: ModuleType = evals("families")
    assert script.how_refused(model_type) == RESULTS["refused"][model_type], AGAIN


def test_model_types_that_run_are_not_refused(evals: Any) -> None:
    """Asked like the others, by their default configs: what would refuse everything is seen here."""
    script: ModuleType = evals("families")
    types = {family.model_type for family in FAMILIES.values()}
    without_attention = ("bamba", "granitemoehybrid")  # by default, all of their layers are linear
    expected = {**dict.fromkeys(types), **dict.fromkeys(without_attention, "states")}
    assert {model_type: script.how_refused(model_type) for model_type in types} == expected


def test_a_config_that_is_none_tells_nothing(evals: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    script: ModuleType = evals("families")
    monkeypatch.setattr(script.AutoConfig, "for_model", lambda model_type: SimpleNamespace())
    assert script.how_refused("llama") == script.UNTOLD
    assert not {*RESULTS["untold"]} & {*RESULTS["refused"], *(family.model_type for family in FAMILIES.values())}


def test_the_file_says_what_was_run() -> None:
    assert RESULTS["command"] == "python evals/families.py" and len(RESULTS["commit"]) == 40
    assert {"is_dirty", "date", "hf_kvquant", "torch", "transformers", "cpu"} <= set(RESULTS)


def test_the_table_has_every_family_once(evals: Any) -> None:
    rendered: str = evals("render_families").families_table(RESULTS)
    for name in (*RESULTS["families"], *RESULTS["refused"]):
        assert rendered.count(f"`{name}`") == 1, name
