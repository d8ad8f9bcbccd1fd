"""The socket: who may ask, who can't harm it, and what becomes of it when its engine is gone."""

from __future__ import annotations

import json
import os
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tiers.explain import explain_server as served
from tiers.explain.ask_engines import NoAnswer, ask
from tiers.explain.explain_server import ExplainServer, FolderRefused


def parrot(question: bytes) -> bytes:
    return json.dumps({"said": json.loads(question)}).encode() + b"\n"


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., ExplainServer]]:
    """Make servers in a folder, `explain` of the test's."""
    servers: list[ExplainServer] = []

    def make(answer: Callable[[bytes], bytes] = parrot) -> ExplainServer:
        servers.append(ExplainServer(tmp_path / "explain", answer))
        return servers[-1]

    yield make
    for one in servers:
        one.close()


def test_engines_of_one_folder_all_answer(
    serve: Callable[..., ExplainServer], tmp_path: Path
) -> None:
    made = [serve(), serve()]
    told = ask(tmp_path / "explain", {"last": 1})
    assert [one["said"] for one in told] == [{"last": 1}] * 2
    assert {one["engine"] for one in told} == {one.path.stem for one in made}
    assert len(ask(made[0].path, {"last": 1})) == 1


def test_only_the_user_may_open_it(serve: Callable[..., ExplainServer]) -> None:
    old = os.umask(0)
    try:
        path = serve().path
    finally:
        os.umask(old)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_a_folder_that_others_may_change_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(FolderRefused, match="chmod go-w"):
        ExplainServer(folder, parrot)
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(FolderRefused, match="no folder"):
        ExplainServer(tmp_path / "link", parrot)
    with pytest.raises(FolderRefused, match="No such file"):
        ExplainServer(tmp_path / "not" / "there", parrot)


def test_a_socket_of_an_engine_that_is_gone_is_removed(
    serve: Callable[..., ExplainServer], tmp_path: Path
) -> None:
    folder = tmp_path / "explain"
    alive = serve()
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(folder / "123-abc.sock"))
    serve()
    assert not (folder / "123-abc.sock").exists()
    assert alive.path.exists()


def test_closing_removes_the_socket(serve: Callable[..., ExplainServer], tmp_path: Path) -> None:
    made = serve()
    made.close()
    assert list((tmp_path / "explain").iterdir()) == []
    with pytest.raises(NoAnswer, match="no engine listens"):
        ask(tmp_path / "explain", {"last": 1})


def connected(path: Path) -> socket.socket:
    client = socket.socket(socket.AF_UNIX)
    client.settimeout(10)
    client.connect(str(path))
    return client


def test_clients_that_say_nothing_or_too_much_are_cut_off(
    serve: Callable[..., ExplainServer], monkeypatch: pytest.MonkeyPatch
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
    assert ask(made.path, {"last": 1})[0]["said"] == {"last": 1}
    for one in (*silent, loud):
        one.close()


def test_a_client_that_reads_nothing_holds_nobody_up(
    serve: Callable[..., ExplainServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served, "CLIENT_SECONDS", 0.3)
    made = serve(lambda question: parrot(question) if b"last" in question else b"x" * (8 << 20))
    slow = connected(made.path)
    slow.sendall(b"{}\n")
    assert ask(made.path, {"last": 1})[0]["said"] == {"last": 1}
    time.sleep(0.6)
    got = 0
    while part := slow.recv(1 << 20):
        got += len(part)
    assert got < 8 << 20
    slow.close()


def test_a_client_that_leaves_is_forgotten(serve: Callable[..., ExplainServer]) -> None:
    made = serve(lambda question: b"x" * (8 << 20))
    for _ in range(3 * served.MAX_CLIENTS):
        client = connected(made.path)
        client.sendall(b"{}\n")
        client.close()
    with connected(made.path) as client:
        client.sendall(b"{}\n")
        assert client.recv(10)


def test_a_question_may_come_in_pieces(serve: Callable[..., ExplainServer]) -> None:
    made = serve()
    with connected(made.path) as client:
        for letter in b'{"last": 3}\n':
            client.sendall(bytes([letter]))
        assert json.loads(client.recv(1000)) == {"said": {"last": 3}}


def test_its_thread_does_not_keep_a_process(serve: Callable[..., ExplainServer]) -> None:
    serve()
    named = [t for t in threading.enumerate() if t.name == "kvtiers-explain"]
    assert named
    assert all(thread.daemon for thread in named)
