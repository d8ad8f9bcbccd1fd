"""Asks all engines whose sockets lie in a folder."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tiers.errors import KVTiersError

SECONDS = 10.0
"""How long one engine may take to answer."""
MAX_ANSWER = 64 << 20
"""Bytes of one engine's answer; more is an error."""


class NoAnswer(KVTiersError):
    """No engine answered; says why, and what would do."""


def ask(
    folder: Path, question: dict[str, Any], warn: Callable[[str], None] = lambda problem: None
) -> list[dict[str, Any]]:
    """Ask the engines of a folder; return their accounts, each with its `engine`. `warn` is called
    with the reason why one did not answer. Raises NoAnswer where none did."""
    sockets = [folder] if folder.is_socket() else sorted(folder.glob("*.sock"))
    if not sockets:
        raise NoAnswer(
            f"no engine listens in {folder}. Give the folder that the chain names under explain, "
            "on the engine's host and as its user."
        )
    accounts: list[dict[str, Any]] = []
    gone: list[str] = []
    problems: list[str] = []
    for path in sockets:
        try:
            accounts += [{"engine": path.stem, **account} for account in _ask(path, question)]
        except ConnectionRefusedError:
            gone.append(f"{path}: its engine is gone")
        except (OSError, ValueError, RecursionError) as error:
            problems.append(f"{path}: {error}")
    if len(problems) + len(gone) == len(sockets):
        raise NoAnswer("no engine answered. " + "; ".join([*problems, *gone]))
    for problem in problems:
        warn(problem)
    return accounts


def _ask(path: Path, question: dict[str, Any]) -> list[dict[str, Any]]:
    until = time.monotonic() + SECONDS
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(SECONDS)
        connection.connect(str(path))
        connection.sendall(json.dumps(question).encode() + b"\n")
        answer = b""
        while part := connection.recv(1 << 16):
            answer += part
            if len(answer) > MAX_ANSWER or time.monotonic() > until:
                raise ValueError("its answer is too long, or too slow")
    accounts = [json.loads(line) for line in answer.splitlines()]
    for account in accounts:
        if not isinstance(account, dict) or "error" in account:
            raise ValueError(f"it answers: {account}")
    return accounts
