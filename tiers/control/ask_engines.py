"""Asks the engines whose sockets lie in a folder."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tiers.control.control_server import PROTOCOL, SUFFIX, short_path
from tiers.errors import KVTiersError
from tiers.paths import foreign

SECONDS = 10.0
"""How long one engine may take to answer."""
MAX_ANSWER = 64 << 20
"""Bytes of one engine's answer; more is an error."""
POLL_SECONDS = 0.1
BEGIN_SECONDS = 20.0
"""A change that no step has begun by then is withdrawn."""
MOST_SECONDS = 300.0
"""No change takes longer; an engine that hangs is left alone."""


class NoAnswer(KVTiersError):
    """No engine answered; says why, and what would do."""


class EngineAnswer(NamedTuple):
    """What one engine answered."""

    engine: str
    content: Any


def sockets(folder: Path, engine: str | None = None) -> list[Path]:
    """Return the sockets of a folder: all, or those of the engines with this name, or whose names
    begin with it. Raises NoAnswer where there is none, or others could answer in its place."""
    place = folder.parent if folder.is_socket() else folder
    found = sorted(folder.glob(f"*{SUFFIX}")) if place == folder else [folder]
    why = foreign(place.lstat()) if found else ""
    if why or not found:
        what = f"is asked: {place} {why}" if why else f"listens in {place}"
        raise NoAnswer(
            f"no engine {what}. Run this on the engine's host and as its user; if its chain has a "
            "control.folder, name that by --folder"
        )
    if engine is None or place != folder:
        return found
    same = [path for path in found if path.stem == engine]
    named = same or [path for path in found if path.stem.startswith(engine)]
    if not named:
        names = ", ".join(path.stem for path in found)
        raise NoAnswer(f"no engine is called {engine!r} in {folder}; there: {names}")
    return named


def ask(
    folder: Path,
    verb: str,
    parameters: Mapping[str, Any] | None = None,
    engine: str | None = None,
    warn: Callable[[str], None] = lambda problem: None,
) -> list[EngineAnswer]:
    """Ask the engines of a folder, or `engine` alone; see `sockets`. `warn` is called with the
    reason why one did not answer. Raises NoAnswer where none did."""
    answers: list[EngineAnswer] = []
    gone: list[str] = []
    problems: list[str] = []
    for path in sockets(folder, engine):
        try:
            answers.append(ask_socket(path, verb, parameters or {}))
        except ConnectionRefusedError:
            gone.append(f"{path}: its engine is gone")
        except (OSError, ValueError, RecursionError) as error:
            problems.append(f"{path}: {error}")
    if not answers:
        raise NoAnswer("no engine has an answer. " + "; ".join([*problems, *gone]))
    for problem in problems:
        warn(problem)
    return answers


def ask_socket(path: Path, verb: str, parameters: Mapping[str, Any]) -> EngineAnswer:
    """Ask the engine of one socket. Raises ConnectionRefusedError or FileNotFoundError where it is
    gone; another OSError, ValueError or RecursionError where it has no answer."""
    question = {"version": PROTOCOL, "verb": verb, "parameters": dict(parameters)}
    with socket.socket(socket.AF_UNIX) as connection, short_path(path) as short:
        connection.settimeout(SECONDS)
        connection.connect(short)
        connection.sendall(json.dumps(question).encode() + b"\n")
        answer = json.loads(b"".join(_parts(connection)))
    if not isinstance(answer, dict) or "answer" not in answer:
        why = answer.get("error", answer) if isinstance(answer, dict) else answer
        raise ValueError(f"it answers: {why}")
    return EngineAnswer(path.stem, answer["answer"])


def await_change(
    answer: dict[str, Any], ask_change: Callable[[dict[str, Any]], Any]
) -> dict[str, Any]:
    """Wait for the end of a change that an engine has begun by `answer`, which is returned with
    what it says then. It may still not be over. `ask_change`: by the verb of that name."""
    began = time.monotonic()
    while not answer["over"] and (waited := time.monotonic() - began) < MOST_SECONDS:
        time.sleep(POLL_SECONDS)
        question = {"change": answer["change"], "withdraw": waited > BEGIN_SECONDS}
        answer = answer | ask_change(question)
    return answer


def _parts(connection: socket.socket) -> Iterator[bytes]:
    until, size = time.monotonic() + SECONDS, 0
    while part := connection.recv(1 << 16):
        size += len(part)
        if size > MAX_ANSWER or time.monotonic() > until:
            raise ValueError("its answer is too long, or too slow")
        yield part
