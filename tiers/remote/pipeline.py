"""Moves values between a connection and the caller's memory, several in flight at a time."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from tiers.block import HEADER_BYTES, Buffer, Checksum
from tiers.remote.resp import (
    ServerError,
    array_header,
    bulk,
    bulk_header,
    command,
    read_length,
    read_status,
)
from tiers.remote.stream import AHEAD_BYTES, PIECE_BYTES, Stream, StreamError
from tiers.remote.window import LEAST_BYTES, Window

SEND_BYTES = 128 << 10
"""Small values are sent together, up to this many bytes in one system call."""

_HEAD_BYTES = len("\r\n") + len("$536870912\r\n") + HEADER_BYTES
"""Most that is received before a payload: the end of the previous value, a length, a header."""


class Record(NamedTuple):
    """A value: the header of `tiers.block` and the stored bytes after it. `checksum`: of the stored
    bytes, if it was computed as they arrived."""

    header: Buffer
    stored: Buffer
    checksum: bytes | None = None


class GetRequest(NamedTuple):
    """A value to load: its name, and memory of the length of its payload."""

    name: bytes
    payload: memoryview


SMALL_BYTES = 16 << 10
"""Values up to this many bytes are received several at a time, and copied once more: each receive
lets another thread of the process run, which may take 5 ms."""

OnValue = Callable[[int, Record | None], None]
"""Called with the position of each value that exists, and the value; None: it can't be a record."""


def store(
    stream: Stream,
    names: Sequence[bytes],
    record: Callable[[int], Record],
    expiry: Sequence[bytes],
    window: Window,
) -> list[bool]:
    """SET under `names[i]` the value `record(i)`; False for each that was refused.

    `record` is called just before its value is sent, while the server works on the previous ones.
    Nothing is sent after the first refusal: a server that is out of memory would refuse the rest,
    too, after it had travelled.
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
    _report(window, sender.sent, began)
    return sender.stored + [False] * (len(names) - len(sender.stored))


class _Sender:
    """SETs in flight: sends small ones together, and reads their answers late."""

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
        """Wait until at most `most` bytes, or one value, are sent and not answered."""
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
    begin = array_header(3 + len(expiry)) + bulk(b"SET") + bulk(name)
    length = bulk_header(len(value.header) + len(value.stored))
    return [begin + length + value.header, value.stored, b"\r\n" + b"".join(map(bulk, expiry))]


def load(stream: Stream, requests: Sequence[GetRequest], on_value: OnValue, window: Window) -> None:
    """GET the values into their memory; call `on_value` for each while the next are in flight."""
    commands = [command(b"GET", request.name) for request in requests]
    size = max(HEADER_BYTES + len(request.payload) for request in requests)
    ahead = max(2, window.num_bytes // size)  # with one the link would idle for a round trip
    requested = moved = 0
    began = time.monotonic()
    for position, request in enumerate(requests):
        # Requests go out by halves of the window: one send for each costs as much as its value.
        if requested < len(requests) and requested - position <= ahead // 2:
            upto = position + ahead
            stream.send([b"".join(commands[requested:upto])])
            requested = min(upto, len(requests))
        found, record = _read_value(stream, request.payload)
        if found:
            on_value(position, record)
            moved += size
    _report(window, moved, began)


def _report(window: Window, moved: int, began: float) -> None:
    if moved >= LEAST_BYTES:  # fewer bytes say nothing about the rate
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
    if stored_bytes <= PIECE_BYTES:
        stream.fill(stored, ahead)
        return Record(header, stored)
    checksum = Checksum()
    stream.fill(stored, ahead, checksum.update)
    return Record(header, stored, checksum.digest())
