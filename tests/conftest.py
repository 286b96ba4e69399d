"""The two tiers of the tests, and their order. `shared.py` has what they share.

`pytest` runs the quick tier: every test function, but not all of its cases. `pytest --all` runs every case. A case is
left to `--all` for one of three reasons, each decided in one place:

- It repeats a case of the best instruction set on a slower one: a sixth of these stay quick (`SHARE` below).
- Its test has a mark next to the parameters: `@pytest.mark.full(when=..., reason=...)`.
- It is drawn by hypothesis: the quick tier draws half of the examples (`times` in `cases.py`).

A test that is named on the command line runs in full: `pytest tests/test_ops.py::test_opcheck`.
"""

from __future__ import annotations

import gc
import importlib
import inspect
import os
import zlib
from collections import defaultdict

import pytest
from hypothesis import HealthCheck, settings

os.environ["OMP_NUM_THREADS"] = "1"  # also for programs that tests start; see shared.py

# On every instruction set but the best one, one case in this many is in the quick tier. Instruction sets differ only in
# how they load, round and store, which every case covers; all else is written once, on top of `simd.h`.
SHARE = 6

# Files that start several programs, or a cluster. pytest-xdist gives each process a share of the files and later moves
# single tests from one process to another, which then makes the fixtures of the file again: costly here, and not at the
# beginning. They are together, since the first program of a process takes the longest.
FIRST = {
    f"test_{name}.py"
    for name in ("ray_examples", "examples", "serve_ranks", "serve_shutdown", "batch_command", "parallel")
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="every case of every test; see tests/conftest.py")


def pytest_configure(config: pytest.Config) -> None:
    # Examples are the same on every machine and in every run, and are not kept in a file.
    checks = {"suppress_health_check": list(HealthCheck)}
    for tier, count in (("all", 100), ("quick", 50)):
        settings.register_profile(tier, derandomize=True, deadline=None, database=None, max_examples=count, **checks)
    settings.load_profile("all" if _is_all(config) else "quick")
    is_controller = config.getoption("dist", "no") != "no" and "PYTEST_XDIST_WORKER" not in os.environ
    if not is_controller:  # else all processes would wait ten seconds more for their first test
        config.pluginmanager.register(importlib.import_module("shared"))


def _is_all(config: pytest.Config) -> bool:
    return bool(config.getoption("--all")) or any("::" in name for name in config.args)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Programs first, and leave out the cases that are only for `--all`."""
    items.sort(key=lambda item: item.path.name not in FIRST)
    if _is_all(config):
        return
    from cases import engines

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
