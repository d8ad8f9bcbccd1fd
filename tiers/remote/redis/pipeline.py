"""Moves values between a connection and the caller's memory, several in flight at a time."""

from __future__ import annotations

import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from tiers.block import HEADER_BYTES, Buffer, after
from tiers.remote.redis.stream import (
    AHEAD_BYTES,
    OK,
    ServerError,
    Stream,
    StreamError,
    array_header,
    bulk,
    bulk_header,
    each_command,
    read_length,
    read_status,
)

LEAST_BYTES = 2 << 20
"""Enough on loopback, and small values need it: 64 loads came at 1.5 GB/s with 512 KiB and at 2.0
with 1 or 2 MiB (values of 64 KiB); at 2.2, 2.8 and 3.1 (256 KiB). More only evicts values from
processor caches: 64 stores of 2 MiB cost 0.31 s of a core per GB with one value in flight, 0.37
with four."""

MOST_BYTES = 8 << 20
"""The bandwidth-delay product of 4 ms at 2 GB/s. A larger value is sent alone."""


class Window:
    """Twice the bandwidth-delay product of the link: the shortest round trip times the rate. Twice,
    so that a rate limited by the window itself lets the window grow. Threads may report at once."""

    def __init__(self) -> None:
        self._trip: float | None = None
        self._rate = 0.0

    def answered(self, seconds: float) -> None:
        """Report a round trip: seconds from a request to the first byte of its reply."""
        self._trip = seconds if self._trip is None else min(self._trip, seconds)

    def moved(self, count: int, seconds: float) -> None:
        """Report that `count` bytes arrived in `seconds`."""
        rate = count / max(seconds, 1e-6)
        self._rate = rate if rate > self._rate else 0.75 * self._rate + 0.25 * rate

    @property
    def num_bytes(self) -> int:
        needed = 2 * self._rate * (self._trip or 0.0)
        return int(min(max(needed, LEAST_BYTES), MOST_BYTES))


SEND_BYTES = 3 << 20
"""Values are sent together, this many bytes at least in one system call. Its copies drive the
interpreter out of the processor's caches, and what is done before the next call is slow: a GB by
256 KiB cost us 0.72 s of a core (values of 64 KiB), 0.40 (512 KiB) and 0.26 (2 MiB), by 3 MiB 0.47,
0.26 and 0.20. With 4 MiB of small values the server took up to twice as long."""

TOGETHER_BYTES = 512 << 10
"""Small values are received together, up to this many bytes in one system call: a quarter of the
least window, so that others are in flight meanwhile."""

_HEAD_BYTES = len("\r\n") + len("$536870912\r\n") + HEADER_BYTES
"""Most that is received before a payload: the end of the previous value, a length, a header."""


class Record(NamedTuple):
    """A value: the header of `tiers.block` and the stored bytes after it."""

    header: Buffer
    stored: Buffer


SMALL_BYTES = 16 << 10
"""Values up to this many bytes are received several at a time, and copied once more: each receive
lets another thread of the process run, which may take 5 ms."""

OnValue = Callable[[int, Record | None], None]
"""Called with the position of each value that exists, and the value; None: it can't be a record."""


def store(
    stream: Stream,
    names: Sequence[bytes],
    record: Callable[[int], Record],
    expiry: tuple[bytes, ...],
    window: Window,
) -> tuple[list[bool], bool]:
    """SET under `names[i]` the value `record(i)`; False for each that was refused, and whether the
    server is out of memory.

    `record` is called before its value is sent, while the server works on those that were.
    Nothing is sent after the first refusal: a server that is out of memory would refuse the rest,
    too, after it had travelled.
    """
    began = time.monotonic()
    sender = _Sender(stream)
    for position, name in enumerate(names):
        value = record(position)
        length = len(value.header) + len(value.stored)
        begin, middle, end = _around(len(name), length, expiry)
        sender.add(b"".join((begin, name, middle, value.header)), value.stored, end)
        if sender.unsent >= SEND_BYTES:
            sender.flush(window.num_bytes // 2)
            if sender.is_refused:
                break
    sender.flush(0)
    _report(window, sender.sent, began)
    return sender.stored + [False] * (len(names) - len(sender.stored)), sender.is_refused


class _Sender:
    """SETs in flight: sends several together, and reads their answers late."""

    def __init__(self, stream: Stream) -> None:
        self.stored: list[bool] = []
        self.is_refused = False
        self.sent = self.unsent = 0
        self._stream = stream
        self._parts: list[Buffer] = []
        self._sizes: deque[int] = deque()
        self._in_flight = 0

    def add(self, *parts: Buffer) -> None:
        self._parts += parts
        size = sum(map(len, parts))
        self._sizes.append(size)
        self.unsent += size

    def flush(self, most: int) -> None:
        """Send the added parts, and wait until at most `most` bytes, or one value, are sent and not
        answered."""
        self._stream.send(self._parts)
        self._parts = []
        self._in_flight += self.unsent
        self.sent += self.unsent
        self.unsent = 0
        spared = 1 if most else 0
        while self._in_flight > most and len(self._sizes) > spared:
            self._answered(self._read_answer())
            while self._in_flight and self._stream.passes(OK):
                self._answered(True)

    def _answered(self, is_stored: bool) -> None:
        self._in_flight -= self._sizes.popleft()
        self.stored.append(is_stored)

    def _read_answer(self) -> bool:
        try:
            read_status(self._stream)
        except ServerError as error:
            if error.code not in ("OOM", "ASK"):
                raise
            self.is_refused |= error.code == "OOM"
            return False
        return True


@lru_cache(maxsize=64)
def _around(name: int, value: int, expiry: tuple[bytes, ...]) -> tuple[bytes, bytes, bytes]:
    """What a SET has before the name, between name and value, and after the value, whose lengths
    these are."""
    begin = array_header(3 + len(expiry)) + bulk(b"SET") + bulk_header(name)
    return begin, b"\r\n" + bulk_header(value), b"\r\n" + b"".join(map(bulk, expiry))


def load(
    stream: Stream,
    names: Sequence[bytes],
    payloads: Sequence[memoryview],
    on_value: OnValue,
    window: Window,
) -> None:
    """GET the values into memory of their payloads' lengths; call `on_value` for each while the
    next are in flight."""
    lengths = set(map(len, payloads))
    size = HEADER_BYTES + max(lengths)
    ahead = max(2, window.num_bytes // size)  # with one the link would idle for a round trip
    together = max(1, TOGETHER_BYTES // size) if len(lengths) == 1 and not stream.is_tls else 0
    requested = position = moved = 0
    began = time.monotonic()
    while position < len(names):
        # Requests go out by halves of the window: one send for each costs as much as its value.
        if requested < len(names) and requested - position <= ahead // 2:
            upto = min(position + ahead, len(names))
            stream.send([each_command(b"GET", names[requested:upto])])
            requested = upto
        if together:
            upto = min(position + together, requested)
            for record in _whole_values(stream, payloads[position:upto]):
                on_value(position, record)
                moved += size
                position += 1
            if position < upto:
                together = 0
            continue
        found, value = _read_value(stream, payloads[position])
        if found:
            on_value(position, value)
            moved += size
        position += 1
    _report(window, moved, began)


def _whole_values(stream: Stream, payloads: Sequence[memoryview]) -> Iterator[Record]:
    """Receive values that are as long as their memory, straight into it, several at a time. Ends
    before a reply that is anything else, which the stream has next.

    Whoever checksums a value does so once it is whole: receiving by pieces of 128 KiB, which are in
    caches yet, cost 0.52 s of both sides' cores per GB of 2 MiB values, and 0.42 in one receive."""
    begin = bulk_header(HEADER_BYTES + len(payloads[0]))
    front = len(begin) + HEADER_BYTES
    around = bytearray((front + 2) * len(payloads))
    views, whole = _places(memoryview(around), front, payloads), front + len(payloads[0]) + 2
    left, filled, done, at = views, 0, 0, 0
    while done < len(payloads):
        # Behind the length of the last one it is known how much comes: it takes one receive.
        is_known = filled >= whole * (len(payloads) - 1) + len(begin)
        count = stream.scatter(left, socket.MSG_WAITALL if is_known else 0)
        left, filled = after(left, count), filled + count
        while done < len(payloads):
            have = filled - done * whole
            if not around.startswith(begin[:have], at):
                stream.unread(b"".join(views)[filled - have : filled])
                return
            if have < whole:
                break
            if not around.startswith(b"\r\n", at + front):
                raise StreamError("a value without its end")
            yield Record(around[at + len(begin) : at + front], payloads[done])
            done, at = done + 1, at + front + 2


def _places(around: memoryview, front: int, payloads: Sequence[memoryview]) -> list[memoryview]:
    """The views that replies fill: the bytes before, between and after payloads lie in `around`, in
    order; `front` bytes are before each payload, and the end of a line after it."""
    views, at = [], 0
    for number, payload in enumerate(payloads):
        upto = number * (front + 2) + front
        views += [around[at:upto], payload]
        at = upto
    return [*views, around[at:]]


def _report(window: Window, moved: int, began: float) -> None:
    if moved >= LEAST_BYTES:  # fewer bytes show nothing of the rate
        window.moved(moved, time.monotonic() - began)


def _read_value(stream: Stream, payload: memoryview) -> tuple[bool, Record | None]:
    """Return whether there is a value, and the record if it can be one."""
    ahead = AHEAD_BYTES if len(payload) <= SMALL_BYTES else _HEAD_BYTES
    try:
        length = read_length(stream, ahead)
    except ServerError as error:
        if error.code not in ("WRONGTYPE", "ASK"):
            raise
        return error.code == "WRONGTYPE", None
    if length < 0:
        return False, None
    record = _read_record(stream, length, payload, ahead)
    if stream.line(ahead):
        raise StreamError("a value without its end")
    return True, record


def _read_record(stream: Stream, length: int, payload: memoryview, ahead: int) -> Record | None:
    stored_bytes = length - HEADER_BYTES
    if not 0 <= stored_bytes <= len(payload):  # we never wrote that length: skip it
        stream.skip(length)
        return None
    header = stream.take(HEADER_BYTES)
    # Only an unencoded payload has the payload's length: it is received in place.
    stored = payload if stored_bytes == len(payload) else memoryview(bytearray(stored_bytes))
    stream.fill(stored, ahead)
    return Record(header, stored)
