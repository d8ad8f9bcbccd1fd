"""Stream: a connected socket for the length of one verb, which its deadline ends."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence

from tiers.block import Buffer

AHEAD_BYTES = 64 << 10
"""Most that is received ahead of what is asked for."""

PARTS = 512
"""Most parts of one sendmsg; Linux takes 1,024."""


class StreamError(OSError):
    """The other side closed the connection, or answered what is no reply."""


class Deadline:
    """A moment, `seconds` from now, after which waiting ends."""

    def __init__(self, seconds: float) -> None:
        self._ends = time.monotonic() + seconds

    def left(self) -> float:
        """Seconds left, more than zero. Raises TimeoutError when it is over."""
        left = self._ends - time.monotonic()
        if left <= 0:
            raise TimeoutError("no answer in time")
        return left


class Stream:
    """Sends from and receives into memory of the caller's, without a copy in between.

    Every wait is for what is left of the deadline, so a server that drips a byte now and then
    can't prolong it. Methods raise TimeoutError, StreamError or another OSError; the connection
    is of no use afterwards. Not thread-safe: one verb owns it.
    """

    def __init__(self, connected: socket.socket, deadline: Deadline) -> None:
        self._socket = connected
        self._deadline = deadline
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

    def fill(self, memory: memoryview, ahead: int = 0) -> None:
        """Fill the memory with what comes next, and receive up to `ahead` bytes beyond it."""
        have = min(len(memory), self._end - self._start)
        memory[:have] = self._view[self._start : self._start + have]
        self._start += have
        while have < len(memory):  # and nothing is ahead
            have += self._receive(memory[have:], self._view[:ahead])
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
        self._socket.settimeout(self._deadline.left())
        count = self._socket.recvmsg_into(memory)[0]
        if not count:
            raise StreamError("the server closed the connection")
        return count

    def _send_some(self, views: list[memoryview]) -> int:
        self._socket.settimeout(self._deadline.left())
        return self._socket.sendmsg(views)
