"""The socket: who may ask, who can't harm it, and what becomes of it when its engine is gone."""

from __future__ import annotations

import errno
import itertools
import json
import os
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from tests.support.changing import running, tiers_of
from tests.support.lacking import refuse_threads
from tests.support.replay import ReplayEngine, ReplayModel
from tests.support.replay_chains import chain_of, cpu, disk
from tests.support.topologies import wait_until
from tiers.control import ask_engines, engine_control
from tiers.control import control_server as served
from tiers.control.ask_engines import NoAnswer, ask
from tiers.control.control_server import (
    ControlServer,
    FolderRefused,
    QuestionRefused,
    runtime_folder,
)
from tiers.control.engine_control import Control
from tiers.control.status_board import StatusBoard
from tiers.host.spare_memory import for_slots

LARGE = b'{"verb": "large"}\n'


def large(parameters: Mapping[str, Any]) -> str:
    return "x" * (8 << 20)


def grow(parameters: Mapping[str, Any]) -> None:
    raise RuntimeError("dictionary changed size during iteration")


def refuse(parameters: Mapping[str, Any]) -> None:
    raise QuestionRefused("ask another time")


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., ControlServer]]:
    """Make servers in a folder, `control` of the test's; its path is longer than a socket's."""
    servers: list[ControlServer] = []
    folder = tmp_path / "a-long-name".ljust(100, "-")
    folder.mkdir()

    def make(name: str = "engine") -> ControlServer:
        verbs: dict[str, Any] = {
            "slow": lambda _: time.sleep(0.01),
            "echo": dict,
            "large": large,
            "refuse": refuse,
            "grow": grow,
        }
        servers.append(ControlServer(folder / "control", name, verbs))
        return servers[-1]

    yield make
    for one in servers:
        one.close()


def test_engines_of_one_folder_all_answer_and_each_by_its_name(
    serve: Callable[..., ControlServer],
) -> None:
    made = [serve(), serve(), serve("chat")]
    folder = made[0].path.parent
    answers = ask(folder, "echo", {"last": 1})
    assert [answer.content for answer in answers] == [{"last": 1}] * 3
    assert {answer.engine for answer in answers} == {server.engine for server in made}
    assert len({server.engine for server in made}) == 3, "two of one process and name differ"
    assert len(ask(made[0].path, "echo")) == 1
    for name in ("chat", made[2].engine):
        assert [answer.engine for answer in ask(folder, "echo", engine=name)] == [made[2].engine]
    whole = f"engine-{os.getpid()}"
    assert [answer.engine for answer in ask(folder, "echo", engine=whole)] == [whole]
    for name in ("other", "hat"):
        with pytest.raises(NoAnswer, match=f"no engine is called .{name}.*there: chat-"):
            ask(folder, "echo", engine=name)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b"{\n", "no question: Invalid JSON"),
        (b"[]\n", "no question: Input should be an object"),
        (b'{"version": 2, "verb": "echo"}\n', "no question: version: Input should be 1"),
        (b'{"verb": "ecko"}\n', "no verb 'ecko' here; did you mean echo?"),
        (b'{"verb": "echo", "more": 1}\n', "no question: more: Extra inputs"),
        (b'{"verb": "refuse"}\n', "ask another time"),
        (b'{"verb": "grow"}\n', "ask again: dictionary changed size"),
        (b"\xff\xfe\n", "no question: Invalid JSON"),
    ],
)
def test_what_is_no_question_gets_a_reason(
    serve: Callable[..., ControlServer], line: bytes, why: str
) -> None:
    with connected(serve().path) as client:
        client.sendall(line)
        assert why in json.loads(client.makefile("rb").read())["error"]


def test_the_runtime_folder_is_the_users_logged_in_or_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """/run/user/UID ends with the last session: an engine that listened there would be gone, and
    one that is a service would be looked for there."""
    for user, folder in {0: "/run/kvtiers", 12: "/tmp/kvtiers-12"}.items():
        monkeypatch.setattr(os, "geteuid", lambda user=user: user)
        assert runtime_folder() == Path(folder)


def test_only_the_user_may_open_it(serve: Callable[..., ControlServer]) -> None:
    old = os.umask(0)
    try:
        path = serve().path
    finally:
        os.umask(old)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_a_folder_that_others_may_change_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "open"
    folder.mkdir()
    for mode in (0o720, 0o702):
        folder.chmod(mode)
        with pytest.raises(FolderRefused, match=r"open has mode 07.*chmod it to 0700"):
            ControlServer(folder, "a", {})
    folder.chmod(0o700)
    give_away(folder, monkeypatch)
    with pytest.raises(FolderRefused, match="belongs to user"):
        ControlServer(folder, "a", {})
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(FolderRefused, match="no folder"):
        ControlServer(tmp_path / "link", "a", {})
    with pytest.raises(FolderRefused, match="No such file"):
        ControlServer(tmp_path / "not" / "there", "a", {})


def give_away(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the folder another user's."""
    if os.geteuid() == 0:
        os.chown(folder, 12, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 12)


def test_in_a_folder_that_others_may_change_nobody_is_asked(
    serve: Callable[..., ControlServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever makes the folder first could answer as an engine, and be told a chain's salts."""
    made = serve()
    folder = made.path.parent
    folder.chmod(0o720)
    for place in (folder, made.path):
        with pytest.raises(NoAnswer, match=r"no engine is asked: .* has mode 0720"):
            ask(place, "echo")
    folder.chmod(0o700)
    assert ask(folder, "echo")[0].engine == made.engine
    (folder.parent / "link").symlink_to(folder)
    with pytest.raises(NoAnswer, match="no engine is asked"):
        ask(folder.parent / "link", "echo")
    give_away(folder, monkeypatch)
    for place in (folder, made.path):
        with pytest.raises(NoAnswer, match=r"no engine is asked: .* belongs to user"):
            ask(place, "echo")


def test_a_socket_of_an_engine_that_is_gone_is_removed(serve: Callable[..., ControlServer]) -> None:
    alive = serve()
    folder = alive.path.parent
    with socket.socket(socket.AF_UNIX) as dead, served.short_path(folder / "123-abc.sock") as path:
        dead.bind(path)
    serve()
    assert not (folder / "123-abc.sock").exists()
    assert alive.path.exists()


def test_a_socket_that_is_new_under_the_name_of_one_that_was_stale_stays(
    serve: Callable[..., ControlServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of two containers that start anew on one folder: each engine has process number 1."""
    first = serve()
    left, folder = first.path, first.path.parent
    first.close()
    with socket.socket(socket.AF_UNIX) as dead, served.short_path(left) as path:
        dead.bind(path)
    is_stale, others = served._is_stale, list[ControlServer]()

    def is_stale_while_another_starts(path: Path) -> bool:
        found = is_stale(path)
        monkeypatch.setattr(served, "_is_stale", is_stale)
        others.append(serve())
        return found

    monkeypatch.setattr(served, "_is_stale", is_stale_while_another_starts)
    made = serve()
    found = sorted(answer.engine for answer in ask(folder, "echo"))
    assert found == sorted([made.engine, others[0].engine]) and made.engine != others[0].engine


def test_closing_removes_the_socket(serve: Callable[..., ControlServer]) -> None:
    made = serve()
    made.close()
    assert list(made.path.parent.iterdir()) == []
    with pytest.raises(NoAnswer, match="no engine listens"):
        ask(made.path.parent, "echo")


def test_a_socket_is_touched_while_its_engine_lives(
    serve: Callable[..., ControlServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """systemd-tmpfiles removes what is untouched for ten days from /tmp, and does not see that the
    socket is open."""
    monkeypatch.setattr(served, "TOUCH_SECONDS", 0.01)
    made = serve()
    os.utime(made.path, (0, 0))
    wait_until(lambda: min(made.path.stat().st_mtime, made.path.stat().st_atime) > 0)
    made.close()
    wait_until(lambda: not threads())


def threads() -> int:
    return sum(thread.name == "kvtiers-control" for thread in threading.enumerate())


@pytest.mark.fault
def test_a_socket_that_can_not_be_removed_stays_for_the_next_engine(
    serve: Callable[..., ControlServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder turned read-only: an engine's end goes on, and closes what comes after."""
    made = serve()
    with monkeypatch.context() as fails:
        fails.setattr(Path, "unlink", Mock(side_effect=OSError(errno.EROFS, "read-only")))
        serve("other").close()
        made.close()
    wait_until(lambda: not threads())
    assert made.path.exists()
    assert ask(serve().path.parent, "echo")[0].content == {}


@pytest.mark.fault
@pytest.mark.parametrize("place", [0, 1, 4])
def test_an_engine_that_has_no_threads_for_its_socket_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, place: int
) -> None:
    """`place`: of the first that it does not get, of those that open it and answer there."""
    begun = itertools.count()
    refuse_threads(
        monkeypatch, lambda some: some.name.startswith("kvtiers-control") and next(begun) >= place
    )
    folder = tmp_path / "control"
    chain = chain_of(cpu(), control={"folder": str(folder)})
    with running(chain) as engine:
        assert engine.connector is not None
        control = Control(chain, engine.connector)
        wait_until(lambda: "can't start new thread" in caplog.text and not threads())
        assert not folder.exists() or not list(folder.iterdir())
        control.close()


def test_an_engine_that_ends_leaves_no_socket_and_judges_no_change(tmp_path: Path) -> None:
    folder = tmp_path / "control"
    chain = chain_of(cpu(), control={"folder": str(folder)})
    other = chain_of(cpu(), control={"folder": str(folder)}, max_wait="9s")
    with running(chain) as engine:
        assert engine.connector is not None
        control = Control(chain, engine.connector)
        wait_until(lambda: any(folder.glob("*.sock")))
        (path,) = folder.glob("*.sock")
        question = {"chain": other.model_dump(mode="json"), "watch": 3600.0}
        ask(path, "apply", question)
        engine.step()
        (watch,) = (one for one in threading.enumerate() if one.name == "kvtiers-change-watch")
        control.close()
        wait_until(lambda: not any(folder.iterdir()))
        watch.join(60)
        assert not watch.is_alive()


def test_an_engine_whose_folder_takes_no_socket_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(served, "listen", Mock(side_effect=OSError(errno.EPERM, "no sockets")))
    chain = chain_of(cpu(), control={"folder": str(tmp_path)})
    with running(chain) as engine:
        assert engine.connector is not None
        control = Control(chain, engine.connector)
        wait_until(lambda: "finds nothing: no socket in control.folder" in caplog.text)
        control.close()


@pytest.mark.parametrize(
    ("windows", "interval", "parts"),
    [((None,), 0, 1), ((None, 16, 16), None, 3), ((None, 16, 16), 0, 1), ((16,), 0, 1)],
)
def test_the_sizes_of_a_chain_are_those_of_all_groups_and_ranks(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    windows: tuple[int | None, ...],
    interval: int | None,
    parts: int,
) -> None:
    """Also where a tier did not open. `parts`: of every block that is kept."""
    monkeypatch.setattr(engine_control, "spare_memory", lambda: 1 << 40)
    monkeypatch.setattr(StatusBoard, "store_rates", lambda board, ranks: {"cpu": float(ranks)})
    (tmp_path / "file").touch()
    chain = chain_of(cpu(), disk(tmp_path / "file"))
    model = ReplayModel(windows=windows, window_interval=interval)
    engine = ReplayEngine(chain, model, num_blocks=30, world_size=2)
    assert engine.connector is not None
    found = Control(chain, engine.connector)._running({})
    block = next(child.block_bytes for child in tiers_of(engine))
    assert found["kv_bytes_per_token"] == block * parts // model.block_tokens
    assert found["cache_tokens"] == 30 // parts * model.block_tokens
    assert found["store_bytes_per_second"] == {"cpu": 2.0}
    assert found["spare_memory_bytes"] == for_slots(1 << 40)
    engine.close()


def connected(path: Path) -> socket.socket:
    client = socket.socket(socket.AF_UNIX)
    client.settimeout(10)
    with served.short_path(path) as short:
        client.connect(short)
    return client


@pytest.mark.parametrize(
    ("parts", "seconds", "why"),
    [
        ([b'["answer"]\n'], 60, r"it answers: \['answer'\]"),
        ([b"x" * 40_000] * 3, 60, "its answer is too long, or too slow"),
        ([b" "] * 20, 0.5, "its answer is too long, or too slow"),
    ],
)
def test_an_engine_that_answers_oddly_holds_nobody_up(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    parts: Sequence[bytes],
    seconds: float,
    why: str,
) -> None:
    monkeypatch.setattr(ask_engines, "SECONDS", seconds)
    monkeypatch.setattr(ask_engines, "MAX_ANSWER", 100_000)
    with socket.socket(socket.AF_UNIX) as odd, served.short_path(tmp_path / "odd.sock") as path:
        odd.bind(path)
        odd.listen()

        def answer() -> None:
            client, _ = odd.accept()
            with client, suppress(OSError):
                client.recv(1 << 16)
                for part in parts:
                    client.sendall(part)
                    time.sleep(0.05)

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(NoAnswer, match=why):
            ask(tmp_path, "status")
        thread.join()


@pytest.mark.fault
def test_clients_that_say_nothing_or_too_much_are_cut_off(
    serve: Callable[..., ControlServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served, "CLIENT_SECONDS", 0.2)
    made = serve()
    silent = [connected(made.path) for _ in range(served.MAX_CLIENTS)]
    loud = connected(made.path)
    loud.sendall(b"x" * served.MAX_QUESTION)
    with pytest.raises((ConnectionResetError, BrokenPipeError)):
        for _ in range(1000):
            loud.sendall(b"x" * 1024)
            time.sleep(0.005)
    assert [one.recv(1) for one in silent] == [b""] * len(silent)
    assert ask(made.path, "echo", {"last": 1})[0].content == {"last": 1}
    for one in (*silent, loud):
        one.close()


def test_a_client_that_reads_nothing_holds_nobody_up(
    serve: Callable[..., ControlServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served, "CLIENT_SECONDS", 0.3)
    made = serve()
    slow = connected(made.path)
    slow.sendall(LARGE)
    assert ask(made.path, "echo", {"last": 1})[0].content == {"last": 1}
    time.sleep(0.6)
    got = 0
    while part := slow.recv(1 << 20):
        got += len(part)
    assert got < 8 << 20
    slow.close()


def test_a_client_that_leaves_is_forgotten(
    serve: Callable[..., ControlServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served, "LONGEST_PAUSE", 0.01)
    made = serve()
    for _ in range(3 * served.MAX_CLIENTS):
        client = connected(made.path)
        client.sendall(LARGE)
        client.close()
    with connected(made.path) as client:
        client.sendall(LARGE)
        assert client.recv(10)


@pytest.mark.fault
def test_clients_that_ask_again_and_again_leave_the_engine_its_time(
    serve: Callable[..., ControlServer],
) -> None:
    """An answer that takes 10 ms is made five times a second at most, however many ask."""
    made = serve()
    until, answers = time.monotonic() + 1, []

    def hammer() -> None:
        while time.monotonic() < until:
            answers.append(ask(made.path, "slow"))

    threads = [threading.Thread(target=hammer) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert 1 <= len(answers) <= 5 + 2 * len(threads), "each asks once more than fits"


def test_a_question_may_come_in_pieces(serve: Callable[..., ControlServer]) -> None:
    made = serve()
    with connected(made.path) as client:
        for letter in b'{"verb": "echo", "parameters": {"last": 3}}\n':
            client.sendall(bytes([letter]))
        assert json.loads(client.recv(1000))["answer"] == {"last": 3}


def test_its_thread_does_not_keep_a_process(serve: Callable[..., ControlServer]) -> None:
    serve()
    named = [t for t in threading.enumerate() if t.name == "kvtiers-control"]
    assert named
    assert all(thread.daemon for thread in named)
