"""Opens a chain's explanations, and answers questions about requests over a Unix socket.

Daemon threads do it all: accept, read a question, answer, close. Nothing waits for them, and a
client costs one of them a bounded time and memory, whatever that client does.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from spec.chain import ExplainSpec
from tiers.concurrency.executors import widen_affinity
from tiers.errors import KVTiersError
from tiers.explain.accounts import Accounts
from tiers.explain.explanations import Explanations
from tiers.explain.notes import RequestNotes
from tiers.explain.spans import Spans, engine_tracer

logger = logging.getLogger(__name__)

MAX_QUESTION = 4096
"""Bytes of a question; a longer one is not answered."""
MAX_CLIENTS = 4
"""Clients at once, each on a thread; more wait in the socket's queue."""
QUEUE = 64
"""Clients that wait; more are turned away."""
CLIENT_SECONDS = 5.0
"""From a client's connection to the end of its answer; one that takes longer is cut off."""
SUFFIX = ".sock"
Answer = Callable[[bytes], bytes]
"""From a question, one line, to the whole answer. Never raises."""
MAX_ANSWERS = 1000
"""Requests in one answer."""
Count = Annotated[int, Field(ge=1, le=MAX_ANSWERS)]


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
        hidden.rename(path)
    except BaseException:
        server.close()
        hidden.unlink(missing_ok=True)
        raise
    return server, path


class ExplainServer:
    """Listens in a folder until it is closed."""

    def __init__(self, folder: Path, answer: Answer) -> None:
        """Raises FolderRefused, OSError and RuntimeError if it can't listen there."""
        self._answer = answer
        self._server, self.path = listen(folder)
        self._is_closed = False
        for _ in range(MAX_CLIENTS):
            threading.Thread(target=self._serve, name="kvtiers-explain", daemon=True).start()

    def _serve(self) -> None:
        widen_affinity()
        while not self._is_closed:
            try:
                client, _ = self._server.accept()
            except OSError:  # it is closed, or the client has hung up, or descriptors are short
                time.sleep(0.05)
                continue
            with client, suppress(OSError):
                self._serve_client(client, time.monotonic() + CLIENT_SECONDS)

    def _serve_client(self, client: socket.socket, until: float) -> None:
        """Read a question and send its answer. Raises OSError, also when the time is `until`."""
        question = b""
        while not question.endswith(b"\n"):
            client.settimeout(max(0.0, until - time.monotonic()))
            part = client.recv(MAX_QUESTION)
            question += part
            if not part or len(question) > MAX_QUESTION:
                return
        answer = self._answer(question)
        client.settimeout(max(0.0, until - time.monotonic()))
        client.sendall(answer)

    def close(self) -> None:
        """Stop answering, and remove the socket. Does not wait for clients."""
        self._is_closed = True
        self.path.unlink(missing_ok=True)
        with suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)  # wakes the threads
        self._server.close()


class ExplainQuestion(BaseModel):
    """One of: a request by its name or the beginning of it, the last ones, the slowest ones."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    request: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    last: Count | None = None
    slowest: Count | None = None

    def choose(self, known: list[RequestNotes]) -> list[RequestNotes]:
        """Which of all known requests, oldest first, it asks for."""
        if self.request is not None:
            same = [notes for notes in known if notes.request_id == self.request]
            begin = [notes for notes in known if notes.request_id.startswith(self.request)]
            return (same or begin)[-MAX_ANSWERS:]
        if self.slowest is not None:
            return sorted(known, key=waited, reverse=True)[: self.slowest]
        return known[-(self.last or 1) :]


def waited(notes: RequestNotes) -> float:
    """Seconds that a request waited for tiers: for lookups, for its own loads and for others'."""
    return sum(notes.waited for notes in list(notes.attempts))


def answers(explanations: Explanations) -> Callable[[bytes], bytes]:
    """What answers questions about these requests: a line for each, or one with an `error`."""
    accounts = Accounts(explanations.names, explanations.block_tokens)

    def answer(line: bytes) -> bytes:
        try:
            question = ExplainQuestion.model_validate_json(line)
        except ValidationError as error:
            return _lines([{"error": f"no question: {error.errors()[0]['msg']}"}])
        try:
            return _lines(map(accounts.of, question.choose(explanations.all())))
        except RuntimeError as error:  # something grew while it was read
            return _lines([{"error": f"ask again: {error}"}])

    return answer


def _lines(accounts: Iterable[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(notes).encode() + b"\n" for notes in accounts)


def open_explanations(
    spec: ExplainSpec | None, names: Sequence[str], block_tokens: int
) -> Explanations | None:
    """Open what explains how requests of a chain of these tiers are served; None: nothing does.

    A folder that can't be used is one line in the log: the engine serves without.
    """
    if spec is None:
        return None
    tracer = engine_tracer()
    spans = None if tracer is None else Spans(tracer, Accounts(names, block_tokens), block_tokens)
    ended = None if spans is None else spans.ended
    explanations = Explanations(names, block_tokens, spec.requests, spec.memory, ended)
    if spans is not None:
        explanations.on_close(spans.close)
    try:
        server = ExplainServer(spec.folder, answers(explanations))
    except (FolderRefused, OSError, RuntimeError) as error:
        logger.warning("`kvtiers explain` finds nothing: no socket in explain.folder: %s", error)
        return explanations if spans is not None else None
    logger.info("`kvtiers explain --folder %s` tells why requests are served so", spec.folder)
    explanations.on_close(server.close)
    return explanations
