"""Fixtures that all tests share: a seed before every test, the devices, and the engines that can run the ops."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from cases import engines

from hf_kvquant import ops

# The tensors of the tests are small: a second thread costs more than it computes, five times the run time on a busy
# machine. Where threads are what is tested, the test asks for them.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def seed() -> None:
    """Every test draws the same numbers, whichever tests run before it."""
    torch.manual_seed(0)


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
