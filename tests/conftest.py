"""Fixtures that several test files share."""

from __future__ import annotations

import gc
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from spec.policies import admission_policy, eviction_policy
from tests.support import packages
from tests.support.compatibility import Cells
from tests.support.plugin_packages import Install, write_package
from tests.support.servers import RedisServer, binaries
from tiers.concurrency.repeated_log import RepeatedLog

# Each worker, and each process that a test starts, would else compile all of ours anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
packages.read_once()

# Tests make folders and files, which tiers refuse where others may write to them.
os.umask(0o022)

pytest.register_assert_rewrite("tiers.testing")  # so that a failure shows what was compared

# A busy machine is slow, which says nothing of the code.
settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("any machine")


COMPATIBILITY = "--compatibility"
CHILD = Path(__file__).parent / "engine" / "vllm" / "vllm_child.py"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        COMPATIBILITY,
        metavar="FILE",
        help="run the tests that show what works with this vLLM, and write that to FILE",
    )


LONG = 600
"""Seconds: what may take as long does take long on any machine."""


def is_long(item: pytest.Item) -> bool:
    limit = item.get_closest_marker("timeout")
    return bool(item.get_closest_marker("long") or (limit and limit.args[0] >= LONG))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # A worker takes a file at a time. A long file that is taken last keeps one worker busy alone.
    long = {item.path for item in items if is_long(item)}
    items.sort(key=lambda item: (item.path not in long, item.get_closest_marker("vllm") is None))
    if config.getoption(COMPATIBILITY):
        others = [one for one in items if "cells" not in getattr(one, "fixturenames", ())]
        items[:] = [one for one in items if one not in others]
        config.hook.pytest_deselected(items=others)


MANY = 500
"""Modules: vLLM has more, of hundreds of thousands of objects."""
_frozen = 0


def freeze() -> None:
    """What all tests have is no garbage: some, and the code they test, look for that many times."""
    global _frozen
    gc.collect()
    gc.freeze()
    _frozen = len(sys.modules)


def pytest_collection_finish() -> None:
    freeze()


@pytest.fixture(autouse=True, scope="module")
def frozen_imports() -> Iterator[None]:
    """What the tests of a file have imported, all after it have, too."""
    yield
    if len(sys.modules) > _frozen + MANY:
        freeze()


@pytest.fixture(autouse=True)
def own_loggers() -> None:
    """Log as in a process of its own: a test before may have loaded vLLM's plugins, which make our
    loggers children of vLLM's, at its level."""
    for log in map(logging.getLogger, ("tiers", "spec")):
        log.parent = logging.getLogger()
        if log.level:
            log.setLevel(logging.NOTSET)


@pytest.fixture(autouse=True)
def no_late_lines() -> Iterator[None]:
    """What a test repeats is not summed up in the log of another one, a minute later."""
    yield
    for thread in threading.enumerate():
        if isinstance(thread, threading.Timer):
            owner = getattr(thread.function, "__self__", None)
            if isinstance(owner, RepeatedLog):
                thread.cancel()


@pytest.fixture(autouse=True)
def own_policies() -> None:
    """Find policies anew: a test before may have installed others of these names."""
    eviction_policy.cache_clear()
    admission_policy.cache_clear()


@pytest.fixture
def cells(request: pytest.FixtureRequest) -> Cells:
    """Takes what a test shows of docs/compatibility.md, for the file that the option names."""
    path = request.config.getoption(COMPATIBILITY)
    return Cells(Path(path) if path else None)


@pytest.fixture(scope="session", params=sorted(binaries()))
def shared_server(request: pytest.FixtureRequest) -> Iterator[RedisServer]:
    """A server that stays up for all tests; use keys of your own and leave it as it is."""
    with RedisServer(binaries()[request.param]) as server:
        yield server


@pytest.fixture(params=sorted(binaries()))
def server(request: pytest.FixtureRequest) -> Iterator[RedisServer]:
    """A server of the test's own, to be killed, hung or filled."""
    with RedisServer(binaries()[request.param]) as server:
        yield server


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Install packages of tier types for this test."""

    def install(module: str, source: str, /, **types: str) -> None:
        monkeypatch.syspath_prepend(str(write_package(tmp_path, module, source, **types)))

    return install


def jobs(tmp_path_factory: pytest.TempPathFactory, *first: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that has vLLM imported and runs jobs (see `vllm_child`). `first`: folders that come
    first on its path."""
    env = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
    env["VLLM_NO_USAGE_STATS"] = "1"
    # More threads than one spin while they wait for one that a busy machine does not run.
    env["OMP_NUM_THREADS"] = "1"
    places = [*map(str, (*first, CHILD.parents[3])), *filter(None, sys.path)]
    env["PYTHONPATH"] = os.pathsep.join(places)
    env["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))
    # What vLLM itself keeps saves it time, and is no user's in particular.
    env.setdefault("VLLM_CACHE_ROOT", str(Path.home() / ".cache" / "vllm"))
    process = subprocess.Popen(
        [sys.executable, str(CHILD)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=env,
        start_new_session=True,
    )
    yield process
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@pytest.fixture(scope="session")
def vllm_jobs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[subprocess.Popen[str]]:
    """Where engines of tests run."""
    yield from jobs(tmp_path_factory)
