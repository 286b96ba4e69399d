"""The two tiers of the tests, and fixtures that all tests share: seeds, unpatched models, devices, engines of ops.

`pytest` runs the quick tier: every test function, but not all of its cases. `pytest --all` runs every case. A case is
left to `--all` for one of three reasons, each decided in one place:

- It repeats a case of the best instruction set on a slower one: a sixth of these stay quick (`SHARE` below).
- Its test has a mark next to the parameters: `@pytest.mark.full(when=..., reason=...)`.
- It is drawn by hypothesis: the quick tier draws half of the examples (`times` in `cases.py`).

A test that is named on the command line runs in full: `pytest tests/test_ops.py::test_opcheck`.
"""

from __future__ import annotations

import gc
import inspect
import os
import zlib
from collections import defaultdict
from collections.abc import Iterator

import models
import pytest
import torch
from cases import engines
from hypothesis import HealthCheck, settings
from transformers.utils import logging

from hf_kvquant import ops, unpatch
from hf_kvquant.state import patch_of

# The tensors of the tests are small: a second thread costs more than it saves, up to five times the run time on a busy
# machine. Tests of threads ask for more. The variable is for processes that tests start.
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"
# Tests that read stderr look for our output, without the progress bars of the models that they save.
logging.disable_progress_bar()

# On every instruction set but the best one, one case in this many is in the quick tier. Instruction sets differ only in
# how they load, round and store, which every case covers; all else is written once, on top of `simd.h`.
SHARE = 6


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="every case of every test; see tests/conftest.py")


def pytest_configure(config: pytest.Config) -> None:
    # Examples are the same on every machine and in every run, and are not kept in a file.
    checks = {"suppress_health_check": list(HealthCheck)}
    for tier, count in (("all", 100), ("quick", 50)):
        settings.register_profile(tier, derandomize=True, deadline=None, database=None, max_examples=count, **checks)
    settings.load_profile("all" if _is_all(config) else "quick")


def _is_all(config: pytest.Config) -> bool:
    return bool(config.getoption("--all")) or any("::" in name for name in config.args)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the cases that are only for `--all`."""
    if _is_all(config):
        return
    best = [engine for engine in engines() if engine.startswith("cpu")][-1]
    left_out, repeats = set(), defaultdict(list)
    for item in items:
        params = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
        engine = str(params.get("engine", best))
        if engine.startswith("cpu") and engine != best:
            repeats[item.nodeid.partition("[")[0], engine].append(item.nodeid)
        for mark in item.iter_markers("full"):
            when = mark.kwargs["when"]
            if when(**{name: params[name] for name in inspect.signature(when).parameters}):
                left_out.add(item.nodeid)
    for names in repeats.values():
        # Chosen by a hash, which is the same in every run and independent of the order of parameters; at least one of
        # each test.
        names.sort(key=lambda name: zlib.crc32(name.encode()))
        left_out.update(names[-(-len(names) // SHARE) :])
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in left_out])
    items[:] = [item for item in items if item.nodeid not in left_out]


def pytest_collection_finish(session: pytest.Session) -> None:
    # Modules and tests stay for good, so garbage collection need not look at them. Nor need it run several times a
    # second: that takes 5 % of the time. Without any, memory grows, and tests are slower again.
    gc.freeze()
    gc.set_threshold(20_000, 50, 50)


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
