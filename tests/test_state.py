"""What is kept for a model: what copies and pickles carry along, what stays with the object, and when it ends."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import models
import pytest
import torch
from models import greedy, left_padded

from hf_kvquant import patch, patched, unpatch
from hf_kvquant.state import ModelState, keep, notes_on, patch_of, state_of
from hf_kvquant.transforms.of_model import set_centers, set_smoothing, transforms_of

ATTRIBUTE = "_hf_kvquant"
FACTORS = {0: torch.full((2, models.HEAD_DIM), 2.0)}
STATIC = {"preset": "int4-token", "static": True}


def test_a_model_that_nothing_was_done_to_has_no_state() -> None:
    model = models.build("llama")
    greedy(model, left_padded())
    assert state_of(model) == ModelState() and patch_of(model) is None
    notes_on(model)
    assert ATTRIBUTE not in vars(model)


def test_all_that_is_kept_on_a_model_is_one_attribute() -> None:
    model = models.build("llama")
    before = set(vars(model))
    patch(model, STATIC)
    set_smoothing(model, FACTORS)
    set_centers(model, FACTORS)
    keep(model, smoothing="calibrated", value_rotation="rotated")
    assert {name for name in vars(model) if "hf_kvquant" in name} == {ATTRIBUTE}
    # What else is on it are the hooks of transformers that a patch replaces.
    hooks = {"_prepare_cache_for_generation", "generate", "init_continuous_batching", "generate_batch"}
    assert set(vars(model)) - before == {ATTRIBUTE, *hooks}
    unpatch(model)
    assert set(vars(model)) - before == {ATTRIBUTE}
    keep(model, transforms=None, smoothing=None, value_rotation=None)
    assert set(vars(model)) == before


def test_unpatch_leaves_what_calibration_set() -> None:
    model = models.build("llama")
    set_smoothing(model, FACTORS)
    with patched(model, "int8"):
        assert transforms_of(model).smoothing.keys() == FACTORS.keys()
    assert patch_of(model) is None and transforms_of(model).smoothing.keys() == FACTORS.keys()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_have_the_state_and_no_notes(copied: Callable[[Any], Any]) -> None:
    model = models.build("llama")
    patch(model, STATIC)
    set_smoothing(model, FACTORS)
    greedy(model, left_padded())
    notes_on(model).captures.get("a step", object)
    assert list(notes_on(model).pool.kinds())
    twin = copied(model)
    assert patch_of(twin) == patch_of(model) and patch_of(twin) is not patch_of(model)
    assert torch.equal(transforms_of(twin).smoothing[0], FACTORS[0])
    assert not list(notes_on(twin).pool.kinds()) and not len(notes_on(twin).captures)
    unpatch(twin)
    assert patch_of(model) is not None and list(notes_on(model).pool.kinds())


def test_a_shallow_copy_is_patched_for_itself() -> None:
    model = models.build("llama")
    patch(model, "int4-token")
    twin = copy.copy(model)
    keep(twin, patch=None)
    assert patch_of(twin) is None and patch_of(model) is not None


@pytest.mark.parametrize("undo", ["unpatch", "patch again", "leave a block"])
def test_captured_steps_end_with_the_buffers_that_they_use(undo: str) -> None:
    model = models.build("llama")
    patch(model, STATIC)
    with patched(model, STATIC) if undo == "leave a block" else patched(models.llama(), "int8"):
        notes_on(model).captures.get("a step", object)
        if undo == "unpatch":
            unpatch(model)
        elif undo == "patch again":
            patch(model, STATIC)
    assert len(notes_on(model).captures) == 0


def test_notes_end_with_the_model() -> None:
    model = models.build("llama")
    watched = weakref.ref(notes_on(model))
    del model
    gc.collect()
    assert watched() is None
