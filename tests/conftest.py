"""The two tiers of the tests, and fixtures that all tests share: seeds, unpatched models, devices, engines of ops.

`pytest` runs the quick tier: every test function, but not every case of it. `pytest --all` runs every case. A case is
left to `--all` for one of three reasons, and each is decided in one place:

- It repeats on a slower instruction set what runs on the best one: a sixth of such cases stays quick (`SHARE` below).
- Its mark says so: `@pytest.mark.full(when=..., reason=...)` holds beside the parameters that it is about.
- It is drawn by hypothesis: the quick tier draws half of the examples (`times` in `cases.py`).

Whoever names a test gets all of it: `pytest tests/test_ops.py::test_opcheck`.
"""

from __future__ import annotations

import gc
import inspect
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
from hf_kvquant.patching import state_of

# The tensors of the tests are small: a second thread costs more than it computes, five times the run time on a busy
# machine. Where threads are what is tested, the test asks for them.
torch.set_num_threads(1)
# What tests look for on stderr is ours, without the bars of the models that they save themselves.
logging.disable_progress_bar()

# Of the cases on every instruction set but the best one, one in so many is quick. What they have for themselves, how
# they load, round and store, every case goes through; what the cases are about is written once, above `simd.h`.
SHARE = 6


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="every case of every test; see tests/conftest.py")


def pytest_configure(config: pytest.Config) -> None:
    # Examples are the same on every machine and in every run, and no file remembers them.
    checks = {"suppress_health_check": list(HealthCheck)}
    for tier, count in (("all", 100), ("quick", 50)):
        settings.register_profile(tier, derandomize=True, deadline=None, database=None, max_examples=count, **checks)
    settings.load_profile("all" if _is_all(config) else "quick")


def _is_all(config: pytest.Config) -> bool:
    return bool(config.getoption("--all")) or any("::" in name for name in config.args)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is for `--all`."""
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
        # By a hash, which is the same in every run and follows no order of the parameters; one of each test at least.
        names.sort(key=lambda name: zlib.crc32(name.encode()))
        left_out.update(names[-(-len(names) // SHARE) :])
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in left_out])
    items[:] = [item for item in items if item.nodeid not in left_out]


def pytest_collection_finish(session: pytest.Session) -> None:
    # Modules and tests stay for good: a collection of garbage need not look at them, several times a second.
    gc.freeze()


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
