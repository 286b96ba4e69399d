"""Fixtures that all tests share: a seed before every test and models unpatched behind it, devices, engines of ops."""

from __future__ import annotations

from collections.abc import Iterator

import models
import pytest
import torch
from cases import engines

from hf_kvquant import ops, unpatch
from hf_kvquant.patching import state_of

# The tensors of the tests are small: a second thread costs more than it computes, five times the run time on a busy
# machine. Where threads are what is tested, the test asks for them.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def seed() -> None:
    """Every test draws the same numbers, whichever tests run before it."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def unpatched() -> Iterator[None]:
    """No test leaves a model that others use patched: which of them then fails depends on the order."""
    yield
    left = [model for model in models.SHARED if state_of(model) is not None]
    for model in left:
        unpatch(model)
    assert not left, f"the test must unpatch {type(left[0]).__name__}, which other tests use"


@pytest.fixture(params=["cpu", *(["cuda"] if torch.cuda.is_available() else [])])
def device(request: pytest.FixtureRequest) -> str:
    """`"cpu"` always, `"cuda"` where there is a GPU."""
    return str(request.param)


@pytest.fixture(params=engines())
def engine(request: pytest.FixtureRequest) -> Iterator[str]:
    """The device to put tensors on, once for each implementation of the ops on it."""
    device, _, capability = str(request.param).partition("-")
    module = ops.extension()
    # Without this, every test below would compare the reference with itself.
    assert not isinstance(module, ImportError) and ops.has_kernels(device), f"no kernels for {device}: {module}"
    if capability:
        assert module.set_cpu_capability(capability)
        yield device
        module.set_cpu_capability(None)
    else:
        yield device
