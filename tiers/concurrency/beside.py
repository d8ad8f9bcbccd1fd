"""A process beside an engine's, to whose memory the engine's process copies payloads.

It has an interpreter of its own, so that what it does with them asks nobody here for the
interpreter's lock. Each hears the other by a socket: a length and JSON. It ends when the engine's
process closes the socket, or ends.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import math
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from tiers.errors import KVTiersError

PART_BYTES = 16 << 20
"""Payloads that are copied at once, one block at least; the process works on what it has while the
next are copied. With a quarter of it stores were a fourth faster, and an engine's thread lost twice
as much by them: each message has threads here ask for the interpreter's lock."""
ANSWER_BYTES = 1 << 14
"""Most answers have fewer, and are read by one call: after each, a thread asks for the lock."""
CLOSE_SECONDS = 20.0
"""How long it may take to end when it is asked to: a store's guard waits 30 s for all of it."""
KILL_SECONDS = 1.0
ENDING_SECONDS = 0.1
"""How long one that is gone may take to have ended."""
LOOKED_EVERY_S = 5.0
"""Seconds between two looks whether the engine's process is there: another that it was forked into
may keep the socket open, and a put may hang."""

_SERVE = """import sys
sys.path[:] = sys.argv[5:]
from importlib import import_module
serve = import_module(sys.argv[2]).serve
serve(*map(int, sys.argv[3:5]))"""
"""Nothing is imported before the path is the engine's: a module in the folder where it runs would
be taken for Python's own."""
_LENGTH = struct.Struct("<Q")

_libc = ctypes.CDLL(None, use_errno=True)


class CannotServe(KVTiersError):
    """The process can't be had, or not be given payloads; says why."""


class Beside:
    """A process that runs `serve` of a module. Used by one thread at a time, but for `close`."""

    def __init__(self, name: str, module: str) -> None:
        """`name`: what lists of processes show. Raises whatever a beginning may raise."""
        self._socket, theirs = socket.socketpair()
        # Python passes over what is no text there.
        path = (place for place in sys.path if isinstance(place, str))
        self._parent = os.getpid()
        # Not the number of a standard stream: an engine may have closed its own.
        with theirs, socket.socket(fileno=fcntl.fcntl(theirs, fcntl.F_DUPFD_CLOEXEC, 3)) as given:
            numbers = map(str, (given.fileno(), self._parent))
            self._process = subprocess.Popen(
                [sys.executable, "-c", _SERVE, f"kvtiers-{name}", module, *numbers, *path],
                pass_fds=[given.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )
        self.number, self.began = self._process.pid, time.monotonic()

    def has_answered(self, seconds: float = 0) -> bool:
        """Whether it says something that nobody has read, or ends, within so many."""
        asked = select.poll()
        asked.register(self._socket, select.POLLIN)
        return bool(asked.poll(None if seconds == math.inf else 1000 * seconds))

    def send(self, message: Mapping[str, Any]) -> None:
        """As `send`. Raises CannotServe if it takes too long (see `limit`)."""
        with self._in_time():
            send(self._socket, message)

    def receive(self) -> dict[str, Any]:
        """As `receive`: the next answer. Raises CannotServe if it takes too long (see `limit`)."""
        with self._in_time():
            return receive(self._socket, ANSWER_BYTES)

    def read(self, length: int) -> bytes:
        """So many bytes, which it sends without a length. Raises as `receive` does."""
        with self._in_time():
            return _read(self._socket, length)

    @contextmanager
    def _in_time(self) -> Iterator[None]:
        try:
            yield
        except BlockingIOError as error:
            raise CannotServe("it has not answered in time") from error

    def copy(self, pieces: Sequence[tuple[int, int, int]]) -> None:
        """See `copy_into`. Raises CannotServe once the process has ended: its number may be
        another's by now."""
        if self._process.poll() is not None:
            raise CannotServe("it has ended")
        copy_into(self.number, pieces)

    def limit(self, seconds: float) -> None:
        """Let `send` and `receive` wait so long. The kernel counts it: with a timeout of Python's
        each call would be two."""
        microseconds = 0 if seconds == math.inf else int(1e6 * seconds) or 1
        limit = struct.pack("ll", *divmod(microseconds, 10**6))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)

    def finish(self) -> None:
        """Have it end what it does, and end. Does not wait."""
        if os.getpid() == self._parent:  # a forked child has the socket, too
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Wait until it has ended; kill it if that takes too long."""
        try:
            self._process.wait(CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
        self._socket.close()

    def kill(self) -> str:
        """End it; say how it had ended before, if it had."""
        how = ""
        try:
            status = self._process.wait(ENDING_SECONDS)
            how = f"it was killed by signal {-status}" if status < 0 else f"it ended with {status}"
        except subprocess.TimeoutExpired:
            # While it waits for a device it can't end; and a filter may forbid signals.
            with suppress(subprocess.TimeoutExpired, PermissionError):
                self._process.kill()
                self._process.wait(KILL_SECONDS)
        self._socket.close()
        return how


@contextmanager
def serving(handle: int, parent: int) -> Iterator[socket.socket]:
    """The socket to the engine's process, `parent`, in one beside it. The body ends with it."""
    for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(name, signal.SIG_IGN)  # it is the engine's to end this one
    os.set_inheritable(handle, False)  # the engine waits until nobody has it any more
    with socket.socket(fileno=handle) as engine, suppress(EOFError, ConnectionError):
        threading.Thread(target=_end_with, args=(parent, engine), daemon=True).start()
        yield engine


def offered(memory: memoryview, starts: Sequence[int]) -> list[int]:
    """The addresses of places in memory of a process beside, to tell the engine's. Raises OSError
    where nothing can be copied there."""
    start = ctypes.addressof(ctypes.c_ubyte.from_buffer(memory))
    copy_into(os.getpid(), [(start, start, 1)])  # a filter may kill who tries
    return [start + at for at in starts]


def _end_with(parent: int, engine: socket.socket) -> None:
    """End this process when its parent has ended, whatever else it does."""
    while os.getppid() == parent:
        time.sleep(LOOKED_EVERY_S)
    with suppress(OSError):
        engine.shutdown(socket.SHUT_RD)
    time.sleep(CLOSE_SECONDS)
    os._exit(1)


def copy_into(process: int, pieces: Sequence[tuple[int, int, int]]) -> None:
    """Copy from addresses here to addresses there, so many bytes each. Raises OSError."""
    # As `struct iovec`, of which an object each would take ten times as long, under the lock.
    sources = array("Q", [part for start, _, size in pieces for part in (start, size)])
    targets = array("Q", [part for _, there, size in pieces for part in (there, size)])
    here, there = (ctypes.c_void_p(ranges.buffer_info()[0]) for ranges in (sources, targets))
    write = _libc.process_vm_writev
    write.restype = ctypes.c_ssize_t
    done = write(process, here, len(pieces), there, len(pieces), 0)
    if done != sum(size for _, _, size in pieces):
        number = ctypes.get_errno() if done < 0 else errno.EFAULT
        raise OSError(number, f"its memory can't be written: {os.strerror(number)}")


def send(target: socket.socket, message: Mapping[str, Any]) -> None:
    """Send a message. Raises OSError."""
    data = json.dumps(message).encode()
    target.sendall(_LENGTH.pack(len(data)) + data)


def receive(source: socket.socket, ahead: int = 0) -> dict[str, Any]:
    """Wait for a message. `ahead`: bytes that are read with its length, where no other message may
    follow. Raises OSError, EOFError at the end, and ValueError for another thing."""
    data = source.recv(_LENGTH.size + ahead)
    data += _read(source, _LENGTH.size - len(data))
    (length,) = _LENGTH.unpack_from(data)
    data += _read(source, _LENGTH.size + length - len(data))
    found: dict[str, Any] = json.loads(data[_LENGTH.size :])
    return found


def _read(source: socket.socket, length: int) -> bytes:
    data = b""
    while len(data) < length:  # who was stopped in the midst of it has less
        if not (more := source.recv(length - len(data), socket.MSG_WAITALL)):
            raise EOFError("it says nothing any more")
        data += more
    return data
