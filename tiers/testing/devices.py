"""What Python code does I/O by, as the kit sees it: it can fail there, or be forbidden."""

from __future__ import annotations

import builtins
import errno
import io
import os
import resource
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import Any
from unittest.mock import patch

_FILES = (
    *("open", "read", "readv", "pread", "preadv", "write", "writev", "pwrite", "pwritev", "stat"),
    *("unlink", "remove", "rename", "replace", "link", "truncate", "ftruncate", "scandir"),
    *("listdir", "fsync", "fdatasync", "posix_fallocate"),
)
_SOCKETS = ("connect", "send", "sendall", "sendmsg", "recv", "recv_into", "recvmsg", "recvmsg_into")
_PLACES: tuple[tuple[object, str], ...] = (
    (builtins, "open"),
    (io, "open"),
    (time, "sleep"),
    *((os, name) for name in _FILES if hasattr(os, name)),
    *((socket.socket, name) for name in _SOCKETS),
)


@contextmanager
def watched(before: Callable[[str], None]) -> Iterator[ExitStack]:
    """Call `before` with a function's name before each call that Python code makes of a file, a
    socket or `sleep`, on its thread; what it raises is what the call raises. Not of C code. Yields
    what ends it."""
    with ExitStack() as stack:
        for owner, name in _PLACES:
            stack.enter_context(patch.object(owner, name, _asking(owner, name, before)))
        mine = WATCHES.get([])
        mine.append(stack)
        stack.callback(mine.remove, stack)
        yield stack


WATCHES: ContextVar[list[ExitStack]] = ContextVar("watches")
"""What ends those that a thread has begun: whoever waits for it does, if it hangs."""


def _asking(owner: object, name: str, before: Callable[[str], None]) -> Callable[..., Any]:
    real = getattr(owner, name)

    def call(*given: Any, **named: Any) -> Any:
        if not _is_pair(given):
            before(name)
        return real(*given, **named)

    return call


def _is_pair(given: tuple[Any, ...]) -> bool:
    """Whether this is a socket that leads nowhere else, as threads and event loops wake each other
    by."""
    if not given or not isinstance(given[0], socket.socket):
        return False
    with suppress(OSError):
        return given[0].family == socket.AF_UNIX and not given[0].getpeername()
    return False


@contextmanager
def failing_devices() -> Iterator[None]:
    """Meanwhile files can't be opened, read or written, and sockets are cut; no file can grow,
    whoever writes it."""

    def fail(name: str) -> None:
        if name in _SOCKETS:
            raise ConnectionResetError(errno.ECONNRESET, "cut by the kit")
        if name != "sleep":
            raise OSError(errno.ENOBUFS, "no I/O, says the kit")

    with failing_writes(), watched(fail):
        yield


@contextmanager
def failing_writes(of_all: bool = True) -> Iterator[None]:
    """Meanwhile files can be opened, made, read and named, and nobody writes into them; unless it
    is `of_all`, C code does: an index, perhaps, whose store's own writes fail."""

    def fail(name: str) -> None:
        if name in ("write", "writev", "pwrite", "pwritev"):
            raise OSError(errno.EIO, "no write, says the kit")

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with watched(fail) as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_FSIZE, (soft, hard))
        resource.setrlimit(resource.RLIMIT_FSIZE, (0 if of_all else soft, hard))
        yield


def open_files() -> int:
    """File descriptors and children of this process; 0 where that is not known."""
    children = 0
    for task in Path("/proc/self/task").glob("*/children"):
        with suppress(OSError):  # a thread that has ended, whose children are another's
            children += len(task.read_bytes().split())
    with suppress(OSError):
        return len(os.listdir("/proc/self/fd")) + children
    return 0


def own_bytes() -> int:
    """Memory of this process that is no file's; 0 where that is not known."""
    with suppress(OSError), open("/proc/self/status") as file:
        lines = dict(line.split(":", 1) for line in file)
        return int(lines.get("RssAnon", "0 kB").split()[0]) << 10
    return 0
