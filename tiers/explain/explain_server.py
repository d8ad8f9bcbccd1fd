"""ExplainServer: answers whoever asks about requests, over a Unix socket of its own.

A daemon thread does it all: accept, read a question, answer, close. Nothing waits for it, and a
client costs it a bounded time and memory, whatever that client does.
"""

from __future__ import annotations

import logging
import os
import secrets
import selectors
import socket
import stat
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from tiers.concurrency.executors import widen_affinity
from tiers.errors import KVTiersError

logger = logging.getLogger(__name__)

MAX_QUESTION = 4096
"""Bytes of a question; a longer one is not answered."""
MAX_CLIENTS = 8
"""Clients at once; more wait in the socket's queue."""
QUEUE = 64
"""Clients that wait; more are turned away."""
CLIENT_SECONDS = 5.0
"""From a client's connection to the end of its answer; one that takes longer is cut off."""
SUFFIX = ".sock"

Answer = Callable[[bytes], bytes]
"""From a question, one line, to the whole answer. Never raises."""


class FolderRefused(KVTiersError):
    """The folder of the sockets can't be used as it is; says why, and what would do."""


def prepare_folder(folder: Path) -> None:
    """Make the folder, or check that nobody else can put sockets into it. Raises FolderRefused."""
    try:
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        info = folder.lstat()
    except OSError as error:
        raise FolderRefused(f"{folder}: {error.strerror}") from error
    if not stat.S_ISDIR(info.st_mode):
        raise FolderRefused(f"{folder} is no folder; name one")
    if info.st_uid not in (os.geteuid(), 0):
        raise FolderRefused(f"{folder} is of user {info.st_uid}; name one of the engine's user")
    if info.st_mode & 0o022:
        raise FolderRefused(f"others may write to {folder}; chmod go-w, or name another")


def remove_stale(folder: Path) -> None:
    """Remove sockets of engines that are gone: they refuse a connection."""
    for path in folder.glob(f"*{SUFFIX}"):
        with suppress(OSError), socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(0.2)
            try:
                probe.connect(str(path))
            except ConnectionRefusedError:
                path.unlink()


def listen(folder: Path) -> tuple[socket.socket, Path]:
    """Make this engine's socket, which only its user may open. Raises FolderRefused, OSError."""
    prepare_folder(folder)
    remove_stale(folder)
    name = f"{os.getpid()}-{secrets.token_hex(3)}"
    hidden, path = folder / f".{name}", folder / f"{name}{SUFFIX}"
    server = socket.socket(socket.AF_UNIX)
    try:
        server.bind(str(hidden))
        # Nobody connects before it listens, nor takes it for stale before it has its name.
        hidden.chmod(0o600)
        server.listen(QUEUE)
        server.setblocking(False)
        hidden.rename(path)
    except BaseException:
        server.close()
        hidden.unlink(missing_ok=True)
        raise
    return server, path


class _Client:
    """A connection: first its question comes, then its answer goes."""

    def __init__(self, connection: socket.socket, now: float) -> None:
        self.connection = connection
        self.until = now + CLIENT_SECONDS
        self.question = b""
        self.answer: memoryview | None = None

    def go_on(self, answer: Answer) -> bool:
        """Read or write what can be now; False: it is over."""
        if self.answer is None:
            part = self.connection.recv(MAX_QUESTION)
            self.question += part
            if len(self.question) > MAX_QUESTION or not part:
                return False
            if not self.question.endswith(b"\n"):
                return True
            self.answer = memoryview(answer(self.question))
            return True
        self.answer = self.answer[self.connection.send(self.answer[: 1 << 16]) :]
        return len(self.answer) > 0


class ExplainServer:
    """Listens in a folder until it is closed."""

    def __init__(self, folder: Path, answer: Answer) -> None:
        """Raises FolderRefused and OSError if it can't listen there."""
        self._answer = answer
        self._server, self.path = listen(folder)
        self._wake, self._woken = socket.socketpair()
        self._clients: dict[int, _Client] = {}
        self._thread = threading.Thread(target=self._serve, name="kvtiers-explain", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        widen_affinity()
        with selectors.DefaultSelector() as waiting:
            waiting.register(self._woken, selectors.EVENT_READ)
            while self._step(waiting):
                pass
            for client in self._clients.values():
                client.connection.close()

    def _step(self, waiting: selectors.DefaultSelector) -> bool:
        """Wait for something, and do it; False: the server is closed."""
        self._listen_if_free(waiting)
        for key, _ in waiting.select(0.5 if self._clients else None):
            if key.fileobj is self._woken:
                return False
            if key.fileobj is self._server:
                self._accept(waiting)
            else:
                self._go_on(waiting, self._clients[key.fd])
        now = time.monotonic()
        for client in [one for one in self._clients.values() if now > one.until]:
            self._end(waiting, client)
        return True

    def _listen_if_free(self, waiting: selectors.DefaultSelector) -> None:
        listens = self._server.fileno() in waiting.get_map()
        if not listens and len(self._clients) < MAX_CLIENTS:
            waiting.register(self._server, selectors.EVENT_READ)
        elif listens and len(self._clients) >= MAX_CLIENTS:
            waiting.unregister(self._server)

    def _accept(self, waiting: selectors.DefaultSelector) -> None:
        try:
            connection, _ = self._server.accept()
        except OSError:  # it has hung up, or descriptors are short
            time.sleep(0.05)
            return
        connection.setblocking(False)
        client = _Client(connection, time.monotonic())
        self._clients[connection.fileno()] = client
        waiting.register(connection, selectors.EVENT_READ)

    def _go_on(self, waiting: selectors.DefaultSelector, client: _Client) -> None:
        had_answer = client.answer is not None
        try:
            goes_on = client.go_on(self._answer)
        except BlockingIOError:
            return
        except OSError:
            goes_on = False
        if not goes_on:
            self._end(waiting, client)
        elif not had_answer and client.answer is not None:
            waiting.modify(client.connection, selectors.EVENT_WRITE)

    def _end(self, waiting: selectors.DefaultSelector, client: _Client) -> None:
        del self._clients[client.connection.fileno()]
        waiting.unregister(client.connection)
        client.connection.close()

    def close(self) -> None:
        """Stop answering, and remove the socket. Does not wait for clients."""
        self.path.unlink(missing_ok=True)
        self._wake.close()
        self._thread.join(1.0)
        self._server.close()
