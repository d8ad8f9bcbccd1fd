"""Watching engines that come, end, come again, and hang."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cli.test_status import STATUS
from tests.control.test_control_server import connected
from tiers.control.control_server import ControlServer, short_path
from tiers.control.watch_engines import HANGS, EnginesWatch, Watched

Until = Callable[[Callable[[list[Watched]], bool]], list[Watched]]


@pytest.fixture
def until(tmp_path: Path) -> Iterator[Until]:
    """Watch the test's folder until what is seen is so."""
    watch = EnginesWatch(tmp_path / "control", seconds=0.01)

    def wait(is_so: Callable[[list[Watched]], bool]) -> list[Watched]:
        late = time.monotonic() + 10
        while not is_so(seen := [*watch.watched()]):
            assert time.monotonic() < late, seen
            time.sleep(0.01)
        return seen

    yield wait
    watch.close()


def serve(folder: Path, load_policy: str = "first") -> ControlServer:
    status = STATUS.model_copy(update={"load_policy": load_policy}).model_dump(mode="json")
    return ControlServer(folder / "control", "engine", {"status": lambda _: status})


def policy(seen: list[Watched]) -> str | None:
    return seen[0].status.load_policy if seen and seen[0].status else None


def test_an_engine_ends_and_one_of_its_name_comes(until: Until, tmp_path: Path) -> None:
    """In a container each engine is process 1."""
    first = serve(tmp_path)
    until(lambda seen: policy(seen) == "first")
    first.close()
    (gone,) = until(lambda seen: seen[0].is_gone)
    assert policy([gone]) == "first", "its last answer stays"
    second = serve(tmp_path, "longest")
    assert second.path == first.path
    (back,) = until(lambda seen: policy(seen) == "longest")
    assert not back.is_gone
    second.close()


def test_a_socket_that_a_killed_engine_left_is_gone(until: Until, tmp_path: Path) -> None:
    (tmp_path / "control").mkdir(mode=0o700)
    path = tmp_path / "control" / f"engine-{os.getpid()}.sock"
    with socket.socket(socket.AF_UNIX) as dead, short_path(path) as short:
        dead.bind(short)
    until(lambda seen: bool(seen) and seen[0].is_gone)
    second = serve(tmp_path)  # which removes it
    until(lambda seen: policy(seen) == "first" and not seen[0].is_gone)
    second.close()


def test_an_engine_whose_queue_of_clients_is_full_hangs(until: Until, tmp_path: Path) -> None:
    (tmp_path / "control").mkdir(mode=0o700)
    path = tmp_path / "stopped.sock"
    with socket.socket(socket.AF_UNIX) as stopped, short_path(path) as short:
        stopped.bind(short)
        stopped.listen(0)
        with connected(path):  # where nobody watches: who does would be the one client
            path.rename(tmp_path / "control" / path.name)
            until(lambda seen: bool(seen) and seen[0].problem == HANGS)
