"""Stream: a connected socket for one verb, bounded by the verb's deadline; and the commands and
replies of RESP on it, as far as the remote tier uses them.

Version 2 of RESP needs no greeting and works with every server; nothing of version 3 is used.
"""

from __future__ import annotations

import math
import re
import socket
import ssl
import struct
from collections.abc import Sequence

from tiers.block import Buffer, after
from tiers.errors import KVTiersError
from tiers.remote.deadline import Deadline

AHEAD_BYTES = 64 << 10
"""Most bytes received ahead of what the caller reads."""

PARTS = 512
"""Most parts in one sendmsg; Linux allows 1,024."""

RECORD_BYTES = 16 << 10
"""Most bytes in one TLS record."""

_TIMEVAL = struct.Struct("@ll")
"""A kernel timeval: seconds and microseconds."""


class StreamError(KVTiersError, OSError):
    """The other side closed the connection, or sent a malformed reply."""


class Stream:
    """Sends from and receives into the caller's memory, without a copy; TLS copies once.

    Every wait is bounded by the time left, so a server that drips bytes can't prolong the verb.
    Methods raise TimeoutError, StreamError or another OSError; the connection is unusable after
    that. Not thread-safe: one verb owns it.
    """

    def __init__(self, connected: socket.socket, deadline: Deadline) -> None:
        self._socket = connected
        self.is_tls = isinstance(connected, ssl.SSLSocket)
        self._deadline = deadline
        self._waits = math.inf
        if not self.is_tls:
            # The kernel bounds the waits. Python's own timeout polls before each call, which costs
            # a system call and another turn for the interpreter's lock.
            connected.settimeout(None)
        self._ahead = bytearray(AHEAD_BYTES)
        self._view = memoryview(self._ahead)
        self._start = self._end = 0

    @property
    def is_drained(self) -> bool:
        """Whether everything received has been read."""
        return self._start == self._end

    def send(self, parts: Sequence[Buffer]) -> None:
        views = [memoryview(part) for part in parts if len(part)]
        while views:
            views = after(views, self._send_some(views[:PARTS]))

    def line(self, ahead: int = AHEAD_BYTES) -> bytes:
        """Read the next line, without its end; each receive takes `ahead` bytes at most."""
        while (end := self._ahead.find(b"\r\n", self._start, self._end)) < 0:
            self._look_ahead(ahead)
        line = bytes(self._view[self._start : end])
        self._start = end + 2
        return line

    def peek(self, least: int) -> bytes:
        """The bytes received and not read: `least` of them or more, AHEAD_BYTES at most. Missing
        bytes are received at once, since each receive takes a turn for the interpreter's lock."""
        while (have := self._end - self._start) < min(least, AHEAD_BYTES):
            self._look_ahead(min(least, AHEAD_BYTES) - have, socket.MSG_WAITALL)
        return bytes(self._view[self._start : self._end])

    def passes(self, reply: bytes) -> bool:
        """Whether the next bytes received are this whole reply; they are then read."""
        if not self._ahead.startswith(reply, self._start, self._end):
            return False
        self._start += len(reply)
        return True

    def take(self, count: int) -> bytes:
        """Read the next `count` bytes, AHEAD_BYTES at most; receives none beyond them."""
        while (have := self._end - self._start) < count:
            self._look_ahead(count - have)
        self._start += count
        return bytes(self._view[self._start - count : self._start])

    def fill(self, memory: memoryview, ahead: int = 0) -> None:
        """Fill `memory` with the next bytes, and receive up to `ahead` bytes beyond it."""
        have = min(len(memory), self._end - self._start)
        memory[:have] = self._view[self._start : self._start + have]
        self._start += have
        while have < len(memory):  # and nothing is ahead
            have += self._receive(memory[have:], self._view[:ahead])
            self._start, self._end = 0, max(0, have - len(memory))

    def scatter(self, memory: Sequence[memoryview], flags: int = 0) -> int:
        """Receive into these views, one after the other, at least one byte; return how many bytes.
        Nothing may be ahead; not over TLS."""
        return self._receive(*memory[:PARTS], flags=flags)

    def unread(self, received: bytes) -> None:
        """Give back bytes that `scatter` received, to be read next."""
        self._ahead = bytearray(received.ljust(AHEAD_BYTES, b"\0"))
        self._view = memoryview(self._ahead)
        self._start, self._end = 0, len(received)

    def skip(self, count: int) -> None:
        """Discard the next `count` bytes."""
        while count:
            if self.is_drained:
                self._start, self._end = 0, self._receive(self._view)
            step = min(count, self._end - self._start)
            self._start += step
            count -= step

    def _look_ahead(self, most: int, flags: int = 0) -> None:
        have = self._end - self._start
        if have >= AHEAD_BYTES:
            raise StreamError("a line without an end")
        self._view[:have] = self._view[self._start : self._end]
        self._start, self._end = 0, have
        self._end += self._receive(self._view[have : have + most], flags=flags)

    def _receive(self, *memory: memoryview, flags: int = 0) -> int:
        self._limit_waits()
        try:
            if self.is_tls:  # which has no recvmsg_into
                count = self._socket.recv_into(memory[0])
            else:
                count = self._socket.recvmsg_into(memory, 0, flags)[0]
        except BlockingIOError:
            raise TimeoutError("no answer in time") from None
        if not count:
            raise StreamError("the server closed the connection")
        return count

    def _send_some(self, views: list[memoryview]) -> int:
        self._limit_waits()
        try:
            if self.is_tls:  # which has no sendmsg
                return self._socket.send(_one_record(views))
            return self._socket.sendmsg(views)
        except BlockingIOError:
            raise TimeoutError("nothing taken in time") from None

    def _limit_waits(self) -> None:
        """Bound the next wait by the time left, within a tenth."""
        left = self._deadline.left()
        if left >= 0.9 * self._waits:
            return
        self._waits = left
        if self.is_tls:
            self._socket.settimeout(left)
        else:
            limit = _TIMEVAL.pack(*divmod(int(left * 1e6) + 1, 10**6))
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)


def _one_record(views: list[memoryview]) -> Buffer:
    """Join the first views to one TLS record: each record costs the same, however short."""
    if len(views[0]) >= RECORD_BYTES:
        return views[0]
    joined = bytearray()
    for view in views:
        joined += view[: RECORD_BYTES - len(joined)]
        if len(joined) == RECORD_BYTES:
            break
    return joined


OK = b"+OK\r\n"
"""The reply to a SET."""

_FLAGS = re.compile(rb"(?::[01]\r\n)*+")
_FLAG_BYTES = len(b":1\r\n")
_ONE = ord("1")


class ServerError(KVTiersError):
    """An error reply. `code` is its first word: OOM, WRONGTYPE, MOVED, ASK, NOAUTH..."""

    @property
    def code(self) -> str:
        return str(self).partition(" ")[0]


def command(*words: bytes) -> bytes:
    """Encode a command: an array of bulk strings."""
    return array_header(len(words)) + b"".join(map(bulk, words))


def each_command(verb: bytes, names: Sequence[bytes], *after: bytes) -> bytes:
    """Encode a command for each name: the verb, the name, and what comes after it. Names of one
    length, as a prompt's are, cost a tenth of `command` each."""
    if len({*map(len, names)}) > 1:
        return b"".join(command(verb, name, *after) for name in names)
    front = array_header(2 + len(after)) + bulk(verb) + bulk_header(len(names[0]))
    tail = b"\r\n" + b"".join(map(bulk, after))
    return front + (tail + front).join(names) + tail


def array_header(words: int) -> bytes:
    """Encode the header of an array (a command) of that many words."""
    return b"*%d\r\n" % words


def bulk(word: bytes) -> bytes:
    return bulk_header(len(word)) + word + b"\r\n"


def bulk_header(length: int) -> bytes:
    """Encode the header of a bulk string (a word or value) of that many bytes."""
    return b"$%d\r\n" % length


def read_status(stream: Stream) -> None:
    """Read a simple string, such as OK. Raises ServerError for an error reply."""
    _read(stream, b"+", AHEAD_BYTES)


def read_integer(stream: Stream) -> int:
    """Read an integer. Raises ServerError."""
    return _number(_read(stream, b":", AHEAD_BYTES))


def read_flags(stream: Stream, most: int) -> list[bool]:
    """Read up to `most` integers, one at least: whether each is more than 0. Raises ServerError.

    Waits for the fewest bytes that `most` answers can have.
    """
    seen = stream.peek(most * _FLAG_BYTES)
    plain = _FLAGS.match(seen)
    size = min(plain.end() if plain else 0, most * _FLAG_BYTES)
    if not size:
        return [read_integer(stream) > 0]
    stream.skip(size)
    return [flag == _ONE for flag in seen[1:size:_FLAG_BYTES]]


def read_length(stream: Stream, ahead: int) -> int:
    """Read the header of a bulk string: its length, -1 if there is no value. Raises ServerError.

    `ahead`: most bytes to receive beyond the header, so that the value stays in the socket.
    """
    length = _number(_read(stream, b"$", ahead))
    if length < -1:
        raise StreamError("a malformed length in the reply")
    return length


def _read(stream: Stream, kind: bytes, ahead: int) -> bytes:
    line = stream.line(ahead)
    if line.startswith(b"-"):
        raise ServerError(line[1:].decode(errors="replace"))
    if line[:1] != kind:
        raise StreamError("not the reply of a Redis server")
    return line[1:]


def _number(digits: bytes) -> int:
    if not digits.removeprefix(b"-").isdigit() or len(digits) > 20:
        raise StreamError("a malformed number in the reply")
    return int(digits)
