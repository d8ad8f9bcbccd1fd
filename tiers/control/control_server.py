"""How does one ask a running engine? Its socket takes a question, and answers by a verb.

Daemon threads do it all: accept, read a question, answer, close. Nothing waits for them, and a
client costs one of them a bounded time and memory, whatever that client does.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, Field, ValidationError

from spec.errors import did_you_mean, one_of
from tiers.concurrency.executors import start_thread
from tiers.concurrency.file_locks import opened, try_lock
from tiers.errors import KVTiersError
from tiers.paths import foreign

PROTOCOL = 1
"""The version of questions and answers: that of `Question`."""
MAX_QUESTION = 1 << 20
"""Bytes of a question; a longer one is not answered. A chain's YAML fits in."""
MAX_CLIENTS = 4
"""Clients at once, each on a thread; more wait in the socket's queue."""
QUEUE = 64
"""Clients that wait; more are turned away."""
CLIENT_SECONDS = 5.0
"""From a client's connection to the end of its answer; one that takes longer is cut off."""
PAUSES = 20
"""Times as long as an answer took to make, until the next is made: whoever asks again and again
takes a twentieth of the interpreter from the engine's steps, at most."""
LONGEST_PAUSE = 0.5
TOUCH_SECONDS = 3600.0
"""Between touches of the socket: systemd-tmpfiles removes what is not touched for days."""
SUFFIX = ".sock"
Verb = Callable[[Mapping[str, Any]], Any]
"""From a question's parameters to what JSON takes. Returns at once, and raises QuestionRefused, or
ValidationError for parameters that are none."""


class QuestionRefused(KVTiersError):
    """A question has no answer; says why, and what would do."""


class FolderRefused(KVTiersError):
    """The folder of the sockets can't be used as it is; says why, and what would do."""


class Question(BaseModel, frozen=True, extra="forbid", strict=True):
    """One line of JSON: what an engine is asked."""

    version: Literal[1] = 1
    verb: str = Field(max_length=64)
    parameters: Mapping[str, Any] = Field(default_factory=dict)


def runtime_folder() -> Path:
    """Return where engines of this process's user listen if the chain names no folder. Never below
    /run/user/UID: it is there only while the user is logged in, and an engine may run longer."""
    user = os.geteuid()
    return Path(f"/tmp/kvtiers-{user}" if user else "/run/kvtiers")


def prepare_folder(folder: Path) -> None:
    """Make the folder, or check that nobody else can put sockets into it. Raises FolderRefused."""
    try:
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        info = folder.lstat()
    except OSError as error:
        raise FolderRefused(f"{folder}: {error.strerror}; make it, or name another") from error
    if not stat.S_ISDIR(info.st_mode):
        raise FolderRefused(f"{folder} is no folder; name one")
    if why := foreign(info):
        raise FolderRefused(f"{folder} {why}")


@contextmanager
def short_path(path: Path) -> Iterator[str]:
    """Give a path of the same socket that is short enough: one has 107 bytes at most."""
    with opened(path.parent, os.O_PATH | os.O_DIRECTORY) as folder:
        yield f"/proc/self/fd/{folder}/{path.name}"


def _is_stale(path: Path) -> bool:
    """Whether the engine of a socket is gone: it refuses a connection."""
    with socket.socket(socket.AF_UNIX) as probe, short_path(path) as short:
        probe.settimeout(0.2)
        # Any other error says that the socket's queue is full, or the socket another user's.
        return probe.connect_ex(short) == errno.ECONNREFUSED


def _remove_stale(folder: Path) -> None:
    """Remove the sockets of engines that are gone; one process at a time. Of two, one could remove
    what the other has, and a new engine of another container take that name meanwhile."""
    with opened(folder, os.O_RDONLY | os.O_DIRECTORY) as handle:
        for path in folder.glob(f"*{SUFFIX}") if try_lock(handle) else ():
            with suppress(OSError):
                if _is_stale(path):
                    path.unlink()


def listen(folder: Path, name: str) -> tuple[socket.socket, Path]:
    """Make this engine's socket, which only its user may open, as NAME-PID.sock, with a few letters
    behind it where another container's engine has that name. Removes those of engines that are
    gone. Raises FolderRefused, OSError."""
    prepare_folder(folder)
    with suppress(OSError):
        _remove_stale(folder)
    hidden = folder / f".{secrets.token_hex(6)}"
    server = socket.socket(socket.AF_UNIX)
    try:
        with short_path(hidden) as short:
            server.bind(short)
        # Nobody connects before it listens, nor takes it for stale before it has its name.
        hidden.chmod(0o600)
        server.listen(QUEUE)
        return server, _publish(hidden, folder, f"{name}-{os.getpid()}")
    except BaseException:
        server.close()
        raise
    finally:
        with suppress(OSError):
            hidden.unlink()


def _publish(hidden: Path, folder: Path, name: str) -> Path:
    """Give a listening socket the name, or a longer one; never another engine's."""
    while True:
        path = folder / f"{name}{SUFFIX}"
        try:
            os.link(hidden, path)
        except FileExistsError:
            name += f"-{secrets.token_hex(1)}"
        else:
            return path


class ControlServer:
    """Listens in a folder until it is closed, and answers by these verbs."""

    def __init__(self, folder: Path, name: str, verbs: Mapping[str, Verb]) -> None:
        """`name`: of the engine, to which its process number is added. Raises FolderRefused,
        OSError and RuntimeError if it can't listen there."""
        self._verbs = verbs
        self._server, self.path = listen(folder, name)
        self._answering = threading.Lock()
        """Of several answers at once, each would pause for itself alone."""
        self._closed = threading.Event()
        try:
            for run in (self._touch, *[self._serve] * MAX_CLIENTS):
                start_thread(run, "control")
        except RuntimeError:
            self.close()
            raise

    @property
    def engine(self) -> str:
        """The engine's name, as commands take it."""
        return self.path.stem

    def _touch(self) -> None:
        while not self._closed.wait(TOUCH_SECONDS):
            with suppress(OSError):
                os.utime(self.path)

    def _serve(self) -> None:
        while self._server.fileno() >= 0:  # it is not closed
            try:
                client, _ = self._server.accept()
            except OSError:  # it closes, or the client has hung up, or descriptors are short
                time.sleep(0.05)
                continue
            with client, suppress(OSError):
                self._serve_client(client, time.monotonic() + CLIENT_SECONDS)

    def _serve_client(self, client: socket.socket, until: float) -> None:
        """Read a question and send its answer. Raises OSError, also when the time is `until`."""
        question = bytearray()
        while not question.endswith(b"\n"):
            client.settimeout(max(0.0, until - time.monotonic()))
            part = client.recv(1 << 16)
            question += part
            if not part or len(question) > MAX_QUESTION:
                return
        answer = self._answer_in_turn(question)
        client.settimeout(max(0.0, until - time.monotonic()))
        client.sendall(answer)

    def _answer_in_turn(self, question: bytearray) -> bytes:
        with self._answering:
            began = time.monotonic()
            answer = {"version": PROTOCOL, "engine": self.engine, **self._answer(question)}
            # In parts: the encoder of all at once would keep the interpreter while it runs.
            text = "".join(json.JSONEncoder().iterencode(answer))
            time.sleep(min(LONGEST_PAUSE, PAUSES * (time.monotonic() - began)))
        return text.encode() + b"\n"

    def _answer(self, line: bytearray) -> dict[str, Any]:
        try:
            question = Question.model_validate_json(line)
            if question.verb not in self._verbs:
                hint = did_you_mean(question.verb, self._verbs) or f"use {one_of(self._verbs)}"
                return {"error": f"no verb {question.verb!r} here; {hint}"}
            return {"answer": self._verbs[question.verb](question.parameters)}
        except ValidationError as error:
            problem = error.errors()[0]
            where = ".".join(map(str, problem["loc"]))
            return {"error": f"no question: {where + ': ' if where else ''}{problem['msg']}"}
        except QuestionRefused as error:
            return {"error": str(error)}
        except RuntimeError as error:  # something grew while it was read
            return {"error": f"ask again: {error}"}

    def close(self) -> None:
        """Stop answering, and remove the socket. Does not wait for clients."""
        self._closed.set()
        with suppress(OSError):  # a socket that stays is removed by the next engine
            self.path.unlink()
        with suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)  # wakes the threads
        self._server.close()
