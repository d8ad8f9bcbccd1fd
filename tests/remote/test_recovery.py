"""The remote tier behind its guard while a real server fails: misses meanwhile, health that says
so, and service again without anybody's help.

The times only keep a broken build from hanging; no test measures speed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import pytest

from spec.offloading import StoreContext
from tests.support.health import is_up
from tests.support.redis_verbs import PAYLOAD, get, put
from tests.support.servers import RedisServer
from tests.support.topologies import Link, wait_until
from tiers.remote.spec import RedisSpec
from tiers.testing import make_key
from tiers.wrappers.guard import Guarded

HANG_LIMIT = 20.0
PAUSE_MS = 2500
BEGINS_AGAIN = "misses at once; joins again by itself"
TIMES_OUT = "misses after the timeout, then at once; joins again by itself"


class Fault(NamedTuple):
    """What is done to the server and to the way to it, and how it ends."""

    begin: Callable[[RedisServer, Link], None]
    end: Callable[[RedisServer, Link], None]


def _kill(server: RedisServer, _: Link) -> None:
    server.kill()


def _start(server: RedisServer, _: Link) -> None:
    server.start()


def _hang(server: RedisServer, _: Link) -> None:
    server.hang()


def _resume(server: RedisServer, _: Link) -> None:
    server.resume()


def _pause(server: RedisServer, _: Link) -> None:
    server.client().client_pause(PAUSE_MS)


def _sleep(server: RedisServer, _: Link) -> None:
    client = server.client()
    asleep = threading.Thread(target=client.execute_command, args=("DEBUG", "SLEEP", "2.5"))
    asleep.start()
    threading.Event().wait(0.1)


def _nothing(_: RedisServer, __: Link) -> None:
    pass


def _drip(_: RedisServer, link: Link) -> None:
    link.drip = 0.05


def _cut(_: RedisServer, link: Link) -> None:
    link.cut_after = 0


def _stall(_: RedisServer, link: Link) -> None:
    link.stall_after = 0


def _heal(_: RedisServer, link: Link) -> None:
    link.heal()


def _change_password(server: RedisServer, _: Link) -> None:
    server.client().config_set("requirepass", "another")
    server.password = "another"
    server.client().client_kill_filter(_type="normal", skipme=True)


def _no_password(server: RedisServer, _: Link) -> None:
    server.client().config_set("requirepass", "")
    server.password = None


def _read_only(server: RedisServer, _: Link) -> None:
    server.client().replicaof("127.0.0.1", "1")


def _writable(server: RedisServer, _: Link) -> None:
    server.client().replicaof("NO", "ONE")


def case(fault: str, outcome: str, begin: object, end: object) -> object:
    mark = pytest.mark.fault(tier="redis", fault=fault, outcome=outcome)
    return pytest.param(Fault(begin, end), marks=mark, id=fault.partition(" (")[0])  # type: ignore[arg-type]


FAULTS = [
    case("killed server", BEGINS_AGAIN, _kill, _start),
    case("hung server (SIGSTOP)", TIMES_OUT, _hang, _resume),
    case("paused server (CLIENT PAUSE)", TIMES_OUT, _pause, _nothing),
    case("busy server (DEBUG SLEEP)", TIMES_OUT, _sleep, _nothing),
    case("replies that drip (a byte in 50 ms)", TIMES_OUT, _drip, _heal),
    case("connections that break off", BEGINS_AGAIN, _cut, _heal),
    case("replies that never come", TIMES_OUT, _stall, _heal),
    case("wrong password", BEGINS_AGAIN, _change_password, _no_password),
]


@contextmanager
def guarded_tier(url: str) -> Iterator[Guarded]:
    spec = RedisSpec.model_validate({"url": url, "timeout": "400ms"})
    store = spec.open(StoreContext(payload_bytes=PAYLOAD))
    guarded = Guarded(store, "remote", retry_after=0.1, retry_after_max=0.2)
    try:
        yield guarded
    finally:
        guarded.close()


def ends(call: Callable[[], list[bool]]) -> list[bool]:
    """What the call gives; it fails where it hangs."""
    given: list[list[bool]] = []
    thread = threading.Thread(target=lambda: given.append(call()), daemon=True)
    thread.start()
    thread.join(HANG_LIMIT)
    assert given, "it hangs"
    return given[0]


@pytest.fixture
def debuggable(server: RedisServer) -> RedisServer:
    server.kill()
    server.set_option("enable-debug-command", "yes")
    server.start()
    return server


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_costs_misses_shows_and_passes(debuggable: RedisServer, fault: Fault) -> None:
    server, keys = debuggable, [make_key() for _ in range(6)]
    with Link(server) as link, guarded_tier(link.url) as tier:
        wait_until(lambda: put(tier, *keys) == [True] * 6)
        fault.begin(server, link)
        assert ends(lambda: tier.has(keys)) == [False] * 6
        assert ends(lambda: get(tier, *keys)) == [False] * 6
        assert ends(lambda: put(tier, make_key())) == [False]
        assert not is_up(tier)
        fault.end(server, link)
        wait_until(lambda: put(tier, *keys) == [True] * 6)
        wait_until(lambda: get(tier, *keys) == [True] * 6)
        assert is_up(tier)


@pytest.mark.fault
def test_a_server_that_takes_no_writes_still_serves_loads(server: RedisServer) -> None:
    keys = [make_key() for _ in range(6)]
    with Link(server) as link, guarded_tier(link.url) as tier:
        wait_until(lambda: put(tier, *keys) == [True] * 6)
        _read_only(server, link)
        assert put(tier, make_key()) == [False]
        assert get(tier, *keys) == [True] * 6
        assert not is_up(tier)
        assert tier.health.reads
        _writable(server, link)
        wait_until(lambda: put(tier, make_key()) == [True])
        assert is_up(tier)


@pytest.mark.fault
def test_restarts_under_load_cost_misses_and_never_a_wrong_block(server: RedisServer) -> None:
    keys = [make_key() for _ in range(20)]
    with guarded_tier(server.url) as tier:
        for _ in range(4):
            wait_until(lambda: put(tier, *keys) == [True] * 20)
            killer = threading.Timer(0.02, server.kill)
            killer.start()
            while any(get(tier, *keys)):  # which compares every byte of a hit
                pass
            killer.join()
            server.start()
        wait_until(lambda: put(tier, *keys) == [True] * 20)
        wait_until(lambda: get(tier, *keys) == [True] * 20)
