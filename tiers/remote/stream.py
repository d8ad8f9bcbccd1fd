"""Stream: a connected socket for the length of one verb, which its deadline ends."""

from __future__ import annotations

import math
import socket
import ssl
import struct
import time
from collections.abc import Callable, Sequence

from tiers.block import Buffer

AHEAD_BYTES = 64 << 10
"""Most that is received ahead of what is asked for."""

PARTS = 512
"""Most parts of one sendmsg; Linux takes 1,024."""

PIECE_BYTES = 128 << 10
"""Most that is received at once where each piece is looked at: it is still in the processor's
caches then, and the server may send more while it is. 64 values of 2 MiB came at 3.0 GB/s, with
2.8 by 256 KiB, 2.4 by 512 KiB, and 2.5 where they were looked at as a whole."""

Taken = Callable[[memoryview], object]

RECORD_BYTES = 16 << 10
"""Most that one record of TLS carries."""

_TIMEVAL = struct.Struct("@ll")
"""Seconds and microseconds, as the kernel wants them."""


class StreamError(OSError):
    """The other side closed the connection, or answered what is no reply."""


class Deadline:
    """A moment, `seconds` from now, after which waiting ends."""

    def __init__(self, seconds: float) -> None:
        self._ends = time.monotonic() + seconds

    @property
    def is_over(self) -> bool:
        """Whether no time is left."""
        return self._ends <= time.monotonic()

    def left(self) -> float:
        """Seconds left, more than zero. Raises TimeoutError when it is over."""
        left = self._ends - time.monotonic()
        if left <= 0:
            raise TimeoutError("no answer in time")
        return left

    def half(self) -> Deadline:
        """A deadline when half of what is left is over. Raises TimeoutError when nothing is."""
        return Deadline(self.left() / 2)


class Stream:
    """Sends from and receives into memory of the caller's, without a copy in between.

    Every wait is for what is left of the deadline, so a server that drips a byte now and then
    can't prolong it. Methods raise TimeoutError, StreamError or another OSError; the connection
    is of no use afterwards. Not thread-safe: one verb owns it. Over TLS bytes are copied once, by
    the cipher.
    """

    def __init__(self, connected: socket.socket, deadline: Deadline) -> None:
        self._socket = connected
        self._is_tls = isinstance(connected, ssl.SSLSocket)
        self._deadline = deadline
        self._waits = math.inf
        if not self._is_tls:
            # The kernel bounds the waits: Python's own way asks before each call whether it would
            # wait, which costs a system call more and another turn of whoever has the interpreter.
            connected.settimeout(None)
        self._ahead = bytearray(AHEAD_BYTES)
        self._view = memoryview(self._ahead)
        self._start = self._end = 0

    @property
    def is_drained(self) -> bool:
        """Whether all that was received has been asked for."""
        return self._start == self._end

    def send(self, parts: Sequence[Buffer]) -> None:
        """Send the parts, one behind the other."""
        views = [memoryview(part) for part in parts if len(part)]
        first = 0
        while first < len(views):
            sent = self._send_some(views[first : first + PARTS])
            while sent:
                if sent < len(views[first]):
                    views[first] = views[first][sent:]
                    break
                sent -= len(views[first])
                first += 1

    def line(self, ahead: int = AHEAD_BYTES) -> bytes:
        """The next line, without its end; to find it, `ahead` bytes at most are received a time."""
        while (end := self._ahead.find(b"\r\n", self._start, self._end)) < 0:
            self._look_ahead(ahead)
        line = bytes(self._view[self._start : end])
        self._start = end + 2
        return line

    def take(self, count: int) -> bytes:
        """The next bytes, AHEAD_BYTES at most; not one beyond them is received."""
        while (have := self._end - self._start) < count:
            self._look_ahead(count - have)
        self._start += count
        return bytes(self._view[self._start - count : self._start])

    def fill(self, memory: memoryview, ahead: int = 0, taken: Taken | None = None) -> None:
        """Fill the memory with what comes next, and receive up to `ahead` bytes beyond it.

        `taken` is given each piece of the memory that was filled, PIECE_BYTES or less.
        """
        have = min(len(memory), self._end - self._start)
        memory[:have] = self._view[self._start : self._start + have]
        self._start += have
        if taken is not None:
            taken(memory[:have])
        while have < len(memory):  # and nothing is ahead
            if taken is None or len(memory) - have <= PIECE_BYTES:
                count = self._receive(memory[have:], self._view[:ahead])
            else:
                count = self._receive(memory[have : have + PIECE_BYTES])
            if taken is not None:
                taken(memory[have : have + count])
            have += count
            self._start, self._end = 0, max(0, have - len(memory))

    def skip(self, count: int) -> None:
        """Pass over what comes next."""
        while count:
            if self.is_drained:
                self._start, self._end = 0, self._receive(self._view)
            step = min(count, self._end - self._start)
            self._start += step
            count -= step

    def _look_ahead(self, most: int) -> None:
        have = self._end - self._start
        if have == AHEAD_BYTES:
            raise StreamError("a line without an end")
        self._view[:have] = self._view[self._start : self._end]
        self._start, self._end = 0, have
        self._end += self._receive(self._view[have : have + most])

    def _receive(self, *memory: memoryview) -> int:
        self._limit_waits()
        try:
            if self._is_tls:  # which has no recvmsg_into
                count = self._socket.recv_into(memory[0])
            else:
                count = self._socket.recvmsg_into(memory)[0]
        except BlockingIOError:
            raise TimeoutError("no answer in time") from None
        if not count:
            raise StreamError("the server closed the connection")
        return count

    def _send_some(self, views: list[memoryview]) -> int:
        self._limit_waits()
        try:
            if self._is_tls:  # which has no sendmsg
                return self._socket.send(_one_record(views))
            return self._socket.sendmsg(views)
        except BlockingIOError:
            raise TimeoutError("nothing taken in time") from None

    def _limit_waits(self) -> None:
        """Bound the next wait by what is left, give or take a tenth."""
        left = self._deadline.left()
        if self._is_tls:
            self._socket.settimeout(left)
        elif left < 0.9 * self._waits:
            self._waits = left
            limit = _TIMEVAL.pack(*divmod(int(left * 1e6) + 1, 10**6))
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)


def _one_record(views: list[memoryview]) -> Buffer:
    """The start of what is to be sent, in one piece: each record of its own would cost as much."""
    if len(views[0]) >= RECORD_BYTES:
        return views[0]
    joined = bytearray()
    for view in views:
        joined += view[: RECORD_BYTES - len(joined)]
        if len(joined) == RECORD_BYTES:
            break
    return joined
