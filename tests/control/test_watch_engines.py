"""Watching engines that come, end, come again, and hang."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.cli.test_status import STATUS
from tests.control.test_control_server import connected
from tests.support.topologies import wait_until
from tiers.control import ask_engines
from tiers.control.control_server import ControlServer, Verb, short_path
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
    others = {*threading.enumerate()}
    first = serve(tmp_path)
    until(lambda seen: policy(seen) == "first")
    first.close()
    (gone,) = until(lambda seen: seen[0].is_gone)
    assert policy([gone]) == "first", "its last answer stays"
    second = serve(tmp_path, "longest")
    assert second.path == first.path
    (back,) = until(lambda seen: policy(seen) == "longest")
    assert not back.is_gone
    time.sleep(0.2)  # in which the folder is looked at many times
    new = {*threading.enumerate()} - others
    asking = [thread for thread in new if thread.name == "kvtiers-watch-engine"]
    assert 1 <= len(asking) <= 2, "one an engine, and perhaps that of the first"
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


def test_what_comes_of_a_pause_and_of_requests_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ask_engines, "BEGIN_SECONDS", 0.2)
    answers: dict[str, Any] = {"pause": {"over": False, "change": 3, "why": ""}}
    withdrawn = {"over": True, "change": 3, "why": "the engine made no step"}

    def change(question: Mapping[str, Any]) -> Any:
        return withdrawn if question == {"change": 3, "withdraw": True} else answers["pause"]

    explained: dict[str, Any] = {"last": [{"request": "a"}, {"request": "b"}], "slowest": []}
    verbs: dict[str, Verb] = {
        "status": lambda _: STATUS.model_dump(mode="json"),
        "pause": lambda _: answers["pause"],
        "change": change,
        "explain": lambda question: explained[next(iter(question))],
    }
    server = ControlServer(tmp_path / "control", "engine", verbs)
    with closing(EnginesWatch(tmp_path / "control", seconds=0.01)) as watch:
        watch.pause(server.path, "cpu", "both")
        wait_until(lambda: watch.news(server.path) == "refused: the engine made no step")
        answers["pause"] = {"over": True, "why": "another change is in flight"}
        watch.pause(server.path, "cpu", "both")
        wait_until(lambda: watch.news(server.path) == "refused: another change is in flight")
        answers["pause"] = {"over": True, "why": ""}
        watch.pause(server.path, "cpu", "both")
        wait_until(lambda: watch.news(server.path) == "tier cpu is paused: both")
        answers["pause"] = ["of another version"]
        watch.pause(server.path, "cpu", None)
        wait_until(lambda: watch.news(server.path).startswith("refused: list indices"))
        monkeypatch.setattr(ask_engines, "MOST_SECONDS", 0.2)
        answers["pause"] = withdrawn | {"over": False, "why": ""}
        monkeypatch.setattr(ask_engines, "BEGIN_SECONDS", 5.0)
        watch.pause(server.path, "cpu", None)
        wait_until(lambda: watch.news(server.path) == "refused: the change is not over yet")
        watch.explain(tmp_path / "another.sock")
        wait_until(lambda: bool(watch.watched()) and watch.watched()[0].status is not None)
        before = watch.watched()[0].since
        wait_until(lambda: watch.watched()[0].since > before)
        assert watch.watched()[0].last is None, "another engine's are asked for"
        watch.explain(server.path)
        wait_until(lambda: watch.watched()[0].last == [{"request": "b"}, {"request": "a"}])
        explained["slowest"] = ["of another version"]
        wait_until(lambda: "another version's" in watch.watched()[0].no_requests)
    server.close()
