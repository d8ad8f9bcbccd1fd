"""Values between a connection and the caller's memory, several of them under way at a time."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from tiers.block import HEADER_BYTES, Buffer, Checksum
from tiers.remote.resp import ServerError, command, opening, opening_of, read_length, read_status
from tiers.remote.stream import AHEAD_BYTES, PIECE_BYTES, Stream, StreamError
from tiers.remote.window import LEAST_BYTES, Window

SEND_BYTES = 128 << 10
"""Small values share a system call up to this many bytes."""

_HEAD_BYTES = len("\r\n") + len("$536870912\r\n") + HEADER_BYTES
"""What may be received before a payload: the end of the value before, a length, a header."""


class Record(NamedTuple):
    """A value: the header of `tiers.block`, and the stored bytes behind it; their checksum, too,
    where it was taken as they came."""

    header: Buffer
    stored: Buffer
    checksum: bytes | None = None


class Wanted(NamedTuple):
    """A value to load: its name, and the memory for stored bytes of just that length."""

    name: bytes
    payload: memoryview


SMALL_BYTES = 16 << 10
"""Values up to this many bytes arrive several at a time, and are copied once more: each receiving
lets another thread of the process run, which may keep it for 5 ms."""

Arrived = Callable[[int, Record | None], None]
"""Told the position of each value there is, and the value; None: it can't be a record."""


def store(
    stream: Stream,
    names: Sequence[bytes],
    record: Callable[[int], Record],
    expiry: Sequence[bytes],
    window: Window,
) -> list[bool]:
    """SET the values; False for those that were refused.

    `record` makes the value of a position just before it is sent, while the server is busy with
    those before it. A server without memory would refuse the rest after they travelled, so
    nothing is sent after its first refusal.
    """
    began = time.monotonic()
    sender = _Sender(stream)
    for position, name in enumerate(names):
        sender.add(_set_parts(name, record(position), expiry))
        sender.await_answers(window.num_bytes)
        if sender.is_refused:
            break
    sender.flush()
    sender.await_answers(0)
    _tell(window, sender.sent, began)
    return sender.stored + [False] * (len(names) - len(sender.stored))


class _Sender:
    """SETs on their way: small ones are sent together, and answers are awaited late."""

    def __init__(self, stream: Stream) -> None:
        self.stored: list[bool] = []
        self.is_refused = False
        self.sent = 0
        self._stream = stream
        self._parts: list[Buffer] = []
        self._unsent = 0
        self._under_way: deque[int] = deque()

    def add(self, parts: Sequence[Buffer]) -> None:
        size = sum(len(part) for part in parts)
        self._parts += parts
        self._unsent += size
        self.sent += size
        self._under_way.append(size)
        if self._unsent >= SEND_BYTES:
            self.flush()

    def flush(self) -> None:
        self._stream.send(self._parts)
        self._parts, self._unsent = [], 0

    def await_answers(self, most: int) -> None:
        """Wait until at most that many bytes, or one value, are sent and not answered."""
        under_way = sum(self._under_way) - self._unsent
        spared = 1 if most else 0
        while under_way > most and len(self._under_way) > spared:
            under_way -= self._under_way.popleft()
            self.stored.append(self._read_answer())

    def _read_answer(self) -> bool:
        try:
            read_status(self._stream)
        except ServerError as error:
            if error.code not in ("OOM", "ASK"):
                raise
            self.is_refused |= error.code == "OOM"
            return False
        return True


def _set_parts(name: bytes, value: Record, expiry: Sequence[bytes]) -> list[Buffer]:
    length = len(value.header) + len(value.stored)
    words = opening(3 + len(expiry)) + b"$3\r\nSET\r\n" + opening_of(len(name)) + name + b"\r\n"
    tail = b"".join(opening_of(len(word)) + word + b"\r\n" for word in expiry)
    return [words + opening_of(length) + value.header, value.stored, b"\r\n" + tail]


def load(stream: Stream, wanted: Sequence[Wanted], arrived: Arrived, window: Window) -> None:
    """GET the values into their memory, telling `arrived` of each while the next are under way."""
    commands = [command(b"GET", want.name) for want in wanted]
    size = max(HEADER_BYTES + len(want.payload) for want in wanted)
    ahead = max(2, window.num_bytes // size)  # of one alone the wire would idle for a round trip
    asked = moved = 0
    began = time.monotonic()
    for position, want in enumerate(wanted):
        # Asked for by halves of the window: a small send for each value costs as much as it.
        if asked < len(wanted) and asked - position <= ahead // 2:
            upto = position + ahead
            stream.send([b"".join(commands[asked:upto])])
            asked = min(upto, len(wanted))
        found, record = _read_value(stream, want.payload)
        if found:
            arrived(position, record)
            moved += size
    _tell(window, moved, began)


def _tell(window: Window, moved: int, began: float) -> None:
    if moved >= LEAST_BYTES:  # less says nothing about the rate
        window.moved(moved, time.monotonic() - began)


def _read_value(stream: Stream, payload: memoryview) -> tuple[bool, Record | None]:
    """Whether there is a value, and the record if it can be one."""
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
    if not 0 <= stored_bytes <= len(payload):  # no length of ours: not a byte goes anywhere
        stream.skip(length)
        return None
    header = stream.take(HEADER_BYTES)
    # Only what is stored as it was can be as long as the payload: it comes straight in place.
    stored = payload if stored_bytes == len(payload) else memoryview(bytearray(stored_bytes))
    if stored_bytes <= PIECE_BYTES:
        stream.fill(stored, ahead)
        return Record(header, stored)
    checksum = Checksum()
    stream.fill(stored, ahead, checksum.add)
    return Record(header, stored, checksum.digest())
