"""A link to a real server that drips, breaks off or falls silent within a reply, and values of
another length than a block's."""

from __future__ import annotations

import threading

import pytest

from tests.support.redis_verbs import PAYLOAD, get, name, opened, put
from tests.support.servers import RedisServer
from tests.support.topologies import Link
from tiers.block import HEADER_BYTES
from tiers.errors import TierUnavailable
from tiers.store import Block
from tiers.testing import Memory, make_key

TIMEOUT = "1s"


@pytest.mark.fault
def test_a_server_that_drips_its_greeting_holds_no_verb(shared_server: RedisServer) -> None:
    with Link(shared_server) as link:
        # What it says to a client that greets it: an error of 70 bytes and some +OK.
        link.drip = 0.4
        url = link.url.replace("/0", "/900")
        with opened(url, timeout=TIMEOUT) as store, pytest.raises(TierUnavailable):
            store.has([make_key()])


@pytest.mark.fault
@pytest.mark.parametrize("fault", ["cut_after", "stall_after"])
@pytest.mark.parametrize("passed", [0, 3, 200, HEADER_BYTES + 5000])
def test_a_reply_that_ends_in_the_middle_spoils_none_after_it(
    shared_server: RedisServer, fault: str, passed: int
) -> None:
    keys = [make_key() for _ in range(4)]
    with Link(shared_server) as link, opened(link.url, timeout=TIMEOUT) as store:
        put(store, *keys)
        connections = link.accepted
        setattr(link, fault, passed)
        with pytest.raises(TierUnavailable):
            get(store, *keys)
        link.heal()
        # The rest of the old replies may still come: on a connection that nobody reads.
        assert get(store, make_key(), *reversed(keys)) == [False] + [True] * 4
        assert store.has([make_key(), keys[0]]) == [False, True]
        assert link.accepted == connections + 1


@pytest.mark.fault
def test_blocks_that_arrived_before_the_server_fell_silent_are_kept(
    shared_server: RedisServer,
) -> None:
    keys = [make_key() for _ in range(20)]
    with Link(shared_server) as link, opened(link.url, timeout=TIMEOUT) as store:
        put(store, *keys)
        link.stall_after = 10 * (HEADER_BYTES + PAYLOAD + 20)
        hits = get(store, *keys)
        assert 5 < sum(hits) <= 10 and hits == sorted(hits, reverse=True)
        with pytest.raises(TierUnavailable):
            get(store, *keys)
        link.heal()
        assert get(store, *keys) == [True] * 20


@pytest.mark.fault
@pytest.mark.parametrize("fault", ["cut_after", "stall_after"])
def test_a_store_whose_answer_is_lost_leaves_whole_blocks_or_none(
    shared_server: RedisServer, fault: str
) -> None:
    keys = [make_key() for _ in range(40)]
    with Link(shared_server) as link, opened(link.url, timeout=TIMEOUT) as store:
        store.has([make_key()])
        setattr(link, fault, 0)
        with pytest.raises(TierUnavailable):
            put(store, *keys)
        link.heal()
        assert get(store, *keys) == store.has(keys)
        assert put(store, *keys) == [True] * 40
        assert get(store, *keys) == [True] * 40


@pytest.mark.fault
@pytest.mark.parametrize("length", [-1, 1, 10 << 20])
def test_a_value_of_another_length_is_a_miss_and_touches_nothing_else(
    shared_server: RedisServer, length: int
) -> None:
    before, bad, after = make_key(), make_key(), make_key()
    client = shared_server.client()
    with opened(shared_server.url, timeout="10s") as store:
        put(store, before, bad, after)
        value = client.get(name(bad))
        assert isinstance(value, bytes)
        client.set(name(bad), (value * (2 + length // len(value)))[: len(value) + length])
        around = bytearray(b"\xa5" * (3 * PAYLOAD))
        middle = memoryview(around)[PAYLOAD : 2 * PAYLOAD]
        memory = Memory([before, after], PAYLOAD)
        first, last = memory.blocks
        assert store.get([first, Block(bad, middle), last]) == [True, False, True]
        assert memory.holds(0)
        assert memory.holds(1)
        assert around[:PAYLOAD] == around[2 * PAYLOAD :] == b"\xa5" * PAYLOAD
        assert store.has([before, bad, after]) == [True, False, True]


@pytest.mark.fault
def test_a_server_killed_while_it_answers_is_unavailable(server: RedisServer) -> None:
    keys = [make_key() for _ in range(200)]
    with opened(server.url, timeout="10s") as store:
        put(store, *keys)
        memory = Memory(keys, PAYLOAD)
        killer = threading.Timer(0.002, server.kill)
        killer.start()
        with pytest.raises(TierUnavailable):
            while True:  # of the batch that it is killed in, what has arrived is kept
                hits = store.get(memory.blocks)
                assert all(memory.holds(index) for index, hit in enumerate(hits) if hit)
        killer.join()
        server.start()
        assert get(store, *keys) == [False] * 200


@pytest.mark.fault
def test_a_server_that_speaks_another_language_is_unavailable() -> None:
    import http.server

    web = http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler)
    threading.Thread(target=web.serve_forever, daemon=True).start()
    try:
        url = f"redis://127.0.0.1:{web.server_port}"
        with opened(url, timeout=TIMEOUT) as store, pytest.raises(TierUnavailable):
            store.has([make_key()])
    finally:
        web.shutdown()
        web.server_close()
