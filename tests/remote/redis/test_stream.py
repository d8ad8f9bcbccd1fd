"""A link to a real server that drips, breaks off or falls silent within a reply, and values of
another length than a block's."""

from __future__ import annotations

import socket
import threading
import time

import pytest

from tests.support.redis_verbs import PAYLOAD, get, name, opened, put
from tests.support.servers import RedisServer
from tests.support.topologies import Link
from tiers.block import HEADER_BYTES
from tiers.errors import TierUnavailable
from tiers.remote.deadline import Deadline
from tiers.remote.redis.stream import (
    ServerError,
    Stream,
    StreamError,
    command,
    each_command,
    read_flags,
)
from tiers.store import Block
from tiers.testing import Memory, make_key


@pytest.mark.parametrize("names", [[b"a"], [b"a", b"b"], [b"a", b"", b"long"]])
@pytest.mark.parametrize("after", [(), (b"100",)])
def test_commands_for_many_names_are_those_for_each(
    names: list[bytes], after: tuple[bytes, ...]
) -> None:
    joined = b"".join(command(b"PEXPIRE", name, *after) for name in names)
    assert each_command(b"PEXPIRE", names, *after) == joined


def flags(replies: bytes, count: int, piece: int) -> list[bool]:
    """What is read of a server that sends these replies in pieces of so many bytes."""
    ours, theirs = socket.socketpair()

    def send() -> None:
        for start in range(0, len(replies), piece):
            theirs.sendall(replies[start : start + piece])
            time.sleep(0)
        theirs.close()

    sender = threading.Thread(target=send)
    sender.start()
    try:
        stream = Stream(ours, Deadline(20))
        read: list[bool] = []
        while len(read) < count:
            some = read_flags(stream, count - len(read))
            assert some
            read += some
        assert stream.is_drained
        return read
    finally:
        sender.join()
        ours.close()


@pytest.mark.parametrize("piece", [1, 3, 4, 7, 1 << 20])
def test_flags_come_in_pieces_of_any_length(piece: int) -> None:
    wanted = [number % 3 == 0 for number in range(100)]
    assert flags(b"".join(b":%d\r\n" % one for one in wanted), 100, piece) == wanted


def test_more_flags_than_a_stream_takes_at_once() -> None:
    assert flags(b":1\r\n:0\r\n" * 20_000, 40_000, 1 << 20) == [True, False] * 20_000


@pytest.mark.parametrize("piece", [1, 1 << 20])
def test_a_number_of_another_length_is_read_too(piece: int) -> None:
    assert flags(b":1\r\n:12\r\n:0\r\n:00\r\n:1\r\n", 5, piece) == [True, True, False, False, True]


@pytest.mark.parametrize("piece", [1, 1 << 20])
@pytest.mark.parametrize(
    ("replies", "error"),
    [
        (b":1\r\n-MOVED 1 there:1\r\n", ServerError),
        (b":1\r\n+OK\r\n", StreamError),
        (b":1:0\r\n\r\n", StreamError),
        (b":1\r\n:1", StreamError),
    ],
)
def test_what_is_no_number_is_no_answer(replies: bytes, error: type[Exception], piece: int) -> None:
    with pytest.raises(error):
        flags(replies, 2, piece)


@pytest.mark.parametrize(("payload_bytes", "count"), [(PAYLOAD, 64), (512 << 10, 16), (4 << 20, 4)])
def test_values_share_calls_of_the_system(
    shared_server: RedisServer, monkeypatch: pytest.MonkeyPatch, payload_bytes: int, count: int
) -> None:
    calls = {"sent": 0, "received": 0}
    send, receive = Stream._send_some, Stream._receive

    def sent(stream: Stream, views: list[memoryview]) -> int:
        calls["sent"] += 1
        return send(stream, views)

    def received(stream: Stream, *memory: memoryview, flags: int = 0) -> int:
        calls["received"] += 1
        return receive(stream, *memory, flags=flags)

    monkeypatch.setattr(Stream, "_send_some", sent)
    monkeypatch.setattr(Stream, "_receive", received)
    keys = [make_key() for _ in range(count)]
    with opened(shared_server.url, payload_bytes, timeout="20s") as store:
        assert store.has(keys) == [False] * count
        calls["sent"] = 0
        assert put(store, *keys, payload_bytes=payload_bytes) == [True] * count
        assert calls["sent"] - 1 <= count * payload_bytes >> 20  # one asks what is held
        calls["received"] = 0
        assert get(store, *keys, payload_bytes=payload_bytes) == [True] * count
        assert calls["received"] <= 3 * count


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
