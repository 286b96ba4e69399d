"""Fixtures that tests share: seeds, unpatched models, devices, engines of ops, a server. `conftest.py` loads them.

They are apart because they import torch and transformers, for which the process that hands out tests need not wait.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import TYPE_CHECKING

import models
import pytest
import torch
from cases import engines
from transformers.utils import logging

from hf_kvquant import ops, unpatch
from hf_kvquant.state import patch_of

if TYPE_CHECKING:
    import openai
    from servers import Running

# The tensors of the tests are small: a second thread costs more than it saves, up to five times the run time on a busy
# machine. Tests of threads ask for more.
torch.set_num_threads(1)
# Tests that read stderr look for our output, without the progress bars of the models that they save.
logging.disable_progress_bar()


@pytest.fixture(scope="module", autouse=True)
def old_objects() -> None:
    """Garbage collection need not look at what earlier files leave behind, such as compiled code: transformers collects
    all garbage at the end of each manager, which took 0.1 to 0.4 s each time, and 8 % of the time of all tests."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def seed() -> None:
    """Every test draws the same numbers, whichever tests run before it."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def unpatched() -> Iterator[None]:
    """No test leaves a shared model patched: else which test fails would depend on their order."""
    yield
    left = [model for model in models.SHARED if patch_of(model) is not None]
    for model in left:
        unpatch(model)
    assert not left, f"the test must unpatch {type(left[0]).__name__}, which other tests use"


@pytest.fixture(params=["cpu", *(["cuda"] if torch.cuda.is_available() else [])])
def device(request: pytest.FixtureRequest) -> str:
    """`"cpu"` always, `"cuda"` if there is a GPU."""
    return str(request.param)


@pytest.fixture(params=engines())
def engine(request: pytest.FixtureRequest) -> Iterator[str]:
    """The device for tensors, once for each implementation of the ops on it."""
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


@pytest.fixture(scope="module")
def running(folder: str) -> Iterator[Running]:
    """A server of the module's `folder`, by the name `servers.NAME`.

    Without codes, of which the order of sums would change one now and then, and with it an answer.
    """
    from servers import NAME, serving  # needs what comes with an extra

    with serving(folder, "none", num_blocks=32, served_name=NAME) as running:
        yield running


@pytest.fixture(scope="module")
def client(running: Running) -> Iterator[openai.OpenAI]:
    """OpenAI's own client of that server."""
    with running.openai() as client:
        yield client
