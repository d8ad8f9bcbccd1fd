"""The remote tier as a user of a real server's access control list; its secret, which is nowhere
shown."""

from __future__ import annotations

import logging
import socket
import time
import traceback
import tracemalloc
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from spec.offloading import StoreContext
from tests.support.fronts import Front
from tests.support.redis_verbs import PAYLOAD, is_up, opened
from tests.support.servers import RedisServer, binaries
from tests.support.topologies import cluster
from tiers.errors import TierUnavailable, TierUnusable
from tiers.remote.redis.pools import REPLY_BYTES
from tiers.remote.redis.redis_store import RedisStore
from tiers.remote.spec import RedisSpec
from tiers.testing import Memory, make_key
from tiers.wrappers.guard import Guarded

SECRET = "s3same-0pen"
NEEDED = ("~kvtiers:*", "+get", "+set", "+exists", "+touch", "+pexpire", "+unlink")
"""All that the tier may be allowed to do."""


@pytest.fixture(scope="module")
def guarded_server() -> Iterator[RedisServer]:
    """A server that lets nobody in but `engine`, who may do what the tier needs."""
    with RedisServer(binaries()["valkey"], password="the-operators") as server:
        client: Any = server.client()
        client.execute_command("ACL", "SETUSER", "engine", "on", f">{SECRET}", *NEEDED)
        yield server


@pytest.fixture(params=["env", "file"])
def password(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> dict[str, str]:
    monkeypatch.setenv("OUR_SECRET", SECRET)
    (tmp_path / "secret").write_text(f"{SECRET}\n")
    return {
        "env": {"env": "OUR_SECRET"},
        "file": {"file": str(tmp_path / "secret")},
    }[request.param]


def exercise(store: RedisStore) -> None:
    keys = [make_key() for _ in range(5)]
    assert store.put(Memory(keys, PAYLOAD).fill().blocks) == [True] * 5
    memory = Memory(keys, PAYLOAD)
    assert store.get(memory.blocks) == [True] * 5
    assert all(memory.holds(index) for index in range(5))
    store.drop(keys)
    assert store.has(keys) == [False] * 5


def test_a_user_who_may_do_little_is_enough(
    guarded_server: RedisServer, password: dict[str, str]
) -> None:
    place = f"127.0.0.1:{guarded_server.port}"
    with opened(f"redis://{place}", username="engine", password=password, ttl="1h") as store:
        exercise(store)


def test_the_password_of_a_server_without_users(password: dict[str, str]) -> None:
    with (
        RedisServer(binaries()["valkey"], password=SECRET) as server,
        opened(f"redis://127.0.0.1:{server.port}", password=password) as store,
    ):
        exercise(store)


@pytest.mark.fault
def test_a_user_who_may_not_store_is_told(
    guarded_server: RedisServer, password: dict[str, str]
) -> None:
    client: Any = guarded_server.client()
    client.execute_command("ACL", "SETUSER", "reader", "on", f">{SECRET}", "~kvtiers:*", "+exists")
    with opened(guarded_server.url, username="reader", password=password) as store:
        assert store.has([make_key()]) == [False]
        with pytest.raises(TierUnavailable, match=r"(?i)no permissions.*'set'"):
            store.put(Memory([make_key()], PAYLOAD).fill().blocks)


@pytest.mark.parametrize("masters", [1, 3])
def test_a_user_who_may_not_say_that_blocks_are_used_stores_them_all_the_same(
    masters: int, caplog: pytest.LogCaptureFixture
) -> None:
    with ExitStack() as stack:
        if masters == 1:
            nodes = [stack.enter_context(RedisServer(binaries()["valkey"]))]
            url = nodes[0].url
        else:
            nodes = stack.enter_context(cluster(masters))
            url = f"redis+cluster://127.0.0.1:{nodes[0].port}"
        for node in nodes:
            client: Any = node.client()
            client.execute_command("ACL", "SETUSER", "default", "-touch")
        store = stack.enter_context(opened(url))
        memory = Memory([make_key() for _ in range(50)], PAYLOAD).fill()
        for before in range(3):
            more = Memory([make_key()], PAYLOAD).fill()
            assert store.put([*memory.blocks, *more.blocks]) == [True] * 51
            assert store.counts().renewed == 50 * before
    assert caplog.text.count("may not TOUCH") == 1


@pytest.mark.parametrize("fault", ["wrong password", "no such user", "dead server", "no redis"])
@pytest.mark.fault
def test_no_fault_shows_the_password(
    guarded_server: RedisServer,
    password: dict[str, str],
    caplog: pytest.LogCaptureFixture,
    fault: str,
) -> None:
    caplog.set_level(logging.DEBUG)
    client: Any = guarded_server.client()
    client.execute_command("ACL", "SETUSER", "other", "on", ">another")
    user = {"wrong password": "other", "no such user": "nobody"}.get(fault, "engine")
    port = 1 if fault == "dead server" else guarded_server.port
    scheme = "redis+sentinel" if fault == "no redis" else "redis"
    url = f"{scheme}://127.0.0.1:{port}" + ("/main" if fault == "no redis" else "")
    with opened(url, username=user, password=password) as store:
        with pytest.raises(TierUnavailable) as caught:
            store.has([make_key()])
        guarded = Guarded(store, "remote")
        assert guarded.has([make_key()]) == [False]
        assert not is_up(guarded)
        trace = "".join(traceback.format_exception(caught.value))
        shown = f"{caught.value!r} {trace} {store!r} {vars(store)!r} {caplog.text}"
        assert "remote: reads are down" in caplog.text
        assert SECRET not in shown


def test_a_secret_that_is_gone_when_the_tier_opens_is_said_without_it(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text(SECRET)
    settings = {"url": "redis://cache", "password": {"file": str(tmp_path / "secret")}}
    spec = RedisSpec.model_validate(settings)
    (tmp_path / "secret").unlink()
    with pytest.raises(TierUnusable, match=r"let the file .* be read") as caught:
        spec.open(StoreContext(payload_bytes=PAYLOAD))
    assert SECRET not in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"url": "redis://cache", "username": "me"}, "add password"),
    ],
)
def test_a_login_is_whole(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        RedisSpec.model_validate(settings)


class Liar(Front):
    """A server that answers like none; `greets`: but for what clients say first."""

    def __init__(self, answer: bytes, more: bytes, greets: bool) -> None:
        super().__init__()
        self._answer, self._more, self._greets = answer, more, greets

    def serve(self, client: socket.socket) -> None:
        while self._greets and b"CLIENT" in client.recv(4096):
            client.sendall(b"+OK\r\n")
        client.sendall(self._answer)
        while self._more:
            client.sendall(self._more)


@pytest.mark.fault
@pytest.mark.parametrize(("scheme", "greets"), [("redis", False), ("redis+cluster", True)])
@pytest.mark.parametrize(
    ("answer", "more", "says"),
    [
        (b"$99999999999\r\n", bytes(1 << 20), "a reply of more than"),
        (b"+", bytes(1 << 20), "a reply of more than"),
        (b"*99999999999\r\n", b"+%b\r\n" % bytes(1000) * 1000, "a reply of more than"),
        (b"*1\r\n" * 100_000, b"", "recursion"),
        (b"*x\r\n", b"", "invalid literal"),
        (b"$" + b"9" * 20 + b"\r\n", b"", "cannot fit"),
    ],
)
def test_a_server_does_not_choose_how_much_memory_its_replies_take(
    scheme: str, greets: bool, answer: bytes, more: bytes, says: str
) -> None:
    with (
        Liar(answer, more, greets) as liar,
        opened(f"{scheme}://127.0.0.1:{liar.port}", timeout="1s") as store,
    ):
        tracemalloc.start()
        try:
            with pytest.raises(TierUnavailable, match=says):
                store.has([make_key()])
            assert tracemalloc.get_traced_memory()[1] < 8 * REPLY_BYTES
        finally:
            tracemalloc.stop()


class Drips(Front):
    def serve(self, client: socket.socket) -> None:
        while True:
            client.sendall(b"+")
            time.sleep(0.05)


@pytest.mark.fault
@pytest.mark.parametrize("scheme", ["redis", "redis+cluster"])
def test_a_reply_that_drips_ends_with_its_verb(scheme: str) -> None:
    with (
        Drips() as drips,
        opened(f"{scheme}://127.0.0.1:{drips.port}", timeout="300ms") as store,
        pytest.raises(TierUnavailable),
    ):
        store.has([make_key()])
