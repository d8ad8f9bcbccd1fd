"""Values that come together, in pieces of any length, between replies of every other kind."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tiers.block import HEADER_BYTES
from tiers.remote.deadline import Deadline
from tiers.remote.redis import pipeline
from tiers.remote.redis.pipeline import LEAST_BYTES, MOST_BYTES, Record, Window
from tiers.remote.redis.stream import (
    AHEAD_BYTES,
    OK,
    ServerError,
    Stream,
    StreamError,
    bulk,
    bulk_header,
)

FAST = 2_000_000_000


def settled(trip: float, rate: float) -> int:
    """The window after a while over a way of that many seconds and that rate, which it limits."""
    window = Window()
    for _ in range(20):
        window.answered(trip)
        reached = min(rate, window.num_bytes / trip)
        window.moved(64 << 20, (64 << 20) / reached)
    return window.num_bytes


def test_before_anything_is_known_it_is_small() -> None:
    assert Window().num_bytes == LEAST_BYTES


def test_loopback_gets_little_and_a_long_way_what_it_holds() -> None:
    assert settled(50e-6, FAST) == LEAST_BYTES
    assert settled(2e-3, FAST) > 3.8e-3 * FAST  # from 2 MiB, which alone allow half of it
    assert settled(0.1, FAST) == MOST_BYTES


def test_one_slow_answer_changes_nothing() -> None:
    window = Window()
    window.answered(1e-3)
    window.moved(FAST, 1.0)
    before = window.num_bytes
    window.answered(2.0)
    assert window.num_bytes == before


PAYLOAD = 300
WRONGTYPE = b"-WRONGTYPE not a string\r\n"
MISS = b"$-1\r\n"


def value(number: int, payload_bytes: int = PAYLOAD) -> bytes:
    """A value whose header and payload tell which one it is, with ends of lines among its bytes."""
    header = (b"%d\r\n$-1\r\n" % number).ljust(HEADER_BYTES, b"h")
    return header + (b"\r\n%d+OK\r\n" % number * payload_bytes)[:payload_bytes]


@contextmanager
def answering(replies: bytes, piece: int) -> Iterator[Stream]:
    """A stream of a server that says this, in pieces of so many bytes, and then closes."""
    ours, theirs = socket.socketpair()

    def send() -> None:
        try:
            for start in range(0, len(replies), piece):
                theirs.sendall(replies[start : start + piece])
        except OSError:
            pass  # whoever reads has had enough
        theirs.shutdown(socket.SHUT_WR)

    sender = threading.Thread(target=send)
    sender.start()
    try:
        yield Stream(ours, Deadline(20))
    finally:
        ours.close()
        sender.join()
        theirs.close()


Loaded = list[tuple[int, bytes | None]]


def loaded(replies: bytes, count: int, piece: int, payload_bytes: int = PAYLOAD) -> Loaded:
    """What `load` says of so many values; nothing else may have been received."""
    names = [b"name %d" % number for number in range(count)]
    payloads = [memoryview(bytearray(payload_bytes)) for _ in names]
    got: Loaded = []

    def on_value(position: int, record: Record | None) -> None:
        whole = None if record is None else bytes(record.header) + bytes(record.stored)
        got.append((position, whole))

    with answering(replies, piece) as stream:
        pipeline.load(stream, names, payloads, on_value, Window())
        assert stream.is_drained
    return got


@pytest.mark.parametrize("piece", [1, 2, 7, 511, 820, 1 << 20])
@pytest.mark.parametrize("at", [0, 1, 6, 11])
@pytest.mark.parametrize(
    "other", [MISS, WRONGTYPE, b"-ASK 1 there:1\r\n", bulk(b""), bulk(value(3)[:-1])]
)
def test_any_reply_may_stand_among_whole_values(other: bytes, at: int, piece: int) -> None:
    replies = [bulk(value(number)) for number in range(12)]
    wanted: Loaded = [(number, value(number)) for number in range(12)]
    replies[at] = other
    del wanted[at]
    if other in (WRONGTYPE, bulk(b"")):
        wanted.insert(at, (at, None))
    elif other.startswith(b"$8"):
        wanted.insert(at, (at, value(3)[:-1]))
    assert loaded(b"".join(replies), 12, piece) == wanted


@pytest.mark.parametrize("piece", [100, 1 << 20])
def test_what_is_given_back_may_be_more_than_is_received_ahead(piece: int) -> None:
    big = 100_000
    assert big > AHEAD_BYTES
    replies = MISS + b"".join(bulk(value(number, big)) for number in (1, 2, 3))
    wanted = [(number, value(number, big)) for number in (1, 2, 3)]
    assert loaded(replies, 4, piece, big) == wanted


@pytest.mark.parametrize("piece", [1, 1 << 20])
@pytest.mark.parametrize(
    ("bad", "error"),
    [
        (bulk_header(HEADER_BYTES + PAYLOAD) + value(1) + b"++", StreamError),
        (bulk(value(1))[:-1], StreamError),
        (b"-MOVED 1 there:1\r\n", ServerError),
        (b"+OK\r\n", StreamError),
        (b"$8x2\r\n", StreamError),
        (b"$-2\r\n", StreamError),
        (bulk(value(1)[:-1])[:-2] + b"++\r\n", StreamError),
        (b"+" * 2 * AHEAD_BYTES, StreamError),
    ],
)
def test_what_is_no_reply_to_get_ends_the_load(
    bad: bytes, error: type[Exception], piece: int
) -> None:
    with pytest.raises(error):
        loaded(bulk(value(0)) + bad, 2, piece)


def test_a_reply_that_nobody_asked_for_is_left() -> None:
    with pytest.raises(AssertionError):
        loaded(MISS * 5, 4, 1 << 20)


@pytest.mark.parametrize("piece", [1, 6, 1 << 20])
def test_answers_to_stores_come_in_pieces(piece: int) -> None:
    answers = [b"+OK\r\n"] * 30
    answers[4] = b"-ASK 1 there:1\r\n"
    stored = [True] * 30
    stored[4] = False
    record = Record(bytes(HEADER_BYTES), bytes(PAYLOAD))
    names = [b"name %d" % number for number in range(30)]
    with answering(b"".join(answers), piece) as stream:
        assert pipeline.store(stream, names, lambda _: record, (), Window()) == (stored, False)
        assert stream.is_drained


def test_an_answer_that_nobody_asked_for_stores_nothing() -> None:
    record = Record(bytes(HEADER_BYTES), bytes(PAYLOAD))
    with answering(b"+OK\r\n" * 3, 1 << 20) as stream:
        stored, _ = pipeline.store(stream, [b"a", b"b"], lambda _: record, (), Window())
        assert stored == [True] * 2
        assert not stream.is_drained, "its connection would be used again"


def test_an_answer_that_was_read_is_not_read_again() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        stream = Stream(ours, Deadline(20))
        theirs.sendall(OK * 3)
        assert stream.line() == b"+OK"
        assert [stream.passes(OK) for _ in range(3)] == [True, True, False]
        theirs.sendall(OK)
        assert stream.line() == b"+OK"
        assert not stream.passes(OK)
